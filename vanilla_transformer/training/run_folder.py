"""The directory of a run (`--output_dir`): what it may overwrite, its lock, old checkpoints, the finished model."""

import contextlib
import errno
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from ..errors import UserError, one_line
from ..files import copy_permissions, remove_file, remove_folder, remove_unfinished, replacing_files, write_text
from ..hub.model_card import write_model_card
from ..inspection.attention import attention_maps, draw_attention
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .checkpoint import OPTIMIZER, list_checkpoints, step_of
from .final_weights import final_checkpoints, scheduled_checkpoints
from .report import plot_training_curves
from .state import TrainerState, Triggers

LOCK = ".lock"
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # of NFS or Lustre, as they are mounted
NEXT = """The model is in {0}. Now you can translate, try it in a browser, and publish it:

  vanilla-transformer translate --model {1} < in.txt > out.txt
  vanilla-transformer demo --model {1}
  python push_to_hub.py {1} --repo_id you/name
"""


def check_output_dir(output_dir: Path, checkpoint: Path | None):
    """Raises UserError if a run that resumes from `checkpoint`, or starts from scratch, would overwrite other files.

    A directory with a lock file but no model may be used: a run ended there before its first checkpoint.
    """
    existing = list_checkpoints(output_dir)
    if checkpoint is not None and checkpoint.resolve() in [one.resolve() for one in existing]:
        if checkpoint.name != existing[-1].name:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint} is older than {existing[-1]}; resume from that one, delete "
                "the newer checkpoints, or choose another --output_dir."
            )
    elif existing or (output_dir / "config.json").exists():
        how = "resume with --resume_from_checkpoint, or" if existing else "fine-tune it with --model_name_or_path and"
        raise UserError(f"--output_dir {output_dir} already holds a model; {how} choose another directory.")
    elif output_dir.is_dir() and any(output_dir.iterdir()) and not (output_dir / LOCK).exists():
        raise UserError(f"--output_dir {output_dir} is not empty; choose another directory.")


def prepare_output_dir(lock: FileLock, checkpoint: Path | None, recipe: str):
    """Creates and locks the output directory, removes what a killed run was still writing, and writes `recipe.yaml`.

    Raises UserError if another run is using it, or has written to it since this run chose its `checkpoint`.
    """
    output_dir = Path(lock.lock_file).parent
    check_output_dir(output_dir, checkpoint)  # before there is a lock file of our own
    lock_output_dir(lock, f"Another run is writing to --output_dir {output_dir}; choose another directory.")
    check_output_dir(output_dir, checkpoint)  # the other run may have ended while we waited
    remove_unfinished(output_dir)
    write_text(output_dir / "recipe.yaml", recipe)


def lock_output_dir(lock: FileLock, message: str):
    """Creates and locks the output directory; only prints a warning if its file system has no locks.

    Raises UserError with the `message` if another process holds the lock.
    """
    output_dir = Path(lock.lock_file).parent
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise UserError(message) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"warning: the file system of --output_dir {output_dir} cannot lock files ({one_line(error)}); see to it "
            "that no other run writes there at the same time."
        )
        (output_dir / LOCK).touch()


@contextlib.contextmanager
def offering_resume(output_dir: Path) -> Iterator[None]:
    """Adds to an error of a file, such as a full disk, that the run can be resumed, if it has saved a checkpoint."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if list_checkpoints(output_dir):
            error.remedy = "; resume with --resume_from_checkpoint"
        raise


def prune_checkpoints(state: TrainerState, triggers: Triggers):
    """Deletes all but the `save_total_limit` newest checkpoints, the best, and those to be averaged at the end.

    Once there is a scheduled checkpoint, one that was saved because of the time or a signal is deleted as soon as
    there is a newer one.
    """
    options, existing = triggers.options, list_checkpoints(triggers.options.output_dir)
    newest = (scheduled_checkpoints(options.output_dir, triggers) or existing)[-options.save_total_limit :]
    keep = [*newest, *final_checkpoints(state, triggers)]
    best = state.ranking(options.metric_for_best_model, options.greater_is_better)[:1]
    for checkpoint in existing[:-1]:
        if checkpoint not in keep and step_of(checkpoint) not in best:
            remove_folder(checkpoint, OPTIMIZER)


def save_model(
    output_dir: Path,
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    results: dict,
    history: list[dict],
    lowest_loss: float | None,
):
    """Writes the model, tokenizer, results, pictures and model card."""
    with replacing_files(output_dir) as folder:
        model.save_pretrained(folder)
        copy_permissions(folder)
        tokenizer.save_pretrained(folder)
    write_text(output_dir / "all_results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    plot_training_curves(history, output_dir / "training_curves.png", lowest_loss)
    remove_file(output_dir / "attention.png")  # from before the run was resumed
    for shortest in sorted(results["examples"], key=lambda example: len(example["source"]))[:1]:
        with contextlib.suppress(UserError):  # an empty translation has no attention
            maps = attention_maps(model, tokenizer, shortest["source"], shortest["translation"])
            draw_attention(maps, output_dir / "attention.png")
    write_model_card(output_dir)
    print(NEXT.format(output_dir, shlex.quote(str(output_dir))), end="")
