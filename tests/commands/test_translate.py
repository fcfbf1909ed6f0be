"""`vanilla-transformer translate`: as many lines out as in, errors in a sentence, streams that end early."""

import io
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from helpers import command_error, never_end, save_translator, translate_by_marian, writing_translator
from huggingface_hub import constants

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main
from vanilla_transformer.commands import translate as translation
from vanilla_transformer.evaluation.mbr import most_similar


def run_main(monkeypatch, data: bytes, *argv, output: io.BytesIO | None = None) -> bytes:
    """What `vanilla-transformer translate` writes for `data`, in this process and a locale that is not UTF-8."""
    output = output or io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="latin-1"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="latin-1", write_through=True))
    main(["translate", *argv])
    sys.stdout.flush()
    return output.getvalue()


def run_in_bash(command: str, folder: str) -> subprocess.CompletedProcess:
    """Runs a command in which TRANSLATE stands for `python -m vanilla_transformer translate --model folder`."""
    command = command.replace("TRANSLATE", f"{sys.executable} -m vanilla_transformer translate --model {folder}")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=300)


LINES = {
    "plain": ("a\nb c\n", "A\nB C\n"),
    "not ended": ("a\nb", "A\nB\n"),
    "empty lines": ("\n\na\n\n", "\n\nA\n\n"),
    "not latin": ("grün\n纽约\n😀\n", "GRÜN\n纽约\n😀\n"),
    "windows": ("\ufeffa\r\nb\r\n", "A\nB\n"),
    "other ends": ("a\u2028b\x0cc\x85d\n", "A\u2028B\x0cC\x85D\n"),
    "carriage return inside": ("a\rb\nc\n", "A\rB\nC\n"),
    "nothing": ("", ""),
    "several portions": ("a\nb\n\nc\nd\n\n\ne", "A\nB\n\nC\nD\n\n\nE\n"),
}


@pytest.mark.parametrize("lines, expected", LINES.values(), ids=LINES)
def test_as_many_lines_come_out_as_went_in(lines, expected, monkeypatch):
    """The stand-in for the model writes capital letters, and line feeds instead of spaces."""

    def upper(texts, progress=None, **generation):
        return [text.upper().replace(" ", "\n") for text in texts]

    monkeypatch.setattr(translation.Translator, "from_pretrained", lambda *_, **__: upper)
    monkeypatch.setattr(translation, "LINES_AT_A_TIME", 3)
    assert run_main(monkeypatch, lines.encode(), "--model", ".").decode() == expected


def test_lines_before_one_that_is_no_text_are_translated(folder, monkeypatch):
    output = io.BytesIO()
    with pytest.raises(SystemExit, match="line 3 is not UTF-8"):
        run_main(monkeypatch, b"A dog sleeps.\nNo!\n\xff\nNo!\n", "--model", folder, output=output)
    assert output.getvalue().count(b"\n") == 2


WRONG = {  # options, or bytes that are read instead of two lines: part of the message
    "--num_beams 0": "0 is not a positive integer",
    "--max_source_length x": "x is not a positive integer",
    "--length_penalty x": "invalid float value: 'x'",
    "--device abacus": "abacus is not a device of this machine: Expected one of cpu, cuda",
    "--device meta": "meta is not a device of this machine",
    "--dtype int8": "invalid choice: 'int8'",
    b"a\n\xff\n": "line 2 is not UTF-8",
    "--max_source_length 5 --too_long refuse": "line 2 has 8 tokens, more than the 5 that are translated in one "
    "piece; shorten it, use --too_long split, or raise --max_source_length",
    "--n_best 3 --max_source_length 5 --too_long refuse": "translated in one piece; shorten it, use",
    "--n_best 3 --num_beams 2": "3 translations of a line need as many beams; raise --num_beams",
    "--mbr 3 --mbr_candidates beams --num_beams 2": "3 translations of a line need as many beams; raise --num_beams",
    "--mbr 3 --num_beams 3": "samples have no beams; leave out --num_beams and --length_penalty, or choose",
    "--mbr 3 --length_penalty 2": "samples have no beams; leave out --num_beams and --length_penalty, or choose",
    "--n_best 2 --length_penalty 1e6": "`length_penalty` is 1000000.0; it must be at least -10 and below 10",
    "--mbr 3 --backend ctranslate2": "--backend ctranslate2 cannot sample; choose --mbr_candidates beams",
    f"--mbr 3 --seed {2**64}": "--seed is 18446744073709551616; it must be at least 0 and below 2^63",
    "--mbr_utility bleu": "--mbr_candidates and --mbr_utility are options of --mbr N; add it, or leave them out",
    "--n_best 3 --mbr 3": "--mbr: not allowed with argument --n_best",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_and_input_are_refused(wrong, folder, monkeypatch, capsys):
    data, options = (wrong, "") if isinstance(wrong, bytes) else (b"a\nabcdefg\n", wrong)
    with pytest.raises(SystemExit) as ending:
        run_main(monkeypatch, data, "--model", folder, *options.split())
    assert WRONG[wrong] in f"{ending.value.code} {capsys.readouterr().err}"


@pytest.mark.slow
def test_a_full_disk_ends_the_command_with_a_sentence(folder):
    result = run_in_bash("echo 'No!' | TRANSLATE > /dev/full", folder)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    message = "cannot read the input or write the output: [Errno 28] No space left on device"
    assert result.stderr.splitlines()[-1].startswith(f"vanilla-transformer translate: {message}")


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_command_in_silence(folder):
    result = run_in_bash("yes 'No!' | head -3 | TRANSLATE | true; echo ${PIPESTATUS[2]}", folder)
    assert result.stdout == "141\n"
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr


def test_what_cannot_be_loaded_is_named(folder, tmp_path, monkeypatch):
    for models in ([f"{tmp_path}/missing"], [folder, f"{tmp_path}/missing"]):
        with pytest.raises(SystemExit, match=f"translate: The directory '{tmp_path}/missing' does not exist"):
            run_main(monkeypatch, b"a\n", "--model", *models)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=f"translate: {tmp_path}/empty is a directory without a config.json"):
        run_main(monkeypatch, b"a\n", "--model", folder, f"{tmp_path}/empty")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OSError) as error:  # of transformers, with its traceback
        run_main(monkeypatch, b"a\n", "--model", str(tmp_path))
    assert error.value.__notes__ == [f"while loading the config of {tmp_path}"]


def test_any_model_of_transformers_translates(marian, monkeypatch):
    found = run_main(monkeypatch, b"he is a teacher\n\n", "--model", str(marian), "--num_beams", "1")
    assert found.decode().split("\n") == [*translate_by_marian(marian, ["he is a teacher"]), "", ""]


@pytest.mark.parametrize("is_offline", [False, True])
@pytest.mark.parametrize("name", ["missing", "outputs/missing"])
def test_a_directory_that_does_not_exist_is_named_at_once_without_a_network(name, is_offline, capsys, monkeypatch):
    """transformers tries for most of a minute, and says that it could not connect."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    start = time.monotonic()
    for command in (["translate", "--model", name], ["convert", name, "new"]):
        message = command_error(capsys, *command)
        assert f"The directory '{name}' does not exist, and the Hub cannot be reached." in message
    assert time.monotonic() - start < 5


def test_a_text_on_the_command_line_is_no_model(folder, capsys):
    message = command_error(capsys, "translate", "--model", folder, "The dog sleeps.")
    assert "--model 'The dog sleeps.' is not a model; give texts on standard input, one per line." in message


def test_lines_are_taken_as_they_arrive():
    """From a pipe, without waiting for more; from a file, as many as are allowed."""
    end, start = os.pipe()
    with open(end, "rb") as stream, open(start, "wb", buffering=0) as writer:
        found = translation.arriving_lines(stream, 3)
        for sent, lines in [(b"a\n", [[b"a"]]), (b"b\nc\nd\ne\nf", [[b"b", b"c", b"d"], [b"e"]]), (b"g\n", [[b"fg"]])]:
            writer.write(sent)
            assert [next(found) for _ in lines] == lines
        writer.write(b"h")
        writer.close()
        assert list(found) == [[b"h"]]


def test_files_are_read_in_large_portions(tmp_path):
    (tmp_path / "lines").write_bytes(b"".join(b"%d\n" % number for number in range(25)))
    with open(tmp_path / "lines", "rb") as stream:
        assert list(map(len, translation.arriving_lines(stream, 10))) == [10, 10, 5]


@pytest.mark.slow
def test_another_program_may_talk_with_the_command(folder):
    command = [sys.executable, "-m", "vanilla_transformer", "translate", "--model", folder, "--max_new_tokens", "5"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as running:
        for line in ("No!", "", "A man"):
            running.stdin.write(line + "\n")
            running.stdin.flush()
            assert bool(running.stdout.readline().strip()) == bool(line)
        running.stdin.close()


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_batch(translator, tmp_path):
    """The batch takes minutes; Ctrl-C comes when it has begun."""
    never_end(translator)
    folder = save_translator(translator, tmp_path / "model")
    minutes = ["--num_beams", "20", "--max_new_tokens", "5000", "--max_tokens", "200"]
    # Only a terminal is shown a bar; a process in the background ignores Ctrl-C.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "sys.stderr.isatty = lambda: True; from vanilla_transformer.__main__ import main; main()"
    command = [sys.executable, "-c", code, "translate", "--model", folder, *minutes]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    running, told = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes), b""
    try:
        running.stdin.write(1000 * b"A dog sleeps.\n")
        running.stdin.close()
        while b"Translating" not in told:
            assert (more := running.stderr.read1()), told  # nothing more: it has ended
            told += more
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=100) == 130
        assert running.stdout.read() == b"" and b"Traceback" not in running.stderr.read()
    finally:
        running.kill()


def test_several_models_are_an_ensemble(folder, translator, tmp_path, monkeypatch):
    other = writing_translator(translator.tokenizer, decoder_layers=1)
    folders = [folder, save_translator(other, tmp_path / "other")]
    ensemble = Translator([translator.model, other.model], translator.tokenizer)
    options = ["--num_beams", "3", "--max_new_tokens", "8", "--max_tokens", "40"]
    found = run_main(monkeypatch, b"No!\nA man\n", "--model", *folders, *options)
    assert found.decode().splitlines() == ensemble(["No!", "A man"], num_beams=3, max_new_tokens=8)


def test_the_n_best_are_written_with_line_number_and_score(folder, translator, monkeypatch):
    monkeypatch.setattr(translation, "LINES_AT_A_TIME", 2)
    found = run_main(monkeypatch, b"No!\n\nA man\n", "--model", folder, "--n_best", "3").decode()
    expected = [(number, one) for number in (1, 3) for one in translator.n_best(["No!", "A man"][number // 2], 3)]
    assert found == "".join(f"{number}\t{one.score:.4f}\t{one.text}\n" for number, one in expected)


@pytest.mark.parametrize("utility", ["chrf", "bleu"])
@pytest.mark.parametrize("candidates", ["samples", "beams"])
def test_mbr_chooses_among_candidates(folder, translator, candidates, utility, monkeypatch, capsys):
    argv = ["--model", folder, "--mbr", "8", "--mbr_candidates", candidates, "--mbr_utility", utility, "--seed", "3"]
    lines = ["No!", "", "A man", "A dog sleeps."]
    found = run_main(monkeypatch, "\n".join(lines).encode(), *argv).decode().splitlines()
    torch.manual_seed(3)
    best = translator.n_best(lines, 8, **translation.SAMPLING if candidates == "samples" else {})
    texts = [[one.text for one in hypotheses] for hypotheses in best]
    assert found == [most_similar(one, utility).replace("\n", " ") for one in texts]
    distinct = sum(len(set(one)) for one in texts) / 3
    assert f"{distinct:.1f} of 8 candidates were distinct on average" in capsys.readouterr().err
    assert found != [one[0] if one else "" for one in texts]


@pytest.mark.slow
def test_closed_streams_are_no_traceback(folder):
    closed = run_in_bash("echo a | TRANSLATE >&-", folder)
    assert closed.returncode == 1 and closed.stderr.endswith("standard output is closed; redirect it to a file.\n")
    empty = run_in_bash("TRANSLATE <&-", folder)
    assert (empty.returncode, empty.stdout) == (0, "")
    silent = run_in_bash("echo a | TRANSLATE 2>&-", folder)
    assert silent.returncode == 0 and silent.stdout.count("\n") == 1


def test_warnings_are_a_line(folder, monkeypatch, capsys):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(Translator, "__call__", lambda *_, **__: warnings.warn("Look out.", stacklevel=2) or ["A"])
    monkeypatch.setattr(warnings, "showwarning", lambda *given, **_: sys.stderr.write(warnings.formatwarning(*given)))
    run_main(monkeypatch, b"a\n", "--model", folder)
    assert "warning: Look out.\n" in capsys.readouterr().err
