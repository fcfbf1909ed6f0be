"""The memory that is free, and whether a model and a step of its training fit into it."""

import contextlib
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, get_cpu_distributed_information

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .options import TrainingOptions
from .processes import number_of_shards

COPIES = 3  # of the weights, beside themselves: their gradients and Adam's two moments
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


def check_model_fits(config: VanillaTransformerConfig):
    """Raises UserError if the weights, gradients and moments do not fit into the free memory of this machine."""
    with torch.device("meta"):
        parameters = VanillaTransformerForConditionalGeneration(config).num_parameters()
    needed, free = 4 * (1 + COPIES) * parameters, free_memory()
    if needed > free:
        raise UserError(
            f"A model of {parameters:,} parameters takes {needed / 2**30:,.1f} GiB, more than the "
            f"{free / 2**30:,.1f} GiB that are free; choose smaller sizes, such as --d_model."
        )


def activation_bytes(config: VanillaTransformerConfig, pairs: int, length: int, is_checkpointing: bool = False) -> int:
    """Approximate bytes of float32 activations that a forward pass of `pairs`, with `length` tokens a side, keeps.

    The numbers of tensors of each size are measured, as in section 4.1 of Korthikanti et al. (2022, arXiv:2205.05198);
    only the eager backend keeps the attention of all tokens to all tokens. With gradient checkpointing, the inputs of
    all layers are kept, and the activations of one layer at a time.
    """
    d, tokens, counts = config.d_model, pairs * length, (config.encoder_layers, config.decoder_layers)
    features = 9 * d + 2 * config.encoder_ffn_dim, 15 * d + 2 * config.decoder_ffn_dim
    heads = config.encoder_attention_heads, 2 * config.decoder_attention_heads
    scores = length if config._attn_implementation == "eager" else 0
    layers = [tokens * (width + scores * count) for width, count in zip(features, heads, strict=True)]
    if is_checkpointing:
        return 4 * (tokens * d * sum(counts) + max(layers))
    return 4 * sum(count * layer for count, layer in zip(counts, layers, strict=True))


def step_bytes(
    model: VanillaTransformerForConditionalGeneration,
    options: TrainingOptions,
    pairs: int,
    length: int,
    accelerator: Accelerator,
) -> int:
    """Approximate bytes that a training step of `pairs`, with `length` tokens a side, takes beside the weights."""
    copies = COPIES / number_of_shards(accelerator.num_processes) + 2 * bool(options.ema_decay)
    pairs *= 2 if options.r_drop_alpha else 1
    activations = activation_bytes(model.config, pairs, length, bool(options.gradient_checkpointing))
    return round(4 * copies * model.num_parameters()) + activations


def free_bytes(accelerator: Accelerator) -> int:
    """Bytes that this process may still take on its device."""
    if accelerator.device.type == "cuda":
        free = torch.cuda.mem_get_info(accelerator.device)[0]  # and what torch keeps for itself, but does not use
        return free + torch.cuda.memory_reserved(accelerator.device) - torch.cuda.memory_allocated(accelerator.device)
    return free_memory() // get_cpu_distributed_information().local_world_size  # the processes of a machine share it


def step_fits(model, options: TrainingOptions, longest: int, accelerator: Accelerator) -> bool:
    """Whether a step with pairs of `longest` tokens may be tried; prints a warning if memory is probably too small.

    On a GPU, it may be tried in any case: a step that does not fit is an error there, while on a CPU the system kills
    the run.
    """
    needed = step_bytes(model, options, max(1, options.per_device_train_max_tokens // longest), longest, accelerator)
    free = free_bytes(accelerator)
    fits = all(gather_object([needed <= free]))
    if not fits:
        accelerator.print(
            f"warning: a step with pairs of {longest:,} tokens takes about {needed / 2**30:,.1f} GiB of memory, and "
            f"{free / 2**30:,.1f} GiB are free; lower --per_device_train_max_tokens, the limits of lengths, or the "
            "sizes of the model."
        )
    return fits or accelerator.device.type == "cuda"
