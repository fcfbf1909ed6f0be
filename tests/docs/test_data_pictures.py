"""docs/pictures/make_data_pictures.py: it draws any model, what it shows is what the model computes."""

import os
import re
import runpy
from xml.etree import ElementTree

import pytest
import torch
from helpers import ROOT, save_untrained

from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.decoding_vanilla_transformer import beam_search
from vanilla_transformer.inspection.attention import AttentionMaps, Token
from vanilla_transformer.inspection.explorer import Recorder

FOLDER = ROOT / "docs" / "pictures"
NAMES = ["attention_arrows.svg", "beam_tree.svg", "next_tokens.svg", "translation.svg"]
SAMPLE_MODEL = os.environ.get("SAMPLE_MODEL")  # a trained one; without it, one that knows nothing
ODD, SHOWN = "<b>&\x01", "<b>&▯"  # with a control character, which XML cannot hold


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(FOLDER / "make_data_pictures.py"))


@pytest.fixture
def maps() -> AttentionMaps:
    """Four words; each looks at the first with 0.75 and at the second with 0.25."""
    tokens = [Token(ODD, 0), Token("b", 1), Token("c", 2), Token("d", 3)]
    weights = torch.tensor([0.75, 0.25, 0.0, 0.0]).expand(1, 1, 4, 4)
    return AttentionMaps(tokens, tokens, tokens, weights, weights, weights, ODD)


def words(picture: str) -> list[str]:
    """The texts that are drawn; raises ParseError if the picture is not XML."""
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root[0].text  # a title, which screen readers read
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.slow
def test_every_picture_is_drawn_from_a_small_model(script, tmp_path):
    model = SAMPLE_MODEL or save_untrained(tmp_path / "model")
    script["main"](["--model", str(model), "--output_dir", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == NAMES
    for name in NAMES:
        assert len(words((tmp_path / name).read_text(encoding="utf-8"))) > 10


def test_what_the_model_writes_is_escaped(script, maps):
    path = {"spelled": [ODD, "▁b"], "candidates": [[ODD, "c"]] * 2, "p": [[0.7, 0.2]] * 2}
    steps = [[[0, ODD, -0.1, False], [0, "b", -2.5, False]], [[0, "</s>", -0.2, True], [1, ODD, -3.0, True]]]
    for picture in [
        script["attention_arrows"](maps),
        script["next_tokens"]("a < b", path, 10),
        script["beam_tree"]("a < b", steps, [ODD, "</s>"], "</s>"),
        script["translation"](maps),
    ]:
        assert SHOWN in words(picture)


def test_lines_are_as_wide_as_the_weights(script, maps):
    for picture, times in [(script["attention_arrows"](maps), 2), (script["translation"](maps), 4)]:
        widths = [float(width) for width in re.findall(r'<path d="M[^"]+C[^>]+stroke-width="([^"]+)"', picture)]
        assert widths == [9, 3] * times  # and none for a weight of 0


def test_animation_asks_whether_the_reader_wants_motion(script, maps):
    style = script["translation"](maps).partition("<style>")[2].partition("</style>")[0]
    still, moving = style.split("@media (prefers-reduced-motion: no-preference)")
    assert "animation" in moving and "animation" not in still and ".token" not in still  # the whole text is there


def test_best_hypothesis_of_the_tree_is_that_of_our_search(script, make_model):
    texts = ["A dog sleeps.", "Two children play.", "No!"]
    tokenizer = train_tokenizer(texts, 300)
    model = make_model(vocab_size=len(tokenizer))
    with torch.no_grad():
        model.model.shared.weight[tokenizer.eos_token_id] *= 4  # otherwise it would hardly ever end a sentence
        lengths = set()
        for text in texts:
            ids = tokenizer(text, return_tensors="pt").input_ids
            recorder = Recorder(model, tokenizer, ids, text)
            steps = recorder.beams(3)
            search = {"custom_generate": beam_search, "num_beams": 3, "max_new_tokens": recorder.limit}
            expected = model.generate(ids, **search)[0, 1:].tolist()
            score, path = script["finish"](steps)[0]
            assert [steps[step][place][1] for step, place in path] == [recorder.spell(token) for token in expected]
            outputs = model(input_ids=ids, labels=torch.tensor([expected]))
            assert score == pytest.approx(-outputs.loss.item(), abs=1e-4)
            lengths.add(len(expected))
    assert len(lengths) > 1
