"""Translation files, such as .po and .xliff, through translate-toolkit: their pairs, and how to fill them."""

import html
import re
import struct
from collections.abc import Iterator
from functools import partial

from ..errors import UserError
from .options import CATALOGUES

GETTEXT, XLIFF = (".po", ".pot"), (".xliff", ".xlf")
# In no comment, and possibly in another line than the name of its field.
CHARSET = re.compile(rb'(?m)^[^#\n]*"[^"\n]*charset=\s*([\w.:-]+)')
ESCAPES = re.compile(r'\\([abfnrtv"\\])|((?:\\[0-7]{1,3}|\\x[0-9a-fA-F]+)+)')
ESCAPED = dict(zip('abfnrtv"\\', '\a\b\f\n\r\t\v"\\', strict=True))
CONTROLS = re.compile("[\0-\x1f\x7f]")
DECLARATION = re.compile(r"(?s)(\ufeff?(?:<\?xml\b.*?\?>\s*)?)(.*)")
NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that it may not have
XML_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
FARTHEST = 1000  # lines, after which different texts are not compared any more


def open_translations(content: bytes, suffix: str) -> "TranslationFile":
    """Reads the content of a file with one of the suffixes `TRANSLATION_FILES`; those in `CATALOGUES` can be filled.

    Raises:
        ValueError: It is no such file, or defines entities, which could multiply or name other files.
        LookupError: Its encoding is unknown.
        UserError: translate-toolkit is not installed.
    """
    if suffix in GETTEXT:
        return Gettext(content, suffix)
    return Xml(content, suffix) if suffix in CATALOGUES else TranslationFile(content, suffix)


class TranslationFile:
    """The messages of a file that translate-toolkit reads.

    Attributes:
        store: The file, as an object of translate-toolkit.
        units: The messages that can be translated, as objects of translate-toolkit.
    """

    def __init__(self, content: bytes, suffix: str):
        self.suffix, self.store = suffix, parse(content, suffix)
        self.units = [unit for unit in self.store.units if unit.istranslatable() and not unit.isobsolete()]

    def sources(self, unit) -> list[str]:
        """The source of a message or, if it has plural forms, its singular and its plural; some formats have one."""
        return strings(unit.source)

    def targets(self, unit) -> list[str]:
        """The translation of a message or, if it has plural forms, one for each; those that are missing are empty."""
        return strings(unit.target)

    def is_draft(self, unit) -> bool:
        """Whether the translation of a message is marked as new or doubtful."""
        if not hasattr(unit, "addalttrans"):
            return unit.isfuzzy()
        # Of XLIFF 1, in which few tools approve anything.
        node = unit.target_dom
        return not unit.isapproved() and node is not None and node.get("state", "").startswith(("new", "needs"))

    def is_format(self, unit) -> bool:
        """Whether the message says that a program puts arguments into it."""
        return False

    def has_elements(self, unit) -> bool:
        """Whether the source has elements of XML in its text, which a translation of the text lacks."""
        return False

    def pairs(self) -> Iterator[tuple[str, str]]:
        """The source and the translation of each message that is translated and no draft.

        Of a message with plural forms, its plural and the last form are a pair; its singular and the first form are
        one if the language has more than one.
        """
        for unit in self.units:
            sources, targets = self.sources(unit), self.targets(unit)
            if all(targets) and not self.is_draft(unit):
                if len(sources) > 1 and len(targets) > 1:
                    yield sources[0], targets[0]
                yield sources[-1], targets[-1]


class Gettext(TranslationFile):
    """A catalogue of gettext, whose texts are those that gettext sees."""

    def __init__(self, content: bytes, suffix: str):
        found = CHARSET.search(content)
        name = "utf-8" if found is None else found[1].decode()
        # A template has the word CHARSET in place of a name.
        self.encoding, self.written_in = ("utf-8", "ascii") if name == "CHARSET" else (name, name)
        self.lines = content.decode(self.encoding).split("\n")  # with the carriage returns of Windows
        text = "\n".join(self.lines).removeprefix("\ufeff").replace("\r\n", "\n")
        # In UTF-8, since translate-toolkit 3.20 decodes others as if they were.
        super().__init__(CHARSET.sub(name_utf8, text.encode(), count=1), suffix)
        count = self.store.getheaderplural()[0] or ""
        self.plural_forms = min(int(count), 6) if count.isdecimal() else 0  # no language has more
        self.filled = set()  # the numbers of the first lines of filled messages

    def sources(self, unit) -> list[str]:
        return [self.unescape(lines) for lines in (unit.msgid, unit.msgid_plural) if lines]

    def targets(self, unit) -> list[str]:
        if not unit.hasplural():
            return [self.unescape(unit.msgstr)]
        forms = [self.unescape(unit.msgstr[number]) for number in sorted(unit.msgstr)]
        return forms + [""] * (self.plural_forms - len(forms))

    def unescape(self, lines: list[str]) -> str:
        """The text of quoted lines; translate-toolkit knows fewer escapes."""
        return ESCAPES.sub(partial(unescaped, encoding=self.encoding), "".join(line[1:-1] for line in lines))

    def is_format(self, unit) -> bool:
        """Whether it has the flag `c-format` or the like."""
        return bool(re.search(r"(?<!no-)\b[a-z]+(-brace)?-format\b", " ".join(unit.typecomments)))

    def fill(self, unit, targets: list[str], is_doubtful: bool):
        """Gives a message its translation, one text for each plural form, and marks it if that is doubtful."""
        if unit.hasplural():
            given = {number: lines for number, lines in unit.msgstr.items() if self.unescape(lines)}
            unit.target = dict(enumerate(targets))
            unit.msgstr |= given  # with their escapes and line breaks
        else:
            unit.target = targets[0]
        unit.markfuzzy(is_doubtful)
        self.filled.add(unit.line_number)

    def content(self) -> bytes:
        """The file with all that was filled in, in its encoding or, if that lacks a character, in UTF-8.

        All other lines are those of the file that was read, byte for byte.
        """
        lines, stop = list(self.lines), len(self.lines)
        for unit in reversed(self.store.units):
            if unit.line_number in self.filled:
                lines[unit.line_number - 1 : stop] = filled_lines(unit, lines[unit.line_number - 1 : stop])
            stop = unit.line_number - 1
        text = "\n".join(lines)
        try:
            return text.encode(self.written_in)
        except UnicodeEncodeError:
            return CHARSET.sub(name_utf8, text.encode(), count=1)


class Xml(TranslationFile):
    """A catalogue in XML, such as XLIFF."""

    def __init__(self, content: bytes, suffix: str):
        super().__init__(content, suffix)
        self.encoding = self.store.document.docinfo.encoding or "utf-8"
        self.head, self.original = DECLARATION.match(content.decode(self.encoding)).groups()
        self.before = self.to_text()

    def to_text(self) -> str:
        """The file without its XML declaration, as a library writes it."""
        if self.suffix not in XLIFF:
            self.store.encoding = "utf-8"
            return DECLARATION.match(bytes(self.store).decode())[2]
        from lxml import etree

        return etree.tostring(self.store.document, encoding="unicode")  # translate-toolkit's own way adds indentation

    def has_elements(self, unit) -> bool:
        return len(unit.source_dom) > 0

    def fill(self, unit, targets: list[str], is_doubtful: bool):
        """Gives a message its translation, one text for each plural form, and marks it if that is doubtful."""
        targets = [NO_XML.sub("", target) for target in targets]
        attributes = unit.xmlelement.attrib
        before = {name: attributes.get(name) for name in ("approved", XML_SPACE)}
        unit.target = targets if unit.hasplural() else targets[0]
        unit.markfuzzy(is_doubtful)
        if before["approved"]:
            before["approved"] = "no"  # until a person has seen the translation
        for name, value in before.items():  # which translate-toolkit sets; but a person approves
            attributes.pop(name, None) if value is None else attributes.update({name: value})
        if self.suffix in XLIFF:
            indent(unit.source_dom, unit.target_dom)

    def content(self) -> bytes:
        """The file with all that was filled in. All other lines are those of the file that was read."""
        text = self.head + keep_lines(self.original, self.before, self.to_text())
        return text.encode(self.encoding, "xmlcharrefreplace")


def name_utf8(found: re.Match) -> bytes:
    return found[0].removesuffix(found[1]) + b"UTF-8"


def parse(content: bytes, suffix: str):
    """The store of translate-toolkit for the content of a file."""
    try:
        from translate.storage import factory
        from translate.storage.base import TranslateToolkitError
        from translate.storage.xliff import Xliff1File
        from translate.storage.xliff2 import Xliff2File
    except ImportError as error:  # it is not installed, or too old
        raise UserError(f"{suffix} files need `pip install 'translate-toolkit>=3.20'`.") from error
    kind = factory.getclass(f"file{suffix}")
    try:
        try:
            store = kind.parsestring(content)
        except ValueError:
            if not issubclass(kind, Xliff1File):
                raise
            store = Xliff2File.parsestring(content)
    except (TranslateToolkitError, AssertionError, AttributeError, StopIteration, SyntaxError, struct.error) as error:
        raise ValueError(f"it is no {suffix} file, or damaged. {error}") from error
    types = store.document.docinfo.internalDTD if hasattr(store, "document") else None  # of XML
    if types is not None and any(types.iterentities()):
        raise ValueError("it defines entities; write their texts in their place.")
    return store


def strings(text) -> list[str]:
    """The plural forms of a text of translate-toolkit, or the text alone."""
    return list(map(str, text.strings)) if hasattr(text, "strings") else [text or ""]


def unescaped(found: re.Match, encoding: str) -> str:
    if found[1]:
        return ESCAPED[found[1]]
    codes = re.findall(r"\\(?:x([0-9a-fA-F]+)|([0-7]+))", found[2])
    return bytes(int(hexadecimal or octal, 16 if hexadecimal else 8) & 255 for hexadecimal, octal in codes).decode(
        encoding, "replace"
    )


def indent(source, target):
    """Puts a new target, an element of XLIFF, under its source, or under the segments of its source."""
    if (segments := source.getparent().find("{*}seg-source")) is not None and target is source.getnext():
        segments.addnext(target)
        source = segments
    if not target.tail and target is source.getnext():
        before = source.getprevious()
        target.tail, source.tail = source.tail, source.getparent().text if before is None else before.tail


def filled_lines(unit, lines: list[str]) -> list[str]:
    """The lines of a message of gettext, with its translation and mark in place of those that it had."""
    end = "\r" if lines[0].endswith("\r") else ""
    starts = [line.lstrip()[:6] for line in lines]
    first = starts.index("msgstr")
    last = max(number for number, start in enumerate(starts) if start[:1] == '"' or start == "msgstr")
    written = str(unit).rstrip("\n").split("\n")
    written = written[next(number for number, line in enumerate(written) if line.startswith("msgstr")) :]
    translation = [CONTROLS.sub(lambda found: f"\\{ord(found[0]):03o}", line) + end for line in written]
    before = lines[:first]
    flags = next((number for number, start in enumerate(starts) if start[:2] == "#,"), None)
    if not unit.isfuzzy() or any("fuzzy" in line for line in before if line.startswith("#,")):
        pass
    elif flags is None:
        place = next(number for number, start in enumerate(starts) if start[:1] != "#" or start[:2] == "#|")
        before.insert(place, "#, fuzzy" + end)
    else:
        before[flags] = before[flags].replace("#,", "#, fuzzy,", 1)
    return [*before, *translation, *lines[last + 1 :]]


def keep_lines(original: str, before: str, after: str) -> str:
    """The lines of `after` that `before` lacks, put into `original` at the same places.

    `before` is `original` as a library writes it: line ends, indentation, quotation marks and the like may differ.
    """
    if original == before:
        return after
    kept, end = original.split("\n"), "\r" if "\r\n" in original else ""
    before, after = before.split("\n"), after.split("\n")
    starts = [0] * len(before) + [len(after)]  # the place in `after` of each line of `before`
    for low, high, begin, stop in align(before, after):
        starts[low:high] = [begin, *[stop] * (high - low - 1)][: high - low]
    lines = []
    for low, high, begin, stop in align(list(map(plain, kept)), list(map(plain, before))):
        old, new = before[begin:stop], after[starts[begin] : starts[stop]]
        if new[: len(old)] == old:
            lines += kept[low:high]
            new = new[len(old) :]
        lines += [line + end for line in new]
    return "\n".join(lines)


def plain(line: str) -> str:
    """A line of XML without the signs that may be written in several ways."""
    return re.sub(r"[\s'\"]", "", html.unescape(line))


def align(one: list[str], two: list[str]) -> Iterator[tuple[int, int, int, int]]:
    """Cuts two lists into parts that belong together, each from two numbers to before two others.

    Equal lines, and as many different ones between them, are parts of their own. After a difference, the lists go on
    where the next two lines are equal. In contrast to difflib, this takes linear time for few and small differences.
    """
    i = j = 0
    while i < len(one) or j < len(two):
        m = n = 1
        if one[i : i + 1] != two[j : j + 1]:
            steps = ((d, size - d) for size in range(1, FARTHEST) for d in range(size + 1))
            same = ((m, n) for m, n in steps if one[i + m : i + m + 2] == two[j + n : j + n + 2])
            m, n = next(same, (len(one) - i, len(two) - j))
        yield from ((i + k, i + k + 1, j + k, j + k + 1) for k in range(m)) if m == n else [(i, i + m, j, j + n)]
        i, j = i + m, j + n
