"""Token ids of pairs, of the splits of a run, and their fingerprints."""

import copy
import re
from hashlib import blake2b
from unittest.mock import DEFAULT, Mock

import datasets
import numpy as np
import pytest
from datasets import Dataset
from helpers import text_dataset
from pair_files import PAIRS, load, rows, streamed, texts, write
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data import encoding
from vanilla_transformer.data.encoding import (
    PAIR_FEATURES,
    fingerprint,
    iter_texts,
    sample_texts,
    tokenize_pairs,
    tokenize_splits,
)
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.tokenizer import tokenizer_for_training, train_tokenizer
from vanilla_transformer.errors import UserError

DIRTY = [("a", "b"), (None, "b"), ("a", None), ("", "b"), ("a", " \t"), ("\u3000", "b"), ("c d", "e"), ("x" * 60, "b")]
DIRTY += [("a", "y" * 60), (None, None)]


def test_unusable_pairs_are_dropped_and_counted(byte_tokenizer):
    large = datasets.Features(dict.fromkeys(("source", "target"), datasets.Value("large_string")))
    for dataset in (text_dataset(DIRTY), text_dataset(DIRTY).cast(large)):
        pairs, drops = tokenize_pairs(dataset, byte_tokenizer, 20, 20)
        assert texts(pairs) == [("a", "b"), ("c d", "e")]
        assert drops == {"empty": 6, "too long": 2}
        assert pairs.features == PAIR_FEATURES  # as small as they can be
    for pair in pairs:
        assert pair["input_ids"] == byte_tokenizer(pair["source"]).input_ids
        assert pair["labels"] == byte_tokenizer(text_target=pair["target"]).input_ids
        assert pair["source_length"] == len(pair["input_ids"]) and pair["target_length"] == len(pair["labels"])


@pytest.mark.parametrize("splits_special_tokens", [False, True])
def test_texts_are_encoded_as_a_call_of_the_tokenizer_does(splits_special_tokens):
    """Whatever the last call left in it."""
    tokenizer = train_tokenizer(["a dog"], 261, tags=["<bt>"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<sep>"]})
    tokenizer.split_special_tokens = splits_special_tokens
    sources, targets = ["<bt> a dog <sep> </s>", "", "dog " * 9], ["a", "</s>", " ein  Hund\n"]
    expected = tokenizer(sources, text_target=targets)
    tokenizer(sources, truncation=True, max_length=3, padding="max_length", split_special_tokens=False)
    found = encoding.encode_texts(sources, targets, tokenizer)
    assert found == {"input_ids": expected.input_ids, "labels": expected.labels}


@pytest.mark.parametrize("batches", [1, 2])
def test_monstrous_texts_are_dropped_before_they_are_tokenized(batches, byte_tokenizer, monkeypatch):
    """Also where a whole batch, of 1,000 pairs, is of them."""
    encode = Mock(wraps=encoding.encode_texts)
    monkeypatch.setattr(encoding, "encode_texts", encode)
    monsters = [("x" * 10_001, "b"), ("a", "y" * 10_001)] * (500 * batches - 499)
    pairs, drops = tokenize_pairs(text_dataset([*monsters, ("a", "b")]), byte_tokenizer, 20, 20)
    assert texts(pairs) == [("a", "b")] and drops == {"empty": 0, "too long": len(monsters)}
    assert {text for call in encode.call_args_list for side in call.args[:2] for text in side} == {"a", "b"}
    long = text_dataset([("x" * 20_000, "b")])
    assert len(tokenize_pairs(long, byte_tokenizer, 20_002, 20)[0]) == 1


def test_marian_tokenizer_is_told_the_target(marian, marian_pairs):
    tokenizer = tokenizer_for_training(str(marian))
    whole = text_dataset(marian_pairs * 126)  # processes are for thousands of pairs
    pairs, drops = tokenize_pairs(whole, tokenizer, 99, 99, num_proc=2)
    assert (len(pairs), drops) == (len(whole), {"empty": 0, "too long": 0})
    for pair, (source, target) in zip(pairs, marian_pairs, strict=False):
        assert pair["input_ids"] == tokenizer(source).input_ids
        assert pair["labels"] == tokenizer(text_target=target).input_ids != tokenizer(target).input_ids


def test_limits_count_the_end_of_sentence(byte_tokenizer):
    pairs, (source, target) = text_dataset([("a dog", "ein")]), (7, 5)  # with a space before, and the end
    assert len(tokenize_pairs(pairs, byte_tokenizer, source, target)[0]) == 1
    for limits in [(source - 1, target), (source, target - 1)]:
        with pytest.raises(UserError, match="1 a source longer than"):
            tokenize_pairs(pairs, byte_tokenizer, *limits)


def test_no_pair_left(byte_tokenizer):
    pairs = text_dataset([(None, "b"), ("", ""), ("x" * 60, "b")])
    for split, limit in [("train", "--max_source_length 20 or .* --max_target_length 30"), ("test", "20 or .* 30")]:
        message = f"None of the 3 pairs of the {split} split is usable: 2 have .*1 a source longer than {limit} tokens"
        with pytest.raises(UserError, match=message):
            tokenize_pairs(pairs, byte_tokenizer, 20, 30, split)


@pytest.fixture
def tokenizer():
    return train_tokenizer([text for pair in PAIRS for text in pair], 280)


@pytest.fixture
def cached(tmp_path):
    """cached(tokenizer, limit) -> the files with the tokens of the pairs of a file, which is opened anew."""
    path = write(tmp_path / "train.jsonl", rows(pairs=[*PAIRS, ("", "b")]))

    def cached(tokenizer, limit: int = 40):
        train = load(train_file=path, validation_file=path)["train"]
        return tokenize_pairs(train, tokenizer, 40, limit)[0].cache_files

    return cached


def test_tokenized_pairs_are_cached(tokenizer, cached):
    """Although a tokenizer changes when it is used; other limits and another tokenizer have other tokens."""
    files = cached(tokenizer)
    assert files == cached(tokenizer) != cached(tokenizer, 39)
    tokenizer.split_special_tokens = True  # only in its wrapper
    assert cached(tokenizer) != files


@pytest.mark.parametrize("kind", ["trained", "truncating"])
def test_a_tokenizer_that_was_saved_and_loaded_finds_the_tokens(kind, tokenizer, cached, tmp_path):
    """As that of a checkpoint, with which a run resumes."""
    if kind == "truncating":  # as that of BERT may be, until it is used
        tokenizer.backend_tokenizer.enable_truncation(9)
    files = cached(tokenizer)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert cached(tokenizer_for_training(str(tmp_path / "saved"))) == files


def test_several_processes_tokenize_as_one(byte_tokenizer):
    pairs = text_dataset([*DIRTY, *((f"a dog {i}", f"ein Hund {i}" if i % 9 else None) for i in range(2500))])
    alone, drops = tokenize_pairs(pairs, byte_tokenizer, 20, 20)
    shared, shared_drops = tokenize_pairs(pairs, byte_tokenizer, 20, 20, num_proc=2)
    assert shared_drops == drops == {"empty": 6 + 278, "too long": 2}
    assert list(shared) == list(alone)
    assert fingerprint(shared) == fingerprint(alone) != fingerprint(alone.select([1, 0, *range(2, len(alone))]))


def test_texts_of_both_sides():
    expected = [text for side in zip(*DIRTY, strict=True) for text in side if text and text.strip()]
    for dataset in (text_dataset(DIRTY), text_dataset(DIRTY).to_iterable_dataset()):
        assert list(iter_texts(dataset)) == expected


@streamed
def test_a_tokenizer_is_trained_on_a_sample_of_many_pairs(streaming, monkeypatch, capsys):
    monkeypatch.setattr(encoding, "TOKENIZER_SAMPLE", 10)
    dataset = text_dataset([(f"a{number}", f"b{number}") for number in range(100)])
    found = list(iter_texts(dataset.to_iterable_dataset() if streaming else dataset))
    numbers = [int(text[1:]) for text in found if text[0] == "a"]
    assert len(found) == 20 and len(numbers) == 10
    assert numbers == (list(range(10)) if streaming else sorted(set(numbers)))
    assert (numbers[-1] > 50) == ("is trained on 10 pairs" in capsys.readouterr().out) == (not streaming)


def test_a_sample_of_the_texts_is_from_everywhere_and_bounded():
    pairs = text_dataset([("", None), *((f"a dog {i}", f"ein Hund {i}") for i in range(2499))])
    sampled = sample_texts(pairs, 1000)
    numbers = [int(text.split()[-1]) for text in sampled["source"]]
    assert numbers == sorted(set(numbers)) and len(numbers) in (999, 1000) and sum(n % 2 for n in numbers) > 400
    assert numbers[0] < 50 and numbers[-1] > 2450 and sampled["target"] == [f"ein Hund {n}" for n in numbers]
    assert sample_texts(pairs.to_iterable_dataset(), 3)["source"] == ["a dog 0", "a dog 1"]
    assert sample_texts(pairs.select([])) == sample_texts(pairs.take(1)) == {"source": [], "target": []}


# --------------------------------------------------------------------------------------------------------- fingerprint


def tokens(pairs: list[tuple]) -> Dataset:
    """A tokenized dataset of the given token ids."""
    columns = {"input_ids": [s for s, _ in pairs], "labels": [t for _, t in pairs]}
    columns |= {"source_length": [len(s) for s, _ in pairs], "target_length": [len(t) for _, t in pairs]}
    columns |= dict.fromkeys(("source", "target"), ["x"] * len(pairs))
    return Dataset.from_dict(columns, PAIR_FEATURES)


IDS = [([i % 7 + 3, 5, 2], [i % 5 + 3, 2][: 1 + i % 2]) for i in range(25_000)]
CHANGES = {
    "last token": lambda ids: [*ids[:-1], (ids[-1][0], [*ids[-1][1][:-1], 9])],
    "two pairs swapped": lambda ids: [*ids[:11_000], ids[11_001], ids[11_000], *ids[11_002:]],
    "one missing": lambda ids: [*ids[:12_000], *ids[12_001:]],
    "one more": lambda ids: [*ids, ids[0]],
    "a token moved to the next sentence": lambda ids: [([3, 5], ids[0][1]), ([2, *ids[1][0]], ids[1][1]), *ids[2:]],
    "sides swapped": lambda ids: [(t, s) for s, t in ids],
}


@pytest.fixture(scope="module")
def original():
    return fingerprint(tokens(IDS))


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_notices_changes(change, original):
    assert fingerprint(tokens(CHANGES[change](IDS))) != original


@pytest.mark.slow
def test_fingerprint_depends_on_token_ids_alone(original):
    """Not on chunks, indices or texts; and it is the same in every process."""
    same = {"in parts": datasets.concatenate_datasets([tokens(IDS[:7_001]), tokens(IDS[7_001:])])}
    same["selected"] = tokens(IDS[::-1]).select(range(len(IDS) - 1, -1, -1))
    same["part of more"] = tokens([*IDS[:5], *IDS]).skip(5)
    same["other texts"] = tokens(IDS).map(lambda pair: {"source": pair["source"] + "y"})
    same["other format"] = tokens(IDS).with_format("numpy")
    assert {name: fingerprint(dataset) for name, dataset in same.items()} == dict.fromkeys(same, original)
    numbers = np.array([2, 3, 9, 1, 2], dtype="<i4")  # lengths and ids of the sources, then of the targets
    assert fingerprint(tokens([([3, 9], [2])])) == blake2b(numbers, digest_size=16).hexdigest()
    assert fingerprint(tokens(IDS[:3]).to_iterable_dataset()) is None


# ------------------------------------------------------------------------------------------------- the splits of a run

LIMITS = {"max_source_length": 9, "max_target_length": 30}


@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streamed"])
@pytest.mark.parametrize(
    "before, keeps_length, expected", [(999, False, 8), (999, True, 999), (3, True, 8), (VERY_LARGE_INTEGER, True, 8)]
)
def test_the_tokenizer_keeps_the_longest_training_source(
    before, keeps_length, expected, streaming, byte_tokenizer, capsys
):
    """In tokens; that of a stream is unknown, but for its limit."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.model_max_length = before
    train = text_dataset([("123456", "b"), ("123456789", "b"), ("1", "b" * 20)])
    pairs = {"train": train.to_iterable_dataset() if streaming else train, "test": train}
    config = VanillaTransformerConfig(max_position_embeddings=19)
    splits = tokenize_splits(pairs, tokenizer, DataOptions(**LIMITS), config, keeps_length)
    assert streaming or [len(pair["input_ids"]) for pair in splits["train"]] == [8, 3]
    said = capsys.readouterr().out
    assert streaming or "train: 2 pairs (dropped: 0 empty, 1 too long)" in said
    assert len(splits["test"]) == 3  # of up to 30 tokens, the largest of the limits and of the positions
    assert tokenizer.model_max_length == (9 if streaming and expected == 8 else expected)


@pytest.mark.parametrize("long, is_said", [(1, False), (2, True), (9, True)])
def test_many_pairs_that_are_too_long_are_a_warning(long, is_said, byte_tokenizer, capsys):
    """Of 10 pairs with limits of 5 and 30 tokens; in evaluation, positions are the limit of both sides."""
    pairs = text_dataset([("1", "b" * 50)] * long + [("1", "2")] * (10 - long))
    config = VanillaTransformerConfig(max_position_embeddings=40)
    tokenizer = copy.deepcopy(byte_tokenizer)
    options = DataOptions(**LIMITS | {"max_source_length": 5})
    tokenize_splits({"train": pairs, "test": pairs}, tokenizer, options, config, False)
    said = re.findall(
        r"(?m)^warning: (\d) of 10 (\w+) pairs .* longer than (\d+) tokens or the target longer than (\d+)(;|\.)",
        capsys.readouterr().out,
    )
    assert said == [(str(long), "train", "5", "30", ";"), (str(long), "test", "40", "40", ".")] * is_said


def test_an_interrupt_while_tokenizing_says_what_is_kept(byte_tokenizer, monkeypatch):
    encode = Mock(wraps=tokenize_pairs, side_effect=[DEFAULT, KeyboardInterrupt])
    monkeypatch.setattr(encoding, "tokenize_pairs", encode)
    pairs = dict.fromkeys(("train", "validation"), text_dataset([("A dog", "x")]))
    with pytest.raises(KeyboardInterrupt, match="^stopped .* validation; .* tokens of train will be read"):
        tokenize_splits(pairs, byte_tokenizer, DataOptions(), VanillaTransformerConfig(), False)
