"""The model of a run follows the options."""

import pytest
import torch
from helpers import TINY, training_options

from vanilla_transformer import Translator
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.dropout import ByteDropout
from vanilla_transformer.training.model import make_generation_config, make_model
from vanilla_transformer.training.options import ModelOptions

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = {name: size for name, size in TINY.items() if name != "vocab_size"}
LIMITS = {"max_source_length": 9, "max_target_length": 30}


@pytest.mark.parametrize(
    "kind, positions, length", [("sinusoidal", 12, 31), ("learned", 12, 13), ("learned", 40, 31), ("learned", 31, 31)]
)
def test_generation_ends_with_the_longest_target_or_the_last_position(kind, positions, length, make_model):
    model = make_model(position_embedding_type=kind, max_position_embeddings=positions)
    for argv, beams in [(["--num_beams=4", "--length_penalty=0.6"], (4, 0.6)), (["--num_beams=1"], (None, None))]:
        found = make_generation_config(model, 30, training_options(*argv))
        assert (found.max_length, found.num_beams, found.length_penalty) == (length, *beams)
        ids = (found.pad_token_id, found.decoder_start_token_id, found.eos_token_id)
        assert ids == (model.config.pad_token_id, model.config.decoder_start_token_id, model.config.eos_token_id)


@pytest.fixture
def build(text_tokenizer):
    """build(*argv, **fields) -> a new model."""

    def build(*argv, device=CPU, data=LIMITS, **fields):
        options = ModelOptions(**SMALL | fields)
        return make_model(options, training_options(*argv), DataOptions(**data), text_tokenizer, device)

    return build


def test_a_new_model_follows_the_options(build, text_tokenizer):
    model = build("--num_beams=3")
    assert model.generation_config.max_length == 31 and model.generation_config.num_beams == 3
    assert model.config.vocab_size == len(text_tokenizer) and model.dtype == torch.float32
    assert model.config.eos_token_id == text_tokenizer.eos_token_id and not model.model.encoder.gradient_checkpointing
    assert build("--gradient_checkpointing").model.encoder.gradient_checkpointing
    assert model.config._attn_implementation == "eager"
    for other in (build("--attn_implementation=sdpa"), build(device=GPU)):
        assert other.config._attn_implementation == "sdpa"
    assert any(isinstance(module, ByteDropout) for module in model.modules())
    assert not any(isinstance(module, ByteDropout) for module in build(device=GPU).modules())
    with pytest.raises(UserError, match="^--attn_implementation flex_attention cannot train on a CPU"):
        build("--attn_implementation=flex_attention")


def test_learned_positions_reach_as_far_as_the_pairs(build):
    assert build(position_embedding_type="learned", max_position_embeddings=30)
    with pytest.raises(UserError, match="^--max_position_embeddings is 29, but sentences may have 30 tokens"):
        build(position_embedding_type="learned", max_position_embeddings=29)


def test_only_a_trained_tokenizer_may_have_fewer_tokens_than_asked_for(build, text_tokenizer):
    size = len(text_tokenizer)
    assert build(vocab_size=size + 9).config.vocab_size == size
    assert build(vocab_size=size, data=LIMITS | {"tokenizer_name": "x"}).config.vocab_size == size
    for asked, data in [(size - 1, LIMITS), (size + 1, LIMITS | {"tokenizer_name": "x"})]:
        with pytest.raises(UserError, match=f"^--vocab_size is {asked}, but the tokenizer has {size} tokens"):
            build(vocab_size=asked, data=data)


def test_a_model_to_fine_tune_takes_other_dropout_only(build, folder):
    model = build(f"--model_name_or_path={folder}", vocab_size=9999, dropout=0.3, attention_dropout=0.2)
    assert (model.config.dropout, model.config.attention_dropout) == (0.3, 0.2)
    weights = Translator.from_pretrained(folder).model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with pytest.raises(UserError, match="^--d_model is 32, but 16 in --model_name_or_path"):
        build(f"--model_name_or_path={folder}", d_model=32)


def test_fine_tuning_does_not_shorten_translations(build, folder):
    before = Translator.from_pretrained(folder).model.generation_config.max_length
    lengths = [
        build(f"--model_name_or_path={folder}", data={"max_target_length": before + more}, vocab_size=9999)
        for more in (-3, 5)
    ]
    assert [model.generation_config.max_length for model in lengths] == [before, before + 6]
