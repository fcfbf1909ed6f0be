"""`vanilla-transformer translate --catalogue`: the untranslated messages of a file, and nothing else."""

import re
import shutil
import subprocess

import pytest

from vanilla_transformer.__main__ import main
from vanilla_transformer.commands import catalogue as module
from vanilla_transformer.commands.catalogue import fill_catalogue
from vanilla_transformer.data.texts import PLACEHOLDERS

HEADER = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n"Plural-Forms: nplurals=%d; plural=%s;\\n"\n'
TODO = (
    HEADER % (2, "(n != 1)")
    + """
msgctxt "menu"
msgid "Open file"
msgstr ""

#, fuzzy
msgid "Guessed"
msgstr "Geraten"

#, c-format
msgid "%d file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] ""

msgid "It changed.\\n\\nReload?\\n"
msgstr ""

msgid "Press <b>Ctrl</b>"
msgstr ""

msgid "  "
msgstr ""

#~ msgid "Gone"
#~ msgstr ""
"""
)


def without_tags(texts: list[str], **generation) -> list[str]:
    """Stands in for a translator that keeps all but tags."""
    return [text.replace("<b>", "").replace("</b>", "").swapcase().replace("%D", "%d") for text in texts]


def fill(content: str, translate=without_tags, suffix=".po", tmp_path=None) -> str:
    source, target = tmp_path / f"todo{suffix}", tmp_path / f"done{suffix}"
    source.write_bytes(content.encode())
    fill_catalogue(translate, source, target)
    if suffix == ".po" and shutil.which("msgfmt"):
        check = "--check" if "charset" in content else "--check-format"
        subprocess.run(["msgfmt", check, "-o", "/dev/null", target], check=True)
    return target.read_bytes().decode()


TRANSLATIONS = {
    "Open file": '"oPEN FILE"',
    r"It changed.\n\nReload?\n": '""\n"iT CHANGED.\\n"\n"\\n"\n"rELOAD?\\n"',
    "Press <b>Ctrl</b>": '"pRESS cTRL"',
}


def test_untranslated_messages_are_filled_and_doubtful_ones_marked(tmp_path, capsys):
    expected = TODO.replace('[0] ""', '[0] "%d FILE"').replace('[1] ""', '[1] "%d FILES"')
    for source, target in TRANSLATIONS.items():
        expected = expected.replace(f'msgid "{source}"\nmsgstr ""', f'msgid "{source}"\nmsgstr {target}')
    expected = expected.replace('msgid "Press', '#, fuzzy\nmsgid "Press')
    assert fill(TODO, tmp_path=tmp_path) == expected
    assert "done.po: 4 messages translated; of these, 1 doubtful and marked as fuzzy" in capsys.readouterr().err


FORMS = {  # how many forms the language has, and those that are given -> all forms, and whether they are doubtful
    "one": (1, [""], ["%d FILES"], False),
    "two": (2, ["", ""], ["%d FILE", "%d FILES"], False),
    "one of two": (2, ["Mein", ""], ["Mein", "%d FILES"], False),
    "three": (3, ["", "", ""], ["%d FILE", "%d FILES", "%d FILES"], True),
    "one is missing": (3, ["%d Datei", "%d Dateien"], ["%d Datei", "%d Dateien", "%d FILES"], False),
    "unknown": (None, ["", ""], ["%d FILE", "%d FILES"], False),
}


def plural(forms: list[str]) -> str:
    return "".join(f'msgstr[{number}] "{form}"\n' for number, form in enumerate(forms))


@pytest.mark.parametrize("case", FORMS)
def test_plural_forms_that_no_model_has_learnt_are_doubtful(case, tmp_path):
    count, given, expected, is_doubtful = FORMS[case]
    header = HEADER % (count, f"n%{count}") if count else ""
    start = '\n#, no-c-format\nmsgid "%d file"\nmsgid_plural "%d files"\n'
    marked = start.replace("#,", "#, fuzzy,") if is_doubtful else start
    assert fill(header + start + plural(given), tmp_path=tmp_path) == header + marked + plural(expected)


FORMATS = {  # as flags of gettext
    "c": ["%dx%d", "%.*s", "%o of %Lf", "%'d items", "%d%s", "%ith", "%5.1f%%"],
    "python": ["%(price).2f", "%s"],
    "python-brace": ["{name:>10}", "{total:,.2f}", "{a[0]}", "{{ {} }}"],
    "qt": ["%L1 of %2", "%n"],
    "perl-brace": ["{name}"],
    "objc": ["%@ and %1$@"],
    "boost": ["%|1$5| of %2%"],
}
ENGINES = {
    "all": lambda text: PLACEHOLDERS.sub("", text),
    "the first": lambda text: PLACEHOLDERS.sub("", text, count=1),
    "its sign": lambda text: re.sub(r"[%{}$]", "", text, count=1),
    "its kind": lambda text: text.translate(str.maketrans("dsoifnma@1}", "sdxuecnb$7]")),
    "another": lambda text: text + "%s{x}",
}


@pytest.mark.parametrize("lost", ENGINES)
def test_a_lost_argument_is_marked(lost, tmp_path):
    messages = (f'\n#, {kind}-format\nmsgid "Is {text} so"\nmsgstr ""\n' for kind in FORMATS for text in FORMATS[kind])
    content = HEADER % (2, "(n != 1)") + "".join(messages)
    filled = fill(content, lambda texts: list(map(ENGINES[lost], texts)), tmp_path=tmp_path)
    assert filled.count("fuzzy") == content.count("-format")
    assert "fuzzy" not in fill(content, list, tmp_path=tmp_path)


def test_elements_in_a_text_of_xliff_are_missed(tmp_path):
    content = (
        '<xliff version="1.2"><file source-language="en" target-language="de" original="x"><body>\n'
        '<trans-unit id="1"><source>Hi <x id="1"/> you</source></trans-unit>\n</body></file></xliff>\n'
    )
    expected = content.replace("</source>", '</source><target state="needs-translation">hI YOU</target>')
    assert fill(content, suffix=".XLF", tmp_path=tmp_path) == expected


def test_a_translation_that_an_encoding_lacks_makes_it_utf_8(tmp_path):
    content = TODO.replace("UTF-8", "ISO-8859-1").replace("Geraten", "Geprüft")
    (tmp_path / "a.po").write_bytes(content.encode("latin-1"))
    fill_catalogue(without_tags, tmp_path / "a.po", tmp_path / "a.po")
    expected = fill(content.replace("ISO-8859-1", "UTF-8"), tmp_path=tmp_path).replace("UTF-8", "ISO-8859-1")
    assert (tmp_path / "a.po").read_bytes() == expected.encode("latin-1")
    (tmp_path / "a.po").write_bytes(content.encode("latin-1"))
    fill_catalogue(lambda texts: ["Łódź"] * len(texts), tmp_path / "a.po", tmp_path / "a.po")
    filled = (tmp_path / "a.po").read_text(encoding="utf-8")
    assert "charset=UTF-8" in filled and "Geprüft" in filled and "Łódź" in filled


def test_what_is_filled_is_written_after_each_part_and_another_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MESSAGES_AT_A_TIME", 1)
    source, calls = tmp_path / "todo.po", []
    source.write_text(TODO)

    def fails_later(texts, **generation):
        calls.append(texts)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return [text.upper() for text in texts]

    with pytest.raises(RuntimeError, match="out of memory"):
        fill_catalogue(fails_later, source, source)
    fill_catalogue(fails_later, source, source)
    assert calls[0] == ["Open file"] and calls[3:] == calls[2:3] + [["Press <b>Ctrl</b>"]]
    fill_catalogue(fails_later, source, source)
    assert len(calls) == 5


def test_the_command_fills_a_catalogue(folder, tmp_path):
    (tmp_path / "todo.po").write_text(TODO)
    source, target = str(tmp_path / "todo.po"), tmp_path / "a.po"
    main(["translate", "--model", folder, "--catalogue", source, "--output", str(target)])
    assert target.read_text().count('msgstr ""\n\n') == 1


WRONG = {
    "--catalogue x.po": "--catalogue and --output go together",
    "--output x.po": "--catalogue and --output go together",
    "--catalogue x.po --output y.po --n_best 2": "--n_best and --mbr translate lines",
    "--catalogue missing.po --output y.po": "--catalogue missing.po could not be read",
    "--catalogue broken.po --output y.po": "--catalogue broken.po could not be read: Syntax error on line 2",
    "--catalogue latin.po --output y.po": "--catalogue latin.po could not be read: 'utf-8' codec",
    "--catalogue empty.po --output folder": "/folder is not a file; choose another name",
    "--catalogue empty.po --output y.xliff": "--output y.xliff must end in .po",
    "--catalogue empty.po --output none/y.po": "--output none/y.po cannot be written: none is not a directory",
    "--catalogue film.srt --output y.po": "--catalogue film.srt is not filled; it must end in one of: .po, .pot",
    "--catalogue a.po.gz --output y.po": "--catalogue a.po.gz is not filled",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_use_is_one_sentence(options, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.po").write_text('msgid "a"\nmsgwrong "b"\n')
    (tmp_path / "latin.po").write_bytes('msgid "\u00e9"\nmsgstr ""\n'.encode("latin-1"))
    (tmp_path / "empty.po").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as ending:
        main(["translate", "--model", folder, *options.split()])
    assert WRONG[options] in f"{ending.value.code} {capsys.readouterr().err}"
    assert not (tmp_path / "y.po").exists()


def test_a_template_is_filled_into_a_catalogue(folder, tmp_path):
    (tmp_path / "app.pot").write_text('msgid "No!"\nmsgstr ""\n')
    main(["translate", "--model", folder, "--catalogue", f"{tmp_path}/app.pot", "--output", f"{tmp_path}/de.po"])
    assert (tmp_path / "de.po").read_text().startswith("msgid")  # whatever the model wrote
