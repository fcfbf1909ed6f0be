"""The rows of datasets and files of every kind."""

import os

import datasets
import pytest
from datasets import Dataset, IterableDataset
from helpers import text_dataset
from pair_files import ENGLISH_GERMAN, PAIRS, PARTS, error, load, read, rows, streamed, texts, write, write_card

from vanilla_transformer.data.encoding import tokenize_pairs


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


@streamed
def test_pattern_of_training_files(streaming, tmp_path):
    for name, part in [("a[1].jsonl", PAIRS[:10]), ("sub/b.jsonl", PAIRS[10:20]), ("c.csv", PAIRS[20:])]:
        write(tmp_path / name, rows(pairs=part))
    assert read(tmp_path / "**" / "*.jsonl", validation_file=tmp_path / "c.csv", streaming=streaming) == PAIRS[:20]
    assert "does not exist" in error(train_file=tmp_path / "*.txt")


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
    assert read(path) == pairs
    if suffix != "txt":
        (path.parent / "README.txt").write_text("null")
        write(path.with_stem("validation"), rows(pairs=pairs))
        assert texts(load(dataset_name=path.parent)["train"]) == pairs


def test_lines_of_windows_and_names_with_wildcards(tmp_path):
    for name in ("a1.txt", "a[1]*b.txt"):
        write(tmp_path / name, "no\tnein\n")
    assert read(write(tmp_path / "a[1]*.txt", "a\r\tb\r\n" * 3)) == [("a", "b")] * 3


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


def test_missing_dataset(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "none"), "me/none", str(tmp_path / "empty")):
        message = error(dataset_name=name)
        assert message.startswith(f"The dataset {name} could not be read") and "--train_file" in message
    assert "--train_file missing.csv does not exist" in error(train_file="missing.csv")
    assert "is not a file" in error(train_file=tmp_path)


def test_missing_configuration(hub_like):
    for name, said in [("en-xx", "en-xx"), (None, "--dataset_config_name")]:
        message = error(dataset_name=hub_like, dataset_config_name=name)
        assert all(part in message for part in (said, "en-de", "en-fr"))


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
    write(tmp_path / "pairs" / "README.md", f"---\n{card}\n---\n")
    options = {"streaming": True, "validation_split": "train"} if streaming else {}
    assert str(tmp_path / "pairs") in error(dataset_name=tmp_path / "pairs", **ENGLISH_GERMAN, **options)


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
    path = write(tmp_path / "set" / name, BROKEN[name])
    assert str(path) in error(path)
    assert str(path.parent) in error(dataset_name=path.parent)


@streamed
def test_other_encodings_are_named(streaming, tmp_path):
    path = write(tmp_path / "train.txt", "a\tschön\n".encode("cp1252"))
    message = error(path, streaming=streaming)
    assert message == f"--train_file {path} could not be read: it is not in UTF-8; convert it, for example with iconv."


def test_nothing_to_train_on():
    for name in (None, ""):
        assert "give --dataset_name or --train_file" in error(dataset_name=name)
    assert error(train_file=[""]) == "--train_file  is not a file."


@streamed
def test_header_that_does_not_fit_is_refused(streaming, tmp_path):
    """The source would be the target, and the target what follows it."""
    good = write(tmp_path / "good.csv", "en,de\na,b\nc,d\n")
    shifted = write(tmp_path / "shifted.csv", "en,de\nwell, a,b\nc,d\n")
    for train, validation in [(shifted, good), (good, shifted)]:
        message = error(train, validation_file=validation, streaming=streaming, **ENGLISH_GERMAN)
        assert f"{shifted} could not be read: its first row has more fields than its header" in message


@streamed
def test_lines_without_exactly_one_tab(streaming, tmp_path, byte_tokenizer, capsys):
    """They are dropped; none may lose the text after its second tab."""
    content = "a\tb\tc\n" * 2 + "a\tb\tc\td\n" + "only one side\n" * 1200 + "a\tb\n" * 10
    path = write(tmp_path / "train.txt", content)
    pairs, drops = tokenize_pairs(text_dataset(read(path, streaming=streaming)), byte_tokenizer, 99, 99)
    assert texts(pairs) == [("a", "b")] * 10 and drops == {"empty": 1200, "too long": 0}
    if not streaming:
        assert "train.txt: lines with more than one tab are dropped, 3 of 1,213." in capsys.readouterr().out
    message = error(write(path, "only one side\n" * 20), streaming=streaming)
    assert str(path) in message and "no line with a tab" in message and "such as train.en and train.de" in message


@streamed
@pytest.mark.parametrize("place", [0, 5])
def test_a_nul_cuts_no_line(place, streaming, tmp_path):
    """As in a table."""
    pairs = [*PAIRS[:place], ("a \0word", "b"), *PAIRS[place:]]
    path = write(tmp_path / "train.txt", "".join(f"{source}\t{target}\n" for source, target in pairs))
    assert read(path, streaming=streaming) == pairs


@pytest.mark.parametrize("data", ["dataset_name", "train_file"])
def test_a_cache_that_cannot_be_written_is_named_with_its_remedy(data, tmp_path, monkeypatch):
    """It is below a file, which stops root too."""
    file = write(tmp_path / "train.tsv", "en\tde\na\tb\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(file / "datasets"))
    message = error(**{data: {"dataset_name": tmp_path, "train_file": file}[data]})
    assert message.startswith(f"{file}/datasets cannot be written: ")
    assert "; set HF_HOME to a directory that can be" in message


def test_patterns_of_parallel_files_are_read_side_by_side(tmp_path):
    for name in ("one.en", "one.de", "two.en", "two.de"):
        write(tmp_path / name, f"{name}\n")
    validation = [tmp_path / "one.en", tmp_path / "one.de"]
    pairs = read(tmp_path / "*.en", tmp_path / "*.de", validation_file=validation)
    assert pairs == [("one.en", "one.de"), ("two.en", "two.de")]
