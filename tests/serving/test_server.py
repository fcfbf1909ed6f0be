"""The HTTP server: what it answers, whom it refuses, and how it ends."""

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode

import pytest
import torch
from helpers import ROOT, TEXTS, command_error, save_translator, small_nllb, writing_translator
from transformers import T5Config, T5ForConditionalGeneration

from vanilla_transformer import Translator
from vanilla_transformer.commands.convert import convert
from vanilla_transformer.errors import UserError
from vanilla_transformer.serving.batching import CHARACTERS_AT_A_TIME, Batcher, Job
from vanilla_transformer.serving.models import Direction, load_models

pytestmark = pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="needs the extra [serve]")
JSON, FORM, MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
PART = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'  # of MULTIPART
LIMIT = 200  # characters


def save_letters(tokenizer, folder: Path, source: str, target: str, seed: int = 0) -> str:
    """A random model that writes letters, with the languages that train.py would note."""
    torch.manual_seed(seed)
    translator = writing_translator(tokenizer, max_position_embeddings=100)
    translator.model.generation_config.update(max_length=12)
    save_translator(translator, folder)
    (folder / "all_results.json").write_text(json.dumps({"source_lang": source, "target_lang": target}))
    return str(folder)


@pytest.fixture(scope="module")
def letters(text_tokenizer, tmp_path_factory) -> dict[str, str]:
    """The folders of three models."""
    folder = tmp_path_factory.mktemp("models")
    pairs = [("en", "de"), ("french", "deu_Latn"), ("en_US", "fr")]
    return {
        f"{source}-{target}": save_letters(text_tokenizer, folder / source / target, source, target, number)
        for number, (source, target) in enumerate(pairs)
    }


@pytest.fixture(scope="module")
def translators(letters) -> list[Translator]:
    return list(map(Translator.from_pretrained, letters.values()))


APPS = {}  # of servers, by address


@contextlib.contextmanager
def serving(models, generation=None, **limits):
    """The address of a server in a thread."""
    import uvicorn

    from vanilla_transformer.serving.app import create_app

    app = create_app(*models, generation=generation, **limits)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        until(lambda: server.started or not thread.is_alive())  # transformers loads in one thread at a time
        try:
            APPS[address := f"127.0.0.1:{listening.getsockname()[1]}"] = app
            yield address
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def address(letters):
    with serving(letters.values(), char_limit=LIMIT, queue_limit=60) as address:
        yield address


def ask(address: str, path: str = "/translate", body=None, kind: str = JSON, method: str = "POST") -> HTTPResponse:
    """The answer to one request; its `json` is the parsed body."""
    if isinstance(body, dict):
        body = json.dumps(body) if kind == JSON else urlencode(body, doseq=True)
    connection = HTTPConnection(address, timeout=60)
    connection.request(method, path, body, {"Content-Type": kind})
    answer = connection.getresponse()
    answer.json = json.loads(answer.read())
    connection.close()
    return answer


def query(q, source="en", target="de", **fields) -> dict:
    return {"q": q, "source": source, "target": target, **fields}


def translated(address: str, *arguments, kind: str = JSON, **fields):
    answer = ask(address, body=query(*arguments, **fields), kind=kind)
    assert answer.status == 200, answer.json
    return answer.json


@contextlib.contextmanager
def held(monkeypatch):
    """Translations wait for the end of the context. Yields the lists of texts that are translated, as they begin."""
    go_on, begun, translate = threading.Event(), [], Direction.translate

    def wait(self, texts, *arguments):
        begun.append(texts)
        assert go_on.wait(30)
        return translate(self, texts, *arguments)

    monkeypatch.setattr(Direction, "translate", wait)
    try:
        yield begun
    finally:
        go_on.set()


def until_waiting(address: str, count: int):
    """Until so many requests wait for the end of a batch."""
    until(lambda: len(APPS[address].state.batcher.waiting) == count)


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ----------------------------------------------------------------------------------------------------- what it answers


def test_a_client_of_libretranslate_gets_translations_and_languages(address, translators):
    libretranslatepy = pytest.importorskip("libretranslatepy")
    client = libretranslatepy.LibreTranslateAPI(f"http://{address}")
    assert [client.translate(text, "en", "de") for text in TEXTS] == translators[0](TEXTS)
    assert client.languages() == [
        {"code": "de", "name": "German", "targets": []},
        {"code": "en", "name": "English", "targets": ["de", "fr"]},
        {"code": "fr", "name": "French", "targets": ["de"]},
    ]
    with pytest.raises(HTTPError, match="400"):
        client.translate("Yes.", "en", "es")
    assert ask(address, "/health", method="GET").json == {"status": "ok"}


def test_fifty_callers_at_once_get_their_own_translations(address, translators, monkeypatch):
    texts = [f"{text} {number}" for number in range(10) for text in TEXTS[:5]]
    with ThreadPoolExecutor(50) as callers, held(monkeypatch) as begun:
        first = callers.submit(translated, address, texts[0])
        until(lambda: begun)
        others = [callers.submit(translated, address, text) for text in texts[1:]]
        until_waiting(address, 49)
        assert begun == [texts[:1]]
    found = [caller.result()["translatedText"] for caller in (first, *others)]
    assert found == translators[0](texts)
    assert [len(texts) for texts in begun] == [1, 49]  # those that arrived meanwhile, together


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (JSON + "; charset=utf-8", json.dumps(query(TEXTS[4]), ensure_ascii=False).encode()),
        (JSON, json.dumps(query(TEXTS[4], format="text", alternatives=0, api_key=None, secret="x"))),
        (FORM, urlencode(query(TEXTS[4], api_key="x", alternatives="", format=""))),
        (FORM, f"q={TEXTS[4]}&source=en&target=de".encode()),  # as `curl -d` sends it
        (MULTIPART, "".join(PART.format(*field) for field in query(TEXTS[4]).items()).encode() + b"--x--\r\n"),
    ],
)  # fmt: skip
def test_json_and_forms_ask_for_the_same(kind, body, address, translators):
    assert ask(address, body=body, kind=kind).json == {"translatedText": translators[0](TEXTS[4:5])[0]}
    fields = urlencode(query(TEXTS[4]))  # as deep_translator sends them
    assert ask(address, f"/translate?{fields}", kind="").json == ask(address, body=body, kind=kind).json


@pytest.mark.parametrize("kind", [JSON, FORM])
def test_of_a_list_every_field_of_the_answer_is_a_list(kind, address, translators):
    best = [[""], *[[one.text for one in hypotheses] for hypotheses in translators[1].n_best(TEXTS, 4)]]
    answer = translated(address, ["", *TEXTS], "fr", "de", alternatives=3, kind=kind)
    assert answer == {"translatedText": [text for text, *_ in best], "alternatives": [others for _, *others in best]}
    assert translated(address, TEXTS[1], "fr", "de", alternatives=3, kind=kind)["alternatives"] == best[2][1:]


def test_languages_have_many_names(address, translators):
    names = [("EN", "de-AT"), ("eng", "german"), ("fr_CA", "de"), ("English", "fra_Latn")]
    expected = [translators[number](TEXTS[:1])[0] for number in (0, 0, 1, 2)]
    assert [translated(address, TEXTS[0], *pair)["translatedText"] for pair in names] == expected


def test_an_unnamed_source_is_the_only_one_there_is(address, translators):
    answer = translated(address, TEXTS[0], "auto", "fr")
    assert answer["translatedText"] == translators[2](TEXTS[:1])[0]
    assert answer["detectedLanguage"] == {"language": "en", "confidence": 0.0}
    assert translated(address, TEXTS[:2], "auto", "fr")["detectedLanguage"] == [answer["detectedLanguage"]] * 2


def test_line_breaks_and_spaces_are_kept(address, translators):
    text = f"  {TEXTS[0]}\r\n\r\n{TEXTS[1]} "
    answer = translated(address, text)["translatedText"]
    assert [answer] == translators[0]([text]) and answer.startswith("  ") and "\r\n\r\n" in answer


def test_options_of_the_search_hold_for_alternatives_too(letters, translators):
    options = {"num_beams": 2, "length_penalty": 0.0, "max_new_tokens": 5}
    with serving([letters["en-de"]], options) as address:
        assert translated(address, TEXTS)["translatedText"] == translators[0](TEXTS, **options)
        (best,) = translators[0].n_best(TEXTS[1:2], 5, **options | {"num_beams": 5})
        answer = translated(address, TEXTS[1], alternatives=4)
        assert [answer["translatedText"], *answer["alternatives"]] == [one.text for one in best]


# ----------------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ({"source": "en", "target": "de"}, JSON, "`q` is missing; it must be a text or a list of texts."),
        (query(""), FORM, "`q` is missing"),
        (query([]), JSON, "`q` must be a text or a list of texts."),
        (query(5), JSON, "`q` must be"),
        (query(["a", None]), JSON, "`q` must be"),
        (query("a", source=None), JSON, "`source` is missing; it must be the code of a language, such as en, or"),
        (query("a", target="d" * 99), JSON, "`target` must be the code"),
        (query("a", target="es"), JSON, "No model translates from 'en' to 'es'; GET /languages lists"),
        (query("a", "de", "en"), JSON, "No model translates from 'de' to 'en'"),
        (query("a", "auto", "de"), JSON, "`source` is auto, but languages are not detected here; name one of en, fr."),
        (query("a", "auto", "es"), JSON, "No model translates from 'auto' to 'es'"),
        (query("<p>a</p>", format="html"), JSON, "`format` must be text; HTML is not supported: send the texts betw"),
        (query("a", alternatives=10), JSON, "`alternatives` must be a whole number from 0 to 9."),
        (query("a", alternatives="many"), FORM, "`alternatives` must be"),
        (query("a \ud800"), JSON, "Text 1 contains a lone surrogate"),
        (query("a", target="\ud800"), JSON, "`target` must be"),
        (query("a" * (LIMIT + 1)), JSON, "`q` has 201 characters, more than the 200 allowed; send several requests."),
        (query(["a" * 100] * 3), JSON, "`q` has 300 characters"),
        (query([""] * (LIMIT + 1)), JSON, "`q` has 201 characters"),
        (query(["a"] * 101, alternatives=9), JSON, "The request is for 1,010 translations, alternatives incl"),
        ("{", JSON, "The request cannot be read: Expecting property name"),
        (b'{"q": "\xff"}', JSON, "The request cannot be read: 'utf-8' codec can't decode"),
        ("[" * 60_000, JSON, "The request cannot be read: maximum recursion depth"),
        ("[]", JSON, "The request cannot be read: it is not an object with fields; send application/json or"),
        (json.dumps(query("a")), FORM, "`q` is missing"),  # as `curl -d` says what it sends
        ("a", "text/plain", "The request cannot be read: its Content-Type is 'text/plain'; send application/json or"),
        (b"q=\xff", FORM, "The request cannot be read: 'utf-8' codec"),
        ("q=%FF%FE", FORM, "The request cannot be read: 'utf-8' codec"),
        (PART.format("q", "\xfc").encode("latin-1") + b"--x--\r\n", MULTIPART, "cannot be read: 'utf-8' codec"),
        ("a", MULTIPART, " "),  # a sentence of starlette, which differs between versions
        (PART.format('q"; filename="a', "a") + "--x--\r\n", MULTIPART, "Too many files"),
    ],
)  # fmt: skip
def test_a_bad_request_gets_a_sentence_and_the_server_goes_on(body, kind, message, address, translators):
    answer = ask(address, body=body, kind=kind)
    assert answer.status == 400 and list(answer.json) == ["error"] and message in answer.json["error"]
    assert translated(address, TEXTS[0])["translatedText"] == translators[0](TEXTS[:1])[0]


def test_a_url_that_is_not_utf8_is_refused(address):
    answer = ask(address, "/translate?q=%FF&source=en&target=de", kind="")
    assert answer.status == 400 and "The request cannot be read: 'utf-8' codec" in answer.json["error"]


def test_a_large_request_is_refused_before_all_of_it_has_arrived(address):
    with socket.create_connection(address.split(":")) as connection:
        head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: {10**9}\r\n\r\n"
        connection.sendall(head.encode() + b"[" * (12 * LIMIT + 2**16 + 1))
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 413 and b"The request has more than 67,936 bytes" in answer.read()


@pytest.mark.parametrize("kind", [JSON, MULTIPART])
def test_half_a_request_is_refused_after_a_while_and_keeps_no_server_from_ending(kind, letters, monkeypatch):
    monkeypatch.setattr("vanilla_transformer.serving.app.READING_SECONDS", 1)
    head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 99\r\n\r\n"
    with serving([letters["en-de"]]) as address:
        first, second = (socket.create_connection(address.split(":"), 30) for _ in range(2))
        first.sendall(head.encode() + b"-")
        answer = HTTPResponse(first)
        answer.begin()
        assert answer.status == 408 and b"did not arrive within 1 seconds; send it again." in answer.read()
        assert first.recv(1) == b""  # the server has closed it
        second.sendall(head.encode() + b"-")
    for connection in (first, second):
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/translate", 405), ("POST", "/detect", 404), ("GET", "/docs", 404)]
)
def test_other_routes_are_refused_in_a_sentence(method, path, status, address):
    answer = ask(address, path, method=method)
    assert answer.status == status
    assert ask(address, "/openapi.json", method="GET").json["paths"].keys() == {"/translate", "/languages", "/health"}
    assert answer.json == {
        "error": "There is only POST /translate, GET /languages, GET /health and GET /openapi.json."
    }


def test_a_bad_text_harms_no_request_beside_it(address, translators, monkeypatch):
    with ThreadPoolExecutor(9) as callers, held(monkeypatch) as begun:
        callers.submit(translated, address, "No!")
        until(lambda: begun)
        asked = [callers.submit(ask, address, body=query(text)) for text in (*TEXTS[:3], "\ud800", *TEXTS[3:6])]
        until_waiting(address, 7)
    answers = [caller.result() for caller in asked]
    assert [answer.status for answer in answers] == [200, 200, 200, 400, 200, 200, 200]
    assert [answer.json["translatedText"] for answer in answers if answer.status == 200] == translators[0](TEXTS[:6])
    assert len(begun[1]) == 7  # they were together


def test_an_unexpected_error_is_a_sentence_without_details(address, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError(f"out of memory in {__file__}")

    with monkeypatch.context() as patch:
        patch.setattr(Translator, "__call__", fail)
        answer = ask(address, body=query("Yes."))
        assert answer.status == 500 and answer.json == {"error": "The server failed; its log says why."}
    assert translated(address, "Yes.")


def test_an_error_between_batches_harms_no_later_request(address, translators, monkeypatch):
    async def fail(_):
        raise RuntimeError("lost")

    with monkeypatch.context() as patch:
        patch.setattr("starlette.requests.Request.is_disconnected", fail)
        assert ask(address, body=query("Yes.")).status == 500
    assert translated(address, "Yes.")["translatedText"] == translators[0](["Yes."])[0]


def test_when_too_many_wait_the_next_is_refused(letters, monkeypatch):
    with serving([letters["en-de"]], queue_limit=3) as address, ThreadPoolExecutor(9) as callers:
        with held(monkeypatch) as begun:
            callers.submit(ask, address, body=query("No!"))
            until(lambda: begun)
            asked = [callers.submit(ask, address, body=query("Yes.")) for _ in range(5)]
            until(lambda: sum(caller.done() for caller in asked) == 2)
            refused = [caller.result() for caller in asked if caller.done()]
        assert [answer.status for answer in refused] == [503, 503] and refused[0].headers["Retry-After"] == "10"
        assert refused[0].json == {"error": "The server is busy: 3 requests are waiting; try again later."}
        assert sorted(caller.result().status for caller in asked) == [200, 200, 200, 503, 503]
        assert translated(address, "Yes.")


def test_who_leaves_is_not_translated(address, translators, monkeypatch):
    with ThreadPoolExecutor(9) as callers, held(monkeypatch) as begun:
        callers.submit(translated, address, "No!")
        until(lambda: begun)
        connection = HTTPConnection(address)
        connection.request("POST", "/translate", json.dumps(query("A man")), {"Content-Type": JSON})
        stays = callers.submit(translated, address, "Yes.")
        until_waiting(address, 2)
        connection.close()
        ask(address, "/health", method="GET")  # whose answer comes after the server has noticed
    assert stays.result()["translatedText"] == translators[0](["Yes."])[0]
    assert begun[1:] == [["Yes."]]


def test_a_batch_has_the_same_wish_and_a_limit():
    directions = [Direction(None, "en", target, {}) for target in ("de", "fr")]
    half = ["a" * (CHARACTERS_AT_A_TIME // 2)]

    async def batches():
        batcher = Batcher(99)

        def job(direction=0, texts=half, alternatives=0):
            return Job(directions[direction], texts, alternatives, None)

        jobs = [job(), job(1), job(alternatives=1), job(), job(texts=["a"]), job(), job(1, half * 3), job(1)]
        batcher.waiting = list(jobs)
        while batcher.waiting:
            yield [jobs.index(one) for one in batcher.next_batch()]

    async def collect():
        return [batch async for batch in batches()]

    assert asyncio.run(collect()) == [[0, 3], [1, 7], [2], [4, 5], [6]]


# ---------------------------------------------------------------------------------------------------------- the models


def test_names_before_a_model_take_the_place_of_its_own(letters, tmp_path):
    folder = letters["en-de"]
    named = load_models([f"pt_BR-de={folder}", f"en:zh-Hans={folder}", f"xx-words={folder}", folder], {})
    assert list(named) == [("pt", "de"), ("en", "zh"), ("xx", "words"), ("en", "de")]
    assert len({id(direction.translator) for direction in named.values()}) == 1
    shutil.copytree(folder, odd := tmp_path / "en=de")
    assert list(load_models([str(odd)], {})) == [("en", "de")]


def test_a_model_of_opus_says_its_languages(marian, tmp_path):
    shutil.copytree(marian, folder := tmp_path / "opus")
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"source_lang": "eng", "target_lang": "deu"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert [*load_models([str(folder)], {"num_beams": 1})] == [("en", "de")]


def test_a_model_without_a_limit_writes_more_than_twenty_tokens(text_tokenizer, tmp_path):
    ids = {"pad_token_id": text_tokenizer.pad_token_id, "eos_token_id": text_tokenizer.eos_token_id}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": len(text_tokenizer)}
    model = T5ForConditionalGeneration(T5Config(**ids, **sizes, decoder_start_token_id=text_tokenizer.pad_token_id))
    model.generation_config.suppress_tokens = [*ids.values()]  # it never ends
    folder = save_translator(Translator(model.eval(), text_tokenizer), tmp_path / "t5")
    (direction,) = load_models([f"en-de={folder}"], {}).values()
    ((text,),) = direction.translate(["A dog sleeps."])
    assert len(text_tokenizer(text).input_ids) > 100


@pytest.mark.parametrize("form, backend", [("ctranslate2", "ctranslate2"), ("vanilla", "torch")])
def test_a_converted_model_knows_its_languages(letters, form, backend, tmp_path):
    pytest.importorskip(backend)
    convert(letters["french-deu_Latn"], tmp_path / "converted", form)
    (direction,) = load_models([str(tmp_path / "converted")], {}, backend=backend)
    assert direction == ("fr", "de")


def test_a_model_beside_damaged_results_is_converted(letters, tmp_path):
    folder = Path(shutil.copytree(letters["french-deu_Latn"], tmp_path / "model"))
    (folder / "all_results.json").write_text("{")
    convert(str(folder), tmp_path / "converted", "vanilla")
    with pytest.raises(UserError, match="converted does not say which two languages it translates"):
        load_models([str(tmp_path / "converted")], {})


def test_a_multilingual_model_serves_the_pairs_that_are_named(tmp_path):
    model, tokenizer = small_nllb()
    folder = save_translator(Translator(model, tokenizer), tmp_path / "nllb")
    specs = [f"{source}-{target}={folder}" for source, target in [("fra_Latn", "deu_Latn"), ("deu_Latn", "fra_Latn")]]
    directions = load_models(specs, {"max_new_tokens": 9})
    assert list(directions) == [("fr", "de"), ("de", "fr")]
    for _ in range(2):
        for direction in directions.values():
            tokenizer.src_lang = direction.source
            options = {"forced_bos_token_id": tokenizer.convert_tokens_to_ids(direction.target), "max_new_tokens": 9}
            ids = model.generate(**tokenizer("a b a", return_tensors="pt"), **options)
            assert [direction.translate(["a b a"])[0][0]] == tokenizer.batch_decode(ids, skip_special_tokens=True)
    with pytest.raises(UserError, match=r"nllb does not know en or deu_Latn; name .* such as eng_Latn-deu_Latn="):
        load_models([f"en-deu_Latn={folder}"], {})


def test_models_that_cannot_be_served_are_one_sentence(letters, folder, capsys, tmp_path):
    unknown = f"{folder} does not say which two languages it translates; name them, as in en-de={folder}."
    cases = [
        ([folder], unknown),
        ([*letters.values(), f"en-de={folder}"], f"en-de={folder} is a second model from en to de; leave one out"),
        ([f"english={folder}"], f"english={folder} has english; give source and target as en-de, or as en:pt-BR."),
        ([str(tmp_path / "no")], f"The directory '{tmp_path / 'no'}' does not exist."),
        ([letters["en-de"], "--num_beams", "0"], "0 is not a positive integer"),
        ([letters["en-de"], "--length_penalty", "99"], "`length_penalty` is 99.0; it must be at least -10"),
        ([letters["en-de"], "--quantization", "int8"], "needs `backend='ctranslate2'`"),
        ([letters["en-de"], "--port", "80000"], "cannot serve on 127.0.0.1:80000; choose another --host or --port"),
        ([letters["en-de"], "--host", "192.0.2.1"], "cannot serve on 192.0.2.1:"),
    ]
    for model in ("question", "en, fr"):
        (Path(folder) / "all_results.json").write_text(json.dumps({"source_lang": model, "target_lang": "de"}))
        assert unknown in command_error(capsys, "serve", folder, "--port", free_port())
    (Path(folder) / "all_results.json").unlink()
    for arguments, message in cases:
        arguments += [] if "--port" in arguments else ["--port", free_port()]
        assert message in command_error(capsys, "serve", *arguments)


def test_a_missing_extra_is_named(letters, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "vanilla_transformer.serving.app", raising=False)
    error = command_error(capsys, "serve", letters["en-de"])
    assert "serve needs `pip install fastapi uvicorn python-multipart`: " in error


# --------------------------------------------------------------------------------------------------------- the command


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """start(*command) -> a process of Python, which has no Hub."""
    running = []

    def start(*command):
        environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home")}
        log = open(tmp_path / f"log{len(running)}", "w")  # noqa: SIM115  closed with the process
        options = {"env": os.environ | environment, "cwd": tmp_path, "stdout": log, "stderr": log}
        running.append(subprocess.Popen([sys.executable, *map(str, command)], **options))
        running[-1].log = Path(log.name)
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


def until_healthy(address: str, process: subprocess.Popen):
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            return ask(address, "/health", method="GET")
        time.sleep(0.1)
    pytest.fail(process.log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "ctranslate2"])
def test_after_a_kill_a_new_server_goes_on_and_a_stopped_one_answers_first(backend, letters, translators, start):
    libretranslatepy = pytest.importorskip("libretranslatepy")
    pytest.importorskip(backend)
    port = free_port()
    address = f"127.0.0.1:{port}"
    command = ["-m", "vanilla_transformer", "serve", letters["en-de"], "--port", port, "--backend", backend]
    client, failed = libretranslatepy.LibreTranslateAPI(f"http://{address}"), []
    texts = [f"{text} {number}" for number in range(200) for text in TEXTS[:5]]

    def translate(text: str) -> str:
        """As a client does that tries again for two minutes."""
        for _ in range(600):
            try:
                return client.translate(text, "en", "de")
            except (OSError, HTTPException):
                failed.append(text)
                time.sleep(0.2)
        raise AssertionError("no answer")

    first = start(*command)
    until_healthy(address, first)
    with ThreadPoolExecutor(50) as callers:
        asked = [callers.submit(translate, text) for text in texts]
        until(lambda: sum(caller.done() for caller in asked) > 100)
        first.kill()
        first.wait()
        second = start(*command)
        assert [caller.result() for caller in asked] == translators[0](texts) and failed
        # A batch has two of these, so most of them wait when the first is answered.
        asked = [callers.submit(ask, address, body=query(TEXTS * 100)) for _ in range(20)]
        until(lambda: any(caller.done() for caller in asked))
        second.terminate()
        assert [len(caller.result().json["translatedText"]) for caller in asked] == [100 * len(TEXTS)] * 20
    assert second.wait(30) == -signal.SIGTERM
    assert re.fullmatch(r"Translating en to de at \S+; Ctrl-C stops\.\n", second.log.read_text())


@pytest.mark.slow
def test_callers_are_let_in_once_the_models_are_loaded(letters, start):
    """Also at an address of IPv6."""
    port = free_port()
    server = start("-m", "vanilla_transformer", "serve", letters["en-de"], "--host", "::1", "--port", port)
    with socket.socket(socket.AF_INET6) as caller:
        until(lambda: server.poll() is not None or caller.connect_ex(("::1", port)) == 0)
    assert server.log.read_text() == f"Translating en to de at http://[::1]:{port}; Ctrl-C stops.\n"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("backend", ["torch", "ctranslate2"])
def test_workers_of_gunicorn_load_the_models_themselves(backend, letters, translators, start):
    for name in (backend, "gunicorn"):
        pytest.importorskip(name)
    address = f"127.0.0.1:{free_port()}"
    app = f"vanilla_transformer.serving.app:create_app({letters['en-de']!r}, backend={backend!r})"
    options = ["--workers", 2, "--worker-class", "asgi", "--bind", address, "--timeout", 120, "--no-control-socket"]
    master = start("-m", "gunicorn", "--preload", *options, app)
    until_healthy(address, master)
    with ThreadPoolExecutor(50) as callers:
        found = list(callers.map(lambda text: translated(address, text)["translatedText"], TEXTS * 20))
    assert found == translators[0](TEXTS) * 20
    assert ask(address, body=query("a", target="es")).status == 400
    master.terminate()
    assert master.wait(60) == 0
