"""The grammar: the form of each word and the order of the words."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lexicon import ADJECTIVE_ENDINGS, BE, DETERMINER_ENDINGS, HAVE, Adjective, Determiner, Modal, Noun, Verb

# Phrases: parts of a sentence in both languages, each word with the units of meaning it expresses.


@dataclass(frozen=True)
class Word:
    text: str
    units: frozenset[int]


Words = tuple[Word, ...]
new_unit = itertools.count().__next__  # a number not used before


@dataclass(frozen=True)
class Phrase:
    en: Words = ()
    de: Words = ()

    def __add__(self, other: "Phrase") -> "Phrase":
        return Phrase(self.en + other.en, self.de + other.de)


EMPTY = Phrase()


@dataclass(frozen=True)
class Nominal(Phrase):
    """A phrase that can be a subject or an object."""

    person: str = "3s"
    gender: str = ""
    kind: str = "person"
    noun: str = ""
    definite: bool = True

    def starts_with(self, *texts: str) -> bool:
        return self.en[0].text in texts


@dataclass(frozen=True)
class VerbForms:
    """The words of the verb, where each language splits them: "wants | to open", "macht | auf"."""

    en: tuple[Words, Words]  # finite verb and rest, in a statement
    en_support: tuple[Words, Words]  # auxiliary ("does") and rest, in a question and before "not"
    de: tuple[Words, Words]  # second word and end, in a main clause
    de_final: Words  # at the end of a subordinate clause
    tense: str = "present"
    negatable: bool = True


@dataclass(frozen=True)
class Clause:
    subject: Nominal
    verb: VerbForms
    objects: tuple[Nominal, ...] = ()
    rest: Phrase = EMPTY  # predicate, or prepositional phrases other than the place
    place: Phrase = EMPTY
    time: Phrase = EMPTY
    adverb: Phrase = EMPTY  # frequency, or "not"
    is_negative: bool = False
    is_lasting: bool = False


def words(text: str, number: int) -> Words:
    return tuple(Word(word, frozenset((number,))) for word in text.split())


def unit(en: str, de: str) -> Phrase:
    """One unit of meaning: all its English words align with all its German ones."""
    number = new_unit()
    return Phrase(words(en, number), words(de, number))


def join(phrases: Iterable[Phrase]) -> Phrase:
    return sum(phrases, EMPTY)


def units(row: str) -> Phrase:
    """A row of units such as "in_the=am evening=Abend"."""
    return join(unit(*pair.replace("_", " ").split("=")) for pair in row.split())


def fuse(parts: Words, text: str) -> Word:
    """Write several words as one, which has the units of all of them: "in dem" = "im"."""
    return Word(text, frozenset().union(*(part.units for part in parts)))


def contracted(phrase: Phrase) -> Phrase:
    if [word.text for word in phrase.de[:2]] == ["in", "dem"]:
        return replace(phrase, de=(fuse(phrase.de[:2], "im"), *phrase.de[2:]))
    return phrase


def capitalize(side: Words) -> Words:
    return (replace(side[0], text=side[0].text[0].upper() + side[0].text[1:]), *side[1:])


def attach(phrase: Phrase, en: str, de: str) -> Phrase:
    """Put punctuation after the last word of both sides."""

    def mark(side: Words, sign: str) -> Words:
        return (*side[:-1], replace(side[-1], text=side[-1].text + sign))

    return Phrase(mark(phrase.en, en), mark(phrase.de, de))


# Agreement: which form each word takes.


def is_definite(determiner: Determiner) -> bool:
    return determiner.inflection in ("der", "dieser", "mein")


def ending(endings: dict[str, str], case: str, gender: str) -> str:
    """The ending of a determiner or an adjective; the gender of every plural is "p"."""
    return endings[case].split()["mfnp".index(gender)].strip("-")


def compose_noun_phrase(
    noun: Noun, case: str, determiner: Determiner, adjective: Adjective | None, plural: bool
) -> Nominal:
    """Determiner, adjective and noun in agreement: "the small dogs" in the dative = "den kleinen Hunden"."""
    gender = "p" if plural else noun.gender
    en_noun, de_noun = (noun.en_plural, noun.de_plural) if plural else (noun.en, noun.de)
    if plural and case == "dat" and not de_noun.endswith(("n", "s")):
        de_noun += "n"
    en_determiner = determiner.en_plural if plural else determiner.en
    if en_determiner == "a" and (adjective or noun).en[0] in "aeiou":
        en_determiner = "an"
    phrase = unit(en_determiner, determiner.de + ending(DETERMINER_ENDINGS[determiner.inflection], case, gender))
    if adjective:
        stem = adjective.de.removesuffix("e")  # müde, but: der müde Hund, ein müder Hund
        phrase += unit(adjective.en, stem + ending(ADJECTIVE_ENDINGS[determiner.inflection], case, gender))
    phrase += unit(en_noun, de_noun)
    person = "3p" if plural else "3s"
    return Nominal(phrase.en, phrase.de, person, noun.gender, noun.kind, noun.en, is_definite(determiner))


def english_finite(base: str, third_person: str, person: str) -> str:
    return third_person if person == "3s" else base


def german_finite(verb: Verb, person: str) -> str:
    """The present tense; "du" takes the vowel of "er": er schläft, du schläfst."""
    infinitive = verb.de.split("|")[-1]
    stem = verb.de_3s.removesuffix("t")
    du = stem + ("t" if stem.endswith("s") else "st")  # du liest, not "liesst"
    return {"1s": infinitive.removesuffix("n"), "2s": du, "3s": verb.de_3s}.get(person, infinitive)


def present_forms(verb: Verb, person: str) -> VerbForms:
    """ "opens" = "macht ... auf", at the end of a subordinate clause "aufmacht"."""
    number = new_unit()
    prefix, finite = verb.de.rpartition("|")[0], german_finite(verb, person)
    return VerbForms(
        en=(words(english_finite(verb.en, verb.en_3s, person), number), ()),
        en_support=(words(english_finite("do", "does", person), number), words(verb.en, number)),
        de=(words(finite, number), words(prefix, number)),
        de_final=words(prefix + finite, number),
    )


def modal_forms(modal: Modal, verb: Verb, person: str) -> VerbForms:
    """ "can open" = "kann ... aufmachen", at the end of a subordinate clause "aufmachen kann"."""
    number, main = new_unit(), unit(verb.en, verb.de.replace("|", ""))
    finite, *to = words(english_finite(modal.en, modal.en_3s, person), number)
    en = en_support = ((finite,), (*to, *main.en))
    if modal.en == "want to":
        en_support = (words(english_finite("do", "does", person), number), words(modal.en, number) + main.en)
    de_singular = modal.de_2s if person == "2s" else modal.de_1s
    de_finite = words(de_singular if person.endswith("s") else modal.de_plural, number)
    return VerbForms(en, en_support, (de_finite, main.de), main.de + de_finite, "modal", modal.negatable == "yes")


def perfect_forms(verb: Verb, person: str) -> VerbForms:
    """ "has opened" = "hat ... aufgemacht", at the end of a subordinate clause "aufgemacht hat"."""
    de_auxiliary = BE[person][1] if verb.auxiliary == "ist" else german_finite(HAVE, person)
    auxiliary = unit(english_finite("have", "has", person), de_auxiliary)
    main = unit(verb.en_participle, verb.de_participle)
    en = (auxiliary.en, main.en)
    return VerbForms(en, en, (auxiliary.de, main.de), main.de + auxiliary.de, tense="perfect")


def be_forms(person: str) -> VerbForms:
    be = unit(*BE[person])
    return VerbForms((be.en, ()), (be.en, ()), (be.de, ()), be.de)


def can_be_negated(clause: Clause) -> bool:
    """Whether "not" has one translation: "nicht" after what is definite, "kein" in the place of "ein"."""
    return clause.verb.negatable and all(thing.definite or thing.starts_with("a", "an") for thing in clause.objects)


def can_be_frequent(clause: Clause) -> bool:
    """Whether "often", "never" and the like go with the clause: not with "no", a modal verb or the perfect."""
    return clause.verb.tense == "present" and not any(thing.starts_with("no") for thing in clause.objects)


def negated(clause: Clause) -> Clause:
    """ "does not buy the hat" = "kauft den Hut nicht"; "does not buy a hat" = "kauft keinen Hut"."""
    negation = unit("not", "nicht")
    if clause.objects and clause.objects[-1].starts_with("a", "an"):
        *others, last = clause.objects
        kein = fuse((*negation.de, last.de[0]), "k" + last.de[0].text)
        objects = (*others, replace(last, de=(kein, *last.de[1:])))
        return replace(clause, objects=objects, adverb=Phrase(negation.en), is_negative=True)
    return replace(clause, adverb=negation, is_negative=True)


def english_predicate(clause: Clause) -> Words:
    """The verb of a statement, with its adverb: "often buys", "is often", "does not buy", "cannot buy"."""
    finite, rest = clause.verb.en_support if clause.is_negative else clause.verb.en
    if finite[0].text == "can" and clause.is_negative:
        return (fuse(finite + clause.adverb.en, "cannot"), *rest)
    if clause.is_negative or clause.verb.en == clause.verb.en_support:
        return finite + clause.adverb.en + rest
    return clause.adverb.en + finite + rest


def english_end(clause: Clause) -> Words:
    return (join(clause.objects) + clause.rest + clause.place + clause.time).en


def german_middle(clause: Clause) -> Words:
    """What stands between the subject and the end of the verb, in one fixed order."""
    definite = join(thing for thing in clause.objects if thing.definite)
    indefinite = join(thing for thing in clause.objects if not thing.definite)
    return (definite + clause.time + clause.adverb + clause.place + indefinite + clause.rest).de


def statement(clause: Clause, front: Phrase = EMPTY) -> Phrase:
    """A main clause. The German verb stays second: whatever is put in front sends the subject behind the verb."""
    second, end = clause.verb.de
    start = front.de + second + clause.subject.de if front.de else clause.subject.de + second
    en = front.en + clause.subject.en + english_predicate(clause) + english_end(clause)
    return Phrase(en, start + german_middle(clause) + end)


def question(clause: Clause, opener: Phrase = EMPTY) -> Phrase:
    """A question, opened by the verb or by a question word."""
    support, rest = clause.verb.en_support
    first, end = clause.verb.de
    en = opener.en + support + clause.subject.en + clause.adverb.en + rest + english_end(clause)
    return attach(Phrase(en, opener.de + first + clause.subject.de + german_middle(clause) + end), "?", "?")


def subordinate(conjunction: Phrase, clause: Clause) -> Phrase:
    """A subordinate clause. The German verb stands at the end."""
    en = conjunction.en + clause.subject.en + english_predicate(clause) + english_end(clause)
    return Phrase(en, conjunction.de + clause.subject.de + german_middle(clause) + clause.verb.de_final)
