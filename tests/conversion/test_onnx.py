"""The ONNX files that transformers.js and optimum load: the same translations by onnxruntime."""

import json

import numpy as np
import pytest
import torch
from helpers import lively_model

pytest.importorskip("onnxruntime")
import onnxruntime  # noqa: E402

from vanilla_transformer.conversion.onnx import to_onnx  # noqa: E402


def greedy_search(folder, source, mask, start: int, steps: int, suffix: str = "") -> list[list[int]]:
    """As transformers.js searches: one graph, whose cache is empty in the first step."""
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / "onnx" / f"{name}{suffix}.onnx", providers=["CPUExecutionProvider"])
        for name in ("encoder_model", "decoder_model_merged")
    )
    (hidden,) = encoder.run(None, {"input_ids": source, "attention_mask": mask})
    feed = {"encoder_attention_mask": mask, "encoder_hidden_states": hidden}
    for value in decoder.get_inputs():
        if value.name.startswith("past_key_values"):
            feed[value.name] = np.zeros((len(source), value.shape[1], 0, value.shape[3]), dtype=np.float32)
    target = np.full((len(source), 1), start)
    for step in range(steps):
        feed |= {"input_ids": target[:, -1:], "use_cache_branch": np.array([step > 0])}
        logits, *cache = decoder.run(None, feed)
        target = np.concatenate([target, logits[:, -1].argmax(-1)[:, None]], axis=1)
        names = [value.name for value in decoder.get_outputs()[1:]]
        feed |= {name.replace("present", "past_key_values"): new for name, new in zip(names, cache, strict=True)}
    return target.tolist()


@pytest.mark.slow
def test_greedy_search_by_onnxruntime_equals_generate(text_tokenizer, tmp_path):
    """With learned positions; those of the sample, in tests/end_to_end/test_deployment.py, are sinusoidal."""
    fields = {"vocab_size": len(text_tokenizer), "eos_token_id": None, "position_embedding_type": "learned"}
    model = lively_model(3, **fields)
    to_onnx(model, text_tokenizer, tmp_path / "out")
    source = torch.randint(3, model.config.vocab_size, (3, 9))
    mask = torch.ones_like(source)
    mask[1, 5:] = 0
    expected = model.generate(source, attention_mask=mask, max_new_tokens=20)
    assert len({tuple(row) for row in expected.tolist()}) > 1
    start = model.config.decoder_start_token_id
    assert greedy_search(tmp_path / "out", source.numpy(), mask.numpy(), start, 20) == expected.tolist()

    saved = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"  # optimum has transformers 4, which knows this name
    int8 = greedy_search(tmp_path / "out", source.numpy(), mask.numpy(), start, 3, "_quantized")
    assert np.array(int8).shape == (3, 4)
    files = {path.name: path.stat().st_size for path in (tmp_path / "out" / "onnx").iterdir()}
    assert files["encoder_model_quantized.onnx"] < files["encoder_model.onnx"]
