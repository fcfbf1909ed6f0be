"""docs/pictures: the diagrams are those that the script draws, and every picture is on a page."""

import re
import runpy
from xml.etree import ElementTree

import pytest
from helpers import ROOT

FOLDER = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(FOLDER / "make_diagrams.py"))


def test_diagrams_are_those_of_the_script(script, capsys):
    with pytest.raises(SystemExit) as ended:
        script["main"](["--check"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "")


def test_every_picture_is_on_a_page():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/walkthrough/[0-9]*.py")]
    shown = set()
    for page in pages:
        links = re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        shown |= {(page.parent / link).resolve() for link in links if "://" not in link}
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".svg", ".png", ".gif")} == {
        path.name for path in shown if path.parent == FOLDER
    }


def test_figure_1_shows_every_parameter_of_the_base_model(script):
    """What is counted outside of the two layers, and six times each of them, is the whole model."""
    figure = script["Figure1"]()
    words = [
        element.text or "" for element in ElementTree.fromstring(figure.draw()).iter() if element.tag.endswith("text")
    ]
    assert "The base model: 63,082,496 parameters" in words and words.count("6 ×") == 2
    counts = [int(word.replace(",", "")) for word in words if re.fullmatch(r"\d+(,\d{3})+", word)]
    of_layers = [int(figure.count(f"model.{stack}.layers.0").replace(",", "")) for stack in ("encoder", "decoder")]
    matrix = 37_000 * 512  # shown three times, and one
    assert counts.count(matrix) == 3 and set(of_layers) <= set(counts)
    assert sum(counts) - 3 * matrix == 2 * sum(of_layers)  # the parts of each layer, and its sum
    assert matrix + 6 * sum(of_layers) == 63_082_496
