"""A look at the pairs before training: what is odd about them, and how many pairs that concerns."""

import contextlib
import json
import math
import random
import sys
import textwrap
import unicodedata
from collections import Counter
from itertools import chain, count
from pathlib import Path

import datasets
import numpy as np
import regex
from datasets import Dataset
from datasets.fingerprint import Hasher
from tabulate import tabulate
from tqdm.auto import tqdm

from ..files import write_text
from ..sentences_vanilla_transformer import LINE, SOURCE_KINDS, has_words, sentence_ends
from .rows import random_rows
from .texts import KEPT, count_kept, is_filled, normal_form, normalize, to_form

SAMPLE = 50_000  # pairs whose sentences, lines, placeholders and numbers are counted
LOOKED_AT = 4000  # pairs whose sides are compared with all others', to find swapped ones
COMPARED = 2000  # pairs whose sides are compared letter by letter
FEATURES = 512  # of a text: its letters and sequences of up to three letters, in this many classes
CLEAR = 1.6  # standard deviations of all midpoints: how far from the midpoint of its pair a side must lie
RATIO = 3.0  # a ratio of lengths is odd if it is more than this many times the usual one, or less than a third of it
FAR = 10  # characters: smaller differences from the usual ratio are not odd
SEEN = 0.01  # if this share of the sources has several sentences or lines, the model learns to translate them together
MANY_LINES = 20
FEW = 30  # pairs: too few to tell whether some are swapped
WITHOUT_SPACES = ("Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan")  # beside Han
# Before a source, such as >>deu<<, <bt>, [de], [deu_Latn] or __de__.
TAGS = regex.compile(r"^\s*(?:(?:>>\S+<<|<\w+>|\[[a-z]{2,3}(?:_[A-Z][a-z]{3})?\]|__[a-z]{2,3}__)\s+)+")
TASK = regex.compile(r"^\s*\w[\w ]*:\s")  # before a source, such as "translate English to German: "
WORD = regex.compile(r"[\p{L}\p{M}]{2,}")
SCRIPTS = "".join(rf"\p{{Script={script}}}" for script in WITHOUT_SPACES) + "ーｰ"  # which lengthen a vowel of Kana
# Where no spaces separate words, two letters of Han or four of other scripts count as one.
HIDDEN_WORDS = regex.compile(rf"\p{{Han}}{{1,2}}|[{SCRIPTS}]{{1,4}}")
WORDS = regex.compile(rf"(?V1){HIDDEN_WORDS.pattern}|[\p{{L}}\p{{M}}--[\p{{Han}}{SCRIPTS}]]+")
OFTEN = 5  # times


class PairHashes:
    """What is counted in the pairs of `files` of a split, in 64 bytes a pair; those with an empty side do not count.

    Attributes:
        rows: The places of the pairs, counted over all files (n,).
        source, target: Hashes of their normal forms (n,).
        pair: Hashes of both sides (n,).
        lengths: Characters of the sides (2,n).
        ends: The number of pairs up to the end of each file, with those that do not count.
        seen: Which code points occur.
        halves: How many pairs are a half, see [`is_half`].
        many_lines: How many pairs have a side of MANY_LINES or more.
    """

    def __init__(self, files: list[Dataset], verbatim: bool = False):
        numbers, total = [np.empty((5, 0), dtype=np.int64)], 0  # an array for each batch, as lists take far more
        self.halves = self.many_lines = 0
        self.seen = np.zeros(sys.maxunicode + 1, dtype=bool)
        bar = tqdm(desc="Looking at the pairs", total=sum(map(len, files)), unit=" pairs", leave=False, disable=None)
        for batch in chain.from_iterable(pairs.iter(1000) for pairs in files):
            pairs = list(zip(count(total), batch["source"], batch["target"]))  # noqa: B905
            filled = [pair for pair in pairs if is_filled(pair[1]) and is_filled(pair[2])]
            if len(filled) < len(pairs):
                self.halves += sum(is_half(*pair[1:]) for pair in pairs)
            self.many_lines += sum(max(one.count("\n"), two.count("\n")) >= MANY_LINES - 1 for _, one, two in filled)
            rows, *sides = zip(*filled, strict=True) if filled else ((), (), ())
            hashes = (map(hash, map(normal_form, texts)) for texts in sides)
            lengths = (map(len, texts) for texts in sides)
            numbers.append(np.array([list(column) for column in (rows, *hashes, *lengths)], dtype=np.int64))
            text = "\n".join(chain.from_iterable(sides))
            if not (verbatim or unicodedata.is_normalized("NFC", text)):
                text = normalize(text)
            self.seen[code_points(text)] = True
            total += len(batch["source"])
            bar.update(len(batch["source"]))
        bar.close()
        self.ends = np.cumsum([len(pairs) for pairs in files])
        self.rows, self.source, self.target, *lengths = np.concatenate(numbers, axis=1)
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

    def odd_lengths(self) -> np.ndarray:
        """Which pairs have lengths that are far from the usual ratio, (n,)."""
        if not len(self.rows):
            return np.zeros(0, dtype=bool)
        source, target = self.lengths
        usual = np.median(source / target)
        is_odd = np.abs(np.log(source / target / usual)) > np.log(RATIO)
        return is_odd & (np.abs(source - usual * target) >= FAR * min(1, usual))


def is_half(source: str | None, target: str | None) -> bool:
    """Whether a pair lacks a side and the other one begins or ends with an unpaired quotation mark, as rows of a .tsv
    do whose quoted fields have line breaks."""
    texts = [text.strip() for text in (source, target) if is_filled(text)]
    return len(texts) == 1 and texts[0].count('"') % 2 == 1 and '"' in (texts[0][0], texts[0][-1])


def code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def count_kept_forms(pairs: list[tuple[str, str]], total: int) -> dict[str, int]:
    """How many placeholders and numbers the sources of `total` pairs have, and how many of these the targets have,
    judged by a sample of `pairs`."""
    found, scale = {}, total / max(len(pairs), 1)
    for kind, pattern in KEPT.items():
        counts = [count_kept(pattern, source, target) for source, target in pairs if pattern.search(source)]
        found[kind], found[f"{kind}_kept"] = (round(sum(side) * scale) for side in zip(*counts, (0, 0), strict=True))
    return found


def describe_texts(pairs: list[tuple[str, str]], total: int) -> dict[str, int | float | bool | list[float]]:
    """What kind of texts `total` pairs have, judged by a sample of `pairs`.

    `several_sentences` and `several_lines` count the sources that have them. `usual_sentences` and `usual_lines` are
    the largest numbers that at least one in a hundred sources has; from 10 on, 1,000. Each of [`SOURCE_KINDS`] tells
    whether at least one in a hundred is of that kind or, in title case, one in a thousand; `tagged_sources`, whether
    at least one in a hundred begins with [`TAGS`], or they [`have_tasks`]. `words` and `characters` are the
    [`usual_mean`] of sources and of targets, `hidden_words` that of their [`hidden_words`], and `in_words` their
    [`share_in_words`]. `same_letters` is the share of pairs whose sides have the same [`letters_of`]. `frequent_words`
    are those of the sample.
    """
    found, scale = {}, total / max(len(pairs), 1)
    parts = {
        "sentences": [len(sentence_ends(source)) for source, _ in pairs],
        "lines": [len(LINE.findall(source.strip())) for source, _ in pairs],
    }
    for unit, counts in parts.items():
        # How many sources have 1, 2, ... 9, or more.
        counts = np.bincount([min(count, 10) for count in counts], minlength=11)[1:]
        at_least = counts[::-1].cumsum()[::-1]
        most = int((at_least >= SEEN * len(pairs)).sum())
        found[f"usual_{unit}"] = most if most < 10 else 1000
        found[f"several_{unit}"] = round(int(counts[1:].sum()) * scale)
    untagged = [TAGS.sub("", source) for source, _ in pairs]
    tagged = sum(source != body for (source, _), body in zip(pairs, untagged, strict=True))
    found["tagged_sources"] = tagged >= max(SEEN * len(pairs), 1) or have_tasks(untagged)
    for kind, is_of_kind in SOURCE_KINDS.items():
        # In German, ordinary sentences may look like headlines; then one in a thousand does.
        share = SEEN / 10 if kind == "title_sources" else SEEN
        found[kind] = sum(map(is_of_kind, untagged)) >= max(share * len(pairs), 1)
    sides = list(zip(*pairs, strict=True)) or [(), ()]
    found["words"] = [usual_mean([len(text.split()) for text in side]) for side in sides]
    found["hidden_words"] = [usual_mean(list(map(hidden_words, side))) for side in sides]
    found["characters"] = [usual_mean([len(to_form("NFC", text)) for text in side]) for side in sides]
    some = random.Random(0).sample(pairs, min(COMPARED, len(pairs)))
    are_same = [letters_of(source) == letters_of(target) != "" for source, target in some]
    found["same_letters"] = sum(are_same) / max(len(some), 1)
    found["in_words"] = [share_in_words(" ".join(side)) for side in zip(*some, strict=True)] or [0.0, 0.0]
    found["frequent_words"] = frequent_words(pairs)
    return found


def have_tasks(sources: list[str]) -> bool:
    """Whether at least a tenth of the sources begin with a [`TASK`] that at least one in a hundred begins with."""
    tasks = Counter(found[0] for found in map(TASK.match, sources) if found)
    return sum(count for count in tasks.values() if count >= max(SEEN * len(sources), 2)) >= max(0.1 * len(sources), 1)


def frequent_words(pairs: list[tuple[str, str]]) -> int:
    """The words that occur at least five times on both sides together; of pairs with the same source, one counts."""
    texts = chain.from_iterable(dict(pairs).items())
    counts = Counter(chain.from_iterable(map(WORDS.findall, texts)))
    return sum(number >= OFTEN for number in counts.values())


def hidden_words(text: str) -> int:
    """The words of a text that no spaces separate, beyond those that spaces do."""
    return max(len(HIDDEN_WORDS.findall(text)) - len(text.split()), 0)


def share_in_words(text: str) -> float:
    """The share of the visible characters that stand in words of two letters and more."""
    return sum(map(len, WORD.findall(text))) / max(len("".join(text.split())), 1)


def usual_mean(counts: list[int]) -> float:
    """The mean without the largest hundredth, as a single document among words says nothing about them."""
    usual = sorted(counts)[: math.ceil((1 - SEEN) * len(counts))]
    return sum(usual) / max(len(usual), 1)


def letters_of(text: str) -> str:
    """The letters and digits of a text, without case, accents, spaces and punctuation."""
    return "".join(filter(str.isalnum, to_form("NFKD", text.casefold())))


def swapped_share(pairs: list[tuple[str, str]], axis: np.ndarray | None) -> float:
    """The share of the pairs whose sides are swapped, along the [`language_axis`] of these or other pairs."""
    pairs = with_letters(pairs)
    if axis is None or len(pairs) < FEW:
        return 0.0
    return float((half_differences(pairs) @ axis <= -CLEAR).mean())


def language_axis(pairs: list[tuple[str, str]]) -> np.ndarray | None:
    """The direction among [`features`] that tells the languages of the two sides apart best, from most targets to
    most sources (FEATURES,); None if they are hardly told apart.

    It is Fisher's linear discriminant, for which it does not matter which side a language is on: along it, the sides
    of a pair differ most in relation to the standard deviation of the midpoints of all pairs. If both sides are in one
    language, as texts and their corrections are, the midpoints differ more than the sides.
    """
    pairs = with_letters(pairs)
    if len(pairs) < FEW:
        return None
    halves = half_differences(pairs)
    midpoints = halves + features([target for _, target in pairs])
    covariance = np.cov(midpoints.T)
    distinct = len(set(chain.from_iterable(pairs)))
    covariance += (np.trace(covariance) / distinct + 1e-9) * np.eye(FEATURES)  # few texts say little about it
    whitening = np.linalg.inv(np.linalg.cholesky(covariance))
    axis = np.linalg.eigh(whitening @ (halves.T @ halves) @ whitening.T)[1][:, -1] @ whitening
    median = np.median(halves @ axis)
    is_clear = np.median(np.abs(halves @ axis)) >= CLEAR
    return axis * (1 if median >= 0 else -1) if is_clear else None


def with_letters(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs whose sides both have letters: numbers belong to no language."""
    return [pair for pair in pairs if all(map(has_words, pair))]


def half_differences(pairs: list[tuple[str, str]]) -> np.ndarray:
    """For each pair, half the difference between the features of source and target (n,FEATURES)."""
    return (features([source for source, _ in pairs]) - features([target for _, target in pairs])) / 2


def features(texts: list[str]) -> np.ndarray:
    """The letters of texts, and the sequences of two and three, as vectors of length 1 (n,FEATURES)."""
    texts = [f" {text.casefold()[:200]} " for text in texts]
    number = np.repeat(np.arange(len(texts)), list(map(len, texts)))  # of the text that a letter is in
    letters = code_points("".join(texts)).astype(np.uint64)
    grams, counts = np.zeros_like(letters), np.zeros(len(texts) * FEATURES)
    for size in (1, 2, 3):
        grams = (grams[: len(letters) - size + 1] + letters[size - 1 :]) * np.uint64(0x9E3779B97F4A7C15)
        is_inside = number[: len(grams)] == number[size - 1 :]
        places = number[: len(grams)] * FEATURES + (grams >> np.uint64(32)).astype(np.int64) % FEATURES
        counts += np.bincount(places[is_inside], minlength=len(counts))
    counts = counts.reshape(-1, FEATURES)
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


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
    texts = {split: PairHashes(parts, verbatim) for split, parts in files.items()}
    train, found = texts["train"], {}
    groups = [[part] for part in files["train"]] if directions_differ else [files["train"]]
    groups = [sample_pairs(group, LOOKED_AT) for group in groups]
    axes = list(map(language_axis, groups))
    for split, some in texts.items():
        found[split] = {
            "pairs": len(some.rows),
            "duplicates": int(some.repeated().sum()),
            "source_is_target": int((some.source == some.target).sum()),
            "several_targets": some.ambiguous(by_file=directions_differ),
            "odd_lengths": int(some.odd_lengths().sum()),
            "halves": some.halves,
            "many_lines": some.many_lines,
        }
        sample = sample_pairs(files[split], SAMPLE)
        found[split] |= count_kept_forms(sample, len(some.rows))
        if len(sample) < len(some.rows):
            found[split]["sampled"] = len(sample)
        if split == "train":
            found[split] |= describe_texts(sample, len(some.rows))
            found[split]["rows"] = int(some.ends[-1])  # also those with an empty side
            sizes = list(map(len, files[split] if directions_differ else groups))
            shares = list(map(swapped_share, groups, axes))
            found[split]["swapped"] = float(np.average(shares, weights=sizes)) if any(sizes) else 0.0
        else:
            axis = None if directions_differ else axes[0]
            found[split]["swapped"] = swapped_share(sample_pairs(files[split], LOOKED_AT), axis)
            new = map(chr, np.flatnonzero(some.seen & ~train.seen))
            new = "".join(new if verbatim else map(normalize, new))
            found[split]["sources_in_train"] = int(np.isin(some.source, train.source).sum())
            found[split]["pairs_in_train"] = int(np.isin(some.pair, train.pair).sum())
            found[split]["unknown_characters"] = "".join(sorted({one for one in new if not train.seen[ord(one)]}))
    with contextlib.suppress(OSError):  # then the next run counts again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(found))
    return found


def sample_pairs(files: list[Dataset], count: int) -> list[tuple[str, str]]:
    """About `count` pairs from random places in the files, or all, without those that have an empty side."""
    pairs, total = [], max(sum(map(len, files)), 1)
    for part in files:
        for batch in random_rows(part, math.ceil(len(part) * min(count / total, 1))).iter(10_000):
            pairs += zip(batch["source"], batch["target"], strict=True)
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


def describe_survey(found: dict[str, dict], is_stream: bool = False) -> str:
    """The report that is printed before training, with the options that help; for a stream, on its first pairs."""
    table = [
        [name, *(f"{counts[key]:,}" if key in counts else "" for counts in found.values())]
        for key, name in ROWS.items()
        if any(counts.get(key.removesuffix("_kept")) for counts in found.values()) or key == "pairs"
    ]
    columns = {"headers": ["the data", *found], "colalign": ["left", *["right"] * len(found)]}
    lines = [tabulate(table, **columns, disable_numparse=True)]
    train = found["train"]
    if is_stream:
        lines.append(f"Of the stream, the first {train['rows']:,} pairs were looked at.")
    if sampled := train.get("sampled"):
        lines.append(f"Sentences, lines, placeholders and numbers are estimated from {sampled:,} pairs of train.")
    halves, many_lines, total = (
        sum(counts[key] for counts in found.values()) for key in ("halves", "many_lines", "pairs")
    )
    if halves:
        lines.append(
            f"warning: pairs that lack a side and have an unpaired quotation mark: {halves:,}. In a .tsv, each "
            "line is a row, even within quotation marks; save the file as .csv or .jsonl."
        )
    if 0 < many_lines < SEEN * total:
        lines.append(
            f"warning: pairs with {MANY_LINES} lines or more, unlike the others: {many_lines:,}. In a .csv, a "
            "quotation mark that none closes may have swallowed rows."
        )
    for split, counts in found.items():
        if counts["swapped"] >= 0.02:
            share, which = f"{counts['swapped']:.0%}", "pairs" if split == "train" else f"{split} pairs"
            unless = ", unless their tags tell the direction" if train.get("tagged_sources") else ""
            lines.append(f"warning: source and target seem to be swapped in about {share} of the {which}{unless}.")
    if train["duplicates"] and train["duplicates"] >= 0.01 * train["pairs"]:
        share = train["duplicates"] / train["pairs"]
        remedy = "." if is_stream else "; --deduplicate leaves them out."
        lines.append(f"{share:.0%} of the training pairs are duplicates{remedy}")
    for split, counts in found.items():
        if counts.get("sources_in_train"):
            share = counts["sources_in_train"] / counts["pairs"]
            remedy = "." if is_stream else "; --remove_overlap leaves them out of training."
            lines.append(
                f"{'warning: ' if share >= 0.01 else ''}{share:.1%} of the {split} sources are training sources, too, "
                f"which makes the scores look better than they are{remedy}"
            )
        if unknown := counts.get("unknown_characters"):
            some = " ".join(unknown[:20]) + (" ..." if len(unknown) > 20 else "")
            lines.append(f"{split} has characters that train lacks: {some}")
    table, *notes = lines
    return "\n".join([table, *(textwrap.fill(note, 80, subsequent_indent="  ") for note in notes)])
