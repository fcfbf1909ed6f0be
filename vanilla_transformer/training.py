"""What a training run is made of: the schedule, the optimiser and its step, and the state that outlives a stop."""

import contextlib
import ctypes
import json
import math
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .errors import UserError

# ------------------------------------------------------------------------------------------------------------ schedule


def inverse_square_root(step: int, warmup_steps: int) -> float:
    """The paper's schedule as a share of its peak (section 5.3, Equation 3): linear warm-up, then step^-0.5.

    transformers has it too, by this name; it stands here for all to see.

    Equation 3 peaks at step `warmup_steps`, at (d_model warmup_steps)^-0.5. `step` counts from 1.
    """
    warmup_steps = max(1, warmup_steps)
    return min(step / warmup_steps, math.sqrt(warmup_steps / step))


def paper_learning_rate(d_model: int, warmup_steps: int) -> float:
    """The peak of the paper's schedule, (d_model warmup_steps)^-0.5 (section 5.3)."""
    return (d_model * max(1, warmup_steps)) ** -0.5


def learning_rate_schedule(name: str, peak: float, warmup_steps: int, max_steps: int) -> Callable[[int], float]:
    """The learning rate as a function of the step, which counts from 1; `name` is one of transformers' schedules."""
    if name == "inverse_sqrt":
        return lambda step: peak * inverse_square_root(step, warmup_steps)
    # transformers hands out a schedule only with an optimiser to drive; what is wanted is its function of the step.
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=peak)
    try:
        scheduler = get_scheduler(name, unused, num_warmup_steps=warmup_steps, num_training_steps=max_steps)
    except ValueError as error:
        raise UserError(f"--lr_scheduler_type {name} with --learning_rate {peak}: {error}") from error
    factor = scheduler.lr_lambdas[0]
    return lambda step: peak * factor(step)


# -------------------------------------------------------------------------------------------------- optimiser and step


def make_optimizer(model: nn.Module, args) -> torch.optim.AdamW:
    """AdamW with the betas and epsilon of section 5.3 by default; weight decay spares biases and norms."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    spared = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    # The learning rate is set at each step.
    return torch.optim.AdamW(
        groups, lr=0.0, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon, fused=True
    )


def keep_freed_memory():
    """Makes glibc keep the memory of freed tensors instead of mapping it anew, and zeroed, at every step.

    Training steps on a CPU spend much of their time on that. Elsewhere than on glibc it does nothing.
    """
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_top_pad, 2**28)


def seed_step(seed: int, step: int, process_index: int):
    """Makes the dropout of a step a pure function of (seed, step, process), so that no generator needs to be saved."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, process_index]).generate_state(1, np.uint64)[0] >> 1))


def optimizer_step(model, optimizer, batches: list[dict], learning_rate: float, args, accelerator) -> torch.Tensor:
    """Updates the weights once by the batches of this and all other processes, as if they were one big batch.

    The loss is the sum over the real target tokens of all of them divided by their number. Returns a tensor of 5: the
    sum of the loss (nats), the real target tokens, the real source tokens, both with padding, over all processes, and
    the norm of the gradient.
    """
    counts = torch.tensor([count_tokens(batch) for batch in batches], dtype=torch.float32).sum(dim=0)
    counts = accelerator.reduce(counts.to(accelerator.device))
    target_tokens = counts[0].clamp(min=1)
    loss = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(batches, start=1):
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        # Processes exchange their gradients once, with the last batch.
        is_last = number == len(batches)
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            smoothing = args.label_smoothing_factor
            part = model(**batch, label_smoothing=smoothing, num_items_in_batch=target_tokens).loss
            # They average them; times the number of processes, it is the sum.
            accelerator.backward(part * accelerator.num_processes)
        loss += part.detach()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    loss_sum = accelerator.reduce(loss) * target_tokens
    return torch.cat([loss_sum[None], counts, torch.as_tensor(grad_norm, device=loss.device)[None]])


def count_tokens(batch: dict) -> tuple[int, int, int]:
    """Real target tokens, real source tokens, and padded_tokens of both sides with padding."""
    padded_tokens = batch["input_ids"].numel() + batch["labels"].numel()
    return int((batch["labels"] != -100).sum()), int(batch["attention_mask"].sum()), padded_tokens


# ----------------------------------------------------------------------------------------------- state and checkpoints


@dataclass
class RunState:
    """Where a run is: everything that a resumed run must know besides weights and optimiser."""

    step: int = 0
    train_runtime: float = 0.0  # seconds of training steps, evaluation and saving left out
    loss_sum: float = 0.0  # nats, over all real target tokens so far
    target_tokens: int = 0
    source_tokens: int = 0
    padded_tokens: int = 0
    best_bleu: float = -1.0
    best_step: int = 0
    evaluations_without_improvement: int = 0
    history: list[dict] = field(default_factory=list)  # what was logged, for the curves

    def log(self, step: int, window: list[torch.Tensor], seconds: float, learning_rate: float) -> dict:
        """Adds what the steps since the last call came to, the tensors of [`optimizer_step`]; returns the log's entry.

        Raises:
            UserError: The loss is no number any more.
        """
        loss_sum, target_tokens, source_tokens, padded_tokens, norms = (
            torch.stack(window).cpu().double().sum(dim=0).tolist()
        )
        entry = {
            "step": step,
            "loss": loss_sum / max(1, target_tokens),
            "learning_rate": learning_rate,
            "grad_norm": norms / len(window),
            "target_tokens_per_second": target_tokens / seconds,
            "padding_fraction": 1 - (source_tokens + target_tokens) / max(1, padded_tokens),
        }
        if not math.isfinite(entry["loss"] + entry["grad_norm"]):
            raise UserError(
                f"The loss is {entry['loss']} and the norm of its gradient {entry['grad_norm']} at step {step}, with "
                f"learning rate {learning_rate:.2e}; no checkpoint was overwritten. Lower --learning_rate, lengthen "
                "--warmup_steps or clip harder by --max_grad_norm."
            )
        self.step = step
        self.train_runtime += seconds
        self.loss_sum += loss_sum
        self.target_tokens += int(target_tokens)
        self.source_tokens += int(source_tokens)
        self.padded_tokens += int(padded_tokens)
        self.history.append(entry)
        return entry

    def log_scores(self, scores: dict):
        """Adds an evaluation at the present step, and keeps track of the best."""
        self.history.append({"step": self.step, **{k: v for k, v in scores.items() if k.startswith("eval_")}})
        if scores["eval_bleu"] > self.best_bleu:
            self.best_bleu, self.best_step, self.evaluations_without_improvement = scores["eval_bleu"], self.step, 0
        else:
            self.evaluations_without_improvement += 1

    def results(self) -> dict:
        """What `all_results.json` says of the training."""
        return {
            "train_runtime": self.train_runtime,
            "train_steps": self.step,
            "train_loss": self.loss_sum / max(1, self.target_tokens),
            "train_target_tokens": self.target_tokens,
            "train_target_tokens_per_second": self.target_tokens / max(1e-9, self.train_runtime),
            "padding_fraction": 1 - (self.source_tokens + self.target_tokens) / max(1, self.padded_tokens),
        }


def save_checkpoint(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, optimizer, state: RunState, ema=None
):
    """Writes a loadable model directory that also holds the optimiser and the run's state.

    It is written beside its place and renamed at the end, so that a checkpoint is whole or is not there. The optimiser
    is saved by the names of its parameters, as safetensors, which tie it to no order of parameters or processes.

    Raises:
        UserError: A weight is no finite number.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(
                f"'{name}' holds numbers that are not finite after step {state.step}, which is not saved; lower "
                "--learning_rate or lengthen --warmup_steps."
            )
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    tensors = {f"{name}/{key}": value for name, part in moments.items() for key, value in part.items()}
    save_file(tensors, unfinished / "optimizer.safetensors")
    if ema is not None:
        weights = {name: parameter.detach().cpu() for name, parameter in ema.module.named_parameters()}
        save_file(weights, unfinished / "ema.safetensors")
    (unfinished / "trainer_state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def load_checkpoint(folder: Path, model: PreTrainedModel, optimizer, ema=None) -> RunState:
    """Puts weights, optimiser and average back as [`save_checkpoint`] found them, and returns the run's state.

    Raises:
        UserError: The folder is no checkpoint of train.py, is damaged, or is one of another model.
    """
    try:
        state = read_state(folder)
        refuse_other_config(folder, model.config)
        load_weights(model, read_weights(folder))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_optimizer_state_dict(model, optimizer, options=options)
        saved: dict[str, dict] = {}
        for name, tensor in load_file(folder / "optimizer.safetensors").items():
            parameter, key = name.rsplit("/", 1)
            saved.setdefault(parameter, {})[key] = tensor
        for name, moments in whole["state"].items():
            if name not in saved or saved[name]["exp_avg"].shape != moments["exp_avg"].shape:
                raise ValueError(f"the optimiser's state of '{name}' is missing or of another shape.")
        set_optimizer_state_dict(model, optimizer, {**whole, "state": saved}, options=options)
        if ema is not None and not (folder / "ema.safetensors").exists():
            raise ValueError("it was written without --ema_decay; leave that out.")
        if ema is not None:
            load_weights(ema.module, read_weights(folder, is_ema=True))
            ema.n_averaged.fill_(1)  # at 0 the next update would start anew
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"--resume_from_checkpoint {folder} cannot be resumed from: {reason} "
            "It must be a whole checkpoint-N folder that train.py wrote with the same model options."
        ) from error
    return state


def read_state(folder: Path) -> RunState:
    """The run's state; raises ValueError if it is not whole."""
    saved = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    if not isinstance(saved, dict) or saved.keys() != asdict(RunState()).keys():
        raise ValueError("trainer_state.json is not what save_checkpoint writes.")
    if f"checkpoint-{saved['step']}" != folder.resolve().name:
        raise ValueError(f"trainer_state.json is of step {saved['step']}.")
    return RunState(**saved)


def refuse_other_config(folder: Path, config: VanillaTransformerConfig):
    """Raises ValueError if the checkpoint's weights are those of a model that computes something else."""
    saved = VanillaTransformerConfig.from_pretrained(folder)
    for name in VanillaTransformerConfig.__annotations__:
        if "dropout" not in name and getattr(saved, name) != getattr(config, name):
            raise ValueError(f"its `{name}` is {getattr(saved, name)}, and that of this run {getattr(config, name)}.")


def read_weights(folder: Path, is_ema: bool = False) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, or their moving average, each shared one once."""
    return load_file(folder / ("ema.safetensors" if is_ema else "model.safetensors"))


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, torch.Tensor]):
    """Copies `weights` into the parameters; raises ValueError that names a missing, unknown or wrongly shaped one."""
    parameters = dict(model.named_parameters())
    for name in sorted(parameters.keys() ^ weights.keys()):
        raise ValueError(f"'{name}' is {'missing' if name in parameters else 'no parameter of this model'}.")
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape:
            raise ValueError(f"'{name}' has shape {list(weights[name].shape)}, not {list(parameter.shape)}.")
        parameter.copy_(weights[name])


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    whole = [path.parent for path in output_dir.glob("checkpoint-*/trainer_state.json")]
    found = [p for p in whole if p.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")))


def delete_old_checkpoints(output_dir: Path, keep: int, best_step: int):
    """Deletes all checkpoints but the newest `keep` and the best."""
    for folder in list_checkpoints(output_dir)[: -max(1, keep)]:
        if folder.name != f"checkpoint-{best_step}":
            shutil.rmtree(folder)


def average_checkpoints(folders: list[Path], is_ema: bool = False) -> dict[str, torch.Tensor]:
    """The mean of the weights of several checkpoints (section 6.1), computed in float32."""
    total: dict[str, torch.Tensor] = {}
    for folder in folders:
        for name, tensor in read_weights(folder, is_ema).items():
            total[name] = total.get(name, 0) + tensor.float() / len(folders)
    return total
