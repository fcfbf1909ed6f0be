"""Codes of languages, from what people call them."""

import pytest

from vanilla_transformer.languages import hub_codes, known_code, parse_language, two_letters

SAME = {name: name for name in ["en", "no", "se", "kr", "cmn", "yue", "ast", "quc", "code", "multilingual"]}
OTHER_CODES = {"deu": "de", "ger": "de", "eng_Latn": "en", "ast_Latn": "ast", "zho": "zh", "EN": "en"}
OTHER_CODES |= {"div_Thaa": "dv", "tgl": "tl"}
REGIONS = {"pt-BR": "pt", "en_XX": "en", "es-419": "es", "zh-Hant-TW": "zh", "zh_cn": "zh", "sr-Latn-RS": "sr"}
MISTAKES = {"jp": "ja", "cn": "zh", "cz": "cs", "dk": "da", "gr": "el", "ua": "uk"}
NAMES = {"english": "en", "Chinese (simplified)": "zh", "german_text": "de", "中文": "zh"}
NONE = ["xx", "qqq", "src", "tgt", "new", "my_answer", "my_text", "english_german", "text", "in", "", None]


@pytest.mark.parametrize("name, code", (SAME | OTHER_CODES | REGIONS | MISTAKES | NAMES | dict.fromkeys(NONE)).items())
def test_known_code(name, code):
    assert known_code(name) == code


def test_the_hub_lists_no_code_of_three_letters_where_there_is_one_of_two():
    assert len(hub_codes()) > 7000 and len(two_letters()) > 200 and not hub_codes().keys() & two_letters().keys()


def test_script_is_kept_apart():
    assert parse_language("zho_Latn") == ("zh", "latn") and parse_language("zh_hans") == ("zh", "hans")
    assert parse_language("zh-CN") == ("zh", None)
