"""Translate standard input to standard output, line by line, in UTF-8. Empty lines stay empty."""

import argparse
import sys
from itertools import islice

import torch
from transformers.utils.logging import disable_progress_bar

from ..errors import UserError, loading
from ..training.memory import configure_malloc
from ..translation_vanilla_transformer import TextTooLong, Translator

__all__ = ["TextTooLong", "Translator"]

LINES_AT_A_TIME = 10_000  # read, sorted by length and written together
GENERATION = ("num_beams", "length_penalty", "max_new_tokens")  # options that go to `generate`


def add_arguments(parser: argparse.ArgumentParser):
    """Adds the options of the command."""
    parser.add_argument("--model", required=True, help="a model directory or a Hub id")
    parser.add_argument("--revision", help="the commit, branch or tag of the Hub (default: main)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that the Hub has for the tokenizer")
    parser.add_argument("--num_beams", type=positive, help="beams (default: those of the model)")
    parser.add_argument("--length_penalty", type=float, help="the exponent of the length in beam search")
    parser.add_argument("--max_new_tokens", type=positive, help="of the output (default: source + 50)")
    parser.add_argument(
        "--max_source_length",
        type=positive,
        help="tokens of the longest line translated as one (default: max_position_embeddings of the model)",
    )
    parser.add_argument(
        "--too_long",
        choices=["split", "refuse"],
        default="split",
        help="what becomes of a longer line: its sentences are translated in pieces, or it ends the command, which "
        "says its number, as does a single word that is too long (default: %(default)s)",
    )
    parser.add_argument("--max_tokens", type=positive, default=4096, help="tokens in a batch (default: %(default)s)")
    parser.add_argument(
        "--device", type=torch_device, help="cpu, cuda, cuda:1, ... (default: the GPU, if there is one)"
    )
    dtypes = ["auto", "float32", "bfloat16", "float16", "int8"]
    parser.add_argument(
        "--dtype",
        choices=dtypes,
        default="auto",
        help="of the weights (default: as they were saved); int8 is the fastest on a CPU, and rounds most",
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)


def torch_device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text} is no device; give cpu, cuda, cuda:1, ...") from error


def run(options: argparse.Namespace):
    """Translates standard input to standard output, line by line."""
    configure_malloc()
    if sys.stdin is None or sys.stdout is None:
        raise UserError("standard input or output is closed; give it one of each.")
    translate_lines(load(options), options)


def load(options: argparse.Namespace) -> Translator:
    disable_progress_bar()  # of transformers
    given = {name: value for name, value in vars(options).items() if name not in ("model", *GENERATION)}
    with loading(options.model):
        return Translator.from_pretrained(options.model, **given)


def translate_lines(translator: Translator, options: argparse.Namespace):
    """Translates line by line, some thousand at a time, to sort them by length; from a terminal one at a time."""
    generation = {name: getattr(options, name) for name in GENERATION}
    sys.stdout.reconfigure(encoding="utf-8")
    size = 1 if sys.stdin.isatty() else LINES_AT_A_TIME
    done = 0
    while raw := list(islice(sys.stdin.buffer, size)):
        lines = [decode(line, done + number) for number, line in enumerate(raw, 1)]
        try:
            label = f"Translating from line {done + 1:,}" if done else "Translating"
            translations = translator(lines, label, **generation)
        except TextTooLong as error:
            remedy = "" if options.too_long == "split" else ", choose --too_long split"
            raise UserError(
                f"line {done + error.number + 1} has {error.tokens} tokens, and the longest that can be "
                f"translated as one {error.limit}; shorten it{remedy}, or raise --max_source_length where positions "
                "are not learned."
            ) from error
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"lines {done + 1} to {done + len(lines)} failed: {' '.join(str(error).split())}"
            ) from error
        for text in translations:
            print(text.replace("\n", " "))  # one line, whatever the model wrote
        sys.stdout.flush()
        done += len(lines)


def decode(line: bytes, number: int) -> str:
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"line {number} is not UTF-8; convert the input, by iconv for example.") from error
