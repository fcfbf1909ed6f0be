# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The Transformer of *Attention Is All You Need* (Vaswani et al., 2017). This file travels with every saved model.

    what                                          section of the paper      shapes
    eager_attention_forward                       3.2.1 Equation 1          (B,h,T,k) (B,h,S,k) (B,h,S,k) -> (B,T,h,k)
    VanillaTransformerAttention                   3.2.2 Figure 2            (B,T,d) (B,S,d) -> (B,T,d)
    SinusoidalPositions, LearnedPositions         3.5, Table 3 row E        (B,T) -> (B,T,d)
    VanillaTransformerLayer                       3.1, 3.3, 5.4             residual, feed-forward (B,T,d) -> (B,T,d)
    VanillaTransformerEncoderLayer                3.1 Figure 1 left         (B,S,d) -> (B,S,d)
    VanillaTransformerDecoderLayer                3.1 Figure 1 right        (B,T,d) (B,S,d) -> (B,T,d)
    VanillaTransformerEncoder                     3.1, 3.4                  (B,S) -> (B,S,d)
    VanillaTransformerDecoder                     3.1, 3.4                  (B,T) (B,S,d) -> (B,T,d)
    VanillaTransformerModel                       Figure 1                  (B,S) (B,T) -> (B,T,d)
    VanillaTransformerForConditionalGeneration    Figure 1 with its head    (B,S) (B,T) -> (B,T,V)

Letters: B sentences, S source length, T target length, d model width, h heads, k width of a head (d / h), f inner
width of the feed-forward network, V vocabulary size. In self-attention S is the length attended to.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .loss_vanilla_transformer import is_on_host, label_smoothed_cross_entropy

# The name of the cache in transformers' outputs: `past_key_values` before 5.24, `cache` since.
CACHE = fields(Seq2SeqModelOutput)[1].name
MOST_ROWS = 8192  # of a table of sinusoids: a config may name any `max_position_embeddings`

# ---------------------------------------------------------------------------------------------- attention, section 3.2


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,  # (B,h,T,k)
    key: Tensor,  # (B,h,S,k)
    value: Tensor,  # (B,h,S,k)
    attention_mask: Tensor | None,  # (B,1,T,S), True to attend; or added to the scores: 0 to attend, else -inf
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention, `softmax(Q K^T / sqrt(d_k)) V` (section 3.2.1, Equation 1).

    The reference that every other attention backend is tested against. Returns the output (B,T,h,k) and the attention
    weights (B,h,T,S), whose rows sum to one.
    """
    scores = query @ key.transpose(-2, -1) * scaling  # (B,h,T,S)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    output = nn.functional.dropout(weights, p=dropout, training=module.training) @ value  # (B,h,T,k)
    return output.transpose(1, 2), weights


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotates each pair of features of `x` (B,h,T,k) by its position times its frequency (RoFormer, Equation 34).

    `positions` (B or 1,T,k) are rows of a sinusoidal table: sines on the even, cosines on the odd features.
    """
    sin, cos = positions[:, None, :, 0::2], positions[:, None, :, 1::2]  # (B,1,T,k/2)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class VanillaTransformerAttention(nn.Module):
    """Multi-head attention (section 3.2.2, Figure 2): self-attention, or cross-attention given `key_value_states`."""

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, is_causal: bool, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal  # read by attention backends, which mask the future themselves if given no mask
        self.head_dim = config.d_model // num_heads
        self.scaling = self.head_dim**-0.5
        # The paper's formula has no biases; torch.nn.Transformer, BART and Marian have them, and so does this model.
        self.q_proj = nn.Linear(config.d_model, config.d_model)
        self.k_proj = nn.Linear(config.d_model, config.d_model)
        self.v_proj = nn.Linear(config.d_model, config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B,T,d) -> (B,h,T,k)

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        output_attentions: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output (B,T,d) and, with the eager backend, the attention weights (B,h,T,S)."""
        is_cross = key_value_states is not None
        queries = self.split_heads(self.q_proj(hidden_states))  # (B,h,T,k)
        if is_cross and cache is not None and cache.is_updated.get(self.layer_idx):
            # The source does not change while the target grows, so its keys and values are computed once.
            cached = cache.cross_attention_cache.layers[self.layer_idx]
            keys, values = cached.keys, cached.values
        else:
            attended = key_value_states if is_cross else hidden_states
            keys = self.split_heads(self.k_proj(attended))  # (B,h,S,k)
            values = self.split_heads(self.v_proj(attended))  # (B,h,S,k)
            if rotary is not None:
                queries, keys = rotate(queries, rotary), rotate(keys, rotary)
            if cache is not None:
                part = cache.cross_attention_cache if is_cross else cache.self_attention_cache
                keys, values = part.update(keys, values, self.layer_idx)
                if is_cross:
                    cache.is_updated[self.layer_idx] = True

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            output_attentions=output_attentions,  # SDPA has no weights to return, and warns if they are asked for
        )
        return self.out_proj(output.flatten(-2)), weights  # (B,T,h,k) -> (B,T,d)


# ---------------------------------------------------------------------------------------------- positions, section 3.5


def sinusoidal_positions(position_ids: Tensor, dim: int, divisor: int | None = None) -> Tensor:
    """`PE(pos, 2i) = sin(pos / 10000^(2i/d))`, `PE(pos, 2i+1) = cos(...)` (section 3.5): (...) -> (..., dim).

    The `divisor` of 2i is d = `dim` by default. The result is float32, whatever the dtype of the model.
    """
    # In float64 where the device has it: in float32 the angles of large positions are accurate to four digits only.
    precision = torch.float32 if position_ids.device.type == "mps" else torch.float64
    steps = torch.arange(0, dim, 2, device=position_ids.device, dtype=precision)
    angles = position_ids[..., None].to(precision) * 10000 ** (-steps / (divisor or dim))  # (..., dim/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).float()


class SinusoidalPositions(nn.Module):
    """Sines and cosines of the positions (section 3.5), from a table, or computed if a sequence is longer than it."""

    def __init__(self, num_positions: int, dim: int, divisor: int | None = None):
        super().__init__()
        self.divisor = divisor
        rows = torch.arange(min(num_positions, MOST_ROWS))
        self.register_buffer("table", sinusoidal_positions(rows, dim, divisor), persistent=False)

    def forward(self, position_ids: Tensor, length: int) -> Tensor:
        """(B,T) -> (B,T,dim); all positions are below `length`."""
        if length > self.table.shape[0]:
            return sinusoidal_positions(position_ids, self.table.shape[1], self.divisor)
        return self.table[position_ids]


class LearnedPositions(nn.Embedding):
    """A learned vector for each position (Table 3, row E)."""

    def forward(self, position_ids: Tensor, length: int) -> Tensor:
        """(B,T) -> (B,T,dim); all positions are below `length`. Raises ValueError if the table is shorter."""
        if length > self.num_embeddings:
            raise ValueError(
                f"A sequence of {length} tokens does not fit the learned positions of this model, which end at "
                f"`max_position_embeddings={self.num_embeddings}`; shorten the text or lower `max_length`."
            )
        return super().forward(position_ids)


def count_positions(
    x: Tensor, attention_mask: Tensor | None, past_length: int | Tensor = 0, is_static: bool = False
) -> Tensor:
    """Positions (B or 1,T) of the tokens `x` (B,T,d), after `past_length` tokens in a cache.

    Tokens hidden by the `attention_mask` are not counted, so padding on the left shifts nothing. The mask is (B,L) for
    L cached and new tokens. For a static cache, `generate` turns it into a causal mask (B,1,T,L) before.
    """
    if attention_mask is not None and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -x.shape[1] :]
    if attention_mask is not None and is_static:
        attended = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        return (attended[:, 0].sum(dim=-1) - 1).clamp(min=0)
    return torch.arange(x.shape[1], device=x.device)[None] + past_length


# ------------------------------------------------------------------------------------------- layers, sections 3.1, 3.3


class VanillaTransformerLayer(GradientCheckpointingLayer):
    """Base class of encoder and decoder layers: a feed-forward network, and the residual around each sublayer."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int):
        super().__init__()
        self.norm_first = config.norm_first
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.activation_fn = ACT2FN[config.activation_function]
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def residual(self, x: Tensor, norm: nn.LayerNorm, sublayer: Callable, **inputs) -> Tensor:
        """`LayerNorm(x + Dropout(Sublayer(x)))` (sections 3.1, 5.4), or its pre-norm form: (B,T,d) -> (B,T,d)."""
        output = sublayer(norm(x) if self.norm_first else x, **inputs)
        if isinstance(output, tuple):  # attention also returns its weights
            output = output[0]
        x = x + self.dropout(output)
        return x if self.norm_first else norm(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """`FFN(x) = max(0, x W1 + b1) W2 + b2` (section 3.3, Equation 2), with any activation."""
        return self.fc2(self.activation_dropout(self.activation_fn(self.fc1(x))))  # (B,T,d) -> (B,T,f) -> (B,T,d)


class VanillaTransformerEncoderLayer(VanillaTransformerLayer):
    """Self-attention and feed-forward network (Figure 1, left)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = VanillaTransformerAttention(config, config.encoder_attention_heads, False, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, rotary: Tensor | None, output_attentions: bool | None = None
    ) -> Tensor:
        """(B,S,d) -> (B,S,d). The mask is in the backend's format; `rotary` (B,S,k) is a table for [`rotate`]."""
        inputs = {"attention_mask": attention_mask, "rotary": rotary, "output_attentions": output_attentions}
        x = self.residual(x, self.self_attn_layer_norm, self.self_attn, **inputs)
        return self.residual(x, self.final_layer_norm, self.feed_forward)


class VanillaTransformerDecoderLayer(VanillaTransformerLayer):
    """Causal self-attention, cross-attention to the encoder's output, feed-forward network (Figure 1, right)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, config.decoder_ffn_dim)
        self.self_attn = VanillaTransformerAttention(config, config.decoder_attention_heads, True, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.encoder_attn = VanillaTransformerAttention(config, config.decoder_attention_heads, False, layer_idx)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None,
        rotary: Tensor | None,
        cache: EncoderDecoderCache | None = None,
        output_attentions: bool | None = None,
    ) -> Tensor:
        """(B,T,d) and the encoder's output (B,S,d) -> (B,T,d)."""
        both = {"cache": cache, "output_attentions": output_attentions}
        target = {"attention_mask": attention_mask, "rotary": rotary}
        source = {"key_value_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
        x = self.residual(x, self.self_attn_layer_norm, self.self_attn, **target, **both)
        x = self.residual(x, self.encoder_attn_layer_norm, self.encoder_attn, **source, **both)
        return self.residual(x, self.final_layer_norm, self.feed_forward)


# ------------------------------------------------------------------------------------------- stacks, sections 3.1, 3.4


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """Initial weights, and what transformers needs to know to load, place and run these models."""

    config: VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Initial weights, which the paper does not specify. `init` skips tensors that were loaded already.

        Linear       weight Xavier-uniform, divided by sqrt(N) in a stack of N layers; bias 0
        LayerNorm    weight 1, bias 0
        Embedding    normal with variance 1/d, so that scaled embeddings and logits have a variance near 1

        Each sublayer of a deep stack must add little to the residual stream at first, or a post-norm model learns
        slowly (Zhang et al., 2019, who divide by sqrt(layer number)).
        """
        if isinstance(module, nn.Linear):
            # transformers calls the method of the nearest PreTrainedModel around `module`: in a layer, of its stack.
            depth = len(self.layers) if isinstance(self, VanillaTransformerStack) else 1
            init.xavier_uniform_(module.weight, gain=depth**-0.5)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, SinusoidalPositions):  # `from_pretrained` leaves tensors that are not saved empty
            rows, dim = module.table.shape
            positions = torch.arange(rows, device=module.table.device)
            init.copy_(module.table, sinusoidal_positions(positions, dim, module.divisor))
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs) -> nn.Embedding:
        """As in transformers. With separate embeddings, resizes those of the source."""
        is_shared = self.config.share_encoder_decoder_embeddings
        if not is_shared and self.base_model is not self:  # else the output projection would be resized too
            return self.base_model.resize_token_embeddings(new_num_tokens, *args, **kwargs)
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        if is_shared:
            self.config.decoder_vocab_size = self.config.vocab_size
        return embeddings


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """What encoder and decoder share: embeddings and positions before the layers, in pre-norm a norm after them."""

    _fsdp_plan = {"layers.*": "free_full_weight"}

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int, num_heads: int):
        super().__init__(config)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.is_rotary = config.position_embedding_type == "rotary"
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        if config.position_embedding_type == "learned":
            self.embed_positions = LearnedPositions(config.max_position_embeddings, config.d_model)
        else:
            dim = config.d_model // num_heads if self.is_rotary else config.d_model
            divisor = dim - 2 if config.position_embedding_type == "marian" else None
            self.embed_positions = SinusoidalPositions(config.max_position_embeddings, dim, divisor)
        self.dropout = nn.Dropout(config.dropout)
        # A post-norm layer ends in a norm; the sum that the last pre-norm layer returns still needs one.
        self.layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps) if config.norm_first else nn.Identity()
        self.gradient_checkpointing = False  # `merge_with_config_defaults` reads it: no cache when layers run again

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, prefix: str = "") -> Tensor:
        """(B,T) -> (B,T,d), or `inputs_embeds` as they are. Raises ValueError unless exactly one is given."""
        if input_ids is not None and inputs_embeds is not None:
            raise ValueError(f"Give either `{prefix}input_ids` or `{prefix}inputs_embeds`, not both.")
        if input_ids is None and inputs_embeds is None:
            # BART would read the source as the target, as in its pretraining; here they differ.
            for_a_target = (
                " Or give `labels`; to smooth them, Trainer needs `DataCollatorForSeq2Seq(tokenizer, model=model)`. "
                "For the encoder alone, call `get_encoder()`."
            )
            missing = f"Give `{prefix}input_ids` or `{prefix}inputs_embeds`; neither is given."
            raise ValueError(missing + (for_a_target if prefix else ""))
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def add_positions(self, inputs_embeds: Tensor, position_ids: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """The input of the first layer: scaled embeddings plus positions (sections 3.4, 3.5), all below `length`.

        Rotary positions are not added: their sines and cosines are returned beside the input, for [`rotate`].
        """
        positions = self.embed_positions(position_ids, length).to(inputs_embeds.dtype)  # (B,T,d), (B,T,k) if rotary
        x = inputs_embeds * self.embed_scale
        return (self.dropout(x), positions) if self.is_rotary else (self.dropout(x + positions), None)


@dataclass
class VanillaTransformerEncoderOutput(BaseModelOutput):
    """The encoder's output, and the padding mask (B,S) that the encoder inferred; None if the caller gave one.

    `generate` repeats the tensors of this output for each beam and passes them to every step of the decoder, so that
    cross-attention hides the same padding as the encoder did.
    """

    attention_mask: Tensor | None = None

    def to_tuple(self) -> tuple:
        """Without the mask, as BART's encoder returns it."""
        return tuple(value for name, value in self.items() if name != "attention_mask")


def padding_mask(input_ids: Tensor, config: VanillaTransformerConfig) -> Tensor | None:
    """The mask (B,S), 1 for tokens and 0 for `pad_token_id`; None if the config has no padding token.

    If that is also the end token, the first one after another token is the end (1), the others are padding.
    """
    if config.pad_token_id is None:
        return None
    is_token = input_ids != config.pad_token_id
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.pad_token_id in ends:
        is_token = is_token | nn.functional.pad(is_token[:, :-1], (1, 0))  # shifted right by one
    return is_token.long()


def hides_padding(mask: Tensor | None, length: int) -> bool:
    """Whether a mask hides padding of the source from cross-attention: (B,S) does, (B,1,S,S) is for self-attention."""
    return mask is not None and mask.shape[1:-1] != (1, length)


def source_mask(
    config: VanillaTransformerConfig, x: Tensor, attention_mask: Tensor | None, states: Tensor | None = None
) -> Tensor | None:
    """transformers' mask for self-attention in the encoder, or for cross-attention to its output `states` (B,S,d).

    On a CPU there is none if nothing is padded. On another device, reading that would make the host wait for it.
    """
    options = {"encoder_hidden_states": states}
    if attention_mask is not None and attention_mask.ndim == 2 and not is_on_host(x):
        options["allow_is_bidirectional_skip"] = False
        if config._attn_implementation == "flex_attention":  # it reads a mask, but not a function
            is_token, attention_mask = attention_mask.to(x.device, torch.bool), None
            options["and_mask_function"] = lambda batch, head, query, key: is_token[batch, key]
    return create_bidirectional_mask(config, x, attention_mask, **options)


class VanillaTransformerEncoder(VanillaTransformerStack):
    """N encoder layers over the embedded source (Figure 1, left)."""

    _can_record_outputs = {"hidden_states": VanillaTransformerEncoderLayer, "attentions": VanillaTransformerAttention}

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, config.vocab_size, config.encoder_attention_heads)
        self.layers = nn.ModuleList([VanillaTransformerEncoderLayer(config, i) for i in range(config.encoder_layers)])
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> VanillaTransformerEncoderOutput:
        """`input_ids` (B,S) or `inputs_embeds` (B,S,d) -> `last_hidden_state` (B,S,d).

        `attention_mask` is (B,S), 1 for tokens and 0 for padding, or a custom mask (B,1,S,S). Without one, ids that
        equal `pad_token_id` are padding. Raises ValueError unless exactly one of ids and embeddings is given.
        """
        x = self.embed(input_ids, inputs_embeds)
        found = None
        if input_ids is not None and not hides_padding(attention_mask, x.shape[1]):
            found = padding_mask(input_ids, self.config)
            attention_mask = found if attention_mask is None else attention_mask

        mask = source_mask(self.config, x, attention_mask)
        x, rotary = self.add_positions(x, count_positions(x, attention_mask), x.shape[1])
        for layer in self.layers:
            x = layer(x, mask, rotary, output_attentions)
        return VanillaTransformerEncoderOutput(last_hidden_state=self.layer_norm(x), attention_mask=found)


class VanillaTransformerDecoder(VanillaTransformerStack):
    """N decoder layers over the embedded target, with cross-attention to the encoder's output (Figure 1, right)."""

    _can_record_outputs = {
        "hidden_states": VanillaTransformerDecoderLayer,
        "attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, config.decoder_vocab_size, config.decoder_attention_heads)
        self.layers = nn.ModuleList([VanillaTransformerDecoderLayer(config, i) for i in range(config.decoder_layers)])
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Target `input_ids` (B,T) or `inputs_embeds` (B,T,d) and the encoder's output (B,S,d) -> (B,T,d).

        With a cache, T counts only the new tokens, and a 2D `attention_mask` covers the cached ones too. Raises
        ValueError unless exactly one of ids and embeddings is given, and without the encoder's output.
        `past_key_values` is what transformers before 5.24 calls the `cache`.
        """
        if encoder_hidden_states is None:
            raise ValueError("Give `encoder_hidden_states`, the output of the encoder; the decoder attends to it.")
        x = self.embed(input_ids, inputs_embeds, prefix="decoder_")
        if past_key_values is not None:
            if cache is not None:
                raise ValueError("Give `cache`, or `past_key_values` as transformers before 5.24 calls it, not both.")
            if CACHE == "cache":
                warnings.warn("`past_key_values` is deprecated; pass it as `cache`.", FutureWarning, stacklevel=2)
            cache = past_key_values
        if use_cache and cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        self_cache = None if cache is None else cache.self_attention_cache
        past_length = 0 if self_cache is None else self_cache.get_seq_length()
        length = past_length + x.shape[1]
        if isinstance(length, Tensor):  # static caches count on the device; compiled code can only know the capacity
            length = self_cache.get_max_length() if torch.compiler.is_compiling() else int(length)

        is_static = self_cache is not None and self_cache.is_compileable
        mask = create_causal_mask(self.config, x, attention_mask, self_cache)
        encoder_mask = source_mask(self.config, x, encoder_attention_mask, encoder_hidden_states)
        x, rotary = self.add_positions(x, count_positions(x, attention_mask, past_length, is_static), length)
        for layer in self.layers:
            x = layer(
                x, mask, encoder_hidden_states, encoder_mask, rotary, cache=cache, output_attentions=output_attentions
            )
        return BaseModelOutputWithPastAndCrossAttentions(self.layer_norm(x), cache)


# ----------------------------------------------------------------------------------------------------- model, Figure 1


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder without the output projection (Figure 1)."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
            stacks = ("encoder", "decoder")
            self._tied_weights_keys = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in stacks}
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Ties source and target embeddings even without `tie_word_embeddings`, which only ties the output."""
        if self.config.share_encoder_decoder_embeddings:
            return dict(self._tied_weights_keys)
        return super().get_expanded_tied_weights_keys(all_submodels=all_submodels)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding):
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> Seq2SeqModelOutput:
        """Source ids (B,S) and target ids (B,T) -> `last_hidden_state` (B,T,d).

        `attention_mask` (B,S) hides source positions from the encoder and from cross-attention; without one, padding
        is found by `pad_token_id`. A mask (B,1,S,S) is for the encoder alone. `encoder_outputs` replace the source,
        `inputs_embeds` (B,S,d) its ids. Raises ValueError without a source or a target. `kwargs` are
        `output_attentions`, `output_hidden_states` and `return_dict`; another argument is a TypeError.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        source = encoder_outputs.last_hidden_state
        if not hides_padding(attention_mask, source.shape[1]):
            attention_mask = getattr(encoder_outputs, "attention_mask", None)

        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoder_hidden_states=source,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            past_key_values=past_key_values,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            decoder_outputs.last_hidden_state,
            decoder_outputs.get(CACHE),
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=source,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class VanillaTransformerForConditionalGeneration(VanillaTransformerPreTrainedModel, GenerationMixin):
    """The whole Transformer (Figure 1): encoder, decoder and output projection."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        source = "model.shared" if config.share_encoder_decoder_embeddings else "model.decoder.embed_tokens"
        self._tied_weights_keys = {"lm_head.weight": f"{source}.weight"}
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        num_items_in_batch: int | Tensor | None = None,
        output_logits: bool = True,
        soft_targets: tuple | None = None,
        r_drop_alpha: float = 0.0,
        **kwargs,
    ) -> Seq2SeqLMOutput:
        """Source ids (B,S) and target ids (B,T) -> `logits` (B,T,V), and `loss` if `labels` are given.

        `labels` (B,T) are the target tokens, -100 where nothing is predicted. Without target ids, the decoder reads
        the labels shifted right by one. [`label_smoothed_cross_entropy`] explains `num_items_in_batch`,
        `soft_targets`, `r_drop_alpha` and `label_smoothing`. Without R-Drop, the loss does not need the logits, which
        in training take the memory of 3*B*T*V numbers: with labels and `output_logits=False`, as train.py passes, they
        are None, and those of a large batch are never held in memory as a whole.
        """
        # Not a named parameter: Trainer would look for it in the dataset, as for every name with "label" in it.
        smoothing = kwargs.pop("label_smoothing", 0.0)
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache if labels is None else False,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden, loss, logits = outputs.last_hidden_state, None, None
        if labels is None or output_logits:
            logits = self.lm_head(hidden)  # (B,T,V)
        if labels is not None:
            options = (smoothing, num_items_in_batch, logits, soft_targets, r_drop_alpha)
            loss = label_smoothed_cross_entropy(hidden, self.lm_head, labels, *options)
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The decoder's input (B,T) for predicting `labels` (B,T): the start token, then all but the last label."""
        if self.config.decoder_start_token_id is None:
            raise ValueError("`decoder_start_token_id` of the config is None; set it to the decoder's first token.")
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        # -100 is padding at the end, to which no position with a label attends, so any token may replace it.
        return shifted.masked_fill(shifted == -100, self.config.decoder_start_token_id)


# Not executed: `save_pretrained` copies every file named in an import, so this makes it copy the pipeline.
if TYPE_CHECKING:
    from .translation_vanilla_transformer import VanillaTranslationPipeline  # noqa: F401

VanillaTransformerModel.register_for_auto_class("AutoModel")
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
