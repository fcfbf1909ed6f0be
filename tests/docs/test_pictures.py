"""docs/pictures and docs/slides: the drawings are those of the scripts, and every one is on a page."""

import re
import runpy
from functools import cache
from io import BytesIO
from xml.etree import ElementTree

import pytest
from helpers import ROOT
from matplotlib.image import imread

SCRIPTS = {ROOT / "docs" / "pictures": "make_diagrams.py", ROOT / "docs" / "slides": "make_slides.py"}
folders = pytest.mark.parametrize("folder", SCRIPTS, ids=lambda folder: folder.name)


@cache
def script(folder) -> dict:
    return runpy.run_path(str(folder / SCRIPTS[folder]))


@folders
def test_drawings_are_those_of_the_script(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        script(folder)["main"](["--check"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "")


@folders
def test_every_picture_is_on_a_page(folder):
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/walkthrough/[0-9]*.py")]
    shown = set()
    for page in pages:
        links = re.findall(r"(?m)(?:!\[[^\]]+\]\(|^\[button\]: )([^)\s]+)", page.read_text(encoding="utf-8"))
        shown |= {(page.parent / link).resolve() for link in links if "://" not in link}
    pictures = {path for path in folder.iterdir() if path.suffix in (".svg", ".png", ".gif")}
    assert pictures == {path for path in shown if path.parent == folder}


@pytest.mark.slow
@folders
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_opened_alone_are_readable(folder, theme, browser):
    """Their ink stands out from what is behind it, in the corner of the window."""
    scheme = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    for path in sorted(folder.glob("*.svg")):
        browser.get(path.as_uri())
        paper = imread(BytesIO(browser.get_screenshot_as_png()))[2, 2, :3].mean()
        ink = browser.execute_script("return getComputedStyle(document.documentElement).color")
        assert abs(paper - sum(map(int, re.findall(r"\d+", ink))) / 765) > 0.7, path


def test_figure_1_shows_every_parameter_of_the_base_model():
    """What is counted outside of the two layers, and six times each of them, is the whole model."""
    figure = script(ROOT / "docs" / "pictures")["Figure1"]()
    words = [element.text or "" for element in ElementTree.fromstring(figure.draw()).iterfind(".//{*}text")]
    assert "The base model: 63,082,496 parameters" in words and words.count("6 ×") == 2
    counts = [int(word.replace(",", "")) for word in words if re.fullmatch(r"\d+(,\d{3})+", word)]
    of_layers = [int(figure.count(f"model.{stack}.layers.0").replace(",", "")) for stack in ("encoder", "decoder")]
    matrix = 37_000 * 512  # shown three times, and one
    assert counts.count(matrix) == 3 and set(of_layers) <= set(counts)
    assert sum(counts) - 3 * matrix == 2 * sum(of_layers)  # the parts of each layer, and its sum
    assert matrix + 6 * sum(of_layers) == 63_082_496


def test_deck_turns_with_keys_shows_notes_and_loads_nothing(browser):
    path = ROOT / "docs" / "slides" / "deck.html"
    browser.get(path.as_uri())
    page = browser.find_element("tag name", "body")

    def shown():
        (number,) = [n for n, one in enumerate(browser.find_elements("tag name", "section"), 1) if one.is_displayed()]
        return number

    assert shown() == 1 and not browser.find_element("css selector", "section:not([hidden]) aside").is_displayed()
    for keys, number in [("\ue014", 2), ("\ue014\ue012n", 2), ("\ue010", 12), ("\ue014", 12), ("\ue011", 1)]:
        page.send_keys(keys)  # right; right, left and n; End; right; Home
        assert shown() == number and browser.current_url.endswith(f"#{number}")
    assert "2.83, 1.41 and -4.24" in browser.find_element("css selector", "section:not([hidden]) aside").text
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert not re.search(r"(?:src|href)=", path.read_text(encoding="utf-8"))
