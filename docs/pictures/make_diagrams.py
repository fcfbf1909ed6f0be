"""Draw the diagrams of the docs: SVG files in this folder, whose shapes, counts, masks and angles are the model's.

python docs/pictures/make_diagrams.py
python docs/pictures/make_diagrams.py --check     lists those that differ
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.inspection.shapes import trace_shapes
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerAttention, sinusoidal_positions

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER))

from drawing import BLUE, GREEN, GREY, ORANGE, RED, box, circle, line, svg, text, write_or_check  # noqa: E402

COLORS = {"self_attn": BLUE, "encoder_attn": GREEN, "feed_forward": ORANGE}


def base_model(**fields) -> VanillaTransformerForConditionalGeneration:
    """The paper's base model on the meta device, where tensors have shapes but no values."""
    with torch.device("meta"):
        return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**fields)).eval()


def plus(x, y) -> str:
    """A sum."""
    return circle(x, y, 12) + line((x - 6, y), (x + 6, y)) + line((x, y - 6), (x, y + 6))


# ------------------------------------------------------------------------------------------------------------ figure 1


class Figure1:
    """The base model, drawn from the bottom to the top; `parts` is what has been drawn."""

    width = 300  # of a box

    def __init__(self, B=2, S=7, T=5):
        self.model = base_model(pad_token_id=None)  # on the meta device no token can be compared with it
        self.ids = {"encoder": ("S", (B, S)), "decoder": ("T", (B, T))}
        source, target = (torch.zeros(B, length, dtype=torch.long, device="meta") for length in (S, T))
        self.steps = {step.module: step for step in trace_shapes(self.model, source, target)}
        self.parts = []

    def count(self, *names: str) -> str:
        """The number of parameters of modules."""
        return f"{sum(p.numel() for name in names for p in self.model.get_submodule(name).parameters()):,}"

    def shape(self, name: str, words: str = "") -> tuple[str, str]:
        """The shape of what a module returns, as a row: in letters and in numbers."""
        return f"{words} ({','.join(self.steps[name].letters)})".strip(), str(self.steps[name].shape)

    def line(self, *points, **options):
        self.parts.append(line(*points, **options))

    def box(self, x, bottom, title, note, *rows, color=GREY, width=width) -> float:
        """A box that stands on `bottom`: a title, a note on its right, and rows (left, right). Returns its top."""
        top = bottom - 30 - 20 * len(rows)
        self.parts.append(box(x, top, width, bottom - top, color, stroke=color, opacity=0.13))
        for number, (left, right) in enumerate([(title, note), *rows], start=1):
            weight, y = "bold" if number == 1 else "normal", top + 20 * number
            self.parts += [text(x + 10, y, left, 15, weight=weight), text(x + width - 10, y, right, 15, "end")]
        return top

    def embeddings(self, stack: str, x, y) -> float:
        """Token ids, embeddings and positions on `y`; returns the top of their sum."""
        letter, shape = self.ids[stack]
        middle, half = x + self.width / 2, self.width / 2 - 4
        title, note = ("input_ids", "source") if stack == "encoder" else ("decoder_input_ids", "shifted target")
        y = self.box(x, y, title, note, (f"(B,{letter})", str(shape)))
        self.line((x + half / 2, y), (x + half / 2, y - 26), arrow=True)
        for module, left, way in (("embed_tokens", x, -1), ("embed_positions", x + half + 8, 1)):
            name = f"model.{stack}.{module}"
            rows = [(words, "") for words in (self.count(name), *self.shape(name))]
            top = self.box(left, y - 28, module, "", *rows, color=RED, width=half)
            self.line((left + half / 2, top), (left + half / 2, top - 26), (middle + 14 * way, top - 26), arrow=True)
        scale = self.model.get_submodule(f"model.{stack}").embed_scale
        self.parts += [text(x + half / 2 - 6, top - 9, f"× √d = {scale:.2f}", 15, "end"), plus(middle, top - 26)]
        return top - 38

    def sublayer(self, layer: str, name: str, x, y, way) -> tuple[float, float]:
        """A sublayer with its residual and its norm on `y`; returns its middle and the top of the norm."""
        if name == "feed_forward":
            norm, outputs = "final_layer_norm", {f"{layer}.fc1": "fc1, ReLU", f"{layer}.fc2": "fc2"}
            names = list(outputs)
        else:
            names, norm = [f"{layer}.{name}"], f"{name}_layer_norm"
            causal = ", causal" if self.model.get_submodule(names[0]).is_causal else ""
            outputs = {f"{layer}.{name}.weights": f"weights{causal}", f"{layer}.{name}.out_proj": "output"}
        rows = [self.shape(of, words) for of, words in outputs.items()]
        top = self.box(x, y - 44, name, self.count(*names), *rows, color=COLORS[name])
        middle, add = x + self.width / 2, top - 24
        side = middle + way * (self.width / 2 + 26)
        self.line((middle, y), (middle, y - 42), arrow=True)
        self.line((middle, y - 18), (side, y - 18), (side, add), (middle + 14 * way, add), arrow=True)
        self.line((middle, top), (middle, add - 24))
        self.parts.append(plus(middle, add))
        of_norm = f"{layer}.{norm}"
        return (y - 44 + top) / 2, self.box(x, add - 24, norm, self.count(of_norm), self.shape(of_norm))

    def stack(self, stack: str, x, y, way) -> tuple[float, dict[str, float]]:
        """A stack on `y`, its residuals on the left (`way` -1) or right (1): its top, and the middles of sublayers."""
        bottom = y = self.embeddings(stack, x, y)
        layer, middles = f"model.{stack}.layers.0", {}
        names = ["self_attn", "encoder_attn", "feed_forward"] if stack == "decoder" else ["self_attn", "feed_forward"]
        for name in names:
            middles[name], y = self.sublayer(layer, name, x, y, way)
        edge = x + (self.width if way > 0 else 0)
        left, top = min(edge + 40 * way, x - 14), y - 34
        self.parts += [box(left, top, self.width + 54, bottom - 10 - top)]
        self.parts += [text(x + 10, y - 12, "layers.0", 15, weight="bold")]
        self.parts += [text(x + self.width - 10, y - 12, self.count(layer), 15, "end")]
        layers = len(self.model.get_submodule(f"model.{stack}").layers)
        self.parts += [text(edge + 50 * way, (top + bottom) / 2, f"{layers} ×", 24, "end" if way < 0 else "start")]
        self.parts += [text(left, top - 10, f"model.{stack}", 18, weight="bold")]
        return y, middles

    def draw(self) -> str:
        left, right, bottom = 96, 504, 1064
        top, _ = self.stack("encoder", left, bottom, -1)
        end, middles = self.stack("decoder", right, bottom, 1)
        middle, over, into = left + self.width / 2, top - 72, middles["encoder_attn"]
        self.line((middle, top), (middle, over), (450, over), (450, into), (right - 2, into), color=GREEN, arrow=True)
        self.parts += [text(middle + 10, over - 36, "keys and values for", 15)]
        self.parts += [text(middle + 10, over - 14, "every decoder layer", 15)]
        middle = right + self.width / 2
        self.line((middle, end), (middle, end - 64), arrow=True)
        y = self.box(right, end - 66, "lm_head", self.count("lm_head"), self.shape("lm_head", "logits"), color=RED)
        self.line((middle, y), (middle, y - 24), arrow=True)
        self.box(right, y - 26, "softmax", "in the loss, in the search", self.shape("lm_head", "probabilities"))
        self.legend(56, 30)
        return svg("The base model of Figure 1, with shapes and parameters", 900, 1080, "".join(self.parts))

    def legend(self, x, y):
        config, ((_, (B, S)), (_, (_, T))) = self.model.config, self.ids.values()
        self.parts += [text(x, y, f"The base model: {self.model.num_parameters():,} parameters", 18, weight="bold")]
        bottom = y + 70
        self.box(x, bottom, "name in the code", "parameters", ("its output in letters", "in numbers"))
        words = [
            f"B = {B} sentences, S = {S} and T = {T} tokens",
            f"d = {config.d_model}, h = {config.encoder_attention_heads} heads, f = {config.encoder_ffn_dim:,}",
            f"V = {config.vocab_size:,} tokens in the vocabulary",
            "Both embed_tokens and lm_head are one matrix.",
        ]
        self.parts += [text(x, bottom + 28 + 22 * number, row, 15) for number, row in enumerate(words)]


# --------------------------------------------------------------------------------------------------------------- heads


def cells(numbers: torch.Tensor, x, y, cell, T: int, d: int, k: int) -> str:
    """A block (rows, columns) of the numbers of features (B,T,d): the color shows the head, the shade the position."""
    parts, colors = [], (BLUE, ORANGE, GREEN, RED)
    for i, row in enumerate(numbers.tolist()):
        for j, number in enumerate(row):
            shade = 1 - 0.65 * (number // d % T) / (T - 1)
            color = colors[number % d // k]
            parts.append(box(x + cell * j, y + cell * i, cell - 2, cell - 2, color, stroke="none", opacity=shade))
    return "".join(parts)


def heads() -> str:
    """`split_heads` of features that are numbered, which shows where each of them goes."""
    B, T, h, k, cell = 2, 5, 3, 4, 18
    d = h * k
    split_heads = VanillaTransformerAttention(VanillaTransformerConfig(d_model=d), h, False, 0).split_heads
    x = torch.arange(B * T * d).view(B, T, d)
    grouped, split = split_heads(x).transpose(1, 2), split_heads(x)
    sentences = [("The", "old", "cat", "sleeps", "."), ("She", "reads", "a", "book", ".")]
    lefts, parts = (66, 388, 734), []
    for left, letters, tensor, note in [
        (lefts[0], "(B,T,d)", x, "rows of d features"),
        (lefts[1], "(B,T,h,k)", grouped, "each row in h groups of k"),
        (lefts[2], "(B,h,T,k)", split, "a block for each head"),
    ]:
        parts += [text(left, 36, letters, 20, weight="bold"), text(left, 60, tuple(tensor.shape), 16)]
        parts.append(text(left, 82, note, 15))
    for b, words in enumerate(sentences):
        top = 112 + b * 324
        middle = top + (3 * T * cell + 20) / 2
        row = middle - T * cell / 2
        parts += [text(58, row + cell * (t + 0.5) + 4, word, 15, "end") for t, word in enumerate(words)]
        parts.append(text(lefts[0], row - 10, f"sentence {b + 1}", 15))
        parts.append(cells(x[b], lefts[0], row, cell, T, d, k))
        below = row + T * cell + 18
        parts.append(text(lefts[0] + d * cell / 2, below, f"d = {d}", 15, "middle"))
        for head in range(h):
            left, place = lefts[1] + head * (k * cell + 12), top + head * (T * cell + 10)
            parts.append(cells(grouped[b, :, head], left, row, cell, T, d, k))
            parts.append(text(left + k * cell / 2, below, f"k = {k}", 15, "middle"))
            parts.append(cells(split[b, head], lefts[2], place, cell, T, d, k))
            parts.append(text(lefts[2] + k * cell + 8, place + T * cell / 2 + 5, f"head {head + 1}", 15))
        for start, end, name in ((292, 378, "unflatten"), (638, 724, "transpose")):
            parts += [line((start, middle), (end, middle), arrow=True)]
            parts += [text((start + end) / 2 - 3, middle - 10, name, 15, "middle")]
    return svg("The features of each token are split into heads", 900, 740, "".join(parts))


# ----------------------------------------------------------------------------------------------------------- positions


def hand(x, y, radius, sin, cos) -> str:
    """A clock whose hand has turned clockwise from 12."""
    tip = (x + 0.85 * radius * sin, y - 0.85 * radius * cos)
    return circle(x, y, radius) + line((x, y), tip, color=BLUE, width=3, arrow=True)


def positions() -> str:
    d, pairs, shown = 512, (0, 32, 64, 96, 128), (0, 1, 2, 3, 4, 5, 6, 50, 100)
    table = sinusoidal_positions(torch.tensor(shown), d).tolist()
    parts = [text(14, 40, "position", 17, weight="bold")]
    xs = [222 + 75 * column + (18 if position > 6 else 0) for column, position in enumerate(shown)]
    parts += [text(x, 40, position, 17, "middle", weight="bold") for x, position in zip(xs, shown, strict=True)]
    for row, pair in enumerate(pairs):
        y = 96 + 78 * row
        turn = 2 * math.pi / math.atan2(*table[1][2 * pair : 2 * pair + 2])
        parts += [text(14, y - 3, f"features {2 * pair}, {2 * pair + 1}", 16, weight="bold")]
        parts += [text(14, y + 19, f"a turn in {turn:.3g} positions", 15)]
        parts += [hand(x, y, 31, *found[2 * pair : 2 * pair + 2]) for x, found in zip(xs, table, strict=True)]
    x, y, radius = 112, 552, 70
    sin, cos = table[3][64:66]
    corner = (x + 0.85 * radius * sin, y)
    parts += [line((x, y), corner, color=ORANGE, width=4)]
    parts += [line(corner, (corner[0], y - 0.85 * radius * cos), color=GREEN, width=4), hand(x, y, radius, sin, cos)]
    meanings = {ORANGE: "across: feature 2i, the sine of pos / 10000^(2i/d)"}
    meanings[GREEN] = "up: feature 2i + 1, the cosine of the same angle"
    for number, (color, words) in enumerate(meanings.items()):
        parts += [line((212, 527 + 30 * number), (236, 527 + 30 * number), color=color, width=4)]
        parts += [text(248, 532 + 30 * number, words, 16)]
    parts += [text(212, 592, f"At position 0 all hands point up. d = {d}; 5 of {d // 2} hands are shown.", 16)]
    return svg("Sinusoidal positions as the hands of clocks", 900, 640, "".join(parts))


# --------------------------------------------------------------------------------------------------------------- norms


def modules_in_order(norm_first: bool) -> list[str]:
    """The sublayers and norms of an encoder layer, in the order in which they are computed."""
    layer, order = base_model(norm_first=norm_first).model.encoder.layers[0], []
    for name, module in layer.named_children():
        module.register_forward_hook(lambda *_, name=name: order.append("feed_forward" if name == "fc1" else name))
    layer(torch.zeros(1, 1, layer.fc1.in_features, device="meta"), None, None)
    return [name for name in order if name in COLORS or name.endswith("norm")]


def encoder_layer(x, y, norm_first: bool) -> tuple[str, float]:
    """An encoder layer, 400 wide, whose input comes from below at `y`: its drawing, and its top, 396 higher."""
    stream, branch, parts, order = x + 95, x + 305, [], modules_in_order(norm_first)

    def step(name, middle, bottom):
        color, width = (GREEN, 4) if middle == stream else (GREY, 2)
        parts.append(line((middle, bottom), (middle, bottom - 28), color=color, width=width, arrow=True))
        color = COLORS.get(name, GREY)
        parts.append(box(middle - 95, bottom - 72, 190, 42, color, name, 16, color, opacity=0.13))
        return bottom - 72

    for start in range(0, len(order), 2):  # a norm before its sublayer is on the branch, one after it is not
        pair = order[start : start + 2]
        split = 1 if pair[0] in COLORS else 2
        on_branch, on_stream, at = pair[:split], pair[split:], y - 14
        parts.append(line((stream, at), (branch, at)))
        for name in on_branch:
            at = step(name, branch, at)
        parts.append(line((branch, at), (branch, at - 28), (stream + 14, at - 28), arrow=True))
        parts.append(line((stream, y), (stream, at - 14), color=GREEN, width=4, arrow=True))
        parts.append(text(stream - 12, (y + at) / 2, "residual", 16, "end"))
        parts.append(plus(stream, at - 28))
        y = at - 40
        for name in on_stream:
            y = step(name, stream, y)
    return "".join(parts), y


def norms() -> str:
    parts, bottom = [], 560
    for x, norm_first, title, formula, note in [
        (20, False, "post-norm: the paper", "LayerNorm(x + Sublayer(x))", "Every sum on the way up is normalized."),
        (480, True, "pre-norm: norm_first=True", "x + Sublayer(LayerNorm(x))", "On the way up there are only sums."),
    ]:
        drawn, top = encoder_layer(x, bottom, norm_first)
        parts += [text(x, 36, title, 20, weight="bold"), text(x, 64, formula, 17), text(x, 90, note, 17), drawn]
        at_end = base_model(norm_first=norm_first).model.encoder.layer_norm
        after = "next layer; after the last: layer_norm" if isinstance(at_end, nn.LayerNorm) else "next layer"
        parts += [line((x + 95, top), (x + 95, top - 34), color=GREEN, width=4, arrow=True)]
        parts += [text(x + 109, top - 22, after, 16), text(x + 95, bottom + 24, "x", 18, "middle")]
    return svg("A layer in post-norm and in pre-norm", 900, 600, "".join(parts))


# ----------------------------------------------------------------------------------------------------- attention kinds

SOURCE, TARGET = ("she", "sings", "now", "</s>", "<pad>"), ("<s>", "sie", "singt", "jetzt")


def who_sees_whom() -> dict[str, torch.Tensor]:
    """For each kind of attention the pairs (queries, keys) whose weight is not 0, in a model with random weights."""
    sizes = {"vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes)).eval()
    model.set_attn_implementation("eager")
    pad = model.config.pad_token_id
    source = torch.tensor([[pad if word == "<pad>" else 5 for word in SOURCE]])
    target = torch.full((1, len(TARGET)), 5)
    with torch.no_grad():
        out = model(source, decoder_input_ids=target, output_attentions=True)
    maps = {"encoder": out.encoder_attentions, "decoder": out.decoder_attentions, "cross": out.cross_attentions}
    return {kind: layers[0][0, 0] > 0 for kind, layers in maps.items()}


def mask(allowed: torch.Tensor, x, y, cell, rows=(), columns=(), color=BLUE) -> str:
    """Who may attend to whom: a filled box for each query (row) and key (column) of which that is True."""
    parts = [text(x - 8, y + cell * (i + 0.5) + 5, word, 15, "end") for i, word in enumerate(rows)]
    parts += [text(x + cell * (j + 0.5), y - 10, word, 15, "middle") for j, word in enumerate(columns)]
    for i, row in enumerate(allowed.tolist()):
        for j, value in enumerate(row):
            place = (x + cell * j + 1, y + cell * i + 1, cell - 3, cell - 3)
            parts.append(box(*place, color if value else "none", stroke=color if value else GREY))
    return "".join(parts)


def attention_kinds() -> str:
    seen, cell, parts = who_sees_whom(), 44, []
    for x, kind, rows, columns, color, title, words, note in [
        (64, "encoder", SOURCE, SOURCE, BLUE, "Encoder: self_attn", "source to source", "all but padding"),
        (374, "decoder", TARGET, TARGET, BLUE, "Decoder: self_attn", "target to target", "itself and the past"),
        (640, "cross", TARGET, SOURCE, GREEN, "Decoder: encoder_attn", "target to source", "all but padding"),
    ]:
        parts += [text(x, 36, title, 18, weight="bold"), text(x, 62, f"{words}: {note}", 16)]
        parts.append(mask(seen[kind], x, 118, cell, rows, columns, color))
    parts += [text(64, 374, "A row is a query, a column a key. Filled: the query may attend to the key.", 16)]
    parts += [text(64, 398, "Nothing reads the row of <pad>, since its column is empty.", 16)]
    return svg("Who may attend to whom in the three kinds of attention", 900, 420, "".join(parts))


# ---------------------------------------------------------------------------------------------------- first notebook


def queries_keys_values() -> str:
    """How one word looks at three: the example with which notebook 1 begins, in numbers."""
    words, query = SOURCE[:3], torch.tensor([1.0, 0.5])
    keys = torch.tensor([[4.0, 0], [0, 4.0], [-4.0, -4.0]])
    values = torch.tensor([[1.0, 0], [0, 1.0], [5.0, 5.0]])
    weights = (keys @ query / math.sqrt(2)).softmax(dim=-1)
    rows, asking = (150, 240, 330), 1
    columns = {"query": (300, BLUE), "key": (440, ORANGE), "value": (580, GREEN), "weight": (755, RED)}
    notes = {"query": "x times Wq", "key": "x times Wk", "value": "x times Wv", "weight": "softmax(query · key / √2)"}
    parts = [text(20, 50, "word", 18, weight="bold"), text(110, 50, "its vector x", 18, weight="bold")]
    for name, (x, color) in columns.items():
        parts += [text(x + 50, 50, name, 18, "middle", color, "bold"), text(x + 50, 76, notes[name], 15, "middle")]

    def pair(name, y, numbers, opacity=0.13):
        x, color = columns[name]
        return box(x, y - 20, 100, 40, color, f"({numbers[0]:g}, {numbers[1]:g})", 17, color, opacity=opacity)

    for number, (word, y) in enumerate(zip(words, rows, strict=True)):
        parts.append(text(20, y + 6, word, 18))
        shades = torch.rand(4, generator=torch.Generator().manual_seed(number)).tolist()
        parts += [box(110 + 26 * i, y - 13, 24, 26, GREY, opacity=0.2 + 0.7 * shade) for i, shade in enumerate(shades)]
        parts += [pair("key", y, keys[number]), pair("value", y, values[number])]
        if number == asking:
            parts += [pair("query", y, query), line((220, y), (296, y), arrow=True)]
        else:
            parts.append(text(350, y + 6, "not followed", 15, "middle", GREY))
        start = (404, rows[asking] + 10 * (number - asking))
        parts.append(line(start, (437, y), color=BLUE, arrow=True))
        weight = weights[number].item()
        parts += [box(755, y - 12, max(1, 70 * weight), 24, RED, stroke="none"), text(840, y + 6, f"{weight:.2f}", 18)]
    total = " + ".join(
        f"{w:.2f} × ({a:g}, {b:g})" for w, (a, b) in zip(weights.tolist(), values.tolist(), strict=True)
    )
    output = ", ".join(f"{number:.1f}" for number in (weights @ values).tolist())
    parts.append(text(20, 410, f"What “{words[asking]}” gets: {total}, about ({output})", 18, weight="bold"))
    parts.append(
        text(20, 438, "Wq, Wk and Wv are matrices that the model learns. Every word asks with a query of its own.", 16)
    )
    return svg("From words to queries, keys and values, and from these to the output", 900, 460, "".join(parts))


def colab() -> str:
    """A button."""
    shape = box(1, 1, 148, 26, BLUE, "▶ Open in Colab", 15, BLUE, opacity=0.13)
    return svg("Open in Colab", 150, 28, shape)


PICTURES = {
    "queries_keys_values": queries_keys_values,
    "colab": colab,
    "figure_1": lambda: Figure1().draw(),
    "heads": heads,
    "positions": positions,
    "norms": norms,
    "attention_kinds": attention_kinds,
}


def main(argv: list[str] | None = None):
    """Draws all diagrams, or exits with 1 if a file differs."""
    pictures = {FOLDER / f"{name}.svg": draw() for name, draw in PICTURES.items()}
    write_or_check(pictures, "Draw the diagrams, or check them.", argv)


if __name__ == "__main__":
    main()
