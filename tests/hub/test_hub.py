"""train.py and push_to_hub.py with models and datasets on a loopback Hub, in processes with the real client."""

import io
import json
import re
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from hub_server import LoopbackHub, run_python
from huggingface_hub import ModelCard
from published import CODE, FILES
from runs import MODEL, ROOT, one_sentence, random_pairs
from transformers import AutoModelForSeq2SeqLM, MarianMTModel

from vanilla_transformer.conversion import from_native

pytestmark = pytest.mark.slow

OPTIONS = "--source_lang en --target_lang de --per_device_train_max_tokens 200 --warmup_steps 4 --learning_rate 0.02"
OPTIONS = f"{OPTIONS} --size paper --max_steps 4 --save_steps 2".split()
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
    several, flat = {"README.md": CONFIGS.encode()}, files_of(pairs)
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


# ------------------------------------------------------------------------------------- trained on a Hub, pushed to it


def start(url: str, output_dir: Path, dataset: str, *argv, token: str | None = "hf_write"):
    arguments = [ROOT / "train.py", "--dataset_name", dataset, *OPTIONS, *argv, "--output_dir", output_dir]
    return run_python(arguments, output_dir.parent, url, token)


def train(*arguments, **options) -> str:
    """What a run prints."""
    done = start(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(done: subprocess.CompletedProcess) -> str:
    """The message of a run that failed."""
    assert done.returncode == 2, done.stderr
    return one_sentence(done.stderr)


def command(url: str, folder: Path, verb: str, model: str, *argv) -> subprocess.CompletedProcess:
    """`vanilla-transformer` with a token that reads; `text` is a file that it can read."""
    (folder / "text").write_text("The dog sleeps.\n")
    return run_python(["-m", "vanilla_transformer", verb, "--model", model, *argv], folder, url, "hf_read")


FILES_TO_SCORE = ["--sources", "text", "--references", "text"]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pickled(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a model, with the weights in a pickle."""
    pickle, files = io.BytesIO(), dict(files)
    torch.save(safetensors.torch.load(files.pop("model.safetensors")), pickle)
    return files | {"pytorch_model.bin": pickle.getvalue()}


@pytest.fixture(scope="module")
def pushed(hub, tmp_path_factory) -> Path:
    """The output directory of a run on the private dataset, which pushed its model to `me/model`."""
    folder = tmp_path_factory.mktemp("pushed") / "model"
    printed = train(hub.url, folder, "me/pairs", *SIZES, "--push_to_hub", "--hub_model_id", "me/model")
    assert f"{hub.url}/me/model/commit/{hub.repos['me/model'].at('main').oid}" in printed
    return folder


def test_what_a_run_pushes(hub, pushed):
    refs = hub.repos["me/model"].refs
    commit = refs["main"][1]
    assert refs.keys() == {"main"} and len(refs["main"]) == 2
    assert sorted(commit.files) == sorted([".gitattributes", *FILES])
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

PUSH = ["--push_to_hub", "--hub_model_id", "me/never"]
REFUSED = {  # dataset and options, the token, parts of the message
    "no token": (["me/untouched", *PUSH], None, ["me/never", "hf auth login"]),
    "no dataset": (["me/none"], "hf_write", ["me/none", "doesn't exist on the Hub"]),
    "private dataset": (["me/pairs"], None, ["me/pairs", "cannot be accessed"]),
    "gated dataset": (["me/gated"], "hf_read", ["me/gated", "is a gated dataset"]),
    "a Hub that fails": (["me/fails"], "hf_read", ["me/fails"]),
    "no Hub": (["me/pairs"], "hf_read", ["reach 'me/pairs' on the Hub"]),  # it retries for half a minute
    "no native form": (
        ["me/pairs", *PUSH, "--native", "--position_embedding_type", "rotary"],
        "hf_write",
        ["position_embedding_type='rotary'", "MarianMTModel"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_sentence(name, hub, tmp_path):
    argv, token, parts = REFUSED[name]
    url = "http://127.0.0.1:9" if name == "no Hub" else hub.url
    message = refusal(start(url, tmp_path / "model", *argv, *SIZES, token=token))
    assert all(part in message for part in parts), message
    assert not [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    # Nothing was asked of the Hub before the push was refused.
    assert not any("untouched" in request for request in hub.requests) and "me/never" not in hub.repos


NESTED = ["me/several", "--dataset_config_name", "nested"]


@pytest.mark.parametrize(
    "argv, columns, config",
    [
        (["me/pairs", "--streaming"], "'en' to column 'de'", None),
        (NESTED, "'translation / en' to column 'translation / de'", "nested"),
        (["me/pairs", "--dataset_revision", "main", "--train_split", "train[:50%]"], "train: 30 pairs", None),
    ],
)
def test_datasets_of_the_hub_train(argv, columns, config, hub, tmp_path):
    printed = train(hub.url, tmp_path / "model", *argv, *SIZES)
    assert columns in printed and ("test: 5 pairs" in printed) == (config is None)
    results = json.loads((tmp_path / "model" / "all_results.json").read_text(encoding="utf-8"))
    assert (results["train_steps"], results["dataset"]) == (4, argv[0])
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert {result.dataset_config for result in card.data.eval_results} == {config}


def test_files_of_the_hub_train(hub, tmp_path):
    files = [f"hf://datasets/me/several/{name}" for name in ("nested/train.jsonl", "flat/train.jsonl")]
    argv = ["--dataset_name=", "--train_file", *files, "--validation_file", files[0].replace("train", "dev")]
    printed = train(hub.url, tmp_path / "model", "", *argv, *SIZES)
    assert "train: 120 pairs" in printed and "validation: 4 pairs" in printed


def test_run_pushes_the_native_form_to_a_private_repository(hub, pushed, tmp_path):
    argv = ["--push_to_hub", "--hub_model_id", "me/native", "--native", "--hub_private_repo"]
    printed = train(hub.url, tmp_path / "model", "me/pairs", *SIZES, *argv)
    commit = hub.repos["me/native"].at("main")
    assert f"{hub.url}/me/native/commit/{commit.oid}" in printed
    assert json.loads(commit.files["config.json"])["model_type"] == "marian"
    assert b'\nmodel_id = "me/native"' in commit.files["README.md"]
    assert hub.repos["me/native"].private and not hub.repos["me/model"].private


def test_token_revoked_in_training_loses_nothing(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(hub.refuse, "POST /api/repos/create", 401)
    folder = tmp_path / "model"
    argv = ["--dataset_config_name", "flat", "--streaming", "--push_to_hub", "--hub_model_id", "me/later"]
    done = start(hub.url, folder, "me/several", *SIZES, *argv)
    assert refusal(done).endswith(f"push it later with `python push_to_hub.py {folder} --repo_id me/later`.")
    assert f"The model is in {folder}" in done.stdout and "me/later" not in hub.repos
    assert set(FILES) <= {path.name for path in folder.iterdir()}


def test_fine_tuning_a_marian_model_of_the_hub(marian, hub, tmp_path):
    """From safetensors; a pickle is neither read nor sent to a conversion service."""
    hub.create("me/opus-mt", files=files_of(marian))
    hub.create("me/opus-mt-pickle", files=pickled(files_of(marian)))
    argv, folder = ["me/pairs", "--learning_rate", "0", "--model_name_or_path"], tmp_path / "model"
    train(hub.url, folder, *argv, "me/opus-mt", token="hf_read")
    expected = from_native(MarianMTModel.from_pretrained(marian)).state_dict()
    found = AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert ModelCard.load(folder / "README.md").data.base_model == "me/opus-mt"
    refused = start(hub.url, tmp_path / "refused", *argv, "me/opus-mt-pickle", token="hf_read")
    assert "me/opus-mt-pickle" in refusal(refused)
    asked = [request for request in hub.requests if "opus-mt-pickle" in request]
    assert asked and not any("pytorch_model.bin" in request or "/commits/" in request for request in asked)


def test_evaluating_a_pickle_of_the_hub(marian, hub, tmp_path):
    """It is read, and not sent to a conversion service, which could answer with other weights."""
    hub.create("me/opus-mt-bin", files=pickled(files_of(marian)))
    evaluate = [hub.url, tmp_path, "evaluate", "me/opus-mt-bin", *FILES_TO_SCORE]
    done = command(*evaluate)
    assert done.returncode == 0 and "| me/opus-mt-bin |" in done.stdout, done.stderr
    asked = [request for request in hub.requests if "opus-mt-bin" in request]
    assert any("pytorch_model.bin" in request for request in asked)
    assert not any(part in request for part in ("/commits/", "/discussions", "/refs") for request in asked)
    done = command(*evaluate, "--revision", "v2")
    assert done.returncode and "me/opus-mt-bin has no revision v2 on the Hub" in done.stderr


# ---------------------------------------------------------------------------------------------- code in a repository


def marking(code: bytes, marker: Path) -> bytes:
    """The code, which also writes a file when it is imported."""
    return f"open({str(marker)!r}, 'a').write(__file__)\n".encode() + code


@pytest.fixture(scope="module")
def marker(hub, pushed, tmp_path_factory) -> Path:
    """The file that the code in `me/marking` and `me/foreign` writes if it is ever run."""
    marker = tmp_path_factory.mktemp("marker") / "marker"
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


def test_package_never_runs_the_code_of_others(hub, marker, tmp_path):
    """Nor asks whether it may: the user would answer yes."""
    few = ["--max_steps", "1", "--max_train_samples", "20", "--max_eval_samples", "1", "--max_predict_samples", "1"]

    def tune(output: str, *argv):
        return start(hub.url, tmp_path / output, "me/pairs", *few, *argv, token="hf_read")

    def translate(model):
        return command(hub.url, tmp_path, "translate", model)

    loaded = run_python(["-c", LOAD_LOCALLY], tmp_path, hub.url, "hf_read")
    marked = [loaded, translate("me/marking"), tune("tuned", "--model_name_or_path", "me/marking")]
    for done in marked:
        assert done.returncode == 0, done.stderr
    assert loaded.stdout.split() == ["vanilla_transformer.modeling_vanilla_transformer"]
    assert len(marked[1].stdout.splitlines()) == 9  # translations of the nine lines, not answers to a question
    foreign = [
        tune("foreign", "--tokenizer_name", "me/foreign", *SIZES[2:]),
        tune("foreign", "--model_name_or_path", "me/foreign"),
    ]
    for done in foreign:
        assert "me/foreign" in refusal(done)
    foreign.append(translate("me/foreign"))
    assert "me/foreign needs code that it brings" in foreign[-1].stderr
    assert not marker.exists()
    assert not any("[y/N]" in done.stdout + done.stderr for done in marked + foreign)


def test_what_runs_with_trust_remote_code(hub, marker, tmp_path):
    """As docs/huggingface.md says: the layers of this package are never replaced, other code of a model runs."""

    def run(verb: str, model: str, *argv) -> set[str]:
        command(hub.url, tmp_path, verb, model, *argv, "--trust_remote_code")
        files = {Path(file).name for file in re.findall(r"\S+?\.py", marker.read_text())}
        marker.unlink()
        return files

    for verb, argv in [("translate", []), ("evaluate", FILES_TO_SCORE)]:
        assert run(verb, "me/marking", *argv) == {"generate.py"}
        assert run(verb, "me/foreign", *argv) >= {"configuration_vanilla_transformer.py"}
