"""Convert a model to one of this package, saved as safetensors with its tokenizer and the code that loads it.

Converts Marian models, and models of this package whose weights are in a pickle (pytorch_model.bin). A pickle is read
with torch.load(weights_only=True), which runs no code in it.
"""

import argparse
import sys
from pathlib import Path

from transformers import AutoTokenizer

from ..conversion import load_foreign
from ..errors import UserError, one_line


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("model", metavar="DIR_OR_ID", help="a model directory or a Hub id")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", type=Path, help="a new directory")


def run(options: argparse.Namespace):
    """Writes the converted model to `output_dir`, which must not exist."""
    if options.output_dir.exists():
        raise UserError(f"{options.output_dir} already exists; choose another directory.")
    try:
        model = load_foreign(options.model)
    except Exception as error:  # a damaged pickle can make torch raise anything
        reason = one_line(error)
        if "weights_only" in reason:  # torch advises to load it anyway
            reason = "its pickle holds more than tensors, possibly code, and is not loaded."
        raise UserError(f"{options.model} cannot be converted: {reason}") from error
    model.save_pretrained(options.output_dir)
    try:
        AutoTokenizer.from_pretrained(options.model, trust_remote_code=False).save_pretrained(options.output_dir)
    except Exception as error:  # likewise
        print(f"{options.model} has no tokenizer that can be loaded: {one_line(error)}", file=sys.stderr)
    print(f"Saved the model to {options.output_dir}.")
