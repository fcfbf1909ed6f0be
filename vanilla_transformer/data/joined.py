"""Training pairs joined two to four at a time, as people join sentences.

A model that has only read single sentences drops the second one wherever [`Segmenter`] does not find the border, as in
`Stop.Go` or `stop; go`; one that has also seen two joined often drops the third. Different pairs are joined in each
epoch. A joined pair is not also read alone, so an epoch grows only by the tokens of the joints. Which pairs are joined
is a pure function of (seed, epoch), and how, of (seed, pairs).
"""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..sentences_vanilla_transformer import STOPS, WIDE_END, WIDE_STOPS
from .encoding import encode_texts, lengths_of
from .options import DataOptions

# Patterns for source and target. The target repeats a mark, tag or bracket of the source, but has the usual stops and
# capitals where nothing else separates the sentences. `a` is the text so far, `bare` the same without its final stop,
# `b` the next sentence, `small` the same with a lower-case first letter, `gap` a space, or nothing after Chinese
# punctuation, and the others are one of FILLINGS. The number is how many tokens the joint may add, less the
# end-of-sentence token that it replaces; if it adds more, the ids of the single texts are concatenated.
JOINTS = [
    ("{a}{gap}{b}", "{a}{gap}{b}", -1),
    ("{a}{b}", "{a}{gap}{b}", 1),
    ("{a} {small}", "{a}{gap}{b}", 0),
    ("{bare} {b}", "{a}{gap}{b}", -1),
    ("{bare} {small}", "{a}{gap}{b}", 0),
    ("{bare}{stop} {small}", "{a}{gap}{b}", 2),
    ("{bare} {mark} {b}", "{bare} {mark} {b}", 4),
    ("{a} {mark} {b}", "{a} {mark} {b}", 5),
    ("{a}{tag}{b}", "{a}{tag}{b}", 5),
    ("{a} ({b})", "{a} ({b})", 4),
]
MARGINS = np.array([margin for *_, margin in JOINTS], dtype=np.int32)
FILLINGS = {  # so many marks that the model learns to copy those that it has not seen
    "stop": [";", ",", "...", "…", ":", " -", "!!"],
    "mark": [*"-–—/|•·*+&=#@~^>→★✓", *"😀👍😂🎉🔥🙏😍✨🤔", ":)", ";-)", "--", "***"],
    "tag": ["<br>", "<br/>", "<hr>", "<p>", "</p>", " <b>"],
}
# How many pairs are joined at a time, and how often. More threes and fours protect longer texts, but cost more BLEU on
# single sentences.
COUNTS = {2: 0.75, 3: 0.15, 4: 0.1}
MOST = max(COUNTS)


def draw_entries(
    lengths: tuple[np.ndarray, np.ndarray], limits: tuple[int, int], share: float, seed: int, epoch: int
) -> np.ndarray:
    """The entries (n, MOST) of an epoch: each has the index of one pair, or those of several joined ones, then -1.

    About a `share` of the pairs is joined, two to MOST at a time as often as COUNTS says. An entry that would exceed
    one of the `limits`, in tokens, ends before the pair that exceeds it; that pair and those after it are read alone.
    `lengths` and `limits` are those of the sources, then of the targets.
    """
    generator = np.random.default_rng([seed, epoch, 1])  # the batches are planned with 0
    order = generator.permutation(np.arange(len(lengths[0]), dtype=np.int32))
    sizes = generator.choice(list(COUNTS), len(order) // 2, p=list(COUNTS.values()))
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
    """An upper bound (n,) of the tokens of one side of each entry, from the `lengths` of that side of the pairs."""
    margins = MARGINS[joints_of(entries)]
    return sum(np.where(pairs >= 0, lengths[pairs] + margins, 0) for pairs in entries.T) - margins


def joints_of(entries: np.ndarray) -> np.ndarray:
    """The joint (n,) of each entry, an index of JOINTS, as random as the pairs in it."""
    return (entries[:, 0] + entries[:, 1]) % len(JOINTS)


def check_share(lengths: tuple[np.ndarray, np.ndarray], limits: tuple[int, int], share: float, seed: int):
    """Warns if far fewer pairs are joined than asked for, since they would exceed the limits."""
    count = len(lengths[0])
    joined = count - int((draw_entries(lengths, limits, share, seed, epoch=0)[:, 1] < 0).sum())
    if joined < share * count / 2 - MOST:
        PartialState().print(
            f"warning: --joined_pairs {share:g} joins only {joined:,} of {count:,} pairs; others would be longer than "
            "--max_source_length, --max_target_length or a batch."
        )


def longest_side_of(train: Dataset | IterableDataset, options: DataOptions) -> int:
    """The most tokens that a side of a pair may have in training: more than it has alone, if pairs are joined or split
    by BPE-dropout."""
    if not isinstance(train, Sized) or options.bpe_dropout:
        return options.length_limit
    longest = int(max(side.max() for side in lengths_of(train)))
    joined = MOST * longest + (MOST - 1) * int(MARGINS.max())
    return min(joined, options.length_limit) if options.joined_pairs else longest


def join_pairs(sources: list[str], targets: list[str], joint: int, generator: np.random.Generator) -> tuple[str, str]:
    """The sources joined, and the targets, with one joint between all of them, whose filling is drawn at random."""
    filling = {name: texts[generator.integers(len(texts))] for name, texts in FILLINGS.items()}
    source, target, _ = JOINTS[joint]
    return join_texts(sources, source, filling), join_texts(targets, target, filling)


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
        rows = np.flatnonzero(entries[:, 1] >= 0).tolist()
        for row, pair in zip(rows, self.join(entries[rows]), strict=True):
            for name in columns.keys() & pair.keys():  # texts are among the columns for BPE-dropout only
                columns[name][row] = pair[name]
        return columns

    def join(self, entries: np.ndarray) -> Iterator[dict]:
        """The texts and the token ids of the joined pair of each entry."""
        if not len(entries):
            return
        is_pair, joints = entries >= 0, joints_of(entries).tolist()
        indices, ends = entries[is_pair].tolist(), is_pair.sum(axis=1).cumsum().tolist()
        parts = [slice(*bounds) for bounds in pairwise([0, *ends])]
        single = self.texts[indices] | self.columns[indices]
        groups = [{name: column[part] for name, column in single.items()} for part in parts]
        generators = [np.random.default_rng([self.seed, *indices[part]]) for part in parts]
        joined = [
            join_pairs(group["source"], group["target"], joint, generator)
            for group, joint, generator in zip(groups, joints, generators, strict=True)
        ]
        encoded = encode_texts(*map(list, zip(*joined, strict=True)), self.tokenizer)
        for group, joint, texts, *sides in zip(groups, joints, joined, *encoded.values(), strict=True):
            margin = int(MARGINS[joint]) * (len(group["source"]) - 1)
            if any(len(ids) > sum(map(len, group[name])) + margin for name, ids in zip(encoded, sides, strict=True)):
                texts = [" ".join(group[name]) for name in ("source", "target")]
                sides = [np.concatenate([*(ids[:-1] for ids in group[n][:-1]), group[n][-1]]) for n in encoded]
            sides = [np.asarray(ids, dtype=np.int32) for ids in sides]
            yield dict(zip(("source", "target", *encoded), (*texts, *sides), strict=True))
