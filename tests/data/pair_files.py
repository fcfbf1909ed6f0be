"""Files and datasets of sentence pairs, and what is read of them."""

import csv
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from helpers import data_options

from vanilla_transformer.data.splits import load_pairs
from vanilla_transformer.errors import UserError

PAIRS = [(f"a dog {i}", f"ein Hund für {i}") for i in range(40)]
PARTS = {"train": PAIRS[:30], "validation": PAIRS[30:36], "test": PAIRS[36:]}
ENGLISH_GERMAN = {"source_lang": "en", "target_lang": "de"}
streamed = pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streamed"])


def rows(source="en", target="de", pairs=PAIRS) -> list[dict]:
    return [{source: s, target: t} for s, t in pairs]


def write(path: Path, rows: list[dict]) -> Path:
    """Writes rows in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = Dataset.from_list(rows)
    if path.suffix == ".txt":
        path.write_text("".join("\t".join(row.values()) + "\n" for row in rows), encoding="utf-8", newline="")
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


def load(**options) -> dict:
    return load_pairs(data_options(**options))


def load_file(path: Path, **options) -> list[tuple]:
    """The training pairs of a file, which also serves for validation."""
    return texts(load(train_file=path, validation_file=path, **options)["train"])


def texts(dataset) -> list[tuple]:
    return [(pair["source"], pair["target"]) for pair in dataset]


def columns(names: list[str]) -> list[dict]:
    """Rows of text with the column's name; `id` is a number, `translation` a dictionary of languages."""
    special = [{"id": i, "translation": {"en": f"en {i}", "de": f"de {i}"}} for i in range(20)]
    return [{name: special[i].get(name, f"{name} {i}") for name in names} for i in range(20)]


def error(**options) -> str:
    with pytest.raises(UserError) as caught:
        load(**options)
    message = str(caught.value)
    assert "\n" not in message
    return message
