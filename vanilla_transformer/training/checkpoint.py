"""Checkpoints `checkpoint-N`: loadable model directories that also hold optimizer, moving average and trainer state.

Each is written to a temporary folder and renamed, so that a killed run leaves only complete ones, and lists the
SHA-256 of its files, so that a damaged one is noticed.
"""

import json
import re
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from huggingface_hub.utils.sha import sha_fileobj
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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from .distributed import copy_weights, run_on_main
from .state import TrainerState, Triggers

SUMS = "SHA256SUMS"  # can be checked by hand: sha256sum --check SHA256SUMS
LOCK = ".lock"
REQUIRED = {"model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json"}
ON_MAIN = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    whole: PreTrainedModel,
    ema: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    state: TrainerState,
    accelerator: Accelerator,
):
    """Writes a checkpoint on the main process; every process must call it, to gather what is sharded.

    `whole` is the unsharded, uncompiled copy of `model` (or `model` itself) that is written. The optimizer state is
    saved by parameter name, so that any number of processes can load it.

    Raises:
        UserError: A weight is NaN or infinite.
        OSError: It cannot be written. The previous checkpoints are intact.
    """
    if whole is not model:
        copy_weights(model, whole)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=ON_MAIN)
    average = get_model_state_dict(ema.module, options=ON_MAIN) if ema is not None else None
    state.scaler = {} if accelerator.scaler is None else accelerator.scaler.state_dict()

    def write():
        for name, parameter in whole.named_parameters():
            if not parameter.isfinite().all():
                raise UserError(
                    f"'{name}' has NaN or infinite weights after step {state.step}, which is not saved; lower "
                    "--learning_rate or lengthen --warmup_steps."
                )
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            whole.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            moments = {
                f"{name}/{key}": v for name, part in optimizer_state["state"].items() for key, v in part.items()
            }
            save_file(moments, temporary / "optimizer.safetensors")
            if average is not None:
                # Without the duplicates of tied weights.
                names = [name for name, _ in whole.named_parameters()]
                save_file({name: average[name] for name in names}, temporary / "ema.safetensors")
            (temporary / "trainer_state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
            sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(temporary.iterdir())]
            (temporary / SUMS).write_text("".join(sums), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # a damaged checkpoint of this step
            temporary.rename(folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(f"{folder} could not be written: {' '.join(str(error).split())}") from error

    run_on_main(accelerator, write)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return sha_fileobj(file).hex()


class Checkpoint:
    """A folder `checkpoint-N` that [`save_checkpoint`] wrote."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def step(self) -> int:
        return int(self.folder.name.removeprefix("checkpoint-"))

    def is_in(self, output_dir: Path) -> bool:
        return self.folder.absolute().parent.resolve() == output_dir.resolve()

    def find_corruption(self) -> str | None:
        """Says what is wrong with the checkpoint: a file that is missing, unreadable or changed; None if valid."""
        try:
            lines = (self.folder / SUMS).read_text(encoding="utf-8").splitlines()
            sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
            for name, digest in sums.items():
                if sha256(self.folder / name) != digest:
                    return f"its {name} has changed since it was written"
        except (OSError, UnicodeDecodeError) as error:
            missing = Path(getattr(error, "filename", None) or SUMS).name
            return f"its {missing} is missing or cannot be read"
        if missing := REQUIRED - sums.keys():
            return f"its {SUMS} does not list {', '.join(sorted(missing))}"
        try:
            self.state()
        except UserError as error:
            return str(error)
        return None

    def state(self) -> TrainerState:
        """The trainer state. Raises UserError if it is not one of this step, or of an incompatible version."""
        try:
            saved = json.loads((self.folder / "trainer_state.json").read_text(encoding="utf-8"))
            step = saved["step"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"its trainer_state.json cannot be read: {error!r}") from error
        if step != self.step:
            raise UserError(f"its trainer_state.json belongs to step {step}")
        if saved.get("skipped"):
            raise UserError("it was written by version 0.1 after a rollback; resume it with that version")
        names = {item.name for item in fields(TrainerState)}
        return TrainerState(**{key: value for key, value in saved.items() if key in names})

    def load(self, model, ema: nn.Module | None, optimizer, accelerator: Accelerator) -> TrainerState:
        """Restores weights, moving average, optimizer state and loss scale; returns the trainer state.

        Raises:
            UserError: The checkpoint belongs to another model, or has no moving average.
        """
        try:
            state = self.state()
            saved = VanillaTransformerConfig.from_pretrained(self.folder)
            for name in VanillaTransformerConfig.__annotations__:
                old, new = getattr(saved, name), getattr(model.config, name)
                if "dropout" not in name and old != new:
                    raise ValueError(f"its `{name}` is {old}, and {new} in this run")
            load_weights(model, load_file(self.folder / "model.safetensors"))
            if ema is not None:
                path = self.folder / "ema.safetensors"
                if not path.exists():
                    raise ValueError("it was written without --ema_decay; leave that option out")
                load_weights(ema.module, load_file(path))
                ema.n_averaged.fill_(state.step)
            moments: dict[str, dict[str, torch.Tensor]] = {}
            for key, tensor in load_file(self.folder / "optimizer.safetensors").items():
                name, _, moment = key.rpartition("/")
                moments.setdefault(name, {})[moment] = tensor
            groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
            whole = {"state": moments, "param_groups": groups}
            set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(full_state_dict=True))
        except (UserError, OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(
                f"Cannot resume from {self}: {reason}. Give a checkpoint-N folder that train.py wrote with the same "
                "model options."
            ) from error
        if state.scaler and accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(state.scaler)
        return state


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor]):
    """Copies `weights`, each tied one once, into a model, sharded or not.

    Raises ValueError, naming the weight, if one is missing, unknown or has another shape.
    """
    ours = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name in sorted(ours.keys() ^ weights.keys()):
        raise ValueError(f"'{name}' is {'missing' if name in ours else 'not a weight of this model'}")
    for name, shape in ours.items():
        if weights[name].shape != shape:
            raise ValueError(f"'{name}' has shape {list(weights[name].shape)} instead of {list(shape)}")
    options = StateDictOptions(full_state_dict=True, strict=False)  # not strict: tied weights have further names
    set_model_state_dict(model, weights, options=options)


def average_checkpoints(checkpoints: list[Checkpoint], use_ema: bool = False) -> dict[str, torch.Tensor]:
    """The mean of the weights of several checkpoints (section 6.1), computed in float32.

    Raises:
        UserError: One of them is damaged.
    """
    total: dict[str, torch.Tensor] = {}
    for checkpoint in checkpoints:
        if reason := checkpoint.find_corruption():
            raise UserError(f"{checkpoint} cannot be averaged: {reason}; delete it and resume from an older one.")
        for name, tensor in load_file(checkpoint.folder / f"{'ema' if use_ema else 'model'}.safetensors").items():
            total[name] = total.get(name, 0) + tensor.float() / len(checkpoints)
    return total


# ----------------------------------------------------------------------------------------------- the output directory


def list_checkpoints(output_dir: Path) -> list[Checkpoint]:
    """The checkpoints in a directory, oldest first."""
    folders = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((Checkpoint(path) for path in folders if path.is_dir()), key=lambda checkpoint: checkpoint.step)


def latest_valid_checkpoint(output_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that is not damaged. Prints which ones are skipped."""
    for checkpoint in reversed(list_checkpoints(output_dir)):
        reason = checkpoint.find_corruption()
        if reason is None:
            return checkpoint
        print(f"skipping {checkpoint}, which is damaged: {reason}")
    return None


def resolve_resume_checkpoint(args) -> Checkpoint | None:
    """The checkpoint that `--resume_from_checkpoint` asks for; None if there is none, to start from scratch.

    Raises:
        UserError: The named one is not a valid checkpoint or not the newest one of its run, or the run would
            overwrite something else in `--output_dir`.
    """
    output_dir, name, checkpoint = Path(args.output_dir), args.resume_from_checkpoint, None
    if name == "newest":
        checkpoint = latest_valid_checkpoint(output_dir)
        if checkpoint is None and list_checkpoints(output_dir):
            raise UserError(f"All checkpoints in {output_dir} are damaged; start again in another --output_dir.")
        if checkpoint is None and (output_dir / "config.json").exists():
            raise UserError(
                f"--output_dir {output_dir} holds a model but no checkpoint to resume from; fine-tune the model with "
                f"--model_name_or_path {output_dir} and another --output_dir."
            )
        print(f"resuming from {checkpoint}" if checkpoint else "no checkpoint found; starting from scratch")
    elif name is not None:
        checkpoint = Checkpoint(Path(name))
        if not re.fullmatch(r"checkpoint-\d+", checkpoint.folder.name):
            checkpoint = Checkpoint(checkpoint.folder.resolve())  # a link to one
        if not re.fullmatch(r"checkpoint-\d+", checkpoint.folder.name) or not checkpoint.folder.is_dir():
            raise UserError(f"--resume_from_checkpoint {name} is not a checkpoint-N folder of train.py.")
        if reason := checkpoint.find_corruption():
            raise UserError(f"--resume_from_checkpoint {name} is damaged: {reason}; choose another checkpoint.")
        newer = [other for other in list_checkpoints(output_dir) if other.step > checkpoint.step]
        if newer and checkpoint.is_in(output_dir):
            raise UserError(
                f"--resume_from_checkpoint {name} is older than {newer[-1]}; delete the newer checkpoints, or choose "
                "another --output_dir."
            )
    check_output_dir(output_dir, checkpoint)
    return checkpoint


def check_output_dir(output_dir: Path, checkpoint: Checkpoint | None):
    """Raises UserError rather than overwrite anything but the run that is resumed."""
    if checkpoint is not None and checkpoint.is_in(output_dir):
        return
    if list_checkpoints(output_dir) or (output_dir / "config.json").exists():
        raise UserError(
            f"--output_dir {output_dir} already holds a model; resume with --resume_from_checkpoint, or choose "
            "another directory."
        )
    # A run that ended before its first checkpoint leaves a lock file, its recipe and the logs of a tracker.
    is_ours = (output_dir / LOCK).exists()
    if not is_ours and output_dir.is_dir() and any(output_dir.iterdir()):
        raise UserError(f"--output_dir {output_dir} is not empty; choose another directory.")


def prepare_output_dir(lock: FileLock, checkpoint: Checkpoint | None, recipe: str):
    """Creates the directory of the lock, acquires the lock and writes the recipe into the directory.

    Raises:
        UserError: The directory cannot be created or written to, or another run is using it.
    """
    output_dir = Path(lock.lock_file).parent
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise UserError(f"Another run is writing to --output_dir {output_dir}; choose another directory.") from error
    except OSError as error:
        raise UserError(f"--output_dir {output_dir} cannot be used: {error.strerror}; choose another.") from error
    for newer in list_checkpoints(output_dir):
        if checkpoint is not None and newer.step > checkpoint.step:  # damaged and skipped; the run will reach its step
            newer.folder.rename(newer.folder.with_name(newer.folder.name + ".damaged"))
    (output_dir / "recipe.yaml").write_text(recipe, encoding="utf-8")


def scheduled_checkpoints(output_dir: Path, triggers: Triggers) -> list[Checkpoint]:
    """The checkpoints that were due at their step, oldest first; not those saved because a signal stopped the run."""
    return [checkpoint for checkpoint in list_checkpoints(output_dir) if triggers.should_save(checkpoint.step)]


def prune_checkpoints(output_dir: Path, state: TrainerState, triggers: Triggers):
    """Deletes all but the newest checkpoints, the best, and those to be averaged at the end."""
    args = triggers.args
    by_score = args.average_checkpoints_by == "score"
    best = state.ranking(args.metric_for_best_model)[: max(1, args.average_checkpoints if by_score else 1)]
    count = args.save_total_limit if by_score else max(args.save_total_limit, args.average_checkpoints)
    keep = [checkpoint.step for checkpoint in scheduled_checkpoints(output_dir, triggers)[-count:]]
    for remains in output_dir.glob("checkpoint-*.tmp"):  # of a killed run
        shutil.rmtree(remains, ignore_errors=True)
    for checkpoint in list_checkpoints(output_dir)[:-1]:
        if checkpoint.step not in (*keep, *best):
            # Renamed first, so that a run killed now leaves no incomplete checkpoint.
            doomed = checkpoint.folder.rename(checkpoint.folder.with_name(checkpoint.folder.name + ".tmp"))
            shutil.rmtree(doomed, ignore_errors=True)


def final_checkpoints(output_dir: Path, state: TrainerState, triggers: Triggers) -> list[Checkpoint]:
    """The checkpoints whose mean becomes the final model; none for the weights of the last step."""
    args = triggers.args
    saved = {checkpoint.step: checkpoint for checkpoint in scheduled_checkpoints(output_dir, triggers)}
    best = [saved[step] for step in state.ranking(args.metric_for_best_model) if step in saved]
    if args.average_checkpoints:
        chosen = best if args.average_checkpoints_by == "score" else list(reversed(saved.values()))
        return sorted(chosen[: args.average_checkpoints], key=lambda checkpoint: checkpoint.step)
    return best[:1] if args.early_stopping_patience else []


# ------------------------------------------------------------------------------------------ what must not have changed

# Options that decide which pairs batch n holds.
FIXED = (
    "seed",
    "tokenizer_name",
    "per_device_train_max_tokens",
    "bpe_dropout",
    "streaming",
    "data",
    "batches_per_step",
)
FIXED_IN_STREAM = ("dataset_name", "dataset_config_name", "train_file", "train_split", "source_lang", "target_lang")
FIXED_IN_STREAM += ("source_column", "target_column", "max_source_length", "max_target_length", "max_train_samples")
SCORING = ("metric_for_best_model", "num_beams", "length_penalty", "bleu_tokenize", "target_lang", "validation")
HARMLESS = ("output_dir", "save_total_limit", "report_to", "preprocessing_num_workers", "dataloader_num_workers")
HARMLESS += ("vocab_size",)  # of the tokenizer, which is that of the checkpoint


def compare_settings(checkpoint: Checkpoint, old: dict, new: dict) -> list[str]:
    """The settings that changed since the checkpoint was written, as lines to print.

    Raises:
        UserError: The training pairs or the batches changed, so that the run cannot be resumed.
    """
    changed = {name: (old[name], new[name]) for name in new if name in old and old[name] != new[name]}
    remedy = f"start a new run from these weights with --model_name_or_path {checkpoint}"
    if "data" in changed:
        raise UserError(
            f"The training pairs are not those of {checkpoint}: the dataset, its columns or limits, or the tokenizer "
            f"changed. Restore them, or {remedy}."
        )
    if "batches_per_step" in changed:
        before, now = changed["batches_per_step"]
        raise UserError(
            f"An optimizer step of {checkpoint} has {before} batches, and {now} now; change the number of processes "
            f"or --gradient_accumulation_steps, whose product it is, or {remedy}."
        )
    for name in FIXED + (FIXED_IN_STREAM if new["streaming"] else ()):
        if name in changed:
            before, now = changed[name]
            raise UserError(f"--{name} is {now}, but {before} in {checkpoint}; use the same value, or {remedy}.")
    return [
        "the validation pairs" if name == "validation" else f"--{name} was {before}, now {now}"
        for name, (before, now) in changed.items()
        if name not in HARMLESS
    ]


def resume(
    checkpoint: Checkpoint, settings: dict, output_dir: Path, model, ema, optimizer, accelerator: Accelerator
) -> TrainerState:
    """Loads a checkpoint, prints the settings that changed, and returns its trainer state with the new settings."""
    state = checkpoint.load(model, ema, optimizer, accelerator)
    for change in compare_settings(checkpoint, state.settings, settings):
        accelerator.print(f"changed since {checkpoint}: {change}")
    if not checkpoint.is_in(output_dir) or any(
        state.settings.get(name, settings[name]) != settings[name] for name in SCORING
    ):
        state.scores_count_from = len(state.history)  # earlier scores are not comparable, or not of this run
    state.settings = settings
    return state
