"""The user's mistakes are one sentence, and a programmer's a traceback."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT
from runs import MODEL

from vanilla_transformer.__main__ import main
from vanilla_transformer.errors import UserError, noting


def test_an_unexpected_exception_is_noted_and_a_sentence_is_not():
    with pytest.raises(KeyError) as unexpected, noting("while reading a file"):
        raise KeyError("x")
    with pytest.raises(UserError) as sentence, noting("while reading a file"):
        raise UserError("a sentence.")
    assert unexpected.value.__notes__ == ["while reading a file"] and not hasattr(sentence.value, "__notes__")


@pytest.mark.parametrize("name", ["min_length", "no_repeat_ngram_size"])
def test_a_damaged_generation_config_names_the_model(name, folder, tmp_path):
    file, text = Path(folder) / "generation_config.json", tmp_path / "text.txt"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: {}}))
    text.write_text("A dog sleeps.\n")
    with pytest.raises(Exception) as error:
        main(["evaluate", "--model", folder, "--sources", str(text), "--references", str(text)])
    assert f"while {folder} translates" in error.value.__notes__


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
        "train": f"train.py {small}",
        "translate": f"-m vanilla_transformer translate --model {folder}",
        "evaluate": f"-m vanilla_transformer evaluate --model {folder} --sources {texts} --references {texts}",
    }
    env = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    for program in programs:
        command = [forked_python, *commands[program].split()]
        done = subprocess.run(command, cwd=tmp_path, env=env, input="A dog", capture_output=True, encoding="utf-8")
        assert done.returncode and f'{name}", line {before.count(chr(10)) + 1}, in' in done.stderr, done.stderr
