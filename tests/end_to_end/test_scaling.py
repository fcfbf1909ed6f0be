"""recipes/accelerate, docs/scaling.md: several processes and machines; streams. Run: pytest tests/test_scaling.py"""

import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import Translator
from vanilla_transformer.errors import UserError
from vanilla_transformer.evaluation.scores import TranslationQuality
from vanilla_transformer.training.arguments import parse_options
from vanilla_transformer.training.distributed import check_launch

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"(?m)^ {4}(accelerate launch .*)", PAGE)
COMMANDS += [line for file in FILES for line in re.findall(r"(?m)^# (accelerate launch .*)", file.read_text())]

# ------------------------------------------------------------------------------------------------- files and commands


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_takes_every_file(file):
    config = load_config_from_file(str(file))
    args = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    args, _, _ = _validate_launch_command(args)
    assert args.num_processes == config.num_processes and args.mixed_precision == "bf16"
    kinds = {"one_gpu": [], "deepspeed": ["use_deepspeed"], "fsdp2": ["use_fsdp"]}.get(file.stem, ["multi_gpu"])
    assert [kind for kind in ("multi_gpu", "use_deepspeed", "use_fsdp") if getattr(args, kind)] == kinds
    # What stands in a group of its own is read without a look at its name.
    known = vars(launch_command_parser().parse_args(["train.py"]))
    for value in yaml.safe_load(file.read_text()).values():
        assert not isinstance(value, dict) or value.keys() <= known.keys()


def test_there_is_a_file_for_every_way():
    assert {file.stem for file in FILES} == {"one_gpu", "several_gpus", "several_machines", "fsdp2", "deepspeed"}
    assert len(COMMANDS) >= 12
    named = {Path(word).stem for command in COMMANDS for word in command.split() if "recipes/accelerate" in word}
    assert named == {file.stem for file in FILES}


def test_what_is_linked_is_there():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGE) if "://" not in link]
    assert len(links) >= 3 and all((ROOT / "docs" / link).exists() for link in links)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = launch_command_parser().parse_args(shlex.split(command)[2:])
    assert Path(args.config_file).exists() and not [word for word in args.training_script_args if word == "\\"]
    if args.training_script == "train.py":
        options = parse_options(args.training_script_args)
        batches = _validate_launch_command(args)[0].num_processes * options.gradient_accumulation_steps
        assert batches == (16 if args.num_machines == 2 else 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment, name",
    [({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"), ({"ACCELERATE_USE_FSDP": "true"}, "FSDP 1")],
    ids=["DeepSpeed", "FSDP 1"],
)
def test_other_ways_to_shard_are_refused(environment, name, tmp_path, monkeypatch):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=name):
        check_launch()
    # Before anything is read: there is no such dataset.
    result = run(["python", "train.py", "--dataset_name", str(tmp_path), "--output_dir", str(tmp_path / "model")])
    assert result.returncode == 2 and result.stderr.startswith(f"train.py: error: {name} is not supported")
    assert result.stderr.count("\n") == 1 and not (tmp_path / "model").exists()


# --------------------------------------------------------------------------------------------------- several processes

WORDS = {"a": "ein", "dog": "Hund", "man": "Mann", "sees": "sieht", "big": "großer", "the": "der", "not": "nicht"}
MODEL = (
    "--vocab_size 280 --d_model 32 --encoder_layers 1 --decoder_layers 1 --encoder_ffn_dim 48 --decoder_ffn_dim 48 "
)
MODEL += (
    "--encoder_attention_heads 2 --decoder_attention_heads 2 --per_device_train_max_tokens 200 --learning_rate 0.01 "
)
# With this table every translation has the same bound of length, whatever it is in a batch with.
MODEL += "--position_embedding_type learned --max_position_embeddings 60 --max_source_length 60 --max_target_length 60"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Options that name a dataset of 150 training, 21 validation and 37 test pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    generator = random.Random(0)
    for split, count in [("train", 150), ("validation", 21), ("test", 37)]:
        words = [generator.choices(list(WORDS), k=generator.randint(1, 7)) for _ in range(count)]
        pairs = [{"en": " ".join(line), "de": " ".join(map(WORDS.get, line))} for line in words]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return ["--dataset_name", str(folder), "--source_lang", "en", "--target_lang", "de", *MODEL.split()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def environment(cache: Path | None = None, **more: str) -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ACCELERATE_USE_CPU": "true"}
    paths = {"PYTHONPATH": str(ROOT)} | ({"HF_DATASETS_CACHE": str(cache)} if cache else {})
    return os.environ | quiet | paths | more


def run(command: list[str], cache: Path | None = None, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess:
    """Runs it on the CPU."""
    command = [sys.executable if word == "python" else word for word in command]
    options = {"capture_output": True, "text": True, "timeout": 600}
    return subprocess.run(command, cwd=cwd, env=environment(cache, **more), **options)


def launch(file: str, processes: int, options: list[str], cache: Path, *more: str, **where) -> str:
    """Runs train.py by a file of recipes/accelerate, on so many processes in float32; returns what it printed."""
    command = ["python", "-m", "accelerate.commands.launch", "--config_file", str(FILES[0].with_stem(file))]
    command += ["--num_processes", str(processes), "--mixed_precision", "no", *more, str(ROOT / "train.py"), *options]
    result = run(command, cache, **where)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def launch_machines(options: list[str], caches: list[Path], folders: list[Path]) -> list[subprocess.Popen]:
    """Two machines of one process each, with a cache and a working directory of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_ip", "127.0.0.1"]
    command += ["--config_file", str(ROOT / "recipes" / "accelerate" / "several_machines.yaml")]
    command += ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", str(port)]
    return [
        subprocess.Popen(
            [*command, "--machine_rank", str(rank), str(ROOT / "train.py"), *options],
            cwd=folder,
            env=environment(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, (cache, folder) in enumerate(zip(caches, folders, strict=True))
    ]


def results(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def one(data, cache, tmp_path_factory) -> Path:
    """What one process trains, with dropout, by two accumulation steps."""
    folder = tmp_path_factory.mktemp("one") / "model"
    launch("one_gpu", 1, [*data, *TWELVE, "--gradient_accumulation_steps", "2", "--output_dir", str(folder)], cache)
    assert json.loads((folder / "config.json").read_text())["dropout"] == 0.1
    return folder


TWELVE = ["--max_steps", "12", "--warmup_steps", "4", "--eval_steps", "6", "--ema_decay", "0.5"]
# The gradient of the keys' bias is 0 but for rounding, of which Adam would make steps as large as any.
TWELVE += ["--adam_epsilon", "1e-4"]


def assert_same_run(ours: Path, theirs: Path):
    for name in ["model.safetensors", "checkpoint-12/optimizer.safetensors", "checkpoint-12/ema.safetensors"]:
        found, expected = load_file(ours / name), load_file(theirs / name)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    found, expected = results(ours), results(theirs)
    for key in ["train_steps", "train_target_tokens", "padding_fraction", "eval_bleu", "test_bleu", "test_chrf"]:
        assert found[key] == expected[key], key
    for key in ["train_loss", "eval_loss", "test_loss"]:
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("file", ["several_gpus", "fsdp2"])
def test_two_processes_are_one_with_dropout(file, one, data, cache, tmp_path):
    launch(file, 2, [*data, *TWELVE, "--output_dir", str(tmp_path / "model")], cache)
    assert_same_run(tmp_path / "model", one)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["several_gpus", "fsdp2"])
def test_a_run_goes_on_with_other_processes(file, one, data, cache, tmp_path):
    """Half of it by two, the rest by one with two accumulation steps: each step is made of the same batches."""
    options = [*data, *TWELVE, "--output_dir", str(tmp_path / "model")]
    launch(file, 2, [*options, "--max_steps", "6"], cache)
    launch("one_gpu", 1, [*options, "--gradient_accumulation_steps", "2", "--resume_from_checkpoint"], cache)
    assert_same_run(tmp_path / "model", one)


@pytest.mark.slow
def test_two_machines_are_one(one, data, tmp_path):
    """Each of which prepares the data for itself."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    options = [*data, *TWELVE, "--output_dir", str(tmp_path / "model")]
    for machine in launch_machines(options, [folder / "cache" for folder in folders], folders):
        printed, _ = machine.communicate(timeout=600)
        assert machine.returncode == 0, printed[-3000:]
        assert "Tokenising train" in printed
    assert_same_run(tmp_path / "model", one)


OWN = {
    "directory": (["--max_steps", "1"], "--output_dir outputs/model is not the same directory on all machines"),
    "pairs": (["--max_steps", "1", "--output_dir", "../model"], "The training pairs are not the same on all machines"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OWN)
def test_machines_that_do_not_share_what_they_must_are_refused(what, data, tmp_path):
    """One would go on from a checkpoint and the other begin, or both train on half of two datasets."""
    more, message = OWN[what]
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        shutil.copytree(data[1], folder / "pairs")
    if what == "pairs":
        with open(folders[1] / "pairs" / "train.jsonl", "a") as file:
            file.write('{"en": "a", "de": "ein"}\n')
    options = ["--dataset_name", "pairs", *data[2:], *more]
    machines = launch_machines(options, [folder / "cache" for folder in folders], folders)
    printed = [machine.communicate(timeout=600)[0] for machine in machines]
    assert all(machine.returncode for machine in machines)
    assert f"train.py: error: {message}" in printed[0]
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.slow
def test_evaluation_by_two_processes_is_that_by_one(data, cache, tmp_path):
    """To the last digit, with a model that has learnt something, as one process scores every sentence once."""
    trained = tmp_path / "trained"
    launch("one_gpu", 1, [*data, "--max_steps", "150", "--warmup_steps", "20", "--output_dir", str(trained)], cache)
    found = {}
    for processes, file in [(1, "one_gpu"), (2, "several_gpus")]:
        folder = tmp_path / str(processes)
        options = [*data[:6], "--model_name_or_path", str(trained), "--learning_rate", "0", "--max_steps", "1"]
        printed = launch(file, processes, [*options, "--output_dir", str(folder)], cache)
        share = -(-37 // processes)
        assert f"0/{share} [" in printed  # of the test sentences, by the first process
        found[processes] = results(folder)
    scores = ["eval_bleu", "eval_chrf", "test_bleu", "test_chrf"]
    assert [found[2][name] for name in scores] == [found[1][name] for name in scores]
    assert [found[2][f"{name}_loss"] for name in ("eval", "test")] == pytest.approx(
        [found[1][f"{name}_loss"] for name in ("eval", "test")], rel=1e-6
    )
    rows = [json.loads(line) for line in (Path(data[1]) / "test.jsonl").read_text().splitlines()]
    translations = Translator.from_pretrained(str(trained))([row["en"] for row in rows])
    alone = TranslationQuality().compute(predictions=translations, references=[row["de"] for row in rows])
    assert 1 < alone["bleu"] == found[2]["test_bleu"] and alone["chrf"] == found[2]["test_chrf"]


@pytest.mark.slow
def test_the_script_for_deepspeed(data, cache, tmp_path):
    """By the command of docs/scaling.md, on two CPU processes: the same weights for every stage as on one alone."""
    pytest.importorskip("deepspeed")
    (code,) = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)
    (tmp_path / "tune.py").write_text(code)
    (tmp_path / "sample_dataset").symlink_to(ROOT / "sample_dataset")
    options = [*data, "--position_embedding_type", "sinusoidal", "--dropout", "0", "--max_steps", "1"]
    options += ["--output_dir", str(tmp_path / "outputs" / "sample")]
    launch("one_gpu", 1, options, cache)
    command = next(command for command in COMMANDS if "tune.py" in command)
    words = shlex.split(command.replace("recipes/", f"{ROOT}/recipes/").replace("accelerate launch", "--"))[1:]
    more = ["--train_sampling_strategy", "sequential", "--adam_epsilon", "1e-5", "--save_strategy", "no"]
    device = {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}

    def tune(words: list[str], batch: int) -> dict[str, torch.Tensor]:
        command = ["python", *words, *more, "--per_device_train_batch_size", str(batch)]
        result = run(command, cache, cwd=tmp_path, **device)
        assert result.returncode == 0, result.stderr[-3000:]
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "outputs" / "tuned")
        return dict(model.named_parameters())

    alone = tune(words[words.index("tune.py") :], 8)
    for stage in ["1", "2", "3"]:
        launcher = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--mixed_precision", "no"]
        weights = tune([*launcher, "--zero_stage", stage, *words, "--ddp_backend", "gloo"], 4)
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-5)
