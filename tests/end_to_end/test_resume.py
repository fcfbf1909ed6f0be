"""A resumed run equals an uninterrupted one, bit for bit; what cannot be resumed is refused."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers import assert_close
from runs import (
    KINDS,
    QUICK,
    RESUME,
    STEP,
    assert_same_run,
    execute,
    files,
    options,
    read_pairs,
    results,
    signal_at,
    steps,
    train,
    train_fails,
    weights,
    write_pairs,
)
from safetensors.torch import load_file

from vanilla_transformer.data import stream

# --------------------------------------------------------------------------------------------------------- bit for bit


def test_resumed_run_equals_uninterrupted(finished, pairs, histories, tmp_path):
    folder, more = tmp_path / "model", "--max_steps 8 --eval_steps 4"
    assert "no checkpoint found; starting" in train(options(pairs, folder, more + " --max_steps 4" + RESUME))
    assert f"resuming from {folder}/checkpoint-4" in train(options(pairs, folder, more + RESUME))
    for step in ["checkpoint-4", "checkpoint-8"]:
        for file in ["model.safetensors", "optimizer.safetensors"]:
            assert_close(*(load_file(run / step / file) for run in (folder, finished[0])), tolerance=0)
    assert_same_run(folder, finished[0])
    assert [entry["step"] for entry in histories[-1]] == [3, 4, 4, 6, 8, 8]  # losses and scores, for the curves


# The learning rate only grows, and with it the loss, on every processor: the first of four evaluations is the best.
EVERYTHING = "--max_steps 20 --learning_rate 100 --warmup_steps 20 --gradient_accumulation_steps 2 --ema_decay 0.5"
EVERYTHING += " --dropout 0.2 --attention_dropout 0.1 --r_drop_alpha 2 --eval_steps 3 --early_stopping_patience 3"
EVERYTHING += " --metric_for_best_model loss --save_total_limit 9" + QUICK
STOPS_EARLY = 12


@pytest.fixture(params=["map-style", pytest.param("streaming", marks=pytest.mark.slow)])
def kind(request, monkeypatch) -> str:
    """Map-style or streamed data; a stream of a hundred pairs is read in several pools."""
    monkeypatch.setattr(stream, "FIRST_POOL", 4)
    monkeypatch.setattr(stream, "TABLE", 2)
    return KINDS[request.param]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """everything(pairs, kind) -> the output directory of an uninterrupted run with EVERYTHING."""
    folders = {}

    def run(pairs: Path, kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("everything") / "model"
            train(options(pairs, folders[kind], EVERYTHING + kind))
        return folders[kind]

    return run


def stop(argv: list[str], owner: str, name: str, call: int):
    """Runs train.py, which gets a SIGTERM just before that call of a function."""
    with pytest.MonkeyPatch.context() as patch:
        signal_at(owner, name, call, signal.SIGTERM)(set_attribute=patch.setattr)
        status, _, errors = execute(argv)
    said = r"train.py: stopped after step \d+, which is saved; resume with --resume_from_checkpoint\n"
    assert status == 128 + signal.SIGTERM and len(re.findall(said, errors)) == 1, errors
    assert "Traceback" not in errors


EVERY_STEP = pytest.param([2] * (STOPS_EARLY - 1), id="every step", marks=pytest.mark.slow)


@pytest.mark.parametrize("calls", [EVERY_STEP, pytest.param([4, 7], id="two steps", marks=pytest.mark.slow)])
def test_run_stopped_within_a_step_equals_uninterrupted(calls, kind, pairs, everything, tmp_path):
    """Stopped within the accumulation of steps, two of which make more than an epoch."""
    expected = everything(pairs, kind)
    argv = options(pairs, tmp_path / "model", EVERYTHING + kind + RESUME)
    for call in calls:
        stop(argv, *STEP, call)
    train(argv)
    assert results(expected)["train_steps"] == STOPS_EARLY
    assert_same_run(tmp_path / "model", expected)
    assert steps(tmp_path / "model") == steps(expected)  # none that was saved only because of the signal


@pytest.mark.slow
def test_run_stopped_around_evaluations_equals_uninterrupted(kind, pairs, everything, tmp_path):
    argv = options(pairs, tmp_path / "model", EVERYTHING + kind + RESUME)
    stop(argv, "vanilla_transformer.evaluation.splits:SplitEvaluator", "evaluate", 1)
    stop(argv, "vanilla_transformer.training.state:TrainerState", "log_scores", 1)
    train(argv)
    assert_same_run(tmp_path / "model", everything(pairs, kind))


@pytest.mark.slow
def test_run_stopped_while_the_last_checkpoint_is_saved_only_evaluates(finished, pairs, tmp_path):
    argv = options(pairs, tmp_path / "model", "--max_steps 8 --eval_steps 4" + RESUME)
    stop(argv, *STEP, 8)
    assert steps(tmp_path / "model") == [4, 8] and not (tmp_path / "model" / "config.json").exists()
    train(argv)
    assert_same_run(tmp_path / "model", finished[0])


@pytest.mark.slow
def test_distilled_run_stopped_within_a_step_equals_uninterrupted(finished, pairs, tmp_path):
    """The teachers read the pairs once for all runs."""
    more = f"--max_steps 4 --gradient_accumulation_steps 2 --dropout 0.2 --r_drop_alpha 2 --teacher {finished[0]}"
    more += f" {finished[0]}/checkpoint-4 --distillation_weight 0.7 --distillation_temperature 2" + QUICK
    argv = options(pairs, tmp_path / "model", more + RESUME)
    stop(argv, *STEP, 4)
    printed = train(argv)
    assert "Soft targets of 2 teacher(s)" not in printed and "the 8 most probable tokens have " in printed
    train(options(pairs, tmp_path / "whole", more))
    assert_same_run(tmp_path / "model", tmp_path / "whole")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (finished[0] / name).read_bytes()
    train(options(pairs, tmp_path / "other", more + " --distillation_weight 0.6"))
    assert not torch.equal(*(weights(tmp_path / name)["model.shared.weight"] for name in ("other", "whole")))


# ------------------------------------------------------------------------------------------ what must, what may change


CHANGES = "--gradient_accumulation_steps 2 --bpe_dropout 0.1" + QUICK


@pytest.fixture(scope="module")
def short_run(pairs, tmp_path_factory) -> Path:
    """A dataset `pairs` and the output `model` of two steps on it."""
    folder = tmp_path_factory.mktemp("short")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shutil.copytree(pairs, "pairs")
        train(options(Path("pairs"), Path("model"), f"--max_steps 2 {CHANGES}"))
    return folder


@pytest.fixture
def short(short_run, tmp_path, monkeypatch):
    """The current directory is a copy of that run."""
    shutil.copytree(short_run, tmp_path / "short")
    monkeypatch.chdir(tmp_path / "short")


def resume(more: str = "", steps: int = 4) -> list[str]:
    return options(Path("pairs"), Path("model"), f"--max_steps {steps} {CHANGES} {more}" + RESUME)


@pytest.mark.parametrize(
    "more, said",
    [
        ("--gradient_accumulation_steps 1", "--gradient_accumulation_steps) were 2, now 1"),
        ("", "the training pairs (files, columns, what is held out, limits or tokenizer)"),
    ],
    ids=["accumulation", "pairs"],
)
def test_resume_rejects_changed(more, said, short):
    if not more:
        *others, last = read_pairs(Path("pairs"), "train")
        write_pairs(Path("pairs"), train=[*others, last | {"de": "Hunde"}])
    before = files(Path("model"))
    message = train_fails(resume(more))
    assert said in message and "model/checkpoint-2" in message, message
    assert {**files(Path("model")), "recipe.yaml": before["recipe.yaml"]} == before


def test_resume_prints_what_changed(short):
    printed = train(resume("--learning_rate 0.01 --dropout 0.3 --num_beams 2", steps=3))
    assert set(re.findall("changed since model/checkpoint-2: --(.*)", printed)) == {
        "learning_rate was 0.02, now 0.01",
        "max_steps was 2, now 3",
        "num_beams was 1, now 2",
        "dropout was 0.1, now 0.3",
    }
    assert json.loads(Path("model/config.json").read_text())["dropout"] == 0.3
    assert "changed since" not in train(resume("--learning_rate 0.01 --dropout 0.3 --num_beams 2", steps=3))


def test_scores_of_other_validation_pairs_are_not_compared(short):
    """The best of the resumed run is among the evaluations of the same pairs."""
    path = Path("model/checkpoint-2/trainer_state.json")
    perfect = {"step": 2, "eval_loss": 0.0, "eval_bleu": 100.0, "eval_chrf": 100.0}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"history": [perfect]}))
    printed = train(resume("--max_eval_samples 3 --eval_steps 2 --early_stopping_patience 9", steps=6))
    assert "changed since model/checkpoint-2: the validation pairs" in printed
    assert re.search(r"using the weights of checkpoint-[46]\n", printed) and results(Path("model"))["eval_loss"] > 0
