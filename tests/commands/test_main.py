"""The command line as a whole; each verb is tested where its work is."""

import pytest
from helpers import command_error

import vanilla_transformer
from vanilla_transformer.__main__ import VERBS, main


def printed_by(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as ending:
        main([*argv])
    assert ending.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_shows_an_example_of_each_verb(argv, capsys):
    printed = printed_by(capsys, *argv)
    assert all(f"vanilla-transformer {example}" in printed for _, example in VERBS.values())


@pytest.mark.parametrize("argv", [[verb] for verb in VERBS] + [["inspect", what] for what in ("shapes", "align")])
def test_help_of_a_verb_has_an_example(argv, capsys):
    printed = " ".join(printed_by(capsys, *argv, "--help").split())
    assert f"example: vanilla-transformer {' '.join(argv)} " in printed and "default: None" not in printed


def test_version(capsys):
    assert printed_by(capsys, "--version") == f"vanilla-transformer {vanilla_transformer.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["transalte"], "invalid choice: 'transalte' (choose from 'translate', "),
        (["--modle"], "required: verb"),
        (["translate"], "required: --model"),
        (["convert", "x"], "required: OUTPUT_DIR"),
    ],
)
def test_bad_usage_is_one_sentence(argv, message, capsys):
    assert message in command_error(capsys, *argv)
