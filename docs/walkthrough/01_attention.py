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
# # 1. Scaled dot-product attention
#
# A dictionary gives back the value whose key equals the query. Attention is a soft dictionary: it compares the query
# with every key, turns the comparisons into weights that sum to one, and gives back the weighted mean of all values.
# It makes no hard choice, so it has a gradient and can be trained.
#
# Section 3.2.1 of the paper, Equation 1: `softmax(Q K^T / sqrt(d_k)) V`. We write it in NumPy, measure what the
# `sqrt(d_k)` is for, and show at the end that our function equals `eager_attention_forward` of this package, in its
# result, its weights and its gradient.
#
# Letters as in `modeling_vanilla_transformer.py`: B sentences, h heads, T queries, S keys, k width of a head (the
# paper's $d_k$).

# %%
import sys
import warnings

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import nn

from vanilla_transformer.modeling_vanilla_transformer import eager_attention_forward

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.set_num_threads(1)
rng = np.random.default_rng(0)

# %% [markdown]
# ## Equation 1 in NumPy
#
# The softmax first subtracts the largest score from all of them. This divides numerator and denominator by the same
# factor, so no weight changes, and `exp` can no longer overflow. `...` lets the same lines serve one sentence or a
# batch of heads.


# %%
def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def attention(q, keys, values, scaling):
    """Queries (...,T,k), keys (...,S,k) and values (...,S,k) -> the output (...,T,k) and the weights (...,T,S)."""
    scores = q @ np.swapaxes(keys, -2, -1) * scaling  # (...,T,S)
    weights = softmax(scores)
    return weights @ values, weights


# %% [markdown]
# Three keys that point in different directions, and two queries. The first query points where the second key does;
# the second is zero, and so has no preference.

# %%
keys = np.array([[4.0, 0.0], [0.0, 4.0], [-4.0, -4.0]])  # (S,k)
values = np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])  # (S,k)
queries = np.array([[0.0, 4.0], [0.0, 0.0]])  # (T,k)

output, weights = attention(queries, keys, values, scaling=2**-0.5)
print("weights (T,S)", weights.round(3), "output (T,k)", output.round(3), sep="\n")

np.testing.assert_allclose(weights.sum(axis=-1), 1)
np.testing.assert_allclose(output[0], values[1], atol=1e-3)  # looked up: nearly the second value alone
np.testing.assert_allclose(output[1], values.mean(axis=0))  # no preference: the plain mean

# %% [markdown]
# ## Why the scores are divided by sqrt(d_k)
#
# Take a query and a key whose k features are independent, with mean 0 and variance 1. Each of the k products $q_i k_i$
# then has mean 0 and variance 1, and so their sum, the score, has variance k. A wide head has large scores for no
# better reason than being wide. Dividing the scores by $\sqrt{k}$ brings their variance back to 1 at every width.
#
# What is wrong with large scores? When scores are far apart, one weight is close to 1 and the others are close to 0.
# We measure two things over 64 keys:
#
# - **the entropy** of the weights, in nats. It is $\ln 64$ if all keys have the same weight and 0 if one has all of
#   it.
# - **the gradient** of the weights with respect to the scores, the matrix $\mathrm{diag}(w) - w w^T$, as its Frobenius
#   norm. A softmax that has made up its mind has no gradient, and a layer that cannot change its mind does not learn.
#   The norm varies widely between queries, so we look at its median and its lower quartile.

# %%
S, NUM_QUERIES = 64, 1000
WIDTHS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def gradient_norm(weights):
    """Frobenius norm of diag(w) - w w^T for each row w of (T,S), without making the (S,S) matrices."""
    squares = (weights**2).sum(axis=-1)
    return np.sqrt(np.maximum(squares - 2 * (weights**3).sum(axis=-1) + squares**2, 0))


def measure(scores):
    """Of scores (T,S): the variance, the mean entropy of the weights, lower quartile and median of the gradient norm."""
    weights = softmax(scores)
    entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=-1)
    return scores.var(), entropy.mean(), *np.quantile(gradient_norm(weights), [0.25, 0.5])


plain, scaled = [], []
for k in WIDTHS:
    scores = rng.normal(size=(NUM_QUERIES, k)) @ rng.normal(size=(S, k)).T
    plain.append(measure(scores))
    scaled.append(measure(scores / np.sqrt(k)))
plain, scaled = np.array(plain), np.array(scaled)  # (widths, 4)

print("without the scale -> with it")
for k, without, with_scale in zip(WIDTHS, plain, scaled, strict=True):
    print(f"d_k {k:3}   variance {without[0]:6.2f} -> {with_scale[0]:.2f}", end="   ")
    print(f"entropy {without[1]:.2f} -> {with_scale[1]:.2f} nats", end="   ")
    print(f"gradient: quartile {without[2]:.5f} -> {with_scale[2]:.2f}", end=", ")
    print(f"median {without[3]:.4f} -> {with_scale[3]:.2f}")

# %%
titles = ["variance of the scores", "entropy of the weights (nats)", "norm of the softmax's gradient"]
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
for axis, title in zip(axes, titles, strict=True):
    axis.set(xscale="log", xlabel="width of a head, $d_k$ (features)", title=title)
    axis.grid(alpha=0.3)
for name, found, color in [(r"$q \cdot k$", plain, "C0"), (r"$q \cdot k\, /\, \sqrt{d_k}$", scaled, "C1")]:
    axes[0].plot(WIDTHS, found[:, 0], "o-", color=color, markersize=4, label=name)
    axes[1].plot(WIDTHS, found[:, 1], "o-", color=color, markersize=4)
    axes[2].plot(WIDTHS, found[:, 3], "o-", color=color, markersize=4, label="median")
    axes[2].plot(WIDTHS, found[:, 2], "--", color=color, label="lower quartile")
axes[0].set_yscale("log")
axes[0].legend()
axes[1].axhline(np.log(S), color="gray", linestyle=":")
axes[1].text(1, np.log(S) - 0.06, "all keys alike: ln 64", color="gray", va="top")
axes[1].set_ylim(0, np.log(S) + 0.2)
axes[2].set_yscale("log")
axes[2].legend()
plt.show()

# %% [markdown]
# The variance of the plain scores equals the width, and the entropy of the weights falls towards 0: before any
# training, a wide head would look at one key, chosen by chance. With scaling, all curves are nearly flat.
#
# The paper suspects that large products push "the softmax function into regions where it has extremely small
# gradients" (section 3.2.1). The measurements say more. Without the scale the median of the gradient first *rises*: a
# softmax that is torn between two keys is the most sensitive of all. At the paper's width of 64 it is still about as
# large as with the scale. What has vanished is the gradient of the queries whose weights are saturated: the lower
# quartile has fallen far, and at larger widths the median follows. The next cell asserts all this.

# %%
np.testing.assert_allclose(plain[3:, 0], WIDTHS[3:], rtol=0.25)  # from width 8 on, where chance has averaged out
np.testing.assert_allclose(scaled[3:, 0], 1, rtol=0.25)
assert plain[-1, 1] < 0.1 * np.log(S) and scaled[-1, 1] > 0.8 * np.log(S)
at_64 = WIDTHS.index(64)
assert plain[:at_64, 3].max() > 1.5 * plain[0, 3]
assert plain[at_64, 3] > 0.8 * scaled[at_64, 3]
assert plain[at_64, 2] < 0.5 * scaled[at_64, 2]
assert plain[-1, 3] < 0.1 * scaled[-1, 3]
assert np.ptp(scaled[3:, 1:], axis=0).max() < 0.1

# %% [markdown]
# The formula for the norm of the gradient deserves a check of its own, against what autograd finds.

# %%
scores = torch.randn(S, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(dim=-1), scores)  # (S,S)
np.testing.assert_allclose(gradient_norm(softmax(scores.numpy())), jacobian.norm().item(), atol=1e-12)

# %% [markdown]
# ## The equality
#
# The package computes attention for a whole batch of heads: queries (B,h,T,k), keys and values (B,h,S,k). It returns
# the output as (B,T,h,k), ready for the heads to be joined, which is the subject of the next notebook. Its first
# argument is the attention module, of which it only reads `training`, for dropout.

# %%
B, h, T, S, k = 3, 4, 5, 7, 16
q = rng.normal(size=(B, h, T, k))
keys, values = rng.normal(size=(B, h, S, k)), rng.normal(size=(B, h, S, k))

output, weights = attention(q, keys, values, scaling=k**-0.5)

q_, keys_, values_ = (torch.tensor(x, requires_grad=True) for x in (q, keys, values))
theirs, their_weights = eager_attention_forward(nn.Identity(), q_, keys_, values_, None, scaling=k**-0.5)

np.testing.assert_allclose(their_weights.detach().numpy(), weights, atol=1e-6)
np.testing.assert_allclose(theirs.detach().numpy(), output.transpose(0, 2, 1, 3), atol=1e-6)
print("output", tuple(theirs.shape), "and weights", tuple(their_weights.shape), "are equal")

# %% [markdown]
# Its gradient is what the matrix $\mathrm{diag}(w) - w w^T$ says. Take the sum of all outputs as the loss. By the
# chain rule, a weight's gradient g is the sum of the features of its value. The softmax's matrix carries it to the
# scores: $(\mathrm{diag}(w) - w w^T)\, g = w \odot (g - w \cdot g)$, each weight times how much more than the mean its
# value would add. The keys carry it on to the query, times the scale.

# %%
theirs.sum().backward()

by_weight = np.broadcast_to(values.sum(axis=-1)[:, :, None], weights.shape)  # (B,h,T,S)
by_score = weights * (by_weight - (weights * by_weight).sum(axis=-1, keepdims=True))  # (diag(w) - w w^T) applied
by_query = by_score @ keys * k**-0.5  # (B,h,T,k)

np.testing.assert_allclose(q_.grad.numpy(), by_query, atol=1e-6)
print("the gradient by the queries is equal")

# %% [markdown]
# **To try:** leave out the scale in `attention` and see which assertion fails first. Draw the keys of the
# measurement with mean 1 instead of 0: is the variance still the width?
