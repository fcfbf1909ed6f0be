"""The lexicon: one entry a line, one field a column; "_" stands for a space and "-" for "none"."""

import functools
from collections import namedtuple

Noun = namedtuple("Noun", "en en_plural gender de de_plural kind")
# duration: passing or lasting, only what is passing goes with "often" or "now"; kinds: of the nouns it describes
Adjective = namedtuple("Adjective", "en de duration kinds")
# inflection: its row in DETERMINER_ENDINGS and ADJECTIVE_ENDINGS; then how often it stands before a noun in the
# singular, in the plural and without a plural, relative to the other determiners
Determiner = namedtuple("Determiner", "en en_plural de inflection singular plural mass")
# person: 1s, 2s, 3s, 1p or 3p; weight: how often it is said, relative to the others
Pronoun = namedtuple("Pronoun", "en en_object person gender nom acc dat weight")
# en_participle: "-" for a state, which is used in the present tense only; de: "|" follows a separable prefix;
# frame: the cases of the objects, "that" for a subordinate clause, "-" for neither; subjects and objects: kinds of
# nouns (or single nouns); extras: the adverbials that it takes, w(ith), f(or) and p(lace)
Verb = namedtuple("Verb", "en en_3s en_participle de de_3s de_participle auxiliary subjects frame objects extras")
Modal = namedtuple("Modal", "en en_3s de_1s de_2s de_plural negatable")
# extra: as in Verb; kinds: the nouns after it; subjects: who or what can be there
Preposition = namedtuple("Preposition", "en de case extra kinds subjects")


def table(row_type: type, text: str) -> list:
    """Read a table: one `row_type` a line."""

    def read(cell: str) -> str:
        return "" if cell == "-" else cell.replace("_", " ")

    return [row_type(*map(read, line.split())) for line in text.strip().splitlines()]


NOUNS = table(
    Noun,
    """
    man        men         m  Mann       Männer      person
    woman      women       f  Frau       Frauen      person
    child      children    n  Kind       Kinder      person
    girl       girls       n  Mädchen    Mädchen     person
    teacher    teachers    m  Lehrer     Lehrer      person
    doctor     doctors     m  Arzt       Ärzte       person
    student    students    m  Schüler    Schüler     person
    friend     friends     m  Freund     Freunde     person
    father     -           m  Vater      -           family
    mother     -           f  Mutter     -           family
    brother    brothers    m  Bruder     Brüder      family
    sister     sisters     f  Schwester  Schwestern  family
    dog        dogs        m  Hund       Hunde       animal
    cat        cats        f  Katze      Katzen      animal
    bird       birds       m  Vogel      Vögel       animal
    rabbit     rabbits     n  Kaninchen  Kaninchen   animal
    apple      apples      m  Apfel      Äpfel       fruit
    pear       pears       f  Birne      Birnen      fruit
    cake       cakes       m  Kuchen     Kuchen      food
    egg        eggs        n  Ei         Eier        food
    bread      -           n  Brot       -           bread
    water      -           n  Wasser     -           drink
    milk       -           f  Milch      -           drink
    coffee     -           m  Kaffee     -           drink
    tea        -           m  Tee        -           drink
    book       books       n  Buch       Bücher      text
    letter     letters     m  Brief      Briefe      text
    newspaper  newspapers  f  Zeitung    Zeitungen   text
    ball       balls       m  Ball       Bälle       thing
    bag        bags        f  Tasche     Taschen     thing
    lamp       lamps       f  Lampe      Lampen      thing
    key        keys        m  Schlüssel  Schlüssel   thing
    picture    pictures    n  Bild       Bilder      thing
    flower     flowers     f  Blume      Blumen      thing
    hat        hats        m  Hut        Hüte        clothes
    coat       coats       m  Mantel     Mäntel      clothes
    shirt      shirts      n  Hemd       Hemden      clothes
    door       doors       f  Tür        Türen       opening
    window     windows     n  Fenster    Fenster     opening
    car        cars        n  Auto       Autos       vehicle
    table      tables      m  Tisch      Tische      furniture
    chair      chairs      m  Stuhl      Stühle      furniture
    bed        beds        n  Bett       Betten      furniture
    house      houses      n  Haus       Häuser      place
    garden     gardens     m  Garten     Gärten      place
    kitchen    kitchens    f  Küche      Küchen      place
    school     schools     f  Schule     Schulen     place
    room       rooms       n  Zimmer     Zimmer      place
    """,
)
# What a person can be. German has words of their own for women.
FEMININE_PROFESSIONS = table(
    Noun,
    """
    teacher    -           f  Lehrerin   -           person
    doctor     -           f  Ärztin     -           person
    student    -           f  Schülerin  -           person
    friend     -           f  Freundin   -           person
    """,
)
PROFESSIONS = [noun for noun in NOUNS if noun.en in ("teacher", "doctor", "student", "friend")]
NAMES = {"Anna": "f", "Maria": "f", "Julia": "f", "Peter": "m", "Paul": "m", "Thomas": "m"}

# Short names for several kinds of nouns.
KIND_GROUPS = {
    "human": "person,family",
    "being": "person,family,animal",
    "item": "text,thing,clothes",
    "goods": "text,thing,clothes,vehicle,furniture",
    "meal": "fruit,food",
    "mass": "bread,drink",
    "solid": "animal,thing,clothes,opening,vehicle,furniture",
}

ADJECTIVES = table(
    Adjective,
    """
    big        groß        lasting  solid,place,meal
    small      klein       lasting  solid,place,meal
    old        alt         lasting  being,solid,text,place
    new        neu         lasting  thing,clothes,opening,vehicle,furniture,text
    red        rot         lasting  thing,clothes,opening,vehicle,furniture,fruit
    blue       blau        lasting  thing,clothes,opening,vehicle,furniture
    green      grün        lasting  thing,clothes,opening,vehicle,furniture,fruit
    beautiful  schön       lasting  animal,thing,clothes,vehicle,place
    good       gut         lasting  teacher,doctor,student,friend,meal,mass,text
    young      jung        lasting  being
    cold       kalt        passing  drink,place
    hot        heiß        passing  drink
    fresh      frisch      passing  meal,mass
    friendly   freundlich  passing  being
    happy      glücklich   passing  human
    tired      müde        passing  being
    hungry     hungrig     passing  being
    """,
)
COMPARATIVES = table(
    Adjective,
    """
    bigger          größer   lasting  animal,thing,clothes,place
    smaller         kleiner  lasting  animal,thing,clothes,place
    older           älter    lasting  being,thing,place
    younger         jünger   lasting  being
    more_beautiful  schöner  lasting  animal,thing,clothes,place
    """,
)

DETERMINERS = table(
    Determiner,
    """
    the    the    d      der     8  5  4
    this   these  dies   dieser  2  2  1
    a      -      ein    ein     8  0  0
    no     no     kein   ein     0  2  2
    my     my     mein   mein    1  1  1
    your   your   dein   mein    1  1  1
    his    his    sein   mein    1  1  1
    her    her    ihr    mein    1  1  1
    our    our    unser  mein    1  1  1
    their  their  ihr    mein    1  1  1
    -      -      -      bare    0  5  6
    -      two    zwei   number  0  1  0
    -      three  drei   number  0  1  0
    -      four   vier   number  0  1  0
    -      five   fünf   number  0  1  0
    -      ten    zehn   number  0  1  0
    -      6      6      number  0  1  0
    -      8      8      number  0  1  0
    -      12     12     number  0  1  0
    -      20     20     number  0  1  0
    """,
)

# Endings of the masculine, feminine, neuter and plural forms.
STRONG = {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en"}
MIXED = {"nom": "er e es en", "acc": "en e es en", "dat": "en en en en"}
WEAK = {"nom": "e e e en", "acc": "en e e en", "dat": "en en en en"}
EIN = {"nom": "- e - e", "acc": "en e - e", "dat": "em er em en"}
NO_ENDING = dict.fromkeys(STRONG, "- - - -")
DETERMINER_ENDINGS = {
    "der": {"nom": "er ie as ie", "acc": "en ie as ie", "dat": "em er em en"},
    "dieser": STRONG,
    "ein": EIN,
    "mein": EIN,
    "number": NO_ENDING,
    "bare": NO_ENDING,
}
ADJECTIVE_ENDINGS = {"der": WEAK, "dieser": WEAK, "ein": MIXED, "mein": MIXED, "number": STRONG, "bare": STRONG}

PRONOUNS = table(
    Pronoun,
    """
    I     me    1s  -  ich  mich  mir    2
    you   you   2s  -  du   dich  dir    2
    he    him   3s  m  er   ihn   ihm    1
    she   her   3s  f  sie  sie   ihr    1
    we    us    1p  -  wir  uns   uns    1
    they  them  3p  -  sie  sie   ihnen  1
    """,
)

VERBS = table(
    Verb,
    """
    sleep   sleeps   slept    schlafen    schläft   geschlafen    hat  being  -        -                          p
    work    works    worked   arbeiten    arbeitet  gearbeitet    hat  human  -        -                          wfp
    play    plays    played   spielen     spielt    gespielt      hat  being  -        -                          wp
    laugh   laughs   laughed  lachen      lacht     gelacht       hat  human  -        -                          wp
    wait    waits    waited   warten      wartet    gewartet      hat  being  -        -                          p
    sing    sings    sung     singen      singt     gesungen      hat  human  -        -                          wfp
    run     runs     run      laufen      läuft     gelaufen      ist  being  -        -                          wp
    get_up  gets_up  got_up   auf|stehen  steht     aufgestanden  ist  human  -        -                          -
    arrive  arrives  arrived  an|kommen   kommt     angekommen    ist  human  -        -                          w
    buy     buys     bought   kaufen      kauft     gekauft       hat  human  acc      goods,meal,mass            f
    read    reads    read     lesen       liest     gelesen       hat  human  acc      text                       wp
    see     sees     seen     sehen       sieht     gesehen       hat  being  acc      being,item,vehicle,place   p
    eat     eats     eaten    essen       isst      gegessen      hat  human  acc      meal,bread                 wp
    drink   drinks   drunk    trinken     trinkt    getrunken     hat  human  acc      drink                      wp
    find    finds    found    finden      findet    gefunden      hat  human  acc      item,animal                fp
    write   writes   written  schreiben   schreibt  geschrieben   hat  human  acc      book,letter                fp
    wear    wears    worn     tragen      trägt     getragen      hat  human  acc      clothes                    p
    visit   visits   visited  besuchen    besucht   besucht       hat  human  acc      human                      w
    help    helps    helped   helfen      hilft     geholfen      hat  human  dat      being                      p
    have    has      -        haben       hat       -             -    human  acc      item,animal,vehicle,meal   -
    love    loves    -        lieben      liebt     -             -    human  acc      being                      -
    need    needs    -        brauchen    braucht   -             -    human  acc      goods,mass                 -
    open    opens    opened   auf|machen  macht     aufgemacht    hat  human  acc      opening,bag                f
    close   closes   closed   zu|machen   macht     zugemacht     hat  human  acc      opening,bag                f
    call    calls    called   an|rufen    ruft      angerufen     hat  human  acc      human                      p
    invite  invites  invited  ein|laden   lädt      eingeladen    hat  human  acc      human                      -
    give    gives    given    geben       gibt      gegeben       hat  human  dat+acc  item,meal                  p
    show    shows    shown    zeigen      zeigt     gezeigt       hat  human  dat+acc  item,animal,vehicle,place  -
    bring   brings   brought  bringen     bringt    gebracht      hat  human  dat+acc  item,meal,mass             -
    say     says     said     sagen       sagt      gesagt        hat  human  that     -                          -
    think   thinks   -        glauben     glaubt    -             -    human  that     -                          -
    hope    hopes    -        hoffen      hofft     -             -    human  that     -                          -
    """,
)

# negatable: "must not" is not "muss nicht", and "may not" has two meanings, so neither is said (nor with "no").
MODALS = table(
    Modal,
    """
    can      can       kann    kannst    können   yes
    must     must      muss    musst     müssen   no
    may      may       darf    darfst    dürfen   no
    should   should    sollte  solltest  sollten  yes
    want_to  wants_to  will    willst    wollen   yes
    """,
)
BE = {"1s": ("am", "bin"), "2s": ("are", "bist"), "3s": ("is", "ist"), "1p": ("are", "sind"), "3p": ("are", "sind")}
# Separable verbs are listed twice, to be said more often: they have more forms.
ACTIONS = [verb for verb in VERBS if verb.frame != "that" for _ in range(2 if "|" in verb.de else 1)]
HAVE = next(verb for verb in VERBS if verb.en == "have")

PREPOSITIONS = table(
    Preposition,
    """
    with         mit     dat  w  being                           being
    without      ohne    acc  w  being                           being
    for          für     acc  f  human                           being
    in           in      dat  p  place                           being,item,furniture
    behind       hinter  dat  p  house,school,vehicle            being,item,vehicle
    in_front_of  vor     dat  p  house,school,vehicle,opening    being,vehicle
    next_to      neben   dat  p  house,school,furniture,opening  being,thing,furniture,vehicle
    on           auf     dat  p  furniture                       animal,item,meal
    under        unter   dat  p  furniture                       animal,item,meal
    """,
)

# Each adverbial is a row of aligned words.
TODAY = "today=heute"
TIMES = [TODAY, "now=jetzt", "at_night=nachts", "every=jeden day=Tag", "in_the=am evening=Abend"]
FREQUENCIES = ["often=oft", "always=immer", "never=nie", "sometimes=manchmal", "rarely=selten"]
PLACES = ["here=hier", "outside=draußen", "at=zu home=Hause"]
CONJUNCTIONS = ["because=weil", "although=obwohl", "if=wenn"]


@functools.cache
def expand(spec: str) -> frozenset[str]:
    """The kinds (and single nouns) that a table cell lists."""
    return frozenset(kind for part in spec.split(",") for kind in KIND_GROUPS.get(part, part).split(","))


def fits(noun: Noun, spec: str) -> bool:
    return not expand(spec).isdisjoint((noun.kind, noun.en))
