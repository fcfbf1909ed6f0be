"""Files and datasets of sentence pairs, and what is read of them."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.splits import Splits, load_pairs
from vanilla_transformer.errors import UserError

PAIRS = [(f"a dog {i}", f"ein Hund für {i}") for i in range(40)]
PARTS = {"train": PAIRS[:30], "validation": PAIRS[30:36], "test": PAIRS[36:]}
ENGLISH_GERMAN = {"source_lang": "en", "target_lang": "de"}
streamed = pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streamed"])


def rows(source="en", target="de", pairs=PAIRS) -> list[dict]:
    return [{source: s, target: t} for s, t in pairs]


def write(path: Path, content: list[dict] | str | bytes) -> Path:
    """Writes rows in the format of the suffix, and anything else as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str | bytes):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path
    table = Dataset.from_list(content)
    if path.suffix == ".txt":
        path.write_text("".join("\t".join(row.values()) + "\n" for row in content), encoding="utf-8", newline="")
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        table.to_csv(path, **({"sep": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}))
    else:
        table.to_json(path, lines=path.suffix == ".jsonl")
    return path


def write_card(folder: Path, configs: dict[str, dict[str, str]]):
    """A dataset card with the file of each split of each configuration."""
    listed = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in files.items()]}
        for name, files in configs.items()
    ]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': listed})}---\n# Dogs")


def load(**options) -> Splits:
    """[`load_pairs`] with these options, in which a path may be one, and need not be a text."""
    for name in ("train_file", "validation_file", "test_file"):
        if isinstance(options.get(name), str | Path):
            options[name] = [options[name]]
    return load_pairs(DataOptions(**json.loads(json.dumps(options, default=str))))


def read(*files: Path, **options) -> list[tuple]:
    """The training pairs of files, which also serve for validation."""
    return texts(load(**{"train_file": [*files], "validation_file": [*files]} | options)["train"])


def texts(dataset) -> list[tuple]:
    return [(pair["source"], pair["target"]) for pair in dataset]


def error(*files: Path, **options) -> str:
    """Of files that are for training and validation, or of options."""
    with pytest.raises(UserError) as caught:
        read(*files, **options) if files else load(**options)
    message = str(caught.value)
    assert "\n" not in message
    return message
