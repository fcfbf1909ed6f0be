"""What the config accepts, refuses and saves."""

import inspect
import json
import re

import pytest
from helpers import small_model
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

OWN_FIELDS = list(VanillaTransformerConfig.__annotations__)


def test_defaults_are_the_papers_base_model():
    config = VanillaTransformerConfig()
    sizes = {"vocab_size": 37000, "decoder_vocab_size": 37000, "d_model": 512, "dropout": 0.1}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 6, f"{side}_attention_heads": 8, f"{side}_ffn_dim": 2048}
    switches = {"activation_function": "relu", "position_embedding_type": "sinusoidal", "norm_first": False}
    switches |= {"scale_embedding": True, "share_encoder_decoder_embeddings": True, "tie_word_embeddings": True}
    assert (sizes | switches).items() <= config.to_dict().items()
    assert len({config.pad_token_id, config.bos_token_id, config.eos_token_id}) == 3


SEPARATE = {"vocab_size": 40, "decoder_vocab_size": 60, "share_encoder_decoder_embeddings": False}
# The fields given, then what the message must contain: field, value, what is allowed.
REFUSED = {
    "string for int": ({"d_model": "512"}, "d_model", "'512'", "int"),
    "float for int": ({"encoder_layers": 6.0}, "encoder_layers", "6.0", "int"),
    "int for bool": ({"norm_first": 1}, "norm_first", "1", "bool"),
    "no layers": ({"encoder_layers": 0}, "encoder_layers", "0", "at least 1"),
    "far too many layers": ({"decoder_layers": 10**6}, "decoder_layers", "1000000", "at most 1,000"),
    "dropout of 1": ({"dropout": 1.0}, "dropout", "1.0", "[0, 1)"),
    "NaN dropout": ({"activation_dropout": float("nan")}, "activation_dropout", "nan", "[0, 1)"),
    "eps of 0": ({"layer_norm_eps": 0}, "layer_norm_eps", "0", "positive"),
    "activation": ({"activation_function": "relo"}, "activation_function", "relo", "relu"),
    "positions": ({"position_embedding_type": "alibi"}, "position_embedding_type", "alibi", "rotary"),
    "heads": ({"d_model": 512, "encoder_attention_heads": 7}, "encoder_attention_heads", "7", "512", "divide"),
    "odd rotary head": ({"d_model": 24, "position_embedding_type": "rotary"}, "encoder_attention_heads", "24 / 8"),
    "odd sinusoid": ({"d_model": 15}, "d_model", "15", "even"),
    "shared vocabularies": ({"decoder_vocab_size": 9}, "decoder_vocab_size", "9", "vocab_size", "37000", "equal"),
    "pad out of range": ({"pad_token_id": 37000}, "pad_token_id", "37000", "0 to 36999"),
    "negative id": ({"bos_token_id": -1}, "bos_token_id", "-1", "0 to 36999"),
    "end outside the source": (SEPARATE | {"eos_token_id": 50}, "eos_token_id", "50", "0 to 39"),
    "start outside the target": (SEPARATE | {"decoder_start_token_id": 60}, "decoder_start_token_id", "60", "0 to 59"),
    "one end of two": ({"eos_token_id": [2, 40000]}, "eos_token_id", "40000", "0 to 36999"),
    "decoder only": ({"is_encoder_decoder": False}, "is_encoder_decoder", "False", "True"),
    "misspelled": ({"d_modle": 512}, "`d_modle`", "did you mean `d_model`"),
    "another word": ({"decoder_layer": 2}, "`decoder_layer`", "did you mean `decoder_layers`"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_wrong_value_is_rejected_with_field_value_and_what_is_allowed(case):
    fields, *parts = case
    with pytest.raises((StrictDataclassError, ValueError)) as error:
        VanillaTransformerConfig(**fields)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", OWN_FIELDS)
def test_every_field_is_type_checked(name):
    with pytest.raises(StrictDataclassError, match=name):
        VanillaTransformerConfig(**{name: {"of": "no type"}})
    with pytest.raises(StrictDataclassError, match=name):
        setattr(VanillaTransformerConfig(), name, {"of": "no type"})


@pytest.mark.parametrize(
    "fields",
    [
        {"dropout": 0, "attention_dropout": 0.5, "layer_norm_eps": 1e-6},
        {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": None},
        {"eos_token_id": [2, 3], "pad_token_id": 2},
        SEPARATE,
        {"d_model": 21, "encoder_attention_heads": 3, "position_embedding_type": "learned"},
        {"activation_function": "gelu", "norm_first": True, "lm_head_bias": True, "tie_word_embeddings": False},
        {"num_beams": 4, "max_length": 30, "name_or_path": "x", "dtype": "bfloat16"},
    ],
)
def test_round_trip_through_json(fields, tmp_path):
    ours = VanillaTransformerConfig(**fields)
    ours.save_pretrained(tmp_path)
    for theirs in [
        VanillaTransformerConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        VanillaTransformerConfig(**json.loads(ours.to_json_string(use_diff=False))),
    ]:
        assert type(theirs) is VanillaTransformerConfig
        for name in OWN_FIELDS:
            assert getattr(theirs, name) == getattr(ours, name), name


def test_fields_that_are_none_are_derived():
    config = VanillaTransformerConfig(vocab_size=50, d_model=20)
    assert config.decoder_vocab_size == 50
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (4, 4)  # gcd(8, 20)
    assert VanillaTransformerConfig(d_model=64).encoder_attention_heads == 8


def test_transformers_names_of_the_sizes():
    config = VanillaTransformerConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3)
    assert (config.d_model, config.encoder_attention_heads, config.encoder_layers) == (64, 4, 3)
    assert config.decoder_attention_heads == 8  # derived from the d_model that was given as hidden_size
    config.hidden_size = 32
    assert config.d_model == 32
    decoder = VanillaTransformerConfig(encoder_layers=3, decoder_layers=5).get_text_config(decoder=True)
    assert decoder.num_hidden_layers == 5  # which the cache is made for


def edit(folder, **keys) -> dict:
    """Changes keys of a saved config."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | keys
    path.write_text(json.dumps(content))
    return content


def test_unknown_keys_are_accepted_from_transformers_and_rejected_by_hand(tmp_path):
    VanillaTransformerConfig(d_model=32).save_pretrained(tmp_path)
    assert edit(tmp_path, of_a_later_version=3)["transformers_version"]
    config = VanillaTransformerConfig.from_pretrained(tmp_path)
    assert (config.d_model, config.of_a_later_version) == (32, 3)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vanilla_transformer", "d_modle": 32}))
    with pytest.raises(ValueError, match="did you mean `d_model`"):
        VanillaTransformerConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_kernel_on_the_hub_is_rejected(tmp_path, key, monkeypatch):
    small_model().save_pretrained(tmp_path)
    edit(tmp_path, **{key: "kernels-community/flash-attn2"})
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", None)  # which would download it
    for load in [AutoConfig, AutoModelForSeq2SeqLM, VanillaTransformerForConditionalGeneration]:
        with pytest.raises(ValueError, match=f"`{key}` is 'kernels-community/flash-attn2'.*set_attn_implementation"):
            load.from_pretrained(tmp_path)


def test_saved_directory_has_its_code_under_current_names(tmp_path):
    """Also if the config was saved by a version whose pipeline had a file of another name."""
    small_model().save_pretrained(tmp_path)
    pipeline = {"impl": "pipeline_vanilla_transformer.P", "pt": []}
    edit(tmp_path, custom_pipelines={"vanilla-translation": pipeline}, auto_map={"AutoModel": "x.Y"})
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path).save_pretrained(tmp_path / "new")
    new = json.loads((tmp_path / "new" / "config.json").read_text())
    pipeline = {"impl": "translation_vanilla_transformer.VanillaTranslationPipeline", "pt": ["AutoModelForSeq2SeqLM"]}
    assert new["custom_pipelines"] == {"vanilla-translation": pipeline}
    assert new["auto_map"] == {
        "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
        "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
        "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
    }


def test_each_field_has_its_line_in_the_docstring():
    docstring = inspect.cleandoc(VanillaTransformerConfig.__doc__)
    documented = re.findall(r"^ {4}(\w+): \S", docstring, flags=re.MULTILINE)
    assert documented == [name for name in OWN_FIELDS if name != "is_encoder_decoder"]  # which is always True
