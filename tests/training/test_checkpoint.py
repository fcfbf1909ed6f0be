"""Checkpoints: whole or not there, checked, replaced, deleted, averaged. Run: pytest tests/test_checkpoint.py"""

import hashlib
import json
import re
import resource
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers import parts, small_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import checkpoint
from vanilla_transformer.training.arguments import WRITTEN, parse_options
from vanilla_transformer.training.checkpoint import (
    LOCK,
    SUMS,
    Checkpoint,
    average_checkpoints,
    begin_output,
    compare_settings,
    delete_old_checkpoints,
    find_beginning,
    is_interrupted,
    list_checkpoints,
    settings_of,
)
from vanilla_transformer.training.distributed import Learner, load_weights, whole_weights
from vanilla_transformer.training.optimization import RunState


def options(*argv):
    return parse_options(["--dataset_name=x", *argv])


@pytest.fixture
def make_learner(make_model, accelerator):
    return lambda **config: Learner(make_model(**config), options("--ema_decay=0.9"), accelerator)


@pytest.fixture(scope="module")
def original(accelerator, byte_tokenizer, tmp_path_factory) -> Path:
    """A checkpoint as a run writes it after its first step."""
    torch.manual_seed(0)
    learner, state = Learner(small_model(), options("--ema_decay=0.9"), accelerator), RunState()
    learner.step(parts(1), 0.1, state)
    folder = tmp_path_factory.mktemp("run") / "checkpoint-1"
    learner.save(folder, byte_tokenizer, state)
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "checkpoint-1"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------------------------- writing


def test_a_checkpoint_is_a_model_that_loads(make_learner, byte_tokenizer, tmp_path):
    learner, state = make_learner(), RunState()
    learner.step(parts(1), 0.1, state)
    learner.save(tmp_path / "checkpoint-1", byte_tokenizer, state)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "checkpoint-1")
    ours = learner.model.state_dict()
    assert model.state_dict().keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint-1")("a dog") == byte_tokenizer("a dog")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_what_is_written_is_read(make_model, byte_tokenizer, tmp_path):
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    moments = {name: {"exp_avg": torch.randn(2, 3), "step": torch.tensor(7.0)} for name in names}
    average = {name: torch.randn(3) for name in names}
    state = RunState(step=7, position=28, skipped=[4, 5], history=[{"step": 7, "loss": 1.5}], recent_losses=[0.1, 0.2])
    state.stream = {"epoch": 1, "stream": {"shard_idx": [0, None]}}
    state.settings, state.scaler, state.is_interrupted = {"seed": 2**62, "data": None}, {"scale": 2.0**40}, True
    written = Checkpoint(tmp_path / "checkpoint-7")
    written.write(model, byte_tokenizer, moments, average, state)
    assert written.damage() is None
    assert written.state() == state
    for found, expected in [(written.weights(), whole_weights(model)), (written.weights(is_average=True), average)]:
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert written.moments().keys() == moments.keys()
    assert all(torch.equal(part["exp_avg"], moments[name]["exp_avg"]) for name, part in written.moments().items())
    assert all(part["step"] == 7 for part in written.moments().values())


def test_a_stop_while_saving_leaves_the_older_checkpoint(make_learner, byte_tokenizer, tmp_path, monkeypatch):
    learner, state = make_learner(), RunState()
    learner.step(parts(1), 0.1, state)
    learner.save(tmp_path / "checkpoint-1", byte_tokenizer, state)
    before = contents(tmp_path / "checkpoint-1")

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", stop)
        for step in [1, 2]:  # over the old one, and beside it
            with pytest.raises(KeyboardInterrupt):
                learner.save(tmp_path / f"checkpoint-{step}", byte_tokenizer, state)
    assert [str(found) for found in list_checkpoints(tmp_path)] == [str(tmp_path / "checkpoint-1")]
    assert contents(tmp_path / "checkpoint-1") == before
    state.step = 2
    learner.save(tmp_path / "checkpoint-2", byte_tokenizer, state)  # what was left behind does not stand in the way
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == "") == ["checkpoint-1", "checkpoint-2"]
    assert Checkpoint(tmp_path / "checkpoint-2").damage() is None


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("step", [1, 2])
def test_a_full_disk_leaves_what_was_there(step, share, make_learner, byte_tokenizer, folder, tmp_path):
    """Here no file may become larger than a share of the largest, so that writing ends at one or another."""
    before = contents(folder)
    learner, state = make_learner(), RunState(step=step)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(map(len, before.values()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest * share), unlimited[1]))
    try:
        with pytest.raises(OSError, match=rf"^{tmp_path / f'checkpoint-{step}'} could not be written: .+") as caught:
            learner.save(tmp_path / f"checkpoint-{step}", byte_tokenizer, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert contents(folder) == before


def test_a_folder_is_replaced(make_learner, byte_tokenizer, folder, tmp_path):
    """One that is damaged or was saved where the run was stopped; also over what kills have left."""
    (folder / "notes.txt").write_text("of the old one")
    for left in ("checkpoint-1.unfinished", "checkpoint-1.replaced"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.safetensors").write_text("half")
    state = RunState(step=1, position=4)
    make_learner().save(folder, byte_tokenizer, state)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert not (folder / "notes.txt").exists()
    assert Checkpoint(folder).damage() is None and Checkpoint(folder).state() == state


# -------------------------------------------------------------------------------------------------------------- damage


def test_a_whole_checkpoint_is_not_damaged(original):
    assert Checkpoint(original).damage() is None


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="a program of GNU")
def test_sha256sum_accepts_a_checkpoint(folder):
    check = ["sha256sum", "--check", "--strict", SUMS]
    done = subprocess.run(check, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {line.split(":")[0] for line in done.stdout.splitlines()} == contents(folder).keys() - {SUMS}
    (folder / "config.json").write_text("{}")
    assert subprocess.run(check, cwd=folder, capture_output=True).returncode == 1


def flip(path: Path):
    """Changes one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


WAYS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "one bit flipped": flip,
    "missing": lambda path: path.unlink(),
}
FILES = {"config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors", "ema.safetensors"}
FILES |= {"tokenizer.json", "tokenizer_config.json", "trainer_state.json", "configuration_vanilla_transformer.py"}
FILES |= {f"{what}_vanilla_transformer.py" for what in ("modeling", "decoding", "translation")}


def test_every_file_is_known(original):
    """With tests of damage to each of them below."""
    assert contents(original).keys() - {SUMS} == FILES


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(FILES))
def test_damage_to_any_file_is_named(name, way, folder):
    WAYS[way](folder / name)
    what = "missing" if way == "missing" else "not as it was written"
    assert Checkpoint(folder).damage() == f"its {name} is {what}"


SUM = "0" * 64
BROKEN_SUMS = {
    "missing": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "empty": lambda path: path.write_text(""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "another text": lambda path: path.write_text("once upon a time\n"),
    "another text of two words": lambda path: path.write_text("once  upon\n"),
    "an empty line": lambda path: path.write_text("\n" + path.read_text()),
    "a name that is too long": lambda path: path.write_text(f"{SUM}  {'x' * 300}\n" + path.read_text()),
    "a name of a directory": lambda path: path.write_text(f"{SUM}  ..\n" + path.read_text()),
    "one bit flipped": flip,
    "the last line is missing": lambda path: path.write_text("".join(path.read_text().splitlines(True)[:-1])),
    "cut in the last line": lambda path: path.write_text(path.read_text()[:-3]),
    "cut in the middle": lambda path: path.write_text(path.read_text()[:300]),
}


@pytest.mark.parametrize("way", BROKEN_SUMS)
def test_damage_to_the_sums_is_damage(way, folder):
    BROKEN_SUMS[way](folder / SUMS)
    damage = Checkpoint(folder).damage()
    assert damage.startswith("its ") and "\n" not in damage and "its  " not in damage


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json"])
def test_what_the_sums_leave_out_is_named(name, folder):
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    (folder / SUMS).write_text("".join(line for line in lines if not line.endswith(f"  {name}\n")))
    assert Checkpoint(folder).damage() == f"its {SUMS} does not name {name}"


def cut(name: str):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def put(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


DAMAGES = {
    "no folder": shutil.rmtree,
    "no state": lambda folder: (folder / "trainer_state.json").unlink(),
    "cut state": cut("trainer_state.json"),
    "state of another program": put("trainer_state.json", '{"epoch": 1.0, "global_step": 500}'),
    "state that is a list": put("trainer_state.json", "[1]"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "cut weights": cut("model.safetensors"),
    "weights that are none": put("model.safetensors", "version https://git-lfs.github.com/spec/v1"),
    "no optimiser": lambda folder: (folder / "optimizer.safetensors").unlink(),
    "cut optimiser": cut("optimizer.safetensors"),
    "no average": lambda folder: (folder / "ema.safetensors").unlink(),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "a part of a state": put("trainer_state.json", '{"step": 1000000}'),
    "an empty state": put("trainer_state.json", "{}"),
    "a state that is null": put("trainer_state.json", "null"),
    "a state without text": put("trainer_state.json", ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_where_it_is_read(damage, folder, make_learner):
    """Also without its sums."""
    DAMAGES[damage](folder)
    with pytest.raises(UserError, match=rf"--resume_from_checkpoint {folder} cannot be resumed from") as caught:
        make_learner().load(Checkpoint(folder))
    assert "\n" not in str(caught.value)


def test_a_state_of_another_step_is_refused(folder, make_learner):
    state = json.loads((folder / "trainer_state.json").read_text()) | {"step": 7}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="of step 7"):
        make_learner().load(Checkpoint(folder))


# ------------------------------------------------------------------------------------------------ checkpoints of a run


def put_checkpoints(output_dir: Path, steps, interrupted=(), damaged=()):
    for step in steps:
        (output_dir / f"checkpoint-{step}").mkdir()
        text = json.dumps(asdict(RunState(step=step, is_interrupted=step in interrupted)))
        (output_dir / f"checkpoint-{step}" / "trainer_state.json").write_text("" if step in damaged else text)


OTHERS = ["checkpoint-best", "runs", "checkpoint-9.damaged"]
REMAINS = ["checkpoint-200.unfinished", "checkpoint-9.replaced", "checkpoint-8.deleted"]  # what a kill may leave


def steps_in(output_dir: Path) -> list[int]:
    return [found.step for found in list_checkpoints(output_dir)]


def test_checkpoints_are_listed_by_their_steps(tmp_path):
    assert list_checkpoints(tmp_path) == [] and list_checkpoints(tmp_path / "none") == []
    put_checkpoints(tmp_path, [100, 9, 0, 20], damaged=[20])
    for name in OTHERS + REMAINS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").touch()
    assert [found.folder for found in list_checkpoints(tmp_path)] == [
        tmp_path / f"checkpoint-{step}" for step in [0, 9, 20, 100]
    ]


@pytest.mark.parametrize(
    "keep, best, left",
    [
        (1, [], [100]),
        (1, [9], [9, 100]),
        (2, [100], [20, 100]),
        (2, [9], [9, 20, 100]),
        (2, [9, 10], [9, 10, 20, 100]),
        (2, [7], [20, 100]),
        (0, [], [100]),
        (3, [], [10, 20, 100]),
        (4, [], [9, 10, 20, 100]),
        (5, [], [9, 10, 20, 100]),
        (6, [], [9, 10, 20, 100]),
        (9, [], [9, 10, 20, 100]),
    ],
)
def test_old_checkpoints_are_deleted(keep, best, left, tmp_path):
    put_checkpoints(tmp_path, [9, 10, 20, 100])
    for name in OTHERS + REMAINS:
        (tmp_path / name).mkdir()
    delete_old_checkpoints(tmp_path, keep, best)
    assert steps_in(tmp_path) == left
    assert all((tmp_path / name).exists() for name in OTHERS)
    assert not any((tmp_path / name).exists() for name in REMAINS)


@pytest.mark.parametrize(
    "keep, best, interrupted, damaged, left",
    [
        (1, [], [9, 20], [], [100]),
        (2, [], [20], [], [10, 100]),  # not counted as one of the newest
        (3, [9], [10], [], [9, 20, 100]),
        (2, [9], [9, 10], [], [9, 20, 100]),  # never the best
        (9, [], [9, 10, 20], [], [100]),
        (2, [], [100], [], [20, 100]),  # never the newest
        (2, [], [], [20], [20, 100]),  # of a damaged one it is not known
        (2, [20], [], [20], [20, 100]),
    ],
)
def test_what_a_stop_has_left_is_deleted_first(keep, best, interrupted, damaged, left, tmp_path):
    put_checkpoints(tmp_path, [9, 10, 20, 100], interrupted, damaged)
    assert [found.step for found in list_checkpoints(tmp_path) if is_interrupted(found)] == interrupted
    delete_old_checkpoints(tmp_path, keep, best)
    assert steps_in(tmp_path) == left


def test_one_checkpoint_alone_is_kept(tmp_path):
    put_checkpoints(tmp_path, [5], interrupted=[5])
    delete_old_checkpoints(tmp_path, 1, [])
    assert steps_in(tmp_path) == [5]


@pytest.fixture
def written(make_model, byte_tokenizer, tmp_path) -> list[tuple[Checkpoint, dict, dict]]:
    """Three checkpoints with their weights and their averages."""
    made = []
    for step in range(3):
        weights, average = make_model(), make_model()
        one = Checkpoint(tmp_path / f"checkpoint-{step}")
        moments = {"x": {"step": torch.zeros(())}}
        one.write(weights, byte_tokenizer, moments, dict(average.named_parameters()), RunState(step=step))
        made.append((one, whole_weights(weights), whole_weights(average)))
    return made


@pytest.mark.parametrize("is_average", [False, True])
def test_averaged_checkpoints_are_the_mean(is_average, written, make_model):
    model = make_model()
    load_weights(model, average_checkpoints([one for one, *_ in written], is_average))
    for name, value in whole_weights(model).items():
        mean = sum(weights[name].double() for weights in (both[1 + is_average] for both in written)) / 3
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
    alone = average_checkpoints([written[1][0]], is_average)
    assert all(torch.equal(value, alone[name]) for name, value in written[1][1 + is_average].items())


def test_a_damaged_checkpoint_is_not_averaged(written):
    flip(written[1][0].folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{written[1][0]} cannot be averaged: its model.safetensors is not as"):
        average_checkpoints([one for one, *_ in written])


# ---------------------------------------------------------------------------------------------- the output directory


def begin(output_dir: Path, checkpoint: Checkpoint | None = None) -> FileLock:
    lock = FileLock(output_dir / LOCK, timeout=0.1)
    begin_output(lock, checkpoint, f"{WRITTEN}seed: 1\n")
    return lock


def test_one_run_at_a_time(tmp_path):
    """In a directory, which the next may have as soon as the one before has ended."""
    lock = begin(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "recipe.yaml").read_text() == f"{WRITTEN}seed: 1\n"
    with pytest.raises(UserError, match=f"^Another run is at work in --output_dir {tmp_path}/a/b; choose another"):
        begin(tmp_path / "a" / "b")
    lock.release()
    begin(tmp_path / "a" / "b")


def test_what_is_newer_and_was_left_out_gets_another_name(folder):
    newer = Path(shutil.copytree(folder, folder.with_name("checkpoint-2")))
    begin(folder.parent, Checkpoint(folder))
    assert list_checkpoints(folder.parent)[-1].step == 1 and newer.with_name("checkpoint-2.damaged").is_dir()


def test_another_run_has_begun_meanwhile(folder):
    with pytest.raises(UserError, match=f"^--output_dir {folder.parent} already holds a model"):
        begin(folder.parent)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_directory_that_cannot_be_made(place, tmp_path):
    (tmp_path / "file").write_text("")
    said = f"^--output_dir {tmp_path / place} cannot be made or used: {tmp_path}/file is no directory; choose another"
    with pytest.raises(UserError, match=said):
        find_beginning(options(), FileLock(tmp_path / place / LOCK, timeout=0.1))


def test_a_model_without_a_checkpoint_is_not_gone_on_with(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint to resume from; .* --model_name_or_path"):
        find_beginning(options("--resume_from_checkpoint"), FileLock(tmp_path / LOCK, timeout=0.1))


def test_a_link_to_a_checkpoint_is_one(folder, tmp_path):
    (tmp_path / "latest").symlink_to(folder)
    found = find_beginning(
        options("--resume_from_checkpoint", str(tmp_path / "latest")), FileLock(tmp_path / "other" / LOCK, timeout=0.1)
    )
    assert (found.folder, found.step) == (folder, 1)
    assert found.is_in(folder.parent) and not found.is_in(tmp_path / "other")


def test_a_checkpoint_of_an_older_version_is_whole(folder):
    """Which did not write all fields of the state yet."""
    saved = json.loads((folder / "trainer_state.json").read_text())
    del saved["scores_count_from"]
    rewrite(folder, "trainer_state.json", json.dumps(saved))
    assert Checkpoint(folder).damage() is None and Checkpoint(folder).state().scores_count_from == 0
    rewrite(folder, "trainer_state.json", json.dumps(saved | {"unheard_of": 1}))
    assert Checkpoint(folder).damage() == "its trainer_state.json is not what a checkpoint holds"


def rewrite(folder: Path, name: str, text: str):
    """Another content of a file, with its sum."""
    (folder / name).write_text(text, encoding="utf-8")
    sums = (folder / SUMS).read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / SUMS).write_text(re.sub(rf"\w+(?=  {name})", digest, sums), encoding="utf-8")


def test_a_renamed_checkpoint_is_damaged(folder):
    renamed = Checkpoint(folder.rename(folder.with_name("checkpoint-9")))
    assert renamed.damage() == "its trainer_state.json is of step 1"


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: path.symlink_to("nowhere")])
def test_what_has_the_name_of_a_checkpoint_is_replaced(make, make_learner, byte_tokenizer, tmp_path):
    make(tmp_path / "checkpoint-0")
    make_learner().save(tmp_path / "checkpoint-0", byte_tokenizer, RunState())
    assert Checkpoint(tmp_path / "checkpoint-0").damage() is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-0"]


def test_a_recipe_of_the_users_own_is_not_overwritten(tmp_path):
    (tmp_path / "recipe.yaml").write_text("# mine\nmax_steps: 2\n")
    with pytest.raises(UserError, match="is not empty, and is not overwritten"):
        begin(tmp_path)
    assert (tmp_path / "recipe.yaml").read_text().startswith("# mine")
    (tmp_path / "recipe.yaml").write_text(f"{WRITTEN}max_steps: 2\n")
    begin(tmp_path)


def test_a_linked_checkpoint_is_deleted_as_a_link(folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-1").symlink_to(folder)
    shutil.copytree(folder, tmp_path / "run" / "checkpoint-2")
    delete_old_checkpoints(tmp_path / "run", 1, [])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-2"]
    assert Checkpoint(folder).damage() is None


# ------------------------------------------------------------------------------------------------------------ settings

FROM = Checkpoint(Path("runs/checkpoint-7"))
CONFIG = VanillaTransformerConfig()


def settings(*argv: str, data="d1", validation="v1", batches=4, precision="no", **config) -> dict:
    """The settings of a run as they come from a checkpoint."""
    args = options(*argv)
    data = {"train": None if args.streaming else data, "validation": validation}
    made = settings_of(args, VanillaTransformerConfig(**config), data, batches, precision)
    return json.loads(json.dumps(made))


def changes(before: dict, now: dict) -> list[str]:
    return compare_settings(FROM, before, now, 280)


def test_nothing_has_changed():
    assert changes(settings(), settings()) == []
    stream = ["--streaming", "--max_steps=9"]
    assert changes(settings(*stream), settings(*stream)) == []


def test_what_does_not_matter_may_change():
    argv = ["--output_dir=y", "--eval_steps=3", "--save_total_limit=9", "--logging_steps=2", "--report_to=tensorboard"]
    argv += [
        "--per_device_eval_max_tokens=99",
        "--dataloader_num_workers=2",
        "--on_divergence=rollback",
    ]
    assert changes(settings(), settings(*argv)) == []


MAY_CHANGE = {
    "learning_rate": (0.5, None),
    "lr_scheduler_type": ("cosine", "inverse_sqrt"),
    "warmup_steps": (7, 4000),
    "max_steps": (9, None),
    "num_train_epochs": (3.5, 10.0),
    "weight_decay": (0.5, 0.0),
    "label_smoothing_factor": (0.2, 0.1),
    "max_grad_norm": (2.0, 1.0),
    "adam_beta1": (0.5, 0.9),
    "adam_beta2": (0.5, 0.98),
    "adam_epsilon": (0.5, 1e-9),
    "ema_decay": (0.5, None),
    "r_drop_alpha": (5.0, 0.0),
    "attn_implementation": ("sdpa", None),
    "gradient_checkpointing": (True, False),
    "torch_compile": (True, False),
    "metric_for_best_model": ("loss", "bleu"),
    "num_beams": (4, 1),
    "length_penalty": (0.5, 1.0),
}


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_an_option_that_has_changed_is_named(name):
    new, old = MAY_CHANGE[name]
    assert changes(settings(), settings(f"--{name}={new}")) == [f"--{name} {old}, now {new}"]
    assert changes(settings(f"--{name}={new}"), settings()) == [f"--{name} {new}, now {old}"]


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_a_dropout_that_has_changed_is_named(name):
    """It comes from the config, which knows the default."""
    old = getattr(CONFIG, name)
    assert changes(settings(), settings(**{name: 0.45})) == [f"--{name} {old}, now 0.45"]


def test_other_validation_pairs_are_named():
    assert changes(settings(), settings(validation="v2")) == ["the validation pairs"]


def test_several_changes_are_all_named():
    now = settings("--seed=42", "--warmup_steps=5", "--weight_decay=1", precision="bf16")
    assert changes(settings(), now) == [
        "--warmup_steps 4000, now 5",
        "--weight_decay 0.0, now 1.0",
        "--mixed_precision no, now bf16",
    ]


@pytest.mark.parametrize("given", [[], ["--vocab_size=280"]])
def test_the_size_of_the_vocabulary_may_be_given_as_it_is(given):
    """Or not at all, where fewer types came of it than were asked for."""
    assert changes(settings("--vocab_size=300"), settings(*given)) == []


def refusal(before: dict, now: dict) -> str:
    with pytest.raises(UserError) as caught:
        changes(before, now)
    message = str(caught.value)
    assert "\n" not in message and "runs/checkpoint-7" in message
    assert "begin a new run, from its weights by --model_name_or_path runs/checkpoint-7" in message
    return message


STREAMED = ["--streaming", "--max_steps=9"]
MUST_NOT_CHANGE = {
    "--seed": ([], ["--seed=7"], "7, and 42"),
    "--per_device_train_max_tokens": ([], ["--per_device_train_max_tokens=99"], "99, and 4096"),
    "--bpe_dropout": ([], ["--bpe_dropout=0.1"], "0.1, and 0.0"),
    "--streaming": ([], STREAMED, "True, and False"),
    "--model_name_or_path": ([], ["--model_name_or_path=y"], "y, and None"),
    "--tokenizer_name": (["--tokenizer_name=y"], ["--tokenizer_name=z"], "z, and y"),
    "--vocab_size": (["--vocab_size=300"], ["--vocab_size=400"], "400, and 300"),
    "--max_source_length": (STREAMED, [*STREAMED, "--max_source_length=9"], "9, and 128"),
    "--max_target_length": (STREAMED, [*STREAMED, "--max_target_length=9"], "9, and 128"),
    "--max_train_samples": (STREAMED, [*STREAMED, "--max_train_samples=9"], "9, and None"),
    "--dataset_name": (STREAMED, [*STREAMED, "--dataset_name=y"], "y, and x"),
    "--dataset_config_name": (STREAMED, [*STREAMED, "--dataset_config_name=y"], "y, and None"),
    "--train_split": (STREAMED, [*STREAMED, "--train_split=y"], "y, and None"),
    "--source_lang": (STREAMED, [*STREAMED, "--source_lang=y"], "y, and None"),
    "--target_lang": (STREAMED, [*STREAMED, "--target_lang=y"], "y, and None"),
    "--source_column": (STREAMED, [*STREAMED, "--source_column=y"], "y, and None"),
    "--target_column": (STREAMED, [*STREAMED, "--target_column=y"], "y, and None"),
}


VARIED = ["--bpe_dropout=0.1"]
MUST_NOT_CHANGE |= {
    "--max_source_length with --bpe_dropout": (VARIED, [*VARIED, "--max_source_length=9"], "9, and 128"),
    "--max_target_length with --bpe_dropout": (VARIED, [*VARIED, "--max_target_length=9"], "9, and 128"),
}


@pytest.mark.parametrize("option", MUST_NOT_CHANGE)
def test_an_option_that_decides_on_the_batches_must_not_change(option):
    before, now, values = MUST_NOT_CHANGE[option]
    option = option.split()[0]
    assert refusal(settings(*before), settings(*now)).startswith(f"{option} is {values} in runs/checkpoint-7")
    assert refusal(settings(*now), settings(*before)).startswith(f"{option} is ")


def test_the_data_must_not_change():
    assert "The training pairs are not those of" in refusal(settings(), settings(data="d2"))


def test_the_batches_of_a_step_must_not_change():
    message = refusal(settings(), settings(batches=6))
    assert "made of 4 batches, and now of 6" in message and "--gradient_accumulation_steps" in message


def test_the_names_of_files_do_not_matter_where_the_pairs_are_known():
    assert changes(settings(), settings("--dataset_name=y", "--max_source_length=99")) == []
