"""The options of the model, which are the fields of its config, and of training."""

import inspect
import re
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Literal, get_origin

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..option_fields import option

# Config fields that follow from the tokenizer or are constant.
NOT_OPTIONS = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "decoder_vocab_size"}
NOT_OPTIONS |= {"is_encoder_decoder"}


def make_model_options() -> type:
    """A dataclass with the fields of the model's config, documented by its docstring; None means the default."""
    # Cleaned, since Python 3.13 strips the common indentation of a docstring and earlier versions keep it.
    docstring = inspect.cleandoc(VanillaTransformerConfig.__doc__ or "")  # `python -OO` has no docstrings
    texts = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", docstring, re.MULTILINE))
    texts["vocab_size"] = "Maximum vocabulary size of the tokenizer to train; a small corpus may give fewer tokens."
    defaults, own = VanillaTransformerConfig(), VanillaTransformerConfig.__annotations__
    options = []
    for item in fields(VanillaTransformerConfig):
        if item.name in own and item.name not in NOT_OPTIONS:
            default = getattr(defaults, item.name)
            kind = item.type if get_origin(item.type) is Literal else type(default)
            shown = "" if item.default is None else f" (default: {default})"
            text = " ".join(texts.get(item.name, "").split()).removesuffix(".") + shown
            text = text[:1].lower() + text[1:]  # as other options
            switch = {"nargs": "?", "const": True} if kind is bool else {}  # `--norm_first` and `--norm_first false`
            options.append((item.name, kind | None, option(None, text, **switch)))
    return make_dataclass("ModelOptions", options, frozen=True)


ModelOptions = make_model_options()


def given_fields(options: ModelOptions) -> dict:
    """The config fields that the command line or the recipe set, with their values."""
    return {name: value for name, value in vars(options).items() if value is not None}


@dataclass(frozen=True)
class TrainingOptions:
    """How the model is trained and scored."""

    output_dir: Path = option(Path("outputs/model"), "where the model, its checkpoints and its results are written")
    size: Literal["auto", "tiny", "small", "medium", "base", "big", "paper"] | None = option(
        None,
        "size of the model: tiny (d_model 64) to big (1,024); auto: by the data and --hours; other options that are "
        "not given are chosen to fit; paper: the paper's, and nothing is chosen (default: auto without a recipe)",
    )
    hours: float | None = option(
        None, "train for about this many hours, or less if more would bring little (default: 1)", ge=1e-3, lt=1e5
    )
    dry_run: bool = option(
        False, "print the recipe, try some steps that change nothing, print their time and memory, and exit"
    )
    model_name_or_path: str | None = option(
        None, "fine-tune this model (ours or convertible); it keeps its sizes and its tokenizer"
    )
    per_device_train_max_tokens: int | None = option(
        4096,
        "tokens in a batch on each device: sentences x longest side; auto (GPU only): most of what fits, up to 32,768",
        ge=1,
        lt=2**31,
        auto=True,
    )
    per_device_eval_max_tokens: int = option(4096, "tokens in a batch in evaluation", ge=1, lt=2**31)
    gradient_accumulation_steps: int = option(1, "batches per device in an optimizer step", ge=1)
    learning_rate: float | None = option(
        None,
        "peak learning rate (default: (d_model x warmup_steps)^-0.5, but after a short warm-up at most 3e-3, or less "
        "above a d_model of 120, and in fine-tuning at most 4e-4, or 0.0512 / d_model above 128; of a new model with "
        "muon 5e-3, or 0.512 / d_model above 128)",
        ge=0,
    )
    lr_scheduler_type: Literal[
        "inverse_sqrt", "linear", "cosine", "polynomial", "constant", "constant_with_warmup", "warmup_stable_decay"
    ] = option(
        "inverse_sqrt",
        "the paper's schedule, or another one of transformers; warmup_stable_decay stays at the peak until a fifth of "
        "the steps is left; until then, a run can be resumed with another length",
    )
    warmup_steps: int = option(4000, "steps of linear warm-up to the peak learning rate", ge=0)
    max_steps: int | None = option(None, "optimizer steps to train (default: num_train_epochs epochs)", ge=1)
    num_train_epochs: float = option(10.0, "epochs to train if max_steps is not given", ge=1e-6)
    optimizer: Literal["adamw", "muon"] = option(
        "adamw", "the paper's Adam, or Muon for the matrices of the layers and Adam for the rest"
    )
    label_smoothing_factor: float = option(
        0.1, "share of the probability of the right token that is spread over the vocabulary (section 5.4)", ge=0, lt=1
    )
    max_grad_norm: float = option(1.0, "clip the gradient norm at this value; 0: no clipping", ge=0)
    weight_decay: float = option(0.0, "weight decay of the matrices", ge=0)
    adam_beta1: float = option(0.9, "decay of Adam's running mean of the gradients (section 5.3)", ge=0, lt=1)
    adam_beta2: float = option(0.98, "decay of Adam's running mean of the squared gradients (section 5.3)", ge=0, lt=1)
    adam_epsilon: float = option(
        1e-9, "added to the root of the mean of the squared gradients, Adam's divisor (section 5.3)", ge=0
    )
    ema_decay: float | None = option(None, "decay of a moving average of the weights, to score and save", ge=0, lt=1)
    average_checkpoints: int = option(
        0, "average the weights of N checkpoints at the end (section 6.1); 0: do not", ge=0
    )
    average_checkpoints_by: Literal["last", "score"] = option(
        "last", "average the last N checkpoints, or the N best by metric_for_best_model"
    )
    teacher: list[str] | None = option(
        None,
        "distill these models (ours or convertible; directories or Hub ids, all with the same vocabulary): the "
        "student also learns the mean of their predicted distributions; it takes the first one's tokenizer",
    )
    teacher_top_k: int = option(8, "most probable tokens of the teachers that are kept at each position", ge=1)
    distillation_weight: float = option(0.5, "share of the teachers in the loss; the labels have the rest", ge=0)
    distillation_temperature: float = option(
        1.0, "softmax temperature of teachers and student; above 1 flattens both distributions", ge=0.1, lt=100
    )
    r_drop_alpha: float = option(0.0, "weight of R-Drop between two dropout passes; 5 is common, 0: none", ge=0)
    seed: int = option(42, "seed of the initial weights, the order of the pairs and the dropout", ge=0, lt=2**63)
    attn_implementation: str | None = option(None, "eager, sdpa, ... (default: eager on a CPU, else sdpa)")
    torch_compile: bool = option(False, "compile the layers, once for all batch shapes")
    gradient_checkpointing: bool = option(False, "recompute layers in the backward pass to save memory")
    eval_steps: int = option(0, "evaluate every N steps; 0: only at the end", ge=0)
    save_steps: int = option(
        0, "save every N steps; 0: every 15 minutes; each evaluation and the last step also save", ge=0
    )
    logging_steps: int = option(10, "log every N steps", ge=1)
    save_total_limit: int = option(2, "keep the N newest checkpoints, the best, and those to be averaged", ge=1)
    resume_from_checkpoint: str | None = option(
        None, "resume from this checkpoint, or from the newest one in output_dir", nargs="?", const="newest"
    )
    early_stopping_patience: int = option(
        0, "stop after N evaluations without a better metric_for_best_model, and keep the best weights; 0: never", ge=0
    )
    metric_for_best_model: str = option(
        "bleu",
        "bleu, chrf, loss, exact_match, word_error_rate or the name of a score of --metrics, on the validation split",
        metavar="METRIC",
    )
    greater_is_better: bool | None = option(
        None,
        "whether higher values of metric_for_best_model are better (default: not of losses and error rates)",
        nargs="?",
        const=True,
    )
    metrics: list[str] | None = option(
        None,
        "metrics of each evaluation from the evaluate library: ids such as rouge, or local scripts; their code runs",
        action="extend",
    )
    metric_kwargs: list[str] | None = option(
        None,
        "arguments of the metrics: KEY=VALUE or, of one of several, MODULE.KEY=VALUE, as rouge.use_stemmer=true",
        action="extend",
    )
    on_divergence: Literal["stop", "ignore"] = option("stop", "what to do if the loss stays high; NaN always stops")
    num_beams: int = option(1, "beams in evaluation; saved with the model as its default", ge=1)
    length_penalty: float = option(1.0, "beam scores are divided by length ** length_penalty", ge=-10, lt=10)
    tune_decoding: bool = option(
        False, "choose num_beams and length_penalty at the end, by metric_for_best_model (bleu if that is the loss)"
    )
    num_examples: int = option(
        3, "held-out sentences to show in the log, the card, all_results.json and attention.png; 0: none", ge=0
    )
    bleu_tokenize: str | None = option(None, "sacreBLEU tokenizer (default: chosen by target language, else 13a)")
    score_normalization: Literal["none", "nfc"] | None = option(
        None,
        "nfc: compose letters and remove invisible characters on both sides before scoring, which the signatures say "
        "(default: none, or nfc if the tokenizer can only write references so)",
    )
    report_to: str = option(
        "none", "none, tensorboard, wandb, trackio, ...; all: each that is installed", metavar="TRACKER"
    )
    run_name: str | None = option(None, "the name of the run in the trackers (default: they choose one)")
    license: str | None = option(None, "the license of the weights, for the model card, such as cc-by-4.0")
    push_to_hub: bool = option(False, "push the trained model to the Hub")
    hub_model_id: str | None = option(None, "the repository to push to (default: the name of output_dir)")
    hub_private_repo: bool = option(False, "with push_to_hub: create a private repository; a public one is refused")
    native: bool = option(False, "with push_to_hub: as Marian, Pegasus or Blenderbot, without remote code")
