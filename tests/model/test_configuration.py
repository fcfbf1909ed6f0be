"""What the config takes, refuses and writes down. Run: pytest tests/test_configuration.py"""

import json
import re

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from vanilla_transformer import VanillaTransformerConfig

OWN_FIELDS = list(VanillaTransformerConfig.__annotations__)


def test_defaults_are_the_papers_base_model():
    config = VanillaTransformerConfig()
    assert (config.vocab_size, config.decoder_vocab_size, config.d_model) == (37000, 37000, 512)
    assert (config.encoder_layers, config.decoder_layers) == (6, 6)
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (8, 8)
    assert (config.encoder_ffn_dim, config.decoder_ffn_dim, config.activation_function) == (2048, 2048, "relu")
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.1, 0, 0)
    assert (config.position_embedding_type, config.norm_first, config.scale_embedding) == ("sinusoidal", False, True)
    assert config.share_encoder_decoder_embeddings and config.tie_word_embeddings and not config.lm_head_bias
    ids = [config.pad_token_id, config.bos_token_id, config.eos_token_id]
    assert len(set(ids)) == 3 and config.decoder_start_token_id == config.bos_token_id


# Each: the fields given, then what the message must hold: the field, the value, what is allowed.
REFUSED = {
    "string for int": ({"d_model": "512"}, "d_model", "'512'", "int"),
    "float for int": ({"encoder_layers": 6.0}, "encoder_layers", "6.0", "int"),
    "bool for int": ({"decoder_layers": True}, "decoder_layers", "True", "int"),
    "int for bool": ({"norm_first": 1}, "norm_first", "1", "bool"),
    "None for int": ({"vocab_size": None}, "vocab_size", "None", "int"),
    "string for float": ({"dropout": "0.1"}, "dropout", "0.1", "float"),
    "string for id": ({"pad_token_id": "<pad>"}, "pad_token_id", "<pad>", "int"),
    "no layers": ({"encoder_layers": 0}, "encoder_layers", "0", "at least 1"),
    "no types": ({"vocab_size": 0}, "vocab_size", "0", "at least 1"),
    "negative width": ({"decoder_ffn_dim": -4}, "decoder_ffn_dim", "-4", "at least 1"),
    "no heads": ({"decoder_attention_heads": 0}, "decoder_attention_heads", "0", "at least 1"),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings", "0", "at least 1"),
    "dropout of 1": ({"dropout": 1.0}, "dropout", "1.0", "[0, 1)"),
    "negative dropout": ({"attention_dropout": -0.1}, "attention_dropout", "-0.1", "[0, 1)"),
    "NaN dropout": ({"activation_dropout": float("nan")}, "activation_dropout", "nan", "[0, 1)"),
    "eps of 0": ({"layer_norm_eps": 0}, "layer_norm_eps", "0", "positive"),
    "activation": ({"activation_function": "relo"}, "activation_function", "relo", "relu"),
    "positions": ({"position_embedding_type": "alibi"}, "position_embedding_type", "alibi", "rotary"),
    "heads": ({"d_model": 512, "encoder_attention_heads": 7}, "encoder_attention_heads", "7", "512", "divide"),
    "decoder heads": ({"d_model": 20, "decoder_attention_heads": 8}, "decoder_attention_heads", "8", "20", "divide"),
    "odd rotary head": (
        {"d_model": 24, "encoder_attention_heads": 8, "position_embedding_type": "rotary"},
        "encoder_attention_heads",
        "24 / 8",
        "even",
    ),
    "odd sinusoid": ({"d_model": 15}, "d_model", "15", "even"),
    "shared vocabularies": ({"decoder_vocab_size": 9}, "decoder_vocab_size", "9", "vocab_size", "37000", "equal"),
    "pad out of range": ({"pad_token_id": 37000}, "pad_token_id", "37000", "0 to 36999"),
    "negative id": ({"bos_token_id": -1}, "bos_token_id", "-1", "0 to 36999"),
    "end outside the source vocabulary": (
        {"vocab_size": 40, "decoder_vocab_size": 60, "share_encoder_decoder_embeddings": False, "eos_token_id": 50},
        "eos_token_id",
        "50",
        "0 to 39",
    ),
    "no end": ({"eos_token_id": []}, "eos_token_id", "[]", "non-empty list"),
    "decoder only": ({"is_encoder_decoder": False}, "is_encoder_decoder", "False", "True"),
    "one of several": ({"eos_token_id": [2, 40000]}, "eos_token_id", "40000", "0 to 36999"),
    "start in the other vocabulary": (
        {"decoder_start_token_id": 50, "decoder_vocab_size": 50, "share_encoder_decoder_embeddings": False},
        "decoder_start_token_id",
        "50",
        "0 to 49",
    ),
    "misspelt": ({"d_modle": 512}, "`d_modle`", "did you mean `d_model`"),
    "misspelt layers": ({"encoder_layer": 6}, "`encoder_layer`", "did you mean `encoder_layers`"),
    "misspelt plural": ({"num_head": 8}, "`num_head`", "did you mean"),
    "nothing like it": ({"xyzzy": 1}, "`xyzzy`", "d_model", "encoder_layers"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refusal_names_field_value_and_what_is_allowed(case):
    fields, *parts = case
    with pytest.raises((StrictDataclassError, ValueError)) as error:
        VanillaTransformerConfig(**fields)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", OWN_FIELDS)
def test_every_field_is_type_checked(name):
    """A field whose annotation the validator does not see would take anything."""
    with pytest.raises(StrictDataclassError, match=name):
        VanillaTransformerConfig(**{name: {"of": "no type"}})


def test_a_wrong_value_is_refused_later_too():
    config = VanillaTransformerConfig()
    with pytest.raises(StrictDataclassError, match="d_model"):
        config.d_model = "wide"


@pytest.mark.parametrize(
    "fields",
    [
        {"dropout": 0, "attention_dropout": 0.5, "layer_norm_eps": 1e-6},
        {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": None},
        {"eos_token_id": [2, 3], "pad_token_id": 2},
        {"vocab_size": 60, "decoder_vocab_size": 50, "share_encoder_decoder_embeddings": False},
        {
            "d_model": 21,
            "encoder_attention_heads": 3,
            "max_position_embeddings": 8,
            "position_embedding_type": "learned",
        },
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


def test_what_a_field_of_none_becomes():
    config = VanillaTransformerConfig(vocab_size=50, d_model=20)
    assert config.decoder_vocab_size == 50
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (4, 4)  # the part of 8 that divides 20
    assert VanillaTransformerConfig(d_model=64).encoder_attention_heads == 8


def test_standard_names_reach_ours():
    config = VanillaTransformerConfig(d_model=64, encoder_layers=3, encoder_attention_heads=2)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 3, 2)
    config.hidden_size = 32
    assert config.d_model == 32
    decoder = VanillaTransformerConfig(encoder_layers=3, decoder_layers=5).get_text_config(decoder=True)
    assert decoder.num_hidden_layers == 5  # what sizes the cache


def test_file_from_transformers_with_an_unknown_key_loads(tmp_path):
    VanillaTransformerConfig(d_model=32).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    assert content["transformers_version"]
    path.write_text(json.dumps({**content, "of_a_later_version": 3}))
    config = VanillaTransformerConfig.from_pretrained(tmp_path)
    assert (config.d_model, config.of_a_later_version) == (32, 3)


def test_file_written_by_hand_with_a_misspelt_field_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vanilla_transformer", "d_modle": 32}))
    with pytest.raises(ValueError, match="did you mean `d_model`"):
        VanillaTransformerConfig.from_pretrained(tmp_path)


def test_saved_config_names_its_code(tmp_path):
    VanillaTransformerConfig().save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert set(auto_map) == {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"}
    assert (tmp_path / "configuration_vanilla_transformer.py").exists()


def test_each_field_has_its_line_in_the_docstring():
    documented = re.findall(r"^ {8}(\w+): \S", VanillaTransformerConfig.__doc__, flags=re.MULTILINE)
    assert documented == [name for name in OWN_FIELDS if name != "is_encoder_decoder"]  # which is always true


def test_names_of_other_tools_reach_our_fields():
    config = VanillaTransformerConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3)
    assert (config.d_model, config.encoder_attention_heads, config.encoder_layers) == (64, 4, 3)
    assert config.decoder_attention_heads == 8, "derived from the d_model that was given by its other name"


def test_heads_that_are_not_given_fit_the_width():
    assert VanillaTransformerConfig(d_model=36).encoder_attention_heads == 4
    assert VanillaTransformerConfig().encoder_attention_heads == 8
