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
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.pairs import PAIR_FEATURES, load_pairs, tokenize_pairs
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
        monkeypatch.setattr(batches, "FIRST_POOL", 8)
        monkeypatch.setattr(batches, "LAST_POOL", 16)
    return tokenized if request.param == "map-style" else tokenized.to_iterable_dataset()


def test_training_batches(source, tokenized, tokenizer):
    """Every pair once an epoch, within the budget; the same from any number and for any number of processes."""
    everything = {(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in tokenized}
    loader = load(source, tokenizer)
    stream = take(loader, 60)
    epochs, seen = [[]], set()
    for batch in stream:
        assert not seen & set(batch)
        seen |= set(batch)
        epochs[-1].append(batch)
        assert len(batch) * max(len(side) for pair in batch for side in pair) <= 60
        if seen == everything:
            seen = set()
            epochs.append([])
    assert len(epochs) > 3
    assert epochs[0] != epochs[1]
    assert take(load(source, tokenizer, seed=2), 60) != stream

    for start in [1, len(epochs[0]) - 1, len(epochs[0]), len(epochs[0]) + 3]:
        assert take(load(source, tokenizer, start), 9) == stream[start : start + 9]
    for num_processes in [2, 3]:
        share = (source, tokenizer, 6)
        dealt = [take(load(*share, i, num_processes), 10) for i in range(num_processes)]
        assert [batch for turn in zip(*dealt, strict=True) for batch in turn] == stream[6 : 6 + 10 * num_processes]


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


KINDS_OF_DATASETS = {
    "one file": lambda dataset: dataset,
    "selected": lambda dataset: dataset.select([7, 3, 3, *range(20, 30)]),
    "a slice": lambda dataset: dataset.select(range(5, 45)),
    "several files": lambda dataset: concatenate_datasets([dataset.select(range(9)), dataset, dataset.take(1)]),
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
    assert len(set(np.diff(saved["epochs"]))) > 1
    start = saved["epochs"][16] + num_processes
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
    """For a message about them: those of all processes, also from an earlier pool or epoch."""
    expected = take(load(source, tokenizer), 60)
    loader = load(source, tokenizer, 4, 1, 2)
    take(loader, 28)
    for number in (4, 5, 30, 58, 59):
        pairs = loader.pairs(number, 1)
        assert [(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in pairs] == expected[number]
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

    def write(pairs=FEW, count: int = 1, suffix: str = "jsonl"):
        folder = tmp_path / str(count)
        folder.mkdir()
        cuts = [0, *(len(pairs) * (i + 1) ** 2 // (count + 1) ** 2 for i in range(count - 1)), len(pairs)]
        parts = {f"train-{i:05d}": pairs[a:b] for i, (a, b) in enumerate(itertools.pairwise(cuts))}
        for name, part in (parts | {"validation": pairs[:1]}).items():
            rows = text_dataset(part)
            (rows.to_parquet if suffix == "parquet" else rows.to_json)(folder / f"{name}.{suffix}")

        def open_stream(**options):
            train = load_pairs(data_options(dataset_name=folder, streaming=True, **options))["train"]
            return tokenize_pairs(train, tokenizer, 40, 40)[0]

        return open_stream

    return write


def small_pools(size: int, monkeypatch) -> int:
    """The tokens of a batch for about ten batches an epoch from `size` pairs, in about four pools."""
    monkeypatch.setattr(batches, "FIRST_POOL", size // 5)
    monkeypatch.setattr(batches, "LAST_POOL", size // 3)
    return int(1.3 * size)


@pytest.fixture
def max_tokens(monkeypatch):
    return small_pools(len(FEW), monkeypatch)


def take_with_states(loader, epochs: int, start: int = 0) -> tuple[list, list]:
    """The batches from `start` to the first one after `epochs` epochs, and the state saved before each."""
    found, states = [], []
    reader = iter(loader)
    while True:
        states.append(json.loads(json.dumps(loader.state)))
        if states[-1]["epoch"] == epochs:
            return found, states
        found.append(as_pairs(next(reader)))


KINDS = {
    "one file": (RAGGED, 1, "jsonl", {}),  # datasets reads 1,000 lines at once; a pool ends in the middle
    "three files": (FEW, 3, "jsonl", {}),
    "parquet": (FEW, 3, "parquet", {}),
    "some of them": (FEW, 3, "jsonl", {"max_train_samples": 230}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stream_resumes_from_any_batch(kind, write_stream, tokenizer, monkeypatch):
    *files, limits = KINDS[kind]
    open_stream, max_tokens = write_stream(*files), small_pools(len(files[0]), monkeypatch)
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # after each read of a parquet file

    def loader(stream=None, start: int = 0, state: dict | None = None):
        options = {"max_tokens": max_tokens, "stream_state": state}
        return load(stream or open_stream(**limits), tokenizer, start, **options)

    stream = open_stream(**limits)
    found, states = take_with_states(loader(stream), 3)
    assert len(found) > 3 * 8 and len({json.dumps(state) for state in states}) > 3 * 3
    everything = {(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in stream}
    assert Counter(pair for batch in found[:-1] for pair in batch) == dict.fromkeys(everything, 3)
    for number, state in list(enumerate(states[:-1]))[:: 9 if files[0] is RAGGED else 1]:
        resumed = take(loader(stream, number, state), min(3, len(found) - number))
        assert resumed == found[number : number + 3]
    # To the end, and from a state that a resumed run saved.
    for number, later in [(len(found) // 3, len(found) // 2), (len(found) - 12, len(found) - 3)]:
        resumed = loader(start=number, state=states[number])
        assert resumed.state["batch"] > 0  # earlier pools are not read again
        again, saved = take_with_states(resumed, 3, number)
        assert again == found[number:]
        assert take(loader(start=later, state=saved[later - number]), 3) == found[later : later + 3]


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 3])
def test_several_processes_resume_a_stream_from_the_state_of_the_first(
    num_processes, write_stream, tokenizer, max_tokens
):
    stream = write_stream(count=3)()
    expected = take(load(stream, tokenizer, max_tokens=max_tokens), 40)
    first = load(stream, tokenizer, 0, 0, num_processes, max_tokens=max_tokens)
    reader = iter(first)
    for start in range(0, 36 - 3 * num_processes, num_processes):
        rest = {"max_tokens": max_tokens, "stream_state": json.loads(json.dumps(first.state))}
        next(reader)
        loaders = [load(stream, tokenizer, start, i, num_processes, **rest) for i in range(num_processes)]
        dealt = [take(loader, 3) for loader in loaders]
        found = [batch for turn in zip(*dealt, strict=True) for batch in turn]
        assert found == expected[start : start + 3 * num_processes]
    assert first.state["epoch"] > 1


@pytest.mark.parametrize("count", [2, 4])
def test_stream_of_another_number_of_files_is_refused(count, write_stream, tokenizer, max_tokens):
    state = load(write_stream(count=3)(), tokenizer, max_tokens=max_tokens).state
    with pytest.raises(UserError, match=f"^The stream has {count} files, but had 3 when the checkpoint was saved"):
        load(write_stream(count=count)(), tokenizer, max_tokens=max_tokens, stream_state=state)


def test_files_of_a_stream_are_read_one_after_another_in_shuffled_order(write_stream, tokenizer, max_tokens):
    """In parallel they would take datasets a thread for each pair."""
    stream = write_stream([pair for pair in FEW if pair[0] and len(pair[1]) < 90], 4)()
    files = {source: shard for shard in range(4) for source in next(iter(stream.shard(4, shard).batch(999)))["source"]}
    orders: dict[int, list] = {1: [], 2: []}
    for seed, found in orders.items():
        loader = load(stream, tokenizer, max_tokens=max_tokens, seed=seed)
        pools = ((loader.state["epoch"], pool) for pool, _ in loader.pools())
        for _, group in itertools.islice(itertools.groupby(pools, key=lambda pair: pair[0]), 6):
            read = [files[pair["source"]] for _, pool in group for pair in pool]
            found.append([file for file, _ in itertools.groupby(read)])
    assert all(sorted(order) == [0, 1, 2, 3] for found in orders.values() for order in found)
    assert orders[1] != orders[2] and all(any(order != found[0] for order in found) for found in orders.values())


def test_pools_of_a_stream_double_up_to_the_last_size(tokenizer, write_stream, monkeypatch):
    monkeypatch.setattr(batches, "FIRST_POOL", 16)
    monkeypatch.setattr(batches, "LAST_POOL", 50)
    loader = load(write_stream([pair for pair in FEW if pair[0] and len(pair[1]) < 90])(), tokenizer)
    sizes = {}
    for pool, _ in itertools.takewhile(lambda _: loader.state["epoch"] < 6, loader.pools()):
        sizes.setdefault(loader.state["epoch"], []).append(len(pool))
    assert all(8 <= first <= 16 for first, *_ in sizes.values()) and len({first for first, *_ in sizes.values()}) > 2
    for first, *others in sizes.values():
        assert others[:-1] == [min(first << number, 50) for number in range(1, len(others))]


def test_the_last_pools_hold_32768_pairs(tokenized, tokenizer):
    loader = load(tokenized.to_iterable_dataset(), tokenizer)
    assert len(loader.read_pool(iter(range(10**5)), loader.state | {"pool": 9})) == 2**15
    assert 2**9 <= len(loader.read_pool(iter(range(10**5)), loader.state)) <= 2**10


def test_stream_without_usable_pairs_is_refused(tokenizer):
    stream, _ = tokenize_pairs(text_dataset([(None, "b")]).to_iterable_dataset(), tokenizer, 20, 20)
    with pytest.raises(UserError, match="The stream has no usable pair"):
        next(iter(load(stream, tokenizer)))


# --------------------------------------------------------------------------------------------------------- BPE-dropout


@pytest.mark.filterwarnings("ignore:This DataLoader will create", FORK)
@pytest.mark.parametrize("workers", [0, 2])
def test_bpe_dropout_changes_tokens_and_not_texts(source, tokenizer, workers):
    """Nor their order, which workers keep."""
    if workers and isinstance(source, datasets.IterableDataset):
        pytest.skip("a stream has no workers")

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
