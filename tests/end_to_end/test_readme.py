"""The README's commands, from top to bottom, as typed: in a copy of the repository, with an environment of its own."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT

from vanilla_transformer.loading import load_tokenizer

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Commands are indented by four spaces; what they print is in blocks of text.
BLOCKS = re.findall(r"(?m)(?:^    .*\n)+|^```python\n(?:.*\n)*?```$", README)
PAIRS = 400  # a reader's own; the README says nothing of their number
TIMING = re.compile(r"accelerate launch train.py --train_file")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """What git would clone, and two text files of a reader."""
    folder = tmp_path_factory.mktemp("clone") / "vanilla-transformer"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    with open(ROOT / "sample_dataset" / "train.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(next(lines)) for _ in range(PAIRS)]
    (folder / "new.en").write_text("".join(f"{row['en']}\n" for row in rows), encoding="utf-8")
    for language in ("en", "de"):
        (folder / f"train.{language}").write_text("".join(f"{row[language]}\n" for row in rows), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_every_command_runs_in_the_order_of_the_page(copy):
    script = ["set -e"]
    for block in BLOCKS:
        if block.startswith("```python"):
            code = block.removeprefix("```python\n").removesuffix("```")
            (copy / f"block_{len(script)}.py").write_text(code, encoding="utf-8")
            script.append(f"python block_{len(script)}.py")
        else:
            script.append(re.sub(r"(?m)^    ", "", block))
    text = "\n".join(script)
    assert text.count("accelerate launch train.py") == 2 and "convert outputs/mine" in text
    # Packages come from uv's cache; the reader's model need not be good.
    text = text.replace("pip install", "uv pip install")
    text = TIMING.sub(lambda found: found[0].replace("train.py", "train.py --max_steps 30"), text)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-c", text], cwd=copy, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True
    )
    (shown,) = re.findall(r"(?ms)^```text\n(.*?)^```$", README)
    assert shown.splitlines()[-1] in done.stdout and shown.splitlines()[2] in done.stdout
    (printed,) = re.findall(r"(?m)^# (\[.*\])$", README)
    assert printed in done.stdout
    assert len((copy / "translated.de").read_text(encoding="utf-8").splitlines()) == PAIRS
    results = json.loads((copy / "outputs" / "sample" / "all_results.json").read_text(encoding="utf-8"))
    assert results["test_bleu"] >= 95, results
    assert (copy / "examples" / "browser" / "model" / "onnx").is_dir()
    assert len(load_tokenizer(str(copy / "outputs" / "mine"))) > 300
