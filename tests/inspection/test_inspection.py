"""Shapes of a forward pass, attention maps and word alignments."""

import json
import re

import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from helpers import DISTINCT_SIZES, TEXTS, B, S, T, assert_close, command_error, positions, random_ids, shape_letters
from matplotlib.font_manager import fontManager, get_font
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertTokenizerFast

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.__main__ import main
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.inspection.alignment import align_words, alignment_error_rate, read_links
from vanilla_transformer.inspection.attention import (
    AttentionMaps,
    Token,
    attention_figure,
    attention_maps,
    choose_fonts,
    describe_head,
    draw_attention,
    eager_attention,
    readable_tokens,
)
from vanilla_transformer.inspection.shapes import trace_shapes


@pytest.fixture
def model(make_model, text_tokenizer):
    return make_model(vocab_size=len(text_tokenizer), decoder_attention_heads=4, decoder_layers=3)


@pytest.fixture
def saved(model, text_tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    text_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def maps(model, text_tokenizer) -> AttentionMaps:
    return attention_maps(model, text_tokenizer, TEXTS[0], "</script><b>& two")


@pytest.fixture
def install_font(tmp_path, monkeypatch):
    """Installs a font that has the given characters, all of one shape, beside those of matplotlib alone."""
    bundled = [font for font in fontManager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(fontManager, "ttflist", bundled)

    def install(family: str, characters: str):
        pen = TTGlyphPen(None)
        pen.moveTo((0, 0))
        for corner in [(0, 800), (800, 0)]:
            pen.lineTo(corner)
        pen.closePath()
        font = FontBuilder(1000)
        font.setupGlyphOrder([".notdef", "triangle"])
        font.setupCharacterMap({ord(character): "triangle" for character in characters})
        font.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "triangle": pen.glyph()})
        font.setupHorizontalMetrics({".notdef": (1000, 0), "triangle": (1000, 0)})
        font.setupHorizontalHeader(ascent=800, descent=-200)
        font.setupNameTable({"familyName": family, "styleName": "Regular"})
        font.setupOS2()
        font.setupPost()
        font.save(tmp_path / f"{family}.ttf")
        fontManager.addfont(tmp_path / f"{family}.ttf")

    return install


@positions
@pytest.mark.parametrize("norm_first", [False, True])
def test_letters_match_the_shapes(make_model, position_embedding_type, norm_first):
    sizes = {**DISTINCT_SIZES, "d_model": 24} if position_embedding_type == "rotary" else DISTINCT_SIZES
    model = make_model(**sizes, position_embedding_type=position_embedding_type, norm_first=norm_first)
    steps = trace_shapes(model, random_ids(S), random_ids(T))
    for step in steps:
        numbers = {"B": B, "S": S, "T": T, "1": 1, **shape_letters(model.config, ".encoder." in step.module)}
        assert [numbers[letter] for letter in step.letters] == list(step.shape), step
    assert sum(step.module.endswith(".layer_norm") for step in steps) == (2 if norm_first else 0)


def test_flops_and_parameters_add_up(make_model):
    model = make_model(**DISTINCT_SIZES, tie_word_embeddings=False, share_encoder_decoder_embeddings=False)
    source, target = random_ids(S), random_ids(T)
    steps = trace_shapes(model, source, target)
    assert sum(step.parameters for step in steps) == model.num_parameters()
    with FlopCounterMode(display=False) as counter, eager_attention(model), torch.no_grad():
        model(input_ids=source, decoder_input_ids=target)
    assert sum(step.flops for step in steps) == counter.get_total_flops()
    weights = next(step for step in steps if step.module.endswith("encoder_attn.weights"))
    assert weights.flops == 2 * B * T * S * 12


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tracing_leaves_the_model_unchanged(make_model, attention):
    model = make_model(**DISTINCT_SIZES)
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


def test_shapes_command_prints_a_model_of_any_size(capsys):
    """Also of one too large for any machine; docs/seeds.md has the lines of a layer."""
    main(["inspect", "shapes", "--d_model", "65536", "--encoder_ffn_dim", "262144", "--encoder_layers", "9"])
    printed = capsys.readouterr().out
    assert f"{VanillaTransformerConfig().vocab_size * 65536:,}" in printed  # the embeddings
    assert re.search(r"encoder\.layers\.8 +the same 11 steps +51,540,459,520 ", printed)
    main(["inspect", "shapes", "--encoder_layers", "1", "--decoder_layers", "2", "--all_layers"])
    assert "decoder.layers.1.encoder_attn.weights" in capsys.readouterr().out


def test_shapes_command_reads_a_saved_model(make_model, tmp_path, capsys):
    model = make_model(**DISTINCT_SIZES)
    model.save_pretrained(tmp_path)
    main(["inspect", "shapes", "--model", str(tmp_path), "--source_length", "9"])
    printed = capsys.readouterr().out
    assert "(2, 9, 12)" in printed and f"\n{model.num_parameters():,} parameters" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("shapes --batch_size 0", "--batch_size: 0 is not a positive integer"),
        ("shapes --d_model 10 --encoder_attention_heads 4", "d_model"),
        ("shapes --d_modle 10", "--d_modle"),
        ("shapes --model .", ". is a directory without a config.json"),
        ("shapes --model . --d_model 8", "--model and --d_model are both given; drop one"),
        ("shapes --position_embedding_type learned --max_position_embeddings 4", "max_position_embeddings=4"),
        ("align --model . --dataset_name sample_dataset", ". is a directory without a config.json"),
        ("shapes --model=", ". is a directory without a config.json"),
        ("look", "look"),
        ("", "shapes|attention|align"),
    ],
)
def test_bad_input_is_one_sentence(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in command_error(capsys, "inspect", *argv.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_maps_are_those_of_the_pass_that_wrote_the_translation(model, text_tokenizer, attention):
    model.set_attn_implementation(attention)
    maps = attention_maps(model, text_tokenizer, TEXTS[0], max_new_tokens=6)
    assert model.config._attn_implementation == attention
    source = text_tokenizer(TEXTS[0], return_tensors="pt").input_ids
    written = model.generate(source, max_new_tokens=6, num_beams=1)
    with torch.no_grad(), eager_attention(model):
        expected = model(input_ids=source, decoder_input_ids=written[:, :-1], output_attentions=True)
    s, t = source.shape[1], written.shape[1] - 1
    assert maps.encoder.shape == (2, 4, s, s)
    assert maps.decoder.shape == (3, 4, t, t) and maps.cross.shape == (3, 4, t, s)
    assert_close(maps.encoder, torch.cat(expected.encoder_attentions))
    assert_close(maps.decoder, torch.cat(expected.decoder_attentions))
    assert_close(maps.cross, torch.cat(expected.cross_attentions))
    for weights in (maps.encoder, maps.decoder, maps.cross):
        assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))
    assert [len(tokens) for tokens in (maps.source, maps.target, maps.decoder_input)] == [s, t, t]
    assert maps.decoder.triu(diagonal=1).count_nonzero() == 0  # no token attends to a later one


def test_a_translation_may_be_given(model, text_tokenizer):
    maps = attention_maps(model, text_tokenizer, TEXTS[0], TEXTS[1])
    written = re.sub("[␣·]", "", "".join(token.text for token in maps.target))
    assert written == TEXTS[1].replace(" ", "") + "</s>"
    assert maps.decoder_input[0].word is None
    assert [token.text for token in maps.decoder_input[1:]] == [token.text for token in maps.target[:-1]]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_readable(text_tokenizer, text):
    ids = text_tokenizer(text).input_ids
    tokens = readable_tokens(text_tokenizer, ids, text)
    assert len(tokens) == len(ids) and tokens[-1] == Token("</s>", None)
    shown = "".join(token.text for token in tokens[:-1])
    assert re.sub("[␣…·]", "", shown) == "".join(text.split())
    words = [token.word for token in tokens[:-1]]
    assert words == sorted(words) and set(words) == set(range(len(text.split())))


def test_pieces_of_a_character_and_the_space_before_belong_to_its_word(text_tokenizer):
    text = "A 🦜 dog"
    tokens = readable_tokens(text_tokenizer, text_tokenizer(text).input_ids, text)
    assert [token.text for token in tokens if token.word == 0] == ["A"]
    parrot = [token.text for token in tokens if token.word == 1]
    assert len(parrot) >= 2 and parrot[-1] == "🦜" and set(parrot[:-1]) <= {"␣", "…"}
    controls = readable_tokens(text_tokenizer, text_tokenizer("a\x01b\x1b").input_ids)
    assert all(token.text.isprintable() for token in controls)


def test_pieces_that_go_on_a_word_are_marked(tmp_path):
    """Neither punctuation nor Chinese, whose words are not known."""
    text = "Hello, hello 你好"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *",你好", "hel", "##lo"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    for tokenizer, hello in [
        (BertTokenizerFast(str(tmp_path / "vocab.txt")), ["hel", "·lo"]),
        (train_tokenizer(["hello 你好"], 260), ["h", "·e", "·l", "·l", "·o"]),
    ]:
        tokens = readable_tokens(tokenizer, tokenizer(text).input_ids, text)
        tokens = [token.text.lower() for token in tokens if token.word is not None and token.text not in "␣…"]
        assert tokens == [*hello, ",", *hello, "你", "好"]


def test_words_are_those_of_the_text_if_the_tokenizer_decodes_to_more_spaces(tmp_path):
    """BERT's does: it decodes these four words to seven."""
    text = '"Hello" a well-known man'
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *'"-', "hello", "a"]))
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    tokens = readable_tokens(tokenizer, tokenizer(text).input_ids, text)
    tokens = [(token.text, token.word) for token in tokens if token.word is not None]
    assert tokens[:4] == [('"', 0), ("hello", 0), ('"', 0), ("a", 1)]


def test_empty_and_too_long_texts_are_named(model, text_tokenizer):
    for texts, message in [
        (("  \n",), "The text is empty"),
        (("A dog", ""), "The translation is empty"),
        (("dog " * 50,), r"The text has \d+ tokens; at most 40 can be shown; shorten it"),
    ]:
        with pytest.raises(UserError, match=message):
            attention_maps(model, text_tokenizer, *texts)


NEAR_DIAGONAL = 0.7 * torch.eye(6) + 0.3 * torch.eye(6).roll(1, 1)
CAUSAL = torch.tensor([[1, 0, 0], [0.9, 0.1, 0], [0.9, 0.05, 0.05]])


@pytest.mark.parametrize(
    ("weights", "is_self", "description"),
    [
        (0.9 * torch.eye(4).roll(-1, 1).tril() + 0.1 * torch.eye(4), True, "the token before, 90%"),
        (torch.eye(4), True, "the token itself, 100%"),
        (torch.eye(4).roll(1, 1), True, "the token after, 100%"),
        (torch.eye(4)[[1, 1, 1]], False, "“1”, 100%"),
        (CAUSAL, True, "“0”, 90%"),  # the first row has no choice
        (torch.ones(1, 1), False, "“0”, 100%"),
        (torch.eye(6), False, "the diagonal, 100%"),
        (NEAR_DIAGONAL, False, "the diagonal, 95%"),
        (torch.eye(6)[[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]], False, "the diagonal, 100%"),  # twice as many rows
        (torch.full((6, 6), 1 / 6), False, "about 6.0 tokens per row"),
        (torch.full((6, 6), 1 / 6), True, "about 6.0 tokens per row"),
        (torch.full((2, 2), 1 / 2), True, "about 2.0 tokens per row"),  # although each column has half of the weight
        (torch.full((3, 3), 1 / 3), False, "about 3.0 tokens per row"),  # although most of it is near the diagonal
        (torch.ones(5, 5).tril() / torch.arange(1, 6)[:, None], True, "about 3.3 tokens per row"),  # (2 3 4 5)^(1/4)
        (torch.eye(6).flip(0), False, "about 1.0 tokens per row"),
    ],
)
def test_description_of_a_head_is_true(weights, is_self, description):
    columns = [Token(str(number), 0) for number in range(weights.shape[1])]
    assert describe_head(weights, columns, is_self) == description


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_pictures_show_weights_and_tokens(maps, kind):
    weights, (rows, columns) = getattr(maps, kind), maps.axes(kind)
    panels = attention_figure(maps, kind, layer=1).axes[:-1]  # the last is the color bar
    single = attention_figure(maps, kind, layer=1, head=3).axes[0]
    for panel, shown in [*zip(panels, weights[1], strict=True), (single, weights[1, 3])]:
        (image,) = panel.get_images()
        assert torch.equal(torch.tensor(image.get_array().data), shown) and image.get_clim() == (0, 1)
        for axis, tokens in [(panel.xaxis, columns), (panel.yaxis, rows)]:
            assert axis.get_major_formatter().format_ticks(axis.get_ticklocs()) == [token.text for token in tokens]
    assert [panel.get_title()[:6] for panel in (*panels, single)] == ["head 0", "head 1", "head 2", "head 3", "head 3"]


@pytest.mark.parametrize(("heads", "below"), [(1, [0]), (2, [0, 1]), (3, [1, 2]), (4, [2, 3])])
def test_tokens_and_color_bar_are_drawn_once_for_all_heads(maps, heads, below):
    """Also below a panel that has none under it."""
    maps.encoder = maps.encoder[:, :heads]
    figure = attention_figure(maps, "encoder", layer=1)
    panels = [axis for axis in figure.axes if axis.get_visible() and axis.get_images()]
    assert len(panels) == heads and figure.get_suptitle() == "Encoder self-attention, layer 1"
    named = {
        side: [number for number, panel in enumerate(panels) if getattr(panel, f"{side}axis").get_tick_params()[place]]
        for side, place in [("x", "labelbottom"), ("y", "labelleft")]
    }
    assert named == {"x": below, "y": list(range(0, heads, 2)) if heads > 2 else [0]}
    assert [axis.get_ylabel() for axis in figure.axes].count("attention weight") == 1
    for panel in panels:  # no farther than the weights
        assert panel.get_xlim() == (-0.5, len(maps.source) - 0.5) and panel.get_ylim() == panel.get_xlim()[::-1]


@pytest.mark.parametrize("head, one_in", [pytest.param(None, 9, marks=pytest.mark.slow), (0, 5)])
def test_picture_of_a_long_text_is_not_huge(head, one_in):
    """As many tokens are named as there is room for."""
    tokens, weights = [Token(str(number), number) for number in range(507)], torch.full((1, 4, 507, 507), 1 / 507)
    figure = attention_figure(AttentionMaps(tokens, tokens, tokens, weights, weights, weights), "encoder", 0, head)
    assert max(figure.get_size_inches()) * 110 < 3600
    assert figure.axes[0].get_xticks().tolist() == figure.axes[0].get_yticks().tolist() == [*range(0, 507, one_in)]
    assert figure.get_supxlabel() == f"keys, one in {one_in} named"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_suffix_decides_the_format_and_any_character_can_be_drawn(
    model, text_tokenizer, install_font, tmp_path, suffix, start
):
    """A $ does not begin a formula, and neither a character of another font nor a tensor gives a warning."""
    install_font("Chinese", TEXTS[4])
    maps = attention_maps(model, text_tokenizer, TEXTS[4], TEXTS[5])
    maps.source[:2] = [Token("$$", 0), Token("$\\foo$", 1)]
    draw_attention(maps, tmp_path / f"map{suffix}")
    assert (tmp_path / f"map{suffix}").read_bytes().startswith(start)


@pytest.mark.filterwarnings("error")
def test_characters_that_no_font_has_are_drawn_as_boxes_and_named(maps, install_font, tmp_path):
    def draw(*texts: str) -> bytes:
        maps.source[:2] = [Token(text, number) for number, text in enumerate(texts)]
        draw_attention(maps, tmp_path / "map.png", "encoder", head=0)
        return (tmp_path / "map.png").read_bytes()

    boxes = draw("$▯▯", "▯▯▯b")
    with pytest.warns(UserWarning) as told:
        assert draw("$纽约", "ひก한b") == boxes
    (warning,) = told
    assert str(warning.message).startswith(
        "No font here has ก ひ 约 纽 한, drawn as ▯; install one that does, such as"
    )
    install_font("Chinese and others", "纽约ひก한")
    assert draw("$纽约", "ひก한b") != boxes


def test_fonts_with_most_of_the_missing_characters_are_chosen(install_font, tmp_path):
    """But no color font, nor that of placeholders which matplotlib has; a file may be gone by now."""
    for family, characters in [("A", "纽"), ("B", "纽约ひ"), ("C", "ひ한"), ("Noto Color Emoji", "纽约ひ한🤗")]:
        install_font(family, characters)
    for text, families, missing in [
        ("纽 a", ["A"], ""),
        ("纽约", ["B"], ""),
        ("한约纽🤗", ["B", "C"], "🤗"),
        ("A dog, السلام, שלום, $x$, 😀", [], ""),
    ]:
        assert choose_fonts(text) == (["sans-serif", *families], set(map(ord, missing))), text
    install_font("D", "ก")
    (tmp_path / "D.ttf").unlink()
    assert choose_fonts("ก") == (["sans-serif"], {ord("ก")})


def test_no_other_font_is_opened_if_the_default_one_has_all(monkeypatch):
    opened = []
    monkeypatch.setattr(
        "vanilla_transformer.inspection.attention.get_font", lambda file: opened.append(file) or get_font(file)
    )
    assert choose_fonts("A dog, السلام, 😀 …") == (["sans-serif"], set()) and len(opened) == 1


def test_missing_layers_and_heads_are_named(maps):
    with pytest.raises(UserError, match="no layer 3; the model has 3"):
        attention_figure(maps, layer=3)
    with pytest.raises(UserError, match="no head 9"):
        attention_figure(maps, head=9)


def test_attention_command_writes_pictures(saved, tmp_path, capsys):
    command = ["inspect", "attention", "--model", str(saved), "--text", "A dog", "--translation", "Two children play."]
    main([*command, "--output", str(tmp_path / "map.png")])
    assert capsys.readouterr().out == "Two children play.\n" and (tmp_path / "map.png").stat().st_size
    (tmp_path / "folder.png").mkdir()
    for output, message in [
        ("folder.png", "folder.png cannot be written: "),
        ("a.doc", "a.doc must end in .png, .svg or .pdf."),
        ("nowhere/a.png", "cannot be written: [Errno 2] No such"),
    ]:
        assert message in command_error(capsys, *command, "--output", tmp_path / output)
    undecodable = [*command, "--output", tmp_path / "a.png", "--text", "A dog \udcff"]
    assert "The text contains a lone surrogate" in command_error(capsys, *undecodable)


def test_code_of_a_model_is_not_run(saved, tmp_path, monkeypatch, capsys):
    """Not even if the user answers yes to a question."""
    config = json.loads((saved / "config.json").read_text()) | {"model_type": "evil"}
    config["auto_map"] = {"AutoConfig": "evil.Config"}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "evil.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert "needs code that it brings" in command_error(capsys, "inspect", "shapes", "--model", saved)
    assert not (tmp_path / "was_run").exists()


def test_words_are_aligned_by_the_largest_weight():
    """The two tokens of b count together, and the end is not a word."""
    source = [Token("a", 0), Token("b1", 1), Token("b2", 1), Token("</s>", None)]
    target = [Token("x", 0), Token("y1", 1), Token("y2", 1), Token("</s>", None)]
    weights = torch.tensor([[0.3, 0.25, 0.25, 0.2], [0.9, 0.0, 0.1, 0.0], [0.2, 0.1, 0.1, 0.6], [0.0, 0.0, 0.0, 1.0]])
    maps = AttentionMaps(source, target, target, *3 * [weights[None, None]])
    assert align_words(maps) == [(1, 0), (0, 1)]


def test_alignment_error_rate():
    predicted = [{(0, 0), (1, 1)}, {(0, 1)}]
    assert alignment_error_rate(predicted, predicted) == 0
    assert alignment_error_rate(predicted, [{(0, 0), (1, 2)}, set()]) == pytest.approx(1 - 2 * 1 / 5)
    assert alignment_error_rate([set()], [{(0, 0)}]) == 1
    assert alignment_error_rate([set()], [set()]) == 0


def test_align_command_aligns_a_dataset(saved, tmp_path, capsys):
    rows = [("A dog sleeps.", "Two play", "0-0 2-1"), ("Two", "A dog", "0-0 0-1"), ("Two", "A dog", None)]
    rows += [("", "A dog", "0-0"), (None, "A dog", "0-0"), ("A dog", None, "0-0"), ("dog " * 50, "Two", "0-0")]
    lines = [json.dumps({"en": en, "de": de, "alignment": links}) for en, de, links in rows]
    (tmp_path / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    command = ["inspect", "align", "--model", str(saved), "--dataset_name", str(tmp_path)]
    main([*command, "--source_lang", "en", "--target_lang", "de"])
    printed, said = capsys.readouterr()
    found = [[tuple(map(int, link.split("-"))) for link in line.split()] for line in printed.splitlines()]
    assert [[target for _, target in links] for links in found] == [[0, 1], [0, 1], [0, 1], [], [], [], []]
    assert found[1] == [(0, 0), (0, 1)]  # there is only one source word
    rate = alignment_error_rate([set(links) for links in found[:2]], [{(0, 0), (2, 1)}, {(0, 0), (0, 1)}])
    assert f"alignment error rate {rate:.3f} over 2 pairs" in said
    assert "Skipped 4 of 7 pairs, the first because: The text is empty; give a sentence." in said
    assert "There is no layer 3; the model has 3, from 0 to 2" in command_error(capsys, *command, "--layer", "3")
    assert "'train'" in command_error(capsys, *command, "--split", "train")
    message = command_error(capsys, *command, "--source_column", "en", "--target_column", "en")
    assert "Source and target are both en" in message


@pytest.mark.parametrize("wrong", ["0-0 x", "0-0,1-1", ["0-0"]])
def test_malformed_links_are_rejected(wrong):
    with pytest.raises(UserError, match="The alignment of pair 7 is .*; it must have the form '0-0 1-2'"):
        read_links(wrong, 7)
