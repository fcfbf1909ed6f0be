"""Beams and length penalty chosen by BLEU, or else by chrF, on a validation set."""

from accelerate import Accelerator
from datasets import Dataset
from transformers import GenerationConfig

from ..translation_vanilla_transformer import Hypothesis, Translator
from .scores import Scorer

NUM_BEAMS = (1, 2, 4, 5, 8)
LENGTH_PENALTIES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)


def tune(translator: Translator, sources: list[str], references: list[str], scorer: Scorer) -> list[dict]:
    """Tries each number of beams with each length penalty: dictionaries of both with their `bleu` and `chrf`.

    The best by BLEU comes first; by chrF if BLEU is 0 where chrF is highest, as for right translations of fewer than
    four words. Of equally good ones, that with fewer beams, and of these that with a penalty nearer to 1.
    Each number of beams translates only once: all its hypotheses are kept, and each length penalty chooses among them.
    A search with that penalty would find nearly the same, since it stops with as many finished hypotheses as beams
    (`early_stopping=True`), and the penalty hardly affects which ones these are.

    Raises:
        TextTooLong: A source is too long to be translated in one piece.
    """
    tried = []
    for num_beams in NUM_BEAMS:
        # With this penalty, the score of a hypothesis is the sum of its log-probabilities.
        search = {"num_beams": num_beams, "length_penalty": 0.0} | early_stopping(num_beams)
        found = translator.n_best(sources, num_beams, progress=f"{num_beams} beams", **search)
        for penalty in LENGTH_PENALTIES if num_beams > 1 else [1.0]:

            def score(one: Hypothesis, penalty: float = penalty) -> float:
                return one.score / (one.tokens + 1) ** penalty  # the end of the sentence counts too

            texts = [max(hypotheses, key=score).text if hypotheses else "" for hypotheses in found]
            scores = scorer.score(texts, references)
            search = {"num_beams": num_beams, "length_penalty": penalty}
            tried.append(search | {"bleu": scores["bleu"], "chrf": scores["chrf"]})
    metric = "bleu" if max(tried, key=lambda one: one["chrf"])["bleu"] else "chrf"
    return sorted(tried, key=lambda one: (-one[metric], one["num_beams"], abs(one["length_penalty"] - 1)))


def early_stopping(num_beams: int) -> dict:
    """The option for `generate`, which takes it only with several beams."""
    return {"early_stopping": True if num_beams > 1 else None}


def use_best(tried: list[dict], config: GenerationConfig) -> dict:
    """Makes the best search in `tried` the default of `generate`; returns its number of beams and length penalty."""
    best = {name: tried[0][name] for name in ("num_beams", "length_penalty")}
    config.update(**best, **early_stopping(best["num_beams"]))
    return best


def tune_on_split(
    model, split: Dataset, *, tokenizer, scorer: Scorer, accelerator: Accelerator, max_tokens: int
) -> list[dict]:
    """What [`tune`] returns for a split, on this process alone; the arguments are those of [`evaluate_split`]."""
    model.eval()
    translator = Translator(model, tokenizer, max_tokens, max(split["source_length"]))
    with accelerator.autocast():
        return tune(translator, list(split["source"]), list(split["target"]), scorer)
