"""The explorer: what it records equals the model, and what the page computes equals our search and the shape trace."""

import base64
import gzip
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, command_error, small_model

from vanilla_transformer.__main__ import main
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.decoding_vanilla_transformer import beam_search
from vanilla_transformer.errors import UserError
from vanilla_transformer.inspection.attention import attention_figure, attention_maps, eager_attention
from vanilla_transformer.inspection.explorer import Recorder, explore, variant, without_head, write_explorer
from vanilla_transformer.inspection.shapes import trace_shapes

SHORT = {"max_position_embeddings": 9}  # little is recorded, where only the shapes are looked at
PAIRS = [("A dog sleeps.", "Ein Hund schläft.", "0-0 1-1 2-2"), ("</script><b>a & b", "a <i>b</i>", None)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for pair in PAIRS for text in pair[:2]], 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    model = small_model(vocab_size=len(tokenizer), encoder_attention_heads=2, decoder_attention_heads=4)
    with torch.no_grad():
        model.model.shared.weight[tokenizer.eos_token_id] *= 4  # an untrained model would hardly ever end a sentence
    return model


@pytest.fixture(scope="module")
def page(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "explorer.html"
    write_explorer(explore(model, tokenizer, PAIRS), path, "Inside <b>a</b>")
    return path


@pytest.fixture
def open_page(browser):
    """open_page(path, view) -> the browser, once it has unpacked what the page shows."""
    from selenium.webdriver.support.ui import WebDriverWait

    def open_page(path, view=""):
        browser.get("about:blank")  # or else only the view would change
        browser.get(path.as_uri() + view)
        WebDriverWait(browser, 30).until(
            lambda browser: browser.execute_script("return $('said').textContent || data")
        )
        return browser

    return open_page


def data_of(page: Path) -> dict:
    """What was recorded."""
    packed = re.search('<script id="data"[^>]*>([^<]*)</script>', page.read_text(encoding="utf-8"))[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.mark.slow
@torch.no_grad()
def test_what_is_recorded_is_what_the_model_computes(model, tokenizer):
    inputs = {"input_ids": torch.tensor([[5, 9, 2]]), "decoder_input_ids": torch.tensor([[1, 7]])}
    before = model(**inputs).logits
    recorded = explore(model, tokenizer, PAIRS)
    assert torch.equal(model(**inputs).logits, before)  # all that was switched off is on again
    for (source, *_), sentence in zip(PAIRS, recorded["sentences"], strict=True):
        ids, path = tokenizer(source, return_tensors="pt").input_ids, sentence["main"]
        recorder = Recorder(model, tokenizer, ids, source)
        tokens = recorder.complete([])
        assert path["tokens"] and len(path["tokens"]) == len(tokens)
        labels = torch.tensor([tokens])
        outputs = model(input_ids=ids, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels))
        probabilities, best = outputs.logits[0].softmax(dim=-1).topk(5)
        np.testing.assert_allclose(path["p"], probabilities, atol=1e-4)
        assert path["candidates"] == [[recorder.spell(token) for token in row] for row in best.tolist()]
        assert path["chosen"] == [0] * len(tokens)
        with eager_attention(model):
            _, cross, decoder = recorder.path(tokens)
        for name, weights in {"cross": cross, "decoder": decoder}.items():
            found = np.frombuffer(base64.b64decode(path[name]), dtype=np.uint8) / 255
            np.testing.assert_allclose(found, weights.flatten(), atol=0.5 / 255 + 1e-6)
        maps = attention_maps(model, tokenizer, source, max_new_tokens=recorder.limit, num_beams=1)
        torch.testing.assert_close(cross, maps.cross, atol=1e-6, rtol=0)
        branch = sentence["branches"]["0.1"]
        assert branch["tokens"][0] != path["tokens"][0] and branch["chosen"][0] == 1
        later = sentence["branches"]["2.1"]  # begins at its step
        forced = recorder.complete([*tokens[:2], int(best[2, 1])])
        with eager_attention(model):
            whole, cross, _ = recorder.path(forced)
        assert later["tokens"] == whole["tokens"][2:] and later["p"] == whole["p"][2:]
        found = np.frombuffer(base64.b64decode(later["cross"]), dtype=np.uint8) / 255
        np.testing.assert_allclose(found, cross[-1].mean(dim=0)[2:].flatten(), atol=0.5 / 255 + 1e-6)
    names = [variant["name"] for variant in recorded["variants"]]
    assert names[:4] == ["the model as it is", "no positions", "no encoder", "no padding mask, 10 pads at the end"]
    assert len(names) == 4 + model.config.encoder_layers * 2 + model.config.decoder_layers * 2 * 4  # each head, too


@torch.no_grad()
def test_head_that_is_switched_off_adds_nothing(model, tokenizer):
    attention = model.model.decoder.layers[0].encoder_attn
    heads = []
    hook = attention.out_proj.register_forward_hook(lambda module, inputs, output: heads.append((*inputs, output)))
    ids = tokenizer(PAIRS[0][0], return_tensors="pt").input_ids
    with without_head(attention, 1):
        model(input_ids=ids, decoder_input_ids=ids)
    hook.remove()
    joined, output = heads[0]
    joined = joined.clone()
    joined[..., attention.head_dim : 2 * attention.head_dim] = 0
    torch.testing.assert_close(output, attention.out_proj(joined), atol=1e-6, rtol=0)


@torch.no_grad()
def test_pads_without_a_mask_change_the_alignment_too(model, tokenizer):
    pairs = [pair[:2] for pair in PAIRS]
    with eager_attention(model):
        maps = [attention_maps(model, tokenizer, *pair) for pair in pairs]
        intact, padded = (variant("", model, tokenizer, pairs, maps, pads)["links"] for pads in (0, 200))
    assert padded != intact
    assert [text.count("-") for text in padded] == [text.count("-") for text in intact]  # one link per target word
    assert max(int(link.split("-")[0]) for link in padded[0].split()) < 3  # to words, not to pads


@pytest.mark.slow
def test_page_searches_as_our_search_does(model, tokenizer, page, open_page):
    """Beams, length penalty and early stopping are applied to the record by the page itself."""
    browser = open_page(page)
    compared, ended = 0, 0
    for number, (source, *_) in enumerate(PAIRS):
        ids = tokenizer(source, return_tensors="pt").input_ids
        recorder = Recorder(model, tokenizer, ids, source)
        for n, penalty, early in itertools.product([1, 2, 5, 8], [-1, 0, 0.6, 2], [False, True, "never"]):
            options = {"num_beams": n, "length_penalty": float(penalty), "early_stopping": early}
            search = {"custom_generate": beam_search, **options} if n > 1 else {"num_beams": 1}
            expected = model.generate(ids, max_new_tokens=recorder.limit, **search)[0, 1:].tolist()
            found = browser.execute_script(
                """const [number, n, penalty, early] = arguments, { beams, limit } = data.sentences[number];
                const best = search(beams[n - 1], n, penalty, early, limit).finished[0];
                return ancestry(beams[n - 1], n, best.step, best.index).map(([s, i]) => beams[n - 1][s][i][1]);""",
                *(number, n, penalty, str(early).lower()),
            )
            assert found == [recorder.spell(token) for token in expected], (source, options)
            compared += 1
            ended += len(expected) < recorder.limit
    assert compared == 96 and 10 < ended < 90


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"d_model": 36, "encoder_ffn_dim": 50, "position_embedding_type": "learned", "lm_head_bias": True}]
)
def test_page_counts_as_the_shape_trace_does(options, make_model, tokenizer, tmp_path, open_page):
    sizes = {"encoder_attention_heads": 2, "decoder_attention_heads": 4} | SHORT
    model = make_model(vocab_size=len(tokenizer), **sizes, **options)
    write_explorer(explore(model, tokenizer, PAIRS[:1]), tmp_path / "explorer.html", "Shapes")
    browser = open_page(tmp_path / "explorer.html")
    config, sizes = model.config, {"S": 7, "T": 5}
    own = {"d": config.d_model, "h": 2, "f": config.encoder_ffn_dim, "V": config.vocab_size}
    assert browser.execute_script("return sizesNow()").items() >= own.items()  # the sliders begin at the model's sizes
    browser.execute_script("$('size-h').value = 5")
    assert browser.execute_script("return sizesNow().h") == 4  # the heads divide d
    model.config.pad_token_id = None
    steps = trace_shapes(model, torch.ones(1, 7, dtype=torch.long), torch.ones(1, 5, dtype=torch.long))
    steps = [step for step in steps if ".layers." not in step.module or ".layers.0." in step.module]
    for is_encoder in (True, False):
        heads = config.encoder_attention_heads if is_encoder else config.decoder_attention_heads
        inner = config.encoder_ffn_dim if is_encoder else config.decoder_ffn_dim
        sizes |= {"d": config.d_model, "h": heads, "f": inner, "V": config.vocab_size}
        found = browser.execute_script("return data.shapes.map((step) => cost(step, arguments[0]))", sizes)
        assert len(found) == len(steps) > 20
        for step, numbers in zip(steps, found, strict=True):
            if (".encoder." in step.module) == is_encoder:
                assert numbers == [step.parameters, step.flops], step.module


@pytest.mark.slow
def test_page_in_a_browser(page, browser, open_page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    addresses = set(re.findall(r"https?:[^\"'` ]+", page.read_text(encoding="utf-8")))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, from which nothing is loaded
    browser.set_window_size(500, 900)
    open_page(page)
    assert browser.title == "Inside <b>a</b>"
    Select(browser.find_element(By.ID, "sentence")).select_by_index(1)
    assert browser.find_elements(By.CSS_SELECTOR, "b") == []  # text is escaped
    said = browser.find_element(By.ID, "said")
    assert said.text.startswith("Token 1 of ")
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.ARROW_RIGHT)
    assert said.text.startswith("Token 2 of ")
    lines = "$('lines').parentNode.getBoundingClientRect()"
    for _ in range(browser.execute_script("return path().tokens.length")):
        browser.find_element(By.ID, "next").click()
        token = browser.execute_script("return $('lines').querySelector('text[style*=red]').getBoundingClientRect()")
        assert token["right"] <= browser.execute_script(f"return {lines}.right")  # even if the line is longer
    assert browser.execute_script("return $('lines').parentNode.scrollLeft > 0")
    browser.execute_script("state.step = 0; show()")
    browser.find_elements(By.CSS_SELECTOR, "canvas")[5].send_keys(Keys.SPACE)
    assert browser.execute_script("return [state.layer, state.head]") == [1, 1]
    assert browser.switch_to.active_element.get_attribute("aria-label") == "layer 1, head 1"  # it keeps the focus
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.execute_script("return state.layer") == -1
    for tab in ("beams", "shapes", "break", "decode"):
        browser.find_element(By.ID, f"tab-{tab}").click()
        assert browser.find_element(By.ID, tab).is_displayed()
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), tab
    browser.find_element(By.ID, "tab-shapes").click()
    script = "return [...document.querySelectorAll('.sublayer')].map((one) => one.className.split(' ')[1])"
    assert browser.execute_script(script) == ["self_attn", "feed_forward", "self_attn", "encoder_attn", "feed_forward"]
    steps = len(browser.find_elements(By.CSS_SELECTOR, ".stack button"))
    assert steps == browser.execute_script("return data.shapes.length")
    keys = browser.find_element(By.CSS_SELECTOR, ".encoder_attn .three > :nth-child(2)")
    keys.click()
    assert "encoder_attn.k_proj" in browser.find_element(By.ID, "step").text
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.slow
def test_candidates_are_forced_and_the_way_back_ends_where_they_were(page, open_page):
    from selenium.webdriver.common.by import By

    browser = open_page(page, "#sentence=0&step=1")
    assert browser.find_element(By.CSS_SELECTOR, "#candidates [aria-pressed=true]").get_attribute("disabled")
    candidate = browser.find_elements(By.CSS_SELECTOR, "#candidates button:not(:disabled)")[0]
    forced = candidate.text.split("\n")[0]
    candidate.click()
    assert browser.find_element(By.CSS_SELECTOR, "#candidates [aria-pressed=true]").text.split("\n")[0] == forced
    row = "return mapOf('cross')[1].map((w) => w.toFixed(2))"  # of the branch, as the lines
    assert browser.execute_script(row) == browser.execute_script("return currentWeights().map((w) => w.toFixed(2))")
    assert browser.find_element(By.CSS_SELECTOR, "#map .now").text == browser.execute_script("return path().tokens[1]")
    browser.find_element(By.ID, "next").click()
    assert browser.find_elements(By.CSS_SELECTOR, "#candidates button:not(:disabled)") == []  # as the page says
    assert "Return to the translation" in browser.find_element(By.ID, "forcing").text
    browser.find_element(By.ID, "unforce").click()
    assert browser.execute_script("return [state.branch, state.step]") == ["", 1]
    assert not browser.find_element(By.ID, "unforce").is_displayed()
    for step, ends in [(0, "back"), ("path().tokens.length - 1", "next")]:
        browser.execute_script(f"state.step = {step}; show()")
        assert not browser.find_element(By.ID, ends).is_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cross", "decoder", "encoder"])
def test_maps_look_like_those_of_inspect_attention(model, tokenizer, page, open_page, kind):
    """Rows, columns, their tokens and the colors from 0 to 1."""
    from selenium.webdriver.common.by import By

    browser = open_page(page, f"#sentence=0&kind={kind}&layer=1&head=0")
    maps = attention_maps(
        model, tokenizer, PAIRS[0][0], max_new_tokens=data_of(page)["sentences"][0]["limit"], num_beams=1
    )
    (image,) = attention_figure(maps, kind, 1, 0).axes[0].get_images()
    rows, columns = maps.axes(kind)
    texts = [text.text for text in browser.find_elements(By.CSS_SELECTOR, "#map text")]
    assert texts == ["layer 1, head 0", *(token.text for token in (*rows, *columns))]
    fills = "return [...document.querySelectorAll('#map rect[fill^=rgb]')].map((one) => one.getAttribute('fill'))"
    found = [re.findall(r"\d+", fill) for fill in browser.execute_script(fills)]
    found = np.array(found, dtype=int).reshape(len(rows), len(columns), 3)
    assert np.abs(found - 255 * image.to_rgba(image.get_array())[..., :3]).max() <= 3  # weights are bytes


@pytest.mark.slow
def test_tabs_and_arrow_keys(page, open_page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser = open_page(page)
    tab = browser.find_element(By.ID, "tab-decode")
    for key, name in [
        (Keys.ARROW_RIGHT, "beams"),
        (Keys.END, "break"),
        (Keys.ARROW_RIGHT, "decode"),
        (Keys.ARROW_LEFT, "break"),
    ]:
        tab.send_keys(key)
        tab = browser.switch_to.active_element
        assert (tab.get_attribute("id"), tab.get_attribute("aria-selected")) == (f"tab-{name}", "true")
        panel = browser.find_element(By.ID, tab.get_attribute("aria-controls"))
        assert panel.get_attribute("role") == "tabpanel" and panel.is_displayed()
        assert panel.get_attribute("aria-labelledby") == tab.get_attribute("id")
        reached = browser.find_elements(By.CSS_SELECTOR, "[role=tab][tabindex='0']")
        assert [one.get_attribute("id") for one in reached] == [f"tab-{name}"]
    assert browser.execute_script("return state.step") == 0  # these keys did not go through the translation
    assert browser.find_element(By.ID, "broken-name").text == "no positions"


VIEWS = [
    "sentence=1&step=2&layer=1&head=3&truth=true",
    "branch=1.2&step=2",
    "tab=beams&count=7&penalty=-0.5&early=never&greedy=false",
    "tab=shapes&shape=9&size-h=4&size-S=30",
    "tab=break&variant=4",
]


@pytest.mark.slow
def test_an_address_opens_its_view(page, open_page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.expected_conditions import text_to_be_present_in_element, url_contains
    from selenium.webdriver.support.ui import WebDriverWait

    for view in VIEWS:
        browser = open_page(page, f"#{view}")
        shown = browser.execute_script("return address()")
        assert sorted(shown.split("&")) == sorted(view.split("&"))
        text = browser.find_element(By.TAG_NAME, "body").text
        browser = open_page(page)
        assert browser.find_element(By.TAG_NAME, "body").text != text
        browser.execute_script(f"location.hash = {view!r}")
        WebDriverWait(browser, 9).until(text_to_be_present_in_element((By.TAG_NAME, "body"), text))
    browser.execute_script("$('tab-decode').click()")
    WebDriverWait(browser, 9).until(url_contains("#variant=4"))
    for strange in (
        "tab=x",
        "sentence=9",
        "step=99",
        "branch=9.9",
        "layer=7&head=0",
        "kind=x",
        "shape=a",
        "variant=99",
    ):
        browser = open_page(page, f"#{strange}")
        assert browser.execute_script("return address()") == "", strange


# For each sublayer where its input is added, and for the keys and values from the encoder: the arrows that end there.
ENDS = """
const {left, top} = $("arrows").ownerSVGElement.getBoundingClientRect();
const ends = [...$("arrows").querySelectorAll("path")].map((path) => path.getPointAtLength(path.getTotalLength()));
const isAt = (x, y, box) => x > box.left - 8 && x < box.right + 8 && y > box.top - 8 && y < box.bottom + 8;
const at = (element) => ends.filter((p) => isAt(p.x + left, p.y + top, element.getBoundingClientRect())).length;
const inputs = [...document.querySelectorAll("#decoder-steps .encoder_attn .three > *")];
return [[...document.querySelectorAll(".add")].map(at), inputs.slice(1).map(at)];
"""
# What the details lie on, whichever step is chosen.
COVERED = """
return data.shapes.flatMap((_, index) => {
  document.querySelectorAll(".stack button")[index].click();
  const own = $("step").getBoundingClientRect();
  return [...document.querySelectorAll(".stack button, .add")].filter((element) => {
    const box = element.getBoundingClientRect();
    return own.left < box.right && box.left < own.right && own.top < box.bottom && box.top < own.bottom;
  }).map((element) => element.textContent);
});
"""


@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [False, True])
def test_arrows_end_at_what_they_mean_and_details_cover_nothing(
    norm_first, make_model, tokenizer, tmp_path, open_page
):
    model = make_model(vocab_size=len(tokenizer), norm_first=norm_first, **SHORT)
    write_explorer(explore(model, tokenizer, PAIRS[:1]), tmp_path / "explorer.html", "Shapes")
    for width in (390, 800, 1280):
        browser = open_page(tmp_path / "explorer.html", "#tab=shapes")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert browser.execute_script(COVERED) == []
        assert browser.execute_script(ENDS) == [[1] * 5, [1, 1]]
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_explorer_command(model, tokenizer, tmp_path, capsys, monkeypatch):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.csv").write_text("en,de\nA dog sleeps.,Ein Hund schläft.\nA dog.,Ein Hund.\n")
    command = ["inspect", "explorer", "--model", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]
    command += ["--source_lang", "en", "--target_lang", "de", "--sentences", "1", "--output"]
    main([*command, str(tmp_path / "page.html")])
    assert data_of(tmp_path / "page.html")["sentences"][0]["reference"] == "Ein Hund schläft."
    assert "cannot be written: " in command_error(capsys, *command, tmp_path / "nowhere" / "page.html")
    of_text = ["inspect", "explorer", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "text.html")]
    main([*of_text, "--text", "A dog sleeps."])
    assert [sentence["text"] for sentence in data_of(tmp_path / "text.html")["sentences"]] == ["A dog sleeps."]
    assert "give either --text or --dataset_name" in command_error(capsys, *of_text)
    assert "is a directory" in command_error(capsys, *command, tmp_path)
    (tmp_path / "data" / "test.csv").write_text("en,de\nA dog sleeps.,Ein Hund schläft.\nA dog.,\n")
    several = [*command, tmp_path / "no.html", "--sentences", "2"]
    assert "Pair 2 cannot be recorded: The reference is empty" in command_error(capsys, *several)

    def fill_the_disk(path, content):
        path.write_text(content[:100].decode())
        raise OSError(28, "No space left on device")

    whole = (tmp_path / "page.html").read_bytes()
    monkeypatch.setattr(Path, "write_bytes", fill_the_disk)
    assert "No space left on device" in command_error(capsys, *command, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == whole


def test_branches_of_early_steps_are_recorded_as_far_as_there_is_room(model, tokenizer):
    ids = tokenizer(PAIRS[0][0], return_tensors="pt").input_ids
    with eager_attention(model), torch.no_grad():
        recorder = Recorder(model, tokenizer, ids, PAIRS[0][0])
        everything, some = (recorder.decoding(most_bytes)["branches"] for most_bytes in (10**6, 5000))
    assert some and len(some) < len(everything) and some.items() <= everything.items()
    assert list(some) == list(everything)[: len(some)]


@pytest.mark.slow
def test_pads_must_fit_and_translations_must_have_words(make_model, tokenizer):
    length = len(tokenizer(PAIRS[0][0]).input_ids)
    options = {"vocab_size": len(tokenizer), "position_embedding_type": "learned", "lm_head_bias": True}
    for room, padded in [(3, ["no padding mask, 3 pads at the end"]), (0, [])]:
        model = make_model(max_position_embeddings=length + room, **options)
        variants = explore(model, tokenizer, PAIRS[:1])["variants"]
        assert [variant["name"] for variant in variants if "pads" in variant["name"]] == padded
    with torch.no_grad():
        model.lm_head.bias[tokenizer.eos_token_id] = 1e4
    with pytest.raises(UserError, match="translation of 'A dog.' is empty"):
        explore(model, tokenizer, [("A dog.", None, None)])


def test_page_of_the_docs_is_of_this_code():
    """When its template or a line that it shows changes, the command of docs/inspecting.md records it again."""
    page = (ROOT / "docs" / "explorer.html").read_text(encoding="utf-8")
    package = ROOT / "vanilla_transformer"
    before, after = (package / "inspection" / "explorer.html").read_text(encoding="utf-8").split("{{data}}")
    assert page.startswith(before.replace("{{title}}", "Inside sample")) and page.endswith(after)
    code = (package / "modeling_vanilla_transformer.py").read_text(encoding="utf-8")
    recorded = data_of(ROOT / "docs" / "explorer.html")
    assert recorded["sentences"][0]["main"]["translation"] == recorded["sentences"][0]["reference"]  # right, first
    for step in recorded["shapes"]:
        name, *lines = step["code"].split("\n")
        assert lines and all(f" {line}\n" in code for line in lines), step
        assert f"def {name.rpartition('.')[2]}(" in code
