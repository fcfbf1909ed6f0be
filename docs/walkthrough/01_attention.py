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
# ![Attention maps of a trained translator](attention_map.png)
#
# This is where notebooks 1 to 7 lead. Each row is a token of a German sentence that a model writes, each column a
# token of the English sentence that it reads, and the brighter a square, the more the model looks at that English
# token to choose the German one. It looks with four heads, which are four attentions side by side (notebook 2), hence
# four pictures. Nobody told it which word translates which. You will write such a model yourself, about 200 lines of
# plain PyTorch. By notebook 6 it translates sentences that it has never seen, and its weights load into
# `vanilla_transformer`, the package that these notebooks belong to, called the package below; notebook 7 draws the
# picture. It is the model of the paper (Vaswani et al., 2017, *Attention Is All You Need*, [arXiv
# 1706.03762](https://arxiv.org/abs/1706.03762)); sections, equations, figures and tables in these notebooks are those
# of the paper.
#
# **You need** Python, NumPy, matrix products and gradients, and of PyTorch its tensors and `nn.Module` (its own
# introduction, *Learn the Basics*, is enough). **Time:** 45 minutes, 20 of them for the exercise. **You will have**
# attention, the first part of the model and the only one in which tokens exchange information.
#
# **How the exercises work.** `exercises/01_attention_exercise.ipynb` is this notebook with a blank where you write; the name, the
# arguments and the shapes are given. `checks.check` compares your function and its gradients with the package, in
# float64 and on sizes that all differ, and names your mistake if it is a common one. `checks.keep` does the same and then
# writes your code to `my_transformer.py`, from which the next notebooks take it. It keeps the function and nothing else of
# the cell, so put helpers and imports inside the function; `math`, `np`, `torch`, `nn` and `F` (`torch.nn.functional`),
# which the first cell of notebooks 1 to 6 imports, are there. The solution is in `01_attention.ipynb`.
#
# **What a Transformer is.** Two stacks of layers. The encoder reads a sentence, the source; the decoder writes its
# translation, the target, one token after the other. A token is a word or a piece of one, and from the bottom of a stack
# to its top it is a vector of d numbers. Each layer adds to these vectors what it has computed from them. Most of this
# treats each token by itself; what a token learns about the others, it learns by attention.
#
# Letters as in the package: B sentences, h heads, T queries (one for each token that looks), S keys (one for each token
# that can be looked at), k width of a head, which is the number of features of a query and of a key (the paper's $d_k$).

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

from vanilla_transformer.modeling_vanilla_transformer import eager_attention_forward

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.set_num_threads(1)
rng = np.random.default_rng(0)

# %% [markdown]
# ## A soft dictionary
#
# A dictionary returns the value whose key equals the query. Attention is a soft dictionary: it compares the query
# with every key, turns the comparisons into weights that sum to one, and returns the weighted mean of all values.
# It makes no hard choice, so it has a gradient and can be trained.
#
# Where do queries, keys and values come from? Each word is a vector, and the model multiplies it by three matrices that
# it learns: one makes its query, one its key, one its value. Here the word "sings" asks, with the query (1, 0.5):
#
# ![Each of three words has a vector; the query of one word is compared with the keys of all, and the weights mix their values](../pictures/queries_keys_values.svg)
#
# The same in NumPy, with the same keys and values, and then two more queries:

# %%
keys = np.array([[4.0, 0.0], [0.0, 4.0], [-4.0, -4.0]])  # (S,k)
values = np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])  # (S,k)


def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))  # as exp(scores), but cannot overflow
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


for query in np.array([[1.0, 0.5], [0.0, 4.0], [0.0, 0.0]]):
    scores = keys @ query  # one number for each key: how well does it match?
    weights = softmax(scores / np.sqrt(2))  # positive, and their sum is one
    output = weights @ values  # the weighted mean of the values
    print("query", query, "  scores", scores, "  weights", weights.round(2), "  output", output.round(2))

# %% [markdown]
# The first query fits the first key best and the second key a little: it gets 0.80 of the first value and 0.20 of the
# second. The second query points where the second key does, and is longer: it gets almost only the second value. The
# third query is zero and has no preference: it gets the plain mean of all values.
#
# The division by $\sqrt 2$, the root of the width k, keeps the weights from being all or nothing; more on this below.
# With one query in each row of a matrix Q, one key in each row of K and one value in each row of V, all of this is
# Equation 1 of the paper (section 3.2.1):
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^T}{\sqrt{d_k}}\right) V$$
#
# One thing is added here. Some keys must not be seen by some queries: the next notebook will hide padding, and words
# that are still to be written. Where a mask is False, the score becomes the lowest number of its dtype, so that the
# softmax makes it a weight of 0. Why not minus infinity? If *all* keys of a query are hidden, infinities make the
# softmax 0/0, which is NaN; the lowest number makes it uniform. That is without meaning, but a number.
#
# ## Exercise: attention (20 minutes)
#
# Write Equation 1 in PyTorch. The three dots stand for any number of axes, such as sentences and heads: matrix products
# and `transpose(-2, -1)` work on the last two axes and leave the others alone.


# %% tags=["part"]
def attention(queries, keys, values, mask=None):
    """Scaled dot-product attention (Equation 1).

    Queries (...,T,k), keys (...,S,k) and values (...,S,k) -> the output (...,T,k) and the weights (...,T,S). A query
    does not see a key where `mask`, which broadcasts to (...,T,S), is False.
    """
    # SOLUTION
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])  # (...,T,S)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    return weights @ values, weights
    # EXERCISE
    # # 1. The scores (...,T,S): each query times each key, divided by the root of the width k, their last axis.
    # # 2. If there is a mask, the lowest number where it is False: masked_fill, and torch.finfo(scores.dtype).min.
    # # 3. The weights: a softmax over the keys.
    # # 4. The output: the weighted mean of the values.
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(attention)
# EXERCISE
# checks.keep(attention)
# END

# %% [markdown]
# It equals the package. It also equals the steps in NumPy above, query by query:

# %%
queries, keys, values = rng.normal(size=(5, 16)), rng.normal(size=(7, 16)), rng.normal(size=(7, 16))
output, weights = attention(*map(torch.from_numpy, (queries, keys, values)))
for t in range(5):
    by_hand = softmax(keys @ queries[t] / np.sqrt(16))
    np.testing.assert_allclose(weights[t], by_hand, atol=1e-12)
    np.testing.assert_allclose(output[t], by_hand @ values, atol=1e-12)

# %% [markdown]
# ## Why the scores are divided by sqrt(d_k)
#
# Take a query and a key with k features each, all independent, with mean 0 and variance 1. Each of the k products of a
# feature of the query and the same feature of the key then has mean 0 and variance 1, and so their sum, the score, has
# variance k. A wide head has large scores for no better reason than being wide. Dividing the scores by $\sqrt{k}$
# brings their variance back to 1 at every width.
#
# What is wrong with large scores? When scores are far apart, one weight is close to 1 and the others are close to 0.
# We measure two things over 64 keys:
#
# - **the entropy** of the weights, in nats. It is $\ln 64$ if all keys have the same weight and 0 if one has all of
#   it.
# - **the gradient**: how much the weights change if the scores change a little. A softmax that has made up its mind has
#   no gradient, and a layer that cannot change its mind does not learn. It varies widely between queries, so we look at
#   its median and at its lower quartile, which a quarter of the queries do not reach.
#
# *Optional:* this gradient is a matrix, the Jacobian $\mathrm{diag}(w) - w w^T$ of the softmax. `gradient_norm` makes
# one number of it, the root of the sum of its squares (the Frobenius norm).

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
for width in WIDTHS:
    scores = rng.normal(size=(NUM_QUERIES, width)) @ rng.normal(size=(S, width)).T
    plain.append(measure(scores))
    scaled.append(measure(scores / np.sqrt(width)))
plain, scaled = np.array(plain), np.array(scaled)  # (widths, 4)

print("without the scale -> with it")
for width, without, with_scale in zip(WIDTHS, plain, scaled, strict=True):
    print(f"d_k {width:3}   variance {without[0]:6.2f} -> {with_scale[0]:.2f}", end="   ")
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
# gradients" (section 3.2.1). The measurements agree only in part. Without the scale the median of the gradient first
# *rises* with the width: a softmax that is torn between two keys is the most sensitive of all. At the paper's width of
# 64 it is still about as large as with the scale. What has vanished is the gradient of the queries whose weights are
# saturated: the lower quartile has fallen far, and at larger widths the median follows. The next cell asserts all
# this.

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
# ### Optional: the norm of the gradient, checked
#
# The formula in `gradient_norm` deserves a check of its own, against what autograd finds.

# %%
scores = torch.randn(S, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(dim=-1), scores)  # (S,S)
np.testing.assert_allclose(gradient_norm(softmax(scores.numpy())), jacobian.norm().item(), atol=1e-12)

# %% [markdown]
# ## Optional: what a query learns
#
# This part needs the Jacobian. No later notebook needs this part.
#
# In which direction does a gradient move a query? Take the sum of all outputs, and let the package compute its
# gradient with respect to the queries. The gradient with respect to a weight is then the sum of the features of that
# key's value; let g be the vector of these sums, one for each key. The Jacobian of the softmax carries it to the
# scores: $(\mathrm{diag}(w) - w w^T)\, g = w \odot (g - w \cdot g)$, each weight times how much more than the mean its
# value would add. The keys carry it on to the query, times the scale. So the gradient of a query points towards the
# keys whose values would add more to the sum than the average value does. If a higher sum lowers the loss, training
# moves the query towards these keys, otherwise away from them.
#
# The package computes attention for a whole batch of heads: queries (B,h,T,k), keys and values (B,h,S,k). Its first
# argument is the attention module, of which it only reads `training`, for dropout; its output is (B,T,h,k).

# %%
B, h, T, S, k = 3, 4, 5, 7, 16
queries = torch.tensor(rng.normal(size=(B, h, T, k)), requires_grad=True)
keys, values = (torch.tensor(rng.normal(size=(B, h, S, k))) for _ in range(2))

output, weights = attention(queries.detach(), keys, values)
theirs, their_weights = eager_attention_forward(nn.Identity(), queries, keys, values, None, scaling=k**-0.5)
torch.testing.assert_close(their_weights, weights, atol=1e-6, rtol=0, check_dtype=False)
torch.testing.assert_close(theirs.transpose(1, 2), output, atol=1e-6, rtol=0)

theirs.sum().backward()
by_weight = values.sum(dim=-1)[:, :, None].expand_as(weights)  # (B,h,T,S)
by_score = weights * (by_weight - (weights * by_weight).sum(dim=-1, keepdim=True))  # (diag(w) - w w^T) applied
by_query = by_score @ keys * k**-0.5  # (B,h,T,k)
torch.testing.assert_close(queries.grad, by_query, atol=1e-6, rtol=0)
print("the gradient with respect to the queries is equal")

# %% [markdown]
# **Questions.** 1. Why must the weights be a softmax over the keys and not over the queries? 2. If all keys have mean 1
# instead of 0, is the variance of the scores still k?

# %% [markdown] tags=["answer"]
# **Answers.**
#
# 1. Each query needs a mean of the values, and the weights of a mean sum to one. Over the queries, a query
# could get weights that sum to anything, and it would depend on the other queries.
# 2. No, 2k. The product of a query's feature q, with mean 0, and a key's feature 1 + z has the variance
# $E[q^2]\,E[(1 + z)^2] = 1 \cdot 2$, and the score is a sum of k of them.
