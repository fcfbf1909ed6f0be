"""Shared by all conversions: rename tensors, reorder their features, and copy them into a model.

Conversion is strict: every tensor of the source model is used, every parameter of ours is filled, and shapes agree.
"""

import re
from collections.abc import Callable, Mapping

import torch

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

# Modules that write to the residual stream or normalize it: d_model is the first axis of weight and bias.
# All others read the stream or embed tokens: d_model is the last axis of the weight, and no axis of the bias.
WRITES_STREAM = [
    "out_proj",
    "fc2",
    "self_attn_layer_norm",
    "encoder_attn_layer_norm",
    "final_layer_norm",
    "layer_norm",
]


def rename(theirs: Mapping[str, torch.Tensor], rules: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Tensors of the source model under our names.

    `rules` maps regular expressions, matched in the names, to their replacements. A tensor `in_proj`, which stacks
    queries, keys and values in this order, is split into three.
    """
    ours = {}
    for name, tensor in theirs.items():
        for old, new in rules.items():
            name = re.sub(old, new, name)
        if ".in_proj_" in name:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                ours[name.replace("in_proj_", f"{part}_proj.")] = piece
        else:
            ours[name] = tensor
    return ours


def interleave(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Permutes the residual stream: features 0, d/2, 1, d/2 + 1, ... become 0, 1, 2, 3, ...

    This turns position embeddings with all sines first and then all cosines into the paper's, where they alternate.
    The model computes the same function: embeddings and sublayers write to the stream in the new order, sublayers and
    logits read from it in the new order, and layer normalization is independent of the order.
    """
    return permute(weights, lambda features: features.view(2, -1).T.flatten())


def separate(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The opposite of [`interleave`]: the features with even numbers come first."""
    return permute(weights, lambda features: features.view(-1, 2).T.flatten())


def permute(weights: Mapping[str, torch.Tensor], order: Callable) -> dict[str, torch.Tensor]:
    """Puts the d features of the residual stream into the order that `order` makes of 0 to d - 1."""
    permuted = {}
    for name, tensor in weights.items():
        module, kind = name.split(".")[-2:]
        if module in WRITES_STREAM or kind == "weight":
            axis = 0 if module in WRITES_STREAM else 1
            tensor = tensor.index_select(axis, order(torch.arange(tensor.shape[axis], device=tensor.device)))
        permuted[name] = tensor
    return permuted


def build(
    config: VanillaTransformerConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> VanillaTransformerForConditionalGeneration:
    """A model in evaluation mode with copies of the weights.

    Raises RuntimeError, as `load_state_dict` does, naming each tensor that is missing, unknown or of another shape.
    """
    model = VanillaTransformerForConditionalGeneration._from_config(config, dtype=dtype)
    if config.share_encoder_decoder_embeddings:
        weights = {"model.shared.weight": weights["model.encoder.embed_tokens.weight"], **weights}
    model.load_state_dict(weights)
    return model.to(device).eval()
