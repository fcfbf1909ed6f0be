"""The model card: README.md of a trained model, written from what its run left."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..errors import UserError
from ..training.optimization import paper_learning_rate

SENTENCE = "The dog sleeps."  # to translate, where the run left no example


def write_model_card(output_dir: str | Path, repo_id: str | None = None) -> Path:
    """Writes README.md, the model card, from `all_results.json` and `recipe.yaml` of a finished run.

    Beside it, if the dataset lives on the Hub, the scores as the Hub collects them for it: `.eval_results/*.yaml`.

    Args:
        repo_id: What the code in the card loads; None: the directory, by its name.

    Raises:
        UserError: One of the two files is missing, damaged or lacks what train.py writes there.
    """
    output_dir = Path(output_dir)
    results = read_json(output_dir / "all_results.json")
    recipe = read_options(output_dir)
    name = output_dir.resolve().name
    try:
        data = card_data(results, recipe, name)
        pictures = [f"![{text}]({file})" for file, text in PICTURES.items() if (output_dir / file).exists()]
        body = card_body(results, recipe, name, repo_id, pictures)
        if is_hub_dataset(results, recipe):
            write_eval_results(output_dir, results, recipe)
    except KeyError as error:
        raise UserError(
            f"{output_dir} lacks {error} in all_results.json or recipe.yaml; train.py writes it."
        ) from error
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")
    path = output_dir / "README.md"
    card.save(path)
    return path


def card_data(results: dict, recipe: dict, name: str) -> ModelCardData:
    """What the Hub reads of the card."""
    languages = [language_code(results.get(key)) for key in ("source_lang", "target_lang")]
    base = recipe.get("model_name_or_path")
    return ModelCardData(
        language=list(dict.fromkeys(code for code in languages if code)) or None,
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla-transformer", "translation", "encoder-decoder"],
        datasets=[results["dataset"]] if is_hub_dataset(results, recipe) else None,
        metrics=["sacrebleu", "chrf"],
        base_model=base if base and "/" in base and public_name(base) == base else None,
        model_name=name,
        eval_results=eval_results(results, recipe),
    )


# Names that columns have, and that are also codes of small languages.
COLUMN_NAMES = {"src", "tgt", "trg", "ref", "hyp"}


def language_code(name: str | None) -> str | None:
    """`en` of `en`, `en_XX` or `en-GB`, `eng` of `eng_Latn`; None of what is no language code."""
    found = re.fullmatch(r"([a-z]{2,3})([-_][A-Za-z]{2,4})?", name or "")
    return found.group(1) if found and found.group(1) not in COLUMN_NAMES else None


def is_hub_dataset(results: dict, recipe: dict) -> bool:
    """Whether the training pairs come from the Hub, `owner/name`, and not from a directory or from files."""
    dataset = results["dataset"] or ""
    return bool(recipe.get("dataset_name")) and "/" in dataset and public_name(dataset) == dataset


def scored_splits(results: dict, recipe: dict) -> list[tuple[str, str]]:
    """(prefix in the results, name of the split) of each split that was scored."""
    splits = [("eval", recipe.get("validation_split") or "validation"), ("test", recipe.get("test_split") or "test")]
    return [(prefix, split) for prefix, split in splits if f"{prefix}_bleu" in results]


def eval_results(results: dict, recipe: dict) -> list[EvalResult]:
    """The scores, as `model-index` lists them."""
    dataset = public_name(results["dataset"])
    found = []
    for prefix, split in scored_splits(results, recipe):
        for key, metric, title in [("bleu", "sacrebleu", "BLEU"), ("chrf", "chrf", "chrF"), ("loss", "loss", "Loss")]:
            signature = results.get(f"{key}_signature")
            found.append(
                EvalResult(
                    task_type="translation",
                    task_name="Translation",
                    dataset_type=dataset,
                    dataset_name=dataset,
                    dataset_config=recipe.get("dataset_config_name"),
                    dataset_split=split,
                    metric_type=metric,
                    metric_name=title,
                    metric_value=round(results[f"{prefix}_{key}"], 4),
                    metric_args={"signature": signature} if signature else None,
                )
            )
    return found


def write_eval_results(output_dir: Path, results: dict, recipe: dict):
    """Writes `.eval_results/{dataset}.yaml`, the scores on each split, for the page of the dataset on the Hub.

    Source: https://huggingface.co/docs/hub/eval-results.
    """
    entries = [
        EvalResultEntry(
            dataset_id=results["dataset"],
            task_id=f"{recipe.get('dataset_config_name') or 'default'}_{split}_{metric}",
            value=round(results[f"{prefix}_{metric}"], 4),
            date=results.get("date"),
            notes=f"{results[f'{metric}_signature']}, {recipe['num_beams']} beams",
        )
        for prefix, split in scored_splits(results, recipe)
        for metric in ("bleu", "chrf")
    ]
    path = output_dir / ".eval_results" / f"{results['dataset'].replace('/', '_')}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False), encoding="utf-8")


PICTURES = {
    "training_curves.png": "Loss, scores and learning rate over the steps",
    "attention.png": "What the heads of the last layer look at in a validation sentence while they translate it",
}


def card_body(results: dict, recipe: dict, name: str, repo_id: str | None, pictures: list[str]) -> str:
    """The text of the card."""
    languages = [results.get("source_lang"), results.get("target_lang")]
    direction = " from `{}` to `{}`".format(*languages) if all(languages) else ""
    base = recipe.get("model_name_or_path")
    origin = f"tuned from `{public_name(base)}`" if base else "trained from scratch"
    dataset = public_name(results["dataset"])
    dataset = f"[{dataset}](https://huggingface.co/datasets/{dataset})" if is_hub_dataset(results, recipe) else dataset
    sections = [
        f"# {name}",
        f"Translates{direction}. An encoder-decoder Transformer as in *Attention Is All You Need* (Vaswani et al., "
        f"2017) with {results['num_parameters']:,} parameters, {origin} on {dataset} with `vanilla-transformer`.",
        "## Results",
        results_table(results, recipe),
        *signatures(results),
        "## Use",
        usage(results, repo_id or name),
        *examples(results),
        "## Training",
        table(["", ""], training_facts(results)),
        *pictures,
        "The main options; `recipe.yaml` holds all of them, and `train.py --config recipe.yaml` repeats the run, if "
        "it is launched as this one was.",
        table(["option", "value"], main_options(recipe)),
        "## Limits",
        limits(recipe),
        "## Licence",
        "Apache-2.0, code and weights. What the model was trained on has a licence of its own.",
        "## Citation",
        CITATION,
    ]
    return "\n\n".join(sections) + "\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def results_table(results: dict, recipe: dict) -> str:
    rows = [
        [split, *(f"{results[f'{prefix}_{key}']:.{digits}f}" for key, digits in SCORES)]
        for prefix, split in scored_splits(results, recipe)
    ]
    return table(["split", "BLEU", "chrF", "loss (nats per token)"], rows)


SCORES = [("bleu", 2), ("chrf", 2), ("loss", 3)]


def signatures(results: dict) -> list[str]:
    """The lines by which the scores can be computed again."""
    named = [("BLEU", results.get("bleu_signature")), ("chrF", results.get("chrf_signature"))]
    given = [f"{metric} `{signature}`" for metric, signature in named if signature]
    return [f"Scored by sacreBLEU: {', '.join(given)}."] if given else []


def usage(results: dict, model_id: str) -> str:
    """Code that runs as printed. [`files_to_upload`] puts the repository's id and revision into its lines for them."""
    source = json.dumps((results.get("examples") or [{"source": SENTENCE}])[0]["source"], ensure_ascii=False)
    return f"""```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

model_id = {json.dumps(model_id, ensure_ascii=False)}  # this directory, or the id of its repository on the Hub
revision = "main"  # a commit's hash in its place makes sure that code and weights stay as you know them

translate = pipeline("vanilla-translation", model=model_id, revision=revision, trust_remote_code=True)
print(translate([{source}]))

tokenizer = AutoTokenizer.from_pretrained(model_id, revision=revision, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(model_id, revision=revision, trust_remote_code=True)
inputs = tokenizer([{source}], return_tensors="pt", padding=True)
outputs = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True))
```

The pipeline takes any number of texts, puts them in batches by length, keeps their order, and splits what is too long.
`trust_remote_code=True` runs the code that lies beside the weights; after `import vanilla_transformer`, where that is
installed, model and tokenizer load without it, and its `Translator` does what the pipeline does."""


def examples(results: dict) -> list[str]:
    """What the model made of the first sentences of a split."""
    found = results.get("examples") or []
    lines = [f"{key + ':':<13}{' '.join(example[key].split())}" for example in found for key in EXAMPLE_KEYS]
    return (
        ["Translations of sentences that it was not trained on:", "\n".join(["```text", *lines, "```"])]
        if found
        else []
    )


EXAMPLE_KEYS = ("source", "reference", "translation")


def training_facts(results: dict) -> list[list[str]]:
    """How the run went, as rows of a table."""
    versions = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    return [
        ["parameters", f"{results['num_parameters']:,}"],
        *([["training pairs", f"{results['train_samples']:,}"]] if "train_samples" in results else []),
        ["steps", f"{results['train_steps']:,}"],
        ["target tokens, padding left out", f"{results['train_target_tokens']:,}"],
        ["target tokens per second", f"{results['train_target_tokens_per_second']:,.0f}"],
        ["padding", f"{results['padding_fraction']:.1%}"],
        ["training loss, with label smoothing", f"{results['train_loss']:.3f}"],
        ["time", duration(results["train_runtime"])],
        *([["date", results["date"]]] if "date" in results else []),
        ["hardware", results["hardware"]],
        ["mixed precision", results["mixed_precision"]],
        ["versions", versions],
    ]


def duration(seconds: float) -> str:
    """`1 h 2 min`, `3 min 20 s` or `5.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


MAIN_OPTIONS = ["d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"]
MAIN_OPTIONS += ["encoder_ffn_dim", "decoder_ffn_dim", "vocab_size", "dropout", "norm_first"]
MAIN_OPTIONS += ["position_embedding_type", "per_device_train_max_tokens", "gradient_accumulation_steps"]
MAIN_OPTIONS += ["learning_rate", "lr_scheduler_type", "warmup_steps", "label_smoothing_factor", "max_grad_norm"]
MAIN_OPTIONS += ["weight_decay", "average_checkpoints", "ema_decay", "seed", "num_beams", "length_penalty"]


def main_options(recipe: dict) -> list[list[str]]:
    """The options that make the model what it is, as rows of a table; those that are off are left out."""
    if recipe["learning_rate"] is None:
        recipe = recipe | {"learning_rate": f"{paper_learning_rate(recipe['d_model'], recipe['warmup_steps']):.3e}"}
    return [[f"`{name}`", f"`{recipe[name]}`"] for name in MAIN_OPTIONS if recipe[name] is not None]


def limits(recipe: dict) -> str:
    """What the model is not for."""
    text = (
        "- It translates sentence by sentence, and knows nothing of the sentences around.\n"
        "- It knows the kind of text it was trained on, and the biases in that. On other text it may leave out, "
        "invent or repeat: no translation of it should be relied on unread.\n"
        f"- It was trained on sentences of up to {recipe['max_source_length']} tokens. Longer ones come out worse; "
        f"`max_source_length={recipe['max_source_length']}` makes the pipeline translate them in pieces."
    )
    if recipe["position_embedding_type"] == "learned":
        text += f" Its learned positions end at {recipe['max_position_embeddings']}, beyond which it reads nothing."
    return text


CITATION = """The architecture is that of

```bibtex
@inproceedings{vaswani2017attention,
  title     = {Attention Is All You Need},
  author    = {Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and Gomez, Aidan N. and Kaiser, {\\L}ukasz and Polosukhin, Illia},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {30},
  year      = {2017}
}
```"""  # noqa: E501


# ----------------------------------------------------------------------------- what the run left, as others may see it


def read(path: Path, parse: Callable[[str], Any], kind: type) -> Any:
    """The parsed contents of a file; raises UserError where there is none, or it holds something else."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is not there; name the --output_dir of a finished training run.") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, kind):
        raise UserError(f"{path} does not hold what is written there by training; restore it.")
    return content


def read_json(path: Path) -> dict:
    return read(path, json.loads, dict)


def read_results(output_dir: Path) -> dict:
    path = output_dir / "all_results.json"
    return read_json(path) if path.exists() else {}


def read_options(output_dir: Path) -> dict:
    return read(output_dir / "recipe.yaml", yaml.safe_load, dict)


LOCAL_OPTIONS = ["output_dir", "train_file", "validation_file", "test_file"]
LOCAL_OR_HUB_OPTIONS = ["dataset_name", "tokenizer_name", "model_name_or_path"]


def public_name(name_or_path: str) -> str:
    """A Hub id as it is; of a local path only the last part, since the rest tells of its owner's disk."""
    if is_repo_id(name_or_path) and not Path(name_or_path).exists():
        return name_or_path
    return Path(name_or_path).expanduser().resolve().name


def is_repo_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def public_dataset(results: dict) -> dict:
    return {"dataset": public_name(results["dataset"])} if results.get("dataset") else {}


def public_options(recipe: dict) -> dict:
    """The options of a recipe that may hold local paths, without them."""
    options = {key: Path(recipe[key]).resolve().name for key in LOCAL_OPTIONS if recipe.get(key)}
    return options | {key: public_name(recipe[key]) for key in LOCAL_OR_HUB_OPTIONS if recipe.get(key)}
