"""The training, validation and test pairs: opened, held out, mixed."""

from dataclasses import replace
from functools import partial
from hashlib import blake2b

import datasets
import numpy as np
import pyarrow as pa
from accelerate import PartialState
from datasets import Dataset, IterableDataset, ReadInstruction
from datasets.features.features import require_decoding

from ..errors import UserError, one_line
from ..files import public_file, public_name
from ..languages import known_code
from .columns import REFERENCES, choose_columns, find_columns, further_targets, join_columns, lacks_header, select_pair
from .options import HELD_OUT, MOST_HELD_OUT, DataOptions, DatasetOptions, Source, describe_file, group_parallel
from .rows import TEXTS, load_dataset, load_file, map_columns, reading_data
from .survey import PairHashes, describe_survey, survey
from .texts import is_filled, normal_form

SPLITS = {"train": "max_train_samples", "validation": "max_eval_samples", "test": "max_predict_samples"}
NAMED = 8  # files that the origin of a split names
SURVEYED = 10_000  # of a stream


class Splits(dict):
    """The splits by name, each with the columns `source` and `target`; only `train` may be a stream.

    Attributes:
        origins: By name of the split, where it is from, in words.
        directions_differ: Whether the training files translate in different directions.
        survey: What [`survey`] found in them; empty on all processes but the main one.
    """

    def __init__(self):
        super().__init__()
        self.origins: dict[str, str] = {}
        self.directions_differ = False
        self.survey: dict[str, dict] = {}


def load_pairs(options: DataOptions) -> Splits:
    """Loads the training, validation and test splits that exist, and prints what is odd about them.

    Raises UserError if the dataset, a split, a column or a language does not exist (the message lists those that do),
    or if a file cannot be read or its header does not fit its rows.
    """
    if not (options.dataset_name or options.train_file):  # as in a recipe of sizes only
        raise UserError("There is nothing to train on; give --dataset_name or --train_file.")
    sources = {split: options.sources(split) for split in SPLITS}
    rows = open_splits(sources, options)
    with reading_data(options.label):
        files, differ = read_splits(rows, sources, options)
        held_out = hold_out(files, sources["train"], options, differ)
        files |= held_out
        files["train"] = leave_out(files, options)
        for split in held_out.keys() - {"train"}:
            sources[split] = [replace(source, weight=1.0) for source in sources["train"][: len(files[split])]]
        pairs = Splits()
        pairs.directions_differ = differ
        pairs.origins = {
            split: ("held out of " if split in held_out and split != "train" else "") + describe_origin(sources[split])
            for split in files
        }
        counts = {split: getattr(options, name) for split, name in SPLITS.items()}
        if PartialState().is_main_process:
            surveyed = {split: used_pairs(parts, sources[split], counts[split]) for split, parts in files.items()}
            pairs.survey = survey(surveyed, differ, options.verbatim)
            print(describe_survey(pairs.survey, options.streaming))
        for split in filter(files.get, SPLITS):
            pairs[split] = mix_files(files[split], sources[split])
            if counts[split] is not None:
                pairs[split] = pairs[split].take(counts[split])
    return pairs


def open_splits(sources: dict[str, list[Source]], options: DataOptions) -> dict[str, Dataset | IterableDataset]:
    """By split, the rows of its first source."""
    names = {split: [source.name for source in some] for split, some in sources.items()}
    if options.train_file:
        rows = {split: load_file(split, files[0], options.streaming) for split, files in names.items() if files}
    else:
        found = load_dataset(options, "--train_file", options.streaming)
        rows = {
            split: find_split(found, name, options.label)
            for split, (name,) in names.items()
            if split == "train" or getattr(options, f"{split}_split") or name in found
        }
    return rows


def read_splits(
    rows: dict[str, Dataset | IterableDataset], sources: dict[str, list[Source]], options: DataOptions
) -> tuple[dict[str, list[Dataset]], bool]:
    """The pairs of each file of each split, and whether the training files translate in different directions."""
    files, known = {}, {}  # known: the columns of the first file with these languages
    for split, first in rows.items():
        files[split], columns = read_files(split, first, sources[split], options.streaming, known)
        if split == "train":
            differ = report_directions(columns, sources[split])
        elif options.streaming:
            with reading_data(sources[split][0].label):
                files[split] = list(map(as_table, files[split]))
    return files, differ


def read_files(split: str, first: Dataset, sources: list[Source], streaming: bool, known: dict) -> tuple[list, list]:
    """The pairs of each source of a split, and the columns they are in; `first` has the rows of the first source.

    Columns that are `known` for the languages of a file are taken if it has them.
    """
    files, columns = [], []
    for number, source in enumerate(sources):
        dataset = load_file(split, source.name, streaming) if number else first
        direction = source.source_lang, source.target_lang
        with reading_data(source.label):  # a stream is first read here
            dataset = open_columns(split, dataset, source, streaming, known.get(direction, ()))
            columns.append(choose_columns(dataset, source, known.get(direction, ())))
        known.setdefault(direction, columns[-1])
        more = further_targets(dataset, columns[-1], source)
        files.append(select_pair(dataset, *columns[-1], more, as_references=split != "train"))
    return files, columns


def open_columns(
    split: str, rows: Dataset | IterableDataset, source: Source, streaming: bool = False, preferred: tuple = ()
) -> Dataset | IterableDataset:
    """The rows, read again if they have no header, with the columns that the source joins."""
    if lacks_header(rows, source, preferred):
        rows = load_file(split, source.name, streaming, has_header=False)
    return join_columns(rows, source)


def report_directions(columns: list[tuple], sources: list[Source]) -> bool:
    """Prints the directions in which the training files translate, if they differ; returns whether they do.

    Columns and the endings of parallel files are languages if they are called so, unlike `question` or `ref0`.
    """
    directions = [(source.source_lang, source.target_lang) for source in sources]
    if not sources[0].is_named:  # else the options name the languages, whatever the columns are called
        directions = [tuple(side if isinstance(side, str) else side[1] for side in pair) for pair in columns]
        directions = [pair if all(map(known_code, pair)) else (None, None) for pair in directions]
    distinct = list(dict.fromkeys(pair for pair in directions if pair != (None, None)))
    if len(distinct) > 1:
        said = ", ".join(f"{source} to {target}" for source, target in distinct)
        PartialState().print(f"The training files translate in different directions: {said}.")
        tags = [source.tag for source in sources]
        if len(set(zip(tags, (target for _, target in directions), strict=True))) > len(set(tags)):
            PartialState().print(
                "warning: files with different target languages have the same tag, so the model cannot know which "
                "one to write; give each its own with --train_file_tags, such as '>>de<<' '>>fr<<'."
            )
    return len(distinct) > 1


def load_split(
    options: DatasetOptions, split: str, files: list[str] | None = None, file_options: str | None = None
) -> Dataset:
    """Loads a split of a dataset, or `files`, one or two parallel ones, with all columns, and its two sides as the
    columns `source` and `target`.

    Images and sounds are dropped, and all other columns if a row makes several pairs. `file_options` are as in
    [`load_dataset`]. Raises UserError if the dataset, the split, a file or a column does not exist.
    """
    if files:
        names = group_parallel(files)
        if len(names) > 1:
            raise UserError(f"--{split}_file has {len(names)} files; give one, or two parallel ones.")
        label, rows = describe_file(names[0]), load_file(split, names[0], streaming=False)
    else:
        label = options.label
        rows = find_split(load_dataset(options, file_options), split, label)
    source = options.source_of(names[0] if files else label, is_file=bool(files))
    with reading_data(label):
        rows = open_columns(split, rows, source)
        columns = find_columns(rows, source)
        more = further_targets(rows, columns, source)
        pairs = select_pair(rows, *columns, more, as_references=True)
    kept = [name for name, feature in rows.features.items() if not require_decoding(feature)]
    ours = {*TEXTS, *REFERENCES}  # a column of the user's that is called like ours has another meaning
    others = rows.select_columns([name for name in kept if name not in ours])
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
    if name in splits:
        return splits[name]
    lengths = {split: len(rows) if isinstance(rows, Dataset) else 1 for split, rows in splits.items()}
    try:
        parts = ReadInstruction.from_spec(name).to_absolute(lengths)
    except (AssertionError, ValueError) as error:
        detail = f" ({one_line(error).rstrip('.')})" if is_expression else ""
        listed = ", ".join(splits)
        raise UserError(f"{dataset} has no split '{name}'{detail}; its splits: {listed}.") from error
    return datasets.concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


def mix_files(files: list[Dataset], sources: list[Source]) -> Dataset | IterableDataset:
    """One dataset of all files: each pair as often as the weight of its source says, with its tag.

    A weight of w makes round(w n) pairs of the n pairs of a file, but at least one unless w is 0, spread evenly: each
    of them floor(w) or ceil(w) times. So the data itself says how often a pair is in an epoch, and batches,
    fingerprints and resuming need no weights.
    """
    mixed = []
    for pairs, source in zip(files, sources, strict=True):
        if source.weight != 1:
            pairs = pairs.select(rows_of_epoch(len(pairs), source.weight))
        if source.tag:
            pairs = map_columns(pairs, partial(tag_sources, tag=source.tag), pairs.features)
        features = pairs.features and datasets.Features(
            {**pairs.features, **{name: files[0].features[name] for name in TEXTS}}
        )
        mixed.append(pairs if pairs.features == features else pairs.cast(features))
    return datasets.concatenate_datasets(mixed) if len(mixed) > 1 else mixed[0]


def rows_of_epoch(length: int, weight: float) -> np.ndarray:
    """The rows of a file of this length that an epoch reads."""
    count = max(round(weight * length), int(weight > 0))
    return np.arange(count) * length // max(count, 1)


def used_pairs(files: list[Dataset | IterableDataset], sources: list[Source], count: int | None) -> list[Dataset]:
    """The pairs of each file that are among the first `count` of an epoch, each once; of a stream the first."""
    if isinstance(files[0], IterableDataset):
        return [as_table(part, min(SURVEYED, count or SURVEYED)) for part in files]
    if count is None and all(source.weight == 1 for source in sources):
        return files
    used, left = [], count
    for pairs, source in zip(files, sources, strict=True):
        rows = rows_of_epoch(len(pairs), source.weight)[:left]
        left = count and left - len(rows)
        used.append(pairs.select(np.unique(rows)))
    return used


def tag_sources(batch: dict, tag: str) -> dict[str, list[str | None]]:
    """Puts the tag and a space in front of each source that is not empty."""
    return {**batch, "source": [f"{tag} {text}" if is_filled(text) else text for text in batch["source"]]}


def describe_origin(sources: list[Source]) -> str:
    """Where a split is from, without the paths of its files, which may be private."""
    first = sources[0]
    if name := first.dataset:
        return f"{first.name} of {public_name(name)}"
    files = [file for source in sources for file in ([source.name] if isinstance(source.name, str) else source.name)]
    where = ", ".join(map(public_file, files[:NAMED]))
    return where + (f" and {len(files) - NAMED:,} more" if len(files) > NAMED else "")


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
    train = PairHashes(files["train"])
    is_kept = np.ones(len(train.rows), dtype=bool)
    if options.deduplicate:
        is_kept &= ~train.repeated()
        repeated = (~is_kept).sum()
        PartialState().print(f"--deduplicate leaves out {repeated:,} training pairs that repeat an earlier one.")
    if options.remove_overlap:
        others = [PairHashes(parts).source for split, parts in files.items() if split != "train"]
        is_scored = np.isin(train.source, np.concatenate(others))
        PartialState().print(
            f"--remove_overlap leaves out {(is_kept & is_scored).sum():,} training pairs whose source is in the "
            "validation or test split."
        )
        is_kept &= ~is_scored
    ends = np.cumsum(list(map(len, files["train"])))
    is_kept = np.isin(np.arange(ends[-1]), train.rows[is_kept])
    return list(map(keep_rows, files["train"], np.split(is_kept, ends[:-1])))


def keep_rows(pairs: Dataset, is_kept: np.ndarray) -> Dataset:
    """The rows for which `is_kept` (n,) is true, in a table of their own, which `datasets` caches.

    Each later look at them would take ten times as long if they were read by their places, as after `select`.
    """

    def keep(table: pa.Table, rows: list[int]) -> pa.Table:
        return table.filter(pa.array(is_kept[rows]))

    options = {"with_indices": True, "batched": True, "features": pairs.features, "desc": "Selecting pairs"}
    return pairs.with_format("arrow").map(keep, **options).with_format(None)


def hold_out(
    files: dict[str, list[Dataset]], sources: list[Source], options: DataOptions, differ: bool
) -> dict[str, list[Dataset]]:
    """Divides the training files where a split is missing: validation and, with `--test_split_percentage`, test.

    A hash of its normalized source decides whether a pair is held out, so pairs with the same source stay together,
    and a pair stays on its side when files grow or are shuffled; but the share for validation falls where it would be
    more than `MOST_HELD_OUT` pairs, which gives some of them to training. Every file gives pairs; if files `differ` in
    their languages, each gives at least one. If they have tags or weights and the same languages, such as
    back-translations, only the first gives pairs, and the others lose the pairs whose sources are held out.
    """
    name, train = options.label, files["train"]
    shares = {"test": options.test_split_percentage, "validation": options.validation_split_percentage or HELD_OUT}
    shares = {split: share for split, share in shares.items() if share and split not in files}
    if "test" in files and options.test_split_percentage:
        raise UserError(f"{name} has a test split; leave --test_split_percentage out.")
    if not shares:
        return {}
    remedy = "give validation pairs with --validation_split or --validation_file."
    if options.streaming:
        raise UserError(f"{name} has no {' and no '.join(shares)} split, and a stream cannot be split; {remedy}")
    sides = (pairs.select_columns("source") for pairs in train)
    points = [np.array([point_of(text) for part in side.iter(10_000) for text in part["source"]]) for side in sides]
    are_alike = all(source.weight == 1 and not source.tag for source in sources)
    count = len(train) if differ or are_alike else 1
    name, has = (f"{name} and {count - 1:,} more", "have") if count > 1 else (name, "has")
    total = sum(map(len, train[:count]))
    if "validation" in shares and not options.validation_split_percentage:
        shares["validation"] = min(HELD_OUT, 100 * MOST_HELD_OUT / max(total, 1))
    if differ:
        bounds = [bounds_of(of_file, shares) for of_file in points]
    else:
        bounds = [bounds_of(np.concatenate(points[:count]), shares)] * len(train)
    found: dict[str, list[Dataset]] = {split: [] for split in ("train", *shares)}
    for pairs, of_file, within in zip(train[:count], points, bounds, strict=False):
        for split, (start, end) in within.items():
            is_within = (start <= of_file) & (of_file < end)
            is_train = split == "train"
            found[split].append(keep_rows(pairs, is_within) if is_train else pairs.select(np.flatnonzero(is_within)))
    taken = points[0][points[0] < bounds[0]["train"][0]]  # sources that are held out of the first file
    for pairs, of_file in zip(train[count:], points[count:], strict=True):
        found["train"].append(keep_rows(pairs, ~np.isin(of_file, taken)))
    held_out = {split: [len(part) for part in found[split]] for split in shares}
    needed = all if differ else any  # files with pairs on either side
    if not needed(map(len, found["train"])) or not all(map(needed, held_out.values())):
        each, sources = " of each direction" if differ else "", len(np.unique(np.concatenate(points[:count])))
        raise UserError(
            f"{name} {has} {total:,} pair(s) of {sources:,} source(s), too few to hold some out{each}; {remedy}"
        )
    for split, counts in held_out.items():
        how_many = f"{sum(counts):,} of {total:,} pairs are held out, by a hash of their sources"
        PartialState().print(f"{name} {has} no {split} split: {how_many}.")
    return found


def bounds_of(points: np.ndarray, shares: dict[str, float]) -> dict[str, tuple[float, float]]:
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
