"""The one exception that scripts show without a traceback."""

import contextlib
import os
import sys
from collections.abc import Iterator


class UserError(Exception):
    """Something that the user can mend: one sentence that names the culprit and the remedy."""


@contextlib.contextmanager
def loading(model: str) -> Iterator[None]:
    """Turns whatever goes wrong in loading a model, which is given by `--model`, into a UserError that names it."""
    try:
        yield
    except Exception as error:  # a damaged file can make the libraries raise anything
        raise UserError(f"{model or '--model'} cannot be loaded: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def as_a_filter(program: str) -> Iterator[None]:
    """Ends a program that reads and writes streams as others end: without a traceback, and with their exit status."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads the output has had enough; without this Python would complain when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # what a shell reports for a program that SIGPIPE ends
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"{program}: the input cannot be read or the output not be written: {error}")
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # sys.exit would wait for the threads that translate
