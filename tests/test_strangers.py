"""A stranger's model: its code does not run without --trust_remote_code, and nobody is asked on stdin."""

import argparse
import json
from pathlib import Path

import pytest
from helpers import command_error

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main
from vanilla_transformer.commands import demo
from vanilla_transformer.errors import UserError

CODE = """
import pathlib
pathlib.Path({canary!r}).touch()
from transformers import PreTrainedTokenizerFast
class Strange(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A file that the stranger's code makes. Whoever is asked a question fails."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on stdin"))
    return tmp_path / "canary"


def plant(folder, canary):
    """Gives a model a tokenizer that needs the code beside it."""
    (folder / "strange.py").write_text(CODE.format(canary=str(canary)))
    path = folder / "tokenizer_config.json"
    theirs = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": [None, "strange.Strange"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | theirs))


@pytest.fixture
def strange(folder, canary) -> Path:
    """The model of a stranger."""
    plant(Path(folder), canary)
    return Path(folder)


VERBS = {
    "translate": ["translate", "--model", "MODEL"],
    "evaluate": ["evaluate", "--model", "MODEL", "--sources", "TEXTS", "--references", "TEXTS"],
    "tune": ["evaluate", "--tune", "--model", "MODEL", "--sources", "TEXTS", "--references", "TEXTS"],
    "attention": ["inspect", "attention", "--model", "MODEL", "--text", "No!", "--output", "OUTPUT.png"],
    "explorer": ["inspect", "explorer", "--model", "MODEL", "--text", "No!", "--output", "OUTPUT.html"],
    "to ctranslate2": ["convert", "MODEL", "OUTPUT", "--to", "ctranslate2"],
    "to onnx": ["convert", "MODEL", "OUTPUT", "--to", "onnx"],
}
BACKENDS = {verb: ["torch", "ctranslate2"] if verb in ("translate", "evaluate", "tune") else [None] for verb in VERBS}


@pytest.mark.parametrize(("verb", "backend"), [(verb, one) for verb in VERBS for one in BACKENDS[verb]])
def test_no_verb_runs_the_code_of_a_tokenizer(verb, backend, strange, canary, tmp_path, capsys):
    for extra in {"ctranslate2", "onnx"} & {backend, verb.removeprefix("to ")}:
        pytest.importorskip(extra)
    (tmp_path / "texts").write_text("No!\n")
    places = {"MODEL": strange, "TEXTS": tmp_path / "texts", "OUTPUT": tmp_path / "out"}
    argv = [str(places.get(word, word)).replace("OUTPUT", str(tmp_path / "out")) for word in VERBS[verb]]
    message = command_error(capsys, *argv, *(["--backend", backend] if backend else []))
    assert "trust_remote_code" in message and not canary.exists()


@pytest.mark.parametrize("to", ["vanilla", "native"])
def test_convert_omits_a_coded_tokenizer(to, strange, canary, tmp_path, capsys):
    main(["convert", str(strange), str(tmp_path / "new"), "--to", to])
    assert "has no tokenizer that can be loaded" in capsys.readouterr().err and not canary.exists()


@pytest.mark.parametrize("backend", ["torch", "ctranslate2"])
def test_the_demo_runs_no_code_of_a_tokenizer(backend, strange, canary):
    if backend == "ctranslate2":
        pytest.importorskip("ctranslate2")
    given = {"model": str(strange), "revision": None, "backend": backend, "quantization": None}
    with pytest.raises(UserError, match="trust_remote_code"):
        demo.load(argparse.Namespace(**given, max_source_length=None))
    assert not canary.exists()


def test_no_code_of_a_converted_model_runs(folder, canary, capsys):
    pytest.importorskip("ctranslate2")
    converted = Translator.from_pretrained(folder, backend="ctranslate2").engine.directory
    plant(converted, canary)
    message = command_error(capsys, "translate", "--model", converted, "--backend", "ctranslate2")
    assert "trust_remote_code" in message and not canary.exists()


def test_code_that_is_trusted_runs(strange, canary):
    found = Translator.from_pretrained(strange, trust_remote_code=True)
    assert canary.exists() and found(["No!"], max_new_tokens=5)
