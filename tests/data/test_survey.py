"""What is odd about the pairs is counted, said, and left out where it is asked for."""

import itertools
import random
import re
import time
import unicodedata
from pathlib import Path

import datasets
import pair_files
import pytest
from datasets import Dataset
from pair_files import error, load, read, rows, streamed, texts

from vanilla_transformer.data import survey as survey_module
from vanilla_transformer.data.survey import PairHashes, describe_survey, language_axis, survey, swapped_share
from vanilla_transformer.data.texts import (
    INVISIBLE,
    KEPT,
    MANY_MARKS,
    count_kept,
    is_filled,
    normal_form,
    normalize,
    placeholders,
)
from vanilla_transformer.sentences_vanilla_transformer import is_invisible

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


def described(found: dict) -> str:
    return " ".join(describe_survey(found).split())


def test_what_is_odd_is_counted():
    odd = [PAIRS[0], (PAIRS[1][0].upper(), f"  {PAIRS[1][1]} "), ("Berlin", "Berlin"), ("", "leer"), (None, "nichts")]
    odd += [("The same source.", "Zwei Worte."), ("the same  source.", "Drei Worte."), ("x" * 30, "y" * 400)]
    found = counts([*PAIRS, *odd])["train"]
    expected = {"pairs": len(PAIRS) + 6, "duplicates": 2, "source_is_target": 1, "several_targets": 2}
    assert expected.items() <= found.items() and found["odd_lengths"] == 1 and found["swapped"] < 0.01


def test_pairs_that_are_spelt_alike_are_counted():
    alike = [("cafe au lait 3", "Café, au-lait: 3!"), ("Thedogsleeps.", "The dog sleeps."), ("straße", "STRASSE")]
    found = counts([*alike, ("The dgo sleeps.", "The dog sleeps."), ("one", "eins"), ("🐶", "🐱")])["train"]
    assert found["same_letters"] == 0.5 and counts([])["train"]["same_letters"] == 0


@pytest.mark.parametrize("first", [0, 1])
def test_pairs_of_two_kinds_in_turn_are_both_sampled(first):
    pairs = [("the dog sleeps", "The dog sleeps."), ("the dog sleeps", "Der Hund schläft.")] * 1500
    assert 0.4 < counts(pairs[first:])["train"]["same_letters"] < 0.6


@pytest.mark.parametrize(("first", "are_tasks"), [("translate: ", True), ("Note: ", False), ("Tom said ", False)])
def test_sources_that_begin_with_a_task_count_as_tagged(first, are_tasks):
    """Not those of which few begin so, nor those without a colon."""
    rows = 10 if first == "Note: " else 100
    pairs = [(f"{first if n < rows else ''}the dog number {n} sleeps", f"der Hund {n}") for n in range(200)]
    assert counts(pairs)["train"]["tagged_sources"] == are_tasks


def test_words_that_no_spaces_separate_are_counted():
    found = counts([("我们去上学。", "ひらがな カタカナ"), ("The 犬.", "한국어"), ("ไปไหน", "ทำไม?")])["train"]
    assert found["hidden_words"] == [(2 + 0 + 1) / 3, 0]


def test_words_that_occur_five_times_are_counted():
    """On both sides together. Of several targets of a source, one counts, as corrections repeat its words."""
    pairs = [(f"Dogs like {n} cats", f"Hunde mögen {n} Dogs") for n in range(5)]
    assert counts(pairs)["train"]["frequent_words"] == 5 and counts(pairs[:4])["train"]["frequent_words"] == 1
    several = [("a dog sleep", f"A dog sleeps {n} times") for n in range(9)]
    assert counts(several)["train"]["frequent_words"] == 0
    # Two letters of Han are taken for a word, four of other scripts without spaces: here 上学, ひらがな and サーバー.
    found = counts([(f"上学{n}。", f"ひらがなサーバーに上学{n}Dogs上学") for n in range(5)])["train"]
    assert found["frequent_words"] == 5


def test_characters_in_words_are_told_from_spelled_words_and_numbers():
    found = counts([("we go home .", "l e t"), ("我们去上学。", "12 + 3 = 15"), ("ab", "c d")])["train"]
    assert found["in_words"] == pytest.approx([(2 + 2 + 4 + 5 + 2) / (9 + 6 + 2), 0])


def test_a_single_document_among_words_does_not_count():
    found = counts([("dog", "d ɔ ɡ")] * 300 + [("word " * 900, "w " * 900)])["train"]
    assert found["words"] == [1, 3] and found["characters"] == [3, 5]


def test_marks_in_a_row_are_compared_quickly():
    marked = "a" + "\u0301\u0316" * 20_000
    start = time.perf_counter()
    survey_module.letters_of(marked)
    assert time.perf_counter() - start < 1.5


@pytest.mark.parametrize(
    "pair, is_odd", [("a 19", True), ("3 14", True), ("a 9", False), ("9 a", False), ("19 a", True)]
)
@pytest.mark.parametrize("ratio", [1, 4])
def test_short_texts_have_odd_lengths_too(pair, is_odd, ratio):
    """In a dictionary; with a ratio, all targets are so many times as long."""
    words = [("v" * length, "w" * ratio * length) for length in (4, 6, 8)] * 9
    source, target = (2 if length == "a" else int(length) for length in pair.split())
    odd = counts([*words, ("x" * source, "y" * ratio * target)])["train"]["odd_lengths"]
    assert odd == (is_odd if ratio == 1 else 1)


@pytest.mark.parametrize("share, expected", [(0.009, 1), (0.011, 3)])
def test_sources_usually_have_as_many_sentences_and_lines_as_one_in_a_hundred(share, expected):
    long = int(share * 1000)
    lines = counts([("a\nb\r\n\nc\n", "d")] * long + [("One. Two.\n", "e")] * (1000 - long))["train"]
    assert (lines["usual_lines"], lines["several_lines"], lines["usual_sentences"]) == (expected, long, 2)
    found = counts([("One. Two. Three.", "Eins. Zwei. Drei.")] * long + [("One.", "Eins.")] * (1000 - long))
    assert (found["train"]["usual_sentences"], found["train"]["several_sentences"]) == (expected, long)
    assert f"with several sentences {long}" in described(found)


def test_documents_have_more_sentences_than_are_counted():
    assert counts([("One. " * 12, "Eins.")] * 10)["train"]["usual_sentences"] == 1000


@pytest.mark.parametrize(
    ("kind", "source", "share"),
    [
        ("wordless_sources", "3.14", 0.01),
        ("capital_sources", "HELLO!", 0.01),
        ("lower_sources", "the dog sleeps.", 0.01),
        ("title_sources", "The Old Man Reads a Book", 0.001),
        ("spaced_sources", "One , two.", 0.01),
        ("framed_sources", '- "One"', 0.01),
    ],
)
@pytest.mark.parametrize("times", [0.9, 1.1])
def test_kinds_of_sources_are_known_if_enough_are_like_that(kind, source, share, times):
    count = int(share * times * 10_000)
    pairs = [(source, "Eins")] * count + [("One of NATO", "Eins")] * (10_000 - count)
    assert counts(pairs)["train"][kind] is (times > 1)


@pytest.mark.parametrize("tag", ["", ">>deu<< ", "<bt> "])
def test_tags_do_not_hide_the_kind_of_a_source(tag):
    assert counts([(f"{tag}GO HOME!", "x")] * 9)["train"]["capital_sources"]


def test_verbatim_characters_are_compared_as_they_are():
    train, validation = dataset([("a b", "\u00e9 \u00c5")] * 9), dataset([("a\u00a0b", "e\u0301 \u212b")])
    found = survey({"train": [train], "validation": [validation]}, verbatim=True)
    assert found["validation"]["unknown_characters"] == "e\u00a0\u0301\u212b"


def test_forms_of_many_pairs_are_estimated_from_a_sample_and_said_to_be(monkeypatch, tmp_path):
    pairs = ([("One 7", "Eins")] * 3 + [("Two. Sentences %s", "Zwei. Sätze %s")]) * 250
    exact = counts(pairs)["train"]
    assert "sampled" not in exact and "estimated" not in describe_survey({"train": exact})
    monkeypatch.setattr(survey_module, "SAMPLE", 400)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "another")
    found = counts(pairs)["train"]
    assert found["sampled"] == 400
    assert "numbers are estimated from 400 pairs" in described({"train": found})
    estimated = {"several_sentences", "placeholders", "placeholders_kept", "numbers", "sampled"}
    estimated |= {"words", "characters", "same_letters", "hidden_words"}
    assert {key for key in found if found[key] != exact.get(key)} <= estimated
    assert all(found[key] == pytest.approx(exact[key], rel=0.15) for key in estimated - {"sampled"})


def test_splits_are_compared_with_training():
    validation = [PAIRS[0], (PAIRS[1][0], "Eine andere Übersetzung."), ("What is\u00a0a Ж?\u200b", "Was ist ein Ж?")]
    found = counts(PAIRS, validation=validation, test=[("New.", "Neu.")])
    assert (found["validation"]["sources_in_train"], found["validation"]["pairs_in_train"]) == (2, 1)
    assert found["validation"]["unknown_characters"] == "?EWzÜЖ"
    assert found["test"]["sources_in_train"] == 0 and found["test"]["swapped"] == 0
    said = described(found)
    assert "warning: 66.7% of the validation sources are training sources, too" in said and "--remove_overlap" in said
    assert "validation has characters that train lacks: ? E W z Ü Ж" in said and "test has characters" in said
    assert max(map(len, describe_survey(found).splitlines())) <= 80


@pytest.mark.parametrize("share", [0, 0.03, 0.5])
def test_swapped_sides_are_found_without_knowing_the_languages(share):
    generator = random.Random(0)
    mixed = [pair[::-1] if generator.random() < share else pair for pair in PAIRS]
    expected = sum(pair not in PAIRS for pair in mixed) / len(mixed)
    assert swapped_share(mixed, language_axis(mixed)) == pytest.approx(min(expected, 1 - expected), abs=0.02)
    assert ("source and target seem to be swapped in about" in described(counts(mixed))) == (share > 0)
    tagged = [(f">>xx<< {source}", target) for source, target in mixed]  # of which each direction may have its own
    for pairs in mixed, tagged:
        assert ("unless their tags tell the direction" in described(counts(pairs))) == (share > 0 and pairs is tagged)


def test_every_second_pair_of_a_large_file_may_be_swapped(monkeypatch):
    monkeypatch.setattr(survey_module, "LOOKED_AT", 100)
    mixed = [pair[::-1] if number % 2 else pair for number, pair in enumerate(PAIRS)]
    assert counts(mixed)["train"]["swapped"] == pytest.approx(0.5, abs=0.2)


def with_mistakes(text: str) -> str:
    """Most learners leave articles out, some put in too many, so that corrections go both ways."""
    generator = random.Random(text)
    words = text.split()
    if generator.random() < 0.7:
        words = [word for word in words if word.lower() != "the" or generator.random() < 0.5]
    else:
        words = [f"the {word}" if generator.random() < 0.3 else word for word in words]
    return " ".join(words)


ENGLISH = [f"{source} Then {other[0].lower()}" for (source, _), other in zip(PAIRS, PAIRS[::-1], strict=True)]
ONE_LANGUAGE = {
    "corrections": lambda number, text: (with_mistakes(text), text),
    "dialogue": lambda number, text: (text, ENGLISH[number * 7 % len(ENGLISH)]),
    "copy": lambda number, text: (text, text),
    "reversed": lambda number, text: (text, text[::-1]),
    "cased": lambda number, text: (text.lower(), text),
    "the first words": lambda number, text: (text, " ".join(text.split()[:5])),
    "sums": lambda number, text: (f"{number} + {number * 7 % 93}", str(number + number * 7 % 93)),
}


@pytest.mark.parametrize("task", ONE_LANGUAGE)
def test_one_language_has_no_swapped_sides(task):
    pairs = list(itertools.starmap(ONE_LANGUAGE[task], enumerate(ENGLISH)))
    found = counts(pairs, validation=pairs[:100])
    assert found["train"]["swapped"] < 0.01 and "swapped" not in describe_survey(found)


def test_numbers_are_in_no_language():
    assert counts([(str(n), str(2 * n)) for n in range(500)])["train"]["swapped"] == 0


def test_a_few_pairs_of_a_catalogue_may_be_swapped():
    """Eight short ones, repeated, every third the wrong way round."""
    menu = [("Open file", "Datei öffnen"), ("Save as…", "Speichern unter …"), ("Close", "Schließen")]
    menu += [("Quit", "Beenden"), ("Copy", "Kopieren"), ("Paste", "Einfügen"), ("Undo", "Rückgängig")]
    menu += [("Redo", "Wiederholen")]
    mixed = [pair[::-1] if number in (2, 5) else pair for number, pair in enumerate(menu)] * 5
    assert counts(mixed)["train"]["swapped"] == 0.25 and counts(menu * 5)["train"]["swapped"] == 0


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
    said = described(found)
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
    "50% sure, 100%ig, 3 < 4, R & D, {not one}, $5": {},
    "%dx%d %.*s %*d %'d %Lf %ith {n:>10} {a[0]}": {"%d": 2, "%.*s": 1, "%*d": 1, "%'d": 1, "%Lf": 1, "%i": 1}
    | {"{n:>10}": 1, "{a[0]}": 1},
    "{{ a }} {% if b %} {n, plural, one {#}} %|1$5| %L1%2 $name\x1b": {"{{ a }}": 1, "{% if b %}": 1, "{n, plural": 1}
    | {"{#}": 1, "%|1$5|": 1, "%L1": 1, "%2": 1, "$name": 1, "\x1b": 1},
    "100 %": {},
}


@pytest.mark.parametrize("text", MARKUP)
def test_placeholders_are_found(text):
    assert placeholders(text) == MARKUP[text]


@pytest.mark.parametrize("part", ["0", "%", "%0", "{a", "{%", "{a, ", "$a", "%|", "<a ", "&a", "https://"])
def test_placeholders_of_strange_texts_are_found_in_linear_time(part):
    begin = time.perf_counter()
    placeholders("%" + 50_000 * part)
    assert time.perf_counter() - begin < 2


def test_placeholders_and_numbers_of_the_source_are_looked_for_in_the_target():
    assert count_kept(KEPT["placeholders"], "%s and %s of <b>", "<b> %s %d") == (3, 2)
    assert count_kept(KEPT["numbers"], "1,000 at 7:30, 5 and 5", "1.000 um 7:30, 5") == (4, 2)
    pairs = [("Open %s", "%s öffnen"), ("Close {name}", "Schließen"), ("Save", "%s sichern")]
    found = counts(pairs)["train"]
    assert (found["placeholders"], found["placeholders_kept"]) == (2, 1)
    found = counts([*pairs, ("Wait 5 s of 20", "5 s warten")])
    assert (found["train"]["numbers"], found["train"]["numbers_kept"]) == (2, 1)
    assert "placeholders 2 of these, in targets 1 numbers 2 of these, in targets 1" in described(found)


def test_that_no_target_has_the_placeholders_of_its_source_is_shown():
    pairs = [(f"File %s number {number}", f"Datei Nummer {number}") for number in range(30)]
    said = described(counts(pairs, test=[("Go", "Geh")]))
    assert "placeholders 30 0 of these, in targets 0 0 numbers 30 0 of these, in targets 30 0" in said


def test_the_normal_form_ignores_case_width_and_spaces():
    assert normal_form(" The\u00a0ＤＯＧ\u3000 Stra\u00ad\u200bße\n") == normal_form("the dog strasse")
    assert normal_form("e\u0301") == normal_form("é") != normal_form("e")


def test_shortcuts_for_plain_texts_find_the_same():
    for letter in map(chr, [*range(0xD800), *range(0xE000, 0x30000), *range(0xE0000, 0xE0200)]):
        for text in (letter, f" a {letter}  B"):
            plain = re.sub(INVISIBLE, "", text)
            assert normal_form(text) == " ".join(unicodedata.normalize("NFKC", plain).casefold().split())
            assert is_filled(text) == (not all(map(is_invisible, normalize(text))))


@pytest.mark.parametrize(
    "marks", ["\u0301\u0316", "\u0323\u0301\u0334", "\u0344\u0323", "\u0f73", "\u0f81\uff9e\u0f75"]
)
@pytest.mark.parametrize("function, form", [(normalize, "NFC"), (normal_form, "NFKC")])
def test_many_combining_marks_take_linear_time(function, form, marks):
    for count in (MANY_MARKS - 1, MANY_MARKS, MANY_MARKS + 1):
        text = f"日本a{marks * count}가{marks}"[:count]
        assert function(text) == unicodedata.normalize(form, text)
    begin = time.process_time()
    function(f"a{marks * 200_000}")
    assert time.process_time() - begin < 5  # of this process alone; in quadratic time it would take minutes


def test_a_survey_is_kept_for_the_next_run(monkeypatch):
    files = {"train": [dataset(PAIRS)]}
    found = survey(files)
    monkeypatch.setattr(survey_module, "PairHashes", None)
    assert survey(files) == found


def test_texts_of_several_files_have_the_places_of_their_rows():
    texts = PairHashes([dataset([("a", "b"), ("", "b")]), dataset([("c", None), ("a", "b")])])
    assert texts.rows.tolist() == [0, 3] and texts.repeated().tolist() == [False, True]


@pytest.mark.parametrize(
    "row, count", [('"A dog\tEin Hund', 0), ('"A dog"\t', 0), ('"A dog\nsleeps."\tEin Hund', 1), ('A\t"Ein\nHund"', 1)]
)
def test_quoted_line_breaks_of_a_tsv_are_warned_of(row, count, tmp_path, capsys):
    file = tmp_path / "pairs.tsv"
    file.write_text("en\tde\n" + "".join(f"{source}\t{target}\n" for source, target in PAIRS) + f"{row}\n")
    load(train_file=file, validation_file=write(tmp_path / "dev.txt", PAIRS[:4]))
    said = " ".join(capsys.readouterr().out.split())
    assert (f"lack a side and have an unpaired quotation mark: {count}. In a .tsv" in said) == (count > 0)


def test_quotation_marks_that_swallow_rows_of_a_csv_are_warned_of(tmp_path, capsys):
    rows = [f"{source.rstrip('.')},{target.rstrip('.')}" for source, target in PAIRS]
    for number in (100, 150):
        rows[number] = f'"{rows[number]}'
    (tmp_path / "pairs.csv").write_text("\n".join(["en,de", *rows, ""]))
    load(train_file=tmp_path / "pairs.csv", validation_file=write(tmp_path / "dev.txt", PAIRS[:4]))
    assert "with 20 lines or more, unlike the others: 1. In a .csv" in " ".join(capsys.readouterr().out.split())
    many = [("\n".join([source] * 20), target) for source, target in PAIRS]
    assert "unlike the others" not in described(counts(many))


# ------------------------------------------------------------------------------------------------------ in training


def write(path: Path, pairs: list[tuple]) -> Path:
    return pair_files.write(path, rows(pairs=pairs))


def test_repeated_pairs_are_left_out_of_all_files(tmp_path, capsys):
    one = write(tmp_path / "one.txt", [*PAIRS[:10], *PAIRS[:5]])
    capitals = (PAIRS[3][0].upper(), PAIRS[3][1])
    two = write(tmp_path / "two.txt", [capitals, *PAIRS[10:12], ("", "leer")])
    validation = write(tmp_path / "validation.txt", PAIRS[:2])
    files = {"train_file": [one, two], "validation_file": validation}
    assert read(**files, deduplicate=True) == PAIRS[:12]
    said = capsys.readouterr().out
    assert "--deduplicate leaves out 6 training pairs that repeat an earlier one." in said
    assert read(**files, remove_overlap=True) == [*PAIRS[2:10], *PAIRS[2:5], capitals, *PAIRS[10:12]]
    assert "--remove_overlap leaves out 4 training pairs whose source is in the validation" in capsys.readouterr().out
    weighted = read(**files, deduplicate=True, remove_overlap=True, train_file_weights=[1, 2])
    assert weighted == [*PAIRS[2:10], PAIRS[10], PAIRS[10], PAIRS[11], PAIRS[11]]


@streamed
def test_every_load_says_what_is_odd(streaming, tmp_path, capsys):
    train = write(tmp_path / "train.txt", PAIRS[:100] + PAIRS[:60])
    splits = load(train_file=train, validation_file=write(tmp_path / "dev.txt", PAIRS[:4]), streaming=streaming)
    said = " ".join(capsys.readouterr().out.split())
    remedy = "." if streaming else "; --deduplicate leaves them out."
    assert f"38% of the training pairs are duplicates{remedy}" in said
    assert ("Of the stream, the first 160 pairs were looked at." in said) == streaming
    assert ("--remove_overlap" in said) != streaming
    assert splits.survey["train"]["pairs"] == 160 and splits.survey["validation"]["pairs_in_train"] == 4
    assert splits.origins == {"train": "train.txt", "validation": "dev.txt"}


@streamed
def test_the_pairs_that_are_used_are_those_of_the_survey(streaming, tmp_path):
    files = [write(tmp_path / f"{number}.txt", PAIRS[number * 10 : number * 10 + 10]) for number in range(3)]
    limits = {"max_train_samples": 5, "max_eval_samples": 3, "max_predict_samples": 2, "streaming": streaming}
    found = load(train_file=files[:1], validation_file=files[1], test_file=files[2], **limits).survey
    assert {split: counts["pairs"] for split, counts in found.items()} == {"train": 5, "validation": 3, "test": 2}
    if not streaming:
        for weights, count, expected in [([2, 1], 25, 15), ([2, 0], None, 10), ([0.5, 1], 7, 7), (None, 12, 12)]:
            options = {"train_file_weights": weights, "max_train_samples": count, "validation_file": files[2]}
            splits = load(train_file=files[:2], **options)
            assert splits.survey["train"]["pairs"] == len(set(texts(splits["train"]))) == expected


@pytest.mark.parametrize("option", ["deduplicate", "remove_overlap"])
def test_nothing_is_left_out_of_a_stream(option, tmp_path):
    train = write(tmp_path / "train.txt", PAIRS)
    assert "leave out --streaming" in error(train, streaming=True, **{option: True})


def test_where_held_out_pairs_are_from_is_told_without_the_path(tmp_path):
    train = write(tmp_path / "train.txt", PAIRS)
    many = [
        write(tmp_path / f"{number}.tsv", [(f"s{number}{row}", "t") for row in range(1 + 40 * number)])
        for number in range(10)
    ]
    found = load(train_file=many)
    assert 70 < len(found["validation"]) < 110 and len({row["source"][:2] for row in found["validation"]}) > 5
    assert found.origins["train"] == ", ".join(f"{number}.tsv" for number in range(8)) + " and 2 more"
    assert found.origins["validation"] == f"held out of {found.origins['train']}"
    marked = load(train_file=many[:0:-1], train_file_weights=[2.0] + [1.0] * 8)
    assert {row["source"][:2] for row in marked["validation"]} == {"s9"}
    total = sum(1 + 40 * number for number in [*range(1, 10), 9])  # the last is read twice
    assert len(marked["train"]) + 2 * len(marked["validation"]) == total
    assert marked.origins["validation"] == "held out of 9.tsv"
    assert load(train_file=train).origins == {"train": "train.txt", "validation": "held out of train.txt"}
    folder = write(tmp_path / "corpus" / "train.tsv", PAIRS).parent
    expected = {"train": "train of corpus", "validation": "held out of train of corpus"}
    assert load(dataset_name=folder).origins == expected
