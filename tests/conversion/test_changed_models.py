"""A conversion refuses what it does not know, by name: weights, modules, positions, quantized weights."""

import sys

import pytest
import torch
from helpers import ROOT, TINY, Softcapped, command_error, randomise, save_untrained, small_model
from safetensors.torch import load_file, save_file
from test_conversion import TorchTranslator, make_marian
from test_fairseq import fairseq_weights, make_fsmt, save
from torch import nn

from vanilla_transformer.conversion import from_fairseq, from_fsmt, from_native, to_native
from vanilla_transformer.errors import UserError

sys.path.append(str(ROOT / "examples"))
from relative_position_bias import RelativeConfig, RelativeTransformer  # noqa: E402


def to_ctranslate2(model):
    pytest.importorskip("ctranslate2")
    from vanilla_transformer.conversion.ctranslate2 import to_ctranslate2

    to_ctranslate2(model, None, None)  # refused before anything else is looked at


def relative(model):
    return RelativeTransformer(RelativeConfig(**TINY))


def one_more_weight(model):
    model.model.decoder.layers[0].gate = nn.Parameter(torch.ones(1))


def one_weight_less(model):
    model.model.encoder.layers[1].fc1.register_parameter("bias", None)


def wider(model):
    model.model.encoder.layers[1].fc1 = nn.Linear(16, 25)


def other_activation(model):
    model.model.encoder.layers[0].activation_fn = nn.GELU()


def other_class(model):
    model.__class__ = type("Softcapped", (type(model),), {})


def other_forward(model):
    layer = model.model.decoder.layers[1]
    layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)


def quantized(model):
    """As bitsandbytes stores weights."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)


CHANGES = {
    relative: "RelativeTransformer.* unknown: `model.decoder.layers.0.self_attn.relative_bias.weight` and 3 m",
    one_more_weight: "weights are unknown: `model.decoder.layers.0.gate`",
    one_weight_less: "weights are missing: `model.encoder.layers.1.fc1.bias`",
    wider: "of another shape than in its config: `model.encoder.layers.1.fc1.bias` and 1 more",
    other_activation: "`model.encoder.layers.0.activation_fn` is a GELU",
    other_class: "`the model` is a Softcapped",
    other_forward: "`model.decoder.layers.1` is a VanillaTransformerDecoderLayer with a `forward` of its own",
    quantized: "model is quantized; convert the one that it was made from, and quantize the result",
}


@pytest.mark.parametrize(("change", "message"), CHANGES.items(), ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("convert", [to_ctranslate2, to_native])
def test_a_changed_model_is_refused_by_name(convert, change, message):
    model = small_model(tie_word_embeddings=False)
    with pytest.raises(UserError, match=message):
        convert(change(model) or model)


def with_other_attention(model):
    """Of which no weight tells."""
    attention = model.model.decoder.layers[-1].self_attn
    attention.__class__ = type("OtherAttention", (type(attention),), {})
    return model


def other_positions(marian):
    marian.model.encoder.embed_positions.weight.data += 0.1
    return marian


def other_torch_layer():
    theirs = TorchTranslator()
    layer = theirs.transformer.encoder.layers[1]
    layer.__class__ = type("OtherLayer", (type(layer),), {})
    return theirs.convert()


FOREIGN = {
    "marian": (lambda: from_native(with_other_attention(make_marian())), "decoder.layers.1.self_attn` is a Other"),
    "positions": (
        lambda: from_native(other_positions(make_marian())),
        "`model.encoder.embed_positions.weight` is",
    ),
    "fsmt": (lambda: from_fsmt(with_other_attention(make_fsmt(37))), "decoder.layers.0.self_attn` is a Other"),
    "torch": (other_torch_layer, "`encoder.layers.1` is a OtherLayer"),
}


@pytest.mark.parametrize(("convert", "message"), FOREIGN.values(), ids=FOREIGN)
def test_foreign_modules_of_other_classes_are_refused_by_name(convert, message):
    with pytest.raises(UserError, match=message):
        convert()


@pytest.mark.parametrize("name", ["encoder.layers.0.self_attn.relative_keys", "decoder.adapter.weight"])
def test_unknown_weights_of_fairseq_are_refused_by_name(name, tmp_path):
    fsmt = make_fsmt(37)
    path = save(tmp_path / "checkpoint.pt", fairseq_weights(fsmt) | {name: torch.ones(2)})
    with pytest.raises(RuntimeError, match=rf"Unexpected key.*model\.{name}"):
        from_fairseq(path)


@pytest.mark.parametrize("to", ["native", "ctranslate2", "onnx"])
def test_saved_weights_that_are_unknown_are_refused_by_the_command(to, tmp_path, capsys):
    file = save_untrained(tmp_path / "ours") / "model.safetensors"
    save_file(load_file(file) | {"model.encoder.bias": torch.ones(2)}, file, {"format": "pt"})
    message = command_error(capsys, "convert", tmp_path / "ours", tmp_path / "new", "--to", to)
    assert "1 unexpected (such as model.encoder.bias)" in message and not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RelativeTransformer, Softcapped])
def test_onnx_graphs_compute_what_a_changed_model_does_or_are_refused(kind, byte_tokenizer, tmp_path):
    """The graphs have the layers, whatever they compute, but not the `forward` of the whole model."""
    pytest.importorskip("onnxruntime")
    from vanilla_transformer.conversion.onnx import to_onnx

    sizes = TINY | {"vocab_size": len(byte_tokenizer), "encoder_layers": 1, "decoder_layers": 1}
    model = randomise(kind(RelativeConfig(**sizes, max_distance=2))).eval()
    if kind is Softcapped:
        with pytest.raises(ValueError, match="Softcapped was changed.*the logits of its ONNX graphs differ by"):
            to_onnx(model, byte_tokenizer, tmp_path)
    else:
        to_onnx(model, byte_tokenizer, tmp_path)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="The model is quantized"):
        to_onnx(model, byte_tokenizer, tmp_path / "int8")
