# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The Transformer of *Attention Is All You Need* (Vaswani et al., 2017, arXiv 1706.03762), in one file.

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
    chunked_cross_entropy                         5.4                       (B,T,d) (V,d) (B,T) -> () and its gradients
    label_smoothed_cross_entropy                  5.4                       (B,T,d) (B,T) -> ()
    VanillaTransformerForConditionalGeneration    Figure 1 with its head    (B,S) (B,T) -> (B,T,V)

Letters: B sentences, S source length, T target length, d model width, h heads, k width of a head (d / h), f inner
width of the feed-forward network, V token types, N real target tokens. In self-attention S is the length attended to.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .decoding_vanilla_transformer import VanillaTransformerGenerationMixin

if TYPE_CHECKING:  # never run: transformers copies what is imported here beside a saved model, and so it travels
    from .translation_vanilla_transformer import VanillaTranslationPipeline  # noqa: F401

# ---------------------------------------------------------------------------------------------- attention, section 3.2


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,  # (B,h,T,k)
    key: torch.Tensor,  # (B,h,S,k)
    value: torch.Tensor,  # (B,h,S,k)
    attention_mask: torch.Tensor | None,  # (B,1,T,S), added to the scores: 0 to attend, very negative not to; or bool
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
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


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turns each pair of features of `x` (B,h,T,k) by the angle of its position and frequency (RoFormer, Equation 34).

    `positions` (B or 1,T,k) are rows of a sinusoidal table: sines on the even, cosines on the odd features.
    """
    sin, cos = positions[:, None, :, 0::2], positions[:, None, :, 1::2]  # (B,1,T,k/2)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class VanillaTransformerAttention(nn.Module):
    """Multi-head attention (section 3.2.2, Figure 2), to itself or, if given `key_value_states`, to them."""

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, is_causal: bool, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal  # read by the backends: without a mask, look only at the past
        self.head_dim = config.d_model // num_heads
        self.scaling = self.head_dim**-0.5
        # With biases, which the paper's formula leaves out, and torch.nn.Transformer, BART and Marian have.
        self.q_proj = nn.Linear(config.d_model, config.d_model)
        self.k_proj = nn.Linear(config.d_model, config.d_model)
        self.v_proj = nn.Linear(config.d_model, config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B,T,d) -> (B,h,T,k)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output (B,T,d) and, from the eager backend, the weights (B,h,T,S)."""
        is_cross = key_value_states is not None
        queries = self.split_heads(self.q_proj(hidden_states))  # (B,h,T,k)
        if is_cross and past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            cached = past_key_values.cross_attention_cache.layers[self.layer_idx]
            keys, values = cached.keys, cached.values
        else:
            attended = key_value_states if is_cross else hidden_states
            keys = self.split_heads(self.k_proj(attended))  # (B,h,S,k)
            values = self.split_heads(self.v_proj(attended))  # (B,h,S,k)
            if rotary is not None:
                queries, keys = rotate(queries, rotary), rotate(keys, rotary)
            if past_key_values is not None:
                cache = past_key_values.cross_attention_cache if is_cross else past_key_values.self_attention_cache
                keys, values = cache.update(keys, values, self.layer_idx)
                if is_cross:
                    past_key_values.is_updated[self.layer_idx] = True

        # Beams of a sentence look at the same source, which is there once: they stand in a row, like target positions.
        beams, length = queries.shape[0] // keys.shape[0], queries.shape[2]
        if beams > 1:
            queries = queries.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)  # (B,h,beams T,k)
            attention_mask = attention_mask if attention_mask is None else attention_mask[:, :, :1]

        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.config.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, queries, keys, values, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        if beams > 1:
            output = output.unflatten(1, (beams, length)).flatten(0, 1)  # (B beams,T,h,k)
            if weights is not None:
                weights = weights.unflatten(2, (beams, length)).transpose(1, 2).flatten(0, 1)  # (B beams,h,T,S)
        return self.out_proj(output.flatten(-2)), weights  # (B,T,h,k) -> (B,T,d)


# ---------------------------------------------------------------------------------------------- positions, section 3.5


def sinusoidal_positions(position_ids: torch.Tensor, dim: int) -> torch.Tensor:
    """`PE(pos, 2i) = sin(pos / 10000^(2i/d))`, `PE(pos, 2i+1) = cos(...)` (section 3.5): (...) -> (..., dim).

    In float32, whatever the model's dtype.
    """
    # Float64, where there is any: in float32 the angle of a late position is wrong in its fifth digit.
    precision = torch.float32 if position_ids.device.type == "mps" else torch.float64
    steps = torch.arange(0, dim, 2, device=position_ids.device, dtype=precision)
    angles = position_ids[..., None].to(precision) * 10000 ** (-steps / dim)  # (..., dim/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).float()


class SinusoidalPositions(nn.Module):
    """Sines and cosines of every position, from a table as far as it reaches and computed beyond it (section 3.5)."""

    def __init__(self, num_positions: int, dim: int):
        super().__init__()
        self.register_buffer("table", torch.empty(num_positions, dim, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        """Fills the table; called again after loading, which leaves buffers that are not saved empty."""
        rows, dim = self.table.shape
        init.copy_(self.table, sinusoidal_positions(torch.arange(rows, device=self.table.device), dim))

    def forward(self, position_ids: torch.Tensor, length: int) -> torch.Tensor:
        """(B,T) -> (B,T,dim); no position is at or above `length`."""
        if length > self.table.shape[0]:
            return sinusoidal_positions(position_ids, self.table.shape[1])
        return self.table[position_ids]


def count_positions(
    x: torch.Tensor, attention_mask: torch.Tensor | None, past_length: int | torch.Tensor = 0, is_static: bool = False
) -> torch.Tensor:
    """Positions (B or 1,T) of the tokens `x` (B,T,d), after `past_length` others that are in a cache.

    Tokens that a mask hides are not counted, so that padding on the left moves nothing.
    """
    if attention_mask is not None and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -x.shape[1] :]
    if attention_mask is not None and is_static:
        # The causal mask (B,1,T,S) of a static cache, which `generate` makes of the 2D one.
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        return (seen[:, 0].sum(dim=-1) - 1).clamp(min=0)
    return torch.arange(x.shape[1], device=x.device)[None] + past_length


class LearnedPositions(nn.Embedding):
    """A learned vector for each position (Table 3, row E)."""

    def forward(self, position_ids: torch.Tensor, length: int) -> torch.Tensor:
        """(B,T) -> (B,T,dim). Raises ValueError if the table ends before `length`, which no position reaches."""
        if length > self.num_embeddings:
            raise ValueError(
                f"A sequence of {length} tokens does not fit the learned positions of this model, which end at "
                f"`max_position_embeddings={self.num_embeddings}`; shorten the text or lower `max_length`."
            )
        return super().forward(position_ids)


# ------------------------------------------------------------------------------------------- layers, sections 3.1, 3.3


class Dropout(nn.Dropout):
    """`nn.Dropout`, which on a CPU draws a random byte for each element, which is faster than a float.

    There the probability is a multiple of 1/256, `p` rounded and at least one; the scale is the one for it, in the
    precision of the input.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(...) -> (...): in training each element is 0 or scaled up, else `x` itself comes back."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        dropped = min(max(1, round(256 * self.p)), 255)  # of 256 bytes
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device).random_(-(2**63), None)
        random_bytes = words.view(torch.uint8)[: x.numel()].view(x.shape)
        return x * random_bytes.to(x.dtype).ge_(dropped).mul_(256 / (256 - dropped))


class VanillaTransformerLayer(GradientCheckpointingLayer):
    """What encoder and decoder layers share: the residual around each sublayer and the feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int):
        super().__init__()
        self.norm_first = config.norm_first
        self.dropout = Dropout(config.dropout)
        self.activation_dropout = Dropout(config.activation_dropout)
        self.activation_fn = ACT2FN[config.activation_function]
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def residual(self, x: torch.Tensor, norm: nn.LayerNorm, sublayer: Callable) -> torch.Tensor:
        """`LayerNorm(x + Dropout(Sublayer(x)))` (sections 3.1, 5.4), or its pre-norm form: (B,T,d) -> (B,T,d)."""
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """`FFN(x) = max(0, x W1 + b1) W2 + b2` (section 3.3, Equation 2), with any activation."""
        return self.fc2(self.activation_dropout(self.activation_fn(self.fc1(x))))  # (B,T,d) -> (B,T,f) -> (B,T,d)


class VanillaTransformerEncoderLayer(VanillaTransformerLayer):
    """Self-attention and feed-forward (Figure 1, left)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = VanillaTransformerAttention(config, config.encoder_attention_heads, False, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary: torch.Tensor | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """(B,S,d) -> (B,S,d); `attention_mask` as the backend wants it, `rotary` (B,S,k) from the stack or None."""

        def attend_to_source(x):
            return self.self_attn(x, attention_mask=attention_mask, rotary=rotary, **kwargs)[0]

        x = self.residual(x, self.self_attn_layer_norm, attend_to_source)
        return self.residual(x, self.final_layer_norm, self.feed_forward)


class VanillaTransformerDecoderLayer(VanillaTransformerLayer):
    """Causal self-attention, attention to the encoder's output, feed-forward (Figure 1, right)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, config.decoder_ffn_dim)
        self.self_attn = VanillaTransformerAttention(config, config.decoder_attention_heads, True, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.encoder_attn = VanillaTransformerAttention(config, config.decoder_attention_heads, False, layer_idx)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None,
        rotary: torch.Tensor | None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """(B,T,d) and the encoder's output (B,S,d) -> (B,T,d); masks as the backend wants them."""

        def attend_to_past(x):
            past = {"rotary": rotary, "past_key_values": past_key_values}
            return self.self_attn(x, attention_mask=attention_mask, **past, **kwargs)[0]

        def attend_to_encoder(x):
            cross = {"attention_mask": encoder_attention_mask, "past_key_values": past_key_values}
            return self.encoder_attn(x, encoder_hidden_states, **cross, **kwargs)[0]

        x = self.residual(x, self.self_attn_layer_norm, attend_to_past)
        x = self.residual(x, self.encoder_attn_layer_norm, attend_to_encoder)
        return self.residual(x, self.final_layer_norm, self.feed_forward)


# ------------------------------------------------------------------------------------------- stacks, sections 3.1, 3.4


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """What every model here shares: how transformers is to treat it, and how its weights begin."""

    config: VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Initial weights, which the paper leaves open; only through `init`, which spares tensors already loaded.

        Linear       weight Xavier-uniform, bias 0
        LayerNorm    weight 1, bias 0
        Embedding    normal with variance 1/d, so that sqrt(d) times an embedding, and a logit, has variance near 1
        """
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, SinusoidalPositions):
            module.reset_parameters()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *args,
        use_safetensors: bool | None = True,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        **kwargs,
    ):
        """As in transformers, but the whole of a checkpoint or nothing, and a pickle only if asked for one.

        Raises RuntimeError that names weights which are missing, left over or of another shape, where transformers
        warns. `output_loading_info=True` returns the names of the first two instead, `ignore_mismatched_sizes=True`
        allows the third. Raises OSError where there are no safetensors, unless `use_safetensors` is False or None.
        """
        name = pretrained_model_name_or_path
        loading = {"use_safetensors": use_safetensors, "ignore_mismatched_sizes": True, "output_loading_info": True}
        try:
            model, info = super().from_pretrained(name, *args, **loading, **kwargs)
        except OSError as error:
            if use_safetensors:
                refuse_pickle(name, error)
            raise
        problems = {}
        if not output_loading_info and name is not None:  # without a name, weights are given as a `state_dict`
            problems = {"missing": info["missing_keys"], "unknown": info["unexpected_keys"]}
        if not ignore_mismatched_sizes:
            problems["of another shape"] = [key for key, *_ in info["mismatched_keys"]]
        said = [f"{len(keys)} {kind} (such as {min(keys)})" for kind, keys in problems.items() if keys]
        if said:
            raise RuntimeError(
                f"{name} is no whole {cls.__name__}: of its weights, {' and '.join(said)}; get it anew."
            )
        return (model, info) if output_loading_info else model

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs) -> nn.Embedding:
        """As in transformers; where the target has a vocabulary of its own, that of the source alone."""
        if self.config.share_encoder_decoder_embeddings:
            embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
            self.config.decoder_vocab_size = self.config.vocab_size
            return embeddings
        if self.base_model is not self:  # which has no output projection to resize along
            return self.base_model.resize_token_embeddings(new_num_tokens, *args, **kwargs)
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)

    def resize_decoder_token_embeddings(self, new_num_tokens: int) -> nn.Embedding:
        """The vocabulary that the target has of its own; raises ValueError where it shares that of the source."""
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError("Source and target share one vocabulary; resize it by `resize_token_embeddings`.")
        decoder = self.get_decoder()
        decoder.embed_tokens = self._get_resized_embeddings(decoder.embed_tokens, new_num_tokens)
        self.config.decoder_vocab_size = new_num_tokens
        if self.get_output_embeddings() is not None:
            self.set_output_embeddings(self._get_resized_lm_head(self.get_output_embeddings(), new_num_tokens))
        self.tie_weights()
        return decoder.embed_tokens


def refuse_pickle(name, error: OSError):
    """Raises OSError that says how to convert a pickle, if `error` is that one is in the place of safetensors."""
    is_at_hub = "`use_safetensors=True`" in str(error)  # which transformers says of a Hub's repository
    if is_at_hub or any(Path(str(name)).glob("pytorch_model*.bin")):
        raise OSError(
            f"{name} holds no model.safetensors. A pickle such as pytorch_model.bin, which could run any code, is "
            f"not loaded; convert one that you trust by `vanilla-transformer convert {name} NEW_DIR`."
        ) from error


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """What the encoder and the decoder share: embeddings and positions at the bottom, a norm at the top."""

    _fsdp_plan = {"layers.*": "free_full_weight"}

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int, num_heads: int):
        super().__init__(config)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.is_rotary = config.position_embedding_type == "rotary"
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        positions = LearnedPositions if config.position_embedding_type == "learned" else SinusoidalPositions
        position_dim = config.d_model // num_heads if self.is_rotary else config.d_model
        self.embed_positions = positions(config.max_position_embeddings, position_dim)
        self.dropout = Dropout(config.dropout)
        # A pre-norm stack ends in a sum, which needs a norm of its own; a post-norm stack ends in one.
        self.layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps) if config.norm_first else nn.Identity()
        self.gradient_checkpointing = False

    def add_positions(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scaled embeddings with their positions (sections 3.4, 3.5): the first layer's input.

        Rotary positions are not added here; their sines and cosines are returned beside it, for [`rotate`]. No
        position is at or above `length`.
        """
        positions = self.embed_positions(position_ids, length).to(inputs_embeds.dtype)  # (B,T,d), (B,T,k) if rotary
        x = inputs_embeds * self.embed_scale
        if self.is_rotary:
            return self.dropout(x), positions
        return self.dropout(x + positions), None


class VanillaTransformerEncoder(VanillaTransformerStack):
    """N encoder layers over the embedded source (Figure 1, left)."""

    _can_record_outputs = {
        "hidden_states": VanillaTransformerEncoderLayer,
        "attentions": VanillaTransformerAttention,
    }
    _tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.fc1": "colwise",
        "layers.*.fc2": "rowwise",
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, config.vocab_size, config.encoder_attention_heads)
        self.layers = nn.ModuleList([VanillaTransformerEncoderLayer(config, i) for i in range(config.encoder_layers)])
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """`input_ids` (B,S) or `inputs_embeds` (B,S,d) -> `last_hidden_state` (B,S,d).

        `attention_mask` is (B,S), 1 for real tokens, or a (B,1,S,S) mask of one's own; without one, padding is found
        by `pad_token_id`. Raises ValueError unless exactly one of ids and embeddings is given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give the encoder either `input_ids` or `inputs_embeds`, and not both.")
        if inputs_embeds is None:
            attention_mask = padding_mask(input_ids, self.config) if attention_mask is None else attention_mask
            inputs_embeds = self.embed_tokens(input_ids)

        mask = create_bidirectional_mask(self.config, inputs_embeds, attention_mask)
        position_ids = count_positions(inputs_embeds, attention_mask)
        x, rotary = self.add_positions(inputs_embeds, position_ids, inputs_embeds.shape[1])
        for layer in self.layers:
            x = layer(x, mask, rotary, **kwargs)
        return BaseModelOutput(last_hidden_state=self.layer_norm(x))


class VanillaTransformerDecoder(VanillaTransformerStack):
    """N decoder layers over the embedded target, looking at the encoder's output (Figure 1, right)."""

    _can_record_outputs = {
        "hidden_states": VanillaTransformerDecoderLayer,
        "attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="encoder_attn"),
    }
    _tp_plan = {
        **VanillaTransformerEncoder._tp_plan,
        "layers.*.encoder_attn.q_proj": "colwise",
        "layers.*.encoder_attn.k_proj": "colwise",
        "layers.*.encoder_attn.v_proj": "colwise",
        "layers.*.encoder_attn.out_proj": "rowwise",
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
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Target `input_ids` (B,T) or `inputs_embeds` (B,T,d) and the encoder's output (B,S,d) -> (B,T,d).

        With a cache, T counts the new tokens only, and a 2D `attention_mask` covers the past ones too. Raises
        ValueError unless exactly one of ids and embeddings is given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give the decoder either `decoder_input_ids` or `decoder_inputs_embeds`, and not both.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))

        past_length, length = 0, inputs_embeds.shape[1]
        self_cache = None
        if past_key_values is not None:
            self_cache = past_key_values.self_attention_cache
            past_length = self_cache.get_seq_length()
            if isinstance(past_length, torch.Tensor):  # of a static cache
                # While compiling it must not be read, but the capacity is known.
                is_compiling = torch.compiler.is_compiling()
                length = self_cache.get_max_length() if is_compiling else length + int(past_length)
            else:
                length = length + past_length

        mask = create_causal_mask(self.config, inputs_embeds, attention_mask, self_cache)
        encoder_mask = create_bidirectional_mask(
            self.config, inputs_embeds, encoder_attention_mask, encoder_hidden_states=encoder_hidden_states
        )
        is_static = self_cache is not None and self_cache.is_compileable
        position_ids = count_positions(inputs_embeds, attention_mask, past_length, is_static)
        x, rotary = self.add_positions(inputs_embeds, position_ids, length)
        for layer in self.layers:
            x = layer(x, mask, encoder_hidden_states, encoder_mask, rotary, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.layer_norm(x), past_key_values=past_key_values
        )


def padding_mask(input_ids: torch.Tensor, config: VanillaTransformerConfig) -> torch.Tensor | None:
    """1 for real tokens, 0 for padding (B,S), by `pad_token_id`; None where there is no such id.

    Where padding is the end-of-sentence token too, the first one after the last other token counts as real.
    """
    if config.pad_token_id is None:
        return None
    real = input_ids != config.pad_token_id
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.pad_token_id in ends:
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        end = (real * (index + 1)).amax(dim=1, keepdim=True)  # one past the last other token (B,1)
        real = real | (index == end)
    return real.long()


# ----------------------------------------------------------------------------------------------------- model, Figure 1


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder without the output projection (Figure 1)."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
            self._tied_weights_keys = {
                "encoder.embed_tokens.weight": "shared.weight",
                "decoder.embed_tokens.weight": "shared.weight",
            }
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Shares source and target embeddings also where the output projection is a matrix of its own."""
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
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Source ids (B,S) and target ids (B,T) -> `last_hidden_state` (B,T,d).

        `attention_mask` (B,S) hides source positions from the encoder and from cross-attention; without one, padding
        is found by `pad_token_id`. One of (B,1,S,S) is for the encoder alone. `encoder_outputs` stands in for the
        source, `inputs_embeds` (B,S,d) for its ids. Raises ValueError without a source or a target.
        """
        if attention_mask is None and input_ids is not None:
            attention_mask = padding_mask(input_ids, self.config)
        encoder_attention_mask = attention_mask
        if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[2] > 1:
            # A mask with a row for each source position says nothing of what the target may look at.
            encoder_attention_mask = None if input_ids is None else padding_mask(input_ids, self.config)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)

        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


# --------------------------------------------------------------------------------------------------- loss, section 5.4

# The logits of a chunk of the loss, 16 MiB in float32, but at least so many rows: each chunk adds to the gradient of
# all V types, however few its rows are. On a CPU the softmax takes as many at a time as stay in its cache.
LOGITS_PER_CHUNK, ROWS_PER_CHUNK = 2**22, 256
LOGITS_PER_SOFTMAX = 2**20


# An operator of its own, which `torch.compile` takes as one step however many real tokens there are. It is named after
# the module, of which a process may hold two: the package's and one that came with a model.
@torch.library.custom_op(f"{__name__.replace('.', '_')}::chunked_cross_entropy", mutates_args=())
def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    label_smoothing: float,
    dtype: torch.dtype,
    needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projection, softmax, label-smoothed cross-entropy and their gradient, a few rows of logits at a time.

    The gradient is known as soon as the logits are, so both are worked out in the forward pass, and the (N,V) logits
    of a batch, the largest tensor in training, never exist. Matrices are multiplied in `dtype`, sums are in float32.

    Returns the loss () summed over the real tokens, and its gradients by `hidden` (B,T,d), `weight` (V,d) and `bias`
    (V,), which are empty unless `needs_grad`.
    """
    real = labels != -100
    num_types = weight.shape[0]
    projection = weight.to(dtype)
    states, targets = hidden[real].to(dtype), labels[real][:, None]  # (N,d), (N,1)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_states = torch.empty_like(states if needs_grad else states[:0])
    grad_weight = torch.zeros_like(weight if needs_grad else weight[:0], dtype=torch.float32)
    grad_bias = torch.zeros_like(grad_weight[:, 0])
    rows = max(ROWS_PER_CHUNK, LOGITS_PER_CHUNK // num_types)
    some = max(1, LOGITS_PER_SOFTMAX // num_types) if hidden.device.type == "cpu" else rows
    for start in range(0, states.shape[0], rows):
        x = states[start : start + rows]
        products = x @ projection.T  # (n,V)
        for part, target in zip(products.split(some), targets[start : start + rows].split(some), strict=True):
            logits = part.float() if bias is None else part.float() + bias
            likelihood = (1 - label_smoothing) * logits.gather(1, target)
            if label_smoothing:
                likelihood += label_smoothing * logits.mean(dim=1, keepdim=True)
            probabilities = logits.softmax(dim=1)
            # The logarithm of the sum of exponentials, by the highest probability, which is 1/V at least.
            normaliser = logits.amax(dim=1, keepdim=True) - probabilities.amax(dim=1, keepdim=True).log()
            loss += (normaliser - likelihood).sum()
            if not needs_grad:
                continue

            # The gradient of the loss by the logits: softmax minus the smoothed target distribution.
            grad = probabilities.sub_(label_smoothing / num_types)
            grad.scatter_add_(1, target, torch.full_like(target, label_smoothing - 1, dtype=grad.dtype))
            if bias is not None:
                grad_bias += grad.sum(dim=0)
            part.copy_(grad)
        if needs_grad:
            grad_states[start : start + rows] = products @ projection
            grad_weight += products.T @ x

    grad_hidden = torch.zeros_like(hidden if needs_grad else hidden[:0])
    if needs_grad:
        grad_hidden[real] = grad_states.to(hidden.dtype)
    return loss, grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


@chunked_cross_entropy.register_fake
def _(hidden, weight, bias, labels, label_smoothing, dtype, needs_grad):
    """The shapes of what it returns."""
    if not needs_grad:
        hidden, weight = hidden[:0], weight[:0]
    loss = hidden.new_empty((), dtype=torch.float32)
    return loss, torch.empty_like(hidden), torch.empty_like(weight), weight.new_empty(weight.shape[0])


def keep_gradients(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # no zeros for the gradients by what is returned beside the loss
    ctx.save_for_backward(*output[1:])
    ctx.has_bias = inputs[2] is not None


def scale_gradients(ctx, grad_loss, *_):
    hidden, weight, bias = (grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
    return hidden, weight, bias if ctx.has_bias else None, None, None, None, None


chunked_cross_entropy.register_autograd(scale_gradients, setup_context=keep_gradients)


def label_smoothed_cross_entropy(
    hidden: torch.Tensor,
    lm_head: nn.Linear,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy against targets smoothed over all V types (section 5.4), in nats per real target token.

    `hidden` (B,T,d), `labels` (B,T) with -100 where there is no target. The sum over the N real tokens is divided by
    `num_items_in_batch`, or by N: with the number of a whole optimiser step, gradients of its parts add up exactly.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else lm_head.weight.dtype
    total, *_ = chunked_cross_entropy(
        hidden, lm_head.weight, lm_head.bias, labels, float(label_smoothing), dtype, torch.is_grad_enabled()
    )
    return per_token(total, labels, num_items_in_batch)


def per_token(
    total: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None
) -> torch.Tensor:
    """A sum over real target tokens () divided by their number, or by that of a whole optimiser step if given."""
    return total / ((labels != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


class VanillaTransformerForConditionalGeneration(VanillaTransformerPreTrainedModel, VanillaTransformerGenerationMixin):
    """The whole Transformer (Figure 1): encoder, decoder and output projection."""

    _tp_plan = {"lm_head": "colwise_gather_output"}

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
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Source ids (B,S) and target ids (B,T) -> `logits` (B,T,V), and `loss` if `labels` are given.

        `labels` (B,T) are the target tokens themselves, -100 where there is none; the decoder then reads them shifted
        right by one, unless it is given inputs of its own. `num_items_in_batch` and, among `kwargs`, `label_smoothing`
        are those of [`label_smoothed_cross_entropy`]. In training mode with labels, `logits` is None, since all of
        them are never in memory; unless an adapter or a quantiser has changed the head.
        """
        # No parameter: transformers' Trainer takes all that have "label" in their name for labels of the dataset.
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache if labels is None else False,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        # A head that an adapter or a quantiser has changed is more than its weight, and is called in full.
        is_plain = type(self.lm_head) is nn.Linear and type(self.lm_head.weight) in (nn.Parameter, torch.Tensor)
        in_chunks = labels is not None and self.training and is_plain
        logits = None if in_chunks else self.lm_head(hidden)  # (B,T,V)
        loss = None
        if in_chunks:
            loss = label_smoothed_cross_entropy(hidden, self.lm_head, labels, label_smoothing, num_items_in_batch)
        elif labels is not None:
            total = nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=label_smoothing
            )
            loss = per_token(total, labels, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """What the decoder reads to predict `labels` (B,T): the start token, then all but the last (Figure 1)."""
        if self.config.decoder_start_token_id is None:
            raise ValueError("`decoder_start_token_id` of the config is None; set it, for the decoder to begin with.")
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        # What stands at padding does not matter, as long as it is a token: no real position looks at it.
        return shifted.masked_fill(shifted == -100, self.config.decoder_start_token_id)

    def generate(self, inputs: torch.Tensor | None = None, *args, **kwargs):
        """As in transformers, with padding masked as in `forward` if no mask is given."""
        input_ids = kwargs.get("input_ids") if inputs is None else inputs
        if input_ids is not None and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = padding_mask(input_ids, self.config)
        return super().generate(inputs, *args, **kwargs)


# `save_pretrained` puts this file, and those that it imports, beside the weights.
VanillaTransformerModel.register_for_auto_class("AutoModel")
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = [
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
