"""Say what to type to train: train.py is a script of your own, which `vanilla-transformer new` writes."""

import argparse
import shlex
from pathlib import Path

from ..errors import UserError


def add_arguments(parser: argparse.ArgumentParser):
    """The options of `vanilla-transformer train` are those of train.py, which nobody checks here."""
    parser.usage = "vanilla-transformer train [--option value ...]"


def run(options: argparse.Namespace):
    """Raises UserError with the commands that train with these options."""
    script, before = "train.py", "`vanilla-transformer new mine && cd mine`, then "
    if Path(script).exists():
        before = ""
    elif any(Path(word).exists() for word in options.others):  # files keep their names in this directory
        script, before = "mine/train.py", "`vanilla-transformer new mine`, then "
    command = shlex.join(["accelerate", "launch", script, *options.others])
    raise UserError(f"training is a script to read and change, not a verb; run {before}`{command}`.")
