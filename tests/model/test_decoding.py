"""`generate`, with transformers' searches and ours, equals plain searches over the full forward."""

import copy
from itertools import product
from threading import Thread

import pytest
import torch
from helpers import lively_model, make_cache
from peft import PrefixTuningConfig, get_peft_model
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from vanilla_transformer.data.tokenizer import special_token_ids, train_tokenizer
from vanilla_transformer.decoding_vanilla_transformer import DecodingState, beam_search, greedy_search

SOURCE = torch.tensor([[5, 9, 11, 7, 30, 2], [8, 4, 6, 2, 0, 0], [3, 2, 0, 0, 0, 0], [12, 33, 9, 9, 2, 0]])
MASK = (SOURCE != 0).long()
ALONE = [row[row != 0][None] for row in SOURCE]
LEFT = torch.stack([row.roll(6 - len(row[row != 0])) for row in SOURCE])
START, END = 1, 2
STEPS = 10
# Of models whose translations of SOURCE end at different steps; a test says so, should other seeds be needed.
SEEDS = {"sinusoidal": 35, "learned": 45, "rotary": 45}

ROUTES = {
    "greedy, no cache": {"num_beams": 1, "use_cache": False},
    "greedy": {"num_beams": 1},
    "fast greedy": {"num_beams": 1, "custom_generate": greedy_search},
    "beams, no cache": {"num_beams": 4, "use_cache": False},
    "beams": {"num_beams": 4},
    "fast beams": {"num_beams": 4, "custom_generate": beam_search},
}
routes = pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
cached = ["greedy", "fast greedy", "beams", "fast beams"]
cached_routes = pytest.mark.parametrize("route", [ROUTES[name] for name in cached], ids=cached)
slow_routes = pytest.mark.parametrize("route", [ROUTES[name] for name in ROUTES if "fast" not in name], ids=str)
caches = pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
widths = pytest.mark.parametrize("num_beams", [1, 4], ids=["greedy", "beams"])
kinds = pytest.mark.parametrize("kind", ["dynamic", "static"])


def assert_close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def make_lively():
    """make_lively(type, **config) -> a model in double precision that repeats itself little and ends its sentences."""
    return lambda kind="sinusoidal", **config: lively_model(
        SEEDS[kind], position_embedding_type=kind, **config
    ).double()


@pytest.fixture
def model(make_lively):
    return make_lively()


@pytest.fixture(params=SEEDS)
def each_model(request, make_lively):
    """With each kind of positions."""
    return make_lively(request.param)


def cut(tokens, ends=(END,)):
    """The tokens up to the first end, which they keep."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def translate(model, source=SOURCE, prefix=1, **search):
    """What `generate` adds to a prefix of so many tokens, up to the end of each sentence."""
    output = model.generate(source, **{"max_new_tokens": STEPS} | search)
    return [cut(row) for row in output[:, prefix:].tolist()]


@torch.no_grad()
def greedy_by_hand(model, source, prefix=(START,), ends=(END,), process=lambda target, scores: scores):
    """The best next token, again and again, over the full forward."""
    target = list(prefix)
    for _ in range(STEPS):
        inputs = torch.tensor([target])
        scores = model(source, decoder_input_ids=inputs).logits[:, -1].float()
        target.append(process(inputs, scores).argmax().item())
        if target[-1] in ends:
            break
    return target[len(prefix) :]


@torch.no_grad()
def beams_by_hand(model, source, prefix=(START,), ends=(END,), length_penalty=1.0, early_stopping=False, width=4):
    """Beam search over the full forward: the scores and sentences that it finishes, the best first."""
    running, finished = [(0.0, list(prefix))], []
    for step in range(1, STEPS + 1):
        targets = torch.tensor([target for _, target in running])
        logits = model(source.expand(len(running), -1), decoder_input_ids=targets).logits[:, -1]
        candidates = [
            (score + log_prob, [*target, token])
            for (score, target), row in zip(running, logits.log_softmax(-1).tolist(), strict=True)
            for token, log_prob in enumerate(row)
        ]
        candidates = sorted(candidates, reverse=True)[: (1 + len(ends)) * width]
        ended = [(s / step**length_penalty, t) for s, t in candidates[:width] if t[-1] in ends or step == STEPS]
        finished = sorted(finished + ended, reverse=True)[:width]
        running = [(score, target) for score, target in candidates if target[-1] not in ends][:width]
        # What could a running one still reach? "never" gives up only what is hopeless, False what looks so now.
        length = STEPS if early_stopping == "never" and length_penalty > 0 else step
        full = len(finished) == width
        if full and (early_stopping is True or running[0][0] / length**length_penalty <= finished[-1][0]):
            break
    return [(score, target[len(prefix) :]) for score, target in finished]


def by_hand(model, num_beams, prefixes=None, **options):
    """The best translation of each sentence alone."""
    pairs = list(zip(ALONE, prefixes or [[START]] * len(ALONE), strict=True))
    if num_beams == 1:
        return [greedy_by_hand(model, source, prefix, **options) for source, prefix in pairs]
    return [beams_by_hand(model, source, prefix, **options)[0][1] for source, prefix in pairs]


@torch.no_grad()
def forward_logits(model, source, sentence):
    """The logits of each token of a translation, from one forward over all of it: (T,V)."""
    return model(source, decoder_input_ids=torch.tensor([[START, *sentence[:-1]]])).logits[0]


def forward_scores(model, source, sentence):
    """The log-probability of each token of a translation: (T)."""
    log_probs = forward_logits(model, source, sentence).log_softmax(-1)
    return log_probs[torch.arange(len(sentence)), sentence]


# -------------------------------------------------------------------------------------------------------------- greedy


@caches
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("position_embedding_type", SEEDS)
def test_greedy_search_equals_a_loop_over_forward(make_lively, position_embedding_type, norm_first, use_cache):
    model = make_lively(position_embedding_type, norm_first=norm_first)
    output = model.generate(SOURCE, max_new_tokens=STEPS, use_cache=use_cache)
    for source, row in zip(ALONE, output.tolist(), strict=True):
        expected = greedy_by_hand(model, source)
        assert row[0] == START
        assert row[1 : len(expected) + 1] == expected
        assert not any(row[len(expected) + 1 :])  # padding


@routes
def test_sentences_that_end_at_different_steps_equal_their_translations_alone(each_model, route):
    model = each_model
    together = translate(model, **route)
    assert len({len(sentence) for sentence in together}) > 2
    assert together == [translate(model, source, **route)[0] for source in ALONE]


@cached_routes
def test_padding_on_the_left_changes_nothing(each_model, route):
    model = each_model
    expected = translate(model, **route)
    assert translate(model, LEFT, **route) == expected
    assert translate(model, LEFT, attention_mask=(LEFT != 0).long(), **route) == expected


@cached_routes
def test_a_mask_that_is_not_given_is_inferred(model, route):
    expected = translate(model, attention_mask=MASK, **route)
    assert translate(model, attention_mask=torch.ones_like(MASK), **route) != expected
    search = {**route, "max_new_tokens": STEPS}
    for inputs in [{"inputs": SOURCE}, {"input_ids": SOURCE}, {"input_ids": SOURCE, "attention_mask": None}]:
        output = model.generate(**inputs, **search)
        assert [cut(row) for row in output[:, 1:].tolist()] == expected


@cached_routes
@pytest.mark.parametrize("eos_token_id", [END, [7, END]], ids=["one end", "two ends"])
def test_a_mask_is_inferred_where_padding_is_the_end_token(make_lively, route, eos_token_id):
    model = make_lively(pad_token_id=END, eos_token_id=eos_token_id)
    expected = [translate(model, source, attention_mask=torch.ones_like(source), **route)[0] for source in ALONE]
    for source in [SOURCE, LEFT]:
        assert translate(model, source.masked_fill(source == 0, END), **route) == expected


@cached_routes
def test_without_a_padding_token_all_is_read(make_lively, route):
    model = make_lively(pad_token_id=None)
    expected = translate(model, attention_mask=torch.ones_like(MASK), **route)
    assert translate(model, **route) == expected != translate(make_lively(), **route)


@routes
def test_one_sentence_of_one_token(model, route):
    source = torch.tensor([[7]])
    expected = greedy_by_hand(model, source) if route["num_beams"] == 1 else beams_by_hand(model, source)[0][1]
    assert translate(model, source, **route) == [expected]


# --------------------------------------------------------------------------------------------------------- beam search


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_beam_search_equals_a_plain_one(model, early_stopping, length_penalty):
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    expected = [beam for source in ALONE for beam in beams_by_hand(model, source, **options)]
    for use_cache in [False, True]:
        search = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": STEPS, "use_cache": use_cache}
        search |= {"output_scores": True, "return_dict_in_generate": True}
        output = model.generate(SOURCE, **search, **options)
        assert [cut(row) for row in output.sequences[:, 1:].tolist()] == [sentence for _, sentence in expected]
        assert_close(output.sequences_scores, torch.tensor([score for score, _ in expected]))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_enough_beams_find_the_best_of_all_sentences(make_lively, length_penalty):
    model, source, steps = make_lively(vocab_size=6), torch.tensor([[3, 5, 4, 2]]), 3
    everything = torch.tensor(list(product(range(6), repeat=steps)))
    inputs = torch.cat([torch.full((len(everything), 1), START), everything[:, :-1]], 1)
    with torch.no_grad():
        log_probs = model(source.expand(len(inputs), -1), decoder_input_ids=inputs).logits.log_softmax(-1)
    totals = log_probs.gather(2, everything[..., None])[..., 0].cumsum(1).tolist()
    sentences = [cut(sentence) for sentence in everything.tolist()]
    scores = {
        tuple(sentence): total[len(sentence) - 1] / len(sentence) ** length_penalty
        for sentence, total in zip(sentences, totals, strict=True)
    }
    best = sorted(scores, key=scores.get, reverse=True)[:20]
    search = {"num_beams": 150, "num_return_sequences": 20, "length_penalty": length_penalty}
    search |= {"max_new_tokens": steps, "output_scores": True, "return_dict_in_generate": True}
    for use_cache in [False, True]:
        output = model.generate(source, use_cache=use_cache, **search)
        assert [tuple(cut(row)) for row in output.sequences[:, 1:].tolist()] == best
        assert_close(output.sequences_scores, torch.tensor([scores[sentence] for sentence in best]))


# -------------------------------------------------------------------------------------------------- scores and outputs


@caches
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_scores_of_beams_are_those_of_one_forward(model, use_cache, length_penalty):
    search = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": length_penalty, "use_cache": use_cache}
    output = model.generate(SOURCE, **search, max_new_tokens=STEPS, output_scores=True, return_dict_in_generate=True)
    steps = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    assert output.sequences.shape[0] == 3 * len(SOURCE)
    for i, row in enumerate(output.sequences[:, 1:].tolist()):
        sentence = cut(row)
        expected = forward_scores(model, ALONE[i // 3], sentence)
        assert_close(steps[i, : len(sentence)], expected)
        assert not steps[i, len(sentence) :].any()
        assert_close(output.sequences_scores[i], expected.sum() / len(sentence) ** length_penalty)


@caches
@pytest.mark.parametrize("search", [{}, {"do_sample": True, "top_k": 5}], ids=["greedy", "sampling"])
def test_scores_and_logits_are_those_of_one_forward(model, use_cache, search):
    search = search | {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    output = model.generate(SOURCE, max_new_tokens=STEPS, use_cache=use_cache, **search)
    steps = model.compute_transition_scores(output.sequences, output.logits, normalize_logits=True)
    logits, scores = torch.stack(output.logits, 1), torch.stack(output.scores, 1)
    assert logits.shape == scores.shape == (len(SOURCE), output.sequences.shape[1] - 1, 37)
    for i, row in enumerate(output.sequences[:, 1:].tolist()):
        sentence = cut(row)
        length, expected = len(sentence), forward_logits(model, ALONE[i], sentence)
        assert_close(logits[i, :length], expected)
        assert_close(steps[i, :length], forward_scores(model, ALONE[i], sentence))
        if "top_k" in search:
            expected = expected.masked_fill(expected < expected.topk(5).values[:, -1:], -torch.inf)
        assert_close(scores[i, :length], expected)
        assert expected[torch.arange(length), sentence].isfinite().all()


@caches
def test_attentions_and_hidden_states_are_those_of_one_forward(model, use_cache):
    model.set_attn_implementation("eager")
    search = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
    output = model.generate(SOURCE, max_new_tokens=5, min_new_tokens=5, use_cache=use_cache, **search)
    target = output.sequences[:, :-1]
    with torch.no_grad():
        whole = model(SOURCE, MASK, target, output_attentions=True, output_hidden_states=True)
    for step in range(5):
        for layer in range(2):
            own, cross = output.decoder_attentions[step][layer], output.cross_attentions[step][layer]
            assert_close(own[:, :, -1], whole.decoder_attentions[layer][:, :, step, : step + 1])
            assert_close(cross[:, :, -1], whole.cross_attentions[layer][:, :, step])
        for ours, theirs in zip(output.decoder_hidden_states[step], whole.decoder_hidden_states, strict=True):
            assert_close(ours[:, -1], theirs[:, step])
    for ours, theirs in zip(output.encoder_attentions, whole.encoder_attentions, strict=True):
        assert_close(ours, theirs)
    for ours, theirs in zip(output.encoder_hidden_states, whole.encoder_hidden_states, strict=True):
        assert_close(ours, theirs)


# ------------------------------------------------------------------------------------------------------------ sampling


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):
    """That of a temperature, then among the best `top_k`, then among the fewest that reach `top_p` together."""
    logits, order = (logits / temperature).sort(descending=True)
    probs = logits[: top_k or None].softmax(-1)
    kept = probs * (probs.cumsum(0) - probs < top_p)
    return torch.zeros_like(logits).scatter(0, order[: len(kept)], kept / kept.sum())


@caches
@pytest.mark.parametrize(
    "search", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 1.5, "top_k": 9, "top_p": 0.8}]
)
def test_samples_follow_the_distribution_of_forward(make_lively, use_cache, search):
    """Those of the next token after a prefix."""
    model, drawn = make_lively(), 3000
    prefix = torch.tensor([[START, 9, 14]])
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": drawn, "use_cache": use_cache} | search
    output = model.generate(ALONE[0], decoder_input_ids=prefix, max_new_tokens=1, **options)
    with torch.no_grad():
        expected = distribution(model(ALONE[0], decoder_input_ids=prefix).logits[0, -1], **search)
    found = torch.bincount(output[:, -1], minlength=37) / drawn
    assert not found[expected == 0].any()
    assert (found - expected).abs().max() < 5 * (0.25 / drawn) ** 0.5


@pytest.mark.parametrize("num_beams", [1, 3], ids=["samples", "sampled beams"])
@pytest.mark.parametrize("options", [{}, {"top_k": 8, "temperature": 1.3}, {"top_p": 0.9}], ids=str)
def test_sampling_repeats_with_its_seed_and_without_the_cache(model, num_beams, options):
    def sample(seed, use_cache):
        torch.manual_seed(seed)
        search = {"do_sample": True, "num_beams": num_beams, "num_return_sequences": 3, "use_cache": use_cache}
        return model.generate(SOURCE, attention_mask=MASK, max_new_tokens=STEPS, **search, **options)

    first = sample(1, True)
    assert first.shape[0] == 3 * len(SOURCE)
    assert torch.equal(sample(1, True), first)
    assert torch.equal(sample(1, False), first)
    assert sample(2, True).tolist() != first.tolist()


# --------------------------------------------------------------------------------------------------------- constraints


def has_no_bigram_twice(tokens):
    bigrams = list(zip(tokens, tokens[1:], strict=False))
    return len(set(bigrams)) == len(bigrams)


CONSTRAINTS = {
    "max_new_tokens": ({"max_new_tokens": 3}, lambda tokens: len(tokens) <= 3),
    "max_length": ({"max_new_tokens": None, "max_length": 3}, lambda tokens: len(tokens) <= 2),
    "min_new_tokens": ({"min_new_tokens": 7}, lambda tokens: len(tokens) >= 7),
    "min_length": ({"min_length": 7}, lambda tokens: len(tokens) >= 7),
    "forced_bos_token_id": ({"forced_bos_token_id": 9}, lambda tokens: tokens[0] == 9),
    "forced_eos_token_id": ({"forced_eos_token_id": END}, lambda tokens: END in tokens),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, has_no_bigram_twice),
    "bad_words_ids": (
        {"bad_words_ids": [[11], [0, 4]]},
        lambda tokens: 11 not in tokens and (0, 4) not in zip(tokens, tokens[1:], strict=False),
    ),
    "suppress_tokens": ({"suppress_tokens": [4, 0]}, lambda tokens: not {4, 0} & set(tokens)),
    "begin_suppress_tokens": ({"begin_suppress_tokens": [4, 0, 32]}, lambda tokens: tokens[0] not in {4, 0, 32}),
    "sequence_bias": ({"sequence_bias": [[[9], 100.0]]}, lambda tokens: set(tokens) == {9}),
    "encoder_no_repeat_ngram_size": ({"encoder_no_repeat_ngram_size": 1}, lambda tokens: END not in tokens),
}


# Their processors depend on which rows are in the batch.
ACROSS_ROWS = ("sequence_bias", "begin_suppress_tokens", "encoder_no_repeat_ngram_size")


@routes
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_hold(make_lively, name, route):
    model = make_lively()
    options, holds = CONSTRAINTS[name]
    search = {**route, "max_new_tokens": 8}
    if "custom_generate" in route and name in ACROSS_ROWS:
        with pytest.raises(ValueError, match="does not support .*Processor; call `model.generate` without"):
            model.generate(SOURCE, **search | options)
        return
    assert not all(map(holds, translate(model, **search)))
    constrained = translate(model, **search | options)
    assert all(map(holds, constrained)), constrained


@routes
@pytest.mark.parametrize("in_config", [False, True], ids=["option", "config"])
def test_each_of_several_end_tokens_ends_a_sentence(make_lively, route, in_config):
    ends = [END, 11]
    model = make_lively(eos_token_id=ends if in_config else END)
    option = {} if in_config else {"eos_token_id": ends}
    output = model.generate(SOURCE, max_new_tokens=STEPS, **route, **option)
    sentences = [cut(row, ends) for row in output[:, 1:].tolist()]
    assert sentences == by_hand(model, route["num_beams"], ends=ends)
    assert {sentence[-1] for sentence in sentences} >= set(ends)


@slow_routes
def test_stopping_criteria_end_each_sentence(make_lively, route):
    model, search = make_lively(), route
    stop = StoppingCriteriaList([lambda tokens, scores, **kwargs: tokens[:, -1] == 11])
    stopped = translate(model, stopping_criteria=stop, **search)
    assert any(11 in sentence for sentence in stopped)
    for sentence, ended in zip(stopped, translate(model, eos_token_id=[END, 11], **search), strict=True):
        assert cut(sentence, (END, 11)) == cut(ended, (END, 11))
        assert not set(sentence[len(cut(sentence, (11,))) :]) - {0, END}  # padding


@slow_routes
def test_allowed_tokens_are_asked_for_each_sentence(make_lively, route):
    model = make_lively()
    wanted = [[30, 7, 9, END], [8, 8, 6, 5, 4, END], [3, END], [12, 33, END]]

    def allowed(sentence, tokens):
        return wanted[sentence][len(tokens) - 1 :][:1] or [END]

    assert translate(model, prefix_allowed_tokens_fn=allowed, **route) == wanted


@caches
def test_logits_processors_see_the_sentence_so_far(model, use_cache):
    def process(tokens, scores):
        """Makes each token that is there already less likely, by its place."""
        places = torch.arange(1.0, tokens.shape[1] + 1).expand(tokens.shape)
        return scores.scatter_add(1, tokens, -places)

    found = translate(model, logits_processor=LogitsProcessorList([process]), use_cache=use_cache)
    assert found == [greedy_by_hand(model, source, process=process) for source in ALONE] != translate(model)


@widths
def test_a_generation_config_equals_its_options(make_lively, num_beams):
    model = make_lively()
    options = {"num_beams": num_beams, "max_new_tokens": 6, "no_repeat_ngram_size": 2}
    expected = model.generate(SOURCE, **options)
    whole = GenerationConfig(**model.generation_config.to_dict() | options)
    assert torch.equal(model.generate(SOURCE, whole), expected)
    model.generation_config = whole
    assert torch.equal(model.generate(SOURCE), expected)


# ------------------------------------------------------------------------------------------------------ decoder prefix

PREFIX = torch.tensor([[1, 5, 7, 9], [1, 8, 3, 3], [1, 14, 30, 2], [1, 4, 4, 8]])
SHORTER = torch.tensor([[1, 5, 7, 9], [0, 1, 8, 3], [0, 0, 0, 1], [0, 0, 1, 30]])


@routes
def test_a_prefix_is_continued(each_model, route):
    model = each_model
    search = {**route, "decoder_input_ids": PREFIX}
    expected = by_hand(model, route["num_beams"], PREFIX.tolist())
    assert translate(model, prefix=4, **search) == expected
    if "custom_generate" not in route:
        assert translate(model, prefix=4, **search, decoder_attention_mask=torch.ones_like(PREFIX)) == expected
    search["decoder_input_ids"] = PREFIX[:, 1:]  # the start is put before it
    assert translate(model, prefix=4, **search) == expected


@widths
@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
def test_prefixes_of_different_length_are_continued_as_alone(each_model, num_beams, cache):
    """Padded on the left, and masked there."""
    model = each_model
    mask = (SHORTER != 0).long()
    search = {"cache_implementation": cache} if cache else {"use_cache": False}
    search |= {"num_beams": num_beams, "decoder_input_ids": SHORTER, "decoder_attention_mask": mask}
    prefixes = [row[row != 0].tolist() for row in SHORTER]
    assert translate(model, prefix=4, **search) == by_hand(model, num_beams, prefixes)


@caches
def test_each_sentence_may_have_a_start_of_its_own(model, use_cache):
    starts = [9, 14, 1, 30]
    expected = by_hand(model, 1, [[start] for start in starts])
    assert translate(model, decoder_start_token_id=starts, use_cache=use_cache) == expected != translate(model)


# -------------------------------------------------------------------------------------------------------------- caches


@widths
@kinds
def test_a_cache_handed_over_is_used_and_used_again(each_model, num_beams, kind):
    model = each_model
    cache = make_cache(model, kind)
    for source in [SOURCE, SOURCE.flip(0)]:
        search = {"num_beams": num_beams, "max_new_tokens": STEPS}
        expected = model.generate(source, use_cache=False, **search)
        assert torch.equal(model.generate(source, past_key_values=cache, **search), expected)
        assert cache.get_seq_length() > 3
        cache.reset()


@pytest.mark.parametrize("position_embedding_type", SEEDS)
def test_a_static_cache_may_be_longer_than_the_positions(make_lively, position_embedding_type):
    """As long as the sentence is not."""
    model = make_lively(position_embedding_type)
    cache = make_cache(model, "static", length=model.config.max_position_embeddings + 10)
    assert translate(model, past_key_values=cache) == translate(model, use_cache=False)


@kinds
def test_a_returned_cache_goes_on(each_model, kind):
    model = each_model
    search = {"return_dict_in_generate": True, "output_scores": True}
    whole = model.generate(SOURCE, min_new_tokens=9, max_new_tokens=9, use_cache=False, **search)
    cache = make_cache(model, kind)
    begun = model.generate(SOURCE, past_key_values=cache, min_new_tokens=4, max_new_tokens=4, **search)
    assert begun.past_key_values is cache and cache.get_seq_length() == 4  # the start and all but the last
    prefix = {"decoder_input_ids": begun.sequences, "decoder_attention_mask": torch.ones_like(begun.sequences)}
    read = []
    hook = model.get_decoder().embed_tokens.register_forward_hook(lambda _, ids, __: read.append(ids[0].shape[1]))
    ended = model.generate(SOURCE, past_key_values=cache, min_new_tokens=5, max_new_tokens=5, **prefix, **search)
    hook.remove()
    assert ended.past_key_values is cache and cache.get_seq_length() == 9
    assert read == [1] * 5
    assert torch.equal(ended.sequences, whole.sequences)
    for ours, theirs in zip(begun.scores + ended.scores, whole.scores, strict=True):
        assert_close(ours, theirs)


@kinds
def test_a_reordered_cache_goes_on_with_the_sentences_chosen(model, kind):
    """Cross-attention reads its keys from the cache, too, whatever source it is given."""
    order, target = torch.tensor([2, 0, 3, 3]), PREFIX
    cache, encoded = make_cache(model, kind), model.get_encoder()(SOURCE, MASK)
    inputs = {"encoder_outputs": encoded, "past_key_values": cache, "use_cache": True}
    with torch.no_grad():
        model(attention_mask=MASK, decoder_input_ids=target[:, :3], **inputs)
        cache.reorder_cache(order)
        step = model(attention_mask=MASK[order], decoder_input_ids=target[order, 3:], **inputs).logits
        expected = model(SOURCE[order], MASK[order], target[order]).logits[:, 3:]
    assert_close(step, expected, 1e-9)


# -------------------------------------------------------------------------------------------------------- other inputs


@routes
def test_encoder_outputs_or_embeddings_stand_in_for_the_source(model, route):
    search = {**route, "attention_mask": MASK}
    encoded, embedded = model.get_encoder()(SOURCE, MASK), model.get_input_embeddings()(SOURCE)
    calls = []
    model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    expected = translate(model, **search)
    assert translate(model, None, inputs_embeds=embedded, **search) == expected
    assert len(calls) == 2
    assert translate(model, None, encoder_outputs=encoded, **search) == expected
    assert len(calls) == 2


@cached_routes
@pytest.mark.parametrize("tie_word_embeddings", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("decoder_vocab_size", [23, 50])
def test_vocabularies_of_their_own(make_lively, decoder_vocab_size, tie_word_embeddings, route):
    sizes = {"decoder_vocab_size": decoder_vocab_size, "share_encoder_decoder_embeddings": False}
    model = make_lively("learned", **sizes, tie_word_embeddings=tie_word_embeddings)
    expected = by_hand(model, route["num_beams"])
    assert translate(model, **route) == expected
    sampled = model.generate(SOURCE, do_sample=True, top_k=0, num_return_sequences=50, max_new_tokens=STEPS)
    assert decoder_vocab_size - 5 < sampled.max() < decoder_vocab_size


@pytest.mark.parametrize("search", [{}, {"num_beams": 4}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
@kinds
@pytest.mark.parametrize("position_embedding_type", SEEDS)
def test_a_model_in_bfloat16_generates(make_lively, position_embedding_type, search, kind):
    """Also with positions beyond the table, which are computed."""
    rows = {} if position_embedding_type == "learned" else {"max_position_embeddings": 3}
    model = make_lively(position_embedding_type, **rows)
    expected = model(SOURCE, MASK, torch.full((len(SOURCE), 1), START)).logits[:, 0]
    search = search | {"cache_implementation": kind, "output_logits": True, "return_dict_in_generate": True}
    output = model.to(torch.bfloat16).generate(SOURCE, max_new_tokens=STEPS, min_new_tokens=STEPS, **search)
    assert output.sequences.shape == (len(SOURCE), STEPS + 1)
    assert {layer.keys.dtype for layer in output.past_key_values.self_attention_cache.layers} == {torch.bfloat16}
    assert_close(output.logits[0][:: search.get("num_beams", 1)], expected, 0.1)
    assert torch.stack(output.logits).isfinite().all()


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "search", [{}, {"num_beams": 4}, {"do_sample": True}, {"prompt_lookup_num_tokens": 2}], ids=str
)
def test_generating_changes_nothing_in_the_model(make_lively, mode, search):
    model = make_lively(dropout=0.5)
    getattr(model, mode)()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = model.config.to_dict(), model.generation_config.to_dict()
    drawn = [model.generate(ALONE[0], max_new_tokens=20, min_new_tokens=20, **search) for _ in range(3)]
    assert all(module.training == (mode == "train") for module in model.modules())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == settings
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    differ = len({str(output.tolist()) for output in drawn}) > 1
    assert differ == (mode == "train" or "do_sample" in search)  # dropout is at work, as it was asked


# --------------------------------------------------------------------------------------------------- assisted decoding

LONG = {"max_new_tokens": 24, "min_new_tokens": 24}


def assistants(model, make_lively):
    small = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 12}
    return {
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "itself": {"assistant_model": model},
        "its copy": {"assistant_model": copy.deepcopy(model)},
        "a smaller model": {"assistant_model": make_lively(**small)},
    }


@pytest.mark.parametrize("kind", ["prompt lookup", "itself", "its copy", "a smaller model"])
@pytest.mark.parametrize("position_embedding_type", SEEDS)
def test_assisted_decoding_equals_greedy_search(make_lively, position_embedding_type, kind):
    model = make_lively(position_embedding_type, max_position_embeddings=400)
    options = assistants(model, make_lively)[kind]
    search = {**LONG, "decoder_input_ids": torch.tensor([[START, 9, 14]])}
    search |= {"output_scores": True, "return_dict_in_generate": True}
    expected = model.generate(ALONE[0], **search)
    assisted = model.generate(ALONE[0], **options, **search)
    assert torch.equal(assisted.sequences, expected.sequences)
    for ours, theirs in zip(assisted.scores, expected.scores, strict=True):
        assert_close(ours, theirs)


def count_calls(model, **search):
    """How often `generate` runs the model for one sentence of 24 tokens."""
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    model.generate(ALONE[0], decoder_attention_mask=torch.ones(1, 1, dtype=torch.long), **LONG, **search)
    hook.remove()
    return len(calls)


def test_right_drafts_are_accepted_and_wrong_ones_are_not(model):
    """A model that is its own assistant drafts nothing wrong: each call accepts 5 tokens and adds one."""
    assistant = copy.deepcopy(model)
    drafts = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    assistant.generation_config.update(**drafts, assistant_confidence_threshold=0.0)
    assert count_calls(model) == 24
    assert count_calls(model, assistant_model=assistant) == 24 / 6
    with torch.no_grad():
        assistant.lm_head.bias[3] += 1000.0
    assert count_calls(model, assistant_model=assistant) > 20
    assert count_calls(model, prompt_lookup_num_tokens=3) < 24


# ----------------------------------------------------------------------------------------------------------- streaming


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sees a dog", "a dog sees the red house", "the house sees no cat"] * 5, 300)


@pytest.fixture
def writer(tokenizer, make_lively):
    """A model that writes words, with its source and the options to have it do so."""
    model = make_lively(vocab_size=len(tokenizer), **special_token_ids(tokenizer))
    words = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).strip().isalpha()]
    words = [i for i in words if tokenizer.decode([i]).isascii()]
    search = {"prefix_allowed_tokens_fn": lambda *_: words, "max_new_tokens": 25, "no_repeat_ngram_size": 2}
    return model, tokenizer("the red cat sees a house", return_tensors="pt").input_ids, search


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_a_streamer_in_a_thread_gives_the_text_of_the_output(writer, tokenizer, options):
    model, source, search = writer
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    outputs = []

    def write():
        outputs.append(model.generate(source, streamer=streamer, **search, **options))

    thread = Thread(target=write)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == tokenizer.decode(outputs[0][0], skip_special_tokens=True)
    assert len(pieces) > 3


# ------------------------------------------------------------------------------------------------------- our searches


def custom(search: dict) -> dict:
    """The search by our functions."""
    return search | {"custom_generate": beam_search if search.get("num_beams", 1) > 1 else greedy_search}


SEARCHES = [{}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.3}, {"num_beams": 3, "no_repeat_ngram_size": 2}]
SEARCHES += [{"num_beams": 3, "min_new_tokens": 4}, {"num_beams": 3, "eos_token_id": [END, 7]}]
SEARCHES += [{"num_beams": 5, "suppress_tokens": list(range(3, 36))}]  # fewer ways to go on than beams
SEARCHES += [
    {"num_beams": beams, "length_penalty": penalty, "early_stopping": early, "num_return_sequences": returned}
    for beams, penalty, early, returned in product((3,), (0.0, 1.0, -1.0), (False, True, "never"), (2,))
]


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_our_searches_equal_those_of_transformers(search, make_lively):
    """Batches in which sentences end at different steps, some of them at the maximum length."""
    model = make_lively()
    generator = torch.Generator().manual_seed(0)
    for count in (1, 9):
        source = torch.randint(3, model.config.vocab_size, (count, 9), generator=generator)
        lengths = torch.randint(1, 10, (count, 1), generator=generator)
        for limit in (5, 12):
            options = {"attention_mask": (torch.arange(9) < lengths).long(), "max_new_tokens": limit, **search}
            assert torch.equal(model.generate(source, **custom(options)), model.generate(source, **options))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("position_embedding_type", SEEDS)
def test_keys_without_descendants_are_pruned(make_lively, position_embedding_type, attention, monkeypatch):
    model = make_lively(position_embedding_type, max_position_embeddings=100)
    model.set_attn_implementation(attention)
    keys, step = [], DecodingState.step

    def note(state, tokens):
        keys.append(state.cache.get_seq_length())
        return step(state, tokens)

    monkeypatch.setattr(DecodingState, "step", note)
    options = {"attention_mask": MASK, "num_beams": 4, "min_new_tokens": 80, "max_new_tokens": 80}
    output = model.generate(SOURCE, **custom(options))
    assert len(keys) == 79 and max(keys) < 80 * 4 * 0.8
    assert torch.equal(output, model.generate(SOURCE, **options))


@widths
def test_finished_sentences_leave_the_batch(num_beams, make_lively, monkeypatch):
    """The layers are called for fewer sentences as these end, and for each source once."""
    model, rows = make_lively(), []
    model.model.decoder.layers[0].register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[:2]))
    output = model.generate(SOURCE, attention_mask=MASK, max_new_tokens=STEPS, **custom({"num_beams": num_beams}))
    sentences, beams = zip(*rows, strict=True)
    assert beams == (1, *[num_beams] * (len(rows) - 1))
    assert sentences[0] == len(SOURCE) > sentences[-1] and list(sentences) == sorted(sentences, reverse=True)
    if num_beams == 1:
        ends = [len(cut(row)) for row in output[:, 1:].tolist()]
        assert list(sentences) == [sum(end > step for end in ends) for step in range(max(ends))]


UNSUPPORTED = {
    "generation mode": {"do_sample": True},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "cache_implementation": {"cache_implementation": "static"},
    "decoder_attention_mask": {"decoder_attention_mask": torch.ones(4, 1)},
    "MaxTimeCriteria": {"max_time": 9.0},
    "StopAt": {"stopping_criteria": StoppingCriteriaList([type("StopAt", (), {"__call__": lambda *_: None})()])},
    "EncoderRepetitionPenaltyLogitsProcessor": {"encoder_repetition_penalty": 1.5},
}


@widths
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_our_searches_refuse_what_they_do_not_support(name, make_lively, num_beams):
    search = custom({"num_beams": num_beams, "max_new_tokens": STEPS})
    with pytest.raises(ValueError, match=f"does not support .*{name}.*; call `model.generate` without"):
        make_lively().generate(SOURCE, **search, **UNSUPPORTED[name])


def test_our_searches_refuse_a_trained_prefix_and_other_attention(make_lively):
    model = make_lively(encoder_attention_heads=2, decoder_attention_heads=2)
    config = PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="does not support a changed `prepare_inputs_for_generation`"):
        get_peft_model(copy.deepcopy(model), config).generate(input_ids=SOURCE, custom_generate=greedy_search)
    encoded = model.get_encoder()(SOURCE)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="does not support `attn_implementation='flex_attention'`"):
        model.generate(encoder_outputs=encoded, custom_generate=beam_search, num_beams=2)
