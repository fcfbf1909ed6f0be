"""Shared by all conversions: rename tensors, reorder their features, and copy them into a model.

Conversion is strict: every tensor of the source model is used, every parameter of ours is filled, and shapes agree.
"""

import re
from collections.abc import Mapping

import torch

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


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


def interleave(weights: Mapping[str, torch.Tensor], undo: bool = False) -> dict[str, torch.Tensor]:
    """The weights of the same model with its residual stream permuted; `undo` reverses this.

    Features 0, d/2, 1, d/2 + 1, ... become 0, 1, 2, 3, ... So position embeddings that hold all sines and then all
    cosines become those of the paper, in which sines and cosines alternate. The model computes the same function:
    everything that writes to the stream, reads from it or normalizes it does so in the new order.
    """
    permuted = {}
    for name, tensor in weights.items():
        module, kind = name.split(".")[-2:]
        # Modules that write to the stream or normalize it have its features on the first axis of weight and bias. All
        # others, which read it or embed tokens, have them on the last axis of the weight, and on no axis of the bias.
        writes = module in ("out_proj", "fc2") or module.endswith("layer_norm")
        if writes or kind == "weight":
            axis = 0 if writes else 1
            order = torch.arange(tensor.shape[axis], device=tensor.device)
            tensor = tensor.index_select(axis, order.view((-1, 2) if undo else (2, -1)).T.flatten())
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
