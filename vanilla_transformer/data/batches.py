"""Numbered batches of sentence pairs.

All batches of a run, over all epochs and processes, are numbered 0, 1, 2, ...
Which pairs batch n holds is a pure function of (seed, n); no random state is carried from batch to batch.
Of P processes, process i trains on the batches with n % P == i, so any number of processes sees the same batches.
Resuming a run means starting at a number. Streams (stream.py) depend on the number of processes, too.
A batch holds pairs of similar length: at most `max_tokens` tokens per side, padding included. Only a pair that is
longer by itself exceeds that, and pairs that BPE-dropout splits into more tokens.
"""

import itertools
import multiprocessing
import os
import signal
import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from .encoding import encode_pairs, lengths_of
from .joined import JoinedPairs, check_share, draw_entries, lengths_of_entries
from .options import DataOptions
from .stream import Pools, StreamedBatches
from .tokenizer import with_bpe_dropout

# Columns of pairs that teachers have read (training/distillation.py): k tokens per position, and their probabilities.
SOFT_TARGETS = ("teacher_tokens", "teacher_probabilities")
POOL_SIZE = 2**16  # shuffled pairs that are sorted by length together

# ------------------------------------------------------------------------------------------------------------ planning


def plan_batches(
    source_lengths: np.ndarray, target_lengths: np.ndarray, max_tokens: int, seed: int, epoch: int, part: int = 0
) -> list[np.ndarray]:
    """The batches of an epoch, or of one part of it, as arrays of indices: a pure function of the arguments.

    All pairs are shuffled and cut into pools; each pool is sorted by length and cut into batches (the sort is stable,
    so pairs of equal length stay shuffled); then the batches are shuffled.
    """
    generator = np.random.default_rng([seed, epoch, part])
    order = generator.permutation(np.arange(len(source_lengths), dtype=np.int32))
    batches = []
    for start in range(0, len(order), POOL_SIZE):
        pool = order[start : start + POOL_SIZE]
        batches += [pool[batch] for batch in fill_batches(source_lengths[pool], target_lengths[pool], max_tokens)]
    return [batches[i] for i in generator.permutation(len(batches))]


def fill_batches(source_lengths: np.ndarray, target_lengths: np.ndarray, max_tokens: int) -> Iterator[np.ndarray]:
    """Sorts pairs by length and cuts them into batches with (number of pairs) x (longest side) <= `max_tokens`.

    A pair longer than `max_tokens` gets its own batch.
    """
    longest = np.maximum(source_lengths, target_lengths)
    order = np.lexsort((source_lengths, longest))
    longest = longest[order]
    start = 0
    while start < len(order):
        window = longest[start : start + max(1, max_tokens // longest[start])]
        count = max(1, int((window * np.arange(1, len(window) + 1) <= max_tokens).sum()))
        yield order[start : start + count]
        start += count


def padding_fraction(source_lengths: np.ndarray, target_lengths: np.ndarray, batches: list[np.ndarray]) -> float:
    """The fraction of positions, on both sides of the batches, that are padding."""
    sides = (source_lengths, target_lengths)
    tokens = sum(int(side[batch].sum()) for side in sides for batch in batches)
    positions = sum(int(side[batch].max()) * len(batch) for side in sides for batch in batches)
    return 1 - tokens / positions


@dataclass
class TokenBatchSampler:
    """The batches of one process as lists of indices, from batch number `start`, endlessly, epoch after epoch.

    `epochs` are the numbers of the first batch of each epoch, as far as they are known. Epochs have different numbers
    of batches, so without these, all before `start` are planned to count theirs. If a share of the pairs is `joined`,
    batches have the entries of [`draw_entries`] instead of indices.
    """

    source_lengths: np.ndarray
    target_lengths: np.ndarray
    max_tokens: int
    seed: int
    start: int = 0
    process_index: int = 0
    num_processes: int = 1
    epochs: list[int] = field(default_factory=lambda: [0])
    joined: float = 0.0
    limits: tuple[int, int] = (0, 0)  # tokens of the source and the target of a joined pair

    def plan(self, epoch: int) -> list[np.ndarray]:
        lengths = self.source_lengths, self.target_lengths
        if not self.joined:
            return plan_batches(*lengths, self.max_tokens, self.seed, epoch)
        entries = draw_entries(lengths, self.limits, self.joined, self.seed, epoch)
        lengths = (lengths_of_entries(side, entries) for side in lengths)
        return [entries[batch] for batch in plan_batches(*lengths, self.max_tokens, self.seed, epoch)]

    def __iter__(self) -> Iterator[list[int]]:
        for epoch in itertools.count(bisect_right(self.epochs, self.start) - 1):
            plan, first = self.plan(epoch), self.epochs[epoch]
            if epoch + 1 == len(self.epochs):
                self.epochs.append(first + len(plan))
            for number, batch in enumerate(plan, start=first):
                if number >= self.start and number % self.num_processes == self.process_index:
                    yield batch.tolist()


# ------------------------------------------------------------------------------------------------------------- loading


class PairCollator:
    """Pads pairs to tensors `input_ids`, `attention_mask` (B,S) and `labels` (B,T).

    Padding is always on the right, since the decoder reads labels from position 0. Padded labels are -100, so an
    end-of-sentence token that is also the padding token is still learned. Pairs with soft targets also give
    `teacher_tokens` and `teacher_probabilities` (B,T,k).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.pad_token_id = tokenizer, tokenizer.pad_token_id

    def __call__(self, pairs: list[dict]) -> dict[str, torch.Tensor]:
        """The batch of a list of pairs."""
        return self.pad({name: [pair[name] for pair in pairs] for name in pairs[0]})

    def pad(self, columns: dict[str, list]) -> dict[str, torch.Tensor]:
        """The batch of pairs that are given as columns of lists or arrays."""
        is_token = {side: token_mask(columns[side]) for side in ("input_ids", "labels")}
        batch = {
            "input_ids": scatter(np.concatenate(columns["input_ids"]), is_token["input_ids"], self.pad_token_id),
            "attention_mask": torch.from_numpy(is_token["input_ids"].astype(np.int64)),
            "labels": scatter(np.concatenate(columns["labels"]), is_token["labels"], -100),
        }
        for name in SOFT_TARGETS if SOFT_TARGETS[0] in columns else ():
            numbers = np.concatenate(columns[name]).reshape(is_token["labels"].sum(), -1)
            batch[name] = scatter(numbers, is_token["labels"], 0)
        return batch


def token_mask(rows: list) -> np.ndarray:
    """(B,T): whether a position of the padded rows has a token."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.arange(lengths.max()) < lengths[:, None]


def scatter(numbers: np.ndarray, is_token: np.ndarray, padding: int) -> torch.Tensor:
    """Puts the numbers of all tokens, one (N) or several (N,k) each, where they are in a padded batch (B,T)."""
    dtype = np.float32 if numbers.dtype.kind == "f" else np.int64
    padded = np.full(is_token.shape + numbers.shape[1:], padding, dtype)
    padded[is_token] = numbers
    return torch.from_numpy(padded)


class BpeDropoutCollator(PairCollator):
    """Tokenizes pairs again with BPE-dropout, then pads them.

    A side that would exceed its limit in tokens keeps its token ids without dropout.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropout: float, limits: dict[str, int]):
        super().__init__(tokenizer)
        self.varied = with_bpe_dropout(tokenizer, dropout)
        self.limits = limits

    def pad(self, columns: dict[str, list]) -> dict[str, torch.Tensor]:
        varied = dict(columns)
        for text, side in [("source", "input_ids"), ("target", "labels")]:
            segmented = self.varied(list(columns[text]), verbose=False).input_ids
            rows = zip(segmented, columns[side], strict=True)
            varied[side] = [ids if len(ids) <= self.limits[side] else kept for ids, kept in rows]
        return super().pad(varied)


class PairColumns:
    """The token ids and soft targets of pairs, read where Arrow has mapped them into memory.

    Indexing with a list of pairs gives columns for [`PairCollator.pad`]. `datasets` would make a table or Python lists
    of each pair, and pyarrow would first join the parts of a column, which are as many as `datasets` wrote.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    @cached_property  # made by each worker, to which the columns are not sent
    def parts(self) -> tuple[np.ndarray, dict[str, tuple[list[np.ndarray], np.ndarray, np.ndarray]]]:
        """The index of the first pair of each part, as Arrow has cut the columns, and for each column, its numbers,
        part by part, with the places where each pair begins and ends in them."""
        names = [name for name in ("input_ids", "labels", *SOFT_TARGETS) if name in self.dataset.column_names]
        parts, columns = self.dataset.select_columns(names).with_format("arrow")[:].to_batches(), {}
        for name in names:
            offsets = [part[name].offsets.to_numpy() for part in parts]
            begin, end = (np.concatenate([part[cut] for part in offsets]) for cut in (np.s_[:-1], np.s_[1:]))
            columns[name] = [part[name].values.to_numpy() for part in parts], begin, end
        return np.cumsum([0, *(part.num_rows for part in parts)]), columns

    def __getitem__(self, indices: list[int]) -> dict[str, list[np.ndarray]]:
        (first, columns), found, indices = self.parts, {}, np.asarray(indices)
        which = (np.searchsorted(first, indices, side="right") - 1).tolist()
        for name, (parts, begin, end) in columns.items():
            places = zip(which, begin[indices].tolist(), end[indices].tolist(), strict=True)
            found[name] = [parts[i][start:stop] for i, start, stop in places]
        return found


class PairLoader(DataLoader):
    """Padded training batches of a map-style dataset.

    A run resumes from a batch number. `state`, a JSON-serializable list, spares it planning earlier epochs.
    """

    def __init__(self, pairs: Dataset, sampler: TokenBatchSampler, collate: PairCollator, **options):
        self.all_pairs = pairs
        dataset = pairs if isinstance(collate, BpeDropoutCollator) else PairColumns(pairs)  # with or without texts
        if sampler.joined:
            dataset = JoinedPairs(dataset, pairs.select_columns(["source", "target"]), collate.tokenizer, sampler.seed)
        super().__init__(dataset, batch_size=None, sampler=sampler, collate_fn=collate.pad, **options)

    @property
    def state(self) -> list[dict]:
        return [{"epochs": self.sampler.epochs}]

    def epoch(self) -> list[np.ndarray]:
        """The batches of the first epoch, as indices of pairs, or as entries. Other epochs may have a few more or
        fewer batches."""
        return self.sampler.plan(0)

    def padding(self) -> float:
        """The fraction of the positions in the first epoch that are padding."""
        plan, lengths = self.epoch(), (self.sampler.source_lengths, self.sampler.target_lengths)
        if self.sampler.joined:
            entries = np.concatenate(plan)
            lengths = [lengths_of_entries(side, entries) for side in lengths]
            plan = np.split(np.arange(len(entries)), np.cumsum(list(map(len, plan)))[:-1])
        return padding_fraction(*lengths, plan)

    def pairs(self, first: int, count: int) -> list[dict]:
        """The pairs of this process's batches among `count` from number `first`."""
        sampler = replace(self.sampler, start=first)
        step, numbers = sampler.num_processes, range(first, first + count)
        own = len(numbers[(sampler.process_index - first) % step :: step])
        batches = itertools.islice(sampler, own)
        indices = [index for batch in batches for index in np.ravel(batch).tolist() if index >= 0]
        return [self.all_pairs[index] for index in indices]


def training_batches(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    max_tokens: int,
    seed: int,
    start: int = 0,
    process_index: int = 0,
    num_processes: int = 1,
    stream_state: list[dict] | None = None,
) -> PairLoader | StreamedBatches:
    """Endless padded training batches of this process, from batch number `start`.

    `max_tokens` is the size of a batch: its sentences times its longest side. A map-style dataset is tokenized, a
    stream is not. `stream_state` has the `state` of every process, saved with the checkpoint: a stream is read on from
    there, and a map-style dataset, which needs none, resumes sooner in a late epoch.
    """
    collate = PairCollator(tokenizer)
    limits = options.max_source_length, options.max_target_length
    if options.bpe_dropout:
        sides = dict(zip(("input_ids", "labels"), limits, strict=True))
        collate = BpeDropoutCollator(tokenizer, options.bpe_dropout, sides)
    on_gpu = PartialState().device.type == "cuda"
    loading = {"num_workers": options.loading_workers(on_gpu), "pin_memory": on_gpu}
    loading["worker_init_fn"] = leave_signals_to_training
    if isinstance(dataset, IterableDataset):
        encode = partial(encode_pairs, tokenizer=tokenizer, max_source_length=limits[0], max_target_length=limits[1])
        plan, is_divisible = partial(plan_batches, max_tokens=max_tokens, seed=seed), options.max_train_samples is None
        pools = Pools(dataset, encode, plan, collate, seed, process_index, num_processes, is_divisible)
        return StreamedBatches(pools, start, stream_state, **loading)
    lengths, limits = lengths_of(dataset), [min(limit, max_tokens) for limit in limits]
    if options.joined_pairs:
        check_share(lengths, limits, options.joined_pairs, seed)
    sampler = TokenBatchSampler(
        *lengths,
        max_tokens,
        seed=seed,
        start=start,
        process_index=process_index,
        num_processes=num_processes,
        joined=options.joined_pairs,
        limits=limits,
        **(stream_state or [{}])[0],
    )
    return PairLoader(dataset, sampler, collate, **loading)


def leave_signals_to_training(worker_id: int):
    """Makes a worker ignore Ctrl-C for good, and SIGTERM unless the training process sends it.

    `held_back` in training/signals.py, which says why, blocks both only while workers start.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS or Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        training = multiprocessing.parent_process().pid
        threading.Thread(target=exit_when_terminated_by, args=[training], daemon=True).start()


def exit_when_terminated_by(process: int):
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != process:
        pass
    os._exit(0)


def evaluation_batches(
    dataset: Dataset, tokenizer, max_tokens: int, process_index: int = 0, num_processes: int = 1
) -> DataLoader:
    """Padded batches of all pairs, sorted by length; the processes take them in turn."""
    batches = [batch.tolist() for batch in fill_batches(*lengths_of(dataset), max_tokens)]
    own, collate = batches[process_index::num_processes], PairCollator(tokenizer).pad
    return DataLoader(PairColumns(dataset), batch_size=None, sampler=own, collate_fn=collate)
