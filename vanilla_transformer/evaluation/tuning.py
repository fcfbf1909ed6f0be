"""Beams and length penalty, chosen by BLEU, chrF or another metric on a validation set."""

from transformers import GenerationConfig

from ..translation_vanilla_transformer import BaseTranslator, Hypothesis
from .further_metrics import deciding_metric
from .scores import Scorer
from .systems import count_errors

NUM_BEAMS = (1, 2, 4, 5, 8)
LENGTH_PENALTIES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)


def tune(
    translator: BaseTranslator,
    sources: list[str],
    references: list[str] | list[list[str]],
    scorer: Scorer,
    by: str = "bleu",
    greater_is_better: bool = True,
) -> list[dict]:
    """Tries each number of beams with each length penalty, and one beam with none. Returns a dictionary of each
    setting and its scores: `bleu`, `chrf`, further metrics of the `scorer`, `exact_match` and `word_error_rate`.

    The best by [`deciding_metric`] comes first. Ties go to fewer beams, then to the penalty nearer to 1. Sources are
    cut into pieces as in any translation, so the scores are those of later searches. Each number of beams translates
    only once: all its hypotheses are kept, and each length penalty chooses among them. A search with that penalty
    would find nearly the same, since it stops with as many finished hypotheses as beams (`early_stopping=True`), and
    the penalty hardly affects which ones these are.

    Raises:
        TextTooLong: A source is too long and the translator does not split it.
    """
    tried = []
    segments = translator.split(sources)
    for num_beams in NUM_BEAMS:
        # With this penalty, the score of a hypothesis is the sum of its log-probabilities.
        search = {"num_beams": num_beams, "length_penalty": 0.0, "early_stopping": num_beams > 1 or None}
        found = translator.n_best_of_pieces(segments.sources, num_beams, progress=f"{num_beams} beams", **search)
        for penalty in LENGTH_PENALTIES if num_beams > 1 else [1.0]:

            def score(one: Hypothesis, penalty: float = penalty) -> float:
                return one.score / (one.tokens + 1) ** penalty  # the end of the sentence counts too

            texts = segments.join([max(hypotheses, key=score).text for hypotheses in found])
            scores = scorer.score(texts, references, sources)
            numbers = {name: number for name, number in scores.items() if not name.endswith("_signature")}
            numbers |= count_errors(texts, references, scorer)
            tried.append({"num_beams": num_beams, "length_penalty": penalty} | numbers)
    by = deciding_metric(tried, by)
    sign = -1 if greater_is_better else 1
    return sorted(tried, key=lambda one: (sign * one[by], one["num_beams"], abs(one["length_penalty"] - 1)))


def use_best(tried: list[dict], config: GenerationConfig) -> dict:
    """Makes the best search in `tried` the default of `generate`; returns its number of beams and length penalty."""
    best = {name: tried[0][name] for name in ("num_beams", "length_penalty")}
    config.update(**best, early_stopping=best["num_beams"] > 1 or None)
    return best
