"""The code of a language, ISO 639-1 or else 639-3, from the many ways to name it."""

import functools
import json
import re
from importlib.resources import files

# The codes of ISO 639-1, each with that of ISO 639-3 or, of a group of languages, ISO 639-2.
ISO_639 = """
aa:aar ab:abk ae:ave af:afr ak:aka am:amh an:arg ar:ara as:asm av:ava ay:aym az:aze ba:bak be:bel bg:bul bh:bih
bi:bis bm:bam bn:ben bo:bod br:bre bs:bos ca:cat ce:che ch:cha co:cos cr:cre cs:ces cu:chu cv:chv cy:cym da:dan
de:deu dv:div dz:dzo ee:ewe el:ell en:eng eo:epo es:spa et:est eu:eus fa:fas ff:ful fi:fin fj:fij fo:fao fr:fra
fy:fry ga:gle gd:gla gl:glg gn:grn gu:guj gv:glv ha:hau he:heb hi:hin ho:hmo hr:hrv ht:hat hu:hun hy:hye hz:her
ia:ina id:ind ie:ile ig:ibo ii:iii ik:ipk io:ido is:isl it:ita iu:iku ja:jpn jv:jav ka:kat kg:kon ki:kik kj:kua
kk:kaz kl:kal km:khm kn:kan ko:kor kr:kau ks:kas ku:kur kv:kom kw:cor ky:kir la:lat lb:ltz lg:lug li:lim ln:lin
lo:lao lt:lit lu:lub lv:lav mg:mlg mh:mah mi:mri mk:mkd ml:mal mn:mon mr:mar ms:msa mt:mlt my:mya na:nau nb:nob
nd:nde ne:nep ng:ndo nl:nld nn:nno no:nor nr:nbl nv:nav ny:nya oc:oci oj:oji om:orm or:ori os:oss pa:pan pi:pli
pl:pol ps:pus pt:por qu:que rm:roh rn:run ro:ron ru:rus rw:kin sa:san sc:srd sd:snd se:sme sg:sag sh:hbs si:sin
sk:slk sl:slv sm:smo sn:sna so:som sq:sqi sr:srp ss:ssw st:sot su:sun sv:swe sw:swa ta:tam te:tel tg:tgk th:tha
ti:tir tk:tuk tl:tgl tn:tsn to:ton tr:tur ts:tso tt:tat tw:twi ty:tah ug:uig uk:ukr ur:urd uz:uzb ve:ven vi:vie
vo:vol wa:wln wo:wol xh:xho yi:yid yo:yor za:zha zh:zho zu:zul
"""
# The other codes of ISO 639-2.
BIBLIOGRAPHIC = """
sq:alb hy:arm eu:baq my:bur zh:chi cs:cze nl:dut fr:fre ka:geo de:ger el:gre is:ice mk:mac ms:may mi:mao fa:per
ro:rum sk:slo bo:tib cy:wel
"""
# Country codes and withdrawn codes; those that are the code of another language, such as kr (Kanuri), mean that one.
MISTAKES = "zh:cn cs:cz da:dk el:gr ja:jp uk:ua vi:vn he:iw jv:jw zh:chs zh:zhs zh:zht"
NAMES = """
am:amharic ar:arabic hy:armenian eu:basque bn:bengali bg:bulgarian my:burmese yue:cantonese ca:catalan zh:chinese
zh:中文 hr:croatian cs:czech da:danish nl:dutch dz:dzongkha en:english et:estonian fi:finnish fr:french gl:galician
ka:georgian de:german el:greek ha:hausa he:hebrew hi:hindi hu:hungarian is:icelandic ig:igbo id:indonesian ga:irish
it:italian ja:japanese ja:日本語 kk:kazakh km:khmer ko:korean ko:한국어 lo:lao lv:latvian lt:lithuanian ms:malay
zh:mandarin mn:mongolian ne:nepali no:norwegian fa:persian pl:polish pt:portuguese ro:romanian ru:russian
sr:serbian sk:slovak sl:slovenian es:spanish sw:swahili sv:swedish ta:tamil te:telugu th:thai bo:tibetan tr:turkish
uk:ukrainian ur:urdu vi:vietnamese cy:welsh xh:xhosa yo:yoruba zu:zulu
"""
SCRIPTS = """
arab armn beng cyrl deva ethi geor grek gujr guru hang hans hant hebr hira jpan khmr knda kore laoo latn mlym mong
mymr olck orya sinh taml telu tfng thai tibt
"""
# Columns are often called so; these are also codes of small languages.
COLUMNS = """
all and ans any bot cap col dev doc end for ids inp key lab lbl len lhs low mid neg new not num old one org pos pre
raw row seg sen src sub sys tag tar tgt tok top trg two txt val
"""


def by_name(*tables: str) -> dict[str, str]:
    """The codes in these tables by the names after their colons."""
    return {name: code for table in tables for code, _, name in (pair.partition(":") for pair in table.split())}


TWO_LETTERS = by_name(ISO_639, BIBLIOGRAPHIC, MISTAKES)
BY_NAME = by_name(NAMES)
PATTERN = re.compile(rf"([a-z]{{2,3}})(?:[-_]({'|'.join(SCRIPTS.split())}))?(?:[-_](?:[a-z]{{2}}|\d{{3}}))?")


def parse_language(name: str | None) -> tuple[str | None, str | None]:
    """The code of a language, not checked, and its script, from what it was called; None for what it does not say.

    `zho_Hans` gives ("zh", "hans"); `zh-CN`, `cn`, `chinese` and `Chinese (simplified)` give ("zh", None).
    """
    name = (name or "").strip().lower()
    if found := PATTERN.fullmatch(name):
        return TWO_LETTERS.get(found[1], found[1]), found[2]
    named = {BY_NAME[word] for word in re.split(r"[\W_]+", name) if word in BY_NAME}
    return (named.pop() if len(named) == 1 else None), None


def language_code(name: str | None) -> str | None:
    """The code of a language that the Hub takes; None if the name has none, or is rather that of a column."""
    if name in ("code", "multilingual"):  # of the Hub's own
        return name
    code, script = parse_language(name)
    is_column = script is None and code in COLUMNS.split()
    return code if code in hub_codes() and not is_column else None


@functools.cache
def hub_codes() -> set[str]:
    """The codes of languages that the Hub takes; those of three letters come from a list in the library datasets."""
    file = files("datasets") / "utils" / "resources" / "languages.json"
    return {*TWO_LETTERS.values(), *(json.loads(file.read_text("utf-8")) if file.is_file() else [])}
