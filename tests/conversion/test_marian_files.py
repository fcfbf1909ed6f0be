"""Marian's own files hold the same model, and come back as it; the engines themselves are asked in test_deployment."""

import json
import struct

import numpy as np
import pytest
import torch
from helpers import MASK, SOURCE, TARGET, TEXTS, assert_close, command_error, small_model
from transformers import AutoTokenizer

from vanilla_transformer.__main__ import main
from vanilla_transformer.conversion.marian_reader import from_marian_files
from vanilla_transformer.conversion.marian_writer import to_marian_files
from vanilla_transformer.data.tokenizer import special_token_ids, train_unigram_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import load_model

WIDTHS = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 64, "decoder_attention_heads": 4}
ALL_SHARED = {"position_embedding_type": "marian", "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def tokenizer():
    return train_unigram_tokenizer(TEXTS, 330)


def model_of(tokenizer, **config):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), **special_token_ids(tokenizer)}
    return small_model(**WIDTHS, **sizes, **{**ALL_SHARED, **config})


def scores(model, tokenizer) -> torch.Tensor:
    """The log-probabilities of the pieces; the tokens after them are never written."""
    with torch.no_grad():
        return model(SOURCE, MASK, TARGET).logits[..., : len(tokenizer) - 2].log_softmax(-1)


@pytest.mark.parametrize("config", [{}, {"lm_head_bias": True, "activation_function": "silu"}], ids=["plain", "bias"])
def test_a_model_comes_back(tokenizer, config, tmp_path):
    """Its norms add 1e-6."""
    model = model_of(tokenizer, **config, layer_norm_eps=1e-6)
    to_marian_files(model, tokenizer, tmp_path)
    again, its_tokenizer = from_marian_files(tmp_path / "model.npz", tmp_path / "vocab.spm")
    texts = [*TEXTS, "e\u0301te\u0301 \u200b 犬"]
    assert its_tokenizer(texts).input_ids == tokenizer(texts).input_ids
    assert_close(scores(again, tokenizer), scores(model, tokenizer))
    assert again.lm_head.bias[len(tokenizer) - 2 :].max() < -1000
    to_marian_files(again, its_tokenizer, tmp_path)
    third, _ = from_marian_files(tmp_path / "model.npz", tmp_path / "vocab.spm")
    assert torch.equal(scores(third, tokenizer), scores(again, tokenizer))


def read_bin(path) -> dict[str, tuple[int, np.ndarray]]:
    """The type and the values of each item, read as marian-dev's common/binary.cpp does."""
    content = path.read_bytes()
    version, count = struct.unpack_from("<QQ", content)
    heads = [struct.unpack_from("<4Q", content, 16 + 32 * i) for i in range(count)]
    at, names, shapes, items = 16 + 32 * count, [], [], {}
    for length, *_ in heads:
        names.append(content[at : at + length - 1].decode())
        at += length
    for _, _, dimensions, _ in heads:
        shapes.append(struct.unpack_from(f"<{dimensions}i", content, at))
        at += 4 * dimensions
    (gap,) = struct.unpack_from("<Q", content, at)
    at += 8 + gap
    for name, shape, (_, kind, _, length) in zip(names, shapes, heads, strict=True):
        assert at % 256 == 0
        values = np.frombuffer(content, np.float32 if kind == 0x0404 else np.int8, int(np.prod(shape)), at)
        scale = np.frombuffer(content, np.float32, 1, at + values.size)[0] if kind == 0x4101 else 1
        items[name] = kind, values / scale if name[0] != "s" else values, shape
        at += length
    assert (version, at) == (1, len(content))
    return items


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_binary_file_has_the_same_arrays(tokenizer, quantization, tmp_path):
    to_marian_files(model_of(tokenizer), tokenizer, tmp_path, quantization)
    arrays, items = dict(np.load(tmp_path / "model.npz")), read_bin(tmp_path / "model.bin")
    assert items.keys() == arrays.keys()
    quantized = {name for name, (kind, *_) in items.items() if kind == 0x4101}
    assert len(quantized) == (0 if quantization is None else 1 + 2 * 6 + 2 * 10)  # embeddings and the layers' matrices
    for name, (_, values, shape) in items.items():
        array = arrays[name]
        if name == "special:model.yml":
            array = np.pad(array, (0, -len(array) % 256))
        assert shape == array.shape
        if name in quantized and name != "Wemb":
            array = array.T
        assert np.abs(values - array.ravel()).max() <= np.abs(array).max() / (254 if name in quantized else np.inf)


def test_padding_rows_make_the_vocabulary_a_multiple_of_eight(tokenizer, tmp_path):
    to_marian_files(model_of(tokenizer), tokenizer, tmp_path)
    rows = len(np.load(tmp_path / "model.npz")["Wemb"])
    assert rows % 8 == 0 and 0 <= rows - (len(tokenizer) - 2) < 8


def test_the_convert_command_writes_and_reads_them(tokenizer, tmp_path, capsys):
    model_of(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    main(
        ["convert", str(tmp_path / "model"), str(tmp_path / "marian"), "--to", "marian-bin", "--quantization", "int8"]
    )
    files = {path.name for path in (tmp_path / "marian").iterdir()}
    assert files == {"model.npz", "model.bin", "vocab.spm", "config.yml"}
    npz, spm = tmp_path / "marian" / "model.npz", tmp_path / "marian" / "vocab.spm"
    with np.load(npz) as arrays:  # Marian writes 0 for "as in the encoder"
        text = arrays["special:model.yml"].tobytes().replace(b"decoder-ffn-depth: 2", b"decoder-ffn-depth: 0")
        np.savez(npz, **{**arrays, "special:model.yml": np.frombuffer(text, np.int8)})
    main(["convert", str(npz), str(tmp_path / "back"), "--dictionary", str(spm)])
    back = load_model(tmp_path / "back")
    assert torch.equal(scores(back, tokenizer), scores(from_marian_files(npz, spm)[0], tokenizer))
    assert AutoTokenizer.from_pretrained(tmp_path / "back")(TEXTS).input_ids == tokenizer(TEXTS).input_ids


REFUSED = {
    "pre-norm": ({"norm_first": True}, "`norm_first=True` has no form for Marian"),
    "positions": ({"position_embedding_type": "sinusoidal"}, "`position_embedding_type='sinusoidal'` has no form"),
    "untied": ({"tie_word_embeddings": False}, "`tie_word_embeddings=False` has no form"),
    "heads": ({"decoder_attention_heads": 2}, "`decoder_attention_heads=2` has no form"),
    "activation": ({"activation_function": "gelu"}, "Marian has no activation function 'gelu'"),
    "widths": ({"d_model": 32}, "must be a multiple of 64"),
}


@pytest.mark.parametrize("config, message", REFUSED.values(), ids=REFUSED)
def test_what_marian_lacks_is_refused(tokenizer, config, message, tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {**WIDTHS, "vocab_size": len(tokenizer), **special_token_ids(tokenizer), **ALL_SHARED, **config}
    small_model(**sizes).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    form = ["--to", "marian-bin", "--quantization", "int8"]
    assert message in command_error(capsys, "convert", tmp_path / "model", tmp_path / "new", *form)
    assert not (tmp_path / "new").exists()


def test_another_tokenizer_is_refused(text_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="--tokenizer_type unigram"):
        to_marian_files(small_model(**ALL_SHARED), text_tokenizer, tmp_path)


def test_tags_of_languages_are_refused_and_others_named(tmp_path):
    tagged = train_unigram_tokenizer(TEXTS, 330, tags=[">>de<<", ">>fr<<"])
    with pytest.raises(UserError, match="has the tag >>de<<, which Marian cannot read"):
        to_marian_files(model_of(tagged), tagged, tmp_path)
    tagged = train_unigram_tokenizer(TEXTS, 330, tags=["<bt>"])
    with pytest.warns(UserWarning, match="cannot read the tags <bt>"):
        to_marian_files(model_of(tagged), tagged, tmp_path)


def option(line: str):
    """The array of the options with a last line that wins."""
    return lambda options: np.frombuffer(options.tobytes().rstrip(b"\0") + f"{line}\n".encode(), np.int8)


def text(content: bytes):
    return lambda _: np.frombuffer(content, np.int8)


OPTIONS, QUERIES, BIAS = "special:model.yml", "encoder_l1_self_Wq", "decoder_l1_self_bq"
CHANGES = {  # an array, what it becomes, if anything, and part of the message
    "another decoder": (OPTIONS, option("transformer-decoder-autoreg: rnn"), "transformer-decoder-autoreg: rnn"),
    "another activation": (OPTIONS, option("transformer-ffn-activation: gelu"), "the activation function gelu"),
    "no options": (OPTIONS, text(b"{}"), "are incomplete or wrong: 'transformer-heads'"),
    "options that are text": (OPTIONS, text(b"words"), "are incomplete or wrong: 'str' object has"),
    "one more array": ("encoder_Wpos", lambda _: np.zeros((3, 64), np.float32), "has encoder_Wpos"),
    "one array less": (QUERIES, None, f"has no {QUERIES}"),
    "no embeddings": ("Wemb", None, "is not a model of Marian: 'Wemb'"),
    "embeddings without width": ("Wemb", lambda array: array[:, 0], "do not fit its options"),
    "another width": ("Wemb", lambda array: array[:, :32], "do not fit its options"),
    "another width of a layer": (QUERIES, lambda array: array[:, :32], "do not fit its options"),
    "a bias without rows": (BIAS, lambda array: array[:, 0], "do not fit its options"),
}


@pytest.mark.parametrize("name, change, message", CHANGES.values(), ids=CHANGES)
def test_other_and_damaged_models_of_marian_are_refused(tokenizer, name, change, message, tmp_path, capsys):
    to_marian_files(model_of(tokenizer), tokenizer, tmp_path)
    arrays = dict(np.load(tmp_path / "model.npz"))
    array = arrays.pop(name, None)
    if change:
        arrays[name] = change(array)
    np.savez(tmp_path / "other.npz", **arrays)
    given = [tmp_path / "other.npz", tmp_path / "new", "--dictionary", tmp_path / "vocab.spm"]
    assert message in command_error(capsys, "convert", *given)


@pytest.mark.parametrize("kind", ["truncated", "an array"])
def test_a_file_that_holds_no_arrays_is_refused(tokenizer, kind, tmp_path, capsys):
    to_marian_files(model_of(tokenizer), tokenizer, tmp_path)
    content = (tmp_path / "model.npz").read_bytes()
    (tmp_path / "model.npz").write_bytes(content[: len(content) // 2])
    if kind == "an array":
        np.save(tmp_path / "model.npy", np.zeros(3))
        (tmp_path / "model.npy").rename(tmp_path / "model.npz")
    given = [tmp_path / "model.npz", tmp_path / "new", "--dictionary", tmp_path / "vocab.spm"]
    assert "model.npz is not a model of Marian: " in command_error(capsys, "convert", *given)


@pytest.mark.parametrize("damaged", ["model.npz", "vocab.spm"])
def test_damaged_files_are_refused(tokenizer, damaged, tmp_path, capsys):
    to_marian_files(model_of(tokenizer), tokenizer, tmp_path)
    (tmp_path / damaged).write_bytes(json.dumps({}).encode())
    given = [tmp_path / "model.npz", tmp_path / "new", "--dictionary", tmp_path / "vocab.spm"]
    assert damaged in command_error(capsys, "convert", *given)
    assert "needs its vocabulary" in command_error(capsys, "convert", *given[:2])


@pytest.mark.parametrize("is_larger", [False, True])
def test_another_vocabulary_is_refused(tokenizer, is_larger, tmp_path, capsys):
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    to_marian_files(model_of(tokenizer), tokenizer, tmp_path)
    rows = len(np.load(tmp_path / "model.npz")["Wemb"])
    model = ModelProto.FromString((tmp_path / "vocab.spm").read_bytes())
    for number in range(20):
        if is_larger:
            model.pieces.add(piece=f"more{number}", score=-99.0)
        else:
            model.pieces.pop()
    (tmp_path / "other.spm").write_bytes(model.SerializeToString())
    message = (
        f"model.npz has {rows} tokens and {tmp_path / 'other.spm'} has {len(model.pieces)}; give the vocabulary of"
    )
    given = [tmp_path / "model.npz", tmp_path / "new", "--dictionary", tmp_path / "other.spm"]
    assert message in command_error(capsys, "convert", *given)
