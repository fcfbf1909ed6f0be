"""Converts a `torch.nn.Transformer`."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..errors import UserError
from .tensors import Changed, build, rename

TORCH_TRANSFORMER = {  # their names, as regular expressions, and ours
    r"^(encoder|decoder)\.": r"model.\1.",
    r"^source_embeddings\.": "model.encoder.embed_tokens.",
    r"^target_embeddings\.": "model.decoder.embed_tokens.",
    r"\.multihead_attn\.": ".encoder_attn.",
    r"\.linear(1|2)\.": r".fc\1.",
    r"\.norm1\.": ".self_attn_layer_norm.",
    r"^(model\.encoder.*)\.norm2\.": r"\1.final_layer_norm.",
    r"\.norm2\.": ".encoder_attn_layer_norm.",
    r"\.norm3\.": ".final_layer_norm.",
    r"\.norm\.": ".layer_norm.",
}
LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def from_torch_transformer(
    transformer: nn.Transformer,
    source_embeddings: nn.Embedding | torch.Tensor,
    target_embeddings: nn.Embedding | torch.Tensor | None = None,
    lm_head: nn.Linear | None = None,
    **config: Any,
) -> VanillaTransformerForConditionalGeneration:
    """Converts a `torch.nn.Transformer` with its embeddings and its output projection.

    Args:
        transformer: If it is post-norm, it must not have final norms, which torch adds and the paper does not have.
        source_embeddings: Of shape (vocab_size, d_model).
        target_embeddings: None: shared with the source.
        lm_head: None: tied to the target embeddings.
        config: Fields of [`VanillaTransformerConfig`] that the modules do not determine: token ids, `scale_embedding`,
            `position_embedding_type` (sinusoidal or rotary), `max_position_embeddings`, and `activation_function` if
            its name cannot be read from the modules.

    The weights are copies, with the dtype and on the device of `source_embeddings`. The source may be `batch_first` or
    not; in this model the batch always comes first.

    Raises:
        UserError: The transformer is post-norm with final norms, a module is not torch's, or layers differ, as where
            torch gives the copies of a decoder layer ReLU although the layer has an activation module.
        StrictDataclassError: The activation is unknown.
        TypeError: The modules determine a field of `config`.
        RuntimeError: A tensor is missing (after `bias=False`), unknown or of another shape.

    Source: `torch/nn/modules/transformer.py` of torch 2.13.
    """
    has_norm = any(stack.norm is not None for stack in (transformer.encoder, transformer.decoder))
    if has_norm and not transformer.encoder.layers[0].norm_first:
        raise UserError(
            "This post-norm transformer normalizes twice at the end of a stack: in the last layer, and in the stack's "
            "`norm`, which this model lacks. Set `transformer.encoder.norm = transformer.decoder.norm = None` "
            "and train it again."
        )
    for name, module in transformer.named_modules():
        if not (type(module).__module__.startswith("torch.nn.") or name.endswith(".activation")):
            raise Changed(transformer, f"`{name or 'the transformer'}` is a {type(module).__name__}")
    target_embeddings = source_embeddings if target_embeddings is None else target_embeddings
    source, target = (getattr(table, "weight", table) for table in (source_embeddings, target_embeddings))
    theirs = transformer.state_dict() | {"source_embeddings.weight": source, "target_embeddings.weight": target}
    head = {"weight": target} if lm_head is None else lm_head.state_dict()
    theirs |= {f"lm_head.{name}": tensor for name, tensor in head.items()}
    if "activation_function" not in config:
        config["activation_function"] = shared_value(transformer, LAYERS, "activation", activation_name)
    config = VanillaTransformerConfig(
        vocab_size=source.shape[0],
        decoder_vocab_size=target.shape[0],
        share_encoder_decoder_embeddings=source is target,
        tie_word_embeddings=lm_head is None or lm_head.weight is target,
        lm_head_bias="lm_head.bias" in theirs,
        **sizes(transformer),
        **config,
    )
    return build(config, rename(theirs, TORCH_TRANSFORMER), source.dtype, source.device)


def sizes(transformer: nn.Transformer) -> dict[str, Any]:
    """The config fields that the layers determine. Raises UserError if layers differ."""
    found = {
        "d_model": transformer.d_model,
        "dropout": shared_value(transformer, LAYERS, "dropout1.p"),
        "attention_dropout": shared_value(transformer, nn.MultiheadAttention, "dropout"),
        "activation_dropout": shared_value(transformer, LAYERS, "dropout.p"),
        "norm_first": shared_value(transformer, LAYERS, "norm_first"),
        "layer_norm_eps": shared_value(transformer, nn.LayerNorm, "eps"),
    }
    for side, stack in [("encoder", transformer.encoder), ("decoder", transformer.decoder)]:
        found[f"{side}_layers"] = len(stack.layers)
        found[f"{side}_attention_heads"] = shared_value(stack, nn.MultiheadAttention, "num_heads")
        found[f"{side}_ffn_dim"] = stack.layers[0].linear1.out_features
    return found


def shared_value(part: nn.Module, kind: type | tuple[type, ...], attribute: str, read: Callable | None = None) -> Any:
    """The value of an attribute that is equal in all modules of a kind, after `read`; UserError if it differs."""
    values = [attrgetter(attribute)(module) for module in part.modules() if isinstance(module, kind)]
    values = list(dict.fromkeys(map(read, values) if read else values))
    if len(values) > 1:
        raise UserError(f"The parts of the transformer differ in {attribute}: {', '.join(map(str, values))}.")
    return values[0]


def activation_name(activation: nn.Module | Callable) -> str:
    """The name of an activation in transformers' `ACT2FN`, for those that both libraries have."""
    if getattr(activation, "approximate", "none") == "tanh":
        return "gelu_pytorch_tanh"
    return getattr(activation, "__name__", type(activation).__name__).lower()
