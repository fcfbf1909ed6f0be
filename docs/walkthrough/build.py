"""Build from each source in this folder its notebook, executed, and its exercises; from all of them transformer.py.

python docs/walkthrough/build.py
python docs/walkthrough/build.py 05_layers_and_stacks --output_dir /tmp
python docs/walkthrough/build.py --check

In a source, these comments enclose what the reader is to write, and what the exercises have in its place:

    # SOLUTION
    return weights @ v, weights
    # EXERCISE
    # raise NotImplementedError
    # END

In exercises, cells tagged "answer" are folded, and left out if they are code. Those tagged "part" are what transformer.py
consists of. The last picture of the cell tagged "picture" becomes a file, with which the first notebook begins.
"""

import argparse
import base64
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
MARKED = re.compile(r"(?ms)^( *)# SOLUTION\n(.*?)^ *# EXERCISE\n(.*?)^ *# END(?:\n|\Z)")
MODEL, PICTURE = "transformer.py", "attention_map.png"
HEADER = '''"""The Transformer of *Attention Is All You Need* in plain PyTorch, as the notebooks of this folder write it.

The names of modules and parameters, and their shapes, are those of vanilla_transformer: weights load both ways. Built
from the sources of the notebooks by build.py.

Letters: B sentences, S source length, T target length, d model width, h heads, k = d / h width of a head, f inner
width of the feed-forward network, V vocabulary size, N target tokens without padding.
"""

import math
from collections import Counter

import torch
from torch import nn

PAD, START, END = 0, 1, 2  # token ids: padding, the decoder's first token, the end of a sentence
'''


def is_answer(cell: nbformat.NotebookNode) -> bool:
    return "answer" in cell.metadata.get("tags", [])


def read_source(source: Path, as_exercise: bool = False) -> nbformat.NotebookNode:
    """The cells of a source, without outputs: with the solutions, or with blanks in their place."""

    def choose(match: re.Match) -> str:
        indent, solution, blank = match.groups()
        return re.sub(rf"(?m)^{indent}# ?", indent, blank) if as_exercise else solution

    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    if as_exercise:
        notebook.cells = [cell for cell in notebook.cells if not (is_answer(cell) and cell.cell_type == "code")]
        for cell in filter(is_answer, notebook.cells):
            cell.source = f"<details><summary>The answer, when you have yours</summary>\n\n{cell.source}\n\n</details>"
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # random ids would make every build differ
        cell.source = MARKED.sub(choose, cell.source + "\n").rstrip("\n")
    return notebook


def has_exercise(source: Path) -> bool:
    return MARKED.search(source.read_text(encoding="utf-8")) is not None


def exercise_path(source: Path, folder: Path) -> Path:
    return folder / f"{source.stem}_exercise.ipynb"


def assemble(sources: list[Path]) -> str:
    """The text of transformer.py: the parts that the notebooks write, in their order."""
    text = HEADER
    for source in sources:
        notebook = read_source(source)
        parts = [cell.source for cell in notebook.cells if "part" in cell.metadata.get("tags", [])]
        if parts:
            title = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
            text += f"\n\n# {title} {'-' * (116 - len(title))}\n\n\n" + "\n\n\n".join(parts) + "\n"
    return text


def tidy(outputs: list) -> list:
    """Removes stderr (such as warnings that hold local paths) and blank lines around outputs."""
    kept = []
    for output in outputs:
        if output.output_type == "stream":
            output.text = output.text.strip("\n") + "\n"
        if output.get("name") != "stderr" and output.get("text") != "\n":
            kept.append(output)
    return kept


def build(source: Path, output_dir: Path) -> Path:
    """Executes a source and writes its notebook and its exercises.

    Raises CellExecutionError and writes nothing if a cell fails.
    """
    notebook = read_source(source)
    where = {"metadata": {"path": str(source.parent)}}  # as when it is opened in Jupyter
    NotebookClient(
        notebook, timeout=3600, kernel_name=KERNEL["name"], resources=where, record_timing=False, coalesce_streams=True
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = tidy(cell.outputs)
        if "picture" in cell.metadata.get("tags", []):
            images = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
            (output_dir / PICTURE).write_bytes(base64.b64decode(images[-1]))
    path = output_dir / f"{source.stem}.ipynb"
    nbformat.write(notebook, path)
    if has_exercise(source):
        nbformat.write(read_source(source, as_exercise=True), exercise_path(source, output_dir))
    return path


def find_difference(source: Path, path: Path, as_exercise: bool = False) -> str | None:
    """Describes how a notebook differs from its source, outputs aside; None if they match."""
    if not path.exists():
        return "is missing"
    ours, theirs = (
        [(cell.cell_type, cell.source) for cell in notebook.cells]
        for notebook in (read_source(source, as_exercise), nbformat.read(path, as_version=4))
    )
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if one != other:
            return f"differs from {source.name} in cell {number}"
    return None if len(ours) == len(theirs) else f"has {len(theirs)} cells, and {source.name} has {len(ours)}"


def find_stale(source: Path, folder: Path) -> list[str]:
    """Describes how the notebook and the exercises of a source differ from it."""
    found = {f"{source.stem}.ipynb": find_difference(source, folder / f"{source.stem}.ipynb")}
    if has_exercise(source):
        path = exercise_path(source, folder)
        found[path.name] = find_difference(source, path, as_exercise=True)
    return [f"{name} {difference}" for name, difference in found.items() if difference]


def main(argv: list[str] | None = None):
    """Builds or checks; exits with 1 if a check finds a difference."""
    sources = {source.stem: source for source in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}
    parser = argparse.ArgumentParser(prog="build.py", description="Build the notebooks, or check them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(sources)}")
    parser.add_argument("--check", action="store_true", help="execute nothing; list what differs from its source")
    parser.add_argument(
        "--output_dir", type=Path, default=FOLDER, help="where notebooks are (default: next to the sources)"
    )
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(sources)
    if unknown:
        parser.error(f"there is no {min(unknown)}; choose from {', '.join(sources)}")

    stale, model, path = [], assemble(list(sources.values())), options.output_dir / MODEL
    if not options.check:
        path.write_text(model, encoding="utf-8")  # the notebooks import it
    elif not path.exists() or path.read_text(encoding="utf-8") != model:
        stale.append(f"{MODEL} differs from the sources")
    for name in options.names or sources:
        if options.check:
            stale += find_stale(sources[name], options.output_dir)
        else:
            print(build(sources[name], options.output_dir), flush=True)
    if stale:
        print("\n".join(stale))
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main()
