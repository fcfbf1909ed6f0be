"""Score a model: the loss of a split, and its translations against the references by sacreBLEU and chrF."""

import datasets
import evaluate
import torch
from accelerate.utils import gather_object
from sacrebleu.metrics import BLEU, CHRF

from ..commands.translate import Translator
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, label_smoothed_cross_entropy


class TranslationQuality(evaluate.Metric):
    """BLEU (13a, cased) and chrF2 of translations with one reference each, with the signatures of sacreBLEU.

    The metrics that `evaluate.load` offers are downloaded; this one is made and computed without a network.
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="Corpus BLEU and chrF by sacreBLEU, with their signatures.",
            citation="Post, M. (2018). A Call for Clarity in Reporting BLEU Scores. WMT.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict:
        scores = {}
        for name, metric in [("bleu", BLEU()), ("chrf", CHRF())]:
            scores[name] = metric.corpus_score(predictions, [references]).score
            scores[f"{name}_signature"] = str(metric.get_signature())
        return scores


@torch.no_grad()
def evaluate_loss(model: VanillaTransformerForConditionalGeneration, batches, accelerator) -> float:
    """Cross-entropy in nats per real target token, without label smoothing, over the batches of all processes."""
    model.eval()
    parts = [(0.0, 0)]  # the loss and the number of tokens of each batch
    for batch in batches:
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        labels = batch.pop("labels")
        with accelerator.autocast():
            hidden = model.model(
                **batch, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels), use_cache=False
            ).last_hidden_state
            loss = label_smoothed_cross_entropy(hidden, model.lm_head, labels, num_items_in_batch=1)
        parts.append((loss.item(), int((labels != -100).sum())))
    losses, tokens = zip(*gather_object(parts), strict=True)
    return sum(losses) / sum(tokens)


def translate_split(translator: Translator, sources: list[str], accelerator, label: str, **generation) -> list[str]:
    """Translations of all `sources`, in order, on every process; each process translates its share."""
    # Neighbours in length go to different processes, which then have equally much to do.
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    share = order[accelerator.process_index :: accelerator.num_processes]
    progress = label if accelerator.is_local_main_process else None
    translated = translator([sources[index] for index in share], progress, **generation)
    by_index = dict(gather_object(list(zip(share, translated, strict=True))))
    return [by_index[index] for index in range(len(sources))]
