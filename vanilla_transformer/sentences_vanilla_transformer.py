# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Where sentences end, by rules for many languages. This file travels with every saved model."""

import regex

# Words with a period that does not end a sentence: before any word, and before a number.
TITLES = (
    "adm al approx Av avv bijv bl bzw ca capt cf cmdr Col dhr dipl doc dott dr dra drs ds dvs ee evtl exmo fr frl gen "
    "geom ggf gov Hon hr ing inkl insp inż kap lic lt maj messrs mevr mgr Mio mlle mme mr Mrd mrs ms msgr mt mx "
    "např np núm obs phd pres prof profa prot pvt ref rep rev Sen sgt sig sigg sn sr sra srta ss st sta ste sto tj "
    "Tsd tzv tzw ud uds ul uu vgl viz vs zzgl św акад им проф ул"
)
NUMBERED = (
    "abb abs apr art aug bd blz cap ch chap dec dez ed eds eq eqs feb fig figs jan jul jun mar mrz no nos nov nr "
    "oct okt p pág pp s sec sect sep sept str tab tel vol vols рис стр"
)


def any_of(words: str) -> str:
    """A pattern of the words, also in capitals, and the small ones with a capital first letter."""
    return "|".join(
        sorted({form for word in words.split() for form in (word, word[0].upper() + word[1:], word.upper())})
    )


# Repetitions before a gap have a limit, or the time would grow with the square of a text of dots.
START = r"(?:^|[^\p{L}\p{N}])"  # of a word
OPENING = r""""'“„‚‘’«»(\[¿¡–—\-"""
CLOSING = r"""["'”’»)\]}」』）》】]"""
MARKS = r"(?:[\p{Cf}*_¹²³]|\[\d{1,3}\])"  # of direction, of emphasis, of footnotes
CLOSED = rf"(?:{CLOSING}|{MARKS}|[“‘«›‹]|\s{{1,2}}»|</?\w{{1,9}} ?/?>){{0,4}}"  # “ closes in German
STOPS, WIDE_STOPS = ".!?…؟۔։", "。！？｡।॥។៕။።᠃᠉"  # before a space, and wherever they are
CJK = r"[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}ー]"
NO_END = [
    any_of(TITLES),
    r"[^I\P{Lu}]",  # an initial
    r"\p{L}\. ?[^m\P{L}]",  # e.g., z. B., but not p.m.
    r"\p{Ll}(?=\.\s\p{L}\.)",  # the z. of z. B.
    r"(?<!\d[.,:])\d\d?",  # am 3. Oktober, but not 3.50
    r"[Dd]r\.\s{1,2}med",
    rf"(?:{any_of(NUMBERED)}|\p{{L}}{{1,30}}str)(?=\.\s*\d)",
]
# The space between two sentences: after STOPS, and before anything but a small letter; or after WIDE_STOPS, where
# there may be none. SMALL is replaced below. JavaScript reads this pattern too: examples/browser has a copy.
BEGIN = rf"(?=(?:[«–—-]\s{{1,3}})?[{OPENING}]{{0,3}}[^{OPENING}{STOPS}\sSMALL])"  # of the next sentence
GAP = (
    rf"(?<=[{STOPS}]{CLOSED})(?<!{START}(?:{'|'.join(NO_END)})\.{MARKS}{{0,3}})\s+{BEGIN}"
    rf"|(?<=[{WIDE_STOPS}]{CLOSING}{{0,3}})\s*(?!{CLOSING}|[{WIDE_STOPS}…])(?=\S)"
    rf"|(?<={CJK}[!?]{CLOSING}{{0,3}})(?=[“‘「『（《]?{CJK})"
)
GAPS = {has_capitals: regex.compile(GAP.replace("SMALL", r"\p{Ll}" * has_capitals)) for has_capitals in (True, False)}
# Finds quickly that most texts are one sentence.
MAYBE = regex.compile(rf"[{STOPS}]\S{{0,40}}\s+\S|[{WIDE_STOPS}]\s*\S|[!?]{CLOSING}{{0,3}}[“‘「『（《]?{CJK}")


def sentence_ends(text: str) -> list[int]:
    """Where the sentences of a line end, each with the spaces after it; the last end is that of the line.

    A sentence is not ended by the period of an abbreviation, an initial or a number of up to two digits without a
    decimal point, nor before a small letter, unless the text has no capital letters at all.
    """
    if not MAYBE.search(text):
        return [len(text)]
    ends = [gap.end() for gap in GAPS[bool(regex.search(r"\p{Lu}", text))].finditer(text)]
    return [*ends, len(text)]
