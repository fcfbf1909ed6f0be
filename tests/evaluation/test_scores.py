"""BLEU and chrF are sacreBLEU's, with the tokenizer that fits the target language."""

import socket
from unittest.mock import Mock

import pytest
import sacrebleu
from sacrebleu.metrics import BLEU

from vanilla_transformer.errors import UserError
from vanilla_transformer.evaluation import scores as scoring
from vanilla_transformer.evaluation.scores import TranslationQuality, make_bleu

REFERENCES = [
    "Der Hund schläft heute nicht.",
    "Ein Mann fährt mit dem Rad.",
    "Zwei Kinder spielen im Park.",
    "纽约是城市。",
]
TRANSLATIONS = {
    "perfect": REFERENCES,
    "close": ["der Hund schläft heute.", "Ein Mann fährt Rad.", "Zwei Kinder spielen im Park .", "纽约 是 城市。"],
    "wrong": ["a", "b", "c", "d"],
    "empty": ["", "", "", ""],
}
CHINESE = [f"我今天在城市里看到第{number}只狗。" for number in "一二三四五六七八九十百千万甲乙丙丁戊己庚"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("scoring used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def score(translations, references, **options) -> dict:
    return TranslationQuality(**options).compute(predictions=translations, references=references)


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_scores_equal_sacrebleu(name):
    scores = score(TRANSLATIONS[name], REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(TRANSLATIONS[name], [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(TRANSLATIONS[name], [REFERENCES]).score
    if name == "close":
        assert 5 < scores["bleu"] < 95 and 5 < scores["chrf"] < 95


def test_signatures_name_the_metric():
    scores = score(REFERENCES, REFERENCES)
    version = f"version:{sacrebleu.__version__}"
    assert {"nrefs:1", "case:mixed", "tok:13a", "smooth:exp", version} <= {*scores["bleu_signature"].split("|")}
    assert {"nrefs:1", "case:mixed", "nc:6", "nw:0", version} <= {*scores["chrf_signature"].split("|")}
    assert scores.keys() == {"bleu", "chrf", "bleu_signature", "chrf_signature"}


@pytest.mark.parametrize("language", ["zh", "zh_CN", "zh_cn", "ZH-tw", "zho_Hans", "cmn"])
def test_perfect_chinese_scores_100(language):
    """13a takes a whole sentence for one word, which has no 4-grams."""
    assert score(CHINESE, CHINESE)["bleu"] == 0
    assert score(CHINESE, CHINESE, target_lang=language)["bleu"] == pytest.approx(100)


TOKENIZERS = [("de", None, "13a"), (None, None, "13a"), ("", None, "13a"), ("th", None, "char")]
TOKENIZERS += [("zh_CN", None, "zh"), ("zh", "intl", "intl"), ("my", None, "char"), ("my_answer", None, "13a")]


@pytest.mark.parametrize("language, named, tokenizer", TOKENIZERS)
def test_tokenizer_is_the_named_one_or_that_of_the_target_language(language, named, tokenizer):
    scores = score(REFERENCES, REFERENCES, target_lang=language, tokenize=named)
    assert f"tok:{tokenizer}" in scores["bleu_signature"]


@pytest.mark.parametrize("language, package", [("ja", "ja-mecab"), ("ko", "ko-mecab"), ("jpn_Jpan", "ja-mecab")])
def test_characters_where_mecab_is_not_installed(language, package, monkeypatch):
    def without_mecab(tokenize, **options):
        if "mecab" in tokenize:
            raise RuntimeError(f"install sacrebleu[{tokenize}]")
        return BLEU(tokenize=tokenize, **options)

    without_mecab.TOKENIZERS = BLEU.TOKENIZERS
    monkeypatch.setattr(scoring, "BLEU", without_mecab)
    assert "tok:char" in score(CHINESE, CHINESE, target_lang=language)["bleu_signature"]
    with pytest.raises(UserError, match=f"--bleu_tokenize {package} cannot be used: install sacrebleu"):
        make_bleu(language, package)


@pytest.mark.parametrize("error", [ImportError("install sentencepiece"), OSError("no network")])
def test_a_tokenizer_that_cannot_be_loaded_is_named(error, monkeypatch):
    monkeypatch.setattr(scoring, "BLEU", Mock(side_effect=error, TOKENIZERS=BLEU.TOKENIZERS))
    with pytest.raises(UserError, match=f"--bleu_tokenize flores200 cannot be used: {error}"):
        make_bleu("de", "flores200")


def test_text_that_is_tokenized_already_is_scored_without_a_warning(caplog):
    tokens = [["Ein Satz , und noch einer ."] * 200]
    make_bleu("de", "none").corpus_score(tokens[0], tokens)
    assert not caplog.records
    make_bleu("de").corpus_score(tokens[0], tokens)
    assert "tokenized" in caplog.text
