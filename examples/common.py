"""Shared by the examples: their options, and writing a dataset into a new directory."""

import argparse
import csv
import io
import json
import sys
from pathlib import Path

Pair = tuple[str, str]  # source and target


def make_parser(description: str, output_dir: str, is_random: bool = True) -> argparse.ArgumentParser:
    """The options of an example, with its docstring as it is."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # not in Jupyter
        sys.stdout.reconfigure(errors="backslashreplace")  # in an encoding without the letters of a pair
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "a new directory for the dataset (default: %(default)s)"
    parser.add_argument("--output_dir", default=output_dir, help=text)
    if is_random:
        parser.add_argument("--seed", type=int, default=42, help="seed of the random pairs (default: %(default)s)")
    return parser


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
