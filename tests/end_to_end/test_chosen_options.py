"""Runs of train.py without a recipe, whose options are chosen from the data."""

import re
import shutil

import pytest
import yaml
from runs import random_pairs, train

from vanilla_transformer.training.rule import CHOOSABLE

WHAT = "--max_eval_samples 4 --max_predict_samples 2 --num_examples 0"
BRIEF = "--hours 0.001 --early_stopping_patience 0"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return random_pairs(tmp_path_factory.mktemp("data") / "pairs", train=600, validation=9, test=5)


def arguments(pairs, folder, more: str = "") -> list[str]:
    data = f"--dataset_name {pairs} --source_lang en --target_lang de"
    return f"{data} --output_dir {folder} {WHAT} --d_model 32 {more}".split()


def recipe_of(folder) -> dict:
    return yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def chosen(pairs, tmp_path_factory):
    """The output directory of such a run, and what it printed."""
    folder = tmp_path_factory.mktemp("chosen") / "model"
    return folder, train(arguments(pairs, folder, BRIEF))


@pytest.fixture
def model(chosen, tmp_path):
    """A copy of that directory."""
    return shutil.copytree(chosen[0], tmp_path / "model")


def test_what_is_chosen_is_printed_saved_and_kept_by_a_resumed_run(pairs, chosen, model):
    printed, recipe = chosen[1], recipe_of(model)
    (block,) = re.findall(r"(?m)^options that are not given are chosen.*:\n((?:.*\n)*?)\w", printed)
    chosen = dict(re.findall(r"--(\w+) (\S+?)(?=[: ]|$)", " ".join(block.split())))
    assert {"vocab_size", "dropout", "max_steps", "optimizer"} <= chosen.keys() and "d_model" not in chosen
    assert recipe["d_model"] == 32 and not {"size", "hours"} & recipe.keys()
    for name in (chosen.keys() & CHOOSABLE) - {"vocab_size"}:
        assert str(recipe[name]) == chosen[name], name
    again = train(arguments(pairs, model, "--resume_from_checkpoint --hours 0.005"))
    assert "options that are not given" not in again and "--hours has no effect on a resumed run" in again
    assert {**recipe_of(model), "output_dir": recipe["output_dir"]} == recipe


def test_documents_are_trained_on_and_a_resumed_run_keeps_their_limits(tmp_path):
    documents = [" ".join(f"{i}w{j}" for j in range(150)) for i in range(40)]
    file = tmp_path / "documents.tsv"
    file.write_text("source\ttarget\n" + "".join(f"{text}\tnone\n" for text in documents), encoding="utf-8")
    run = f"--train_file {file} --output_dir {tmp_path / 'model'} {WHAT} --d_model 32 {BRIEF}"
    assert "(dropped: 0 empty, 0 too long)" in train(run.split())
    limit = recipe_of(tmp_path / "model")["max_source_length"]
    assert limit > 128 and recipe_of(tmp_path / "model")["max_target_length"] == 128
    train(f"{run} --resume_from_checkpoint".split())
    assert recipe_of(tmp_path / "model")["max_source_length"] == limit


def test_the_saved_recipe_repeats_a_run_whose_options_were_chosen(chosen, tmp_path):
    train(["--config", str(chosen[0] / "recipe.yaml"), "--output_dir", str(tmp_path / "again")])
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (chosen[0] / "model.safetensors").read_bytes()


def test_a_resumed_run_may_be_longer(pairs, model):
    steps = recipe_of(model)["max_steps"]
    more = f"--resume_from_checkpoint --max_steps {steps + 2}"
    assert f"steps {steps:,} to {steps + 2:,}" in train(arguments(pairs, model, more))
