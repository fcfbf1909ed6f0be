"""Checkpoints: complete or absent, verified, resumed, pruned and averaged; the output directory; changed settings."""

import hashlib
import json
import re
import resource
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from helpers import parts, small_model
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import checkpoint as checkpoints
from vanilla_transformer.training.arguments import RECIPE_HEADER, parse_arguments, resolved_recipe
from vanilla_transformer.training.checkpoint import (
    LOCK,
    SUMS,
    Checkpoint,
    average_checkpoints,
    compare_settings,
    final_checkpoints,
    list_checkpoints,
    load_weights,
    prepare_output_dir,
    prune_checkpoints,
    resolve_resume_checkpoint,
    save_checkpoint,
    scheduled_checkpoints,
)
from vanilla_transformer.training.optimization import compute_loss, make_optimizer, seed_batch, set_learning_rate
from vanilla_transformer.training.state import TrainerState, Triggers

DROPOUTS = {"dropout": 0.3, "attention_dropout": 0.1}
CONFIGS = {
    "tied": {},
    "separate": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "decoder_vocab_size": 41},
    "learned, bias": {"position_embedding_type": "learned", "lm_head_bias": True, "norm_first": True},
}


def options(*argv):
    return parse_arguments(["--dataset_name=x", *argv])


class Run:
    """What train.py holds during a run: model, moving average, optimizer and state."""

    def __init__(self, accelerator, with_ema=True, seed=0, **config):
        torch.manual_seed(seed)
        self.model, self.accelerator, self.state = small_model(**config), accelerator, TrainerState()
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if with_ema else None
        self.optimizer = make_optimizer(self.model, options("--weight_decay=0.01"))

    def train(self, steps: int):
        for _ in range(steps):
            seed_batch(42, self.state.position)
            compute_loss(self.model.train(), parts(1)[0], 30, options()).backward()
            set_learning_rate(self.optimizer, 0.01 / (self.state.step + 1))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.ema is not None:
                self.ema.update_parameters(self.model)
            self.state.advance(1)
        return self

    def save(self, folder: Path, tokenizer) -> Checkpoint:
        model, optimizer = self.model, self.optimizer
        save_checkpoint(folder, model, model, self.ema, optimizer, tokenizer, self.state, self.accelerator)
        return Checkpoint(folder)

    def load(self, folder: Path):
        self.state = Checkpoint(folder).load(self.model, self.ema, self.optimizer, self.accelerator)
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"ema.{name}": value for name, value in self.ema.module.state_dict().items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, moments in self.optimizer.state.items():
            tensors |= {f"optimizer.{names[parameter]}.{key}": value for key, value in moments.items()}
        return {name: value.clone() for name, value in tensors.items()}


def assert_identical(ours: dict, theirs: dict):
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def original(accelerator, byte_tokenizer, tmp_path_factory) -> Path:
    return Run(accelerator).train(1).save(tmp_path_factory.mktemp("run") / "checkpoint-1", byte_tokenizer).folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "checkpoint-1"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ----------------------------------------------------------------------------------------------------- save and resume


def test_checkpoint_is_a_loadable_model(accelerator, byte_tokenizer, tmp_path):
    run = Run(accelerator).train(1)
    run.save(tmp_path / "checkpoint-1", byte_tokenizer)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "checkpoint-1")
    assert_identical(model.state_dict(), run.model.state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint-1")("a dog") == byte_tokenizer("a dog")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("with_ema", [True, False])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_resumed_run_equals_an_uninterrupted_one(config, with_ema, accelerator, byte_tokenizer, tmp_path):
    config = {**config, **DROPOUTS}
    run = Run(accelerator, with_ema, **config).train(2)
    run.state.history = [{"step": 2, "eval_bleu": 1.5, "eval_loss": 2.5}]
    run.state.stream, run.state.settings = {"epoch": 1, "shard_idx": [0, None]}, {"seed": 2**62, "data": None}
    assert run.save(tmp_path / "checkpoint-2", byte_tokenizer).find_corruption() is None
    before = run.tensors()
    resumed = Run(accelerator, with_ema, seed=99, **config).load(tmp_path / "checkpoint-2")
    assert_identical(resumed.tensors(), before)
    assert resumed.state == run.state
    assert_identical(resumed.train(2).tensors(), run.train(2).tensors())
    assert not torch.equal(before["model.lm_head.weight"], run.model.lm_head.weight)


def test_float16_loss_scale_is_restored(half, accelerator, byte_tokenizer, tmp_path):
    run = Run(half).train(1)
    run.save(tmp_path / "checkpoint-1", byte_tokenizer)
    half.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    Run(half).load(tmp_path / "checkpoint-1")
    assert half.scaler.get_scale() == 2.0**40
    half.scaler = None
    assert Run(half).load(tmp_path / "checkpoint-1").state.scaler["scale"] == 2.0**40


@pytest.mark.parametrize(
    "config, culprit",
    [
        ({"d_model": 32}, "its `d_model` is 16, and 32 in this run"),
        ({"encoder_layers": 3}, "its `encoder_layers` is 2, and 3 in this run"),
        ({"lm_head_bias": True}, "its `lm_head_bias` is False"),
        ({"decoder_attention_heads": 8}, "its `decoder_attention_heads` is"),  # the shapes are the same
        ({"activation_function": "gelu"}, "its `activation_function` is relu"),
        ({"position_embedding_type": "rotary"}, "its `position_embedding_type` is sinusoidal"),
    ],
)
def test_checkpoint_of_another_model_is_rejected(config, culprit, folder, accelerator):
    run = Run(accelerator, **config)
    before = run.tensors()
    with pytest.raises(UserError, match=f"^Cannot resume from {folder}: {culprit}"):
        run.load(folder)
    assert_identical(run.tensors(), before)


def test_dropout_and_moving_average_may_be_changed(folder, accelerator, byte_tokenizer, tmp_path):
    assert Run(accelerator, with_ema=False, **DROPOUTS).load(folder).state.step == 1
    Run(accelerator, with_ema=False).train(2).save(tmp_path / "checkpoint-2", byte_tokenizer)
    with pytest.raises(UserError, match="it was written without --ema_decay; leave that option out"):
        Run(accelerator).load(tmp_path / "checkpoint-2")


def test_nan_weights_are_not_saved(accelerator, byte_tokenizer, tmp_path):
    run = Run(accelerator).train(1)
    run.model.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="has NaN or infinite weights after step 1"):
        run.save(tmp_path / "checkpoint-1", byte_tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, culprit",
    [
        (lambda weights: weights.pop("model.shared.weight"), "'model.shared.weight' is missing"),
        (lambda weights: weights.update(extra=torch.zeros(2)), "'extra' is not a weight of this model"),
        (
            lambda weights: weights.update({"model.shared.weight": torch.zeros(37, 15)}),
            r"'model.shared.weight' has shape \[37, 15\] instead of \[37, 16\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change, culprit, make_model):
    weights = dict(make_model().named_parameters())
    change(weights)
    with pytest.raises(ValueError, match=culprit):
        load_weights(make_model(), weights)


def test_interrupted_save_leaves_the_older_checkpoint(folder, accelerator, byte_tokenizer, monkeypatch):
    before, run = contents(folder), Run(accelerator).train(2)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", interrupt)
        for step in (1, 2):  # in place of the old one, and beside it
            with pytest.raises(KeyboardInterrupt):
                run.save(folder.with_name(f"checkpoint-{step}"), byte_tokenizer)
    assert [found.step for found in list_checkpoints(folder.parent)] == [1] and contents(folder) == before
    assert run.save(folder.with_name("checkpoint-2"), byte_tokenizer).find_corruption() is None


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("step", [1, 2])
def test_full_disk_leaves_older_checkpoints(step, share, accelerator, byte_tokenizer, folder, tmp_path):
    """Files are limited to a share of the largest, so that writing fails at different places."""
    before, run = contents(folder), Run(accelerator).train(step)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(max(map(len, before.values())) * share), unlimited[1]))
    try:
        with pytest.raises(OSError, match=rf"^{tmp_path / f'checkpoint-{step}'} could not be written: .+"):
            run.save(tmp_path / f"checkpoint-{step}", byte_tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert contents(folder) == before


def test_damaged_checkpoint_is_replaced(accelerator, byte_tokenizer, folder, tmp_path):
    (folder / "notes.txt").write_text("of the old one")
    (tmp_path / "checkpoint-1.tmp").mkdir()
    saved = Run(accelerator).train(1).save(folder, byte_tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert not (folder / "notes.txt").exists() and saved.find_corruption() is None


# ---------------------------------------------------------------------------------------------------------- corruption


def flip(path: Path):
    """Changes one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="a GNU program")
def test_sha256sum_accepts_a_checkpoint(folder):
    check = ["sha256sum", "--check", "--strict", SUMS]
    done = subprocess.run(check, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {line.split(":")[0] for line in done.stdout.splitlines()} == contents(folder).keys() - {SUMS}


CORRUPTIONS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "one bit flipped": flip,
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("way", CORRUPTIONS)
def test_corruption_of_any_file_is_found(way, original, tmp_path):
    assert Checkpoint(original).find_corruption() is None
    for name in contents(original).keys() - {SUMS}:
        folder = Path(shutil.copytree(original, tmp_path / name / "checkpoint-1"))
        CORRUPTIONS[way](folder / name)
        what = "is missing or cannot be read" if way == "missing" else "has changed since it was written"
        assert Checkpoint(folder).find_corruption() == f"its {name} {what}"


BROKEN_SUMS = {
    "missing": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "empty": lambda path: path.write_text(""),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "prose": lambda path: path.write_text("once upon a time\n"),
    "long name": lambda path: path.write_text(f"{'0' * 64}  {'x' * 300}\n" + path.read_text()),
    "directory name": lambda path: path.write_text(f"{'0' * 64}  ..\n" + path.read_text()),
    "one bit flipped": flip,
    "last line missing": lambda path: path.write_text("".join(path.read_text().splitlines(True)[:-3])),
    "cut": lambda path: path.write_text(path.read_text()[:300]),
}


@pytest.mark.parametrize("way", BROKEN_SUMS)
def test_corrupt_sums_are_found(way, folder):
    BROKEN_SUMS[way](folder / SUMS)
    reason = Checkpoint(folder).find_corruption()
    assert reason.startswith("its ") and "\n" not in reason


def rewrite(folder: Path, name: str, text: str):
    """Replaces a file and its sum."""
    (folder / name).write_text(text, encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / SUMS).write_text(re.sub(rf"\w+(?=  {name})", digest, (folder / SUMS).read_text()), encoding="utf-8")


@pytest.mark.parametrize("text", ['{"epoch": 1.0}', "[1]", "null", "", "{}", '{"step": 7}'])
def test_foreign_trainer_state_is_rejected(text, folder, accelerator):
    rewrite(folder, "trainer_state.json", text)
    assert Checkpoint(folder).find_corruption().startswith("its trainer_state.json ")
    with pytest.raises(UserError, match=f"^Cannot resume from {folder}: its trainer_state.json"):
        Run(accelerator).load(folder)


def test_checkpoint_of_version_0_1_resumes(folder, accelerator):
    saved = json.loads((folder / "trainer_state.json").read_text())
    del saved["scores_count_from"]
    old = saved | {"skipped": [], "is_interrupted": True, "settings": {"seed": 42, "data": "d1"}}
    rewrite(folder, "trainer_state.json", json.dumps(old))
    assert Checkpoint(folder).find_corruption() is None
    state = Run(accelerator).load(folder).state
    assert (state.step, state.scores_count_from) == (1, 0)
    assert compare_settings(Checkpoint(folder), state.settings, settings()) == []
    rewrite(folder, "trainer_state.json", json.dumps(old | {"skipped": [4, 5]}))
    with pytest.raises(UserError, match="written by version 0.1 after a rollback; resume it with that version"):
        Run(accelerator).load(folder)


# ------------------------------------------------------------------------------------- pruning, averaging, output dir


def put(output_dir: Path, *steps: int):
    for step in steps:
        (output_dir / f"checkpoint-{step}").mkdir()


def steps_in(output_dir: Path) -> list[int]:
    return [found.step for found in list_checkpoints(output_dir)]


def state_with_bleu(scores: dict[int, float]) -> TrainerState:
    return TrainerState(history=[{"step": n, "eval_bleu": bleu, "eval_loss": 1.0} for n, bleu in scores.items()])


def test_checkpoints_are_listed_by_step(tmp_path):
    put(tmp_path, 100, 9, 20)
    for name in ("checkpoint-best", "runs", "checkpoint-9.damaged", "checkpoint-200.tmp"):
        (tmp_path / name).mkdir()
    assert steps_in(tmp_path) == [9, 20, 100] and list_checkpoints(tmp_path / "none") == []


@pytest.mark.parametrize(
    "argv, left",
    [
        (["--save_total_limit=1"], [20, 50]),
        (["--save_total_limit=2"], [20, 40, 50]),
        (["--save_total_limit=9"], [10, 20, 30, 40, 50]),
        (["--save_total_limit=1", "--average_checkpoints=3"], [20, 30, 40, 50]),
        (["--save_total_limit=1", "--average_checkpoints=2", "--average_checkpoints_by=score"], [10, 20, 50]),
    ],
)
def test_pruning_keeps_newest_best_and_averaged(argv, left, tmp_path):
    """Step 35 was saved because of a signal: it is not kept, and never one of the last."""
    put(tmp_path, 10, 20, 30, 35, 40, 50)
    for name in ("checkpoint-best", "checkpoint-9.damaged", "checkpoint-200.tmp"):
        (tmp_path / name).mkdir()
    triggers = Triggers(options("--eval_steps=10", *argv), 100)
    assert 35 not in [found.step for found in scheduled_checkpoints(tmp_path, triggers)]
    prune_checkpoints(tmp_path, state_with_bleu({10: 4.0, 20: 5.0, 30: 3.0, 40: 2.0, 50: 1.0}), triggers)
    assert steps_in(tmp_path) == left
    assert (tmp_path / "checkpoint-best").exists() and not (tmp_path / "checkpoint-200.tmp").exists()


@pytest.mark.parametrize(
    "argv, chosen",
    [
        ([], []),
        (["--average_checkpoints=2"], [20, 30]),
        (["--average_checkpoints=2", "--average_checkpoints_by=score"], [10, 20]),
        (["--early_stopping_patience=5"], [20]),
    ],
)
def test_final_checkpoints_ignore_those_saved_by_a_signal(argv, chosen, tmp_path):
    put(tmp_path, 10, 20, 30, 35)
    triggers = Triggers(options("--eval_steps=10", *argv), 100)
    found = final_checkpoints(tmp_path, state_with_bleu({10: 4.0, 20: 5.0, 30: 3.0}), triggers)
    assert [one.step for one in found] == chosen


@pytest.mark.parametrize("use_ema", [False, True])
def test_averaged_checkpoints_are_the_mean(use_ema, accelerator, byte_tokenizer, tmp_path):
    run = Run(accelerator)
    saved = [run.train(1).save(tmp_path / f"checkpoint-{n}", byte_tokenizer) for n in (1, 2, 3)]
    file = "ema.safetensors" if use_ema else "model.safetensors"
    each = [load_file(one.folder / file) for one in saved]
    for name, value in average_checkpoints(saved, use_ema).items():
        mean = sum(weights[name].double() for weights in each) / 3
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
    flip(saved[1].folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{saved[1]} cannot be averaged: its model.safetensors has changed"):
        average_checkpoints(saved)


def prepare(output_dir: Path, checkpoint: Checkpoint | None = None) -> FileLock:
    lock = FileLock(output_dir / LOCK, timeout=0.1)
    prepare_output_dir(lock, checkpoint, f"{RECIPE_HEADER}seed: 1\n")
    return lock


def test_one_run_at_a_time(tmp_path):
    lock = prepare(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "recipe.yaml").read_text() == f"{RECIPE_HEADER}seed: 1\n"
    with pytest.raises(UserError, match=f"^Another run is writing to --output_dir {tmp_path}/a/b; choose another"):
        prepare(tmp_path / "a" / "b")
    lock.release()
    prepare(tmp_path / "a" / "b")


def test_newer_damaged_checkpoint_is_renamed(folder):
    put(folder.parent, 2)
    prepare(folder.parent, Checkpoint(folder))
    assert steps_in(folder.parent) == [1] and folder.with_name("checkpoint-2.damaged").is_dir()


def test_existing_run_or_recipe_is_not_overwritten(folder, tmp_path):
    with pytest.raises(UserError, match=f"^--output_dir {folder.parent} "):
        resolve(folder.parent, None)
    own = tmp_path / "own"
    own.mkdir()
    (own / "recipe.yaml").write_text("# mine\n")
    with pytest.raises(UserError, match="is not empty; choose another"):
        resolve(own, None)


def resolve(output_dir: Path, name: str):
    return resolve_resume_checkpoint(SimpleNamespace(output_dir=str(output_dir), resume_from_checkpoint=name))


def test_newest_valid_checkpoint_is_resumed(folder, tmp_path, capsys):
    put(tmp_path, 2)
    assert resolve(tmp_path, "newest").step == 1
    assert f"skipping {tmp_path}/checkpoint-2, which is damaged" in capsys.readouterr().out
    (tmp_path / "latest").symlink_to(folder)
    assert resolve(tmp_path / "other", str(tmp_path / "latest")).folder == folder
    flip(folder / "model.safetensors")
    with pytest.raises(UserError, match="All checkpoints in .* are damaged"):
        resolve(tmp_path, "newest")


def test_model_without_a_checkpoint_is_not_resumed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint to resume from; .* --model_name_or_path"):
        resolve(tmp_path, "newest")


# ------------------------------------------------------------------------------------------------------------ settings

FROM = Checkpoint(Path("runs/checkpoint-7"))


def settings(*argv: str, data="d1", validation="v1", batches=4, precision="no", **config) -> dict:
    args = options(*argv)
    extra = {"data": None if args.streaming else data, "validation": validation, "batches_per_step": batches}
    return resolved_recipe(args, VanillaTransformerConfig(**config)) | extra | {"mixed_precision": precision}


@pytest.mark.parametrize(
    "now, lines",
    [
        (settings(), []),
        (settings("--output_dir=y", "--save_total_limit=9", "--report_to=tensorboard"), []),
        (settings("--warmup_steps=7"), ["--warmup_steps was 4000, now 7"]),
        (settings("--lr_scheduler_type=cosine"), ["--lr_scheduler_type was inverse_sqrt, now cosine"]),
        (settings(dropout=0.45), ["--dropout was 0.1, now 0.45"]),
        (settings(validation="v2"), ["the validation pairs"]),
        (settings(precision="bf16"), ["--mixed_precision was no, now bf16"]),
        (settings(vocab_size=280), []),
    ],
)
def test_changed_settings_are_named(now, lines):
    assert compare_settings(FROM, settings(), now) == lines


STREAM = ["--streaming", "--max_steps=9"]


@pytest.mark.parametrize(
    "before, now, culprit",
    [
        ({}, {"argv": ["--seed=7"]}, "--seed is 7, but 42 in"),
        ({}, {"argv": ["--per_device_train_max_tokens=99"]}, "--per_device_train_max_tokens is 99, but 4096 in"),
        ({}, {"argv": ["--bpe_dropout=0.1"]}, "--bpe_dropout is 0.1, but 0.0 in"),
        ({}, {"argv": STREAM}, "The training pairs are not those of"),
        *(
            ({"argv": STREAM}, {"argv": [*STREAM, f"--{name}=9"]}, f"--{name} is 9, but ")
            for name in checkpoints.FIXED_IN_STREAM
            if name != "train_file"
        ),
        ({}, {"data": "d2"}, "The training pairs are not those of"),
        ({}, {"batches": 6}, "An optimizer step of runs/checkpoint-7 has 4 batches, and 6 now"),
    ],
)
def test_resume_rejects_changed_batches(before, now, culprit):
    old, new = (settings(*given.get("argv", []), **{k: v for k, v in given.items() if k != "argv"})
                for given in (before, now))  # fmt: skip
    with pytest.raises(UserError, match=f"^{culprit}.* --model_name_or_path runs/checkpoint-7"):
        compare_settings(FROM, old, new)
