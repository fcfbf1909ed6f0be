"""Contestants that take turns in separate processes, so that other load on the machine affects all alike."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import statistics
import sys
import time

import psutil
import torch

from vanilla_transformer.training.memory import configure_malloc

CONTEXT = multiprocessing.get_context("spawn")
FORGET = "forget"  # a message: reset the peak memory


class Contestant:
    """Calls the function that `make(*arguments)` returns in a separate process, and times it.

    `keeps_memory` configures the allocator of that process as train.py does, see `configure_malloc`. `memory` is the
    peak of the process in bytes without its libraries, or of the GPU if it uses one.
    """

    def __init__(self, name: str, make, *arguments, keeps_memory: bool = False):
        self.name = name
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, make, arguments, keeps_memory), daemon=True)
        self.process.start()
        theirs.close()
        self.seconds: list[float] = []
        self.answers: list = []
        self.memory = 0  # bytes
        self.receive()

    def turn(self, *arguments) -> float:
        """Calls the function once; returns and records the seconds it took."""
        with contextlib.suppress(BrokenPipeError):  # receive() reports it
            self.connection.send(arguments)
        seconds, answer, self.memory = self.receive()
        self.seconds.append(seconds)
        self.answers.append(answer)
        return seconds

    def receive(self):
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            reason = "see its traceback above" if self.process.exitcode > 0 else "it was killed, maybe out of memory"
            sys.exit(f"The contestant '{self.name}' failed; {reason}.")

    def forget(self):
        """Discards all measurements so far, such as those of a warm-up."""
        self.seconds.clear()
        self.answers.clear()
        self.connection.send(FORGET)

    def end(self):
        self.connection.close()
        self.process.join()


def serve(connection, make, arguments, keeps_memory: bool):
    libraries = psutil.Process().memory_info().rss
    work = make(*arguments)
    gc.collect()
    if keeps_memory:
        configure_malloc()
    forget_memory()  # of the setup
    connection.send(None)
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        if given == FORGET:
            forget_memory()
            continue
        begin = time.perf_counter()
        answer = work(*given)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        connection.send((seconds, answer, most_memory() - (0 if torch.cuda.is_initialized() else libraries)))


def forget_memory():
    """Resets the peak memory, on Linux and on a GPU; elsewhere that is not possible."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory does not count
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as command:
        command.write("5")


def most_memory() -> int:
    """Peak memory of this process in bytes, or of the GPU if it uses one."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    if sys.platform.startswith("linux"):
        with open(f"/proc/{os.getpid()}/status", encoding="utf-8") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def take_turns(contestants: list[Contestant], turns: list[tuple], rounds: int):
    """In each round every contestant takes all turns; a first round warms up and is discarded."""
    for number in range(rounds + 1):
        for arguments in turns:
            for one in contestants:
                one.turn(*arguments)
        if number == 0:
            for one in contestants:
                one.forget()


def per_round(seconds: list[float], rounds: int) -> list[float]:
    """The seconds of each round."""
    turns = len(seconds) // rounds
    return [sum(seconds[start : start + turns]) for start in range(0, len(seconds), turns)]


def median_ratio(one: Contestant, other: Contestant, rounds: int) -> float:
    """How many times faster `one` was than `other` in the same round; the median over rounds."""
    pairs = zip(per_round(one.seconds, rounds), per_round(other.seconds, rounds), strict=True)
    return statistics.median(theirs / ours for ours, theirs in pairs)
