"""The command line: `vanilla-transformer VERB ...`, or `python -m vanilla_transformer VERB ...`."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable

from . import __version__
from .commands.parser import Parser
from .errors import configure_messages
from .sentences_vanilla_transformer import InputError

VERBS = {
    "new": ("make a directory to train in: train.py, recipes and a sample", "new mine"),
    "train": ("say how to train, which is a script in that directory", "train --train_file pairs.tsv"),
    "translate": ("translate text, line by line", "translate --model outputs/sample < in.txt > out.txt"),
    "convert": (
        "convert models from other libraries, and to them",
        "convert outputs/sample outputs/sample-ct2 --to ctranslate2",
    ),
    "evaluate": (
        "score models and translations, and compare them",
        "evaluate --model outputs/sample --dataset_name sample_dataset --source_lang en --target_lang de",
    ),
    "distill": (
        "train a small model on the translations of a large one",
        "distill --teacher Helsinki-NLP/opus-mt-en-de --source_file mono.en --output_dir outputs/student",
    ),
    "inspect": (
        "show shapes, attention maps and word alignments; make a page to explore",
        "inspect shapes --d_model 512 --batch_size 30",
    ),
    "demo": ("serve a web page to try a model", "demo --model outputs/sample"),
    "serve": ("serve models over LibreTranslate's HTTP interface", "serve outputs/sample"),
}


def main(argv: list[str] | None = None):
    """Runs the verb that the command line begins with; only its module is imported."""
    configure_messages()
    lines = [f"  {name:<10} {text}\n{'':13}vanilla-transformer {example}" for name, (text, example) in VERBS.items()]
    parser = Parser(
        prog="vanilla-transformer",
        usage="vanilla-transformer VERB ...",
        description="\n".join(["Train translation models and use them.", "", "verbs, each with an example:", *lines]),
        epilog="vanilla-transformer VERB --help lists the options of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vanilla-transformer {__version__}")
    parser.add_argument("verb", choices=VERBS, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])

    run, parser = load_verb(given.verb)
    program = parser.prog
    options = parser.parse_args(given.options)
    # The user's mistakes end as in other Unix filters: one sentence on stderr, and a conventional exit code.
    try:
        run(options)
        sys.stdout.flush()
    except InputError as error:
        sys.exit(f"{program}: {error}")
    except OSError as error:
        if error.errno is None:  # not from the system: a library takes this kind for mistakes of all sorts
            raise
        if error.filename is not None:
            sys.exit(f"{program}: {error}")
        # Discards the output, or Python would complain when it flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = f"{program}: cannot read the input or write the output: {error}"
        sys.exit(141 if isinstance(error, BrokenPipeError) else reason)  # 128 + SIGPIPE
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # 128 + SIGINT; sys.exit would wait for the threads of a running batch


def load_verb(verb: str) -> tuple[Callable[[argparse.Namespace], None], Parser]:
    """The function that runs a verb, and the parser of its options."""
    command = importlib.import_module(f".commands.{verb}", __package__)
    example = f"example: vanilla-transformer {VERBS[verb][1]}"
    prog, dataclasses = f"vanilla-transformer {verb}", getattr(command, "DATACLASSES", None)
    parser = Parser(dataclasses, prog=prog, description=command.__doc__, epilog=example)
    command.add_arguments(parser)
    return command.run, parser


if __name__ == "__main__":
    main()
