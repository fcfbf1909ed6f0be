"""The parts of an optimizer step: learning rate schedule, optimizer, seeds, the loss of a batch, gradient clipping.

The loss of a token is in loss_vanilla_transformer.py; the step (section 5.3) is `optimizer_step` of train.py.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import get_scheduler

from ..data.batches import SOFT_TARGETS
from ..errors import UserError
from .muon import Muon, Several
from .options import TrainingOptions

FINE_TUNING_PEAK = 4e-4  # the highest by default up to a d_model of 128; above, the model forgets more (docs/LOG.md)
WIDE_FINE_TUNING_PEAK = 0.0512  # divided by a larger d_model
MUON_PEAK = 5e-3  # the best of 3e-3, 5e-3 and 1e-2 with a d_model of 128 (docs/LOG.md)
WIDE_MUON_PEAK = 0.512  # divided by a larger d_model; with 256, 2e-3 is better than 5e-3, and above it is a guess


def inverse_square_root(step: int, warmup_steps: int) -> float:
    """The paper's schedule as a fraction of its peak (section 5.3, Equation 3): linear warm-up, then step^-0.5.

    Written out here, although transformers has it under this name, so that it can be read beside the paper. `step`
    counts from 1; the peak is at step `warmup_steps`.
    """
    warmup_steps = max(1, warmup_steps)
    return min(step / warmup_steps, math.sqrt(warmup_steps / step))


def paper_learning_rate(d_model: int, warmup_steps: int) -> float:
    """The peak of the paper's schedule, (d_model warmup_steps)^-0.5 (section 5.3)."""
    return (d_model * max(1, warmup_steps)) ** -0.5


def choose_learning_rate(options: TrainingOptions, d_model: int, before: dict) -> float:
    """The peak: `--learning_rate`, that of the resumed run, whose settings are `before`, or the default.

    Adam's default is the paper's peak or, if that is lower, the highest at which a new model of this width still
    trains after a short warm-up: 0.36 / d_model, but at most 3e-3, as in the recipes of few steps, and at least the
    paper's peak for 4,000 steps of warm-up. Widths of 32 to 512 were tried (docs/LOG.md): twice as much at 512 learns
    nothing.
    """
    if options.learning_rate is not None:
        return options.learning_rate
    if "learning_rate" in before:
        return before["learning_rate"]
    is_new = options.model_name_or_path is None
    if options.optimizer == "muon" and is_new:
        return MUON_PEAK if d_model <= 128 else WIDE_MUON_PEAK / d_model
    paper = paper_learning_rate(d_model, options.warmup_steps)
    limit = max(min(3e-3, 0.36 / d_model), paper_learning_rate(d_model, 4000))
    if not is_new:
        limit = min(FINE_TUNING_PEAK, WIDE_FINE_TUNING_PEAK / d_model)
    if paper > limit:
        why = f"--warmup_steps {options.warmup_steps} is short" if is_new else "a higher one makes the model forget"
        PartialState().print(
            f"the default learning rate is {limit:.1e} instead of (d_model x warmup_steps)^-0.5 = {paper:.1e}, as "
            f"{why}; --learning_rate sets another"
        )
    return min(paper, limit)


def learning_rate_schedule(name: str, peak: float, warmup_steps: int, max_steps: int) -> Callable[[int], float]:
    """The learning rate as a function of the step, which counts from 1; `name` is one of transformers' schedules.

    It is never 0: warm-up reaches the peak at step `warmup_steps`, and a schedule that falls to 0 would reach it at
    step `max_steps` + 1. transformers' Trainer counts steps from 0, so its first step in warm-up has a rate of 0; our
    step n has the rate of its step n + 1. `warmup_stable_decay` (Hu et al., 2024, arXiv:2404.06395) falls as Hägele et
    al. (2024, arXiv:2405.18392) found best, in the last fifth.
    """
    if name == "inverse_sqrt":
        return lambda step: peak * inverse_square_root(step, warmup_steps)
    # transformers returns a scheduler that drives an optimizer; only its function of the step is needed.
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=peak)
    warmup_steps, more = max(1, warmup_steps), {}
    if name == "warmup_stable_decay":
        more = {"num_decay_steps": min(-(-max_steps // 5), max_steps + 1 - warmup_steps), "decay_type": "1-sqrt"}
    scheduler = get_scheduler(name, unused, warmup_steps, max_steps + 1, scheduler_specific_kwargs=more)
    return lambda step: peak * scheduler.lr_lambdas[0](step)


def count_steps(options: TrainingOptions, batches, batches_per_step: int, done: int) -> int:
    """The optimizer steps of the run, from `max_steps` or epochs, which are also printed.

    Raises UserError if more are `done` already.
    """
    count = options.max_steps or math.ceil(options.num_train_epochs * len(batches.epoch()) / batches_per_step)
    if count < done:
        remedy = "raise --max_steps or --num_train_epochs"
        raise UserError(f"The run ends at step {count}, but checkpoint-{done} is past it; {remedy}.")
    PartialState().print(f"steps {done:,} to {count:,}, learning rate up to {options.learning_rate:.2e}")
    if count < options.warmup_steps and options.lr_scheduler_type != "constant":
        PartialState().print("warning: the run ends during warm-up; lower --warmup_steps, or train longer.")
    return count


def make_optimizer(model: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """AdamW with the betas and epsilon of section 5.3 by default; no weight decay on biases and norms.

    With `--optimizer muon`, the matrices of the layers, but not the embeddings, have Muon.
    """
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    in_layers = {name for name, p in weights.items() if ".layers." in name and p.ndim == 2}
    for_muon = in_layers if options.optimizer == "muon" else set()
    decayed = [p for name, p in weights.items() if p.ndim > 1 and name not in for_muon]
    not_decayed = [p for p in weights.values() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    betas, lr = (options.adam_beta1, options.adam_beta2), 0.0  # set every step
    adam = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=options.adam_epsilon, fused=True)
    if options.optimizer == "adamw":
        return adam
    matrices = [weights[name] for name in sorted(for_muon)]
    return Several(Muon(matrices, lr=lr, weight_decay=options.weight_decay), adam)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float):
    """Sets the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def seed_batch(seed: int, batch_number: int):
    """Makes the dropout of a batch a pure function of (seed, batch number), so that no generator state is saved."""
    torch.manual_seed(np.random.SeedSequence([seed, batch_number]).generate_state(1, np.uint64).item() >> 1)


def count_tokens(batches: list[dict], accelerator: Accelerator) -> torch.Tensor:
    """Token counts (3,) of these batches on all processes: target, source, and both sides including padding."""
    target = sum((batch["labels"] != -100).sum() for batch in batches)
    source = sum(batch["attention_mask"].sum() for batch in batches)
    padded = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in batches)
    counts = torch.stack([target, source, torch.full_like(target, padded)]).float()
    # CUDA copies unpinned memory to a buffer of its own before it returns, so the host need not wait for the device.
    return accelerator.reduce(counts.to(accelerator.device, non_blocking=accelerator.device.type == "cuda"))


def compute_loss(
    model: nn.Module, batch: dict, num_tokens: torch.Tensor | int, options: TrainingOptions
) -> torch.Tensor:
    """Label-smoothed cross-entropy (section 5.4) of a batch, summed and divided by `num_tokens`, in nats: ().

    `num_tokens` counts the target tokens of the whole optimizer step, so that the losses of its batches add up. With
    `--teacher`, a share of the loss is distillation. `--r_drop_alpha` adds R-Drop (Liang et al., 2021): each pair is
    read twice with different dropout, and the result is half the loss of its Equation 4, that is, the mean loss of
    both passes plus `alpha` / 2 times the mean of both KL divergences.
    """
    if options.r_drop_alpha:
        batch = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
        num_tokens = 2 * num_tokens
    inputs = {name: tensor for name, tensor in batch.items() if name not in SOFT_TARGETS}
    soft_targets = None
    if options.teacher:
        tokens, probabilities = (batch[name] for name in SOFT_TARGETS)
        temperature = options.distillation_temperature
        # Divided by the largest first, so that no power underflows; padding stays 0. The rest of V gets 0.
        softened = functional.normalize(probabilities, p=math.inf, dim=-1) ** (1 / temperature)
        softened = functional.normalize(softened, p=1, dim=-1)
        soft_targets = (tokens, softened, options.distillation_weight, temperature)
    output = model(
        **inputs,
        soft_targets=soft_targets,
        label_smoothing=options.label_smoothing_factor,
        r_drop_alpha=options.r_drop_alpha,
        num_items_in_batch=num_tokens,
        output_logits=False,
    )
    return output.loss


def lowest_loss(options: TrainingOptions, vocab_size: int) -> float | None:
    """The lowest possible training loss, the entropy of the smoothed targets in nats; None with a teacher."""
    if options.teacher:
        return None
    targets = torch.full((vocab_size,), options.label_smoothing_factor / vocab_size)
    targets[0] += 1 - options.label_smoothing_factor
    return torch.special.entr(targets).sum().item()


def clip_grad_norm(model: nn.Module, optimizer, max_norm: float, accelerator: Accelerator) -> torch.Tensor:
    """Clips the gradient norm at `max_norm` unless that is 0; returns the norm () before clipping, over all shards.

    For a step that float16 skips, the norm is 0.
    """
    accelerator.unscale_gradients(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if accelerator.scaler is not None:  # infinite while float16 searches for its loss scale
        norm = norm.nan_to_num(0.0, posinf=0.0)
    return norm.to(accelerator.device)
