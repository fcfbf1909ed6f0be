"""Fills the untranslated messages of a gettext catalogue (.po)."""

import os
import sys
from pathlib import Path

import polib
from tqdm.auto import tqdm

from ..data.readers import open_po
from ..data.texts import placeholders
from ..errors import UserError, explaining
from ..files import write_text
from ..loading import Translator
from ..sentences_vanilla_transformer import TextTooLong

MESSAGES_AT_A_TIME = 1_000  # after which the catalogue is written


def fill_catalogue(translator: Translator, source: Path, target: Path, **generation):
    """Translates the messages of `source` that have no translation, and writes the whole catalogue to `target`.

    A message whose translation is empty or has other placeholders is marked as fuzzy, so that gettext's tools leave it
    out until somebody has looked at it. The catalogue is written after every thousand messages; to go on after an
    interruption, fill what was written. Raises UserError if a file cannot be read or written, or if a message cannot
    be translated.
    """
    with explaining(f"--catalogue {source} could not be read", OSError, ValueError, LookupError):
        catalogue = open_po(source)
    with explaining(f"--output {target} cannot be written", OSError):
        target = target.resolve()  # a link is written through
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(f"{target} may not be written")
        catalogue.metadata["Content-Type"] = "text/plain; charset=UTF-8"
        untranslated = [one for one in catalogue.untranslated_entries() if one.msgid.strip()]
        write_text(target, str(catalogue))  # raises now, not after the first thousand messages
        doubtful = 0
        with tqdm(total=len(untranslated), desc="Translating", unit="message", disable=None, leave=False) as bar:
            for start in range(0, len(untranslated), MESSAGES_AT_A_TIME):
                some = untranslated[start : start + MESSAGES_AT_A_TIME]
                doubtful += fill(translator, some, **generation)
                write_text(target, str(catalogue))
                bar.update(len(some))
    marked = f"; {doubtful:,} with other placeholders, or empty, marked as fuzzy" if doubtful else ""
    print(f"{target}: {len(untranslated):,} messages translated{marked}", file=sys.stderr)


def fill(translator: Translator, messages: list[polib.POEntry], **generation) -> int:
    """Translates messages in place, and of their plural forms the empty ones; returns how many are marked as fuzzy."""
    texts = list(dict.fromkeys(text for one in messages for text in (one.msgid, one.msgid_plural) if text))
    try:
        translations = dict(zip(texts, translator(texts, **generation), strict=True))
    except TextTooLong as error:
        message = f"{texts[error.number][:60]!r} has a sentence of {error.tokens} tokens, more than {error.limit}"
        raise UserError(f"{message}; leave out --too_long refuse, or raise --max_source_length.") from error
    return sum(fill_one(one, translations) for one in messages)


def fill_one(message: polib.POEntry, translations: dict[str, str]) -> bool:
    """Writes the translations of a message; returns whether it is marked as fuzzy."""
    if message.msgid_plural:
        forms = message.msgstr_plural or {0: "", 1: ""}
        # The first form is the singular, unless there is no other.
        sources = {form: message.msgid_plural if form or len(forms) == 1 else message.msgid for form in forms}
        written = [sources[form] for form, text in forms.items() if not text]
        message.msgstr_plural = {form: text or translations[sources[form]] for form, text in forms.items()}
    else:
        written, message.msgstr = [message.msgid], translations[message.msgid]
    pairs = [(source, translations[source]) for source in written]
    is_doubtful = any(placeholders(one) != placeholders(two) or not two.strip() for one, two in pairs)
    message.flags += ["fuzzy"] * is_doubtful
    return is_doubtful
