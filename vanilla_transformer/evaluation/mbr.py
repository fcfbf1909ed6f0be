"""Minimum Bayes risk: the candidate that is most similar to all of them (Eikema and Aziz, 2020, arXiv:2005.10283)."""

from collections import Counter

from sacrebleu.metrics import BLEU, CHRF

# Epsilon sampling: samples without unlikely tokens are better candidates (Freitag et al., 2023, arXiv:2305.09860).
SAMPLING = {"do_sample": True, "num_beams": 1, "top_k": 0, "epsilon_cutoff": 0.02}
UTILITIES = {"chrf": CHRF(), "bleu": BLEU(effective_order=True)}  # sacreBLEU's for single sentences


def most_similar(candidates: list[str], utility: str = "chrf") -> str:
    """The candidate whose mean `utility`, with each of the candidates as reference, is highest; "" if there are none.

    A candidate that occurs several times counts that many times. Of equally good ones, the first is chosen.
    """
    metric, counts = UTILITIES[utility], Counter(candidates)

    def expected_utility(hypothesis: str) -> float:
        return sum(n * metric.sentence_score(hypothesis, [reference]).score for reference, n in counts.items())

    return max(counts, key=expected_utility, default="")
