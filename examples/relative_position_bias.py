"""A changed model, right with every attention backend: a bias for the distance between two positions.

Each head of self-attention learns a number for each distance, which is added to the scores (Shaw et al., 2018; T5 by
Raffel et al., 2020); distances beyond `max_distance` share one. The script checks the model, trains it for a few steps
to reverse digits, saves it and loads it again. docs/changing_the_model.md explains it.

python examples/relative_position_bias.py
"""

import argparse
import importlib
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.inspection import check_model
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerAttention

SIZES = {"vocab_size": 13, "d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZES |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "dropout": 0.0}


class RelativeConfig(VanillaTransformerConfig):
    """Its own `model_type`, so that no one loads these weights into the plain model, which has no place for them."""

    model_type = "relative_transformer"
    max_distance: int = 8


class RelativeAttention(VanillaTransformerAttention):
    """Self-attention that adds a bias for the distance of a key from a query."""

    def __init__(self, config: RelativeConfig, num_heads: int, is_causal: bool, layer_idx: int):
        super().__init__(config, num_heads, is_causal, layer_idx)
        self.relative_bias = nn.Embedding(2 * config.max_distance + 1, num_heads)

    def forward(self, hidden_states, key_value_states=None, attention_mask=None, rotary=None, cache=None, **kwargs):
        """As its base class: (B,T,d) -> (B,T,d)."""
        # With a cache, the T queries come after the keys that it holds, and there are S keys, not T.
        T = S = hidden_states.shape[1]
        past = 0
        if cache is not None:
            past = cache.self_attention_cache.get_seq_length(self.layer_idx)
            S, _ = cache.self_attention_cache.get_mask_sizes(T, self.layer_idx)
        places = torch.arange(max(S, T), device=hidden_states.device)
        distances = places[:S] - (places[:T] + past)[:, None]  # (T,S); in padding, whatever it is, it is masked
        mask = combine(attention_mask, self.bias(distances), distances, self.is_causal)
        return super().forward(hidden_states, key_value_states, mask, rotary, cache, **kwargs)

    def bias(self, distances: Tensor) -> Tensor:
        """(T,S) -> (1,h,T,S)."""
        most = self.config.max_distance
        return self.relative_bias(distances.clamp(-most, most) + most).permute(2, 0, 1)[None]


def combine(mask: Tensor | None, bias: Tensor, distances: Tensor, is_causal: bool) -> Tensor:
    """The mask and the bias as one tensor (B,h,T,S) to be added to the scores.

    The backends give three kinds of masks. Where the backend sdpa gets None, as for a batch without padding, it hides
    the future itself, but only as long as it gets None: with the bias in its place, the decoder would read the tokens
    that it should predict. So None becomes a causal mask here.
    """
    if mask is None and is_causal:
        mask = distances <= 0
    if mask is None:  # the encoder, and nothing is padded
        return bias
    lowest = torch.finfo(bias.dtype).min / 2  # finite also after rounding, so that a row without keys is not NaN
    if mask.dtype == torch.bool:  # sdpa: True to attend
        return bias.masked_fill(~mask, lowest)
    return (mask + bias).clamp(min=lowest)  # eager: 0 to attend


class RelativeTransformer(VanillaTransformerForConditionalGeneration):
    """The Transformer with a relative position bias in the self-attention of encoder and decoder."""

    config: RelativeConfig
    _supports_flash_attn = _supports_flex_attn = False  # they take no such mask

    def __init__(self, config: RelativeConfig):
        super().__init__(config)
        for stack, heads in [
            (self.model.encoder, config.encoder_attention_heads),
            (self.model.decoder, config.decoder_attention_heads),
        ]:
            for number, layer in enumerate(stack.layers):
                layer.self_attn = RelativeAttention(config, heads, layer.self_attn.is_causal, number)
        self.post_init()


AutoConfig.register("relative_transformer", RelativeConfig, exist_ok=True)
AutoModelForSeq2SeqLM.register(RelativeConfig, RelativeTransformer, exist_ok=True)


def train(model: RelativeTransformer, steps: int) -> list[float]:
    """Trains on random digits and their reverse; returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        digits = torch.randint(3, 13, (32, 6))  # after padding, start and end
        end = torch.full((32, 1), model.config.eos_token_id)
        loss = model(torch.cat([digits, end], 1), labels=torch.cat([digits.flip(1), end], 1)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/relative", help="a new directory (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of training (default: %(default)s)")
    options = parser.parse_args(argv)
    if Path(options.output_dir).exists():
        parser.error(f"--output_dir {options.output_dir} already exists; choose another.")
    torch.manual_seed(0)
    model = RelativeTransformer(RelativeConfig(**SIZES))
    check_model(model)
    print("The checks pass.")
    losses = train(model.train(), options.steps)
    print(f"The loss fell from {losses[0]:.2f} to {losses[-1]:.2f}.")
    model.eval().save_pretrained(options.output_dir)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(options.output_dir)
    digits = torch.tensor([[3, 4, 5, 6, 7, 8, model.config.eos_token_id]])
    for one in (model, loaded):
        print(one.generate(digits, max_new_tokens=7, num_beams=3)[0, 1:-1].tolist())


if __name__ == "__main__":
    # Not as __main__: transformers saves the file of a class beside the weights, if the class is in a module.
    importlib.import_module("relative_position_bias").main()
