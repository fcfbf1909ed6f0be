"""Contestants that take turns in separate processes, so that other load on the machine affects all alike."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import psutil
import torch

from vanilla_transformer.training.hardware import configure_malloc

# Forked from a process that has imported the libraries, as importing them takes longer than many a measurement: from a
# server in which nothing has run or, with --quick, from this one, which must have a single thread.
IS_TRIED = "--quick" in sys.argv and not torch.cuda.is_available()
PROCESSES = multiprocessing.get_context("fork" if IS_TRIED else "forkserver")
PROCESSES.set_forkserver_preload(["vanilla_transformer.training.model"])
if IS_TRIED:
    torch.set_num_threads(1)


class Contestant:
    """Calls the function that `make(*arguments)` returns in a separate process, and times it.

    `keeps_memory` configures the allocator of that process as train.py does, see `configure_malloc`. `memory` is the
    peak of the process in bytes without its libraries, or of the GPU if it uses one.
    """

    def __init__(self, name: str, make, *arguments, keeps_memory: bool = False):
        self.name = name
        self.seconds: list[float] = []
        self.answers: list = []
        self.memory = 0  # bytes
        self.process = ProcessPoolExecutor(1, PROCESSES)
        self.run(prepare, make, arguments, keeps_memory)

    def run(self, function, *arguments):
        try:
            return self.process.submit(function, *arguments).result()
        except BrokenProcessPool:
            sys.exit(f"The contestant '{self.name}' was killed, maybe because memory ran out.")

    def turn(self, *arguments) -> float:
        """Calls the function once; returns and records the seconds it took."""
        seconds, answer, self.memory = self.run(work, *arguments)
        self.seconds.append(seconds)
        self.answers.append(answer)
        return seconds

    def forget(self):
        """Discards all measurements so far, such as those of a warm-up."""
        self.seconds.clear()
        self.answers.clear()
        self.run(forget_memory)

    def end(self):
        self.process.shutdown()


MINE = {}  # in the process of a contestant: its function, and the bytes of its libraries


def prepare(make, arguments, keeps_memory: bool):
    MINE["libraries"] = psutil.Process().memory_info().rss
    MINE["function"] = make(*arguments)
    gc.collect()
    if keeps_memory:
        configure_malloc()
    forget_memory()  # of the setup


def work(*arguments):
    """Calls the contestant's function; returns the seconds, its answer and the peak memory in bytes."""
    begin = time.perf_counter()
    try:
        answer = MINE["function"](*arguments)
    except Exception as error:  # a compiler's may not pass between processes
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return seconds, answer, most_memory() - (0 if torch.cuda.is_initialized() else MINE["libraries"])


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
