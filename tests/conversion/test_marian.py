"""Converted to Marian, Pegasus or Blenderbot, a model computes the same and loads with transformers alone."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    EMBEDDINGS,
    LABELS,
    MASK,
    SOURCE,
    TARGET,
    TEXTS,
    assert_close,
    command_error,
    python_output,
    save_translator,
    small_model,
    writing_translator,
)
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from vanilla_transformer.__main__ import main
from vanilla_transformer.conversion import from_native, to_native
from vanilla_transformer.conversion.marian import FAMILIES as CLASSES

FAMILIES = {
    "marian": {},
    "pegasus": {"norm_first": True},
    "blenderbot": {"norm_first": True, "position_embedding_type": "learned"},
}
families = pytest.mark.parametrize("family", FAMILIES)


def model_of(family, **config):
    torch.manual_seed(0)
    return small_model(**{"tie_word_embeddings": True, **FAMILIES[family], **config})


EXTREMES = ("shared, tied", "separate, untied, bias")


@families
@pytest.mark.parametrize(
    "embeddings", [pytest.param(name, marks=[] if name in EXTREMES else [pytest.mark.slow]) for name in EMBEDDINGS]
)
def test_logits_loss_and_translations_are_equal(family, embeddings, tmp_path):
    config = dict(EMBEDDINGS[embeddings])
    if family != "marian":
        config.pop("decoder_vocab_size", None)
    ours = model_of(family, **config, activation_function="gelu", scale_embedding=family != "pegasus")
    to_native(ours).save_pretrained(tmp_path)
    theirs = CLASSES[family][0].from_pretrained(tmp_path)
    inputs = {"input_ids": SOURCE, "attention_mask": MASK}
    with torch.no_grad():
        found, expected = (model(**inputs, decoder_input_ids=TARGET).logits for model in (theirs, ours))
        assert_close(found, expected)
        labels = LABELS.masked_fill(torch.arange(LABELS.shape[1]) == 0, 10)  # they read other tokens in place of -100
        assert_close(theirs(**inputs, labels=labels).loss, ours(**inputs, labels=labels).loss)
    for search in ({}, {"num_beams": 5}):
        expected = ours.generate(**inputs, **search, max_new_tokens=15)
        assert theirs.generate(**inputs, **search, max_new_tokens=15).tolist() == expected.tolist()


@families
def test_a_model_returns_from_its_native_form(family):
    ours = model_of(family, lm_head_bias=True, dropout=0.3)
    back = from_native(to_native(ours))
    changed = {name for name, value in back.config.to_dict().items() if value != ours.config.to_dict()[name]}
    assert changed <= {"max_position_embeddings", "dtype"}
    assert_close(back.state_dict(), ours.state_dict(), 0)
    assert back.generation_config.to_dict() | {"max_length": None} == ours.generation_config.to_dict()


@families
def test_training_goes_on_as_ours_would(family, tmp_path):
    """Under Seq2SeqTrainer, which knows nothing of this package."""
    ours = model_of(family)
    theirs = to_native(ours)
    rows = [{"input_ids": [5, 9, 11, 2], "labels": [8, 4, 6, 2]}, {"input_ids": [7, 3, 30, 2], "labels": [9, 9, 5, 2]}]
    options = {"max_steps": 3, "learning_rate": 0.01, "lr_scheduler_type": "constant", "report_to": "none"}
    for model in (ours, theirs):
        arguments = Seq2SeqTrainingArguments(tmp_path, **options, save_strategy="no", disable_tqdm=True, use_cpu=True)
        Seq2SeqTrainer(model.train(), arguments, train_dataset=rows).train()
    with torch.no_grad():
        inputs = {"input_ids": SOURCE[:1], "decoder_input_ids": TARGET[:1]}
        assert_close(theirs.eval()(**inputs).logits, ours.eval()(**inputs).logits, tolerance=1e-4)
    before, after = (model.get_input_embeddings().weight for model in (model_of(family), ours))
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"position_embedding_type": "rotary"}, "position_embedding_type='rotary'"),
        ({"position_embedding_type": "learned"}, "`norm_first=False`"),
        ({"layer_norm_eps": 1e-6}, "`layer_norm_eps=1e-06`"),
        ({"norm_first": True, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30}, "decoder_vocab"),
    ],
)
def test_what_has_no_native_form_is_refused_by_its_field(config, named):
    with pytest.raises(ValueError, match=named):
        to_native(small_model(**config))


FRESH = """
import sys
sys.modules["vanilla_transformer"] = None
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, tokenizer = (auto.from_pretrained(sys.argv[1]) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
print(model.generate(**tokenizer(sys.argv[2], return_tensors="pt"), max_new_tokens=9).tolist())
"""


@pytest.mark.slow
def test_the_convert_command_writes_what_transformers_loads_alone(folder, translator, tmp_path):
    """The fresh process has no package, and is given no `trust_remote_code`."""
    main(["convert", folder, str(tmp_path / "native"), "--to", "native"])
    assert sorted(path.suffix for path in (tmp_path / "native").iterdir()) == [".json"] * 4 + [".safetensors"]
    assert "PreTrainedTokenizerFast" in (tmp_path / "native" / "tokenizer_config.json").read_text()
    printed = python_output("-c", FRESH, tmp_path / "native", TEXTS[1])
    inputs = translator.tokenizer(TEXTS[1], return_tensors="pt")
    assert json.loads(printed) == translator.model.generate(**inputs, max_new_tokens=9).tolist()


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        ({"position_embedding_type": "rotary"}, ["--to", "native"], "position_embedding_type='rotary'"),
        ({"activation_function": "mish"}, ["--to", "ctranslate2"], "no activation function 'mish'"),
        ({}, ["--to", "ctranslate2", "--quantization", "int3"], "`quantization` is 'int3'"),
        ({}, ["--to", "native", "--quantization", "int8"], "--quantization is for --to ctranslate2 and marian-bin"),
        ({}, ["--dictionary", "dict.txt"], "are for a checkpoint of fairseq"),
    ],
)
def test_a_conversion_that_fails_leaves_nothing(config, options, named, text_tokenizer, tmp_path, capsys):
    folder = save_translator(writing_translator(text_tokenizer, **config), tmp_path / "ours")
    assert named in command_error(capsys, "convert", folder, tmp_path / "new", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(("name", "value"), [("num_beams", 0), ("length_penalty", 1e6)])
def test_a_generation_config_with_which_the_result_would_not_load_is_refused(name, value, folder, tmp_path, capsys):
    file = Path(folder, "generation_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    commands = [("translate", "--model", folder), ("convert", folder, tmp_path / "new")]
    (reason,) = {command_error(capsys, *command).partition(": ")[2] for command in commands}
    assert name in reason and not (tmp_path / "new").exists()


@pytest.mark.parametrize("form", ["onnx", "ctranslate2"])
def test_an_engine_needs_a_tokenizer(form, make_model, tmp_path, capsys):
    make_model().save_pretrained(tmp_path / "ours")
    assert "has no tokenizer" in command_error(capsys, "convert", tmp_path / "ours", tmp_path / "new", "--to", form)


def test_a_missing_extra_is_named(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vanilla_transformer.conversion.onnx", None)
    message = command_error(capsys, "convert", folder, tmp_path / "new", "--to", "onnx")
    assert "pip install onnx onnxruntime onnxscript" in message
