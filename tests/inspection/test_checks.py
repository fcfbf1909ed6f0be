"""`check_model` passes every config of the package, and names what a broken change breaks."""

import copy
import re
import sys

import pytest
import torch
from helpers import EMBEDDINGS, ROOT, TINY, Softcapped, assert_close, gradients
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer import modeling_vanilla_transformer as modeling
from vanilla_transformer.inspection import check_model, checks
from vanilla_transformer.inspection.checks import CHECKS

sys.path.append(str(ROOT / "examples"))
import relative_position_bias as example  # noqa: E402

POSITIONS = [{"position_embedding_type": kind} for kind in ("sinusoidal", "learned", "rotary", "marian")]
CONFIGS = [kind | {"norm_first": norm_first} for kind in POSITIONS for norm_first in (False, True)]
MORE = [*EMBEDDINGS.values(), {"encoder_layers": 1, "decoder_layers": 3}, {"scale_embedding": False}]
MORE += [dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.3)]
MORE += [{"activation_function": name} for name in ("gelu", "swish", "prelu", "xielu")]
MORE += [{"pad_token_id": 2}, {"pad_token_id": None}, {"eos_token_id": None}, {"eos_token_id": [2, 5]}]
MORE += [{"decoder_start_token_id": None, "bos_token_id": None}, {"vocab_size": 4}]
MORE += [kind | {"max_position_embeddings": 4} for kind in POSITIONS]
# What these change is the same in each layer.
SMALLER = {"encoder_layers": 1, "decoder_layers": 1}
CONFIGS += [pytest.param(SMALLER | config, marks=pytest.mark.slow, id=str(config)) for config in MORE]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config_passes(config):
    check_model(VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**TINY | config)))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["eager", True])
def test_it_passes_compiled(make_model, compiled):
    check_model(make_model(encoder_layers=1, decoder_layers=1), compiled=compiled)


def test_the_model_stays_as_it_is(make_model):
    model = make_model().train()
    before = gradients(model, model(torch.tensor([[5, 2]]), labels=torch.tensor([[6, 2]])).loss)
    model.set_attn_implementation("sdpa")
    weights, config, state = copy.deepcopy(model.state_dict()), model.config.to_dict(), torch.random.get_rng_state()
    check_model(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training and model.config.to_dict() == config and model.config._attn_implementation == "sdpa"
    assert_close(model.state_dict(), weights, 0)
    assert_close({name: parameter.grad for name, parameter in model.named_parameters()}, before, 0)


def test_positions_that_end_too_early_are_refused(make_model):
    with pytest.raises(ValueError, match="`max_position_embeddings` is 3; the checks need 4"):
        check_model(make_model(position_embedding_type="learned", max_position_embeddings=3))


@pytest.mark.parametrize(("found", "expected"), [(0.0, torch.inf), (-torch.inf, torch.inf), (torch.nan, 0.0)])
def test_nothing_is_close_to_what_is_not_finite(found, expected):
    assert checks.is_close(torch.tensor([1.0]), torch.tensor([1.0]))
    assert not checks.is_close(torch.tensor([found]), torch.tensor([expected]))
    assert not checks.is_close(torch.tensor([expected]), torch.tensor([expected + 1]))


def test_frozen_weights_are_named_unless_they_are_meant(make_model):
    model = make_model()
    model.model.encoder.layers[0].fc1.weight.requires_grad_(False)
    with pytest.raises(AssertionError, match="`requires_grad` is False of model.encoder.layers.0.fc1.weight"):
        check_model(model)
    check_model(model, allow_frozen=True)


# --------------------------------------------------------------------------------------------- the worked example


@pytest.mark.parametrize("config", CONFIGS[:6], ids=str)
def test_the_relative_position_bias_passes(config):
    check_model(example.RelativeTransformer(example.RelativeConfig(**TINY | config, max_distance=3)))


def test_both_pass_with_masks_as_on_a_gpu(make_model, as_on_a_gpu):
    check_model(make_model())
    check_model(example.RelativeTransformer(example.RelativeConfig(**TINY)))


@pytest.mark.slow
def test_the_relative_position_bias_passes_compiled():
    sizes = TINY | {"encoder_layers": 1, "decoder_layers": 1}
    check_model(example.RelativeTransformer(example.RelativeConfig(**sizes, max_distance=3)), compiled="eager")


def test_a_bias_in_place_of_no_mask_lets_the_future_leak_under_sdpa_alone(monkeypatch):
    """Eager attention always gets a mask, so all its checks pass."""
    combine = example.combine
    monkeypatch.setattr(
        example, "combine", lambda mask, bias, *rest: bias if mask is None else combine(mask, bias, *rest)
    )
    model = example.RelativeTransformer(example.RelativeConfig(**TINY))
    check_model(model, attention=["eager"])
    with pytest.raises(AssertionError) as error:
        check_model(model)
    (line,) = (line for line in str(error.value).splitlines() if line.startswith("- causality"))
    assert "later target tokens move earlier logits, with no padding, by up to 1." in line
    assert "(with sdpa, sdpa in training)" in line and "give it a causal mask" in line


# -------------------------------------------------------------------------------------------------- broken models


class Changed(VanillaTransformerForConditionalGeneration):
    """Changes itself by `change`, whenever it is made, so that it can be loaded."""

    def __init__(self, config):
        super().__init__(config)
        self.change()

    def change(self):
        pass


class Wrapped(nn.Module):
    """A module whose forward is replaced by `function(module, *args, **kwargs)`."""

    def __init__(self, module, function):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args, **kwargs):
        return self.function(self.module, *args, **kwargs)


def wrap(stack: str, name: str, function):
    """A change of the modules of that name in the layers of the encoder or the decoder."""

    def change(model):
        for layer in model.get_submodule(f"model.{stack}.layers"):
            setattr(layer, name, Wrapped(getattr(layer, name), function))

    return change


def put(kind: type, *arguments):
    """A change that puts a module before the output projection."""
    return lambda model: setattr(model.model.decoder, "layer_norm", kind(*arguments))


def without_mask(attention, *args, attention_mask=None, **kwargs):
    return attention(*args, **kwargs)


def without_causal_mask(attention, *args, attention_mask=None, **kwargs):
    attention.is_causal = False
    return attention(*args, **kwargs)


def hotter_if_eager(attention, *args, **kwargs):
    attention.scaling = 1.0 if attention.config._attn_implementation == "eager" else 0.5
    return attention(*args, **kwargs)


def hotter_if_compiled(attention, *args, **kwargs):
    attention.scaling = 1.0 if torch.compiler.is_compiling() else 0.5
    return attention(*args, **kwargs)


def with_a_bias_of_new_tokens(attention, hidden_states, attention_mask=None, **kwargs):
    """Of shape (T,T), although there may be more keys in the cache."""
    T = hidden_states.shape[1]
    bias = torch.zeros(T, T, dtype=hidden_states.dtype) if attention_mask is None else attention_mask[..., -T:]
    if attention_mask is None and attention.is_causal:
        bias = bias.masked_fill(torch.ones(T, T).triu(1).bool(), -1e9)
    return attention(hidden_states, attention_mask=bias, **kwargs)


def with_a_cut_gradient(attention, *args, key_value_states=None, **kwargs):
    return attention(*args, key_value_states=key_value_states.detach(), **kwargs)


class SentenceNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.mT).mT


class Memory(nn.Module):
    """Adds the token before, which it remembers itself, and not in the cache."""

    def forward(self, x):
        if x.shape[1] > 2:
            self.last = torch.zeros_like(x[:, :1])
        before = torch.cat([getattr(self, "last", torch.zeros_like(x[:, :1])), x[:, :-1]], dim=1)
        self.last = x[:, -1:]
        return x + before


class Added(nn.Module):
    """Adds a tensor that is held in some way."""

    def __init__(self, how: str):
        super().__init__()
        self.how, number = how, torch.randn(16)
        if how == "list":
            self.numbers = [number]
        elif how == "buffer":
            self.register_buffer("number", number, persistent=False)
        else:
            self.number = nn.Parameter(number, requires_grad=how != "frozen")

    def forward(self, x):
        if self.how == "unused":
            return x
        number = self.numbers[0] if self.how == "list" else self.number
        if self.how == "nan":  # the gradient of the other branch is 0 / 0
            number = torch.where(number < 99, number, (0 * number).sqrt())
        return x + number


class Dropped(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x)


class Failing(nn.Module):
    def forward(self, x):
        if self.training:
            raise RuntimeError("not for training")
        return x


IN_ALL = r"\(with eager, eager in training, sdpa, sdpa in training\)"
NUMBER = "model.decoder.layer_norm.number"
# The change; the checks that fail, first the one that names it; and what it says.
BROKEN = {
    "no causal mask": (wrap("decoder", "self_attn", without_causal_mask), "causality padding cache", IN_ALL),
    "no source mask": (wrap("encoder", "self_attn", without_mask), "padding", f"source padding on the .*{IN_ALL}"),
    "no mask for cross-attention": (wrap("decoder", "encoder_attn", without_mask), "padding", "source padding on the"),
    "batch norm": (put(SentenceNorm, 16), "batch causality padding", r"sentences of a batch move .*in training\)"),
    "eager differs": (wrap("decoder", "self_attn", hotter_if_eager), "attention", r"first backend, .* up to .*sdpa\)"),
    "compiled differs": (wrap("decoder", "self_attn", hotter_if_compiled), "compiled", "torch.compile moves logits"),
    "a bias (T,T)": (wrap("decoder", "self_attn", with_a_bias_of_new_tokens), "cache", "cache: RuntimeError: .*size"),
    "a memory of its own": (put(Memory), "cache causality padding attention", "after beams were reordered"),
    "a cut gradient": (
        wrap("decoder", "encoder_attn", with_a_cut_gradient),
        "gradients",
        "no gradient .* 29 more",
    ),
    "an unused weight": (put(Added, "unused"), "gradients", f"no gradient reaches {NUMBER}"),
    "a frozen weight": (put(Added, "frozen"), "gradients", f"is False of {NUMBER}"),
    "a gradient of NaN": (put(Added, "nan"), "gradients", f"not finite of {NUMBER}"),
    "a weight that is no parameter": (put(Added, "buffer"), "save", "saving and loading moves logits, by up to"),
    "a weight in a list": (put(Added, "list"), "save", "save: RuntimeError: Tensor on device meta"),
    "an error in training": (
        put(Failing),
        "gradients causality padding batch",
        "Error: not for training .with",
    ),
    "dropout in evaluation": (put(Dropped), "repeat", "two equal calls differ, by up to"),
}


def failures(model, **options) -> dict[str, str]:
    """What is found, by check."""
    with pytest.raises(AssertionError) as error:
        check_model(model, **options)
    _, *lines = str(error.value).splitlines()
    return dict(line.removeprefix("- ").split(": ", 1) for line in lines)


@pytest.mark.parametrize(("change", "expected", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_change_is_named_by_its_check(change, expected, message, monkeypatch):
    monkeypatch.setattr(Changed, "change", change)
    name = expected.split()[0]
    found = failures(Changed(VanillaTransformerConfig(**TINY)), compiled="eager" if name == "compiled" else False)
    assert found.keys() == {*expected.split()}
    assert re.search(message, f"{name}: {found[name]}")
    assert CHECKS[name] in found[name]


def test_positions_that_ignore_the_cache_are_named(make_model, monkeypatch):
    count = modeling.count_positions
    monkeypatch.setattr(modeling, "count_positions", lambda x, mask, past=0, *rest: count(x, mask))
    found = failures(make_model())
    assert found.keys() == {"cache", "search"} and "steps with the cache move logits, by up to" in found["cache"]


def test_a_search_that_does_not_know_of_the_change_is_named(make_model, monkeypatch):
    """If the code of the package itself is changed. A class of another name is left to transformers' searches."""
    plain = modeling.VanillaTransformerAttention.forward

    def with_a_distance_bias(self, x, key_value_states=None, attention_mask=None, rotary=None, cache=None, **more):
        if key_value_states is None:
            past = 0 if cache is None else cache.self_attention_cache.get_seq_length(self.layer_idx)
            keys = torch.arange(past + x.shape[1])
            distances = keys - keys[past:, None]
            bias = -0.5 * distances.abs().to(x.dtype)[None, None]
            attention_mask = example.combine(attention_mask, bias, distances, self.is_causal)
        return plain(self, x, key_value_states, attention_mask, rotary, cache, **more)

    monkeypatch.setattr(modeling.VanillaTransformerAttention, "forward", with_a_distance_bias)
    found = failures(make_model())
    assert found.keys() == {"search"} and "beam_search finds other" in found["search"]


@pytest.mark.parametrize("num_beams", [1, 4])
def test_both_searches_are_compared_whatever_number_of_beams_is_saved(num_beams, make_model, monkeypatch):
    greedy = checks.greedy_search

    def wrong(*args, **kwargs):
        output = greedy(*args, **kwargs)
        output.sequences[:, 1] += 1
        return output

    wrong.__name__ = greedy.__name__
    monkeypatch.setattr(checks, "greedy_search", wrong)
    model = make_model()
    model.generation_config.num_beams = num_beams
    assert "greedy_search finds other tokens" in failures(model)["search"]


def test_logits_that_are_changed_after_the_projection_are_named():
    found = failures(Softcapped(VanillaTransformerConfig(**TINY)))
    assert found.keys() == {"loss"} and "the loss differs from the cross-entropy of the logits" in found["loss"]


def test_modules_replaced_in_an_instance_are_not_loaded(make_model):
    model = make_model()
    model.model.decoder.layer_norm = Added("parameter")
    check_model(model, saved=False)
    assert f"1 unexpected, such as {NUMBER}" in failures(model)["save"]
