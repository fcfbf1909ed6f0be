"""Our models as those of CTranslate2 (https://github.com/OpenNMT/CTranslate2), a C++ engine."""

import copy
import json
import os
from pathlib import Path

import torch
from ctranslate2.converters.transformers import BartLoader
from ctranslate2.specs import TransformerSpec, common_spec
from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES
from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..decoding_vanilla_transformer import end_tokens
from ..errors import UserError
from ..files import CONVERTED, write_text
from ..modeling_vanilla_transformer import sinusoidal_positions
from .tensors import check_unchanged, table_rows

ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "gelu_new": common_spec.Activation.GELUTanh,
    "gelu_pytorch_tanh": common_spec.Activation.GELUTanh,
    "quick_gelu": common_spec.Activation.GELUSigmoid,
    "silu": common_spec.Activation.SWISH,
    "swish": common_spec.Activation.SWISH,
}


def check_quantization(quantization: str | None):
    """Raises UserError if CTranslate2 does not know this type of weights; it becomes the name of a folder, too."""
    if quantization not in (None, *ACCEPTED_MODEL_TYPES):
        known = ", ".join(ACCEPTED_MODEL_TYPES)
        raise UserError(f"`quantization` is {quantization!r}; CTranslate2 knows {known}.")


def to_ctranslate2(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | os.PathLike,
    quantization: str | None = None,
    source: str | list | None = None,
):
    """Writes `model` as a CTranslate2 model, with tokenizer and configs, into the new directory `output_dir`.

    Args:
        quantization: Of the weights: `int8`, `int8_float16`, `int16`, `float16`, `bfloat16`, ...; None: float32.
        source: Identifies the weights, to tell later whether they have changed.

    Raises UserError for an activation function or quantization that CTranslate2 does not have, and, naming weight or
    module, for a model that was changed or quantized, and FileExistsError if the directory exists.
    """
    check_quantization(quantization)
    check_unchanged(model)
    config, spec = model.config, make_spec(model)
    generation_config = copy.deepcopy(model.generation_config)
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = config.eos_token_id
    start = generation_config.decoder_start_token_id
    start = config.decoder_start_token_id if start is None else start
    if start is None or not end_tokens(generation_config):
        raise UserError("CTranslate2 needs a `decoder_start_token_id` and an `eos_token_id`; set them in the config.")
    names = token_names(tokenizer, config.decoder_vocab_size)
    spec.register_source_vocabulary(token_names(tokenizer, config.vocab_size))
    spec.register_target_vocabulary(names)
    spec.config.decoder_start_token = names[start]
    spec.config.eos_token = names[end_tokens(generation_config)[0]]
    spec.config.bos_token = spec.config.decoder_start_token
    spec.config.unk_token = tokenizer.unk_token or names[0]  # only for sources given as text, not by us
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.validate()
    spec.optimize(quantization=quantization)
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True)
    spec.save(str(output_dir))
    tokenizer.save_pretrained(output_dir)
    generation_config.save_pretrained(output_dir)
    ours = {"source": source, "quantization": quantization, "config": config.to_dict()}
    write_text(output_dir / CONVERTED, json.dumps(ours, indent=2))


def token_names(tokenizer: PreTrainedTokenizerBase, size: int) -> list[str]:
    """The unique names of the tokens 0 to `size` - 1; ids beyond the tokenizer have one too."""
    names = tokenizer.convert_ids_to_tokens(list(range(size)))
    return [f"<unused {index}>" if name is None else name for index, name in enumerate(names)]


def make_spec(model: PreTrainedModel) -> TransformerSpec:
    """CTranslate2's description of the model, with its weights in float32."""
    config = model.config
    activation, specs = config.activation_function, []
    if activation not in ACTIVATIONS:
        raise UserError(f"CTranslate2 has no activation function {activation!r}, only {', '.join(ACTIVATIONS)}.")
    for side, kind in [("encoder", TransformerEncoderSpec), ("decoder", TransformerDecoderSpec)]:
        heads = getattr(config, f"{side}_attention_heads")
        options = {"pre_norm": config.norm_first, "activation": ACTIVATIONS[activation]}
        if config.position_embedding_type == "rotary":
            options |= {"rotary_dim": config.d_model // heads, "rotary_interleave": True}
        specs.append(kind(getattr(config, f"{side}_layers"), heads, **options))
    model, loader = copy.deepcopy(model).requires_grad_(False).float().cpu(), Loader()
    loader.set_encoder(specs[0], model.model.encoder)
    loader.set_decoder(specs[1], model.model.decoder)
    loader.set_linear(specs[1].projection, model.lm_head)
    return TransformerSpec(*specs)


class Loader(BartLoader):
    """Extends CTranslate2's loader for BART, whose layers have the same names as ours."""

    def set_common_layers(self, spec, stack):
        """Copies what an encoder or a decoder has outside its layers: embeddings, positions and the last norm."""
        config = stack.config
        embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
        self.set_embeddings(embeddings, stack.embed_tokens)
        spec.scale_embeddings = stack.embed_scale
        if config.position_embedding_type == "learned":
            spec.position_encodings.encodings = stack.embed_positions.weight
        elif config.position_embedding_type in ("sinusoidal", "marian"):
            rows, divisor = torch.arange(table_rows(config)), stack.embed_positions.divisor
            spec.position_encodings.encodings = sinusoidal_positions(rows, config.d_model, divisor)
        elif hasattr(spec, "position_encodings"):
            del spec.position_encodings
        if config.norm_first:
            self.set_layer_norm(spec.layer_norm, stack.layer_norm)
