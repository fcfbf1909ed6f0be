"""train.py under faults: killed, stopped, out of disk, with damaged checkpoints, without one of its processes, with
losses that come apart; and each time the run that goes on. Run: pytest -m "slow or not slow" tests/test_faults.py"""

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import pkgutil
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import datasets
import psutil
import pytest
import test_train
import torch
from test_train import ROOT, assert_same_outcome, newest, one_sentence, options, state, steps, weights

from vanilla_transformer.training import optimization as training
from vanilla_transformer.training.checkpoint import list_checkpoints
from vanilla_transformer.training.signals import SECOND_THOUGHT

pairs, cache, train, stop = test_train.pairs, test_train.cache, test_train.train, test_train.stop
QUICK = test_train.QUICK

# --------------------------------------------------------------------------------------------------- forked processes

PRELOADED = (
    "pytest evaluate sacrebleu matplotlib.pyplot torch.distributed.fsdp vanilla_transformer.training.distributed"
)
PRELOADED += " vanilla_transformer.evaluation.scores vanilla_transformer.hub.model_card"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED.split())  # so that a process need not import it all


class Fork:
    """train.py in a process of its own, with a fault to come: a function that is called there first."""

    def __init__(self, argv: list[str], log: Path, cache: Path, fault=None, **environment: str):
        self.log = log
        self.process = FORKS.Process(target=work, args=(argv, log, cache, fault, environment))
        self.process.start()

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def end(self, seconds: float = 60) -> int:
        """Its exit status; minus the signal that it died of."""
        self.process.join(seconds)
        assert not self.process.is_alive(), f"still there after {seconds} s\n{self.text()}"
        return self.process.exitcode


@pytest.fixture
def fork(cache, tmp_path):
    """fork(options, fault) -> a [`Fork`]."""
    started = []

    def start(argv: list[str], fault=None, **environment: str) -> Fork:
        started.append(Fork(argv, tmp_path / f"{len(started)}.log", cache, fault, **environment))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()


def work(argv: list[str], log: Path, cache: Path, fault, environment: dict):
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({"ACCELERATE_USE_CPU": "true"} | environment)
    datasets.config.HF_DATASETS_CACHE, datasets.config.HF_HUB_OFFLINE = cache, True
    if fault is not None:
        fault()
    sys.argv = ["train.py", *argv]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def fault_at(owner: str, name: str, call: int, action, *arguments):
    """A fault: the action comes just before that call of a function."""
    place = pkgutil.resolve_name(owner)
    function, calls = getattr(place, name), itertools.count(1)

    def act_and_call(*args, **kwargs):
        if next(calls) == call:
            action(*arguments)
        return function(*args, **kwargs)

    setattr(place, name, act_and_call)


def signal_at(owner: str, name: str, call: int, number: int = signal.SIGKILL):
    return functools.partial(fault_at, owner, name, call, signal.raise_signal, number)


# -------------------------------------------------------------------------------------------------------------- killed

LONG = "--max_steps 240 --gradient_accumulation_steps 2 --dropout 0.2 --ema_decay 0.5 --r_drop_alpha 2"
LONG += " --bpe_dropout 0.1 --save_steps 4 --eval_steps 10 --logging_steps 3 --average_checkpoints 2"
LONG += " --max_eval_samples 2 --max_predict_samples 2"

# Functions, and of how many calls of them one may be the last.
PLACES = {
    "within the accumulation of a step": ("vanilla_transformer.training.optimization", "loss_of", 12),
    "in an evaluation": ("vanilla_transformer.evaluation.scores", "gather_object", 2),
    "in a translation": ("vanilla_transformer:Translator", "__call__", 1),
    "while checkpoints are written": ("vanilla_transformer.training.checkpoint", "save_file", 4),
    "while checkpoints are read or summed up": ("vanilla_transformer.training.checkpoint", "sha256", 40),
    "before their state or their sums are written": ("pathlib:Path", "write_text", 9),
    "between renamings": ("pathlib:Path", "rename", 3),
    "while old checkpoints are deleted": ("os", "unlink", 30),
}
FILES = ("model.safetensors", "optimizer.safetensors", "ema.safetensors", "trainer_state.json")
AT_THE_END = {
    "in the last evaluation": ("vanilla_transformer.training.checkpoint", "average_checkpoints", 1),
    "after the model is written": ("vanilla_transformer.training.plots", "plot_training_curves", 1),
}
STEP = PLACES["within the accumulation of a step"][:2]
TRANSLATION = PLACES["in a translation"][:2]


def kill_at_file(fork: Fork, folder: Path, name: str):
    """As soon as that file of an unfinished checkpoint is there, or while it is."""
    while fork.process.is_alive():
        for unfinished in folder.glob("*.unfinished"):
            if (unfinished / name).exists():
                return fork.process.kill()


def kill_after(fork: Fork, folder: Path, begun: str, seconds: float):
    """So long after it has printed that."""
    while begun not in fork.text() and fork.process.is_alive():
        time.sleep(0.01)
    time.sleep(seconds)
    fork.process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", test_train.KINDS)
def test_killed_at_twenty_moments(kind, pairs, fork, tmp_path):
    """By the same command each time, to the same end, bit for bit; no checkpoint is ever there that is not whole."""
    more = [*LONG.split(), *test_train.KINDS[kind]]
    argv = [*options(pairs, tmp_path / "killed", *more), "--resume_from_checkpoint"]
    whole = fork(options(pairs, tmp_path / "whole", *more))
    generator = random.Random(kind)
    kills = [(signal_at, owner, name, generator.randint(1, calls)) for owner, name, calls in PLACES.values()]
    kills += [(signal_at, *STEP, generator.randint(2, 20)) for _ in range(2)]
    kills += [(kill_at_file, name) for name in FILES]
    kills += [(kill_after, begun, generator.uniform(0, 0.5)) for begun in ("", "", "Training: ", "Training: ")]
    generator.shuffle(kills)
    kills += [(signal_at, *place) for place in AT_THE_END.values()]
    assert len(kills) == 20
    reached = []
    for kill, *how in kills:
        if kill is signal_at:
            killed = fork(argv, kill(*how))
        else:
            killed = fork(argv)
            kill(killed, tmp_path / "killed", *how)
        assert killed.end(120) == -signal.SIGKILL, (how, killed.text())
        for checkpoint in list_checkpoints(tmp_path / "killed"):
            assert checkpoint.damage() is None, how
        reached.append(max(steps(tmp_path / "killed"), default=0))
    assert reached == sorted(reached) and reached[-3] < reached[-1] == 240, reached
    last = fork(argv)
    assert (last.end(120), whole.end(120)) == (0, 0), last.text() + whole.text()
    assert_same_outcome(tmp_path / "killed", tmp_path / "whole")
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")  # nothing half-written is left


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.slow
def test_killed_between_the_two_renamings(pairs, fork, tmp_path):
    """A checkpoint that was saved in the place of an evaluation is written anew after it, and is never lost."""
    folder = tmp_path / "model"
    argv = options(pairs, folder, "--max_steps", "4", "--eval_steps", "2", "--resume_from_checkpoint", *QUICK)
    stopped = fork(argv, signal_at(*TRANSLATION, 1, signal.SIGTERM))
    assert stopped.end() == 143 and steps(folder) == [2]
    killed = fork(argv, signal_at("pathlib:Path", "rename", 2))
    assert killed.end() == -signal.SIGKILL
    names = {path.name for path in folder.glob("checkpoint-*")}
    assert names == {"checkpoint-2.replaced", "checkpoint-2.unfinished"}
    last, whole = fork(argv), fork(options(pairs, tmp_path / "whole", *argv[argv.index("--max_steps") :]))
    assert (last.end(), whole.end()) == (0, 0), last.text() + whole.text()
    assert f"going on from {folder / 'checkpoint-2'}\n" in last.text()
    assert_same_outcome(folder, tmp_path / "whole")
    assert files_of(folder) == files_of(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------------------- stopped

STOPPED = "--max_steps 60 --dropout 0.2 --ema_decay 0.5 --bpe_dropout 0.1 --adam_epsilon 1e-4 --num_beams 4"
STOPPED += " --activation_function gelu"  # a ReLU at its kink makes gradients differ where sums were rounded otherwise
STOPPED += " --eval_steps 20 --save_steps 7 --logging_steps 3 --dataloader_num_workers 1"
TORCHRUN = "python -m torch.distributed.run --standalone --nproc_per_node 2 train.py"
ACCELERATE = "accelerate launch --num_machines 1 --mixed_precision no --dynamo_backend no --num_processes {} train.py"
BOTH = ACCELERATE.format("2 --multi_gpu")

# The command, who of it gets which signal and when, and the exit status.
STOPS = {
    "SIGTERM to all": ("python train.py", "all", signal.SIGTERM, "loss ", 143),
    "SIGINT in an evaluation": ("python train.py", "itself", signal.SIGINT, "Translating", 130),
    "SIGTERM to accelerate": (ACCELERATE.format(1), "itself", signal.SIGTERM, "loss ", -signal.SIGTERM),
    "Ctrl-C under accelerate": (ACCELERATE.format(1), "all", signal.SIGINT, "Translating", -signal.SIGTERM),
    "SIGTERM to torchrun": (TORCHRUN, "itself", signal.SIGTERM, "loss ", 1),
    "Ctrl-C under torchrun, in an evaluation": (TORCHRUN, "all", signal.SIGINT, "Translating", 1),
    "SIGTERM to one of two processes": (TORCHRUN, "rank 1", signal.SIGTERM, "loss ", 1),
    "SIGINT to accelerate with two processes": (BOTH, "itself", signal.SIGINT, "loss ", 1),
}


class Launched:
    """A command of its own, as typed in a shell, in a group of its own."""

    def __init__(self, command: list[str], log: Path, cache: Path):
        self.log = log
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        environment |= {"HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, seconds: float = 120):
        end = time.monotonic() + seconds
        while text not in self.text():
            assert self.process.poll() is None and time.monotonic() < end, self.text()
            time.sleep(0.005)

    def send(self, number: int, whom: str):
        if whom == "all":
            return os.killpg(self.process.pid, number)
        ranks = {f"rank {process.environ().get('RANK')}": process for process in self.others(recursive=False)}
        os.kill(self.process.pid if whom == "itself" else ranks[whom].pid, number)

    def others(self, recursive: bool = True) -> list[psutil.Process]:
        """Its children, with their children if that is asked for, as those that load data."""
        return psutil.Process(self.process.pid).children(recursive)

    def end(self, seconds: float = 120) -> int:
        return self.process.wait(seconds)


@pytest.fixture
def launched(cache, tmp_path):
    """launched(command) -> a [`Launched`]."""
    started = []

    def start(command: list[str]) -> Launched:
        started.append(Launched(command, tmp_path / f"launched {len(started)}.log", cache))
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def not_stopped():
    """not_stopped(fork, pairs) -> the output directory of the run that is not stopped."""
    made = []

    def run(fork, pairs: Path, tmp_path: Path) -> Path:
        if not made:
            argv = options(pairs, tmp_path / "whole", *STOPPED.split(), "--gradient_accumulation_steps", "4")
            assert fork(argv).end() == 0
            made.append(tmp_path / "whole")
        return made[0]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPS)
def test_stopped_by_a_signal(name, pairs, launched, fork, not_stopped, tmp_path):
    """It saves, says the command to go on, which is run as it is, and ends where the run without a stop ends."""
    command, whom, number, when, status = STOPS[name]
    is_one = command not in (TORCHRUN, BOTH)
    argv = options(pairs, tmp_path / "model", *STOPPED.split())
    argv += ["--gradient_accumulation_steps", "4" if is_one else "2"]
    run = launched([*command.split(), *argv])
    run.wait_for(when)
    processes = run.others()
    run.send(number, whom)
    assert run.end() == status, run.text()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, run.text()
    said = re.findall(r"^train.py: stopped after step (\d+), which is saved; go on by: (.*)", run.text(), re.MULTILINE)
    assert len(said) == 1 and 'train.py", line' not in run.text(), run.text()
    step, following = said[0]
    assert shlex.split(following) == [*command.split(), *argv, "--resume_from_checkpoint"]
    assert steps(tmp_path / "model")[-1] == int(step) < 60
    assert list_checkpoints(tmp_path / "model")[-1].damage() is None
    if is_one:
        assert "Traceback" not in run.text()

    again = launched(shlex.split(following))
    whole = not_stopped(fork, pairs, tmp_path)
    assert again.end() == 0, again.text()
    (assert_same_outcome if is_one else assert_nearly_same_outcome)(tmp_path / "model", whole)


@pytest.mark.slow
def test_what_all_processes_find_is_said_also_by_a_slow_first_one(launched, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train\n"
        "time.sleep(3 * (os.environ['LOCAL_RANK'] == '0'))\n"
        "train.end('what they all find')\n"
    )
    run = launched([*TORCHRUN.split()[:-1], str(script)])
    assert run.end() == 1 and run.text().count("train.py: what they all find") == 1, run.text()


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(pairs, fork, tmp_path):
    """And loses what is not saved, but nothing else."""
    argv = options(pairs, tmp_path / "model", "--max_steps", "8", "--resume_from_checkpoint", *QUICK)
    stopped = fork(argv, functools.partial(fault_at, *STEP, 6, interrupt_twice))
    assert stopped.end() == 130
    assert "train.py: stopped; --resume_from_checkpoint goes on from the newest checkpoint" in stopped.text()
    assert "Traceback" not in stopped.text() and steps(tmp_path / "model") == [4]
    last, whole = fork(argv), fork(options(pairs, tmp_path / "whole", "--max_steps", "8", *QUICK))
    assert (last.end(), whole.end()) == (0, 0), last.text() + whole.text()
    assert_same_outcome(tmp_path / "model", tmp_path / "whole")


def interrupt_twice():
    signal.raise_signal(signal.SIGINT)
    time.sleep(SECOND_THOUGHT + 0.1)
    signal.raise_signal(signal.SIGINT)


def assert_nearly_same_outcome(ours: Path, theirs: Path):
    """As of several processes and of one, which add up in another order."""
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-5)
    ours, theirs = state(newest(ours)), state(newest(theirs))
    for key in ("step", "position", "skipped", "target_tokens", "source_tokens", "padded_tokens"):
        assert ours[key] == theirs[key], key
    assert ours["loss_sum"] == pytest.approx(theirs["loss_sum"], rel=1e-5)
    for key in ("step", "eval_bleu", "eval_chrf"):
        assert [entry[key] for entry in ours["history"]] == [entry[key] for entry in theirs["history"]]


# ------------------------------------------------------------------------------------------------------ a process lost

TWO = "--max_steps 12 --dropout 0.2 --ema_decay 0.5 --bpe_dropout 0.1 --adam_epsilon 1e-4 --eval_steps 6"
KINDS_OF_TWO = {"copied": {}, "sharded": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}}
LOSSES = {
    "in a step": (*STEP, 10),
    "in an evaluation": ("vanilla_transformer.evaluation.scores", "gather_object", 2),
    "in tokenising": ("vanilla_transformer.data.pairs", "tokenize_pairs", 2),
}


@pytest.fixture
def fork_two(fork):
    """fork_two(options, fault, of=ranks) -> both processes of a run, those of these ranks with a fault; without a
    launcher, which would end one after the other."""

    def start(argv: list[str], fault=None, of: tuple[int, ...] = (0,), **environment: str) -> list[Fork]:
        with socket.socket() as unused:
            unused.bind(("localhost", 0))
            shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(unused.getsockname()[1])}
        shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} | environment
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
        return [fork(argv, fault if i in of else None, **shared, **rank) for i, rank in enumerate(ranks)]

    return start


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "name, how", [*((name, "copied") for name in LOSSES), ("in a step", "sharded"), ("in an evaluation", "sharded")]
)
def test_one_of_two_processes_is_killed(name, how, rank, pairs, fork_two, fork, tmp_path):
    """The other one ends soon, with one sentence, and the run goes on as if nothing had been."""
    folder = tmp_path / "model"
    argv = options(pairs, folder, *TWO.split(), "--resume_from_checkpoint")
    two = fork_two(argv, signal_at(*LOSSES[name]), (rank,), **KINDS_OF_TWO[how])
    assert two[rank].end() == -signal.SIGKILL, two[rank].text()
    assert two[1 - rank].end() == 2, two[1 - rank].text()
    message = one_sentence(two[1 - rank].text())
    assert "another process of the run is gone" in message and "--resume_from_checkpoint" in message
    assert all(checkpoint.damage() is None for checkpoint in list_checkpoints(folder))

    two = fork_two(argv, **KINDS_OF_TWO[how])
    one = fork(options(pairs, tmp_path / "one", *TWO.split(), "--gradient_accumulation_steps", "2"))
    assert [run.end() for run in (*two, one)] == [0, 0, 0], two[0].text() + two[1].text()
    assert_nearly_same_outcome(folder, tmp_path / "one")


@pytest.mark.slow
def test_the_one_of_two_processes_that_saves_cannot(pairs, fork_two, tmp_path):
    """Both end, and it is said once."""
    argv = options(pairs, tmp_path / "model", *TWO.split())
    two = fork_two(argv, functools.partial(limit_files, 30_000))
    assert [run.end() for run in two] == [2, 2], two[0].text() + two[1].text()
    assert "checkpoint-4 could not be written" in one_sentence(two[0].text())
    assert "train.py:" not in two[1].text() and "Traceback" not in two[1].text()
    assert not list((tmp_path / "model").glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [("sharded", "one"), ("one", "sharded"), ("sharded", "copied")])
def test_going_on_with_other_processes(first, second, pairs, fork, fork_two, tmp_path):
    """A run is stopped in the middle, and goes on over more or fewer processes, to the same end."""

    def start(how: str, folder: str, fault=None) -> list[Fork]:
        more = ["--gradient_accumulation_steps", "2"] if how == "one" else []
        argv = options(pairs, tmp_path / folder, *TWO.split(), *more, "--resume_from_checkpoint")
        return [fork(argv, fault)] if how == "one" else fork_two(argv, fault, **KINDS_OF_TWO[how])

    whole = start("one", "whole")
    stopped = start(first, "model", signal_at(*STEP, 8 if first == "one" else 4, signal.SIGTERM))
    assert {run.end() for run in stopped} == {143}, stopped[0].text()
    step = steps(tmp_path / "model")[-1]
    assert 4 <= step < 12
    rest = start(second, "model")
    assert {run.end() for run in (*rest, *whole)} == {0}, rest[0].text()
    assert f"steps {step} to 12" in rest[0].text()
    assert_nearly_same_outcome(tmp_path / "model", tmp_path / "whole")


# --------------------------------------------------------------------------------------------------------- out of disk


def limit_files(size: int):
    """A fault: no file can grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own, on which one checkpoint has room, and not two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=480k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_files_that_cannot_be_written(file, pairs, fork, tmp_path):
    folder = tmp_path / "model"
    argv = options(pairs, folder, "--max_steps", "8", "--d_model", "32", "--resume_from_checkpoint", *QUICK)
    assert fork(argv, signal_at(*STEP, 6)).end() == -signal.SIGKILL
    size = (folder / "checkpoint-4" / file).stat().st_size
    assert size > 60_000  # more than all else but these files
    full = fork(argv, functools.partial(limit_files, size - 1))
    assert_said_and_harmless(full, folder, "checkpoint-8 could not be written: Error while serializing")
    last, whole = fork(argv), fork(options(pairs, tmp_path / "whole", *argv[argv.index("--max_steps") :]))
    assert (last.end(), whole.end()) == (0, 0), last.text() + whole.text()
    assert_same_outcome(folder, tmp_path / "whole")


@pytest.mark.slow
def test_a_model_that_cannot_be_written(pairs, fork, tmp_path):
    """At the end, when the last checkpoint is there."""
    folder = tmp_path / "model"
    argv = options(pairs, folder, "--max_steps", "4", "--d_model", "32", "--resume_from_checkpoint", *QUICK)
    last_words = ("vanilla_transformer.training.optimization:RunState", "results", 1)
    full = fork(argv, functools.partial(fault_at, *last_words, limit_files, 60_000))
    assert full.end() == 2
    assert "--resume_from_checkpoint" in one_sentence(full.text()) and "File too large" in one_sentence(full.text())
    assert list_checkpoints(folder)[-1].damage() is None
    last, whole = fork(argv), fork(options(pairs, tmp_path / "whole", *argv[argv.index("--max_steps") :]))
    assert (last.end(), whole.end()) == (0, 0), last.text() + whole.text()
    assert_same_outcome(folder, tmp_path / "whole")


def assert_said_and_harmless(run: Fork, folder: Path, said: str):
    before = test_train.files(folder)
    assert run.end() == 2
    assert said in one_sentence(run.text()) and "--resume_from_checkpoint" in one_sentence(run.text())
    assert test_train.files(folder) == before


@pytest.mark.slow
def test_a_full_disk(pairs, fork, small_disk, tmp_path):
    folder = small_disk / "model"
    argv = options(pairs, folder, "--max_steps", "8", "--resume_from_checkpoint", *QUICK)
    assert fork(argv, signal_at(*STEP, 6)).end() == -signal.SIGKILL
    assert_said_and_harmless(fork(argv), folder, "No space left on device")
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    last, whole = fork(argv), fork(options(pairs, tmp_path / "whole", *argv[argv.index("--max_steps") :]))
    assert (last.end(), whole.end()) == (0, 0), last.text() + whole.text()
    assert_same_outcome(folder, tmp_path / "whole")


# ------------------------------------------------------------------------------------------------------------- damaged


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_byte(path: Path):
    content = bytearray(path.read_bytes())
    content[-9] ^= 1  # of the last tensor, or of a number
    path.write_bytes(content)


DAMAGES = {
    "cut weights": ("model.safetensors", truncate, "its model.safetensors is not as it was written"),
    "cut optimiser": ("optimizer.safetensors", truncate, "its optimizer.safetensors is not as it was written"),
    "a bit of the weights": ("model.safetensors", flip_a_byte, "its model.safetensors is not as it was written"),
    "a bit of the moments": (
        "optimizer.safetensors",
        flip_a_byte,
        "its optimizer.safetensors is not as it was written",
    ),
    "a bit of the tokenizer": ("tokenizer.json", flip_a_byte, "its tokenizer.json is not as it was written"),
    "a bit of the state": ("trainer_state.json", flip_a_byte, "its trainer_state.json is not as it was written"),
    "no optimiser": ("optimizer.safetensors", Path.unlink, "its optimizer.safetensors is missing"),
    "no sums": ("SHA256SUMS", Path.unlink, "its SHA256SUMS is missing or cannot be read"),
    "a line of the sums": ("SHA256SUMS", truncate, "its "),
}


@pytest.fixture(scope="module")
def eight_and_twelve():
    """eight_and_twelve(train, pairs, folder) -> the outputs of 8 steps, which are copied to the folder, and of 12."""
    made = {}

    def copy(train, pairs: Path, factory, folder: Path) -> tuple[Path, Path]:
        if not made:
            for steps_ in ("8", "12"):
                made[steps_] = factory.mktemp("damaged") / "model"
                assert train(options(pairs, made[steps_], "--max_steps", steps_, *QUICK))[0] == 0
        shutil.copytree(made["8"], folder)
        return folder, made["12"]

    return copy


@pytest.fixture
def eight(eight_and_twelve, train, pairs, tmp_path_factory, tmp_path):
    """The output directory of 8 steps, of which each 4th is saved, and that of 12."""
    return eight_and_twelve(train, pairs, tmp_path_factory, tmp_path / "model")


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_left_out(name, eight, pairs, train):
    folder, twelve = eight
    file, harm, said = DAMAGES[name]
    harm(folder / "checkpoint-8" / file)
    argv = options(pairs, folder, "--max_steps", "12", *QUICK)

    before = test_train.files(folder)
    status, _, errors = train([*argv, "--resume_from_checkpoint", str(folder / "checkpoint-8")])
    assert status == 2
    assert f"--resume_from_checkpoint {folder / 'checkpoint-8'} is damaged: {said}" in one_sentence(errors)
    assert test_train.files(folder) == before

    status, printed, errors = train([*argv, "--resume_from_checkpoint"])
    assert status == 0, errors
    assert f"{folder / 'checkpoint-8'} is damaged, {said}" in printed
    assert f"going on from {folder / 'checkpoint-4'}\n" in printed
    assert_same_outcome(folder, twelve)
    assert (folder / "checkpoint-8.damaged").is_dir() and steps(folder) == [8, 12]


def test_a_checkpoint_without_its_state_is_left_out(eight, pairs, train):
    folder, twelve = eight
    (folder / "checkpoint-8" / "trainer_state.json").unlink()
    status, printed, errors = train(options(pairs, folder, "--max_steps", "12", "--resume_from_checkpoint", *QUICK))
    assert status == 0, errors
    assert f"{folder / 'checkpoint-8'} is damaged, its trainer_state.json is missing, and left out" in printed
    assert_same_outcome(folder, twelve)


def test_no_checkpoint_is_whole(eight, pairs, train):
    folder, _ = eight
    for step in (4, 8):
        truncate(folder / f"checkpoint-{step}" / "model.safetensors")
    before = test_train.files(folder)
    status, _, errors = train(options(pairs, folder, "--max_steps", "12", "--resume_from_checkpoint"))
    assert status == 2 and f"Every checkpoint in {folder} is damaged" in one_sentence(errors)
    assert test_train.files(folder) == before


def test_a_damaged_checkpoint_is_not_one_to_keep(eight, pairs, train):
    """It is newer than what is saved first, which is nevertheless not deleted as an old one."""
    folder, _ = eight
    flip_a_byte(folder / "checkpoint-8" / "model.safetensors")
    more = ["--max_steps", "7", "--save_steps", "3", "--save_total_limit", "1", "--resume_from_checkpoint", *QUICK]
    status, _, errors = train(options(pairs, folder, *more))
    assert status == 0, errors
    assert steps(folder) == [7] and list_checkpoints(folder)[0].damage() is None


def test_a_checkpoint_to_be_averaged_is_damaged(eight, pairs, train):
    folder, _ = eight
    flip_a_byte(folder / "checkpoint-4" / "model.safetensors")
    more = ["--max_steps", "8", "--average_checkpoints", "2", "--resume_from_checkpoint", *QUICK]
    status, _, errors = train(options(pairs, folder, *more))
    assert status == 2 and f"{folder / 'checkpoint-4'} cannot be averaged" in one_sentence(errors)


# -------------------------------------------------------------------------------------------------------- coming apart

DIVERGENCE = "--max_steps 8 --dropout 0.2 --ema_decay 0.5 --bpe_dropout 0.1 --gradient_accumulation_steps 2"


def set_poison(numbers: set[int], set_attribute=setattr):
    """A fault: the loss of the batches of these numbers is no number."""
    seed_batch, loss_of, current = training.seed_batch, training.loss_of, [None]

    def remember(seed: int, number: int):
        current[0] = number
        seed_batch(seed, number)

    def lose(*arguments) -> torch.Tensor:
        return loss_of(*arguments) * (float("nan") if current[0] in numbers else 1)

    set_attribute(training, "seed_batch", remember)
    set_attribute(training, "loss_of", lose)


@pytest.fixture
def poison(monkeypatch):
    return functools.partial(set_poison, set_attribute=monkeypatch.setattr)


def test_a_bad_batch_stops_the_run(pairs, train, poison, tmp_path):
    """The message names what is needed to find it, and the checkpoints are as they were."""
    poison({11})
    status, _, errors = train(options(pairs, tmp_path / "model", *DIVERGENCE.split(), *QUICK))
    message = one_sentence(errors)
    assert status == 2
    assert "The loss is nan and the norm of its gradient nan at step 6, with learning rate 1.63e-02" in message
    assert "--on_divergence rollback" in message and "--learning_rate" in message
    numbers, named, more = re.search(r"in (batches 10 to 11), pairs ([\d, ]+) and (\d+) more", message).groups()
    named = [int(index) for index in named.split(", ")]
    assert len(set(named)) == 8 and all(0 <= index < 100 for index in named) and int(more) > 0
    assert steps(tmp_path / "model") == [4] and list_checkpoints(tmp_path / "model")[0].damage() is None


@pytest.mark.parametrize("kind", test_train.KINDS)
def test_rollback_leaves_out_the_bad_batch(kind, pairs, train, poison, monkeypatch, tmp_path):
    """And equals a run that never saw it, nor the other batch of its step."""
    more = [*DIVERGENCE.split(), *QUICK, *test_train.KINDS[kind]]
    poison({11})
    status, printed, errors = train(options(pairs, tmp_path / "rolled", *more, "--on_divergence", "rollback"))
    assert status == 0, errors
    assert printed.count("Going back to") == 1
    assert "at step 6, with learning rate 1.63e-02, in batches 10 to 11, pairs " in printed
    assert f"Going back to {tmp_path / 'rolled' / 'checkpoint-4'} and leaving these batches out." in printed
    assert state(newest(tmp_path / "rolled"))["skipped"] == [10, 11]

    monkeypatch.setattr(training, "RunState", functools.partial(training.RunState, skipped=[10, 11]))
    status, _, errors = train(options(pairs, tmp_path / "spared", *more))
    assert status == 0, errors
    assert_same_outcome(tmp_path / "rolled", tmp_path / "spared")
    monkeypatch.undo()


@pytest.mark.slow
def test_stopped_around_a_rollback(pairs, train, stop, poison, tmp_path):
    """Before it, at the very step, in the steps that are done again, and after it."""
    more = [*DIVERGENCE.split(), *QUICK, "--on_divergence", "rollback"]
    poison({11})
    assert train(options(pairs, tmp_path / "whole", *more))[0] == 0
    for number, calls in enumerate([[10], [12], [14], [18], [4, 6, 4]]):
        argv = options(pairs, tmp_path / str(number), *more)
        for call in calls:
            argv = stop(argv, training, "loss_of", call)
        assert train(argv)[0] == 0
        assert_same_outcome(tmp_path / str(number), tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize(
    "fault, status", [(signal_at(*STEP, 6), -signal.SIGKILL), (None, 2)], ids=["killed", "failing"]
)
def test_processes_that_load_data_end_with_their_own(fault, status, method, pairs, fork, tmp_path):
    """Though they outlive signals: whether it is killed, or ends with an error in the middle."""
    argv = options(pairs, tmp_path / "model", "--dataloader_num_workers", "2", "--num_train_epochs", "1000")
    run = fork(argv, functools.partial(begin_by, method, fault or functools.partial(set_poison, {100})))
    begun, loaders = time.monotonic(), set()
    while run.process.is_alive() and time.monotonic() < begun + 60:
        time.sleep(0.02)
        with contextlib.suppress(psutil.Error):
            others = psutil.Process(run.process.pid).children(recursive=True)
            loaders.update(other for other in others if other.name() == "pt_data_worker")
    assert run.end(0) == status, run.text()
    assert len(loaders) == 2
    assert not psutil.wait_procs(loaders, timeout=30)[1]


def begin_by(method: str, fault):
    """A fault, and how processes are begun that load data."""
    multiprocessing.set_start_method(method, force=True)
    fault()


def test_bad_batches_before_the_first_checkpoint(pairs, train, poison, tmp_path):
    """The run begins anew without them, as long as they are few."""
    poison({0, 5})
    argv = options(pairs, tmp_path / "model", *DIVERGENCE.split(), *QUICK, "--on_divergence", "rollback")
    status, printed, errors = train(argv)
    assert status == 0, errors
    assert re.findall(r"at step (\d+).*Going back to .*checkpoint-(\d+) and", printed) == [("1", "0"), ("2", "0")]
    assert state(newest(tmp_path / "model"))["skipped"] == [0, 1, 4, 5]


def test_rollback_gives_up(pairs, train, poison, tmp_path):
    """Where every batch is bad, it is not the batches."""
    poison(range(10, 1000))
    argv = options(pairs, tmp_path / "model", *DIVERGENCE.split(), *QUICK, "--on_divergence", "rollback")
    status, printed, errors = train(argv)
    assert status == 2
    assert printed.count("Going back to") == 4
    assert f"the fifth time after {tmp_path / 'model' / 'checkpoint-4'}, which is whole" in one_sentence(errors)
    assert steps(tmp_path / "model") == [0, 4] and newest(tmp_path / "model").name == "checkpoint-4"
    assert all(checkpoint.damage() is None for checkpoint in list_checkpoints(tmp_path / "model"))


def test_rollback_of_a_run_that_was_begun_elsewhere(pairs, train, poison, tmp_path):
    """The only checkpoint to go back to is in another directory."""
    assert train(options(pairs, tmp_path / "first", *DIVERGENCE.split(), *QUICK, "--max_steps", "4"))[0] == 0
    poison({9})
    more = [*DIVERGENCE.split(), *QUICK, "--on_divergence", "rollback", "--save_steps", "3"]
    argv = options(pairs, tmp_path / "second", *more, "--resume_from_checkpoint", str(newest(tmp_path / "first")))
    status, printed, errors = train(argv)
    assert status == 0, errors
    assert f"Going back to {tmp_path / 'first' / 'checkpoint-4'} and leaving these batches out." in printed
    assert steps(tmp_path / "second") == [6, 8] and steps(tmp_path / "first") == [4]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["copied", "sharded"])
def test_two_processes_roll_back_together(how, pairs, fork, fork_two, tmp_path):
    """The bad batch is that of one of them."""
    more = ["--on_divergence", "rollback"]
    fault = functools.partial(set_poison, {11})
    two = fork_two(options(pairs, tmp_path / "two", *TWO.split(), *more), fault, (0, 1), **KINDS_OF_TWO[how])
    one = fork(options(pairs, tmp_path / "one", *TWO.split(), *more, "--gradient_accumulation_steps", "2"), fault)
    assert [run.end() for run in (*two, one)] == [0, 0, 0], two[0].text() + two[1].text()
    for run, count in [(two[0], 1), (two[1], 0), (one, 1)]:
        assert run.text().count("Going back to") == count
    assert state(newest(tmp_path / "two"))["skipped"] == [10, 11]
    assert_nearly_same_outcome(tmp_path / "two", tmp_path / "one")


@pytest.fixture(scope="module")
def outlier(tmp_path_factory) -> Path:
    """A dataset of easy pairs and one, at PLACE, that is nothing like them."""
    folder = tmp_path_factory.mktemp("outlier")
    rows = [{"en": " ".join(["dog"] * (i % 3 + 1)), "de": " ".join(["Hund"] * (i % 3 + 1))} for i in range(600)]
    rows[PLACE] = {"en": "dog " * 8, "de": "Ωжλ漢字ツ" * 3}
    for split, part in [("train", rows), ("validation", rows[:2])]:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in part]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


PLACE = 123
SPIKE = "--max_steps 160 --per_device_train_max_tokens 40 --learning_rate 0.01 --save_steps 50 --max_eval_samples 1"


def test_a_spike_stops_the_run(outlier, train, tmp_path):
    """A real one: of a pair whose tokens have never come before."""
    status, _, errors = train(options(outlier, tmp_path / "model", *SPIKE.split()))
    message = one_sentence(errors)
    assert status == 2 and f"in batch 153, pairs {PLACE}; no checkpoint" in message
    loss, usual, step = re.search(r"The loss is (\S+) after (\S+) on average .* at step (\d+), with", message).groups()
    assert float(loss) > float(usual) + 2 and step == "154"
    assert steps(tmp_path / "model") == [100, 150]


def test_a_spike_is_left_out_or_ignored(outlier, train, tmp_path):
    for choice, skipped in [("rollback", [153]), ("ignore", [])]:
        argv = options(outlier, tmp_path / choice, *SPIKE.split(), "--on_divergence", choice)
        status, printed, errors = train(argv)
        assert status == 0, errors
        assert printed.count(f"in batch 153, pairs {PLACE}. Going back to") == len(skipped)
        assert state(newest(tmp_path / choice))["skipped"] == skipped
