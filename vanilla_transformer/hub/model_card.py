"""The model card (README.md) of a trained model, written from `all_results.json` and `recipe.yaml` of its run."""

import contextlib
import html
import itertools
import json
import re
from datetime import timedelta
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .. import VanillaTransformerConfig
from ..errors import UserError, explaining
from ..files import public_file, public_name, write_text
from ..languages import known_code

SENTENCE = "The dog sleeps."  # to translate if the run left no example
METRICS = [("bleu", "sacrebleu", "BLEU"), ("chrf", "chrf", "chrF"), ("loss", "loss", "Loss")]
MAIN_OPTIONS = """d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads encoder_ffn_dim
decoder_ffn_dim vocab_size dropout norm_first position_embedding_type per_device_train_max_tokens
gradient_accumulation_steps learning_rate lr_scheduler_type warmup_steps label_smoothing_factor max_grad_norm
weight_decay average_checkpoints ema_decay seed num_beams length_penalty"""
# Options that hold a path; those of the second line may also hold a Hub id.
LOCAL_PATHS = ["output_dir", "train_file", "validation_file", "test_file"]
PATHS_OR_IDS = ["dataset_name", "tokenizer_name", "model_name_or_path", "teacher", "metrics"]

DAMAGED = (TypeError, ValueError, LookupError, AttributeError)  # of results and recipes with other keys or values
COUNTED = ("pairs", "duplicates", "source_is_target", "several_targets", "odd_lengths", "sources_in_train")
COUNTED += ("pairs_in_train", "placeholders", "placeholders_kept", "numbers", "numbers_kept")
SPLIT_NAMES = {"eval": "validation", "test": "test"}  # by the prefix of their scores


def write_model_card(output_dir: str | Path) -> Path:
    """Writes README.md, [`make_model_card`], and returns its path."""
    path = Path(output_dir) / "README.md"
    with explaining(f"No card can be written from the results and the recipe in {output_dir}", *DAMAGED):
        card = str(make_model_card(output_dir))
    write_text(path, card)
    return path


def make_model_card(output_dir: str | Path, name: str | None = None) -> ModelCard:
    """The card from `all_results.json` and `recipe.yaml` of a finished run; `name` defaults to that of the directory.

    If `config.json` is that of a native form, the card says so and shows code without `trust_remote_code`. Raises
    UserError if one of the three files is missing or damaged, or train.py did not write it.
    """
    output_dir = Path(output_dir)
    files = ("all_results.json", "recipe.yaml", "config.json")
    results, recipe, config = (read_file(output_dir / name) for name in files)
    if "train_target_tokens" not in results:  # transformers' Trainer also writes a file of this name
        raise UserError(f"{output_dir}/all_results.json is not from train.py; write a README.md yourself.")
    name, dataset = name or " ".join(output_dir.resolve().name.split()), results["dataset"]
    splits = [("eval", recipe.get("validation_split") or "validation"), ("test", recipe.get("test_split") or "test")]
    splits = [(prefix, split) for prefix, split in splits if f"{prefix}_bleu" in results]
    # Of a second split, only signatures that differ. Until 0.1, both splits had those of the last.
    names = ("bleu_signature", "chrf_signature")
    results = {f"{one}_{name}": results[name] for one, _ in splits for name in names if name in results} | results
    signatures = [(split, *(results.get(f"{prefix}_{name}") for name in names)) for prefix, split in splits]
    signatures = [one for n, one in enumerate(signatures) if one[1] and (n == 0 or one[1:] != signatures[0][1:])]
    # `dataset` is a Hub id, or the last part of a local path. Only an id is linked: other text could break the link.
    is_on_hub = "/" in dataset and dataset == recipe.get("dataset_name") == public_name(dataset)
    base, further = recipe.get("model_name_or_path"), results.get("metrics", {})
    names = [name for key in ("source_lang", "target_lang") for name in (results.get(key) or "").split(", ")]
    languages = list(map(known_code, names))
    data = ModelCardData(
        language=list(dict.fromkeys(code for code in languages if code)) or None,
        license=recipe.get("license"),
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla-transformer", "translation", "encoder-decoder"],
        datasets=[dataset] if is_on_hub else None,
        metrics=list(dict.fromkeys(["sacrebleu", "chrf", *(one["module"] for one in further.values())])),
        base_model=base if base and "/" in base and public_name(base) == base else None,
        model_name=name,
        eval_results=list_scores(results, recipe, splits, dataset),
    )
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("model_card.md.jinja")),
        text=as_plain,
        code=as_code,
        timedelta=timedelta,
        python=lambda value: json.dumps(value, ensure_ascii=False),
        results=results,
        recipe=recipe,
        splits=splits,
        signatures=signatures,
        name=name,
        dataset=dataset,
        is_on_hub=is_on_hub,
        base=base and public_name(base),
        native=None if config["model_type"] == VanillaTransformerConfig.model_type else config["architectures"][0],
        sentence=SENTENCE,
        origins={split: results.get("origins", {}).get(SPLIT_NAMES[prefix]) for prefix, split in splits},
        survey=results.get("survey"),
        further=further,
        counted=[key for key in COUNTED if any(counts.get(key) for counts in results.get("survey", {}).values())],
        main_options=MAIN_OPTIONS.split(),
        pictures={path.name for path in output_dir.glob("*.png")},
    )


def record_tuning(output_dir: Path, tuned: dict, scored_with: dict) -> bool:
    """Adds what `evaluate --tune` found to the results of a run and to its card.

    Returns False if it left the card alone, because it is not the one that [`write_model_card`] would write. A
    directory without results of train.py stays as it is.

    Args:
        tuned: `tuned_decoding`, what [`tune`] returns, `tuned_on`, the name of the texts, and `tuned_by`, the metric.
        scored_with: The beams and length penalty that were the default before.
    """
    path, card = output_dir / "all_results.json", output_dir / "README.md"
    results = read_file(path) if path.exists() else {}
    if "train_target_tokens" not in results:
        return True
    is_ours = not card.exists()
    # Without a recipe or metadata, it is not ours.
    with contextlib.suppress(*DAMAGED, OSError, yaml.YAMLError):
        if not is_ours:
            written = card.read_text(encoding="utf-8")
            name = ModelCard(written).data.model_name  # the name before the directory was renamed
            is_ours = written == str(make_model_card(output_dir, name))
    text = json.dumps({"scored_with": scored_with} | results | tuned, indent=2, ensure_ascii=False)
    write_text(path, text + "\n")
    if card.exists() and is_ours:
        write_model_card(output_dir)
    return is_ours


def list_scores(results: dict, recipe: dict, splits: list[tuple[str, str]], dataset: str) -> list[EvalResult]:
    """The scores of each split, for the metadata of the card."""
    further = [(name, one["module"], name) for name, one in results.get("metrics", {}).items()]
    return [
        EvalResult(
            task_type="translation",
            task_name="Translation",
            dataset_type=dataset,
            dataset_name=results.get("origins", {}).get(SPLIT_NAMES[prefix], dataset),
            dataset_config=recipe.get("dataset_config_name"),
            dataset_split=split,
            metric_type=metric,
            metric_name=title,
            metric_value=round(results[f"{prefix}_{key}"], 4),
            metric_args={"signature": signature} if signature else None,
        )
        for (prefix, split), (key, metric, title) in itertools.product(splits, METRICS + further)
        for signature in [results.get(f"{prefix}_{key}_signature")]
    ]


def as_plain(value) -> str:
    """A value as one line of plain text in Markdown, without markup or HTML."""
    line = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"[\\`*\[\]|#~!]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)  # not the _ inside a_word


def as_code(value) -> str:
    """A value as inline code, for use outside tables."""
    return "`" + " ".join(str(value).split()).replace("`", "'") + "`"


def read_file(path: Path) -> dict:
    """The dictionary in a JSON or YAML file; raises UserError if the file is missing or cannot be parsed."""
    parse = json.loads if path.suffix == ".json" else yaml.safe_load
    remedy = "name the --output_dir of a finished training run"
    with explaining(f"{path} cannot be read", Exception, remedy=remedy):  # YAML may be wrong in many ways
        content = parse(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it has no keys with values")
        lists = [value if isinstance(value, list) else [value] for value in content.values()]
        if path.suffix == ".yaml" and any(isinstance(one, list | dict) for one in itertools.chain(*lists)):
            raise ValueError("a recipe has values and lists of values only")  # aliases can make a few lines huge
    return content


def public_recipe(recipe: dict) -> dict:
    """The recipe with only the last part of each local path and of each URL; files and ids of the Hub stay."""
    public = dict(recipe)
    for key in filter(recipe.get, [*LOCAL_PATHS, *PATHS_OR_IDS]):
        value, shorten = recipe[key], public_name if key in PATHS_OR_IDS else public_file
        public[key] = [shorten(one) for one in value] if isinstance(value, list) else shorten(value)
    return public
