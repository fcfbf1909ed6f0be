"""A model's and a dataset's life on a Hub, on loopback: train.py, push_to_hub.py and those who come after, each in a
process of its own with the real client. Run: pytest -m slow tests/test_hub.py"""

import io
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from helpers import randomise
from hub_server import HANG_UP, HOLD, Commit, LoopbackHub, sha1
from huggingface_hub import ModelCard, parse_eval_result_entries
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel

from vanilla_transformer import Translator
from vanilla_transformer.conversion import from_marian

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TIMEOUT = 240  # seconds, of any child process
WORDS = {"a": "ein", "dog": "Hund", "man": "Mann", "sees": "sieht", "big": "großer", "the": "der", "not": "nicht"}
SENTENCES = ["a dog", "the big man sees"]
OPTIONS = "--source_lang en --target_lang de --per_device_train_max_tokens 200 --warmup_steps 4 --learning_rate 0.02"
OPTIONS = f"{OPTIONS} --max_steps 4 --save_steps 2".split()
SIZES = "--vocab_size 280 --d_model 16 --encoder_layers 1 --decoder_layers 1 --encoder_ffn_dim 24 --decoder_ffn_dim 24"
SIZES = f"{SIZES} --encoder_attention_heads 2 --decoder_attention_heads 2".split()
CODE = [f"{name}_vanilla_transformer.py" for name in ("configuration", "modeling", "generation", "pipeline")]
SHARED = [".eval_results/me_pairs.yaml", "README.md", "all_results.json", "config.json", "generation_config.json"]
SHARED += ["model.safetensors", "recipe.yaml", "tokenizer.json", "tokenizer_config.json", "training_curves.png", *CODE]
SHARED += ["attention.png"]


# -------------------------------------------------------------------------------------------------------- the datasets


def make_pairs() -> dict[str, list[dict[str, str]]]:
    generator = random.Random(0)
    splits = {}
    for split, count in [("train", 60), ("validation", 4), ("test", 5)]:
        chosen = [generator.choices(list(WORDS), k=generator.randint(1, 7)) for _ in range(count)]
        splits[split] = [{"en": " ".join(words), "de": " ".join(WORDS[word] for word in words)} for words in chosen]
    return splits


def as_parquet(rows: list[dict]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def as_jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(rows: list[dict]) -> bytes:
    return "".join(f"{row['en']},{row['de']}\n" for row in [{"en": "en", "de": "de"}, *rows]).encode()


CONFIGS = """---
configs:
- config_name: nested
  data_files: [{split: train, path: nested/train.jsonl}, {split: validation, path: nested/dev.jsonl}]
- config_name: flat
  data_dir: flat
---
"""


@pytest.fixture(scope="module")
def hub():
    """A Hub with datasets: `me/pairs`, which is private, `me/several`, and some that cannot be had."""
    pairs = make_pairs()
    several = {"README.md": CONFIGS.encode()}
    for split, rows in pairs.items():
        several[f"nested/{split.replace('validation', 'dev')}.jsonl"] = as_jsonl(
            [{"translation": row} for row in rows]
        )
        several[f"flat/{split}.jsonl"] = as_jsonl(rows)
    parquet = {f"data/{split}-00000-of-00001.parquet": as_parquet(rows) for split, rows in pairs.items()}
    with LoopbackHub() as server:
        server.create("datasets/me/pairs", private=True, files=parquet)
        server.create("datasets/me/several", files=several)
        server.create("datasets/me/plain", files={f"{split}.csv": as_csv(rows) for split, rows in pairs.items()})
        server.create("datasets/me/gated", files=parquet, gated=True)
        for name in ("fails", "hangs"):
            server.create(f"datasets/me/{name}", files=parquet)
        server.refuse |= {"/me/fails/resolve/": 500, "/me/hangs/resolve/": HANG_UP}
        yield server


# ------------------------------------------------------------------------------------------------- the child processes

# Runs scripts one after the other, as `python SCRIPT ...` does, in a process that imports what they need once, and for
# a user who says yes to whatever is asked. A record separator ends what each prints; on stdout its exit status stands
# before that.
IN_TURN = """
import io, json, os, runpy, sys
for script, argv, token in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    os.environ.update({"HF_TOKEN": token} if token else {})
    sys.argv, sys.stdin, status = [script, *argv], io.TextIOWrapper(io.BytesIO(b"yes\\n" * 9)), 0
    try:
        if script.endswith(".py"):
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    print("\\x1e", end="", file=sys.stderr, flush=True)
    print(f"\\x1f{status}\\x1e", end="", flush=True)
"""


class Child:
    """A Python process that talks to the Hub, with no token, cache or login but what it is given here."""

    def __init__(self, arguments, hub: LoopbackHub | str, folder: Path, token: str | None = "hf_write", **env: str):
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
        inherited |= {"HF_TOKEN": token} if token else {}
        home = folder / f"hf_home_{len(list(folder.glob('hf_home_*')))}"
        home.mkdir(parents=True)
        env = {"HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **env}
        env["OMP_WAIT_POLICY"] = "PASSIVE"  # the threads that train.py begins would fight for cores with other tests
        env |= {"HF_ENDPOINT": getattr(hub, "url", hub), "HF_HOME": str(home), "PYTHONIOENCODING": "utf-8"}
        self.printed = home / "stdout", home / "stderr"
        with open(self.printed[0], "w") as stdout, open(self.printed[1], "w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                env=inherited | env,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    def end(self) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        try:
            self.process.wait(TIMEOUT)
        finally:
            self.process.kill()
        return self.process.wait(), *(path.read_text(encoding="utf-8") for path in self.printed)


def run(arguments, hub, folder, **kwargs) -> tuple[int, str, str]:
    return Child(arguments, hub, folder, **kwargs).end()


def in_turn(runs: list[tuple[str, list[str], str | None]]) -> list[str]:
    """The arguments of a child process that runs scripts with arguments and a token."""
    paths = {name: str(ROOT / name) for name in ("train.py", "push_to_hub.py")}
    runs = [(paths.get(script, script), [str(argument) for argument in argv], token) for script, argv, token in runs]
    return ["-c", IN_TURN, json.dumps(runs)]


def each(stdout: str, stderr: str) -> list[tuple[str, str, str]]:
    """Status, stdout and stderr of the runs of [`in_turn`] that came to an end."""
    outputs = [part.split("\x1f") for part in stdout.split("\x1e")[:-1]]
    return [(status, out, said) for (out, status), said in zip(outputs, stderr.split("\x1e"), strict=False)]


def run_in_turn(runs, hub, folder, **kwargs) -> list[tuple[str, str, str]]:
    _, stdout, stderr = run(in_turn(runs), hub, folder, **kwargs)
    done = each(stdout, stderr)
    assert len(done) == len(runs), stderr
    return done


def one_sentence(script: str, result: tuple[str, str, str]) -> str:
    """The message of a run that failed, which must be one line of its own."""
    status, _, stderr = result
    assert status == "2" and "Traceback" not in stderr, stderr
    lines = [line for line in stderr.replace("\r", "\n").split("\n") if "error:" in line]
    assert len(lines) == 1 and lines[0].startswith(f"{script}: error: "), stderr
    return lines[0].removeprefix(f"{script}: error: ")


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------- trained on a Hub, pushed to it


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def pushed(hub, folder) -> Path:
    """The output directory of a run on the private dataset, which pushed its model to `me/model`."""
    argv = ["--dataset_name", "me/pairs", *OPTIONS, *SIZES, "--output_dir", folder / "model"]
    status, stdout, stderr = run(
        [ROOT / "train.py", *argv, "--push_to_hub", "--hub_model_id", "me/model"], hub, folder
    )
    assert status == 0, stderr
    commit = hub.repos["me/model"].at("main")
    assert f"It is on the Hub: {hub.url}/me/model/commit/{commit.oid}" in stdout
    return folder / "model"


def test_what_a_run_pushes(hub, pushed):
    refs = hub.repos["me/model"].refs
    commit = refs["main"][1]
    assert refs.keys() == {"main"} and len(refs["main"]) == 2
    assert sorted(commit.files) == sorted([".gitattributes", *SHARED]) and commit.lfs == {"model.safetensors"}
    assert (pushed / "checkpoint-4" / "optimizer.safetensors").exists()  # which stays here
    assert not any(str(pushed.parent).encode() in content for content in commit.files.values())
    for name in {*SHARED} - {"README.md", "recipe.yaml"}:
        assert commit.files[name] == (pushed / name).read_bytes(), name


def test_the_card_names_the_dataset_and_the_scores(hub, pushed):
    files = hub.repos["me/model"].refs["main"][1].files
    card = ModelCard(files["README.md"].decode())
    results = json.loads((pushed / "all_results.json").read_text(encoding="utf-8"))
    assert card.data.datasets == ["me/pairs"] and card.data.language == ["en", "de"]
    assert '\nmodel_id = "me/model"' in card.text
    found = {(r.dataset_type, r.dataset_split, r.metric_name): r.metric_value for r in card.data.eval_results}
    for prefix, split in [("eval", "validation"), ("test", "test")]:
        for key, name in [("bleu", "BLEU"), ("chrf", "chrF"), ("loss", "Loss")]:
            assert found["me/pairs", split, name] == round(results[f"{prefix}_{key}"], 4)
    recipe = yaml.safe_load(files["recipe.yaml"])
    assert recipe["dataset_name"] == "me/pairs" and recipe["output_dir"] == "model"


def test_evaluation_results(hub, pushed):
    files = hub.repos["me/model"].refs["main"][1].files
    entries = parse_eval_result_entries(yaml.safe_load(files[".eval_results/me_pairs.yaml"]))
    assert {entry.dataset_id for entry in entries} == {"me/pairs"}
    results = json.loads((pushed / "all_results.json").read_text(encoding="utf-8"))
    keys = [f"{prefix}_{metric}" for prefix in ("eval", "test") for metric in ("bleu", "chrf")]
    assert [entry.value for entry in entries] == [round(results[key], 4) for key in keys]
    assert len({entry.task_id for entry in entries}) == 4


# ------------------------------------------------------------------------------- other datasets, and what is refused

SEVERAL = ["--dataset_name", "me/several", "--dataset_config_name"]
PUSH = ["--push_to_hub", "--hub_model_id", "me/never"]
REFUSED = {  # options of train.py, the token, what is said
    "no token": (["--dataset_name", "me/untouched", *PUSH], None, ["There is no token", "hf auth login"]),
    "unknown token": (["--dataset_name", "me/untouched", *PUSH], "hf_x", ["does not know the token"]),
    "token that reads": (["--dataset_name", "me/untouched", *PUSH], "hf_read", ["can only read", "me/never"]),
    "other owner": (
        ["--dataset_name", "me/untouched", "--push_to_hub", "--hub_model_id", "others/model"],
        "hf_write",
        ["no right to push to others/model"],
    ),
    "no dataset": (["--dataset_name", "me/none"], "hf_write", ["me/none", "doesn't exist on the Hub"]),
    "no dataset to stream": (["--dataset_name", "me/none", "--streaming"], None, ["me/none", "doesn't exist"]),
    "private dataset": (["--dataset_name", "me/pairs"], None, ["me/pairs", "cannot be accessed"]),
    "gated dataset": (["--dataset_name", "me/gated"], "hf_read", ["me/gated", "is a gated dataset"]),
    "missing configuration": (["--dataset_name", "me/several"], None, ["nested", "flat"]),
    "unknown configuration": (
        ["--dataset_name", "me/several", "--dataset_config_name", "nestd"],
        None,
        ["nestd", "nested", "flat"],
    ),
    "no split": ([*SEVERAL, "flat", "--validation_split", "dev"], None, ["'dev'", "train, validation, test"]),
    "no language": ([*SEVERAL, "nested", "--streaming", "--target_lang", "fr"], None, ["fr", "me/several"]),
    "a Hub that fails": (["--dataset_name", "me/fails"], "hf_read", ["me/fails"]),
    "a Hub that hangs up": (["--dataset_name", "me/hangs"], "hf_read", ["me/hangs"]),
    "no Hub": (["--dataset_name", "me/pairs"], "hf_read", ["reach 'me/pairs' on the Hub"]),  # at another address
}


@pytest.fixture(scope="module")
def refused(hub, folder) -> dict[str, tuple[str, str, str]]:
    runs = {
        name: ("train.py", [*OPTIONS, *SIZES, *argv, "--output_dir", folder / "refused" / name], token)
        for name, (argv, token, _) in REFUSED.items()
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    alone = Child(in_turn([runs.pop("no Hub")]), nowhere, folder)  # it tries again and again, for half a minute
    done = dict(zip(runs, run_in_turn(runs.values(), hub, folder), strict=True))
    return done | {"no Hub": each(*alone.end()[1:])[0]}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_sentence(name, refused, hub, folder):
    message = one_sentence("train.py", refused[name])
    assert all(part in message for part in REFUSED[name][2]), message
    assert not on_disk(folder / "refused" / name)


@pytest.mark.parametrize("name", [name for name in REFUSED if "untouched" in str(REFUSED[name])])
def test_nothing_is_done_for_a_push_that_cannot_work(name, refused, hub, folder):
    assert refused[name][1] == ""
    assert not any("untouched" in request for request in hub.requests)
    assert "me/never" not in hub.repos
    assert not (folder / "refused" / name).exists()


TRAINED = {
    "stream": (["--dataset_name", "me/pairs", "--streaming"], "'en' to column 'de'"),
    "nested": ([*SEVERAL, "nested"], "'translation / en' to column 'translation / de'"),
    "plain": (["--dataset_name", "me/plain"], "'en' to column 'de'"),
    "flat": ([*SEVERAL, "flat", "--streaming", "--push_to_hub", "--hub_model_id", "me/later"], "'en' to column 'de'"),
}


@pytest.fixture(scope="module")
def trained(hub, folder) -> dict[str, tuple[str, str, str]]:
    """Runs on the other datasets, and one whose token is revoked while it trains: its second use is refused."""
    hub.refuse["GET /api/whoami-v2"] = [200, 401]
    runs = [
        ("train.py", [*OPTIONS, *SIZES, *argv, "--output_dir", folder / name], "hf_write")
        for name, (argv, _) in TRAINED.items()
    ]
    done = run_in_turn(runs, hub, folder)
    del hub.refuse["GET /api/whoami-v2"]
    return dict(zip(TRAINED, done, strict=True))


@pytest.mark.parametrize("name", ["stream", "nested", "plain"])
def test_datasets_of_the_hub_train(name, trained, folder):
    status, stdout, stderr = trained[name]
    assert status == "0", stderr
    assert TRAINED[name][1] in stdout and ("test: 5 pairs" in stdout) == (name != "nested")
    assert ("train: a stream" if name == "stream" else "train: 60 pairs") in stdout
    results = json.loads((folder / name / "all_results.json").read_text(encoding="utf-8"))
    assert (results["train_steps"], results["dataset"]) == (4, TRAINED[name][0][1])
    card = ModelCard.load(folder / name / "README.md")
    configs = {result.dataset_config for result in card.data.eval_results}
    assert configs == ({"nested"} if name == "nested" else {None})


def test_datasets_are_read_as_they_were_written(trained, folder):
    """The same pairs, by parquet, JSON and CSV, make the same tokenizer."""
    tokenizers = {(folder / name / "tokenizer.json").read_bytes() for name in TRAINED}
    assert len(tokenizers) == 1


def test_a_token_that_is_revoked_in_training_loses_nothing(trained, hub, folder):
    message = one_sentence("train.py", trained["flat"])
    assert "does not know the token" in message
    assert "me/later" not in hub.repos
    there = {name.replace("several", "pairs") for name in on_disk(folder / "flat")}
    assert {*SHARED, "checkpoint-4/optimizer.safetensors"} <= there
    assert f"push_to_hub.py {folder / 'flat'}" in message


# ------------------------------------------------------------------------------------------------------ a Marian model


def test_a_marian_model_of_the_hub_is_begun_from(marian, hub, folder):
    """From safetensors; a pickle is neither read nor given to anybody to be converted."""
    whole = {path.name: path.read_bytes() for path in marian.iterdir()}
    pickle = io.BytesIO()
    torch.save(load_file(marian / "model.safetensors"), pickle)
    hub.create("me/opus-mt", files=whole)
    pickled = {name: content for name, content in whole.items() if name != "model.safetensors"}
    hub.create("me/opus-mt-pickle", files=pickled | {"pytorch_model.bin": pickle.getvalue()})
    argv = [*OPTIONS, "--dataset_name", "me/plain", "--learning_rate", "0", "--model_name_or_path"]
    runs = [
        ("train.py", [*argv, f"me/{name}", "--output_dir", folder / name], None)
        for name in ("opus-mt", "opus-mt-pickle")
    ]
    trained, refused = run_in_turn(runs, hub, folder)
    assert trained[0] == "0", trained[2]
    expected = from_marian(MarianMTModel.from_pretrained(marian)).state_dict()
    found = AutoModelForSeq2SeqLM.from_pretrained(folder / "opus-mt").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert ModelCard.load(folder / "opus-mt" / "README.md").data.base_model == "me/opus-mt"
    message = one_sentence("train.py", refused)
    assert "`vanilla-transformer convert me/opus-mt-pickle NEW_DIR`" in message
    asked = [request for request in hub.requests if "opus-mt-pickle" in request]
    assert asked and not any("pytorch_model.bin" in request or "/commits/" in request for request in asked)


# ------------------------------------------------------------------------------------------ pushed again, and cut off


@pytest.fixture(scope="module")
def changed(pushed, folder) -> Path:
    """The directory with other weights."""
    copy = shutil.copytree(pushed, folder / "changed")
    torch.manual_seed(1)
    randomise(AutoModelForSeq2SeqLM.from_pretrained(copy)).save_pretrained(copy)
    return copy


@pytest.fixture(scope="module")
def pushes(pushed, changed, hub, folder) -> list[tuple[str, str, str]]:
    """What is in `me/model` is pushed there again. Then another model: the connection is closed in the midst of its
    weights and the server out of order; the commit fails; the client is killed in the midst of the weights."""
    breakdown = {"PUT /lfs/": [HANG_UP, *[500] * 5, 200, HOLD], "/commit/": 500}
    hub.refuse |= breakdown
    runs = [("push_to_hub.py", [path, "--repo_id", "me/model"], "hf_write") for path in [pushed, *[changed] * 3]]
    child = Child(in_turn(runs), hub, folder)
    is_held = hub.holds.wait(TIMEOUT)
    child.process.kill()
    _, stdout, stderr = child.end()
    hub.go_on.set()
    assert is_held, stderr
    for part in breakdown:
        del hub.refuse[part]
    done = each(stdout, stderr)
    assert len(done) == len(runs) - 1
    assert len(hub.repos["me/model"].refs["main"]) == 2  # the first, and that of train.py
    return done


def test_the_same_directory_again_is_no_commit(pushes, hub):
    """Pushed by train.py and then by push_to_hub.py."""
    status, stdout, stderr = pushes[0]
    assert status == "0", stderr
    assert f"{hub.url}/me/model/commit/{hub.repos['me/model'].refs['main'][1].oid}" in stdout
    assert "No files have been modified" in stderr


def test_an_upload_that_is_cut_off_publishes_nothing(pushes, hub):
    """That of the client that was killed neither; [`pushes`] sees what there is after it."""
    for result, part in zip(pushes[1:], ["model.safetensors", "refused"], strict=True):
        message = one_sentence("push_to_hub.py", result)
        assert "me/model" in message and part in message


@pytest.fixture(scope="module")
def pushed_later(pushes, changed, trained, hub, folder):
    """What could not be pushed before, with Xet on."""
    hub.lfs_suffixes = ()
    runs = [("push_to_hub.py", [path], "hf_write") for path in (changed, folder / "flat")]
    runs[0][1].extend(["--repo_id", "me/model"])
    for status, _, stderr in run_in_turn(runs, hub, folder, HF_HUB_DISABLE_XET="0"):
        assert status == "0", stderr


def test_what_was_cut_off_goes_up_the_next_time(pushed_later, changed, hub):
    commits = hub.repos["me/model"].refs["main"]
    assert len(commits) == 3 and commits[2].files.keys() == commits[1].files.keys()
    assert commits[2].files["model.safetensors"] == (changed / "model.safetensors").read_bytes()
    names = {name.replace("several", "pairs") for name in hub.repos["me/flat"].refs["main"][1].files}
    assert names == {".gitattributes", *SHARED}


@pytest.mark.parametrize("repo_id", ["me/model", "me/flat"])
def test_no_pickle_optimiser_or_checkpoint_is_ever_sent(repo_id, pushed_later, hub):
    sent = {name for commit in hub.repos[repo_id].refs["main"] for name in commit.files}
    assert "model.safetensors" in sent
    assert not re.search(r"optimizer|checkpoint|trainer_state|\.(bin|pt|pth|pkl|ckpt)\b", " ".join(sent))
    weights = [commit.files["model.safetensors"] for commit in hub.repos[repo_id].refs["main"][1:]]
    assert not any(b"exp_avg" in content[:100_000] for content in weights)


# ------------------------------------------------------------------------------------------------- what a visitor does

# Loads revisions of `me/model` where there is no package: `None` in `sys.modules` makes every import of it fail.
VISIT = """
import json, sys
from pathlib import Path
sys.modules["vanilla_transformer"] = None
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
task = json.loads(sys.argv[1])
done = {}
for name, repo_id, options in task["loads"]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(repo_id, **options)
        model = AutoModelForSeq2SeqLM.from_pretrained(repo_id, **options)
        inputs = tokenizer(task["sentences"], padding=True, return_tensors="pt")
        logits = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
        done[name] = [logits.double().sum().item(), tokenizer.batch_decode(model.generate(**inputs))]
        piped = pipeline("vanilla-translation", model=repo_id, **options)(task["sentences"])
        done[name].append([output["translation_text"] for output in piped])
    except Exception as error:
        done[name] = [f"{type(error).__name__}: {error}"]
    done[name].append(Path(task["marker"]).exists())
print(json.dumps(done))
"""


def translated(folder: Path) -> list:
    """What [`VISIT`] finds, of a local directory and in this process."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    logits = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    piped = Translator(model, tokenizer)(SENTENCES)
    return [logits.double().sum().item(), tokenizer.batch_decode(model.generate(**inputs)), piped]


def marking(code: bytes, marker: Path) -> bytes:
    """The code, which also leaves a mark where it is imported."""
    return f"open({str(marker)!r}, 'a').write(__file__)\n".encode() + code


@pytest.fixture(scope="module")
def marker(hub, pushed, folder) -> Path:
    """The file that the code in `me/marking` and `me/foreign` leaves, if ever it is run."""
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


@pytest.fixture(scope="module")
def visited(pushed_later, marker, hub, folder) -> dict[str, list]:
    commits = hub.repos["me/model"].refs["main"]
    broken = dict.fromkeys(CODE, b"raise RuntimeError('broken')\n")
    commits.append(Commit(sha1(b"broken"), "broken", commits[-1].files | broken))
    loads = [(name, "me/model", commits[i].oid) for name, i in [("first", 1), ("second", 2), ("broken", 3)]]
    loads = [(name, repo, {"revision": oid, "trust_remote_code": True}) for name, repo, oid in loads]
    loads.append(("main", "me/model", {"trust_remote_code": True}))
    loads += [(f"trust {trust}", "me/marking", {"trust_remote_code": trust}) for trust in (False, True)]
    task = {"loads": loads, "sentences": SENTENCES, "marker": str(marker)}
    status, stdout, stderr = run(["-I", "-c", VISIT, json.dumps(task)], hub, folder, token=None)
    assert status == 0, stderr
    marker.unlink(missing_ok=True)
    return json.loads(stdout.splitlines()[-1])


def test_a_visitor_translates_as_its_maker(visited, pushed, changed):
    assert visited["first"] == [*translated(pushed), False]
    assert visited["second"] == [*translated(changed), False]
    assert visited["first"] != visited["second"]


def test_a_pinned_revision_has_its_own_code(visited, hub):
    """`first` is loaded after main is broken."""
    for name in ("broken", "main"):
        assert visited[name] == ["RuntimeError: broken", False]
    first = hub.repos["me/model"].refs["main"][1].oid
    for name in ("model.safetensors", *CODE):
        assert f"GET /me/model/resolve/{first}/{name}" in hub.requests


def test_no_code_runs_without_trust(visited):
    error, is_marked = visited["trust False"]
    assert "contains custom code" in error and "trust_remote_code=True" in error and not is_marked
    assert visited["trust True"][-1]  # so the mark is one


# ------------------------------------------------------------------------------------------------ where the package is

LOAD_LOCALLY = """
import sys
import vanilla_transformer
from transformers import AutoModelForSeq2SeqLM
print(type(AutoModelForSeq2SeqLM.from_pretrained("me/marking")).__module__)
"""


@pytest.fixture(scope="module")
def at_home(hub, marker, pushed, folder) -> list[tuple[str, str, str]]:
    """What this package does with models of the Hub, for a user who says yes to whatever is asked."""
    script = folder / "load_locally.py"
    script.write_text(LOAD_LOCALLY)
    few = ["--max_steps", "1", "--max_train_samples", "20", "--max_eval_samples", "1", "--max_predict_samples", "1"]
    argv = ["--dataset_name", "me/pairs", *OPTIONS, *few]
    foreign = [*argv, "--output_dir", folder / "foreign"]
    runs = [
        (str(script), []),
        ("train.py", [*argv, "--model_name_or_path", "me/marking", "--output_dir", folder / "tuned"]),
        ("vanilla_transformer", ["translate", "--model", "me/marking"]),
        ("vanilla_transformer", ["translate", "--model", "me/foreign"]),
        ("train.py", [*foreign, "--tokenizer_name", "me/foreign", *SIZES[2:]]),
        ("train.py", [*foreign, "--model_name_or_path", "me/foreign"]),
    ]
    return run_in_turn([(script, argv, "hf_read") for script, argv in runs], hub, folder)


def test_the_package_runs_its_own_code(at_home):
    for status, _, stderr in at_home[:3]:
        assert status == "0", stderr
    assert at_home[0][1].split() == ["vanilla_transformer.modeling_vanilla_transformer"]
    assert len(at_home[2][1].splitlines()) == 9  # translated, and not answers to a question


def test_the_code_of_others_is_never_run(at_home, marker):
    assert not marker.exists()
    assert "me/foreign cannot be loaded" in at_home[3][0]
    for result in at_home[4:]:
        assert "me/foreign" in one_sentence("train.py", result)


def test_nobody_is_asked_whether_to_run_it(at_home):
    assert not any("[y/N]" in stdout + stderr for _, stdout, stderr in at_home)
