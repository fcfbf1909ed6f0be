"""The Space that shows a pushed model."""

import ast
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from hub_server import LoopbackHub, python, run_python

from vanilla_transformer import Translator
from vanilla_transformer.hub.space import LIBRARIES, space_files

SCRIPT = ROOT / "push_to_hub.py"
# An editable installation would lend the package in the folder the modules that it lacks.
ALONE = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in f.__module__]; sys.path[0] = '.'; "


def test_card_requirements_and_program_name_what_they_need():
    files = {name: content.decode() for name, content in space_files("me/toy", "v2").items()}
    card = yaml.safe_load(files["README.md"].split("---\n")[1])
    expected = {"sdk": "gradio", "app_file": "app.py", "models": ["me/toy"], "title": "toy", "pinned": False}
    assert expected.items() <= card.items()
    assert {"emoji", "colorFrom", "colorTo", "sdk_version", "python_version", "tags"} <= card.keys()
    # In both without +cpu, so that the second sees that the first has installed it.
    index, torch = files["pre-requirements.txt"].splitlines()
    assert index == "--index-url https://download.pytorch.org/whl/cpu" and re.fullmatch(r"torch==[\d.]+", torch)
    required = files["requirements.txt"].splitlines()
    assert torch in required and all(re.fullmatch(r"\w+==[\w.]+", line) for line in required)  # and no other index
    compile(files["app.py"], "app.py", "exec")
    assert '"me/toy", revision="v2"' in files["app.py"]
    shown = {name.split("/")[1] for name in files if "/" in name}
    assert {"demo", "inspection", "engines"} <= shown and not {"training", "hub", "commands", "conversion"} & shown


def test_requirements_have_all_that_the_files_import():
    files = {name: ast.parse(content) for name, content in space_files("me/toy").items() if name.endswith(".py")}
    nodes = [node for tree in files.values() for node in ast.walk(tree)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    imported = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    installed = {*LIBRARIES, "gradio"} | {"huggingface_hub", "packaging", "regex", "tqdm"}  # transformers needs these
    assert imported - installed == {"vanilla_transformer"}


@pytest.mark.slow
def test_the_page_needs_no_other_file_of_the_package(tmp_path):
    pytest.importorskip("gradio")
    write_files(space_files("me/toy"), tmp_path)
    code = ALONE + "import vanilla_transformer.demo.app as app; print(app.__file__)"
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True}
    found = subprocess.run([python(), "-c", code], **options)
    assert found.stdout.strip() == str(tmp_path / "vanilla_transformer" / "demo" / "app.py"), found.stderr


def write_files(files: dict[str, bytes], folder: Path):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--space", "my demo"], "Cannot push to my demo: Repo id must"),
        (["--space", "me/demo", "--create_pr"], "--space cannot show a model that is still in a pull request"),
    ],
)
def test_a_space_that_cannot_be_is_refused_before_anything_is_pushed(trained, tmp_path, options, message):
    with LoopbackHub() as hub:
        said = run_python([SCRIPT, trained.name, "--repo_id", "me/toy", *options], tmp_path, hub.url, "hf_write")
        assert said.returncode == 2 and message in said.stderr and len(said.stderr.strip().splitlines()) == 1
        assert not hub.repos


@pytest.mark.slow
def test_a_pushed_space_serves_the_pushed_model(trained, tmp_path):
    """With nothing but the files of the Space, and the model from the Hub."""
    gradio_client = pytest.importorskip("gradio_client")
    pytest.importorskip("gradio")
    with LoopbackHub() as hub:
        command = [SCRIPT, trained.name, "--repo_id", "me/toy", "--space", "me/demo", "--private"]
        listed = run_python([*command, "--dry_run"], tmp_path, hub.url)
        assert re.search("to the Space me/demo:(.|\n)* app.py\n", listed.stdout) and not hub.repos
        pushed = run_python(command, tmp_path, hub.url, "hf_write")
        assert pushed.returncode == 0 and "HF_TOKEN" in pushed.stdout, pushed.stderr
        space = hub.repos["spaces/me/demo"]
        assert space.private and [commit.message for commit in space.refs["main"]] == ["initial commit", "Show me/toy"]
        folder = tmp_path / "space"
        write_files(space.refs["main"][-1].files, folder)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        env = environment() | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_read"}
        env |= {"HF_HUB_DISABLE_XET": "1", "GRADIO_SERVER_PORT": str(port)}
        with (tmp_path / "errors").open("w") as errors:
            command = [sys.executable, "-c", ALONE + "import runpy; runpy.run_path('app.py')"]
            running = subprocess.Popen(command, cwd=folder, env=env, stderr=errors)
        try:
            for _ in range(1500):  # five minutes, for a busy machine
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert running.poll() is None, (tmp_path / "errors").read_text()
                time.sleep(0.2)
            client = gradio_client.Client(f"http://127.0.0.1:{port}", verbose=False)
            text = "Where is the house?"
            found = client.predict(text, 2, 1, api_name="/translate")[0]
            assert found == Translator.from_pretrained(str(trained))([text], num_beams=2)[0]
            assert "I am a student" in str(client.config)  # an example, which the model's all_results.json has
        finally:
            running.kill()
            running.wait()
