"""What a run reports: progress of a step, the plan of a dry run, facts for the model card, the training curves."""

import math
import os
import sys
import time
from collections.abc import Callable, Sized
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from matplotlib.figure import Figure  # without pyplot, which asks for a screen or changes what a notebook shows
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from .. import __version__
from ..data.batches import PairLoader
from ..data.options import DataOptions
from ..data.splits import Splits
from ..errors import UserError
from ..files import public_file, public_name, replacing_file
from .hardware import describe_cpu
from .options import TrainingOptions
from .processes import run_on_main
from .recipe import recipe_to_yaml
from .state import TrainerState, Triggers


def progress_bar(step: int, max_steps: int, is_shown: bool) -> tqdm:
    """Shows on a terminal how far a run is, in 80 columns."""
    bar_format = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
    disable = None if is_shown else True  # None: unless it is a terminal
    return tqdm(total=max_steps, initial=step, disable=disable, bar_format=bar_format)


def show_progress(bar: tqdm, entry: dict, state: TrainerState, max_steps: int, is_shown: bool):
    """Shows a log entry on the bar or, where stderr is no terminal, as a line."""
    shown = f"loss {entry['loss']:.3f}, {entry['target_tokens_per_second']:,.0f} tokens/s, "
    shown += f"lr {entry['learning_rate']:.1e}"
    bar.set_postfix_str(shown)
    if bar.disable and is_shown:
        left = tqdm.format_interval(state.train_runtime / state.step * (max_steps - state.step))
        print(f"{state.step:,}/{max_steps:,}: {shown}, {left} left", file=sys.stderr, flush=True)


def compare_rates(state: TrainerState, schedule: Callable[[int], float]):
    """Prints how the learning rate differs from that of the last step before a run was resumed, if it does."""
    for entry in state.history:
        if entry["step"] == state.step and "learning_rate" in entry:
            before, now = entry["learning_rate"], schedule(state.step)
            if not math.isclose(before, now, rel_tol=0.01):
                PartialState().print(
                    f"{'warning: ' * (now > before)}the learning rate goes from {before:.2e} to {now:.2e}, as the "
                    "schedule changed; --learning_rate, --warmup_steps, --lr_scheduler_type and the number of steps "
                    "decide it."
                )


def check_average(triggers: Triggers):
    """Warns if fewer checkpoints are going to be saved than `--average_checkpoints` asks for."""
    asked = triggers.options.average_checkpoints
    is_by_score = triggers.options.average_checkpoints_by == "score"
    is_due = triggers.should_evaluate if is_by_score else triggers.should_save
    count = sum(map(is_due, range(1, triggers.max_steps + 1))) if asked else 0
    if count < asked:
        option = "--eval_steps" if is_by_score else "--save_steps"
        PartialState().print(
            f"warning: --average_checkpoints {asked} will average only the {count} that are saved; save more "
            f"often, with {option}."
        )


def name_better_checkpoint(state: TrainerState, options: TrainingOptions):
    """Prints which evaluated checkpoint was better than the final weights, unless the best ones were asked for."""
    metric, entries = options.metric_for_best_model, {entry["step"]: entry for entry in state.evaluations()}
    best = state.ranking(metric, options.greater_is_better)[0]
    has_best = options.early_stopping_patience or options.average_checkpoints_by == "score"
    if best == state.step or has_best or options.tune_decoding:  # another search has other scores
        return
    ours, theirs = entries[state.step], entries[best]
    if all(ours[name] == theirs[name] for name in (f"eval_{metric}", "eval_chrf")):  # a tie, which the loss broke
        return
    names = dict.fromkeys(("eval_bleu", "eval_chrf", "eval_loss", f"eval_{metric}"))
    scores = [f"{name[5:]} {theirs[name]:.4g}, not {ours[name]:.4g}" for name in names]
    folder = options.output_dir / f"checkpoint-{best}"
    is_average = options.ema_decay is not None  # which a checkpoint keeps beside its model
    where = f" It is a model like any other: {folder}." if folder.is_dir() and not is_average else ""
    print(
        f"checkpoint-{best} was better than the final weights by --metric_for_best_model {metric} "
        f"({', '.join(scores)}).{where} --early_stopping_patience ends a run with its best weights."
    )


def advise_on_low_scores(results: dict, options: TrainingOptions):
    """Says what would help if hardly any translation is right."""
    bleu, chrf, right = (results[f"eval_{name}"] for name in ("bleu", "chrf", "exact_match"))
    is_new = options.model_name_or_path is None
    if bleu < 5 and chrf < 30 and right < 5:
        print(
            f"warning: with BLEU {bleu:.2f} and chrF {chrf:.2f} on the validation split, most translations are wrong. "
            f"What helps: more pairs, a longer run{', ' if is_new else ' or '}back-translations (--train_file_tags)"
            f"{', or a trained model to begin with (--model_name_or_path)' if is_new else ''}."
        )


def scalars(results: dict) -> dict:
    """The results that a tracker can plot."""
    return {key: value for key, value in results.items() if isinstance(value, int | float)}


DRY_RUN = "This is a dry run: nothing is written to --output_dir, and no weights are changed."
DRY_RUN_SECONDS = 30


def dry_run(
    take_step: Callable[[list[dict]], tuple[torch.Tensor, ...]] | None,
    batches: DataLoader,
    accumulation_steps: int,
    steps_left: int,
    recipe: dict,
):
    """Prints the batches of an epoch and the recipe, takes up to 21 steps, and prints their time and memory.

    The first step warms up and does not count. `take_step` returns what `optimizer_step` of train.py does; None, where
    a step does not fit into memory, leaves the steps out.
    """
    state = PartialState()
    if isinstance(batches, PairLoader):  # of a stream, the epoch is unknown
        plan = batches.epoch()
        number = f"{len(plan):,} batch{'es' if len(plan) > 1 else ''}"
        state.print(f"{number} an epoch, {batches.padding():.1%} padding")
        each = accumulation_steps * state.num_processes
        state.print(f"{len(plan) / each:,.1f} steps an epoch, {each} batch{'es' if each > 1 else ''} each")
    state.print(f"the resolved recipe:\n\n{recipe_to_yaml(recipe)}\n{DRY_RUN}", flush=True)
    if take_step is None:
        return state.print("No step was tried, since it may not fit into memory.")
    loader, times = iter(batches), []
    while len(times) < 2 or (len(times) <= 20 and run_on_main(lambda: times[-1] - times[0] < DRY_RUN_SECONDS)):
        *_, grad_norm = take_step([next(loader) for _ in range(accumulation_steps)])
        grad_norm.item()  # waits for the device
        times.append(time.perf_counter())
    is_cuda = state.device.type == "cuda"
    taken = torch.cuda.max_memory_allocated() if is_cuda else psutil.Process().memory_info().rss
    seconds = (times[-1] - times[0]) / (len(times) - 1)
    left = timedelta(seconds=round(seconds * steps_left))
    state.print(
        f"about {seconds:.3g} s a step, so {left} for {steps_left:,} steps, without evaluations; "
        f"{taken / 2**30:.2f} GiB of memory per process"
    )


PROJECT = "vanilla-transformer"
# What each tracker calls the name of a run.
RUN_NAMES = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "clearml": "task_name"}
RUN_NAMES |= {"swanlab": "experiment_name", "dvclive": "exp_name"}


def start_trackers(accelerator: Accelerator, run_name: str | None, recipe: dict):
    """Starts the trackers of `--report_to` with the recipe and the name of the run; on the main process.

    Their project is `WANDB_PROJECT` or [`PROJECT`]. Raises UserError if a name is given and none of them takes one.
    """
    names = [str(tracker) for tracker in accelerator.log_with]
    if not names:
        return
    if run_name and not RUN_NAMES.keys() & {*names}:
        raise UserError(f"--run_name has no effect with --report_to {','.join(names)}; leave it out.")
    print(f"reporting to {', '.join(names)}")
    kinds = bool | int | float | str  # that all trackers take
    values = {k: v if isinstance(v, kinds) else str(v) for k, v in recipe.items() if v is not None}
    named = {name: {key: run_name} for name, key in RUN_NAMES.items()} if run_name else {}
    accelerator.init_trackers(os.environ.get("WANDB_PROJECT", PROJECT), values, init_kwargs=named)


def describe_run(data_options: DataOptions, pairs: Splits, splits: dict) -> dict:
    """Data, hardware and versions of this run, for the model card: `splits` are the tokenized `pairs`."""
    state = AcceleratorState()
    kind = state.device.type
    device = f"{describe_cpu()}, {torch.get_num_threads()} threads" if kind == "cpu" else kind
    if kind == "cuda":
        device = torch.cuda.get_device_name()
    packages = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "sacrebleu")
    names = {"train": "train_samples", "validation": "eval_samples", "test": "test_samples"}
    languages = [", ".join(dict.fromkeys(side)) for side in zip(*data_options.directions, strict=True)] or (None, None)
    datasets = list(map(public_file, data_options.train_file or ()))
    datasets = datasets or [public_name(data_options.dataset_name)]
    return {names[name]: len(split) for name, split in splits.items() if isinstance(split, Sized)} | {
        "dataset": ", ".join(datasets),
        "origins": pairs.origins,
        "survey": pairs.survey,
        "source_lang": languages[0] or data_options.source_language,
        "target_lang": languages[1] or data_options.target_language,
        "hardware": f"{state.num_processes} x {device}",
        "mixed_precision": state.mixed_precision,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"vanilla-transformer": __version__} | {name: version(name) for name in packages},
    }


def plot_training_curves(history: list[dict], path: Path, lowest_loss: float | None = None):
    """Draws the loss, the scores and the learning rate of a run's `history` over its steps to a .png or .svg file.

    The validation loss has no label smoothing, so it may be below the training loss, whose lower bound is drawn too.
    """
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True)
    panels = [
        (axes[0], "loss (nats per token)", {"loss": "training, smoothed targets", "eval_loss": "validation"}),
        (axes[1], "score of validation translations", {"eval_bleu": "BLEU", "eval_chrf": "chrF"}),
        (axes[2], "learning rate", {"learning_rate": None}),
    ]
    for axis, title, curves in panels:
        for key, label in curves.items():
            points = [(entry["step"], entry[key]) for entry in history if key in entry]
            if points:
                marker = "o" if key.startswith("eval_") else None
                axis.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=3.5, clip_on=False)
        if axis is axes[0] and lowest_loss:
            axis.axhline(lowest_loss, color="gray", linestyle=":", label="entropy of the smoothed targets")
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    axes[0].set_xlim(0, max((entry["step"] for entry in history), default=1))  # of all three
    for axis in (axes[0], axes[2]):
        axis.set_ylim(bottom=0)
    axes[2].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    with replacing_file(path) as temporary:
        figure.savefig(temporary, dpi=110)
