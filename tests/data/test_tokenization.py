"""Any text comes back, every sentence ends, in every tokenizer. Run: pytest tests/test_tokenization.py"""

import itertools
import json
import math
import os
import pickle
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from datasets.fingerprint import Hasher
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    ByT5Tokenizer,
    GPT2Tokenizer,
    MarianTokenizer,
    PreTrainedTokenizerFast,
)

from vanilla_transformer.data import tokenizer as tokenization
from vanilla_transformer.data.tokenizer import (
    SPECIAL_TOKENS,
    BpeDropout,
    load_tokenizer,
    special_token_ids,
    train_tokenizer,
)
from vanilla_transformer.errors import UserError

TEXTS = {
    "empty": "",
    "plain": "A man rides a bike.",
    "german": "Fünf große Jungen laufen über die Straße.",
    "chinese": "纽约是一座城市",
    "japanese": "これは本です。ペンもあります",
    "korean, decomposed": unicodedata.normalize("NFD", "안녕하세요"),
    "arabic": "السَّلامُ عَلَيْكُم",
    "emoji with joiners": "👨‍👩‍👧‍👦 und 🏳️‍🌈, 👍🏽!",
    "combining marks": "e\u0301 a\u0308\u0304 \u0301 Z\u0351\u036b",
    "begins with a combining mark": "\u0301x",
    "one space": " ",
    "leading, double and trailing spaces": "  two  words   ",
    "tabs and newlines": "\ta\n\nb\r\nc\n",
    "control characters": "\x00a\x01\x07\x1b[0m\x7f\x85",
    "odd spaces": "\u00a0a\u2003b\u2028c\u200b\ufeff",
    "special tokens": "<s> </s><pad> <unk>a</s>",
    "punctuation without spaces": "don't ,stop . now!Yes",
    "highest code point": "\U0010ffff\ufffd",
}
texts = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())


def corpus() -> list[str]:
    """Sentences of made-up words, with many pairs of symbols that are equally frequent."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnoprstuwzäöüß", k=generator.randint(1, 8))) for _ in range(300)]
    return [" ".join(generator.choices(words, k=8)) for _ in range(400)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(corpus(), 500)


@pytest.fixture(scope="module")
def elsewhere(tokenizer, tmp_path_factory) -> dict:
    """What another process makes of the saved tokenizer, and the tokenizer that it trains on the same texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder / "saved")
    (folder / "texts.json").write_text(json.dumps({"texts": list(TEXTS.values()), "corpus": corpus()}))
    script = (
        "import json\n"
        "from transformers import AutoTokenizer\n"
        "from vanilla_transformer.data.tokenizer import train_tokenizer\n"
        "given = json.load(open('texts.json'))\n"
        "tokenizer = AutoTokenizer.from_pretrained('saved')\n"
        "ids = [tokenizer(text).input_ids for text in given['texts']]\n"
        "texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]\n"
        "targets = [tokenizer(text_target=text).input_ids for text in given['texts']]\n"
        "train_tokenizer(given['corpus'], 500).save_pretrained('trained')\n"
        "json.dump({'ids': ids, 'texts': texts, 'targets': targets}, open('results.json', 'w'))\n"
    )
    # Neither the order of hashes nor the number of threads may decide between equally frequent pairs.
    environment = {"PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "3", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", script], cwd=folder, env=os.environ | environment, check=True, timeout=300)
    return {"folder": folder, **json.loads((folder / "results.json").read_text())}


# ------------------------------------------------------------------------------------------------------------ training


@texts
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer(text).input_ids
    expected = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == expected
    generated = [tokenizer.bos_token_id, *ids, *[tokenizer.pad_token_id] * 3]
    assert tokenizer.batch_decode([generated], skip_special_tokens=True) == [expected]


def test_any_text_comes_back_in_another_process(tokenizer, elsewhere):
    assert elsewhere["ids"] == [tokenizer(text).input_ids for text in TEXTS.values()]
    assert elsewhere["targets"] == elsewhere["ids"]
    assert elsewhere["texts"] == [unicodedata.normalize("NFC", text) for text in TEXTS.values()]


def test_training_twice_gives_the_same_file(elsewhere):
    folder: Path = elsewhere["folder"]
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        assert (folder / "trained" / name).read_bytes() == (folder / "saved" / name).read_bytes()


@texts
def test_every_text_ends_once(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids[-1] == tokenizer.eos_token_id
    assert not set(ids[:-1]) & set(tokenizer.all_special_ids)
    assert tokenizer(text_target=text).input_ids == ids
    assert tokenizer([text, "a"]).input_ids[0] == ids


def test_nothing_is_unknown(tokenizer):
    generator = random.Random(1)
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for _ in range(50):
        text = "".join(map(chr, generator.sample(codes, 100)))
        ids = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == unicodedata.normalize("NFC", text)


def test_four_distinct_special_tokens(tokenizer):
    ids = [getattr(tokenizer, f"{name}_id") for name in SPECIAL_TOKENS]
    assert sorted(ids) == [0, 1, 2, 3]
    assert special_token_ids(tokenizer) == {
        "pad_token_id": ids[0],
        "bos_token_id": ids[1],
        "eos_token_id": ids[2],
        "decoder_start_token_id": ids[1],
    }


def test_a_word_is_the_same_token_at_the_beginning_and_inside(tokenizer):
    word = max(corpus()[0].split(), key=len)
    ids = tokenizer(f"{word} {word}").input_ids[:-1]
    assert ids[: len(ids) // 2] == ids[len(ids) // 2 :]


def test_vocabulary_is_of_the_size_asked_for(tokenizer):
    assert len(tokenizer) == 500
    assert len(train_tokenizer(["ab"], 500)) < 270  # a small text holds no more
    assert len(train_tokenizer(["ab"], 260)) == 260


def test_a_vocabulary_smaller_than_the_alphabet_is_refused():
    with pytest.raises(UserError, match=r"--vocab_size is 259, .*must be at least 260"):
        train_tokenizer(["ab"], 259)


def test_no_text_is_refused():
    with pytest.raises(UserError, match="no text"):
        train_tokenizer(iter([]), 300)


# ------------------------------------------------------------------------------------------------- existing tokenizers


def byte_level(specials: list[str], template: str | None = None) -> Tokenizer:
    """GPT-2's kind of tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["a dog sleeps", "ein Hund schläft"] * 3, trainer)
    if template:
        ids = [(token, tokenizer.token_to_id(token)) for token in specials]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return tokenizer


def fast(specials: list[str], template: str | None = None, **names) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(specials, template), **names)


def gpt2() -> GPT2Tokenizer:
    model = json.loads(byte_level(["<|endoftext|>"]).to_str())["model"]
    return GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])


def bert() -> BertTokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "##s", "sleep"]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)})


# name -> (the tokenizer, how it starts, how it ends, what it pads with)
EXISTING = {
    "without bos": (lambda: fast(["<p>", "<e>"], pad_token="<p>", eos_token="<e>"), "<e>", "<e>", "<p>"),
    "pad is eos": (lambda: fast(["<e>"], pad_token="<e>", eos_token="<e>"), "<e>", "<e>", "<e>"),
    "without pad": (lambda: fast(["<b>", "<e>"], bos_token="<b>", eos_token="<e>"), "<b>", "<e>", "<e>"),
    "puts bos before": (
        lambda: fast(["<p>", "<b>", "<e>"], "<b> $A", pad_token="<p>", bos_token="<b>", eos_token="<e>"),
        "<b>",
        "<e>",
        "<p>",
    ),
    "ends already": (
        lambda: fast(["<p>", "<e>"], "$A <e>", pad_token="<p>", eos_token="<e>"),
        "<e>",
        "<e>",
        "<p>",
    ),
    "CLS and SEP": (
        lambda: fast(["[P]", "[C]", "[S]"], "[C] $A [S]", pad_token="[P]", cls_token="[C]", sep_token="[S]"),
        "[C]",
        "[S]",
        "[P]",
    ),
    "SEP alone": (lambda: fast(["[P]", "[S]"], pad_token="[P]", sep_token="[S]"), "[S]", "[S]", "[P]"),
    "class of GPT-2": (gpt2, "<|endoftext|>", "<|endoftext|>", "<|endoftext|>"),
    "class of BERT": (bert, "[CLS]", "[SEP]", "[PAD]"),
}
existing = pytest.mark.parametrize("name", EXISTING)


@existing
def test_an_existing_tokenizer_ends_every_sentence(name, tmp_path):
    make, start, end, pad = EXISTING[name]
    make().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    expected = [*make()("a dog sleeps", add_special_tokens=False).input_ids, tokenizer.convert_tokens_to_ids(end)]
    assert tokenizer("a dog sleeps").input_ids == expected
    assert tokenizer(text_target="a dog sleeps").input_ids == expected
    assert tokenizer("").input_ids == expected[-1:]
    assert tokenizer.decode(expected, skip_special_tokens=True) == "a dog sleeps"
    ids = special_token_ids(tokenizer)
    found = [ids[f"{token}_token_id"] for token in ("decoder_start", "eos", "pad")]
    assert tokenizer.convert_ids_to_tokens(found) == [start, end, pad]


@pytest.mark.parametrize("name", EXISTING)
def test_an_existing_tokenizer_saved_with_a_model_encodes_as_in_training(name, tmp_path):
    EXISTING[name][0]().save_pretrained(tmp_path / "theirs")
    tokenizer = load_tokenizer(str(tmp_path / "theirs"))
    tokenizer.save_pretrained(tmp_path / "ours")
    again = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert again("a dog sleeps").input_ids == tokenizer("a dog sleeps").input_ids
    assert special_token_ids(again) == special_token_ids(tokenizer)


def test_a_tokenizer_that_cannot_end_a_sentence_is_refused(tmp_path):
    fast(["<p>"], pad_token="<p>").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"{tmp_path} has no end-of-sentence token.*eos_token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("damage", ["missing", "empty folder", "cut off", "other json"])
def test_a_tokenizer_that_cannot_be_read_is_named(damage, tmp_path):
    folder = tmp_path / "tokenizer"
    if damage != "missing":
        folder.mkdir()
    if damage in ("cut off", "other json"):
        fast(["<e>"], eos_token="<e>").save_pretrained(folder)
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text[: len(text) // 2] if damage == "cut off" else '{"model": {}}')
    with pytest.raises(UserError, match=str(folder)):
        load_tokenizer(str(folder))


# --------------------------------------------------------------------------------------------------------- BPE-dropout


def learn(model: models.BPE, pre_tokenizer=None, normalizer=None, decoder=None, **options) -> Tokenizer:
    """A BPE tokenizer of the corpus that ends its texts with </s>."""
    tokenizer = Tokenizer(model)
    for part, value in {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}.items():
        if value is not None:
            setattr(tokenizer, part, value)
    specials = [*options.pop("specials", []), *SPECIAL_TOKENS.values()]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, **options)
    tokenizer.train_from_iterator([*corpus(), "### a## 日本語"], trainer)
    eos = ("</s>", tokenizer.token_to_id("</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[eos])
    return tokenizer


def learn_byte_level(prefix_space: bool) -> Tokenizer:
    return learn(
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=prefix_space),
        decoder=decoders.ByteLevel(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )


def learn_sentence_piece(words: bool) -> Tokenizer:
    """What the model knows no character of comes back from its bytes."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if words:
        return learn(model, pre_tokenizers.Metaspace(), decoder=decoders.Sequence(back), specials=fallback)
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return learn(model, normalizer=spaces, decoder=decoders.Sequence(back), specials=fallback)


def with_added_tokens() -> Tokenizer:
    tokenizer = learn_byte_level(False)
    tokenizer.add_tokens(
        [AddedToken("rides"), AddedToken("two", lstrip=True, rstrip=True), AddedToken("wo", single_word=True)]
    )
    tokenizer.add_special_tokens([AddedToken("<new>"), AddedToken("ik")])
    return tokenizer


def with_letters_in_its_template() -> Tokenizer:
    """Which stand next to each other, and would be merged in a word."""
    tokenizer = learn_byte_level(False)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    first, second = next(pair for pair in merges if "Ġ" not in pair[0])
    ids = [(token, tokenizer.token_to_id(token)) for token in (first, second, "</s>")]
    template = f"{first} {second} $A {first} {second} </s>"
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return tokenizer


def with_words_that_no_merge_makes() -> Tokenizer:
    """Of Llama 3's kind: a word of the vocabulary is one token."""
    tokenizer = learn_byte_level(False)
    state = json.loads(tokenizer.to_str())
    state["model"]["ignore_merges"] = True
    for word in ("Ġbike", "quite", "Fü"):
        state["model"]["vocab"].setdefault(word, len(state["model"]["vocab"]))
    return Tokenizer.from_str(json.dumps(state))


def learn_unknown(fused: bool) -> Tokenizer:
    model = models.BPE(unk_token="<unk>", fuse_unk=fused)
    return learn(model, pre_tokenizers.WhitespaceSplit(), decoder=decoders.Fuse())


BPE = {
    "byte-level": lambda: learn_byte_level(False),
    "byte-level, prefix space": lambda: learn_byte_level(True),
    "byte-level, no words": lambda: learn(
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoder=decoders.ByteLevel(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ),
    "byte fallback": lambda: learn_sentence_piece(words=True),
    "byte fallback, no words": lambda: learn_sentence_piece(words=False),
    "unknown": lambda: learn_unknown(fused=False),
    "unknown, fused": lambda: learn_unknown(fused=True),
    "nothing for unknown": lambda: learn(models.BPE(), pre_tokenizers.WhitespaceSplit(), decoder=decoders.Fuse()),
    "prefix": lambda: learn(
        models.BPE(unk_token="<unk>", continuing_subword_prefix="##"),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
        decoders.WordPiece(),
        continuing_subword_prefix="##",
    ),
    "suffix": lambda: learn(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
        pre_tokenizers.WhitespaceSplit(),
        decoder=decoders.BPEDecoder(),
        end_of_word_suffix="</w>",
    ),
    "added tokens": with_added_tokens,
    "letters in its template": with_letters_in_its_template,
    "words that no merge makes": with_words_that_no_merge_makes,
}
SENTENCES = [*TEXTS.values(), "A man<new>rides two bikes, wo ? two<new> quite", *corpus()[:50]]


@pytest.fixture(scope="module")
def bpe(tokenizer) -> dict[str, PreTrainedTokenizerFast]:
    others = {name: PreTrainedTokenizerFast(tokenizer_object=make(), **SPECIAL_TOKENS) for name, make in BPE.items()}
    return {"ours": tokenizer, **others}


def encode(tokenizer, dropout: float, texts: list[str], seed: int = 0) -> list[list[int]]:
    return BpeDropout(tokenizer, dropout)(texts, np.random.default_rng(seed))


kinds = pytest.mark.parametrize("kind", ["ours", *BPE])


@kinds
def test_without_dropout_the_ids_are_those_of_the_tokenizer(bpe, kind):
    expected = bpe[kind](SENTENCES).input_ids
    segment = BpeDropout(bpe[kind], 0.0)
    for _ in range(2):  # the second time from what it remembers
        assert segment(SENTENCES, np.random.default_rng(0)) == expected
    assert pickle.loads(pickle.dumps(segment))(SENTENCES, np.random.default_rng(0)) == expected


@kinds
@pytest.mark.parametrize("dropout", [0.1, 0.7, 1.0])
def test_the_text_stays_the_same_whatever_is_left_out(bpe, kind, dropout):
    tokenizer = bpe[kind]
    expected = tokenizer(SENTENCES).input_ids
    ids = encode(tokenizer, dropout, SENTENCES)
    assert sum(map(len, ids)) > sum(map(len, expected))
    assert tokenizer.batch_decode(ids) == tokenizer.batch_decode(expected)
    assert [row[-1] for row in ids] == [tokenizer.eos_token_id] * len(ids)


def test_truncation_and_padding_of_the_file_are_not_applied():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learn_byte_level(False), **SPECIAL_TOKENS)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=20)
    ids = encode(tokenizer, 0.0, SENTENCES)  # before calling the tokenizer, which takes them off
    assert ids == tokenizer(SENTENCES).input_ids


def test_added_tokens_and_words_that_no_merge_makes_are_tokens(bpe):
    """Such words too are found as long as no merge of them is left out, as in translating."""
    ids = bpe["added tokens"].convert_tokens_to_ids(["rides", "two", "wo", "<new>", "ik"])
    counts = Counter(itertools.chain(*encode(bpe["added tokens"], 1.0, SENTENCES)))
    expected = Counter(itertools.chain(*bpe["added tokens"](SENTENCES).input_ids))
    assert all(counts[i] == expected[i] > 0 for i in ids)
    tokenizer = bpe["words that no merge makes"]
    (made,) = tokenizer("quite").input_ids[:-1]
    found = [row[0] == made for row in encode(tokenizer, 0.3, ["quite"] * 1000)]
    assert 0 < sum(found) < 1000


def test_leaving_out_everything_gives_bytes(tokenizer):
    ids = encode(tokenizer, 1.0, list(TEXTS.values()))
    texts = [unicodedata.normalize("NFC", text) for text in TEXTS.values()]
    assert [len(row) - 1 for row in ids] == [len(f" {text}".encode()) if text else 0 for text in texts]


def every_outcome(symbols: tuple[str, ...], merges: list[tuple[str, str]], p: float) -> dict[tuple[str, ...], float]:
    """The probability of each segmentation by algorithm 1, from every choice of merges to leave out at each step."""
    possible = [i for i, pair in enumerate(itertools.pairwise(symbols)) if pair in merges]
    outcomes = Counter()
    for left_out in itertools.product([True, False], repeat=len(possible)):
        probability = math.prod(p if out else 1 - p for out in left_out)
        remaining = [i for i, out in zip(possible, left_out, strict=True) if not out]
        if not remaining:
            outcomes[symbols] += probability
            continue
        best = min(remaining, key=lambda i: (merges.index(symbols[i : i + 2]), i))
        merged = (*symbols[:best], symbols[best] + symbols[best + 1], *symbols[best + 2 :])
        for segmentation, rest in every_outcome(merged, merges, p).items():
            outcomes[segmentation] += probability * rest
    return outcomes


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_segmentations_are_as_likely_as_the_algorithm_makes_them(p):
    """Of two words next to each other together, so that the draws for one do not depend on the other."""
    merges = [("a", "b"), ("b", "a"), ("ab", "a"), ("a", "a"), ("ba", "ba"), ("ab", "c"), ("ab", "abc")]
    tokens = [*"abc ", *map("".join, merges), "</s>"]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    plain = Tokenizer(model)
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    words = [every_outcome(tuple(word), merges, p) for word in ("aababc", "baba")]
    expected = {(*a, *b): words[0][a] * words[1][b] for a in words[0] for b in words[1]}
    assert len(expected) > 40
    assert math.isclose(sum(expected.values()), 1)
    count = 50_000
    rows = encode(tokenizer, p, ["aababc baba"] * count)
    found = Counter(tuple(tokens[i] for i in row) for row in rows)
    assert found.keys() <= expected.keys()
    for segmentation, probability in expected.items():
        deviation = math.sqrt(count * probability * (1 - probability))
        assert abs(found[segmentation] - count * probability) < 4.5 * deviation + 1


def test_the_state_of_the_generator_decides_and_nothing_else(tokenizer, monkeypatch):
    first = encode(tokenizer, 0.3, SENTENCES)
    assert encode(tokenizer, 0.3, SENTENCES) == first
    assert encode(tokenizer, 0.3, SENTENCES, seed=1) != first
    segment, generator = BpeDropout(tokenizer, 0.3), np.random.default_rng(0)
    assert segment(SENTENCES, generator) == first
    second = segment(SENTENCES, generator)
    assert second != first
    # Neither what an instance has seen counts, nor how much it remembers.
    generator = np.random.default_rng(0)
    assert pickle.loads(pickle.dumps(segment))(SENTENCES, generator) == first
    assert BpeDropout(tokenizer, 0.3)(SENTENCES, generator) == second
    monkeypatch.setattr(tokenization, "CACHED_WORDS", 2)
    assert encode(tokenizer, 0.3, SENTENCES) == first


def test_no_texts_give_no_ids(tokenizer):
    assert encode(tokenizer, 0.1, []) == []
    assert encode(tokenizer, 0.1, [""]) == [[tokenizer.eos_token_id]]


class Halves:
    """A pre-tokenizer written in Python."""

    def pre_tokenize(self, text):
        text.split(lambda _, part: [part[:1], part[1:]])


def in_python() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learn_byte_level(False))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Halves())
    return tokenizer


def of(model) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


REFUSED = {
    "not fast": (ByT5Tokenizer, "a fast tokenizer, which ByT5Tokenizer is not"),
    "WordPiece": (bert, "not WordPiece"),
    "WordLevel": (lambda: of(models.WordLevel({"a": 0}, unk_token="a")), "not WordLevel"),
    "Unigram": (lambda: of(models.Unigram([("a", 0.0)])), "not Unigram"),
    "its own dropout": (lambda: of(models.BPE(dropout=0.1)), r"this one's is 0\.1; set it to null"),
    "in Python": (in_python, "a tokenizer that can be saved: Custom PreTokenizer cannot be serialized;"),
    "merges ignored": (lambda: of(models.BPE({"a": 0}, [], ignore_merges=True)), "`ignore_merges`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_whose_merges_cannot_be_left_out_is_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(UserError, match=f"^--bpe_dropout needs .*{message}"):
        BpeDropout(make(), 0.1)


@pytest.mark.parametrize("dropout", [-0.1, 1.1, math.nan])
def test_a_dropout_that_is_no_probability_is_refused(tokenizer, dropout):
    with pytest.raises(UserError, match=f"--bpe_dropout is {dropout}; .* from 0 to 1"):
        BpeDropout(tokenizer, dropout)


# --------------------------------------------------------------------------------------------------- Marian tokenizers


def test_a_marian_tokenizer_stays_what_it_is_saved_and_sent_to_another_process(marian, marian_pairs, tmp_path):
    theirs = MarianTokenizer.from_pretrained(marian)
    tokenizer = load_tokenizer(str(marian))
    tokenizer.save_pretrained(tmp_path)
    again = [tokenizer, load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)]
    for ours in [*again, pickle.loads(pickle.dumps(again[1]))]:
        assert ours.model_max_length == theirs.model_max_length
        for source, target in marian_pairs:
            assert ours(source).input_ids == theirs(source).input_ids
            ids = ours(text_target=target).input_ids
            assert ids == theirs(text_target=target).input_ids != theirs(target).input_ids
            assert ids[-1] == ours.eos_token_id and ours.batch_decode([ids], skip_special_tokens=True) == [target]
    assert Hasher.hash(load_tokenizer(str(marian))) == Hasher.hash(
        load_tokenizer(str(marian))
    )  # by which datasets cache


def test_the_language_at_the_beginning_is_one_token(marian):
    tokenizer = load_tokenizer(str(marian))
    ids = tokenizer("This is a cat").input_ids
    assert tokenizer(">>deu<< This is a cat").input_ids == [tokenizer.convert_tokens_to_ids(">>deu<<"), *ids]
    assert tokenizer.unk_token_id not in ids


WITHOUT_SENTENCEPIECE = """
import sys
sys.modules["sentencepiece"] = None
from vanilla_transformer.errors import UserError
from vanilla_transformer.data.tokenizer import load_tokenizer
for folder in sys.argv[1:]:
    try:
        load_tokenizer(folder, "--model_name_or_path")
    except UserError as error:
        print(error)
"""


def test_a_missing_sentencepiece_is_named(marian, tmp_path):
    """By a model as it lies on the Hub, and as it is saved."""
    load_tokenizer(str(marian)).save_pretrained(tmp_path)
    command = [sys.executable, "-c", WITHOUT_SENTENCEPIECE, str(marian), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines() == [
        f"The tokenizer of --model_name_or_path {folder} needs sentencepiece, which is not installed; install it by "
        "`pip install sentencepiece`."
        for folder in (marian, tmp_path)
    ], result.stderr
