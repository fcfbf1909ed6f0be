"""Fixtures that the tests share."""

import gc
import io
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import sentencepiece
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from forked_python import programs
from helpers import TEXTS, read_sample, save_translator, small_model, trained_marian, writing_translator
from huggingface_hub import constants
from transformers import MarianTokenizer

from vanilla_transformer import loss_vanilla_transformer as loss
from vanilla_transformer import modeling_vanilla_transformer as modeling
from vanilla_transformer.data.tokenizer import train_tokenizer

if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores, in the runs that are started too


# These files take minutes, and start first, so that no core is left with one at the end; the longest is the first.
LONG = ["test_walkthrough", "test_benchmarks", "test_faults", "test_resume", "test_several_processes", "test_hub"]
LONG += ["test_students", "test_seeds", "test_training_run", "test_wheel", "test_record"]


def pytest_collection_finish():
    gc.freeze()  # what the libraries made on import, which each collection of a small run would look through again


def pytest_collection_modifyitems(items: list[pytest.Item]):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Scripts that other tests run in this process take all cores, and more threads round differently."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def conversions(tmp_path_factory):
    """Those for CTranslate2 do not pile up in the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def marian_pairs() -> list[tuple[str, str]]:
    """What the [`marian`] model was trained on: a few sentences, every other of them with the language to come."""
    pairs = read_sample(16)
    return [(f">>deu<< {source}" if number % 2 else source, target) for number, (source, target) in enumerate(pairs)]


@pytest.fixture(scope="session")
def marian(marian_pairs, tmp_path_factory) -> Path:
    """A Marian model and its tokenizer as they lie on the Hub: two SentencePiece models and one vocabulary."""
    folder = tmp_path_factory.mktemp("marian")
    types = ["</s>", "<unk>"]
    for side, texts in zip(("source", "target"), zip(*read_sample(400), strict=True), strict=True):
        file = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=200, bos_id=-1, minloglevel=2
        )
        (folder / f"{side}.spm").write_bytes(file.getvalue())
        pieces = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
        types += [pieces.id_to_piece(number) for number in range(pieces.get_piece_size())]
    types = [*dict.fromkeys(types), ">>deu<<", ">>fra<<", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(types)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "mul"}))
    trained_marian(MarianTokenizer.from_pretrained(folder), marian_pairs).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def make_model():
    """make_model(**config) -> a small random model in evaluation mode."""
    return small_model


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The model and its loss read no value of a tensor."""
    for module in (loss, modeling):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)


SIZES = [("cpu", 1), ("cpu", 100), ("cpu", 2**22), ("gpu", 100), ("gpu", 2**22)]
SIZE_NAMES = ["row by row", "in chunks of 2", "in one chunk", "in chunks of 2 on a GPU", "in one chunk on a GPU"]


@pytest.fixture(params=SIZES, ids=SIZE_NAMES)
def chunks(request, monkeypatch):
    """The loss for a vocabulary of 37 is computed in chunks of so many target tokens."""
    device, size = request.param
    if device == "gpu":
        request.getfixturevalue("as_on_a_gpu")
    monkeypatch.setattr(loss, "LOGITS_PER_CHUNK", size)
    monkeypatch.setattr(loss, "LOGITS_PER_CHUNK_OF_GPU", size)
    monkeypatch.setattr(loss, "ROWS_PER_CHUNK", 1)
    monkeypatch.setattr(loss, "LOGITS_PER_SOFTMAX", size // 2)


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def half(monkeypatch):
    """Accelerate with float16 and its scaler, which it has on a GPU only."""
    accelerator = Accelerator(cpu=True)
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
    monkeypatch.setattr(accelerator, "native_amp", True)
    monkeypatch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-8))
    return accelerator


@pytest.fixture(scope="session")
def byte_tokenizer():
    return train_tokenizer(["a dog"], 260)


@pytest.fixture(scope="session")
def text_tokenizer():
    """Of the texts that translators are tested with."""
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def translator(text_tokenizer):
    return writing_translator(text_tokenizer)


@pytest.fixture
def folder(translator, tmp_path) -> str:
    """The [`translator`], saved."""
    translator.model.generation_config.max_length = 20
    return save_translator(translator, tmp_path / "model")


@pytest.fixture
def varied_translator(text_tokenizer):
    """Writes translations of different lengths, so that beams and length penalty matter."""
    torch.manual_seed(1)
    translator = writing_translator(text_tokenizer, lm_head_bias=True)
    translator.model.lm_head.bias.data[text_tokenizer.eos_token_id] += 2.5
    translator.model.generation_config.max_length = 14
    return translator


@pytest.fixture(scope="module")
def forked_python(tmp_path_factory):
    """A `python` that has imported the libraries: on the CPU, without the Hub, with its own cache of datasets."""
    folder = tmp_path_factory.mktemp("forked")
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "ACCELERATE_USE_CPU": "true"}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with programs(folder, os.environ | environment, python="") as path:
        yield path / "python"


@pytest.fixture
def open_browser():
    """open_browser() -> a headless Chromium, closed after the test; .ci/run installs one."""
    webdriver = pytest.importorskip("selenium.webdriver")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("there is no chromium with its chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    running = []

    def open_browser():
        running.append(webdriver.Chrome(options, webdriver.ChromeService(driver)))
        return running[-1]

    yield open_browser
    for browser in running:
        browser.quit()


@pytest.fixture
def browser(open_browser):
    return open_browser()
