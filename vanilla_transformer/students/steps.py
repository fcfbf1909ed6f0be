"""The directory of a distillation: its folders, each written by a step, and the options of each step."""

import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from ..errors import UserError, explaining
from ..files import PREFIX, remove_unfinished, write_text
from ..training.run_folder import LOCK

SETTINGS, REPORT = "distill.json", "report.md"  # the first marks a directory as one of these
TRANSLATIONS, ROUND_TRIP, PAIRS, STUDENT, EVALUATION = "translations", "round_trip", "pairs", "student", "evaluation"
TRAIN, TEST, COUNTS = "train.jsonl", "test.jsonl", "filter.json"  # in PAIRS
WRITTEN, RESULTS = "translations.jsonl", "results.json"  # in EVALUATION
DESCRIPTIONS = {
    "texts": "the texts of --source_file or --translations",
    "train_content": "the content of --train_file",
    "validation_content": "the content of --validation_file",
    "test_content": "the content of --test_file",
    "scores": "--min_score, for which translations are scored",
}


def begin(output_dir: Path, settings: dict[str, dict], reads: dict[str, Collection[str]]):
    """Makes the directory, notes the `settings` of each step, and removes what a killed run has left unfinished.

    A step has the name of its folder, and comes after those that it `reads`. Raises UserError if a folder was made
    with other settings, or from one that is no longer there; or if the directory is that of something else.
    """
    check_directory(output_dir)
    file = output_dir / SETTINGS
    with explaining(f"{file} is damaged", ValueError, TypeError, remedy="choose another --output_dir"):
        before = {} | json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    here = json.dumps(f"{output_dir}{os.sep}").removesuffix('"')  # a directory may be moved, or be named otherwise
    settings = json.loads(json.dumps(settings, default=str).replace(here, '"'))
    made, changed, stale = [step for step in settings if (output_dir / step).exists()], {}, []
    for step in made:
        old, new = before.get(step, {}), settings[step]
        if differing := [name for name in old | new if old.get(name) != new.get(name)]:
            stale.append(str(output_dir / step))
            changed |= {name: describe(name, old.get(name), new.get(name)) for name in differing}
    if changed:
        raise UserError(
            f"{output_dir} was begun with other options: {'; '.join(changed.values())}. Restore them, remove "
            f"{' '.join(stale)} to repeat these steps, or choose another --output_dir."
        )
    check_order(output_dir, made, settings.keys() - made, reads)
    output_dir.mkdir(parents=True, exist_ok=True)
    for folder in (output_dir, *output_dir.glob(f"{TRANSLATIONS}/*/"), output_dir / ROUND_TRIP):
        remove_unfinished(folder)
    write_text(file, json.dumps(before | settings, indent=2))


def check_directory(output_dir: Path):
    """Raises UserError if the directory is that of something else.

    It may be empty but for a lock and unfinished files, with which a run was killed before it wrote its settings.
    """
    if not output_dir.exists() or (output_dir / SETTINGS).exists():
        return
    if not output_dir.is_dir() or any(not path.name.startswith((LOCK, PREFIX)) for path in output_dir.iterdir()):
        raise UserError(f"--output_dir {output_dir} holds something else; choose another directory.")


def check_order(output_dir: Path, made: list[str], missing: Collection[str], reads: dict[str, Collection[str]]):
    """Raises UserError if a step that was `made` depends, directly or through others, on one that is missing."""
    outdated = []
    for step in made:
        outdated += [step] if {*missing, *outdated}.intersection(reads.get(step, ())) else []
    if outdated:
        first = next(step for step in reads[outdated[0]] if step in missing)
        raise UserError(
            f"{output_dir / first} is missing, from which others were made; to repeat this step, remove these too: "
            f"{' '.join(str(output_dir / step) for step in outdated)}."
        )


def describe(name: str, old, new) -> str:
    """How a setting changed, in words."""
    as_words = (" ".join(map(str, value)) if isinstance(value, list) else value for value in (old, new))
    return DESCRIPTIONS.get(name, f"--{name} was {{}}, now {{}}").format(*as_words)


def json_lines(rows: Iterable[dict]) -> str:
    """The content of a .jsonl file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
