"""Graceful shutdown, with real signals to real processes."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from vanilla_transformer.training.signals import GracefulShutdown, Stopped

ALONE = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
ONE_OF_TWO = SimpleNamespace(num_processes=2, device=torch.device("cpu"), reduce=lambda received: received)
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])

PRELUDE = """
import os, signal, time, types, torch
from vanilla_transformer.training import signals
from vanilla_transformer.training.signals import GracefulShutdown
signals.REPEAT_AFTER = 0.4
alone = types.SimpleNamespace(num_processes=1, device=torch.device("cpu"))
two = types.SimpleNamespace(num_processes=2, device=torch.device("cpu"), reduce=lambda received: received)
"""
TRAIN = """
with GracefulShutdown({}) as shutdown:
    print("ready", flush=True)
    for step in range(1, 500):
        time.sleep(0.02)
        if shutdown.should_stop(may_ask_others=step % 5 == 0):
            print("stopped after step", step, flush=True)
            raise SystemExit(shutdown.exit_status)
"""
LONG_STEP = """
with GracefulShutdown(alone):
    print("ready", flush=True)
    for _ in range(75):
        time.sleep(0.02)
"""
PRINTING = """
with GracefulShutdown(alone) as shutdown:
    print("ready", flush=True)
    while shutdown.signal_number is None:
        print("printing", flush=True)
"""
FORKED = """
with GracefulShutdown(alone) as shutdown:
    child = os.fork()
    if child == 0:
        time.sleep(1)
        os._exit(7)
    print("ready", flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(child, number)
    print("child exited with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shutdown.signal_number, flush=True)
"""


class Process:
    """A Python process that runs `code` after the prelude; `output` collects what it prints."""

    def __init__(self, code: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.output = ""

    def wait_for(self, text: str):
        while text not in self.output:
            assert select.select([self.process.stdout], [], [], 60)[0], f"no {text}: {self.output}"
            read = os.read(self.process.stdout.fileno(), 1000).decode()
            assert read, f"ended without {text}: {self.output}"
            self.output += read

    def end(self) -> int:
        self.output += self.process.communicate(timeout=60)[0].decode()
        return self.process.returncode


@pytest.fixture
def start():
    """start(code) -> a process that is ready, and is killed at the end of the test."""
    processes = []

    def begin(code: str) -> Process:
        processes.append(Process(code))
        processes[-1].wait_for("ready")
        return processes[-1]

    yield begin
    for one in processes:
        one.process.kill()
        one.process.wait()


@pytest.mark.parametrize("accelerator", ["alone", "two"])
@SIGNALS
def test_signal_stops_after_a_step(number, accelerator, start):
    process = start(TRAIN.format(accelerator))
    process.process.send_signal(number)
    assert process.end() == 128 + number, process.output
    assert process.output.count("train.py: saving a checkpoint after this step; press Ctrl-C again") == 1
    step = int(process.output.split("stopped after step")[1])
    assert step < 200 and (accelerator == "alone" or step % 5 == 0)


@SIGNALS
def test_signal_during_a_print(number, start):
    """Python refuses to print from a signal handler that interrupted a print."""
    process = start(PRINTING)
    process.process.send_signal(number)
    assert process.end() == 0, process.output
    assert process.output.count("saving a checkpoint") == 1


def test_previous_handlers_are_restored():
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with contextlib.suppress(ZeroDivisionError), GracefulShutdown(ALONE) as shutdown:
        assert [signal.getsignal(number) for number in numbers] == [shutdown.handle] * 2
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in numbers] == before


def test_no_signal_no_stop():
    for accelerator in (ALONE, ONE_OF_TWO):
        with GracefulShutdown(accelerator) as shutdown:
            assert not shutdown.should_stop()


def test_process_stops_if_another_received_the_signal():
    others = SimpleNamespace(num_processes=2, device=torch.device("cpu"), reduce=lambda received: received + 1)
    with GracefulShutdown(others) as shutdown:
        assert not shutdown.should_stop(may_ask_others=False)
        assert shutdown.should_stop(may_ask_others=True)
        assert shutdown.exit_status == 128 + signal.SIGTERM
    assert "stopped after step 7" in str(Stopped(7, 143)) and Stopped(7, 143).exit_status == 143


@pytest.mark.parametrize(
    "signals, exits_at_once",
    [
        ([signal.SIGINT, 0.6, signal.SIGINT], True),
        ([signal.SIGTERM, 0.6, signal.SIGINT], True),
        ([signal.SIGINT, 0, signal.SIGINT], False),  # the launcher forwards what the terminal has already sent
        ([signal.SIGINT, 0.6, signal.SIGTERM], False),
        ([signal.SIGTERM, 0.6, signal.SIGTERM], False),
    ],
    ids=str,
)
def test_second_ctrl_c_exits_at_once(signals, exits_at_once, start):
    process = start(LONG_STEP)
    first, pause, second = signals
    process.process.send_signal(first)
    process.wait_for("saving a checkpoint")
    time.sleep(pause)
    process.process.send_signal(second)
    status = process.end()
    assert ("KeyboardInterrupt" in process.output) == exits_at_once == (status != 0)
    assert process.output.count("saving a checkpoint") == 1


def test_forked_child_ignores_signals(start):
    """They are for the process that trains."""
    process = start(FORKED)
    assert process.end() == 0
    assert "child exited with 7 None" in process.output and "saving a checkpoint" not in process.output
