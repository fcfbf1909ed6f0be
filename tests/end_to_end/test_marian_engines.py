"""The engines of Marian translate as the model does: Bergamot in Node and in a page, Marian itself if it is installed.

`pymarian`, a package of 600 MB, is none of the extras.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from runs import train
from sacrebleu import corpus_bleu
from test_deployment import PRESS, REFERENCES, TEXTS

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main

pytestmark = pytest.mark.slow
BERGAMOT = "@browsermt/bergamot-translator@0.4.9"
SHORT = "--max_steps 200 --warmup_steps 20 --eval_steps 200 --max_eval_samples 8 --max_predict_samples 8"
SHORT += " --joined_pairs 0"  # so that single sentences are learned sooner
FORMS = {"float32": [], "int8": ["--quantization", "int8"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The sample recipe for less than half of its steps, so that translations are sentences."""
    folder = tmp_path_factory.mktemp("model") / "sample"
    form = "--tokenizer_type unigram --position_embedding_type marian"
    recipe = f"--config {ROOT / 'recipes' / 'sample.yaml'} --dataset_name {ROOT / 'sample_dataset'}"
    train(f"{recipe} {form} {SHORT} --output_dir {folder}".split())
    return folder


@pytest.fixture(scope="module")
def expected(model) -> list[str]:
    translations = Translator.from_pretrained(model, device="cpu")(list(TEXTS), num_beams=1)
    assert len(set(translations)) > 400
    return translations


@pytest.fixture(scope="module", params=FORMS)
def site(request, model, tmp_path_factory) -> Path:
    """examples/offline as its README builds it."""
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("site") / "offline"
    shutil.copytree(ROOT / "examples" / "offline", folder, ignore=shutil.ignore_patterns("node_modules", "model"))
    install = ["npm", "install", "--ignore-scripts", "--no-audit", BERGAMOT]
    subprocess.run(install, cwd=folder, check=True, capture_output=True)
    main(["convert", str(model), str(folder / "model"), "--to", "marian-bin", *FORMS[request.param]])
    return folder


def assert_same(translations: list[str], expected: list[str], site: Path):
    if "int8shiftAll" not in (site / "model" / "config.yml").read_text():
        assert translations == expected
        return
    scores = [corpus_bleu(texts, [REFERENCES[: len(texts)]]).score for texts in (translations, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=0.3)


def test_bergamot_translates_the_same_in_node(site, expected):
    command = ["node", "translate.cjs", "1"]
    done = subprocess.run(command, cwd=site, input="\n".join(TEXTS), encoding="utf-8", capture_output=True, check=True)
    assert_same(done.stdout.splitlines(), expected, site)


def test_the_page_translates_several_sentences_beams_and_tags(site, address, expected, browser):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.set_script_timeout(60)
    browser.get(address)
    button = browser.find_element("tag name", "button")

    def await_model():
        WebDriverWait(browser, 60).until(lambda _: button.is_enabled())

    def press(text: str, html: bool = False) -> str:
        browser.execute_script("document.querySelector('#html').checked = arguments[0]", html)
        return browser.execute_async_script(PRESS, text)

    await_model()
    tagged = press(f"<p>{TEXTS[0]}</p> <b>{TEXTS[1]}</b>", html=True)
    assert re.fullmatch("<p>.*</p> <b>.*</b>", tagged)
    assert "Aborted" in press("<b>a < b", html=True)
    await_model()
    assert press(TEXTS[0])
    browser.execute_script("const { beams } = document.querySelector('form'); beams.value = 1; beams.onchange()")
    await_model()
    paragraphs = press(f"{TEXTS[0]} {TEXTS[1]}\n\n{TEXTS[2]}")
    assert_same(re.split(r"(?<=[.?!])\s+", paragraphs), expected[:3], site)


MARIAN = """
import pymarian, sys
translator = pymarian.Translator(config=sys.argv[1])
for line in sys.stdin:
    print(translator.translate(line.rstrip("\\n")))
"""


def test_marian_itself_translates_the_same(model, expected, tmp_path):
    """With the options in config.yml. An error would end its process, so it has one of its own."""
    pytest.importorskip("pymarian")
    main(["convert", str(model), str(tmp_path / "marian"), "--to", "marian-bin"])
    command = [sys.executable, "-c", MARIAN, str(tmp_path / "marian" / "config.yml")]
    done = subprocess.run(command, input="\n".join(TEXTS), encoding="utf-8", stdout=subprocess.PIPE, check=True)
    assert done.stdout.splitlines() == expected
