"""Draw the slides of docs/teachers.md, with numbers from the package: SVG files in this folder, and deck.html of all.

The deck is the file deck_template.html with the slides and their notes in it; it loads nothing else.

python docs/slides/make_slides.py
python docs/slides/make_slides.py --check     lists those that differ
"""

import math
import sys
from html import escape
from pathlib import Path

import torch

from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_positions
from vanilla_transformer.training.optimization import learning_rate_schedule, paper_learning_rate

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parent / "pictures"))

from drawing import BLUE, GREEN, GREY, ORANGE, RED, arrowhead, box, grid, line, svg, text, write_or_check  # noqa: E402
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
    keys, values = torch.tensor([[4.0, 0], [0, 4], [-4, -4]]), torch.tensor([[1.0, 0], [0, 1], [5, 5]])
    queries, (x, y, cell) = torch.tensor([[1, 0.5], [0, 0]]), (620, 200, 72)
    weights = (queries @ keys.T / math.sqrt(2)).softmax(dim=-1)
    names = [[f"({a:g}, {b:g})" for a, b in vectors.tolist()] for vectors in (queries, keys, values)]
    parts = [grid(weights.tolist(), x, y, cell, names[0], names[1], numbers=True)]
    parts += [text(x + cell * (j + 0.5), y + 172, name, 17, "middle", GREEN) for j, name in enumerate(names[2])]
    for i, (a, b) in enumerate((weights @ values).tolist()):
        parts.append(text(x + 3 * cell + 10, y + cell * (i + 0.5) + 6, f"({a:.1f}, {b:.1f})", 17, color=RED))
    parts += [
        text(x - 10, y - 10, "queries", 17, "end", GREY),
        text(x + 1.5 * cell, y - 40, "keys", 17, "middle", GREY),
    ]
    parts += [
        text(x - 10, y + 172, "values", 17, "end", GREEN),
        text(x + 3 * cell + 10, y - 10, "outputs", 17, color=RED),
    ]
    return "".join(parts) + text(x + 1.5 * cell, 430, "each row of weights sums to 1", 17, "middle", GREY)


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
    parts.append(box(515, 264, 404, 76, GREY, "decoder: no position sees later ones", opacity=0.13))
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
    parts += [box(640, y - 20, 60, 40, "none", name) for name, y in (("Der", 190), ("Ein", 410))]
    for y, product, color in [(140, 0.24, RED), (230, 0.18, GREY), (370, 0.36, GREEN), (460, 0.04, GREY)]:
        parts.append(text(850, y + 6, f"{product:.2f}", 18, color=color, weight="bold"))
    return "".join(parts)


# ------------------------------------------------------------------------------------------------------------- slides

SLIDES = [  # the title, the figure, the text beside it, and what the teacher may say
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
        """
Let students compute the first row by hand: scores 4, 2 and -6; divided by √2, 2.83, 1.41 and -4.24; weights
0.80, 0.20 and 0.00. Ask: which query gets the mean of all values, and why? (The zero query: all its scores are
0.)
""",
    ),
    (
        "Why the scores are divided by √k",
        largest_weight,
        """
A score is a sum of k products.
Its variance grows with k.
Large scores: one weight is near 1,
and for many queries the gradient
is near 0.

Divided by √k, the variance is 1
at every width.
""",
        """
Ask: what is the variance of a sum of 64 independent products of variance 1? (64.) Notebook 1 measures at width
64 that the gradient of the median query is still as large as with the division; that of the lower quartile is a
fifth. From width 128 on the median falls too. So say "many queries", not "all".
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
        """
The numbers are regrouped, none is computed. Ask: what would a reshape to (h, T, k) alone do wrong? (It mixes
positions: a transpose is needed.) Ask: how many more multiplications do 8 heads need than one? (None.)
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
        """
Have a student read a row aloud: "sie" may look at "<s>" and "sie". Ask: why is a weight not set to 0 after the
softmax? (The rest would not sum to 1.)
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
        """
Cover the figure and ask how a model could tell "dog bites man" from "man bites dog". Each row of the picture is
the vector that is added at one position. Neighbours have similar rows; the left columns turn fast, the right
ones slowly.
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
        """
Follow the green line: it is x, from the bottom of the stack to its top. Ask: what does the layer do if its
sublayers return 0? (It only normalizes.) The package has pre-norm too; notebook 4 compares both.
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
        """
Ask where the queries of cross-attention come from, and where its keys and values. The encoder runs once for a
sentence, the decoder once for each token that it writes.
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
        """
Let students guess before you show the bars. A layer has 4 d² parameters for one attention and 8 d² for the
feed-forward network, since f = 4 d; a decoder layer has two attentions.
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
        """
Ask: what would a decoder learn if its input were not shifted? (To copy its input: loss near 0, useless
translations.)
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
        """
Ask for the lowest loss that a perfect model can reach. (The entropy of this target, not 0.) A student whose
loss stands still above 0 has no error.
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
        """
The peak depends on width and warm-up: d^-0.5 times warmup^-0.5. Ask: what changes if warm-up is twice as long?
(The peak is later and lower by √2.)
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
        """
Let students search before you do: which sentence is the most probable? Ask: with how many beams is it surely
found? (With as many as there are paths; two suffice here.)
""",
    ),
]


def draw(number: int, title: str, figure, words: str) -> str:
    """What is on a slide."""
    head = text(48, 72, title, 34, weight="bold") + text(930, 525, f"{number} / {len(SLIDES)}", 14, "end", GREY)
    body = "".join(text(48, 150 + 32 * i, row, 21) for i, row in enumerate(words.strip().split("\n")) if row)
    return head + body + figure()


def deck(drawn: list[str]) -> str:
    """One page with all slides and notes."""
    sections = [
        f'<section><svg viewBox="0 0 960 540" role="img" aria-label="{escape(title)}">{body}</svg>'
        f"<aside>{escape(' '.join(notes.split()))}</aside></section>"
        for (title, _, _, notes), body in zip(SLIDES, drawn, strict=True)
    ]
    arrows = "".join(map(arrowhead, (BLUE, GREEN, GREY, ORANGE, RED)))
    template = (FOLDER / "deck_template.html").read_text(encoding="utf-8")
    return template.replace("{{arrows}}", arrows).replace("{{slides}}", "\n".join(sections))


def main(argv: list[str] | None = None):
    """Draws all slides, or exits with 1 if a file differs."""
    drawn = [draw(number, *parts) for number, (*parts, _) in enumerate(SLIDES, start=1)]
    background = '<rect width="960" height="540" fill="#ffffff"/>'
    files = {
        FOLDER / f"{number:02}.svg": svg(title, 960, 540, background + body, is_slide=True)
        for number, ((title, *_), body) in enumerate(zip(SLIDES, drawn, strict=True), start=1)
    }
    write_or_check(files | {FOLDER / "deck.html": deck(drawn)}, "Draw the slides, or check them.", argv)


if __name__ == "__main__":
    main()
