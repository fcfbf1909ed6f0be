"""The splits of a run as token ids."""

import copy
import re
from unittest.mock import DEFAULT, Mock

import pytest
from helpers import text_dataset
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data import encoding
from vanilla_transformer.data.encoding import longest_side_of, tokenize_pairs, tokenize_splits
from vanilla_transformer.data.options import DataOptions

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
        r"(?m)^warning: (\d) of 10 (\w+) pairs .* source is longer than (\d+) tokens or the target longer than (\d+);",
        capsys.readouterr().out,
    )
    assert said == [(str(long), "train", "5", "30"), (str(long), "test", "40", "40")] * is_said


def test_an_interrupt_while_tokenizing_says_what_is_kept(byte_tokenizer, monkeypatch):
    encode = Mock(wraps=tokenize_pairs, side_effect=[DEFAULT, KeyboardInterrupt])
    monkeypatch.setattr(encoding, "tokenize_pairs", encode)
    pairs = {"train": text_dataset([("A dog", "x")]), "validation": text_dataset([("A dog", "x")])}
    with pytest.raises(KeyboardInterrupt, match="^stopped .* validation; .* tokens of train will be found"):
        tokenize_splits(pairs, byte_tokenizer, DataOptions(), VanillaTransformerConfig(), False)


def test_the_longest_side_of_all_pairs(byte_tokenizer):
    pairs = text_dataset([("1", "22"), ("333333", "4"), ("1", "4444")])
    train, _ = tokenize_pairs(pairs, byte_tokenizer, 50, 50)
    assert longest_side_of(train, 50) == max(
        len(side) for pair in train for side in (pair["input_ids"], pair["labels"])
    )
    assert longest_side_of(pairs.to_iterable_dataset(), 50) == 50
