"""docs/recipes.md: its table of recipes has the values of the recipes."""

import re

import pytest
import yaml
from helpers import ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
ROWS = re.findall(r"(?m)^\| [^|]*\]\(\.\./recipes/(\w+)\.yaml\) \|(.*)\|$", PAGE)


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[name for name, _ in ROWS])
def test_row_has_the_values_of_its_recipe(name, row):
    recipe = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
    _, vocabulary, sizes, dropout, rate, tokens, steps, _ = (cell.strip() for cell in row.split("|"))
    assert vocabulary == f"{recipe['vocab_size']:,}"
    layers = f"{recipe['encoder_layers']}+{recipe['decoder_layers']}"
    assert sizes == f"{recipe['d_model']:,}, {recipe['encoder_ffn_dim']:,}, {layers}"
    assert (float(dropout), steps) == (recipe["dropout"], f"{recipe['max_steps']:,}")
    peak, warmup, *others = rate.split(", ")
    expected = float(recipe.get("learning_rate") or (recipe["d_model"] * recipe["warmup_steps"]) ** -0.5)
    assert float(peak) == pytest.approx(expected, rel=0.01) and warmup == f"{recipe['warmup_steps']:,}"
    named = [recipe[key] for key in ("lr_scheduler_type", "optimizer") if key in recipe]
    assert [other.lower() for other in others] == named
    batches, _, size = tokens.rpartition(" x ")
    assert size == f"{recipe['per_device_train_max_tokens']:,}"
    # The paper's eight GPUs take the place of accumulation.
    assert int(batches or 1) == (8 if name.startswith("wmt14") else recipe.get("gradient_accumulation_steps", 1))


def test_every_recipe_has_a_row():
    assert {name for name, _ in ROWS} == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
