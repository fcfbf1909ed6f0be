"""The optimizer step: learning rate, moving average, AdamW, losses that add up, distillation, R-Drop, clipping."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import SOURCES, TARGETS, assert_same_gradients, gradients, parts, small_model, training_options
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import get_scheduler

from train import optimizer_step
from vanilla_transformer.data.batches import SOFT_TARGETS
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import optimization as optim
from vanilla_transformer.training.distillation import soft_targets
from vanilla_transformer.training.state import TrainerState
from vanilla_transformer.training.weights import Weights

# ------------------------------------------------------------------------------------------------------------ schedule


@pytest.mark.parametrize("d_model, warmup_steps", [(512, 4000), (1024, 4000), (64, 1), (128, 200)])
def test_learning_rate_is_equation_3(d_model, warmup_steps):
    peak = optim.paper_learning_rate(d_model, warmup_steps)
    rate = optim.learning_rate_schedule("inverse_sqrt", peak, warmup_steps, 10)
    for step in [1, 2, warmup_steps // 2 + 1, warmup_steps, warmup_steps + 1, 3 * warmup_steps, 100_000]:
        expected = d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)
        assert rate(step) == pytest.approx(expected, rel=1e-12)
    assert rate(warmup_steps) == max(rate(step) for step in range(1, 2 * warmup_steps))


@pytest.mark.parametrize("d_model, limit", [(64, 3e-3), (128, 2.8e-3), (256, 1.4e-3), (512, 7.0e-4), (1024, 4.9e-4)])
def test_default_peak_is_limited_where_models_of_this_width_learn(d_model, limit):
    def peak(warmup_steps: int, *argv: str) -> float:
        return optim.choose_learning_rate(training_options(f"--warmup_steps={warmup_steps}", *argv), d_model, {})

    for warmup_steps in (0, 50, 500):
        assert peak(warmup_steps) == pytest.approx(limit, rel=0.02)
    for warmup_steps in (4000, 16000):
        assert peak(warmup_steps) == optim.paper_learning_rate(d_model, warmup_steps)
    assert peak(4000, "--model_name_or_path=x") == pytest.approx(min(4e-4, 4e-4 * 128 / d_model))


def test_schedule_without_warmup_starts_at_its_peak():
    assert optim.inverse_square_root(1, 0) == 1
    assert optim.learning_rate_schedule("inverse_sqrt", 0.5, 0, 10)(4) == 0.25
    assert optim.paper_learning_rate(512, 0) == optim.paper_learning_rate(512, 1) == 512**-0.5


@pytest.mark.parametrize("warmup_steps, max_steps", [(0, 1), (0, 20), (1, 20), (4, 20), (20, 20), (30, 20)])
@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "constant", "constant_with_warmup"])
def test_other_schedules_are_those_of_transformers(name, warmup_steps, max_steps):
    """With warm-up, those of a run of one step more, whose first step learns nothing."""
    skipped = int(warmup_steps > 0 and name != "constant")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.25)
    theirs = get_scheduler(name, optimizer, warmup_steps, max_steps + skipped)
    rates = []
    for _ in range(max_steps + skipped):  # as transformers' Trainer
        rates += theirs.get_last_lr()
        optimizer.step()
        theirs.step()
    ours = list(map(optim.learning_rate_schedule(name, 0.25, warmup_steps, max_steps), range(1, max_steps + 1)))
    assert ours == pytest.approx(rates[skipped:], rel=1e-12) and min(ours) > 0.001 and not any(rates[:skipped])
    assert ours[min(max(warmup_steps, 1), max_steps) - 1] == max(ours)


@pytest.mark.parametrize("max_steps", [60, 100, 1000])
def test_runs_of_any_length_share_the_stable_part_of_their_schedule(max_steps):
    """So each can be branched off from a checkpoint of a longer one."""
    name, steps = "warmup_stable_decay", range(1, max_steps + 1)
    rates = list(map(optim.learning_rate_schedule(name, 0.25, 20, max_steps), steps))
    longer = list(map(optim.learning_rate_schedule(name, 0.25, 20, 2000), steps))
    stable = max_steps + 1 - max_steps // 5
    assert rates[:stable] == longer[:stable] and set(rates[19:stable]) == {0.25}
    shares = [(step - stable) / (max_steps // 5) for step in steps[stable:]]  # of the decay
    assert rates[stable:] == pytest.approx([0.25 * (1 - math.sqrt(share)) for share in shares])
    assert 0 < rates[-1] < 0.02


# -------------------------------------------------------------------------------------------------------------- losses

DROPOUTS = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.1}
DISTILLATION = ["--teacher=x", "--distillation_temperature=2"]
LOSSES = {"plain": [], "R-Drop": ["--r_drop_alpha=3"], "distillation": DISTILLATION}
LOSSES["both"] = LOSSES["R-Drop"] + DISTILLATION
losses = pytest.mark.parametrize("argv", LOSSES.values(), ids=LOSSES.keys())


def taught(batches: list[dict]) -> list[dict]:
    """The batches with soft targets."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        teachers = [small_model(), small_model()]
    return [batch | dict(zip(SOFT_TARGETS, soft_targets(teachers, batch, 5), strict=True)) for batch in batches]


def step_gradients(model, batches, args, accelerator, first=0, num_tokens=None) -> dict:
    """The gradients of an optimizer step over these batches, numbered from `first`, as train.py sums them."""
    num_tokens = optim.count_tokens(batches, accelerator)[0] if num_tokens is None else num_tokens
    total = 0
    for number, batch in enumerate(batches, start=first):
        optim.seed_batch(args.seed, number)
        total = total + optim.compute_loss(model, batch, num_tokens, args)
    return gradients(model, total)


def test_tokens_are_counted_without_padding(accelerator):
    batches = parts(2)
    padded = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in batches)
    expected = [sum(len(row) + 1 for row in rows) for rows in (TARGETS, SOURCES)]
    assert optim.count_tokens(batches, accelerator).tolist() == [*expected, padded]


def batches_for(argv: list[str], k: int) -> list[dict]:
    return taught(parts(k)) if "--teacher=x" in argv else parts(k)


@losses
@pytest.mark.parametrize("k", [2, 3, 4])
def test_accumulated_batches_equal_one_large_batch(make_model, accelerator, k, argv):
    args, model = training_options(*argv), make_model().train()
    expected = step_gradients(model, batches_for(argv, 1), args, accelerator)
    assert_same_gradients(step_gradients(model, batches_for(argv, k), args, accelerator), expected, 1e-5)


@losses
def test_dropout_depends_on_the_batch_number_only(make_model, accelerator, argv):
    """Processes that share the batches get the gradients of one process, with dropout."""
    args, model, batches = training_options(*argv), make_model(**DROPOUTS).train(), batches_for(argv, 4)
    expected = step_gradients(model, batches, args, accelerator, first=8)
    tokens = optim.count_tokens(batches, accelerator)[0]
    torch.manual_seed(9)  # the state of the generator does not matter
    total = dict.fromkeys(expected, 0)
    for number, batch in reversed([*enumerate(batches, start=8)]):
        share = step_gradients(model, [batch], args, accelerator, first=number, num_tokens=tokens)
        total = {name: total[name] + gradient for name, gradient in share.items()}
    assert_same_gradients(total, expected, 1e-5)
    elsewhere = step_gradients(model, batches, args, accelerator, first=12)
    assert not torch.allclose(elsewhere["model.shared.weight"], expected["model.shared.weight"], atol=1e-4)


@losses
def test_gradient_checkpointing_keeps_the_gradients(make_model, accelerator, argv):
    model, batches = make_model(**DROPOUTS, encoder_layers=3).train(), batches_for(argv, 2)
    expected = step_gradients(model, batches, training_options(*argv), accelerator)
    model.gradient_checkpointing_enable()
    found = step_gradients(model, batches, training_options(*argv), accelerator)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ids = batches[0]["input_ids"]
    assert model(ids, decoder_input_ids=ids).past_key_values is None  # layers that run twice would fill it twice


@losses
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_no_step_waits_for_its_device(make_model, accelerator, monkeypatch, attention, argv):
    """On a device whose tensors have no values, so that reading one fails. Fused AdamW is not there for it."""
    (batch,) = batches_for(argv, 1)
    monkeypatch.setitem(AcceleratorState._shared_state, "device", torch.device("meta"))
    with torch.device("meta"):
        model = make_model(**DROPOUTS, encoder_layers=1, decoder_layers=1).train()
    model.set_attn_implementation(attention)
    weights = Weights(model, accelerator, compile=False, ema_decay=0.9)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        state = TrainerState(step=step, position=step)
        numbers = optimizer_step(weights, optimizer, training_options(*argv), accelerator, [batch], state, 0.1)
        assert all(number.is_meta for number in numbers)


def total_norm(tensors) -> torch.Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


@pytest.mark.parametrize("value", [torch.inf, torch.nan, -torch.inf])
def test_the_norm_of_a_step_that_float16_skips_is_0(value, half):
    model = torch.nn.Linear(2, 1)
    optimizer = half.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    half.scaler.scale(model(torch.ones(2)).sum()).backward()
    model.weight.grad.fill_(value)
    assert optim.clip_grad_norm(model, optimizer, 1.0, half) == 0


@pytest.mark.parametrize("max_norm, expected", [(0, None), (1e9, None), (0.1, 0.1)])
def test_gradient_clipping(make_model, accelerator, max_norm, expected):
    model = make_model().train()
    optimizer = optim.make_optimizer(model, training_options())
    found = step_gradients(model, parts(1), training_options(), accelerator)
    norm = total_norm(found.values())
    torch.testing.assert_close(optim.clip_grad_norm(model, optimizer, max_norm, accelerator), norm)
    clipped = total_norm(parameter.grad for parameter in model.parameters())
    assert clipped.item() == pytest.approx(expected or norm.item(), rel=1e-3)


def test_weight_decay_skips_biases_and_norms(make_model):
    model = make_model(position_embedding_type="learned", lm_head_bias=True, norm_first=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = optim.make_optimizer(model, training_options("--weight_decay=0.5"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optim.set_learning_rate(optimizer, 0.1)
    optimizer.step()
    spared = {name for name in before if name.endswith("bias") or "norm" in name}
    assert 0 < len(spared) < len(before)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.data, before[name] * (1 if name in spared else 1 - 0.1 * 0.5))


def test_adam_defaults_are_the_papers(make_model):
    optimizer = optim.make_optimizer(make_model(), training_options())
    assert optimizer.defaults["betas"] == (0.9, 0.98) and optimizer.defaults["eps"] == 1e-9
    assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)
    assert optimizer.defaults["fused"]


def test_dropout_is_a_function_of_seed_and_batch():
    def mask(*key):
        optim.seed_batch(*key)
        return nn.functional.dropout(torch.ones(200)).tolist()

    keys = [(42, 1), (42, 2), (43, 1), (1, 42), (0, 0), (42, 10**9), (2**63 - 1, 1)]
    masks = [mask(*key) for key in keys]
    assert all(a != b for i, a in enumerate(masks) for b in masks[:i])
    assert [mask(*key) for key in reversed(keys)] == masks[::-1]


# -------------------------------------------------------------------------------------------- distillation and R-Drop


def paper_divergence(logits, labels) -> torch.Tensor:
    """Of both passes, Liang et al. (2021), equation 2; `logits` and `labels` hold every pair twice."""
    p1, p2 = logits[labels != -100].double().softmax(dim=1).chunk(2)
    return ((p1 * (p1 / p2).log()).sum() + (p2 * (p2 / p1).log()).sum()) / 2


def paper_distillation(logits, batch: dict, weight: float, temperature: float, smoothing: float) -> torch.Tensor:
    """Hinton et al. (2015), section 2, with the k tokens kept as the whole distribution, and the smoothed labels."""
    kept = batch["labels"] != -100
    z = logits[kept].double()
    one_hot = nn.functional.one_hot(batch["labels"][kept], z.shape[1]).double()
    smoothed = (1 - smoothing) * one_hot + smoothing / z.shape[1]
    tempered = batch["teacher_probabilities"][kept].double() ** (1 / temperature)
    targets = torch.zeros_like(z).scatter(1, batch["teacher_tokens"][kept], tempered)
    hard = -(smoothed * z.log_softmax(dim=1)).sum()
    soft = -(targets / targets.sum(dim=1, keepdim=True) * (z / temperature).log_softmax(dim=1)).sum()
    return (1 - weight) * hard + weight * temperature**2 * soft


MIXTURES = [(1, 0, 1), (5, 0, 1), (0, 0.5, 1), (0, 0.3, 2), (0, 1, 0.7), (0, 0.5, 0.1), (2, 0.4, 1), (2, 0.4, 3)]


@pytest.mark.parametrize("smoothing", [0.1, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("alpha, weight, temperature", MIXTURES)
def test_distillation_and_half_of_r_drop_are_the_losses_of_their_papers(
    make_model, chunks, alpha, weight, temperature, smoothing
):
    model = make_model(**DROPOUTS, lm_head_bias=True).train()
    (batch,) = taught(parts(1))
    assert (batch["teacher_tokens"] == batch["labels"][..., None]).any()  # some labels are among the teachers' tokens
    argv = [f"--label_smoothing_factor={smoothing}", f"--r_drop_alpha={alpha}"]
    if weight:
        argv += ["--teacher=x", f"--distillation_weight={weight}", f"--distillation_temperature={temperature}"]
    passes = 2 if alpha else 1
    twice = {name: torch.cat([tensor] * passes) for name, tensor in batch.items()}
    tokens = int((batch["labels"] != -100).sum())
    torch.manual_seed(5)
    loss = optim.compute_loss(model, batch, torch.tensor(float(tokens)), training_options(*argv))
    ours = gradients(model, loss)
    torch.manual_seed(5)
    start = torch.full((6 * passes, 1), model.config.decoder_start_token_id)
    shifted = torch.cat([start, twice["labels"][:, :-1].clamp(min=model.config.pad_token_id)], dim=1)
    logits = model(twice["input_ids"], twice["attention_mask"], shifted, use_cache=False).logits
    expected = paper_distillation(logits, twice, weight, temperature, smoothing) / passes
    if alpha:
        divergence = temperature**2 * paper_divergence(logits / temperature, twice["labels"])
        expected = expected + alpha / 2 * divergence
        assert not torch.allclose(logits[:6], logits[6:], atol=0.1)  # it is dropout that R-Drop is about
    torch.testing.assert_close(loss.double(), expected / tokens, rtol=1e-6, atol=0)
    assert_same_gradients(ours, gradients(model, expected / tokens), 1e-6)
    model.lm_head.forward = model.lm_head.forward  # as an adapter does, so that the layer is called
    torch.manual_seed(5)
    called = optim.compute_loss(model, batch, torch.tensor(float(tokens)), training_options(*argv))
    assert_same_gradients(gradients(model, called), ours, 1e-6)


# ------------------------------------------------------------------------------------------------------------- float16


def float16_step(wrapped, optimizer, half, max_norm=1.0) -> torch.Tensor:
    half.backward(optim.compute_loss(wrapped, parts(1)[0], 30, training_options()))
    norm = optim.clip_grad_norm(wrapped, optimizer, max_norm, half)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def test_step_skipped_by_float16_has_gradient_norm_0(make_model, half):
    """While the scaler searches for its scale, gradients are infinite; that is not divergence."""
    model = make_model(dropout=0.1).train()
    optimizer = half.prepare_optimizer(optim.make_optimizer(model, training_options()))
    wrapped = half.prepare_model(model)
    optim.set_learning_rate(optimizer, 0.01)
    skipped = []
    for _ in range(8):
        before, scale = model.lm_head.weight.detach().clone(), half.scaler.get_scale()
        norm = float16_step(wrapped, optimizer, half)
        skipped.append(half.scaler.get_scale() < scale)
        assert torch.equal(model.lm_head.weight, before) == skipped[-1]
        assert (norm == 0) == skipped[-1] and 0 <= norm < 100
    assert skipped[:2] == [True, True] and not any(skipped[5:])


def test_float16_clips_unscaled_gradients(make_model, half):
    half.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = make_model().train()
    reference = gradients(model, optim.compute_loss(model, parts(1)[0], 30, training_options()))
    model.zero_grad()
    norm = total_norm(reference.values())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = half.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    found = float16_step(half.prepare_model(model), optimizer, half, max_norm=0.1)
    torch.testing.assert_close(found, norm, rtol=0.01, atol=0)
    change = total_norm(p.detach() - before[name] for name, p in model.named_parameters())
    torch.testing.assert_close(change, torch.tensor(0.1), rtol=0.01, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_no_prediction_has_a_lower_loss_than_the_bound(smoothing):
    """That of the smoothed targets themselves equals it."""
    bound = optim.lowest_loss(training_options(f"--label_smoothing_factor={smoothing}"), 7)
    targets = torch.full((7,), smoothing / 7)
    targets[3] += 1 - smoothing
    best = targets.clamp(min=1e-30).log()
    rows = torch.stack([best, *torch.randn(20, 7)])
    loss, *others = cross_entropy(rows, torch.full((21,), 3), label_smoothing=smoothing, reduction="none")
    assert loss == pytest.approx(bound, abs=1e-6) and min(others) > bound
    assert optim.lowest_loss(training_options("--teacher=x"), 7) is None  # which has other targets


# ------------------------------------------------------------------------------------------------ defaults and steps


@pytest.mark.parametrize(
    "argv, resumed, expected, said",
    [
        (["--warmup_steps=40000"], {}, (16 * 40000) ** -0.5, ""),
        (["--warmup_steps=100"], {}, (16 * 4000) ** -0.5, "4.0e-03 instead of .* = 2.5e-02, as --warmup_steps 100 is"),
        (["--warmup_steps=2", "--model_name_or_path=x"], {}, 4e-4, "4.0e-04 instead of .* = 1.8e-01, as a higher"),
        (["--warmup_steps=2", "--learning_rate=0.5"], {}, 0.5, ""),
        (["--warmup_steps=2"], {"learning_rate": 0.0125}, 0.0125, ""),
        (["--warmup_steps=2", "--learning_rate=0.5"], {"learning_rate": 0.0125}, 0.5, ""),
    ],
)
def test_the_default_learning_rate_is_the_papers_within_limits(argv, resumed, expected, said, capsys):
    assert optim.choose_learning_rate(training_options(*argv), 16, resumed) == pytest.approx(expected)
    printed = capsys.readouterr().out
    assert re.match(f"the default learning rate is {said}", printed) if said else printed == ""


@pytest.mark.parametrize(("d_model", "peak"), [(64, 5e-3), (128, 5e-3), (256, 2e-3), (512, 1e-3)])
def test_the_default_peak_of_muon_is_lower_for_wide_models(d_model, peak):
    assert optim.choose_learning_rate(training_options("--optimizer=muon"), d_model, {}) == pytest.approx(peak)


def test_steps_are_given_or_counted_from_epochs(capsys):
    batches = SimpleNamespace(epoch=lambda: range(7))

    def count(*argv, done=0):
        return optim.count_steps(training_options("--learning_rate=0.5", *argv), batches, 2, done)

    assert count("--num_train_epochs=2.5") == 9  # of 17.5 batches, two a step
    assert count("--max_steps=6", "--warmup_steps=6", done=6) == count("--max_steps=6", "--lr_scheduler_type=constant")
    assert capsys.readouterr().out.splitlines() == [
        "steps 0 to 9, learning rate up to 5.00e-01",
        "warning: the run ends during warm-up; lower --warmup_steps, or train longer.",
        "steps 6 to 6, learning rate up to 5.00e-01",
        "steps 0 to 6, learning rate up to 5.00e-01",
    ]
    with pytest.raises(UserError, match="^The run ends at step 6, but checkpoint-7 is past it; raise --max_steps"):
        count("--max_steps=6", done=7)
