"""benchmarks/: the scripts run, and what they print agrees; never how fast. Run: pytest tests/test_benchmarks.py"""

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
from torch.nn import functional

from vanilla_transformer.conversion import from_torch_transformer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def benchmarks():
    """Lets the scripts be imported."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def scale():
    return importlib.import_module("scale")


@pytest.fixture(scope="module")
def peers():
    return importlib.import_module("peers")


def run_quickly(script: str, folder: Path, *more: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"benchmarks/{script}.py", "--quick", "--results", str(folder), *more]
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
    assert workers[scale.tokenizing(2)] > 0 and workers[scale.EPOCH_OF_STREAM] == 0
    # The script itself stops where a part reads other pairs than another.
    for size, left, empty, long in re.findall(r"([\d,]+) pairs: ([\d,]+) are left \((\d+) .*?, (\d+) are", text):
        assert sum(int(number.replace(",", "")) for number in (left, empty, long)) == int(size.replace(",", ""))


# --------------------------------------------------------------------------------------------------------------- peers


def batch(vocab_size: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocab_size, (3, 7), generator=generator)
    labels = torch.randint(2, vocab_size, (3, 5), generator=generator)
    mask = torch.arange(7) < torch.tensor([7, 4, 6])[:, None]
    labels[1, 3:] = -100
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def test_marian_has_our_loss(peers):
    """With our weights, and the smoothing of transformers' Trainer."""
    ours = peers.vanilla("quick", 50).eval()
    marian = peers.Marian("quick", 50, "eager").eval()
    marian.model = peers.to_marian(ours)
    with torch.no_grad():
        logits = ours.eval()(**batch(50)).logits
        loss = functional.cross_entropy(
            logits.flatten(0, 1), batch(50)["labels"].flatten(), label_smoothing=peers.SMOOTHING
        )
        torch.testing.assert_close(marian(**batch(50)), loss)


def test_the_notebook_has_our_logits(peers):
    """Under its names, with our weights: the same loss but for how it smooths."""
    ours, theirs = peers.vanilla("quick", 50).eval(), peers.Notebook("quick", 50).eval()
    weights = ours.state_dict()
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            side, *rest = name.split(".")
            if side in ("source", "target", "generator"):
                key = "lm_head.bias" if name.endswith("bias") else "model.shared.weight"
            else:
                layer, kind = f"model.{side}.layers.{rest[0]}", rest[-1]
                cross = side == "decoder"
                if rest[1] == "attentions":
                    which = ["self_attn", "encoder_attn"][int(rest[2])]
                    key = f"{layer}.{which}.{attention[rest[3]]}.{kind}"
                elif rest[1] == "norms":
                    norms = [
                        "self_attn_layer_norm",
                        *(["encoder_attn_layer_norm"] if cross else []),
                        "final_layer_norm",
                    ]
                    key = f"{layer}.{norms[int(rest[2])]}.{kind}"
                else:
                    key = f"{layer}.{'fc1' if rest[2] == '0' else 'fc2'}.{kind}"
            parameter.copy_(weights.get(key, torch.zeros_like(parameter)))
        logits = ours(**batch(50)).logits.flatten(0, 1)
        labels = batch(50)["labels"].flatten()
        logits, labels = logits[labels != -100], labels[labels != -100]
        smoothed = torch.full_like(logits, peers.SMOOTHING / 49).scatter_(1, labels[:, None], 1 - peers.SMOOTHING)
        expected = functional.kl_div(logits.log_softmax(-1), smoothed, reduction="sum") / len(labels)
        torch.testing.assert_close(theirs(**batch(50)), expected)


def test_torch_transformer_has_our_loss(peers):
    """By the conversion, with torch's own label smoothing, but for the second norm at the end of its stacks."""
    theirs = peers.TorchTransformer("quick", 50).eval()
    theirs.transformer.encoder.norm = theirs.transformer.decoder.norm = None
    ours = from_torch_transformer(
        theirs.transformer, theirs.embedding, decoder_start_token_id=peers.START, pad_token_id=peers.PAD
    )
    with torch.no_grad():
        logits = ours(**batch(50)).logits
        loss = functional.cross_entropy(
            logits.flatten(0, 1), batch(50)["labels"].flatten(), label_smoothing=peers.SMOOTHING
        )
        torch.testing.assert_close(theirs(**batch(50)), loss)


def tables(page: Path) -> list[list[str]]:
    """The rows of all tables of a page, without their heads."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[0] != "who" and set(row[0]) != {"-"}]


@pytest.mark.slow
def test_train_step(tmp_path):
    run_quickly("train_step", tmp_path)
    (page,) = tmp_path.glob("train_step-*.md")
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    names = [row[0].split(",")[0] for row in tables(page)]
    assert set(names) == {"ours", "MarianMTModel", "torch.nn.Transformer", "a notebook's"} and len(names) == 7
    assert all(float(cell.replace(",", "").rstrip("%")) > 0 for row in tables(page) for cell in row[1:3])


@pytest.mark.slow
def test_import_time(tmp_path):
    run_quickly("import_time", tmp_path)
    (page,) = tmp_path.glob("import_time-*.md")
    rows = [row for row in tables(page) if row[0] != "what"]
    assert len(rows) == 5 and all(float(cell) > 0 for row in rows for cell in row[1:])


@pytest.mark.slow
def test_decode(make_model, byte_tokenizer, tmp_path):
    """What both models translate agrees, token by token, but for the coarser precisions.

    How far CTranslate2 agrees shows on a model that has learned something: on the pages.
    """
    pytest.importorskip("ctranslate2")
    model = make_model(vocab_size=len(byte_tokenizer), max_position_embeddings=512)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")
    data = ["--model", str(tmp_path / "model"), "--data", str(ROOT / "sample_dataset")]
    run_quickly("decode", tmp_path, *data)
    (page,) = tmp_path.glob("decode-*.md")
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    agree = {}
    for row in tables(page):
        agree.setdefault(row[0], []).append(row[7])  # as ours, fp32
    names = [name.split(", ")[0] for name in agree]
    assert [names.count(name) for name in ("ours", "MarianMTModel")] == [6, 6] and names.count("CTranslate2") >= 2
    assert all(len(shares) == 3 for shares in agree.values())
    exact = [shares for name, shares in agree.items() if "fp32" in name]
    assert len(exact) == 4 and all(set(shares) == {"100.0%"} for shares in exact)


@pytest.mark.slow
def test_end_to_end(tmp_path):
    """Both read the same tokens, and learn something of them in a step or two."""
    run_quickly("end_to_end", tmp_path, "--data", str(ROOT / "sample_dataset"))
    (page,) = tmp_path.glob("end_to_end-*.md")
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = tables(page)
    names = {row[0].split(",")[0] for row in rows}
    assert names == {"ours", "run_translation_no_trainer"} and len(rows) == 3
    assert len({row[3] for row in rows}) == 1  # target tokens


def dies():
    """Makes a contestant that the system ends, as it does with one that takes too much memory."""
    return lambda: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_contestant_that_is_killed_is_named():
    contest = importlib.import_module("contest")
    one = contest.Contestant("large", dies)
    with pytest.raises(contest.Failed, match="'large' has failed; it was killed, maybe out of memory"):
        one.turn()
    assert issubclass(contest.Failed, SystemExit)
