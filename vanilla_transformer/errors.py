"""The one exception that scripts and commands show without a traceback."""

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """Raised for an error the user can fix. The message is one sentence: what is wrong and how to fix it."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextlib.contextmanager
def loading(model: str) -> Iterator[None]:
    """Turns any error from loading the model given by `--model` into a UserError."""
    try:
        yield
    except Exception as error:  # a damaged file can make the libraries raise anything
        raise UserError(f"{model or '--model'} cannot be loaded: {one_line(error)}") from error
