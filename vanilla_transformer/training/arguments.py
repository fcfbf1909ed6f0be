"""Every option of train.py: from a recipe file, from the command line, which wins, or by default."""

import argparse
import dataclasses
import math
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, get_origin

import yaml
from transformers import HfArgumentParser

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError

SAMPLE_RECIPE = Path(__file__).parents[2] / "recipes" / "sample.yaml"


def option(default, help, **kwargs):
    """A field with its help text; `kwargs` go to argparse."""
    return field(default=default, metadata={"help": help.replace("%", "%%"), **kwargs})


SWITCH = {"nargs": "?", "const": True}  # for a bool whose default is None: `--norm_first` and `--norm_first false`


@dataclass
class DataOptions:
    """Where the sentence pairs come from."""

    _argument_group_name = "data"

    dataset_name: str | None = option(None, "a Hub id, or a local directory laid out like a Hub dataset")
    dataset_config_name: str | None = option(None, "the configuration of the dataset, such as de-en")
    train_file: str | None = option(None, "training pairs in a file instead: .json(l), .csv, .tsv, .parquet, .txt")
    validation_file: str | None = option(None, "validation pairs, of the same kind")
    test_file: str | None = option(None, "test pairs, of the same kind")
    train_split: str | None = option(None, "the split to train on (default: train)")
    validation_split: str | None = option(None, "the split to validate on (default: validation)")
    test_split: str | None = option(None, "the split to test on at the end (default: test, where there is one)")
    validation_split_percentage: int = option(5, "held out of the training split where there is no validation split")
    source_lang: str | None = option(None, "the language to translate from: a column, or a key of `translation`")
    target_lang: str | None = option(None, "the language to translate into")
    source_column: str | None = option(None, "the column of source texts, where its name is no language")
    target_column: str | None = option(None, "the column of target texts")
    max_source_length: int = option(
        128, "training pairs with longer sources are left out (tokens, with the end of sentence)"
    )
    max_target_length: int = option(128, "training pairs with longer targets are left out (tokens)")
    max_train_samples: int | None = option(None, "use only so many training pairs")
    max_eval_samples: int | None = option(None, "use only so many validation pairs")
    max_predict_samples: int | None = option(None, "use only so many test pairs")
    streaming: bool = option(False, "read the training pairs while training, for what does not fit the disk")
    preprocessing_num_workers: int | None = option(None, "processes that tokenise")
    dataloader_num_workers: int = option(0, "processes that make batches")
    tokenizer_name: str | None = option(None, "an existing tokenizer; without one, a byte-level BPE is trained")
    bpe_dropout: float = option(0.0, "leave out merges of the training pairs at random with this probability")


@dataclass
class TrainingOptions:
    """How the model is trained and scored."""

    _argument_group_name = "training"

    output_dir: str = option("outputs/model", "the directory of the model, its checkpoints and its results")
    dry_run: bool = option(False, "do everything up to the first step, print what would be trained, and stop")
    model_name_or_path: str | None = option(None, "begin from this model, also a Marian one, and its tokenizer")
    per_device_train_max_tokens: str = option(
        "4096", "tokens in a batch on one device: sentences x longest side; or auto: as many as fit, 32,768 at most"
    )
    per_device_eval_max_tokens: int = option(4096, "the same, for evaluation")
    gradient_accumulation_steps: int = option(1, "batches of each device that make one step")
    learning_rate: float | None = option(None, "its peak (default: the paper's, (d_model x warmup_steps)^-0.5)")
    lr_scheduler_type: Literal[
        "inverse_sqrt", "linear", "cosine", "polynomial", "constant", "constant_with_warmup"
    ] = option("inverse_sqrt", "the paper's schedule, or another of transformers'")
    warmup_steps: int = option(4000, "steps until the learning rate is at its peak")
    max_steps: int | None = option(None, "steps to train (default: as many as num_train_epochs makes)")
    num_train_epochs: float = option(10.0, "passes over the training pairs, if max_steps is not given")
    label_smoothing_factor: float = option(0.1, "share of the target spread over all types, section 5.4")
    max_grad_norm: float = option(1.0, "clip the gradient at this norm; 0: do not")
    weight_decay: float = option(0.0, "of the matrices")
    adam_beta1: float = option(0.9, "section 5.3")
    adam_beta2: float = option(0.98, "section 5.3")
    adam_epsilon: float = option(1e-9, "section 5.3")
    ema_decay: float | None = option(None, "also keep an exponential moving average of the weights, and score that")
    average_checkpoints: int = option(0, "average the weights of so many checkpoints at the end, section 6.1")
    average_checkpoints_by: Literal["last", "score"] = option(
        "last", "of the last checkpoints, or of those with the best metric_for_best_model"
    )
    r_drop_alpha: float = option(
        0.0, "R-Drop: read each pair twice, and weigh how far the two differ by this; 5 is usual"
    )
    seed: int = option(42, "of the initial weights, the order of the pairs and the dropout")
    attn_implementation: str | None = option(None, "eager, sdpa, ... (default: eager on a CPU, else sdpa)")
    torch_compile: bool = option(False, "compile the model, once for batches of all shapes")
    gradient_checkpointing: bool = option(False, "compute layers again in the backward pass, to save memory")
    eval_steps: int | None = option(None, "evaluate every so many steps (default: at the end only)")
    save_steps: int | None = option(None, "save every so many steps, besides at each evaluation and at the end")
    logging_steps: int = option(10, "log every so many steps")
    save_total_limit: int = option(2, "checkpoints to keep; the best is kept besides")
    resume_from_checkpoint: str | None = option(
        None, "go on from this checkpoint, or the newest whole one", nargs="?", const="newest"
    )
    early_stopping_patience: int | None = option(
        None, "stop after so many evaluations without a better metric_for_best_model, and take the best weights"
    )
    metric_for_best_model: Literal["bleu", "chrf", "loss"] = option("bleu", "of the validation pairs")
    on_divergence: Literal["stop", "rollback", "ignore"] = option(
        "stop",
        "when the loss is no number or jumps up: stop; go back to the last checkpoint and leave out the batch; or "
        "ignore jumps",
    )
    num_beams: int = option(1, "beams in evaluation, and the model's default")
    length_penalty: float = option(1.0, "a beam's score is divided by its length to this power")
    report_to: str = option("none", "none, tensorboard, wandb, trackio, ... as Accelerate knows them")
    push_to_hub: bool = option(False, "push the trained model to the Hub")
    hub_model_id: str | None = option(None, "the repository to push to (default: the name of output_dir)")


# The tokenizer, which is one for both languages, decides on these.
NOT_OPTIONS = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "decoder_vocab_size"}
NOT_OPTIONS |= {"is_encoder_decoder"}  # which is always true


def make_model_options() -> type:
    """A dataclass of the fields of the model's config; None stands for the config's own default."""
    texts = dict(re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", VanillaTransformerConfig.__doc__, re.MULTILINE))
    texts["vocab_size"] = "Types of the tokenizer that is trained, at most; a small corpus gives fewer."
    defaults = VanillaTransformerConfig()
    fields = []
    for item in dataclasses.fields(VanillaTransformerConfig):
        if item.name in texts and item.name not in NOT_OPTIONS:
            default = getattr(defaults, item.name)
            kind = item.type if get_origin(item.type) is Literal else type(default)
            text = " ".join(texts[item.name].split()) + f" (default: {default})"
            fields.append((item.name, kind | None, option(None, text, **(SWITCH if kind is bool else {}))))
    return dataclasses.make_dataclass("ModelOptions", fields, namespace={"_argument_group_name": "model"})


MODEL_OPTIONS = make_model_options()


class Parser(HfArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str):
        raise UserError(message)


def make_parser() -> Parser:
    """A parser of every option, in the groups data, model and training."""
    parser = Parser(
        [DataOptions, MODEL_OPTIONS, TrainingOptions],
        prog="accelerate launch train.py",
        usage="accelerate launch train.py [--config FILE.yaml] [--option value ...]",
        description="Train an encoder-decoder Transformer on sentence pairs. Without a recipe or a dataset it trains "
        "recipes/sample.yaml. Mixed precision and several GPUs come from accelerate launch, e.g. "
        "accelerate launch --mixed_precision bf16 --num_processes 4 train.py --config recipes/multi30k_en_de.yaml",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="a recipe: any of these options; the command line wins")
    return parser


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of what has one, and one spelling of each option."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False, argparse.SUPPRESS) else super()._get_help_string(action)

    def _format_action_invocation(self, action):
        action.option_strings = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        return super()._format_action_invocation(action)


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Reads every option of train.py, from `argv` and from the recipe that `--config` names in it.

    Returns:
        A namespace with every option; a model field that was not given is None.

    Raises:
        UserError: An option or a recipe key does not exist (names the closest) or has a wrong value.
    """
    parser = make_parser()
    given, unknown = parser.parse_known_args(argv)
    if given.config is None and given.dataset_name is None and given.train_file is None:
        given.config = SAMPLE_RECIPE
        if not Path("sample_dataset").is_dir() and not unknown:
            raise UserError(
                "Without --config, --dataset_name or --train_file the sample recipe is trained, whose sample_dataset "
                f"lies in {SAMPLE_RECIPE.parents[1]}; go there, or say what to train on."
            )
    if given.config is not None and not unknown:
        # The recipe comes first, so that what is on the command line replaces it.
        given, unknown = parser.parse_known_args(read_recipe(Path(given.config), parser, overruled(argv)) + argv)
    if unknown:
        raise UserError(f"{unknown[0]} is not an option{closest(unknown[0], parser._option_string_actions)}")
    given.per_device_train_max_tokens = token_budget(given.per_device_train_max_tokens)
    check_options(given)
    return given


def token_budget(given: str) -> int | str:
    """`--per_device_train_max_tokens`: a number, or "auto"."""
    try:
        return given if given == "auto" else int(given)
    except ValueError as error:
        raise UserError(
            f"--per_device_train_max_tokens is {given}; it must be a number of tokens, or auto."
        ) from error


OVERRULES = {
    "--num_train_epochs": {"max_steps"},
    "--dataset_name": {"dataset_config_name", "train_file", "validation_file", "test_file"},
    "--train_file": {"dataset_name", "dataset_config_name", "validation_file", "test_file"},
}


def overruled(argv: list[str]) -> set[str]:
    """The keys of a recipe that what stands on the command line puts out of force, besides those that it replaces."""
    options = (argument.split("=")[0] for argument in argv if argument.startswith("--"))
    given = {"--" + option.lstrip("-").replace("-", "_") for option in options}
    return set().union(*(keys for option, keys in OVERRULES.items() if option in given))


def read_recipe(path: Path, parser: Parser, left_out: set[str] = frozenset()) -> list[str]:
    """The recipe as a command line, so that both are checked alike, without the keys that are `left_out`."""
    try:
        # Every value as the text it is: YAML's own rules make `no`, the language, false and 5e-4 a word.
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"The recipe {path} cannot be read: {reason}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"The recipe {path} must be lines of `option: value`.")
    argv = []
    for key, value in recipe.items():
        if f"--{key}" not in parser._option_string_actions or key == "config":
            options = {name.removeprefix("--") for name in parser._option_string_actions}
            raise UserError(f"'{key}' in {path} is not an option{closest(str(key), options)}")
        if isinstance(value, (dict, list)):
            raise UserError(f"'{key}' in {path} must be one value, not {value}.")
        if value not in ("", "null", "~") and key.replace("-", "_") not in left_out:
            argv += [f"--{key}={value}"]
    return argv


def closest(name: str, options) -> str:
    found = get_close_matches(name.split("=")[0], options, n=1)
    return f"; did you mean {found[0]}?" if found else "; --help lists them."


AT_LEAST_ONE = [
    "per_device_eval_max_tokens",
    "gradient_accumulation_steps",
    "max_steps",
]
AT_LEAST_ONE += ["eval_steps", "save_steps", "logging_steps", "save_total_limit", "num_beams", "max_source_length"]
AT_LEAST_ONE += ["max_target_length", "max_train_samples", "max_eval_samples", "max_predict_samples"]
AT_LEAST_ONE += ["early_stopping_patience", "preprocessing_num_workers", "vocab_size"]
NOT_NEGATIVE = ["learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "average_checkpoints"]
NOT_NEGATIVE += ["dataloader_num_workers", "seed", "adam_epsilon", "r_drop_alpha"]
BELOW_ONE = ["label_smoothing_factor", "adam_beta1", "adam_beta2", "bpe_dropout"]


def check_options(args: argparse.Namespace):
    """Raises UserError for a number outside its range, or options that do not go together."""
    for name in AT_LEAST_ONE + ([] if args.per_device_train_max_tokens == "auto" else ["per_device_train_max_tokens"]):
        if getattr(args, name) is not None and not 1 <= getattr(args, name) < 2**31:
            raise UserError(f"--{name} is {getattr(args, name)}; it must be at least 1, and less than 2^31.")
    for name in NOT_NEGATIVE:
        if getattr(args, name) is not None and not 0 <= getattr(args, name) < math.inf:
            raise UserError(f"--{name} is {getattr(args, name)}; it must be a finite number, 0 or more.")
    for name in BELOW_ONE:
        if not 0 <= getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; it must lie in [0, 1).")
    if args.ema_decay is not None and not 0 < args.ema_decay < 1:
        raise UserError(f"--ema_decay is {args.ema_decay}; it must lie between 0 and 1.")
    if not 0 < args.num_train_epochs <= 1e6:
        raise UserError(f"--num_train_epochs is {args.num_train_epochs}; it must be more than 0, a million at most.")
    if not 1 <= args.validation_split_percentage <= 99:
        raise UserError(f"--validation_split_percentage is {args.validation_split_percentage}; it must be 1 to 99.")
    if args.seed >= 2**63:
        raise UserError(f"--seed is {args.seed}; it must be less than 2^63.")
    if not -10 <= args.length_penalty <= 10:
        raise UserError(f"--length_penalty is {args.length_penalty}; it must lie between -10 and 10.")
    if args.dataset_name and args.train_file:
        raise UserError("--dataset_name and --train_file are both given; choose one.")
    for name in ["validation_file", "test_file"]:
        if getattr(args, name) and not args.train_file:
            raise UserError(f"--{name} goes with --train_file, not with --dataset_name; leave one of them out.")
    if args.streaming and args.max_steps is None:
        raise UserError("--streaming needs --max_steps, as a stream does not tell how long an epoch is.")
    if args.streaming and args.dataloader_num_workers:
        raise UserError(
            "--dataloader_num_workers does not go with --streaming, which reads in the process that trains."
        )
    if args.average_checkpoints_by == "score" and not (args.average_checkpoints and args.eval_steps):
        raise UserError("--average_checkpoints_by score needs --average_checkpoints and --eval_steps.")
    if args.early_stopping_patience and not args.eval_steps:
        raise UserError("--early_stopping_patience needs --eval_steps, which say when to look.")


def model_fields(args: argparse.Namespace) -> dict:
    """The model fields that were given."""
    names = [item.name for item in dataclasses.fields(MODEL_OPTIONS)]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


WRITTEN = "# Every option of a run, as train.py has written it.\n"
OF_ONE_RUN = {"config", "resume_from_checkpoint", "dry_run", "push_to_hub", "hub_model_id"}  # not to be repeated


def resolved_recipe(args: argparse.Namespace, config: VanillaTransformerConfig) -> str:
    """Every option as it is in force, as the text of a recipe that `--config` reads."""
    options = {key: value for key, value in vars(args).items() if key not in OF_ONE_RUN}
    options |= {item.name: getattr(config, item.name) for item in dataclasses.fields(MODEL_OPTIONS)}
    return WRITTEN + yaml.safe_dump(options, sort_keys=False, allow_unicode=True)
