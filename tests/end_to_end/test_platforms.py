"""What machines differ in: the encoding of stdout, the umask."""

import json
import os

import pytest
from helpers import ROOT, python_output
from runs import options, train, write_pairs

from vanilla_transformer.__main__ import main

NAME, ESCAPED = "纽约", r"\u7ebd\u7ea6"


# All programs in one process: each that starts spends seconds on imports.
PROGRAMS = """
import json, runpy, sys

programs = json.loads(sys.argv[1])
for name, *options in programs:
    sys.stdout.reconfigure(errors="strict")  # as a new process begins
    sys.argv = [name, *options]
    (runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
"""


@pytest.mark.slow
def test_stdout_of_any_encoding_takes_every_letter(tmp_path):
    """It escapes those that it lacks."""
    rows, folder = [{"en": text, "de": NAME} for text in "abcdefgh"], tmp_path / NAME
    pairs = write_pairs(tmp_path / "pairs", train=rows, validation=rows[:2])
    inspect = ["vanilla_transformer", "inspect", "attention", "--output", "attention.svg"]
    programs = [
        [str(ROOT / "train.py"), *options(pairs, folder, "--max_steps 2 --eval_steps 2")],
        [str(ROOT / "push_to_hub.py"), str(folder), "--dry_run", "--repo_id", NAME],
        [*inspect, "--model", str(folder), "--text", "a", "--translation", NAME],
    ]
    env = {"PYTHONIOENCODING": "ascii"}
    printed = python_output("-c", PROGRAMS, json.dumps(programs), env=env, cwd=tmp_path)
    assert f"reference    {ESCAPED}\n" in printed and f" in one commit to {ESCAPED}:\n" in printed
    assert printed.endswith(f" files\n{ESCAPED}\n")


@pytest.fixture(params=[0o022, pytest.param(0o077, marks=pytest.mark.slow)], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_the_umask_decides_who_may_read_a_model(umask, pairs, tmp_path):
    """Weights and checkpoints of a run, and what they are converted to."""
    train(options(pairs, tmp_path / "model", "--max_steps 4 --ema_decay 0.9"))
    for form in ("vanilla", "native"):
        main(["convert", str(tmp_path / "model"), str(tmp_path / form), "--to", form])
    written = [path for path in tmp_path.glob("*/**/*") if path.name != ".lock"]
    assert sum(path.suffix == ".safetensors" for path in written) == 6
    modes = {str(path): path.stat().st_mode & 0o777 for path in written}
    assert modes == {str(path): (0o777 if path.is_dir() else 0o666) & ~umask for path in written}
