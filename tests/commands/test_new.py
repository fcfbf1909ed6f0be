"""`new` makes a directory to train in, and `train` says how."""

import json
import re
import tomllib

import pytest
from helpers import ROOT, command_error

from vanilla_transformer.__main__ import main
from vanilla_transformer.commands.new import requirement
from vanilla_transformer.training.recipe import parse_arguments

SCRIPTS = ["train.py", "push_to_hub.py"]


def metadata(script: str) -> dict:
    """The inline metadata at the top of a script."""
    (block,) = re.findall(r"(?s)^# /// script\n(.*?)^# ///\n", script, re.MULTILINE)
    return tomllib.loads(block.replace("# ", ""))


@pytest.fixture
def mine(tmp_path, capsys):
    main(["new", str(tmp_path / "on my" / "way")])
    assert "cd '" + str(tmp_path / "on my" / "way'\n  accelerate launch train.py ") in capsys.readouterr().out
    return tmp_path / "on my" / "way"


def test_new_directory_has_what_training_needs_and_no_more(mine):
    sample = [f"sample_dataset/{split}.jsonl" for split in ("train", "validation", "test")]
    recipes = [path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml")]
    made = {path.relative_to(mine).as_posix(): path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    assert made.keys() == {*SCRIPTS, *sample, *recipes}
    assert made == {name: made[name] if name in SCRIPTS else (ROOT / name).read_bytes() for name in made}


def test_the_sample_recipe_is_that_of_the_new_directory(mine, monkeypatch):
    monkeypatch.chdir(mine)
    recipe = mine / "recipes" / "sample.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("dropout: 0.05 ", "dropout: 0.25 "), encoding="utf-8")
    assert parse_arguments([]).model.dropout == 0.25


@pytest.mark.parametrize("name", SCRIPTS)
def test_uv_runs_the_scripts_with_the_package_of_the_checkout(name, mine):
    original, copy = (folder.joinpath(name).read_text(encoding="utf-8") for folder in (ROOT, mine))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = {"path": ".", "editable": True}
    found = {"requires-python": project["requires-python"], "dependencies": ["vanilla-transformer"]}
    assert metadata(original) == found | {"tool": {"uv": {"sources": {"vanilla-transformer": package}}}}
    package["path"] = ROOT.as_posix()
    assert metadata(copy) == found | {"tool": {"uv": {"sources": {"vanilla-transformer": package}}}}
    assert copy.partition("# ///\n")[2] == original.partition("# ///\n")[2]


ORIGINS = {
    "an index": (None, "vanilla-transformer==7.5"),
    "a wheel": ({"url": "file:///a%20b/x.whl", "archive_info": {}}, "vanilla-transformer @ file:///a%20b/x.whl"),
    "a folder": ({"url": "file:///a/b", "dir_info": {}}, "vanilla-transformer @ file:///a/b"),
    "a repository": (
        {"url": "https://example.org/x", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
        "vanilla-transformer @ git+https://example.org/x@c0ffee",
    ),
}


@pytest.mark.parametrize(("origin", "expected"), ORIGINS.values(), ids=ORIGINS)
def test_scripts_ask_for_the_package_from_where_it_was_installed(origin, expected, tmp_path, monkeypatch):
    info = tmp_path / "vanilla_transformer-7.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: vanilla-transformer\nVersion: 7.5\n")
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert requirement() == expected


def test_new_keeps_what_is_there(mine, capsys):
    before = {path: path.stat().st_mtime_ns for path in mine.rglob("*")}
    assert f"{mine} already exists; move it away, or choose another" in command_error(capsys, "new", mine)
    assert before == {path: path.stat().st_mtime_ns for path in mine.rglob("*")}


@pytest.mark.parametrize(
    ("files", "options", "commands"),
    [
        ([], [], "`vanilla-transformer new mine && cd mine`, then `accelerate launch train.py`."),
        ([], ["--run_name", "a b"], "&& cd mine`, then `accelerate launch train.py --run_name 'a b'`."),
        (["x.tsv"], ["--train_file", "x.tsv"], "mine`, then `accelerate launch mine/train.py --train_file x.tsv`."),
        (["x.tsv"], ["--train_file=x.tsv"], "mine`, then `accelerate launch mine/train.py --train_file=x.tsv`."),
        (["x.tsv"], ["--train_file", "*.tsv"], "mine`, then `accelerate launch mine/train.py --train_file '*.tsv'`."),
        (["train.py"], ["--size", "tiny"], "; run `accelerate launch train.py --size tiny`."),
    ],
)
def test_train_says_what_to_type(files, options, commands, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in files:
        (tmp_path / file).touch()
    assert command_error(capsys, "train", *options).endswith(commands)
