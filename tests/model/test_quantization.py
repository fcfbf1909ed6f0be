"""int8 weights by torchao, where that is installed."""

import pytest
from helpers import LABELS, MASK, SOURCE, TARGET, assert_close

from vanilla_transformer.conversion import to_native

quantization = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.slow


def test_gradients_pass_weights_quantized_in_place(make_model):
    """torchao replaces the weight of the output projection and keeps the layer."""
    model = make_model(d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128)
    exact = model(SOURCE, MASK, TARGET).logits
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert isinstance(model.lm_head.weight, quantization.Int8Tensor)
    assert 0 < (model(SOURCE, MASK, TARGET).logits - exact).norm() < 0.03 * exact.norm()
    expected = model(SOURCE, MASK, labels=LABELS).loss
    loss = model.train()(SOURCE, MASK, labels=LABELS, output_logits=False).loss
    assert_close(loss, expected)
    with pytest.raises(ValueError, match="The model is quantized; convert the one that it was made from"):
        to_native(model)
    loss.backward()
    assert model.model.shared.weight.grad.abs().max() > 0
