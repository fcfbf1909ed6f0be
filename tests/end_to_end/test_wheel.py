"""The wheel has every file of the package, and works without the checkout."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT, python_output, save_untrained

from vanilla_transformer.__main__ import VERBS

PACKAGE = "vanilla_transformer"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since setuptools would also pack what an earlier build left beside the sources."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    python_output("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", output, source)
    (built,) = output.iterdir()
    return built


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel):
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert b"vanilla-transformer = vanilla_transformer.__main__:main" in archive.read(entry_points)
    assert packed == {name for name in expected if "__pycache__" not in name}


# All verbs in one process: each that starts spends seconds on imports.
RUN = """
import contextlib, json, sys
import vanilla_transformer
from vanilla_transformer.__main__ import main

print(vanilla_transformer.__file__)
for command in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit) if "--help" in command else contextlib.nullcontext():
        main(command)
"""


@pytest.mark.slow
def test_the_verbs_work_from_the_wheel(wheel, tmp_path):
    for extra in ("ctranslate2", "gradio"):
        pytest.importorskip(extra)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    save_untrained(tmp_path / "model")
    commands = [[verb, "--help"] for verb in VERBS]
    commands += [["convert", "model", form, "--to", form] for form in ("native", "ctranslate2")]
    commands += [["inspect", "shapes", "--d_model", "64"]]
    commands += [["inspect", "explorer", "--model", "model", "--text", "The cat sleeps.", "--output", "map.html"]]
    commands += [["translate", "--model", name, "--max_new_tokens", "5"] for name in ("model", "ctranslate2")]
    commands[-1] += ["--backend", "ctranslate2"]
    installed = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path / "installed")}}
    printed = python_output("-c", RUN, json.dumps(commands), input="The cat sleeps.\n", **installed)
    assert printed.startswith(str(tmp_path / "installed"))
    assert all(f"usage: vanilla-transformer {verb}" in printed for verb in VERBS)
    assert "<script" in (tmp_path / "map.html").read_text(encoding="utf-8")
    # The page of the demo is another module than its command.
    python_output("-c", "import vanilla_transformer.demo.app, vanilla_transformer.hub.model_card", **installed)
