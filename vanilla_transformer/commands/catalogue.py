"""Fills the untranslated messages of a gettext catalogue (.po)."""

import sys
from pathlib import Path

import polib
from tqdm.auto import tqdm

from ..data.readers import open_po
from ..data.texts import kept, placeholders
from ..errors import explaining
from ..files import write_text
from ..translation_vanilla_transformer import Translator

MESSAGES_AT_A_TIME = 1_000  # after which the catalogue is written


def fill_catalogue(translator: Translator, source: Path, target: Path, **generation):
    """Translates the messages of `source` that have no translation, and writes the whole catalogue to `target`.

    A message whose translation lacks a placeholder is marked as fuzzy, so that gettext's tools leave it out until
    somebody has looked at it. The catalogue is written after every thousand messages; to go on after an interruption,
    fill what was written. Raises UserError if a file cannot be read or written.
    """
    with explaining(f"--catalogue {source} could not be read", OSError, ValueError, LookupError):
        catalogue = open_po(source)
    with explaining(f"--output {target} cannot be written", OSError):
        catalogue.metadata["Content-Type"] = "text/plain; charset=UTF-8"
        empty = [one for one in catalogue.untranslated_entries() if one.msgid.strip()]
        write_text(target, str(catalogue))  # raises now, not after the first thousand messages
        doubtful = 0
        with tqdm(total=len(empty), desc="Translating", unit="message", disable=None, leave=False) as bar:
            for start in range(0, len(empty), MESSAGES_AT_A_TIME):
                some = empty[start : start + MESSAGES_AT_A_TIME]
                doubtful += fill(translator, some, **generation)
                write_text(target, str(catalogue))
                bar.update(len(some))
    marked = f"; {doubtful:,} of them lack a placeholder and are marked as fuzzy" if doubtful else ""
    print(f"{target}: {len(empty):,} messages were translated{marked}", file=sys.stderr)


def fill(translator: Translator, messages: list[polib.POEntry], **generation) -> int:
    """Translates messages in place; returns how many of them lack a placeholder of their source."""
    texts = [text for one in messages for text in (one.msgid, one.msgid_plural) if text]
    with explaining("the messages could not be translated", Exception):  # a stranger's model can raise anything
        translations = dict(zip(texts, translator(texts, **generation), strict=True))
    doubtful = 0
    for one in messages:
        found = [(one.msgid, translations[one.msgid])]
        if one.msgid_plural:
            found += [(one.msgid_plural, translations[one.msgid_plural])]
            one.msgstr_plural = {form: found[min(int(form), 1)][1] for form in one.msgstr_plural}
        else:
            one.msgstr = found[0][1]
        wanted = [(placeholders(text), placeholders(translation)) for text, translation in found]
        if any(kept(before, after) < before.total() for before, after in wanted):
            doubtful += 1
            one.flags.append("fuzzy")
    return doubtful
