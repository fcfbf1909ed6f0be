"""Minimum Bayes risk equals its definition over sacreBLEU's scores of sentences."""

from statistics import mean

import pytest
from sacrebleu import sentence_bleu, sentence_chrf

from vanilla_transformer.evaluation.mbr import most_similar

CANDIDATES = [
    "The old man reads a book in the park.",
    "An old man reads a book.",
    "The old man is reading a book in the garden.",
    "The man reads.",
    "Rain.",
    "The old man reads a newspaper in the park.",
]


@pytest.mark.parametrize("utility, score", [("chrf", sentence_chrf), ("bleu", sentence_bleu)])
@pytest.mark.parametrize("candidates", [CANDIDATES, CANDIDATES[::-1], CANDIDATES + 5 * CANDIDATES[3:4]])
def test_the_chosen_candidate_has_the_highest_mean_score(candidates, utility, score):
    options = {"use_effective_order": True} if utility == "bleu" else {}
    scores = {one: mean(score(one, [reference], **options).score for reference in candidates) for one in candidates}
    best = most_similar(candidates, utility)
    assert scores[best] == pytest.approx(max(scores.values()))
    assert best == (CANDIDATES[3] if len(candidates) > len(CANDIDATES) else CANDIDATES[0])


@pytest.mark.parametrize("candidates, expected", [([], ""), (["", "Yes."], "Yes."), (["", ""], ""), (["a", "b"], "a")])
def test_few_and_empty_candidates(candidates, expected):
    assert {most_similar(candidates, utility) for utility in ("chrf", "bleu")} == {expected}
