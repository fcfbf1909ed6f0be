"""A model in training: steps, its moving average, and going on from a checkpoint. Run: pytest tests/test_learner.py"""

import copy
import json
import shutil
from dataclasses import asdict

import pytest
import torch
from helpers import parts
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.arguments import parse_options
from vanilla_transformer.training.checkpoint import Checkpoint
from vanilla_transformer.training.distributed import (
    Learner,
    MovingAverage,
    check_launch,
    load_weights,
    number_of_shards,
    whole_weights,
)
from vanilla_transformer.training.memory import bytes_of_batch
from vanilla_transformer.training.optimization import RunState, make_optimizer, optimizer_step

AVERAGE = "--ema_decay=0.9"
DROPOUTS = {"dropout": 0.3, "attention_dropout": 0.1}
CONFIGS = {
    "tied": {},
    "separate": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "decoder_vocab_size": 41},
    "learned, bias": {"position_embedding_type": "learned", "lm_head_bias": True, "norm_first": True},
}


def options(*argv):
    return parse_options(["--dataset_name=x", "--weight_decay=0.01", *argv])


class Run:
    """A learner and where it is."""

    def __init__(self, model, accelerator, *argv):
        self.learner = Learner(model, options(*argv), accelerator)
        self.model = self.learner.model
        self.state = RunState()

    def train(self, *steps: int):
        for step in steps:
            assert step == self.state.step + 1
            self.state.log([self.learner.step(parts(2), 0.01 / step, self.state)], 1.5)
        return self

    def save(self, folder, tokenizer):
        self.learner.save(folder, tokenizer, self.state)

    def load(self, folder):
        self.state = self.learner.load(Checkpoint(folder))
        return self

    def everything(self) -> dict[str, torch.Tensor]:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        average = {} if self.learner.average is None else self.learner.average.weights
        tensors |= {f"average.{name}": value for name, value in average.items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, moments in self.learner.optimizer.optimizer.state.items():
            tensors |= {f"optimizer.{names[parameter]}.{key}": value for key, value in moments.items()}
        return {name: value.clone() for name, value in tensors.items()}


def assert_identical(ours: dict, theirs: dict):
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


# ----------------------------------------------------------------------------------------------------------- the steps


def test_a_step_counts_its_batches(make_model, accelerator):
    run = Run(make_model(), accelerator)
    run.state.skipped = [2, 3]
    first = run.learner.step(parts(2), 0.01, run.state)
    assert (first.step, first.position, first.learning_rate, first.sums.shape) == (1, 0, 0.01, (5,))
    assert (run.state.step, run.state.position) == (1, 4)
    second = run.learner.step(parts(2), 0.02, run.state)
    assert (second.step, second.position, second.learning_rate) == (2, 4, 0.02)
    assert run.model.training


def test_a_learner_learns_what_adamw_does(make_model, accelerator):
    """From the first step on, which no other has come before; and its average is that of torch."""
    model = make_model(**DROPOUTS)
    run = Run(copy.deepcopy(model), accelerator, AVERAGE)
    optimizer = make_optimizer(model, run.learner.args)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in [1, 2, 3]:
        optimizer_step(model.train(), optimizer, parts(2), 2 * step - 2, 0.01 / step, run.learner.args, accelerator)
        average.update_parameters(model)
        run.train(step)
        assert_identical(run.model.state_dict(), model.state_dict())
        assert_identical(run.learner.average.whole(), dict(average.module.named_parameters()))


def test_the_same_batches_elsewhere_are_learnt_with_other_dropout(make_model, accelerator):
    model = make_model(**DROPOUTS)
    learnt = []
    for position in [0, 0, 4]:
        run = Run(copy.deepcopy(model), accelerator)
        run.state.position = position
        learnt.append(run.train(1).model.state_dict())
    assert_identical(learnt[0], learnt[1])
    assert not torch.equal(learnt[0]["lm_head.weight"], learnt[2]["lm_head.weight"])


@pytest.mark.parametrize("argv", [[], ["--r_drop_alpha=2"]], ids=["plain", "R-Drop"])
def test_gradient_checkpointing_changes_memory_and_nothing_else(make_model, accelerator, argv):
    model = make_model(**DROPOUTS, encoder_layers=3)
    plain = Run(copy.deepcopy(model), accelerator, *argv).train(1, 2, 3)
    model.activation_checkpointing_enable()
    sparing = Run(model, accelerator, *argv).train(1, 2, 3)
    assert_identical(sparing.everything(), plain.everything())
    bytes_of = {run: bytes_of_batch(run.model, options(*argv), accelerator, 4, 12) for run in (plain, sparing)}
    assert bytes_of[sparing] < 0.6 * bytes_of[plain]


# -------------------------------------------------------------------------------------------------- the moving average


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_moving_average_is_that_of_torch(make_model, config, decay):
    model = make_model(**config)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    ours = MovingAverage(model, decay)
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        theirs.update_parameters(model)
        ours.update(model)
        assert_identical(ours.whole(), dict(theirs.module.named_parameters()))
    name = "model.encoder.layers.0.fc1.weight"
    assert not torch.equal(ours.whole()[name], model.get_parameter(name))


def test_a_loaded_average_goes_on(make_model):
    model, other = make_model(), make_model()
    ours, again = MovingAverage(model, 0.9), MovingAverage(other, 0.9)
    ours.update(model)
    again.load(ours.whole())
    for average in (ours, again):
        average.update(other)
    assert_identical(ours.whole(), again.whole())
    name = "model.shared.weight"
    assert not torch.equal(ours.whole()[name], other.get_parameter(name))


def test_what_is_scored_is_the_average(make_model, accelerator):
    run = Run(make_model(), accelerator, AVERAGE).train(1, 2, 3)
    before = run.everything()
    scored = run.learner.scored()
    assert scored is not run.model
    assert_identical(whole_weights(scored), run.learner.average.whole())
    assert not torch.equal(scored.lm_head.weight, run.model.lm_head.weight)
    assert_identical(run.everything(), before)
    run.train(4)
    assert_identical(whole_weights(run.learner.scored()), run.learner.average.whole())


def test_without_an_average_the_model_itself_is_scored(make_model, accelerator):
    run = Run(make_model(), accelerator).train(1)
    assert run.learner.scored() is run.model and run.learner.average is None


# --------------------------------------------------------------------------------------------------------- a new start


@pytest.mark.parametrize("argv", [[], [AVERAGE], ["--r_drop_alpha=2", AVERAGE]], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_step_after_loading_is_the_step_without_a_stop(
    config, argv, make_model, byte_tokenizer, accelerator, tmp_path
):
    config = {**config, **DROPOUTS}
    run = Run(make_model(**config), accelerator, *argv)
    run.state.skipped = [4, 5]
    run.train(1, 2)
    run.state.log_scores({"eval_bleu": 1.5, "eval_loss": 2.5})
    run.save(tmp_path / "checkpoint-2", byte_tokenizer)
    at_2, state_at_2 = run.everything(), RunState(**json.loads(json.dumps(asdict(run.state))))

    torch.manual_seed(99)
    resumed = Run(make_model(**config), accelerator, *argv).load(tmp_path / "checkpoint-2")
    assert_identical(resumed.everything(), at_2)
    assert resumed.state == state_at_2
    assert any(name.startswith("optimizer.") for name in at_2)
    assert_identical(resumed.train(3, 4).everything(), run.train(3, 4).everything())
    assert resumed.state == run.state
    assert not torch.equal(at_2["model.lm_head.weight"], run.model.lm_head.weight)


def test_a_learner_goes_back_to_a_checkpoint(make_model, byte_tokenizer, accelerator, tmp_path):
    """As after trouble: what was learnt since is gone, also from the optimiser and the average."""
    run = Run(make_model(**DROPOUTS), accelerator, AVERAGE).train(1)
    run.save(tmp_path / "checkpoint-1", byte_tokenizer)
    at_1 = run.everything()
    at_3 = run.train(2, 3).everything()
    with torch.no_grad():
        run.model.lm_head.weight.fill_(torch.nan)
    run.train(4)
    assert_identical(run.load(tmp_path / "checkpoint-1").everything(), at_1)
    assert_identical(run.train(2, 3).everything(), at_3)


@pytest.mark.parametrize("argv", [[], [AVERAGE]], ids=["alone", "average"])
def test_saving_changes_nothing(argv, make_model, byte_tokenizer, accelerator, tmp_path):
    """Neither before the first step, where there are no moments yet, nor after one."""
    model = make_model(**DROPOUTS)
    unsaved = Run(copy.deepcopy(model), accelerator, *argv).train(1, 2, 3)
    saved = Run(model, accelerator, *argv)
    for step in [1, 2, 3]:
        saved.save(tmp_path / f"checkpoint-{step - 1}", byte_tokenizer)
        saved.train(step)
    assert_identical(saved.everything(), unsaved.everything())


def test_a_start_without_an_optimiser_yet(make_model, byte_tokenizer, accelerator, tmp_path):
    """Step 0 is saved, to have something to go back to."""
    run = Run(make_model(**DROPOUTS), accelerator, AVERAGE)
    run.save(tmp_path / "checkpoint-0", byte_tokenizer)
    expected = run.train(1, 2).everything()
    assert_identical(run.load(tmp_path / "checkpoint-0").train(1, 2).everything(), expected)
    resumed = Run(make_model(**DROPOUTS), accelerator, AVERAGE).load(tmp_path / "checkpoint-0")
    assert_identical(resumed.train(1, 2).everything(), expected)


def test_the_scale_of_float16_is_part_of_a_checkpoint(make_model, byte_tokenizer, half, tmp_path):
    def make_run():
        half.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-8, growth_interval=3)
        return Run(make_model(**DROPOUTS), half)

    torch.manual_seed(0)
    run = make_run().train(1, 2, 3, 4)
    scaler = half.scaler.state_dict()
    assert scaler["scale"] < 2**30 and scaler["_growth_tracker"] > 0
    run.save(tmp_path / "checkpoint-4", byte_tokenizer)
    expected = run.train(5, 6, 7).everything(), half.scaler.state_dict()
    assert expected[1] != scaler

    resumed = make_run().load(tmp_path / "checkpoint-4")
    assert half.scaler.state_dict() == scaler
    assert_identical(resumed.train(5, 6, 7).everything(), expected[0])
    assert half.scaler.state_dict() == expected[1]


def test_a_checkpoint_of_float16_is_loaded_without_it(make_model, byte_tokenizer, half, tmp_path):
    Run(make_model(), half).train(1).save(tmp_path / "checkpoint-1", byte_tokenizer)
    half.scaler = None
    assert Run(make_model(), half).load(tmp_path / "checkpoint-1").state.scaler["scale"] == 2.0**32


# ----------------------------------------------------------------------------------------------------------- refusals


def refusal(run: Run, folder) -> str:
    with pytest.raises(UserError, match=rf"^--resume_from_checkpoint {folder} cannot be resumed from: ") as caught:
        run.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def checkpoint(make_model, byte_tokenizer, accelerator, tmp_path):
    Run(make_model(), accelerator, AVERAGE).train(1).save(tmp_path / "checkpoint-1", byte_tokenizer)
    return tmp_path / "checkpoint-1"


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
def test_a_checkpoint_of_another_model_is_refused(config, culprit, checkpoint, make_model, accelerator):
    run = Run(make_model(**config), accelerator, AVERAGE)
    before = run.everything()
    assert culprit in refusal(run, checkpoint)
    assert_identical(run.everything(), before)


def test_dropout_may_change(checkpoint, make_model, accelerator):
    assert Run(make_model(**DROPOUTS), accelerator, AVERAGE).load(checkpoint).state.step == 1


def test_the_optimiser_of_another_model_is_refused(checkpoint, make_model, byte_tokenizer, accelerator, tmp_path):
    other = Run(make_model(encoder_ffn_dim=28), accelerator).train(1)
    other.save(tmp_path / "other", byte_tokenizer)
    shutil.copy(tmp_path / "other" / "optimizer.safetensors", checkpoint)
    assert "the optimiser's state of 'model.encoder.layers.0.fc1.weight' is missing or of another shape" in refusal(
        Run(make_model(), accelerator, AVERAGE), checkpoint
    )


def test_an_average_that_was_not_kept_is_missed(make_model, byte_tokenizer, accelerator, tmp_path):
    Run(make_model(), accelerator).train(1).save(tmp_path / "checkpoint-1", byte_tokenizer)
    message = refusal(Run(make_model(), accelerator, AVERAGE), tmp_path / "checkpoint-1")
    assert "it was written without --ema_decay; leave that out" in message


def test_an_average_may_be_given_up(checkpoint, make_model, accelerator):
    assert Run(make_model(), accelerator).load(checkpoint).state.step == 1


def test_weights_that_are_not_finite_are_not_saved(make_model, byte_tokenizer, accelerator, tmp_path):
    run = Run(make_model(), accelerator).train(1)
    with torch.no_grad():
        run.model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        run.save(tmp_path / "checkpoint-1", byte_tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, culprit",
    [
        (lambda weights: weights.pop("model.shared.weight"), "'model.shared.weight' is missing"),
        (lambda weights: weights.update(extra=torch.zeros(2)), "'extra' is no parameter of this model"),
        (
            lambda weights: weights.update({"model.shared.weight": torch.zeros(37, 15)}),
            r"'model.shared.weight' has shape \[37, 15\], not \[37, 16\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change, culprit, make_model):
    model = make_model()
    weights = whole_weights(make_model())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    change(weights)
    with pytest.raises(ValueError, match=culprit):
        load_weights(model, weights)
    assert torch.equal(model.model.encoder.layers[1].fc2.weight, before["model.encoder.layers.1.fc2.weight"])


@pytest.mark.parametrize(
    "environment, shards",
    [
        ({}, 1),
        ({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "1"}, 1),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, 1),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, None),
        ({"ACCELERATE_USE_FSDP": "true"}, None),
    ],
)
def test_only_the_second_version_of_fsdp(environment, shards, accelerator, monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if shards is None:
        with pytest.raises(UserError, match="fsdp_version: 2"):
            check_launch()
    else:
        check_launch()
        assert number_of_shards(accelerator) == shards
