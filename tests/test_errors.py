"""What is printed is text, whatever control characters it comes with."""

import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from helpers import ROOT, command_error, data_options, panics
from runs import MODEL
from tqdm import tqdm

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main
from vanilla_transformer.data.splits import load_pairs
from vanilla_transformer.errors import UserError, escape_output, one_line, printable
from vanilla_transformer.training.processes import exit_on_error

NASTY = "\x1b]0;owned\x07\x1b[2J\x9b\u202e"
SPELLED = r"\x1b]0;owned\x07\x1b[2J\x9b\u202e"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@contextmanager
def escaped():
    """stdout and stderr as escaped files; afterwards, the list that this returns has what was printed to them."""
    files, printed = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)], []
    with redirect_stdout(files[0]), redirect_stderr(files[1]):
        escape_output()
        yield printed
    printed += [file.buffer.getvalue().decode() for file in files]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (NASTY, SPELLED),
        ("a\r\0\x0b\x7f\x85\u2028\u2029\u2066\u2069b", r"a\r\x00\x0b\x7f\x85\u2028\u2029\u2066\u2069b"),
        ("line\n\tä 纽约 😀 \u200d\u200f \\x1b", None),  # joiners and marks belong to texts
    ],
)
def test_control_characters_are_spelled_out(text, shown):
    assert printable(text) == (shown or text)


def test_all_that_is_printed_is_escaped():
    """Also by libraries that took the stream before, and once only."""
    with escaped() as printed:
        escape_output()
        sys.stderr.writelines([NASTY])
        logging.StreamHandler(sys.stderr).emit(logging.makeLogRecord({"msg": NASTY}))
        for stream in (sys.stdout, sys.stderr):
            print(f"ä\r{NASTY}", file=stream)
    line = rf"ä\r{SPELLED}" + "\n"
    assert printed[0] == line and printed[1].count(SPELLED) == 3 and printed[1].endswith(line)
    assert not CONTROLS.search("".join(printed))


def bars(file):
    """What two bars, one below the other, and a line above them write."""
    with tqdm(total=2, desc="Training", file=file, ascii=True, mininterval=0, bar_format="{desc} {n}") as outer:
        for _ in tqdm(range(2), "Translating", file=file, mininterval=0, leave=False, bar_format="{desc} {n}"):
            outer.update()
        tqdm.write("done", file=file)


def test_progress_bars_move_as_before():
    plain = io.StringIO()
    bars(plain)
    with escaped() as printed:
        bars(sys.stderr)
    assert "\x1b[A" in plain.getvalue() and printed[1] == plain.getvalue()


def hostile_dataset(folder):
    """Two text columns; their names, the name of the file and the texts have control characters."""
    file = folder / f"{NASTY}.jsonl"
    rows = [{f"{NASTY}\nen": f"a dog {NASTY} {n}", "de": f"ein Hund {NASTY}"} for n in range(200)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_reports_and_errors_on_a_hostile_dataset_are_text(tmp_path):
    file = hostile_dataset(tmp_path)
    with escaped() as printed:
        load_pairs(data_options(train_file=[file]))
        with pytest.raises(UserError) as error:
            load_pairs(data_options(train_file=[file], source_lang="fr", target_lang="de"))
        print(one_line(error.value), file=sys.stderr)
    assert not CONTROLS.search(re.sub("\r", "", "".join(printed)))
    shown = rf"translating from column '{SPELLED}\nen' to column 'de' of {tmp_path}/{SPELLED}.jsonl"
    assert shown in printed[0].splitlines()
    assert f"the columns of {tmp_path}/{SPELLED}.jsonl are {SPELLED} en, de" in printed[1].splitlines()[-1]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_stdout_is_data_unless_it_is_a_terminal(is_terminal, tmp_path, monkeypatch):
    """What another program reads of a command is as it is; a table is text everywhere."""
    (tmp_path / f"{NASTY}.txt").write_text("a")
    end, start = os.openpty() if is_terminal else os.pipe()
    with open(start, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        names = ["--hypotheses", f"{tmp_path}/{NASTY}.txt", "--references", f"{tmp_path}/{NASTY}.txt"]
        main(["evaluate", *names, "--paired", "none"])
        print(f"{NASTY}the end")
    printed = b""
    while b"the end" not in printed:
        printed += os.read(end, 10_000)
    table, _, rest = printed.decode().partition("chrF2: ")
    assert SPELLED in table and not CONTROLS.search(table.replace("\r\n", "\n"))
    assert (SPELLED if is_terminal else NASTY) in rest


@pytest.mark.slow
def test_a_run_on_a_hostile_dataset_prints_and_writes_text(tmp_path):
    options = f"{MODEL} --max_steps 2 --warmup_steps 1 --max_eval_samples 3 --max_predict_samples 3"
    folder, file = tmp_path / f"{NASTY}\nmodel", str(hostile_dataset(tmp_path))
    command = [sys.executable, ROOT / "train.py", *options.split(), "--output_dir", folder, "--train_file", file]
    env = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*command, "--test_file", file], capture_output=True, encoding="utf-8", env=env)
    assert done.returncode == 0 and f"a dog {SPELLED}" in done.stderr + done.stdout, done.stderr
    card = (folder / "README.md").read_text(encoding="utf-8")
    for text in (done.stdout, done.stderr, card):
        assert not CONTROLS.search(re.sub(r"\r|\x1b\[A", "", text))


# ------------------------------------------------------------------------------------ models that libraries fail with


@pytest.mark.parametrize("value", ["2", ["2"], {}])
@pytest.mark.parametrize("name", ["min_length", "no_repeat_ngram_size", "forced_eos_token_id"])
def test_a_damaged_generation_config_is_one_sentence(name, value, folder, tmp_path, capsys):
    file, text = Path(folder) / "generation_config.json", tmp_path / "text.txt"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    text.write_text("A dog sleeps.\n")
    files = ["--sources", text, "--references", text]
    assert folder in command_error(capsys, "evaluate", "--model", folder, *files)
    draw = ["inspect", "attention", "--model", folder, "--text", "A dog.", "--output", tmp_path / "a.png"]
    reason = "cannot be loaded: " if name.endswith("token_id") else "attention failed: "
    assert reason in command_error(capsys, *draw)


def test_a_tokenizer_that_panics_ends_a_command_in_a_sentence(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(panics(folder).encode())))
    message = command_error(capsys, "translate", "--model", folder)
    assert "translate: A library written in Rust, such as tokenizers, failed: Onig: " in message


def test_a_tokenizer_that_panics_ends_a_run_in_a_sentence(folder, capsys):
    text = panics(folder)
    with pytest.raises(SystemExit) as ending, exit_on_error():
        list(Translator.from_pretrained(folder)([text]))
    assert ending.value.code == 2
    assert capsys.readouterr().err.startswith("train.py: error: A library written in Rust, such as tokenizers, failed")


# ------------------------------------------------------------------------------------------- mistakes of a programmer

MISTAKES = {  # file, a line of it, the line with a mistake, the programs that run it
    "wrong unpacking": (
        "modeling_vanilla_transformer.py",
        "self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0",
        "self.embed_scale, _ = math.sqrt(config.d_model), 1.0, 1.0",
        ["train", "translate", "evaluate"],
    ),
    "wrong slice": (
        "decoding_vanilla_transformer.py",
        "hidden = outputs.last_hidden_state[:, -1:]",
        "hidden = outputs.last_hidden_state[:, -1:, 0, 0]",
        ["train", "translate", "evaluate"],
    ),
    "wrong name": (
        "loss_vanilla_transformer.py",
        "predicted = logits.softmax(dim=1)",
        "predicted = logit.softmax(dim=1)",
        ["train"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_model_is_shown_where_it_is(mistake, folder, forked_python, tmp_path):
    name, right, wrong, programs = MISTAKES[mistake]
    shutil.copytree(ROOT / "vanilla_transformer", tmp_path / "vanilla_transformer")
    shutil.copy(ROOT / "train.py", tmp_path)
    file = tmp_path / "vanilla_transformer" / name
    before, after = file.read_text(encoding="utf-8").split(right)
    file.write_text(before + wrong + after, encoding="utf-8")
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"A dog {n}\tEin Hund\n" for n in range(9)), encoding="utf-8")
    small = f"{MODEL} --max_steps 1 --warmup_steps 1 --output_dir {tmp_path}/new --train_file {texts}"
    commands = {
        "train": ["train.py", *small.split()],
        "translate": ["-m", "vanilla_transformer", "translate", "--model", folder],
        "evaluate": ["-m", "vanilla_transformer", "evaluate", "--model", folder, "--sources", texts]
        + ["--references", texts],
    }
    env = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    for program in programs:
        command = [forked_python, *map(str, commands[program])]
        done = subprocess.run(command, cwd=tmp_path, env=env, input="A dog", capture_output=True, encoding="utf-8")
        assert done.returncode and f'{name}", line {before.count(chr(10)) + 1}, in' in done.stderr, done.stderr


def test_the_cause_of_a_sentence_is_shown_if_asked(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{")
    assert "cannot be loaded" in command_error(capsys, "translate", "--model", tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("VANILLA_TRANSFORMER_TRACEBACK", "1")
    command_error(capsys, "translate", "--model", tmp_path)
    assert re.search(r"(?s)JSONDecodeError.*Traceback.*UserError", capsys.readouterr().err)
