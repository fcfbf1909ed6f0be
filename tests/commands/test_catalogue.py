"""`vanilla-transformer translate --catalogue`: the untranslated messages of a .po file, and nothing else."""

import shutil
import subprocess

import polib
import pytest
from helpers import save_translator, writing_translator

from vanilla_transformer.__main__ import main
from vanilla_transformer.commands import catalogue as module
from vanilla_transformer.commands.catalogue import fill_catalogue

CATALOGUE = """# Of a small program.
msgid ""
msgstr ""
"Language: de\\n"
"Content-Type: text/plain; charset=CHARSET\\n"
"Plural-Forms: nplurals=2; plural=(n != 1);\\n"

#: main.c:12
msgctxt "menu"
msgid "Open file"
msgstr ""

msgid "Cafe\u00e9"
msgstr "Kaffee"

#, fuzzy
msgid "Guessed"
msgstr "Geraten"

#, c-format
msgid "%d file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] ""

msgid "It changed.\\n\\nReload {name}?\\n"
msgstr ""

msgid "Press <b>Ctrl</b>"
msgstr ""

#~ msgid "Gone"
#~ msgstr ""
"""


def without_tags(texts: list[str], **generation) -> list[str]:
    """Stands in for a translator that keeps all but tags."""
    return [text.replace("<b>", "").replace("</b>", "").swapcase().replace("%D", "%d") for text in texts]


@pytest.fixture(params=["UTF-8", "ISO-8859-1"])
def source(request, tmp_path):
    path = tmp_path / "todo.po"
    path.write_text(CATALOGUE.replace("CHARSET", request.param), encoding=request.param)
    return path


def test_untranslated_messages_are_filled_and_all_else_stays(source, tmp_path, capsys):
    fill_catalogue(without_tags, source, tmp_path / "done.po")
    before = polib.pofile(source.read_text(encoding="utf-8" if "UTF-8" in source.read_text("latin-1") else "latin-1"))
    done = polib.pofile(tmp_path / "done.po")
    found = {one.msgid: one.msgstr or one.msgstr_plural for one in done if not one.obsolete}
    assert found == {
        "Open file": "oPEN FILE",
        "Cafe\u00e9": "Kaffee",
        "Guessed": "Geraten",
        "%d file": {0: "%d FILE", 1: "%d FILES"},
        "It changed.\n\nReload {name}?\n": "iT CHANGED.\n\nrELOAD {NAME}?\n",
        "Press <b>Ctrl</b>": "pRESS cTRL",
    }
    assert [one.msgid for one in done if one.fuzzy] == [
        "Guessed",
        "It changed.\n\nReload {name}?\n",
        "Press <b>Ctrl</b>",
    ]
    assert done.header == before.header and done[0].msgctxt == "menu" and done[0].occurrences == [("main.c", "12")]
    assert done.metadata == before.metadata | {"Content-Type": "text/plain; charset=UTF-8"}
    assert "done.po: 4 messages translated; 2 with other placeholders, or empty, marked" in capsys.readouterr().err
    if shutil.which("msgfmt"):
        subprocess.run(["msgfmt", "--check-format", "-o", "/dev/null", tmp_path / "done.po"], check=True)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({0: ""}, {0: "%d FILES"}),
        ({0: "", 1: "", 2: ""}, {0: "%d FILE", 1: "%d FILES", 2: "%d FILES"}),
        ({0: "Mein", 1: ""}, {0: "Mein", 1: "%d FILES"}),
        ({}, {0: "%d FILE", 1: "%d FILES"}),
    ],
)
def test_a_language_has_any_number_of_plural_forms(given, expected):
    message = polib.POEntry(msgid="%d file", msgid_plural="%d files", msgstr_plural=given)
    assert module.fill(without_tags, [message]) == 0
    assert message.msgstr_plural == expected


def test_what_is_filled_is_written_after_each_part_and_another_run_goes_on(source, monkeypatch):
    monkeypatch.setattr(module, "MESSAGES_AT_A_TIME", 1)
    calls = []

    def fails_later(texts, **generation):
        calls.append(texts)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return [text.upper() for text in texts]

    with pytest.raises(RuntimeError, match="out of memory"):
        fill_catalogue(fails_later, source, source)
    fill_catalogue(fails_later, source, source)
    assert calls[0] == ["Open file"] and calls[3:] == calls[2:3] + [["Press <b>Ctrl</b>"]]
    assert not polib.pofile(source).untranslated_entries()


def test_the_command_fills_a_catalogue(text_tokenizer, source, tmp_path, capsys):
    folder = save_translator(writing_translator(text_tokenizer, max_new_tokens=5), tmp_path / "model")
    main(["translate", "--model", folder, "--catalogue", str(source), "--output", str(tmp_path / "done.po")])
    assert not polib.pofile(tmp_path / "done.po").untranslated_entries()


WRONG = {
    "--catalogue x.po": "--catalogue and --output go together",
    "--output x.po": "--catalogue and --output go together",
    "--catalogue x.po --output y.po --n_best 2": "--n_best and --mbr translate lines",
    "--catalogue missing.po --output y.po": "--catalogue missing.po could not be read",
    "--catalogue broken.po --output y.po": "--catalogue broken.po could not be read: Syntax error in po file",
    "--catalogue latin.po --output y.po": "--catalogue latin.po could not be read: 'utf-8' codec",
    "--catalogue empty.po --output folder": "/folder is not a file; choose another name",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_use_is_one_sentence(options, text_tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.po").write_text('msgid "a"\nmsgwrong "b"\n')
    (tmp_path / "latin.po").write_bytes('msgid "\u00e9"\nmsgstr ""\n'.encode("latin-1"))
    (tmp_path / "empty.po").write_text("")
    (tmp_path / "folder").mkdir()
    folder = save_translator(writing_translator(text_tokenizer), tmp_path / "model")
    with pytest.raises(SystemExit) as ending:
        main(["translate", "--model", folder, *options.split()])
    assert WRONG[options] in f"{ending.value.code} {capsys.readouterr().err}"
    assert not (tmp_path / "y.po").exists()
