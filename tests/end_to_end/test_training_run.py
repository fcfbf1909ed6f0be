"""What a run of train.py does and leaves, with all kinds of options, and how it refuses bad input."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import assert_close, translate_by_marian, write_metric
from runs import (
    MODEL,
    QUICK,
    ROOT,
    STEPS,
    files,
    options,
    read_pairs,
    results,
    train,
    train_fails,
    weights,
    write_pairs,
)
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel, MarianTokenizer

from vanilla_transformer import Translator, VanillaTransformerConfig
from vanilla_transformer import modeling_vanilla_transformer as modeling
from vanilla_transformer.conversion import from_native
from vanilla_transformer.data import encoding, splits
from vanilla_transformer.data.tokenizer import tokenizer_for_training
from vanilla_transformer.evaluation import tuning
from vanilla_transformer.evaluation.scores import Scorer
from vanilla_transformer.evaluation.systems import count_errors
from vanilla_transformer.hub.upload import staged, translate_in_fresh_process
from vanilla_transformer.training.recipe import parse_arguments

# ------------------------------------------------------------------------------------------------------ what it leaves


def test_output_directory_is_complete(finished):
    folder, _ = finished
    names = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json recipe.yaml "
    names += "configuration_vanilla_transformer.py modeling_vanilla_transformer.py all_results.json"
    for name in names.split():
        assert (folder / name).stat().st_size > 0, name
    for picture in ("training_curves.png", "attention.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
        assert f"]({picture})" in (folder / "README.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["checkpoint-4", "checkpoint-8"]
    for checkpoint in ["checkpoint-4", "checkpoint-8"]:
        assert AutoModelForSeq2SeqLM.from_pretrained(folder / checkpoint).config.d_model == 16
        assert AutoTokenizer.from_pretrained(folder / checkpoint)("a dog").input_ids[-1] == 2
    assert_close(weights(folder), weights(folder / "checkpoint-8"), tolerance=0)


def test_results_and_progress_describe_the_run(finished):
    folder, printed = finished
    found = results(folder)
    assert found["train_steps"] == 8
    assert found["num_parameters"] == sum(tensor.numel() for tensor in weights(folder).values())
    speed = found["train_target_tokens"] / found["train_runtime"]
    assert found["train_target_tokens_per_second"] == pytest.approx(speed)
    assert 0 < found["padding_fraction"] < 0.5
    assert 0 < found["eval_loss"] < found["train_loss"] * 1.5 < 12
    assert "tok:13a" in found["eval_bleu_signature"]
    assert printed.count("  translation ") == 3 * 3  # of three sentences at each evaluation
    lines = re.findall(
        r"^(\d)/8: loss \d\.\d{3}, [\d,]+ tokens/s, lr \d\.\de-\d\d, (\d\d:\d\d) left$", printed, re.MULTILINE
    )
    assert [int(step) for step, _ in lines] == [3, 4, 6, 8] and all(left < "01" for _, left in lines)


def assert_scores_are_those_of_the_saved_model(folder, pairs):
    rows = read_pairs(pairs, "test")
    translations = Translator.from_pretrained(str(folder))([row["en"] for row in rows])
    expected = Scorer().score(translations, [row["de"] for row in rows])
    found = results(folder)
    assert (found["test_bleu"], found["test_chrf"]) == (expected["bleu"], expected["chrf"])
    errors = count_errors(translations, [row["de"] for row in rows], Scorer())
    assert {name: found[f"test_{name}"] for name in errors} == errors
    assert all(found[f"test_{name}"] == expected[name] for name in ("bleu_signature", "chrf_signature"))


def test_scores_are_those_of_the_saved_model(finished, pairs):
    assert_scores_are_those_of_the_saved_model(finished[0], pairs)
    assert AutoTokenizer.from_pretrained(finished[0]).init_kwargs["max_source_sentences"] == 1


@pytest.mark.slow
def test_written_recipe_repeats_the_run_in_another_process(finished, fork, tmp_path):
    folder, _ = finished
    _, model, training, _ = parse_arguments(["--config", str(folder / "recipe.yaml")])
    assert (model.d_model, training.max_steps, model.activation_function) == (16, 8, "relu")
    again = fork(["--config", str(folder / "recipe.yaml"), "--output_dir", str(tmp_path / "again")])
    assert again.wait() == 0, again.printed()
    assert_close(weights(tmp_path / "again"), weights(folder), tolerance=0)


def assert_recipe_runs(folder):
    train(["--config", str(folder / "recipe.yaml"), "--output_dir", f"{folder}_again", "--max_steps", "1"])


# ------------------------------------------------------------------------------------------------------------- options


def test_averages_beams_and_held_out_validation(pairs, tmp_path):
    write_pairs(tmp_path / "pairs")
    shutil.copy(pairs / "train.jsonl", tmp_path / "pairs")
    more = "--max_steps 6 --save_steps 2 --average_checkpoints 2 --ema_decay 0.5 --num_beams 2 --length_penalty 0.6"
    more += " --gradient_accumulation_steps 2 --position_embedding_type learned --max_position_embeddings 128"
    more += " --norm_first --weight_decay 0.01 --lr_scheduler_type cosine --max_eval_samples 2"
    printed = train(options(tmp_path / "pairs", tmp_path / "model", more))
    assert "held out" in printed and "using the weights of checkpoint-4, checkpoint-6" in printed
    averages = [load_file(tmp_path / "model" / f"checkpoint-{step}" / "ema.safetensors") for step in (4, 6)]
    for name, value in weights(tmp_path / "model").items():
        torch.testing.assert_close(value, (averages[0][name] + averages[1][name]) / 2)
    assert "test_bleu" not in results(tmp_path / "model") and "eval_bleu" in results(tmp_path / "model")
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["length_penalty"]) == (2, 0.6)


@pytest.mark.slow
def test_decoding_is_tuned_on_the_validation_split(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "NUM_BEAMS", (2, 3))
    train(options(pairs, tmp_path / "model", "--max_steps 8 --tune_decoding"))
    found = results(tmp_path / "model")
    best = found["tuned_decoding"][0]
    assert len(found["tuned_decoding"]) == 2 * len(tuning.LENGTH_PENALTIES)
    assert best["bleu"] == max(one["bleu"] for one in found["tuned_decoding"])
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["length_penalty"]) == (best["num_beams"], best["length_penalty"])
    assert found["eval_bleu"] == pytest.approx(best["bleu"])
    chosen = f"Beams ({best['num_beams']}) and length penalty ({best['length_penalty']}) were chosen on the validation"
    assert chosen in (tmp_path / "model" / "README.md").read_text()
    assert_scores_are_those_of_the_saved_model(tmp_path / "model", pairs)


@pytest.mark.slow
def test_early_stopping_by_loss_keeps_the_best_weights(pairs, histories, tmp_path):
    """The learning rate makes the loss worse after a while."""
    more = "--max_steps 40 --eval_steps 2 --early_stopping_patience 2 --metric_for_best_model loss --learning_rate 0.2"
    printed = train(options(pairs, tmp_path / "model", more + QUICK))
    losses = {entry["step"]: entry["eval_loss"] for entry in histories[0] if "eval_loss" in entry}
    best = min(losses, key=losses.get)
    assert 2 < best < 36 and list(losses) == list(range(2, best + 5, 2))
    assert f"early stopping after step {best + 4}" in printed and f"the weights of checkpoint-{best}\n" in printed
    assert_close(weights(tmp_path / "model"), weights(tmp_path / "model" / f"checkpoint-{best}"), tolerance=0)
    assert results(tmp_path / "model")["eval_loss"] == losses[best]


def test_a_metric_of_evaluate_stands_beside_bleu_and_chooses_the_best_model(pairs, histories, tmp_path):
    """In the log, the results, a tracker, which gets the options, too, and the card."""
    module = write_metric(tmp_path / "lengths.py")
    more = f" --max_steps 6 --eval_steps 2 --early_stopping_patience 9 --report_to tensorboard --metrics {module}"
    more += " --metric_kwargs lengths.scale=3 --metric_for_best_model length_error"
    printed = train(options(pairs, tmp_path / "model", more + QUICK))
    errors = {entry["step"]: entry["eval_length_error"] for entry in histories[0] if "eval_loss" in entry}
    found = results(tmp_path / "model")
    assert found["eval_length_error"] == min(errors.values()) and list(errors) == [2, 4, 6]
    assert f", length_error {errors[2]:.4g}, same_length " in printed
    assert found["metrics"]["same_length"] == {"module": "lengths.py", "arguments": {"scale": 3}}
    curves = EventAccumulator(str(tmp_path / "model" / "vanilla-transformer")).Reload()
    assert [event.value for event in curves.Scalars("eval_length_error")][:3] == pytest.approx(list(errors.values()))
    assert [event.step for event in curves.Scalars("eval_bleu")] == [2, 4, 6, 6]
    (hyperparameters,) = (tmp_path / "model").rglob("hparams.yml")
    assert yaml.safe_load(hyperparameters.read_text())["d_model"] == 16
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "| length_error | same_length |" in card and "length_error of `lengths.py`, `scale=3`" in card
    rows = read_pairs(pairs, "test")[:1]
    translations = Translator.from_pretrained(str(tmp_path / "model"))([row["en"] for row in rows])
    lengths = [abs(len(text) - len(row["de"])) for text, row in zip(translations, rows, strict=True)]
    assert found["test_length_error"] == pytest.approx(3 * sum(lengths) / len(rows))
    said = train_fails(options(pairs, tmp_path / "other", more.replace("length_error", "rougeL")))
    assert "rougeL is not measured; choose one of loss, bleu, chrf, exact_match, word_error_rate, length_error" in said


def write_tasks(folder: Path):
    """Forms of three lines, Python code, and questions of which one in twelve has two sentences, as .jsonl files."""
    colors, shapes, sizes = map(str.split, ("red blue green black white", "cube ball cone ring disc", "big tiny flat"))
    forms = [
        (f"colour: {color}\nshape: {shape}\nsize: {size}", f"a {size} {color} {shape}")
        for color, shape, size in itertools.product(colors, shapes, sizes)
    ]
    operators = {"add": "+", "take": "-", "multiply": "*"}
    code = [
        (f"{verb} {name} and {n}", f"def f({name}):\n    if {name}:\n        return {name} {sign} {n}\n    return {n}")
        for (verb, sign), name, n in itertools.product(operators.items(), "xyz", range(9))
    ]
    nouns, fields = map(str.split, ("cats dogs birds cars boats trees books songs", "name age owner city price year"))
    asked = list(itertools.product(fields, nouns))
    one = [(f"Show the {field} of all {noun}.", f"SELECT {field} FROM {noun}") for field, noun in asked]
    two = [
        (f"{question} Only those that are {kind}.", f"{query} WHERE {kind}")
        for kind in ("old", "new", "cheap", "rare")
        for question, query in one
    ]
    splits = {f"{name}_train": rows[1::2] + rows[2::4] for name, rows in [("forms", forms), ("code", code)]}
    splits |= {"forms_held_out": forms[::4], "code_held_out": code[::4]}
    splits |= {"questions_train": one * 40 + two[1::2] + two[2::4], "questions_held_out": one[:4] + two[::4]}
    write_pairs(folder, **{name: [{"source": s, "target": t} for s, t in rows] for name, rows in splits.items()})


@pytest.mark.slow
@pytest.mark.parametrize("task, more", [("forms", ""), ("code", "--verbatim"), ("code", ""), ("questions", "")])
def test_a_run_scores_what_it_trained(task, more, tmp_path, monkeypatch):
    """Sources of several lines or sentences are translated whole, by the evaluation, the tuning and the Translator;
    a verbatim model writes line breaks and indentation."""
    write_tasks(tmp_path)
    monkeypatch.setattr(tuning, "NUM_BEAMS", (1,))
    model = "--d_model 64 --vocab_size 400 --dropout 0 --label_smoothing_factor 0"
    for side in ("encoder", "decoder"):
        model += f" --{side}_layers 1 --{side}_attention_heads 4 --{side}_ffn_dim 128"
    data = f"--train_file {tmp_path}/{task}_train.jsonl --validation_file {tmp_path}/{task}_held_out.jsonl"
    steps = "--max_steps 400 --warmup_steps 20 --learning_rate 0.005 --lr_scheduler_type linear"
    steps += " --per_device_train_max_tokens 1024 --tune_decoding"
    printed = train(f"{model} {data} {steps} {more} --output_dir {tmp_path}/model".split())
    found = results(tmp_path / "model")
    is_lossy = (task, more) == ("code", "")
    assert found["eval_bleu"] == pytest.approx(100, abs=1) and found["tuned_decoding"][0]["bleu"] == found["eval_bleu"]
    assert found["eval_exact_match"] == (0 if is_lossy else pytest.approx(100, abs=5))
    assert ("does not keep, in target texts: line breaks (100%)" in printed) == is_lossy
    rows = read_pairs(tmp_path, f"{task}_held_out")
    translations = Translator.from_pretrained(str(tmp_path / "model"))([row["source"] for row in rows])
    exact = sum(text == row["target"] for text, row in zip(translations, rows, strict=True))
    assert 100 * exact / len(rows) == found["eval_exact_match"]


@pytest.mark.parametrize("kind", ["columns", "lists", "parallel"])
def test_validation_and_test_may_have_several_references(kind, tmp_path):
    """The loss is that of the first."""
    rows = [{"en": f"text {n}", "de": f"Text {n}", "second": f"ein Text {n}"} for n in range(30)]
    data, more = f"--train_file {tmp_path}/{kind}.jsonl --test_file {tmp_path}/{kind}.jsonl", ""
    if kind == "columns":
        more = "--source_column en --target_column de --reference_columns second"
    elif kind == "lists":
        rows = [{"source": row["en"], "target": [row["de"], row["second"]]} for row in rows]
        more = "--source_column source --target_column target"
    else:
        parallel = {tmp_path / "a.en": "en", tmp_path / "a.ref0": "de", tmp_path / "a.ref1": "second"}
        for path, name in parallel.items():
            path.write_text("".join(f"{row[name]}\n" for row in rows))
        data = " ".join(["--train_file", *map(str, parallel), "--test_file", *map(str, parallel)])
    write_pairs(tmp_path, **{kind: rows})
    train(f"{MODEL} {STEPS} {data} {more} --max_steps 2 --output_dir {tmp_path}/model".split())
    found = results(tmp_path / "model")
    assert found["test_bleu_signature"].startswith("nrefs:2|") and found["test_samples"] == 30
    translations = Translator.from_pretrained(str(tmp_path / "model"))([f"text {n}" for n in range(30)])
    expected = Scorer().score(translations, [[f"Text {n}", f"ein Text {n}"] for n in range(30)])
    assert (found["test_bleu"], found["test_chrf"]) == (expected["bleu"], expected["chrf"])


def test_fine_tuning_starts_from_the_model(finished, pairs, tmp_path):
    """Also with shorter pairs, the Translator splits no text that the model has learned to read."""
    folder = shutil.copytree(finished[0], tmp_path / "longer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 90
    tokenizer.save_pretrained(folder)
    more = f"--max_steps 1 --learning_rate 1e-12 --model_name_or_path {folder} --dropout 0.3"
    train(options(pairs, tmp_path / "tuned", more, model=""))
    torch.testing.assert_close(weights(tmp_path / "tuned"), weights(folder), rtol=0, atol=1e-9)
    assert (tmp_path / "tuned" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["dropout"] == 0.3
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned").model_max_length == 90
    assert_recipe_runs(tmp_path / "tuned")


@pytest.mark.slow
def test_translations_become_a_training_file(finished, pairs, tmp_path):
    """As docs/training.md does it; the run on both files resumes, and its recipe repeats it."""
    sources = [row["en"] + "\n" for row in read_pairs(pairs, "train")]
    (tmp_path / "train.en").write_text("".join(sources[:40]), encoding="utf-8")
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    commands = re.search(r"(?m)^ {4}vanilla-transformer translate .*\n {4}paste .*$", page).group()
    program = f"{sys.executable} -m vanilla_transformer"
    commands = commands.replace("outputs/teacher", str(finished[0])).replace("vanilla-transformer", program)
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    files = f"--train_file {pairs}/train.jsonl {tmp_path}/distilled.txt --train_file_weights 1 2"
    files += f" --train_file_tags <data> <bt> --validation_file {pairs}/validation.jsonl"
    argv = [*options(pairs, tmp_path / "model", QUICK)[2:], *files.split()]
    assert "train: 180 pairs" in train([*argv, "--max_steps", "4"])
    changed = train_fails([*argv, "--max_steps=8", "--resume_from_checkpoint", "--train_file_weights", "1", "3"])
    assert "the training pairs" in changed
    train([*argv, "--max_steps", "8", "--resume_from_checkpoint"])
    train(["--config", f"{tmp_path}/model/recipe.yaml", "--output_dir", f"{tmp_path}/whole"])
    assert_close(weights(tmp_path / "model"), weights(tmp_path / "whole"), tolerance=0)
    assert results(tmp_path / "whole")["dataset"] == "train.jsonl, distilled.txt"


CHANGES = {  # options, and whether they change the weights
    "--gradient_checkpointing": False,
    "--dataloader_num_workers 2": False,
    "--seed 1": True,
    "--r_drop_alpha 5": True,
    "--bpe_dropout 0.5": True,
    "--bpe_dropout 0.5 --dataloader_num_workers 2": True,
}


@pytest.fixture(scope="module")
def plain(pairs, tmp_path_factory):
    """The weights after three steps without any of them."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    train(options(pairs, folder, "--max_steps 3 --dropout 0.2" + QUICK))
    return weights(folder)


FAST = ("--gradient_checkpointing", "--r_drop_alpha 5")


@pytest.mark.parametrize(
    "more", [pytest.param(more, marks=[] if more in FAST else [pytest.mark.slow]) for more in CHANGES]
)
def test_option_acts_on_training(more, plain, pairs, tmp_path, monkeypatch):
    forward, calls = modeling.VanillaTransformerAttention.forward, []

    def count(self, *args, **kwargs):
        calls.append(self.training)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(modeling.VanillaTransformerAttention, "forward", count)
    train(options(pairs, tmp_path / "model", f"--max_steps 3 --dropout 0.2 {more}" + QUICK))
    found = weights(tmp_path / "model")
    assert [torch.equal(found[name], plain[name]) for name in plain] == [not CHANGES[more]] * len(plain)
    if "alpha" not in more:
        assert sum(calls) == (18 if "checkpointing" in more else 9)  # the backward pass computes each attention again


@pytest.mark.slow
def test_run_shows_no_sentences_if_asked(pairs, tmp_path):
    """Even if the run that it resumes has shown some, and drawn one."""
    secret, folder = "the big dog not sees not the man", tmp_path / "model"
    data = write_pairs(Path(shutil.copytree(pairs, tmp_path / "pairs")), test=[{"en": secret, "de": "der Hund"}])
    argv = options(data, folder, "--max_steps 2" + QUICK)
    assert f"  source       {secret}\n" in train(argv)
    with staged(folder) as published:
        assert {secret in (published / name).read_text() for name in ("README.md", "all_results.json")} == {True}
    (folder / "attention.png").write_bytes(b"\x89PNG")  # which two steps may not suffice for
    printed = train([*argv, "--max_steps", "4", "--num_examples", "0", "--resume_from_checkpoint"])
    assert "test: loss " in printed and secret not in printed
    assert results(folder)["examples"] == [] and not (folder / "attention.png").exists()
    with staged(folder) as published:
        assert not [path.name for path in published.iterdir() if secret.encode() in path.read_bytes()]
        card = (published / "README.md").read_text(encoding="utf-8")
    assert "attention.png" not in card and "not trained on" not in card


# ------------------------------------------------------------------------------------------------------------- dry run


def test_dry_run_predicts_the_run(pairs, tmp_path):
    """What it says comes true in a run of one epoch, and the recipe that it prints makes that run."""
    more = "--num_train_epochs 1 --gradient_accumulation_steps 2 --norm_first --ema_decay 0.9 --max_source_length 18"
    argv = options(pairs, tmp_path / "model", more + QUICK)
    printed = train([*argv, "--dry_run"])
    assert files(tmp_path) == {} and not (tmp_path / "model").exists()
    said, recipe, end = re.split(r"the resolved recipe:\n\n|(?=This is a dry run)", printed)

    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    from_recipe = ["--config", str(tmp_path / "recipe.yaml")]
    given, resolved = parse_arguments(argv).values(), parse_arguments(from_recipe).values()
    assert {key for key in given if given[key] not in (None, resolved[key])} == {"size"}
    added = {key: value for key, value in resolved.items() if given[key] is None and value is not None}
    assert {key for key in added if added[key] != getattr(VanillaTransformerConfig(), key)} == set()

    train(["--config", str(tmp_path / "recipe.yaml")])
    found = results(tmp_path / "model")
    assert (tmp_path / "model" / "recipe.yaml").read_text(encoding="utf-8") == recipe.rstrip("\n") + "\n"
    assert f"train: {found['train_samples']} pairs (dropped: 0 empty, {100 - found['train_samples']} too long)" in said
    assert 50 < found["train_samples"] < 100 and "validation: 2 pairs" in said and "test: 1 pairs" in said
    assert f"{found['num_parameters']:,} parameters, vocabulary size 280" in said
    count, padding = re.search(r"(\d+) batch(?:es)? an epoch, (.*) padding", said).groups()
    assert f"{int(count) / 2} steps an epoch, 2 batches each" in said
    assert f"steps 0 to {found['train_steps']}, learning rate up to 2.00e-02" in said
    assert found["train_steps"] == -(-int(count) // 2)
    if int(count) % 2 == 0:
        assert padding == f"{found['padding_fraction']:.1%}"
    assert re.search(
        rf"about \d.* s a step, so 0:00:\d\d for {found['train_steps']} steps, .*; \d\.\d\d GiB of memory", end
    )


def test_dry_run_of_a_resumed_stream(pairs, tmp_path):
    argv = options(pairs, tmp_path / "model", "--max_steps 2 --streaming" + QUICK)
    assert "train: a stream" in train(argv)
    before = files(tmp_path)
    printed = train([*argv, *["--max_steps", "4", "--dry_run", "--resume_from_checkpoint"]])
    assert "train: a stream" in printed and "steps 2 to 4" in printed and "GiB of memory" in printed
    assert files(tmp_path) == before


# ------------------------------------------------------------------------------------------------------- Marian models


@pytest.fixture(scope="module")
def marian_data(marian_pairs, tmp_path_factory):
    """What the Marian model was trained on, for training and for validation."""
    rows = [{"en": source, "de": target} for source, target in marian_pairs]
    return write_pairs(tmp_path_factory.mktemp("marian_data"), train=rows, validation=rows)


def marian_loss(folder, pairs) -> float:
    """The loss of the model and the tokenizer of transformers."""
    model, tokenizer = MarianMTModel.from_pretrained(folder).eval(), MarianTokenizer.from_pretrained(folder)
    sources, targets = map(list, zip(*pairs, strict=True))
    batch = tokenizer(sources, text_target=targets, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    with torch.no_grad():
        return model(**batch).loss.item()


@pytest.mark.slow
def test_fine_tuned_marian_model_starts_as_marian(marian, marian_data, marian_pairs, tmp_path):
    """Its loss, translations, weights and config are Marian's, in the run and on disk."""
    sources = [source for source, _ in marian_pairs]
    expected, folder = translate_by_marian(marian, sources), tmp_path / "model"
    more = f"--max_steps 1 --learning_rate 0 --model_name_or_path {marian} --attention_dropout 0.3"
    train(options(marian_data, folder, more, model=""))
    found = results(folder)
    assert found["eval_loss"] == pytest.approx(marian_loss(marian, marian_pairs), rel=1e-5)
    assert [example["translation"] for example in found["examples"]] == expected[:3]
    assert expected == [target for _, target in marian_pairs] and found["eval_bleu"] == pytest.approx(100)

    theirs, tokenizer = from_native(MarianMTModel.from_pretrained(marian)), MarianTokenizer.from_pretrained(marian)
    for directory in [folder, folder / "checkpoint-1"]:
        model, again = AutoModelForSeq2SeqLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
        assert_close(model.state_dict(), theirs.state_dict(), tolerance=0)
        fields = {name: getattr(theirs.config, name) for name in type(model.config).__annotations__}
        assert (fields | {"attention_dropout": 0.3}).items() <= model.config.to_dict().items()
        assert model.generation_config.bad_words_ids == [[tokenizer.pad_token_id]]
        assert again(sources, text_target=sources) == tokenizer(sources, text_target=sources)
        inputs = again(sources, padding=True, return_tensors="pt")
        assert again.batch_decode(model.generate(**inputs), skip_special_tokens=True) == expected
        assert Translator.from_pretrained(str(directory))(sources) == expected
    with staged(folder) as published:
        assert translate_in_fresh_process(published) == expected[0]
        for name in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"):
            assert (published / name).exists()
    assert_recipe_runs(folder)


def test_fine_tuned_marian_model_learns_and_resumes(marian, marian_data, marian_pairs, tmp_path):
    """Bit for bit, also where the checkpoint that the tokenizer was read from is deleted meanwhile."""
    more = f" --model_name_or_path {marian} --learning_rate 0.001 --save_steps 2 --save_total_limit 1"
    for name, part in [("whole", "4"), ("parts", "2"), ("parts", "4 --resume_from_checkpoint")]:
        train(options(marian_data, tmp_path / name, f"--max_steps {part}" + more, model=""))
    assert not (tmp_path / "parts" / "checkpoint-2").exists()
    names = ["source.spm", "target.spm", "vocab.json", "model.safetensors", "generation_config.json"]
    for name in [*names, *(f"checkpoint-4/{name}" for name in [*names, "optimizer.safetensors"])]:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert results(tmp_path / "parts")["eval_loss"] < marian_loss(marian, marian_pairs)


@pytest.mark.slow
def test_student_of_a_marian_model_has_its_tokenizer(marian, marian_data, marian_pairs, tmp_path):
    """And learns by its predictions alone what it knows."""
    more = f"--teacher {marian} --max_steps 80 --distillation_weight 1 --d_model 32 --encoder_layers 1"
    more += " --decoder_layers 1 --encoder_attention_heads 4 --decoder_attention_heads 4 --dropout 0"
    more += " --learning_rate 0.01 --warmup_steps 10 --save_steps 80"
    train(options(marian_data, tmp_path / "student", more, model=""))
    found, expected = AutoTokenizer.from_pretrained(tmp_path / "student"), tokenizer_for_training(str(marian))
    assert found.get_vocab() == expected.get_vocab()
    sources, targets = zip(*marian_pairs, strict=True)
    assert Translator.from_pretrained(str(tmp_path / "student"))(sources) == list(targets)


# ----------------------------------------------------------------------------------------------------------- bad input

BAD = {  # options, and a pattern of the message
    "indivisible heads": ("--encoder_attention_heads 3", "`d_model` is 16.*`encoder_attention_heads` is 3"),
    "wrong value": ("--dropout 1.5", "'dropout': it is 1.5; it must"),
    "wrong BLEU tokenizer before missing dataset": (
        "--bleu_tokenize moses --dataset_name {tmp}/none",
        "--bleu_tokenize moses does not exist; choose one of .*13a",
    ),
    "missing tokenizer": ("--tokenizer_name {tmp}/none", "The directory '{tmp}/none' does not exist"),
    "missing teacher": ("--teacher {tmp}/none", "The directory '{tmp}/none' does not exist"),
    "missing model": ("--model_name_or_path {tmp}/none", "The directory '{tmp}/none' does not exist"),
    "pickle of a Marian model": ("--model_name_or_path {tmp}/pickle", "{tmp}/pickle.*safetensors"),
    "malformed Hub id": ("--push_to_hub --hub_model_id a/b/c", "Cannot push to a/b/c: Repo id must"),
    "checkpoint without files": (
        "--resume_from_checkpoint {tmp}/checkpoint-9",
        "{tmp}/checkpoint-9 cannot be read: .*; delete this checkpoint to resume from an older one",
    ),
    "unknown attention": ("--attn_implementation flesh", "Cannot build a model with flesh attention"),
    "missing checkpoint": ("--resume_from_checkpoint {tmp}/none", "{tmp}/none is not a checkpoint-N folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_rejected_in_one_sentence(name, marian, pairs, tmp_path):
    (tmp_path / "checkpoint-9").mkdir()
    pickled = shutil.copytree(marian, tmp_path / "pickle")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    before = files(tmp_path)
    more, message = (text.format(tmp=tmp_path) for text in BAD[name])
    said = train_fails(options(pairs, tmp_path / "model", "--max_steps 2 " + more))
    assert re.search(message, said), said
    assert files(tmp_path) == before


IN_TRAINING = pytest.param(100, id="in training", marks=pytest.mark.slow)


@pytest.mark.parametrize("sample", [pytest.param(10**6, id="for the tokenizer"), IN_TRAINING])
def test_unreadable_row_of_a_stream_is_an_error(sample, tmp_path, monkeypatch):
    lines = ["en,de", *(f"a dog {i},ein Hund {i}" for i in range(12_000))]  # files are read 10,000 rows at a time
    (tmp_path / "validation.csv").write_text("\n".join(lines[:5]) + "\n")
    (tmp_path / "train.csv").write_text("\n".join([*lines, "a,b,c"]) + "\n")
    monkeypatch.setattr(encoding, "TOKENIZER_SAMPLE", sample)
    monkeypatch.setattr(splits, "SURVEYED", 100)
    more = f"--train_file {tmp_path}/train.csv --validation_file {tmp_path}/validation.csv --streaming --max_steps 99"
    message = train_fails(options("x", tmp_path / "model", more + " --per_device_train_max_tokens 20000")[2:])
    assert "line 12002" in message and ("training pairs" if sample > 100 else "after row ") in message
