"""Fills the untranslated messages of a catalogue, such as a .po or an .xliff file."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm.auto import tqdm

from ..data.catalogues import GETTEXT, XLIFF, TranslationFile, open_translations
from ..data.doubts import find_doubts
from ..data.options import CATALOGUES, suffix_of
from ..errors import UserError, explaining
from ..files import write_bytes
from ..loading import Translator
from ..sentences_vanilla_transformer import TextTooLong

MESSAGES_AT_A_TIME = 1_000  # after which the catalogue is written


def fill_catalogue(translator: Translator, source: Path, target: Path, **generation):
    """Translates the messages of `source` that have no translation, and writes the whole catalogue to `target`.

    All other lines stay as they are. A message is marked as fuzzy, or in the way of its format, if its translation is
    doubtful, see [`find_doubts`], so that other tools leave it out until somebody has looked at it. The catalogue is
    written after every thousand messages; to go on after an interruption, fill what was written. Raises UserError if a
    file cannot be read or written, or if a message cannot be translated.
    """
    if (suffix := suffix_of(source.name)) not in CATALOGUES or source.suffix.lower() != suffix:
        raise UserError(f"--catalogue {source} is not filled; it must end in one of: {', '.join(CATALOGUES)}.")
    family = next((family for family in (GETTEXT, XLIFF) if suffix in family), (suffix,))
    if suffix_of(target.name) in set(CATALOGUES) - set(family):
        raise UserError(f"--output {target} must end in {suffix}, as --catalogue {source}: the format stays the same.")
    if not target.absolute().parent.is_dir():
        raise UserError(f"--output {target} cannot be written: {target.parent} is not a directory.")
    with explaining(f"--catalogue {source} could not be read", OSError, ValueError, LookupError):
        catalogue = open_translations(source.read_bytes(), suffix)
    with explaining(f"--output {target} cannot be written", OSError):
        target = target.resolve()  # a link is written through
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(f"{target} may not be written")
        is_doubtful = find_doubts(catalogue.store.gettargetlanguage())
        untranslated = [unit for unit in catalogue.units if not all(catalogue.targets(unit))]
        untranslated = [unit for unit in untranslated if all(map(str.strip, catalogue.sources(unit)))]
        write_bytes(target, catalogue.content())  # raises now, not after the first thousand messages
    doubtful = 0
    with tqdm(total=len(untranslated), desc="Translating", unit="message", disable=None, leave=False) as bar:
        for start in range(0, len(untranslated), MESSAGES_AT_A_TIME):
            some = untranslated[start : start + MESSAGES_AT_A_TIME]
            texts = list(dict.fromkeys(text for unit in some for text in catalogue.sources(unit)))
            translations = translate(translator, texts, **generation)
            doubtful += sum(fill(catalogue, unit, translations, is_doubtful) for unit in some)
            with explaining(f"--output {target} cannot be written", OSError):
                write_bytes(target, catalogue.content())
            bar.update(len(some))
    marked = f"; of these, {doubtful:,} doubtful and marked as fuzzy" if doubtful else ""
    print(f"{target}: {len(untranslated):,} messages translated{marked}", file=sys.stderr)


def translate(translator: Translator, texts: list[str], **generation) -> dict[str, str]:
    try:
        return dict(zip(texts, translator(texts, **generation), strict=True))
    except TextTooLong as error:
        message = f"{texts[error.number][:60]!r} has a sentence of {error.tokens} tokens, more than {error.limit}"
        remedy = "use --too_long split, or " if translator.segmenter.too_long == "refuse" else ""
        raise UserError(f"{message}; {remedy}raise --max_source_length.") from error


def fill(
    catalogue: TranslationFile, unit, translations: dict[str, str], is_doubtful: Callable[[str, str, bool], bool]
) -> bool:
    """Fills the empty plural forms of a message, or its only form; returns whether it is marked as fuzzy.

    The first form is the singular, unless there is no other. Equal forms are doubtful: the model was not told which
    it should write.
    """
    sources, given = catalogue.sources(unit), catalogue.targets(unit)
    asked = [sources[0] if number == 0 and len(given) > 1 else sources[-1] for number in range(len(given))]
    forms = [text or translations[source] for source, text in zip(asked, given, strict=True)]
    written = [pair for *pair, text in zip(asked, forms, given, strict=True) if not text]
    is_format = catalogue.is_format(unit)
    doubtful = len(set(forms)) < len(forms) or catalogue.has_elements(unit)
    doubtful = doubtful or any(is_doubtful(*pair, is_format) for pair in written)
    catalogue.fill(unit, forms, doubtful)
    return doubtful
