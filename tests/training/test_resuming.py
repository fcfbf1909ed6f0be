"""Which checkpoint is resumed, and which settings may have changed since."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import put_checkpoints

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import resume
from vanilla_transformer.training.recipe import parse_arguments, resolved_recipe
from vanilla_transformer.training.resume import compare_settings, find_checkpoint, run_settings


def test_newest_or_named_checkpoint_is_resumed(tmp_path, capsys):
    put_checkpoints(tmp_path, 1, 2)
    newest = tmp_path / "checkpoint-2"
    assert find_checkpoint(tmp_path, "newest") == find_checkpoint(tmp_path, str(newest)) == newest
    assert capsys.readouterr().out == f"resuming from {newest}\n"
    assert find_checkpoint(tmp_path / "other", f"{tmp_path}/checkpoint-1") == tmp_path / "checkpoint-1"
    assert find_checkpoint(tmp_path / "other", "newest") is None


@pytest.mark.parametrize(
    "found, name, message",
    [
        (["checkpoint-1", "checkpoint-2"], "checkpoint-1", "is older than .*/checkpoint-2; resume from that"),
        (["checkpoint-1"], None, "already holds a model; resume with --resume_from_checkpoint"),
        (["config.json"], "newest", "already holds a model; fine-tune it with --model_name_or_path"),
        (["recipe.yaml"], None, "is not empty; choose another"),
    ],
)
def test_nothing_is_overwritten(found, name, message, tmp_path):
    for one in found:
        (tmp_path / one).mkdir()
    with pytest.raises(UserError, match=f"^--.* {tmp_path}.*{message}"):
        find_checkpoint(tmp_path, name if name in (None, "newest") else f"{tmp_path}/{name}")


def test_a_run_starts_in_an_empty_directory_and_nothing_else(tmp_path):
    assert find_checkpoint(tmp_path, None) is None
    (tmp_path / "file").touch()
    for place in ("file", "file/model"):
        message = f"^--output_dir {tmp_path}/{place} cannot be used: {tmp_path}/file is not a dir"
        with pytest.raises(UserError, match=message):
            find_checkpoint(tmp_path / place, "newest")


# ------------------------------------------------------------------------------------------------------------ settings

FROM = Path("runs/checkpoint-7")


def settings(*argv: str, data="d1", validation="v1", batches=4, precision="no", **config) -> dict:
    options, _, training, _ = parse_arguments(["--dataset_name=x", *argv])
    extra = {"data": None if options.streaming else data, "validation": validation, "batches_per_step": batches}
    recipe = resolved_recipe(options, training, VanillaTransformerConfig(**config))
    return recipe | extra | {"mixed_precision": precision}


@pytest.mark.parametrize("teacher, soft_targets", [(["t"], ["abc"]), (None, [])])
def test_settings_tell_the_data_and_the_soft_targets(teacher, soft_targets, monkeypatch):
    """Soft targets by the name of their file, which has a digest of the pairs and the teachers."""
    monkeypatch.setattr(resume, "fingerprint", lambda split: split.digest)
    files = [{"filename": "cache/abc.arrow"}]
    splits = {name: SimpleNamespace(digest=name[:1], cache_files=files) for name in ("train", "validation")}
    expected = {"teacher": teacher, "data": "t", "validation": "v", "soft_targets": soft_targets}
    expected |= {"batches_per_step": 4, "mixed_precision": "bf16"}
    assert run_settings({"teacher": teacher}, splits, 4, "bf16") == expected


def test_changed_settings_are_named():
    now = settings("--warmup_steps=7", dropout=0.45, validation="v2", precision="bf16")
    assert compare_settings(FROM, settings(), now) == {
        "warmup_steps": "--warmup_steps was 4000, now 7",
        "dropout": "--dropout was 0.1, now 0.45",
        "validation": "the validation pairs",
        "mixed_precision": "--mixed_precision was no, now bf16",
    }
    assert compare_settings(FROM, settings(), settings(use_cache=False)).keys() == {"use_cache"}
    assert compare_settings(FROM, settings(), settings()) == {}


STREAM = ["--streaming", "--max_steps=9"]
JOINED = ["--joined_pairs=0.2"]
BATCHES = r"batches per step \(processes times --gradient_accumulation_steps\) were 4, now 6"


@pytest.mark.parametrize(
    "old, new, culprit",
    [
        (settings(), settings("--seed=7"), "--seed was 42, now 7"),
        (settings(), settings("--per_device_train_max_tokens=99"), "--per_device_train_max_tokens was 4096, now 99"),
        (settings(), settings("--bpe_dropout=0.1"), "--bpe_dropout was 0.0, now 0.1"),
        (settings(), settings("--split_digits"), "--split_digits was False, now True"),
        (settings(), settings("--letters"), "--letters was False, now True"),
        (settings(), settings("--tokenizer_name=y"), "--tokenizer_name was None, now y"),
        (settings(), settings(*STREAM), "the training pairs .*"),
        (settings(*STREAM), settings("--max_steps=9"), "the training pairs .*"),
        (settings(), settings(data="d2"), "the training pairs .*"),
        (settings(), settings(batches=6), BATCHES),
        *(
            (settings(*JOINED), settings(*JOINED, f"--max_{side}_length=9"), f"--max_{side}_length was 128, now 9")
            for side in ("source", "target")
        ),
        (settings(), settings(decoder_attention_heads=4), "--decoder_attention_heads was 8, now 4"),
        (settings(), settings(activation_function="gelu"), "--activation_function was relu, now gelu"),
        *(
            (settings(*STREAM), settings(*STREAM, f"--{name}=9"), f"--{name} was .*, now 9")
            for name in [
                *(f"dataset_{what}" for what in ("name", "config_name", "revision")),
                *(f"{side}_{what}" for side in ("source", "target") for what in ("lang", "column")),
                *("train_split", "max_train_samples", "max_source_length", "max_target_length"),
            ]
        ),
        *(
            (settings(*STREAM) | {name: ["a"]}, settings(*STREAM) | {name: ["b"]}, rf"--{name} was a, now .*")
            for name in ("train_file", "train_file_tags", "train_file_langs")
        ),
    ],
)
def test_resume_rejects_changed_batches_and_sizes(old, new, culprit):
    message = f"^Cannot resume, .* runs/checkpoint-7 was written: {culprit}. Restore them"
    with pytest.raises(UserError, match=message) as caught:
        compare_settings(FROM, old, new)
    # --model_name_or_path does not change these either.
    is_kept = any(name in culprit for name in ("attention_heads", "activation", "split_digits", "letters"))
    assert ("--model_name_or_path runs/checkpoint-7" in str(caught.value)) != is_kept
