"""Streamed batches: a run resumes anywhere in the stream, and processes share its reading."""

import itertools
import json
import re
from collections import Counter

import datasets
import pytest
import torch
from helpers import text_dataset
from test_batches import FORK, PAIRS, as_pairs, load, small_pools, take

from vanilla_transformer.data import batches
from vanilla_transformer.data import stream as streams
from vanilla_transformer.data.encoding import tokenize_pairs
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.splits import load_pairs
from vanilla_transformer.errors import UserError

# Some pairs are empty and some too long, so the stream yields fewer pairs than it reads.
RAGGED = [("" if i % 11 == 3 else s, "y " * 60 if i % 13 == 5 else t) for i, (s, t) in enumerate(PAIRS)]
FEW = RAGGED[:260]


@pytest.fixture
def write_stream(tokenizer, tmp_path):
    """write_stream(pairs, number of files, suffix) -> open(**options) of a stream of new files of unequal lengths."""

    def write(pairs=FEW, count: int = 1, suffix: str = "jsonl", row_group: int = 1000):
        folder = tmp_path / str(count)
        folder.mkdir()
        cuts = [0, *(len(pairs) * (i + 1) ** 2 // (count + 1) ** 2 for i in range(count - 1)), len(pairs)]
        parts = {f"train-{i:05d}": pairs[a:b] for i, (a, b) in enumerate(itertools.pairwise(cuts))}
        for name, part in (parts | {"validation": pairs[:1]}).items():
            rows = text_dataset(part)
            if suffix == "parquet":
                rows.to_parquet(folder / f"{name}.parquet", batch_size=row_group)
            else:
                rows.to_json(folder / f"{name}.jsonl")

        def open_stream(**options):
            return load_pairs(DataOptions(str(folder), streaming=True, **options))["train"]

        return open_stream

    return write


LIMITS = {"max_source_length": 40, "max_target_length": 40, "max_tokens": 200}


@pytest.fixture
def load_stream(tokenizer, monkeypatch):
    """load_stream(stream, start, process, processes, **options): its batches, of a few pairs, in small pools."""
    small_pools(4, 10, monkeypatch)
    return lambda stream, *share, **options: load(stream, tokenizer, *share, **LIMITS | options)


def copied(state):
    """As a checkpoint holds it."""
    return json.loads(json.dumps(state))


def take_epochs(loader, epochs: int) -> tuple[list, list, list]:
    """The batches of a process until it has read so many epochs, the epoch of each, and the states before."""
    found, epochs_found, states = [], [], [copied(loader.state)]
    for batch in loader:
        if loader.state[0]["epoch"] == epochs:
            return found, epochs_found, states
        found.append(as_pairs(batch))
        epochs_found.append(loader.state[0]["epoch"])
        states.append(copied(loader.state))
    raise AssertionError


KINDS = {
    "one file": (RAGGED, 1, "jsonl", {}),  # of more than the 1,000 rows that datasets maps at once
    "three files": (FEW, 3, "jsonl", {}),
    "parquet": (FEW, 3, "parquet", {}),
    "parquet with many row groups": (FEW, 3, "parquet", 8, {}),
    "many files": (FEW, 11, "jsonl", {}),
    "some of them": (FEW, 11, "jsonl", {"max_train_samples": 230}),
}


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_processes_together_read_each_pair_once_an_epoch(kind, processes, write_stream, load_stream, tokenizer):
    """Whatever the sizes of the files; each has other batches in each epoch."""
    *files, limits = KINDS[kind]
    stream = write_stream(*files)(**limits)
    everything = tokenize_pairs(datasets.Dataset.from_list(list(stream)), tokenizer, 40, 40)[0]
    everything = Counter((tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in everything)
    assert everything.total() > 180
    shares = [take_epochs(load_stream(stream, 0, i, processes, **limits), 3)[:2] for i in range(processes)]
    orders = []
    for epoch in range(3):
        parts = [[batch for batch, n in zip(*share, strict=True) if n == epoch] for share in shares]
        assert Counter(itertools.chain(*itertools.chain(*parts))) == everything
        assert all(parts)
        orders.append(parts)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_stream_resumes_from_any_batch(kind, processes, write_stream, load_stream):
    *files, limits = KINDS[kind]
    open_stream, last = write_stream(*files), processes - 1  # the process whose batches are resumed

    def resume(own: int, state: dict):
        """The batches of the last process from that number of its own."""
        saved = [{**state, "stream": None}] * last + [state]
        return load_stream(open_stream(**limits), own * processes, last, processes, stream_state=saved, **limits)

    found, _, states = take_epochs(load_stream(open_stream(**limits), 0, last, processes, **limits), 3)
    for number in range(0, len(found) - 3, len(found) // 24):
        assert take(resume(number, *states[number]), 3) == found[number : number + 3]
    # To the end, and from a state that a resumed run saved.
    number, later = len(found) // 3, len(found) // 2
    resumed = resume(number, *states[number])
    assert resumed.state[0]["batch"] > 0  # earlier pools are not read again
    again, _, saved = take_epochs(resumed, 3)
    assert again == found[number:]
    assert take(resume(later, *saved[later - number]), 9) == found[later : later + 9]


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 3)])
def test_another_number_of_processes_is_refused(before, after, write_stream, load_stream):
    stream = write_stream(count=3)()
    stopped = [load_stream(stream, 0, i, before) for i in range(before)]
    state = [state for loader in stopped if take(loader, 3) for state in copied(loader.state)]
    message = rf"^The stream is read by {after} process\(es\), but was read by {before} when the checkpoint was saved"
    for i in range(after):
        with pytest.raises(UserError, match=message):
            load_stream(stream, 3 * before, i, after, stream_state=state)


@pytest.mark.parametrize("files", [1, 9])
def test_processes_share_the_reading_of_a_stream(files, load_stream, monkeypatch):
    """Each tokenizes its part; of many files each opens its own, of few all."""
    opened, rows, encode = [], [], batches.encode_pairs

    def read(files):
        for file in files:
            opened.append(file)
            yield from ({"source": f"a dog {file} {i}", "target": "ein Hund"} for i in range(180 // len(numbers)))

    def note(batch: dict, **options) -> dict:
        rows.extend(batch["source"])
        return encode(batch, **options)

    def work(process: int, num_processes: int) -> tuple[list, list]:
        """The files and rows of the first epoch."""
        rows.clear()
        opened.clear()
        found = []
        pools = load_stream(stream, 0, process, num_processes).pools
        for place, tables in pools.read():
            if place["epoch"]:
                return found, rows.copy()
            pools.batches(place, tables)
            found = opened.copy()

    numbers = list(range(files))
    stream = datasets.IterableDataset.from_generator(read, gen_kwargs={"files": numbers})
    monkeypatch.setattr(batches, "encode_pairs", note)
    everything = Counter(f"a dog {file} {i}" for file in numbers for i in range(180 // files))
    for num_processes in (1, 2, 4, 8):
        found, read_rows = zip(*(work(i, num_processes) for i in range(num_processes)), strict=True)
        assert Counter(itertools.chain(*read_rows)) == everything
        assert sorted(itertools.chain(*found)) == (numbers if files > 1 else [0] * num_processes)
        assert max(map(len, read_rows)) < 2 * 180 / num_processes


@pytest.mark.filterwarnings("ignore:This DataLoader will create", FORK)
def test_workers_read_a_stream_ahead(write_stream, load_stream):
    stream = write_stream(count=3)()
    expected = take(load_stream(stream, 0, 1, 2), 36)
    for workers, others in [(1, 3), (3, 0)]:
        loader = load_stream(stream, 0, 1, 2, dataloader_num_workers=workers)
        assert take(loader, 24) == expected[:24]
        state = copied(loader.state) * 2
        resumed = load_stream(stream, 48, 1, 2, stream_state=state, dataloader_num_workers=others)
        assert take(resumed, 12) == expected[24:]


@pytest.mark.filterwarnings(FORK)
def test_a_worker_sends_few_tensors(write_stream, load_stream):
    """Each would take an open file, of which a process may have a thousand."""
    reader = iter(load_stream(write_stream()(), dataloader_num_workers=1).loader)
    for _ in range(9):
        _, columns = next(reader)
        assert columns.keys() == {"input_ids", "attention_mask", "labels"}
        assert all(isinstance(flat, torch.Tensor) and flat.dim() == 1 for flat, _ in columns.values())


@pytest.mark.parametrize("count", [2, 4])
def test_stream_of_another_number_of_files_is_refused(count, write_stream, load_stream):
    loader = load_stream(write_stream(count=3)())
    take(loader, 1)
    message = f"^The stream has {count} files or row groups, but had 3 when the checkpoint was saved"
    with pytest.raises(UserError, match=message):
        load_stream(write_stream(count=count)(), stream_state=loader.state)


def test_state_of_an_earlier_version_is_refused(write_stream, load_stream):
    lanes = [{"lane": lane, "epoch": 0, "pool": 3, "batch": 120, "place": None, "files": 1} for lane in range(8)]
    with pytest.raises(UserError, match="^The checkpoint is of an earlier version, which read streams in another"):
        load_stream(write_stream()(), stream_state=lanes)


def read_epochs(loader, epochs: int) -> list[list]:
    """The pools that a process reads in each of the first epochs, as lists of sources."""
    found = [[] for _ in range(epochs)]
    for place, tables in itertools.takewhile(lambda pool: pool[0]["epoch"] < epochs, loader.pools.read()):
        found[place["epoch"]].append([source for table in tables for source in table["source"].to_pylist()])
    return found


def test_files_of_a_stream_are_read_in_another_order_by_each_seed_and_epoch(write_stream, load_stream):
    """Each at once; and processes change places, since one of them has the largest files."""
    stream = write_stream([pair for pair in FEW if pair[0]], 11)()
    files = {source: file for file in range(11) for source in next(iter(stream.shard(11, file).batch(999)))["source"]}
    orders = set()
    for seed in (1, 2):
        shares = [read_epochs(load_stream(stream, 0, i, 2, seed=seed), 8) for i in range(2)]
        for parts in zip(*shares, strict=True):
            read = [[files[source] for source in itertools.chain(*pools)] for pools in parts]
            order = [file for part in read for file, _ in itertools.groupby(part)]
            assert sorted(order) == list(range(11))
            orders.add(tuple(order))
        assert {len(set(map(files.get, itertools.chain(*pools)))) for pools in shares[0]} == {5, 6}
    assert len(orders) == 16


def test_pools_of_a_stream_double_up_to_the_last_size(tokenizer, write_stream, monkeypatch):
    small_pools(16, 50, monkeypatch)
    monkeypatch.setattr(streams, "TABLE", 1)
    sizes = [list(map(len, pools)) for pools in read_epochs(load(write_stream(PAIRS)(), tokenizer), 6)]
    assert all(8 <= first <= 16 for first, *_ in sizes) and len({first for first, *_ in sizes}) > 2
    for first, *others in sizes:
        assert others[:-1] == [min(first << number, 50) for number in range(1, len(others))]


def test_a_process_without_a_usable_pair_in_an_epoch_reads_on(load_stream):
    """A stream of a single pair gives it to each process in turn."""
    stream = text_dataset([("a dog", "ein Hund")]).to_iterable_dataset()
    for process in range(3):
        loader = load_stream(stream, 0, process, 3)
        assert len(set(map(str, take(loader, 4)))) == 1
        assert loader.state[0]["epoch"] == 9 + -process % 3


@pytest.mark.filterwarnings(FORK)
@pytest.mark.parametrize("rows", [[(None, "b")], [("a b " * 99, "b")], [("", "b")] * 999, []])
@pytest.mark.parametrize("workers, processes", [(0, 1), (1, 1), (0, 2), (2, 2)])
def test_stream_without_usable_pairs_is_refused(workers, processes, rows, load_stream):
    stream = text_dataset(rows or [("a", "b")]).to_iterable_dataset()
    stream = stream if rows else stream.filter(lambda pair: False)
    with pytest.raises(UserError, match="^The stream has no usable pair: all are empty, or longer than the limits.$"):
        next(iter(load_stream(stream, 0, 1, processes, dataloader_num_workers=workers)))


@pytest.mark.filterwarnings(FORK)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_in_reading_is_one_sentence(workers, load_stream):
    """Also from a worker, whose traceback PyTorch would add; after the batches before it."""

    def read():
        yield from ({"source": f"a dog {i}", "target": "ein Hund"} for i in range(40))
        raise ValueError("bad row")

    stream = datasets.IterableDataset.from_generator(read)
    loader, found = iter(load_stream(stream, dataloader_num_workers=workers)), []
    with pytest.raises(UserError) as error:
        found.extend(loader)
    assert len(found) > 1
    message = r"The stream, after row 3\d of process 0 of 1 in epoch 0, could not be read: bad row\W*"
    assert re.fullmatch(message, str(error.value))
