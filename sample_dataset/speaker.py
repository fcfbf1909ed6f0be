"""The speaker: chooses what to say among all that lexicon and grammar allow."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import lexicon
from grammar import (
    EMPTY,
    Clause,
    Nominal,
    Phrase,
    VerbForms,
    attach,
    be_forms,
    can_be_frequent,
    can_be_negated,
    capitalize,
    compose_noun_phrase,
    contracted,
    is_definite,
    modal_forms,
    negated,
    perfect_forms,
    present_forms,
    question,
    statement,
    subordinate,
    unit,
    units,
)
from lexicon import Determiner, Noun, Pronoun, Verb, expand, fits

T = TypeVar("T")
Allowed = Callable[[Determiner], bool]  # which determiners a noun phrase may have


# Conditions on the determiner of a noun phrase.


def any_determiner(determiner: Determiner) -> bool:
    return True


def is_positive(determiner: Determiner) -> bool:
    return determiner.en_plural != "no"


def is_spoken(determiner: Determiner) -> bool:
    return is_positive(determiner) and determiner.inflection != "bare"


def is_predicative(determiner: Determiner) -> bool:
    return is_positive(determiner) and determiner.inflection in ("ein", "mein", "bare")


def suits(determiner: Determiner, noun: Noun) -> bool:
    """Relatives are always somebody's ("my mother"); "my woman" would be a wife."""
    if noun.kind == "family":
        return determiner.inflection == "mein"
    return determiner.inflection != "mein" or noun.en not in ("man", "woman", "girl")


class Speaker:
    """Says random sentences. Every choice is made with `rng`, so that the same seed says the same sentences."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.combinations: set[tuple[str, str]] = set()  # adjective + noun and verb + object of the sentence
        self.said: set[str] = set()  # nouns, names and adjectives of the sentence
        self.persons: set[str] = set()  # pronouns of the clause: not "I see me", "we see me"

    def sentence(self) -> Phrase:
        self.combinations.clear()
        self.said.clear()
        forms = [self.plain] * 6 + [self.time_first] * 3 + [self.yes_no_question] * 3 + [self.w_question] * 2
        forms += [self.who_question, self.where_is_question, self.two_statements]
        forms += [self.condition_last] * 4 + [self.condition_first] * 2 + [self.reported] * 2
        phrase = self.pick(forms)()
        return Phrase(capitalize(phrase.en), capitalize(phrase.de))

    # Sentences.

    def plain(self) -> Phrase:
        return attach(statement(self.clause()), ".", ".")

    def time_first(self) -> Phrase:
        clause = self.clause(without=("time", "frequency", "lasting"))
        return attach(statement(clause, front=self.time(clause)), ".", ".")

    def yes_no_question(self) -> Phrase:
        return question(self.clause(without=("negation",)))

    def w_question(self) -> Phrase:
        word = self.pick(["why=warum", "when=wann", "where=wo"])
        without = () if word == "why=warum" else ("be", "lasting", "frequency", "time", "place")
        return question(self.clause(None, ("negation", *without)), units(word))

    def who_question(self) -> Phrase:
        """The question word is the subject, so the words stand as in a statement."""
        who = unit("who", "wer")
        return attach(statement(self.clause(Nominal(who.en, who.de))), "?", "?")

    def where_is_question(self) -> Phrase:
        subject = self.nominal("being,item,meal,vehicle", "nom", is_definite)
        return question(Clause(subject, be_forms(subject.person)), unit("where", "wo"))

    def two_statements(self) -> Phrase:
        first = attach(statement(self.clause()), ",", ",")
        return attach(first + unit("but", "aber") + statement(self.clause()), ".", ".")

    def condition_last(self) -> Phrase:
        main = attach(statement(self.clause()), "", ",")
        return attach(main + subordinate(units(self.pick(lexicon.CONJUNCTIONS)), self.clause()), ".", ".")

    def condition_first(self) -> Phrase:
        condition = attach(subordinate(units(self.pick(lexicon.CONJUNCTIONS)), self.clause()), ",", ",")
        return attach(statement(self.clause(without=("time",)), front=condition), ".", ".")

    def reported(self) -> Phrase:
        self.persons.clear()
        verb = self.pick([verb for verb in lexicon.VERBS if verb.frame == "that"])
        subject = self.nominal(verb.subjects, "nom", is_definite)
        main = attach(statement(Clause(subject, present_forms(verb, subject.person))), "", ",")
        return attach(main + subordinate(unit("that", "dass"), self.clause()), ".", ".")

    # Clauses. `without` names what must not be in the clause: "place", "time", "frequency", "negation", "lasting" or
    # "be".

    def clause(self, subject: Nominal | None = None, without: tuple[str, ...] = ()) -> Clause:
        self.persons.clear()
        if "be" in without or self.chance(0.86):
            clause = self.action_clause(subject, without)
        elif subject is None and "lasting" not in without and self.chance(0.5):
            clause = self.pick([self.profession_clause, self.profession_clause, self.comparison_clause])()
        elif self.chance(0.4):
            clause = self.place_clause(subject)
        else:
            clause = self.quality_clause(subject, without)
        return self.with_adverb(clause, without)

    def with_adverb(self, clause: Clause, without: tuple[str, ...]) -> Clause:
        """The clause with "not", an adverb of frequency or a time, or as it is."""
        if "negation" not in without and can_be_negated(clause) and self.chance(0.2):
            return negated(clause)
        if clause.is_lasting:
            return clause
        if "frequency" not in without and can_be_frequent(clause) and self.chance(0.2):
            return replace(clause, adverb=units(self.pick(lexicon.FREQUENCIES)))
        if "time" not in without and self.chance(0.2):
            return replace(clause, time=self.time(clause))
        return clause

    def time(self, clause: Clause) -> Phrase:
        return units(lexicon.TODAY if clause.verb.tense == "perfect" else self.pick(lexicon.TIMES))

    def action_clause(self, subject: Nominal | None, without: tuple[str, ...]) -> Clause:
        verb = self.pick([verb for verb in lexicon.ACTIONS if verb.en_participle or "lasting" not in without])
        subject = subject or self.nominal(verb.subjects, "nom", is_positive)
        verb_forms, is_lasting = self.verb_forms(verb, subject.person), not verb.en_participle
        objects = self.objects(verb, any_determiner if verb_forms.negatable else is_positive)
        extras = dict.fromkeys("wfp", EMPTY)
        for extra in verb.extras:
            if self.chance(0.25) and not (extra == "p" and "place" in without):
                extras[extra] = self.extra(extra, subject.kind)
        return Clause(subject, verb_forms, objects, extras["w"] + extras["f"], extras["p"], is_lasting=is_lasting)

    def verb_forms(self, verb: Verb, person: str) -> VerbForms:
        if not verb.en_participle or self.chance(0.6):
            return present_forms(verb, person)
        if self.chance(0.5):
            return perfect_forms(verb, person)
        return modal_forms(self.pick(lexicon.MODALS), verb, person)

    def objects(self, verb: Verb, allowed: Allowed) -> tuple[Nominal, ...]:
        """The receiver is always definite, so that it stands first in German as in English."""
        if not verb.objects:
            return ()
        *receiver, case = verb.frame.split("+")
        receivers = [self.nominal("human", case, is_definite) for case in receiver]
        if receivers:
            thing = self.noun_phrase(verb.objects, case, is_spoken)
        else:
            thing = self.nominal(verb.objects, case, allowed)
        self.combinations.add((verb.en, thing.noun))
        return (*receivers, thing)

    def quality_clause(self, subject: Nominal | None, without: tuple[str, ...]) -> Clause:
        """Someone or something is big, or very big."""
        adjectives = [row for row in lexicon.ADJECTIVES if row.en not in self.said]
        if subject:
            adjectives = [row for row in adjectives if subject.kind in expand(row.kinds)]
        if "lasting" in without:
            adjectives = [row for row in adjectives if row.duration == "passing"]
        adjective = self.pick(adjectives)
        self.said.add(adjective.en)
        subject = subject or self.nominal(adjective.kinds, "nom", is_positive)
        very = unit("very", "sehr") if self.chance(0.25) else EMPTY
        rest = very + unit(adjective.en, adjective.de)
        return Clause(subject, be_forms(subject.person), rest=rest, is_lasting=adjective.duration == "lasting")

    def comparison_clause(self) -> Clause:
        comparative = self.pick(lexicon.COMPARATIVES)
        subject = self.noun_phrase(comparative.kinds, "nom", is_positive)
        other = self.noun_phrase(subject.kind, "nom", is_positive)
        rest = unit(comparative.en, comparative.de) + unit("than", "als") + other
        return Clause(subject, be_forms(subject.person), rest=rest, is_lasting=True)

    def place_clause(self, subject: Nominal | None) -> Clause:
        subject = subject or self.nominal("being,item,meal,vehicle,furniture", "nom", is_positive)
        return Clause(subject, be_forms(subject.person), place=self.extra("p", subject.kind))

    def profession_clause(self) -> Clause:
        """Who is what: a woman is "eine Ärztin"; "I", "you", "we" and "they" take the masculine form."""
        subject = self.pronoun("nom") if self.chance(0.7) else self.name()
        noun = self.pick(lexicon.FEMININE_PROFESSIONS if subject.gender == "f" else lexicon.PROFESSIONS)
        predicate = self.describe(noun, "nom", is_predicative, plural=subject.person.endswith("p"))
        verb = be_forms(subject.person)
        if predicate.definite:  # "nicht" stands before it, not after it as with an object
            return Clause(subject, verb, rest=predicate, is_lasting=True)
        return Clause(subject, verb, (predicate,), is_lasting=True)

    # Phrases.

    def extra(self, extra: str, subject_kind: str) -> Phrase:
        """A companion (w), a person whom it is for (f) or a place (p)."""
        if extra == "p" and self.chance(0.25):
            return units(self.pick(lexicon.PLACES))
        rows = [row for row in lexicon.PREPOSITIONS if row.extra == extra and subject_kind in expand(row.subjects)]
        preposition = self.pick(rows)
        if extra == "p":
            nominal = self.noun_phrase(preposition.kinds, preposition.case, is_positive, singular=True)
        else:
            nominal = self.nominal(preposition.kinds, preposition.case, is_positive)
        return contracted(unit(preposition.en, preposition.de) + nominal)

    def nominal(self, spec: str, case: str, allowed: Allowed) -> Nominal:
        """A pronoun or a name, where a person fits, or a noun phrase."""
        if "person" in expand(spec):
            if self.chance(0.35):
                return self.pronoun(case)
            if self.chance(0.2):
                return self.name()
        return self.noun_phrase(spec, case, allowed)

    def pronoun(self, case: str) -> Nominal:
        def who(pronoun: Pronoun) -> str:
            return pronoun.person[0] if pronoun.person[0] in "12" else pronoun.en

        options = [pronoun for pronoun in lexicon.PRONOUNS if who(pronoun) not in self.persons]
        pronoun = self.pick([pronoun for pronoun in options for _ in range(int(pronoun.weight))])
        self.persons.add(who(pronoun))
        phrase = unit(pronoun.en if case == "nom" else pronoun.en_object, getattr(pronoun, case))
        return Nominal(phrase.en, phrase.de, pronoun.person, pronoun.gender)

    def name(self) -> Nominal:
        name = self.pick([name for name in lexicon.NAMES if name not in self.said])
        self.said.add(name)
        phrase = unit(name, name)
        return Nominal(phrase.en, phrase.de, gender=lexicon.NAMES[name])

    def noun_phrase(self, spec: str, case: str, allowed: Allowed, singular: bool = False) -> Nominal:
        noun = self.pick([noun for noun in lexicon.NOUNS if fits(noun, spec) and noun.en not in self.said])
        self.said.add(noun.en)
        return self.describe(noun, case, allowed, plural=bool(noun.en_plural) and not singular and self.chance(0.4))

    def describe(self, noun: Noun, case: str, allowed: Allowed, plural: bool) -> Nominal:
        """The noun with a determiner and perhaps an adjective."""
        column = "plural" if plural else "mass" if noun.kind in expand("mass") else "singular"
        options = [row for row in lexicon.DETERMINERS if allowed(row) and suits(row, noun)]
        determiner = self.pick([row for row in options for _ in range(int(getattr(row, column)))])
        adjective = None
        if self.chance(0.35):
            adjectives = [row for row in lexicon.ADJECTIVES if fits(noun, row.kinds) and row.en not in self.said]
            adjective = self.pick(adjectives)
            self.said.add(adjective.en)
            self.combinations.add((adjective.en, noun.en))
        return compose_noun_phrase(noun, case, determiner, adjective, plural)

    def pick(self, options: Sequence[T]) -> T:
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability
