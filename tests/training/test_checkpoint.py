"""Checkpoints: complete or absent, resumed, pruned and averaged; the output directory; changed settings."""

import itertools
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from helpers import EMBEDDINGS, assert_close, parts, put_checkpoints, small_model, state_with_bleu, training_options
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.errors import UserError
from vanilla_transformer.training import checkpoint as checkpoints
from vanilla_transformer.training import final_weights
from vanilla_transformer.training import optimization as optim
from vanilla_transformer.training.resume import resume
from vanilla_transformer.training.state import TrainerState, Triggers
from vanilla_transformer.training.weights import Weights

DROPOUTS = {"dropout": 0.3, "attention_dropout": 0.1}
CONFIGS = {
    "tied": {},
    "separate": EMBEDDINGS["separate, untied, bias"],
    "learned, bias": {"position_embedding_type": "learned", "norm_first": True, "lm_head_bias": True},
}


class Run:
    """What train.py holds during a run: weights, optimizer and state."""

    def __init__(self, accelerator, with_ema=True, seed=0, optimizer="adamw", **config):
        torch.manual_seed(seed)
        self.model, self.accelerator, self.state = small_model(**config), accelerator, TrainerState()
        self.weights = Weights(self.model, accelerator, compile=False, ema_decay=0.9 if with_ema else None)
        optimizer = optim.make_optimizer(
            self.model, training_options("--weight_decay=0.01", f"--optimizer={optimizer}")
        )
        self.optimizer = AcceleratedOptimizer(optimizer, scaler=accelerator.scaler)

    def train(self, steps: int):
        scaler = self.accelerator.scaler or torch.amp.GradScaler("cpu", enabled=False)
        for _ in range(steps):
            optim.seed_batch(42, self.state.position)
            scaler.scale(optim.compute_loss(self.model.train(), parts(1)[0], 1, training_options())).backward()
            optim.set_learning_rate(self.optimizer, 0.01 / (self.state.step + 1))
            scaler.step(self.optimizer.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
            self.weights.update_average(self.state.step)
            self.state.advance(1)
        return self

    def save(self, output_dir: Path, tokenizer) -> Path:
        checkpoints.save(output_dir, self.weights, self.optimizer, tokenizer, self.state)
        return output_dir / f"checkpoint-{self.state.step}"

    def load(self, folder: Path, **settings):
        self.state = resume(folder, {"streaming": False} | settings, folder.parent, self.weights, self.optimizer)
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.weights.average is not None:
            tensors |= {f"ema.{name}": value for name, value in self.weights.average.module.state_dict().items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, moments in self.optimizer.state.items():
            tensors |= {f"optimizer.{names[parameter]}.{key}": value for key, value in moments.items()}
        return {name: value.clone() for name, value in tensors.items()}


@pytest.fixture(scope="module")
def original(accelerator, byte_tokenizer, tmp_path_factory) -> Path:
    return Run(accelerator).train(1).save(tmp_path_factory.mktemp("run"), byte_tokenizer)


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "checkpoint-1"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ----------------------------------------------------------------------------------------------------- save and resume


def test_the_umask_decides_who_may_read_a_checkpoint(accelerator, byte_tokenizer, tmp_path):
    before = os.umask(0o026)
    folder = Run(accelerator).train(1).save(tmp_path, byte_tokenizer)
    os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}


def test_a_resumed_run_has_the_settings_of_now(folder, accelerator):
    settings = {"seed": 42, "streaming": False, "logging_steps": 7}
    assert Run(accelerator).load(folder, **settings).state.settings == settings


@pytest.mark.parametrize(
    "name, are_compared", [("seed", True), ("num_beams", False), ("max_target_length", False), ("ema_decay", False)]
)
def test_scores_made_otherwise_are_not_compared(name, are_compared, accelerator, byte_tokenizer, tmp_path):
    run = Run(accelerator)
    run.state.settings, run.state.history = {"streaming": False, name: 1}, [{"step": 1}]
    folder = run.save(tmp_path, byte_tokenizer)
    settings = {name: 1 if name == "seed" else 2}  # another seed cannot be resumed
    assert Run(accelerator).load(folder, **settings).state.scores_count_from == (0 if are_compared else 1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("with_ema", [True, False])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_resumed_run_equals_an_uninterrupted_one(config, with_ema, optimizer, accelerator, byte_tokenizer, tmp_path):
    config = config | DROPOUTS | {"optimizer": optimizer}
    run = Run(accelerator, with_ema, **config).train(2)
    run.state.history = [{"step": 2, "eval_bleu": 1.5, "eval_loss": 2.5}]
    run.state.stream, run.state.settings = [{"epoch": 1, "place": None}], {"seed": 2**62, "streaming": False}
    folder, before = run.save(tmp_path, byte_tokenizer), run.tensors()
    assert list(tmp_path.iterdir()) == [folder]
    assert_close(AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict(), run.model.state_dict(), 0)
    assert AutoTokenizer.from_pretrained(folder)("a dog") == byte_tokenizer("a dog")
    resumed = Run(accelerator, with_ema, seed=99, **config).load(folder, **run.state.settings)
    assert_close(resumed.tensors(), before, 0)
    assert resumed.state == run.state
    assert_close(resumed.train(2).tensors(), run.train(2).tensors(), 0)
    assert not torch.equal(before["model.lm_head.weight"], run.model.lm_head.weight)


def test_resumed_float16_run_equals_an_uninterrupted_one(half, accelerator, byte_tokenizer, tmp_path):
    """The loss scale decides which steps are left out: it grows after each step, until gradients overflow."""
    half.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1)
    run = Run(half).train(3)
    folder, scale = run.save(tmp_path, byte_tokenizer), half.scaler.get_scale()
    before = run.tensors()["optimizer.model.shared.weight.step"]
    expected = run.train(3).tensors()
    assert before < expected["optimizer.model.shared.weight.step"] < before + 3
    half.scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    resumed = Run(half, seed=99).load(folder)
    assert half.scaler.get_scale() == scale
    assert_close(resumed.train(3).tensors(), expected, 0)
    assert Run(accelerator).load(folder).state.scaler["scale"] == scale  # without float16


def test_dropout_and_moving_average_may_be_changed(folder, accelerator, byte_tokenizer, tmp_path):
    assert Run(accelerator, with_ema=False, **DROPOUTS).load(folder).state.step == 1
    Run(accelerator, with_ema=False).train(2).save(tmp_path, byte_tokenizer)
    with pytest.raises(UserError, match="checkpoint-2 was written without --ema_decay; leave that option out"):
        Run(accelerator).load(tmp_path / "checkpoint-2")


def test_weights_that_do_not_fit_are_named(make_model):
    model = make_model()
    weights = dict(model.named_parameters())
    with pytest.raises(ValueError, match="'extra' is not a weight of this model"):
        checkpoints.load_weights(model, weights | dict.fromkeys(("one more", "extra"), torch.zeros(2)))
    del weights["model.shared.weight"]
    with pytest.raises(ValueError, match="'model.shared.weight' is missing"):
        checkpoints.load_weights(model, weights)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_full_disk_leaves_older_checkpoints(share, accelerator, byte_tokenizer, folder, tmp_path):
    """Files are limited to a share of the largest, so that writing fails at different places."""
    before, run = contents(folder), Run(accelerator).train(2)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(max(map(len, before.values())) * share), unlimited[1]))
    try:
        with pytest.raises(OSError, match=rf"^{tmp_path / 'checkpoint-2'} could not be written: .+"):
            run.save(tmp_path, byte_tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert list(tmp_path.iterdir()) == [folder] and contents(folder) == before


def with_tensor(name: str, change) -> Callable[[Path], None]:
    """Damages a file of tensors: `change` gets one of them and returns what takes its place, or None."""

    def harm(path: Path):
        tensors = load_file(path)
        tensors[name] = change(tensors.pop(name))
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)

    return harm


WEIGHT = "model.shared.weight"
MOMENT = f"{WEIGHT}/exp_avg"


@pytest.mark.parametrize(
    "name, tensor, change, message",
    [
        ("optimizer", MOMENT, lambda moment: moment[0, :3].clone(), r"\(3,\) and .* needs .* of \(37, 16\)"),
        ("optimizer", MOMENT, lambda moment: moment.T.contiguous(), r"\(16, 37\) and"),
        ("optimizer", MOMENT, torch.Tensor.long, r"\(37, 16\) and torch.int64"),
        ("optimizer", MOMENT, lambda moment: None, "is missing"),
        ("optimizer", f"{WEIGHT}/step", lambda step: step.repeat(2), r"\(2,\) and .* of \(\)"),
        ("model", WEIGHT, lambda weight: weight[:, :3].clone(), r"\(37, 3\) and"),
        ("ema", WEIGHT, lambda weight: weight[:3].clone(), r"\(3, 16\) and"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_named(name, tensor, change, message, folder, accelerator):
    """Fused AdamW would write behind the end of a moment that is too small."""
    file = f"{name}.safetensors"
    with_tensor(tensor, change)(folder / file)
    with pytest.raises(UserError, match=rf"^{folder} cannot be read: {file}: '{tensor}' (is a tensor of )?{message}"):
        Run(accelerator).load(folder)


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[:-7])


def write(text: str):
    return lambda path: path.write_text(text)


STATE = "trainer_state.json"
DAMAGES = [("ema.safetensors", truncate)]
DAMAGES += itertools.product(("model.safetensors", "optimizer.safetensors", STATE), (truncate, Path.unlink))
TEXTS = ["{}}", "[" * 100_000, '{"step": "7"}', '{"step": 7.5}', '{"history": [3]}', '{"stream": {}}']
DAMAGES += [(STATE, write(text)) for text in [*TEXTS, '{"spikes": [null]}']]


@pytest.mark.parametrize("name, harm", DAMAGES)
def test_damaged_or_foreign_checkpoint_is_named(name, harm, folder, accelerator):
    harm(folder / name)
    with pytest.raises(
        UserError, match=rf"^{folder} cannot be read: {name}: .*; delete this checkpoint to resume from an older"
    ):
        Run(accelerator).load(folder)


def test_a_checkpoint_of_another_program_is_not_to_be_deleted(folder, accelerator):
    (folder / STATE).write_text('{"epoch": 1.0}')
    with pytest.raises(UserError, match=f"^{folder} was not written by this version of train.py: .*'epoch'$"):
        Run(accelerator).load(folder)


# ------------------------------------------------------------------------------------------------------- final weights


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
    put_checkpoints(tmp_path, 10, 20, 30, 35)
    options = training_options("--eval_steps=10", f"--output_dir={tmp_path}", *argv)
    state = state_with_bleu({10: 4.0, 20: 5.0, 30: 3.0})
    found = final_weights.final_checkpoints(state, Triggers(options, 100))
    assert [checkpoints.step_of(one) for one in found] == chosen


@pytest.mark.parametrize("step, said", [(40, "early stopping after step 40\n"), (100, "")])
def test_a_run_that_ends_early_says_so(step, said, accelerator, tmp_path, capsys):
    options = training_options(f"--output_dir={tmp_path}")
    weights = Weights(small_model(), accelerator, compile=False, ema_decay=None)
    final = final_weights.final_model(weights, TrainerState(step=step), Triggers(options, 100))
    assert final is weights.full and capsys.readouterr().out == said


def test_a_run_ends_with_the_mean_of_its_checkpoints(accelerator, byte_tokenizer, tmp_path, capsys):
    run = Run(accelerator, with_ema=False)
    saved = [load_file(run.train(10).save(tmp_path, byte_tokenizer) / "model.safetensors") for _ in range(2)]
    options = training_options(f"--output_dir={tmp_path}", "--save_steps=10", "--average_checkpoints=2")
    final = final_weights.final_model(run.weights, run.state, Triggers(options, 20)).state_dict()
    for name, value in saved[0].items():
        assert_close(final[name], (value + saved[1][name]) / 2)
    assert "using the weights of checkpoint-10, checkpoint-20\n" in capsys.readouterr().out


@pytest.mark.parametrize("use_ema", [False, True])
def test_averaged_checkpoints_are_the_mean(use_ema, accelerator, byte_tokenizer, tmp_path):
    run = Run(accelerator)
    saved = [run.train(1).save(tmp_path, byte_tokenizer) for _ in range(3)]
    file = "ema.safetensors" if use_ema else "model.safetensors"
    each = [load_file(folder / file) for folder in saved]
    for name, value in final_weights.average_checkpoints(saved, use_ema).items():
        mean = sum(weights[name].double() for weights in each) / 3
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
    truncate(saved[1] / file)
    with pytest.raises(UserError, match=f"^{saved[1]} cannot be read"):
        final_weights.average_checkpoints(saved, use_ema)
