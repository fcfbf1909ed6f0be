"""Threads, memory allocation, and the largest batch that fits into memory."""

import contextlib
import ctypes
import os
import platform

import psutil
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import find_executable_batch_size, get_cpu_distributed_information
from torch import nn

from ..data.batches import SOFT_TARGETS
from ..errors import UserError
from ..loading import avoid_cudnn_attention, cpu_has_bfloat16
from .optimization import compute_loss
from .options import TrainingOptions
from .signals import LAUNCHED

USABLE = 0.8  # share of the largest batch that fits; the rest is for evaluation and fragmented memory
MAX_TOKENS = 2**15  # larger batches make steps larger, not faster


def describe_cpu() -> str:
    """The kind of CPU, such as `AMD EPYC CPU with AVX-512 bf16`: results differ slightly between kinds."""
    has = torch.cpu.get_capabilities()
    kinds = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 bf16", "avx512_f": "AVX-512", "avx2": "AVX2"}
    kind = next((f" with {text}" for name, text in kinds.items() if has.get(name)), "")
    return f"{has.get('cpu_name') or platform.machine()} CPU{kind}"


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
    """Prepares this process for a run on a device. On CPUs, divides the cores among the processes, speeds up malloc,
    and warns if bfloat16 is slow."""
    avoid_cudnn_attention()
    if device.type != "cpu":
        return
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
    with contextlib.suppress(psutil.Error, AttributeError):  # no access, or no parent
        process = psutil.Process()
        process = process.parent() if LAUNCHED & os.environ.keys() else process
        return "OMP_NUM_THREADS" in process.environ()
    return False


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
    """The largest token budget that fits on each GPU, up to [`MAX_TOKENS`], if every pair is as long as the longest.

    Ever smaller batches are tried. Raises UserError if not even one pair fits.
    """

    @find_executable_batch_size(starting_batch_size=round(MAX_TOKENS / USABLE))
    def try_batch(max_tokens: int) -> int:
        """Returns `max_tokens` if a forward and a backward pass fit into memory."""
        pairs = max_tokens // longest
        if pairs == 0:
            raise UserError(
                f"--per_device_train_max_tokens auto: a step with one pair of {longest} tokens does not fit into "
                "memory; lower --max_source_length and --max_target_length, or choose a smaller model."
            )
        batch = example_batch(pairs, (longest, longest), options.teacher and options.teacher_top_k, accelerator.device)
        with accelerator.autocast():
            loss = compute_loss(model.train(), batch, torch.tensor(1.0, device=accelerator.device), options)
        loss.backward()
        return max_tokens

    copies = 2 + 2 * bool(options.ema_decay)  # Adam's two moments; the average, and the model that is scored
    rest = torch.empty(copies * model.num_parameters(), device=accelerator.device)
    found = torch.tensor([try_batch()], device=accelerator.device)
    del rest
    model.zero_grad()
    return max(longest, round(USABLE * int(accelerator.gather(found).min())))


def example_batch(
    pairs: int, lengths: tuple[int, int], top_k: int | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """A batch of `pairs` whose sides have these `lengths` in tokens and, if `top_k` is given, soft targets."""
    source, target = (torch.ones((pairs, length), dtype=torch.long, device=device) for length in lengths)
    batch = {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target}
    if top_k:
        tokens = target[..., None].expand(-1, -1, top_k)
        batch |= dict(zip(SOFT_TARGETS, (tokens, tokens.float()), strict=True))
    return batch
