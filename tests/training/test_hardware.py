"""The estimate of a training step's memory against what the step takes, and the batch size chosen by it."""

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from helpers import peak_of, training_options

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import hardware
from vanilla_transformer.training.hardware import (
    activation_bytes,
    choose_batch_size,
    largest_batch,
    memory_for,
    step_bytes,
)
from vanilla_transformer.training.optimization import compute_loss


def estimate(model, args, accelerator, pairs: int, length: int) -> int:
    constant, per_pair = step_bytes(model, args, accelerator, length)
    return constant + pairs * per_pair


CASES = {
    "eager, short": ("eager", 16, 40, []),
    "eager, long": ("eager", 64, 10, []),
    "sdpa, short": ("sdpa", 16, 40, []),
    "sdpa, long": ("sdpa", 64, 10, []),
    "an average": ("eager", 16, 40, ["--ema_decay=0.9"]),
    "R-Drop": ("sdpa", 64, 10, ["--r_drop_alpha=5"]),
    "distillation": ("sdpa", 64, 10, ["--teacher=x"]),
}


@pytest.mark.parametrize("attention, length, pairs, argv", CASES.values(), ids=CASES)
def test_estimate_matches_the_measured_peak(attention, length, pairs, argv, accelerator):
    """Within 15%: weights, moments, moving average and the peak of the step."""
    args, sizes = training_options(*argv), {"vocab_size": 2000, "d_model": 256}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 3, f"{side}_ffn_dim": 1024}
    model = VanillaTransformerForConditionalGeneration._from_config(
        VanillaTransformerConfig(**sizes), attn_implementation=attention
    )
    estimated = estimate(model, args, accelerator, pairs, length)
    weights = 4 * model.num_parameters()
    there = weights + 2 * weights + (2 * weights if args.ema_decay else 0)
    ids = torch.randint(3, 2000, (pairs, length))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    if args.teacher:
        tokens = torch.randint(2000, (pairs, length, 8))
        batch |= {"teacher_tokens": tokens, "teacher_probabilities": torch.rand(tokens.shape)}

    def step():
        compute_loss(model.train(), batch, ids.numel(), args).backward()

    taken = there + peak_of(step)
    assert 0.85 < estimated / taken < 1.15
    assert taken > 1.2 * (there + weights)  # activations matter


@pytest.mark.parametrize(
    "argv, processes, is_sharded, copies",
    [
        ([], 1, False, 4),
        ([], 4, False, 4),
        (["--gradient_accumulation_steps=2"], 4, False, 5),
        (["--gradient_accumulation_steps=2"], 1, False, 4),
        ([], 4, True, 2),
        (["--ema_decay=0.5"], 1, False, 6),
        (["--ema_decay=0.5"], 2, True, 3.5),
        (["--torch_compile"], 2, True, 3),
    ],
)
def test_copies_of_the_weights_per_process(argv, processes, is_sharded, copies, make_model, accelerator, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(is_sharded))
    monkeypatch.setattr(hardware, "activation_bytes", lambda *_: 0)
    several = SimpleNamespace(num_processes=processes, device=accelerator.device, autocast=accelerator.autocast)
    model = make_model()
    assert step_bytes(model, training_options(*argv), several, 20)[0] == copies * 4 * model.num_parameters()


def test_the_bytes_of_no_pairs_are_constant(make_model, accelerator, monkeypatch):
    """A step with one pair takes 10 bytes and with two 16: so 6 a pair, and 4 for none."""
    model, options = make_model(), training_options()
    for two, expected in [(16, (4, 6)), (30, (0, 20)), (10, (10, 1))]:
        monkeypatch.setattr(hardware, "activation_bytes", lambda *given, two=two: {1: 10, 2: two}[given[3]])
        constant, per_pair = step_bytes(model, options, accelerator, 20)
        assert (constant - 16 * model.num_parameters(), per_pair) == expected


def test_a_model_that_does_not_fit_into_memory_is_refused(monkeypatch):
    config = VanillaTransformerConfig(vocab_size=1000)
    free = 4 * 3 * VanillaTransformerForConditionalGeneration(config).num_parameters()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    hardware.check_model_fits(config, 3)
    with pytest.raises(
        UserError, match=r"^A model of 4\d,\d{3},\d{3} parameters takes 0\.\d GiB, more than the 0\.\d GiB"
    ):
        hardware.check_model_fits(config, 4)


def test_measuring_has_no_side_effects(make_model, accelerator):
    model = make_model(dropout=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    found = set()
    for is_training in (True, False):
        model.train(is_training)
        found.add(activation_bytes(model, training_options(), accelerator, 3, 10))
        assert model.training == is_training
    assert len(found) == 1  # that of training, whatever the model was doing
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_memory_of_long_pairs_follows_from_shorter_ones(attention, make_model, accelerator, monkeypatch):
    model, longest = make_model(attn_implementation=attention), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: longest.append(k["labels"].shape[1]) or forward(*a, **k))
    expected = activation_bytes(model, training_options(), accelerator, 2, 400)
    monkeypatch.setattr(hardware, "MEASURED", 64)
    assert activation_bytes(model, training_options(), accelerator, 2, 400) == pytest.approx(expected, rel=0.02)
    assert longest == [400, 16, 32, 64]


@pytest.fixture
def with_memory_for(make_model, accelerator, monkeypatch):
    """with_memory_for(pairs) -> a model, where a step with so many pairs of 20 tokens takes all that is usable."""

    def make(pairs: float):
        model = make_model()
        needed = estimate(model, training_options(), accelerator, pairs, 20)
        monkeypatch.setattr(hardware, "memory_for", lambda model, device: needed / hardware.USABLE)
        return model

    return make


@pytest.mark.parametrize("pairs", [1, 5, 30, 200, 1000, 10**6])
def test_largest_batch_fits_and_no_larger_one_does(pairs, with_memory_for, accelerator):
    for count in (pairs + 0.01, pairs + 0.99):
        found = largest_batch(with_memory_for(count), training_options(), accelerator, 20)
        assert found == min(pairs * 20, 2**15)  # where it is capped


@pytest.mark.parametrize("pairs", [-100, 0, 0.99])
def test_error_if_not_even_one_pair_fits(pairs, with_memory_for, accelerator):
    with pytest.raises(UserError, match="^--per_device_train_max_tokens auto: .* one pair of 20 tokens .*_length"):
        largest_batch(with_memory_for(pairs), training_options(), accelerator, 20)


def test_process_with_the_least_memory_decides(with_memory_for, accelerator):
    others = SimpleNamespace(
        device=accelerator.device,
        autocast=accelerator.autocast,
        num_processes=1,
        gather=lambda ours: torch.cat([ours, ours // ours * 1280, 2 * ours]),
    )
    assert largest_batch(with_memory_for(1000), training_options(), others, 20) == 1280


@pytest.mark.parametrize("num_processes", [1, 4])
def test_processes_share_the_memory_and_the_cores_of_a_machine(num_processes, make_model, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=800))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
    model = make_model()
    assert memory_for(model, torch.device("cpu")) == 800 / num_processes + 4 * model.num_parameters()
    threads = Mock()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", threads)
    monkeypatch.setattr(hardware, "is_thread_count_given", lambda: False)
    malloc = Mock()
    monkeypatch.setattr(hardware, "configure_malloc", malloc)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    hardware.configure_cpu("no")
    threads.assert_called_once_with(12 // num_processes)
    malloc.assert_called_once_with()


LAUNCHER = """
import os, subprocess, sys
os.environ |= {"OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
sys.exit(subprocess.call([sys.executable, "-c", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_launched", [True, False])
@pytest.mark.parametrize("is_given", [True, False])
def test_a_number_of_threads_that_the_user_has_set_is_kept(is_given, is_launched):
    """What a launcher sets is not in its own environment, as the system keeps it."""
    code = "from vanilla_transformer.training.hardware import is_thread_count_given; print(is_thread_count_given())"
    command = [sys.executable, "-c", *([LAUNCHER] if is_launched else []), code]
    launched = ("OMP_NUM_THREADS", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    environment |= {"OMP_NUM_THREADS": "1"} if is_given else {}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split()[-1] == str(is_given)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_bfloat16_warning_on_a_cpu_without_it(has_bfloat16, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(hardware, "configure_malloc", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    hardware.configure_cpu("bf16")
    assert ("--mixed_precision bf16 is many times slower" in capsys.readouterr().out) == (not has_bfloat16)


@pytest.mark.parametrize("library, calls", [("glibc", [(-4, 0), (-1, 2**31 - 1), (-2, 2**28)]), ("", [])])
def test_glibc_keeps_freed_memory(library, calls, monkeypatch):
    """The numbers of M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD, from malloc.h, and no mapping, no trimming."""
    libc = Mock()
    monkeypatch.setattr(hardware.platform, "libc_ver", lambda: (library, "2"))
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: libc)
    hardware.configure_malloc()
    assert [call.args for call in libc.mallopt.call_args_list] == calls


def test_an_automatic_batch_size_is_that_of_the_checkpoint_or_the_largest(monkeypatch, capsys):
    def size(before, given="auto"):
        options = training_options(f"--per_device_train_max_tokens={given}")
        return choose_batch_size(None, options, SimpleNamespace(print=print), 20, before)

    monkeypatch.setattr(hardware, "largest_batch", lambda model, options, accelerator, longest: 1000 + longest)
    before = {"per_device_train_max_tokens": 777}
    assert [size(before), size({}), size(before, 55), size({}, 55)] == [777, 1020, 55, 55]
    assert capsys.readouterr().out == "--per_device_train_max_tokens auto: 1,020 tokens\n"


GIB = 2**30
V1 = {
    "memory.limit_in_bytes": 4 * GIB,
    "memory.usage_in_bytes": 3 * GIB,
    "memory.stat": f"cache 7\ntotal_inactive_file {GIB}",
}
V2 = {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 7\ninactive_file {GIB}"}
V1_UNLIMITED, V2_UNLIMITED = V1 | {"memory.limit_in_bytes": 2**63 - 4096}, V2 | {"memory.max": "max"}
ROOT_GROUP = {"memory.stat": "anon 7"}  # has no limit


@pytest.mark.parametrize(
    "groups, files, free",
    [
        ("0::/job/step", {"job/step": V2, ".": ROOT_GROUP}, 2),
        ("0::/job/step", {"job/step": V2_UNLIMITED, "job": V2}, 2),  # each group is within those above
        ("0::/", {".": V2}, 2),  # in a container
        ("4:memory:/job\n1:cpu:/job\n0::/", {"memory/job": V1, "memory": V1_UNLIMITED}, 2),
        ("4:cpu,memory:/docker/abc", {"cpu,memory": V1}, 2),  # named as outside the container
        ("0::/job", {"job": V2 | {"memory.current": 6 * GIB}}, 0),
        ("0::/job", {"job": V2_UNLIMITED}, 8),
        ("3:cpu:/job", {"job": V2}, 8),
        (None, {}, 8),
    ],
)
def test_the_limit_of_a_container_or_job_counts_as_memory(groups, files, free, tmp_path, monkeypatch):
    """In GiB: what is left below the limit, and the cache that could be freed."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    for group, contents in files.items():
        (tmp_path / "cgroup" / group).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (tmp_path / "cgroup" / group / name).write_text(f"{content}\n")
    if groups is not None:
        (tmp_path / "groups").write_text(f"{groups}\n")
    assert hardware.free_memory(tmp_path / "cgroup", tmp_path / "groups") == free * GIB
