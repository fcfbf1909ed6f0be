"""Compares what a reader has written with the package, and names the mistake if it is a common one.

    check(attention)    says how many numbers are equal, or raises AssertionError with the first that is not
    keep(attention)     does the same, then writes the code to my_transformer.py, which the next notebooks import
    part("attention")   the reader's attention, or the solution
    compare_steps(...)  compares two whole models, module by module

What is expected is computed by the package when `check` is called, in float64, outside training and in training, with
sizes that all differ and with parameters that make every term count: no bias is 0, no weight of a norm is 1, and their
epsilon is 0.1. Gradients with respect to inputs and parameters are compared too.
"""

import ast
import contextlib
import copy
import importlib
import inspect
import itertools
import json
import linecache
import math
import re
import reprlib
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from unittest import mock

import torch
from tokenizers import models
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer import modeling_vanilla_transformer as package
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.training.optimization import learning_rate_schedule

FOLDER = Path(__file__).resolve().parent
SOLUTION, MINE = FOLDER / "transformer.py", FOLDER / "my_transformer.py"
PAD, START, END = 0, 1, 2
B, S, T, d, h, f, V, LAYERS = 2, 7, 5, 24, 3, 40, 50, 2
k = d // h
TOLERANCE = 1e-6

# ------------------------------------------------------------------------------------------------ the package's answers


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def token_ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, V, shape)


def padded_source() -> torch.Tensor:
    """Source ids (B,S), the last sentence with two tokens of padding; START and END are no padding."""
    source = token_ids(B, S)
    source[:, :2] = torch.tensor([START, END])
    source[-1, -2:] = PAD
    return source


def package_model() -> VanillaTransformerForConditionalGeneration:
    """A model in float64, in evaluation mode, in which every parameter matters."""
    sizes = {"vocab_size": V, "d_model": d, "encoder_layers": LAYERS, "decoder_layers": LAYERS}
    sizes |= {"encoder_attention_heads": h, "decoder_attention_heads": h, "encoder_ffn_dim": f, "decoder_ffn_dim": f}
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes, layer_norm_eps=0.1)).double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def share_weights(theirs: nn.Module, ours: nn.Module, prefixes: tuple[str, ...] = ("",)):
    """Gives the reader's module the package's parameters themselves, by name, and the package's epsilon."""
    state = theirs.state_dict(keep_vars=True)
    state = {name: parameter for name, parameter in state.items() if name.startswith(prefixes)}
    ours.double().eval().load_state_dict(state, assign=True)  # strict: raises if a name or a shape differs
    for module in ours.modules():
        if hasattr(module, "eps"):
            module.eps = 0.1


def halve(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Stands in for dropout, so that its places can be compared."""
    return x / 2 if training and p else x


def train(*models: nn.Module):
    """Training mode, in which the package's dropout, too, halves."""
    for model in models:
        for module in model.train().modules():
            if isinstance(module, nn.Dropout):
                module.forward = lambda x, module=module: halve(x, module.p, module.training)


def in_both_modes(*models: nn.Module) -> Iterator[str]:
    """Evaluation mode, in which the models are, then training."""
    yield ""
    train(*models)
    yield " in training"


# ---------------------------------------------------------------------------------- what is compared, for each part
# Each yields what it compares, a function that computes it with the reader's part, and what the package has.

Value = torch.Tensor | float | tuple | dict  # tuples and dicts of tokens
Comparisons = Iterator[tuple[str, Callable[[], Value], Value]]


def pair(result) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(result, tuple) and len(result) == 2, "it must return two tensors, (output, weights)"
    return result


def attention(part) -> Comparisons:
    q, keys, values = random(B, h, T, k), random(B, h, S, k), random(B, h, S, k)
    mask = torch.rand(B, 1, T, S) < 0.6
    nothing = mask.clone()
    nothing[0, 0, 0] = False
    for case, one in [("without a mask", None), ("with a mask", mask), ("with a query that sees no key", nothing)]:
        output, weights = package.eager_attention_forward(nn.Identity(), q, keys, values, one, scaling=k**-0.5)
        yield f"the weights {case}", lambda one=one: pair(part(q, keys, values, one))[1], weights.detach()
        yield f"the output {case}", lambda one=one: pair(part(q, keys, values, one))[0], output.transpose(1, 2)


def padding_mask(part) -> Comparisons:
    source = padded_source()
    expected = package.padding_mask(source, VanillaTransformerConfig(pad_token_id=PAD)).bool()[:, None, None]
    yield "the mask", lambda: part(source), expected


def causal_mask(part) -> Comparisons:
    target = token_ids(1, T)
    output = package_model()(token_ids(1, S), decoder_input_ids=target, output_attentions=True)
    yield "the mask", lambda: part(T), output.decoder_attentions[0][0, 0] > 0  # which keys the package gives a weight


def MultiHeadAttention(part) -> Comparisons:
    theirs, ours = package_model().model.encoder.layers[0].self_attn, part(d, h)
    share_weights(theirs, ours)
    x, other, source = random(B, T, d), random(B, T, d), random(B, S, d)
    mask, causal = torch.rand(B, 1, 1, S) < 0.6, torch.ones(T, T, dtype=torch.bool).tril()
    for mode in in_both_modes(theirs, ours):
        for case, attended, one in [
            ("to itself", x, None),
            ("to itself, without the future", x, causal),
            ("to another sentence of the same length", other, None),
            ("to another sentence", source, None),
            ("to another sentence, with padding", source, mask),
        ]:
            full = None if one is None else one.expand(B, 1, T, attended.shape[1])
            expected = theirs(x, attended, attention_mask=full)[0]
            yield f"attention {case}{mode}", lambda attended=attended, one=one: ours(x, attended, one), expected


def sinusoids(part) -> Comparisons:
    for length in (T, 1000):
        expected = package.sinusoidal_positions(torch.arange(length), d)
        yield f"{length} positions", lambda length=length: part(length, d), expected


def embed(part) -> Comparisons:
    stack, ids = package_model().model.encoder, token_ids(B, S)
    positions, embed_tokens = torch.arange(S)[None], stack.embed_tokens
    for mode in in_both_modes(embed_tokens):  # the stack does the dropout
        for length in (S, T):
            expected, _ = stack.add_positions(embed_tokens(ids[:, :length]), positions[:, :length], length)
            yield f"{length} tokens{mode}", lambda length=length: part(embed_tokens, ids[:, :length]), expected


def LayerNorm(part) -> Comparisons:
    theirs, ours = package_model().model.encoder.layers[0].final_layer_norm, part(d)
    share_weights(theirs, ours)
    x = random(B, T, d)
    yield "the normalized x", lambda: ours(x), theirs(x)


def Layer(part) -> Comparisons:
    theirs, ours = package_model().model.encoder.layers[0], part(d, f)
    share_weights(theirs, ours, ("fc", "final"))
    x = random(B, T, d)
    norm = theirs.self_attn_layer_norm  # not the layer's own
    for mode in in_both_modes(theirs, ours):
        yield f"feed_forward{mode}", lambda: ours.feed_forward(x), theirs.feed_forward(x)
        yield f"residual{mode}", lambda: ours.residual(x, norm, torch.sin), theirs.residual(x, norm, torch.sin)


def EncoderLayer(part) -> Comparisons:
    theirs, ours = package_model().model.encoder.layers[0], part(d, h, f)
    share_weights(theirs, ours)
    x, mask = random(B, S, d), torch.rand(B, 1, 1, S) < 0.6
    for mode in in_both_modes(theirs, ours):
        yield f"the output{mode}", lambda: ours(x, mask), theirs(x, mask.expand(B, 1, S, S), None)


def DecoderLayer(part) -> Comparisons:
    theirs, ours = package_model().model.decoder.layers[0], part(d, h, f)
    share_weights(theirs, ours)
    x, mask = random(B, T, d), torch.rand(B, 1, 1, S) < 0.6
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    encoded = random(B, S, d)
    for mode in in_both_modes(theirs, ours):
        for length in (T, S):  # with both lengths alike, a wrong input still fits
            other, one = encoded[:, :length], mask[..., :length]
            expected = theirs(x, causal.expand(B, 1, T, T), other, one.expand(B, 1, T, length), None)
            case = f"the output{mode}, for a source of {length} tokens"
            yield case, lambda other=other, one=one: ours(x, other, causal, one), expected


def Encoder(part) -> Comparisons:
    theirs = package_model().model.encoder
    ours = part(nn.Embedding(V, d), h, f, LAYERS)
    share_weights(theirs, ours)
    source = padded_source()
    is_token = source != PAD
    for mode in in_both_modes(theirs, ours):
        expected = theirs(source).last_hidden_state[is_token]
        yield f"the output{mode}", lambda: ours(source, is_token[:, None, None])[is_token], expected


def Decoder(part) -> Comparisons:
    theirs = package_model().model.decoder
    ours = part(nn.Embedding(V, d), h, f, LAYERS)
    share_weights(theirs, ours)
    target, encoded, is_token = token_ids(B, T), random(B, S, d), torch.rand(B, S) < 0.6
    for mode in in_both_modes(theirs, ours):
        for length in (T, S):  # with both lengths alike, a wrong input still fits
            other, one = encoded[:, :length], is_token[:, :length]
            expected = theirs(target, encoder_hidden_states=other, encoder_attention_mask=one.long()).last_hidden_state
            case = f"the output{mode}, for a source of {length} tokens"
            yield case, lambda other=other, one=one: ours(target, other, one[:, None, None]), expected


def EncoderDecoder(part) -> Comparisons:
    theirs, ours = package_model().model, part(V, d, h, f, LAYERS)
    share_weights(theirs, ours)
    source, longer = padded_source(), token_ids(B, S)
    for mode in in_both_modes(theirs, ours):
        for length in (S, T):  # with both lengths alike, a mask of the target still fits
            target = longer[:, :length]
            expected = theirs(source, decoder_input_ids=target).last_hidden_state
            case = f"the decoder's output{mode}, for a target of {length} tokens"
            yield case, lambda target=target: ours(source, target), expected


def Transformer(part) -> Comparisons:
    theirs, ours = package_model(), part(V, d, h, f, LAYERS)
    size = count(ours)
    share_weights(theirs, ours)
    yield "the number of parameters", lambda: size, count(theirs)
    source, target = padded_source(), token_ids(B, T)
    for mode in in_both_modes(theirs, ours):
        expected = theirs(source, decoder_input_ids=target).logits
        yield f"the logits{mode}", lambda: ours(source, target), expected


def count(model: nn.Module) -> torch.Tensor:
    return torch.tensor(sum(parameter.numel() for parameter in model.parameters()))


def some_labels() -> torch.Tensor:
    """Labels (B,T), the first sentence two tokens shorter."""
    labels = token_ids(B, T)
    labels[:, -1] = END
    labels[0, -3:] = torch.tensor([END, -100, -100])
    return labels


def shift_right(part) -> Comparisons:
    labels = some_labels()
    expected = package_model().prepare_decoder_input_ids_from_labels(labels)
    expected[0, -1] = PAD  # the label before it is -100; the package has START there, but nothing is predicted
    yield "the decoder's input", lambda: part(labels), expected


def smoothed_loss(part) -> Comparisons:
    logits, labels = 3 * random(B, T, V), some_labels()
    labels[-1, 0] = 0  # only -100 is no label
    for smoothing in (0.0, 0.1, 0.4):
        expected = package.label_smoothed_cross_entropy(logits, nn.Identity(), labels, smoothing)
        yield f"smoothing {smoothing}", lambda smoothing=smoothing: part(logits, labels, smoothing), expected.double()


def number(result) -> float:
    assert isinstance(result, float | int), f"it must return a number, and returns a {type(result).__name__}"
    return float(result)


def learning_rate(part) -> Comparisons:
    peak, warmup, steps = 0.7, 40, range(1, 200)
    expected = torch.tensor([learning_rate_schedule("inverse_sqrt", peak, warmup, 200)(step) for step in steps])
    yield "steps 1 to 199", lambda: torch.tensor([number(part(step, peak, warmup)) for step in steps]), expected


def train_step(part) -> Comparisons:
    rate, smoothing = 0.01, 0.3
    theirs, solution = package_model(), solved()
    ours = solution.Transformer(V, d, h, f, LAYERS)
    share_weights(copy.deepcopy(theirs), ours)
    train(theirs, ours)
    source, labels = padded_source(), some_labels()
    optimizers = []
    for model in (ours, theirs):
        parameters = list(model.parameters())
        groups = [{"params": parameters[:9]}, {"params": parameters[9:]}]  # each group has its own rate
        optimizers.append(torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-9))

    def step() -> float:
        for group in optimizers[1].param_groups:
            group["lr"] = rate
        loss = theirs(source, labels=labels, label_smoothing=smoothing).loss
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        return loss.item()

    for number in ("first", "second", "third"):
        expected = step()
        case = f"the loss of the {number} step"
        yield case, lambda: part(ours, optimizers[0], source, labels, rate, smoothing), expected


def greedy_search(part) -> Comparisons:
    theirs = package_model()
    with torch.no_grad():
        # END becomes likelier, so that sentences end, and at different lengths.
        theirs.lm_head.weight[END] += 2 * theirs.model.decoder.layers[-1].final_layer_norm.bias
    ours = solved().Transformer(V, d, h, f, LAYERS)
    share_weights(theirs, ours)
    calls = itertools.count()

    def stop_endless_search(*_):
        if next(calls) > 100:
            raise RuntimeError("it does not end")

    ours.register_forward_pre_hook(stop_endless_search)
    source = token_ids(40, S)
    source[::2, -2:] = PAD
    ends = (theirs.generate(source, num_beams=1, do_sample=False, max_length=20) == END).any(dim=1)
    for case, some, length in [("at most 6 tokens", source, 6), ("until all have ended", source[ends], 30)]:
        expected = theirs.generate(some, num_beams=1, do_sample=False, max_length=length)
        yield case, lambda some=some, length=length: part(ours, some, length), expected


@cache
def sample_texts() -> tuple[str, ...]:
    """Some sentences of the sample dataset, in both languages."""
    lines = (FOLDER.parents[1] / "sample_dataset" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line)[language] for line in lines[:400] for language in ("en", "de"))


@cache
def package_bpe(vocab_size: int) -> tuple:
    """The package's tokenizer of these sentences, as its backend; the words, and how often each occurs; the merges."""
    backend = train_tokenizer(sample_texts(), vocab_size).backend_tokenizer
    pieces = (backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(t)) for t in sample_texts())
    words = Counter(word for text in pieces for word, _ in text)
    return backend, words, [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


def tokens_by_merges(word: str, merges: list[tuple[str, str]]) -> tuple[str, ...]:
    """The tokens of a word by the `tokenizers` library."""
    vocabulary = dict.fromkeys([*word, *("".join(pair) for pair in merges), *(t for pair in merges for t in pair)])
    bpe = models.BPE({token: number for number, token in enumerate(vocabulary)}, merges)
    return tuple(token.value for token in bpe.tokenize(word))


def spell(counts: dict[str, int]) -> dict[tuple[str, ...], int]:
    return {tuple(word): count for word, count in counts.items()}


def count_pairs(part) -> Comparisons:
    _, words, merges = package_bpe(300)
    yield "the most frequent pair", lambda: Counter(part(spell(words))).most_common(1)[0][0], merges[0]
    for what, counts in [("the counts in aaa, twice, and aab", {"aaa": 2, "aab": 1}), ("all counts", words)]:
        expected = Counter()
        for word, count in counts.items():
            for pair in {word[i : i + 2] for i in range(len(word) - 1)}:
                expected[tuple(pair)] += count * len(re.findall(f"(?={re.escape(pair)})", word))
        yield what, lambda counts=counts: dict(part(spell(counts))), dict(expected)


def merge(part) -> Comparisons:
    _, words, merges = package_bpe(300)
    for word, pair in [("xaay", "aa"), ("aaa", "aa"), ("abaaab", "aa"), ("ababcab", "ab"), ("b", "ab")]:
        yield (
            f"{pair[0]} and {pair[1]} in {word}",
            lambda w=word, p=pair: part(tuple(w), tuple(p)),
            tokens_by_merges(word, [tuple(pair)]),
        )
    before, pair = [("b", "c"), ("a", "b")], ("ab", "c")
    tokens = tokens_by_merges("abcab", before)
    yield "ab and c in a bc ab", lambda: part(tokens, pair), tokens_by_merges("abcab", [*before, pair])
    for word in list(words)[:100]:
        yield (
            f"the first merge in {word}",
            lambda w=word: part(tuple(w), merges[0]),
            tokens_by_merges(word, merges[:1]),
        )


def learn_merges(part) -> Comparisons:
    for vocab_size in (264, 400):
        backend, words, merges = package_bpe(vocab_size)
        vocabulary = backend.get_vocab()
        first = sorted(vocabulary, key=vocabulary.get)[:260]
        yield (
            f"the merges of a vocabulary of {vocab_size}",
            lambda w=words, f=first, n=vocab_size: tuple(part(w, f, n)[0]),
            tuple(merges),
        )
        yield f"a vocabulary of {vocab_size}", lambda w=words, f=first, n=vocab_size: part(w, f, n)[1], vocabulary
    yield "the merges of one word", lambda: tuple(part({"aab": 3}, ["a", "b"], 9)[0]), (("a", "a"), ("aa", "b"))


def encode_word(part) -> Comparisons:
    merges = [("c", "d"), ("a", "cd"), ("cd", "cd")]
    rank = {pair: number for number, pair in enumerate(merges)}
    yield "acdcd", lambda rank=rank: part("acdcd", rank), tokens_by_merges("acdcd", merges)
    backend, words, merges = package_bpe(400)
    rank = {pair: number for number, pair in enumerate(merges)}
    for word in [*list(words)[::5], "ĠUnbekanntes", "zzz", "e"]:
        yield word, lambda w=word: part(w, rank), tuple(token.value for token in backend.model.tokenize(word))


PARTS = [attention, padding_mask, causal_mask, MultiHeadAttention, sinusoids, embed, LayerNorm, Layer, EncoderLayer]
PARTS += [DecoderLayer, Encoder, Decoder, EncoderDecoder, Transformer, shift_right, smoothed_loss, learning_rate]
PARTS += [train_step, greedy_search, count_pairs, merge, learn_merges, encode_word]
CASES = {part.__name__: part for part in PARTS}

# ------------------------------------------------------------------------------------------------------ known mistakes
# For each part: code of the solution, what a reader may write in its place, and what to tell them. An error of several
# readers, or of one of the implementations in docs/seeds.md, belongs here.

NO_MOVE = (
    "the parameters do not move at the first step: set the rate (do not multiply it) before `step`, and call "
    "`zero_grad` before `backward`"
)
DROPOUT_TWICE = "`residual` does the dropout; `feed_forward` has none"
CUT = "cut off from the gradient (by `detach`, `.data` or `no_grad`)"
MISTAKES = {
    "attention": [
        (" / math.sqrt(queries.shape[-1])", "", "the scores are not divided by the square root of k"),
        ("math.sqrt(queries.shape[-1])", "queries.shape[-1]", "the scores are divided by k, not by its square root"),
        (
            "math.sqrt(queries.shape[-1])",
            "math.sqrt(keys.shape[-2])",
            "the scores are divided by the root of the number of keys",
        ),
        (
            "math.sqrt(queries.shape[-1])",
            "math.sqrt(queries.shape[-1] * queries.shape[-3])",
            "the scores are divided by the root of d; divide by that of k, the width of a head",
        ),
        (
            "math.sqrt(queries.shape[-1])",
            "math.sqrt(512)",
            "the scores are divided by the root of 512, the paper's d; divide by that of k, the width of a head",
        ),
        (
            "keys.transpose(-2, -1)",
            "keys",
            "the keys are not transposed: (...,T,k) times (...,k,S) makes (...,T,S)",
        ),
        ("softmax(dim=-1)", "softmax(dim=-2)", "the softmax is over the queries; it must be over the keys"),
        ("    if mask is not None:", "    if False:", "the mask is not used"),
        ("~mask", "mask", "the mask is the wrong way round: True means that the key is seen"),
        ("torch.finfo(scores.dtype).min", "-math.inf", "minus infinity makes the weights NaN if all keys are hidden"),
        ("torch.finfo(scores.dtype).min", "0", "the masked scores are 0, and so their weights are not"),
        (
            """        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)""",
            "        pass\n    weights = scores.softmax(dim=-1) * (1 if mask is None else mask)",
            "the mask comes after the softmax, so that the weights no longer sum to 1; mask the scores",
        ),
        ("return weights @ values", "return weights.detach() @ values", f"the weights are {CUT}"),
        (
            "return weights @ values, weights",
            "return weights, weights @ values",
            "the output comes first, then the weights",
        ),
    ],
    "padding_mask": [
        ("ids != PAD", "ids == PAD", "the mask is the wrong way round: True means that the key is seen"),
        (
            "[:, None, None, :]",
            "[:, None, :, None]",
            "the mask is along the queries; it must hide keys, the last axis",
        ),
        ("[:, None, None, :]", "", "the mask has no axes for heads and queries: its shape must be (B,1,1,S)"),
        ("ids != PAD", "ids > START", "START is hidden too; only PAD is padding"),
        ("ids != PAD", "(ids != PAD) & (ids != END)", "END is hidden too; only PAD is padding"),
        ("ids != PAD", "ids > END", "START and END are hidden too; only PAD is padding"),
    ],
    "causal_mask": [
        (".tril()", ".tril(diagonal=-1)", "a query does not see itself: the mask is shifted by one"),
        (".tril()", ".tril(diagonal=1)", "a query sees the next token: the mask is shifted by one"),
        (".tril()", ".triu()", "a query sees the future and not the past: rows are queries, columns are keys"),
        (".tril()", "", "a query sees the future"),
    ],
    "MultiHeadAttention": [
        (
            "x.unflatten(-1, (self.h, -1)).transpose(1, 2)",
            "x.reshape(x.shape[0], self.h, x.shape[1], -1)",
            "heads are split by a reshape alone, which mixes tokens: reshape to (B,T,h,k), then transpose",
        ),
        (
            "x.unflatten(-1, (self.h, -1)).transpose(1, 2)",
            "x.unflatten(-1, (-1, self.h)).transpose(1, 2)",
            "h and k are exchanged: there are h heads of width k",
        ),
        (
            "x.unflatten(-1, (self.h, -1)).transpose(1, 2)",
            "x.unflatten(-1, (-1, self.h)).permute(0, 3, 1, 2)",
            "the features of a head are not neighbors: d is read as (k,h), and must be read as (h,k)",
        ),
        (
            "x.transpose(1, 2).flatten(-2)",
            "x.reshape(x.shape[0], x.shape[2], -1)",
            "heads are joined without a transpose",
        ),
        (
            "self.k_proj(attended)), self.split_heads(self.v_proj(attended))",
            "self.k_proj(x)), self.split_heads(self.v_proj(x))",
            "keys and values are those of x; they must be those of `attended`",
        ),
        ("self.k_proj(attended)", "self.k_proj(x)", "the keys are those of x; they must be those of `attended`"),
        ("self.v_proj(attended)", "self.v_proj(x)", "the values are those of x; they must be those of `attended`"),
        (", mask)", ")", "the mask is not passed on to attention"),
        (
            "self.v_proj(attended)",
            "self.k_proj(attended)",
            "the values are made with k_proj; they have a projection of their own, v_proj",
        ),
        (
            "attention(queries,",
            "attention(queries / queries.shape[-1] ** 0.5,",
            "the scores are scaled here too; `attention` does that",
        ),
        (
            "attention(queries,",
            "attention(queries / self.h**0.5,",
            "the scores are divided by the root of d; the width of a head is k = d / h",
        ),
        (
            """x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def join_heads(self, x):
        \"\"\"(B,h,T,k) -> (B,T,d)\"\"\"
        return x.transpose(1, 2).flatten(-2)""",
            """x[:, None]

    def join_heads(self, x):
        return x[:, 0]""",
            "the features are not split: this is one head of width d, and must be h heads of width k = d / h",
        ),
        ("self.out_proj(self.join_heads(output))", "self.join_heads(output)", "the output projection is missing"),
        (
            ".transpose(1, 2)",
            "",
            "a transpose is missing: `split_heads` must put heads before tokens, `join_heads` after",
        ),
        ("(self, x, attended,", "(self, attended, x,", "x and `attended` are exchanged: the queries are those of x"),
        (
            """x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def join_heads(self, x):
        \"\"\"(B,h,T,k) -> (B,T,d)\"\"\"
        return x.transpose(1, 2).flatten(-2)""",
            """x.reshape(x.shape[0], self.h, x.shape[1], -1)

    def join_heads(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)""",
            "heads are split and joined by reshapes alone, which mix tokens; both need a transpose",
        ),
        (
            """x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def join_heads(self, x):
        \"\"\"(B,h,T,k) -> (B,T,d)\"\"\"
        return x.transpose(1, 2).flatten(-2)""",
            """x.unflatten(-1, (-1, self.h)).permute(0, 3, 1, 2)

    def join_heads(self, x):
        return x.permute(0, 2, 3, 1).flatten(-2)""",
            "heads are interleaved: d is read as (k,h) and joined as (k,h); it must be (h,k)",
        ),
        (
            ", mask)",
            ", None if mask is None else ~mask)",
            "the mask is inverted; `attention` wants True where a key is seen",
        ),
        (
            "self.join_heads(output)",
            "nn.functional.dropout(self.join_heads(output), 0.1, self.training)",
            "there is dropout on the joined heads; the layer does it, after the output projection",
        ),
        ("self.join_heads(output)", "self.join_heads(output.detach())", f"the output of attention is {CUT}"),
    ],
    "sinusoids": [
        (
            "torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)",
            "torch.cat([angles.sin(), angles.cos()], dim=-1)",
            "all sines come first, then all cosines; they must alternate",
        ),
        ("[angles.sin(), angles.cos()]", "[angles.cos(), angles.sin()]", "sine and cosine are exchanged"),
        ("-torch.arange(0, d, 2", "-torch.arange(0, d // 2", "the exponent is i/d; it must be 2i/d"),
        ("-torch.arange(0, d, 2", "torch.arange(0, d, 2", "the clocks become faster with i; they must become slower"),
        ("torch.arange(length", "torch.arange(1, length + 1", "positions begin with 1; they must begin with 0"),
        ("torch.float64", "torch.float32", "computed in float32, angles of far positions are inexact; use float64"),
        (".float()", "", "end with `.float()`, or a float32 model cannot use it"),
        (
            "-torch.arange(0, d, 2",
            "-2 * torch.arange(0, d, 2",
            "the exponent is 4i/d; torch.arange(0, d, 2) is 2i already",
        ),
        (
            "angles.cos()",
            "(positions * 10000 ** (-torch.arange(1, d, 2, dtype=torch.float64) / d)).cos()",
            "the exponent of the cosine is (2i+1)/d; both of a pair have the same angle",
        ),
    ],
    "embed": [
        (" * math.sqrt(d)", "", "the embeddings are not scaled by the square root of d"),
        ("math.sqrt(d)", "math.sqrt(length)", "the embeddings are scaled by the root of the length, not of d"),
        ("math.sqrt(d)", "d", "the embeddings are scaled by d, not by its square root"),
        (" * math.sqrt(d)", " / math.sqrt(d)", "the embeddings are divided by the square root of d; multiply"),
        (" + sinusoids(length, d)", "", "the positions are not added"),
        (
            "embed_tokens(ids) * math.sqrt(d) + sinusoids(length, d)",
            "(embed_tokens(ids) + sinusoids(length, d)) * math.sqrt(d)",
            "the positions are scaled too; only the embeddings must be",
        ),
        (
            "embed_tokens(ids) * math.sqrt(d) + sinusoids(length, d)",
            "nn.functional.dropout(embed_tokens(ids) * math.sqrt(d) + sinusoids(length, d), 0.1, embed_tokens.training)",
            "there is dropout here; the stacks will do it",
        ),
        ("embed_tokens(ids)", "embed_tokens(ids).detach()", f"the embeddings are {CUT}, so they would not learn"),
    ],
    "LayerNorm": [
        (
            "(variance + self.eps).sqrt()",
            "(variance.sqrt() + self.eps)",
            "eps is outside the root; it is added to the variance",
        ),
        (" + self.eps", "", "eps is not added to the variance"),
        ("correction=0", "correction=1", "the variance is divided by d - 1; use correction=0 to divide by d"),
        (" - x.mean(dim=-1, keepdim=True)", "", "the mean is not subtracted"),
        (" * self.weight", "", "the weight is not used"),
        (" + self.bias", "", "the bias is not used"),
        (" * self.weight + self.bias", "", "weight and bias are not used"),
        ("(variance + self.eps).sqrt()", "(variance + self.eps)", "x is divided by the variance, not by its root"),
        ("dim=-1", "dim=1", "mean and variance are those of a feature over all tokens; each token has its own"),
        ("x.var(", "x.detach().var(", f"the variance is {CUT}"),
        ("x.mean(", "x.detach().mean(", f"the mean is {CUT}"),
    ],
    "Layer": [
        (".relu()", "", "there is no activation between fc1 and fc2"),
        ("self.fc2(self.fc1(x).relu())", "self.fc2(self.fc1(x)).relu()", "the activation is after fc2, not after fc1"),
        (
            "norm(x + self.dropout(sublayer(x)))",
            "x + self.dropout(sublayer(norm(x)))",
            "this is pre-norm; the paper normalizes the sum (post-norm)",
        ),
        ("x + self.dropout(sublayer(x))", "self.dropout(sublayer(x))", "x is not added to the output of the sublayer"),
        (
            "norm(x + self.dropout(sublayer(x)))",
            "x + norm(self.dropout(sublayer(x)))",
            "the output of the sublayer is normalized, and must be the sum",
        ),
        ("norm(x + self.dropout(sublayer(x)))", "x + self.dropout(sublayer(x))", "the sum is not normalized"),
        ("self.dropout(sublayer(x))", "sublayer(x)", "dropout is missing"),
        ("x + self.dropout(sublayer(x))", "self.dropout(x + sublayer(x))", "dropout is applied to the sum"),
        (
            "norm(x + self.dropout(sublayer(x)))",
            "norm(x) + self.dropout(sublayer(x))",
            "x alone is normalized, and must be the sum",
        ),
        (
            "norm(x + self.dropout(sublayer(x)))",
            "self.dropout(norm(x + sublayer(x)))",
            "dropout comes after the norm; it belongs to the output of the sublayer",
        ),
        ("norm(x +", "self.final_layer_norm(x +", "`norm` is not used: each sublayer has a norm of its own"),
        ("self.fc2(self.fc1(x).relu())", "self.dropout(self.fc2(self.fc1(x).relu()))", DROPOUT_TWICE),
        ("self.fc1(x).relu()", "self.dropout(self.fc1(x).relu())", DROPOUT_TWICE),
        (
            "self.fc2(self.fc1(x).relu())",
            "self.fc2(nn.functional.gelu(self.fc1(x)))",
            "the activation is GELU; the paper's is ReLU",
        ),
        ("sublayer(x)", "sublayer(x).detach()", f"the output of the sublayer is {CUT}"),
        ("self.fc1(x).relu()", "self.fc1(x).relu().detach()", f"the output of fc1 is {CUT}"),
    ],
    "EncoderLayer": [
        ("(x, x, mask)", "(x, x)", "the mask is not passed on to attention"),
        (
            ", self.self_attn_layer_norm",
            ", self.final_layer_norm",
            "attention has the norm of the feed-forward network",
        ),
        (
            "return self.residual(x, self.final_layer_norm, self.feed_forward)",
            "return self.final_layer_norm(self.feed_forward(x))",
            "the feed-forward network has no residual",
        ),
        (
            """self.self_attn_layer_norm, lambda x: self.self_attn(x, x, mask))
        return self.residual(x, self.final_layer_norm""",
            """self.final_layer_norm, lambda x: self.self_attn(x, x, mask))
        return self.residual(x, self.self_attn_layer_norm""",
            "the two norms are exchanged",
        ),
        (
            "x = self.residual(x, self.self_attn_layer_norm,",
            "self.residual(x, self.self_attn_layer_norm,",
            "the result of the first `residual` is thrown away; assign it to x",
        ),
    ],
    "DecoderLayer": [
        ("(x, encoded, mask)", "(x, x, causal)", "encoder_attn attends to x; it must attend to the encoder's output"),
        ("(x, encoded, mask)", "(x, x, mask)", "encoder_attn attends to x; it must attend to the encoder's output"),
        (
            "(x, encoded, mask)",
            "(encoded, x, mask)",
            "encoder_attn has its queries from the source; x must come first",
        ),
        (
            "(x, encoded, mask)",
            "(x, encoded, causal)",
            "encoder_attn has the causal mask; it needs that of the source",
        ),
        (
            "(x, x, causal)",
            "(x, x, causal & mask)",
            "self-attention has the mask of the source too; `causal` is enough",
        ),
        ("(x, x, causal)", "(x, x)", "self-attention sees the future: the causal mask is not passed on"),
        ("(x, encoded, mask)", "(x, encoded)", "encoder_attn sees padding: the mask is not passed on"),
        ("self.encoder_attn(", "self.self_attn(", "self_attn is used twice; the source needs encoder_attn"),
        (", self.encoder_attn_layer_norm", ", self.self_attn_layer_norm", "encoder_attn has the norm of self_attn"),
        (
            """        x = self.residual(x, self.self_attn_layer_norm, lambda x: self.self_attn(x, x, causal))
        x = self.residual(x, self.encoder_attn_layer_norm, lambda x: self.encoder_attn(x, encoded, mask))
""",
            """        x = self.residual(x, self.encoder_attn_layer_norm, lambda x: self.encoder_attn(x, encoded, mask))
        x = self.residual(x, self.self_attn_layer_norm, lambda x: self.self_attn(x, x, causal))
""",
            "encoder_attn comes before self_attn; it must come after it",
        ),
        (
            """self.self_attn_layer_norm, lambda x: self.self_attn(x, x, causal))
        x = self.residual(x, self.encoder_attn_layer_norm""",
            """self.encoder_attn_layer_norm, lambda x: self.self_attn(x, x, causal))
        x = self.residual(x, self.self_attn_layer_norm""",
            "the norms of self_attn and encoder_attn are exchanged",
        ),
        (
            "(x, x, causal))\n        x = self.residual(x, self.encoder_attn_layer_norm, lambda x: self.encoder_attn(x, encoded, mask)",
            "(x, x, mask))\n        x = self.residual(x, self.encoder_attn_layer_norm, lambda x: self.encoder_attn(x, encoded, causal)",
            "`causal` and `mask` are exchanged: `causal` is for self_attn, `mask` for encoder_attn",
        ),
        (
            "x = self.residual(x, self.self_attn_layer_norm,",
            "self.residual(x, self.self_attn_layer_norm,",
            "the result of the first `residual` is thrown away; assign it to x",
        ),
        (
            "x = self.residual(x, self.encoder_attn_layer_norm,",
            "self.residual(x, self.encoder_attn_layer_norm,",
            "the result of the second `residual` is thrown away; assign it to x",
        ),
        ("(x, encoded, mask)", "(x, encoded.detach(), mask)", f"the encoder's output is {CUT}"),
    ],
    "Encoder": [
        ("x = layer(x, mask)", "x = layer(x, None)", "the mask is not passed on to the layers"),
        (
            "            x = layer(x, mask)",
            "            y = layer(x, mask)\n        x = y",
            "every layer reads the embeddings",
        ),
        (
            "self.dropout(embed(self.embed_tokens, ids))",
            "embed(self.embed_tokens, ids)",
            "the embeddings have no dropout",
        ),
        (
            "embed(self.embed_tokens, ids)",
            "self.embed_tokens(ids)",
            "embeddings are neither scaled nor given positions",
        ),
        ("embed(self.embed_tokens, ids)", "embed(self.embed_tokens, ids).detach()", f"the embeddings are {CUT}"),
    ],
    "Decoder": [
        (
            "self.dropout(embed(self.embed_tokens, ids))",
            "embed(self.embed_tokens, ids)",
            "the embeddings have no dropout",
        ),
        ("causal_mask(ids.shape[1])", "causal_mask(ids.shape[1]).T", "the causal mask is the wrong way round"),
        (
            "(ids.shape[1])",
            "(encoded.shape[1])",
            "the causal mask is as long as the source; it needs the length of `ids`",
        ),
        ("causal, mask)", "mask, causal)", "the layers get `causal` and `mask` in the wrong order"),
        ("causal_mask(ids.shape[1])", "None", "self-attention sees the future: there is no causal mask"),
        ("causal, mask)", "causal, None)", "the layers do not get the mask of the source"),
        (
            "layer(x, encoded,",
            "layer(x, x,",
            "the layers attend to the target; they must attend to the encoder's output",
        ),
        (
            "embed(self.embed_tokens, ids)",
            "self.embed_tokens(ids)",
            "embeddings are neither scaled nor given positions",
        ),
        ("embed(self.embed_tokens, ids)", "embed(self.embed_tokens, ids).detach()", f"the embeddings are {CUT}"),
        ("layer(x, encoded,", "layer(x, encoded.detach(),", f"the encoder's output is {CUT}"),
    ],
    "EncoderDecoder": [
        (
            "self.encoder(source, mask), mask)",
            "self.encoder(source, mask), None)",
            "the decoder sees padding of the source",
        ),
        ("self.encoder(source, mask)", "self.encoder(source, None)", "the encoder sees padding"),
        (
            "self.encoder(source, mask)",
            "self.decoder(source, source, mask)",
            "the source is not encoded by the encoder",
        ),
        ("padding_mask(source)", "None", "padding is seen: encoder and decoder need the mask of the source"),
        (
            "padding_mask(source)",
            "padding_mask(target)",
            "the mask is that of the target; it must be that of the source",
        ),
        ("self.encoder(source, mask)", "self.encoder(source, mask).detach()", f"the encoder's output is {CUT}"),
    ],
    "Transformer": [
        ("self.lm_head(self.model(source, target))", "self.model(source, target)", "lm_head must follow the decoder"),
        ("self.lm_head.weight = self.model.shared.weight", "pass", "lm_head must be tied to the embedding matrix"),
        ("self.model(source, target)", "self.model(target, source)", "source and target are exchanged"),
        ("target))", "target)).softmax(dim=-1)", "there is a softmax after lm_head; logits are what the loss needs"),
        ("self.model(source, target)", "self.model(source, target).detach()", f"the decoder's output is {CUT}"),
    ],
    "shift_right": [
        (
            "torch.cat([start, labels[:, :-1]], dim=1)",
            "labels",
            "the labels are not shifted: the decoder reads the answer",
        ),
        ("[start, labels[:, :-1]]", "[labels[:, 1:], start]", "the labels are shifted to the left"),
        ("labels[:, :-1]", "labels[:, 1:]", "the first label is left out; it must be the last"),
        ("START)", "PAD)", "the first token must be START"),
        (
            "torch.cat([start, labels[:, :-1]], dim=1)",
            "labels.roll(1, dims=1)",
            "the last label has become the first token, which must be START",
        ),
        ("labels[:, :-1]]", "labels]", "leave out the last label, after which nothing is predicted"),
        (
            "    start =",
            "    labels[labels == -100] = PAD\n    start =",
            "-100 is replaced in `labels` itself, and the loss needs it there",
        ),
        (".masked_fill(shifted == -100, PAD)", "", "-100 is left in it, which is no token id"),
    ],
    "smoothed_loss": [
        ("[labels != -100]  # (N,V)", ".flatten(0, 1)", "labels of -100 count; nothing is predicted there"),
        ("(1 - smoothing) * correct + smoothing * log_probs.mean(dim=-1)", "correct", "there is no label smoothing"),
        ("(1 - smoothing) * correct", "correct", "the correct token must get 1 - smoothing, not 1"),
        ("log_probs.mean(dim=-1)", "log_probs.sum(dim=-1)", "the smoothing is not divided by the V tokens"),
        (
            "smoothing * log_probs.mean(dim=-1)",
            "smoothing * (log_probs.sum(dim=-1) - correct) / (log_probs.shape[1] - 1)",
            "the smoothing is spread over the V - 1 wrong tokens; the paper and PyTorch spread it over all V",
        ),
        (").mean()", ").sum()", "the loss is a sum; it must be divided by the number of tokens"),
        (").mean()", ").sum() / labels.numel()", "the loss is divided by all positions; padding must not count"),
        ("-((1", "((1", "the sign is wrong"),
        ("log_softmax", "softmax", "these are probabilities; the loss needs their logarithms, log_softmax"),
        (
            "(1 - smoothing) * correct + smoothing",
            "0.9 * correct + 0.1",
            "the smoothing is 0.1, whatever the argument",
        ),
        ("labels != -100", "labels > 0", "a label of 0 does not count; only -100 must not"),
        (").mean()", ").mean().detach()", f"the loss is {CUT}"),
        ("log_probs.mean(dim=-1)", "log_probs.detach().mean(dim=-1)", f"the smoothing term is {CUT}"),
    ],
    "learning_rate": [
        ("min(", "max(", "it is the larger of the two; it must be the smaller"),
        ("math.sqrt(warmup / step)", "warmup / step", "it decays with the step, and must decay with its square root"),
        ("peak * min(step / warmup, math.sqrt(warmup / step))", "peak * min(1, step / warmup)", "it does not decay"),
        ("peak * ", "", "it is not multiplied by the peak"),
        (
            "min(step / warmup, math.sqrt(warmup / step))",
            "min(step**-0.5, step * warmup**-1.5)",
            "the left side of Equation 3 is multiplied by d**-0.5; with the peak, use the right side",
        ),
        ("    return", "    step -= 1\n    return", "steps count from 1: `step` needs no change"),
        ("    return", "    step += 1\n    return", "steps count from 1: `step` needs no change"),
        (
            "step / warmup, math",
            "math.sqrt(step / warmup), math",
            "step / warmup is under the root too; the rate must rise linearly",
        ),
        ("peak * ", "torch.tensor(peak) * ", "it is a tensor, and must be a number"),
    ],
    "train_step": [
        ("    optimizer.zero_grad()\n", "", "the gradients of the step before are still there: zero_grad is missing"),
        ('group["lr"] = rate', "pass", NO_MOVE),
        ("    optimizer.step()\n", "", NO_MOVE),
        ("    loss.backward()\n", "    loss.backward()\n    optimizer.zero_grad()\n", NO_MOVE),
        (
            "shift_right(labels)",
            "labels.clamp(min=0)",
            "the decoder reads the labels that it should predict; shift them",
        ),
        ("shift_right(labels)", "labels", "the decoder reads the labels that it should predict; shift them"),
        (", smoothing)\n", ", 0.0)\n", "the smoothing is not passed on to the loss"),
        (", smoothing)\n", ")\n", "the smoothing is not passed on to the loss"),
        (".item()", "", "return the loss as a number, `loss.item()`; a tensor keeps all that its gradient needs"),
        (
            '    for group in optimizer.param_groups:\n        group["lr"] = rate',
            '    optimizer.param_groups[0]["lr"] = rate',
            "only the first of the optimizer's `param_groups` gets the rate",
        ),
        ("    loss = ", "    model.eval()\n    loss = ", "`model.eval()` switches dropout off; training needs it"),
    ],
    "greedy_search": [
        ("[:, -1:]", "[:, :1]", "it takes the prediction at the first position; the new one is at the last"),
        ("    return target", "    return target[:, 1:]", "START must stay in the result"),
        (".argmax(", ".argmin(", "it takes the least likely token"),
        ("is_finished.all()", "is_finished.any()", "it stops when one sentence has ended; it must wait for all"),
        (".masked_fill(is_finished, PAD)", "", "after END a sentence goes on; it must be filled with PAD"),
        (
            "    while target.shape[1] < max_length and not is_finished.all():",
            "    while target.shape[1] < max_length:",
            "it does not stop when all sentences have ended",
        ),
        ("< max_length", "<= max_length", "it is one token too long: `max_length` counts START too"),
        ("is_finished | (token == END)", "token == END", "it forgets which sentences had ended at an earlier step"),
        ("token == END", "token == PAD", "a sentence ends with END, not with PAD"),
        ("        target = torch.cat", "        torch.cat", "the token is not appended to `target` inside the loop"),
    ],
    "count_pairs": [
        ("+= count", "+= 1", "each word counts once; it must count as often as it occurs"),
        ("zip(tokens, tokens[1:], strict=False)", "zip(tokens[::2], tokens[1::2])", "every other pair is left out"),
        (
            "zip(tokens, tokens[1:], strict=False)",
            "set(zip(tokens, tokens[1:], strict=False))",
            "a pair that occurs twice in a word counts once",
        ),
        ("pairs[pair] += count", "pairs[pair] = count", "each word overwrites the counts of the words before"),
        (
            "zip(tokens, tokens[1:], strict=False)",
            "zip(tokens, [*tokens[1:], tokens[0]])",
            "the last token is paired with the first",
        ),
    ],
    "merge": [
        (
            "merged and (merged[-1], token) == pair",
            'merged and merged[-1] + token == "".join(pair)',
            "two tokens that spell the same as the pair are joined; both must be equal to its tokens",
        ),
        (
            "merged and (merged[-1], token) == pair",
            "merged and (merged[-1], token) == pair and pair[0] + pair[1] not in merged",
            "only the first occurrence is joined",
        ),
        (
            "    for token in tokens:\n        if merged and (merged[-1], token) == pair:",
            "    for i, token in enumerate(tokens):\n        if i and (tokens[i - 1], token) == pair:",
            "a token is used twice: in aaa, only the left pair is joined",
        ),
        ("merged[-1] += token", "merged.append(merged[-1] + token)", "the first token of the pair stays"),
        ("tuple(merged)", "merged", "it returns a list; words are keys of a dict, so it must be a tuple"),
        ("tuple(merged)", '"".join(merged)', "it returns a string, and the tokens are lost"),
        (
            """    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return tuple(merged)""",
            """    for token in reversed(tokens):
        if merged and (token, merged[0]) == pair:
            merged[0] = token + merged[0]
        else:
            merged.insert(0, token)
    return tuple(merged)""",
            "it goes from right to left",
        ),
    ],
    "learn_merges": [
        (
            "(-pairs[pair], vocabulary[pair[0]], vocabulary[pair[1]])",
            "-pairs[pair]",
            "of equally frequent pairs it takes the one that it has met first; the ids of the tokens decide",
        ),
        (
            "(-pairs[pair], vocabulary[pair[0]], vocabulary[pair[1]])",
            "(-pairs[pair], pair)",
            "of equally frequent pairs it takes the first in the alphabet; the ids of the tokens decide",
        ),
        ("(-pairs[pair], ", "(pairs[pair], ", "it merges the rarest pair"),
        (
            "len(vocabulary) < vocab_size",
            "len(merges) < vocab_size",
            "vocab_size is the number of tokens, not of merges; the first tokens count too",
        ),
        (
            "len(vocabulary) < vocab_size",
            "len(vocabulary) <= vocab_size",
            "there is one merge too many",
        ),
        ("        if not pairs:\n            break\n", "", "it fails when no pair is left; it must stop"),
        (
            "words = {tuple(word): count for word, count in counts.items()}",
            "words = {tuple(word): 1 for word in counts}",
            "each word counts once; it must count as often as it occurs",
        ),
    ],
    "encode_word": [
        ("min(", "max(", "the latest merge comes first; it must be the earliest"),
        ("min(possible, key=rank.get)", "possible[0]", "the leftmost pair is merged; it must be the earliest learned"),
        (
            "min(possible, key=rank.get)",
            "max(possible, key=lambda pair: len(pair[0] + pair[1]))",
            "the longest token is made; it must be the one learned earliest",
        ),
        ("    while possible :=", "    if possible :=", "only one pair is merged"),
        ("return tokens", 'return "".join(tokens)', "it returns a string, and the tokens are lost"),
    ],
}

# ------------------------------------------------------------------------------------------------------------ checking


def find_definition(text: str, name: str) -> str | None:
    """The source of a function or class at the top level of `text`; None if there is none."""
    for node in reversed(ast.parse(text).body):  # the last one counts
        if getattr(node, "name", None) == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return None


def load(text: str) -> types.SimpleNamespace:
    """Runs a module's text and returns its names."""
    names = {"__name__": "part"}
    exec(compile(text, "part", "exec"), names)
    return types.SimpleNamespace(**names)


def solved(name: str = "attention", right: str = "", wrong: str = "") -> types.SimpleNamespace:
    """The names of transformer.py, with `right` replaced by `wrong` in the part of that name."""
    text = SOLUTION.read_text(encoding="utf-8")
    part = find_definition(text, name)
    assert right in part, (name, right)
    return load(text.replace(part, part.replace(right, wrong)) if right else text)


def names_in(compute: Callable) -> dict:
    """The variables that a comparison uses, those of the function around it and its own defaults."""
    own = {name: one.default for name, one in inspect.signature(compute).parameters.items()}
    return inspect.getclosurevars(compute).nonlocals | own


def leaves_of(compute: Callable) -> dict[str, torch.Tensor]:
    """The inputs and the parameters, by name, that a comparison uses and a gradient may reach."""
    leaves = {}
    for name, value in names_in(compute).items():
        found = [(name, value)]
        if isinstance(value, nn.Module):
            found = value.named_parameters(prefix="" if name == "ours" else name)
        leaves |= {name: one for name, one in found if isinstance(one, torch.Tensor) and one.requires_grad}
    return leaves


def gradients(output: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a sum of the outputs with different weights, with respect to those leaves that it depends on."""
    if not output.requires_grad:
        return {}
    weights = torch.arange(1, output.numel() + 1).to(output.dtype).sin().view_as(output)
    found = torch.autograd.grad(output, leaves.values(), weights, allow_unused=True, retain_graph=True)
    return {name: one for name, one in zip(leaves, found, strict=True) if one is not None}


def join(found: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in found.values()])


def gradients_of_part(compute: Callable, names: tuple[str, ...]) -> torch.Tensor:
    """The gradients that the reader's part gives the leaves of these names; raises AssertionError if one has none."""
    leaves = leaves_of(compute)
    with torch.enable_grad():
        found = gradients(compute(), {name: leaves[name] for name in names})
    cut = [name for name in names if name not in found]
    assert not cut, f"no gradient reaches {cut[0]}" + (f" and {len(cut) - 1} more" if cut[1:] else "")
    return join(found)


def outcome(compute: Callable[[], Value]) -> Value | Exception:
    """What the reader's part gives; an error in it is a result like others, but that it is not written is not."""
    given = [value for value in names_in(compute).values() if isinstance(value, torch.Tensor | dict)]
    given = [(v, v.detach().clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v)) for v in given]
    try:
        result = compute()
    except Exception as error:
        if isinstance(error, NotImplementedError) and not error.args:  # that of a blank
            raise
        lines = error.__traceback__
        while lines.tb_next and lines.tb_frame.f_code.co_filename == __file__:
            lines = lines.tb_next
        return error.with_traceback(lines)  # the reader's lines, without those of this file
    if not all(are_equal(value, before) for value, before in given):
        return AssertionError("it changes an argument in place")
    return result


def compare(part) -> list[tuple[str, Value | Exception, Value]]:
    """What is compared, what the reader's part gives and what the package gives, up to the first exception."""
    found = []
    with torch.random.fork_rng(), mock.patch.object(nn.functional, "dropout", halve), torch.enable_grad():
        torch.manual_seed(0)
        for what, compute, expected in CASES[part.__name__](part):
            with torch.set_grad_enabled(part.__name__ == "train_step"):
                found.append((what, outcome(compute), expected))
            if isinstance(expected, torch.Tensor) and expected.requires_grad and are_equal(*found[-1][1:]):
                reached = gradients(expected, leaves_of(compute))
                ours = outcome(lambda compute=compute, names=tuple(reached): gradients_of_part(compute, names))
                found.append((f"the gradients of {what}", ours, join(reached)))
            if isinstance(found[-1][1], Exception):
                break
    return found


def are_equal(one, other) -> bool:
    """Whether both are the same exception, or the same within the tolerance, in shape and dtype too."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.allclose(one.double(), other.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    if isinstance(one, Exception):
        return type(one) is type(other) and str(one) == str(other)
    return type(one) is type(other) and one == other


@cache
def known_outcomes(name: str) -> list[tuple[str, list]]:
    """What the known mistakes in a part give, each with its message."""
    found = []
    for right, wrong, message in MISTAKES.get(name, []):
        with contextlib.suppress(Exception):  # a mistake may break the part before its first comparison
            found.append((message, compare(getattr(solved(name, right, wrong), name))))
    return found


def find_mistake(name: str, found: list) -> str | None:
    """The known mistake that gives the same results as the reader's part, at least up to the first wrong one."""
    last = next(number for number, (_, ours, expected) in enumerate(found) if not are_equal(ours, expected))
    matches = {}
    for message, theirs in known_outcomes(name):
        same = [are_equal(one[1], other[1]) for one, other in zip(found, theirs, strict=False)]
        if len(same) > last and all(same[: last + 1]):
            matches[message] = sum(same)
    return max(matches, key=matches.get, default=None)


def describe(ours, expected: Value) -> str:
    if isinstance(ours, Exception):
        return f"{ours}" if isinstance(ours, AssertionError) else f"{type(ours).__name__}: {ours}"
    if not isinstance(expected, torch.Tensor):
        return f"it is {reprlib.repr(ours)}, and must be {reprlib.repr(expected)}"
    if not isinstance(ours, torch.Tensor):
        return f"it is a {type(ours).__name__}, and must be a tensor of shape {tuple(expected.shape)}"
    if ours.shape != expected.shape:
        return f"its shape is {tuple(ours.shape)}, and must be {tuple(expected.shape)}"
    if ours.dtype != expected.dtype:
        return f"its dtype is {ours.dtype}, and must be {expected.dtype}"
    return f"the largest difference is {(ours.double() - expected.double()).abs().max().item():.2g}"


def name_of(part) -> str:
    name = getattr(part, "__name__", repr(part))
    if name not in CASES:
        raise ValueError(f"{name} is not the name of a part; the parts are {', '.join(CASES)}.")
    return name


def refuse(error: Exception, cause: Exception | None = None):
    raise error from cause


def check(*parts):
    """Compares functions or classes with the package; raises AssertionError at the first that differs."""
    __tracebackhide__ = True  # in a notebook, so that little more than the error is shown
    for part in parts:
        name = name_of(part)
        try:
            found = compare(part)
        except NotImplementedError as error:
            blank = traceback.extract_tb(error.__traceback__)[-1].name
            blank = name if blank == name else f"{name}.{blank}"
            refuse(NotImplementedError(f"{blank} is not written yet"))
        count = sum(getattr(expected, "numel", getattr(expected, "__len__", lambda: 1))() for *_, expected in found)
        assert count > 0, f"{name}: nothing was compared"
        for what, ours, expected in found:
            if not are_equal(ours, expected):
                problem, mistake = f"{name}, {what}: {describe(ours, expected)}.", find_mistake(name, found)
                error = ours if isinstance(ours, Exception) and not isinstance(ours, AssertionError) else None
                if mistake:  # one that is known by an error alone is a guess
                    problem += f"\n{'Probably' if error and len(found) == 1 else 'Mistake'}: {mistake}."
                refuse(AssertionError(problem), error)
        unit = "tokens" if isinstance(expected, tuple | dict) else "numbers"
        print(f"{name}: equal to the package ({count:,} {unit})")


def keep(*parts):
    """Checks functions or classes and writes their source to my_transformer.py, in place of an earlier version."""
    __tracebackhide__ = True
    for part in parts:
        name, code = name_of(part), (part.__init__ if isinstance(part, type) else inspect.unwrap(part)).__code__
        cell = "".join(linecache.getlines(code.co_filename))
        source = find_definition(cell, name)
        head = (
            "import math\n\nimport numpy as np\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
        )
        head += "\nfrom transformer import *  # the parts that are not written here yet\n"
        text = MINE.read_text(encoding="utf-8") if MINE.exists() else head
        names = vars(load(text))  # as in the file, where other names of the notebook are missing
        lines_above = "\n" * cell[: cell.index(source)].count("\n")  # so that an error shows the line of the cell
        exec(compile(lines_above + source, code.co_filename, "exec"), names)
        check(names[name])
        old = find_definition(text, name)
        MINE.write_text(text.replace(old, source) if old else f"{text}\n\n{source}\n", encoding="utf-8")
        print(f"{name} is in {MINE.name}")


@lru_cache(maxsize=1)
def import_mine(text: str) -> types.ModuleType:
    """Imports my_transformer.py, and reloads it if its text has changed, as another notebook may have written to it."""
    return importlib.reload(importlib.import_module(MINE.stem))


def part(name: str):
    """A function or class of an earlier notebook: the reader's, if my_transformer.py has it, else the solution."""
    is_there = MINE.exists()
    module = import_mine(MINE.read_text(encoding="utf-8")) if is_there else importlib.import_module(SOLUTION.stem)
    found = getattr(module, name)
    print(f"{name}: {'yours' if found.__module__ == MINE.stem else 'the solution'}")
    return found


@torch.no_grad()
def compare_steps(ours: nn.Module, theirs: nn.Module, source: torch.Tensor, target: torch.Tensor):
    """Runs two models with the same weights and compares the outputs of all modules that have the same name.

    Padding of the source is left out of the comparison. Raises AssertionError at the first module whose output differs.
    """
    seen = {}

    def watch(kept: dict, name: str, module: nn.Module):
        def hook(_, inputs, output):
            if not isinstance(output, torch.Tensor):  # attention returns its weights too, a stack of the package more
                output = output[0]
            kept.pop(name, None)  # a module that is called twice, such as dropout, is compared after its last call
            kept[name] = output

        return module.register_forward_hook(hook)

    for model in (ours, theirs):
        seen[model] = {}
        hooks = [watch(seen[model], name, module) for name, module in model.named_modules() if name]
        model(source, target) if model is ours else model(source, decoder_input_ids=target, use_cache=False)
        for hook in hooks:
            hook.remove()
    kept = source != PAD
    names = [name for name in seen[ours] if name in seen[theirs]]
    assert len(names) > 10, "hardly a module has the name of one of the package's"
    for name in names:
        one, other = (of[name][kept] if of[name].shape[:2] == kept.shape else of[name] for of in seen.values())
        assert are_equal(one, other), f"{name}: {describe(one, other)}"
    print(f"{len(names)} modules have equal outputs, from {names[0]} to {names[-1]}")
