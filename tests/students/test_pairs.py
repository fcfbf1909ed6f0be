"""What is written for train.py."""

import json
from pathlib import Path

import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.students.filtering import Filter, Pair
from vanilla_transformer.students.options import DistillOptions
from vanilla_transformer.students.pairs import TextsToLearn, make_pairs, write_pairs

TEXTS = [f"A dog sees the cat {'abcdefghij'[n % 10] * (n // 10 + 1)}." for n in range(60)]
PAIRS = [Pair(text, f"{text[:-1]} {again}.") for text in TEXTS for again in ("hier", "dort")]


def read(file: Path) -> list[tuple[str, str]]:
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [(row["source"], row["target"]) for row in rows]


def test_a_twentieth_of_the_sources_is_held_out_with_all_its_pairs(tmp_path):
    write_pairs(tmp_path / "pairs", Filter(PAIRS), hold_out=True)
    train, test = (read(tmp_path / "pairs" / f"{split}.jsonl") for split in ("train", "test"))
    held_out = [source for source, _ in test]
    assert len({*held_out}) == len(test) == 3 and all(target.endswith(" hier.") for _, target in test)
    assert train == [pair[:2] for pair in PAIRS if pair.source not in held_out]
    counts = json.loads((tmp_path / "pairs" / "filter.json").read_text(encoding="utf-8"))
    assert counts == {"pairs": 120, "train": 114, "held_out": 3, "dropped": {}}
    write_pairs(tmp_path / "all", Filter(PAIRS), hold_out=False)
    assert read(tmp_path / "all" / "train.jsonl") == [pair[:2] for pair in PAIRS]
    assert not (tmp_path / "all" / "test.jsonl").exists()
    with pytest.raises(UserError, match="leave none to train on"):
        write_pairs(tmp_path / "one", Filter(PAIRS[:1]), hold_out=True)
    assert not (tmp_path / "one").exists()


def test_translations_of_a_file_are_paired_with_their_lines(tmp_path):
    texts = TextsToLearn(TEXTS, [[f"{text} Ja." for text in TEXTS], [""] * len(TEXTS)], {})
    make_pairs(DistillOptions(tmp_path, translations=["x", "y"]), texts, [], None, hold_out=False)
    assert read(tmp_path / "pairs" / "train.jsonl") == [(text, f"{text} Ja.") for text in TEXTS]
    counts = json.loads((tmp_path / "pairs" / "filter.json").read_text(encoding="utf-8"))
    assert counts["dropped"]["empty"]["count"] == 60


class Back:
    """A model of --round_trip that restores the sources which have no "dort"."""

    def open(self):
        pass

    def candidates(self, translator, texts, group):
        return [[(text.replace(" hier", "").replace("dort", "anders"), None)] for text in texts]


def test_what_does_not_come_back_is_left_out(tmp_path):
    sources = [f"{text[:-1]} {again}." for text in TEXTS for again in ("", "dort")]
    texts = TextsToLearn(sources, [[f"{text[:-1]} hier." for text in sources]], {})
    options = DistillOptions(tmp_path, translations=["x"], round_trip="back", min_round_trip=99.9)
    make_pairs(options, texts, [], Back(), hold_out=False)
    assert [source for source, _ in read(tmp_path / "pairs" / "train.jsonl")] == sources[::2]
    counts = json.loads((tmp_path / "pairs" / "filter.json").read_text(encoding="utf-8"))
    first = {"source": sources[1], "target": f"{sources[1][:-1]} hier."}
    assert counts["dropped"] == {"round_trip": {"count": 60, **first}}
