"""Tries this checkout with other versions of Python and of its dependencies, and prints a row of a table for each.

    python tests/versions.py --model outputs/sample lowest newest
    python tests/versions.py --model outputs/sample --python 3.13 pinned newest
    python tests/versions.py --model outputs/sample --python 3.12 --environment ENV newest
    python tests/versions.py --start 3.11 3.12 3.13

`pinned` are the versions of constraints.txt; `lowest` and `newest` the lowest and newest that pyproject.toml admits.
Each set is installed into a new environment by uv, or was installed into ENV before. There, the main job of the README
trains the sample, the tests of the model, its search and its conversions run, and the model of --model translates the
first test sentences: in the package and by the code that travels with it, each greedily and with 4 beams. The script
exits with 1 if a test fails, the sample stays below --min_bleu, or a translation differs from that of the environment
that runs this script. Several sets are tried at the same time, each on its share of the cores.

With --start, each of the Pythons only imports the package, reads every recipe and shows every --help.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = ("Python", "versions", "torch", "transformers", "datasets", "numpy", "sample BLEU", "same texts", "tests")

VERSIONS = """
import importlib.metadata, platform
print(platform.python_version())
print(*map(importlib.metadata.version, ["torch", "transformers", "datasets", "numpy"]), sep="\\n")
"""

# The remote code first: it is used as long as nothing imports the package.
TRANSLATE = """
import json, sys, torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

folder, texts = sys.argv[1], json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
inputs = tokenizer(texts, return_tensors="pt", padding=True)
translate = pipeline("vanilla-translation", model=folder, trust_remote_code=True)
assert "vanilla_transformer" not in sys.modules
found = []
for num_beams in (1, 4):
    outputs = model.generate(**inputs, num_beams=num_beams, early_stopping=num_beams > 1)
    found.append(tokenizer.batch_decode(outputs, skip_special_tokens=True))
    found.append([one["translation_text"] for one in translate(texts, num_beams=num_beams)])

from vanilla_transformer import Translator

found += [Translator.from_pretrained(folder)(texts, num_beams=num_beams) for num_beams in (1, 4)]
print(json.dumps(found))
"""


START = """
import contextlib, io, platform, sys
from pathlib import Path
from vanilla_transformer.__main__ import VERBS, main
from vanilla_transformer.training.recipe import parse_arguments

for recipe in Path("recipes").glob("*.yaml"):
    parse_arguments(["--config", str(recipe)])
for program, words in [(parse_arguments, []), *((main, [verb]) for verb in VERBS)]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
        program([*words, "--help"])
    assert len(shown.getvalue()) > 200, words
    assert words or "width of the residual stream" in " ".join(shown.getvalue().split()).lower()
print(f"Python {platform.python_version()}: the package is imported, recipes are read, --help is shown")
"""


def install(kind: str, python: str, torch: str | None, environment: Path, package: str = ".[test]"):
    """Makes an environment with uv. `torch` replaces the version that would be chosen, if given."""
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", python, environment], check=True)
    options = {"pinned": ["-c", "constraints.txt"], "lowest": ["--resolution", "lowest-direct"], "newest": []}[kind]
    options += ["--python", environment / "bin" / "python"]
    if torch is not None:
        override = environment / "torch.txt"
        override.write_text(f"torch=={torch}\n")
        options += ["--override", override]
    subprocess.run([*uv, "pip", "install", "--quiet", *options, "-e", package], cwd=ROOT, check=True)


class Environment:
    """An installed environment, whose programs run in the checkout, without the Hub, on some of the cores."""

    def __init__(self, path: Path, cores: Sequence[int] = ()):
        self.path, self.cores = path.absolute(), cores

    def run(self, *command, **options) -> subprocess.CompletedProcess:
        settings = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        settings.pop("PYTHONDONTWRITEBYTECODE", None)  # what uv installs is compiled when it is first imported
        settings |= {"VIRTUAL_ENV": str(self.path), "PATH": f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        pinned = ["taskset", "-c", ",".join(map(str, self.cores))] if self.cores else []
        options = {"cwd": ROOT, "env": settings, "encoding": "utf-8", "stdout": subprocess.PIPE, **options}
        return subprocess.run([*pinned, self.path / "bin" / command[0], *map(str, command[1:])], **options)


def translate(environment: Environment, model: Path, count: int) -> list[list[str]]:
    """The translations of so many sentences by each way of translating."""
    lines = (ROOT / "sample_dataset" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    texts = json.dumps([json.loads(line)["en"] for line in lines])
    done = environment.run("python", "-c", TRANSLATE, model.resolve(), input=texts, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def try_versions(kind: str, environment: Environment, options, expected: list[list[str]]) -> tuple[dict, bool]:
    """The row of one environment, and whether all was as it should be."""
    row = dict.fromkeys(COLUMNS, "") | {"versions": kind}
    versions = environment.run("python", "-c", VERSIONS, check=True).stdout.split()
    row |= zip(("Python", "torch", "transformers", "datasets", "numpy"), versions, strict=True)
    found = translate(environment, options.model, options.sentences)
    pairs = zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True)  # of a text, all its translations
    same = sum(theirs == ours for theirs, ours in pairs)
    row["same texts"] = f"{same} of {len(expected[0])}"
    with tempfile.TemporaryDirectory() as folder:
        steps = ["--max_steps", options.max_steps] if options.max_steps else []
        environment.run("accelerate", "launch", "train.py", "--output_dir", folder + "/sample", *steps)
        results = Path(folder, "sample", "all_results.json")
        bleu = json.loads(results.read_text(encoding="utf-8"))["test_bleu"] if results.exists() else 0.0
    row["sample BLEU"] = f"{bleu:.2f}"
    workers = len(environment.cores) or "auto"
    tests = environment.run("pytest", "-q", "-n", workers, *options.tests)
    print(tests.stdout, file=sys.stderr)
    row["tests"] = (tests.stdout.splitlines() or ["none"])[-1].strip("= ")
    return row, same == len(expected[0]) and bleu >= options.min_bleu and tests.returncode == 0


def start(python: str, torch: str | None):
    """Raises CalledProcessError if that Python cannot start the programs."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "environment")
        install("newest", python, torch, environment, ".")
        print(Environment(environment).run("python", "-c", START, check=True).stdout, end="", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="pinned | lowest | newest", help="what to install; one or more")
    parser.add_argument("--model", type=Path, default=Path("outputs/sample"), help="a model trained by the main job")
    parser.add_argument("--start", nargs="+", metavar="PYTHON", help="only start the programs, in each of these")
    parser.add_argument("--python", default=sys.executable, help="the interpreter, or its version")
    parser.add_argument("--environment", type=Path, help="an environment that has the versions already")
    parser.add_argument("--torch", metavar="VERSION", help="this version of torch, whatever the others")
    parser.add_argument("--sentences", type=int, default=200, help="how many of the test split are translated")
    parser.add_argument("--max_steps", type=int, help="train the sample for fewer steps than its recipe has")
    parser.add_argument("--min_bleu", type=float, default=95, help="what the sample must reach (default: 95)")
    tests = ["tests/model", "tests/conversion"]
    parser.add_argument("--tests", nargs="+", default=tests, help="what pytest runs (default: those of the table)")
    options = parser.parse_args()
    if wrong := {*options.kinds} - {"pinned", "lowest", "newest"}:
        parser.error(f"{min(wrong)} is none of pinned, lowest and newest")
    for python in options.start or []:
        start(python, options.torch)
    if options.start:
        return
    count = len(options.kinds)
    if count != 1 and (count == 0 or options.environment):
        parser.error("give one kind of versions, or several without --environment")
    cores = sorted(os.sched_getaffinity(0)) if count > 1 and shutil.which("taskset") else []
    expected = translate(Environment(Path(sys.prefix)), options.model, options.sentences)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as threads:
        trials = []
        for number, kind in enumerate(options.kinds):
            environment = options.environment or Path(folder, kind)
            if options.environment is None:  # one after the other, so that the next ones find all in uv's cache
                install(kind, options.python, options.torch, environment)
            share = cores[number::count] or cores
            trials.append(threads.submit(try_versions, kind, Environment(environment, share), options, expected))
        rows, are_right = zip(*(trial.result() for trial in trials), strict=True)
    print("| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", sep="\n")
    for row in rows:
        print("| " + " | ".join(row[column] for column in COLUMNS) + " |")
    sys.exit(not all(are_right))


if __name__ == "__main__":
    main()
