"""Loss and translations of a split, on one process and on several."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import datasets
import pytest
import torch

from vanilla_transformer.data.batches import evaluation_batches
from vanilla_transformer.evaluation import splits as evaluation
from vanilla_transformer.evaluation.scores import Scorer
from vanilla_transformer.evaluation.splits import (
    SplitEvaluator,
    choose_examples,
    evaluate_loss,
    progress_lines,
    translate_split,
)


def in_processes(run, num_processes: int, monkeypatch) -> list:
    """The results of run(process_index) in threads that gather objects as processes would."""
    parts, all_have_given = [], Barrier(num_processes)

    def gather(part: list) -> list:
        parts.extend(part)
        all_have_given.wait(60)
        return parts

    monkeypatch.setattr(evaluation, "gather_object", gather)
    with ThreadPoolExecutor(num_processes) as pool:
        return list(pool.map(run, range(num_processes)))


@pytest.fixture
def split() -> datasets.Dataset:
    rows = []
    for source_length, target_length in torch.randint(2, 16, (20, 2)).tolist():
        ids, labels = ([*torch.randint(3, 37, (n - 1,)).tolist(), 2] for n in (source_length, target_length))
        lengths = {"source_length": source_length, "target_length": target_length}
        rows.append({"input_ids": ids, "labels": labels, **lengths})
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_loss_is_the_mean_over_all_tokens(make_model, split, max_tokens, byte_tokenizer, accelerator):
    """For any batches; without label smoothing, and without dropout although the model was in training mode."""
    model = make_model(dropout=0.5).eval()
    total = tokens = 0
    with torch.no_grad():
        for row in split:
            labels = torch.tensor([row["labels"]])
            logits = model(torch.tensor([row["input_ids"]]), labels=labels).logits
            log_probabilities = logits.double().log_softmax(-1)
            total -= log_probabilities.gather(2, labels[..., None]).sum().item()
            tokens += labels.numel()
    batches = evaluation_batches(split, byte_tokenizer, max_tokens)
    assert {1: 20, 10_000: 1}.get(max_tokens, len(batches)) == len(batches)
    assert evaluate_loss(model.train(), batches, accelerator) == pytest.approx(total / tokens, rel=1e-5)


def test_loss_of_several_processes_equals_that_of_one(make_model, split, byte_tokenizer, accelerator, monkeypatch):
    model = make_model()
    expected = evaluate_loss(model, evaluation_batches(split, byte_tokenizer, 40), accelerator)
    for num_processes in [2, 30]:  # some of the 30 have no batch at all

        def run(index, n=num_processes):
            return evaluate_loss(model, evaluation_batches(split, byte_tokenizer, 40, index, n), accelerator)

        assert in_processes(run, num_processes, monkeypatch) == pytest.approx([expected] * num_processes, rel=1e-6)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_every_sentence_is_translated_once_and_in_order(num_processes, monkeypatch):
    sources = ["ccc", "a", "", "dddd", "bb"]
    asked = []

    def translator(texts, progress):
        asked.extend(texts)
        return [text.upper() for text in texts]

    def run(index):
        return translate_split(translator, sources, None, index, num_processes)

    assert in_processes(run, num_processes, monkeypatch) == [["CCC", "A", "", "DDDD", "BB"]] * num_processes
    assert sorted(asked) == sorted(sources)


UNSPACED, SHORT = "我今天看到一只狗。", "Datei öffnen"
WARNINGS = [(UNSPACED, None, ["four words, as 13a", "--bleu_tokenize zh"]), (UNSPACED, "char", [])]
WARNINGS += [(UNSPACED, "13a", ["four words, as 13a"]), (SHORT, None, ["four words, as 13a"])]


@pytest.mark.parametrize("text, bleu_tokenize, said", WARNINGS)
def test_warnings_if_bleu_is_0_but_chrf_is_not_or_its_tokenizer_does_not_fit(
    text, bleu_tokenize, said, make_model, byte_tokenizer, split, accelerator, monkeypatch, capsys
):
    """Perfect translations without spaces, which 13a takes for single words, and short ones."""
    model = make_model(vocab_size=len(byte_tokenizer))
    texts = [text] * len(split)
    split = split.add_column("source", texts).add_column("target", texts)
    monkeypatch.setattr(evaluation, "translate_split", lambda *args, **kwargs: texts)
    evaluator = SplitEvaluator(byte_tokenizer, Scorer("to", bleu_tokenize), accelerator, 99, num_examples=2)
    results = evaluator.evaluate(model, split, "eval", step=1200)
    assert results["examples"] == [dict.fromkeys(("source", "reference", "translation"), texts[0])] * 2
    assert results["eval_chrf"] > 99
    assert (results["eval_exact_match"], results["eval_word_error_rate"]) == (100.0, 0.0)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("eval: loss ") and first.endswith(", 100.0% exact at step 1,200")
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(warnings) == len(said) and all(part in line for part, line in zip(said, warnings, strict=True))


def test_processes_have_the_same_errors_of_normalized_texts(
    make_model, split, byte_tokenizer, accelerator, monkeypatch
):
    """Only the scorer of the main process is fitted to the tokenizer."""
    translations, targets = ["5 \u03a9"] * len(split), ["5 \u2126"] * len(split)
    split = split.add_column("source", targets).add_column("target", targets)
    monkeypatch.setattr(evaluation, "translate_split", lambda *args, **kwargs: translations)
    model, fitted, scored = make_model(), Scorer(normalization="nfc"), []
    second = {"process_index": 1, "num_processes": 2, "is_main_process": False, "is_local_main_process": False}
    other = SimpleNamespace(**second, autocast=accelerator.autocast, device=accelerator.device)
    monkeypatch.setattr(evaluation, "gather_object", lambda part: scored.extend(part) or list(scored))
    monkeypatch.setattr(evaluation, "evaluate_loss", lambda *args: 1.0)
    one = SplitEvaluator(byte_tokenizer, fitted, accelerator, 99).evaluate(model, split, "eval")
    two = SplitEvaluator(byte_tokenizer, Scorer(), other, 99).evaluate(model, split, "eval")
    assert one == two and one["eval_word_error_rate"] == 0


def test_a_translation_that_goes_on_and_on_is_printed_in_part():
    numbers = {"loss": 9.0, "bleu": 0.0, "chrf": 0.0, "exact_match": 0.0}
    *_, line = progress_lines(numbers, [{"translation": "again\n" * 100}], "eval", 1)
    assert line == f"  translation  {'again ' * 50}".rstrip() + "…"


@pytest.mark.parametrize(
    ("rights", "count", "chosen"),
    [
        ("rrrrwr", 3, [0, 1, 4]),
        ("wwwwwr", 3, [0, 1, 5]),
        ("rwrrww", 3, [0, 1, 2]),
        ("rrrr", 3, [0, 1, 2]),
        ("rw", 1, [0]),
        ("rw", 0, []),
        ("w", 3, [0]),
    ],
)
def test_examples_are_the_first_with_a_right_and_a_wrong_one(rights, count, chosen):
    rows = [{"source": str(n), "reference": "r", "translation": right} for n, right in enumerate(rights)]
    assert [int(row["source"]) for row in choose_examples(rows, count)] == chosen
