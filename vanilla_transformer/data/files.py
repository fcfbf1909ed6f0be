"""Datasets and files, on the Hub or on disk -> their rows."""

import contextlib
import csv
import glob
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import datasets
import pyarrow as pa
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher
from huggingface_hub.errors import HTTPError

from ..errors import UserError, explaining
from .options import DatasetOptions

TEXTS = datasets.Features(dict.fromkeys(("source", "target"), datasets.Value("string")))

# How files are read, by suffix. In .csv and .tsv files, "None" and "null" are words; in .tsv and .txt files, a
# quotation mark is text. Lines of .txt files end at line feeds only, and are split at tabs later; their separator is
# NUL, which text should not have, and lines with one are dropped.
CSV = {"keep_default_na": False}
TSV = {"sep": "\t", "quoting": csv.QUOTE_NONE, **CSV}
TXT = {**TSV, "sep": "\0", "lineterminator": "\n", "names": ["line"], "header": None, "on_bad_lines": "warn"}
TXT["index_col"] = False  # not what is before a NUL
TXT["features"] = datasets.Features(line=datasets.Value("string"))
FORMATS = {".json": ("json", {}), ".jsonl": ("json", {}), ".parquet": ("parquet", {})}
FORMATS |= {".csv": ("csv", CSV), ".tsv": ("csv", TSV), ".txt": ("csv", TXT)}


@contextlib.contextmanager
def reading_data(what: str, remedy: str = "", *more: type[Exception]):
    """Turns an error in reading a dataset, or one of `more`, into a UserError that says what could not be read."""
    expected = (datasets.exceptions.DatasetsError, HTTPError, OSError, ValueError, RuntimeError, LookupError, *more)
    try:
        yield
    except expected as error:
        cause = error.__cause__ or error  # datasets wraps it
        reason = textwrap.shorten(f"{error} {error.__cause__ or ''}", 600, placeholder=" ...")
        if isinstance(cause, UnicodeDecodeError):
            reason = "it is not in UTF-8; convert it, for example with iconv."
        raise UserError(f"{what} could not be read: {reason}{remedy}") from error


def check_cache():
    """Raises UserError if `datasets` cannot write its cache, without which it loads nothing."""
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    with explaining(f"{cache} cannot be written", OSError, remedy="set HF_HOME to a directory that can be"):
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cache):
            pass


def load_dataset(
    options: DatasetOptions, file_options: str, streaming: bool = False
) -> dict[str, Dataset | IterableDataset]:
    """Loads `--dataset_name`: a Hub id, or a local directory laid out like one or written by `save_to_disk`.

    A single `Dataset` that was saved is the split `train`. `file_options` are those that name files instead, for
    messages.
    """
    name = options.dataset_name
    check_cache()
    folder = Path(name)
    if options.dataset_revision and folder.is_dir():
        raise UserError(f"--dataset_revision is for a dataset on the Hub; {folder} is a directory.")
    saved = {"train": folder} if (folder / "state.json").is_file() else {}
    if (folder / "dataset_dict.json").is_file():
        saved = {path.parent.name: path.parent for path in sorted(folder.glob("*/state.json"))}
    if saved:
        # Not by `load_from_disk`, which makes `map` write its cache beside these files.
        patterns = {split: f"{glob.escape(str(path.absolute()))}/*.arrow" for split, path in saved.items()}
        with reading_data(f"The dataset {name}"):
            return datasets.load_dataset("arrow", data_files=patterns, streaming=streaming)
    if "@" in name and not Path(name).exists():
        id, _, revision = name.partition("@")
        raise UserError(f"{name} is not an id; give --dataset_name {id} --dataset_revision {revision}.")
    files = [path for path in Path(name).resolve().rglob("*") if path.is_file()]
    cache, suffixes = None, {path.suffix for path in files} & FORMATS.keys() - {".txt"}  # .txt: a README, a license
    if files:
        # For a directory with a dataset card, `datasets` keys its cache by name alone and would return stale rows.
        state = sorted((str(path), path.stat().st_mtime_ns) for path in files)
        cache = str(Path(datasets.config.HF_DATASETS_CACHE) / "local" / Hasher.hash(state))
    remedy = " Give --dataset_name a Hub id or a local directory, with --dataset_config_name if it has several "
    remedy += f"configurations, or name your files with {file_options}."
    with reading_data(f"The dataset {name}", remedy, Exception):  # its card may hold anything
        return datasets.load_dataset(
            name,
            options.dataset_config_name,
            revision=options.dataset_revision,
            streaming=streaming,
            cache_dir=cache,
            **(TSV if suffixes == {".tsv"} else CSV if suffixes and suffixes <= {".csv", ".tsv"} else {}),
        )


def load_file(split: str, name: str, streaming: bool) -> Dataset | IterableDataset:
    """Loads one file with all its columns; the files of a run may differ in format.

    `name` may also be a URL, as `hf://datasets/me/pairs/train.jsonl`, or a pattern of files of one format.
    """
    option, path, is_url = f"--{split}_file {name}", Path(name), "://" in name
    files = [path] if path.is_file() or is_url else sorted(map(Path, glob.glob(name, recursive=True)))
    if not (is_url or files and all(file.is_file() for file in files)):
        raise UserError(f"{option} {'is not a file' if path.exists() else 'does not exist'}.")
    if not is_url and (empty := [file for file in files if file.stat().st_size == 0]):
        raise UserError(f"--{split}_file {empty[0]} is empty.")
    if path.suffix not in FORMATS:
        raise UserError(f"{option} ends in '{path.suffix}'; it must end in one of: {', '.join(FORMATS)}.")
    builder, options = FORMATS[path.suffix]
    check_cache()
    with reading_data(option):
        files = {split: name if is_url else [glob.escape(str(file)) for file in files]}
        pairs = datasets.load_dataset(builder, data_files=files, streaming=streaming, **options)[split]
        if path.suffix == ".txt":
            pairs = split_lines(pairs, option)
    return pairs


def split_lines(lines: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
    """Pairs from lines `source<TAB>target`. Lines with more tabs are dropped; without one, the target is None.

    Raises UserError if no line of the first 10,000 has a tab.
    """
    if not any("\t" in line["line"] for line in lines.take(10_000)):
        raise UserError(f"{name} has no line with a tab; a .txt file has source<TAB>target lines.")
    pairs = map_columns(lines, split_at_tab, TEXTS)
    if isinstance(lines, Dataset) and len(pairs) < len(lines):
        dropped = len(lines) - len(pairs)
        PartialState().print(f"{name}: lines with more than one tab are dropped, {dropped:,} of {len(lines):,}.")
    return pairs


def map_columns(
    rows: Dataset | IterableDataset, function: Callable[[dict], dict[str, list]], features: datasets.Features | None
) -> Dataset | IterableDataset:
    """Replaces all columns by those that the function returns for a batch of columns, `source` and `target`.

    A stream is mapped in Arrow tables: in Python, `datasets` would take a hundred times as long for rows that are for
    other processes.
    """
    if isinstance(rows, Dataset):
        return rows.map(function, batched=True, remove_columns=rows.column_names, features=features)
    mapped = rows.with_format("arrow").map(partial(map_table, function=function), batched=True, features=features)
    return mapped.with_format(None)


def map_table(table: pa.Table, function: Callable[[dict], dict[str, list]]) -> pa.Table:
    columns = function(table.to_pydict())
    texts = {
        side: [text if isinstance(text, str) else None for text in columns[side]] for side in ("source", "target")
    }
    return pa.table(texts, schema=pa.schema(dict.fromkeys(texts, pa.string())))


def split_at_tab(batch: dict) -> dict[str, list[str | None]]:
    # The source, too, ends with a carriage return if `paste` took it from a file of Windows.
    rows = [[side.rstrip("\r") for side in line.split("\t")] for line in batch["line"]]
    rows = [(*row, None)[:2] for row in rows if len(row) <= 2]
    return {"source": [source for source, _ in rows], "target": [target for _, target in rows]}
