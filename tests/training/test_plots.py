"""The picture of a training run."""

import pytest
import torch
from helpers import training_options
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from vanilla_transformer.training.optimization import lowest_loss
from vanilla_transformer.training.plots import plot_training_curves

HISTORY = [{"step": step, "loss": 1 + 9 / step, "learning_rate": 1e-3 * step} for step in (1, 2, 4, 8)]
HISTORY.append({"step": 8, "eval_loss": 0.4, "eval_bleu": 30.0, "eval_chrf": 50.0})


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_no_prediction_has_a_lower_loss_than_the_bound(smoothing):
    """That of the smoothed targets themselves equals it."""
    bound = lowest_loss(training_options(f"--label_smoothing_factor={smoothing}"), 7)
    targets = torch.full((7,), smoothing / 7)
    targets[3] += 1 - smoothing
    best = targets.clamp(min=1e-30).log()
    rows = torch.stack([best, *torch.randn(20, 7)])
    loss, *others = cross_entropy(rows, torch.full((21,), 3), label_smoothing=smoothing, reduction="none")
    assert loss == pytest.approx(bound, abs=1e-6) and min(others) > bound


def test_a_teacher_has_other_targets():
    assert lowest_loss(training_options("--teacher=outputs/teacher"), 7) is None


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
