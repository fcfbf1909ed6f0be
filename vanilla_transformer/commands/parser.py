"""Shared by the commands: a parser with one-sentence errors, types of options, and options of several commands."""

import argparse
from collections.abc import Iterable
from dataclasses import fields

import torch
from transformers import HfArgumentParser

from ..data.options import DatasetOptions
from ..errors import one_line
from ..option_fields import HelpFormatter

# Options that go to `Translator.from_pretrained`, and those that go to `generate`.
LOADING = ("trust_remote_code", "backend", "quantization", "max_source_length", "max_tokens", "device", "dtype")
LOADING += ("max_source_sentences", "max_source_lines", "revision")
GENERATION = ("num_beams", "length_penalty", "max_new_tokens")


class Parser(HfArgumentParser):
    """Reports bad usage in one sentence, with exit code 2. Takes options from dataclasses too.

    Attributes:
        takes_rest: Whether `parse_args` puts words that it does not know into `rest`, for another program. By default,
            they are an error.
    """

    takes_rest = False

    def __init__(self, *args, formatter_class=HelpFormatter, **kwargs):
        super().__init__(*args, formatter_class=formatter_class, **kwargs)  # that of HfArgumentParser repeats defaults

    def parse_args(self, args=None, namespace=None):
        if not self.takes_rest:
            return super().parse_args(args, namespace)
        options, options.rest = self.parse_known_args(args, namespace)
        return options

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see --help.\n")


def positive(text: str) -> int:
    """A positive integer, as the type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def device(text: str) -> str:
    """The name of a device that this machine has, as the type of an option."""
    try:
        torch.empty(0, device=text).cpu()  # which "meta" cannot
    except Exception as error:  # torch raises many kinds
        reason = f"{text} is not a device of this machine: {one_line(error).partition('.')[0]}"
        raise argparse.ArgumentTypeError(reason) from error
    return text


def add_dataset_options(parser: argparse.ArgumentParser, required: bool):
    """Adds the options for a split of a dataset."""
    add = parser.add_argument
    for field in fields(DatasetOptions):
        is_required = required and field.name == "dataset_name"
        add(f"--{field.name}", required=is_required, **field.metadata)
    add("--split", default="test", help="a split, or test[:100], test+dev, ... (default: %(default)s)")


def dataclass_of(kind: type, options: argparse.Namespace):
    """The dataclass whose fields are options of a command."""
    return kind(**values_of(options, [field.name for field in fields(kind)]))


def values_of(options: argparse.Namespace, names: Iterable[str]) -> dict[str, object]:
    """Some options of a command, by their names."""
    return {name: getattr(options, name) for name in names}


def add_engine_options(parser: argparse.ArgumentParser):
    """Adds the options that say which version of a model runs, and in which engine."""
    add = parser.add_argument
    add("--revision", help="the commit, branch or tag on the Hub (default: main)")
    add("--backend", choices=["torch", "ctranslate2"], default="torch", help="ctranslate2, an extra, is faster")
    add("--quantization", help="of the weights with ctranslate2: int8, float16, ... (default: none)")


def add_translation_options(parser: argparse.ArgumentParser):
    """Adds options of [`Translator`] and of `generate` that several commands have."""
    add = parser.add_argument
    code = "run the code that a model brings: its tokenizer, its `generate`, and the model itself if it is of a type "
    code += "that neither this package nor transformers has; it may do all that you may"
    add_engine_options(parser)
    add("--trust_remote_code", action="store_true", help=code)
    add("--num_beams", type=positive, help="beams (default: those of the model)")
    add("--length_penalty", type=float, help="divide scores of beams by length to this power")
    add("--max_new_tokens", type=positive, help="maximum length of a translation in tokens (default: the model's)")
    add(
        "--max_source_length",
        type=positive,
        help="most tokens of a text that is translated at once; a longer one is cut, at ends of sentences if it "
        "has some (default: the longest in training; of a single sentence, all positions)",
    )
    add("--max_source_sentences", type=positive, help="most sentences translated at once (default: as in training)")
    add("--max_source_lines", type=positive, help="most lines translated at once (default: as in training)")
    add("--max_tokens", type=positive, default=4096, help="source tokens in a batch (default: %(default)s)")
    add("--device", type=device, help="cpu, cuda, cuda:1, ... (default: the GPU, if there is one)")
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    add("--dtype", choices=dtypes, default="auto", help="of the weights with torch; auto: as saved (default: auto)")
