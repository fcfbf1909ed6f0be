"""Files of every kind, as people have them: .po, .xliff and .tmx, parallel and compressed files, and odd tables."""

import bz2
import errno
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import pair_files
import pytest
from pair_files import ENGLISH_GERMAN, error, load, read, rows, streamed, texts, write

from vanilla_transformer.data.options import DatasetOptions, group_parallel, suffix_of
from vanilla_transformer.data.rows import reading_data
from vanilla_transformer.data.splits import load_split

PAIRS = pair_files.PAIRS[:6]
TSV = "en\tde\n" + "".join(f"{source}\t{target}\n" for source, target in PAIRS)
PO = "".join(f'msgid "{source}"\nmsgstr "{target}"\n\n' for source, target in PAIRS)


# ------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("suffix", ["po", "xliff"])
@streamed
def test_translation_files_have_pairs(streaming, suffix, tmp_path):
    sides = "".join(
        f"<trans-unit id='{i}'><source>{s}</source><target>{t}</target></trans-unit>" for i, (s, t) in enumerate(PAIRS)
    )
    xliff = f"<xliff version='1.2'><file source-language='en'><body>{sides}</body></file></xliff>"
    content = {"po": PO, "xliff": xliff}[suffix]
    assert read(write(tmp_path / f"ui.{suffix}", content), streaming=streaming) == PAIRS
    assert "could not be read" in error(write(tmp_path / f"ui.{suffix}", content[:-20]), streaming=streaming)


def tmx(units: list[dict[str, str]], source: str) -> str:
    bodies = (
        "".join(f'<tuv xml:lang="{language}"><seg>{text}</seg></tuv>' for language, text in unit.items())
        for unit in units
    )
    body = "".join(f"<tu>{one}</tu>" for one in bodies)
    return f'<?xml version="1.0"?><tmx version="1.4"><header srclang="{source}"/><body>{body}</body></tmx>'


@streamed
def test_variants_of_a_language_are_one_if_no_unit_has_two(streaming, tmp_path):
    kinds = ["en-US", "EN", "en_gb"]
    variants = [{kind: source, "de": target} for kind, (source, target) in zip(kinds, PAIRS[:3], strict=True)]
    body = tmx(variants, "en").replace("<tmx ", '<tmx xmlns="http://www.lisa.org/tmx14" ').replace("<body>", "<body >")
    file = write(tmp_path / "memory.tmx", body)
    assert read(file, source_lang="en-US", target_lang="de-DE", streaming=streaming) == PAIRS[:3]
    bare = body.replace("<body >", "").replace("</body>", "")
    assert read(write(tmp_path / "bare.tmx", bare), streaming=streaming) == PAIRS[:3]


@streamed
@pytest.mark.parametrize("header", ["en", "en_US", "EN-GB"])
def test_units_of_a_translation_memory_are_pairs(header, streaming, tmp_path):
    """The source language is that of the header."""
    units = [{"de-DE": target, "en-US": source} for source, target in PAIRS]
    units += [{"en-US": "press <bpt i='1'>&lt;b&gt;</bpt>Ctrl<ept i='1'>&lt;/b&gt;</ept>", "de-DE": "Strg"}]
    file = write(tmp_path / "memory.tmx", tmx(units, header))
    expected = [*PAIRS, ("press <b>Ctrl</b>", "Strg")]
    assert read(file, streaming=streaming) == expected
    german = read(file, source_lang="de", target_lang="en", streaming=streaming)
    assert german == [(target, source) for source, target in expected]


def test_regions_tell_languages_of_a_translation_memory_apart(tmp_path):
    file = write(tmp_path / "memory.tmx", tmx([{"pt-BR": "trem", "pt-PT": "comboio"}], "pt-BR"))
    assert read(file, source_lang="pt-br", target_lang="pt-pt") == [("trem", "comboio")]


ENTITIES = "".join(f'<!ENTITY e{number} "{f"&e{number - 1};" * 10}">' for number in range(1, 10))
BOMB = f'<!DOCTYPE tmx [<!ENTITY e0 "text">{ENTITIES}]>' + tmx([{"en": "&e9;", "de": "x"}], "en").partition("?>")[2]
FILE = BOMB.replace('<!ENTITY e0 "text">', '<!ENTITY e0 SYSTEM "file:///etc/hostname">').replace("&e9;", "&e0;")


@pytest.mark.parametrize("content", ["<tmx><body><tu>", "no XML", BOMB, FILE], ids=["cut", "text", "bomb", "file"])
@streamed
def test_a_broken_translation_memory_is_one_sentence(content, streaming, tmp_path):
    assert "memory.tmx could not be read" in error(write(tmp_path / "memory.tmx", content), streaming=streaming)


def write_parallel(folder: Path, suffixes=("en", "de"), pairs=PAIRS, compress=bytes, end="") -> list[Path]:
    sides = zip(*pairs, strict=True)
    return [
        write(folder / f"train.{suffix}{end}", compress("".join(f"{text}\n" for text in texts).encode()))
        for suffix, texts in zip(suffixes, sides, strict=True)
    ]


@streamed
def test_lines_of_parallel_files_are_pairs(streaming, tmp_path):
    files = write_parallel(tmp_path, pairs=[*PAIRS, ('"', "\u2028")])
    assert read(*files, streaming=streaming) == [*PAIRS, ('"', "\u2028")]
    back = read(*files, source_lang="de", target_lang="en", streaming=streaming)
    assert back[:6] == [(target, source) for source, target in PAIRS]
    packed = write_parallel(tmp_path, compress=gzip.compress, end=".gz")
    assert read(*packed, streaming=streaming) == PAIRS


@pytest.mark.parametrize("named", [{}, ENGLISH_GERMAN, {"source_column": "question", "target_column": "answer"}])
def test_sides_of_parallel_files_with_other_endings_are_in_their_order(named, tmp_path):
    assert read(*write_parallel(tmp_path, suffixes=("src", "tgt")), **named) == PAIRS


def test_parallel_files_with_other_endings_are_of_the_same_languages(tmp_path, capsys):
    files = [*write_parallel(tmp_path), *write_parallel(tmp_path, suffixes=("src", "tgt"))]
    assert read(*files, **ENGLISH_GERMAN) == PAIRS * 2
    assert "different directions" not in capsys.readouterr().out
    assert "must both be text columns" in error(*files[:2], source_lang="en", target_lang="deu")


def test_parallel_files_count_as_one_file(tmp_path):
    one, two = write_parallel(tmp_path / "a"), write_parallel(tmp_path / "b", pairs=PAIRS[:2])
    tabbed = write(tmp_path / "c.tsv", TSV)
    options = {"train_file_weights": [0, 1, 1], "train_file_tags": ["", "", "<bt>"], "validation_file": tabbed}
    mixed = read(*one, tabbed, *two, **options)
    assert mixed == [*PAIRS, *((f"<bt> {source}", target) for source, target in PAIRS[:2])]


def test_parallel_files_of_unequal_length_are_refused(tmp_path):
    source, target = write_parallel(tmp_path)
    write(target, "nur\nzwei\n")
    assert "train.de ends after 2 lines, and others have more" in error(source, target)


GROUPS = {
    "pairs": (["a/a.en", "a/a.de", "b.en.gz", "b.de.gz"], [("a/a.en", "a/a.de"), ("b.en.gz", "b.de.gz")]),
    "between others": (["a.tsv", "a.en", "a.de", "a.txt"], ["a.tsv", ("a.en", "a.de"), "a.txt"]),
    "other names": (["a.en", "b.de"], ["a.en", "b.de"]),
    "the same": (["a.en", "a.en"], ["a.en", "a.en"]),
    "formats": (["a.json", "a.jsonl"], ["a.json", "a.jsonl"]),
    "without": (["train", "valid"], ["train", "valid"]),
    "references": (["a.en", "a.ref0", "a.ref1"], [("a.en", "a.ref0", "a.ref1")]),
    "numbers alone": (["a.1", "a.2", "a.3", "a.4"], [("a.1", "a.2"), ("a.3", "a.4")]),
    "Tsonga": (["a.en", "a.ts", "b.ts", "b.po"], [("a.en", "a.ts"), "b.ts", "b.po"]),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_names_of_parallel_files_differ_in_their_last_part(case):
    names, groups = GROUPS[case]
    assert group_parallel(names) == groups


def test_a_suffix_is_followed_by_a_query_in_urls_alone():
    names = "https://hf.co/a/T.CSV?download=true hf://datasets/a/b/t.txt.gz data/part-?.tsv https://a.b/c?d=1 "
    names += "gzip://t.po::https://a/t.po.gz?x"
    assert list(map(suffix_of, names.split())) == [".csv", ".txt", ".tsv", "", ".po"]


COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("suffix", [".tsv", ".TXT", ".jsonl", ".po"])
@streamed
def test_compressed_files_and_suffixes_in_capitals(streaming, suffix, compression, tmp_path):
    lines = {".tsv": TSV, ".TXT": TSV.partition("\n")[2], ".jsonl": "\n".join(map(json.dumps, rows(pairs=PAIRS)))}
    content = COMPRESSIONS[compression](lines.get(suffix, PO).encode())
    file = write(tmp_path / f"pairs{suffix}{compression}", content)
    assert read(file, streaming=streaming) == PAIRS


@pytest.mark.parametrize("suffix", [".tsv", ".txt", ".jsonl", ".json"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@streamed
def test_a_compressed_file_that_is_cut_is_named(streaming, suffix, compression, tmp_path):
    many = rows(pairs=[(f"a dog {number}", f"ein Hund {number * 7 % 1000}") for number in range(9000)])
    content = {".json": json.dumps(many), ".jsonl": "\n".join(map(json.dumps, many))}
    content = content.get(suffix, "en\tde\n" + "".join("{en}\t{de}\n".format(**row) for row in many)).encode()
    whole = COMPRESSIONS[compression](content)
    file = write(tmp_path / f"pairs{suffix}{compression}", whole[: len(whole) // 2])
    assert str(file) in error(file, streaming=streaming)


# -------------------------------------------------------------------------------------------------------------- tables

NUMBERS = [("007", "zero"), ("1e5", "NA"), ("null", "True"), ("1.50", "100,000")]


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@streamed
def test_numbers_of_tables_are_text(streaming, suffix, tmp_path):
    file = write(tmp_path / f"pairs.{suffix}", rows("digits", "words", NUMBERS))
    assert read(file, streaming=streaming) == NUMBERS


@streamed
def test_a_carriage_return_inside_of_a_line_does_not_end_it(streaming, tmp_path):
    file = write(tmp_path / "pairs.tsv", "en\tde\r\nWait\rhere\tWarte\r\n\r\nGo\tGeh\r\n")
    assert read(file, streaming=streaming) == [("Wait\rhere", "Warte"), ("Go", "Geh")]


@pytest.mark.parametrize("suffixes", [["tsv"], ["txt"], ["txt.gz"], ["en", "de"]])
@streamed
def test_lines_that_end_with_carriage_returns_alone_are_refused(streaming, suffixes, tmp_path):
    """Otherwise, a file would be one line."""
    for suffix in suffixes:
        content = TSV.replace("\n", "\r").encode()
        (tmp_path / f"pairs.{suffix}").write_bytes(gzip.compress(content) if "gz" in suffix else content)
    files = [tmp_path / f"pairs.{suffix}" for suffix in suffixes]
    message = error(train_file=files, validation_file=files, streaming=streaming)
    assert "its lines end with carriage returns alone; convert it, for example with mac2unix" in message


WITHOUT_ROWS = [("json", content) for content in ("null", '"text"', "7", "\n\n", "[]", "{}")]
WITHOUT_ROWS += [("jsonl", content) for _, content in WITHOUT_ROWS]
WITHOUT_ROWS += [("json.gz", content) for content in ("\n\n", "[]", "{}")]  # of others, pyarrow crashes


@pytest.mark.parametrize("suffix, content", WITHOUT_ROWS)
@streamed
def test_json_without_rows_is_one_sentence(streaming, suffix, content, tmp_path):
    packed = gzip.compress(content.encode()) if suffix == "json.gz" else content
    message = error(write(tmp_path / f"pairs.{suffix}", packed), streaming=streaming)
    assert "has no pairs" in message or "does not begin with [ or {" in message


def test_dates_in_json_are_named_with_a_remedy(tmp_path):
    file = write(tmp_path / "dates.jsonl", '{"words": "May 1st", "date": "2020-05-01"}\n' * 9)
    assert "Dates in .json files are read as times; save them as .tsv" in error(file)


@streamed
def test_numbers_and_ids_are_no_side_of_a_pair(streaming, tmp_path):
    content = "id\ten\tscore\tde\n" + "".join(f"{i}\t{s}\t0.{i}\t{t}\n" for i, (s, t) in enumerate(PAIRS))
    assert read(write(tmp_path / "pairs.tsv", content), streaming=streaming) == PAIRS


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, QUOTED)
    return buffer.getvalue()


QUOTED = 'en\tde\n"one\teins\ntwo\tzwei\n"three\tdrei\n'  # quotation marks of a .tsv file are text
OF_QUOTED = [('"one', "eins"), ("two", "zwei"), ('"three', "drei")]
NEIGHBOURS = {
    "alone": {"train.tsv": QUOTED},
    "a .json file": {"train.tsv": QUOTED, "stats.json": '{"pairs": 3}'},
    "a hidden .json file": {"train.tsv": QUOTED, ".info.json": "{}"},
    "a .csv file": {"train-1.tsv": QUOTED, "train-2.csv": 'en,de\n"a ""b""",c\n'},
    "compressed": {"train.tsv.gz": gzip.compress(QUOTED.encode())},
    "in an archive": {"train.zip": zipped("train.tsv")},
    "in a folder with the characters of patterns": {"[v1]/train.tsv": QUOTED},
}


@pytest.mark.parametrize("case", NEIGHBOURS)
@streamed
def test_each_file_of_a_dataset_is_read_by_its_own_rules(streaming, case, tmp_path):
    for name, content in NEIGHBOURS[case].items():
        write(tmp_path / "set [v1]" / name, content)
    write(tmp_path / "set [v1]" / "validation.tsv", QUOTED)
    pairs = load(dataset_name=tmp_path / "set [v1]", streaming=streaming)
    assert texts(pairs["train"]) == OF_QUOTED + [('a "b"', "c")] * (case == "a .csv file")
    assert texts(pairs["validation"]) == OF_QUOTED


@pytest.mark.parametrize("names", ["TRAIN.TSV VALIDATION.TSV", "train.Tsv.gz valid.tsv", "train.po validation.po"])
@streamed
def test_a_dataset_of_other_suffixes(streaming, names, tmp_path):
    for name in names.split():
        content = (PO if name.endswith(".po") else TSV).encode()
        write(tmp_path / "set" / name, gzip.compress(content) if name.endswith(".gz") else content)
    pairs = load(dataset_name=tmp_path / "set", streaming=streaming)
    assert texts(pairs["train"]) == texts(pairs["validation"]) == PAIRS


@pytest.mark.parametrize(
    "content, card",
    [
        ("en;de\none;007\n", "sep: ;"),
        ("en\tde\none\t007\n", 'sep: "\\t"'),
        ("007,one\n", "header: null, names: [de, en]"),
    ],
)
def test_how_a_dataset_card_says_to_read_tables_is_obeyed(content, card, tmp_path):
    write(tmp_path / "set" / "pairs.csv", content)
    config = f"{{config_name: default, data_files: pairs.csv, {card}}}"
    write(tmp_path / "set" / "README.md", f"---\nconfigs: [{config}]\n---\n")
    languages = {"source_lang": "en", "target_lang": "de"}
    pairs = load(dataset_name=tmp_path / "set", validation_split="train", **languages)
    assert texts(pairs["train"]) == [("one", "007")]


WORDS = "Save,Sichern\nClose,Schließen"
FIRST_ROWS = {  # the first row -> the others, and whether it is a pair
    "en,de": (WORDS, "header"),
    "zh-CN,pt_BR": (WORDS, "header"),
    "English sentence,German (formal)": (WORDS, "header"),
    "source,target": (WORDS, "header"),
    "hello,hallo": (WORDS, "may be one"),
    "question,answer": (WORDS, "may be one"),
    "Open file,Datei öffnen": (WORDS, "pair"),
    "Open file,Datei öffnen,0.93": ("Save,Sichern,0.9\nClose,Schließen,1", "pair"),
    "0,Open file,1,Datei öffnen": ("1,Save,2,Sichern\n3,Close,4,Schließen", "pair"),
    "line no.,text,translation": ("0,Save,Sichern\n1,Close,Schließen", "may be one"),
}


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@pytest.mark.parametrize("header", FIRST_ROWS)
@streamed
def test_a_first_row_that_is_a_pair_is_read_and_one_that_may_be_is_said(streaming, header, suffix, tmp_path, capsys):
    others, what = FIRST_ROWS[header]
    content = f"{header}\n{others}\n".replace(",", "," if suffix == "csv" else "\t")
    file = write(tmp_path / f"pairs.{suffix}", content)
    pairs, said = read(file, streaming=streaming), capsys.readouterr().out
    assert pairs[-2:] == [("Save", "Sichern"), ("Close", "Schließen")]
    assert len(pairs) == (3 if what == "pair" else 2)
    assert (f"{file} has no header row: its first row, {header.replace(',', ' | ')}, is" in said) == (what == "pair")
    assert (f"The first row of {file} is taken for the names of its columns" in said) == (what == "may be one")
    if what == "pair":
        split = load_split(DatasetOptions(), "test", [str(file)])
        assert pairs[0] == ("Open file", "Datei öffnen") and len(split) == 3
        languages = {"source_lang": "en", "target_lang": "de", "streaming": streaming}
        assert read(file, **languages)[0] == ("Open file", "Datei öffnen")
        assert f"{header.replace(',', ' | ')}, is read as a pair, from en to de." in capsys.readouterr().out
        named = {"source_column": "Open file", "target_column": "Datei öffnen", "streaming": streaming}
        assert read(file, **named)[0] == ("Save", "Sichern")


@streamed
def test_two_equal_cells_are_no_header(streaming, tmp_path, capsys):
    file = write(tmp_path / "copies.tsv", "abc\tabc\nxyz\tzyx\n")
    assert read(file, streaming=streaming) == [("abc", "abc"), ("xyz", "zyx")]
    assert f"{file} has no header row: its first row, abc | abc, is read as a pair." in capsys.readouterr().out


@streamed
def test_a_file_is_read_without_a_header_if_the_one_before_has_none(streaming, tmp_path):
    train = write(tmp_path / "a.tsv", "Open file\tDatei öffnen\nNew\tNeu\n")
    validation = write(tmp_path / "b.tsv", "Save\tSichern\nClose\tSchließen\n")
    for languages in ({}, {"source_lang": "en", "target_lang": "de"}):
        files = {"train_file": [str(train)], "validation_file": [str(validation)]}
        splits = load(**files, **languages, streaming=streaming)
        assert texts(splits["train"]) == [("Open file", "Datei öffnen"), ("New", "Neu")]
        assert texts(splits["validation"]) == [("Save", "Sichern"), ("Close", "Schließen")]


@streamed
def test_columns_have_numbers_in_a_table_without_a_header(streaming, tmp_path, capsys):
    words = write(tmp_path / "words.csv", "hello,hallo\nworld,Welt\n")
    columns = {"source_column": "2", "target_column": "1", "streaming": streaming}
    assert read(words, **columns) == [("hallo", "hello"), ("Welt", "world")]
    assert f"{words} is read without a header row; its first row is hello | hallo." in capsys.readouterr().out
    forms = write(tmp_path / "forms.tsv", "go\tV;PST\twent\nsee\t\tsaw\n")
    columns = {"source_column": ["1", "2"], "target_column": ["3"]}
    assert read(forms, **columns, streaming=streaming) == [("go V;PST", "went"), ("see", "saw")]
    assert texts(load_split(DatasetOptions(**columns), "test", [str(forms)])) == [("go V;PST", "went"), ("see", "saw")]
    years = write(tmp_path / "years.tsv", "1\t2\nx\ty\n")
    assert read(years, source_column="1", target_column="2", streaming=streaming) == [("x", "y")]
    message = error(forms, source_column="1", target_column="4", streaming=streaming)
    assert "--source_column 1 and --target_column 4 must both be text columns; the columns of " in message
    assert f"{forms} are 1, 2, 3; text columns: 1, 2, 3." in message


@streamed
@pytest.mark.parametrize("suffix", ["tsv", "jsonl", "parquet"])
def test_columns_are_joined(suffix, streaming, tmp_path):
    """Empty ones leave no space; the number of a row is no text."""
    forms = [("go", "V;PST", "went"), ("see", None, "saw"), (" ", None, "x")]
    forms = [{"id": i, "lemma": lemma, "tags": tags, "form": form} for i, (lemma, tags, form) in enumerate(forms)]
    file = write(tmp_path / f"forms.{suffix}", forms)
    columns = {"source_column": ["lemma", "tags"], "target_column": "form"}
    pairs = read(file, **columns, streaming=streaming)
    assert pairs == [("go V;PST", "went"), ("see", "saw"), (None, "x")]
    assert texts(load_split(DatasetOptions(**columns), "test", [str(file)])) == pairs
    message = error(file, source_column=["lemma", "tag"], target_column="form", streaming=streaming)
    assert message.startswith("--source_column lemma tag and --target_column form must both be text columns; the ")


@pytest.mark.parametrize("kind", ["lang", "column"])
def test_a_header_that_is_missing_is_named_with_a_remedy(kind, tmp_path):
    file = write(tmp_path / "sounds.tsv", "ship\tschiff\nchin\tkinn\n")
    message = error(file, **{f"source_{kind}": "en", f"target_{kind}": "ipa"})
    remedy = "Name two of these columns with --source_column and --target_column or, if it is a pair, number them: "
    remedy += "--source_column 1 --target_column 2."
    assert message.startswith(f"{file} has no header row with --source_{kind} en and --target_{kind} ipa")
    assert message.endswith(f"its first row is ship | schiff. {remedy}")
    inflected = write(tmp_path / "forms.tsv", "go\tV;PST\twent\nsee\tV;PST\tsaw\n")
    said = f"The first row of {inflected}, go | V;PST | went, does not say which columns are source"
    assert said in error(inflected)
    named = write(tmp_path / "named.tsv", "lemma\tfeatures\tform\n" + inflected.read_text())
    assert "are lemma, features, form" in error(named)
    assert read(named, source_column="lemma", target_column="form") == [("go", "went"), ("see", "saw")]


PAIR = {"en": "two", "de": "zwei"}
FLAT = {"de": None, "id": 1, "nothing": None, "meta": {"a": 1}}, {"id": "x", "nothing": "x", "meta": "x", "note": "x"}
ROWS_OF_JSON = {  # the first 10 MB, and the last rows
    "flat": (PAIR | FLAT[0], PAIR | FLAT[1]),
    "nested": ({"translation": PAIR}, {"translation": PAIR | {"fr": "deux"}}),
}


@pytest.mark.parametrize("kind", ROWS_OF_JSON)
def test_rows_of_json_may_differ_after_the_first_chunk(kind, tmp_path):
    """`datasets` takes keys and types from the first 10 MB."""
    long, (early, late) = {"text": "a dog that runs " * 400}, ROWS_OF_JSON[kind]
    lines = [json.dumps(long | row) for row in [early] * 1700 + [late] * 3]
    pairs = read(write(tmp_path / "rows.jsonl", "\n".join(lines)), **ENGLISH_GERMAN)
    assert len(pairs) == 1703 and pairs[-1] == ("two", "zwei")


def test_values_that_are_no_texts_and_files_with_other_keys_are_told(tmp_path):
    mixed = write(tmp_path / "mixed.jsonl", '{"en": "one", "de": 1}\n{"en": "two", "de": "zwei"}\n')
    assert "In de, rows have values of several types; write all as texts." in error(mixed, **ENGLISH_GERMAN)
    for name, row in [("1.jsonl", PAIR), ("2.jsonl", PAIR | {"b": 1})]:
        write(tmp_path / "set" / name, [row])
    assert "rows differ in their keys, or in the types of their values" in error(tmp_path / "set" / "*.jsonl")


def test_endings_that_are_no_languages_have_no_directions(tmp_path, capsys):
    """As several corrections of each text."""
    source, one, two = (
        write(tmp_path / f"texts.{ending}", "".join(f"line {row} {ending}\n" for row in range(40)))
        for ending in ("src", "ref0", "ref1")
    )
    train = load(train_file=[source, one, source, two]).survey["train"]
    assert "direction" not in capsys.readouterr().out and train["several_targets"] == train["pairs"]


def test_columns_are_named_for_those_files_that_have_them(tmp_path):
    table = write(tmp_path / "qa.csv", "question,answer,id\nhow,so,1\nwhy,because,2\n")
    lines = write(tmp_path / "more.txt", "one\teins\n")
    named = {"source_column": "question", "target_column": "answer", "validation_file": lines}
    expected = [("how", "so"), ("why", "because"), ("one", "eins")]
    assert read(table, lines, **named) == expected
    assert read(lines, table, **named) == [expected[2], *expected[:2]]


@streamed
def test_languages_that_only_some_rows_have(streaming, tmp_path):
    words = [{"en": "one", "de": "eins"}, {"en": "two", "de": "zwei", "fr": "deux"}, {"de": "drei", "en": "three"}]
    file = write(tmp_path / "rows.jsonl", "".join(json.dumps({"translation": row}) + "\n" for row in words))
    assert read(file, **ENGLISH_GERMAN, streaming=streaming) == [("one", "eins"), ("two", "zwei"), ("three", "drei")]
    named = {"target_lang": "fr", "source_lang": "de", "streaming": streaming}
    assert read(file, **named) == [("eins", None), ("zwei", "deux"), ("drei", None)]
    assert "languages in translation: de, en, fr" in error(file, streaming=streaming)


ODD = {
    "semicolon.csv": ("en;de\na;b\n", "has one column, 'en;de'; its separator seems to be ';'"),
    "texts with commas.csv": ("en;de\na, b;c\na, b, c;d, e\n", "one column, 'en;de'; its separator seems to be ';'"),
    "commas.tsv": ("en,de\na,b\n", "has one column, 'en,de'; its separator seems to be ','"),
    "columns.txt": ("a\tb\tc\n" * 9, "has lines of 3 columns"),
    "field.json": ('{"version": 1, "data": [{"en": "a", "de": "b"}]}', "the keys version, data"),
    "columns.json": ('{"en": ["a", "c"], "de": ["b", "d"]}', "is no list of pairs: its rows have the keys en, de"),
    "lists.jsonl": ('{"en": ["a"], "de": "b"}\n{"en": ["c"], "de": "d"}', "are objects or lists; write them as texts"),
    "numbers.jsonl": ('{"en": 1, "de": 2}\n{"en": 3, "de": 4}', 'Numbers must be written as texts, such as "12"'),
    "unquoted.csv": ("en,de\na,b\nc, d,e\n", "quote fields with commas in a .csv, and replace tabs"),
    "words.json": ('{"one": "eins", "two": "zwei", "three": "drei"}', "the keys one, two, three"),
    "android.json": ('{"k1": {"en": "a", "de": "b"}, "k2": {"en": "a", "de": "b"}}', "the keys k1, k2"),
    "todo.po": ('msgid "Save"\nmsgstr ""\n', "it has no pairs"),
    "empty.tmx": (tmx([], "en"), "no pairs"),
    "ui.resx": ("x", "it has one language; make a .po file of two, for example with `prop2po`"),
    "a.zip": ("x", "unpack it"),
    "a.xlsx": ("x", "save it as .csv"),
    "train.en": ("x", "Of two parallel files, give both"),
    "train": ("x", "it must end in one of: .json, "),
}


@pytest.mark.parametrize("name", ODD)
def test_other_formats_and_layouts_are_named(name, tmp_path):
    content, expected = ODD[name]
    assert expected in error(write(tmp_path / name, content))


def test_a_message_that_cannot_be_written_is_not_blamed_on_the_data():
    with pytest.raises(OSError, match="No space left"), reading_data("pairs.tsv"):
        raise OSError(errno.ENOSPC, "No space left on device")
