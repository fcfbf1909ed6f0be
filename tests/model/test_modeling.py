"""The model equals its formulas, itself by other routes, and itself saved.

That no later token matters, that padded equals alone, cached uncached and eager sdpa, tests/inspection/test_checks.py
checks for every config.
"""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from helpers import (
    EMBEDDINGS,
    LABELS,
    MASK,
    SOURCE,
    TARGET,
    TINY,
    KernelCounter,
    assert_close,
    assert_same_gradients,
    assert_ties_and_sizes,
    gradients,
    make_cache,
    norms,
    peak_of,
    positions,
    randomise,
)
from safetensors import safe_open
from torch import nn
from torch._inductor.utils import run_and_get_code

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    modeling_vanilla_transformer,
)
from vanilla_transformer import loss_vanilla_transformer as loss_module
from vanilla_transformer.conversion import to_native
from vanilla_transformer.modeling_vanilla_transformer import (
    CACHE,
    SinusoidalPositions,
    VanillaTransformerAttention,
    VanillaTransformerDecoder,
    VanillaTransformerEncoder,
    eager_attention_forward,
    label_smoothed_cross_entropy,
    rotate,
    sinusoidal_positions,
)

# ----------------------------------------------------------------------------------------------------- attention (3.2)


def numpy_attention(q, k, v, mask):
    """Equation 1; `mask` is true where a query may look."""
    scores = np.where(mask, q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ v, weights


def numpy_multi_head_attention(attention: VanillaTransformerAttention, x, attended, mask):
    """Section 3.2.2, one head after the other."""

    def linear(layer, x):
        return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()

    q, k, v = linear(attention.q_proj, x), linear(attention.k_proj, attended), linear(attention.v_proj, attended)
    heads = np.arange(q.shape[-1]).reshape(-1, attention.head_dim)
    outputs, weights = zip(*(numpy_attention(q[..., h], k[..., h], v[..., h], mask) for h in heads), strict=True)
    return linear(attention.out_proj, np.concatenate(outputs, -1)), np.stack(weights, 1)


def additive(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("is_cross", [False, True])
def test_multi_head_attention_equals_numpy(is_cross, backend):
    config = VanillaTransformerConfig(**TINY)
    config._attn_implementation = backend
    attention = randomise(VanillaTransformerAttention(config, 4, False, 0)).double().eval()
    x, memory = torch.randn(2, 5, 16).double(), torch.randn(2, 7, 16).double()
    attended = memory if is_cross else x
    mask = torch.rand(2, 5, attended.shape[1]) < 0.6
    mask[..., 1] = True
    with torch.no_grad():
        ours, weights = attention(x, memory if is_cross else None, attention_mask=additive(mask[:, None]))
    theirs, their_weights = numpy_multi_head_attention(attention, x.numpy(), attended.numpy(), mask.numpy())
    assert_close(ours, torch.tensor(theirs), 1e-12)
    if backend == "eager":
        assert_close(weights, torch.tensor(their_weights), 1e-12)


@norms
@positions
def test_gradients_of_eager_and_sdpa_agree(make_model, norm_first, position_embedding_type):
    model = make_model(norm_first=norm_first, position_embedding_type=position_embedding_type)
    nothing_read = torch.cat([MASK[:2], torch.zeros_like(MASK[:1])])  # the last source is wholly masked
    results = []
    for backend in ["eager", "sdpa"]:
        model.set_attn_implementation(backend)
        output = model(SOURCE, nothing_read, TARGET, labels=LABELS.clamp(min=0))
        assert all(tensor.isfinite().all() for tensor in [output.logits, *gradients(model, output.loss).values()])
        found = gradients(model, model(SOURCE, MASK, TARGET, labels=LABELS).loss)
        # A key's bias adds the same to all scores of a query: its gradient is zero up to rounding.
        results.append((output.logits[:2], {name: g for name, g in found.items() if "k_proj.bias" not in name}))
    assert_close(results[1][0], results[0][0])
    assert_same_gradients(results[1][1], results[0][1])


def test_attention_weights_are_returned_and_sum_to_one(make_model):
    model = make_model()
    model.set_attn_implementation("eager")
    output = model(SOURCE, MASK, TARGET, output_attentions=True, output_hidden_states=True)
    read, causal = MASK[:, None, None, :].bool(), torch.ones(5, 5, dtype=torch.bool).tril()
    for kind, (*shape, visible) in {"encoder": (4, 6, read), "decoder": (2, 5, causal), "cross": (2, 5, read)}.items():
        assert len(output[f"{kind}_attentions"]) == 2
        for weights in output[f"{kind}_attentions"]:
            assert_close(weights.sum(-1), torch.ones(3, *shape))
            assert torch.equal(weights != 0, visible.expand_as(weights))
    assert [tuple(x.shape) for x in output.encoder_hidden_states] == [(3, 6, 16)] * 3
    assert [tuple(x.shape) for x in output.decoder_hidden_states] == [(3, 5, 16)] * 3
    assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)


# ----------------------------------------------------------------------------------------------------- positions (3.5)


def test_sinusoids_equal_the_formula():
    dim, rows = 32, 300
    table = [[f(n / 10000 ** (i / dim)) for i in range(0, dim, 2) for f in (math.sin, math.cos)] for n in range(rows)]
    module, short, ids = SinusoidalPositions(rows, dim), SinusoidalPositions(20, dim), torch.arange(rows)[None]
    assert module.table.dtype == torch.float32
    assert_close(module.table.double(), torch.tensor(table, dtype=torch.float64), 1e-7)
    assert torch.equal(short(ids, rows)[0], module.table)
    assert torch.equal(short(ids[:, :20], 20)[0], module.table[:20])


def test_a_table_of_sinusoids_ends_after_some_thousand_rows():
    module, places = SinusoidalPositions(5_000_000, 8), torch.tensor([[0, 700, 8191, 8192, 4_999_999]])
    assert len(module.table) == 8192
    assert torch.equal(module(places[:, :3], 8192), sinusoidal_positions(places[:, :3], 8))
    assert torch.equal(module(places, 5_000_000), sinusoidal_positions(places, 8))


@pytest.mark.parametrize("position_embedding_type", ["sinusoidal", "rotary", "marian"])
def test_positions_continue_beyond_the_table(make_model, position_embedding_type):
    long = make_model(position_embedding_type=position_embedding_type)
    short = make_model(position_embedding_type=position_embedding_type, max_position_embeddings=3)
    short.load_state_dict(long.state_dict())
    assert torch.equal(short(SOURCE, MASK, TARGET).logits, long(SOURCE, MASK, TARGET).logits)
    assert torch.equal(short.generate(SOURCE, max_new_tokens=8), long.generate(SOURCE, max_new_tokens=8))


def test_learned_positions_reject_longer_sequences(make_model):
    model = make_model(position_embedding_type="learned", max_position_embeddings=6)
    assert model(SOURCE, MASK, TARGET).logits.isfinite().all()
    longer = torch.cat([SOURCE[:, :1], SOURCE], dim=1)
    for run in [
        lambda: model(longer, decoder_input_ids=TARGET),
        lambda: model(SOURCE, decoder_input_ids=longer),
        lambda: model.generate(SOURCE, min_new_tokens=9, max_new_tokens=9),
    ]:
        with pytest.raises(ValueError, match="A sequence of 7 tokens .* `max_position_embeddings=6`"):
            run()


def test_rotary_scores_depend_on_the_distance_only():
    q, k = torch.randn(1, 1, 1, 8).double(), torch.randn(1, 1, 1, 8).double()

    def score(at_q, at_k):
        tables = [sinusoidal_positions(torch.tensor([[at]]), 8).double() for at in (at_q, at_k)]
        return (rotate(q, tables[0]) * rotate(k, tables[1])).sum()

    assert_close(score(5, 2), score(13, 10), 1e-5)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3
    assert_close(rotate(q, sinusoidal_positions(torch.tensor([[9]]), 8).double()).norm(), q.norm(), 1e-6)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_4d_source_mask_is_for_the_encoder_alone(make_model, backend):
    """It may hold for a source of any length, and cross-attention still hides padding."""
    model = make_model()
    model.set_attn_implementation(backend)
    source = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 10]])
    target = torch.tensor([[1, 5, 6, 7], [1, 5, 6, 7]])
    whole = (source != 0)[:, None, None, :].expand(-1, 1, 6, 6)
    assert_close(model(source, whole, target).logits, model(source, None, target).logits)
    diagonal = torch.eye(6, dtype=torch.bool).expand(2, 1, 6, 6)
    assert not torch.allclose(model(source, diagonal, target).logits, model(source, None, target).logits)


def test_labels_without_a_start_token_are_rejected(make_model):
    model = make_model(decoder_start_token_id=None)
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        model(torch.tensor([[5, 6]]), labels=torch.tensor([[5, 2]]))


# ------------------------------------------------------------------------------------------------ the model (Figure 1)


def test_attention_drops_nothing_unless_it_is_told():
    query, key, value = torch.randn(3, 2, 4, 5, 8).unbind()
    output, weights = eager_attention_forward(torch.nn.Identity().train(), query, key, value, None, scaling=0.5)
    assert_close(weights, (query @ key.mT * 0.5).softmax(dim=-1))
    assert_close(output, (weights @ value).transpose(1, 2))


@pytest.mark.parametrize("stack", [VanillaTransformerEncoder, VanillaTransformerDecoder])
def test_a_stack_alone_has_the_initial_weights_of_a_model(stack, make_model):
    layer = stack(make_model().config).layers[0]
    assert not layer.fc1.bias.any() and layer.fc1.weight.std() > 0.1


def test_initial_weights():
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**TINY, "vocab_size": 5000}))
    assert model.model.shared.weight.std().item() == pytest.approx(16**-0.5, rel=0.05)
    layer = model.model.decoder.layers[1]
    assert not layer.fc1.bias.any() and layer.final_layer_norm.weight.eq(1).all()
    bound = math.sqrt(6 / (16 + 20)) / math.sqrt(len(model.model.decoder.layers))
    assert 0.9 * bound < layer.fc1.weight.abs().max() <= bound
    head = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(**TINY, tie_word_embeddings=False)
    ).lm_head
    bound = math.sqrt(6 / sum(head.weight.shape))  # of no stack
    assert 0.9 * bound < head.weight.abs().max() <= bound


def test_embeddings_are_scaled_or_as_they_are(make_model):
    scaled = make_model().eval()
    plain = make_model(scale_embedding=False).eval()
    plain.load_state_dict(scaled.state_dict())
    inputs = {"input_ids": SOURCE, "decoder_input_ids": TARGET, "output_hidden_states": True}
    first, second = (model(**inputs).encoder_hidden_states[0] for model in (scaled, plain))
    assert_close(first - second, (math.sqrt(16) - 1) * plain.get_input_embeddings()(SOURCE), 1e-6)


def test_embeddings_and_encoder_outputs_replace_ids(make_model):
    model = make_model()
    expected, encoded = model(SOURCE, MASK, TARGET), model.get_encoder()(SOURCE, MASK)
    source, target = (model.get_input_embeddings()(ids) for ids in (SOURCE, TARGET))
    for inputs in [
        {"inputs_embeds": source, "decoder_input_ids": TARGET},
        {"input_ids": SOURCE, "decoder_inputs_embeds": target},
        {"encoder_outputs": encoded, "decoder_input_ids": TARGET},
        {"encoder_outputs": (encoded.last_hidden_state,), "decoder_input_ids": TARGET},
    ]:
        assert torch.equal(model(attention_mask=MASK, **inputs).logits, expected.logits)
    assert torch.equal(model(SOURCE, MASK, TARGET, return_dict=False)[0], expected.logits)
    assert torch.equal(model.model(SOURCE, MASK, TARGET).encoder_last_hidden_state, encoded.last_hidden_state)


@pytest.mark.parametrize("prefix", ["", "decoder_"])
def test_exactly_one_of_ids_and_embeddings_is_given(make_model, prefix):
    model = make_model()
    values = {f"{prefix}input_ids": SOURCE, f"{prefix}inputs_embeds": model.get_input_embeddings()(SOURCE)}
    other = {"decoder_input_ids" if prefix == "" else "input_ids": TARGET}
    with pytest.raises(ValueError, match=f"Give either `{prefix}input_ids` or `{prefix}inputs_embeds`, not both"):
        model(**other, **values)
    with pytest.raises(ValueError, match=f"Give `{prefix}input_ids` or `{prefix}inputs_embeds`; neither is given"):
        model(**other)


def test_a_source_without_a_target_is_refused_with_what_makes_one(make_model):
    for model in (make_model(), make_model().model):
        with pytest.raises(ValueError, match="`labels`.*`DataCollatorForSeq2Seq.*model=model.*`get_encoder"):
            model(SOURCE, MASK)


def test_a_decoder_without_a_source_is_refused(make_model):
    with pytest.raises(ValueError, match="Give `encoder_hidden_states`"):
        make_model().get_decoder()(TARGET)


# ------------------------------------------------------------------------------------------------------------- padding


def test_sentences_padded_with_end_tokens_are_translated_as_alone(make_model):
    """The first end after the words is read, the others are padding."""
    pad = 2
    model, lengths = make_model(pad_token_id=pad).double(), MASK.sum(1).tolist()
    rows = [row[None, :length] for row, length in zip(SOURCE, lengths, strict=True)]
    alone = [model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=8)[0] for row in rows]
    right = SOURCE.masked_fill(MASK == 0, pad)
    left, left_mask = (torch.stack([*map(torch.roll, x, [6 - length for length in lengths])]) for x in (right, MASK))
    for source, mask in [(right, MASK), (right, None), (left, left_mask), (left, None), (left, left_mask.bool())]:
        translated = model.generate(source, attention_mask=mask, max_new_tokens=8)
        for translation, own in zip(translated, alone, strict=True):
            assert torch.equal(translation[: len(own)], own) and (translation[len(own) :] == pad).all()


# --------------------------------------------------------------------------------------------------------------- cache


@norms
@positions
def test_static_cached_equals_uncached(make_model, norm_first, position_embedding_type):
    model = make_model(norm_first=norm_first, position_embedding_type=position_embedding_type).double()
    cache, steps = make_cache(model, "static"), []
    with torch.no_grad():
        inputs = {"encoder_outputs": model.get_encoder()(SOURCE, MASK), "attention_mask": MASK, "use_cache": True}
        for start, stop in [(0, 1), (1, 2), (2, 4), (4, 5)]:  # one by one, and several at once
            output = model(decoder_input_ids=TARGET[:, start:stop], **{CACHE: cache}, **inputs)
            assert output[CACHE] is cache
            steps.append(output.logits)
        assert_close(torch.cat(steps, 1), model(SOURCE, MASK, TARGET).logits, 1e-9)


def test_one_cache_is_enough(make_model):
    model = make_model()
    with pytest.raises(ValueError, match="Give `cache`, or `past_key_values` as .*, not both"):
        caches = dict.fromkeys(("cache", "past_key_values"), make_cache(model, "dynamic"))
        model(SOURCE, decoder_input_ids=TARGET, **caches)


PARTS = ["whole", "base", "encoder", "decoder", "encoder layer", "decoder layer", "attention"]


# "cach" stands for what a later transformers may call the cache: if `forward` took it for nothing, each step of
# `generate` would see one token, and the text would be wrong without a word.
@pytest.mark.parametrize("part", PARTS)
def test_an_unknown_argument_is_an_error_that_names_it(make_model, part):
    model = make_model()
    encoder, decoder = model.get_encoder(), model.get_decoder()
    parts = {"whole": model, "base": model.model, "encoder": encoder, "decoder": decoder}
    parts |= {"encoder layer": encoder.layers[0], "decoder layer": decoder.layers[0]}
    x = torch.zeros(3, 6, model.config.d_model)
    inputs = dict.fromkeys(("whole", "base"), {"input_ids": SOURCE, "decoder_input_ids": TARGET})
    inputs |= {"encoder": {"input_ids": SOURCE}, "decoder": {"input_ids": TARGET, "encoder_hidden_states": x}}
    layer = {"x": x, "attention_mask": None, "rotary": None}
    inputs |= {"encoder layer": layer, "attention": {"hidden_states": x}}
    inputs["decoder layer"] = layer | {"encoder_hidden_states": x, "encoder_attention_mask": None}
    module = parts.get(part, encoder.layers[0].self_attn)
    module(**inputs[part])
    with pytest.raises(TypeError, match="unexpected keyword argument 'cach'"):
        module(**inputs[part], cach=torch.zeros(3, 6))


# ---------------------------------------------------------------------------------------------------------- loss (5.4)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_old_name_of_the_cache_is_deprecated_where_transformers_has_a_new_one(name, make_model, monkeypatch):
    monkeypatch.setattr(modeling_vanilla_transformer, "CACHE", name)
    model = make_model()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        encoded = {"encoder_hidden_states": model.get_encoder()(SOURCE)[0]}
        model.model.decoder(TARGET, **encoded, past_key_values=make_cache(model, "dynamic"))
    assert [one.category for one in said] == [FutureWarning] * (name == "cache")


def closed_form(logits, labels, label_smoothing, num_items):
    """Section 5.4 written out, in float64."""
    has_label = labels != -100
    targets = nn.functional.one_hot(labels[has_label], logits.shape[-1]).double()
    targets = (1 - label_smoothing) * targets + label_smoothing / logits.shape[-1]
    return -(targets * logits[has_label].double().log_softmax(-1)).sum() / num_items


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_items", [None, 11, torch.tensor(11)], ids=["own", "int", "tensor"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_chunked_loss_and_gradients_equal_the_closed_form(chunks, bias, num_items, label_smoothing):
    lm_head, hidden = randomise(nn.Linear(16, 37, bias=bias)), torch.randn(3, 5, 16, requires_grad=True)
    exact_head, exact_hidden = copy.deepcopy(lm_head).double(), hidden.detach().double().requires_grad_()
    ours = label_smoothed_cross_entropy(hidden, lm_head, LABELS, label_smoothing, num_items)
    theirs = closed_form(exact_head(exact_hidden), LABELS, label_smoothing, num_items or (LABELS != -100).sum())
    ours.backward()
    theirs.backward()
    assert_close(ours.double(), theirs, 1e-6)
    for tensor, exact in [(hidden, exact_hidden), *zip(lm_head.parameters(), exact_head.parameters(), strict=True)]:
        assert_close(tensor.grad.double(), exact.grad, 1e-6)


@pytest.mark.parametrize("has_logits", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_in_double_precision_passes_gradcheck(chunks, temperature, has_logits):
    lm_head, hidden = randomise(nn.Linear(16, 37)).double(), torch.randn(6, 5, 16, dtype=torch.double)
    labels, tokens = torch.cat([LABELS, LABELS]), torch.randint(37, (6, 5, 3))
    soft_targets = (tokens, torch.rand(6, 5, 3, dtype=torch.double).softmax(-1), 0.3, temperature)

    def loss(hidden, *parameters):
        logits = lm_head(hidden) if has_logits else None
        loss = label_smoothed_cross_entropy(hidden, lm_head, labels, 0.1, None, logits, soft_targets, r_drop_alpha=2.0)
        assert loss.dtype == torch.float64
        return loss

    inputs = (hidden.requires_grad_(), *lm_head.parameters())
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True, check_undefined_grad=False)


class Doubled(nn.Linear):
    """An output projection that computes something else than its weights say, as an adapter does."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_changed_output_projection_is_called():
    lm_head, hidden = randomise(Doubled(16, 37)), torch.randn(3, 5, 16)
    loss = label_smoothed_cross_entropy(hidden, lm_head, LABELS)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(lm_head(hidden).transpose(1, 2), LABELS))


def test_soft_targets_may_be_the_first_token():
    lm_head, hidden, tokens = randomise(nn.Linear(16, 37)), torch.randn(3, 5, 16), torch.tensor([0, 1]).expand(3, 5, 2)
    soft = (tokens, torch.tensor([0.9, 0.1]).expand(3, 5, 2), 0.5, 2.0)
    by_logits = label_smoothed_cross_entropy(hidden, lm_head, LABELS, 0.1, None, lm_head(hidden), soft)
    torch.testing.assert_close(label_smoothed_cross_entropy(hidden, lm_head, LABELS, 0.1, None, None, soft), by_logits)


def test_the_logits_of_a_batch_are_never_in_memory_as_a_whole():
    lm_head, hidden, labels = nn.Linear(8, 20_000), torch.randn(1, 1000, 8), torch.ones(1, 1000, dtype=torch.long)
    peak = peak_of(lambda: label_smoothed_cross_entropy(hidden, lm_head, labels, 0.1).backward())
    assert peak < 4 * 1000 * 20_000


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_operator_passes_opcheck(bias, needs_grad, is_on_host, request):
    """Its schema, its fake shapes, its gradient, and all of them under dynamic shapes."""
    if not is_on_host:
        request.getfixturevalue("as_on_a_gpu")
    labels = torch.cat([LABELS, LABELS])
    sizes = [(6, 5, 16), (37, 16), bias and (37,)]
    hidden, weight, bias = (torch.randn(size, requires_grad=needs_grad) if size else None for size in sizes)
    targets = (labels != -100, labels[..., None].repeat(1, 1, 3), torch.full((6, 5, 3), 0.3), 0.1)
    arguments = (hidden, weight, bias, *targets, torch.float32, needs_grad)
    torch.library.opcheck(loss_module.chunked_cross_entropy, arguments)


def chunk_arguments(K: int, bias: bool, dtype: torch.dtype) -> dict:
    """Of `softmax_gradient`, for 8 rows, of which two are padding; some tokens have two shares."""
    arguments = {"chunk": torch.randn(8, 37).to(dtype), "bias": torch.randn(37) if bias else None}
    arguments |= {"ids": torch.randint(3, (8, K)), "shares": torch.rand(8, K), "kept": torch.arange(8)[:, None] < 6}
    return arguments | {"uniform": 0.1, "loss": torch.zeros(()), "grad_bias": torch.zeros(37)}


@pytest.mark.parametrize("K, bias", [(1, False), (4, True)])
def test_softmax_gradient_compiled_is_the_same(K, bias):
    """Traced as for a GPU, and run operator by operator."""
    results = []
    for function in (loss_module.softmax_gradient, torch.compile(loss_module.softmax_gradient, backend="eager")):
        torch.manual_seed(0)
        arguments = chunk_arguments(K, bias, torch.float32)
        function(**arguments)
        results.append([arguments[name] for name in ("chunk", "loss", "grad_bias")])
    assert_close(*results, 1e-6)


@pytest.mark.slow
def test_softmax_gradient_compiles_into_one_kernel():
    compiled = torch.compile(loss_module.softmax_gradient)
    _, (code,) = run_and_get_code(compiled, **chunk_arguments(1, False, torch.bfloat16))
    assert code.count("async_compile.cpp_pybinding(") == 1


@pytest.mark.slow
def test_without_a_compiler_the_loss_is_not_compiled():
    without = torch._inductor.config.patch({"cpp.cxx": ("no-compiler",), "force_disable_caches": True})
    with without, pytest.warns(UserWarning, match="torch.compile does not work here"):
        found = loss_module.compiled_softmax_gradient.__wrapped__(torch.device("cpu"))
    assert found is loss_module.softmax_gradient


@pytest.mark.parametrize("is_compiled, expected", [(True, 37), (False, 117)])
def test_kernels_of_the_loss_of_a_large_batch_on_a_gpu(monkeypatch, is_compiled, expected):
    """Forward and backward pass in float32; bfloat16 adds three casts. A compiled softmax of a chunk counts as two."""
    if is_compiled:

        def two_kernels(chunk, bias, ids, shares, kept, uniform, loss, grad_bias):
            chunk.neg_()
            loss.neg_()

        monkeypatch.setattr(loss_module, "softmax_gradient", two_kernels)
    with torch.device("meta"):
        lm_head, hidden = nn.Linear(512, 37_000, bias=False), torch.empty(250, 100, 512, requires_grad=True)
        labels, tokens = torch.empty(250, 100, dtype=torch.long), torch.empty(())
    with KernelCounter() as counter:
        label_smoothed_cross_entropy(hidden, lm_head, labels, 0.1, tokens).backward()
    assert len(counter.kernels) <= expected, counter.kernels


def test_the_loss_of_a_cpu_has_chunks_of_16_mebibytes():
    """Of at least 256 rows; each is multiplied three times: to its logits, and to both gradients."""
    for vocab_size, products in [(2**12, 3), (2**13, 6), (2**15, 12)]:
        lm_head, hidden = nn.Linear(2, vocab_size, bias=False), torch.randn(1, 1024, 2, requires_grad=True)
        with KernelCounter() as counter:
            label_smoothed_cross_entropy(hidden, lm_head, torch.ones(1, 1024, dtype=torch.long), 0.1)
        assert counter.kernels.count("mm") == products


def test_kernels_of_the_base_model_on_a_gpu():
    """Forward and backward pass without the loss, in float32, with eager attention."""
    with torch.device("meta"):
        model = VanillaTransformerModel._from_config(VanillaTransformerConfig(), attn_implementation="eager").train()
        ids = torch.empty(250, 100, dtype=torch.long)
    with KernelCounter() as counter:
        hidden = model(ids, ids, ids, use_cache=False).last_hidden_state
        hidden.backward(torch.empty_like(hidden))
    assert len(counter.kernels) <= 1091


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("num_items", [None, 11])
def test_loss_with_and_without_logits_equals_the_closed_form(make_model, chunks, num_items, label_smoothing):
    """There are logits in both modes, unless declined."""
    model = make_model(lm_head_bias=True)
    inputs = {"attention_mask": MASK, "labels": LABELS, "label_smoothing": label_smoothing}
    inputs["num_items_in_batch"] = num_items
    plain = model.eval()(SOURCE, **inputs)
    theirs = closed_form(plain.logits.detach(), LABELS, label_smoothing, num_items or (LABELS != -100).sum())
    plain_gradients = gradients(model, plain.loss)
    for mode, declined in [("train", {}), ("train", {"output_logits": False}), ("eval", {"output_logits": False})]:
        output = getattr(model, mode)()(SOURCE, **inputs, **declined)
        assert (output.logits is None) == bool(declined)
        assert_close(output.loss.double(), theirs)
        assert_same_gradients(gradients(model, output.loss), plain_gradients)
    with torch.no_grad():
        assert_close(model(SOURCE, **inputs, output_logits=False).loss.double(), theirs)


def outline(output) -> list | torch.Size | type:
    """The shapes of the tensors in nested tuples, and the types of what else is in them."""
    if isinstance(output, tuple):
        return [outline(part) for part in output]
    return output.shape if isinstance(output, torch.Tensor) else type(output)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("inputs", [{"labels": LABELS}, {}], ids=["labels", "no labels"])
@pytest.mark.parametrize("more", [False, True])
def test_outputs_have_the_places_of_marians(make_model, mode, inputs, more):
    ours, outputs = make_model(), []
    for model in (ours, to_native(ours)):
        model.set_attn_implementation("eager")
        options = {"output_attentions": more, "output_hidden_states": more, "return_dict": False}
        outputs.append(getattr(model, mode)()(SOURCE, MASK, TARGET, **inputs, **options))
    assert outline(outputs[0]) == outline(outputs[1])
    first = 1 + ("labels" in inputs)  # the hidden states, further behind, have Marian's order of features
    assert_close(outputs[0][:first], outputs[1][:first])


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_loss_is_a_function_of_the_logits_beside_it(make_model, mode):
    """So that what a caller does with the gradient of the logits, such as a saliency map, works."""
    output = getattr(make_model(), mode)()(SOURCE, MASK, labels=LABELS)
    (gradient,) = torch.autograd.grad(output.loss, output.logits, retain_graph=True)
    loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), LABELS.flatten())
    assert_close(gradient, torch.autograd.grad(loss, output.logits)[0])


@pytest.mark.parametrize("output_logits", [True, False])
def test_loss_without_targets_is_zero(make_model, output_logits):
    model, inputs = make_model(lm_head_bias=True), {"labels": torch.full_like(LABELS, -100), "label_smoothing": 0.1}
    loss = model(SOURCE, MASK, **inputs, output_logits=output_logits).loss
    assert loss == 0 and not any(gradient.any() for gradient in gradients(model, loss).values())


def test_loss_of_a_double_head_under_bfloat16_autocast():
    head, hidden = torch.nn.Linear(4, 9).double(), torch.randn(1, 2, 4, dtype=torch.float64)
    labels = torch.tensor([[1, 2]])
    with torch.autocast("cpu", torch.bfloat16):
        found = label_smoothed_cross_entropy(hidden, head, labels)
    assert_close(found.double(), torch.nn.functional.cross_entropy(head(hidden)[0], labels[0]), 0.02)


def test_training_loss_under_bfloat16_autocast(make_model, chunks):
    model = make_model(lm_head_bias=True).train()
    results = []
    for enabled in [False, True]:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(SOURCE, MASK, labels=LABELS, label_smoothing=0.1, output_logits=False).loss
        assert loss.dtype == torch.float32
        results.append((loss, gradients(model, loss)))
    (exact, expected), (rounded, found) = results
    assert 0 < abs(rounded - exact) < 0.02 * exact
    for name in ["lm_head.bias", "model.shared.weight", "model.encoder.layers.0.fc1.weight"]:
        assert found[name].dtype == torch.float32
        assert (found[name] - expected[name]).norm() < 0.05 * expected[name].norm(), name


def test_decoder_reads_the_labels_shifted_by_one(make_model):
    model = make_model()
    shifted = torch.tensor([[1, 10, 6, 22, 5], [1, 3, 14, 2, 1], [1, 1, 9, 2, 1]])  # 1 starts, and replaces -100
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(LABELS), shifted)
    assert torch.equal(model(SOURCE, MASK, shifted).logits, model(SOURCE, MASK, labels=LABELS).logits)


# ------------------------------------------------------------------------------------------------------- save and load


def assert_same_tensors(ours: nn.Module, theirs: nn.Module):
    for kind in ["named_parameters", "named_buffers"]:
        found, expected = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (ours, theirs))
        assert_close(found, expected, 0)


@pytest.mark.parametrize(
    ("position_embedding_type", "embeddings", "dtype"),
    [
        *(("learned", name, torch.float32) for name in EMBEDDINGS),
        *((name, "shared, untied", torch.bfloat16) for name in ("sinusoidal", "learned", "rotary")),
    ],
)
def test_every_tensor_is_saved_and_loaded(tmp_path, embeddings, dtype, position_embedding_type):
    options = {**EMBEDDINGS[embeddings], "norm_first": True, "position_embedding_type": position_embedding_type}
    config = VanillaTransformerConfig(**{**TINY, **options})
    model = randomise(VanillaTransformerForConditionalGeneration._from_config(config, dtype=dtype))
    model.save_pretrained(tmp_path)

    with safe_open(tmp_path / "model.safetensors", "pt") as file:  # a tied tensor is written once
        written = set(file.keys())
    assert len(written) == len(list(model.parameters()))
    assert ("model.shared.weight" in written) == config.share_encoder_decoder_embeddings
    assert ("lm_head.weight" in written) != config.tie_word_embeddings
    loaded, info = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == dtype and not loaded.training
    assert_same_tensors(loaded, model)
    assert_ties_and_sizes(loaded)
    if position_embedding_type != "learned":  # the tables, which are not saved, stay in float32
        for stack, heads in [(loaded.model.encoder, 4), (loaded.model.decoder, 2)]:
            dim = 16 // heads if position_embedding_type == "rotary" else 16
            assert torch.equal(stack.embed_positions.table, sinusoidal_positions(torch.arange(40), dim))

    base = type(model.model).from_pretrained(tmp_path)
    assert_same_tensors(base, model.model)
    base.save_pretrained(tmp_path / "base")
    assert_same_tensors(type(base).from_pretrained(tmp_path / "base"), model.model)
