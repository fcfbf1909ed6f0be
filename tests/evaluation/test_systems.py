"""Paired tests of systems."""

import itertools
import random

import pytest

from vanilla_transformer.evaluation.scores import Scorer
from vanilla_transformer.evaluation.systems import (
    count_errors,
    edit_distance,
    kept_by_kind,
    results_table,
    score_systems,
)

ANIMALS = ("cat", "dog")
REFERENCES = [f"The {animal} number {n} sleeps under the old table today ." for n in range(30) for animal in ANIMALS]


def systems(differences: int, both_ways: bool = False) -> dict[str, list[str]]:
    """A baseline without faults, and a system with so many; or, both ways, the baseline has every third one."""
    one, two = list(REFERENCES), list(REFERENCES)
    for number in range(differences):
        (one if both_ways and number % 3 == 2 else two)[5 * number] = f"A fault number {number} in the text"
    return {"one": one, "two": two}


@pytest.mark.parametrize("differences, p", [(0, 1.0), (1, 1.0), (2, 0.5), (3, 0.25), (5, 0.0625)])
def test_the_randomization_of_few_differences_is_exact(differences, p):
    found = score_systems(systems(differences), REFERENCES, Scorer(), "randomization", 500)
    assert [found["systems"]["two"][metric]["p_value"] for metric in ("BLEU", "chrF2")] == [p, p]


def test_exact_p_values_are_those_of_enumeration():
    """Of all ways to swap hypotheses, the share whose scores differ at least as much."""
    both, scorer = systems(6, both_ways=True), Scorer()
    found = score_systems(both, REFERENCES, scorer, "randomization", 500)["systems"]["two"]
    for metric, name in [(scorer.bleu, "BLEU"), (scorer.chrf, "chrF2")]:
        differences = []
        for swapped in itertools.product((0, 1), repeat=6):
            one, two = list(both["one"]), list(both["two"])
            for number in itertools.compress(range(6), swapped):
                one[5 * number], two[5 * number] = two[5 * number], one[5 * number]
            scores = [metric.corpus_score(texts, [REFERENCES]).score for texts in (one, two)]
            differences.append(abs(scores[0] - scores[1]))
        expected = sum(one >= differences[0] - 1e-9 for one in differences) / 64
        assert found[name]["p_value"] == pytest.approx(expected) and 0 < expected < 1


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


@pytest.mark.parametrize("seed", range(20))
def test_the_edit_distance_is_the_shortest_of_all_alignments(seed):
    def plain(one: str, two: str) -> int:
        if not (one and two):
            return len(one) + len(two)
        replaced = plain(one[1:], two[1:]) + (one[0] != two[0])
        return min(replaced, plain(one[1:], two) + 1, plain(one, two[1:]) + 1)

    generator = random.Random(seed)
    one, two = ("".join(generator.choices("abc", k=generator.randint(0, 6))) for _ in range(2))
    assert edit_distance(list(one), list(two)) == plain(one, two)
