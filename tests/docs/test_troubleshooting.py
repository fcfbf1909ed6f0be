"""docs/troubleshooting.md: every message that it explains is one that the code, or Accelerate's launcher, writes."""

import ast
import re
from pathlib import Path

from accelerate.commands import launch
from helpers import ROOT


def strings() -> list[str]:
    """Every string in the code and in Accelerate's launcher; f-strings have … for each value."""
    found = []
    for file in [*ROOT.glob("*.py"), *(ROOT / "vanilla_transformer").rglob("*.py"), Path(launch.__file__)]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                parts = getattr(node, "values", [node])
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts))
    return found


def test_every_message_is_one_of_the_code():
    """A string of the code has the parts of the message between its … in this order."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"(?m)^### (?P<ticks>`+)(.*)(?P=ticks)$", page)
    assert len(messages) >= 20
    written = strings()
    for _, message in messages:
        pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
        assert any(map(pattern.search, written)), message
