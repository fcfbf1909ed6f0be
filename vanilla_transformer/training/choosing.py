"""Chooses the options that were not given: looks at the pairs and at the machine, asks rule.py, and says why."""

import textwrap
import time
from collections.abc import Set, Sized
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data.encoding import sample_lengths
from ..data.splits import SURVEYED, Splits
from ..errors import UserError
from .checkpoint import load_state
from .hardware import example_batch
from .memory import free_memory, step_bytes
from .model import choose_attention, new_model
from .optimization import compute_loss, make_optimizer
from .options import given_fields
from .recipe import Options
from .rule import (
    LARGEST_BATCH,
    LARGEST_BATCH_ON_GPU,
    LIMITS,
    SMALLEST_BATCH,
    USUAL_BATCH,
    Choice,
    Corpus,
    Situation,
    choose_lengths,
    choose_tokens,
    choose_training,
)

STREAMED = 10**6  # pairs that a stream is taken to have


def decide_tokens(options: Options, pairs: Splits) -> dict[str, object]:
    """Chooses what must be known before a tokenizer is trained, and prints it."""
    if not options.free:
        return {}
    print("options that are not given are chosen from the data; --size paper leaves the defaults (docs/choosing.md):")
    corpus = look_at(pairs)
    if corpus.pairs == STREAMED:
        print(f"  the stream is taken to have {STREAMED:,} pairs")
    return print_choices(choose_tokens(corpus, options.free))


def decide_training(
    options: Options, pairs: Splits, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
) -> dict[str, object]:
    """Chooses the rest, once the tokenizer is known, and prints it."""
    if not options.free:
        return {}
    lengths, looked_at = sample_lengths(pairs["train"], tokenizer, LIMITS[-1])
    chosen = print_choices(choose_lengths(lengths, options.values(), options.free))
    options = options.with_values(chosen)
    corpus, given = look_at(pairs), options.values()
    limits = options.data.max_source_length, options.data.max_target_length
    kept = [max(pair) for pair in lengths if pair[0] <= limits[0] and pair[1] <= limits[1]]
    corpus = replace(corpus, pairs=max(1, round(corpus.pairs * len(kept) / max(looked_at, 1))))
    length = sum(kept) / max(len(kept), 1) or 1.0
    batches_per_step = options.training.gradient_accumulation_steps * accelerator.num_processes
    # A GPU takes about as long for a small batch as for a large one, and a long run has large batches.
    largest, tried = LARGEST_BATCH, USUAL_BATCH
    if accelerator.device.type == "cuda":
        largest = tried = LARGEST_BATCH_ON_GPU
    smallest = SMALLEST_BATCH
    if "per_device_train_max_tokens" not in options.free:
        tried = given["per_device_train_max_tokens"] or tried
        tried = smallest = tried if accelerator.device.type == "cuda" else min(tried, USUAL_BATCH)
    speeds, errors = [], []

    def speed(decided: dict) -> tuple[float, int]:
        """Of the model with these options, as [`Situation`] asks for it; 0 if not even the smallest batch fits."""
        size = tried
        while size >= smallest:
            shape = max(1, int(size // length)), round(length)
            try:
                speeds.append(training_speed(options.with_values(decided), len(tokenizer), shape, accelerator))
                return speeds[-1], largest if size == tried else size
            except (UserError, torch.OutOfMemoryError) as error:  # it does not fit; a smaller one may
                errors.append(error)
            size //= 2
        return 0.0, largest

    tokens = max(length * corpus.pairs, 1)
    situation = Situation(corpus, tokens, length, given, options.free, batches_per_step, largest, speed)
    if not isinstance(pairs["train"], Sized):  # a stream, in which no pair is read again
        situation = replace(situation, tokens=situation.asked)
    choices, doubts = choose_training(situation)
    if errors and not speeds:
        if isinstance(errors[-1], UserError):
            raise errors[-1]
        raise UserError(f"A batch of {smallest:,} tokens does not fit into memory; choose a smaller --size.")
    chosen |= print_choices(choices)
    for doubt in doubts:
        print(textwrap.fill(f"warning: {doubt}", 80, subsequent_indent="  "))
    return chosen


def decided_before(free: Set[str], checkpoint: Path) -> dict[str, object]:
    """What was chosen for the run that wrote the checkpoint."""
    settings = load_state(checkpoint).settings
    kept = free if "num_train_epochs" in free else free - {"max_steps"}
    return {name: settings[name] for name in kept & settings.keys()}


def look_at(pairs: Splits) -> Corpus:
    """What the survey has found in the training pairs."""
    found, held_out = pairs.survey["train"], pairs.survey["validation"]["pairs"]
    count, distinct = STREAMED, (STREAMED, STREAMED)
    if isinstance(pairs["train"], Sized):
        count, distinct = len(pairs["train"]), tuple(found["distinct"])
    elif found["pairs"] < SURVEYED / 2:  # all of the stream
        count, distinct = found["pairs"], tuple(found["distinct"])
    means = {name: tuple(found[name]) for name in ("words", "characters", "hidden_words")}
    # Sources of several lines are not joined either.
    usual, same = max(found["usual_sentences"], found["usual_lines"]), found["same_letters"]
    return Corpus(count, distinct, **means, sentences=usual, held_out=held_out, same_letters=same)


def print_choices(choices: list[Choice]) -> dict[str, object]:
    """Prints choices as options that can be copied, each with its reason; returns their values."""
    chosen = {}
    for choice in choices:
        words = " ".join(f"--{name} {value}" for name, value in choice.values.items())
        print(textwrap.fill(f"{words}: {choice.reason}", 80, initial_indent="  ", subsequent_indent="    "))
        chosen |= choice.values
    return chosen


def training_speed(options: Options, vocab_size: int, shape: tuple[int, int], accelerator: Accelerator) -> float:
    """The tokens a second of all processes, if each is as fast as this one in its last of up to three trial steps.

    The `shape` of their batch is (pairs, tokens of a side).
    """
    training, fields = options.training, given_fields(options.model) | {"vocab_size": vocab_size}
    attention = choose_attention(training.attn_implementation, accelerator.device)
    model = new_model(VanillaTransformerConfig(**fields), attention)
    model = model.to(accelerator.device).train()
    optimizer = make_optimizer(model, training)
    top_k = training.teacher and training.teacher_top_k
    pairs, length = shape[0], min(shape[1], model.config.longest_sequence)
    if accelerator.device.type == "cpu" and step_bytes(model, pairs, length) > free_memory():
        raise UserError(
            f"A training step with {pairs} pairs of {length} tokens does not fit into the memory that is free; lower "
            "--per_device_train_max_tokens or the limits of lengths, or choose a smaller --size."
        )
    batch = example_batch(pairs, length, top_k, accelerator.device)
    count = batch["input_ids"].numel()
    for _ in range(3):  # the first one is slower, but shows whether others would take long
        start = time.perf_counter()
        with accelerator.autocast():
            loss = compute_loss(model, batch, count, training)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for a GPU
        seconds = time.perf_counter() - start
        if seconds > 2 and accelerator.device.type == "cpu":
            break
    return accelerator.num_processes * count / seconds
