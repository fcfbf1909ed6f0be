"""Convert a model and its tokenizer to the format of this package, or to that of another engine.

The model may be one of this package, a Marian, Pegasus, Blenderbot or FSMT model of transformers, a checkpoint of
fairseq (.pt), or a model.npz of Marian. Weights in a pickle are read with `weights_only=True`, so that no code in it
runs.
"""

import argparse
import importlib
import sys
from contextlib import suppress
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..conversion import fairseq_tokenizer, from_fairseq
from ..conversion.marian import save_tokenizer, to_native
from ..conversion.marian_reader import from_marian_files
from ..conversion.marian_writer import to_marian_files
from ..errors import UserError, explaining, noting, one_line
from ..files import check_missing, copy_permissions, new_folder
from ..loading import load_foreign, load_tokenizer, noted_languages
from ..translation_vanilla_transformer import TorchEngine

FORMS = {
    "vanilla": "a model of this package (the default)",
    "native": "a Marian, Pegasus or Blenderbot model, which transformers loads without remote code",
    "ctranslate2": "for CTranslate2",
    "onnx": "for transformers.js and optimum",
    "marian-bin": "for Marian, Bergamot and the engine in Firefox",
}
PACKAGES = {  # that a form needs
    "ctranslate2": ("ctranslate2",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "marian-bin": ("sentencepiece", "protobuf"),
}
NEED_TOKENIZER = ("ctranslate2", "onnx", "marian-bin")


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
    """Converts, and prints where the result is."""
    convert(options.model, options.output_dir, options.to, options.quantization, options.dictionary, options.codes)
    print(f"Saved the model to {options.output_dir}.")


def convert(
    model: str,
    output_dir: Path,
    form: str,
    quantization: str | None = None,
    dictionary: Path | None = None,
    codes: Path | None = None,
):
    """Writes the converted model to the new directory `output_dir`, all of it or, after an error, nothing.

    The arguments are the options. Raises UserError for those that do not go together.
    """
    check_missing(output_dir)
    if quantization and form not in ("ctranslate2", "marian-bin"):
        raise UserError("--quantization is for --to ctranslate2 and marian-bin; leave one of the two out.")
    if (dictionary or codes) and not model.endswith((".pt", ".npz")):
        raise UserError("--dictionary and --codes are for a checkpoint of fairseq (.pt) or Marian (.npz); drop them.")
    if model.endswith(".npz") and not dictionary:
        raise UserError("A model of Marian needs its vocabulary; give --dictionary vocab.spm.")
    if codes and model.endswith(".npz"):
        raise UserError("--codes are for a checkpoint of fairseq (.pt); leave them out.")
    if codes and not dictionary:
        raise UserError("--codes need --dictionary; give fairseq's dict.*.txt too.")
    with noting(f"while converting {model}"):
        loaded, tokenizer, problem = load(model, dictionary, codes)
        if tokenizer is None and form in NEED_TOKENIZER:
            raise UserError(problem)
        if tokenizer is None:
            print(problem, file=sys.stderr)
        TorchEngine([loaded])  # raises InputError for a generation config with which the result would not load
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(output_dir) as folder:
            write_form(loaded, tokenizer, folder, form, quantization)
            copy_permissions(folder)


def load(model: str, dictionary: Path | None, codes: Path | None) -> tuple:
    """The model as one of this package, and its tokenizer, or None and a sentence that says why there is none."""
    problem = f"{model} has no tokenizer that can be loaded: "
    if model.endswith(".npz"):
        return *from_marian_files(Path(model), dictionary), None
    if model.endswith(".pt"):
        if dictionary is None:
            return from_fairseq(model), None, f"{problem}give --dictionary, and --codes, to make one."
        tokenizer, size = fairseq_tokenizer(dictionary, codes)
        return from_fairseq(model, size, len(tokenizer) - size), tokenizer, None
    loaded = load_foreign(model)
    try:
        tokenizer = load_tokenizer(model)
    except Exception as error:  # a damaged tokenizer can raise anything
        return loaded, None, problem + one_line(error)
    with suppress(UserError):  # damaged results: only the languages stay unnamed
        if languages := noted_languages(model, tokenizer, None):
            tokenizer.init_kwargs |= dict(zip(("source_lang", "target_lang"), languages, strict=True))
    return loaded, tokenizer, None


def write_form(
    model, tokenizer: PreTrainedTokenizerBase | None, output_dir: Path, form: str, quantization: str | None
):
    """Saves the model in one of [`FORMS`]."""
    if form == "native":
        to_native(model).save_pretrained(output_dir)
        if tokenizer is not None:
            save_tokenizer(tokenizer, output_dir)
    elif form == "vanilla":
        model.save_pretrained(output_dir)
        if tokenizer is not None:
            tokenizer.save_pretrained(output_dir)
    elif form == "marian-bin":
        to_marian_files(model, tokenizer, output_dir, quantization)
    else:
        with explaining(f"this form needs `pip install {' '.join(PACKAGES[form])}`", ImportError):
            engine = importlib.import_module(f"..conversion.{form}", __package__)
        if form == "onnx":
            engine.to_onnx(model, tokenizer, output_dir)
        else:
            engine.to_ctranslate2(model, tokenizer, output_dir, quantization)
