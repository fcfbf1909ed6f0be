"""Numbered batches: which pairs a batch holds depends on the seed and its number alone."""

import itertools
import json
import multiprocessing
import subprocess
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from datasets import concatenate_datasets
from helpers import text_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from vanilla_transformer.data import batches, stream
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
def tokenized(tokenizer):
    return tokenize_pairs(text_dataset(PAIRS[:50]), tokenizer, 99, 99)[0]


def small_pools(first: int, last: int, monkeypatch):
    """Sets the sizes of pools."""
    for name, size in {"FIRST_POOL": first, "LAST_POOL": last, "TABLE": 2, "SHARDS": 1}.items():
        monkeypatch.setattr(stream, name, size)


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


def take_in_turn(source, tokenizer, num_processes: int, count: int) -> list[list[tuple]]:
    """The token ids of the first batches of a run."""
    shares = [take(load(source, tokenizer, 0, i, num_processes), count // num_processes) for i in range(num_processes)]
    return [batch for turn in zip(*shares, strict=True) for batch in turn]


def test_training_batches(source, tokenizer):
    """Within the budget; the same from any number and, but for streams, for any number of processes."""
    alone = take_in_turn(source, tokenizer, 1, 60)
    assert all(len(batch) * max(len(side) for pair in batch for side in pair) <= 60 for batch in alone)
    assert take(load(source, tokenizer, seed=2), 60) != alone
    for num_processes in [1, 2, 3, 8]:
        expected = take_in_turn(source, tokenizer, num_processes, 48)
        assert (expected == alone[:48]) == (num_processes == 1 or isinstance(source, datasets.Dataset))
        for start, i in itertools.product([1, 15, 16, 17], range(num_processes)):
            first = start + (i - start) % num_processes
            share = load(source, tokenizer, start, i, num_processes)
            assert take(share, 2) == expected[first::num_processes][:2]


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
    expected = take_in_turn(source, tokenizer, 2, 60)
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
