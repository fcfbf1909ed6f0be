"""Every option of train.py: defaults, then a recipe file, then the command line, each overriding the one before."""

import argparse
import dataclasses
import inspect
import math
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Literal, get_origin

import yaml
from transformers import HfArgumentParser

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data.pairs import parse_direction
from ..errors import UserError, explaining

SAMPLE_RECIPE = Path(__file__).parents[2] / "recipes" / "sample.yaml"


class Number(argparse.Action):
    """Stores a number or a list of them, or raises UserError unless `ge` <= number < `lt`."""

    def __init__(self, *args, ge: float, lt: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.ge, self.lt = ge, lt

    def __call__(self, parser, namespace, value, option_string=None):
        for number in value if isinstance(value, list) else [value]:
            if not self.ge <= number < self.lt:
                limit = f" and below {self.lt:g}" if self.lt < math.inf else ""
                raise UserError(f"--{self.dest} is {number}; it must be at least {self.ge:g}{limit}.")
        setattr(namespace, self.dest, value)


def option(default, help: str, ge: float | None = None, lt: float = math.inf, **kwargs):
    """A dataclass field with its help text and, for a number, its limits; `kwargs` are passed to argparse."""
    if ge is not None:
        kwargs["action"] = partial(Number, ge=ge, lt=lt)
    return field(default=default, metadata={"help": help.replace("%", "%%"), **kwargs})


@dataclass
class DataOptions:
    """Where the sentence pairs come from."""

    _argument_group_name = "data"

    dataset_name: str | None = option(None, "a Hub id, or a local directory laid out like a Hub dataset")
    dataset_config_name: str | None = option(None, "the configuration of the dataset, such as de-en")
    dataset_revision: str | None = option(None, "the commit, branch or tag of the dataset on the Hub (default: main)")
    train_file: list[str] | None = option(
        None,
        "training pairs from files, URLs such as hf://... or patterns such as 'data/*.jsonl': .json(l), .csv, "
        ".tsv, .parquet, or .txt with source<TAB>target lines",
    )
    train_file_weights: list[float] | None = option(
        None, "times that an epoch reads each file: 2 0.5 reads the first twice and half of the second", ge=0, lt=1000
    )
    train_file_tags: list[str] | None = option(
        None, 'a token put before the sources of a file, one per file: "" "<bt>" marks the second as back-translated'
    )
    train_file_langs: list[str] | None = option(
        None, "source and target language of each file, if they differ: en-de en-fr, or en:pt-BR for names with a -"
    )
    validation_file: list[str] | None = option(None, "validation pairs from a file, or from one per training file")
    test_file: list[str] | None = option(None, "test pairs from a file, or from one per training file")
    train_split: str | None = option(None, "the split to train on, or train[:50%], train+dev, ... (default: train)")
    validation_split: str | None = option(None, "the split to validate on (default: validation)")
    test_split: str | None = option(None, "the split to test on at the end (default: test, if there is one)")
    validation_split_percentage: int = option(5, "percent of train to hold out for validation if needed", ge=1, lt=100)
    source_lang: str | None = option(None, "the source language: a column name, or a key of `translation`")
    target_lang: str | None = option(None, "the target language")
    source_column: str | None = option(None, "the column with source texts, if it is not named after the language")
    target_column: str | None = option(None, "the column with target texts")
    max_source_length: int = option(128, "drop training pairs with a longer source (tokens, including </s>)", ge=1)
    max_target_length: int = option(128, "drop training pairs with a longer target (tokens, including </s>)", ge=1)
    max_train_samples: int | None = option(None, "use only the first N training pairs", ge=1)
    max_eval_samples: int | None = option(None, "use only the first N validation pairs", ge=1)
    max_predict_samples: int | None = option(None, "use only the first N test pairs", ge=1)
    streaming: bool = option(False, "read training pairs during training, for corpora larger than the disk")
    preprocessing_num_workers: int | None = option(None, "processes for tokenizing", ge=1)
    dataloader_num_workers: int = option(0, "processes for making batches", ge=0)
    tokenizer_name: str | None = option(None, "an existing tokenizer; by default a byte-level BPE is trained")
    bpe_dropout: float = option(0.0, "probability of skipping a BPE merge in training pairs (BPE-dropout)", ge=0, lt=1)


@dataclass
class TrainingOptions:
    """How the model is trained and scored."""

    _argument_group_name = "training"

    output_dir: str = option("outputs/model", "where the model, its checkpoints and its results are written")
    dry_run: bool = option(False, "print what would be trained, and exit before the first step")
    model_name_or_path: str | None = option(None, "fine-tune this model (ours or convertible); it keeps its tokenizer")
    per_device_train_max_tokens: str = option(
        "4096", "tokens in a batch on each device: sentences x longest side; auto: as many as fit, at most 32,768"
    )
    per_device_eval_max_tokens: int = option(4096, "tokens in a batch in evaluation", ge=1)
    gradient_accumulation_steps: int = option(1, "batches per device in an optimizer step", ge=1)
    learning_rate: float | None = option(None, "peak learning rate (default: (d_model x warmup_steps)^-0.5)", ge=0)
    lr_scheduler_type: Literal[
        "inverse_sqrt", "linear", "cosine", "polynomial", "constant", "constant_with_warmup"
    ] = option("inverse_sqrt", "the paper's schedule, or another one of transformers")
    warmup_steps: int = option(4000, "steps of linear warm-up to the peak learning rate", ge=0)
    max_steps: int | None = option(None, "optimizer steps to train (default: num_train_epochs epochs)", ge=1)
    num_train_epochs: float = option(10.0, "epochs to train if max_steps is not given", ge=1e-6)
    label_smoothing_factor: float = option(0.1, "probability spread over the vocabulary, section 5.4", ge=0, lt=1)
    max_grad_norm: float = option(1.0, "clip the gradient norm at this value; 0: no clipping", ge=0)
    weight_decay: float = option(0.0, "weight decay of the matrices", ge=0)
    adam_beta1: float = option(0.9, "section 5.3", ge=0, lt=1)
    adam_beta2: float = option(0.98, "section 5.3", ge=0, lt=1)
    adam_epsilon: float = option(1e-9, "section 5.3", ge=0)
    ema_decay: float | None = option(None, "score and save a moving average of the weights instead", ge=0, lt=1)
    average_checkpoints: int = option(0, "average the weights of N checkpoints at the end, section 6.1", ge=0)
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
        1.0, "above 1, flattens both distributions in distillation", ge=0.1, lt=100
    )
    r_drop_alpha: float = option(0.0, "weight of R-Drop between two dropout passes; 5 is common", ge=0)
    seed: int = option(42, "seed of the initial weights, the order of the pairs and the dropout", ge=0, lt=2**63)
    attn_implementation: str | None = option(None, "eager, sdpa, ... (default: eager on a CPU, else sdpa)")
    torch_compile: bool = option(False, "compile the model, once for all batch shapes")
    gradient_checkpointing: bool = option(False, "recompute layers in the backward pass to save memory")
    eval_steps: int | None = option(None, "evaluate every N steps (default: only at the end)", ge=1)
    save_steps: int | None = option(None, "save every N steps; each evaluation and the last step also save", ge=1)
    logging_steps: int = option(10, "log every N steps", ge=1)
    save_total_limit: int = option(2, "keep N checkpoints, the best, and those to be averaged", ge=1)
    resume_from_checkpoint: str | None = option(
        None, "resume from this checkpoint, or from the newest one in output_dir", nargs="?", const="newest"
    )
    early_stopping_patience: int | None = option(
        None, "stop after N evaluations without a better metric_for_best_model, and keep the best weights", ge=1
    )
    metric_for_best_model: Literal["bleu", "chrf", "loss"] = option("bleu", "measured on the validation split")
    on_divergence: Literal["stop", "ignore"] = option("stop", "what to do if the loss stays high; NaN always stops")
    num_beams: int = option(1, "beams in evaluation; saved with the model as its default", ge=1)
    length_penalty: float = option(1.0, "beam scores are divided by length ** length_penalty", ge=-10, lt=10)
    tune_decoding: bool = option(False, "choose num_beams and length_penalty by validation BLEU at the end")
    num_examples: int = option(
        3, "held-out sentences to show in the log, the card, all_results.json and attention.png; 0: none", ge=0
    )
    bleu_tokenize: str | None = option(None, "sacreBLEU tokenizer (default: chosen by target language, else 13a)")
    report_to: str = option("none", "trackers: none, tensorboard, wandb, trackio, ...; all: each that is installed")
    run_name: str | None = option(None, "the name of the run in the trackers (default: they choose one)")
    push_to_hub: bool = option(False, "push the trained model to the Hub")
    hub_model_id: str | None = option(None, "the repository to push to (default: the name of output_dir)")
    hub_private_repo: bool = option(False, "with push_to_hub: create a private repository; a public one is refused")
    native: bool = option(False, "with push_to_hub: as Marian, Pegasus or Blenderbot, without remote code")


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
    fields = []
    for item in dataclasses.fields(VanillaTransformerConfig):
        if item.name in own and item.name not in NOT_OPTIONS:
            default = getattr(defaults, item.name)
            kind = item.type if get_origin(item.type) is Literal else type(default)
            shown = "" if item.default is None else f" (default: {default})"
            text = " ".join(texts.get(item.name, "").split()) + shown
            switch = {"nargs": "?", "const": True} if kind is bool else {}  # `--norm_first` and `--norm_first false`
            fields.append((item.name, kind | None, option(None, text, **switch)))
    return dataclasses.make_dataclass("ModelOptions", fields, namespace={"_argument_group_name": "model"})


MODEL_OPTIONS = make_model_options()


class Parser(HfArgumentParser):
    """An argument parser that raises UserError instead of printing the usage."""

    def error(self, message: str):
        raise UserError(message)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Hides defaults of None and False, and lists each option in one spelling: `--a_b`, not also `--a-b`."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False, argparse.SUPPRESS) else super()._get_help_string(action)

    def _format_action_invocation(self, action):
        action.option_strings = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        return super()._format_action_invocation(action)


def make_parser() -> Parser:
    """A parser of all options, in the groups data, model and training."""
    parser = Parser(
        [DataOptions, MODEL_OPTIONS, TrainingOptions],
        prog="accelerate launch train.py",
        usage="accelerate launch train.py [--config FILE.yaml] [--option value ...]",
        description="Train an encoder-decoder Transformer on sentence pairs. Without a recipe or a dataset, it trains "
        "recipes/sample.yaml. Mixed precision and several GPUs are options of accelerate launch, e.g. "
        "accelerate launch --mixed_precision bf16 --num_processes 4 train.py --config recipes/multi30k_en_de.yaml",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="a recipe with any of these options")
    return parser


SPLIT_OPTIONS = {"train_split", "validation_split", "test_split"}  # of a --dataset_name
# Options on the command line that override keys of a recipe other than their own.
FILE_LISTS = ("train_file_weights", "train_file_tags", "train_file_langs")  # one value per training file
FILE_OPTIONS = {"train_file", *FILE_LISTS, "validation_file", "test_file"}
NEEDS = dict.fromkeys(sorted(FILE_OPTIONS - {"train_file"}), "train_file")  # options that need another one
NEEDS |= {"early_stopping_patience": "eval_steps", "dataset_revision": "dataset_name"}
NEEDS |= dict.fromkeys(("hub_private_repo", "native"), "push_to_hub")
NEEDS |= dict.fromkeys(("teacher_top_k", "distillation_weight", "distillation_temperature"), "teacher")
LISTS = {*FILE_OPTIONS, "teacher"}  # options with one or more values
PUBLISHING = {"push_to_hub", "hub_model_id", "hub_private_repo", "native"}  # on the command line only
OVERRIDES = {
    "num_train_epochs": {"max_steps"},
    "dataset_name": {"dataset_config_name", "dataset_revision"} | FILE_OPTIONS,
    "train_file": {"dataset_name", "dataset_config_name", *SPLIT_OPTIONS, "dataset_revision"} | FILE_OPTIONS,
}


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parses the command line and the recipe named by `--config`; the command line wins.

    Returns a namespace with every option, in which model fields that were not given are None. Raises UserError for an
    unknown option, a wrong value, or options that contradict each other.
    """
    parser = make_parser()
    given, unknown = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(OVERRIDES)))
    options = vars(given).keys()
    if unknown and argv[: argv.index(unknown[0])][-2:-1] == ["--dataset_config_name"]:
        raise UserError(
            f"--dataset_config_name takes one configuration, not also {unknown[0]}; to train on several, name their "
            "files with --train_file, such as hf://datasets/ID/PATH."
        )
    if unknown:
        raise UserError(f"{unknown[0]} is not an option{closest(unknown[0], [f'--{name}' for name in options])}")
    if given.config is None and given.dataset_name is None and given.train_file is None:
        given.config = SAMPLE_RECIPE
        if not Path("sample_dataset").is_dir():
            raise UserError(
                "No --config, --dataset_name or --train_file was given, and the sample recipe needs sample_dataset; "
                f"run from {SAMPLE_RECIPE.parents[1]}, or say what to train on."
            )
    recipe = {} if given.config is None else read_recipe(Path(given.config), options - {"config"})
    for name, overridden in OVERRIDES.items():
        if getattr(given, name) is not None:
            recipe = {key: value for key, value in recipe.items() if key not in overridden}
    # Written as command-line options, the recipe is checked by the same parser.
    lists = [word for key, value in recipe.items() if isinstance(value, list) for word in (f"--{key}", *value)]
    scalars = [f"--{key}={value}" for key, value in recipe.items() if not isinstance(value, list)]
    args = parser.parse_args(lists + scalars + argv)
    args.config = given.config
    budget = args.per_device_train_max_tokens
    if budget != "auto":
        if not budget.isdecimal() or int(budget) == 0:
            raise UserError(f"--per_device_train_max_tokens is {budget}; give a number, or auto.")
        args.per_device_train_max_tokens = int(budget)
    check_conflicts(args)
    targets = {parse_direction(direction)[1] for direction in args.train_file_langs or []}
    if args.target_lang is None and len(targets) == 1:  # it chooses the tokenizer of BLEU
        args.target_lang = targets.pop()
    return args


def read_recipe(path: Path, options: Set[str]) -> dict[str, str | list[str]]:
    """The options in a recipe, except those without a value.

    Raises UserError if it cannot be read, has something other than options, or asks to publish the model.
    """
    with explaining(f"The recipe {path} cannot be read", OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        # The node tree: YAML's loaders would read `no`, the language, as False, and drop the first of two equal keys.
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"The recipe {path} must consist of lines of the form `option: value`.")
    recipe = {}
    for key_node, value_node in root.value:
        key = str(key_node.value).replace("-", "_")
        if key not in options:
            raise UserError(f"'{key}' in {path} is not an option{closest(key, options)}")
        if key in recipe:
            raise UserError(f"'{key}' is given twice in {path}; remove one of the two lines.")
        is_list = isinstance(value_node, yaml.SequenceNode) and key in LISTS
        nodes = value_node.value if is_list else [value_node]
        if not all(isinstance(node, yaml.ScalarNode) for node in nodes):
            raise UserError(f"'{key}' in {path} must be a single value, not a list or a mapping.")
        # Earlier versions wrote these options, too, into the recipe of a run.
        if key in PUBLISHING and value_node.value.lower() not in ("", "null", "~", "false", "no"):
            raise UserError(
                f"'{key}' in {path} is about publishing, which a recipe cannot decide; remove it there, and give "
                f"--{key} on the command line if you want it."
            )
        # Those of a list become words of their own, which must not be read as other options.
        if is_list and (wrong := [node.value for node in nodes if node.value.startswith("-")]):
            raise UserError(f"'{key}' in {path} has the value {wrong[0]}; in a list, no value may begin with a -.")
        recipe[key] = [node.value for node in nodes] if is_list else value_node.value
    recipe = {key: value for key, value in recipe.items() if key not in PUBLISHING}
    return {key: value for key, value in recipe.items() if value not in ("", "null", "~")}


def closest(name: str, options: Iterable[str]) -> str:
    name = name.split("=")[0]
    if name in ("--mixed_precision", "--num_processes", "--num_machines", "--config_file"):
        return "; it is one of accelerate launch, before train.py."
    found = get_close_matches(name, options, n=1)
    return f"; did you mean {found[0]}?" if found else "; --help lists all options."


def check_conflicts(args: argparse.Namespace):
    """Raises UserError for options that contradict each other."""
    if args.dataset_name and args.train_file:
        raise UserError("--dataset_name and --train_file are both given; choose one.")
    if args.run_name and args.report_to == "none":
        raise UserError("--run_name needs --report_to.")
    if args.train_file and (given := sorted(name for name in SPLIT_OPTIONS if getattr(args, name))):
        raise UserError(
            f"--{given[0]} is for --dataset_name; with --train_file, give --validation_file and --test_file."
        )
    if args.distillation_weight > 1:
        raise UserError(f"--distillation_weight is {args.distillation_weight}; it is a share of the loss, at most 1.")
    defaults = vars(DataOptions) | vars(TrainingOptions)
    for name, needed in NEEDS.items():
        if getattr(args, name) != defaults[name] and not getattr(args, needed):
            raise UserError(f"--{name} needs --{needed}.")
    for name in FILE_LISTS:
        values = getattr(args, name)
        if values and len(values) != len(args.train_file):
            raise UserError(f"--{name} has {len(values)} values for {len(args.train_file)} files; give one per file.")
    for name in ("validation_file", "test_file"):
        count, files = len(getattr(args, name) or ()), len(args.train_file or ())
        if count > 1 and count != files:
            raise UserError(f"--{name} has {count} files for {files} training files; give one, or one for each.")
    for direction in args.train_file_langs or []:
        parse_direction(direction)
    for tag in args.train_file_tags or []:
        if tag and not re.fullmatch(r"([^\w\s]|_)\S+([^\w\s]|_)", tag):
            raise UserError(f"--train_file_tags has '{tag}', which may occur in texts; choose a tag such as <bt>.")
    if args.train_file_weights and not any(args.train_file_weights):
        raise UserError("--train_file_weights are all 0, which leaves no training pairs; raise one.")
    if args.streaming and args.train_file and (len(args.train_file) > 1 or args.train_file_weights):
        raise UserError("--streaming reads one --train_file and no --train_file_weights; join several into one.")
    if args.streaming and args.max_steps is None:
        raise UserError("--streaming needs --max_steps, because the length of a stream is unknown.")
    if args.streaming and args.dataloader_num_workers:
        raise UserError("--streaming reads in the training process; leave out --dataloader_num_workers.")
    if args.teacher and (args.streaming or args.bpe_dropout):
        raise UserError("--teacher reads all pairs before training; leave out --streaming and --bpe_dropout.")
    if args.average_checkpoints_by == "score" and not (args.average_checkpoints and args.eval_steps):
        raise UserError("--average_checkpoints_by score needs --average_checkpoints and --eval_steps.")
    if args.tokenizer_name and args.model_name_or_path:
        raise UserError("--tokenizer_name cannot be combined with --model_name_or_path, which has its own.")


def model_fields(args: argparse.Namespace) -> dict:
    """The config fields that the command line or the recipe set, with their values."""
    names = [item.name for item in dataclasses.fields(MODEL_OPTIONS)]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


RECIPE_HEADER = "# Every option of this run, written by train.py.\n"
NOT_IN_RECIPE = {"config", "resume_from_checkpoint", "dry_run", *PUBLISHING}


def resolved_recipe(args: argparse.Namespace, config: VanillaTransformerConfig) -> dict:
    """Every option with the value that is used; a recipe that repeats the run."""
    recipe = {key: value for key, value in vars(args).items() if key not in NOT_IN_RECIPE}
    return recipe | {item.name: getattr(config, item.name) for item in dataclasses.fields(MODEL_OPTIONS)}


def for_trackers(recipe: dict) -> dict:
    """The options of a recipe that have a value, as the types that all of Accelerate's trackers take."""
    scalars = bool | int | float | str
    return {k: v if isinstance(v, scalars) else str(v) for k, v in recipe.items() if v is not None}


def recipe_to_yaml(recipe: dict) -> str:
    return RECIPE_HEADER + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
