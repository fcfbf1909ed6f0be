"""examples/: the generators write what they say, and the recipes train on it. Run: pytest tests/test_examples.py"""

import importlib
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from calendar import month_abbr
from collections import Counter
from datetime import date, timedelta
from functools import cache
from itertools import combinations, cycle, pairwise
from pathlib import Path

import datasets
import pytest
from helpers import TINY

from vanilla_transformer import Translator, VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.pairs import load_pairs
from vanilla_transformer.data.tokenizer import load_tokenizer, special_token_ids, train_tokenizer
from vanilla_transformer.training.arguments import make_parser, parse_options

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
TASKS = ["copy", "reverse", "sort"]
GENERATORS = {"dates": [], **{task: ["--task", task] for task in TASKS}, "keywords": [], "chinese": []}
RECIPES = {"dates": "dates", "sequences": "reverse", "keywords": "keywords", "chinese": "chinese"}
every_generator = pytest.mark.parametrize("name", GENERATORS)
drawn_ones = pytest.mark.parametrize("name", [name for name in GENERATORS if name != "chinese"])


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """Lets the scripts be imported."""
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each test in a directory and with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path


def script(name: str):
    return importlib.import_module("sequences" if name in TASKS else name)


def generate(name: str, *more: str):
    script(name).main([*GENERATORS[name], *more])


@cache
def splits_of(name: str, *seed: int) -> dict[str, list[tuple[str, str]]]:
    """What a generator makes, with a seed unless it draws nothing."""
    arguments = [name] if name in TASKS else []
    return script(name).make_splits(*arguments, *([] if name == "chinese" else seed or (42,)))


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def bag(text: str) -> tuple[str, ...]:
    return tuple(sorted(text.split()))


# ------------------------------------------------------------------------------------------------- all the generators


@every_generator
def test_the_pairs_that_are_made_are_those_that_train_py_reads(name):
    """Also where a target, as an ISO date, could be taken for something else than text."""
    generate(name)
    read = load_pairs(parse_options(["--dataset_name", f"outputs/{name}_dataset"]))
    found = {split: list(zip(pairs["source"], pairs["target"], strict=True)) for split, pairs in read.items()}
    made = splits_of(name)
    assert list(made) == ["train", "validation", "test"] and all(made.values())
    assert found == made


@every_generator
def test_a_command_that_is_repeated_changes_nothing(name, elsewhere):
    generate(name)
    before = files(elsewhere)
    assert before
    generate(name)
    assert files(elsewhere) == before


@drawn_ones
def test_a_seed_decides_what_is_drawn(name):
    generate(name, "--output_dir", "first")
    for folder, seed in [("same", 42), ("other", 7)]:
        generate(name, "--output_dir", folder, "--seed", str(seed))
    assert files(Path("first")) == files(Path("same"))
    assert all(text != files(Path("other"))[name] for name, text in files(Path("first")).items())
    assert splits_of(name, 7) != splits_of(name, 42)


@every_generator
def test_no_source_is_in_two_splits(name):
    sources = {split: [source for source, _ in pairs] for split, pairs in splits_of(name).items()}
    for one, other in combinations(sources.values(), 2):
        assert set(one).isdisjoint(other)
    if name != "keywords":
        assert len({source for texts in sources.values() for source in texts}) == sum(map(len, sources.values()))


FOREIGN = {
    "another dataset": {"train.jsonl": b"{}\n", "train.csv": b"source,target\n"},
    "another file": {"notes.txt": b"mine\n"},
    "a folder": {"train.jsonl/notes.txt": b"mine\n", "train.csv/notes.txt": b"mine\n"},
}


@every_generator
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_its_own_is_never_overwritten(name, kind):
    for path, data in FOREIGN[kind].items():
        (Path("mine") / path).parent.mkdir(parents=True, exist_ok=True)
        (Path("mine") / path).write_bytes(data)
    with pytest.raises(SystemExit) as ended:
        generate(name, "--output_dir", "mine")
    assert files(Path("mine")) == FOREIGN[kind]
    assert re.fullmatch(r"--output_dir mine .*; choose another\.", ended.value.code)


def test_a_dataset_of_another_seed_is_not_overwritten():
    generate("sort", "--output_dir", "mine")
    before = files(Path("mine"))
    with pytest.raises(SystemExit, match="--output_dir mine holds other files"):
        generate("sort", "--output_dir", "mine", "--seed", "7")
    assert files(Path("mine")) == before


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_directory_that_cannot_be_made(place):
    Path("file").write_text("mine")
    with pytest.raises(SystemExit, match=f"--output_dir {place} cannot be written: .*; choose another"):
        generate("dates", "--output_dir", place)
    assert files(Path()) == {"file": b"mine"}


WRONG = {
    "a negative seed": ("dates", ["--seed", "-1"], "-1 is no number from 0 on"),
    "no number": ("keywords", ["--seed", "x"], "x is no number from 0 on"),
    "no such task": ("sequences", ["--task", "shuffle"], "invalid choice: 'shuffle'"),
    "no task": ("sequences", [], "--task"),
    "no such option": ("chinese", ["--seed", "1"], "--seed 1"),
    "no model": ("exact_match", ["--dataset_name", "x"], "--model"),
    "no beams": ("exact_match", ["--model", "x", "--dataset_name", "x", "--num_beams", "0"], "0 is no number from 1"),
}


@pytest.mark.parametrize("name, argv, reason", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_told_in_one_sentence(name, argv, reason, capsys, elsewhere):
    with pytest.raises(SystemExit) as ended:
        script(name).main(argv)
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.out == "" and told.err.count("\n") == 1 and reason in told.err
    assert files(elsewhere) == {}


SCRIPTS = sorted(set(EXAMPLES.glob("*.py")) - {EXAMPLES / "common.py"})


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help_shows_the_docstring(path, elsewhere):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path), "--help"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stderr == ""
    text = importlib.import_module(path.stem).__doc__
    assert f"python examples/{path.name}" in text and text.strip() in result.stdout
    assert files(elsewhere) == {}


# -------------------------------------------------------------------------------------------------------------- dates

VALUES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
VALUES += "seventeen eighteen nineteen twenty"
VALUES = {word: value for value, word in enumerate(VALUES.split())}
VALUES |= {"oh": 0, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
ORDINALS = {"first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12}
ORDINALS |= {"twentieth": 20, "thirtieth": 30}


def ordinal_of(word: str) -> int | None:
    """21 of twenty-first; None of what is no ordinal."""
    *tens, last = word.split("-")
    value = ORDINALS.get(last, VALUES.get(last.removesuffix("th")) if last.endswith("th") else None)
    return None if value is None else value + sum(VALUES[word] for word in tens)


def year_of(words: list[str]) -> int:
    if words[:2] == ["two", "thousand"]:
        return 2000 + sum(VALUES[word] for word in words[3:])
    if words[1:] == ["hundred"]:
        return 100 * VALUES[words[0]]
    return 100 * VALUES[words[0]] + sum(VALUES[part] for word in words[1:] for part in word.split("-"))


def read_date(text: str) -> date:
    """What a date in words says, found by other means than it was said."""
    words = [word for word in text.replace(",", "").split() if word not in ("the", "of", "in", "day")]
    (month,) = (list(month_abbr).index(word[:3]) for word in words if word[0].isupper())
    words = [word for word in words if not word[0].isupper()]
    digits = [re.fullmatch(r"(\d+)(st|nd|rd|th)?", word) for word in words]
    numbers = [int(found[1]) for found in digits if found]
    words = [word for word, found in zip(words, digits, strict=True) if not found]
    days = [number for number in numbers if number <= 31] + [ordinal_of(word) for word in words if ordinal_of(word)]
    years = [number for number in numbers if number > 31]
    words = [word for word in words if not ordinal_of(word)]
    (day,), (year,) = days, years or [year_of(words)]
    assert not (years and words)
    return date(year, month, day)


def test_dates_are_said_right():
    dates = script("dates")
    assert [dates.say(date(1987, 3, 21), phrase) for phrase in dates.PHRASES] == [
        "the twenty-first of March, 1987",
        "March the twenty-first, nineteen eighty-seven",
        "the twenty-first day of March in nineteen eighty-seven",
        "March 21, 1987",
        "21st March nineteen eighty-seven",
        "21 Mar 1987",
    ]
    shown = " ".join(dates.with_ending(day) for day in (1, 2, 3, 4, 11, 12, 13, 20, 22, 23, 30, 31))
    assert shown == "1st 2nd 3rd 4th 11th 12th 13th 20th 22nd 23rd 30th 31st"
    years = {1900: "nineteen hundred", 1906: "nineteen oh six", 1913: "nineteen thirteen", 2000: "two thousand"}
    years |= {2009: "two thousand and nine", 2010: "twenty ten", 2040: "twenty forty", 2099: "twenty ninety-nine"}
    assert {year: dates.year_in_words(year) for year in years} == years


def test_every_date_can_be_read_back_from_its_words():
    """Every fifth day of two centuries, each in one of the phrases in turn."""
    dates = script("dates")
    days = [date(1900, 1, 1) + timedelta(days=n) for n in range(0, (date(2100, 1, 1) - date(1900, 1, 1)).days, 5)]
    assert len({(day.month, day.day) for day in days}) == 366
    said = [dates.say(day, phrase) for day, phrase in zip(days, cycle(dates.PHRASES), strict=False)]
    assert [read_date(text) for text in said] == days


def test_dates_of_the_dataset():
    splits = splits_of("dates")
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 10_000, "validation": 500, "test": 500}
    pairs = [pair for pairs in splits.values() for pair in pairs]
    assert [read_date(source).isoformat() for source, _ in pairs] == [target for _, target in pairs]
    assert len({target for _, target in pairs}) == len(pairs)  # no date of test is in train in other words
    for pattern in [r"the \S+ of", r"[A-Z]\w+ the", r"the \S+ day of", r"[A-Z]\w+ \d", r"\d+[a-z]", r"\d+ [A-Z]"]:
        for pairs in splits.values():
            assert 0.1 < sum(bool(re.match(pattern, source)) for source, _ in pairs) / len(pairs) < 0.25
    assert not re.search("day,|Monday|Tuesday", " ".join(source for source, _ in pairs))


# ---------------------------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("task", TASKS)
def test_sequences_are_copied_reversed_and_sorted(task):
    splits = splits_of(task)
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 20_000, "validation": 500, "test": 500}
    for pairs in splits.values():
        letters = [(source.split(" "), target.split(" ")) for source, target in pairs]
        assert {len(source) for source, _ in letters} == set(range(3, 11))
        assert {letter for source, _ in letters for letter in source} == set("abcdefghijklmnopqrstuvwxyz")
        for source, target in letters:
            assert Counter(source) == Counter(target)
            if task == "copy":
                assert target == source
            elif task == "reverse":
                assert all(target[-1 - place] == letter for place, letter in enumerate(source))
            else:
                assert all(one <= next for one, next in pairwise(target))


def test_the_tasks_are_given_the_same_sources():
    sources = [{split: [source for source, _ in pairs] for split, pairs in splits_of(task).items()} for task in TASKS]
    assert sources[0] == sources[1] == sources[2]


# ----------------------------------------------------------------------------------------------------------- keywords


def english(split: str) -> list[str]:
    lines = (ROOT / "sample_dataset" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["en"] for line in lines]


def test_keywords_are_what_function_words_leave_of_a_sentence():
    left_out = set(script("keywords").FUNCTION_WORDS.split())
    in_order = 0
    for pairs in splits_of("keywords").values():
        for source, target in pairs:
            words = re.findall(r"\w+", target)
            words = [word if word in script("keywords").NAMES else word.lower() for word in words]
            rest = Counter(words) - Counter(source.split())
            assert Counter(source.split()) + rest == Counter(words)
            assert set(rest) <= left_out and left_out.isdisjoint(source.split())
            in_order += [word for word in words if word not in left_out] == source.split()
    assert 0.1 < in_order / sum(map(len, splits_of("keywords").values())) < 0.5  # short ones are, by chance


def test_keywords_keep_the_splits_of_the_sentences():
    keywords, seen = script("keywords"), set()
    for split, pairs in splits_of("keywords").items():
        bags = {text: bag(" ".join(keywords.keywords_of(text))) for text in english(split)}
        kept = [text for text in english(split) if len(bags[text]) >= 2 and bags[text] not in seen]
        assert [target for _, target in pairs] == kept
        assert [bag(source) for source, _ in pairs] == [bags[text] for text in kept]
        seen |= {bags[text] for text in kept}
        assert len(pairs) > 0.75 * len(bags)


def test_names_are_words_of_the_sample_that_always_have_a_capital():
    words = [word for split in ("train", "validation", "test") for text in english(split) for word in text.split()[1:]]
    capitals = {word.strip(".,?") for word in words if word[0].isupper()} - {"I"}
    assert capitals == script("keywords").NAMES


# ------------------------------------------------------------------------------------------------------------ chinese


def test_chinese_sentences():
    splits = splits_of("chinese")
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 40, "validation": 4, "test": 6}
    assert ("纽约是一座城市", "New York is a city") in splits["train"]
    characters = {character for source, _ in splits["train"] for character in source}
    words = {word for _, target in splits["train"] for word in target.split()}
    for source, target in (pair for pairs in splits.values() for pair in pairs):
        assert re.fullmatch("[\u4e00-\u9fff]+", source) and re.fullmatch("[A-Za-z ]+", target)
        assert set(source) <= characters and set(target.split()) <= words


def test_the_chinese_tokenizer_pads_with_its_end_and_has_no_beginning(capsys):
    generate("chinese")
    tokenizer = load_tokenizer("outputs/chinese_tokenizer")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0 and tokenizer.bos_token is None
    assert f"{len(tokenizer)} types" in capsys.readouterr().out
    for pairs in splits_of("chinese").values():
        for text in (text for pair in pairs for text in pair):
            ids = tokenizer(text).input_ids
            assert ids[-1] == tokenizer.eos_token_id not in ids[:-1]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_tokenizer_is_not_overwritten():
    Path("mine").mkdir()
    Path("mine/tokenizer.json").write_text("{}")
    with pytest.raises(SystemExit, match="--tokenizer_dir mine holds other files"):
        generate("chinese", "--tokenizer_dir", "mine")
    assert files(Path("mine")) == {"tokenizer.json": b"{}"}


# -------------------------------------------------------------------------------------------------------- exact match


@pytest.fixture
def untrained(elsewhere) -> str:
    """A small model that writes what it will."""
    tokenizer = train_tokenizer(["The cat sleeps.", "Die Katze schläft."], 300)
    config = VanillaTransformerConfig(**TINY | {"vocab_size": len(tokenizer)} | special_token_ids(tokenizer))
    VanillaTransformerForConditionalGeneration(config).save_pretrained("model")
    tokenizer.save_pretrained("model")
    return "model"


def test_exact_matches_are_counted_and_others_shown(untrained, capsys):
    sources = ["The cat sleeps.", "A dog.", "Die Katze", "cat", "The The The"]
    outputs = Translator.from_pretrained(untrained)(sources)
    targets = [output if place in (0, 3, 4) else f"not {output}" for place, output in enumerate(outputs)]
    pairs = [{"source": s, "target": t, "en": s, "de": "x"} for s, t in zip(sources, targets, strict=True)]
    Path("pairs").mkdir()
    text = "".join(json.dumps(pair) + "\n" for pair in pairs)
    for split in ("train", "test"):
        Path(f"pairs/{split}.jsonl").write_text(text if split == "test" else json.dumps(pairs[0]) + "\n")
    argv = ["--model", untrained, "--dataset_name", "pairs"]
    exact_match = script("exact_match")
    capsys.readouterr()
    exact_match.main(argv)
    told = capsys.readouterr().out
    assert told.startswith("3 of 5 are exactly right\n")
    for place in (1, 2):
        assert f"  {sources[place]} -> {outputs[place]}, and not {targets[place]}\n" in told
    exact_match.main([*argv, "--split", "train", "--num_beams", "2"])
    assert re.match("[01] of 1 are exactly right\n", capsys.readouterr().out)
    exact_match.main([*argv, "--source_column", "en", "--target_column", "de"])
    assert capsys.readouterr().out.startswith("0 of 5 are exactly right\n")
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    for more, reason in [
        (["--split", "nowhere"], "no split 'nowhere'.*train, test"),
        (["--target_column", "fr"], "fr does not exist"),
        (["--model", "broken"], "broken cannot be loaded"),
    ]:
        with pytest.raises(SystemExit, match=f"^exact_match.py: .*{reason}"):
            exact_match.main([*argv, *more])


# ---------------------------------------------------------------------------------------------------- recipes, README


def recipe_of(name: str) -> Namespace:
    return parse_options(["--config", str(EXAMPLES / f"{name}.yaml")])


def test_there_is_a_recipe_for_each_generator():
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(RECIPES)
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == set(RECIPES) | {"common", "exact_match"}


@pytest.mark.parametrize("name, generator", RECIPES.items(), ids=RECIPES)
def test_a_recipe_reads_what_its_generator_writes(name, generator):
    """Without an option, both: the files are where the recipe looks for them, and the model goes elsewhere."""
    recipe = recipe_of(name)
    generate(generator)
    assert load_pairs(recipe).keys() == {"train", "validation", "test"}
    assert recipe.output_dir == f"outputs/{generator}"
    assert recipe.max_steps and recipe.warmup_steps < recipe.max_steps / 4
    assert (recipe.tokenizer_name is None) == (name != "chinese")
    if recipe.tokenizer_name:
        assert load_tokenizer(recipe.tokenizer_name).pad_token == "<|endoftext|>"


def commands() -> list[str]:
    return re.findall(r"(?m)^    ((?:python|accelerate|echo) .*)$", README)


def test_commands_of_the_readme_name_files_and_options_that_exist():
    named = [word for command in commands() for word in re.findall(r"examples/\w+\.\w+", command)]
    assert {Path(word).name for word in named} == {p.name for p in EXAMPLES.glob("*.*")} - {"README.md", "common.py"}
    own = set(make_parser()._option_string_actions) | {"--help", "--task", "--split", "--model"}
    options = set(re.findall(r"(?<![\w-])--[a-z_]+", README))
    assert len(options) >= 8 and options <= own
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (EXAMPLES / link).exists()


def test_numbers_of_the_readme_that_code_decides():
    sizes = {name: {split: len(pairs) for split, pairs in splits_of(name).items()} for name in GENERATORS}
    assert f"{sizes['dates']['train']:,} pairs to train on" in README
    assert f"{sizes['sort']['train']:,} sequences of three to ten letters" in README
    assert f"of {sizes['keywords']['test']} hold all their keywords" in README
    assert f"`{sizes['chinese']['train']} of {sizes['chinese']['train']} are exactly right`" in README
    assert f"The {sizes['chinese']['train']} training pairs" in README and sum(sizes["chinese"].values()) == 50


# --------------------------------------------------------------------------------------------------------------- slow


def run(*command: str, **given) -> str:
    """What a command prints, run in the directory of the test, on the CPU, without network."""
    environment = {"HF_DATASETS_CACHE": "cache", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    environment = os.environ | environment
    command = [sys.executable, *command]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, **given)
    assert result.returncode == 0, result.stderr
    return result.stdout


def train(name: str, *more: str) -> str:
    config = ["--config", str(EXAMPLES / f"{name}.yaml")]
    return run("-m", "accelerate.commands.launch", str(ROOT / "train.py"), *config, *more)


FEW = ["--max_steps", "2", "--eval_steps", "2", "--max_eval_samples", "3", "--max_predict_samples", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("name, generator", RECIPES.items(), ids=RECIPES)
def test_an_example_trains_from_its_script_to_a_model(name, generator):
    run(str(EXAMPLES / f"{name}.py"), *GENERATORS[generator])
    assert f"The model is in outputs/{generator}." in train(name, *FEW)
    results = json.loads(Path(f"outputs/{generator}/all_results.json").read_text(encoding="utf-8"))
    assert results["train_steps"] == 2 and 0 <= results["test_bleu"] <= 100
    assert results["eval_samples"] == results["test_samples"] == 3
    parameters = re.search(r"a model of ([\d,]+) parameters", README)
    if name == "dates":
        assert f"{results['num_parameters']:,}" == parameters[1]
    if name == "keywords":
        (code,) = re.findall(r"(?ms)^```python\n(.*?)^```$", README)
        assert re.match(r"\d+ of 432 hold all their keywords\n", run("-c", code))


@pytest.mark.slow
def test_another_task_is_trained_by_the_options_of_the_readme():
    (command,) = (line for line in commands() if "outputs/sort_dataset --output_dir" in line)
    generate("sort")
    more = command.split("sequences.yaml")[1].split()
    assert "The model is in outputs/sort." in train("sequences", *more, *FEW)


@pytest.mark.slow
def test_chinese_is_learned_by_heart_and_translated_greedily_and_by_beams():
    generate("chinese")
    train("chinese")
    data = ["--model", "outputs/chinese", "--dataset_name", "outputs/chinese_dataset"]
    assert run(str(EXAMPLES / "exact_match.py"), *data, "--split", "train") == "40 of 40 are exactly right\n"
    for beams in ("1", "4"):
        command = ["-m", "vanilla_transformer", "translate", "--model", "outputs/chinese", "--num_beams", beams]
        assert run(*command, input="纽约是一座城市\n", encoding="utf-8") == "New York is a city\n"
