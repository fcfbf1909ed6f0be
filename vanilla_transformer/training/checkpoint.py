"""Checkpoints `checkpoint-N`: loadable model directories that also hold optimizer, moving average and trainer state.

Each is complete, whenever the run is killed.
"""

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypedDict, get_type_hints

import torch
from accelerate import PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassError
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

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data.encoding import fingerprint
from ..errors import UserError, explaining, one_line
from ..files import copy_permissions, new_folder, remove_folder, remove_unfinished, write_text
from .processes import run_on_main
from .state import TrainerState, Triggers
from .weights import Weights

LOCK = ".lock"
STATE = "trainer_state.json"  # transformers' Trainer also writes such a file
OPTIMIZER = "optimizer.safetensors"  # only our checkpoints have it
WEIGHTS = "model.safetensors"
AVERAGE = "ema.safetensors"
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # of NFS or Lustre, as they are mounted
ON_MAIN = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(output_dir: Path, weights: Weights, optimizer: AcceleratedOptimizer, tokenizer, state: TrainerState):
    """Writes a checkpoint on the main process; every process must call it, to gather what is sharded.

    The optimizer state is saved by parameter name, so that any number of processes can load it.

    Raises OSError if it cannot be written; the previous checkpoints are intact.
    """
    model = weights.to_checkpoint()
    optimizer_state = get_optimizer_state_dict(weights.model, optimizer.optimizer, options=ON_MAIN)
    average = None
    if weights.average is not None:
        average = get_model_state_dict(weights.average.module, options=ON_MAIN)
    state.stream = gather_object(state.stream or [])  # each process reads other parts of a stream
    state.scaler = {} if optimizer.scaler is None else optimizer.scaler.state_dict()

    def write():
        """Called on the main process, with the gathered tensors."""
        folder = output_dir / f"checkpoint-{state.step}"
        try:
            with new_folder(folder) as temporary:
                model.save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
                save_file(named_moments(optimizer_state), temporary / OPTIMIZER)
                if average is not None:  # each tied weight once
                    tensors = {name: average[name] for name, _ in model.named_parameters()}
                    save_file(tensors, temporary / AVERAGE)
                write_text(temporary / STATE, json.dumps(asdict(state), indent=1))
                copy_permissions(temporary)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{folder} could not be written: {one_line(error)}") from error

    run_on_main(write)


def named_moments(optimizer_state: dict) -> dict[str, torch.Tensor]:
    """The moments of an optimizer as a flat dictionary, by the name of the weight and of the moment."""
    parts = optimizer_state["state"].items()
    return {f"{name}/{key}": value for name, part in parts for key, value in part.items()}


def reading_checkpoint(checkpoint: Path, file: str) -> AbstractContextManager:
    """Turns the error of a missing, damaged or foreign file of a checkpoint into a UserError."""
    kinds = (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError, StrictDataclassError)
    remedy = "delete it to resume from an older one"
    return explaining(f"{checkpoint} cannot be read: {file}", *kinds, remedy=remedy)


def load_state(checkpoint: Path) -> TrainerState:
    """The trainer state of a checkpoint. Raises UserError if it cannot be read."""
    foreign = explaining(f"{checkpoint} was not written by this version of train.py: {STATE}", TypeError)
    with reading_checkpoint(checkpoint, STATE), foreign:
        state = TrainerState(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
        validate_typed_dict(TypedDict("State", get_type_hints(TrainerState)), vars(state))
        return state


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor]):
    """Copies `weights`, in which tied weights appear once, into a model, sharded or not.

    Raises ValueError, naming the weight, if one is missing, unknown or of another shape.
    """
    check_tensors(weights, dict(model.named_parameters()))
    options = StateDictOptions(full_state_dict=True, strict=False)  # not strict: tied weights have further names
    set_model_state_dict(model, weights, options=options)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, moments: dict[str, torch.Tensor]):
    """Copies the `moments`, named as by [`named_moments`], into the optimizer of a model, sharded or not.

    Raises ValueError, naming the moment, if one is missing, unknown or of another shape.
    """
    state = get_optimizer_state_dict(model, optimizer)
    check_tensors(moments, named_moments(state))
    state["state"] = {}
    for key, tensor in moments.items():
        name, _, moment = key.rpartition("/")
        state["state"].setdefault(name, {})[moment] = tensor
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def check_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]):
    """Raises ValueError, naming one, unless both have floating-point tensors of the same names and shapes.

    Fused AdamW trusts the shapes of its moments, and would write behind the end of a smaller one.
    """
    if wrong := found.keys() ^ expected.keys():
        name = min(wrong)
        raise ValueError(f"'{name}' is {'missing' if name in expected else 'not a weight of this model'}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape or not tensor.is_floating_point():
            given, shape = f"{tuple(tensor.shape)} and {tensor.dtype}", tuple(expected[name].shape)
            raise ValueError(f"'{name}' is a tensor of {given}, but the model needs floating-point numbers of {shape}")


def average_checkpoints(checkpoints: list[Path], use_ema: bool = False) -> dict[str, torch.Tensor]:
    """The mean of the weights of several checkpoints (section 6.1), in float32; UserError if one cannot be read."""
    total: dict[str, torch.Tensor] = {}
    for checkpoint in checkpoints:
        file = AVERAGE if use_ema else WEIGHTS
        with reading_checkpoint(checkpoint, file):
            for name, tensor in load_file(checkpoint / file).items():
                total[name] = total.get(name, 0) + tensor.float() / len(checkpoints)
    return total


# ----------------------------------------------------------------------------------------------- the output directory


def step_of(checkpoint: Path) -> int:
    """The number in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first."""
    folders = output_dir.glob("checkpoint-*")
    return sorted((path for path in folders if re.fullmatch(r"checkpoint-\d+", path.name)), key=step_of)


def resolve_resume_checkpoint(output_dir: Path, name: str | None) -> Path | None:
    """The checkpoint `--resume_from_checkpoint` names; None if it is not given, or before the first checkpoint.

    Raises UserError if the given path is not a checkpoint or not the newest one in `--output_dir`, that directory
    cannot be written to, or the run would overwrite other files there.
    """
    checkpoint = None
    with explaining(f"--output_dir {output_dir} cannot be used", PermissionError):
        parent = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UserError(f"--output_dir {output_dir} cannot be used: {parent} is not a directory we may write to.")
    if name == "newest":
        checkpoint = next(reversed(list_checkpoints(output_dir)), None)
        print(f"resuming from {checkpoint}" if checkpoint else "no checkpoint found; starting from scratch")
    elif name is not None:
        checkpoint = Path(name)
        if checkpoint not in list_checkpoints(checkpoint.parent):
            raise UserError(f"--resume_from_checkpoint {name} is not a checkpoint-N folder of train.py.")
    check_output_dir(output_dir, checkpoint)
    return checkpoint


def check_output_dir(output_dir: Path, checkpoint: Path | None):
    """Raises UserError if a run that resumes from `checkpoint`, or starts from scratch, would overwrite other files.

    A directory with a lock file but no model may be used: a run ended there before its first checkpoint.
    """
    existing = list_checkpoints(output_dir)
    if checkpoint is not None and checkpoint.resolve() in [one.resolve() for one in existing]:
        if checkpoint.name != existing[-1].name:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint} is older than {existing[-1]}; resume from that one, delete "
                "the newer checkpoints, or choose another --output_dir."
            )
    elif existing or (output_dir / "config.json").exists():
        how = "resume with --resume_from_checkpoint, or" if existing else "fine-tune it with --model_name_or_path and"
        raise UserError(f"--output_dir {output_dir} already holds a model; {how} choose another directory.")
    elif output_dir.is_dir() and any(output_dir.iterdir()) and not (output_dir / LOCK).exists():
        raise UserError(f"--output_dir {output_dir} is not empty; choose another directory.")


def prepare_output_dir(lock: FileLock, checkpoint: Path | None, recipe: str):
    """Creates and locks the output directory, removes what a killed run was still writing, and writes `recipe.yaml`.

    Raises UserError if another run is using it, or has written to it since this run chose its `checkpoint`.
    """
    output_dir = Path(lock.lock_file).parent
    check_output_dir(output_dir, checkpoint)  # before there is a lock file of our own
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise UserError(f"Another run is writing to --output_dir {output_dir}; choose another directory.") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"warning: the file system of --output_dir {output_dir} cannot lock files ({one_line(error)}); see to it "
            "that no other run writes there at the same time."
        )
        (output_dir / LOCK).touch()
    check_output_dir(output_dir, checkpoint)  # the other run may have ended while we waited
    remove_unfinished(output_dir)
    write_text(output_dir / "recipe.yaml", recipe)


@contextmanager
def offering_resume(output_dir: Path) -> Iterator[None]:
    """Adds to an error of a file, such as a full disk, that the run can be resumed, if it has saved a checkpoint."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if list_checkpoints(output_dir):
            error.remedy = "; resume with --resume_from_checkpoint"
        raise


def scheduled_checkpoints(output_dir: Path, triggers: Triggers) -> list[Path]:
    """The checkpoints that were due at their step, oldest first; not those saved because of the time or a signal."""
    return [checkpoint for checkpoint in list_checkpoints(output_dir) if triggers.should_save(step_of(checkpoint))]


def prune_checkpoints(state: TrainerState, triggers: Triggers):
    """Deletes all but the `save_total_limit` newest checkpoints, the best, and those to be averaged at the end.

    Once a checkpoint was due at its step, those saved because of the time or a signal are only kept as the newest.
    """
    options, existing = triggers.options, list_checkpoints(triggers.options.output_dir)
    newest = (scheduled_checkpoints(options.output_dir, triggers) or existing)[-options.save_total_limit :]
    keep = [*newest, *final_checkpoints(state, triggers)]
    best = state.ranking(options.metric_for_best_model, options.greater_is_better)[:1]
    for checkpoint in existing[:-1]:
        if checkpoint not in keep and step_of(checkpoint) not in best:
            remove_folder(checkpoint, OPTIMIZER)


def final_model(weights: Weights, state: TrainerState, triggers: Triggers) -> nn.Module:
    """The full model with the weights that a run ends with: its last ones, or those of [`final_checkpoints`].

    It is `weights.full`, whose weights it overwrites.
    """
    if state.step < triggers.max_steps:
        PartialState().print(f"early stopping after step {state.step}")
    model = weights.to_score()
    if chosen := run_on_main(final_checkpoints, state, triggers):
        load_weights(model, average_checkpoints(chosen, use_ema=weights.average is not None))
        PartialState().print(f"using the weights of {', '.join(one.name for one in chosen)}")
    return model


def final_checkpoints(state: TrainerState, triggers: Triggers) -> list[Path]:
    """The checkpoints whose mean becomes the final model; none if that has the weights of the last step."""
    options = triggers.options
    scheduled = scheduled_checkpoints(options.output_dir, triggers)
    saved = {step_of(checkpoint): checkpoint for checkpoint in scheduled}
    ranking = state.ranking(options.metric_for_best_model, options.greater_is_better)
    best = [saved[step] for step in ranking if step in saved]
    if options.average_checkpoints:
        chosen = best if options.average_checkpoints_by == "score" else list(reversed(saved.values()))
        return sorted(chosen[: options.average_checkpoints], key=step_of)
    return best[:1] if options.early_stopping_patience else []


# ------------------------------------------------------------------------------------------ what must not have changed

# Settings that decide which pairs a batch holds, and which batches a step has.
FIXED = ("seed", "tokenizer_name", "per_device_train_max_tokens", "bpe_dropout", "data", "batches_per_step")
# Further ones for a stream, which has no fingerprint.
FIXED_IN_STREAM = ("dataset_name", "dataset_config_name", "train_file", "train_split", "source_lang", "target_lang")
FIXED_IN_STREAM += ("source_column", "target_column", "max_source_length", "max_target_length", "max_train_samples")
FIXED_IN_STREAM += ("train_file_tags", "train_file_langs", "dataset_revision")
# Sizes and switches of the model; the vocabulary is that of the checkpoint.
SIZES = {name for name in VanillaTransformerConfig.__annotations__ if "dropout" not in name} - {"vocab_size"}
# Settings that scores depend on.
SCORING = {"metric_for_best_model", "num_beams", "length_penalty", "bleu_tokenize", "target_lang", "validation"}
SCORING |= {"max_target_length"}  # the longest translation
SCORING |= {"metrics", "metric_kwargs", "greater_is_better", "score_normalization", "reference_columns"}
DESCRIPTIONS = {
    "data": "the training pairs (dataset, columns, limits or tokenizer)",
    "validation": "the validation pairs",
    "soft_targets": "the soft targets (--teacher, its weights or --teacher_top_k)",
    "batches_per_step": "batches per step (processes times --gradient_accumulation_steps) were {}, now {}",
}


def run_settings(recipe: dict, splits: dict, batches_per_step: int, mixed_precision: str) -> dict:
    """What a checkpoint keeps, to be compared with the settings of the run that resumes from it."""
    cache = splits["train"].cache_files if recipe["teacher"] else []  # named by a digest of pairs and teachers
    return recipe | {
        "data": fingerprint(splits["train"]),
        "validation": fingerprint(splits["validation"]),
        "soft_targets": [Path(file["filename"]).stem for file in cache],
        "batches_per_step": batches_per_step,
        "mixed_precision": mixed_precision,
    }


def compare_settings(checkpoint: Path, old: dict, new: dict) -> dict[str, str]:
    """The settings that changed since the checkpoint was written, each with a text that says how.

    Raises UserError if the model, the training pairs or the batches changed, so that the run cannot be resumed.
    """
    changed = {
        name: DESCRIPTIONS.get(name, f"--{name} was {{}}, now {{}}").format(old[name], new[name])
        for name in new
        if name in old and old[name] != new[name]
    }
    fixed = {*FIXED, *SIZES, *(FIXED_IN_STREAM if new["streaming"] else ())}
    if rejected := changed.keys() & fixed:
        culprits = ", ".join(changed[name] for name in new if name in rejected)
        raise UserError(
            f"Cannot resume, since these changed after {checkpoint} was written: {culprits}. Restore them"
            + ("." if rejected & SIZES else f", or start a new run with --model_name_or_path {checkpoint}.")
        )
    return changed


def resume(
    checkpoint: Path, settings: dict, output_dir: Path, weights: Weights, optimizer: AcceleratedOptimizer
) -> TrainerState:
    """Loads weights, moving average, optimizer state and loss scale, and prints which settings changed.

    Returns the trainer state with the new settings. Raises UserError if the checkpoint cannot be read, has no moving
    average, or belongs to other settings.
    """
    state = load_state(checkpoint)
    changed = compare_settings(checkpoint, state.settings, settings)
    if weights.average is not None and not (checkpoint / AVERAGE).exists():
        raise UserError(f"{checkpoint} was written without --ema_decay; leave that option out.")
    with reading_checkpoint(checkpoint, WEIGHTS):
        load_weights(weights.model, load_file(checkpoint / WEIGHTS))
    if weights.average is not None:
        with reading_checkpoint(checkpoint, AVERAGE):
            load_weights(weights.average.module, load_file(checkpoint / AVERAGE))
        weights.average.n_averaged.fill_(state.step)
    with reading_checkpoint(checkpoint, OPTIMIZER):
        load_optimizer(weights.model, optimizer.optimizer, load_file(checkpoint / OPTIMIZER))
    if state.scaler and optimizer.scaler is not None:
        optimizer.scaler.load_state_dict(state.scaler)
    for change in changed.values():
        PartialState().print(f"changed since {checkpoint}: {change}")
    if checkpoint.parent.resolve() != output_dir.resolve() or changed.keys() & SCORING:
        state.scores_count_from = len(state.history)  # earlier scores are not comparable, or not of this run
    state.settings = settings
    return state
