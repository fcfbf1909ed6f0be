"""Options of train.py: defaults, recipes, the command line, and the errors about them."""

import itertools
import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.errors import UserError
from vanilla_transformer.hub.model_card import PATHS_OR_IDS, public_recipe
from vanilla_transformer.training.options import NOT_OPTIONS, given_fields
from vanilla_transformer.training.recipe import (
    SAMPLE_RECIPE,
    make_parser,
    parse_arguments,
    recipe_to_yaml,
    resolved_recipe,
)
from vanilla_transformer.training.rule import CHOOSABLE, FINE_TUNING

MODEL_OPTIONS = VanillaTransformerConfig.__annotations__.keys() - NOT_OPTIONS
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path):
    """recipe(text) -> the command line that reads it."""

    def write(text: str) -> list[str]:
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        return ["--config", str(tmp_path / "recipe.yaml")]

    return write


def parse(argv: list[str]) -> dict:
    """The values of all options."""
    return parse_arguments(argv).values()


def resolved(argv: list[str], **fields) -> dict:
    """The recipe that a run with these options writes."""
    options = parse_arguments(argv)
    config = VanillaTransformerConfig(**given_fields(options.model) | fields)
    return resolved_recipe(options.data, options.training, config)


def refusal(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        parse_arguments(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --------------------------------------------------------------------------------------------- where options come from


def test_default_is_the_sample_recipe():
    args = parse([])
    assert args == parse(["--config", str(SAMPLE_RECIPE)])
    assert (args["dataset_name"], args["source_lang"], args["target_lang"]) == ("sample_dataset", "en", "de")
    assert parse(["--d_model=64"]) == args | {"d_model": 64}


def test_sample_recipe_needs_its_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="run it in the directory of train.py, or say what"):
        parse(["--max_steps=3"])
    parse(["--dataset_name=x"])


@pytest.mark.parametrize("given", [["--dataset_name=x"], ["--train_file=x.csv"]])
def test_own_data_disables_the_sample_recipe(given):
    options = parse_arguments([*given, "--size=paper"])
    assert options.data.source_lang is None and options.training.warmup_steps == 4000
    assert given_fields(options.model) == {}  # the config's own defaults, the paper's base model


def test_options_are_free_that_neither_command_line_nor_recipe_gives(tmp_path):
    """Without a recipe, or with --size; not for a model to fine-tune."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train_file: [x.tsv]\ndropout: 0.3\nmax_steps: 7\n", encoding="utf-8")
    own = ["--train_file=x.tsv"]
    assert parse_arguments(own).free == CHOOSABLE
    assert parse_arguments([*own, "--d_model", "64", "--seed=3"]).free == CHOOSABLE - {"d_model"}
    assert parse_arguments([*own, "--size=small"]).free == CHOOSABLE
    tokens = {"letters", "vocab_size", "split_digits"}
    assert parse_arguments([*own, "--tokenizer_name=t"]).free == CHOOSABLE - tokens
    assert parse_arguments([*own, "--train_file_tags=<x>"]).free == CHOOSABLE - {"joined_pairs"}
    assert parse_arguments([*own, "--letters"]).free == CHOOSABLE - tokens
    assert parse_arguments([*own, "--vocab_size=500"]).free == CHOOSABLE - {"letters", "vocab_size"}
    assert parse_arguments([*own, "--letters=false"]).free == CHOOSABLE - {"letters"}
    averaged = CHOOSABLE - {"eval_steps", "early_stopping_patience"}
    assert parse_arguments([*own, "--average_checkpoints=3"]).free == averaged
    assert parse_arguments(["--config", str(recipe), "--size=auto"]).free == CHOOSABLE - {"dropout", "max_steps"}
    tuning = [*own, "--model_name_or_path=m"]
    assert parse_arguments(tuning).free == FINE_TUNING
    assert parse_arguments([*tuning, "--warmup_steps=9"]).free == FINE_TUNING - {"warmup_steps"}
    for nothing in ([*own, "--size=paper"], ["--config", str(recipe)], [*tuning, "--size=paper"], []):
        assert not parse_arguments(nothing).free
    assert not parse_arguments(["--config", str(recipe), "--model_name_or_path=m"]).free


def test_a_size_replaces_those_of_a_recipe():
    options = parse_arguments(["--config", str(SAMPLE_RECIPE), "--size=medium", "--encoder_layers=5"])
    assert options.free >= {"d_model", "decoder_layers"} and options.model.encoder_layers == 5
    assert options.model.d_model is None and options.training.max_steps == 500
    options = parse_arguments(["--config", str(SAMPLE_RECIPE), "--size=auto"])
    assert options.model.d_model == 128 and not options.free & {"d_model", "encoder_layers"}


def test_hours_and_a_number_of_steps_contradict_each_other():
    for length in ("--max_steps=5", "--num_train_epochs=2"):
        assert "leave one of them out" in refusal(["--train_file=x.tsv", "--hours=2", length])


@pytest.mark.parametrize(
    "more, why",
    [
        (["--train_file=x.tsv", "--size=paper"], "--size paper fixes all options"),
        (["--train_file=x.tsv", "--model_name_or_path=m"], "with --model_name_or_path, no length is chosen"),
        (["--train_file=x.tsv", "--config=recipes/sample.yaml"], "the recipe recipes/sample.yaml fixes all options"),
        ([], "the recipe recipes/sample.yaml fixes all options"),
    ],
)
def test_hours_are_refused_where_no_length_is_chosen(more, why, monkeypatch):
    monkeypatch.chdir(ROOT)
    remedy = "give --max_steps or --num_train_epochs instead."
    assert f"--hours has no effect here: {why}; {remedy}" in refusal(["--hours=2", *more])


def test_size_is_refused_in_fine_tuning():
    said = refusal(["--train_file=x.tsv", "--size=tiny", "--model_name_or_path=m"])
    assert "--size has no effect here: the model of --model_name_or_path has its size; leave it out." in said


def test_several_configurations_are_refused_with_a_remedy():
    message = refusal(["--dataset_name=x", "--dataset_config_name", "de-en", "fr-en"])
    assert message.startswith("--dataset_config_name takes one configuration, not also fr-en; to train on several")


@pytest.mark.parametrize("given, target", [("ja-zh en-zh", "zh"), ("en-zh en-ja", None)])
def test_the_only_target_language_of_all_files_is_that_of_the_scores(given, target, recipe):
    argv = ["--train_file", "x", "y", "--train_file_langs", *given.split()]
    assert parse(argv)["target_lang"] == target
    assert parse([*argv, "--target_lang", "ko"])["target_lang"] == "ko"
    given = parse(recipe(f"train_file: [x, y]\ntrain_file_langs: [{given.replace(' ', ', ')}]"))
    assert given["target_lang"] == target


LANGUAGES = "train_file: [a.tsv]\nsource_lang: en\ntarget_lang: de\n"


def test_command_line_overrides_the_recipe(recipe):
    argv = recipe("dataset_name: x\nd_model: 64\nnorm_first: true\nstreaming: true\nmax_steps: 5\nseed: 1\n")
    given = "--d_model 32 --norm_first false --streaming=False --dataset_name y"
    args = parse([*argv, *given.split()])
    assert (args["d_model"], args["norm_first"], args["streaming"], args["dataset_name"]) == (32, False, False, "y")
    assert (args["max_steps"], args["seed"]) == (5, 1)
    assert parse(["--d_model", "32", *argv])["d_model"] == 32  # on either side of --config


def test_a_zero_turns_off_what_a_recipe_or_the_rule_turns_on(tmp_path):
    names = ["eval_steps", "save_steps", "early_stopping_patience"]
    recipe, off = tmp_path / "recipe.yaml", [f"--{name}=0" for name in names]
    recipe.write_text("\n".join(["train_file: [x.tsv]", *(f"{name}: 7" for name in names)]), encoding="utf-8")
    options = parse(["--config", str(recipe), *off])
    assert [options[name] for name in names] == [0, 0, 0]
    assert parse_arguments(["--train_file=x.tsv", *off]).free == CHOOSABLE - set(names)


def test_columns_on_the_command_line_override_the_languages_of_a_recipe(recipe):
    """They are of other data: the card and the tokenizer of BLEU would be wrong."""
    columns = ["--source_column=english", "--target_column=zh"]
    data = parse_arguments([*recipe(LANGUAGES), "--train_file", "b.tsv", *columns])[0]
    assert (data.source_lang, data.target_lang, data.target_language) == (None, None, "zh")
    both = parse_arguments([*recipe(LANGUAGES), "--target_lang=ja", *columns])[0]
    assert (both.source_lang, both.target_language) == (None, "ja")


def languages(argv: list[str]) -> tuple[str | None, str | None]:
    data = parse_arguments(argv)[0]
    return data.source_lang, data.target_lang


@pytest.mark.parametrize("files", ["b.txt", "c.PO d.txt.gz", "b.es b.gn"])
@pytest.mark.parametrize("more, is_kept", [("", False), ("e.tsv", True)])
def test_files_without_names_of_columns_override_the_languages_of_a_recipe(files, more, is_kept, recipe):
    argv = [*recipe(LANGUAGES), "--train_file", *files.split()]
    assert languages([*argv, *more.split()]) == (("en", "de") if is_kept else (None, None))
    assert languages([*argv, "--source_lang=es", "--target_lang=gn"]) == ("es", "gn")
    # Those may have them.
    assert languages([*argv, "--test_file", "b.tsv"]) == ("en", "de")
    assert languages([*recipe(LANGUAGES), "--train_file", "b.de", "b.en"]) == ("en", "de")
    assert languages(recipe(LANGUAGES.replace("a.tsv", "a.txt"))) == ("en", "de")


@pytest.mark.parametrize(
    "row, is_kept", [("en\tde", True), ("DE\tx\tEN", True), ("en\tfr", False), ("go\tgeh", False)]
)
def test_tables_without_the_languages_of_a_recipe_override_them(row, is_kept, recipe, tmp_path):
    for name, separator in [("b.tsv", "\t"), ("b.csv", ",")]:
        (tmp_path / name).write_text(row.replace("\t", separator) + "\n")
        found = languages([*recipe(LANGUAGES), "--train_file", str(tmp_path / name)])
        assert found == (("en", "de") if is_kept else (None, None))


def test_command_line_overrides_conflicting_recipe_keys(recipe):
    argv = recipe("dataset_name: x\ndataset_config_name: de-en\nmax_steps: 5\n")
    assert parse([*argv, "--num-train-epochs", "3"])["max_steps"] is None
    args = parse([*argv, "--train_file=x.csv"])
    assert (args["train_file"], args["dataset_name"], args["dataset_config_name"]) == (["x.csv"], None, None)
    assert parse([*argv, "--max_steps=7", "--num_train_epochs=3"])["max_steps"] == 7


@pytest.mark.parametrize(
    "line, value",
    [
        *((f"learning_rate: {text}", 5e-4) for text in ("5e-4", "5.0e-4", "0.0005", "'5E-4'")),
        *((f"learning_rate: {text}", None) for text in ("", "null", "~")),
        *((f"norm_first: {text}", True) for text in ("true", "True", "yes")),
        *((f"torch_compile: {text}", False) for text in ("false", "no")),
        ("per_device_train_max_tokens:", 4096),
        ("per_device_train_max_tokens: 99", 99),
        ("per_device_train_max_tokens: auto", None),
        ("source_lang: no", "no"),
        ("output_dir: 2026-01-01", Path("2026-01-01")),
    ],
)
def test_values_in_a_recipe(recipe, line, value):
    """YAML 1.1 takes 5e-4 for a string, `no` for a boolean, and has dates."""
    name = line.split(":")[0]
    assert parse(recipe(f"dataset_name: x\n{line}\n"))[name] == value


def test_list_in_a_recipe_or_on_the_command_line(recipe):
    argv = recipe("train_file: [a.csv, 'b c.txt']\ntrain_file_weights: [2, 0.5]\ntrain_file_tags:\n- ''\n- <bt>\n")
    args = parse(argv)
    assert (args["train_file"], args["train_file_weights"]) == (["a.csv", "b c.txt"], [2, 0.5])
    assert args["train_file_tags"] == ["", "<bt>"]
    assert parse([*argv, "--train_file_weights", "1", "3"])["train_file_weights"] == [1, 3]
    args = parse([*argv, "--train_file", "c.csv"])  # takes the weights of the other files away
    assert (args["train_file"], args["train_file_weights"], args["train_file_tags"]) == (["c.csv"], None, None)
    args = parse(recipe("train_file: a.csv\nteacher: [me/one, two]\n"))
    assert (args["train_file"], args["teacher"]) == (["a.csv"], ["me/one", "two"])


@pytest.mark.parametrize(
    "given, name, value",
    [
        ("", "norm_first", None),
        ("--norm_first", "norm_first", True),
        ("--norm_first false", "norm_first", False),
        ("", "resume_from_checkpoint", None),
        ("--resume_from_checkpoint", "resume_from_checkpoint", "newest"),
        ("--resume_from_checkpoint out/checkpoint-5", "resume_from_checkpoint", "out/checkpoint-5"),
    ],
)
def test_options_with_an_optional_value(given, name, value):
    assert parse([*given.split(), "--dataset_name=x"])[name] == value


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "unknown, remedy",
    [
        (["--d_modl", "64"], "did you mean --d_model?"),
        (["--d_modl=64"], "did you mean --d_model?"),
        (["--learning", "1"], "did you mean --learning_rate?"),
        (["--per_device_train_batch_size", "1"], "did you mean --per_device_train_max_tokens?"),
        (["--mixed_precision", "bf16"], "it is one of accelerate launch, before train.py."),
        (["--xyzzy", "1"], "--help lists all options."),
    ],
)
@pytest.mark.parametrize("before", [[], ["--dataset_name", "x"], ["--config", str(SAMPLE_RECIPE)]])
def test_unknown_option_names_the_closest(unknown, remedy, before):
    assert refusal([*before, *unknown]) == f"{unknown[0]} is not an option; {remedy}"


@pytest.mark.parametrize(
    "key, remedy",
    [("warmup-step", "did you mean warmup_steps?"), *((key, "--help") for key in ("config", "pad_token_id", "3"))],
)
def test_unknown_recipe_key_names_the_closest(recipe, key, remedy):
    argv = recipe(f"dataset_name: x\n{key}: 1\n")
    assert refusal(argv).startswith(f"'{key.replace('-', '_')}' in {argv[1]} is not an option; {remedy}")


@pytest.mark.parametrize(
    "text, parts",
    [
        ("d_model: wide\n", ["d_model", "wide"]),
        ("d_model: 12.5\n", ["d_model", "12.5"]),
        ("norm_first: perhaps\n", ["norm_first", "perhaps"]),
        ("lr_scheduler_type: sinus\n", ["lr_scheduler_type", "sinus", "inverse_sqrt"]),
        ("position_embedding_type: none\n", ["position_embedding_type", "none", "sinusoidal", "rotary"]),
        ("dropout: [0.1, 0.2]\n", ["dropout", "single value", "not a list"]),
        ("train_file: [[x.csv]]\n", ["train_file", "not a list"]),
        ("train_file: []\n", ["train_file", "at least one"]),
        ("train_file: [x.csv]\ntrain_file_weights: [many]\n", ["train_file_weights", "many"]),
        ("dropout: {encoder: 0.1}\n", ["dropout", "single value"]),
        ("dropout: [0.1\n", ["cannot be read", "recipe.yaml"]),
        ("a: b: c\n", ["cannot be read", "recipe.yaml"]),
        ("- d_model\n", ["recipe.yaml", "option: value"]),
        pytest.param("seed: " + "[" * 700, ["cannot be read", "recipe.yaml"], id="lists nested too deep"),
        pytest.param("seed: " + "{a: " * 5000, ["cannot be read", "recipe.yaml"], id="mappings nested too deep"),
        ("dataset_name: x\nseed: 1\nseed: 2\n", ["'seed' is given twice", "recipe.yaml"]),
        ("just text\n", ["recipe.yaml", "option: value"]),
        ("", ["recipe.yaml", "option: value"]),
    ],
)
def test_wrong_values_and_broken_recipes_are_rejected(recipe, text, parts):
    message = refusal(recipe(text))
    assert all(part in message for part in parts), message


def test_unreadable_recipe_is_named(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"d_model: \xff\xfe\x00")
    for name in ["binary.yaml", "missing.yaml", "."]:
        assert str(tmp_path / name) in refusal(["--config", str(tmp_path / name)])


COUNTS = "max_steps logging_steps save_total_limit num_beams gradient_accumulation_steps "
COUNTS += "per_device_train_max_tokens per_device_eval_max_tokens max_source_length max_target_length "
COUNTS += "max_train_samples max_eval_samples max_predict_samples preprocessing_num_workers"
NOT_NEGATIVE = "warmup_steps average_checkpoints dataloader_num_workers seed num_examples eval_steps save_steps "
NOT_NEGATIVE += "early_stopping_patience"
SCALES = "learning_rate weight_decay max_grad_norm adam_epsilon r_drop_alpha num_train_epochs distillation_weight"
FRACTIONS = "label_smoothing_factor ema_decay adam_beta1 adam_beta2 bpe_dropout"
OUT_OF_RANGE = [
    *((name, "0") for name in COUNTS.split()),
    *((name, "-1") for name in NOT_NEGATIVE.split()),
    *itertools.product(SCALES.split(), ("-0.1", "nan", "inf")),
    *itertools.product(FRACTIONS.split(), ("-0.1", "nan", "1")),
    *itertools.product(["validation_split_percentage", "test_split_percentage"], ("0", "100")),
    *itertools.product(["per_device_train_max_tokens", "per_device_eval_max_tokens"], (str(2**31),)),
    *itertools.product(["train_file_weights"], ("-1.0", "1000.0")),
    ("num_train_epochs", "0"),
    ("teacher_top_k", "0"),
    ("distillation_temperature", "0.0"),
    ("distillation_weight", "1.1"),
    ("length_penalty", "nan"),
    ("seed", str(2**63)),
]


@pytest.mark.parametrize("name, value", OUT_OF_RANGE)
def test_number_out_of_range_is_rejected(name, value, recipe):
    for argv in [[f"--{name}={value}"], recipe(f"{name}: {value}\n")]:
        assert f"--{name} is {value}" in refusal(argv).replace(f"{value}.0;", f"{value};")


@pytest.mark.parametrize(
    "given, remedy, message",
    [
        ("--train_file=x.csv", "--dataset_name=", "--dataset_name and --train_file are both given; choose one."),
        ("--test_file=x", "--train_file=x --dataset_name=", "--test_file needs --train_file."),
        ("--validation_file=x", "--train_file=x --dataset_name=", "--validation_file needs --train_file."),
        ("--train_file_tags=<bt>", "--train_file=x --dataset_name=", "--train_file_tags needs --train_file."),
        ("--streaming", "--max_steps=5", "--streaming needs --max_steps"),
        ("--average_checkpoints_by=score --eval_steps=3", "--average_checkpoints=3", "--average_checkpoints_by score"),
        ("--average_checkpoints_by=score --average_checkpoints=3", "--eval_steps=3", "--average_checkpoints_by score"),
        ("--run_name=x", "--report_to=wandb", "--run_name needs --report_to."),
        ("--native", "--push_to_hub", "--native needs --push_to_hub."),
        ("--hub_private_repo", "--push_to_hub", "--hub_private_repo needs --push_to_hub."),
        ("--model_name_or_path=m --tokenizer_name=t", "--tokenizer_name=", "--tokenizer_name cannot be combined"),
        (
            "--train_file x.csv y.csv --dataset_name= --train_file_weights 2",
            "--train_file_weights 2 1",
            "--train_file_weights has 1 values for 2 files; give one per file.",
        ),
        (
            "--train_file x.csv y.csv --dataset_name= --train_file_weights 0 0",
            "--train_file_weights 0 1",
            "--train_file_weights are all 0, which leaves no training pairs; raise one.",
        ),
        (
            "--train_file x.csv --dataset_name= --train_file_tags <a> <b>",
            "--train_file_tags <a>",
            "--train_file_tags has 2 values for 1 files; give one per file.",
        ),
        (
            "--train_file x.csv y.csv --dataset_name= --train_file_tags <a> back",
            "--train_file_tags <a> __b__",
            "--train_file_tags has 'back', which may occur in texts; choose a tag such as <bt>.",
        ),
        (
            "--train_file x y --dataset_name= --train_file_langs en-de",
            "--train_file_langs en-de en:pt-BR",
            "--train_file_langs has 1 values for 2 files; give one per file.",
        ),
        (
            "--train_file x y --dataset_name= --train_file_langs en-de en-pt-BR",
            "--train_file_langs en-de en:pt-BR",
            "--train_file_langs has en-pt-BR; give source and target as en-de, or as en:pt-BR.",
        ),
        (
            "--train_file x y z --dataset_name= --validation_file a b",
            "--validation_file a b c",
            "--validation_file has 2 files for 3 training files; give one, or one for each.",
        ),
        ("--teacher x y --bpe_dropout=0.1", "--bpe_dropout=0", "--teacher reads all pairs before training; leave out"),
        ("--teacher x --streaming --max_steps=5", "--streaming=0", "--teacher reads all pairs before training"),
        ("--streaming --max_steps=5 --train_file x y --dataset_name=", "--train_file x", "--streaming reads one"),
        ("--distillation_weight=0.9", "--teacher x", "--distillation_weight needs --teacher."),
        ("--train_file=x --dataset_name= --test_split=a", "--test_split=", "--test_split is for --dataset_name; with"),
        (
            "--size=paper --early_stopping_patience=2",
            "--eval_steps=3",
            "--early_stopping_patience needs --eval_steps.",
        ),
    ],
)
def test_conflicting_options_are_rejected(given, remedy, message):
    argv = ["--dataset_name=x", *given.split()]
    assert refusal(argv).startswith(message)
    with warnings.catch_warnings():  # the remedy replaces a list
        warnings.simplefilter("ignore")
        parse([*argv, *remedy.split()])


@pytest.mark.parametrize("option", ["train_file", "validation_file", "train_file_tags", "teacher", "source_column"])
def test_a_list_that_is_given_twice_is_not_cut_in_silence(option):
    files = ["--train_file", "x"] if option != "train_file" else []
    for again in ([f"--{option}", "<b>"], [f"--{option}=<b>"], [f"--{option.replace('_', '-')}", "<b>"]):
        with pytest.warns(UserWarning, match=f"--{option} is given twice; only the last list counts: <b>."):
            options = parse([*files, f"--{option}", "<a>", "--max_steps", "3", *again])
        assert options[option] == ["<b>"]


@pytest.mark.parametrize("text", ["many", "Auto", "12.5", "5e3", "", "9" * 5000])
def test_other_token_budgets_are_rejected(text):
    message = refusal(["--dataset_name=x", f"--per_device_train_max_tokens={text}"])
    assert message == f"--per_device_train_max_tokens is '{text}'; give a number, or auto."


# ------------------------------------------------------------------------------------------- what is written and known


def test_help_has_each_option_once_in_groups_that_can_be_read():
    parser = make_parser()
    groups = [[action.dest for action in group._group_actions] for group in parser._action_groups]
    assert sorted(itertools.chain(*groups)) == sorted({action.dest for action in parser._actions})
    assert max(map(len, groups)) <= 15
    assert groups[0][1:6] == ["config", "train_file", "dataset_name", "source_lang", "target_lang"]
    assert [name for name in groups[-1] if name.startswith("adam")]  # the advanced ones come last
    helps = [action.help for action in parser._actions]
    assert not [text for text in helps if re.fullmatch(r"\W*(section|see)? ?[\d.]*\W*", text)]
    shown = parser.format_help()
    assert "weight decay of the matrices (default: 0.0)" in " ".join(shown.split())
    assert "  --dry_run  " in shown and "--tie_word_embeddings {true,false}" in shown  # a switch has no value


def test_written_recipe_reads_back(recipe):
    argv = ["--train_file", "dir with space/ä: #.csv", "b.txt", "--train_file_weights", "2", "0.5"]
    argv += ["--train_file_tags", "", "<bt>", "--source_lang=no", "--target_lang=de", "--d_model=48", "--seed=3"]
    argv += ["--norm_first", "--learning_rate=5e-4", "--report_to=none", "--max_steps=7", "--output_dir=2026-01-01"]
    argv += ["--per_device_train_max_tokens=99", "--bpe_dropout=0.1", "--r_drop_alpha=5", "--gradient_checkpointing"]
    argv += ["--average_checkpoints=3", "--average_checkpoints_by=score", "--eval_steps=2", "--ema_decay=0.999"]
    argv += ["--early_stopping_patience=4", "--metric_for_best_model=loss", "--on_divergence=ignore"]
    written = resolved(argv, vocab_size=300)
    again = recipe(recipe_to_yaml(written))
    assert resolved(again) == written
    before, after = parse(argv), parse(again)
    others = before.keys() - MODEL_OPTIONS
    assert {name: after[name] for name in others} == {name: before[name] for name in others}
    # Every model field is written, also where it was left to its default.
    assert all(after[name] is not None for name in MODEL_OPTIONS)


@pytest.mark.parametrize("given", [["--tokenizer_name", "data/pairs"], ["--model_name_or_path", "data/pairs"]])
def test_a_path_in_a_written_recipe_is_no_hub_id_elsewhere(given, recipe, tmp_path, monkeypatch):
    """A push from another directory publishes only its last part."""
    (tmp_path / "data" / "pairs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    written = resolved(["--dataset_name", "data/pairs", "--teacher", "data/pairs", "me/model", *given])
    assert written["dataset_name"] == written[given[0][2:]] == "./data/pairs"
    assert written["teacher"] == ["./data/pairs", "me/model"]
    again = recipe(recipe_to_yaml(written))
    assert resolved(again) == written and Path(parse(again)["dataset_name"]).is_dir()
    monkeypatch.chdir("/")
    public = public_recipe(written)
    expected = {"dataset_name": "pairs", "teacher": ["pairs", "me/model"], given[0][2:]: "pairs"}
    assert {key: public[key] for key in PATHS_OR_IDS if public[key]} == expected


LEFT_OUT = {  # options and what they are in the run of the recipe that is written
    "what was resumed": ("--resume_from_checkpoint --dry_run", {"resume_from_checkpoint": None, "dry_run": None}),
    "what was published": (
        "--push_to_hub --hub_model_id=me/toy --hub_private_repo --native",
        dict.fromkeys(("push_to_hub", "hub_model_id", "hub_private_repo", "native")),
    ),
}


@pytest.mark.parametrize("given, expected", LEFT_OUT.values(), ids=LEFT_OUT)
def test_written_recipe_starts_a_new_run_without(given, expected, recipe):
    """It trains the same model from the start."""
    written = resolved(["--d_model=64", "--num_examples=0", *given.split()])
    assert not expected.keys() & written.keys()
    again = parse(recipe(recipe_to_yaml(written)))
    assert {name: again[name] or None for name in expected} == expected
    assert (again["d_model"], again["num_examples"], again["dataset_name"]) == (64, 0, "sample_dataset")


def test_a_recipe_may_publish_and_the_command_line_wins(recipe):
    argv = recipe("dataset_name: x\npush-to-hub: true\nhub_model_id: me/toy\nhub_private_repo: yes\nnative: true\n")
    args = parse(argv)
    assert (args["push_to_hub"], args["hub_model_id"], args["hub_private_repo"]) == (True, "me/toy", True)
    assert args["native"] and parse([*argv, "--hub_model_id=me/other"])["hub_model_id"] == "me/other"
    others = [f"--{name}=false" for name in ("push_to_hub", "hub_private_repo", "native")]
    assert not parse([*argv, *others])["push_to_hub"]


def test_a_list_of_a_recipe_holds_no_options(recipe):
    argv = recipe("train_file: [pairs.jsonl, --push_to_hub, --hub_model_id=me/public]")
    value = f"'train_file' in {argv[1]} has the value --push_to_hub"
    assert refusal(argv) == f"{value}; in a list, no value may begin with a -."


def test_every_model_field_is_an_option():
    defaults = VanillaTransformerConfig()
    args = parse(["--dataset_name=x"])
    assert len(MODEL_OPTIONS) >= 20
    for name in MODEL_OPTIONS:
        assert args[name] is None
        value = getattr(defaults, name)
        assert parse(["--dataset_name=x", f"--{name}={value}"])[name] == value
    ids = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
    assert not ids & args.keys() and ids < NOT_OPTIONS


def test_every_option_has_help(capsys):
    assert all(action.help for action in make_parser()._actions)
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in parse([]))


def test_metrics_that_are_given_twice_are_added_and_replace_those_of_a_recipe(recipe):
    argv = recipe("train_file: a.jsonl\nmetrics: [rouge]\nreference_columns: [one]\n")
    more = "--reference_columns two --reference_columns three --metrics cer --metrics wer"
    for given, columns, metrics in [(more, ["two", "three"], ["cer", "wer"]), ("--metrics rouge", ["one"], ["rouge"])]:
        args = parse([*argv, *given.split()])
        assert (args["reference_columns"], args["metrics"]) == (columns, metrics)
    args = parse([*recipe("train_file: a.jsonl\nmetrics: [ter.py]\nmetric_kwargs: [ter.x=1]"), "--metrics", "wer.py"])
    assert (args["metrics"], args["metric_kwargs"]) == (["wer.py"], None)
    args = parse([*recipe("train_file: a.jsonl\nmetrics: ter.py\nmetric_kwargs: ter.x=1"), "--metrics", "ter.py"])
    assert (args["metrics"], args["metric_kwargs"]) == (["ter.py"], ["ter.x=1"])


def test_a_recipe_alone_runs_no_code_of_metrics(recipe):
    argv = recipe("train_file: [a.tsv]\nmetrics: [rouge, ./mine.py]\nmetric_kwargs: [rouge.use_stemmer=true]\n")
    assert "metrics rouge, ./mine.py, whose code would run; give --metrics rouge ./mine.py" in refusal(argv)
    args = parse([*argv, "--metrics", "rouge", "./mine.py"])
    assert args["metrics"] == ["rouge", "./mine.py"] and args["metric_kwargs"] == ["rouge.use_stemmer=true"]


# --------------------------------------------------------------------------------------------------------- the recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_builds_a_model(path):
    data, model, _, _ = parse_arguments(["--config", str(path)])
    assert data.dataset_name or data.train_file
    with torch.device("meta"):
        VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**given_fields(model)))


@pytest.mark.parametrize("size, parameters", [("base", 63_082_496), ("big", 214_245_376)])
def test_paper_recipes_build_the_paper_models(size, parameters):
    """Table 3, and sections 5.1 to 5.4; the big model drops out 0.3 for English to German."""
    argv = ["--config", str(SAMPLE_RECIPE.with_name(f"wmt14_en_de_{size}.yaml"))]
    args = parse(argv)
    with torch.device("meta"):
        config = VanillaTransformerConfig(**given_fields(parse_arguments(argv)[1]) | {"vocab_size": 37000})
        model = VanillaTransformerForConditionalGeneration(config)
    assert model.num_parameters() == parameters
    assert args["vocab_size"] in (None, 37000)
    assert (args["lr_scheduler_type"], args["warmup_steps"]) == ("inverse_sqrt", 4000)
    assert args["label_smoothing_factor"] == 0.1
    assert (args["adam_beta1"], args["adam_beta2"], args["adam_epsilon"]) == (0.9, 0.98, 1e-9)
    assert config.dropout == {"base": 0.1, "big": 0.3}[size]
    assert args["max_steps"] == {"base": 100_000, "big": 300_000}[size]
