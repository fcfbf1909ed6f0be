"""The weights a run ends with: the last, the best, or the mean of several checkpoints."""

from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import nn

from .checkpoint import AVERAGE, WEIGHTS, list_checkpoints, load_weights, reading_checkpoint, step_of
from .processes import run_on_main
from .state import TrainerState, Triggers
from .weights import Weights


def final_model(weights: Weights, state: TrainerState, triggers: Triggers) -> nn.Module:
    """The full model with the final weights: the last ones, or the mean of [`final_checkpoints`].

    Overwrites and returns `weights.full`.
    """
    if state.step < triggers.max_steps:
        PartialState().print(f"early stopping after step {state.step}")
    model = weights.to_score()
    if chosen := run_on_main(final_checkpoints, state, triggers):
        load_weights(model, average_checkpoints(chosen, use_ema=weights.average is not None))
        PartialState().print(f"using the weights of {', '.join(one.name for one in chosen)}")
    return model


def final_checkpoints(state: TrainerState, triggers: Triggers) -> list[Path]:
    """The checkpoints to average into the final model, sorted by step; none to keep the weights of the last step."""
    options = triggers.options
    scheduled = scheduled_checkpoints(options.output_dir, triggers)
    saved = {step_of(checkpoint): checkpoint for checkpoint in scheduled}
    ranking = state.ranking(options.metric_for_best_model, options.greater_is_better)
    best = [saved[step] for step in ranking if step in saved]
    if options.average_checkpoints:
        chosen = best if options.average_checkpoints_by == "score" else list(reversed(saved.values()))
        return sorted(chosen[: options.average_checkpoints], key=step_of)
    return best[:1] if options.early_stopping_patience else []


def scheduled_checkpoints(output_dir: Path, triggers: Triggers) -> list[Path]:
    """The checkpoints saved on schedule, oldest first, without those saved because of the time or a signal."""
    return [checkpoint for checkpoint in list_checkpoints(output_dir) if triggers.should_save(step_of(checkpoint))]


def average_checkpoints(checkpoints: list[Path], use_ema: bool = False) -> dict[str, torch.Tensor]:
    """The mean of the weights of several checkpoints (section 6.1), in float32; UserError if one cannot be read."""
    total: dict[str, torch.Tensor] = {}
    for checkpoint in checkpoints:
        file = AVERAGE if use_ema else WEIGHTS
        with reading_checkpoint(checkpoint, file):
            for name, tensor in load_file(checkpoint / file).items():
                total[name] = total.get(name, 0) + tensor.float() / len(checkpoints)
    return total
