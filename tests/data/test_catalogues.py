"""Files that translate-toolkit reads: their pairs, how they are filled, and doubtful translations."""

import gettext
import io
import shutil
import subprocess
import sys

import pytest

from vanilla_transformer.data.catalogues import open_translations
from vanilla_transformer.errors import UserError

HEADER = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=%s\\n"\n"Plural-Forms: nplurals=3; plural=n;\\n"\n\n'


def po(*messages: str, charset: str = "UTF-8") -> str:
    return HEADER % charset + "\n".join(messages)


def message(source: str, target: str, before: str = "") -> str:
    return f'{before}msgid "{source}"\nmsgstr "{target}"\n'


def plural(*forms: str) -> str:
    lines = (f'msgstr[{number}] "{form}"\n' for number, form in enumerate(forms))
    return 'msgid "a dog"\nmsgid_plural "%d dogs"\n' + "".join(lines)


def xliff(*units: str, head: str = "") -> str:
    body = "".join(f'   <trans-unit id="{number}">{unit}</trans-unit>\n' for number, unit in enumerate(units))
    name = 'xmlns="urn:oasis:names:tc:xliff:document:1.2"'
    file = '<file source-language="en" target-language="de" original="x" datatype="plaintext">'
    return f'{head}<xliff version="1.2" {name}>\n  {file}<body>\n{body}  </body></file>\n</xliff>\n'


def xliff2(*segments: str) -> str:
    body = "".join(f'  <unit id="{number}">{segment}</unit>\n' for number, segment in enumerate(segments))
    name = 'xmlns="urn:oasis:names:tc:xliff:document:2.0" srcLang="en" trgLang="de"'
    return f'<xliff version="2.0" {name}>\n <file id="f">\n{body} </file>\n</xliff>'


def qt(*messages: str) -> str:
    body = "".join(f"    {message}\n" for message in messages)
    start = '<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE TS>\n<TS version="2.1" language="de_DE">\n'
    return f"{start}<context>\n    <name>Main</name>\n{body}</context>\n</TS>\n"


def side(source: str, target: str = "", attributes: str = "") -> str:
    """The two sides of a unit of XLIFF."""
    return f"<source>{source}</source>" + (f"<target{attributes}>{target}</target>" if target else "")


# --------------------------------------------------------------------------------------------------------------- pairs

OPEN = ("Open", "Öffnen")
FILES = {  # suffix and content -> pairs
    "translated": (".po", po(message(*OPEN), message("Save", "")), [OPEN]),
    "fuzzy and obsolete": (".po", po(message("a", "b", "#, fuzzy\n"), '#~ msgid "c"\n#~ msgstr "d"\n'), []),
    "lines": (".po", 'msgid ""\n"first\\n"\n"second"\nmsgstr "eins\\nzwei"\n', [("first\nsecond", "eins\nzwei")]),
    "quotes": (".po", po(message(r"Open \"%s\"", r"\"%s\" öffnen")), [('Open "%s"', '"%s" öffnen')]),
    "separators": (".po", "\ufeff" + message("one\u2028two\x85", "eins\u2028"), [("one\u2028two\x85", "eins\u2028")]),
    "Windows": (".po", po(message(*OPEN)).replace("\n", "\r\n"), [OPEN]),
    "mixed line ends": (".po", po(message("a", "b")) + "\r\n" + message(*OPEN), [("a", "b"), OPEN]),
    "Latin-1": (".po", po(message(*OPEN), charset="ISO-8859-1").encode("latin-1"), [OPEN]),
    "charset in a comment": (".po", "# charset=latin-1\n" + po(message(*OPEN)), [OPEN]),
    "charset in another line": (
        ".po",
        po(message("dog", "犬"), charset="EUC-JP").replace("charset", '"\n"charset').encode("euc-jp"),
        [("dog", "犬")],
    ),
    "template": (".pot", po(message("Open", ""), charset="CHARSET"), []),
    "three forms": (".po", po(plural("pies", "psy", "psów")), [("a dog", "pies"), ("%d dogs", "psów")]),
    "one form": (".po", plural("犬"), [("%d dogs", "犬")]),
    "a form is missing": (".po", po(plural("pies", "psy")), []),
    "XLIFF": (".xliff", xliff(side(*OPEN), side("Save")), [OPEN]),
    "XLIFF without a namespace": (".xlf", xliff(side(*OPEN)).replace("xmlns", "id"), [OPEN]),
    "XLIFF states": (
        ".xlf",
        xliff(*(side("a", state, f' state="{state}"') for state in ("needs-translation", "new", "final"))),
        [("a", "final")],
    ),
    "XLIFF elements": (".sdlxliff", xliff(side("Hi <g id='1'>A</g>", "Ho <x id='1'/>B")), [("Hi A", "Ho B")]),
    "XLIFF 2": (
        ".xlf",
        xliff2(
            f"<segment>{side(*OPEN)}</segment>",
            f'<segment state="initial">{side("Save", "Sichern")}</segment>',
            f"<segment>{side('One.', 'Eins.')}</segment><segment>{side('Two.', 'Zwei.')}</segment>",
        ),
        [OPEN, ("One.", "Eins."), ("Two.", "Zwei.")],
    ),
    "Qt": (
        ".ts",
        qt(
            "<message><source>Open</source><translation>Öffnen</translation></message>",
            '<message><source>a</source><translation type="unfinished">b</translation></message>',
            '<message><source>a</source><translation type="vanished">b</translation></message>',
            '<message numerus="yes"><source>%n dogs</source><translation><numerusform>%n Hund</numerusform>'
            "<numerusform>%n Hunde</numerusform></translation></message>",
        ),
        [OPEN, ("%n dogs", "%n Hunde")],
    ),
    "Qt phrases": (".qph", "<QPH><phrase><source>Open</source><target>Öffnen</target></phrase></QPH>", [OPEN]),
    "glossary": (
        ".tbx",
        '<martif type="TBX" xml:lang="en"><text><body><termEntry id="1">'
        '<langSet xml:lang="en"><tig><term>Open</term></tig></langSet>'
        '<langSet xml:lang="de"><tig><term>Öffnen</term></tig></langSet></termEntry></body></text></martif>',
        [OPEN],
    ),
    "Haiku": (".catkeys", "1\tGerman\tapplication/x\t123\nOpen\tmenu\t\tÖffnen\nSave\tmenu\t\t\n", [OPEN]),
}  # fmt: skip


def encoded(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


@pytest.mark.parametrize("case", FILES)
def test_translated_messages_are_pairs(case):
    suffix, content, pairs = FILES[case]
    assert list(open_translations(encoded(content), suffix).pairs()) == pairs


ESCAPES = {
    r"\atimed out\n": "\atimed out\n",
    r"\033[1mbold\0330": "\033[1mbold\0330",
    r"\x1b[1mhex\x1B[0m": "\033[1mhex\033[0m",
    r"\b\f\v\t\r\"\\n": '\b\f\v\t\r"\\n',
    r"\303\266\\303": "ö\\303",
}


@pytest.mark.parametrize("charset", ["UTF-8", "ISO-8859-1"])
def test_texts_are_those_that_gettext_sees(charset, tmp_path):
    expected = {f"{number} {text}": text for number, text in enumerate(ESCAPES.values())}
    if charset != "UTF-8":
        expected = {source.replace("ö", "Ã¶"): target.replace("ö", "Ã¶") for source, target in expected.items()}
    content = po(*(message(f"{number} {text}", text) for number, text in enumerate(ESCAPES)), charset=charset).encode()
    assert dict(open_translations(content, ".po").pairs()) == expected
    if shutil.which("msgfmt"):
        (tmp_path / "a.po").write_bytes(content)
        subprocess.run(["msgfmt", "-o", tmp_path / "a.mo", tmp_path / "a.po"], check=True, stderr=subprocess.DEVNULL)
        compiled = (tmp_path / "a.mo").read_bytes()
        assert dict(open_translations(compiled, ".mo").pairs()) == expected
        assert expected.items() <= gettext.GNUTranslations(io.BytesIO(compiled))._catalog.items()


BOMB = "".join(f'<!ENTITY e{number} "{f"&e{number - 1};" * 10}">' for number in range(1, 10))
ENTITIES = f'<!DOCTYPE x [<!ENTITY e0 "text"><!ENTITY b "&e0;"><!ENTITY c SYSTEM "file:///etc/hostname">{BOMB}]>\n'
DAMAGED = {
    "entities": (".xlf", xliff(side("&b;", "&c;"), head=ENTITIES), "defines entities"),
    "many entities": (".qph", f"{ENTITIES}<QPH><phrase><source>&e9;</source></phrase></QPH>", "entit"),
    "another root": (".xlf", "<a/>", "no .xlf file"),
    "TypeScript": (".ts", "export const x = 1;", "no .ts file"),
    "cut": (".xliff", xliff(side(*OPEN))[:-20], "no .xliff file"),
    "no .po": (".po", 'msgid "a"\nmsgwrong "b"\n', "Syntax error on line 2"),
    "a path": (".po", __file__, "Syntax error on line 1"),
    "UTF-8": (".po", message(*OPEN).encode("latin-1"), "'utf-8' codec"),
    "an unknown charset": (".po", po(charset="nothing"), "unknown encoding: nothing"),
    "no .mo": (".mo", "x", "no .mo file"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_one_sentence(case):
    suffix, content, expected = DAMAGED[case]
    with pytest.raises((ValueError, LookupError), match=expected):
        open_translations(encoded(content), suffix)


def test_a_missing_library_is_named_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "translate.storage", None)
    with pytest.raises(UserError, match=r"\.po files need `pip install 'translate-toolkit>=3\.20'`"):
        open_translations(b"", ".po")


# ------------------------------------------------------------------------------------------------------------- filling

# Lines that begin with - are there before filling only, those with + after it.
PO = """
 # Of a small program.
 msgid ""
 msgstr ""
 "Content-Type: text/plain; charset=UTF-8\\n"
 "Plural-Forms: nplurals=3; plural=n;\\n"


 #= c-format
-#, range: 0..1
+#, fuzzy, range: 0..1
 msgid "one"
-msgstr ""
+msgstr "NEU"

 #~| msgid "older"
 #~ msgid "old"
 #~ msgstr "alt"

 #  odd comment
 #: a.c:1
 #~ msgid "x"
 #~ msgstr ""

 msgid "_: of KDE\\n"
 "text"
-msgstr ""
-""
+msgstr "NEU"
 \x20
 msgid "a long line that is not wrapped as gettext would wrap it, and that is translated already, é"
 msgstr "\\033\\a\\x1b"

 #. note
+#, fuzzy
 #| msgid "before"
 msgctxt "menu"
 msgid "%d dog"
 msgid_plural "%d dogs"
 msgstr[0] "ein\\033"
 " Hund"
-msgstr[1] ""
+msgstr[1] "NEU"
+msgstr[2] "NEU"
 # the end
"""
XLIFF = """
 <?xml version="1.0" encoding="UTF-8" ?>
 <!-- of a small program -->
 <xliff version="1.2" xmlns='urn:oasis:names:tc:xliff:document:1.2'>
  <file source-language="en" target-language="de" original="x" datatype="plaintext"><body>
    <trans-unit id="1"
         approved="no">
      <source>Open &quot;%s&quot; &#8230;</source>
+     <target state="needs-translation">NEU</target>
      <note />
    </trans-unit>
    <trans-unit id="2" ><source>Done</source><target>Fertig</target></trans-unit>
-   <trans-unit id="3"><source>Hi <x id='1' /> you</source><target/></trans-unit>
+   <trans-unit id="3"><source>Hi <x id="1"/> you</source><target state="translated">NEU</target></trans-unit>
    <trans-unit id="4" translate="no"><source>OK</source></trans-unit>
  </body></file>
 </xliff>
"""
XLIFF_2 = """
 <xliff version="2.0" xmlns="urn:oasis:names:tc:xliff:document:2.0" srcLang="en" trgLang="de">
   <file id="f">
     <unit id="1">
-      <segment>
+      <segment state="initial">
         <source>Open</source>
+        <target>NEU</target>
       </segment>
     </unit>
     <unit id="2" ><segment><source>Done</source><target>Fertig</target></segment></unit>
   </file>
 </xliff>
"""
QT = """
 <?xml version="1.0" encoding="utf-8"?>
 <!DOCTYPE TS>
 <TS version="2.1" language="de_DE">
 <context>
     <name>Main</name>
     <message>
         <source>Don&apos;t &quot;&amp;Open&quot;</source>
-        <translation type="unfinished"></translation>
+        <translation type="unfinished">NEU</translation>
     </message>
     <message numerus="yes">
         <source>%n dog(s)</source>
-        <translation type="unfinished">
-            <numerusform></numerusform>
-            <numerusform></numerusform>
+        <translation>
+            <numerusform>NEU</numerusform>
+            <numerusform>NEU</numerusform>
         </translation>
     </message>
 </context>
 </TS>
"""
ENCODINGS = {"utf-8": "Ł", "utf-16": "Ł", "iso-8859-1": "&#321;"}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_catalogue_in_xml_keeps_its_encoding(encoding):
    head = f'<?xml version="1.0" encoding="{encoding}"?>\n'
    segments = "<source>ä</source>\n <seg-source><mrk>ä</mrk></seg-source>"
    catalogue = open_translations(xliff(segments, head=head).encode(encoding), ".xlf")
    catalogue.fill(catalogue.units[0], ["Ł\x1b\ufffe"], is_doubtful=False)
    target = f'\n <target state="translated">{ENCODINGS[encoding]}</target>'
    assert catalogue.content() == xliff(segments + target, head=head).encode(encoding)


LAYOUTS = {
    "of Unix": str,
    "of Windows": lambda text: text.replace("\n", "\r\n"),
    "with a byte order mark": lambda text: "\ufeff" + text,
    "without a last line end": lambda text: text.rstrip("\n"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("suffix, diff", [(".po", PO), (".xlf", XLIFF), (".xliff", XLIFF_2), (".ts", QT)])
def test_a_filled_catalogue_differs_in_the_filled_lines_alone(suffix, diff, layout):
    lines = diff.removeprefix("\n").removesuffix("\n").split("\n")
    texts = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in kept) for kept in (" -", " +"))
    before, after = (LAYOUTS[layout](text).encode() for text in texts)
    catalogue = open_translations(before, suffix)
    assert catalogue.content() == before
    todo = [unit for unit in catalogue.units if not all(catalogue.targets(unit))]
    for number, unit in enumerate(todo):
        catalogue.fill(unit, [text or "NEU" for text in catalogue.targets(unit)], is_doubtful=number % 2 == 0)
    assert catalogue.content() == after
