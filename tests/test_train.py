"""train.py from end to end, on a hundred pairs. Run: pytest tests/test_train.py"""

import json
import os
import random
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from vanilla_transformer import VanillaTransformerForConditionalGeneration, curves, training
from vanilla_transformer.evaluation import TranslationQuality
from vanilla_transformer.recipe import parse_options
from vanilla_transformer.translation import Translator

ROOT = Path(__file__).parents[1]
WORDS = {"a": "ein", "dog": "Hund", "man": "Mann", "sees": "sieht", "big": "großer", "the": "der", "not": "nicht"}
MODEL = "--vocab_size 280 --d_model 16 --encoder_layers 1 --decoder_layers 1 --encoder_ffn_dim 24 --decoder_ffn_dim 24"
MODEL += " --encoder_attention_heads 2 --decoder_attention_heads 2"
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
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


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
    assert (folder / "training_curves.png").read_bytes().startswith(b"\x89PNG")
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
    assert "Took the best weights, those of step 2" in printed and "Stopping early" in printed + errors
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
    "no checkpoint": (["--resume_from_checkpoint"], ["--resume_from_checkpoint", "{tmp}/model"]),
    "foreign checkpoint": (["--resume_from_checkpoint", "{finished}"], ["--resume_from_checkpoint {finished}"]),
    "cut checkpoint": (["--resume_from_checkpoint", "{cut}"], ["--resume_from_checkpoint {cut}"]),
    "the same column twice": (["--target_lang", "en"], ["same, en"]),
    "not enough steps": (
        ["--resume_from_checkpoint", "{finished}/checkpoint-8"],
        ["--max_steps is 2", "after step 8"],
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
