"""Graceful shutdown, with real signals to this process."""

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from vanilla_transformer.training import signals
from vanilla_transformer.training.signals import GracefulShutdown, Stopped, StoppedAtOnce

ALONE = SimpleNamespace(num_processes=1)
TERM, INT, HUP, USR1, USR2 = (getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "USR1", "USR2"))


def one_of_two(is_other_stopped: bool):
    """The other process has a flag of its own, and each sees both."""
    flags = [is_other_stopped]
    return SimpleNamespace(num_processes=2, set_trigger=lambda: flags.append(True), check_trigger=lambda: any(flags))


@pytest.mark.parametrize("number", [TERM, INT, HUP, USR1, USR2])
def test_signal_stops_after_a_step(number, capfd):
    with GracefulShutdown(ALONE) as shutdown:
        assert not shutdown.should_stop()
        signal.raise_signal(number)
        assert shutdown.should_stop() and shutdown.signal_number == number
    assert capfd.readouterr().err.count("train.py: saving a checkpoint after this step; press Ctrl-C again") == 1


@pytest.mark.parametrize("is_other_stopped", [True, False])
def test_processes_stop_together(is_other_stopped):
    """At a step where they ask each other, whichever of them received the signal."""
    with GracefulShutdown(one_of_two(is_other_stopped)) as shutdown:
        assert shutdown.should_stop() == is_other_stopped
        if not is_other_stopped:
            signal.raise_signal(TERM)
        assert not shutdown.should_stop(may_ask_others=False)
        assert shutdown.should_stop()
    stopped = Stopped(7, shutdown.signal_number)
    assert "stopped after step 7" in str(stopped) and stopped.exit_status == 128 + TERM


@pytest.mark.parametrize(
    "first, pause, second",
    [
        (INT, 0.2, INT),
        (TERM, 0.2, INT),
        (INT, 0.2, TERM),
        (TERM, 0.2, TERM),
        (USR1, 0.2, TERM),
        (HUP, 0.2, USR2),
        (INT, 0, INT),  # the launcher forwards what the terminal has already sent
    ],
)
def test_second_signal_ends_the_run_at_once(first, pause, second, monkeypatch, capfd):
    monkeypatch.setattr(signals, "REPEAT_AFTER", 0.1)
    with GracefulShutdown(ALONE):
        signal.raise_signal(first)
        time.sleep(pause)
        with pytest.raises(StoppedAtOnce) if pause else contextlib.nullcontext() as stopped:
            signal.raise_signal(second)
    assert stopped is None or stopped.value.exit_status == 128 + second
    assert capfd.readouterr().err.count("saving a checkpoint") == 1


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "handled"])
def test_signals_that_the_program_ignores_or_handles_stay_so(handler):
    """As under nohup, or in a program that uses them for something else."""
    numbers = (HUP, USR1, USR2)
    before = [signal.signal(number, handler) for number in numbers]
    with GracefulShutdown(ALONE) as shutdown:
        for number in numbers:
            signal.raise_signal(number)
        assert not shutdown.should_stop()
        assert {signal.getsignal(number) for number in numbers} == {handler}
    for number, previous in zip(numbers, before, strict=True):
        signal.signal(number, previous)


def test_previous_handlers_are_restored():
    numbers = (TERM, INT, HUP, USR1, USR2)
    before = [signal.getsignal(number) for number in numbers]
    with contextlib.suppress(ZeroDivisionError), GracefulShutdown(ALONE) as shutdown:
        assert [signal.getsignal(number) for number in numbers] == [shutdown.handle] * 5
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_thread_does_without_signals():
    def enter():
        with GracefulShutdown(ALONE) as shutdown:
            return shutdown.should_stop()

    with ThreadPoolExecutor() as threads:
        assert threads.submit(enter).result() is False
