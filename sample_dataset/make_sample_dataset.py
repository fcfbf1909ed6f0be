"""Generate the English -> German sample dataset: train.jsonl, validation.jsonl and test.jsonl.

A small hand-written grammar (lexicon.py, grammar.py, speaker.py) generates each English sentence together with its
German translation, so the word alignment is known by construction and every English sentence has exactly one German
one. The files are a pure function of these scripts and of SEED.

    python sample_dataset/make_sample_dataset.py            # write the three files and print the counts
    python sample_dataset/make_sample_dataset.py --check    # check the files and the counts in README.md
"""

import argparse
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from grammar import Phrase
from speaker import Speaker

SEED = 2017
CARD = Path(__file__).with_name("README.md")
SPLIT_SIZES = {"train": 10_000, "validation": 500, "test": 500}
HELD_OUT_TEST_SIZE = 150  # test sentences with a combination of words that no other split has
POOL_SIZE = 13_000  # sentences from which the splits are taken
MIN_WORDS, MAX_WORDS = 3, 14  # of an English sentence
STOP_LEFT_OUT = 20  # one in 20 train sentences has no full stop, like the first pairs
MIN_WORD_COUNT = 15  # occurrences in train of every word of validation and test, at least

# The first pairs of train.jsonl: translated word for word, and without final punctuation.
FIRST_PAIRS = {
    "I am a student": "Ich bin ein Schüler",
    "He is a teacher": "Er ist ein Lehrer",
    "She is a doctor": "Sie ist eine Ärztin",
    "We are friends": "Wir sind Freunde",
    "They are happy": "Sie sind glücklich",
}

# Adjective + noun and verb + object that occur in test sentences only.
HELD_OUT = {
    ("red", "flower"), ("blue", "coat"), ("green", "apple"), ("small", "dog"), ("new", "car"), ("old", "house"),
    ("young", "woman"), ("tired", "child"), ("hungry", "bird"), ("friendly", "teacher"), ("happy", "sister"),
    ("beautiful", "picture"), ("good", "book"), ("fresh", "bread"), ("hot", "tea"), ("big", "table"),
    ("buy", "lamp"), ("read", "newspaper"), ("see", "rabbit"), ("eat", "pear"), ("drink", "milk"), ("find", "key"),
    ("wear", "shirt"), ("visit", "doctor"), ("help", "girl"), ("need", "bag"), ("open", "window"),
    ("call", "brother"), ("invite", "student"), ("give", "ball"), ("show", "cat"), ("bring", "letter"),
}  # fmt: skip

Pair = dict[str, str]  # a line of a file: en, de and alignment


def as_pair(phrase: Phrase) -> Pair:
    """The line of a file. Two words are aligned if they share a unit of meaning."""
    links = [
        f"{i}-{j}"
        for (i, en), (j, de) in itertools.product(enumerate(phrase.en), enumerate(phrase.de))
        if en.units & de.units
    ]
    return {
        "en": " ".join(word.text for word in phrase.en),
        "de": " ".join(word.text for word in phrase.de),
        "alignment": " ".join(links),
    }


def first_pairs() -> list[Pair]:
    return [
        {"en": en, "de": de, "alignment": " ".join(f"{i}-{i}" for i in range(len(en.split())))}
        for en, de in FIRST_PAIRS.items()
    ]


def without_stop(pair: Pair) -> Pair:
    return {**pair, "en": pair["en"].removesuffix("."), "de": pair["de"].removesuffix(".")}


def speak(rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """POOL_SIZE different sentences: those without and those with a held-out combination."""
    speaker = Speaker(rng)
    translations = dict(FIRST_PAIRS)
    germans = set(FIRST_PAIRS.values())
    common: list[Pair] = []
    held_out: list[Pair] = []
    while len(common) + len(held_out) < POOL_SIZE:
        pair = as_pair(speaker.sentence())
        en, de = pair["en"].rstrip("."), pair["de"].rstrip(".")
        assert translations.setdefault(en, de) == de, f"{en!r} has two translations: {translations[en]!r} and {de!r}"
        if de not in germans and MIN_WORDS <= len(en.split()) <= MAX_WORDS:
            germans.add(de)
            (held_out if speaker.combinations & HELD_OUT else common).append(pair)
    return common, held_out


def make_splits() -> dict[str, list[Pair]]:
    """Validation and test hold new sentences, but only of words that train shows often enough to be learned."""
    rng = random.Random(SEED)
    common, held_out = speak(rng)
    rng.shuffle(common)
    first = first_pairs()
    spoken_size = SPLIT_SIZES["train"] - len(first)
    spoken = [pair if i % STOP_LEFT_OUT else without_stop(pair) for i, pair in enumerate(common[:spoken_size])]
    train = first + spoken
    counts = {language: word_counts(train, language) for language in ("en", "de")}

    def is_learnable(pair: Pair) -> bool:
        return all(counts[side][word] >= MIN_WORD_COUNT for side in counts for word in word_counts([pair], side))

    unseen = list(filter(is_learnable, common[spoken_size:]))
    validation_size = SPLIT_SIZES["validation"]
    test_end = validation_size + SPLIT_SIZES["test"] - HELD_OUT_TEST_SIZE
    test = unseen[validation_size:test_end] + list(filter(is_learnable, held_out))[:HELD_OUT_TEST_SIZE]
    rng.shuffle(test)
    splits = {"train": train, "validation": unseen[:validation_size], "test": test}
    check_splits(splits, {pair["en"] for pair in held_out})
    return splits


def check_splits(splits: dict[str, list[Pair]], held_out: set[str]) -> None:
    """The sizes are right, no sentence of either language occurs twice, and only test holds what is held out."""
    assert {name: len(pairs) for name, pairs in splits.items()} == SPLIT_SIZES, "a split has a wrong size"
    for language in ("en", "de"):
        sentences = [pair[language] for pairs in splits.values() for pair in pairs]
        assert len(set(sentences)) == len(sentences), f"a sentence ({language}) occurs twice"
    found = {name: sum(pair["en"] in held_out for pair in pairs) for name, pairs in splits.items()}
    assert found == {"train": 0, "validation": 0, "test": HELD_OUT_TEST_SIZE}, f"held-out combinations: {found}"


def to_text(pairs: list[Pair]) -> str:
    return "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)


def word_counts(pairs: Iterable[Pair], language: str) -> Counter[str]:
    """How often each word occurs, lower-cased and without punctuation."""
    return Counter(word.strip(".,?").lower() for pair in pairs for word in pair[language].split())


def summary(splits: dict[str, list[Pair]]) -> str:
    """The counts that the card states."""
    lines = []
    for name, pairs in splits.items():
        lengths = [len(pair["en"].split()) for pair in pairs]
        mean = sum(lengths) / len(lengths)
        lines.append(
            f"{name}: {len(pairs)} pairs, {min(lengths)} to {max(lengths)} English words, {mean:.1f} on average"
        )
    lines.append(f"test pairs with a held-out combination: {HELD_OUT_TEST_SIZE} ({len(HELD_OUT)} combinations)")
    everything = list(itertools.chain.from_iterable(splits.values()))
    for language, title in (("en", "English"), ("de", "German")):
        train = word_counts(splits["train"], language)
        rarest = min(train[word] for word in word_counts(splits["validation"] + splits["test"], language))
        lines.append(
            f"{title}: {len(word_counts(everything, language))} distinct words; "
            f"each one of validation and test occurs at least {rarest} times in train"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent, help="default: beside this script")
    parser.add_argument("--check", action="store_true", help="compare the files on disk instead of writing them")
    arguments = parser.parse_args()

    splits = make_splits()
    counts = summary(splits)
    print(counts)
    if arguments.check and counts not in CARD.read_text(encoding="utf-8"):
        sys.exit(f"{CARD} does not state these counts.")
    for name, pairs in splits.items():
        path = arguments.output_dir / f"{name}.jsonl"
        data = to_text(pairs).encode()
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        elif not path.is_file() or path.read_bytes() != data:
            sys.exit(f"{path} is not the file that this script writes.")


if __name__ == "__main__":
    main()
