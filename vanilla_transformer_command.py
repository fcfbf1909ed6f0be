"""The command `vanilla-transformer`, outside the package, which loads torch: help and version come at once."""

import argparse
import hashlib
import sys
from importlib.metadata import version
from pathlib import Path
from shutil import get_terminal_size

PACKAGE = Path(__file__).with_name("vanilla_transformer")
HELP, COLUMNS = PACKAGE / "help", 80  # what docs/make_help.py writes, and for how wide a terminal
DEFINING_OPTIONS = ("commands/*.py", "*/options.py", "training/recipe.py", "option_fields.py", "configuration_*.py")

VERBS = {
    "new": ("make a directory to train in: train.py, recipes and a sample", "new mine"),
    "train": ("say how to train, which is a script in that directory", "train --train_file pairs.tsv"),
    "translate": ("translate text, line by line", "translate --model outputs/sample < in.txt > out.txt"),
    "convert": (
        "convert models from other libraries, and to them",
        "convert outputs/sample outputs/sample-ct2 --to ctranslate2",
    ),
    "evaluate": (
        "score models and translations, and compare them",
        "evaluate --model outputs/sample --dataset_name sample_dataset --source_lang en --target_lang de",
    ),
    "distill": (
        "train a small model on the translations of a large one",
        "distill --teacher Helsinki-NLP/opus-mt-en-de --source_file mono.en --output_dir outputs/student",
    ),
    "inspect": (
        "show shapes, attention maps and word alignments; make a page to explore",
        "inspect shapes --d_model 512 --batch_size 30",
    ),
    "demo": ("serve a web page to try a model", "demo --model outputs/sample"),
    "serve": ("serve models over LibreTranslate's HTTP interface", "serve outputs/sample"),
}


def main():
    """Prints the help or the version, or else runs a verb."""
    if sys.argv[1:] in ([], ["-h"], ["--help"], ["--version"]):
        make_parser(version("vanilla-transformer")).parse_args(sys.argv[1:] or ["--help"])
    if sys.argv[1] in VERBS:
        show_help(sys.argv[1], sys.argv[2:])
    from vanilla_transformer.__main__ import main  # takes seconds

    main()


def show_help(command: str, words: list[str]):
    """If these words after the command ask for help, prints the one in [`HELP`] and exits; nothing if that is older
    than the code which defines the options, or too wide for the terminal."""
    fits = words in (["-h"], ["--help"]) and get_terminal_size().columns >= COLUMNS
    if fits and (HELP / "made_for.txt").read_text(encoding="utf-8") == options_digest():
        sys.stdout.write((HELP / f"{command}.txt").read_text(encoding="utf-8"))
        sys.exit()


def options_digest() -> str:
    """The SHA-256 of the files that define options."""
    files = sorted(path for pattern in DEFINING_OPTIONS for path in PACKAGE.glob(pattern))
    texts = [path.read_text(encoding="utf-8") for path in files]
    return hashlib.sha256("".join(texts).encode()).hexdigest() + "\n"


def make_parser(number: str, kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser of the verb and the words that follow it; `number` is the version."""
    lines = [f"  {name:<10} {text}\n{'':13}vanilla-transformer {example}" for name, (text, example) in VERBS.items()]
    parser = kind(
        prog="vanilla-transformer",
        usage="vanilla-transformer VERB ...",
        description="\n".join(["Train translation models and use them.", "", "verbs, each with an example:", *lines]),
        epilog="vanilla-transformer VERB --help lists the options of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vanilla-transformer {number}")
    parser.add_argument("verb", choices=VERBS, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
