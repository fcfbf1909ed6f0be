"""What a training run is made of: the schedule, the optimiser and its step, and where a run is."""

import contextlib
import ctypes
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import PreTrainedModel, get_scheduler

from ..errors import UserError

# ------------------------------------------------------------------------------------------------------------ schedule


def inverse_square_root(step: int, warmup_steps: int) -> float:
    """The paper's schedule as a share of its peak (section 5.3, Equation 3): linear warm-up, then step^-0.5.

    transformers has it too, by this name; it stands here for all to see.

    Equation 3 peaks at step `warmup_steps`, at (d_model warmup_steps)^-0.5. `step` counts from 1.
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
    # transformers hands out a schedule only with an optimiser to drive; what is wanted is its function of the step.
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=peak)
    try:
        scheduler = get_scheduler(name, unused, num_warmup_steps=warmup_steps, num_training_steps=max_steps)
    except ValueError as error:
        raise UserError(f"--lr_scheduler_type {name} with --learning_rate {peak}: {error}") from error
    factor = scheduler.lr_lambdas[0]
    return lambda step: peak * factor(step)


# -------------------------------------------------------------------------------------------------- optimiser and step


def make_optimizer(model: nn.Module, args) -> torch.optim.AdamW:
    """AdamW with the betas and epsilon of section 5.3 by default; weight decay spares biases and norms."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    spared = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    # The learning rate is set at each step.
    return torch.optim.AdamW(
        groups, lr=0.0, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon, fused=True
    )


def keep_freed_memory():
    """Makes glibc keep the memory of freed tensors instead of mapping it anew, and zeroed, at every step.

    Work on a CPU spends much of its time on that. Elsewhere than on glibc it does nothing.
    """
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_top_pad, 2**28)


def seed_batch(seed: int, number: int):
    """Makes the dropout of a batch a pure function of (seed, number of the batch), so that no generator is saved."""
    torch.manual_seed(int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1))


def optimizer_step(
    model, optimizer, batches: list[dict], first: int, learning_rate: float, args, accelerator
) -> torch.Tensor:
    """Updates the weights once by the batches of this and all other processes, as if they were one big batch.

    The loss is the sum over the real target tokens of all of them divided by their number. `first` is the number of
    the first batch of the step, of all processes. Returns a tensor of 5: the sum of the loss (nats), the real target
    tokens, the real source tokens, both with padding, over all processes, and the norm of the gradient.
    """
    counts = torch.tensor([count_tokens(batch) for batch in batches], dtype=torch.float32).sum(dim=0)
    counts = accelerator.reduce(counts.to(accelerator.device))
    target_tokens = counts[0].clamp(min=1)
    loss = torch.zeros((), device=accelerator.device)
    for index, batch in enumerate(batches):
        seed_batch(args.seed, first + index * accelerator.num_processes + accelerator.process_index)
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        # Processes exchange their gradients once, with the last batch.
        is_last = index == len(batches) - 1
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            part = loss_of(model, batch, target_tokens, args)
            # They average them; times the number of processes, it is the sum.
            accelerator.backward(part * accelerator.num_processes)
        loss += part.detach()
    grad_norm = clip_grad_norm(model, optimizer, args.max_grad_norm, accelerator)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.scaler is not None:  # float16 looks for its scale: the step was skipped, and nothing is wrong
        grad_norm = grad_norm.nan_to_num(0.0, posinf=0.0)
    loss_sum = accelerator.reduce(loss) * target_tokens
    return torch.cat([loss_sum[None], counts, grad_norm[None].to(loss.device)])


def loss_of(model, batch: dict, target_tokens: torch.Tensor, args) -> torch.Tensor:
    """The loss of a batch, label-smoothed (section 5.4), with R-Drop where that is asked for."""
    if args.r_drop_alpha:
        return r_drop_loss(model, batch, args.r_drop_alpha, args.label_smoothing_factor, target_tokens)
    return model(**batch, label_smoothing=args.label_smoothing_factor, num_items_in_batch=target_tokens).loss


def r_drop_loss(
    model, batch: dict, alpha: float, label_smoothing: float, target_tokens: torch.Tensor | int
) -> torch.Tensor:
    """Half the loss of R-Drop (Liang et al., 2021, Equation 4), the same as without it for `alpha` 0.

    Every pair is read twice, with other dropout; the mean of both cross-entropies is joined by `alpha` / 2 times the
    mean of the two Kullback-Leibler divergences between what was predicted. Twice the logits of the batch must fit in
    memory, which the loss of the model itself never holds.
    """
    labels = batch["labels"].repeat(2, 1)  # (2B,T)
    real = labels != -100
    decoder_input_ids = unwrapped(model).prepare_decoder_input_ids_from_labels(labels)
    logits = model(
        input_ids=batch["input_ids"].repeat(2, 1),
        attention_mask=batch["attention_mask"].repeat(2, 1),
        decoder_input_ids=decoder_input_ids,
        use_cache=False,
    ).logits[real]  # (2N,V)
    both = logits.float()
    entropy = functional.cross_entropy(both, labels[real], reduction="sum", label_smoothing=label_smoothing) / 2
    p, q = both.log_softmax(dim=-1).chunk(2)  # (N,V)
    divergence = functional.kl_div(p, q, reduction="sum", log_target=True)
    divergence = (divergence + functional.kl_div(q, p, reduction="sum", log_target=True)) / 2
    return (entropy + alpha / 2 * divergence) / target_tokens


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model itself, which processes that share their gradients wrap."""
    return getattr(model, "module", model)


def clip_grad_norm(model: nn.Module, optimizer, max_norm: float, accelerator) -> torch.Tensor:
    """Clips the gradient at `max_norm`, if that is not 0, and returns its norm before, whatever shards it is in."""
    accelerator.unscale_gradients(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def count_tokens(batch: dict) -> tuple[int, int, int]:
    """Real target tokens, real source tokens, and padded_tokens of both sides with padding."""
    padded_tokens = batch["input_ids"].numel() + batch["labels"].numel()
    return int((batch["labels"] != -100).sum()), int(batch["attention_mask"].sum()), padded_tokens


# -------------------------------------------------------------------------------------------------- state of a run

SPIKE_WINDOW = 100  # steps that a loss is compared with
SPIKE = 2.0  # nats above their mean, and six times their deviation: training has come apart


@dataclass
class Trouble:
    """A step at which training has come apart."""

    step: int
    position: int  # the number of its first batch
    learning_rate: float
    loss: float
    grad_norm: float
    usual_loss: float | None = None  # what it is a spike above

    def describe(self, batches, batches_per_step: int) -> str:
        """A sentence with the step, the learning rate and the pairs of its batches."""
        numbers = range(self.position, self.position + batches_per_step)
        pairs = batches.pairs_of(numbers)
        names = ", ".join(map(str, pairs[:8])) + (f" and {len(pairs) - 8} more" if len(pairs) > 8 else "")
        names = names or "of a stream that were read long ago"
        jump = f" after {self.usual_loss:.2f} on average" if self.usual_loss is not None else ""
        which = f"batches {numbers[0]} to {numbers[-1]}" if batches_per_step > 1 else f"batch {numbers[0]}"
        return (
            f"The loss is {self.loss:.4g}{jump} and the norm of its gradient {self.grad_norm:.4g} "
            f"at step {self.step}, with learning rate {self.learning_rate:.2e}, in {which}, pairs {names}"
        )


@dataclass
class RunState:
    """Where a run is: everything that a resumed run must know besides weights and optimiser."""

    step: int = 0
    position: int = 0  # the number of the next batch, of all processes
    skipped: list[int] = field(default_factory=list)  # numbers of batches that were left out
    train_runtime: float = 0.0  # seconds of training steps, evaluation and saving left out
    loss_sum: float = 0.0  # nats, over all real target tokens so far
    target_tokens: int = 0
    source_tokens: int = 0
    padded_tokens: int = 0
    history: list[dict] = field(default_factory=list)  # what was logged, for the curves
    scores_count_from: int = 0  # the place in the history; what came before was scored in another way
    recent_losses: list[float] = field(default_factory=list)  # of the last steps, which a spike is measured by
    is_interrupted: bool = False  # saved because it was stopped, where no checkpoint would be
    stream: dict | None = None  # where a stream is read on
    scaler: dict = field(default_factory=dict)  # of float16
    settings: dict = field(default_factory=dict)  # what decided on the run so far

    def advance(self, batches_per_step: int):
        """Counts a step, and goes to the next batches that are not skipped."""
        self.step += 1
        self.position += batches_per_step
        while self.position in self.skipped:
            self.position += batches_per_step

    def skip(self, position: int, batches_per_step: int):
        """Leaves out the batches of the step that began at `position`."""
        self.skipped += range(position, position + batches_per_step)
        while self.position in self.skipped:
            self.position += batches_per_step

    def find_trouble(self, window: list["Step"], spikes: bool = True) -> Trouble | None:
        """The first step of the window at which the loss or its gradient is no number, or the loss a spike."""
        recent = list(self.recent_losses)
        for step in window:
            loss_sum, target_tokens, *_, norm = step.sums.tolist()
            loss = loss_sum / max(1, target_tokens)
            trouble = Trouble(step.step, step.position, step.learning_rate, loss, norm)
            if not math.isfinite(loss + norm):
                return trouble
            if spikes and len(recent) >= SPIKE_WINDOW // 2:
                mean, deviation = float(np.mean(recent)), float(np.std(recent))
                if loss > mean + max(SPIKE, 6 * deviation):
                    trouble.usual_loss = mean
                    return trouble
            recent = [*recent, loss][-SPIKE_WINDOW:]
        return None

    def log(self, window: list["Step"], seconds: float) -> dict:
        """Adds what the steps since the last call came to; returns the log's entry."""
        sums = torch.stack([step.sums for step in window]).cpu().double()
        losses = sums[:, 0] / sums[:, 1].clamp(min=1)
        self.recent_losses = [*self.recent_losses, *losses.tolist()][-SPIKE_WINDOW:]
        # One by one, so that the sum does not depend on where the run was stopped.
        for loss in sums[:, 0].tolist():
            self.loss_sum += loss
        loss_sum, target_tokens, source_tokens, padded_tokens, norms = sums.sum(dim=0).tolist()
        entry = {
            "step": self.step,
            "loss": loss_sum / max(1, target_tokens),
            "learning_rate": window[-1].learning_rate,
            "grad_norm": norms / len(window),
            "target_tokens_per_second": target_tokens / seconds,
            "padding_fraction": 1 - (source_tokens + target_tokens) / max(1, padded_tokens),
        }
        self.train_runtime += seconds
        self.target_tokens += int(target_tokens)
        self.source_tokens += int(source_tokens)
        self.padded_tokens += int(padded_tokens)
        self.history.append(entry)
        return entry

    def log_scores(self, scores: dict):
        """Adds an evaluation at the present step."""
        self.history.append({"step": self.step, **{k: v for k, v in scores.items() if k.startswith("eval_")}})

    @property
    def is_evaluated(self) -> bool:
        return any(entry["step"] == self.step for entry in self.evaluations())

    def evaluations(self) -> list[dict]:
        """The evaluations that were done in the same way as those to come."""
        return [entry for entry in self.history[self.scores_count_from :] if "eval_loss" in entry]

    def ranking(self, metric: str) -> list[int]:
        """The steps that were evaluated, the best first, the earlier of two that are equal; a loss is best low."""
        sign = 1 if metric == "loss" else -1
        scores = {e["step"]: sign * e[f"eval_{metric}"] for e in self.evaluations()}
        return sorted(scores, key=lambda step: math.inf if math.isnan(scores[step]) else scores[step])

    def evaluations_without_improvement(self, metric: str) -> int:
        steps = [entry["step"] for entry in self.evaluations()]
        return len(steps) - 1 - steps.index(self.ranking(metric)[0]) if steps else 0

    def results(self) -> dict:
        """What `all_results.json` says of the training."""
        return {
            "train_runtime": self.train_runtime,
            "train_steps": self.step,
            "train_loss": self.loss_sum / max(1, self.target_tokens),
            "train_target_tokens": self.target_tokens,
            "train_target_tokens_per_second": self.target_tokens / max(1e-9, self.train_runtime),
            "padding_fraction": 1 - (self.source_tokens + self.target_tokens) / max(1, self.padded_tokens),
        }


@dataclass
class Step:
    """What the log is told of a step."""

    step: int
    position: int  # the number of its first batch
    learning_rate: float
    sums: torch.Tensor  # what [`optimizer_step`] returned


class Calendar:
    """At which steps a run logs, evaluates and saves; the last step is evaluated after the run, with its last weights.

    Where the best weights are wanted, the last ones are evaluated with the others, to be compared.
    """

    def __init__(self, args, max_steps: int):
        self.args = args
        self.max_steps = max_steps
        self.wants_best = bool(args.early_stopping_patience) or args.average_checkpoints_by == "score"

    def evaluates(self, step: int) -> bool:
        is_due = self.args.eval_steps and step % self.args.eval_steps == 0
        return step > 0 and bool(is_due and step < self.max_steps or self.wants_best and step == self.max_steps)

    def saves(self, step: int) -> bool:
        if step == 0:  # to have something to go back to
            return self.args.on_divergence == "rollback"
        is_due = self.args.save_steps and step % self.args.save_steps == 0
        return bool(is_due) or step == self.max_steps or self.evaluates(step)

    def logs(self, step: int) -> bool:
        return step % self.args.logging_steps == 0 or self.saves(step)

    def is_over(self, state: RunState) -> bool:
        """Whether the last step is done, or too many evaluations were without a better score."""
        if state.step >= self.max_steps:
            return True
        patience = self.args.early_stopping_patience
        if not (patience and self.evaluates(state.step)):
            return False
        return state.evaluations_without_improvement(self.args.metric_for_best_model) >= patience
