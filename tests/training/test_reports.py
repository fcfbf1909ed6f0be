"""What a run says about itself."""

import io
import re
import sys

import pytest

from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.pairs import Splits
from vanilla_transformer.training.reports import describe_run, progress_bar, show_progress
from vanilla_transformer.training.state import TrainerState


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
