"""`generate`, with transformers' searches and ours, equals plain searches over the full forward."""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close, lively_model, make_cache, peak_of
from peft import PrefixTuningConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, StoppingCriteriaList

from vanilla_transformer.decoding_vanilla_transformer import (
    DecodingState,
    Hypotheses,
    Unsupported,
    beam_search,
    greedy_search,
)
from vanilla_transformer.modeling_vanilla_transformer import CACHE
from vanilla_transformer.translation_vanilla_transformer import TorchEngine

SOURCE = torch.tensor([[5, 9, 11, 7, 30, 2], [8, 4, 6, 2, 0, 0], [3, 2, 0, 0, 0, 0], [12, 33, 9, 9, 2, 0]])
MASK = (SOURCE != 0).long()
ALONE = [row[row != 0][None] for row in SOURCE]
LEFT = torch.stack([row.roll(6 - len(row[row != 0])) for row in SOURCE])
START, END = 1, 2
STEPS = 10
# Of models whose translations of SOURCE end at different steps; test_padding_on_the_left_changes_nothing says so.
SEEDS = {"sinusoidal": 35, "learned": 45, "rotary": 45, "marian": 14}

ROUTES = {
    "greedy": {"num_beams": 1},
    "fast greedy": {"num_beams": 1, "custom_generate": greedy_search},
    "beams": {"num_beams": 4},
    "fast beams": {"num_beams": 4, "custom_generate": beam_search},
}
routes = pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
fast_routes = pytest.mark.parametrize("route", [ROUTES["fast greedy"], ROUTES["fast beams"]], ids=["greedy", "beams"])
# Our searches with all positions, and transformers' with one each.
PAIRS = [("fast greedy", kind) for kind in SEEDS] + [("fast beams", kind) for kind in SEEDS]
PAIRS += [("greedy", "learned"), ("beams", "rotary")]
pairs = pytest.mark.parametrize("route, positions", [(ROUTES[one], kind) for one, kind in PAIRS], ids=map(str, PAIRS))
widths = pytest.mark.parametrize("num_beams", [1, 4], ids=["greedy", "beams"])
all_positions = pytest.mark.parametrize("positions", SEEDS)


def make_lively(positions="sinusoidal", **config):
    """A model in double precision that repeats itself little and ends its sentences."""
    return lively_model(SEEDS[positions], position_embedding_type=positions, **config).double()


@pytest.fixture
def model():
    return make_lively()


def cut(tokens, ends=(END,)):
    """The tokens up to the first end, which they keep."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def translate(model, source=SOURCE, prefix=1, **search):
    """What `generate` adds to a prefix of so many tokens, up to the end of each sentence."""
    output = model.generate(source, **{"max_new_tokens": STEPS} | search)
    return [cut(row) for row in output[:, prefix:].tolist()]


@torch.no_grad()
def greedy_by_hand(model, source, prefix=(START,), ends=(END,)):
    """Greedy search over the full forward."""
    target = list(prefix)
    for _ in range(STEPS):
        target.append(model(source, decoder_input_ids=torch.tensor([target])).logits[0, -1].argmax().item())
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


# -------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@all_positions
def test_greedy_search_equals_a_loop_over_forward(positions, norm_first, use_cache):
    model = make_lively(positions, norm_first=norm_first)
    expected = [torch.tensor([START, *sentence]) for sentence in by_hand(model, num_beams=1)]
    output = model.generate(SOURCE, max_new_tokens=STEPS, use_cache=use_cache)
    assert torch.equal(output, pad_sequence(expected, batch_first=True))


@pairs
def test_padding_on_the_left_changes_nothing(route, positions):
    model = make_lively(positions)
    expected = translate(model, **route)
    assert len({len(sentence) for sentence in expected}) > 2  # as in all tests with these models
    assert translate(model, LEFT, **route) == expected
    assert translate(model, LEFT, attention_mask=(LEFT != 0).long(), **route) == expected


@routes
def test_a_mask_that_is_not_given_is_inferred(model, route):
    """From the padding; encoder outputs that were computed before have theirs."""
    expected = translate(model, attention_mask=MASK, **route)
    assert translate(model, attention_mask=torch.ones_like(MASK), **route) != expected
    assert translate(model, **route) == expected
    encoded = model.get_encoder()(SOURCE)
    for given in [{"input_ids": SOURCE}, {"input_ids": SOURCE, "attention_mask": None}, {"encoder_outputs": encoded}]:
        assert translate(model, None, **given, **route) == expected


@fast_routes
@pytest.mark.parametrize("eos_token_id", [END, [7, END]], ids=["one end", "two ends"])
def test_a_mask_is_inferred_where_padding_is_the_end_token(route, eos_token_id):
    model = make_lively(pad_token_id=END, eos_token_id=eos_token_id)
    expected = [translate(model, source, attention_mask=torch.ones_like(source), **route)[0] for source in ALONE]
    for source in [SOURCE, LEFT]:
        assert translate(model, source.masked_fill(source == 0, END), **route) == expected


@fast_routes
def test_without_a_padding_token_every_token_is_read(route):
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
    options |= {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": STEPS}
    assert translate(model, custom_generate=beam_search, **options) == [sentence for _, sentence in expected]
    for search in ({"custom_generate": beam_search}, {"output_scores": True}):
        output = model.generate(SOURCE, **options, **search, return_dict_in_generate=True)
        assert [cut(row) for row in output.sequences[:, 1:].tolist()] == [sentence for _, sentence in expected]
        assert_close(output.sequences_scores.tolist(), [score for score, _ in expected])


@pytest.mark.parametrize(
    "early_stopping, length_penalty, running, can_improve",
    [
        (False, 1.0, -5.9, True),
        (False, 1.0, -6.1, False),
        ("never", 1.0, -19.9, True),  # which is divided by the largest length, 10, and not by 3
        ("never", 1.0, -20.1, False),
        (False, -1.0, -0.66, True),
        ("never", -1.0, -0.66, True),  # the score of a longer sentence is lower
        ("never", -1.0, -0.67, False),
        (True, 1.0, -0.1, False),
    ],
)
def test_running_beams_that_may_beat_the_worst_of_the_finished(early_stopping, length_penalty, running, can_improve):
    config = GenerationConfig(early_stopping=early_stopping, length_penalty=length_penalty)
    finished, first = Hypotheses(torch.ones(2, 2, 1, dtype=torch.long), config), torch.tensor([0])
    log_probs = torch.tensor([[-1.0, -2.0]]) * 2**length_penalty  # of two tokens
    scores = torch.tensor([[running, running - 1]])
    finished.add(first, torch.ones(1, 2, 3, dtype=torch.long), log_probs, torch.ones(1, 2, dtype=torch.bool))
    for sentence, improves in [(first, can_improve), (first + 1, True)]:  # the second has finished none
        assert finished.can_improve(sentence, scores, 3, 10).tolist() == [improves]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_enough_beams_find_the_best_of_all_sentences(length_penalty):
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
    found = translate(model, source, max_new_tokens=steps, **search, custom_generate=beam_search)
    assert list(map(tuple, found)) == best


# --------------------------------------------------------------------------------------------------- ends and prefixes


@fast_routes
@pytest.mark.parametrize("in_config", [False, True], ids=["option", "config"])
def test_each_of_several_end_tokens_ends_a_sentence(route, in_config):
    ends = [END, 11]
    model = make_lively(eos_token_id=ends if in_config else END)
    option = {} if in_config else {"eos_token_id": ends}
    output = model.generate(SOURCE, max_new_tokens=STEPS, **route, **option)
    sentences = [cut(row, ends) for row in output[:, 1:].tolist()]
    assert sentences == by_hand(model, route["num_beams"], ends=ends)
    assert {sentence[-1] for sentence in sentences} >= set(ends)


PREFIX = torch.tensor([[1, 5, 7, 9], [1, 8, 3, 3], [1, 14, 30, 2], [1, 4, 4, 8]])
SHORTER = torch.tensor([[1, 5, 7, 9], [0, 1, 8, 3], [0, 0, 0, 1], [0, 0, 1, 30]])


@pairs
def test_a_prefix_is_continued(route, positions):
    model = make_lively(positions)
    search = {**route, "decoder_input_ids": PREFIX}
    expected = by_hand(model, route["num_beams"], PREFIX.tolist())
    assert translate(model, prefix=4, **search) == expected
    if "custom_generate" not in route:
        assert translate(model, prefix=4, **search, decoder_attention_mask=torch.ones_like(PREFIX)) == expected
    search["decoder_input_ids"] = PREFIX[:, 1:]  # `generate` puts the start token before it
    assert translate(model, prefix=4, **search) == expected


@all_positions
@pytest.mark.parametrize(
    "num_beams, cache, attention",
    [(1, None, "sdpa"), (1, "static", "sdpa"), (1, "static", "eager"), (4, "dynamic", "sdpa")],
)
def test_prefixes_padded_on_the_left_are_continued_as_alone(positions, num_beams, cache, attention):
    model = make_lively(positions)
    model.set_attn_implementation(attention)
    mask = (SHORTER != 0).long()
    search = {"cache_implementation": cache} if cache else {"use_cache": False}
    search |= {"num_beams": num_beams, "decoder_input_ids": SHORTER, "decoder_attention_mask": mask}
    prefixes = [row[row != 0].tolist() for row in SHORTER]
    assert translate(model, prefix=4, **search) == by_hand(model, num_beams, prefixes)


# --------------------------------------------------------------------------------------------- caches and other inputs


@all_positions
@pytest.mark.parametrize("num_beams, kind", [(1, "static"), (4, "dynamic"), (4, "static")])
def test_a_cache_can_be_passed_and_used_again(positions, num_beams, kind):
    model = make_lively(positions)
    cache = make_cache(model, kind)
    for source in [SOURCE, SOURCE.flip(0)]:
        search = {"num_beams": num_beams, "max_new_tokens": STEPS}
        expected = model.generate(source, use_cache=False, **search)
        assert torch.equal(model.generate(source, **{CACHE: cache}, **search), expected)
        assert cache.get_seq_length() > 3
        cache.reset()


@routes
def test_encoder_outputs_or_embeddings_replace_the_source(model, route):
    search = {**route, "attention_mask": MASK}
    encoded, embedded = model.get_encoder()(SOURCE, MASK), model.get_input_embeddings()(SOURCE)
    calls = []
    model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    expected = translate(model, **search)
    assert translate(model, None, inputs_embeds=embedded, **search) == expected
    assert len(calls) == 2
    assert translate(model, None, encoder_outputs=encoded, **search) == expected
    assert len(calls) == 2


@fast_routes
@pytest.mark.parametrize("tie_word_embeddings", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("decoder_vocab_size", [23, 50])
def test_source_and_target_vocabularies_of_different_size(decoder_vocab_size, tie_word_embeddings, route):
    sizes = {"decoder_vocab_size": decoder_vocab_size, "share_encoder_decoder_embeddings": False}
    model = make_lively("learned", **sizes, tie_word_embeddings=tie_word_embeddings)
    assert translate(model, **route) == by_hand(model, route["num_beams"])


# ------------------------------------------------------------------------------------------------------- our searches


def custom(search: dict) -> dict:
    """The same search by our functions."""
    return search | {"custom_generate": beam_search if search.get("num_beams", 1) > 1 else greedy_search}


OPTIONS = [{}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.3}, {"min_new_tokens": 4}, {"min_length": 4}]
OPTIONS += [{"eos_token_id": [END, 7]}, {"bad_words_ids": [[11], [0, 4]]}, {"suppress_tokens": [4, 0]}]
OPTIONS += [{"forced_bos_token_id": 9, "forced_eos_token_id": END}, {"max_new_tokens": None, "max_length": 3}]
OPTIONS += [{"max_time": 1e-9}, {"max_time": 1e9}]
SEARCHES = [*OPTIONS, {"num_beams": 2}, *({"num_beams": 3, **options} for options in OPTIONS)]
SEARCHES += [{"num_beams": 5, "suppress_tokens": list(range(3, 36))}]  # fewer possible tokens than beams
SEARCHES += [
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": penalty, "early_stopping": early}
    for penalty, early in product((0.0, 1.0, -0.5, -1.0), (False, True, "never"))
]


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_our_searches_equal_those_of_transformers(search):
    """Batches in which sentences end at different steps, some of them at the maximum length."""
    model = make_lively()
    generator = torch.Generator().manual_seed(0)
    for count in (1, 9):
        source = torch.randint(3, model.config.vocab_size, (count, 9), generator=generator)
        lengths = torch.randint(1, 10, (count, 1), generator=generator)
        for limit in (5, 12):
            options = {"attention_mask": (torch.arange(9) < lengths).long(), "max_new_tokens": limit, **search}
            assert torch.equal(model.generate(source, **custom(options)), model.generate(source, **options))


@pytest.mark.parametrize("ends", [[2] * 5000, list(range(37))], ids=["one end, often", "every token"])
def test_beams_go_on_with_any_list_of_ends(model, ends):
    distinct = list(set(ends))
    options = {"num_beams": 4, "max_new_tokens": 6, "early_stopping": True, "custom_generate": beam_search}
    found = model.generate(SOURCE, **options, eos_token_id=ends)
    assert torch.equal(found, model.generate(SOURCE, **options, eos_token_id=distinct)) and len(found) == len(SOURCE)


def test_beams_go_on_where_each_could_end_in_two_ways():
    model = make_lively(lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[[END, 7]] += 9.0
    search = {"num_beams": 3, "eos_token_id": [END, 7], "length_penalty": 3.0, "early_stopping": "never"}
    expected = model.generate(SOURCE, **search, max_new_tokens=STEPS)
    assert expected.shape[1] > 4  # most hypotheses that end at once score less
    assert torch.equal(model.generate(SOURCE, **custom(search), max_new_tokens=STEPS), expected)


@fast_routes
def test_a_distant_max_length_takes_no_memory(route):
    model = make_lively()
    expected, found = model.generate(SOURCE, max_length=300, **route), []
    assert peak_of(lambda: found.append(model.generate(SOURCE, max_length=10**9, **route))) < 2**22
    assert torch.equal(found[0], expected) and 8 < expected.shape[1] < 300


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@all_positions
def test_keys_without_descendants_are_pruned(positions, attention, monkeypatch):
    model = make_lively(positions, max_position_embeddings=100)
    model.set_attn_implementation(attention)
    keys, pruned, step, prune = [], [], DecodingState.step, DecodingState.prune_cache

    def note(state, tokens):
        keys.append(state.cache.get_seq_length())
        return step(state, tokens)

    monkeypatch.setattr(DecodingState, "step", note)
    monkeypatch.setattr(DecodingState, "prune_cache", lambda *given: pruned.append(len(keys)) or prune(*given))
    options = {"attention_mask": MASK, "num_beams": 4, "min_new_tokens": 80, "max_new_tokens": 80}
    output = model.generate(SOURCE, **custom(options))
    assert len(keys) == 79 and max(keys) < 80 * 4 * 0.8
    assert 0 < len(pruned) <= 4  # each time after about twice as many steps
    assert torch.equal(output, model.generate(SOURCE, **options))


@widths
def test_sentences_that_all_stay_are_not_copied(num_beams, model):
    state = DecodingState(model, num_beams, model.get_encoder()(SOURCE).last_hidden_state, MASK)
    state.prefill(torch.full((4, 1), START))
    source, mask = state.source, state.source_mask
    state.select(torch.arange(4), torch.zeros(4, num_beams, dtype=torch.long))
    assert state.source is source and state.source_mask is mask


@widths
def test_finished_sentences_leave_the_batch(num_beams, monkeypatch):
    """The decoder layers run for unfinished sentences only, and for the prompt of each sentence once."""
    model, rows = make_lively(), []
    model.model.decoder.layers[0].register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[:2]))
    output = model.generate(SOURCE, attention_mask=MASK, max_new_tokens=STEPS, **custom({"num_beams": num_beams}))
    sentences, beams = zip(*rows, strict=True)
    assert beams == (1, *[num_beams] * (len(rows) - 1))
    assert sentences[0] == len(SOURCE) > sentences[-1] and list(sentences) == sorted(sentences, reverse=True)
    if num_beams == 1:
        ends = [len(cut(row)) for row in output[:, 1:].tolist()]
        assert list(sentences) == [sum(end > step for end in ends) for step in range(max(ends))]


@pytest.mark.parametrize("prompt", [[START], [START, 9, 4, 11]], ids=len)
def test_beam_search_ends_as_soon_as_a_plain_one(prompt):
    """The longest translation, by which "never" divides the scores of running beams, counts no token of the prompt."""
    model, search = make_lively(), {"early_stopping": "never", "length_penalty": 0.5}
    steps = []
    model.model.decoder.layers[0].register_forward_pre_hook(lambda *_: steps.append(1))
    for source in ALONE:
        beams_by_hand(model, source, prompt, **search)
        expected = len(steps)
        steps.clear()
        options = {"decoder_input_ids": torch.tensor([prompt]), "max_new_tokens": STEPS, "num_beams": 4} | search
        model.generate(source, **options, custom_generate=beam_search)
        assert len(steps) == expected
        steps.clear()


# ------------------------------------------------------------------------------------------- sampling and ensembles


def mean_of(*models):
    """A model for the plain searches: its probabilities are the mean of those of the models."""

    def predict(*inputs, **options):
        probabilities = [model(*inputs, **options).logits.softmax(dim=-1) for model in models]
        return SimpleNamespace(logits=torch.stack(probabilities).mean(dim=0).log())

    return predict


def encoded(models, source=SOURCE) -> dict:
    """The option that makes an ensemble of these models and of the one that generates."""
    return {"others": [(model, model.get_encoder()(source)) for model in models]}


@pytest.fixture
def two_models():
    """Two models of one vocabulary and different architecture."""
    return make_lively("learned"), make_lively("rotary", decoder_layers=1, d_model=24, decoder_attention_heads=3)


@pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 4}, {"num_beams": 4, "length_penalty": 0.0}])
def test_an_ensemble_equals_plain_searches_over_the_mean_probabilities(two_models, options):
    model, other = two_models
    expected = by_hand(mean_of(model, other), **options)
    assert translate(model, **custom(options), **encoded([other])) == expected
    assert translate(other, **custom(options), **encoded([model])) == expected
    assert translate(model, LEFT, **custom(options), **encoded([other], LEFT)) == expected
    assert all(by_hand(one, **options) != expected for one in two_models)


@pytest.mark.parametrize("sample", [False, True], ids=["search", "sample"])
@fast_routes
def test_an_ensemble_of_one_model_equals_it_exactly(route, sample):
    model = make_lively().float()
    source = torch.randint(3, 37, (50, 9))
    options = {"max_new_tokens": 12, **route}
    if sample:
        options |= {"num_beams": 1, "do_sample": True, "num_return_sequences": 3, "custom_generate": greedy_search}
    torch.manual_seed(1)
    expected = model.generate(source, **options)
    for times in (1, 2):
        torch.manual_seed(1)
        assert torch.equal(model.generate(source, **options, **encoded([model] * times, source)), expected)


WARPERS = [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"epsilon_cutoff": 0.05}]


@pytest.mark.parametrize("warper", [*WARPERS, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}], ids=str)
def test_samples_are_those_of_transformers_while_no_sentence_is_finished(model, warper):
    options = {"do_sample": True, "num_return_sequences": 3, "min_new_tokens": 9, "max_new_tokens": 9, **warper}
    options |= {"return_dict_in_generate": True, "length_penalty": 0.5}
    outputs = []
    for search in ({"custom_generate": greedy_search}, {"output_scores": True}):
        torch.manual_seed(1)
        outputs.append(model.generate(SOURCE, **options, **search))
    ours, theirs = outputs
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len({tuple(row) for row in ours.sequences.tolist()}) > len(SOURCE)
    log_probs = model.compute_transition_scores(theirs.sequences, theirs.scores, normalize_logits=True)
    assert_close(ours.sequences_scores.double(), log_probs.sum(dim=1).double() / 9**0.5)


SAMPLED = [pytest.param(False, id="one model"), pytest.param(True, id="ensemble", marks=pytest.mark.slow)]


@pytest.mark.parametrize("is_ensemble", SAMPLED)
def test_sentences_are_sampled_as_often_as_they_are_likely(is_ensemble):
    """Finished ones too, which leave the batch."""
    source, steps, count = torch.tensor([[3, 5, 4, 2]]), 3, 20_000
    models = [make_lively(kind, vocab_size=6) for kind in ("sinusoidal", "rotary")[: 1 + is_ensemble]]
    expected = Counter()
    for target in product(range(6), repeat=steps):
        with torch.no_grad():
            logits = mean_of(*models)(source, decoder_input_ids=torch.tensor([[START, *target[:-1]]])).logits[0]
        likelihood = logits.softmax(dim=-1).gather(1, torch.tensor(target)[:, None]).prod()
        expected[tuple(cut(target))] += float(likelihood)
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": count, "custom_generate": greedy_search}
    options |= encoded(models[1:], source)
    found = Counter(map(tuple, translate(models[0], source, max_new_tokens=steps, **options)))
    assert sum(expected.values()) == pytest.approx(1) and min(map(len, expected)) == 1
    for sentence, likelihood in expected.items():
        assert found[sentence] / count == pytest.approx(likelihood, abs=5 * (likelihood / count) ** 0.5)


UNSUPPORTED = {
    "generation mode": {"do_sample": True, "num_beams": 4},
    "output_scores": {"return_dict_in_generate": True, "output_scores": True},
    "cache_implementation": {"cache_implementation": "static"},
    "decoder_attention_mask": {"decoder_attention_mask": torch.ones(4, 1)},
    "StopAt": {"stopping_criteria": StoppingCriteriaList([type("StopAt", (), {"__call__": lambda *_: None})()])},
    "EncoderRepetitionPenaltyLogitsProcessor": {"encoder_repetition_penalty": 1.5},
    "SequenceBiasLogitsProcessor": {"sequence_bias": [[[9], 100.0]]},
    "SuppressTokensAtBeginLogitsProcessor": {"begin_suppress_tokens": [4, 0, 32]},
    "EncoderNoRepeatNGramLogitsProcessor": {"encoder_no_repeat_ngram_size": 1},
}


@widths
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_our_searches_refuse_what_they_do_not_support(name, num_beams):
    search = custom({"num_beams": num_beams, "max_new_tokens": STEPS})
    with pytest.raises(ValueError, match=f"does not support .*{name}.*; call `model.generate` without"):
        make_lively().generate(SOURCE, **search | UNSUPPORTED[name])


def test_our_searches_refuse_a_trained_prefix():
    model = make_lively(encoder_attention_heads=2, decoder_attention_heads=2)
    config = PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3)
    try:
        tuned = get_peft_model(model, config)
    except AttributeError:
        pytest.skip("this PEFT makes no prefix with this transformers")
    with pytest.raises(ValueError, match="does not support a changed `prepare_inputs_for_generation`"):
        tuned.generate(input_ids=SOURCE, custom_generate=greedy_search)


def test_our_searches_refuse_a_filled_cache(model):
    cache = make_cache(model, "dynamic")
    model.generate(SOURCE, **{CACHE: cache}, max_new_tokens=2)
    with pytest.raises(ValueError, match="does not support a `cache` that is not empty"):
        model.generate(SOURCE, **{CACHE: cache}, custom_generate=greedy_search)


def test_our_searches_refuse_other_attention():
    model = make_lively(encoder_attention_heads=2, decoder_attention_heads=2)
    encoded = model.get_encoder()(SOURCE)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="does not support `attn_implementation='flex_attention'`"):
        model.generate(encoder_outputs=encoded, custom_generate=beam_search, num_beams=2)


@pytest.mark.parametrize("part", ["model.decoder", "model.decoder.layers.0", "model.decoder.layers.1.self_attn", ""])
def test_our_searches_refuse_changed_parts(part):
    """They call the layers themselves, and a Translator falls back to transformers' searches."""
    model = make_lively()
    module = model.get_submodule(part)
    name, expected = f"Other{type(module).__name__}", model.generate(SOURCE, num_beams=3, max_new_tokens=8)
    module.__class__ = type(name, (type(module),), {})
    with pytest.raises(Unsupported, match=rf"does not support a changed model \(`{name}`\); call"):
        model.generate(SOURCE, custom_generate=beam_search, num_beams=3)
    sources = [row[: int(length)].tolist() for row, length in zip(SOURCE, MASK.sum(1), strict=True)]
    found = TorchEngine([model]).generate(sources, {"num_beams": 3, "max_new_tokens": 8})
    assert found.tolist() == expected.tolist()
