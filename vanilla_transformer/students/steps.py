"""The directory of a distillation: which of its steps were begun, and with which options."""

import json
from collections.abc import Collection
from pathlib import Path

from ..errors import UserError
from ..files import remove_unfinished, write_text

SETTINGS = "settings.json"
DESCRIPTIONS = {
    "texts": "the texts of --source_file or --translations",
    "scores": "whether scores are kept for --min_score: it was {}, it is {}",
}


def begin(output_dir: Path, settings: dict[str, dict], reads: dict[str, Collection[str]]) -> set[str]:
    """Makes the directory, notes the `settings` of each step, and removes what a killed program was writing.

    A step has the name of the folder that it writes, and comes after those that it `reads`. Returns the steps whose
    folder is there. Raises UserError if one of these was made with other settings, or from a folder that is no longer
    there; or if the directory is that of something else.
    """
    file = output_dir / SETTINGS
    if output_dir.exists() and not (output_dir.is_dir() and (file.exists() or not any(output_dir.iterdir()))):
        raise UserError(f"--output_dir {output_dir} holds something else; choose another directory.")
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    settings = json.loads(json.dumps(settings, default=str))
    changed, stale = {}, []
    for step, new in settings.items():
        old = before.get(step, {})
        differing = [name for name in old | new if old.get(name) != new.get(name)]
        if differing and (output_dir / step).exists():
            stale.append(str(output_dir / step))
            changed |= {name: describe(name, old.get(name), new.get(name)) for name in differing}
    if changed:
        raise UserError(
            f"{output_dir} was begun with other options: {', '.join(changed.values())}. Restore them, remove "
            f"{' '.join(stale)} to repeat these steps, or choose another --output_dir."
        )
    missing, outdated = [step for step in settings if not (output_dir / step).exists()], []
    for step in settings:
        if step not in missing and {*missing, *outdated}.intersection(reads.get(step, ())):
            outdated.append(step)
    if outdated:
        first = next(step for step in missing if step in reads[outdated[0]])
        raise UserError(
            f"{output_dir / first} is missing, from which others were made; to repeat this step, remove these too: "
            f"{' '.join(str(output_dir / step) for step in outdated)}."
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    for folder in (output_dir, *output_dir.glob("translations/*/"), output_dir / "round_trip"):
        remove_unfinished(folder)
    write_text(file, json.dumps(before | settings, indent=2))
    return settings.keys() - missing


def describe(name: str, old, new) -> str:
    """How a setting changed, in words."""
    as_words = (" ".join(map(str, value)) if isinstance(value, list) else value for value in (old, new))
    return DESCRIPTIONS.get(name, f"--{name} was {{}}, now {{}}").format(*as_words)
