"""Which columns of a dataset or a file are source and target, and the pairs in them."""

import itertools
import json
from functools import partial

import datasets
import pyarrow as pa
from accelerate import PartialState
from datasets import Dataset, IterableDataset

from ..errors import UserError, shortened
from ..languages import known_code
from .options import TRANSLATION_FILES, Source, suffix_of
from .readers import TextFiles, column_of
from .rows import TEXTS, map_columns
from .texts import is_filled

VARIABLE_LANGUAGES = {"language", "translation"}  # the fields of `datasets.TranslationVariableLanguages`
REFERENCES = datasets.Features(references=datasets.List(datasets.Value("string")))  # of validation and test


def choose_columns(dataset: Dataset | IterableDataset, source: Source, preferred: tuple = ()) -> tuple:
    """The `preferred` columns if the dataset has them; otherwise picks columns and prints them.

    Raises UserError if there are none.
    """
    if preferred and all(has_column(dataset, column, source.label) for column in preferred):
        return preferred
    columns = find_columns(dataset, source)
    is_numbered = isinstance(columns[0], str) and columns[0].isdecimal()  # without a header row
    if not source.is_named and is_table(dataset, source) and not (is_numbered or all(map(is_known, columns))):
        PartialState().print(
            f"The first row of {source.label} is taken for the names of its columns; if it is a pair itself, give "
            "--source_column 1 --target_column 2."
        )
    names = (column if isinstance(column, str) else " / ".join(column) for column in columns)
    PartialState().print("translating from column {!r} to column {!r} of {}".format(*names, source.label))
    return columns


def has_column(dataset: Dataset | IterableDataset, column: str | tuple[str, str], label: str) -> bool:
    features = features_of(dataset, label)
    if isinstance(column, str):
        return column in features and (is_text(features[column]) or is_list(features, column))
    return column[1] in nested_languages(dataset, features.get(column[0]))


def lacks_header(dataset: Dataset | IterableDataset, source: Source, preferred: tuple = ()) -> bool:
    """Whether a .csv or .tsv file has no header row; prints so if it has none.

    It has none if the options, or the file before it, number its columns; and if its first row is clearly a pair: one
    of its cells is neither a language nor an identifier, and stands above texts. Raises UserError if the first row is
    neither a header nor a pair.
    """
    if source.dataset or not is_table(dataset, source):
        return False
    cells = list(features_of(dataset, source.label))
    named = [*source.source_columns, *source.target_columns]
    if named and all(map(str.isdecimal, named)) and not set(named) <= set(cells):
        PartialState().print(f"{source.label} is read without a header row; its first row is {describe_row(cells)}.")
        return True
    if any(source.columns) or len(cells) < 2 or (preferred and set(preferred) <= set(cells)):
        return False
    languages = source.source_lang, source.target_lang
    if any(column_of(language, cells) for language in languages) or all(map(is_known, cells)):
        return False
    is_like_before = preferred and all(isinstance(column, str) and column.isdecimal() for column in preferred)
    are_names = all(is_known(cell) or cell.replace("-", "_").isidentifier() for cell in cells)
    if not is_like_before and are_names and first_row(cells) == cells:  # two columns have no common name
        return False
    words = columns_of_words(dataset, cells)
    if not all(is_number(cell) for cell in cells if cell not in words):
        return False
    row = describe_row(cells)
    if len(cells) > 2 and len(words) != 2:
        raise UserError(
            f"The first row of {source.label}, {row}, does not say which columns are source and target; choose "
            "two with --source_column and --target_column: by their numbers, from 1 on, if it has no names."
        )
    direction = "" if None in languages else ", from {} to {}".format(*languages)
    PartialState().print(
        f"{source.label} has no header row: its first row, {row}, is read as a pair{direction}. If it names the "
        "columns, choose two with --source_column and --target_column."
    )
    return True


def first_row(columns: list[str]) -> list[str]:
    """The cells of the row that names the columns: pandas adds .1 to one that equals another."""
    cells = []
    for name in columns:
        cell, _, number = name.rpartition(".")
        cells.append(cell if number.isdecimal() and cell in cells else name)
    return cells


def describe_row(columns: list[str]) -> str:
    return shortened(" | ".join(first_row(columns)), 200)


def join_columns(dataset: Dataset | IterableDataset, source: Source) -> Dataset | IterableDataset:
    """Adds a column for each side that names several: their texts, joined with spaces. Empty texts are skipped; if all
    are empty, the value is None."""
    features = features_of(dataset, source.label)
    for names, joined in zip((source.source_columns, source.target_columns), source.columns, strict=True):
        if len(names) > 1 and set(names) <= set(features):
            if wrong := [name for name in names if not is_text(features[name])]:
                raise UserError(
                    f"{wrong[0]} of {source.label} is not a column of texts, and cannot be joined with others."
                )
            features = datasets.Features(features | {joined: datasets.Value("string")})
            add = partial(add_joined, names=names, joined=joined)
            dataset = dataset.with_format("arrow").map(add, batched=True, features=features).with_format(None)
    return dataset


def add_joined(table: pa.Table, names: tuple[str, ...], joined: str) -> pa.Table:
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    texts = [" ".join(filter(is_filled, row)) or None for row in rows]
    return table.append_column(joined, pa.array(texts, pa.string()))


def is_table(dataset: Dataset | IterableDataset, source: Source) -> bool:
    """Whether the columns are named by the first row of a .csv or .tsv file; a dataset may have other files, too."""
    is_text_file = dataset.info.builder_name == TextFiles.__module__.rpartition(".")[2]
    others = (".txt", ".tmx", *TRANSLATION_FILES)
    return is_text_file and isinstance(source.name, str) and suffix_of(source.name) not in others


def is_known(column: str | tuple[str, str]) -> bool:
    """Whether a column is called after a language, or `source` or `target`."""
    name = column if isinstance(column, str) else column[1]
    return name in ("source", "target") or known_code(name) is not None


def find_columns(dataset: Dataset | IterableDataset, source: Source) -> tuple:
    """The source and the target: a column name, or `("translation", language)` for a column of dictionaries.

    The first that applies: the columns named by `--source_column` and `--target_column`; `source` and `target`, if
    there are no others, as in a .txt file; the columns, or the languages of a `translation` column, named by
    `--source_lang` and `--target_lang` in any case and with any region; those of two parallel files, in their
    order; and, if no option is given or a table has no header row, the only two languages of a `translation` column,
    the columns `source` and `target`, or the only two text columns.
    """
    found = Columns(dataset, source)
    if any(source.columns):
        return found.by_name()
    if found.are_plain():
        return "source", "target"
    if source.source_lang or source.target_lang:
        return found.by_language()
    return found.only_two()


class Columns:
    """The columns of a dataset, of which two are source and target; `source` is what the options say of it."""

    def __init__(self, dataset: Dataset | IterableDataset, source: Source):
        self.dataset, self.source = dataset, source
        self.features = features_of(dataset, source.label)
        self.text = [name for name, feature in self.features.items() if is_text(feature)]
        self.targets = [*self.text, *(name for name in self.features if is_list(self.features, name))]
        self.nested = nested_languages(dataset, self.features.get("translation"))
        self.files = tuple(self.features)[:2] if isinstance(source.name, tuple) else None

    def are_plain(self) -> bool:
        """Whether they are `source` and `target` alone, as in a .txt file."""
        return set(self.features) == {"source", "target"} and "source" in self.text and "target" in self.targets

    def remedy(self) -> str:
        """What there is to choose from, for messages."""
        is_named = is_table(self.dataset, self.source) and not all(map(str.isdecimal, self.features))
        name = f"{self.source.label}{', named by its first row,' if is_named else ''}"
        said = f"the columns of {name} are {', '.join(self.features)}; text columns: {', '.join(self.text) or 'none'}"
        said += f"; languages in translation: {', '.join(self.nested)}." if self.nested else "."
        if any(str(getattr(one, "dtype", "")).startswith(("timestamp", "date")) for one in self.features.values()):
            said += " Dates in .json files are read as times; save them as .tsv to have them as text."
        inner = self.features.get("translation")
        features = [*self.features.values(), *(inner.values() if isinstance(inner, dict) else ())]
        if not self.text and any(str(getattr(one, "dtype", "")).startswith("int") for one in features):
            said += ' Numbers must be written as texts, such as "12".'
        if mixed := [name for name, feature in self.features.items() if isinstance(feature, datasets.Json)]:
            said += f" In {', '.join(mixed)}, rows have values of several types; write all as texts."
        return said

    def check_header(self, names: tuple, given: str):
        """Raises UserError if the columns that options name are missing in a table whose first row may be a pair."""
        cells = list(self.features)
        is_named = all(is_known(cell) or cell.isdecimal() for cell in cells)
        is_named = is_named or any(column_of(name, cells) for name in names)
        if is_table(self.dataset, self.source) and not (is_named or self.source.dataset):
            raise UserError(
                f"{self.source.label} has no header row with {given}; its first row is {describe_row(cells)}. Name "
                "two of these columns with --source_column and --target_column or, if it is a pair, number them: "
                "--source_column 1 --target_column 2."
            )

    def by_name(self) -> tuple:
        """The two that `--source_column` and `--target_column` name."""
        names = self.source.columns
        if names[0] in self.text and names[1] in self.targets:
            return names
        if self.are_plain():  # a .txt file beside others
            return "source", "target"
        if self.files and not set(names) & set(self.text):
            return self.files
        if None in names:
            raise UserError(f"Give both --source_column and --target_column; {self.remedy()}")
        given = f"--source_column {names[0]} and --target_column {names[1]}"
        self.check_header(names, given)
        raise UserError(f"{given} must both be text columns; {self.remedy()}")

    def by_language(self) -> tuple:
        """The two that `--source_lang` and `--target_lang` name."""
        languages = self.source.source_lang, self.source.target_lang
        named = column_of(languages[0], self.text), column_of(languages[1], self.targets)
        if all(named):
            return named
        if all(found := [column_of(language, self.nested) for language in languages]):
            return tuple(("translation", language) for language in found)
        # Endings are other words than the languages, as .src and .tgt, or one of them is, as in .en and .ref0.
        if self.files:
            fits = (name == end or known_code(end) is None for name, end in zip(named, self.files, strict=True))
            if not any(named) or all(fits):
                return self.files
        if is_table(self.dataset, self.source) and all(map(str.isdecimal, self.features)):  # without a header row
            return self.only_two()
        if None in languages:
            raise UserError(f"Give both --source_lang and --target_lang; {self.remedy()}")
        self.check_header(languages, self.source.languages)
        raise UserError(
            f"{self.source.languages} must both be text columns, or languages of a translation column; {self.remedy()}"
        )

    def only_two(self) -> tuple:
        """The two that no option need name."""
        if len(self.nested) == 2:
            return tuple(("translation", language) for language in self.nested)
        if {"source", "target"} <= set(self.text):
            return "source", "target"
        if self.files:
            return self.files
        words = self.text if len(self.text) <= 2 else columns_of_words(self.dataset, self.text)
        if len(words) == 2:
            return tuple(words)
        if not self.nested:
            check_layout(self.dataset, self.source.label)
        raise UserError(
            "Name the source and the target with --source_lang and --target_lang, or --source_column and "
            f"--target_column; {self.remedy()}"
        )


def features_of(dataset: Dataset | IterableDataset, name: str) -> dict:
    """The features of a dataset; of a stream that does not know them, its columns as text."""
    if dataset.features:
        return dataset.features
    first = next(iter(dataset), None)
    if first is None:
        raise UserError(f"{name} has no pairs.")
    return dict.fromkeys(first, datasets.Value("string"))


def nested_languages(dataset: Dataset | IterableDataset, feature) -> list[str]:
    """The keys of texts in a column `translation` with this feature; where rows differ, those of the first 10,000."""
    if isinstance(feature, datasets.Json):  # rows with different languages
        rows = (row["translation"] for row in dataset.select_columns("translation").take(10_000))
        return sorted({key for row in rows if isinstance(row, dict) for key in row if isinstance(row[key], str)})
    has_keys = isinstance(feature, dict)
    if isinstance(feature, datasets.TranslationVariableLanguages) or has_keys and feature.keys() == VARIABLE_LANGUAGES:
        rows = [row["translation"] or {} for row in dataset.select_columns("translation").take(10_000)]
        return sorted({language for row in rows for language in row.get("language") or ()})
    if has_keys:
        return [key for key in feature if is_text(feature[key]) or getattr(feature[key], "dtype", "") == "null"]
    return list(getattr(feature, "languages", []))


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
    """Raises UserError if the first rows show that the file is no list of pairs."""
    first, *others = next(dataset.with_format("arrow").iter(2)).to_pylist()  # images are not decoded
    nested = [key for key, value in first.items() if isinstance(value, (list, dict))]
    if nested and others:
        raise UserError(
            f"{' and '.join(nested)} of {name} are objects or lists; write them as texts, such as tokens with spaces "
            "between them."
        )
    if dataset.info.builder_name == "json" and not others:
        keys = shortened(", ".join(first), 100)
        raise UserError(
            f"{name} is no list of pairs: its rows have the keys {keys}. A .json file has a list such as "
            '[{"en": "one", "de": "eins"}, ...], a .jsonl file one pair in each line.'
        )


def is_list(features: dict, column: str) -> bool:
    """Whether a column has lists of texts, such as the corrections of a sentence."""
    return getattr(getattr(features[column], "feature", None), "dtype", "") in ("string", "large_string")


def is_text(feature) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def further_targets(dataset: Dataset | IterableDataset, columns: tuple, source: Source) -> list[str]:
    """The columns with targets beside the one of `columns`: those of parallel files, and `--reference_columns`.

    Raises UserError if the dataset lacks one of the latter, or one is the source or the target.
    """
    named = list(source.reference_columns)
    features = features_of(dataset, source.label) if named or isinstance(source.name, tuple) else {}
    if missing := [name for name in named if name not in features]:
        raise UserError(
            f"--reference_columns has {missing[0]}; the columns of {source.label} are {', '.join(features)}."
        )
    if named and isinstance(columns[0], tuple):
        raise UserError(
            f"--reference_columns has {named[0]}, but the pairs of {source.label} are in the column {columns[0][0]}; "
            "write source, target and references into columns of their own."
        )
    if wrong := [name for name in named if not (is_text(features[name]) or is_list(features, name))]:
        raise UserError(f"--reference_columns has {wrong[0]}, which is not a column of texts; name others.")
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
        return map_columns(rows, partial(unnest, source=source, target=target), TEXTS)
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
    """With `as_references`, one pair per row, with all its targets; else one pair per target."""
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
