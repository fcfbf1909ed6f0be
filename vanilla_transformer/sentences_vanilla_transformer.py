# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Cuts texts into the pieces that a model translates, and joins the translations. Travels with every saved model."""

import re
import sys
import unicodedata
import warnings
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from numbers import Integral
from typing import Literal

import regex
from transformers import PreTrainedTokenizerBase

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
# The space between two sentences: after STOPS, and before anything but a lower-case letter; or after WIDE_STOPS, where
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

    No sentence ends at the period of an abbreviation, an initial or a number of up to two digits without a decimal
    point, nor before a lower-case letter, unless the text has no capitals.
    """
    if not MAYBE.search(text):
        return [len(text)]
    ends = [gap.end() for gap in GAPS[bool(regex.search(r"\p{Lu}", text))].finditer(text)]
    return [*ends, len(text)]


# -------------------------------------------------------------------------------------------------------- segmentation

LONGEST_TEXT = 10_000  # characters that are always tokenized, see `longest_text`
MOST_TOKENS = 4096  # of a piece, unless `max_source_length` allows more: attention takes their square
LINE = re.compile(r"[^\n\r\u2028\u2029]+(?:[\n\r\u2028\u2029]\s*)?")  # with the line breaks after it
WIDE_END = re.compile(r"[。！？，；：、][」』”’）》】]*$")  # no space follows these
# Of a page or a mailbox. The bounds keep the time linear in the length of a text without spaces.
LATIN = "A-Za-zÀ-ɏ0-9-"
ADDRESS = re.compile(
    rf"[A-Za-z][A-Za-z0-9+.-]{{,19}}://\S+|www\.\S+|(?:mailto:)?[{LATIN}.+%_]{{1,64}}@[{LATIN}]{{1,64}}(?:\.[{LATIN}]+)+",
    re.IGNORECASE,
)
WORD = re.compile(r"[^\W\d_]+")
FIRST = re.compile(r"^\W*[^\W\d_]")  # the first letter, unless a number comes before it
# Of placeholders, addresses and formulas, whose case stays; and letters that only Turkish has, with other capitals.
CODE = re.compile(r"[{}<>@=\\|`~^İı]|://|&\w|\$[^\W\d]|(?<!\d)%[\w(]|\w_\w|[^\W\d]{2,}\.[^\W\d]{2,}")
SPACE = re.compile(r"(?<=\w)[^\S\n\r]+(?=[.,!?;:]+(?:\s|$))")  # before punctuation marks
# What may stand around the words of a list item or a quotation: a bullet, emoji at the end, and quotes.
BULLET = regex.compile(r"""(?:(?:[^\p{L}\p{N}\p{Sc}\s"'“”„«»‘’(\[{<¿¡%@&§©≈±=№~]{1,8}|\(?(?:\d{1,2}|[a-z])\))\s+)?""")
EMOJI = regex.compile(r"(?:\s{0,2}[\p{Extended_Pictographic}\p{Emoji_Modifier}\p{RI}\u200d\ufe0f]){0,20}$")
PAIRS = [("**", "**"), ("''", "''"), *map(tuple, ('""', "''", "“”", "„“", "«»", "»«", "‘’", "()", "**"))]
QUOTES = [(opening, closing + stop, {opening, closing}) for opening, closing in PAIRS for stop in ("", *".,;:?!")]
# Those around several sentences are at the ends of different pieces.
QUOTES += [ends + ({*pair},) for pair in ('""', "“”", "„“", "«»") for ends in ((pair[0], ""), ("", pair[1]))]
QUOTE_MARKS = {mark for pair in PAIRS for quote in pair for mark in quote}
CJK_LETTER = regex.compile(CJK)


class InputError(ValueError):
    """Raised for a wrong text or option. The message is one sentence: what is wrong and how to correct it."""


class TextTooLong(InputError):
    """Text `number`, counted from 0, has a piece of more tokens than can be translated."""

    def __init__(self, number: int, tokens: int, limit: int):
        super().__init__(
            f"Text {number + 1} has {tokens} tokens; at most {limit} can be translated in one piece. Shorten it, or "
            "raise `max_source_length` if the model has more positions."
        )
        self.number, self.tokens, self.limit = number, tokens, limit

    def __reduce__(self):  # an exception is pickled with its message alone
        return TextTooLong, (self.number, self.tokens, self.limit)


@dataclass
class Segments:
    """Texts in pieces.

    Attributes:
        text_indices: The index of the text of each piece.
        pieces: Each piece, as it was tokenized.
        sources: The token ids of each piece.
        in_capitals: Of each piece, whether the text had it in capitals, which its translation will have, too.
        gaps: Of each text, what is before, between and after its pieces, and stays as it is.
    """

    text_indices: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    sources: list[list[int]] = field(default_factory=list)
    in_capitals: list[bool] = field(default_factory=list)
    gaps: list[list[str]] = field(default_factory=list)

    def of_texts(self, results: list) -> list[list]:
        """The `results` of the pieces, one for each of `sources`, as a list for each text."""
        found = [[] for _ in self.gaps]
        for index, result in zip(self.text_indices, results, strict=True):
            found[index].append(result)
        return found

    def join(self, translations: list[str]) -> list[str]:
        """The translation of each text, from those of the pieces."""
        pieces = map(self.as_typed, range(len(translations)), translations)
        return [join(parts, gaps) for parts, gaps in zip(self.of_texts([*pieces]), self.gaps, strict=True)]

    def as_typed(self, index: int, translation: str) -> str:
        """The translation of a piece, in capitals if the piece was."""
        return translation.upper() if self.in_capitals[index] else translation


class Segmenter:
    """Cuts texts into pieces that are like the sources of training.

    A piece has at most as many lines, sentences and tokens as a source had in training, which train.py notes in the
    tokenizer. A single sentence with more tokens stays whole, as far as the model has positions; a longer one is cut
    after clauses, else between words, else anywhere. Each piece repeats the tags at the beginning of its text, such as
    `>>deu<<`. Forms that train.py noted as rare in training are treated apart: a piece without words, such as `3.14`
    or a URL, is not translated; bullets and quotes around a sentence stay as they are; and a piece in capitals, in
    title case, in lower case or with spaces before punctuation marks is corrected first.

    Args:
        tokenizer: Of the model, with the notes of train.py.
        max_positions: Tokens of the longest source that the model can compute.
        default_positions: The same, unless `max_source_length` allows more.
        max_source_length, max_source_sentences, max_source_lines, too_long: As in [`BaseTranslator`].

    Raises InputError if a number is below 1, or `too_long` is neither "split" nor "refuse".
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_positions: int = sys.maxsize,
        default_positions: int = sys.maxsize,
        max_source_length: int | None = None,
        max_source_sentences: int | None = None,
        max_source_lines: int | None = None,
        too_long: Literal["split", "refuse"] = "split",
    ):
        if too_long not in ("split", "refuse"):
            raise InputError(f"`too_long` is {too_long!r}; it must be 'split' or 'refuse'.")
        noted = tokenizer.init_kwargs
        if max_source_sentences is None:
            max_source_sentences = noted.get("max_source_sentences", sys.maxsize)
        if max_source_lines is None:
            max_source_lines = noted.get("max_source_lines", 1)
        check_positive(model_max_length=tokenizer.model_max_length, max_source_length=max_source_length)
        check_positive(max_source_sentences=max_source_sentences, max_source_lines=max_source_lines)
        self.max_sentences, self.max_lines = max_source_sentences, max_source_lines
        self.longest = min(max_source_length or min(default_positions, MOST_TOKENS), max_positions)
        self.usual = min(max_source_length or tokenizer.model_max_length, self.longest)  # of several sentences
        self.tokenizer = tokenizer
        self.too_long = too_long
        self.is_verbatim = bool(noted.get("verbatim"))  # spaces around a text mean something
        kinds = ["wordless_sources"] if self.is_verbatim else SOURCE_KINDS
        self.unseen = {kind for kind in kinds if noted.get(kind) is False}
        tags = [*noted.get("source_tags", ()), *filter(re.compile(r">>\S+<<").fullmatch, tokenizer.get_vocab())]
        self.tags = re.compile(rf"\s*(?:(?:{'|'.join(map(re.escape, tags)) or '(?!)'})[^\S\n]*)+")

    def split(self, texts: list[str]) -> Segments:
        """The texts in pieces.

        Raises TextTooLong if a piece has too many tokens and must not be cut, or cannot be.
        """
        pieces, segments = [], Segments()
        for index, text in enumerate(texts):
            found, (before, *between) = self.pieces_of(text)
            pieces += [(index, *self.corrected(piece), after) for piece, after in zip(found, between, strict=True)]
            segments.gaps.append([before])
        *encoded, nothing = self.encode([*(piece for _, piece, _, _ in pieces), ""])
        for (index, piece, was_in_capitals, after), source in zip(pieces, encoded, strict=True):
            gaps, body = segments.gaps[index], piece.removeprefix(self.tags_of(piece))
            if source == nothing or all(map(is_invisible, piece)):
                gaps[-1] += after
            elif "wordless_sources" in self.unseen and not has_words(body):
                gaps[-1] += body + after
            else:
                parts = [(piece, source, after)]
                if len(source) > self.limit_of(piece, source):
                    parts = self.cut(piece, after) if self.too_long == "split" else []
                if not parts:
                    raise TextTooLong(index, len(source), self.longest)
                for part, ids, gap in parts:
                    segments.text_indices.append(index)
                    segments.pieces.append(part)
                    segments.sources.append(ids)
                    segments.in_capitals.append(was_in_capitals)
                    gaps.append(gap)
        return segments

    def pieces_of(self, text: str) -> tuple[list[str], list[str]]:
        """A text in pieces of at most `max_lines` and `max_sentences`, each with the tags of the text; and the gaps
        before, between and after them.
        """
        tags = self.tags_of(text)
        body = text.lstrip()[len(tags) :].lstrip()
        pieces, gaps = [], [text.removesuffix(body).replace(tags, "", 1)]
        lines = LINE.findall(body)
        for first in range(0, len(lines), self.max_lines):
            line = "".join(lines[first : first + self.max_lines])
            ends = [len(line)]
            if self.max_sentences < sys.maxsize:
                ends = [*sentence_ends(line.rstrip())[self.max_sentences - 1 : -1 : self.max_sentences], len(line)]
            for start, end in pairwise([0, *ends]):
                piece = line[start:end].rstrip()
                before, after = frame_of(piece) if "framed_sources" in self.unseen else ("", "")
                gaps[-1] += before
                gaps.append(after + line[start + len(piece) : end])
                pieces.append(tags + piece[len(before) : len(piece) - len(after)])
        return ([text], ["", ""]) if self.is_verbatim and len(pieces) == 1 else (pieces, gaps)

    def tags_of(self, text: str) -> str:
        """The tags at the beginning of a text, with the spaces after them."""
        found = self.tags.match(text)
        return found[0].lstrip() if found else ""

    def corrected(self, piece: str) -> tuple[str, bool]:
        """A piece typed as training sources were, and whether it was in capitals.

        Sentences in capitals, title case or lower case begin with a capital afterwards, unless the piece has fewer
        tokens all in lower case, as with a model that has read nothing else.
        """
        tags = self.tags_of(piece)
        body = piece.removeprefix(tags)
        if "spaced_sources" in self.unseen:
            body = SPACE.sub("", body)
        kinds = self.unseen & {"capital_sources", "title_sources", "lower_sources"}
        kinds = {kind for kind in kinds if SOURCE_KINDS[kind](body)}
        if kinds:
            sentences = [body[start:end] for start, end in pairwise([0, *CUTS[SENTENCES](body)])]
            forms = ["".join(map(capitalize, sentences)), body.lower()]
            body = min(forms, key=lambda form: len(self.encode([tags + form])[0]))
        return tags + body, "capital_sources" in kinds

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text."""
        return self.tokenizer(texts, return_attention_mask=False, verbose=False).input_ids if texts else []

    def limit_of(self, piece: str, source: list[int]) -> int:
        """The tokens that a piece with the ids `source` may have. Warns if a sentence has more than usual."""
        if len(source) <= self.usual or self.too_long == "refuse" or len(source) > self.longest:
            return self.longest
        if len(CUTS[SENTENCES](piece)) > 1:
            return self.usual
        warnings.warn(  # always the same sentence, which Python shows only once
            f"Some sentences have more tokens than usual training sources, {self.usual:,}. They are translated whole, "
            "and the end of their translations may be missing.",
            stacklevel=4,
        )
        return self.longest

    def cut(self, piece: str, after: str) -> list[tuple[str, list[int], str]]:
        """The parts of a piece that is too long, each with its token ids and the gap after it, `after` at the end.

        An empty list if not even a single character fits.
        """
        tags = self.tags_of(piece)

        def has_at_most(limit: int, part: str) -> bool:
            whole = tags + part.strip()
            return len(whole) <= longest_text(limit) and len(self.encode([whole])[0]) <= limit

        fits, is_possible = partial(has_at_most, self.usual), partial(has_at_most, self.longest)
        parts = list(cut(piece.removeprefix(tags), fits, is_possible))
        if not all(map(is_possible, parts)):
            return []
        gaps = [*(part[len(part.rstrip()) :] for part in parts[:-1]), after]
        parts = [tags + part.strip() for part in parts]
        return list(zip(parts, self.encode(parts), gaps, strict=True))


def check_positive(**numbers: int | None):
    """Raises InputError if a number is neither None nor an integer of at least 1."""
    for name, value in numbers.items():
        if value is not None and not isinstance(value, Integral):
            raise InputError(f"`{name}` is {value!r}; it must be an integer.")
        if value is not None and value < 1:
            raise InputError(f"`{name}` is {value}; it must be at least 1.")


def longest_text(max_tokens: int) -> int:
    """A generous upper bound of the characters of a text with `max_tokens` tokens.

    A longer text need not be tokenized to know that it has more, which would take quadratic time where texts are cut.
    """
    return max(LONGEST_TEXT, 100 * max_tokens)


def is_invisible(letter: str) -> bool:
    """Whether it is a space, or a joiner or a mark of direction, which mean nothing by themselves."""
    return letter.isspace() or unicodedata.category(letter) == "Cf"


def has_words(text: str) -> bool:
    """Whether a text has letters outside of addresses. Ideographs are letters."""
    return any(map(str.isalpha, ADDRESS.sub("", text)))


def capitalize(sentence: str) -> str:
    """A sentence in lower case, but for its first letter."""
    return FIRST.sub(lambda found: found[0].upper(), sentence.lower())


def is_in_capitals(text: str) -> bool:
    """Whether all letters are capitals, more than most abbreviations have; not with [`CODE`]."""
    letters = list(filter(str.isalpha, text))
    return len(letters) > 4 and all(map(str.isupper, letters)) and not CODE.search(text)


def is_in_title_case(text: str) -> bool:
    """Whether at least five words and most begin with a capital, as in a headline; short words need not. Not with
    [`CODE`]."""
    words = WORD.findall(text)
    capitals = [word for word in words if word[0].isupper()]
    is_usual = all(word[0].isupper() for word in words if len(word) > 3)
    return is_usual and len(capitals) >= max(5, 0.75 * len(words)) and not (text.isupper() or CODE.search(text))


def is_in_lower_case(text: str) -> bool:
    """Whether it has no capitals, and no number before its first letter; not with [`CODE`]."""
    return text.islower() and bool(FIRST.search(text)) and not CODE.search(text)


def frame_of(text: str) -> tuple[str, str]:
    """What stands before and after the words of a list item or a quotation, both in a single line.

    Both are empty if there are no words. They are empty for Chinese and Japanese, too, since [`join`] adds a space
    between sentences only where nothing else is.
    """
    if LINE.sub("", text, count=1) or CJK_LETTER.search(text):
        return "", ""
    start, end = BULLET.match(text).end(), EMOJI.search(text).start()
    while quotes := quotes_of(text[start:end]):
        start, end = start + len(quotes[0]), end - len(quotes[1])
        inner = text[start:end]
        start, end = end - len(inner.lstrip()), start + len(inner.rstrip())
    return (text[:start], text[end:]) if has_words(text[start:end]) else ("", "")


def quotes_of(text: str) -> tuple[str, str] | None:
    """The quotes around a text, or a single one at one end; None if there are such quotes inside, too."""
    if QUOTE_MARKS.isdisjoint(text[:1] + text[-2:]):  # most texts
        return None
    for opening, closing, marks in QUOTES:
        inner = text.removeprefix(opening).removesuffix(closing)
        if len(text) == len(opening + inner + closing) and not any(mark in inner for mark in marks):
            return opening, closing
    return None


# Kinds of sources that are treated apart if training had few of them; train.py notes them under these names.
SOURCE_KINDS: dict[str, Callable[[str], bool]] = {
    "wordless_sources": lambda text: not has_words(text),
    "capital_sources": is_in_capitals,
    "title_sources": is_in_title_case,
    "lower_sources": is_in_lower_case,
    "spaced_sources": lambda text: bool(SPACE.search(text)),
    "framed_sources": lambda text: frame_of(text) != ("", ""),
}


def ends_of(pattern: str, text: str) -> list[int]:
    """Where the parts of a text end that `pattern` separates; the last end is that of the text."""
    ends = [found.end() for found in re.finditer(pattern, text)]
    return ends if ends[-1:] == [len(text)] else [*ends, len(text)]


# Where a long text is cut: after sentences, else after clauses, else between words, else anywhere.
SENTENCES, CLAUSES, WORDS, CHARACTERS = range(4)
CUTS = {
    SENTENCES: lambda text: sorted({*sentence_ends(text), *ends_of(r"(?<=[\n\r\u2028\u2029])\s*", text)}),
    CLAUSES: partial(ends_of, r"(?<=[,;:])\s+|(?<=[，；：、])"),
    WORDS: partial(ends_of, r"\s+"),
    CHARACTERS: lambda text: list(range(1, len(text) + 1)),
}


def cut(
    text: str, fits: Callable[[str], bool], is_possible: Callable[[str], bool], level: int = SENTENCES
) -> Iterator[str]:
    """Splits `text` into the longest pieces that fit, at the allowed cut points.

    A sentence or a word that does not fit is kept whole if that is possible. A piece that cannot be split is returned
    even if it is too long.
    """
    if level not in CUTS:
        yield text
        return
    ends = CUTS[level](text)
    start = first = 0
    count = 1
    while first < len(ends):

        def fit(parts: int) -> bool:
            if parts < 1 or first + parts > len(ends):  # noqa: B023
                return parts < 1
            return fits(text[start : ends[first + parts - 1]])  # noqa: B023

        # A text of one part is not tried again: the next cuts will tell.
        found = 0 if len(ends) == 1 else largest(count, fit)
        count = max(found, 1)
        piece = text[start : ends[first + count - 1]]
        if not found and not (level in (SENTENCES, WORDS) and is_possible(piece)):
            yield from cut(piece, fits, is_possible, level + 1)
        elif piece.strip():
            yield piece
        start, first = ends[first + count - 1], first + count


def largest(guess: int, fit: Callable[[int], bool]) -> int:
    """The largest number that fits, near `guess`: found by growing steps, then by bisection."""
    step = 1
    if fit(guess):
        low = guess
        while fit(low + step):
            low, step = low + step, 2 * step
        high = low + step
    else:
        high = guess
        while not fit(high - step):
            high, step = high - step, 2 * step
        low = high - step
    return low + bisect(range(low + 1, high), False, key=lambda number: not fit(number))


def join(translations: list[str], gaps: list[str]) -> str:
    """The translations of the pieces of a text, with what stood before, between and after them.

    Pieces that nothing separated, as Chinese sentences, get a space between them; after Chinese or Japanese
    punctuation, a single space goes.
    """
    before, *between = gaps
    if not translations:
        return "" if all(map(is_invisible, before)) else before
    for number, (translation, gap) in enumerate(zip(translations, between, strict=True), 1):
        if number < len(translations) and gap in ("", " "):
            gap = "" if WIDE_END.search(translation) else " "
        before += translation + gap
    return before
