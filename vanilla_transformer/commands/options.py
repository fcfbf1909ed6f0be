"""Shared by the commands: a parser with one-sentence errors, and types of options."""

import argparse


class Parser(argparse.ArgumentParser):
    """Reports bad usage in one sentence, with exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see --help.\n")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)
