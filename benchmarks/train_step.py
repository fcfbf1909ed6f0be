"""The training step: ours against MarianMTModel, torch.nn.Transformer and a notebook's model, on the same batches.

python benchmarks/train_step.py --data ../multi30k
python benchmarks/train_step.py --sizes small           # random token ids, with the lengths of Multi30k
python benchmarks/train_step.py --data ../multi30k --device cuda --sizes base big --max_tokens 25000

Ours and each peer take steps in turn, in separate processes, on the same batches with the same optimizer, label
smoothing, clipping and dropout rate (torch.nn.Transformer and the notebook also drop inside attention and
feed-forward). Each peer uses its fastest precision (float32, bfloat16) and attention. Ours is the step of train.py.
train.py configures the memory allocator, which would help others as well, so peers are measured without and with that
setting. Prints a table and writes a page with a picture to benchmarks/results.
"""

import argparse
import random
import statistics
import sys
import time
from types import SimpleNamespace

import report
from contest import Contestant, Failed, median_ratio, per_round, take_turns
from peers import DROPOUT, PAD, SIZES, SMOOTHING, token_pairs

OURS, MARIAN = "ours", "MarianMTModel"
STEPS = 2  # per round, each on another batch
LARGE = 151_000  # the size of a multilingual vocabulary
ALL_SIZES = ["tiny", "small", "base", str(LARGE)]


class Trainee:
    """A model with its optimizer; a call takes a step on a batch and returns its loss."""

    def __init__(self, make_model, precision: str, batches: list[dict], device: str):
        import torch

        self.torch, self.precision, self.device = torch, precision, device
        torch.manual_seed(0)
        self.model = make_model().to(device).train()
        self.batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
        betas = {"betas": (0.9, 0.98), "eps": 1e-9}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, **betas)

    def __call__(self, number: int) -> float:
        with self.torch.autocast(self.device, self.torch.bfloat16, enabled=self.precision == "bf16"):
            loss = self.model(**self.batches[number])
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class OurTrainee:
    """The model in the training step of train.py."""

    def __init__(self, make_model, precision: str, batches: list[dict], device: str):
        import torch
        from accelerate import Accelerator

        from vanilla_transformer.training import optimization

        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no" if precision == "fp32" else precision)
        self.args = SimpleNamespace(
            weight_decay=0.0,
            adam_beta1=0.9,
            adam_beta2=0.98,
            adam_epsilon=1e-9,
            seed=0,
            max_grad_norm=1.0,
            label_smoothing_factor=SMOOTHING,
            r_drop_alpha=0.0,
        )
        model = make_model().to(device).train()
        self.optimizer = self.accelerator.prepare_optimizer(optimization.make_optimizer(model, self.args))
        self.model = self.accelerator.prepare_model(model)
        self.batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
        self.optim = optimization

    def __call__(self, number: int) -> float:
        batch, accelerator = self.batches[number], self.accelerator
        self.optim.seed_batch(self.args.seed, number)
        tokens = self.optim.count_tokens([batch], accelerator)
        loss = self.optim.compute_loss(self.model, batch, tokens[0], self.args)
        accelerator.backward(loss)
        self.optim.clip_grad_norm(self.model, self.optimizer, self.args.max_grad_norm, accelerator)
        self.optim.set_learning_rate(self.optimizer, 1e-4)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def make_trainee(kind: str, precision: str, attention: str, size: str, vocab_size: int, batches: list, device: str):
    """Makes a trainee, in its own process."""
    import peers

    makers = {
        OURS: lambda: peers.vanilla(size, vocab_size, attention),
        MARIAN: lambda: peers.Marian(size, vocab_size, attention),
        "torch.nn.Transformer": lambda: peers.TorchTransformer(size, vocab_size),
        "a notebook's": lambda: peers.Notebook(size, vocab_size),
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
        "a notebook's": [(precision, "") for precision in precisions],
    }


def make_batches(pairs: list[dict], max_tokens: int, count: int) -> list[dict]:
    """`count` random batches of pairs of similar length: sentences times longest side is at most `max_tokens`."""
    import numpy as np

    from vanilla_transformer.data.batches import PairCollator, fill_batches

    lengths = [np.array([len(pair[side]) for pair in pairs]) for side in ("input_ids", "labels")]
    collate = PairCollator(SimpleNamespace(pad_token_id=PAD))
    chosen = list(fill_batches(*lengths, max_tokens))[:-1]  # the last one is not full
    if len(chosen) < count:
        sys.exit(f"{len(pairs):,} pairs do not fill {count} batches of {max_tokens:,} tokens; lower --max_tokens.")
    random.Random(0).shuffle(chosen)
    return [collate([pairs[i] for i in batch]) for batch in chosen[:count]]


def target_tokens(batches: list[dict]) -> int:
    return sum(int((batch["labels"] != -100).sum()) for batch in batches)


def compare(
    size: str, vocab_size: int, kinds: list[str], batches: list[dict], options
) -> tuple[dict[str, Contestant], list[str]]:
    """Finds the fastest variant of each kind, then lets them take turns; also returns what failed."""
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
    contestants, seconds, answers, failures = [ours], [], [], []
    for kind in kinds[1:]:
        for keeps_memory in (False, True):
            peer = start(kind, keeps_memory)
            # One peer at a time, since all of them do not fit in memory; ours is timed again next to each.
            ours.forget()
            try:
                take_turns([ours, peer], turns, options.rounds)
            except Failed as failure:
                failures.append(str(failure))
                continue
            peer.ratio = median_ratio(ours, peer, options.rounds)
            peer.end()
            contestants.append(peer)
            seconds += ours.seconds
            answers = answers or list(ours.answers)  # after the same number of steps as the others
    if not seconds:
        sys.exit(failures[-1])
    ours.seconds, ours.answers = seconds, answers
    ours.end()
    for one in contestants:
        one.speed = target_tokens(batches) / statistics.median(per_round(one.seconds, len(one.seconds) // len(turns)))
    return {one.name: one for one in contestants}, failures


def row(name: str, one: Contestant, flop: float, limit: float) -> list[str]:
    cells = [f"{one.speed:,.0f}", f"{one.memory / 2**20:,.0f}", f"{one.speed * flop / limit:.0%}", f"{one.ratio:.2f}"]
    return [name, *cells]


COLUMNS = ["who", "target tokens/s", "peak MiB", "of the matmul limit", "ours is faster by"]


def flop_per_target_token(size: str, vocab_size: int, batches: list[dict]) -> float:
    """FLOPs of the matrix products of a step, counted on MarianMTModel, which uses torch's products only."""
    from peers import Marian
    from torch.utils.flop_counter import FlopCounterMode

    model = Marian(size, vocab_size, "eager")
    with FlopCounterMode(display=False) as counter:
        for batch in batches:
            model(**batch).backward()
    return counter.get_total_flops() / target_tokens(batches)


def matmul_limit(device: str) -> float:
    """The fastest product of two square matrices found, in FLOP/s, in bfloat16 where the hardware has it."""
    import torch

    best, dtype = 0.0, torch.bfloat16 if "bf16" in report.precisions(device) else torch.float32
    for size in (1024, 2048) if device == "cpu" else (4096, 8192):
        one = torch.randn(size, size, device=device, dtype=dtype)
        for _ in range(10):
            begin = time.perf_counter()
            for _ in range(4):
                one @ one
            if device == "cuda":
                torch.cuda.synchronize()
            best = max(best, 4 * 2 * size**3 / (time.perf_counter() - begin))
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="a folder with Multi30k as train.jsonl (default: random ids)")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, str(LARGE)], default=ALL_SIZES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--rounds", type=report.at_least_one, default=5, help=f"rounds of {STEPS} steps each (default: %(default)s)"
    )
    parser.add_argument(
        "--max_tokens", type=report.at_least_one, default=4096, help="tokens per batch and side (default: %(default)s)"
    )
    report.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds, options.max_tokens = ["quick"], 1, 256
    limit = matmul_limit(options.device)
    page = report.heading("The training step", ["torch", "transformers", "accelerate"])
    words = f"Multi30k, by {options.data}" if options.data else "random ids with the lengths of Multi30k"
    page += [
        "",
        f"Batches of at most {options.max_tokens:,} tokens a side ({words}); dropout {DROPOUT}, which "
        "torch.nn.Transformer and the notebook also have inside attention and feed-forward; label smoothing "
        f"{SMOOTHING}, AdamW (fused), on {options.device}. Medians of {options.rounds} rounds in which ours and one "
        f"peer take the same {STEPS} steps in turn, one peer after another; the row of ours is the median of all "
        "these rounds. Each peer uses its fastest precision and attention. *Allocator set*: glibc keeps freed memory, "
        "as train.py configures it on a CPU. Memory excludes the libraries. The limit is "
        f"{limit / 1e12:.2f} TFLOP/s, the fastest matrix product found; its share counts the matrix products of "
        "Marian's step, padding included.",
    ]
    picture = {}
    for size in options.sizes:
        vocab_size, name = (LARGE, "small") if size == str(LARGE) else (10_000, size)
        if options.quick:
            vocab_size = 500
        # The cost of a large vocabulary does not depend on the layers, in which the other peers differ.
        kinds = [OURS, MARIAN] if size == str(LARGE) else list(variants(options.device))
        pairs = token_pairs(options.data, vocab_size, 200 if options.quick else 20_000)
        batches = make_batches(pairs, options.max_tokens, STEPS)
        contestants, failures = compare(name, vocab_size, kinds, batches, options)
        flop = flop_per_target_token(name, vocab_size, batches)
        rows = [row(who, one, flop, limit) for who, one in contestants.items()]
        title = f"{name}, vocabulary of {vocab_size:,}"
        losses = ", ".join(f"{statistics.mean(one.answers):.2f}" for one in contestants.values())
        page += ["", f"## {title}", "", *report.table(COLUMNS, rows), ""]
        page += [
            f"Mean losses, in this order, after the same number of steps from different initial weights: {losses}."
        ]
        page += failures
        print("\n".join(page[-6 - len(rows) - len(failures) :]), flush=True)
        picture[title] = {who: one.speed for who, one in contestants.items()}
    name = "-".join(["train_step", *(options.sizes if options.sizes != ALL_SIZES else [])])
    report.write_with_bars(options, name, page, "The training step", picture, "target tokens/s")


if __name__ == "__main__":
    main()
