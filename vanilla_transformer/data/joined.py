"""Training pairs joined two by two, as people join sentences.

A model that has only read single sentences drops the second one wherever [`Segmenter`] does not find the border, as in
`Stop.Go` or `stop; go`. Each epoch joins other pairs, which are not read alone in it, so it has as many tokens as
without. Which pairs are joined, and how, is a pure function of (seed, epoch).
"""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .encoding import encode_texts

STOPS = ".!?…。！？।"
# How two sentences a and b are joined in the source, where `bare` is a without its stop, and b begins with a small
# letter as `small`; and in the target, where marks stay.
JOINTS = [
    ("{a} {b}", "{a} {b}"),
    ("{a}{b}", "{a} {b}"),
    ("{a} {small}", "{a} {b}"),
    ("{bare} {b}", "{a} {b}"),
    ("{bare} {small}", "{a} {b}"),
    ("{bare}{stop} {small}", "{a} {b}"),
    ("{bare} {mark} {b}", "{bare} {mark} {b}"),
    ("{a} {mark} {b}", "{a} {mark} {b}"),
    ("{a}{tag}{b}", "{a}{tag}{b}"),
]
FILLINGS = {
    "stop": [";", ",", "...", "…", ":", " -", "!!"],
    "mark": ["-", "–", "/", "|", "•", "*", "+", "&", "=", "😀", "👍", "😂", "🎉", "❤️", ":)"],
    "tag": ["<br>", "<br/>", "</p><p>", "\n", " <b>", "\t"],
}
MARGIN = 6  # tokens that a joint may add


def draw_entries(count: int, share: float, seed: int, epoch: int, part: int = 0) -> np.ndarray:
    """The entries of an epoch (n,2): first two joined pairs each, then single ones, whose second number is -1.

    About a `share` of the `count` pairs is joined.
    """
    order = np.random.default_rng([seed, epoch, part, 1]).permutation(np.arange(count, dtype=np.int32))
    joined = order[: 2 * round(share * count / 2)].reshape(-1, 2)
    alone = order[joined.size :]
    return np.concatenate([joined, np.stack([alone, np.full_like(alone, -1)], axis=1)])


def lengths_of_entries(lengths: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """The most tokens (n,) that one side of the entries may have, from the `lengths` of that side of the pairs."""
    first, second = entries.T
    return lengths[first] + np.where(second >= 0, lengths[second] + MARGIN, 0)


def join_texts(source: tuple[str, str], target: tuple[str, str], generator: np.random.Generator) -> tuple[str, str]:
    """Two sources and their targets, joined in a random way."""
    joint = JOINTS[generator.integers(len(JOINTS))]
    filling = {name: texts[generator.integers(len(texts))] for name, texts in FILLINGS.items()}
    return tuple(
        pattern.format(a=a, b=b, bare=a.rstrip(STOPS) or a, small=b[:1].lower() + b[1:], **filling)
        for (a, b), pattern in zip((source, target), joint, strict=True)
    )


@dataclass
class JoinedPairs:
    """The columns of entries, for a collator. With a joint that adds more tokens than planned, the tokens of the two
    sides follow each other directly."""

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
        texts = [self.texts[pairs[rows, side].tolist()] for side in (0, 1)]
        joined = []
        for place, row in enumerate(rows):
            sides = ((text["source"][place], text["target"][place]) for text in texts)
            joined.append(join_texts(*zip(*sides, strict=True), np.random.default_rng([self.seed, *pairs[row]])))
        sources, targets = zip(*joined, strict=True)
        encoded = encode_texts(list(sources), list(targets), self.tokenizer)
        for side, ids in encoded.items():
            for place, row in enumerate(rows):
                one, two = columns[side][row], second[side][place]
                fits = len(ids[place]) <= len(one) + len(two) + MARGIN
                columns[side][row] = np.asarray(ids[place] if fits else [*one[:-1], *two], dtype=np.int32)
        for side, texts in (("source", sources), ("target", targets)):
            if side in columns:
                for place, row in enumerate(rows):
                    columns[side][row] = texts[place]
        return columns
