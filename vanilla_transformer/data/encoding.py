"""Sentence pairs -> token ids, and digests of both."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sized
from functools import partial
from hashlib import blake2b
from pathlib import Path

import datasets
import numpy as np
import pyarrow.compute as pc
import tokenizers
import transformers
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from ..sentences_vanilla_transformer import longest_text
from .columns import REFERENCES
from .options import DataOptions
from .rows import TEXTS, random_rows, reading_data
from .texts import is_filled

TOKENIZER_SAMPLE = 500_000  # pairs that a tokenizer is trained on
MANY_TOO_LONG = 0.1  # share of the pairs of a split
PAIR_FEATURES = datasets.Features(
    TEXTS
    | dict.fromkeys(("input_ids", "labels"), datasets.List(datasets.Value("int32")))
    | dict.fromkeys(("source_length", "target_length"), datasets.Value("int32"))
)


def iter_texts(dataset: Dataset | IterableDataset) -> Iterator[str]:
    """The non-empty texts of both sides, of at most half a million pairs: from random places, or the first ones of a
    stream."""
    if isinstance(dataset, Sized) and len(dataset) > TOKENIZER_SAMPLE:
        print(f"the tokenizer is trained on {TOKENIZER_SAMPLE:,} pairs from everywhere in the training pairs")
    with reading_data("The training pairs"):
        for batch in random_rows(dataset, TOKENIZER_SAMPLE).iter(1000):
            yield from filter(is_filled, itertools.chain(batch["source"], batch["target"]))


def sample_texts(
    dataset: Dataset | IterableDataset, count: int = 1000, tags: Iterable[str] = ()
) -> dict[str, list[str]]:
    """The non-empty texts of each side of at most `count` pairs: from random places, or the first ones of a stream.

    Sources are without their `tags`.
    """
    rows = sample_rows(dataset, count)
    texts = {side: [row[side] for row in rows if is_filled(row[side])] for side in ("source", "target")}
    for tag in tags:
        texts["source"] = [text.removeprefix(f"{tag} ") for text in texts["source"]]
    return texts


def sample_rows(dataset: Dataset | IterableDataset, count: int) -> list[dict]:
    """At most `count` rows in their order: from random places, or the first ones of a stream."""
    with reading_data("The training pairs"):
        return list(random_rows(dataset, count))


def sample_lengths(
    dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, limit: int
) -> tuple[list[tuple[int, int]], int]:
    """(source tokens, target tokens) of each pair in a sample, and the size of the sample.

    Pairs with an empty side, or with too many characters for `limit` tokens, only count in the size.
    """
    rows = [(row["source"], row["target"]) for row in sample_rows(dataset, 2000)]
    count = len(rows)
    rows = [row for row in rows if all(is_filled(text) and len(text) <= longest_text(limit) for text in row)]
    encoded = encode_texts(*map(list, zip(*rows, strict=True)), tokenizer) if rows else {"input_ids": [], "labels": []}
    return [(len(s), len(t)) for s, t in zip(encoded["input_ids"], encoded["labels"], strict=True)], count


def encode_pairs(
    batch: dict, tokenizer: PreTrainedTokenizerBase, max_source_length: int, max_target_length: int
) -> dict[str, list]:
    """The columns of [`PAIR_FEATURES`] for the pairs of texts that are within the limits."""
    names = [*PAIR_FEATURES, *(name for name in REFERENCES if name in batch)]
    limits = longest_text(max_source_length), longest_text(max_target_length)  # in characters
    pairs = zip(batch["source"], batch["target"], strict=True)
    short = [len(source) <= limits[0] and len(target) <= limits[1] for source, target in pairs]
    if not any(short):
        return {name: [] for name in names}
    batch = {name: list(itertools.compress(batch[name], short)) for name in names if name in batch}
    columns = batch | encode_texts(batch["source"], batch["target"], tokenizer)
    columns["source_length"] = list(map(len, columns["input_ids"]))
    columns["target_length"] = list(map(len, columns["labels"]))
    lengths = zip(columns["source_length"], columns["target_length"], strict=True)
    kept = [source <= max_source_length and target <= max_target_length for source, target in lengths]
    return {name: list(itertools.compress(columns[name], kept)) for name in names}


def encode_texts(sources: list[str], targets: list[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
    """The `input_ids` of the sources and the `labels` of the targets."""
    if type(tokenizer) is not PreTrainedTokenizerFast:  # it may treat the two languages differently
        return tokenizer(sources, text_target=targets, return_attention_mask=False, verbose=False)
    backend = tokenizer.backend_tokenizer  # transformers would also look for offsets, words and masks
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    source, target = ([one.ids for one in backend.encode_batch_fast(texts)] for texts in (sources, targets))
    return {"input_ids": source, "labels": target}


def tokenize_pairs(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_source_length: int,
    max_target_length: int,
    split: str = "train",
    num_proc: int | None = None,
) -> tuple[Dataset, dict[str, int]]:
    """Tokenizes the pairs; returns them with the number of pairs dropped for each reason.

    Pairs with an empty or missing side, or longer than a limit in tokens (including the end-of-sentence token), are
    dropped; none is truncated. Those with far too many characters are dropped untokenized, see [`longest_text`]. Adds
    `input_ids`, `labels`, `source_length` and `target_length`. A tokenizer that treats the two languages differently
    (Marian's) is told which side is the target. `datasets` caches the result on disk. Raises UserError if no pair is
    left.
    """

    limits = {"max_source_length": max_source_length, "max_target_length": max_target_length}
    encode = partial(encode_pairs, tokenizer=tokenizer, **limits)
    workers = num_proc if num_proc and len(dataset) > 1000 * num_proc else None
    filled = dataset.filter(are_filled, batched=True, num_proc=workers, desc=f"Reading {split}")
    features = PAIR_FEATURES | REFERENCES if "references" in dataset.column_names else PAIR_FEATURES
    options = {"batched": True, "features": datasets.Features(features), "num_proc": workers}
    options["desc"] = f"Tokenizing {split}"
    to_encode = filled if len(filled) < len(dataset) else dataset
    if type(tokenizer) is PreTrainedTokenizerFast:
        # `datasets` would hash its wrapper, which is another one after saving and loading, as by a resumed run.
        content = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
        limits |= {"characters": [longest_text(limit) for limit in limits.values()]}
        code = (Path(__file__).read_bytes(), transformers.__version__, tokenizers.__version__)
        key = (to_encode._fingerprint, content, tokenizer.split_special_tokens, limits, code)
        options["new_fingerprint"] = Hasher.hash(key)
    encoded = to_encode.map(encode, **options)
    drops = {"empty": len(dataset) - len(filled), "too long": len(filled) - len(encoded)}
    if len(encoded) == 0:
        names = ("--max_source_length ", "--max_target_length ") if split == "train" else ("", "")
        remedy = "; raise these limits, or give shorter texts." if drops["too long"] else "."
        raise UserError(
            f"None of the {len(dataset)} pairs of the {split} split is usable: {drops['empty']} have an empty or "
            f"missing side, {drops['too long']} a source longer than {names[0]}{max_source_length} or a target longer "
            f"than {names[1]}{max_target_length} tokens{remedy}"
        )
    return encoded, drops


def are_filled(batch: dict) -> list[bool]:
    return [is_filled(s) and is_filled(t) for s, t in zip(batch["source"], batch["target"], strict=True)]


def fingerprint(dataset: Dataset | IterableDataset) -> str | None:
    """A digest of all token ids in order, by which a resumed run notices changed data; None for a stream."""
    if isinstance(dataset, IterableDataset):
        return None
    content = blake2b(digest_size=16)
    for table in dataset.select_columns(["input_ids", "labels"]).with_format("arrow").iter(10_000):
        for column in table.columns:
            ids = column.combine_chunks()  # the same whatever the number of writers
            content.update(ids.value_lengths().to_numpy())
            content.update(ids.flatten().to_numpy())
    return content.hexdigest()


def digest_texts(dataset: Dataset) -> str:
    """A digest of all texts in order. The fingerprint that `datasets` keeps may be that of other texts: of a directory
    with a dataset card, it is made from its name."""
    content = blake2b(digest_size=16)
    for table in dataset.select_columns(["source", "target"]).with_format("arrow").iter(10_000):
        for column in table.columns:
            content.update(pc.binary_length(column.combine_chunks()).fill_null(-1).to_numpy())
            content.update("".join(filter(None, column.to_pylist())).encode())
    return content.hexdigest()


def lengths_of(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The source and target lengths of all pairs in tokens."""
    table = dataset.select_columns(["source_length", "target_length"]).with_format("arrow")[:]
    return tuple(np.asarray(table[name], dtype=np.int32) for name in table.column_names)


def tokenize_splits(
    pairs: dict, tokenizer, options: DataOptions, config: VanillaTransformerConfig, is_fine_tuning: bool
) -> dict:
    """Tokenizes all splits but streams, and prints how many pairs each has and how many were dropped.

    Validation and test drop a pair only if a side is empty, or longer than the larger of `max_position_embeddings` and
    the limits of training, or than a table of learned positions.
    Sets `tokenizer.model_max_length`, above which the Translator splits texts, to the longest training source or, if
    pairs are joined, to twice that, up to `max_source_length`: few joined sources are longer. In fine-tuning, it is
    never lowered: the model may have read longer sources.
    """
    limit = min(max(config.max_position_embeddings, options.length_limit), config.longest_sequence)
    splits = {}
    for split, dataset in pairs.items():
        if isinstance(dataset, IterableDataset):
            splits[split] = dataset
            PartialState().print(f"{split}: a stream; empty and too long pairs will be dropped")
            continue
        limits = (options.max_source_length, options.max_target_length) if split == "train" else (limit, limit)
        try:
            workers = options.preprocessing_num_workers
            splits[split], drops = tokenize_pairs(dataset, tokenizer, *limits, split, workers)
        except KeyboardInterrupt:
            kept = ["the tokenizer"] if isinstance(pairs["train"], Sized) else []
            kept += [f"the tokens of {name}" for name, done in splits.items() if isinstance(done, Sized)]
            found = f"{' and '.join(kept)} will be read from the cache; " if kept else ""
            message = f"stopped while tokenizing {split}; {found}{split} will be tokenized from its start"
            raise KeyboardInterrupt(message) from None
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in drops.items())
        PartialState().print(f"{split}: {len(splits[split]):,} pairs (dropped: {reasons})")
        if drops["too long"] > MANY_TOO_LONG * len(dataset):
            PartialState().print(
                f"warning: {drops['too long']:,} of {len(dataset):,} {split} pairs are dropped, since the source is "
                f"longer than {limits[0]} tokens or the target longer than {limits[1]}"
                + ("; raise --max_source_length or --max_target_length." if split == "train" else ".")
            )
    train = splits["train"]
    longest = lengths_of(train)[0].max() if isinstance(train, Sized) else options.max_source_length
    if options.joined_pairs:
        longest = max(longest, min(2 * longest, options.max_source_length))
    before = tokenizer.model_max_length if is_fine_tuning else 0
    tokenizer.model_max_length = max(int(longest), before if before < VERY_LARGE_INTEGER else 0)
    return splits
