"""Look inside a model: the shapes of a forward pass, attention maps, word alignments, and a page to explore it."""

import argparse
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryFile

import torch
from huggingface_hub.errors import StrictDataclassError
from tqdm.auto import tqdm
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from .. import Translator, VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..data.options import DatasetOptions
from ..data.rows import hide_bars
from ..data.splits import load_split
from ..errors import UserError, explaining
from ..inspection.alignment import align_words, alignment_error_rate, read_links
from ..inspection.attention import KINDS, attention_maps, draw_attention, index_of
from ..inspection.explorer import explore, write_explorer
from ..inspection.shapes import shape_table, trace_shapes
from ..loading import load_config
from ..training.options import ModelOptions, given_fields
from ..translation_vanilla_transformer import is_vanilla
from .parser import add_dataset_options, dataclass_of, positive


def add_arguments(parser: argparse.ArgumentParser):
    """The options of `vanilla-transformer inspect shapes`, `attention`, `align` and `explorer`."""
    what = parser.add_subparsers(dest="what", required=True, metavar="shapes|attention|align|explorer")
    add_shapes(what)
    for add in (add_attention, add_align, add_explorer):
        add(what).add_argument("--model", required=True, metavar="DIR_OR_ID", help="a model directory or a Hub id")


def add_shapes(what):
    """The options of `inspect shapes`."""
    shapes = what.add_parser(
        "shapes",
        dataclass_types=[ModelOptions],
        description="Print the output shape of each step of a forward pass, with the section of the paper, the "
        "parameters, and the FLOPs of matrix products. Letters: B sentences, S source length, T target length, d "
        "d_model, h heads, k head size, f feed-forward size, V vocabulary size. Nothing is computed, so a model of "
        "any size can be inspected.",
        epilog="example: vanilla-transformer inspect shapes --d_model 512 --batch_size 30 --source_length 200",
        help="the shapes of a forward pass, step by step",
    )
    shapes.add_argument("--model", metavar="DIR_OR_ID", help="inspect this model, instead of one given by options")
    shapes.add_argument("--batch_size", type=positive, default=2, help="B (default: %(default)s)")
    shapes.add_argument("--source_length", type=positive, default=12, help="S (default: %(default)s)")
    shapes.add_argument("--target_length", type=positive, default=10, help="T (default: %(default)s)")
    shapes.add_argument("--all_layers", action="store_true", help="print every layer in full")


def add_attention(what) -> argparse.ArgumentParser:
    """The options of `inspect attention`."""
    attention = what.add_parser(
        "attention",
        description="Translate a text and draw the attention weights of the heads of one layer. `inspect explorer` "
        "shows those of all layers.",
        epilog='example: vanilla-transformer inspect attention --model outputs/sample --text "The dog sleeps." '
        "--output attention.png",
        help="attention weights as a picture",
    )
    attention.add_argument("--text", required=True, help="the text to translate")
    attention.add_argument("--translation", help="its translation (default: what the model generates)")
    attention.add_argument("--output", required=True, type=Path, metavar="FILE", help=".png, .svg or .pdf")
    attention.add_argument("--kind", choices=KINDS, default="cross", help="which attention (default: %(default)s)")
    attention.add_argument("--layer", type=int, default=-1, help="layer, from 0 (default: the last)")
    attention.add_argument("--head", type=int, help="head, from 0; alone it is drawn larger (default: all)")
    attention.add_argument("--num_beams", type=positive, help="beams (default: those of the model)")
    return attention


def add_align(what) -> argparse.ArgumentParser:
    """The options of `inspect align`."""
    align = what.add_parser(
        "align",
        description="Print the word alignment of each sentence pair, from the attention to the source: links source "
        "word - target word, from 0, such as 0-0 1-2. A pair with an empty side, or too long for the model, gets an "
        "empty line. If the dataset has a column `alignment`, the alignment error rate is printed to stderr.",
        epilog="example: vanilla-transformer inspect align --model outputs/sample --dataset_name sample_dataset "
        "--source_lang en --target_lang de",
        help="word alignments of sentence pairs",
    )
    add_dataset_options(align, required=True)
    align.add_argument("--layer", type=int, default=-1, help="decoder layer, from 0 (default: the last)")
    return align


def add_explorer(what) -> argparse.ArgumentParser:
    """The options of `inspect explorer`."""
    explorer = what.add_parser(
        "explorer",
        description="Write a web page to play with a model: step through translations and force other tokens, see the "
        "attention of all heads, the beam tree, the shapes of every step, and what happens without one head, the "
        "positions or the encoder. All is recorded in the page, which needs no network. About a minute for 20 "
        "sentences of a small model.",
        epilog="example: vanilla-transformer inspect explorer --model outputs/sample --dataset_name sample_dataset "
        "--source_lang en --target_lang de --output explorer.html",
        help="a web page to play with a model",
    )
    explorer.add_argument("--output", required=True, type=Path, metavar="FILE", help="the page, an .html file")
    explorer.add_argument("--text", help="a text to translate, instead of the pairs of a dataset")
    add_dataset_options(explorer, required=False)
    explorer.add_argument("--sentences", type=positive, default=20, help="pairs to record (default: %(default)s)")
    return explorer


def run(options: argparse.Namespace):
    """Runs the inspection that was chosen."""
    hide_bars()
    actions = {"shapes": print_shapes, "attention": show_attention, "align": print_alignments, "explorer": make_page}
    with explaining(f"{options.what} failed", StrictDataclassError):  # of an option of the model
        actions[options.what](options)


def load(name: str) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase]:
    """A model and its tokenizer."""
    translator = Translator.from_pretrained(name)
    check_vanilla(name, translator.model.config)
    return translator.model, translator.tokenizer


def check_vanilla(name: str, config: PretrainedConfig):
    if not is_vanilla(config):
        raise UserError(f"{name} is of type {config.model_type}; give a vanilla_transformer model.")


def print_shapes(options: argparse.Namespace):
    """Prints the steps of a model on torch's meta device, where tensors have shapes but no values."""
    given = given_fields(dataclass_of(ModelOptions, options))
    if options.model is None:
        config = VanillaTransformerConfig(**given)
    elif given:
        raise UserError(f"--model and --{next(iter(given))} are both given; drop one of them.")
    else:
        config = load_config(options.model)
        check_vanilla(options.model, config)
    config.pad_token_id = None  # on the meta device no token can be compared with it
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config).eval()
        source = torch.zeros(options.batch_size, options.source_length, dtype=torch.long)
        target = torch.zeros(options.batch_size, options.target_length, dtype=torch.long)
    with explaining("These sizes do not go together", ValueError):
        steps = trace_shapes(model, source, target)
    print("\n".join(shape_table(steps, options.all_layers)))
    flops = sum(step.flops for step in steps)
    print(f"\n{model.num_parameters():,} parameters, shared ones counted once; {flops:,} FLOPs forward")


def show_attention(options: argparse.Namespace):
    """Draws a picture, and prints the translation."""
    if options.output.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--output {options.output} must end in .png, .svg or .pdf.")
    model, tokenizer = load(options.model)
    generation = {"num_beams": options.num_beams} if options.num_beams else {}
    maps = attention_maps(model, tokenizer, options.text, options.translation, **generation)
    with writing(options.output):
        draw_attention(maps, options.output, options.kind, options.layer, options.head)
    print(maps.translation)
    print(f"Saved the attention to {options.output}.", file=sys.stderr)


def make_page(options: argparse.Namespace):
    """Writes the explorer of one text, or of the first pairs of a split."""
    if bool(options.text) == bool(options.dataset_name):
        raise UserError("give either --text or --dataset_name.")
    if options.output.is_dir():
        raise UserError(f"--output {options.output} is a directory; give the name of a file.")
    with writing(options.output), TemporaryFile(dir=options.output.parent):
        pass  # known before minutes of recording
    model, tokenizer = load(options.model)
    pairs = [(options.text, None, None)]
    if options.dataset_name:
        split = load_split(dataclass_of(DatasetOptions, options), options.split).take(options.sentences)
        alignments = split["alignment"] if "alignment" in split.column_names else [None] * len(split)
        pairs = list(zip(split["source"], split["target"], alignments, strict=True))
    recorded = explore(model, tokenizer, pairs)
    with writing(options.output):
        write_explorer(recorded, options.output, f"Inside {Path(options.model).resolve().name}")
    size = options.output.stat().st_size / 2**20
    advice = "; for a smaller page, record fewer or shorter --sentences" if size > 5 else ""
    print(f"Saved the explorer to {options.output}, {size:.1f} MiB{advice}.", file=sys.stderr)


def writing(output: Path) -> AbstractContextManager:
    """Turns an OSError into a UserError that names `output`."""
    return explaining(f"--output {output} cannot be written", OSError)


def print_alignments(options: argparse.Namespace):
    """Prints the links of each pair, and to stderr their error rate over all pairs that have reference links."""
    model, tokenizer = load(options.model)
    layer = index_of("layer", options.layer, model.config.decoder_layers)
    pairs = load_split(dataclass_of(DatasetOptions, options), options.split)
    column = pairs["alignment"] if "alignment" in pairs.column_names else [None] * len(pairs)
    references = [read_links(text, number) for number, text in enumerate(column, start=1)]
    predicted, scored, skipped = [], [], []
    rows = zip(pairs["source"], pairs["target"], references, strict=True)
    for source, target, reference in tqdm(rows, "Aligning", len(pairs), disable=None, leave=False):
        try:
            links = align_words(attention_maps(model, tokenizer, source, target or ""), layer)
        except UserError as error:
            skipped.append(error)
            print()
            continue
        print(" ".join(f"{i}-{j}" for i, j in links))
        if reference:
            predicted.append(set(links))
            scored.append(reference)
    if skipped:
        print(f"Skipped {len(skipped):,} of {len(pairs):,} pairs, the first because: {skipped[0]}", file=sys.stderr)
    if scored:
        rate = alignment_error_rate(predicted, scored)
        print(f"alignment error rate {rate:.3f} over {len(scored):,} pairs", file=sys.stderr)
