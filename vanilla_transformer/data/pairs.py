"""Sentence pairs: a dataset from the Hub or from disk -> columns `source` and `target` -> token ids."""

import contextlib
import csv
import itertools
import textwrap
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import datasets
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher
from huggingface_hub.errors import HTTPError
from transformers import PreTrainedTokenizerBase

from ..errors import UserError

SPLITS = {"train": "max_train_samples", "validation": "max_eval_samples", "test": "max_predict_samples"}
CSV = {"keep_default_na": False}  # "None" and "null" are words
TSV = {"sep": "\t", "quoting": csv.QUOTE_NONE, **CSV}  # a quotation mark is text
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}
OPTIONS = {".csv": CSV, ".tsv": TSV, ".txt": {"encoding": "utf-8-sig"}}
TOKENIZER_SAMPLE = 1_000_000  # pairs of a stream that a tokenizer is trained on
PAIR = datasets.Features(dict.fromkeys(("source", "target"), datasets.Value("string")))
PAIR_FEATURES = datasets.Features(
    PAIR
    | dict.fromkeys(("input_ids", "labels"), datasets.List(datasets.Value("int32")))
    | dict.fromkeys(("source_length", "target_length"), datasets.Value("int32"))
)

# ------------------------------------------------------------------------------------------------------------- loading


def load_pairs(args) -> dict[str, Dataset | IterableDataset]:
    """Loads the training, validation and test splits that exist, each with the columns `source` and `target`.

    `args` are the data options of train.py: `dataset_name` (a Hub id or a directory laid out like one) or
    `train_file`, `validation_file` and `test_file`; `dataset_config_name`, `streaming`, the names of splits,
    languages and columns, `validation_split_percentage`, and the numbers of samples. Validation and test splits are
    never streams.

    Raises:
        UserError: The dataset, a split, a column or a language does not exist; the message lists those that do.
    """
    raw = load_files(args) if args.train_file else load_dataset(args)
    names = {split: getattr(args, f"{split}_split") or split for split in SPLITS}
    for split, name in names.items():
        if split == "train" or getattr(args, f"{split}_split"):
            check_split(raw, name, args)
    pairs = {split: raw[name] for split, name in names.items() if name in raw}
    warn_of_training_pairs(pairs, names, args)
    if "validation" not in pairs:
        hold_out_validation(pairs, args)
    with reading(where(args)):  # a stream is first read here
        columns = find_columns(pairs["train"], args)
        source, target = (column if isinstance(column, str) else " / ".join(column) for column in columns)
        PartialState().print(f"translating from column '{source}' to column '{target}' of {where(args)}")
        for split, dataset in pairs.items():
            pairs[split] = select_pair(dataset, *columns, split)
            count = getattr(args, SPLITS[split])
            if count is not None:
                pairs[split] = pairs[split].take(count)
            if args.streaming and split != "train":
                pairs[split] = Dataset.from_list(list(pairs[split]), features=pairs[split].features)
    return pairs


def load_split(args) -> Dataset:
    """Loads `args.split` of a dataset with all its columns, and its two sides as the columns `source` and `target`.

    `args` may have these options of [`load_pairs`]: `dataset_name`, `dataset_config_name`, and the names of languages
    and columns. Raises UserError if the dataset, the split or a column does not exist.
    """
    names = ["dataset_config_name", "source_lang", "target_lang", "source_column", "target_column", "train_file"]
    args = SimpleNamespace(**dict.fromkeys(names) | {"streaming": False} | vars(args))
    splits = load_dataset(args)
    check_split(splits, args.split, args)
    rows = splits[args.split]
    pairs = select_pair(rows, *find_columns(rows, args), args.split)
    others = rows.remove_columns([name for name in pairs.column_names if name in rows.column_names])
    return datasets.concatenate_datasets([pairs, others], axis=1) if others.column_names else pairs


@contextlib.contextmanager
def reading(what: str, remedy: str = ""):
    """Turns an error in reading a dataset into a UserError that says what could not be read."""
    try:
        yield
    except (datasets.exceptions.DatasetsError, HTTPError, OSError, ValueError, RuntimeError, LookupError) as error:
        # datasets wraps the cause
        reason = textwrap.shorten(f"{error} {error.__cause__ or ''}", 600, placeholder=" ...")
        raise UserError(f"{what} could not be read: {reason}{remedy}") from error


def where(args) -> str:
    """The name of the data in messages."""
    return args.dataset_name or args.train_file


def check_split(splits: dict, name: str, args):
    if name not in splits:
        raise UserError(f"{where(args)} has no split '{name}'; its splits: {', '.join(splits)}.")


def load_dataset(args) -> dict[str, Dataset | IterableDataset]:
    """Loads `args.dataset_name`, a Hub id or a local directory."""
    directory = Path(args.dataset_name)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    cache, suffixes = None, {path.suffix for path in files} & FORMATS.keys() - {".txt"}  # .txt: a README, a license
    if files:
        # datasets caches a directory with a card by its name alone, and would return what its files once held.
        state = [(path.as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        cache = Path(datasets.config.HF_DATASETS_CACHE) / "local" / Hasher.hash((str(directory.resolve()), state))
    remedy = " Give --dataset_name a Hub id or a local directory, with --dataset_config_name if it has several "
    remedy += "configurations, or name your files with --train_file."
    with reading(f"The dataset {args.dataset_name}", remedy):
        return datasets.load_dataset(
            args.dataset_name,
            args.dataset_config_name,
            streaming=args.streaming,
            cache_dir=cache and str(cache),
            **(CSV if suffixes and suffixes <= {".csv", ".tsv"} else {}),
        )


def load_files(args) -> dict[str, Dataset | IterableDataset]:
    """Loads the training, validation and test files, which must have the same format.

    In a .txt file, each line is source<TAB>target."""
    files = {split: getattr(args, f"{split}_file") for split in SPLITS if getattr(args, f"{split}_file")}
    for split, name in files.items():
        if not Path(name).is_file():
            raise UserError(f"--{split}_file {name} {'is not a file' if Path(name).exists() else 'does not exist'}.")
        if Path(name).stat().st_size == 0:
            raise UserError(f"--{split}_file {name} is empty.")
    suffixes = {Path(name).suffix for name in files.values()}
    if len(suffixes) > 1 or not suffixes <= FORMATS.keys():
        raise UserError(
            f"The data files end in {', '.join(sorted(suffixes))}; they must all have one of: {', '.join(FORMATS)}."
        )
    suffix, raw = suffixes.pop(), {}
    options = OPTIONS.get(suffix, {}) | {"streaming": args.streaming}
    for split, name in files.items():  # one by one, since each may have other columns besides the two
        with reading(f"--{split}_file {name}"):
            raw[split] = datasets.load_dataset(FORMATS[suffix], data_files={split: name}, **options)[split]
            if suffix == ".txt":
                count_tabs(split, name, args.streaming)
                raw[split] = raw[split].map(split_at_tab, batched=True, remove_columns=["text"], features=PAIR)
    return raw


def count_tabs(split: str, name: str, streaming: bool):
    """Refuses a .txt file without source<TAB>target lines, and counts those with more than one tab."""
    with open(name, encoding="utf-8", newline="\n") as lines:
        tabs = Counter(line.count("\t") for line in (itertools.islice(lines, 10_000) if streaming else lines))
    if not tabs[1]:
        raise UserError(f"--{split}_file {name} has no line with one tab; a .txt file has source<TAB>target lines.")
    malformed = sum(tabs.values()) - tabs[0] - tabs[1]
    if malformed:
        PartialState().print(f"{name}: lines with more than one tab are dropped, {malformed:,} of {tabs.total():,}.")


def split_at_tab(batch: dict) -> dict:
    """Lines -> pairs; a line without exactly one tab becomes a pair of None, which is dropped with the empty pairs."""
    pairs = [tuple(line.split("\t")) if line.count("\t") == 1 else (None, None) for line in batch["text"]]
    return {"source": [source for source, _ in pairs], "target": [target for _, target in pairs]}


def warn_of_training_pairs(pairs: dict, names: dict[str, str], args):
    """Prints a warning if the validation or test pairs are the training pairs."""
    if args.train_file:
        names = {split: getattr(args, f"{split}_file") for split in pairs}
    for split in ("validation", "test"):
        if split in pairs and Path(names[split]).resolve() == Path(names["train"]).resolve():
            PartialState().print(
                f"Warning: the {split} pairs are the training pairs ({names[split]}); their scores say nothing about "
                "unseen text."
            )


def hold_out_validation(pairs: dict, args):
    """Takes the last pairs of the training split for validation, `args.validation_split_percentage` of them."""
    if args.streaming:
        raise UserError(
            f"{where(args)} has no validation split, and none can be held out of a stream; name one with "
            "--validation_split or --validation_file."
        )
    train = pairs["train"]
    count = max(1, len(train) * args.validation_split_percentage // 100)
    if count >= len(train):
        raise UserError(f"{where(args)} has {len(train)} pairs, too few to hold some out for validation.")
    PartialState().print(
        f"{where(args)} has no validation split: the last {count:,} pairs of the training split are held out."
    )
    pairs["validation"] = train.skip(len(train) - count)
    pairs["train"] = train.take(len(train) - count)


def find_columns(dataset: Dataset | IterableDataset, args) -> tuple[str | tuple[str, str], str | tuple[str, str]]:
    """The source and the target: a column name, or `("translation", language)` for a column of dictionaries.

    In this order: the columns named by options, two columns named after the languages, two languages of a
    `translation` column, and, if neither languages nor columns are named, the only two text columns.
    """
    features = dataset.features
    if features is None:
        first = next(iter(dataset), None)
        if first is None:
            raise UserError(f"{where(args)} has no pairs.")
        features = dict.fromkeys(first, datasets.Value("string"))
    text = [name for name, feature in features.items() if getattr(feature, "dtype", "") in ("string", "large_string")]
    nested = features.get("translation")
    nested = list(nested) if isinstance(nested, dict) else list(getattr(nested, "languages", []))
    remedy = f"the columns of {where(args)} are {', '.join(features)}; of text: {', '.join(text) or 'none'}"
    remedy += f"; languages in translation: {', '.join(nested)}." if nested else "."
    named = {"--source_column": args.source_column, "--target_column": args.target_column}
    languages = {"--source_lang": args.source_lang, "--target_lang": args.target_lang}
    if any(named.values()):
        for option, name in named.items():
            if name is None:
                raise UserError(f"{option} is missing: name both columns; {remedy}")
            if name not in text:
                problem = "holds no text" if name in features else "does not exist"
                raise UserError(f"{option} {name} {problem}; {remedy}")
        return tuple(named.values())
    if any(languages.values()):
        if all(language in text for language in languages.values()):
            return tuple(languages.values())
        if all(language in nested for language in languages.values()):
            return tuple(("translation", language) for language in languages.values())
        given = " and ".join(f"{option} {language}" for option, language in languages.items())
        raise UserError(f"{given} must both be text columns, or languages of a translation column; {remedy}")
    if len(nested) == 2:
        return ("translation", nested[0]), ("translation", nested[1])
    if {"source", "target"} <= set(text):
        return "source", "target"
    if len(text) == 2:
        return text[0], text[1]
    raise UserError(
        "Name the source and the target with --source_lang and --target_lang, or --source_column and --target_column; "
        + remedy
    )


def select_pair(dataset, source: str | tuple[str, str], target: str | tuple[str, str], split: str):
    """The dataset with only the columns `source` and `target`; raises UserError if they are the same or missing."""
    if source == target:
        raise UserError(f"Source and target are both {source}; name two different ones.")
    if isinstance(source, tuple):
        column, languages = source[0], {"source": source[1], "target": target[1]}

        def unnest(batch: dict) -> dict:
            return {side: [(row or {}).get(lang) for row in batch[column]] for side, lang in languages.items()}

        return dataset.map(unnest, batched=True, remove_columns=list(dataset.features or [column]))
    missing = {source, target} - set(dataset.features or (source, target))
    if missing:
        raise UserError(f"The {split} split has no column {' and '.join(sorted(missing))}.")
    names = {old: new for old, new in ((source, "source"), (target, "target")) if old != new}
    return dataset.select_columns([source, target]).rename_columns(names)


# ----------------------------------------------------------------------------------------------------------- token ids


def iter_texts(dataset: Dataset | IterableDataset) -> tuple[Iterator[str], int | None]:
    """The non-empty texts of both sides, and at most how many; of a stream the first million pairs, and None."""
    is_stream = isinstance(dataset, IterableDataset)

    def texts() -> Iterator[str]:
        with reading("The training pairs"):
            for batch in (dataset.take(TOKENIZER_SAMPLE) if is_stream else dataset).iter(1000):
                yield from filter(is_filled, itertools.chain(batch["source"], batch["target"]))

    return texts(), None if is_stream else 2 * len(dataset)


def tokenize_pairs(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_source_length: int,
    max_target_length: int,
    split: str = "train",
    num_proc: int | None = None,
) -> tuple[Dataset | IterableDataset, dict[str, int] | None]:
    """Tokenizes the pairs; returns them with the number of pairs dropped for each reason (None for a stream).

    Pairs with an empty or missing side, or longer than a limit in tokens (including the end-of-sentence token), are
    dropped; none is truncated. Adds `input_ids`, `labels`, `source_length` and `target_length`. A tokenizer that
    treats the two languages differently (Marian's) is told which side is the target. Map-style datasets are tokenized
    at once and cached by `datasets` on disk; a stream as it is read.

    Raises:
        UserError: No pair is left.
    """

    def encode(batch: dict) -> dict:
        filled = are_filled(batch)
        columns = {side: list(itertools.compress(batch[side], filled)) for side in ("source", "target")}
        columns |= {"input_ids": [], "labels": []}
        if any(filled):  # a tokenizer refuses an empty list
            columns |= tokenizer(
                columns["source"], text_target=columns["target"], return_attention_mask=False, verbose=False
            )
        columns["source_length"] = list(map(len, columns["input_ids"]))
        columns["target_length"] = list(map(len, columns["labels"]))
        lengths = zip(columns["source_length"], columns["target_length"], strict=True)
        kept = [source <= max_source_length and target <= max_target_length for source, target in lengths]
        return {name: list(itertools.compress(columns[name], kept)) for name in PAIR_FEATURES}

    if isinstance(dataset, IterableDataset):
        return dataset.map(encode, batched=True), None
    workers = num_proc if num_proc and len(dataset) > 1000 * num_proc else None
    filled = dataset.filter(are_filled, batched=True, num_proc=workers, desc=f"Reading {split}")
    options = {"batched": True, "features": PAIR_FEATURES, "num_proc": workers, "desc": f"Tokenizing {split}"}
    encoded = (filled if len(filled) < len(dataset) else dataset).map(encode, **options)
    drops = {"empty": len(dataset) - len(filled), "too long": len(filled) - len(encoded)}
    if len(encoded) == 0:
        names = ("--max_source_length ", "--max_target_length ") if split == "train" else ("", "")
        raise UserError(
            f"No usable pair is left of the {len(dataset)} of the {split} split: {drops['empty']} have an empty or "
            f"missing side, {drops['too long']} are longer than {names[0]}{max_source_length} or "
            f"{names[1]}{max_target_length} tokens."
        )
    return encoded, drops


def are_filled(batch: dict) -> list[bool]:
    return [is_filled(s) and is_filled(t) for s, t in zip(batch["source"], batch["target"], strict=True)]


def is_filled(text) -> bool:
    return isinstance(text, str) and bool(text.strip())


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
