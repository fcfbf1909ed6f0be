"""Translate standard input to standard output, line by line, in UTF-8. Empty lines stay empty."""

import argparse
import sys
from itertools import islice

from transformers.utils.logging import disable_progress_bar

from ..errors import UserError, loading, one_line
from ..training.memory import configure_malloc
from ..translation_vanilla_transformer import TextTooLong, Translator
from .options import GENERATION, add_translation_options

LINES_AT_A_TIME = 10_000  # read, sorted by length and written together


def add_arguments(parser: argparse.ArgumentParser):
    """The options of `vanilla-transformer translate`."""
    add = parser.add_argument
    add("--model", required=True, nargs="+", help="a model directory or a Hub id; several are an ensemble")
    add("--revision", help="the commit, branch or tag on the Hub (default: main)")
    add_translation_options(parser)
    policy = "translate a longer line in pieces, or end the command with its number (default: %(default)s)"
    add("--too_long", choices=["split", "refuse"], default="split", help=policy)


def run(options: argparse.Namespace):
    """Loads the model and translates."""
    configure_malloc()
    disable_progress_bar()  # of transformers
    given = {name: value for name, value in vars(options).items() if name not in ("model", *GENERATION)}
    with loading(", ".join(options.model)):
        translator = Translator.from_pretrained(options.model, **given)
    translate_lines(translator, options)


def translate_lines(translator: Translator, options: argparse.Namespace):
    """Translates some thousand lines at a time, to sort them by length; from a terminal one at a time."""
    generation = {name: getattr(options, name) for name in GENERATION}
    sys.stdout.reconfigure(encoding="utf-8")
    size = 1 if sys.stdin.isatty() else LINES_AT_A_TIME
    done = 0
    while raw := list(islice(sys.stdin.buffer, size)):
        lines = [decode(line, number) for number, line in enumerate(raw, done + 1)]
        try:
            label = f"Translating from line {done + 1:,}" if done else "Translating"
            translations = translator(lines, label, **generation)
        except TextTooLong as error:
            remedy = "" if options.too_long == "split" else ", use --too_long split"
            raise UserError(
                f"line {done + error.number + 1} has {error.tokens} tokens, more than the {error.limit} that are "
                f"translated in one piece; shorten it{remedy}, or raise --max_source_length."
            ) from error
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise UserError(f"lines {done + 1} to {done + len(lines)} failed: {one_line(error)}") from error
        for text in translations:
            print(text.replace("\n", " "))  # one line, whatever the model wrote
        sys.stdout.flush()
        done += len(lines)


def decode(line: bytes, number: int) -> str:
    """The text of line `number`, without its end; raises UserError if it is not UTF-8."""
    try:
        return line.decode("utf-8-sig").rstrip("\r\n")  # without the byte order mark of Windows editors
    except UnicodeDecodeError as error:
        raise UserError(f"line {number} is not UTF-8; convert the input, for example with iconv.") from error
