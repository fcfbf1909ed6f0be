"""train.py and push_to_hub.py with models and datasets on a loopback Hub, in processes with the real client."""

import io
import json
import socket
from pathlib import Path

import pytest
import torch
import yaml
from conftest import CODE, FILES
from hub_server import LoopbackHub, run_python
from huggingface_hub import ModelCard
from runs import MODEL, ROOT, random_pairs
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, MarianMTModel

from vanilla_transformer.conversion import from_marian

pytestmark = pytest.mark.slow

OPTIONS = "--source_lang en --target_lang de --per_device_train_max_tokens 200 --warmup_steps 4 --learning_rate 0.02"
OPTIONS = f"{OPTIONS} --max_steps 4 --save_steps 2".split()
SIZES = MODEL.split()


# -------------------------------------------------------------------------------------------------------- the datasets


CONFIGS = """---
configs:
- config_name: nested
  data_files: [{split: train, path: nested/train.jsonl}, {split: validation, path: nested/dev.jsonl}]
- config_name: flat
  data_dir: flat
---
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with datasets: `me/pairs` is private, `me/several` has configurations, others cannot be read."""
    pairs = random_pairs(tmp_path_factory.mktemp("pairs"), train=60, validation=4, test=5)
    several, flat = {"README.md": CONFIGS.encode()}, {path.name: path.read_bytes() for path in pairs.iterdir()}
    for name, lines in flat.items():
        several[f"flat/{name}"] = lines
        nested = b"".join(b'{"translation": %b}\n' % line for line in lines.splitlines())
        several[f"nested/{name.replace('validation', 'dev')}"] = nested
    with LoopbackHub() as server:
        server.create("datasets/me/pairs", private=True, files=flat)
        server.create("datasets/me/several", files=several)
        server.create("datasets/me/gated", files=flat, gated=True)
        server.create("datasets/me/fails", files=flat)
        server.refuse["/me/fails/resolve/"] = 500
        yield server


# ------------------------------------------------------------------------------------------------- the child processes

# Runs scripts one after another as `python SCRIPT ...` does, importing their libraries once, for a user who answers
# yes to every question. Prints the exit status, stdout and stderr of each as a line of JSON.
IN_TURN = """
import contextlib, io, json, os, runpy, sys
for script, argv, token in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    os.environ.update({"HF_TOKEN": token} if token else {})
    sys.argv, sys.stdin, status = [script, *argv], io.TextIOWrapper(io.BytesIO(b"yes\\n" * 9)), 0
    out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if script.endswith(".py"):
                runpy.run_path(script, run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
    print(json.dumps([status, *(stream.buffer.getvalue().decode() for stream in (out, err))]), flush=True)
"""


def run_in_turn(
    runs: list[tuple[str, list, str | None]], hub: LoopbackHub | str, folder: Path
) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of scripts with arguments and a token."""
    runs = [
        (str(ROOT / script) if script.endswith(".py") else script, list(map(str, argv)), token)
        for script, argv, token in runs
    ]
    result = run_python(["-c", IN_TURN, json.dumps(runs)], folder, getattr(hub, "url", hub))
    done = [tuple(json.loads(line)) for line in result.stdout.splitlines() if line.startswith("[")]
    assert len(done) == len(runs), result.stderr
    return done


def one_sentence(script: str, result: tuple[int, str, str]) -> str:
    """The message of a run that failed, which must be a single line."""
    status, _, stderr = result
    assert status == 2 and "Traceback" not in stderr, stderr
    before, *message = stderr.split(f"{script}: error: ")  # after a progress bar
    assert len(message) == 1 and "\n" not in message[0].strip() and "error:" not in before, stderr
    return message[0].strip()


# ------------------------------------------------------------------------------------- trained on a Hub, pushed to it


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def pushed(hub, folder) -> Path:
    """The output directory of a run on the private dataset, which pushed its model to `me/model`."""
    argv = ["--dataset_name", "me/pairs", *OPTIONS, *SIZES, "--output_dir", folder / "model"]
    argv += ["--push_to_hub", "--hub_model_id", "me/model"]
    ((status, stdout, stderr),) = run_in_turn([("train.py", argv, "hf_write")], hub, folder)
    assert status == 0, stderr
    assert f"{hub.url}/me/model/commit/{hub.repos['me/model'].at('main').oid}" in stdout
    return folder / "model"


def test_what_a_run_pushes(hub, pushed):
    refs = hub.repos["me/model"].refs
    commit = refs["main"][1]
    assert refs.keys() == {"main"} and len(refs["main"]) == 2
    assert sorted(commit.files) == sorted([".gitattributes", *FILES]) and commit.lfs == {"model.safetensors"}
    assert (pushed / "checkpoint-4" / "optimizer.safetensors").exists()  # not pushed
    assert not any(str(pushed.parent).encode() in content for content in commit.files.values())
    for name in {*FILES} - {"README.md", "recipe.yaml"}:
        assert commit.files[name] == (pushed / name).read_bytes(), name
    card = ModelCard(commit.files["README.md"].decode())
    assert card.data.datasets == ["me/pairs"] and card.data.language == ["en", "de"]
    assert '\nmodel_id = "me/model"' in card.text
    recipe = yaml.safe_load(commit.files["recipe.yaml"])
    assert recipe["dataset_name"] == "me/pairs" and recipe["output_dir"] == "model"


# ------------------------------------------------------------------------------- other datasets, and what is refused

SEVERAL = ["--dataset_name", "me/several", "--dataset_config_name"]
PUSH = ["--dataset_name", "me/untouched", "--push_to_hub", "--hub_model_id", "me/never"]
REFUSED = {  # options of train.py, the token, parts of the message
    "no token": (PUSH, None, ["me/never", "hf auth login"]),
    "no dataset": (["--dataset_name", "me/none"], "hf_write", ["me/none", "doesn't exist on the Hub"]),
    "private dataset": (["--dataset_name", "me/pairs"], None, ["me/pairs", "cannot be accessed"]),
    "gated dataset": (["--dataset_name", "me/gated"], "hf_read", ["me/gated", "is a gated dataset"]),
    "a Hub that fails": (["--dataset_name", "me/fails"], "hf_read", ["me/fails"]),
    "no Hub": (["--dataset_name", "me/pairs"], "hf_read", ["reach 'me/pairs' on the Hub"]),  # at another address
    "no native form": (  # last, since it leaves the private dataset in the cache
        ["--dataset_name", "me/pairs", *PUSH[2:], "--native", "--position_embedding_type", "rotary"],
        "hf_write",
        ["--native", "position_embedding_type='rotary'"],
    ),
}


@pytest.fixture(scope="module")
def refused(hub, folder) -> dict[str, tuple[int, str, str]]:
    runs = {
        name: ("train.py", [*OPTIONS, *SIZES, *argv, "--output_dir", folder / "refused" / name], token)
        for name, (argv, token, _) in REFUSED.items()
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    done = {"no Hub": run_in_turn([runs.pop("no Hub")], nowhere, folder)[0]}  # it retries for half a minute
    return done | dict(zip(runs, run_in_turn(runs.values(), hub, folder), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_sentence(name, refused, hub, folder):
    message = one_sentence("train.py", refused[name])
    assert all(part in message for part in REFUSED[name][2]), message
    assert not [path for path in (folder / "refused" / name).rglob("*") if path.is_file()]
    if "--push_to_hub" in REFUSED[name][0]:  # before the dataset is read
        assert not any("untouched" in request for request in hub.requests) and "me/never" not in hub.repos


TRAINED = {
    "stream": (["--dataset_name", "me/pairs", "--streaming"], "'en' to column 'de'"),
    "nested": ([*SEVERAL, "nested"], "'translation / en' to column 'translation / de'"),
    "native": (
        ["--dataset_name", "me/pairs", "--push_to_hub", "--hub_model_id", "me/native", "--native"],
        "'en' to column 'de'",
    ),
    "flat": ([*SEVERAL, "flat", "--streaming", "--push_to_hub", "--hub_model_id", "me/later"], "'en' to column 'de'"),
}


@pytest.fixture(scope="module")
def trained(hub, folder) -> dict[str, tuple[int, str, str]]:
    """Runs on the other datasets; the token of the last one is revoked while it trains."""
    hub.refuse["GET /api/whoami-v2"] = [200, 200, 200, 401]
    runs = [
        ("train.py", [*OPTIONS, *SIZES, *argv, "--output_dir", folder / name], "hf_write")
        for name, (argv, _) in TRAINED.items()
    ]
    done = run_in_turn(runs, hub, folder)
    del hub.refuse["GET /api/whoami-v2"]
    return dict(zip(TRAINED, done, strict=True))


@pytest.mark.parametrize("name", ["stream", "nested"])
def test_datasets_of_the_hub_train(name, trained, folder):
    status, stdout, stderr = trained[name]
    assert status == 0, stderr
    assert TRAINED[name][1] in stdout and ("test: 5 pairs" in stdout) == (name != "nested")
    results = json.loads((folder / name / "all_results.json").read_text(encoding="utf-8"))
    assert (results["train_steps"], results["dataset"]) == (4, TRAINED[name][0][1])
    configs = {result.dataset_config for result in ModelCard.load(folder / name / "README.md").data.eval_results}
    assert configs == ({"nested"} if name == "nested" else {None})


def test_run_pushes_the_native_form(trained, hub, folder):
    status, stdout, stderr = trained["native"]
    assert status == 0, stderr
    commit = hub.repos["me/native"].at("main")
    assert f"{hub.url}/me/native/commit/{commit.oid}" in stdout
    assert sorted(commit.files) == sorted([".gitattributes", *(name for name in FILES if not name.endswith(".py"))])
    assert json.loads(commit.files["config.json"])["model_type"] == "marian"
    card = commit.files["README.md"].decode()
    assert '\nmodel_id = "me/native"' in card and "`MarianMTModel`" in card and "trust_remote_code" not in card


def test_token_revoked_in_training_loses_nothing(trained, hub, folder):
    message = one_sentence("train.py", trained["flat"])
    assert message.endswith(f"push it later with `python push_to_hub.py {folder / 'flat'} --repo_id me/later`.")
    assert f"The model is in {folder / 'flat'}" in trained["flat"][1]
    assert "me/later" not in hub.repos
    there = {path.relative_to(folder / "flat").as_posix() for path in (folder / "flat").rglob("*")}
    assert set(FILES) <= there


def test_fine_tuning_a_marian_model_of_the_hub(marian, hub, folder):
    """From safetensors; a pickle is neither read nor sent to a conversion service."""
    whole = {path.name: path.read_bytes() for path in marian.iterdir()}
    pickle = io.BytesIO()
    torch.save(load_file(marian / "model.safetensors"), pickle)
    hub.create("me/opus-mt", files=whole)
    pickled = {name: content for name, content in whole.items() if name != "model.safetensors"}
    hub.create("me/opus-mt-pickle", files=pickled | {"pytorch_model.bin": pickle.getvalue()})
    argv = [*OPTIONS, "--dataset_name", "me/pairs", "--learning_rate", "0", "--model_name_or_path"]
    names = ("opus-mt", "opus-mt-pickle")
    runs = [("train.py", [*argv, f"me/{name}", "--output_dir", folder / name], "hf_read") for name in names]
    trained, refused = run_in_turn(runs, hub, folder)
    assert trained[0] == 0, trained[2]
    expected = from_marian(MarianMTModel.from_pretrained(marian)).state_dict()
    found = AutoModelForSeq2SeqLM.from_pretrained(folder / "opus-mt").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert ModelCard.load(folder / "opus-mt" / "README.md").data.base_model == "me/opus-mt"
    assert "me/opus-mt-pickle" in one_sentence("train.py", refused)
    asked = [request for request in hub.requests if "opus-mt-pickle" in request]
    assert asked and not any("pytorch_model.bin" in request or "/commits/" in request for request in asked)


# ---------------------------------------------------------------------------------------------- code in a repository


def marking(code: bytes, marker: Path) -> bytes:
    """The code, which also writes a file when it is imported."""
    return f"open({str(marker)!r}, 'a').write(__file__)\n".encode() + code


@pytest.fixture(scope="module")
def marker(hub, pushed, folder) -> Path:
    """The file that the code in `me/marking` and `me/foreign` writes if it is ever run."""
    marker = folder / "marker"
    files = dict(hub.repos["me/model"].refs["main"][1].files)
    for name in CODE:
        files[name] = marking(files[name], marker)
    files["custom_generate/generate.py"] = marking(b"def generate(model, **kwargs): pass\n", marker)
    hub.create("me/marking", files=files)
    config = json.loads(files["config.json"]) | {"model_type": "foreign"}
    tokenizer = json.loads(files["tokenizer_config.json"]) | {
        "tokenizer_class": "ForeignTokenizer",
        "auto_map": {"AutoTokenizer": [None, "configuration_vanilla_transformer.ForeignTokenizer"]},
    }
    foreign = {"config.json": json.dumps(config).encode(), "tokenizer_config.json": json.dumps(tokenizer).encode()}
    hub.create("me/foreign", files=files | foreign)
    return marker


LOAD_LOCALLY = """
import sys
import vanilla_transformer
from transformers import AutoModelForSeq2SeqLM
print(type(AutoModelForSeq2SeqLM.from_pretrained("me/marking")).__module__)
"""


def test_package_never_runs_the_code_of_others(hub, marker, folder):
    """Nor asks whether it may: the user would answer yes."""
    script = folder / "load_locally.py"
    script.write_text(LOAD_LOCALLY)
    few = ["--max_steps", "1", "--max_train_samples", "20", "--max_eval_samples", "1", "--max_predict_samples", "1"]
    argv = ["--dataset_name", "me/pairs", *OPTIONS, *few, "--output_dir"]
    runs = [
        (str(script), []),
        ("train.py", [*argv, folder / "tuned", "--model_name_or_path", "me/marking"]),
        ("vanilla_transformer", ["translate", "--model", "me/marking"]),
        ("vanilla_transformer", ["translate", "--model", "me/foreign"]),
        ("train.py", [*argv, folder / "foreign", "--tokenizer_name", "me/foreign", *SIZES[2:]]),
        ("train.py", [*argv, folder / "foreign", "--model_name_or_path", "me/foreign"]),
    ]
    done = run_in_turn([(script, argv, "hf_read") for script, argv in runs], hub, folder)
    for status, _, stderr in done[:3]:
        assert status == 0, stderr
    assert done[0][1].split() == ["vanilla_transformer.modeling_vanilla_transformer"]
    assert len(done[2][1].splitlines()) == 9  # translations of the nine lines, not answers to a question
    assert "me/foreign cannot be loaded" in str(done[3])
    for result in done[4:]:
        assert "me/foreign" in one_sentence("train.py", result)
    assert not marker.exists()
    assert not any("[y/N]" in stdout + stderr for _, stdout, stderr in done)
