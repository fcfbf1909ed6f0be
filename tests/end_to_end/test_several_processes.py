"""Several processes and machines train the same model as one process; the files and commands that start them."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from runs import HOW, ROOT, STEP, assert_same_run, options, random_pairs, signal_at, steps, train, weights, write_pairs
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer.training.recipe import parse_arguments

FILES = {path.stem: path for path in sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))}
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").replace("\\\n        ", "")
COMMANDS = re.findall(r"(?m)^ {4}(accelerate launch .*)", PAGE)
for path in FILES.values():
    COMMANDS += re.findall(r"(?m)^# (accelerate launch .*)", path.read_text())

# -------------------------------------------------------------------------------------------------- files and commands


@pytest.mark.parametrize("name", FILES)
def test_accelerate_accepts_each_file(name):
    config = load_config_from_file(str(FILES[name]))
    args = launch_command_parser().parse_args(["--config_file", str(FILES[name]), "train.py"])
    args, _, _ = _validate_launch_command(args)
    assert args.num_processes == config.num_processes and args.mixed_precision == "bf16"
    kinds = {"one_gpu": [], "deepspeed": ["use_deepspeed"], "fsdp2": ["use_fsdp"]}.get(name, ["multi_gpu"])
    assert [kind for kind in ("multi_gpu", "use_deepspeed", "use_fsdp") if getattr(args, kind)] == kinds
    # Accelerate reads the keys of a nested group without checking their names.
    known = vars(launch_command_parser().parse_args(["train.py"]))
    for value in yaml.safe_load(FILES[name].read_text()).values():
        assert not isinstance(value, dict) or value.keys() <= known.keys()


def test_each_file_is_named_by_a_command():
    assert FILES.keys() == {"one_gpu", "several_gpus", "several_machines", "fsdp2", "deepspeed"}
    named = {Path(word).stem for command in COMMANDS for word in command.split() if "recipes/accelerate" in word}
    assert named == FILES.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_valid(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = launch_command_parser().parse_args(shlex.split(command)[2:])
    assert Path(args.config_file).exists()
    if args.training_script == "train.py":
        options = parse_arguments(args.training_script_args)[2]
        batches = _validate_launch_command(args)[0].num_processes * options.gradient_accumulation_steps
        assert batches == (16 if args.num_machines == 2 else 8)


# --------------------------------------------------------------------------------------------------- several processes

MODEL = "--vocab_size 280 --d_model 32 --encoder_layers 1 --decoder_layers 1 --encoder_ffn_dim 48 --decoder_ffn_dim 48"
MODEL += " --encoder_attention_heads 2 --decoder_attention_heads 2 --max_source_length 60 --max_target_length 60"
TWELVE = "--learning_rate 0.01 --max_steps 12 --eval_steps 6 --ema_decay 0.5"
# The exact gradient of the key biases is 0, and Adam would make full steps of its rounding errors.
TWELVE += " --adam_epsilon 1e-4"
ONE = TWELVE + " --gradient_accumulation_steps 2"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """A dataset of 150 training, 21 validation and 37 test pairs."""
    return random_pairs(tmp_path_factory.mktemp("pairs"), train=150, validation=21, test=37)


@pytest.fixture(scope="module")
def one(pairs, tmp_path_factory) -> Path:
    """The output directory of one process with two accumulation steps and dropout."""
    folder = tmp_path_factory.mktemp("one") / "model"
    train(options(pairs, folder, ONE, model=MODEL))
    assert json.loads((folder / "config.json").read_text())["dropout"] == 0.1
    return folder


def succeed(processes) -> str:
    assert [run.wait() for run in processes] == [0] * len(processes), "".join(run.printed() for run in processes)
    return processes[0].printed()


MUON = " --optimizer muon"


@pytest.fixture(scope="module")
def one_with_muon(pairs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("muon") / "model"
    train(options(pairs, folder, ONE + MUON, model=MODEL))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("how", ["copied", "sharded"])
def test_two_processes_with_muon_equal_one(how, pairs, one_with_muon, fork_two, tmp_path):
    """Muon multiplies in bfloat16, whose sums over shards differ by a few percent of an update of 0.002 a step."""
    succeed(fork_two(options(pairs, tmp_path / "two", TWELVE + MUON, model=MODEL), **HOW[how]))
    if how == "copied":
        return assert_same_run(tmp_path / "two", one_with_muon, tolerance=1e-5)
    two, one = (load_file(folder / "model.safetensors") for folder in (tmp_path / "two", one_with_muon))
    torch.testing.assert_close(two, one, rtol=0, atol=8e-3)


DISTILLED = " --distillation_weight 0.7 --teacher_top_k 7 --teacher "


@pytest.fixture(scope="module")
def one_distilled(pairs, one, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distilled") / "model"
    train(options(pairs, folder, ONE + DISTILLED + str(one), model=MODEL))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("how", ["copied", "sharded"])
def test_two_distilled_processes_equal_one(how, pairs, one, one_distilled, fork_two, tmp_path):
    """The main process reads the pairs with the teacher, the other one reads the cache."""
    argv = options(pairs, tmp_path / "two", TWELVE + DISTILLED + str(one), model=MODEL)
    succeed(fork_two(argv, caches=[tmp_path / "cache"] * 2, **HOW[how]))
    assert_same_run(tmp_path / "two", one_distilled, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["several_gpus", "fsdp2"])
def test_two_processes_equal_one_as_launched(name, one, pairs, forked_python, tmp_path):
    """As the files of recipes/accelerate launch them; FSDP2 shards the moving average, too.

    Each test sentence is scored once, and everything is printed and saved once.
    """
    command = ["-m", "accelerate.commands.launch", "--config_file", str(FILES[name]), "--num_processes", "2"]
    command += ["--mixed_precision", "no", "train.py", *options(pairs, tmp_path / "model", TWELVE, model=MODEL)]
    env = os.environ | {"PYTHON_EXEC": str(forked_python)}  # of what is launched
    how = {"stdout": subprocess.PIPE, "encoding": "utf-8", "check": True, "timeout": 300}
    shown = subprocess.run([forked_python, *command], cwd=ROOT, env=env, **how).stdout
    assert_same_run(tmp_path / "model", one, tolerance=1e-5)
    for part, count in [("The model is in", 1), ("test: loss", 1), ("eval: loss", 2), ("test: 37 pairs", 1)]:
        assert shown.count(part) == count, part


ON_ONE_GPU = """
import sys
from accelerate.state import PartialState

prepare = PartialState._prepare_backend  # NCCL refuses two processes on one GPU
PartialState._prepare_backend = lambda self, cpu=False, sagemaker_dp=False, backend=None: prepare(
    self, cpu, sagemaker_dp, "gloo"
)
import train
with train.processes.exit_on_error():
    train.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_two_processes_on_one_gpu_equal_one(pairs, tmp_path):
    (tmp_path / "on_one_gpu.py").write_text(ON_ONE_GPU)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"ACCELERATE_BYPASS_DEVICE_MAP": "true", "PYTHONPATH": paths}
    del environment["ACCELERATE_USE_CPU"]
    two = ["-m", "torch.distributed.run", "--nproc_per_node", "2", str(tmp_path / "on_one_gpu.py")]
    for name, script, more in [("1", ["train.py"], ONE), ("2", two, TWELVE)]:
        command = [sys.executable, *script, *options(pairs, tmp_path / name, more, model=MODEL)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    assert_same_run(tmp_path / "2", tmp_path / "1", tolerance=1e-4)


STRANGERS = r"^train.py: error: (2 processes were started.* set ACCELERATE_USE_CPU=true.*)"


@pytest.mark.slow
def test_processes_that_do_not_know_of_each_other_are_rejected(pairs, fork_two, tmp_path):
    """As torchrun starts them on a CPU, where Accelerate connects them only if it is told to use it.

    Each would train the whole model.
    """
    two = fork_two(
        options(pairs, tmp_path / "model", TWELVE, model=MODEL), ACCELERATE_USE_CPU="false", CUDA_VISIBLE_DEVICES=""
    )
    assert {run.wait() for run in two} == {2}
    assert len(re.findall(STRANGERS, two[0].printed(), re.MULTILINE)) == 1 and not (tmp_path / "model").exists()


@pytest.mark.slow
def test_processes_that_do_not_know_of_each_other_are_rejected_with_fsdp(pairs, tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = yaml.safe_load(FILES["fsdp2"].read_text()) | {"use_cpu": True, "mixed_precision": "no"}
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(config | {"num_processes": 2, "main_process_port": 0}))
    command = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp.yaml"), "train.py"]
    command += options(pairs, tmp_path / "model", TWELVE, model=MODEL)
    run = subprocess.run([sys.executable, *command], cwd=ROOT, stderr=subprocess.PIPE, encoding="utf-8", timeout=300)
    assert run.returncode and len(re.findall(STRANGERS, run.stderr, re.MULTILINE)) == 1
    assert not (tmp_path / "model").exists()


RESUMED = [("sharded", "one"), ("one", "sharded"), ("sharded", "copied"), ("copied", "one")]


@pytest.mark.slow
@pytest.mark.parametrize("first, second", RESUMED)
def test_run_resumed_by_another_number_of_processes(first, second, one, pairs, fork, fork_two, tmp_path):
    """Stopped by a signal in the middle."""

    def start(how: str, fault=None) -> list:
        more = (ONE if how == "one" else TWELVE) + " --resume_from_checkpoint"
        argv = options(pairs, tmp_path / "model", more, model=MODEL)
        return [fork(argv, fault)] if how == "one" else fork_two(argv, fault, **HOW[how])

    stopped = start(first, signal_at(*STEP, 8 if first == "one" else 4, signal.SIGTERM))
    assert {run.wait() for run in stopped} == {143}, stopped[0].printed()
    step = steps(tmp_path / "model")[-1]
    assert 4 <= step < 12
    assert f"steps {step} to 12" in succeed(start(second))
    assert_same_run(tmp_path / "model", one, tolerance=1e-5)


@pytest.mark.slow
def test_stream_resumed_by_two_processes(pairs, fork, fork_two, tmp_path):
    """The checkpoint has the places of both in the stream, and no other number of processes can read on from there."""
    more = TWELVE + " --streaming --resume_from_checkpoint"
    argv = options(pairs, tmp_path / "model", more, model=MODEL)
    stopped = fork_two(argv, signal_at(*STEP, 4, signal.SIGTERM))
    assert {run.wait() for run in stopped} == {143}, stopped[0].printed()
    alone = fork(options(pairs, tmp_path / "model", more + " --gradient_accumulation_steps 2", model=MODEL))
    assert alone.wait() == 2
    assert "error: The stream is read by 1 process(es), but was read by 2 when" in alone.printed()
    succeed(fork_two(argv))
    succeed(fork_two(options(pairs, tmp_path / "whole", more, model=MODEL)))
    assert_same_run(tmp_path / "model", tmp_path / "whole")


@pytest.mark.slow
def test_two_machines_equal_one_process(one, pairs, fork_two, tmp_path):
    """Each prepares the data in a cache for itself."""
    argv = options(pairs, tmp_path / "model", TWELVE, model=MODEL)
    machines = fork_two(argv, machines=2, caches=[tmp_path / "0", tmp_path / "1"])
    succeed(machines)
    assert all(any(cache.rglob("*.arrow")) for cache in (tmp_path / "0", tmp_path / "1"))
    assert_same_run(tmp_path / "model", one, tolerance=1e-5)


UNSHARED = {
    "output": ("--output_dir model", "--output_dir is not the same on all machines"),
    "pairs": ("--output_dir ../model", "The training data is not the same on all machines"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", UNSHARED)
def test_machines_that_share_too_little_are_rejected(what, pairs, fork_two, tmp_path):
    """Otherwise both would train on half of two datasets, or average checkpoints that only one has."""
    more, message = UNSHARED[what]
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        shutil.copytree(pairs, folder / "pairs")
    if what == "pairs":
        with open(folders[1] / "pairs" / "train.jsonl", "a") as file:
            file.write('{"en": "a", "de": "ein"}\n')
    argv = options(Path("pairs"), Path("model"), f"--max_steps 1 {more}", model=MODEL)
    machines = fork_two(argv, machines=2, caches=[folder / "cache" for folder in folders], folders=folders)
    assert [machine.wait() for machine in machines] == [2, 2]
    assert f"train.py: error: {message}" in machines[0].printed()
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.slow
def test_deepspeed_script_equals_one_process(pairs, tmp_path, monkeypatch):
    """The script and the command of docs/scaling.md on two CPU processes, with each stage of ZeRO."""
    pytest.importorskip("deepspeed")
    (tmp_path / "sample_dataset").symlink_to(ROOT / "sample_dataset")
    train(options(pairs, tmp_path / "outputs" / "sample", "--dropout 0 --max_steps 1", model=MODEL))
    command = next(command for command in COMMANDS if "seq2seq_trainer.py" in command)
    command = command.replace("recipes/", f"{ROOT}/recipes/").replace("examples/", f"{ROOT}/examples/")
    words = shlex.split(command)[2:]
    more = ["--train_sampling_strategy", "sequential", "--adam_epsilon", "1e-5", "--save_strategy", "no"]
    device = {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    for key, value in (device | {"PYTHONPATH": str(ROOT)}).items():
        monkeypatch.setenv(key, value)

    def tune(words: list[str], batch: int) -> dict[str, torch.Tensor]:
        command = [sys.executable, *words, *more, "--per_device_train_batch_size", str(batch)]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
        return dict(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "outputs" / "tuned").named_parameters())

    alone = tune(words[words.index(f"{ROOT}/examples/seq2seq_trainer.py") :], 8)
    for stage in ["1", "2", "3"]:
        launcher = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--mixed_precision", "no"]
        found = tune([*launcher, "--zero_stage", stage, *words, "--ddp_backend", "gloo"], 4)
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- compilation


@pytest.mark.slow
def test_compilation_is_bounded_and_changes_nothing(tmp_path):
    """A graph of each side for the batch shapes of an epoch, and some for equal lengths, one token and one pair."""
    generator = random.Random(0)
    texts = ["".join(generator.choices("abcdefgh", k=generator.randint(1, 40))) for _ in range(300)]
    rows = [{"en": source, "de": target} for source, target in zip(texts[::2], texts[1::2], strict=True)]
    write_pairs(tmp_path / "pairs", train=rows, validation=rows[:2])
    more = "--num_train_epochs 1 --save_steps 1000 --per_device_train_max_tokens 120 --learning_rate 1e-3"
    more += " --adam_epsilon 1e-4 --dropout 0"  # a compiled model draws its dropout differently
    train(options(tmp_path / "pairs", tmp_path / "plain", more))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compiler.set_default_backend("aot_eager")
    try:
        train(options(tmp_path / "pairs", tmp_path / "compiled", more + " --torch_compile"))
    finally:
        torch.compiler.set_default_backend(None)
        torch._dynamo.reset()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(weights(tmp_path / "compiled"), weights(tmp_path / "plain"), rtol=0, atol=1e-5)
