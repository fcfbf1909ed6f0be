"""What the tests of the model share: small models whose every parameter is random, biases and norms included."""

import pytest
import torch
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

torch.set_num_threads(1)  # models this small run faster so, and tests beside each other do not fight for cores

TINY = {
    "vocab_size": 37,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "dropout": 0.0,
    "max_position_embeddings": 40,
}


def randomise(model: nn.Module) -> nn.Module:
    """Fills every parameter: a bias of 0 or a norm of 1, as models begin with, hides what is left out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.25)
            if "norm" in name and name.endswith("weight"):
                parameter += 1
    return model


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def make_model():
    """make_model(**config) -> a small random model in evaluation mode."""

    def make(**config) -> VanillaTransformerForConditionalGeneration:
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**TINY, **config}))
        return randomise(model).eval()

    return make
