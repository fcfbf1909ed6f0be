"""Translation systems side by side: scores, confidence intervals and paired tests of sacreBLEU, and their table."""

import itertools
from functools import partial

import numpy as np
from sacrebleu.significance import PairedTest
from tabulate import tabulate

from ..data.texts import KEPT, count_kept, normalize
from ..errors import printable
from .scores import Scorer, explain_zero

MOST_SWAPPED = 13  # sentences whose swaps are all tried, about as many as sacreBLEU's 10,000 random trials


def score_systems(
    systems: dict[str, list[str]], references: list[str], scorer: Scorer, paired: str, num_samples: int | None
) -> dict:
    """Scores the hypotheses of each system, and tests whether they differ from those of the first, the baseline.

    Args:
        systems: By name, one hypothesis for each reference.
        scorer: Its BLEU and chrF2 are taken.
        paired: sacreBLEU's paired test: `bootstrap` (Koehn, 2004), `randomization` (Riezler and Maxwell, 2005), or
            `none`. Its seed is 12345, or the environment variable SACREBLEU_SEED.
        num_samples: Resamples of the bootstrap (None: 1,000), or trials of the randomization (None: 10,000).

    Returns:
        The number of `sentences`; `signatures`, by metric; `notes`, on a BLEU that is 0 although chrF is not; and
        `systems`, by name. Each has `BLEU` and `chrF2` with the `score`, its 95 % interval as `mean` ± `ci`, and the
        `p_value` (None: not tested); for BLEU the `precisions`, the `brevity_penalty` and the `length_ratio`
        (hypotheses to references, in tokens); and in percent the `exact_match`, the share of hypotheses that equal
        their references, and the `word_error_rate`.
    """
    metrics = {"BLEU": scorer.bleu, "chrF2": scorer.chrf}
    found, notes = {}, []
    if len(references) < 2 and len(systems) > 1 and paired != "none":
        paired, notes = "none", ["one sentence is too little to test whether systems differ"]
    test = "ar" if paired == "randomization" and len(systems) > 1 else "bs"
    resamples = 0 if test == "ar" else -1  # for intervals; 0: sacreBLEU's default number, -1: those of the test itself
    groups = [[system] for system in systems.items()] if paired == "none" else [list(systems.items())]
    for group in groups:
        signatures, columns = PairedTest(group, metrics, [references], test, num_samples or 0, resamples)()
        for name, *scores in zip(*columns.values(), strict=True):
            total = scorer.bleu.corpus_score(systems[name], [references])
            found[name] = {"precisions": total.precisions, "brevity_penalty": total.bp, "length_ratio": total.ratio}
            found[name] |= count_errors(systems[name], references, scorer.bleu.lowercase)
            for metric, score in zip(metrics, scores, strict=True):  # of NumPy's types, which JSON does not have
                numbers = {key: value if value is None else float(value) for key, value in vars(score).items()}
                if numbers["p_value"] is not None:
                    baseline = group[0][0]
                    if score.score == found[baseline][metric]["score"]:
                        numbers["p_value"] = 1.0  # where all resamples tie too, sacreBLEU gives the smallest p
                    elif test == "ar":
                        exact = exact_p_value(metrics[metric], systems[baseline], systems[name], references)
                        numbers["p_value"] = numbers["p_value"] if exact is None else exact
                found[name][metric] = numbers
            note = explain_zero(scorer.bleu, found[name]["chrF2"]["score"], systems[name], references)
            notes += [f"{name}: {note}"] if note else []
    signatures = {metric: str(signature) for metric, signature in signatures.items()}
    return {"sentences": len(references), "signatures": signatures, "systems": found, "notes": notes}


def exact_p_value(metric, one: list[str], two: list[str], references: list[str]) -> float | None:
    """The p-value of the randomization test over all ways to swap hypotheses; None if more than 2^13.

    sacreBLEU's, by random swaps, does not count those that give the same difference, which are many if few sentences
    differ.
    """
    statistics = np.array([metric._extract_corpus_statistics(texts, [references]) for texts in (one, two)])  # (2,n,k)
    differ = np.flatnonzero((statistics[0] != statistics[1]).any(axis=-1))
    if len(differ) > MOST_SWAPPED:
        return None
    totals, gains = statistics.sum(axis=1), statistics[1, differ] - statistics[0, differ]  # (2,k), (m,k)
    differences = []
    for swapped in itertools.product((0, 1), repeat=len(differ)):
        moved = np.array(swapped, dtype=gains.dtype) @ gains
        scores = (metric._aggregate_and_compute([total]).score for total in (totals[0] + moved, totals[1] - moved))
        differences.append(abs(next(scores) - next(scores)))
    return float(np.mean(np.array(differences) >= differences[0] - 1e-9))  # the first swaps nothing


def count_errors(hypotheses: list[str], references: list[str], lowercase: bool = False) -> dict[str, float]:
    """`exact_match` and `word_error_rate` in percent, of texts as [`normalize`] makes them.

    The word error rate is the number of words to insert, delete or replace, divided by that of the words in the
    references; where words are phonemes, it is the phoneme error rate. Without spaces, a text is one word.
    """
    exact = errors = words = 0
    for pair in zip(hypotheses, references, strict=True):
        hypothesis, reference = (normalize(text.lower() if lowercase else text).split() for text in pair)
        exact += hypothesis == reference
        errors += edit_distance(hypothesis, reference)
        words += len(reference)
    return {"exact_match": 100 * exact / len(references), "word_error_rate": 100 * errors / max(1, words)}


def edit_distance(one: list[str], two: list[str]) -> int:
    """How many words must be inserted, deleted or replaced to turn `one` into `two` (Levenshtein, 1966)."""
    numbers = {word: number for number, word in enumerate({*one, *two})}
    others, places = np.array([numbers[word] for word in two]), np.arange(len(two) + 1)
    row = np.array(places)  # the distances of the words so far to the first 0, 1, ... words of `two`
    for word in one:
        replaced = row[:-1] + (others != numbers[word])
        row += 1  # deleted
        row[1:] = np.minimum(row[1:], replaced)
        row = np.minimum.accumulate(row - places) + places  # inserted
    return int(row[-1])


def kept_by_kind(sources: list[str], hypotheses: list[str]) -> dict[str, tuple[int, int]]:
    """By kind, how many of the sources' placeholders (with tags, entities and URLs) and numbers the hypotheses have,
    and how many there are; only kinds that occur."""
    found = {}
    for kind, pattern in KEPT.items():
        counts = map(partial(count_kept, pattern), sources, hypotheses)
        total, kept = map(sum, zip(*counts, strict=True))
        found |= {kind: (kept, total)} if total else {}
    return found


def results_table(results: dict) -> str:
    """A table in Markdown of what [`score_systems`] returns, with the signatures.

    Optional keys: `kept`, by [`kept_by_kind`], and `sentences_per_second` of a system, and `notes` and `sha256` of the
    results, the latter with one of each file.
    """
    rows = []
    for name, system in results["systems"].items():
        row = {"system": name}
        for metric in results["signatures"]:
            score, mean, ci, p = (system[metric][key] for key in ("score", "mean", "ci", "p_value"))
            test = "" if p is None else f" (p = {p:.4f}){'' if p > 0.05 else '*'}"
            row[f"{metric} (μ ± 95% CI)"] = f"{score:.2f} ({mean:.2f} ± {ci:.2f}){test}"
        row["precisions"] = "/".join(f"{precision:.1f}" for precision in system["precisions"])
        row |= {"BP": f"{system['brevity_penalty']:.3f}", "ratio": f"{system['length_ratio']:.3f}"}
        row |= {"exact": f"{system['exact_match']:.1f} %", "WER": f"{system['word_error_rate']:.1f} %"}
        row |= {f"{kind} kept": f"{kept:,} of {total:,}" for kind, (kept, total) in system.get("kept", {}).items()}
        if "sentences_per_second" in system:
            row["sentences/s"] = f"{system['sentences_per_second']:,.1f}"
        rows.append(row)
    lines = [tabulate(rows, "keys", "github", disable_numparse=True), "", f"- {results['sentences']:,} sentences"]
    if system["BLEU"]["p_value"] is not None:
        baseline = rows[0]["system"]
        lines.append(f"- p: the probability of so large a difference from {baseline} by chance; *: at most 0.05")
    lines += [f"- {note}" for note in results.get("notes", [])]
    lines += [f"- {metric}: `{signature}`" for metric, signature in results["signatures"].items()]
    lines += [f"- SHA-256 of {file}: `{digest}`" for file, digest in results.get("sha256", {}).items()]
    return printable("\n".join(lines))
