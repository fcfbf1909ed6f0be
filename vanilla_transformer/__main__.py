"""The command line: `vanilla-transformer VERB ...`, or `python -m vanilla_transformer VERB ...`."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable

from vanilla_transformer_command import VERBS, make_parser

from . import __version__
from .commands.parser import Parser
from .errors import configure_messages
from .sentences_vanilla_transformer import InputError


def main(argv: list[str] | None = None):
    """Runs the verb that the command line begins with; only its module is imported."""
    configure_messages()
    parser = make_parser(__version__, Parser)
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
