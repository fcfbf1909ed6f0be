"""The user's mistakes are one sentence; any other exception keeps its traceback, with a note on what was done."""

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator

from huggingface_hub.errors import StrictDataclassError

from .sentences_vanilla_transformer import InputError


class UserError(InputError):
    """Raised for an error the user can fix. The message is one sentence: what is wrong and how to fix it."""


@contextlib.contextmanager
def noting(note: str) -> Iterator[None]:
    """Adds a note, such as the option or the file, to any exception but those that are one sentence already."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        error.add_note(note)
        raise


@contextlib.contextmanager
def explaining(message: str, *kinds: type[Exception], remedy: str = "") -> Iterator[None]:
    """Turns an error of one of the `kinds` into a UserError: `message`, the error on one line, and the `remedy`.

    For calls that raise these kinds for a user's mistake alone, such as OSError from opening a file.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        reason = f"{one_line(error).rstrip('.')}; {remedy}." if remedy else one_line(error)
        raise UserError(f"{message}: {reason}") from error


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; of a wrong config, without the names of classes."""
    message = " ".join(str(error).split())
    if isinstance(error, StrictDataclassError):
        message = re.sub(r"(Class v|V)alidation error for (field|validator '\w+':) |\w+Error: ", "", message)
    return message or type(error).__name__


def shortened(text: str, length: int = 60) -> str:
    """The text on one line, cut after `length` characters; `textwrap.shorten` drops all of a text without spaces."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length].rstrip()}…"


def configure_messages():
    """Shows warnings as one line without source code. Characters that stdout or stderr cannot encode, as in a
    redirected file on Windows, are written as escapes."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not that of Jupyter
            stream.reconfigure(errors="backslashreplace")
