"""Pairs from every kind of source, and batches in a repeatable order. Run: pytest tests/test_data.py"""

import csv
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import data
from vanilla_transformer.data import (
    PairCollator,
    TokenBatchSampler,
    evaluation_batches,
    fill_batches,
    load_pairs,
    plan_batches,
    sentences,
    tokenize_pairs,
    training_batches,
)
from vanilla_transformer.errors import UserError
from vanilla_transformer.recipe import parse_options
from vanilla_transformer.tokenization import train_tokenizer

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


def dataset(pairs: list[tuple]) -> Dataset:
    features = datasets.Features({name: datasets.Value("string") for name in ("source", "target")})
    return Dataset.from_list(rows("source", "target", pairs), features=features)


DIRTY = [("a", "b"), (None, "b"), ("a", None), ("", "b"), ("a", " \t"), ("\u3000", "b"), ("c d", "e"), ("x" * 60, "b")]
DIRTY += [("a", "y" * 60), (None, None)]


def test_unusable_pairs_are_dropped_and_counted(tokenizer):
    pairs, drops = tokenize_pairs(dataset(DIRTY), tokenizer, 20, 20)
    assert texts(pairs) == [("a", "b"), ("c d", "e")]
    assert drops == {"empty": 6, "too long": 2}
    for pair in pairs:
        assert pair["input_ids"] == tokenizer(pair["source"]).input_ids
        assert pair["labels"] == tokenizer(text_target=pair["target"]).input_ids
        assert pair["source_length"] == len(pair["input_ids"]) and pair["target_length"] == len(pair["labels"])


def test_unusable_pairs_of_a_stream_are_left_out(tokenizer):
    whole, _ = tokenize_pairs(dataset(DIRTY), tokenizer, 20, 20)
    stream, drops = tokenize_pairs(dataset(DIRTY).to_iterable_dataset(), tokenizer, 20, 20)
    assert drops is None
    assert list(stream) == list(whole)


def test_limits_count_the_end_of_sentence(tokenizer):
    pair = ("a dog 1", "ein")
    source, target = (len(tokenizer(text).input_ids) for text in pair)
    assert len(tokenize_pairs(dataset([pair]), tokenizer, source, target)[0]) == 1
    for limits in [(source - 1, target), (source, target - 1)]:
        with pytest.raises(UserError, match="1 are longer than"):
            tokenize_pairs(dataset([pair]), tokenizer, *limits)


def test_no_pair_left(tokenizer):
    pairs = [(None, "b"), ("", ""), ("x" * 60, "b")]
    message = (
        "No usable pair is left of the 3 of the test split: 2 have .*1 are longer than --max_source_length 20 "
        "or --max_target_length 30 tokens"
    )
    with pytest.raises(UserError, match=message):
        tokenize_pairs(dataset(pairs), tokenizer, 20, 30, "test")


def test_no_pair_left_in_a_stream(tokenizer):
    stream, _ = tokenize_pairs(dataset([(None, "b")]).to_iterable_dataset(), tokenizer, 20, 20)
    batches = training_batches(stream, tokenizer, SimpleNamespace(seed=1, per_device_train_max_tokens=99))
    with pytest.raises(UserError, match="No usable pair is in the stream"):
        next(iter(batches))


def test_sentences_of_both_sides():
    found, length = sentences(dataset(DIRTY))
    assert length == 2 * len(DIRTY)
    expected = [text for side in zip(*DIRTY, strict=True) for text in side if text and text.strip()]
    assert list(found) == expected
    found, length = sentences(dataset(DIRTY).to_iterable_dataset())
    assert (list(found), length) == (expected, None)


# ------------------------------------------------------------------------------------------------------ order of pairs


@pytest.fixture
def lengths():
    """Source and target lengths of 2,000 pairs as sentences have them."""
    random = np.random.default_rng(0)
    source = np.clip(random.gamma(3, 6, 2000), 2, 100).astype(np.int32)
    target = np.clip(source * random.uniform(0.7, 1.4, 2000), 2, 120).astype(np.int32)
    return source, target


def plain(batches) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in batches]


@pytest.fixture(params=[2**16, 300], ids=["one pool", "several pools"])
def pools(request, monkeypatch):
    monkeypatch.setattr(data, "POOL_SIZE", request.param)


@pytest.mark.parametrize("max_tokens", [50, 400, 10**6])
def test_an_epoch_has_every_pair_once_within_the_budget(lengths, max_tokens, pools):
    batches = plan_batches(*lengths, max_tokens, 1, 0)
    assert sorted(itertools.chain(*plain(batches))) == list(range(2000))
    longest = np.maximum(*lengths)
    for batch in batches:
        assert len(batch) * longest[batch].max() <= max_tokens or len(batch) == 1
    # A pair is alone only where it must be: longer than half of the budget, or the rest of a pool.
    alone = [batch for batch in batches if len(batch) == 1 and longest[batch].max() <= max_tokens / 3]
    assert len(alone) <= np.ceil(2000 / data.POOL_SIZE)


def test_the_order_is_a_pure_function_of_seed_and_epoch(lengths, pools):
    plans = {}
    for seed, epoch in itertools.product([1, 2], [0, 1, 2]):
        np.random.seed(seed * epoch)  # what the global generator is at does not matter
        torch.manual_seed(epoch)
        plans[seed, epoch] = plain(plan_batches(*lengths, 400, seed, epoch))
        assert plain(plan_batches(*lengths, 400, seed, epoch)) == plans[seed, epoch]
    orders = [str(plan) for plan in plans.values()]
    assert len(set(orders)) == len(orders)
    # Not only the batches' order changes: other pairs come together.
    sets = [{frozenset(batch) for batch in plan} for plan in plans.values()]
    assert all(len(a & b) < len(a) / 2 for a, b in itertools.combinations(sets, 2))


def test_batches_do_not_come_sorted_by_length(lengths, pools):
    means = [np.maximum(*lengths)[batch].mean() for batch in plan_batches(*lengths, 400, 1, 0)]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def padding(batches, lengths) -> float:
    source, target = lengths
    places = sum(len(batch) * (source[batch].max() + target[batch].max()) for batch in batches)
    return 1 - (source.sum() + target.sum()) / places


def test_little_padding(lengths):
    planned = plan_batches(*lengths, 400, 1, 0)
    random = np.array_split(np.random.default_rng(0).permutation(2000), len(planned))
    assert padding(planned, lengths) < 0.15
    assert padding(random, lengths) > 2.5 * padding(planned, lengths)


def take(sampler, count: int) -> list:
    return list(itertools.islice(sampler, count))


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_processes_share_out_the_same_batches(lengths, num_processes):
    alone = TokenBatchSampler(*lengths, 400, seed=1)
    count = 2 * alone.batches_per_epoch() + 30  # into the third epoch
    expected = take(alone, count)
    shares = [TokenBatchSampler(*lengths, 400, 1, 0, index, num_processes) for index in range(num_processes)]
    dealt = [take(share, count) for share in shares]
    assert [batch for turn in zip(*dealt, strict=True) for batch in turn][:count] == expected
    for epoch in range(2):
        plan = plain(plan_batches(*lengths, 400, 1, epoch))
        start = epoch * len(expected) and len(plain(plan_batches(*lengths, 400, 1, 0)))
        assert expected[start : start + len(plan)] == plan


@pytest.mark.parametrize("num_processes", [1, 2])
def test_starting_at_an_offset_is_the_same_stream(lengths, num_processes):
    size = TokenBatchSampler(*lengths, 400, seed=1).batches_per_epoch()
    steps = [1, size // num_processes, size // num_processes + 1, 2 * size // num_processes + 3]
    for index in range(num_processes):
        whole = take(TokenBatchSampler(*lengths, 400, 1, 0, index, num_processes), max(steps) + 20)
        for step in steps:
            resumed = TokenBatchSampler(*lengths, 400, 1, step * num_processes, index, num_processes)
            assert take(resumed, 20) == whole[step : step + 20]


def test_fill_batches_keeps_a_giant_apart():
    lengths = np.array([3, 50, 3, 3, 3, 10])
    batches = plain(fill_batches(lengths, lengths, 12))
    assert batches == [[0, 2, 3, 4], [5], [1]]


# ------------------------------------------------------------------------------------------------------------- batches


def word_tokenizer(pad: str = "<p>", padding_side: str = "right") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"<p>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": pad, "eos_token": "</s>", "padding_side": padding_side}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


PAIR = [{"input_ids": [2, 3, 1], "labels": [3, 1]}, {"input_ids": [2, 1], "labels": [2, 2, 2, 1]}]


@pytest.mark.parametrize("pad, number", [("<p>", 0), ("</s>", 1)], ids=["pad", "pad is eos"])
def test_collator(pad, number):
    batch = PairCollator(word_tokenizer(pad))(PAIR)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[2, 3, 1], [2, 1, number]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[3, 1, -100, -100], [2, 2, 2, 1]],
    }
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert PAIR[0] == {"input_ids": [2, 3, 1], "labels": [3, 1]}  # the dataset is left alone


def test_labels_begin_at_the_first_position_whatever_side_the_tokenizer_pads():
    """The decoder reads them shifted by one, from position 0 on, and has no mask of its own."""
    batch = PairCollator(word_tokenizer(padding_side="left"))(PAIR)
    assert batch["labels"].tolist() == [[3, 1, -100, -100], [2, 2, 2, 1]]


def options(**kwargs) -> SimpleNamespace:
    return SimpleNamespace(**{"seed": 1, "per_device_train_max_tokens": 60, "dataloader_num_workers": 0, **kwargs})


def as_pairs(batch: dict) -> list[tuple]:
    """The token ids of a batch without padding."""
    sources = [
        ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return [(tuple(s), tuple(t[t != -100].tolist())) for s, t in zip(sources, batch["labels"], strict=True)]


@pytest.fixture(scope="module")
def tokenized(tokenizer):
    pairs = [(f"a dog {'x ' * (i % 7)}{i}", f"ein Hund {'y ' * (i % 5)}{i}") for i in range(50)]
    return tokenize_pairs(dataset(pairs), tokenizer, 99, 99)[0]


@pytest.fixture(params=["whole", "streamed", "streamed in small pools"])
def source(request, tokenized, monkeypatch):
    if request.param == "streamed in small pools":
        monkeypatch.setattr(data, "STREAM_POOL_SIZE", 16)
    return tokenized if request.param == "whole" else tokenized.to_iterable_dataset()


def test_training_batches(source, tokenized, tokenizer):
    """Every pair once an epoch, within the budget, from an offset as from the beginning, dealt to processes."""
    everything = {(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in tokenized}
    stream = [as_pairs(batch) for batch in itertools.islice(training_batches(source, tokenizer, options()), 60)]
    epochs, seen = [[]], set()
    for batch in stream:
        assert not seen & set(batch)
        seen |= set(batch)
        epochs[-1].append(batch)
        assert len(batch) * max(len(side) for pair in batch for side in pair) <= 60
        if seen == everything:
            seen = set()
            epochs.append([])
    assert len(epochs) > 3  # so that an epoch ended with every pair seen, and the next began
    assert epochs[0] != epochs[1]
    again = itertools.islice(training_batches(source, tokenizer, options(seed=2)), 60)
    assert [as_pairs(batch) for batch in again] != stream

    for start in [1, len(epochs[0]) - 1, len(epochs[0]), len(epochs[0]) + 3]:
        resumed = itertools.islice(training_batches(source, tokenizer, options(), start), 9)
        assert [as_pairs(batch) for batch in resumed] == stream[start : start + 9]
    for num_processes in [2, 3]:
        shares = [training_batches(source, tokenizer, options(), 6, i, num_processes) for i in range(num_processes)]
        dealt = zip(*(itertools.islice(share, 10) for share in shares), strict=True)
        assert [as_pairs(b) for turn in dealt for b in turn] == stream[6 : 6 + 10 * num_processes]


def test_other_pairs_share_a_pool_of_the_stream_in_each_epoch(tokenized, tokenizer, monkeypatch):
    monkeypatch.setattr(data, "STREAM_POOL_SIZE", 16)
    batches = training_batches(tokenized.to_iterable_dataset(), tokenizer, options())
    pairs = [pair for batch in itertools.islice(batches, 60) for pair in as_pairs(batch)]
    first_pools = [set(pairs[start : start + 16]) for start in (0, 50, 100)]
    assert all(len(pool) == 16 for pool in first_pools)
    assert first_pools[0] != first_pools[1] != first_pools[2] != first_pools[0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_worker_processes_keep_the_order(tokenized, tokenizer):
    few = [as_pairs(b) for b in itertools.islice(training_batches(tokenized, tokenizer, options()), 5)]
    loader = training_batches(tokenized, tokenizer, options(dataloader_num_workers=2))
    assert [as_pairs(batch) for batch in itertools.islice(loader, 5)] == few


def test_evaluation_batches_hold_every_pair_once(tokenized, tokenizer):
    everything = sorted((tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in tokenized)
    for num_processes in [1, 2, 3, 60]:
        shares = [evaluation_batches(tokenized, tokenizer, 60, i, num_processes) for i in range(num_processes)]
        assert sorted(pair for share in shares for batch in share for pair in as_pairs(batch)) == everything
