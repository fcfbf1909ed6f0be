"""Every option of train.py: defaults, then a recipe file, then the command line, each overriding the one before."""

import argparse
import warnings
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import yaml
from transformers import HfArgumentParser

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data.options import FILE_OPTIONS, SPLIT_OPTIONS, DataOptions, group_parallel
from ..data.readers import may_have_columns
from ..errors import UserError, explaining
from ..evaluation.further_metrics import OURS, not_measured
from ..hub.model_card import PATHS_OR_IDS
from ..option_fields import HelpFormatter
from .options import ModelOptions, TrainingOptions
from .rule import CHOOSABLE, FINE_TUNING, MODEL

SAMPLE_RECIPE = Path("recipes", "sample.yaml")  # beside train.py, which runs there


# The options by group, as --help and the site list them.
GROUPS = {
    "everyday options": "help config train_file dataset_name source_lang target_lang validation_file test_file "
    "output_dir size hours num_train_epochs max_steps resume_from_checkpoint dry_run",
    "which pairs": "dataset_config_name dataset_revision source_column target_column reference_columns train_split "
    "validation_split test_split validation_split_percentage test_split_percentage max_train_samples max_eval_samples "
    "max_predict_samples deduplicate remove_overlap",
    "several training files, and streams": "train_file_weights train_file_tags train_file_langs streaming",
    "tokens": "vocab_size tokenizer_name tokenizer_type letters split_digits verbatim bpe_dropout "
    "joined_pairs max_source_length max_target_length max_source_sentences max_source_lines",
    "size of the model": "d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads "
    "encoder_ffn_dim decoder_ffn_dim dropout attention_dropout activation_dropout",
    "optimization": "per_device_train_max_tokens gradient_accumulation_steps learning_rate lr_scheduler_type "
    "warmup_steps optimizer label_smoothing_factor weight_decay max_grad_norm ema_decay average_checkpoints "
    "average_checkpoints_by r_drop_alpha seed on_divergence",
    "evaluation and checkpoints": "eval_steps save_steps logging_steps save_total_limit early_stopping_patience "
    "metric_for_best_model greater_is_better metrics metric_kwargs num_beams length_penalty tune_decoding "
    "num_examples bleu_tokenize score_normalization",
    "fine-tuning and distillation": "model_name_or_path teacher teacher_top_k distillation_weight "
    "distillation_temperature",
    "the Hub and trackers": "push_to_hub hub_model_id hub_private_repo native license report_to run_name",
    "speed and memory": "torch_compile attn_implementation gradient_checkpointing per_device_eval_max_tokens "
    "preprocessing_num_workers dataloader_num_workers",
    "advanced: other architectures, and Adam": "activation_function norm_first position_embedding_type "
    "max_position_embeddings scale_embedding share_encoder_decoder_embeddings tie_word_embeddings lm_head_bias "
    "layer_norm_eps use_cache adam_beta1 adam_beta2 adam_epsilon",
}


class TrainingParser(HfArgumentParser):
    """An argument parser that raises UserError instead of printing the usage."""

    def error(self, message: str):
        raise UserError(message)


class DefaultsHelpFormatter(HelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but those of switches, or none."""

    def _get_help_string(self, action):
        has_none = action.default is None or action.default is False  # 0 is one
        return action.help if has_none else super()._get_help_string(action)


def make_parser() -> TrainingParser:
    """A parser of all options, in [`GROUPS`]."""
    parser = TrainingParser(
        [DataOptions, ModelOptions, TrainingOptions],
        prog="accelerate launch train.py",
        usage="accelerate launch train.py [--config FILE.yaml] [--option value ...]",
        description="Train an encoder-decoder Transformer on sentence pairs. Without a recipe, options that are not "
        "given are chosen from the data; the defaults shown are those with a recipe. Without data either, it trains "
        "recipes/sample.yaml. Mixed precision and several GPUs are options of accelerate launch, e.g. "
        "accelerate launch --mixed_precision bf16 --num_processes 4 train.py --config recipes/multi30k_en_de.yaml",
        formatter_class=DefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="a recipe with any of these options")
    options = {action.dest: action for action in parser._actions}
    parser._action_groups.clear()  # one for each dataclass
    for title, names in GROUPS.items():
        parser.add_argument_group(title)._group_actions += [options[name] for name in names.split()]
    return parser


NEEDS = dict.fromkeys(sorted(FILE_OPTIONS - {"train_file"}), "train_file")  # options that need another one
NEEDS |= {"early_stopping_patience": "eval_steps", "dataset_revision": "dataset_name"}
NEEDS |= dict.fromkeys(("hub_private_repo", "native"), "push_to_hub")
NEEDS["metric_kwargs"] = "metrics"
NEEDS |= dict.fromkeys(("teacher_top_k", "distillation_weight", "distillation_temperature"), "teacher")
EXTENDED = {"metrics", "metric_kwargs", "reference_columns"}  # lists that grow when an option is repeated
LISTS = {*FILE_OPTIONS, *EXTENDED, "teacher", "source_column", "target_column"}  # with one or more values
LANGUAGES = {"source_lang", "target_lang"}
# Options on the command line that override keys of a recipe other than their own.
OVERRIDES = {
    "num_train_epochs": {"max_steps"},
    "size": set(MODEL),
    "metric_for_best_model": {"greater_is_better"},
    "source_column": LANGUAGES,
    "target_column": LANGUAGES | {"reference_columns"},
    "dataset_name": {"dataset_config_name", "dataset_revision", "reference_columns"} | FILE_OPTIONS,
    "train_file": {"dataset_name", "dataset_config_name", *SPLIT_OPTIONS, "dataset_revision", "reference_columns"}
    | FILE_OPTIONS,
}


class Options(NamedTuple):
    """All options; those that are `free` were not given, and are chosen from the data."""

    data: DataOptions
    model: ModelOptions
    training: TrainingOptions
    free: Set[str] = frozenset()

    def values(self) -> dict[str, object]:
        return vars(self.data) | vars(self.model) | vars(self.training)

    def with_values(self, chosen: Mapping[str, object]) -> "Options":
        """The same, where the `chosen` options have other values and are no longer free."""
        parts = [
            replace(part, **{name: value for name, value in chosen.items() if name in vars(part)}) for part in self[:3]
        ]
        return Options(*parts, self.free - chosen.keys())


def parse_arguments(argv: list[str]) -> Options:
    """Parses the command line and the recipe named by `--config`; the command line wins.

    Model options that were not given are None. Raises UserError for an unknown option, a wrong value, or options that
    contradict each other.
    """
    parser = make_parser()
    # argparse keeps the values that a namespace already has, so options that are not given stay None.
    given, unknown = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(OVERRIDES)))
    names = vars(given).keys()
    spelled = [word.partition("=")[0].replace("-", "_") for word in argv]
    for name in sorted(LISTS - EXTENDED):
        if spelled.count(f"__{name}") > 1:
            values = " ".join(map(str, getattr(given, name)))
            warnings.warn(f"--{name} is given twice; only the last list counts: {values}.", stacklevel=2)
    if unknown and argv[: argv.index(unknown[0])][-2:-1] == ["--dataset_config_name"]:
        raise UserError(
            f"--dataset_config_name takes one configuration, not also {unknown[0]}; to train on several, name their "
            "files with --train_file, such as hf://datasets/ID/PATH."
        )
    if unknown:
        raise UserError(f"{unknown[0]} is not an option{closest(unknown[0], [f'--{name}' for name in names])}")
    if given.config is None and given.dataset_name is None and given.train_file is None:
        given.config = SAMPLE_RECIPE
        if not Path("sample_dataset").is_dir():
            raise UserError(
                "No --config, --dataset_name or --train_file was given, and the sample recipe needs sample_dataset; "
                "run it in the directory of train.py, or say what to train on."
            )
    recipe = {} if given.config is None else read_recipe(Path(given.config), names - {"config"})
    recipe = without_overridden(recipe, given)
    # Written as command-line options, the recipe is checked by the same parser.
    lists = [word for key, value in recipe.items() if isinstance(value, list) for word in (f"--{key}", *value)]
    scalars = [f"--{key}={value}" for key, value in recipe.items() if not isinstance(value, list)]
    words = lists + scalars + argv
    data_options, model_options, options, _ = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    written = {name for name in names if f"__{name}" in spelled} | recipe.keys()
    free = free_options(written, given.config, data_options, options)
    check_conflicts(data_options, options, free)
    targets = {target for _, target in data_options.directions}
    if data_options.target_lang is None and len(targets) == 1:  # it chooses the tokenizer of BLEU
        data_options = replace(data_options, target_lang=targets.pop())
    return Options(data_options, model_options, options, free)


def free_options(
    written: Set[str], recipe: Path | None, data_options: DataOptions, options: TrainingOptions
) -> Set[str]:
    """The options to choose from the data: those that are not `written` on the command line or in the recipe.

    None with a recipe, unless `--size` is given.
    """
    is_fine_tuning = options.model_name_or_path is not None
    if is_fine_tuning and options.size not in (None, "paper"):
        raise UserError("--size has no effect here: the model of --model_name_or_path has its size; leave it out.")
    if is_fine_tuning or options.size == "paper" or (recipe is not None and options.size is None):
        if options.hours is not None:
            why = "--size paper" if options.size else f"the recipe {recipe}"
            why = "with --model_name_or_path, no length is chosen" if is_fine_tuning else f"{why} fixes all options"
            raise UserError(f"--hours has no effect here: {why}; give --max_steps or --num_train_epochs instead.")
        if recipe is not None or options.size == "paper":
            return frozenset()
    if options.hours is not None and written & {"max_steps", "num_train_epochs"}:
        raise UserError("--hours has no effect with --max_steps or --num_train_epochs; leave one of them out.")
    fixed = {"joined_pairs"} if cannot_join(data_options, options) else set()
    has_tokenizer = data_options.tokenizer_name or options.teacher
    if has_tokenizer or "vocab_size" in written or data_options.letters:
        fixed |= {"letters", "vocab_size"}
    if has_tokenizer or data_options.letters:
        fixed |= {"split_digits"}
    if options.teacher:  # it may not read longer texts
        fixed |= {"max_source_length", "max_target_length"}
    if data_options.tokenizer_type != "bpe":
        fixed |= {"letters"}
    if options.average_checkpoints:  # they are saved more often than evaluations run
        fixed |= {"eval_steps", "early_stopping_patience"}
    return (FINE_TUNING if is_fine_tuning else CHOOSABLE) - written - fixed


def without_overridden(recipe: dict, given: argparse.Namespace) -> dict:
    """The recipe without what the command line replaces.

    Raises UserError if it has metrics, whose code would run, and the command line does not name them.
    """
    metrics = recipe.get("metrics", [])
    metrics = metrics if isinstance(metrics, list) else [metrics]
    if metrics and given.metrics is None:
        raise UserError(
            f"The recipe {given.config} has the metrics {', '.join(metrics)}, whose code would run; give --metrics "
            f"{' '.join(metrics)} on the command line, too, if you trust it, or remove them from the recipe."
        )
    replaced = {key for key in LISTS if getattr(given, key) is not None}
    overriding = [
        name for name in OVERRIDES if getattr(given, name) not in (None, "auto")
    ]  # --size auto fixes nothing
    replaced |= {key for name in overriding for key in OVERRIDES[name]}
    if given.metrics not in (None, metrics):
        replaced.add("metric_kwargs")  # arguments of other modules
    files = [*(given.train_file or ()), *(given.validation_file or ()), *(given.test_file or ())]
    languages = {recipe[key] for key in LANGUAGES & recipe.keys()}
    if given.train_file and not any(may_have_columns(file, languages) for file in group_parallel(files)):
        replaced |= LANGUAGES
    return {key: value for key, value in recipe.items() if key not in replaced}


def read_recipe(path: Path, options: Set[str]) -> dict[str, str | list[str]]:
    """The options in a recipe, except those without a value.

    Raises UserError if it cannot be read, or has something other than options.
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
        # Those of a list become words of their own, which must not be read as other options.
        if is_list and (wrong := [node.value for node in nodes if node.value.startswith("-")]):
            raise UserError(f"'{key}' in {path} has the value {wrong[0]}; in a list, no value may begin with a -.")
        recipe[key] = [node.value for node in nodes] if is_list else value_node.value
    return {key: value for key, value in recipe.items() if value not in ("", "null", "~")}


def closest(name: str, options: Iterable[str]) -> str:
    name = name.split("=")[0]
    if name in ("--mixed_precision", "--num_processes", "--num_machines", "--config_file"):
        return "; it is one of accelerate launch, before train.py."
    found = get_close_matches(name, options, n=1)
    return f"; did you mean {found[0]}?" if found else "; --help lists all options."


def check_conflicts(data_options: DataOptions, options: TrainingOptions, free: Set[str]):
    """Raises UserError for options that contradict each other; those that are `free` will have a value."""
    data_options.check_conflicts()
    if options.run_name and options.report_to == "none":
        raise UserError("--run_name needs --report_to.")
    if options.distillation_weight > 1:
        share = options.distillation_weight
        raise UserError(f"--distillation_weight is {share}; it is a share of the loss, at most 1.")
    values, defaults = vars(data_options) | vars(options), vars(DataOptions()) | vars(TrainingOptions())
    for name, needed in NEEDS.items():
        if values[name] != defaults[name] and not values[needed] and needed not in free:
            raise UserError(f"--{name} needs --{needed}.")
    if data_options.streaming and options.max_steps is None:
        raise UserError("--streaming needs --max_steps, because the length of a stream is unknown.")
    if options.torch_compile and options.gradient_checkpointing:
        raise UserError("--torch_compile cannot be combined with --gradient_checkpointing; leave one out.")
    if options.teacher and (data_options.streaming or data_options.bpe_dropout):
        raise UserError("--teacher reads all pairs before training; leave out --streaming and --bpe_dropout.")
    if data_options.joined_pairs and cannot_join(data_options, options):
        raise UserError("--joined_pairs cannot be combined with --streaming, --teacher or --train_file_tags.")
    if not options.metrics and options.metric_for_best_model not in OURS:
        raise not_measured(f"--metric_for_best_model {options.metric_for_best_model}", OURS)
    if options.average_checkpoints_by == "score" and not (options.average_checkpoints and options.eval_steps):
        raise UserError("--average_checkpoints_by score needs --average_checkpoints and --eval_steps.")
    if data_options.tokenizer_name and options.model_name_or_path:
        raise UserError("--tokenizer_name cannot be combined with --model_name_or_path, which has its own.")


def cannot_join(data_options: DataOptions, options: TrainingOptions) -> bool:
    """Whether pairs cannot be joined: those of a stream, with soft targets, or with tags."""
    return bool(data_options.streaming or options.teacher or data_options.train_file_tags)


RECIPE_HEADER = "# Every option of this run, written by train.py.\n"
# Options of one run: whoever repeats it from its recipe neither resumes nor publishes.
NOT_IN_RECIPE = {"resume_from_checkpoint", "dry_run", "push_to_hub", "hub_model_id", "hub_private_repo", "native"}
NOT_IN_RECIPE |= {"size", "hours"}  # it has what was chosen instead


def resolved_recipe(data_options: DataOptions, options: TrainingOptions, config: VanillaTransformerConfig) -> dict:
    """Every option with the value that is used; a recipe that repeats the run."""
    recipe = {key: value for key, value in (vars(data_options) | vars(options)).items() if key not in NOT_IN_RECIPE}
    recipe["output_dir"] = str(options.output_dir)
    for key in filter(recipe.get, PATHS_OR_IDS):
        value = recipe[key]
        recipe[key] = list(map(mark_path, value)) if isinstance(value, list) else mark_path(value)
    return recipe | {item.name: getattr(config, item.name) for item in fields(ModelOptions)}


def mark_path(name_or_path: str) -> str:
    """A path such as data/pairs as ./data/pairs, which looks like no Hub id from another directory either."""
    is_path = "/" in name_or_path and Path(name_or_path).exists() and not Path(name_or_path).is_absolute()
    return f"./{name_or_path}" if is_path and not name_or_path.startswith(".") else name_or_path


def recipe_to_yaml(recipe: dict) -> str:
    return RECIPE_HEADER + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
