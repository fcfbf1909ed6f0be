"""Build from each source in this folder its notebook, executed, and its exercises; from all of them transformer.py.

python docs/walkthrough/build.py
python docs/walkthrough/build.py 05_layers_and_stacks --output_dir /tmp
python docs/walkthrough/build.py --texts_only
python docs/walkthrough/build.py --check

In a source, these comments enclose what the reader is to write, and what the exercises have in its place:

    # SOLUTION
    return weights @ values, weights
    # EXERCISE
    # raise NotImplementedError
    # END

In exercises, cells tagged "answer" are folded, and left out if they are code. Those tagged "part" are what transformer.py
consists of. The last picture of the cell tagged "picture" becomes a file, with which the first notebook begins.

A notebook can be opened alone: it holds its pictures, as PNG, since Colab shows no SVG in text; and its first cell gets
the files that the notebooks share, where they are missing.
"""

import argparse
import base64
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
MARKED = re.compile(r"(?ms)^( *)# SOLUTION\n(.*?)^ *# EXERCISE\n(.*?)^ *# END(?:\n|\Z)")
MODEL, PICTURE = "transformer.py", "attention_map.png"
REPOSITORY = re.search(r'(?m)^repo_url: .*"(https:.+)"', (FOLDER.parents[1] / "mkdocs.yml").read_text("utf-8"))[1]
COLAB = f"https://colab.research.google.com/github/{REPOSITORY.removeprefix('https://github.com/')}/blob/main/docs/walkthrough"
BUTTON = "../pictures/colab.svg"
SETUP = f"""# @title Setup: run this first
# It finds the files that the notebooks share, or gets them, as in Colab: a minute or two.
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

repository = os.environ.get("REPOSITORY_URL", "{REPOSITORY}")
shared, new = Path("docs", "walkthrough"), Path("vanilla-transformer").resolve()
clones = [folder for folder in (new, *new.parents) if (folder / shared / "checks.py").exists()]
if not clones:
    subprocess.run(["git", "clone", "--depth", "1", repository, new], check=True)
clone = clones[0] if clones else new
if importlib.util.find_spec("vanilla_transformer") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", clone], check=True)
os.chdir(clone / shared)
sys.path[:0] = [str(clone / shared), str(clone)]
"""
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


def is_setup(cell: nbformat.NotebookNode) -> bool:
    return "setup" in cell.metadata.get("tags", [])


def read_source(source: Path, as_exercise: bool = False) -> nbformat.NotebookNode:
    """The cells of a source, without outputs: with the solutions, or with blanks in their place.

    The data of pictures is missing; `cell.metadata.pictures` has a digest of each.
    """

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
    add_setup(notebook, exercise_path(source, Path()) if as_exercise else Path(f"{source.stem}.ipynb"))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"!\[([^\]]+)\]\(([^)\s]+)\)", r"![\1][\2]", cell.source)
            if as_exercise:  # which are a folder deeper
                cell.source = re.sub(r"\]\((?!\w+:)", "](../", cell.source)
            paths = re.findall(r"!\[[^\]]+\]\[([^\]]+)\]", cell.source)
            digests = {path: hashlib.sha256((FOLDER / path).read_bytes()).hexdigest()[:16] for path in paths}
            cell.metadata |= {"pictures": digests} if digests else {}
    return notebook


def add_setup(notebook: nbformat.NotebookNode, path: Path):
    """Adds the cell that finds the other files, and below the title a button that opens `path` in Colab."""
    setup = nbformat.v4.new_code_cell(SETUP.rstrip("\n"), id="setup")
    setup.metadata = nbformat.from_dict({"tags": ["setup"], "cellView": "form", "jupyter": {"source_hidden": True}})
    notebook.cells.insert([cell.cell_type for cell in notebook.cells].index("code"), setup)
    title, line, text = notebook.cells[0].source.partition("\n")
    if title.startswith("# ") and notebook.cells[0].cell_type == "markdown":
        button = f"[![Open in Colab]({BUTTON})]({COLAB}/{path.as_posix()})"
        notebook.cells[0].source = f"{title}\n\n{button}{line}{text}"


# -------------------------------------------------------------------------------------------------------- pictures


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def as_png(path: Path) -> bytes:
    """A picture as PNG: an SVG file on white, at 1.5 times its size, in at most 64 colors."""
    if path.suffix == ".png":
        return path.read_bytes()
    browser = find_browser()
    if browser is None:
        sys.exit(f"{path.name} has changed; to draw it, build.py needs Chromium or Chrome on the PATH.")
    width, height = re.search(r'width="(\d+)" height="(\d+)"', path.read_text(encoding="utf-8")).groups()
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder, "drawn.png")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1.5"]
        options += [f"--window-size={width},{height}", f"--screenshot={drawn}", path.as_uri()]
        subprocess.run([browser, *options], check=True, capture_output=True)
        small = io.BytesIO()
        Image.open(drawn).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    return small.getvalue()


DATA = re.compile(r"(?m)\n*^\[([^\]]+)\]: (data:\S+)$")


def write(notebook: nbformat.NotebookNode, path: Path):
    """Writes a notebook with the data of its pictures; those that have not changed are taken from the older file."""
    known = {}
    if path.exists():
        for cell in nbformat.read(path, as_version=4).cells:
            digests = cell.metadata.get("pictures", {})
            known |= {(name, digests.get(name)): data for name, data in DATA.findall(cell.source)}
    for cell in notebook.cells:
        for name, digest in cell.metadata.get("pictures", {}).items():
            if (name, digest) not in known:
                png = base64.b64encode(as_png((FOLDER / name).resolve())).decode()
                known[name, digest] = f"data:image/png;base64,{png}"
            cell.source += f"\n\n[{name}]: {known[name, digest]}"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)


# ------------------------------------------------------------------------------------------------------- notebooks


def has_exercise(source: Path) -> bool:
    return MARKED.search(source.read_text(encoding="utf-8")) is not None


def exercise_path(source: Path, folder: Path) -> Path:
    return folder / "exercises" / f"{source.stem}_exercise.ipynb"


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


def execute(notebook: nbformat.NotebookNode, folder: Path):
    """Runs all cells but the setup in a folder, as when they are opened there in Jupyter; CellExecutionError if one fails."""
    cells, notebook.cells = notebook.cells, [cell for cell in notebook.cells if not is_setup(cell)]
    where, options = {"metadata": {"path": str(folder)}}, {"record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, timeout=3600, kernel_name=KERNEL["name"], resources=where, **options).execute()
    notebook.cells = cells
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = tidy(cell.outputs)


def take_outputs(notebook: nbformat.NotebookNode, path: Path):
    """Gives a notebook the outputs of the older one at `path`; exits if their code differs."""
    ours, theirs = (
        [cell for cell in one.cells if cell.cell_type == "code" and not is_setup(cell)]
        for one in (notebook, nbformat.read(path, as_version=4))
    )
    if [cell.source for cell in ours] != [cell.source for cell in theirs]:
        sys.exit(f"The code of {path.name} has changed: build it without --texts_only.")
    for cell, old in zip(ours, theirs, strict=True):
        cell.outputs, cell.execution_count = old.outputs, old.execution_count


def build(source: Path, output_dir: Path, texts_only: bool = False) -> Path:
    """Executes a source, or takes the outputs of its older notebook, and writes its notebook and its exercises.

    Raises CellExecutionError and writes nothing if a cell fails.
    """
    notebook, path = read_source(source), output_dir / f"{source.stem}.ipynb"
    if texts_only:
        take_outputs(notebook, path)
    else:
        execute(notebook, source.parent)
    for cell in notebook.cells:
        if "picture" in cell.metadata.get("tags", []) and not texts_only:
            images = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
            (output_dir / PICTURE).write_bytes(base64.b64decode(images[-1]))
    write(notebook, path)
    if has_exercise(source):
        write(read_source(source, as_exercise=True), exercise_path(source, output_dir))
    return path


def find_difference(source: Path, path: Path, as_exercise: bool = False) -> str | None:
    """Describes how a notebook differs from its source, outputs aside; None if they match."""
    if not path.exists():
        return "is missing"
    ours, theirs = (
        [(cell.cell_type, DATA.sub("", cell.source), cell.metadata.get("pictures")) for cell in notebook.cells]
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


def page_with_buttons() -> str:
    """README.md of this folder, with buttons that lead to [`REPOSITORY`]."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    return re.sub(r"https://colab\S+?/docs/walkthrough", COLAB, text)


def main(argv: list[str] | None = None):
    """Builds or checks; exits with 1 if a check finds a difference."""
    sources = {source.stem: source for source in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}
    parser = argparse.ArgumentParser(prog="build.py", description="Build the notebooks, or check them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(sources)}")
    parser.add_argument("--check", action="store_true", help="write nothing; list what differs from its source")
    parser.add_argument(
        "--texts_only",
        action="store_true",
        help="execute nothing, keep all outputs; for sources and pictures in which no code has changed",
    )
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
    page, buttons = FOLDER / "README.md", page_with_buttons()
    if page.read_text(encoding="utf-8") != buttons:
        if options.check:
            stale.append("README.md has buttons that lead elsewhere")
        elif options.output_dir == FOLDER:
            page.write_text(buttons, encoding="utf-8")
    for name in options.names or sources:
        if options.check:
            stale += find_stale(sources[name], options.output_dir)
        else:
            print(build(sources[name], options.output_dir, options.texts_only), flush=True)
    if stale:
        print("\n".join(stale))
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main()
