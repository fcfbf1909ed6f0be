"""int8 weights by torchao, where that is installed."""

import pytest
import torch
from helpers import EMBEDDINGS, LABELS, MASK, SOURCE, TARGET, assert_close, assert_ties_and_sizes
from torch import nn
from transformers import TorchAoConfig

quantization = pytest.importorskip("torchao.quantization")
Int8Tensor, Int8WeightOnlyConfig = quantization.Int8Tensor, quantization.Int8WeightOnlyConfig
pytestmark = pytest.mark.slow

WIDE = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}


@pytest.mark.parametrize("embeddings", ["shared, tied", "shared, untied", "separate, tied"])
def test_weights_are_quantized_when_loaded_and_saved_again(make_model, tmp_path, embeddings):
    model = make_model(**WIDE, **EMBEDDINGS[embeddings])
    model.save_pretrained(tmp_path / "whole")
    config = TorchAoConfig(Int8WeightOnlyConfig())
    quantized = type(model).from_pretrained(tmp_path / "whole", quantization_config=config)
    for name, module in quantized.named_modules():
        if isinstance(module, nn.Linear):
            assert isinstance(module.weight, Int8Tensor) == (name != "lm_head"), name
    assert_ties_and_sizes(quantized)
    with torch.no_grad():
        expected, logits = (either(SOURCE, MASK, TARGET).logits for either in (model, quantized))
    assert 0 < (logits - expected).norm() < 0.03 * expected.norm()

    quantized.save_pretrained(tmp_path / "quantized")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("quantized", "whole")]
    assert sizes[0] < 0.5 * sizes[1]
    loaded = type(model).from_pretrained(tmp_path / "quantized")
    assert_ties_and_sizes(loaded)
    with torch.no_grad():
        assert torch.equal(loaded(SOURCE, MASK, TARGET).logits, logits)
    translated = quantized.generate(SOURCE, max_new_tokens=8)
    assert torch.equal(loaded.generate(SOURCE, max_new_tokens=8), translated)


def test_gradients_pass_weights_quantized_in_place(make_model):
    """torchao replaces the weight of the output projection and keeps the layer."""
    model = make_model(**WIDE)
    exact = model(SOURCE, MASK, TARGET).logits
    quantization.quantize_(model, Int8WeightOnlyConfig())
    assert isinstance(model.lm_head.weight, Int8Tensor)
    assert 0 < (model(SOURCE, MASK, TARGET).logits - exact).norm() < 0.03 * exact.norm()
    expected = model(SOURCE, MASK, labels=LABELS).loss
    loss = model.train()(SOURCE, MASK, labels=LABELS).loss
    assert_close(loss, expected)
    loss.backward()
    assert model.model.shared.weight.grad.abs().max() > 0
