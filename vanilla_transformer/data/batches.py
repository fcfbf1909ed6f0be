"""Batches of so many tokens, in an order that is a pure function of the seed: any of them can be found again.

All batches of a run, of every epoch and every process, are numbered from 0 on. Resuming is going on at a number.
"""

import copy
import itertools
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from datasets.utils import logging
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase

from ..data.pairs import reading
from ..data.tokenizer import BpeDropout
from ..errors import UserError

leave_signals_to_training = None

POOL_SIZE = 2**16  # pairs that are shuffled, then sorted by length together
FIRST_STREAM_POOL = 2**10  # of a stream, where a pool is read before its first batch; each is twice the one before,
LAST_STREAM_POOL = 2**15  # up to this
INSTEAD = "Begin a new run, from --model_name_or_path if you like."

# ------------------------------------------------------------------------------------------------------------ planning


def plan_batches(
    source_lengths: np.ndarray, target_lengths: np.ndarray, max_tokens: int, seed: int, epoch: int, part: int = 0
) -> list[np.ndarray]:
    """The batches of an epoch, or of a part of it, as arrays of indices: a pure function of its arguments.

    All pairs are shuffled and cut into pools; the pairs of a pool are sorted by length, stably, so that equals stay
    shuffled, and fill batches; then all batches are shuffled.
    """
    generator = np.random.default_rng([seed, epoch, part])
    order = generator.permutation(np.arange(len(source_lengths), dtype=np.int32))
    batches = []
    for start in range(0, len(order), POOL_SIZE):
        pool = order[start : start + POOL_SIZE]
        batches += [pool[batch] for batch in fill_batches(source_lengths[pool], target_lengths[pool], max_tokens)]
    return [batches[i] for i in generator.permutation(len(batches))]


def fill_batches(source_lengths: np.ndarray, target_lengths: np.ndarray, max_tokens: int) -> Iterator[np.ndarray]:
    """Sorts pairs by length and cuts them into batches of at most `max_tokens`, sentences times the longest side.

    A pair that is longer than the budget by itself makes a batch of its own.
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
    """The share of positions, of both sides of the batches, that are padding."""
    sides = (source_lengths, target_lengths)
    real = sum(int(side[batch].sum()) for side in sides for batch in batches)
    padded = sum(int(side[batch].max()) * len(batch) for side in sides for batch in batches)
    return 1 - real / padded


class TokenBatchSampler(Sampler):
    """The batches of one process, epoch after epoch without end, from the global batch number `start` on.

    Batches are dealt to the processes in turn, so that however many there are, batch number n is the same: step k of
    G batches in all takes numbers k G to (k + 1) G - 1, where none is `skipped`. Yields (number, indices).
    """

    def __init__(
        self,
        source_lengths: np.ndarray,
        target_lengths: np.ndarray,
        max_tokens: int,
        seed: int,
        start: int = 0,
        skipped: frozenset[int] = frozenset(),
        process_index: int = 0,
        num_processes: int = 1,
    ):
        self.lengths = source_lengths, target_lengths
        self.max_tokens = max_tokens
        self.seed = seed
        self.start = start
        self.skipped = skipped
        self.process_index = process_index
        self.num_processes = num_processes

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for number, batch in self.numbered():
            is_ours = number % self.num_processes == self.process_index
            if is_ours and number >= self.start and number not in self.skipped:
                yield number, batch.tolist()

    def numbered(self) -> Iterator[tuple[int, np.ndarray]]:
        """All batches, of all epochs and processes, with their numbers."""
        epochs = (plan_batches(*self.lengths, self.max_tokens, self.seed, epoch) for epoch in itertools.count())
        return enumerate(itertools.chain.from_iterable(epochs))


# -------------------------------------------------------------------------------------------------- what batches offer


class PairCollator:
    """Pads a list of pairs to tensors `input_ids`, `attention_mask` (B,S) and `labels` (B,T).

    Padding stands on the right, whatever side the tokenizer has it on: the decoder reads labels from position 0 on.
    Labels are -100 there, so that an end of sentence that is also the padding token is still learnt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.pad_token_id = tokenizer.pad_token_id

    def __call__(self, pairs: list[dict]) -> dict[str, torch.Tensor]:
        sources = [torch.tensor(pair["input_ids"]) for pair in pairs]
        targets = [torch.tensor(pair["labels"]) for pair in pairs]
        return {
            "input_ids": pad_sequence(sources, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(ids) for ids in sources], batch_first=True),
            "labels": pad_sequence(targets, batch_first=True, padding_value=-100),
        }


class SubwordVariation:
    """Segments the pairs of a batch anew with BPE-dropout, by the seed and the number of the batch alone.

    What would become longer than a side's limit keeps the segmentation that it has. Without a dropout it does nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, args):
        self.segment = BpeDropout(tokenizer, args.bpe_dropout) if args.bpe_dropout else None
        self.seed = args.seed
        self.limits = {"input_ids": args.max_source_length, "labels": args.max_target_length}

    def __call__(self, number: int, pairs: list[dict]) -> list[dict]:
        if self.segment is None:
            return pairs
        generator = np.random.default_rng([self.seed, number])
        varied = {}
        for side, ids in [("source", "input_ids"), ("target", "labels")]:
            segmented = self.segment([pair[side] for pair in pairs], generator)
            varied[ids] = [
                new if len(new) <= self.limits[ids] else pair[ids] for new, pair in zip(segmented, pairs, strict=True)
            ]
        return [{"input_ids": s, "labels": t} for s, t in zip(varied["input_ids"], varied["labels"], strict=True)]


class NumberedPairs(torch.utils.data.Dataset):
    """Hands out the pairs of a batch by its number and their indices, as a DataLoader asks for them."""

    def __init__(self, dataset: Dataset, vary: SubwordVariation):
        self.dataset = dataset
        self.vary = vary

    def __getitems__(self, batch: tuple[int, list[int]]) -> list[dict]:
        number, indices = batch
        return self.vary(number, self.dataset.__getitems__(indices))


class PairLoader(DataLoader):
    """Padded training batches of a dataset, by the plan of its [`TokenBatchSampler`]."""

    def epoch(self) -> list[np.ndarray]:
        """The batches of the first epoch; the number of later ones differs by a few, as other pairs share a pool."""
        sampler = self.batch_sampler
        return plan_batches(*sampler.lengths, sampler.max_tokens, sampler.seed, 0)

    def pairs_of(self, numbers: range) -> list[int]:
        """The indices of the pairs of some batches."""
        batches = itertools.islice(self.batch_sampler.numbered(), numbers.start, numbers.stop)
        return [index for _, batch in batches for index in batch.tolist()]

    def state_at(self, number: int) -> None:
        """Nothing besides a batch's number is needed to go on from it."""


class StreamedBatches:
    """The batches of one process from a stream, as [`TokenBatchSampler`] makes them of a dataset: pool by pool.

    The stream's files are shuffled by (seed, epoch) and read in turn; its pairs are shuffled pool by pool. Every
    process reads the whole stream and keeps its share. `start` skips batches: from `state`, where the pool begins
    that batch number `start` is of, else by reading over all of them.
    """

    def __init__(
        self,
        stream: IterableDataset,
        collate: PairCollator,
        vary: SubwordVariation,
        max_tokens: int,
        seed: int,
        start: int = 0,
        skipped: frozenset[int] = frozenset(),
        process_index: int = 0,
        num_processes: int = 1,
        state: dict | None = None,
    ):
        # Its files only: what a buffer of pairs holds cannot be saved, and to mix files takes a thread for each pair.
        self.stream = stream.shuffle(seed=seed, buffer_size=1, max_buffer_input_shards=1)
        self.collate = collate
        self.vary = vary
        self.max_tokens = max_tokens
        self.seed = seed
        self.start = start
        self.skipped = skipped
        self.process_index = process_index
        self.num_processes = num_processes
        self.begin = {"epoch": 0, "pool": 0, "batch": 0, "pair": 0, "stream": None, "digest": None}
        self.begin |= {"files": stream.num_shards} | (state or {})
        if self.begin["files"] != stream.num_shards:
            raise UserError(
                f"The stream is not the one of the checkpoint: it is made of {stream.num_shards} files, and was of "
                f"{self.begin['files']}. {INSTEAD}"
            )
        if state is not None:  # it would warn of a shuffle buffer, which holds nothing here
            logging.get_logger("datasets.iterable_dataset").setLevel(logging.ERROR)
        self.recent: list[tuple[dict, list[np.ndarray]]] = []  # the states and plans of this pool and the one before

    def __iter__(self) -> Iterator[dict]:
        for number, batch, pool in self.numbered():
            is_ours = number % self.num_processes == self.process_index
            if is_ours and number >= self.start and number not in self.skipped:
                yield self.collate(self.vary(number, [pool[i] for i in batch]))

    def numbered(self) -> Iterator[tuple[int, np.ndarray, list[dict]]]:
        """All batches of all processes from `begin` on, as indices of a pool, with their numbers and the pool."""
        state = copy.deepcopy(self.begin)
        promised = state["digest"]
        while True:
            self.stream.set_epoch(state["epoch"])
            if state["stream"] is not None:
                self.stream.load_state_dict(state["stream"])
            pairs = iter(self.stream)
            while pool := self.read_pool(pairs, state):
                state["digest"] = digest(pool)
                if promised not in (None, state["digest"]):
                    raise UserError(
                        f"The stream is not the one of the checkpoint: pairs {state['pair']:,} and on of its epoch "
                        f"{state['epoch']} have changed. {INSTEAD}"
                    )
                promised = None
                lengths = [np.array([len(pair[side]) for pair in pool]) for side in ("input_ids", "labels")]
                plan = plan_batches(*lengths, self.max_tokens, self.seed, state["epoch"], state["pool"])
                self.recent = [*self.recent[-1:], (copy.deepcopy(state), plan)]
                for number, batch in enumerate(plan, start=state["batch"]):
                    yield number, batch, pool
                state |= {"pool": state["pool"] + 1, "batch": state["batch"] + len(plan)}
                state |= {"pair": state["pair"] + len(pool), "stream": self.stream.state_dict()}
            if state["batch"] == 0:
                raise UserError("No usable pair is in the stream: all are empty, or longer than the limits.")
            state |= {"epoch": state["epoch"] + 1, "pool": 0, "pair": 0, "stream": None}

    def read_pool(self, pairs: Iterator[dict], state: dict) -> list[dict]:
        with reading(f"The stream, after pair {state['pair']:,} of epoch {state['epoch']},"):
            return list(itertools.islice(pairs, self.pool_size(state["epoch"], state["pool"])))

    def pool_size(self, epoch: int, pool: int) -> int:
        """Small at first, so that training begins at once; other in each epoch, so that other pairs come together."""
        first = int(np.random.default_rng([self.seed, epoch]).integers(FIRST_STREAM_POOL // 2, FIRST_STREAM_POOL + 1))
        return min(first << min(pool, 16), LAST_STREAM_POOL)

    def pairs_of(self, numbers: range) -> list[int]:
        """The places in the stream, in its epoch, of the pairs of some batches of this pool or the one before."""
        pairs = []
        for state, plan in self.recent:
            ours = [number - state["batch"] for number in numbers if 0 <= number - state["batch"] < len(plan)]
            pairs += [index for place in ours for index in (state["pair"] + plan[place]).tolist()]
        return pairs

    def state_at(self, number: int) -> dict:
        """From where to read on for batch number `number`, the next one, as a dictionary for JSON."""
        states = [self.begin, *(state for state, _ in self.recent)]
        return [state for state in states if state["batch"] <= number][-1]


def digest(pairs: list[dict]) -> str:
    """A short digest of the token ids of the pairs."""
    content = blake2b(digest_size=16)
    for pair in pairs:
        for side in ("input_ids", "labels"):
            content.update(np.asarray([len(pair[side]), *pair[side]], dtype=np.int32))
    return content.hexdigest()


def training_batches(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    args,
    start: int = 0,
    skipped: frozenset[int] = frozenset(),
    process_index: int = 0,
    num_processes: int = 1,
    stream_state: dict | None = None,
) -> PairLoader | StreamedBatches:
    """Padded training batches of this process without end, from the global batch number `start` on.

    `skipped` are numbers of batches to leave out, and `state` is, of a stream, what its `state_at` gave for `start`.
    """
    collate, vary = PairCollator(tokenizer), SubwordVariation(tokenizer, args)
    share = {"seed": args.seed, "start": start, "skipped": skipped}
    share |= {"process_index": process_index, "num_processes": num_processes}
    if isinstance(dataset, IterableDataset):
        return StreamedBatches(dataset, collate, vary, args.per_device_train_max_tokens, state=stream_state, **share)
    sampler = TokenBatchSampler(*lengths_of(dataset), args.per_device_train_max_tokens, **share)
    workers = {"num_workers": args.dataloader_num_workers, "persistent_workers": args.dataloader_num_workers > 0}
    workers["worker_init_fn"] = leave_signals_to_training
    return PairLoader(NumberedPairs(dataset, vary), batch_sampler=sampler, collate_fn=collate, **workers)


def evaluation_batches(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    process_index: int = 0,
    num_processes: int = 1,
) -> DataLoader:
    """Padded batches of every pair once, sorted by length, dealt out to the processes in turn."""
    batches = [batch.tolist() for batch in fill_batches(*lengths_of(dataset), max_tokens)]
    share = batches[process_index::num_processes]
    return DataLoader(dataset, batch_sampler=share, collate_fn=PairCollator(tokenizer))


def lengths_of(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of source and of target tokens of all pairs, read without a Python object each."""
    names = ["source_length", "target_length"]
    table = dataset.select_columns(names).with_format("arrow")[:]
    source, target = (table[name].to_numpy().astype(np.int32, copy=False) for name in names)
    return source, target
