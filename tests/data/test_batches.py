"""Numbered batches: which pairs a batch holds depends on the seed and its number alone."""

import itertools
import json
import multiprocessing
import subprocess
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from datasets import concatenate_datasets
from helpers import data_options, text_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from vanilla_transformer.data import batches
from vanilla_transformer.data.batches import (
    SOFT_TARGETS,
    PairCollator,
    TokenBatchSampler,
    evaluation_batches,
    fill_batches,
    lengths_of,
    padding_fraction,
    plan_batches,
    training_batches,
)
from vanilla_transformer.data.encoding import PAIR_FEATURES, tokenize_pairs
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.splits import load_pairs
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.distillation import FEATURES

FORK = "ignore:.*multi-threaded, use of fork"  # since Python 3.12; here a worker only reads, or waits

# ------------------------------------------------------------------------------------------------ planning and padding


@pytest.fixture
def lengths():
    """Source and target lengths of 2,000 pairs, distributed like those of sentences."""
    random = np.random.default_rng(0)
    source = np.clip(random.gamma(3, 6, 2000), 2, 100).astype(np.int32)
    target = np.clip(source * random.uniform(0.7, 1.4, 2000), 2, 120).astype(np.int32)
    return source, target


def as_lists(plan) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in plan]


@pytest.fixture(params=[2**16, 300], ids=["one pool", "several pools"])
def pools(request, monkeypatch):
    monkeypatch.setattr(batches, "POOL_SIZE", request.param)


@pytest.mark.parametrize("max_tokens", [50, 400, 10**6])
def test_epoch_has_every_pair_once_within_the_budget(lengths, max_tokens, pools):
    plan = plan_batches(*lengths, max_tokens, 1, 0)
    assert sorted(itertools.chain(*as_lists(plan))) == list(range(2000))
    longest = np.maximum(*lengths)
    for batch in plan:
        assert len(batch) * longest[batch].max() <= max_tokens or len(batch) == 1
    # A pair is alone only if it is longer than half of the budget, or the last of a pool.
    alone = [batch for batch in plan if len(batch) == 1 and longest[batch].max() <= max_tokens / 3]
    assert len(alone) <= np.ceil(2000 / batches.POOL_SIZE)


def test_plan_is_a_pure_function_of_seed_epoch_and_part(lengths, pools):
    plans = {}
    for key in itertools.product([1, 2], [0, 1, 2], [0, 1]):
        np.random.seed(sum(key))  # the global generator does not matter
        plans[key] = as_lists(plan_batches(*lengths, 400, *key))
        assert as_lists(plan_batches(*lengths, 400, *key)) == plans[key]
    # Not only the order of the batches changes: other pairs share a batch.
    sets = [{frozenset(batch) for batch in plan} for plan in plans.values()]
    assert all(len(a & b) < len(a) / 2 for a, b in itertools.combinations(sets, 2))


def test_sorting_saves_padding_and_leaves_the_batches_shuffled(lengths, pools):
    planned = plan_batches(*lengths, 400, 1, 0)
    random = np.array_split(np.random.default_rng(0).permutation(2000), len(planned))
    assert padding_fraction(*lengths, planned) < 0.15 or batches.POOL_SIZE < 2000
    assert padding_fraction(*lengths, random) > 2 * padding_fraction(*lengths, planned)
    means = [np.maximum(*lengths)[batch].mean() for batch in planned]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_padding_fraction_is_that_of_the_tensors():
    source, target = np.array([3, 1, 2, 5]), np.array([1, 4, 2, 2])
    plan = [np.array([0, 1]), np.array([2]), np.array([3])]
    collate = PairCollator(word_tokenizer())
    pairs = [{"input_ids": [3] * s, "labels": [3] * t} for s, t in zip(source, target, strict=True)]
    tensors = [collate([pairs[i] for i in batch]) for batch in plan]
    positions = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in tensors)
    assert positions == 14 + 4 + 7
    assert padding_fraction(source, target, plan) == pytest.approx(1 - 20 / positions)


def test_fill_batches_keeps_a_long_pair_alone():
    lengths = np.array([3, 50, 3, 3, 3, 10])
    assert as_lists(fill_batches(lengths, lengths, 12)) == [[0, 2, 3, 4], [5], [1]]


def word_tokenizer(pad: str = "<p>", padding_side: str = "right") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"<p>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": pad, "eos_token": "</s>", "padding_side": padding_side}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad, number", [("<p>", 0), ("</s>", 1)], ids=["pad", "pad is eos"])
def test_collator_pads_on_the_right(pad, number, side):
    pairs = [{"input_ids": [2, 3, 1], "labels": [3, 1]}, {"input_ids": [2, 1], "labels": [2, 2, 2, 1]}]
    batch = PairCollator(word_tokenizer(pad, side))(pairs)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[2, 3, 1], [2, 1, number]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[3, 1, -100, -100], [2, 2, 2, 1]],
    }
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert pairs[0] == {"input_ids": [2, 3, 1], "labels": [3, 1]}


# ---------------------------------------------------------------------------------------------------- training batches


def load(dataset, tokenizer, *share, max_tokens: int = 60, seed: int = 1, stream_state: dict | None = None, **options):
    """The training batches of a process; `share` are the number of the first, of the process and of all processes."""
    given = (DataOptions(**options), max_tokens, seed)
    return training_batches(dataset, tokenizer, *given, *share, stream_state=stream_state)


def as_pairs(batch: dict) -> list[tuple]:
    """The token ids of a batch without padding."""
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), batch["labels"], strict=True)
    return [(tuple(ids[mask].tolist()), tuple(labels[labels != -100].tolist())) for ids, mask, labels in rows]


def take(loader, count: int) -> list[list[tuple]]:
    """The token ids of the next batches."""
    return [as_pairs(batch) for batch in itertools.islice(loader, count)]


PAIRS = [(f"a dog {'x ' * (i % 7)}{i}", f"ein Hund {'y ' * (i % 5)}{i}") for i in range(1150)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([f"a dog {i} ein Hund für {i}" for i in range(40)], 280)


@pytest.fixture(scope="module")
def tokenized(tokenizer):
    return tokenize_pairs(text_dataset(PAIRS[:50]), tokenizer, 99, 99)[0]


@pytest.fixture(params=["map-style", "streamed", "streamed in small pools"])
def source(request, tokenized, monkeypatch):
    if request.param == "streamed in small pools":
        small_pools(8, 8, monkeypatch)
    return tokenized if request.param == "map-style" else tokenized.to_iterable_dataset()


def test_epochs(tokenized, tokenizer):
    """Every pair once, in other batches each time."""
    everything = {(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in tokenized}
    epochs, seen = [[]], set()
    for batch in take(load(tokenized, tokenizer), 60):
        assert not seen & set(batch)
        seen |= set(batch)
        epochs[-1].append(batch)
        if seen == everything:
            seen = set()
            epochs.append([])
    assert len(epochs) > 3
    assert epochs[0] != epochs[1]


def test_training_batches(source, tokenizer):
    """Within the budget; the same from any number and for any number of processes."""
    stream = take(load(source, tokenizer), 60)
    assert all(len(batch) * max(len(side) for pair in batch for side in pair) <= 60 for batch in stream)
    assert take(load(source, tokenizer, seed=2), 60) != stream

    for start in [1, 15, 16, 17, 18]:
        assert take(load(source, tokenizer, start), 9) == stream[start : start + 9]
    for num_processes in [2, 3, 4, 8, 16]:
        share = (source, tokenizer, num_processes)
        dealt = [take(load(*share, i, num_processes), 2) for i in range(num_processes)]
        found = [batch for turn in zip(*dealt, strict=True) for batch in turn]
        assert found == stream[num_processes : 3 * num_processes]


def row_by_row(pairs: list[dict], tokenizer) -> dict[str, torch.Tensor]:
    """The batch of transformers' collator, and soft targets padded with zeros."""
    sides = [{side: pair[side] for side in ("input_ids", "labels")} for pair in pairs]
    batch = dict(DataCollatorForSeq2Seq(tokenizer)(sides))
    for name in SOFT_TARGETS if SOFT_TARGETS[0] in pairs[0] else ():
        rows = [torch.tensor(pair[name]).view(len(pair["labels"]), -1) for pair in pairs]
        batch[name] = pad_sequence(rows, batch_first=True)
    return batch


def with_soft_targets(dataset, k: int):
    random = np.random.default_rng(0)

    def add(pair: dict) -> dict:
        size = k * len(pair["labels"])
        return dict(zip(SOFT_TARGETS, (random.integers(280, size=size), random.random(size)), strict=True))

    return dataset.map(add, features=datasets.Features(PAIR_FEATURES | FEATURES))


def reversed_copy(dataset: datasets.Dataset) -> datasets.Dataset:
    """With numbers of its own in memory."""
    return datasets.Dataset.from_list(dataset.to_list()[::-1], dataset.features)


KINDS_OF_DATASETS = {
    "one file": lambda dataset: dataset,
    "selected": lambda dataset: dataset.select([7, 3, 3, *range(20, 30)]),
    "a slice": lambda dataset: dataset.select(range(5, 45)),
    "several files": lambda dataset: concatenate_datasets([reversed_copy(dataset), dataset, dataset.take(1)]),
    "one soft target": partial(with_soft_targets, k=1),
    "soft targets": partial(with_soft_targets, k=3),
}


@pytest.mark.parametrize("kind", KINDS_OF_DATASETS)
def test_batches_are_those_of_transformers_row_by_row(kind, tokenized, tokenizer):
    dataset = KINDS_OF_DATASETS[kind](tokenized)
    loader, evaluated = load(dataset, tokenizer), fill_batches(*lengths_of(dataset), 60)
    plans = itertools.chain(loader.epoch(), evaluated)
    found = itertools.chain(itertools.islice(loader, len(loader.epoch())), evaluation_batches(dataset, tokenizer, 60))
    for plan, batch in zip(plans, found, strict=True):
        pairs = [dataset[int(index)] for index in plan]
        for expected in (row_by_row(pairs, tokenizer), PairCollator(tokenizer)(pairs)):
            assert batch.keys() == expected.keys()
            for name, tensor in batch.items():
                assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])


@pytest.mark.parametrize("options", [{}, {"bpe_dropout": 0.1}], ids=["plain", "BPE-dropout"])
@pytest.mark.parametrize(("device", "workers"), [("cuda", 1), ("cpu", 0)])
def test_a_gpu_has_a_worker_and_pinned_memory_by_default(device, workers, options, tokenized, tokenizer, monkeypatch):
    monkeypatch.setattr(batches, "PartialState", lambda: SimpleNamespace(device=torch.device(device)))
    loader = load(with_soft_targets(tokenized, 1), tokenizer, **options)
    assert (loader.num_workers, loader.pin_memory) == (workers, device == "cuda")
    for given in (0, 2):
        assert load(tokenized, tokenizer, dataloader_num_workers=given, **options).num_workers == given


@pytest.mark.filterwarnings("ignore:This DataLoader will create", FORK)
def test_a_worker_makes_the_same_batches(tokenized, tokenizer):
    dataset = with_soft_targets(tokenized, 2)
    alone, worker = (load(dataset, tokenizer, dataloader_num_workers=count) for count in (0, 1))
    for expected, batch in itertools.islice(zip(alone, worker, strict=False), 30):
        assert all(torch.equal(batch[name], tensor) for name, tensor in expected.items())


def test_no_pair_is_read_by_itself(tokenized, tokenizer, monkeypatch):
    loader, reads = load(tokenized, tokenizer), []
    read = datasets.Dataset.__getitem__
    monkeypatch.setattr(datasets.Dataset, "__getitem__", lambda self, key: reads.append(key) or read(self, key))
    take(loader, 30)
    assert reads == [slice(None)]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_resume_in_a_late_epoch_plans_that_epoch_alone(num_processes, tokenized, tokenizer, monkeypatch):
    """A checkpoint of earlier versions has no state, and the same batches."""
    monkeypatch.setattr(batches, "POOL_SIZE", 13)  # epochs of several pools differ in their numbers of batches
    planning = Mock(wraps=plan_batches)
    monkeypatch.setattr(batches, "plan_batches", planning)
    first = load(tokenized, tokenizer)
    expected, reader = [], iter(first)
    while planning.call_count < 17:
        expected += take(reader, 1)
    expected += take(reader, 9)
    saved = json.loads(json.dumps(first.state))
    epochs = saved[0]["epochs"]
    assert len(set(np.diff(epochs))) > 1
    start = epochs[16] + num_processes
    for state, plans in [(saved, 1), (None, 17)]:
        loaders = [
            load(tokenized, tokenizer, start, i, num_processes, stream_state=state) for i in range(num_processes)
        ]
        planning.reset_mock()
        dealt = [take(loader, 3) for loader in loaders]
        assert planning.call_count == plans * num_processes
        resumed = [batch for turn in zip(*dealt, strict=True) for batch in turn]
        assert resumed == expected[start : start + 3 * num_processes]
        assert loaders[0].state == saved


def test_pairs_of_a_batch_are_found_again(source, tokenizer):
    """For a message about them, by the process that had them; also from an earlier pool or epoch."""
    expected = take(load(source, tokenizer), 60)
    loaders = [load(source, tokenizer, 4, i, 2) for i in range(2)]
    for loader in loaders:
        take(loader, 28)
    for first, count in [(4, 2), (30, 4), (58, 2), (5, 1)]:
        pairs = [pair for loader in loaders for pair in loader.pairs(first, count)]
        found = sorted((tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in pairs)
        assert found == sorted(itertools.chain(*expected[first : first + count]))
        assert {(pair["source"], pair["target"]) for pair in pairs} <= set(PAIRS)


def test_epoch_counts_the_batches_of_all_processes(tokenized, tokenizer):
    loader = load(tokenized, tokenizer, 5, 1, 2)
    assert as_lists(loader.epoch()) == as_lists(plan_batches(*lengths_of(tokenized), 60, 1, 0))


def test_a_sampler_has_the_batches_of_all_processes_from_the_first(lengths):
    sampler, plan = TokenBatchSampler(*lengths, max_tokens=400, seed=1), plan_batches(*lengths, 400, 1, 0)
    assert list(itertools.islice(sampler, len(plan))) == as_lists(plan)


def test_evaluation_batches_have_every_pair_once(tokenized, tokenizer):
    everything = sorted((tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in tokenized)
    assert sorted(itertools.chain(*take(evaluation_batches(tokenized, tokenizer, 60), 99))) == everything
    for num_processes in [1, 2, 3, 60]:
        dealt = [evaluation_batches(tokenized, tokenizer, 60, i, num_processes) for i in range(num_processes)]
        assert sorted(pair for share in dealt for batch in share for pair in as_pairs(batch)) == everything


def idle(is_ready):
    batches.leave_signals_to_training(0)
    is_ready.set()
    time.sleep(60)


@pytest.mark.filterwarnings(FORK)
def test_worker_ends_for_the_training_process_alone():
    """Ctrl-C and a job scheduler signal all processes of a run, which still needs its workers."""
    is_ready = multiprocessing.Event()
    worker = multiprocessing.Process(target=idle, args=(is_ready,))
    worker.start()
    is_ready.wait()
    subprocess.run(["bash", "-c", f"kill -INT {worker.pid}; kill -TERM {worker.pid}"], check=True)
    worker.join(0.5)
    assert worker.is_alive()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode is not None


@pytest.mark.filterwarnings(FORK)
def test_worker_ends_with_its_work():
    worker = multiprocessing.Process(target=batches.leave_signals_to_training, args=(0,))
    worker.start()
    worker.join(20)
    status = worker.exitcode
    worker.terminate()
    assert status == 0


# ------------------------------------------------------------------------------------------------------------- streams

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
            return load_pairs(data_options(dataset_name=folder, streaming=True, **options))["train"]

        return open_stream

    return write


def small_pools(first: int, last: int, monkeypatch):
    """Sets the sizes of pools."""
    sizes = {"FIRST_POOL": first, "LAST_POOL": last, "TABLE_SIZE": 2, "FILES_PER_LANE": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(batches, name, size)


LIMITS = {"max_source_length": 40, "max_target_length": 40, "max_tokens": 200}


@pytest.fixture
def load_stream(tokenizer, monkeypatch):
    """load_stream(stream, start, process, processes, **options): its batches, of a few pairs, in small pools."""
    small_pools(4, 10, monkeypatch)
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # after each read of a parquet file
    return lambda stream, *share, **options: load(stream, tokenizer, *share, **LIMITS | options)


def copied(state):
    """As a checkpoint holds it."""
    return json.loads(json.dumps(state))


def take_with_states(loader, epochs: int, start: int = 0) -> tuple[list, list, list]:
    """The batches from `start` until each lane has read so many epochs, the epoch of each, and the states before."""
    found, epochs_found, states = [], [], [copied(loader.state)]
    for number, batch in enumerate(loader, start):
        state = next(state for state in loader.state if state["lane"] == number % batches.LANES)
        found.append(as_pairs(batch))
        epochs_found.append(state["epoch"])
        states.append(copied(loader.state))
        if len(states[-1]) == batches.LANES and min(state["epoch"] for state in states[-1]) == epochs:
            return found, epochs_found, states
    raise AssertionError


def test_every_pair_is_read_as_often_whatever_the_sizes_of_the_files(write_stream, load_stream, monkeypatch):
    loader = load_stream(write_stream(RAGGED, 11)())  # the last file has a sixth of the pairs, the first a hundredth
    monkeypatch.setattr(batches, "FILES_PER_LANE", 8)
    found, _, _ = take_with_states(loader, 3)
    counts = Counter(pair for batch in found for pair in batch)
    assert max(counts.values()) - min(counts.values()) <= 2


def test_the_first_pairs_of_a_stream_may_come_from_several_files(write_stream, load_stream, tokenizer):
    limits = {"max_train_samples": 90}
    stream = write_stream(FEW, 11)(**limits)
    pairs = tokenize_pairs(datasets.Dataset.from_list(list(stream)), tokenizer, 40, 40)[0]
    found, epochs, _ = take_with_states(load_stream(stream, **limits), 1)
    read = itertools.chain(*(batch for batch, epoch in zip(found, epochs, strict=True) if epoch == 0))
    assert Counter(read) == Counter((tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in pairs)


def test_row_groups_of_few_files_are_read_once(write_stream, load_stream, monkeypatch):
    loader = load_stream(write_stream(FEW, 3, "parquet", row_group=8)())
    assert loader.dataset.files > 32  # FEW has 260 pairs
    dealt = []
    shard = datasets.IterableDataset.shard
    monkeypatch.setattr(datasets.IterableDataset, "shard", lambda s, n, i: dealt.append((n, i)) or shard(s, n, i))
    take_with_states(loader, 1)
    assert {files for files, _ in dealt} == {loader.dataset.files}
    assert max(Counter(dealt).values()) <= 2  # some lanes have begun their next epoch


KINDS = {
    "one file": (RAGGED, 1, "jsonl", {}),  # of more than the 1,000 rows that datasets maps at once
    "three files": (FEW, 3, "jsonl", {}),
    "parquet": (FEW, 3, "parquet", {}),
    "parquet with many row groups": (FEW, 3, "parquet", 8, {}),
    "a file for each lane": (FEW, 11, "jsonl", {}),
    "some of them": (FEW, 11, "jsonl", {"max_train_samples": 230}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stream_resumes_from_any_batch(kind, write_stream, load_stream, tokenizer):
    *files, limits = KINDS[kind]
    open_stream = write_stream(*files)
    stream = open_stream(**limits)
    found, epochs, states = take_with_states(load_stream(stream, **limits), 3)
    pairs = tokenize_pairs(datasets.Dataset.from_list(list(stream)), tokenizer, 40, 40)[0]
    everything = Counter((tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in pairs)
    assert len(pairs) > 180
    for epoch in range(3):
        read = [batch for batch, number in zip(found, epochs, strict=True) if number == epoch]
        assert Counter(itertools.chain(*read)) == everything
    for number in range(0, len(found) - 3, len(found) // 24):
        resumed = load_stream(open_stream(**limits), number, stream_state=states[number], **limits)
        assert take(resumed, 3) == found[number : number + 3]
    # To the end, and from a state that a resumed run saved.
    number, later = len(found) // 3, len(found) // 2
    resumed = load_stream(stream, number, stream_state=states[number], **limits)
    assert min(state["batch"] for state in resumed.state) > 0  # earlier pools are not read again
    again, _, saved = take_with_states(resumed, 3, number)
    assert again == found[number:]
    resumed = load_stream(stream, later, stream_state=saved[later - number], **limits)
    assert take(resumed, 9) == found[later : later + 9]


ODD = [pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 3), (3, 2), (16, 8)]]


@pytest.mark.parametrize("before, after", [(4, 1), (1, 4), *ODD])
def test_stream_is_resumed_by_another_number_of_processes(before, after, write_stream, load_stream):
    stream, start = write_stream(count=3)(), 96
    expected = take(load_stream(stream), start + 48)
    stopped = [load_stream(stream, 0, i, before) for i in range(before)]
    for loader in stopped:
        take(loader, start // before)
    state = copied([state for loader in stopped for state in loader.state])
    assert max(state["epoch"] for state in state) > 1
    loaders = [load_stream(stream, start, i, after, stream_state=state) for i in range(after)]
    dealt = [take(loader, 48 // after) for loader in loaders]
    assert [batch for turn in zip(*dealt, strict=True) for batch in turn] == expected[start:]


@pytest.mark.parametrize("files", [1, 9])
def test_processes_share_the_reading_of_a_stream(files, load_stream, monkeypatch):
    """Together they open no file and tokenize no row that a single process would not; each does its part."""
    opened, rows, encode = [], [], batches.encode_pairs

    def read(files):
        for file in files:
            opened.append(file)
            yield from ({"source": f"a dog {file} {i}", "target": "ein Hund"} for i in range(180 // len(numbers)))

    def note(batch: dict, **options) -> dict:
        rows.extend(batch["source"])
        return encode(batch, **options)

    def work(process: int, num_processes: int) -> tuple[Counter, Counter]:
        opened.clear()
        rows.clear()
        take(load_stream(stream, 0, process, num_processes), 48 // num_processes)
        return Counter(opened), Counter(rows)

    numbers = list(range(files))
    stream = datasets.IterableDataset.from_generator(read, gen_kwargs={"files": numbers})
    monkeypatch.setattr(batches, "encode_pairs", note)
    alone = work(0, 1)
    for num_processes in (2, 4, 8):
        shares = [work(i, num_processes) for i in range(num_processes)]
        for one, parts in zip(alone, zip(*shares, strict=True), strict=True):
            assert sum(parts, Counter()) == one
        assert max(sum(read.values()) for _, read in shares) < 1.5 * sum(alone[1].values()) / num_processes


@pytest.mark.filterwarnings("ignore:This DataLoader will create", FORK)
def test_workers_read_a_stream_ahead(write_stream, load_stream):
    stream = write_stream(count=3)()
    expected = take(load_stream(stream), 48)
    for workers in (1, 3):
        loader = load_stream(stream, 0, 1, 2, dataloader_num_workers=workers)
        assert take(loader, 12) == expected[1:24:2]
        resumed = load_stream(stream, 24, stream_state=copied(loader.state), dataloader_num_workers=workers)
        assert take(resumed, 12) == expected[24:36]


@pytest.mark.parametrize("count", [2, 4])
def test_stream_of_another_number_of_files_is_refused(count, write_stream, load_stream):
    loader = load_stream(write_stream(count=3)())
    take(loader, 1)
    with pytest.raises(UserError, match=f"^The stream has {count} files, but had 3 when the checkpoint was saved"):
        load_stream(write_stream(count=count)(), stream_state=loader.state)


def test_state_of_an_earlier_version_is_refused(write_stream, load_stream):
    with pytest.raises(UserError, match="^The checkpoint is of an earlier version, which read streams in another"):
        load_stream(write_stream()(), stream_state={"epoch": 0, "pool": 3, "batch": 120, "files": 1})


def test_files_of_a_stream_are_read_in_another_order_by_each_seed_and_epoch(write_stream, load_stream):
    """By other lanes in each epoch."""
    usable = [pair for pair in FEW if pair[0] and len(pair[1]) < 90]
    stream = write_stream(usable, 11)()
    files = {source: file for file in range(11) for source in next(iter(stream.shard(11, file).batch(999)))["source"]}
    orders = {}
    for seed in (1, 2):
        lanes = load_stream(stream, seed=seed).dataset
        for lane in range(batches.LANES):
            for state, pool, _ in itertools.takewhile(lambda pool: pool[0]["epoch"] < 8, lanes.pools(lane)):
                orders.setdefault((seed, state["epoch"]), {}).setdefault(lane, []).extend(pool)
    for found in orders.values():
        read = {lane: [files[pair["source"]] for pair in pairs] for lane, pairs in found.items()}
        order = [file for lane in sorted(read) for file, _ in itertools.groupby(read[lane])]
        assert sorted(order) == list(range(11))  # each at once, by one lane
        found["order"] = order
    assert len({tuple(found["order"]) for found in orders.values()}) == 16
    first = [{files[pair["source"]] for pair in orders[1, epoch][0]} for epoch in range(8)]
    assert set.union(*first) == set(range(11))


def test_pools_of_a_stream_double_up_to_the_last_size(tokenizer, write_stream, monkeypatch):
    small_pools(16, 50, monkeypatch)
    monkeypatch.setattr(batches, "TABLE_SIZE", 1)
    pairs = [pair for pair in PAIRS if pair[0] and len(pair[1]) < 90]
    lanes = load(write_stream(pairs)(), tokenizer).dataset
    sizes = {}
    for state, pool, _ in itertools.takewhile(lambda pool: pool[0]["epoch"] < 6, lanes.pools(0)):
        sizes.setdefault(state["epoch"], []).append(len(pool))
    assert all(8 <= first <= 16 for first, *_ in sizes.values()) and len({first for first, *_ in sizes.values()}) > 2
    for first, *others in sizes.values():
        assert others[:-1] == [min(first << number, 50) for number in range(1, len(others))]


def test_lanes_without_a_usable_pair_in_an_epoch_read_on(load_stream):
    """A stream of a single pair gives each lane that pair in one epoch of eight."""
    stream = text_dataset([("a dog", "ein Hund")]).to_iterable_dataset()
    loader = load_stream(stream)
    assert len(set(map(str, take(loader, 32)))) == 1
    assert {state["epoch"] for state in loader.state} == set(range(24, 32))


@pytest.mark.filterwarnings(FORK)
@pytest.mark.parametrize("workers", [0, 1])
def test_stream_without_usable_pairs_is_refused(workers, tokenizer):
    stream = text_dataset([(None, "b")]).to_iterable_dataset()
    with pytest.raises(UserError, match="The stream has no usable pair"):
        next(iter(load(stream, tokenizer, dataloader_num_workers=workers)))


# --------------------------------------------------------------------------------------------------------- BPE-dropout


@pytest.mark.filterwarnings("ignore:This DataLoader will create", FORK)
@pytest.mark.parametrize("workers", [0, 2])
def test_bpe_dropout_changes_tokens_and_not_texts(source, tokenizer, workers):
    """Nor their order, which workers keep."""

    def decode(batches):
        return [[tuple(tokenizer.batch_decode(pair, skip_special_tokens=True)) for pair in batch] for batch in batches]

    plain = take(load(source, tokenizer), 40)
    varied = take(load(source, tokenizer, bpe_dropout=0.5, dataloader_num_workers=workers), 40)
    assert decode(varied) == decode(plain)
    assert sum(a == b for a, b in zip(plain, varied, strict=True)) < 4
    assert all(ids[-1] == tokenizer.eos_token_id for batch in varied for pair in batch for ids in pair)
    by_text: dict[tuple, set] = {}
    for pair, text in zip(itertools.chain(*varied), itertools.chain(*decode(varied)), strict=True):
        by_text.setdefault(text, set()).add(pair)
    assert np.mean([len(found) for found in by_text.values()]) > 1.5  # other tokens in each epoch


def test_bpe_dropout_respects_the_length_limits(tokenized, tokenizer):
    """A side that would be too long keeps its tokens without dropout."""
    short = tokenized.filter(lambda pair: pair["source_length"] <= 14 and pair["target_length"] <= 19)
    assert len(short) > 15
    plain = [tuple(map(tuple, (pair["input_ids"], pair["labels"]))) for pair in short]
    sources, targets = ({pair[side] for pair in plain} for side in (0, 1))
    limits = {"max_source_length": 14, "max_target_length": 19}
    found = list(itertools.chain(*take(load(short, tokenizer, bpe_dropout=0.5, **limits), 60)))
    assert all(len(source) <= 14 and len(target) <= 19 for source, target in found)
    kept = sum(source in sources for source, _ in found), sum(target in targets for _, target in found)
    assert all(3 < count < len(found) for count in kept)
