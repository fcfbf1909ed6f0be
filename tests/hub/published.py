"""What a directory of a trained model holds, which of its files are published, and a way to change them."""

import json
from pathlib import Path

import yaml

PAIRS = [
    ("I am a student", "Ich bin ein Schüler"),
    ('The "dog" | sleeps.\n```\n# not a heading', "Der Hund schläft."),
    ("Where is the house?", "Wo ist das Haus?"),
]
CODE = ["configuration", "decoding", "loss", "modeling", "sentences", "translation"]
CODE = [f"{name}_vanilla_transformer.py" for name in CODE]
FILES = "README.md all_results.json attention.png config.json generation_config.json model.safetensors recipe.yaml"
FILES = sorted([*FILES.split(), "tokenizer.json", "tokenizer_config.json", "training_curves.png", *CODE])
RESULTS = {"train_runtime": 3725.4, "train_steps": 12345, "train_loss": 2.5, "train_target_tokens": 67891011}
RESULTS |= {"train_target_tokens_per_second": 18223.7, "padding_fraction": 0.0412, "num_parameters": 4321}
RESULTS |= {"eval_loss": 1.23456, "eval_bleu": 31.41592, "eval_chrf": 55.5}
RESULTS |= {"test_loss": 1.3, "test_bleu": 30.25, "test_chrf": 54.125}
for split, count in {"eval": 1, "test": 2}.items():
    RESULTS[f"{split}_bleu_signature"] = f"nrefs:{count}|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
    RESULTS[f"{split}_chrf_signature"] = f"nrefs:{count}|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0"
RESULTS |= {"dataset": "pairs", "source_lang": "en", "target_lang": "de", "date": "2026-11-21T10:00:00+00:00"}
RESULTS |= {"train_samples": 29000, "hardware": "2 x Abacus 9000", "mixed_precision": "bf16"}
RESULTS |= {"versions": {"torch": "2.13.0", "transformers": "5.23.0"}}
RESULTS |= {"examples": [{"source": s, "reference": t, "translation": f"{t}!"} for s, t in PAIRS]}
RECIPE = {"dataset_name": "/home/somebody/private/pairs", "output_dir": "/home/somebody/private/toy"}
RECIPE |= dict.fromkeys(("dataset_config_name", "train_file", "test_split", "model_name_or_path", "ema_decay"))
RECIPE |= {"validation_split": "dev", "max_source_length": 128, "learning_rate": 0.0078125, "num_beams": 4}
RECIPE |= {"d_model": 16, "position_embedding_type": "sinusoidal", "max_position_embeddings": 512}


def edit(path: Path, **changes):
    """Sets keys of a JSON or YAML file."""
    text = path.read_text(encoding="utf-8")
    load, dump = (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    path.write_text(dump(load(text) | changes), encoding="utf-8")
