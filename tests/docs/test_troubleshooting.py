"""docs/troubleshooting.md: every message that it explains is one that the code writes."""

import ast
import re
from pathlib import Path

import pytest
from helpers import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"(?m)^### `(.*)`$", PAGE)


def texts(node: ast.AST) -> str | None:
    """The text of a string, or of an f-string with … for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def written(files: list[Path]) -> list[str]:
    """Every string in the code of these files."""
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    return [text for node in nodes if (text := texts(node))]


def is_written(message: str, strings: list[str]) -> bool:
    """Whether a string has the parts of the message between its … in this order."""
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
    return any(pattern.search(text) for text in strings)


@pytest.fixture(scope="module")
def strings() -> list[str]:
    return written([*ROOT.glob("*.py"), *(ROOT / "vanilla_transformer").rglob("*.py")])


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_one_of_the_code(message, strings):
    assert is_written(message, strings)
    assert not is_written(message.replace(max(message.split("…"), key=len), " no such words "), strings)


def test_page_explains_messages():
    assert len(MESSAGES) >= 20
