"""BLEU and chrF by sacreBLEU, with the tokenizer that fits the target language, beside metrics of `evaluate`."""

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Signature
from transformers import PreTrainedTokenizerBase

from ..data.texts import SPACES, normalize
from ..errors import UserError, shortened
from ..languages import parse_language
from .further_metrics import Metrics, as_list

# How sacreBLEU tokenizes languages that are written without spaces.
CHINESE = ["zh", "cmn", "yue", "wuu", "nan", "hak", "gan", "hsn", "cdo", "lzh"]
BLEU_TOKENIZER = dict.fromkeys(CHINESE, "zh") | {"ja": "ja-mecab", "ko": "ko-mecab"}
BLEU_TOKENIZER |= dict.fromkeys(["th", "tts", "nod", "sou", "lo", "km", "my", "shn", "bo", "dz"], "char")
# The same by script: how the names of its characters begin in Unicode.
SCRIPT_TOKENIZER = {"HIRAGANA": "ja-mecab", "KATAKANA": "ja-mecab", "CJK": "zh", "HANGUL": "ko-mecab"}
SCRIPT_TOKENIZER |= dict.fromkeys(["THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"], "char")
SHOWN_AS_0 = 0.005  # scores below have the decimals .00
# Translations are suspiciously alike if, with at least so many distinct references, at most so many times as many
# translations are distinct.
FEWEST_REFERENCES, DISTINCT_SHARE = 20, 0.1


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
        return BLEU(tokenize=chosen, **options)
    except (RuntimeError, ImportError, OSError) as error:  # its package or its vocabulary is not there
        if tokenize is None:
            return BLEU(tokenize="char", **options)
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


def explain_zero(bleu: BLEU, chrf: float, hypotheses: list[str], streams: list[list[str | None]]) -> str | None:
    """A sentence that says why BLEU is 0 although chrF is not; None if that is not so."""
    score = bleu.corpus_score(hypotheses, streams)
    if not score.score < SHOWN_AS_0 <= chrf:
        return None
    if score.totals[-1]:
        if score.precisions[0] <= 10:
            return "BLEU is 0: hardly any word of the translations is in its reference."
        if score.bp < 0.01:
            return f"BLEU is 0: the translations have only {score.ratio:.0%} of the length of the references."
        return "BLEU is 0: hardly any sequence of words of the translations is in its reference."
    reason = f"no translation has four words, as {bleu.tokenizer.signature()} counts them, and so no 4-gram"
    return f"BLEU is 0, and chrF {chrf:.2f}: {reason}; compare by chrF."


class Scorer:
    """Corpus BLEU and chrF2 by sacreBLEU, and further metrics of the evaluate library.

    Texts are scored as they are, so both scores equal those of sacreBLEU's command under the same signature. A text
    has one reference, or a list of them.

    Args:
        target_lang, tokenize: Choose the tokenizer of BLEU, as in [`make_bleu`].
        lowercase: Whether to ignore case.
        normalization: `nfc` composes letters and removes invisible characters on both sides before scoring, which the
            signatures name as `norm:nfc`. None: `none`, unless [`fit`] finds that a tokenizer needs `nfc`.
        metrics: Further [`Metrics`].

    Raises:
        UserError: As [`make_bleu`].
    """

    def __init__(
        self,
        target_lang: str | None = None,
        tokenize: str | None = None,
        lowercase: bool = False,
        normalization: Literal["none", "nfc"] | None = None,
        metrics: Metrics | None = None,
    ):
        self.bleu = make_bleu(target_lang, tokenize, lowercase)
        self.chrf = CHRF(lowercase=lowercase)
        self.lowercase = lowercase
        self.normalization = normalization
        self.metrics = metrics or Metrics()
        self.is_told = tokenize is not None  # and then no tokenizer is advised

    def fit(self, tokenizer: PreTrainedTokenizerBase, references: Iterable[str | list[str]]) -> str | None:
        """Turns normalization on if a reference is not in NFC and the tokenizer can write it only in NFC.

        Such a tokenizer normalizes what it reads, so the model never learnt to write the other form. Does nothing if
        `normalization` was given. Returns a warning that says so, or None.
        """
        if self.normalization is not None:
            return None
        odd = {text for one in references for text in as_list(one) if text and normalize(text) != fold_spaces(text)}
        written = [
            tokenizer.decode(tokenizer(text, verbose=False).input_ids, skip_special_tokens=True) for text in odd
        ]
        if not any(normalize(text) == fold_spaces(new) for text, new in zip(odd, written, strict=True)):
            return None
        self.normalization = "nfc"
        return (
            "the tokenizer writes letters in their composed form (NFC) and drops invisible characters, and some "
            "references have others; both sides are normalized for BLEU, chrF and the word error rate (norm:nfc in "
            "the signatures)."
        )

    def prepare(self, texts: list[str]) -> list[str]:
        """The texts as they are scored."""
        return list(map(normalize, texts)) if self.normalization == "nfc" else texts

    def streams(self, references: list[str | list[str]]) -> list[list[str | None]]:
        """The references as sacreBLEU takes them: the first of each text, the second, ...; None if there is none."""
        rows = [self.prepare(as_list(one)) for one in references]
        return [list(stream) for stream in itertools.zip_longest(*rows)]

    def signature(self, given: Signature) -> str:
        """A signature of sacreBLEU as text, with the normalization."""
        return str(given).replace("|version:", "|norm:nfc|version:") if self.normalization == "nfc" else str(given)

    def score(
        self, hypotheses: list[str], references: list[str | list[str]], sources: list[str] | None = None
    ) -> dict[str, float | str]:
        """`bleu` and `chrf`, their signatures `bleu_signature` and `chrf_signature`, and the further metrics by name.

        `sources` are for metrics that read them, such as COMET.
        """
        prepared, streams, scores = self.prepare(hypotheses), self.streams(references), {}
        for name, metric in {"bleu": self.bleu, "chrf": self.chrf}.items():
            scores[name] = metric.corpus_score(prepared, streams).score
            scores[f"{name}_signature"] = self.signature(metric.get_signature())
        return scores | self.metrics.score(hypotheses, references, sources)

    def advise_tokenizer(self, references: Iterable[str | list[str]]) -> str | None:
        """A sentence that names a better tokenizer, if none was given and 13a does not fit the references."""
        texts = itertools.chain.from_iterable(map(as_list, references))
        return None if self.is_told else unfit_tokenizer(self.bleu, texts)


def fold_spaces(text: str) -> str:
    """The text with runs of spaces as one, none at the ends: sacreBLEU's scores do not depend on spaces."""
    return re.sub(SPACES, " ", text).strip(" ")


def explain_sameness(hypotheses: list[str], references: list[str | list[str]]) -> str | None:
    """A sentence about hypotheses that repeat each other far more than the references do, and what to try; or None."""
    found, expected = Counter(hypotheses), Counter(as_list(one)[0] for one in references)
    if len(expected) < FEWEST_REFERENCES:
        return None
    (text, count), (_, usual) = (counts.most_common(1)[0] for counts in (found, expected))
    is_one = 2 * count >= len(hypotheses) and 4 * usual <= len(hypotheses)
    if not (is_one or len(found) <= DISTINCT_SHARE * len(expected)):
        return None
    return (
        f"many translations are the same: {count:,} of {len(hypotheses):,} are {shortened(text)!r}, and only "
        f"{len(found):,} are distinct. The model does not read its sources yet: train longer; if that does not help, "
        "lower --learning_rate or raise --warmup_steps, choose a smaller model or --vocab_size, or find more pairs."
    )
