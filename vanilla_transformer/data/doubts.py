"""Which translations somebody should look at before they are used."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable

from .texts import placeholders

# Of translate-toolkit, with these marks of accelerator keys.
CHECKS = ["accelerators", "blank", "emails", "escapes", "filepaths", "functions", "newlines", "options", "printf"]
CHECKS += ["purepunc", "pythonbraceformat", "tabs", "untranslated", "urls", "xmltags"]
ACCELERATORS = ["&", "_", "~"]


def find_doubts(target_language: str | None) -> Callable[[str, str, bool], bool]:
    """A function of a source, its translation and whether a program formats it: whether the translation is doubtful.

    It is if it is empty, or if an argument, tag, URL, number, accelerator key or the like is lost, changed or added.
    """
    from translate.filters.checks import CheckerConfig, StandardChecker
    from translate.storage.base import TranslationUnit

    config = CheckerConfig(targetlanguage=target_language, accelmarkers=ACCELERATORS)
    checker = StandardChecker(checkerconfig=config, limitfilters=CHECKS, errorhandler=lambda *_: False)

    def is_doubtful(source: str, target: str, is_format: bool) -> bool:
        unit = TranslationUnit(source)
        unit.target = target
        if not target.strip() or checker.run_filters(unit):
            return True
        if is_format and any(source.count(sign) != target.count(sign) for sign in "%{}$"):
            return True
        return any(count(source) != count(target) for count in (placeholders, numbers))

    return is_doubtful


def numbers(text: str) -> Counter:
    """The numbers of a text without their separators, which differ between languages, in Arabic numerals."""
    runs = re.findall(r"\d+", re.sub(r"(?<=\d)[.,'\s](?=\d)", "", text))
    return Counter("".join(str(unicodedata.decimal(digit)) for digit in run) for run in runs)
