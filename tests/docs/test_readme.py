"""README and docs/huggingface.md: code runs, files and options are there. Run: pytest tests/test_readme.py"""

import importlib.util
import re
from pathlib import Path

import pytest
from test_paper_to_code import options_of_inspection

from vanilla_transformer.data.tokenizer import special_token_ids, train_tokenizer
from vanilla_transformer.training.arguments import make_parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOOLS = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
IDS = ["README", "huggingface"]


def python_blocks(text: str) -> list[str]:
    return re.findall(r"(?ms)^```python\n(.*?)^```$", text)


BLOCKS = python_blocks(README)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """In place of outputs/sample: a model that has learnt nothing."""
    from helpers import TINY

    from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

    folder = tmp_path_factory.mktemp("sample")
    tokenizer = train_tokenizer(["The cat sleeps.", "Die Katze schläft."], 300)
    config = VanillaTransformerConfig(
        **TINY | {"vocab_size": len(tokenizer), "max_position_embeddings": 100} | special_token_ids(tokenizer)
    )
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block {i}" for i in range(1, len(BLOCKS) + 1)])
def test_the_python_code_runs(code, trained, capsys):
    exec(code.replace("outputs/sample", trained.as_posix()), {})
    assert bool(capsys.readouterr().out.strip()) == ("print(" in code)


@pytest.mark.parametrize("text", [README, TOOLS], ids=IDS)
def test_every_fence_starts_a_line(text):
    """Else neither these tests nor what shows the page take it for code."""
    assert text.count("```") == len(re.findall(r"(?m)^```", text))
    assert text.count("```python") == len(python_blocks(text))


def test_there_is_code():
    assert len(BLOCKS) >= 3 and len(python_blocks(TOOLS)) >= 8


@pytest.mark.slow
def test_the_code_for_other_tools_runs_from_top_to_bottom(trained, tmp_path, monkeypatch):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "sample").symlink_to(trained)
    (tmp_path / "sample_dataset").symlink_to(ROOT / "sample_dataset")
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in python_blocks(TOOLS):
        if "torchao" not in code or importlib.util.find_spec("torchao"):
            exec(code, names)
    assert len(names["sentences"]) == 2 and all(names["sentences"])
    for written in ["tuned/model.safetensors", "adapter/adapter_model.safetensors", "merged/model.safetensors"]:
        assert (tmp_path / "outputs" / written).exists()


@pytest.mark.parametrize("text, folder, least", [(README, ROOT, 5), (TOOLS, ROOT / "docs", 1)], ids=IDS)
def test_files_that_are_linked_are_there(text, folder, least):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert len(links) >= least
    assert [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("text, least", [(README, 15), (TOOLS, 1)], ids=IDS)
def test_options_that_are_named_exist(text, least):
    own = set(make_parser()._option_string_actions) | {"--help"}
    others = {"--num_processes", "--mixed_precision", "--cpu", "--nproc_per_node"}  # of the launchers
    others |= {
        "--repo_id",
        "--dry_run",
        "--private",
        "--revision",
        "--commit_message",
        "--create_pr",
        "--model",
        "--too_long",
        "--dtype",
    }
    others |= options_of_inspection()
    named = set(re.findall(r"(?<![\w-])--[a-z_]+", text))
    assert len(named) >= least
    assert named <= own | others
