"""Threads, memory allocation, and an estimate of the memory of a training step."""

import contextlib
import ctypes
import os
import platform
from pathlib import Path

import numpy as np
import psutil
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import get_cpu_distributed_information
from torch import nn

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from ..loss_vanilla_transformer import LOGITS_PER_CHUNK_OF_GPU
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..translation_vanilla_transformer import cpu_has_bfloat16
from .optimization import compute_loss
from .options import TrainingOptions
from .processes import number_of_shards

USABLE = 0.8  # fraction of the free memory; the rest is for evaluation and what the estimate misses
MEASURED = 512  # tokens of the longest pair whose memory is measured
MAX_TOKENS = 2**15  # larger batches make steps larger, not faster


def configure_malloc():
    """Makes glibc keep freed memory, instead of unmapping it and mapping zeroed pages again at every step.

    On a CPU, mapping takes a large part of a step (docs/LOG.md). Does nothing without glibc.
    """
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_top_pad, 2**28)


def configure(device: torch.device, mixed_precision: str):
    """Prepares this process for a run on a device."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # takes 0.2 s more for each new shape of batch (docs/LOG.md)
    if device.type == "cpu":
        configure_cpu(mixed_precision)


def configure_cpu(mixed_precision: str):
    """Prepares a run on CPUs: divides the cores among its processes, speeds up malloc, warns if bfloat16 is slow."""
    if torch.get_num_threads() == 1 and not is_thread_count_given():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // get_cpu_distributed_information().local_world_size))
    configure_malloc()
    if mixed_precision == "bf16" and not cpu_has_bfloat16():
        PartialState().print(
            "warning: this CPU has no bfloat16 instructions, so --mixed_precision bf16 is many times slower than "
            "float32 here; remove that option from accelerate launch."
        )


def is_thread_count_given() -> bool:
    """Whether the user has set OMP_NUM_THREADS; a launcher sets it to 1 for its processes if the user has not."""
    process = psutil.Process()
    if {"ACCELERATE_MIXED_PRECISION", "LOCAL_RANK"} & os.environ.keys():  # started by accelerate launch or torchrun
        process = process.parent()
    with contextlib.suppress(psutil.Error):
        return "OMP_NUM_THREADS" in process.environ()
    return False


CGROUPS = Path("/sys/fs/cgroup")
# Files of a control group: its limit, what it uses, and a line of its statistics with what could be freed.
MEMORY_FILES = [
    ("memory.max", "memory.current", "inactive_file"),  # version 2
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
]


def free_memory(cgroups: Path = CGROUPS, groups: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that processes may still take: on this machine and, in a container or a job, below its limit."""
    free = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError):  # not Linux
        for line in groups.read_text().splitlines():  # such as 0::/job/step or 4:memory:/job/step
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                group = cgroups / controllers / path.lstrip("/")  # may be the name outside the container
                while group.is_relative_to(cgroups):
                    free += unused_memory(group)
                    group = group.parent
    return max(0, min(free))


def unused_memory(group: Path) -> list[int]:
    """Bytes left below the limit of a control group; nothing if it has none."""
    for limit, usage, cache in MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError, StopIteration):  # no such file, or "max"
            left = int((group / limit).read_text()) - int((group / usage).read_text())
            lines = map(str.split, (group / "memory.stat").read_text().splitlines())
            return [left + next(int(number) for name, number in lines if name == cache)]
    return []


def check_model_fits(config: VanillaTransformerConfig, copies: int):
    """Raises UserError if so many copies of the parameters do not fit into the free memory of this machine."""
    with torch.device("meta"):
        parameters = VanillaTransformerForConditionalGeneration(config).num_parameters()
    needed, free = 4 * copies * parameters, free_memory()
    if needed > free:
        raise UserError(
            f"A model of {parameters:,} parameters takes {needed / 2**30:,.1f} GiB, more than the "
            f"{free / 2**30:,.1f} GiB that are free; choose smaller sizes, such as --d_model."
        )


def activation_bytes(
    model: nn.Module, options: TrainingOptions, accelerator: Accelerator, sentences: int, length: int
) -> int:
    """Bytes that the forward pass of a batch keeps for the backward pass, measured by running it.

    The batch has `sentences` pairs with `length` tokens on both sides. Of long ones, which might not fit, the bytes
    follow from shorter ones: they are a sum of parts that grow with the length and with its square.
    """
    if length > MEASURED:
        lengths = (MEASURED // 4, MEASURED // 2, MEASURED)
        measured = [activation_bytes(model, options, accelerator, sentences, shorter) for shorter in lengths]
        return int(np.polyval(np.polyfit(lengths, measured, 2), length))
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.ones((sentences, length), dtype=torch.long, device=accelerator.device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    if options.teacher:
        tokens = ids[..., None].expand(-1, -1, options.teacher_top_k)
        batch |= {"teacher_tokens": tokens, "teacher_probabilities": tokens.float()}
    was_training = model.training
    model.train()
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with torch.random.fork_rng(), accelerator.autocast(), hooks:
        loss = compute_loss(model, batch, torch.tensor(1.0, device=accelerator.device), options)
    del loss  # kept alive until here, so that no two tensors have the same address
    model.train(was_training)
    return sum(kept.values())


def step_bytes(model: nn.Module, options: TrainingOptions, accelerator: Accelerator, length: int) -> tuple[int, int]:
    """Bytes of a training step on one process: (constant, per pair) if both sides of all pairs have this length."""
    weights, shards = 4 * model.num_parameters(), number_of_shards(accelerator.num_processes)  # bytes in float32
    copies = 4 + bool(options.ema_decay)  # weights, gradients, Adam's two moments, and the moving average
    if shards == 1 and accelerator.num_processes > 1 and options.gradient_accumulation_steps > 1:
        copies += 1  # the gradients of earlier batches, beside the buffer in which replicas exchange them
    needs_copy = options.ema_decay or options.torch_compile or shards > 1  # for evaluation and saving
    one, two = (activation_bytes(model, options, accelerator, pairs, length) for pairs in (1, 2))
    fixed = max(0, 2 * one - two)  # extrapolated to a batch of no pairs
    constant = weights * copies // shards + (weights if needs_copy else 0) + fixed
    if accelerator.device.type == "cuda":  # a chunk of logits with its softmax, as long as that is not compiled
        constant += 10 * LOGITS_PER_CHUNK_OF_GPU
    return constant, max(1, two - one)


def choose_batch_size(
    model: nn.Module, options: TrainingOptions, accelerator: Accelerator, longest: int, before: dict
) -> int:
    """The tokens of a batch: `--per_device_train_max_tokens` or, if that is auto, those of the resumed run, whose
    settings are `before`, or the most that fit into memory when the longest side of all pairs has `longest` tokens."""
    if options.per_device_train_max_tokens is not None:
        return options.per_device_train_max_tokens
    if before:
        return before["per_device_train_max_tokens"]
    size = largest_batch(model, options, accelerator, longest)
    accelerator.print(f"--per_device_train_max_tokens auto: {size:,} tokens")
    return size


def largest_batch(model: nn.Module, options: TrainingOptions, accelerator: Accelerator, longest: int) -> int:
    """The largest token budget that fits on each GPU, even if all pairs are as long as the longest.

    It is at most [`MAX_TOKENS`]. `longest` is the length in tokens of the longest side of any pair. Raises UserError
    if not even one such pair fits.
    """
    constant, per_pair = step_bytes(model, options, accelerator, longest)
    usable = USABLE * memory_for(model, accelerator.device)
    pairs = int((usable - constant) // per_pair)
    fitting = torch.tensor([pairs * longest], device=accelerator.device)
    budget = min(MAX_TOKENS, int(accelerator.gather(fitting).min()))
    if budget < longest:
        raise UserError(
            f"--per_device_train_max_tokens auto: a step with one pair of {longest} tokens does not fit into the "
            f"{usable / 2**30:.1f} GiB that it may use; lower --max_source_length and --max_target_length, or choose "
            "a smaller model."
        )
    return budget


def memory_for(model: nn.Module, device: torch.device) -> float:
    """Bytes that this process may use on its device: what is free, and what its weights take already.

    On a CPU, the processes of a machine share what is free.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = free_memory() / get_cpu_distributed_information().local_world_size
    return free + 4 * model.num_parameters()
