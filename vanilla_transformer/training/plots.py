"""The picture of a training run."""

from pathlib import Path

from matplotlib.figure import Figure  # without pyplot, which asks for a screen or changes what a notebook shows

from ..files import replacing_file


def plot_training_curves(history: list[dict], path: Path, lowest_loss: float | None = None):
    """Draws the loss, the scores and the learning rate of a run's `history` over its steps to a .png or .svg file.

    The validation loss has no label smoothing, so it may be below the training loss, whose lower bound is drawn too.
    """
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True)
    panels = [
        (axes[0], "loss (nats per token)", {"loss": "training, smoothed targets", "eval_loss": "validation"}),
        (axes[1], "score of validation translations", {"eval_bleu": "BLEU", "eval_chrf": "chrF"}),
        (axes[2], "learning rate", {"learning_rate": None}),
    ]
    for axis, title, curves in panels:
        for key, label in curves.items():
            points = [(entry["step"], entry[key]) for entry in history if key in entry]
            if points:
                marker = "o" if key.startswith("eval_") else None
                axis.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=3.5, clip_on=False)
        if axis is axes[0] and lowest_loss:
            axis.axhline(lowest_loss, color="gray", linestyle=":", label="entropy of the smoothed targets")
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    axes[0].set_xlim(0, max((entry["step"] for entry in history), default=1))  # of all three
    for axis in (axes[0], axes[2]):
        axis.set_ylim(bottom=0)
    axes[2].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    with replacing_file(path) as temporary:
        figure.savefig(temporary, dpi=110)
