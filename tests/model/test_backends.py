"""One model by every route of PyTorch and transformers: attention backends, torch.compile, resizing, placement,
precision."""

import warnings

import pytest
import torch
from helpers import (
    EMBEDDINGS,
    LABELS,
    MASK,
    SEPARATE,
    SOURCE,
    TARGET,
    assert_close,
    assert_same_gradients,
    assert_ties_and_sizes,
    gradients,
    lively_model,
    make_cache,
    norms,
    positions,
)
from torch._dynamo.testing import CompileCounter
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForSeq2SeqLM, CompileConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerAttention, source_mask

LEFT = torch.stack([row.roll(6 - int(mask.sum())) for row, mask in zip(SOURCE, MASK, strict=True)])
BACKENDS = ["eager", "sdpa", "flex_attention"]
# Translations of SOURCE by these models have many different tokens; test_backends_generate_the_same says so.
SEEDS = {"sinusoidal": 120, "learned": 266, "rotary": 24, "marian": 120}


@pytest.fixture
def make_lively():
    """make_lively(type, **config) -> a model that seldom repeats itself and ends its sentences at different steps."""
    return lambda kind="sinusoidal", **config: lively_model(SEEDS[kind], position_embedding_type=kind, **config)


# ------------------------------------------------------------------------------------------------- attention backends


@pytest.fixture
def uncompiled():
    """Flex attention compiles itself, for a minute on a CPU; this runs it uncompiled."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def custom_mask(model) -> torch.Tensor:
    """Each position looks at itself and the two before it: (3,1,6,6), added to the scores."""
    near = torch.ones(6, 6, dtype=torch.bool).tril() & torch.ones(6, 6, dtype=torch.bool).triu(-2)
    return torch.zeros(3, 1, 6, 6, dtype=model.dtype).masked_fill(~near, torch.finfo(model.dtype).min)


@torch.no_grad()
def everything(model) -> dict[str, torch.Tensor]:
    """Logits of every kind of call that differs in its masks."""
    pad = torch.tensor([[0, 0], [0, 1], [1, 1]])  # as ids and as their mask
    inputs = {
        "padding": {"attention_mask": MASK},
        "no mask": {},
        "padding on the left": {"input_ids": LEFT, "attention_mask": (LEFT != 0).long()},
        "nothing hidden": {"attention_mask": torch.ones_like(MASK)},
        "custom mask": {"attention_mask": custom_mask(model)},
        "custom target mask": {"decoder_attention_mask": custom_mask(model)[..., 1:, 1:]},
    }
    given = {"input_ids": SOURCE, "decoder_input_ids": TARGET}
    logits = {name: model(**{**given, **changed}).logits for name, changed in inputs.items()}
    padded, mask = torch.cat([pad, TARGET], 1), torch.cat([pad, torch.ones_like(TARGET)], 1)
    logits["target padding"] = model(SOURCE, MASK, padded, mask).logits[mask.bool()]
    cache = make_cache(model, "dynamic")
    for start, stop in [(0, 2), (2, 3), (3, 5)]:
        step = {"decoder_input_ids": TARGET[:, start:stop], "past_key_values": cache, "use_cache": True}
        logits[f"cached {start}"] = model(SOURCE, MASK, **step).logits
    return logits


@norms
@positions
def test_backends_agree(make_model, uncompiled, norm_first, position_embedding_type):
    model = make_model(norm_first=norm_first, position_embedding_type=position_embedding_type).double()
    results = {}
    for backend in BACKENDS:
        model.set_attn_implementation(backend)
        results[backend] = everything(model)
        assert_close(results[backend], results["eager"], 1e-9)
    eager = results["eager"]
    assert all(logits.isfinite().all() for logits in eager.values())
    for name in ["nothing hidden", "custom mask", "custom target mask"]:  # the masks do something
        assert (eager[name] - eager["padding"]).abs().max() > 1e-2
    assert_close(torch.cat([eager[f"cached {start}"] for start in (0, 2, 3)], 1), eager["padding"], 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_made_without_reading_the_padding_hide_the_same(make_model, uncompiled, request, backend):
    model = make_model().double()
    model.set_attn_implementation(backend)
    expected = everything(model)
    request.getfixturevalue("as_on_a_gpu")
    assert_close(everything(model), expected, 1e-9)
    ids = torch.empty(3, 6, dtype=torch.long, device="meta")  # without values, so that reading one fails
    model.to("meta")
    for states in (None, model.model.encoder.embed_tokens(ids)):
        assert source_mask(model.config, model.model.encoder.embed_tokens(ids), ids, states).shape[-2:] == (6, 6)


@positions
def test_backends_generate_the_same(make_lively, uncompiled, position_embedding_type):
    model = make_lively(position_embedding_type).double()
    greedy = model.generate(SOURCE, max_new_tokens=8)
    assert len(greedy.unique()) >= 9 and len({(row == 2).int().argmax().item() for row in greedy}) == 3
    for num_beams in [1, 3]:
        translated = []
        for backend in BACKENDS:
            model.set_attn_implementation(backend)
            translated.append(model.generate(SOURCE, attention_mask=MASK, num_beams=num_beams, max_new_tokens=8))
        assert all(torch.equal(other, translated[0]) for other in translated[1:])


def test_every_attention_calls_the_chosen_backend(make_lively, tmp_path, monkeypatch):
    """One registered by a user, chosen for a loaded model or when it is loaded."""
    model, calls = make_lively(), []

    def attend(module, *args, **kwargs):
        calls.append(module)
        return sdpa_attention_forward(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "counted", attend)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "counted", sdpa_mask)
    expected = everything(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="counted")
    model.set_attn_implementation("counted")
    for chosen in [loaded, model]:
        calls.clear()
        chosen(SOURCE, MASK, TARGET)
        assert calls == [each for each in chosen.modules() if isinstance(each, VanillaTransformerAttention)]
        assert_close(everything(chosen), expected, 0)


# ------------------------------------------------------------------------------------------------------- torch.compile

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}  # halves the time to compile


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    torch._dynamo.reset()


@pytest.fixture
def no_recompilation():
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def batch(sentences: int = 3, source: int = 6, target: int = 5) -> dict[str, torch.Tensor]:
    """Random sentences, the first source and the last target of them only half as long."""
    ids, labels = torch.randint(3, 37, (sentences, source)), torch.randint(3, 37, (sentences, target))
    ids[0, -(-source // 2) :], labels[-1, -(-target // 2) :] = 0, -100
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_equals_uncompiled(make_model, backend):
    model = make_model(**SHALLOW, lm_head_bias=True).train()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    once = {"input_ids": SOURCE, "attention_mask": MASK, "labels": LABELS}
    twice = {name: torch.cat([tensor, tensor.flip(0)]) for name, tensor in once.items()}  # for R-Drop
    others = [once | {"num_items_in_batch": torch.tensor(7)}, twice | {"r_drop_alpha": 2.0}]
    for inputs in [once | {"label_smoothing": 0.1}, *(others if backend == "aot_eager" else [])]:
        expected, loss = (either(**inputs, output_logits=False).loss for either in (model, compiled))
        assert_close(loss, expected, 1e-6)
        assert_same_gradients(gradients(model, loss), gradients(model, expected))
    with torch.autocast("cpu", torch.bfloat16):
        losses = [either(**once, output_logits=False).loss for either in (compiled, model)]
    assert losses[0].dtype == torch.float32
    assert_close(*losses, 2e-3)


OTHER_DROPOUTS = [pytest.param(name, marks=pytest.mark.slow) for name in ("attention_dropout", "activation_dropout")]


@pytest.mark.parametrize("kind", ["dropout", *OTHER_DROPOUTS])
def test_compiled_training_applies_dropout(make_model, kind):
    model = make_model(**SHALLOW, **{kind: 0.1}).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        losses = [compiled(SOURCE, MASK, labels=LABELS, output_logits=False).loss for _ in range(4)]
    assert all(gradient.isfinite().all() for gradient in gradients(model, losses[0]).values())
    assert len({loss.item() for loss in losses}) == 4
    exact = model.eval()(SOURCE, MASK, labels=LABELS).loss.item()
    assert all(abs(loss.item() - exact) < 0.5 * exact for loss in losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    "position_embedding_type, backend",
    [("sinusoidal", "eager"), ("learned", "eager"), ("rotary", "eager"), ("rotary", "inductor")],
)
def test_compiled_evaluation_equals_uncompiled(make_model, position_embedding_type, backend):
    model = make_model(**SHALLOW, position_embedding_type=position_embedding_type)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        ours, theirs = (either(SOURCE, decoder_input_ids=TARGET).logits for either in (compiled, model))
    assert_close(ours, theirs)


@pytest.mark.parametrize("is_dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["train", pytest.param("eval", marks=pytest.mark.slow)])
def test_one_graph_serves_all_batches(make_model, no_recompilation, mode, is_dynamic):
    """Of the same shape, or if it is dynamic, of any."""
    model, counter = getattr(make_model(**SHALLOW), mode)(), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=is_dynamic)
    whole = {"attention_mask": torch.ones(3, 6, dtype=torch.long), "labels": torch.full((3, 5), 9)}
    others = [batch(2, 9, 4), batch(5, 4, 11), batch(4, 7, 7)] if is_dynamic else [batch() | whole, batch()]
    for inputs in [batch(), *others]:
        ours, theirs = (either(**inputs, output_logits=mode == "eval").loss for either in (compiled, model))
        assert_close(ours, theirs)
    assert counter.frame_count == 1


@pytest.mark.slow
@positions
def test_generate_compiles_its_step_once(make_lively, no_recompilation, position_embedding_type):
    model, counter = make_lively(position_embedding_type), CompileCounter()
    # A function, of which, unlike of the object, transformers' deep copies are itself.
    compile_config = CompileConfig(fullgraph=True, backend=lambda graph, inputs: counter(graph, inputs), mode=None)
    compile_config._compile_all_devices = True  # else on accelerators alone
    for source in [SOURCE, SOURCE.flip(0), SOURCE.masked_fill(torch.arange(6) > 2, 0)]:
        inputs = {"attention_mask": (source != 0).long(), "max_new_tokens": 8}
        expected = model.generate(source, **inputs)
        static = {"cache_implementation": "static", "compile_config": compile_config}
        assert torch.equal(model.generate(source, **inputs, **static), expected)
    assert counter.frame_count == 1


# ----------------------------------------------------------------------------- resizing, loading, placement, precision


@pytest.mark.parametrize("embeddings", EMBEDDINGS)
@pytest.mark.parametrize("asked, multiple, size", [(45, None, 45), (33, None, 33), (41, 8, 48), (None, 8, 40)])
def test_resized_vocabulary(make_model, tmp_path, embeddings, asked, multiple, size):
    model = make_model(**EMBEDDINGS[embeddings])
    with torch.no_grad():
        before = model(SOURCE, MASK, TARGET).logits
    resized = model.resize_token_embeddings(asked, pad_to_multiple_of=multiple)
    assert resized is model.get_input_embeddings() and resized.num_embeddings == size == model.config.vocab_size
    assert_ties_and_sizes(model)
    if model.config.share_encoder_decoder_embeddings:
        assert model.config.decoder_vocab_size == size
    after = model(SOURCE, MASK, TARGET).logits
    same = min(before.shape[-1], after.shape[-1])
    # A product with another number of columns may be rounded otherwise.
    assert_close(after[..., :same], before[..., :same])
    for output_logits in [False, True]:
        loss = model(SOURCE, MASK, labels=LABELS, output_logits=output_logits).loss
        assert all(gradient.isfinite().all() for gradient in gradients(model, loss).values())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_ties_and_sizes(loaded)
    assert torch.equal(loaded(SOURCE, MASK, TARGET).logits, after)


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, SEPARATE], ids=["shared", "tied", "separate"])
@pytest.mark.parametrize("memory", [{}, {"max_memory": {"cpu": 20_000}}], ids=["in memory", "in part on the disk"])
@torch.no_grad()
def test_placed_by_accelerate(make_lively, tmp_path, options, memory):
    model = make_lively(**options)
    model.save_pretrained(tmp_path / "saved")
    placed = {"device_map": "auto", "offload_folder": tmp_path / "offload", **memory}
    loaded = type(model).from_pretrained(tmp_path / "saved", **placed)
    assert ("disk" in getattr(loaded, "hf_device_map", {}).values()) == bool(memory)
    assert torch.equal(loaded.generate(SOURCE, max_new_tokens=8), model.generate(SOURCE, max_new_tokens=8))
    assert torch.equal(loaded(SOURCE, MASK, TARGET).logits, model(SOURCE, MASK, TARGET).logits)
    inputs = {"labels": LABELS, "output_logits": False}  # the projection may be on the disk
    assert_close(loaded(SOURCE, MASK, **inputs).loss, model(SOURCE, MASK, **inputs).loss)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@positions
def test_loaded_in_another_precision(make_lively, tmp_path, position_embedding_type, dtype, backend):
    rows = {} if position_embedding_type == "learned" else {"max_position_embeddings": 3}  # others are computed
    model = make_lively(position_embedding_type, **rows)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype, attn_implementation=backend)
    assert {loaded.config.dtype, *(parameter.dtype for parameter in loaded.parameters())} == {dtype}
    expected, output = model(SOURCE, MASK, TARGET).logits, loaded(SOURCE, MASK, TARGET)
    assert output.logits.dtype == output.encoder_last_hidden_state.dtype == dtype
    assert (output.logits - expected).norm() < 0.02 * expected.norm()
    assert loaded.generate(SOURCE, max_new_tokens=8).shape[0] == 3
    exact = gradients(model, model.train()(SOURCE, MASK, labels=LABELS).loss)
    loss = loaded.train()(SOURCE, MASK, labels=LABELS, output_logits=False).loss
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    for name, gradient in gradients(loaded, loss).items():
        if "k_proj.bias" not in name:  # of which the gradient is zero, or rounding
            assert (gradient - exact[name]).norm() < 0.2 * exact[name].norm(), name
