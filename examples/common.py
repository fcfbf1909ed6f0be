"""Shared by the examples: their options, and writing a dataset into a new directory."""

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from typing import NoReturn

Pair = tuple[str, str]  # source and target


class Parser(argparse.ArgumentParser):
    """Shows the docstring of a script as it is, and reports a wrong option in one sentence."""

    def __init__(self, description: str):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        if isinstance(sys.stdout, io.TextIOWrapper):  # not in Jupyter
            sys.stdout.reconfigure(errors="backslashreplace")  # in an encoding without the letters of a pair

    def add_output_dir(self, default: str):
        text = f"a new directory for the dataset (default: {default})"
        self.add_argument("--output_dir", default=default, help=text)

    def add_seed(self):
        self.add_argument("--seed", type=seed, default=42, help="seed of the random pairs (default: %(default)s)")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def seed(text: str) -> int:
    if not text.isdecimal():  # random.Random uses -1 as 1
        raise argparse.ArgumentTypeError(f"{text} is not a non-negative integer")
    return int(text)


def write_dataset(output_dir: str, splits: dict[str, list[Pair]], suffix: str = ".jsonl"):
    """Writes one file per split, with the layout of a Hub dataset, and prints their sizes."""
    directory = new_directory(output_dir)
    for split, pairs in splits.items():
        path = directory / f"{split}{suffix}"
        with open(path, "w", encoding="utf-8", newline="") as file:
            if suffix == ".csv":
                csv.writer(file, lineterminator="\n").writerows([("source", "target"), *pairs])
            else:
                rows = ({"source": source, "target": target} for source, target in pairs)
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        source, target = pairs[0]
        print(f"{path}: {len(pairs):,} pairs, the first: {source} -> {target}")


def new_directory(path: str, option: str = "--output_dir") -> Path:
    """Creates a directory; exits if it exists."""
    try:
        Path(path).mkdir(parents=True)
    except OSError as error:
        sys.exit(f"{option} {path} cannot be created: {error.strerror}; choose another.")
    return Path(path)
