"""Sentence pairs: a dataset from the Hub or from disk -> columns `source` and `target` -> token ids."""

import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
import transformers
from accelerate import PartialState
from datasets import Dataset, IterableDataset, ReadInstruction
from datasets.features.features import require_decoding
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import UserError, one_line
from ..files import last_part
from ..languages import language_code as known_code
from ..translation_vanilla_transformer import longest_text
from .files import TEXTS, load_dataset, load_file, map_columns, reading_data
from .options import DataOptions, DatasetOptions, describe_file, group_parallel, suffix_of
from .readers import TextFiles, column_of
from .survey import Texts, describe_survey, survey
from .texts import is_filled, normal_form

SPLITS = {"train": "max_train_samples", "validation": "max_eval_samples", "test": "max_predict_samples"}
VARIABLE_LANGUAGES = {"language", "translation"}  # the fields of `datasets.TranslationVariableLanguages`
TOKENIZER_SAMPLE = 1_000_000  # pairs of a stream that a tokenizer is trained on
NAMED = 8  # files that the origin of a split names
SURVEYED = 10_000  # of a stream
PAIR_FEATURES = datasets.Features(
    TEXTS
    | dict.fromkeys(("input_ids", "labels"), datasets.List(datasets.Value("int32")))
    | dict.fromkeys(("source_length", "target_length"), datasets.Value("int32"))
)
REFERENCES = datasets.Features(references=datasets.List(datasets.Value("string")))  # of validation and test

# ------------------------------------------------------------------------------------------------------------- loading


class Splits(dict):
    """The splits by name, each with the columns `source` and `target`; only `train` may be a stream.

    Attributes:
        origins: By name of the split, where it is from, in words.
        survey: What [`survey`] found in them; empty on all processes but the main one.
    """

    def __init__(self):
        super().__init__()
        self.origins: dict[str, str] = {}
        self.survey: dict[str, dict] = {}


def load_pairs(options: DataOptions) -> Splits:
    """Loads the training, validation and test splits that exist, and prints what is odd about them.

    Raises UserError if the dataset, a split, a column or a language does not exist (the message lists those that do),
    or if a file cannot be read or its header does not fit its rows.
    """
    if not (options.dataset_name or options.train_file):  # as in a recipe of sizes only
        raise UserError("There is nothing to train on; give --dataset_name or --train_file.")
    rows, names = open_splits(options)
    with reading_data(options.label):
        files, differ = read_splits(rows, names, options)
        held_out = hold_out(files, options, differ)
        files |= held_out
        files["train"] = leave_out(files, options)
        pairs = Splits()
        pairs.origins = {split: describe_origin(split, names, held_out, options) for split in files}
        if PartialState().is_main_process:
            surveyed = {split: used_pairs(split, parts, options) for split, parts in files.items()}
            pairs.survey = survey(surveyed, differ, options.verbatim)
            print(describe_survey(pairs.survey))
        for split in filter(files.get, SPLITS):
            has_tags = split == "train" or split in held_out or len(names[split]) > 1
            tags = options.train_file_tags if has_tags else None
            pairs[split] = mix_files(files[split], options.train_file_weights if split == "train" else None, tags)
            count = getattr(options, SPLITS[split])
            if count is not None:
                pairs[split] = pairs[split].take(count)
    return pairs


def open_splits(options: DataOptions) -> tuple[dict[str, Dataset | IterableDataset], dict[str, list]]:
    """By split, the rows of its first file, and the names of its files or, of a dataset, that of the split.

    Prints a warning where the model would be trained on the pairs that score it.
    """
    if options.train_file:
        names = {split: options.files(split) for split in SPLITS}
        rows = {split: load_file(split, files[0], options.streaming) for split, files in names.items() if files}
        trained_on = set().union(*map(paths_of, names["train"]))
    else:
        names = {split: [getattr(options, f"{split}_split") or split] for split in SPLITS}
        found = load_dataset(options, "--train_file", options.streaming)
        rows = {
            split: find_split(found, name, options.label)
            for split, (name,) in names.items()
            if split == "train" or getattr(options, f"{split}_split") or name in found
        }
    for split in ("validation", "test"):
        for name in names[split] if split in rows else ():
            if trained_on & paths_of(name) if options.train_file else overlap(found, name, names["train"][0]):
                PartialState().print(
                    f"warning: the {split} pairs are the training pairs ({describe_file(name)}); their scores say "
                    "nothing about unseen text."
                )
    return rows, names


def read_splits(
    rows: dict[str, Dataset | IterableDataset], names: dict[str, list], options: DataOptions
) -> tuple[dict[str, list[Dataset]], bool]:
    """The pairs of each file of each split, and whether the training files translate in different directions."""
    files, known = {}, {}  # known: the columns of the first file with these languages
    by_file = options_of_files(options)
    for split, first in rows.items():
        is_like_train = split == "train" or len(names[split]) > 1 or not options.source_lang
        own = by_file[: len(names[split])] if is_like_train else [options]
        files[split], columns = read_files(split, first, names[split], own, known)
        if split == "train":
            differ = report_directions(columns, options)
        elif options.streaming:
            with reading_data(describe_file(names[split][0])):
                files[split] = list(map(as_table, files[split]))
    return files, differ


def paths_of(name: str | tuple[str, str]) -> set[Path]:
    """The files of an entry of [`DataOptions.files`], by one name each."""
    return {Path(file).resolve() for file in ([name] if isinstance(name, str) else name)}


def options_of_files(options: DataOptions) -> list[DataOptions]:
    """The options for each training file, with its languages of `--train_file_langs` as its source and target."""
    if not options.train_file_langs:
        return [options] * len(options.files("train") or [options.dataset_name])
    return [replace(options, source_lang=source, target_lang=target) for source, target in options.directions]


def read_files(
    split: str, first: Dataset, names: list[str], by_file: list[DataOptions], known: dict
) -> tuple[list, list]:
    """The pairs of each file of a split, and the columns they are in; `first` has the rows of the first file.

    Columns that are `known` for the languages of a file are taken if it has them.
    """
    files, columns = [], []
    for number, (name, options) in enumerate(zip(names, by_file, strict=True)):
        dataset = load_file(split, name, options.streaming) if number else first
        direction = options.source_lang, options.target_lang
        with reading_data(describe_file(name)):  # a stream is first read here
            if options.train_file and lacks_header(dataset, options, name, known.get(direction, ())):
                dataset = load_file(split, name, options.streaming, has_header=False)
            columns.append(choose_columns(dataset, options, name, known.get(direction, ())))
        known.setdefault(direction, columns[-1])
        more = further_targets(dataset, columns[-1], name, options if split != "train" else None)
        files.append(select_pair(dataset, *columns[-1], more, as_references=split != "train"))
    return files, columns


def report_directions(columns: list[tuple], options: DataOptions) -> bool:
    """Prints the directions in which the training files translate, if they differ; returns whether they do.

    Columns and the endings of parallel files are languages if they are called so, unlike `question` or `ref0`.
    """
    directions = options.directions
    if not directions:
        if options.source_lang or options.source_column:  # of all files, whatever their columns are called
            return False
        directions = [tuple(side if isinstance(side, str) else side[1] for side in pair) for pair in columns]
        directions = [pair if all(map(known_code, pair)) else (None, None) for pair in directions]
    distinct = list(dict.fromkeys(pair for pair in directions if pair != (None, None)))
    if len(distinct) > 1:
        said = ", ".join(f"{source} to {target}" for source, target in distinct)
        PartialState().print(f"The training files translate in different directions: {said}.")
        tags = options.train_file_tags or [""] * len(directions)
        if len(set(zip(tags, (target for _, target in directions), strict=True))) > len(set(tags)):
            PartialState().print(
                "warning: files with different target languages have the same tag, so the model cannot know which "
                "one to write; give each its own with --train_file_tags, such as '>>de<<' '>>fr<<'."
            )
    return len(distinct) > 1


def load_split(options: DatasetOptions, split: str, files: list[str] | None = None) -> Dataset:
    """Loads a split of a dataset, or `files`, one or two parallel ones, with all columns, and its two sides as the
    columns `source` and `target`.

    Images and sounds are dropped, and all other columns if a row makes several pairs. Raises UserError if the dataset,
    the split, a file or a column does not exist.
    """
    if files:
        names = group_parallel(files)
        if len(names) > 1:
            raise UserError(f"--{split}_file has {len(names)} files; give one, or two parallel ones.")
        label, rows = describe_file(names[0]), load_file(split, names[0], streaming=False)
    else:
        label = options.label
        rows = find_split(load_dataset(options, "--test_file, or --sources and --references"), split, label)
    with reading_data(label):
        if files and lacks_header(rows, options, names[0]):
            rows = load_file(split, names[0], streaming=False, has_header=False)
        columns = find_columns(rows, options, names[0] if files else label)
        more = further_targets(rows, columns, names[0] if files else label, options)
        pairs = select_pair(rows, *columns, more, as_references=True)
        for side in ("source", "target"):
            if getattr(pairs.features[side], "dtype", "") not in ("string", "large_string", "null"):
                raise UserError(f"The {side} of {label} is not text, but {pairs.features[side]}.")
    kept = [name for name, feature in rows.features.items() if not require_decoding(feature)]
    others = rows.select_columns([name for name in kept if name not in pairs.column_names])
    if len(others) != len(pairs) or not others.column_names:  # a row may make several pairs
        return pairs
    return datasets.concatenate_datasets([pairs, others], axis=1)


def find_split(splits: dict, name: str, dataset: str) -> Dataset | IterableDataset:
    """A split, or the pairs that an expression of `datasets` selects, such as `train[:50%]` or `train+validation`.

    Raises UserError if there is no such split, or if a stream is to be sliced or joined.
    """
    is_expression = bool(set(name) & set("[+"))
    if is_expression and any(isinstance(rows, IterableDataset) for rows in splits.values()):
        raise UserError(f"A stream has whole splits only, not '{name}'; leave out --streaming, or name one split.")
    try:
        parts = split_parts(splits, name)
    except (AssertionError, ValueError) as error:
        detail = f" ({one_line(error).rstrip('.')})" if is_expression else ""
        listed = ", ".join(splits)
        raise UserError(f"{dataset} has no split '{name}'{detail}; its splits: {listed}.") from error
    if name in splits:
        return splits[name]
    return datasets.concatenate_datasets([splits[split].select(range(start, end)) for split, start, end in parts])


def split_parts(splits: dict, name: str) -> list[tuple[str, int, int]]:
    """The split, first row and end of each part that `name` selects of `splits`."""
    lengths = {split: len(rows) if isinstance(rows, Dataset) else 1 for split, rows in splits.items()}
    if name in splits:
        return [(name, 0, lengths[name])]
    return [(part.splitname, part.from_, part.to) for part in ReadInstruction.from_spec(name).to_absolute(lengths)]


def overlap(splits: dict, name: str, other: str) -> bool:
    """Whether two splits, or expressions, have rows in common."""
    pairs = itertools.product(split_parts(splits, name), split_parts(splits, other))
    return any(one[0] == two[0] and max(one[1], two[1]) < min(one[2], two[2]) for one, two in pairs)


def mix_files(files: list[Dataset], weights: list[float] | None, tags: list[str] | None) -> Dataset | IterableDataset:
    """One dataset of all files: each pair as often as the weight of its file says, each source with its tag.

    A weight of w makes round(w n) pairs of the n pairs of a file, but at least one unless w is 0, spread evenly: each
    of them floor(w) or ceil(w) times. So the data itself says how often a pair is in an epoch, and batches,
    fingerprints and resuming need no weights.
    """
    mixed = []
    for pairs, weight, tag in zip(files, weights or [1.0] * len(files), tags or [""] * len(files), strict=False):
        if weight != 1:
            pairs = pairs.select(rows_of_epoch(len(pairs), weight))
        pairs = add_tag(pairs, tag)
        has_others = any("references" in (one.features or ()) for one in (pairs, files[0]))
        is_same = has_others or pairs.features == files[0].features
        mixed.append(pairs if is_same else pairs.cast(files[0].features))
    return datasets.concatenate_datasets(mixed) if len(mixed) > 1 else mixed[0]


def rows_of_epoch(length: int, weight: float) -> np.ndarray:
    """The rows of a file of this length that an epoch reads."""
    count = max(round(weight * length), int(weight > 0))
    return np.arange(count) * length // max(count, 1)


def used_pairs(split: str, files: list[Dataset | IterableDataset], options: DataOptions) -> list[Dataset]:
    """The pairs of each file that are used, each once; of a stream the first."""
    count, weights = getattr(options, SPLITS[split]), options.train_file_weights if split == "train" else None
    if isinstance(files[0], IterableDataset):
        return [as_table(part, min(SURVEYED, count or SURVEYED)) for part in files]
    if not (count or weights):
        return files
    used, left = [], count
    for pairs, weight in zip(files, weights or [1.0] * len(files), strict=True):
        rows = rows_of_epoch(len(pairs), weight)[:left]
        left = count and left - len(rows)
        used.append(pairs.select(np.unique(rows)))
    return used


def add_tag(pairs: Dataset | IterableDataset, tag: str) -> Dataset | IterableDataset:
    """Puts the tag, if it is not empty, and a space in front of each source that is not empty."""

    return map_columns(pairs, partial(tag_sources, tag=tag), pairs.features) if tag else pairs


def tag_sources(batch: dict, tag: str) -> dict[str, list[str | None]]:
    return {**batch, "source": [f"{tag} {text}" if is_filled(text) else text for text in batch["source"]]}


def describe_origin(split: str, origins: dict, held_out: dict, options: DataOptions) -> str:
    """Where a split is from, without the paths of its files, which may be private."""
    is_held_out = split in held_out and split != "train"
    names = origins["train" if is_held_out else split]
    names = names[: len(held_out[split])] if is_held_out else names
    if name := options.dataset_name:
        where = f"{names[0]} of {last_part(name) if Path(name).exists() else name}"
    else:
        files = list(itertools.chain(*([name] if isinstance(name, str) else name for name in names)))
        where = ", ".join(file if file.startswith("hf://") else last_part(file) for file in files[:NAMED])
        where += f" and {len(files) - NAMED:,} more" if len(files) > NAMED else ""
    return f"held out of {where}" if is_held_out else where


def as_table(pairs: Dataset | IterableDataset, count: int | None = None) -> Dataset:
    """All pairs of a stream, or the first ones; a map-style dataset itself."""
    if isinstance(pairs, Dataset):
        return pairs
    features = TEXTS | REFERENCES if "references" in (pairs.features or ()) else TEXTS
    return Dataset.from_list(list(pairs if count is None else pairs.take(count)), datasets.Features(features))


def leave_out(files: dict[str, list[Dataset]], options: DataOptions) -> list[Dataset]:
    """The training files without the pairs that `--deduplicate` and `--remove_overlap` leave out."""
    if not (options.deduplicate or options.remove_overlap):
        return files["train"]
    if options.streaming:
        raise UserError("--deduplicate and --remove_overlap need all pairs at once; leave out --streaming.")
    train = Texts(files["train"])
    is_kept = np.ones(len(train.rows), dtype=bool)
    if options.deduplicate:
        is_kept &= ~train.repeated()
        repeated = (~is_kept).sum()
        PartialState().print(f"--deduplicate leaves out {repeated:,} training pairs that repeat an earlier one.")
    if options.remove_overlap:
        others = [Texts(parts).source for split, parts in files.items() if split != "train"]
        is_scored = np.isin(train.source, np.concatenate(others))
        PartialState().print(
            f"--remove_overlap leaves out {(is_kept & is_scored).sum():,} training pairs whose source is in the "
            "validation or test split."
        )
        is_kept &= ~is_scored
    ends = np.cumsum([0, *map(len, files["train"])])
    rows = train.rows[is_kept]
    cuts = np.searchsorted(rows, ends)
    return [
        part.select(rows[first:last] - start)
        for part, start, first, last in zip(files["train"], ends, cuts, cuts[1:], strict=False)
    ]


def hold_out(files: dict[str, list[Dataset]], options: DataOptions, differ: bool) -> dict[str, list[Dataset]]:
    """Divides the training files where a split is missing: validation and, with `--test_split_percentage`, test.

    A pair is held out by a hash of its normalized source, so that all pairs of a source are on the same side, the same
    ones when a file grows or is shuffled. They are taken from all files, of each at least one if these `differ` in
    their languages. If files have tags or weights and the same languages, such as back-translations, they are taken
    from the first only, and the others lose the pairs with sources that are held out.
    """
    name, train = options.label, files["train"]
    shares = {"test": options.test_split_percentage, "validation": options.validation_split_percentage}
    shares = {split: share for split, share in shares.items() if share and split not in files}
    if "test" in files and options.test_split_percentage:
        raise UserError(f"{name} has a test split; leave --test_split_percentage out.")
    if not shares:
        return {}
    remedy = "give validation pairs with --validation_split or --validation_file."
    if options.streaming:
        raise UserError(f"{name} has no {' and no '.join(shares)} split, and a stream cannot be split; {remedy}")
    points = [np.array([point_of(text) for part in pairs.iter(10_000) for text in part["source"]]) for pairs in train]
    count = len(train) if differ or not options.has_special_files else 1
    name, has = (f"{name} and {count - 1:,} more", "have") if count > 1 else (name, "has")
    total = sum(map(len, train[:count]))
    if differ:
        bounds = [bounds_of(of_file, shares) for of_file in points]
    else:
        bounds = [bounds_of(np.concatenate(points[:count]), shares)] * len(train)
    found: dict[str, list[Dataset]] = {split: [] for split in ("train", *shares)}
    for pairs, of_file, within in zip(train[:count], points, bounds, strict=False):
        for split, (start, end) in within.items():
            found[split].append(pairs.select(np.flatnonzero((start <= of_file) & (of_file < end))))
    sources = points[0][points[0] < bounds[0]["train"][0]]  # those that are held out of the first file
    for pairs, of_file in zip(train[count:], points[count:], strict=True):
        found["train"].append(pairs.select(np.flatnonzero(~np.isin(of_file, sources))))
    held_out = {split: [len(part) for part in found[split]] for split in shares}
    needed = all if differ else any  # files with pairs on either side
    if not needed(map(len, found["train"])) or not all(map(needed, held_out.values())):
        each = " of each direction" if differ else ""
        raise UserError(f"{name} {has} {total:,} pair(s), too few to hold some out{each}; {remedy}")
    for split, counts in held_out.items():
        how_many = f"{sum(counts):,} of {total:,} pairs are held out, by a hash of their sources"
        PartialState().print(f"{name} {has} no {split} split: {how_many}.")
    return found


def bounds_of(points: np.ndarray, shares: dict[str, int]) -> dict[str, tuple[float, float]]:
    """The range of points of each split: its percentage, or more if that would leave it without a source."""
    bounds, start = {}, 0.0
    for split, share in shares.items():
        end = start + share / 100
        if len(left := points[(start <= points) & (points < 1)]):
            end = max(end, np.nextafter(left.min(), 1))
        bounds[split], start = (start, end), end
    return bounds | {"train": (start, 2.0)}


def point_of(source: str | None) -> float:
    """A number below 1 that only depends on the normalized source; 1 for an empty one, which is never held out."""
    if not is_filled(source):
        return 1.0
    return int.from_bytes(blake2b(normal_form(source).encode(), digest_size=6).digest(), "big") / 2**48


def choose_columns(
    dataset: Dataset | IterableDataset, options: DataOptions, name: str | tuple[str, str], preferred: tuple = ()
) -> tuple:
    """The `preferred` source and target, if the dataset has these columns, or else its own, which are printed.

    Raises UserError if there are none.
    """
    names = {column if isinstance(column, str) else column[0] for column in preferred}
    if names and names <= set(dataset.features or names):
        return preferred
    columns, is_named = find_columns(dataset, options, name), are_columns_named(options) or not is_table(dataset, name)
    name = describe_file(name)
    if not is_named and not all(map(is_known, columns)):
        PartialState().print(
            f"The first row of {name} is taken for the names of its columns; if it is a pair, put a row with two "
            "names above it."
        )
    source, target = (column if isinstance(column, str) else " / ".join(column) for column in columns)
    PartialState().print(f"translating from column {source!r} to column {target!r} of {name}")
    return columns


def lacks_header(
    dataset: Dataset | IterableDataset, options: DatasetOptions, name: str | tuple[str, str], preferred: tuple = ()
) -> bool:
    """Whether the first row of a .csv or .tsv file is plainly a pair and names no columns, which is printed then.

    Names are languages or identifiers, or have numbers below them. Raises UserError if the row is no pair, either.
    """
    if not is_table(dataset, name) or are_columns_named(options):
        return False
    cells = list(features_of(dataset, name))
    if len(cells) < 2 or preferred and set(preferred) <= set(cells):
        return False
    if all(is_known(cell) or cell.replace("-", "_").isidentifier() for cell in cells):
        return False
    words = columns_of_words(dataset, cells)
    if not all(is_number(cell) for cell in cells if cell not in words):
        return False
    row = " | ".join(cells)
    if len(cells) > 2 and len(words) != 2:
        raise UserError(
            f"The first row of {name}, {row}, does not say which columns are source and target; choose two with "
            "--source_column and --target_column, and put a row with the names of all columns above it if it has none."
        )
    PartialState().print(
        f"{name} has no header row: its first row, {row}, is read like the others. If it names the columns, choose "
        "two with --source_column and --target_column."
    )
    return True


def check_header(dataset: Dataset | IterableDataset, file: str | tuple[str, str], names: tuple, given: str):
    """Raises UserError if the columns that options name are missing in a table whose first row may be a pair."""
    cells = list(features_of(dataset, describe_file(file)))
    is_named = all(map(is_known, cells)) or any(column_of(name, cells) for name in names)
    if is_table(dataset, file) and not is_named:
        raise UserError(
            f"{file} has no header row with {given}; its first row is {' | '.join(cells)}. Put a row with the names "
            "of the columns above it."
        )


def is_table(dataset: Dataset | IterableDataset, name: str | tuple[str, str]) -> bool:
    """Whether the columns are named by the first row of a .csv or .tsv file; a dataset may have other files, too."""
    is_text_file = dataset.info.builder_name == TextFiles.__module__.rpartition(".")[2]
    return is_text_file and isinstance(name, str) and suffix_of(name) not in (".txt", ".po", ".tmx")


def are_columns_named(options: DatasetOptions) -> bool:
    return any((options.source_lang, options.target_lang, options.source_column, options.target_column))


def is_known(column: str | tuple[str, str]) -> bool:
    """Whether a column is called after a language, or `source`, `target` or `column 3`."""
    name = column if isinstance(column, str) else column[1]
    return bool(re.fullmatch(r"source|target|column \d+", name)) or known_code(name) is not None


def find_columns(dataset: Dataset | IterableDataset, options: DatasetOptions, file: str | tuple[str, str]) -> tuple:
    """The source and the target: a column name, or `("translation", language)` for a column of dictionaries.

    The first that applies: the columns named by `--source_column` and `--target_column`; `source` and `target`, if
    there are no others, as in a .txt file; the columns, or the languages of a `translation` column, named by
    `--source_lang` and `--target_lang`, but for case and regions; those of two parallel files, in their order; and, if
    no option is given, the only two languages of a `translation` column, the columns `source` and `target`, or the
    only two text columns. Messages name the `file`, or the dataset.
    """
    name, is_parallel = describe_file(file), isinstance(file, tuple)
    features = features_of(dataset, name)
    text = [key for key, feature in features.items() if getattr(feature, "dtype", "") in ("string", "large_string")]
    targets = [*text, *(key for key in features if is_list(features, key))]
    nested = nested_languages(dataset, features.get("translation"))
    by_row = ", named by its first row," if is_table(dataset, file) else ""
    remedy = describe_columns(f"{name}{by_row}", features, text, nested)
    columns = options.source_column, options.target_column
    languages = options.source_lang, options.target_lang
    if any(columns):
        if columns[0] in text and columns[1] in targets:
            return columns
        if set(features) == {"source", "target"}:  # a .txt file beside others
            return "source", "target"
        if is_parallel and not set(columns) & set(text):
            return tuple(features)[:2]
        if None in columns:
            raise UserError(f"Give both --source_column and --target_column; {remedy}")
        given = f"--source_column {columns[0]} and --target_column {columns[1]}"
        check_header(dataset, file, columns, given)
        raise UserError(f"{given} must both be text columns; {remedy}")
    if set(features) == {"source", "target"}:
        return "source", "target"
    if any(languages):
        named = column_of(languages[0], text), column_of(languages[1], targets)
        if all(named):
            return named
        if all(found := [column_of(language, nested) for language in languages]):
            return tuple(("translation", language) for language in found)
        # Endings are other words than the languages, as .src and .tgt, or one of them is, as in .en and .ref0.
        if is_parallel:
            endings = tuple(features)[:2]
            fits = (name == end or known_code(end) is None for name, end in zip(named, endings, strict=True))
            if not any(named) or all(fits):
                return endings
        if None in languages:
            raise UserError(f"Give both --source_lang and --target_lang; {remedy}")
        check_header(dataset, file, languages, options.describe_languages())
        raise UserError(
            f"{options.describe_languages()} must both be text columns, or languages of a translation column; {remedy}"
        )
    if len(nested) == 2:
        return tuple(("translation", language) for language in nested)
    if {"source", "target"} <= set(text):
        return "source", "target"
    if is_parallel:
        return tuple(features)[:2]
    words = text if len(text) <= 2 else columns_of_words(dataset, text)
    if len(words) == 2:
        return tuple(words)
    if not nested:
        check_layout(dataset, name)
    raise UserError(
        "Name the source and the target with --source_lang and --target_lang, or --source_column and --target_column; "
        + remedy
    )


def features_of(dataset: Dataset | IterableDataset, name: str) -> dict:
    """The features of a dataset; of a stream that does not know them, its columns as text."""
    if dataset.features:
        return dataset.features
    first = next(iter(dataset), None)
    if first is None:
        raise UserError(f"{name} has no pairs.")
    return dict.fromkeys(first, datasets.Value("string"))


def describe_columns(name: str, features: dict, text: list[str], nested: list[str]) -> str:
    """What there is to choose from, for messages."""
    said = f"the columns of {name} are {', '.join(features)}; text columns: {', '.join(text) or 'none'}"
    said += f"; languages in translation: {', '.join(nested)}." if nested else "."
    if any(str(getattr(feature, "dtype", "")).startswith(("timestamp", "date")) for feature in features.values()):
        said += " Dates in .json files are read as times; save them as .tsv to have them as text."
    if mixed := [key for key, feature in features.items() if isinstance(feature, datasets.Json)]:
        said += f" In {', '.join(mixed)}, rows have values of several types; write all as texts."
    return said


def nested_languages(dataset: Dataset | IterableDataset, feature) -> list[str]:
    """The languages in a column `translation` with this feature; where rows differ, those of the first 10,000."""
    if isinstance(feature, datasets.Json):  # rows with different languages
        rows = (row["translation"] for row in dataset.select_columns("translation").take(10_000))
        return sorted({language for row in rows if isinstance(row, dict) for language in row})
    has_keys = isinstance(feature, dict)
    if isinstance(feature, datasets.TranslationVariableLanguages) or has_keys and feature.keys() == VARIABLE_LANGUAGES:
        rows = [row["translation"] or {} for row in dataset.select_columns("translation").take(10_000)]
        return sorted({language for row in rows for language in row.get("language") or ()})
    return list(feature) if has_keys else list(getattr(feature, "languages", []))


def columns_of_words(dataset: Dataset | IterableDataset, columns: list[str]) -> list[str]:
    """Those of the columns that are not only numbers, as ids and scores are, in the first 1,000 rows."""
    rows = list(dataset.select_columns(columns).take(1000))
    return [name for name in columns if any(not is_number(row[name]) for row in rows)]


def is_number(text: str | None) -> bool:
    try:
        float(text or 0)
        return True
    except ValueError:
        return False


def check_layout(dataset: Dataset | IterableDataset, name: str):
    """Raises UserError if the first rows show that the file is no list of pairs, or has another separator."""
    first, *others = next(dataset.with_format("arrow").iter(2)).to_pylist()  # images are not decoded
    if len(first) == 1 and (found := re.search(r"[;|\t,]", next(iter(first)))):
        raise UserError(
            f"{name} has one column, {found.string!r}; its separator seems to be {found[0]!r}. Columns of a .csv file "
            "are separated by commas, those of a .tsv file by tabs."
        )
    is_nested = any(isinstance(value, (list, dict)) for value in first.values())
    if dataset.info.builder_name == "json" and (is_nested or not others):
        keys = textwrap.shorten(", ".join(first), 100, placeholder=" ...")
        raise UserError(
            f"{name} is no list of pairs: its rows have the keys {keys}. A .json file has a list such as "
            '[{"en": "one", "de": "eins"}, ...], a .jsonl file one pair in each line.'
        )


def is_list(features: dict, column: str) -> bool:
    """Whether a column has lists of texts, such as the corrections of a sentence."""
    return getattr(getattr(features[column], "feature", None), "dtype", "") in ("string", "large_string")


def further_targets(
    dataset: Dataset | IterableDataset, columns: tuple, file: str | tuple[str, ...], options: DatasetOptions | None
) -> list[str]:
    """The columns with targets beside the one of `columns`: those of parallel files, and `--reference_columns`.

    Raises UserError if the dataset lacks one of the latter, or one is the source or the target.
    """
    named = (options and options.reference_columns) or []
    features = features_of(dataset, describe_file(file)) if named or isinstance(file, tuple) else {}
    if missing := [name for name in named if name not in features]:
        raise UserError(
            f"--reference_columns has {missing[0]}; the columns of {describe_file(file)} are {', '.join(features)}."
        )
    if repeated := [name for name in named if name in columns]:
        raise UserError(
            f"--reference_columns has {repeated[0]}, which is the source or the target; name further columns only."
        )
    return named or [name for name in features if name not in columns]


def select_pair(
    dataset,
    source: str | tuple[str, str],
    target: str | tuple[str, str],
    further: list[str] | None = None,
    as_references: bool = False,
):
    """The dataset with only the columns `source` and `target`; raises UserError if they are the same.

    A row with several texts of a language, as `TranslationVariableLanguages` allows, makes a pair of each; and so does
    one with a list of targets, or with `further` columns of targets. With `as_references`, the latter two make one
    pair with the first target, and the others are in a column `references`.
    """
    if source == target:
        raise UserError(f"Source and target are both {source}; name two different ones.")
    if isinstance(source, tuple):
        rows = dataset.select_columns(source[0])
        return map_columns(rows, partial(unnest, source=source, target=target), None)
    if further or is_list(dataset.features or {target: None}, target):
        targets = [target, *(further or ())]
        gather = partial(gather_targets, source=source, targets=targets, as_references=as_references)
        features = datasets.Features(TEXTS | REFERENCES) if as_references else TEXTS
        return map_columns(dataset.select_columns([source, *targets]), gather, features)
    pairs = dataset.select_columns([source, target])
    if isinstance(dataset, Dataset):
        return pairs.rename_columns({source: "source", target: "target"})
    features = pairs.features and datasets.Features(source=pairs.features[source], target=pairs.features[target])
    named = partial(name_columns, source=source, target=target)
    return pairs.with_format("arrow").map(named, batched=True, features=features).with_format(None)


def name_columns(table: pa.Table, source: str, target: str) -> pa.Table:
    return pa.table({"source": table[source], "target": table[target]})


def gather_targets(batch: dict, source: str, targets: list[str], as_references: bool) -> dict[str, list]:
    """Of each row a pair with all its targets or, unless `as_references`, a pair for each."""
    cells = zip(*(batch[name] for name in targets), strict=True)
    rows = [[text for cell in row for text in (cell if isinstance(cell, list) else [cell])] for row in cells]
    rows = [list(filter(is_filled, texts)) or [None] for texts in rows]
    if as_references:
        first, others = [texts[0] for texts in rows], [texts[1:] for texts in rows]
        return {"source": batch[source], "target": first, "references": others}
    pairs = [(text, target) for text, row in zip(batch[source], rows, strict=True) for target in row]
    return {"source": [text for text, _ in pairs], "target": [target for _, target in pairs]}


def unnest(batch: dict, source: tuple[str, str], target: tuple[str, str]) -> dict[str, list[str | None]]:
    rows = [json.loads(row) if isinstance(row, str) else row or {} for row in batch[source[0]]]  # text in a stream
    sides = ([texts_in(row, language) for row in rows] for _, language in (source, target))
    pairs = [pair for texts in zip(*sides, strict=True) for pair in itertools.product(*texts)]
    return {"source": [text for text, _ in pairs], "target": [text for _, text in pairs]}


def texts_in(row: dict, language: str) -> list[str | None]:
    """The texts of a language in a row of a `translation` column; `TranslationVariableLanguages` may have several."""
    if row.keys() == VARIABLE_LANGUAGES:
        found = zip(row["language"] or (), row["translation"] or (), strict=True)
        return [text for name, text in found if name == language] or [None]
    return [row.get(language)]


# ----------------------------------------------------------------------------------------------------------- token ids


def iter_texts(dataset: Dataset | IterableDataset) -> Iterator[str]:
    """The non-empty texts of both sides; of a stream, those of the first million pairs."""
    if isinstance(dataset, IterableDataset):
        dataset = dataset.take(TOKENIZER_SAMPLE)
    with reading_data("The training pairs"):
        for batch in dataset.iter(1000):
            yield from filter(is_filled, itertools.chain(batch["source"], batch["target"]))


def sample_texts(
    dataset: Dataset | IterableDataset, count: int = 1000, tags: Iterable[str] = ()
) -> dict[str, list[str]]:
    """The non-empty texts of each side of at most `count` pairs: evenly spaced ones, or the first ones of a stream.

    Sources are without their `tags`.
    """
    if isinstance(dataset, IterableDataset):
        sample = dataset.take(count)
    else:
        sample = dataset.select(range(0, len(dataset), len(dataset) // count + 1))
    with reading_data("The training pairs"):
        rows = list(sample)
    texts = {side: [row[side] for row in rows if is_filled(row[side])] for side in ("source", "target")}
    for tag in tags:
        texts["source"] = [text.removeprefix(f"{tag} ") for text in texts["source"]]
    return texts


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
    columns = batch | tokenizer(
        batch["source"], text_target=batch["target"], return_attention_mask=False, verbose=False
    )
    columns["source_length"] = list(map(len, columns["input_ids"]))
    columns["target_length"] = list(map(len, columns["labels"]))
    lengths = zip(columns["source_length"], columns["target_length"], strict=True)
    kept = [source <= max_source_length and target <= max_target_length for source, target in lengths]
    return {name: list(itertools.compress(columns[name], kept)) for name in names}


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
        code = (encode_pairs.__code__, transformers.__version__, tokenizers.__version__)
        key = (to_encode._fingerprint, content, tokenizer.split_special_tokens, limits, code)
        options["new_fingerprint"] = Hasher.hash(key)
    encoded = to_encode.map(encode, **options)
    drops = {"empty": len(dataset) - len(filled), "too long": len(filled) - len(encoded)}
    if len(encoded) == 0:
        names = ("--max_source_length ", "--max_target_length ") if split == "train" else ("", "")
        raise UserError(
            f"None of the {len(dataset)} pairs of the {split} split is usable: {drops['empty']} have an empty or "
            f"missing side, {drops['too long']} a source longer than {names[0]}{max_source_length} or a target longer "
            f"than {names[1]}{max_target_length} tokens."
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
