"""Draw what a trained model does: pictures of the docs, as SVG files in this folder.

python docs/pictures/make_data_pictures.py --model outputs/sample

The pages tell what the sample model does with these sentences: look at them again after a new training.
"""

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from vanilla_transformer import Translator
from vanilla_transformer.inspection.attention import AttentionMaps, Token, attention_maps, eager_attention, encode
from vanilla_transformer.inspection.explorer import Recorder

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER))

from drawing import BLUE, GREEN, GREY, INK, ORANGE, box, curve, svg, text  # noqa: E402

QUESTION, ANSWER = "Does the girl open the door?", "Macht das Mädchen die Tür auf?"  # a verb in two parts
UNSURE = "Maria calls my father today."  # not in the sample dataset; greedy search gets it wrong
WRITTEN = "The old man reads a book because he is tired."  # as in the README
BEAMS = 3
SMALLEST = 0.02  # the smallest weight that is drawn

Place = tuple[float, float]  # the left edge and the width of a token's box


# -------------------------------------------------------------------------------------------------------------- tokens


def width_of(words: str, size: float) -> float:
    """In DejaVu Sans, which is wider than the fonts of the pictures."""
    return text_to_path.get_text_width_height_descent(words, FontProperties(size=size), ismath=False)[0]


def places(tokens: list[Token], x: float, size: float) -> list[Place]:
    """A row of boxes, in which the tokens of a word touch each other."""
    found, before = [], None
    for token in tokens:
        if found:
            x += 1 if token.word is not None and token.word == before else 9
        found.append((x, width_of(token.text, size) + 6))
        x, before = x + found[-1][1], token.word
    return found


def end_of(row: list[Place]) -> float:
    return sum(row[-1])


def middle(place: Place) -> float:
    return place[0] + place[1] / 2


def row_of_boxes(tokens: list[Token], row: list[Place], y: float, size: float, seen: int) -> list[str]:
    """Boxes with tokens; those from number `seen` on are grey."""
    return [
        box(x, y, width, 1.8 * size, words=token.text, size=size, color=INK if number < seen else GREY)
        for number, (token, (x, width)) in enumerate(zip(tokens, row, strict=True))
    ]


def marked(token: Token, place: Place, y: float, size: float) -> str:
    return box(place[0], y, place[1], 1.8 * size, BLUE, token.text, size, BLUE, "#ffffff")


def lines_to(keys: list[Place], weights: torch.Tensor, query: Place, top: float, bottom: float) -> str:
    """Curves from a query in the lower row up to the keys, as wide as their weights."""
    pairs = zip(keys, weights.tolist(), strict=True)
    start = (middle(query), bottom)
    return "".join(curve(start, (middle(key), top), 12 * w) for key, w in pairs if w >= SMALLEST)


# ------------------------------------------------------------------------------------------------------------ pictures


def attention_arrows(maps: AttentionMaps) -> str:
    """Where one position looks in the source, and where another looks in what is written already."""
    article = next(i for i, token in enumerate(maps.target) if token.word == 1)
    particle = max(i for i, token in enumerate(maps.target) if token.word is not None) - 1
    verb = [i for i, token in enumerate(maps.decoder_input) if token.word == 0]
    heads = maps.decoder[:, :, particle, verb].sum(dim=-1)  # (layers,h)
    layer, head = divmod(int(heads.argmax()), heads.shape[1])
    panels = [
        ("Attention to the source, last layer, mean of its heads", "source", maps.source, article),
        (f"Self-attention of the decoder, layer {layer}, head {head}", "reads", maps.decoder_input, particle),
    ]
    weights = [maps.cross[-1].mean(dim=0)[article], maps.decoder[layer, head, particle]]
    parts, size, left, right = [], 18, 100, 0
    for number, ((title, name, keys, query), row) in enumerate(zip(panels, weights, strict=True)):
        y = 270 * number
        upper, lower = places(keys, left, size), places(maps.target, left, size)
        parts.append(text(20, y + 34, title, 18, weight="bold"))
        parts.append(text(20, y + 97, name, 16, color=GREY))
        parts.append(text(20, y + 222, "predicts", 16, color=GREY))
        parts.append(lines_to(upper, row, lower[query], y + 107, y + 200))
        seen = len(keys) if name == "source" else query + 1
        parts += row_of_boxes(keys, upper, y + 75, size, seen)
        parts += row_of_boxes(maps.target, lower, y + 200, size, query)
        parts.append(marked(maps.target[query], lower[query], y + 200, size))
        for place, weight in zip(upper, row.tolist(), strict=True):
            if weight >= 0.05:
                parts.append(text(middle(place), y + 66, f"{weight:.0%}", 15, "middle", BLUE))
        right = max(right, end_of(upper), end_of(lower))
    return svg("Attention weights as lines from a token that is predicted", round(right + 20), 520, "".join(parts))


def next_tokens(source: str, path: dict, vocab_size: int) -> str:
    """The five likeliest next tokens at the first step and at the two at which the model is least sure."""
    least_sure = sorted(range(len(path["p"])), key=lambda step: path["p"][step][0])[:2]
    shown = sorted({0, *least_sure})
    parts = [text(20, 36, source, 20, weight="bold")]
    for number, step in enumerate(shown):
        x, probabilities = 300 * number, path["p"][step]
        written = readable(path["spelled"][:step]) or "<s>"
        parts += [text(x + 20, 80, "written so far", 15, color=GREY), text(x + 125, 80, written, 18)]
        others = f"{vocab_size - len(probabilities):,} others"
        rows = [*zip(path["candidates"][step], probabilities, strict=True), (others, 1 - sum(probabilities))]
        for place, (token, probability) in enumerate(rows):
            y, long = 98 + 34 * place, 110 * probability
            color = ORANGE if place == 0 else BLUE if place < len(probabilities) else GREY
            parts.append(text(x + 117, y + 18, token, 17, "end", GREY if color == GREY else INK))
            parts.append(box(x + 125, y, max(1, long), 24, color, stroke="none"))
            parts.append(text(x + 133 + long, y + 18, f"{probability:.1%}", 15))
    parts.append(
        text(20, 332, "Orange: the likeliest token, which greedy search takes. ▁ is the space before a word.", 16)
    )
    return svg("The likeliest next tokens at three steps", 300 * len(shown) + 20, 350, "".join(parts))


def readable(tokens: list[str]) -> str:
    return "".join(tokens).replace("▁", " ").strip()


def finish(steps: list[list[list]]) -> list[tuple[float, list[tuple[int, int]]]]:
    """The n best finished hypotheses of a recorded search, best first: their score, and (step, place) of each token.

    The score is the sum of the log-probabilities divided by the number of tokens, as by default.
    """
    running, finished = [[]], []
    for step, candidates in enumerate(steps):
        paths = [[*running[parent], (step, place)] for place, (parent, *_) in enumerate(candidates)]
        ends = [place for place, candidate in enumerate(candidates[:BEAMS]) if candidate[3]]
        finished += [(candidates[place][2] / (step + 1), paths[place]) for place in ends]
        finished = sorted(finished, reverse=True)[:BEAMS]
        kept = [place for place, candidate in enumerate(candidates) if not candidate[3]][:BEAMS]
        running = [paths[place] for place in kept]
        if not kept or (len(finished) == BEAMS and candidates[kept[0]][2] / (step + 1) <= finished[-1][0]):
            break
    return finished


def beam_tree(source: str, steps: list[list[list]], greedy: list[str], end: str) -> str:
    """A search up to the step after which its hypotheses have nothing in common, and how they end."""
    finished = finish(steps)
    count = next((k for k in range(1, 6) if len({path[k - 1] for _, path in finished}) == len(finished)), 5)
    parent_of, running = {}, [None]  # nodes are (step, place); the root is None
    for step, candidates in enumerate(steps):
        parent_of |= {(step, place): running[parent] for place, (parent, *_) in enumerate(candidates)}
        running = [(step, place) for place, candidate in enumerate(candidates) if not candidate[3]][:BEAMS]
    colors = {node: BLUE for _, path in finished for node in path} | dict.fromkeys(finished[0][1], GREEN)

    def total(node):
        return steps[node[0]][node[1]][2] if node else 0.0

    def tokens(node):
        return [*tokens(parent_of[node]), steps[node[0]][node[1]][1]] if node else []

    def corner(node):
        return (20 + 180 * (node[0] + 1), 84 + 62 * node[1]) if node else (66, 84)

    def edge(node, x, y, color, written):
        left, top = corner(node)
        start, here = (left + (96 if node else 50), top + 21), (x, y + 21)
        drawn = curve(start, here, 3 if color != GREY else 1.3, color, across=True)
        is_greedy = written == greedy[: len(written)]
        return drawn + (curve(start, here, 3, ORANGE, "7 7", across=True) if is_greedy else "")

    parts = [text(20, 36, source, 20, weight="bold"), box(66, 84, 50, 42, words="<s>")]
    for node in sorted((n for n in parent_of if n[0] < count), key=lambda n: n in colors):  # the pruned ones below
        (x, y), parent, color = corner(node), parent_of[node], colors.get(node, GREY)
        parts.append(edge(parent, x, y, color, tokens(node)))
        label = y + (36 if y > corner(parent)[1] else 14)  # on the side from which the line does not come
        parts.append(text(x - 5, label, minus(total(node) - total(parent)), 13, "end", color))
        parts.append(box(x, y, 96, 42, stroke=color))
        parts.append(text(x + 48, y + 18, tokens(node)[-1], 17, "middle", INK if node in colors else GREY))
        parts.append(text(x + 48, y + 36, minus(total(node)), 13, "middle", color))
    right, width = 20 + 180 * (count + 1) + 20, 0
    for place, (score, path) in enumerate(finished):
        shown, color, y = path[:count], colors[path[-1]], corner((0, place))[1]
        written = tokens(path[-1])
        parts.append(edge(shown[-1], right, y, color, written))
        if rest := len(path) - len(shown):
            parts.append(text(right - 6, y + 14, f"{rest} more token{'s' * (rest > 1)}", 13, "end", color))
        words = readable(written[:-1] if written[-1] == end else written)
        how = f"{minus(total(path[-1]))} / {len(path)} tokens = {minus(score, 3)}"
        parts.append(text(right + 8, y + 18, words, 17, weight="bold" if place == 0 else "normal"))
        parts.append(text(right + 8, y + 37, how, 14, color=color))
        width = max(width, width_of(words, 18), width_of(how, 14))
    parts += [text(corner((step, 0))[0] + 48, 72, f"step {step + 1}", 15, "middle", GREY) for step in range(count)]
    parts.append(text(right + 8, 72, "score", 15, color=GREY))
    bottom = corner((0, 2 * BEAMS))[1] + 20
    legend = [("best hypothesis", GREEN), ("other finished ones", BLUE), ("greedy search", ORANGE), ("pruned", GREY)]
    for number, (name, color) in enumerate(legend):
        x, dash = 20 + 215 * number, "7 7" if color == ORANGE else "none"
        parts.append(curve((x, bottom - 5), (x + 34, bottom - 5), 3 if color != GREY else 1.3, color, dash))
        parts.append(text(x + 42, bottom, name, 16))
    note = "On a line: the log-probability of the token. In a box: the sum so far, by which the beams are chosen."
    parts.append(text(20, bottom + 32, note + " ▁ is a space.", 16))
    title = f"A search with {BEAMS} beams as a tree"
    return svg(title, round(right + width + 24), bottom + 50, "".join(parts))


def minus(number: float, digits: int = 2) -> str:
    return f"{number:.{digits}f}".replace("-", "\N{MINUS SIGN}")


def translation(maps: AttentionMaps) -> str:
    """A translation that is written token by token; complete where the reader's system asks for less motion."""
    size, top, bottom = 18, 8, 140
    upper, lower = places(maps.source, 0, size), places(maps.target, 0, size)
    width = max(end_of(upper), end_of(lower)) + 16
    upper, lower = ([(x + (width - end_of(row)) / 2, w) for x, w in row] for row in (upper, lower))
    count, seconds, pause, fade = len(maps.target), 0.9, 4.5, 0.15
    duration = seconds * count + pause
    opacity = {"line": 0.5, "mark": 0}  # at the end and in a still

    def at(time):
        return f"{100 * time / duration:.1f}%"

    boxes = row_of_boxes(maps.target, lower, bottom, size, count)
    parts, rules = row_of_boxes(maps.source, upper, top, size, len(upper)), []
    for step, weights in enumerate(maps.cross[-1].mean(dim=0)):
        drawn = {
            "line": lines_to(upper, weights, lower[step], top + 1.8 * size, bottom),
            "token": boxes[step],
            "mark": marked(maps.target[step], lower[step], bottom, size),
        }
        start, end, last = (seconds * number for number in (step, step + 1, count))
        appears = f"0%,{at(start)}{{opacity:0}}{at(start + fade)}"
        vanishes = "" if end == last else f"{at(end + fade)},{at(last)}{{opacity:0}}"
        frames = {"token": f"{appears},100%{{opacity:1}}"}
        for name in ("line", "mark"):
            rest = f"{at(last + fade)},100%{{opacity:{opacity[name]}}}"
            frames[name] = f"{appears},{at(end)}{{opacity:1}}{vanishes}{rest}"
        for name, part in drawn.items():
            parts.append(f'<g class="{name} {name}{step}">{part}</g>')
            rules.append(f"@keyframes {name}{step}{{{frames[name]}}}")
            rules.append(f".{name}{step}{{animation:{name}{step} {duration:g}s infinite}}")
    still = "".join(f" .{name} {{ opacity: {value}; }}" for name, value in opacity.items())
    moving = f" @media (prefers-reduced-motion: no-preference) {{ {''.join(rules)} }}"
    title = f"“{maps.translation}” is written token by token; lines to the source are as wide as the attention weights"
    return svg(title, round(width), round(bottom + 1.8 * size + 8), "".join(parts), rules=still + moving)


# ---------------------------------------------------------------------------------------------------------------- main


def draw(model, tokenizer) -> dict[str, str]:
    """Each file's name and content."""
    with eager_attention(model), torch.no_grad():
        recorder = Recorder(model, tokenizer, encode(model, tokenizer, UNSURE), UNSURE)
        ids = recorder.complete([])
        path, *_ = recorder.path(ids)
        path["spelled"] = [recorder.spell(number) for number in ids]
        steps = recorder.beams(BEAMS)
    return {
        "attention_arrows.svg": attention_arrows(attention_maps(model, tokenizer, QUESTION, ANSWER)),
        "next_tokens.svg": next_tokens(UNSURE, path, model.config.decoder_vocab_size),
        "beam_tree.svg": beam_tree(UNSURE, steps, path["spelled"], tokenizer.eos_token),
        "translation.svg": translation(attention_maps(model, tokenizer, WRITTEN)),
    }


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="make_data_pictures.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="DIR_OR_ID")
    parser.add_argument("--output_dir", type=Path, default=FOLDER)
    options = parser.parse_args(argv)
    translator = Translator.from_pretrained(options.model)
    for name, content in draw(translator.model, translator.tokenizer).items():
        (options.output_dir / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
