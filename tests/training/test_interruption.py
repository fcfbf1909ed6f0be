"""Being asked to stop, by real signals to real processes. Run: pytest tests/test_interruption.py"""

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers import text_dataset

from vanilla_transformer.data.batches import training_batches
from vanilla_transformer.data.pairs import tokenize_pairs
from vanilla_transformer.training import signals as interruption
from vanilla_transformer.training.arguments import parse_options
from vanilla_transformer.training.signals import Interrupted, StopSignal, resume_command

ALONE = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
ONE_OF_TWO = SimpleNamespace(num_processes=2, device=torch.device("cpu"), reduce=lambda asked: asked)


class Process:
    """A forked process in a group of its own that does `work` and exits with what that returns; 130 for Ctrl-C."""

    def __init__(self, work: Callable[[], int | None]):
        self.output, theirs = os.pipe()
        self.said = ""
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                os.dup2(theirs, 2)
                sys.stdout = sys.stderr = os.fdopen(theirs, "w", buffering=1)
                status = work() or 0
            except KeyboardInterrupt:
                status = 130
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(theirs)

    def wait_for(self, text: str, seconds: float = 30):
        """Until the process says so."""
        end = time.monotonic() + seconds
        while text not in self.said:
            assert select.select([self.output], [], [], max(0, end - time.monotonic()))[0], f"no {text}: {self.said}"
            said = os.read(self.output, 1000).decode()
            assert said, f"ended without {text}: {self.said}"
            self.said += said

    def end(self, seconds: float = 30) -> int:
        """Its exit status."""
        while select.select([self.output], [], [], seconds)[0] and (said := os.read(self.output, 1000).decode()):
            self.said += said
        os.close(self.output)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def start():
    """start(work) -> a [`Process`], which is ended with the test."""
    made = []

    def begin(work) -> Process:
        made.append(Process(work))
        return made[-1]

    yield begin
    for process in made:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)


def say(*words):
    print(*words, flush=True)


def train_until_stopped(accelerator=ALONE) -> int:
    """Steps of 20 ms until a stop is agreed, as the loop of train.py has it."""
    with StopSignal(accelerator) as stop:
        say("ready")
        for step in range(1, 1000):
            time.sleep(0.02)
            if stop.is_agreed(may_ask_others=step % 5 == 0):
                say("agreed after step", step)
                return stop.exit_status
    return 0


# ------------------------------------------------------------------------------------------------- being asked to stop


@pytest.mark.parametrize("accelerator", [ALONE, ONE_OF_TWO], ids=["alone", "one of two"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_for_a_stop_after_the_step(number, accelerator, start):
    process = start(lambda: train_until_stopped(accelerator))
    process.wait_for("ready")
    os.kill(process.pid, number)
    assert process.end() == 128 + number, process.said
    assert process.said.count("train.py: stopping after this step; Ctrl-C again does not wait for it.") == 1
    step = int(process.said.split("agreed after step")[1])
    assert step < 200 and (accelerator is ALONE or step % 5 == 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_midst_of_a_print(number, start):
    """Such as that of a progress bar: Python refuses a second one that comes from within."""

    def work():
        with StopSignal(ALONE) as stop:
            while stop.number is None:
                say("printing")
            say("asked")

    process = start(work)
    process.wait_for("printing")
    os.kill(process.pid, number)
    assert process.end() == 0, process.said
    assert process.said.count("stopping") == 1 and process.said.endswith("asked\n")


def test_the_handlers_of_before_come_back():
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(ZeroDivisionError), StopSignal(ALONE) as stop:
        assert [signal.getsignal(number) for number in numbers] == [stop.handle, stop.handle]
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_process_that_is_not_asked_does_not_stop():
    with StopSignal(ALONE) as stop:
        assert not stop.is_agreed(may_ask_others=True)
    with StopSignal(ONE_OF_TWO) as stop:
        assert not stop.is_agreed(may_ask_others=True)


def test_one_of_several_stops_where_all_are_asked():
    """The others may have been asked, where this one was not."""
    others = SimpleNamespace(num_processes=2, device=torch.device("cpu"), reduce=lambda asked: asked + 1)
    with StopSignal(others) as stop:
        assert not stop.is_agreed(may_ask_others=False)
        assert stop.is_agreed(may_ask_others=True)
        assert stop.exit_status == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "signals, status",
    [
        ([signal.SIGINT, 0.6, signal.SIGINT], 130),
        ([signal.SIGTERM, 0.6, signal.SIGINT], 130),
        ([signal.SIGINT, 0, signal.SIGINT, 0.6, signal.SIGINT], 130),
        ([signal.SIGINT, 0, signal.SIGINT], 0),  # the launcher passes on what the terminal has sent already
        ([signal.SIGINT, 0.6, signal.SIGTERM], 0),
        ([signal.SIGTERM, 0.6, signal.SIGTERM], 0),
    ],
    ids=str,
)
def test_a_second_ctrl_c_does_not_wait(signals, status, start, monkeypatch):
    monkeypatch.setattr(interruption, "SECOND_THOUGHT", 0.4)

    def long_step():
        with StopSignal(ALONE):
            say("ready")
            for _ in range(75):
                time.sleep(0.02)

    process = start(long_step)
    process.wait_for("ready")
    for item in signals:
        if isinstance(item, signal.Signals):
            os.kill(process.pid, item)
            process.wait_for("stopping")
            time.sleep(0.05)
        else:
            time.sleep(item)
    began = time.monotonic()
    assert process.end() == status
    assert status == 0 or time.monotonic() - began < 1
    assert process.said.count("stopping") == 1


def evaluate_until_stopped(accelerator) -> int:
    with StopSignal(accelerator) as stop:
        try:
            with stop.breaking_off():
                say("ready")
                for _ in range(75):
                    time.sleep(0.02)
                say("evaluated")
        except Interrupted:
            say("broken off")
        say("asked", stop.number)
        time.sleep(0.5)
        say("went on")
        return stop.exit_status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_evaluation_is_broken_off(number, start):
    """Once; what comes after it, such as saving, is not."""
    process = start(lambda: evaluate_until_stopped(ALONE))
    process.wait_for("ready")
    began = time.monotonic()
    os.kill(process.pid, number)
    process.wait_for("asked")
    assert time.monotonic() - began < 1 and "evaluated" not in process.said
    os.kill(process.pid, signal.SIGTERM)
    assert process.end() == 128 + number
    assert process.said.split("broken off")[1].split() == ["asked", str(int(number)), "went", "on"]


def test_several_processes_evaluate_to_the_end(start):
    """The others would wait for the one that breaks off."""
    process = start(lambda: evaluate_until_stopped(ONE_OF_TWO))
    process.wait_for("ready")
    os.kill(process.pid, signal.SIGTERM)
    assert process.end() == 143
    assert "evaluated" in process.said and "broken off" not in process.said


def test_an_evaluation_does_not_begin_when_a_stop_is_asked_for(start):
    def work():
        with StopSignal(ALONE) as stop:
            say("ready")
            while stop.number is None:
                time.sleep(0.01)
            with contextlib.suppress(Interrupted), stop.breaking_off():
                say("began")
            say("done")

    process = start(work)
    process.wait_for("ready")
    os.kill(process.pid, signal.SIGTERM)
    assert process.end() == 0
    assert "began" not in process.said and "done" in process.said


def test_a_stop_after_an_evaluation_breaks_nothing_off():
    with StopSignal(ALONE) as stop:
        with stop.breaking_off():
            pass
        stop.handle(signal.SIGTERM, None)
        assert stop.is_agreed(may_ask_others=False)


# ----------------------------------------------------------------------------------------------------- other processes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_forked_process_leaves_signals_to_the_one_that_trains(number, start):
    def work():
        with StopSignal(ALONE) as stop:
            if (child := os.fork()) == 0:
                with contextlib.suppress(BaseException), stop.breaking_off():
                    say("forked")
                    time.sleep(1)
                    say("outlived it")
                os._exit(0)
            os.waitpid(child, 0)
            say("asked", stop.number)

    process = start(work)
    process.wait_for("forked")
    (child,) = psutil.Process(process.pid).children()
    child.send_signal(number)
    assert process.end() == 0
    assert "outlived it" in process.said and "asked None" in process.said and "stopping" not in process.said


@pytest.fixture(scope="module")
def loader_with_workers(byte_tokenizer):
    args = parse_options(["--dataset_name=x", "--dataloader_num_workers=2", "--per_device_train_max_tokens=99"])
    pairs = tokenize_pairs(text_dataset([(f"a dog {i}", "x") for i in range(50)]), byte_tokenizer, 99, 99)[0]
    return lambda: training_batches(pairs, byte_tokenizer, args)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_go_on_until_the_run_has_stopped(number, start, loader_with_workers):
    """Where all processes of a run are asked at once, as terminals, services and batch systems do."""

    def work():
        batches = iter(loader_with_workers())
        with StopSignal(ALONE) as stop:
            next(batches)
            say("ready")
            while not stop.is_agreed(may_ask_others=True):
                next(batches)
                time.sleep(0.05)
            time.sleep(0.3)
            say("agreed, and read", len([next(batches) for _ in range(20)]))  # more than was prepared before
            return stop.exit_status

    process = start(work)
    process.wait_for("ready")
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    time.sleep(0.3)
    os.killpg(process.pid, number)
    assert process.end() == 128 + number, process.said
    assert "agreed, and read 20" in process.said, process.said
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def test_a_worker_is_ended_by_the_second_sigterm(start):
    def work():
        interruption.leave_signals_to_training(0)
        say("ready")
        time.sleep(0.5)
        say("outlived it")
        time.sleep(10)

    process = start(work)
    process.wait_for("ready")
    os.kill(process.pid, signal.SIGTERM)
    process.wait_for("outlived it")
    os.kill(process.pid, signal.SIGTERM)
    assert process.end() == -signal.SIGTERM


LAUNCHED = """
import time, types, torch
from vanilla_transformer.training.signals import StopSignal

with StopSignal(types.SimpleNamespace(num_processes=1)) as stop:
    print("ready", flush=True)
    for _ in range(500):
        time.sleep(0.02)
        if stop.is_agreed(may_ask_others=False):
            print("agreed", stop.exit_status, flush=True)
            break
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[-1]])"


@pytest.fixture
def launched(tmp_path):
    """A launcher that waits for the process that trains, as `accelerate launch` does, and that process."""
    (tmp_path / "accelerate").write_text(LAUNCHER)
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    launcher = subprocess.Popen(
        [sys.executable, str(tmp_path / "accelerate"), "launch", LAUNCHED],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert launcher.stdout.readline() == "ready\n"
    (process,) = psutil.Process(launcher.pid).children()
    yield launcher, process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()


def test_the_end_of_the_launcher_asks_for_a_stop(launched):
    """It is killed, and nobody has asked for its exit status yet; the process that trains is not left alone."""
    launcher, process = launched
    launcher.kill()
    assert "agreed 143" in launcher.stdout.read()  # until the process has ended


def test_ctrl_c_ends_the_launcher(launched):
    """Which would print a traceback of its own."""
    launcher, process = launched
    process.send_signal(signal.SIGINT)
    said = launcher.stdout.read()
    assert "agreed 130" in said and "Traceback" not in said
    assert launcher.wait() == -signal.SIGTERM


# ------------------------------------------------------------------------------------------------ the command to go on


@pytest.mark.parametrize(
    "argv, rest",
    [
        ([], []),
        (["--seed", "3"], ["--seed", "3"]),
        (["--resume_from_checkpoint"], []),
        (["--resume_from_checkpoint", "runs/checkpoint-5"], []),
        (["--resume_from_checkpoint=runs/checkpoint-5"], []),
        (["--resume_from_checkpoint="], []),
        (["--resume-from-checkpoint", "runs/checkpoint-5"], []),
        (["--seed=3", "--resume_from_checkpoint", "--d_model", "8"], ["--seed=3", "--d_model", "8"]),
        (["--resume_from_checkpoint", "x", "--seed", "3"], ["--seed", "3"]),
        (["--resume_from_checkpoint", "x", "--resume_from_checkpoint", "--seed=3"], ["--seed=3"]),
        (["--resume_from_checkpoint", "--resume_from_checkpoint=y"], []),
        (["--norm_first", "--resume_from_checkpoint", "x"], ["--norm_first"]),
        (["--output_dir", "a b/it's $HOME", "--seed", "3"], ["--output_dir", "a b/it's $HOME", "--seed", "3"]),
        (["--output_dir", "runs/--resume_from_checkpoint"], ["--output_dir", "runs/--resume_from_checkpoint"]),
        (
            ["--source_lang", "", "--seed", "3", "--target_lang", ""],
            ["--source_lang", "", "--seed", "3", "--target_lang", ""],
        ),
        (["--output_dir", "two\nlines"], ["--output_dir", "two\nlines"]),
    ],
)
def test_the_command_to_go_on(argv, rest):
    words = shlex.split(resume_command(argv))
    assert words == ["accelerate", "launch", "train.py", *rest, "--resume_from_checkpoint"]


@pytest.mark.parametrize("argv", [[], ["--seed", "3"], ["--resume-from-checkpoint=x"], ["--dataset_name", "a b"]])
def test_the_command_to_go_on_is_understood(argv):
    again = parse_options(shlex.split(resume_command(argv))[3:])
    assert vars(again) == vars(parse_options(argv)) | {"resume_from_checkpoint": "newest"}
