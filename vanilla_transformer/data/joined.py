"""Training pairs joined two to four at a time, as people join sentences.

A model that has only read single sentences drops the second one wherever [`Segmenter`] does not find the border, as in
`Stop.Go` or `stop; go`; one that has also read two at a time often drops the third. Each epoch joins other pairs. A
joined pair is not also read alone, so an epoch has no more tokens but those of the joints. Which pairs are joined, and
how, is a pure function of (seed, epoch).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..sentences_vanilla_transformer import STOPS, WIDE_END, WIDE_STOPS
from .encoding import MOST_JOINED, encode_texts

# Pairs of patterns, for the source and the target; a target keeps marks and tags, but has its usual stops. `bare` is
# the first sentence without its final stop, `small` the second one with a lower-case first letter, and `gap` a space,
# or nothing after Chinese punctuation.
JOINTS = [
    ("{a}{gap}{b}", "{a}{gap}{b}"),
    ("{a}{b}", "{a}{gap}{b}"),
    ("{a} {small}", "{a}{gap}{b}"),
    ("{bare} {b}", "{a}{gap}{b}"),
    ("{bare} {small}", "{a}{gap}{b}"),
    ("{bare}{stop} {small}", "{a}{gap}{b}"),
    ("{bare} {mark} {b}", "{bare} {mark} {b}"),
    ("{a} {mark} {b}", "{a} {mark} {b}"),
    ("{a}{tag}{b}", "{a}{tag}{b}"),
    ("{a} ({b})", "{a} ({b})"),
]
FILLINGS = {  # many kinds of marks teach the model to copy others, too
    "stop": [";", ",", "...", "…", ":", " -", "!!"],
    "mark": [*"-–—/|•·*+&=#@~^>→★✓", *"😀👍😂🎉🔥🙏😍✨🤔", "❤️", ":)", ";-)", "--", "***"],
    "tag": ["<br>", "<br/>", "<hr>", "<p>", "</p>", " <b>"],
}
MARGIN = 4  # tokens that a joint may add; of sentences whose joints add more, the ids are just concatenated


def draw_entries(
    lengths: tuple[np.ndarray, np.ndarray], limits: tuple[int, int], share: float, seed: int, epoch: int
) -> np.ndarray:
    """The entries (n, MOST_JOINED) of an epoch: each has the indices of one pair or of several joined ones, then -1.

    A `share` of the pairs is joined; two, three or more at a time are equally frequent. Those that would exceed the
    `limits` of source or target in tokens are read alone. `lengths` are those of all sources and targets.
    """
    generator = np.random.default_rng([seed, epoch, 1])
    order = generator.permutation(np.arange(len(lengths[0]), dtype=np.int32))
    sizes = generator.integers(2, MOST_JOINED + 1, len(order) // 2)
    sizes = sizes[sizes.cumsum() <= share * len(order)]
    count = sizes.sum()
    is_joined = np.arange(MOST_JOINED) < sizes[:, None]
    joined = np.full(is_joined.shape, -1, dtype=np.int32)
    joined[is_joined] = order[:count]
    sides = zip(lengths, limits, strict=True)
    fits = is_joined & np.all([lengths_so_far(side, joined) <= limit for side, limit in sides], axis=0)
    alone = np.concatenate([joined[is_joined & ~fits], order[count:]])
    joined[~fits] = -1
    return np.concatenate([joined, np.pad(alone[:, None], [(0, 0), (0, MOST_JOINED - 1)], constant_values=-1)])


def lengths_so_far(lengths: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """The most tokens (n, MOST_JOINED) that one side of the first 1, 2, ... pairs of each entry may have together."""
    return np.where(entries >= 0, lengths[entries] + MARGIN, 0).cumsum(axis=1) - MARGIN


def lengths_of_entries(lengths: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """The most tokens (n,) that one side of the entries may have, from the `lengths` of that side of the pairs."""
    return lengths_so_far(lengths, entries)[:, -1]


def join_texts(sources: list[str], targets: list[str], generator: np.random.Generator) -> tuple[str, str]:
    """Some sources and their targets, joined in a random way, which is the same throughout, as people keep to one."""
    joint = JOINTS[generator.integers(len(JOINTS))]
    filling = {name: texts[generator.integers(len(texts))] for name, texts in FILLINGS.items()}
    joined = sources[0], targets[0]
    for pair in zip(sources[1:], targets[1:], strict=True):
        joined = tuple(join_two(*texts, filling) for texts in zip(joined, pair, joint, strict=True))
    return joined


def join_two(first: str, second: str, pattern: str, filling: dict[str, str]) -> str:
    """Two texts of one side, joined by a pattern of JOINTS."""
    bare = first.rstrip(STOPS + WIDE_STOPS) or first
    gap = "" if WIDE_END.search(first) else " "
    return pattern.format(a=first, b=second, bare=bare, small=second[:1].lower() + second[1:], gap=gap, **filling)


@dataclass
class JoinedPairs:
    """The columns of entries, for a collator."""

    columns: object  # of single pairs, by a list of indices
    texts: Dataset
    tokenizer: PreTrainedTokenizerBase
    seed: int

    def __getitem__(self, entries: list[list[int]]) -> dict[str, list]:
        pairs = np.asarray(entries)
        columns = {name: list(column) for name, column in self.columns[pairs[:, 0].tolist()].items()}
        rows = np.flatnonzero(pairs[:, 1] >= 0)
        if not len(rows):
            return columns
        indices = pairs[rows][pairs[rows] >= 0].tolist()
        ends = (pairs[rows] >= 0).sum(axis=1).cumsum().tolist()
        parts = [slice(*bounds) for bounds in pairwise([0, *ends])]  # of the indices of all joined pairs
        texts, ids = self.texts[indices], self.columns[indices]
        generators = [np.random.default_rng([self.seed, *indices[part]]) for part in parts]
        joined = [
            join_texts(texts["source"][part], texts["target"][part], generator)
            for part, generator in zip(parts, generators, strict=True)
        ]
        encoded = encode_texts(*map(list, zip(*joined, strict=True)), self.tokenizer)
        for row, part, both, *sides in zip(rows, parts, joined, *encoded.values(), strict=True):
            alone = [ids[side][part] for side in encoded]
            limits = [sum(map(len, side)) + MARGIN * (len(side) - 1) for side in alone]
            if any(len(side) > limit for side, limit in zip(sides, limits, strict=True)):
                both = [" ".join(texts[name][part]) for name in ("source", "target")]
                sides = [np.concatenate([*(one[:-1] for one in side[:-1]), side[-1]]) for side in alone]
            for name, side in zip(encoded, sides, strict=True):
                columns[name][row] = np.asarray(side, dtype=np.int32)
            if "source" in columns:  # for BPE-dropout
                columns["source"][row], columns["target"][row] = both
        return columns
