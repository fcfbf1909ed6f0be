"""The state of a run: its step and history, when to log, evaluate, save and stop, and when training has diverged."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..errors import UserError, shortened
from ..evaluation.further_metrics import deciding_metric, greater_by_name
from .options import TrainingOptions

SPIKE_WINDOW = 100  # recent steps that a loss is compared with
SPIKE = 2.0  # a loss this many nats, and six standard deviations, above their mean is a spike
MAX_SPIKES = 10  # diverged when spikes minus calm steps in between reach this
SAVE_AFTER = 15 * 60  # seconds between checkpoints, unless --save_steps says how many steps
AVERAGED_EVERY = 1 / 30  # of a run, between averaged checkpoints, without --save_steps and --eval_steps


class Diverged(UserError):
    """The loss or its gradient is NaN or infinite, or the loss has risen and stayed high."""


@dataclass
class TrainerState:
    """What a resumed run needs besides weights and optimizer state. Saved as `trainer_state.json`."""

    step: int = 0  # optimizer steps so far
    position: int = 0  # number of the next batch, counted over all processes and epochs
    train_runtime: float = 0.0  # seconds in training steps, without evaluation and saving
    loss_sum: float = 0.0  # nats, over all target tokens so far
    target_tokens: int = 0
    source_tokens: int = 0
    padded_tokens: int = 0  # both sides, with padding
    history: list[dict] = field(default_factory=list)  # logged entries, for the curves
    scores_count_from: int = 0  # history before this index was scored differently, and is not compared
    recent_losses: list[float] = field(default_factory=list)  # of the last steps without a spike, to detect one
    spikes: list[int] = field(default_factory=list)  # steps with a spike; a step without removes one
    stream: list[dict] | None = None  # what the input of each process resumes from
    scaler: dict = field(default_factory=dict)  # loss scale of float16
    settings: dict = field(default_factory=dict)  # the recipe and data fingerprints, compared on resume

    def advance(self, num_batches: int):
        """Records one optimizer step over `num_batches` batches, counted over all processes."""
        self.step += 1
        self.position += num_batches

    def log_scores(self, scores: dict):
        """Adds the numbers of an evaluation at the current step to the history."""
        numbers = {k: v for k, v in scores.items() if k.startswith("eval_") and not isinstance(v, str)}
        self.history.append({"step": self.step} | numbers)

    def evaluations(self) -> list[dict]:
        """The evaluations so far that used the current data and options, so that their scores can be compared."""
        return [entry for entry in self.history[self.scores_count_from :] if "eval_loss" in entry]

    @property
    def is_evaluated(self) -> bool:
        """Whether the current step has been evaluated."""
        return any(entry["step"] == self.step for entry in self.evaluations())

    def ranking(self, metric: str, greater_is_better: bool | None = None) -> list[int]:
        """The evaluated steps, best first by [`deciding_metric`]. Ties go to the lower loss, then to the earlier step.

        If `greater_is_better` is None, the name of the metric decides.
        """
        metric = deciding_metric(self.evaluations(), metric, "eval_")
        is_greater_better = greater_by_name(metric) if greater_is_better is None else greater_is_better
        sign = -1 if is_greater_better else 1

        def key(entry: dict) -> tuple[float, float]:
            score = sign * entry[f"eval_{metric}"]
            return (math.inf if math.isnan(score) else score, entry["eval_loss"])

        return [entry["step"] for entry in sorted(self.evaluations(), key=key)]

    def evaluations_without_improvement(self, metric: str, greater_is_better: bool | None = None) -> int:
        """The number of evaluations since the best one."""
        steps = [entry["step"] for entry in self.evaluations()]
        return len(steps) - 1 - steps.index(self.ranking(metric, greater_is_better)[0]) if steps else 0

    def results(self) -> dict:
        """The training results in `all_results.json`."""
        return {
            "train_runtime": self.train_runtime,
            "train_steps": self.step,
            "train_loss": self.loss_sum / max(1, self.target_tokens),
            "train_target_tokens": self.target_tokens,
            "train_target_tokens_per_second": self.target_tokens / max(1e-9, self.train_runtime),
            "padding_fraction": 1 - (self.source_tokens + self.target_tokens) / max(1, self.padded_tokens),
        }


class Meter:
    """Collects what happens between two log entries, without waiting for the device at each step."""

    def __init__(self):
        self.steps: list[tuple[int, int, float, torch.Tensor]] = []
        self.started = 0.0

    def start(self):
        """Starts the clock at the first step after a log entry; evaluation and saving follow one and do not count."""
        if not self.steps:
            self.started = time.perf_counter()

    def add(self, state: TrainerState, learning_rate: float, loss: torch.Tensor, tokens: torch.Tensor, norm):
        """Adds a step: this process's share of its loss (), the counts of `count_tokens` (3,), its gradient norm."""
        self.steps.append((state.step, state.position, learning_rate, torch.stack([loss, *tokens, norm])))

    def flush(
        self, state: TrainerState, accelerator: Accelerator, read_pairs: Callable, detect_spikes: bool = True
    ) -> dict:
        """Adds the collected steps to `state` and returns the log entry; raises [`Diverged`] if training has diverged.

        `read_pairs(first, count)` returns the pairs of this process in `count` batches from number `first`, for the
        message.
        """
        numbers = torch.stack([numbers for *_, numbers in self.steps])  # (steps,5)
        numbers[:, 0] = accelerator.reduce(numbers[:, 0].contiguous())  # each process has the loss of its batches
        numbers = numbers.cpu().double()
        # Summed one by one, so that the result does not depend on where the run was interrupted.
        steps = zip(self.steps, numbers.tolist(), strict=True)
        for (step, position, learning_rate, _), (loss, tokens, *_, norm) in steps:
            if problem := record_loss(state, step, loss, norm, detect_spikes):
                first = state.spikes[0] if math.isfinite(loss + norm) else step
                count = position // step  # batches of a step
                pairs = gather_object(read_pairs((first - 1) * count, count))
                raise Diverged(
                    f"Training diverged at step {step} (learning rate {learning_rate:.2e}, batches up to number "
                    f"{position - 1}): {problem} {name_longest(pairs, first)}Checkpoints from before step {first} are "
                    "intact. Lower --learning_rate, lengthen --warmup_steps or lower --max_grad_norm."
                )
            state.loss_sum += loss * tokens
        losses, target_tokens, source_tokens, padded_tokens, norms = numbers.unbind(dim=1)
        tokens, source, padded = (int(count.sum()) for count in (target_tokens, source_tokens, padded_tokens))
        seconds = time.perf_counter() - self.started
        state.train_runtime += seconds
        state.target_tokens += tokens
        state.source_tokens += source
        state.padded_tokens += padded
        entry = {
            "step": state.step,
            "loss": float(losses @ target_tokens) / max(1, tokens),
            "learning_rate": self.steps[-1][2],
            "grad_norm": float(norms.mean()),
            "target_tokens_per_second": tokens / seconds,
            "padding_fraction": 1 - (source + tokens) / max(1, padded),
        }
        state.history.append(entry)
        self.steps.clear()
        return entry


def record_loss(state: TrainerState, step: int, loss: float, norm: float, detect_spikes: bool) -> str | None:
    """Adds the loss of a step to `state`; returns a sentence that says how training has diverged at it, or None.

    It has diverged if the loss or the gradient norm is not finite, or if the loss spikes at nearly every step: a step
    with a spike adds one to a count, a step without takes one off, and at [`MAX_SPIKES`] the run ends. In a small
    batch, one odd pair makes a spike.
    """
    if not math.isfinite(loss + norm):
        return f"the loss is {loss:.4g} and the gradient norm {norm:.4g}."
    if detect_spikes and len(state.recent_losses) >= SPIKE_WINDOW // 2:
        mean, deviation = float(np.mean(state.recent_losses)), float(np.std(state.recent_losses))
        if loss > mean + max(SPIKE, 6 * deviation):
            state.spikes.append(step)
            if len(state.spikes) < MAX_SPIKES:
                return None
            jump = f"the loss jumped at step {state.spikes[0]} and is {loss:.4g} now, after {mean:.4g} on average"
            return f"{jump}; --on_divergence ignore lets spikes pass."
    del state.spikes[-1:]
    state.recent_losses = [*state.recent_losses, loss][-SPIKE_WINDOW:]
    return None


def name_longest(pairs: list[dict], step: int) -> str:
    """A sentence with the longest of the pairs that a step was trained on, shortened; empty if there is none."""
    if not pairs:
        return ""
    texts = max(([pair["source"], pair["target"]] for pair in pairs), key=lambda texts: sum(map(len, texts)))
    source, target = map(shortened, texts)
    return f"The longest of the {len(pairs)} pair(s) of step {step} is {source!r}, {target!r}. "


class Triggers:
    """Decides at which steps a run logs, evaluates, saves and ends.

    The last step is evaluated after the loop, with the final weights. If the best weights are wanted, it is also
    evaluated in the loop, for comparison.

    Without `--save_steps`, a checkpoint is also saved every 15 minutes, which is not among those that are averaged.
    """

    def __init__(self, options: TrainingOptions, max_steps: int):
        self.options = options
        self.max_steps = max_steps
        self.save_steps = options.save_steps
        if options.average_checkpoints and not (options.save_steps or options.eval_steps):
            self.save_steps = max(1, round(max_steps * AVERAGED_EVERY))
        self.note_save()

    def should_evaluate(self, step: int) -> bool:
        """Whether the validation split is due at this step."""
        if step == self.max_steps:
            return bool(self.options.early_stopping_patience) or self.options.average_checkpoints_by == "score"
        return step > 0 and bool(self.options.eval_steps) and step % self.options.eval_steps == 0

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due: as asked for, at each evaluation, and at the end."""
        is_last = step == self.max_steps
        first = 0 if self.options.save_steps else self.max_steps  # averaged checkpoints are counted from the last one
        is_due = step > 0 and bool(self.save_steps) and (step - first) % self.save_steps == 0
        return is_due or is_last or self.should_evaluate(step)

    def is_overdue(self) -> bool:
        """Whether a checkpoint is due because of the time since the last one; never with `--save_steps`."""
        return not self.options.save_steps and time.monotonic() - self.saved_at > SAVE_AFTER

    def note_save(self):
        """Restarts the clock of [`is_overdue`]."""
        self.saved_at = time.monotonic()

    def should_log(self, step: int) -> bool:
        """Whether a log entry is due; one always precedes a checkpoint."""
        return step % self.options.logging_steps == 0 or self.should_save(step)

    def is_done(self, state: TrainerState) -> bool:
        """Whether the last step is done, or early stopping was triggered by the evaluation of this step."""
        if state.step >= self.max_steps:
            return True
        patience = self.options.early_stopping_patience
        if not (patience and self.should_evaluate(state.step)):
            return False
        metric = self.options.metric_for_best_model, self.options.greater_is_better
        return state.evaluations_without_improvement(*metric) >= patience
