"""Graceful shutdown, with real signals to this process."""

import contextlib
import signal
import time
from types import SimpleNamespace

import pytest

from vanilla_transformer.training import signals
from vanilla_transformer.training.signals import GracefulShutdown, Stopped

ALONE = SimpleNamespace(num_processes=1)
TERM, INT = signal.SIGTERM, signal.SIGINT


def one_of_two(is_other_stopped: bool):
    """The other process has a flag of its own, and each sees both."""
    flags = [is_other_stopped]
    return SimpleNamespace(num_processes=2, set_trigger=lambda: flags.append(True), check_trigger=lambda: any(flags))


@pytest.mark.parametrize("number", [TERM, INT])
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
    "first, pause, second, exits_at_once",
    [
        (INT, 0.2, INT, True),
        (TERM, 0.2, INT, True),
        (INT, 0, INT, False),  # the launcher forwards what the terminal has already sent
        (INT, 0.2, TERM, False),
        (TERM, 0.2, TERM, False),
    ],
)
def test_second_ctrl_c_exits_at_once(first, pause, second, exits_at_once, monkeypatch, capfd):
    monkeypatch.setattr(signals, "REPEAT_AFTER", 0.1)
    with GracefulShutdown(ALONE):
        signal.raise_signal(first)
        time.sleep(pause)
        with pytest.raises(KeyboardInterrupt) if exits_at_once else contextlib.nullcontext():
            signal.raise_signal(second)
    assert capfd.readouterr().err.count("saving a checkpoint") == 1


def test_previous_handlers_are_restored():
    before = [signal.getsignal(number) for number in (TERM, INT)]
    with contextlib.suppress(ZeroDivisionError), GracefulShutdown(ALONE) as shutdown:
        assert [signal.getsignal(number) for number in (TERM, INT)] == [shutdown.handle] * 2
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (TERM, INT)] == before
