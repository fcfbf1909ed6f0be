"""docs/coming_from.md: every option of ours that it names exists, in train.py or in the command of its row."""

import re

from helpers import ROOT
from test_pages import LAUNCHER_OPTIONS

from vanilla_transformer.commands import evaluate, translate
from vanilla_transformer.commands.options import Parser
from vanilla_transformer.training.arguments import make_parser

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")


def options_of(command) -> set[str]:
    parser = Parser(prog="x", epilog="")
    command.add_arguments(parser)
    return set(parser._option_string_actions)


def unknown(text: str) -> list[str]:
    """The options in the right-hand cells of the tables that do not exist."""
    training = set(make_parser()._option_string_actions) | LAUNCHER_OPTIONS
    commands = {"evaluate": options_of(evaluate), "translate": options_of(translate)}
    commands[""] = training
    found = []
    for row in re.findall(r"(?m)^\| .* \| (.*) \|$", text):
        (verb,) = re.findall(r"vanilla-transformer (\w+)", row) or [""]
        found += [name for name in re.findall(r"--[\w-]+", row) if name not in commands[verb]]
    return found


def test_our_options_exist():
    assert PAGE.count("\n| `") > 90 and unknown(PAGE) == []
    for option in set(re.findall(r"--[a-z]\w+_\w+", PAGE)):
        assert unknown(f"| `x` | `{option}x` |") == [f"{option}x"]
