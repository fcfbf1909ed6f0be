"""Codes of languages, from what people call them."""

import json
from importlib.resources import files

import pytest

from vanilla_transformer.languages import TWO_LETTERS, hub_codes, language_code, parse_language

SAME = {name: name for name in ["en", "no", "se", "kr", "cmn", "yue", "ast", "quc", "code", "multilingual"]}
OTHER_CODES = {"deu": "de", "ger": "de", "eng_Latn": "en", "ast_Latn": "ast", "zho": "zh", "EN": "en"}
REGIONS = {"pt-BR": "pt", "en_XX": "en", "es-419": "es", "zh-Hant-TW": "zh", "zh_cn": "zh", "sr-Latn-RS": "sr"}
MISTAKES = {"jp": "ja", "cn": "zh", "cz": "cs", "dk": "da", "gr": "el", "ua": "uk"}
NAMES = {"english": "en", "Chinese (simplified)": "zh", "german_text": "de", "中文": "zh"}
NONE = ["xx", "qqq", "src", "tgt", "new", "my_answer", "my_text", "english_german", "text", "in", "", None]


@pytest.mark.parametrize("name, code", (SAME | OTHER_CODES | REGIONS | MISTAKES | NAMES | dict.fromkeys(NONE)).items())
def test_language_code(name, code):
    assert language_code(name) == code


def test_codes_are_those_of_the_list_of_datasets():
    """This list leaves out the three-letter codes of languages that have one of two letters."""
    file = files("datasets") / "utils" / "resources" / "languages.json"
    listed = json.loads(file.read_text(encoding="utf-8"))
    assert {code for code in listed if len(code) == 2} == {*TWO_LETTERS.values()}
    assert not {name for name in TWO_LETTERS if name in listed and len(name) == 3} and len(hub_codes()) > 7000


def test_script_is_kept_apart():
    assert parse_language("zho_Latn") == ("zh", "latn") and parse_language("zh_hans") == ("zh", "hans")
    assert parse_language("zh-CN") == ("zh", None)
