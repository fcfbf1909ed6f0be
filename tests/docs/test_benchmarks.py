"""benchmarks/: the scripts run on toy sizes, and contestants compute the same; never how fast."""

import importlib
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_close, parts, python_output, read_sample, save_translator, small_model, table_rows
from runs import random_pairs, read_pairs, write_pairs
from sacrebleu import corpus_bleu

from vanilla_transformer import Translator
from vanilla_transformer.conversion import to_native
from vanilla_transformer.conversion.torch_transformer import from_torch_transformer
from vanilla_transformer.data.tokenizer import special_token_ids, train_unigram_tokenizer
from vanilla_transformer.training.dropout import ByteDropout


@pytest.fixture
def script(monkeypatch):
    """script(name) -> a benchmark as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def peers(script):
    return script("peers")


@pytest.fixture
def run(forked_python):
    """run(script, folder, *arguments) -> the page of a benchmark, and what it printed."""

    def run(script: str, folder: Path, *arguments: str) -> tuple[Path, str]:
        command = [f"benchmarks/{script}.py", "--results", folder, *arguments]
        env = {"PYTHON_EXEC": str(forked_python)}  # what they start are forks, too
        printed = python_output(*command, cwd=ROOT, python=forked_python, env=env)
        (page,) = folder.glob(f"{script}*.md")
        return page, printed

    return run


def rows_of(page: Path) -> list[list[str]]:
    """The rows of all tables of a page, without their heads."""
    return [row for row in table_rows(page.read_text(encoding="utf-8")) if row[0] not in ("who", "what")]


def number(cell: str) -> float:
    return float(cell.replace(",", "").rstrip("%"))


# ------------------------------------------------------------------------------------------------------------ quality


def test_quality_has_a_row_for_any_system(script, tmp_path, capsys, monkeypatch):
    """Also for a file of translations, a lost model, one that train.py did not train, and one without checkpoints."""
    shutil.copytree(ROOT / "docs" / "results" / "multi30k_tiny", tmp_path, dirs_exist_ok=True)
    run = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8")).popitem()[1]
    (tmp_path / "runs.json").write_text(json.dumps({"lost/b-1": run}), encoding="utf-8")
    without_curve = json.dumps({key: value for key, value in run.items() if key != "evaluations"})
    monkeypatch.chdir(tmp_path)
    for name in ("run-1", "lost/b-1"):
        Path(name).mkdir(parents=True)
        Path(name, "all_results.json").write_text(without_curve, encoding="utf-8")
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    system = results["systems"].popitem()[1]
    names = ["theirs/a.txt", "lost/b-1.txt", str(tmp_path), str(tmp_path / "run-1")]
    results["systems"] = dict.fromkeys(names, system)
    (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
    script("quality").main([str(tmp_path)])
    rows = capsys.readouterr().out.split("\n\n")[1].splitlines()[2:]
    assert len(rows) == 4
    assert json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))["lost/b-1"] == run  # its curve is kept
    trained = [row for row in rows if f"| {run['train_steps']:,} " in row]
    assert [row.split()[1] for row in trained] == ["b-1", "run-1"]


def test_quality_compares_systems_over_their_seeds(script, tmp_path, capsys):
    words = [f"sentence {n}\u2028of a test set" for n in range(40)]
    worse = [line.replace("of a", "a of") for line in words]
    texts = {"b-1": worse, "b-2": words, "a-1": worse, "a-2": words, "c-1": words, "c-2": words, "d-3": words}
    results = json.loads((ROOT / "docs" / "results" / "multi30k_tiny" / "results.json").read_text(encoding="utf-8"))
    results |= {"systems": dict.fromkeys(texts, results["systems"].popitem()[1]), "sentences": 40, "options": {}}
    (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
    (tmp_path / "hypotheses").mkdir()
    for name, lines in texts.items():
        (tmp_path / "hypotheses" / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    references = tmp_path / "hypotheses" / "c-1.txt"
    with pytest.raises(SystemExit):
        script("quality").main([str(tmp_path), "--references", str(tmp_path / "results.json")])
    assert "results.json has 1 lines, not 40." in capsys.readouterr().err
    script("quality").main([str(tmp_path), "--references", str(references)])
    rows = table_rows(capsys.readouterr().out.split("\n\n")[2])
    half = corpus_bleu(worse, [words], tokenize="none", lowercase=True).score
    gain = f"{(100 - half) / 2:+.2f}"
    assert rows[1] == ["a", "b", "1, 2", "+0.00", "+0.00 to +0.00", "1.000", "+0.00, +0.00"]
    assert [row[:4] for row in rows[2:]] == [["c", "b", "1, 2", gain], ["c", "a", "1, 2", gain]]
    assert {row[5] for row in rows[2:]} == {"0.001"}
    shutil.copytree(tmp_path, tmp_path / "again")
    script("quality").main([str(tmp_path), str(tmp_path / "again"), "--references", str(references)])
    rows = table_rows(capsys.readouterr().out.split("\n\n")[4])
    assert rows[2][2:4] == ["1, 2, 1, 2", gain]


# ---------------------------------------------------------------------------------------------------- initial weights


@pytest.mark.slow
def test_initial_weights_are_compared_by_runs_that_are_not_repeated(run, tmp_path):
    size = "--vocab_size 300 --d_model 16 --encoder_ffn_dim 16 --decoder_ffn_dim 16 --max_train_samples 400"
    short = f"{size} --max_steps 2 --warmup_steps 1 --eval_steps 1 --logging_steps 1"
    short += " --max_eval_samples 3 --max_predict_samples 3"
    argv = ["--data", "sample_dataset", "--size", "sample", "--seeds", "1", "--output", str(tmp_path / "runs")]
    call = partial(run, "initial_weights", tmp_path, *argv, "--matrices", "ours", "xavier", "--variants", short)
    call()
    models = list((tmp_path / "runs").glob("*/model.safetensors"))
    written = [model.stat().st_mtime for model in models]
    assert len(models) == len({model.read_bytes() for model in models}) == 2
    page, _ = call()
    assert written == [model.stat().st_mtime for model in models]
    (picture,) = tmp_path.glob("*.png")
    rows = rows_of(page)[1:]
    assert {(row[0], row[2]) for row in rows} == {("ours", short), ("xavier", short)}
    assert all(number(row[column]) > 0 for row in rows for column in (3, 5)) and picture.name in page.read_text()


# ---------------------------------------------------------------------------------------------------------------- gpu


@pytest.mark.slow
def test_gpu_measures_each_kind_and_the_speedrun(run, script, tmp_path):
    """On a CPU, where kernels and synchronizations are not counted."""
    data = random_pairs(tmp_path / "data", train=100, validation=3, test=3)
    kinds = [kind for kind in script("gpu").KINDS if "compiled" not in kind]  # which takes a minute
    page, printed = run("gpu", tmp_path / "page", "--quick", "--data", str(data), "--kinds", *kinds)
    rows = [row for row in rows_of(page) if len(row) > 2]
    assert [row[0] for row in rows] == kinds and "Evaluations ended after" in page.read_text()
    assert all(number(row[2]) > 0 and 0 < number(row[3]) < 100 and row[6:8] == ["", ""] for row in rows)
    assert "two products" in printed and "MATH, masked" in printed


# -------------------------------------------------------------------------------------------------------------- scale


@pytest.mark.slow
def test_scale(run, script, tmp_path):
    scale = script("scale")
    page, printed = run("scale", tmp_path, "--quick")
    rows = rows_of(page)
    assert len(rows) > 30 and all(row[0] in printed for row in rows)
    assert {row[1] for row in rows} == {"300", "3,000"} and len({tuple(row[:2]) for row in rows}) == len(rows)
    assert all(0 < number(before) <= number(most) for *_, before, most, _ in rows)
    assert all(number(row[-1]) == 0 for row in rows if row[0] == scale.EPOCH_OF_STREAM)  # it has no workers


# -------------------------------------------------------------------------------------------------------------- peers


(BATCH,) = parts(1)


@torch.no_grad()
def test_our_step_has_the_dropout_of_train(peers):
    training = peers.OurTraining(peers.vanilla("quick", 37), peers.make_accelerator("fp32", "cpu"))
    assert any(isinstance(module, ByteDropout) for module in training.weights.model.modules())


def test_marian_has_our_loss(peers):
    """With our weights, and the smoothing of transformers' Trainer."""
    ours, marian = peers.vanilla("quick", 37).eval(), peers.Marian("quick", 37, "eager").eval()
    marian.model = to_native(ours)
    assert_close(marian(**BATCH), ours(**BATCH, label_smoothing=peers.SMOOTHING).loss)


@torch.no_grad()
def test_torch_transformer_has_our_loss(peers):
    """After conversion, except for the second norm at the end of its stacks."""
    theirs = peers.TorchTransformer("quick", 37).eval()
    theirs.transformer.encoder.norm = theirs.transformer.decoder.norm = None
    tokens = {"decoder_start_token_id": peers.START, "pad_token_id": peers.PAD}
    ours = from_torch_transformer(theirs.transformer, theirs.embedding, **tokens)
    assert_close(theirs(**BATCH), ours(**BATCH, label_smoothing=peers.SMOOTHING).loss)


@pytest.mark.parametrize(("has_bfloat16", "expected"), [(True, ("bf16", "fp32")), (False, ("fp32",))])
def test_bfloat16_is_skipped_where_the_cpu_has_none(has_bfloat16, expected, script, monkeypatch, capsys):
    report = script("report")
    monkeypatch.setattr(report, "cpu_has_bfloat16", lambda: has_bfloat16)
    assert report.precisions("cpu") == expected and report.precisions("cuda") == ("bf16", "fp32")
    assert ("only float32 is measured" in capsys.readouterr().err) != has_bfloat16


# ----------------------------------------------------------------------------------------------------- the scripts run


@pytest.mark.slow
def test_train_step(run, tmp_path):
    page, _ = run("train_step", tmp_path, "--quick")
    names = [row[0].split(",")[0] for row in rows_of(page)]
    assert set(names) == {"ours", "MarianMTModel", "torch.nn.Transformer"} and len(names) == 5
    assert all(number(cell) > 0 for row in rows_of(page) for cell in row[1:3])


@pytest.mark.slow
def test_input(run, script, tmp_path):
    """Which fails if the batches differ."""
    page, _ = run("input", tmp_path, "--quick")
    rows, script = rows_of(page), script("input")
    kinds = [script.PLAIN, script.SOFT, script.DROPOUT]
    assert [row[:2] for row in rows] == [[kind, f"{size:,}"] for kind in kinds for size in script.SIZES]
    assert all(number(cell) > 0 for row in rows for cell in row[2:])


@pytest.mark.slow
def test_decode(run, script, make_model, byte_tokenizer, tmp_path):
    """In float32 all engines translate alike, token by token."""
    pytest.importorskip("ctranslate2")
    model = make_model(vocab_size=len(byte_tokenizer), max_position_embeddings=512, lm_head_bias=True)
    model.lm_head.bias.data[byte_tokenizer.eos_token_id] += 4  # or else it would hardly ever end a sentence
    save_translator(Translator(model, byte_tokenizer), tmp_path / "model")
    data = ["--model", str(tmp_path / "model"), "--data", str(ROOT / "sample_dataset")]
    page, _ = run("decode", tmp_path, "--quick", *data)
    column = script("decode").COLUMNS.index("as ours, fp32")
    agree = [(row[0], row[column]) for row in rows_of(page)]
    engines = {"ours", "ours with CTranslate2", "MarianMTModel", "CTranslate2"}
    assert {name.split(", ")[0] for name, _ in agree} == engines
    exact = [share for name, share in agree if "fp32" in name]
    assert exact and set(exact) == {"100.0%"}


@pytest.mark.slow
def test_end_to_end(run, tmp_path):
    """Both contestants read the same tokens."""
    page, _ = run("end_to_end", tmp_path, "--quick", "--data", str(ROOT / "sample_dataset"))
    rows = rows_of(page)
    assert {row[0].split(",")[0] for row in rows} == {"ours", "run_translation_no_trainer"} and len(rows) == 3
    assert len({row[3] for row in rows}) == 1  # target tokens


@pytest.mark.slow
def test_engines(run, tmp_path):
    """Marian's engines stop such an untrained model elsewhere; test_marian_engines compares them."""
    tokenizer = train_unigram_tokenizer([text for pair in read_sample(200) for text in pair], 400)
    sizes = {"vocab_size": len(tokenizer), "d_model": 64, "decoder_attention_heads": 4, **special_token_ids(tokenizer)}
    model = small_model(**sizes, tie_word_embeddings=True, position_embedding_type="marian")
    save_translator(Translator(model, tokenizer), tmp_path / "model")
    data = str(ROOT / "sample_dataset")
    page, _ = run("engines", tmp_path, "--quick", "--data", data, "--model", str(tmp_path / "model"))
    same = {row[0]: row[2] for row in rows_of(page) if row[0] != "engine"}
    assert same["this package, float32"] == same["CTranslate2, float32"] == "100.0%" and "CTranslate2, int8" in same


@pytest.mark.slow
def test_own_data(run, tmp_path):
    """Each system is trained and scored."""
    counts = {"train": 300, "validation": 10, "test": 10}
    splits = {split: read_pairs(ROOT / "sample_dataset", split)[:count] for split, count in counts.items()}
    data = write_pairs(tmp_path / "data", **splits)
    page, _ = run("own_data", tmp_path, "--quick", "--data", str(data))
    rows = rows_of(page)
    assert [row[0].split(",")[0] for row in rows] == ["train.py"] * 4 + ["MarianMTModel"]
    assert all(number(cell) > 0 for row in rows for cell in row[3:5])  # minutes and steps


# -------------------------------------------------------------------------------------------------- pages in a browser


PAGE = """<form><textarea></textarea><input id="beams"><button disabled>Translate</button><output></output></form>
<script src="model/engine.js"></script>"""
ENGINE = """const [form, output, text] = ["form", "output", "textarea"].map((name) => document.querySelector(name));
setTimeout(() => (document.querySelector("button").disabled = false), 200);
form.onsubmit = (event) => {
  event.preventDefault();
  setTimeout(() => (output.value = text.value.toUpperCase()), 5);
};"""


@pytest.mark.slow
def test_pages_are_measured_as_a_visitor_loads_them(tmp_path, run, open_browser):
    (tmp_path / "page" / "model").mkdir(parents=True)
    (tmp_path / "page" / "index.html").write_text(PAGE)
    (tmp_path / "page" / "model" / "engine.js").write_text(ENGINE + " " * 1_000_000)
    rows = [{"en": f"one two three four {word}", "de": f"ONE TWO THREE FOUR {word.upper()}"} for word in "abc"]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("--quick", "--data", str(tmp_path), str(tmp_path / "page"))
    (row,) = (
        row
        for row in rows_of(run("pages", tmp_path / "results", *arguments)[0])
        if len(row) == 5 and row[0] == "page" and row[1] != "MB loaded"
    )
    assert row[:4] == ["page", "1.0", "1.0", "100.00"] and number(row[4]) > 1
