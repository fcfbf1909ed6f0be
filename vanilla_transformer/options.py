"""Dataclass fields as command-line options: a default, a help text and limits."""

import argparse
import math
from dataclasses import field
from functools import partial

from .errors import UserError


class Number(argparse.Action):
    """Stores a number or a list of them, or raises UserError unless `ge` <= number < `lt`.

    With `auto`, the word "auto" is stored as None.
    """

    def __init__(self, *args, ge: float, lt: float, auto: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.ge, self.lt = ge, lt
        if auto:
            self.type = number_or_auto

    def __call__(self, parser, namespace, value, option_string=None):
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not self.ge <= number < self.lt:
                limit = f" and below {self.lt:g}" if self.lt < math.inf else ""
                raise UserError(f"--{self.dest} is {number}; it must be at least {self.ge:g}{limit}.")
        setattr(namespace, self.dest, value)


def number_or_auto(text: str) -> int | None:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it is {text}; give a number, or auto")
    return None if text == "auto" else int(text)


def option(default, help: str, ge: float | None = None, lt: float = math.inf, auto: bool = False, **kwargs):
    """A dataclass field with its help text and, for a number, what [`Number`] takes; `kwargs` go to argparse."""
    if ge is not None:
        kwargs["action"] = partial(Number, ge=ge, lt=lt, auto=auto)
    return field(default=default, metadata={"help": help.replace("%", "%%"), **kwargs})
