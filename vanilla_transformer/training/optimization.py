"""The parts of an optimizer step: learning rate schedule, AdamW, seeds, R-Drop, gradient clipping (section 5.3).

The loss itself is in loss_vanilla_transformer.py; the step is in the loop of train.py.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import get_scheduler


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


def learning_rate_schedule(name: str, peak: float, warmup_steps: int, max_steps: int) -> Callable[[int], float]:
    """The learning rate as a function of the step, which counts from 1; `name` is one of transformers' schedules."""
    if name == "inverse_sqrt":
        return lambda step: peak * inverse_square_root(step, warmup_steps)
    # transformers returns a scheduler that drives an optimizer; only its function of the step is needed.
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=peak)
    scheduler = get_scheduler(name, unused, num_warmup_steps=warmup_steps, num_training_steps=max_steps)
    factor = scheduler.lr_lambdas[0]
    return lambda step: peak * factor(step)


def make_optimizer(model: nn.Module, args) -> torch.optim.AdamW:
    """AdamW with the betas and epsilon of section 5.3 by default; no weight decay on biases and norms."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    not_decayed = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=args.adam_epsilon, fused=True)  # lr is set every step


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float):
    """Sets the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def seed_batch(seed: int, batch_number: int):
    """Makes the dropout of a batch a pure function of (seed, batch number), so that no generator state is saved."""
    torch.manual_seed(int(np.random.SeedSequence([seed, batch_number]).generate_state(1, np.uint64)[0] >> 1))


def count_tokens(batches: list[dict], accelerator: Accelerator) -> torch.Tensor:
    """Token counts (3,) of these batches on all processes: target, source, and both sides including padding."""
    counts = [
        (
            (batch["labels"] != -100).sum(),
            batch["attention_mask"].sum(),
            batch["input_ids"].numel() + batch["labels"].numel(),
        )
        for batch in batches
    ]
    return accelerator.reduce(torch.tensor(counts, dtype=torch.float32).sum(dim=0).to(accelerator.device))


def compute_loss(model: nn.Module, batch: dict, num_tokens: torch.Tensor | int, args) -> torch.Tensor:
    """Label-smoothed cross-entropy (section 5.4) of a batch, summed and divided by `num_tokens`; () in nats.

    `num_tokens` counts the target tokens of the whole optimizer step, so that the losses of its batches add up. With
    `--r_drop_alpha`, R-Drop is added.
    """
    if args.r_drop_alpha:
        return r_drop_loss(model, batch, args.r_drop_alpha, args.label_smoothing_factor, num_tokens)
    return model(**batch, label_smoothing=args.label_smoothing_factor, num_items_in_batch=num_tokens).loss


def r_drop_loss(
    model: nn.Module, batch: dict, alpha: float, label_smoothing: float, num_tokens: torch.Tensor | int
) -> torch.Tensor:
    """Half the loss of R-Drop (Liang et al., 2021, Equation 4), so that `alpha` 0 gives the ordinary loss.

    Each pair is read twice with different dropout. The mean of the two cross-entropies is added to `alpha` / 2 times
    the mean of the two Kullback-Leibler divergences between the predicted distributions.
    """
    labels = batch["labels"].repeat(2, 1)
    kept = labels != -100
    decoder_input_ids = getattr(model, "module", model).prepare_decoder_input_ids_from_labels(labels)
    logits = model(
        input_ids=batch["input_ids"].repeat(2, 1),
        attention_mask=batch["attention_mask"].repeat(2, 1),
        decoder_input_ids=decoder_input_ids,
        use_cache=False,
    ).logits[kept]  # (2N,V)
    logits = logits.float()
    entropy = functional.cross_entropy(logits, labels[kept], reduction="sum", label_smoothing=label_smoothing) / 2
    p, q = logits.log_softmax(dim=-1).chunk(2)  # (N,V)
    divergence = functional.kl_div(p, q, reduction="sum", log_target=True)
    divergence = (divergence + functional.kl_div(q, p, reduction="sum", log_target=True)) / 2
    return (entropy + alpha / 2 * divergence) / num_tokens


def clip_grad_norm(model: nn.Module, optimizer, max_norm: float, accelerator: Accelerator) -> torch.Tensor:
    """Clips the gradient norm at `max_norm` unless that is 0; returns the norm before clipping, over all shards."""
    accelerator.unscale_gradients(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if accelerator.scaler is not None:  # float16 is searching for its loss scale; the optimizer skips such a step
        norm = norm.nan_to_num(0.0, posinf=0.0)
    return norm.to(accelerator.device)
