"""The training step: ours against MarianMTModel and torch.nn.Transformer, on the same batches.

python benchmarks/train_step.py --data ../multi30k
python benchmarks/train_step.py --sizes small           # random token ids, with the lengths of Multi30k
python benchmarks/train_step.py --data ../multi30k --device cuda --sizes base big --max_tokens 25000

Ours (the step of train.py) and each peer take steps in turn, in separate processes, on the same batches with the same
optimizer, label smoothing, clipping and dropout rate. Each peer uses its fastest precision and attention. It is
measured with and without the memory allocator configured as in train.py, since that would help it as well. Writes a
page to benchmarks/results.
"""

import random
import statistics
import sys
import time
from types import SimpleNamespace

import numpy as np
import peers
import report
import torch
from contest import Contestant, median_ratio, per_round, take_turns
from peers import DROPOUT, PAD, SIZES, SMOOTHING
from torch.utils.flop_counter import FlopCounterMode

from vanilla_transformer.commands.parser import positive
from vanilla_transformer.data.batches import PairCollator, fill_batches

OURS, MARIAN = "ours", "MarianMTModel"
STEPS = 2  # per round, each on another batch
LARGE = 151_000  # the size of a multilingual vocabulary
ALL_SIZES = ["tiny", "small", "base", str(LARGE)]


class Trainee:
    """A model with its optimizer; a call takes a step on a batch and returns its loss."""

    def __init__(self, make_model, precision: str, batches: list[dict], device: str):
        self.precision, self.device = precision, device
        torch.manual_seed(0)
        self.model = make_model().to(device).train()
        self.batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
        betas = {"betas": (0.9, 0.98), "eps": 1e-9}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, **betas)

    def __call__(self, number: int) -> float:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16"):
            loss = self.model(**self.batches[number])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class OurTrainee:
    """Ours, in the training step of train.py."""

    def __init__(self, make_model, precision: str, batches: list[dict], device: str):
        torch.manual_seed(0)
        self.training = peers.OurTraining(make_model(), peers.make_accelerator(precision, device))
        self.batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]

    def __call__(self, number: int) -> float:
        loss, _ = self.training.step(self.batches[number], number, 1e-4)
        return loss.item()


def make_trainee(kind: str, precision: str, attention: str, size: str, vocab_size: int, batches: list, device: str):
    """Makes a trainee, in its own process."""
    makers = {
        OURS: lambda: peers.vanilla(size, vocab_size, attention),
        MARIAN: lambda: peers.Marian(size, vocab_size, attention),
        "torch.nn.Transformer": lambda: peers.TorchTransformer(size, vocab_size),
    }
    return (OurTrainee if kind == OURS else Trainee)(makers[kind], precision, batches, device)


def variants(device: str) -> dict[str, list[tuple[str, str]]]:
    """The precisions and attentions of each kind, of which the fastest is measured."""
    ours = "eager" if device == "cpu" else "sdpa"  # what train.py takes
    precisions = report.precisions(device)
    return {
        OURS: [(precision, ours) for precision in precisions],
        MARIAN: [(precision, attention) for precision in precisions for attention in ("eager", "sdpa")],
        "torch.nn.Transformer": [(precision, "") for precision in precisions],
    }


def make_batches(pairs: list[dict], max_tokens: int, count: int) -> list[dict]:
    """`count` random batches of pairs of similar length: sentences times longest side is at most `max_tokens`."""
    lengths = [np.array([len(pair[side]) for pair in pairs]) for side in ("input_ids", "labels")]
    collate = PairCollator(SimpleNamespace(pad_token_id=PAD))
    chosen = list(fill_batches(*lengths, max_tokens))[:-1]  # the last one is not full
    if len(chosen) < count:
        sys.exit(f"{len(pairs):,} pairs do not fill {count} batches of {max_tokens:,} tokens; lower --max_tokens.")
    random.Random(0).shuffle(chosen)
    return [collate([pairs[i] for i in batch]) for batch in chosen[:count]]


def target_tokens(batches: list[dict]) -> int:
    return sum(int((batch["labels"] != -100).sum()) for batch in batches)


def compare(size: str, vocab_size: int, kinds: list[str], batches: list[dict], options) -> list[Contestant]:
    """Finds the fastest variant of each kind, then lets them take turns."""
    setting = (size, vocab_size, batches, options.device)
    turns = [(number,) for number in range(len(batches))]
    best = {}
    for kind in kinds:
        found = {}
        for variant in variants(options.device)[kind]:
            one = Contestant(kind, make_trainee, kind, *variant, *setting, keeps_memory=kind == OURS)
            one.turn(0)  # to warm up
            found[variant] = sum(one.turn(*turn) for turn in turns)
            one.end()
        best[kind] = min(found, key=found.get)

    def start(kind: str, keeps_memory: bool) -> Contestant:
        name = f"{kind}, {' '.join(best[kind]).strip()}" + (", allocator set" if keeps_memory else "")
        one = Contestant(name, make_trainee, kind, *best[kind], *setting, keeps_memory=keeps_memory)
        one.ratio = 1.0
        return one

    ours = start(OURS, keeps_memory=True)
    contestants, seconds = [ours], []
    for kind in kinds[1:]:
        for keeps_memory in (False, True):
            peer = start(kind, keeps_memory)
            # One peer at a time, since all of them do not fit in memory; ours is timed again next to each.
            ours.forget()
            take_turns([ours, peer], turns, options.rounds)
            peer.ratio = median_ratio(ours, peer, options.rounds)
            peer.end()
            contestants.append(peer)
            seconds += ours.seconds
    ours.seconds = seconds
    ours.end()
    for one in contestants:
        one.speed = target_tokens(batches) / statistics.median(per_round(one.seconds, len(one.seconds) // len(turns)))
    return contestants


COLUMNS = ["who", "target tokens/s", "peak MiB", "of the matmul limit", "ours is faster by"]


def flop_per_target_token(size: str, vocab_size: int, batches: list[dict]) -> float:
    """FLOPs of the matrix products of a step, counted on MarianMTModel, which uses torch's products only."""
    model = peers.Marian(size, vocab_size, "eager")
    with FlopCounterMode(display=False) as counter:
        for batch in batches:
            model(**batch).backward()
    return counter.get_total_flops() / target_tokens(batches)


def matmul_limit(device: str, seconds: float = 2.0) -> float:
    """The fastest product of two square matrices found, in FLOP/s, in bfloat16 where the hardware has it."""
    best, dtype = 0.0, torch.bfloat16 if "bf16" in report.precisions(device) else torch.float32
    for size in (1024, 2048) if device == "cpu" else (4096, 8192):
        one = torch.randn(size, size, device=device, dtype=dtype)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin = time.perf_counter()
            for _ in range(4):
                one @ one
            if device == "cuda":
                torch.cuda.synchronize()
            best = max(best, 4 * 2 * size**3 / (time.perf_counter() - begin))
    return best


def main():
    parser = report.make_contest_parser(__doc__)
    parser.add_argument("--data", metavar="DIR", help="a folder with Multi30k as train.jsonl (default: random ids)")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, str(LARGE)], default=ALL_SIZES)
    text = "tokens per batch and side (default: %(default)s)"
    parser.add_argument("--max_tokens", type=positive, default=4096, help=text)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds, options.max_tokens = ["quick"], 1, 256
    limit = matmul_limit(options.device, 0.1 if options.quick else 2.0)
    page = report.heading("The training step", ["torch", "transformers", "accelerate"])
    words = f"Multi30k, by {options.data}" if options.data else "random ids with the lengths of Multi30k"
    page += [
        "",
        f"Batches of at most {options.max_tokens:,} tokens a side ({words}); dropout {DROPOUT}, which "
        "torch.nn.Transformer also has inside attention and feed-forward; label smoothing "
        f"{SMOOTHING}, AdamW (fused), on {options.device}. Medians of {options.rounds} rounds in which ours and one "
        f"peer take the same {STEPS} steps in turn; the row of ours is the median over all peers. "
        "Each peer uses its fastest precision and attention. *Allocator set*: glibc keeps freed memory, "
        "as train.py configures it on a CPU. Memory excludes the libraries. The limit is "
        f"{limit / 1e12:.2f} TFLOP/s, the fastest matrix product found; its share counts the matrix products of "
        "Marian's step, padding included.",
    ]
    for size in options.sizes:
        vocab_size, name = (LARGE, "small") if size == str(LARGE) else (10_000, size)
        if options.quick:
            vocab_size = 500
        # The cost of a large vocabulary does not depend on the layers, in which the other peers differ.
        kinds = [OURS, MARIAN] if size == str(LARGE) else list(variants(options.device))
        pairs = peers.token_pairs(options.data, vocab_size, 200 if options.quick else 20_000)
        batches = make_batches(pairs, options.max_tokens, STEPS)
        contestants = compare(name, vocab_size, kinds, batches, options)
        flop = flop_per_target_token(name, vocab_size, batches)
        rows = [
            [c.name, f"{c.speed:,.0f}", f"{c.memory / 2**20:,.0f}", f"{c.speed * flop / limit:.0%}", f"{c.ratio:.2f}"]
            for c in contestants
        ]
        page += ["", f"## {name}, vocabulary of {vocab_size:,}", "", *report.table(COLUMNS, rows)]
        print("\n".join(page[-4 - len(rows) :]), flush=True)
    name = "-".join(["train_step", *(options.sizes if options.sizes != ALL_SIZES else [])])
    report.write(options, name, page)


if __name__ == "__main__":
    main()
