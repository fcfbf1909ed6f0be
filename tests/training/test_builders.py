"""What a run is built from."""

import pytest
import torch
from helpers import text_dataset, training_options

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.builders import make_model, make_tokenizer

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
    args, pairs = training_options(option, ascii_only), text_dataset(PAIRS)
    pairs = pairs.to_iterable_dataset() if streaming else pairs
    with pytest.raises(UserError, match=f"^{option} {ascii_only} has a tokenizer that does not know the target texts"):
        make_tokenizer(args, pairs, None)
    make_tokenizer(args, pairs.map(lambda pair: {"target": "Straße"}), None)
    said = "the tokenizer changes 3 of 3 target texts ('Straße' becomes 'Strae'); 0 of "
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "sizes", ["--d_model=1000000", "--encoder_ffn_dim=10000000000", "--max_position_embeddings=50000000000"]
)
def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_built(sizes, text_tokenizer):
    args = training_options(sizes, "--position_embedding_type=learned")
    with pytest.raises(
        UserError, match="^A model of [0-9,]{12,} parameters takes [0-9,.]+ GiB, more than the .* free; choose"
    ):
        make_model(args, text_tokenizer, torch.device("cpu"))
