"""Each rule leaves out what it is for, and nothing else."""

import pytest

from vanilla_transformer.errors import UserError
from vanilla_transformer.students.filtering import OPTIONAL_RULES, RULES, Filter, Pair, repeats

GOOD = [Pair(f"The dog number {n} sees a cat.", f"Der Hund Nummer {n} sieht eine Katze.", -0.5) for n in range(20)]
WRONG = {
    "empty": [Pair("A dog.", ""), Pair("A cat.", "\u200b \xa0")],
    "duplicates": [GOOD[3], Pair(GOOD[4].source.upper(), f" {GOOD[4].target}")],
    "source_is_target": [Pair("The dog sleeps.", "the dog  sleeps.")],
    "odd_lengths": [Pair("A short text.", "Ein sehr langer Text, der gar nicht mehr endet, weil er lang ist.")],
    "placeholders": [
        Pair("Open {name} here.", "Öffne den Namen hier."),
        Pair("Click <b>here</b> now.", "Klicke jetzt <b>hier."),
        Pair("See https://example.org/a.", "Siehe https://example.org/b."),
    ],
    "numbers": [Pair("It is 15 years old.", "Es ist 51 Jahre alt."), Pair("They are 3 dogs.", "Es sind drei Hunde.")],
    "repetition": [Pair("We are going home again.", "gehen, gehen, gehen, gehen, gehen")],
}
KEPT = [
    Pair("3.14", "3.14"),
    Pair("No no no no no no no no no!", "Nein nein nein nein nein nein nein!"),
    Pair("It costs 1,000.50 euros.", "Es kostet 1.000,50 Euro."),
    Pair("Open {name} here.", "Öffne {name} hier."),
    Pair("I see two dogs.", "Ich sehe 2 Hunde."),
]


def filtered(pairs: list[Pair], *keep: str, min_score: float | None = None) -> Filter:
    found = Filter([*GOOD, *pairs])
    found.apply(keep, min_score)
    return found


@pytest.mark.parametrize("rule", WRONG)
def test_a_rule_leaves_out_its_pairs_alone(rule):
    found = filtered([*KEPT, *WRONG[rule]])
    first = WRONG[rule][0]
    assert found.dropped == {rule: {"count": len(WRONG[rule]), "source": first.source, "target": first.target}}
    assert found.pairs == [*GOOD, *KEPT] and found.count == len(GOOD) + len(KEPT) + len(WRONG[rule])
    if rule != "empty":
        assert filtered(WRONG[rule], rule).pairs == [*GOOD, *WRONG[rule]]


def test_a_pair_counts_for_the_first_rule_that_leaves_it_out():
    everything = [pair for pairs in WRONG.values() for pair in pairs]
    found = filtered([*everything, Pair("A dog 7.", "A dog 7."), Pair("A dog 7.", "A dog 7.")])
    counts = {rule: len(pairs) for rule, pairs in WRONG.items()}
    assert {rule: one["count"] for rule, one in found.dropped.items()} == counts | {
        "duplicates": 3,
        "source_is_target": 2,
    }
    assert found.pairs == GOOD and [*found.dropped] == [rule for rule in RULES if rule in WRONG]
    assert [rule for rule in WRONG if rule != "empty"] == [*OPTIONAL_RULES]


def test_low_scores_are_left_out_if_asked():
    low = Pair("The dog sees nothing.", "Der Hund sieht gar nichts.", -2.0)
    assert filtered([low]).pairs == [*GOOD, low]
    found = filtered([low], min_score=-1.0)
    assert found.pairs == GOOD and found.dropped["score"]["count"] == 1


def test_round_trips_are_compared_by_chrf():
    found = Filter(GOOD[:3])
    found.apply_round_trip([GOOD[0].source, "Something else.", "The dog number 2 saw a cat."], 60.0)
    assert found.pairs == [GOOD[0], GOOD[2]] and found.dropped["round_trip"]["source"] == GOOD[1].source


def test_nothing_left_is_an_error_that_names_the_rule():
    with pytest.raises(
        UserError, match="Of 2 pairs, .* none: 2 were pairs with the source as translation; .* --keep source_is_target"
    ):
        Filter([Pair("A dog", "A dog"), Pair("A cat", "a cat")]).apply()
    with pytest.raises(UserError, match="20 were pairs with a score below --min_score; lower --min_score"):
        filtered([], min_score=1.0)
    with pytest.raises(UserError, match="1 were pairs whose round trip .*; lower --min_round_trip"):
        Filter(GOOD[:1]).apply_round_trip(["Nothing."], 60.0)
    with pytest.raises(UserError, match="2 were pairs with an empty side; look at the translations"):
        Filter([Pair("A dog.", ""), Pair("A cat.", "\u200b")]).apply()
    with pytest.raises(UserError, match="1 were pairs with the source as translation"):  # not 2 that repeat it
        Filter([Pair("A dog", "A dog")] * 3).apply()
    with pytest.raises(UserError, match="Of 0 pairs, the filter leaves none; look at the translations"):
        Filter([]).apply()


REPEATED = dict.fromkeys(["ja" * 10, "Das ist gut. " * 3, "好的。" * 8], True)
REPEATED |= dict.fromkeys(["", "ja ja ja", "Dieser Satz wiederholt sich nicht, oder?"], False)


@pytest.mark.parametrize("text, expected", REPEATED.items())
def test_repetitions_are_found_in_any_script(text, expected):
    assert repeats(text) == expected
