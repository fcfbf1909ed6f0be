"""Where sentences end, and what a Translator makes of lines and sentences."""

import copy
import itertools
import pickle
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from helpers import ROOT, TEXTS, save_translator, writing_translator

from vanilla_transformer import Translator
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.decoding_vanilla_transformer import beam_search
from vanilla_transformer.sentences_vanilla_transformer import (
    GAP,
    NUMBERED,
    SOURCE_KINDS,
    TITLES,
    TextTooLong,
    frame_of,
    has_words,
    join,
    sentence_ends,
)
from vanilla_transformer.translation_vanilla_transformer import Hypothesis

# A bar stands between two sentences.
SPLIT = """
The cat sleeps under the table. | The dog sleeps.
What? | No! | Yes... | "Stop!" | (He ran.) | 'Why?' | ¿Qué? | ¡Nada! | “Really?” | 3 dogs ran.
“Why?” she asked. | Wait... what? | It cost 1.5 million in 1990. | Then it rose.
Dr. Smith, Mr. and Mrs. Jones and Prof. Lee wait. | J. R. R. Tolkien wrote it. | He is in the U.S. Army.
It is late, e.g. midnight, i.e. 12 o'clock. | He left at 5 p.m. | She stayed.
See Fig. 3 and Nos. 5 and 6 of it. | There is no. | Go.
Am I? | So am I. | You are.
Version 2.0 is out. | Visit www.example.com. | Open file.txt now.
Save it? | %s was saved. | {name} left. | <b>Bold.</b> | <i>Next</i>
Er mag Tiere, z. B. Hunde, d. h. Dackel. | Sie auch, z.B. Katzen. | Nur Prof. Dr. Müller kommt.
Am 3. Oktober kommen ca. 5 Mio. Gäste.
M. Dupont et Mme Durand arrivent. | « Oui. » | Elle part. | « Vraiment ? » dit-il. | Quoi ? | Oui ! dit-elle.
È mio. | Prendilo.
Det är hon. | Lampan är av. | Han kommer.
I thought ... well, no. | Wait . . . what? | DR. SMITH waits.
Он ушёл. | — Да. | – И я.
Sr. López y Dra. Ruiz llegaron. | Ud. también.
Sig. Rossi e dott. Bianchi. | Ecco.
Проф. Иванов спит. | Это я. | Он пришёл, т. е. всё.
هل جئت؟ | نعم. | لا.
यह एक वाक्य है। | यह दूसरा है।
他来了。|她走了！|“你好。”|他说：「好。」|再见。
Er sagte: „Ich komme.“ | Dann ging er. | »Ich komme.« | Dann ging er. | ‚Ja.‘ | Nein. | ›Ja.‹ | Nein.
It costs 3.50. | Then he left at 10:30. | He ran 1,5. | We waited until the 3. May.
**Bold.** | _Next._ | As said.[1] | Or so.¹ | Go on.<br> | World.
مرحبا.\u200f | كيف حالك؟\u200f | نعم.
Dr.* Smith, **Dr.** Jones, J.[1] Lee and Mr.\\u200e Lee. | Han kom med. | Hun gikk. | コーヒー!|美味しい。|はい。
Messrs. Smith and Prof. Dr. med. Müller came. | Tel. 5 or Hauptstr. 5 it is.
你好!|你是谁?|“他来了!”|他走了。|“好。”|再见!
ខ្ញុំទៅ។|គាត់មក។
a man runs . | he stops . | why ? | the end .
it rains. | we stay. | dr. smith, too.
"""
SPLIT = SPLIT.strip().split("\n")


def split(text: str) -> list[str]:
    ends = sentence_ends(text)
    return [text[start:end].strip() for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("marked", SPLIT)
def test_sentences_of_many_languages(marked):
    expected = [part.strip() for part in marked.split("|")]
    text = marked.replace(" | ", " ").replace("|", "")
    assert split(text) == expected
    assert split(text.replace(" ", "  ")) == [part.replace(" ", "  ") for part in expected] or "z. B." in text


def test_no_abbreviation_ends_a_sentence():
    words = [form for word in TITLES.split() for form in (word, word[0].upper() + word[1:], word.upper())]
    cut = [word for word in words if len(sentence_ends(f"Here is {word}. Miller.")) > 1]
    numbered = [form for word in NUMBERED.split() for form in (word, word.capitalize())]
    cut += [word for word in numbered if len(sentence_ends(f"Here is {word}. 12 of it.")) > 1]
    assert len(words) + len(numbered) > 200 and not cut
    assert all(len(sentence_ends(f"Here is {word}x. Miller.")) == 2 for word in words)


STRANGE = {
    "dots": ".",
    "letters": "A. ",
    "quotes": '."',
    "brackets": ". (",
    "tokens": ". ",
    "spaces": " ",
    "stops": "。",
}


@pytest.mark.parametrize("part", STRANGE.values(), ids=STRANGE)
def test_strange_texts_take_no_longer(part):
    begin = time.perf_counter()
    assert sentence_ends(100_000 * part)[-1] == 100_000 * len(part)
    assert time.perf_counter() - begin < 20  # dots once took 100 s


# ------------------------------------------------------------------------------------------------- in a Translator


@pytest.fixture
def translator(text_tokenizer):
    return writing_translator(copy.deepcopy(text_tokenizer))  # which tests change


LIMIT = {"max_new_tokens": 6}


def one_at_a_time(translator: Translator, **more) -> Translator:
    return Translator(translator.model, translator.tokenizer, max_source_sentences=1, **more)


def test_lines_and_sentences_are_translated_one_by_one_and_spaces_stay(translator):
    first, second, third = translator(["A dog sleeps.", "No!", "Two children play."], **LIMIT)
    texts = {
        "A dog sleeps. No!": f"{first} {second}",
        "  A dog sleeps.\t No!  ": f"  {first}\t {second}  ",
        "A dog sleeps.\nNo!\r\n\r\n  Two children play.\n": f"{first}\n{second}\r\n\r\n  {third}\n",
        "A dog sleeps. No!\u2028Two children play. A dog sleeps.": f"{first} {second}\u2028{third} {first}",
        "\u3000No!\xa0": f"\u3000{second}\xa0",
        "\u200d": "",
        "\u200d \u200e": "",
        "\ufeff\u200b\u200c": "",
        "No!\n\u200d\nA dog sleeps.": f"{second}\n\n{first}",
        "No!": second,
        "\n": "",
    }
    assert one_at_a_time(translator)(list(texts), **LIMIT) == list(texts.values())


def test_tags_are_repeated_and_no_piece_of_their_own():
    translator = one_at_a_time(writing_translator(train_tokenizer(TEXTS, 300, tags=[">>de<<"])))
    for text in (">>de<< A dog. No!", " >>de<<A dog.  No!", ">>de<<\nA dog.\n\nNo!"):
        pieces, gaps = translator.segmenter.pieces_of(text)
        assert [piece.removeprefix(">>de<<").strip() for piece in pieces] == ["A dog.", "No!"]
        assert all(piece.startswith(">>de<<") for piece in pieces) and len(gaps) == 3
    assert translator([">>de<<", "No!"], **LIMIT)[0] == ""


@pytest.mark.parametrize(
    "pieces, gaps, text",
    [
        (["“是。”", "不！」", "ja.", "nein"], ["", " ", " ", "", "\n"], "“是。”不！」ja. nein\n"),
        (["狗。", "猫。"], ["", "\t", ""], "狗。\t猫。"),
        (["今日は晴れ。", "You?", "", "He."], [" ", "", " ", "", "\n"], " 今日は晴れ。You?  He.\n"),
        (["今日は晴れ。", "今日は。"], ["", "\n\n", "  "], "今日は晴れ。\n\n今日は。  "),
    ],
)
def test_no_space_follows_wide_punctuation(pieces, gaps, text):
    assert join(pieces, gaps) == text


@pytest.mark.parametrize(
    "most, groups", [(2, [[0, 1], [2, 3], [4]]), (3, [[0, 1, 2], [3, 4]]), (9, [[0, 1, 2, 3, 4]])]
)
def test_pieces_have_as_many_sentences_as_in_training(translator, most, groups):
    sentences = ["A dog.", "No!", "Yes.", "A man?", "No."]
    pieces = [" ".join(sentences[number] for number in group) for group in groups]
    noted = Translator(translator.model, translator.tokenizer, max_source_sentences=most)
    assert noted.split([" ".join(sentences)]).sources == translator.segmenter.encode(pieces)


LINES = ["A dog.", "No!", "Yes. A man?", "No."]


@pytest.mark.parametrize(
    "lines, sentences, expected",
    [
        (1, 1000, LINES),
        (2, 1000, ["A dog.\nNo!", "Yes. A man?\n\nNo."]),
        (3, 2, ["A dog.\nNo!", "Yes. A man?", "No."]),
        (1000, 1000, ["A dog.\nNo!\nYes. A man?\n\nNo."]),
    ],
)
def test_pieces_have_as_many_lines_as_in_training(translator, lines, sentences, expected):
    """And the breaks between the pieces are kept."""
    translator.tokenizer.init_kwargs |= {"max_source_lines": lines, "max_source_sentences": sentences}
    noted = Translator(translator.model, translator.tokenizer)
    text = " A dog.\nNo!\nYes. A man?\n\nNo.\n"
    pieces, gaps = noted.segmenter.pieces_of(text)
    assert pieces == expected and (gaps[0], gaps[-1]) == (" ", "\n")
    between = [*(gap + piece for gap, piece in zip(gaps, pieces, strict=False)), gaps[-1]]
    assert "".join(between) == text


def test_lines_that_are_too_long_together_are_cut_between_lines(translator):
    translator.tokenizer.init_kwargs |= {"max_source_lines": 1000, "max_source_sentences": 1000}
    lines = ["a man and a dog", "two children play in the park", "a man"]
    translator.tokenizer.model_max_length = max(map(len, translator.segmenter.encode(lines)))
    assert Translator(translator.model, translator.tokenizer).split(["\n".join(lines)]).sources == (
        translator.segmenter.encode(lines)
    )


def test_a_verbatim_model_reads_and_writes_the_spaces_around_a_text():
    """Of a text in one piece."""
    tokenizer = train_tokenizer(TEXTS, 300, verbatim=True)
    tokenizer.init_kwargs |= {"max_source_lines": 3, "max_source_sentences": 1}
    translator = writing_translator(tokenizer)
    text = "\tif x:\n\t\treturn  y \n"
    segments = translator.split([text])
    assert (segments.sources, segments.gaps) == ([tokenizer(text).input_ids], [["", ""]])
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    translator.engine.translate = lambda batches, options: [[ids] for _ in batches]
    assert translator([text]) == [text]


def test_the_tokenizer_says_how_many_sentences_unless_an_option_does(translator, tmp_path):
    text = "A dog sleeps. No!"
    assert len(translator.split([text]).sources) == 1
    translator.tokenizer.init_kwargs["max_source_sentences"] = 1
    folder = save_translator(translator, tmp_path / "model")
    assert len(Translator.from_pretrained(folder).split([text]).sources) == 2
    assert len(Translator.from_pretrained(folder, max_source_sentences=2).split([text]).sources) == 1
    for wrong in (0, "one"):
        translator.tokenizer.init_kwargs["max_source_sentences"] = wrong
        with pytest.raises(ValueError, match="`max_source_sentences` is"):
            Translator(translator.model, translator.tokenizer)


def test_a_sentence_longer_than_any_in_training_is_translated_whole_and_said(translator):
    translator.tokenizer.model_max_length = 5
    usual = one_at_a_time(translator)
    with pytest.warns(UserWarning, match="^Some sentences have more tokens than usual training sources, 5. Th"):
        sources = usual.split(["No! " + TEXTS[0]]).sources
    assert sources == translator.segmenter.encode(["No!", TEXTS[0]])


def test_a_refusing_translator_refuses_single_sentences_only(translator):
    refusing = one_at_a_time(translator, max_source_length=8, too_long="refuse")
    assert refusing(["No! A dog. No! A dog."], **LIMIT)[0]
    with pytest.raises(ValueError, match="Text 2 has"):
        refusing(["No!", "No! " + TEXTS[0]])


def test_the_browser_page_has_the_same_pattern():
    page = (ROOT / "examples" / "browser" / "index.html").read_text(encoding="utf-8")
    assert f"String.raw`{GAP}`" in page


# ----------------------------------------------------------------------------------------------- pieces without words


WORDLESS = [
    "...",
    "3.14",
    "\U0001f600",
    "https://example.org/a?b=c",
    "you@example.org",
    "00:01:02,500 --> 00:01:04,000",
]


def test_a_piece_without_words_stays_as_it_is_unless_training_had_such_sources(translator):
    first, second = translator(["A dog sleeps.", "No!"], **LIMIT)
    unknown = one_at_a_time(translator)(WORDLESS, **LIMIT)
    translator.tokenizer.init_kwargs["wordless_sources"] = False
    keeping = one_at_a_time(translator)
    assert keeping(WORDLESS, **LIMIT) == WORDLESS != unknown
    assert keeping(["1\nA dog sleeps.\n... 3.14\nNo!\n", "犬"], **LIMIT)[0] == f"1\n{first}\n... 3.14\n{second}\n"
    assert keeping(["犬"], **LIMIT) != ["犬"]  # a word of one letter
    assert [one.text for one in keeping.n_best("3.14", 2, **LIMIT)] == ["3.14"]
    translator.tokenizer.init_kwargs["wordless_sources"] = True
    assert one_at_a_time(translator)(WORDLESS, **LIMIT) == unknown


ADDRESSES = ["mailto:a.b@büro.example.org", "(www.example.org)", "2 ftp://example.org/wörter"]
WORDS = dict.fromkeys(ADDRESSES, False) | dict.fromkeys([f"{text} is" for text in ADDRESSES], True)
WORDS |= dict.fromkeys(["请访问https://example.org", "请联系you@example.org", "a@b", "No!"], True)


@pytest.mark.parametrize("text, expected", WORDS.items())
def test_addresses_have_no_words_and_words_beside_them_count(text, expected):
    assert has_words(text) == expected


@pytest.mark.parametrize("part", ["@", "a@", "x", "字", "a.b@", "a@b.", "://", "www.", "-.", "a" * 64 + "@"])
def test_time_to_look_for_words_is_linear(part):
    """The search for addresses took minutes for 20,000 characters, and held the interpreter's lock."""
    start = time.perf_counter()
    has_words(part * (40_000 // len(part)))
    assert time.perf_counter() - start < 5


def test_tags_do_not_stay_with_a_piece_without_words(translator):
    translator.tokenizer.init_kwargs |= {"wordless_sources": False, "source_tags": ["<bt>"]}
    assert one_at_a_time(translator)(["<bt> 3.14"], **LIMIT) == ["3.14"]


# -------------------------------------------------------------------------------- capitals, title case, lists, quotes


@pytest.mark.parametrize(
    ("kind", "text", "pieces", "expected"),
    [
        ("capital", "<bt> A DOG SLEEPS. Yes! NO DOG", ["A dog sleeps.", "Yes!", "No dog"], "{3} {1} {5}"),
        ("title", "<bt> A Dog Sleeps Here Today. Yes!", ["A dog sleeps here today.", "Yes!"], "{0} {1}"),
        ("lower", "<bt> a dog sleeps", ["A dog sleeps"], "{0}"),
        ("spaced", "<bt> Dogs sleep .", ["Dogs sleep."], "{0}"),
        (
            "framed",
            '<bt> - A dog sleeps.\n 2) "Yes!" (No dog) ',
            ["A dog sleeps.", "Yes!", "No dog"],
            '- {0}\n 2) "{1}" ({2}) ',
        ),
    ],
)
def test_unseen_kinds_of_pieces_are_translated_as_training_had_them(translator, kind, text, pieces, expected):
    translator.tokenizer.init_kwargs |= {"source_tags": ["<bt>"], "max_source_sentences": 1}
    plain = one_at_a_time(translator)
    as_it_is = plain([text], **LIMIT)
    translations = plain([f"<bt> {piece}" for piece in pieces], **LIMIT)
    translator.tokenizer.init_kwargs[f"{kind}_sources"] = False
    expected = expected.format(*translations, *map(str.upper, translations))
    treating = one_at_a_time(translator)
    assert treating([text], **LIMIT) == [expected] != as_it_is
    assert treating.n_best(text, 1, **LIMIT)[0].text == expected
    translator.tokenizer.init_kwargs[f"{kind}_sources"] = True
    assert one_at_a_time(translator)([text], **LIMIT) == as_it_is


def test_a_first_letter_is_lowered_too_if_that_takes_fewer_tokens(translator):
    translator.tokenizer.init_kwargs["capital_sources"] = False
    pieces = one_at_a_time(translator).split(["A DOG SLEEPS", "SLEEPS A DOG"])
    assert pieces.pieces == ["A dog sleeps", "sleeps a dog"] and pieces.in_capitals == [True, True]


def test_texts_that_are_the_same_in_capitals_are_returned_once(translator, monkeypatch):
    translator.tokenizer.init_kwargs["capital_sources"] = False
    treating = one_at_a_time(translator)
    found = [Hypothesis(text, score, 1) for text, score in [("Ja", -1.0), ("Nein", -2.0), ("ja", -3.0)]]
    monkeypatch.setattr(treating, "n_best_of_pieces", lambda *args, **options: [found])
    assert treating.n_best("A DOG SLEEPS", 3) == [Hypothesis("JA", -1.0, 1), Hypothesis("NEIN", -2.0, 1)]


def test_each_sentence_of_a_piece_begins_with_a_capital(translator):
    translator.tokenizer.init_kwargs |= {"lower_sources": False, "max_source_sentences": 9}
    segmenter = one_at_a_time(translator).segmenter
    assert segmenter.corrected("one dog sleeps. a dog is here") == ("One dog sleeps. A dog is here", False)
    assert segmenter.corrected("- one dog\n- a dog") == ("- One dog\n- A dog", False)


@pytest.mark.parametrize(
    ("kind", "text", "is_one"),
    [
        ("capital", "GO HOME!", True),
        ("capital", "NATO", False),
        ("capital", "3.14 WWW.EXAMPLE.ORG", False),
        ("wordless", "3.14 WWW.EXAMPLE.ORG", True),
        ("capital", "PRINT %s", False),
        ("capital", "我在 BMW 工作。", False),
        ("capital", "IŞIK VE İYİ", False),
        ("capital", "SAVE 50% AT 5 P.M. & PAY $3.50 AND/OR LESS", True),
        ("title", "The Old Man Reads a Book", True),
        ("title", "Peter and Anna read", False),
        ("title", "Tom met Mary and Bob", False),
        ("title", "Does Anna see Peter?", False),
        ("title", "EU UN USA IBM BMW", False),
        ("title", "Is Tom in New York?", False),
        ("title", "The File {FileName} Was Saved", False),
        ("title", "3.14 Www.Example.Org And Some More", False),
        ("lower", "go on!", True),
        ("lower", "¿cómo estás?", True),
        ("lower", "iPhones", False),
        ("lower", "www.example.com is down", False),
        ("lower", "x = foo(a, b)", False),
        ("lower", "<b>the dog</b>", False),
        ("lower", "12 girls sleep.", False),
        ("lower", "3.14", False),
        ("spaced", "Yes ?", True),
        ("spaced", "Use .NET", False),
        ("framed", "-5 degrees", False),
        ("framed", '"Go," he said, "on"', False),
        ("framed", "$ 5 million", False),
        ("framed", "¿Qué?", False),
        ("framed", "(a) Go on", True),
        ("framed", "5. Oktober", False),
        ("framed", "z. B. hier", False),
        ("framed", "__init__", False),
        ("framed", "[name]", False),
        ("framed", "- One\n- Two", False),
        ("framed", "“再见。”", False),
        ("framed", "It is 20°", False),
        ("framed", "§ 5 applies", False),
        ("framed", "¥ 5 million", False),
        ("framed", "(one) and (two)", False),
        ("framed", "'Tis Bob's", False),
        ("framed", "- 3.14", False),
        ("framed", "**", False),
    ],
)
def test_kinds_of_sources(kind, text, is_one):
    assert SOURCE_KINDS[f"{kind}_sources"](text) == is_one


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ("- Go", ("- ", "")),
        ("12) Go on.", ("12) ", "")),
        ("👨‍👩‍👧 Go", ("👨‍👩‍👧 ", "")),
        ("→ Go", ("→ ", "")),
        ("## Go", ("## ", "")),
        ("... and on", ("... ", "")),
        ('"Go."', ('"', '"')),
        ('"Go".', ('"', '".')),
        ("“Go”!", ("“", "”!")),
        ("« Go on ! »", ("« ", " »")),
        ('"Go on.', ('"', "")),
        ('Go on."', ("", '"')),
        ('"Go," he said.', ("", "")),
        ("**Go**", ("**", "**")),
        ('• ("Go!")', ('• ("', '")')),
        ("Go on 👍🏽", ("", " 👍🏽")),
        ("🎉 Go!🎉", ("🎉 ", "🎉")),
        ("Go 👍 🇩🇪", ("", " 👍 🇩🇪")),
        ("Go (on)", ("", "")),
        ("(go) (on)", ("", "")),
        ("*", ("", "")),
        ("", ("", "")),
    ],
)
def test_frames(text, frame):
    assert frame_of(text) == frame


# ------------------------------------------------------------------------------------------- n best of several pieces


@pytest.mark.parametrize("n", [1, 3, 5])
def test_the_n_best_of_a_text_have_the_best_sums_of_the_scores_of_its_pieces(translator, n):
    found = one_at_a_time(translator).n_best("A dog sleeps.  No!\nA man", n, **LIMIT)
    pieces = translator.n_best(["A dog sleeps.", "No!", "A man"], n, **LIMIT)
    combined = [
        (one.text + "  " + two.text + "\n" + three.text, one.score + two.score + three.score)
        for one, two, three in itertools.product(*pieces)
    ]
    expected = sorted(combined, key=lambda each: -each[1])[:n]
    assert [one.text for one in found] == [text for text, _ in expected]
    assert [one.score for one in found] == pytest.approx([score for _, score in expected])
    assert found[0].tokens == sum(best[0].tokens for best in pieces)


def test_an_ensemble_has_n_best_and_they_come_from_our_search(translator):
    """Whose scores are those of transformers' own, so only the calls tell."""
    other = writing_translator(translator.tokenizer)
    twice = Translator([translator.model, other.model], translator.tokenizer)
    assert len(twice.n_best("A dog sleeps.", 3, **LIMIT)) == 3
    with patch.object(translator.model, "generate", wraps=translator.model.generate) as generate:
        translator.n_best("A dog sleeps.", 3, **LIMIT)
    assert [call.kwargs.get("custom_generate") for call in generate.call_args_list] == [beam_search]


def test_a_streamer_takes_one_piece(translator):
    ended, streamer = [], SimpleNamespace(put=lambda tokens: None, end=lambda: ended.append(True))
    with pytest.raises(ValueError, match="A streamer takes one text of one piece"):
        one_at_a_time(translator).n_best("A dog sleeps. No!", 1, streamer, num_beams=1)
    assert translator.n_best(" ", 1, streamer, num_beams=1) == [] and ended == [True]


def test_an_error_of_a_text_passes_between_processes():
    again = pickle.loads(pickle.dumps(TextTooLong(0, 5, 3)))
    assert (again.number, again.tokens, again.limit) == (0, 5, 3) and "has 5 tokens" in str(again)


def test_samples_of_a_text_are_those_of_its_pieces(translator):
    found = one_at_a_time(translator).n_best("A dog sleeps. No!", 4, do_sample=True, top_k=1, **LIMIT)
    best = " ".join(translator(["A dog sleeps.", "No!"], num_beams=1, **LIMIT))
    assert [one.text for one in found] == 4 * [best]
