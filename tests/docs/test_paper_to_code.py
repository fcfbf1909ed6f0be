"""docs/paper_to_code.md and docs/seeds.md: what they name is there, what they run prints what they say.

Run: pytest tests/test_paper_to_code.py
"""

import ast
import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

from vanilla_transformer.__main__ import main
from vanilla_transformer.__main__ import make_parser as make_command_parser
from vanilla_transformer.training.arguments import make_parser

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("paper_to_code.md", "seeds.md")}
PAPER = PAGES["paper_to_code.md"]
SECTIONS = ["1", "2", "3", "3.1", "3.2", "3.2.1", "3.2.2", "3.2.3", "3.3", "3.4", "3.5", "4"]
SECTIONS += ["5", "5.1", "5.2", "5.3", "5.4", "6", "6.1", "6.2", "6.3", "7"]
EQUATIONS = ["Equation 1", "MultiHead(Q, K, V)", "Equation 2", "PE(pos, 2i) and PE(pos, 2i+1)"]
EQUATIONS += ["LayerNorm(x + Sublayer(x))", "Equation 3"]
FIGURES = [f"Figure {number}" for number in range(1, 6)]
TABLES = [f"Table {number}" for number in range(1, 5)]
ROWS_OF_TABLE_3 = ["base", "A", "B", "C", "D", "E", "big"]

both = pytest.mark.parametrize("name", PAGES)

# ------------------------------------------------------------------------------------------------------------- symbols


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Every class of the package."""
    found = {}
    for path in (ROOT / "vanilla_transformer").glob("*.py"):
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
        found |= {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    return found


def assigned(node: ast.stmt) -> list[ast.expr]:
    """What a statement assigns to, one by one."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]


def members(node: ast.ClassDef) -> set[str]:
    """Methods and attributes of a class, and of the classes of this package that it inherits from."""
    found = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    found |= {target.id for part in node.body for target in assigned(part) if isinstance(target, ast.Name)}
    for part in ast.walk(node):
        for target in assigned(part) if isinstance(part, ast.stmt) else []:
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", None) == "self":
                found.add(target.attr)
    for base in node.bases:
        if getattr(base, "id", None) in classes():
            found |= members(classes()[base.id])
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    """Classes, functions, methods and attributes of a Python file; the keys of a recipe."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        return frozenset(yaml.safe_load(text))
    found = set()
    for node in ast.parse(text).body:
        found |= {target.id for target in assigned(node) if isinstance(target, ast.Name)}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{member}" for member in members(node)}
    return frozenset(found)


def definitions(text: str) -> dict[str, Path]:
    """The files that a page gives a name to, at its end."""
    return {label: ROOT / "docs" / path for label, path in re.findall(r"(?m)^\[([\w.]+)\]: (\S+)$", text)}


def symbols(text: str) -> list[tuple[str, str]]:
    """Every (file, name) of a page: what stands as [file]: `name`, `name`."""
    found = re.findall(r"\[([\w.]+\.(?:py|yaml))\]: ((?:`[\w.]+`(?:, )?)+)", text)
    return [(file, name) for file, names in found for name in re.findall(r"`([\w.]+)`", names)]


def missing(text: str) -> list[tuple[str, str]]:
    """The names of a page that are not there."""
    files = definitions(text)
    return [(file, name) for file, name in symbols(text) if file not in files or name not in names_in(files[file])]


@both
def test_every_symbol_exists(name):
    assert missing(PAGES[name]) == []
    assert len(symbols(PAGES[name])) >= {"paper_to_code.md": 100, "seeds.md": 40}[name]


@both
def test_a_wrong_symbol_is_found(name):
    """Each of them, misspelt at its end; and a method of a class that has no such one."""
    text = PAGES[name]
    for _, symbol in set(symbols(text)):
        doctored = missing(text.replace(f"`{symbol}`", f"`{symbol}x`"))
        assert doctored and {wrong for _, wrong in doctored} == {f"{symbol}x"}
    line = "\n| [inspection.py]: `Step`, `Step.flops`, `Step.forward`, `AttentionMaps.flops`, `Step.parameters` |\n"
    line += "\n[inspection.py]: ../vanilla_transformer/inspection.py\n"
    assert missing(line) == [("inspection.py", "Step.forward"), ("inspection.py", "AttentionMaps.flops")]


def test_what_is_inherited_or_set_in_a_method_is_a_name_too():
    names = names_in(ROOT / "vanilla_transformer" / "modeling_vanilla_transformer.py")
    assert {"VanillaTransformerDecoderLayer.residual", "VanillaTransformerEncoder.embed_scale"} <= names
    assert "VanillaTransformerEncoderLayer.encoder_attn" not in names


@both
def test_a_name_without_its_file_is_looked_up_too(name):
    """A class of the model, which is in the modelling file, or a test that stands with its file elsewhere."""
    looked_up = {symbol for _, symbol in symbols(PAGES[name])}
    named = set(re.findall(r"`(VanillaTransformer\w*(?:\.\w+)?|test_\w+)`", PAGES[name]))
    known = names_in(ROOT / "vanilla_transformer" / "modeling_vanilla_transformer.py")
    assert named - looked_up - known == set()


# ----------------------------------------------------------------------------------------- files, headings, options


def dead_links(text: str) -> list[str]:
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"(?m)^\[[\w.]+\]: (\S+)$", text)
    files = {link.partition("#")[0] for link in links if "://" not in link} - {""}
    return sorted(file for file in files if not (ROOT / "docs" / file).is_file())


def headings(text: str) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@both
def test_files_that_are_linked_are_there(name):
    assert dead_links(PAGES[name]) == []
    assert dead_links(PAGES[name] + "\n[a](nowhere.md)\n[b.py]: ../b.py\n") == ["../b.py", "nowhere.md"]
    used = re.findall(r"[^\n]\[([\w.]+\.(?:py|yaml))\](?!\()", PAGES[name])
    assert set(used) == set(definitions(PAGES[name]))


@both
def test_headings_that_are_linked_are_there(name):
    for file, anchor in re.findall(r"\]\(([\w./]*)#([^)]+)\)", PAGES[name]):
        page = (ROOT / "docs" / file).read_text(encoding="utf-8") if file else PAGES[name]
        assert anchor in headings(page), anchor


def options_of_inspection() -> set[str]:
    (commands,) = (action for action in make_command_parser("inspect")._actions if action.dest == "what")
    return {option for command in commands.choices.values() for option in command._option_string_actions}


@both
def test_options_that_are_named_exist(name):
    own = set(make_parser()._option_string_actions)
    own |= {"--mixed_precision"}  # of accelerate launch
    own |= options_of_inspection()
    named = set(re.findall(r"(?<![\w-])--[a-z_]+", PAGES[name]))
    assert len(named) > 10 and named <= own


# ------------------------------------------------------------------------------------------------- nothing is left out


def rows_under(heading: str, text: str = PAPER) -> list[list[str]]:
    """The cells of the table rows between a heading and the next, without the head of the table."""
    part = re.split(r"(?m)^#+ ", text.partition(f"\n{heading}\n")[2])[0]
    rows = re.findall(r"(?m)^\| *(.*?) *\|$", part)
    return [[cell.strip() for cell in row.split("|")] for row in rows[1:] if set(row) - set("-|")]


def left_out(text: str) -> list[str]:
    """The sections, equations, figures and tables of the paper that have no row in their place."""
    places = {"## Sections": SECTIONS, "## Equations": EQUATIONS, "## Figures": FIGURES, "## Tables": TABLES}
    places |= {"### Table 3, row by row": ROWS_OF_TABLE_3}
    without = []
    for heading, wanted in places.items():
        found = [row[0] for row in rows_under(heading, text)]
        if heading == "## Sections":
            found = [cell.split(" ")[0] for cell in found]
        elif heading.startswith("## "):
            found = [cell.split(", unnumbered")[0] for cell in found]
            found = [cell.split(",")[0] if cell.startswith(("E", "F", "T")) else cell for cell in found]
        without += [item for item in wanted if found.count(item) != 1]
        assert len(found) <= len(wanted)
    return without


def test_every_section_equation_figure_and_table_has_its_row():
    assert left_out(PAPER) == []


def test_what_is_left_out_is_found():
    for row in [
        "| 3.2.1 Scaled",
        "| 7 Conclusion",
        "| Equation 2,",
        "| PE(pos, 2i)",
        "| Figure 5,",
        "| Table 4,",
        "| B |",
    ]:
        lines = [line for line in PAPER.splitlines() if not line.startswith(row)]
        assert len(lines) == len(PAPER.splitlines()) - 1
        assert left_out("\n".join(lines)) != []


@pytest.mark.parametrize("heading", ["## Sections", "## Equations", "## Figures", "## Tables"])
def test_every_row_names_code_or_says_that_there_is_none(heading):
    plain = ("nothing to implement", "not implemented", "not run", "Not reproduced", "see its parts")
    for row in rows_under(heading):
        assert symbols(row[-1]) or any(words in row[-1] for words in plain), row[0]


@pytest.mark.parametrize("part", ["The model", "How it is computed", "Data", "Training", "Translating and scoring"])
def test_differences_have_all_their_cells(part):
    rows = rows_under(f"### {part}")
    assert len(rows) >= 5 and len({len(row) for row in rows}) == 1
    assert all(cell for row in rows for cell in row)


# ------------------------------------------------------------------------------------------------------------ commands


def commands(text: str) -> list[tuple[str, str]]:
    """Each command of the blocks of a console, with what it is said to print."""
    blocks = re.findall(r"(?ms)^```console\n(.*?)^```$", text)
    return [tuple(part.strip().split("\n", 1)) for block in blocks for part in re.split(r"(?m)^\$ ", block)[1:]]


def run(command: str) -> str:
    """What `python -c` or the inspection prints, in this process; with `grep` behind it, the lines that match."""
    command, _, pattern = command.partition(" | grep -E ")
    words = shlex.split(command)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if words[:2] == ["python", "-c"]:
            exec(words[2], {})
        else:
            assert words[:2] == ["vanilla-transformer", "inspect"]
            main(words[1:])
    pattern = shlex.split(pattern)[0] if pattern else ""
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines() if re.search(pattern, line))


RUN = [command for text in PAGES.values() for command in commands(text)]


@pytest.mark.parametrize(("command", "output"), RUN, ids=[command[:50] for command, _ in RUN])
def test_a_command_prints_what_the_page_says(command, output):
    assert run(command) == "\n".join(line.rstrip() for line in output.splitlines())


def test_there_are_commands():
    assert len(RUN) >= 10 and all(output for _, output in RUN)


def test_the_score_that_is_told_is_that_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"(?m)^\| Multi30k, .*$", readme)
    (score,) = re.findall(r"test BLEU ([\d.]+)", PAGES["seeds.md"])
    assert f" {score} " in row
