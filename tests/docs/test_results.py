"""docs/results.md against the scores and translations beside it."""

import hashlib
import json
import shutil

import pytest
from helpers import ROOT, python_output, table_rows

RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize("folder", ["multi30k_tiny", "multi30k_muon"])
def test_page_has_the_rows_that_the_script_prints(folder, tmp_path):
    shutil.copytree(RESULTS / folder, tmp_path / "evaluation")
    printed = python_output("benchmarks/quality.py", tmp_path / "evaluation", cwd=ROOT)
    by_system, by_seed = map(table_rows, printed.split("\n\n")[:2])
    on_page = table_rows((ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    assert all(row in on_page for row in by_seed)
    # The page names the systems in words.
    assert all(row[1:] in [others for _, *others in on_page] for row in by_system)


@pytest.mark.parametrize(
    "folder", ["multi30k_tiny", "multi30k_muon", "multi30k_en_de", "multi30k_en_de-2", "multi30k_rule"]
)
def test_translations_are_those_that_were_scored(folder):
    digests = json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))["sha256"]
    files = {name: digest for name, digest in digests.items() if name.startswith("hypotheses/")}
    assert files == {
        f"hypotheses/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (RESULTS / folder / "hypotheses").iterdir()
    }
