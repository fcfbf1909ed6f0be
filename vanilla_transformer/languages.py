"""The code of a language, ISO 639-1 or else 639-3, from the many ways to name it."""

import functools
import json
import re
from importlib.resources import files

from langcodes import Language

# Country codes and withdrawn codes; those that are the code of another language, such as kr (Kanuri), mean that one.
MISTAKES = "zh:cn cs:cz da:dk el:gr ja:jp uk:ua vi:vn he:iw jv:jw zh:chs zh:zhs zh:zht"
NAMES = """
am:amharic ar:arabic hy:armenian eu:basque bn:bengali bg:bulgarian my:burmese yue:cantonese ca:catalan zh:chinese
zh:中文 hr:croatian cs:czech da:danish nl:dutch dz:dzongkha en:english et:estonian fi:finnish fr:french gl:galician
ka:georgian de:german el:greek ha:hausa he:hebrew hi:hindi hu:hungarian is:icelandic ig:igbo id:indonesian ga:irish
it:italian ja:japanese ja:日本語 kk:kazakh km:khmer ko:korean ko:한국어 lo:lao lv:latvian lt:lithuanian ms:malay
zh:mandarin mn:mongolian ne:nepali no:norwegian fa:persian pl:polish pt:portuguese ro:romanian ru:russian
sr:serbian sk:slovak sl:slovenian es:spanish sw:swahili sv:swedish ta:tamil te:telugu th:thai bo:tibetan tr:turkish
uk:ukrainian ur:urdu vi:vietnamese cy:welsh xh:xhosa yo:yoruba zu:zulu
"""
# Columns are often called so; these are also codes of small languages.
COLUMNS = """
all and ans any bot cap col dev doc end for ids inp key lab lbl len lhs low mid neg new not num old one org pos pre
raw row seg sen src sub sys tag tar tgt tok top trg two txt val
"""


def by_name(table: str) -> dict[str, str]:
    """The codes in a table by the names after their colons."""
    return {name: code for code, _, name in (pair.partition(":") for pair in table.split())}


MISTAKES, NAMES = by_name(MISTAKES), by_name(NAMES)
PATTERN = re.compile(r"([a-z]{2,3})(?:[-_]([a-z]{4}))?(?:[-_](?:[a-z]{2}|\d{3}))?")


def parse_language(name: str | None) -> tuple[str | None, str | None]:
    """The code of a language, not checked, and its script, from what it was called; None for what it does not say.

    `zho_Hans` gives ("zh", "hans"); `zh-CN`, `cn`, `chinese` and `Chinese (simplified)` give ("zh", None).
    """
    name = (name or "").strip().lower()
    found = PATTERN.fullmatch(name)
    if found and (found[2] is None or Language.make(script=found[2].title()).is_valid()):
        return MISTAKES.get(found[1]) or two_letters().get(found[1], found[1]), found[2]
    named = {NAMES[word] for word in re.split(r"[\W_]+", name) if word in NAMES}
    return (named.pop() if len(named) == 1 else None), None


def known_code(name: str | None) -> str | None:
    """The code of a language that the Hub takes; None if the name has none, or is rather that of a column."""
    if name in ("code", "multilingual"):  # of the Hub's own
        return name
    code, script = parse_language(name)
    is_column = script is None and code in COLUMNS.split()
    return code if code in hub_codes() and not is_column else None


@functools.cache
def hub_codes() -> dict[str, str]:
    """The language codes that the Hub accepts, with their English names, as the datasets library lists them."""
    return json.loads((files("datasets") / "utils" / "resources" / "languages.json").read_text("utf-8"))


@functools.cache
def two_letters() -> dict[str, str]:
    """Two-letter codes by their three-letter ones, terminological (`deu`) and bibliographic (`ger`)."""
    codes = [code for code in hub_codes() if len(code) == 2]
    return {Language.make(language=code).to_alpha3(variant): code for code in codes for variant in "TB"}
