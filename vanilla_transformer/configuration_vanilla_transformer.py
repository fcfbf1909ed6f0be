# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The configuration of the encoder-decoder Transformer. This file travels with every saved model."""

import math
import sys
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Literal

from huggingface_hub.dataclasses import strict, validated_field
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

# No `from __future__ import annotations` here: the validator ignores annotations that are strings.

# What the Auto classes load from a saved directory. `save_pretrained` alone would list only the class that it saves.
AUTO_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
    "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
    "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
}
PIPELINE = {"impl": "translation_vanilla_transformer.VanillaTranslationPipeline", "pt": ["AutoModelForSeq2SeqLM"]}


def checked(is_allowed: Callable, allowed: str) -> Callable:
    """Returns a factory: `checked(...)(default)` is a config field whose value must be allowed or None."""

    def check(value):
        if value is not None and not is_allowed(value):
            raise ValueError(f"it is {value!r}; it must be {allowed}.")

    return lambda default: validated_field(check, default=default)


# Up to this size, torch can count the bytes of any matrix.
size = checked(lambda value: 1 <= value <= 2**28, f"at least 1 and at most {2**28:,}")
layers = checked(lambda value: 1 <= value <= 1000, "at least 1 and at most 1,000")  # each takes time, at any width
probability = checked(lambda value: 0 <= value < 1, "in [0, 1)")
epsilon = checked(lambda value: 0 < value < math.inf, "positive and finite")
activation = checked(lambda value: value in ACT2FN, f"one of {', '.join(sorted(ACT2FN))}")


@strict
class VanillaTransformerConfig(PretrainedConfig):
    """Sizes and switches of a [`VanillaTransformerModel`]. The defaults are the paper's base model (Table 3).

    Raises ValueError for a wrong value, for sizes that do not fit together and for a misspelled field, naming the
    field, its value and what is allowed.

    Args:
        vocab_size: Vocabulary size of the source.
        decoder_vocab_size: Vocabulary size of the target. None: the same as `vocab_size`.
        d_model: Width of the residual stream (section 3.1).
        encoder_layers: Number of encoder layers, N in the paper.
        decoder_layers: Number of decoder layers, N in the paper.
        encoder_attention_heads: Attention heads of an encoder layer, h in section 3.2.2; must divide `d_model`
            (default: the greatest common divisor of 8 and `d_model`).
        decoder_attention_heads: Attention heads of a decoder layer, for self- and cross-attention (default: likewise).
        encoder_ffn_dim: Inner width of the encoder's feed-forward networks, d_ff in section 3.3.
        decoder_ffn_dim: Inner width of the decoder's feed-forward networks.
        dropout: Dropout of every sublayer's output and of the embeddings, P_drop in section 5.4.
        attention_dropout: Dropout of the attention weights (not in the paper's text).
        activation_dropout: Dropout inside the feed-forward networks (not in the paper's text).
        activation_function: Activation of the feed-forward networks, any name in transformers' `ACT2FN`.
        norm_first: False: normalize after the residual sum, as in the paper (post-norm). True: normalize the input of
            each sublayer and the output of the last layer (pre-norm, as in `torch.nn.Transformer`).
        position_embedding_type: How positions are told: `sinusoidal` (section 3.5), `learned` (Table 3, row E),
            `rotary` (RoFormer), `marian` (sinusoids with Marian's frequencies, 10000^(-2i/(d-2))).
        max_position_embeddings: Rows of the position table; a limit only if positions are learned.
        scale_embedding: Multiply the embeddings by sqrt(d_model) (section 3.4).
        share_encoder_decoder_embeddings: One embedding matrix for source and target (section 3.4).
        tie_word_embeddings: The output projection is the target embedding matrix (section 3.4).
        lm_head_bias: Add a bias to the logits, as in Marian; the paper has none.
        layer_norm_eps: Added to the variance in layer normalization.
        use_cache: Keep keys and values of past positions while generating.
        pad_token_id: The padding token; masked in the encoder and in cross-attention.
        bos_token_id: The token that begins a sentence.
        eos_token_id: The token that ends a sentence.
        decoder_start_token_id: The first token that the decoder reads.
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    # Empty, because the plan is in the base class of encoder and decoder.
    base_model_fsdp_plan = {}

    vocab_size: int = size(37000)
    decoder_vocab_size: int | None = size(None)
    d_model: int = size(512)
    encoder_layers: int = layers(6)
    decoder_layers: int = layers(6)
    encoder_attention_heads: int | None = size(None)
    decoder_attention_heads: int | None = size(None)
    encoder_ffn_dim: int = size(2048)
    decoder_ffn_dim: int = size(2048)
    dropout: float | int = probability(0.1)
    attention_dropout: float | int = probability(0.0)
    activation_dropout: float | int = probability(0.0)
    activation_function: str = activation("relu")
    norm_first: bool = False
    position_embedding_type: Literal["sinusoidal", "learned", "rotary", "marian"] = "sinusoidal"
    max_position_embeddings: int = size(1024)
    scale_embedding: bool = True
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    lm_head_bias: bool = False
    layer_norm_eps: float | int = epsilon(1e-5)
    use_cache: bool = True
    is_encoder_decoder: Literal[True] = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    def __post_init__(self, **kwargs):
        for key, value in kwargs.items():
            self.check_key(key, value)
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))  # checked, unlike those that transformers sets
        # Overwritten, since an older version may have saved other names: saving again copies today's files.
        # A subclass with a type of its own names its own.
        if self.model_type == "vanilla_transformer":
            kwargs |= {"auto_map": dict(AUTO_MAP), "custom_pipelines": {"vanilla-translation": dict(PIPELINE)}}
        super().__post_init__(**kwargs)
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            if getattr(self, name) is None:
                setattr(self, name, math.gcd(8, self.d_model))

    @property
    def longest_sequence(self) -> int:
        """The tokens of the longest source or target: learned positions end, others are computed as needed."""
        return self.max_position_embeddings if self.position_embedding_type == "learned" else sys.maxsize

    def check_key(self, key: str, value):
        """Raises ValueError for a misspelled field, and for an attention kernel on the Hub, which is code.

        Transformers would silently keep the misspelled one as an attribute, as it keeps keys of other tools.
        """
        if key.removeprefix("_") == "attn_implementation" and "/" in str(value):
            raise ValueError(
                f"`{key}` is {value!r}; a config may not name a kernel on the Hub, since a kernel is code; "
                "remove the key and, if you trust that code, call `set_attn_implementation` on the model."
            )
        closest = get_close_matches(key, [field.name for field in fields(self)], n=1, cutoff=0.85)
        if closest and self.transformers_version is None:  # a file of a later version may have such a field
            raise ValueError(f"`{key}` is not a field of {type(self).__name__}; did you mean `{closest[0]}`?")

    def validate_architecture(self):
        """Raises ValueError for incompatible sizes."""
        super().validate_architecture()
        for name in ["encoder_attention_heads", "decoder_attention_heads"]:
            heads = getattr(self, name)
            if self.d_model % heads:
                raise ValueError(f"`d_model` is {self.d_model} and `{name}` is {heads}; the heads must divide it.")
            if self.position_embedding_type == "rotary" and self.d_model // heads % 2:
                raise ValueError(f"`d_model / {name}` is {self.d_model} / {heads}; rotary positions need it even.")
        if self.position_embedding_type in ("sinusoidal", "marian") and (self.d_model % 2 or self.d_model < 4):
            raise ValueError(f"`d_model` is {self.d_model}; sinusoidal positions need an even number of at least 4.")
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            raise ValueError(
                f"`decoder_vocab_size` is {self.decoder_vocab_size} and `vocab_size` is {self.vocab_size}; to share "
                "one embedding matrix they must be equal, else set `share_encoder_decoder_embeddings=False`."
            )

    def validate_token_ids(self):
        """Raises ValueError for a special token outside the target's vocabulary or, for pad and end, the source's."""
        target, both = self.decoder_vocab_size, min(self.vocab_size, self.decoder_vocab_size)
        limits = {"pad_token_id": both, "eos_token_id": both, "bos_token_id": target, "decoder_start_token_id": target}
        for name, limit in limits.items():
            ids = getattr(self, name)
            for value in ids if isinstance(ids, list) else [ids]:
                if value is not None and not 0 <= value < limit:
                    raise ValueError(f"`{name}` is {value}; it must be None or a token id from 0 to {limit - 1}.")


VanillaTransformerConfig.register_for_auto_class()  # `save_pretrained` copies this file beside the weights
