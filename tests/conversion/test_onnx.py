"""The ONNX files that transformers.js and optimum load: the same translations by onnxruntime, Node and Chromium."""

import json
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from helpers import ROOT, TEXTS, lively_model, writing_translator

pytest.importorskip("onnxruntime")
import onnxruntime  # noqa: E402

from vanilla_transformer.conversion.onnx import to_onnx  # noqa: E402

FORMS = {
    "post-norm": {"norm_first": False},
    "pre-norm, learned": {"position_embedding_type": "learned"},
    "post-norm, rotary": {"position_embedding_type": "rotary", "norm_first": False},
}


def greedy_search(folder, source, mask, start: int, steps: int, suffix: str = "") -> list[list[int]]:
    """As transformers.js searches: one graph, whose cache is empty in the first step."""
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / "onnx" / f"{name}{suffix}.onnx", providers=["CPUExecutionProvider"])
        for name in ("encoder_model", "decoder_model_merged")
    )
    (hidden,) = encoder.run(None, {"input_ids": source, "attention_mask": mask})
    feed = {"encoder_attention_mask": mask, "encoder_hidden_states": hidden}
    for value in decoder.get_inputs():
        if value.name.startswith("past_key_values"):
            feed[value.name] = np.zeros((len(source), value.shape[1], 0, value.shape[3]), dtype=np.float32)
    target = np.full((len(source), 1), start)
    for step in range(steps):
        feed |= {"input_ids": target[:, -1:], "use_cache_branch": np.array([step > 0])}
        logits, *cache = decoder.run(None, feed)
        target = np.concatenate([target, logits[:, -1].argmax(-1)[:, None]], axis=1)
        names = [value.name for value in decoder.get_outputs()[1:]]
        feed |= {name.replace("present", "past_key_values"): new for name, new in zip(names, cache, strict=True)}
    return target.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_greedy_search_by_onnxruntime_equals_generate(form, text_tokenizer, tmp_path):
    model = lively_model(3, **{"vocab_size": len(text_tokenizer), "eos_token_id": None, **FORMS[form]})
    to_onnx(model, text_tokenizer, tmp_path / "out")
    source = torch.randint(3, model.config.vocab_size, (3, 9))
    mask = torch.ones_like(source)
    mask[1, 5:] = 0
    expected = model.generate(source, attention_mask=mask, max_new_tokens=20)
    assert len({tuple(row) for row in expected.tolist()}) > 1
    start = model.config.decoder_start_token_id
    found = greedy_search(tmp_path / "out", source.numpy(), mask.numpy(), start, 20)
    assert found == expected.tolist()

    int8 = greedy_search(tmp_path / "out", source.numpy(), mask.numpy(), start, 3, "_quantized")
    assert np.array(int8).shape == (3, 4)
    files = {path.name: path.stat().st_size for path in (tmp_path / "out" / "onnx").iterdir()}
    assert files["encoder_model_quantized.onnx"] < files["encoder_model.onnx"]


# ----------------------------------------------------------------------------------------------------- transformers.js


@pytest.fixture(scope="module")
def page(text_tokenizer, tmp_path_factory):
    """examples/browser with a model, its translations, and transformers.js from npm."""
    folder = tmp_path_factory.mktemp("page") / "browser"
    shutil.copytree(ROOT / "examples" / "browser", folder)
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    install = ["npm", "install", "--ignore-scripts", "--no-audit", "@huggingface/transformers@4.3.1"]
    subprocess.run(install, cwd=folder, check=True, capture_output=True)
    torch.manual_seed(0)
    translator = writing_translator(text_tokenizer)
    to_onnx(translator.model, text_tokenizer, folder / "model")
    (folder / "expected.json").write_text(json.dumps(translator(TEXTS, max_new_tokens=12)))
    return folder


# Its `max_new_tokens` count the start token.
IN_NODE = """
import { env, pipeline } from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = "./";
const texts = JSON.parse(process.argv[2]);
const translate = await pipeline("translation", "model", { dtype: "fp32" });
const translations = [];
for (const text of texts) translations.push((await translate(text, { max_new_tokens: 13 }))[0].translation_text);
console.log(JSON.stringify(translations));
"""


@pytest.mark.slow
def test_node_translates_as_python(page):
    (page / "translate.mjs").write_text(IN_NODE)
    command = ["node", "translate.mjs", json.dumps(TEXTS)]
    ran = subprocess.run(command, cwd=page, check=True, capture_output=True, encoding="utf-8")
    expected = json.loads((page / "expected.json").read_text())
    assert json.loads(ran.stdout.splitlines()[-1]) == expected and len(set(expected)) > 1


class Handler(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def log_message(self, *args):
        pass


@pytest.fixture
def address(page):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=page))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.mark.slow
def test_the_page_translates_as_python(page, address, browser):
    from selenium.webdriver.support.ui import WebDriverWait

    html = page / "index.html"
    for old, new in [('"q8"', '"fp32"'), ("(form.source.value)", "(form.source.value, { max_new_tokens: 13 })")]:
        assert old in html.read_text()
        html.write_text(html.read_text().replace(old, new))
    browser.get(address)
    source, output = (browser.find_element("id", name) for name in ("source", "translation"))
    button = browser.find_element("tag name", "button")
    WebDriverWait(browser, 60).until(lambda _: button.is_enabled())
    found = []
    for text in TEXTS:
        if not text.isascii():  # chromedriver cannot type all of them
            continue
        browser.execute_script("arguments[0].value = ''", output)
        source.clear()
        source.send_keys(text)
        button.click()
        WebDriverWait(browser, 60).until(lambda _: output.text)
        found.append(output.text)
    expected = json.loads((page / "expected.json").read_text())
    assert found == [new for text, new in zip(TEXTS, expected, strict=True) if text.isascii()]
