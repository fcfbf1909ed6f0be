"""Datasets and files, on the Hub or on disk -> their rows."""

import contextlib
import errno
import glob
import lzma
import re
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import datasets
import numpy as np
import pyarrow as pa
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.fingerprint import Hasher
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from huggingface_hub.errors import HTTPError
from transformers.utils import logging

from ..errors import UserError, explaining, one_line, shortened
from ..files import link_files
from ..sentences_vanilla_transformer import InputError
from .options import SUFFIXES, DatasetOptions, describe_file, suffix_of
from .readers import READERS, TextFiles

TEXTS = datasets.Features(dict.fromkeys(("source", "target"), datasets.Value("string")))

OF_DATASETS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # formats that `datasets` reads itself
REMEDIES = {
    (".properties", ".resx", ".strings", ".ftl", ".arb", ".xml", ".yaml", ".yml"): (
        "it has one language; make a .po file of two, for example with `prop2po` or `resx2po` of translate-toolkit"
    ),
    (".xlsx", ".ods", ".xls"): "save it as .csv",
    (".zip", ".tar", ".tgz", ".7z", ".rar"): "unpack it",
}


def hide_bars():
    """Hides the progress bars of transformers and, where stderr is no terminal, those of datasets."""
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def random_rows(dataset: Dataset | IterableDataset, count: int) -> Dataset | IterableDataset:
    """At most `count` rows in their order: from random places, or the first ones of a stream.

    Evenly spaced ones might be all of a kind, as where every second pair is a title.
    """
    if isinstance(dataset, IterableDataset) or len(dataset) <= count:
        return dataset.take(count)
    return dataset.select(np.sort(np.random.default_rng(0).choice(len(dataset), count, replace=False)))


@contextlib.contextmanager
def reading_data(what: str, remedy: str = "", *more: type[Exception]):
    """Turns an error in reading a dataset, or one of `more`, into a UserError that says what could not be read."""
    expected = (datasets.exceptions.DatasetsError, HTTPError, OSError, ValueError, RuntimeError, LookupError)
    expected += (SyntaxError, StopIteration, *more)  # of XML; of an empty stream
    expected += (EOFError, zlib.error, lzma.LZMAError)  # of compressed files
    try:
        yield
    except InputError:
        raise
    except expected as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EPIPE):  # of writing, such as a message
            raise
        cause = error.__cause__ or error  # datasets wraps it
        is_general = isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__
        reason = str(cause) if is_general else f"{error} {error.__cause__ or ''}"
        if "corresponds to no data" in reason or isinstance(cause, StopIteration):
            reason = "it has no pairs."
        if isinstance(cause, (EOFError, zlib.error, lzma.LZMAError)):
            reason = f"it is cut off or damaged ({one_line(cause).rstrip('.')}); get the file again."
        if re.search("Couldn't cast|Failed to parse string", reason):
            reason = f"its rows differ in their keys, or in the types of their values; write all alike. {reason}"
        if "Error tokenizing data" in reason:  # of a table
            reason = f"{reason.strip()}; quote fields with commas in a .csv, and replace tabs in fields of a .tsv."
        reason = shortened(reason, 600)
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
    options: DatasetOptions, file_options: str | None = None, streaming: bool = False
) -> dict[str, Dataset | IterableDataset]:
    """Loads `--dataset_name`: a Hub id, or a local directory laid out like one or written by `save_to_disk`.

    A single `Dataset` that was saved is the split `train`. `file_options`, for messages, are those of the command that
    name files instead, if it has any.
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
    cache, place = None, name
    if files:
        cache = cache_of(files)
        # `datasets` would take the name of the directory for a pattern, and knows no suffix in capitals.
        if glob.has_magic(name) or any(is_in_capitals(path.name) for path in files):
            place = str(cache / "links")
            link_files(folder.resolve(), Path(place), lambda file: file.lower() if is_in_capitals(file) else file)
    remedy = " Give --dataset_name a Hub id or a local directory, with --dataset_config_name if it has several "
    remedy += f"configurations{f', or name your files with {file_options}' if file_options else ''}."
    with reading_data(f"The dataset {name}", remedy, Exception):  # its card may hold anything
        try:
            builder = datasets.load_dataset_builder(
                place, options.dataset_config_name, revision=options.dataset_revision, cache_dir=cache
            )
            if isinstance(builder, Csv):
                builder = TextFiles.like(builder, cache)
        except (ValueError, FileNotFoundError) as error:
            if not re.search(r"the same data file format|No \(supported\) data files", str(error)):
                raise
            # One split is in .csv, another in .tsv; or all are in .po, .tmx and the like.
            if not files:
                place = f"hf://datasets/{name}@{options.dataset_revision or 'main'}"
            found = DataFilesDict.from_patterns(get_data_patterns(place), place, list(READERS))
            builder = TextFiles(cache, base_path=place, data_files=found)
        return build(builder, streaming)


def cache_of(files: list[Path]) -> Path:
    """A cache for what `datasets` makes of these files as they are now.

    `datasets` recognizes a file by its path and modification time, and in a directory with a dataset card by its name
    alone. Both may stay the same when the content changes: tar, `cp -p` and `rsync -t` set the modification time. So
    this cache also depends on the size and on the inode with its change time, which no program can set.
    """
    states = ((path, path.stat()) for path in sorted(files))
    known = [(str(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino) for path, state in states]
    return Path(datasets.config.HF_DATASETS_CACHE) / "local" / Hasher.hash(known)


def is_in_capitals(file: str) -> bool:
    """Whether the suffix of a file with pairs has capital letters."""
    return suffix_of(file) in SUFFIXES and suffix_of(file) not in file


def build(builder: datasets.DatasetBuilder, streaming: bool) -> dict[str, Dataset | IterableDataset]:
    """All splits of a builder of `datasets`. Raises ValueError if they are empty."""
    if streaming:
        return builder.as_streaming_dataset()
    try:
        builder.download_and_prepare()
    except datasets.exceptions.DatasetGenerationError:
        if not isinstance(builder, Json):
            raise
        # It takes keys and types from the first 10 MB, and refuses rows with others. So it gets all rows at once.
        builder.config.chunksize, builder.info.features = -1, None
        builder.download_and_prepare()
    if not any(split.num_examples for split in builder.info.splits.values()):
        raise ValueError("it has no pairs.")
    return builder.as_dataset()


def load_file(
    split: str, name: str | tuple[str, ...], streaming: bool, has_header: bool = True
) -> Dataset | IterableDataset:
    """Loads one file with all its columns; the files of a run may differ in format.

    `name` may also be a URL, as `hf://datasets/me/pairs/train.jsonl`, a pattern of files of one format, or
    parallel files. Whether a table `has_header` does not matter for other formats.
    """
    option = f"--{split}_file {describe_file(name)}"
    is_parallel = isinstance(name, tuple)
    files = [file for one in (name if is_parallel else [name]) for file in find_files(one, split)]
    suffix = suffix_of(files[0])
    if not is_parallel and suffix not in SUFFIXES:
        remedy = next((remedy for suffixes, remedy in REMEDIES.items() if suffix in suffixes), None)
        ends = f"{option} ends in '{suffix}'"
        if remedy:
            raise UserError(f"{ends}, which is not read; {remedy}.")
        parallel = "Of two parallel files, give both: train.en train.de."
        raise UserError(f"{ends}; it must end in one of: {', '.join(SUFFIXES)}. {parallel}")
    check_cache()
    if wrong := [file for file in files if not may_be_json(file)]:
        raise UserError(
            f"{option} could not be read: {wrong[0]} does not begin with [ or {{, as a list of pairs would."
        )
    with reading_data(option):
        data_files = {split: [file if "://" in file else glob.escape(file) for file in files]}
        local = [Path(file) for file in files if "://" not in file]
        place = {"data_files": data_files, "cache_dir": cache_of(local) if local else None}
        if suffix in OF_DATASETS:
            return build(datasets.load_dataset_builder(OF_DATASETS[suffix], **place), streaming)[split]
        rows = build(TextFiles(**place, is_parallel=is_parallel, has_header=has_header), streaming)[split]
        return split_lines(rows, option) if suffix == ".txt" and not is_parallel else rows


def find_files(name: str, split: str) -> list[str]:
    """The URL or the existing files that a name or a pattern stands for. Raises UserError for none or an empty one."""
    if "://" in name:
        return [name]
    option, path = f"--{split}_file", Path(name)
    files = [path] if path.is_file() else sorted(map(Path, glob.glob(name, recursive=True)))
    if not files or not all(file.is_file() for file in files):
        raise UserError(f"{option} {name} {'is not a file' if path.exists() else 'does not exist'}.")
    if empty := [file for file in files if file.stat().st_size == 0]:
        raise UserError(f"{option} {empty[0]} is empty.")
    return list(map(str, files))


def may_be_json(file: str) -> bool:
    """Whether a local file begins as JSON with rows does; other JSON, such as `null`, would crash pyarrow."""
    if "://" in file or Path(file).suffix.lower() not in (".json", ".jsonl"):
        return True
    with open(file, "rb") as opened:
        return opened.read(1000).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"[", b"{", b"\xff", b"\xfe")


def split_lines(lines: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
    """Pairs from lines `source<TAB>target`. Lines with more tabs are dropped; without one, the target is None.

    Raises UserError if no line of the first 10,000 has exactly one tab.
    """
    tabs = {line["line"].count("\t") for line in lines.take(10_000)}
    if not tabs - {0}:
        raise UserError(
            f"{name} has no line with a tab; a .txt file has source<TAB>target lines. Two files, one for each side, "
            "need other endings, such as train.en and train.de."
        )
    if 1 not in tabs:
        raise UserError(
            f"{name} has lines of {1 + min(tabs - {0})} columns; a .txt file has source<TAB>target lines. Give "
            "the file the suffix .tsv, and number its columns, such as --source_column 1 --target_column 2."
        )
    pairs = map_columns(lines, split_at_tab, TEXTS)
    if isinstance(lines, Dataset) and len(pairs) < len(lines):
        dropped = len(lines) - len(pairs)
        PartialState().print(
            f"warning: {name}: lines with more than one tab are dropped, {dropped:,} of {len(lines):,}."
        )
    return pairs


def map_columns(
    rows: Dataset | IterableDataset, function: Callable[[dict], dict[str, list]], features: datasets.Features
) -> Dataset | IterableDataset:
    """Replaces all columns with `source` and `target`, which the function computes from a batch of columns.

    It reads Arrow tables, in which no image or sound is decoded, and makes tables: of columns in Python, `datasets`
    would take the type of a side from its first thousand rows, and of a stream, a hundred times as long for rows that
    are for other processes.
    """
    to_table = partial(map_table, function=function)
    return rows.with_format("arrow").map(to_table, batched=True, features=features).with_format(None)


def map_table(table: pa.Table, function: Callable[[dict], dict[str, list]]) -> pa.Table:
    """The columns that the function makes of a table; a side that is not text is None."""
    columns = function(table.to_pydict())
    texts = {
        side: [text if isinstance(text, str) else None for text in columns[side]] for side in ("source", "target")
    }
    schema = dict.fromkeys(texts, pa.string())
    if "references" in columns:
        texts["references"], schema["references"] = columns["references"], pa.list_(pa.string())
    return pa.table(texts, schema=pa.schema(schema))


def split_at_tab(batch: dict) -> dict[str, list[str | None]]:
    # The source, too, ends with a carriage return if `paste` took it from a file of Windows.
    rows = [[side.rstrip("\r") for side in line.split("\t")] for line in batch["line"]]
    rows = [(*row, None)[:2] for row in rows if len(row) <= 2]
    return {"source": [source for source, _ in rows], "target": [target for _, target in rows]}
