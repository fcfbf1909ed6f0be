"""Which errors are shown as one sentence and which with their traceback, and output that is safe on any terminal."""

import contextlib
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, StrictDataclassError

# What moves the cursor, reorders text or ends a line: C0 and C1, DEL, the separators of lines and paragraphs, and the
# embeddings, overrides and isolates of bidirectional text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
BARS = re.compile(r"\r|(\x1b\[A)+\Z|")  # how progress bars begin what they write: at the left, or lines further up
NOTHING = re.compile("")
MODEL_FILES = {f"{name}_vanilla_transformer.py" for name in ("modeling", "loss", "decoding")}


class UserError(Exception):
    """Raised for an error the user can fix. The message is one sentence: what is wrong and how to fix it."""


def printable(text: str) -> str:
    """The text with its control characters spelled out, such as `\\x1b`; line feeds and tabs stay."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def open_closed_streams():
    """Gives closed standard streams the null device, or a file that is opened later would take their place."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def escape_output(as_data: bool = False):
    """Lets stdout and stderr spell out control characters, and characters that their encoding lacks.

    A warning is a line, without the code that it comes from.

    Names, texts and messages of libraries come from strangers, and a control character could command the terminal.
    On Windows, output that is redirected to a file is not in UTF-8.

    With `as_data`, control characters stay in what another program or a file gets of stdout.
    """
    open_closed_streams()
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    os.environ["PYTHON_COLORS"] = "0"  # Python's own colors would be spelled out too
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):  # that of Jupyter, which takes everything
            continue
        stream.reconfigure(errors="backslashreplace")
        is_data = as_data and stream is sys.stdout and not stream.isatty()
        if not is_data and "write" not in vars(stream):
            kept = BARS if stream is sys.stderr else NOTHING
            stream.write = partial(write_printable, stream.write, kept)


def write_printable(write: Callable[[str], int], kept: re.Pattern, text: str) -> int:
    """Writes the text, printable after what the pattern `kept` matches at its beginning."""
    start = kept.match(text).end()
    return write(text[:start] + printable(text[start:]))


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    if isinstance(error, StrictDataclassError):  # transformers' words for a wrong config, without the names of classes
        names = r"(Class v|V)alidation error for (field|validator '\w+':) |\w+Error: "
        return re.sub(names, "", " ".join(str(error).split()))
    # Transformers takes a missing directory for an id of the Hub.
    if isinstance(error.__cause__, HFValidationError) and not isinstance(error, UserError):
        return re.sub(r".*: ('.*')\..*", r"the directory \1 does not exist.", str(error.__cause__))
    if isinstance(error, UnpicklingError):  # torch advises to load it anyway
        return "it is damaged, or its pickle holds more than tensors, possibly code; it is not loaded."
    return " ".join(str(error).split()) or type(error).__name__


def is_mistake_in_model(error: BaseException) -> bool:
    """Whether the error, or its cause, comes from a mistake in the code of the model, its loss or its search.

    Whoever changes these files needs the traceback. What they `raise` themselves comes from a user's input, as does
    what other libraries than torch raise in them.
    """
    inside_torch = os.path.dirname(torch.__file__) + os.sep
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(inside_torch)]
    if (
        frames
        and Path(frames[-1].filename).name in MODEL_FILES
        and not (frames[-1].line or "raise").startswith("raise")
    ):
        return not re.search("out of memory|allocate|overflow", str(error))  # sizes that were asked for
    return error.__cause__ is not None and is_mistake_in_model(error.__cause__)


def show_cause(error: Exception):
    """Prints the traceback of an error that is shown as one sentence, if VANILLA_TRANSFORMER_TRACEBACK is set."""
    if os.environ.get("VANILLA_TRANSFORMER_TRACEBACK"):
        traceback.print_exception(error)


@contextlib.contextmanager
def explaining(message: str, *kinds: type[Exception], remedy: str = "") -> Iterator[None]:
    """Turns an error of one of the `kinds` into a UserError: `message`, the error on one line, and the `remedy`.

    A mistake in the model's code passes unchanged.
    """
    try:
        yield
    except kinds as error:
        if is_mistake_in_model(error):
            raise
        reason = f"{one_line(error).rstrip('.')}; {remedy}." if remedy else one_line(error)
        raise UserError(f"{message}: {reason}") from error


@contextlib.contextmanager
def catching_panics() -> Iterator[None]:
    """Turns a panic of a library written in Rust into a UserError.

    A panic is a BaseException, which `except Exception` misses. tokenizers panics when a regular expression of a
    tokenizer needs too many steps for a text.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"A library written in Rust, such as tokenizers, failed: {one_line(error)}") from error


def check_place(name_or_path: str):
    """Raises OSError for a model that is not on this machine if the Hub cannot be reached.

    transformers would try again for most of a minute, and not say that there is no such directory.
    """
    in_cache = Path(constants.HF_HUB_CACHE, f"models--{name_or_path.replace('/', '--')}")
    if Path(name_or_path).exists() or in_cache.is_dir():
        return
    try:
        HfApi().model_info(name_or_path, timeout=10)
    except (HfHubHTTPError, HFValidationError):  # the Hub has answered, or the name is no id
        return
    except (HTTPError, ConnectionError) as error:
        raise OSError(f"the directory '{name_or_path}' does not exist, and the Hub cannot be reached.") from error


@contextlib.contextmanager
def loading(*models: str, option: str = "") -> Iterator[None]:
    """Turns any error from loading the models, which `option` names, into a UserError, as [`explaining`] does."""
    try:
        for name in map(str, models):
            for member in [name] if Path(name).exists() else name.split("+"):  # of an ensemble
                check_place(member)
        yield
    except Exception as error:  # a damaged file can make the libraries raise anything
        if is_mistake_in_model(error):
            raise
        reason, what = one_line(error), f"{option} {', '.join(models)}".strip()
        for folder in filter(Path.is_dir, map(Path, models)):
            which = folder if len(models) > 1 else "it"
            if not (folder / "config.json").is_file():
                reason = f"{which} is a directory without a config.json; give one that holds a model."
            elif not (folder / "tokenizer_config.json").is_file() and "tokenizer" in reason:
                reason = f"{which} has no tokenizer; save it there with `tokenizer.save_pretrained`."
        raise UserError(f"{what or '--model'} cannot be loaded: {reason}") from error
