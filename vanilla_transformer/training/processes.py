"""Several processes: run something once, copy the model to each of them or shard it over them (FSDP2)."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
)
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..data.options import DataOptions
from ..errors import UserError, explaining, one_line
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..sentences_vanilla_transformer import InputError
from .options import TrainingOptions
from .signals import Stopped, StoppedAtOnce

LONGEST_FOLDER = 70  # bytes of a temporary folder; a socket in it has 32 more, and 104 at most
# Variables that `accelerate launch` sets to ask for what train.py does not do.
UNSUPPORTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed is not supported; use FSDP2 (accelerate launch --config_file "
    "recipes/accelerate/fsdp2.yaml), or Seq2SeqTrainer as in docs/scaling.md.",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM is not supported; use FSDP2 (accelerate launch --config_file "
    "recipes/accelerate/fsdp2.yaml).",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config is not supported; leave it out.",
    "FSDP_OFFLOAD_PARAMS": "fsdp_offload_params is not supported; leave it out.",
    "FSDP_ACTIVATION_CHECKPOINTING": "fsdp_activation_checkpointing is not supported; give train.py "
    "--gradient_checkpointing instead.",
}


def make_accelerator(options: TrainingOptions) -> Accelerator:
    """Accelerate as it was launched, with the trackers of `--report_to`.

    Raises UserError if the launcher was told something that train.py does not do, its processes do not know of each
    other, or a tracker does not exist or is not installed.
    """
    check_launch()
    trackers = [name for name in options.report_to.split(",") if name != "none"]
    timeout = InitProcessGroupKwargs(timeout=timedelta(hours=24))  # the main process may tokenize for hours
    steps = GradientAccumulationPlugin(num_steps=1)  # otherwise `backward` divides by what the environment says
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)  # gradients need no second buffer
    what = f" with --report_to {options.report_to}" if trackers else ""
    is_left_over = "LOCAL_RANK" in os.environ and "WORLD_SIZE" not in os.environ
    remedy = "unset LOCAL_RANK, which only a launcher sets, together with others" if is_left_over else ""
    with explaining(f"Accelerate cannot start{what}", ValueError, remedy=remedy):
        accelerator = Accelerator(
            log_with=trackers or None,
            project_dir=options.output_dir,
            gradient_accumulation_plugin=steps,
            kwargs_handlers=[timeout, views],
        )
    for name in trackers:
        if name not in map(str, accelerator.log_with) and (name != "all" or not accelerator.log_with):
            raise UserError(f"--report_to {name} is not installed; install it, or choose another tracker.")
    is_cpu, launched = accelerator.device.type == "cpu", int(os.environ.get("WORLD_SIZE", "1"))
    if launched > accelerator.num_processes:
        remedy = "as there is no GPU, set ACCELERATE_USE_CPU=true" if is_cpu else "use accelerate launch or torchrun"
        error = UserError(f"{launched} processes were started that do not know of each other; {remedy}.")
        error.is_shared = True  # see exit_on_error
        raise error
    if is_cpu and options.per_device_train_max_tokens is None:
        raise UserError("--per_device_train_max_tokens auto needs a GPU; give a number.")
    if is_cpu and accelerator.mixed_precision == "fp16":
        raise UserError("--mixed_precision fp16 needs a GPU; on a CPU, give accelerate launch bf16 or no.")
    if "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        print("warning: accelerate launch was told several processes but started one; see docs/scaling.md.")
    return accelerator


def check_launch():
    """Raises UserError if `accelerate launch` was told what train.py does not do."""
    for name, message in UNSUPPORTED.items():
        if parse_flag_from_env(name):
            raise UserError(message)
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION") != "2":
        raise UserError("FSDP 1 is not supported; set fsdp_version: 2 in Accelerate's config file.")
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        raise UserError("--mixed_precision fp8 is not supported; give accelerate launch bf16.")


def check_temporary_folder(data_options: DataOptions, device: torch.device):
    """Raises UserError if the sockets of workers, which are in the temporary folder, would have too long a path: the
    run would wait for them for ever."""
    folder, remedies = tempfile.gettempdir(), []
    if data_options.loading_workers(device.type == "cuda"):
        remedies.append("give --dataloader_num_workers 0")
    if data_options.preprocessing_num_workers:
        remedies.append("leave out --preprocessing_num_workers")
    if remedies and os.name == "posix" and len(os.fsencode(folder)) > LONGEST_FOLDER:
        raise UserError(
            f"TMPDIR is {folder}, a longer path than the sockets of data workers may have; set TMPDIR to one of at "
            f"most {LONGEST_FOLDER} characters, such as /tmp, or {' and '.join(remedies)}."
        )


def run_on_main(function: Callable, *args, **kwargs):
    """Calls the function on the main process and returns its result, or raises its exception, on all processes."""
    result = None
    if PartialState().is_main_process:
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # whatever it is: the other processes are waiting for the result
            result = error
    result = broadcast_object_list([result])[0]
    if isinstance(result, Exception):
        result.is_shared = True  # see exit_on_error
        raise result
    return result


def check_same_everywhere(name: str, value):
    """Raises UserError on all processes, with the `name` of the value, if it differs between them."""
    if any(other != value for other in gather_object([value])):
        raise UserError(f"{name} is not the same on all machines; let them share a disk.")


def number_of_shards(num_processes: int) -> int:
    """The number of processes that the model is sharded over; 1 unless launched with FSDP."""
    return num_processes if parse_flag_from_env("ACCELERATE_USE_FSDP") else 1


def shard(model: VanillaTransformerForConditionalGeneration, mixed_precision: str = "no"):
    """Shards each layer, then the rest of the model, over all processes.

    With a `mixed_precision` of bf16, weights are exchanged in bfloat16, half as many bytes, and gradients in float32,
    so that their sum is not rounded.

    Accelerate's own wrapping is not used: it puts input and output embeddings into one FSDP group, and fails when it
    meets the same tied matrix in the decoder's group.
    """
    policy = MixedPrecisionPolicy()
    if mixed_precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        fully_shard(layer, mp_policy=policy)
    # The model reads token counts and teachers' probabilities, which must not be rounded.
    fully_shard(model, mp_policy=replace(policy, cast_forward_inputs=False))


def copy_weights(source: nn.Module, target: nn.Module):
    """Copies weights to a model of the same architecture, sharded or not; does nothing if both are the same object."""
    if source is not target:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(target, get_model_state_dict(source, options=options), options=options)


def end_processes(accelerator: Accelerator):
    """Ends the trackers and the process group.

    The destructor of the process group holds the GIL while it waits for gloo's threads, which need the GIL to finish
    (https://github.com/pytorch/pytorch/issues/56297). So the threads get a moment before.
    """
    time.sleep(0.1)
    accelerator.end_training()


@contextlib.contextmanager
def exit_on_error():
    """Prints an expected exception as one sentence on stderr, and exits with a status.

    An error that all processes share is printed once per machine.
    """
    status, is_shared = 2, False
    # Launchers end all processes when one exits, so the first process of a machine prints errors that all share and
    # exits first; the others wait. A process that still runs then prints an error of its own.
    is_first = os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        yield
        return
    except Stopped as stopped:
        message, status, is_shared = str(stopped), stopped.exit_status, True
    except StoppedAtOnce as stopped:
        if is_first:
            tell(STOPPED)
        os._exit(stopped.exit_status)  # sys.exit waits for workers, which may be what hangs
    except KeyboardInterrupt as stopped:
        message, status = str(stopped) or STOPPED, 130
    except (InputError, StrictDataclassError) as error:  # the latter for a wrong value in the model's config
        message, is_shared = f"error: {one_line(error)}", hasattr(error, "is_shared")
    except (OSError, SafetensorError) as error:  # a full disk, say
        while_doing = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        message = f"error: {error}{while_doing}{getattr(error, 'remedy', '')}"
        is_shared = hasattr(error, "is_shared")
    if not is_first:
        time.sleep(3)
    if is_first or not is_shared:
        tell(message)
    time.sleep(0.1)  # for gloo, see end_processes
    sys.exit(status)


STOPPED = "stopped; resume from the newest checkpoint, if there is one, with --resume_from_checkpoint"


def tell(message: str):
    print(f"train.py: {message}", file=sys.stderr, flush=True)
