"""docs/api: every public name is there with an example, and the examples print what the pages show."""

import ast
import doctest
import os
import re
import shutil
from pathlib import Path

import pytest
from helpers import ROOT, save_untrained

import vanilla_transformer
from vanilla_transformer import conversion

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
SAMPLE_MODEL = os.environ.get("SAMPLE_MODEL")  # a trained one; without it, an untrained one that translates nothing


def documented() -> dict[str, str]:
    """The full name of each entry of the pages, and what follows it up to the next one."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    _, *parts = re.split(r"(?m)^::: (\S+)$", text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def imported(path: Path) -> set[str]:
    """The full names that a notebook's source imports from the package."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if (node.module or "").startswith("vanilla_transformer")]
    return {f"{node.module}.{alias.name}" for node in ours for alias in node.names}


def test_every_public_name_has_an_entry_with_an_example():
    public = {f"vanilla_transformer.{name}" for name in vanilla_transformer.__all__}
    exported = (name for name, value in vars(conversion).items() if callable(value))
    public |= {f"vanilla_transformer.conversion.{name}" for name in exported}
    for source in (ROOT / "docs" / "walkthrough").glob("[0-9]*.py"):
        public |= imported(source)
    entries = documented()
    # A name may be imported from another module than the one that defines it.
    names = {entry.rpartition(".")[2] for entry in entries}
    assert {name for name in public if name.rpartition(".")[2] not in names} == set()
    for entry, text in entries.items():
        assert re.search(rf"(?ms)^```pycon\n.*\b{entry.rpartition('.')[2]}\b.*^```$", text), entry


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem == "conversion" else []) for p in PAGES]
)
def test_examples_print_what_the_page_shows(page, tmp_path, monkeypatch):
    text = page.read_text(encoding="utf-8")
    needs_model, checker = "outputs/sample" in text, doctest.OutputChecker()
    if page.stem == "conversion":
        for name in ("ctranslate2", "onnxruntime", "onnxscript"):
            pytest.importorskip(name)
    if needs_model and SAMPLE_MODEL:
        shutil.copytree(SAMPLE_MODEL, tmp_path / "outputs" / "sample", ignore=shutil.ignore_patterns("checkpoint-*"))
    elif needs_model:
        save_untrained(tmp_path / "outputs" / "sample")
        checker.check_output = lambda *_: True
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"(?ms)^```pycon\n(.*?)^```$", text))
    test = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), 0)
    report = []
    failed, tried = doctest.DocTestRunner(checker).run(test, out=report.append)
    assert tried >= 5 and not failed, "".join(report)
