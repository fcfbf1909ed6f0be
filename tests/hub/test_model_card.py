"""The model card that a finished run writes."""

import ast
import json
import re
from html import unescape

import pytest
from huggingface_hub import ModelCard
from published import RESULTS, edit

from vanilla_transformer.errors import UserError
from vanilla_transformer.hub.model_card import as_plain, record_tuning, write_model_card


def read(path) -> str:
    return path.read_text(encoding="utf-8")


def test_metadata(trained):
    data = ModelCard.load(write_model_card(trained)).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "translation", None)
    assert data.language == ["en", "de"] and "vanilla-transformer" in data.tags
    assert data.metrics == ["sacrebleu", "chrf"]
    assert data.datasets is None and data.base_model is None  # both local
    results = data.eval_results
    found = {(r.dataset_name, r.dataset_split, r.metric_type): (r.metric_value, r.metric_args) for r in results}
    signatures = {name: {"signature": value} for name, value in RESULTS.items() if name.endswith("_signature")}
    assert found == {
        ("pairs", "dev", "sacrebleu"): (31.4159, signatures["eval_bleu_signature"]),
        ("pairs", "dev", "chrf"): (55.5, signatures["eval_chrf_signature"]),
        ("pairs", "dev", "loss"): (1.2346, None),
        ("pairs", "test", "sacrebleu"): (30.25, signatures["test_bleu_signature"]),
        ("pairs", "test", "chrf"): (54.125, signatures["test_chrf_signature"]),
        ("pairs", "test", "loss"): (1.3, None),
    }


def test_the_license_is_the_one_that_was_given(trained):
    assert "has not given them a license" in ModelCard.load(write_model_card(trained)).text
    edit(trained / "recipe.yaml", license="cc-by-4.0")
    card = ModelCard.load(write_model_card(trained))
    assert card.data.license == "cc-by-4.0" and "Code: Apache-2.0. Weights: cc-by-4.0." in card.text


def test_the_data_and_where_each_split_is_from(trained):
    counts = {"pairs": 1234, "duplicates": 5, "source_is_target": 0, "swapped": 0.0}
    scored = {"pairs": 30, "duplicates": 0, "sources_in_train": 2, "unknown_characters": "ß"}
    origins = {"train": "a.tsv", "validation": "held out of a.tsv", "test": "b.tsv"}
    edit(trained / "all_results.json", survey={"train": counts, "test": scored}, origins=origins)
    card = ModelCard.load(write_model_card(trained))
    assert "| dev: held out of a.tsv |" in card.text and "| test: b.tsv |" in card.text
    assert "| pairs | 1,234 | 30 |" in card.text and "| sources in train |  | 2 |" in card.text
    assert "source is target" not in card.text  # nothing to tell
    assert (
        "Translations of sentences of the test split (2 of its 30 sources are in the training data); ✓ marks"
        in card.text
    )
    assert {result.dataset_name for result in card.data.eval_results} == {"held out of a.tsv", "b.tsv"}


def test_all_languages_of_a_multilingual_model_are_listed(trained):
    edit(trained / "all_results.json", target_lang="de, fr")
    card = ModelCard.load(write_model_card(trained))
    assert card.data.language == ["en", "de", "fr"] and "Translates from en to de, fr." in card.text


def test_hub_dataset_without_a_test_split(trained):
    results = {key: value for key, value in RESULTS.items() if not key.startswith("test_")}
    (trained / "all_results.json").write_text(json.dumps(results | {"dataset": "me/pairs", "target_lang": "no"}))
    edit(trained / "recipe.yaml", dataset_name="me/pairs", model_name_or_path="team/bigger")
    card = ModelCard.load(write_model_card(trained))
    assert card.data.datasets == ["me/pairs"] and card.data.base_model == "team/bigger"
    assert card.data.license is None and "another model, whose license applies" in card.text
    assert card.data.language == ["en", "no"]  # Norwegian, not YAML's false
    assert {result.dataset_split for result in card.data.eval_results} == {"dev"}
    assert "(https://huggingface.co/datasets/me/pairs)" in card.text and "fine-tuned from team/bigger" in card.text


def test_files_are_not_a_hub_dataset(trained):
    """`data/train.jsonl` looks like `owner/name`."""
    edit(trained / "all_results.json", dataset="data/train.jsonl")
    edit(trained / "recipe.yaml", dataset_name=None, train_file=["data/train.jsonl"])
    assert ModelCard.load(write_model_card(trained)).data.datasets is None


def test_text_of_the_card(trained):
    card = read(write_model_card(trained))
    for part in [
        "| dev | 31.42 | 55.50 | 1.235 |",
        "| test | 30.25 | 54.12 | 1.300 |",
        RESULTS["eval_bleu_signature"],
    ]:
        assert part in card
    for part in [RESULTS["test_chrf_signature"], "4,321", "12,345", "67,891,011", "18,224", "4.1%", "1:02:05", "bf16"]:
        assert part in card
    for part in ["2 x Abacus 9000", "torch 2.13.0", "![", "| `learning_rate` | 0.0078125 |", "| `d_model` | 16 |"]:
        assert part in card
    assert card.count("tok:13a") == 4 and " On test: BLEU `nrefs:2|" in card  # twice in the metadata
    assert "translation: Wo ist das Haus?!" in card and "vaswani2017attention" in card and "ema_decay" not in card
    assert "somebody" not in card and str(trained.parent) not in card
    # A code fence in a sentence does not open a block: there are those of code, examples and citation.
    assert len(re.findall(r"(?m)^```", card)) == 6
    for _ in range(2):
        source = json.loads(read(trained / "all_results.json"))["examples"][0]["source"]
        code = re.search(r"tokenizer\(\[(.*)\], return", read(write_model_card(trained))).group(1)
        assert ast.literal_eval(code) == source
        edit(trained / "all_results.json", examples=RESULTS["examples"][1:])


def test_card_without_pictures_and_examples(trained):
    for picture in trained.glob("*.png"):
        picture.unlink()
    kept = {key: value for key, value in RESULTS.items() if key not in ("examples", "source_lang")}
    (trained / "all_results.json").write_text(json.dumps(kept))
    card = read(write_model_card(trained))
    assert "![" not in card and "Translations of" not in card and "None" not in card
    compile(re.search(r"(?ms)^```python\n(.*?)^```$", card).group(1), "card", "exec")


NASTY = "x | y `z` <script>alert(1)</script>\n---\n# heading *b* __c__ [d](e) ![f](g) {{ h }}"


def test_names_cannot_break_the_card(trained):
    """Neither the tables, the HTML nor the YAML."""
    plain = read(write_model_card(trained))
    edit(trained / "all_results.json", source_lang=NASTY, target_lang=NASTY, dataset=f"/x/{NASTY}", hardware=NASTY)
    examples = [dict.fromkeys(("source", "reference", "translation"), f"{NASTY}\n```\n")]
    edit(trained / "all_results.json", versions={NASTY: NASTY}, test_bleu_signature=NASTY, examples=examples)
    edit(trained / "recipe.yaml", validation_split=NASTY, model_name_or_path=f"/y/{NASTY}")
    directory = trained.rename(trained.with_name(NASTY.replace("/", "")))
    card = ModelCard.load(write_model_card(directory))
    assert {result.dataset_split for result in card.data.eval_results} == {NASTY, "test"}
    prose = re.sub(r"(?ms)^```.*?^```$", "", card.text)
    prose = re.sub(r"`[^`]*`", "", prose.replace("\\`", ""))  # neither HTML nor Markdown works in code
    assert "<script>" not in prose and "&lt;script&gt;" in prose
    assert not re.search(r"(?<!\\)(\*b\*|\[d\]|__c)", prose)
    headings = [re.findall(r"(?m)^##? (.*)$", body) for body in (ModelCard(plain).text, card.text)]
    assert headings[0][1:] == headings[1][1:] and len(re.findall(r"(?m)^```", card.text)) == 6
    rows = [re.findall(r"(?m)^\|.*\|$", body) for body in (plain, prose)]
    cells = [[len(re.findall(r"(?<!\\)\|", row)) for row in table] for table in rows]
    assert cells[0] == cells[1]


def test_a_dataset_that_is_no_hub_id_gets_no_link(trained):
    for name in ("a/b) <script>alert(1)</script>", "a/b](c)", "a/b/c", "a/b c"):
        edit(trained / "all_results.json", dataset=name)
        edit(trained / "recipe.yaml", dataset_name=name)
        card = ModelCard.load(write_model_card(trained))
        assert not re.search("huggingface.co/datasets|<script>", card.text) and card.data.datasets is None


def test_control_characters_do_not_break_the_card(trained):
    """Wherever a card has what others wrote: in its metadata, text, tables, examples and code."""
    nasty = "\x1b]0;owned\x07\x1b[2J\x9b\u202e\u2028"
    examples = [dict.fromkeys(("source", "reference", "translation"), f"a {nasty} dog")]
    versions = {f"torch{nasty}": nasty}
    names = {"source_lang": nasty, "dataset": nasty, "hardware": nasty, "test_bleu_signature": nasty}
    edit(trained / "all_results.json", **names, versions=versions, examples=examples)
    edit(trained / "recipe.yaml", validation_split=nasty, model_name_or_path=nasty, dataset_name=nasty)
    path = write_model_card(trained.rename(trained.with_name(f"toy{nasty}")))
    card = ModelCard.load(path)
    assert "owned" in card.text and "a student" not in card.text
    assert "owned" in card.data.model_name and {result.metric_type for result in card.data.eval_results}


def test_escaped_text_reads_as_before():
    for value in (NASTY, "multi30k_en_de", "__init__", "a\\b"):
        assert unescape(re.sub(r"\\(\W|_)", r"\1", as_plain(value))) == " ".join(value.split())
    assert as_plain("multi30k_en_de") == "multi30k_en_de"


def test_metadata_names_only_languages_that_the_hub_takes(trained):
    for given, written in [(("jp", "cn"), ["ja", "zh"]), (("English", "xx"), ["en"]), (("src", "tgt"), None)]:
        edit(trained / "all_results.json", source_lang=given[0], target_lang=given[1])
        card = ModelCard.load(write_model_card(trained))
        assert card.data.language == written and f"Translates from {given[0]} to {given[1]}." in card.text


TUNED = {"tuned_decoding": [{"num_beams": 8, "length_penalty": 0.4, "bleu": 32.345}], "tuned_on": "dev of pairs"}


def test_tuning_is_recorded_in_results_and_card(trained):
    """The scores stay those of the search before, also after a second tuning and in a directory that was renamed."""
    write_model_card(trained)
    trained = trained.rename(trained.with_name("renamed"))
    assert record_tuning(trained, TUNED, {"num_beams": 4, "length_penalty": 1.0})
    assert record_tuning(trained, TUNED | {"tuned_on": "more.txt"}, {"num_beams": 8, "length_penalty": 0.4})
    results, card = json.loads(read(trained / "all_results.json")), read(trained / "README.md")
    scored_with = {"num_beams": 4, "length_penalty": 1.0}
    assert results == RESULTS | TUNED | {"tuned_on": "more.txt", "scored_with": scored_with}
    assert "penalty were 4 and 1.0 then. Later, 8 and 0.4 were chosen on more.txt (bleu 32.34)" in card
    assert "| dev | 31.42 |" in card and not [*trained.glob("*.tmp")]


def test_a_card_survives_tuning_where_results_lack_what_it_needs(trained):
    card = read(write_model_card(trained))
    results = {name: value for name, value in RESULTS.items() if name != "dataset"}
    (trained / "all_results.json").write_text(json.dumps(results))
    assert not record_tuning(trained, TUNED, {"num_beams": 4, "length_penalty": 1.0})
    assert read(trained / "README.md") == card


@pytest.mark.parametrize("name", ["README.md", "recipe.yaml"])
def test_an_edited_card_survives_tuning(trained, name):
    card = read(write_model_card(trained)) + "More.\n"
    (trained / "README.md").write_text(card, encoding="utf-8")
    (trained / "recipe.yaml").unlink() if name == "recipe.yaml" else None
    assert not record_tuning(trained, TUNED, {"num_beams": 4, "length_penalty": 1.0})
    assert read(trained / "README.md") == card
    assert json.loads(read(trained / "all_results.json"))["tuned_on"] == "dev of pairs"


def test_tuning_leaves_a_directory_without_results_of_train_py_alone(trained):
    (trained / "all_results.json").write_text('{"eval_loss": 1}')
    for _ in range(2):
        files = {path: path.read_bytes() for path in trained.iterdir() if path.is_file()}
        assert record_tuning(trained, TUNED, {})
        assert files == {path: path.read_bytes() for path in trained.iterdir() if path.is_file()}
        (trained / "all_results.json").unlink(missing_ok=True)


RUN = '{"train_target_tokens": 1, "dataset": 5}'
DAMAGED_RESULTS = {"{": "cannot be read: ", "null": "cannot be read: ", "{}": "is not from train.py; write"}
DAMAGED_RESULTS |= dict.fromkeys(['{"train_target_tokens": 1}', RUN], "No card can be written")
DAMAGED_RECIPES = ["- [", "- a", "d_model: [[1]]", "a: !!timestamp x", "a: !!bool perhaps", "a: !!int ''", "a: !x 1"]
DAMAGE = [("all_results.json", None, "cannot be read: ")]
DAMAGE += [("all_results.json", *damaged) for damaged in DAMAGED_RESULTS.items()]
DAMAGE += [("recipe.yaml", text, "cannot be read: ") for text in [*DAMAGED_RECIPES, "[" * 1000]]


@pytest.mark.parametrize(
    "name, content, message", DAMAGE, ids=[f"{name}: {text and text[:30]}" for name, text, _ in DAMAGE]
)
def test_damaged_files_are_one_sentence(name, content, message, trained):
    (trained / name).unlink() if content is None else (trained / name).write_text(content)
    with pytest.raises(UserError) as error:
        write_model_card(trained)
    said = str(error.value)
    assert message in said and str(trained) in said and "\n" not in said
    if message.startswith("cannot be read"):
        assert f"{name} cannot be read: " in said and "; name the --output_dir of a finished train" in said
