"""Every text comes back and every sentence ends, with every tokenizer."""

import itertools
import json
import pickle
import random
import subprocess
import sys
import unicodedata
from copy import deepcopy
from pathlib import Path
from unittest.mock import Mock

import pytest
from datasets.fingerprint import Hasher
from helpers import text_dataset
from pair_files import load, rows, streamed, write, write_card
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    ByT5Tokenizer,
    GPT2Tokenizer,
    MarianTokenizer,
    PreTrainedTokenizerFast,
)

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data import tokenizer as tokenizer_code
from vanilla_transformer.data.encoding import sample_texts
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.texts import is_filled, normalize
from vanilla_transformer.data.tokenizer import (
    SPECIAL_TOKENS,
    check_coverage,
    describe_losses,
    make_tokenizer,
    named_tokenizer,
    note_source_form,
    special_token_ids,
    tokenizer_for_training,
    train_tokenizer,
    train_unigram_tokenizer,
    with_bpe_dropout,
)
from vanilla_transformer.errors import UserError
from vanilla_transformer.sentences_vanilla_transformer import SOURCE_KINDS

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


@pytest.fixture(scope="module", params=[train_tokenizer, train_unigram_tokenizer], ids=["BPE", "unigram"])
def either(request):
    return request.param(corpus(), 500)


# ------------------------------------------------------------------------------------------------------------ training


@texts
def test_every_text_comes_back_and_ends_once(either, text):
    tokenizer, ids = either, either(text).input_ids
    expected = normalize(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == expected
    generated = [tokenizer.bos_token_id, *ids, *[tokenizer.pad_token_id] * 3]
    assert tokenizer.batch_decode([generated], skip_special_tokens=True) == [expected]
    assert ids[-1] == tokenizer.eos_token_id and not set(ids[:-1]) & set(tokenizer.all_special_ids)
    assert tokenizer(text_target=text).input_ids == tokenizer([text, "a"]).input_ids[0] == ids


MARKED = [
    "</s\ufdd0>",
    "\ufdd0\ufdd0>\ufdd0",
    "x</s\ufdd0\ufdd0></s>",
    "5 \u2126 <s>\u2126",
    "def f(x):\n    return x\r\n",
]


@pytest.mark.parametrize("text", [*TEXTS.values(), *MARKED], ids=[*TEXTS, *map(ascii, MARKED)])
def test_a_verbatim_tokenizer_returns_every_text(text, tmp_path):
    train_tokenizer(corpus(), 300, tags=["<bt>"], verbatim=True).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text).input_ids
    assert tokenizer.batch_decode([[tokenizer.bos_token_id, *ids, 0]], skip_special_tokens=True) == [text]
    assert ids[-1] == tokenizer.eos_token_id and not set(ids[:-1]) & set(tokenizer.all_special_ids)
    assert tokenizer.init_kwargs["verbatim"] and tokenizer_for_training(str(tmp_path)).init_kwargs["verbatim"]


@pytest.mark.parametrize("verbatim", [False, True])
def test_each_character_may_be_a_token(verbatim, tmp_path):
    """Of more bytes, if training had it; other characters are their bytes. Tags stay whole."""
    train_tokenizer(["ʃ ɪ p 犬"] * 3, 300, tags=["<bt>"], verbatim=verbatim, letters=True).save_pretrained(tmp_path)
    tokenizer = tokenizer_for_training(str(tmp_path))
    for text, tokens in [("ʃɪp p犬", 7), ("<bt> ʃɪ", 4), ("pppp", 5), ("a </s>", 7), ("猫", 4)]:
        ids = tokenizer(text).input_ids
        assert len(ids) == tokens + 1, text  # with the space before the text, and the end
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.init_kwargs["letters"]


@pytest.mark.parametrize("options", [{}, {"verbatim": True}, {"kind": "unigram"}])
def test_each_digit_may_be_a_token(options, tmp_path):
    pairs = text_dataset([("in 1984, 19.84 years", "x1984 at 1984 or 1984")] * 30)
    whole = make_tokenizer(None, pairs, 320, **options)
    make_tokenizer(None, pairs, 320, split_digits=True, **options).save_pretrained(tmp_path)
    tokenizer = tokenizer_for_training(str(tmp_path))
    for text in ("in 1984", "1984", "x19a84", "٣٤ 1"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    spaces = "a  b" if "verbatim" in options else "a b"
    assert tokenizer.decode(tokenizer("a  b").input_ids, skip_special_tokens=True) == spaces
    assert any("19" in token for token in whole.tokenize("in 1984 at 1984"))
    digits = "".join(token[-1] for token in tokenizer.tokenize("in 1984 at 1984") if token[-1].isdigit())
    assert digits == "19841984" and tokenizer.init_kwargs["split_digits"]


def test_a_verbatim_tokenizer_returns_random_texts():
    tokenizer, generator = train_tokenizer(corpus(), 300, verbatim=True), random.Random(0)
    atoms = [*"\n\t \u00a0\u3000\u2126\ufdd0>a\u00ad\u200b\x00"]
    atoms += ["\r\n", "</s>", "<pad>", "</s", "\ufdd0>", "e\u0301", "\u1112\u1161"]
    texts = ["x" + "".join(generator.choices(atoms, k=generator.randint(0, 9))) for _ in range(2000)]
    assert tokenizer.batch_decode(tokenizer(texts).input_ids, skip_special_tokens=True) == texts


LOST = {
    "line breaks": "a\nb",
    "tabs": "a\tb",
    "double, leading or trailing spaces": "    return x",
    "other kinds of spaces": "10\u00a0km",
    "invisible characters": "co\u00adop",
    "decomposed letters": unicodedata.normalize("NFD", "안녕"),
}


@pytest.mark.parametrize("kind, text", LOST.items(), ids=LOST)
def test_what_a_tokenizer_does_not_keep_is_described_by_kind(kind, text):
    others, tokenizer = ["A man rides a bike."], train_tokenizer(corpus(), 300)
    said = describe_losses(tokenizer, [text, *3 * others], "target")
    assert said == f"the tokenizer does not keep, in target texts: {kind} (25%)"
    assert describe_losses(tokenizer, [text, *200 * others], "target") is None  # negligible
    assert describe_losses(train_tokenizer(corpus(), 300, verbatim=True), [text], "target") is None


def test_the_tokenizer_normalizes_as_scores_do(tokenizer):
    """Every character of Unicode, between letters and beside spaces, but for surrogates."""
    ranges = itertools.chain(range(0xD800), range(0xE000, 0x110000, 7), range(0xFFFE - 0x200, 0xFFFF))
    texts = [f" a{character} {character}b {character}" for character in map(chr, ranges)]
    again = (tokenizer.backend_tokenizer.normalizer.normalize_str(text) for text in texts)
    assert [text for text, found in zip(texts, again, strict=True) if found.removeprefix(" ") != normalize(text)] == []


JOINED = "\u0995\u09cd\u200d\u09b7 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"  # Bengali, Persian
NORMALIZED = {
    "spaces": (" The\u00a0 dog\t\r\n sleeps.\u3000", "The dog sleeps."),
    "invisible": ("\ufeffThe\u200b d\u00adog\u2060", "The dog"),
    "joiners": (JOINED, JOINED),
    "spellings": ("5 \u2126, 300 \u212a, \u09dc", "5 \u03a9, 300 K, \u09a1\u09bc"),
    "nothing": ("\u200b\ufeff \t", ""),
}


@pytest.mark.parametrize("text, expected", NORMALIZED.values(), ids=NORMALIZED)
def test_spaces_and_invisible_characters_are_normalized(text, expected, tokenizer):
    assert normalize(text) == expected
    assert tokenizer(text).input_ids == tokenizer(expected).input_ids
    assert is_filled(text) == bool(expected) and not is_filled("\u200d \u200c\u200e")


def test_four_distinct_special_tokens(tokenizer):
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in SPECIAL_TOKENS}
    assert sorted(ids.values()) == [0, 1, 2, 3]
    del ids["unk_token_id"]
    assert special_token_ids(tokenizer) == ids | {"decoder_start_token_id": tokenizer.bos_token_id}


def test_a_word_is_the_same_token_at_the_beginning_and_inside(tokenizer):
    word = max(corpus()[0].split(), key=len)
    ids = tokenizer(f"{word} {word}").input_ids[:-1]
    assert ids[: len(ids) // 2] == ids[len(ids) // 2 :]


def test_tag_is_one_token_that_leaves_the_text_after_it_as_it_is(tmp_path):
    """Also when it was saved; the vocabulary size counts it."""
    tagged = train_tokenizer(["A dog sleeps.", "<bt> A dog eats."] * 3, 270, tags=["<bt>", ">>de<<", "<bt>"])
    assert len(tagged) == 270
    tagged.save_pretrained(tmp_path)
    for tokenizer in (tagged, tokenizer_for_training(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)):
        tag, *rest = tokenizer("<bt> A dog sleeps.").input_ids
        assert rest == tokenizer("A dog sleeps.").input_ids and tag == tokenizer("<bt>").input_ids[0] == 268
        assert len(tokenizer.tokenize(">>de<<")) == 1 < len(tokenizer.tokenize("a <s>"))


def test_special_tokens_of_the_training_stay_text_where_added_ones_are_matched(tokenizer, tmp_path):
    added = train_tokenizer(corpus(), 500)
    added.add_special_tokens({"mask_token": "<mask>", "additional_special_tokens": ["<a>"]})
    added.add_tokens(AddedToken("<b>", special=True))
    added.save_pretrained(tmp_path / "added")
    tokenizer.save_pretrained(tmp_path / "plain")
    later = AutoTokenizer.from_pretrained(tmp_path / "plain", mask_token="<mask>")
    generator = random.Random(1)
    parts = [*SPECIAL_TOKENS.values(), *"</s>", " ", "!", "ab", "\n", "\u2126", "e\u0301"]
    texts = ["".join(generator.choices(parts, k=generator.randint(2, 7))) for _ in range(2000)]
    texts = [text for text in texts if normalize(text) not in SPECIAL_TOKENS.values()]
    as_text = tokenizer(texts, split_special_tokens=True).input_ids  # finds no special token at all
    for each in (tokenizer, added, AutoTokenizer.from_pretrained(tmp_path / "added"), later):
        assert each(texts).input_ids == as_text
        if each is not tokenizer:
            assert each.tokenize("<mask>a</s>") == ["<mask>", *tokenizer.tokenize("a</s>")]
            assert each.decode(each("a<mask>").input_ids, skip_special_tokens=True) == "a"
    assert added.tokenize("<a><b>") == ["<a>", "<b>"]
    assert tokenizer("</s>").input_ids == [tokenizer.eos_token_id] * 2  # the whole text, not a part of a sentence


def test_a_monstrous_text_is_not_trained_on():
    monster = random.Random(0).choices("qxyz", k=3_000_000)
    with_it = train_tokenizer([*corpus(), "".join(monster), 2000 * "qxyz "], 500)
    assert with_it.get_vocab() == train_tokenizer([*corpus(), 2000 * "qxyz "], 500).get_vocab()
    assert with_it.get_vocab().keys() >= {"Ġqxyz"}  # a text of 10,000 characters is


def test_vocabulary_size(tokenizer):
    assert len(tokenizer) == 500
    assert len(train_tokenizer(["ab"], 500)) < 270  # a small corpus yields fewer tokens
    assert len(train_tokenizer(["ab"], 260)) == 260
    with pytest.raises(UserError, match="--vocab_size is 259; it must be at least 260"):
        train_tokenizer(["ab"], 259)


# ------------------------------------------------------------------------------------------------- existing tokenizers


def fast(template: str | None = None, **names) -> PreTrainedTokenizerFast:
    """GPT-2's kind of tokenizer, with special tokens: fast(pad="<p>", eos="<e>")."""
    tokenizer, specials = Tokenizer(models.BPE()), list(dict.fromkeys(names.values()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["a dog sleeps", "ein Hund schläft"] * 3, trainer)
    if template:
        ids = [(token, tokenizer.token_to_id(token)) for token in specials]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    names = {f"{name}_token": token for name, token in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def gpt2() -> GPT2Tokenizer:
    model = json.loads(fast(eos="<|endoftext|>").backend_tokenizer.to_str())["model"]
    return GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])


def bert() -> BertTokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "##s", "sleep"]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)})


# name -> (the tokenizer, how it starts, how it ends, what it pads with)
EXISTING = {
    "without bos": (lambda: fast(pad="<p>", eos="<e>"), "<e>", "<e>", "<p>"),
    "pad is eos": (lambda: fast(pad="<e>", eos="<e>"), "<e>", "<e>", "<e>"),
    "without pad": (lambda: fast(bos="<b>", eos="<e>"), "<b>", "<e>", "<e>"),
    "puts bos before": (lambda: fast("<b> $A", pad="<p>", bos="<b>", eos="<e>"), "<b>", "<e>", "<p>"),
    "ends already": (lambda: fast("$A <e>", pad="<p>", eos="<e>"), "<e>", "<e>", "<p>"),
    "CLS and SEP": (lambda: fast("[C] $A [S]", pad="[P]", cls="[C]", sep="[S]"), "[C]", "[S]", "[P]"),
    "SEP alone": (lambda: fast(pad="[P]", sep="[S]"), "[S]", "[S]", "[P]"),
    "class of GPT-2": (gpt2, "<|endoftext|>", "<|endoftext|>", "<|endoftext|>"),
    "class of BERT": (bert, "[CLS]", "[SEP]", "[PAD]"),
}


@pytest.mark.parametrize("make, start, end, pad", EXISTING.values(), ids=EXISTING)
def test_existing_tokenizer_ends_every_sentence_and_is_saved_as_it_is(make, start, end, pad, tmp_path):
    make().save_pretrained(tmp_path / "theirs")
    tokenizer = tokenizer_for_training(str(tmp_path / "theirs"))
    expected = [*make()("a dog sleeps", add_special_tokens=False).input_ids, tokenizer.convert_tokens_to_ids(end)]
    assert tokenizer("a dog sleeps").input_ids == expected
    assert tokenizer(text_target="a dog sleeps").input_ids == expected
    assert tokenizer("").input_ids == expected[-1:]
    assert tokenizer.decode(expected, skip_special_tokens=True) == "a dog sleeps"
    ids = special_token_ids(tokenizer)
    found = [ids[f"{token}_token_id"] for token in ("decoder_start", "eos", "pad")]
    assert tokenizer.convert_ids_to_tokens(found) == [start, end, pad]
    tokenizer.save_pretrained(tmp_path / "ours")
    again = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert again("a dog sleeps").input_ids == tokenizer("a dog sleeps").input_ids
    assert special_token_ids(again) == special_token_ids(tokenizer)


def test_tokenizer_without_end_of_sentence_is_refused(tmp_path):
    fast(pad="<p>").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"{tmp_path} has no end-of-sentence token.*eos_token"):
        tokenizer_for_training(str(tmp_path))


@pytest.mark.parametrize("content", [None, '{"version": "1.0", "tru', '{"model": {}}'])
def test_unreadable_tokenizer_is_named(content, tmp_path):
    folder = tmp_path / "tokenizer"
    if content is not None:
        fast(eos="<e>").save_pretrained(folder)
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError if content is None else Exception) as error:
        tokenizer_for_training(str(folder))
    assert str(folder) in " ".join([str(error.value), *getattr(error.value, "__notes__", ())])


# ------------------------------------------------------------------------------------------------------------ coverage


def test_tokenizer_trained_here_loses_nothing():
    texts = [*TEXTS.values(), *corpus(), "<bt> A dog sleeps.", "[UNK] ##s"]
    tokenizer = train_tokenizer(["A dog sleeps."], 270, tags=["<bt>"])
    assert check_coverage(tokenizer, texts, "source", "") is check_coverage(tokenizer, texts, "target", "") is None


def wordpiece(tmp_path):
    """A tokenizer like BERT's, with the letters of English in lower case."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *letters, *(f"##{letter}" for letter in letters)]
    BertTokenizer(vocab={token: i for i, token in enumerate(tokens)}).save_pretrained(tmp_path)
    return tokenizer_for_training(str(tmp_path))


LOSSES = {  # of "a dog" and another text, without spaces
    "A Dog sleeps.": "(... becomes 'a dog sleeps.'); 0 of 15 tokens are unknown, and 0.0% of the characters are lost",
    "für": "(... becomes 'fur'); 0 of 7 tokens are unknown, and 14.3% of the characters are lost",
    "the Straße is": "(... becomes 'the is'); 1 of 10 tokens are unknown, and 43.8% of the characters are lost",
}


@pytest.mark.parametrize("text", LOSSES)
@pytest.mark.parametrize("side", ["source", "target"])
def test_texts_that_a_tokenizer_changes_are_described(side, text, tmp_path):
    found = check_coverage(wordpiece(tmp_path), ["a dog", text], side, "")
    lost = LOSSES[text].replace("...", repr(text))
    assert found == f"warning: the tokenizer changes 1 of 2 {side} texts {lost}, case aside."


def test_monstrous_texts_are_not_tried(tmp_path):
    for others in (["a dog"], []):
        assert check_coverage(wordpiece(tmp_path), [*others, 1_000_000 * "犬"], "source", "") is None


@pytest.mark.parametrize("side", ["source", "target"])
def test_tokenizer_of_another_script_is_refused(side, tmp_path):
    tokenizer = wordpiece(tmp_path)
    message = f"--tokenizer_name x has a tokenizer that does not know the {side} texts: 94% of their characters"
    with pytest.raises(UserError, match=message):
        check_coverage(tokenizer, ["Оно синее, как море."], side, "--tokenizer_name x")


# --------------------------------------------------------------------------------------------------------- BPE-dropout


SENTENCES = [*TEXTS.values(), *corpus()[:50]]


def test_bpe_dropout_changes_tokens_and_not_texts(tokenizer, tmp_path):
    expected, texts = tokenizer(SENTENCES).input_ids, [normalize(text) for text in SENTENCES]
    varied = with_bpe_dropout(tokenizer, 0.3)
    for copy in (varied, pickle.loads(pickle.dumps(varied))):  # as workers get it
        ids = copy(SENTENCES).input_ids
        assert sum(map(len, ids)) > 1.1 * sum(map(len, expected))
        assert copy(SENTENCES).input_ids != ids
        assert [row[-1] for row in ids] == [tokenizer.eos_token_id] * len(ids)
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == texts
    assert tokenizer(SENTENCES).input_ids == expected  # the tokenizer itself has no dropout, nor when it is saved
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] is None


def test_bpe_dropout_of_all_merges_leaves_bytes(tokenizer):
    ids = with_bpe_dropout(tokenizer, 1.0)(list(TEXTS.values())).input_ids
    texts = [normalize(text) for text in TEXTS.values()]
    assert [len(row) - 1 for row in ids] == [len(f" {text}".encode()) if text else 0 for text in texts]


WITHOUT_BPE = {
    "ByT5Tokenizer": ByT5Tokenizer(),
    "WordPiece": bert(),
    "WordLevel": PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))),
    "Unigram": PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("a", 0.0)]))),
}


@pytest.mark.parametrize("kind", WITHOUT_BPE)
def test_bpe_dropout_needs_a_fast_bpe_tokenizer(kind):
    with pytest.raises(UserError, match=f"^--bpe_dropout needs a fast tokenizer with a BPE model, not {kind};"):
        with_bpe_dropout(WITHOUT_BPE[kind], 0.1)


# --------------------------------------------------------------------------------------------------- Marian tokenizers


def test_marian_tokenizer_stays_the_same_saved_and_pickled(marian, marian_pairs, tmp_path):
    theirs = MarianTokenizer.from_pretrained(marian)
    tokenizer = tokenizer_for_training(str(marian))
    tokenizer.save_pretrained(tmp_path)
    again = [tokenizer, tokenizer_for_training(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)]
    for ours in [*again, pickle.loads(pickle.dumps(again[1]))]:
        assert ours.model_max_length == theirs.model_max_length
        for source, target in marian_pairs:
            assert ours(source).input_ids == theirs(source).input_ids
            ids = ours(text_target=target).input_ids
            assert ids == theirs(text_target=target).input_ids != theirs(target).input_ids
            assert ids[-1] == ours.eos_token_id and ours.batch_decode([ids], skip_special_tokens=True) == [target]
    # datasets caches by this hash.
    assert Hasher.hash(tokenizer_for_training(str(marian))) == Hasher.hash(tokenizer_for_training(str(marian)))


WITHOUT_SENTENCEPIECE = """
import sys
sys.modules["sentencepiece"] = None
from vanilla_transformer.data.tokenizer import tokenizer_for_training
tokenizer_for_training(sys.argv[1], "--model_name_or_path")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_saved_again", [True, False])
def test_missing_sentencepiece_is_named(is_saved_again, marian, tmp_path):
    """By a model as it lies on the Hub, and as it is saved."""
    if is_saved_again:
        tokenizer_for_training(str(marian)).save_pretrained(tmp_path)
    folder = str(tmp_path if is_saved_again else marian)
    result = subprocess.run([sys.executable, "-c", WITHOUT_SENTENCEPIECE, folder], capture_output=True, text=True)
    assert result.stderr.rstrip().endswith(f"of {folder} needs sentencepiece; `pip install sentencepiece`.")


def test_training_shows_no_bars_outside_a_terminal(capfd):
    """They would be blank lines in a notebook or a file."""
    train_tokenizer(["a b"], vocab_size=300)
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------- the one of a run

PAIRS = [("A dog sleeps.", "犬が寝ています。")] * 3


@pytest.fixture
def ascii_only(text_tokenizer, tmp_path) -> str:
    """A tokenizer that drops letters other than those of English."""
    text_tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    drop = '{"type": "Replace", "pattern": {"Regex": "[^ -~]"}, "content": ""}'
    file.write_text(file.read_text().replace('"normalizers": [', f'"normalizers": [{drop},'))
    return str(tmp_path)


@streamed
@pytest.mark.parametrize("option", ["--tokenizer_name", "--model_name_or_path", "--teacher"])
def test_existing_tokenizer_is_tried_on_the_training_texts(option, streaming, ascii_only, capsys):
    pairs = text_dataset(PAIRS).to_iterable_dataset() if streaming else text_dataset(PAIRS)
    existing = (option, ascii_only)
    with pytest.raises(UserError, match=f"^{option} {ascii_only} has a tokenizer that does not know the target texts"):
        make_tokenizer(existing, pairs)
    make_tokenizer(existing, pairs.map(lambda pair: {"target": "Straße"}))
    said = "the tokenizer changes 3 of 3 target texts ('Straße' becomes 'Strae'); 0 of "
    assert said in capsys.readouterr().out


def test_what_a_tokenizer_loses_of_the_tags_does_not_count(ascii_only):
    tokenizer = AutoTokenizer.from_pretrained(ascii_only)
    for pairs, is_lost in [([("犬 A dog", "a")], False), ([("A dog", "犬 a")], True)]:
        samples = sample_texts(text_dataset(pairs), tags=["犬"]).items()
        assert any(check_coverage(tokenizer, texts, side, "--tokenizer_name x") for side, texts in samples) == is_lost


@pytest.mark.parametrize(
    "before, keeps_more, expected",
    [(None, False, 2), (3, False, 2), (3, True, 3), (1, True, 2), (None, True, 2), (1000, True, 1000)],
)
@pytest.mark.parametrize("unit", ["sentences", "lines"])
def test_the_tokenizer_notes_how_many_sentences_and_lines_sources_have(
    text_tokenizer, unit, before, keeps_more, expected
):
    survey = {"usual_sentences": 1, "usual_lines": 1, **dict.fromkeys(SOURCE_KINDS, False)}
    survey |= {f"usual_{unit}": 2}
    tokenizer = deepcopy(text_tokenizer)
    if before:
        tokenizer.init_kwargs[f"max_source_{unit}"] = before
    note_source_form(tokenizer, survey, DataOptions(), keeps_more)
    assert tokenizer.init_kwargs[f"max_source_{unit}"] == expected
    note_source_form(tokenizer, survey, DataOptions(**{f"max_source_{unit}": 7}), keeps_more)
    assert tokenizer.init_kwargs[f"max_source_{unit}"] == 7


@pytest.mark.parametrize("keeps_more", [False, True])
def test_the_tokenizer_notes_tags_and_the_kinds_of_sources(text_tokenizer, keeps_more, tmp_path):
    """A tokenizer without a note may be of a model that read numbers, or capitals."""
    tokenizer, options = deepcopy(text_tokenizer), DataOptions(train_file=["a", "b"], train_file_tags=["", "<b>"])
    tokenizer.init_kwargs |= {"source_tags": ["<a>"]}
    tokenizer.init_kwargs.pop("wordless_sources", None)
    survey = {"usual_sentences": 1, "usual_lines": 1, **dict.fromkeys(SOURCE_KINDS, False)}
    note_source_form(tokenizer, survey, options, keeps_more)
    tokenizer.save_pretrained(tmp_path)
    noted = tokenizer_for_training(str(tmp_path)).init_kwargs
    assert noted["source_tags"] == (["<a>", "<b>"] if keeps_more else ["<b>"])
    assert {noted[kind] for kind in SOURCE_KINDS} == {keeps_more}
    note_source_form(tokenizer, survey, options, is_fine_tuning=True)
    assert {tokenizer.init_kwargs[kind] for kind in SOURCE_KINDS} == {keeps_more}


def test_a_verbatim_tokenizer_is_trained_and_found_again(tmp_path, capsys):
    pairs = text_dataset([("f", "def f(x):\n    return x")] * 9)
    make_tokenizer(None, pairs, 300)
    said = " ".join(capsys.readouterr().out.split())
    assert "does not keep, in target texts: line breaks (100%), double, leading or trailing spaces (100%)" in said
    verbatim = make_tokenizer(None, pairs, 300, verbatim=True)
    assert "keep" not in capsys.readouterr().out
    verbatim.save_pretrained(tmp_path / "verbatim")
    again = make_tokenizer(("--resume_from_checkpoint", str(tmp_path / "verbatim")), pairs, verbatim=True)
    assert again.decode(again(pairs[0]["target"]).input_ids, skip_special_tokens=True) == pairs[0]["target"]
    assert again.init_kwargs["verbatim"]


@pytest.mark.parametrize("kind", ["verbatim", "letters", "split_digits"])
def test_an_existing_tokenizer_is_of_no_other_kind(kind, folder):
    with pytest.raises(UserError, match=f"--{kind} trains a tokenizer, but --tokenizer_name {folder} brings one"):
        make_tokenizer(("--tokenizer_name", folder), text_dataset(PAIRS), **{kind: True})


def test_the_first_of_checkpoint_model_tokenizer_and_teacher_has_the_tokenizer(tmp_path):
    assert named_tokenizer(tmp_path, "m", "x", ["t", "u"]) == ("--resume_from_checkpoint", str(tmp_path))
    assert named_tokenizer(None, "m", "x", ["t", "u"]) == ("--model_name_or_path", "m")
    assert named_tokenizer(None, None, "x", ["t", "u"]) == ("--tokenizer_name", "x")
    assert named_tokenizer(None, None, None, ["t", "u"]) == ("--teacher", "t")
    assert named_tokenizer(None, None, None, None) is None


@pytest.mark.parametrize(("target", "is_decomposed"), [("k a", True), ("ka 가", False)])
def test_letters_of_korean_syllables_are_tokens_unless_targets_have_them(target, is_decomposed):
    """What the model writes could else not be composed in every engine."""
    tokenizer = make_tokenizer(None, text_dataset([("가", target), ("나 가", target)] * 9), 300, letters=True)
    syllable = tokenizer.decode(tokenizer("가").input_ids[:-1])
    assert (syllable == "\u1100\u1161") == is_decomposed == (len(tokenizer("가").input_ids) == 4)
    assert unicodedata.normalize("NFC", syllable) == "가" and tokenizer("\u1100\u1161") == tokenizer("가")


@streamed
def test_a_new_tokenizer_is_trained_on_both_sides(streaming, text_tokenizer, monkeypatch):
    """The texts are counted for the progress bar, but for those of a stream."""
    found, pairs = [], text_dataset([("a", "b"), ("c", "d")])
    given = Mock(side_effect=lambda texts, *given, **how: found.append((sorted(texts), *given)) or text_tokenizer)
    monkeypatch.setattr(tokenizer_code, "train_tokenizer", given)
    make_tokenizer(None, pairs.to_iterable_dataset() if streaming else pairs, 300)
    make_tokenizer(None, pairs, None)
    texts, default = ["a", "b", "c", "d"], VanillaTransformerConfig().vocab_size
    assert found == [(texts, 300, None if streaming else 4, []), (texts, default, 4, [])]


def test_directories_with_a_card_and_the_same_name_have_their_own_tokenizers(tmp_path):
    """Of such datasets, the fingerprint of `datasets` is the same."""
    found, fingerprints = [], set()
    for word in ("apple", "Zebra"):
        folder = tmp_path / word / "corpus"
        write(folder / "pairs.jsonl", rows(pairs=[(f"{word} {word}", word)] * 9))
        write_card(folder, {"default": {"train": "pairs.jsonl", "validation": "pairs.jsonl"}})
        pairs = load(dataset_name=folder)["train"]
        fingerprints.add(pairs._fingerprint)
        found.append(make_tokenizer(None, pairs, 300).tokenize(word))
    assert len(fingerprints) == 1 and found == [["\u0120apple"], ["\u0120Zebra"]]


def contents(tokenizer, folder: Path) -> dict[str, bytes]:
    tokenizer.save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_trained_tokenizer_is_found_by_the_next_run(cache, tmp_path, monkeypatch):
    """And is the same to the bit. Other pairs, another size or other tags need another one."""
    training = Mock(wraps=train_tokenizer)
    monkeypatch.setattr(tokenizer_code, "train_tokenizer", training)
    pairs, other = text_dataset(PAIRS), text_dataset(PAIRS[:2])
    first = contents(make_tokenizer(None, pairs, 300, ["<bt>"]), tmp_path / "first")
    second = contents(make_tokenizer(None, text_dataset(PAIRS), 300, ["<bt>"]), tmp_path / "second")
    assert training.call_count == 1 and first == second
    for number, given in enumerate([(other, 300, ["<bt>"]), (pairs, 280, ["<bt>"]), (pairs, 300, [])], start=2):
        make_tokenizer(None, *given)
        assert training.call_count == number
    assert len(list((cache / "tokenizers").iterdir())) == 4


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model": 3}'])
def test_a_damaged_file_of_a_tokenizer_is_replaced(damage, cache, tmp_path):
    first = contents(make_tokenizer(None, text_dataset(PAIRS), 300), tmp_path / "first")
    (file,) = (cache / "tokenizers").iterdir()
    whole = file.read_text(encoding="utf-8")
    file.write_text(damage, encoding="utf-8")
    assert contents(make_tokenizer(None, text_dataset(PAIRS), 300), tmp_path / "second") == first
    assert file.read_text(encoding="utf-8") == whole


def test_a_tokenizer_is_trained_without_a_cache(cache, tmp_path):
    cache.write_text("not a folder", encoding="utf-8")
    assert len(make_tokenizer(None, text_dataset(PAIRS), 300)) <= 300


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_verbatim_is_advised_where_it_is_possible(kind, capsys):
    make_tokenizer(None, text_dataset([(f"a  dog {n}", f"ein  Hund {n}") for n in range(50)]), 300, kind=kind)
    said = capsys.readouterr().out
    assert "does not keep, in source texts: double" in said and ("--verbatim" in said) == (kind == "bpe")


def test_tags_are_tokens_of_their_own(folder, text_tokenizer):
    pairs, existing = text_dataset(PAIRS), ("--tokenizer_name", folder)
    assert len(make_tokenizer(None, pairs, 300, ["", "<bt>", "<x>"]).tokenize("<bt>")) == 1
    assert make_tokenizer(existing, pairs, tags=["", None]).vocab_size == text_tokenizer.vocab_size
    special, unknown = "</s>, a special token of the tokenizer", "<bt>, which is not one token of the tokenizer"
    for tokenizer, tag, message in [(existing, "</s>", special), (None, "</s>", special), (existing, "<bt>", unknown)]:
        with pytest.raises(UserError, match=f"^--train_file_tags has {message}"):
            make_tokenizer(tokenizer, pairs, 300, tags=[tag])


def test_an_existing_tokenizer_keeps_its_size(folder, text_tokenizer, tmp_path, capsys):
    pairs, size = text_dataset([("A dog sleeps.", "No!")]), len(text_tokenizer)
    options = ("--model_name_or_path", "--tokenizer_name")
    for option, vocab_size in itertools.product(options, (100, size + 1, size, None)):
        assert len(make_tokenizer((option, folder), pairs, vocab_size)) == size
        said = f"--vocab_size {vocab_size} has no effect: {folder} keeps its tokenizer with {size} tokens"
        printed, is_other = capsys.readouterr().out, vocab_size in (100, size + 1)
        assert (said in printed) == ("--vocab_size" in printed) == (option == "--model_name_or_path" and is_other)
    with pytest.raises(UserError, match=f"^{tmp_path} has no tokenizer; delete this checkpoint"):
        make_tokenizer(("--resume_from_checkpoint", str(tmp_path)), pairs)
    assert len(make_tokenizer(("--resume_from_checkpoint", folder), text_dataset(PAIRS), size + 99)) == size
    assert "--vocab_size" not in capsys.readouterr().out  # as in the sample, whose pairs give fewer than it asks for
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"model')
    with pytest.raises(UserError, match=f"^{tmp_path} cannot be read: its tokenizer: .*; delete this checkpoint"):
        make_tokenizer(("--resume_from_checkpoint", str(tmp_path)), pairs)
