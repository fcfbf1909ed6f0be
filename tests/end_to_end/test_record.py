"""recipes/multi30k_tiny.sh in small: teachers, students, the control, and the tables of docs/results.md."""

import json
import os
import re
import shlex
import statistics
import subprocess
from pathlib import Path

import forked_python
import pytest
import yaml
from helpers import ROOT, table_rows

SMALL = "--max_steps 2 --eval_steps 1 --warmup_steps 1 --d_model 16 --encoder_layers 1 --decoder_layers 1"
SMALL += " --vocab_size 400 --max_target_length 60 --per_device_train_max_tokens 512 --num_examples 0"
PAIRS = 100  # to train on


# What the script calls, without the time for imports, and `accelerate launch` without a further process; runs of two
# steps take half of theirs for the picture of their losses.
LAUNCH = """import os, runpy, sys
assert sys.argv[1:3] == ["launch", "--mixed_precision"]
os.environ["ACCELERATE_MIXED_PRECISION"] = sys.argv[3]
del sys.argv[:4]
from vanilla_transformer.training import run_folder
run_folder.plot_training_curves = lambda *_: None
runpy.run_path(sys.argv[0], run_name="__main__")"""
PROGRAMS = {"accelerate": f"-c {shlex.quote(LAUNCH)}", "vanilla-transformer": "-m vanilla_transformer", "python": ""}
STAND_IN = """#!/bin/bash
while [ $# -gt 1 ]; do
    case $1 in --output_dir) file=$2/all_results.json;; --output) file=$2/results.json;; esac
    shift
done
echo "$0"
[ -z "$file" ] || { mkdir -p "$(dirname "$file")" && touch "$file"; }
"""


def test_a_second_call_repeats_only_the_tables(tmp_path):
    """With stand-ins for the programs that the script calls, which print their names and write their results."""
    for name in ("accelerate", "vanilla-transformer", "python"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "recipes/multi30k_tiny.sh", "sample_dataset", str(tmp_path / "the models")]
    run = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": True}
    translations = tmp_path / "the models" / "translations.txt"

    def call() -> list[str]:
        return [Path(name).name for name in subprocess.run(command, **run).stdout.splitlines()]

    assert call() == ["accelerate"] * 9 + ["vanilla-transformer", "python"]
    translations.write_text("made once")
    assert call() == ["python"] and translations.read_text() == "made once"


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> tuple[Path, str]:
    """The folder of the models, and the tables of a second call after the results of one model were lost."""
    folder = tmp_path_factory.mktemp("record")
    data = folder / "data"
    data.mkdir()
    for split, count in {"train": PAIRS, "validation": 5, "test": 5}.items():
        lines = (ROOT / "sample_dataset" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (data / f"{split}.jsonl").write_text("".join(lines[:count]), encoding="utf-8")
    command = ["bash", "recipes/multi30k_tiny.sh", str(data), str(folder), *SMALL.split()]
    (folder / "bin").mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    run = {"cwd": ROOT, "capture_output": True, "text": True}
    with forked_python.programs(folder / "bin", environment, **PROGRAMS) as path:
        run["env"] = environment | {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
        first = subprocess.run(command, **run)
        assert first.returncode == 0, first.stderr
        for file in (
            "student-3/all_results.json",
            "evaluation-of-1-2-3/results.json",
            "evaluation-of-1-2-3/results.md",
            "evaluation-of-1-2-3/runs.json",
        ):
            (folder / file).unlink()
        again = subprocess.run(command, **run)
        assert again.returncode == 0, again.stderr
    assert re.findall(r"resuming from (.*)", again.stdout) == [f"{folder}/student-3/checkpoint-2"]
    return folder, again.stdout[again.stdout.rindex("| system ") :]


@pytest.mark.slow
def test_students_learn_from_all_teachers_with_their_tokenizer_and_without_the_test_split(record):
    folder, _ = record
    recipe = yaml.safe_load((folder / "student-2" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["teacher"] == [f"{folder}/teacher-{seed}" for seed in (1, 2, 3)]
    assert recipe["model_name_or_path"] == f"{folder}/teacher-2"
    assert len((folder / "translations.txt").read_text(encoding="utf-8").splitlines()) == PAIRS
    assert f"{folder}/translations.txt" in recipe["train_file"]
    tokenizers = {(folder / name / "tokenizer.json").read_text() for name in ("teacher-1", "student-1", "student-2")}
    assert len(tokenizers) == 1
    assert "test_bleu" not in json.loads((folder / "student-2" / "all_results.json").read_text())


@pytest.mark.slow
def test_control_begins_as_its_student_and_has_no_teachers(record):
    folder, _ = record
    control, student = (
        yaml.safe_load((folder / name / "recipe.yaml").read_text()) for name in ("control-2", "student-2")
    )
    assert control["teacher"] is None and control["train_file"] == [f"{folder}/data/train.jsonl"]
    different = {name for name in control if control[name] != student[name]}
    assert different == {"output_dir", "train_file", "teacher", "distillation_weight", "dropout"}
    teacher = yaml.safe_load((folder / "teacher-2" / "recipe.yaml").read_text())
    assert control["dropout"] == teacher["dropout"] != student["dropout"]


@pytest.mark.slow
def test_tables_have_mean_and_deviation_of_the_seeds(record):
    folder, tables = record
    systems = json.loads((folder / "evaluation-of-1-2-3" / "results.json").read_text())["systems"]

    def expected_of(metric: str) -> str:
        scores = [systems[f"{folder}/student-{seed}"][metric]["score"] for seed in (1, 2, 3)]
        return f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f}"

    (_, *by_system), (_, *by_seed), (_, *by_pair) = map(table_rows, tables.split("\n\n")[:3])
    cells = {first: others for first, *others in by_system}
    assert cells["student"][:3] == ["3", expected_of("BLEU"), expected_of("chrF2")]
    assert cells["student, ensemble of 3"][0] == "1"
    names = [f"{system}-{seed}" for system in ("teacher", "student", "control") for seed in (1, 2, 3)]
    assert [first for first, *_ in by_seed] == [*names, "teacher, ensemble of 3", "student, ensemble of 3"]
    compared = [("student", "teacher"), ("control", "teacher"), ("control", "student")]
    assert [(of, over, seeds) for of, over, seeds, *_ in by_pair] == [(*pair, "1, 2, 3") for pair in compared]


@pytest.mark.slow
def test_evaluations_of_each_run_are_kept_and_drawn(record):
    folder, _ = record
    runs = json.loads((folder / "evaluation-of-1-2-3" / "runs.json").read_text())
    assert [[step for step, _ in run["evaluations"]] for run in runs.values()] == [[1]] * 9
    assert (folder / "evaluation-of-1-2-3" / "training.png").stat().st_size > 0
