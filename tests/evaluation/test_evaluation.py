"""Scores are sacreBLEU's, losses the model's own. Run: pytest tests/test_evaluation.py"""

import socket
from types import SimpleNamespace

import datasets
import pytest
import sacrebleu
import torch
from accelerate import Accelerator

from vanilla_transformer.data.batches import evaluation_batches
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.evaluation import scores as evaluation
from vanilla_transformer.evaluation.scores import TranslationQuality, evaluate_loss, translate_split

REFERENCES = [
    "Der Hund schläft heute nicht.",
    "Ein Mann fährt mit dem Rad.",
    "Zwei Kinder spielen im Park.",
    "纽约是城市。",
]
TRANSLATIONS = {
    "perfect": REFERENCES,
    "close": ["der Hund schläft heute.", "Ein Mann fährt Rad.", "Zwei Kinder spielen im Park .", "纽约 是 城市。"],
    "wrong": ["a", "b", "c", "d"],
    "empty": ["", "", "", ""],
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def in_turn(run, num_processes: int, monkeypatch) -> list:
    """Results of run(process_index) in processes one after the other: first each gives its part, then gets all."""

    class GivenError(Exception):
        pass

    parts = []

    def give(part):
        parts.append(part)
        raise GivenError

    monkeypatch.setattr(evaluation, "gather_object", give)
    for index in range(num_processes):
        with pytest.raises(GivenError):
            run(index)
    monkeypatch.setattr(evaluation, "gather_object", lambda part: [item for part in parts for item in part])
    return [run(index) for index in range(num_processes)]


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_scores_are_those_of_sacrebleu(name):
    scores = TranslationQuality().compute(predictions=TRANSLATIONS[name], references=REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(TRANSLATIONS[name], [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(TRANSLATIONS[name], [REFERENCES]).score
    if name == "perfect":
        assert scores["bleu"] == pytest.approx(100) and scores["chrf"] == pytest.approx(100)
    if name == "close":
        assert 5 < scores["bleu"] < 95 and 5 < scores["chrf"] < 95


def test_signatures_say_how_it_was_scored():
    scores = TranslationQuality().compute(predictions=REFERENCES, references=REFERENCES)
    version = f"version:{sacrebleu.__version__}"
    for part in ["nrefs:1", "case:mixed", "tok:13a", "smooth:exp", version]:
        assert part in scores["bleu_signature"].split("|")
    for part in ["nrefs:1", "case:mixed", "nc:6", "nw:0", version]:
        assert part in scores["chrf_signature"].split("|")
    assert scores.keys() == {"bleu", "chrf", "bleu_signature", "chrf_signature"}


def test_scores_add_up_in_batches_as_at_once():
    """The usual way of an `evaluate.Metric`."""
    metric = TranslationQuality()
    for translation, reference in zip(TRANSLATIONS["close"], REFERENCES, strict=True):
        metric.add(prediction=translation, reference=reference)
    at_once = TranslationQuality().compute(predictions=TRANSLATIONS["close"], references=REFERENCES)
    assert metric.compute() == at_once


# ---------------------------------------------------------------------------------------------------------------- loss


@pytest.fixture
def split() -> datasets.Dataset:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(20):
        source, target = (torch.randint(3, 37, (int(n),), generator=generator) for n in torch.randint(1, 15, (2,)))
        rows.append({"input_ids": [*source.tolist(), 2], "labels": [*target.tolist(), 2]})
    lengths = [{"source_length": len(row["input_ids"]), "target_length": len(row["labels"])} for row in rows]
    return datasets.Dataset.from_list([row | length for row, length in zip(rows, lengths, strict=True)])


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a"], 260)


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_the_loss_is_the_mean_over_all_tokens(make_model, split, max_tokens, tokenizer):
    """However the pairs are batched; without smoothing, and without dropout although the model comes in training."""
    model = make_model(dropout=0.5).eval()
    total = tokens = 0
    with torch.no_grad():
        for row in split:
            labels = torch.tensor([row["labels"]])
            logits = model(torch.tensor([row["input_ids"]]), labels=labels).logits
            log_probabilities = logits.double().log_softmax(-1)
            total -= log_probabilities.gather(2, labels[..., None]).sum().item()
            tokens += labels.numel()
    batches = evaluation_batches(split, tokenizer, max_tokens)
    assert {1: 20, 10_000: 1}.get(max_tokens, len(batches)) == len(batches)
    loss = evaluate_loss(model.train(), batches, Accelerator(cpu=True))
    assert loss == pytest.approx(total / tokens, rel=1e-5)


def test_the_loss_of_all_processes_is_that_of_one(make_model, split, tokenizer, monkeypatch):
    model, accelerator = make_model(), Accelerator(cpu=True)
    expected = evaluate_loss(model, evaluation_batches(split, tokenizer, 40), accelerator)
    for num_processes in [2, 30]:  # some of the 30 have no batch at all
        results = in_turn(
            lambda index, n=num_processes: evaluate_loss(
                model, evaluation_batches(split, tokenizer, 40, index, n), accelerator
            ),
            num_processes,
            monkeypatch,
        )
        assert results == pytest.approx([expected] * num_processes, rel=1e-6)


# -------------------------------------------------------------------------------------------------------- translations


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_every_sentence_is_translated_once_and_in_order(num_processes, monkeypatch):
    sources = ["ccc", "a", "", "dddd", "bb"]
    asked = []

    def translator(texts, progress, **generation):
        assert generation == {"num_beams": 3}
        asked.extend(texts)
        return [text.upper() for text in texts]

    def run(index):
        accelerator = SimpleNamespace(process_index=index, num_processes=num_processes, is_local_main_process=False)
        return translate_split(translator, sources, accelerator, "x", num_beams=3)

    assert in_turn(run, num_processes, monkeypatch) == [["CCC", "A", "", "DDDD", "BB"]] * num_processes
    assert sorted(asked) == sorted(sources * 2)  # each process was run twice
