"""Schedules, steps, and where a run is: what training is made of. Run: pytest tests/test_training.py"""

import contextlib
import json
import math
import re
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import SOURCES, TARGETS, assert_same_gradients, gradients, make_batch, parts, randomise
from torch import nn
from transformers import get_scheduler

from vanilla_transformer.training.arguments import parse_options
from vanilla_transformer.training.optimization import (
    Calendar,
    RunState,
    Step,
    Trouble,
    inverse_square_root,
    learning_rate_schedule,
    make_optimizer,
    optimizer_step,
    paper_learning_rate,
    r_drop_loss,
    seed_batch,
)


def options(*argv):
    return parse_options(["--dataset_name=x", *argv])


# ------------------------------------------------------------------------------------------------------------ schedule


@pytest.mark.parametrize("d_model, warmup_steps", [(512, 4000), (1024, 4000), (64, 1), (128, 200)])
def test_the_learning_rate_is_equation_3(d_model, warmup_steps):
    rate = learning_rate_schedule("inverse_sqrt", paper_learning_rate(d_model, warmup_steps), warmup_steps, 10)
    for step in [1, 2, warmup_steps // 2 + 1, warmup_steps, warmup_steps + 1, 3 * warmup_steps, 100_000]:
        expected = d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)
        assert rate(step) == pytest.approx(expected, rel=1e-12)
    assert rate(warmup_steps) == max(rate(step) for step in range(1, 2 * warmup_steps))


def test_the_schedule_without_warm_up_begins_at_its_peak():
    assert inverse_square_root(1, 0) == 1
    assert learning_rate_schedule("inverse_sqrt", 0.5, 0, 10)(4) == 0.25


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "constant", "constant_with_warmup"])
def test_other_schedules_are_those_of_transformers(name):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.25)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=20)
    ours = learning_rate_schedule(name, 0.25, 4, 20)
    for step in range(1, 21):
        optimizer.step()
        theirs.step()
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
    assert 0 < ours(4) <= 0.25


# -------------------------------------------------------------------------------------------------- optimiser and step

OPTIMISERS = {
    "sgd": lambda model, args: torch.optim.SGD(model.parameters(), lr=0.0),
    "adamw": make_optimizer,
}


@pytest.mark.parametrize("clip", ["1e9", "0", "0.5"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_accumulated_steps_equal_one_big_batch(make_model, accelerator, name, clip):
    # The bias of the keys has no gradient but rounding, which Adam would blow up without this epsilon.
    args = options("--adam_epsilon=1e-3", f"--max_grad_norm={clip}", "--weight_decay=0.01")
    results = {}
    for k in [1, 2, 3]:
        torch.manual_seed(0)
        model = make_model().train()
        optimizer = OPTIMISERS[name](model, args)
        returned = [
            optimizer_step(model, optimizer, parts(k), 0, rate, args, accelerator) for rate in (0.01, 0.02, 0.03)
        ]
        results[k] = model.state_dict(), torch.stack(returned)
    for k in [2, 3]:
        torch.testing.assert_close(results[k][0], results[1][0], rtol=0, atol=1e-6)
        shown = [0, 1, 2, 4]  # the positions that sentences are padded to do depend on the batches
        torch.testing.assert_close(results[k][1][:, shown], results[1][1][:, shown], rtol=1e-5, atol=1e-5)
    before = randomise(make_model())  # something was learnt at all
    assert any(not torch.equal(results[1][0][key], value) for key, value in before.state_dict().items())
    assert (results[1][1][1:, 0] < results[1][1][0, 0]).all()


def test_what_a_step_returns(make_model, accelerator):
    args = options("--label_smoothing_factor=0.2", "--max_grad_norm=0.1")
    model = make_model().train()
    batches = parts(2)
    losses = [model(**batch, label_smoothing=0.2, num_items_in_batch=1).loss for batch in batches]
    sum(losses).backward()
    tokens = sum(len(target) + 1 for target in TARGETS)
    norm = torch.stack([p.grad.norm() / tokens for p in model.parameters()]).norm()
    model.zero_grad()
    returned = optimizer_step(model, make_optimizer(model, args), batches, 0, 0.01, args, accelerator)
    positions = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in batches)
    sources = sum(len(source) + 1 for source in SOURCES)
    expected = torch.tensor([sum(losses).item(), tokens, sources, positions, norm])
    torch.testing.assert_close(returned, expected)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("k", [1, 3])
def test_gradients_are_shared_with_the_last_batch_only(device, k):
    """On a device of its own, where batches are copied to, as on the CPU. What does not sync never learns together."""
    calls = []

    @contextlib.contextmanager
    def no_sync(model):
        calls.append("no_sync")
        yield

    weight = torch.zeros((), device=device, requires_grad=True)

    def model(labels, **kwargs):
        calls.append("batch")
        return SimpleNamespace(loss=weight * 2)

    model.parameters = lambda: [weight]
    accelerator = one_of_several(0, 2, device, no_sync=no_sync)
    batches = [make_batch(SOURCES[i : i + 1], TARGETS[i : i + 1]) for i in range(k)]
    optimizer_step(model, torch.optim.SGD([weight], lr=0.1), batches, 0, 0.1, options(), accelerator)
    assert calls == ["no_sync", "batch"] * (k - 1) + ["batch"]


def one_of_several(
    index: int, count: int, device: str = "cpu", no_sync=contextlib.nullcontext, counts=None
) -> SimpleNamespace:
    """What a process sees of Accelerate, if all of them together have so many tokens."""
    return SimpleNamespace(
        device=torch.device(device),
        num_processes=count,
        process_index=index,
        scaler=None,
        reduce=lambda tensor: counts if counts is not None and tensor.shape == (3,) else tensor,
        no_sync=no_sync,
        backward=lambda loss: loss.backward(),
        unscale_gradients=lambda optimizer: None,
    )


DROPOUTS = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.1}


@pytest.mark.parametrize("alpha", [0, 5])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_the_dropout_of_a_batch_depends_on_its_number_alone(make_model, accelerator, num_processes, alpha):
    """Processes that deal the batches out among them learn what one learns of them all, with dropout."""
    args = options("--max_grad_norm=0", f"--r_drop_alpha={alpha}")
    batches = parts(4)

    def learnt(batches: list[dict], first: int, accelerator) -> tuple[dict, torch.Tensor]:
        torch.manual_seed(7)
        model = make_model(**DROPOUTS).train()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        torch.manual_seed(num_processes)  # what the generator is at does not matter
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sums = optimizer_step(model, optimizer, batches, first, 1.0, args, accelerator)
        return {name: p.detach() - before[name] for name, p in model.named_parameters()}, sums

    expected, sums = learnt(batches, 8, accelerator)
    shares = [
        learnt(batches[i::num_processes], 8, one_of_several(i, num_processes, counts=sums[1:4]))
        for i in range(num_processes)
    ]
    # Processes average their gradients, and here sum their losses.
    mean = {name: sum(share[name] for share, _ in shares) / num_processes for name in expected}
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-6)
    assert expected["model.shared.weight"].abs().max() > 0.01
    torch.testing.assert_close(sum(share[0] for _, share in shares), sums[0])
    elsewhere, _ = learnt(batches, 12, accelerator)
    assert not torch.allclose(elsewhere["model.shared.weight"], expected["model.shared.weight"], atol=1e-4)


def test_weight_decay_spares_biases_and_norms(make_model):
    model = make_model(position_embedding_type="learned", lm_head_bias=True, norm_first=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, options("--weight_decay=0.5"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    spared = {name for name in before if name.endswith("bias") or "norm" in name}
    assert 0 < len(spared) < len(before)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.data, before[name] * (1 if name in spared else 1 - 0.1 * 0.5))


def test_adam_is_the_papers_by_default(make_model):
    optimizer = make_optimizer(make_model(), options())
    assert optimizer.defaults["betas"] == (0.9, 0.98) and optimizer.defaults["eps"] == 1e-9
    assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)
    assert optimizer.defaults["fused"]


def test_dropout_is_a_function_of_seed_and_batch():
    def mask(*key):
        seed_batch(*key)
        return nn.functional.dropout(torch.ones(200)).tolist()

    keys = [(42, 1), (42, 2), (43, 1), (1, 42), (0, 0), (42, 10**9), (2**63 - 1, 1)]
    masks = [mask(*key) for key in keys]
    assert all(a != b for i, a in enumerate(masks) for b in masks[:i])
    assert [mask(*key) for key in reversed(keys)] == masks[::-1]


# -------------------------------------------------------------------------------------------------------------- R-Drop


def paper_r_drop(logits, labels, alpha: float, smoothing: float) -> torch.Tensor:
    """Liang et al. (2021), equations 1 to 4, a token at a time; `logits` and `labels` hold every pair twice."""
    size = len(labels) // 2
    total = torch.zeros((), dtype=torch.float64)
    for sentence in range(size):
        for t, label in enumerate(labels[sentence].tolist()):
            if label == -100:
                continue
            p1, p2 = (logits[sentence + k * size, t].double().softmax(dim=-1) for k in (0, 1))
            target = torch.full_like(p1, smoothing / len(p1))
            target[label] += 1 - smoothing
            likelihood = -(target * p1.log()).sum() - (target * p2.log()).sum()
            divergence = ((p1 * (p1 / p2).log()).sum() + (p2 * (p2 / p1).log()).sum()) / 2
            total = total + likelihood + alpha * divergence
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 5.0])
def test_r_drop_is_half_the_loss_of_its_paper(make_model, alpha, smoothing):
    model = make_model(**DROPOUTS, lm_head_bias=True).train()
    batch = parts(1)[0]
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    tokens = int((batch["labels"] != -100).sum())
    torch.manual_seed(5)
    loss = r_drop_loss(model, batch, alpha, smoothing, torch.tensor(float(tokens)))
    ours = gradients(model, loss)
    torch.manual_seed(5)
    start = torch.full((12, 1), model.config.decoder_start_token_id)
    shifted = torch.cat([start, twice["labels"][:, :-1].clamp(min=model.config.pad_token_id)], dim=1)
    logits = model(twice["input_ids"], twice["attention_mask"], shifted, use_cache=False).logits
    expected = paper_r_drop(logits, twice["labels"], alpha, smoothing) / 2 / tokens
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert_same_gradients(ours, gradients(model, expected), 1e-6)
    assert not torch.allclose(logits[:6], logits[6:], atol=0.1)  # it is dropout that R-Drop is about


def test_r_drop_without_its_divergence_is_the_plain_loss(make_model):
    model = make_model(**DROPOUTS).train()
    batch = parts(1)[0]
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    torch.manual_seed(5)
    loss = r_drop_loss(model, batch, 0.0, 0.1, 7)
    torch.manual_seed(5)
    plain = model(**twice, label_smoothing=0.1, num_items_in_batch=14).loss
    torch.testing.assert_close(loss, plain)
    assert_same_gradients(gradients(model, loss), gradients(model, plain), 1e-6)


def test_r_drop_without_dropout_is_the_plain_loss(make_model):
    model = make_model().train()
    batch = parts(1)[0]
    loss = r_drop_loss(model, batch, 5.0, 0.1, 7)
    plain = model(**batch, label_smoothing=0.1, num_items_in_batch=7).loss
    torch.testing.assert_close(loss, plain)
    assert_same_gradients(gradients(model, loss), gradients(model, plain), 1e-6)


def test_a_step_with_r_drop(make_model, accelerator):
    """With other dropout in each batch, and the tokens counted once."""
    args = options("--r_drop_alpha=3", "--max_grad_norm=0")
    model = make_model(**DROPOUTS).train()
    batches = parts(2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = sum(len(target) + 1 for target in TARGETS)
    losses = []
    for number, batch in enumerate(batches, start=4):
        seed_batch(args.seed, number)
        losses.append(r_drop_loss(model, batch, 3.0, 0.1, tokens))
    expected = gradients(model, sum(losses))
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    returned = optimizer_step(model, optimizer, batches, 4, 1.0, args, accelerator)
    learnt = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    torch.testing.assert_close(learnt, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(returned[0], sum(losses).detach() * tokens)
    assert returned[1] == tokens


# ------------------------------------------------------------------------------------------------------------- float16


def test_a_step_that_float16_skips_is_no_trouble(make_model, half):
    """While it looks for its scale the gradient is infinite, nothing is learnt, and nothing is wrong."""
    args = options()
    model = make_model(dropout=0.1).train()
    wrapped = half.prepare_model(model)
    optimizer = half.prepare_optimizer(make_optimizer(model, args))
    state, skipped = RunState(), []
    for _ in range(8):
        before, scale = model.lm_head.weight.detach().clone(), half.scaler.get_scale()
        sums = optimizer_step(wrapped, optimizer, parts(2), state.position, 0.01, args, half)
        state.advance(2)
        assert state.find_trouble([Step(state.step, state.position - 2, 0.01, sums)]) is None
        skipped.append(half.scaler.get_scale() < scale)
        assert torch.equal(model.lm_head.weight, before) == skipped[-1]
        assert (sums[4] == 0) == skipped[-1] and 0 <= sums[4] < 100
    assert skipped[:2] == [True, True] and not any(skipped[5:])
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    sums = optimizer_step(wrapped, optimizer, parts(2), 0, 0.01, args, half)
    assert state.find_trouble([Step(9, 0, 0.01, sums)]) is not None  # a loss that is no number is one all the same


def test_float16_clips_the_gradient_without_its_scale(make_model, half):
    args = options("--max_grad_norm=0.1")
    half.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = make_model().train()
    reference = gradients(model, model(**parts(1)[0], label_smoothing=0.1).loss)
    model.zero_grad()
    norm = torch.stack([gradient.norm() for gradient in reference.values()]).norm()
    assert norm > 1
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = half.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    sums = optimizer_step(half.prepare_model(model), optimizer, parts(1), 0, 1.0, args, half)
    torch.testing.assert_close(sums[4], norm, rtol=0.01, atol=0)
    learnt = torch.stack([(p.detach() - before[name]).norm() for name, p in model.named_parameters()]).norm()
    torch.testing.assert_close(learnt, torch.tensor(0.1), rtol=0.01, atol=0)


# --------------------------------------------------------------------------------------------------------------- state


def step(number: int, *sums: float, rate: float = 0.1) -> Step:
    return Step(number, 2 * number - 2, rate, torch.tensor(sums, dtype=torch.float32))


def steps(losses, first: int = 1, tokens: int = 20, norm: float = 1.0) -> list[Step]:
    """Steps of two batches and of so many target tokens each."""
    return [step(i, loss * tokens, tokens, tokens, 2 * tokens, norm) for i, loss in enumerate(losses, start=first)]


def test_what_a_run_logs_and_reports():
    state = RunState(step=10)
    window = [step(9, 20, 5, 10, 40, 6, rate=0.2), step(10, 30, 15, 20, 60, 8)]
    assert state.log(window, 2.0) == {
        "step": 10,
        "loss": 2.5,
        "learning_rate": 0.1,
        "grad_norm": 7.0,
        "target_tokens_per_second": 10.0,
        "padding_fraction": 0.5,
    }
    state.step = 20
    state.log([step(20, 30, 20, 30, 50, 7, rate=0.2)], 2.0)
    assert state.results() == {
        "train_runtime": 4.0,
        "train_steps": 20,
        "train_loss": 2.0,
        "train_target_tokens": 40,
        "train_target_tokens_per_second": 10.0,
        "padding_fraction": pytest.approx(1 - 100 / 150),
    }
    assert [item["step"] for item in state.history] == [10, 20]
    assert state.recent_losses == [4.0, 2.0, 1.5]


def test_the_number_of_tokens_is_exact_over_a_long_window():
    """Sums in float32 would stand still at 2^24."""
    state = RunState()
    state.log([step(1, 0, 2**24, 1, 2**25, 0), *[step(2, 0, 1, 1, 2, 0)] * 2], 1)
    assert state.target_tokens == 2**24 + 2


@pytest.mark.parametrize("cuts", [[], [50], [1, 2, 99], range(1, 100), [33, 34, 71]])
def test_totals_do_not_depend_on_where_a_run_was_stopped(cuts):
    """To the last bit: what is resumed is what was not interrupted."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 5000, 100)
    sums = [(10 ** generator.uniform(-6, 9), t, t + 1, 3 * t, 1.0) for t in tokens.tolist()]
    window = [step(i, *values) for i, values in enumerate(sums, start=1)]

    def totals(cuts) -> dict:
        state = RunState()
        for a, b in zip([0, *cuts], [*cuts, 100], strict=True):
            state = RunState(**json.loads(json.dumps(asdict(state))))
            state.log(window[a:b], 1.0)
        return {key: value for key, value in asdict(state).items() if key not in ("history", "train_runtime")}

    assert totals(cuts) == totals([10, 20, 30, 40])


@pytest.mark.parametrize("spikes", [True, False])
@pytest.mark.parametrize("loss, norm", [("nan", 7.0), ("inf", 7.0), (3.0, "nan"), (3.0, "inf"), ("-inf", 1.0)])
def test_a_loss_or_a_gradient_that_is_no_number_is_trouble(loss, norm, spikes):
    """From the first step on, and named by its own step, not by that of the log."""
    state = RunState(step=10, history=[{"step": 10}])
    window = steps([9.0, float(loss), 3.0, math.nan], first=17)
    window[1].sums[4] = float(norm)
    trouble = state.find_trouble(window, spikes)
    assert (trouble.step, trouble.position, trouble.learning_rate) == (18, 34, 0.1)
    np.testing.assert_equal((trouble.loss, trouble.grad_norm), (float(loss), float(norm)))
    assert state == RunState(step=10, history=[{"step": 10}])
    said = "The loss is .* the norm of its gradient .* at step 18, with learning rate 1.00e-01, in batches 34 to 35"
    assert re.search(said, trouble.describe(SimpleNamespace(pairs_of=list), 2))


@pytest.mark.parametrize(
    "loss, usual, batches_per_step, expected",
    [
        (
            7.25,
            3.0,
            1,
            "The loss is 7.25 after 3.00 on average and the norm of its gradient 1.5 at step 9, with learning rate "
            "1.00e-03, in batch 40, pairs 400, 401, 402, 403, 404",
        ),
        (
            math.nan,
            None,
            2,
            "The loss is nan and the norm of its gradient 1.5 at step 9, with learning rate 1.00e-03, in batches 40 "
            "to 41, pairs 400, 401, 402, 403, 404, 410, 411, 412 and 2 more",
        ),
    ],
)
def test_trouble_is_told_with_its_step_rate_and_pairs(loss, usual, batches_per_step, expected):
    pairs = SimpleNamespace(pairs_of=lambda numbers: [10 * n + i for n in numbers for i in range(5)])
    assert Trouble(9, 40, 1e-3, loss, 1.5, usual).describe(pairs, batches_per_step) == expected


STATIONARY = {
    "noisy": lambda g, n: 3 + 0.5 * g.standard_normal(n),
    "with long tails": lambda g, n: 2 + g.gamma(4, 0.15, n),
    "of few tokens": lambda g, n: np.abs(g.standard_normal(n)) * 1.2,
    "near 0": lambda g, n: 0.003 * g.random(n) + 0.8 * (g.random(n) < 0.01),
    "exactly the same": lambda g, n: np.full(n, 1.7),
    "falling from the start": lambda g, n: 2 + 9 * np.exp(-np.arange(n) / 40) + 0.3 * g.standard_normal(n),
    "falling at once": lambda g, n: np.where(np.arange(n) < 3, 11.0, 2.5) + 0.2 * g.standard_normal(n),
    "rising slowly": lambda g, n: 2 + np.arange(n) / 500 + 0.3 * g.standard_normal(n),
}


@pytest.mark.parametrize("kind", STATIONARY)
def test_no_false_alarm(kind):
    state = RunState()
    losses = STATIONARY[kind](np.random.default_rng(0), 2000)
    for start in range(0, 2000, 100):
        window = steps(losses[start : start + 100], first=start + 1)
        assert state.find_trouble(window) is None
        state.log(window, 1.0)


@pytest.mark.parametrize(
    "kind, logging_steps", [*((kind, 50) for kind in STATIONARY), *(("noisy", n) for n in (1, 7, 500))]
)
def test_a_spike_is_found_at_its_step(kind, logging_steps):
    """Whatever the logs, and also right after the run was resumed."""
    losses = STATIONARY[kind](np.random.default_rng(0), 400)
    recent = losses[220:320]
    losses[320:] = recent.mean() + max(2.0, 6 * recent.std()) + 0.1
    state = RunState()
    for start in range(0, 400, logging_steps):
        window = steps(losses[start : start + logging_steps], first=start + 1)
        trouble = state.find_trouble(window)
        assert state.find_trouble(window, spikes=False) is None
        if trouble is not None:
            break
        state.log(window, 1.0)
        state = RunState(**json.loads(json.dumps(asdict(state))))
    assert (trouble.step, trouble.position) == (321, 640)
    assert trouble.usual_loss == pytest.approx(recent.mean(), rel=1e-5)
    assert trouble.loss == pytest.approx(losses[320], rel=1e-5)


def test_a_jump_below_the_threshold_is_none():
    calm = [3.0] * 100
    assert RunState(recent_losses=calm).find_trouble(steps([4.99])) is None
    assert RunState(recent_losses=calm).find_trouble(steps([5.01])).usual_loss == 3.0
    lively = [2.0, 4.0] * 50  # of deviation 1
    assert RunState(recent_losses=lively).find_trouble(steps([8.9])) is None
    assert RunState(recent_losses=lively).find_trouble(steps([9.1])) is not None
    assert RunState(recent_losses=[3.0] * 49).find_trouble(steps([50.0])) is None  # too few to tell


def test_advancing_goes_over_what_is_skipped():
    state = RunState()
    state.advance(4)
    assert (state.step, state.position) == (1, 4)
    state.skip(4, 4)  # the next step's own, as after a rollback to where it began
    assert (state.step, state.position, state.skipped) == (1, 8, [4, 5, 6, 7])
    state.skip(12, 4)  # a later one
    assert (state.step, state.position) == (1, 8)
    state.skip(16, 4)
    state.advance(4)
    assert (state.step, state.position) == (2, 20)
    assert state.skipped == [*range(4, 8), *range(12, 20)]
    state.advance(4)
    assert (state.step, state.position) == (3, 24)


def test_skipping_joins_what_was_skipped_before():
    state = RunState(skipped=[2, 3], position=0)
    state.skip(0, 2)
    assert (state.position, sorted(state.skipped)) == (4, [0, 1, 2, 3])


def scored(scores: dict[int, tuple[float, float, float]]) -> RunState:
    """A state after evaluations at these steps, with their BLEU, chrF and loss."""
    state = RunState()
    for number, (bleu, chrf, loss) in scores.items():
        state.step = number
        state.log(steps([loss], first=number), 1.0)
        assert not state.is_evaluated
        state.log_scores({"eval_bleu": bleu, "eval_chrf": chrf, "eval_loss": loss, "bleu_signature": "x"})
        assert state.is_evaluated
    return state


SCORES = {1: (0.0, 9.0, 3.0), 2: (5.0, 9.5, 2.0), 3: (4.0, 9.0, 2.5), 4: (5.0, 8.0, 1.5), 5: (1.0, 7.0, 1.5)}


@pytest.mark.parametrize(
    "metric, ranking, waited",
    [("bleu", [2, 4, 3, 5, 1], 3), ("chrf", [2, 1, 3, 4, 5], 3), ("loss", [4, 5, 2, 3, 1], 1)],
)
def test_the_best_evaluations(metric, ranking, waited):
    """The earlier one of two that are equal; what is as good as the best is no improvement."""
    state = scored(SCORES)
    assert state.ranking(metric) == ranking
    assert state.evaluations_without_improvement(metric) == waited
    again = RunState(**json.loads(json.dumps(asdict(state))))
    assert again.ranking(metric) == ranking
    assert again.evaluations_without_improvement(metric) == waited
    counts = [scored(dict(list(SCORES.items())[:n])).evaluations_without_improvement(metric) for n in range(6)]
    best = SCORES[ranking[0]]
    assert counts[0] == 0 and counts[ranking[0]] == 0 and counts[5] == waited
    assert best in (SCORES[2], SCORES[4])


def test_what_is_kept_of_an_evaluation():
    state = scored({2: (5.0, 9.0, 1.0)})
    assert state.history[-1] == {"step": 2, "eval_bleu": 5.0, "eval_chrf": 9.0, "eval_loss": 1.0}
    assert state.evaluations() == state.history[-1:]
    state.advance(1)
    assert not state.is_evaluated


# ------------------------------------------------------------------------------------------------------------ calendar

# options -> the steps, of 10, at which the run logs, evaluates and saves
CALENDAR = {
    "--logging_steps=4": ([4, 8, 10], [], [10]),
    "--logging_steps=99": ([10], [], [10]),
    "--logging_steps=4 --eval_steps=3": ([3, 4, 6, 8, 9, 10], [3, 6, 9], [3, 6, 9, 10]),
    "--logging_steps=4 --eval_steps=5": ([4, 5, 8, 10], [5], [5, 10]),  # the last one is evaluated after the run
    "--logging_steps=99 --save_steps=4": ([4, 8, 10], [], [4, 8, 10]),
    "--logging_steps=99 --save_steps=4 --eval_steps=6": ([4, 6, 8, 10], [6], [4, 6, 8, 10]),
    "--logging_steps=5 --eval_steps=4 --early_stopping_patience=2": ([4, 5, 8, 10], [4, 8, 10], [4, 8, 10]),
    "--logging_steps=5 --eval_steps=4 --average_checkpoints=2": ([4, 5, 8, 10], [4, 8], [4, 8, 10]),
    "--logging_steps=5 --eval_steps=4 --average_checkpoints=2 --average_checkpoints_by=score": (
        [4, 5, 8, 10],
        [4, 8, 10],
        [4, 8, 10],
    ),
    "--logging_steps=5 --on_divergence=rollback": ([0, 5, 10], [], [0, 10]),
    "--logging_steps=5 --eval_steps=1": (list(range(1, 11)), list(range(1, 10)), list(range(1, 11))),
}


@pytest.mark.parametrize("given", CALENDAR)
def test_when_a_run_logs_evaluates_and_saves(given):
    calendar = Calendar(options(*given.split()), 10)
    logs, evaluates, saves = CALENDAR[given]
    assert [n for n in range(1, 11) if calendar.logs(n)] == [n for n in logs if n]
    assert [n for n in range(11) if calendar.evaluates(n)] == evaluates
    assert [n for n in range(11) if calendar.saves(n)] == saves


@pytest.mark.parametrize(
    "metric, patience, over",
    [("bleu", 1, 3), ("bleu", 2, 4), ("bleu", 3, 5), ("bleu", 4, None), ("loss", 1, 3), ("loss", 2, None)],
)
def test_a_run_is_over_when_it_waited_too_long(metric, patience, over):
    argv = ["--eval_steps=1", f"--early_stopping_patience={patience}", f"--metric_for_best_model={metric}"]
    calendar = Calendar(options(*argv), 10)
    ends = [n for n in range(6) if calendar.is_over(scored(dict(list(SCORES.items())[:n])))]
    assert ends[:1] == ([] if over is None else [over])


def test_a_run_is_over_after_its_last_step():
    calendar = Calendar(options("--eval_steps=1"), 10)
    assert not calendar.is_over(RunState(step=9)) and calendar.is_over(RunState(step=10))
    assert not calendar.is_over(scored(SCORES))
