"""What a run says about itself."""

import io
import re
import sys

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from helpers import training_options
from matplotlib.figure import Figure

from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.splits import Splits
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.report import (
    RUN_NAMES,
    advise_on_low_scores,
    check_average,
    compare_rates,
    describe_run,
    name_better_checkpoint,
    plot_training_curves,
    progress_bar,
    show_progress,
    start_trackers,
)
from vanilla_transformer.training.state import TrainerState, Triggers


def test_languages_of_all_training_files_are_reported(accelerator):
    for directions, source, target in [("en-de en-fr", "en", "de, fr"), ("de-en fr-en", "de, fr", "en")]:
        data = DataOptions(train_file=["x", "y"], train_file_langs=directions.split())
        results = describe_run(data, Splits(), {})
        assert (results["source_lang"], results["target_lang"]) == (source, target)


def test_dataset_is_a_hub_id_or_a_name_without_the_way_there(accelerator):
    """What is published with the results has neither folders nor the password in a URL."""
    files = ["/home/me/a.tsv", "https://me:hunter2@example.org/private/b.csv", "hf://datasets/me/pairs/c.jsonl"]
    files.append("https://example.org/d.csv?token=hunter2&file=secret.csv")
    results = describe_run(DataOptions(train_file=files), Splits(), {})
    assert results["dataset"] == "a.tsv, b.csv, hf://datasets/me/pairs/c.jsonl, d.csv"


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_line_of_80_columns_or_one_for_each_log_entry(is_terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
    state = TrainerState(step=90_000, train_runtime=90_000.0)
    entry = {"loss": 10.123, "target_tokens_per_second": 1_234_567, "learning_rate": 1e-3}
    with progress_bar(90_000, 100_000, is_shown=True) as bar:
        bar.update()
        show_progress(bar, entry, state, 100_000, is_shown=True)
    written = sys.stderr.getvalue()
    if is_terminal:
        assert max(map(len, re.split(r"[\r\n]", written))) <= 80 and "loss 10.123, 1,234,567 tokens/s" in written
    else:
        assert written == "90,000/100,000: loss 10.123, 1,234,567 tokens/s, lr 1.0e-03, 2:46:40 left\n"


def test_only_one_process_shows_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal=False))
    entry = {"loss": 1.0, "target_tokens_per_second": 1, "learning_rate": 1e-3}
    with progress_bar(1, 9, is_shown=False) as bar:
        show_progress(bar, entry, TrainerState(step=1), 9, is_shown=False)
    assert sys.stderr.getvalue() == ""


CHANGED = "the learning rate goes from {} to 2.00e-03, as the schedule changed"


@pytest.mark.parametrize(
    "before, said",
    [
        (2.01e-3, "$"),
        (1e-4, f"warning: {CHANGED.format('1.00e-04')}; --learning_rate, "),
        (1e-2, CHANGED.format("1.00e-02")),
    ],
)
def test_another_learning_rate_of_a_resumed_run_is_said(before, said, capsys):
    history = [{"step": 3, "learning_rate": 0.7}, {"step": 6, "learning_rate": before}, {"step": 6, "eval_loss": 1.0}]
    compare_rates(TrainerState(step=6, history=history), lambda step: 2e-3 if step == 6 else 0.0)
    assert re.match(said, capsys.readouterr().out)


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--save_steps=3", (4, "--save_steps")),
        ("--eval_steps=4", (3, "--save_steps")),
        ("--eval_steps=4 --save_steps=2", None),
        ("--eval_steps=4 --save_steps=2 --average_checkpoints_by=score", (3, "--eval_steps")),
        ("", None),
        ("--average_checkpoints=0 --save_steps=3", None),
    ],
)
def test_too_few_checkpoints_for_the_average_are_said_before_the_run(argv, said, capsys):
    check_average(Triggers(training_options("--average_checkpoints=5", *argv.split()), 10))
    expected = "warning: --average_checkpoints 5 will average only the {} that are saved; save more often, with {}.\n"
    assert capsys.readouterr().out == (expected.format(*said) if said else "")


BETTER = [(9.0, 1.0, 2.0), (8.0, 3.0, 2.5)]  # the first by BLEU and loss


@pytest.mark.parametrize(
    "argv, scores, metric",
    [
        ("", BETTER, "bleu"),
        ("", [(9.0, 3.0, 2.0), (9.0, 3.0, 2.5)], None),  # only as good, although the lower loss ranks first
        ("--metric_for_best_model=chrf", BETTER, None),
        ("--metric_for_best_model=loss", BETTER, "loss"),
        ("--average_checkpoints=2", BETTER, "bleu"),
        ("--early_stopping_patience=3", BETTER, None),
        ("--ema_decay=0.9", BETTER, "bleu"),
        ("--average_checkpoints=2 --average_checkpoints_by=score", BETTER, None),
    ],
)
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_checkpoint_better_than_the_final_weights_is_named(argv, scores, metric, is_kept, tmp_path, capsys):
    if is_kept:
        (tmp_path / "checkpoint-4").mkdir()
    state = TrainerState()
    for state.step, (bleu, chrf, loss) in zip((4, 8), scores, strict=True):
        state.log_scores({"eval_bleu": bleu, "eval_chrf": chrf, "eval_loss": loss})
    name_better_checkpoint(state, training_options("--eval_steps=4", f"--output_dir={tmp_path}", *argv.split()))
    printed = capsys.readouterr().out
    said = f"checkpoint-4 was better than the final weights by --metric_for_best_model {metric} (bleu 9, not 8, "
    assert printed.startswith(said) if metric else printed == ""
    # The folder has the average that was scored beside its model.
    assert (f"{tmp_path}/checkpoint-4" in printed) == (is_kept and metric is not None and "ema" not in argv)


@pytest.mark.parametrize(
    ("bleu", "chrf", "exact", "is_low"), [(2.2, 22, 0, True), (0, 60, 0, False), (0, 20, 40, False), (9, 25, 0, False)]
)
def test_hardly_any_right_translation_is_said_with_what_would_help(bleu, chrf, exact, is_low, capsys):
    """Not where BLEU is of no use, as for single words."""
    for argv in [], ["--model_name_or_path=x"]:
        results = {"eval_bleu": bleu, "eval_chrf": chrf, "eval_exact_match": exact}
        advise_on_low_scores(results, training_options(*argv))
        said = capsys.readouterr().out
        assert ("most translations are wrong. What helps: more pairs" in said) == is_low
        assert ("--model_name_or_path" in said) == (is_low and not argv)


HISTORY = [{"step": step, "loss": 1 + 9 / step, "learning_rate": 1e-3 * step} for step in (1, 2, 4, 8)]
HISTORY.append({"step": 8, "eval_loss": 0.4, "eval_bleu": 30.0, "eval_chrf": 50.0})


@pytest.mark.parametrize("bound", [None, 0.9])
def test_curves_fill_their_axes_and_have_one_label_each(bound, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    plot_training_curves(HISTORY, tmp_path / "curves.png", bound)
    loss, score, rate = drawn[0].axes
    assert [axis.get_xlim() for axis in drawn[0].axes] == [(0, 8)] * 3
    assert list(loss.lines[0].get_ydata()) == [10, 5.5, 3.25, 2.125] and list(loss.lines[1].get_ydata()) == [0.4]
    assert [list(line.get_ydata()) for line in loss.lines[2:]] == ([[bound, bound]] if bound else [])
    labels = [text.get_text() for axis in (loss, score) for text in axis.get_legend().get_texts()]
    assert labels[:2] == ["training, smoothed targets", "validation"] and labels[-2:] == ["BLEU", "chrF"]
    assert len(set(labels)) == len(labels) == 4 + bool(bound) and rate.get_legend() is None


def test_a_run_without_history_is_drawn_too(tmp_path):
    plot_training_curves([], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------------------ trackers


class Tracker(GeneralTracker):
    """Keeps what it was made with."""

    name, requires_logging_directory, tracker, made = "", False, property(lambda self: self), {}

    def __init__(self, project: str, **options):
        super().__init__()
        self.made[self.name] = [project, options]


@pytest.fixture
def start(accelerator, monkeypatch):
    """start(names, run_name) -> what each tracker was made with."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)

    def start(names: list[str], run_name: str | None = None) -> dict:
        made = {}
        for name in names:
            kind = type("Named", (Tracker,), {"name": name, "made": made})
            monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, kind)
        monkeypatch.setattr(accelerator, "log_with", names)
        monkeypatch.setattr(accelerator, "trackers", [])
        start_trackers(accelerator, run_name, {"seed": 1})
        return made

    return start


def test_started_trackers_are_named_and_the_project_is_that_of_the_environment(start, monkeypatch, capsys):
    assert start([]) == {} and capsys.readouterr().out == ""
    assert start(["wandb", "mlflow"]) == dict.fromkeys(["wandb", "mlflow"], ["vanilla-transformer", {}])
    assert capsys.readouterr().out == "reporting to wandb, mlflow\n"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert start(["wandb"])["wandb"][0] == "mine"


def test_run_name_reaches_each_tracker_that_takes_one(start):
    made = start([*RUN_NAMES, "tensorboard"], "first")
    assert {name: options for name, (_, options) in made.items() if options} == {
        name: {key: "first"} for name, key in RUN_NAMES.items()
    }
    with pytest.raises(UserError, match="--run_name has no effect with --report_to tensorboard"):
        start(["tensorboard"], "first")
