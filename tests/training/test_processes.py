"""The launch, and what the processes of a run share."""

import contextlib
import tempfile
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import assert_close, small_model, training_options

from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import processes

ARGS = training_options("--gradient_accumulation_steps=2")


@pytest.mark.parametrize(
    "environment, remedy",
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "use FSDP2"),
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_version: 2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version: 2"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "use FSDP2"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "leave it out"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params .* leave it out"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "--gradient_checkpointing"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "bf16"),
        ({"WORLD_SIZE": "2"}, "^2 processes .* do not know of each other; .* set ACCELERATE_USE_CPU=true"),
    ],
)
def test_what_the_launcher_was_told_is_done_or_refused(environment, remedy, accelerator, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=remedy):
        processes.make_accelerator(ARGS)


def test_float16_on_a_cpu_is_rejected(half):
    with pytest.raises(UserError, match="fp16 needs a GPU; .* bf16 or no"):
        processes.make_accelerator(ARGS)


def test_a_batch_as_large_as_fits_on_a_cpu_is_rejected(accelerator):
    with pytest.raises(UserError, match="^--per_device_train_max_tokens auto needs a GPU; give a number"):
        processes.make_accelerator(replace(ARGS, per_device_train_max_tokens=None))


@pytest.mark.parametrize(
    "length, workers, device, remedy",
    [
        (71, {"dataloader_num_workers": 1}, "cpu", "give --dataloader_num_workers 0"),
        (71, {"preprocessing_num_workers": 2}, "cpu", "leave out --preprocessing_num_workers"),
        (
            71,
            {"preprocessing_num_workers": 2},
            "cuda",
            "give --dataloader_num_workers 0 and leave out --preprocessing_num_workers",
        ),
        (71, {}, "cuda", "give --dataloader_num_workers 0"),
        (71, {"dataloader_num_workers": 0}, "cuda", None),
        (71, {}, "cpu", None),
        (70, {"dataloader_num_workers": 1}, "cpu", None),
    ],
)
def test_a_temporary_folder_whose_path_is_too_long_for_sockets_is_named(length, workers, device, remedy, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp".ljust(length, "x"))
    message = rf"^TMPDIR is /tmpx+, a longer path .* at most 70 characters, such as /tmp, or {remedy}\.$"
    with pytest.raises(UserError, match=message) if remedy else contextlib.nullcontext():
        processes.check_temporary_folder(DataOptions(**workers), torch.device(device))


def test_losses_are_not_divided_by_accelerate(accelerator, monkeypatch):
    """It would divide them by the number in the environment, and train.py sums them."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    loss = torch.ones((), requires_grad=True)
    processes.make_accelerator(ARGS).backward(loss)
    assert loss.grad == 1


def test_one_process_instead_of_several_is_said(accelerator, monkeypatch, capsys):
    """`accelerate launch --num_processes 2` without GPUs."""
    processes.make_accelerator(ARGS)
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setenv("MASTER_PORT", "29500")
    processes.make_accelerator(ARGS)
    assert "several processes but started one" in capsys.readouterr().out


def test_error_on_main_is_raised_everywhere(accelerator):
    with pytest.raises(ZeroDivisionError):
        processes.run_on_main(lambda: 1 // 0)
    assert processes.run_on_main(max, 2, 3) == 3


def test_what_differs_between_machines_is_named(accelerator, monkeypatch):
    monkeypatch.setattr(processes, "gather_object", lambda found: [*found, True])
    processes.check_same_everywhere("--output_dir", True)
    with pytest.raises(UserError, match="^The data is not the same on all machines; let them share a disk.$"):
        processes.check_same_everywhere("The data", "a")


@pytest.mark.parametrize("trackers", ["none", "tensorboard", "all"])
def test_trackers_that_are_installed_are_used(trackers, tmp_path):
    options = training_options(f"--report_to={trackers}", f"--output_dir={tmp_path}")
    found = [str(name) for name in processes.make_accelerator(options).log_with]
    assert ("tensorboard" in found) == (trackers != "none")


@pytest.mark.parametrize("trackers, name", [("comet_ml", "comet_ml"), ("tensorboard,clearml", "clearml")])
def test_a_tracker_that_is_not_installed_is_named(trackers, name, tmp_path):
    with pytest.raises(UserError, match=f"^--report_to {name} is not installed; install it, or choose another"):
        processes.make_accelerator(training_options(f"--report_to={trackers}", f"--output_dir={tmp_path}"))


def test_an_accelerator_that_cannot_start_is_one_sentence(monkeypatch):
    monkeypatch.setattr(processes, "Accelerator", Mock(side_effect=ValueError("no such device")))
    for remedy in ("$", "; unset LOCAL_RANK, which only a lau"):
        with pytest.raises(UserError, match=f"^Accelerate cannot start: no such device{remedy}"):
            processes.make_accelerator(ARGS)
        monkeypatch.setenv("LOCAL_RANK", "1")


def test_copied_weights_are_equal():
    source, target = small_model(), small_model()
    expected = {name: value.clone() for name, value in source.state_dict().items()}
    processes.copy_weights(source, target)
    for model in (source, target):
        assert_close(model.state_dict(), expected, 0)


def refuse(*_):
    raise UserError("no such file")


def refuse_on_all(*_):
    processes.run_on_main(refuse)


@pytest.mark.parametrize(
    "world_size, rank, fail, wait, is_told",
    [
        ("2", "0", refuse, 0, True),
        ("2", "1", refuse, 3, True),  # it has an error of its own, or the launcher would have ended it by now
        ("2", "0", refuse_on_all, 0, True),
        ("2", "1", refuse_on_all, 3, False),
        ("1", "1", refuse, 0, True),  # a variable that is left over
        (None, "1", refuse, 0, True),
    ],
)
def test_an_error_is_told_by_the_first_process_that_has_it(
    world_size, rank, fail, wait, is_told, accelerator, monkeypatch, capsys
):
    waited = []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size) if world_size else monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as ending, processes.exit_on_error():
        fail()
    assert ending.value.code == 2 and waited == [*[wait] * bool(wait), 0.1]
    assert capsys.readouterr().err == "train.py: error: no such file\n" * is_told


def test_processes_wait_for_gloo_before_they_end(monkeypatch):
    done = []
    monkeypatch.setattr(processes.time, "sleep", done.append)
    processes.end_processes(SimpleNamespace(end_training=lambda: done.append("end")))
    assert done == [0.1, "end"]
