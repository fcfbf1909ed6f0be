"""The state of a run: logs, divergence, ranking of evaluations, and when to log, evaluate, save and end."""

import json
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch
from helpers import training_options

from vanilla_transformer.training import state as state_code
from vanilla_transformer.training.state import Diverged, Meter, TrainerState, Triggers


def reload(state: TrainerState) -> TrainerState:
    return TrainerState(**json.loads(json.dumps(asdict(state))))


def read_pairs(first: int, count: int) -> list[dict]:
    """Two pairs of each batch."""
    return [pair(number * factor) for number in range(first, first + count) for factor in (1, 10)]


def log(state: TrainerState, accelerator, steps, detect_spikes=True) -> dict:
    """Logs steps of two batches, given as (loss, target, source and padded tokens, gradient norm)."""
    meter = Meter()
    meter.start()
    for loss, *tokens, norm in steps:
        state.advance(2)
        loss, norm = torch.tensor(float(loss)), torch.tensor(float(norm))
        meter.add(state, 0.1, loss, torch.tensor(tokens, dtype=torch.float32), norm)
    return meter.flush(state, accelerator, read_pairs, detect_spikes)


def pair(number: int) -> dict:
    return {"source": f"source {number}", "target": "word " * number}


def losses_of(losses, norm=1.0):
    return [(loss, 20, 20, 40, norm) for loss in losses]


def test_the_loss_is_summed_over_processes_and_the_counts_are_not(accelerator, monkeypatch):
    monkeypatch.setattr(accelerator, "reduce", lambda losses: 2 * losses)
    entry = log(TrainerState(), accelerator, [(4.0, 5, 10, 40, 6)])
    assert (entry["loss"], entry["grad_norm"], entry["padding_fraction"]) == (8.0, 6.0, 1 - 15 / 40)


def test_log_entry_and_results(accelerator, monkeypatch):
    """The first entry comes after 5 seconds, the second after 3 more."""
    monkeypatch.setattr(time, "perf_counter", iter([100.0, 105.0, 200.0, 203.0]).__next__)
    state = TrainerState()
    entry = log(state, accelerator, [(4.0, 5, 10, 40, 6), (2.0, 15, 20, 60, 8)])
    assert entry.pop("target_tokens_per_second") == 4
    assert entry == {"step": 2, "loss": 2.5, "learning_rate": 0.1, "grad_norm": 7.0, "padding_fraction": 0.5}
    log(state, accelerator, [(1.5, 20, 30, 50, 7)])
    results = state.results()
    assert results == {
        "train_runtime": 8,
        "train_target_tokens_per_second": 5,
        "train_steps": 3,
        "train_loss": 2.0,
        "train_target_tokens": 40,
        "padding_fraction": pytest.approx(1 - 100 / 150),
    }
    assert [item["step"] for item in state.history] == [2, 3] and state.position == 6
    assert state.recent_losses == [4.0, 2.0, 1.5]


def test_each_log_entry_has_its_own_steps(accelerator):
    state, meter = TrainerState(), Meter()
    for loss in (4.0, 2.0):
        state.advance(1)
        meter.start()
        meter.add(state, 0.1, torch.tensor(loss), torch.tensor([10.0, 10.0, 20.0]), torch.tensor(1.0))
        assert meter.flush(state, accelerator, list)["loss"] == loss
    assert state.recent_losses == [4.0, 2.0] and state.target_tokens == 20


def test_results_of_a_run_without_a_step():
    names = ("train_runtime", "train_steps", "train_loss", "train_target_tokens", "train_target_tokens_per_second")
    assert TrainerState().results() == dict.fromkeys(names, 0) | {"padding_fraction": 1}


def test_token_counts_are_exact(accelerator):
    """Sums in float32 would stop growing at 2^24."""
    state = TrainerState()
    log(state, accelerator, [(0, 2**24, 1, 2**25, 0), (0, 1, 1, 2, 0), (0, 1, 1, 2, 0)])
    assert state.target_tokens == 2**24 + 2


@pytest.mark.parametrize("cuts", [[], [50], [1, 2, 99], range(1, 100), [33, 34, 71]])
def test_totals_do_not_depend_on_interruptions(cuts, accelerator):
    """To the last bit."""
    generator = np.random.default_rng(0)
    steps = [(10 ** generator.uniform(-6, 9), t, t + 1, 3 * t, 1.0) for t in generator.integers(1, 5000, 100).tolist()]

    def totals(cuts) -> dict:
        state = TrainerState()
        for a, b in zip([0, *cuts], [*cuts, 100], strict=True):
            state = reload(state)
            log(state, accelerator, steps[a:b], detect_spikes=False)
        return {key: value for key, value in asdict(state).items() if key not in ("history", "train_runtime")}

    assert totals(cuts) == totals([10, 20, 30, 40])


@pytest.mark.parametrize("detect_spikes", [True, False])
@pytest.mark.parametrize("loss, norm", [("nan", 7), ("inf", 7), (3, "nan"), (3, "inf"), ("-inf", 1)])
def test_nan_or_infinity_is_divergence(loss, norm, detect_spikes, accelerator):
    """From the first step, and told with its own step, not that of the log entry."""
    state = TrainerState(step=16, position=32)
    steps = losses_of([9.0]) + losses_of([loss], norm) + losses_of([3.0, "nan"])
    told = r"diverged at step 18 \(learning rate 1.00e-01, batches up to number 35\): the loss is .* gradient norm"
    with pytest.raises(Diverged, match=told) as caught:
        log(state, accelerator, steps, detect_spikes)
    assert "--on_divergence" not in str(caught.value) and not state.history
    shortened = " ".join(["word"] * 12)  # to 60 characters
    assert f"The longest of the 4 pair(s) of step 18 is 'source 350', '{shortened}…'. " in str(caught.value)
    assert len(str(caught.value)) < 500 and "before step 18 are intact" in str(caught.value)


STATIONARY = {
    "noisy": lambda g, n: 3 + 0.5 * g.standard_normal(n),
    "long tails": lambda g, n: 2 + g.gamma(4, 0.15, n),
    "near 0": lambda g, n: 0.003 * g.random(n) + 0.8 * (g.random(n) < 0.01),
    "constant": lambda g, n: np.full(n, 1.7),
    "falling from the start": lambda g, n: 2 + 9 * np.exp(-np.arange(n) / 40) + 0.3 * g.standard_normal(n),
}


@pytest.mark.parametrize("kind", STATIONARY)
def test_no_false_alarm(kind, accelerator):
    state = TrainerState()
    log(state, accelerator, losses_of(STATIONARY[kind](np.random.default_rng(0), 2000)))  # would raise Diverged
    assert state.step == 2000


EVERY_STEP = pytest.param("noisy", 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "kind, logging_steps", [*((kind, 50) for kind in STATIONARY), *(("noisy", n) for n in (7, 500)), EVERY_STEP]
)
def test_lasting_spike_is_found(kind, logging_steps, accelerator):
    """For any logging interval, and right after the run was resumed."""
    losses = STATIONARY[kind](np.random.default_rng(0), 400)
    recent = losses[220:320]
    losses[320:] = recent.mean() + max(2.0, 6 * recent.std()) + 0.1
    state, ignoring = TrainerState(), TrainerState()
    told = "diverged at step 330 .* number 659.* jumped at step 321 .* --on_divergence ignore.* pair.s. of step 321 is"
    with pytest.raises(Diverged, match=told):
        for start in range(0, 400, logging_steps):
            log(ignoring, accelerator, losses_of(losses[start : start + logging_steps]), detect_spikes=False)
            log(state, accelerator, losses_of(losses[start : start + logging_steps]))
            state = reload(state)


@pytest.mark.parametrize(
    "recent, loss, is_spike",
    [
        ([3.0] * 100, 4.99, False),
        ([3.0] * 100, 5.01, True),
        ([2.0, 4.0] * 50, 8.9, False),  # of standard deviation 1
        ([2.0, 4.0] * 50, 9.1, True),
        ([3.0] * 49, 50.0, False),  # too few to tell
        ([3.0] * 50, 50.0, True),
    ],
)
def test_threshold_of_a_spike(recent, loss, is_spike, accelerator):
    state = TrainerState(recent_losses=recent)
    log(state, accelerator, losses_of([loss]))
    assert state.spikes == [1] * is_spike and (state.recent_losses[-1] == pytest.approx(loss)) != is_spike


@pytest.mark.parametrize("spikes", [[0], [0, 1, 2], range(9), range(0, 200, 2)])
def test_spikes_that_do_not_last_pass(spikes, accelerator):
    """However high they are: a batch with an odd pair, and the steps until training has recovered from it."""
    state = TrainerState(recent_losses=[1.0] * 100)
    log(state, accelerator, losses_of([1e6 if step in spikes else 1.0 for step in range(300)]))
    assert state.spikes == [] and set(state.recent_losses) == {1.0}


def test_spikes_at_most_steps_are_divergence(accelerator):
    """An easy batch now and then does not hide it."""
    losses = [1.0 if step % 4 == 3 else 9.0 for step in range(40)]
    with pytest.raises(Diverged, match="diverged at step 18 .* at step 1 and is 9 now, after 1 on average"):
        log(TrainerState(recent_losses=[1.0] * 100), accelerator, losses_of(losses))


# --------------------------------------------------------------------------------------------------------- evaluations

# step: (BLEU, chrF, loss)
SCORES = {1: (0.0, 9.0, 3.0), 2: (5.0, 9.5, 2.0), 3: (4.0, 9.0, 2.5), 4: (5.0, 8.0, 1.5), 5: (1.0, 7.0, 1.5)}


def evaluated(scores: dict) -> TrainerState:
    state = TrainerState()
    for state.step, (bleu, chrf, loss) in scores.items():
        assert not state.is_evaluated
        state.log_scores({"eval_bleu": bleu, "eval_chrf": chrf, "eval_loss": loss, "eval_bleu_signature": "x"})
        assert state.is_evaluated
    return state


@pytest.mark.parametrize(
    "metric, ranking, waited",
    [("bleu", [4, 2, 3, 5, 1], 1), ("chrf", [2, 3, 1, 4, 5], 3), ("loss", [4, 5, 2, 3, 1], 1)],
)
def test_ties_go_to_the_lower_loss_then_the_earlier_step(metric, ranking, waited):
    state = evaluated(SCORES)
    for one in (state, reload(state)):
        assert one.ranking(metric) == ranking
        assert one.evaluations_without_improvement(metric) == waited
    assert TrainerState().evaluations_without_improvement(metric) == 0


def test_chrf_ranks_where_bleu_says_nothing():
    """Texts of less than four words have a BLEU of 0, and wrong ones of more words may have more."""
    state = evaluated({1: (0.1, 9.0, 3.0), 2: (0.0, 80.0, 2.0), 3: (0.0, 100.0, 2.5), 4: (0.0, 90.0, 1.5)})
    assert state.ranking("bleu") == [3, 4, 2, 1] and state.evaluations_without_improvement("bleu") == 1


def test_nan_is_the_worst_score():
    assert evaluated({1: (0.0, 1.0, float("nan")), 2: (0.0, 1.0, 9.0)}).ranking("loss") == [2, 1]


def test_earlier_scores_that_are_not_comparable_are_ignored():
    state = evaluated(SCORES)
    state.scores_count_from = 3
    assert state.ranking("bleu") == [4, 5] and state.is_evaluated


# ------------------------------------------------------------------------------------------------------------ triggers

# options -> the steps, of 10, at which the run logs, evaluates and saves
TRIGGERS = {
    "--logging_steps=4": ([4, 8, 10], [], [10]),
    "--logging_steps=4 --eval_steps=3": ([3, 4, 6, 8, 9, 10], [3, 6, 9], [3, 6, 9, 10]),
    "--logging_steps=4 --eval_steps=5": ([4, 5, 8, 10], [5], [5, 10]),  # the last one is evaluated after the loop
    "--logging_steps=99 --save_steps=4 --eval_steps=6": ([4, 6, 8, 10], [6], [4, 6, 8, 10]),
    "--logging_steps=5 --eval_steps=4 --early_stopping_patience=2": ([4, 5, 8, 10], [4, 8, 10], [4, 8, 10]),
    "--logging_steps=4 --average_checkpoints=2": ([1, 4, 7, 8, 10], [], [1, 4, 7, 10]),  # evenly, up to the last one
    "--logging_steps=4 --eval_steps=6 --average_checkpoints=2": ([4, 6, 8, 10], [6], [6, 10]),
    "--logging_steps=4 --save_steps=4 --average_checkpoints=2": ([4, 8, 10], [], [4, 8, 10]),
    "--logging_steps=5 --eval_steps=4 --average_checkpoints=2 --average_checkpoints_by=score": (
        [4, 5, 8, 10],
        [4, 8, 10],
        [4, 8, 10],
    ),
}


@pytest.mark.parametrize("given", TRIGGERS)
def test_when_a_run_logs_evaluates_and_saves(given, monkeypatch):
    monkeypatch.setattr(state_code, "AVERAGED_EVERY", 0.3)
    triggers = Triggers(training_options(*given.split()), 10)
    logs, evaluates, saves = TRIGGERS[given]
    assert [n for n in range(1, 11) if triggers.should_log(n)] == logs
    assert [n for n in range(11) if triggers.should_evaluate(n)] == evaluates
    assert [n for n in range(11) if triggers.should_save(n)] == saves


@pytest.mark.parametrize("argv, is_by_time", [([], True), (["--eval_steps=3"], True), (["--save_steps=3"], False)])
def test_a_checkpoint_is_overdue_after_some_time_unless_steps_are_given(argv, is_by_time, monkeypatch):
    triggers = Triggers(training_options(*argv), 10)
    assert not triggers.is_overdue()
    monkeypatch.setattr(state_code, "SAVE_AFTER", 0)
    assert triggers.is_overdue() == is_by_time
    monkeypatch.setattr(state_code, "SAVE_AFTER", 0.5)
    triggers.saved_at -= 1
    assert triggers.is_overdue() == is_by_time
    triggers.note_save()
    assert not triggers.is_overdue()


@pytest.mark.parametrize(
    "metric, patience, end",
    [("bleu", 1, 3), ("bleu", 2, None), ("chrf", 1, 3), ("chrf", 2, 4), ("loss", 1, 3), ("loss", 2, None)],
)
def test_early_stopping(metric, patience, end):
    argv = ["--eval_steps=1", f"--early_stopping_patience={patience}", f"--metric_for_best_model={metric}"]
    triggers = Triggers(training_options(*argv), 10)
    ends = [n for n in range(6) if triggers.is_done(evaluated(dict(list(SCORES.items())[:n])))]
    assert ends[:1] == ([] if end is None else [end])


def test_run_is_done_after_its_last_step():
    triggers = Triggers(training_options("--eval_steps=1"), 10)
    assert not triggers.is_done(TrainerState(step=9)) and triggers.is_done(TrainerState(step=10))
    assert not triggers.is_done(evaluated(SCORES))
