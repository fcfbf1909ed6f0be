"""How a command that reads standard input and writes standard output ends."""

import contextlib
import os
import sys
from collections.abc import Iterator

from ..errors import UserError


@contextlib.contextmanager
def filter_errors(program: str) -> Iterator[None]:
    """Ends a program as other Unix filters end: at most one sentence instead of a traceback, and their exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        sys.exit(141)  # 128 + SIGPIPE
    except OSError as error:
        discard_output()
        sys.exit(f"{program}: cannot read the input or write the output: {error}")
    except UserError as error:
        sys.exit(f"{program}: {error}")
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # 128 + SIGINT; sys.exit would wait for the threads of a running batch


def discard_output():
    """Without this Python complains when it flushes standard output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
