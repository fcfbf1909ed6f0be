"""A directory is only gone on with if its steps were begun with the same options."""

import json
from pathlib import Path

import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.students.steps import begin

SETTINGS = {"translations": {"num_beams": 5, "teacher": ["a", "b"]}, "pairs": {"num_beams": 5, "min_score": None}}


def test_the_same_command_goes_on(tmp_path):
    begin(tmp_path / "out", SETTINGS, {})
    (tmp_path / "out" / "translations" / "0" / ".unfinished-x").mkdir(parents=True)
    begin(tmp_path / "out", SETTINGS, {})
    assert not [*(tmp_path / "out").rglob(".unfinished-*")]


def test_another_option_is_refused_where_it_matters(tmp_path):
    """What was not begun may change, and what is named can be removed."""
    begin(tmp_path, SETTINGS, {})
    (tmp_path / "translations").mkdir()
    begin(tmp_path, SETTINGS | {"pairs": {"num_beams": 5, "min_score": -1.0}}, {})
    (tmp_path / "pairs").mkdir()
    with pytest.raises(UserError) as refused:
        begin(tmp_path, {"translations": {"num_beams": 4, "teacher": ["a"]}, "pairs": {"num_beams": 4}}, {})
    changed = "--num_beams was 5, now 4; --teacher was a b, now a; --min_score was -1.0, now None"
    assert str(refused.value) == (
        f"{tmp_path} was begun with other options: {changed}. Restore them, remove {tmp_path}/translations "
        f"{tmp_path}/pairs to repeat these steps, or choose another --output_dir."
    )
    (tmp_path / "pairs").rmdir()
    begin(tmp_path, SETTINGS, {})
    assert json.loads((tmp_path / "distill.json").read_text()) == SETTINGS


def test_what_was_made_from_a_removed_folder_must_be_removed_too(tmp_path):
    settings = {step: {} for step in ("translations", "pairs", "student", "native", "evaluation")}
    reads = {"student": ["pairs"], "native": ["student"], "evaluation": ["student", "native"]}
    begin(tmp_path, settings, reads)
    for step in settings:
        (tmp_path / step).mkdir()
    (tmp_path / "translations").rmdir()
    begin(tmp_path, settings, reads)
    (tmp_path / "pairs").rmdir()
    with pytest.raises(UserError) as refused:
        begin(tmp_path, settings, reads)
    assert str(refused.value) == (
        f"{tmp_path}/pairs is missing, from which others were made; to repeat this step, remove these too: "
        f"{tmp_path}/student {tmp_path}/native {tmp_path}/evaluation."
    )
    for step in ("student", "native", "evaluation"):
        (tmp_path / step).rmdir()
    begin(tmp_path, settings, reads)


def test_a_run_that_was_killed_before_its_settings_may_start_again(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".unfinished-x").mkdir()
    begin(tmp_path, SETTINGS, {})
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "distill.json"}


def test_a_directory_may_be_moved_and_named_otherwise(tmp_path, monkeypatch):
    def settings(out: Path) -> dict:
        return {"student": {"output_dir": out / "student", "train_file": [f"{out}/pairs/train.jsonl", "true.tsv"]}}

    monkeypatch.chdir(tmp_path)
    begin(Path("out"), settings(Path("out")), {})
    Path("out/student").mkdir()
    begin(tmp_path / "out", settings(tmp_path / "out"), {})
    Path("out").rename("other")
    begin(Path("other"), settings(Path("other")), {})
    noted = json.loads(Path("other", "distill.json").read_text(encoding="utf-8"))
    assert noted == {"student": {"output_dir": "student", "train_file": ["pairs/train.jsonl", "true.tsv"]}}


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(UserError, match="holds something else; choose another directory"):
            begin(folder, SETTINGS, {})
    (tmp_path / "notes.txt").rename(tmp_path / "settings.json")  # which editors have, too
    with pytest.raises(UserError, match="holds something else; choose another directory"):
        begin(tmp_path, SETTINGS, {})


@pytest.mark.parametrize("content", ["[]", "{"])
def test_damaged_settings_are_named(content, tmp_path):
    (tmp_path / "distill.json").write_text(content)
    with pytest.raises(UserError, match=f"^{tmp_path}/distill.json is damaged: .*; choose another --output_dir"):
        begin(tmp_path, SETTINGS, {})
