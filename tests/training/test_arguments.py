"""Options of train.py: defaults, recipes, the command line, and the errors about them."""

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.arguments import (
    NOT_OPTIONS,
    SAMPLE_RECIPE,
    make_parser,
    model_fields,
    parse_arguments,
    recipe_to_yaml,
    resolved_recipe,
)

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path):
    """recipe(text) -> the command line that reads it."""

    def write(text: str) -> list[str]:
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        return ["--config", str(tmp_path / "recipe.yaml")]

    return write


def refusal(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        parse_arguments(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --------------------------------------------------------------------------------------------- where options come from


def test_default_is_the_sample_recipe():
    args = parse_arguments([])
    assert vars(args) == vars(parse_arguments(["--config", str(SAMPLE_RECIPE)])) | {"config": args.config}
    assert (args.dataset_name, args.source_lang, args.target_lang) == ("sample_dataset", "en", "de")
    assert args.d_model == 128


def test_value_equal_to_an_option_name_overrides_nothing(tmp_path):
    (tmp_path / "r.yaml").write_text("dataset_name: x\ndataset_config_name: y\n")
    assert parse_arguments(["--config", str(tmp_path / "r.yaml"), "--output_dir", "train_file"]).dataset_name == "x"


def test_sample_recipe_needs_its_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"run from {SAMPLE_RECIPE.parents[1]}, or say what"):
        parse_arguments(["--max_steps=3"])
    parse_arguments(["--dataset_name=x"])


@pytest.mark.parametrize("given", ["--seed=7", "--d_model=64"])
def test_option_overrides_the_sample_recipe(given):
    name, value = given.removeprefix("--").split("=")
    assert vars(parse_arguments([given])) == vars(parse_arguments([])) | {name: int(value)}


@pytest.mark.parametrize("given", [["--dataset_name=x"], ["--train_file=x.csv"]])
def test_own_data_disables_the_sample_recipe(given):
    args = parse_arguments(given)
    assert args.config is None and args.source_lang is None and args.warmup_steps == 4000
    assert model_fields(args) == {}  # the config's own defaults, the paper's base model


def test_command_line_overrides_the_recipe(recipe):
    argv = recipe("dataset_name: x\nd_model: 64\nnorm_first: true\nstreaming: true\nmax_steps: 5\nseed: 1\n")
    args = parse_arguments(
        [*argv, "--d_model", "32", "--norm_first", "false", "--streaming=False", "--dataset_name", "y"]
    )
    assert (args.d_model, args.norm_first, args.streaming, args.dataset_name) == (32, False, False, "y")
    assert (args.max_steps, args.seed) == (5, 1)
    assert parse_arguments(["--d_model", "32", *argv]).d_model == 32  # on either side of --config


@pytest.mark.parametrize(
    "text, value",
    [("5e-4", 5e-4), ("5.0e-4", 5e-4), ("0.0005", 5e-4), ("1", 1.0), ("'2e-3'", 2e-3), ("2E-3", 2e-3), ("", None)],
)
def test_numbers_in_a_recipe(recipe, text, value):
    """YAML 1.1, which PyYAML reads, takes 5e-4 for a string."""
    assert parse_arguments(recipe(f"dataset_name: x\nlearning_rate: {text}\n")).learning_rate == value


@pytest.mark.parametrize("text, value", [("true", True), ("false", False), ("True", True), ("no", False)])
def test_switches_in_a_recipe(recipe, text, value):
    switches = ["norm_first", "torch_compile", "gradient_checkpointing", "dry_run"]
    args = parse_arguments(recipe("dataset_name: x\n" + "".join(f"{name}: {text}\n" for name in switches)))
    assert [getattr(args, name) for name in switches] == [value] * 4


def test_language_no_in_a_recipe_is_not_a_boolean(recipe):
    """Read as `no`, or refused with a hint to quote it, but never taken for `False`."""
    try:
        args = parse_arguments(recipe("dataset_name: x\nsource_lang: no\ntarget_lang: de\n"))
    except UserError as error:
        assert "source_lang" in str(error)
    else:
        assert args.source_lang == "no"


@pytest.mark.parametrize("given, value", [([], None), (["--norm_first"], True), (["--norm_first", "false"], False)])
def test_switches_on_the_command_line(given, value):
    assert parse_arguments(["--dataset_name=x", *given]).norm_first is value


@pytest.mark.parametrize(
    "given, value",
    [([], None), (["--resume_from_checkpoint"], "newest"), (["--resume_from_checkpoint", "out/checkpoint-5"], None)],
)
def test_resume_option_takes_an_optional_value(given, value):
    expected = value if value or not given else given[1]
    assert parse_arguments([*given, "--dataset_name=x"]).resume_from_checkpoint == expected


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "unknown, closest",
    [
        (["--d_modl", "64"], "--d_model"),
        (["--d_modl=64"], "--d_model"),
        (["--learing_rate", "1"], "--learning_rate"),
        (["--dropot", "0.1"], "--dropout"),
        (["--per_device_train_batch_size", "1"], "--per_device_train_max_tokens"),
    ],
)
@pytest.mark.parametrize("before", [[], ["--dataset_name", "x"], ["--config", str(SAMPLE_RECIPE)]])
def test_unknown_option_names_the_closest(unknown, closest, before):
    message = refusal([*before, *unknown])
    assert message == f"{unknown[0]} is not an option; did you mean {closest}?"


def test_options_cannot_be_abbreviated():
    assert "--learning is not an option" in refusal(["--learning", "1"])


def test_unknown_option_without_a_close_one():
    assert refusal(["--xyzzy", "1"]) == "--xyzzy is not an option; --help lists all options."


def test_unknown_recipe_key_names_the_closest(recipe):
    argv = recipe("dataset_name: x\nwarmup_step: 100\n")
    message = refusal(argv)
    assert "'warmup_step'" in message and argv[1] in message and "did you mean warmup_steps?" in message


@pytest.mark.parametrize("key", ["config", "xyzzy", "pad_token_id", "3", "d-model-size"])
def test_recipe_key_that_is_not_an_option(recipe, key):
    assert f"'{key.replace('-', '_')}'" in refusal(recipe(f"{key}: 1\n"))


@pytest.mark.parametrize(
    "text, parts",
    [
        ("d_model: wide\n", ["d_model", "wide"]),
        ("d_model: 12.5\n", ["d_model", "12.5"]),
        ("learning_rate: fast\n", ["learning_rate", "fast"]),
        ("norm_first: perhaps\n", ["norm_first", "perhaps"]),
        ("lr_scheduler_type: sinus\n", ["lr_scheduler_type", "sinus", "inverse_sqrt"]),
        ("position_embedding_type: none\n", ["position_embedding_type", "none", "sinusoidal", "rotary"]),
        ("on_divergence: retry\n", ["on_divergence", "retry", "stop", "ignore"]),
        ("metric_for_best_model: meteor\n", ["metric_for_best_model", "meteor", "bleu", "chrf", "loss"]),
        ("average_checkpoints_by: best\n", ["average_checkpoints_by", "best", "last", "score"]),
        ("per_device_train_max_tokens: many\n", ["--per_device_train_max_tokens is many", "auto"]),
        ("per_device_train_max_tokens: 5e3\n", ["--per_device_train_max_tokens is 5e3", "auto"]),
        ("dropout: [0.1, 0.2]\n", ["dropout", "single value", "not a list"]),
        ("dropout: {encoder: 0.1}\n", ["dropout", "single value"]),
        ("dropout: [0.1\n", ["cannot be read", "recipe.yaml"]),
        ("a: b: c\n", ["cannot be read", "recipe.yaml"]),
        ("- d_model\n", ["recipe.yaml", "option: value"]),
        ("just text\n", ["recipe.yaml", "option: value"]),
        ("", ["recipe.yaml", "option: value"]),
    ],
)
def test_wrong_values_and_broken_recipes_are_rejected(recipe, text, parts):
    message = refusal(recipe(text))
    assert all(part in message for part in parts), message


def test_duplicate_recipe_key_is_rejected(recipe):
    assert "'seed' is given twice" in refusal(recipe("dataset_name: x\nseed: 1\nseed: 2\n"))


def test_nested_aliases_are_rejected_without_expanding_them(recipe):
    """Expanded, they would be 10^30 items."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    inner = "\n".join(f"  {line}" for line in lines)
    assert "'dropout'" in refusal(recipe(f"dropout:\n{inner}\n"))


def test_unreadable_recipe_is_named(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"d_model: \xff\xfe\x00")
    for name in ["binary.yaml", "missing.yaml", "."]:
        assert str(tmp_path / name) in refusal(["--config", str(tmp_path / name)])


@pytest.mark.parametrize(
    "given",
    [
        "max_steps=0",
        "max_steps=-1",
        "eval_steps=0",
        "save_steps=0",
        "logging_steps=0",
        "save_total_limit=0",
        "num_beams=0",
        "gradient_accumulation_steps=0",
        "per_device_train_max_tokens=0",
        "per_device_eval_max_tokens=-5",
        "max_source_length=0",
        "max_target_length=0",
        "max_train_samples=0",
        "early_stopping_patience=0",
        "learning_rate=-0.1",
        "learning_rate=nan",
        "warmup_steps=-1",
        "weight_decay=-1",
        "max_grad_norm=-1",
        "average_checkpoints=-1",
        "seed=-1",
        "label_smoothing_factor=1",
        "label_smoothing_factor=-0.1",
        "ema_decay=1",
        "num_train_epochs=0",
        "num_train_epochs=nan",
        "validation_split_percentage=0",
        "validation_split_percentage=100",
        "adam_beta1=1",
        "adam_beta2=-0.5",
        "adam_epsilon=-1",
        "learning_rate=inf",
        "preprocessing_num_workers=-1",
        "dataloader_num_workers=-1",
        "max_eval_samples=0",
        "max_predict_samples=0",
        "bpe_dropout=1",
        "bpe_dropout=-0.1",
        "bpe_dropout=nan",
        "r_drop_alpha=-1",
        "r_drop_alpha=inf",
        "ema_decay=-0.5",
        "length_penalty=nan",
        "seed=9223372036854775808",
    ],
)
def test_number_out_of_range_is_rejected(given, recipe):
    name, value = given.split("=")
    for argv in [[f"--{given}"], recipe(f"{name}: {value}\n")]:
        message = refusal(argv)
        assert f"--{name} is {value}" in message.replace(f"{value}.0;", f"{value};")


def test_conflicting_options_are_rejected():
    assert "choose one" in refusal(["--dataset_name=x", "--train_file=x.csv"])
    assert "--max_steps" in refusal(["--dataset_name=x", "--streaming"])
    stream = ["--dataset_name=x", "--streaming", "--max_steps=5"]
    assert "--dataloader_num_workers cannot be used with --streaming" in refusal(
        [*stream, "--dataloader_num_workers=1"]
    )
    assert parse_arguments(stream).streaming


@pytest.mark.parametrize("given", [[], ["--average_checkpoints=3"], ["--eval_steps=3"]])
def test_averaging_by_score_needs_evaluations(given):
    by_score = ["--dataset_name=x", "--average_checkpoints_by=score"]
    needs = "--average_checkpoints_by score needs --average_checkpoints and --eval_steps."
    assert refusal([*by_score, *given]) == needs
    args = parse_arguments([*by_score, "--average_checkpoints=3", "--eval_steps=3"])
    assert (args.average_checkpoints_by, args.average_checkpoints) == ("score", 3)


def test_early_stopping_needs_evaluations():
    early = ["--dataset_name=x", "--early_stopping_patience=2"]
    assert refusal(early) == "--early_stopping_patience needs --eval_steps."
    assert parse_arguments([*early, "--eval_steps=3"]).early_stopping_patience == 2


@pytest.mark.parametrize("given, value", [([], 4096), (["99"], 99), (["auto"], "auto")])
def test_token_budget_is_a_number_or_auto(given, value, recipe):
    option = "per_device_train_max_tokens"
    argv = [argument for text in given for argument in (f"--{option}", text)]
    assert getattr(parse_arguments(["--dataset_name=x", *argv]), option) == value
    lines = "".join(f"{option}: {text}\n" for text in given)
    args = parse_arguments(recipe(f"dataset_name: x\n{lines}"))
    assert getattr(args, option) == value
    config = VanillaTransformerConfig(**model_fields(args))
    assert getattr(parse_arguments(recipe(recipe_to_yaml(resolved_recipe(args, config)))), option) == value


@pytest.mark.parametrize("text", ["many", "Auto", "12.5", "1e3", "", "0x10"])
def test_other_token_budgets_are_rejected(text):
    message = refusal(["--dataset_name=x", f"--per_device_train_max_tokens={text}"])
    assert message == f"--per_device_train_max_tokens is {text}; give a number, or auto."


@pytest.mark.parametrize("name", ["validation_file", "test_file"])
def test_unused_file_is_rejected(name):
    assert name in refusal(["--dataset_name=x", f"--{name}=x.csv"])


# ------------------------------------------------------------------------------------------- what is written and known


def test_written_recipe_reads_back(recipe):
    argv = ["--train_file=dir with space/ä: #.csv", "--source_lang=no", "--target_lang=de", "--d_model=48", "--seed=3"]
    argv += ["--norm_first", "--learning_rate=5e-4", "--report_to=none", "--max_steps=7", "--output_dir=2026-01-01"]
    argv += ["--per_device_train_max_tokens=auto", "--bpe_dropout=0.1", "--r_drop_alpha=5", "--gradient_checkpointing"]
    argv += ["--average_checkpoints=3", "--average_checkpoints_by=score", "--eval_steps=2", "--ema_decay=0.999"]
    argv += ["--early_stopping_patience=4", "--metric_for_best_model=loss", "--on_divergence=ignore"]
    args = parse_arguments(argv)
    config = VanillaTransformerConfig(vocab_size=300, **model_fields(args))
    again = parse_arguments(recipe(recipe_to_yaml(resolved_recipe(args, config))))
    given = {name: value for name, value in vars(args).items() if name not in {"config", *model_options()}}
    assert {name: getattr(again, name) for name in given} == given
    assert VanillaTransformerConfig(**model_fields(again)).to_dict() == config.to_dict()
    # Every model field is written, also where it was left to its default.
    written = {name for name in model_options() if getattr(again, name) is not None}
    assert written == model_options()
    assert resolved_recipe(again, config) == resolved_recipe(args, config)


def test_written_recipe_starts_a_new_run(recipe):
    """What a resumed run writes trains the same model from the start: nothing to resume from, no other recipe."""
    args = parse_arguments(["--resume_from_checkpoint", "--dry_run", "--d_model=64"])
    again = parse_arguments(
        recipe(recipe_to_yaml(resolved_recipe(args, VanillaTransformerConfig(**model_fields(args)))))
    )
    assert again.resume_from_checkpoint is None and not again.dry_run
    assert again.d_model == 64 and again.dataset_name == "sample_dataset"


def model_options() -> set[str]:
    """The fields of the config that are its own, not those of every config of transformers."""
    own = set(VanillaTransformerConfig.__annotations__)
    return {item.name for item in dataclasses.fields(VanillaTransformerConfig) if item.name in own} - NOT_OPTIONS


def test_every_model_field_is_an_option():
    defaults = VanillaTransformerConfig()
    args = parse_arguments(["--dataset_name=x"])
    assert len(model_options()) >= 20
    for name in model_options():
        assert getattr(args, name) is None
        value = getattr(defaults, name)
        assert getattr(parse_arguments(["--dataset_name=x", f"--{name}={value}"]), name) == value
    ids = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
    assert not ids & vars(args).keys() and ids < NOT_OPTIONS


def test_every_option_has_help(capsys):
    parser = make_parser()
    for action in parser._actions:
        assert action.help, action.dest
        assert action.help is argparse.SUPPRESS or len(action.help) > 4, action.dest
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in vars(parse_arguments([])))


INTERFACE = (
    "output_dir dataset_name dataset_config_name train_file validation_file test_file source_lang target_lang "
    "source_column target_column max_source_length max_target_length tokenizer_name vocab_size model_name_or_path "
    "streaming max_train_samples learning_rate lr_scheduler_type warmup_steps max_steps num_train_epochs "
    "label_smoothing_factor gradient_accumulation_steps max_grad_norm weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "seed eval_steps save_steps logging_steps save_total_limit resume_from_checkpoint early_stopping_patience "
    "report_to num_beams length_penalty torch_compile push_to_hub hub_model_id d_model config "
    "per_device_train_max_tokens average_checkpoints ema_decay bpe_dropout dry_run average_checkpoints_by "
    "r_drop_alpha gradient_checkpointing metric_for_best_model on_divergence"
)


def test_public_options_exist():
    assert set(INTERFACE.split()) <= vars(parse_arguments([])).keys()


# --------------------------------------------------------------------------------------------------------- the recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_builds_a_model(path):
    args = parse_arguments(["--config", str(path)])
    assert args.dataset_name and args.output_dir
    with torch.device("meta"):
        VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**model_fields(args)))


def test_shipped_recipes_have_different_output_dirs():
    folders = [parse_arguments(["--config", str(path)]).output_dir for path in RECIPES]
    assert len(folders) >= 2
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("size, parameters", [("base", 63_082_496), ("big", 214_245_376)])
def test_paper_recipes_build_the_paper_models(size, parameters):
    """Table 3, and sections 5.1 to 5.4; the big model drops out 0.3 for English to German."""
    args = parse_arguments(["--config", str(SAMPLE_RECIPE.with_name(f"wmt14_en_de_{size}.yaml"))])
    with torch.device("meta"):
        config = VanillaTransformerConfig(**model_fields(args) | {"vocab_size": 37000})
        model = VanillaTransformerForConditionalGeneration(config)
    assert model.num_parameters() == parameters
    assert args.vocab_size in (None, 37000)
    assert (args.lr_scheduler_type, args.warmup_steps, args.label_smoothing_factor) == ("inverse_sqrt", 4000, 0.1)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert config.dropout == {"base": 0.1, "big": 0.3}[size]
    assert args.max_steps == {"base": 100_000, "big": 300_000}[size]


@pytest.mark.parametrize("dash", ["_", "-"])
def test_command_line_overrides_conflicting_recipe_keys(dash, recipe):
    argv = recipe("dataset_name: x\ndataset_config_name: de-en\nmax_steps: 5\n".replace("_", dash))
    assert parse_arguments([*argv, f"--num{dash}train{dash}epochs", "3"]).max_steps is None
    args = parse_arguments([*argv, f"--train{dash}file=x.csv"])
    assert (args.train_file, args.dataset_name, args.dataset_config_name) == ("x.csv", None, None)
    assert parse_arguments([*argv, "--max_steps=7", "--num_train_epochs=3"]).max_steps == 7
