"""Translation systems side by side: scores, confidence intervals and paired tests of sacreBLEU, and their table."""

from functools import partial
from operator import ne

from rapidfuzz.distance import Levenshtein
from sacrebleu.significance import PairedTest
from tabulate import tabulate

from ..data.texts import KEPT, count_kept
from .further_metrics import as_list
from .scores import Scorer, explain_sameness, explain_zero

# sacreBLEU's randomization test does not count swaps that repeat the observed difference, which are many if few
# hypotheses differ: if two differ, half of all swaps do: p should be 0.5, and it gives 0.0001.
FEWEST_DIFFERENT = 14
TOO_FEW = "only {} translations differ from {}, too few for the randomization test"


def score_systems(
    systems: dict[str, list[str]],
    references: list[str | list[str]],
    scorer: Scorer,
    paired: str,
    num_samples: int | None,
    sources: list[str] | None = None,
) -> dict:
    """Scores the hypotheses of each system, and tests whether they differ from those of the first, the baseline.

    Args:
        systems: By name, one hypothesis for each source.
        references: Of each source one, or a list of several.
        scorer: Its BLEU and chrF2, and its further metrics.
        paired: sacreBLEU's paired test: `bootstrap` (Koehn, 2004), `randomization` (Riezler and Maxwell, 2005), or
            `none`. Its seed is 12345, or the environment variable SACREBLEU_SEED.
        num_samples: Resamples of the bootstrap (None: 1,000), or trials of the randomization (None: 10,000).
        sources: For metrics that read them.

    Returns:
        A dictionary with `sentences`, their number; `signatures`, by metric; `notes`, on a BLEU that is 0 although
        chrF is not, on hypotheses that repeat each other, or on too few that differ; and `systems`, by name. Each has

        - `BLEU` and `chrF2`: the `score`, its 95 % interval as `mean` ± `ci`, and the `p_value` (None: not tested);
        - of BLEU, the `precisions`, `brevity_penalty` and `length_ratio` (hypotheses to references, in tokens);
        - `exact_match` and `word_error_rate` of [`count_errors`];
        - `metrics`, the further ones by name.
    """
    metrics, streams = {"BLEU": scorer.bleu, "chrF2": scorer.chrf}, scorer.streams(references)
    given, systems = systems, {name: scorer.prepare(texts) for name, texts in systems.items()}
    found, notes = {}, []
    if len(references) < 2 and len(systems) > 1 and paired != "none":
        paired, notes = "none", ["one sentence is too little to test whether systems differ"]
    test = "ar" if paired == "randomization" and len(systems) > 1 else "bs"
    resamples = 0 if test == "ar" else -1  # for intervals; 0: sacreBLEU's default number, -1: those of the test itself
    groups = [[system] for system in systems.items()] if paired == "none" else [list(systems.items())]
    for group in groups:
        signatures, columns = PairedTest(group, metrics, streams, test, num_samples or 0, resamples)()
        baseline = group[0][0]
        for name, *scores in zip(*columns.values(), strict=True):
            different = sum(map(ne, systems[name], systems[baseline]))
            total = scorer.bleu.corpus_score(systems[name], streams)
            found[name] = {"precisions": total.precisions, "brevity_penalty": total.bp, "length_ratio": total.ratio}
            found[name] |= count_errors(given[name], references, scorer)
            found[name]["metrics"] = scorer.metrics.score(given[name], references, sources)
            for metric, score in zip(metrics, scores, strict=True):  # of NumPy's types, which JSON does not have
                numbers = {key: value if value is None else float(value) for key, value in vars(score).items()}
                if numbers["p_value"] is not None and score.score == found[baseline][metric]["score"]:
                    numbers["p_value"] = 1.0  # where all resamples tie too, sacreBLEU gives the smallest p
                elif test == "ar" and different < FEWEST_DIFFERENT:
                    numbers["p_value"] = None
                found[name][metric] = numbers
            is_too_few = test == "ar" and 0 < different < FEWEST_DIFFERENT
            doubts = [TOO_FEW.format(different, baseline) if is_too_few else None]
            doubts += [explain_zero(scorer.bleu, found[name]["chrF2"]["score"], systems[name], streams)]
            doubts += [explain_sameness(given[name], references)]
            notes += [f"{name}: {doubt}" for doubt in doubts if doubt]
    signatures = {metric: scorer.signature(signature) for metric, signature in signatures.items()}
    return {"sentences": len(references), "signatures": signatures, "systems": found, "notes": notes}


def count_errors(hypotheses: list[str], references: list[str | list[str]], scorer: Scorer) -> dict[str, float]:
    """`exact_match` and `word_error_rate` in percent.

    `exact_match` is the share of hypotheses that equal a reference before normalization; spaces at the end do not
    count, nor does case if the scorer ignores it. `word_error_rate` is the number of words to insert, delete or
    replace, divided by the number of words in the references, after normalization. Spaces separate words: where these
    are phonemes or letters, it is the phoneme or letter error rate. Of several references, the one with the fewest
    errors counts.
    """
    exact = errors = words = 0
    for hypothesis, several in zip(hypotheses, references, strict=True):
        texts = [text.lower() if scorer.lowercase else text for text in (hypothesis, *as_list(several))]
        exact += texts[0].rstrip() in map(str.rstrip, texts[1:])
        one, *others = map(str.split, scorer.prepare(texts))
        fewest, count = min((Levenshtein.distance(one, other), len(other)) for other in others)
        errors, words = errors + fewest, words + count
    return {"exact_match": 100 * exact / len(references), "word_error_rate": 100 * errors / max(1, words)}


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

    Optional keys: `kept`, by [`kept_by_kind`], `sentences_per_second` and `megabytes` of a system, and `notes` and
    `sha256` of the results, the latter with one of each file.
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
        row |= {"exact": f"{system['exact_match']:.1f} %", "word errors": f"{system['word_error_rate']:.1f} %"}
        row |= {metric: f"{number:.4g}" for metric, number in system["metrics"].items()}
        row |= {f"{kind} kept": f"{kept:,} of {total:,}" for kind, (kept, total) in system.get("kept", {}).items()}
        if "sentences_per_second" in system:
            row["sentences/s"] = f"{system['sentences_per_second']:,.1f}"
        if "megabytes" in system:
            row["MB"] = f"{system['megabytes']:,.1f}"
        rows.append(row)
    count = results["sentences"]
    table = tabulate(rows, "keys", "github", disable_numparse=True)
    lines = [table, "", f"- {count:,} sentence{'s' * (count != 1)}"]
    if any(system["BLEU"]["p_value"] is not None for system in results["systems"].values()):
        baseline = rows[0]["system"]
        lines.append(f"- p: the probability of so large a difference from {baseline} by chance; *: at most 0.05")
    lines += ["- word errors: word error rate; words are whatever spaces separate, such as phonemes or letters"]
    lines += [f"- {note}" for note in results.get("notes", [])]
    lines += [f"- {metric}: `{signature}`" for metric, signature in results["signatures"].items()]
    lines += [f"- SHA-256 of {file}: `{digest}`" for file, digest in results.get("sha256", {}).items()]
    return "\n".join(lines)
