"""Pairs from every kind of source, and their token ids. Run: pytest tests/test_data.py"""

import csv
import json
from hashlib import blake2b
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, IterableDataset
from helpers import text_dataset

from vanilla_transformer.data.pairs import PAIR_FEATURES, fingerprint, load_pairs, sentences, tokenize_pairs
from vanilla_transformer.data.tokenizer import load_tokenizer, train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.arguments import parse_options

PAIRS = [(f"a dog {i}", f"ein Hund für {i}") for i in range(40)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """`datasets` keeps what it reads in a folder of the test, and asks no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def rows(source="en", target="de", pairs=PAIRS) -> list[dict]:
    return [{source: s, target: t} for s, t in pairs]


def write(path: Path, rows: list[dict]) -> str:
    """Writes rows in the format that the name ends in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
        return str(path)
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.suffix == ".json":
            json.dump(rows, file)
        elif path.suffix == ".jsonl":
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        elif path.suffix == ".txt":
            file.writelines("\t".join(row.values()) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def load(*argv) -> dict:
    return load_pairs(parse_options([str(word) for word in argv]))


def texts(dataset) -> list[tuple]:
    return [(pair["source"], pair["target"]) for pair in dataset]


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.fixture
def hub_like(tmp_path):
    """A directory as a Hub dataset repository with two configurations."""
    folder = tmp_path / "hub"
    for name, part in [("data/train", PAIRS[:30]), ("data/dev", PAIRS[30:36]), ("data/test", PAIRS[36:])]:
        write(folder / f"{name}.jsonl", rows(pairs=part))
    write(folder / "fr.csv", rows("en", "fr", PAIRS[:10]))
    configs = {"en-de": {"train": "data/train.jsonl", "dev": "data/dev.jsonl", "test": "data/test.jsonl"}}
    configs["en-fr"] = {"train": "fr.csv"}
    lines = ["---", "configs:"]
    for config, files in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, path in files.items():
            lines += [f"  - split: {split}", f"    path: {path}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", "# Dogs"]))
    return folder


def test_a_directory_with_configurations(hub_like):
    given = ["--dataset_name", hub_like, "--dataset_config_name", "en-de", "--validation_split", "dev"]
    pairs = load(*given, "--source_lang", "en", "--target_lang", "de")
    assert {split: texts(part) for split, part in pairs.items()} == {
        "train": PAIRS[:30],
        "validation": PAIRS[30:36],
        "test": PAIRS[36:],
    }


def test_a_plain_directory(tmp_path):
    for split, part in [("train", PAIRS[:30]), ("validation", PAIRS[30:36]), ("test", PAIRS[36:])]:
        write(tmp_path / "plain" / f"{split}.jsonl", rows(pairs=part))
    pairs = load("--dataset_name", tmp_path / "plain", "--source_lang", "de", "--target_lang", "en")
    assert texts(pairs["train"]) == [(t, s) for s, t in PAIRS[:30]]
    assert [len(pairs[split]) for split in ("validation", "test")] == [6, 4]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "tsv", "parquet", "txt"])
def test_files(suffix, streaming, tmp_path, request):
    parts = {"train": PAIRS[:30], "validation": PAIRS[30:36], "test": PAIRS[36:]}
    argv = [f"--{s}_file={write(tmp_path / f'{s}.{suffix}', rows(pairs=part))}" for s, part in parts.items()]
    pairs = load(*argv, *(["--streaming", "--max_steps=1"] if streaming else []))
    assert isinstance(pairs["train"], IterableDataset) == streaming
    assert all(isinstance(pairs[split], Dataset) for split in ("validation", "test"))
    assert {split: texts(part) for split, part in pairs.items()} == parts


def test_a_quotation_mark_in_a_tsv_file_is_text(tmp_path):
    pairs = [('"a', "b"), ("c", 'd"'), *PAIRS[:10]]
    (tmp_path / "train.tsv").write_text("\n".join(["en\tde", *map("\t".join, pairs)]) + "\n")
    argv = ["--train_file", tmp_path / "train.tsv", "--validation_file", tmp_path / "train.tsv"]
    assert texts(load(*argv)["train"]) == pairs


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_words_that_look_like_a_missing_value_are_text(suffix, tmp_path):
    pairs = [("None", "NA"), ("null", "nan"), *PAIRS[:10]]
    path = write(tmp_path / f"train.{suffix}", rows(pairs=pairs))
    assert texts(load("--train_file", path, "--validation_file", path)["train"]) == pairs


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_so_they_are_in_the_files_of_a_directory(suffix, tmp_path):
    pairs = [("None", "NA"), ("null", "nan"), *PAIRS[:10]]
    for split in ("train", "validation"):
        write(tmp_path / f"{split}.{suffix}", rows(pairs=pairs))
    (tmp_path / "README.txt").write_text("null")
    assert texts(load("--dataset_name", tmp_path)["train"]) == pairs


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_a_file_may_have_columns_that_others_have_not(streaming, tmp_path):
    train = write(tmp_path / "train.jsonl", rows(pairs=PAIRS[:30]))
    more = [row | {"alignment": "0-0"} for row in rows(pairs=PAIRS[30:])]
    argv = ["--train_file", train, "--validation_file", write(tmp_path / "validation.jsonl", more)]
    pairs = load(*argv, *(["--streaming", "--max_steps=1"] if streaming else []))
    assert texts(pairs["train"]) == PAIRS[:30] and texts(pairs["validation"]) == PAIRS[30:]


def test_only_a_line_feed_ends_a_line_of_a_txt_file(tmp_path):
    pairs = [("a\u2028b", "c\x0cd\x85e\x1cf"), *PAIRS[:10]]
    path = write(tmp_path / "train.txt", rows(pairs=pairs))
    assert texts(load("--train_file", path, "--validation_file", path)["train"]) == pairs


# columns of the file -> options -> (source, target)
COLUMNS = {
    "translation column": (["translation"], ["--source_lang=de", "--target_lang=en"], ("de 0", "en 0")),
    "translation column, both languages": (["translation"], [], ("en 0", "de 0")),
    "language columns": (["id", "de", "en", "fr"], ["--source_lang=fr", "--target_lang=de"], ("fr 0", "de 0")),
    "named columns": (["id", "x", "y", "z"], ["--source_column=z", "--target_column=x"], ("z 0", "x 0")),
    "named columns win": (
        ["en", "de", "x", "y"],
        ["--source_lang=en", "--target_lang=de", "--source_column=y", "--target_column=x"],
        ("y 0", "x 0"),
    ),
    "two columns of text": (["id", "x", "y"], [], ("x 0", "y 0")),
    "source and target": (["note", "target", "source"], [], ("source 0", "target 0")),
    "other languages than the nested": (
        ["translation", "pt", "es"],
        ["--source_lang=pt", "--target_lang=es"],
        ("pt 0", "es 0"),
    ),
}


def columns(names: list[str]) -> list[dict]:
    """Rows of text with the column's name; `id` is a number, `translation` a dictionary of languages."""
    made = []
    for i in range(20):
        special = {"id": i, "translation": {"en": f"en {i}", "de": f"de {i}"}}
        made.append({name: special.get(name, f"{name} {i}") for name in names})
    return made


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", COLUMNS)
def test_finding_the_columns(case, streaming, tmp_path, request):
    names, options, expected = COLUMNS[case]
    path = write(tmp_path / "train.jsonl", columns(names))
    options = [*options, "--streaming", "--max_steps=1"] if streaming else options
    pairs = load("--train_file", path, "--validation_file", path, *options)
    assert texts(pairs["train"])[0] == texts(pairs["validation"])[0] == expected
    assert sorted(next(iter(pairs["train"]))) == ["source", "target"]


def test_a_translation_feature_of_the_library(tmp_path):
    feature = datasets.Features({"translation": datasets.Translation(languages=["de", "en"])})
    table = Dataset.from_list(columns(["translation"]), features=feature)
    (tmp_path / "set").mkdir()
    for split in ("train", "validation"):
        table.to_parquet(tmp_path / "set" / f"{split}.parquet")
    pairs = load("--dataset_name", tmp_path / "set", "--source_lang=en", "--target_lang=de")
    assert texts(pairs["train"])[3] == ("en 3", "de 3")


@pytest.mark.parametrize("languages", [[], ["--source_lang=en", "--target_lang=de"]], ids=["default", "languages"])
def test_a_column_of_text_may_be_called_translation(languages, tmp_path):
    path = write(tmp_path / "train.jsonl", columns(["text", "translation"]))
    table = [{"text": row["text"], "translation": f"Hund {i}"} for i, row in enumerate(columns(["text"]))]
    write(tmp_path / "train.jsonl", table)
    if languages:
        with pytest.raises(UserError, match="text, translation"):
            load("--train_file", path, *languages)
    else:
        assert texts(load("--train_file", path)["train"])[0] == ("text 0", "Hund 0")


@pytest.mark.parametrize("percentage, held_out", [(5, 2), (50, 20), (1, 1)])
def test_validation_is_held_out_of_training(percentage, held_out, tmp_path, capsys):
    path = write(tmp_path / "train.jsonl", rows())
    pairs = load("--train_file", path, "--validation_split_percentage", percentage)
    assert texts(pairs["train"]) == PAIRS[:-held_out]
    assert texts(pairs["validation"]) == PAIRS[-held_out:]
    assert "test" not in pairs
    assert f"the last {held_out:,} pairs of the training split are held out" in capsys.readouterr().out


def test_numbers_of_samples(tmp_path):
    path = write(tmp_path / "train.jsonl", rows())
    files = [f"--{split}_file={path}" for split in ("train", "validation", "test")]
    pairs = load(*files, "--max_train_samples=7", "--max_eval_samples=3", "--max_predict_samples=1000")
    assert [len(pairs[split]) for split in ("train", "validation", "test")] == [7, 3, 40]
    assert texts(pairs["train"]) == PAIRS[:7]
    stream = load(*files, "--streaming", "--max_steps=1", "--max_train_samples=7", "--max_eval_samples=3")
    assert texts(stream["train"]) == PAIRS[:7]
    assert len(stream["validation"]) == 3


# ------------------------------------------------------------------------------------------------------------ refusals


def refusal(*argv) -> str:
    with pytest.raises(UserError) as caught:
        load(*argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_dataset_that_does_not_exist(tmp_path):
    assert str(tmp_path / "none") in refusal("--dataset_name", tmp_path / "none")
    assert "me/none" in refusal("--dataset_name", "me/none")
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refusal("--dataset_name", tmp_path / "empty")
    assert "--train_file missing.csv does not exist" in refusal("--train_file", "missing.csv")


def test_a_configuration_that_does_not_exist(hub_like):
    message = refusal("--dataset_name", hub_like, "--dataset_config_name", "en-xx")
    assert all(name in message for name in ("en-xx", "en-de", "en-fr"))


def test_a_configuration_that_is_not_named(hub_like):
    message = refusal("--dataset_name", hub_like)
    assert all(name in message for name in ("--dataset_config_name", "en-de", "en-fr"))


def test_a_directory_that_has_changed_is_read_anew(tmp_path):
    """`datasets` caches a directory with a card by its name alone."""
    folder = tmp_path / "set"
    card = ["---", "configs:", "- config_name: default", "  data_files:"]
    card += [f"  - {{split: {split}, path: {split}.jsonl}}" for split in ("train", "validation")]
    for word in ("old", "new"):
        for split in ("train", "validation"):
            write(folder / f"{split}.jsonl", rows(pairs=[(f"{word} {i}", "x") for i in range(9)]))
        (folder / "README.md").write_text("\n".join([*card, "---", ""]))
        assert texts(load("--dataset_name", folder)["train"])[0] == (f"{word} 0", "x")


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_split_that_does_not_exist(split, hub_like):
    message = refusal("--dataset_name", hub_like, "--dataset_config_name=en-de", f"--{split}_split=tset")
    assert "no split 'tset'" in message
    assert message.endswith("there are: train, dev, test.")


REFUSED_COLUMNS = {
    "source column": (["--source_column=c", "--target_column=b"], ["--source_column c", "a, b, n"]),
    "target column": (["--source_column=a", "--target_column=c"], ["--target_column c", "a, b, n"]),
    "one column alone": (["--source_column=a"], ["--target_column is missing", "a, b, n"]),
    "a column of numbers": (["--source_column=a", "--target_column=n"], ["--target_column n holds no text", "a, b"]),
    "languages": (["--source_lang=a", "--target_lang=fr"], ["--source_lang a", "--target_lang fr", "a, b, n"]),
    "one language alone": (["--source_lang=a"], ["--target_lang", "a, b, n"]),
}


@pytest.mark.parametrize("case", REFUSED_COLUMNS)
def test_a_column_that_does_not_exist(case, tmp_path):
    options, parts = REFUSED_COLUMNS[case]
    path = write(tmp_path / "train.jsonl", [{"a": f"a {i}", "b": f"b {i}", "n": i} for i in range(20)])
    message = refusal("--train_file", path, *options)
    assert all(part in message for part in parts), message


def test_a_language_column_without_text(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"en": f"a {i}", "de": i} for i in range(20)])
    message = refusal("--train_file", path, "--source_lang=en", "--target_lang=de")
    assert "de holds no text" in message


def test_a_language_that_the_translation_column_lacks(tmp_path):
    path = write(tmp_path / "train.jsonl", columns(["translation"]))
    message = refusal("--train_file", path, "--source_lang=en", "--target_lang=fr")
    assert all(part in message for part in ("--source_lang en", "--target_lang fr", "en, de"))


def test_which_columns_is_not_clear(tmp_path):
    path = write(tmp_path / "train.jsonl", columns(["x", "y", "z"]))
    assert "x, y, z" in refusal("--train_file", path)


BROKEN = {
    "train.jsonl": b'{"en": "a", "de": "b"}\n{"en": "a", \n',
    "train.json": b'[{"en": "a", "de"',
    "train.parquet": b"PAR1 no",
    "train.csv": b"en,de\na,b\nc,d,e\n",
    "latin1.csv": "en,de\na,schön\n".encode("latin-1"),
    "latin1.txt": "a\tschön\n".encode("latin-1"),
    "empty.csv": b"",
    "empty.txt": b"",
    "empty.jsonl": b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file(name, tmp_path, request):
    (tmp_path / name).write_bytes(BROKEN[name])
    assert str(tmp_path / name) in refusal("--train_file", tmp_path / name, "--validation_file", tmp_path / name)


def test_a_broken_file_in_a_directory(tmp_path):
    write(tmp_path / "set" / "train.jsonl", rows())
    (tmp_path / "set" / "validation.jsonl").write_text('{"en": "a", \n')
    message = refusal("--dataset_name", tmp_path / "set")
    assert "JSON" in message or "validation.jsonl" in message


def test_files_of_several_kinds(tmp_path):
    train, test = write(tmp_path / "train.jsonl", rows()), write(tmp_path / "test.csv", rows())
    assert ".csv, .jsonl" in refusal("--train_file", train, "--test_file", test)
    (tmp_path / "train.xml").write_text("<en>a</en>")
    assert ".xml" in refusal("--train_file", tmp_path / "train.xml")


@pytest.mark.parametrize(
    "before",
    [
        0,
        1200,
    ],
)
def test_lines_without_a_tab(before, tmp_path, tokenizer):
    """A file of lines without any tab is refused by naming it; `before` such lines do not hide later pairs."""
    path = tmp_path / "train.txt"
    path.write_text("only one side\n" * max(before, 20) + "a\tb\n" * (10 if before else 0))
    argv = ["--train_file", path, "--validation_file", path]
    if before:
        pairs, drops = tokenize_pairs(load(*argv)["train"], tokenizer, 99, 99)
        assert (len(pairs), drops["empty"]) == (10, before)
    else:
        message = refusal(*argv)
        assert str(path) in message and "--source_lang None" not in message


def test_too_few_pairs_to_hold_some_out(tmp_path):
    assert "too few" in refusal("--train_file", write(tmp_path / "train.jsonl", rows(pairs=PAIRS[:1])))


def test_a_stream_without_validation_split(tmp_path):
    path = write(tmp_path / "train.jsonl", rows())
    message = refusal("--train_file", path, "--streaming", "--max_steps=1")
    assert "--validation_split" in message and "--validation_file" in message


# ----------------------------------------------------------------------------------------------------------- token ids


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for pair in PAIRS for text in pair], 280)


DIRTY = [("a", "b"), (None, "b"), ("a", None), ("", "b"), ("a", " \t"), ("\u3000", "b"), ("c d", "e"), ("x" * 60, "b")]
DIRTY += [("a", "y" * 60), (None, None)]


def test_unusable_pairs_are_dropped_and_counted(tokenizer):
    pairs, drops = tokenize_pairs(text_dataset(DIRTY), tokenizer, 20, 20)
    assert texts(pairs) == [("a", "b"), ("c d", "e")]
    assert drops == {"empty": 6, "too long": 2}
    for pair in pairs:
        assert pair["input_ids"] == tokenizer(pair["source"]).input_ids
        assert pair["labels"] == tokenizer(text_target=pair["target"]).input_ids
        assert pair["source_length"] == len(pair["input_ids"]) and pair["target_length"] == len(pair["labels"])


def test_unusable_pairs_of_a_stream_are_left_out(tokenizer):
    whole, _ = tokenize_pairs(text_dataset(DIRTY), tokenizer, 20, 20)
    stream, drops = tokenize_pairs(text_dataset(DIRTY).to_iterable_dataset(), tokenizer, 20, 20)
    assert drops is None
    assert list(stream) == list(whole)


@pytest.mark.parametrize(("copies", "num_proc"), [(1, None), (126, 2)])  # more processes are for thousands of pairs
def test_a_marian_tokenizer_is_told_which_side_is_the_target(marian, marian_pairs, copies, num_proc):
    tokenizer = load_tokenizer(str(marian))
    whole = text_dataset(marian_pairs * copies)
    pairs, drops = tokenize_pairs(whole, tokenizer, 99, 99, num_proc=num_proc)
    assert (len(pairs), drops) == (len(whole), {"empty": 0, "too long": 0})
    for pair, (source, target) in zip(pairs, marian_pairs, strict=False):
        assert pair["input_ids"] == tokenizer(source).input_ids
        assert pair["labels"] == tokenizer(text_target=target).input_ids != tokenizer(target).input_ids
    stream, _ = tokenize_pairs(whole.to_iterable_dataset(), tokenizer, 99, 99)
    assert next(iter(stream)) == pairs[0]


def test_limits_count_the_end_of_sentence(tokenizer):
    pair = ("a dog 1", "ein")
    source, target = (len(tokenizer(text).input_ids) for text in pair)
    assert len(tokenize_pairs(text_dataset([pair]), tokenizer, source, target)[0]) == 1
    for limits in [(source - 1, target), (source, target - 1)]:
        with pytest.raises(UserError, match="1 are longer than"):
            tokenize_pairs(text_dataset([pair]), tokenizer, *limits)


def test_no_pair_left(tokenizer):
    pairs = [(None, "b"), ("", ""), ("x" * 60, "b")]
    message = "No usable pair is left of the 3 of the {} split: 2 have .*1 are longer than {}"
    limits = {"train": "--max_source_length 20 or --max_target_length 30 tokens", "test": "20 or 30 tokens"}
    for split, limit in limits.items():
        with pytest.raises(UserError, match=message.format(split, limit)):
            tokenize_pairs(text_dataset(pairs), tokenizer, 20, 30, split)


@pytest.mark.parametrize("text", ["string", "large_string"])
def test_token_ids_take_little_memory(text, tokenizer):
    features = datasets.Features(dict.fromkeys(("source", "target"), datasets.Value(text)))
    numbers, texts = datasets.Value("int32"), datasets.Value("string")
    sides = dict.fromkeys(("source", "target"), texts)
    sides |= dict.fromkeys(("input_ids", "labels"), datasets.List(numbers))
    sides |= dict.fromkeys(("source_length", "target_length"), numbers)
    for pairs in (DIRTY, DIRTY[:1]):
        tokenized, _ = tokenize_pairs(text_dataset(pairs).cast(features), tokenizer, 20, 20)
        assert dict(tokenized.features) == sides


def test_tokenising_again_reads_what_is_there(tmp_path):
    """A tokenizer changes where it is used; what was tokenised by it is found nevertheless."""
    path = write(tmp_path / "train.jsonl", rows(pairs=[*PAIRS, ("", "b")]))
    tokenizer = train_tokenizer([text for pair in PAIRS for text in pair], 280)
    files = []
    for limits in [(20, 20), (20, 20), (20, 19)]:
        train = load("--train_file", path, "--validation_file", path)["train"]
        tokenized, _ = tokenize_pairs(train, tokenizer, *limits)
        files.append(tokenized.cache_files)
    assert files[0] == files[1] != files[2]


def test_several_processes_tokenise_as_one(tokenizer):
    pairs = text_dataset([*DIRTY, *((f"a dog {i}", f"ein Hund {i}" if i % 9 else None) for i in range(2500))])
    alone, drops = tokenize_pairs(pairs, tokenizer, 20, 20)
    shared, shared_drops = tokenize_pairs(pairs, tokenizer, 20, 20, num_proc=2)
    assert shared_drops == drops == {"empty": 6 + 278, "too long": 2}
    assert list(shared) == list(alone)
    assert fingerprint(shared) == fingerprint(alone)


def test_sentences_of_both_sides():
    found, length = sentences(text_dataset(DIRTY))
    assert length == 2 * len(DIRTY)
    expected = [text for side in zip(*DIRTY, strict=True) for text in side if text and text.strip()]
    assert list(found) == expected
    found, length = sentences(text_dataset(DIRTY).to_iterable_dataset())
    assert (list(found), length) == (expected, None)


# --------------------------------------------------------------------------------------------------------- fingerprint


def tokens(pairs: list[tuple]) -> Dataset:
    """A tokenised dataset of token ids that are given."""
    columns = {"input_ids": [s for s, _ in pairs], "labels": [t for _, t in pairs]}
    columns |= {"source_length": [len(s) for s, _ in pairs], "target_length": [len(t) for _, t in pairs]}
    columns |= dict.fromkeys(("source", "target"), ["x"] * len(pairs))
    return Dataset.from_dict(columns, PAIR_FEATURES)


IDS = [([i % 7 + 3, 5, 2], [i % 5 + 3, 2][: 1 + i % 2]) for i in range(25_000)]
CHANGES = {
    "the last token": lambda ids: [*ids[:-1], (ids[-1][0], [*ids[-1][1][:-1], 9])],
    "the first token": lambda ids: [([99, 5, 2], ids[0][1]), *ids[1:]],
    "two pairs change places": lambda ids: [*ids[:11_000], ids[11_001], ids[11_000], *ids[11_002:]],
    "backwards": lambda ids: ids[::-1],
    "one is missing": lambda ids: [*ids[:12_000], *ids[12_001:]],
    "one more": lambda ids: [*ids, ids[0]],
    "a token goes to the next sentence": lambda ids: [
        (ids[0][0][:-1], ids[0][1]),
        ([2, *ids[1][0]], ids[1][1]),
        *ids[2:],
    ],
    "the sides change places": lambda ids: [(t, s) for s, t in ids],
    "a target of another pair": lambda ids: [(ids[0][0], ids[1][1]), (ids[1][0], ids[0][1]), *ids[2:]],
}


@pytest.fixture(scope="module")
def before():
    return fingerprint(tokens(IDS))


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_notices_what_has_changed(change, before):
    changed = CHANGES[change](IDS)
    assert changed != IDS
    assert fingerprint(tokens(changed)) != before


def test_a_fingerprint_notices_nothing_else(before, tmp_path):
    """Neither files, nor how they were cut, nor indices, nor texts; it is the same in every process and place."""
    parts = [tokens(IDS[:7_001]), tokens(IDS[7_001:7_002]), tokens(IDS[7_002:])]
    same = {"in parts": datasets.concatenate_datasets(parts)}
    same["selected"] = tokens(IDS[::-1]).select(range(len(IDS) - 1, -1, -1))
    same["of more"] = tokens([*IDS[:5], *IDS]).skip(5)
    tokens(IDS).save_to_disk(tmp_path / "saved", num_shards=3)
    same["from disk"] = Dataset.load_from_disk(str(tmp_path / "saved"))
    texts = [f"text {i}" for i in range(len(IDS))]
    same["other texts"] = tokens(IDS).remove_columns("source").add_column("source", texts)
    same["of another format"] = tokens(IDS).with_format("numpy")
    assert {name: fingerprint(dataset) for name, dataset in same.items()} == dict.fromkeys(same, before)
    numbers = np.array([2, 3, 9, 1, 2], dtype="<i4")  # lengths of the sources and their ids, then of the targets
    assert fingerprint(tokens([([3, 9], [2])])) == blake2b(numbers, digest_size=16).hexdigest()


def test_a_stream_has_no_fingerprint():
    assert fingerprint(tokens(IDS[:3]).to_iterable_dataset()) is None
