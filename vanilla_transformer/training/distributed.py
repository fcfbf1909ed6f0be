"""A model in training with all that changes at a step, on one process, copied to several, or sharded over them."""

import copy
import os
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..training.checkpoint import Checkpoint
from ..training.optimization import RunState, Step, make_optimizer, optimizer_step


class Learner:
    """The model, its optimiser and, with `--ema_decay`, the moving average of its weights.

    On several processes the model is copied to each (DistributedDataParallel), or sharded over them (FSDP2), if that
    is what Accelerate was launched with; weights, losses and checkpoints are the same. A sharded model is evaluated
    and saved by a whole copy on each process, since processes translate sentences of different lengths.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration, args, accelerator):
        self.args = args
        self.accelerator = accelerator
        self.model = model
        self.is_sharded = number_of_shards(accelerator) > 1
        # What is evaluated and saved: the model itself, or a copy that is given its weights first.
        needs_copy = self.is_sharded or args.ema_decay or args.torch_compile
        self.whole = copy.deepcopy(model) if needs_copy else model
        if self.is_sharded:
            shard(model)
        if args.torch_compile:
            model.compile(dynamic=True)
        optimizer = make_optimizer(model, args)
        begin_moments(model, optimizer)
        self.average = MovingAverage(model, args.ema_decay) if args.ema_decay else None
        # What is sharded already is only given its mixed precision, as models that are evaluated are.
        self.wrapped = accelerator.prepare_model(model, evaluation_mode=self.is_sharded)
        self.optimizer = accelerator.prepare_optimizer(optimizer)

    def step(self, batches: list[dict], learning_rate: float, state: RunState) -> Step:
        """Updates the weights once, by the batches of all processes from number `state.position` on."""
        self.wrapped.train()
        first = state.position
        sums = optimizer_step(self.wrapped, self.optimizer, batches, first, learning_rate, self.args, self.accelerator)
        if self.average is not None:
            self.average.update(self.model)
        state.advance(len(batches) * self.accelerator.num_processes)
        return Step(state.step, first, learning_rate, sums)

    def scored(self) -> VanillaTransformerForConditionalGeneration:
        """A whole model with the weights that count: their moving average, if there is one."""
        if self.average is not None:
            load_weights(self.whole, self.average.whole())
        elif self.whole is not self.model:
            load_weights(self.whole, whole_weights(self.model))
        return self.whole

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, state: RunState):
        """Writes a checkpoint; every process must call it, and the main one writes."""
        if self.whole is not self.model:
            load_weights(self.whole, whole_weights(self.model))
        average = None if self.average is None else {k: v.cpu() for k, v in self.average.whole().items()}
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        moments = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=options)
        state.scaler = {} if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()

        def write():  # on the main process, which alone is given the moments
            Checkpoint(folder).write(self.whole, tokenizer, moments["state"], average, state)

        by_main_process(self.accelerator, write)

    def load(self, checkpoint: Checkpoint) -> RunState:
        """Puts weights, optimiser, average and scaler back as [`Learner.save`] found them; returns the run's state.

        Raises:
            UserError: The folder is no whole checkpoint, or is one of another model.
        """
        with checkpoint.explaining():
            state = checkpoint.state()
            checkpoint.refuse_other_config(self.model.config)
            load_weights(self.model, checkpoint.weights())
            self.load_moments(checkpoint.moments())
            if self.average is not None:
                self.average.load(checkpoint.weights(is_average=True), is_empty=state.step == 0)
        if state.scaler and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state.scaler)
        return state

    def load_moments(self, saved: dict[str, dict[str, torch.Tensor]]):
        """Puts Adam's moments back; raises ValueError if one is missing or of another shape."""
        optimizer = self.optimizer.optimizer
        now = get_optimizer_state_dict(self.model, optimizer)
        for name, moments in now["state"].items():
            if name not in saved or saved[name]["exp_avg"].shape != moments["exp_avg"].shape:
                raise ValueError(f"the optimiser's state of '{name}' is missing or of another shape.")
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, optimizer, {**now, "state": saved}, options=options)


def by_main_process(accelerator, function, *arguments):
    """What the function returns on the main process, on all of them; so is what it raises, marked as found by all."""
    result = None
    if accelerator.is_main_process:
        try:
            result = function(*arguments)
        except Exception as error:  # whatever it is, the others wait for an answer
            error.is_found_by_all = True
            result = error
    result = broadcast_object_list([result])[0]
    if isinstance(result, Exception):
        raise result
    return result


def begin_moments(model: nn.Module, optimizer: torch.optim.Optimizer):
    """Makes Adam's moments, which are 0 before the first step, so that they can be saved there.

    torch makes them when they are asked for, by a step that learns nothing but is counted.
    """
    get_optimizer_state_dict(model, optimizer)
    for moments in optimizer.state.values():
        moments["step"].zero_()


class MovingAverage:
    """The exponential moving average of a model's weights, of which each process holds its shard."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.is_empty = True

    @torch.no_grad()
    def update(self, model: nn.Module):
        """Moves by 1 - decay to the weights; the first ones are taken as they are."""
        ours = [local(weight) for weight in self.weights.values()]
        torch._foreach_lerp_(ours, [local(p) for p in model.parameters()], 1.0 if self.is_empty else 1 - self.decay)
        self.is_empty = False

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: full(weight) for name, weight in self.weights.items()}

    def load(self, weights: dict[str, torch.Tensor], is_empty: bool = False):
        copy_weights(self.weights, weights)
        self.is_empty = is_empty


# ------------------------------------------------------------------------------------------------------------- weights


def check_launch():
    """Raises UserError if Accelerate was launched to shard models in another way than FSDP2 does.

    Its environment is asked, as it does not shard on CPUs itself, and DeepSpeed need not be there to be refused.
    """
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise UserError(
            "DeepSpeed is not supported, which steps and saves in its own way; take FSDP2, which shards the same by "
            "--config_file recipes/accelerate/fsdp2.yaml, or Seq2SeqTrainer as docs/scaling.md shows it."
        )
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError("FSDP 1 is not supported; set fsdp_version: 2 in the file of Accelerate, or --fsdp_version 2.")


def number_of_shards(accelerator) -> int:
    """Over how many processes the model is sharded; 1, unless Accelerate was launched with FSDP."""
    return accelerator.num_processes if parse_flag_from_env("ACCELERATE_USE_FSDP") else 1


def shard(model: VanillaTransformerForConditionalGeneration):
    """Shards each layer, then what is left, over all processes.

    Not left to Accelerate, which puts input and output embeddings into one group and finds the same matrix as that of
    the decoder in another.
    """
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        fully_shard(layer)
    fully_shard(model)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights by name, each shared one once, gathered from all processes if they are sharded."""
    return {name: full(parameter.detach()) for name, parameter in model.named_parameters()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor]):
    """Copies `weights` into the parameters; raises ValueError that names a missing, unknown or wrongly shaped one."""
    copy_weights(dict(model.named_parameters()), weights)


@torch.no_grad()
def copy_weights(ours: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]):
    """Copies `weights` into tensors of the same names, sharded or not; raises ValueError as [`load_weights`] does."""
    for name in sorted(ours.keys() ^ weights.keys()):
        raise ValueError(f"'{name}' is {'missing' if name in ours else 'no parameter of this model'}.")
    for name, weight in ours.items():
        if weight.shape != weights[name].shape:
            raise ValueError(f"'{name}' has shape {list(weights[name].shape)}, not {list(weight.shape)}.")
        theirs = weights[name]
        if isinstance(weight, DTensor):
            theirs = distribute_tensor(theirs.to(weight.device), weight.device_mesh, weight.placements)
        weight.copy_(theirs)
