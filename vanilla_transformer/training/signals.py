"""Graceful shutdown: SIGTERM and Ctrl-C let the training loop finish its step and save."""

import contextlib
import os
import signal
import time

from accelerate import Accelerator

REPEAT_AFTER = 1.0  # seconds; a launcher forwards the Ctrl-C that the terminal has already sent to all processes


class Stopped(Exception):
    """A signal stopped the run, and its state was saved."""

    def __init__(self, step: int, signal_number: int | None):
        super().__init__(f"stopped after step {step}, which is saved; resume with --resume_from_checkpoint")
        # As in shells; None if it was another process that received the signal.
        self.exit_status = 128 + (signal_number or signal.SIGTERM)


class GracefulShutdown:
    """A context in which SIGTERM and SIGINT only set a flag. A second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.signal_number: int | None = None
        self.received_at = 0.0

    def __enter__(self):
        self.previous = {number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame):
        """The signal handler: sets the flag, or raises KeyboardInterrupt if the flag is set and Ctrl-C is pressed."""
        if self.signal_number is not None:
            if number == signal.SIGINT and time.monotonic() - self.received_at > REPEAT_AFTER:
                raise KeyboardInterrupt
            return
        self.signal_number, self.received_at = number, time.monotonic()
        with contextlib.suppress(OSError):  # os.write, because print is not reentrant
            os.write(2, b"\ntrain.py: saving a checkpoint after this step; press Ctrl-C again to exit at once.\n")

    def should_stop(self, may_ask_others: bool = True) -> bool:
        """Whether any process has received a signal.

        In a distributed run, all processes agree on the answer, for which they must communicate. Without
        `may_ask_others` they do not, and the answer is False.
        """
        if self.accelerator.num_processes == 1:
            return self.signal_number is not None
        if not may_ask_others:
            return False
        if self.signal_number is not None:
            self.accelerator.set_trigger()
        return self.accelerator.check_trigger()
