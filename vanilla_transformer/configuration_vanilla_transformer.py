# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The configuration of the encoder-decoder Transformer. This file travels with every saved model."""

import math
from dataclasses import fields
from difflib import get_close_matches
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PretrainedConfig
from transformers.activations import ACT2FN

# No `from __future__ import annotations` here: the validator skips annotations that are strings.

# Keys that transformers itself writes into, or passes through, a config without declaring them as fields.
TRANSFORMERS_KEYS = {
    "attn_implementation",
    "auto_map",
    "custom_pipelines",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "peft_config",
    "per_layer_config",
    "quantization_config",
    "torch_dtype",
}


@strict
class VanillaTransformerConfig(PretrainedConfig):
    """Sizes and switches of a [`VanillaTransformerModel`]. The defaults are the paper's base model (Table 3).

    A wrong value, a combination that makes no model and a misspelt field are all refused here, when the config is
    made, with a sentence that names the field, its value and what is allowed.

    Args:
        vocab_size: Number of token types that the encoder reads.
        decoder_vocab_size: Number of token types that the decoder reads and writes. None: the same as `vocab_size`.
        d_model: Width of the residual stream (section 3.1).
        encoder_layers: Number of encoder layers, N in the paper.
        decoder_layers: Number of decoder layers, N in the paper.
        encoder_attention_heads: Attention heads of an encoder layer, h in section 3.2.2; must divide `d_model`.
            None: 8, or the largest part of 8 that divides `d_model`.
        decoder_attention_heads: Attention heads of a decoder layer, in its self- and its cross-attention; likewise.
        encoder_ffn_dim: Inner width of the encoder's feed-forward networks, d_ff in section 3.3.
        decoder_ffn_dim: Inner width of the decoder's feed-forward networks.
        dropout: Dropout of every sublayer's output and of the embeddings, P_drop in section 5.4.
        attention_dropout: Dropout of the attention weights (not in the paper's text).
        activation_dropout: Dropout inside the feed-forward networks (not in the paper's text).
        activation_function: Non-linearity of the feed-forward networks, any name in transformers' `ACT2FN`.
        norm_first: False: normalise after the residual sum, as the paper does (post-norm). True: normalise the input
            of each sublayer and once more after the last layer (pre-norm, as in `torch.nn.Transformer`).
        position_embedding_type: `sinusoidal` (section 3.5), `learned` (Table 3, row E) or `rotary` (RoFormer).
        max_position_embeddings: Rows of a learned table, a hard limit; the other two extend to any length.
        scale_embedding: Multiply the embeddings by sqrt(d_model) (section 3.4).
        share_encoder_decoder_embeddings: One embedding matrix for source and target (section 3.4).
        tie_word_embeddings: The output projection is the target embedding matrix (section 3.4).
        lm_head_bias: Add a bias to the logits. The paper has none; checkpoints trained with Marian do.
        layer_norm_eps: Added to the variance in layer normalisation.
        use_cache: Keep keys and values of past positions while generating.
        pad_token_id: The padding token; masked in the encoder and in cross-attention.
        bos_token_id: The beginning of a sentence.
        eos_token_id: The end of a sentence.
        decoder_start_token_id: What the decoder reads first.
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    # The parallel plans stand on the encoder and decoder classes, whose layers they name.
    base_model_fsdp_plan = {}

    vocab_size: int = 37000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int | None = None
    decoder_attention_heads: int | None = None
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    activation_function: str = "relu"
    norm_first: bool = False
    position_embedding_type: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    max_position_embeddings: int = 1024
    scale_embedding: bool = True
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    lm_head_bias: bool = False
    layer_norm_eps: float | int = 1e-5
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    def __post_init__(self, **kwargs):
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        self._refuse_unknown(kwargs)
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        if self.encoder_attention_heads is None:
            self.encoder_attention_heads = math.gcd(8, self.d_model)
        if self.decoder_attention_heads is None:
            self.decoder_attention_heads = math.gcd(8, self.d_model)
        # Written in full, since saving a model adds only the entry of its own class.
        kwargs.setdefault(
            "auto_map",
            {
                "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
                "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
                "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
            },
        )
        kwargs.setdefault(
            "custom_pipelines",
            {
                "vanilla-translation": {
                    "impl": "translation_vanilla_transformer.VanillaTranslationPipeline",
                    "pt": ["AutoModelForSeq2SeqLM"],
                }
            },
        )
        super().__post_init__(**kwargs)

    def _refuse_unknown(self, kwargs):
        """Raises ValueError for a key that is no field; transformers would keep it as an attribute and ignore it.

        A config that transformers wrote to a file, which says so by its `transformers_version`, may hold keys that
        other tools or later versions put there, and is taken as it is.
        """
        if self.transformers_version is not None:
            return
        known = sorted(field.name for field in fields(self))
        allowed = TRANSFORMERS_KEYS | set(GenerationConfig().to_dict())
        for key in kwargs:
            if not key.startswith("_") and key not in allowed:
                closest = get_close_matches(key, known, n=1)
                hint = f"did you mean `{closest[0]}`?" if closest else f"the fields are {', '.join(known)}."
                raise ValueError(f"`{key}` is not a field of {type(self).__name__}; {hint}")

    def validate_architecture(self):
        """Raises ValueError, naming field and value, for sizes that make no Transformer."""
        super().validate_architecture()
        sizes = ["vocab_size", "decoder_vocab_size", "d_model", "encoder_layers", "decoder_layers"]
        sizes += ["encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"]
        for name in [*sizes, "max_position_embeddings"]:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        for name in ["dropout", "attention_dropout", "activation_dropout"]:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must lie in [0, 1).")
        if not 0 < self.layer_norm_eps < math.inf:
            raise ValueError(f"`layer_norm_eps` is {self.layer_norm_eps}; it must be positive and finite.")
        if not self.is_encoder_decoder:
            raise ValueError(
                "`is_encoder_decoder` is False; this model has an encoder and a decoder, so it must be True."
            )
        if self.activation_function not in ACT2FN:
            raise ValueError(
                f"`activation_function` is {self.activation_function!r}; it must be one of {', '.join(sorted(ACT2FN))}"
            )
        for side in ["encoder", "decoder"]:
            heads = getattr(self, f"{side}_attention_heads")
            if self.d_model % heads:
                raise ValueError(
                    f"`d_model` is {self.d_model} and `{side}_attention_heads` is {heads}; the heads must divide it."
                )
            if self.position_embedding_type == "rotary" and self.d_model // heads % 2:
                raise ValueError(
                    f"Rotary positions turn pairs of features, so that `d_model / {side}_attention_heads` must be "
                    f"even; {self.d_model} / {heads} is not."
                )
        if self.position_embedding_type == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"`d_model` is {self.d_model}; sinusoidal positions need an even one.")
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            raise ValueError(
                f"`decoder_vocab_size` is {self.decoder_vocab_size} and `vocab_size` is {self.vocab_size}; to share "
                "one embedding matrix they must be equal, else set `share_encoder_decoder_embeddings=False`."
            )

    def validate_token_ids(self):
        """Raises ValueError for a special token outside a vocabulary in which it is read or written."""
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        if not ends:
            raise ValueError("`eos_token_id` is []; it must be None, a token id or a list of some.")
        in_both = min(self.vocab_size, self.decoder_vocab_size)
        limits = [("pad_token_id", self.pad_token_id, in_both), *(("eos_token_id", end, in_both) for end in ends)]
        limits += [
            (name, getattr(self, name), self.decoder_vocab_size) for name in ("bos_token_id", "decoder_start_token_id")
        ]
        for name, value, limit in limits:
            if value is not None and not 0 <= value < limit:
                raise ValueError(f"`{name}` is {value}; it must be None or lie in the vocabulary, 0 to {limit - 1}.")


VanillaTransformerConfig.register_for_auto_class()  # `save_pretrained` puts this file beside the weights

__all__ = ["VanillaTransformerConfig"]
