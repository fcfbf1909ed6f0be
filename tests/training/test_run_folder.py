"""The directory of a run: one run at a time, nothing overwritten, old checkpoints deleted."""

import errno
import fcntl
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock
from helpers import assert_close, put_checkpoints, state_with_bleu, training_options
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.errors import UserError
from vanilla_transformer.training import run_folder
from vanilla_transformer.training.checkpoint import OPTIMIZER, STATE, list_checkpoints, step_of
from vanilla_transformer.training.recipe import RECIPE_HEADER
from vanilla_transformer.training.run_folder import LOCK, offering_resume, prepare_output_dir, prune_checkpoints
from vanilla_transformer.training.state import TrainerState, Triggers


@pytest.mark.parametrize(
    "argv, left",
    [
        (["--save_total_limit=1"], [20, 60]),
        (["--save_total_limit=2"], [20, 50, 60]),
        (["--save_total_limit=9"], [10, 20, 30, 40, 50, 60]),
        (["--save_total_limit=1", "--average_checkpoints=3"], [20, 40, 50, 60]),
        (["--save_total_limit=1", "--average_checkpoints=2", "--average_checkpoints_by=score"], [10, 20, 60]),
    ],
)
def test_pruning_keeps_newest_best_and_averaged(argv, left, tmp_path):
    """Step 5 was saved because of a signal, and is not kept; step 7 by transformers' Trainer."""
    put_checkpoints(tmp_path, 5, 7, 10, 20, 30, 40, 50, 60, "best", "60.tmp")
    (tmp_path / "checkpoint-7" / OPTIMIZER).rename(tmp_path / "checkpoint-7" / STATE)
    options = training_options("--eval_steps=10", f"--output_dir={tmp_path}", *argv)
    state = state_with_bleu({10: 4.0, 20: 5.0, 30: 3.0, 40: 2.0})
    prune_checkpoints(state, Triggers(options, 100))
    assert [step_of(one) for one in list_checkpoints(tmp_path)] == sorted([7, *left])


@pytest.mark.parametrize(
    "argv, left",
    [([], [5, 7]), (["--save_total_limit=1"], [7]), (["--eval_steps=4"], [4, 7]), (["--save_steps=2"], [2, 4, 7])],
)
def test_pruning_keeps_what_was_saved_because_of_the_time_until_a_checkpoint_was_due(argv, left, tmp_path):
    put_checkpoints(tmp_path, 2, 3, 4, 5, 7)
    triggers = Triggers(training_options(f"--output_dir={tmp_path}", *argv), 100)
    prune_checkpoints(TrainerState(), triggers)
    assert [step_of(one) for one in list_checkpoints(tmp_path)] == left


def prepare(output_dir: Path, checkpoint: Path | None = None) -> FileLock:
    lock = FileLock(output_dir / LOCK, timeout=0.1, fallback_to_soft=False)
    prepare_output_dir(lock, checkpoint, f"{RECIPE_HEADER}seed: 1\n")
    return lock


@pytest.mark.parametrize("is_there", [True, False])
def test_one_run_at_a_time(is_there, tmp_path):
    folder = tmp_path / ("" if is_there else "a/b")
    lock = prepare(folder)
    assert (folder / "recipe.yaml").read_text() == f"{RECIPE_HEADER}seed: 1\n"
    with pytest.raises(UserError, match=f"^Another run is writing to --output_dir {folder}; choose another"):
        prepare(folder)
    lock.release()
    prepare(folder)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_used_with_a_warning(number, tmp_path, monkeypatch, capsys):
    """As NFS and Lustre may be mounted. A run that is killed there before its first checkpoint starts again."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    for _ in range(2):
        assert not prepare(tmp_path / "model").is_locked
        said = capsys.readouterr().out
        assert said.startswith(f"warning: the file system of --output_dir {tmp_path}/model cannot lock files ([Errno")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [".lock", "recipe.yaml"]


@pytest.mark.parametrize("steps, remedy", [([], None), ([4], "; resume with --resume_from_checkpoint")])
def test_an_error_of_a_file_offers_to_resume_if_there_is_a_checkpoint(steps, remedy, tmp_path):
    put_checkpoints(tmp_path, *steps)
    with pytest.raises(OSError) as full, offering_resume(tmp_path):
        raise OSError("No space left on device")
    assert getattr(full.value, "remedy", None) == remedy


@pytest.mark.parametrize(
    "resume_from, written, message",
    [
        (None, ["checkpoint-8", "config.json"], "already holds a model; resume with"),
        (None, ["notes"], "is not empty"),
        ("checkpoint-4", ["checkpoint-4", "checkpoint-8"], "-4 is older than .*/checkpoint-8; resume from that"),
        ("checkpoint-4", ["checkpoint-8", "checkpoint-9"], "already holds a model; resume with"),
    ],
)
def test_what_was_written_during_the_preparation_is_not_overwritten(resume_from, written, message, tmp_path):
    checkpoint = resume_from and tmp_path / resume_from
    for name in written:
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, checkpoint)
    assert not (tmp_path / "recipe.yaml").exists()


def test_run_that_waited_for_the_lock_checks_again(tmp_path):
    lock = FileLock(tmp_path / LOCK)
    lock.acquire = (tmp_path / "config.json").touch  # of the run that was waited for
    with pytest.raises(UserError, match="already holds a model"):
        prepare_output_dir(lock, None, "")


def test_a_finished_run_leaves_its_model_results_and_pictures(
    make_model, text_tokenizer, tmp_path, monkeypatch, capsys
):
    """The attention is that of the shortest example; a picture of an earlier end of the run goes."""
    drawn, written, model = [], [], make_model()
    monkeypatch.setattr(run_folder, "attention_maps", lambda model, tokenizer, *texts: texts)
    monkeypatch.setattr(run_folder, "draw_attention", lambda maps, path: drawn.append((*maps, path.name)))
    monkeypatch.setattr(run_folder, "write_model_card", written.append)
    (tmp_path / "attention.png").touch()
    examples = [{"source": "a long one", "translation": "lang"}, {"source": "é", "translation": "kurz"}]
    run_folder.save_model(tmp_path, model, text_tokenizer, {"examples": examples}, [], 0.5)
    assert drawn == [("é", "kurz", "attention.png")] and not (tmp_path / "attention.png").exists()
    assert json.loads((tmp_path / "all_results.json").read_text(encoding="utf-8")) == {"examples": examples}
    assert_close(AutoModelForSeq2SeqLM.from_pretrained(tmp_path).state_dict(), model.state_dict(), 0)
    assert AutoTokenizer.from_pretrained(tmp_path)("a dog") == text_tokenizer("a dog")
    assert (tmp_path / "training_curves.png").exists() and written == [tmp_path]
    assert f"The model is in {tmp_path}." in capsys.readouterr().out
