"""Say what to type to train: train.py is a script of your own, which `vanilla-transformer new` writes."""

import argparse
import glob
import shlex
from pathlib import Path

from ..errors import UserError
from .parser import Parser


def add_arguments(parser: Parser):
    """All words go to `options.rest`: they are options of train.py, which checks them itself."""
    parser.takes_rest, parser.usage = True, "vanilla-transformer train [--option value ...]"


def run(options: argparse.Namespace):
    """Raises UserError with the commands that train with these options."""
    script, before = "train.py", "`vanilla-transformer new mine && cd mine`, then "
    if Path(script).exists():
        before = ""
    elif any(glob.glob(word.split("=")[-1]) for word in options.rest):  # paths from here, wrong in another directory
        script, before = "mine/train.py", "`vanilla-transformer new mine`, then "
    command = shlex.join(["accelerate", "launch", script, *options.rest])
    raise UserError(f"train.py, a script to read and change, does the training; run {before}`{command}`.")
