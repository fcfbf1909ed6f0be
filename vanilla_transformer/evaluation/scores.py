"""BLEU and chrF by sacreBLEU, with the tokenizer that fits the target language."""

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

from sacrebleu.metrics import BLEU, CHRF

from ..data.texts import normalize
from ..errors import UserError
from ..languages import parse_language

# How sacreBLEU tokenizes languages that are written without spaces.
CHINESE = ["zh", "cmn", "yue", "wuu", "nan", "hak", "gan", "hsn", "cdo", "lzh"]
BLEU_TOKENIZER = dict.fromkeys(CHINESE, "zh") | {"ja": "ja-mecab", "ko": "ko-mecab"}
BLEU_TOKENIZER |= dict.fromkeys(["th", "tts", "nod", "sou", "lo", "km", "my", "shn", "bo", "dz"], "char")
# The same by script: how the names of its characters begin in Unicode.
SCRIPT_TOKENIZER = {"HIRAGANA": "ja-mecab", "KATAKANA": "ja-mecab", "CJK": "zh", "HANGUL": "ko-mecab"}
SCRIPT_TOKENIZER |= dict.fromkeys(["THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"], "char")
SHOWN_AS_0 = 0.005  # scores below have the decimals .00


def make_bleu(target_lang: str | None = None, tokenize: str | None = None, lowercase: bool = False) -> BLEU:
    """BLEU with sacreBLEU's tokenizer `tokenize`, or else the one for the target language.

    `target_lang` is a language by any name that [`parse_language`] knows, such as `zh`, `zho_Hans` or `chinese`.
    Languages with spaces use 13a, and so do Latin letters. If the language is Japanese or Korean and its tokenizer is
    not installed, characters are scored; the signature says so.

    Raises:
        UserError: sacreBLEU has no tokenizer called `tokenize`, or that one is not installed.
    """
    code, script = parse_language(target_lang)
    chosen = tokenize or ("13a" if script == "latn" else BLEU_TOKENIZER.get(code, "13a"))
    if chosen not in BLEU.TOKENIZERS:
        raise UserError(f"--bleu_tokenize {chosen} does not exist; choose one of {', '.join(BLEU.TOKENIZERS)}.")
    # With `force`, sacreBLEU does not warn of text that is tokenized already, which is what "none" is for.
    options = {"lowercase": lowercase, "force": chosen == "none"}
    try:
        return NormalizedBLEU(tokenize=chosen, **options)
    except (RuntimeError, ImportError, OSError) as error:  # its package or its vocabulary is not there
        if tokenize is None:
            return NormalizedBLEU(tokenize="char", **options)
        raise UserError(f"--bleu_tokenize {chosen} cannot be used: {' '.join(str(error).split())}") from error


def unfit_tokenizer(bleu: BLEU, references: Iterable[str]) -> str | None:
    """A sentence that names a better tokenizer, if 13a is used for references in a script that it does not fit."""
    found = Counter()
    for letter, count in Counter(itertools.chain.from_iterable(references)).items():
        if unicodedata.category(letter)[0] in "LM":  # some vowels of Thai are marks
            script = re.match(r"\w*", unicodedata.name(letter, ""))[0]
            found[SCRIPT_TOKENIZER.get(script)] += count
    if found["ja-mecab"] > found["zh"] / 10:  # Japanese is written with Chinese characters too
        found["ja-mecab"] += found.pop("zh", 0)
    better = max(found, key=found.get, default=None)
    if better is None or bleu.tokenizer.signature() != "13a":
        return None
    return f"BLEU's tokenizer 13a does not fit the script of most references; use --bleu_tokenize {better}."


def explain_zero(bleu: BLEU, chrf: float, hypotheses: list[str], references: list[str]) -> str | None:
    """A sentence that says why BLEU is 0 although chrF is not; None if that is not so."""
    score = bleu.corpus_score(hypotheses, [references])
    if not score.score < SHOWN_AS_0 <= chrf:
        return None
    if score.totals[-1]:
        return "BLEU is 0: hardly any word of the translations is in its reference."
    reason = f"no translation has four words, as {bleu.tokenizer.signature()} counts them, and so no 4-gram"
    return f"BLEU is 0, and chrF {chrf:.2f}: {reason}; compare by chrF."


class NormalizedBLEU(BLEU):
    """sacreBLEU's, of texts as [`normalize`] makes them: a tokenizer may have normalized translations, and then no
    reference would be equal to them that spells its letters otherwise."""

    def _preprocess_segment(self, sent: str) -> str:
        return super()._preprocess_segment(normalize(sent))


class NormalizedCHRF(CHRF):
    """sacreBLEU's, of texts as [`normalize`] makes them."""

    def _preprocess_segment(self, sent: str) -> str:
        return super()._preprocess_segment(normalize(sent))


class Scorer:
    """Corpus BLEU and chrF2 with one reference each, by sacreBLEU, of texts as [`normalize`] makes them.

    `target_lang` and `tokenize` choose the tokenizer of BLEU, as in [`make_bleu`]. With `lowercase`, case does not
    count. Raises UserError as [`make_bleu`] does.
    """

    def __init__(self, target_lang: str | None = None, tokenize: str | None = None, lowercase: bool = False):
        self.bleu = make_bleu(target_lang, tokenize, lowercase)
        self.chrf = NormalizedCHRF(lowercase=lowercase)
        self.is_told = tokenize is not None  # and then no tokenizer is advised

    def score(self, hypotheses: list[str], references: list[str]) -> dict:
        """The scores `bleu` and `chrf`, and `bleu_signature` and `chrf_signature`, which say how they were made."""
        scores = {}
        for name, metric in {"bleu": self.bleu, "chrf": self.chrf}.items():
            scores[name] = metric.corpus_score(hypotheses, [references]).score
            scores[f"{name}_signature"] = str(metric.get_signature())
        return scores

    def doubts(self, references: Iterable[str]) -> str | None:
        """A sentence that names a better tokenizer, if none was given and 13a does not fit the references."""
        return None if self.is_told else unfit_tokenizer(self.bleu, references)
