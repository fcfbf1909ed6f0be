"""What is odd about the pairs is counted, said, and left out where it is asked for."""

import random
import time
from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from helpers import data_options

from vanilla_transformer.data import survey as survey_module
from vanilla_transformer.data.pairs import load_pairs
from vanilla_transformer.data.survey import Texts, describe_survey, survey, swapped_share
from vanilla_transformer.data.texts import KEPT, count_kept, normal_form, placeholders
from vanilla_transformer.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


NOUNS = [("dog", "Hund"), ("house", "Haus"), ("friend", "Freund"), ("apple", "Apfel"), ("tree", "Baum")]
PAIRS = [
    (f"The {one[0]} sees the old {two[0]} number {n}.", f"Hier sieht man {one[1]} und {two[1]} Nummer {n}.")
    for n in range(20)
    for one in NOUNS
    for two in NOUNS
]


def dataset(pairs: list[tuple]) -> Dataset:
    return Dataset.from_list([{"source": source, "target": target} for source, target in pairs])


def counts(train: list[tuple], **others: list[tuple]) -> dict:
    return survey({split: [dataset(pairs)] for split, pairs in {"train": train, **others}.items()})


def test_what_is_odd_is_counted():
    odd = [PAIRS[0], (PAIRS[1][0].upper(), f"  {PAIRS[1][1]} "), ("Berlin", "Berlin"), ("", "leer"), (None, "nichts")]
    odd += [("The same source.", "Eins."), ("the same  source.", "Zwei."), ("x" * 30, "y" * 400), ("ab", "c" * 19)]
    found = counts([*PAIRS, *odd])["train"]
    expected = {"pairs": len(PAIRS) + 7, "duplicates": 2, "source_is_target": 1, "several_targets": 2}
    assert expected.items() <= found.items() and found["odd_lengths"] == 1 and found["swapped"] == 0


@pytest.mark.parametrize("share, expected", [(0.09, 1), (0.11, 3)])
def test_sources_usually_have_as_many_sentences_as_a_tenth_of_them(share, expected):
    long = int(share * 1000)
    found = counts([("One. Two. Three.", "Eins. Zwei. Drei.")] * long + [("One.", "Eins.")] * (1000 - long))
    assert (found["train"]["usual_sentences"], found["train"]["several_sentences"]) == (expected, long)
    assert f"with several sentences {long}" in " ".join(describe_survey(found).split())


def test_documents_have_more_sentences_than_are_counted():
    assert counts([("One. " * 12, "Eins.")] * 10)["train"]["usual_sentences"] == 1000


def test_splits_are_compared_with_training():
    validation = [PAIRS[0], (PAIRS[1][0], "Eine andere Übersetzung."), ("What is\u00a0a Ж?\u200b", "Was ist ein Ж?")]
    found = counts(PAIRS, validation=validation, test=[("New.", "Neu.")])
    assert (found["validation"]["sources_in_train"], found["validation"]["pairs_in_train"]) == (2, 1)
    assert found["validation"]["unknown_characters"] == "?EWzÜЖ"
    assert found["test"]["sources_in_train"] == 0 and found["test"]["swapped"] == 0
    said = " ".join(describe_survey(found).split())
    assert "warning: 66.7% of the validation sources are training sources, too" in said and "--remove_overlap" in said
    assert "validation has characters that train lacks: ? E W z Ü Ж" in said and "test has characters" in said
    assert max(map(len, describe_survey(found).splitlines())) <= 80


@pytest.mark.parametrize("share", [0, 0.03, 0.5])
def test_swapped_sides_are_found_without_knowing_the_languages(share):
    generator = random.Random(0)
    mixed = [pair[::-1] if generator.random() < share else pair for pair in PAIRS]
    expected = sum(pair not in PAIRS for pair in mixed) / len(mixed)
    assert swapped_share(mixed) == pytest.approx(min(expected, 1 - expected), abs=0.02)
    said = " ".join(describe_survey(counts(mixed)).split())
    assert ("source and target seem to be swapped in about" in said) == (share > 0)


def test_files_of_different_directions_are_looked_at_one_by_one():
    there, back = dataset(PAIRS), dataset([pair[::-1] for pair in PAIRS])
    others = dataset([(source, f"Autre phrase : {source}") for source, _ in PAIRS])
    odd = {"swapped": 0.0, "several_targets": 0, "pairs": 3 * len(PAIRS)}
    assert odd.items() <= survey({"train": [there, back, others]}, directions_differ=True)["train"].items()
    twice = [dataset([("a", "x")]), dataset([("a", "x"), ("a", "y")])]
    assert survey({"train": twice}, directions_differ=True)["train"]["several_targets"] == 2
    together = survey({"train": [there, back, others]})["train"]
    assert together["swapped"] > 0.2 and together["several_targets"] == 2 * len(PAIRS)


def test_a_split_that_is_swapped_as_a_whole_is_found():
    found = counts(PAIRS, validation=[pair[::-1] for pair in PAIRS[:40]], test=PAIRS[:40])
    assert (found["train"]["swapped"], found["validation"]["swapped"], found["test"]["swapped"]) == (0, 1, 0)
    said = " ".join(describe_survey(found).split())
    assert "swapped in about 100% of the validation pairs." in said and said.count("swapped") == 1


@pytest.mark.parametrize("pairs", [[], [("a", "a")] * 5, [("a", "b")], [("", "x")] * 3, [*PAIRS[:3], PAIRS[3][::-1]]])
def test_hardly_any_text(pairs):
    found = counts(pairs, validation=pairs)
    assert found["train"]["swapped"] == 0 and describe_survey(found)


MARKUP = {
    'Cannot open "%s": %s': {"%s": 2},
    "%(name)s has %1$d of %2$d files (%.2f %%)": {"%(name)s": 1, "%1$d": 1, "%2$d": 1, "%.2f": 1},
    "Hello {name}, ${count} and {0:d} {}": {"{name}": 1, "${count}": 1, "{0:d}": 1, "{}": 1},
    "<b>%1</b> &amp; &Save https://a.b/c?d=1 x": {"<b>": 1, "</b>": 1, "%1": 1, "&amp;": 1, "&": 1}
    | {"https://a.b/c?d=1": 1},
    "Hello %@, you have %1$@ files.": {"%@": 1, "%1$@": 1},
    "50% sure, 3 < 4, R & D, {not one}": {},
    "100 %": {},
}


@pytest.mark.parametrize("part", ["0", "%", "%0", "{a", "<a ", "&a", "https://"])
def test_placeholders_of_strange_texts_are_found_in_linear_time(part):
    begin = time.perf_counter()
    placeholders("%" + 50_000 * part)
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize("text", MARKUP)
def test_placeholders_are_found(text):
    assert placeholders(text) == MARKUP[text]


def test_placeholders_and_numbers_of_the_source_are_looked_for_in_the_target():
    assert count_kept(KEPT["placeholders"], "%s and %s of <b>", "<b> %s %d") == (3, 2)
    assert count_kept(KEPT["numbers"], "1,000 at 7:30, 5 and 5", "1.000 um 7:30, 5") == (4, 2)
    pairs = [("Open %s", "%s öffnen"), ("Close {name}", "Schließen"), ("Save", "%s sichern")]
    found = counts(pairs)["train"]
    assert (found["placeholders"], found["placeholders_kept"]) == (2, 1)
    found = counts([*pairs, ("Wait 5 s of 20", "5 s warten")])
    assert (found["train"]["numbers"], found["train"]["numbers_kept"]) == (2, 1)
    said = " ".join(describe_survey(found).split())
    assert "placeholders 2 of these, in targets 1 numbers 2 of these, in targets 1" in said


def test_the_normal_form_ignores_case_width_and_spaces():
    assert normal_form(" The\u00a0ＤＯＧ\u3000 Stra\u00ad\u200bße\n") == normal_form("the dog strasse")
    assert normal_form("e\u0301") == normal_form("é") != normal_form("e")


def test_a_survey_is_kept_for_the_next_run(monkeypatch):
    files = {"train": [dataset(PAIRS)]}
    found = survey(files)
    monkeypatch.setattr(survey_module, "Texts", None)
    assert survey(files) == found


def test_texts_of_several_files_have_the_places_of_their_rows():
    texts = Texts([dataset([("a", "b"), ("", "b")]), dataset([("c", None), ("a", "b")])])
    assert texts.rows.tolist() == [0, 3] and texts.repeated().tolist() == [False, True]


# ------------------------------------------------------------------------------------------------------ in training


def write(path: Path, pairs: list[tuple]) -> str:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return str(path)


def load(**options):
    return load_pairs(data_options(**options))


def texts(pairs) -> list[tuple]:
    return [(pair["source"], pair["target"]) for pair in pairs]


def test_repeated_pairs_are_left_out_of_all_files(tmp_path, capsys):
    one = write(tmp_path / "one.txt", [*PAIRS[:10], *PAIRS[:5]])
    capitals = (PAIRS[3][0].upper(), PAIRS[3][1])
    two = write(tmp_path / "two.txt", [capitals, *PAIRS[10:12], ("", "leer")])
    validation = write(tmp_path / "validation.txt", PAIRS[:2])
    files = {"train_file": [one, two], "validation_file": validation}
    assert texts(load(**files, deduplicate=True)["train"]) == PAIRS[:12]
    said = capsys.readouterr().out
    assert "--deduplicate leaves out 6 training pairs that repeat an earlier one." in said
    assert texts(load(**files, remove_overlap=True)["train"]) == [*PAIRS[2:10], *PAIRS[2:5], capitals, *PAIRS[10:12]]
    assert "--remove_overlap leaves out 4 training pairs whose source is in the validation" in capsys.readouterr().out
    weighted = load(**files, deduplicate=True, remove_overlap=True, train_file_weights=[1, 2])
    assert texts(weighted["train"]) == [*PAIRS[2:10], PAIRS[10], PAIRS[10], PAIRS[11], PAIRS[11]]


@pytest.mark.parametrize("streaming", [False, True])
def test_every_load_says_what_is_odd(streaming, tmp_path, capsys):
    train = write(tmp_path / "train.txt", PAIRS[:100] + PAIRS[:60])
    splits = load(train_file=train, validation_file=write(tmp_path / "dev.txt", PAIRS[:4]), streaming=streaming)
    said = " ".join(capsys.readouterr().out.split())
    assert "38% of the training pairs are duplicates; --deduplicate leaves them out." in said
    assert splits.survey["train"]["pairs"] == 160 and splits.survey["validation"]["pairs_in_train"] == 4
    assert splits.origins == {"train": "train.txt", "validation": "dev.txt"}


@pytest.mark.parametrize("option", ["deduplicate", "remove_overlap"])
def test_nothing_is_left_out_of_a_stream(option, tmp_path):
    train = write(tmp_path / "train.txt", PAIRS)
    with pytest.raises(UserError, match="leave out --streaming"):
        load(train_file=train, validation_file=train, streaming=True, **{option: True})


def test_where_held_out_pairs_are_from_is_told_without_the_path(tmp_path):
    train = write(tmp_path / "train.txt", PAIRS)
    many = [str(tmp_path / f"{number}.tsv") for number in range(10)]
    for number, file in enumerate(many):
        Path(file).write_text("source\ttarget\n" + "".join(f"s{number}{row}\tt\n" for row in range(1 + 40 * number)))
    found = load(train_file=many)
    assert 70 < len(found["validation"]) < 110 and len({row["source"][:2] for row in found["validation"]}) > 5
    assert found.origins["train"] == ", ".join(f"{number}.tsv" for number in range(8)) + " and 2 more"
    assert found.origins["validation"] == f"held out of {found.origins['train']}"
    marked = load(train_file=many[:0:-1], train_file_weights=[2.0] + [1.0] * 8)
    assert {row["source"][:2] for row in marked["validation"]} == {"s9"}
    total = sum(1 + 40 * number for number in range(1, 10))
    assert len(marked["train"]) + len(marked["validation"]) == total + 361 - len(
        marked["validation"]
    )  # s9 is read twice
    assert marked.origins["validation"] == "held out of 9.tsv"
    assert load(train_file=train).origins == {"train": "train.txt", "validation": "held out of train.txt"}
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "train.tsv", [("en", "de"), *PAIRS])
    expected = {"train": "train of corpus", "validation": "held out of train of corpus"}
    assert load(dataset_name=str(folder)).origins == expected
