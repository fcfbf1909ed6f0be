"""The attention weights of a translation, as tensors and pictures."""

import math
import re
import warnings
from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import torch
from matplotlib import get_cachedir, rcParams
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import VanillaTransformerForConditionalGeneration
from ..errors import UserError
from ..files import replacing_file
from ..sentences_vanilla_transformer import MOST_TOKENS
from ..translation_vanilla_transformer import TorchEngine

KINDS = {  # the title of a map, and what its rows and its columns are
    "encoder": ("Encoder self-attention", "queries", "keys"),
    "decoder": ("Decoder self-attention", "queries: tokens read", "keys"),
    "cross": ("Attention to the source", "queries: tokens predicted", "keys: tokens of the source"),
}
TOKEN, LARGEST = 0.25, 30  # inches: for each token with its name; the most for all panels together


@dataclass
class Token:
    """A token of a sentence."""

    text: str  # readable
    word: int | None  # the index of its word; None for a special token


@dataclass
class AttentionMaps:
    """The attention weights of one translation; each row of a map (..., rows, columns) sums to one."""

    source: list[Token]  # S
    target: list[Token]  # T, the tokens written
    decoder_input: list[Token]  # T, the tokens read: the start token, and the target without its last token
    encoder: torch.Tensor  # (layers,h,S,S)
    decoder: torch.Tensor  # (layers,h,T,T)
    cross: torch.Tensor  # (layers,h,T,S)
    translation: str = ""

    def axes(self, kind: str) -> tuple[list[Token], list[Token]]:
        """The tokens of the rows and of the columns of a map."""
        if kind == "cross":
            return self.target, self.source
        return (self.source, self.source) if kind == "encoder" else (self.decoder_input, self.decoder_input)


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switches to the eager backend, the only one that returns attention weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def attention_maps(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    translation: str | None = None,
    **generation,
) -> AttentionMaps:
    """The attention weights of one forward pass over a text and its translation.

    Args:
        translation: None: what the model writes.
        generation: Options of `generate`.

    Raises UserError if the text or the translation is empty, or longer than `max_position_embeddings` or 4,096 tokens.
    """
    source = encode(model, tokenizer, text)
    if translation is None:
        options = {"num_return_sequences": 1, **generation}
        target = TorchEngine([model]).generate(source.tolist(), options)[:, 1:]
        translation = tokenizer.decode(target[0], skip_special_tokens=True)
    else:
        target = encode(model, tokenizer, translation, "translation", is_target=True)
    decoder_input = model.prepare_decoder_input_ids_from_labels(target)
    with eager_attention(model):
        outputs = model(input_ids=source, decoder_input_ids=decoder_input, use_cache=False, output_attentions=True)
    maps = (outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions)
    return AttentionMaps(
        readable_tokens(tokenizer, source[0].tolist(), text),
        readable_tokens(tokenizer, target[0].tolist(), translation),
        readable_tokens(tokenizer, decoder_input[0].tolist(), translation),
        *(torch.cat(layers).float().cpu() for layers in maps),
        translation,
    )


def encode(
    model, tokenizer: PreTrainedTokenizerBase, text: str, name: str = "text", is_target: bool = False
) -> torch.Tensor:
    """Token ids (1,L) of a source or a target; raises UserError, with its `name`, if it is empty or too long."""
    if not (text and text.strip()):
        raise UserError(f"The {name} is empty; give a sentence.")
    if re.search("[\ud800-\udfff]", text):
        raise UserError(f"The {name} contains a lone surrogate, which is not a character; remove it.")
    side = {"text_target" if is_target else "text": text}
    longest = min(model.config.max_position_embeddings, MOST_TOKENS)
    ids = tokenizer(**side, return_tensors="pt", verbose=False).input_ids
    if ids.shape[1] > longest:
        raise UserError(f"The {name} has {ids.shape[1]} tokens; at most {longest} can be shown; shorten it.")
    return ids.to(model.device)


def readable_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str = "") -> list[Token]:
    """Each token as the text it adds to the sentence, with the index of its word; "·" before one that goes on a word.

    Words are separated by spaces: those of `text` if it is given, since decoding may insert further spaces. Neither
    punctuation nor Chinese and Japanese, which are written without spaces, have a "·".
    """
    special = tokenizer.all_special_ids
    words = iter(word_indices(tokenizer, [token_id for token_id in ids if token_id not in special], text))
    tokens, decoded_ids, shown = [], [], ""
    for token_id in ids:
        if token_id in special:
            tokens.append(Token(tokenizer.convert_ids_to_tokens(token_id), None))
            continue
        decoded_ids.append(token_id)
        decoded = tokenizer.decode(decoded_ids)
        added = decoded[len(shown) :]
        is_inside = shown[-1:].strip() and re.match(r"[^\W\u3040-\u9fff]", added)
        added = "·" * bool(is_inside) + added.strip()
        if decoded.endswith("\ufffd"):  # an incomplete character
            decoded, added = shown, "…"
        added = "".join(letter if letter.isprintable() else "▯" for letter in added)  # control characters
        tokens.append(Token(added or "␣", next(words)))
        shown = decoded
    return tokens


def word_indices(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str) -> list[int]:
    """The index of the word of `text` that each token belongs to; a lone space belongs to the word after it."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
        found = zip(encoded.input_ids, encoded.offset_mapping, strict=True)
        found = [(token_id, start) for token_id, (start, _) in found if token_id not in tokenizer.all_special_ids]
        if [token_id for token_id, _ in found] == ids:
            ends = [word.end() for word in re.finditer(r"\S+", text)][:-1]  # spaces after the last word belong to it
            return [bisect(ends, start) for _, start in found]
    # The tokenizer has no offsets, or the model segments words differently from the tokenizer.
    decoded = [tokenizer.decode(ids[: count + 1]).rstrip("\ufffd") for count in range(len(ids))]
    return [max(0, len(prefix.split()) - 1) for prefix in decoded]


def describe_head(weights: torch.Tensor, columns: list[Token], is_self: bool) -> str:
    """The pattern of a map (rows, columns) with its mean weight, such as "the token before, 83%".

    Patterns are an offset of -1, 0 or 1 (self-attention), the diagonal (attention to the source), and one token for
    all rows. A pattern is named only if its weight lies at least halfway between that of uniform attention and 1.
    Otherwise the effective number of tokens per row is given, the exponential of the mean entropy.
    """
    rows, length = weights.shape
    causal = is_self and rows > 1 and not weights.triu(diagonal=1).any()
    uniform = torch.ones_like(weights).tril() if causal else torch.ones_like(weights)
    uniform = uniform / uniform.sum(dim=-1, keepdim=True)
    patterns: dict[str, torch.Tensor] = {}  # the weights (rows, columns) that belong to each
    for number, token in enumerate(columns):
        patterns.setdefault(f"“{token.text}”", torch.zeros_like(weights, dtype=torch.bool))[:, number] = True
    distance = torch.arange(length) - torch.linspace(0, length - 1, rows)[:, None]
    if is_self:
        for offset, name in [(-1, "the token before"), (0, "the token itself"), (1, "the token after")]:
            patterns[name] = distance.round() == offset
    else:
        patterns["the diagonal"] = distance.abs() <= 1
    first, found = int(causal), {}  # the first row of a causal map has only one choice
    for name, belongs in patterns.items():
        count = belongs[first:].any(dim=1).sum().clamp(min=1)
        weight, expected = ((one * belongs)[first:].sum().item() / count.item() for one in (weights, uniform))
        if weight >= (1 + expected) / 2 - 1e-6:
            found[name] = weight
    if found:
        best = max(found, key=found.get)
        return f"{best}, {found[best]:.0%}"
    tokens = torch.special.entr(weights[first:]).sum(dim=-1).mean().exp()
    return f"about {tokens:.1f} tokens per row"


def draw_attention(
    maps: AttentionMaps, path: str | Path, kind: str = "cross", layer: int = -1, head: int | None = None
):
    """Saves [`attention_figure`] as .png, .svg or .pdf."""
    figure = attention_figure(maps, kind, layer, head)
    with replacing_file(Path(path)) as temporary:
        figure.savefig(temporary, dpi=110)


def attention_figure(maps: AttentionMaps, kind: str = "cross", layer: int = -1, head: int | None = None) -> Figure:
    """A picture of one layer with a panel for each head, or of one head; colors range from 0 to 1.

    The panels share the color bar and the tokens, on the left and below. Of a long text, only one in a few tokens is
    named; alone, a head has room for more. Warns of characters that no installed font has, which are drawn as ▯.
    Raises UserError if there is no such layer or head.
    """
    weights = getattr(maps, kind)  # (layers,h,rows,columns)
    layer = index_of("layer", layer, len(weights))
    heads = range(weights.shape[1]) if head is None else [index_of("head", head, weights.shape[1])]
    rows, columns = maps.axes(kind)
    across = math.ceil(math.sqrt(len(heads)))
    down = math.ceil(len(heads) / across)
    width, named_columns = fit(len(columns), across)
    height, named_rows = fit(len(rows), down)
    # A panel is wide enough for its title.
    size = across * max(2.4, width) + 1.8, down * (0.3 + height) + 1.3
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for number, axis in enumerate(axes.flat):
        axis.set_visible(number < len(heads))
        axis.tick_params(length=0, labelbottom=number + across >= len(heads))  # also above a place that is empty
    families, missing = choose_fonts("".join(token.text for token in (*rows, *columns)))
    if missing:
        some = shorten(" ".join(map(chr, sorted(missing))), 20, placeholder=" …")
        warnings.warn(
            f"No font here has {some}, drawn as ▯; install one that does, such as Noto Sans CJK for Chinese, Japanese "
            f"and Korean, and delete matplotlib's list of fonts, {Path(get_cachedir(), 'fontlist-*.json')}.",
            stacklevel=2,
        )
    boxes = dict.fromkeys(missing, "▯")
    style = {"fontfamily": families, "parse_math": False}  # a token may contain $
    for axis, number in zip(axes.flat, heads, strict=False):
        shown = weights[layer, number]
        image = axis.imshow(shown.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
        names = [columns[number].text.translate(boxes) for number in named_columns]
        axis.set_xticks(named_columns, names, rotation=90, fontsize=9, **style)
        names = [rows[number].text.translate(boxes) for number in named_rows]
        axis.set_yticks(named_rows, names, fontsize=9, **style)
        pattern = describe_head(shown, columns, kind != "cross").translate(boxes)
        axis.set_title(f"head {number}: {pattern}", fontsize=10, **style)
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.6, aspect=30)
    title, of_rows, of_columns = KINDS[kind]
    for label, text, named in [(figure.supylabel, of_rows, named_rows), (figure.supxlabel, of_columns, named_columns)]:
        label(text if named.step == 1 else f"{text}, one in {named.step} named", fontsize=10)
    figure.suptitle(f"{title}, layer {layer}")
    return figure


def choose_fonts(text: str) -> tuple[list[str], set[int]]:
    """The font families to draw a text with, and the code points of its characters that no font has.

    Other fonts are opened only if the default font lacks a character. The families that have most of what is missing
    come first, so that a text is not drawn in a mixture of fonts if one has all of it.
    """
    families, missing = list(rcParams["font.family"]), {*map(ord, text), ord("▯")}
    for family in families:
        missing = missing - get_font(findfont(FontProperties(family=[family]))).get_charmap().keys()
    if not missing:
        return families, missing
    found: dict[str, set[int]] = {}  # what each family has of the missing
    for entry in sorted(fontManager.ttflist, key=lambda one: (abs(one.weight - 400), one.style != "normal", one.name)):
        if missing in found.values():
            break
        # The former has a placeholder for every character; matplotlib cannot draw the colors of the latter.
        if entry.name in found or re.search("Last ?Resort|Color Emoji", entry.name):
            continue
        with suppress(OSError, RuntimeError):  # it is damaged, or was removed since matplotlib listed it
            found[entry.name] = missing & get_font(entry.fname).get_charmap().keys()
    for family in sorted(found, key=lambda family: -len(found[family])):
        if missing & found[family]:
            families.append(family)
            missing = missing - found[family]
    return families, missing


def fit(tokens: int, panels: int) -> tuple[float, range]:
    """The length in inches of one of so many panels side by side, and the tokens for whose names it has room."""
    length = min(TOKEN * tokens, LARGEST / panels)
    return length, range(0, tokens, math.ceil(TOKEN * tokens / length))


def index_of(name: str, number: int, count: int) -> int:
    """`number` as an index from 0; negative ones count from the end. Raises UserError if it is out of range."""
    if not -count <= number < count:
        raise UserError(f"There is no {name} {number}; the model has {count}, from 0 to {count - 1}.")
    return number % count
