"""Trials: how fast a model with sizes that are not chosen yet would train on this machine."""

import time
from collections.abc import Mapping

import torch
from accelerate import Accelerator

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from .hardware import example_batch
from .memory import free_bytes, step_bytes
from .model import choose_attention, new_model, prepare_layers
from .optimization import compute_loss, make_optimizer
from .options import given_fields
from .recipe import Options
from .rule import LARGEST_BATCH, LARGEST_BATCH_ON_GPU, SMALLEST_BATCH, USUAL_BATCH


class Trials:
    """Times a few training steps of throw-away models, with batches of pairs whose sides have the usual `lengths`.

    Attributes:
        largest: The most tokens of a batch to choose.
        sizes: The tokens of the batches to try, until one fits into memory: a single one if the batch is given.
        refusal: Why no batch of the last model fitted; None if one did.
    """

    def __init__(self, options: Options, vocab_size: int, lengths: tuple[float, float], accelerator: Accelerator):
        self.options, self.vocab_size, self.lengths, self.accelerator = options, vocab_size, lengths, accelerator
        self.refusal: str | None = None
        # A GPU takes about as long for a small batch as for a large one, and a long run has large batches.
        is_cuda = accelerator.device.type == "cuda"
        self.largest = LARGEST_BATCH_ON_GPU if is_cuda else LARGEST_BATCH
        first = self.largest if is_cuda else USUAL_BATCH
        if "per_device_train_max_tokens" in options.free:
            self.sizes = [first >> n for n in range((first // SMALLEST_BATCH).bit_length())]
        else:
            given = options.training.per_device_train_max_tokens or first  # None: auto
            self.sizes = [given if is_cuda else min(given, USUAL_BATCH)]

    def speed(self, decided: Mapping[str, object]) -> tuple[float, int]:
        """The tokens a second of all processes together, with options that replace those of the run, and the most
        tokens of a batch to choose: fewer than `largest` if the first size did not fit.

        The speed is 0 if no size fits.
        """
        options = self.options.with_values(decided)
        for size in self.sizes:
            shape = max(1, int(size // max(self.lengths))), *(max(1, round(length)) for length in self.lengths)
            try:
                found = training_speed(options, self.vocab_size, shape, self.accelerator)
            except UserError as error:
                self.refusal = str(error)
            except torch.OutOfMemoryError:  # not kept, since its traceback would keep the model
                self.refusal = f"A batch of {size:,} tokens does not fit into memory; choose a smaller --size."
            else:
                self.refusal = None
                return found, self.largest if size == self.sizes[0] else size
        return 0.0, self.largest


def training_speed(options: Options, vocab_size: int, shape: tuple[int, int, int], accelerator: Accelerator) -> float:
    """The tokens a second of all processes, if each is as fast as this one in its last of up to three trial steps.

    The `shape` of their batch is (pairs, tokens of a source, of a target); those of the longer side count. Raises
    OutOfMemoryError if it does not fit.
    """
    training, fields = options.training, given_fields(options.model) | {"vocab_size": vocab_size}
    attention = choose_attention(training.attn_implementation, accelerator.device)
    model = new_model(VanillaTransformerConfig(**fields), attention)
    prepare_layers(model, training, accelerator.device)
    model = model.to(accelerator.device).train()
    optimizer = make_optimizer(model, training)
    pairs, *lengths = shape
    lengths = [min(length, model.config.longest_sequence) for length in lengths]
    is_cpu = accelerator.device.type == "cpu"
    if is_cpu and step_bytes(model, training, pairs, max(lengths), accelerator) > free_bytes(accelerator):
        raise torch.OutOfMemoryError  # as a GPU does
    batch = example_batch(pairs, lengths, training.teacher and training.teacher_top_k, accelerator.device)
    count = pairs * max(lengths)
    for _ in range(3):  # the first one is slower, but shows whether others would take long
        start = time.perf_counter()
        with accelerator.autocast():
            loss = compute_loss(model, batch, count, training)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for a GPU
        seconds = time.perf_counter() - start
        if seconds > 2 and is_cpu:
            break
    return accelerator.num_processes * count / seconds
