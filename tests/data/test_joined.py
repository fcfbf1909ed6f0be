"""Training pairs that are joined two to four at a time."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import text_dataset

from vanilla_transformer.data import joined
from vanilla_transformer.data.batches import PairColumns, training_batches
from vanilla_transformer.data.encoding import tokenize_pairs
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.tokenizer import train_tokenizer

NOUNS = ["dog", "cat", "man", "girl", "bird", "horse", "cow", "fish"]
PAIRS = [(f"The {noun} sees {other}s.", f"{other.upper()}S {noun.upper()}!") for noun in NOUNS for other in NOUNS]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(itertools.chain(*PAIRS), 400)


@pytest.fixture(scope="module")
def tokenized(tokenizer):
    return tokenize_pairs(text_dataset(PAIRS), tokenizer, 40, 40)[0]


def load(
    tokenized,
    tokenizer,
    share: float,
    start: int = 0,
    process_index: int = 0,
    num_processes: int = 1,
    max_tokens: int = 120,
    **options,
):
    options = DataOptions(dataset_name="x", joined_pairs=share, **options)
    return training_batches(tokenized, tokenizer, options, max_tokens, 1, start, process_index, num_processes)


def texts(tokenizer, batch: dict) -> list[tuple[str, str]]:
    sides = (batch["input_ids"], batch["labels"].clamp(min=0))
    return list(zip(*(tokenizer.batch_decode(side, skip_special_tokens=True) for side in sides), strict=True))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_each_pair_is_in_one_entry_of_an_epoch(share):
    lengths = (np.full(1001, 9), np.full(1001, 5))
    entries = joined.draw_entries(lengths, (60, 60), share, seed=1, epoch=2)
    assert sorted(entries[entries >= 0]) == list(range(1001)) and (entries[:, 0] >= 0).all()
    sizes = Counter((entries >= 0).sum(axis=1).tolist())
    assert 1001 - sizes[1] == pytest.approx(share * 1001, abs=4)
    shares = {count: sizes[count] / max(sizes[2] + sizes[3] + sizes[4], 1) for count in (2, 3, 4)}
    assert share < 0.5 or shares == pytest.approx({2: 0.75, 3: 0.15, 4: 0.1}, abs=0.05)


def test_other_pairs_are_joined_in_each_epoch_and_with_each_seed():
    keys = [(1, 0), (1, 1), (2, 0)]
    lengths = (np.full(200, 9), np.full(200, 5))
    drawn = [joined.draw_entries(lengths, (40, 40), 0.5, *key) for key in keys]
    sets = [{tuple(entry) for entry in entries if entry[1] >= 0} for entries in drawn]
    assert all(len(a & b) < 5 for a, b in itertools.combinations(sets, 2))
    assert np.array_equal(drawn[0], joined.draw_entries(lengths, (40, 40), 0.5, *keys[0]))


def test_no_joined_pair_exceeds_the_limits():
    lengths = tuple(np.random.default_rng(0).integers(2, 30, (2, 500)))
    entries = joined.draw_entries(lengths, (60, 50), 0.8, seed=1, epoch=0)
    assert sorted(entries[entries >= 0]) == list(range(500)) and (entries[:, 2] >= 0).sum() > 10
    for side, limit in zip(lengths, (60, 50), strict=True):
        assert joined.lengths_of_entries(side, entries[entries[:, 1] >= 0]).max() <= limit


def join_in_all_ways(sources: list[str], targets: list[str]) -> Iterator[tuple[str, str]]:
    """With each joint and many fillings."""
    for seed, joint in itertools.product(range(300), range(len(joined.JOINTS))):
        yield joined.join_pairs(sources, targets, joint, np.random.default_rng(seed))


def test_several_sentences_are_joined_in_their_order_in_one_way():
    sources, targets = ["One.", "Two.", "Three.", "Four."], ["Eins.", "Zwei.", "Drei.", "Vier."]
    found = list(join_in_all_ways(sources, targets))
    for source, target in found:
        assert re.findall("one|two|three|four", source.lower()) == ["one", "two", "three", "four"]
        assert re.findall("Eins|Zwei|Drei|Vier", target) == ["Eins", "Zwei", "Drei", "Vier"]
    assert {
        ("One.Two.Three.Four.", "Eins. Zwei. Drei. Vier."),
        ("One two three four.", "Eins. Zwei. Drei. Vier."),
    } <= {*found}
    assert len({*found}) > 30


@pytest.mark.parametrize("middle", ["?", "...", "。"])
def test_a_sentence_of_stops_alone_is_not_lost(middle):
    for pair in join_in_all_ways(["One.", middle, "Three."], ["Eins.", middle, "Drei."]):
        assert all(middle in text[4:] for text in pair)


def test_chinese_sentences_are_joined_without_a_space():
    found = {target for _, target in join_in_all_ways(["Hi.", "Bye."], ["你好。", "再见。"])}
    assert "你好。再见。" in found and "你好。 再见。" not in found


def nouns(texts: Iterable[str]) -> Counter:
    """How often each noun is in the texts, in small letters or capitals."""
    return Counter(noun for text in texts for noun in NOUNS for _ in range(text.lower().count(noun)))


def test_batches_have_each_sentence_once_alone_or_joined(tokenized, tokenizer):
    """Within the budget of tokens, and with both sides alike."""
    loader, found = load(tokenized, tokenizer, 0.5), []
    for batch in itertools.islice(loader, len(loader.epoch())):
        assert max(batch["input_ids"].numel(), batch["labels"].numel()) <= 120
        found += texts(tokenizer, batch)
    lengths = Counter(sum(nouns([target]).values()) // 2 for _, target in found)
    assert 2 * lengths[2] + 3 * lengths[3] + 4 * lengths[4] == pytest.approx(32, abs=4) and min(lengths.values()) >= 2
    assert all(nouns([source]) == nouns([target]) for source, target in found)
    assert nouns(target for _, target in found) == nouns(target for _, target in PAIRS)


def test_entries_are_no_longer_than_a_batch(tokenized, tokenizer, capsys):
    loader = load(tokenized, tokenizer, 0.5, max_tokens=11)
    batches = list(itertools.islice(loader, len(loader.epoch())))
    assert max(max(batch["input_ids"].numel(), batch["labels"].numel()) for batch in batches) <= 11
    assert capsys.readouterr().out == (
        "warning: --joined_pairs 0.5 joins only 8 of 64 pairs; others would be longer than --max_source_length, "
        "--max_target_length or a batch.\n"
    )
    load(tokenized, tokenizer, 0.5)
    assert capsys.readouterr().out == ""


def test_a_resumed_run_and_other_processes_have_the_same_joints(tokenized, tokenizer):
    batches = list(itertools.islice(load(tokenized, tokenizer, 0.5), 60))
    for start, count in [(0, 2), (7, 1), (31, 2)]:
        loaders = [iter(load(tokenized, tokenizer, 0.5, start, index, count)) for index in range(count)]
        for number in range(start, start + 8):
            batch = next(loaders[number % count])
            assert all(torch.equal(batch[name], tensor) for name, tensor in batches[number].items())


def test_bpe_dropout_varies_joined_pairs_too(tokenized, tokenizer):
    loader = load(tokenized, tokenizer, 0.5, bpe_dropout=0.5)
    plain = load(tokenized, tokenizer, 0.5)
    for varied, batch in itertools.islice(zip(loader, plain, strict=False), 9):
        assert texts(tokenizer, varied) == texts(tokenizer, batch)
        assert varied["attention_mask"].sum() > batch["attention_mask"].sum()


def test_ids_are_concatenated_where_the_joints_take_too_many_tokens(tokenized, tokenizer, monkeypatch):
    pairs = joined.JoinedPairs(
        PairColumns(tokenized), tokenized.select_columns(["source", "target"]), tokenizer, seed=1
    )
    entries = [[5, 1, 2, -1], [3, -1, -1, -1]]
    usual = pairs[entries]
    monkeypatch.setattr(joined, "MARGINS", joined.MARGINS - 100)
    columns = pairs[entries]
    for side in ("input_ids", "labels"):
        ids = tokenized[side]
        assert columns[side][0].tolist() == ids[5][:-1] + ids[1][:-1] + ids[2] != usual[side][0].tolist()
        assert columns[side][1].tolist() == usual[side][1].tolist() == ids[3]


def test_every_joint_has_both_sentences_on_both_sides():
    seen = set()
    for source, target in join_in_all_ways(["Go on.", "He sleeps."], ["Weiter!", "Er schläft."]):
        assert source.lower().startswith("go on") and source.lower().rstrip(")").endswith("he sleeps.")
        assert target.startswith("Weiter") and target.rstrip(")").endswith("Er schläft.")
        seen.add((source, target))
    assert {("Go on.He sleeps.", "Weiter! Er schläft."), ("Go on he sleeps.", "Weiter! Er schläft.")} <= seen
    assert {("Go on / He sleeps.", "Weiter / Er schläft."), ("Go on.<br>He sleeps.", "Weiter!<br>Er schläft.")} <= seen


def test_pairs_of_joined_batches_are_found_again(tokenized, tokenizer):
    loader = load(tokenized, tokenizer, 0.5)
    count = len(loader.epoch())
    assert sorted((pair["source"], pair["target"]) for pair in loader.pairs(0, count)) == sorted(PAIRS)
    batches = itertools.islice(loader, count)
    is_token = torch.cat([mask.flatten() for b in batches for mask in (b["attention_mask"], b["labels"] >= 0)])
    assert loader.padding() == pytest.approx(1 - is_token.float().mean().item(), abs=0.15)  # estimated


def test_the_longest_side_of_all_pairs(byte_tokenizer):
    pairs = text_dataset([("1", "22"), ("333333", "4"), ("1", "4444")])
    train, _ = tokenize_pairs(pairs, byte_tokenizer, 50, 50)
    options = DataOptions(max_source_length=50, max_target_length=40)
    longest = max(*map(len, train["input_ids"]), *map(len, train["labels"]))
    joining = replace(options, joined_pairs=0.2)
    assert joined.longest_side_of(train, options) == longest
    assert joined.longest_side_of(train, joining) == 4 * longest + 3 * max(joined.MARGINS)
    assert joined.longest_side_of(train, replace(joining, max_source_length=30)) == 40
    for limited in (options, joining):
        assert joined.longest_side_of(train, replace(limited, bpe_dropout=0.1)) == 50
        assert joined.longest_side_of(pairs.to_iterable_dataset(), limited) == 50
