"""Small runs of train.py: in this process, in forked ones with an injected fault, or by a command."""

import contextlib
import functools
import gc
import io
import itertools
import json
import multiprocessing
import os
import pkgutil
import random
import signal
import socket
import sys
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file

import train as script
from vanilla_transformer.__main__ import main as command
from vanilla_transformer.training import checkpoint, hardware, processes, run_folder

ROOT = Path(__file__).parents[2]  # not of helpers, which would take each forked process a second to import
WORDS = {"a": "ein", "dog": "Hund", "man": "Mann", "sees": "sieht", "big": "großer", "the": "der", "not": "nicht"}
MODEL = "--vocab_size 280 --d_model 16 --encoder_layers 1 --decoder_layers 1 --encoder_ffn_dim 24 --decoder_ffn_dim 24"
MODEL += " --encoder_attention_heads 2 --decoder_attention_heads 2"
STEPS = "--per_device_train_max_tokens 200 --warmup_steps 4 --logging_steps 3 --save_steps 4 --learning_rate 0.02"
STEPS += " --size paper"
QUICK = " --max_eval_samples 2 --max_predict_samples 1"
RESUME = " --resume_from_checkpoint"
KINDS = {"map-style": "", "streaming": " --streaming"}  # of training data


def options(pairs: Path, output_dir: Path, more: str = "", model: str = MODEL) -> list[str]:
    """The arguments of a small run; those in `more` win."""
    data = f"--dataset_name {pairs} --source_lang en --target_lang de"
    return f"{data} --output_dir {output_dir} {model} {STEPS} {more}".split()


def random_pairs(folder: Path, **counts: int) -> Path:
    """A dataset of splits with so many pairs."""
    generator, splits = random.Random(0), {}
    for split, count in counts.items():
        sentences = [generator.choices(list(WORDS), k=generator.randint(1, 7)) for _ in range(count)]
        splits[split] = [{"en": " ".join(words), "de": " ".join(map(WORDS.get, words))} for words in sentences]
    return write_pairs(folder, **splits)


def write_pairs(folder: Path, **splits: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def read_pairs(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


# ----------------------------------------------------------------------------------------------------- in this process


def execute(argv: list[str]) -> tuple[int, str, str]:
    """Runs train.py here, where everything is imported; returns its exit status, stdout and stderr."""
    status, out, err = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["train.py", *argv])
        patch.setattr(hardware, "configure", lambda *_: None)  # one thread is the fastest
        try:
            with processes.exit_on_error():
                script.main()
        except SystemExit as error:
            status = error.code
    if status:
        gc.collect()  # releases the lock of the output directory
    return status, out.getvalue(), err.getvalue()


def train(argv: list[str]) -> str:
    """Runs train.py here; returns what it printed."""
    status, out, err = execute(argv)
    assert status == 0, err
    return out + err


def train_fails(argv: list[str]) -> str:
    """Runs train.py here, which must end with an error; returns the sentence."""
    status, _, err = execute(argv)
    assert status == 2, err
    return one_sentence(err)


def one_sentence(printed: str) -> str:
    """The error message of train.py, which must be a single last line without a traceback."""
    assert "Traceback" not in printed
    lines = [line for line in printed.replace("\r", "\n").split("\n") if "error:" in line]
    assert len(lines) == 1 and lines[0].startswith("train.py: error: "), printed
    assert printed.rstrip().endswith(lines[0])
    return lines[0].removeprefix("train.py: error: ")


# --------------------------------------------------------------------------------------------------- forked processes

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "train", "sacrebleu", "torch.distributed.fsdp"])  # imported once for all
HOW = {"copied": {}, "sharded": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}}  # copies or shards of a model


class Fork:
    """train.py in another process, or the command that `argv` begins with. `fault` is called there first."""

    def __init__(self, argv: list[str], log: Path, fault=None, cwd=ROOT, cache: Path | None = None, **env: str):
        self.log = log
        cache = cache or datasets.config.HF_DATASETS_CACHE
        self.process = FORKS.Process(target=work, args=(argv, log, fault, cwd, cache, env))
        self.process.start()

    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def wait(self, seconds: float = 120) -> int:
        """Its exit status; minus the number of the signal that killed it."""
        self.process.join(seconds)
        assert not self.process.is_alive(), f"still running after {seconds} s\n{self.printed()}"
        return self.process.exitcode


def work(argv: list[str], log: Path, fault, cwd: Path, cache: Path, env: dict):
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    os.chdir(cwd)
    datasets.config.HF_DATASETS_CACHE, datasets.config.HF_HUB_OFFLINE = cache, True
    torch.set_num_threads(1)
    # The default, as in a shell: else the workers that read data would be forks of one more server, which imports.
    multiprocessing.set_start_method(None, force=True)
    hardware.configure = lambda *_: None
    if not argv[0].startswith("-"):
        return command(argv)
    run_folder.plot_training_curves = run_folder.draw_attention = lambda *_: None  # half the time of a small run
    if fault is not None:
        fault()
    sys.argv = ["train.py", *argv]
    with processes.exit_on_error():
        script.main()


def ranks(machines: int = 1) -> list[dict[str, str]]:
    """The environments of two processes, on one machine or on two."""
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(unused.getsockname()[1]), "WORLD_SIZE": "2"}
    shared["LOCAL_WORLD_SIZE"] = str(2 // machines)
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank % (2 // machines))} for rank in (0, 1)]


STEP = ("vanilla_transformer.training.optimization", "compute_loss")


def fault_at(owner: str, name: str, call: int, action, *arguments, set_attribute=setattr):
    """A fault: the action happens just before that call of a function of the owner, `module` or `module:Class`."""
    place = pkgutil.resolve_name(owner)
    function, calls = getattr(place, name), itertools.count(1)

    def act_and_call(*args, **kwargs):
        if next(calls) == call:
            action(*arguments)
        return function(*args, **kwargs)

    set_attribute(place, name, act_and_call)


def signal_at(owner: str, name: str, call: int, number: int = signal.SIGKILL):
    """A fault: the process gets a signal just before that call of a function."""
    return functools.partial(fault_at, owner, name, call, signal.raise_signal, number)


# ------------------------------------------------------------------------------------------------------ what runs left


def files(folder: Path) -> dict[str, bytes]:
    """The content of all files but locks, to see that none was touched."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != run_folder.LOCK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def results(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text(encoding="utf-8"))


def steps(folder: Path) -> list[int]:
    return [checkpoint.step_of(found) for found in checkpoint.list_checkpoints(folder)]


def newest(folder: Path) -> Path:
    return checkpoint.list_checkpoints(folder)[-1]


def state(folder: Path) -> dict:
    """The trainer state of the newest checkpoint, without what depends on time and on where the run was stopped."""
    found = json.loads((newest(folder) / "trainer_state.json").read_text(encoding="utf-8"))
    found["history"] = [entry for entry in found["history"] if "eval_loss" in entry]
    return {key: value for key, value in found.items() if key not in ("train_runtime", "stream", "settings")}


def assert_same_run(ours: Path, theirs: Path, tolerance: float = 0):
    """Same weights, moving average, optimizer state, trainer state and results.

    With a tolerance: of two runs that add in another order, as several processes and one do.
    """
    pairs = [(newest(ours) / path.name, path) for path in newest(theirs).glob("*.safetensors")]
    for found, expected in [*pairs, (ours / "model.safetensors", theirs / "model.safetensors")]:
        torch.testing.assert_close(load_file(found), load_file(expected), rtol=0, atol=tolerance)
    for found, expected in [(state(ours), state(theirs)), (results(ours), results(theirs))]:
        assert found.keys() == expected.keys()
        for key in found.keys() - {"date", "hardware", "train_runtime", "train_target_tokens_per_second"}:
            if not tolerance or key not in ROUNDED:
                assert found[key] == expected[key], key
            elif key.endswith(("loss", "loss_sum")):
                assert found[key] == pytest.approx(expected[key], rel=tolerance), key
    for key in ("step", "eval_bleu", "eval_chrf"):
        assert [entry[key] for entry in state(ours)["history"]] == [entry[key] for entry in state(theirs)["history"]]


ROUNDED = ("history", "recent_losses", "loss_sum", "train_loss", "eval_loss", "test_loss")
