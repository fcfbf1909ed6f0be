"""The languages of options and models must not contradict each other."""

import json
import shutil
from pathlib import Path

import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.students.languages import differ, with_languages
from vanilla_transformer.students.options import DistillOptions
from vanilla_transformer.students.training import training_words


@pytest.fixture
def models(folder, tmp_path, monkeypatch) -> Path:
    """The current directory, with models that note their languages: en-de, de-en and none."""
    monkeypatch.chdir(tmp_path)
    for name in ("en-de", "de-en", "none"):
        shutil.copytree(folder, name)
    for source, target in ("en", "de"), ("de", "en"):
        notes = {"source_lang": source, "target_lang": target}
        Path(f"{source}-{target}", "all_results.json").write_text(json.dumps(notes))
    return tmp_path


def languages(*teachers: str, rest: tuple[str, ...] = (), **more) -> tuple:
    options = DistillOptions(Path("out"), teacher=[*teachers], source_file=["x"], **more)
    data = with_languages(options, rest, *training_words(options, rest))[1].data
    return data.source_lang, data.target_lang


def test_a_student_has_the_languages_that_its_teacher_notes(models):
    assert languages("en-de") == languages("none", "en-de", round_trip="de-en") == ("en", "de")
    assert languages("none") == (None, None)
    assert languages("none", rest=("--source_lang", "fr", "--target_lang", "it")) == ("fr", "it")
    Path("true.tsv").write_text("en\tde\na\tb\n")
    assert languages("en-de", train_file=["true.tsv"]) == ("en", "de")
    Path("other.tsv").write_text("first\tsecond\na\tb\n")
    assert languages("en-de", train_file=["other.tsv"]) == (None, None)  # which train.py would not find


@pytest.mark.parametrize(
    ("teachers", "more", "message"),
    [
        (["en-de"], {"rest": ("--source_lang=fr", "--target_lang=it")}, "are for fr to it, but en-de for en to de"),
        (["en-de", "de-en"], {}, "en-de is for en to de, but de-en for de to en; give those of the same languages"),
        (["en-de"], {"round_trip": "en-de"}, "en-de is for en to de, but --round_trip en-de, backwards, for de to en"),
        (["none"], {"teacher_langs": ["en-de"]}, "--teacher_langs has no effect on none, which is bilingual"),
        (["en-de", "gone"], {}, "The directory 'gone' does not exist"),
        (["en-de"], {"round_trip": "/gone"}, "The directory '/gone' does not exist"),
    ],
)
def test_what_contradicts_is_refused(teachers, more, message, models):
    with pytest.raises(UserError, match=message):
        languages(*teachers, **more)


@pytest.mark.parametrize("code", ["nb_NO", "no", "nor", "gem"])
def test_other_names_of_a_language_do_not_differ(code):
    assert not differ(("eng_Latn", "nb"), ("en", code)) and differ(("en", code), ("de", code))
