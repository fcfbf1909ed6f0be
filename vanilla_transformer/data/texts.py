"""What texts have in common: a normal form to compare them by, and the placeholders and markup in them."""

import re
import unicodedata
from collections import Counter
from itertools import groupby

from ..sentences_vanilla_transformer import is_invisible

# What a translation keeps as it is. `&` marks an accelerator key before a letter or digit, and begins an entity.
PLACEHOLDERS = re.compile(
    r"https?://[^\s<>\"]*[\w/]"
    r"|</?[A-Za-z][^<>]*>"  # tags
    r"|&#?\w+;|&(?=\w)"
    r"|\$?\{[\w.:!,#-]*\}"  # {name}, ${name}, {0:d}
    r"|%\(\w+\)[a-zA-Z]|%(?:\d{1,3}\$)?(?:[-+0#]{0,5}\d{0,5}(?:\.\d{1,5})?(?:hh?|ll?|[zjt])?[sdiufgexXcpn]\b|@)"
    r"|%\d{1,3}"  # %(name)s, %1$s, %@, %1
)
# Control characters, zero-width space, word joiner, byte order mark, soft hyphen: they carry no meaning. The joiners
# U+200C and U+200D do in some scripts, and marks of direction where scripts are mixed.
INVISIBLE = "[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u2060\ufeff]"
SPACES = "[\t-\r\x1c-\x1f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"
MANY_MARKS = 500
MARKS = re.compile("[\u0300-\U0010ffff]+")  # all combining marks are among these
KEPT = {"placeholders": PLACEHOLDERS, "numbers": re.compile(r"\d+(?:[.,:]\d+)*")}  # what targets usually keep


def normalize(text: str) -> str:
    """A text as a tokenizer of [`train_tokenizer`] reads it: NFC, each run of spaces of any kind as one space, none at
    the ends, without invisible characters. Hypotheses and references are normalized alike before they are scored."""
    return re.sub(SPACES, " ", to_form("NFC", re.sub(INVISIBLE, "", text))).strip(" ")


def normal_form(text: str) -> str:
    """A key to compare texts by: equal if they differ only in case, width, spaces or invisible characters."""
    if not text.isprintable():  # most texts are: they have neither control characters nor spaces other than " "
        text = re.sub(INVISIBLE, "", text)
    text = to_form("NFKC", text).casefold()
    has_single_spaces = text.isprintable() and "  " not in text
    return text.strip(" ") if has_single_spaces else " ".join(text.split())


def to_form(form: str, text: str) -> str:
    """`unicodedata.normalize`, which alone needs quadratic time to sort many combining marks in a row."""
    return unicodedata.normalize(form, MARKS.sub(sort_marks, text) if len(text) >= MANY_MARKS else text)


def sort_marks(found: re.Match) -> str:
    """The combining marks after each character in canonical order, which is that of their classes."""
    if len(found[0]) < MANY_MARKS:
        return found[0]
    groups = groupby(found[0], lambda character: unicodedata.combining(character) > 0)
    return "".join("".join(sorted(group, key=unicodedata.combining) if marks else group) for marks, group in groups)


def is_filled(text) -> bool:
    """Whether it is a text that has visible characters."""
    if not isinstance(text, str):
        return False
    return not text.isspace() if text and text.isprintable() else not all(map(is_invisible, normalize(text)))


def placeholders(text: str) -> Counter:
    """The placeholders, tags, entities and URLs of a text, each as often as it occurs."""
    return Counter(PLACEHOLDERS.findall(text))


def count_kept(pattern: re.Pattern, source: str, target: str) -> tuple[int, int]:
    """How many matches of the pattern the source has, and how many of these the target has."""
    found = Counter(pattern.findall(source))
    return found.total(), (found & Counter(pattern.findall(target))).total()
