"""Teachers and student are scored side by side, and reported."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import TEXTS, table_rows

from vanilla_transformer import Translator
from vanilla_transformer.commands.distill import find_systems
from vanilla_transformer.evaluation.scores import Scorer
from vanilla_transformer.students.options import DistillOptions
from vanilla_transformer.students.scoring import System, compare, megabytes, table, write_report
from vanilla_transformer.students.translating import Teacher


def test_systems_are_compared_and_reported(folder, tmp_path, capsys):
    """The second system writes the references; the first, a model, is the baseline."""
    pairs = Dataset.from_dict({"source": TEXTS, "target": [text.lower() for text in TEXTS]})
    load, lower = lambda: Translator.from_pretrained(folder), lambda _, texts, label: list(map(str.lower, texts))
    systems = {"a": System(load, Translator.__call__), "b": System(load, lower)}
    compare(systems, pairs, Scorer("de"), tmp_path / "evaluation")
    results = json.loads((tmp_path / "evaluation" / "results.json").read_text())["systems"]
    assert results["b"]["BLEU"]["score"] == pytest.approx(100) and results["b"]["BLEU"]["p_value"] is not None
    size = megabytes(Translator.from_pretrained(folder))
    assert [one["megabytes"] for one in results.values()] == [size, size] == [pytest.approx(size_of(folder), 0.2)] * 2
    assert min(one["sentences_per_second"] for one in results.values()) > 0
    first, *_ = (tmp_path / "evaluation" / "translations.jsonl").read_text().splitlines()
    row = {"source": TEXTS[0], "reference": TEXTS[0].lower(), "a": load()(TEXTS[:1])[0], "b": TEXTS[0].lower()}
    assert json.loads(first) == row

    dropped = {"numbers": {"count": 3, "source": "7 <b>", "target": "8"}}
    write(tmp_path / "pairs" / "filter.json", {"pairs": 12, "train": 8, "held_out": 1, "dropped": dropped})
    student = {"num_parameters": 1234, "train_steps": 5, "train_runtime": 90.0}
    write(tmp_path / "student" / "all_results.json", student)
    write(tmp_path / "native" / "config.json", {})
    write_report(tmp_path, ["a"], {"lines that were given": 20}, ["native"])
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert f"{report}\nThis report is {tmp_path / 'report.md'}." in capsys.readouterr().out
    assert "1,234 parameters. It was trained for 5 steps in 1.5 minutes" in report and "how far the student" in report
    rows = table_rows(report)
    counts = [["lines that were given", "20"], ["pairs", "12"], ["- that lack a number of the source", "-3"]]
    counts += [["held out to score the student", "-1"], ["pairs to train on", "8"]]
    assert rows[1:6] == counts and ["numbers", "7 &lt;b&gt;", "8"] in rows and rows[-1] == ["native", "0.0"]


def write(file: Path, content: dict):
    file.parent.mkdir()
    file.write_text(json.dumps(content))


def size_of(folder: str) -> float:
    return (Path(folder) / "model.safetensors").stat().st_size / 1e6


def test_a_table_shows_texts_as_they_are():
    made = table(["source", "number"], [("<b>a</b> | b\nc & d", "1"), ("x" * 200, "22")])
    assert "| &lt;b&gt;a&lt;/b&gt; \\| b c &amp; d " in made
    assert table_rows(made)[-1] == ["x" * 100, "22"]


def test_teachers_of_any_name_have_rows_of_their_own():
    teachers = [Teacher([name], DistillOptions("out")) for name in ("student", "a", "a", "source")]
    names = ["student (teacher 1)", "a", "a (teacher 3)", "source (teacher 4)", "student"]
    assert [*find_systems(Path("out"), teachers, [])] == names
