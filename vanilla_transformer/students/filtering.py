"""Rules that leave out pairs of texts and translations: those of the data report, repetitions, scores."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
from datasets import Dataset
from sacrebleu.metrics import CHRF

from ..data.doubts import numbers
from ..data.survey import Texts
from ..data.texts import placeholders
from ..errors import UserError
from ..sentences_vanilla_transformer import has_words

# What the rules leave out. The first is always applied, the last two if they are asked for.
RULES = {
    "empty": "with an empty side",
    "duplicates": "that repeat an earlier one",
    "source_is_target": "with the source as translation",
    "odd_lengths": "of odd lengths",
    "placeholders": "that lack a placeholder, tag, entity or URL of the source",
    "numbers": "that lack a number of the source",
    "repetition": "whose translation repeats itself",
    "score": "with a score below --min_score",
    "round_trip": "whose round trip has a chrF below --min_round_trip",
}
OPTIONAL_RULES = [*RULES][1:-2]
WINDOW = 10  # characters: a text in which fewer than half of all sequences of so many are distinct repeats itself
COLUMNS = ("source", "target")


class Pair(NamedTuple):
    """A source, a translation, and the score of it, if it was kept."""

    source: str
    target: str
    score: float | None = None


class Filter:
    """Pairs, from which one rule after the other leaves some out.

    Attributes:
        pairs: Those that are left.
        count: How many there were before the first rule.
        dropped: By rule, how many it left out, with the first of them as an example; without rules that left out none.
    """

    def __init__(self, pairs: list[Pair]):
        self.pairs, self.count, self.dropped = pairs, len(pairs), {}

    def drop(self, rule: str, is_wrong: Collection[bool]):
        """Leaves out the pairs for which `is_wrong`, one value for each, is true."""
        wrong = [pair for pair, is_one in zip(self.pairs, is_wrong, strict=True) if is_one]
        if wrong:
            self.pairs = [pair for pair, is_one in zip(self.pairs, is_wrong, strict=True) if not is_one]
            self.dropped[rule] = {"count": len(wrong), "source": wrong[0].source, "target": wrong[0].target}

    def drop_each(self, rule: str, is_wrong: Callable[[Pair], bool]):
        """The same, by a function of one pair."""
        self.drop(rule, list(map(is_wrong, self.pairs)))

    def apply(self, keep: Collection[str] = (), min_score: float | None = None):
        """Applies all rules that need no model, except those to `keep`. Raises UserError if no pair is left."""
        texts = look_at(self.pairs)
        self.drop("empty", ~np.isin(np.arange(self.count), texts.rows))
        is_copied = (texts.source == texts.target) & [has_words(pair.source) for pair in self.pairs]
        counted = {"duplicates": texts.repeated(), "source_is_target": is_copied, "odd_lengths": texts.odd_lengths()}
        is_left = np.ones(len(self.pairs), dtype=bool)
        for rule, is_wrong in counted.items():
            if rule not in keep:
                self.drop(rule, is_wrong[is_left])
                is_left &= ~is_wrong
        rules = {
            "placeholders": lambda pair: not placeholders(pair.source) <= placeholders(pair.target),
            "numbers": lambda pair: not numbers(pair.source) <= numbers(pair.target),
            "repetition": lambda pair: repeats(pair.target) and not repeats(pair.source),
            "score": lambda pair: min_score is not None and pair.score < min_score,
        }
        for rule, is_wrong in rules.items():
            if rule not in keep:
                self.drop_each(rule, is_wrong)
        self.check()

    def apply_round_trip(self, back: list[str], min_chrf: float):
        """Leaves out pairs whose source differs too much from what came `back` from their targets."""
        chrf = CHRF()
        scores = (chrf.sentence_score(text, [pair.source]).score for pair, text in zip(self.pairs, back, strict=True))
        self.drop("round_trip", [score < min_chrf for score in scores])
        self.check()

    def check(self):
        """Raises UserError if no pair is left."""
        if not self.pairs:
            rule = max(self.dropped, key=lambda rule: self.dropped[rule]["count"], default=None)
            most = f": {self.dropped[rule]['count']:,} were pairs {RULES[rule]}" if rule else ""
            raise UserError(f"Of {self.count:,} pairs, the filter leaves none{most}; see --keep, and look at them.")


def look_at(pairs: list[Pair]) -> Texts:
    """The hashes and lengths of the sides of pairs, by which the data report judges them."""
    columns = {name: [getattr(pair, name) for pair in pairs] for name in COLUMNS}
    return Texts([Dataset.from_dict(columns)])


def repeats(text: str) -> bool:
    """Whether a text repeats itself, as models do that have lost their way."""
    windows = [text[start : start + WINDOW] for start in range(len(text) - WINDOW + 1)]
    return 2 * len(set(windows)) < len(windows)
