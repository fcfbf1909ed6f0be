"""Evaluates a model on a split: its loss, and its translations against the references; and tunes its search."""

import itertools
import sys
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.batches import evaluation_batches
from ..errors import shortened
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..translation_vanilla_transformer import BaseTranslator
from .further_metrics import OURS, greater_by_name, not_measured
from .scores import Scorer, explain_sameness, explain_zero
from .systems import count_errors
from .tuning import tune


@dataclass
class SplitEvaluator:
    """Scores a model on a split, and tunes its search.

    Attributes:
        tokenizer: Of the model.
        scorer: Counts BLEU, chrF and further metrics.
        accelerator: Of this process; each process translates its share.
        max_tokens: Source tokens in a batch.
        num_examples: Translations that are shown and returned.
    """

    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    accelerator: Accelerator
    max_tokens: int
    num_examples: int = 0

    def evaluate(self, model, split: Dataset, prefix: str, step: int | None = None) -> dict:
        """Loss (nats per target token), scores and errors of a split, with some translations, which are also printed.

        Every process returns the same results. `step` is printed.

        Returns:
            A dictionary with the keys `{prefix}_loss`, `{prefix}_bleu`, `{prefix}_chrf`, `{prefix}_exact_match`,
            `{prefix}_word_error_rate` (both in percent), `{prefix}_{name}` for each further metric of the scorer,
            the signatures of both, `{prefix}_bleu_signature` and `{prefix}_chrf_signature`, and `examples`, a list of
            dictionaries with `source`, `reference` and `translation`.
        """
        accelerator, scorer = self.accelerator, self.scorer
        shares = {"process_index": accelerator.process_index, "num_processes": accelerator.num_processes}
        batches = evaluation_batches(split, self.tokenizer, self.max_tokens, **shares)
        loss = evaluate_loss(model, batches, accelerator)
        sources, references = list(split["source"]), references_of(split)
        translator = BaseTranslator(model, self.tokenizer, self.max_tokens)
        with accelerator.autocast():
            is_shown = accelerator.is_local_main_process and sys.stderr.isatty()
            label = f"Translating {len(sources):,}" if is_shown else None
            translations = translate_split(translator, sources, label, **shares)
        # By the main process alone: a metric may be large, and all must agree on which model is the best.
        scored = []
        if accelerator.is_main_process:
            errors = count_errors(translations, references, scorer)
            scored = [(scorer.score(translations, references, sources), errors)]
        ((scores, errors),) = gather_object(scored)
        names = ("bleu_signature", "chrf_signature")
        signatures = {name: scores[name] for name in names}
        numbers = {"loss": loss} | {name: scores[name] for name in scores if name not in names} | errors
        keys = ("source", "reference", "translation")
        rows = [dict(zip(keys, row, strict=True)) for row in zip(sources, split["target"], translations, strict=True)]
        examples = choose_examples(rows, self.num_examples)
        if accelerator.is_main_process:
            tqdm.write("\n".join(progress_lines(numbers, examples, prefix, step)))
            streams = scorer.streams(references)
            notes = [explain_zero(scorer.bleu, scores["chrf"], scorer.prepare(translations), streams)]
            notes += [explain_sameness(translations, references), scorer.advise_tokenizer(references)]
            tqdm.write("".join(f"warning: {note}\n" for note in filter(None, notes)), end="")
        found = {f"{prefix}_{name}": value for name, value in (numbers | signatures).items()}
        return found | {"examples": examples}

    def tune(self, model, split: Dataset, by: str, greater_is_better: bool | None) -> list[dict]:
        """What [`tune`] returns for a split, on this process alone.

        Chooses by BLEU if `by` is the loss, which does not depend on the search.
        """
        model.eval()
        if by == "loss":
            by, greater_is_better = "bleu", True
        is_better = greater_by_name(by) if greater_is_better is None else greater_is_better
        with self.accelerator.autocast():
            translator = BaseTranslator(model, self.tokenizer, self.max_tokens)
            return tune(translator, list(split["source"]), references_of(split), self.scorer, by, is_better)


def choose_examples(rows: list[dict], count: int) -> list[dict]:
    """The first rows, but with both a right and a wrong translation among them if there are any."""
    chosen = rows[:count]
    for is_right in (True, False):
        of_this_kind = (row for row in rows if (row["translation"] == row["reference"]) is is_right)
        first = next(of_this_kind, None)
        if count > 1 and first and first not in chosen:
            chosen[-1] = first
    return chosen


def progress_lines(numbers: dict[str, float], examples: list[dict], prefix: str, step: int | None) -> list[str]:
    """The scores of a split in a line, and its examples, cut: early in a run, translations often go on and on."""
    shown = [f"loss {numbers['loss']:.3f}", f"BLEU {numbers['bleu']:.2f}", f"chrF {numbers['chrf']:.2f}"]
    shown += [f"{numbers['exact_match']:.1f}% exact"]
    shown += [f"{name} {number:.4g}" for name, number in numbers.items() if name not in OURS]
    when = "" if step is None else f" at step {step:,}"
    texts = [(key, shortened(text, 300)) for example in examples for key, text in example.items()]
    return [f"{prefix}: {', '.join(shown)}{when}", *(f"  {key:<12} {text}" for key, text in texts)]


def references_of(split: Dataset) -> list[str] | list[list[str]]:
    """The references of each pair: its target, or a list of it and the further ones of the column `references`."""
    targets = [target or "" for target in split["target"]]
    if "references" not in split.column_names:
        return targets
    return [[target, *(others or ())] for target, others in zip(targets, split["references"], strict=True)]


def prepare_scorer(scorer: Scorer, tokenizer, splits: dict[str, Dataset], best: str):
    """Tries the further metrics of the scorer, and fits it to the tokenizer and the references of all splits.

    Raises UserError if a metric cannot be used, or none of the numbers is called `best`.
    """
    scored = [splits[name] for name in ("validation", "test") if name in splits]
    numbers = list(OURS)
    for split in scored:
        numbers += scorer.metrics.load(references_of(split), list(split["source"]))
    if best not in numbers:
        raise not_measured(f"--metric_for_best_model {best}", dict.fromkeys(numbers))
    if doubt := scorer.fit(tokenizer, itertools.chain(*map(references_of, scored))):
        print(f"warning: {doubt}")


@torch.no_grad()
def evaluate_loss(model: VanillaTransformerForConditionalGeneration, batches, accelerator: Accelerator) -> float:
    """Cross-entropy in nats per target token, without label smoothing, over the batches of all processes."""
    model.eval()
    parts = [(0.0, 0)]  # sum of the loss and number of tokens of each batch; a process may have no batch
    for batch in batches:
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        with accelerator.autocast():
            loss = model(**batch, num_items_in_batch=1, output_logits=False).loss
        parts.append((loss.item(), int((batch["labels"] != -100).sum())))
    losses, tokens = zip(*gather_object(parts), strict=True)
    return sum(losses) / sum(tokens)


def translate_split(
    translator: BaseTranslator, sources: list[str], label: str | None, process_index: int, num_processes: int
) -> list[str]:
    """Divides the sources among the processes, and returns all translations, in order, on every process."""
    # Neighbors in length go to different processes, so that all have about the same work.
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    share = order[process_index::num_processes]
    translated = translator([sources[index] for index in share], label)
    by_index = dict(gather_object(list(zip(share, translated, strict=True))))
    return [by_index[index] for index in range(len(sources))]
