"""SVG shapes that the slides and the pictures of the docs share: strings to be joined inside `svg`.

Where the reader's system is dark, the ink of a picture is light. So it has a background of its own: the page around it
may be light there, and a window that shows only the picture is white.
"""

import argparse
import sys
from html import escape
from pathlib import Path

from matplotlib import colormaps
from matplotlib.colors import to_hex

BLUE, ORANGE, GREEN, RED, GREY = "#3b6fb6", "#d9822b", "#4c9a5b", "#b5485d", "#8a8f98"
INK = "currentColor"

LIGHT = "svg { color: #1d2129; }"
DARK = "@media (prefers-color-scheme: dark) { svg { color: #e6edf3; background: #0d1117; } }"
LIGHT_OR_DARK = f"{LIGHT} svg {{ background: #ffffff; }} {DARK}"


def svg(title: str, width: int, height: int, body: str, is_slide: bool = False, rules: str = "") -> str:
    """A whole SVG file; screen readers read the title. A slide fills the window, and its ink stays dark.

    Further style `rules` can move parts of it.
    """
    size = f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif"'
    size, style = (size, LIGHT) if is_slide else (f'width="{width}" height="{height}" {size}', LIGHT_OR_DARK)
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{in_xml(title)}</title>'
    heads = (arrowhead(color) for color in (BLUE, ORANGE, GREEN, RED, GREY) if f"#arrow{color[1:]}" in body)
    return f"{start}<style>{style}{rules}</style><defs>{''.join(heads)}</defs>{body}</svg>\n"


def arrowhead(color: str) -> str:
    size = 'viewBox="0 0 8 8" refX="6" refY="4" markerWidth="12" markerHeight="12" markerUnits="userSpaceOnUse"'
    return f'<marker id="arrow{color[1:]}" {size} orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'


def in_xml(words) -> str:
    return escape("".join(letter if letter.isprintable() else "▯" for letter in str(words)))  # no control characters


def text(x, y, words, size=20, anchor="start", color=INK, weight="normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{in_xml(words)}</text>'


def box(x, y, width, height, fill="none", words="", size=18, stroke=GREY, color=INK, opacity=1) -> str:
    """A rectangle with a line of text in its middle; `opacity` is that of its filling."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    shade = "" if opacity == 1 else f' fill-opacity="{opacity:g}"'
    label = text(x + width / 2, y + height / 2 + size / 3, words, size, "middle", color) if words != "" else ""
    return f'<rect {place} fill="{fill}"{shade} stroke="{stroke}" rx="3"/>{label}'


def circle(x, y, radius, stroke=GREY, width=2, fill="none") -> str:
    place = f'cx="{x:g}" cy="{y:g}" r="{radius:g}"'
    return f'<circle {place} fill="{fill}" stroke="{stroke}" stroke-width="{width:g}"/>'


def line(*points, color=GREY, width=2, arrow=False) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    end = f' marker-end="url(#arrow{color[1:]})"' if arrow else ""
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{end}/>'


def grid(values, x, y, cell, rows=(), columns=(), numbers=False) -> str:
    """A table of values from 0 to 1, in the colors of `attention_figure`, with names of its rows and columns."""
    parts = [text(x - 10, y + cell * (i + 0.5) + 6, name, 17, "end") for i, name in enumerate(rows)]
    parts += [text(x + cell * (j + 0.5), y - 10, name, 17, "middle") for j, name in enumerate(columns)]
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            place = f'x="{x + cell * j:g}" y="{y + cell * i:g}" width="{cell:g}" height="{cell:g}"'
            parts.append(f'<rect {place} fill="{to_hex(colormaps["Blues"](value))}"/>')
            if numbers:
                shade = "#ffffff" if value > 0.6 else "#1d2129"
                middle = (x + cell * (j + 0.5), y + cell * (i + 0.5) + 7)
                parts.append(text(*middle, f"{value:.2f}", 18, "middle", shade))
    width, height = cell * len(values[0]), cell * len(values)
    return "".join(parts) + box(x, y, width, height)


def curve(start, end, width=2.0, color=BLUE, dash="none", across=False) -> str:
    """A curved line that leaves and arrives vertically, or horizontally if it runs across; steepest near its start."""
    (x, y), (right, down) = start, end
    turn = x + 0.25 * (right - x), (y + down) / 2
    bend = f"{turn[0]:g},{y:g} {turn[0]:g},{down:g}" if across else f"{x:g},{turn[1]:g} {right:g},{turn[1]:g}"
    style = f'fill="none" stroke="{color}" stroke-width="{width:.2g}" stroke-dasharray="{dash}"'
    return f'<path d="M{x:g},{y:g}C{bend} {right:g},{down:g}" {style}/>'


def write_or_check(pictures: dict[Path, str], description: str, argv: list[str] | None = None):
    """Writes the files; with `--check`, lists those that differ and exits with 1 if there are any."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; list the files that differ")
    check, differ = parser.parse_args(argv).check, False
    for path, drawn in pictures.items():
        if not check:
            path.write_text(drawn, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != drawn:
            differ = True
            print(f"{path.name} differs")
    sys.exit(1 if differ else 0)
