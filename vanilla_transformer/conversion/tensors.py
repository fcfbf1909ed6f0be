"""Shared by all conversions: rename tensors, reorder their features, and copy them into a model.

Conversion is strict: every tensor of the source model is used, every parameter of ours is filled, shapes agree, and a
model whose modules are not those of its config is refused.
"""

import copy
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..errors import UserError
from ..modeling_vanilla_transformer import MOST_ROWS


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


def table_rows(config: VanillaTransformerConfig) -> int:
    """Rows of the position table of a model that cannot compute positions: of sinusoids, at least 1,024."""
    rows = config.max_position_embeddings
    return rows if config.position_embedding_type == "learned" else min(max(1024, rows), MOST_ROWS)


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


def check_unchanged(model: PreTrainedModel):
    """Raises UserError, with a name, unless a model of this package has the weights and modules of its config.

    A conversion knows these weights and what these modules compute, and no others.
    """
    check_unquantized(model)
    plain = on_meta(VanillaTransformerForConditionalGeneration, model)
    found, expected = model.state_dict(), plain.state_dict()
    reshaped = {name for name in found.keys() & expected.keys() if found[name].shape != expected[name].shape}
    for what, names in [
        ("unknown", found.keys() - expected.keys()),
        ("missing", expected.keys() - found.keys()),
        ("of another shape than in its config", reshaped),
    ]:
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise Changed(model, f"weights are {what}: `{min(names)}`{more}")
    check_modules(model, plain)


def check_modules(model: PreTrainedModel, plain: PreTrainedModel):
    """Raises UserError, with a name, for a module of another class than in the `plain` model.

    It does not see hooks, or what was changed within the code of a class.
    """
    expected = dict(plain.named_modules())
    for name, module in model.named_modules():
        ours, theirs = class_name(module), class_name(expected.get(name, module))
        if ours != theirs or "forward" in vars(module):
            own = "" if ours != theirs else " with a `forward` of its own"
            raise Changed(model, f"`{name or 'the model'}` is a {type(module).__name__}{own}")


def check_unquantized(model: PreTrainedModel):
    """Raises UserError for weights as torchao, bitsandbytes and others make them."""
    is_plain = lambda weight: type(weight) in (nn.Parameter, Tensor) and weight.is_floating_point()  # noqa: E731
    if getattr(model.config, "quantization_config", None) or not all(map(is_plain, model.parameters())):
        raise UserError(
            "The model is quantized; convert the one that it was made from, and quantize the result, as "
            "`quantization` does for CTranslate2."
        )


class Changed(UserError):
    """A model computes something else than its config says."""

    def __init__(self, model: nn.Module, what: str):
        super().__init__(f"This {type(model).__name__} was changed, so it cannot be converted: {what}.")


def on_meta(kind: type[PreTrainedModel], model: PreTrainedModel) -> PreTrainedModel:
    """A `kind` with the config of the model, which takes no memory."""
    with torch.device("meta"):
        return kind(copy.deepcopy(model.config))


def class_name(module: nn.Module) -> tuple[str, str]:
    """The names of a module's class and file, which are the same in the package and beside a saved model."""
    kind = type(module)
    return kind.__module__.rpartition(".")[2], kind.__qualname__
