"""The pairs that a student learns from: collected from what teachers wrote, filtered, and written for train.py."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from accelerate import PartialState

from ..data.splits import point_of
from ..errors import UserError
from ..files import new_folder
from ..training.processes import run_on_main
from .filtering import COLUMNS, Filter, Pair
from .groups import read_groups, translate_groups
from .options import DistillOptions
from .translating import Teacher

HELD_OUT, HELD_OUT_SHARE = 1000, 0.05  # at most so many sources, and this share of them


class TextsToLearn(NamedTuple):
    """The texts of a distillation.

    Attributes:
        sources: Distinct ones that a teacher translates, or else those of `translations`.
        translations: Of files, one list of as many texts as `sources` each.
        counts: Their numbers, by what they are, for the report.
    """

    sources: list[str]
    translations: list[list[str]]
    counts: dict[str, int]


def make_pairs(
    options: DistillOptions, texts: TextsToLearn, teachers: list[Teacher], back: Teacher | None, hold_out: bool
):
    """Filters all pairs, and writes them to the folder `pairs`, on all processes together.

    Args:
        back: The model of `--round_trip`.
        hold_out: As in [`write_pairs`].

    Raises UserError if no pair is left.
    """
    folder, found = options.output_dir, Filter([])
    if back or PartialState().is_main_process:
        found = Filter(collect(folder, texts, len(teachers)))
    if back:
        found.apply(options.keep or (), options.min_score)
        targets = [pair.target for pair in found.pairs]
        translate_groups(folder / "round_trip", targets, "Translating back", back.load)
        returned = [candidates[0][0] for candidates in read_groups(folder / "round_trip", len(targets))]
        found.apply_round_trip(returned, options.min_round_trip)

    def write():
        if not back:
            found.apply(options.keep or (), options.min_score)
        write_pairs(folder / "pairs", found, hold_out)

    run_on_main(write)


def collect(output_dir: Path, texts: TextsToLearn, teachers: int) -> list[Pair]:
    """All pairs, in the order of the sources; of one source, the best translation of the first teacher comes first."""
    if not teachers:
        return [
            Pair(source, text)
            for source, *some in zip(texts.sources, *texts.translations, strict=True)
            for text in some
        ]
    folders = (output_dir / "translations" / str(number) for number in range(teachers))
    found = [read_groups(folder, len(texts.sources)) for folder in folders]
    return [
        Pair(source, text, score)
        for source, *by_teacher in zip(texts.sources, *found, strict=True)
        for candidates in by_teacher
        for text, score in candidates
    ]


def write_pairs(folder: Path, found: Filter, hold_out: bool):
    """Writes the pairs to train on, `train.jsonl`, and what was left out, `filter.json`, to a new folder.

    If some are to be held out, `test.jsonl` has the best translation of each of some sources, which a hash chooses.
    """
    points = [point_of(pair.source) for pair in found.pairs]
    distinct = sorted(set(points))
    count = min(HELD_OUT, max(1, int(HELD_OUT_SHARE * len(distinct)))) if hold_out else 0
    held_out = dict.fromkeys(distinct[:count])
    train = []
    for point, pair in zip(points, found.pairs, strict=True):
        if point not in held_out:
            train.append(pair)
        elif held_out[point] is None:
            held_out[point] = pair
    if not train:
        raise UserError(f"{found.count:,} pairs leave none to train on; give more texts.")
    counts = {"pairs": found.count, "train": len(train), "held_out": len(held_out), "dropped": found.dropped}
    with new_folder(folder) as made:
        made.mkdir()
        (made / "train.jsonl").write_text("".join(rows(train)), encoding="utf-8")
        if held_out:
            (made / "test.jsonl").write_text("".join(rows(held_out.values())), encoding="utf-8")
        (made / "filter.json").write_text(json.dumps(counts, indent=2, ensure_ascii=False), encoding="utf-8")


def rows(pairs: Collection[Pair]) -> Iterator[str]:
    """The lines of a .jsonl file with the pairs."""
    return (json.dumps({name: getattr(pair, name) for name in COLUMNS}, ensure_ascii=False) + "\n" for pair in pairs)
