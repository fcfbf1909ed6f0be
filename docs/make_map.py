"""Write the map of the package in CONTRIBUTING.md, from the first paragraph of each file's docstring.

python docs/make_map.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
START, END = "<!-- written by docs/make_map.py -->\n\n```\n", "```\n\n<!-- end -->\n"


def lines(folder: Path, indent: str = "") -> Iterator[str]:
    """A line for each file of a folder, then for each folder in it with its files."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield line(indent + path.name, path)
    for init in sorted(folder.glob("*/__init__.py")):
        yield line(f"{indent}{init.parent.name}/", init)
        yield from lines(init.parent, indent + "  ")


def line(name: str, path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = docstring.partition("\n\n")[0]
    return f"{name:40}{shorten(paragraph, 120, placeholder=' …')}\n"


def with_map(page: str) -> str:
    """The page with its map written again."""
    before, _, rest = page.partition(START)
    return before + START + "".join(lines(ROOT)) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
