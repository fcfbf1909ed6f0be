"""Resuming a run: which checkpoint, and which settings must not have changed since it was written."""

import os
from pathlib import Path

from accelerate import PartialState
from accelerate.optimizer import AcceleratedOptimizer

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data.encoding import fingerprint
from ..errors import UserError, explaining
from .checkpoint import list_checkpoints, load_state, load_tensors
from .run_folder import check_output_dir
from .state import TrainerState
from .weights import Weights

# Settings that decide which pairs a batch holds, which batches a step has, and which optimizer state is saved.
FIXED = {"seed", "optimizer", "tokenizer_name", "per_device_train_max_tokens", "bpe_dropout", "joined_pairs"}
FIXED |= {"data", "batches_per_step"}
# Further ones for a stream, which has no fingerprint.
FIXED_IN_STREAM = {"dataset_name", "dataset_config_name", "train_file", "train_split", "source_lang", "target_lang"}
FIXED_IN_STREAM |= {"source_column", "target_column", "max_source_length", "max_target_length", "max_train_samples"}
FIXED_IN_STREAM |= {"train_file_tags", "train_file_langs", "dataset_revision"}
# Further ones with joined pairs, which must fit.
FIXED_IF_JOINED = {"max_source_length", "max_target_length"}
# What a trained tokenizer is like; it is that of the checkpoint.
TOKENIZER = {"tokenizer_type", "letters", "split_digits", "verbatim"}
# Sizes and switches of the model; the vocabulary is that of the checkpoint, and training keeps no cache.
ARCHITECTURE = {name for name in VanillaTransformerConfig.__annotations__ if "dropout" not in name}
ARCHITECTURE -= {"vocab_size", "use_cache"}
# Settings that scores depend on.
SCORING = {"metric_for_best_model", "num_beams", "length_penalty", "bleu_tokenize", "target_lang", "validation"}
SCORING |= {"max_target_length"}  # the longest translation
SCORING |= {"ema_decay", "max_source_sentences", "max_source_lines"}  # what is scored, and in which pieces
SCORING |= {"metrics", "metric_kwargs", "greater_is_better", "score_normalization", "reference_columns"}
DESCRIPTIONS = {
    "data": "the training pairs (files, columns, what is held out, limits or tokenizer)",
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


def as_words(value):
    """A list as it is given on the command line; any other value as it is."""
    return " ".join(map(str, value)) if isinstance(value, list) else value


def compare_settings(checkpoint: Path, old: dict, new: dict) -> dict[str, str]:
    """The settings that changed since the checkpoint was written, each with a text that says how.

    Raises UserError if the model, the training pairs or the batches changed, so that the run cannot be resumed.
    """
    changed = {
        name: DESCRIPTIONS.get(name, f"--{name} was {{}}, now {{}}").format(*map(as_words, (old[name], new[name])))
        for name in new
        if name in old and as_words(old[name]) != as_words(new[name])
    }
    fixed = FIXED | ARCHITECTURE | TOKENIZER
    fixed |= (FIXED_IN_STREAM if new["streaming"] else set()) | (FIXED_IF_JOINED if new.get("joined_pairs") else set())
    if rejected := changed.keys() & fixed:
        culprits = ", ".join(changed[name] for name in new if name in rejected)
        is_kept = rejected & (ARCHITECTURE | TOKENIZER)  # by fine-tuning, too
        other = "" if is_kept else f", or start a new run with --model_name_or_path {checkpoint}"
        raise UserError(
            f"Cannot resume, since these changed after {checkpoint} was written: {culprits}. Restore them{other}."
        )
    return changed


def find_checkpoint(output_dir: Path, name: str | None) -> Path | None:
    """The checkpoint `--resume_from_checkpoint` names; None if it is not given, or before the first checkpoint.

    Raises UserError if the given path is not a checkpoint, or is an older one of `--output_dir`, if that directory
    cannot be written to, or if the run would overwrite other files there.
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


def resume(
    checkpoint: Path, settings: dict, output_dir: Path, weights: Weights, optimizer: AcceleratedOptimizer
) -> TrainerState:
    """Loads weights, moving average, optimizer state and loss scale, and prints which settings changed.

    Returns the trainer state with the new settings. Raises UserError if the checkpoint cannot be read, has no moving
    average, or belongs to other settings.
    """
    state = load_state(checkpoint)
    changed = compare_settings(checkpoint, state.settings, settings)
    load_tensors(checkpoint, state, weights, optimizer)
    for change in changed.values():
        PartialState().print(f"changed since {checkpoint}: {change}")
    if checkpoint.parent.resolve() != output_dir.resolve() or changed.keys() & SCORING:
        state.scores_count_from = len(state.history)  # earlier scores are not comparable, or not of this run
    state.settings = settings
    return state
