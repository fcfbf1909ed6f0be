"""Builds what a run needs from its options: tokenizer, model with its generation config, tokenized splits."""

import math
from argparse import Namespace
from collections.abc import Sized
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForSeq2SeqLM, GenerationConfig
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..conversion import load_foreign
from ..data.batches import lengths_of
from ..data.pairs import iter_texts, sample_texts, tokenize_pairs
from ..data.tokenizer import SPECIAL_TOKENS, check_coverage, load_tokenizer, special_token_ids, train_tokenizer
from ..errors import UserError, explaining, loading
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .arguments import model_fields
from .checkpoint import load_state
from .memory import check_model_fits, largest_batch
from .optimization import paper_learning_rate


def make_tokenizer(args, train_pairs, checkpoint: Path | None):
    """The tokenizer of the checkpoint, else of the model to fine-tune, the named one, the teacher's, or a new one.

    Prints what an existing one loses of the training texts. Raises UserError if that is nearly all, or if a tag of
    `--train_file_tags` is not one token of it, or is a special token.
    """
    tags = [tag for tag in args.train_file_tags or [] if tag]
    existing = {"--model_name_or_path": args.model_name_or_path, "--tokenizer_name": args.tokenizer_name}
    existing["--teacher"] = args.teacher and args.teacher[0]
    option = next((name for name, value in existing.items() if value is not None), None)
    if checkpoint is not None:
        if not (checkpoint / "tokenizer_config.json").is_file():
            raise UserError(f"{checkpoint} cannot be read: no tokenizer; delete it to resume from an older one.")
        tokenizer = load_tokenizer(str(checkpoint), "--resume_from_checkpoint")
    elif option is not None:
        tokenizer = load_tokenizer(existing[option], option)
        for side, texts in sample_texts(train_pairs).items():
            for tag in tags if side == "source" else ():
                texts = [text.removeprefix(f"{tag} ") for text in texts]
            if texts and (warning := check_coverage(tokenizer, texts, side, f"{option} {existing[option]}")):
                print(warning)
        if option == "--model_name_or_path" and args.vocab_size not in (None, len(tokenizer)):
            print(
                f"warning: --vocab_size {args.vocab_size} has no effect: {existing[option]} keeps its tokenizer with "
                f"{len(tokenizer)} tokens, to which none can be added."
            )
    else:
        count = 2 * len(train_pairs) if isinstance(train_pairs, Sized) else None
        size = args.vocab_size or VanillaTransformerConfig().vocab_size
        tokenizer = train_tokenizer(iter_texts(train_pairs), size, count, tags)
    for tag in tags:
        if tag in (getattr(tokenizer, name) for name in SPECIAL_TOKENS):
            raise UserError(f"--train_file_tags has {tag}, a special token of the tokenizer; choose another tag.")
        if len(tokenizer.tokenize(tag)) != 1:
            raise UserError(
                f"--train_file_tags has {tag}, which is not one token of the tokenizer; choose one that is, or let "
                "a tokenizer be trained."
            )
    return tokenizer


def make_model(args, tokenizer, device: torch.device) -> VanillaTransformerForConditionalGeneration:
    """A new model, or the one to fine-tune, with its generation config; on the CPU.

    Raises UserError if the options conflict with that model, with the tokenizer or with one another.
    """
    # On a CPU, eager attention is the fastest for short sentences.
    attention = args.attn_implementation or ("eager" if device.type == "cpu" else None)
    if device.type == "cpu" and attention == "flex_attention":
        raise UserError("--attn_implementation flex_attention cannot train on a CPU; choose eager or sdpa.")
    options = {"attn_implementation": attention, "dtype": torch.float32}
    if args.model_name_or_path:
        model = model_to_fine_tune(args, options)
    else:
        model = new_model(args, tokenizer, device, options)
    config, longest = model.config, max(args.max_source_length, args.max_target_length)
    if config.position_embedding_type == "learned" and longest > config.max_position_embeddings:
        raise UserError(
            f"--max_position_embeddings is {config.max_position_embeddings}, but sentences may have {longest} tokens, "
            "and learned positions end there; lower --max_source_length and --max_target_length or, for a new model, "
            "raise --max_position_embeddings."
        )
    if args.gradient_checkpointing:
        # The second name is that of transformers before 5.22.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.generation_config = make_generation_config(args, model)
    return model


def new_model(args, tokenizer, device: torch.device, options: dict) -> VanillaTransformerForConditionalGeneration:
    """A model with initial weights; `options` are those of transformers. Raises UserError if memory is too small."""
    fields, size = model_fields(args), len(tokenizer)
    asked = fields.get("vocab_size", size)
    if asked < size or (args.tokenizer_name and asked != size):
        raise UserError(f"--vocab_size is {asked}, but the tokenizer has {size} tokens; leave --vocab_size out.")
    config = VanillaTransformerConfig(**fields | {"vocab_size": size} | special_token_ids(tokenizer))
    # Training has gradients and Adam's two moments beside the weights, which are made on the CPU.
    check_model_fits(config, copies=1 if args.dry_run or device.type != "cpu" else 4)
    # There may be no such attention, or not on this machine.
    with explaining(f"Cannot build a model with {options['attn_implementation']} attention", ValueError, ImportError):
        return AutoModelForSeq2SeqLM.from_config(config, **options)


def model_to_fine_tune(args, options: dict) -> VanillaTransformerForConditionalGeneration:
    """Loads `--model_name_or_path`, converting it if needed, with the dropout options that were given.

    Raises UserError if it cannot be loaded, or if another model option was given with a different value; `vocab_size`
    is only for a tokenizer to train.
    """
    name, fields = args.model_name_or_path, model_fields(args)
    dropouts = {field: value for field, value in fields.items() if "dropout" in field}
    with loading(name, option="--model_name_or_path"):
        model = load_foreign(name, use_safetensors=True, **dropouts, **options)
    for field, value in fields.items():
        theirs = getattr(model.config, field)
        if value != theirs and field != "vocab_size":
            raise UserError(f"--{field} is {value}, but {theirs} in --model_name_or_path {name}.")
    return model


def tokenize_splits(pairs: dict, tokenizer, args, config: VanillaTransformerConfig, accelerator: Accelerator) -> dict:
    """Tokenizes all splits and prints how many pairs each has and how many were dropped.

    The length limits are for training. In evaluation, only pairs longer than `max_position_embeddings` are dropped.
    Sets `tokenizer.model_max_length` to the longest training source, unless the model to fine-tune has read longer
    ones: the Translator splits longer texts.
    """
    limit = config.max_position_embeddings
    if config.position_embedding_type != "learned":
        limit = max(limit, args.max_source_length, args.max_target_length)
    splits = {}
    for split, dataset in pairs.items():
        limits = (args.max_source_length, args.max_target_length) if split == "train" else (limit, limit)
        splits[split], drops = tokenize_pairs(dataset, tokenizer, *limits, split, args.preprocessing_num_workers)
        if drops is None:
            accelerator.print(f"{split}: a stream; empty and too long pairs will be dropped")
        else:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in drops.items())
            accelerator.print(f"{split}: {len(splits[split]):,} pairs (dropped: {reasons})")
    train = splits["train"]
    longest = lengths_of(train)[0].max() if isinstance(train, Sized) else args.max_source_length
    before = tokenizer.model_max_length if args.model_name_or_path else 0
    tokenizer.model_max_length = max(int(longest), before if before < VERY_LARGE_INTEGER else 0)
    return splits


# Kept from a Marian model: its decoder starts with the padding token, which these options keep out of the output.
KEPT_FROM_MARIAN = ("bad_words_ids", "forced_eos_token_id", "renormalize_logits")


def make_generation_config(args, model: VanillaTransformerForConditionalGeneration) -> GenerationConfig:
    """The defaults of `generate` for the trained model: the beams it was scored with, and a maximum length."""
    config = model.config
    ids = {name: getattr(config, name) for name in vars(config) if name.endswith("_token_id")}
    kept = {name: getattr(model.generation_config, name) for name in KEPT_FROM_MARIAN}
    beams = {"num_beams": args.num_beams, "length_penalty": args.length_penalty} if args.num_beams > 1 else {}
    longest = args.max_target_length + 1  # and the start token
    if config.position_embedding_type == "learned":
        longest = min(longest, config.max_position_embeddings)
    return GenerationConfig(max_length=longest, **beams, **ids, **kept)


def resolve_defaults(args, model, train, checkpoint: Path | None, accelerator: Accelerator):
    """A copy of the options in which an unset learning rate and an `auto` batch size have values.

    The learning rate defaults to the paper's peak. A batch size of `auto` becomes that of the resumed run, or the
    largest that fits into memory.
    """
    args = Namespace(**vars(args))
    if args.learning_rate is None:
        args.learning_rate = paper_learning_rate(model.config.d_model, args.warmup_steps)
    if args.per_device_train_max_tokens == "auto":
        if checkpoint is not None:
            args.per_device_train_max_tokens = load_state(checkpoint).settings["per_device_train_max_tokens"]
        else:
            args.per_device_train_max_tokens = largest_batch(model, args, accelerator, longest_side(train, args))
            accelerator.print(f"--per_device_train_max_tokens auto: {args.per_device_train_max_tokens:,} tokens")
    return args


def longest_side(train, args) -> int:
    """The tokens of the longest side of all pairs; for a stream, where they are unknown, the limit."""
    if isinstance(train, Sized):
        return int(max(side.max() for side in lengths_of(train)))
    return max(args.max_source_length, args.max_target_length)


def count_steps(args, batches, batches_per_step: int, done: int, accelerator: Accelerator) -> int:
    """The optimizer steps of the run, from `max_steps` or epochs, which are also printed.

    Raises UserError if more are `done` already.
    """
    count = args.max_steps or math.ceil(args.num_train_epochs * len(batches.epoch()) / batches_per_step)
    if count < done:
        remedy = "raise --max_steps or --num_train_epochs"
        raise UserError(f"The run ends at step {count}, but checkpoint-{done} is past it; {remedy}.")
    accelerator.print(f"steps {done:,} to {count:,}, learning rate up to {args.learning_rate:.2e}")
    if count < args.warmup_steps:
        accelerator.print("warning: the run ends during warm-up; lower --warmup_steps, or train longer.")
    return count
