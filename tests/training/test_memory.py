"""What a training step needs of memory, against what it takes. Run: pytest tests/test_memory.py"""

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import memory
from vanilla_transformer.training.arguments import parse_options
from vanilla_transformer.training.distributed import Learner
from vanilla_transformer.training.memory import bytes_of_batch, bytes_of_state, estimate, free_memory, largest_batch
from vanilla_transformer.training.optimization import RunState


def options(*argv):
    return parse_options(["--dataset_name=x", *argv])


def peak_of(run) -> int:
    """The most bytes that tensors take at a time while `run` runs, besides what they took before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def batch_of(sentences: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 2000, (sentences, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


CASES = {
    "eager, short": ("eager", 16, 40, []),
    "eager, long": ("eager", 64, 10, []),
    "sdpa, short": ("sdpa", 16, 40, []),
    "sdpa, long": ("sdpa", 64, 10, []),
    "an average": ("eager", 16, 40, ["--ema_decay=0.9"]),
    "R-Drop": ("sdpa", 64, 10, ["--r_drop_alpha=5"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_a_step_takes(case, accelerator):
    """To 15 %: weights, moments and average, which are there before it, and the peak of the step itself."""
    attention, length, sentences, argv = CASES[case]
    args = options(*argv)
    sizes = {
        "d_model": 256,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_ffn_dim": 1024,
        "decoder_ffn_dim": 1024,
    }
    model = VanillaTransformerForConditionalGeneration._from_config(
        VanillaTransformerConfig(vocab_size=2000, **sizes), attn_implementation=attention
    )
    estimated = estimate(model, args, accelerator, sentences * length, np.array([3, length, 5]))
    learner = Learner(model, args, accelerator)
    weights = 4 * model.num_parameters()
    there = weights + 2 * weights + (2 * weights if args.ema_decay else 0)
    batch, state = batch_of(sentences, length), RunState()
    taken = there + peak_of(lambda: learner.step([batch], 1e-3, state))
    assert 0.85 < estimated / taken < 1.15
    assert taken > 1.2 * (there + weights)  # it is not the weights alone that are compared


def test_the_state_on_one_process(make_model):
    model = make_model()
    weights = 4 * model.num_parameters()
    kept = [bytes_of_state(model, options(), shards) for shards in (1, 4)]
    assert kept == [4 * weights, weights + weights]
    averaged = [bytes_of_state(model, options("--ema_decay=0.5"), shards) for shards in (1, 2)]
    assert averaged == [6 * weights, 5 * weights // 2 + weights]
    compiled = [bytes_of_state(model, options("--torch_compile"), shards) for shards in (1, 2)]
    assert compiled == [5 * weights, 2 * weights + weights]


@pytest.mark.parametrize("argv", [[], ["--r_drop_alpha=5"]], ids=["plain", "R-Drop"])
def test_the_memory_of_a_batch_grows_with_its_sentences(argv, make_model, accelerator):
    model, args = make_model(dropout=0.1), options(*argv)
    one, two, seven = (bytes_of_batch(model, args, accelerator, count, 30) for count in (1, 2, 7))
    assert 0 < one < two
    assert one + 6 * (two - one) == pytest.approx(seven, rel=1e-3)
    expected = estimate(model, args, accelerator, 7 * 30 + 29, np.array([12, 30])) - bytes_of_state(model, args)
    assert expected == pytest.approx(seven, rel=1e-3)


def test_looking_changes_nothing(make_model, accelerator):
    model = make_model(dropout=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    found = set()
    for is_training in (True, False):
        model.train(is_training)
        found.add(bytes_of_batch(model, options(), accelerator, 3, 10))
        assert model.training == is_training
    assert len(found) == 1  # that of training, whatever the model was doing
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def memory_of(free: float):
    return lambda accelerator: free


LENGTHS = np.array([7, 20, 3])


@pytest.mark.parametrize("sentences", [1, 5, 30, 200, 1000])
def test_the_largest_batch_fits_and_no_larger_one_does(sentences, make_model, accelerator, monkeypatch):
    """Into four fifths of what is free; more than 128 tokens are a multiple of that."""
    model, args = make_model(), options()
    needed = estimate(model, args, accelerator, sentences * 20, LENGTHS)
    weights = 4 * model.num_parameters()  # which are there before
    monkeypatch.setattr(memory, "free_memory", memory_of(needed / 0.8 - weights + 1))
    budget = largest_batch(model, args, accelerator, LENGTHS)
    assert budget == (sentences * 20 if sentences * 20 < 128 else sentences * 20 // 128 * 128)
    assert estimate(model, args, accelerator, budget, LENGTHS) <= needed
    monkeypatch.setattr(memory, "free_memory", memory_of(needed / 0.8 - weights - 2))
    if sentences > 1:
        fewer = (sentences - 1) * 20
        assert largest_batch(model, args, accelerator, LENGTHS) == (fewer if fewer < 128 else fewer // 128 * 128)


def test_what_is_kept_for_training_leaves_less_for_batches(make_model, accelerator, monkeypatch):
    model = make_model()
    needed = estimate(model, options(), accelerator, 1280, LENGTHS)
    monkeypatch.setattr(memory, "free_memory", memory_of(needed / 0.8 - 4 * model.num_parameters() + 1))
    budgets = [largest_batch(model, options(*argv), accelerator, LENGTHS) for argv in ([], ["--ema_decay=0.9"])]
    budgets.append(largest_batch(model, options("--r_drop_alpha=5"), accelerator, LENGTHS))
    assert budgets[0] == 1280 > budgets[1] > 0 and 1280 > 1.9 * budgets[2] > 0


def test_no_batch_is_larger_than_is_of_use(make_model, accelerator, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", memory_of(2.0**50))
    assert largest_batch(make_model(), options(), accelerator, LENGTHS) == 2**15


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_not_even_one_sentence_fits(share, make_model, accelerator, monkeypatch):
    model, args = make_model(), options()
    needed = estimate(model, args, accelerator, 20, LENGTHS)
    monkeypatch.setattr(memory, "free_memory", memory_of(share * needed / 0.8 - 4 * model.num_parameters()))
    with pytest.raises(UserError, match="^--per_device_train_max_tokens auto: .* one sentence of 20 tokens") as caught:
        largest_batch(model, args, accelerator, LENGTHS)
    assert "--max_source_length" in str(caught.value) and "\n" not in str(caught.value)


def test_the_process_with_the_least_memory_decides(make_model, accelerator, monkeypatch):
    model, args = make_model(), options()
    monkeypatch.setattr(memory, "free_memory", memory_of(2.0**30))
    others = SimpleNamespace(
        device=accelerator.device,
        autocast=accelerator.autocast,
        gather=lambda ours: torch.cat([ours, ours // ours * 1280, 2 * ours]),
    )
    assert largest_batch(model, args, others, LENGTHS) == 1280


@pytest.mark.parametrize("num_processes", [1, 4])
def test_processes_share_the_memory_of_a_machine(num_processes, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=800))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
    one = SimpleNamespace(device=torch.device("cpu"), num_processes=8)  # of several machines
    assert free_memory(one) == 800 / num_processes
