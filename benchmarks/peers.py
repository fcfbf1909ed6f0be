"""The models that ours is compared with, as their users run them, and the data.

A peer maps a batch (`input_ids`, `attention_mask`, `labels`) to its label-smoothed loss, averaged over the non-padding
target tokens.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from transformers import MarianConfig, MarianMTModel
from transformers.models.marian.modeling_marian import shift_tokens_right
from transformers.trainer_pt_utils import LabelSmoother

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_positions
from vanilla_transformer.training import optimization
from vanilla_transformer.training.dropout import use_byte_dropout
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.state import TrainerState
from vanilla_transformer.training.weights import Weights

sys.path.insert(0, str(Path(__file__).parents[1]))
from train import optimizer_step  # noqa: E402

SMOOTHING = 0.1
DROPOUT = 0.1
PAD, START = 0, 2  # ids of <pad> and </s> in our tokenizers; targets start with </s>, as Marian's do
SIZES = {  # d_model, feed-forward, heads, layers of each side
    "tiny": (128, 256, 4, 4),
    "small": (256, 1024, 4, 3),
    "base": (512, 2048, 8, 6),
    "big": (1024, 4096, 16, 6),
    "quick": (32, 64, 2, 1),
}


def fields(size: str, vocab_size: int) -> dict:
    """A size as config fields, the same for Marian and ours."""
    d_model, ffn_dim, heads, layers = SIZES[size]
    sides = {
        f"{side}_{what}": value
        for side in ("encoder", "decoder")
        for what, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", ffn_dim))
    }
    tokens = {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": START, "decoder_start_token_id": START}
    dropout = {"dropout": DROPOUT, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return {"vocab_size": vocab_size, "d_model": d_model, "activation_function": "relu"} | sides | tokens | dropout


# --------------------------------------------------------------------------------------------------------------- ours


def vanilla(size: str, vocab_size: int, attention: str = "eager") -> nn.Module:
    """Our model; train.py uses eager attention on a CPU and sdpa elsewhere."""
    config = VanillaTransformerConfig(**fields(size, vocab_size))
    return VanillaTransformerForConditionalGeneration._from_config(config, attn_implementation=attention)


def make_accelerator(precision: str, device: str) -> Accelerator:
    return Accelerator(cpu=device == "cpu", mixed_precision="no" if precision == "fp32" else precision)


class OurTraining:
    """Our model with the optimizer and the training step of train.py."""

    def __init__(self, model: nn.Module, accelerator: Accelerator, compile: bool = False):
        options = TrainingOptions(label_smoothing_factor=SMOOTHING)
        model = model.to(accelerator.device)
        if accelerator.device.type == "cpu":
            use_byte_dropout(model)
        self.weights = Weights(model, accelerator, compile, ema_decay=None)
        optimizer = accelerator.prepare_optimizer(optimization.make_optimizer(model, options))
        self.take_step = partial(optimizer_step, self.weights, optimizer, options, accelerator)

    def step(self, batch: dict, number: int, learning_rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes a step; returns the loss () and the number of target tokens ()."""
        loss, tokens, _ = self.take_step([batch], TrainerState(step=number, position=number), learning_rate)
        return loss, tokens[0]


# ------------------------------------------------------------------------------------------------------------- Marian


class Marian(nn.Module):
    """MarianMTModel with the label smoothing of transformers' Trainer."""

    def __init__(self, size: str, vocab_size: int, attention: str):
        super().__init__()
        config = MarianConfig(**fields(size, vocab_size), decoder_vocab_size=vocab_size, scale_embedding=True)
        self.model = MarianMTModel._from_config(config, attn_implementation=attention)
        self.smoother = LabelSmoother(SMOOTHING)

    def forward(self, input_ids, attention_mask, labels):
        ids = shift_tokens_right(labels, PAD, START)
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=ids, use_cache=False
        )
        return self.smoother({"logits": outputs.logits}, labels)


# ------------------------------------------------------------------------------------------------ torch.nn.Transformer


class TorchTransformer(nn.Module):
    """torch.nn.Transformer between tied embeddings, as in PyTorch's tutorials."""

    def __init__(self, size: str, vocab_size: int):
        super().__init__()
        d_model, ffn_dim, heads, layers = SIZES[size]
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.transformer = nn.Transformer(d_model, heads, layers, layers, ffn_dim, DROPOUT, batch_first=True)
        self.register_buffer("positions", sinusoidal_positions(torch.arange(1024), d_model))
        self.dropout = nn.Dropout(DROPOUT)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        scale = math.sqrt(self.embedding.embedding_dim)
        return self.dropout(self.embedding(ids) * scale + self.positions[: ids.shape[1]])

    def forward(self, input_ids, attention_mask, labels):
        ids, hidden = shift_tokens_right(labels, PAD, START), attention_mask == 0
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=torch.bool)
        states = self.transformer(
            self.embed(input_ids),
            self.embed(ids),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
        )
        logits = functional.linear(states, self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=SMOOTHING)


# --------------------------------------------------------------------------------------------------------------- text


def read_pairs(
    folder: str | None, split: str = "train", languages: tuple[str, str] = ("en", "de")
) -> list[tuple[str, str]]:
    """Sentences in both languages, of a folder with the layout of Multi30k; none without a folder."""
    if folder is None:
        return []
    lines = (Path(folder) / f"{split}.jsonl").read_text(encoding="utf-8").strip().split("\n")
    return [tuple(row[language] for language in languages) for row in map(json.loads, lines)]


def token_pairs(folder: str | None, vocab_size: int, count: int, mean: float = 15.0) -> list[dict]:
    """Token ids of `count` pairs: of Multi30k with a BPE of 10,000, or random ones of `mean` tokens on average.

    A vocabulary larger than the text can fill gets random ids with the lengths of the text.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = read_pairs(folder)
    if pairs:
        tokenizer = train_tokenizer([text for pair in pairs for text in pair], min(vocab_size, 10_000))
        chosen = torch.randperm(len(pairs), generator=generator)[:count].tolist()
        sides = [tokenizer([pairs[i][side] for i in chosen]).input_ids for side in (0, 1)]
    else:  # the lengths of Multi30k have a mean of 15 tokens and a deviation of 5
        lengths = torch.normal(mean, mean / 3, (count, 2), generator=generator).clamp(4, 2.7 * mean).int().tolist()
        sides = [[[3] * pair[side] for pair in lengths] for side in (0, 1)]
    if not pairs or vocab_size > 10_000:
        sides = [
            [torch.randint(3, vocab_size, (len(ids),), generator=generator).tolist() for ids in side] for side in sides
        ]
    return [{"input_ids": source, "labels": target} for source, target in zip(*sides, strict=True)]
