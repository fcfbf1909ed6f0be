"""docs/teachers.md: its slides are those that the script draws, and it shows all of them."""

import re
import runpy

import pytest
from helpers import ROOT

FOLDER = ROOT / "docs" / "slides"


def test_slides_are_those_of_the_script(capsys):
    script = runpy.run_path(str(FOLDER / "make_slides.py"))
    with pytest.raises(SystemExit) as ended:
        script["main"](["--check"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "")
    page = (ROOT / "docs" / "teachers.md").read_text(encoding="utf-8")
    files = sorted(path.name for path in FOLDER.glob("*.svg"))
    assert re.findall(r"\]\(slides/(\d+\.svg)\)", page) == files and len(files) == len(script["SLIDES"])


def test_lessons_take_90_minutes_and_every_question_has_an_answer():
    page = (ROOT / "docs" / "teachers.md").read_text(encoding="utf-8")
    for lesson in re.split(r"(?m)^## ", page)[1:4]:
        assert sum(map(int, re.findall(r"(?m)^\| (\d+) \|", lesson))) == 90
    questions, answers = page.split("## Quiz")[1].split("<details")
    assert len(re.findall(r"(?m)^\d+\. ", questions)) == len(re.findall(r"(?m)^\d+\. ", answers)) == 12
