"""Translations that lost, changed or gained something that a program needs."""

import re

import pytest

from vanilla_transformer.data.doubts import find_doubts
from vanilla_transformer.data.texts import PLACEHOLDERS

SOURCES = {  # by kind, separated by two spaces
    "C": "Size: %dx%d  Option: %.*s  Mode %o, size %Lf  %'d items  %*d  %dpx  %ith element  %5.1f s  %zu of %lld",
    "Python": "Price: %(price).2f  Name {name:>10}  Total {total:,.2f}  First {a[0]}  Hello {}",
    "others": "Page %L1 of %2  %n file(s)  Got %@ and %1$@  Part %|1$5| of %2%  {n, plural, one {#} other {# files}}",
    "templates": "Hi {{ name }}  {% if x %}mail{% endif %}  Hi ${name}  Hi #{name}  Hi %{name}  Hi $name  Hi $(name)",
    "markup": "Use <b>this</b>  <0>Link</0>  A &amp; B  &nbsp;A  See https://a.b/c  Write to a@b.c  Run main()",
    "keys": "_File  &Close  ~Edit  E&xit",
    "numbers": "Version 3 of 5  From 12  The year 1999.",
    "controls": "a\tb  One\n  A\033[1mB  A\\nB",
}
SOURCES = [source for sources in SOURCES.values() for source in re.split(" {2}", sources)]
PARTS = re.compile(rf"{PLACEHOLDERS.pattern}|[_~](?=\w)|\w+@[\w.]+|\w+\(\)|\d+|[\t\n\\]")
is_doubtful = find_doubts("de")


@pytest.mark.parametrize("source", SOURCES)
def test_a_part_that_is_lost_or_added_is_doubtful(source):
    assert not is_doubtful(source, source, is_format=True)
    without = PARTS.sub("", source, count=1)
    assert is_doubtful(source, without, is_format=False) and is_doubtful(without, source, is_format=False), without


CHANGED = {  # of a source, translations that are doubtful, and others that are not
    "%s of %d": (["%d von %s", "%s von %s", "%s von % d", "%1$s von %2$d"], ["%s von %d"]),
    "{a} of {a}": (["{a}", "{b} von {a}"], ["{a} von {a}"]),
    "Save": (["", "  ", "....", "%s sichern", "_Sichern", "Sichern {x}"], ["Sichern"]),
    "50% of 1,000.5 users": (["50 % von 10.000,5", "50% von tausend"], ["50 % von 1.000,5", "٥٠% von 1 000,5"]),
    "R & D, 3 < 4": ([], ["F & E, 3 < 4"]),
    "Use --help on /etc/hosts": (["Hilfe zu /etc/hosts", "--help zu hosts"], ["--help zu /etc/hosts"]),
}


@pytest.mark.parametrize("source", CHANGED)
def test_a_changed_part_is_doubtful_and_another_place_is_not(source):
    doubtful, right = CHANGED[source]
    assert [text for text in doubtful + right if is_doubtful(source, text, is_format=False)] == doubtful


@pytest.mark.parametrize(
    "pair", [("100%% of %s", "100% von %s"), ("Mode % d", "Modus"), ("50%", "50"), ("{ a", "{{ a")]
)
def test_every_sign_counts_where_a_program_formats(pair):
    assert is_doubtful(*pair, is_format=True) and not is_doubtful(*pair, is_format=False)
