"""The estimate of a training step's memory against what the step takes, and the batch size chosen by it."""

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import memory
from vanilla_transformer.training.arguments import parse_arguments
from vanilla_transformer.training.memory import (
    activation_bytes,
    estimate_step_bytes,
    free_memory,
    largest_batch,
    state_bytes,
)
from vanilla_transformer.training.optimization import compute_loss


def options(*argv):
    return parse_arguments(["--dataset_name=x", *argv])


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
def test_estimate_matches_the_measured_peak(case, accelerator):
    """Within 15%: weights, moments, moving average and the peak of the step."""
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
    estimated = estimate_step_bytes(model, args, accelerator, sentences * length, length)
    weights = 4 * model.num_parameters()
    there = weights + 2 * weights + (2 * weights if args.ema_decay else 0)
    batch = batch_of(sentences, length)

    def step():
        compute_loss(model.train(), batch, batch["labels"].numel(), args).backward()

    taken = there + peak_of(step)
    assert 0.85 < estimated / taken < 1.15
    assert taken > 1.2 * (there + weights)  # activations matter


def test_state_bytes_per_process(make_model):
    model = make_model()
    weights = 4 * model.num_parameters()
    kept = [state_bytes(model, options(), shards) for shards in (1, 4)]
    assert kept == [4 * weights, weights + weights]
    averaged = [state_bytes(model, options("--ema_decay=0.5"), shards) for shards in (1, 2)]
    assert averaged == [6 * weights, 5 * weights // 2 + weights]
    compiled = [state_bytes(model, options("--torch_compile"), shards) for shards in (1, 2)]
    assert compiled == [5 * weights, 2 * weights + weights]


@pytest.mark.parametrize("argv", [[], ["--r_drop_alpha=5"]], ids=["plain", "R-Drop"])
def test_activations_grow_linearly_with_pairs(argv, make_model, accelerator):
    model, args = make_model(dropout=0.1), options(*argv)
    one, two, seven = (activation_bytes(model, args, accelerator, count, 30) for count in (1, 2, 7))
    assert 0 < one < two
    assert one + 6 * (two - one) == pytest.approx(seven, rel=1e-3)
    expected = estimate_step_bytes(model, args, accelerator, 7 * 30 + 29, 30) - state_bytes(model, args)
    assert expected == pytest.approx(seven, rel=1e-3)


def test_measuring_has_no_side_effects(make_model, accelerator):
    model = make_model(dropout=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    found = set()
    for is_training in (True, False):
        model.train(is_training)
        found.add(activation_bytes(model, options(), accelerator, 3, 10))
        assert model.training == is_training
    assert len(found) == 1  # that of training, whatever the model was doing
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def memory_of(free: float):
    return lambda accelerator: free


LENGTHS = np.array([7, 20, 3])


@pytest.mark.parametrize("sentences", [1, 5, 30, 200, 1000])
def test_largest_batch_fits_and_no_larger_one_does(sentences, make_model, accelerator, monkeypatch):
    """Into four fifths of what is free; more than 128 tokens are a multiple of that."""
    model, args = make_model(), options()
    needed = estimate_step_bytes(model, args, accelerator, sentences * 20, 20)
    weights = 4 * model.num_parameters()  # which are there before
    monkeypatch.setattr(memory, "free_memory", memory_of(needed / 0.8 - weights + 1))
    budget = largest_batch(model, args, accelerator, LENGTHS)
    assert budget == (sentences * 20 if sentences * 20 < 128 else sentences * 20 // 128 * 128)
    assert estimate_step_bytes(model, args, accelerator, budget, 20) <= needed
    monkeypatch.setattr(memory, "free_memory", memory_of(needed / 0.8 - weights - 2))
    if sentences > 1:
        fewer = (sentences - 1) * 20
        assert largest_batch(model, args, accelerator, LENGTHS) == (fewer if fewer < 128 else fewer // 128 * 128)


def test_moving_average_and_r_drop_reduce_the_batch(make_model, accelerator, monkeypatch):
    model = make_model()
    needed = estimate_step_bytes(model, options(), accelerator, 1280, 20)
    monkeypatch.setattr(memory, "free_memory", memory_of(needed / 0.8 - 4 * model.num_parameters() + 1))
    budgets = [largest_batch(model, options(*argv), accelerator, LENGTHS) for argv in ([], ["--ema_decay=0.9"])]
    budgets.append(largest_batch(model, options("--r_drop_alpha=5"), accelerator, LENGTHS))
    assert budgets[0] == 1280 > budgets[1] > 0 and 1280 > 1.9 * budgets[2] > 0


def test_batch_is_capped(make_model, accelerator, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", memory_of(2.0**50))
    assert largest_batch(make_model(), options(), accelerator, LENGTHS) == 2**15


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_error_if_not_even_one_pair_fits(share, make_model, accelerator, monkeypatch):
    model, args = make_model(), options()
    needed = estimate_step_bytes(model, args, accelerator, 20, 20)
    monkeypatch.setattr(memory, "free_memory", memory_of(share * needed / 0.8 - 4 * model.num_parameters()))
    with pytest.raises(UserError, match="^--per_device_train_max_tokens auto: .* one pair of 20 tokens") as caught:
        largest_batch(model, args, accelerator, LENGTHS)
    assert "--max_source_length" in str(caught.value) and "\n" not in str(caught.value)


def test_process_with_the_least_memory_decides(make_model, accelerator, monkeypatch):
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


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_bfloat16_warning_on_a_cpu_without_it(has_bfloat16, monkeypatch, capsys):
    monkeypatch.setattr(memory, "cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(memory, "configure_malloc", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    memory.configure_cpu(SimpleNamespace(mixed_precision="bf16", num_processes=1, print=print))
    assert ("--mixed_precision bf16 is many times slower" in capsys.readouterr().out) == (not has_bfloat16)
