"""The command line as a whole; each verb is tested where its work is."""

import io
import runpy
import sys

import pytest
from helpers import ROOT, command_error, python_output

import vanilla_transformer
import vanilla_transformer_command as command
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


NO_TORCH = "assert not {'torch', 'transformers', 'vanilla_transformer'} & {*sys.modules}"


@pytest.mark.parametrize("argv", [[], ["--help"], ["--version"], ["translate", "--help"]])
def test_help_and_version_load_no_torch(argv):
    code = f"import sys, vanilla_transformer_command as command\ntry: command.main()\nfinally: {NO_TORCH}"
    assert "vanilla-transformer" in python_output("-c", code, *argv)


def test_help_of_training_loads_no_torch():
    code = f"import runpy, sys\ntry: runpy.run_path('train.py', run_name='__main__')\nfinally: {NO_TORCH}"
    assert "--train_file FILE" in python_output("-c", code, "-h", cwd=ROOT)


def test_kept_help_is_what_the_parsers_print(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(command.COLUMNS))
    texts = runpy.run_path(str(ROOT / "docs" / "make_help.py"))["help_texts"]()
    kept = {path.name: path.read_text(encoding="utf-8") for path in command.HELP.iterdir()}
    assert kept == texts, "run `python docs/make_help.py`"


@pytest.mark.parametrize("change", ["options", "terminal"])
def test_help_that_does_not_fit_is_left_to_the_parser(change, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        command.show_help("translate", ["--help"])
    assert "--model MODEL" in capsys.readouterr().out
    if change == "terminal":
        monkeypatch.setenv("COLUMNS", "60")
    else:
        monkeypatch.setattr(command, "options_digest", lambda: "another")
    command.show_help("translate", ["--help"])
    assert not capsys.readouterr().out


def test_options_of_a_model_have_one_spelling(capsys):
    printed = printed_by(capsys, "inspect", "shapes", "--help")
    assert "--d_model N" in printed and "--d-model" not in printed


def test_version(capsys):
    assert printed_by(capsys, "--version") == f"vanilla-transformer {vanilla_transformer.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["transalte"], "invalid choice: 'transalte' (choose from 'new', "),
        (["--modle"], "required: verb"),
        (["translate"], "required: --model"),
        (["convert", "x"], "required: OUTPUT_DIR"),
    ],
)
def test_bad_usage_is_one_sentence(argv, message, capsys):
    assert message in command_error(capsys, *argv)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_stdout_of_any_encoding_takes_every_letter(encoding, tmp_path, monkeypatch):
    """Those that it lacks are escaped."""
    output, file = io.BytesIO(), tmp_path / "纽约.txt"
    file.write_text("ä", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
    main(["evaluate", "--hypotheses", str(file), "--references", str(file)])
    assert rb"\u7ebd\u7ea6.txt" in output.getvalue()
