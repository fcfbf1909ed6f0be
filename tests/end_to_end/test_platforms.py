"""What machines differ in: the encoding of stdout."""

import pytest
from helpers import ROOT, python_output
from runs import options, write_pairs

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
