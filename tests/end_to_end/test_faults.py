"""Runs that are killed, stopped, out of disk, without one of their processes, or that diverge."""

import contextlib
import fcntl
import os
import pty
import random
import re
import resource
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from runs import (
    HOW,
    QUICK,
    RESUME,
    ROOT,
    STEP,
    assert_same_run,
    fault_at,
    files,
    one_sentence,
    options,
    signal_at,
    state,
    steps,
    train,
    train_fails,
    write_pairs,
)

from vanilla_transformer.errors import UserError
from vanilla_transformer.training import optimization as optim
from vanilla_transformer.training import state as state_code
from vanilla_transformer.training.checkpoint import list_checkpoints, load_state
from vanilla_transformer.training.signals import REPEAT_AFTER

EVALUATION = ("vanilla_transformer.evaluation.splits", "gather_object")
EIGHT = "--max_steps 8" + RESUME + QUICK


# -------------------------------------------------------------------------------------------------------------- killed

LONG = "--max_steps 120 --gradient_accumulation_steps 2 --dropout 0.2 --ema_decay 0.5 --r_drop_alpha 2"
LONG += " --save_steps 4 --eval_steps 12 --logging_steps 3 --average_checkpoints 2" + QUICK

CHECKPOINT = "vanilla_transformer.training.checkpoint"
KILLS = {  # a function, and the calls of which one is the last
    "within the accumulation of a step": (*STEP, 12),
    "in an evaluation": (*EVALUATION, 2),
    "in a translation": ("vanilla_transformer.translation_vanilla_transformer:BaseTranslator", "__call__", 1),
    "while a checkpoint is written": (CHECKPOINT, "save_file", 4),
    "while a checkpoint is read": (CHECKPOINT, "load_file", 3),
    "before the state is written": ("pathlib:Path", "write_bytes", 9),
    "around a renaming": ("pathlib:Path", "rename", 3),
    "while an old checkpoint is deleted": ("os", "unlink", 30),
}
KILLS_AT_THE_END = {
    "in the last evaluation": ("vanilla_transformer.training.final_weights", "average_checkpoints", 1),
    "after the model is written": ("vanilla_transformer.training.run_folder", "plot_training_curves", 1),
}


@pytest.mark.slow
def test_run_killed_many_times_equals_uninterrupted(pairs, fork, tmp_path):
    """By the same command each time; no checkpoint is ever there that is incomplete."""
    argv = options(pairs, tmp_path / "killed", LONG + RESUME)
    generator, reached = random.Random("map-style"), []
    kills = [(owner, name, generator.randint(1, calls)) for owner, name, calls in KILLS.values()]
    generator.shuffle(kills)
    # An earlier fault would keep the run from its end, which the last two wait for.
    for where in [*kills, *KILLS_AT_THE_END.values()]:
        killed = fork(argv, signal_at(*where))
        assert killed.wait(300) == -signal.SIGKILL, (where, killed.printed())
        for checkpoint in list_checkpoints(tmp_path / "killed"):
            assert load_state(checkpoint), where  # which is written last
        reached.append(max(steps(tmp_path / "killed"), default=0))
    assert reached == sorted(reached) and reached[-3] < reached[-1] == 120, reached
    train(argv)
    train(options(pairs, tmp_path / "whole", LONG))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert files(tmp_path / "killed").keys() == files(tmp_path / "whole").keys()


# ------------------------------------------------------------------------------------------------------------- stopped

TWELVE = "--max_steps 12 --dropout 0.2 --ema_decay 0.5 --adam_epsilon 1e-4 --eval_steps 6"
STOPPED = f"{TWELVE} --max_steps 60 --eval_steps 20 --save_steps 7 --dataloader_num_workers 1"
STOPPED += " --activation_function gelu"
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2"
ACCELERATE = "-m accelerate.commands.launch --num_machines 1 --mixed_precision no --dynamo_backend no"
TWO = f"{ACCELERATE} --multi_gpu --num_processes 2"
ALONE = f"{ACCELERATE} --cpu --num_processes 1"
EVALUATING = "20/60: loss "  # is logged before the first evaluation
STOPS = {  # launcher, the number of its processes, who gets which signal when
    "SIGTERM to torchrun": (TORCHRUN, 2, "itself", signal.SIGTERM, EVALUATING),
    "Ctrl-C under accelerate": (TWO, 2, "all", signal.SIGINT, "loss "),
    # Which leaves it to its end, as `docker stop` or a job scheduler sends it to one process.
    "SIGTERM to accelerate with one process": (ALONE, 1, "itself", signal.SIGTERM, "loss "),
}


@contextlib.contextmanager
def launched(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """A Python process with a process group for itself, as a shell starts it, which is killed in the end."""
    # On one core train.py uses one thread, as the runs here do; more would round differently.
    core = {max(os.sched_getaffinity(0))}
    group = {"start_new_session": True, "preexec_fn": lambda: os.sched_setaffinity(0, core)}
    with open(log, "wb") as file:
        run = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=file, stderr=file, **group)
    try:
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory) -> Path:
    """The output directory of the run that none of these stops."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    train(options(pairs, folder, STOPPED + " --gradient_accumulation_steps 2"))
    return folder


def await_text(text: str, printed: Callable[[], str], is_running: Callable[[], bool]):
    end = time.monotonic() + 240
    while text not in printed():
        assert is_running() and time.monotonic() < end, printed()
        time.sleep(0.005)


def assert_stopped(folder: Path, printed: str):
    said = re.findall(r"^train.py: stopped after step (\d+), which is saved; resume", printed, re.MULTILINE)
    assert len(said) == 1 and 'train.py", line' not in printed, printed
    assert steps(folder)[-1] == int(said[0]) < 60


def assert_stopped_and_resumes(pairs: Path, folder: Path, printed: str, whole: Path, tolerance: float):
    assert_stopped(folder, printed)
    train(options(pairs, folder, STOPPED + " --gradient_accumulation_steps 2" + RESUME))
    assert_same_run(folder, whole, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("launcher, count, whom, number, when", STOPS.values(), ids=STOPS)
def test_signal_to_launched_processes_saves_a_checkpoint(launcher, count, whom, number, when, pairs, whole, tmp_path):
    argv = options(pairs, tmp_path / "model", f"{STOPPED} --gradient_accumulation_steps {2 // count}")
    printed = partial((tmp_path / "log").read_text, encoding="utf-8", errors="replace")
    with launched([*launcher.split(), "train.py", *argv], tmp_path / "log") as run:
        await_text(when, printed, lambda: run.poll() is None)
        processes = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, number) if whom == "all" else run.send_signal(number)
        status = run.wait(120)
        assert status == -signal.SIGTERM if count == 1 else status != 0, printed()
        assert not psutil.wait_procs(processes, timeout=60)[1], printed()
    assert_stopped_and_resumes(pairs, tmp_path / "model", printed(), whole, tolerance=0 if count == 1 else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, when", [(signal.SIGTERM, "loss "), (signal.SIGINT, EVALUATING), (signal.SIGUSR2, EVALUATING)]
)
def test_signal_to_all_saves_a_checkpoint_and_ends_the_run(number, when, pairs, fork, whole, tmp_path):
    """To a process and those that read its data, in a step and in an evaluation."""
    argv = options(pairs, tmp_path / "model", STOPPED + " --gradient_accumulation_steps 2")
    run = fork(argv, os.setsid)
    await_text(when, run.printed, run.process.is_alive)
    processes = psutil.Process(run.process.pid).children(recursive=True)
    os.killpg(run.process.pid, number)
    assert run.wait() == 128 + number, run.printed()
    assert not psutil.wait_procs(processes, timeout=60)[1], run.printed()
    assert_stopped(tmp_path / "model", run.printed())
    if when == EVALUATING:
        assert_stopped_and_resumes(pairs, tmp_path / "model", run.printed(), whole, tolerance=0)


@pytest.mark.slow
def test_signal_to_one_of_two_processes_ends_both(pairs, fork_two, whole, tmp_path):
    two = fork_two(options(pairs, tmp_path / "model", STOPPED), signal_at(*STEP, 16, signal.SIGTERM), (1,))
    assert [run.wait() for run in two] == [143, 143], two[0].printed() + two[1].printed()
    printed = two[0].printed() + two[1].printed()
    assert_stopped_and_resumes(pairs, tmp_path / "model", printed, whole, tolerance=1e-5)


@pytest.mark.slow
def test_run_whose_terminal_closes_saves_a_checkpoint(pairs, tmp_path):
    """Although it can print no more."""
    argv = options(pairs, tmp_path / "model", "--max_steps 100000 --save_steps 90000")
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # for the progress bar
    control = {"start_new_session": True, "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)}
    command = [sys.executable, "train.py", *argv]
    run = subprocess.Popen(command, cwd=ROOT, stdin=end, stdout=end, stderr=end, **control)
    os.close(end)
    printed = b""
    while b"loss " not in printed:
        printed += os.read(terminal, 1000)
    os.close(terminal)
    assert run.wait(60) == 128 + signal.SIGHUP
    assert len(steps(tmp_path / "model")) == 1


@pytest.mark.slow
def test_run_that_waits_for_a_batch_ends_at_the_second_signal(pairs, tmp_path):
    """Its worker hangs. At the first signal, the run goes on waiting for the batch of its step."""
    argv = options(pairs, tmp_path / "model", "--max_steps 100000 --save_steps 4 --dataloader_num_workers 1")
    printed = partial((tmp_path / "log").read_text, encoding="utf-8", errors="replace")
    with launched(["train.py", *argv], tmp_path / "log") as run:
        await_text("9/100,000: loss ", printed, lambda: run.poll() is None)
        for worker in psutil.Process(run.pid).children():
            worker.suspend()
        time.sleep(1)  # for the batches that were read ahead
        run.terminate()
        time.sleep(REPEAT_AFTER + 0.5)
        assert run.poll() is None and steps(tmp_path / "model")
        run.terminate()
        assert run.wait(5) == 128 + signal.SIGTERM
    assert "train.py: stopped; resume from the newest checkpoint" in printed() and "Traceback" not in printed()


def test_run_in_a_thread_goes_on_without_signals(pairs, tmp_path):
    """As a page of Gradio or Streamlit starts it."""
    with ThreadPoolExecutor() as threads:
        threads.submit(train, options(pairs, tmp_path / "model", "--max_steps 2" + QUICK)).result()
    assert steps(tmp_path / "model") == [2]


def save_at_each_log_entry():
    state_code.SAVE_AFTER = 0
    signal_at(*STEP, 8)()


def one_or_two(argv: list[str], processes: int, fork, fork_two, fault=None) -> list:
    return [fork(argv, fault)] if processes == 1 else fork_two(argv, fault, (0,))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_run_killed_after_a_checkpoint_saved_by_time_equals_uninterrupted(processes, pairs, fork, fork_two, tmp_path):
    """The first process decides for all when to save."""
    argv = options(pairs, tmp_path / "killed", TWELVE + " --eval_steps 12")
    at = argv.index("--save_steps")
    argv = argv[:at] + argv[at + 2 :]
    killed = one_or_two(argv, processes, fork, fork_two, save_at_each_log_entry)
    assert killed[0].wait() == -signal.SIGKILL and steps(tmp_path / "killed") == [3, 6]
    resumed = one_or_two([*argv, "--resume_from_checkpoint"], processes, fork, fork_two)
    whole = one_or_two([*argv, "--output_dir", str(tmp_path / "whole")], processes, fork, fork_two)
    assert {run.wait() for run in resumed + whole} == {0}, resumed[0].printed()
    assert "steps 6 to 12" in resumed[0].printed() and steps(tmp_path / "whole") == [12]
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


# ------------------------------------------------------------------------------------------------------ a process lost


LOSSES = {  # a function, the call before which the process is killed, its rank, how the model is distributed
    "first process in a step": (*STEP, 10, 0, {}),
    "second process in tokenizing": ("vanilla_transformer.data.encoding", "tokenize_pairs", 2, 1, {}),
    "second process in an evaluation, sharded": (*EVALUATION, 2, 1, HOW["sharded"]),
}


@pytest.fixture(scope="module")
def twelve_steps(pairs, tmp_path_factory) -> Path:
    """The output directory of one process that nothing stops."""
    folder = tmp_path_factory.mktemp("twelve") / "model"
    train(options(pairs, folder, TWELVE + " --gradient_accumulation_steps 2"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_run_that_lost_a_process_ends_and_resumes(name, pairs, fork_two, twelve_steps, tmp_path):
    *where, rank, distribution = LOSSES[name]
    argv = options(pairs, tmp_path / "model", TWELVE + RESUME)
    two = fork_two(argv, signal_at(*where), (rank,), **distribution)
    assert two[rank].wait() == -signal.SIGKILL and two[1 - rank].wait() > 0, two[1 - rank].printed()
    two = fork_two(argv, **distribution)
    assert [run.wait() for run in two] == [0, 0], two[0].printed() + two[1].printed()
    assert_same_run(tmp_path / "model", twelve_steps, tolerance=1e-5)


@pytest.mark.slow
def test_process_that_cannot_save_ends_both(pairs, fork_two, tmp_path):
    two = fork_two(options(pairs, tmp_path / "model", TWELVE), partial(limit_files, 30_000))
    assert [run.wait() for run in two] == [2, 2], two[0].printed() + two[1].printed()
    assert "checkpoint-4 could not be written" in one_sentence(two[0].printed())
    assert "train.py:" not in two[1].printed() and "Traceback" not in two[1].printed()
    assert not list((tmp_path / "model").glob("checkpoint-*"))


def refuse():
    raise UserError("no tuning today.")


@pytest.mark.slow
def test_process_that_cannot_tune_ends_both(pairs, fork_two, tmp_path):
    argv = options(pairs, tmp_path / "model", "--max_steps 1 --tune_decoding")
    two = fork_two(argv, partial(fault_at, "vanilla_transformer.evaluation.splits", "tune", 1, refuse))
    assert [process.wait() for process in two] == [2, 2]
    assert "train.py: error: no tuning today." in two[0].printed()


# ----------------------------------------------------------------------------------------------------------- full disk


def limit_files(size: int):
    """A fault: no file can grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.slow
def test_model_that_cannot_be_written_is_written_when_resumed(pairs, fork, tmp_path):
    argv = options(pairs, tmp_path / "model", EIGHT)
    place = ("vanilla_transformer.training.run_folder", "save_model")
    full = fork(argv, partial(fault_at, *place, 1, limit_files, 10_000))
    assert full.wait() == 2 and "--resume_from_checkpoint" in one_sentence(full.printed())
    train(argv)
    train([*argv, "--output_dir", str(tmp_path / "whole")])
    assert_same_run(tmp_path / "model", tmp_path / "whole")


# ---------------------------------------------------------------------------------------------------------- divergence


def poison(numbers: set[int], set_attribute=setattr):
    """A fault: the loss of the batches with these numbers is NaN."""
    seed_batch, compute_loss, current = optim.seed_batch, optim.compute_loss, [None]

    def remember(seed: int, number: int):
        current[0] = number
        seed_batch(seed, number)

    def lose(*arguments):
        return compute_loss(*arguments) * (float("nan") if current[0] in numbers else 1)

    set_attribute(optim, "seed_batch", remember)
    set_attribute(optim, "compute_loss", lose)


def test_nan_stops_the_run(pairs, monkeypatch, tmp_path):
    """Also where spikes are ignored; the message says where, and earlier checkpoints are intact."""
    poison({11}, monkeypatch.setattr)
    more = "--max_steps 8 --dropout 0.2 --ema_decay 0.5 --gradient_accumulation_steps 2 --on_divergence ignore"
    message = train_fails(options(pairs, tmp_path / "model", more + QUICK))
    assert "diverged at step 6 (learning rate 1.63e-02, batches up to number 11): the loss is nan" in message
    assert "Lower --learning_rate" in message and "--on_divergence" not in message
    assert re.search(r"The longest of the \d+ pair\(s\) of step 6 is '.+', '.+'\. Checkpoints from before", message)
    assert steps(tmp_path / "model") == [4]


SPIKE = "--max_steps 160 --per_device_train_max_tokens 40 --learning_rate 0.01 --save_steps 50 --max_eval_samples 1"


def easy_pairs(folder: Path, **odd: str) -> Path:
    rows = [{"en": " ".join(["dog"] * (i % 3 + 1)), "de": " ".join(["Hund"] * (i % 3 + 1))} for i in range(600)]
    return write_pairs(folder, train=[*rows, odd] if odd else rows, validation=rows[:2])


@pytest.mark.slow
def test_one_odd_pair_does_not_stop_the_run(histories, tmp_path):
    """On easy pairs and one that has nothing in common with them."""
    pairs = easy_pairs(tmp_path / "pairs", en="dog " * 8, de="Ωжλ漢字ツ" * 3)
    train(options(pairs, tmp_path / "model", SPIKE + " --logging_steps 1"))
    losses = [entry["loss"] for entry in histories[0] if "loss" in entry]
    assert max(losses[100:]) > statistics.median(losses[100:]) + 3


@pytest.mark.slow
def test_lasting_spike_stops_the_run_unless_it_is_ignored(tmp_path):
    argv = options(easy_pairs(tmp_path / "pairs"), tmp_path / "model", SPIKE)
    train([*argv, "--max_steps", "100"])
    argv += ["--learning_rate", "10", "--resume_from_checkpoint"]
    message = train_fails(argv)
    found = re.search(r"at step (\d+) .*the loss jumped at step (\d+) and is (\S+) now, after (\S+) on aver", message)
    step, first, loss, usual = map(float, found.groups())
    assert 100 < first <= step - 9 and step < 140 and loss > usual + 2
    assert "--on_divergence ignore" in message and f"of step {first:.0f} is 'dog dog dog', 'Hund Hund Hund'" in message
    train([*argv, "--on_divergence", "ignore"])
    assert state(tmp_path / "model")["step"] == 160
