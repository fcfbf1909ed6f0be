"""What tests share: small models whose every parameter is random, biases and norms included, and what they read."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

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
EMBEDDINGS = {
    "shared, tied": {},
    "shared, tied, bias": {"lm_head_bias": True},
    "shared, untied": {"tie_word_embeddings": False},
    "shared, untied, bias": {"tie_word_embeddings": False, "lm_head_bias": True},
    "separate, tied": {"share_encoder_decoder_embeddings": False},
    "separate, untied, bias": {
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "lm_head_bias": True,
        "decoder_vocab_size": 35,
    },
}

SOURCE = torch.tensor([[5, 9, 11, 7, 30, 2], [8, 4, 6, 2, 0, 0], [3, 2, 0, 0, 0, 0]])
MASK = (SOURCE != 0).long()
TARGET = torch.tensor([[1, 10, 6, 22, 5], [1, 3, 14, 9, 4], [1, 12, 9, 31, 7]])
LABELS = torch.tensor([[10, 6, 22, 5, 2], [3, 14, 2, -100, -100], [-100, 9, 2, -100, -100]])

norms = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
positions = pytest.mark.parametrize("position_embedding_type", ["sinusoidal", "learned", "rotary"])


def randomise(model: nn.Module) -> nn.Module:
    """Fills every parameter: a bias of 0 or a norm of 1, as models begin with, hides what is left out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.25)
            if "norm" in name and name.endswith("weight"):
                parameter += 1
    return model


def small_model(**config) -> VanillaTransformerForConditionalGeneration:
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**TINY, **config}))
    return randomise(model).eval()


def lively_model(seed: int, **config) -> VanillaTransformerForConditionalGeneration:
    """Repeats itself little and ends its sentences at different steps, if the seed is one that does so."""
    torch.manual_seed(seed)
    model = small_model(**{"norm_first": True, "tie_word_embeddings": False, "lm_head_bias": True, **config})
    with torch.no_grad():
        model.lm_head.bias[2] += 1.5
    return model


def make_cache(model: nn.Module, kind: str, length: int = 14) -> EncoderDecoderCache:
    """For SOURCE; a static one for so many target tokens."""
    config = model.config
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return EncoderDecoderCache(
        StaticCache(config=config, max_cache_len=length), StaticCache(config=config, max_cache_len=SOURCE.shape[1])
    )


def assert_close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(ours: dict, theirs: dict, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(
            ours[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n} {m}"
        )


def assert_ties_and_sizes(model):
    encoder, decoder = model.model.encoder.embed_tokens, model.model.decoder.embed_tokens
    config, head = model.config, model.lm_head
    assert (encoder.weight is decoder.weight) == config.share_encoder_decoder_embeddings
    assert (head.weight is decoder.weight) == config.tie_word_embeddings
    assert config.vocab_size == encoder.num_embeddings == encoder.weight.shape[0]
    assert config.decoder_vocab_size == decoder.num_embeddings == decoder.weight.shape[0]
    assert config.decoder_vocab_size == head.out_features == head.weight.shape[0]
    assert head.bias is None or len(head.bias) == head.out_features


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def make_model():
    """make_model(**config) -> a small random model in evaluation mode."""
    return small_model
