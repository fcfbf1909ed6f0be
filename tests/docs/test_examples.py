"""examples/: the scripts write what they say, and the recipes train on it."""

import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from datetime import date
from functools import cache, partial
from itertools import combinations
from pathlib import Path

import datasets
import pytest
from helpers import ROOT, python_output, save_untrained
from safetensors.torch import load_file

from vanilla_transformer.data.splits import load_pairs
from vanilla_transformer.data.tokenizer import tokenizer_for_training
from vanilla_transformer.training.recipe import parse_arguments

EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
TASKS = ["copy", "reverse", "sort"]
GENERATORS = {"dates": [], **{task: ["--task", task] for task in TASKS}, "keywords": [], "chinese": []}
RECIPES = {"dates": "dates", "sequences": "reverse", "keywords": "keywords", "chinese": "chinese"}
every_generator = pytest.mark.parametrize("name", GENERATORS)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each test gets its own directory and cache, and can import the scripts."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path


def script(name: str):
    """A script as a module, which makes the same splits only once."""
    module = importlib.import_module("sequences" if name in TASKS else name)
    if hasattr(module, "make_splits") and not hasattr(module.make_splits, "cache_info"):
        module.make_splits = cache(module.make_splits)
    return module


def generate(name: str, *more: str):
    script(name).main([*GENERATORS[name], *more])


def splits_of(name: str) -> dict[str, list[tuple[str, str]]]:
    """What a generator makes by default."""
    return script(name).make_splits(*([name] if name in TASKS else []), *([] if name == "chinese" else [42]))


# ------------------------------------------------------------------------------------------------- all the generators


@every_generator
def test_train_py_reads_the_generated_pairs(name):
    """By the recipe of that generator, if there is one."""
    generate(name)
    (recipe,) = [recipe for recipe, generator in RECIPES.items() if generator == name] or [None]
    data = ["--config", f"{EXAMPLES}/{recipe}.yaml"] if recipe else ["--dataset_name", f"outputs/{name}_dataset"]
    data, _, options, _ = parse_arguments(data)
    read = load_pairs(data)
    found = {split: list(zip(pairs["source"], pairs["target"], strict=True)) for split, pairs in read.items()}
    assert list(found) == ["train", "validation", "test"] and found == splits_of(name)
    if recipe:
        assert options.output_dir == Path(f"outputs/{name}") and options.warmup_steps < options.max_steps / 4
    if name == "chinese":
        assert tokenizer_for_training(data.tokenizer_name).pad_token == "<|endoftext|>"


@every_generator
def test_no_source_is_in_two_splits(name):
    sources = {split: [source for source, _ in pairs] for split, pairs in splits_of(name).items()}
    for one, other in combinations(sources.values(), 2):
        assert set(one).isdisjoint(other)
    if name != "keywords":
        assert len({source for texts in sources.values() for source in texts}) == sum(map(len, sources.values()))


@pytest.mark.parametrize(
    ("name", "option", "directory", "file"),
    [
        *((name, "output_dir", "mine", "mine/train.jsonl") for name in GENERATORS),
        ("chinese", "tokenizer_dir", "mine", "mine/tokenizer.json"),
    ],
)
def test_existing_directory_is_left_alone(name, option, directory, file):
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_bytes(b"mine\n")
    with pytest.raises(SystemExit, match=f"--{option} {directory} cannot be created: .*; choose another"):
        generate(name, f"--{option}", directory)
    assert Path(file).read_bytes() == b"mine\n" and list(Path("mine").iterdir()) == [Path(file)]


def test_pairs_are_shown_on_stdout_of_any_encoding(monkeypatch):
    """Letters that it lacks are escaped."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii", write_through=True))
    generate("chinese")
    assert b"the first: \\u" in output.getvalue()


# ---------------------------------------------------------------------------------------------------- what they write


def test_dates_of_the_dataset_are_in_one_split_and_have_their_iso_date():
    dates, splits = script("dates"), splits_of("dates")
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 10_000, "validation": 500, "test": 500}
    pairs = [pair for pairs in splits.values() for pair in pairs]
    assert len({target for _, target in pairs}) == len(pairs)
    for source, target in pairs:
        assert source in [dates.say(date.fromisoformat(target), phrase) for phrase in dates.PHRASES]


@pytest.mark.parametrize("task", TASKS)
def test_sequences_are_copied_reversed_and_sorted(task):
    expected = {"copy": list, "reverse": lambda letters: letters[::-1], "sort": sorted}[task]
    for split, count in {"train": 20_000, "validation": 500, "test": 500}.items():
        letters = [(source.split(" "), target.split(" ")) for source, target in splits_of(task)[split]]
        assert len(letters) == count and {len(source) for source, _ in letters} == set(range(3, 11))
        assert all(target == expected(source) for source, target in letters)
        assert [source for source, _ in letters] == [source.split(" ") for source, _ in splits_of("copy")[split]]


def test_paragraphs_of_the_help_are_paired_by_their_ids(tmp_path, capsys):
    pages = {
        "en-US": '<h1 id="a">Save <b>all</b></h1><p id="b" class="x">Two\n lines &amp; more</p><p id="c">lost</p>',
        "es": '<p id="b">Dos líneas</p><h1 id="a">Guardar\ttodo</h1><p id="d">nuevo</p><p id="c"></p>',
    }
    for language, text in pages.items():
        page = tmp_path / "usr/share/libreoffice/help" / language / "text" / "shared" / "a.html"
        page.parent.mkdir(parents=True)
        page.write_text(text, encoding="utf-8")
    script("libreoffice_help").main(str(tmp_path), "en-US", "es")
    assert capsys.readouterr().out == "Save all\tGuardar todo\nTwo lines & more\tDos líneas\n"


# ---------------------------------------------------------------------------------------------------- recipes, README


COMMANDS = re.findall(r"(?m)^    ((?:python|accelerate|echo) .*)$", README)


def test_readme_names_every_file():
    named = {Path(word).name for command in COMMANDS for word in re.findall(r"examples/\w+\.\w+", command)}
    assert named == {path.name for path in EXAMPLES.glob("*.*")} - {"README.md", "common.py"}


@pytest.fixture
def run(forked_python):
    """run(*command) -> what a Python command prints, in the directory of the test."""
    return partial(python_output, python=forked_python, env={"ACCELERATE_USE_CPU": "true"})


@pytest.fixture
def train(run):
    """train(recipe, *options) -> what train.py prints, without a launcher, which would import as much again."""
    return lambda name, *more: run(ROOT / "train.py", "--config", EXAMPLES / f"{name}.yaml", *more)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "generator"), RECIPES.items(), ids=RECIPES)
def test_example_trains_from_its_script_to_a_model(name, generator, run, train):
    run(str(EXAMPLES / f"{name}.py"), *GENERATORS[generator])
    few = ["--max_steps", "2", "--eval_steps", "2", "--max_eval_samples", "3", "--max_predict_samples", "3"]
    assert f"The model is in outputs/{generator}." in train(name, *few)
    results = json.loads(Path(f"outputs/{generator}/all_results.json").read_text(encoding="utf-8"))
    assert results["train_steps"] == 2 and results["eval_samples"] == results["test_samples"] == 3
    if name == "dates":
        assert f"a model of {results['num_parameters']:,} parameters" in README
    if name == "keywords":
        (code,) = re.findall(r"(?ms)^```python\n(.*?)^```$", README)
        assert re.match(r"\d+ of 432 contain all their keywords\n", run("-c", code))
    if name == "sequences":
        (command,) = (line for line in COMMANDS if "outputs/sort_dataset --output_dir" in line)
        generate("sort")
        assert "The model is in outputs/sort." in train("sequences", *command.split("sequences.yaml")[1].split(), *few)


@pytest.mark.slow
def test_chinese_is_memorized_and_translated_greedily_and_with_beams(run, train):
    generate("chinese")
    train("chinese")
    data = ["--model", "outputs/chinese", "--dataset_name", "outputs/chinese_dataset"]
    assert "| 100.0 % |" in run("-m", "vanilla_transformer", "evaluate", *data, "--split", "train")
    for beams in ("1", "4"):
        command = ["-m", "vanilla_transformer", "translate", "--model", "outputs/chinese", "--num_beams", beams]
        assert run(*command, input="纽约是一座城市\n") == "New York is a city\n"


@pytest.mark.slow
def test_seq2seq_trainer_trains_the_sample_model_further(run):
    save_untrained(Path("outputs/sample"))
    Path("sample_dataset").symlink_to(ROOT / "sample_dataset")
    options = ["--output_dir", "outputs/tuned", "--max_steps", "1", "--report_to", "none"]
    run(str(EXAMPLES / "seq2seq_trainer.py"), *options)
    before, after = (load_file(f"outputs/{name}/model.safetensors") for name in ("sample", "tuned"))
    assert before.keys() == after.keys() and any((before[name] != after[name]).any() for name in before)


LOADING = """
require(process.argv[1]);
const read = async (file) => { if (file.endsWith(process.argv[2])) throw new Error(file); return new Uint8Array(); };
loadTranslator("model", { read, run: read }).then(console.log, (error) => console.log(error.message));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
@pytest.mark.parametrize("file", ["worker.wasm", "worker.js", "model/vocab.spm"])
def test_a_file_that_the_offline_page_cannot_load_is_told(file):
    """Instead of a page that says for ever that the model is being loaded."""
    command = ["node", "-e", LOADING, EXAMPLES / "offline" / "engine.js", file]
    printed = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=True).stdout
    assert printed.strip().endswith(file)


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
@pytest.mark.parametrize(
    ("words", "status", "said"), [(["0"], 1, "are 0; give a whole"), (["x"], 1, "x;"), ([], 0, "")]
)
def test_translating_offline_checks_beams_and_needs_a_text(words, status, said):
    """Before it loads the model, so an empty input gives an empty output."""
    command = ["node", EXAMPLES / "offline" / "translate.cjs", *words]
    done = subprocess.run(command, input="", encoding="utf-8", capture_output=True)
    assert done.returncode == status and done.stdout == "" and said in done.stderr
