"""The command line of train.py for a student."""

from pathlib import Path

import pytest

from vanilla_transformer.commands.distill import check_forms, step_settings
from vanilla_transformer.errors import UserError
from vanilla_transformer.students.options import DistillOptions
from vanilla_transformer.students.pairs import TextsToLearn
from vanilla_transformer.students.steps import begin
from vanilla_transformer.students.training import check_training, repeated, settings_of, training_words
from vanilla_transformer.training.recipe import Options, parse_arguments


@pytest.fixture
def out(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("true.tsv", "dev.tsv", "test.tsv"):
        Path(name).write_text("source\ttarget\na\tb\n")
    return Path("out")


def asked(*rest: str, **options) -> Options:
    given = DistillOptions(Path("out"), **options)
    _, found = training_words(given, rest)
    check_training(given, found)
    return found


def test_pairs_are_joined_and_sizes_are_chosen(out):
    found = asked("--hours", "0.5", "--test_file", "test.tsv", train_file=["true.tsv"])
    assert found.data.train_file == ["out/pairs/train.jsonl", "true.tsv"] and found.data.test_file == ["test.tsv"]
    assert found.training.output_dir == Path("out/student") and found.data.remove_overlap
    assert (found.data.tokenizer_type, found.model.position_embedding_type) == ("unigram", "marian")
    assert {"d_model", "vocab_size", "max_steps"} <= found.free and "letters" not in found.free
    assert asked().data.test_file == ["out/pairs/test.jsonl"]


def test_the_users_options_win(out):
    found = asked("--tokenizer-type=bpe", "--position_embedding_type", "rotary", "--remove_overlap", "false")
    assert (found.data.tokenizer_type, found.model.position_embedding_type) == ("bpe", "rotary")
    assert not found.data.remove_overlap
    assert asked("--letters").data.tokenizer_type == "bpe"
    assert asked("--report_to", "all", "--run_name", "streaming").data.remove_overlap  # a value, not an option
    Path("recipe.yaml").write_text("d_model: 64\nnum_beams: 4\n")
    found = asked("--config", "recipe.yaml")
    assert found.model.d_model == 64 and found.training.num_beams == 4 and found.data.tokenizer_type == "bpe"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (["--hours", "1", "--max_steps", "5"], "--hours has no effect with --max_steps"),
        (["--learning_rat", "1"], "--learning_rat is not an option; did you mean --learning_rate?"),
        (["--validation_file", "none.tsv"], "none.tsv does not exist"),
        (["--dry_run"], "--dry_run is an option of train.py alone"),
        (["--resume-from-checkpoint"], "--resume_from_checkpoint is an option of train.py alone"),
        (["--dataset_name", "x"], "--dataset_name and --train_file are both given"),
    ],
)
def test_what_train_py_would_refuse_is_refused_at_once(rest, message, out):
    with pytest.raises(UserError, match=message):
        asked(*rest)


def test_forms_that_a_student_cannot_have_are_refused(out):
    """Before anything is translated."""
    check_forms(["vanilla", "ctranslate2", "onnx", "marian-bin"], asked())
    check_forms(["native"], asked("--position_embedding_type=sinusoidal", "--encoder_attention_heads=3"))
    with pytest.raises(UserError, match="--to native is .*: `position_embedding_type='marian'`"):
        check_forms(["native"], asked())
    with pytest.raises(UserError, match="--to marian-bin needs --tokenizer_type unigram"):
        check_forms(["marian-bin"], asked("--tokenizer_type", "bpe"))
    with pytest.raises(UserError, match="--to marian-bin is .*: `position_embedding_type='rotary'`"):
        check_forms(["marian-bin"], asked("--position_embedding_type", "rotary"))


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (["--d_model", "7"], "No such student can be made: `d_model` is 7; sinusoidal positions need an even number"),
        (["--d_model=64", "--encoder_attention_heads=5"], "`d_model` is 64 and `encoder_attention_heads` is 5"),
        (["--vocab_size", "10"], "--vocab_size is 10; it must be at least"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_at_once(rest, message, out):
    with pytest.raises(UserError, match=message):
        check_forms([], asked(*rest))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_other_content_of_a_file_of_the_user_is_noticed(split, out):
    """Also by a step that was begun, which it names."""
    files = ["--validation_file", "dev.tsv", "dev.tsv", "--test_file", "test.tsv"]
    given = DistillOptions(out, train_file=["true.tsv"], to=[])

    def settings() -> dict:
        return step_settings(given, training_words(given, files)[1], TextsToLearn([], [], {}), [])

    begin(out, before := settings(), {})
    (out / "student").mkdir()
    begin(out, settings(), {})
    Path({"train": "true.tsv", "validation": "dev.tsv", "test": "test.tsv"}[split]).write_text(
        "source\ttarget\na\tc\n"
    )
    with pytest.raises(UserError, match=f"other options: the content of --{split}_file. .* remove out/student to rep"):
        begin(out, after := settings(), {})
    assert {step for step in before if before[step] != after[step]} == {"student", "evaluation"}


def test_what_was_chosen_is_repeated_from_the_recipe(out):
    """With what a recipe lacks."""
    rest = ["--push_to_hub", "--hub_model_id", "me/x", "--metrics", "rouge", "--max_steps", "5"]
    found = asked(*rest)
    assert repeated(["--hours", "1"], found) == ["--hours", "1"]
    (out / "student").mkdir(parents=True)
    (out / "student" / "recipe.yaml").write_text("d_model: 64\nmax_steps: 5\nmetrics: [rouge]\n")
    again = repeated(["--hours", "1"], found)
    assert again == [
        "--config",
        "out/student/recipe.yaml",
        "--output_dir=out/student",
        "--hub_model_id=me/x",
        "--push_to_hub=True",
        *("--test_file", "out/pairs/test.jsonl", "--train_file", "out/pairs/train.jsonl", "--metrics", "rouge"),
    ]
    repeats = parse_arguments(again)
    assert repeats.model.d_model == 64 and repeats.training.push_to_hub and not repeats.free
    settings = settings_of(found)
    assert settings["max_steps"] == 5 and not {"push_to_hub", "teacher", "num_beams"} & settings.keys()
    assert {"size", "hours"} <= settings.keys()
