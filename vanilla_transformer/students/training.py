"""The words with which train.py trains a student, and the run of it, in this process."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from ..data.options import UNIGRAM_LACKS
from ..data.rows import find_files
from ..data.unigram import NEEDED
from ..errors import UserError, explaining
from ..training.recipe import NOT_IN_RECIPE, Options, parse_arguments
from .options import DistillOptions

EVERYWHERE = {"tokenizer_type": "unigram", "position_embedding_type": "marian"}  # what Marian's engines can run, too
# Options of train.py that need not be as they were when the same command is given again.
REPEATED = NOT_IN_RECIPE - {"resume_from_checkpoint", "dry_run", "size", "hours"}
OF_DISTILL = {"teacher", "num_beams", "length_penalty"}  # which mean the teacher's; a recipe can set the student's


def train_script() -> Path:
    """The path of train.py: in a wheel, where hatch_build.py puts it, or in the checkout."""
    package = Path(__file__).parents[1]
    packed = package / "project" / "train.py"
    return packed if packed.is_file() else package.parent / "train.py"


def held_out_file(output_dir: Path) -> str:
    """The test set of a student if `--test_file` is not given."""
    return str(output_dir / "pairs" / "test.jsonl")


def training_words(options: DistillOptions, rest: Sequence[str]) -> tuple[list[str], Options]:
    """The command line of train.py with `rest` from the user, and what it says.

    Raises UserError if it contradicts itself, a file does not exist, or sentencepiece is missing, before hours of
    translating.
    """
    given = {word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")}
    for name in ("dry_run", "resume_from_checkpoint"):
        if name in given:
            raise UserError(f"--{name} is an option of train.py alone; leave it out.")
    pairs = options.output_dir / "pairs"
    words = ["--train_file", str(pairs / "train.jsonl"), *(options.train_file or ())]
    words += ["--output_dir", str(options.output_dir / "student")]
    if not given & {"config", "model_name_or_path"}:
        lacks = {"tokenizer_type": UNIGRAM_LACKS}
        defaults = {name: value for name, value in EVERYWHERE.items() if not given & {name, *lacks.get(name, ())}}
        words += [f"--{name}={value}" for name, value in defaults.items()]
    if not given & {"remove_overlap", "streaming"}:
        words.append("--remove_overlap")
    words += rest
    asked = parse_arguments(words)
    for split in ("train", "validation", "test"):
        for name in getattr(asked.data, f"{split}_file") or ():
            if Path(name).parent != pairs:
                find_files(name, split)
    if not asked.data.test_file:
        words += ["--test_file", held_out_file(options.output_dir)]
        asked = parse_arguments(words)
    if asked.data.tokenizer_type == "unigram":
        with explaining(f"{NEEDED}, or give --tokenizer_type bpe", ModuleNotFoundError):
            import sentencepiece  # noqa: F401
    return words, asked


def is_trained(asked: Options) -> bool:
    """Whether train.py has ended: its last file is there, and there was nothing to push, which comes last."""
    return (asked.training.output_dir / "README.md").exists() and not asked.training.push_to_hub


def train(words: list[str], asked: Options):
    """Runs train.py in this process, so that they end together, from the newest checkpoint if there is one."""
    script = str(train_script())
    with patch.object(sys, "argv", [script, *repeated(words, asked), "--resume_from_checkpoint"]):
        runpy.run_path(script, run_name="__main__")


def repeated(words: list[str], asked: Options) -> list[str]:
    """The words or, if train.py has begun before, those that repeat what it did.

    Its recipe has what it chose, which another time might be something else, since it measures the speed of the
    machine. To it come the options that a recipe lacks, and metrics, which run code and so are asked for each time.
    """
    recipe, values = asked.training.output_dir / "recipe.yaml", vars(asked.training)
    if not recipe.exists():
        return words
    words = ["--config", str(recipe), *(f"--{name}={values[name]}" for name in sorted(REPEATED) if values[name])]
    return words + [f"--metrics={name}" for name in values["metrics"] or ()]


def settings_of(asked: Options) -> dict[str, object]:
    """The options of train.py that must be the same when the command is given again."""
    return {name: value for name, value in asked.values().items() if name not in REPEATED | OF_DISTILL}
