"""Contestants that take turns, each in a process of its own, so that what else the machine does hits all alike."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import statistics
import sys
import time

import psutil

CONTEXT = multiprocessing.get_context("spawn")
FORGET = "forget"  # the memory at most


class Failed(SystemExit):
    """A contestant has ended before its time; where it is not left out, so does the script, with this sentence."""


class Contestant:
    """What `make(*arguments)` returns, a function, called in a process of its own.

    `keeps_memory` sets the allocator of that process as train.py does, see `keep_freed_memory`. Memory is that of the
    process at most, with what it was made with and without its libraries, or that of the GPU, if it uses one.
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
        """Calls the function; returns and notes how long that took, in seconds."""
        with contextlib.suppress(BrokenPipeError):  # which receive explains
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
            reason = (
                "its traceback stands above" if self.process.exitcode > 0 else "it was killed, maybe out of memory"
            )
            raise Failed(f"The contestant '{self.name}' has failed; {reason}.") from None

    def forget(self):
        """Leaves out what was a warm-up, or of another kind, and its memory."""
        self.seconds.clear()
        self.answers.clear()
        self.connection.send(FORGET)

    def end(self):
        self.connection.close()
        self.process.join()


def serve(connection, make, arguments, keeps_memory: bool):
    import torch

    from vanilla_transformer.training.optimization import keep_freed_memory

    load_libraries()
    libraries = psutil.Process().memory_info().rss
    work = make(*arguments)
    gc.collect()
    if keeps_memory:
        keep_freed_memory()
    forget_memory()  # that making it took
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


def load_libraries():
    """Those of all contestants, so that none of them counts as the memory of one."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    from transformers import AutoModelForSeq2SeqLM, MarianMTModel  # noqa: F401

    from vanilla_transformer import Translator  # noqa: F401

    with contextlib.suppress(ImportError):
        import ctranslate2  # noqa: F401


def forget_memory():
    """Begins anew to look for the most memory; on Linux and of a GPU, elsewhere it cannot."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is freed and kept does not count
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as command:
        command.write("5")


def most_memory() -> int:
    """Bytes that this process has had at most; of the GPU, if it uses one."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    if sys.platform.startswith("linux"):
        with open(f"/proc/{os.getpid()}/status", encoding="utf-8") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def take_turns(contestants: list[Contestant], turns: list[tuple], rounds: int):
    """Every round gives each contestant the turns, one after another; the first round warms up and is forgotten."""
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
    """How many times faster `one` was than `other`, in the same round, in the middle of all rounds."""
    pairs = zip(per_round(one.seconds, rounds), per_round(other.seconds, rounds), strict=True)
    return statistics.median(theirs / ours for ours, theirs in pairs)
