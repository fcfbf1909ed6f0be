"""Our scores as a module of the evaluate library."""

import datasets
import evaluate

from .scores import Scorer

TEXT = datasets.Value("string")


class TranslationScores(evaluate.Metric):
    """BLEU and chrF by sacreBLEU, with the tokenizer of BLEU that fits the target language, and their signatures.

        evaluate.combine([TranslationScores(), "rouge"]).compute(predictions=[...], references=[...])

    `compute` also takes the arguments of [`Scorer`], such as `target_lang="zh"`. A reference is a text, or a list of
    texts.
    """

    def _info(self):
        one = datasets.Features(predictions=TEXT, references=TEXT)
        several = datasets.Features(predictions=TEXT, references=datasets.List(TEXT))
        citation = "Post (2018), A Call for Clarity in Reporting BLEU Scores, https://aclanthology.org/W18-6319"
        description = type(self).__doc__
        return evaluate.MetricInfo(description, citation, [one, several], inputs_description=description)

    def _compute(self, predictions, references, **options):
        return Scorer(**options).score(predictions, references)
