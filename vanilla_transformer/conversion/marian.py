"""Weights of other systems' Transformers in this one: MarianMTModel and torch.nn.Transformer.

python -m vanilla_transformer.conversion.marian DIR_OR_ID NEW_DIRECTORY        # a Marian model, or one of ours in a pickle

Each system has a table, their module -> ours, where `{i}` is the number of a layer. Every tensor of theirs goes to one
place, every tensor of ours comes from one, and shapes agree; otherwise an error names the tensor.
"""

import argparse
import copy
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import nn
from transformers import AutoTokenizer, MarianMTModel, PretrainedConfig, PreTrainedModel

from ..modeling_vanilla_transformer import refuse_pickle, sinusoidal_positions
from ..registration import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

# fmt: off
MARIAN = {
    # theirs                                              ours
    "model.shared":                                        "model.shared",
    "model.encoder.embed_tokens":                          "model.encoder.embed_tokens",
    "model.encoder.layers.{i}.self_attn.q_proj":           "model.encoder.layers.{i}.self_attn.q_proj",
    "model.encoder.layers.{i}.self_attn.k_proj":           "model.encoder.layers.{i}.self_attn.k_proj",
    "model.encoder.layers.{i}.self_attn.v_proj":           "model.encoder.layers.{i}.self_attn.v_proj",
    "model.encoder.layers.{i}.self_attn.out_proj":         "model.encoder.layers.{i}.self_attn.out_proj",
    "model.encoder.layers.{i}.self_attn_layer_norm":       "model.encoder.layers.{i}.self_attn_layer_norm",
    "model.encoder.layers.{i}.fc1":                        "model.encoder.layers.{i}.fc1",
    "model.encoder.layers.{i}.fc2":                        "model.encoder.layers.{i}.fc2",
    "model.encoder.layers.{i}.final_layer_norm":           "model.encoder.layers.{i}.final_layer_norm",
    "model.decoder.embed_tokens":                          "model.decoder.embed_tokens",
    "model.decoder.layers.{i}.self_attn.q_proj":           "model.decoder.layers.{i}.self_attn.q_proj",
    "model.decoder.layers.{i}.self_attn.k_proj":           "model.decoder.layers.{i}.self_attn.k_proj",
    "model.decoder.layers.{i}.self_attn.v_proj":           "model.decoder.layers.{i}.self_attn.v_proj",
    "model.decoder.layers.{i}.self_attn.out_proj":         "model.decoder.layers.{i}.self_attn.out_proj",
    "model.decoder.layers.{i}.self_attn_layer_norm":       "model.decoder.layers.{i}.self_attn_layer_norm",
    "model.decoder.layers.{i}.encoder_attn.q_proj":        "model.decoder.layers.{i}.encoder_attn.q_proj",
    "model.decoder.layers.{i}.encoder_attn.k_proj":        "model.decoder.layers.{i}.encoder_attn.k_proj",
    "model.decoder.layers.{i}.encoder_attn.v_proj":        "model.decoder.layers.{i}.encoder_attn.v_proj",
    "model.decoder.layers.{i}.encoder_attn.out_proj":      "model.decoder.layers.{i}.encoder_attn.out_proj",
    "model.decoder.layers.{i}.encoder_attn_layer_norm":    "model.decoder.layers.{i}.encoder_attn_layer_norm",
    "model.decoder.layers.{i}.fc1":                        "model.decoder.layers.{i}.fc1",
    "model.decoder.layers.{i}.fc2":                        "model.decoder.layers.{i}.fc2",
    "model.decoder.layers.{i}.final_layer_norm":           "model.decoder.layers.{i}.final_layer_norm",
    "lm_head":                                             "lm_head",
    "final_logits":                                        "lm_head",  # their `final_logits_bias`
}

# `{qkv}` stands for q, k and v, which theirs holds in one tensor, in this order from top to bottom.
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

# The axis of a tensor that lies along the residual stream (d_model); None where a tensor has no such axis.
STREAM_AXES = {
    # our module                     weight  bias
    "shared":                        (1,     None),
    "embed_tokens":                  (1,     None),
    "q_proj":                        (1,     None),
    "k_proj":                        (1,     None),
    "v_proj":                        (1,     None),
    "out_proj":                      (0,     0),
    "fc1":                           (1,     None),
    "fc2":                           (0,     0),
    "self_attn_layer_norm":          (0,     0),
    "encoder_attn_layer_norm":       (0,     0),
    "final_layer_norm":              (0,     0),
    "lm_head":                       (1,     None),
}

ACTIVATIONS = {
    # theirs                    ours
    nn.functional.relu:          "relu",
    torch.relu:                  "relu",
    nn.ReLU:                     "relu",
    nn.functional.gelu:          "gelu",
    nn.GELU:                     "gelu",
    nn.functional.silu:          "silu",
    nn.SiLU:                     "silu",
}
# fmt: on


def rename(theirs: Mapping[str, torch.Tensor], table: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Their tensors under our names. Raises ValueError, naming it, for a tensor that the table does not know."""
    ours = {}
    for key, tensor in theirs.items():
        module, _, kind = re.sub(r"_(weight|bias)$", r".\1", key).rpartition(".")
        layer = re.search(r"(?<=\.layers\.)\d+(?=\.)", module)
        name = table.get(re.sub(r"(?<=\.layers\.)\d+(?=\.)", "{i}", module))
        if name is None or kind not in ("weight", "bias"):
            raise ValueError(f"`{key}` of the source model has no place in this one.")
        parts = ["q", "k", "v"] if "{qkv}" in name else [""]
        for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
            ours[f"{name.format(i=layer and layer.group(), qkv=part)}.{kind}"] = piece
    return ours


def interleave(ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Permutes the residual stream of a model under our names: features 0, d/2, 1, d/2 + 1, ... become 0, 1, 2, 3, ...

    This carries positions with the sines in the first half and the cosines in the second to the paper's, where they
    alternate. The function computed stays the same: embeddings and sublayers write the stream in its new order, layer
    normalisation has no order, and sublayers and logits read it in the new one.
    """
    interleaved = {}
    for name, tensor in ours.items():
        module, kind = name.split(".")[-2:]
        axis = STREAM_AXES[module][kind == "bias"]
        if axis is not None:
            order = torch.arange(tensor.shape[axis], device=tensor.device).view(2, -1).T.flatten()
            tensor = tensor.index_select(axis, order)
        interleaved[name] = tensor
    return interleaved


def build(
    config: VanillaTransformerConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> VanillaTransformerForConditionalGeneration:
    """A model with copies of the weights, in evaluation mode.

    Raises ValueError, naming the tensor, if one of its parameters is not among them, or one of them has no place in
    the model or another shape than its place.
    """
    model = VanillaTransformerForConditionalGeneration._from_config(config, dtype=dtype)
    places = model.state_dict()
    for name, tensor in weights.items():
        if name not in places:
            raise ValueError(f"The source model fills `{name}`, which a model of this configuration does not have.")
        if tensor.shape != places[name].shape:
            raise ValueError(f"`{name}` has shape {tuple(places[name].shape)} here and {tuple(tensor.shape)} there.")
        places[name].copy_(tensor.detach())
    filled = {places[name].data_ptr() for name in weights}  # tied tensors are one
    for name, place in places.items():
        if place.data_ptr() not in filled:
            raise ValueError(f"Nothing in the source model fills `{name}`.")
    return model.to(device).eval()


def from_marian(model: MarianMTModel) -> VanillaTransformerForConditionalGeneration:
    """The same model as a `MarianMTModel`: equal logits, loss, gradients and translations.

    What differs between the two architectures, and what becomes of it:

    - Marian's position table holds all sines and then all cosines, the paper's alternates: the residual stream is
      permuted once, see [`interleave`].
    - Marian's `final_logits_bias` becomes the bias of `lm_head`, which training then changes too; if it is zero
      everywhere there is none.
    - Marian's decoder starts with the padding token. That is a token id of the config and needs nothing else. But the
      embedding of that token gets a gradient here, and never in Marian.
    - The generation config goes along unchanged: `bad_words_ids`, `forced_eos_token_id`, `num_beams`, `max_length`.
    - Without an attention mask padding is masked here; Marian then attends to it.
    - Marian's limit of `max_position_embeddings` falls away, and LayerDrop (training only) is left out.

    The weights are copies, in the source's dtype and on its device. Raises ValueError if a tensor of one model has no
    counterpart in the other or another shape, or if the positions are not sinusoidal.

    Source: `transformers/models/marian/modeling_marian.py` of transformers 5.23; Marian is Junczys-Dowmunt et al.,
    2018, arXiv 1804.00344.
    """
    if not isinstance(model, MarianMTModel):
        raise ValueError(f"The model is a {type(model).__name__}; it must be a MarianMTModel.")
    theirs = model.state_dict(keep_vars=True)
    source, target = theirs["model.encoder.embed_tokens.weight"], theirs["model.decoder.embed_tokens.weight"]
    if source is not target:
        theirs.pop("model.shared.weight", None)  # Marian declares it, and reads it only where it is tied to both
    bias = theirs.pop("final_logits_bias")
    if bias.any():
        theirs["final_logits_bias"] = bias.flatten()  # (1,V) -> (V,)
    for side in ["encoder", "decoder"]:
        table = theirs.pop(f"model.{side}.embed_positions.weight").detach().cpu().float()
        expected = sinusoidal_positions(torch.arange(table.shape[0]), table.shape[1])
        expected = torch.cat([expected[:, 0::2], expected[:, 1::2]], dim=1)
        if not torch.allclose(table, expected, rtol=0, atol=1e-2):  # a table of bfloat16 is that coarse
            raise ValueError(f"`model.{side}.embed_positions.weight` is not the sinusoidal table of Marian.")

    their_config = model.config
    same = ["d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"]
    same += ["encoder_ffn_dim", "decoder_ffn_dim", "dropout", "attention_dropout", "activation_dropout"]
    same += ["activation_function", "max_position_embeddings", "scale_embedding", "use_cache"]
    same += ["pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"]
    config = VanillaTransformerConfig(
        **{name: getattr(their_config, name) for name in same},
        vocab_size=source.shape[0],
        decoder_vocab_size=target.shape[0],
        norm_first=False,
        position_embedding_type="sinusoidal",
        share_encoder_decoder_embeddings=source is target,
        tie_word_embeddings=theirs["lm_head.weight"] is target,
        lm_head_bias="final_logits_bias" in theirs,
        layer_norm_eps=model.model.encoder.layers[0].final_layer_norm.eps,
    )
    ours = build(config, interleave(rename(theirs, MARIAN)), model.dtype, model.device)
    ours.generation_config = copy.deepcopy(model.generation_config)
    return ours


def from_torch_transformer(
    transformer: nn.Transformer,
    source_embeddings: nn.Embedding | torch.Tensor,
    target_embeddings: nn.Embedding | torch.Tensor | None = None,
    lm_head: nn.Linear | None = None,
    **config: Any,
) -> VanillaTransformerForConditionalGeneration:
    """The same model as a `torch.nn.Transformer` between its embeddings and its output projection.

    Without `target_embeddings` they are the source's, without `lm_head` it is tied to the target's embeddings. Sizes,
    heads, `norm_first`, activation, dropout and `layer_norm_eps` are read off the modules. What they do not hold is
    given by further fields of [`VanillaTransformerConfig`]: the token ids, `scale_embedding`,
    `position_embedding_type` (but no learned positions, which are held nowhere), `max_position_embeddings`, and
    `activation_function` for one that has no name here.

    What differs between the two architectures, and what becomes of it:

    - `nn.MultiheadAttention` holds the projections of queries, keys and values in one tensor, which is split in three.
    - `nn.Transformer` puts a layer norm after its last layer. The paper's post-norm layers end in one, and there is
      no second one here: a post-norm transformer must have been trained without, a pre-norm one with it.
    - torch's copies of a decoder layer forget an activation given as a module and compute ReLU. The encoder's
      keep it; as the two then differ, that is refused.
    - `batch_first` says how its tensors lie and is no property of the model; here the batch is always first.

    The weights are copies, in the source's dtype and on its device. Raises ValueError for a custom encoder or decoder,
    `bias=False`, a final norm as above, layers that differ, an activation without a name here, a config field that the
    modules decide, and a tensor of one model that has no counterpart in the other or another shape.

    Source: `torch/nn/modules/transformer.py` of torch 2.13.
    """
    norm_first = _check_torch_transformer(transformer)
    encoder, decoder = transformer.encoder, transformer.decoder
    layers = [*encoder.layers, *decoder.layers]
    source, target = _weight(source_embeddings), _weight(source_embeddings)
    if target_embeddings is not None:
        target = _weight(target_embeddings)
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
    for name in read:
        if name in config:
            raise ValueError(f"`{name}` is read off the modules and cannot be given.")
    if config.get("position_embedding_type") == "learned":
        raise ValueError("`position_embedding_type` is 'learned', but a `torch.nn.Transformer` holds no positions.")
    read["activation_function"] = activation or _the_one("activation", map(_activation_name, layers))
    dtype = _the_one("dtype", (tensor.dtype for tensor in theirs.values()))
    return build(VanillaTransformerConfig(**read, **config), rename(theirs, TORCH_TRANSFORMER), dtype, source.device)


def _check_torch_transformer(transformer: nn.Transformer) -> bool:
    """Whether it is pre-norm. Raises ValueError if it is one that has no counterpart here."""
    if not isinstance(transformer, nn.Transformer):
        raise ValueError(f"The transformer is a {type(transformer).__name__}; it must be a torch.nn.Transformer.")
    for side, stack, layer in [
        ("encoder", nn.TransformerEncoder, nn.TransformerEncoderLayer),
        ("decoder", nn.TransformerDecoder, nn.TransformerDecoderLayer),
    ]:
        module = getattr(transformer, side)
        if type(module) is not stack or any(type(x) is not layer for x in module.layers):
            raise ValueError(
                f"The {side} of the transformer is custom; it must be a `torch.nn.{stack.__name__}` whose layers are "
                f"`torch.nn.{layer.__name__}`."
            )
    encoder, decoder = transformer.encoder, transformer.decoder
    layers = [*encoder.layers, *decoder.layers]
    for layer in layers:
        if layer.linear1.bias is None:
            raise ValueError("The transformer was built with `bias=False`; every map here has a bias.")
    norm_first = _the_one("norm_first", (layer.norm_first for layer in layers))
    for side, stack in [("encoder", encoder), ("decoder", decoder)]:
        if norm_first and stack.norm is None:
            raise ValueError(f"The {side} of this pre-norm transformer needs its final norm, `{side}.norm`.")
        if not norm_first and stack.norm is not None:
            raise ValueError(
                f"The {side} of this post-norm transformer normalises twice at its end, in its last layer and in "
                f"`{side}.norm`; the paper does it once. Set `transformer.{side}.norm = None` before training it."
            )
    return norm_first


def _weight(embeddings: nn.Embedding | torch.Tensor) -> torch.Tensor:
    return embeddings.weight if isinstance(embeddings, nn.Embedding) else embeddings


def _the_one(what: str, values: Iterable) -> Any:
    """The value that all have in common. Raises ValueError if they differ."""
    values = list(dict.fromkeys(values))
    if len(values) > 1:
        raise ValueError(f"The parts of the transformer differ in {what}: {', '.join(map(str, values))}.")
    return values[0]


def _activation_name(layer: nn.Module) -> str:
    """The name in transformers' `ACT2FN` of a layer's activation. Raises ValueError if there is none."""
    activation = layer.activation
    if getattr(activation, "approximate", "none") == "tanh":
        return "gelu_pytorch_tanh"
    # A function stands for itself, a module for its class.
    name = ACTIVATIONS.get(type(activation) if isinstance(activation, nn.Module) else activation)
    if name is None:
        raise ValueError(f"The activation {activation} has no name here; give it as `activation_function`.")
    return name


def load_marian(
    name_or_path: str, use_safetensors: bool | None, **options: Any
) -> VanillaTransformerForConditionalGeneration:
    """A Marian model on disk or on the Hub, converted; `options` go to `from_pretrained`.

    Raises OSError where there are no safetensors, unless `use_safetensors` is None, ValueError if weights are missing,
    and what [`from_marian`] and `from_pretrained` do.
    """
    loading = {"use_safetensors": use_safetensors, "weights_only": True, "output_loading_info": True}
    try:
        # Else transformers has a service at the Hub convert a pickle that lies there, and loads what that proposes.
        with patch_environment(DISABLE_SAFETENSORS_CONVERSION=1):
            model, info = MarianMTModel.from_pretrained(name_or_path, **loading, **options)
    except OSError as error:
        if use_safetensors:
            refuse_pickle(name_or_path, error)
        raise
    if info["missing_keys"]:
        missing = f"{len(info['missing_keys'])} missing (such as {min(info['missing_keys'])})"
        raise ValueError(f"{name_or_path} is no whole MarianMTModel: of its weights, {missing}; get it anew.")
    ours = from_marian(model)
    ours.set_attn_implementation(model.config._attn_implementation)
    return ours


def load_foreign(name_or_path: str, use_safetensors: bool | None = None, **options: Any) -> PreTrainedModel:
    """A Marian model, converted, or a vanilla_transformer model; `options` go to `from_pretrained`.

    They come from safetensors, or from a pickle where there are none, unless `use_safetensors`. Raises ValueError for
    a model of another kind, and what [`load_marian`] and `from_pretrained` do.
    """
    kind = PretrainedConfig.get_config_dict(name_or_path)[0].get("model_type")
    if kind == "marian":
        return load_marian(name_or_path, use_safetensors, **options)
    if kind == VanillaTransformerConfig.model_type:
        return VanillaTransformerForConditionalGeneration.from_pretrained(
            name_or_path, use_safetensors=use_safetensors, weights_only=True, **options
        )
    raise ValueError(f"a {kind or 'nameless'} model cannot be converted; a marian or vanilla_transformer one can.")


def main():
    """Converts a Marian model, or one of these that is kept in a pickle, to safetensors with the code to load them."""
    parser = argparse.ArgumentParser(
        prog="python -m vanilla_transformer.conversion.marian",
        description="Writes a Marian model, or a vanilla_transformer model that is kept in a pickle, as safetensors "
        "with the code to load them. A pickle is read by torch.load(weights_only=True), which runs no code in it.",
    )
    parser.add_argument("model", help="a directory or a Hub id")
    parser.add_argument("output_dir", help="a directory that is not there yet")
    options = parser.parse_args()
    output_dir = Path(options.output_dir)
    try:
        output_dir.mkdir(parents=True)
    except FileExistsError:
        sys.exit(f"conversion: {output_dir} is there already, and is not overwritten; choose another.")
    except OSError as error:
        sys.exit(f"conversion: {output_dir} cannot be made: {error.strerror}.")
    try:
        model = load_foreign(options.model)
    except Exception as error:  # a damaged pickle can make torch raise anything
        output_dir.rmdir()
        reason = " ".join(str(error).split())
        if "weights_only" in reason:  # torch advises to load it all the same
            reason = "its pickle holds more than tensors, which may be code, and is not loaded."
        sys.exit(f"conversion: {options.model} cannot be converted: {reason}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    except Exception as error:  # likewise
        tokenizer = None
        reason = " ".join(str(error).split())
        print(f"{options.model} has no tokenizer that can be loaded, and none is written: {reason}", file=sys.stderr)
    for part in [model, tokenizer]:
        if part is not None:
            part.save_pretrained(output_dir)
    print(f"The model is in {output_dir}.")


__all__ = ["from_marian", "from_torch_transformer"]

if __name__ == "__main__":
    main()
