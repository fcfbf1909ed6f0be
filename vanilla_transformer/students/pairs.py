"""The pairs that a student learns from: collected from the translations, filtered, and written for train.py."""

import json
from pathlib import Path
from typing import NamedTuple

from ..data.splits import point_of
from ..errors import UserError
from ..files import new_folder, write_text
from ..training.processes import run_on_main
from .filtering import Filter, Pair
from .groups import read_groups, translate_groups
from .options import DistillOptions
from .steps import COUNTS, PAIRS, ROUND_TRIP, TEST, TRAIN, TRANSLATIONS, json_lines
from .translating import Teacher

MOST_HELD_OUT, SHARE_HELD_OUT = 1000, 0.05  # of the sources: a twentieth, but no more than so many


class TextsToLearn(NamedTuple):
    """The texts that a distillation begins with.

    Attributes:
        sources: Distinct texts to translate or, if there are `translations`, one for each line of these.
        translations: For each file of `--translations`, its lines.
        counts: Numbers of texts for the report, by what they are.
    """

    sources: list[str]
    translations: list[list[str]]
    counts: dict[str, int]


def make_pairs(
    options: DistillOptions, texts: TextsToLearn, teachers: list[Teacher], back: Teacher | None, hold_out: bool
):
    """Collects and filters the pairs, and writes them as [`write_pairs`] does. All processes call it together.

    `back` is the model of `--round_trip`. Raises UserError if no pair is left.
    """
    folder = options.output_dir
    found = Filter(collect(folder, texts, len(teachers)))
    found.apply(options.keep or (), options.min_score)
    if back:
        targets = [pair.target for pair in found.pairs]
        translate_groups(folder / ROUND_TRIP, targets, "Translating back", back)
        returned = [candidates[0][0] for candidates in read_groups(folder / ROUND_TRIP, len(targets))]
        found.apply_round_trip(returned, options.min_round_trip)
    run_on_main(write_pairs, folder / PAIRS, found, hold_out)


def collect(output_dir: Path, texts: TextsToLearn, teachers: int) -> list[Pair]:
    """All pairs, in the order of the sources; those of one source begin with the best of the first teacher."""
    sources = texts.sources
    given = [[[(text, None)] for text in lines] for lines in texts.translations]
    given += [read_groups(output_dir / TRANSLATIONS / str(number), len(sources)) for number in range(teachers)]
    return [
        Pair(source, text, score)
        for source, *by_teacher in zip(sources, *given, strict=True)
        for candidates in by_teacher
        for text, score in candidates
    ]


def write_pairs(folder: Path, found: Filter, hold_out: bool):
    """Writes the pairs to train on and the counts of the filter to a new folder.

    With `hold_out`, a hash chooses some sources: the best pair of each becomes the test set, and none is trained on.
    """
    points = [point_of(pair.source) for pair in found.pairs]
    best = dict(reversed([*zip(points, found.pairs, strict=True)]))  # the first of each source
    count = min(MOST_HELD_OUT, max(1, int(SHARE_HELD_OUT * len(best)))) if hold_out else 0
    held_out = {point: best[point] for point in sorted(best)[:count]}
    train = [pair for point, pair in zip(points, found.pairs, strict=True) if point not in held_out]
    if not train:
        raise UserError(f"{found.count:,} pairs leave none to train on; give more texts.")
    counts = {"pairs": found.count, "train": len(train), "held_out": len(held_out), "dropped": found.dropped}
    with new_folder(folder) as made:
        made.mkdir()
        for name, pairs in {TRAIN: train, TEST: held_out.values()}.items():
            if pairs:
                rows = ({"source": pair.source, "target": pair.target} for pair in pairs)
                write_text(made / name, json_lines(rows))
        write_text(made / COUNTS, json.dumps(counts, indent=2, ensure_ascii=False))
