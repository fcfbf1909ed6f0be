"""Translate: text in, text out; the [`Translator`] itself lies in the file that travels with the models.

python -m vanilla_transformer.translation --model DIR_OR_ID < in.txt > out.txt
"""

import argparse
import os
import sys
from itertools import islice

from transformers.utils.logging import disable_progress_bar

from .pipeline_vanilla_transformer import TextTooLong, Translator

__all__ = ["TextTooLong", "Translator"]

LINES_AT_A_TIME = 10_000  # read, sorted by length and written together


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vanilla_transformer.translation",
        description="Translates standard input to standard output, line by line. Empty lines stay empty.",
        epilog="example: python -m vanilla_transformer.translation --model outputs/sample < in.txt > out.txt",
    )
    parser.add_argument("--model", required=True, help="a model directory or a Hub id")
    parser.add_argument("--revision", help="the commit, branch or tag of the Hub (default: main)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that the Hub has for the tokenizer")
    parser.add_argument("--num_beams", type=positive, help="beams (default: those of the model)")
    parser.add_argument("--length_penalty", type=float, help="the exponent of the length in beam search")
    parser.add_argument("--max_new_tokens", type=positive, help="of the output (default: source + 50)")
    parser.add_argument(
        "--max_source_length", type=positive, help="tokens of the longest line translated as one (default: what fits)"
    )
    parser.add_argument(
        "--too_long",
        choices=["split", "refuse"],
        default="split",
        help="what becomes of a longer line: its sentences are translated in pieces, or it ends the command, which "
        "says its number (default: %(default)s)",
    )
    parser.add_argument("--max_tokens", type=positive, default=4096, help="tokens in a batch (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the GPU, if there is one)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, ... (default: as the model was saved)")
    return parser.parse_args()


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)


def main():
    """Translates standard input to standard output, line by line."""
    options = parse_options()
    generation = {name: getattr(options, name) for name in ("num_beams", "length_penalty", "max_new_tokens")}
    generation = {name: value for name, value in generation.items() if value is not None}
    sys.stdin.reconfigure(encoding="utf-8", newline="\n")
    sys.stdout.reconfigure(encoding="utf-8")
    disable_progress_bar()  # of transformers, while it loads
    loading = {"max_tokens", "max_source_length", "too_long", "device", "dtype", "revision", "trust_remote_code"}
    try:
        translator = Translator.from_pretrained(
            options.model, **{name: value for name, value in vars(options).items() if name in loading and value}
        )
    except Exception as error:  # a damaged file can make the libraries raise anything
        sys.exit(f"translation: {options.model} cannot be loaded: {' '.join(str(error).split())}")
    done = 0
    # From a terminal each line is answered when it is typed.
    size = 1 if sys.stdin.isatty() else LINES_AT_A_TIME
    try:
        while lines := [line.rstrip("\r\n") for line in islice(sys.stdin, size)]:
            label = f"Translating from line {done + 1:,}" if done else "Translating"
            for text in translator(lines, label, **generation):
                print(text.replace("\n", " "))  # one line, whatever the model wrote
            sys.stdout.flush()
            done += len(lines)
    except UnicodeDecodeError as error:
        sys.exit(f"translation: the input is not UTF-8 after line {done}: {error}")
    except TextTooLong as error:
        remedy = "shorten it" if options.too_long == "split" else "shorten it, or choose --too_long split"
        sys.exit(
            f"translation: line {done + error.number + 1} has {error.tokens} tokens, and the longest that can be "
            f"translated as one {error.limit}; {remedy}."
        )
    except BrokenPipeError:
        # Who reads the output has had enough; without this Python would complain when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # what a shell reports for a program that SIGPIPE ends
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
