"""Texts are translated in groups, each a file of its own, so that a kill costs one group, and every process can take its
share."""

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from tqdm.auto import tqdm

from ..errors import noting
from ..files import write_text

GROUP = 512  # texts
SECONDS = 30  # between two lines about progress


def translate_groups(folder: Path, texts: list[str], label: str, load: Callable[[], Callable[[list[str], int], list]]):
    """Writes a file for each group of texts that has none yet; the processes take the groups in turn.

    Returns when all processes are done. Which texts a group has depends on their places alone, so its translations,
    too, are the same wherever an earlier run ended.

    Args:
        label: Of the progress bar.
        load: Called if there is something to translate. Returns a function of the texts of a group and its number,
            which returns something for JSON.
    """
    state = PartialState()
    numbers = range(-(-len(texts) // GROUP))
    missing = [number for number in numbers if not file_of(folder, number).exists()]
    mine = [number for number in missing if number % state.num_processes == state.process_index]
    translate = load() if mine else None
    done = min((len(numbers) - len(missing)) * GROUP, len(texts))
    progress = Progress(label, done, len(texts), state.is_main_process)
    with progress.bar, warnings.catch_warnings():
        for number in mine:
            group = texts[number * GROUP : (number + 1) * GROUP]
            with noting(f"while translating texts {number * GROUP + 1:,} to {number * GROUP + len(group):,}"):
                content = json.dumps(translate(group, number), ensure_ascii=False)
            warnings.filterwarnings("ignore", ".* characters that the tokenizer does not know")  # once is enough
            folder.mkdir(parents=True, exist_ok=True)
            write_text(file_of(folder, number), content)
            progress.show(min(GROUP * sum(1 for _ in folder.glob("*.json")), len(texts)))  # by all processes
    state.wait_for_everyone()


class Progress:
    """How many texts are translated, with the time that is left: a bar or, where stderr is no terminal, lines."""

    def __init__(self, label: str, done: int, total: int, is_shown: bool):
        self.label, self.done, self.total, self.is_shown = label, done, total, is_shown
        self.started = self.shown = time.monotonic()
        self.bar = tqdm(total=total, initial=done, desc=label, unit="text", disable=None if is_shown else True)

    def show(self, done: int):
        """Shows that so many texts are done, of all that there are."""
        self.bar.update(done - self.bar.n)
        now = time.monotonic()
        if self.bar.disable and self.is_shown and now - self.shown >= SECONDS:
            self.shown = now
            left = (now - self.started) / (done - self.done) * (self.total - done)
            text = f"{self.label}: {done:,} of {self.total:,} texts, {tqdm.format_interval(left)} left"
            print(text, file=sys.stderr, flush=True)


def read_groups(folder: Path, count: int) -> list:
    """What [`translate_groups`] wrote for `count` texts, in their order."""
    files = (file_of(folder, number) for number in range(-(-count // GROUP)))
    return [one for file in files for one in json.loads(file.read_text(encoding="utf-8"))]


def file_of(folder: Path, number: int) -> Path:
    return folder / f"{number:07}.json"
