"""Training pairs joined two by two, as people join sentences.

A model that has only read single sentences drops the second one wherever [`Segmenter`] does not find the border, as in
`Stop.Go` or `stop; go`. Each epoch joins other pairs. A joined pair is not also read alone, so an epoch has no more
tokens but those of the joints. Which pairs are joined, and how, is a pure function of (seed, epoch).
"""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..sentences_vanilla_transformer import STOPS, WIDE_END, WIDE_STOPS
from .encoding import encode_texts

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
MARGIN = 4  # tokens that a joint may add; of sentences whose joint adds more, the ids are just concatenated


def draw_entries(
    lengths: tuple[np.ndarray, np.ndarray], limits: tuple[int, int], share: float, seed: int, epoch: int
) -> np.ndarray:
    """The entries of an epoch (n,2): first two joined pairs each, then single ones, whose second number is -1.

    A `share` of the pairs is joined, without those that would exceed the `limits` of source or target in tokens;
    `lengths` are those of the sources and targets of all pairs.
    """
    count = len(lengths[0])
    order = np.random.default_rng([seed, epoch, 1]).permutation(np.arange(count, dtype=np.int32))
    joined = order[: 2 * round(share * count / 2)].reshape(-1, 2)
    sides = zip(lengths, limits, strict=True)
    fits = np.logical_and(*(lengths_of_entries(side, joined) <= limit for side, limit in sides))
    alone = np.concatenate([joined[~fits].ravel(), order[joined.size :]])
    joined = joined[fits]
    return np.concatenate([joined, np.stack([alone, np.full_like(alone, -1)], axis=1)])


def lengths_of_entries(lengths: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """The most tokens (n,) that one side of the entries may have, from the `lengths` of that side of the pairs."""
    first, second = entries.T
    return lengths[first] + np.where(second >= 0, lengths[second] + MARGIN, 0)


def join_texts(source: tuple[str, str], target: tuple[str, str], generator: np.random.Generator) -> tuple[str, str]:
    """Two sources and their targets, joined in a random way."""
    joint = JOINTS[generator.integers(len(JOINTS))]
    filling = {name: texts[generator.integers(len(texts))] for name, texts in FILLINGS.items()}
    joined = []
    for (a, b), pattern in zip((source, target), joint, strict=True):
        parts = {"a": a, "b": b, "bare": a.rstrip(STOPS + WIDE_STOPS) or a, "small": b[:1].lower() + b[1:]}
        parts["gap"] = "" if WIDE_END.search(a) else " "
        joined.append(pattern.format(**parts, **filling))
    return tuple(joined)


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
        rows = np.flatnonzero(pairs[:, 1] >= 0).tolist()
        if not rows:
            return columns
        second = self.columns[pairs[rows, 1].tolist()]
        one, two = (self.texts[pairs[rows, number].tolist()] for number in (0, 1))
        sides = [[(one[name][i], two[name][i]) for name in ("source", "target")] for i in range(len(rows))]
        joined = [
            join_texts(*texts, np.random.default_rng([self.seed, *pairs[row]]))
            for row, texts in zip(rows, sides, strict=True)
        ]
        encoded = encode_texts(*map(list, zip(*joined, strict=True)), self.tokenizer)
        for place, row in enumerate(rows):
            parts = {side: (columns[side][row], second[side][place]) for side in encoded}
            fits = all(len(encoded[side][place]) <= sum(map(len, parts[side])) + MARGIN for side in encoded)
            for side, (one, two) in parts.items():
                ids = encoded[side][place] if fits else [*one[:-1], *two]
                columns[side][row] = np.asarray(ids, dtype=np.int32)
            if "source" in columns:  # for BPE-dropout
                columns["source"][row], columns["target"][row] = joined[place] if fits else map(" ".join, sides[place])
        return columns
