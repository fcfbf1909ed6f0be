"""BLEU and chrF by sacreBLEU, with the tokenizer that fits the target language."""

import re

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF

from ..errors import UserError

# How sacreBLEU tokenizes languages that are written without spaces; by ISO 639-1 and 639-3 codes.
BLEU_TOKENIZER = {"zh": "zh", "zho": "zh", "cmn": "zh", "yue": "zh", "ja": "ja-mecab", "jpn": "ja-mecab"}
BLEU_TOKENIZER |= {"ko": "ko-mecab", "kor": "ko-mecab"}
BLEU_TOKENIZER |= dict.fromkeys(["th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod", "dz", "dzo"], "char")


def make_bleu(target_lang: str | None = None, tokenize: str | None = None, lowercase: bool = False) -> BLEU:
    """BLEU with sacreBLEU's tokenizer `tokenize`, or else the one for the target language.

    `target_lang` is a language code such as `zh`, `zh_CN` or `zho_Hans`. Languages with spaces use 13a. If the
    language is Japanese or Korean and its tokenizer is not installed, characters are scored; the signature says so.

    Raises:
        UserError: sacreBLEU has no tokenizer called `tokenize`, or that one is not installed.
    """
    # A region or a script may follow, but my_answer is a column, and not in Burmese (my).
    code = re.split(r"-|_(?=[A-Z]|[a-z]{2}$)", target_lang or "")[0].lower()
    chosen = tokenize or BLEU_TOKENIZER.get(code, "13a")
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


class TranslationQuality(evaluate.Metric):
    """Corpus BLEU (cased) and chrF2 with one reference each, and sacreBLEU's signatures of both.

    `evaluate.load` would download its metrics; this one needs no network.
    """

    def __init__(self, target_lang: str | None = None, tokenize: str | None = None, **kwargs):
        super().__init__(**kwargs)
        self.metrics = {"bleu": make_bleu(target_lang, tokenize), "chrf": CHRF()}

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Corpus BLEU and chrF by sacreBLEU, with their signatures.",
            citation="Post, M. (2018). A Call for Clarity in Reporting BLEU Scores. WMT.",
            features=datasets.Features(predictions=text, references=text),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict:
        scores = {}
        for name, metric in self.metrics.items():
            scores[name] = metric.corpus_score(predictions, [references]).score
            scores[f"{name}_signature"] = str(metric.get_signature())
        return scores
