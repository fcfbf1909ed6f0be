"""What transformers' own `generate` returns for this model has the form of what it returns for BART."""

import pytest
import torch
from helpers import MASK, SOURCE, lively_model
from torch.utils._pytree import tree_map_only
from transformers import BartConfig, BartForConditionalGeneration

from vanilla_transformer.modeling_vanilla_transformer import CACHE

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beam search": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True},
}
EVERYTHING = {"output_scores": True, "output_logits": True, "output_attentions": True, "output_hidden_states": True}


@pytest.fixture(scope="module")
def model():
    model = lively_model(120, encoder_attention_heads=2)
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def bart(model):
    sizes = ("vocab", "encoder_", "decoder_", "d_model", "pad_", "bos_", "eos_", "max_position")
    config = {name: value for name, value in model.config.to_dict().items() if name.startswith(sizes)}
    config.pop("decoder_vocab_size")
    return BartForConditionalGeneration(BartConfig(**config, attn_implementation="eager")).eval()


def generate(model, mode: str, **options):
    torch.manual_seed(0)
    options = {"min_new_tokens": 5, "max_new_tokens": 5, "return_dict_in_generate": True, **MODES[mode], **options}
    return model.generate(SOURCE, attention_mask=MASK, forced_eos_token_id=None, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_every_field_has_the_shape_of_barts(model, bart, mode, use_cache):
    outputs = [dict(generate(either, mode, **EVERYTHING, use_cache=use_cache)) for either in (model, bart)]
    caches = [output.pop(CACHE, None) for output in outputs]
    ours, theirs = (tree_map_only(torch.Tensor, lambda x: x.shape, output) for output in outputs)
    assert ours == theirs
    assert {"encoder_attentions", "decoder_attentions", "cross_attentions", "decoder_hidden_states"} <= ours.keys()
    if use_cache:
        layers = [cache.self_attention_cache.layers + cache.cross_attention_cache.layers for cache in caches]
        ours, theirs = ([layer.keys.shape for layer in of_one] for of_one in layers)
        rows = 3 * max(MODES[mode].get("num_beams", 1), MODES[mode].get("num_return_sequences", 1))
        assert ours == theirs and {shape[0] for shape in ours} == {rows}


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_generation_continues_from_the_returned_cache(model, mode):
    """Each row of the cache belongs to the returned sequence of that row, also with several of a sentence."""
    first = generate(model, mode)
    rows = MODES[mode].get("num_return_sequences", 1)
    source, mask = (ids.repeat_interleave(rows, dim=0) for ids in (SOURCE, MASK))
    options = {"attention_mask": mask, "decoder_input_ids": first.sequences, "max_new_tokens": 6}
    options["decoder_attention_mask"] = torch.ones_like(first.sequences)  # says that past tokens are among the ids
    uninterrupted = model.generate(source, **options)
    assert torch.equal(model.generate(source, **options, **{CACHE: first[CACHE]}), uninterrupted)
    assert len(uninterrupted[:, 6:].unique()) > 3
