"""What a training step needs of memory, and the largest batch that fits."""

import os

import numpy as np
import psutil
import torch
from torch import nn

from ..errors import UserError
from ..training.optimization import loss_of

FILLED = 0.8  # of what is free, by the estimate; the rest is for what it leaves out: evaluation, and loose ends
LARGEST = 2**15  # more tokens make larger steps, not faster ones
MULTIPLE = 128  # tokens


def bytes_of_state(model: nn.Module, args, shards: int = 1, with_gradients: bool = True) -> int:
    """Weights, gradients, Adam's two moments and, with --ema_decay, the average and its copy, on one process."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    needs_copy = args.ema_decay or args.torch_compile or shards > 1  # which is evaluated
    is_copied = shards == 1 and torch.distributed.is_available() and torch.distributed.is_initialized()
    copies = 3 + with_gradients + is_copied + bool(args.ema_decay)  # of one, processes exchange gradients
    return weights * copies // shards + (weights if needs_copy else 0)


def bytes_of_batch(model: nn.Module, args, accelerator, sentences: int, length: int) -> int:
    """What the forward pass of a batch of `sentences` of `length` tokens on both sides keeps for the backward pass.

    It is found by one such pass, counting the tensors that autograd keeps, the weights left out.
    """
    kept: dict[tuple, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.full((sentences, length), model.config.eos_token_id, device=accelerator.device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    was_training = model.training
    model.train()
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with torch.random.fork_rng(), accelerator.autocast(), hooks:
        loss = loss_of(model, batch, torch.tensor(1.0, device=accelerator.device), args)
    del loss  # until here all of them live, and none has the address of another
    model.train(was_training)
    return sum(kept.values())


def estimate(model: nn.Module, args, accelerator, max_tokens: int, lengths: np.ndarray, shards: int = 1) -> int:
    """Bytes of a training step with batches of `max_tokens`, of the longest sentences that there are."""
    fixed, each, longest = per_sentence(model, args, accelerator, lengths)
    return bytes_of_state(model, args, shards) + fixed + each * max(1, max_tokens // longest)


def per_sentence(model: nn.Module, args, accelerator, lengths: np.ndarray) -> tuple[int, int, int]:
    """What batches of the longest sentences need whatever their number, for each, and how long these are."""
    longest = int(lengths.max())
    one, two = (bytes_of_batch(model, args, accelerator, number, longest) for number in (1, 2))
    return max(0, 2 * one - two), max(1, two - one), longest


def largest_batch(model: nn.Module, args, accelerator, lengths: np.ndarray, shards: int = 1) -> int:
    """The token budget of the largest batch that fits on every process, at most [`LARGEST`].

    Raises:
        UserError: Not even one sentence fits.
    """
    free = free_memory(accelerator)
    fixed, each, longest = per_sentence(model, args, accelerator, lengths)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())  # there already
    sentences = int(((free + weights) * FILLED - bytes_of_state(model, args, shards) - fixed) // each)
    fitting = torch.tensor(sentences * longest, device=accelerator.device)
    budget = min(LARGEST, int(accelerator.gather(fitting[None]).min()))
    if budget < longest:
        raise UserError(
            f"--per_device_train_max_tokens auto: a step with one sentence of {longest} tokens does not fit into the "
            f"{free / 2**30:.1f} GiB that are free; lower --max_source_length and --max_target_length, or choose a "
            "smaller model."
        )
    return budget // MULTIPLE * MULTIPLE or budget


def free_memory(accelerator) -> float:
    """Bytes that are free on the device of this process, its share of them on a CPU."""
    if accelerator.device.type == "cuda":
        return torch.cuda.mem_get_info(accelerator.device)[0]
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
