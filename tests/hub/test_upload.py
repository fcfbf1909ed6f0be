"""Checks of a model directory, and pushes of it to a Hub on loopback."""

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import LoopbackHub, run_python
from published import CODE, FILES, PAIRS, edit
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, MarianTokenizer

import push_to_hub
from vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from vanilla_transformer.errors import UserError
from vanilla_transformer.hub import upload
from vanilla_transformer.hub.model_card import write_model_card
from vanilla_transformer.hub.upload import check_push, push, staged, translate_in_fresh_process

SCRIPT = Path(push_to_hub.__file__)


# ------------------------------------------------------------------------------------------------- the model directory


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def write(name, text="x"):
    return lambda folder: (folder / name).write_text(text)


BROKEN = {
    "no directory": (shutil.rmtree, "config.json cannot be read: [Errno 2]"),
    "no config": (remove("config.json"), "config.json'; name the --output_dir of a finished training run."),
    "damaged config": (write("config.json", "{"), "config.json cannot be read"),
    "config that is a list": (write("config.json", "[]"), "config.json cannot be read"),
    "foreign config": (write("config.json", '{"model_type": "marian"}'), "of type marian, not vanilla_transformer"),
    "no results": (remove("all_results.json"), "all_results.json'; name the --output_dir"),
}


@pytest.mark.parametrize("breakage, message", BROKEN.values(), ids=BROKEN)
def test_broken_directory_is_refused(trained, breakage, message):
    breakage(trained)
    with pytest.raises(UserError, match=re.escape(message)) as error, staged(trained):
        pass
    assert "\n" not in str(error.value) and str(trained) in str(error.value)


def rename_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights["größe"] = weights.pop("model.encoder.layers.0.fc1.bias")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def import_the_package(folder):
    path = folder / "configuration_vanilla_transformer.py"
    path.write_text("from vanilla_transformer.errors import UserError\n" + path.read_text())


BREAKAGES = [
    (import_the_package, "vanilla_transformer"),
    (lambda folder: edit(folder / "config.json", auto_map={}), "model type `vanilla_transformer`"),
    (remove("loss_vanilla_transformer.py"), "loss_vanilla_transformer.py"),
    (remove("model.safetensors"), "model.safetensors.*save model and tokenizer again"),
]
BREAKAGES += [(rename_a_weight, "missing_keys.*model.encoder.layers.0.fc1.bias.*unexpected_keys.*größe")]


@pytest.mark.slow
@pytest.mark.parametrize("breakage, message", BREAKAGES)
def test_directory_that_does_not_load_is_refused(trained, breakage, message, monkeypatch):
    """The reason may have letters that are not encoded as here."""
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    breakage(trained)
    with pytest.raises(UserError, match=f"^toy does not load in a fresh process: .*{message}"):
        translate(trained)


def translate(folder) -> str:
    """What the fresh process says that a push would start if the code in the folder is trusted."""
    with staged(folder, trust_remote_code=True) as published:
        return translate_in_fresh_process(published)


@pytest.mark.slow
def test_trusted_code_gets_no_token_of_the_hub(trained, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hunter2")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
    for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]:
        monkeypatch.setenv(name, "hunter2")
    spy = "import json, os\nfrom huggingface_hub import get_token\n"
    spy += f"json.dump([get_token(), dict(os.environ)], open({str(tmp_path / 'found')!r}, 'w'))\n"
    code = trained / "configuration_vanilla_transformer.py"
    code.write_text(spy + code.read_text())
    assert translate(trained) != ""
    token, environment = json.loads((tmp_path / "found").read_text())
    assert token is None and environment["PATH"] == os.environ["PATH"]
    assert "hunter2" not in str(environment) and str(tmp_path / "home") not in str(environment)


ELSEWHERE = [
    ("config.json", "auto_map", {"AutoModel": "stranger/repo--evil.M"}),
    ("config.json", "custom_pipelines", {"vanilla-translation": {"impl": "stranger/repo--evil.P"}}),
    ("tokenizer_config.json", "auto_map", {"AutoTokenizer": [None, "/elsewhere/evil.T"]}),
]


@pytest.mark.filterwarnings("ignore")
def test_code_that_is_not_of_this_package_is_neither_run_nor_published(trained):
    """It is replaced, as that of an older version, and so is code elsewhere that a config names."""
    expected, native = published(trained), published(trained, native=True)
    for name, key, value in ELSEWHERE:
        edit(trained / name, **{key: value})
    for name in CODE:
        (trained / name).write_text("raise SystemExit('evil')\n")
    changed = [*CODE, "config.json", "tokenizer_config.json"]
    with pytest.warns(UserWarning, match=f"toy: {', '.join(changed)} had or named other code than this package's"):
        files = published(trained)
    for name in files:
        assert files[name] == expected[name] or json.loads(files[name]) == json.loads(expected[name])
    assert files.keys() == expected.keys() and b"evil" not in b"".join(files.values())
    trusted = published(trained, trust_remote_code=True)
    assert [trusted[name].count(b"evil") for name in changed] == [1] * len(CODE) + [2, 1]
    files = published(trained, native=True)
    assert b"evil" not in b"".join(files.values()) and files.keys() == native.keys()


def test_trusted_code_is_pushed(trained, at_hub):
    code = trained / CODE[0]
    code.write_text(code.read_text() + "# changed\n")
    push_to_hub.main([str(trained), "--repo_id", "me/toy", "--trust_remote_code"])
    assert at_hub.repos["me/toy"].at("main").files[code.name].endswith(b"# changed\n")


@pytest.mark.slow
def test_links_are_published_as_the_files_they_lead_to(trained, tmp_path, capsys):
    """As in the cache of the Hub, whose snapshots are links; a file that is linked by hand is named."""
    expected, blobs = published(trained), tmp_path / "blobs"
    blobs.mkdir()
    for path in filter(Path.is_file, trained.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("..", "blobs", path.name))
    (trained / "custom").symlink_to(blobs)
    assert published(trained) == expected
    push_to_hub.main([str(trained), "--dry_run"])
    assert f"model.safetensors is a link to {blobs.resolve()}/model.safetensors" in capsys.readouterr().out


def published(folder, *args, **options) -> dict[str, bytes]:
    """The files that a push would send."""
    with staged(folder, *args, **options) as staging:
        return {path.name: path.read_bytes() for path in sorted(staging.iterdir())}


def test_what_is_published(trained):
    (trained / "pytorch_model.bin").write_text("a pickle")
    files = published(trained, "me/other")
    assert list(files) == FILES
    assert b"somebody" not in files["all_results.json"] + files["recipe.yaml"] + files["README.md"]
    assert b'\nmodel_id = "me/other"' in files["README.md"]
    recipe = yaml.safe_load(files["recipe.yaml"])
    assert (recipe["dataset_name"], recipe["output_dir"]) == ("pairs", "toy")
    assert b"somebody" in (trained / "recipe.yaml").read_bytes()  # the files on disk do not change
    edit(trained / "recipe.yaml", train_file=["data/train.jsonl", "bt.txt"], dataset_name="me/pairs")
    edit(trained / "recipe.yaml", teacher=[str(trained), "me/teacher"])
    recipe = yaml.safe_load(published(trained)["recipe.yaml"])
    assert (recipe["dataset_name"], recipe["train_file"]) == ("me/pairs", ["train.jsonl", "bt.txt"])
    assert recipe["teacher"] == [trained.name, "me/teacher"]
    edit(trained / "recipe.yaml", train_file=["hf://datasets/me/pairs/a.tsv", "https://me:secret@host/b.tsv"])
    recipe = yaml.safe_load(published(trained)["recipe.yaml"])
    assert recipe["train_file"] == ["hf://datasets/me/pairs/a.tsv", "b.tsv"]


def test_sentences_of_a_finished_run_can_be_left_out(trained):
    """As docs/publishing.md says."""
    sentences = [text.split("\n")[0].encode() for pair in PAIRS for text in pair]
    write_model_card(trained)
    assert all(sentence in published(trained)["README.md"] for sentence in sentences)
    edit(trained / "all_results.json", examples=[])
    for name in ("README.md", "attention.png"):
        (trained / name).unlink()
    files = published(trained)
    assert list(files) == [name for name in FILES if name != "attention.png"]
    shown = files["README.md"] + files["all_results.json"]
    assert not any(sentence in shown for sentence in sentences) and b"![Attention" not in shown


NEIGHBOURS = """secrets.py tokenization_vanilla_transformer.py notes.model corpus.spm vocab.txt .env id_rsa notes.md
training_args.bin pytorch_model.bin model.pt vectors.npy optimizer.safetensors model-00001-of-00002.safetensors
all_results.json.bak holiday.png other.yaml checkpoint-7/model.safetensors custom_generate/generate.py .git/config
added_tokens.json/inside"""


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": True}, {"native": True}], ids=str)
def test_no_neighbour_of_the_model_is_published(trained, options):
    for name in NEIGHBOURS.split():
        (trained / name).parent.mkdir(exist_ok=True)
        (trained / name).write_text("hunter2")
    files = published(trained, **options)
    assert list(files) == [name for name in FILES if not (name.endswith(".py") and "native" in options)]
    assert b"hunter2" not in b"".join(files.values())


def test_files_of_a_sentencepiece_tokenizer_are_published(trained, marian):
    """By the names that its class gives, and no others like them."""
    (trained / "tokenizer.json").unlink()
    MarianTokenizer.from_pretrained(marian).save_pretrained(trained)
    shutil.copy(marian / "source.spm", trained / "private.spm")
    named = {"source.spm", "target.spm", "vocab.json", "tokenizer_config.json"}
    assert published(trained).keys() == {*FILES} - {"tokenizer.json"} | named


def test_the_same_is_published_where_links_are_not_allowed(trained, monkeypatch):
    """As on Windows, whose error this is."""

    def refuse(*_, **__):
        raise OSError(22, "A required privilege is not held by the client")

    expected = published(trained)
    monkeypatch.setattr(os, "symlink", refuse)
    assert published(trained) == expected


# ---------------------------------------------------------------------------------------------- with a Hub on loopback


@pytest.fixture
def hub():
    with LoopbackHub() as server:
        yield server


@pytest.fixture
def at_hub(hub, monkeypatch, tmp_path):
    """The client of this process talks to the loopback Hub, as a user who may write; directories are not checked."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setattr(upload, "translate_in_fresh_process", lambda *_: "")
    return hub


@pytest.mark.slow
def test_native_form_is_published(trained, hub, tmp_path):
    """Its card runs in a fresh process without remote code, and translates as our model does."""
    trained.rename(tmp_path / "model")
    hub.create("me/toy", files={"modeling_vanilla_transformer.py": b"of an earlier push"})
    pushed = run_python([SCRIPT, "model", "--repo_id", "me/toy", "--native"], tmp_path, hub.url, "hf_write")
    assert pushed.returncode == 0, pushed.stderr
    files = hub.repos["me/toy"].at("main").files
    assert sorted(files) == sorted([".gitattributes", *(name for name in FILES if not name.endswith(".py"))])
    assert json.loads(files["config.json"])["model_type"] == "marian"
    card = files["README.md"].decode()
    assert "`MarianMTModel`" in card and "trust_remote_code" not in card and "pipeline" not in card.split("---\n")[2]
    assert not any(b"somebody" in content for content in files.values())
    assert "trust_remote_code" in (tmp_path / "model" / "README.md").read_text()  # that of the directory stays
    code = re.search(r"(?ms)^```python\n(.*?)^```$", card).group(1)
    shown = run_python(["-c", f"import sys\nsys.modules['vanilla_transformer'] = None\n{code}"], tmp_path, hub.url)
    assert shown.returncode == 0, shown.stderr
    ours = Translator.from_pretrained(tmp_path / "model")
    inputs = ours.tokenizer([PAIRS[0][0]], return_tensors="pt")
    expected = ours.tokenizer.batch_decode(ours.model.generate(**inputs), skip_special_tokens=True)
    assert shown.stdout.strip() == str(expected)


def test_model_without_native_form_is_refused_before_anything_is_sent(trained, at_hub):
    edit(trained / "config.json", position_embedding_type="rotary")
    with pytest.raises(UserError, match="position_embedding_type='rotary'` cannot be converted"):
        push(trained, "me/toy", native=True)
    assert at_hub.requests == ["GET /api/whoami-v2"]


@pytest.mark.slow
def test_pushed_model_loads_as_it_was(trained, hub, tmp_path):
    pushed = run_python([SCRIPT, "toy", "--private"], tmp_path, hub.url, "hf_write")
    assert pushed.returncode == 0, pushed.stderr
    commits = hub.repos["me/toy"].refs["main"]
    assert [commit.message for commit in commits] == ["initial commit", "Upload a trained Transformer"]
    assert f"{hub.url}/me/toy/commit/{commits[1].oid}" in pushed.stdout
    assert sorted(commits[1].files) == sorted([".gitattributes", *FILES])
    assert hub.repos["me/toy"].private
    assert not any(b"somebody" in content for content in commits[1].files.values())

    # Run the code of both cards, on disk and on the Hub, where the package is not installed.
    cards = (trained / "README.md").read_text(encoding="utf-8"), commits[1].files["README.md"].decode()
    code = "import sys, torch\nsys.modules['vanilla_transformer'] = None\n"
    for name, card in zip(("disk", "hub"), cards, strict=True):
        code += re.search(r"(?ms)^```python\n(.*?)^```$", card).group(1)
        code += f"torch.save(model(**inputs, decoder_input_ids=inputs.input_ids).logits, '{name}.pt')\n"
    shown = run_python(["-c", code], tmp_path, hub.url, "hf_read")
    assert shown.returncode == 0, shown.stderr
    assert f"GET /me/toy/resolve/{commits[1].oid}/model.safetensors" in hub.requests

    model = VanillaTransformerForConditionalGeneration.from_pretrained(trained).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained)
    source = json.loads((trained / "all_results.json").read_text())["examples"][0]["source"]
    inputs = tokenizer([source], return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=inputs.input_ids).logits
    for name in ("disk", "hub"):
        assert torch.equal(torch.load(tmp_path / f"{name}.pt"), logits)
    texts = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    (translated,) = Translator(model, tokenizer)([source])
    assert shown.stdout.splitlines() == [str([{"translation_text": translated}]), str(texts)] * 2


def test_dry_run_sends_nothing(trained, at_hub, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(push_to_hub, "translate_in_fresh_process", lambda *_: "Hund")
    push_to_hub.main([str(trained), "--dry_run", "--repo_id", "me/toy"])
    shown = capsys.readouterr().out
    assert at_hub.requests == [] and (trained / "README.md").exists() and "and translates: Hund" in shown
    listed = {path: int(size.replace(",", "")) for size, path in re.findall(r"(?m)^ *([\d,]+)  (\S+)$", shown)}
    assert sorted(listed) == FILES
    assert listed["model.safetensors"] == (trained / "model.safetensors").stat().st_size


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


def test_revision_and_message(trained, at_hub):
    for message in ("one", "two"):
        push(trained, "team/toy", revision="v2", commit_message=message)
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


def test_private_push_to_a_public_repository_is_refused(trained, at_hub):
    at_hub.create("me/toy", private=False)
    with pytest.raises(UserError, match="^me/toy is public; make it private on the Hub, or choose another name.$"):
        push(trained, "me/toy", private=True)
    assert len(at_hub.repos["me/toy"].refs["main"]) == 1


def test_what_an_earlier_push_left_is_deleted_and_nothing_else(trained, at_hub):
    old = ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "attention.png"]
    old += ["pipeline_vanilla_transformer.py"]
    theirs = ["samples.txt", "train_transformer.py", "model-q4.bin", "LICENSE"]
    at_hub.create("me/toy", files=dict.fromkeys([*old, *theirs, "model.safetensors"], b"old"))
    (trained / "attention.png").unlink()
    push(trained, "me/toy")
    commits = at_hub.repos["me/toy"].refs["main"]
    assert len(commits) == 2
    assert set(commits[1].files) == {".gitattributes", *theirs, *FILES} - {"attention.png"}
    assert commits[1].files["model.safetensors"] == (trained / "model.safetensors").read_bytes()


REFUSED = {
    "no token": (None, "me/toy", "hf auth login"),
    "unknown token": ("hf_wrong", "me/toy", "token .* is invalid.*hf auth login"),
    "two slashes": ("hf_write", "me/toy/one", "Cannot push to me/toy/one: Repo id must"),
    "a space": ("hf_write", "my toy", "Cannot push to my toy: Repo id must"),
}


@pytest.mark.parametrize("token, repo_id, message", REFUSED.values(), ids=REFUSED)
def test_push_is_refused_before_anything_is_computed(trained, at_hub, monkeypatch, token, repo_id, message):
    monkeypatch.setattr(upload, "staged", lambda *args: pytest.fail("something was computed"))
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=message) as error:
        push(trained, repo_id)
    assert "\n" not in str(error.value)
    assert set(at_hub.requests) <= {"GET /api/whoami-v2"} and not (trained / "README.md").exists()


FAILING = list(itertools.product(["/api/repos/create", "/preupload/", "/commit/", "/branch/"], [401, 403]))


@pytest.mark.parametrize("part, status", [*FAILING, ("/preupload/", 409), ("/commit/", 409)])
def test_error_of_the_hub_is_one_sentence(trained, at_hub, part, status):
    at_hub.refuse[part] = status
    with pytest.raises(UserError, match=f"Cannot push to me/toy: .*{status}") as error:
        push(trained, "me/toy", revision="v2")
    assert ("hf auth login" in str(error.value)) == (status != 409) and "\n" not in str(error.value)
    command = f"python push_to_hub.py {trained} --repo_id me/toy --revision v2"
    assert str(error.value).endswith(f"The model is complete in {trained}; push it later with `{command}`.")
    assert all(len(commits) == 1 for repo in at_hub.repos.values() for commits in repo.refs.values())


def test_a_private_push_is_not_repeated_in_public(trained, at_hub):
    """By the command that the message of a failed one gives."""
    at_hub.refuse["/commit/"] = 409
    code = trained / CODE[0]
    code.write_text(code.read_text() + "# changed\n")
    with pytest.raises(UserError, match="--repo_id me/toy --private --trust_remote_code`"):
        push(trained, "me/toy", private=True, trust_remote_code=True)


def test_a_private_push_refuses_a_public_space_before_it_pushes_the_model(trained, at_hub):
    at_hub.create("spaces/me/demo", private=False)
    with pytest.raises(UserError, match="me/demo is public"):
        push_to_hub.main([str(trained), "--repo_id", "me/toy", "--space", "me/demo", "--private"])
    assert "me/toy" not in at_hub.repos


def test_no_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    with pytest.raises(UserError, match="Cannot push to me/toy: .*[Cc]onnect"):
        check_push("me/toy")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="offline"):
        check_push("me/toy")
