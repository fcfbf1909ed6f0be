"""One trained model, wherever it runs: the same translations, and how fast (docs/deployment.md).

    SAMPLE_MODEL=outputs/sample pytest -m slow tests/end_to_end/test_deployment.py -s -n 0

prints the table of that page for this machine, with one thread in Python. SAMPLE_MODEL is what
`accelerate launch train.py` wrote.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from sacrebleu import corpus_bleu
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main
from vanilla_transformer.sentences_vanilla_transformer import SOURCE_KINDS

MODEL = os.environ.get("SAMPLE_MODEL")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL, reason="SAMPLE_MODEL names no trained sample model")]

ROWS = map(json.loads, (ROOT / "sample_dataset" / "test.jsonl").read_text(encoding="utf-8").splitlines())
TEXTS, REFERENCES = zip(*((row["en"], row["de"]) for row in ROWS), strict=True)
ALONE = TEXTS[:50]  # translated one at a time
SEARCHES = {"greedy": {"num_beams": 1}, "5 beams": {"num_beams": 5, "early_stopping": True}}
TRANSFORMERS_JS = "@huggingface/transformers@4.3.1"


@pytest.fixture(scope="module")
def speeds():
    """{engine: {column: sentences/s}}, printed at the end as the table of docs/deployment.md."""
    found, columns = {}, [*SEARCHES, "one at a time"]
    yield found
    print(f"\n\n| sentences/s | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for engine, row in found.items():
        cells = (f"{row[column]:.0f}" if column in row else "" for column in columns)
        print(f"| {engine} | {' | '.join(cells)} |")


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    """A copy, beside which conversions may be written."""
    folder = tmp_path_factory.mktemp("outputs") / "sample"
    return Path(shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("checkpoint-*", "ctranslate2")))


@pytest.fixture(scope="module")
def ours(sample) -> Translator:
    return Translator.from_pretrained(str(sample), device="cpu")


def timed(translate: Callable[[list[str]], list[str]], texts: list[str]) -> tuple[list[str], float]:
    """The translations, and sentences/s."""
    start = time.perf_counter()
    translations = translate(texts)
    return translations, len(texts) / (time.perf_counter() - start)


def measure(translate: Callable, row: dict[str, float]) -> dict[str, list[str]]:
    """The translations of all texts by each search; their speeds are added to `row`."""
    translate(TEXTS[:8])
    found = {}
    for name, search in SEARCHES.items():
        found[name], row[name] = timed(partial(translate, **search), TEXTS)
    alone, row["one at a time"] = timed(lambda texts: [translate([text], num_beams=1)[0] for text in texts], ALONE)
    assert alone == found["greedy"][: len(ALONE)]
    return found


@pytest.fixture(scope="module")
def expected(ours, speeds) -> dict[str, list[str]]:
    """By this package, in torch."""
    found = measure(ours, speeds.setdefault("this package", {}))
    assert corpus_bleu(found["greedy"], [REFERENCES]).score > 90
    return found


def test_transformers_alone_translates_the_same(sample, expected, speeds):
    folder = sample.with_name("native")
    main(["convert", str(sample), str(folder), "--to", "native"])
    tokenizer, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForSeq2SeqLM))
    assert type(model).__module__.startswith("transformers.models.")

    def translate(texts, **search):
        translations = []
        for start in range(0, len(texts), 100):
            inputs = tokenizer(list(texts[start : start + 100]), padding=True, return_tensors="pt")
            translations += tokenizer.batch_decode(model.generate(**inputs, **search), skip_special_tokens=True)
        return translations

    assert measure(translate, speeds.setdefault("transformers alone", {})) == expected


def test_ctranslate2_translates_the_same(sample, ours, expected, speeds):
    pytest.importorskip("ctranslate2")
    load = partial(Translator.from_pretrained, str(sample), backend="ctranslate2", device="cpu")
    theirs = load()
    assert measure(theirs, speeds.setdefault("CTranslate2, float32", {})) == expected
    for text in TEXTS[:100]:
        (best,), (our_best,) = (one.n_best(text, n=1, num_beams=5) for one in (theirs, ours))
        assert best.text == our_best.text and best.score == pytest.approx(our_best.score, abs=1e-5)

    cpu = torch.cpu.get_capabilities()
    exact = cpu.get("avx512_vnni") or cpu.get("avx_vnni")  # else oneDNN's sums of 8-bit products may overflow
    for name, translations in measure(load(quantization="int8"), speeds.setdefault("CTranslate2, int8", {})).items():
        bleu = [corpus_bleu(one, [REFERENCES]).score for one in (translations, expected[name])]
        assert bleu[0] == pytest.approx(bleu[1], abs=0.3 if exact else 0.6), name


# ---------------------------------------------------------------------------------------------------- transformers.js


@pytest.fixture(scope="module")
def site(sample) -> Path:
    """examples/browser as its README builds it, and the script for Node of docs/deployment.md."""
    pytest.importorskip("onnxruntime")
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    folder = Path(shutil.copytree(ROOT / "examples" / "browser", sample.with_name("browser")))
    install = ["npm", "install", "--ignore-scripts", "--no-audit", TRANSFORMERS_JS]
    subprocess.run(install, cwd=folder, check=True, capture_output=True)
    main(["convert", str(sample), str(folder / "model"), "--to", "onnx"])
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"(?ms)^```js\n(.*?)^```$", page)
    (folder / "translate.mjs").write_text(script, encoding="utf-8")
    return folder


def test_node_translates_the_same(site, expected, speeds):
    node = subprocess.Popen(
        ["node", "translate.mjs"], cwd=site, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )

    def translate(texts):
        translations = []
        for text in texts:
            print(text, file=node.stdin, flush=True)
            translations.append(node.stdout.readline().rstrip("\n"))
        return translations

    with node:
        translate(TEXTS[:1])
        found, speed = timed(translate, ALONE)
        node.stdin.close()
    assert found == expected["greedy"][: len(ALONE)]
    speeds["Node"] = {"one at a time": speed}


# What a visitor does, in the page itself: writes a text, presses the button and waits for the translation.
PRESS = """
const [text, done] = arguments, output = document.querySelector("output");
document.querySelector("textarea").value = text;
output.value = "";
new MutationObserver((_, observer) => {
  if (output.value) { observer.disconnect(); done(output.value); }
}).observe(output, { childList: true, characterData: true, subtree: true });
document.querySelector("button").click();
"""


def test_the_page_translates_the_same(site, address, browser, ours, expected, speeds):
    from selenium.webdriver.support.ui import WebDriverWait

    html = site / "index.html"
    text = html.read_text(encoding="utf-8")
    assert '"q8"' in text
    html.write_text(text.replace('"q8"', '"fp32"'), encoding="utf-8")
    noted = site / "model" / "tokenizer_config.json"
    notes = {"source_tags": ["<de>"], **dict.fromkeys(SOURCE_KINDS, False)}
    noted.write_text(json.dumps(json.loads(noted.read_text()) | notes))
    tagged = AutoTokenizer.from_pretrained(noted.parent)
    browser.set_script_timeout(60)
    browser.get(address)
    button = browser.find_element("tag name", "button")
    WebDriverWait(browser, 60).until(lambda _: button.is_enabled())
    browser.execute_async_script(PRESS, TEXTS[0])
    found, speed = timed(lambda texts: [browser.execute_async_script(PRESS, text) for text in texts], ALONE)
    assert found == expected["greedy"][: len(ALONE)]
    # Sentences, lines, a piece without words, a tag that each piece repeats, other cases, and a list.
    ours = Translator(ours.engine, tagged)
    changes = [str, str.upper, str.title, str.lower, lambda text: text.replace(".", " ."), '- "{}"'.format]
    for several in ("{} {}\n\n  {}", "<de> {} {}\n\n  {}", "{}\n3.14 www.example.org\n{} 12!"):
        for change in changes:
            typed = several.format(*map(change, ALONE[:3]))
            assert browser.execute_async_script(PRESS, typed) == ours([typed], num_beams=1)[0]
    speeds["Chromium"] = {"one at a time": speed}
