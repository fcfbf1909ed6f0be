"""Files of texts -> tables of strings: .csv, .tsv, .txt, .po, .tmx, and parallel files, whose lines are pairs."""

import contextlib
import csv
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import DatasetBuilder
from datasets.builder import Key
from datasets.packaged_modules.csv.csv import Csv, CsvConfig

from . import catalogues
from .catalogues import open_translations
from .options import TRANSLATION_FILES, suffix_of

ROWS = 10_000  # of a table
# Options of pandas. Without the last, a carriage return inside of a line would end it, too.
TABLES = {".csv": {}, ".tsv": {"sep": "\t", "quoting": csv.QUOTE_NONE, "lineterminator": "\n"}}
XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"


@dataclass
class TextFilesConfig(CsvConfig):
    """Options of pandas, as in a dataset card, whether files have the sides of the same pairs, and whether the first
    row of a table names its columns."""

    is_parallel: bool = False
    has_header: bool = True


class TextFiles(Csv):
    """A builder of `datasets` that reads each file by the rules of its own kind, whatever the files beside it.

    All values are strings: `007`, `NA` and `null` stay as they are.
    """

    BUILDER_CONFIG_CLASS = TextFilesConfig

    @classmethod
    def like(cls, builder: DatasetBuilder, cache_dir: str | None) -> "TextFiles":
        """Reads the files of another builder, with the options that a dataset card gave it."""
        defaults, own = CsvConfig(), {field.name for field in fields(CsvConfig)}
        own -= {"name", "version", "data_dir", "data_files", "description", "features"}
        given = {name: getattr(builder.config, name) for name in own}
        given = {name: value for name, value in given.items() if value != getattr(defaults, name)}
        files = itertools.chain(*builder.config.data_files.values())
        if given.get("sep") == "\t" and any(suffix_of(str(file)) == ".tsv" for file in files):  # by this suffix
            del given["sep"]
        place = {"dataset_name": builder.dataset_name, "base_path": builder.base_path, "token": builder.token}
        return cls(cache_dir, **place, data_files=builder.config.data_files, **given)

    def __init__(self, *args, **kwargs):
        # A digest of the code, so that files are read again by code that reads them otherwise.
        code = b"".join(Path(file).read_bytes() for file in (__file__, catalogues.__file__))
        super().__init__(*args, hash=sha256(code).hexdigest(), **kwargs)

    def _split_generators(self, dl_manager):
        splits = super()._split_generators(dl_manager)
        for split in splits:
            names, files = list(map(str, self.config.data_files[split.name])), split.gen_kwargs["files_iterables"]
            if self.config.is_parallel:
                names, files = names[:1], [list(group_sides(names, list(itertools.chain(*files))))]
            split.gen_kwargs = {"base_files": names, "files_iterables": files}
        return splits

    def _generate_tables(self, base_files, files_iterables):
        for number, (name, files) in enumerate(zip(base_files, files_iterables, strict=True)):
            for file in files:
                for part, table in enumerate(self.read(name, file)):
                    yield Key(number, part), table

    def read(self, name: str, file: str | list[str]) -> Iterator[pa.Table]:
        """The tables of a file. `name` is where it was downloaded or extracted from."""
        if self.config.is_parallel:
            return tables(read_parallel(*file), [suffix_of(one).removeprefix(".") for one in file])
        suffix = next((suffix for suffix in map(suffix_of, (file, name)) if suffix in READERS), ".csv")
        if suffix not in (".csv", ".tsv"):
            return READERS[suffix](file)
        options = self.config.pd_read_csv_kwargs | {"dtype": str, "na_filter": False}
        if not self.config.has_header:
            options |= {"header": None}
        if self.config.sep == CsvConfig.sep:
            options |= TABLES[suffix]
        if "lineterminator" in options:
            check_line_ends(file)
        return read_table(file, options)


def group_sides(names: list[str], files: list[str]) -> Iterator[tuple[str, ...]]:
    """The parallel files of each group, by the suffixes of their names: of patterns such as `*.en *.de` the first
    with the first, and so on. Raises ValueError if there are more of one side."""
    sides = {}
    for name, file in zip(names, files, strict=True):
        sides.setdefault(suffix_of(name), []).append(file)
    if len({len(side) for side in sides.values()}) > 1:
        counts = ", ".join(f"{suffix}: {len(side)}" for suffix, side in sides.items())
        raise ValueError(f"parallel files need equally many files of each side ({counts}).")
    return zip(*sides.values(), strict=True)


def tables(rows: Iterator[tuple], names: list[str]) -> Iterator[pa.Table]:
    schema = pa.schema(dict.fromkeys(names, pa.string()))
    yield schema.empty_table()  # without any table, `datasets` would not know the columns
    while some := list(itertools.islice(rows, ROWS)):
        yield pa.table([pa.array(column, pa.string()) for column in zip(*some, strict=True)], schema=schema)


def read_table(file: str, options: dict) -> Iterator[pa.Table]:
    """A table, with or without a header row, by pandas."""
    names = list(pd.read_csv(file, **options | {"nrows": 0, "chunksize": None}).columns)
    if len(names) == 1 and (found := re.search(r"[;|\t,]", str(names[0]))):
        raise ValueError(
            f"it has one column, {found.string!r}; its separator seems to be {found[0]!r}. Columns of a .csv file are "
            "separated by commas, those of a .tsv file by tabs."
        )
    for frame in pd.read_csv(file, iterator=True, **options):
        if not isinstance(frame.index, pd.RangeIndex):  # pandas took the first field for a name of the row
            raise ValueError(
                "its first row has more fields than its header; quote fields with commas in a .csv, replace tabs in "
                "fields of a .tsv, and remove separators at the end of rows."
            )
        is_blank = (frame.iloc[:, 0] == "\r") & (frame.iloc[:, 1:] == "").all(axis=1)  # of Windows
        if options.get("header", "infer") is None and options.get("names") is None:
            frame.columns = range(1, 1 + len(frame.columns))
        frame.columns = [str(name).rstrip("\r") for name in frame.columns]
        table = pa.Table.from_pandas(frame[~is_blank], preserve_index=False)
        table = table.cast(pa.schema(dict.fromkeys(table.column_names, pa.string())))
        *_, last = table.column_names
        yield table.set_column(table.num_columns - 1, last, pc.utf8_rtrim(table[last], "\r"))


def read_lines(file: str) -> Iterator[pa.Table]:
    """The lines of a text, in a column `line`, except for empty ones."""
    return tables(((line,) for line in lines_of(file) if line), ["line"])


def lines_of(file: str) -> Iterator[str]:
    """Lines end at line feeds only, and not at the other separators that Python or Unicode know."""
    check_line_ends(file)
    with open(file, encoding="utf-8-sig", newline="\n") as lines:
        for line in lines:
            yield line.removesuffix("\n").removesuffix("\r")


def check_line_ends(file: str):
    """Raises ValueError for a text whose lines end as those of the first Macintosh did."""
    with open(file, "rb") as opened:
        start = opened.read(100_000)
    if b"\n" not in start and start.count(b"\r") > 1:
        raise ValueError("its lines end with carriage returns alone; convert it, for example with mac2unix.")


def read_parallel(*files: str) -> Iterator[tuple[str, ...]]:
    """The lines of several files side by side. Raises ValueError if one has more than another."""
    for number, row in enumerate(itertools.zip_longest(*map(lines_of, files))):
        if None in row:
            ending = " and ".join(Path(file).name for file, line in zip(files, row, strict=True) if line is None)
            raise ValueError(f"{ending} ends after {number:,} lines, and others have more.")
        yield row


def read_translations(file: str, suffix: str) -> Iterator[pa.Table]:
    """The pairs of a file that translate-toolkit reads, see [`TranslationFile.pairs`]."""
    with open(file, "rb") as opened:
        content = opened.read()
    return tables(open_translations(content, suffix).pairs(), ["source", "target"])


def read_tmx(file: str) -> Iterator[pa.Table]:
    """The units of a translation memory (TMX 1.4b), in a column for each language, that of the sources first.

    Of inline elements of a segment, only the text is kept. Languages are named without their region if that is enough
    to tell those of a unit apart.
    """
    kinds = dict.fromkeys(map(tuple, units_of(file)))  # the languages of a unit
    is_enough = all(len(set(map(without_region, kind))) == len(kind) for kind in kinds)
    name = without_region if is_enough else str
    languages = list(dict.fromkeys(map(name, itertools.chain(*kinds))))
    units = ({name(language): text for language, text in unit.items()} for unit in units_of(file))
    return tables((tuple(map(unit.get, languages)) for unit in units), languages)


def units_of(file: str) -> Iterator[dict[str, str]]:
    """The texts of each unit by language."""
    with open(file, "rb") as opened:
        unit, first, body = {}, "", None
        for event, element in ElementTree.iterparse(opened, events=["start", "end"]):
            tag = element.tag.rpartition("}")[2]  # without a namespace
            if event == "start":
                first = language_code(element.get("srclang", "")) if tag == "header" else first
                main = without_region(first)
                body = element if tag in ("tmx", "body") else body
            elif tag == "tuv" and (text := element.find("{*}seg")) is not None:
                language = language_code(element.get(XML_LANG) or element.get("lang", ""))
                unit.setdefault(language, "".join(text.itertext()))
            elif tag == "tu":
                yield dict(sorted(unit.items(), key=lambda one: (one[0] != first, without_region(one[0]) != main)))
                unit = {}
                body.clear()  # of the units so far, which would fill the memory


def column_of(language: str | None, columns: list[str]) -> str | None:
    """The column with this name or, failing that, the only one that differs in case or has no region."""
    if language is None or language in columns:
        return language
    code = language_code(language)
    found = [column for column in columns if language_code(column) in (code, without_region(code))]
    return found[0] if len(found) == 1 else None


def may_have_columns(name: str | tuple[str, str], languages: set[str]) -> bool:
    """Whether a file, or two parallel ones by their endings, may have columns that are named after the languages."""
    if isinstance(name, tuple):
        return {suffix_of(file).removeprefix(".") for file in name} == languages
    if (suffix := suffix_of(name)) in (".csv", ".tsv") and Path(name).is_file():
        with contextlib.suppress(OSError, ValueError):  # reported when the file is read
            header = list(pd.read_csv(name, nrows=0, **TABLES[suffix]).columns)
            return all(column_of(language, header) for language in languages)
    return suffix not in (".txt", *TRANSLATION_FILES)


def language_code(name: str) -> str:
    return name.lower().replace("_", "-")


def without_region(language: str) -> str:
    return language.partition("-")[0]


READERS = {".csv": read_table, ".tsv": read_table, ".txt": read_lines, ".tmx": read_tmx}
READERS |= {suffix: partial(read_translations, suffix=suffix) for suffix in TRANSLATION_FILES}
