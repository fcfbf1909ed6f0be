"""docs/paper_to_code.md and docs/seeds.md: every name exists; every command of docs prints what the page shows."""

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from helpers import ROOT

from vanilla_transformer.__main__ import main as vanilla_transformer

PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("paper_to_code.md", "seeds.md")}

both_pages = pytest.mark.parametrize("name", PAGES)


def defines(path: Path, name: str) -> bool:
    """Whether a Python file defines a class, function, method or attribute, or a recipe a key.

    `Class.member` may be inherited from a class in another file of the model.
    """
    owner, _, member = name.rpartition(".")
    files = [path, *(ROOT / "vanilla_transformer").glob("*.py")] if owner else [path]
    pattern = rf"(?m)(?:^ *(?:def |class )?|self\.){member}\b(?=[(:, =])"
    is_found = any(re.search(pattern, file.read_text(encoding="utf-8")) for file in files)
    return is_found and (not owner or defines(path, owner))


@cache
def names_of_tests() -> frozenset[str]:
    """The names of all tests."""
    files = (ROOT / "tests").glob("**/test_*.py")
    return frozenset(name for path in files for name in re.findall(r"(?m)^def (test_\w+)", path.read_text("utf-8")))


def unwrap(text: str) -> str:
    """Each bullet on one line."""
    return re.sub(r"\n {2,}(?=\S)", " ", text)


def symbols(text: str) -> list[tuple[str, str]]:
    """Every (file, name) of what a page writes as [file]: `name`, `name`."""
    found = re.findall(r"\[([\w.]+\.(?:py|yaml))\]: ((?:`[\w.]+`(?:, )?)+)", unwrap(text))
    return [(file, name) for file, names in found for name in re.findall(r"`([\w.]+)`", names)]


def missing(text: str) -> set[str]:
    """The names on a page that do not exist."""
    files = {label: ROOT / "docs" / path for label, path in re.findall(r"(?m)^\[([\w.]+)\]: (\S+)$", text)}
    tests = names_of_tests()
    found = symbols(text)
    wrong = {name for file, name in found if file not in files or not (name in tests or defines(files[file], name))}
    return wrong | (set(re.findall(r"`(test_\w+)`", text)) - tests)


@both_pages
def test_every_name_exists(name):
    text = PAGES[name]
    assert missing(text) == set()
    for symbol in {symbol for _, symbol in symbols(text)} | set(re.findall(r"`(test_\w+)`", text)):
        assert missing(text.replace(f"`{symbol}`", f"`{symbol}x`")) == {f"{symbol}x"}  # a misspelt name is found
    for symbol, file in re.findall(r"\[`(test_\w+)`\]\(\.\./(\S+)\)", text):
        assert f"def {symbol}(" in (ROOT / file).read_text(encoding="utf-8"), symbol
    labels = set(re.findall(r"(?m)^\[([\w.]+)\]: ", text))
    assert labels == set(re.findall(r"[^\n]\[([\w.]+\.(?:py|yaml))\](?!\()", unwrap(text)))


# ------------------------------------------------------------------------------------------------------------ commands


def commands(text: str) -> list[tuple[str, str]]:
    """Each command of the console blocks, with the output it shows."""
    blocks = re.findall(r"(?ms)^```console\n(.*?)^```$", text)
    return [(*part.strip().split("\n", 1), "")[:2] for block in blocks for part in re.split(r"(?m)^\$ ", block)[1:]]


def run(command: str) -> str:
    """What `python -c` or `vanilla-transformer` prints; with `| grep -E`, the lines that match."""
    command, _, pattern = command.partition(" | grep -E ")
    words = shlex.split(command)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if words[:2] == ["python", "-c"]:
            exec(words[2], {})
        else:
            assert words[0] == "vanilla-transformer"
            vanilla_transformer(words[1:])
    pattern = shlex.split(pattern)[0] if pattern else ""
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines() if re.search(pattern, line))


ALL_PAGES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [command for text in ALL_PAGES for command in commands(text)]


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command[:50] for command, _ in COMMANDS])
def test_command_prints_what_the_page_shows(command, output):
    assert run(command) == "\n".join(line.rstrip() for line in output.splitlines())


def test_multi30k_score_is_that_of_the_readme():
    (row,) = re.findall(r"(?m)^\| Multi30k, .*$", (ROOT / "README.md").read_text(encoding="utf-8"))
    (score,) = re.findall(r"test\s+BLEU ([\d.]+\d)", PAGES["seeds.md"])
    assert f" {score} " in row and len(COMMANDS) >= 10
