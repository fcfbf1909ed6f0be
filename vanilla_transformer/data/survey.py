"""A look at the pairs before training: what is odd about them, and which can be left out."""

import contextlib
import json
import textwrap
import unicodedata
import zlib
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher
from tabulate import tabulate
from tqdm.auto import tqdm

from ..files import write_text
from ..sentences_vanilla_transformer import sentence_ends
from ..translation_vanilla_transformer import LINE
from .texts import KEPT, count_kept, is_filled, normal_form, normalize

LOOKED_AT = 4000  # pairs whose sides are compared with all others', to find swapped ones
FEATURES = 512  # of a text: its letters and sequences of up to three letters, in so many classes
CLEAR = 1.6  # standard deviations of all pairs that a side is from the middle of its pair: the languages can be told
RATIO = 3.0  # a ratio of lengths that is so many times the usual one, or less than a third of it, is odd
FAR = 10  # characters: lengths that differ by fewer from the usual ratio are not odd
SEEN = 0.01  # a share of the sources with so many sentences or lines is enough to learn to translate them together
FEW = 30  # pairs: whether some of fewer are swapped is not said


class Texts:
    """What is counted in the pairs of `files` of a split, in 64 bytes a pair; those with an empty side do not count.

    Attributes:
        rows: The places of the pairs, counted over all files (n,).
        source, target: Hashes of their normal forms (n,).
        pair: Hashes of both sides (n,).
        lengths: Characters of the sides (2,n).
        sentences, lines: How many of the sources have 1, 2, ... 9, or more of them (10,).
        characters: All that occur.
        kept: By name of a kind of [`KEPT`], how many the sources have, and how many of these the targets (2,).
    """

    def __init__(self, files: list[Dataset], verbatim: bool = False):
        numbers, total = [np.empty((0, 5), dtype=np.int64)], 0  # an array for each batch, as lists take far more
        self.sentences, self.lines = np.zeros((2, 10), dtype=np.int64)
        self.characters, self.kept = set(), {kind: np.zeros(2, dtype=np.int64) for kind in KEPT}
        batches = chain.from_iterable(pairs.iter(1000) for pairs in files)
        count = sum(map(len, files)) // 1000
        for batch in tqdm(batches, "Looking at the pairs", count, unit="k", leave=False, disable=None):
            some = []
            for row, (source, target) in enumerate(zip(batch["source"], batch["target"], strict=True), total):
                if is_filled(source) and is_filled(target):
                    hashes = hash(normal_form(source)), hash(normal_form(target))
                    some.append((row, *hashes, len(source), len(target)))
                    self.sentences[min(len(sentence_ends(source)), 10) - 1] += 1
                    self.lines[min(len(LINE.findall(source.strip())), 10) - 1] += 1
                    for text in (source, target):
                        is_kept = verbatim or unicodedata.is_normalized("NFC", text)
                        self.characters.update(text if is_kept else normalize(text))
                    for kind, pattern in KEPT.items():
                        if pattern.search(source):
                            self.kept[kind] += count_kept(pattern, source, target)
            numbers.append(np.array(some, dtype=np.int64).reshape(-1, 5))
            total += len(batch["source"])
        self.ends = np.cumsum([len(pairs) for pairs in files])
        self.rows, self.source, self.target, *lengths = np.concatenate(numbers).T
        self.pair = self.source * 31 + self.target  # overflows, as hashes do
        self.lengths = np.array(lengths)

    def repeated(self) -> np.ndarray:
        """Which pairs repeat an earlier one, (n,)."""
        is_repeated = np.ones(len(self.pair), dtype=bool)
        is_repeated[np.unique(self.pair, return_index=True)[1]] = False
        return is_repeated

    def ambiguous(self, by_file: bool) -> int:
        """How many pairs have a source with another target elsewhere, or elsewhere in their file."""
        file = np.searchsorted(self.ends, self.rows, side="right") if by_file else 0
        distinct = np.unique(self.pair + file, return_index=True)[1]
        counts = np.unique((self.source + file)[distinct], return_counts=True)[1]
        return int(counts[counts > 1].sum())

    def usual(self, counts: np.ndarray) -> int:
        """The largest number of sentences or of lines, by their `counts`, that at least one in a hundred sources has;
        from 10 on, 1,000."""
        at_least = counts[::-1].cumsum()[::-1]  # so many sources have 1, 2, ... or more
        most = int((at_least >= SEEN * len(self.rows)).sum())
        return most if most < 10 else 1000

    def odd_lengths(self) -> int:
        """How many pairs have lengths that are far from the usual ratio."""
        if not len(self.rows):
            return 0
        source, target = self.lengths
        usual = np.median(source / target)
        is_odd = np.abs(np.log(source / target / usual)) > np.log(RATIO)
        return int((is_odd & (np.abs(source - usual * target) >= FAR * min(1, usual))).sum())


def swapped_share(pairs: list[tuple[str, str]], axis: np.ndarray | None) -> float:
    """The share of the pairs whose sides are swapped, along the [`language_axis`] of these or other pairs."""
    if axis is None or len(pairs) < FEW:
        return 0.0
    return float((half_differences(pairs) @ axis <= -CLEAR).mean())


def language_axis(pairs: list[tuple[str, str]]) -> np.ndarray | None:
    """The direction among [`features`] that tells the languages of the two sides apart best, from most targets to
    most sources (FEATURES,); None if they are hardly told apart.

    It is Fisher's linear discriminant, for which it does not matter which side a language is on: along it, the sides
    of a pair differ most in relation to the standard deviation of the middles of all pairs. In one language, as of
    texts and their corrections, these differ more than the sides.
    """
    if len(pairs) < FEW:
        return None
    halves = half_differences(pairs)
    middles = halves + np.array([features(target) for _, target in pairs])
    spread = np.cov(middles.T)
    distinct = len(set(chain.from_iterable(pairs)))
    spread += (np.trace(spread) / distinct + 1e-9) * np.eye(FEATURES)  # few texts say little about it
    whitening = np.linalg.inv(np.linalg.cholesky(spread))
    axis = np.linalg.eigh(whitening @ (halves.T @ halves) @ whitening.T)[1][:, -1] @ whitening
    median = np.median(halves @ axis)
    is_clear = np.median(np.abs(halves @ axis)) >= CLEAR
    return axis * (1 if median >= 0 else -1) if is_clear else None


def half_differences(pairs: list[tuple[str, str]]) -> np.ndarray:
    """Of each pair, the features of the source from the middle of both sides (n,FEATURES)."""
    return np.array([features(source) - features(target) for source, target in pairs]) / 2


def features(text: str) -> np.ndarray:
    """The letters of a text, and the sequences of two and three, as a vector of length 1 (FEATURES,)."""
    text = f" {text.casefold()[:200]} "
    grams = (text[start : start + n] for n in (1, 2, 3) for start in range(len(text) - n + 1))
    counts = np.bincount([zlib.crc32(gram.encode()) % FEATURES for gram in grams], minlength=FEATURES)
    return counts / np.linalg.norm(counts)


def survey(
    files: dict[str, list[Dataset]], directions_differ: bool = False, verbatim: bool = False
) -> dict[str, dict]:
    """Counts of what is odd about each split, which may have several files; kept in `datasets`' cache.

    Characters are counted as the model sees them: `verbatim`, or composed. If the files translate in different
    directions, several targets and swapped sides are counted within each file.
    """
    identity = [(split, part._fingerprint, part.cache_files) for split, parts in files.items() for part in parts]
    names = ("survey.py", "texts.py", "../sentences_vanilla_transformer.py")
    code = [Path(__file__).parent.joinpath(name).read_bytes() for name in names]
    key = Hasher.hash((identity, directions_differ, verbatim, code))
    file = Path(datasets.config.HF_DATASETS_CACHE) / "surveys" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):  # missing or damaged
        return json.loads(file.read_text(encoding="utf-8"))
    texts = {split: Texts(parts, verbatim) for split, parts in files.items()}
    train, found = texts["train"], {}
    axis = None if directions_differ else language_axis(spread(files["train"]))
    for split, some in texts.items():
        found[split] = {
            "pairs": len(some.rows),
            "duplicates": int(some.repeated().sum()),
            "source_is_target": int((some.source == some.target).sum()),
            "several_targets": some.ambiguous(by_file=directions_differ),
            "odd_lengths": some.odd_lengths(),
        }
        for kind, (count, kept) in some.kept.items():
            found[split] |= {kind: int(count), f"{kind}_kept": int(kept)}
        if split == "train":
            found[split]["usual_sentences"] = some.usual(some.sentences)
            found[split]["usual_lines"] = some.usual(some.lines)
            found[split]["several_lines"] = int(some.lines[1:].sum())
            found[split]["several_sentences"] = int(some.sentences[1:].sum())
            groups = [[part] for part in files[split]] if directions_differ else [files[split]]
            sizes = [sum(map(len, parts)) for parts in groups]
            shares = [swapped_share(some, language_axis(some)) for some in map(spread, groups)]
            found[split]["swapped"] = float(np.average(shares, weights=sizes)) if any(sizes) else 0.0
        else:
            found[split]["swapped"] = swapped_share(spread(files[split]), axis)
            unknown = sorted(set().union(*map(normalize, some.characters - train.characters)) - train.characters)
            found[split]["sources_in_train"] = int(np.isin(some.source, train.source).sum())
            found[split]["pairs_in_train"] = int(np.isin(some.pair, train.pair).sum())
            found[split]["unknown_characters"] = "".join(unknown)
    with contextlib.suppress(OSError):  # then the next run counts again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(found))
    return found


def spread(files: list[Dataset]) -> list[tuple[str, str]]:
    """Some filled pairs from everywhere in the files."""
    pairs, total = [], sum(map(len, files))
    for part in files:
        some = part.select(range(0, len(part), total // LOOKED_AT + 1))
        pairs += [(row["source"], row["target"]) for row in some]
    return [pair for pair in pairs if all(map(is_filled, pair))]


ROWS = {
    "pairs": "pairs",
    "duplicates": "duplicates",
    "source_is_target": "source = target",
    "several_targets": "with several targets",
    "odd_lengths": "of odd lengths",
    "several_sentences": "with several sentences",
    "several_lines": "with several lines",
    "sources_in_train": "with a source in train",
    "pairs_in_train": "that are in train",
    "placeholders": "placeholders",
    "placeholders_kept": "of these, in targets",
    "numbers": "numbers",
    "numbers_kept": "of these, in targets",
}


def describe_survey(found: dict[str, dict]) -> str:
    """The block that is printed before training, and what the options do about it."""
    table = [
        [name, *(f"{counts[key]:,}" if key in counts else "" for counts in found.values())]
        for key, name in ROWS.items()
        if any(counts.get(key.removesuffix("_kept")) for counts in found.values()) or key == "pairs"
    ]
    columns = {"headers": ["the data", *found], "colalign": ["left", *["right"] * len(found)]}
    lines = [tabulate(table, **columns, disable_numparse=True)]
    train = found["train"]
    for split, counts in found.items():
        if counts["swapped"] >= 0.02:
            share, which = f"{counts['swapped']:.0%}", "pairs" if split == "train" else f"{split} pairs"
            lines.append(f"warning: source and target seem to be swapped in about {share} of the {which}.")
    if train["duplicates"] and train["duplicates"] >= 0.01 * train["pairs"]:
        share = train["duplicates"] / train["pairs"]
        lines.append(f"{share:.0%} of the training pairs are duplicates; --deduplicate leaves them out.")
    for split, counts in found.items():
        if counts.get("sources_in_train"):
            share = counts["sources_in_train"] / counts["pairs"]
            lines.append(
                f"{'warning: ' if share >= 0.01 else ''}{share:.1%} of the {split} sources are training sources, too, "
                "which makes the scores look better than they are; --remove_overlap leaves them out of training."
            )
        if unknown := counts.get("unknown_characters"):
            some = " ".join(unknown[:20]) + (" ..." if len(unknown) > 20 else "")
            lines.append(f"{split} has characters that train lacks: {some}")
    table, *notes = lines
    return "\n".join([table, *(textwrap.fill(note, 80, subsequent_indent="  ") for note in notes)])
