"""What is removed and replaced is ours or was named, whole or not at all; links lead nowhere."""

import importlib.util
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import TEXTS, command_error
from huggingface_hub import constants

from vanilla_transformer import Translator, files
from vanilla_transformer.errors import UserError
from vanilla_transformer.hub.model_card import record_tuning
from vanilla_transformer.inspection.attention import attention_maps, draw_attention
from vanilla_transformer.inspection.explorer import write_explorer
from vanilla_transformer.training.report import plot_training_curves

# In each folder that this program removes there is one of these.
MARKERS = ("optimizer.safetensors", "vanilla_transformer.json")


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def elsewhere(tmp_path):
    """A folder that nothing may change, although it looks like one of ours."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("letter.txt", ".lock", *MARKERS):
        (folder / name).write_text("{}")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


WRITERS = {
    "a text": lambda made, path: files.write_text(path, "ours"),
    "a picture": lambda made, path: plot_training_curves([], path),
    "attention": lambda made, path: draw_attention(attention_maps(made.model, made.tokenizer, *TEXTS[:2]), path),
    "the explorer": lambda made, path: write_explorer({}, path, "x"),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_link_in_the_place_of_a_file_is_replaced(write, translator, elsewhere, tmp_path):
    for name, target in [("to a file.png", elsewhere / "letter.txt"), ("to nothing.png", elsewhere / "new")]:
        path = tmp_path / name
        path.symlink_to(target)
        write(translator, path)
        assert path.is_file() and not path.is_symlink() and path.stat().st_size > 0


def test_a_link_in_the_place_of_results_is_replaced(elsewhere, tmp_path):
    (tmp_path / "kept.json").write_text('{"train_target_tokens": 9}')
    (tmp_path / "all_results.json").symlink_to(tmp_path / "kept.json")
    record_tuning(tmp_path, {"tuned_on": "x"}, {})
    assert "tuned_on" in (tmp_path / "all_results.json").read_text()
    assert (tmp_path / "kept.json").read_text() == '{"train_target_tokens": 9}'


def test_only_files_are_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to a folder").symlink_to("folder")
    (tmp_path / "to a pipe").symlink_to("pipe")
    for name in ("folder", "pipe", "to a folder", "to a pipe"):
        with pytest.raises(OSError, match=f"{name} is not a file; choose another name"):
            files.write_text(tmp_path / name, "x")
    with pytest.raises(OSError, match="is not a file"), files.replacing_files(tmp_path) as temporary:
        (temporary / "a file").touch()
        (temporary / "folder").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "pipe", "to a folder", "to a pipe"}


def test_an_error_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "file").write_text("old")
    for make in (files.replacing_files(tmp_path), files.new_folder(tmp_path / "new")):
        with pytest.raises(ZeroDivisionError), make as temporary:
            temporary.mkdir(exist_ok=True)
            (temporary / "file").write_text("new")
            raise ZeroDivisionError
    assert contents(tmp_path) == {"file": b"old"}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_new_folder_replaces_nothing(elsewhere, tmp_path):
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "empty").mkdir()
    for name in ("elsewhere", "link", "empty"):
        new = files.new_folder(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} already exists; move it away"), new:
            pytest.fail("nothing is made")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    new = files.new_folder(tmp_path / "missing" / "new")
    with pytest.raises(FileNotFoundError, match="No such file or directory: .*missing/new'$"), new:
        pytest.fail("nothing is made")


@pytest.mark.parametrize("marker", MARKERS)
def test_only_marked_folders_are_removed(marker, elsewhere, tmp_path):
    (tmp_path / "link").symlink_to(elsewhere)
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "ours" / marker).touch()
    (tmp_path / "ours" / "inner").symlink_to(elsewhere)
    (tmp_path / "marked by a folder").mkdir()
    (tmp_path / "marked by a folder" / marker).mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    for name in [*before, "missing"]:
        if name != "elsewhere":
            files.remove_folder(tmp_path / name, marker)
    assert {path.name for path in tmp_path.iterdir()} == before - {"ours"}


def test_a_folder_is_complete_or_gone_if_the_program_is_killed(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / MARKERS[0]).touch()
    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        files.remove_folder(tmp_path / "folder", MARKERS[0])
    monkeypatch.undo()
    assert not (tmp_path / "folder").exists()


def test_what_a_killed_program_left_is_removed(elsewhere, tmp_path):
    remains = tmp_path / ".unfinished-abc"
    remains.mkdir()
    (remains / "link").symlink_to(elsewhere)
    (tmp_path / ".unfinished-link").symlink_to(elsewhere)
    files.remove_unfinished(tmp_path)
    assert not remains.exists() and (tmp_path / "elsewhere").exists()


# --------------------------------------------------------------------------------------------- a stranger's model


QUANTIZATIONS = ["..", "../..", "PATH", "int8/../../elsewhere", "", "int7"]


@pytest.mark.parametrize("value", QUANTIZATIONS)
def test_a_quantization_that_is_a_path_removes_nothing(value, folder, elsewhere, tmp_path, capsys):
    pytest.importorskip("ctranslate2")
    before, value = contents(Path(folder)), value.replace("PATH", str(elsewhere))
    with pytest.raises(ValueError, match="`quantization` is .*; CTranslate2 knows int8, "):
        Translator.from_pretrained(folder, backend="ctranslate2", quantization=value)
    (tmp_path / "texts").write_text("No!\n")
    texts = ["--sources", tmp_path / "texts", "--references", tmp_path / "texts"]
    verbs = [("translate", []), ("evaluate", texts), ("evaluate", ["--tune", *texts])]
    verbs += [("demo", [])] if importlib.util.find_spec("gradio") else []
    for verb, more in verbs:
        given = [verb, "--model", folder, "--backend", "ctranslate2", f"--quantization={value}", *more]
        assert "CTranslate2 knows int8" in command_error(capsys, *given)
    assert contents(Path(folder)) == before


def test_a_conversion_beside_a_model_is_not_used(folder, elsewhere):
    """Earlier versions made one there; a stranger may have planted it, or a link."""
    pytest.importorskip("ctranslate2")
    made = Translator.from_pretrained(folder, backend="ctranslate2").engine.directory
    planted = shutil.copytree(made, Path(folder) / "ctranslate2" / "float32")
    (planted / "model.bin").write_bytes(b"planted")
    (Path(folder) / "ctranslate2" / "int8").symlink_to(elsewhere)
    for quantization in (None, "int8"):
        theirs = Translator.from_pretrained(folder, backend="ctranslate2", quantization=quantization)
        assert len(theirs(TEXTS, max_new_tokens=5)) == len(TEXTS)
    assert theirs.engine.directory.is_relative_to(constants.HF_HOME)
