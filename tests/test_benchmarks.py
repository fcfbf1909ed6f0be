"""benchmarks/: the scripts run, and what they print agrees; never how fast. Run: pytest tests/test_benchmarks.py"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

ROOT = Path(__file__).parents[1]


def load(name: str):
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks for its types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scale():
    return load("scale")


def run_quickly(script: str, folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"benchmarks/{script}.py", "--quick", "--results", str(folder)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_generated_pairs(scale, tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "SHARD", 400)
    scale.write_pairs(tmp_path / "pairs", 1000)
    files = sorted((tmp_path / "pairs" / "data").glob("train-*"))
    assert [file.name for file in files] == [f"train-{i:05}-of-00003.parquet" for i in range(3)]
    rows = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]
    assert len(rows) == 1000
    lengths = np.array([[len(row[side].split()) for side in ("en", "de")] for row in rows])
    assert np.abs(lengths.mean(axis=0) - scale.SENTENCE).max() < 1.5
    assert np.corrcoef(lengths.T)[0, 1] > 0.9  # a long sentence has a long translation
    assert len({row["en"] for row in rows}) > 950


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell mapped files apart")
def test_memory_is_what_is_allocated_and_no_mapped_file(scale, tmp_path):
    size = 50 * 2**20
    (tmp_path / "file").write_bytes(bytes(size))
    before, workers = scale.memory_of(os.getpid())
    mapped = np.memmap(tmp_path / "file", mode="r")
    assert mapped.sum() == 0 and workers == 0
    assert scale.memory_of(os.getpid())[0] - before < size / 4
    allocated = np.ones(size, dtype=np.uint8)
    assert 0.9 * size < scale.memory_of(os.getpid())[0] - before < 1.25 * size
    code = f"block = b'1' * {size}; print(len(block), flush=True); input()"
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert int(worker.stdout.readline()) == len(allocated)
    assert 0.9 * size < scale.memory_of(os.getpid())[1] < 1.5 * size
    worker.communicate(b"\n")


@pytest.mark.slow
def test_scale(scale, tmp_path):
    printed = run_quickly("scale", tmp_path)
    (page,) = tmp_path.glob("scale-*.md")
    text = page.read_text(encoding="utf-8")
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = re.findall(r"(?m)^\| (.*?) \| ([\d,]+) \| [\d.,]+ \|.*\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", text)
    assert len(rows) > 30 and all(row[0] in printed for row in rows)
    assert {size for _, size, *_ in rows} == {"300", "3,000"}
    assert len({(name, size) for name, size, *_ in rows}) == len(rows)
    for _, _, before, most, _ in rows:
        assert 0 < float(before.replace(",", "")) <= float(most.replace(",", ""))
    workers = {name: int(last.replace(",", "")) for name, size, *_, last in rows if size == "3,000"}
    assert workers[scale.tokenising(2)] > 0 and workers[scale.EPOCH_OF_STREAM] == 0
    # The script itself stops where a part reads other pairs than another.
    for size, left, empty, long in re.findall(r"([\d,]+) pairs: ([\d,]+) are left \((\d+) .*?, (\d+) are", text):
        assert sum(int(number.replace(",", "")) for number in (left, empty, long)) == int(size.replace(",", ""))
