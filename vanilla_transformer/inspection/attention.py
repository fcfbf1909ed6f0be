"""Look inside a model: the shapes of a forward pass step by step, what its attention looks at, which words it aligns.

python -m vanilla_transformer.inspection.attention shapes --d_model 512 --batch_size 30 --source_length 200 --target_length 200
python -m vanilla_transformer.inspection.attention attention --model outputs/sample --text "The dog sleeps." --output map.html
python -m vanilla_transformer.inspection.attention align --model outputs/sample --dataset_name sample_dataset --source_lang en \
    --target_lang de > alignments.txt
"""

import argparse
import itertools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from matplotlib.figure import Figure
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..commands.streams import filter_errors
from ..commands.translate import positive
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data.pairs import is_filled, read_split
from ..errors import UserError, loading
from ..modeling_vanilla_transformer import VanillaTransformerAttention, VanillaTransformerForConditionalGeneration
from ..training.arguments import MODEL_OPTIONS, Parser, model_fields
from ..translation_vanilla_transformer import Translator

# ------------------------------------------------------------------------------------------------------------- shapes


@dataclass
class Step:
    """A tensor that a forward pass makes: where, what, and its shape in the letters of the modelling file."""

    module: str
    what: str
    section: str  # of the paper
    letters: tuple[str, ...]
    shape: tuple[int, ...]
    parameters: int
    flops: int  # of matrix products, a multiplication and an addition being two


# What comes out of the modules, by their names. L is S in the encoder and T in the decoder, A the length attended to.
STEPS = {
    "embed_tokens": ("embeddings", "3.4", "B,L,d"),
    "embed_positions": ("positions", "3.5", "B,L,d"),
    "q_proj": ("queries, in heads", "3.2.2", "B,h,L,k"),
    "k_proj": ("keys, in heads", "3.2.2", "B,h,A,k"),
    "v_proj": ("values, in heads", "3.2.2", "B,h,A,k"),
    "weights": ("attention: softmax(Q K^T / sqrt(k))", "3.2.1", "B,h,L,A"),
    "heads": ("attention times V, heads joined", "3.2.1", "B,L,d"),
    "out_proj": ("multi-head attention", "3.2.2", "B,L,d"),
    "self_attn_layer_norm": ("layer norm, around self-attention", "3.1", "B,L,d"),
    "encoder_attn_layer_norm": ("layer norm, around attention to the source", "3.1", "B,L,d"),
    "fc1": ("feed-forward, inner", "3.3", "B,L,f"),
    "activation_fn": ("its activation", "3.3", "B,L,f"),
    "fc2": ("feed-forward", "3.3", "B,L,d"),
    "final_layer_norm": ("layer norm, around the feed-forward", "3.1", "B,L,d"),
    "layer_norm": ("layer norm, at the end of the stack", "3.1", "B,L,d"),
    "lm_head": ("logits", "3.4", "B,L,V"),
}


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Lets the model attend by the eager backend, the one that tells the weights, and then as before."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def trace_shapes(
    model: VanillaTransformerForConditionalGeneration, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor
) -> list[Step]:
    """What each module of a forward pass over source (B,S) and target (B,T) returns, in order.

    Of attention also the weights, and what they are multiplied with. Hooks look on; nothing is changed.
    """
    steps: list[Step] = []
    hooks = []

    def note(name: str, kind: str, tensor: torch.Tensor, parameters: int = 0):
        """Adds a step, with L and A as they are in the stack that it is of."""
        what, section, letters = STEPS[kind]
        in_encoder = ".encoder." in name
        attended = "S" if in_encoder or ".encoder_attn." in name else "T"
        letters = letters.replace("L", "S" if in_encoder else "T").replace("A", attended)
        if kind == "embed_positions" and model.config.position_embedding_type == "rotary":
            what, letters = "angles, by which queries and keys are turned", letters.replace("d", "k")
        if kind == "embed_positions" and len(tensor) == 1:
            what, letters = f"{what}, the same for all sentences", letters.replace("B", "1")
        steps.append(Step(name, what, section, tuple(letters.split(",")), tuple(tensor.shape), parameters, 0))

    def watch(name: str, module: nn.Module):
        """Hooks what notes the output of a module, and what attention has made on the way to it."""
        kind = name.rpartition(".")[2]
        own = sum(parameter.numel() for parameter in module.parameters())

        def after(_, inputs, output):
            if kind == "out_proj":
                note(name.removesuffix(kind) + "heads", "heads", inputs[0])
            if kind in ("q_proj", "k_proj", "v_proj"):
                attention = model.get_submodule(name.rpartition(".")[0])
                output = attention.split_heads(output)
            note(name, kind, output, own)

        def after_attention(_, inputs, output):
            note(name + ".weights", "weights", output[1])
            steps.insert(-2, steps.pop())  # before `heads` and `out_proj`, which are noted already

        if isinstance(module, VanillaTransformerAttention):
            hooks.append(module.register_forward_hook(after_attention))
        elif kind in STEPS and not isinstance(module, nn.Identity):
            hooks.append(module.register_forward_hook(after))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        with eager_attention(model), FlopCounterMode(display=False) as counter:
            model(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    counts = {name.partition(".")[2]: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    for step in steps:
        step.flops = flops_of(step.module, counts)
    return steps


def flops_of(name: str, counts: dict[str, int]) -> int:
    """Of a module, or of one of the two products that attention makes itself, which take equally many."""
    attention, _, kind = name.rpartition(".")
    if kind not in ("weights", "heads"):
        return counts.get(name, 0)
    projections = sum(counts.get(f"{attention}.{one}", 0) for one in ("q_proj", "k_proj", "v_proj", "out_proj"))
    return (counts.get(attention, 0) - projections) // 2


def show_shapes(steps: list[Step], all_layers: bool) -> Iterator[str]:
    """The lines of a table; layers after the first of each stack are one line each, unless all are wanted."""
    rows = [("module", "what", "section", "shape", "in numbers", "parameters", "FLOPs")]
    for layer, of_layer in itertools.groupby(steps, key=layer_of):
        found = list(of_layer)
        if layer and not layer.endswith(".0") and not all_layers:
            sums = counted(sum(step.parameters for step in found), sum(step.flops for step in found))
            rows.append((layer, f"the same {len(found)} steps", "", "", "", *sums))
            continue
        for step in found:
            letters, numbers = ",".join(step.letters), ", ".join(map(str, step.shape))
            counts = counted(step.parameters, step.flops)
            rows.append((step.module, step.what, step.section, f"({letters})", f"({numbers})", *counts))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        texts = [cell.ljust(width) for cell, width in zip(row[:5], widths, strict=False)]
        numbers = [cell.rjust(width) for cell, width in zip(row[5:], widths[5:], strict=True)]
        yield "  ".join(texts + numbers)


def layer_of(step: Step) -> str:
    """As model.encoder.layers.0; empty outside of the layers."""
    found = re.match(r".*\.layers\.\d+", step.module)
    return found[0] if found else ""


def counted(parameters: int, flops: int) -> tuple[str, str]:
    return f"{parameters:,}" if parameters else "", f"{flops:,}" if flops else ""


# ---------------------------------------------------------------------------------------------------------- attention


@dataclass
class Token:
    """A token as people read it, and the number of the word that it belongs to: None for a special token."""

    text: str
    word: int | None


@dataclass
class AttentionMaps:
    """What each head looks at while a text is translated: each row of a map (..., rows, columns) sums to one."""

    source: list[Token]  # S
    target: list[Token]  # T, as they are written
    read: list[Token]  # T, as they are read: the start token and all but the last
    encoder: torch.Tensor  # (layers,h,S,S)
    decoder: torch.Tensor  # (layers,h,T,T)
    cross: torch.Tensor  # (layers,h,T,S)
    translation: str = ""

    def axes(self, kind: str) -> tuple[list[Token], list[Token]]:
        """The tokens of the rows and of the columns."""
        return {
            "encoder": (self.source, self.source),
            "decoder": (self.read, self.read),
            "cross": (self.target, self.source),
        }[kind]


@torch.no_grad()
def attention_maps(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    translation: str | None = None,
    **generation,
) -> AttentionMaps:
    """The attention of a translation, by a second pass that is forced through the eager backend.

    Args:
        translation: What the decoder is made to write. None: what the model writes, by `generate`, which gets
            `generation`.

    Raises UserError if the text, or the translation, is empty or longer than the model's positions.
    """
    source = encode(model, tokenizer, "text", text=text)
    if translation is not None:
        target = encode(model, tokenizer, "translation", text_target=translation)
    else:
        bound = Translator(model, tokenizer).bound(torch.tensor([source.shape[1]]), generation)
        target = model.generate(source, **generation | bound)[:, 1:]
    read = model.prepare_decoder_input_ids_from_labels(target)
    with eager_attention(model):
        outputs = model(input_ids=source, decoder_input_ids=read, use_cache=False, output_attentions=True)
    of_stacks = (outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions)
    maps = (torch.cat(of_layers).float().cpu() for of_layers in of_stacks)
    target_text = tokenizer.decode(target[0], skip_special_tokens=True) if translation is None else translation
    tokens = [readable(tokenizer, source[0].tolist(), text)]
    tokens += [readable(tokenizer, ids[0].tolist(), target_text) for ids in (target, read)]
    return AttentionMaps(*tokens, *maps, target_text)


def encode(model, tokenizer: PreTrainedTokenizerBase, name: str, **text: str) -> torch.Tensor:
    """Token ids (1,L) of `text` or `text_target`."""
    (value,) = text.values()
    if not is_filled(value):
        raise UserError(f"The {name} is empty; give a sentence.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The {name} is not UTF-8; convert it, by iconv for example.") from error
    ids = tokenizer(**text, return_tensors="pt", verbose=False).input_ids
    longest = model.config.max_position_embeddings
    if ids.shape[1] > longest:
        raise UserError(f"The {name} has {ids.shape[1]} tokens, and the model is for {longest}; shorten it.")
    return ids.to(model.device)


def readable(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str = "") -> list[Token]:
    """Each token as the text that it adds, and of which word it is; words are what spaces separate.

    With the `text` that was tokenised, words are its own, also where the tokenizer would write more spaces.
    """
    plain = [number for number in ids if number not in tokenizer.all_special_ids]
    words = iter(words_of(tokenizer, plain, text))
    tokens, before, shown = [], [], ""
    for number in ids:
        if number in tokenizer.all_special_ids:
            tokens.append(Token(tokenizer.convert_ids_to_tokens(number), None))
            continue
        before.append(number)
        now = tokenizer.decode(before)
        added = now[len(shown) :].strip()
        if now.endswith("\ufffd"):  # a part of a letter
            now, added = shown, "…"
        # What cannot be printed, a control character say, must not stand in a picture.
        added = "".join(letter if letter.isprintable() else "▯" for letter in added)
        tokens.append(Token(added or "␣", next(words)))
        shown = now
    return tokens


def words_of(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str) -> list[int]:
    """The number of the word of `text` that each token belongs to; a lone space belongs to the word after it."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        kept = [number not in tokenizer.all_special_ids for number in encoded.input_ids]
        if list(itertools.compress(encoded.input_ids, kept)) == ids:
            ends = [start + len(text[start:]) - len(text[start:].lstrip()) + 1 for start, _ in encoded.offset_mapping]
            return [max(0, len(text[:end].split()) - 1) for end in itertools.compress(ends, kept)]
    # A tokenizer that tells no places, or a model that has cut its words in another way.
    texts = [tokenizer.decode(ids[: count + 1]).rstrip("\ufffd") for count in range(len(ids))]
    return [max(0, len(now.split()) - 1) for now in texts]


def looks_at(weights: torch.Tensor, columns: list[Token], is_self: bool) -> str:
    """In words, what a head (rows, columns) looks at most: the token before, itself or after, or one of these words.

    What is compared is the mean weight over the rows, but for the first row of a decoder's self-attention, which has
    nothing but itself to look at.
    """
    is_causal = is_self and len(weights) > 1 and not weights.triu(diagonal=1).any()
    rows = range(int(is_causal), len(weights))
    found: dict[str, float] = {}
    for token, share in zip(columns, weights[rows.start :].mean(dim=0).tolist(), strict=True):
        found[f"“{token.text}”"] = found.get(f"“{token.text}”", 0) + share
    for offset, name in [(-1, "the token before"), (0, "the token itself"), (1, "the token after")] if is_self else ():
        beside = [weights[row, row + offset].item() for row in rows if 0 <= row + offset < len(columns)]
        found[name] = sum(beside) / max(1, len(beside))
    best = max(found, key=found.get)
    return f"{best} {found[best]:.0%}"


KINDS = {
    "encoder": "Self-attention of the encoder",
    "decoder": "Self-attention of the decoder",
    "cross": "Attention of the decoder to the source",
}


def draw_attention(maps: AttentionMaps, path: Path, kind: str = "cross", layer: int = -1, head: int | None = None):
    """Writes [`attention_figure`] to a .png, .svg or .pdf file.

    A letter that matplotlib's font lacks, a Chinese one say, is a box; a page shows all that the browser can.
    """
    figure = attention_figure(maps, kind, layer, head)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(path, dpi=110)


def attention_figure(maps: AttentionMaps, kind: str = "cross", layer: int = -1, head: int | None = None) -> Figure:
    """A picture of the heads of a layer, one panel each, on one scale from 0 to 1.

    Raises UserError if there is no such layer or head.
    """
    weights = getattr(maps, kind)  # (layers,h,rows,columns)
    layer = number_within("layer", layer, len(weights))
    heads = range(weights.shape[1]) if head is None else [number_within("head", head, weights.shape[1])]
    rows, columns = maps.axes(kind)
    across = math.ceil(math.sqrt(len(heads)))
    down = -(-len(heads) // across)
    size = across * (1.4 + 0.24 * len(columns)) + 0.8, down * (1.3 + 0.24 * len(rows)) + 0.6
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for axis in axes.flat[len(heads) :]:
        axis.set_visible(False)
    for axis, number in zip(axes.flat, heads, strict=False):
        shown = weights[layer, number]
        image = axis.imshow(shown, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        plain = {"fontsize": 8, "parse_math": False}  # a token may hold $
        axis.set_xticks(range(len(columns)), [token.text for token in columns], rotation=90, **plain)
        axis.set_yticks(range(len(rows)), [token.text for token in rows], **plain)
        axis.set_title(f"head {number}: {looks_at(shown, columns, kind != 'cross')}", fontsize=9, parse_math=False)
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8)
    figure.suptitle(f"{KINDS[kind]}, layer {layer}")
    return figure


def number_within(name: str, number: int, count: int) -> int:
    """`number` from 0 on; negative ones count from the end."""
    if not -count <= number < count:
        raise UserError(f"There is no {name} {number}; the model has {count}, from 0 to {count - 1}.")
    return number % count


def write_attention_page(maps: AttentionMaps, path: Path, title: str):
    """A page (.html) by itself, with all maps, where layer and head are chosen by hand."""
    data = {}
    for kind, name in KINDS.items():
        rows, columns = maps.axes(kind)
        weights = getattr(maps, kind)
        data[kind] = {
            "name": name,
            "rows": [token.text for token in rows],
            "columns": [token.text for token in columns],
            "weights": [[[[round(w, 3) for w in row] for row in head] for head in of] for of in weights.tolist()],
            "looksAt": [[looks_at(head, columns, kind != "cross") for head in layer] for layer in weights],
        }
    page = Path(__file__).with_name("attention_page.html").read_text(encoding="utf-8")
    # A text with </script> in it must not end the script that holds it.
    numbers = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    fields = {"{{title}}": escape(title), "{{data}}": numbers}
    path.write_text(re.sub(r"{{\w+}}", lambda field: fields[field[0]], page), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- alignment


def align_words(maps: AttentionMaps, layer: int = -1) -> list[tuple[int, int]]:
    """For each target word the source word that the heads of a layer look at most when writing it: (source, target).

    Words are what spaces separate; the weight between two is the sum over the source's and the mean over the target's
    tokens.
    """
    weights = maps.cross[number_within("layer", layer, len(maps.cross))].mean(dim=0)  # (T,S)
    from_source, from_target = (membership(tokens) for tokens in (maps.source, maps.target))
    words = (from_target / from_target.sum(dim=1, keepdim=True).clamp(min=1)) @ weights @ from_source.T
    return [(int(row.argmax()), target) for target, row in enumerate(words) if row.numel()]


def membership(tokens: list[Token]) -> torch.Tensor:
    """(words,tokens): 1 where a token belongs to a word."""
    words = [token.word for token in tokens]
    count = 1 + max((word for word in words if word is not None), default=-1)
    return torch.tensor([[float(word == number) for word in words] for number in range(count)]).reshape(count, -1)


def alignment_error_rate(found: list[set], true: list[set]) -> float:
    """1 - 2 |found and true| / (|found| + |true|) over all sentences (Och and Ney, 2003, with sure links only)."""
    both = sum(len(a & b) for a, b in zip(found, true, strict=True))
    count = sum(map(len, found)) + sum(map(len, true))
    return 1 - 2 * both / count if count else 0.0


# -------------------------------------------------------------------------------------------------------- command line


def make_parser() -> Parser:
    """The options of the three commands; raises UserError for what is wrong in them."""
    parser = Parser([], prog="python -m vanilla_transformer.inspection.attention", description="Look inside a model.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="shapes | attention | align")

    shapes = commands.add_parser(
        "shapes",
        dataclass_types=[MODEL_OPTIONS],
        description="Prints every step of a forward pass: the module, the section of the paper, the shape in letters "
        "(B sentences, S source length, T target length, d model width, h heads, k width of a head, f inner width of "
        "the feed-forward network, V token types) and in numbers, the parameters, and the FLOPs of matrix products. "
        "Listed is what each module returns, and the weights and heads of attention. Only shapes are worked out, "
        "however large the model is.",
        help="the shapes of a forward pass, step by step",
    )
    shapes.add_argument("--model", metavar="DIR_OR_ID", help="take the sizes of this model, instead of options")
    shapes.add_argument("--batch_size", type=positive, default=2, help="B (default: %(default)s)")
    shapes.add_argument("--source_length", type=positive, default=12, help="S (default: %(default)s)")
    shapes.add_argument("--target_length", type=positive, default=10, help="T (default: %(default)s)")
    shapes.add_argument("--all_layers", action="store_true", help="every layer in full")

    attention = commands.add_parser(
        "attention",
        description="Translates a text and shows what the attention looks at: as a picture of the heads of one layer, "
        "or as a page by itself (.html) in which layer and head are chosen.",
        help="a picture or a page of what the attention looks at",
    )
    attention.add_argument("--model", required=True, metavar="DIR_OR_ID", help="a model directory or a Hub id")
    attention.add_argument("--text", required=True, help="what is translated")
    attention.add_argument("--translation", help="what the decoder is made to write (default: what it would write)")
    attention.add_argument("--output", required=True, type=Path, metavar="FILE", help=".png, .svg, .pdf or .html")
    attention.add_argument("--kind", choices=KINDS, help="of a picture (default: cross)")
    attention.add_argument("--layer", type=int, help="of a picture, from 0 on (default: the last)")
    attention.add_argument("--head", type=int, help="of a picture, from 0 on (default: all of the layer)")
    attention.add_argument("--num_beams", type=positive, help="beams (default: those of the model)")

    align = commands.add_parser(
        "align",
        description="Writes the word alignment of each pair by the attention to the source, as 0-0 1-2, source word - "
        "target word, from 0 on. A pair with an empty side, or too long for the model, gets an empty line. Where "
        "the dataset has a column `alignment`, the error rate of the others goes to stderr.",
        help="word alignments of sentence pairs",
    )
    align.add_argument("--model", required=True, metavar="DIR_OR_ID", help="a model directory or a Hub id")
    align.add_argument("--dataset_name", required=True, help="a Hub id or a directory laid out like one")
    align.add_argument("--dataset_config_name", help="its configuration, where it has several")
    align.add_argument("--split", default="test", help="(default: %(default)s)")
    for side in ("source", "target"):
        align.add_argument(f"--{side}_lang", help=f"the language of the {side}, where columns are named so")
        align.add_argument(f"--{side}_column", help=f"the column of the {side}")
    align.add_argument("--layer", type=int, default=-1, help="of the decoder, from 0 on (default: the last)")
    return parser


def main(argv: list[str] | None = None):
    """Runs one of the three commands."""
    try:
        options = make_parser().parse_args(argv)
        with filter_errors("inspection"):
            {"shapes": run_shapes, "attention": run_attention, "align": run_align}[options.command](options)
    except UserError as error:
        sys.exit(f"inspection: {error}")
    except (RuntimeError, ValueError, IndexError) as error:  # of a model or a size that torch cannot take
        sys.exit(f"inspection: {options.command} failed: {' '.join(str(error).split())}")


def run_shapes(options: argparse.Namespace):
    """Prints the steps of a model on torch's meta device, where tensors are shapes only."""
    config = config_of(options)
    config.pad_token_id = None  # the ids below are all alike
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config).eval()
        source = torch.zeros(options.batch_size, options.source_length, dtype=torch.long)
        target = torch.zeros(options.batch_size, options.target_length, dtype=torch.long)
    try:
        steps = trace_shapes(model, source, target)
    except ValueError as error:  # beyond learned positions
        raise UserError(str(error)) from error
    for line in show_shapes(steps, options.all_layers):
        print(line)
    flops = sum(step.flops for step in steps)
    print(f"\n{model.num_parameters():,} parameters, those that are shared counted once; {flops:,} FLOPs forward")


def config_of(options: argparse.Namespace) -> VanillaTransformerConfig:
    """That of `--model`, or one of the sizes that were given."""
    given = model_fields(options)
    if options.model is not None and given:
        raise UserError(f"--model and --{next(iter(given))} are both given; leave out one of them.")
    if options.model is not None:
        return load(options.model, AutoConfig)
    try:
        return VanillaTransformerConfig(**given)
    except StrictDataclassError as error:
        raise UserError(str(error.__cause__ or error)) from error


def load(name: str, auto_class: type):
    """A config, model or tokenizer, as one of this project."""
    with loading(name):
        found = auto_class.from_pretrained(name, trust_remote_code=False)  # ours is here, and no other is run
    config = getattr(found, "config", found)
    if getattr(config, "model_type", "vanilla_transformer") != "vanilla_transformer":
        raise UserError(f"{name} is a {config.model_type} model; only one of this project can be looked into.")
    return found


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place once it is whole; raises UserError if it cannot be written."""
    part = path.with_name(f".part-{os.getpid()}{path.suffix}")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


DRAWN = (".png", ".svg", ".pdf")


def run_attention(options: argparse.Namespace):
    """Writes a picture or a page, and prints the translation that it shows."""
    if options.output.suffix not in (*DRAWN, ".html"):
        raise UserError(f"--output is {options.output}; its name must end in {', '.join(DRAWN)} or .html.")
    if not options.output.parent.is_dir():
        raise UserError(f"There is no directory {options.output.parent} for --output; make it first.")
    place = {name: getattr(options, name) for name in ("kind", "layer", "head") if getattr(options, name) is not None}
    if place and options.output.suffix == ".html":
        raise UserError(f"--{next(iter(place))} is for a picture; a page has all layers and heads. Leave it out.")
    model, tokenizer = load(options.model, AutoModelForSeq2SeqLM), load(options.model, AutoTokenizer)
    generation = {"num_beams": options.num_beams} if options.num_beams else {}
    maps = attention_maps(model, tokenizer, options.text, options.translation, **generation)
    with replacing(options.output) as path:
        if options.output.suffix == ".html":
            write_attention_page(maps, path, f"Attention: {options.text}")
        else:
            draw_attention(maps, path, **place)
    print(maps.translation)
    print(f"{options.output} shows the attention.", file=sys.stderr)


def run_align(options: argparse.Namespace):
    """Prints a line of links for each pair, and their error rate to stderr where the true ones are known."""
    model, tokenizer = load(options.model, AutoModelForSeq2SeqLM), load(options.model, AutoTokenizer)
    layer = number_within("layer", options.layer, model.config.decoder_layers)
    pairs = read_split(options)
    known = pairs["alignment"] if "alignment" in pairs.column_names else [None] * len(pairs)
    known = [read_links(text, number) for number, text in enumerate(known, start=1)]
    found, true, left_out = [], [], 0
    texts = zip(pairs["source"], pairs["target"], known, strict=True)
    for source, target, alignment in tqdm(texts, "Aligning", len(pairs), leave=False):
        try:
            links = align_words(attention_maps(model, tokenizer, source, target), layer)
        except UserError:
            left_out += 1
            print()
            continue
        print(" ".join(f"{i}-{j}" for i, j in links))
        if alignment:
            found.append(set(links))
            true.append(alignment)
    if left_out:
        longest = model.config.max_position_embeddings
        print(
            f"{left_out:,} of {len(pairs):,} pairs have an empty side or more than {longest} tokens.", file=sys.stderr
        )
    if true:
        rate = alignment_error_rate(found, true)
        print(f"alignment error rate {rate:.3f} over {len(found):,} pairs", file=sys.stderr)


def read_links(text: str | None, number: int) -> set[tuple[int, int]]:
    """The true links (source, target) of pair `number`, none where they are not known; raises UserError for others."""
    if not isinstance(text, str | None) or not re.fullmatch(r"\s*(\d+-\d+(\s+|$))*", text or ""):
        raise UserError(f"The alignment of pair {number} is {text!r}; it must be written as '0-0 1-2'.")
    return {tuple(map(int, link.split("-"))) for link in (text or "").split()}


if __name__ == "__main__":
    main()
