"""The wheel has every file of the package, and works without the checkout: it trains, too."""

import json
import os
import re
import subprocess
import time
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT, python_output, save_untrained

from vanilla_transformer.__main__ import VERBS
from vanilla_transformer.commands.new import FILES

PACKAGE = "vanilla_transformer"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the source distribution, which is built from the checkout."""
    pytest.importorskip("uv")
    output = tmp_path_factory.mktemp("dist")
    python_output("-m", "uv", "build", "--quiet", "--out-dir", output, ROOT)
    (built,) = output.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_of_a_new_directory(wheel):
    package = [path for path in (ROOT / PACKAGE).rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    expected = {path.relative_to(ROOT).as_posix() for path in package}
    project = [path.relative_to(ROOT) for pattern in FILES for path in ROOT.glob(pattern)]
    expected |= {f"{PACKAGE}/project/{path.as_posix()}" for path in project}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert b"vanilla-transformer = vanilla_transformer_command:main" in archive.read(entry_points)
    assert packed == expected | {"vanilla_transformer_command.py"}


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
    for extra in ("ctranslate2", "fastapi", "gradio"):
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
    # Modules that no `--help` imports.
    modules = ("demo.app", "hub.model_card", "serving.app")
    python_output("-c", "\n".join(f"import vanilla_transformer.{name}" for name in modules), **installed)


TWO_LINES = """
uv pip install {wheel} && vanilla-transformer new mine && cd mine && accelerate launch train.py {options}
echo "The old man reads a book." | vanilla-transformer translate --model outputs/sample
"""
SHORT = "--max_steps 60 --warmup_steps 10 --max_eval_samples 10 --max_predict_samples 10"


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> dict:
    """How to run a command in an empty directory with an empty environment; uv takes what it has in its cache, in the
    versions of constraints.txt."""
    folder = tmp_path_factory.mktemp("machine")
    python_output("-m", "uv", "venv", "--quiet", folder / "environment")
    pinned = re.findall(r"(?m)^[\w.-]+==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    (folder / "uv.toml").write_text(f"constraint-dependencies = {json.dumps(pinned)}\n")
    settings = {"VIRTUAL_ENV": str(folder / "environment"), "UV_CONFIG_FILE": str(folder / "uv.toml")}
    settings |= {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), "HF_HOME": str(folder / "cache")}
    settings |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    settings["PATH"] = f"{folder / 'environment' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (folder / "work").mkdir()
    return {"cwd": folder / "work", "env": inherited | settings, "encoding": "utf-8", "check": True, "timeout": 900}


@pytest.mark.slow
def test_two_lines_lead_from_nothing_to_a_translation(wheel, machine):
    start = time.perf_counter()
    lines = TWO_LINES.format(wheel=wheel, options=SHORT)
    done = subprocess.run(["bash", "-ec", lines], stdout=subprocess.PIPE, **machine)
    print(f"from an empty environment to a translation: {time.perf_counter() - start:.0f} s, {SHORT}")
    print(done.stdout)
    assert len(done.stdout.splitlines()[-1].split()) > 3


@pytest.mark.slow
def test_uv_run_needs_no_more_than_the_new_directory(wheel, machine):
    """No environment is active: uv makes one from the metadata of the script."""
    commands = f"""
        uv tool run --from {wheel} vanilla-transformer new alone && cd alone
        uv run train.py --max_steps 2 --max_eval_samples 2 --max_predict_samples 2
        """
    machine["env"].pop("VIRTUAL_ENV")
    done = subprocess.run(["bash", "-ec", commands], stdout=subprocess.PIPE, **machine)
    assert f"vanilla-transformer @ {wheel.as_uri()}" in (machine["cwd"] / "alone" / "train.py").read_text()
    assert "The model is in outputs/sample" in done.stdout
