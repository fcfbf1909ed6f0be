"""Training batches of a stream, whose pairs are read during training.

Each process reads its own part of the stream, endlessly, in pools: the rows of a pool are tokenized, sorted by length
and cut into batches, which are shuffled. Of P processes, process i trains on the batches n of the run with n % P == i,
so what batch n holds is a pure function of (seed, n, P). A checkpoint holds, for each process, the place in the stream
where its pool begins; a resumed run reads that pool again and goes on after the last batch.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import torch
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset as TorchIterableDataset

from ..errors import UserError
from .encoding import are_filled
from .rows import reading_data

# Rows of a pool. The first is small, so that training starts soon; each later one is twice as large.
FIRST_POOL, LAST_POOL = 2**8, 2**14
TABLE = 2**5  # rows that are read together; a pool has whole tables
SHARDS = 8  # with fewer for each process, rows are divided instead, since shares of whole shards would be too unequal
START = {"epoch": 0, "pool": 0, "row": 0, "batch": 0, "stream": None}  # the place where a run begins


@dataclass
class Pools(TorchIterableDataset):
    """The pools of a process: of each, the place where it begins and its padded batches, [packed][`pack`].

    A place is a JSON-serializable dictionary. Workers take the pools in turn: all read the rows, and each tokenizes
    its own pools.
    """

    stream: IterableDataset  # of texts
    encode: Callable[[dict], dict]  # the columns of filled texts -> those of PAIR_FEATURES, without too long pairs
    plan: Callable[..., list[np.ndarray]]  # source lengths, target lengths, epoch=, part= -> batches of indices
    collate: Callable[[list[dict]], dict[str, torch.Tensor]]
    seed: int
    process_index: int
    num_processes: int
    is_divisible: bool  # into shards; a stream that `take` has cut is not
    place: dict = field(default_factory=lambda: START)  # to begin at

    def __iter__(self) -> Iterator[tuple[dict | UserError, dict]]:
        worker = get_worker_info()
        share = (worker.id, None, worker.num_workers) if worker else (None,)
        try:
            for place, tables in itertools.islice(self.read(), *share):
                yield place, pack([self.collate(pairs) for pairs in self.batches(place, tables)])
        except UserError as error:  # raised here, the DataLoader would add the worker's traceback to its message
            yield error, {}

    def read(self) -> Iterator[tuple[dict, list[pa.Table]]]:
        """The rows of the pools, in small tables, and their places. The last pool of an epoch may be empty."""
        place = self.place
        while True:
            epoch, stream = place["epoch"], self.open(place)
            tables, is_last = stream.iter(TABLE), False
            generator = np.random.default_rng([self.seed, epoch, self.process_index])
            first = int(generator.integers(FIRST_POOL // 2, FIRST_POOL + 1))  # each epoch pools other pairs
            while not is_last:
                count = min(first << min(place["pool"], 16), LAST_POOL) // TABLE
                process = f"process {self.process_index} of {self.num_processes}"
                with reading_data(f"The stream, after row {place['row']:,} of {process} in epoch {epoch},"):
                    pool = list(itertools.islice(tables, count))
                yield place, pool
                is_last = len(pool) < count
                place = place | {"pool": place["pool"] + 1, "row": place["row"] + sum(map(len, pool))}
                place["stream"] = stream.state_dict()
            place = place | {"epoch": epoch + 1, "pool": 0, "row": 0, "stream": None}

    def open(self, place: dict) -> IterableDataset:
        """The part of an epoch that this process reads: shards, or each P-th row, in another order each epoch."""
        is_by_shard = self.is_divisible and self.stream.num_shards >= SHARDS * self.num_processes
        part = (self.process_index + place["epoch"]) % self.num_processes  # so none reads small parts all the time
        stream = split_dataset_by_node(
            self.stream, part, self.num_processes, strategy="shards" if is_by_shard else "examples"
        ).with_format("arrow")
        generator = np.random.default_rng([self.seed, place["epoch"]])
        stream.set_epoch(int(generator.integers(1, 2**31)))  # `datasets` shuffles the shards by any number but 0
        if place["stream"]:
            stream.load_state_dict(place["stream"])
        return stream

    def count_before(self, number: int) -> int:
        """How many batches of this process come before that number of the run."""
        return (number - self.process_index + self.num_processes - 1) // self.num_processes

    def batches(self, place: dict, tables: list[pa.Table]) -> list[list[dict]]:
        """The batches of a pool as lists of tokenized pairs, without those that are empty or too long."""
        texts = {side: [text for table in tables for text in table[side].to_pylist()] for side in ("source", "target")}
        filled = are_filled(texts)
        columns = self.encode({side: list(itertools.compress(rows, filled)) for side, rows in texts.items()})
        pairs = [dict(zip(columns, pair, strict=True)) for pair in zip(*columns.values(), strict=True)]
        lengths = [np.array(columns[side], dtype=np.int32) for side in ("source_length", "target_length")]
        part = place["pool"] * self.num_processes + self.process_index
        return [[pairs[i] for i in batch] for batch in self.plan(*lengths, epoch=place["epoch"], part=part)]


def pack(batches: list[dict[str, torch.Tensor]]) -> dict[str, tuple[torch.Tensor, list[torch.Size]]]:
    """Joins the tensors of batches into a flat one a column, since a worker opens a file for each that it sends."""
    columns = {name: [batch[name] for batch in batches] for name in (batches[0] if batches else ())}
    return {name: (torch.cat([*map(torch.flatten, of)]), [one.shape for one in of]) for name, of in columns.items()}


def unpack(columns: dict[str, tuple[torch.Tensor, list]]) -> list[dict[str, torch.Tensor]]:
    """The batches, as views of the flat tensors."""
    parts = [
        [part.view(*shape) for part, shape in zip(flat.split([math.prod(s) for s in shapes]), shapes, strict=True)]
        for flat, shapes in columns.values()
    ]
    return [dict(zip(columns, batch, strict=True)) for batch in zip(*parts, strict=True)]


class StreamedBatches:
    """The padded batches of a process, endlessly, from number `start` of the run.

    `states` has the `state` of each process, as a checkpoint holds them, or none. Workers, an option of the loading,
    read ahead of training; without any, a pool is read when it is needed.
    """

    def __init__(self, pools: Pools, start: int, states: list[dict] | None, **loading):
        """Raises UserError if the states are those of other processes, another stream, or an earlier version."""
        if pools.is_divisible and pools.stream.num_shards < SHARDS * pools.num_processes:
            with reading_data("The stream"):
                pools = replace(pools, stream=pools.stream.reshard())  # into the row groups of parquet files
        if states:
            check_states(states, pools)
            pools = replace(pools, place=states[pools.process_index])
        self.pools, self.first = pools, pools.count_before(start)
        self.loader = DataLoader(pools, batch_size=None, **loading)
        self.places = deque([pools.place], maxlen=100)  # of the pools whose batches were taken, the newest last

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self.count(iter(self.loader))  # starts the workers now, not with the first batch

    def count(self, pools: Iterator[tuple[dict | UserError, dict]]) -> Iterator[dict[str, torch.Tensor]]:
        """The batches from `first` on; the place of each pool gets the number of its first batch."""
        number, empty = self.pools.place["batch"], 0
        for place, packed in pools:
            if isinstance(place, UserError):
                raise place
            batches = unpack(packed)
            empty = 0 if batches else empty + (place["pool"] == 0)  # epochs that began since the last batch
            if empty > self.pools.num_processes:  # this process has read all parts
                raise UserError("The stream has no usable pair: all are empty, or longer than the limits.")
            place = place | {"batch": number}
            for batch in batches:
                if number >= self.first:
                    if place is not self.places[-1]:
                        self.places.append(place)
                    yield batch
                number += 1

    @property
    def state(self) -> list[dict]:
        """The place of the pool with the last batch that was taken."""
        return [self.places[-1] | {"shards": self.pools.stream.num_shards}]

    def pairs(self, first: int, count: int) -> list[dict]:
        """The pairs of this process's batches among `count` from number `first` of the run; none if too long ago."""
        begin, end = self.pools.count_before(first), self.pools.count_before(first + count)
        known = [place for place in self.places if place["batch"] <= begin]
        if not known:
            return []
        pools = replace(self.pools, place=known[-1])
        batches = itertools.chain.from_iterable(itertools.starmap(pools.batches, pools.read()))
        before = known[-1]["batch"]
        return list(itertools.chain(*itertools.islice(batches, begin - before, end - before)))


def check_states(states: list[dict], pools: Pools):
    """Raises UserError unless a run can be resumed from these states, in a sentence that says why."""
    remedy = "start a new run, with the checkpoint as --model_name_or_path to keep its weights."
    if states[0].keys() != START.keys() | {"shards"}:
        raise UserError(f"The checkpoint is of an earlier version, which read streams in another order; {remedy}")
    if len(states) != pools.num_processes:
        raise UserError(
            f"The stream is read by {pools.num_processes} process(es), but was read by {len(states)} when the "
            f"checkpoint was saved; resume with {len(states)}, or {remedy}"
        )
    if (before := states[0]["shards"]) != (now := pools.stream.num_shards):
        raise UserError(
            f"The stream has {now} files or row groups, but had {before} when the checkpoint was saved; {remedy}"
        )
