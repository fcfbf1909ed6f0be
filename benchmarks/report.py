"""Shared by the benchmarks: dated pages that name the machine, the versions and the command."""

import argparse
import functools
import importlib.metadata
import os
import platform
import shlex
import sys
import tempfile
import textwrap
from datetime import date
from pathlib import Path

import psutil
from tabulate import tabulate

from vanilla_transformer.commands.parser import positive
from vanilla_transformer.loading import cpu_has_bfloat16

RESULTS = Path(__file__).parent / "results"


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes that only check that it runs")
    parser.add_argument("--results", type=Path, help=f"where the page is written (default: benchmarks/{RESULTS.name})")
    return parser


def make_contest_parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark of contestants."""
    parser = make_parser(description)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=positive, default=5, help="(default: %(default)s)")
    return parser


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
    """The lines of a Markdown table with aligned columns."""
    return tabulate(rows, columns, "github", disable_numparse=True).splitlines()


def write(options: argparse.Namespace, name: str, page: list[str]):
    """Writes the page; quick runs are kept out of the results folder."""
    results = options.results or Path(tempfile.mkdtemp() if options.quick else RESULTS)
    device = "" if getattr(options, "device", "cpu") == "cpu" else f"-{options.device}"
    path = results / f"{name}{device}-{date.today()}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    wrap = functools.partial(textwrap.fill, width=120, break_on_hyphens=False)
    lines = [line if line.startswith(("|", "#")) else wrap(line) for line in page]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(f"The page is {path}.")


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
