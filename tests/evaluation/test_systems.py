"""Paired tests of systems."""

import pytest

from vanilla_transformer.evaluation.scores import Scorer
from vanilla_transformer.evaluation.systems import (
    count_errors,
    kept_by_kind,
    results_table,
    score_systems,
)

ANIMALS = ("cat", "dog")
REFERENCES = [f"The {animal} number {n} sleeps under the old table today ." for n in range(30) for animal in ANIMALS]


def with_faults(count: int) -> list[str]:
    return [f"A fault number {n} in the text" if n < count else text for n, text in enumerate(REFERENCES)]


@pytest.mark.parametrize("faults, is_tested", [(0, True), (1, False), (2, False), (13, False), (14, True)])
def test_too_few_differences_are_not_tested_by_randomization(faults, is_tested):
    """sacreBLEU's p would be the smallest possible, 1/501, whether one hypothesis differs or 13."""
    systems = {"one": REFERENCES, "two": with_faults(faults), "three": with_faults(30)}
    results = score_systems(systems, REFERENCES, Scorer(), "randomization", 500)
    expected = (1.0 if faults == 0 else pytest.approx(1 / 501)) if is_tested else None
    assert [results["systems"]["two"][metric]["p_value"] for metric in ("BLEU", "chrF2")] == [expected] * 2
    table, note = results_table(results), f"two: only {faults} translations differ from one, too few"
    assert (note in table) == (not is_tested) and "three: only" not in table and "- p: the probability" in table
    bootstrap = score_systems(systems, REFERENCES, Scorer(), "bootstrap", 100)
    assert bootstrap["systems"]["two"]["BLEU"]["p_value"] is not None


@pytest.mark.parametrize("paired", ["bootstrap", "randomization"])
def test_one_sentence_is_not_tested(paired):
    results = score_systems({"one": ["a b c d"], "two": ["a b c e"]}, ["a b c d"], Scorer(), paired, 100)
    assert results["systems"]["two"]["BLEU"]["p_value"] is None
    assert "one sentence is too little to test whether systems differ" in results_table(results)


def test_placeholders_and_numbers_of_the_sources_are_counted():
    sources = ["Open %s in 3 days", "<b>Save</b> {name}", "See https://a.b/c, 1,000 files", "Nothing here"]
    kept = ["%s in 3 Tagen", "<b>Sichern {name}", "Siehe https://a.b/c 100 Dateien", "1 %s"]
    assert kept_by_kind(sources, kept) == {"placeholders": (4, 5), "numbers": (1, 2)}
    assert kept_by_kind(sources[-1:], kept[-1:]) == {}
    results = score_systems({"one": kept}, kept, Scorer(), "none", None)
    results["systems"]["one"]["kept"] = kept_by_kind(sources, kept)
    table = results_table(results)
    assert "placeholders kept" in table and "4 of 5" in table and "1 of 2" in table


def test_exact_matches_and_word_errors_are_counted():
    hypotheses = ["a b c", "A  cat\u00a0sat", "", "one two three four", "\u2126"]
    references = ["a x c d", "a cat sat", "new words", "two three", "\u03a9"]
    found = count_errors(hypotheses, references, Scorer())
    assert found == {"exact_match": 0.0, "word_error_rate": pytest.approx(100 * (2 + 1 + 2 + 2 + 1) / 12)}
    assert count_errors(["A cat"], ["a cat"], Scorer(lowercase=True))["exact_match"] == 100.0
    normalized = count_errors(hypotheses[-1:], references[-1:], Scorer(normalization="nfc"))
    assert normalized == {"exact_match": 0.0, "word_error_rate": 0.0}
    assert count_errors(["a"], [""], Scorer()) == {"exact_match": 0.0, "word_error_rate": 100.0}


def test_exact_matches_are_of_the_texts_as_they_are():
    code = "def f(x):\n    return x\n"
    hypotheses = [code, " ".join(code.split()), code.rstrip(), code.replace("    ", "\t"), "e\u0301"]
    assert count_errors(hypotheses, [code] * 4 + ["\u00e9"], Scorer())["exact_match"] == 40.0


def test_the_closest_of_several_references_counts():
    found = count_errors(["a b c", "x"], [["a b d e", "a b d", "q"], ["y z", "x"]], Scorer())
    assert found == {"exact_match": 50.0, "word_error_rate": pytest.approx(100 * 1 / 4)}
