"""train.py from end to end, on a hundred pairs. Run: pytest tests/test_train.py"""

import itertools
import json
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from helpers import translate_by_marian
from safetensors.torch import load_file, save_file
from test_checkpoint import rewrite
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from vanilla_transformer import (
    Translator,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    modeling_vanilla_transformer,
)
from vanilla_transformer.conversion import from_marian
from vanilla_transformer.data import batches
from vanilla_transformer.data import pairs as data
from vanilla_transformer.evaluation import scores as evaluation
from vanilla_transformer.evaluation.scores import TranslationQuality
from vanilla_transformer.hub.upload import check_model_directory, files_to_upload
from vanilla_transformer.training import distributed as learner
from vanilla_transformer.training import memory
from vanilla_transformer.training import optimization as training
from vanilla_transformer.training import plots as curves
from vanilla_transformer.training.arguments import parse_options
from vanilla_transformer.training.checkpoint import LOCK, list_checkpoints

ROOT = Path(__file__).parents[2]
WORDS = {"a": "ein", "dog": "Hund", "man": "Mann", "sees": "sieht", "big": "großer", "the": "der", "not": "nicht"}
MODEL = "--vocab_size 280 --d_model 16 --encoder_layers 1 --decoder_layers 1 --encoder_ffn_dim 24 --decoder_ffn_dim 24"
MODEL += " --encoder_attention_heads 2 --decoder_attention_heads 2"
QUICK = ["--max_eval_samples", "2", "--max_predict_samples", "1"]
STEPS = "--per_device_train_max_tokens 200 --warmup_steps 4 --logging_steps 3 --save_steps 4 --learning_rate 0.02"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """A dataset directory of 100 training, 6 validation and 7 test pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    generator = random.Random(0)
    for split, count in [("train", 100), ("validation", 6), ("test", 7)]:
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for _ in range(count):
                words = generator.choices(list(WORDS), k=generator.randint(1, 7))
                pair = {"en": " ".join(words), "de": " ".join(WORDS[word] for word in words)}
                file.write(json.dumps(pair, ensure_ascii=False) + "\n")
    return folder


def options(pairs, output_dir, *more: str, model: str = MODEL) -> list[str]:
    data = [
        "--dataset_name",
        str(pairs),
        "--source_lang",
        "en",
        "--target_lang",
        "de",
        "--output_dir",
        str(output_dir),
    ]
    return [*data, *model.split(), *STEPS.split(), *more]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def train(cache, monkeypatch, capfd):
    """train(options) -> exit status, stdout and stderr of train.py, run in this process, which has it all imported."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(training, "keep_freed_memory", lambda: None)
    threads = torch.get_num_threads()

    def run(argv: list[str]) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        capfd.readouterr()
        status = 0
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as error:
            status = error.code
        return status, *capfd.readouterr()

    yield run
    torch.set_num_threads(threads)
    logging.enable_progress_bar()


def launch(command: list[str], cache: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs train.py in processes of its own, on the CPU."""
    environment = {"HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # the threads that train.py begins fight for cores with other tests
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"} | environment
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_identical(ours: dict, theirs: dict):
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def results(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text(encoding="utf-8"))


# -------------------------------------------------------------------------------------------- what a run leaves behind


@pytest.fixture(scope="module")
def finished(pairs, cache, tmp_path_factory):
    """The output directory of 8 steps, and what was printed."""
    folder = tmp_path_factory.mktemp("finished") / "model"
    argv = options(pairs, folder, "--max_steps", "8", "--eval_steps", "4")
    printed = launch(["accelerate.commands.launch", "train.py", *argv], cache)
    return folder, printed


KEYS = (
    "train_runtime train_steps train_loss train_target_tokens train_target_tokens_per_second padding_fraction "
    "num_parameters eval_loss eval_bleu eval_chrf test_bleu test_chrf bleu_signature chrf_signature"
)


def test_the_output_directory(finished):
    folder, _ = finished
    names = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json recipe.yaml "
    names += (
        "configuration_vanilla_transformer.py modeling_vanilla_transformer.py all_results.json training_curves.png"
    )
    for name in names.split():
        assert (folder / name).stat().st_size > 0, name
    for picture in ("training_curves.png", "attention.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
        assert f"]({picture})" in (folder / "README.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["checkpoint-4", "checkpoint-8"]
    for checkpoint in ["checkpoint-4", "checkpoint-8"]:
        assert AutoModelForSeq2SeqLM.from_pretrained(folder / checkpoint).config.d_model == 16
        assert AutoTokenizer.from_pretrained(folder / checkpoint)("a dog").input_ids[-1] == 2
    assert_identical(weights(folder), weights(folder / "checkpoint-8"))


def test_all_results(finished):
    found = results(finished[0])
    assert set(KEYS.split()) <= found.keys()
    assert found["train_steps"] == 8
    assert found["num_parameters"] == sum(tensor.numel() for tensor in weights(finished[0]).values())
    assert found["train_target_tokens_per_second"] == pytest.approx(
        found["train_target_tokens"] / found["train_runtime"]
    )
    assert 0 < found["padding_fraction"] < 0.5
    assert 0 < found["eval_loss"] < found["train_loss"] * 1.5 < 12
    assert "tok:13a" in found["bleu_signature"]


def test_what_is_printed(finished):
    _, printed = finished
    assert "train: 100 pairs (dropped: 0 empty, 0 too long)" in printed.stdout
    assert "test: 7 pairs" in printed.stdout
    assert f"The model is in {finished[0]}." in printed.stdout
    shown = printed.stdout + printed.stderr
    for name, count in [("eval", 2), ("test", 1)]:
        assert shown.count(f"{name}: loss ") == count
    assert shown.count("  translation ") == 3 * 3  # of three sentences at each evaluation
    for part in ["loss ", "target tokens/s", "padding ", "lr "]:
        assert part in printed.stderr


def test_scores_are_those_of_the_saved_model(finished, pairs):
    folder, _ = finished
    rows = [json.loads(line) for line in (pairs / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    translations = Translator.from_pretrained(str(folder))([row["en"] for row in rows])
    scores = TranslationQuality().compute(predictions=translations, references=[row["de"] for row in rows])
    found = results(folder)
    assert (found["test_bleu"], found["test_chrf"]) == (scores["bleu"], scores["chrf"])
    assert (found["bleu_signature"], found["chrf_signature"]) == (scores["bleu_signature"], scores["chrf_signature"])


LOAD = """
import importlib.abc, sys
class Guard(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vanilla_transformer":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Guard())
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = AutoTokenizer.from_pretrained(sys.argv[1])(["a dog", "the man sees"], padding=True, return_tensors="pt")
assert "vanilla_transformer" not in sys.modules
with torch.no_grad():
    torch.save([model(**inputs, decoder_input_ids=inputs["input_ids"]).logits, model.generate(**inputs)], sys.argv[2])
"""


def test_it_loads_with_and_without_the_package(finished, tmp_path):
    folder, _ = finished
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", LOAD, str(folder), str(tmp_path / "logits.pt")]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(model) is VanillaTransformerForConditionalGeneration
    inputs = AutoTokenizer.from_pretrained(folder)(["a dog", "the man sees"], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    theirs, translated = torch.load(tmp_path / "logits.pt")
    assert torch.equal(theirs, logits)
    assert torch.equal(translated, model.generate(**inputs))


def test_the_recipe_it_leaves_trains_the_same_model(finished, train, tmp_path):
    folder, _ = finished
    resolved = parse_options(["--config", str(folder / "recipe.yaml")])
    assert (resolved.d_model, resolved.max_steps, resolved.activation_function) == (16, 8, "relu")
    status, _, errors = train(["--config", str(folder / "recipe.yaml"), "--output_dir", str(tmp_path / "again")])
    assert status == 0, errors
    # Also: the same seed twice, in two processes, makes the same weights.
    assert_identical(weights(tmp_path / "again"), weights(folder))


def check_recipe(folder, train):
    """What the run left as its recipe is taken as it is."""
    argv = [
        "--config",
        str(folder / "recipe.yaml"),
        "--output_dir",
        str(folder.with_name("again")),
        "--max_steps",
        "1",
    ]
    status, _, errors = train([*argv, "--max_eval_samples", "1", "--max_predict_samples", "1"])
    assert status == 0, errors


def test_another_seed_is_another_model(pairs, train, tmp_path):
    for seed in ["1", "2"]:
        argv = options(pairs, tmp_path / seed, "--max_steps", "2", "--seed", seed)
        assert train(argv)[0] == 0
    first, second = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert all(not torch.equal(first[name], second[name]) for name in first)


# ----------------------------------------------------------------------------------------------- stopping and resuming


@pytest.mark.parametrize("named", [False, True], ids=["newest", "named"])
def test_interrupted_and_resumed_is_uninterrupted(named, finished, pairs, train, tmp_path):
    """Bit for bit, with dropout; the uninterrupted run was in another process."""
    folder, _ = finished
    assert json.loads((folder / "config.json").read_text())["dropout"] == 0.1
    for steps in ["4", "8"]:
        argv = options(pairs, tmp_path / "model", "--max_steps", steps, "--eval_steps", "4")
        if steps == "8":
            checkpoint = [str(tmp_path / "model" / "checkpoint-4")] if named else []
            argv += ["--resume_from_checkpoint", *checkpoint]
        status, _, errors = train(argv)
        assert status == 0, errors
    for checkpoint in ["checkpoint-4", "checkpoint-8"]:
        for name in ["model.safetensors", "optimizer.safetensors"]:
            ours, theirs = (load_file(run / checkpoint / name) for run in (tmp_path / "model", folder))
            assert_identical(ours, theirs)
    assert_identical(weights(tmp_path / "model"), weights(folder))
    ours, theirs = results(tmp_path / "model"), results(folder)
    timed = {"date", "train_runtime", "train_target_tokens_per_second"}
    assert {key: ours[key] for key in ours.keys() - timed} == {key: theirs[key] for key in theirs.keys() - timed}


def test_resuming_with_accumulated_steps_and_an_average(pairs, train, tmp_path, monkeypatch):
    """The offset counts the batches of all steps; the curves show both parts and the last evaluation."""
    drawn = []
    monkeypatch.setattr(curves, "plot_training_curves", lambda history, path: drawn.append(history))
    more = ["--gradient_accumulation_steps", "3", "--ema_decay", "0.8", "--save_steps", "2"]
    more += ["--max_eval_samples", "2", "--max_predict_samples", "2"]
    for folder, steps, resume in [
        ("whole", "4", []),
        ("parts", "2", []),
        ("parts", "4", ["--resume_from_checkpoint"]),
    ]:
        status, _, errors = train(options(pairs, tmp_path / folder, "--max_steps", steps, *more, *resume))
        assert status == 0, errors
    for name in ["checkpoint-4/model.safetensors", "checkpoint-4/ema.safetensors", "model.safetensors"]:
        assert_identical(load_file(tmp_path / "parts" / name), load_file(tmp_path / "whole" / name))
    for history in drawn[0], drawn[2]:
        assert [entry["step"] for entry in history if "loss" in entry] == [2, 3, 4]
        assert [entry["step"] for entry in history if "eval_loss" in entry] == [4]


# --------------------------------------------------------------------------------------------- stopped at every moment

EVERYTHING = "--max_steps 20 --gradient_accumulation_steps 2 --dropout 0.2 --attention_dropout 0.1 --ema_decay 0.5"
EVERYTHING += " --r_drop_alpha 2 --bpe_dropout 0.1 --eval_steps 3 --early_stopping_patience 2 --save_total_limit 9"
EVERYTHING += " --max_eval_samples 2 --max_predict_samples 1"
KINDS = {"map-style": [], "streaming": ["--streaming"]}
AFTER = 9  # steps it stops early, as no evaluation has a better BLEU than the first, 0


@pytest.fixture(scope="module")
def uninterrupted(pairs, cache, tmp_path_factory):
    """uninterrupted(kind, train) -> the output directory of a run with EVERYTHING."""
    folders = {}

    def run(kind: str, train) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("uninterrupted") / "model"
            status, _, errors = train(options(pairs, folders[kind], *EVERYTHING.split(), *KINDS[kind]))
            assert status == 0, errors
        return folders[kind]

    return run


@pytest.fixture
def stop(train, monkeypatch):
    """stop(options, owner, name, call): SIGTERM comes just before that call of a function; returns the command that it
    is said to go on by."""

    def run(argv: list[str], owner, name: str, call: int) -> list[str]:
        function, calls = getattr(owner, name), itertools.count(1)

        def call_and_signal(*args, **kwargs):
            if next(calls) == call:
                signal.raise_signal(signal.SIGTERM)
            return function(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, call_and_signal)
            status, _, errors = train(argv)
        assert status == 128 + signal.SIGTERM, errors
        said = re.findall(r"train.py: stopped after step \d+, which is saved; go on by: (.*)\n", errors)
        assert len(said) == 1 and "Traceback" not in errors, errors
        command = shlex.split(said[0])
        assert command[:3] == ["accelerate", "launch", "train.py"]
        return command[3:]

    return run


def state(checkpoint: Path) -> dict:
    """What a checkpoint knows of its run, without times and without what was logged only because of a stop."""
    found = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    history = [entry for entry in found["history"] if "eval_loss" in entry]
    return {key: found[key] for key in found.keys() - {"train_runtime", "is_interrupted", "stream"}} | {
        "history": history
    }


def outcome(folder: Path) -> dict:
    """What must be the same of two runs: the newest checkpoint's tensors and state, the final weights, the results."""
    checkpoint = list_checkpoints(folder)[-1]
    assert checkpoint.damage() is None
    names = [path.name for path in checkpoint.folder.glob("*.safetensors")]
    tensors = {f"{name}/{k}": v for name in names for k, v in load_file(checkpoint.folder / name).items()}
    tensors |= weights(folder)
    timed = {"date", "train_runtime", "train_target_tokens_per_second"}
    scores = {key: value for key, value in results(folder).items() if key not in timed}
    return {"tensors": tensors, "state": state(checkpoint.folder), "results": scores}


def assert_same_outcome(ours: Path, theirs: Path):
    ours, theirs = outcome(ours), outcome(theirs)
    assert_identical(ours.pop("tensors"), theirs.pop("tensors"))
    assert ours == theirs


@pytest.fixture
def small_pools(monkeypatch):
    """A stream of a hundred pairs is read in several pools."""
    monkeypatch.setattr(batches, "FIRST_STREAM_POOL", 32)


@pytest.mark.parametrize("calls", [[2] * AFTER, [4, 7]], ids=["at every step", "twice"])
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_at_any_step(kind, calls, pairs, train, stop, small_pools, uninterrupted, tmp_path):
    """Within the accumulation of a step, of which two make more than an epoch; then going on as it is said."""
    expected = uninterrupted(kind, train)
    assert results(expected)["train_steps"] == AFTER
    argv = options(pairs, tmp_path / "model", *EVERYTHING.split(), *KINDS[kind])
    for call in calls:
        argv = stop(argv, training, "loss_of", call)
    status, _, errors = train(argv)
    assert status == 0, errors
    assert_same_outcome(tmp_path / "model", expected)
    assert steps(tmp_path / "model") == steps(expected)  # and none that was saved only for the stop


def test_stopped_while_the_last_checkpoint_is_saved(pairs, train, stop, tmp_path):
    """What is left, the last evaluation, is left."""
    argv = options(pairs, tmp_path / "parts", "--max_steps", "8", *QUICK)
    argv = stop(argv, learner.Learner, "save", 2)
    assert steps(tmp_path / "parts") == [4, 8] and not (tmp_path / "parts" / "config.json").exists()
    assert train(argv)[0] == 0
    assert train(options(pairs, tmp_path / "whole", "--max_steps", "8", *QUICK))[0] == 0
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_in_and_after_an_evaluation(kind, pairs, train, stop, small_pools, uninterrupted, tmp_path):
    expected = uninterrupted(kind, train)
    argv = options(pairs, tmp_path / "model", *EVERYTHING.split(), *KINDS[kind])
    for _ in range(2):
        argv = stop(argv, evaluation, "translate_split", 1)
        argv = stop(argv, training.RunState, "log_scores", 1)
    status, _, errors = train(argv)
    assert status == 0, errors
    assert_same_outcome(tmp_path / "model", expected)


CHANGED = {
    "seed": (["--seed", "1"], "--seed is 1, and 42 in"),
    "token budget": (["--per_device_train_max_tokens", "150"], "--per_device_train_max_tokens is 150, and 200 in"),
    "BPE-dropout": (["--bpe_dropout", "0.2"], "--bpe_dropout is 0.2, and 0.1 in"),
    "accumulation": (
        ["--gradient_accumulation_steps", "1"],
        "is made of 2 batches, and now of 1; choose --gradient_acc",
    ),
    "sizes": (["--d_model", "32"], "`d_model` is 16, and that of this run 32"),
    "fewer pairs": (["--max_train_samples", "99"], "The training pairs are not those of"),
    "shorter pairs": (["--max_source_length", "20"], "--max_source_length is 20, and 128 in"),
    "other columns": (["--source_lang", "de", "--target_lang", "en"], "The training pairs are not those of"),
    "other pairs": ([], "The training pairs are not those of"),
    "from map-style to streaming": (["--streaming"], "--streaming is True, and False in"),
    "no average yet": (["--ema_decay", "0.5"], "it was written without --ema_decay; leave that out"),
}


@pytest.fixture(scope="module")
def short_runs(pairs, cache, tmp_path_factory):
    """short_runs(kind, train) -> a dataset and the output directory of two steps on it, to be copied."""
    made = {}

    def run(kind: str, train) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("short")
            shutil.copytree(pairs, made[kind] / "pairs")
            argv = options(made[kind] / "pairs", made[kind] / "model", "--max_steps", "2", *CHANGES, *KINDS[kind])
            assert train(argv)[0] == 0
        return made[kind]

    return run


CHANGES = ["--gradient_accumulation_steps", "2", "--bpe_dropout", "0.1", *QUICK]


def assert_refused(said: str, argv: list[str], train, folder: Path):
    before = files(folder)
    status, _, errors = train([*argv, "--resume_from_checkpoint"])
    message = one_sentence(errors)
    assert status == 2 and said in message and str(folder) in message, message
    assert files(folder) == before


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_of_data_or_order_is_refused(name, short_runs, train, tmp_path):
    more, said = CHANGED[name]
    shutil.copytree(short_runs("map-style", train), tmp_path, dirs_exist_ok=True)
    if name == "other pairs":
        change_pairs(tmp_path / "pairs")
    argv = options(tmp_path / "pairs", tmp_path / "model", "--max_steps", "4", *CHANGES, *more)
    assert_refused(said, argv, train, tmp_path / "model")


def change_pairs(folder: Path):
    """The last word of the last pair."""
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    lines[-1] = re.sub(r"\w+(?=\"}\n)", "Hunde", lines[-1])
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")


CHANGED_STREAMS = {
    "seed": (["--seed", "1"], "--seed is 1, and 42 in"),
    "fewer pairs": (["--max_train_samples", "99"], "--max_train_samples is 99, and None in"),
    "other columns": (["--source_lang", "de", "--target_lang", "en"], "--source_lang is de, and en in"),
    "from streaming to map-style": (["--streaming", "false"], "--streaming is False, and True in"),
}


@pytest.mark.parametrize("name", CHANGED_STREAMS)
def test_a_change_of_a_stream_is_refused(name, short_runs, train, tmp_path):
    more, said = CHANGED_STREAMS[name]
    folder = short_runs("streaming", train)
    argv = options(folder / "pairs", folder / "model", "--max_steps", "4", *CHANGES, "--streaming", *more)
    assert_refused(said, argv, train, folder / "model")


def test_a_stream_that_is_another_one_is_noticed(short_runs, train, tmp_path):
    shutil.copytree(short_runs("streaming", train), tmp_path / "run")
    folder = short_runs("streaming", train) / "pairs"
    kept = (folder / "train.jsonl").read_text(encoding="utf-8")
    change_pairs(folder)
    argv = options(folder, tmp_path / "run" / "model", "--max_steps", "4", *CHANGES, "--streaming")
    status, _, errors = train([*argv, "--resume_from_checkpoint"])
    (folder / "train.jsonl").write_text(kept, encoding="utf-8")
    assert status == 2
    assert "The stream is not the one of the checkpoint: pairs 0 and on of its epoch 0" in one_sentence(errors)


def test_what_may_change_is_said(short_runs, train, tmp_path):
    shutil.copytree(short_runs("map-style", train), tmp_path, dirs_exist_ok=True)
    argv = options(tmp_path / "pairs", tmp_path / "model", "--max_steps", "3", *CHANGES, "--resume_from_checkpoint")
    more = "--learning_rate 0.01 --dropout 0.3 --label_smoothing_factor 0 --max_grad_norm 0 --weight_decay 0.1"
    more += " --r_drop_alpha 1 --gradient_checkpointing --lr_scheduler_type linear --num_beams 2 --save_steps 1"
    status, printed, errors = train([*argv, *more.split()])
    assert status == 0, errors
    checkpoint = tmp_path / "model" / "checkpoint-2"
    assert re.findall(f"changed since {checkpoint}: --(.*)", printed) == [
        "learning_rate 0.02, now 0.01",
        "lr_scheduler_type inverse_sqrt, now linear",
        "max_steps 2, now 3",
        "weight_decay 0.0, now 0.1",
        "label_smoothing_factor 0.1, now 0.0",
        "max_grad_norm 1.0, now 0.0",
        "r_drop_alpha 0.0, now 1.0",
        "gradient_checkpointing False, now True",
        "num_beams 1, now 2",
        "dropout 0.1, now 0.3",
    ]
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dropout"] == 0.3


def test_scores_of_another_kind_are_not_compared(short_runs, train, tmp_path):
    """The best of the run is found among what was scored alike, and lies in the directory where it goes on."""
    shutil.copytree(short_runs("map-style", train), tmp_path, dirs_exist_ok=True)
    more = [
        "--max_eval_samples",
        "3",
        "--max_steps",
        "6",
        "--eval_steps",
        "2",
        "--early_stopping_patience",
        "9",
        "--learning_rate",
        "0",
    ]
    argv = options(tmp_path / "pairs", tmp_path / "model", *CHANGES, *more, "--resume_from_checkpoint")
    scored = json.loads((tmp_path / "model" / "checkpoint-2" / "trainer_state.json").read_text())
    scored["history"].append({"step": 2, "eval_loss": 0.0, "eval_bleu": 100.0, "eval_chrf": 100.0})
    rewrite(tmp_path / "model" / "checkpoint-2", "trainer_state.json", json.dumps(scored))
    status, printed, errors = train(argv)
    assert status == 0, errors
    assert f"changed since {tmp_path / 'model' / 'checkpoint-2'}: the validation pairs" in printed
    assert "the scores so far are not compared with those to come" in printed
    assert "Took the best weights, those of step 2." in printed  # which is scored again


def test_a_finished_run_is_scored_in_another_way(pairs, train, tmp_path):
    """Its last checkpoint is scored anew, and is the best of those that are."""
    more = ["--max_steps", "4", "--eval_steps", "2", "--average_checkpoints", "1", "--average_checkpoints_by", "score"]
    argv = options(pairs, tmp_path / "model", *more, *QUICK)
    assert train(argv)[0] == 0
    status, printed, errors = train([*argv, "--num_beams", "2", "--resume_from_checkpoint"])
    assert status == 0, errors
    assert "Averaged the weights of checkpoint-4." in printed


def test_a_model_without_a_loss_is_not_handed_out(pairs, train, tmp_path):
    """The last step may be the one at which training comes apart, after its loss was found."""
    more = ["--max_steps", "1", "--learning_rate", "1e30", "--warmup_steps", "0"]
    status, _, errors = train(options(pairs, tmp_path / "model", *more))
    assert status == 2 and "The loss of the validation pairs is nan after step 1" in one_sentence(errors)
    assert not (tmp_path / "model" / "config.json").exists()


def test_going_on_elsewhere_leaves_averages_behind(short_runs, train, tmp_path):
    run = short_runs("map-style", train)
    more = ["--max_steps", "4", "--average_checkpoints", "3", "--save_steps", "1"]
    argv = options(run / "pairs", tmp_path / "new", *CHANGES, *more)
    status, printed, errors = train([*argv, "--resume_from_checkpoint", str(run / "model" / "checkpoint-2")])
    assert status == 0, errors
    assert f"what was saved before {run / 'model' / 'checkpoint-2'} is not averaged, nor taken" in printed
    assert "Averaged the weights of checkpoint-2, checkpoint-3, checkpoint-4." in printed


BEGINNINGS = {
    "tokenizer": (["--tokenizer_name", "other"], "--tokenizer_name is other, and None in"),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_what_a_checkpoint_holds_is_not_given_anew(name, short_runs, train, tmp_path):
    more, said = BEGINNINGS[name]
    shutil.copytree(short_runs("map-style", train), tmp_path, dirs_exist_ok=True)
    argv = options(tmp_path / "pairs", tmp_path / "model", "--max_steps", "4", *CHANGES, *more)
    if name == "tokenizer":
        argv = [word for word in argv if word not in ("--vocab_size", "280")]
    assert_refused(said, argv, train, tmp_path / "model")


def test_a_sentence_that_the_model_is_not_made_for_is_not_scored(pairs, train, tmp_path):
    """20,000 tokens of one validation sentence would take more memory than there is."""
    shutil.copytree(pairs, tmp_path / "pairs")
    with open(tmp_path / "pairs" / "validation.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"en": "a dog " * 20_000, "de": "ein Hund " * 20_000}) + "\n")
    status, printed, errors = train(options(tmp_path / "pairs", tmp_path / "model", "--max_steps", "1"))
    assert status == 0, errors
    assert "validation: 6 pairs (dropped: 0 empty, 1 too long)" in printed


@pytest.mark.parametrize("sample", [10**6, 100], ids=["for the tokenizer", "in training"])
def test_a_stream_with_a_row_that_cannot_be_read(sample, train, tmp_path, monkeypatch):
    """After what was read of it; the run ends with a sentence."""
    lines = ["en,de", *(f"a dog {i},ein Hund {i}" for i in range(12_000))]  # files are read 10,000 rows at a time
    (tmp_path / "validation.csv").write_text("\n".join(lines[:5]) + "\n")
    (tmp_path / "train.csv").write_text("\n".join([*lines, "a,b,c"]) + "\n")
    monkeypatch.setattr(data, "TOKENIZER_SAMPLE", sample)
    files = ["--train_file", str(tmp_path / "train.csv"), "--validation_file", str(tmp_path / "validation.csv")]
    more = ["--streaming", "--max_steps", "99", "--per_device_train_max_tokens", "20000"]
    status, _, errors = train([*files, *options("", tmp_path / "model", *more)[2:]])
    message = one_sentence(errors)
    assert status == 2 and "line 12002" in message
    assert ("The training pairs could not be read" if sample > 100 else "The stream, after pair ") in message


def test_what_has_not_changed_is_not_said(short_runs, train, tmp_path):
    shutil.copytree(short_runs("map-style", train), tmp_path, dirs_exist_ok=True)
    argv = options(tmp_path / "pairs", tmp_path / "model", "--max_steps", "2", *CHANGES, "--resume_from_checkpoint")
    status, printed, errors = train(argv)
    assert status == 0, errors
    assert "changed since" not in printed


def test_resuming_where_nothing_is_begins(pairs, train, tmp_path):
    argv = options(pairs, tmp_path / "model", "--max_steps", "1", *CHANGES, "--resume_from_checkpoint")
    status, printed, errors = train(argv)
    assert status == 0, errors
    assert f"there is no checkpoint in {tmp_path / 'model'} yet: the run begins" in printed
    status, printed, errors = train(argv)
    assert status == 0, errors
    assert f"going on from {tmp_path / 'model' / 'checkpoint-1'}" in printed


def test_a_second_run_into_the_same_directory_is_refused(finished, pairs, train):
    folder, _ = finished
    before = files(folder)
    status, _, errors = train(options(pairs, folder, "--max_steps", "9"))
    assert status != 0
    assert str(folder) in errors and "--resume_from_checkpoint" in errors
    assert files(folder) == before


def test_a_loss_that_is_no_number_harms_nothing(finished, pairs, train, tmp_path):
    shutil.copytree(finished[0], tmp_path / "model")
    before = files(tmp_path / "model")
    argv = options(pairs, tmp_path / "model", "--max_steps", "20", "--resume_from_checkpoint", "--max_grad_norm", "0")
    status, _, errors = train([*argv, "--learning_rate", "1e38"])
    assert status != 0
    assert "The loss is nan and the norm of its gradient" in errors and "Traceback" not in errors
    assert {**files(tmp_path / "model"), "recipe.yaml": before["recipe.yaml"]} == before


def test_the_end_of_a_run_with_all_it_can_do(pairs, train, tmp_path):
    """Averages, a moving average, beams, early stopping, accumulation, learned positions, validation held out."""
    (tmp_path / "pairs").mkdir()
    shutil.copy(pairs / "train.jsonl", tmp_path / "pairs")
    more = "--max_steps 6 --save_steps 2 --average_checkpoints 2 --ema_decay 0.5 --num_beams 2 --length_penalty 0.6"
    more += " --gradient_accumulation_steps 2 --position_embedding_type learned --max_position_embeddings 128"
    more += " --norm_first --weight_decay 0.01 --lr_scheduler_type cosine --max_eval_samples 2"
    status, printed, errors = train(options(tmp_path / "pairs", tmp_path / "model", *more.split()))
    assert status == 0, errors
    assert "held out" in printed and "Averaged the weights of checkpoint-4, checkpoint-6" in printed
    states = [load_file(tmp_path / "model" / f"checkpoint-{step}" / "ema.safetensors") for step in (4, 6)]
    for name, value in weights(tmp_path / "model").items():
        torch.testing.assert_close(value, (states[0][name] + states[1][name]) / 2)
    assert "test_bleu" not in results(tmp_path / "model") and "eval_bleu" in results(tmp_path / "model")
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["length_penalty"]) == (2, 0.6)


def test_early_stopping_takes_the_best_weights(pairs, train, tmp_path):
    """With no learning rate nothing gets better: the first evaluation is the best, the second is the end."""
    more = "--max_steps 20 --eval_steps 2 --early_stopping_patience 1 --learning_rate 1e-12 --max_eval_samples 2"
    status, printed, errors = train(options(pairs, tmp_path / "model", *more.split(), "--max_predict_samples", "2"))
    assert status == 0, errors
    assert "Took the best weights, those of step 2" in printed and "Stopped early" in printed
    assert results(tmp_path / "model")["train_steps"] == 4


def test_tuning_a_trained_model(finished, pairs, train, tmp_path):
    folder, _ = finished
    argv = options(pairs, tmp_path / "tuned", "--max_steps", "1", "--learning_rate", "1e-12", model="")
    status, _, errors = train([*argv, "--model_name_or_path", str(folder), "--dropout", "0.3"])
    assert status == 0, errors
    torch.testing.assert_close(weights(tmp_path / "tuned"), weights(folder), rtol=0, atol=1e-9)
    assert (tmp_path / "tuned" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["dropout"] == 0.3
    check_recipe(tmp_path / "tuned", train)


def test_a_learning_rate_of_0_learns_nothing(pairs, train, tmp_path):
    argv = options(pairs, tmp_path / "model", "--max_steps", "2", "--save_steps", "1", "--learning_rate", "0")
    assert train([*argv, "--max_eval_samples", "1", "--max_predict_samples", "1"])[0] == 0
    assert_identical(*(weights(tmp_path / "model" / f"checkpoint-{step}") for step in (1, 2)))


def test_a_stream_trains(pairs, train, tmp_path):
    argv = options(pairs, tmp_path / "model", "--streaming", "--max_steps", "4", "--max_predict_samples", "2")
    status, printed, errors = train(argv)
    assert status == 0, errors
    assert "a stream" in printed
    assert results(tmp_path / "model")["train_steps"] == 4


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory) -> str:
    """Whole words, padded with the end of sentence."""
    words = {word: i for i, word in enumerate(["<e>", "<u>", *WORDS, *WORDS.values()])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<e>", "eos_token": "<e>", "unk_token": "<u>"}
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def test_an_existing_tokenizer_whose_pad_is_eos(pairs, train, word_tokenizer, tmp_path):
    """The model learns to end: what it trains on and what it writes ends in eos."""
    model = MODEL.replace("--vocab_size 280", "--dropout 0").replace("--d_model 16", "--d_model 32")
    argv = options(pairs, tmp_path / "model", "--max_steps", "80", "--save_steps", "80", model=model)
    status, _, errors = train([*argv, "--tokenizer_name", word_tokenizer])
    assert status == 0, errors
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    config = model.config
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (0, 0, 0)
    assert config.bos_token_id is None and config.vocab_size == 2 + 2 * len(WORDS)
    source = AutoTokenizer.from_pretrained(tmp_path / "model")("a dog", return_tensors="pt")
    translated = model.generate(**source, max_length=30)[0]
    assert translated[-1] == 0 and len(translated) < 10


def test_the_recipe_of_a_run_with_an_existing_tokenizer(pairs, train, word_tokenizer, tmp_path):
    argv = options(pairs, tmp_path / "model", "--max_steps", "1", model=MODEL.replace("--vocab_size 280", ""))
    assert train([*argv, "--tokenizer_name", word_tokenizer, "--max_eval_samples", "1"])[0] == 0
    check_recipe(tmp_path / "model", train)


# ------------------------------------------------------------------------------------------------- from a Marian model


@pytest.fixture(scope="module")
def marian_data(marian_pairs, tmp_path_factory) -> Path:
    """What the Marian model was trained on, for training and for validation."""
    folder = tmp_path_factory.mktemp("marian_data")
    rows(folder, [{"en": source, "de": target} for source, target in marian_pairs])
    return folder


def marian_loss(folder: Path, pairs: list[tuple[str, str]]) -> float:
    """The loss of the model and the tokenizer of transformers."""
    model, tokenizer = MarianMTModel.from_pretrained(folder).eval(), MarianTokenizer.from_pretrained(folder)
    sources, targets = map(list, zip(*pairs, strict=True))
    batch = tokenizer(sources, text_target=targets, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    with torch.no_grad():
        return model(**batch).loss.item()


@pytest.mark.slow
def test_a_marian_model_before_it_is_trained(marian, marian_data, marian_pairs, train, tmp_path):
    """Its loss, translations, weights and config are Marian's, in the run, on disk and without this package."""
    sources = [source for source, _ in marian_pairs]
    expected = translate_by_marian(marian, sources)
    folder = tmp_path / "model"
    argv = options(marian_data, folder, "--max_steps", "1", "--learning_rate", "0", model="")
    status, _, errors = train([*argv, "--model_name_or_path", str(marian), "--attention_dropout", "0.3"])
    assert status == 0, errors

    found = results(folder)
    assert found["eval_loss"] == pytest.approx(marian_loss(marian, marian_pairs), rel=1e-5)
    assert [example["translation"] for example in found["examples"]] == expected[:3]
    assert expected == [target for _, target in marian_pairs] and found["eval_bleu"] == pytest.approx(100)

    theirs = from_marian(MarianMTModel.from_pretrained(marian))
    tokenizer = MarianTokenizer.from_pretrained(marian)
    for directory in [folder, folder / "checkpoint-1"]:
        model, again = AutoModelForSeq2SeqLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
        assert_identical(model.state_dict(), theirs.state_dict())
        for name in type(model.config).__annotations__:
            expected_value = 0.3 if name == "attention_dropout" else getattr(theirs.config, name)
            assert getattr(model.config, name) == expected_value, name
        padding = tokenizer.pad_token_id
        ids = (model.config.pad_token_id, model.config.decoder_start_token_id, model.config.eos_token_id)
        assert ids == (padding, padding, tokenizer.eos_token_id)
        assert model.generation_config.bad_words_ids == [[padding]]
        assert again(sources, text_target=sources) == tokenizer(sources, text_target=sources)
        inputs = again(sources, padding=True, return_tensors="pt")
        assert again.batch_decode(model.generate(**inputs), skip_special_tokens=True) == expected
        assert Translator.from_pretrained(str(directory))(sources) == expected
    assert check_model_directory(folder) == expected[0]
    assert {"source.spm", "target.spm", "vocab.json", "tokenizer_config.json"} <= files_to_upload(folder).keys()
    check_recipe(folder, train)


def test_a_marian_model_is_trained_and_resumed(marian, marian_data, marian_pairs, train, tmp_path):
    """Bit for bit as without a stop; the checkpoint that the tokenizer was read from is deleted on the way."""
    more = ["--model_name_or_path", str(marian), "--learning_rate", "0.001", "--save_steps", "2"]
    more += ["--save_total_limit", "1"]
    for name, steps, resume in [("whole", "4", []), ("parts", "2", []), ("parts", "4", ["--resume_from_checkpoint"])]:
        argv = options(marian_data, tmp_path / name, "--max_steps", steps, *more, *resume, model="")
        status, _, errors = train(argv)
        assert status == 0, errors
    assert not (tmp_path / "parts" / "checkpoint-2").exists()
    names = ["source.spm", "target.spm", "vocab.json", "model.safetensors", "generation_config.json"]
    for name in [*names, *(f"checkpoint-4/{name}" for name in [*names, "optimizer.safetensors"])]:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert results(tmp_path / "parts")["eval_loss"] < marian_loss(marian, marian_pairs)


def as_pickle(folder: Path):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_t5(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    MarianTokenizer.from_pretrained(folder).save_pretrained(folder)


def without_a_weight(folder: Path):
    kept = {name: tensor for name, tensor in weights(folder).items() if not name.endswith("layers.0.fc1.bias")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def cut_off(folder: Path):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:200])


BAD_MARIANS = {  # what is done to it, further options, what is said
    "a pickle": (
        as_pickle,
        "",
        ["{marian} has no model", "vanilla-transformer convert {marian} NEW"],
    ),
    "of another kind": (as_t5, "", ["--model_name_or_path {marian}", "a t5 model"]),
    "not whole": (without_a_weight, "", ["--model_name_or_path {marian}", "do not match its config", "fc1.bias"]),
    "cut off": (cut_off, "", ["--model_name_or_path {marian}"]),
    "of other sizes": (None, "--d_model 16", ["--d_model is 16, and 32 in --model_name_or_path {marian}"]),
    "with another tokenizer": (None, "--tokenizer_name x", ["--tokenizer_name cannot be given"]),
    "with a dropout of 2": (None, "--dropout 2", ["`dropout` is 2.0; it must lie in [0, 1)"]),
    "with an unknown attention": (None, "--attn_implementation flesh", ["--attn_implementation flesh"]),
}


@pytest.mark.parametrize("name", BAD_MARIANS)
def test_a_marian_model_that_cannot_be_begun_from(name, marian, marian_data, train, tmp_path):
    change, more, parts = BAD_MARIANS[name]
    folder = shutil.copytree(marian, tmp_path / "marian")
    if change:
        change(folder)
    before = files(tmp_path)
    argv = options(marian_data, tmp_path / "model", "--model_name_or_path", str(folder), *more.split(), model="")
    status, _, errors = train([*argv, "--max_steps", "1"])
    assert status not in (0, None)
    message = one_sentence(errors)
    assert all(part.format(marian=folder) in message for part in parts), message
    assert files(tmp_path) == before


# --------------------------------------------------------------------------------------------------- what a run can do


GIBIBYTES = re.compile("about (.*) GiB of memory for training, of .* GiB on each process")
LARGE = ["--per_device_train_max_tokens", "100000"]


def test_a_dry_run(pairs, train, tmp_path):
    """What it says comes true in a run of one epoch, and the recipe that it prints makes that run."""
    argv = options(pairs, tmp_path / "model", "--num_train_epochs", "1", "--gradient_accumulation_steps", "2", *QUICK)
    argv += ["--norm_first", "--ema_decay", "0.9", "--max_source_length", "18"]
    before = files(tmp_path)
    status, printed, errors = train([*argv, "--dry_run"])
    assert status == 0, errors
    assert files(tmp_path) == before and not (tmp_path / "model").exists()
    said, recipe, end = re.split(r"the recipe, resolved:\n\n|(?=This was a dry run)", printed)
    assert "nothing is trained" in end

    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    given, resolved = vars(parse_options(argv)), vars(parse_options(["--config", str(tmp_path / "recipe.yaml")]))
    assert {key for key in given if given[key] not in (None, resolved[key])} == set()
    added = {key: value for key, value in resolved.items() if given[key] is None and value is not None}
    assert added.pop("config") == str(tmp_path / "recipe.yaml")
    assert {key for key in added if added[key] != getattr(VanillaTransformerConfig(), key)} == set()

    assert train(["--config", str(tmp_path / "recipe.yaml")])[0] == 0
    found = results(tmp_path / "model")
    assert (tmp_path / "model" / "recipe.yaml").read_text(encoding="utf-8") == recipe.rstrip("\n") + "\n"
    assert f"train: {found['train_samples']} pairs (dropped: 0 empty, {100 - found['train_samples']} too long)" in said
    assert 50 < found["train_samples"] < 100 and "validation: 2 pairs" in said and "test: 1 pairs" in said
    assert f"{found['num_parameters']:,} parameters, 280 token types" in said
    count, padding = re.search(r"(\d+) batches an epoch, (.*) padding", said).groups()
    assert f"{int(count) / 2} steps an epoch, of 2 batches each" in said
    assert f"steps 0 to {found['train_steps']}, learning rate up to 2.00e-02 at step 4" in said
    assert found["train_steps"] == -(-int(count) // 2)
    if int(count) % 2 == 0:
        assert padding == f"{found['padding_fraction']:.1%}"
    assert GIBIBYTES.search(said)[1] == "0.00"
    _, printed, _ = train([*argv, "--dry_run", "--output_dir", str(tmp_path / "large"), *LARGE])
    assert 0.1 < float(GIBIBYTES.search(printed)[1]) < 100


def test_a_run_that_ends_in_its_warm_up_is_told_of(pairs, train, tmp_path):
    """As without a recipe, whose 4,000 steps are many for a small corpus."""
    argv = options(pairs, tmp_path / "model", "--max_steps", "3", "--dry_run")
    status, printed, errors = train(argv)
    assert status == 0, errors
    assert "ends while the learning rate still rises: lower --warmup_steps" in printed
    _, printed, _ = train([*argv, "--warmup_steps", "3"])
    assert "still rises" not in printed


def test_a_dry_run_of_a_stream_and_of_a_run_to_be_resumed(short_runs, train):
    folder = short_runs("streaming", train)
    before = files(folder)
    argv = options(folder / "pairs", folder / "model", "--max_steps", "4", *CHANGES, "--streaming", "--dry_run")
    status, printed, errors = train([*argv, "--resume_from_checkpoint"])
    assert status == 0, errors
    assert "train: a stream" in printed and "steps 2 to 4" in printed and "GiB of memory" in printed
    assert files(folder) == before


def test_early_stopping_by_loss(pairs, train, tmp_path):
    """The learning rate makes the loss worse after a while; the weights are those of the lowest loss."""
    more = "--max_steps 40 --eval_steps 2 --early_stopping_patience 2 --metric_for_best_model loss --learning_rate 0.2"
    status, printed, errors = train(options(pairs, tmp_path / "model", *more.split(), *QUICK))
    assert status == 0, errors
    losses = {entry["step"]: entry["eval_loss"] for entry in state(newest(tmp_path / "model"))["history"]}
    best = min(losses, key=losses.get)
    assert 2 < best < 36 and list(losses) == list(range(2, best + 5, 2))
    assert "Stopped early, 2 evaluations after the best." in printed
    assert f"Took the best weights, those of step {best}." in printed
    assert_identical(weights(tmp_path / "model"), weights(tmp_path / "model" / f"checkpoint-{best}"))
    assert results(tmp_path / "model")["eval_loss"] == losses[best]


def newest(folder: Path) -> Path:
    return list_checkpoints(folder)[-1].folder


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def test_the_best_checkpoints_are_averaged(pairs, train, tmp_path):
    more = "--max_steps 12 --eval_steps 2 --average_checkpoints 2 --average_checkpoints_by score --save_total_limit 2"
    more += " --metric_for_best_model loss --learning_rate 0.2"
    status, printed, errors = train(options(pairs, tmp_path / "model", *more.split(), *QUICK))
    assert status == 0, errors
    losses = {entry["step"]: entry["eval_loss"] for entry in state(newest(tmp_path / "model"))["history"]}
    assert list(losses) == [2, 4, 6, 8, 10, 12]  # the last one is compared, too
    best = sorted(sorted(losses, key=losses.get)[:2])
    assert f"Averaged the weights of {', '.join(f'checkpoint-{step}' for step in best)}." in printed
    assert steps(tmp_path / "model") == sorted({*best, 10, 12})
    assert best != [10, 12]
    parts = [weights(tmp_path / "model" / f"checkpoint-{step}") for step in best]
    for name, mean in weights(tmp_path / "model").items():
        torch.testing.assert_close(mean, sum(part[name].double() for part in parts).float() / 2)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").config.d_model == 16


def test_the_best_and_the_newest_checkpoints_are_kept(pairs, train, tmp_path):
    """No BLEU is better than the first, 0, so that the best is the first that is evaluated."""
    more = "--max_steps 9 --save_steps 1 --eval_steps 3 --save_total_limit 2"
    status, _, errors = train(options(pairs, tmp_path / "model", *more.split(), *QUICK))
    assert status == 0, errors
    assert [entry["eval_bleu"] for entry in state(newest(tmp_path / "model"))["history"]] == [0, 0]
    assert steps(tmp_path / "model") == [3, 8, 9]


def test_a_token_budget_that_is_chosen_is_kept(pairs, train, tmp_path, monkeypatch):
    """The recipe holds the number, and a run that is resumed where there is less memory takes it, too."""
    less = ["--resume_from_checkpoint"]
    for folder, steps, free, resume in [
        ("whole", "4", 2**25, []),
        ("parts", "2", 2**25, []),
        ("parts", "4", 2**24, less),
    ]:
        monkeypatch.setattr(memory, "free_memory", lambda accelerator, free=free: free)
        argv = options(pairs, tmp_path / folder, "--max_steps", steps, "--save_steps", "2", *QUICK, *resume)
        status, printed, errors = train([*argv, "--per_device_train_max_tokens", "auto"])
        assert status == 0, errors
        chosen = re.findall(r"--per_device_train_max_tokens auto: (.*) tokens", printed)
        if not resume:
            assert len(chosen) == 1
            budget = int(chosen[0].replace(",", ""))
        assert (
            parse_options(["--config", str(tmp_path / folder / "recipe.yaml")]).per_device_train_max_tokens == budget
        )
    assert 128 <= budget < 2**15
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")


def run_of(pairs, train, folder: Path, *more: str) -> Path:
    status, _, errors = train(options(pairs, folder, "--max_steps", "3", *QUICK, *more))
    assert status == 0, errors
    return folder


def test_gradient_checkpointing_changes_nothing_but_memory(pairs, train, tmp_path, monkeypatch):
    attention = modeling_vanilla_transformer.VanillaTransformerAttention
    forward, calls = attention.forward, []

    def count(self, *args, **kwargs):
        calls[-1] += self.training
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", count)
    runs = {"without": [], "with": ["--gradient_checkpointing"]}
    for name, more in runs.items():
        calls.append(0)
        run_of(pairs, train, tmp_path / name, "--dropout", "0.2", *more)
    assert calls == [9, 18]  # the backward pass computes all of them again
    assert_same_weights(tmp_path)


def assert_same_weights(folder: Path):
    one, two = (weights(path) for path in sorted(folder.iterdir()))
    assert_identical(one, two)


def test_r_drop_without_dropout_changes_nothing(pairs, train, tmp_path):
    """Both readings of a pair are the same then. With dropout it is another run."""
    still = ["--dropout", "0", "--adam_epsilon", "1e-4"]
    plain, twice = (weights(run_of(pairs, train, tmp_path / a, *still, "--r_drop_alpha", a)) for a in ("0", "5"))
    torch.testing.assert_close(twice, plain, rtol=0, atol=1e-5)
    assert results(tmp_path / "5")["train_loss"] == pytest.approx(results(tmp_path / "0")["train_loss"], rel=1e-5)
    light, heavy = (weights(run_of(pairs, train, tmp_path / f"dropout {a}", "--r_drop_alpha", a)) for a in ("1", "5"))
    assert all(not torch.equal(light[name], heavy[name]) for name in light)


def test_bpe_dropout_is_the_same_however_batches_are_made(pairs, train, tmp_path):
    """More tokens for the same pairs, and the same ones twice, by this process and by two others."""
    for name, more in [("here", []), ("workers", ["--dataloader_num_workers", "2"])]:
        run_of(pairs, train, tmp_path / name, "--bpe_dropout", "0.5", *more)
    assert_same_weights(tmp_path)
    run_of(pairs, train, tmp_path / "none")
    assert results(tmp_path / "none")["train_target_tokens"] < results(tmp_path / "here")["train_target_tokens"]


@pytest.mark.slow
def test_compilation_is_bounded(train, tmp_path, monkeypatch):
    """One graph for all shapes of an epoch, and one for a lone sentence; the weights are those without compilation."""
    monkeypatch.setattr(training, "count_tokens", lambda batch, count=training.count_tokens: shapes_and(batch, count))
    generator, shapes = random.Random(0), set()

    def shapes_and(batch: dict, count) -> tuple:
        shapes.add((*batch["input_ids"].shape, batch["labels"].shape[1]))
        return count(batch)

    for split, count in [("train", 450), ("validation", 2)]:
        sides = [
            ["".join(generator.choices("abcdefgh", k=generator.randint(1, 40))) for _ in "st"] for _ in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"en": s, "de": t}) + "\n" for s, t in sides))
    argv = options(tmp_path, tmp_path / "plain", "--num_train_epochs", "1", "--save_steps", "1000")
    argv += ["--per_device_train_max_tokens", "120", "--learning_rate", "1e-3", "--adam_epsilon", "1e-4"]
    argv += ["--dropout", "0"]  # which a compiled model draws in another way
    assert train(argv)[0] == 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compiler.set_default_backend("aot_eager")
    try:
        status, _, errors = train([*argv, "--torch_compile", "--output_dir", str(tmp_path / "compiled")])
    finally:
        torch.compiler.set_default_backend(None)
        torch._dynamo.reset()
    assert status == 0, errors
    assert len(shapes) > 80
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(weights(tmp_path / "compiled"), weights(tmp_path / "plain"), rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- bad input


def one_sentence(errors: str) -> str:
    """The message of train.py, which must be one line of its own, with no traceback beside it."""
    assert "Traceback" not in errors
    lines = [line for line in errors.replace("\r", "\n").split("\n") if "error:" in line]
    assert len(lines) == 1 and lines[0].startswith("train.py: error: "), errors
    assert errors.rstrip().endswith(lines[0])
    return lines[0].removeprefix("train.py: error: ")


def rows(folder: Path, lines: list[dict]) -> str:
    folder.mkdir(exist_ok=True)
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


BAD = {
    "unknown option": (["--d_modl", "64"], ["--d_modl", "--d_model"]),
    "missing dataset": (["--dataset_name", "{tmp}/none"], ["{tmp}/none"]),
    "missing split": (["--test_split", "tset"], ["'tset'", "train, validation, test"]),
    "missing column": (["--source_column", "english", "--target_column", "de"], ["english", "en, de"]),
    "missing language": (["--target_lang", "fr"], ["fr", "en, de"]),
    "small vocabulary": (["--vocab_size", "200"], ["200", "260"]),
    "heads that do not divide": (
        ["--encoder_attention_heads", "3"],
        ["`d_model` is 16", "`encoder_attention_heads` is 3"],
    ),
    "wrong value": (["--dropout", "1.5"], ["`dropout` is 1.5"]),
    "no pair left": (["--max_source_length", "1"], ["No usable pair is left of the 100", "--max_source_length 1"]),
    "only missing texts": (["--dataset_name", "{none}"], ["No usable pair is left of the 3", "3 have an empty"]),
    "numbers for text": (
        ["--dataset_name", "{numbers}", "--source_column", "en", "--target_column", "de"],
        ["--target_column de holds no text"],
    ),
    "short learned table": (
        ["--position_embedding_type", "learned", "--max_position_embeddings", "50"],
        ["--max_position_embeddings is 50", "128"],
    ),
    "missing tokenizer": (["--tokenizer_name", "{tmp}/none"], ["{tmp}/none"]),
    "missing model": (["--model_name_or_path", "{tmp}/none"], ["{tmp}/none"]),
    "cut model": (["--model_name_or_path", "{cut}"], ["{cut}"]),
    "unknown attention": (["--attn_implementation", "flesh"], ["flesh"]),
    "missing checkpoint": (["--resume_from_checkpoint", "{tmp}/none"], ["--resume_from_checkpoint", "{tmp}/none"]),
    "foreign checkpoint": (["--resume_from_checkpoint", "{finished}"], ["--resume_from_checkpoint {finished}"]),
    "cut checkpoint": (["--resume_from_checkpoint", "{cut}"], ["--resume_from_checkpoint {cut}"]),
    "the same column twice": (["--target_lang", "en"], ["same, en"]),
    "not enough steps": (
        ["--resume_from_checkpoint", "{finished}/checkpoint-8"],
        ["ends at step 2", "after step 8"],
    ),
    "checkpoint of other sizes": (
        ["--resume_from_checkpoint", "{finished}/checkpoint-8", "--d_model", "32"],
        ["--resume_from_checkpoint {finished}/checkpoint-8", "`d_model` is 16, and that of this run 32"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, finished, pairs, train, tmp_path):
    more, parts = BAD[name]
    places = {"tmp": tmp_path, "finished": finished[0], "cut": tmp_path / "cut"}
    places["none"] = rows(
        tmp_path / "nones", [{"en": "a", "de": None}, {"en": None, "de": "b"}, {"en": "", "de": "b"}]
    )
    places["numbers"] = rows(tmp_path / "numbers", [{"en": f"a {i}", "de": i} for i in range(9)])
    shutil.copytree(finished[0] / "checkpoint-8", places["cut"])
    (places["cut"] / "model.safetensors").write_bytes((places["cut"] / "model.safetensors").read_bytes()[:200])
    before = files(tmp_path)
    status, _, errors = train(
        [*options(pairs, tmp_path / "model", "--max_steps", "2"), *(a.format(**places) for a in more)]
    )
    assert status not in (0, None)
    message = one_sentence(errors)
    assert all(part.format(**places) in message for part in parts), message
    assert files(tmp_path) == before  # nothing was begun


def test_an_unknown_recipe_key(train, tmp_path):
    (tmp_path / "recipe.yaml").write_text("dataset_name: x\nwarmup_step: 3\n")
    status, _, errors = train(["--config", str(tmp_path / "recipe.yaml")])
    assert status != 0
    assert errors == (
        f"train.py: error: 'warmup_step' in {tmp_path / 'recipe.yaml'} is not an option; did you mean warmup_steps?\n"
    )


# ------------------------------------------------------------------------------------------------------- two processes


def test_two_processes_are_one(pairs, cache, train, tmp_path):
    """As many steps on the same batches: the same weights, each test sentence scored once, all of it saved once."""
    more = ["--max_steps", "6", "--dropout", "0", "--adam_epsilon", "1e-4", "--eval_steps", "3"]
    # With this table every translation has the same bound of length, whatever it is batched with.
    more += ["--position_embedding_type", "learned", "--max_position_embeddings", "50"]
    more += ["--max_source_length", "50", "--max_target_length", "50"]
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    printed = launch([*command, *options(pairs, tmp_path / "two", *more)], cache)
    status, _, errors = train(options(pairs, tmp_path / "one", *more, "--gradient_accumulation_steps", "2"))
    assert status == 0, errors
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), rtol=0, atol=1e-5)
    two, one = results(tmp_path / "two"), results(tmp_path / "one")
    for key in ["train_steps", "train_target_tokens", "padding_fraction", "num_parameters"]:
        assert two[key] == one[key]
    for key in ["train_loss", "eval_loss", "test_loss"]:
        assert two[key] == pytest.approx(one[key], rel=1e-5)

    shown = printed.stdout + printed.stderr
    for part, count in [("The model is in", 1), ("test: loss", 1), ("eval: loss", 2), ("test: 7 pairs", 1)]:
        assert shown.count(part) == count, part
    assert files(tmp_path / "two").keys() == files(tmp_path / "one").keys()
    rows = [json.loads(line) for line in (pairs / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    translations = Translator.from_pretrained(str(tmp_path / "two"))([row["en"] for row in rows])
    scores = TranslationQuality().compute(predictions=translations, references=[row["de"] for row in rows])
    assert (two["test_bleu"], two["test_chrf"]) == (scores["bleu"], scores["chrf"])
    assert scores["chrf"] > 0


def test_a_run_that_is_resumed_elsewhere_and_has_nothing_to_do(finished, pairs, train, tmp_path):
    """Its output directory is whole nevertheless."""
    argv = options(pairs, tmp_path / "model", "--max_steps", "8", "--average_checkpoints", "2", *QUICK)
    status, printed, errors = train([*argv, "--resume_from_checkpoint", str(finished[0] / "checkpoint-8")])
    assert status == 0, errors
    assert steps(tmp_path / "model") == [8] and "Averaged the weights of checkpoint-8." in printed
    assert_identical(weights(tmp_path / "model"), weights(finished[0] / "checkpoint-8"))


def test_files_of_others_are_not_overwritten(pairs, train, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("mine")
    status, _, errors = train(options(pairs, tmp_path / "model", "--max_steps", "1"))
    assert status != 0 and "is not empty" in one_sentence(errors)
    assert files(tmp_path / "model").keys() == {"README.md"}


def test_an_older_checkpoint_is_not_mixed_with_newer_ones(finished, pairs, train, tmp_path):
    shutil.copytree(finished[0], tmp_path / "model")
    older = sorted(tmp_path.glob("model/checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[0]
    before = files(tmp_path / "model")
    argv = options(pairs, tmp_path / "model", "--max_steps", "9", "--resume_from_checkpoint", str(older))
    status, _, errors = train(argv)
    assert status != 0 and "is older than" in one_sentence(errors)
    assert files(tmp_path / "model") == before


def test_another_model_is_not_overwritten_by_a_run_that_is_resumed(finished, pairs, train, tmp_path):
    for name in ("one", "other"):
        shutil.copytree(finished[0], tmp_path / name)
    before = files(tmp_path)
    newest = max(tmp_path.glob("one/checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    argv = options(pairs, tmp_path / "other", "--max_steps", "20", "--resume_from_checkpoint", str(newest))
    status, _, errors = train(argv)
    assert status != 0 and "already holds a model" in one_sentence(errors)
    assert files(tmp_path) == before
