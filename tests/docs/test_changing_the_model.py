"""docs/changing_the_model.md: its blocks run from top to bottom and print what it shows, and so does its command."""

import re

import pytest
from helpers import ROOT, python_output

PAGE = (ROOT / "docs" / "changing_the_model.md").read_text(encoding="utf-8")


def test_blocks_print_what_the_page_shows(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names, printed = {}, []
    for code in re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE):
        exec(code, names)
        printed.append(capsys.readouterr().out)
    passed, failed, search, converted = printed
    assert passed == ""
    for text, shown in zip((failed, converted), re.findall(r"(?ms)^```text\n(.*?)\n```$", PAGE), strict=True):
        assert re.match(re.escape(shown).replace("…", ".*"), text), text
    assert search.startswith("This search does not support a changed model (`RelativeAttention`)")


@pytest.mark.slow
def test_the_example_prints_what_the_pages_say(tmp_path):
    (command,) = re.findall(r"(?m)^    python (.*)$", PAGE)
    lines = python_output(ROOT / command, cwd=tmp_path).splitlines()
    assert lines[0] == "The checks pass." and re.fullmatch(r"The loss fell from \d.\d\d to 0.\d\d.", lines[1])
    shown = f"prints `{lines[0]}` and the digits `{lines[2]}` twice"
    assert lines[2] == lines[3] and shown in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
