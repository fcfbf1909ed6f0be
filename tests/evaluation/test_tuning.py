"""Decoding tuned on a validation set: what is rescored equals what the search finds."""

import pytest
from helpers import TEXTS

from vanilla_transformer.evaluation import tuning
from vanilla_transformer.evaluation.scores import Scorer
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
    scores = {"bleu": pytest.approx(100), "chrf": pytest.approx(100)}
    assert tried[0] == {"num_beams": num_beams, "length_penalty": length_penalty} | scores
    for one in tried:
        options = {"num_beams": one["num_beams"], "length_penalty": one["length_penalty"]}
        assert scorer.score(translator(sources, **options), references)["bleu"] == pytest.approx(one["bleu"])
    assert [one["bleu"] for one in tried] == sorted((one["bleu"] for one in tried), reverse=True)


def test_of_equally_good_ones_the_simplest_is_the_best(varied_translator, monkeypatch):
    monkeypatch.setattr(tuning, "NUM_BEAMS", (3, 1, 2))
    tried = tuning.tune(varied_translator, [""], ["Ω"], Scorer())
    order = [(one["num_beams"], one["length_penalty"]) for one in tried]
    assert order[:3] == [(1, 1.0), (2, 1.0), (2, 0.8)] and order[-1] == (3, 2.0)


def test_chrf_chooses_where_bleu_says_nothing():
    """Right translations of fewer than four words have a BLEU of 0, wrong ones of more words may have more."""
    by_beams = {1: "Hund", 2: "das Haus ist hier", 4: "das Haus"}

    class Beams:
        def n_best(self, sources, n, **options):
            return [[Hypothesis(by_beams.get(n, "Hand"), -1.0, 3)]]

    tried = tuning.tune(Beams(), ["the house"], ["das Haus"], Scorer())
    assert tried[0] == {"num_beams": 4, "length_penalty": 1.0, "bleu": 0, "chrf": pytest.approx(100)}
    assert next(one for one in tried if one["num_beams"] == 2)["bleu"] > 0
