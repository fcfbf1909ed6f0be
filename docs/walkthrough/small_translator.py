"""A small English-German translator, trained by the package on the sample dataset: notebooks 5 to 7 and 10 use it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.batches import PairCollator, TokenBatchSampler
from vanilla_transformer.data.tokenizer import special_token_ids, train_tokenizer
from vanilla_transformer.training.dropout import use_byte_dropout
from vanilla_transformer.training.optimization import learning_rate_schedule, make_optimizer, set_learning_rate
from vanilla_transformer.training.options import TrainingOptions

DATA = Path(__file__).resolve().parents[2] / "sample_dataset"
SIZES = {"d": 64, "h": 4, "f": 128, "layers": 2}


def read_short(split: str) -> list[dict[str, str]]:
    """The pairs of a split of the sample dataset whose English side has at most five words."""
    with open(DATA / f"{split}.jsonl", encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]
    return [pair for pair in pairs if len(pair["en"].split()) <= 5]


def make_tokenizer(pairs: list[dict[str, str]]) -> PreTrainedTokenizerFast:
    """A tokenizer of both languages in which most words are one token."""
    return train_tokenizer([pair[side] for pair in pairs for side in ("en", "de")], vocab_size=1500)


def encode(tokenizer: PreTrainedTokenizerFast, pairs: list[dict[str, str]]) -> list[dict[str, list[int]]]:
    sources, targets = (tokenizer([pair[side] for pair in pairs]).input_ids for side in ("en", "de"))
    return [{"input_ids": source, "labels": target} for source, target in zip(sources, targets, strict=True)]


def make_batches(tokenizer: PreTrainedTokenizerFast, pairs: list[dict[str, str]]) -> Iterator[dict[str, torch.Tensor]]:
    """Padded batches of at most 512 tokens a side, without end: `input_ids`, `attention_mask` (B,S), `labels` (B,T)."""
    examples, collate = encode(tokenizer, pairs), PairCollator(tokenizer)
    lengths = [np.array([len(example[side]) for example in examples]) for side in ("input_ids", "labels")]
    for numbers in TokenBatchSampler(*lengths, max_tokens=512, seed=0):
        yield collate([examples[number] for number in numbers])


def train_translator(
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[dict[str, str]],
    max_steps: int = 1000,
    seed: int = 0,
    label_smoothing: float = 0.1,
    progress: bool = True,
    **changes,
) -> VanillaTransformerForConditionalGeneration:
    """Trains a model of the package and prints its loss; about a minute for 1,000 steps on one core.

    `changes` replace `SIZES` or are other fields of the config.
    """
    torch.manual_seed(seed)
    sizes = {name: changes.pop(name, size) for name, size in SIZES.items()}
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer),
        d_model=sizes["d"],
        encoder_layers=sizes["layers"],
        decoder_layers=sizes["layers"],
        encoder_attention_heads=sizes["h"],
        decoder_attention_heads=sizes["h"],
        encoder_ffn_dim=sizes["f"],
        decoder_ffn_dim=sizes["f"],
        **{"dropout": 0.05, **changes},
        **special_token_ids(tokenizer),
    )
    model = VanillaTransformerForConditionalGeneration(config)
    use_byte_dropout(model)  # faster on a CPU
    schedule = learning_rate_schedule("cosine", 5e-3, warmup_steps=100, max_steps=max_steps)
    optimizer = make_optimizer(model, TrainingOptions())  # the paper's Adam (section 5.3)
    model.train()
    batches = make_batches(tokenizer, pairs)
    for step in range(1, max_steps + 1):
        loss = model(**next(batches), label_smoothing=label_smoothing).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_learning_rate(optimizer, schedule(step))
        optimizer.step()
        optimizer.zero_grad()
        if progress and step % 200 == 0:
            print(f"step {step:5}   loss {loss.item():.2f}")
    return model.eval()
