"""Schedules, steps, checkpoints: the parts of a run. Run: pytest tests/test_training.py"""

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import randomise
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, get_scheduler

from vanilla_transformer import training
from vanilla_transformer.errors import UserError
from vanilla_transformer.recipe import parse_options
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.training import (
    RunState,
    average_checkpoints,
    delete_old_checkpoints,
    inverse_square_root,
    learning_rate_schedule,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    make_optimizer,
    optimizer_step,
    paper_learning_rate,
    read_weights,
    save_checkpoint,
    seed_step,
)


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a dog"], 260)


def options(*argv):
    return parse_options(["--dataset_name=x", *argv])


# ------------------------------------------------------------------------------------------------------------ schedule


@pytest.mark.parametrize("d_model, warmup_steps", [(512, 4000), (1024, 4000), (64, 1), (128, 200)])
def test_the_learning_rate_is_equation_3(d_model, warmup_steps):
    rate = learning_rate_schedule("inverse_sqrt", paper_learning_rate(d_model, warmup_steps), warmup_steps, 10)
    for step in [1, 2, warmup_steps // 2 + 1, warmup_steps, warmup_steps + 1, 3 * warmup_steps, 100_000]:
        expected = d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)
        assert rate(step) == pytest.approx(expected, rel=1e-12)
    assert rate(warmup_steps) == max(rate(step) for step in range(1, 2 * warmup_steps))


def test_the_schedule_without_warm_up_begins_at_its_peak():
    assert inverse_square_root(1, 0) == 1
    assert learning_rate_schedule("inverse_sqrt", 0.5, 0, 10)(4) == 0.25


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "constant", "constant_with_warmup"])
def test_other_schedules_are_those_of_transformers(name):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.25)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=20)
    ours = learning_rate_schedule(name, 0.25, 4, 20)
    for step in range(1, 21):
        optimizer.step()
        theirs.step()
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
    assert 0 < ours(4) <= 0.25


# -------------------------------------------------------------------------------------------------- optimiser and step


def make_batch(sources: list[list[int]], targets: list[list[int]]) -> dict:
    """Padded tensors of sentences, each of which ends in 2."""

    def pad(rows, value):
        width = max(map(len, rows)) + 1
        return torch.tensor([[*row, 2, *[value] * (width - len(row) - 1)] for row in rows])

    source = pad(sources, 0)
    return {"input_ids": source, "attention_mask": (source != 0).long(), "labels": pad(targets, -100)}


SOURCES = [[5, 9, 11], [8], [3, 4, 5, 6, 7], [30, 31], [12, 12], [20]]
TARGETS = [[10, 6], [3, 14, 9, 4, 33], [12], [7], [9, 9, 9, 8, 8, 8, 11], [5, 5]]


def parts(k: int) -> list[dict]:
    """The six pairs as `k` batches of very different numbers of tokens."""
    cuts = {1: [0, 6], 2: [0, 5, 6], 3: [0, 1, 5, 6]}[k]
    return [make_batch(SOURCES[a:b], TARGETS[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]


OPTIMISERS = {
    "sgd": lambda model, args: torch.optim.SGD(model.parameters(), lr=0.0),
    "adamw": make_optimizer,
}


@pytest.mark.parametrize("clip", ["1e9", "0", "0.5"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_accumulated_steps_equal_one_big_batch(make_model, accelerator, name, clip):
    # The bias of the keys has no gradient but rounding, which Adam would blow up without this epsilon.
    args = options("--adam_epsilon=1e-3", f"--max_grad_norm={clip}", "--weight_decay=0.01")
    results = {}
    for k in [1, 2, 3]:
        torch.manual_seed(0)
        model = make_model().train()
        optimizer = OPTIMISERS[name](model, args)
        returned = [optimizer_step(model, optimizer, parts(k), rate, args, accelerator) for rate in (0.01, 0.02, 0.03)]
        results[k] = model.state_dict(), torch.stack(returned)
    for k in [2, 3]:
        torch.testing.assert_close(results[k][0], results[1][0], rtol=0, atol=1e-6)
        shown = [0, 1, 2, 4]  # the positions that sentences are padded to do depend on the batches
        torch.testing.assert_close(results[k][1][:, shown], results[1][1][:, shown], rtol=1e-5, atol=1e-5)
    before = randomise(make_model())  # something was learnt at all
    assert any(not torch.equal(results[1][0][key], value) for key, value in before.state_dict().items())
    assert (results[1][1][1:, 0] < results[1][1][0, 0]).all()


def test_what_a_step_returns(make_model, accelerator):
    args = options("--label_smoothing_factor=0.2", "--max_grad_norm=0.1")
    model = make_model().train()
    batches = parts(2)
    losses = [model(**batch, label_smoothing=0.2, num_items_in_batch=1).loss for batch in batches]
    sum(losses).backward()
    tokens = sum(len(target) + 1 for target in TARGETS)
    norm = torch.stack([p.grad.norm() / tokens for p in model.parameters()]).norm()
    model.zero_grad()
    returned = optimizer_step(model, make_optimizer(model, args), batches, 0.01, args, accelerator)
    positions = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in batches)
    sources = sum(len(source) + 1 for source in SOURCES)
    expected = torch.tensor([sum(losses).item(), tokens, sources, positions, norm])
    torch.testing.assert_close(returned, expected)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("k", [1, 3])
def test_gradients_are_shared_with_the_last_batch_only(device, k):
    """On a device of its own, where batches are copied to, as on the CPU. What does not sync never learns together."""
    calls = []

    @contextlib.contextmanager
    def no_sync(model):
        calls.append("no_sync")
        yield

    weight = torch.zeros((), device=device, requires_grad=True)

    def model(labels, **kwargs):
        calls.append("batch")
        return SimpleNamespace(loss=weight * 2)

    model.parameters = lambda: [weight]
    accelerator = SimpleNamespace(
        device=torch.device(device),
        num_processes=2,
        reduce=lambda tensor: tensor,
        no_sync=no_sync,
        backward=lambda loss: loss.backward(),
        clip_grad_norm_=lambda parameters, norm: torch.zeros((), device=device),
    )
    batches = [make_batch(SOURCES[i : i + 1], TARGETS[i : i + 1]) for i in range(k)]
    optimizer_step(model, torch.optim.SGD([weight], lr=0.1), batches, 0.1, options(), accelerator)
    assert calls == ["no_sync", "batch"] * (k - 1) + ["batch"]


def test_weight_decay_spares_biases_and_norms(make_model):
    model = make_model(position_embedding_type="learned", lm_head_bias=True, norm_first=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, options("--weight_decay=0.5"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    spared = {name for name in before if name.endswith("bias") or "norm" in name}
    assert 0 < len(spared) < len(before)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.data, before[name] * (1 if name in spared else 1 - 0.1 * 0.5))


def test_adam_is_the_papers_by_default(make_model):
    optimizer = make_optimizer(make_model(), options())
    assert optimizer.defaults["betas"] == (0.9, 0.98) and optimizer.defaults["eps"] == 1e-9
    assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)


def test_dropout_is_a_function_of_seed_step_and_process():
    def mask(*key):
        seed_step(*key)
        return nn.functional.dropout(torch.ones(200)).tolist()

    keys = [(42, 1, 0), (42, 2, 0), (42, 1, 1), (43, 1, 0), (42, 0, 1), (1, 42, 0), (42, 10**6, 511)]
    masks = [mask(*key) for key in keys]
    assert all(a != b for i, a in enumerate(masks) for b in masks[:i])
    assert [mask(*key) for key in reversed(keys)] == masks[::-1]


# --------------------------------------------------------------------------------------------------------------- state


def test_what_a_run_logs_and_reports():
    state = RunState()
    window = [torch.tensor([20.0, 5.0, 10.0, 40.0, 6.0]), torch.tensor([30.0, 15.0, 20.0, 60.0, 8.0])]
    assert state.log(10, window, 2.0, 0.1) == {
        "step": 10,
        "loss": 2.5,
        "learning_rate": 0.1,
        "grad_norm": 7.0,
        "target_tokens_per_second": 10.0,
        "padding_fraction": 0.5,
    }
    state.log(20, [torch.tensor([30.0, 20.0, 30.0, 50.0, 7.0])], 2.0, 0.2)
    assert state.results() == {
        "train_runtime": 4.0,
        "train_steps": 20,
        "train_loss": 2.0,
        "train_target_tokens": 40,
        "train_target_tokens_per_second": 10.0,
        "padding_fraction": pytest.approx(1 - 100 / 150),
    }
    assert [item["step"] for item in state.history] == [10, 20]


def test_the_number_of_tokens_is_exact_over_a_long_window():
    """Sums in float32 would stand still at 2^24."""
    state = RunState()
    state.log(
        3, [torch.tensor([0.0, 2.0**24, 1.0, 2.0**25, 0.0]), *[torch.tensor([0.0, 1.0, 1.0, 2.0, 0.0])] * 2], 1, 0
    )
    assert state.target_tokens == 2**24 + 2


@pytest.mark.parametrize("loss, norm", [("nan", 7.0), ("inf", 7.0), (3.0, "nan"), (3.0, "inf")])
def test_a_loss_or_a_gradient_that_is_no_number_stops_the_run(loss, norm):
    state = RunState(step=10, history=[{"step": 10}])
    steps = [[9.0, 20.0, 30.0, 100.0, 7.0], [float(loss), 20.0, 30.0, 100.0, float(norm)]]
    said = r"The loss is .* the norm of its gradient .* at step 20, with learning rate 1.00e-01; .*--learning_rate"
    with pytest.raises(UserError, match=said):
        state.log(20, [torch.tensor(step) for step in steps], 2.0, 0.1)
    assert state == RunState(step=10, history=[{"step": 10}])


def test_the_best_evaluation_is_kept_in_mind():
    state = RunState()
    for step, bleu in [(1, 0.0), (2, 5.0), (3, 4.0), (4, 5.0)]:
        state.step = step
        state.log_scores({"eval_bleu": bleu, "eval_loss": 1.0, "bleu_signature": "x"})
    assert (state.best_step, state.best_bleu, state.evaluations_without_improvement) == (2, 5.0, 2)
    assert state.history[1] == {"step": 2, "eval_bleu": 5.0, "eval_loss": 1.0}


# --------------------------------------------------------------------------------------------------------- checkpoints

ARGS = options("--weight_decay=0.01", "--ema_decay=0.9")
CONFIGS = {
    "tied": {},
    "separate": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "decoder_vocab_size": 41},
    "learned, bias": {"position_embedding_type": "learned", "lm_head_bias": True, "norm_first": True},
}


class Run:
    """A model in training, with dropout, and all that belongs to it."""

    def __init__(self, model, has_average=True):
        self.model = model.train()
        self.optimizer = make_optimizer(model, ARGS)
        average = get_ema_multi_avg_fn(ARGS.ema_decay)
        self.ema = AveragedModel(model, multi_avg_fn=average) if has_average else None
        self.state = RunState()

    def train(self, accelerator, *steps):
        for step in steps:
            seed_step(ARGS.seed, step, 0)
            window = optimizer_step(self.model, self.optimizer, parts(2), 0.01 / step, ARGS, accelerator)
            if self.ema is not None:
                self.ema.update_parameters(self.model)
            self.state.log(step, [window], 1.5, 0.01 / step)
        return self

    def everything(self) -> dict:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        average = {} if self.ema is None else self.ema.module.state_dict()
        tensors |= {f"ema.{name}": value for name, value in average.items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, moments in self.optimizer.state.items():
            tensors |= {f"optimizer.{names[parameter]}.{key}": value for key, value in moments.items()}
        return {name: value.clone() for name, value in tensors.items()}

    def save(self, folder, tokenizer):
        save_checkpoint(folder, self.model, tokenizer, self.optimizer, self.state, self.ema)

    def load(self, folder):
        self.state = load_checkpoint(folder, self.model, self.optimizer, self.ema)
        return self


def assert_identical(ours: dict, theirs: dict):
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("has_average", [False, True], ids=["alone", "average"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_step_after_loading_is_the_step_without_a_stop(
    config, has_average, make_model, tokenizer, accelerator, tmp_path
):
    config = {**config, "dropout": 0.3, "attention_dropout": 0.1}
    run = Run(make_model(**config), has_average).train(accelerator, 1, 2)
    run.state.log_scores({"eval_bleu": 1.5})
    run.save(tmp_path / "checkpoint-2", tokenizer)
    at_2, state_at_2 = run.everything(), RunState(**json.loads(json.dumps(vars(run.state))))

    torch.manual_seed(99)
    resumed = Run(make_model(**config), has_average).load(tmp_path / "checkpoint-2")
    assert_identical(resumed.everything(), at_2)
    assert resumed.state == state_at_2
    assert any(name.startswith("optimizer.") for name in at_2)
    assert_identical(resumed.train(accelerator, 3, 4).everything(), run.train(accelerator, 3, 4).everything())
    assert resumed.state == run.state
    assert not torch.equal(at_2["model.lm_head.weight"], run.model.lm_head.weight)


def test_a_checkpoint_is_a_model_that_loads(make_model, tokenizer, accelerator, tmp_path):
    run = Run(make_model()).train(accelerator, 1)
    run.save(tmp_path / "checkpoint-1", tokenizer)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "checkpoint-1")
    assert_identical(model.state_dict(), run.model.state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint-1")("a dog") == tokenizer("a dog")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_stop_while_saving_leaves_the_older_checkpoint(make_model, tokenizer, accelerator, tmp_path, monkeypatch):
    run = Run(make_model()).train(accelerator, 1)
    run.save(tmp_path / "checkpoint-1", tokenizer)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-1").iterdir()}

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "save_file", stop)
        for step in [1, 2]:  # over the old one, and beside it
            with pytest.raises(KeyboardInterrupt):
                run.save(tmp_path / f"checkpoint-{step}", tokenizer)
    assert list_checkpoints(tmp_path) == [tmp_path / "checkpoint-1"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-1").iterdir()} == before
    run.save(tmp_path / "checkpoint-2", tokenizer)  # what was left behind does not stand in the way
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == "") == ["checkpoint-1", "checkpoint-2"]


@pytest.fixture
def checkpoint(make_model, tokenizer, accelerator, tmp_path) -> Path:
    Run(make_model()).train(accelerator, 1).save(tmp_path / "checkpoint-1", tokenizer)
    return tmp_path / "checkpoint-1"


def cut(name: str):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def put(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


DAMAGES = {
    "no folder": shutil.rmtree,
    "no state": lambda folder: (folder / "trainer_state.json").unlink(),
    "cut state": cut("trainer_state.json"),
    "state of another program": put("trainer_state.json", '{"epoch": 1.0, "global_step": 500}'),
    "state that is a list": put("trainer_state.json", "[1]"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "cut weights": cut("model.safetensors"),
    "weights that are none": put("model.safetensors", "version https://git-lfs.github.com/spec/v1"),
    "no optimiser": lambda folder: (folder / "optimizer.safetensors").unlink(),
    "cut optimiser": cut("optimizer.safetensors"),
    "no average": lambda folder: (folder / "ema.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named(damage, checkpoint, make_model):
    DAMAGES[damage](checkpoint)
    with pytest.raises(UserError, match=rf"--resume_from_checkpoint {checkpoint} cannot be resumed from") as caught:
        Run(make_model()).load(checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config, culprit",
    [
        ({"d_model": 32}, "its `d_model` is 16, and that of this run 32"),
        ({"vocab_size": 38}, "its `vocab_size` is 37, and that of this run 38"),
        ({"encoder_layers": 3}, "its `encoder_layers` is 2, and that of this run 3"),
        ({"lm_head_bias": True}, "its `lm_head_bias` is False"),
        # Of the same shapes, and yet another function.
        ({"decoder_attention_heads": 8}, "its `decoder_attention_heads` is"),
        ({"activation_function": "gelu"}, "its `activation_function` is relu"),
        ({"position_embedding_type": "rotary"}, "its `position_embedding_type` is sinusoidal"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(config, culprit, checkpoint, make_model):
    with pytest.raises(UserError, match=culprit):
        Run(make_model(**config)).load(checkpoint)


def test_the_optimiser_of_another_model_is_refused(checkpoint, make_model, tokenizer, accelerator, tmp_path):
    Run(make_model(encoder_ffn_dim=28)).train(accelerator, 1).save(tmp_path / "other", tokenizer)
    shutil.copy(tmp_path / "other" / "optimizer.safetensors", checkpoint)
    with pytest.raises(UserError, match="cannot be resumed from"):
        Run(make_model()).load(checkpoint)


@pytest.mark.parametrize(
    "keep, best, left",
    [
        (1, 0, [100]),
        (1, 9, [9, 100]),
        (2, 100, [20, 100]),
        (2, 9, [9, 20, 100]),
        (0, 0, [100]),
        (9, 0, [9, 10, 20, 100]),
    ],
)
def test_old_checkpoints_are_deleted(keep, best, left, tmp_path):
    for name in ["checkpoint-9", "checkpoint-10", "checkpoint-20", "checkpoint-100"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").touch()
    others = ["checkpoint-200.unfinished", "checkpoint-300", "checkpoint-best", "runs"]
    for name in others:
        (tmp_path / name).mkdir()
    delete_old_checkpoints(tmp_path, keep, best)
    assert list_checkpoints(tmp_path) == [tmp_path / f"checkpoint-{step}" for step in left]
    assert all((tmp_path / name).exists() for name in others)


def test_averaged_checkpoints_are_the_mean(make_model, tmp_path):
    models = [make_model() for _ in range(3)]
    folders = [tmp_path / f"checkpoint-{i}" for i in range(3)]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    average = make_model()
    load_weights(average, average_checkpoints(folders))
    states = [model.state_dict() for model in models]
    for name, value in average.state_dict().items():
        torch.testing.assert_close(value, sum(state[name] for state in states) / 3, rtol=1e-6, atol=1e-6)
    alone = average_checkpoints(folders[1:2])
    assert all(torch.equal(value, alone[name]) for name, value in read_weights(folders[1]).items())


@pytest.mark.parametrize("text", ["{}", "[]", '{"step": 1000000}', "null", ""])
def test_a_state_that_is_not_whole_is_refused(text, checkpoint, make_model):
    (checkpoint / "trainer_state.json").write_text(text)
    with pytest.raises(UserError, match="cannot be resumed from"):
        Run(make_model()).load(checkpoint)


def test_a_state_of_another_step_is_refused(checkpoint, make_model):
    state = json.loads((checkpoint / "trainer_state.json").read_text()) | {"step": 7}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="of step 7"):
        Run(make_model()).load(checkpoint)


def test_weights_that_are_not_finite_are_not_saved(make_model, tokenizer, accelerator, tmp_path):
    run = Run(make_model()).train(accelerator, 1)
    with torch.no_grad():
        run.model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        run.save(tmp_path / "checkpoint-1", tokenizer)
    assert list(tmp_path.iterdir()) == []
