"""Checkpoints: folders that are loadable models, hold all that a run needs to go on, and can be checked."""

import contextlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .errors import UserError
from .training import RunState

SUMS = "SHA256SUMS"  # as `sha256sum --check` reads it


class Checkpoint:
    """A folder `checkpoint-N`, which is there as a whole or not at all."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def step(self) -> int:
        return int(self.folder.resolve().name.removeprefix("checkpoint-"))

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
        if self.folder.exists():  # damaged, or saved where the run was stopped
            replaced = self.rename(".replaced")
            unfinished.rename(self.folder)
            shutil.rmtree(replaced)
        else:
            unfinished.rename(self.folder)

    def rename(self, suffix: str) -> Path:
        """Gives the folder a name under which it is no checkpoint; what had that name is deleted."""
        renamed = self.folder.with_name(self.folder.name + suffix)
        shutil.rmtree(renamed, ignore_errors=True)
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
        return f"its {SUMS} does not name {', '.join(sorted(missing))}" if missing else None

    @contextlib.contextmanager
    def explaining(self):
        """Turns what goes wrong in reading into a UserError that names the folder and the reason."""
        try:
            yield
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().split("\n")[0]
            raise UserError(
                f"--resume_from_checkpoint {self} cannot be resumed from: {reason} "
                "It must be a whole checkpoint-N folder that train.py wrote with the same model options."
            ) from error

    def state(self) -> RunState:
        """The run's state; raises ValueError if it is not whole."""
        saved = json.loads((self.folder / "trainer_state.json").read_text(encoding="utf-8"))
        if not isinstance(saved, dict) or saved.keys() != asdict(RunState()).keys():
            raise ValueError("trainer_state.json is not what a checkpoint holds.")
        if f"checkpoint-{saved['step']}" != self.folder.resolve().name:
            raise ValueError(f"trainer_state.json is of step {saved['step']}.")
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
    found = [path for path in output_dir.glob("checkpoint-*") if path.is_dir()]
    found = [Checkpoint(path) for path in found if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def restore_replaced(output_dir: Path):
    """Puts back what a kill between the two renamings of [`Checkpoint.write`] has left without its name."""
    for replaced in output_dir.glob("checkpoint-*.replaced"):
        with contextlib.suppress(OSError):  # the new one is there, or another process was first
            replaced.rename(replaced.with_suffix(""))


def delete_old_checkpoints(output_dir: Path, keep: int, best: list[int]):
    """Deletes all but the newest `keep` and those of the steps `best`, and what a kill has left in part.

    What a stop has left does not count as new.
    """
    for kind in ("unfinished", "replaced", "deleted"):
        for remains in output_dir.glob(f"checkpoint-*.{kind}"):
            shutil.rmtree(remains, ignore_errors=True)
    *older, newest = list_checkpoints(output_dir)
    regular = [checkpoint for checkpoint in older if not is_interrupted(checkpoint)]
    kept = [newest.step, *best, *(checkpoint.step for checkpoint in regular[::-1][: max(0, keep - 1)])]
    for checkpoint in older:
        if checkpoint.step not in kept:
            shutil.rmtree(checkpoint.rename(".deleted"))  # gone as a whole, whenever the run is killed


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
UPDATE += ("r_drop_alpha", "dropout", "attention_dropout", "activation_dropout", "attn_implementation")
UPDATE += ("gradient_checkpointing", "torch_compile")


def settings_of(
    args, config: VanillaTransformerConfig, data: str | None, batches_per_step: int, precision: str
) -> dict:
    """What a checkpoint keeps of the options, so that it is noticed what has changed when it is resumed from."""
    names = ORDER + UPDATE + (STREAM if args.streaming else ())
    settings = {name: getattr(config, name) if hasattr(config, name) else getattr(args, name) for name in names}
    return settings | {"data": data, "batches_per_step": batches_per_step, "mixed_precision": precision}


def compare_settings(checkpoint: Checkpoint, before: dict, now: dict) -> list[str]:
    """The options that have changed since a checkpoint, in words, where going on with them is meant to be possible.

    Raises:
        UserError: The data or its order have changed, so that the run could not go on where it was.
    """
    instead = f"begin a new run, from its weights by --model_name_or_path {checkpoint} if you like"
    changed = {name: (before.get(name), value) for name, value in now.items() if before.get(name) != value}
    for name in ORDER + STREAM:
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
    return [f"--{name} {old}, now {new}" for name, (old, new) in changed.items()]
