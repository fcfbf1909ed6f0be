"""A directory as train.py leaves it, and the files of it that are published."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers import TINY, randomise
from published import PAIRS, RECIPE, RESULTS
from safetensors.torch import save_file
from transformers import GenerationConfig

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenizer import special_token_ids, train_tokenizer


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """The output directory of a run, with a checkpoint and somebody's notes."""
    torch.manual_seed(0)
    output_dir = tmp_path_factory.mktemp("outputs") / "toy"
    tokenizer = train_tokenizer([text for pair in PAIRS for text in pair], 300)
    config = VanillaTransformerConfig(**TINY | {"vocab_size": len(tokenizer)} | special_token_ids(tokenizer))
    model = randomise(VanillaTransformerForConditionalGeneration(config)).eval()
    ids = {name: getattr(config, name) for name in vars(config) if name.endswith("_token_id")}
    model.generation_config = GenerationConfig(max_length=12, **ids)
    for folder in (output_dir, output_dir / "checkpoint-5"):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_file({"lm_head.weight/exp_avg": torch.zeros(2)}, folder / "optimizer.safetensors")
    (output_dir / "checkpoint-5" / "trainer_state.json").write_text("{}")
    (output_dir / "notes.txt").write_text("to myself")
    for picture in ("training_curves.png", "attention.png"):
        (output_dir / picture).write_bytes(b"\x89PNG")
    (output_dir / "all_results.json").write_text(json.dumps(RESULTS, ensure_ascii=False), encoding="utf-8")
    (output_dir / "recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    return output_dir


@pytest.fixture
def trained(original, tmp_path) -> Path:
    """A copy of the directory that a test may change."""
    return shutil.copytree(original, tmp_path / "toy")
