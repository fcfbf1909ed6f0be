# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. Positions
#
# Attention compares words and does not ask where they stand: to it, a sentence is a bag of words. So the model must
# be told the positions. The paper adds a vector to each word, made of sines and cosines; a model can also learn these
# vectors; and rotary positions, which came later, add nothing but turn queries and keys by an angle.
#
# Section 3.5, and row E of Table 3, where learned vectors translate about as well. You write the paper's positions. Then
# three small models, one of each kind, are tried on sequences longer than any that they were trained on.
#
# **You need** notebook 2. **Time:** 60 minutes, 25 of them for the exercises. **You will have** the input of the first
# layer: words with their positions.
#
# Letters: B sentences, S source length, T target length, d model width, h heads, k width of a head, V vocabulary size.

# %%
import math
import sys
import warnings

import checks
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.modeling_vanilla_transformer import LearnedPositions, SinusoidalPositions, rotate

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.set_num_threads(1)  # models this small run faster so
torch.manual_seed(0)
rng = np.random.default_rng(0)

MultiHeadAttention = checks.part("MultiHeadAttention")  # of notebook 2

# %% [markdown]
# ## A bag of words
#
# Shuffle the words that go into attention, and the same vectors come out, shuffled alike.

# %%
d, S = 64, 10
attention = MultiHeadAttention(d, h=4)
words = torch.randn(1, S, d)  # (B,S,d)
order = torch.randperm(S)
with torch.no_grad():
    in_order, shuffled = attention(words, words), attention(words[:, order], words[:, order])
torch.testing.assert_close(shuffled, in_order[:, order], rtol=0, atol=1e-6)

# %% [markdown]
# ## Exercise: sinusoids (15 minutes)
#
# Each pair of features is the hand of a clock: feature 2i holds the sine of its angle, feature 2i + 1 the cosine.
#
# ![Clocks at nine positions: each pair of features turns more slowly than the one before](../pictures/positions.svg)
#
# $$PE(pos, 2i) = \sin(pos / 10000^{2i/d}), \qquad PE(pos, 2i+1) = \cos(pos / 10000^{2i/d})$$
#
# The first clock turns by one radian at every position; each next one is slower, and the last hardly moves in a
# sentence. Together they tell the time. For d = 4 the first two rows are (0, 1, 0, 1) and (sin 1, cos 1, sin 0.01,
# cos 0.01).


# %% tags=["part"]
def sinusoids(length, d):
    """The positions 0 to length - 1 (section 3.5) -> (length,d), in float32."""
    # SOLUTION
    positions = torch.arange(length, dtype=torch.float64)[:, None]  # in float32, large angles would be inexact
    angles = positions * 10000 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)  # (length,d/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).float()
    # EXERCISE
    # # 1. The angles (length,d/2), in float64, since float32 is inexact for the large angles of far positions.
    # # 2. Sines on the even features, cosines on the odd ones, and .float() at the end.
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(sinusoids)
# EXERCISE
# checks.keep(sinusoids)
# END

# %% [markdown]
# ## Exercise: the input of the first layer (10 minutes)
#
# A token id becomes a vector by looking up its row in the embedding matrix (V,d). Both stacks begin with that row,
# times $\sqrt d$ (section 3.4), plus the position. Why the factor? The paper gives no reason. The rows begin with
# variance 1/d, because the same matrix will turn vectors back into words at the end: a logit is a sum of d products
# with a vector of variance near 1, and so has variance near 1 too. Times $\sqrt d$, their entries have variance 1, and
# the positions, whose sines and cosines have a mean square of 1/2, do not drown them.


# %% tags=["part"]
def embed(embed_tokens, ids):
    """Token ids (B,T) -> (B,T,d): rows of the nn.Embedding `embed_tokens`, scaled (section 3.4), plus positions."""
    # SOLUTION
    length, d = ids.shape[1], embed_tokens.embedding_dim
    return embed_tokens(ids) * math.sqrt(d) + sinusoids(length, d)
    # EXERCISE
    # # The length is ids.shape[1], and d is embed_tokens.embedding_dim.
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(embed)
# EXERCISE
# checks.keep(embed)
# END

# %% [markdown]
# The package keeps a table of sinusoids and goes beyond it where a sentence is longer. Its rows equal those of your
# `sinusoids`.
#
# ## What sinusoids can do
#
# The dot product of two positions depends on their distance alone: $\sin a \sin b + \cos a \cos b = \cos(a - b)$,
# summed over the clocks. And to step forward by a distance is to turn each hand by an angle, which is the same at
# every position: a linear map. So the authors hoped that a model would easily learn to look some words back, and
# that it could go on beyond the lengths of its training. The linear map we show as an equality; the second hope we
# shall try.

# %%
table = sinusoids(200, d).double().numpy()
package = SinusoidalPositions(100, d)
np.testing.assert_allclose(package.table, table[:100], atol=1e-6)
np.testing.assert_allclose(package(torch.arange(200)[None], length=200)[0], table, atol=1e-6)  # beyond its table too


def frequencies(d):
    return 10000 ** (-np.arange(0, d, 2) / d)  # (d/2,)


products = table @ table.T  # (T,T)
distance = np.arange(200)
by_distance = np.cos(distance[:, None] * frequencies(d)).sum(axis=-1)
np.testing.assert_allclose(products, by_distance[np.abs(distance[:, None] - distance)], atol=1e-5)


def turn(x, positions):
    """Each pair of features of x (...,T,d) as a complex number, turned by the angle of its position and frequency."""
    angles = np.asarray(positions)[:, None] * frequencies(x.shape[-1])
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


# In a pair (sine, cosine) the hand starts on the second axis and runs clockwise: hence the minus.
three_on = turn(table[:-3], np.full(197, -3))
np.testing.assert_allclose(three_on, table[3:], atol=1e-6)
print("equal: products by distance, and steps as turns")

# %% [markdown]
# ## Rotary
#
# If positions are turns, turn the queries and the keys of self-attention themselves (RoFormer, arXiv 2104.09864). The
# score of a query and a key is then the same as if the query alone were turned, by the difference of the two
# positions. Attention to the source is left alone: a position in the source and one in the target have no such
# difference. Values are not turned, and no vector is added: positions act in the scores alone. The function `turn`
# above is all of it. The package's `rotate` takes sines and cosines from a table of sinusoids of width k.

# %%
B, h, T, k = 2, 3, 7, 16
queries = rng.normal(size=(B, h, T, k))
rows = sinusoids(T, k)[None]  # (1,T,k)
np.testing.assert_allclose(rotate(torch.from_numpy(queries), rows), turn(queries, range(T)), atol=1e-6)

query, key = rng.normal(size=(2, 1, k))
for position in [0, 5, 300]:
    score = turn(query, [position + 4]) @ turn(key, [position]).T
    np.testing.assert_allclose(score, turn(query, [4]) @ key.T, atol=1e-6)

# %% [markdown]
# ## Learned
#
# A row of numbers for each position, trained like an embedding. Nothing connects neighboring rows but the training,
# and beyond the table there is nothing. The package refuses such a sequence.

# %%
learned = LearnedPositions(100, d)
np.testing.assert_array_equal(learned(torch.arange(100)[None], length=100)[0].detach(), learned.weight.detach())
try:
    learned(torch.arange(101)[None], length=101)
except ValueError as error:
    print(error)
else:
    raise AssertionError("a sequence beyond the table was taken")

# %% [markdown]
# Side by side: the clocks of the sinusoids, and how alike two positions are over their distance. For learned
# positions these are rows as they begin, before training. For rotary it is one random vector, turned to the two
# positions.

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
image = axes[0].imshow(table[:100, 0::2].T, aspect="auto", cmap="RdBu", origin="lower")
axes[0].set(title="sinusoids", xlabel="position (tokens)", ylabel="pair of features, i")
figure.colorbar(image, ax=axes[0], label="its sine, feature 2i")

CENTRE = 50
distances = np.arange(100) - CENTRE
same_vector = np.repeat(rng.normal(size=(1, d)), 100, axis=0)
curves = {
    "sinusoidal": table[:100],
    "learned, untrained": learned.weight.detach().numpy(),
    "rotary, a random vector": turn(same_vector, range(100)),
}
for name, vectors in curves.items():
    cosines = vectors @ vectors[CENTRE] / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vectors[CENTRE])
    axes[1].plot(distances, cosines, label=name)
axes[1].set(title="likeness of two positions", xlabel="distance (tokens)", ylabel="cosine of the angle between them")
axes[1].set_ylim(top=1.5)
axes[1].grid(alpha=0.3)
axes[1].legend(loc="upper right")
plt.show()

# %% [markdown]
# ## Longer than in training
#
# The task is to copy a row of symbols; what is hard in it is to keep one's place. Three models, alike but for
# `position_embedding_type`, are trained on 5 to 10 symbols and tried on up to 20. The learned table is long enough
# for that, but no training ever reached its later rows: they are as they began. Everything is done for two seeds,
# since one could be luck.

# %%
START, END, FIRST, SYMBOLS = 1, 2, 3, 10
SHORTEST, LONGEST, LONGEST_TRIED = 5, 10, 20
TYPES, SEEDS = ["sinusoidal", "learned", "rotary"], [0, 1]
STEPS, WARMUP, PEAK = 500, 100, 5e-3


def make_batch(length, size, generator):
    """Rows of random symbols and an END (size,length+1); what is to be written is the same."""
    symbols = torch.randint(FIRST, FIRST + SYMBOLS, (size, length), generator=generator)
    return torch.cat([symbols, torch.full((size, 1), END)], dim=1)


def make_model(position_embedding_type, seed):
    torch.manual_seed(seed)
    config = VanillaTransformerConfig(
        vocab_size=FIRST + SYMBOLS,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        dropout=0.0,
        position_embedding_type=position_embedding_type,
        max_position_embeddings=LONGEST_TRIED + 1,
        decoder_start_token_id=START,
        eos_token_id=END,
    )
    return VanillaTransformerForConditionalGeneration(config)


def train(position_embedding_type, seed):
    model = make_model(position_embedding_type, seed).train()
    generator = torch.Generator().manual_seed(seed)  # the same batches for the three types
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    for step in range(1, STEPS + 1):
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        rows = make_batch(length, 32, generator)
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = PEAK * min(step / WARMUP, (1 + math.cos(math.pi * step / STEPS)) / 2)
        optimizer.step()
    print(f"{position_embedding_type:10} seed {seed}: loss {loss.item():.4f} nats per token at step {STEPS}")
    return model.eval()


models = {(name, seed): train(name, seed) for name in TYPES for seed in SEEDS}

for seed in SEEDS:
    before, after = make_model("learned", seed).model, models["learned", seed].model
    for stack in ["encoder", "decoder"]:
        rows_before, rows_after = (model.get_submodule(stack).embed_positions.weight for model in (before, after))
        is_same = (rows_before == rows_after).all(dim=1)
        assert is_same.tolist() == [position > LONGEST for position in range(len(is_same))]

# %% [markdown]
# A row counts if every token of it is right, its END included. One pass over the right tokens is enough to know:
# greedy decoding writes the whole row correctly if and only if each token is the likeliest one after the right ones
# before it. We check this equivalence against `generate`. The share of right tokens, beside it, shows
# how near a wrong row is.


# %%
@torch.no_grad()
def right_tokens(model, rows):
    """(B,T): whether each token is what the model would write after the right ones before it."""
    return model(rows, labels=rows).logits.argmax(dim=-1) == rows


lengths = range(SHORTEST, LONGEST_TRIED + 1)
exact, tokens = {}, {}
for key, model in models.items():
    generator = torch.Generator().manual_seed(1234)
    right = [right_tokens(model, make_batch(length, 256, generator)) for length in lengths]
    exact[key] = np.array([of_length.all(dim=1).float().mean().item() for of_length in right])
    tokens[key] = np.array([of_length.float().mean().item() for of_length in right])

for (name, seed), model in models.items():
    rows = make_batch(LONGEST + 1, 64, torch.Generator().manual_seed(4321))
    written = model.generate(rows, do_sample=False, max_new_tokens=rows.shape[1])[:, 1:]  # without START
    written = nn.functional.pad(written, (0, rows.shape[1] - written.shape[1]))
    assert torch.equal((written == rows).all(dim=1), right_tokens(model, rows).all(dim=1)), (name, seed)

shown = [5, 8, 9, 10, 11, 12, 14, 16, 20]
print("length                    " + "".join(f"{length:6}" for length in shown))
for name, share in [("rows exact", exact), ("tokens right", tokens)]:
    for (type_name, seed), values in share.items():
        numbers = "".join(f"{100 * values[length - SHORTEST]:5.0f}%" for length in shown)
        print(f"{name:12} {type_name:10} {seed}  {numbers}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharex=True, sharey=True)
for axis, title, share in [(axes[0], "rows copied exactly", exact), (axes[1], "tokens copied correctly", tokens)]:
    for color, name in enumerate(TYPES):
        for seed, style in zip(SEEDS, ["-", "--"], strict=True):
            axis.plot(lengths, 100 * share[name, seed], style, color=f"C{color}", label=f"{name}, seed {seed}")
    axis.axvspan(SHORTEST, LONGEST, color="gray", alpha=0.12)
    axis.set(title=title, xlabel="length (symbols); gray: seen in training")
    axis.set_xticks(range(SHORTEST, LONGEST_TRIED + 1, 5))
    axis.grid(alpha=0.3)
axes[0].set_ylabel("share (%)")
axes[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# What this shows, and what it does not:
#
# - **Inside the gray** all three write most rows right. For sinusoidal and learned positions this fits the paper's
#   Table 3, where learned ones (row E) score nearly the same as sinusoids.
# - **Outside**, no model copies rows of twice the length. That sinusoids are *defined* at every position does not
#   mean that a model knows what to do there, and here the authors' second hope is not fulfilled.
# - **Learned** positions fail at once: one symbol more, and hardly a row is right. The eleventh symbol is wrong, since
#   from its place in the decoder nothing but END was ever written in training; and so is the END after it, which is
#   written from a position whose row of the table was never trained. **Sinusoids** last a symbol or so more.
# - **Rotary** fails most gently. It knows distances only, and a longer row has the same short distances.
#
# These are models of one layer, with two seeds and one task. The next cell asserts what was said about them:

# %%
inside = slice(0, LONGEST + 1 - SHORTEST)
outside = slice(LONGEST + 1 - SHORTEST, None)
for key in models:
    assert tokens[key][inside].min() > 0.9, key
    assert exact[key][-1] < 0.1, key
for seed in SEEDS:
    assert exact["learned", seed][outside].max() < 0.1 < exact["sinusoidal", seed][outside].max()
    right = right_tokens(models["learned", seed], make_batch(LONGEST + 1, 256, generator)).float().mean(dim=0)
    assert right[:LONGEST].mean() > 0.9 and right[LONGEST:].max() < 0.5, right
    others = max(tokens[name, seed][outside].mean() for name in ["sinusoidal", "learned"])
    assert tokens["rotary", seed][outside].mean() > others

# %% [markdown]
# Rotary has its price: it makes mistakes even inside the gray. The decoder's attention to the encoder is not turned,
# so the model must find its place in the source by what stands around it. If that is so, rows in which the same pair
# of adjacent symbols occurs twice must be the hard ones:

# %%
rows = make_batch(LONGEST, 2000, torch.Generator().manual_seed(99))
pairs = (rows[:, :-2] * 100 + rows[:, 1:-1]).sort(dim=1).values  # two neighbors as one number
has_twice = (pairs[:, 1:] == pairs[:, :-1]).any(dim=1)
for name, seed in models:
    right = right_tokens(models[name, seed], rows).all(dim=1).float()
    wrong, wrong_twice = 1 - right[~has_twice].mean().item(), 1 - right[has_twice].mean().item()
    print(f"{name:10} seed {seed}: wrong of rows with the same neighbors twice {wrong_twice:4.0%}, else {wrong:4.0%}")
    assert name != "rotary" or wrong_twice > 2 * wrong

# %% [markdown]
# **Question.** Why do the clocks run at such different speeds, from 1 radian per position down to almost 1/10000?

# %% [markdown] tags=["answer"]
# **Answer.** A fast clock tells neighbors apart, but shows the same time again after six positions. A slow one tells far
# positions apart, but shows neighbors nearly the same time. It is as with the digits of a number.
