"""Training pairs joined two to four at a time, as people join sentences.

A model that has only read single sentences drops the second one wherever [`Segmenter`] does not find the border, as in
`Stop.Go` or `stop; go`; one that has also seen two joined often drops the third. Different pairs are joined in each
epoch. A joined pair is not also read alone, so an epoch grows only by the tokens of the joints. Which pairs are joined
is a pure function of (seed, epoch), and how, of (seed, pairs).
"""

from collections.abc import Sized
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..sentences_vanilla_transformer import STOPS, WIDE_END, WIDE_STOPS
from .encoding import encode_texts, lengths_of
from .options import DataOptions

# Patterns for source and target. The target repeats a mark, tag or bracket of the source, but has the usual stops and
# capitals where nothing else separates the sentences. `a` is the text so far, `bare` the same without its final stop,
# `b` the next sentence, `small` the same with a lower-case first letter, `gap` a space, or nothing after Chinese
# punctuation, and the others are one of FILLINGS.
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
FILLINGS = {  # so many marks that the model learns to copy those that it has not seen
    "stop": [";", ",", "...", "…", ":", " -", "!!"],
    "mark": [*"-–—/|•·*+&=#@~^>→★✓", *"😀👍😂🎉🔥🙏😍✨🤔", "❤️", ":)", ";-)", "--", "***"],
    "tag": ["<br>", "<br/>", "<hr>", "<p>", "</p>", " <b>"],
}
MOST = 4  # pairs that are joined at once
MARGIN = 4  # tokens for each joint; if joints take more in all, the token ids of the single texts are concatenated


def draw_entries(
    lengths: tuple[np.ndarray, np.ndarray], limits: tuple[int, int], share: float, seed: int, epoch: int
) -> np.ndarray:
    """The entries (n, MOST) of an epoch: each has the index of one pair, or those of several joined ones, then -1.

    About a `share` of the pairs is joined; two to MOST at a time are drawn equally often. Of these, the pairs from the
    first on that would exceed one of the `limits`, in tokens, are read alone. `lengths` and `limits` are those of the
    sources, then of the targets.
    """
    generator = np.random.default_rng([seed, epoch, 1])  # the batches are planned with 0
    order = generator.permutation(np.arange(len(lengths[0]), dtype=np.int32))
    sizes = generator.integers(2, MOST + 1, len(order) // 2)
    sizes = sizes[sizes.cumsum() <= share * len(order)]
    count = sizes.sum()
    is_joined = np.arange(MOST) < sizes[:, None]
    joined = np.full(is_joined.shape, -1, dtype=np.int32)
    joined[is_joined] = order[:count]
    fits = np.array(is_joined)
    for side, limit in zip(lengths, limits, strict=True):
        for last in range(1, MOST):
            fits[:, last] &= lengths_of_entries(side, joined[:, : last + 1]) <= limit
    alone = np.concatenate([joined[is_joined & ~fits], order[count:]])
    joined[~fits] = -1
    return np.concatenate([joined, np.pad(alone[:, None], [(0, 0), (0, MOST - 1)], constant_values=-1)])


def lengths_of_entries(lengths: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """The most tokens (n,) that one side of the entries may have, from the `lengths` of that side of the pairs."""
    return sum(np.where(pairs >= 0, lengths[pairs] + MARGIN, 0) for pairs in entries.T) - MARGIN


def longest_side_of(train: Dataset | IterableDataset, options: DataOptions) -> int:
    """The most tokens that a side of a pair may have in training: more than it has alone, if pairs are joined or split
    by BPE-dropout."""
    if not isinstance(train, Sized) or options.bpe_dropout:
        return options.length_limit
    longest = int(max(side.max() for side in lengths_of(train)))
    return min(MOST * (longest + MARGIN) - MARGIN, options.length_limit) if options.joined_pairs else longest


def join_pairs(sources: list[str], targets: list[str], generator: np.random.Generator) -> tuple[str, str]:
    """The sources joined, and the targets, with one joint between all of them, drawn at random."""
    joint = JOINTS[generator.integers(len(JOINTS))]
    filling = {name: texts[generator.integers(len(texts))] for name, texts in FILLINGS.items()}
    return tuple(join_texts(*side, filling) for side in zip((sources, targets), joint, strict=True))


def join_texts(texts: list[str], pattern: str, filling: dict[str, str]) -> str:
    """The texts of one side, joined by a pattern of JOINTS."""
    joined = texts[0]
    for first, second in pairwise(texts):
        # A text of stops alone keeps them.
        stops = len(first) - len(first.rstrip(STOPS + WIDE_STOPS) or first)
        parts = {"a": joined, "bare": joined[: len(joined) - stops], "gap": "" if WIDE_END.search(first) else " "}
        joined = pattern.format(b=second, small=second[:1].lower() + second[1:], **parts, **filling)
    return joined


@dataclass
class JoinedPairs:
    """`pairs[entries]` returns the columns of a batch, for its collator; `entries` are some of [`draw_entries`]."""

    columns: object  # of single pairs, by a list of indices
    texts: Dataset
    tokenizer: PreTrainedTokenizerBase
    seed: int

    def __getitem__(self, entries: list[list[int]]) -> dict[str, list]:
        entries = np.asarray(entries)
        columns = {name: list(column) for name, column in self.columns[entries[:, 0].tolist()].items()}
        rows = np.flatnonzero(entries[:, 1] >= 0)
        if not len(rows):
            return columns
        is_pair = entries[rows] >= 0
        indices, ends = entries[rows][is_pair].tolist(), is_pair.sum(axis=1).cumsum().tolist()
        parts = [slice(*bounds) for bounds in pairwise([0, *ends])]  # of the indices
        texts, single = self.texts[indices], self.columns[indices]
        joined = [
            join_pairs(*(texts[name][part] for name in ("source", "target")), self.generator(indices[part]))
            for part in parts
        ]
        encoded = encode_texts(*map(list, zip(*joined, strict=True)), self.tokenizer)
        for row, part, pair, *sides in zip(rows, parts, joined, *encoded.values(), strict=True):
            alone = [single[side][part] for side in encoded]
            limits = [sum(map(len, side)) + MARGIN * (len(side) - 1) for side in alone]
            if any(len(side) > limit for side, limit in zip(sides, limits, strict=True)):
                pair = [" ".join(texts[name][part]) for name in ("source", "target")]
                sides = [np.concatenate([*(ids[:-1] for ids in side[:-1]), side[-1]]) for side in alone]
            for name, side in zip(encoded, sides, strict=True):
                columns[name][row] = np.asarray(side, dtype=np.int32)
            if "source" in columns:  # for BPE-dropout
                columns["source"][row], columns["target"][row] = pair
        return columns

    def generator(self, indices: list[int]) -> np.random.Generator:
        return np.random.default_rng([self.seed, *indices])
