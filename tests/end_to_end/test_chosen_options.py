"""Runs of train.py without a recipe, whose options are chosen from the data."""

import re

import pytest
import yaml
from runs import random_pairs, train

from vanilla_transformer.training.rule import CHOOSABLE

WHAT = "--max_eval_samples 4 --max_predict_samples 2 --num_examples 0"
BRIEF = "--hours 0.001"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return random_pairs(tmp_path_factory.mktemp("data") / "pairs", train=600, validation=9, test=5)


def arguments(pairs, folder, more: str = "") -> list[str]:
    data = f"--dataset_name {pairs} --source_lang en --target_lang de"
    return f"{data} --output_dir {folder} {WHAT} --d_model 32 {more}".split()


def recipe_of(folder) -> dict:
    return yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))


def test_what_is_chosen_is_printed_saved_and_kept_by_a_resumed_run(pairs, tmp_path, monkeypatch):
    printed = train(arguments(pairs, tmp_path / "model", BRIEF))
    recipe = recipe_of(tmp_path / "model")
    (block,) = re.findall(r"(?m)^options that are not given are chosen.*:\n((?:.*\n)*?)\w", printed)
    chosen = dict(re.findall(r"--(\w+) (\S+?)(?=[: ]|$)", " ".join(block.split())))
    assert {"vocab_size", "dropout", "max_steps", "optimizer"} <= chosen.keys() and "d_model" not in chosen
    assert recipe["d_model"] == 32 and not {"size", "hours"} & recipe.keys()
    for name in (chosen.keys() & CHOOSABLE) - {"vocab_size"}:
        assert str(recipe[name]) == chosen[name], name
    again = train(arguments(pairs, tmp_path / "model", "--resume_from_checkpoint --hours 0.005"))
    assert "options that are not given" not in again
    assert recipe_of(tmp_path / "model") == recipe


def test_the_saved_recipe_repeats_a_run_whose_options_were_chosen(pairs, tmp_path):
    train(arguments(pairs, tmp_path / "model", BRIEF))
    train(["--config", str(tmp_path / "model" / "recipe.yaml"), "--output_dir", str(tmp_path / "again")])
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "again")]
    assert weights[0] == weights[1]


def test_a_resumed_run_may_be_longer(pairs, tmp_path):
    patient = "--early_stopping_patience 99"
    train(arguments(pairs, tmp_path / "model", f"{BRIEF} {patient}"))
    steps = recipe_of(tmp_path / "model")["max_steps"]
    more = f"{patient} --resume_from_checkpoint --max_steps {steps + 2}"
    assert f"steps {steps:,} to {steps + 2:,}" in train(arguments(pairs, tmp_path / "model", more))
