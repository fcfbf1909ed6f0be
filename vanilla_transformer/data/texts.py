"""What texts have in common: a normal form to compare them by, and the placeholders and markup in them."""

import re
import unicodedata
from collections import Counter

# What a translation keeps as it is. `&` marks an accelerator key before a letter or digit, and begins an entity.
PLACEHOLDERS = re.compile(
    r"https?://[^\s<>\"]+"
    r"|</?[A-Za-z][^<>]*>"  # tags
    r"|&#?\w+;|&(?=\w)"
    r"|\$?\{[\w.:!,#-]*\}"  # {name}, ${name}, {0:d}
    r"|%\(\w+\)[a-zA-Z]|%(?:\d+\$)?[-+0#]*\d*(?:\.\d+)?(?:hh?|ll?|[zjt])?[sdiufgexXcpn@]\b|%\d+"  # %(name)s, %1$s, %1
)
NUMBERS = re.compile(r"\d+(?:[.,:]\d+)*")


def normal_form(text: str) -> str:
    """The same for texts that differ in case, width or spaces only: two of them are one sentence twice."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def is_filled(text) -> bool:
    return isinstance(text, str) and bool(text.strip())


def placeholders(text: str) -> Counter:
    """The placeholders, tags, entities and URLs of a text, each as often as it occurs."""
    return Counter(PLACEHOLDERS.findall(text))


def kept(source: Counter, target: Counter) -> int:
    """How many of the source's placeholders the target has."""
    return (source & target).total()
