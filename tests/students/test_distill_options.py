"""Options that contradict each other are refused before anything is read."""

import sys
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from vanilla_transformer.commands.distill import find_forms, read_texts
from vanilla_transformer.errors import UserError
from vanilla_transformer.students.options import DistillOptions
from vanilla_transformer.students.training import training_words

FROM_TEACHER = {"teacher": ["a", "b", "c"], "source_file": ["x"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"source_file": ["x"]}, "give either --teacher or its --translations"),
        (FROM_TEACHER | {"translations": ["y"]}, "give either --teacher or its --translations"),
        ({"teacher": ["a"]}, "--teacher needs --source_file"),
        ({"translations": ["mono.en", "llm.de"]}, "--translations mono.en llm.de is not .*; give .* as --source_file"),
        ({"translations": ["llm.de"]}, "--translations llm.de is not one file of pairs, .*; give .* as --source_file"),
        ({"translations": ["y.tsv"], "n_best": 2}, "--n_best is for a --teacher"),
        ({"translations": ["y.tsv"], "min_score": -1.0}, "--min_score needs a --teacher"),
        (FROM_TEACHER | {"samples": 3, "num_beams": 2}, "--samples draws translations, without --num_beams"),
        (FROM_TEACHER | {"n_best": 3, "num_beams": 2}, "--n_best 3 needs as many beams"),
        (FROM_TEACHER | {"min_round_trip": 50.0}, "--min_round_trip needs --round_trip"),
        (FROM_TEACHER | {"teacher_langs": ["en-de", "en-fr"]}, "--teacher_langs has 2 values; give one for each"),
        (FROM_TEACHER | {"teacher_langs": ["en"]}, "--teacher_langs has en; give source"),
    ],
)
def test_contradictions_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        DistillOptions(Path("out"), **given).check()
    DistillOptions(Path("out"), **FROM_TEACHER).check()


def test_single_values_may_be_given_as_they_are():
    HfArgumentParser(DistillOptions)  # which unwraps the types of the fields, as the command has done before
    found = DistillOptions("out", teacher="a", source_file="x", to="none")
    assert found == DistillOptions(Path("out"), teacher=["a"], source_file=["x"], to=["none"])


def test_what_has_no_effect_on_converted_teachers_is_refused(tmp_path):
    (tmp_path / "vanilla_transformer.json").touch()

    def check(*teachers, **more):
        DistillOptions(Path("out"), teacher=[str(tmp_path), *teachers], source_file=["x"], **more).check()

    for given in ({"dtype": "bfloat16"}, {"revision": "v1"}, {"samples": 2}):
        with pytest.raises(UserError, match=f"--{[*given][0]} .*{tmp_path.name}.* converted for CTranslate2"):
            check(**given)
    check("another", dtype="bfloat16", revision="v1")
    check(dtype="bfloat16", round_trip="another")


@pytest.mark.parametrize("names", [["x.tsv"], ["x.en", "x.de"]])
def test_a_missing_file_of_translations_is_named(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = DistillOptions(Path("out"), translations=names)
    options.check()
    with pytest.raises(UserError, match=f"^--translations {names[0]} does not exist"):
        read_texts(options, training_words(options, [])[1])


def test_texts_without_visible_characters_are_refused(tmp_path):
    file = tmp_path / "mono.en"
    file.write_text("\u200b\n\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"{file} has no text; give a file with one text per line"):
        read_texts(DistillOptions(Path("out"), teacher=["a"], source_file=[str(file)]), None)


def test_forms_are_those_of_convert():
    assert find_forms(["none"]) == [] and find_forms(["native", "vanilla", "native"]) == ["native", "vanilla"]
    with pytest.raises(UserError, match="--to marble is not a form; choose among vanilla, native"):
        find_forms(["marble"])


def test_packages_that_a_form_needs_are_named(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    assert find_forms(None) == []
    with pytest.raises(UserError, match="--to marian-bin needs `pip install sentencepiece protobuf`"):
        find_forms(["marian-bin"])
