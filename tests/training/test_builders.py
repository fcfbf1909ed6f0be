"""What a run is built from."""

import pytest
import torch
from helpers import text_dataset, training_options

from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.errors import UserError
from vanilla_transformer.training.builders import existing_tokenizer, make_model, make_tokenizer
from vanilla_transformer.training.options import TrainingOptions

PAIRS = [("A dog sleeps.", "犬が寝ています。")] * 3


@pytest.fixture
def ascii_only(text_tokenizer, tmp_path) -> str:
    """A tokenizer that drops letters other than those of English."""
    text_tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    drop = '{"type": "Replace", "pattern": {"Regex": "[^ -~]"}, "content": ""}'
    file.write_text(file.read_text().replace('"normalizers": [', f'"normalizers": [{drop},'))
    return str(tmp_path)


@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streamed"])
@pytest.mark.parametrize("option", ["--tokenizer_name", "--model_name_or_path", "--teacher"])
def test_existing_tokenizer_is_tried_on_the_training_texts(option, streaming, ascii_only, capsys):
    pairs = text_dataset(PAIRS).to_iterable_dataset() if streaming else text_dataset(PAIRS)
    existing = (option, ascii_only)
    with pytest.raises(UserError, match=f"^{option} {ascii_only} has a tokenizer that does not know the target texts"):
        make_tokenizer(existing, pairs)
    make_tokenizer(existing, pairs.map(lambda pair: {"target": "Straße"}))
    said = "the tokenizer changes 3 of 3 target texts ('Straße' becomes 'Strae'); 0 of "
    assert said in capsys.readouterr().out


SIZES = [{"d_model": 10**6}, {"encoder_ffn_dim": 2**28}, {"max_position_embeddings": 2**28}]


@pytest.mark.parametrize("size", SIZES)
def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_built(size, text_tokenizer):
    fields = {"position_embedding_type": "learned", **size}
    with pytest.raises(
        UserError, match="^A model of [0-9,]{12,} parameters takes [0-9,.]+ GiB, more than the .* free; choose"
    ):
        make_model(fields, TrainingOptions(), DataOptions(), text_tokenizer, torch.device("cpu"))


def test_the_first_of_checkpoint_model_tokenizer_and_teacher_has_the_tokenizer(tmp_path):
    options = training_options("--model_name_or_path=m", "--teacher", "t", "u")
    assert existing_tokenizer(options, "x", tmp_path) == ("--resume_from_checkpoint", str(tmp_path))
    assert existing_tokenizer(options, "x", None) == ("--model_name_or_path", "m")
    assert existing_tokenizer(training_options("--teacher", "t", "u"), "x", None) == ("--tokenizer_name", "x")
    assert existing_tokenizer(training_options("--teacher", "t", "u"), None, None) == ("--teacher", "t")
    assert existing_tokenizer(training_options(), None, None) is None
