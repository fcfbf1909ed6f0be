"""Builds what a run needs from its options: tokenizer, model with its generation config, tokenized splits."""

import contextlib
import math
import textwrap
from collections.abc import Iterable, Sized
from dataclasses import replace
from pathlib import Path

import datasets
import tokenizers
import torch
from accelerate import Accelerator, PartialState
from datasets import IterableDataset
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, GenerationConfig
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..conversion import load_foreign
from ..data import encoding
from ..data import tokenizer as tokenizer_code
from ..data.batches import lengths_of
from ..data.encoding import digest_texts, iter_texts, sample_texts, tokenize_pairs
from ..data.options import DataOptions
from ..data.tokenizer import (
    SPECIAL_TOKENS,
    check_coverage,
    describe_losses,
    load_tokenizer,
    special_token_ids,
    train_tokenizer,
    wrap_trained,
)
from ..errors import UserError, explaining, loading
from ..files import write_text
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .checkpoint import load_state
from .dropout import use_byte_dropout
from .hardware import check_model_fits, largest_batch
from .optimization import default_learning_rate
from .options import TrainingOptions
from .processes import run_on_main

MANY_TOO_LONG = 0.1  # share of the pairs of a split


def existing_tokenizer(
    options: TrainingOptions, tokenizer_name: str | None, checkpoint: Path | None
) -> tuple[str, str] | None:
    """The option that names the tokenizer to load, and its value; None: a new one is trained.

    The first of these that is given: the checkpoint, the model to fine-tune, `--tokenizer_name`, a teacher.
    """
    named = {"--resume_from_checkpoint": checkpoint and str(checkpoint)}
    named |= {"--model_name_or_path": options.model_name_or_path, "--tokenizer_name": tokenizer_name}
    named |= {"--teacher": options.teacher and options.teacher[0]}
    return next(((option, name) for option, name in named.items() if name is not None), None)


def make_tokenizer(
    existing: tuple[str, str] | None,
    train_pairs,
    vocab_size: int | None = None,
    tags: Iterable[str] | None = None,
    verbatim: bool = False,
):
    """The tokenizer that [`existing_tokenizer`] found, or else a new one, trained on the training pairs.

    Prints what it loses of the training texts. Raises UserError if that is nearly all, if one of the `tags` is not one
    token of it, or is a special token, or if an existing tokenizer is to be `verbatim` and is not.
    """
    tags = [tag for tag in tags or [] if tag]
    if existing is None:
        size = vocab_size or VanillaTransformerConfig().vocab_size
        tokenizer = trained_tokenizer(train_pairs, size, tags, verbatim)
    else:
        option, name = existing
        if option == "--resume_from_checkpoint" and not Path(name, "tokenizer_config.json").is_file():
            raise UserError(f"{name} cannot be read: no tokenizer; delete it to resume from an older one.")
        tokenizer = load_tokenizer(name, option)
        if option != "--resume_from_checkpoint":
            report_lost_text(tokenizer, train_pairs, f"{option} {name}", tags)
        if verbatim and not tokenizer.init_kwargs.get("verbatim"):
            raise UserError(f"--verbatim trains a tokenizer, but {option} {name} brings one; leave one of them out.")
        if option == "--model_name_or_path" and vocab_size not in (None, len(tokenizer)):
            print(
                f"warning: --vocab_size {vocab_size} has no effect: {name} keeps its tokenizer with "
                f"{len(tokenizer)} tokens, to which none can be added."
            )
    for side, texts in sample_texts(train_pairs, tags=tags).items():
        if note := describe_losses(tokenizer, texts, side):
            print(textwrap.fill(note, 80, subsequent_indent="  "))
    for tag in tags:
        if tag in (getattr(tokenizer, name) for name in SPECIAL_TOKENS):
            raise UserError(f"--train_file_tags has {tag}, a special token of the tokenizer; choose another tag.")
        if len(tokenizer.tokenize(tag)) != 1:
            raise UserError(
                f"--train_file_tags has {tag}, which is not one token of the tokenizer; choose one that is, or let "
                "a tokenizer be trained."
            )
    return tokenizer


def trained_tokenizer(train_pairs, size: int, tags: list[str], verbatim: bool):
    """A tokenizer trained on the pairs: by an earlier run, which left it beside the cache of `datasets`, or now.

    The name of its file is a digest of the texts, the arguments and the code. Streams have no digest, and their
    tokenizers are always trained.
    """
    if not isinstance(train_pairs, Sized):
        return train_tokenizer(iter_texts(train_pairs), size, None, tags, verbatim)
    code = [Path(module.__file__).read_bytes() for module in (tokenizer_code, encoding)] + [tokenizers.__version__]
    key = Hasher.hash((digest_texts(train_pairs), size, tags, verbatim, code))
    file = Path(datasets.config.HF_DATASETS_CACHE) / "tokenizers" / f"{key}.json"
    with contextlib.suppress(Exception):  # missing, or damaged in any way: it is trained (again)
        tokenizer = wrap_trained(Tokenizer.from_str(file.read_text(encoding="utf-8")), verbatim)
        print(f"the tokenizer was trained by an earlier run on these pairs, which left it in {file}")
        return tokenizer
    tokenizer = train_tokenizer(iter_texts(train_pairs), size, 2 * len(train_pairs), tags, verbatim)
    with contextlib.suppress(OSError):  # then the next run trains it again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, tokenizer.backend_tokenizer.to_str())
    return tokenizer


def report_lost_text(tokenizer, train_pairs, origin: str, tags: list[str]):
    """Prints how much of the training texts the tokenizer loses; `origin` is the option that gave it."""
    for side, texts in sample_texts(train_pairs, tags=tags).items():
        if texts and (warning := check_coverage(tokenizer, texts, side, origin)):
            print(warning)


def make_model(
    fields: dict, options: TrainingOptions, data: DataOptions, tokenizer, device: torch.device
) -> VanillaTransformerForConditionalGeneration:
    """A new model, or the one to fine-tune, with its generation config; still on the CPU.

    `fields` are those of the config that were given. Raises UserError if the options conflict with that model, with
    the tokenizer or with one another.
    """
    # On a CPU, eager attention is the fastest for short sentences.
    attention = options.attn_implementation or ("eager" if device.type == "cpu" else None)
    if device.type == "cpu" and attention == "flex_attention":
        raise UserError("--attn_implementation flex_attention cannot train on a CPU; choose eager or sdpa.")
    if options.model_name_or_path:
        model = model_to_fine_tune(options.model_name_or_path, fields, attention)
    else:
        # Training has gradients and Adam's two moments beside the weights, which are made on the CPU.
        copies = 1 if options.dry_run or device.type != "cpu" else 4
        model = new_model(
            fields, tokenizer, attention, copies, may_shrink=not (data.tokenizer_name or options.teacher)
        )
    config, longest = model.config, data.length_limit
    if longest > config.longest_sequence:
        raise UserError(
            f"--max_position_embeddings is {config.longest_sequence}, but sentences may have {longest} tokens, "
            "and learned positions end there; lower --max_source_length and --max_target_length or, for a new model, "
            "raise --max_position_embeddings."
        )
    if options.gradient_checkpointing:
        # The second name is that of transformers before 5.22.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if device.type == "cpu":
        use_byte_dropout(model)
    model.generation_config = make_generation_config(model, data.max_target_length, options)
    return model


def new_model(
    fields: dict, tokenizer, attention: str | None, copies: int, may_shrink: bool
) -> VanillaTransformerForConditionalGeneration:
    """A model with initial weights. Raises UserError if `copies` of them do not fit into memory.

    `may_shrink`: whether the tokenizer was trained, so that it may have fewer tokens than `vocab_size` asked for.
    """
    size = len(tokenizer)
    asked = fields.get("vocab_size", size)
    if asked < size or (asked != size and not may_shrink):
        raise UserError(f"--vocab_size is {asked}, but the tokenizer has {size} tokens; leave --vocab_size out.")
    config = VanillaTransformerConfig(**fields | {"vocab_size": size} | special_token_ids(tokenizer))
    check_model_fits(config, copies)
    # There may be no such attention, or not on this machine.
    with explaining(f"Cannot build a model with {attention} attention", ValueError, ImportError):
        return AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def model_to_fine_tune(name: str, fields: dict, attention: str | None) -> VanillaTransformerForConditionalGeneration:
    """Loads `--model_name_or_path`, converting it if needed, with the dropout options that were given.

    Raises UserError if it cannot be loaded, or if another model option was given with a different value; `vocab_size`
    is only for a tokenizer to train.
    """
    dropouts = {field: value for field, value in fields.items() if "dropout" in field}
    with loading(name, option="--model_name_or_path"):
        model = load_foreign(name, True, attn_implementation=attention, dtype=torch.float32, **dropouts)
    for field, value in fields.items():
        theirs = getattr(model.config, field)
        if value != theirs and field != "vocab_size":
            raise UserError(f"--{field} is {value}, but {theirs} in --model_name_or_path {name}.")
    return model


def tokenize_splits(
    pairs: dict, tokenizer, options: DataOptions, config: VanillaTransformerConfig, keeps_length: bool
) -> dict:
    """Tokenizes all splits but streams, and prints how many pairs each has and how many were dropped.

    The length limits are for training. In evaluation, only pairs longer than `max_position_embeddings` are dropped.
    Sets `tokenizer.model_max_length` to the longest training source: the Translator splits longer texts. With
    `keeps_length`, it is never lowered: a model to fine-tune may have read longer sources.
    """
    limit = min(max(config.max_position_embeddings, options.length_limit), config.longest_sequence)
    splits = {}
    for split, dataset in pairs.items():
        if isinstance(dataset, IterableDataset):
            splits[split] = dataset
            PartialState().print(f"{split}: a stream; empty and too long pairs will be dropped")
            continue
        limits = (options.max_source_length, options.max_target_length) if split == "train" else (limit, limit)
        try:
            workers = options.preprocessing_num_workers
            splits[split], drops = tokenize_pairs(dataset, tokenizer, *limits, split, workers)
        except KeyboardInterrupt:
            kept = ["the tokenizer"] if isinstance(pairs["train"], Sized) else []
            kept += [f"the tokens of {name}" for name, done in splits.items() if isinstance(done, Sized)]
            found = f"{' and '.join(kept)} will be found again, " if kept else ""
            message = f"stopped while tokenizing {split}; {found}{split} tokenized from its start"
            raise KeyboardInterrupt(message) from None
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in drops.items())
        PartialState().print(f"{split}: {len(splits[split]):,} pairs (dropped: {reasons})")
        if drops["too long"] > MANY_TOO_LONG * len(dataset):
            PartialState().print(
                f"warning: {drops['too long']:,} of {len(dataset):,} {split} pairs are dropped, since a side is "
                f"longer than {max(limits)} tokens; raise --max_source_length and --max_target_length."
            )
    train = splits["train"]
    longest = lengths_of(train)[0].max() if isinstance(train, Sized) else options.max_source_length
    before = tokenizer.model_max_length if keeps_length else 0
    tokenizer.model_max_length = max(int(longest), before if before < VERY_LARGE_INTEGER else 0)
    return splits


def note_source_form(tokenizer, pairs: dict, options: DataOptions, keeps_more: bool):
    """Notes in the tokenizer how many sentences and lines a training source may have, and prints it; evaluation and
    the Translator cut texts accordingly.

    Every process must call it, as only the main one has looked at the pairs. The options win. With `keeps_more`, no
    number is lowered: a model to fine-tune may have read more.
    """
    survey = run_on_main(getattr(pairs, "survey", {}).get, "train")
    noted = {}
    for unit, asked in {"sentences": options.max_source_sentences, "lines": options.max_source_lines}.items():
        before = tokenizer.init_kwargs.get(f"max_source_{unit}", 0) if keeps_more else 0
        if number := asked or (survey and max(survey[f"usual_{unit}"], before)):
            tokenizer.init_kwargs[f"max_source_{unit}"] = noted[unit] = number
    if noted:
        limits = " and ".join(f"{number:,} {unit[: -1 if number == 1 else None]}" for unit, number in noted.items())
        PartialState().print(
            f"texts are translated in pieces of up to {limits}, as in training (--max_source_sentences, "
            "--max_source_lines)"
        )


# Kept from a Marian model: its decoder starts with the padding token, which these options keep out of the output.
KEPT_FROM_MARIAN = ("bad_words_ids", "forced_eos_token_id", "renormalize_logits")


def make_generation_config(
    model: VanillaTransformerForConditionalGeneration, max_target_length: int, options: TrainingOptions
) -> GenerationConfig:
    """The defaults of `generate` for the trained model: the beams it was scored with, and a maximum length."""
    config = model.config
    ids = {name: getattr(config, name) for name in vars(config) if name.endswith("_token_id")}
    kept = {name: getattr(model.generation_config, name) for name in KEPT_FROM_MARIAN}
    beams = {"num_beams": options.num_beams, "length_penalty": options.length_penalty} if options.num_beams > 1 else {}
    longest = min(max_target_length + 1, config.longest_sequence)  # with the start token
    return GenerationConfig(max_length=longest, **beams, **ids, **kept)


def resolve_defaults(
    options: TrainingOptions, model, longest: int, checkpoint: Path | None, accelerator: Accelerator
) -> TrainingOptions:
    """The options with values for an unset learning rate and an `auto` batch size.

    Both are those of the resumed run, if there is one. Otherwise, the learning rate is [`default_learning_rate`], and
    the batch size is the largest that fits into memory when the longest side of every pair has `longest` tokens.
    """
    before = load_state(checkpoint).settings if checkpoint is not None else {}
    if options.learning_rate is None and "learning_rate" in before:
        options = replace(options, learning_rate=before["learning_rate"])
    elif options.learning_rate is None:
        is_new = options.model_name_or_path is None
        peak, reason = default_learning_rate(model.config.d_model, options.warmup_steps, is_new)
        options = replace(options, learning_rate=peak)
        if reason:
            accelerator.print(reason)
    size = options.per_device_train_max_tokens
    if size is None and before:
        size = before["per_device_train_max_tokens"]
    elif size is None:
        size = largest_batch(model, options, accelerator, longest)
        accelerator.print(f"--per_device_train_max_tokens auto: {size:,} tokens")
    return replace(options, per_device_train_max_tokens=size)


def longest_side_of(train, limit: int) -> int:
    """The tokens of the longest side of all pairs; for a stream, where they are unknown, the limit."""
    return int(max(side.max() for side in lengths_of(train))) if isinstance(train, Sized) else limit


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
