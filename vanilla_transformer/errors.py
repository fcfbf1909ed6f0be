"""The one exception that scripts show without a traceback."""

import contextlib
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
