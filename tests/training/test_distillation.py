"""Soft targets: the mean of the teachers' predictions, read once and kept in a file that fits data, teachers and k."""

import itertools
from unittest.mock import DEFAULT, Mock

import datasets
import pytest
import torch
from helpers import assert_close, parts, read_sample, save_translator, small_model, text_dataset, training_options
from transformers import MarianMTModel

from vanilla_transformer import Translator
from vanilla_transformer.data.batches import SOFT_TARGETS, PairCollator, training_batches
from vanilla_transformer.data.encoding import tokenize_pairs
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.tokenizer import tokenizer_for_training, train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import load_foreign
from vanilla_transformer.training import distillation
from vanilla_transformer.training.distillation import add_soft_targets, soft_targets
from vanilla_transformer.training.resume import compare_settings, run_settings

# ------------------------------------------------------------------------------------------------------------- targets


def test_soft_targets_are_the_top_of_the_mean_distribution(make_model):
    (batch,), teachers = parts(1), [make_model(), make_model(), make_model()]
    tokens, probabilities = soft_targets(teachers, batch, 6)
    kept = batch["labels"] != -100
    mean = sum(teacher(**batch).logits.softmax(dim=-1) for teacher in teachers)[kept] / 3
    assert tokens.shape == probabilities.shape == (*kept.shape, 6)
    assert_close(probabilities[kept], mean.sort(dim=-1, descending=True).values[:, :6], 1e-6)
    assert_close(probabilities[kept], mean.gather(1, tokens[kept]), 1e-6)
    assert soft_targets(teachers, batch, 99)[0].shape[-1] == 37  # all there are


def test_soft_targets_of_a_marian_model_have_no_padding(marian, marian_pairs):
    """To which the model would give most of the probability."""
    tokenizer, teacher = tokenizer_for_training(str(marian)), load_foreign(str(marian))
    pairs, _ = tokenize_pairs(text_dataset(marian_pairs), tokenizer, 99, 99)
    batch = PairCollator(tokenizer)(list(pairs))
    theirs = MarianMTModel.from_pretrained(marian).eval()(**batch).logits.softmax(dim=-1)
    kept = batch["labels"] != -100
    assert (theirs[kept].argmax(dim=-1) == tokenizer.pad_token_id).any()
    tokens, probabilities = soft_targets([teacher], batch, 3)
    assert (tokens[kept] != tokenizer.pad_token_id).all()
    assert (tokens[kept][:, 0] == batch["labels"][kept]).float().mean() > 0.9  # it knows the pairs by heart


# --------------------------------------------------------------------------------------------------------------- cache


def save_teacher(folder, tokenizer, seed: int) -> str:
    torch.manual_seed(seed)
    model = small_model(vocab_size=len(tokenizer), max_position_embeddings=200)
    return save_translator(Translator(model, tokenizer), folder)


@pytest.fixture
def run(text_tokenizer, accelerator, tmp_path, monkeypatch):
    """run(*options) -> the options and 40 training pairs with soft targets, from a cache of this test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(distillation, "PAIRS_AT_A_TIME", 16)
    config = small_model(vocab_size=len(text_tokenizer)).config

    def make(*options: str, pairs=40):
        given = training_options("--per_device_eval_max_tokens=300", *options)
        dataset, _ = tokenize_pairs(text_dataset(read_sample(pairs)), text_tokenizer, 99, 99)
        return given, add_soft_targets(dataset, text_tokenizer, config, given, accelerator.device)

    return make


@pytest.fixture
def reading(monkeypatch) -> Mock:
    """Notes how often the teachers read a batch."""
    reading = Mock(wraps=soft_targets)
    monkeypatch.setattr(distillation, "soft_targets", reading)
    return reading


@pytest.fixture
def teachers(text_tokenizer, tmp_path) -> list[str]:
    return [save_teacher(tmp_path / str(seed), text_tokenizer, seed) for seed in (1, 2)]


def test_cached_soft_targets_are_those_of_the_batch(run, teachers, reading, text_tokenizer, capsys):
    """Wherever a pair is in a batch; a second run reads them."""
    run("--teacher", *teachers, "--teacher_top_k=5")
    assert reading.called and "soft targets: the 5 most probable tokens have " in capsys.readouterr().out
    reading.reset_mock()
    _, pairs = run("--teacher", *teachers, "--teacher_top_k=5")
    assert not reading.called
    models = [load_foreign(name) for name in teachers]
    loader = training_batches(pairs, text_tokenizer, DataOptions(), max_tokens=200, seed=42)
    assert loader.pairs(0, 1)[0]["source"]  # for a message about diverged training
    for batch in itertools.islice(loader, 8):
        ids = {name: tensor for name, tensor in batch.items() if name not in SOFT_TARGETS}
        assert {tensor.dtype for tensor in ids.values()} == {torch.int64}
        kept = batch["labels"] != -100
        for name, expected in zip(SOFT_TARGETS, soft_targets(models, ids, 5), strict=True):
            torch.testing.assert_close(batch[name][kept], expected[kept], rtol=1e-5, atol=1e-7)


OTHER_RUNS = [pytest.param(name, marks=pytest.mark.slow) for name in ("one teacher", "data", "weights")]


@pytest.mark.parametrize("change", ["k", *OTHER_RUNS])
def test_soft_targets_of_another_run_are_unused(change, run, teachers, reading, text_tokenizer, accelerator, tmp_path):
    """And a resumed run says that they changed."""

    def settings(options, pairs) -> dict:
        recipe = vars(options) | {"streaming": False}
        return run_settings(recipe, {"train": pairs, "validation": pairs}, 1, accelerator.mixed_precision)

    before = settings(*run("--teacher", *teachers))
    assert settings(*run("--teacher", *teachers)) == before
    if change == "weights":
        save_teacher(tmp_path / "2", text_tokenizer, 3)  # in the same place
    reading.reset_mock()
    options = ["--teacher_top_k=4"] if change == "k" else []
    chosen = teachers[: 1 if change == "one teacher" else 2]
    after = settings(*run("--teacher", *chosen, *options, pairs=39 if change == "data" else 40))
    assert reading.called and after["soft_targets"] != before["soft_targets"]
    if change == "weights":
        told = compare_settings(tmp_path, before, after)
        assert told == {"soft_targets": "the soft targets (--teacher, its weights or --teacher_top_k)"}


@pytest.mark.slow
def test_interrupted_reading_leaves_nothing_to_use(run, teachers, reading, tmp_path):
    reading.side_effect = [DEFAULT, DEFAULT, KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):
        run("--teacher", *teachers)
    assert not list((tmp_path / "cache" / "soft_targets").glob("*.arrow"))
    reading.side_effect = None
    assert len(run("--teacher", *teachers)[1]) == 40


def test_damaged_soft_targets_are_named(run, teachers, tmp_path):
    run("--teacher", *teachers)
    (file,) = (tmp_path / "cache" / "soft_targets").glob("*.arrow")
    for content in (file.read_bytes()[:-3000], b""):
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"cannot be written to or read from {file}: .*; delete it and tmp"):
            run("--teacher", *teachers)


def test_pairs_beyond_the_learned_positions_of_a_teacher_are_refused(run, text_tokenizer, tmp_path):
    model = small_model(vocab_size=len(text_tokenizer), position_embedding_type="learned", max_position_embeddings=9)
    teacher = save_translator(Translator(model, text_tokenizer), tmp_path / "learned")
    with pytest.raises(UserError, match=f"^--teacher {teacher} has learned positions up to 9, and .*; lower --max_s"):
        run("--teacher", teacher)


def test_a_cache_that_cannot_be_written_is_named(run, teachers, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "soft_targets").touch()  # a file, since tests may be run by root, whom no permission stops
    with pytest.raises(UserError, match="cannot be written .*soft_targets/.*; .* set HF_DATASETS_CACHE to another"):
        run("--teacher", *teachers)


def test_teacher_with_another_vocabulary_is_refused(run, teachers, marian, tmp_path):
    other = save_teacher(tmp_path / "other", train_tokenizer(["other words"], 300), 1)
    for name in (other, str(marian)):
        message = f"^--teacher {name} has a different vocabulary .* sequence-level distillation"
        with pytest.raises(UserError, match=message):
            run("--teacher", teachers[0], name)
