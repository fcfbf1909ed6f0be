"""Draw the slides of docs/teachers.md: SVG files in this folder, with numbers from the package.

python docs/slides/make_slides.py
python docs/slides/make_slides.py --check     lists those that differ
"""

import math
import sys
from pathlib import Path

import torch

from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_positions
from vanilla_transformer.training.optimization import learning_rate_schedule, paper_learning_rate

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parent / "pictures"))

from drawing import BLUE, GREEN, GREY, ORANGE, RED, box, grid, line, svg, text, write_or_check  # noqa: E402
from make_diagrams import SOURCE, TARGET, base_model, cells, encoder_layer, mask, who_sees_whom  # noqa: E402


def chart(curves, xlabel, ylabel, xticks=(), yticks=()) -> str:
    """Curves (name, color, [(x, y), ...]) in the figure's place, and ticks (value, label)."""
    points = [point for *_, curve in curves for point in curve]
    right, top = max(x for x, _ in points), max(y for _, y in points)

    def place(x, y):
        return 540 + 370 * x / right, 430 - 290 * y / top

    parts = [
        line((540, 130), (540, 430), (920, 430)),
        text(730, 485, xlabel, 17, "middle"),
        text(500, 118, ylabel, 17),
    ]
    parts += [text(place(value, 0)[0], 453, label, 15, "middle") for value, label in xticks]
    parts += [text(532, place(0, value)[1] + 5, label, 15, "end") for value, label in yticks]
    for number, (name, color, curve) in enumerate(curves):
        parts.append(line(*(place(*point) for point in curve), color=color, width=3))
        parts.append(text(915, 270 + 26 * number, name, 17, "end", color))
    return "".join(parts)


def bars(values, labels, color=BLUE, form="{:.0%}") -> str:
    """Horizontal bars with their names and values."""
    parts = []
    for number, (value, label) in enumerate(zip(values, labels, strict=True)):
        y = 140 + 62 * number
        parts += [
            text(520, y, label, 17),
            box(520, y + 8, max(2, 300 * value / max(values)), 22, color, stroke="none"),
        ]
        parts.append(text(530 + 300 * value / max(values), y + 25, form.format(value), 16))
    return "".join(parts)


# ------------------------------------------------------------------------------------------------------------- figures


def look_up() -> str:
    keys, queries = torch.tensor([[4.0, 0], [0, 4.0], [-4.0, -4.0]]), torch.tensor([[0, 4.0], [0, 0]])
    weights = (queries @ keys.T / math.sqrt(2)).softmax(dim=-1).tolist()
    note = text(700, 400, "each row sums to 1", 17, "middle", GREY)
    return grid(weights, 610, 180, 80, ("query 1", "query 2"), ("key 1", "key 2", "key 3"), numbers=True) + note


def largest_weight() -> str:
    generator, curves = torch.Generator().manual_seed(0), []
    for name, color, power in [("q · k", RED, 0), ("q · k / √k", BLUE, -0.5)]:
        curve = []
        for width in (1, 4, 16, 32, 64, 128, 192, 256):
            q, k = torch.randn(2, 200, 64, width, generator=generator)
            weights = ((q[:, :1] * k).sum(-1) * width**power).softmax(dim=-1)
            curve.append((width, round(weights.amax(dim=-1).mean().item(), 2)))
        curves.append((name, color, curve))
    ticks = [(width, width) for width in (16, 64, 128, 256)]
    return chart(curves, "width of the head, k", "largest of 64 weights", ticks, [(0, "0")])


def heads() -> str:
    T, d, k, cell = 4, 8, 2, 30
    numbers = torch.arange(T * d).view(T, d)
    parts = [text(700, 130, "(T, d)", 18, "middle"), cells(numbers, 580, 145, cell, T, d, k)]
    parts.append(line((700, 275), (700, 320), arrow=True))
    for head in range(d // k):
        left = 510 + 105 * head
        parts.append(cells(numbers[:, head * k : head * k + k], left, 335, cell, T, d, k))
        parts.append(text(left + 30, 478, f"head {head + 1}", 16, "middle"))
    return "".join(parts) + text(910, 310, "(h, T, k), d = h k", 18, "end")


def masks() -> str:
    seen, cell = who_sees_whom(), 42
    decoder = mask(seen["decoder"], 630, 130, cell, TARGET, TARGET) + text(850, 220, "no future", 17, color=BLUE)
    cross = mask(seen["cross"], 630, 345, cell, TARGET, SOURCE, GREEN)
    return decoder + cross + text(850, 435, "no padding", 17, color=GREEN)


def positions() -> str:
    table = ((sinusoidal_positions(torch.arange(24), 32) + 1) / 2).tolist()
    parts = grid(table, 540, 140, 12) + text(732, 450, "feature", 17, "middle")
    return parts + text(525, 290, "position", 17, "end")


def layer() -> str:
    drawn, top = encoder_layer(510, 500, norm_first=False)
    return drawn + line((605, top), (605, top - 20), color=GREEN, width=4, arrow=True)


def stacks() -> str:
    left, right = 520, 730
    parts = [box(left, 300, 170, 80, "none", "6 encoder layers", stroke=BLUE)]
    parts += [box(right, 220, 170, 160, "none", "6 decoder layers", stroke=ORANGE)]
    parts += [box(x, 415, 170, 36, "none", "embeddings + positions", 14) for x in (left, right)]
    parts += [
        text(left + 85, 480, "the source", 17, "middle"),
        text(right + 85, 480, "the target so far", 17, "middle"),
    ]
    parts += [line((x + 85, 415), (x + 85, 384), arrow=True) for x in (left, right)]
    parts += [line((left + 85, 300), (left + 85, 260), (right - 4, 260), color=BLUE, arrow=True)]
    parts += [box(right, 150, 170, 36, "none", "logits", 17), line((right + 85, 220), (right + 85, 190), arrow=True)]
    return "".join(parts) + text(left, 245, "keys and values", 15, color=BLUE)


def parameters() -> str:
    model = base_model()
    counts = {"embeddings (37,000 tokens)": 0, "feed-forward": 0, "attention": 0, "layer norms": 0}
    kinds = {"shared": 0, "embed_tokens": 0, "fc1": 1, "fc2": 1, "self_attn": 2, "encoder_attn": 2}
    names = list(counts)
    for name, parameter in model.named_parameters():
        found = [kind for part, kind in kinds.items() if f".{part}." in f".{name}"]
        counts[names[found[0] if found and "layer_norm" not in name else 3]] += parameter.numel()
    assert sum(counts.values()) == model.num_parameters()
    return bars([count / 1e6 for count in counts.values()], names, form="{:.2f} million")


def teacher_forcing() -> str:
    target = ("Die", "Katze", "schläft", "</s>")
    parts = []
    for number, (read, written) in enumerate(zip(("<s>", *target), target, strict=False)):
        x = 515 + 104 * number
        parts += [box(x, 380, 92, 44, "none", read), line((x + 46, 380), (x + 46, 344), arrow=True)]
        parts += [box(x, 180, 92, 44, "none", written, stroke=BLUE), line((x + 46, 264), (x + 46, 228), arrow=True)]
    parts.append(box(515, 264, 404, 76, "#f2f4f7", "decoder: no position sees later ones"))
    return "".join(parts) + text(515, 450, "read", 17) + text(515, 165, "predicted at the same time", 17, color=BLUE)


def smoothing() -> str:
    values = [0.1 / 5] * 5
    values[1] += 0.9
    return bars(values, ("Der", "Die (correct)", "Das", "Katze", "</s>"), ORANGE)


def warm_up() -> str:
    schedule = learning_rate_schedule("inverse_sqrt", paper_learning_rate(512, 4000), 4000, 20000)
    curve = [(0, 0.0)] + [(step, schedule(step)) for step in range(500, 20001, 500)]
    peak = paper_learning_rate(512, 4000)
    ticks = [(4000, "4,000"), (10000, "10,000"), (20000, "20,000")]
    return chart([("", BLUE, curve)], "step", "learning rate", ticks, [(peak, f"{peak:.1e}")])


def beams() -> str:
    parts = []
    edges = [((510, 300), (640, 190), 0.6, RED), ((510, 300), (640, 410), 0.4, GREEN)]
    edges += [((700, 190), (840, 140), 0.4, RED), ((700, 190), (840, 230), 0.3, GREY)]
    edges += [((700, 410), (840, 370), 0.9, GREEN), ((700, 410), (840, 460), 0.1, GREY)]
    for start, end, probability, color in edges:
        parts.append(line(start, end, color=color, width=1 + 5 * probability))
        below = 24 if end[1] > start[1] else -12
        parts.append(text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + below, probability, 16, "middle", color))
    parts += [box(640, y - 20, 60, 40, "#ffffff", name) for name, y in (("Der", 190), ("Ein", 410))]
    for y, product, color in [(140, 0.24, RED), (230, 0.18, GREY), (370, 0.36, GREEN), (460, 0.04, GREY)]:
        parts.append(text(850, y + 6, f"{product:.2f}", 18, color=color, weight="bold"))
    return "".join(parts)


# ------------------------------------------------------------------------------------------------------------- slides

SLIDES = [  # the title, the figure, and the text beside it
    (
        "Attention is a soft look-up",
        look_up,
        """
A query asks, keys answer, values are read.
Scores: query · key, over √k.
Softmax turns scores into weights.
The output is the weighted mean of the values.

softmax(Q Kᵀ / √k) V
""",
    ),
    (
        "Why the scores are divided by √k",
        largest_weight,
        """
A score is a sum of k products.
Its variance grows with k.
Large scores: one weight is near 1,
and the gradient is near 0.

Divided by √k, the variance is 1
at every width.
""",
    ),
    (
        "Several heads",
        heads,
        """
One look-up has one set of weights.
h heads look for h different things.
Each has k = d / h features,
so the cost stays the same.

Their outputs are joined, then mixed
by one more matrix.
""",
    ),
    (
        "Two masks",
        masks,
        """
Padding fills a batch; it is not text.
The future is what the decoder
must predict.

A masked score becomes very low,
and its weight 0.

Colored: attended to.
""",
    ),
    (
        "Positions",
        positions,
        """
Attention ignores order: a source
and its reverse would look the same.

Each position gets a vector
of sines and cosines,
added to the embedding.

Slow and fast waves, like the
hands of a clock.
""",
    ),
    (
        "A layer",
        layer,
        """
Attention moves information
between positions.
The feed-forward network works
on each position alone.

x + Sublayer(x): the layer corrects
its input, and gradients pass.
Then the norm, as in the paper.
""",
    ),
    (
        "Encoder and decoder",
        stacks,
        """
The encoder reads the whole source.
The decoder writes one token
after another.

It attends to its own past,
and to the encoder's output.

63,082,496 parameters in base.
""",
    ),
    (
        "Where the parameters are",
        parameters,
        """
The base model of the paper,
with 37,000 tokens.

More than half of the layers
is feed-forward networks.

Embeddings, shared by source,
target and output: 30 %.
""",
    ),
    (
        "Teacher forcing",
        teacher_forcing,
        """
In training the decoder reads
the correct target, one to the right.

All positions are predicted in one pass;
the causal mask hides the answers.

When it translates, it reads
what it wrote itself.
""",
    ),
    (
        "Label smoothing",
        smoothing,
        """
The target: 0.9 for the correct token,
0.1 spread over the vocabulary.

The model learns not to be
too certain.

So the training loss
cannot fall to 0.
""",
    ),
    (
        "Warm-up",
        warm_up,
        """
The first steps are small:
Adam's averages are still rough,
and post-norm layers unsettled.

Then the rate falls with
the square root of the step.
""",
    ),
    (
        "Greedy and beam search",
        beams,
        """
Greedy takes the best token each time.
Here it finds 0.6 x 0.4 = 0.24.

Two beams also keep 0.4,
and find 0.4 x 0.9 = 0.36.

More beams find more probable
sentences, not always better ones.
""",
    ),
]


def slide(number: int, title: str, figure, words: str) -> str:
    """One slide as an SVG file."""
    head = text(48, 72, title, 34, weight="bold") + text(930, 525, f"{number} / {len(SLIDES)}", 14, "end", GREY)
    body = "".join(text(48, 150 + 32 * i, row, 21) for i, row in enumerate(words.strip().split("\n")) if row)
    background = '<rect width="960" height="540" fill="#ffffff"/>'
    return svg(title, 960, 540, background + head + body + figure(), is_slide=True)


def main(argv: list[str] | None = None):
    """Draws all slides, or exits with 1 if a file differs."""
    slides = {FOLDER / f"{number:02}.svg": slide(number, *parts) for number, parts in enumerate(SLIDES, start=1)}
    write_or_check(slides, "Draw the slides, or check them.", argv)


if __name__ == "__main__":
    main()
