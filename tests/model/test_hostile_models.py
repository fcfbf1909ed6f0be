"""A model that a stranger made: it translates or ends in one sentence, takes no memory, runs no code, changes no file.

Each case runs `vanilla-transformer translate` in a fork of this process, which has imported everything, with 2 GiB.
"""

import json
import os
import random
import re
import resource
import shutil
import sys
import time
import traceback
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import TEXTS, save_translator, writing_translator
from huggingface_hub import constants
from mutations import NESTED, Mutator, read_header, update, write_header
from safetensors.torch import load_file
from transformers import M2M100Config, M2M100ForConditionalGeneration

from vanilla_transformer.__main__ import main
from vanilla_transformer.conversion import load_foreign
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.engines import ctranslate2 as engine
from vanilla_transformer.engines.generate import load_any
from vanilla_transformer.translation_vanilla_transformer import Translator, load_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")

MEMORY, SECONDS = 2 * 2**30, 60
LINES = b"y\nA dog sleeps.\ny\n"  # `y` agrees to run code, if anything asks
WORDS = ("run out of memory", "allocate", "MemoryError", "frame #")


@dataclass
class Outcome:
    """How the command ended."""

    code: int
    output: list[str]
    errors: str
    memory: int  # bytes at the most, beside those of the parent
    seconds: float  # on the processor

    @property
    def fault(self) -> str | None:
        """What is wrong with this end, if anything."""
        last = re.split("[\r\n]+", self.errors.strip())[-1].strip()  # after a progress bar
        if self.code == 0:
            wrong = None if len(self.output) == 3 else f"{len(self.output)} lines for 3"
        else:
            is_sentence = self.code in (1, 2) and last.startswith("vanilla-transformer translate: ")
            wrong = None if is_sentence else f"ended with {self.code}"
        if "Traceback" in self.errors or any(word in self.errors for word in WORDS):
            wrong = "a traceback, or no memory"
        if self.memory > MEMORY / 2:
            wrong = f"took {self.memory / 2**20:.0f} MiB"
        return wrong and f"{wrong}: {self.errors[-600:]}"


def status(name: str, pid: int | str = "self") -> int:
    """A number of bytes that Linux tells of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def run_translate(argv: list[str], work: Path) -> Outcome:
    """Runs `vanilla-transformer translate` in a fork, in the directory `work`."""
    work.mkdir(exist_ok=True)
    (work / "in").write_bytes(LINES)
    before, start = status("VmRSS"), time.monotonic()
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
        ended, found, used = os.wait4(child, os.WNOHANG)
    if not ended:
        os.kill(child, 9)
        _, found, used = os.wait4(child, 0)
    output, errors = ((work / name).read_bytes().decode(errors="replace") for name in ("out", "err"))
    memory = 1024 * used.ru_maxrss - before
    seconds = used.ru_utime + used.ru_stime
    return Outcome(os.waitstatus_to_exitcode(found), output.split("\n")[:-1], errors, memory, seconds)


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
    try:
        main(["translate", *argv])
        code = 0
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        code = 1 if isinstance(ending.code, str) else ending.code or 0
    except BaseException:
        traceback.print_exc()
        code = 98
    sys.stdout.flush()
    sys.stderr.flush()
    return code


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


POSITIONS = {"position_embedding_type": "learned", "max_position_embeddings": 5_000_000}
HUGE = {  # a file, values that are too large in it, and the end of the sentence, or None if it translates
    "config": [
        ({"encoder_layers": 10**6}, "1000000; it must be at least 1 and at most 1,000"),
        ({"decoder_layers": 900}, "`decoder_layers` is 900, but there are .* tensors; download or save it again"),
        ({"d_model": 10**6}, r"do not match its config: 1 mismatched \(such as .*1000000.*download or save it again"),
        ({"d_model": 10**12}, "1000000000000; it must be at least 1 and at most 268,435,456"),
        ({"d_model": 10**30}, "it must be at least 1 and at most 268,435,456"),
        ({"encoder_ffn_dim": 10**8}, r"1 mismatched \(such as .*fc1.*100000000"),
        ({"vocab_size": 10**8, "decoder_vocab_size": 10**8}, r"1 mismatched \(such as .*100000000"),
        ({"max_position_embeddings": 5_000_000}, None),
        ({"num_labels": 10**8}, "`num_labels`.* 100000000"),
        ({"num_hidden_layers": 20_000}, "20000; it must be at least 1 and at most 1,000"),
        (
            {"attn_implementation": "flash_attention_2"},
            "has the `attn_implementation` 'flash_attention_2'",
        ),
        (POSITIONS, "it describes 16.,...,... numbers, but there are at most ..,...; download or save it again"),
    ],
    "generation_config": [
        ({"num_beams": 2_000_000}, "2,000,000 beams .* a vocabulary of ... tokens, at most 1,024 do"),
        ({"max_length": 400_000_000}, None),
        ({"max_length": 400_000_000, "num_beams": 5}, None),
        (
            {"max_length": 400_000_000, "num_beams": 5, "do_sample": True},
            "`max_length` is 400,000,000, which is too long for 5 beams; lower it",
        ),
        ({"encoder_no_repeat_ngram_size": 10**9}, "is 1000000000; it must be at most 1,048,576"),
        ({"cache_implementation": "static"}, "reserves memory up to `max_length`; remove it"),
    ],
}
HUGE = [(file, *case) for file, cases in HUGE.items() for case in cases]


@pytest.mark.parametrize("file, values, end", HUGE, ids=lambda value: str(value)[:40])
def test_what_is_too_large_ends_in_a_sentence_before_memory_is_taken(file, values, end, model, tmp_path):
    update(model / f"{file}.json", **values)
    outcome = run_translate(["--model", str(model)], tmp_path / "work")
    assert outcome.fault is None and outcome.memory < 2**28 and outcome.seconds < 10
    assert re.search(end, outcome.errors) if end else outcome.code == 0, outcome.errors


def test_options_that_are_too_large(model, tmp_path):
    outcome = run_translate(["--model", str(model), "--num_beams", "2000000"], tmp_path / "work")
    assert outcome.fault is None and "2,000,000 beams or samples of a text do not fit into memory" in outcome.errors
    for beams in ("1", "5"):
        long = ["--max_new_tokens", "400000000", "--num_beams", beams]
        outcome = run_translate(["--model", str(model), *long], tmp_path / "work")
        assert outcome.fault is None and outcome.code == 0, outcome


def test_other_families_are_compared_with_their_weights_too(marian, tmp_path):
    folder = shutil.copytree(marian, tmp_path / "marian")
    expected = load_foreign(str(folder)).config
    for name, value in [("encoder_layers", 10**6), ("d_model", 10**6), ("max_position_embeddings", 5_000_000)]:
        update(folder / "config.json", **{name: value})
        with pytest.raises(ValueError, match="do not match its config.*download or save it again"):
            load_foreign(str(folder))
        update(folder / "config.json", **{name: getattr(expected, name)})
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    load_foreign(str(folder))
    update(folder / "config.json", d_model=10**6)
    with pytest.raises(ValueError, match="do not match its config.*numbers.*download or save it again"):
        load_foreign(str(folder))


@pytest.mark.parametrize("load", [load_any, Translator.from_pretrained], ids=["any model", "ours"])
def test_a_config_is_checked_before_the_tokenizer_is_loaded(load, marian, tmp_path):
    """Of which the class depends on the config, so that transformers makes a label of each number."""
    folder = shutil.copytree(marian, tmp_path / "marian")
    update(folder / "config.json", num_labels=2**22)
    update(folder / "tokenizer_config.json", tokenizer_class=None)
    tracemalloc.start()
    with pytest.raises(ValueError, match="has the `num_labels` 4194304"):
        load(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_positions_that_no_file_holds_are_counted_too(tmp_path):
    """M2M100 computes its table when it is loaded."""
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
    M2M100ForConditionalGeneration(M2M100Config(vocab_size=9, **sizes)).save_pretrained(tmp_path)
    load_model(tmp_path)
    for positions in (5_000_000, 100_000_000):
        update(tmp_path / "config.json", max_position_embeddings=positions)
        with pytest.raises(ValueError, match="it describes .* numbers, but there are at most .*; download"):
            load_model(tmp_path)


FIRST = "model.decoder.layers.0.fc1.bias"
LIES = {  # of an entry of the header
    "shape beyond the file": {"shape": [2**40]},
    "shape that overflows": {"shape": [2**40] * 3},
    "end beyond the file": {"data_offsets": [0, 2**50]},
    "unknown dtype": {"dtype": "x"},
}


@pytest.mark.parametrize("kind", [*LIES, "long", "deep", "empty", "cut"])
def test_a_header_that_lies_ends_in_a_sentence(kind, model):
    file = model / "model.safetensors"
    header, data = read_header(file)
    header[FIRST] |= LIES.get(kind, {})
    others = {"long": (header, data, 2**62), "deep": ("[" * 100_000, data), "empty": ({}, b""), "cut": (header, b"")}
    write_header(file, *others.get(kind, (header, data)))
    with pytest.raises(ValueError, match="(is damaged|do not match its config): .*; download"):
        load_model(model)


@pytest.mark.parametrize("name", ["adapter_config.json", "shard-00000-model-00000-of-00001.safetensors"])
def test_weights_beside_the_model_are_refused(name, model):
    (model / name).write_text("{}")
    with pytest.raises(ValueError, match="has an adapter; merge it|has the parts of a distributed checkpoint; save"):
        load_model(model)


def test_a_config_may_not_name_other_weights(model):
    update(model / "config.json", transformers_weights="other.safetensors")
    with pytest.raises(ValueError, match="has the `transformers_weights` 'other.safetensors', .*; remove it"):
        load_model(model)


@pytest.mark.parametrize(
    "name, value", [("eos_token_id", [2, 10**6]), ("decoder_start_token_id", -1), ("decoder_start_token_id", [[1]])]
)
def test_an_id_outside_the_vocabulary_is_refused(name, value, model):
    """Which training on this model, or with it as a teacher, would meet in an embedding."""
    update(model / "generation_config.json", **{name: value})
    with pytest.raises(
        ValueError, match=rf"generation config of .* has {name} .*, but the vocabulary has the tokens 0 to"
    ):
        load_model(model)


# ------------------------------------------------------------------------------------------------------ mutated models

OPTIONS = """num_beams max_length max_new_tokens min_length min_new_tokens num_return_sequences length_penalty
temperature top_k top_p epsilon_cutoff repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
max_time stop_strings prompt_lookup_num_tokens forced_eos_token_id bad_words_ids"""


@pytest.mark.slow
@pytest.mark.parametrize("value", [10**9, 10**30, -1, "x", NESTED], ids=lambda value: str(value)[:12])
def test_any_value_of_any_number_translates_or_ends_in_a_sentence(value, original, model, tmp_path):
    faults = []
    for file, names in [("config.json", []), ("generation_config.json", OPTIONS.split())]:
        saved = json.loads((original / file).read_text()).items()
        numbers = [name for name, old in saved if isinstance(old, int | float) and not isinstance(old, bool)]
        for name in {*numbers, *names}:
            update(model / file, **{name: value})
            if fault := run_translate(["--model", str(model)], tmp_path / "work").fault:
                faults.append(f"{file} {name}: {fault}")
            shutil.copy(original / file, model)
    assert not faults, "\n".join(faults)


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
def test_a_mutated_model_translates_or_ends_in_a_sentence(first, original, converted, tmp_path):
    """And no code runs, and nothing changes outside its directory."""
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
        fault = run_translate(["--model", str(named), "--backend", backend], tmp_path / "work").fault
        if (after := contents(outside)) != before:
            fault, before = f"it changed what is outside; {fault}", after
        if fault:
            faults.append(f"{seed} {backend} {done}: {fault}")
        shutil.rmtree(folder)
    assert not faults, "\n\n".join(faults)
