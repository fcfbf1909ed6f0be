"""Checkpoints `checkpoint-N`: loadable model directories that also hold optimizer, moving average and trainer state.

Each is complete, whenever the run is killed.
"""

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TypedDict, get_type_hints

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..errors import UserError, explaining, one_line
from ..files import copy_permissions, new_folder, write_text
from .processes import run_on_main
from .state import TrainerState
from .weights import Weights

STATE = "trainer_state.json"  # transformers' Trainer also writes such a file
OPTIMIZER = "optimizer.safetensors"  # only our checkpoints have it
WEIGHTS = "model.safetensors"
AVERAGE = "ema.safetensors"
ON_MAIN = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(output_dir: Path, weights: Weights, optimizer: AcceleratedOptimizer, tokenizer, state: TrainerState):
    """Writes a checkpoint on the main process; every process must call it, to gather what is sharded.

    The optimizer state is saved by parameter name, so that any number of processes can load it.

    Raises OSError if it cannot be written; the previous checkpoints are intact.
    """
    model = weights.to_checkpoint()
    optimizer_state = get_optimizer_state_dict(weights.model, optimizer.optimizer, options=ON_MAIN)
    average = None
    if weights.average is not None:
        average = get_model_state_dict(weights.average.module, options=ON_MAIN)
    state.stream = gather_object(state.stream or [])  # each process reads other parts of a stream
    state.scaler = {} if optimizer.scaler is None else optimizer.scaler.state_dict()

    def write():
        """Called on the main process, with the gathered tensors."""
        folder = output_dir / f"checkpoint-{state.step}"
        try:
            with new_folder(folder) as temporary:
                model.save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
                save_file(named_moments(optimizer_state), temporary / OPTIMIZER)
                if average is not None:  # each tied weight once
                    tensors = {name: average[name] for name, _ in model.named_parameters()}
                    save_file(tensors, temporary / AVERAGE)
                write_text(temporary / STATE, json.dumps(asdict(state), indent=1))
                copy_permissions(temporary)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{folder} could not be written: {one_line(error)}") from error

    run_on_main(write)


def named_moments(optimizer_state: dict) -> dict[str, torch.Tensor]:
    """The moments of an optimizer as a flat dictionary, by the name of the weight and of the moment."""
    parts = optimizer_state["state"].items()
    return {f"{name}/{key}": value for name, part in parts for key, value in part.items()}


def reading_checkpoint(checkpoint: Path, file: str) -> AbstractContextManager:
    """Turns the error of a missing, damaged or foreign file of a checkpoint into a UserError."""
    kinds = (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError, StrictDataclassError)
    remedy = "delete this checkpoint to resume from an older one"
    return explaining(f"{checkpoint} cannot be read: {file}", *kinds, remedy=remedy)


def load_state(checkpoint: Path) -> TrainerState:
    """The trainer state of a checkpoint. Raises UserError if it cannot be read."""
    foreign = explaining(f"{checkpoint} was not written by this version of train.py: {STATE}", TypeError)
    with reading_checkpoint(checkpoint, STATE), foreign:
        state = TrainerState(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
        validate_typed_dict(TypedDict("State", get_type_hints(TrainerState)), vars(state))
        return state


def load_tensors(checkpoint: Path, state: TrainerState, weights: Weights, optimizer: AcceleratedOptimizer):
    """Loads weights, moving average, optimizer state and loss scale of a checkpoint, whose `state` is known.

    Raises UserError if a file cannot be read or does not fit the model, or if there is no moving average.
    """
    if weights.average is not None and not (checkpoint / AVERAGE).exists():
        raise UserError(f"{checkpoint} was written without --ema_decay; leave that option out.")
    with reading_checkpoint(checkpoint, WEIGHTS):
        load_weights(weights.model, load_file(checkpoint / WEIGHTS))
    if weights.average is not None:
        with reading_checkpoint(checkpoint, AVERAGE):
            load_weights(weights.average.module, load_file(checkpoint / AVERAGE))
        weights.average.n_averaged.fill_(state.step)
    with reading_checkpoint(checkpoint, OPTIMIZER):
        load_optimizer(weights.model, optimizer.optimizer, load_file(checkpoint / OPTIMIZER))
    if state.scaler and optimizer.scaler is not None:
        optimizer.scaler.load_state_dict(state.scaler)


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor]):
    """Copies `weights`, in which tied weights appear once, into a model, sharded or not.

    Raises ValueError, naming the weight, if one is missing, unknown or of another shape.
    """
    check_tensors(weights, dict(model.named_parameters()))
    options = StateDictOptions(full_state_dict=True, strict=False)  # not strict: tied weights have further names
    set_model_state_dict(model, weights, options=options)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, moments: dict[str, torch.Tensor]):
    """Copies the `moments`, named as by [`named_moments`], into the optimizer of a model, sharded or not.

    Raises ValueError, naming the moment, if one is missing, unknown or of another shape.
    """
    state = get_optimizer_state_dict(model, optimizer)
    check_tensors(moments, named_moments(state))
    state["state"] = {}
    for key, tensor in moments.items():
        name, _, moment = key.rpartition("/")
        state["state"].setdefault(name, {})[moment] = tensor
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def check_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]):
    """Raises ValueError, naming one, unless both have floating-point tensors of the same names and shapes.

    Fused AdamW trusts the shapes of its moments, and would write past the end of a smaller one.
    """
    if wrong := found.keys() ^ expected.keys():
        name = min(wrong)
        raise ValueError(f"'{name}' is {'missing' if name in expected else 'not a weight of this model'}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape or not tensor.is_floating_point():
            given, shape = f"{tuple(tensor.shape)} and {tensor.dtype}", tuple(expected[name].shape)
            raise ValueError(f"'{name}' is a tensor of {given}, but the model needs floating-point numbers of {shape}")


def step_of(checkpoint: Path) -> int:
    """The number in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first."""
    folders = output_dir.glob("checkpoint-*")
    return sorted((path for path in folders if re.fullmatch(r"checkpoint-\d+", path.name)), key=step_of)
