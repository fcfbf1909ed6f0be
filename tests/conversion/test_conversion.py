"""Converted models compute the same as their source."""

import copy
import json
import math
import os
import re
import shutil
from pickle import UnpicklingError

import pytest
import torch
from helpers import LABELS, MASK, SOURCE, TARGET, TINY, assert_close, command_error, randomise, translate_by_marian
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import nn
from transformers import MarianConfig, MarianMTModel

from vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from vanilla_transformer.__main__ import main
from vanilla_transformer.conversion import from_native, from_torch_transformer
from vanilla_transformer.conversion.tensors import interleave, rename
from vanilla_transformer.conversion.torch_transformer import TORCH_TRANSFORMER
from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import load_foreign
from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_positions


def assert_same_gradients(ours: nn.Module, theirs: dict[str, torch.Tensor]):
    """`theirs` is under our names; there is one for each parameter of ours and no other."""
    parameters = dict(ours.named_parameters(remove_duplicate=False))
    assert set(theirs) <= set(parameters)
    assert {id(parameters[name]) for name in theirs} == {id(parameter) for parameter in ours.parameters()}
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, name
        assert_close(parameters[name].grad, gradient)


class TorchTranslator(nn.Module):
    """`torch.nn.Transformer` with embeddings and output projection, as it is usually used."""

    def __init__(self, norm_first=False, separate=False, head=None, activation="relu", batch_first=True, **kwargs):
        super().__init__()
        self.transformer = nn.Transformer(
            16, 4, 2, 3, 24, 0.0, activation=activation, norm_first=norm_first, batch_first=batch_first, **kwargs
        )
        if isinstance(activation, nn.Module):
            for layer in self.transformer.decoder.layers:
                layer.activation = activation  # torch's copies of the layer lose it
        if not norm_first:
            self.transformer.encoder.norm = self.transformer.decoder.norm = None
        self.source_embeddings = nn.Embedding(41 if separate else 37, 16)
        self.target_embeddings = nn.Embedding(37, 16) if separate else self.source_embeddings
        self.lm_head = None if head is None else nn.Linear(16, 37, bias=head != "no bias")
        if head == "tied":
            self.lm_head.weight = self.target_embeddings.weight
        randomise(self)

    def convert(self, **config):
        target = None if self.target_embeddings is self.source_embeddings else self.target_embeddings
        return from_torch_transformer(self.transformer, self.source_embeddings, target, self.lm_head, **config)

    def forward(self, source, mask, target):
        def embed(embeddings, ids):
            x = embeddings(ids) * math.sqrt(16) + sinusoidal_positions(torch.arange(ids.shape[1]), 16)
            return x if self.transformer.batch_first else x.transpose(0, 1)

        x, y = embed(self.source_embeddings, source), embed(self.target_embeddings, target)
        masks = {"tgt_mask": torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)}
        masks |= dict.fromkeys(("src_key_padding_mask", "memory_key_padding_mask"), mask == 0)
        x = self.transformer(x, y, **masks)
        x = x if self.transformer.batch_first else x.transpose(0, 1)
        return x @ self.target_embeddings.weight.T if self.lm_head is None else self.lm_head(x)


TORCH = {
    "post-norm": {},
    "pre-norm": {"norm_first": True, "activation": torch.tanh},
    "untied": {"norm_first": True, "separate": True, "head": "bias", "activation": "gelu"},
    "tied": {"separate": True, "activation": nn.GELU(approximate="tanh")},
    "tied to a head": {"head": "tied"},
    "shared": {"head": "no bias", "activation": nn.functional.silu, "batch_first": False, "layer_norm_eps": 1e-2},
}


@pytest.mark.parametrize("options", TORCH.values(), ids=TORCH)
def test_logits_loss_and_gradients_equal_torch_transformer(options):
    theirs = TorchTranslator(**options)
    ours = theirs.convert().train()
    decoder_input_ids = ours.prepare_decoder_input_ids_from_labels(LABELS)
    their_logits = theirs(SOURCE, MASK, decoder_input_ids)
    their_loss = nn.functional.cross_entropy(their_logits.flatten(0, 1), LABELS.flatten(), ignore_index=-100)
    their_loss.backward()

    our_loss = ours(SOURCE, MASK, labels=LABELS).loss
    our_loss.backward()
    assert_close(ours.eval()(SOURCE, MASK, decoder_input_ids).logits, their_logits)
    assert_close(our_loss, their_loss)
    gradients = {name.removeprefix("transformer."): p.grad for name, p in theirs.named_parameters()}
    assert_same_gradients(ours, rename(gradients, TORCH_TRANSFORMER))


def test_dropout_is_read_from_torch_transformer_and_options_are_passed_on():
    transformer = nn.Transformer(16, 4, 2, 3, 24, 0.3, norm_first=True, activation=lambda x: x.tanh())
    options = {"scale_embedding": False, "eos_token_id": 7, "position_embedding_type": "rotary"}
    options |= {"activation_function": "tanh"}  # whose name a lambda does not tell
    expected = options | dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.3)
    config = from_torch_transformer(transformer, torch.randn(13, 16), **options).config
    assert {name: getattr(config, name) for name in expected} == expected


ENCODER, DECODER = "transformer.encoder.layers", "transformer.decoder.layers"


def lose_activation(theirs):
    theirs.transformer = nn.Transformer(16, 4, 2, 3, 24, activation=nn.GELU())
    theirs.transformer.encoder.norm = theirs.transformer.decoder.norm = None


def replace(path, module):
    """A change of a TorchTranslator: another module in place of the named one."""
    parent, _, name = path.rpartition(".")
    return lambda theirs: setattr(theirs.get_submodule(parent), name, module)


NORM = nn.LayerNorm(16)
DIFFERENT = {
    "no biases": ({"norm_first": True, "bias": False}, None, "Missing key.*encoder.layers.0.self_attn.q_proj.bias"),
    "two norms": ({}, replace("transformer.encoder.norm", NORM), "encoder.norm = transformer.decoder.norm = No"),
    "extra norm": ({}, replace("transformer.decoder.norm", NORM), "encoder.norm = transformer.decoder.norm = No"),
    "one norm": ({"norm_first": True}, replace("transformer.decoder.norm", None), "Missing key.*decoder.layer_norm"),
    "heads": ({}, replace(f"{ENCODER}.1", nn.TransformerEncoderLayer(16, 8, 24, 0.0)), "differ in num_heads: 4, 8"),
    "ffn": ({}, replace(f"{ENCODER}.1", nn.TransformerEncoderLayer(16, 4, 32, 0.0)), r"layers\.1\.fc1\.weight"),
    "activations": ({}, lose_activation, "differ in activation: gelu, relu"),
    "gate": ({}, replace(f"{DECODER}.1.gate", nn.Linear(16, 1)), r"Unexpected key.*decoder\.layers\.1\.gate"),
    "activation": ({"activation": nn.functional.hardtanh}, None, "it is 'hardtanh'; it must be one of"),
    "width": ({"separate": True}, replace("target_embeddings", nn.Embedding(37, 8)), "embed_tokens.weight"),
    "head": ({"head": "bias"}, replace("lm_head", nn.Linear(16, 38)), "mismatch for lm_head.weight"),
}


@pytest.mark.parametrize(("options", "change", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_torch_transformer_without_counterpart_is_refused(options, change, message):
    theirs = TorchTranslator(**options)
    if change:
        change(theirs)
    with pytest.raises((ValueError, RuntimeError, StrictDataclassError), match=f"(?s){message}"):
        theirs.convert()


WRONG_FIELDS = [
    ({"d_model": 16}, "multiple values for keyword argument 'd_model'"),
    ({"position_embedding_type": "learned"}, "Missing key.*encoder.embed_positions.weight"),
    ({"scale_embeding": False}, "did you mean `scale_embedding`"),
]


@pytest.mark.parametrize(("config", "message"), WRONG_FIELDS)
def test_wrong_config_fields_of_a_torch_transformer_are_refused(config, message):
    with pytest.raises((ValueError, RuntimeError, TypeError), match=f"(?s){message}"):
        TorchTranslator().convert(**config)


def make_marian(bias=False, **config) -> MarianMTModel:
    """A random Marian model; its decoder starts with padding, which must not be generated."""
    ids = {"pad_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": 2, "decoder_start_token_id": 0}
    defaults = TINY | ids | {"activation_function": "swish", "scale_embedding": True}
    model = MarianMTModel(MarianConfig(**defaults | config))
    randomise(model)
    if bias:
        model.final_logits_bias.normal_()
    model.generation_config.update(bad_words_ids=[[0]], max_length=20, num_beams=3, length_penalty=0.7)
    return model.eval()


SEPARATE = {"share_encoder_decoder_embeddings": False, "vocab_size": 41, "decoder_vocab_size": 37}
MARIANS = {
    "shared": {},
    "bias": {"bias": True},
    "unscaled": {"scale_embedding": False, "activation_function": "relu"},
    "separate": SEPARATE | {"bias": True},
    "separate-untied": SEPARATE | {"tie_word_embeddings": False},
    "all-untied": {"tie_word_embeddings": False, "activation_function": "gelu"},
}
marians = pytest.mark.parametrize("options", MARIANS.values(), ids=MARIANS)


@marians
def test_logits_loss_and_gradients_equal_marian(options):
    theirs = make_marian(**options)
    ours = from_native(theirs)
    for stack in [theirs.model.encoder, theirs.model.decoder]:
        stack.embed_tokens.padding_idx = None  # or the start token, which is padding, gets no gradient
    their_output = theirs(SOURCE, MASK, labels=LABELS)
    their_output.loss.backward()
    gradients = interleave({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    if options.get("bias"):  # a parameter here, a constant there
        residual = torch.nn.functional.one_hot(LABELS.clamp(min=0), 37) - their_output.logits.softmax(-1)
        gradients["lm_head.bias"] = -residual[LABELS != -100].mean(dim=0).detach()

    assert_close(ours(SOURCE, MASK, labels=LABELS).logits, their_output.logits)
    for output_logits in (True, False):
        ours.zero_grad()
        our_loss = ours.train()(SOURCE, MASK, labels=LABELS, output_logits=output_logits).loss
        our_loss.backward()
        assert_close(our_loss, their_output.loss)
        assert_same_gradients(ours, gradients)


@marians
@pytest.mark.parametrize("num_beams", [1, 3])
def test_translations_equal_marian(options, num_beams):
    theirs = make_marian(**options)
    ours = from_native(theirs)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.generation_config is not theirs.generation_config
    search = {"attention_mask": MASK, "num_beams": num_beams, "return_dict_in_generate": True, "output_scores": True}
    our_output, their_output = ours.generate(SOURCE, **search), theirs.generate(SOURCE, **search)
    assert torch.equal(our_output.sequences, their_output.sequences)
    for our_scores, their_scores in zip(our_output.scores, their_output.scores, strict=True):
        assert_close(our_scores, their_scores)


def test_positions_extend_beyond_marians_table():
    short, long = make_marian(max_position_embeddings=4), make_marian(max_position_embeddings=64)
    long.load_state_dict({n: t for n, t in short.state_dict().items() if "embed_positions" not in n}, strict=False)
    assert_close(from_native(short)(SOURCE, MASK, TARGET).logits, long(SOURCE, MASK, TARGET).logits)


OTHER_TENSORS = [
    ("encoder.layers.1.fc2", nn.Linear(24, 16, bias=False), "Missing key(s) in state_dict: {}.bias"),
    ("encoder.layers.1.fc2", nn.Linear(23, 16), "mismatch for {}.weight"),
    ("decoder.layers.1.adapter", nn.Linear(16, 16), "Unexpected key(s) in state_dict: {}.weight"),
]


@pytest.mark.parametrize(("path", "module", "message"), OTHER_TENSORS)
def test_marian_with_other_tensors_is_refused(path, module, message):
    theirs = make_marian()
    replace(f"model.{path}", module)(theirs)
    with pytest.raises(RuntimeError) as error:
        from_native(theirs)
    assert message.format(f"model.{path}") in str(error.value).replace('"', "")


def test_load_foreign_passes_options_on(marian):
    expected = from_native(MarianMTModel.from_pretrained(marian))
    options = {"dropout": 0.3, "dtype": torch.float64, "attn_implementation": "eager"}
    ours = load_foreign(str(marian), use_safetensors=True, **options)
    assert ours.config.to_diff_dict() == expected.config.to_diff_dict() | {"dropout": 0.3, "dtype": "float64"}
    assert ours.config._attn_implementation == ours.model.decoder.config._attn_implementation == "eager"
    assert ours.generation_config.to_dict() == expected.generation_config.to_dict()
    assert_close(ours.state_dict(), expected.double().state_dict(), 0)


@pytest.fixture(params=["marian", "ours"])
def saved(request, marian, make_model, tmp_path):
    if request.param == "marian":
        shutil.copytree(marian, tmp_path / "saved")
    else:
        make_model().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def to_pickle(folder, content=None):
    """Replaces the safetensors by a pickle."""
    weights = folder / "model.safetensors"
    torch.save(content or load_file(weights), folder / "pytorch_model.bin")
    weights.unlink(missing_ok=True)


def test_pickle_is_loaded_only_on_request(saved):
    expected = load_foreign(str(saved)).state_dict()
    to_pickle(saved)
    assert_close(load_foreign(str(saved)).state_dict(), expected, 0)
    command = f"`vanilla-transformer convert {saved} NEW_DIR`"
    with pytest.raises(UserError, match="has no model.safetensors.*" + re.escape(command)):
        load_foreign(str(saved), use_safetensors=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("source", ["marian", "torch"])
def test_converted_model_is_a_copy_in_eval_mode_and_dtype(source, dtype):
    theirs = (make_marian() if source == "marian" else TorchTranslator()).to(dtype).train()
    before = copy.deepcopy(theirs.state_dict())
    ours = from_native(theirs) if source == "marian" else theirs.convert()
    assert not any(module.training for module in ours.modules())
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype} == {ours.dtype}
    assert ours.model.encoder.embed_positions.table.dtype == torch.float32
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert theirs.training and all(torch.equal(tensor, before[name]) for name, tensor in theirs.state_dict().items())


def test_convert_command_converts_a_marian_model(marian, marian_pairs, tmp_path):
    sources = [source for source, _ in marian_pairs]
    main(["convert", str(marian), str(tmp_path / "ours")])
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert_close(loaded.state_dict(), from_native(MarianMTModel.from_pretrained(marian)).state_dict(), 0)
    translated = Translator.from_pretrained(str(tmp_path / "ours"))(sources, num_beams=1)
    assert translated == translate_by_marian(marian, sources) == [target for _, target in marian_pairs]


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trap",)


def test_convert_command_reads_a_pickle_and_runs_no_code_in_it(make_model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, saved = make_model(), tmp_path / "saved"
    model.save_pretrained(saved)
    to_pickle(saved)
    main(["convert", str(saved), str(tmp_path / "new")])
    assert "has no tokenizer that can be loaded" in capsys.readouterr().err
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "new")
    assert_close(loaded.state_dict(), model.state_dict(), 0)
    assert "new already exists; move it away, or choose another directory" in command_error(
        capsys, "convert", saved, tmp_path / "new"
    )
    to_pickle(saved, {"x": Trap()})
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        main(["convert", str(saved), str(tmp_path / "newer")])
    assert not (tmp_path / "newer").exists() and not (tmp_path / "trap").exists()


@pytest.mark.parametrize("model_type", ["t5", None])
def test_convert_command_names_what_it_cannot_convert(model_type, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    message = command_error(capsys, "convert", tmp_path, tmp_path / "new")
    assert f"type {model_type or 'unknown'} cannot be converted; only vanilla_transformer" in message
