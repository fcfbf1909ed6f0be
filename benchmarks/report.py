"""Shared by the benchmarks: dated pages that name the machine, the versions and the command."""

import argparse
import importlib.metadata
import os
import platform
import shlex
import sys
import tempfile
from datetime import date
from pathlib import Path

import psutil

from vanilla_transformer.translation_vanilla_transformer import cpu_has_bfloat16

RESULTS = Path(__file__).parent / "results"


def add_options(parser):
    """Adds the options of every benchmark."""
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to check that it runs; the numbers mean nothing"
    )
    parser.add_argument("--results", type=Path, help=f"where the page is written (default: benchmarks/{RESULTS.name})")


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def precisions(device: str) -> tuple[str, ...]:
    """The precisions to measure: bf16 only where the hardware has it, since emulated it is ten times slower."""
    if device == "cpu" and not cpu_has_bfloat16():
        print("This CPU has no bfloat16 instructions; only float32 is measured.", file=sys.stderr)
        return ("fp32",)
    return ("bf16", "fp32")


def heading(title: str, packages: list[str]) -> list[str]:
    """The first lines of a page: the date, the command, the machine and the versions."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    command = shlex.join(["python", *sys.argv])
    return [
        f"# {title}, {date.today()}",
        "",
        f"`{command}` on {machine()}; Python {platform.python_version()}, {versions}.",
    ]


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [columns, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(line)} |" for line in lines]


def write(path: Path, lines: list[str]):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(f"The page is {path}.")


def write_with_bars(options: argparse.Namespace, name: str, page: list[str], title: str, groups: dict, unit: str):
    """Writes the page of a benchmark with its picture, see [`bars`]."""
    path = page_path(options, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    bars(path.with_suffix(".png"), title, groups, unit)
    write(path, [*page, "", f"![{unit}]({path.with_suffix('.png').name})"])


def page_path(options: argparse.Namespace, name: str) -> Path:
    """The path of the page; quick runs are kept out of the results folder."""
    results = options.results or Path(tempfile.mkdtemp() if options.quick else RESULTS)
    device = "" if getattr(options, "device", "cpu") == "cpu" else f"-{options.device}"
    return results / f"{name}{device}-{date.today()}.md"


def bars(path: Path, title: str, groups: dict[str, dict[str, float]], unit: str):
    """Draws one panel of named bars per group; names shared by all groups are shown once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    are_alike = all(values.keys() == next(iter(groups.values())).keys() for values in groups.values())
    size = 2.6 * len(groups) + 3.2 * (1 if are_alike else len(groups)), 3.6
    figure, axes = plt.subplots(
        1, len(groups), figsize=size, layout="constrained", squeeze=False, sharey="row" if are_alike else "none"
    )
    for axis, (name, values) in zip(axes[0], groups.items(), strict=True):
        colors = ["#c44e52" if who.startswith("ours") else "#8c8c8c" for who in values]
        places = axis.barh(list(values), list(values.values()), color=colors)
        axis.bar_label(places, fmt="{:,.0f}", padding=2, fontsize=8)
        axis.set_title(name, fontsize=10, wrap=True)
        axis.set_xlabel(unit)
        axis.margins(x=0.25)
    for axis in axes[0][:1] if are_alike else axes[0]:
        axis.invert_yaxis()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def machine() -> str:
    """The processor, the number of usable cores, the memory, and the GPU if there is one."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = platform.processor() or platform.machine()
    if sys.platform.startswith("linux"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    gpu = f" and an {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cores} cores of an {name}, {psutil.virtual_memory().total / 2**30:.0f} GiB of memory{gpu}"
