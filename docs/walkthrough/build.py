"""Build the notebooks: execute the sources in this folder and write each as a notebook with its outputs.

python docs/walkthrough/build.py
python docs/walkthrough/build.py 05_layers_and_stacks --output_dir /tmp
python docs/walkthrough/build.py --check
"""

import argparse
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def read_source(source: Path) -> nbformat.NotebookNode:
    """The cells of a source, without outputs."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # random ids would make every build differ
    return notebook


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
    """Executes a source and writes its notebook; raises CellExecutionError and writes nothing if a cell fails."""
    notebook = read_source(source)
    where = {"metadata": {"path": str(source.parent)}}  # as when it is opened in Jupyter
    NotebookClient(
        notebook, timeout=600, kernel_name=KERNEL["name"], resources=where, record_timing=False, coalesce_streams=True
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = tidy(cell.outputs)
    path = output_dir / f"{source.stem}.ipynb"
    nbformat.write(notebook, path)
    return path


def find_difference(source: Path, path: Path) -> str | None:
    """Describes how a notebook differs from its source, outputs aside; None if they match."""
    if not path.exists():
        return "is missing"
    ours, theirs = (
        [(cell.cell_type, cell.source) for cell in notebook.cells]
        for notebook in (read_source(source), nbformat.read(path, as_version=4))
    )
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if one != other:
            return f"differs from {source.name} in cell {number}"
    return None if len(ours) == len(theirs) else f"has {len(theirs)} cells, and {source.name} has {len(ours)}"


def main(argv: list[str] | None = None):
    """Builds or checks; exits with 1 if a check finds a difference."""
    sources = {source.stem: source for source in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}
    parser = argparse.ArgumentParser(prog="build.py", description="Build the notebooks, or check them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(sources)}")
    parser.add_argument(
        "--check", action="store_true", help="execute nothing; list those that differ from their source"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=FOLDER, help="where notebooks are (default: next to the sources)"
    )
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(sources)
    if unknown:
        parser.error(f"there is no {min(unknown)}; choose from {', '.join(sources)}")

    differ = False
    for name in options.names or sources:
        if not options.check:
            print(build(sources[name], options.output_dir), flush=True)
            continue
        difference = find_difference(sources[name], options.output_dir / f"{name}.ipynb")
        if difference:
            differ = True
            print(f"{name}.ipynb {difference}")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
