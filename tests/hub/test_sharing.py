"""Cards, checks and pushes, against a Hub on loopback. Run: pytest tests/test_sharing.py"""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from helpers import TINY, randomise
from hub_server import LoopbackHub
from huggingface_hub import ModelCard, parse_eval_result_entries
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from vanilla_transformer import Translator, VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenizer import special_token_ids, train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.hub import upload as sharing
from vanilla_transformer.hub.model_card import duration, language_code, write_model_card
from vanilla_transformer.hub.upload import check_model_directory, check_token, files_to_upload, push
from vanilla_transformer.training.arguments import parse_options, resolved_recipe

SCRIPT = Path(__file__).parents[2] / "push_to_hub.py"
PAIRS = [
    ("I am a student", "Ich bin ein Schüler"),
    ('The "dog" | sleeps.\n```\n# not a heading', "Der Hund schläft."),
    ("Where is the house?", "Wo ist das Haus?"),
]
FILES = ["README.md", "all_results.json", "attention.png", "config.json", "configuration_vanilla_transformer.py"]
FILES += ["generation_config.json", "decoding_vanilla_transformer.py", "model.safetensors"]
FILES += ["modeling_vanilla_transformer.py"]
FILES += ["translation_vanilla_transformer.py", "recipe.yaml"]
FILES += ["tokenizer.json", "tokenizer_config.json", "training_curves.png"]

RESULTS = {
    "train_runtime": 3725.4,
    "train_steps": 12345,
    "train_loss": 2.5,
    "train_target_tokens": 67891011,
    "train_target_tokens_per_second": 18223.7,
    "padding_fraction": 0.0412,
    "num_parameters": 4321,
    "eval_loss": 1.23456,
    "eval_bleu": 31.41592,
    "eval_chrf": 55.5,
    "test_loss": 1.3,
    "test_bleu": 30.25,
    "test_chrf": 54.125,
    "bleu_signature": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0",
    "chrf_signature": "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0",
    "dataset": "/home/somebody/private/pairs",
    "source_lang": "en",
    "target_lang": "de",
    "date": "2026-11-21T10:00:00+00:00",
    "train_samples": 29000,
    "hardware": "2 x Abacus 9000",
    "mixed_precision": "bf16",
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    "examples": [{"source": s, "reference": t, "translation": f"{t}!"} for s, t in PAIRS],
}
OPTIONS = ["--dataset_name", "/home/somebody/private/pairs", "--source_lang", "en", "--target_lang", "de"]
OPTIONS += ["--output_dir", "/home/somebody/private/toy", "--validation_split", "dev", "--learning_rate", "0.0078125"]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A directory as train.py leaves it, with a checkpoint and somebody's notes."""
    torch.manual_seed(0)
    output_dir = tmp_path_factory.mktemp("outputs") / "toy"
    tokenizer = train_tokenizer([text for pair in PAIRS for text in pair], 300)
    config = VanillaTransformerConfig(**TINY | {"vocab_size": len(tokenizer)} | special_token_ids(tokenizer))
    model = randomise(VanillaTransformerForConditionalGeneration(config)).eval()
    ids = {name: getattr(config, name) for name in vars(config) if name.endswith("_token_id")}
    model.generation_config = GenerationConfig(max_length=12, **ids)
    for folder in (output_dir, output_dir / "checkpoint-5"):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_file({"lm_head.weight/exp_avg": torch.zeros(2)}, folder / "optimizer.safetensors")
    (output_dir / "checkpoint-5" / "trainer_state.json").write_text("{}")
    (output_dir / "notes.txt").write_text("to myself")
    for picture in ("training_curves.png", "attention.png"):
        (output_dir / picture).write_bytes(b"\x89PNG")
    (output_dir / "all_results.json").write_text(json.dumps(RESULTS, ensure_ascii=False), encoding="utf-8")
    (output_dir / "recipe.yaml").write_text(resolved_recipe(parse_options(OPTIONS), config), encoding="utf-8")
    return output_dir


@pytest.fixture
def trained(original, tmp_path) -> Path:
    """A copy of the directory that a test may change."""
    return shutil.copytree(original, tmp_path / "toy")


def edit(path: Path, **changes) -> Path:
    """Sets keys of a JSON or YAML file."""
    text = path.read_text(encoding="utf-8")
    load, dump = (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    path.write_text(dump(load(text) | changes), encoding="utf-8")
    return path


def card_code(card: str) -> str:
    return re.search(r"(?s)^```python\n(.*?)^```$", card, re.MULTILINE).group(1)


# ------------------------------------------------------------------------------------------------------ the model card


def test_card_metadata(trained):
    data = ModelCard.load(write_model_card(trained)).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "translation", "apache-2.0")
    assert data.language == ["en", "de"] and "vanilla-transformer" in data.tags
    assert data.metrics == ["sacrebleu", "chrf"]
    assert data.datasets is None and data.base_model is None  # both local
    found = {
        (r.dataset_name, r.dataset_split, r.metric_type): (r.metric_value, r.metric_args) for r in data.eval_results
    }
    bleu, chrf = ({"signature": RESULTS[f"{metric}_signature"]} for metric in ("bleu", "chrf"))
    assert found == {
        ("pairs", "dev", "sacrebleu"): (31.4159, bleu),
        ("pairs", "dev", "chrf"): (55.5, chrf),
        ("pairs", "dev", "loss"): (1.2346, None),
        ("pairs", "test", "sacrebleu"): (30.25, bleu),
        ("pairs", "test", "chrf"): (54.125, chrf),
        ("pairs", "test", "loss"): (1.3, None),
    }


def test_card_of_a_hub_dataset_without_a_test_split(trained):
    results = {key: value for key, value in RESULTS.items() if not key.startswith("test_")}
    (trained / "all_results.json").write_text(json.dumps(results | {"dataset": "me/pairs", "target_lang": "no"}))
    edit(trained / "recipe.yaml", dataset_name="me/pairs", model_name_or_path="team/bigger")
    card = ModelCard.load(write_model_card(trained))
    assert card.data.datasets == ["me/pairs"] and card.data.base_model == "team/bigger"
    assert card.data.language == ["en", "no"]  # Norwegian, and not YAML's false
    assert {result.dataset_split for result in card.data.eval_results} == {"dev"}
    entries = yaml.safe_load((trained / ".eval_results" / "me_pairs.yaml").read_text(encoding="utf-8"))
    bleu, chrf = parse_eval_result_entries(entries)
    assert [(entry.dataset_id, entry.task_id, entry.value) for entry in (bleu, chrf)] == [
        ("me/pairs", "default_dev_bleu", 31.4159),
        ("me/pairs", "default_dev_chrf", 55.5),
    ]
    assert bleu.date == RESULTS["date"] and bleu.notes.startswith(RESULTS["bleu_signature"])
    assert "(https://huggingface.co/datasets/me/pairs)" in card.text and "tuned from `team/bigger`" in card.text


def test_files_are_no_hub_dataset(trained):
    """`data/train.jsonl` looks like `owner/name`."""
    edit(trained / "all_results.json", dataset="data/train.jsonl")
    edit(trained / "recipe.yaml", dataset_name=None, train_file="data/train.jsonl")
    card = ModelCard.load(write_model_card(trained))
    assert card.data.datasets is None and not (trained / ".eval_results").exists()
    assert yaml.safe_load(files_to_upload(trained)["recipe.yaml"])["train_file"] == "train.jsonl"


def test_card_text(trained):
    card = write_model_card(trained).read_text(encoding="utf-8")
    for text in ["| dev | 31.42 | 55.50 | 1.235 |", "| test | 30.25 | 54.12 | 1.300 |", RESULTS["bleu_signature"]]:
        assert text in card
    for text in [RESULTS["chrf_signature"], "4,321", "12,345", "67,891,011", "18,224", "4.1%", "1 h 2 min", "bf16"]:
        assert text in card
    for text in ["2 x Abacus 9000", "torch 2.13.0", "![", "| `learning_rate` | `0.0078125` |", "| `d_model` | `16` |"]:
        assert text in card
    assert "translation: Wo ist das Haus?!" in card and "vaswani2017attention" in card
    assert "somebody" not in card and str(trained.parent) not in card
    # A sentence with a fence in it opens no block of its own: code, examples and citation are all there are.
    assert len(re.findall(r"(?m)^```", card)) == 6
    assert ast.literal_eval(re.search(r"tokenizer\(\[(.*)\], return", card).group(1)) == PAIRS[0][0]
    edit(trained / "all_results.json", examples=RESULTS["examples"][1:])
    card = write_model_card(trained).read_text(encoding="utf-8")
    assert ast.literal_eval(re.search(r"tokenizer\(\[(.*)\], return", card).group(1)) == PAIRS[1][0]


def test_card_of_a_run_without_pictures_and_examples(trained):
    for picture in trained.glob("*.png"):
        picture.unlink()
    results = {key: value for key, value in RESULTS.items() if key not in ("examples", "source_lang")}
    (trained / "all_results.json").write_text(json.dumps(results))
    card = write_model_card(trained).read_text(encoding="utf-8")
    assert "![" not in card and "Translations of" not in card and "None" not in card
    compile(card_code(card), "card", "exec")


@pytest.mark.parametrize(
    "name, code",
    [
        ("en", "en"),
        ("deu", "deu"),
        ("pt-BR", "pt"),
        ("eng_Latn", "eng"),
        ("src", None),
        ("english", None),
        (None, None),
    ],
)
def test_language_code(name, code):
    assert language_code(name) == code


def test_duration():
    assert [duration(s) for s in (5.25, 60, 200.4, 3725)] == ["5.2 s", "1 min 0 s", "3 min 20 s", "1 h 2 min"]


@pytest.mark.parametrize(
    "name, content", [("all_results.json", None), ("all_results.json", "{"), ("recipe.yaml", "- a")]
)
def test_card_without_its_sources(trained, name, content):
    (trained / name).unlink() if content is None else (trained / name).write_text(content)
    with pytest.raises(UserError, match=name):
        write_model_card(trained)


def test_card_names_the_missing_result(trained):
    (trained / "all_results.json").write_text(json.dumps({k: v for k, v in RESULTS.items() if k != "train_steps"}))
    with pytest.raises(UserError, match="train_steps"):
        write_model_card(trained)


# ------------------------------------------------------------------------------------------------- the model directory


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def write(name, text="x"):
    return lambda folder: (folder / name).write_text(text)


def shard(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


BROKEN = {
    "no directory": (shutil.rmtree, "is no directory"),
    "no config": (remove("config.json"), "config.json is not there"),
    "damaged config": (write("config.json", "{"), "config.json cannot be read"),
    "foreign config": (write("config.json", '{"model_type": "marian"}'), "of a marian model"),
    "no code named": (lambda folder: edit(folder / "config.json", auto_map=None), "auto_map"),
    "no code": (remove("configuration_vanilla_transformer.py"), "configuration_vanilla_transformer.py is missing"),
    "no weights": (remove("model.safetensors"), "has no weights"),
    "no shard": (shard, "model-00002-of-00002.safetensors"),
    "no tokenizer": (remove("tokenizer_config.json"), "has no tokenizer"),
    "no results": (remove("all_results.json"), "neither a README.md nor"),
    "a pickle": (write("pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    "another pickle": (write("optimizer.pt"), "optimizer.pt is a pickle"),
}


@pytest.mark.parametrize("breakage, message", BROKEN.values(), ids=BROKEN)
def test_broken_directory(trained, breakage, message, monkeypatch):
    monkeypatch.setattr(sharing, "translate_in_fresh_process", lambda folder: pytest.fail("was loaded"))
    breakage(trained)
    with pytest.raises(UserError, match=re.escape(message)):
        check_model_directory(trained)


def rename_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights["extra"] = weights.pop("model.encoder.layers.0.fc1.bias")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def import_the_package(folder):
    path = folder / "configuration_vanilla_transformer.py"
    path.write_text("from vanilla_transformer.errors import UserError\n" + path.read_text())


UNLOADABLE = {
    "weights": (
        rename_a_weight,
        "1 missing (such as model.encoder.layers.0.fc1.bias) and 1 unknown (such as extra)",
    ),
    "code": (import_the_package, "vanilla_transformer"),
}


def test_directories_that_do_not_load(original, tmp_path):
    def message(name):
        folder = shutil.copytree(original, tmp_path / name)
        UNLOADABLE[name][0](folder)
        with pytest.raises(UserError) as error:
            check_model_directory(folder)
        return str(error.value)

    with ThreadPoolExecutor() as pool:
        messages = dict(zip(UNLOADABLE, pool.map(message, UNLOADABLE), strict=True))
    for name, (_, text) in UNLOADABLE.items():
        assert "does not load in a fresh process" in messages[name] and text in messages[name]


@pytest.mark.parametrize("name", ["weights.dat", "pytorch_model.bin", "../model.safetensors"])
def test_shards_that_are_no_safetensors_are_refused(trained, name):
    (trained / "model.safetensors").rename(trained / "weights.dat")
    (trained / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(UserError, match="which is no safetensors file beside it"):
        files_to_upload(trained)


def test_files_to_upload(trained):
    write_model_card(trained)
    files = files_to_upload(trained, "me/other")
    assert list(files) == FILES
    assert b"somebody" not in files["all_results.json"] + files["recipe.yaml"] + files["README.md"]
    assert b'\nmodel_id = "me/other"\n' in files["README.md"]
    recipe = yaml.safe_load(files["recipe.yaml"])
    assert (recipe["dataset_name"], recipe["output_dir"]) == ("pairs", "toy")
    assert b"somebody" in (trained / "recipe.yaml").read_bytes()  # on disk nothing changes
    (trained / ".eval_results").mkdir()
    (trained / ".eval_results" / "pairs.yaml").write_text("[]")
    (trained / "helper.py").write_text("")
    (trained / "other.py").write_text("")
    code = trained / "modeling_vanilla_transformer.py"
    code.write_text(code.read_text() + "\nfrom .helper import x\n")
    assert set(files_to_upload(trained)) - set(FILES) == {".eval_results/pairs.yaml", "helper.py"}


def test_sharded_weights_go_up_with_their_index(trained):
    shard(trained)
    (trained / "model-00002-of-00002.safetensors").write_bytes(b"")
    (trained / "model-00003-of-00003.safetensors").write_bytes(b"")  # of an earlier save
    weights = [path for path in files_to_upload(trained) if path.startswith("model") and "py" not in path]
    assert weights == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


# ---------------------------------------------------------------------------------------------- with a Hub on loopback


@pytest.fixture
def hub():
    with LoopbackHub() as server:
        yield server


@pytest.fixture
def at_hub(hub, monkeypatch, tmp_path):
    """Sends the client of this process to the loopback Hub, as a user who may write; the check is left out."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setattr(sharing, "check_model_directory", lambda folder: "")
    return hub


def run(arguments, tmp_path, **env) -> subprocess.CompletedProcess:
    """Python in a process of its own, with no token, cache or login but what `env` gives."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
    # As many threads as here: on more of them sums come out in another order, and logits in other bits.
    env = {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_DISABLE_XET": "1", **env}
    env = inherited | env
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=env, cwd=tmp_path, capture_output=True, text=True
    )


@pytest.mark.slow
def test_pushed_model_loads_as_it_was(trained, hub, tmp_path):
    pushed = run([SCRIPT, "toy", "--private"], tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="hf_write")
    assert pushed.returncode == 0, pushed.stderr
    commits = hub.repos["me/toy"].refs["main"]
    assert [commit.message for commit in commits] == ["initial commit", "Upload a trained Transformer"]
    assert f"{hub.url}/me/toy/commit/{commits[1].oid}" in pushed.stdout
    assert sorted(commits[1].files) == sorted([".gitattributes", *FILES]) and commits[1].lfs == {"model.safetensors"}
    assert hub.repos["me/toy"].private
    assert not any(b"somebody" in content for content in commits[1].files.values())

    # The code of both cards, on disk and on the Hub, in a process that knows neither the package nor the directory.
    cards = (trained / "README.md").read_text(encoding="utf-8"), commits[1].files["README.md"].decode()
    save = "logits = model(**inputs, decoder_input_ids=inputs.input_ids).logits\ntorch.save(logits, '{}.pt')\n"
    code = "import sys, torch\nsys.modules['vanilla_transformer'] = None\n"
    code += "".join(card_code(card) + save.format(name) for name, card in zip(("disk", "hub"), cards, strict=True))
    shown = run(["-c", code], tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="hf_read")
    assert shown.returncode == 0, shown.stderr
    assert f"GET /me/toy/resolve/{commits[1].oid}/model.safetensors" in hub.requests

    model = VanillaTransformerForConditionalGeneration.from_pretrained(trained).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained)
    inputs = tokenizer([PAIRS[0][0]], return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=inputs.input_ids).logits
    for name in ("disk", "hub"):
        assert torch.equal(torch.load(tmp_path / f"{name}.pt"), logits)
    texts = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    (as_pipeline,) = Translator(model, tokenizer)([PAIRS[0][0]])
    assert shown.stdout.splitlines() == [str([{"translation_text": as_pipeline}]), str(texts)] * 2


def load_script():
    spec = importlib.util.spec_from_file_location("push_to_hub", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dry_run_sends_nothing(trained, hub, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    load_script().main([str(trained), "--dry_run", "--repo_id", "me/toy"])
    shown = capsys.readouterr().out
    assert hub.requests == [] and (trained / "README.md").exists()
    found = re.findall(r"(?m)^ *([\d,]+)  (\S+)$", shown)
    listed = {path: int(size.replace(",", "")) for size, path in found}
    assert sorted(listed) == FILES
    assert listed["model.safetensors"] == (trained / "model.safetensors").stat().st_size
    model = VanillaTransformerForConditionalGeneration.from_pretrained(trained).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained)
    output = model.generate(**tokenizer([PAIRS[0][0]], return_tensors="pt"))
    assert f"translates: {tokenizer.batch_decode(output, skip_special_tokens=True)[0]}" in shown


def test_second_push_is_a_no_op_and_keeps_edits(trained, at_hub):
    card = write_model_card(trained)
    card.write_text(card.read_text(encoding="utf-8") + "\nBy hand.\n", encoding="utf-8")
    first = push(trained, "me/toy", private=True)
    assert at_hub.repos["me/toy"].refs["main"][-1].files["README.md"].endswith(b"\nBy hand.\n")
    assert push(trained, "toy").oid == first.oid
    assert len(at_hub.repos["me/toy"].refs["main"]) == 2
    assert at_hub.repos["me/toy"].private
    push(trained, "me/open")
    assert not at_hub.repos["me/open"].private


def test_revision_message_and_token(trained, at_hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    for message in ("one", "two"):
        push(trained, "team/toy", revision="v2", commit_message=message, token="hf_write")
        edit(trained / "all_results.json", hardware=message)
    refs = at_hub.repos["team/toy"].refs
    assert [commit.message for commit in refs["v2"]] == ["initial commit", "one", "two"]
    assert len(refs["main"]) == 1
    assert b'\nrevision = "v2"' in refs["v2"][-1].files["README.md"]


def test_pull_request(trained, at_hub):
    at_hub.create("others/toy")
    commit = push(trained, "others/toy", create_pr=True)
    refs = at_hub.repos["others/toy"].refs
    assert len(refs["main"]) == 1 and "model.safetensors" in refs["refs/pr/1"][-1].files
    assert commit.pr_url.endswith("/others/toy/discussions/1")


def test_private_push_into_a_public_repository_is_refused(trained, at_hub):
    at_hub.create("me/toy", private=False)
    with pytest.raises(UserError, match="is public"):
        push(trained, "me/toy", private=True)
    assert len(at_hub.repos["me/toy"].refs["main"]) == 1


def test_old_weights_are_replaced(trained, at_hub):
    old = [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "model.safetensors",
    ]
    at_hub.create("me/toy", files=dict.fromkeys([*old, "samples.txt"], b"old"))
    push(trained, "me/toy")
    commits = at_hub.repos["me/toy"].refs["main"]
    assert len(commits) == 2
    assert set(commits[1].files) == {".gitattributes", "samples.txt", *FILES}
    assert commits[1].files["model.safetensors"] == (trained / "model.safetensors").read_bytes()


REFUSED = {
    "no token": (None, "me/toy", "hf auth login"),
    "unknown token": ("hf_wrong", "me/toy", "does not know the token"),
    "token that reads": ("hf_read", "me/toy", "can only read"),
    "other owner": ("hf_write", "others/toy", "no right to push to others/toy"),
    "two slashes": ("hf_write", "me/toy/one", "'me/toy/one' can be no repository's id"),
    "a space": ("hf_write", "my toy", "'my toy' can be no repository's id"),
}


@pytest.mark.parametrize("token, repo_id, message", REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_is_computed(trained, at_hub, monkeypatch, token, repo_id, message):
    monkeypatch.setattr(sharing, "check_model_directory", lambda folder: pytest.fail("something was computed"))
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=message):
        push(trained, repo_id)
    assert set(at_hub.requests) <= {"GET /api/whoami-v2"} and not (trained / "README.md").exists()


def test_check_token_returns_the_full_id(at_hub):
    assert check_token("toy") == check_token(output_dir="outputs/toy") == "me/toy"
    assert check_token("team/toy") == "team/toy"
    assert check_token("others/toy", token="hf_fine") == "others/toy"  # only the Hub knows


@pytest.mark.parametrize("part", ["/api/repos/create", "/preupload/", "/commit/", "/branch/"])
@pytest.mark.parametrize("status", [401, 403])
def test_no_right_at_the_hub(trained, at_hub, part, status):
    at_hub.refuse[part] = status
    with pytest.raises(UserError, match=rf"no right to push to me/toy .*{status}"):
        push(trained, "me/toy", revision="v2")
    assert all(len(commits) == 1 for repo in at_hub.repos.values() for commits in repo.refs.values())


def test_foreign_repository_with_a_fine_grained_token(trained, at_hub):
    with pytest.raises(UserError, match="no right to push to others/toy"):
        push(trained, "others/toy", token="hf_fine")


def test_no_network(trained, monkeypatch, hub):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="cannot be reached"):
        check_token("me/toy", token="hf_write")


def test_offline(at_hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        check_token("me/toy")


def test_hub_that_fails(trained, at_hub):
    at_hub.refuse["/commit/"] = 409
    with pytest.raises(UserError, match="me/toy: refused"):
        push(trained, "me/toy")


def test_script_says_what_is_wrong_in_one_line(tmp_path):
    said = run([SCRIPT, "toy"], tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert (said.returncode, said.stdout) == (2, "")
    lines = said.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("push_to_hub.py: error: ") and "HF_TOKEN" in lines[0]
