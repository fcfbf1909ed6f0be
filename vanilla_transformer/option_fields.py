"""Dataclass fields as command-line options: a default, a help text and limits."""

import argparse
import math
from dataclasses import field
from functools import partial

from .errors import UserError


class HelpFormatter(argparse.HelpFormatter):
    """Lists each option in one spelling, `--a_b`, with a short name of its value, as N or FILE."""

    def _get_default_metavar_for_optional(self, action):
        return "N" if action.type in (int, float) else action.dest.rpartition("_")[2].upper()

    def _format_args(self, action, default_metavar):
        if action.const is not True:
            return super()._format_args(action, default_metavar)
        is_switch = action.nargs != "?" or action.default is False  # off by itself
        return "" if is_switch else "{true,false}"

    def _format_action_invocation(self, action):
        action.option_strings = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        return super()._format_action_invocation(action)


class Number(argparse.Action):
    """Stores a number or a list of them, or raises UserError unless `ge` <= number < `lt`.

    With `auto`, the word "auto" is stored as None.
    """

    def __init__(self, *args, ge: float, lt: float, auto: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.ge, self.lt, self.auto = ge, lt, auto
        if auto:
            self.type = str

    def __call__(self, parser, namespace, value, option_string=None):
        if self.auto:
            try:
                value = None if value == "auto" else int(value)
            except ValueError as error:
                raise UserError(f"--{self.dest} is '{value}'; give a number, or auto.") from error
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not self.ge <= number < self.lt:
                limit = f" and below {self.lt:g}" if self.lt < math.inf else ""
                raise UserError(f"--{self.dest} is {number}; it must be at least {self.ge:g}{limit}.")
        setattr(namespace, self.dest, value)


def option(default, help: str, ge: float | None = None, lt: float = math.inf, auto: bool = False, **kwargs):
    """A dataclass field with its help text and, for a number, what [`Number`] takes; `kwargs` go to argparse."""
    if ge is not None:
        kwargs["action"] = partial(Number, ge=ge, lt=lt, auto=auto)
    return field(default=default, metadata={"help": help.replace("%", "%%"), **kwargs})
