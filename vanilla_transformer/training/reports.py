"""What a run reports: progress of a step, the plan of a dry run, facts for the model card."""

import platform
from collections.abc import Sized
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import Accelerator

from .. import __version__
from ..data.batches import lengths_of, padding_fraction
from ..data.pairs import parse_direction
from ..files import last_part
from .arguments import recipe_to_yaml
from .builders import longest_side
from .memory import free_memory, step_bytes


def describe_step(entry: dict) -> str:
    """A log entry as shown by the progress bar."""
    return (
        f"loss {entry['loss']:.3f}, {entry['target_tokens_per_second']:,.0f} target tokens/s, "
        f"padding {entry['padding_fraction']:.1%}, lr {entry['learning_rate']:.1e}"
    )


def scalars(results: dict) -> dict:
    """The results that a tracker can plot."""
    return {key: value for key, value in results.items() if isinstance(value, int | float)}


def dry_run_report(args, model, train, batches, batches_per_step: int, recipe: dict, accelerator: Accelerator):
    """Prints the batches of an epoch, the memory of a step and the recipe."""
    if isinstance(train, Sized):
        plan = batches.epoch()
        accelerator.print(f"{len(plan):,} batches an epoch, {padding_fraction(*lengths_of(train), plan):.1%} padding")
        accelerator.print(f"{len(plan) / batches_per_step:,.1f} steps an epoch, of {batches_per_step} batches each")
    longest = longest_side(train, args)
    constant, per_pair = step_bytes(model, args, accelerator, longest)
    needed = constant + per_pair * max(1, args.per_device_train_max_tokens // longest)
    free = free_memory(accelerator) + 4 * model.num_parameters()  # weights are in memory already
    kept = "; on a CPU, a process keeps several times as much" if accelerator.device.type == "cpu" else ""
    accelerator.print(f"about {needed / 2**30:.2f} of {free / 2**30:.1f} GiB of memory per process for tensors{kept}")
    accelerator.print(f"the resolved recipe:\n\n{recipe_to_yaml(recipe)}")
    accelerator.print("This was a dry run: nothing was trained, and nothing written to --output_dir.")


def describe_run(args, splits: dict, accelerator: Accelerator) -> dict:
    """Data, hardware and versions of a run, for the model card."""
    kind = accelerator.device.type
    device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads" if kind == "cpu" else kind
    if kind == "cuda":
        device = torch.cuda.get_device_name()
    packages = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "sacrebleu")
    names = {"train": "train_samples", "validation": "eval_samples", "test": "test_samples"}
    directions = list(map(parse_direction, args.train_file_langs or []))
    languages = [", ".join(dict.fromkeys(side)) for side in zip(*directions, strict=True)] or (None, None)
    # A Hub id, or names without their paths: a URL may contain a password.
    datasets = [name if name.startswith("hf://") else last_part(name) for name in args.train_file or ()]
    datasets = datasets or [Path(name).name if Path(name).exists() else name for name in [args.dataset_name]]
    return {names[name]: len(split) for name, split in splits.items() if isinstance(split, Sized)} | {
        "dataset": ", ".join(datasets),
        "source_lang": languages[0] or args.source_lang or args.source_column,
        "target_lang": languages[1] or args.target_lang or args.target_column,
        "hardware": f"{accelerator.num_processes} x {device}",
        "mixed_precision": accelerator.mixed_precision,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"vanilla-transformer": __version__} | {name: version(name) for name in packages},
    }
