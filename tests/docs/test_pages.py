"""The Markdown pages: links lead somewhere, options exist, lines fit, Python blocks run."""

import importlib.util
import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from helpers import ROOT, TEXTS, save_translator, save_untrained, small_model

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import load_verb, main
from vanilla_transformer.commands import evaluate, translate
from vanilla_transformer.commands.parser import Parser
from vanilla_transformer.data.tokenizer import special_token_ids, train_unigram_tokenizer
from vanilla_transformer.training.recipe import make_parser

IGNORED = re.compile(r"(^|/)(\.|outputs/|node_modules/)")  # hidden folders: pytest itself writes one while it collects
PAGES = sorted(path for path in ROOT.glob("**/*.md") if not IGNORED.search(path.relative_to(ROOT).as_posix()))
# Of Accelerate, Docker, gunicorn (--worker-class), http.server, npm (--ignore-scripts) and pip (--index-url).
LAUNCHER_OPTIONS = """--num_processes --multi_gpu --mixed_precision --cpu --nproc_per_node --config_file --machine_rank
--main_process_ip --main_process_port --help --check --preload --workers --worker --bind --timeout --ignore
--init --rm --index --no"""
LAUNCHER_OPTIONS = {*LAUNCHER_OPTIONS.split()}

every_page = pytest.mark.parametrize("page", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])


def prose(page: Path) -> str:
    """The page without its fenced code."""
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))


def python_blocks(page: str) -> list[str]:
    return re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.*)$", prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: Path, text: str) -> list[str]:
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?m)^\[[^\]]+\]: (\S+)$", text)
    dead = []
    for link in links:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            dead.append(link)
    return dead


@every_page
def test_links_resolve(page):
    assert dead_links(page, prose(page)) == []
    assert dead_links(page, "[a](nowhere.md) [b](#nowhere)\n[c]: c.py\n") == ["nowhere.md", "#nowhere", "c.py"]


@every_page
def test_lines_fit_in_140_columns(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    # GitHub's tables, console output and URLs cannot be wrapped.
    assert re.findall(r"(?m)^(?!\||\[\w+\]: \S+$).{141,}$", prose(page)) == []
    assert sum(line.startswith("```") for line in lines) % 2 == 0


def test_the_map_in_contributing_is_that_of_the_tree():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    with_map = runpy.run_path(str(ROOT / "docs" / "make_map.py"))["with_map"]
    assert page == with_map(page), "run `python docs/make_map.py`"
    assert page == with_map(page.replace("  data/", "  date/")) and "  data/" in page


def test_options_in_pages_exist():
    known = set(make_parser()._option_string_actions) | LAUNCHER_OPTIONS
    known |= load_verb("distill")[1]._option_string_actions.keys()  # of a dataclass
    for pattern in (
        "*.py",
        "vanilla_transformer/**/*.py",
        "benchmarks/*.py",
        "examples/*.py",
        "docs/walkthrough/*.py",
    ):
        for file in ROOT.glob(pattern):
            known |= set(re.findall(r"\"(--[a-z_]+)\"", file.read_text(encoding="utf-8")))
    for page in PAGES:
        # These name what existed then, or the options of others.
        if page.name not in ("LOG.md", "CHANGELOG.md", "coming_from.md") and page.parent.name != "results":
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z_]+", page.read_text(encoding="utf-8")))
            assert named <= known, page


def test_our_options_in_coming_from_exist():
    """The right-hand cells of its tables name options of train.py, or of the command of the row."""
    parsers = {"": make_parser(), "evaluate": Parser(prog="x", epilog=""), "translate": Parser(prog="x", epilog="")}
    evaluate.add_arguments(parsers["evaluate"])
    translate.add_arguments(parsers["translate"])
    known = {verb: parser._option_string_actions.keys() for verb, parser in parsers.items()}
    known[""] = known[""] | LAUNCHER_OPTIONS
    rows = re.findall(r"(?m)^\| .* \| (.*) \|$", (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8"))
    assert len(rows) > 90
    for row in rows:
        (verb,) = re.findall(r"vanilla-transformer (\w+)", row) or [""]
        assert set(re.findall(r"--[\w-]+", row)) <= known[verb], row


# ------------------------------------------------------------------------------------------------- code blocks


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with outputs/sample, an untrained model, and the sample dataset."""
    folder = tmp_path_factory.mktemp("sample")
    save_untrained(folder / "outputs" / "sample")
    (folder / "sample_dataset").symlink_to(ROOT / "sample_dataset")
    return folder


def test_code_about_translating_runs(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    blocks, names = python_blocks("README.md") + python_blocks("docs/translating.md"), {}
    assert len(blocks) == 3
    for code in blocks:
        exec(code, names)
        assert capsys.readouterr().out.strip(), code


@pytest.mark.slow
def test_huggingface_page_runs_from_top_to_bottom(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    optional = [name for name in ("torchao", "ctranslate2") if not importlib.util.find_spec(name)]
    blocks, names = python_blocks("docs/huggingface.md"), {}
    assert len(blocks) >= 8
    for code in blocks:
        if not any(name in code for name in optional):
            exec(code, names)
    assert len(names["sentences"]) == 2 and all(names["sentences"])
    for written in ["tuned/model.safetensors", "adapter/adapter_model.safetensors", "merged/model.safetensors"]:
        assert (workplace / "outputs" / written).exists()


@pytest.mark.slow
def test_deployment_page_runs_from_top_to_bottom(workplace, monkeypatch, capsys):
    """But for the checkpoint of fairseq and the Space, which have tests of their own."""
    for name in ("ctranslate2", "onnxruntime"):
        pytest.importorskip(name)
    monkeypatch.chdir(workplace)
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?m)^    vanilla-transformer (convert outputs/.*)$", page)
    assert len(commands) == 5
    tokenizer = train_unigram_tokenizer(TEXTS, 330)
    form = {
        "d_model": 64,
        "decoder_attention_heads": 4,
        "position_embedding_type": "marian",
        "tie_word_embeddings": True,
    }
    model = small_model(vocab_size=len(tokenizer), **form, **special_token_ids(tokenizer))
    save_translator(Translator(model, tokenizer), workplace / "outputs" / "small")  # for Marian's engines
    for command in commands:
        main(command.split())
    blocks = python_blocks("docs/deployment.md")
    assert len(blocks) == 5
    for code in blocks:
        capsys.readouterr()
        exec(code, {})
        assert capsys.readouterr().out.strip(), code


@pytest.mark.slow
@pytest.mark.parametrize("program", ["vanilla-transformer", "gunicorn"])
def test_the_server_of_the_deployment_page_answers(program, workplace, capsys):
    for name in ("ctranslate2", "gunicorn", "libretranslatepy", "uvicorn"):
        pytest.importorskip(name)
    for name in ("sample", "back"):
        folder = save_untrained(workplace / "outputs" / name)
        (folder / "all_results.json").write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    section = prose(ROOT / "docs" / "deployment.md").partition("\n## A server\n")[2].partition("\n## ")[0]
    section = section.replace("5000", port).replace("\\\n", "")
    commands = re.findall(r"(?m)^    ((?:vanilla-transformer|curl|gunicorn) .*)$", section)
    asked = [shlex.split(command) for command in commands if command.startswith("curl")]
    started, *_ = [shlex.split(command)[1:] for command in commands if command.startswith(program)]
    started += ["--port", port] if program == "vanilla-transformer" else ["--no-control-socket"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(workplace / "home")}
    module = program.replace("-", "_")
    server = subprocess.Popen([sys.executable, "-m", module, *started], cwd=workplace, env=environment)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and server.poll() is None:
            with suppress(OSError):
                urlopen(f"http://127.0.0.1:{port}/health")
                break
            time.sleep(0.1)
        answers = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for command in asked]
        assert len(answers) == 4 and "translatedText" in answers[0] and len(answers[1]["alternatives"]) == 2
        assert {language["code"] for language in answers[2]} == {"en", "de"} and answers[3] == {"status": "ok"}
        exec("\n".join(re.findall(r"(?m)^    ((?:from|client|print).*)$", section)), {})
        assert capsys.readouterr().out.strip()
    finally:
        server.terminate()
        server.wait(60)
