"""Sentence pairs: a dataset from the Hub or from disk -> columns source and target -> token ids."""

import contextlib
import csv
import itertools
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import datasets
from accelerate import PartialState
from datasets import Dataset, DatasetDict, IterableDataset
from datasets.fingerprint import Hasher
from huggingface_hub.errors import HTTPError
from transformers import PreTrainedTokenizerBase

from ..errors import UserError

SPLITS = ("train", "validation", "test")
CSV = {"keep_default_na": False}  # "None" and "null" are words
TSV = {"sep": "\t", "quoting": csv.QUOTE_NONE, **CSV}  # where a quotation mark is one
LOADERS = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", CSV),
    ".tsv": ("csv", TSV),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"encoding": "utf-8-sig"}),
}
TOKENIZER_SAMPLE = 1_000_000  # pairs of a stream that a tokenizer is trained on

# ------------------------------------------------------------------------------------------------------------- loading


def load_pairs(args) -> dict[str, Dataset | IterableDataset]:
    """Loads the splits that there are, each with the columns `source` and `target`.

    `args` are the options of train.py that say where the data is: `dataset_name` (a Hub id or a directory laid out
    like one) or `train_file`, `validation_file` and `test_file`; `dataset_config_name`, `streaming`, the names of
    splits, languages and columns, `validation_split_percentage`, and how many samples to take.

    Raises:
        UserError: The dataset, a split, a column or a language does not exist; says which do.
    """
    with reading(where(args)):  # of a stream, which is read only here
        return load_splits(args)


@contextlib.contextmanager
def reading(what: str):
    """Turns what goes wrong in reading pairs into a UserError that says of what."""
    try:
        yield
    except (ValueError, HTTPError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{what} could not be read: {reason_of(error)}") from error


def load_splits(args) -> dict[str, Dataset | IterableDataset]:
    """[`load_pairs`], before what goes wrong in reading is put into a sentence."""
    raw = load_files(args) if args.train_file else load_dataset(args)
    names = {split: getattr(args, f"{split}_split") or split for split in SPLITS}
    for split, name in names.items():
        if name not in raw and (split == "train" or getattr(args, f"{split}_split")):
            raise UserError(f"There is no split '{name}' in {where(args)}; there are: {', '.join(raw)}.")
    pairs = {split: raw[name] for split, name in names.items() if name in raw}
    if "validation" not in pairs:
        hold_out_validation(pairs, args)
    columns = find_columns(pairs["train"], args)
    source, target = (column if isinstance(column, str) else " / ".join(column) for column in columns)
    PartialState().print(f"translating from column '{source}' to column '{target}' of {where(args)}")
    pairs = {split: select_pair(dataset, *columns, split) for split, dataset in pairs.items()}
    limits = {"train": args.max_train_samples, "validation": args.max_eval_samples, "test": args.max_predict_samples}
    for split, dataset in pairs.items():
        if limits[split] is not None:
            pairs[split] = dataset.take(limits[split])
        if args.streaming and split != "train":
            pairs[split] = Dataset.from_list(list(pairs[split]), features=pairs[split].features)
    return pairs


def where(args) -> str:
    """What the data is called in messages."""
    return args.dataset_name or args.train_file


def load_dataset(args) -> DatasetDict:
    """Loads `args.dataset_name`, a Hub id or a local directory."""
    try:
        return datasets.load_dataset(
            args.dataset_name,
            args.dataset_config_name,
            streaming=args.streaming,
            cache_dir=cache_of_directory(Path(args.dataset_name)),
            **options_of_directory(Path(args.dataset_name)),
        )
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError, LookupError, HTTPError) as error:
        # `datasets` lists the configurations there are where --dataset_config_name is missing or wrong.
        raise UserError(
            f"The dataset {args.dataset_name} could not be loaded: {reason_of(error)} Give --dataset_name a Hub id or "
            "a local directory, with --dataset_config_name where it has several, or name your files by --train_file."
        ) from error


def read_split(args) -> Dataset:
    """`args.split` of a dataset as it is, with its two sides as the columns `source` and `target`.

    `args` may have of what [`load_pairs`] takes `dataset_name`, `dataset_config_name`, and names of languages and
    columns. Raises UserError if the dataset, the split or a column does not exist.
    """
    names = ["dataset_config_name", "source_lang", "target_lang", "source_column", "target_column", "train_file"]
    args = SimpleNamespace(**dict.fromkeys(names) | {"streaming": False} | vars(args))
    splits = load_dataset(args)
    if args.split not in splits:
        raise UserError(f"There is no split '{args.split}' in {where(args)}; there are: {', '.join(splits)}.")
    rows = splits[args.split]
    pairs = select_pair(rows, *find_columns(rows, args), args.split)
    others = [name for name in rows.column_names if name not in pairs.column_names]
    return datasets.concatenate_datasets([pairs, rows.select_columns(others)], axis=1) if others else pairs


def options_of_directory(directory: Path) -> dict:
    """How the files of a local dataset are read, where they are all of one kind that needs to be told: .csv, .tsv."""
    kinds = {path.suffix for path in directory.rglob("*")} & LOADERS.keys() - {".txt"}  # a README.txt, a licence
    return CSV if kinds and kinds <= {".csv", ".tsv"} else {}


def cache_of_directory(directory: Path) -> str | None:
    """A cache for a local dataset as it is now; None, the usual one, for a dataset on the Hub.

    `datasets` goes by the name of a directory whose card lists its files, and would hand out what they once held.
    """
    if not directory.is_dir():
        return None
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    state = [(path.as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = Hasher.hash((directory.resolve().as_posix(), state))
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "local" / key)


def load_files(args) -> dict[str, Dataset | IterableDataset]:
    """Loads `args.train_file` and its companions, all of one kind; a .txt file holds `source<TAB>target` lines."""
    files = {split: getattr(args, f"{split}_file") for split in SPLITS if getattr(args, f"{split}_file")}
    for split, name in files.items():
        if not Path(name).is_file():
            raise UserError(f"--{split}_file {name} {'is no file' if Path(name).exists() else 'does not exist'}.")
        if Path(name).stat().st_size == 0:
            raise UserError(f"--{split}_file {name} is empty.")
    suffixes = {Path(name).suffix for name in files.values()}
    if len(suffixes) > 1 or not suffixes <= LOADERS.keys():
        raise UserError(
            f"The data files end in {', '.join(sorted(suffixes))}; they must all be of one kind: {', '.join(LOADERS)}."
        )
    loader, options = LOADERS[suffixes.pop()]
    try:
        raw = {  # one by one, as each may have columns of its own besides the two
            split: datasets.load_dataset(loader, data_files={split: name}, streaming=args.streaming, **options)[split]
            for split, name in files.items()
        }
        for split, name in files.items() if loader == "text" else ():
            with open(name, encoding="utf-8") as lines:
                if not any("\t" in line for line in itertools.islice(lines, 10_000)):
                    raise UserError(f"--{split}_file {name} has no tab; a .txt file holds source<TAB>target lines.")
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise UserError(f"The files {', '.join(files.values())} could not be read: {reason_of(error)}") from error
    if loader == "text":
        pair = datasets.Features({"source": datasets.Value("string"), "target": datasets.Value("string")})
        options = {"batched": True, "remove_columns": ["text"], "features": pair}
        return {split: dataset.map(split_at_tab, **options) for split, dataset in raw.items()}
    return raw


def reason_of(error: Exception) -> str:
    """What went wrong in one line, with the cause that `datasets` wraps."""
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    return text if len(text) <= 600 else f"{text[:600]} ..."


def split_at_tab(batch: dict) -> dict:
    pairs = [(*line.split("\t"), None)[:2] for line in batch["text"]]
    return {"source": [source for source, _ in pairs], "target": [target for _, target in pairs]}


def hold_out_validation(pairs: dict, args):
    """Takes the last pairs of the training split for validation, as many per cent as asked for."""
    if args.streaming:
        raise UserError(
            f"{where(args)} has no validation split, and a stream has no end to take one from; "
            "name one by --validation_split or --validation_file."
        )
    count = max(1, len(pairs["train"]) * args.validation_split_percentage // 100)
    if count >= len(pairs["train"]):
        raise UserError(f"{where(args)} has {len(pairs['train'])} pairs, too few to hold some out for validation.")
    PartialState().print(
        f"{where(args)} has no validation split: the last {count:,} pairs of the training split are held out."
    )
    rest = len(pairs["train"]) - count
    pairs["validation"] = pairs["train"].skip(rest)
    pairs["train"] = pairs["train"].take(rest)


def find_columns(dataset: Dataset | IterableDataset, args) -> tuple[str | tuple[str, str], str | tuple[str, str]]:
    """Finds the source and the target: a column's name, or the name of a `translation` column and a language in it.

    In this order: the columns that are named, two columns named after the languages, a `translation` column with both
    languages, and, if neither languages nor columns are named, the only two columns of text.
    """
    features = dataset.features
    if features is None:
        first = next(iter(dataset), None)
        if first is None:
            raise UserError(f"{where(args)} has no pairs.")
        features = {name: datasets.Value("string") for name in first}
    text = [name for name, feature in features.items() if is_text(feature)]
    if args.source_column or args.target_column:
        for option in ["source_column", "target_column"]:
            name = getattr(args, option)
            if name is None:
                raise UserError(f"--{option} is missing: name both columns, of {', '.join(features)}.")
            if name not in features:
                raise UserError(
                    f"--{option} {name} does not exist in {where(args)}; its columns: {', '.join(features)}."
                )
            if name not in text:
                raise UserError(f"--{option} {name} holds no text; columns of text: {', '.join(text) or 'none'}.")
        return args.source_column, args.target_column
    languages = [args.source_lang, args.target_lang]
    if all(language in text for language in languages):
        return args.source_lang, args.target_lang
    nested = languages_of(features.get("translation"))
    if languages == [None, None] and len(nested) == 2:
        languages = nested
    if nested and all(language in nested for language in languages):
        return ("translation", languages[0]), ("translation", languages[1])
    if languages == [None, None] and {"source", "target"} <= set(text):
        return "source", "target"
    if languages == [None, None] and len(text) == 2:
        return text[0], text[1]
    if nested:
        raise UserError(
            f"--source_lang {args.source_lang} and --target_lang {args.target_lang} must be two of the languages of "
            f"{where(args)}: {', '.join(nested)}."
        )
    for language in languages:
        if language in features and language not in text:
            raise UserError(f"The column {language} holds no text; columns of text: {', '.join(text) or 'none'}.")
    if languages == [None, None]:
        raise UserError(
            f"Which columns of {where(args)} hold the pairs is not clear; its columns are {', '.join(features)}, "
            f"those of text {', '.join(text) or 'none'}. Name two by --source_lang and --target_lang, or "
            "--source_column and --target_column."
        )
    raise UserError(
        f"--source_lang {args.source_lang} and --target_lang {args.target_lang} must both be columns of "
        f"{where(args)}, which are: {', '.join(features)}; or name two by --source_column and --target_column."
    )


def languages_of(feature) -> list[str]:
    """The languages of a `translation` column, which is of its own type or a plain struct."""
    return list(feature) if isinstance(feature, dict) else list(getattr(feature, "languages", []))


def is_text(feature) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")


def select_pair(dataset, source: str | tuple[str, str], target: str | tuple[str, str], split: str):
    """The dataset with the columns `source` and `target` alone; raises UserError if they are one, or not there."""
    if source == target:
        raise UserError(f"Source and target are the same, {source}; name two that differ.")
    if isinstance(source, tuple):
        column, languages = source[0], (source[1], target[1])

        def unnest(batch: dict) -> dict:
            rows = [row or {} for row in batch[column]]
            return {
                name: [row.get(lang) for row in rows]
                for name, lang in zip(("source", "target"), languages, strict=True)
            }

        return dataset.map(unnest, batched=True, remove_columns=list(dataset.features or [column]))
    missing = {source, target} - set(dataset.features or (source, target))
    if missing:
        raise UserError(f"The {split} split has no column {' and '.join(sorted(missing))}.")
    names = {old: new for old, new in ((source, "source"), (target, "target")) if old != new}
    dataset = dataset.select_columns([source, target])
    return dataset.rename_columns(names) if names else dataset


def sentences(dataset: Dataset | IterableDataset) -> tuple[Iterator[str], int | None]:
    """All texts of both sides, of a stream the first, and how many there are at most, where that is known."""
    length = None
    if isinstance(dataset, IterableDataset):
        dataset = dataset.take(TOKENIZER_SAMPLE)
    else:
        length = 2 * len(dataset)
    return filled_texts(dataset), length


def filled_texts(dataset: Dataset | IterableDataset) -> Iterator[str]:
    with reading("The training pairs"):
        for batch in dataset.iter(1000):
            yield from (text for side in ("source", "target") for text in batch[side] if is_filled(text))


# ----------------------------------------------------------------------------------------------------------- token ids


def tokenize_pairs(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_source_length: int,
    max_target_length: int,
    split: str = "train",
    num_proc: int | None = None,
) -> tuple[Dataset | IterableDataset, dict[str, int] | None]:
    """Token ids of every pair, and how many were dropped and why; None of a stream, where that is not known.

    A tokenizer that splits the two languages in ways of their own (Marian's) is told which side is the target.
    Pairs of which a side is empty, missing or no text, or longer than its limit in tokens (the end-of-sentence token
    counts), are dropped; none is cut off. The columns `input_ids`, `labels`, `source_length` and `target_length` come
    to `source` and `target`. Map-style datasets are tokenised at once, with a progress bar, and cached by `datasets`,
    in memory that does not grow with the dataset; a stream as it is read.

    Raises:
        UserError: No pair is left.
    """

    def encode(batch: dict) -> dict:
        """A batch of pairs -> those of them that are kept, with their token ids and lengths."""
        filled = are_filled(batch)
        columns = {side: list(itertools.compress(batch[side], filled)) for side in ("source", "target")}
        columns |= {"input_ids": [], "labels": []}
        if any(filled):  # a tokenizer does not take an empty list
            columns |= tokenizer(
                columns["source"], text_target=columns["target"], return_attention_mask=False, verbose=False
            )
        columns["source_length"] = [len(ids) for ids in columns["input_ids"]]
        columns["target_length"] = [len(ids) for ids in columns["labels"]]
        lengths = zip(columns["source_length"], columns["target_length"], strict=True)
        kept = [source <= max_source_length and target <= max_target_length for source, target in lengths]
        return {name: list(itertools.compress(columns[name], kept)) for name in PAIR_FEATURES}

    if isinstance(dataset, IterableDataset):
        return dataset.map(encode, batched=True), None
    workers = num_proc if num_proc and len(dataset) > 1000 * num_proc else None
    filled = dataset.filter(are_filled, batched=True, num_proc=workers, desc=f"Reading {split}")
    empty = len(dataset) - len(filled)
    encoded = (filled if empty else dataset).map(
        encode, batched=True, features=PAIR_FEATURES, num_proc=workers, desc=f"Tokenising {split}"
    )
    drops = {"empty": empty, "too long": len(filled) - len(encoded)}
    if len(encoded) == 0:
        limits = f"{max_source_length} or {max_target_length} tokens"
        if split == "train":
            limits = f"--max_source_length {max_source_length} or --max_target_length {max_target_length} tokens"
        raise UserError(
            f"No usable pair is left of the {len(dataset)} of the {split} split: {drops['empty']} have an empty or "
            f"missing side, {drops['too long']} are longer than {limits}."
        )
    return encoded, drops


PAIR_FEATURES = datasets.Features(
    {
        "source": datasets.Value("string"),
        "target": datasets.Value("string"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "labels": datasets.List(datasets.Value("int32")),
        "source_length": datasets.Value("int32"),
        "target_length": datasets.Value("int32"),
    }
)


def are_filled(batch: dict) -> list[bool]:
    """Of which pairs both sides hold text."""
    return [is_filled(s) and is_filled(t) for s, t in zip(batch["source"], batch["target"], strict=True)]


def is_filled(text) -> bool:
    return isinstance(text, str) and bool(text.strip())


def fingerprint(dataset: Dataset | IterableDataset) -> str | None:
    """A digest of all token ids in their order; None of a stream, which is checked where it is read on."""
    if isinstance(dataset, IterableDataset):
        return None
    content = blake2b(digest_size=16)
    for table in dataset.select_columns(["input_ids", "labels"]).with_format("arrow").iter(10_000):
        for column in table.columns:
            ids = column.combine_chunks()  # however many processes wrote them
            content.update(ids.value_lengths().to_numpy())
            content.update(ids.flatten().to_numpy())
    return content.hexdigest()


iter_texts = sentences
