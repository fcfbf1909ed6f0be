"""A model that a stranger made runs no code, changes no file and reads no foreign memory.

Each case runs `vanilla-transformer translate` in a fork of this process, which has imported everything, with 2 GiB.
"""

import contextlib
import os
import random
import resource
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import TEXTS, save_translator, writing_translator
from huggingface_hub import constants
from mutations import Mutator, update

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.engines import ctranslate2 as engine
from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import load_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")

MEMORY, SECONDS = 2 * 2**30, 60
LINES = b"y\nA dog sleeps.\ny\n"  # `y` agrees to run code, if anything asks


def status(name: str, pid: int | str = "self") -> int:
    """A number of bytes that Linux tells of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def run_translate(argv: list[str], work: Path) -> str | None:
    """Runs `vanilla-transformer translate` in a fork, in the directory `work`; returns how it crashed, if it did."""
    work.mkdir(exist_ok=True)
    (work / "in").write_bytes(LINES)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = run_here(argv, work)
        finally:
            os._exit(code)
    ended = 0
    while not ended and time.monotonic() - start < SECONDS:
        time.sleep(0.005)
        ended, found = os.waitpid(child, os.WNOHANG)
    if not ended:  # whoever loads a slow model may stop
        os.kill(child, 9)
        os.waitpid(child, 0)
        return None
    return f"signal {os.WTERMSIG(found)}" if os.WIFSIGNALED(found) else None


def run_here(argv: list[str], work: Path) -> int:
    """The exit code of the command in this process, whose streams become files in `work`."""
    os.chdir(work)
    new = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    for number, (name, flags) in enumerate([("in", os.O_RDONLY), ("out", new), ("err", new)]):
        os.dup2(os.open(name, flags), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    constants.HF_HOME = str(work / "home")
    limit = status("VmData") + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(BaseException):  # a sentence, or a traceback of a library
        main(["translate", *argv])
    return 0


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A saved model that ends its translations."""
    torch.manual_seed(1)
    tokenizer = train_tokenizer(TEXTS, 300)
    translator = writing_translator(tokenizer, lm_head_bias=True)
    translator.model.lm_head.bias.data[tokenizer.eos_token_id] += 8
    translator.model.generation_config.max_length = 20
    return Path(save_translator(translator, tmp_path_factory.mktemp("original") / "model"))


@pytest.fixture
def model(original, tmp_path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def test_weights_beside_the_model_are_refused(model):
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="has an adapter; merge it into its model, and save that elsewhere"):
        load_model(model)


@pytest.mark.parametrize("key", ["transformers_weights", "attn_implementation"])
def test_a_config_may_not_name_other_weights_or_code(key, model):
    update(model / "config.json", **{key: "other/kernel"})
    with pytest.raises(UserError, match=f"has the `{key}` 'other/kernel', .*; remove it"):
        load_model(model)


@pytest.mark.parametrize(
    "name, value", [("eos_token_id", [2, 10**6]), ("decoder_start_token_id", -1), ("decoder_start_token_id", [[1]])]
)
def test_an_id_outside_the_vocabulary_is_refused(name, value, model):
    """Which training on this model, or with it as a teacher, would meet in an embedding."""
    update(model / "generation_config.json", **{name: value})
    with pytest.raises(
        UserError, match=rf"generation config of .* has {name} .*, but the vocabulary has the tokens 0 to"
    ):
        load_model(model)


def test_a_damaged_generation_config_is_named(model):
    """transformers would search as if there were none."""
    (model / "generation_config.json").write_text('{"num_beams": 5')
    with pytest.raises(UserError, match="generation_config.json is damaged"):
        load_model(model)


# ------------------------------------------------------------------------------------------------------ mutated models


@pytest.fixture(scope="module")
def converted(original, tmp_path_factory) -> Path:
    """The model as CTranslate2 has it."""
    folder, translator = tmp_path_factory.mktemp("converted") / "float32", Translator.from_pretrained(original)
    engine.to_ctranslate2(translator.model, translator.tokenizer, folder)
    return folder


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_a_mutated_model_neither_runs_code_nor_crashes_nor_changes_files(first, original, converted, tmp_path):
    faults, outside = [], tmp_path / "outside"
    shutil.copytree(original, outside / "base")
    (outside / "canary").write_text("alive")
    before = contents(outside)
    for seed in range(first, first + 20):
        generator, folder = random.Random(seed), tmp_path / f"model{seed}"
        shutil.copytree(original, folder)
        backend = generator.choice(["torch"] * 3 + ["ctranslate2"])
        named = folder
        if backend == "ctranslate2" and generator.random() < 0.5:
            named = Path(shutil.copytree(converted, folder / "ctranslate2" / "float32"))
        mutator = Mutator(folder, outside, generator)
        done = [mutator.mutate() for _ in range(generator.choice([1, 1, 2, 3]))]
        fault = run_translate(["--model", str(named), "--backend", backend], tmp_path / "work")
        if (after := contents(outside)) != before:
            fault, before = f"it changed what is outside; {fault}", after
        if fault:
            faults.append(f"{seed} {backend} {done}: {fault}")
        shutil.rmtree(folder)
    assert not faults, "\n\n".join(faults)
