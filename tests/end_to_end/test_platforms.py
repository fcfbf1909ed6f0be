"""What machines differ in: the encoding of stdout, the umask."""

import os

import pytest
from helpers import ROOT, python_output
from runs import options, train, write_pairs

from vanilla_transformer.__main__ import main

NAME, ESCAPED = "纽约", r"\u7ebd\u7ea6"  # in neither encoding


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_stdout_of_any_encoding_takes_every_letter(encoding, tmp_path):
    """It escapes those that it lacks."""

    def printed(*command) -> str:
        return python_output(*command, env={"PYTHONIOENCODING": encoding}, cwd=tmp_path)

    rows, folder = [{"en": text, "de": NAME} for text in "abcdefgh"], tmp_path / NAME
    pairs = write_pairs(tmp_path / "pairs", train=rows, validation=rows[:2])
    argv = options(pairs, folder, "--max_steps 2 --eval_steps 2")
    assert f"reference    {ESCAPED}\n" in printed(ROOT / "train.py", *argv)
    (folder / f"{NAME}.py").write_text("")  # one more file to publish
    assert f"  {ESCAPED}.py\n" in printed(ROOT / "push_to_hub.py", folder, "--dry_run")
    inspect = ["-m", "vanilla_transformer", "inspect", "attention", "--output", "attention.svg"]
    assert f"{ESCAPED}\n" == printed(*inspect, "--model", folder, "--text", "a", "--translation", NAME)


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_the_umask_decides_who_may_read_a_model(umask, pairs, tmp_path):
    """Weights and checkpoints of a run, and what they are converted to."""
    train(options(pairs, tmp_path / "model", "--max_steps 4 --ema_decay 0.9"))
    for form in ("vanilla", "native"):
        main(["convert", str(tmp_path / "model"), str(tmp_path / form), "--to", form])
    written = [path for path in tmp_path.glob("*/**/*") if path.name != ".lock"]
    assert sum(path.suffix == ".safetensors" for path in written) == 6
    modes = {str(path): path.stat().st_mode & 0o777 for path in written}
    assert modes == {str(path): (0o777 if path.is_dir() else 0o666) & ~umask for path in written}
