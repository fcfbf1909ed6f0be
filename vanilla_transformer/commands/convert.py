"""Convert a model and its tokenizer to the format of this package, or from it to that of another engine.

The model may be one of this package, a Marian, Pegasus, Blenderbot or FSMT model of transformers, a checkpoint of
fairseq (.pt), or a model.npz of Marian. Weights in a pickle are read with `weights_only=True`, so that no code in it
runs.
"""

import argparse
import importlib
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..conversion import fairseq_tokenizer, from_fairseq
from ..conversion.marian import save_tokenizer, to_native
from ..conversion.marian_files import from_marian_files, to_marian_files
from ..errors import UserError, explaining, noting, one_line
from ..files import check_missing, copy_permissions, new_folder
from ..loading import load_foreign, load_tokenizer
from ..translation_vanilla_transformer import TorchEngine

FORMS = {
    "vanilla": "a model of this package (the default)",
    "native": "a Marian, Pegasus or Blenderbot model, which transformers loads without remote code",
    "ctranslate2": "for CTranslate2",
    "onnx": "for transformers.js and optimum",
    "marian-bin": "for Marian, Bergamot and the engine in Firefox",
}
PACKAGES = {  # extras
    "ctranslate2": "ctranslate2",
    "onnx": "onnx onnxruntime onnxscript",
    "marian-bin": "sentencepiece protobuf",
}


def add_arguments(parser: argparse.ArgumentParser):
    """The options of `vanilla-transformer convert`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model directory, a Hub id, a .pt of fairseq or an .npz of Marian")
    add("output_dir", metavar="OUTPUT_DIR", type=Path, help="a new directory")
    forms = "; ".join(f"{form}: {use}" for form, use in FORMS.items())
    add("--to", choices=FORMS, default="vanilla", help=f"the form to write: {forms}")
    add(
        "--quantization",
        help="of the weights, for ctranslate2: int8, float16, ...; for marian-bin: int8 (default: none)",
    )
    add(
        "--dictionary", metavar="FILE", type=Path, help="to make a tokenizer from: fairseq's dict.*.txt, Marian's .spm"
    )
    add("--codes", metavar="FILE", type=Path, help="the codes of subword-nmt that go with the dictionary")


def run(options: argparse.Namespace):
    """Writes the converted model to the new directory `output_dir`, all of it or, after an error, nothing."""
    output_dir = options.output_dir
    check_missing(output_dir)
    if options.quantization and options.to not in ("ctranslate2", "marian-bin"):
        raise UserError("--quantization is for --to ctranslate2 and marian-bin; leave one of the two out.")
    if (options.dictionary or options.codes) and not options.model.endswith((".pt", ".npz")):
        raise UserError("--dictionary and --codes are for a checkpoint of fairseq (.pt) or Marian (.npz); drop them.")
    if options.model.endswith(".npz") and not options.dictionary:
        raise UserError("A model of Marian needs its vocabulary; give --dictionary vocab.spm.")
    if options.codes and not options.dictionary:
        raise UserError("--codes need --dictionary; give fairseq's dict.*.txt too.")
    with noting(f"while converting {options.model}"):
        model, tokenizer = load(options)
        TorchEngine([model])  # raises InputError for a generation config with which the result would not load
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(output_dir) as folder:
            write_form(model, tokenizer, folder, options)
            copy_permissions(folder)
    print(f"Saved the model to {output_dir}.")


def load(options: argparse.Namespace) -> tuple:
    """The model as one of this package, and its tokenizer or None."""
    if options.model.endswith(".npz"):
        return from_marian_files(Path(options.model), options.dictionary)
    if options.model.endswith(".pt"):
        if options.dictionary is None:
            no_tokenizer(options, "give --dictionary, and --codes, to make one.")
            return from_fairseq(options.model), None
        tokenizer, size = fairseq_tokenizer(options.dictionary, options.codes)
        return from_fairseq(options.model, size, len(tokenizer) - size), tokenizer
    model = load_foreign(options.model)
    try:
        return model, load_tokenizer(options.model)
    except Exception as error:  # a damaged tokenizer can raise anything
        no_tokenizer(options, one_line(error))
        return model, None


def no_tokenizer(options: argparse.Namespace, reason: str):
    """Prints that the model is saved without a tokenizer; raises UserError if the form to write needs one."""
    reason = f"{options.model} has no tokenizer that can be loaded: {reason}"
    if options.to in PACKAGES:
        raise UserError(reason)
    print(reason, file=sys.stderr)


def write_form(model, tokenizer: PreTrainedTokenizerBase | None, output_dir: Path, options: argparse.Namespace):
    """Saves the model in the form that `options.to` names."""
    if options.to == "native":
        to_native(model).save_pretrained(output_dir)
        return tokenizer and save_tokenizer(tokenizer, output_dir)
    if options.to == "vanilla":
        model.save_pretrained(output_dir)
        return tokenizer and tokenizer.save_pretrained(output_dir)
    if options.to == "marian-bin":
        return to_marian_files(model, tokenizer, output_dir, options.quantization)
    with explaining(f"this form needs `pip install {PACKAGES[options.to]}`", ImportError):
        engine = importlib.import_module(f"..conversion.{options.to}", __package__)
    if options.to == "onnx":
        return engine.to_onnx(model, tokenizer, output_dir)
    return engine.to_ctranslate2(model, tokenizer, output_dir, options.quantization)
