"""Modules of the evaluate library beside BLEU and chrF, here local ones."""

import evaluate
import pytest
from helpers import write_metric

from vanilla_transformer.errors import UserError
from vanilla_transformer.evaluation.evaluate_module import TranslationScores
from vanilla_transformer.evaluation.further_metrics import Metrics, greater_by_name
from vanilla_transformer.evaluation.scores import Scorer

LISTS = "predictions=TEXT, references=datasets.List(TEXT)"
WITH_SOURCES = "sources=TEXT, predictions=TEXT, references=TEXT"
LENGTHS = """errors = [scale * abs(len(one) - len(two)) for one, two in zip(predictions, references)]
        return {"length_error": numpy.float64(max(errors)), "each": errors, "name": "x"}"""


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """write_module(name, body, ...) -> the path of a script with a module of evaluate."""
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "cache"))
    return lambda name, *parts: write_metric(tmp_path / f"{name}.py", *parts)


@pytest.fixture
def lengths(write_module) -> str:
    return write_module("lengths", LENGTHS)


@pytest.fixture
def exact(write_module) -> str:
    return write_module("exact", 'return {"exact_match": float(predictions == references)}')


def test_the_numbers_of_two_modules_stand_beside_bleu_and_chrf(lengths, exact):
    """A list becomes its mean, text is left out, and a name of ours is preceded by that of the module."""
    metrics = Metrics([lengths, exact], ["lengths.scale=2"])
    scores = Scorer(metrics=metrics).score(["a", "bb"], ["aaa", "bb"])
    expected = {"length_error": 4.0, "each": 2.0, "exact_exact_match": 0.0}
    assert {name: scores[name] for name in expected} == expected
    assert [*scores][4:] == [*expected] and scores.keys() >= {"bleu", "chrf", "bleu_signature"}
    described = metrics.describe()
    assert described["each"] == {"module": "lengths.py", "arguments": {"scale": 2}} and len(described) == 3


def test_a_number_alone_has_the_name_of_its_module(write_module):
    """As those of wer and cer; that of ter is called `score`, of which nobody knows that lower is better."""
    rates = [write_module("wer", "return 0.25"), write_module("ter", 'return {"score": 40.0, "num_edits": 2}')]
    found = Metrics(rates).score(["a"], ["a"], None)
    assert found == {"wer": 0.25, "ter_score": 40.0, "num_edits": 2.0}
    assert not any(map(greater_by_name, found))


def test_modules_get_the_inputs_that_they_name(write_module):
    count = "return {'count': sum(map(len, references))}"
    several = Metrics([write_module("several", count, LISTS)])
    assert several.score(["a", "b"], [["x", "y"], ["z"]], None) == {"count": 3.0}
    assert several.score(["a", "b"], ["x", "z"], None) == {"count": 2.0}
    body = "return {'same': float(predictions == sources)}"
    comet = Metrics([write_module("comet", body, WITH_SOURCES, "sources, predictions, references")])
    assert comet.load(["a"], ["a"]) == ["same"]
    with pytest.raises(UserError, match="takes one reference of a text, and there are several"):
        comet.load(["a", "b", ["c", "d"]], ["a", "b", "c"])
    with pytest.raises(UserError, match="comet.py needs sources, and there are translations and references only"):
        comet.load(["a"], None)


def test_what_cannot_be_used_is_said_before_a_model_is_trained(write_module, lengths, tmp_path):
    nothing = write_module("nothing", "return {'name': 'x'}")
    (tmp_path / "lacking.py").write_text("import not_installed\n")
    for module, references, message in [
        (nothing, ["a", "b"], "no number; leave it out"),
        (lengths, [["a", "b"]], "takes one reference of a text, and there are several"),
        ("no_such_module", ["a", "b"], "--metrics no_such_module cannot be loaded: .*; give an id such as rouge"),
        (str(tmp_path / "lacking.py"), ["a", "b"], "cannot be loaded: .*not_installed"),
    ]:
        with pytest.raises(UserError, match=message):
            Metrics([module]).load(references, None)
    with pytest.raises(RuntimeError, match="lengths.py failed; --metric_kwargs has its arguments") as raised:
        Metrics([lengths], ["scale=null"]).load(["a"], None)
    assert isinstance(raised.value.__cause__, TypeError)


@pytest.mark.parametrize("given", ["scale", "=2", "scale=2", "other.scale=2"])
def test_arguments_of_no_module_are_refused(given):
    with pytest.raises(UserError, match=f"--metric_kwargs has {given}; give KEY=VALUE, .*: lengths, exact."):
        Metrics(["lengths.py", "exact.py"], [given])


def test_an_argument_that_a_module_does_not_take_is_refused(lengths):
    with pytest.raises(UserError, match="--metric_kwargs does not fit --metrics .*lengths.py: .*'scales'"):
        Metrics([lengths], ["scales=2"]).load(["a", "b"], None)


def test_numbers_called_like_signatures_leave_ours_alone(write_module):
    module = write_module("sign", 'return {"bleu_signature": 1.0}')
    scores = Scorer(metrics=Metrics([module])).score(["a"], ["a"])
    assert scores["sign_bleu_signature"] == 1.0 and scores["bleu_signature"].startswith("nrefs:1|")


def test_arguments_of_one_module_need_no_name():
    metrics = Metrics(["rouge"], ["use_stemmer=true", "rouge.lang=de", "list=[1, 2]", "no=007"])
    assert metrics.kwargs == {"rouge": {"use_stemmer": True, "lang": "de", "list": [1, 2], "no": "007"}}


@pytest.mark.parametrize("metric", ["loss", "word_error_rate", "wer", "cer", "rouge_wer", "length_error"])
def test_losses_and_error_rates_are_better_if_lower(metric):
    assert not greater_by_name(metric) and greater_by_name("exact_match") and greater_by_name("rougeL")


def test_our_scores_are_a_module_of_evaluate(exact):
    both = evaluate.combine([TranslationScores(), evaluate.load(exact)])
    found = both.compute(predictions=["a b c d e", "x"], references=["a b c d f", "x"])
    expected = Scorer().score(["a b c d e", "x"], ["a b c d f", "x"])
    assert found == expected | {"exact_match": 0.0}
    several = TranslationScores().compute(predictions=["我今天看"], references=[["我今天看", "我"]], target_lang="zh")
    assert several["bleu"] == pytest.approx(100) and several["bleu_signature"].startswith("nrefs:2|")
    assert "tok:zh" in several["bleu_signature"]
