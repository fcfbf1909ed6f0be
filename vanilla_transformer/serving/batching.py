"""Translates in batches: requests of one direction that wait together form one."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .models import Direction

CHAR_LIMIT, QUEUE_LIMIT = 20_000, 200  # unless the user gives others
CHARACTERS_AT_A_TIME = 2**14  # in a batch, unless its first request alone has more


class CallerGone(Exception):
    """Raised for a job whose caller has disconnected, so that it was not translated."""


@dataclass(eq=False)
class Job:
    """A request that is waiting to be translated.

    Attributes:
        alternatives: How many translations of each text to find beside the best, at most.
        is_gone: Says whether the caller has disconnected.
        answer: The result of [`Direction.translate`], its exception, or [`CallerGone`].
    """

    direction: Direction
    texts: list[str]
    alternatives: int
    is_gone: Callable[[], Awaitable[bool]]
    answer: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def size(self) -> int:
        return sum(map(len, self.texts))


class Batcher:
    """Translates one batch at a time, in a thread of its own: several at once would compete for the processors.

    A batch has the request that has waited longest, and others of the same direction with as many alternatives, until
    it has [`CHARACTERS_AT_A_TIME`]. At most `most_waiting` requests wait.
    """

    def __init__(self, most_waiting: int):
        self.most_waiting = most_waiting
        self.waiting: list[Job] = []
        self.arrived = asyncio.Event()
        self.thread = ThreadPoolExecutor(max_workers=1)

    async def translate(self, job: Job) -> list[list[str]]:
        """The answer to a job. Raises asyncio.QueueFull if too many are waiting, or the exception of the job."""
        if len(self.waiting) >= self.most_waiting:
            raise asyncio.QueueFull
        self.waiting.append(job)
        self.arrived.set()
        return await job.answer

    async def run(self):
        """Answers jobs until it is canceled."""
        while await self.arrived.wait():
            self.arrived.clear()
            while self.waiting:
                jobs = self.next_batch()
                try:
                    await self.answer_all(jobs)
                except Exception as error:  # whatever it is: the callers wait, and others will come
                    for job in jobs:
                        answer(job, error)

    async def answer_all(self, jobs: list[Job]):
        """Translates the jobs whose callers are still there."""
        gone = [await job.is_gone() for job in jobs]
        for job in itertools.compress(jobs, gone):
            answer(job, CallerGone())
        jobs = [job for job, is_gone in zip(jobs, gone, strict=True) if not is_gone]
        for job, result in zip(jobs, await self.run_in_thread(translate_jobs, jobs), strict=True):
            answer(job, result)

    def run_in_thread(self, function: Callable, *arguments) -> Awaitable:
        """Runs a function in the thread of the models."""
        return asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    def next_batch(self) -> list[Job]:
        """Takes the jobs of the next batch from those that are waiting."""
        first, *others = self.waiting
        jobs, room = [first], CHARACTERS_AT_A_TIME - first.size
        for job in others:
            is_like = job.direction is first.direction and job.alternatives == first.alternatives
            if is_like and job.size <= room:
                jobs.append(job)
                room -= job.size
        self.waiting = [job for job in self.waiting if job not in jobs]
        return jobs


def answer(job: Job, result: list[list[str]] | Exception):
    if job.answer.done():  # canceled, because the server ends
        return
    if isinstance(result, Exception):
        job.answer.set_exception(result)
    else:
        job.answer.set_result(result)


def translate_jobs(jobs: list[Job]) -> list[list[list[str]] | Exception]:
    """For each job its translations, or the exception of its texts; a batch that fails is halved to find such jobs."""
    texts, half = [text for job in jobs for text in job.texts], len(jobs) // 2
    try:
        found = iter(jobs[0].direction.translate(texts, jobs[0].alternatives) if jobs else ())
    except Exception as error:
        return [error] if len(jobs) == 1 else translate_jobs(jobs[:half]) + translate_jobs(jobs[half:])
    return [[next(found) for _ in job.texts] for job in jobs]
