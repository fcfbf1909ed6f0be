"""Training, validation and test pairs: opened, held out, mixed."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pair_files import ENGLISH_GERMAN, PAIRS, PARTS, error, load, read, rows, streamed, texts, write

from vanilla_transformer.data import splits
from vanilla_transformer.data.options import DatasetOptions
from vanilla_transformer.data.splits import load_split


@pytest.fixture
def by_language(tmp_path):
    """by_language("en-de", pairs) -> a file with the columns `en` and `de`."""

    def save(direction: str, pairs: list[tuple]) -> Path:
        path = tmp_path / f"{direction}-{len(pairs)}.tsv"
        return write(path, rows(*direction.split("-"), pairs))

    return save


@pytest.fixture
def german_and_french(by_language) -> list[Path]:
    return [by_language("en-de", PAIRS[:20]), by_language("en-fr", PAIRS[20:30])]


def tagged(tag: str, pairs: list[tuple]) -> list[tuple]:
    return [(f"{tag} {source}", target) for source, target in pairs]


@pytest.fixture
def configured(hub_like) -> dict[str, str]:
    """The options for one of the configurations."""
    return {"dataset_name": str(hub_like), "dataset_config_name": "en-de"}


EXPRESSIONS = {  # of the training and of the validation split -> the pairs
    "names": ("train", "dev", (PAIRS[:30], PAIRS[30:36])),
    "percent": ("train[:50%]", "dev", (PAIRS[:15], PAIRS[30:36])),
    "rows": ("train[5:7]", "train[-3:]", (PAIRS[5:7], PAIRS[27:30])),
    "sum": ("train+dev", "test", (PAIRS[:36], PAIRS[36:])),
    "trained on": ("train+dev", "dev", (PAIRS[:36], PAIRS[30:36])),
    "overlap": ("train[:20]+test", "train[10:]", (PAIRS[:20] + PAIRS[36:], PAIRS[10:30])),
}


@pytest.mark.parametrize("train, validation, expected", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_parts_and_sums_of_splits(train, validation, expected, configured):
    options = configured | ENGLISH_GERMAN
    pairs = load(**options, train_split=train, validation_split=validation)
    assert (texts(pairs["train"]), texts(pairs["validation"])) == expected
    assert texts(pairs["test"]) == PARTS["test"]
    assert texts(load_split(DatasetOptions(**options), validation)) == expected[1]


WHOLE = "A stream has whole splits only, not 'train[:5]'; leave out --streaming, or name one split."
NO_SPLITS = {
    **{split: ({f"{split}_split": "tset"}, "has no split 'tset'; its splits: train, dev, test.") for split in PARTS},
    "sum": ({"train_split": "train+tset"}, "has no split 'train+tset' (Unknown split"),
    "part": ({"train_split": "train[x]"}, "has no split 'train[x]' (Unrecognized"),
    "part of a stream": ({"train_split": "train[:5]", "validation_split": "dev", "streaming": True}, WHOLE),
    "revision": ({"dataset_name": "me/pairs@v1"}, "give --dataset_name me/pairs --dataset_revision v1."),
    "revision of a directory": ({"dataset_revision": "v1"}, "on the Hub; {dataset_name} is a directory."),
}


@pytest.mark.parametrize("options, message", NO_SPLITS.values(), ids=NO_SPLITS)
def test_splits_that_there_are_not_are_refused(options, message, configured):
    assert message.format(**configured) in error(**configured | options)


def test_several_training_files_with_weights_and_tags(tmp_path, capsys):
    """Of other formats and columns; a weight repeats pairs or leaves out some, evenly; a tag marks the sources."""
    files = [
        write(tmp_path / "a.jsonl", [{"id": i, "en": s, "de": t} for i, (s, t) in enumerate(PAIRS[:4])]),
        write(tmp_path / "b.txt", rows(pairs=[*PAIRS[4:8], ("", "empty")])),
        write(tmp_path / "c.tsv", rows("de", "en", [(t, s) for s, t in PAIRS[8:12]])),
    ]
    validation = write(tmp_path / "val.csv", rows(pairs=PAIRS[30:]))
    options = {"validation_file": validation, **ENGLISH_GERMAN}
    assert read(*files, **options) == [*PAIRS[:8], ("", "empty"), *PAIRS[8:12]]
    assert f"from column 'source' to column 'target' of {files[1]}" in capsys.readouterr().out
    weights = {"train_file_weights": [1.5, 1, 0.5], "train_file_tags": ["", "<bt>", "<ft>"]}
    mixed = load(train_file=files, **options, **weights)
    expected = [PAIRS[0], PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[2], PAIRS[3], *tagged("<bt>", PAIRS[4:8])]
    expected += [("", "empty"), *tagged("<ft>", [PAIRS[8], PAIRS[10]])]
    assert texts(mixed["train"]) == expected and texts(mixed["validation"]) == PAIRS[30:]
    for weights, expected in [
        ([0, 0, 1], PAIRS[8:12]),
        ([0, 0.01, 1], [PAIRS[4], *PAIRS[8:12]]),  # at least one pair
        ([2, 0, 0], [PAIRS[i // 2] for i in range(8)]),
    ]:
        assert read(*files, **options, train_file_weights=weights) == expected


def test_validation_is_held_out_of_the_first_training_file(tmp_path):
    """The second, whose sources may be translations by a model, loses the pairs with the same sources."""
    files = [write(tmp_path / "a.jsonl", rows(pairs=PAIRS[:30])), write(tmp_path / "b.jsonl", rows(pairs=PAIRS[10:]))]
    pairs = load(train_file=files, train_file_weights=[2, 1], validation_split_percentage=20)
    train, held_out = texts(pairs["train"]), texts(pairs["validation"])
    assert 0 < len(held_out) < 15 and set(held_out) < set(PAIRS[:30])
    assert set(train) == {*PAIRS[:30], *PAIRS[10:]} - {*held_out}
    pairs = load(train_file=files, train_file_tags=["<a>", "<b>"], validation_split_percentage=20)
    assert texts(pairs["validation"]) == tagged("<a>", held_out)


@pytest.mark.parametrize("other, languages", [("de-en", ["en-de", "de-en"]), ("fr-en", None)])
def test_validation_is_held_out_of_files_with_other_languages(other, languages, by_language):
    files = {"train_file": [by_language("en-de", PAIRS[:20]), by_language(other, PAIRS[20:])]}
    options = {"train_file_langs": languages, "train_file_tags": ["<de>", "<en>"]}
    pairs = load(**files, **options, validation_split_percentage=30)
    assert {source[:4] for source, _ in texts(pairs["validation"])} == {"<de>", "<en>"}


TAGS = [">>de<<", ">>fr<<"]


def test_each_training_file_has_its_own_languages(german_and_french, capsys):
    options = {"train_file": german_and_french, "validation_file": german_and_french, "train_file_tags": TAGS}
    german = tagged(">>de<<", PAIRS[:20])
    for languages in (["en-de", "en-fr"], ["en:de", "en:fr"], None):  # None: the only two columns
        pairs = load(**options, train_file_langs=languages)
        assert texts(pairs["train"]) == texts(pairs["validation"]) == german + tagged(">>fr<<", PAIRS[20:30])
    assert "different directions: en to de, en to fr." in capsys.readouterr().out
    swapped = tagged(">>fr<<", [(target, source) for source, target in PAIRS[20:30]])
    assert read(**options, train_file_langs=["en-de", "fr-en"]) == german + swapped
    named = {"source_column": "fr", "target_column": "en", "train_file_tags": TAGS}
    assert read(*german_and_french[1:] * 2, **named, train_file_langs=["de-en", "fr-en"])[-1] == swapped[-1]


def test_a_validation_file_for_each_training_file(german_and_french, by_language):
    """It has the same languages and the same tag; a file for all has neither, unless they are named."""
    options = {"train_file": german_and_french, "train_file_tags": TAGS, "train_file_langs": ["en-de", "en-fr"]}
    more = [by_language("en-de", PAIRS[30:32]), by_language("en-fr", PAIRS[32:35])]
    expected = tagged(">>de<<", PAIRS[30:32]) + tagged(">>fr<<", PAIRS[32:35])
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


def test_files_with_other_languages_need_them_named(german_and_french):
    assert "files with different languages need --train_file_langs" in error(*german_and_french, **ENGLISH_GERMAN)
    message = error(*german_and_french, train_file_langs=["en-de", "en-es"])
    assert message.startswith("en and es of --train_file_langs must both be text columns")


SHARE = {"validation_split_percentage": 5}
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


def test_of_a_large_file_few_pairs_are_held_out_unless_an_option_says_more(tmp_path, monkeypatch):
    """They are among those that a smaller file would hold out."""
    monkeypatch.setattr(splits, "MOST_HELD_OUT", 20)
    path = write(tmp_path / "train.jsonl", rows(pairs=MANY))
    few, many = (texts(load(train_file=path, **share)["validation"]) for share in ({}, SHARE))
    assert 5 < len(few) < 35 < len(many) and {*few} < {*many}


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
    sample = {"dataset_name": "sample_dataset", **ENGLISH_GERMAN}
    assert "leave --test_split_percentage out" in error(test_split_percentage=10, **sample)


@pytest.mark.parametrize("pairs", [PAIRS[:2], [*PAIRS[:3], *[("", "leer")] * 5]])
def test_at_least_one_pair_of_a_small_file_is_held_out(pairs, tmp_path):
    found = load(train_file=write(tmp_path / "train.jsonl", rows(pairs=pairs)), validation_split_percentage=1)
    assert len(found["validation"]) == 1 and len(found["train"]) == len(pairs) - 1
    assert found["validation"][0]["source"]


@streamed
def test_numbers_of_samples(streaming, tmp_path):
    files = dict.fromkeys(("train_file", "validation_file", "test_file"), write(tmp_path / "train.jsonl", rows()))
    limits = {"max_train_samples": 7, "max_eval_samples": 3, "max_predict_samples": 1000}
    pairs = load(**files, **limits, streaming=streaming)
    assert texts(pairs["train"]) == PAIRS[:7]
    assert [len(pairs[split]) for split in ("validation", "test")] == [3, 40]


def test_each_of_several_files_is_named(tmp_path):
    files = [write(tmp_path / "a.jsonl", rows()), write(tmp_path / "b.jsonl", rows("x", "y"))]
    message = error(train_file=files, **ENGLISH_GERMAN)
    assert "--target_lang de (files" in message and f"the columns of {files[1]} are x, y" in message
    assert f"--train_file {tmp_path}/none.csv does not exist" in error(train_file=[files[0], tmp_path / "none.csv"])


@pytest.mark.parametrize("pairs", [PAIRS[:1], PAIRS[:1] * 9, [("", "leer")] * 9])
def test_too_few_sources_to_hold_some_out(pairs, tmp_path):
    path = write(tmp_path / "train.jsonl", rows(pairs=pairs))
    assert "too few" in error(train_file=path)
    message = error(train_file=path, streaming=True)
    assert "--validation_split" in message and "--validation_file" in message


def test_too_few_pairs_of_a_direction_to_hold_some_out(by_language):
    files = [by_language("en-de", PAIRS), by_language("en-fr", PAIRS[:1])]
    message = error(train_file=files, train_file_tags=["<de>", "<fr>"])
    assert (
        "en-de-40.tsv and 1 more have 41 pair(s) of 40 source(s), too few to hold some out of each direction"
        in message
    )


def test_files_with_and_without_further_references_and_of_other_types_are_mixed(tmp_path):
    """A parquet file of polars has large strings."""
    files = [write(tmp_path / f"dev.{one}", f"{one} one\n{one} two\n") for one in ("en", "ref0", "ref1")]
    large = pa.table({"en": pa.array(["three"], pa.large_string()), "de": pa.array(["drei"], pa.large_string())})
    pq.write_table(large, tmp_path / "dev.parquet")
    train = {"train_file": [write(tmp_path / "train.tsv", rows())] * 2, "train_file_langs": ["en:de"] * 2}
    found = load(**train, validation_file=[*files, tmp_path / "dev.parquet"])["validation"]
    assert found["target"][:] == ["ref0 one", "ref0 two", "drei"]
    assert [others or [] for others in found["references"]] == [["ref1 one"], ["ref1 two"], []]
