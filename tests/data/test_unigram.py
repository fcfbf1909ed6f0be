"""The unigram tokenizer is SentencePiece's: from its `.spm`, the library makes the same tokens."""

import io
import random
import unicodedata

import pytest
import sentencepiece

from vanilla_transformer.data.texts import normalize
from vanilla_transformer.data.tokenizer import sentencepiece_tokenizer, train_unigram_tokenizer
from vanilla_transformer.data.unigram import SPECIAL_IDS, sentencepiece_model
from vanilla_transformer.errors import UserError

SENTENCES = [
    "Ein Mann fährt Rad.",
    "A man rides a bike.",
    "Zwei Hunde spielen im Schnee.",
    "Two dogs play in the snow.",
]
ODD = [
    "e\u0301te\u0301 \u1112\u1161\u11ab",
    "\xa0a\tb  c\u200b",
    "纽约 is big",
    "👩‍👧 👍🏽",
    "½ ﬁ ™ … Å क़",
    "-- '\"«»",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_unigram_tokenizer(20 * SENTENCES, 330)


def test_sentencepiece_makes_the_same_tokens(tokenizer):
    generator = random.Random(0)
    letters = [chr(code) for code in range(1, 0x30000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    letters += 8000 * " ae"
    texts = SENTENCES + ODD + ["".join(generator.choices(letters, k=12)) for _ in range(3000)]
    texts = [text for text in texts if "▁" not in text]
    spm = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(tokenizer))
    assert (spm.eos_id(), spm.unk_id(), spm.bos_id(), spm.pad_id()) == (0, 1, -1, -1)
    ours = tokenizer(texts).input_ids
    assert [ids[:-1] for ids in ours] == spm.encode(texts)
    assert {ids[-1] for ids in ours} == {0} == {tokenizer.eos_token_id}
    assert spm.decode(spm.encode(texts)) == list(map(normalize, texts))


@pytest.mark.parametrize(("rules", "fallback"), [("nmt_nfkc", False), ("identity", False), ("nmt_nfkc_cf", True)])
def test_a_vocabulary_of_marian_is_written_as_it_was_read(rules, fallback, tmp_path):
    """Without bytes, as Marian trains it, and with the characters that it replaces."""
    how = {"normalization_rule_name": rules, "byte_fallback": fallback, "vocab_size": 330 if fallback else 60}
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(20 * SENTENCES), model_writer=trained, hard_vocab_limit=False, **how, **SPECIAL_IDS
    )
    (tmp_path / "vocab.spm").write_bytes(trained.getvalue())
    tokenizer = sentencepiece_tokenizer(tmp_path / "vocab.spm")
    before, after = (
        sentencepiece.SentencePieceProcessor(model_proto=proto)
        for proto in (trained.getvalue(), sentencepiece_model(tokenizer))
    )
    texts = [*SENTENCES, *ODD, "Ａ MAN"]
    assert after.encode(texts) == before.encode(texts)
    assert before.encode(SENTENCES) == [ids[:-1] for ids in tokenizer(SENTENCES).input_ids]


def test_the_same_texts_train_the_same_pieces(tokenizer):
    again = train_unigram_tokenizer(20 * SENTENCES, 330)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_tags_are_one_token_and_unknown_characters_are_bytes():
    tokenizer = train_unigram_tokenizer(20 * SENTENCES, 330, ["<bt>"])
    assert tokenizer.tokenize("<bt> 犬")[0].strip() == "<bt>" and len(tokenizer.tokenize("犬")) == 4
    assert tokenizer.decode(tokenizer("<bt> 犬").input_ids, skip_special_tokens=True) == "<bt> 犬"
    assert tokenizer.convert_tokens_to_ids(["</s>", "<unk>"]) == [0, 1] and len(tokenizer) <= 330


def test_a_vocabulary_that_is_too_small_is_refused():
    for size in (100, 265):
        with pytest.raises(UserError, match=f"--vocab_size {'is' if size < 260 else size - 2}"):
            train_unigram_tokenizer(20 * SENTENCES, size)
