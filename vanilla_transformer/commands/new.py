"""Make a directory to train in: train.py, push_to_hub.py, recipes and the sample, to read and change.

The two scripts say how to install this package as it is installed here, so that `uv run train.py` needs only uv.
"""

import argparse
import json
import re
import shlex
import shutil
from importlib.metadata import distribution
from pathlib import Path

from ..files import PACKED, PROJECT, new_folder

FILES = ("train.py", "push_to_hub.py", "recipes/**/*.yaml", "sample_dataset/*.jsonl")
NEXT = """Made {0} with train.py, push_to_hub.py, recipes and sample_dataset. Next:
  cd {0}
  accelerate launch train.py                            # trains the sample; or: uv run train.py
  accelerate launch train.py --train_file pairs.tsv     # your own pairs
  python train.py --help"""


def add_arguments(parser: argparse.ArgumentParser):
    """The options of `vanilla-transformer new`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a new directory")


def run(options: argparse.Namespace):
    """Writes the new directory, all of it or, after an error, nothing, and prints what to type next."""
    directory = options.directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(directory) as folder:
        for file in (file for pattern in FILES for file in PROJECT.glob(pattern)):
            copy = folder / file.relative_to(PROJECT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        for script in folder.glob("*.py"):
            script.write_text(with_package(script.read_text(encoding="utf-8")), encoding="utf-8")
    print(NEXT.format(shlex.quote(str(directory))))


def with_package(script: str) -> str:
    """The script, whose inline metadata tell uv where this package and version are."""
    if PROJECT != PACKED:
        return script.replace('path = "."', f"path = {json.dumps(PROJECT.as_posix())}", 1)
    return re.sub(r'"vanilla-transformer"\]\n# tool.*', lambda _: f'"{requirement()}"]', script, count=1)


def requirement() -> str:
    """The package as pip and uv can install it again: from its file or repository, or else by its version."""
    package = distribution("vanilla-transformer")
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    if not origin:
        return f"vanilla-transformer=={package.version}"
    url = origin["url"]
    if commit := origin.get("vcs_info"):
        url = f"{commit['vcs']}+{url}@{commit['commit_id']}"
    return f"vanilla-transformer @ {url}"
