"""torch.nn.Transformer -> this model."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from .weights import build, rename

# fmt: off
TORCH_TRANSFORMER = {
    # theirs                                              ours
    "shared_embeddings":                                   "model.shared",
    "source_embeddings":                                   "model.encoder.embed_tokens",
    "encoder.layers.{i}.self_attn.in_proj":                "model.encoder.layers.{i}.self_attn.{qkv}_proj",
    "encoder.layers.{i}.self_attn.out_proj":               "model.encoder.layers.{i}.self_attn.out_proj",
    "encoder.layers.{i}.norm1":                            "model.encoder.layers.{i}.self_attn_layer_norm",
    "encoder.layers.{i}.linear1":                          "model.encoder.layers.{i}.fc1",
    "encoder.layers.{i}.linear2":                          "model.encoder.layers.{i}.fc2",
    "encoder.layers.{i}.norm2":                            "model.encoder.layers.{i}.final_layer_norm",
    "encoder.norm":                                        "model.encoder.layer_norm",
    "target_embeddings":                                   "model.decoder.embed_tokens",
    "decoder.layers.{i}.self_attn.in_proj":                "model.decoder.layers.{i}.self_attn.{qkv}_proj",
    "decoder.layers.{i}.self_attn.out_proj":               "model.decoder.layers.{i}.self_attn.out_proj",
    "decoder.layers.{i}.norm1":                            "model.decoder.layers.{i}.self_attn_layer_norm",
    "decoder.layers.{i}.multihead_attn.in_proj":           "model.decoder.layers.{i}.encoder_attn.{qkv}_proj",
    "decoder.layers.{i}.multihead_attn.out_proj":          "model.decoder.layers.{i}.encoder_attn.out_proj",
    "decoder.layers.{i}.norm2":                            "model.decoder.layers.{i}.encoder_attn_layer_norm",
    "decoder.layers.{i}.linear1":                          "model.decoder.layers.{i}.fc1",
    "decoder.layers.{i}.linear2":                          "model.decoder.layers.{i}.fc2",
    "decoder.layers.{i}.norm3":                            "model.decoder.layers.{i}.final_layer_norm",
    "decoder.norm":                                        "model.decoder.layer_norm",
    "lm_head":                                             "lm_head",
}
# fmt: on
ACTIVATIONS = {functional.relu: "relu", torch.relu: "relu", nn.ReLU: "relu"}
ACTIVATIONS |= {functional.gelu: "gelu", nn.GELU: "gelu", functional.silu: "silu", nn.SiLU: "silu"}


def from_torch_transformer(
    transformer: nn.Transformer,
    source_embeddings: nn.Embedding | torch.Tensor,
    target_embeddings: nn.Embedding | torch.Tensor | None = None,
    lm_head: nn.Linear | None = None,
    **config: Any,
) -> VanillaTransformerForConditionalGeneration:
    """Converts a `torch.nn.Transformer` with its embeddings and its output projection.

    Args:
        transformer: Without final norms if it is post-norm: the paper's post-norm layers end in a norm already.
        source_embeddings: Of shape (vocab_size, d_model).
        target_embeddings: None: shared with the source.
        lm_head: None: tied to the target embeddings.
        config: Fields of [`VanillaTransformerConfig`] that the modules do not determine: token ids, `scale_embedding`,
            `position_embedding_type` (sinusoidal or rotary), `max_position_embeddings`, and `activation_function` if
            its name cannot be read from the modules.

    The weights are copies, in the source's dtype and on its device. Whether the source is `batch_first` does not
    matter; here the batch always comes first.

    Raises ValueError for a custom encoder or decoder, `bias=False`, a missing or superfluous final norm, layers that
    differ (torch's copies of a decoder layer replace an activation module by ReLU), an unknown activation, a config
    field that the modules determine, and a tensor without counterpart or of another shape.

    Source: `torch/nn/modules/transformer.py` of torch 2.13.
    """
    norm_first = _check_torch_transformer(transformer)
    encoder, decoder = transformer.encoder, transformer.decoder
    layers = [*encoder.layers, *decoder.layers]
    source = _weight(source_embeddings)
    target = source if target_embeddings is None else _weight(target_embeddings)
    shared = source is target
    theirs = transformer.state_dict()
    if shared:
        theirs["shared_embeddings.weight"] = source
    else:
        theirs |= {"source_embeddings.weight": source, "target_embeddings.weight": target}
    if lm_head is not None:
        theirs |= {f"lm_head.{name}": tensor for name, tensor in lm_head.state_dict().items()}

    activation = config.pop("activation_function", None)
    read = {
        "vocab_size": source.shape[0],
        "decoder_vocab_size": target.shape[0],
        "d_model": encoder.layers[0].self_attn.embed_dim,
        "encoder_layers": len(encoder.layers),
        "decoder_layers": len(decoder.layers),
        "encoder_attention_heads": _the_one("heads", (layer.self_attn.num_heads for layer in encoder.layers)),
        "decoder_attention_heads": _the_one(
            "heads", (attn.num_heads for layer in decoder.layers for attn in (layer.self_attn, layer.multihead_attn))
        ),
        "encoder_ffn_dim": encoder.layers[0].linear1.out_features,
        "decoder_ffn_dim": decoder.layers[0].linear1.out_features,
        "dropout": _the_one("dropout", (layer.dropout1.p for layer in layers)),
        "attention_dropout": _the_one("attention dropout", (layer.self_attn.dropout for layer in layers)),
        "activation_dropout": _the_one("feed-forward dropout", (layer.dropout.p for layer in layers)),
        "norm_first": norm_first,
        "share_encoder_decoder_embeddings": shared,
        "tie_word_embeddings": lm_head is None or lm_head.weight is target,
        "lm_head_bias": "lm_head.bias" in theirs,
        "layer_norm_eps": _the_one(
            "layer_norm_eps", (module.eps for module in transformer.modules() if isinstance(module, nn.LayerNorm))
        ),
    }
    for name in read.keys() & config.keys():
        raise ValueError(f"`{name}` is determined by the modules; do not pass it.")
    if config.get("position_embedding_type") == "learned":
        raise ValueError(
            "`position_embedding_type` is 'learned', but a `torch.nn.Transformer` has no position embeddings."
        )
    read["activation_function"] = activation or _the_one("activation", map(_activation_name, layers))
    dtype = _the_one("dtype", (tensor.dtype for tensor in theirs.values()))
    return build(VanillaTransformerConfig(**read, **config), rename(theirs, TORCH_TRANSFORMER), dtype, source.device)


def _check_torch_transformer(transformer: nn.Transformer) -> bool:
    """Returns whether it is pre-norm. Raises ValueError if it has no counterpart here."""
    if not isinstance(transformer, nn.Transformer):
        raise ValueError(f"The transformer is a {type(transformer).__name__}; it must be a torch.nn.Transformer.")
    encoder, decoder = transformer.encoder, transformer.decoder
    for side, stack, stack_class, layer_class in [
        ("encoder", encoder, nn.TransformerEncoder, nn.TransformerEncoderLayer),
        ("decoder", decoder, nn.TransformerDecoder, nn.TransformerDecoderLayer),
    ]:
        if type(stack) is not stack_class or any(type(layer) is not layer_class for layer in stack.layers):
            raise ValueError(
                f"The {side} of the transformer is custom; it must be a `torch.nn.{stack_class.__name__}` of "
                f"`torch.nn.{layer_class.__name__}`."
            )
    if any(layer.linear1.bias is None for layer in [*encoder.layers, *decoder.layers]):
        raise ValueError("The transformer was built with `bias=False`; every linear layer here has a bias.")
    norm_first = _the_one("norm_first", (layer.norm_first for layer in [*encoder.layers, *decoder.layers]))
    for side, stack in [("encoder", encoder), ("decoder", decoder)]:
        if norm_first and stack.norm is None:
            raise ValueError(f"The {side} of this pre-norm transformer needs its final norm, `{side}.norm`.")
        if not norm_first and stack.norm is not None:
            raise ValueError(
                f"The {side} of this post-norm transformer normalizes twice at its end: in its last layer and in "
                f"`{side}.norm`. Set `transformer.{side}.norm = None` before training it."
            )
    return norm_first


def _weight(embeddings: nn.Embedding | torch.Tensor) -> torch.Tensor:
    return embeddings.weight if isinstance(embeddings, nn.Embedding) else embeddings


def _the_one(what: str, values: Iterable) -> Any:
    """The value that all parts share. Raises ValueError if they differ."""
    values = list(dict.fromkeys(values))
    if len(values) > 1:
        raise ValueError(f"The parts of the transformer differ in {what}: {', '.join(map(str, values))}.")
    return values[0]


def _activation_name(layer: nn.Module) -> str:
    """The name of a layer's activation in transformers' `ACT2FN`."""
    activation = layer.activation
    if getattr(activation, "approximate", "none") == "tanh":
        return "gelu_pytorch_tanh"
    name = ACTIVATIONS.get(type(activation) if isinstance(activation, nn.Module) else activation)
    if name is None:
        raise ValueError(f"The activation {activation} is not known; pass its name as `activation_function`.")
    return name
