"""The weights of a run: trained, sharded, averaged, and those that are scored and saved."""

import copy

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from helpers import LABELS, MASK, SOURCE, assert_close, training_options
from torch import distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vanilla_transformer.data.batches import SOFT_TARGETS
from vanilla_transformer.training.optimization import compute_loss
from vanilla_transformer.training.processes import make_accelerator, number_of_shards
from vanilla_transformer.training.weights import Weights


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.9999])
def test_decay_of_the_moving_average_ramps_up(decay, accelerator):
    model = nn.Linear(3, 2)
    averaged = Weights(model, accelerator, compile=False, ema_decay=decay)
    weights = np.random.default_rng(0).standard_normal((40, 2, 3), dtype=np.float32)
    expected = weights[0]
    for n, step in enumerate(weights):
        d = min(decay, (n + 1) / (n + 10))
        expected = d * expected + (1 - d) * step if n else step
        model.weight.data.copy_(torch.from_numpy(step))
        averaged.update_average(updates=n)
        np.testing.assert_allclose(averaged.average.module.weight.detach().numpy(), expected, rtol=0, atol=1e-6)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_without_an_average_the_model_itself_is_scored_and_saved(make_model, accelerator):
    model = make_model()
    weights = Weights(model, accelerator, compile=False, ema_decay=None)
    weights.update_average(updates=0)
    assert weights.to_score() is weights.to_checkpoint() is weights.full is weights.model is model
    assert weights.average is None


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_the_average_is_scored_and_what_is_trained_is_saved(make_model, accelerator, compile, ema_decay, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda model, **options: compiled.append((model, options)))
    model = make_model()
    weights = Weights(model, accelerator, compile, ema_decay)
    first = tensors(model)
    weights.update_average(updates=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    weights.update_average(updates=10)  # of decay 0.5
    shift, trained = 0.5 if ema_decay else 1, tensors(model)
    assert_close(tensors(weights.to_score()), {name: value + shift for name, value in first.items()}, 1e-6)
    assert_close(tensors(weights.to_checkpoint()), trained, 0)
    assert (weights.full is model) == (not compile and not ema_decay)
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    assert compiled == [(layer, {"dynamic": True}) for layer in layers] * compile


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--r_drop_alpha=5", "--teacher=x", "--teacher=x --distillation_temperature=2"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_layers_of_a_side_share_one_graph_for_all_batches(make_model, accelerator, precision, more, monkeypatch):
    torch._dynamo.reset()  # the models of other tests fill its cache
    counter, plain = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda model, **options: plain(model, backend=counter, **options))
    monkeypatch.setattr(accelerator.state, "_mixed_precision", precision)
    model = make_model(dropout=0.1, encoder_layers=3, decoder_layers=3)
    weights = Weights(model, accelerator, compile=True, ema_decay=0.9)
    for number in range(2, 5):
        batch = {"input_ids": torch.randint(3, 30, (number, number + 5)), "labels": torch.randint(3, 30, (number, 11))}
        batch["attention_mask"] = (batch["input_ids"] > 5).long()
        if more.startswith("--teacher"):
            batch |= dict(zip(SOFT_TARGETS, (batch["labels"][..., None], torch.ones(number, 11, 1)), strict=True))
        loss = compute_loss(weights.wrapped.train(), batch, torch.tensor(9.0), training_options(*more.split()))
        accelerator.backward(loss)
    assert counter.frame_count == 2 and loss.isfinite()


@pytest.fixture
def sharded(accelerator, monkeypatch):
    """One process that shards its model, as if it were several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr("vanilla_transformer.training.weights.number_of_shards", lambda _: 2)
    yield accelerator
    dist.destroy_process_group()


def test_the_number_of_tokens_is_not_rounded(make_model, sharded, monkeypatch):
    monkeypatch.setattr(sharded.state, "_mixed_precision", "bf16")
    wrapped = Weights(make_model(), sharded, compile=False, ema_decay=None).wrapped
    batch = {"input_ids": SOURCE, "attention_mask": MASK, "labels": LABELS}
    one, many = (wrapped(**batch, num_items_in_batch=torch.tensor(count)).loss for count in (1.0, 25_025.0))
    torch.testing.assert_close(25_025 * many, one, rtol=1e-6, atol=0)  # bfloat16 has 25,088


def test_sharded_weights_are_exchanged_in_bfloat16_and_their_gradients_in_float32(make_model, sharded, monkeypatch):
    batch = {"input_ids": SOURCE, "attention_mask": MASK, "labels": LABELS}
    model = make_model()
    expected = copy.deepcopy(model)
    loss = expected(**batch).loss
    loss.backward()
    monkeypatch.setattr(sharded.state, "_mixed_precision", "bf16")
    weights, dtypes = Weights(model, sharded, compile=False, ema_decay=None), []
    part = weights.model.model.encoder.layers[0].self_attn
    part.register_forward_hook(lambda part, *_: dtypes.append(next(part.parameters()).dtype))
    found = weights.wrapped(**batch).loss
    found.backward()
    assert dtypes == [torch.bfloat16] and abs(found - loss) < 0.02
    for one, other in zip(weights.model.parameters(), expected.parameters(), strict=True):
        assert one.dtype == one.grad.dtype == torch.float32
        assert (one.grad.full_tensor() - other.grad).norm() < 0.1 * (other.grad.norm() + 0.1)


def test_replicas_exchange_their_gradients_in_place_and_no_buffers(make_model, sharded, monkeypatch):
    monkeypatch.setattr("vanilla_transformer.training.weights.number_of_shards", lambda _: 1)
    accelerator = make_accelerator(training_options())
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.MULTI_CPU)
    wrapped = Weights(make_model(), accelerator, compile=False, ema_decay=None).wrapped
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.gradient_as_bucket_view and not wrapped.broadcast_buffers


def test_a_sharded_model_is_scored_and_saved_whole(make_model, sharded):
    model = make_model()
    first = tensors(model)
    weights = Weights(model, sharded, compile=False, ema_decay=0.5)
    weights.update_average(updates=0)
    for one in (weights.model, weights.average.module):
        assert all(isinstance(parameter, DTensor) for parameter in one.parameters())
    for full in (weights.to_score(), weights.to_checkpoint()):
        assert_close(tensors(full), first, 0)
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    assert all(type(layer).__name__.startswith("FSDP") for layer in [*layers, model])


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_model_is_sharded_if_fsdp_was_launched(is_launched, accelerator, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(is_launched))
    monkeypatch.setattr(type(accelerator), "num_processes", 3)
    assert number_of_shards(accelerator.num_processes) == (3 if is_launched else 1)
