"""`vanilla-transformer distill` from texts to a scored student, killed and resumed, and in several processes."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from filelock import FileLock
from helpers import command_error, read_sample, table_rows
from runs import Fork, ranks

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main
from vanilla_transformer.commands.distill import distill
from vanilla_transformer.students import groups
from vanilla_transformer.students.options import DistillOptions
from vanilla_transformer.training import hardware

BRIEF = "--num_beams 2 --max_new_tokens 12 --keep numbers odd_lengths repetition"
TRAINING = "--size tiny --max_steps 6 --eval_steps 6 --vocab_size 320 --max_eval_samples 4 --num_examples 1 --seed 3"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The current directory, with 60 texts and two test pairs; groups are small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(groups, "GROUP", 25)
    monkeypatch.setattr(hardware, "configure", lambda *_: None)
    write_texts(tmp_path, 60)
    return tmp_path


def write_texts(folder: Path, count: int):
    """mono.en, with an empty and a repeated line, and test.tsv."""
    pairs = read_sample(count)
    lines = [source for source, _ in pairs] + ["", pairs[0][0]]
    (folder / "mono.en").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    rows = ["source\ttarget", *("\t".join(pair) for pair in pairs[:2])]
    (folder / "test.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_student_of_a_teacher_with_another_vocabulary(here, marian, capsys):
    """Steps that are done are not repeated, and other options are refused."""
    command = (
        f"distill --teacher {marian} --source_file mono.en --output_dir out {BRIEF} {TRAINING} --n_best 2".split()
    )
    main(command)
    report = Path("out/report.md").read_text(encoding="utf-8")
    assert report in capsys.readouterr().out
    numbers = dict(row for row in table_rows(report) if len(row) == 2)
    assert numbers["lines that were given"] == "62" and numbers["distinct texts"] == "60"
    systems = ["system", str(marian), "student", "student, ctranslate2 int8"]
    assert [row[0] for row in table_rows(report) if len(row) > 8] == systems
    pairs, test = rows_of(Path("out/pairs/train.jsonl")), rows_of(Path("out/pairs/test.jsonl"))
    assert len(test) == 3 and int(numbers["pairs to train on"]) == len(pairs) > 60
    results = json.loads(Path("out/evaluation/results.json").read_text(encoding="utf-8"))
    teacher, student, int8 = results["systems"].values()
    assert teacher["megabytes"] > 0 and student["megabytes"] > int8["megabytes"] > 0
    assert student["BLEU"]["p_value"] is not None and student["sentences_per_second"] > 0
    written = [row["student"] for row in rows_of(Path("out/evaluation/translations.jsonl"))]
    assert written == Translator.from_pretrained("out/student")([row["source"] for row in test])
    student = json.loads(Path("out/student/config.json").read_text(encoding="utf-8"))
    assert (student["d_model"], student["position_embedding_type"]) == (64, "marian")

    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*") if path.is_file()}
    main(command)
    assert report in capsys.readouterr().out
    changed = {path for path, written_at in before.items() if path.stat().st_mtime_ns != written_at}
    assert changed == {Path("out/distill.json"), Path("out/report.md")}
    with FileLock(here / "out" / ".lock"):
        assert "Another distill is running in out; choose" in command_error(capsys, *command)
    said = command_error(capsys, *command, "--hours", "2", "--max_new_tokens", "13")
    assert "--hours has no effect with --max_steps" in said
    said = command_error(capsys, *command, "--max_new_tokens", "13")
    assert "out was begun with other options: --max_new_tokens was 12, now 13. Restore them, remove out/transl" in said
    shutil.rmtree("out/student")
    said = command_error(capsys, *command)
    assert "out/student is missing, from which others were made" in said and "out/ctranslate2 out/evaluation." in said


def test_true_pairs_a_test_set_and_a_round_trip(here, marian, folder, capsys):
    """From Python; two teachers translate all texts, the second in the form of CTranslate2."""
    pytest.importorskip("ctranslate2")
    main(["convert", folder, "second", "--to", "ctranslate2"])
    (here / "true.txt").write_text("A dog.\tEin Hund.\nA cat.\tEine Katze.\n" * 3, encoding="utf-8")
    keep = ["numbers", "odd_lengths", "repetition", "placeholders"]
    how = {"num_beams": 2, "max_new_tokens": 8, "keep": keep, "round_trip": folder, "min_round_trip": 1.0}
    options = DistillOptions(
        Path("out"), [str(marian), "second"], ["mono.en"], train_file=["true.txt"], to=["native"], **how
    )
    rest = [*TRAINING.split(), "--test_file", "test.tsv", "--position_embedding_type", "sinusoidal"]
    distill(options, rest)
    printed = capsys.readouterr().out
    assert "second translates 60 texts." in printed and "--remove_overlap leaves out" in printed
    pairs = rows_of(Path("out/pairs/train.jsonl"))
    counts = json.loads(Path("out/pairs/filter.json").read_text(encoding="utf-8"))
    assert counts["pairs"] == 120 and counts["dropped"]["round_trip"]["count"] > 0 and counts["held_out"] == 0
    assert len(pairs) == 120 - sum(one["count"] for one in counts["dropped"].values())
    results = json.loads(Path("out/evaluation/results.json").read_text(encoding="utf-8"))
    assert [*results["systems"]] == [str(marian), "second", "student"] and results["sentences"] == 2
    assert Path("out/native/config.json").exists() and not Path("out/ctranslate2").exists()
    recipe = Path("out/student/recipe.yaml").read_text(encoding="utf-8")
    assert "true.txt" in recipe and "position_embedding_type: sinusoidal" in recipe


def test_translations_of_a_language_model_take_the_place_of_a_teacher(here, capsys):
    pairs = read_sample(60)
    lines = [target for _, target in pairs] + ["", "Noch eine."]
    (here / "theirs.de").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = f"distill --source_file mono.en --output_dir out {TRAINING} --to none --translations".split()
    main([*command, "theirs.de"])
    assert "# A student of theirs.de" in capsys.readouterr().out
    trained = {(row["source"], row["target"]) for row in rows_of(Path("out/pairs/train.jsonl"))}
    assert len(trained) > 50 and trained <= {*pairs, (pairs[0][0], "Noch eine.")}
    (here / "short.de").write_text("Ein Hund.\n")
    assert "short.de has 1 lines for 62 of --source_file" in command_error(capsys, *command, "short.de")
    rows = "".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in pairs)
    (here / "pairs.jsonl").write_text(rows, encoding="utf-8")
    main(f"distill --translations pairs.jsonl --output_dir other {TRAINING} --to none".split())
    found = {(row["source"], row["target"]) for row in rows_of(Path("other/pairs/train.jsonl"))}
    assert found <= {*pairs} and len(found) == 57


# ------------------------------------------------------------------------------------------- killed, several processes

LINES = 1200  # three groups
COMMAND = f"distill --source_file mono.en --output_dir {{out}} {BRIEF} {TRAINING} --save_steps 5"
COMMAND += " --eval_steps 10 --max_steps 30 --to none"


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder, LINES)
    return folder


@pytest.fixture(scope="module")
def start(texts, marian):
    """start(out) -> a [`Fork`] that distills into `out`; it is killed in the end."""
    running = []

    def start(out: str, **env: str) -> Fork:
        words = [*COMMAND.format(out=out).split(), "--teacher", str(marian)]
        running.append(Fork(words, texts / f"{len(running)}.log", cwd=texts, **env))
        return running[-1]

    yield start
    for run in running:
        run.process.kill()


@pytest.fixture(scope="module")
def whole(start, texts) -> Path:
    """What a distillation that nothing stops leaves."""
    run = start("whole")
    assert run.wait(300) == 0, run.printed()
    return texts / "whole"


def wait_for(pattern: str, folder: Path, run: Fork):
    deadline = time.monotonic() + 120
    while not any(folder.glob(pattern)):
        assert time.monotonic() < deadline, f"there is no {pattern}"
        assert run.process.is_alive(), f"ended before there was {pattern}"
        time.sleep(0.02)


def products(out: Path) -> dict[str, bytes]:
    """What must not depend on where a distillation was killed."""
    names = ["pairs/train.jsonl", "pairs/test.jsonl", "student/model.safetensors", "student/tokenizer.json"]
    names += ["evaluation/translations.jsonl", *(f"translations/0/{number:07}.json" for number in range(3))]
    return {name: (out / name).read_bytes() for name in names}


@pytest.mark.slow
def test_a_distillation_killed_three_times_gives_the_same_student(start, texts, whole):
    """While it translates, before the first checkpoint, and after it, each time at a random moment."""
    for stage, longest in [
        ("translations/0/*.json", 1.5),
        ("student/recipe.yaml", 0.5),
        ("student/checkpoint-*", 1.0),
    ]:
        run = start("killed")
        wait_for(stage, texts / "killed", run)
        time.sleep(random.uniform(0, longest))
        assert run.process.is_alive()
        run.process.kill()
        run.wait()
    assert not (texts / "killed" / "evaluation").exists()
    run = start("killed")
    assert run.wait(300) == 0, run.printed()
    assert "resuming from killed/student/checkpoint-" in run.printed()
    assert products(texts / "killed") == products(whole)


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(start, texts, whole):
    shutil.copytree(whole, texts / "out", ignore=shutil.ignore_patterns("student*", "evaluation*"))
    run = start("out")
    wait_for("student/checkpoint-*", texts / "out", run)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(60) == 130
    printed = run.printed().rstrip()
    assert "which is saved; resume with" in printed and printed.endswith("run the same command again to resume.")


@pytest.mark.slow
def test_two_processes_share_the_texts_and_one_goes_on(start, texts, whole):
    """What the two translate is what one translates."""
    both = [start("both", **env) for env in ranks()]
    wait_for("translations/0/0000001.json", texts / "both", both[0])
    for run in both:
        run.process.terminate()
    for run in both:
        run.wait(60)
    both = [start("both", **env) for env in ranks()]
    assert [run.wait(300) for run in both] == [0, 0], both[0].printed() + both[1].printed()
    one, two = products(whole), products(texts / "both")
    assert all(one[name] == two[name] for name in one if name.startswith(("translations", "pairs")))
    assert (texts / "both" / "report.md").exists()
