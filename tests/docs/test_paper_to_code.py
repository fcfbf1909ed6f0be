"""docs/paper_to_code.md and docs/seeds.md: every name exists, every command prints what the page shows."""

import ast
import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

from vanilla_transformer.__main__ import main as vanilla_transformer

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("paper_to_code.md", "seeds.md")}
PAPER = PAGES["paper_to_code.md"]
SECTIONS = ["1", "2", "3", "3.1", "3.2", "3.2.1", "3.2.2", "3.2.3", "3.3", "3.4", "3.5", "4"]
SECTIONS += ["5", "5.1", "5.2", "5.3", "5.4", "6", "6.1", "6.2", "6.3", "7"]
EQUATIONS = ["Equation 1", "MultiHead(Q, K, V)", "Equation 2", "PE(pos, 2i) and PE(pos, 2i+1)"]
EQUATIONS += ["LayerNorm(x + Sublayer(x))", "Equation 3"]
FIGURES = [f"Figure {number}" for number in range(1, 6)]
TABLES = [f"Table {number}" for number in range(1, 5)]

both_pages = pytest.mark.parametrize("name", PAGES)


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Every class of the model's files."""
    nodes = [n for p in (ROOT / "vanilla_transformer").glob("*.py") for n in ast.parse(p.read_text("utf-8")).body]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def assigned_names(node: ast.AST) -> set[str]:
    """The names, and the attributes of `self`, that a statement assigns to."""
    targets = (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    )
    targets = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names | {t.attr for t in targets if isinstance(t, ast.Attribute) and getattr(t.value, "id", "") == "self"}


def members(node: ast.ClassDef) -> set[str]:
    """Methods and attributes of a class, own and inherited within the package."""
    found = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    found |= {name for part in ast.walk(node) for name in assigned_names(part)}
    bases = [classes()[base.id] for base in node.bases if getattr(base, "id", None) in classes()]
    return found.union(*(members(base) for base in bases))


@cache
def names_in(path: Path) -> frozenset[str]:
    """Classes, functions, methods and attributes of a Python file; the keys of a recipe."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        return frozenset(yaml.safe_load(text))
    found = set()
    for node in ast.parse(text).body:
        found |= assigned_names(node)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{member}" for member in members(node)}
    return frozenset(found)


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
    wrong = {
        n
        for file, n in symbols(text)
        if file not in files or (n not in names_in(files[file]) and n not in names_of_tests())
    }
    return wrong | (set(re.findall(r"`(test_\w+)`", text)) - names_of_tests())


@both_pages
def test_every_name_exists(name):
    text = PAGES[name]
    assert missing(text) == set()
    for symbol in {symbol for _, symbol in symbols(text)} | set(re.findall(r"`(test_\w+)`", text)):
        assert missing(text.replace(f"`{symbol}`", f"`{symbol}x`")) == {f"{symbol}x"}  # a misspelt name is found
    labels = set(re.findall(r"(?m)^\[([\w.]+)\]: ", text))
    assert labels == set(re.findall(r"[^\n]\[([\w.]+\.(?:py|yaml))\](?!\()", unwrap(text)))


def items_under(heading: str, text: str = PAPER) -> list[str]:
    """The bullets between a heading and the next, each on one line."""
    part = re.split(r"(?m)^#+ ", text.partition(f"\n{heading}\n")[2])[0]
    return re.findall(r"(?m)^- (.*)$", unwrap(part))


@pytest.mark.parametrize(
    ("heading", "wanted"),
    [("## Sections", SECTIONS), ("## Equations", EQUATIONS), ("## Figures", FIGURES), ("## Tables", TABLES)],
)
def test_every_part_of_the_paper_names_code_or_says_that_there_is_none(heading, wanted):
    items = items_under(heading)
    titles = [re.match(r"\*\*(.*?)\*\*", item)[1] for item in items]
    assert [title.split(" ")[0] if heading == "## Sections" else title for title in titles] == wanted
    for item in items:
        assert symbols(item) or re.search("(?i)nothing to implement|not implemented|not run|see its parts", item), item


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


COMMANDS = [command for text in PAGES.values() for command in commands(text)]


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command[:50] for command, _ in COMMANDS])
def test_command_prints_what_the_page_shows(command, output):
    assert run(command) == "\n".join(line.rstrip() for line in output.splitlines())


def test_multi30k_score_is_that_of_the_readme():
    (row,) = re.findall(r"(?m)^\| Multi30k, .*$", (ROOT / "README.md").read_text(encoding="utf-8"))
    (score,) = re.findall(r"test\s+BLEU ([\d.]+\d)", PAGES["seeds.md"])
    assert f" {score} " in row and len(COMMANDS) >= 10
