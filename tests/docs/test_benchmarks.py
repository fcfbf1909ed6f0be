"""benchmarks/: the scripts run on toy sizes, and contestants compute the same; never how fast."""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from helpers import assert_close
from torch.nn import functional

from vanilla_transformer.conversion.torch_transformer import from_torch_transformer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    """script(name) -> a benchmark as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def peers(script):
    return script("peers")


def run_quickly(script: str, folder: Path, *more: str) -> tuple[Path, str]:
    """Runs a benchmark with --quick; returns its page and what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"benchmarks/{script}.py", "--quick", "--results", str(folder), *more]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    (page,) = folder.glob(f"{script}*.md")
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return page, result.stdout


def rows_of(page: Path) -> list[list[str]]:
    """The rows of all tables of a page, without their heads."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[0] not in ("who", "what") and set(row[0]) != {"-"}]


# -------------------------------------------------------------------------------------------------------------- scale


def test_generated_pairs_have_the_lengths_of_translations(script, tmp_path, monkeypatch):
    scale = script("scale")
    monkeypatch.setattr(scale, "SHARD", 400)
    scale.write_pairs(tmp_path / "pairs", 1000)
    files = sorted((tmp_path / "pairs" / "data").glob("train-*"))
    assert [file.name for file in files] == [f"train-{i:05}-of-00003.parquet" for i in range(3)]
    rows = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]
    assert len(rows) == 1000 and len({row["en"] for row in rows}) > 950
    lengths = np.array([[len(row[side].split()) for side in ("en", "de")] for row in rows])
    assert np.abs(lengths.mean(axis=0) - scale.SENTENCE).max() < 1.5
    assert np.corrcoef(lengths.T)[0, 1] > 0.9  # a long sentence has a long translation


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere mapped files cannot be told apart")
def test_memory_excludes_mapped_files(script, tmp_path):
    memory_of, size = script("scale").memory_of, 50 * 2**20
    (tmp_path / "file").write_bytes(bytes(size))
    before, workers = memory_of(os.getpid())
    mapped = np.memmap(tmp_path / "file", mode="r")
    assert mapped.sum() == 0 and workers == 0
    assert memory_of(os.getpid())[0] - before < size / 4
    allocated = np.ones(size, dtype=np.uint8)
    assert 0.9 * size < memory_of(os.getpid())[0] - before < 1.25 * size
    code = f"block = b'1' * {size}; print(len(block), flush=True); input()"
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert int(worker.stdout.readline()) == len(allocated)
    assert 0.9 * size < memory_of(os.getpid())[1] < 1.5 * size
    worker.communicate(b"\n")


def test_picture_shows_only_measured_phases_and_clips_none(script, tmp_path, monkeypatch):
    from matplotlib import pyplot as plt

    scale, drawn = script("scale"), []
    monkeypatch.setattr(plt.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    rows = []
    for size, most in [(300, 2), (3000, 9)]:
        memory = np.array([[0.0, 2**20, 0], [1.0, most * 2**20, 0]])
        rows.append((size, scale.Phase(scale.tokenizing(1), 0.0, 1.0, 1.0, size, memory)))
    scale.plot(tmp_path / "picture.png", rows)
    (axes,) = drawn[0].axes
    assert axes.get_title() == scale.tokenizing(1) and axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 9


@pytest.mark.slow
def test_scale(script, tmp_path):
    scale = script("scale")
    page, printed = run_quickly("scale", tmp_path)
    text = page.read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (.*?) \| ([\d,]+) \| [\d.,]+ \|.*\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", text)
    assert len(rows) > 30 and all(row[0] in printed for row in rows)
    assert {size for _, size, *_ in rows} == {"300", "3,000"} and len({row[:2] for row in rows}) == len(rows)
    assert all(0 < float(before.replace(",", "")) <= float(most.replace(",", "")) for _, _, before, most, _ in rows)
    workers = {name: int(last.replace(",", "")) for name, size, *_, last in rows if size == "3,000"}
    assert workers[scale.tokenizing(2)] > 0 and workers[scale.EPOCH_OF_STREAM] == 0
    for size, left, empty, long in re.findall(r"([\d,]+) pairs: ([\d,]+) are left \((\d+) .*?, (\d+) are", text):
        assert sum(int(number.replace(",", "")) for number in (left, empty, long)) == int(size.replace(",", ""))


# -------------------------------------------------------------------------------------------------------------- peers


def batch(vocab_size: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocab_size, (3, 7), generator=generator)
    labels = torch.randint(2, vocab_size, (3, 5), generator=generator)
    labels[1, 3:] = -100
    mask = torch.arange(7) < torch.tensor([7, 4, 6])[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


@torch.no_grad()
def test_marian_has_our_loss(peers):
    """With our weights, and the smoothing of transformers' Trainer."""
    ours, marian = peers.vanilla("quick", 50).eval(), peers.Marian("quick", 50, "eager").eval()
    marian.model = peers.to_marian(ours)
    assert_close(marian(**batch(50)), ours(**batch(50), label_smoothing=peers.SMOOTHING).loss)


@torch.no_grad()
def test_torch_transformer_has_our_loss(peers):
    """After conversion, except for the second norm at the end of its stacks."""
    theirs = peers.TorchTransformer("quick", 50).eval()
    theirs.transformer.encoder.norm = theirs.transformer.decoder.norm = None
    tokens = {"decoder_start_token_id": peers.START, "pad_token_id": peers.PAD}
    ours = from_torch_transformer(theirs.transformer, theirs.embedding, **tokens)
    assert_close(theirs(**batch(50)), ours(**batch(50), label_smoothing=peers.SMOOTHING).loss)


@torch.no_grad()
def test_notebook_has_our_logits(peers):
    """With our weights under its names; its loss differs only in how it smooths."""
    ours, theirs = peers.vanilla("quick", 50).eval(), peers.Notebook("quick", 50).eval()
    weights = ours.state_dict()
    weights["lm_head.bias"] = torch.zeros(50)
    projections = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    for name, parameter in theirs.named_parameters():
        side, *rest, kind = name.split(".")
        if side in ("source", "target", "generator"):
            key = "lm_head.bias" if kind == "bias" else "model.shared.weight"
        elif rest[1] == "attentions":
            attention = ["self_attn", "encoder_attn"][int(rest[2])]
            key = f"model.{side}.layers.{rest[0]}.{attention}.{projections[rest[3]]}.{kind}"
        elif rest[1] == "norms":
            norms = ["self_attn", "encoder_attn", "final"] if side == "decoder" else ["self_attn", "final"]
            key = f"model.{side}.layers.{rest[0]}.{norms[int(rest[2])]}_layer_norm.{kind}"
        else:
            key = f"model.{side}.layers.{rest[0]}.{'fc1' if rest[2] == '0' else 'fc2'}.{kind}"
        parameter.copy_(weights[key])
    labels = batch(50)["labels"].flatten()
    logits = ours(**batch(50)).logits.flatten(0, 1)[labels != -100]
    labels = labels[labels != -100]
    smoothed = torch.full_like(logits, peers.SMOOTHING / 49).scatter_(1, labels[:, None], 1 - peers.SMOOTHING)
    expected = functional.kl_div(logits.log_softmax(-1), smoothed, reduction="sum") / len(labels)
    assert_close(theirs(**batch(50)), expected)


@pytest.mark.parametrize(("has_bfloat16", "expected"), [(True, ("bf16", "fp32")), (False, ("fp32",))])
def test_bfloat16_is_skipped_where_the_cpu_has_none(has_bfloat16, expected, script, monkeypatch, capsys):
    report = script("report")
    monkeypatch.setattr(report, "cpu_has_bfloat16", lambda: has_bfloat16)
    assert report.precisions("cpu") == expected and report.precisions("cuda") == ("bf16", "fp32")
    assert ("only float32 is measured" in capsys.readouterr().err) != has_bfloat16


# ----------------------------------------------------------------------------------------------------- the scripts run


@pytest.mark.slow
def test_train_step(tmp_path):
    page, _ = run_quickly("train_step", tmp_path)
    names = [row[0].split(",")[0] for row in rows_of(page)]
    assert set(names) == {"ours", "MarianMTModel", "torch.nn.Transformer", "a notebook's"} and len(names) == 7
    assert all(float(cell.replace(",", "").rstrip("%")) > 0 for row in rows_of(page) for cell in row[1:3])


@pytest.mark.slow
def test_import_time(tmp_path):
    page, _ = run_quickly("import_time", tmp_path)
    assert len(rows_of(page)) == 3 and all(float(cell) > 0 for row in rows_of(page) for cell in row[1:])


@pytest.mark.slow
def test_decode(make_model, byte_tokenizer, tmp_path):
    """In float32 all engines translate alike, token by token."""
    pytest.importorskip("ctranslate2")
    make_model(vocab_size=len(byte_tokenizer), max_position_embeddings=512).save_pretrained(tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")
    data = ["--model", str(tmp_path / "model"), "--data", str(ROOT / "sample_dataset")]
    page, _ = run_quickly("decode", tmp_path, *data)
    head = next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| who"))
    (column,) = (i for i, cell in enumerate(head.strip("|").split("|")) if "as ours, fp32" in cell)
    agree = [(row[0], row[column]) for row in rows_of(page)]
    assert {name.split(", ")[0] for name, _ in agree} == {
        "ours",
        "ours with CTranslate2",
        "MarianMTModel",
        "CTranslate2",
    }
    exact = [share for name, share in agree if "fp32" in name]
    assert exact and set(exact) == {"100.0%"}


@pytest.mark.slow
def test_end_to_end(tmp_path):
    """Both contestants read the same tokens."""
    page, _ = run_quickly("end_to_end", tmp_path, "--data", str(ROOT / "sample_dataset"))
    rows = rows_of(page)
    assert {row[0].split(",")[0] for row in rows} == {"ours", "run_translation_no_trainer"} and len(rows) == 3
    assert len({row[3] for row in rows}) == 1  # target tokens


def dies():
    """A contestant that the system kills, as it does when memory runs out."""
    return lambda: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_killed_contestant_is_named(script):
    contest = script("contest")
    with pytest.raises(contest.Failed, match="'large' failed; it was killed, maybe out of memory"):
        contest.Contestant("large", dies).turn()
