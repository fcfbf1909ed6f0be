"""The ONNX files that transformers.js and optimum load: the same translations by onnxruntime."""

import json

import numpy as np
import pytest
import torch
from helpers import MASK, SOURCE, TARGET, assert_close, lively_model

pytest.importorskip("onnxruntime")
import onnx  # noqa: E402
import onnxruntime  # noqa: E402

from vanilla_transformer.conversion.onnx import Decoder, merge, prepare, to_onnx  # noqa: E402


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


def test_steps_with_the_cache_as_tensors_equal_the_whole_target(make_model):
    """The caches are in the order of the names in the graph: keys and values of the target, then of the source."""
    model, logits, cache = make_model(), [], []
    with torch.no_grad():
        hidden = model.get_encoder()(SOURCE, MASK).last_hidden_state
        for step in range(TARGET.shape[1]):
            new, *cache = Decoder(model)(MASK, TARGET[:, step : step + 1], hidden, cache)
            logits.append(new)
            assert [one.shape[2] for one in cache] == [step + 1, step + 1, 6, 6] * model.config.decoder_layers
        assert_close(torch.cat(logits, dim=1), model(SOURCE, MASK, TARGET).logits)


@pytest.mark.parametrize("kind, rows", [("sinusoidal", 0), ("marian", 0), ("learned", 40)])
def test_only_learned_positions_are_stored(kind, rows, make_model):
    model = make_model(position_embedding_type=kind)
    for stack in (prepare(model).model.encoder, prepare(model).model.decoder):
        assert (
            sum(table.shape[0] for table in [*stack.embed_positions.buffers(), *stack.embed_positions.parameters()])
            == rows
        )


def test_merged_graphs_share_their_weights_and_one_of_them_runs():
    def graph(operator: str, name: str):
        x, y = (onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, [2]) for value in "xy")
        weight = onnx.numpy_helper.from_array(np.array([3, 5], dtype=np.float32), name)
        node = onnx.helper.make_node(operator, ["x", name], ["y"])
        opset = [onnx.helper.make_opsetid("", 20)]
        return onnx.helper.make_model(onnx.helper.make_graph([node], name, [x], [y], [weight]), opset_imports=opset)

    merged = merge(graph("Add", "a"), graph("Mul", "b"))
    assert len(merged.graph.initializer) == 1
    merged.ir_version = 10
    session = onnxruntime.InferenceSession(merged.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.array([1, 2], dtype=np.float32)
    for uses_cache, expected in [(False, [4, 7]), (True, [3, 10])]:
        (found,) = session.run(None, {"x": x, "use_cache_branch": np.array([uses_cache])})
        assert found.tolist() == expected


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
