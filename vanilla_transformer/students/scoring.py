"""Scores teachers and student side by side on a test set, with their speed and size, and writes the report."""

import html
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from accelerate.utils.memory import clear_device_cache
from datasets import Dataset, concatenate_datasets
from tabulate import tabulate

from ..data.options import DataOptions
from ..data.splits import load_split
from ..errors import noting
from ..evaluation.scores import Scorer
from ..evaluation.splits import references_of
from ..evaluation.systems import kept_by_kind, results_table, score_systems
from ..files import new_folder, write_text
from ..loading import Translator
from .filtering import RULES
from .steps import COUNTS, EVALUATION, PAIRS, REPORT, RESULTS, STUDENT, WRITTEN, json_lines

NUMBERS = ("number", "MB, all files")  # columns of numbers
WARM_UP = 8  # sentences, since the first ones are slower
AGREEMENT = """The references are translations by the teacher, held out of training: the scores say how far the student
agrees with the teacher, not how good either is. `--test_file` scores both on translations by people."""


class System(NamedTuple):
    """How to load a model to score, and how it translates texts, with the label of a progress bar or None."""

    load: Callable[[], Translator]
    translate: Callable[[Translator, list[str], str | None], list[str]]


def load_test(options: DataOptions) -> Dataset:
    """The pairs of `--test_file` that have a reference."""
    files = ([name] if isinstance(name, str) else [*name] for name in options.files("test"))
    parts = [load_split(options, "test", names) for names in files]
    names = {"source", "target", "references"}.intersection(*(part.column_names for part in parts))
    pairs = concatenate_datasets([part.select_columns(sorted(names)) for part in parts])
    return pairs.filter(lambda pair: bool(pair["target"]))


def compare(systems: dict[str, System], pairs: Dataset, scorer: Scorer, folder: Path):
    """Translates the test set with each system, and writes the scores and the translations to a new folder.

    The significance test compares each system with the first.
    """
    sources, references = [text or "" for text in pairs["source"]], references_of(pairs)
    written, measured = {}, {}
    for name, system in systems.items():
        translator = system.load()
        if doubt := scorer.fit(translator.tokenizer, references):
            print(f"warning: {doubt}")
        with noting(f"while {name} translates the test set"):
            system.translate(translator, sources[:WARM_UP], None)
            start = time.perf_counter()
            written[name] = system.translate(translator, sources, f"Scoring {name}" if sys.stderr.isatty() else None)
        speed = len(sources) / (time.perf_counter() - start)
        measured[name] = {"sentences_per_second": speed, "megabytes": megabytes(translator)}
        measured[name]["kept"] = kept_by_kind(sources, written[name])
        del translator  # before the next is loaded
        clear_device_cache(garbage_collection=True)
    results = score_systems(written, references, scorer, "bootstrap", None, sources)
    for name, numbers in measured.items():
        results["systems"][name] |= numbers
    columns = {"source": sources, "reference": references, **written}
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    with new_folder(folder) as made:
        made.mkdir()
        write_text(made / WRITTEN, json_lines(rows))
        write_text(made / RESULTS, json.dumps(results, indent=2))


def megabytes(translator: Translator) -> float:
    """The size of the weights; in an ensemble, of all models."""
    engine = translator.engine
    if hasattr(engine, "directory"):  # CTranslate2
        return (engine.directory / "model.bin").stat().st_size / 1e6
    return sum(model.get_memory_footprint(return_buffers=False) for model in (engine.model, *engine.others)) / 1e6


def write_report(output_dir: Path, teachers: list[str], texts: dict[str, int], forms: list[str]):
    """Writes the report in Markdown, made from the folders of the steps, and prints it.

    `teachers` may also be files with translations; `texts` has numbers of texts by what they are; `forms` are the
    folders of the converted students.
    """
    files = (Path(PAIRS, COUNTS), Path(STUDENT, "all_results.json"), Path(EVALUATION, RESULTS))
    pairs, student, results = (json.loads((output_dir / file).read_text(encoding="utf-8")) for file in files)
    counts = [*texts.items(), ("pairs", pairs["pairs"])]
    counts += [(f"- {RULES[rule]}", -dropped["count"]) for rule, dropped in pairs["dropped"].items()]
    counts += [("held out to score the student", -pairs["held_out"])] if pairs["held_out"] else []
    counts += [("pairs to train on", pairs["train"])]
    examples = [(rule, one["source"], one["target"]) for rule, one in pairs["dropped"].items()]
    sizes = [(form, f"{folder_size(output_dir / form):,.1f}") for form in forms]
    parts = [
        f"# A student of {', '.join(teachers)}",
        table(["texts and pairs", "number"], [(name, f"{number:,}") for name, number in counts]),
        *([table(["left out", "for example", "translated as"], examples)] if examples else []),
        f"The student has {student['num_parameters']:,} parameters. It was trained for {student['train_steps']:,} "
        f"steps in {student['train_runtime'] / 60:,.1f} minutes; `student/recipe.yaml` has every option.",
        *([AGREEMENT] if pairs["held_out"] else []),
        results_table(results),
        *([table(["converted to", "MB, all files"], sizes)] if sizes else []),
    ]
    file, text = output_dir / REPORT, "\n\n".join(parts) + "\n"
    write_text(file, text)
    print(f"\n{text}\nThis report is {file}.")


def table(head: list[str], rows: list[tuple]) -> str:
    """A table in Markdown; texts are shortened, and on one line."""
    cells = [[html.escape(" ".join(str(cell).split())[:100]).replace("|", "\\|") for cell in row] for row in rows]
    align = ["right" if name in NUMBERS else "left" for name in head]
    return tabulate(cells, head, "github", disable_numparse=True, colalign=align)


def folder_size(folder: Path) -> float:
    """Of all files, in MB."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
