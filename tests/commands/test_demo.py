"""The web page: what it computes, how it is served, and how it works in a browser."""

import argparse
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from html import unescape
from http.client import HTTPConnection, HTTPResponse
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest
import torch
from helpers import ROOT, TEXTS, command_error, never_end, save_translator, writing_translator
from transformers import T5Config, T5ForConditionalGeneration

from vanilla_transformer import Translator
from vanilla_transformer.commands import demo
from vanilla_transformer.inspection.alignment import align_words
from vanilla_transformer.inspection.attention import attention_maps
from vanilla_transformer.translation_vanilla_transformer import Hypothesis

pytestmark = pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="needs the extra [demo]")
EXAMPLES = [
    {"source": TEXTS[1], "reference": "Ja.", "translation": "Nein."},
    {"source": TEXTS[0], "reference": "Ja.", "translation": "Ja."},
]
backends = pytest.mark.parametrize("backend", ["torch", "ctranslate2"])
LIMIT = 20  # tokens of a text


@pytest.fixture(scope="module")
def folder(text_tokenizer, tmp_path_factory) -> str:
    """A random model that writes letters, with examples."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "letters"
    translator = writing_translator(text_tokenizer, max_position_embeddings=100)
    translator.model.generation_config.update(max_length=12)
    save_translator(translator, folder)
    results = {"examples": EXAMPLES, "source_lang": "en", "target_lang": "xx"}
    (folder / "all_results.json").write_text(json.dumps(results))
    return str(folder)


def load(folder, **options):
    """What the command loads."""
    defaults = {"revision": None, "backend": "torch", "quantization": None, "max_source_length": LIMIT}
    return demo.load(argparse.Namespace(model=folder, **defaults | options))


def test_a_model_whose_attention_cannot_be_shown_is_served_without(text_tokenizer, tmp_path):
    config = T5Config(vocab_size=len(text_tokenizer), d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    translator, shown = load(save_translator(Translator(model.eval(), text_tokenizer), tmp_path / "t5"))
    assert translator.engine.config.model_type == "t5" and shown is None


@pytest.fixture(scope="module")
def make_page(folder):
    """make_page(backend) -> the page without its server."""
    from vanilla_transformer.demo.app import Page

    return lambda backend="torch": Page(*load(folder, backend=backend))


@pytest.fixture(scope="module")
def page(make_page):
    return make_page()


@contextmanager
def served(folder, **options):
    """A client of the page, which a thread serves."""
    import gradio_client

    from vanilla_transformer.demo.app import launch, make_app

    app = launch(make_app(folder, *load(folder, **options), None), server_name="127.0.0.1")
    try:
        yield gradio_client.Client(app.local_url, verbose=False)
    finally:
        app.close(verbose=False)


def cells(table: str) -> list[str]:
    return [unescape(cell) for cell in re.findall("<td>(.*?)</td>", table)]


# ---------------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("num_beams", [2, 7])
def test_translation_table_and_speed_are_those_of_the_translator(page, num_beams):
    from vanilla_transformer.demo.app import draw_table

    (found,) = list(page.translate(TEXTS[1], num_beams, 0.6))
    best = page.translator.n_best(TEXTS[1], min(5, num_beams), num_beams=num_beams, length_penalty=0.6)
    text, speed, table, shown = found
    assert text == best[0].text == page.translator([TEXTS[1]], num_beams=num_beams, length_penalty=0.6)[0]
    assert cells(table) == [cell for one in best for cell in (f"{one.score:.3f}", one.text)]
    assert "<td>&lt;b&gt;</td>" in draw_table([best[0]._replace(text="<b>")])
    assert speed.startswith(f"{best[0].tokens} tokens in ") and shown == (TEXTS[1], text)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_sentences_are_translated_and_shown_one_by_one(page, num_beams, monkeypatch):
    monkeypatch.setattr(page.translator.segmenter, "max_sentences", 1)
    text = f"  {TEXTS[1]} {TEXTS[0]}\n\n{TEXTS[2]}"
    *_, (translation, _, table, shown) = page.translate(text, num_beams, 1.0)
    single = page.translator([TEXTS[1], TEXTS[0], TEXTS[2]], num_beams=num_beams, length_penalty=1.0)
    assert translation == f"  {single[0]} {single[1]}\n\n{single[2]}"
    assert table.count("<table>") == 3 and set(single) <= set(cells(table)) and shown == (TEXTS[1], single[0])


@backends
def test_with_one_beam_the_translation_is_shown_as_it_is_written(make_page, backend):
    pytest.importorskip(backend)
    page = make_page(backend)
    written = [update[0] for update in page.translate(TEXTS[1], 1, 1.0)]
    assert len(written) > 1 and written[-1] == page.translator([TEXTS[1]], num_beams=1)[0]
    assert all(after.startswith(before) for before, after in pairwise(written))
    parts = []
    streamer = SimpleNamespace(put=lambda tokens: parts.append(tokens.flatten().tolist()), end=lambda: None)
    page.search(TEXTS[1], 1, 1.0, streamer)
    tokens = [token for part in parts for token in part]
    assert len(parts) > 5 and page.translator.tokenizer.decode(tokens, skip_special_tokens=True) == written[-1]


@backends
def test_alignment_and_attention_are_those_of_the_model(make_page, folder, backend):
    pytest.importorskip(backend)
    page = make_page(backend)
    text, translation = "A dog <sleeps> & Yes.", "Two children"
    alignment, figure = page.inspect((text, translation), "cross", 1, 0)
    maps = attention_maps(Translator.from_pretrained(folder).model, page.translator.tokenizer, text, translation)
    links = [
        [(float(place) - 13) / 26 for place in re.search(r'y1="(\d+)".*?y2="(\d+)"', line).groups()]
        for line in re.findall("<line.*?>", alignment)
    ]
    assert links == [list(link) for link in align_words(maps)]
    words = [unescape(word) for word in re.findall("<text.*?>(.*?)</text>", alignment)]
    assert words == f"{text} {translation}".split()
    (image,) = figure.axes[0].get_images()
    torch.testing.assert_close(torch.tensor(image.get_array().data), maps.cross[1, 0])
    assert len(page.inspect((text, translation), "encoder", 0, -1)[1].axes) == 4 + 1  # a panel a head, a color bar
    assert len(page.inspect((translation * 8, translation), "encoder", 0, -1)[1].axes) == 1 + 1  # of a long text
    assert page.inspect(("", ""), "cross", 0, 0) == ("", None)


@pytest.mark.parametrize(("too_long", "opened"), [(False, TEXTS[0]), (True, None)])
def test_the_page_opens_with_an_example_that_was_right(folder, page, monkeypatch, too_long, opened):
    from vanilla_transformer.demo.app import read_results

    monkeypatch.setattr(page.translator.segmenter, "longest", 1 if too_long else LIMIT)
    _, examples = read_results(folder, None)
    first = page.translated(examples, 4, 1.0)
    assert first["source"] == opened
    boxes = [first[name] for name in ("target", "table", "alignment", "picture")]
    assert boxes == [None] * 4 if too_long else all(boxes)
    assert first["shown"] == ("", "") if too_long else (TEXTS[0], page.translator([TEXTS[0]], num_beams=4)[0])
    empty = page.translated([], 4, 1.0)  # a model that train.py did not make
    assert empty["source"] is None and empty["speed"].startswith("Up to ")


def test_the_calls_on_the_deployment_page_work(folder, page, capsys):
    section = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8").partition("\n### The page over HTTP\n")[2]
    with served(folder) as client:
        section = section.partition("\n## ")[0].replace("http://127.0.0.1:7860", client.src.rstrip("/"))
        shell = "\n".join(re.findall(r"(?m)^    ((?:call|event|curl).*)$", section))
        answer = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, timeout=60).stdout
        translation = page.translator(["The dog sleeps."], num_beams=4)[0]
        assert json.loads(re.search("event: complete\ndata: (.*)", answer)[1])[0] == translation
        exec("\n".join(re.findall(r"(?m)^    ((?:from|client|print|translation).*)$", section)), {})
        assert capsys.readouterr().out.strip().endswith(translation)


def test_a_converted_model_alone_has_no_attention(folder, tmp_path):
    backend = pytest.importorskip("vanilla_transformer.engines.ctranslate2")
    translator = Translator.from_pretrained(folder)
    backend.to_ctranslate2(translator.model, translator.tokenizer, tmp_path / "converted")
    with served(str(tmp_path / "converted"), backend="ctranslate2") as client:
        assert client.predict(TEXTS[0], 2, 1, api_name="/translate")[0] == translator([TEXTS[0]], num_beams=2)[0]


# ----------------------------------------------------------------------------------------------------- what it refuses


def test_visitors_see_sentences_and_neither_paths_nor_traces(folder, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError(f"out of memory in {__file__}")

    with served(folder) as client:
        monkeypatch.setattr(Translator, "n_best_of_pieces", fail)
        with pytest.raises(Exception) as error:
            client.predict("Yes.", 4, 1, api_name="/translate")
        assert not re.search(r"memory|[/\\]\w+[/\\]|Traceback", str(error.value))
        for part in ("", "config"):
            shown = urlopen(client.src + part).read().decode()
            assert "letters" in shown and str(Path(folder).parent) not in shown


def test_damaged_results_of_a_model_are_one_sentence(folder, tmp_path, capsys):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(folder) / name)
    for damaged in ("{", "[" * 100_000, "[]", '{"examples": 5}', '{"examples": [5]}', '{"examples": [{}]}'):
        (tmp_path / "all_results.json").write_text(damaged)
        assert f"all_results.json of {tmp_path} cannot be read: " in command_error(capsys, "demo", "--model", tmp_path)


def test_names_of_languages_are_text_on_the_page(folder, tmp_path):
    """Not Markdown or HTML, which could load something from elsewhere."""
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    languages = {"source_lang": "![x](http://x/y.png) <img src=http://x/z.png>", "target_lang": "[Log in](http://x)"}
    (copy / "all_results.json").write_text(json.dumps(languages))
    with served(copy) as client:
        shown = [part["props"]["value"] for part in client.config["components"] if "→" in str(part["props"])]
        assert len(shown) == 1 and client.config["components"][0]["type"] != "markdown"
        assert "<img" not in shown[0] and "&lt;img" in shown[0]


# --------------------------------------------------------------------------------------- what visitors are kept within


@pytest.fixture(scope="module")
def address(folder) -> str:
    """Of the served page, without http://."""
    with served(folder) as client:
        yield urlsplit(client.src).netloc


def ask(address: str, method: str, path: str, body=None, **headers) -> HTTPResponse:
    """The answer to one request; its `text` is the body."""
    connection = HTTPConnection(address, timeout=30)
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    answer.text = answer.read().decode()
    connection.close()
    return answer


def call(address: str, *data) -> str:
    """The events that answer a call of the API."""
    started = ask(address, "POST", "/gradio_api/call/translate", json.dumps({"data": data}))
    assert started.status == 200, started.text
    return ask(address, "GET", f"/gradio_api/call/translate/{json.loads(started.text)['event_id']}").text


FILE = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\ntext\r\n--x--\r\n'


def test_no_route_takes_serves_or_fetches_files(address, folder):
    """By Gradio's own settings."""
    form = "multipart/form-data; boundary=x"
    for path in ("upload", "upload?upload_id=1", "component_server", "process_recording", "%75pload"):
        assert ask(address, "POST", f"/gradio_api/{path}", FILE, Content_Type=form).status == 413
    for path in (f"file={folder}/config.json", f"file={ROOT}/README.md", "file=README.md", "file=http://127.0.0.1:1/"):
        assert ask(address, "GET", f"/gradio_api/{path}").status == 403
    assert ask(address, "GET", "/gradio_api/proxy=https://x/").status == 400


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["a" * 50_000, 2, 1], "The text has 50,000 characters; shorten it."),
        (["Yes. " * 12, 2, 1], f"more than the {LIMIT} that are translated at a time; shorten it."),
        (["Yes. " * 12, 1, 1], f"more than the {LIMIT} that are translated at a time; shorten it."),
        (["a \udcff", 2, 1], "contains a lone surrogate"),
        ([None, 2, 1], "Type a text first."),
        ([" \n", 1, 1], "Type a text first."),
        (["Yes.", 0, 1], "less than minimum"),
        (["Yes.", 1e9, 1], "greater than maximum"),
        (["Yes.", float("nan"), 1], "Choose a number of beams"),
        (["Yes.", "2", 1], ""),
        (["Yes.", 2, -1], "less than minimum"),
        (["Yes.", 2, float("inf")], "greater than maximum"),
        (["Yes.", 2, float("nan")], "`length_penalty` is nan"),
    ],
)
def test_the_api_has_the_limits_of_the_page(address, data, message):
    answer = call(address, *data)
    assert "event: error" in answer and message in answer and "Traceback" not in answer


def test_the_api_waits_in_the_queue_and_the_queue_ends(address, monkeypatch):
    from vanilla_transformer.demo.app import MOST_WAITING

    may_end, best = threading.Event(), [[Hypothesis("Ja.", 0.0, 1)]]
    monkeypatch.setattr(Translator, "n_best_of_pieces", lambda *_, **__: may_end.wait(30) and best)
    try:
        body = json.dumps({"data": ["Yes.", 2, 1]})
        assert ask(address, "POST", "/gradio_api/run/translate", body).status == 404  # which would not wait
        answers = [ask(address, "POST", "/gradio_api/call/translate", body) for _ in range(MOST_WAITING + 3)]
        assert [answer.status for answer in answers[:MOST_WAITING]] == [200] * MOST_WAITING
        assert answers[-1].status == 503 and "Queue is full" in answers[-1].text
    finally:
        may_end.set()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_translation_ends_when_its_time_is_over(page, num_beams, monkeypatch):
    from vanilla_transformer.demo import app

    whole = list(page.translate(TEXTS[1], num_beams, 1.0))[-1]
    monkeypatch.setattr(app, "MOST_SECONDS", 1e-9)
    part = list(page.translate(TEXTS[1], num_beams, 1.0))[-1]
    assert whole[0].startswith(part[0]) and 1 <= len(part[0]) < len(whole[0])
    assert "Stopped after" in part[1] and "Stopped after" not in whole[1]


def test_all_batches_of_a_request_end_in_time(translator, tmp_path, monkeypatch):
    from vanilla_transformer.demo import app

    never_end(translator)
    translator.model.generation_config.max_length = 10**6
    page = app.Page(*load(save_translator(translator, tmp_path / "model")))
    page.translator.max_tokens = 1  # one line a batch
    monkeypatch.setattr(app, "MOST_SECONDS", 1)
    start = time.monotonic()
    shown = list(page.translate("\n".join(f"No {number}!" for number in range(20)), 4, 1.0))[-1]
    assert "Stopped after 1 s" in shown[1] and len(shown[0].split("\n")) == 20 and time.monotonic() - start < 10


def test_with_ctranslate2_a_translation_ends_at_a_length(translator, tmp_path):
    pytest.importorskip("ctranslate2")
    from vanilla_transformer.demo.app import Page

    never_end(translator)
    source = len(translator.tokenizer(TEXTS[0]).input_ids)
    for max_length, tokens in [(8000, 2 * source + 50), (None, source + 50), (12, 11)]:
        translator.model.generation_config.max_length = max_length
        folder = save_translator(translator, tmp_path / str(max_length))
        page = Page(*load(folder, backend="ctranslate2"))
        for num_beams in (1, 4):
            assert list(page.translate(TEXTS[0], num_beams, 1.0))[-1][1].startswith(f"{tokens} tokens in ")


# --------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--port TAKEN", "cannot serve on 127.0.0.1:TAKEN; choose another --host or --port"),
        ("--port 80000", "cannot serve on 127.0.0.1:80000; choose another --host or --port"),
        ("--host 192.0.2.1", "cannot serve on 192.0.2.1; choose another --host or --port"),
        ("--max_source_length 0", "0 is not a positive integer"),
        ("--quantization int8", "needs `backend='ctranslate2'`"),
    ],
)
def test_bad_options_are_one_sentence(folder, options, message, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options, message = (text.replace("TAKEN", str(taken.getsockname()[1])) for text in (options, message))
        assert message in command_error(capsys, "demo", "--model", folder, *options.split())


def test_a_model_without_tokenizer_is_one_sentence(make_model, tmp_path, capsys):
    make_model().save_pretrained(tmp_path)
    assert "has no tokenizer; save it there with" in command_error(capsys, "demo", "--model", tmp_path)


def test_a_missing_extra_is_named(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "vanilla_transformer.demo.app", raising=False)
    error = command_error(capsys, "demo", "--model", folder)
    assert "the demo needs `pip install gradio`: " in error


# Tells on stderr what is looked up or connected to elsewhere.
WATCHED = """
import sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        place = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        if not any(here in str(place) for here in ("127.0.0.1", "localhost", "::1", "/")):
            print("NETWORK", event, place, file=sys.stderr, flush=True)
sys.addaudithook(watch)
from vanilla_transformer.__main__ import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def process(folder, tmp_path_factory):
    """The command in a process: its address, the process, and the file with its errors."""
    errors = tmp_path_factory.mktemp("process") / "stderr"
    command = [sys.executable, "-c", WATCHED, "demo", "--model", folder, "--max_source_length", str(LIMIT)]
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}  # where nothing listens
    with errors.open("w") as stderr:
        streams = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        running = subprocess.Popen(command, **streams, cwd=ROOT, env=os.environ | proxies)
    try:
        line = running.stdout.readline()
        assert line, errors.read_text()
        yield re.search(r"http://[\d.:]+", line)[0], running, errors
    finally:
        running.kill()
        running.wait()


@pytest.mark.slow
def test_it_listens_on_loopback_alone_and_needs_no_network(process):
    _, running, errors = process
    connections = psutil.Process(running.pid).net_connections()
    assert {one.laddr.ip for one in connections if one.status == "LISTEN"} == {"127.0.0.1"}
    assert "NETWORK" not in errors.read_text()


# -------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture
def visit(process, open_browser):
    """visit(width) -> a browser with the page."""

    def visit(width=1200):
        browser = open_browser()
        # A window is at least 500 wide.
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(process[0])
        wait(browser, "#source textarea")
        return browser

    return visit


def wait(browser, selector, condition=lambda element: True):
    """The first element of a CSS selector, once there is one that meets the condition."""
    from selenium.common import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def found(browser):
        element = browser.find_element(By.CSS_SELECTOR, selector)
        return element if condition(element) else False

    ignored = (NoSuchElementException, StaleElementReferenceException)
    return WebDriverWait(browser, 30, ignored_exceptions=ignored).until(found)


def wait_for_translation(browser, text: str):
    wait(browser, "#translation textarea", lambda box: box.get_attribute("value") == text)


def enter(browser, text: str):
    """Replaces the text."""
    box = wait(browser, "#source textarea", lambda box: box.get_attribute("value"))  # once it shows the example
    box.clear()
    box.send_keys(text)


def picture(browser, before="") -> str:
    """The address of the picture, once it is another one."""
    image = wait(browser, "#attention img", lambda image: image.get_attribute("src") not in ("", before))
    return image.get_attribute("src")


@pytest.mark.slow
def test_the_keyboard_is_enough(visit, page):
    """Typing, translating, the sliders and the choice of a head, without a mouse."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser = visit()

    def press(*keys):
        for key in keys:
            ActionChains(browser).send_keys(key).perform()

    wait_for_translation(browser, page.translator([TEXTS[0]], num_beams=4)[0])  # that of the example
    first = picture(browser)
    enter(browser, TEXTS[1])
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    wait_for_translation(browser, page.translator([TEXTS[1]], num_beams=4)[0])
    wait(browser, "#n_best tr:nth-child(5)")  # a header and four translations
    wait(browser, "#alignment svg line")
    first = picture(browser, first)

    def focus(matches):
        """Presses Tab until an element that matches has the focus."""
        for _ in range(40):
            if browser.switch_to.active_element.get_attribute("outerHTML").find(matches) >= 0:
                return
            press(Keys.TAB)
        raise AssertionError(f"Tab does not reach {matches}")

    focus('type="range"')
    press(*[Keys.ARROW_LEFT] * 3)
    wait(browser, "#source textarea").click()
    focus('id="translate"')
    press(Keys.ENTER)
    wait_for_translation(browser, page.translator([TEXTS[1]], num_beams=1)[0])
    wait(browser, "#n_best table", lambda table: len(table.find_elements(By.TAG_NAME, "tr")) == 2)
    focus('aria-label="Head"')
    press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    assert picture(browser, first) != first
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.slow
def test_two_visitors_at_once_see_their_own(visit, page):
    visitors = [visit(), visit()]
    first = picture(visitors[0])
    for browser, text in zip(visitors, TEXTS[1:], strict=False):
        enter(browser, text)
    for browser in visitors:
        wait(browser, "#translate").click()
    for browser, text in zip(visitors, TEXTS[1:], strict=False):
        wait_for_translation(browser, page.translator([text], num_beams=4)[0])
        start = "".join(text.split())
        wait(browser, "#alignment svg", lambda words: words.get_attribute("textContent").startswith(start))  # noqa: B023
    assert picture(visitors[0], first) != picture(visitors[1], first)


@pytest.mark.slow
@pytest.mark.parametrize("text", [TEXTS[1], " "])
def test_the_old_alignment_is_dim_until_there_is_a_new_one(visit, page, text):
    """Or until the text is refused."""
    browser = visit()
    old = picture(browser)
    enter(browser, text)
    browser.execute_script("""window.seen = [];
    const plot = document.querySelector("#attention"), container = document.querySelector(".gradio-container");
    new MutationObserver(() => seen.push([container.matches(".outdated"), plot.querySelector("img").src])).observe(
      container, {attributes: true, attributeFilter: ["class"]});""")
    wait(browser, "#translate").click()
    wait(browser, "body", lambda body: len(browser.execute_script("return seen")) >= 2)
    (is_dim, shown), (is_dim_later, shown_later) = browser.execute_script("return seen")
    assert (is_dim, shown, is_dim_later) == (True, old, False)
    assert (shown_later == old) == (not text.strip())


@pytest.mark.slow
def test_everything_fits_on_a_telephone_and_is_loaded_from_loopback(visit, page):
    browser = visit(390)
    wait_for_translation(browser, page.translator([TEXTS[0]], num_beams=4)[0])
    wait(browser, "#examples :is(button, [role=button]):nth-of-type(2)").click()
    wait_for_translation(browser, page.translator([TEXTS[1]], num_beams=4)[0])
    wait(browser, "#alignment svg line")
    picture(browser)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded and all(url.startswith(("http://127.0.0.1:", "data:", "blob:")) for url in loaded)
