"""Of all tests of data."""

from pathlib import Path

import datasets
import pytest
from pair_files import PAIRS, rows, write, write_card

from vanilla_transformer.data.tokenizer import train_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The empty folder that is the cache of `datasets`, which uses no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer():
    """Of the pairs in batches and streams."""
    return train_tokenizer([f"a dog {i} ein Hund für {i}" for i in range(40)], 280)


@pytest.fixture
def hub_like(tmp_path):
    """A directory laid out like a Hub dataset repository with two configurations."""
    folder = tmp_path / "hub"
    for name, part in [("data/train", PAIRS[:30]), ("data/dev", PAIRS[30:36]), ("data/test", PAIRS[36:])]:
        write(folder / f"{name}.jsonl", rows(pairs=part))
    write(folder / "fr.csv", rows("en", "fr", PAIRS[:10]))
    files = {"train": "data/train.jsonl", "dev": "data/dev.jsonl", "test": "data/test.jsonl"}
    write_card(folder, {"en-de": files, "en-fr": {"train": "fr.csv"}})
    return folder
