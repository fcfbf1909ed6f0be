"""Which columns are source, target and references, and the pairs in them."""

from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from pair_files import ENGLISH_GERMAN, PAIRS, error, load, read, streamed, texts, write

from vanilla_transformer.data.options import DatasetOptions
from vanilla_transformer.data.readers import column_of
from vanilla_transformer.data.splits import load_split
from vanilla_transformer.errors import UserError


def columns(names: str) -> list[dict]:
    """Rows of text with the column's name; `id` is a number, `translation` a dictionary of languages."""
    special = [{"id": i, "translation": {"en": f"en {i}", "de": f"de {i}"}} for i in range(20)]
    return [{name: special[i].get(name, f"{name} {i}") for name in names.split()} for i in range(20)]


def of_columns(source: str | None, target: str | None, kind: str = "column") -> dict[str, str | None]:
    return {f"source_{kind}": source, f"target_{kind}": target}


def read_test(file: Path, **options) -> Dataset:
    return load_split(DatasetOptions(**options), "test", [str(file)])


def test_load_split_keeps_other_columns(tmp_path):
    write(tmp_path / "set" / "test.jsonl", [{"id": i, "en": s, "de": t} for i, (s, t) in enumerate(PAIRS)])
    options = DatasetOptions(str(tmp_path / "set"), source_lang="de", target_lang="en")
    source, target = "ein Hund für 3", "a dog 3"
    assert load_split(options, "test")[3] == {"source": source, "target": target, "id": 3, "en": target, "de": source}
    with pytest.raises(UserError, match="no split 'dev'; its splits: test"):
        load_split(options, "dev")


# columns of the file -> options -> (source, target)
COLUMNS = {
    "translation column": ("translation", of_columns("de", "en", "lang"), ("de 0", "en 0")),
    "translation column, both languages": ("translation", {}, ("en 0", "de 0")),
    "language columns": ("id de en fr", of_columns("fr", "de", "lang"), ("fr 0", "de 0")),
    "named columns": ("id x y z", of_columns("z", "x"), ("z 0", "x 0")),
    "named columns win": ("en de x y", ENGLISH_GERMAN | of_columns("y", "x"), ("y 0", "x 0")),
    "two text columns": ("id x y", {}, ("x 0", "y 0")),
    "source and target": ("note target source", {}, ("source 0", "target 0")),
    "source and target, and languages": ("target source", ENGLISH_GERMAN, ("source 0", "target 0")),
    "the other way round": ("source target", of_columns("target", "source"), ("target 0", "source 0")),
    "beside a translation column": ("translation x y", of_columns("x", "y", "lang"), ("x 0", "y 0")),
}


@streamed
@pytest.mark.parametrize("names, options, expected", COLUMNS.values(), ids=COLUMNS)
def test_finding_the_columns(names, options, expected, streaming, tmp_path):
    """The other file may have more of them."""
    train = write(tmp_path / "train.jsonl", columns(names))
    validation = write(tmp_path / "validation.jsonl", columns(f"{names} alignment"))
    pairs = load(train_file=train, validation_file=validation, streaming=streaming, **options)
    assert texts(pairs["train"])[0] == texts(pairs["validation"])[0] == expected
    assert sorted(next(iter(pairs["train"]))) == ["source", "target"]


def test_translation_feature_of_datasets(tmp_path):
    feature = datasets.Features({"translation": datasets.Translation(languages=["de", "en"])})
    path = tmp_path / "train.parquet"
    Dataset.from_list(columns("translation"), features=feature).to_parquet(path)
    assert read(path, **ENGLISH_GERMAN)[3] == ("en 3", "de 3")


@streamed
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rows_with_any_number_of_texts_of_a_language(suffix, streaming, tmp_path):
    """Two lists in each row; each text of the source makes a pair with each of the target."""
    feature = datasets.TranslationVariableLanguages(languages=["de", "en", "fr"])
    translations = [{"en": "dog", "de": ["Hund", "Köter"], "fr": "chien"}, {"en": "cat", "fr": "chat"}]
    translations += [{"en": ["car", "auto"], "de": ["Auto", "Wagen"]}] * 20
    encoded = [{"id": str(i), "translation": feature.encode_example(row)} for i, row in enumerate(translations)]
    table = Dataset.from_list(encoded, datasets.Features(id=datasets.Value("string"), translation=feature))
    path = tmp_path / f"train.{suffix}"
    table.to_parquet(path) if suffix == "parquet" else table.to_json(path)
    car = [("auto", "Auto"), ("auto", "Wagen"), ("car", "Auto"), ("car", "Wagen")]
    expected = [("dog", "Hund"), ("dog", "Köter"), ("cat", None), *car]
    assert read(path, streaming=streaming, **ENGLISH_GERMAN)[:7] == expected
    assert "in translation: de, en, fr" in error(path, streaming=streaming, source_lang="en", target_lang="es")


def test_text_column_called_translation(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"text": f"dog {i}", "translation": f"Hund {i}"} for i in range(20)])
    assert read(path)[0] == ("dog 0", "Hund 0")
    assert "text, translation" in error(path, **ENGLISH_GERMAN)


MEDIA = {"image": datasets.Image(), "sounds": datasets.List(datasets.Audio())}
OF_PAIRS = {
    "columns": dict.fromkeys(("en", "de"), datasets.Value("string")),
    "three texts": dict.fromkeys(("en", "de", "score"), datasets.Value("string")),
    "nested": {"translation": datasets.Translation(["en", "de"])},
    "nested with an image": {"translation": dict.fromkeys(("en", "de"), datasets.Value("string")) | MEDIA},
    "any number": {"translation": datasets.TranslationVariableLanguages(["en", "de"])},
}


@streamed
@pytest.mark.parametrize("case", OF_PAIRS)
def test_images_and_sounds_beside_texts_are_never_opened(case, streaming, tmp_path, monkeypatch):
    for kind in (datasets.Image, datasets.Audio):
        monkeypatch.setattr(kind, "decode_example", lambda *args, **kwargs: pytest.fail("it was opened"))
    file = {"bytes": None, "path": str(tmp_path / "fifo")}
    extra = {"image": file, "sounds": [file]}
    features = datasets.Features(OF_PAIRS[case] | MEDIA)
    lists = {"language": ["en", "de"], "translation": ["a dog 0", "ein Hund für 0"]}
    nested = lists if case == "any number" else {"en": "a dog 0", "de": "ein Hund für 0"} | extra
    row = {"en": "a dog 0", "de": "ein Hund für 0", "score": "1", "translation": nested} | extra
    rows = [{name: row[name] for name in features}] * 20
    path = tmp_path / "test.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=features.arrow_schema), path)
    options = ENGLISH_GERMAN if case != "columns" else {}
    assert read(path, streaming=streaming, **options)[0] == PAIRS[0]
    split = read_test(path, **options)
    assert split[0]["source"] == PAIRS[0][0] and "image" not in split.column_names
    error(train_file=path, source_lang="en", target_lang="fr", streaming=streaming)


@pytest.mark.parametrize("names, expected", [("EN DE", ("en", "de")), ("de-AT en_US", ("de", "en"))])
def test_case_and_region_of_a_language_do_not_matter(names, expected, tmp_path, capsys):
    source, target = names.split()
    for number, present in enumerate(["x en de", "de x en", "translation"]):
        read(write(tmp_path / f"{number}.jsonl", columns(present)), source_lang=source, target_lang=target)
        prefix = "translation / " if present == "translation" else ""
        said = "from column '{0}{1}' to column '{0}{2}'".format(prefix, *expected)
        assert said in capsys.readouterr().out
    assert column_of("en", ["en-GB", "en-US"]) is column_of("en-GB", ["en-US"]) is None


WRONG_COLUMNS = {  # columns (`id` is a number), kind of options, source, target, parts of the message
    "source column": ("a b id", "column", "c", "b", ["--source_column c and", "a, b, id"]),
    "target column": ("a b id", "column", "a", "c", ["--target_column c must", "a, b, id"]),
    "one column": ("a b id", "column", "a", None, ["Give both --source_column and --target_column", "a, b, id"]),
    "numbers": ("a b id", "column", "a", "id", ["--target_column id must both be", "text columns: a, b."]),
    "same column": ("a b id", "column", "a", "a", ["are both a"]),
    "language": ("a b id", "lang", "a", "fr", ["--source_lang a", "--target_lang fr", "a, b, id"]),
    "language of numbers": ("a b id", "lang", "a", "id", ["--target_lang id", "text columns: a, b."]),
    "one language": ("a b id", "lang", "a", None, ["Give both --source_lang", "a, b, id"]),
    "nested": ("translation", "lang", "en", "fr", ["--source_lang en", "--target_lang fr", "in translation: en, de"]),
    "nothing named": ("x y z", "lang", None, None, ["x, y, z"]),
}


@pytest.mark.parametrize("names, kind, source, target, parts", WRONG_COLUMNS.values(), ids=WRONG_COLUMNS)
def test_wrong_columns(names, kind, source, target, parts, tmp_path):
    message = error(write(tmp_path / "train.jsonl", columns(names)), **of_columns(source, target, kind))
    assert all(part in message for part in parts), message


def test_a_column_called_references_is_no_reference_unless_named(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"en": "a dog", "de": "ein Hund", "references": "abc", "more": "der Hund"}])
    assert "references" not in read_test(file, **of_columns("en", "de")).column_names
    several = read_test(file, **of_columns("en", "de"), reference_columns=["more"])
    assert several["references"][:] == [["der Hund"]] and several["target"][:] == ["ein Hund"]


ROW, MORE = {"id": 7, "en": "a dog", "de": "ein Hund", "more": "der Hund"}, {"reference_columns": ["more"]}
UNFIT = {  # a row and options -> the message
    "number": ({"translation": {"en": 1, "de": 2}}, ENGLISH_GERMAN, ".* must both be text .* written as texts, such"),
    "list": ({"translation": {"en": ["a"], "de": ["b"]}}, ENGLISH_GERMAN, ".* must both be text columns"),
    "numbers called source and target": ({"source": 1, "target": 2}, {}, ".* text columns: none.* written as texts"),
    "numbers that are named": ({"source": 1, "target": 2}, of_columns("source", "target"), ".* must both be text col"),
    "number, joined": (ROW, of_columns(["id", "en"], "de"), "id of {} is not a column of texts, and cannot be"),
    "number, reference": (ROW, of_columns("en", "de") | {"reference_columns": ["id"]}, "--reference_columns has id,"),
    "reference beside a translation column": (
        {"translation": ROW, "more": "der Hund"},
        ENGLISH_GERMAN | MORE,
        "--reference_columns has more, but the pairs of {} are in the column transl",
    ),
}


@pytest.mark.parametrize("row, options, message", UNFIT.values(), ids=UNFIT)
def test_columns_that_cannot_be_texts_or_references_are_refused(row, options, message, tmp_path):
    file = write(tmp_path / "a.jsonl", [row] * 3)
    with pytest.raises(UserError, match=f"^{message.format(file)}"):
        read_test(file, **options)


def test_files_with_other_languages_in_their_translation_column_are_opened_by_their_own(tmp_path):
    """Not by those of the file before, which they lack."""
    words = {"de": "eins", "fr": "un"}
    files = [write(tmp_path / f"{to}.jsonl", [{"translation": {"en": "one", to: words[to]}}] * 3) for to in words]
    pairs = load(train_file=files, validation_file=files[1])
    assert sorted(pairs["train"]["target"][:]) == ["eins"] * 3 + ["un"] * 3
    assert pairs["validation"]["target"][:] == ["un"] * 3 and pairs.directions_differ


def test_numbers_in_the_columns_of_the_file_before_are_refused(tmp_path):
    files = [write(tmp_path / f"{one}.jsonl", [{"en": one, "de": one}] * 3) for one in ("a", 1)]
    with pytest.raises(UserError, match=f"{files[1]}.*text columns: none"):
        load(train_file=files, validation_file=files[0], source_lang="en", target_lang="de")


def test_a_test_file_may_have_no_translations(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"translation": {"en": "a dog", "de": None}}] * 3)
    assert read_test(file, source_lang="en", target_lang="de")["target"][:] == [None] * 3


def test_a_language_that_only_later_rows_have(tmp_path):
    """`datasets` takes the type of a column from its first thousand rows."""
    words = [{"en": f"one {n}", "de": "eins"} | ({"fr": "un"} if n > 2000 else {}) for n in range(2010)]
    file = write(tmp_path / "a.jsonl", [{"translation": row} for row in words])
    found = load_split(DatasetOptions(source_lang="en", target_lang="fr"), "test", [str(file)])
    assert found["target"][:] == [None] * 2001 + ["un"] * 9


def test_numbered_columns_may_be_references_and_the_first_row_have_a_number(tmp_path):
    file = write(tmp_path / "a.tsv", "2\ta dog\tein Hund\tder Hund\n3\ta cat\teine Katze\tdie Katze\n")
    found = read_test(file, **of_columns("2", "3"), reference_columns=["4"])
    assert found["source"][:] == ["a dog", "a cat"] and found["references"][:] == [["der Hund"], ["die Katze"]]
