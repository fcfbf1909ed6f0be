"""What texts have in common: a normal form to compare them by, and the placeholders and markup in them."""

import re
import unicodedata
from collections import Counter
from functools import partial
from itertools import groupby

from ..sentences_vanilla_transformer import is_invisible

# An argument of printf and its relatives, as %s, %1$-5d, %(price).2f, %.*s.
ARGUMENT = (
    r"(?:\(\w+\)|\d{1,3}\$)?[-+#0'I]{0,5}(?:\*|\d{0,5})(?:\.(?:\*|\d{0,5}))?(?:hh?|ll?|[Lqjzt])?[sdiouxXeEfFgGcCpn@]"
)
# What a translation keeps as it is. The first line is for speed.
PLACEHOLDERS = re.compile(
    r"(?=[h<&{$#%\a\b\v\f\x1b])(?:"
    r"https?://[^\s<>\"]*[\w/]"
    r"|</?\w[^<>]*>"  # tags
    r"|&#?\w+;|&(?=\w)"  # entities, and the mark of an accelerator key
    r"|\{\{[^{}]*\}\}|\{%[^{}]*%\}|\{\w+, ?\w+(?=,)"  # {{ name }}, {% if name %}, {count, plural, ...}
    r"|[$#%]?\{[^{}\s]*\}|\$\(?[A-Za-z_]\w*\)?"  # {name}, {0:d}, ${name}, $name
    rf"|(?<!\d)%{ARGUMENT}|%{ARGUMENT}\b"  # not in 100%ig
    r"|%L?\d{1,3}|%\|[^|\s]{1,20}\|"  # %1, %|1$5|
    r"|[\a\b\v\f\x1b])"
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
    if len(text) >= MANY_MARKS:
        text = MARKS.sub(partial(sort_marks, form=form.replace("C", "D")), text)
    return unicodedata.normalize(form, text)


def sort_marks(found: re.Match, form: str) -> str:
    """The combining marks after each character in canonical order, which is that of their classes."""
    if len(found[0]) < MANY_MARKS:
        return found[0]
    # Some characters that are no marks consist of marks alone.
    parts = "".join(unicodedata.normalize(form, character) for character in found[0])
    groups = groupby(parts, lambda character: unicodedata.combining(character) > 0)
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
