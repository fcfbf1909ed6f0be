"""Graceful shutdown: signals that ask a run to end, such as SIGTERM and Ctrl-C, let it finish its step and save."""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from accelerate import Accelerator

ALWAYS_HANDLED = ("SIGTERM", "SIGINT")
# Unless they are ignored, as nohup ignores SIGHUP, or the program that calls `main` handles them. Windows has none of
# them.
HANDLED_BY_DEFAULT = ("SIGHUP", "SIGUSR1", "SIGUSR2")
LAUNCHED = {"ACCELERATE_MIXED_PRECISION", "LOCAL_RANK"}  # accelerate launch or torchrun sets one of them
REPEAT_AFTER = 1.0  # seconds; a launcher forwards the Ctrl-C that the terminal has already sent to all processes
NOTICE = b"\ntrain.py: saving a checkpoint after this step; press Ctrl-C again to exit at once.\n"


class Stopped(Exception):
    """A signal stopped the run, and its state was saved."""

    def __init__(self, step: int, signal_number: int | None):
        super().__init__(f"stopped after step {step}, which is saved; resume with --resume_from_checkpoint")
        # As in shells; None if it was another process that received the signal.
        self.exit_status = 128 + (signal_number or signal.SIGTERM)


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal stopped the run within a step."""

    def __init__(self, signal_number: int):
        super().__init__()
        self.exit_status = 128 + signal_number


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Blocks signals inside the context; processes started in it inherit the block.

    A terminal or a job scheduler signals all processes of a run, which still needs its workers to finish the step.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    numbers = {getattr(signal, name) for name in (*ALWAYS_HANDLED, *HANDLED_BY_DEFAULT)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launcher_id() -> int | None:
    """The id of the process of accelerate launch or torchrun that started this one; None if none did."""
    with contextlib.suppress(psutil.Error, AttributeError):  # no access, or no parent
        parent = psutil.Process().parent()
        names = [Path(word).name for word in parent.cmdline()]
        is_launcher = any(re.match(r"accelerate|torchrun|torch\.distributed", name) for name in names)
        if is_launcher and LAUNCHED & os.environ.keys():
            return parent.pid
    return None


def write_or_close(stream: int, text: bytes):
    """Writes to a standard stream; if its terminal is gone, redirects it to the null device, so printing works."""
    try:
        os.write(stream, text)  # because print is not reentrant
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


class GracefulShutdown:
    """A context in which the first signal that asks the run to end sets a flag, and a second one ends it at once.

    If the launcher has ended, which happens when it alone is told to, the flag is set too: nobody would wait for the
    run. In a thread that is not the main one, Python allows no signal handlers, and the run does without them.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.signal_number: int | None = None
        self.received_at = 0.0
        self.launcher = launcher_id()
        self.previous = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for name in (*ALWAYS_HANDLED, *HANDLED_BY_DEFAULT):
                number = getattr(signal, name, None)
                if number and (name in ALWAYS_HANDLED or signal.getsignal(number) is signal.SIG_DFL):
                    self.previous[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame):
        """The signal handler: sets the flag, or raises [`StoppedAtOnce`] if the flag is set."""
        if self.signal_number is not None:
            if time.monotonic() - self.received_at > REPEAT_AFTER:
                raise StoppedAtOnce(number)
            return
        self.signal_number, self.received_at = number, time.monotonic()
        write_or_close(1, b"")  # finds out whether the terminal is gone
        write_or_close(2, NOTICE)

    def is_stopped(self) -> bool:
        """Whether this process has received a signal or lost its launcher."""
        if self.signal_number is None and self.launcher not in (None, psutil.Process().ppid()):
            self.handle(signal.SIGTERM, None)
        return self.signal_number is not None

    def should_stop(self, may_ask_others: bool = True) -> bool:
        """Whether any process has been stopped.

        In a distributed run, all processes agree on the answer, for which they must communicate. Without
        `may_ask_others` they do not, and the answer is False.
        """
        if self.accelerator.num_processes == 1:
            return self.is_stopped()
        if not may_ask_others:
            return False
        if self.is_stopped():
            self.accelerator.set_trigger()
        return self.accelerator.check_trigger()
