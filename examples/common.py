"""Shared by the examples: their options, and writing files without overwriting others."""

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


def json_lines(pairs: list[Pair]) -> str:
    return "".join(json.dumps({"source": s, "target": t}, ensure_ascii=False) + "\n" for s, t in pairs)


def comma_separated(pairs: list[Pair]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([("source", "target"), *pairs])
    return file.getvalue()


def write_dataset(output_dir: str, splits: dict[str, list[Pair]], suffix: str = ".jsonl"):
    """Writes one file per split, with the layout of a Hub dataset, and prints their sizes."""
    as_text = {".jsonl": json_lines, ".csv": comma_separated}[suffix]
    write_files(output_dir, {f"{split}{suffix}": as_text(pairs) for split, pairs in splits.items()})
    for split, pairs in splits.items():
        source, target = pairs[0]
        print(f"{output_dir}/{split}{suffix}: {len(pairs):,} pairs, the first: {source} -> {target}")


def write_files(output_dir: str, files: dict[str, str], option: str = "--output_dir"):
    """Writes files (name -> text); exits if the directory already contains others.

    Identical files are accepted, so that a command can be repeated.
    """
    directory = Path(output_dir)
    data = {name: text.encode() for name, text in files.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            if path.name not in data or path.read_bytes() != data[path.name]:
                sys.exit(f"{option} {output_dir} contains other files and is not overwritten; choose another.")
        for name, content in data.items():
            (directory / name).write_bytes(content)
    except OSError as error:
        sys.exit(f"{option} {output_dir} cannot be written: {error.strerror}; choose another.")
