"""A Translator that has translated goes on in processes that are forked from its own, and in others by pickle."""

import os
import re
import signal
import subprocess
import sys

import pytest
from helpers import ROOT, python_output, save_translator, writing_translator

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

# Each script has `translator` and `texts`, of which some are a batch large enough for two threads.
BEGINNING = """
import os, socket, sys
import torch
from transformers import pipeline
from vanilla_transformer import Translator

folder, kind = sys.argv[1:]
if kind == "pipeline":
    made = pipeline("vanilla-translation", model=folder, trust_remote_code=True, max_new_tokens=5)
    translator = lambda texts: [found["translation_text"] for found in made(texts)]
else:
    translator = Translator.from_pretrained(folder, backend=kind, device="cpu")
    translator.engine.generation_config.max_length = 6
    if kind == "ctranslate2":
        translator.engine.saved_options["max_length"] = 6
texts = [f"A dog sleeps, {number}." for number in range(80)]

def translate(batch):
    return {"translation": translator(batch["text"])}

if __name__ == "__main__":
    assert torch.get_num_threads() == 2 or kind == "ctranslate2"  # which sets it to 1
    expected = translator(texts)
"""
WAYS = (
    # As gunicorn --preload: workers are forked and end as programs do, by the end of the interpreter.
    """
    for served in (True, False):
        ours, theirs = socket.socketpair()
        if not (child := os.fork()):
            if served:
                theirs.sendall("\\n".join(translator(texts)).encode())
            theirs.close()
            sys.exit(0)
        theirs.close()
        answer = b"".join(iter(lambda: ours.recv(2**16), b"")).decode()
        assert answer == ("\\n".join(expected) if served else ""), answer
        assert os.waitpid(child, 0)[1] == 0
    assert translator(texts) == expected
    """,
    """
    from datasets import Dataset
    found = Dataset.from_dict({"text": texts}).map(translate, batched=True, batch_size=40, num_proc=2)
    assert found["translation"][:] == expected
    """,
    """
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(translator, [texts, texts]) == [expected, expected]
        assert pool.apply(torch.get_num_threads) == (1 if kind == "ctranslate2" else 2)
    """,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "ctranslate2", "pipeline"])
def test_a_translator_goes_on_in_another_process(kind, text_tokenizer, tmp_path):
    if kind == "ctranslate2":
        pytest.importorskip("ctranslate2")
    folder = save_translator(writing_translator(text_tokenizer, d_model=64), tmp_path / "model")
    script = tmp_path / "a.py"
    script.write_text(BEGINNING + "".join(WAYS[:2] if kind == "pipeline" else WAYS))
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home")}
    options = {"env": environment, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, script, folder, kind], **options) as process:
        try:
            errors = process.communicate(timeout=300)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"It hangs: {process.communicate()[1]}")
    assert process.returncode == 0, errors


@pytest.mark.slow
def test_a_pipeline_returns_from_mlflow(translator, tmp_path):
    pytest.importorskip("mlflow")
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8").partition("### MLflow\n")[2]
    code = "\n".join(re.findall(r"(?m)^    (.*)$", page)[:6])
    save_translator(translator, tmp_path / "outputs" / "sample")
    (expected,) = translator(["The dog sleeps."])
    assert python_output("-c", code, cwd=tmp_path).rstrip().endswith(f"{[{'translation_text': expected}]}")
