"""The input of training: batches straight from Arrow against torch's DataLoader and transformers' collator.

python benchmarks/input.py --data ../multi30k
taskset -c 1 python benchmarks/input.py                 # one core; generated pairs, with words as in scale.py

Both make the same batches in turn, in the process that would train. The peer reads the pairs row by row and pads them
with DataCollatorForSeq2Seq, as training scripts of transformers do, and soft targets, which that does not know, with
torch's pad_sequence. With BPE-dropout, both tokenize the texts again. Writes a page to benchmarks/results.
"""

import itertools
import os
import statistics
import tempfile
from hashlib import sha256
from pathlib import Path

import datasets
import numpy as np
import report
import torch
from contest import Contestant, median_ratio, take_turns
from scale import write_pairs
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

from vanilla_transformer.commands.parser import positive
from vanilla_transformer.data.batches import SOFT_TARGETS, TokenBatchSampler, lengths_of, training_batches
from vanilla_transformer.data.encoding import PAIR_FEATURES, iter_texts, tokenize_pairs
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.splits import load_pairs
from vanilla_transformer.data.tokenizer import train_tokenizer, with_bpe_dropout
from vanilla_transformer.training.distillation import FEATURES

PLAIN, SOFT, DROPOUT = "token ids", "with soft targets", "with BPE-dropout"
SIZES = (3_125, 8_192, 25_000)  # tokens of a batch
TOP_K = 8  # soft targets at each position, the default of train.py
RATE = 0.1  # of BPE-dropout
SEED = 42


def prepare(data: str, pairs: int | None, folder: Path):
    """Writes the tokenizer, and the tokenized pairs with and without soft targets, for all contestants."""
    options = DataOptions(data, source_lang="en", target_lang="de", max_train_samples=pairs)
    train = load_pairs(options)["train"]
    tokenizer = train_tokenizer(iter_texts(train), 10_000)
    tokenizer.save_pretrained(folder / "tokenizer")
    train, _ = tokenize_pairs(train, tokenizer, 128, 128)
    train.save_to_disk(folder / PLAIN)
    generator = np.random.default_rng(0)

    def add(batch: dict) -> dict:
        sizes = [TOP_K * length for length in batch["target_length"]]
        tokens = [generator.integers(len(tokenizer), size=size) for size in sizes]
        return dict(zip(SOFT_TARGETS, (tokens, [generator.random(size) for size in sizes]), strict=True))

    train.map(add, batched=True, features=datasets.Features(PAIR_FEATURES | FEATURES)).save_to_disk(folder / SOFT)


class Reader:
    """Makes the next `count` batches of `max_tokens` tokens; returns their target tokens and a digest of the last."""

    def __init__(self, kind: str, folder: Path):
        self.dataset = datasets.load_from_disk(folder / (SOFT if kind == SOFT else PLAIN))
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.dropout = RATE if kind == DROPOUT else 0.0
        self.batches = {}

    def __call__(self, max_tokens: int, count: int) -> tuple[int, str]:
        if max_tokens not in self.batches:
            self.batches[max_tokens] = iter(self.open(max_tokens))
        tokens = 0
        for batch in itertools.islice(self.batches[max_tokens], count):
            tokens += int((batch["labels"] != -100).sum())
        digest = sha256(b"".join(batch[name].numpy().tobytes() for name in sorted(batch)))
        return tokens, digest.hexdigest()


class Ours(Reader):
    def open(self, max_tokens: int):
        options = DataOptions(bpe_dropout=self.dropout, dataloader_num_workers=0)
        return training_batches(self.dataset, self.tokenizer, options, max_tokens, SEED)


class RowByRow(Reader):
    def open(self, max_tokens: int):
        names = ["source", "target"] if self.dropout else ["input_ids", "labels"]
        names += [name for name in SOFT_TARGETS if name in self.dataset.column_names]
        if self.dropout:
            self.tokenizer = with_bpe_dropout(self.tokenizer, self.dropout)
        self.pad = DataCollatorForSeq2Seq(self.tokenizer)
        sampler = TokenBatchSampler(*lengths_of(self.dataset), max_tokens, SEED)
        pairs = self.dataset.select_columns(names)
        if SOFT_TARGETS[0] in names:
            pairs = pairs.with_format("numpy")  # several times faster for rows with so many numbers
        return DataLoader(pairs, batch_sampler=sampler, collate_fn=self.collate)

    def collate(self, pairs: list[dict]) -> dict[str, torch.Tensor]:
        if self.dropout:
            sides = ([pair[side] for pair in pairs] for side in ("source", "target"))
            rows = zip(*(self.tokenizer(texts, verbose=False).input_ids for texts in sides), strict=True)
            pairs = [{"input_ids": source, "labels": target} for source, target in rows]
        elif SOFT_TARGETS[0] in pairs[0]:  # lists of token ids are padded faster than arrays
            pairs = [pair | {side: pair[side].tolist() for side in ("input_ids", "labels")} for pair in pairs]
        soft = {name: [torch.tensor(pair.pop(name)) for pair in pairs] for name in SOFT_TARGETS if name in pairs[0]}
        soft = {name: [numbers.view(-1, TOP_K) for numbers in rows] for name, rows in soft.items()}
        return dict(self.pad(pairs)) | {name: pad_sequence(rows, batch_first=True) for name, rows in soft.items()}


def make(contestant: type[Reader], *arguments) -> Reader:
    """Makes a contestant in its own process, with one thread."""
    torch.set_num_threads(1)
    return contestant(*arguments)


COLUMNS = ["what", "tokens a batch", "target tokens/s", "row by row", "ours is faster by"]


def compare(kind: str, folder: Path, tokens: int, rounds: int) -> list[list[str]]:
    """A row for each size of a batch."""
    contestants = [Contestant(one.__name__, make, one, kind, folder) for one in (Ours, RowByRow)]
    rows = []
    for max_tokens in SIZES:
        take_turns(contestants, [(max_tokens, -(-tokens // max_tokens))], rounds)
        ours, theirs = contestants
        assert kind == DROPOUT or ours.answers == theirs.answers, f"Batches of {max_tokens:,} tokens differ."
        speeds = [statistics.median(np.divide([n for n, _ in one.answers], one.seconds)) for one in contestants]
        rows.append([kind, f"{max_tokens:,}", *(f"{speed:,.0f}" for speed in speeds)])
        rows[-1].append(f"{median_ratio(ours, theirs, rounds):.2f}")
        print(" | ".join(rows[-1]), flush=True)
        for one in contestants:
            one.forget()
    for one in contestants:
        one.end()
    return rows


def main():
    parser = report.make_parser(__doc__)
    parser.add_argument("--data", metavar="DIR", help="a folder with en and de, such as Multi30k (default: generated)")
    parser.add_argument("--pairs", type=positive, help="use only so many pairs (default: all, or 100,000 generated)")
    text = "made in a turn, with padding (default: %(default)s)"
    parser.add_argument("--tokens", type=positive, default=100_000, help=text)
    parser.add_argument("--rounds", type=positive, default=5, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.rounds, options.tokens = 500, 1, 3000
    page = report.heading("The input of training", ["torch", "transformers", "datasets", "pyarrow", "numpy"])
    with tempfile.TemporaryDirectory(prefix="input-") as folder:
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # of the contestants
        datasets.disable_progress_bars()
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        if options.data is None:
            options.data = f"{folder}/pairs"
            write_pairs(Path(options.data), options.pairs or 100_000)
            words = "generated pairs"
        else:
            words = f"the pairs of {Path(options.data).resolve().name}"
        prepare(options.data, options.pairs, Path(folder))
        rows = [
            row
            for kind in (PLAIN, SOFT, DROPOUT)
            for row in compare(kind, Path(folder), options.tokens, options.rounds)
        ]
    page += [
        "",
        f"Batches of {words}, made by one thread in the process that would train. Medians of {options.rounds} rounds, "
        f"in which ours and the code that goes row by row make the same {options.tokens:,} tokens in turn. {TOP_K} "
        f"soft targets at each position; BPE-dropout of {RATE}, whose time is that of the tokenizer.",
        "",
        *report.table(COLUMNS, rows),
    ]
    report.write(options, "input", page)


if __name__ == "__main__":
    main()
