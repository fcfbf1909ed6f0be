"""The command line with which train.py trains a student, and the call of train.py, in this process."""

import hashlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ..data.options import FILE_OPTIONS, UNIGRAM_LACKS
from ..data.rows import find_files
from ..data.splits import SPLITS
from ..data.unigram import NEEDED
from ..errors import UserError, explaining
from ..files import PROJECT
from ..training.recipe import NOT_IN_RECIPE, Options, parse_arguments
from .options import DistillOptions
from .steps import EVALUATION, PAIRS, STUDENT, TEST, TRAIN

EVERYWHERE = {"tokenizer_type": "unigram", "position_embedding_type": "marian"}  # so that every engine can run it
# Options of train.py whose values may change when the command is given again; a recipe does not have them.
REPEATED = NOT_IN_RECIPE - {"resume_from_checkpoint", "dry_run", "size", "hours"}
OF_DISTILL = {"teacher", "num_beams", "length_penalty"}  # here the teacher's; for the student, a recipe can set them


def held_out_file(output_dir: Path) -> str:
    """The test set of a student if `--test_file` is not given."""
    return str(output_dir / PAIRS / TEST)


def training_words(options: DistillOptions, rest: Sequence[str]) -> tuple[list[str], Options]:
    """The command line of train.py, with `rest` from the user, and its options. Raises UserError as train.py does."""
    given = {word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")}
    for name in ("dry_run", "resume_from_checkpoint"):
        if name in given:
            raise UserError(f"--{name} is an option of train.py alone; leave it out.")
    words = ["--train_file", str(options.output_dir / PAIRS / TRAIN), *(options.train_file or ())]
    words += ["--output_dir", str(options.output_dir / STUDENT)]
    if not given & {"config", "model_name_or_path"}:
        taken = given | ({"tokenizer_type"} if given.intersection(UNIGRAM_LACKS) else set())
        words += [f"--{name}={value}" for name, value in EVERYWHERE.items() if name not in taken]
    words += [*([] if given & {"remove_overlap", "streaming"} else ["--remove_overlap"]), *rest]
    if not (asked := parse_arguments(words)).data.test_file:
        words += ["--test_file", held_out_file(options.output_dir)]
        asked = parse_arguments(words)
    return words, asked


def check_training(options: DistillOptions, asked: Options):
    """Raises UserError, before hours of translating, if train.py would lack a file of the user or sentencepiece."""
    files_of_user(options, asked)  # or UserError
    if asked.data.tokenizer_type == "unigram":
        with explaining(f"{NEEDED}, or give --tokenizer_type bpe", ModuleNotFoundError):
            import sentencepiece  # noqa: F401


def files_of_user(options: DistillOptions, asked: Options) -> dict[str, list[str]]:
    """By split, the files and URLs that train.py reads besides the pairs. Raises UserError if one does not exist."""
    found = {}
    for split in SPLITS:
        names = getattr(asked.data, f"{split}_file") or ()
        names = [name for name in names if Path(name).parent != options.output_dir / PAIRS]
        found[split] = [file for name in names for file in find_files(name, split)]
    return found


def digest_files(options: DistillOptions, asked: Options) -> dict[str, str]:
    """By split, a digest of the content of the user's local files."""
    digests = {}
    for split, files in files_of_user(options, asked).items():
        digest = hashlib.sha256()
        for file in files:
            if "://" not in file:
                with open(file, "rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
        digests[f"{split}_content"] = digest.hexdigest()
    return digests


def is_trained(asked: Options) -> bool:
    """Whether train.py has ended: it wrote its last file or, where it pushes at the end, the student was scored."""
    student = asked.training.output_dir
    return (student.with_name(EVALUATION) if asked.training.push_to_hub else student / "README.md").exists()


def train(words: list[str], asked: Options):
    """Runs train.py, from its newest checkpoint if there is one, in this process, so that a signal stops both."""
    script, before = str(PROJECT / "train.py"), sys.argv
    sys.argv = [script, *repeated(words, asked), "--resume_from_checkpoint"]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = before


def repeated(words: list[str], asked: Options) -> list[str]:
    """The command line or, if train.py was begun before, one that repeats what it chose, from its recipe.

    It might choose otherwise now, as it measures the speed of the machine. A recipe lacks the options of [`REPEATED`],
    its metrics, which run code, must be named each time, and the directory may have been moved.
    """
    recipe, values = asked.training.output_dir / "recipe.yaml", asked.values()
    if not recipe.exists():
        return words
    words = [f"--{name}={values[name]}" for name in ("output_dir", *sorted(REPEATED)) if values[name]]
    for name in (*sorted(FILE_OPTIONS), "reference_columns", "metrics"):
        words += [f"--{name}", *map(str, values[name])] if values[name] else []
    return ["--config", str(recipe), *words]


def settings_of(asked: Options) -> dict[str, object]:
    """The options of train.py that must be the same when the command is given again."""
    return {name: value for name, value in asked.values().items() if name not in REPEATED | OF_DISTILL}
