"""Checkpoints of fairseq, written here with the names that fairseq 0.12.2 and older versions give them."""

import argparse
import pickle

import pytest
import torch
from helpers import assert_close, command_error, randomise
from transformers import FSMTConfig, FSMTForConditionalGeneration

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main
from vanilla_transformer.conversion.fairseq import fairseq_tokenizer, from_fairseq, from_fsmt
from vanilla_transformer.errors import UserError

SOURCE = torch.tensor([[5, 9, 11, 7, 30, 2], [1, 1, 8, 4, 6, 2]])  # padded on the left, as by fairseq
MASK = (SOURCE != 1).long()
TARGET = torch.tensor([[2, 10, 6, 22, 5], [2, 3, 14, 9, 4]])
SIZES = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_embed_dim": 24}
SIZES |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_embed_dim": 20}
OPTIONS = SIZES | {"encoder_normalize_before": False, "decoder_normalize_before": False, "dropout": 0.1}
OPTIONS |= {"activation_fn": "relu", "max_source_positions": 40, "max_target_positions": 50}
# Searches that both models know.
BEAMS = {"num_beams": 4, "max_new_tokens": 9, "max_length": None, "min_new_tokens": None}
BEAMS |= {"suppress_tokens": None, "forced_eos_token_id": None, "early_stopping": True, "length_penalty": 1.0}


@pytest.fixture
def fsmt():
    return make_fsmt(37)


def make_fsmt(vocabulary: int) -> FSMTForConditionalGeneration:
    """The same architecture in transformers, written for the published models of fairseq."""
    torch.manual_seed(0)
    sizes = {name.replace("ffn_embed", "ffn"): size for name, size in SIZES.items()}
    sizes |= dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), vocabulary)
    sizes |= {"d_model": 16, "max_position_embeddings": 40, "activation_function": "relu"}
    model = FSMTForConditionalGeneration(FSMTConfig(langs=["en", "de"], **sizes))
    for side in (model.model.encoder, model.model.decoder):
        table = side.embed_positions.weight.clone()
        randomise(side)
        side.embed_positions.weight.data.copy_(table)
    model.model.decoder.output_projection.weight = model.model.decoder.embed_tokens.weight
    model.generation_config.update(num_beams=3, length_penalty=0.7)
    return model.eval()


def save(path, weights, old=False, **options) -> str:
    """A checkpoint of fairseq; an `old` one as before 2019."""
    options = argparse.Namespace(**{**OPTIONS, **options})
    if old:
        saved = {"args": options, "model": weights}
    else:
        saved = {"args": None, "cfg": {"model": options, "task": {"left_pad_source": True}}, "model": weights}
    torch.save(saved | {"extra_state": {"train_iterator": {"epoch": 4}}, "optimizer_history": []}, path)
    return str(path)


def fairseq_weights(fsmt) -> dict[str, torch.Tensor]:
    """As fairseq 0.12.2 saves them: sinusoids left out, and copies of the encoder's weights for a faster kernel."""
    weights = {name.removeprefix("model."): tensor for name, tensor in fsmt.state_dict().items()}
    for side in ("encoder", "decoder"):
        del weights[f"{side}.embed_positions.weight"]
        weights |= {f"{side}.version": torch.tensor([3.0]), f"{side}.embed_positions._float_tensor": torch.zeros(1)}
    for layer in range(2):
        for name in ("in_proj", "out_proj", "fc1", "fc2"):
            for kind in ("weight", "bias"):
                weights[f"encoder.layers.{layer}.{name}_{kind}"] = torch.full((3,), torch.nan)
    return weights


def old_weights(fsmt) -> dict[str, torch.Tensor]:
    """As fairseq 0.5 saved them: projections in one tensor, numbered norms."""
    weights = fairseq_weights(fsmt)
    weights["decoder.embed_out"] = weights.pop("decoder.output_projection.weight")
    renamed = {}
    for name, tensor in weights.items():
        name = name.replace(".self_attn_layer_norm.", ".layer_norms.0.")
        name = name.replace(".encoder_attn_layer_norm.", ".layer_norms.1.")
        number = "1" if name.startswith("encoder") else "2"
        name = name.replace(".final_layer_norm.", f".layer_norms.{number}.")
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            parts = [weights[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            name, tensor = name.replace(".q_proj.", ".in_proj_"), torch.cat(parts)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("layout", [fairseq_weights, old_weights, None], ids=["0.12.2", "0.5", "FSMT"])
def test_logits_beams_and_sinusoids_equal_those_of_fsmt(fsmt, layout, tmp_path):
    if layout is None:
        ours = from_fsmt(fsmt)
    else:
        ours = from_fairseq(save(tmp_path / "checkpoint.pt", layout(fsmt), old=layout is old_weights))
    inputs = {"input_ids": SOURCE, "attention_mask": MASK}
    with torch.no_grad():
        theirs = fsmt(**inputs, decoder_input_ids=TARGET, use_cache=False).logits
        assert_close(ours(**inputs, decoder_input_ids=TARGET).logits, theirs)
    assert ours.generate(**inputs, **BEAMS).tolist() == fsmt.generate(**inputs, **BEAMS).tolist()
    if layout is None:
        assert ours.generation_config == fsmt.generation_config
    assert ours.config.tie_word_embeddings and not ours.config.share_encoder_decoder_embeddings
    assert torch.equal(ours.model.encoder.embed_positions.weight, fsmt.model.encoder.embed_positions.weight[2:42])


def test_pre_norm_and_learned_positions(fsmt, tmp_path):
    weights = fairseq_weights(fsmt)
    for side, rows in [("encoder", 42), ("decoder", 52)]:
        del weights[f"{side}.embed_positions._float_tensor"]
        weights[f"{side}.embed_positions.weight"] = torch.randn(rows, 16)
        weights |= {f"{side}.layer_norm.weight": torch.rand(16), f"{side}.layer_norm.bias": torch.randn(16)}
    is_pre_norm = {"encoder_normalize_before": True, "decoder_normalize_before": True}
    ours = from_fairseq(save(tmp_path / "checkpoint.pt", weights, **is_pre_norm))
    assert ours.config.norm_first and ours.config.max_position_embeddings == 40
    for side in ("encoder", "decoder"):
        converted = getattr(ours.model, side)
        assert torch.equal(converted.embed_positions.weight, weights[f"{side}.embed_positions.weight"][2:42])
        assert torch.equal(converted.layer_norm.bias, weights[f"{side}.layer_norm.bias"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layernorm_embedding": True}, "--layernorm-embedding"),
        ({"adaptive_softmax_cutoff": "10,20"}, "--adaptive-softmax-cutoff"),
        ({"encoder_normalize_before": True}, "Missing key.*layer_norm"),
    ],
)
def test_other_architectures_are_refused(fsmt, options, named, tmp_path):
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){named}"):
        from_fairseq(save(tmp_path / "checkpoint.pt", fairseq_weights(fsmt), **options))


class Harmful:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


@pytest.mark.parametrize("content", ["truncated", "harmful", "foreign", "text", "language model"])
def test_other_files_are_refused_and_run_no_code(fsmt, content, tmp_path):
    path = tmp_path / "checkpoint.pt"
    save(path, fairseq_weights(fsmt))
    if content == "foreign":
        torch.save({"state_dict": {}}, path)
    elif content == "language model":
        torch.save({"args": argparse.Namespace(decoder_layers=2), "model": {}}, path)
    else:
        wrong = {"truncated": path.read_bytes()[:-2000], "harmful": pickle.dumps(Harmful()), "text": b"no checkpoint"}
        path.write_bytes(wrong[content])
    with pytest.raises(ValueError, match="is not a checkpoint of fairseq's `transformer`, or it is damaged"):
        from_fairseq(path)


# ---------------------------------------------------------------------------------------------------------- tokenizer

# `low lower newest` in the pieces of subword-nmt.
DICTIONARY = "low 5\nlow@@ 3\ner 2\nn@@ 4\nw@@ 1\nest 2\ne@@ 9\nmadeupword0000 0\n"
CODES = "#version: 0.2\nl o\nlo w\nlo w</w>\ne r</w>\ne s\nes t</w>\n"


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "dict.txt").write_text(DICTIONARY)
    (tmp_path / "codes").write_text(CODES)
    tokenizer, size = fairseq_tokenizer(tmp_path / "dict.txt", tmp_path / "codes")
    assert size == 12
    return tokenizer


def test_ids_are_those_of_the_dictionary(tokenizer, tmp_path):
    ids = tokenizer("low lower newest").input_ids
    assert ids == [4, 5, 6, 7, 10, 8, 9, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "low lower newest"
    words, _ = fairseq_tokenizer(tmp_path / "dict.txt")
    assert words("low lower low").input_ids == [4, 3, 4, 2]
    assert words.decode([4, 4, 2], skip_special_tokens=True) == "low low"


def test_pieces_that_the_dictionary_lacks_are_read_as_unknown_and_never_written(tokenizer, tmp_path):
    fsmt, size = make_fsmt(12), 12
    ids = tokenizer("low les n").input_ids
    assert ids == [4, 12, 10, 3, 3, 2]  # `l` is built for `low`, but not in the dictionary
    ours = from_fairseq(save(tmp_path / "checkpoint.pt", fairseq_weights(fsmt)), size, len(tokenizer) - size)
    as_in_fairseq = torch.tensor([[min(index, 3) if index >= size else index for index in ids]])
    inputs = {"decoder_input_ids": torch.tensor([[2, 5, 10, 6]])}
    with torch.no_grad():
        expected = fsmt(as_in_fairseq, **inputs, use_cache=False).logits.log_softmax(dim=-1)
        found = ours(torch.tensor([ids]), **inputs).logits.log_softmax(dim=-1)
    assert_close(found[..., :size], expected)
    assert found[..., size:].max() < -20
    assert ours.generate(torch.tensor([ids]), **BEAMS).tolist() == fsmt.generate(as_in_fairseq, **BEAMS).tolist()
    assert Translator(ours, tokenizer)(["low les n"], max_new_tokens=5, num_beams=1) != [""]


WRONG_LINES = [("dict.txt", "low\n"), ("dict.txt", "low x\n"), ("codes", "a b c\n")]
WRONG_LINES += [("dict.txt", "new 5 #fairseq:overwrite\n"), ("dict.txt", "low 3\n"), ("dict.txt", "<unk> 4\n")]


@pytest.mark.parametrize(("name", "text"), WRONG_LINES)
def test_damaged_dictionaries_and_codes_are_named_with_the_line(tokenizer, name, text, tmp_path):
    with open(tmp_path / name, "a") as file:
        file.write(text)
    with pytest.raises(ValueError, match=rf"Line \d of .*{name} (is not|repeats)"):
        fairseq_tokenizer(tmp_path / "dict.txt", tmp_path / "codes")


@pytest.mark.parametrize("version", ["", "#version: 0.1\n"])
def test_codes_of_another_version_are_refused(tokenizer, version, tmp_path):
    """Their merges differ: `low </w>` is a pair there."""
    (tmp_path / "codes").write_text(f"{version}l o\nlo w\nlow </w>\n")
    with pytest.raises(UserError, match="codes does not begin with `#version: 0.2`"):
        fairseq_tokenizer(tmp_path / "dict.txt", tmp_path / "codes")


@pytest.mark.parametrize("name", ["dict.txt", "codes"])
def test_a_file_that_is_no_text_is_named(tokenizer, name, tmp_path):
    (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=rf"{name} cannot be read as a text in UTF-8"):
        fairseq_tokenizer(tmp_path / "dict.txt", tmp_path / "codes")


def test_line_separators_within_pieces_are_characters(tokenizer, tmp_path):
    (tmp_path / "codes").write_text(f"{CODES}\u2028 \x85</w>\n", encoding="utf-8", newline="")
    found, _ = fairseq_tokenizer(tmp_path / "dict.txt", tmp_path / "codes")
    assert found.tokenize("low lower newest") == tokenizer.tokenize("low lower newest")
    assert "\u2028\x85</w>" in found.get_vocab()


def test_the_convert_command_makes_model_and_tokenizer(tokenizer, tmp_path, capsys):
    files = ["--dictionary", str(tmp_path / "dict.txt"), "--codes", str(tmp_path / "codes")]
    path = save(tmp_path / "checkpoint.pt", fairseq_weights(make_fsmt(12)))
    main(["convert", path, str(tmp_path / "new"), *files])
    expected = Translator(from_fairseq(path, 12, len(tokenizer) - 12), tokenizer)(["low les n"], max_new_tokens=5)
    assert Translator.from_pretrained(str(tmp_path / "new"))(["low les n"], max_new_tokens=5) == expected
    other = save(tmp_path / "other.pt", fairseq_weights(make_fsmt(37)))
    message = command_error(capsys, "convert", other, tmp_path / "newer", *files)
    assert "the dictionary has 12 tokens, but the encoder has 37 embeddings" in message
    assert not (tmp_path / "newer").exists()
    assert "--codes need --dictionary" in command_error(capsys, "convert", path, tmp_path / "newer", *files[2:])
    assert "is not a file" in command_error(capsys, "convert", tmp_path / "no.pt", tmp_path / "newer")
    missing = ["--dictionary", tmp_path / "no.txt"]
    assert "No such file or directory: " in command_error(capsys, "convert", path, tmp_path / "newer", *missing)
