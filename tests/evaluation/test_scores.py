"""BLEU and chrF are sacreBLEU's, with the tokenizer that fits the target language."""

import json
import socket
import subprocess
import sys
from unittest.mock import Mock

import pytest
import sacrebleu
from sacrebleu.metrics import BLEU
from transformers import ByT5Tokenizer

from vanilla_transformer.data.texts import normalize
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.evaluation import scores as scoring
from vanilla_transformer.evaluation.scores import Scorer, explain_sameness, explain_zero, make_bleu, unfit_tokenizer

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
    return Scorer(**options).score(translations, references)


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_scores_equal_sacrebleu(name):
    scores = score(TRANSLATIONS[name], REFERENCES)
    assert scores.keys() == {"bleu", "chrf", "bleu_signature", "chrf_signature"}
    assert scores["bleu"] == sacrebleu.corpus_bleu(TRANSLATIONS[name], [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(TRANSLATIONS[name], [REFERENCES]).score
    if name == "close":
        assert 5 < scores["bleu"] < 95 and 5 < scores["chrf"] < 95


CHINESE_NAMES = ["zh", "zh_CN", "zh_cn", "ZH-tw", "zh-Hant-TW", "zho_Hans", "zh_hans", "chi", "cmn", "cn", "chinese"]


@pytest.mark.parametrize("language", [*CHINESE_NAMES, "Chinese (simplified)", "mandarin", "yue", "中文"])
def test_perfect_chinese_scores_100(language):
    """13a takes a whole sentence for one word, which has no 4-grams."""
    assert score(CHINESE, CHINESE)["bleu"] == 0
    assert score(CHINESE, CHINESE, target_lang=language)["bleu"] == pytest.approx(100)


TOKENIZERS = [("de", None, "13a"), (None, None, "13a"), ("", None, "13a"), ("th", None, "char")]
TOKENIZERS += [("zh_CN", None, "zh"), ("zh", "intl", "intl"), ("my", None, "char"), ("my_answer", None, "13a")]
TOKENIZERS += [(name, None, "char") for name in ("tha", "thai", "th_TH", "lao", "khmer", "mya_Mymr", "burmese", "bo")]
TOKENIZERS += [("zho_Latn", None, "13a"), ("nan_Latn_TW", None, "13a"), ("chinese_english", None, "13a")]


@pytest.mark.parametrize("language, named, tokenizer", TOKENIZERS)
def test_tokenizer_is_the_named_one_or_that_of_the_target_language(language, named, tokenizer):
    scores = score(REFERENCES, REFERENCES, target_lang=language, tokenize=named)
    assert f"tok:{tokenizer}" in scores["bleu_signature"]


JAPANESE_AND_KOREAN = [(name, "ja-mecab") for name in ("ja", "jpn_Jpan", "jp", "japanese", "ja-JP")]
JAPANESE_AND_KOREAN += [(name, "ko-mecab") for name in ("ko", "kor_Hang", "korean")]


@pytest.mark.parametrize("language, package", JAPANESE_AND_KOREAN)
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


SCRIPTS = {"zh": CHINESE, "ja-mecab": ["犬が眠る。", "東京は大都市です。"], "ko-mecab": ["개가 잔다.", "도시"]}
SCRIPTS |= {"char": ["หมากำลังนอน", "เมืองใหญ่"], None: ["Der Hund schläft.", "北京", "ひ"]}


@pytest.mark.parametrize("better, references", SCRIPTS.items())
def test_the_script_of_the_references_names_a_better_tokenizer(better, references):
    """Unless most are in a script with spaces, or the tokenizer is another one."""
    said = unfit_tokenizer(make_bleu(), references)
    assert said is None if better is None else f"use --bleu_tokenize {better}." in said
    assert unfit_tokenizer(make_bleu("th"), references) is unfit_tokenizer(make_bleu(), []) is None


def test_a_bleu_of_0_is_explained_if_chrf_is_not_0():
    def explain(hypotheses, references):
        return explain_zero(make_bleu(), score(hypotheses, references)["chrf"], hypotheses, [references])

    short = ["Datei öffnen", "Seite drucken"]
    assert "and chrF 100.00: no translation has four words, as 13a counts them" in explain(short, short)
    wrong = ["Hunde schliefen nicht immer tief"]
    assert "hardly any word of the translations is in its reference" in explain(wrong, ["Der Hund schläft"])
    cut = ["der Hund schläft hier"], [" ".join(["der Hund schläft hier"] * 16)]
    assert explain(*cut) == "BLEU is 0: the translations have only 6% of the length of the references."
    score_of = explain_zero(BLEU(smooth_method="none"), 50.0, ["d c b a"], [["a b c d"]])
    assert score_of == "BLEU is 0: hardly any sequence of words of the translations is in its reference."
    assert explain(["a b c d"], ["X Y"]) is explain(REFERENCES, REFERENCES) is explain([""], ["X"]) is None


RAW = [
    "5 \u2126 at 300 \u212a is fine",
    "Cafe\u0301s in Zu\u0308rich o\u0308ffnen fru\u0308h",
    "a\u00a0b  c\u200b d e f",
]
RAW_HYPOTHESES = {
    "as they are": RAW,
    "composed": list(map(normalize, RAW)),
    "other words": ["5 \u2126 at 300 K is fine", "Cafe\u0301s in Bern o\u0308ffnen spa\u0308t", "a b c  d\u00ad e"],
}


@pytest.mark.parametrize("name", RAW_HYPOTHESES)
def test_texts_are_scored_as_they_are_under_the_signature_of_sacrebleus_command(name, tmp_path):
    """Decomposed letters, signs with two code points, doubled, no-break and zero-width spaces."""
    files = {"references": RAW, "hypotheses": RAW_HYPOTHESES[name]}
    for file, texts in files.items():
        (tmp_path / file).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", "hypotheses", "-m", "bleu", "chrf", "-w", "12"]
    printed = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout)
    scores = score(RAW_HYPOTHESES[name], RAW)
    assert [round(scores[metric], 12) for metric in ("bleu", "chrf")] == [one["score"] for one in printed]
    assert [scores["bleu_signature"], scores["chrf_signature"]] == [one["signature"] for one in printed]


@pytest.mark.parametrize(
    "text",
    ["\u0986\u09ae\u09bf \u09ac\u09be\u09dc\u09bf \u09af\u09be\u0987 \u0993", RAW[0], RAW[1], RAW[2]],
)
def test_both_sides_are_normalized_if_the_tokenizer_cannot_write_the_references(text):
    """Which the signature says; a perfect model would not get 100 otherwise."""
    trained, scorer = train_tokenizer([text], 300), Scorer()
    assert "norm:nfc" in scorer.fit(trained, [text])
    scores = scorer.score([normalize(text)], [text])
    assert (scores["bleu"], scores["chrf"]) == (pytest.approx(100), pytest.approx(100))
    assert all("|norm:nfc|version:" in scores[f"{name}_signature"] for name in ("bleu", "chrf"))
    raw = Scorer(normalization="none")
    assert raw.fit(trained, [text]) is None and "norm" not in raw.score([text], [text])["bleu_signature"]
    for tokenizer, texts in [(ByT5Tokenizer(), [text]), (trained, ["composed: ü"])]:
        assert Scorer().fit(tokenizer, texts) is None


def test_several_references_are_scored_as_by_sacrebleu():
    references = [[REFERENCES[0], "Der Hund ist heute wach."], REFERENCES[1], [REFERENCES[2], "Zwei Kinder", "x"]]
    streams = [[REFERENCES[0], REFERENCES[1], REFERENCES[2]], ["Der Hund ist heute wach.", None, "Zwei Kinder"]]
    streams += [[None, None, "x"]]
    hypotheses = ["Der Hund ist wach.", "Ein Mann fährt Rad.", "Zwei Kinder spielen."]
    scores = score(hypotheses, references)
    assert scores["bleu"] == BLEU().corpus_score(hypotheses, streams).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(hypotheses, streams).score
    assert "nrefs:var" in scores["bleu_signature"]
    assert "nrefs:2" in score(["a"], [["a", "b"]])["chrf_signature"]


SENTENCES = [f"Sentence number {number}." for number in range(100)]


@pytest.mark.parametrize(
    "hypotheses, references, is_said",
    [
        (["The same one."] * 60 + SENTENCES[:40], SENTENCES, True),
        (["One of two.", "The other."] * 50, SENTENCES, True),
        (SENTENCES[:5] * 20, SENTENCES, True),
        (SENTENCES, SENTENCES, False),
        (["yes", "no"] * 50, ["yes", "no"] * 50, False),
        (["yes"] * 100, ["yes"] * 95 + SENTENCES[:5], False),
        (["The same one."] * 9, SENTENCES[:9], False),
    ],
)
def test_translations_that_are_nearly_all_the_same_are_said(hypotheses, references, is_said):
    said = explain_sameness(hypotheses, references)
    assert bool(said) == is_said
    assert said is None or "train longer" in said and "--learning_rate" in said


def test_a_long_translation_that_is_nearly_all_the_same_is_shown_in_part_even_without_spaces():
    said = explain_sameness(["猫は眠る" * 30] * 100, SENTENCES)
    assert f"100 of 100 are '{'猫は眠る' * 15}…', and only 1" in said
