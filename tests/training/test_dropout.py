"""Dropout that draws bytes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer.training.dropout import ByteDropout, use_byte_dropout


@pytest.mark.parametrize(("p", "dropped"), [(0.3, 77), (1e-6, 1), (0.9999, 255)])
def test_byte_dropout_drops_at_the_nearest_rate_and_keeps_the_mean(p, dropped):
    x = torch.ones(1000, 999)
    found = ByteDropout(p)(x)
    assert found.unique().tolist() == pytest.approx([0, 256 / (256 - dropped)])
    assert (found == 0).float().mean() == pytest.approx(dropped / 256, abs=0.002)
    assert torch.equal(ByteDropout(p).eval()(x), x) and torch.equal(ByteDropout(0.0)(x), x)


@pytest.mark.parametrize("elements", [1, 8, 1001])
def test_byte_dropout_draws_a_byte_for_each_element(elements):
    drawn = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "random" in str(function):
                drawn.append(args[0].nbytes)
            return function(*args, **kwargs or {})

    with Recorder():
        ByteDropout(0.5)(torch.ones(elements))
    assert len(drawn) == 1 and elements <= drawn[0] < elements + 8


def test_every_dropout_of_a_model_is_replaced(make_model):
    model = make_model(dropout=0.5, activation_dropout=0.5)
    model.model.decoder.train()
    use_byte_dropout(model)
    assert all(module.training == ("decoder" in name) for name, module in model.named_modules() if "dropout" in name)
    kinds = {type(module) for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert kinds == {ByteDropout} and model.model.encoder.layers[0].activation_dropout.p == 0.5
