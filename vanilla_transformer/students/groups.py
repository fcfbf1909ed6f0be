"""Translates texts in groups, each a file: a killed run loses one group, and the processes share them."""

import json
import sys
import time
import warnings
from math import ceil
from pathlib import Path

from accelerate import PartialState
from tqdm.auto import tqdm

from ..errors import noting
from ..files import write_text
from .translating import Teacher

GROUP = 512  # texts
SECONDS = 30  # between two lines about progress


def translate_groups(folder: Path, texts: list[str], label: str, teacher: Teacher):
    """Writes the candidates of `teacher` for each group of texts whose file is missing.

    Processes take groups in turn; each returns when all are done. A group depends on the places of its texts alone, so
    translations are the same wherever an earlier run ended. `label` is that of the progress bar.
    """
    state, files = PartialState(), files_of(folder, len(texts))
    missing = [number for number, file in enumerate(files) if not file.exists()]
    mine = [number for number in missing if number % state.num_processes == state.process_index]
    translator = teacher.open() if mine else None
    progress = Progress(label, min((len(files) - len(missing)) * GROUP, len(texts)), len(texts), state.is_main_process)
    with progress.bar, warnings.catch_warnings():
        for number in mine:
            group = texts[number * GROUP : (number + 1) * GROUP]
            with noting(f"while translating texts {number * GROUP + 1:,} to {number * GROUP + len(group):,}"):
                content = json.dumps(teacher.candidates(translator, group, number), ensure_ascii=False)
            warnings.filterwarnings("ignore", ".* characters that the tokenizer does not know")  # once is enough
            folder.mkdir(parents=True, exist_ok=True)
            write_text(files[number], content)
            progress.show(min(GROUP * sum(1 for _ in folder.glob("*.json")), len(texts)))  # by all processes
    state.wait_for_everyone()


def read_groups(folder: Path, count: int) -> list[list]:
    """The candidates that [`translate_groups`] wrote for each of `count` texts."""
    return [one for file in files_of(folder, count) for one in json.loads(file.read_text(encoding="utf-8"))]


def files_of(folder: Path, count: int) -> list[Path]:
    """The files of the groups of `count` texts."""
    return [folder / f"{number:07}.json" for number in range(ceil(count / GROUP))]


class Progress:
    """Shows how many texts are translated and the time left: in a bar or, if stderr is no terminal, in lines."""

    def __init__(self, label: str, done: int, total: int, is_shown: bool):
        self.label, self.first, self.is_shown = label, done, is_shown
        self.started = self.shown = time.monotonic()
        self.bar = tqdm(total=total, initial=done, desc=label, unit="text", disable=None if is_shown else True)

    def show(self, done: int):
        self.bar.update(done - self.bar.n)
        now = time.monotonic()
        if self.bar.disable and self.is_shown and now - self.shown >= SECONDS:
            self.shown, form = now, "{desc}: {n:,} of {total:,} texts, {remaining} left"
            how = {"prefix": self.label, "initial": self.first, "bar_format": form}
            print(tqdm.format_meter(done, self.bar.total, now - self.started, **how), file=sys.stderr, flush=True)
