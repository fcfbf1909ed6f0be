"""The weights of a run: those that are trained, their moving average, and those that are scored and saved."""

import copy

from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .processes import copy_weights, number_of_shards, shard


class Weights:
    """A model in each form that a run needs.

    Args:
        model: The model to train, on its device. It is sharded if the run is (FSDP2).
        compile: Whether to compile it.
        ema_decay: Decay of the moving average; None for no average.

    Attributes:
        model: The model that is trained; the optimizer has its parameters.
        wrapped: What the training step calls: `model` and, in a run of several processes, DDP around it. Autocast and
            compilation change `model` in place.
        average: The moving average of `model`, or None.
        full: The model to score or save, without DDP and not sharded: `model` itself or, if that is sharded, compiled
            or averaged, one copy of it, which each call of [`to_score`] or [`to_checkpoint`] overwrites.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, compile: bool, ema_decay: float | None):
        is_sharded = number_of_shards(accelerator.num_processes) > 1
        self.model, self.ema_decay = model, ema_decay
        self.full = copy.deepcopy(model) if is_sharded or compile or ema_decay else model
        self.average = AveragedModel(model) if ema_decay else None
        if is_sharded:
            shard(model, accelerator.mixed_precision)
            if self.average is not None:
                shard(self.average.module)
        if compile:
            # The layers of a side share one graph. As a whole, even a small model would compile for minutes.
            for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
                layer.compile(dynamic=True)
        self.wrapped = accelerator.prepare_model(model, evaluation_mode=is_sharded)  # no DDP around a sharded model
        if isinstance(self.wrapped, DistributedDataParallel):
            self.wrapped.broadcast_buffers = False  # at each step: they are tables of positions, which never change

    def update_average(self, updates: int):
        """Moves the average towards the weights, with a decay of min(`ema_decay`, (n + 1) / (n + 10)) after n updates.

        So the decay is small at first, and a short run does not average over its start. Marian uses this formula
        (src/optimizers/exponential_smoothing.cpp), and OpenNMT-py with n + 1, the number of the step, in place of n
        (`_update_average` in onmt/trainer.py). Does nothing without an average.
        """
        if self.average is not None:
            self.average.multi_avg_fn = get_ema_multi_avg_fn(min(self.ema_decay, (updates + 1) / (updates + 10)))
            self.average.update_parameters(self.model)

    def to_score(self) -> nn.Module:
        """The full model with the weights to score: the average or, without one, those that are trained."""
        copy_weights(self.model if self.average is None else self.average.module, self.full)
        return self.full

    def to_checkpoint(self) -> nn.Module:
        """The full model with the weights that are trained, for a checkpoint."""
        copy_weights(self.model, self.full)
        return self.full
