"""Leaves out pairs that would teach a student something wrong, by rules such as those of the data report."""

from collections.abc import Collection
from itertools import compress
from typing import NamedTuple

import numpy as np
from datasets import Dataset
from sacrebleu.metrics import CHRF

from ..data.doubts import numbers
from ..data.survey import PairHashes
from ..data.texts import placeholders
from ..errors import UserError
from ..sentences_vanilla_transformer import has_words

OPTIONAL_RULES = {  # which --keep switches off
    "duplicates": "that repeat an earlier one",
    "source_is_target": "with the source as translation",
    "odd_lengths": "of odd lengths",
    "placeholders": "that lack a placeholder, tag, entity or URL of the source",
    "numbers": "that lack a number of the source",
    "repetition": "whose translation repeats itself",
}
RULES = {"empty": "with an empty side"} | OPTIONAL_RULES  # and two that have an option of their own
RULES |= {"score": "with a score below --min_score"}
RULES |= {"round_trip": "whose round trip has a chrF below --min_round_trip"}
REMEDIES = {"empty": "look at the translations", "score": "lower --min_score", "round_trip": "lower --min_round_trip"}
WINDOW = 10  # characters: a text repeats itself if fewer than half of its sequences of this length are distinct


class Pair(NamedTuple):
    """A source and its translation, with the score of the teacher if one was asked for."""

    source: str
    target: str
    score: float | None = None


class Filter:
    """Pairs, and what the rules have left out of them.

    Attributes:
        pairs: Those that are left.
        count: How many there were at first.
        dropped: By rule, how many pairs it left out, and the first of them; rules that left out none are not there.
    """

    def __init__(self, pairs: list[Pair]):
        self.pairs, self.count, self.dropped = pairs, len(pairs), {}

    def apply(self, keep: Collection[str] = (), min_score: float | None = None):
        """Applies all rules that need no model, except those to `keep`. Raises UserError if no pair is left."""
        columns = {side: [getattr(pair, side) for pair in self.pairs] for side in ("source", "target")}
        texts = PairHashes([Dataset.from_dict(columns)])
        self.drop({"empty": ~np.isin(np.arange(self.count), texts.rows)})
        pairs = self.pairs
        rules = {
            "duplicates": texts.repeated(),
            "source_is_target": (texts.source == texts.target) & [has_words(pair.source) for pair in pairs],
            "odd_lengths": texts.odd_lengths(),
            "placeholders": [not placeholders(pair.source) <= placeholders(pair.target) for pair in pairs],
            "numbers": [not numbers(pair.source) <= numbers(pair.target) for pair in pairs],
            "repetition": [repeats(pair.target) and not repeats(pair.source) for pair in pairs],
            "score": [min_score is not None and pair.score < min_score for pair in pairs],
        }
        self.drop({rule: is_wrong for rule, is_wrong in rules.items() if rule not in keep})

    def apply_round_trip(self, back: list[str], min_chrf: float):
        """Leaves out pairs whose target, translated `back`, is too far from the source. Raises UserError as above."""
        chrf = CHRF()
        scores = [chrf.sentence_score(text, [pair.source]).score for pair, text in zip(self.pairs, back, strict=True)]
        self.drop({"round_trip": np.array(scores) < min_chrf})

    def drop(self, rules: dict[str, Collection[bool]]):
        """Leaves out the pairs for which a rule is true; a pair counts for the first of these rules."""
        is_left = np.ones(len(self.pairs), dtype=bool)
        for rule, is_wrong in rules.items():
            found = np.flatnonzero(is_left & np.asarray(is_wrong, dtype=bool))
            is_left[found] = False
            if len(found):
                first = self.pairs[found[0]]
                self.dropped[rule] = {"count": len(found), "source": first.source, "target": first.target}
        self.pairs = list(compress(self.pairs, is_left))
        if not self.pairs:
            # Not duplicates, of which the first stays.
            counts = {rule: one["count"] for rule, one in self.dropped.items() if rule != "duplicates"}
            rule = max(counts, key=counts.get, default="empty")
            most = f": {counts[rule]:,} were pairs {RULES[rule]}" if counts else ""
            remedy = REMEDIES.get(rule, f"look at them, or give --keep {rule}")
            raise UserError(f"Of {self.count:,} pairs, the filter leaves none{most}; {remedy}.")


def repeats(text: str) -> bool:
    """Whether a text repeats itself, as models do that no longer find the end."""
    windows = [text[start : start + WINDOW] for start in range(len(text) - WINDOW + 1)]
    return 2 * len(set(windows)) < len(windows)
