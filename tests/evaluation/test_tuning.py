"""Decoding tuned on a validation set: what is rescored equals what the search finds."""

import pytest
from accelerate import Accelerator
from datasets import Dataset
from helpers import TEXTS, write_metric

from vanilla_transformer import Translator
from vanilla_transformer.evaluation import splits, tuning
from vanilla_transformer.evaluation.further_metrics import Metrics, deciding_metric
from vanilla_transformer.evaluation.scores import Scorer
from vanilla_transformer.sentences_vanilla_transformer import Segments
from vanilla_transformer.translation_vanilla_transformer import Hypothesis


@pytest.mark.parametrize("num_beams, length_penalty", [(1, 1.0), (2, 0.0), (4, 2.0)])
def test_the_decoding_that_wrote_the_references_is_the_best(varied_translator, num_beams, length_penalty, monkeypatch):
    monkeypatch.setattr(tuning, "NUM_BEAMS", (1, 2, 4))
    monkeypatch.setattr(tuning, "LENGTH_PENALTIES", (0.0, 1.0, 2.0))
    translator, scorer, sources = varied_translator, Scorer(tokenize="char"), ["", *TEXTS]
    translator.model.generation_config.num_beams = 3  # as after an earlier tuning; it must not matter
    references = translator(sources, num_beams=num_beams, length_penalty=length_penalty)
    tried = tuning.tune(translator, sources, references, scorer)
    assert len(tried) == 7 and len({one["bleu"] for one in tried}) == 7
    scores = {"bleu": pytest.approx(100), "chrf": pytest.approx(100), "exact_match": 100, "word_error_rate": 0}
    assert tried[0] == {"num_beams": num_beams, "length_penalty": length_penalty} | scores
    for one in tried:
        options = {"num_beams": one["num_beams"], "length_penalty": one["length_penalty"]}
        assert scorer.score(translator(sources, **options), references)["bleu"] == pytest.approx(one["bleu"])
    assert [one["bleu"] for one in tried] == sorted((one["bleu"] for one in tried), reverse=True)


def test_texts_of_several_pieces_have_the_scores_of_later_translations(varied_translator, monkeypatch):
    """Also those that are cut because they are too long; the last one has neither a word nor a piece."""
    monkeypatch.setattr(tuning, "NUM_BEAMS", (3,))
    monkeypatch.setattr(tuning, "LENGTH_PENALTIES", (0.0, 1.0))
    options = {"max_source_sentences": 1, "max_source_length": 8}
    translator = Translator(varied_translator.engine, varied_translator.tokenizer, **options)
    sources = [" ".join(TEXTS), "\n".join(TEXTS), "A man " * 20, " "]
    references = [f"{text} x" for text in translator(sources, num_beams=2)]
    for one in tuning.tune(translator, sources, references, Scorer(tokenize="char")):
        options = {"num_beams": 3, "length_penalty": one["length_penalty"]}
        scores = Scorer(tokenize="char").score(translator(sources, **options), references)
        assert (scores["bleu"], scores["chrf"]) == (pytest.approx(one["bleu"]), pytest.approx(one["chrf"]))


METRICS = {"chrf": True, "exact_match": True, "word_error_rate": False, "same_length": True, "length_error": False}


@pytest.mark.parametrize("by, greater_is_better", METRICS.items())
def test_another_metric_may_choose(by, greater_is_better, varied_translator, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "NUM_BEAMS", (1, 4))
    scorer = Scorer(tokenize="char", metrics=Metrics([write_metric(tmp_path / "lengths.py")]))
    tried = tuning.tune(varied_translator, TEXTS, TEXTS[::-1], scorer, by, greater_is_better)
    assert [one[by] for one in tried] == sorted((one[by] for one in tried), reverse=greater_is_better)
    assert tried[0].keys() == {"num_beams", "length_penalty", "bleu", *METRICS}


def test_of_equally_good_ones_the_simplest_is_the_best(varied_translator, monkeypatch):
    monkeypatch.setattr(tuning, "NUM_BEAMS", (3, 1, 2))
    tried = tuning.tune(varied_translator, [""], ["Ω"], Scorer())
    order = [(one["num_beams"], one["length_penalty"]) for one in tried]
    assert order[:3] == [(1, 1.0), (2, 1.0), (2, 0.8)] and order[-1] == (3, 2.0)


def test_chrf_chooses_where_bleu_says_nothing():
    """Right translations of fewer than four words have a BLEU of 0, wrong ones of more words may have more."""
    by_beams = {1: "Hund", 2: "das Haus ist hier", 4: "das Haus"}

    class Beams:
        def split(self, texts):
            return Segments([0], texts, [[1]], [False], [["", ""]])

        def n_best_of_pieces(self, sources, n, **options):
            return [[Hypothesis(by_beams.get(n, "Hand"), -1.0, 3)]]

    tried = tuning.tune(Beams(), ["the house"], ["das Haus"], Scorer())
    best = {"num_beams": 4, "length_penalty": 1.0, "bleu": 0, "chrf": pytest.approx(100)}
    assert tried[0] == best | {"exact_match": 100, "word_error_rate": 0}
    assert deciding_metric(tried, "bleu") == "chrf"
    assert next(one for one in tried if one["num_beams"] == 2)["bleu"] > 0


def test_by_a_metric_that_is_not_of_translations_bleu_chooses_the_highest(varied_translator, monkeypatch):
    """Whatever is better of that other metric, such as the loss."""
    monkeypatch.setattr(splits, "tune", lambda *arguments: arguments[-2:])
    split = Dataset.from_dict({"source": ["a"], "target": ["b"]})
    evaluator = splits.SplitEvaluator(varied_translator.tokenizer, Scorer(), Accelerator(cpu=True), max_tokens=9)
    for greater in (False, None, True):
        assert evaluator.tune(varied_translator.model, split, "loss", greater) == ("bleu", True)
