"""Texts are translated in groups, which are the same wherever a run was stopped."""

import json
import warnings
from collections.abc import Callable

import pytest
from helpers import TEXTS

from vanilla_transformer.students import groups
from vanilla_transformer.students.groups import read_groups, translate_groups


class Upper:
    """A teacher that writes capital letters; `look` is told the texts of each group, and its number."""

    def __init__(self, look: Callable[[list[str], int], None] = lambda texts, group: None):
        self.look, self.opened = look, 0

    def open(self):
        self.opened += 1

    def candidates(self, translator, texts, group):
        self.look(texts, group)
        return [[text.upper(), None] for text in texts]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(groups, "GROUP", 3)


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    """Finished groups are not translated again; if all are there, the teacher is not even loaded."""
    seen = []
    teacher = Upper(lambda texts, group: seen.append((group, texts)))
    translate_groups(tmp_path, TEXTS, "Translating", teacher)
    files = sorted(tmp_path.iterdir())
    assert [len(json.loads(file.read_text())) for file in files] == [3, 3, 1]
    files[1].unlink()
    translate_groups(tmp_path, TEXTS, "Translating", teacher)
    assert seen == [(0, TEXTS[:3]), (1, TEXTS[3:6]), (2, TEXTS[6:]), (1, TEXTS[3:6])] and teacher.opened == 2
    translate_groups(tmp_path, TEXTS, "Translating", teacher)
    assert teacher.opened == 2 and read_groups(tmp_path, len(TEXTS)) == [[text.upper(), None] for text in TEXTS]


def test_the_time_that_is_left_is_shown_in_a_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(groups, "SECONDS", 0)
    translate_groups(tmp_path, TEXTS, "Translating", Upper())
    first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Translating: 3 of 7 texts, 00:0") and last == "Translating: 7 of 7 texts, 00:00 left"


def test_only_the_warning_of_unknown_characters_is_not_repeated(tmp_path):
    unknown, other = "has characters that the tokenizer does not know", "is odd"

    def warn(texts, group):
        for what in (unknown, other):
            warnings.warn(f"{group} {what}", stacklevel=1)

    with pytest.warns(UserWarning) as shown:
        translate_groups(tmp_path, TEXTS, "Translating", Upper(warn))
    assert [str(one.message) for one in shown] == [f"0 {unknown}", *(f"{group} {other}" for group in range(3))]


def test_an_error_names_the_texts(tmp_path):
    with pytest.raises(ZeroDivisionError) as failure:
        translate_groups(tmp_path, TEXTS, "Translating", Upper(lambda texts, group: 1 / (1 - group)))
    assert failure.value.__notes__ == ["while translating texts 4 to 6"]
