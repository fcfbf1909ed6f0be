"""One GPU: how near the training step is to the limit of the card, and where it is not.

python benchmarks/gpu.py                                    # nine minutes on one GPU
python benchmarks/gpu.py --sizes --data ../multi30k_tok     # Multi30k to a validation BLEU of 40: two minutes each
python benchmarks/gpu.py --sizes base --kinds "ours, compiled"
python benchmarks/gpu.py --quick                            # on any machine, to see that it runs

Measures the step of train.py, eager and compiled, MarianMTModel and torch.nn.Transformer, for several sizes of model
and batch: tokens per second, the share of the card's arithmetic, kernels and synchronizations. Each measurement has a
process of its own; what no time is left for is skipped, so what matters most comes first. Writes a page to
benchmarks/results.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import peers
import report
import torch
from contest import Contestant
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode
from train_step import make_batches, matmul_limit

from vanilla_transformer.commands.parser import positive

KINDS = ["ours", "ours, compiled", "MarianMTModel", "torch.nn.Transformer"]
# Target tokens in a batch: an eighth of the paper's, a common size, all of the paper's.
BATCHES = (3125, 8192, 25_000)
LENGTHS = {"tiny": 16.0, "base": 27.0, "big": 27.0, "quick": 9.0}  # tokens of a sentence: of Multi30k, of WMT14
VOCABULARY = {"tiny": 9712, "base": 37_000, "big": 37_000, "quick": 300}
# FLOP/s in bfloat16 without sparsity, from NVIDIA's data sheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12}
SHAPES = 4  # different batches, which the steps take in turn
SECONDS = 4.0  # of a measurement
GOAL = 40.0  # validation BLEU of the speedrun


@dataclass
class Measured:
    """The steps of one kind of model on batches of one size."""

    tokens_per_second: float  # target tokens
    milliseconds: float  # of a step
    issuing: float  # milliseconds in which the host has issued it
    first: float  # seconds of the first step of each shape
    kernels: int | None  # of a step; None without a GPU
    synchronizations: int | None
    memory: int  # bytes of the GPU, at most


# ----------------------------------------------------------------------------------------------------------- the steps


def make_step(kind: str, size: str, device: str):
    """The training step of a kind of model: a function of a batch on the CPU and a number."""
    precision = "bf16" if device == "cuda" else "fp32"
    attention = "sdpa" if device == "cuda" else "eager"
    if kind.startswith("ours"):
        model = peers.vanilla(size, VOCABULARY[size], attention)
        training = peers.OurTraining(model, peers.make_accelerator(precision, device), compile="compiled" in kind)
        return lambda batch, number: training.step(batch, number, 1e-4)
    model = peers.Marian(size, VOCABULARY[size], attention)
    if kind == "torch.nn.Transformer":
        model = peers.TorchTransformer(size, VOCABULARY[size])
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def step(batch: dict, number: int):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def random_batches(size: str, max_tokens: int) -> list[dict]:
    """Batches of random tokens in sentences of various lengths, as train.py makes them."""
    count = 3 * SHAPES * max_tokens // int(LENGTHS[size])
    pairs = peers.token_pairs(None, VOCABULARY[size], count, LENGTHS[size])
    return make_batches(pairs, max_tokens, SHAPES)


def measure(kind: str, size: str, max_tokens: int, device: str, seconds: float) -> Measured:
    """Takes steps for so many seconds; called in a process of its own."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    step, batches = make_step(kind, size, device), random_batches(size, max_tokens)
    tokens = [int((batch["labels"] != -100).sum()) for batch in batches]
    if device == "cuda":
        batches = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches]
    begin = time.perf_counter()
    for number, batch in enumerate(batches):
        step(batch, number)
    wait()
    first = time.perf_counter() - begin
    for number, batch in enumerate(batches):  # in the first round, a GPU looks for its algorithms
        step(batch, number)
    wait()
    done, issuing, begin = 0, 0.0, time.perf_counter()
    for number in itertools.count():
        before = time.perf_counter()
        step(batches[number % SHAPES], number)
        issuing += time.perf_counter() - before
        done += tokens[number % SHAPES]
        if number % SHAPES == SHAPES - 1:  # every shape has been taken as often as the others
            wait()
            if time.perf_counter() - begin >= seconds:
                break
    elapsed, steps = time.perf_counter() - begin, number + 1
    counts, memory = (None, None), 0
    if device == "cuda":
        memory = torch.cuda.max_memory_allocated()
        counts = count_kernels(partial(step, batches[0], 0)), count_synchronizations(partial(step, batches[0], 0))
    return Measured(done / elapsed, 1e3 * elapsed / steps, 1e3 * issuing / steps, first, *counts, memory)


def count_kernels(step) -> int:
    """The kernels that a step runs on the GPU, without copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = (event for event in profile.events() if event.device_type == DeviceType.CUDA)
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in kernels)


def count_synchronizations(step) -> int:
    """How often the host waits for the GPU in a step."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def flop_per_target_token(size: str, max_tokens: int) -> float:
    """FLOPs of the matrix products of a step, counted on some rows of each batch, by MarianMTModel on the CPU."""
    batches = [  # rows are sorted by length
        {name: tensor[:: max(1, len(tensor) // 8)] for name, tensor in batch.items()}
        for batch in random_batches(size, max_tokens)
    ]
    model = peers.Marian(size, VOCABULARY[size], "eager")
    with FlopCounterMode(display=False) as counter:
        for batch in batches:
            model(**batch).backward()
    return counter.get_total_flops() / sum(int((batch["labels"] != -100).sum()) for batch in batches)


# ---------------------------------------------------------------------------------------------------------- attention


def attentions(device: str) -> list[list[str]]:
    """Forward and backward of one attention of base, for 25,000 tokens, by each kernel that can compute it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (925, 8, 27, 64) if device == "cuda" else (2, 2, 5, 8)  # (B,h,T,k)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(shape[0], 1, shape[2], shape[2], dtype=torch.bool, device=device)
    mask[: shape[0] // 4, ..., -4:] = False
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def two_products():
        scores = (query @ key.transpose(-2, -1) * shape[-1] ** -0.5).masked_fill(~mask, torch.finfo(dtype).min)
        return scores.softmax(-1, dtype=torch.float32).to(dtype) @ value

    ways = {"two products": two_products}
    if device == "cuda":
        ways["two products, compiled"] = torch.compile(two_products)
    for backend in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH"):
        for name, given in (("masked", mask), ("no mask", None)):
            kernel = getattr(SDPBackend, backend)
            ways[f"{backend}, {name}"] = partial(
                in_context, partial(sdpa_kernel, kernel), sdpa, query, key, value, given
            )
    rows = []
    for name, way in ways.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says why a kernel is not available; so does the error
            try:
                cell = f"{1e3 * seconds_of(lambda way=way: way().sum().backward(), device):.3f}"
            except RuntimeError as error:
                cell = " ".join(str(error).split())[:60]
        rows.append([name, cell])
    return rows


def in_context(context, function, *arguments):
    with context():
        return function(*arguments)


def seconds_of(function, device: str, count: int = 20) -> float:
    """The seconds of a call, after three that warm up."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        function()
    wait()
    begin = time.perf_counter()
    for _ in range(count):
        function()
    wait()
    return (time.perf_counter() - begin) / count


# -------------------------------------------------------------------------------------------------------- the speedrun

SPEEDRUN = "--per_device_train_max_tokens 8192 --gradient_accumulation_steps 1 --lr_scheduler_type linear "
SPEEDRUN += "--max_steps 2500 --warmup_steps 500 --eval_steps 250 --early_stopping_patience 100 --num_beams 1"
QUICK = "--max_steps 2 --warmup_steps 1 --eval_steps 1 --d_model 16 --encoder_layers 1 --decoder_layers 1 "
QUICK += "--encoder_attention_heads 2 --decoder_attention_heads 2 --encoder_ffn_dim 16 --decoder_ffn_dim 16"


def end_session(leader: int):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def speedrun(data: str, kind: str, quick: bool, timeout: float) -> str:
    """Trains on Multi30k from files to the goal by the command of a user; says when each evaluation ended."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
        command += ["--mixed_precision", "no" if quick else "bf16", "train.py"]
        command += [
            "--config",
            "recipes/multi30k_wu2021.yaml",
            "--dataset_name",
            str(Path(data).resolve()),
            *SPEEDRUN.split(),
        ]
        command += [*(QUICK.split() if quick else ()), "--output_dir", f"{folder}/model"]
        command += ["--torch_compile"] * ("compiled" in kind)
        environment = os.environ | {"HF_DATASETS_CACHE": f"{folder}/cache", "PYTHONUNBUFFERED": "1"}
        begin, found, reached, tail = time.perf_counter(), [], None, []
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        run = subprocess.Popen(command, cwd=Path(__file__).parents[1], env=environment, **pipes)
        timer = threading.Timer(timeout, end_session, [run.pid])
        timer.start()
        for line in run.stdout:
            seconds = time.perf_counter() - begin
            tail = [*tail, line.rstrip()][-20:]
            if "eval: loss" in line:
                bleu = float(line.partition("BLEU ")[2].partition(",")[0])
                found.append(f"{seconds:.0f} s: BLEU {bleu:.2f}")
                print(found[-1], flush=True)
                if bleu >= GOAL and reached is None:
                    reached = seconds
            if reached and not quick:
                break
        timer.cancel()
        end_session(run.pid)  # of the launcher, which does not end what it has launched
        run.wait()
    if not found:
        print("\n".join(tail), file=sys.stderr)
    goal = f"reached {reached:.0f} s after the start of the command" if reached else "not reached"
    ends = "Evaluations ended after " + "; ".join(found) if found else "No evaluation ended"
    return f"{kind}: a validation BLEU of {GOAL:.0f} (greedy, tokenized) was {goal}. {ends}."


# ------------------------------------------------------------------------------------------------------------ the page

COLUMNS = ["who", "tokens a batch", "target tokens/s", "of the peak", "ms a step", "ms to issue it"]
COLUMNS += ["kernels", "synchronizations", "peak GiB", "first steps, s"]


def row(kind: str, max_tokens: int, one: Measured | str, flop: float, peak: float) -> list[str]:
    if isinstance(one, str):
        return [kind, f"{max_tokens:,}", one, *[""] * (len(COLUMNS) - 3)]
    counts = ["" if count is None else f"{count:,}" for count in (one.kernels, one.synchronizations)]
    return [
        *(kind, f"{max_tokens:,}", f"{one.tokens_per_second:,.0f}", f"{one.tokens_per_second * flop / peak:.1%}"),
        *(f"{one.milliseconds:.1f}", f"{one.issuing:.1f}", *counts, f"{one.memory / 2**30:.1f}", f"{one.first:.1f}"),
    ]


def peak_of(device: str) -> tuple[float, str]:
    """FLOP/s of the card by its data sheet, or else of the fastest matrix product; and where the number is from."""
    if device == "cuda":
        for name, peak in PEAKS.items():
            if f" {name} " in f" {torch.cuda.get_device_name()} ".replace("-", " "):
                return peak, "the data sheet's"
    return matmul_limit(device, 0.1 if device == "cpu" else 2.0), "that of the fastest matrix product found"


def main():
    parser = report.make_parser(__doc__)
    parser.add_argument("--sizes", nargs="*", choices=list(LENGTHS), default=["base", "tiny", "big"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--batches", nargs="+", type=positive, default=BATCHES, help="tokens of a batch and side")
    parser.add_argument("--minutes", type=float, default=7, help="after which no row is begun (default: 7)")
    parser.add_argument("--data", metavar="DIR", help="Multi30k, tokenized and lowercased, for the speedrun")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    if options.quick:
        options.sizes, options.batches = ["quick"], [64]
    elif not torch.cuda.is_available():
        sys.exit("There is no GPU here; --quick tries the script on a CPU.")
    deadline, seconds = time.perf_counter() + 60 * options.minutes, 0.1 if options.quick else SECONDS
    name = "gpu" if options.sizes else "gpu-speedrun"
    peak, origin = peak_of(device)
    page = report.heading("One GPU", ["torch", "transformers", "accelerate"])
    page += [
        "",
        f"The peak is {peak / 1e12:,.2f} TFLOP/s, {origin}; its share counts the matrix products of Marian's step. "
        f"Each row is a process of its own that takes steps for {seconds:g} seconds on {SHAPES} batches of random "
        "tokens, with their transfer to the GPU. *ms to issue it*: after so long the host has issued the step; if "
        "that is about as long as the step, the GPU waits for the host. *first steps*: the first of each shape, with "
        "compilation.",
    ]
    for size in options.sizes:
        if time.perf_counter() > deadline:
            break
        flop, rows = flop_per_target_token(size, max(options.batches)), []
        for max_tokens, kind in itertools.product(sorted(options.batches, reverse=True), options.kinds):
            if time.perf_counter() > deadline:
                rows.append(row(kind, max_tokens, "no time", flop, peak))
                continue
            one = Contestant(kind, partial, measure, kind, size, max_tokens, device, seconds)
            try:
                one.turn()
                rows.append(row(kind, max_tokens, one.answers[0], flop, peak))
            except (Exception, SystemExit) as error:  # out of memory, or what a compiler raises: the others go on
                rows.append(row(kind, max_tokens, " ".join(str(error).split())[:60], flop, peak))
            finally:
                one.end()
            print(" | ".join([size, *rows[-1]]), flush=True)
        page += ["", f"## {size}: {flop / 1e6:,.1f} MFLOP a target token", "", *report.table(COLUMNS, rows)]
        report.write(options, name, page)  # after each part
    if options.sizes:
        page += ["", "## One attention of base, forward and backward", ""]
        page += report.table(["what", "ms"], attentions(device))
        report.write(options, name, page)
    if options.data:
        page += ["", "## Multi30k from files to a translating model"]
        for kind in options.kinds:
            if "ours" in kind:
                page += ["", speedrun(options.data, kind, options.quick, 240)]
                report.write(options, name, page)
    print("\n".join(page), flush=True)


if __name__ == "__main__":
    main()
