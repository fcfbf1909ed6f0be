"""The model of a run: a new one, or the one to fine-tune, with its generation config."""

import torch
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data.options import DataOptions
from ..data.tokenizer import special_token_ids
from ..errors import UserError, explaining, noting
from ..loading import load_foreign
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .dropout import use_byte_dropout
from .memory import check_model_fits
from .options import ModelOptions, TrainingOptions, given_fields


def make_model(
    model_options: ModelOptions,
    options: TrainingOptions,
    data_options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> VanillaTransformerForConditionalGeneration:
    """A new model, or the one to fine-tune, with its generation config; still on the CPU.

    Raises UserError if the options conflict with that model, with the tokenizer or with one another.
    """
    fields = given_fields(model_options)
    attention = choose_attention(options.attn_implementation, device)
    if options.model_name_or_path:
        model = model_to_fine_tune(options.model_name_or_path, fields, attention)
    else:
        is_trained = not (data_options.tokenizer_name or options.teacher)
        model = new_model(make_config(fields, tokenizer, may_shrink=is_trained), attention)
    config, longest = model.config, data_options.length_limit
    if longest > config.longest_sequence:
        raise UserError(
            f"--max_position_embeddings is {config.longest_sequence}, but sentences may have {longest} tokens, "
            "and learned positions end there; lower --max_source_length and --max_target_length or, for a new model, "
            "raise --max_position_embeddings."
        )
    prepare_layers(model, options, device)
    model.generation_config = make_generation_config(model, data_options.max_target_length, options)
    return model


def prepare_layers(model: VanillaTransformerForConditionalGeneration, options: TrainingOptions, device: torch.device):
    """Turns on what training changes in the layers: gradient checkpointing and, on a CPU, faster dropout."""
    if options.gradient_checkpointing:
        # The second name is that of transformers before 5.22.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if device.type == "cpu":
        use_byte_dropout(model)


def choose_attention(asked: str | None, device: torch.device) -> str | None:
    """The attention that is asked for or, on a CPU, eager: the fastest one there for short sentences.

    Raises UserError if it cannot train there.
    """
    if device.type == "cpu" and asked == "flex_attention":
        raise UserError("--attn_implementation flex_attention cannot train on a CPU; choose eager or sdpa.")
    return asked or ("eager" if device.type == "cpu" else None)


def make_config(fields: dict, tokenizer, may_shrink: bool) -> VanillaTransformerConfig:
    """The config of a new model with the given `fields`.

    `may_shrink`: whether the tokenizer was trained, so that it may have fewer tokens than `vocab_size` asked for.
    """
    size = len(tokenizer)
    asked = fields.get("vocab_size", size)
    if asked < size or (asked != size and not may_shrink):
        raise UserError(f"--vocab_size is {asked}, but the tokenizer has {size} tokens; leave --vocab_size out.")
    return VanillaTransformerConfig(**fields | {"vocab_size": size} | special_token_ids(tokenizer))


def new_model(config: VanillaTransformerConfig, attention: str | None) -> VanillaTransformerForConditionalGeneration:
    """A model with initial weights. Raises UserError if it does not fit into memory, or has no such attention."""
    check_model_fits(config)
    # There may be no such attention, or not on this machine.
    with explaining(f"Cannot build a model with {attention} attention", ValueError, ImportError):
        return AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def model_to_fine_tune(name: str, fields: dict, attention: str | None) -> VanillaTransformerForConditionalGeneration:
    """Loads `--model_name_or_path`, converting it if needed, with the dropout options that were given.

    Raises UserError if it cannot be loaded, or if another model option was given with a different value; `vocab_size`
    is only for a tokenizer to train.
    """
    dropouts = {field: value for field, value in fields.items() if "dropout" in field}
    with noting(f"while loading --model_name_or_path {name}"):
        model = load_foreign(name, True, attn_implementation=attention, dtype=torch.float32, **dropouts)
    for field, value in fields.items():
        theirs = getattr(model.config, field)
        if value != theirs and field != "vocab_size":
            raise UserError(f"--{field} is {value}, but {theirs} in --model_name_or_path {name}.")
    return model


# A Marian model's decoder starts with the padding token; these options keep that token out of the output.
KEPT_FROM_MARIAN = ("bad_words_ids", "forced_eos_token_id", "renormalize_logits")


def make_generation_config(
    model: VanillaTransformerForConditionalGeneration, max_target_length: int, options: TrainingOptions
) -> GenerationConfig:
    """The defaults of `generate` for the trained model: the beams it was scored with, and a maximum length, which is
    never lowered in fine-tuning."""
    config = model.config
    longest = min(max_target_length, config.longest_sequence) + 1  # with the start token
    before = model.generation_config.max_length if options.model_name_or_path else None
    ids = {name: getattr(config, name) for name in vars(config) if name.endswith("_token_id")}
    kept = {name: getattr(model.generation_config, name) for name in KEPT_FROM_MARIAN}
    return GenerationConfig(
        max_length=max(longest, before or 0),
        num_beams=options.num_beams if options.num_beams > 1 else None,
        length_penalty=options.length_penalty if options.num_beams > 1 else None,
        **ids,
        **kept,
    )
