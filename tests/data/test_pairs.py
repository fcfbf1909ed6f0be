"""Pairs from every kind of source, and their token ids."""

import csv
import os
from hashlib import blake2b
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Dataset, IterableDataset
from helpers import data_options, text_dataset

from vanilla_transformer.data import encoding
from vanilla_transformer.data.encoding import PAIR_FEATURES, fingerprint, iter_texts, sample_texts, tokenize_pairs
from vanilla_transformer.data.options import DatasetOptions
from vanilla_transformer.data.readers import column_of
from vanilla_transformer.data.splits import load_pairs, load_split
from vanilla_transformer.data.tokenizer import tokenizer_for_training, train_tokenizer
from vanilla_transformer.errors import UserError

PAIRS = [(f"a dog {i}", f"ein Hund für {i}") for i in range(40)]
PARTS = {"train": PAIRS[:30], "validation": PAIRS[30:36], "test": PAIRS[36:]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """`datasets` caches in a folder of the test and uses no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


ENGLISH_GERMAN = {"source_lang": "en", "target_lang": "de"}
streamed = pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streamed"])


def rows(source="en", target="de", pairs=PAIRS) -> list[dict]:
    return [{source: s, target: t} for s, t in pairs]


def write(path: Path, rows: list[dict]) -> Path:
    """Writes rows in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = Dataset.from_list(rows)
    if path.suffix == ".txt":
        path.write_text("".join("\t".join(row.values()) + "\n" for row in rows), encoding="utf-8", newline="")
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        table.to_csv(path, **({"sep": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}))
    else:
        table.to_json(path, lines=path.suffix == ".jsonl")
    return path


def write_card(folder: Path, configs: dict[str, dict[str, str]]):
    """A dataset card with the file of each split of each configuration."""
    listed = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in files.items()]}
        for name, files in configs.items()
    ]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': listed})}---\n# Dogs")


def load(**options) -> dict:
    return load_pairs(data_options(**options))


def load_file(path: Path, **options) -> list[tuple]:
    """The training pairs of a file, which also serves for validation."""
    return texts(load(train_file=path, validation_file=path, **options)["train"])


def texts(dataset) -> list[tuple]:
    return [(pair["source"], pair["target"]) for pair in dataset]


def read(pairs: datasets.Dataset | IterableDataset) -> datasets.Dataset:
    """All pairs of a stream."""
    return pairs if isinstance(pairs, datasets.Dataset) else datasets.Dataset.from_list(list(pairs))


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.fixture
def hub_like(tmp_path):
    """A directory laid out like a Hub dataset repository with two configurations."""
    folder = tmp_path / "hub"
    for name, part in [("data/train", PAIRS[:30]), ("data/dev", PAIRS[30:36]), ("data/test", PAIRS[36:])]:
        write(folder / f"{name}.jsonl", rows(pairs=part))
    write(folder / "fr.csv", rows("en", "fr", PAIRS[:10]))
    files = {"train": "data/train.jsonl", "dev": "data/dev.jsonl", "test": "data/test.jsonl"}
    write_card(folder, {"en-de": files, "en-fr": {"train": "fr.csv"}})
    return folder


def test_directory_with_configurations(hub_like, capsys):
    options = {"dataset_name": str(hub_like), "dataset_config_name": "en-de", **ENGLISH_GERMAN}
    pairs = load(**options, validation_split="dev")
    assert {split: texts(part) for split, part in pairs.items()} == PARTS
    assert "Warning" not in capsys.readouterr().out
    split = load_split(DatasetOptions(**options), "dev")
    assert texts(split) == PARTS["validation"]


@streamed
def test_directories_of_save_to_disk(streaming, tmp_path):
    """Of a single dataset, which is the split `train`, and of several splits."""
    Dataset.from_list(rows()).with_format("numpy").save_to_disk(tmp_path / "one")
    splits = datasets.DatasetDict({split: Dataset.from_list(rows(pairs=part)) for split, part in PARTS.items()})
    splits.save_to_disk(tmp_path / "all")
    before = sorted(tmp_path.glob("[oa]*/**/*"))
    one = load(dataset_name=tmp_path / "one", streaming=streaming, validation_split="train")
    pairs = load(dataset_name=tmp_path / "all", streaming=streaming)
    list(one["train"].map(lambda row: row)), list(pairs["train"].map(lambda row: row))
    assert sorted(tmp_path.glob("[oa]*/**/*")) == before  # no cache is written beside the data
    assert texts(one["train"]) == PAIRS and isinstance(pairs["train"], IterableDataset) == streaming
    assert {split: texts(part) for split, part in pairs.items()} == PARTS


EXPRESSIONS = {  # of the training and of the validation split -> the pairs, and whether some are in both
    "percent": ("train[:50%]", "dev", (PAIRS[:15], PAIRS[30:36], False)),
    "rows": ("train[5:7]", "train[-3:]", (PAIRS[5:7], PAIRS[27:30], False)),
    "sum": ("train+dev", "test", (PAIRS[:36], PAIRS[36:], False)),
    "trained on": ("train+dev", "dev", (PAIRS[:36], PAIRS[30:36], True)),
    "overlap": ("train[:20]+test", "train[10:]", (PAIRS[:20] + PAIRS[36:], PAIRS[10:30], True)),
}


@pytest.mark.parametrize("train, validation, expected", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_parts_and_sums_of_splits(train, validation, expected, hub_like, capsys):
    options = {"dataset_name": str(hub_like), "dataset_config_name": "en-de", **ENGLISH_GERMAN}
    pairs = load(**options, train_split=train, validation_split=validation)
    is_warned_of = f"the validation pairs are the training pairs ({validation})" in capsys.readouterr().out
    assert (texts(pairs["train"]), texts(pairs["validation"]), is_warned_of) == expected
    split = load_split(DatasetOptions(**options), validation)
    assert texts(split) == expected[1]


def test_other_parts_of_splits_are_refused(hub_like):
    options = {"dataset_name": str(hub_like), "dataset_config_name": "en-de"}
    assert "has no split 'train+tset' (Unknown split" in error(**options, train_split="train+tset")
    assert "has no split 'train[x]' (Unrecognized" in error(**options, train_split="train[x]")
    message = error(**options, train_split="train[:5]", validation_split="dev", streaming=True)
    assert message == "A stream has whole splits only, not 'train[:5]'; leave out --streaming, or name one split."
    assert error(dataset_name="me/pairs@v1").endswith("give --dataset_name me/pairs --dataset_revision v1.")
    assert error(dataset_name=hub_like, dataset_revision="v1").endswith(f"on the Hub; {hub_like} is a directory.")


@streamed
def test_pattern_of_training_files(streaming, tmp_path):
    for name, part in [("a[1].jsonl", PAIRS[:10]), ("sub/b.jsonl", PAIRS[10:20]), ("c.csv", PAIRS[20:])]:
        write(tmp_path / name, rows(pairs=part))
    options = {"train_file": tmp_path / "**" / "*.jsonl", "validation_file": tmp_path / "c.csv"}
    assert texts(load(**options, streaming=streaming)["train"]) == PAIRS[:20]
    assert "does not exist" in error(train_file=tmp_path / "*.txt")


@pytest.mark.parametrize("row", [{"en": 1, "de": 2}, {"en": ["a"], "de": ["b"]}], ids=["numbers", "lists"])
def test_load_split_takes_texts_only(row, tmp_path):
    write(tmp_path / "test.jsonl", [{"translation": row}])
    options = data_options(dataset_name=tmp_path, source_lang="en", target_lang="de")
    with pytest.raises(UserError, match=f"The source of {tmp_path} is not text, but "):
        load_split(options, "test")


def test_load_split_keeps_other_columns(tmp_path):
    write(tmp_path / "set" / "test.jsonl", [{"id": i, "en": s, "de": t} for i, (s, t) in enumerate(PAIRS)])
    options = data_options(dataset_name=tmp_path / "set", source_lang="de", target_lang="en")
    source, target = "ein Hund für 3", "a dog 3"
    assert load_split(options, "test")[3] == {"source": source, "target": target, "id": 3, "en": target, "de": source}
    with pytest.raises(UserError, match="no split 'dev'; its splits: test"):
        load_split(options, "dev")


@streamed
@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "tsv", "parquet", "txt"])
def test_files(suffix, streaming, tmp_path):
    files = {f"{s}_file": write(tmp_path / f"{s}.{suffix}", rows(pairs=part)) for s, part in PARTS.items()}
    pairs = load(**files, streaming=streaming)
    assert isinstance(pairs["train"], IterableDataset) == streaming
    assert all(isinstance(pairs[split], Dataset) for split in ("validation", "test"))
    assert {split: texts(part) for split, part in pairs.items()} == PARTS


TEXT = {
    "quotation marks in .tsv": ("tsv", [('"a', "b"), ("c", 'd"')]),
    "missing values in .csv": ("csv", [("None", "NA"), ("null", "nan")]),
    "missing values in .tsv": ("tsv", [("None", "NA"), ("null", "nan")]),
    "line separators in .txt": ("txt", [("a\u2028b", "c\x0cd\x85e\x1cf"), ("a dog\rsleeps", "null")]),
}


@pytest.mark.parametrize("case", TEXT)
def test_special_characters_and_words_are_text(case, tmp_path):
    suffix, pairs = TEXT[case]
    pairs = [*pairs, *PAIRS[:10]]
    path = write(tmp_path / "set" / f"train.{suffix}", rows(pairs=pairs))
    assert load_file(path) == pairs
    if suffix != "txt":
        (path.parent / "README.txt").write_text("null")
        write(path.with_stem("validation"), rows(pairs=pairs))
        assert texts(load(dataset_name=path.parent)["train"]) == pairs


def test_lines_of_windows_and_names_with_wildcards(tmp_path):
    for name, pair in [("a[1]*.txt", "a\r\tb\r\n"), ("a1.txt", "no\tnein\n"), ("a[1]*b.txt", "no\tnein\n")]:
        (tmp_path / name).write_bytes(pair.encode() * 3)
    assert load_file(tmp_path / "a[1]*.txt") == [("a", "b")] * 3


def test_several_training_files_with_weights_and_tags(tmp_path, capsys):
    """Of other formats and columns; a weight repeats pairs or leaves out some, evenly; a tag marks the sources."""
    files = [
        write(tmp_path / "a.jsonl", [{"id": i, "en": s, "de": t} for i, (s, t) in enumerate(PAIRS[:4])]),
        write(tmp_path / "b.txt", rows(pairs=[*PAIRS[4:8], ("", "empty")])),
        write(tmp_path / "c.tsv", rows("de", "en", [(t, s) for s, t in PAIRS[8:12]])),
    ]
    validation = write(tmp_path / "val.csv", rows(pairs=PAIRS[30:]))
    options = {"train_file": files, "validation_file": validation, **ENGLISH_GERMAN}
    assert texts(load(**options)["train"]) == [*PAIRS[:8], ("", "empty"), *PAIRS[8:12]]
    assert f"from column 'source' to column 'target' of {files[1]}" in capsys.readouterr().out
    mixed = load(**options, train_file_weights=[1.5, 1, 0.5], train_file_tags=["", "<bt>", "<ft>"])
    expected = [PAIRS[0], PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[2], PAIRS[3]]
    expected += [(f"<bt> {source}", target) for source, target in PAIRS[4:8]] + [("", "empty")]
    expected += [(f"<ft> {source}", target) for source, target in (PAIRS[8], PAIRS[10])]
    assert texts(mixed["train"]) == expected and texts(mixed["validation"]) == PAIRS[30:]
    assert texts(load(**options, train_file_weights=[0, 0, 1])["train"]) == PAIRS[8:12]
    tiny = load(**options, train_file_weights=[0, 0.01, 1])["train"]  # at least one pair
    assert texts(tiny) == [PAIRS[4], *PAIRS[8:12]]
    assert texts(load(**options, train_file_weights=[2, 0, 0])["train"]) == [PAIRS[i // 2] for i in range(8)]


def test_validation_is_held_out_of_the_first_training_file(tmp_path):
    """The second, whose sources may be translations by a model, loses the pairs with the same sources."""
    files = [write(tmp_path / "a.jsonl", rows(pairs=PAIRS[:30])), write(tmp_path / "b.jsonl", rows(pairs=PAIRS[10:]))]
    pairs = load(train_file=files, train_file_weights=[2, 1], validation_split_percentage=20)
    train, held_out = texts(pairs["train"]), texts(pairs["validation"])
    assert 0 < len(held_out) < 15 and set(held_out) < set(PAIRS[:30])
    assert set(train) == {*PAIRS[:30], *PAIRS[10:]} - {*held_out}
    tagged = load(train_file=files, train_file_tags=["<a>", "<b>"], validation_split_percentage=20)
    assert texts(tagged["validation"]) == [(f"<a> {source}", target) for source, target in held_out]


@pytest.mark.parametrize("other, languages", [("de-en", ["en-de", "de-en"]), ("fr-en", None)])
def test_validation_is_held_out_of_files_with_other_languages(other, languages, by_language):
    files = {"train_file": [by_language("en-de", PAIRS[:20]), by_language(other, PAIRS[20:])]}
    options = {"train_file_langs": languages, "train_file_tags": ["<de>", "<en>"]}
    pairs = load(**files, **options, validation_split_percentage=30)
    assert {source[:4] for source, _ in texts(pairs["validation"])} == {"<de>", "<en>"}


Y_TO_X = {"source_column": "y", "target_column": "x"}


@pytest.fixture
def by_language(tmp_path):
    """by_language("en-de", pairs) -> a file with the columns `en` and `de`."""

    def save(direction: str, pairs: list[tuple]) -> Path:
        path = tmp_path / f"{direction}-{len(pairs)}.tsv"
        return write(path, rows(*direction.split("-"), pairs))

    return save


def test_each_training_file_has_its_own_languages(by_language, capsys):
    files = [by_language("en-de", PAIRS[:20]), by_language("en-fr", PAIRS[20:30])]
    options = {"train_file": files, "validation_file": files, "train_file_tags": [">>de<<", ">>fr<<"]}
    german, french = ([(f">>{tag}<< {s}", t) for s, t in pairs] for tag, pairs in (("de", PAIRS), ("fr", PAIRS)))
    for languages in (["en-de", "en-fr"], ["en:de", "en:fr"], None):  # None: the only two columns
        pairs = load(**options, train_file_langs=languages)
        assert texts(pairs["train"]) == texts(pairs["validation"]) == german[:20] + french[20:30]
    assert "different directions: en to de, en to fr." in capsys.readouterr().out
    swapped = load(**options, train_file_langs=["en-de", "fr-en"])["train"]
    assert texts(swapped) == german[:20] + [(f">>fr<< {t}", s) for s, t in PAIRS[20:30]]
    named = {"source_column": "fr", "target_column": "en", "train_file": files[1:] * 2}
    named["validation_file"] = named["train_file"]
    assert texts(load(**options | named, train_file_langs=["de-en", "fr-en"])["train"])[-1] == (
        f">>fr<< {PAIRS[29][1]}",
        PAIRS[29][0],
    )


def test_a_validation_file_for_each_training_file(by_language):
    """It has the same languages and the same tag; a file for all has neither, unless they are named."""
    options = {"train_file": [by_language("en-de", PAIRS[:20]), by_language("en-fr", PAIRS[20:30])]}
    options |= {"train_file_tags": [">>de<<", ">>fr<<"], "train_file_langs": ["en-de", "en-fr"]}
    more = [by_language("en-de", PAIRS[30:32]), by_language("en-fr", PAIRS[32:35])]
    expected = [(f">>{tag}<< {s}", t) for tag, part in (("de", PAIRS[30:32]), ("fr", PAIRS[32:35])) for s, t in part]
    pairs = load(**options, validation_file=more, test_file=more)
    assert texts(pairs["validation"]) == texts(pairs["test"]) == expected
    assert texts(load(**options, validation_file=more[0])["validation"]) == PAIRS[30:32]
    french = load(**options, validation_file=more[1], source_lang="en", target_lang="fr")
    assert texts(french["validation"]) == PAIRS[32:35] and len(french["train"]) == 30
    assert "the columns of" in error(**options, validation_file=more[1])


DIRECTIONS = {  # files and their tags -> whether the directions are said, and that the target language is not
    "one": ("en-de en-de", None, (False, False)),
    "reversed": ("en-de fr-en", None, (True, True)),
    "many to one": ("de-en fr-en", None, (True, False)),
    "one to many": ("en-de en-fr", None, (True, True)),
    "the same tag": ("en-de en-fr", ["<x>", "<x>"], (True, True)),
    "tagged": ("en-de en-fr", ["", "<x>"], (True, False)),
}


@pytest.mark.parametrize("case", DIRECTIONS)
@pytest.mark.parametrize("is_named", [True, False])
def test_directions_that_differ_are_said(is_named, case, by_language, capsys):
    directions, tags, expected = DIRECTIONS[case]
    files = [by_language(one, PAIRS[: 20 + i]) for i, one in enumerate(directions.split())]
    load(train_file=files, train_file_tags=tags, train_file_langs=directions.split() if is_named else None)
    said = capsys.readouterr().out
    assert ("different directions: " in said, "warning: files with different target languages" in said) == expected


def test_a_translation_into_another_language_is_no_second_target(by_language):
    files = [by_language("en-de", PAIRS), by_language("en-fr", [(source, f"En {target}") for source, target in PAIRS])]
    assert load(train_file=files, train_file_tags=["<de>", "<fr>"]).survey["train"]["several_targets"] == 0


def test_files_with_other_languages_need_them_named(by_language):
    files = [by_language("en-de", PAIRS[:20]), by_language("en-fr", PAIRS[20:30])]
    assert "files with different languages need --train_file_langs" in error(train_file=files, **ENGLISH_GERMAN)
    message = error(train_file=files, train_file_langs=["en-de", "en-es"])
    assert message.startswith("en and es of --train_file_langs must both be text columns")


TARGET_TO_SOURCE = {"source_column": "target", "target_column": "source"}
X_TO_Y = {"source_lang": "x", "target_lang": "y"}
# columns of the file -> options -> (source, target)
COLUMNS = {
    "translation column": (["translation"], {"source_lang": "de", "target_lang": "en"}, ("de 0", "en 0")),
    "translation column, both languages": (["translation"], {}, ("en 0", "de 0")),
    "language columns": (["id", "de", "en", "fr"], {"source_lang": "fr", "target_lang": "de"}, ("fr 0", "de 0")),
    "named columns": (["id", "x", "y", "z"], {"source_column": "z", "target_column": "x"}, ("z 0", "x 0")),
    "named columns win": (["en", "de", "x", "y"], ENGLISH_GERMAN | Y_TO_X, ("y 0", "x 0")),
    "two text columns": (["id", "x", "y"], {}, ("x 0", "y 0")),
    "source and target": (["note", "target", "source"], {}, ("source 0", "target 0")),
    "source and target, and languages": (["target", "source"], ENGLISH_GERMAN, ("source 0", "target 0")),
    "the other way round": (["source", "target"], TARGET_TO_SOURCE, ("target 0", "source 0")),
    "beside a translation column": (["translation", "x", "y"], X_TO_Y, ("x 0", "y 0")),
}


def columns(names: list[str]) -> list[dict]:
    """Rows of text with the column's name; `id` is a number, `translation` a dictionary of languages."""
    special = [{"id": i, "translation": {"en": f"en {i}", "de": f"de {i}"}} for i in range(20)]
    return [{name: special[i].get(name, f"{name} {i}") for name in names} for i in range(20)]


@streamed
@pytest.mark.parametrize("names, options, expected", COLUMNS.values(), ids=COLUMNS)
def test_finding_the_columns(names, options, expected, streaming, tmp_path):
    """The other file may have more of them."""
    train = write(tmp_path / "train.jsonl", columns(names))
    validation = write(tmp_path / "validation.jsonl", columns([*names, "alignment"]))
    pairs = load(train_file=train, validation_file=validation, streaming=streaming, **options)
    assert texts(pairs["train"])[0] == texts(pairs["validation"])[0] == expected
    assert sorted(next(iter(pairs["train"]))) == ["source", "target"]


def test_translation_feature_of_datasets(tmp_path):
    feature = datasets.Features({"translation": datasets.Translation(languages=["de", "en"])})
    path = tmp_path / "train.parquet"
    Dataset.from_list(columns(["translation"]), features=feature).to_parquet(path)
    assert load_file(path, **ENGLISH_GERMAN)[3] == ("en 3", "de 3")


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
    options = {"train_file": path, "validation_file": path, "streaming": streaming}
    car = [("auto", "Auto"), ("auto", "Wagen"), ("car", "Auto"), ("car", "Wagen")]
    expected = [("dog", "Hund"), ("dog", "Köter"), ("cat", None), *car]
    assert texts(load(**options, **ENGLISH_GERMAN)["train"])[:7] == expected
    assert "in translation: de, en, fr" in error(**options, source_lang="en", target_lang="es")


def test_text_column_called_translation(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"text": f"dog {i}", "translation": f"Hund {i}"} for i in range(20)])
    assert load_file(path)[0] == ("dog 0", "Hund 0")
    with pytest.raises(UserError, match="text, translation"):
        load(train_file=path, **ENGLISH_GERMAN)


MANY = [(f"a dog {i % 900}", f"ein Hund {i}") for i in range(1000)]


@pytest.mark.parametrize("percentage", [1, 5, 50])
def test_validation_is_held_out_of_training(percentage, tmp_path, capsys):
    """From everywhere in the file; no source is on both sides."""
    pairs = load(train_file=write(tmp_path / "train.jsonl", rows(pairs=MANY)), validation_split_percentage=percentage)
    train, held_out = texts(pairs["train"]), texts(pairs["validation"])
    assert sorted(train + held_out) == sorted(MANY) and not {s for s, _ in train} & {s for s, _ in held_out}
    assert abs(len(held_out) - 10 * percentage) < 4 * (10 * percentage) ** 0.5
    places = sorted(MANY.index(pair) for pair in held_out)
    assert places[0] < 300 and places[-1] > 700
    said = f"has no validation split: {len(held_out):,} of 1,000 pairs are held out, by a hash of their sources."
    assert said in capsys.readouterr().out


def test_the_same_pairs_are_held_out_of_a_file_that_grows_or_is_shuffled(tmp_path):
    def held_out(name: str, pairs: list[tuple]) -> set[tuple]:
        return {*texts(load(train_file=write(tmp_path / name, rows(pairs=pairs)))["validation"])}

    before = held_out("before.jsonl", MANY[:500])
    assert held_out("shuffled.jsonl", MANY[499::-1]) == before
    assert held_out("grown.jsonl", MANY) & {*MANY[:500]} == before
    other = [(f" {source.upper()}  ", target) for source, target in MANY[:500]]  # of the same normal form
    assert {target for _, target in held_out("other.jsonl", other)} == {target for _, target in before}


def test_a_test_split_is_held_out_too(tmp_path, capsys):
    path = write(tmp_path / "train.jsonl", rows(pairs=MANY))
    pairs = load(train_file=path, test_split_percentage=10, validation_split_percentage=20)
    sides = {split: {source for source, _ in texts(part)} for split, part in pairs.items()}
    assert sum(map(len, sides.values())) == 900 and 60 < len(sides["test"]) < 120 < len(sides["validation"]) < 240
    validation = load(train_file=path, validation_file=path, test_split_percentage=10)
    assert texts(validation["test"]) == texts(pairs["test"]) and len(validation["validation"]) == 1000
    assert "leave --test_split_percentage out" in error(
        dataset_name="sample_dataset", test_split_percentage=10, **ENGLISH_GERMAN
    )


@pytest.mark.parametrize("pairs", [PAIRS[:2], [*PAIRS[:3], *[("", "leer")] * 5]])
def test_at_least_one_pair_of_a_small_file_is_held_out(pairs, tmp_path):
    splits = load(train_file=write(tmp_path / "train.jsonl", rows(pairs=pairs)), validation_split_percentage=1)
    assert len(splits["validation"]) == 1 and len(splits["train"]) == len(pairs) - 1
    assert splits["validation"][0]["source"]


@streamed
def test_numbers_of_samples(streaming, tmp_path):
    path = write(tmp_path / "train.jsonl", rows())
    files = {f"{split}_file": path for split in PARTS}
    limits = {"max_train_samples": 7, "max_eval_samples": 3, "max_predict_samples": 1000}
    pairs = load(**files, **limits, streaming=streaming)
    assert texts(pairs["train"]) == PAIRS[:7]
    assert [len(pairs[split]) for split in ("validation", "test")] == [3, 40]


def test_evaluating_on_the_training_pairs_is_warned_of(hub_like, tmp_path, capsys):
    data = {"dataset_name": hub_like, "dataset_config_name": "en-de"}
    load(**data, validation_split="train", test_split="train")
    said = capsys.readouterr().out
    assert "warning: the validation pairs are the training pairs (train)" in said
    assert "warning: the test pairs are the training pairs (train)" in said
    path = write(tmp_path / "train.jsonl", rows())
    other = write(tmp_path / "other.jsonl", rows())
    load(train_file=path, validation_file=other, test_file=hub_like / ".." / "train.jsonl")
    said = capsys.readouterr().out
    assert "the test pairs are the training pairs" in said and "validation pairs" not in said


def test_changed_directory_is_read_again(tmp_path):
    """`datasets` caches a directory with a card by its name alone."""
    folder = tmp_path / "set"
    for word in ("old", "new"):
        for split in ("train", "validation"):
            write(folder / f"{split}.jsonl", rows(pairs=[(f"{word} {i}", "x") for i in range(9)]))
        write_card(folder, {"default": {"train": "train.jsonl", "validation": "validation.jsonl"}})
        assert texts(load(dataset_name=folder)["train"])[0] == (f"{word} 0", "x")


@pytest.mark.parametrize("option", ["train_file", "dataset_name"])
@pytest.mark.parametrize("suffix", [".tsv", ".jsonl"])
def test_a_file_replaced_by_one_of_the_same_time_is_read_again(option, suffix, tmp_path):
    """As by tar, `cp -p` and `rsync -t`; the second has the same size, too."""
    path = tmp_path / "set" / f"train{suffix}"
    for word in ("old", "new", "newer"):
        write(path, rows(pairs=[(f"{word} {i}", "x") for i in range(40)]))
        os.utime(path, (1_700_000_000, 1_700_000_000))
        pairs = load(**{option: path if option == "train_file" else path.parent})
        assert texts(pairs["train"])[0][0].split()[0] == word
        assert pairs["train"].unique("target") == ["x"]


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
    assert load_file(path, streaming=streaming, **options)[0] == PAIRS[0]
    split = load_split(DatasetOptions(**options), "test", [str(path)])
    assert split[0]["source"] == PAIRS[0][0] and "image" not in split.column_names
    error(train_file=path, source_lang="en", target_lang="fr", streaming=streaming)


# ----------------------------------------------------------------------------------------------------------- bad input


def error(**options) -> str:
    with pytest.raises(UserError) as caught:
        load(**options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_dataset(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "none"), "me/none", str(tmp_path / "empty")):
        assert name in error(dataset_name=name)
    assert "--train_file missing.csv does not exist" in error(train_file="missing.csv")
    assert "is not a file" in error(train_file=tmp_path)


def test_missing_configuration(hub_like):
    message = error(dataset_name=hub_like, dataset_config_name="en-xx")
    assert all(name in message for name in ("en-xx", "en-de", "en-fr"))
    message = error(dataset_name=hub_like)
    assert all(name in message for name in ("--dataset_config_name", "en-de", "en-fr"))


CARDS = {
    "a tag": "a: !!python/object/apply:os.abort []",
    "a wrong date": "a: !!timestamp x",
    "a wrong truth": "a: !!bool perhaps",
    "nested too deep": f"a: {'[' * 1000}",
    "a wrong type": "configs: [3]",
    "another wrong type": "dataset_info: {splits: 3}",
    "no encoding": "configs: [{config_name: x, encoding: 5, data_files: train.jsonl}]",
}


@streamed
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_damaged_card_of_a_dataset_is_one_sentence(card, streaming, tmp_path):
    write(tmp_path / "pairs" / "train.jsonl", rows())
    (tmp_path / "pairs" / "README.md").write_text(f"---\n{card}\n---\n")
    options = {"streaming": True, "validation_split": "train"} if streaming else {}
    assert str(tmp_path / "pairs") in error(dataset_name=tmp_path / "pairs", **ENGLISH_GERMAN, **options)


@pytest.mark.parametrize("split", PARTS)
def test_missing_split(split, hub_like):
    message = error(dataset_name=hub_like, dataset_config_name="en-de", **{f"{split}_split": "tset"})
    assert message.endswith("has no split 'tset'; its splits: train, dev, test.")


@pytest.mark.parametrize("names, expected", [("EN DE", ("en", "de")), ("de-AT en_US", ("de", "en"))])
def test_case_and_region_of_a_language_do_not_matter(names, expected, tmp_path, capsys):
    source, target = names.split()
    for number, present in enumerate(["x en de", "de x en", "translation"]):
        path = write(tmp_path / f"{number}.jsonl", columns(present.split()))
        load(train_file=path, validation_file=path, source_lang=source, target_lang=target)
        prefix = "translation / " if present == "translation" else ""
        expected_columns = [f"{prefix}{language}" for language in expected]
        assert "from column {!r} to column {!r}".format(*expected_columns) in capsys.readouterr().out
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
    path = write(tmp_path / "train.jsonl", columns(names.split()))
    message = error(train_file=path, **{f"source_{kind}": source, f"target_{kind}": target})
    assert all(part in message for part in parts), message


BROKEN = {
    "train.jsonl": b'{"en": "a", "de": "b"}\n{"en": "a", \n',
    "train.json": b'[{"en": "a", "de"',
    "train.parquet": b"PAR1 no",
    "train.csv": b"en,de\na,b\nc,d,e\n",
    "latin1.csv": "en,de\na,schön\n".encode("latin-1"),
    "latin1.txt": "a\tschön\n".encode("latin-1"),
    "empty.csv": b"",
    "empty.txt": b"",
    "train.xml": b"<en>a</en>",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file(name, tmp_path):
    path = tmp_path / "set" / name
    path.parent.mkdir()
    path.write_bytes(BROKEN[name])
    assert path.suffix in error(train_file=path, validation_file=path)
    assert str(path.parent) in error(dataset_name=path.parent)


def test_each_of_several_files_is_named(tmp_path):
    files = [write(tmp_path / "a.jsonl", rows()), write(tmp_path / "b.jsonl", rows("x", "y"))]
    message = error(train_file=files, **ENGLISH_GERMAN)
    assert "--target_lang de (files" in message and f"the columns of {files[1]} are x, y" in message
    assert f"--train_file {tmp_path}/none.csv does not exist" in error(train_file=[files[0], tmp_path / "none.csv"])


@streamed
def test_other_encodings_are_named(streaming, tmp_path):
    path = tmp_path / "train.txt"
    path.write_bytes("a\tschön\n".encode("cp1252"))
    message = error(train_file=path, validation_file=path, streaming=streaming)
    assert message == f"--train_file {path} could not be read: it is not in UTF-8; convert it, for example with iconv."


def test_nothing_to_train_on():
    for name in (None, ""):
        assert "give --dataset_name or --train_file" in error(dataset_name=name)
    assert error(train_file=[""]) == "--train_file  is not a file."


@streamed
def test_header_that_does_not_fit_is_refused(streaming, tmp_path):
    """The source would be the target, and the target what follows it."""
    good, shifted = tmp_path / "good.csv", tmp_path / "shifted.csv"
    good.write_text("en,de\na,b\nc,d\n")
    shifted.write_text("en,de\nwell, a,b\nc,d\n")
    for files in [(shifted, good), (good, shifted)]:
        message = error(train_file=files[0], validation_file=files[1], streaming=streaming, **ENGLISH_GERMAN)
        assert f"{shifted} could not be read: its first row has more fields than its header" in message


@streamed
def test_lines_without_exactly_one_tab(streaming, tmp_path, byte_tokenizer, capsys):
    """They are dropped; none may lose the text after its second tab."""
    path = tmp_path / "train.txt"
    path.write_text("a\tb\tc\n" * 2 + "a\tb\tc\td\n" + "only one side\n" * 1200 + "a\tb\n" * 10)
    files = {"train_file": path, "validation_file": path, "streaming": streaming}
    pairs, drops = tokenize_pairs(read(load(**files)["train"]), byte_tokenizer, 99, 99)
    assert texts(pairs) == [("a", "b")] * 10
    assert drops == {"empty": 1200, "too long": 0}
    if not streaming:
        assert "train.txt: lines with more than one tab are dropped, 3 of 1,213." in capsys.readouterr().out
    path.write_text("only one side\n" * 20)
    message = error(**files)
    assert str(path) in message and "no line with a tab" in message


@streamed
@pytest.mark.parametrize("place", [0, 5])
def test_lines_with_a_nul_are_dropped_whole_and_no_others(place, streaming, tmp_path, byte_tokenizer):
    lines = [f"a{number}\tb{number}" for number in range(9)]
    path = tmp_path / "train.txt"
    path.write_text("\n".join([*lines[:place], "a \0word\tb", *lines[place:]]) + "\n")
    dataset = load(train_file=path, validation_file=path, streaming=streaming)["train"]
    assert texts(tokenize_pairs(read(dataset), byte_tokenizer, 99, 99)[0]) == [
        tuple(line.split("\t")) for line in lines
    ]


@pytest.mark.parametrize("pairs", [PAIRS[:1], PAIRS[:1] * 9, [("", "leer")] * 9])
def test_too_few_sources_to_hold_some_out(pairs, tmp_path):
    path = write(tmp_path / "train.jsonl", rows(pairs=pairs))
    assert "too few" in error(train_file=path)
    message = error(train_file=path, streaming=True)
    assert "--validation_split" in message and "--validation_file" in message


def test_too_few_pairs_of_a_direction_to_hold_some_out(by_language):
    files = [by_language("en-de", PAIRS), by_language("en-fr", PAIRS[:1])]
    message = error(train_file=files, train_file_tags=["<de>", "<fr>"])
    assert "en-de-40.tsv and 1 more have 41 pair(s), too few to hold some out of each direction" in message


# ----------------------------------------------------------------------------------------------------------- token ids


DIRTY = [("a", "b"), (None, "b"), ("a", None), ("", "b"), ("a", " \t"), ("\u3000", "b"), ("c d", "e"), ("x" * 60, "b")]
DIRTY += [("a", "y" * 60), (None, None)]


def test_unusable_pairs_are_dropped_and_counted(byte_tokenizer):
    large = datasets.Features(dict.fromkeys(("source", "target"), datasets.Value("large_string")))
    for dataset in (text_dataset(DIRTY), text_dataset(DIRTY).cast(large)):
        pairs, drops = tokenize_pairs(dataset, byte_tokenizer, 20, 20)
        assert texts(pairs) == [("a", "b"), ("c d", "e")]
        assert drops == {"empty": 6, "too long": 2}
        assert pairs.features == PAIR_FEATURES  # as small as they can be
    for pair in pairs:
        assert pair["input_ids"] == byte_tokenizer(pair["source"]).input_ids
        assert pair["labels"] == byte_tokenizer(text_target=pair["target"]).input_ids
        assert pair["source_length"] == len(pair["input_ids"]) and pair["target_length"] == len(pair["labels"])


@pytest.mark.parametrize("splits_special_tokens", [False, True])
def test_texts_are_encoded_as_a_call_of_the_tokenizer_does(splits_special_tokens):
    """Whatever the last call left in it."""
    tokenizer = train_tokenizer(["a dog"], 261, tags=["<bt>"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<sep>"]})
    tokenizer.split_special_tokens = splits_special_tokens
    sources, targets = ["<bt> a dog <sep> </s>", "", "dog " * 9], ["a", "</s>", " ein  Hund\n"]
    expected = tokenizer(sources, text_target=targets)
    tokenizer(sources, truncation=True, max_length=3, padding="max_length", split_special_tokens=False)
    found = encoding.encode_texts(sources, targets, tokenizer)
    assert found == {"input_ids": expected.input_ids, "labels": expected.labels}


@pytest.mark.parametrize("batches", [1, 2])
def test_monstrous_texts_are_dropped_before_they_are_tokenized(batches, byte_tokenizer, monkeypatch):
    """Also where a whole batch, of 1,000 pairs, is of them."""
    longest, call = [], encoding.encode_texts

    def note(sources, targets, tokenizer):
        longest.extend(map(len, [*sources, *targets]))
        return call(sources, targets, tokenizer)

    monkeypatch.setattr(encoding, "encode_texts", note)
    monsters = [("x" * 10_001, "b"), ("a", "y" * 10_001)]
    pairs, drops = tokenize_pairs(
        text_dataset((monsters * 500) * (batches - 1) + monsters + [("a", "b")]), byte_tokenizer, 20, 20
    )
    assert texts(pairs) == [("a", "b")] and drops == {"empty": 0, "too long": 1000 * (batches - 1) + 2}
    assert max(longest) == 1
    long = text_dataset([("x" * 20_000, "b")])
    assert len(tokenize_pairs(long, byte_tokenizer, 20_002, 20)[0]) == 1


def test_marian_tokenizer_is_told_the_target(marian, marian_pairs):
    tokenizer = tokenizer_for_training(str(marian))
    whole = text_dataset(marian_pairs * 126)  # processes are for thousands of pairs
    pairs, drops = tokenize_pairs(whole, tokenizer, 99, 99, num_proc=2)
    assert (len(pairs), drops) == (len(whole), {"empty": 0, "too long": 0})
    for pair, (source, target) in zip(pairs, marian_pairs, strict=False):
        assert pair["input_ids"] == tokenizer(source).input_ids
        assert pair["labels"] == tokenizer(text_target=target).input_ids != tokenizer(target).input_ids


def test_limits_count_the_end_of_sentence(byte_tokenizer):
    pair = ("a dog 1", "ein")
    source, target = (len(byte_tokenizer(text).input_ids) for text in pair)
    assert len(tokenize_pairs(text_dataset([pair]), byte_tokenizer, source, target)[0]) == 1
    for limits in [(source - 1, target), (source, target - 1)]:
        with pytest.raises(UserError, match="1 a source longer than"):
            tokenize_pairs(text_dataset([pair]), byte_tokenizer, *limits)


def test_no_pair_left(byte_tokenizer):
    pairs = text_dataset([(None, "b"), ("", ""), ("x" * 60, "b")])
    limits = {"train": "--max_source_length 20 or .* than --max_target_length 30 tokens", "test": "20 or .* than 30"}
    for split, limit in limits.items():
        message = f"None of the 3 pairs of the {split} split is usable: 2 have .*1 a source longer than {limit}"
        with pytest.raises(UserError, match=message):
            tokenize_pairs(pairs, byte_tokenizer, 20, 30, split)


def test_tokenized_pairs_are_cached(tmp_path):
    """Although a tokenizer changes when it is used."""
    path = write(tmp_path / "train.jsonl", rows(pairs=[*PAIRS, ("", "b")]))
    tokenizer = train_tokenizer([text for pair in PAIRS for text in pair], 280)
    files = []
    for limits in [(20, 20), (20, 20), (20, 19)]:
        train = load(train_file=path, validation_file=path)["train"]
        files.append(tokenize_pairs(train, tokenizer, *limits)[0].cache_files)
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize("kind", ["trained", "truncating"])
def test_a_tokenizer_that_was_saved_and_loaded_finds_the_tokens(kind, tmp_path):
    """As that of a checkpoint, with which a run resumes."""
    path = write(tmp_path / "train.jsonl", rows(pairs=PAIRS))
    tokenizer = train_tokenizer([text for pair in PAIRS for text in pair], 280)
    if kind == "truncating":  # as that of BERT may be, until it is used
        tokenizer.backend_tokenizer.enable_truncation(9)
    files = []
    for _ in range(2):
        train = load(train_file=path, validation_file=path)["train"]
        files.append(tokenize_pairs(train, tokenizer, 40, 40)[0].cache_files)
        tokenizer.save_pretrained(tmp_path / "saved")
        tokenizer = tokenizer_for_training(str(tmp_path / "saved"))
    assert files[0] == files[1]


def test_another_tokenizer_has_other_tokens(tmp_path):
    """Though only in its wrapper."""
    path = write(tmp_path / "train.jsonl", rows(pairs=PAIRS))
    tokenizer, files = train_tokenizer([text for pair in PAIRS for text in pair], 280), []
    for split_special_tokens in (False, True):
        tokenizer.split_special_tokens = split_special_tokens
        train = load(train_file=path, validation_file=path)["train"]
        files.append(tokenize_pairs(train, tokenizer, 40, 40)[0].cache_files)
    assert files[0] != files[1]


def test_several_processes_tokenize_as_one(byte_tokenizer):
    pairs = text_dataset([*DIRTY, *((f"a dog {i}", f"ein Hund {i}" if i % 9 else None) for i in range(2500))])
    alone, drops = tokenize_pairs(pairs, byte_tokenizer, 20, 20)
    shared, shared_drops = tokenize_pairs(pairs, byte_tokenizer, 20, 20, num_proc=2)
    assert shared_drops == drops == {"empty": 6 + 278, "too long": 2}
    assert list(shared) == list(alone)
    assert fingerprint(shared) == fingerprint(alone) != fingerprint(alone.select([1, 0, *range(2, len(alone))]))


def test_texts_of_both_sides():
    expected = [text for side in zip(*DIRTY, strict=True) for text in side if text and text.strip()]
    for dataset in (text_dataset(DIRTY), text_dataset(DIRTY).to_iterable_dataset()):
        assert list(iter_texts(dataset)) == expected


@streamed
def test_a_tokenizer_is_trained_on_a_sample_of_many_pairs(streaming, monkeypatch, capsys):
    monkeypatch.setattr(encoding, "TOKENIZER_SAMPLE", 10)
    dataset = text_dataset([(f"a{number}", f"b{number}") for number in range(100)])
    found = list(iter_texts(dataset.to_iterable_dataset() if streaming else dataset))
    numbers = [int(text[1:]) for text in found if text[0] == "a"]
    assert len(found) == 20 and len(numbers) == 10
    assert numbers == (list(range(10)) if streaming else sorted(set(numbers)))
    assert (numbers[-1] > 50) == ("is trained on 10 pairs" in capsys.readouterr().out) == (not streaming)


def test_a_sample_of_the_texts_is_from_everywhere_and_bounded():
    pairs = text_dataset([("", None), *((f"a dog {i}", f"ein Hund {i}") for i in range(2499))])
    sampled = sample_texts(pairs, 1000)
    assert sampled["source"] == [f"a dog {i}" for i in range(2, 2499, 3)]
    assert sampled["target"] == [f"ein Hund {i}" for i in range(2, 2499, 3)]
    assert sample_texts(pairs.to_iterable_dataset(), 3)["source"] == ["a dog 0", "a dog 1"]
    assert sample_texts(pairs.select([])) == sample_texts(pairs.take(1)) == {"source": [], "target": []}


# --------------------------------------------------------------------------------------------------------- fingerprint


def tokens(pairs: list[tuple]) -> Dataset:
    """A tokenized dataset of the given token ids."""
    columns = {"input_ids": [s for s, _ in pairs], "labels": [t for _, t in pairs]}
    columns |= {"source_length": [len(s) for s, _ in pairs], "target_length": [len(t) for _, t in pairs]}
    columns |= dict.fromkeys(("source", "target"), ["x"] * len(pairs))
    return Dataset.from_dict(columns, PAIR_FEATURES)


IDS = [([i % 7 + 3, 5, 2], [i % 5 + 3, 2][: 1 + i % 2]) for i in range(25_000)]
CHANGES = {
    "last token": lambda ids: [*ids[:-1], (ids[-1][0], [*ids[-1][1][:-1], 9])],
    "two pairs swapped": lambda ids: [*ids[:11_000], ids[11_001], ids[11_000], *ids[11_002:]],
    "one missing": lambda ids: [*ids[:12_000], *ids[12_001:]],
    "one more": lambda ids: [*ids, ids[0]],
    "a token moved to the next sentence": lambda ids: [([3, 5], ids[0][1]), ([2, *ids[1][0]], ids[1][1]), *ids[2:]],
    "sides swapped": lambda ids: [(t, s) for s, t in ids],
}


@pytest.fixture(scope="module")
def original():
    return fingerprint(tokens(IDS))


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_notices_changes(change, original):
    assert fingerprint(tokens(CHANGES[change](IDS))) != original


@pytest.mark.slow
def test_fingerprint_depends_on_token_ids_alone(original):
    """Not on chunks, indices or texts; and it is the same in every process."""
    same = {"in parts": datasets.concatenate_datasets([tokens(IDS[:7_001]), tokens(IDS[7_001:])])}
    same["selected"] = tokens(IDS[::-1]).select(range(len(IDS) - 1, -1, -1))
    same["part of more"] = tokens([*IDS[:5], *IDS]).skip(5)
    same["other texts"] = tokens(IDS).map(lambda pair: {"source": pair["source"] + "y"})
    same["other format"] = tokens(IDS).with_format("numpy")
    assert {name: fingerprint(dataset) for name, dataset in same.items()} == dict.fromkeys(same, original)
    numbers = np.array([2, 3, 9, 1, 2], dtype="<i4")  # lengths and ids of the sources, then of the targets
    assert fingerprint(tokens([([3, 9], [2])])) == blake2b(numbers, digest_size=16).hexdigest()
    assert fingerprint(tokens(IDS[:3]).to_iterable_dataset()) is None


@pytest.mark.parametrize("data", ["dataset_name", "train_file"])
def test_a_cache_that_cannot_be_written_is_named_with_its_remedy(data, tmp_path, monkeypatch):
    """It is below a file, which stops root too."""
    file = tmp_path / "train.tsv"
    file.write_text("en\tde\na\tb\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(file / "datasets"))
    given = {"dataset_name": str(tmp_path), "train_file": str(file)}
    with pytest.raises(
        UserError, match=f"^{file}/datasets cannot be written: .*; set HF_HOME to a directory that can be"
    ):
        load_pairs(data_options(**{data: given[data]}))


# ----------------------------------------------------------------------------------------------- several references


def test_a_column_called_references_is_no_reference_unless_named(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"en": "a dog", "de": "ein Hund", "references": "abc", "more": "der Hund"}])
    named = {"source_column": ["en"], "target_column": ["de"]}
    assert "references" not in load_split(DatasetOptions(**named), "test", [str(file)]).column_names
    several = load_split(DatasetOptions(**named, reference_columns=["more"]), "test", [str(file)])
    assert several["references"][:] == [["der Hund"]] and several["target"][:] == ["ein Hund"]


def test_reference_columns_beside_a_translation_column_are_refused(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"translation": {"en": "a dog", "de": "ein Hund"}, "more": "der Hund"}] * 3)
    with pytest.raises(UserError, match="--reference_columns has more, but the pairs of .* are in the column transl"):
        load_split(DatasetOptions(**ENGLISH_GERMAN, reference_columns=["more"]), "test", [str(file)])


def test_files_with_and_without_further_references_and_of_other_types_are_mixed(tmp_path):
    """A parquet file of polars has large strings."""
    for suffix in ("en", "ref0", "ref1"):
        (tmp_path / f"dev.{suffix}").write_text(f"{suffix} one\n{suffix} two\n")
    large = pa.table({"en": pa.array(["three"], pa.large_string()), "de": pa.array(["drei"], pa.large_string())})
    pq.write_table(large, tmp_path / "dev.parquet")
    train = write(tmp_path / "train.tsv", rows())
    files = [*(str(tmp_path / f"dev.{suffix}") for suffix in ("en", "ref0", "ref1")), str(tmp_path / "dev.parquet")]
    options = {
        "train_file": [str(train), str(train)],
        "validation_file": files,
        "train_file_langs": ["en:de", "en:de"],
    }
    found = load_pairs(data_options(**options))["validation"]
    assert found["target"][:] == ["ref0 one", "ref0 two", "drei"]
    assert [others or [] for others in found["references"]] == [["ref1 one"], ["ref1 two"], []]


# ------------------------------------------------------------------------------------------------- columns of no texts


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"source_column": ["id", "en"], "target_column": ["de"]}, "id of .* is not a column of texts, and cannot be"),
        (
            {"source_column": "en", "target_column": "de", "reference_columns": ["id"]},
            "--reference_columns has id, wh",
        ),
    ],
)
def test_columns_without_texts_are_neither_joined_nor_references(columns, message, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"id": 7, "en": "a dog", "de": "ein Hund"}] * 3)
    with pytest.raises(UserError, match=message):
        load_split(DatasetOptions(**columns), "test", [str(file)])


def test_numbered_columns_may_be_references_and_the_first_row_have_a_number(tmp_path):
    (tmp_path / "a.tsv").write_text("2\ta dog\tein Hund\tder Hund\n3\ta cat\teine Katze\tdie Katze\n")
    columns = {"source_column": ["2"], "target_column": ["3"], "reference_columns": ["4"]}
    found = load_split(DatasetOptions(**columns), "test", [str(tmp_path / "a.tsv")])
    assert found["source"][:] == ["a dog", "a cat"] and found["references"][:] == [["der Hund"], ["die Katze"]]


def test_patterns_of_parallel_files_are_read_side_by_side(tmp_path):
    for name in ("one", "two"):
        for suffix in ("en", "de"):
            (tmp_path / f"{name}.{suffix}").write_text(f"{name} {suffix}\n")
    found = load_pairs(
        data_options(
            train_file=[str(tmp_path / "*.en"), str(tmp_path / "*.de")],
            validation_file=[str(tmp_path / "one.en"), str(tmp_path / "one.de")],
        )
    )["train"]
    assert found["source"][:] == ["one en", "two en"] and found["target"][:] == ["one de", "two de"]
