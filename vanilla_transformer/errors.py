"""The one exception that scripts and commands show without a traceback, and what they print in any encoding."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub.errors import HFValidationError, StrictDataclassError


class UserError(Exception):
    """Raised for an error the user can fix. The message is one sentence: what is wrong and how to fix it."""


def escape_output():
    """Lets stdout escape the characters that its encoding lacks, as stderr does, instead of raising an error.

    On Windows, output that is redirected to a file is not in UTF-8. What other programs read is written as UTF-8 by
    its command.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # unlike that of Jupyter, which takes everything
        sys.stdout.reconfigure(errors="backslashreplace")


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    if isinstance(error, StrictDataclassError):  # transformers' words for a wrong config, without the names of classes
        names = r"(Class v|V)alidation error for (field|validator '\w+':) |\w+Error: "
        return re.sub(names, "", " ".join(str(error).split()))
    # Transformers takes a missing directory for an id of the Hub.
    if isinstance(error.__cause__, HFValidationError) and not isinstance(error, UserError):
        return re.sub(r".*: ('.*')\..*", r"the directory \1 does not exist.", str(error.__cause__))
    if "weights_only" in str(error):  # torch advises to load it anyway
        return "it is damaged, or its pickle holds more than tensors, possibly code; it is not loaded."
    return " ".join(str(error).split())


@contextlib.contextmanager
def explaining(message: str, *kinds: type[Exception], remedy: str = "") -> Iterator[None]:
    """Turns an error of one of the `kinds` into a UserError: `message`, the error on one line, and the `remedy`."""
    try:
        yield
    except kinds as error:
        reason = f"{one_line(error).rstrip('.')}; {remedy}." if remedy else one_line(error)
        raise UserError(f"{message}: {reason}") from error


@contextlib.contextmanager
def loading(*models: str, option: str = "") -> Iterator[None]:
    """Turns any error from loading the models, which `option` names, into a UserError."""
    try:
        yield
    except Exception as error:  # a damaged file can make the libraries raise anything
        reason, what = one_line(error), f"{option} {', '.join(models)}".strip()
        for folder in filter(Path.is_dir, map(Path, models)):
            which = folder if len(models) > 1 else "it"
            if not (folder / "config.json").is_file():
                reason = f"{which} is a directory without a config.json; give one that holds a model."
            elif not (folder / "tokenizer_config.json").is_file() and "tokenizer" in reason:
                reason = f"{which} has no tokenizer; save it there with `tokenizer.save_pretrained`."
        raise UserError(f"{what or '--model'} cannot be loaded: {reason}") from error
