"""The shapes of a forward pass, and what attention looks at. Run: pytest tests/test_inspection.py"""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import positions
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertTokenizerFast

from vanilla_transformer import Translator, VanillaTransformerConfig
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.inspection.attention import (
    AttentionMaps,
    Token,
    align_words,
    alignment_error_rate,
    attention_figure,
    attention_maps,
    draw_attention,
    eager_attention,
    looks_at,
    main,
    readable,
    trace_shapes,
    write_attention_page,
)

ROOT = Path(__file__).parents[2]
# Lengths that are all different, so that no letter can stand for another.
SIZES = {
    "vocab_size": 53,
    "d_model": 12,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 19,
    "pad_token_id": None,
}
B, S, T = 5, 11, 7

# -------------------------------------------------------------------------------------------------------------- trace


def letters_of(config: VanillaTransformerConfig, in_encoder: bool) -> dict[str, int]:
    """The lengths that the config knows: of d, h, k, f and V."""
    side = "encoder" if in_encoder else "decoder"
    heads = getattr(config, f"{side}_attention_heads")
    inner = getattr(config, f"{side}_ffn_dim")
    return {"d": config.d_model, "h": heads, "k": config.d_model // heads, "f": inner, "V": config.decoder_vocab_size}


def random_ids(length: int, vocab_size: int = 53) -> torch.Tensor:
    return torch.randint(vocab_size, (B, length))


@positions
@pytest.mark.parametrize("norm_first", [False, True])
def test_letters_are_what_the_numbers_say(make_model, position_embedding_type, norm_first):
    sizes = {**SIZES, "d_model": 24} if position_embedding_type == "rotary" else SIZES
    model = make_model(**sizes, position_embedding_type=position_embedding_type, norm_first=norm_first)
    steps = trace_shapes(model, random_ids(S), random_ids(T))
    for step in steps:
        numbers = {"B": B, "S": S, "T": T, "1": 1, **letters_of(model.config, ".encoder." in step.module)}
        assert [numbers[letter] for letter in step.letters] == list(step.shape), step
    kinds = Counter(step.module.rpartition(".")[2] for step in steps)
    attentions = 1 + 2 * 2  # of the encoder's layer and the decoder's two
    assert kinds["q_proj"] == kinds["weights"] == kinds["heads"] == kinds["out_proj"] == attentions
    assert kinds["fc1"] == kinds["activation_fn"] == kinds["fc2"] == 3
    assert kinds["layer_norm"] == (2 if norm_first else 0)


def test_padding_gives_each_sentence_positions_of_its_own(make_model):
    model = make_model(**SIZES | {"pad_token_id": 0})
    source = random_ids(S).clamp(min=1)
    source[1, 8:] = 0
    steps = [step for step in trace_shapes(model, source, random_ids(T)) if "embed_positions" in step.module]
    assert [step.letters for step in steps] == [("B", "S", "d"), ("1", "T", "d")]
    assert [step.shape for step in steps] == [(B, S, 12), (1, T, 12)]


def test_steps_come_in_the_order_in_which_they_are_made(make_model):
    steps = trace_shapes(make_model(**SIZES), random_ids(S), random_ids(T))
    layer = [step.module.split("layers.1.")[1] for step in steps if "decoder.layers.1." in step.module]
    heads = ["q_proj", "k_proj", "v_proj", "weights", "heads", "out_proj"]
    expected = [f"self_attn.{one}" for one in heads] + ["self_attn_layer_norm"]
    expected += [f"encoder_attn.{one}" for one in heads] + ["encoder_attn_layer_norm"]
    assert layer == [*expected, "fc1", "activation_fn", "fc2", "final_layer_norm"]
    assert steps[-1].module == "lm_head"


def test_flops_and_parameters_add_up(make_model):
    model = make_model(**SIZES, tie_word_embeddings=False, share_encoder_decoder_embeddings=False)
    source, target = random_ids(S), random_ids(T)
    steps = trace_shapes(model, source, target)
    assert sum(step.parameters for step in steps) == model.num_parameters()
    with FlopCounterMode(display=False) as counter, eager_attention(model), torch.no_grad():
        model(input_ids=source, decoder_input_ids=target)
    assert sum(step.flops for step in steps) == counter.get_total_flops()
    weights = next(step for step in steps if step.module.endswith("encoder_attn.weights"))
    assert weights.flops == 2 * B * T * S * 12


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_is_as_it_was(make_model, attention):
    model = make_model(**SIZES)
    model.set_attn_implementation(attention)
    source, target = random_ids(S), random_ids(T)
    with torch.no_grad():
        before = model(input_ids=source, decoder_input_ids=target).logits
        trace_shapes(model, source, target)
        with pytest.raises(IndexError):
            trace_shapes(model, source + 53, target)
        after = model(input_ids=source, decoder_input_ids=target).logits
    assert torch.equal(before, after)
    assert model.config._attn_implementation == attention
    assert not any(module._forward_hooks for module in model.modules())


def test_the_command_prints_the_shapes_of_a_model_too_large_to_run(capsys):
    """Those of "Transformer from Scratch" (docs/seeds.md), and of a model that no machine holds."""
    sizes = "--d_model 512 --encoder_attention_heads 8 --encoder_layers 5 --decoder_layers 5 --encoder_ffn_dim 2048"
    main(f"shapes {sizes} --batch_size 30 --source_length 200 --target_length 200".split())
    printed = capsys.readouterr().out
    for kind, letters, numbers in [
        ("q_proj", "(B,h,S,k)", "(30, 8, 200, 64)"),
        ("k_proj", "(B,h,S,k)", "(30, 8, 200, 64)"),
        ("v_proj", "(B,h,S,k)", "(30, 8, 200, 64)"),
        ("weights", "(B,h,S,S)", "(30, 8, 200, 200)"),
        ("out_proj", "(B,S,d)", "(30, 200, 512)"),
    ]:
        line = next(line for line in printed.splitlines() if f"encoder.layers.0.self_attn.{kind} " in line)
        assert letters in line and numbers in line
    assert f"{VanillaTransformerConfig().vocab_size * 512:,}" in printed  # the embeddings
    assert re.search(r"encoder\.layers\.4 +the same 11 steps +3,152,384 ", printed)
    main(["shapes", "--d_model", "65536", "--encoder_ffn_dim", "262144", "--encoder_layers", "9"])
    assert re.search(r"encoder\.layers\.8 +the same 11 steps +51,540,459,520 ", capsys.readouterr().out)
    main(["shapes", "--encoder_layers", "1", "--decoder_layers", "2", "--all_layers"])
    assert "decoder.layers.1.encoder_attn.weights" in capsys.readouterr().out


def test_the_shapes_of_a_saved_model(make_model, tmp_path, capsys):
    make_model(**SIZES).save_pretrained(tmp_path)
    main(["shapes", "--model", str(tmp_path), "--source_length", "9"])
    printed = capsys.readouterr().out
    assert "(2, 9, 12)" in printed
    assert f"\n{make_model(**SIZES).num_parameters():,} parameters" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("shapes --batch_size 0", "--batch_size: 0 is no number from 1 on"),
        ("attention --model . --text A --output a.png --num_beams 0", "--num_beams: 0 is no number from 1 on"),
        ("shapes --d_model 10 --encoder_attention_heads 4", "d_model"),
        ("shapes --d_modle 10", "--d_modle"),
        ("shapes --model .", ". cannot be loaded"),
        ("shapes --model . --d_model 8", "--model and --d_model are both given; leave out one"),
        ("shapes --position_embedding_type learned --max_position_embeddings 4", "max_position_embeddings=4"),
        ("attention --model . --text A --output a.gif", "--output is a.gif; its name must end in .png"),
        ("attention --model . --text A --output nowhere/a.png", "There is no directory nowhere"),
        ("attention --model . --text A --output a.png", ". cannot be loaded"),
        ("attention --model . --text A --output a.html --layer 99", "--layer is for a picture; a page has all"),
        ("align --model . --dataset_name sample_dataset", ". cannot be loaded"),
        ("shapes --model=", "--model cannot be loaded"),
        ("look", "look"),
    ],
)
def test_what_is_wrong_ends_with_a_sentence(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ending:
        main(argv.split())
    assert message in str(ending.value) and str(ending.value).count("\n") == 0
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------- attention

TEXTS = ["A dog sleeps.", "Two children play in the park today.", "纽约是一座城市", "😀 a\tb"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def model(make_model, tokenizer):
    return make_model(vocab_size=len(tokenizer), decoder_attention_heads=4, decoder_layers=3)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_maps_are_those_of_the_pass_that_wrote_the_translation(model, tokenizer, attention):
    model.set_attn_implementation(attention)
    maps = attention_maps(model, tokenizer, TEXTS[0], max_new_tokens=6)
    assert model.config._attn_implementation == attention
    source = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    written = model.generate(source, max_new_tokens=6, num_beams=1)
    with torch.no_grad(), eager_attention(model):
        expected = model(input_ids=source, decoder_input_ids=written[:, :-1], output_attentions=True)
    s, t = source.shape[1], written.shape[1] - 1
    assert (
        maps.encoder.shape == (2, 4, s, s) and maps.decoder.shape == (3, 4, t, t) and maps.cross.shape == (3, 4, t, s)
    )
    torch.testing.assert_close(maps.encoder, torch.cat(expected.encoder_attentions))
    torch.testing.assert_close(maps.decoder, torch.cat(expected.decoder_attentions))
    torch.testing.assert_close(maps.cross, torch.cat(expected.cross_attentions))
    for weights in (maps.encoder, maps.decoder, maps.cross):
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))
    assert [len(tokens) for tokens in (maps.source, maps.target, maps.read)] == [s, t, t]
    assert maps.decoder.triu(diagonal=1).count_nonzero() == 0  # nothing is read before it is written


def test_a_translation_may_be_given(model, tokenizer):
    maps = attention_maps(model, tokenizer, TEXTS[0], TEXTS[1])
    assert "".join(token.text for token in maps.target) == TEXTS[1].replace(" ", "") + "</s>"
    assert maps.read[0].word is None and [token.text for token in maps.read[1:]] == [
        token.text for token in maps.target[:-1]
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_shown_as_people_read_them(tokenizer, text):
    ids = tokenizer(text).input_ids
    tokens = readable(tokenizer, ids, text)
    assert len(tokens) == len(ids)
    assert tokens[-1] == Token("</s>", None)
    assert "".join(token.text for token in tokens[:-1]).translate({ord(mark): None for mark in "␣…"}) == "".join(
        text.split()
    )
    words = [token.word for token in tokens[:-1]]
    assert words == sorted(words) and set(words) == set(range(len(text.split())))


def test_the_parts_of_a_letter_and_the_space_before_it_are_of_its_word(tokenizer):
    text = "A 🦜 dog"
    tokens = readable(tokenizer, tokenizer(text).input_ids, text)
    assert [token.text for token in tokens if token.word == 0] == ["A"]
    parrot = [token.text for token in tokens if token.word == 1]
    assert len(parrot) >= 2 and parrot[-1] == "🦜" and set(parrot[:-1]) <= {"␣", "…"}
    assert all(token.text.isprintable() for token in readable(tokenizer, tokenizer("a\x01b\x1b").input_ids))


def test_words_are_those_of_the_text_where_the_tokenizer_writes_more_spaces(tmp_path):
    """As BERT's do: to decode them gives seven words, as there are four, of which links tell the numbers."""
    text = '"Hello" a well-known man'
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *'"-', "hello", "a"]))
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    tokens = [token for token in readable(tokenizer, tokenizer(text).input_ids, text) if token.word is not None]
    assert [(token.text, token.word) for token in tokens[:4]] == [('"', 0), ("hello", 0), ('"', 0), ("a", 1)]


def test_empty_and_too_long_texts_are_named(model, tokenizer):
    for text in ("", "  \n"):
        with pytest.raises(UserError, match="The text is empty"):
            attention_maps(model, tokenizer, text)
    with pytest.raises(UserError, match="The text is not UTF-8"):
        attention_maps(model, tokenizer, "a \udcff")
    with pytest.raises(UserError, match="The translation is empty"):
        attention_maps(model, tokenizer, "A dog", "")
    with pytest.raises(UserError, match=r"The text has \d+ tokens, and the model is for 40; shorten it"):
        attention_maps(model, tokenizer, "dog " * 50)


def test_heads_are_described_by_where_they_look():
    columns = [Token(text, 0) for text in ("a", "dog", "sleeps", "a")]
    before, itself = torch.zeros(4, 4), torch.eye(4)
    before[range(1, 4), range(3)] = 0.9
    assert looks_at(before, columns, is_self=True) == "the token before 90%"
    assert looks_at(itself, columns, is_self=True) == "the token itself 100%"
    assert looks_at(itself, columns, is_self=False) == "“a” 50%"  # both of them
    causal = torch.tensor([[1, 0, 0], [0.6, 0.4, 0], [0.6, 0.2, 0.2]])
    assert looks_at(causal, columns[:3], is_self=True) == "“a” 60%"  # the first row had no choice
    assert looks_at(torch.ones(1, 1), columns[:1], is_self=True) == "“a” 100%"


@pytest.fixture
def maps(model, tokenizer) -> AttentionMaps:
    return attention_maps(model, tokenizer, TEXTS[0], "</script><b>& two")


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_pictures_show_the_weights_between_their_tokens(maps, kind):
    weights, (rows, columns) = getattr(maps, kind), maps.axes(kind)
    panels = attention_figure(maps, kind, layer=1).axes[:-1]  # the last is the colour bar
    single = attention_figure(maps, kind, layer=1, head=3).axes[0]
    for panel, shown in [*zip(panels, weights[1], strict=True), (single, weights[1, 3])]:
        (image,) = panel.get_images()
        assert torch.equal(torch.tensor(image.get_array().data), shown) and image.get_clim() == (0, 1)
        assert [label.get_text() for label in panel.get_xticklabels()] == [token.text for token in columns]
        assert [label.get_text() for label in panel.get_yticklabels()] == [token.text for token in rows]
    assert [panel.get_title()[:7] for panel in (*panels, single)] == ["head 0:", "head 1:", "head 2:", "head 3:"] + [
        "head 3:"
    ]


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_pictures_are_of_the_kind_that_their_name_says(maps, tmp_path, suffix, start):
    draw_attention(maps, tmp_path / f"map{suffix}")
    assert (tmp_path / f"map{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_dollar_is_a_dollar(model, tokenizer, tmp_path, suffix):
    """To matplotlib two of them begin and end a formula, which may be wrong."""
    maps = attention_maps(model, tokenizer, "A dog", "A dog")
    maps.source = [Token("$$", 0), Token("$\\foo$", 1), *maps.source[2:]]
    draw_attention(maps, tmp_path / f"map{suffix}")
    assert (tmp_path / f"map{suffix}").exists()


def test_letters_that_the_font_lacks_are_no_cause_for_alarm(model, tokenizer, tmp_path, recwarn):
    draw_attention(attention_maps(model, tokenizer, TEXTS[2], TEXTS[3]), tmp_path / "map.png")
    assert [str(warning.message) for warning in recwarn if "lyph" in str(warning.message)] == []


@pytest.mark.parametrize(
    ("place", "message"), [({"layer": 3}, "no layer 3; the model has 3"), ({"head": 9}, "no head 9")]
)
def test_layers_and_heads_that_do_not_exist_are_named(maps, tmp_path, place, message):
    with pytest.raises(UserError, match=message):
        draw_attention(maps, tmp_path / "map.png", "cross", **place)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------------- page


@pytest.fixture
def browser():
    """A headless Chromium; .ci/run installs one."""
    webdriver = pytest.importorskip("selenium.webdriver")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("there is no chromium with its chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    running = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield running
    running.quit()


def test_the_page_in_a_browser(maps, tmp_path, browser):
    """Every head can be chosen, by hand and by address; values are told by pointing and by keys."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    page = tmp_path / "map.html"
    write_attention_page(maps, page, "Attention: <b>a</b>")
    assert "http" not in page.read_text(encoding="utf-8")  # it needs nothing from elsewhere

    def cells():
        return [
            row.find_elements(By.CSS_SELECTOR, "td[role]")
            for row in browser.find_elements(By.CSS_SELECTOR, "tbody tr")
        ]

    def value(field) -> float:
        return float(field.get_attribute("title").rpartition(" ")[2])

    browser.get(page.as_uri())
    assert browser.title == "Attention: <b>a</b>"
    assert browser.find_element(By.TAG_NAME, "tbody").text.split()[1:] == [*"</script><b>&two", "</s>"]
    assert browser.find_elements(By.TAG_NAME, "b") == []  # texts are shown, not run
    for kind in ("encoder", "cross", "decoder"):
        weights = getattr(maps, kind)
        Select(browser.find_element(By.ID, "kind")).select_by_value(kind)
        Select(browser.find_element(By.ID, "layer")).select_by_value(str(len(weights) - 1))
        Select(browser.find_element(By.ID, "head")).select_by_value("2")
        shown = torch.tensor([[value(field) for field in row] for row in cells()])
        torch.testing.assert_close(shown, weights[-1, 2], atol=6e-4, rtol=0)

    browser.get(page.as_uri() + "#kind=cross&layer=1&head=3")
    browser.refresh()
    shown = torch.tensor([[value(field) for field in row] for row in cells()])
    torch.testing.assert_close(shown, maps.cross[1, 3], atol=6e-4, rtol=0)
    assert f"{maps.target[0].text} looks at {maps.source[0].text}" in cells()[0][0].get_attribute("aria-label")

    said = browser.find_element(By.ID, "said")
    ActionChains(browser).move_to_element(cells()[1][2]).perform()
    assert said.text == cells()[1][2].get_attribute("title")
    browser.execute_script("arguments[0].focus()", cells()[0][0])
    for key, (row, column) in [(Keys.ARROW_DOWN, (1, 0)), (Keys.ARROW_RIGHT, (1, 1)), (Keys.ARROW_UP, (0, 1))]:
        browser.switch_to.active_element.send_keys(key)
        assert browser.switch_to.active_element == cells()[row][column]
        assert said.text == cells()[row][column].get_attribute("title")
    browser.switch_to.active_element.send_keys(Keys.ARROW_UP)  # there is nothing above
    assert browser.switch_to.active_element == cells()[0][1]
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []


# ---------------------------------------------------------------------------------------------------------- alignment


def test_words_are_aligned_by_the_most_attention():
    """Source tokens a b, two of one word, and their end; target tokens x and y1 y2, two of one word, and their end."""
    source = [Token("a", 0), Token("b1", 1), Token("b2", 1), Token("</s>", None)]
    target = [Token("x", 0), Token("y1", 1), Token("y2", 1), Token("</s>", None)]
    weights = torch.tensor(
        [
            [0.3, 0.25, 0.25, 0.2],  # b, by its two tokens together
            [0.9, 0.0, 0.1, 0.0],
            [0.2, 0.1, 0.1, 0.6],  # the end is no word
            [0.0, 0.0, 0.0, 1.0],
        ]
    )
    maps = AttentionMaps(source, target, target, *3 * [weights[None, None]])
    assert align_words(maps) == [(1, 0), (0, 1)]


def test_alignment_error_rate():
    found = [{(0, 0), (1, 1)}, {(0, 1)}]
    assert alignment_error_rate(found, found) == 0
    assert alignment_error_rate(found, [{(0, 0), (1, 2)}, set()]) == pytest.approx(1 - 2 * 1 / 5)
    assert alignment_error_rate([set()], [{(0, 0)}]) == 1
    assert alignment_error_rate([set()], [set()]) == 0  # nothing to find, and nothing found


def test_the_command_aligns_a_dataset(model, tokenizer, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [("A dog sleeps.", "Two play", "0-0 2-1"), ("Two", "A dog", "0-0 0-1"), ("Two", "A dog", None)]
    rows += [("", "A dog", "0-0"), (None, "A dog", "0-0"), ("dog " * 50, "Two", "0-0")]
    lines = [json.dumps({"en": en, "de": de, "alignment": links}) for en, de, links in rows]
    (tmp_path / "data" / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    command = ["align", "--model", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]
    main([*command, "--source_lang", "en", "--target_lang", "de"])
    printed, said = capsys.readouterr()
    found = [[tuple(map(int, link.split("-"))) for link in line.split()] for line in printed.splitlines()]
    assert [[target for _, target in links] for links in found] == [[0, 1], [0, 1], [0, 1], [], [], []]
    assert found[1] == [(0, 0), (0, 1)]  # there is but one source word
    rate = alignment_error_rate([set(links) for links in found[:2]], [{(0, 0), (2, 1)}, {(0, 0), (0, 1)}])
    assert f"alignment error rate {rate:.3f} over 2 pairs" in said
    assert "3 of 6 pairs have an empty side or more than 40 tokens." in said
    with pytest.raises(SystemExit, match="There is no layer 3; the model has 3, from 0 to 2"):
        main([*command, "--layer", "3"])
    with pytest.raises(SystemExit, match="There is no split 'train'"):
        main([*command, "--split", "train"])
    for number, wrong in enumerate(["0-0 x", "0-0,1-1", ["0-0"]]):
        data = tmp_path / f"data{number}"
        data.mkdir()
        lines = [{"en": "A dog", "de": "Two", "alignment": wrong}]
        (data / "test.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        with pytest.raises(SystemExit, match="The alignment of pair 1 is .*; it must be written as '0-0 1-2'"):
            main([*command, "--dataset_name", str(data), "--source_lang", "en", "--target_lang", "de"])
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="Source and target are the same, en; name two that differ"):
        main([*command, "--source_column", "en", "--target_column", "en"])


@pytest.fixture
def saved(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_shows_a_translation(saved, tmp_path, capsys):
    command = ["attention", "--model", str(saved), "--text", "A dog", "--translation", "Two children play."]
    for name in ("map.png", "map.html"):
        main([*command, "--output", str(tmp_path / name)])
        assert capsys.readouterr().out == "Two children play.\n"
    before = (tmp_path / "map.html").read_bytes()
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(SystemExit, match=r"folder\.html cannot be written: "):
        main([*command, "--output", str(tmp_path / "folder.html")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.html", "map.html", "map.png", "model"]
    assert (tmp_path / "map.html").read_bytes() == before


def test_foreign_code_is_not_run(saved, tmp_path, monkeypatch):
    """Not even where somebody answers yes to all that is asked."""
    config = json.loads((saved / "config.json").read_text()) | {"model_type": "evil"}
    config["auto_map"] = {"AutoConfig": "evil.Config"}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "evil.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(SystemExit, match="cannot be loaded"):
        main(["shapes", "--model", str(saved)])
    assert not (tmp_path / "was_run").exists()


def test_who_reads_the_output_may_have_had_enough():
    command = f"{sys.executable} -m vanilla_transformer inspect shapes --all_layers --encoder_layers 400 | head -1"
    result = subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, cwd=ROOT)
    assert result.stdout.startswith(b"module ") and result.stdout.count(b"\n") == 1
    assert result.returncode == 141 and b"Traceback" not in result.stderr


def test_the_steps_of_an_int8_model(saved):
    model = Translator.from_pretrained(saved, dtype="int8").model
    steps = trace_shapes(model, torch.tensor([[5, 6, 2]]), torch.tensor([[1, 5]]))
    assert steps[-1].shape == (1, 2, model.config.vocab_size)
