"""Threads, memory allocation, and the largest batch that fits into memory."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from helpers import training_options

from vanilla_transformer.errors import UserError
from vanilla_transformer.training import hardware
from vanilla_transformer.training.hardware import choose_batch_size, largest_batch
from vanilla_transformer.training.optimization import compute_loss


@pytest.fixture
def with_memory_for(make_model, monkeypatch):
    """with_memory_for(pairs) -> a model, and the sizes of the batches that were tried; more pairs do not fit."""

    def make(pairs: int):
        tried = []

        def loss_or_error(model, batch, num_tokens, options):
            tried.append(tuple(batch["labels"].shape))
            if tried[-1][0] > pairs:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return compute_loss(model, batch, num_tokens, options)

        monkeypatch.setattr(hardware, "compute_loss", loss_or_error)
        monkeypatch.setattr("accelerate.utils.memory.clear_device_cache", lambda **_: None)  # takes most of the time
        return make_model(), tried

    return make


@pytest.mark.parametrize("pairs", [1, 30, 10**6])
@pytest.mark.parametrize("argv", [[], ["--teacher=x", "--teacher_top_k=3"]])
def test_four_fifths_of_the_largest_batch_that_fits_are_used(pairs, argv, with_memory_for, accelerator):
    model, tried = with_memory_for(pairs)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = largest_batch(model, training_options(*argv), accelerator, 20)
    assert found <= max(20, 0.8 * 20 * (pairs + 1)) and found >= min(2**15, 0.7 * 20 * pairs)
    assert found == 2**15 if pairs == 10**6 else found < 2**15
    assert {length for _, length in tried} == {20} and tried == sorted(tried, reverse=True) and tried[-1][0] <= pairs
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_error_if_not_even_one_pair_fits(with_memory_for, accelerator):
    with pytest.raises(UserError, match="^--per_device_train_max_tokens auto: .* one pair of 20 tokens .*_length"):
        largest_batch(with_memory_for(0)[0], training_options(), accelerator, 20)


def test_process_with_the_least_memory_decides(with_memory_for, accelerator):
    others = SimpleNamespace(
        device=accelerator.device,
        autocast=accelerator.autocast,
        gather=lambda ours: torch.cat([ours, ours // ours * 1600, 2 * ours]),
    )
    assert largest_batch(with_memory_for(1000)[0], training_options(), others, 20) == 1280


@pytest.mark.parametrize("num_processes", [1, 4])
def test_processes_share_the_cores_of_a_machine(num_processes, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
    threads, malloc = Mock(), Mock()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", threads)
    monkeypatch.setattr(hardware, "is_thread_count_given", lambda: False)
    monkeypatch.setattr(hardware, "configure_malloc", malloc)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    hardware.configure(torch.device("cpu"), "no")
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


def test_without_a_parent_process_no_number_of_threads_is_given(monkeypatch):
    """As for the first process of a container."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(psutil.Process, "parent", lambda self: None)
    assert hardware.is_thread_count_given() is False


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_bfloat16_warning_on_a_cpu_without_it(has_bfloat16, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(hardware, "configure_malloc", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    hardware.configure(torch.device("cpu"), "bf16")
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


@pytest.mark.parametrize(
    ("has", "kind"),
    [
        ({"cpu_name": "Intel Xeon", "amx_bf16": True, "avx512_bf16": True, "avx2": True}, "Intel Xeon CPU with AMX"),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True, "avx512_f": True}, "AMD EPYC CPU with AVX-512 bf16"),
        ({"cpu_name": "", "avx2": True}, f"{platform.machine()} CPU with AVX2"),
        ({}, f"{platform.machine()} CPU"),
    ],
)
def test_the_kind_of_cpu_is_its_name_and_its_best_instructions(has, kind, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert hardware.describe_cpu() == kind
