"""Being stopped: SIGTERM and Ctrl-C as a request that the training loop can grant when it has a whole step."""

import contextlib
import multiprocessing
import os
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

SECOND_THOUGHT = 1.0  # seconds; a launcher passes on the Ctrl-C that the terminal has sent already


LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch"}


class Interrupted(Exception):
    """Raised by [`StopSignal`] in the middle of what can be broken off."""


class StopSignal:
    """A context in which SIGTERM and Ctrl-C, and the end of `accelerate launch`, ask for a stop instead of making it.

    A second Ctrl-C ends the process at once.
    """

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.number: int | None = None  # of the signal
        self.since = 0.0
        self.breaks_off = False
        self.launcher = find_launcher()
        self.command = resume_command(sys.argv[1:])  # now, while what has launched this process is there
        self.process = os.getpid()

    def __enter__(self):
        self.before = {number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame):
        """What a signal does: it asks for a stop, and a second Ctrl-C makes it. Takes what `signal.signal` gives."""
        if os.getpid() != self.process:
            return  # a process that was forked from this one, which ends it
        if number == signal.SIGINT:
            if self.number is not None and time.monotonic() - self.since > SECOND_THOUGHT:
                raise KeyboardInterrupt
            end_launcher()
        if self.number is None:
            self.number, self.since = number, time.monotonic()
            # Not by print, which fails where the signal has come in the midst of another print.
            with contextlib.suppress(OSError):
                os.write(2, b"\ntrain.py: stopping after this step; Ctrl-C again does not wait for it.\n")
        if self.breaks_off:
            self.breaks_off = False
            raise Interrupted

    def is_agreed(self, may_ask_others: bool) -> bool:
        """Whether a stop is asked for; of several processes all say the same, if they ask each other at this step."""
        if self.launcher is not None and os.getppid() != self.launcher.pid:
            self.number = self.number or signal.SIGTERM
        if self.accelerator.num_processes == 1:
            return self.number is not None
        if not may_ask_others:
            return False
        asked = torch.tensor(float(self.number is not None), device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked) > 0)

    @contextlib.contextmanager
    def breaking_off(self):
        """What may be broken off by [`Interrupted`]; of several processes none is, as the others would wait for it."""
        if self.number is not None and self.accelerator.num_processes == 1:
            raise Interrupted
        self.breaks_off = self.accelerator.num_processes == 1
        try:
            yield
        finally:
            self.breaks_off = False

    @property
    def exit_status(self) -> int:
        """128 and the number of the signal, as shells have it."""
        return 128 + (self.number or signal.SIGTERM)


def find_launcher() -> psutil.Process | None:
    """`accelerate launch`, if it has started this process and waits for it."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        names = {Path(word).name for word in parent.cmdline()[:3]}
        if "LOCAL_RANK" not in os.environ and names & LAUNCHERS:
            return parent
    return None


def end_launcher():
    """Ends `accelerate launch`, which prints a traceback of its own when a script fails or is stopped."""
    launcher = find_launcher()
    if launcher is not None:
        with contextlib.suppress(psutil.Error):
            launcher.terminate()


def leave_signals_to_training(worker: int):
    """For processes that load data: what is sent to all processes of a run is for the one that trains to act upon.

    A second SIGTERM ends them: torch sends it to workers that do not end by themselves. So does the end of the process
    that trains, also where it is not their parent, as under the start method forkserver.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    threading.Thread(target=end_with, args=[multiprocessing.parent_process()], daemon=True).start()


def end_with(training):
    """Ends this process when that one is gone."""
    training.join()
    os._exit(1)


def resume_command(argv: list[str]) -> str:
    """The command that goes on where the one with the options `argv` was stopped, launched as it was."""
    given = "".join(f"\0{argument}" for argument in argv)
    rest = re.sub(r"\0--resume[_-]from[_-]checkpoint(=[^\0]*|\0(?!--)[^\0]*)?(?=\0|\Z)", "", given)
    return shlex.join([*launched_by(argv), *rest.split("\0")[1:], "--resume_from_checkpoint"])


def launched_by(argv: list[str]) -> list[str]:
    """What stood before the options `argv` on the command line: accelerate launch --num_processes 2 train.py."""
    for process in (os.getppid(), os.getpid()):  # a launcher, if there is one; or none
        with contextlib.suppress(psutil.Error):
            words = psutil.Process(process).cmdline()
            count = len(words) - len(argv)
            if count > 1 and words[count:] == argv and Path(words[count - 1]).name == "train.py":
                # accelerate is a program of its own, which names its interpreter first.
                is_program = count > 2 and not words[1].startswith("-")
                return [Path(words[1]).name, *words[2:count]] if is_program else ["python", *words[1:count]]
    return ["accelerate", "launch", "train.py"]
