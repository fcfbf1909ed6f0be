"""Checkpoints: folders that are loadable models, hold all that a run needs to go on, and can be checked."""

import contextlib
import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from ..training.arguments import WRITTEN
from ..training.optimization import RunState

SUMS = "SHA256SUMS"  # as `sha256sum --check` reads it
LOCK = ".lock"  # held by the run that is at work in an output directory


class Checkpoint:
    """A folder `checkpoint-N`, which is there as a whole or not at all."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def step(self) -> int:
        return int(self.folder.name.removeprefix("checkpoint-"))

    def is_in(self, output_dir: Path) -> bool:
        return self.folder.absolute().parent.resolve() == output_dir.resolve()

    def write(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        moments: dict[str, dict[str, torch.Tensor]],
        average: dict[str, torch.Tensor] | None,
        state: RunState,
    ):
        """Writes a loadable model directory that also holds the optimiser, the average and the run's state.

        It is written beside its place and renamed at the end, so that a kill at any moment leaves whole checkpoints
        only. The optimiser is saved by the names of its parameters, which ties it to no number of processes.

        Raises:
            UserError: A weight is no finite number.
            OSError: It cannot be written; what was there is as before.
        """
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise UserError(
                    f"'{name}' holds numbers that are not finite after step {state.step}, which is not saved; lower "
                    "--learning_rate or lengthen --warmup_steps."
                )
        unfinished = self.folder.with_name(self.folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            flat = {f"{name}/{key}": value for name, part in moments.items() for key, value in part.items()}
            save_file(flat, unfinished / "optimizer.safetensors")
            if average is not None:
                save_file(average, unfinished / "ema.safetensors")
            (unfinished / "trainer_state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
            sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(unfinished.iterdir()) if path.is_file()]
            (unfinished / SUMS).write_text("".join(sums), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise OSError(f"{self.folder} could not be written: {' '.join(str(error).split())}") from error
        if self.folder.exists() or self.folder.is_symlink():  # damaged, or saved where the run was stopped
            replaced = self.rename(".replaced")
            unfinished.rename(self.folder)
            remove(replaced)
        else:
            unfinished.rename(self.folder)

    def rename(self, suffix: str) -> Path:
        """Gives the folder a name under which it is no checkpoint; what had that name is deleted."""
        renamed = self.folder.with_name(self.folder.name + suffix)
        if renamed.exists() or renamed.is_symlink():
            remove(renamed)
        return self.folder.rename(renamed)

    def damage(self) -> str | None:
        """What is wrong with the first file that is not as it was written, if one is not."""
        try:
            lines = (self.folder / SUMS).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return f"its {SUMS} is missing or cannot be read"
        names = []
        for line in lines:
            expected, _, name = line.partition("  ")
            if not name:
                return f"its {SUMS} is not as it was written"
            names.append(name)
            try:
                found = sha256(self.folder / name)
            except FileNotFoundError:
                return f"its {name} is missing"
            except OSError as error:
                return f"its {name} cannot be read: {error.strerror}"
            if found != expected:
                return f"its {name} is not as it was written"
        missing = {"model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json"} - set(names)
        if missing:
            return f"its {SUMS} does not name {', '.join(sorted(missing))}"
        try:
            self.state()
        except ValueError as error:
            return f"its {error}"
        return None

    @contextlib.contextmanager
    def explaining(self):
        """Turns what goes wrong in reading into a UserError that names the folder and the reason."""
        try:
            yield
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            reason = str(error).strip().split("\n")[0]
            raise UserError(
                f"--resume_from_checkpoint {self} cannot be resumed from: {reason.rstrip('.')}. "
                "It must be a whole checkpoint-N folder that train.py wrote with the same model options."
            ) from error

    def state(self) -> RunState:
        """The run's state; raises ValueError if it is not whole."""
        saved = json.loads((self.folder / "trainer_state.json").read_text(encoding="utf-8"))
        # What an older version did not write yet is as at the beginning.
        if not isinstance(saved, dict) or "step" not in saved or not saved.keys() <= asdict(RunState()).keys():
            raise ValueError("trainer_state.json is not what a checkpoint holds")
        if saved["step"] != self.step:
            raise ValueError(f"trainer_state.json is of step {saved['step']}")
        return RunState(**saved)

    def weights(self, is_average: bool = False) -> dict[str, torch.Tensor]:
        """The weights, or their moving average, each shared one once; raises ValueError if there is no average."""
        path = self.folder / ("ema.safetensors" if is_average else "model.safetensors")
        if is_average and not path.exists():
            raise ValueError("it was written without --ema_decay; leave that out.")
        return load_file(path)

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """The optimiser's state by the names of its parameters."""
        saved: dict[str, dict] = {}
        for name, tensor in load_file(self.folder / "optimizer.safetensors").items():
            parameter, key = name.rsplit("/", 1)
            saved.setdefault(parameter, {})[key] = tensor
        return saved

    def refuse_other_config(self, config: VanillaTransformerConfig):
        """Raises ValueError if the weights are those of a model that computes something else."""
        saved = VanillaTransformerConfig.from_pretrained(self.folder)
        for name in VanillaTransformerConfig.__annotations__:
            if "dropout" not in name and getattr(saved, name) != getattr(config, name):
                raise ValueError(
                    f"its `{name}` is {getattr(saved, name)}, and that of this run {getattr(config, name)}."
                )


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return sha_fileobj(file).hex()


# ---------------------------------------------------------------------------------------------- checkpoints of a run


def list_checkpoints(output_dir: Path) -> list[Checkpoint]:
    """The checkpoints, oldest first."""
    found = [Checkpoint(path) for path in output_dir.glob("checkpoint-*") if path.is_dir() and is_named(path)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def is_named(folder: Path) -> bool:
    return re.fullmatch(r"checkpoint-\d+", folder.name) is not None


def remove(folder: Path):
    """Deletes a folder with what is in it, or what else has its name, such as a link to one."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink()


def find_beginning(args, lock: FileLock) -> Checkpoint | None:
    """The checkpoint that a run goes on from, if that is asked for and there is one.

    Without a name it is the newest whole one, so that the same command begins a run and goes on with it.

    Raises:
        UserError: The one that is named is none, another run is at work, or what is not its own would be overwritten.
    """
    output_dir = Path(lock.lock_file).parent
    check_place(output_dir)
    if args.resume_from_checkpoint and not args.dry_run and list(output_dir.glob("checkpoint-*")):
        take(lock)
        restore_replaced(output_dir)
    if args.resume_from_checkpoint is None:
        checkpoint = None
    elif args.resume_from_checkpoint == "newest":
        checkpoint = newest_whole(output_dir) or none_yet(output_dir)
        if checkpoint is not None:
            print(f"going on from {checkpoint}")
    else:
        checkpoint = named_checkpoint(args.resume_from_checkpoint, output_dir)
    check_output_dir(output_dir, checkpoint)
    return checkpoint


def newest_whole(output_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that is not damaged, if there is one; says which are."""
    for checkpoint in reversed(list_checkpoints(output_dir)):
        damage = checkpoint.damage()
        if damage is None:
            return checkpoint
        print(f"{checkpoint} is damaged, {damage}, and left out")
    return None


def none_yet(output_dir: Path):
    """Says that there is no checkpoint yet; raises UserError if it is not because the run has not begun."""
    if list_checkpoints(output_dir):
        raise UserError(f"Every checkpoint in {output_dir} is damaged; begin anew in another --output_dir.")
    if (output_dir / "config.json").exists():
        raise UserError(
            f"--output_dir {output_dir} holds a model and no checkpoint to resume from; train on from it in another "
            f"directory by --model_name_or_path {output_dir}."
        )
    print(f"there is no checkpoint in {output_dir} yet: the run begins")


def named_checkpoint(name: str, output_dir: Path) -> Checkpoint:
    """The checkpoint of `--resume_from_checkpoint NAME`, also where it is a link to one."""
    folder = Path(name) if is_named(Path(name)) else Path(name).resolve()
    checkpoint = Checkpoint(folder)
    if not is_named(folder) or not (folder / "trainer_state.json").exists():
        raise UserError(f"--resume_from_checkpoint {name} is no checkpoint-N folder of train.py.")
    newer = [other for other in list_checkpoints(output_dir) if other.step > checkpoint.step]
    if newer and checkpoint.is_in(output_dir):
        raise UserError(
            f"--resume_from_checkpoint {checkpoint} is older than {newer[-1]}, which the run would mix with its own; "
            "remove what is newer, or choose another --output_dir."
        )
    if damage := checkpoint.damage():
        raise UserError(f"--resume_from_checkpoint {checkpoint} is damaged: {damage}; choose another checkpoint.")
    return checkpoint


def check_place(output_dir: Path):
    """Raises UserError if the directory cannot be made, or cannot be written to."""
    try:
        place = next(path for path in (output_dir.absolute(), *output_dir.absolute().parents) if path.exists())
    except OSError as error:
        raise UserError(f"--output_dir {output_dir} cannot be made: {error.strerror}; choose another.") from error
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = "cannot be written to" if place.is_dir() else "is no directory"
        raise UserError(f"--output_dir {output_dir} cannot be made or used: {place} {reason}; choose another.")


def check_output_dir(output_dir: Path, checkpoint: Checkpoint | None):
    """Raises UserError rather than overwrite anything but what the run of the checkpoint has left."""
    if checkpoint is not None and checkpoint.is_in(output_dir):
        return
    if list_checkpoints(output_dir) or (output_dir / "config.json").exists():
        raise UserError(
            f"--output_dir {output_dir} already holds a model; go on with it by --resume_from_checkpoint, or choose "
            "another directory."
        )
    # A run that was stopped before its first checkpoint leaves its recipe, and what a tracker wrote.
    recipe = output_dir / "recipe.yaml"
    is_a_runs = recipe.is_file() and recipe.read_text(encoding="utf-8", errors="replace").startswith(WRITTEN)
    others = {path.name for path in output_dir.iterdir()} if output_dir.is_dir() else set()
    if not is_a_runs and any(name != LOCK and not name.endswith(".unfinished") for name in others):
        raise UserError(f"--output_dir {output_dir} is not empty, and is not overwritten; choose another.")


def take(lock: FileLock):
    """Keeps other runs out of a directory; raises UserError if one is at work there."""
    try:
        lock.acquire()
    except Timeout as error:
        where = Path(lock.lock_file).parent
        raise UserError(f"Another run is at work in --output_dir {where}; choose another directory.") from error


def begin_output(lock: FileLock, checkpoint: Checkpoint | None, recipe: str):
    """Makes the directory in which the lock is, takes it for this run, and writes the recipe into it.

    Raises:
        UserError: It cannot be made or written to, or another run is at work there.
    """
    output_dir = Path(lock.lock_file).parent
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        take(lock)
    except OSError as error:
        raise UserError(f"--output_dir {output_dir} cannot be made or used: {error.strerror}.") from error
    check_output_dir(output_dir, checkpoint)
    step = 0 if checkpoint is None else checkpoint.step
    for newer in list_checkpoints(output_dir):
        if newer.step > step:  # damaged, and left out before; the run would take it for its own
            newer.rename(".damaged")
    (output_dir / "recipe.yaml").write_text(recipe, encoding="utf-8")


def restore_replaced(output_dir: Path):
    """Puts back what a kill between the two renamings of [`Checkpoint.write`] has left without its name."""
    for replaced in output_dir.glob("checkpoint-*.replaced"):
        with contextlib.suppress(OSError):  # the new one is there
            replaced.rename(replaced.with_suffix(""))


def delete_old_checkpoints(output_dir: Path, keep: int, best: list[int]):
    """Deletes all but the newest `keep` and those of the steps `best`, and what a kill has left in part.

    What a stop has left does not count as new.
    """
    for kind in ("unfinished", "replaced", "deleted"):
        for remains in output_dir.glob(f"checkpoint-*.{kind}"):
            with contextlib.suppress(OSError):
                remove(remains)
    *older, newest = list_checkpoints(output_dir)
    regular = [checkpoint for checkpoint in older if not is_interrupted(checkpoint)]
    kept = [newest.step, *best, *(checkpoint.step for checkpoint in regular[::-1][: max(0, keep - 1)])]
    for checkpoint in older:
        if checkpoint.step not in kept:
            with contextlib.suppress(OSError):  # what is still open on a network disk; the next time
                remove(checkpoint.rename(".deleted"))  # gone as a whole, whenever the run is killed


def is_interrupted(checkpoint: Checkpoint) -> bool:
    """Whether it was saved only because the run was stopped; a damaged one counts as one of the run's own."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return checkpoint.state().is_interrupted
    return False


def average_checkpoints(checkpoints: list[Checkpoint], is_average: bool = False) -> dict[str, torch.Tensor]:
    """The mean of the weights of several checkpoints (section 6.1), computed in float32.

    Raises:
        UserError: One of them is damaged.
    """
    total: dict[str, torch.Tensor] = {}
    for checkpoint in checkpoints:
        if damage := checkpoint.damage():
            raise UserError(f"{checkpoint} cannot be averaged: {damage}; remove it and resume from an older one.")
        for name, tensor in checkpoint.weights(is_average).items():
            total[name] = total.get(name, 0) + tensor.float() / len(checkpoints)
    return total


# ------------------------------------------------------------------------------------------------ what may not change

# What decides on which batches come, in which order; the place of a run in them means nothing with others.
ORDER = ("seed", "per_device_train_max_tokens", "bpe_dropout", "streaming")
STREAM = ("dataset_name", "dataset_config_name", "train_file", "train_split", "source_lang", "target_lang")
STREAM += ("source_column", "target_column", "max_source_length", "max_target_length", "max_train_samples")
# What decides on what is learnt of them.
UPDATE = ("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs", "weight_decay")
UPDATE += ("label_smoothing_factor", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "ema_decay")
UPDATE += ("r_drop_alpha", "attn_implementation", "gradient_checkpointing", "torch_compile")
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")  # of the config, which knows their defaults
# What the run began from, which a checkpoint holds already.
BEGINNING = ("model_name_or_path", "tokenizer_name", "vocab_size")
# What decides on how a model scores, and which is the best.
SCORING = ("metric_for_best_model", "num_beams", "length_penalty")  # and the validation pairs


def settings_of(
    args, config: VanillaTransformerConfig, data: dict[str, str | None], batches_per_step: int, precision: str
) -> dict:
    """What a checkpoint keeps of the options, so that it is noticed what has changed when it is resumed from.

    `data` are the fingerprints of the training and the validation pairs.
    """
    names = ORDER + UPDATE + BEGINNING + SCORING + (STREAM if args.streaming else ())
    if args.bpe_dropout:
        names += ("max_source_length", "max_target_length")
    settings = {name: getattr(args, name) for name in names} | {name: getattr(config, name) for name in DROPOUTS}
    settings |= {"data": data["train"], "validation": data["validation"]}
    return settings | {"batches_per_step": batches_per_step, "mixed_precision": precision}


def compare_settings(checkpoint: Checkpoint, before: dict, now: dict, num_types: int) -> list[str]:
    """The options that have changed since a checkpoint, in words, where going on with them is meant to be possible.

    `num_types` is the size of the vocabulary.

    Raises:
        UserError: The data or its order have changed, so that the run could not go on where it was.
    """
    instead = f"begin a new run, from its weights by --model_name_or_path {checkpoint} if you like"
    changed = {name: (before.get(name), value) for name, value in now.items() if before.get(name) != value}
    if now["vocab_size"] in (None, num_types):  # what came of the number that was asked for
        changed.pop("vocab_size", None)
    for name in ORDER + STREAM + BEGINNING:
        if name in changed:
            old, new = changed[name]
            raise UserError(f"--{name} is {new}, and {old} in {checkpoint}; give it the same value, or {instead}.")
    if before["data"] != now["data"]:
        raise UserError(
            f"The training pairs are not those of {checkpoint}: the dataset, its columns, its limits or its tokenizer "
            f"have changed. Bring back what was there, or {instead}."
        )
    if before["batches_per_step"] != now["batches_per_step"]:
        raise UserError(
            f"A step of {checkpoint} is made of {before['batches_per_step']} batches, and now of "
            f"{now['batches_per_step']}; choose --gradient_accumulation_steps so that, times the number of processes, "
            f"it is the same, or {instead}."
        )
    words = {"validation": "the validation pairs"}
    return [words.get(name, f"--{name} {old}, now {new}") for name, (old, new) in changed.items()]
