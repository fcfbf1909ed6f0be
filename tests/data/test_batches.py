"""Batches in a repeatable order that any of them can be found again in. Run: pytest tests/test_batches.py"""

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from helpers import text_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vanilla_transformer.data import batches
from vanilla_transformer.data.batches import (
    PairCollator,
    TokenBatchSampler,
    evaluation_batches,
    fill_batches,
    lengths_of,
    padding_fraction,
    plan_batches,
    training_batches,
)
from vanilla_transformer.data.pairs import load_pairs, tokenize_pairs
from vanilla_transformer.data.tokenizer import BpeDropout, train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.arguments import parse_options

# ------------------------------------------------------------------------------------------------------ order of pairs


@pytest.fixture
def lengths():
    """Source and target lengths of 2,000 pairs as sentences have them."""
    random = np.random.default_rng(0)
    source = np.clip(random.gamma(3, 6, 2000), 2, 100).astype(np.int32)
    target = np.clip(source * random.uniform(0.7, 1.4, 2000), 2, 120).astype(np.int32)
    return source, target


def plain(plan) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in plan]


@pytest.fixture(params=[2**16, 300], ids=["one pool", "several pools"])
def pools(request, monkeypatch):
    monkeypatch.setattr(batches, "POOL_SIZE", request.param)


@pytest.mark.parametrize("max_tokens", [50, 400, 10**6])
def test_an_epoch_has_every_pair_once_within_the_budget(lengths, max_tokens, pools):
    plan = plan_batches(*lengths, max_tokens, 1, 0)
    assert sorted(itertools.chain(*plain(plan))) == list(range(2000))
    longest = np.maximum(*lengths)
    for batch in plan:
        assert len(batch) * longest[batch].max() <= max_tokens or len(batch) == 1
    # A pair is alone only where it must be: longer than half of the budget, or the rest of a pool.
    alone = [batch for batch in plan if len(batch) == 1 and longest[batch].max() <= max_tokens / 3]
    assert len(alone) <= np.ceil(2000 / batches.POOL_SIZE)


def test_the_order_is_a_pure_function_of_seed_epoch_and_part(lengths, pools):
    plans = {}
    for key in itertools.product([1, 2], [0, 1, 2], [0, 1]):
        np.random.seed(sum(key))  # what the global generator is at does not matter
        torch.manual_seed(key[1])
        plans[key] = plain(plan_batches(*lengths, 400, *key))
        assert plain(plan_batches(*lengths, 400, *key)) == plans[key]
    orders = [str(plan) for plan in plans.values()]
    assert len(set(orders)) == len(orders)
    # Not only the batches' order changes: other pairs come together.
    sets = [{frozenset(batch) for batch in plan} for plan in plans.values()]
    assert all(len(a & b) < len(a) / 2 for a, b in itertools.combinations(sets, 2))


def test_batches_do_not_come_sorted_by_length(lengths, pools):
    means = [np.maximum(*lengths)[batch].mean() for batch in plan_batches(*lengths, 400, 1, 0)]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_little_padding(lengths):
    planned = plan_batches(*lengths, 400, 1, 0)
    random = np.array_split(np.random.default_rng(0).permutation(2000), len(planned))
    assert padding_fraction(*lengths, planned) < 0.15
    assert padding_fraction(*lengths, random) > 2.5 * padding_fraction(*lengths, planned)


def test_the_padding_is_that_of_the_tensors():
    source, target = np.array([3, 1, 2, 5]), np.array([1, 4, 2, 2])
    plan = [np.array([0, 1]), np.array([2]), np.array([3])]
    collate = PairCollator(word_tokenizer())
    pairs = [{"input_ids": [3] * s, "labels": [3] * t} for s, t in zip(source, target, strict=True)]
    tensors = [collate([pairs[i] for i in batch]) for batch in plan]
    places = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in tensors)
    assert places == 14 + 4 + 7
    assert padding_fraction(source, target, plan) == pytest.approx(1 - 20 / places)


def take(sampler, count: int) -> list:
    return list(itertools.islice(sampler, count))


def sampler(lengths, *start_and_skipped, process_index=0, num_processes=1) -> TokenBatchSampler:
    return TokenBatchSampler(
        *lengths, 400, 1, *start_and_skipped, process_index=process_index, num_processes=num_processes
    )


def shares(lengths, num_processes: int, *start_and_skipped) -> list[TokenBatchSampler]:
    return [
        sampler(lengths, *start_and_skipped, process_index=i, num_processes=num_processes)
        for i in range(num_processes)
    ]


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_processes_share_out_the_same_batches(lengths, num_processes):
    sizes = [len(plan_batches(*lengths, 400, 1, epoch)) for epoch in range(2)]
    count = sum(sizes) + 30  # into the third epoch
    expected = take(sampler(lengths), count)
    assert [number for number, _ in expected] == list(range(count))
    dealt = [take(share, count) for share in shares(lengths, num_processes)]
    assert [batch for turn in zip(*dealt, strict=True) for batch in turn][:count] == expected
    for epoch, start in enumerate([0, sizes[0], sum(sizes)]):
        plan = plain(plan_batches(*lengths, 400, 1, epoch))
        found = [batch for _, batch in expected[start : start + len(plan)]]
        assert found == plan[: len(found)] and len(found) >= 30


@pytest.mark.parametrize("num_processes", [1, 2])
def test_starting_at_an_offset_is_the_same_stream(lengths, num_processes):
    size = len(plan_batches(*lengths, 400, 1, 0))
    steps = [1, size // num_processes, size // num_processes + 1, 2 * size // num_processes + 3]
    for index, whole in enumerate(shares(lengths, num_processes)):
        whole = take(whole, max(steps) + 20)
        for step in steps:
            resumed = shares(lengths, num_processes, step * num_processes)[index]
            assert take(resumed, 20) == whole[step : step + 20]


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 6])
def test_skipped_batches_are_left_out_and_nothing_else_changes(lengths, num_processes, start):
    size = len(plan_batches(*lengths, 400, 1, 0))
    skipped = {0, 5, 6, 7, 8, size - 1, size, size + 10}
    count = size + 24
    expected = [item for item in take(sampler(lengths), count) if item[0] >= start and item[0] not in skipped]
    assert len(expected) == count - start - len([number for number in skipped if number >= start])
    found = []
    for share in shares(lengths, num_processes, start, frozenset(skipped)):
        found += itertools.takewhile(lambda item: item[0] < count, share)
    assert sorted(found) == expected


def test_fill_batches_keeps_a_giant_apart():
    lengths = np.array([3, 50, 3, 3, 3, 10])
    assert plain(fill_batches(lengths, lengths, 12)) == [[0, 2, 3, 4], [5], [1]]


# ------------------------------------------------------------------------------------------------------------- batches


def word_tokenizer(pad: str = "<p>", padding_side: str = "right") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"<p>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": pad, "eos_token": "</s>", "padding_side": padding_side}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


PAIR = [{"input_ids": [2, 3, 1], "labels": [3, 1]}, {"input_ids": [2, 1], "labels": [2, 2, 2, 1]}]


@pytest.mark.parametrize("pad, number", [("<p>", 0), ("</s>", 1)], ids=["pad", "pad is eos"])
def test_collator(pad, number):
    batch = PairCollator(word_tokenizer(pad))(PAIR)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[2, 3, 1], [2, 1, number]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[3, 1, -100, -100], [2, 2, 2, 1]],
    }
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert PAIR[0] == {"input_ids": [2, 3, 1], "labels": [3, 1]}  # the dataset is left alone


def test_labels_begin_at_the_first_position_whatever_side_the_tokenizer_pads():
    """The decoder reads them shifted by one, from position 0 on, and has no mask of its own."""
    batch = PairCollator(word_tokenizer(padding_side="left"))(PAIR)
    assert batch["labels"].tolist() == [[3, 1, -100, -100], [2, 2, 2, 1]]


def options(**kwargs) -> SimpleNamespace:
    defaults = {"seed": 1, "per_device_train_max_tokens": 60, "dataloader_num_workers": 0, "bpe_dropout": 0.0}
    defaults |= {"max_source_length": 99, "max_target_length": 99}
    return SimpleNamespace(**{**defaults, **kwargs})


def as_pairs(batch: dict) -> list[tuple]:
    """The token ids of a batch without padding."""
    sources = [
        ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return [(tuple(s), tuple(t[t != -100].tolist())) for s, t in zip(sources, batch["labels"], strict=True)]


def pairs_in(loader, count: int) -> list[list[tuple]]:
    """The token ids of the next batches."""
    return [as_pairs(batch) for batch in itertools.islice(loader, count)]


TEXTS = [(f"a dog {'x ' * (i % 7)}{i}", f"ein Hund {'y ' * (i % 5)}{i}") for i in range(50)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([f"a dog {i} ein Hund für {i}" for i in range(40)], 280)


@pytest.fixture(scope="module")
def tokenized(tokenizer):
    return tokenize_pairs(text_dataset(TEXTS), tokenizer, 99, 99)[0]


@pytest.fixture
def small_pools(monkeypatch):
    """Pools of a stream of 4 to 8, 8 to 16, and then 16 pairs."""
    monkeypatch.setattr(batches, "FIRST_STREAM_POOL", 8)
    monkeypatch.setattr(batches, "LAST_STREAM_POOL", 16)


@pytest.fixture(params=["whole", "streamed", "streamed in small pools"])
def source(request, tokenized):
    if request.param == "streamed in small pools":
        request.getfixturevalue("small_pools")
    return tokenized if request.param == "whole" else tokenized.to_iterable_dataset()


def test_training_batches(source, tokenized, tokenizer):
    """Every pair once an epoch, within the budget, from an offset as from the beginning, dealt to processes."""
    everything = {(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in tokenized}
    stream = pairs_in(training_batches(source, tokenizer, options()), 60)
    epochs, seen = [[]], set()
    for batch in stream:
        assert not seen & set(batch)
        seen |= set(batch)
        epochs[-1].append(batch)
        assert len(batch) * max(len(side) for pair in batch for side in pair) <= 60
        if seen == everything:
            seen = set()
            epochs.append([])
    assert len(epochs) > 3  # so that an epoch ended with every pair seen, and the next began
    assert epochs[0] != epochs[1]
    assert pairs_in(training_batches(source, tokenizer, options(seed=2)), 60) != stream

    for start in [1, len(epochs[0]) - 1, len(epochs[0]), len(epochs[0]) + 3]:
        assert pairs_in(training_batches(source, tokenizer, options(), start), 9) == stream[start : start + 9]
    for num_processes in [2, 3]:
        share = {"num_processes": num_processes, "start": 6}
        dealt = [
            pairs_in(training_batches(source, tokenizer, options(), process_index=i, **share), 10)
            for i in range(num_processes)
        ]
        found = [batch for turn in zip(*dealt, strict=True) for batch in turn]
        assert found == stream[6 : 6 + 10 * num_processes]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_skipped_training_batches(source, tokenizer, num_processes):
    """For one process or several, the batches of steps that are left out are missing, and the rest is as it was."""
    stream = pairs_in(training_batches(source, tokenizer, options()), 40)
    skipped = frozenset({0, 1, 6, 7, 8, 9, 30, 31})
    expected = [batch for number, batch in enumerate(stream) if number not in skipped]
    share = {"skipped": skipped, "num_processes": num_processes}
    dealt = [
        pairs_in(training_batches(source, tokenizer, options(), process_index=i, **share), 32 // num_processes)
        for i in range(num_processes)
    ]
    assert [batch for turn in zip(*dealt, strict=True) for batch in turn] == expected


def pairs_of(loader, number: int) -> list[int]:
    return loader.pairs_of(range(number, number + 1))


def test_the_pairs_of_a_batch_are_found_by_its_number(source, tokenized, tokenizer):
    """In a whole dataset of any batch; in a stream of those that were just read, as places in its epoch."""
    loader = training_batches(source, tokenizer, options(), 3)
    for number, batch in zip(range(3, 50), loader, strict=False):
        pairs = [tokenized[i] for i in pairs_of(loader, number)]
        assert as_pairs(batch) == [(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in pairs]


def test_an_epoch_is_counted(tokenized, tokenizer):
    loader = training_batches(tokenized, tokenizer, options(), 5, frozenset({2}), process_index=1, num_processes=2)
    assert plain(loader.epoch()) == plain(plan_batches(*lengths_of(tokenized), 60, 1, 0))
    assert sorted(itertools.chain(*plain(loader.epoch()))) == list(range(len(tokenized)))


def test_lengths_are_those_of_the_token_ids(tokenized):
    some = tokenized.select([7, 3, 40])
    for found, side in zip(lengths_of(some), ("input_ids", "labels"), strict=True):
        assert found.dtype == np.int32
        assert found.tolist() == [len(tokenized[i][side]) for i in (7, 3, 40)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("bpe_dropout", [0.0, 0.5])
def test_worker_processes_keep_the_order(tokenized, tokenizer, bpe_dropout):
    expected = pairs_in(training_batches(tokenized, tokenizer, options(bpe_dropout=bpe_dropout), 4), 5)
    args = options(dataloader_num_workers=2, bpe_dropout=bpe_dropout)
    assert pairs_in(training_batches(tokenized, tokenizer, args, 4), 5) == expected


def test_evaluation_batches_hold_every_pair_once(tokenized, tokenizer):
    everything = sorted((tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in tokenized)
    for num_processes in [1, 2, 3, 60]:
        dealt = [evaluation_batches(tokenized, tokenizer, 60, i, num_processes) for i in range(num_processes)]
        assert sorted(pair for share in dealt for batch in share for pair in as_pairs(batch)) == everything


# ------------------------------------------------------------------------------------------------------------- streams

# Some are empty and some are too long, so that what is read is not what is handed out.
RAGGED = [
    (
        "" if i % 11 == 3 else f"a dog {'x ' * (i % 7)}{i}",
        "y " * 60 if i % 13 == 5 else f"ein Hund {'y ' * (i % 5)}{i}",
    )
    for i in range(1150)
]
FEW = RAGGED[:260]


def write_files(folder, pairs=FEW, count=3, suffix="jsonl"):
    """Writes a dataset as so many files of unequal lengths."""
    folder.mkdir()
    cuts = [0, *(len(pairs) * (i + 1) ** 2 // (count + 1) ** 2 for i in range(count - 1)), len(pairs)]
    parts = {f"train-{i:05d}": pairs[a:b] for i, (a, b) in enumerate(itertools.pairwise(cuts))}
    for name, part in (parts | {"validation": pairs[:1]}).items():
        rows = text_dataset(part).rename_columns({"source": "en", "target": "de"})
        write = rows.to_parquet if suffix == "parquet" else rows.to_json
        write(folder / f"{name}.{suffix}")


def stream_of(folder, tokenizer, *argv: str):
    """As train.py reads it."""
    given = ["--dataset_name", str(folder), "--streaming", "--max_steps=1", "--source_lang=en", "--target_lang=de"]
    pairs = load_pairs(parse_options([*given, *argv]))["train"]
    return tokenize_pairs(pairs, tokenizer, 40, 40)[0]


@pytest.fixture
def make_stream(tokenizer, tmp_path):
    """make_stream(pairs, number of files) -> a stream of files that are just written."""
    numbers = itertools.count()

    def make(pairs=FEW, count: int = 1):
        folder = tmp_path / f"set {next(numbers)}"
        write_files(folder, pairs, count)
        return stream_of(folder, tokenizer)

    return make


def split_up(size: int, monkeypatch) -> SimpleNamespace:
    """Options that make of so many pairs some ten batches an epoch, from about four pools."""
    monkeypatch.setattr(batches, "FIRST_STREAM_POOL", size // 5)
    monkeypatch.setattr(batches, "LAST_STREAM_POOL", size // 3)
    return options(per_device_train_max_tokens=int(1.3 * size))


@pytest.fixture
def args(monkeypatch):
    """[`split_up`] for FEW."""
    return split_up(len(FEW), monkeypatch)


def with_states(loader, epochs: int, start: int = 0) -> tuple[list, list]:
    """The batches from `start` to the first one after so many epochs, and the state before each as it is saved."""
    found, states = [], []
    reader = iter(loader)
    while True:
        states.append(json.loads(json.dumps(loader.state_at(start + len(found)))))
        if states[-1]["epoch"] == epochs:
            return found, states
        found.append(as_pairs(next(reader)))


KINDS = {
    "one file": (RAGGED, 1, "jsonl", []),  # which is read in batches of 1,000; a pool ends in the middle of one
    "three files": (FEW, 3, "jsonl", []),
    "parquet": (FEW, 3, "parquet", []),
    "some of them": (FEW, 3, "jsonl", ["--max_train_samples=230"]),
}


def without_place(states: list[dict]) -> list[dict]:
    """What must be the same; there are several ways to say where in a file a pool begins."""
    return [{key: value for key, value in state.items() if key != "stream"} for state in states]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_from_any_batch(kind, tokenizer, tmp_path, monkeypatch):
    """Of three epochs, as if it had not been stopped: in another process, or in this one after a rollback."""
    pairs, count, suffix, argv = KINDS[kind]
    write_files(tmp_path / "set", pairs, count, suffix)
    args = split_up(len(pairs), monkeypatch)
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # after each look into parquet files

    def loader(stream=None, **where):
        return training_batches(stream or stream_of(tmp_path / "set", tokenizer, *argv), tokenizer, args, **where)

    stream = stream_of(tmp_path / "set", tokenizer, *argv)
    found, states = with_states(loader(stream), 3)
    assert len(found) > 3 * 8 and len({json.dumps(state) for state in states}) > 3 * 3
    everything = {(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in stream}
    assert Counter(pair for batch in found[:-1] for pair in batch) == dict.fromkeys(everything, 3)
    for number, state in list(enumerate(states[:-1]))[:: 9 if pairs is RAGGED else 1]:
        resumed = loader(stream, start=number, state=state)
        assert pairs_in(resumed, min(3, len(found) - number)) == found[number : number + 3]
    # To the end, and from what it has saved on the way.
    for number, later in [(len(found) // 3, len(found) // 2), (len(found) - 12, len(found) - 3)]:
        resumed = loader(start=number, state=states[number])
        again, saved = with_states(resumed, 3, number)
        assert resumed.begin["batch"] > 0 and len(resumed.recent) == 2  # what was before is not read again
        assert (again, without_place(saved)) == (found[number:], without_place(states[number:]))
        assert pairs_in(loader(start=later, state=saved[later - number]), 3) == found[later : later + 3]


@pytest.mark.parametrize("num_processes", [2, 3])
def test_several_processes_go_on_with_the_state_of_one(num_processes, make_stream, tokenizer, args):
    """The state is saved by the first process, when each has read its share of a step."""
    stream = make_stream(count=3)
    expected = pairs_in(training_batches(stream, tokenizer, args), 40)
    skipped = frozenset(range(2 * num_processes, 3 * num_processes))
    steps = [range(a, a + num_processes) for a in range(0, 38 - num_processes, num_processes)]
    steps = [step for step in steps if step[0] not in skipped]

    def shares(start: int = 0, state: dict | None = None) -> list:
        where = {"num_processes": num_processes, "start": start, "state": state, "skipped": skipped}
        return [training_batches(stream, tokenizer, args, process_index=i, **where) for i in range(num_processes)]

    first = shares()[0]
    reader, states = iter(first), []
    for step in steps:
        states.append(json.loads(json.dumps(first.state_at(step[0]))))
        next(reader)
    assert states[-1]["epoch"] > 1
    for i in range(0, len(steps) - 2, 2):
        dealt = [pairs_in(share, 3) for share in shares(steps[i][0], states[i])]
        found = [batch for turn in zip(*dealt, strict=True) for batch in turn]
        assert found == [expected[number] for step in steps[i : i + 3] for number in step]


def read_to_a_later_pool(loader) -> tuple[int, dict, list[dict]]:
    """Reads a stream into its third pool; returns the number of the next batch, its state, and the pool."""
    for number, _, pool in loader.numbered():
        state = loader.recent[-1][0]
        if state["pool"] == 2:
            assert state["epoch"] == 0 and len(pool) > 20
            return number, json.loads(json.dumps(loader.state_at(number))), pool
    raise AssertionError("there is no third pool")


CHANGED = {
    "a word": lambda pairs, i: [*pairs[:i], ("a cat", pairs[i][1]), *pairs[i + 1 :]],
    "a pair is gone": lambda pairs, i: [*pairs[:i], *pairs[i + 1 :]],
    "a pair comes to it": lambda pairs, i: [*pairs[:i], pairs[0], *pairs[i:]],
    "two change places": lambda pairs, i: [*pairs[:i], *pairs[i : i + 2][::-1], *pairs[i + 2 :]],
    "it ends before": lambda pairs, i: pairs[: i // 2],
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_stream_that_has_changed_is_noticed(change, make_stream, tokenizer, args):
    number, state, pool = read_to_a_later_pool(training_batches(make_stream(), tokenizer, args))
    next(iter(training_batches(make_stream(), tokenizer, args, number, state=state)))  # the same again
    place = [source for source, _ in FEW].index(pool[len(pool) // 2]["source"])
    changed = CHANGED[change](FEW, place)
    assert changed != FEW
    with pytest.raises(
        UserError, match=r"^The stream is not the one of the checkpoint: pairs .* have changed\."
    ) as caught:
        next(iter(training_batches(make_stream(changed), tokenizer, args, number, state=state)))
    assert f"pairs {state['pair']:,} and on of its epoch 0" in str(caught.value) or change == "it ends before"


@pytest.mark.parametrize("count", [2, 4])
def test_a_stream_of_other_files_is_noticed(count, make_stream, tokenizer, args):
    number, state, _ = read_to_a_later_pool(training_batches(make_stream(count=3), tokenizer, args))
    with pytest.raises(UserError, match=f"^The stream is not .* made of {count} files, and was of 3"):
        training_batches(make_stream(count=count), tokenizer, args, number, state=state)


def test_what_is_not_read_again_may_have_changed(make_stream, tokenizer, args):
    """A stream is checked where it is read on."""
    found, states = with_states(training_batches(make_stream(), tokenizer, args), 1)
    assert states[-2]["pair"] > 1
    other = make_stream([("a cat", "eine Katze"), *FEW[1:]])
    assert pairs_in(training_batches(other, tokenizer, args, len(found) - 1, state=states[-2]), 1) == found[-1:]


def test_other_pairs_share_a_pool_of_the_stream_in_each_epoch(make_stream, tokenizer, args, monkeypatch):
    monkeypatch.setattr(batches, "FIRST_STREAM_POOL", 120)
    monkeypatch.setattr(batches, "LAST_STREAM_POOL", 120)
    loader = training_batches(make_stream(), tokenizer, args)
    pools: dict[int, set] = {}
    for _, _, pool in loader.numbered():
        epoch = loader.recent[-1][0]["epoch"]
        if epoch == 4:
            break
        pools.setdefault(epoch, set()).add(frozenset(pair["source"] for pair in pool))
    assert len(pools) == 4
    assert all(len(found) >= 2 and len(frozenset.union(*found)) > 200 for found in pools.values())
    assert all(not a & b for a, b in itertools.combinations(pools.values(), 2))


def test_the_pool_before_is_still_known(make_stream, tokenizer, args):
    """Where a log comes some steps after the batch in which something is wrong."""
    loader = training_batches(make_stream(), tokenizer, args)
    places = {}
    for number, _, _ in loader.numbered():
        places[number] = pairs_of(loader, number)
        before, now = [None, *(state for state, _ in loader.recent)][-2:]
        if before is not None:
            known = range(before["batch"], number + 1)
            assert [pairs_of(loader, n) for n in known] == [places[n] for n in known]
            assert pairs_of(loader, before["batch"] - 1) == []
            assert [loader.state_at(n) for n in known] == [before if n < now["batch"] else now for n in known]
        if now["epoch"] == 2:
            break
    assert len(loader.recent) == 2


def test_a_stream_is_read_from_where_it_began_by_each_iterator(make_stream, tokenizer, args):
    loader = training_batches(make_stream(), tokenizer, args, 3)
    assert pairs_in(loader, 20) == pairs_in(loader, 20)


def test_pools_of_a_stream_grow(tokenized, tokenizer):
    """A little is read before the first batch, and it is no constant; later pools are large."""
    loader = training_batches(tokenized.to_iterable_dataset(), tokenizer, options())
    sizes = [[loader.pool_size(epoch, pool) for pool in range(60)] for epoch in range(20)]
    firsts = {row[0] for row in sizes}
    assert len(firsts) > 10 and min(firsts) >= 512 and max(firsts) <= 1024
    assert all(b == min(2 * a, 2**15) for row in sizes for a, b in itertools.pairwise(row))


def test_the_files_of_a_stream_are_shuffled(make_stream, tokenizer, args):
    """By the seed and the epoch, in which they are read in another order."""
    orders = {}
    stream = make_stream(count=4)
    for seed in [1, 2]:
        loader = training_batches(stream, tokenizer, SimpleNamespace(**vars(args) | {"seed": seed}))
        for _, _, pool in loader.numbered():
            epoch = loader.recent[-1][0]["epoch"]
            if epoch == 6:
                break
            orders.setdefault((seed, epoch), pool[0]["source"])
    firsts = [[orders[seed, epoch] for epoch in range(6)] for seed in [1, 2]]
    assert firsts[0] != firsts[1] and min(len(set(row)) for row in firsts) > 1


def test_no_pair_left_in_a_stream(tokenizer):
    stream, _ = tokenize_pairs(text_dataset([(None, "b")]).to_iterable_dataset(), tokenizer, 20, 20)
    with pytest.raises(UserError, match="No usable pair is in the stream"):
        next(iter(training_batches(stream, tokenizer, options())))


# --------------------------------------------------------------------------------------------------------- BPE-dropout


def segmented(
    tokenizer, pairs: list[tuple[str, str]], number: int, dropout: float = 0.5, seed: int = 1
) -> list[tuple]:
    """The pairs of a batch segmented anew, written out: first all sources, then all targets, by one generator."""
    segment, generator = BpeDropout(tokenizer, dropout), np.random.default_rng([seed, number])
    sides = [segment(list(texts), generator) for texts in zip(*pairs, strict=True)]
    return [(tuple(source), tuple(target)) for source, target in zip(*sides, strict=True)]


def test_bpe_dropout_is_a_function_of_seed_and_number(source, tokenized, tokenizer):
    """Whatever was read before, and by however many processes."""
    args = options(bpe_dropout=0.5)
    loader = training_batches(source, tokenizer, args)
    found = []
    for number, batch in zip(range(40), loader, strict=False):
        texts = [TEXTS[i] for i in pairs_of(loader, number)]
        assert as_pairs(batch) == segmented(tokenizer, texts, number)
        found.append(as_pairs(batch))
    plain = pairs_in(training_batches(source, tokenizer, options()), 40)
    decoded = [[tuple(tokenizer.batch_decode(pair, skip_special_tokens=True)) for pair in batch] for batch in found]
    assert decoded == [
        [tuple(tokenizer.batch_decode(pair, skip_special_tokens=True)) for pair in batch] for batch in plain
    ]
    assert sum(a == b for a, b in zip(plain, found, strict=True)) < 4
    assert pairs_in(training_batches(source, tokenizer, args, 17), 9) == found[17:26]
    share = {"num_processes": 3, "skipped": frozenset({6, 7, 8})}
    dealt = [pairs_in(training_batches(source, tokenizer, args, process_index=i, **share), 6) for i in range(3)]
    assert [batch for turn in zip(*dealt, strict=True) for batch in turn] == [*found[:6], *found[9:21]]


def test_a_pair_is_segmented_otherwise_in_each_epoch(tokenized, tokenizer):
    loader = training_batches(tokenized, tokenizer, options(bpe_dropout=0.5))
    ways: dict[int, set] = {}
    for number, batch in zip(range(3 * len(loader.epoch())), loader, strict=False):
        for index, pair in zip(pairs_of(loader, number), as_pairs(batch), strict=True):
            ways.setdefault(index, set()).add(pair)
    assert len(ways) == len(tokenized)
    assert np.mean([len(found) for found in ways.values()]) > 2


def test_bpe_dropout_respects_the_limits(tokenized, tokenizer):
    """What would be too long keeps the segmentation without it, side by side."""
    limits = {"max_source_length": 14, "max_target_length": 19}
    short = tokenized.filter(lambda pair: pair["source_length"] <= 14 and pair["target_length"] <= 19)
    assert len(short) > 15
    loader = training_batches(short, tokenizer, options(bpe_dropout=0.5, **limits))
    kept = [0, 0]
    for number, batch in zip(range(30), loader, strict=False):
        pairs = [short[i] for i in pairs_of(loader, number)]
        free = segmented(tokenizer, [(pair["source"], pair["target"]) for pair in pairs], number)
        for pair, (source, target), found in zip(pairs, free, as_pairs(batch), strict=True):
            expected = tuple(pair["input_ids"]) if len(source) > 14 else source
            assert found == (expected, tuple(pair["labels"]) if len(target) > 19 else target)
            kept = [kept[0] + (len(source) > 14), kept[1] + (len(target) > 19)]
    assert min(kept) > 3
