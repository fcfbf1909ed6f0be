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
# # 2. Heads and masks
#
# Attention as it stands looks at everything with one pair of eyes. A mask tells it where not to look: not at padding,
# and, while writing, not at words that are still to be written. Heads give it several pairs of eyes: each looks at the
# sentence through a projection of its own, and what they see is joined.
#
# Sections 3.2.2 (multi-head attention, Figure 2) and 3.2.3 (the three uses of attention, and the mask of the future).
#
# **You need** notebook 1. **Time:** 75 minutes, 45 of them for the exercises. **You will have** both masks, and
# multi-head attention that loads the package's weights.
#
# Letters: B sentences, T queries, S keys, d model width, h heads, k = d / h width of a head.

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

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.set_num_threads(1)
torch.manual_seed(0)

attention = checks.part("attention")  # of notebook 1: yours if you have kept it, else the solution
PAD, START, END = 0, 1, 2  # token ids: padding, the decoder's first token, the end of a sentence

# %% [markdown]
# ## Exercise: masks (15 minutes)
#
# A batch is one tensor of token ids (B,S), but its sentences differ in length. So the shorter ones are filled up with
# padding, token 0, and attention would mix the padding into every word. **The padding mask** is True where there is a
# token. Attention needs a mask that broadcasts to (B,h,T,S), one truth value for each query and key of each head; this
# one is the same for all heads and all queries.
#
# **The causal mask** belongs to the decoder, the half of the model that writes. It predicts each word from those before
# it, so position t may look at positions up to and including t, and at none after it. It follows from the length alone.


# %% tags=["part"]
def padding_mask(ids):
    """Token ids (B,S) -> (B,1,1,S), True where there is no padding."""
    # SOLUTION
    return (ids != PAD)[:, None, None, :]
    # EXERCISE
    # raise NotImplementedError
    # END


def causal_mask(length):
    """-> (length,length): row t is True up to column t."""
    # SOLUTION
    return torch.ones(length, length, dtype=torch.bool).tril()
    # EXERCISE
    # # torch.ones(..., dtype=torch.bool), and one of the methods tril and triu
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(padding_mask, causal_mask)
# EXERCISE
# checks.keep(padding_mask, causal_mask)
# END

# %% [markdown]
# Two sentences of 6 and 4 tokens in one batch. Where both masks apply, both must allow it.

# %%
tokens = torch.tensor([[5, 9, 11, 7, 30, END], [8, 4, 6, END, PAD, PAD]])  # (B,S)
B, S = tokens.shape
padding, causal = padding_mask(tokens), causal_mask(S)
both = padding & causal  # (B,1,S,S)

pictures = {"padding": padding[1, 0].expand(S, S), "causal": causal, "both": both[1, 0]}
figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
for axis, (name, mask) in zip(axes, pictures.items(), strict=True):
    axis.imshow(mask, cmap="Blues", vmin=-0.2, vmax=2.5)
    for row in range(S):
        for column in range(S):
            axis.text(column, row, "1" if mask[row, column] else "0", ha="center", va="center")
    axis.set(title=name, xlabel="key: position looked at", xticks=range(S), yticks=range(S))
axes[0].set_ylabel("query: position that looks")
figure.suptitle("masks of the second sentence: 1 to look, 0 not to")
plt.show()

# %% [markdown]
# What a mask must do can be said as an equality. Padding must not count: the short sentence comes out of the batch as
# it does alone. And the past must not know the future: if the last token changes, no position before it does.

# %%
h, k = 2, 8
queries, keys, values = torch.randn(3, B, h, S, k)

in_batch, _ = attention(queries, keys, values, padding)
alone, _ = attention(queries[1:, :, :4], keys[1:, :, :4], values[1:, :, :4])
torch.testing.assert_close(in_batch[1:, :, :4], alone, rtol=0, atol=1e-6, msg="padding changes the short sentence")

changed_keys, changed_values = keys.clone(), values.clone()
changed_keys[:, :, -1] += 10
changed_values[:, :, -1] += 10
before, _ = attention(queries, keys, values, causal)
after, _ = attention(queries, changed_keys, changed_values, causal)
assert torch.equal(before[:, :, :-1], after[:, :, :-1]), "the last token changes a position before it"  # to the bit
assert (before[:, :, -1] - after[:, :, -1]).abs().max() > 1, "the last position does not see its own change"

# %% [markdown]
# ## Heads
#
# One softmax gives each word one weighted mean. A word may need more than one: its verb, its article, the word before.
# So there are h heads of k = d / h features: each head attends on its own, and the results are joined. This costs no
# more multiplications than one wide head: for the scores, h heads × T × S × k = T × S × d products.
#
# ![A row of d features is cut into h groups of k, and the groups become blocks (T,k), one for each head](../pictures/heads.svg)
#
# What do the heads look at? Not at the words themselves, but at projections of them: x times a matrix, plus a bias. It
# is the d features of such a projection that are split. Splitting only regroups numbers: the d features are read as h
# groups of k neighbors, (B,T,d) as (B,T,h,k). Then heads and positions change places, (B,h,T,k), so that the heads
# stand where a batch does: `attention` serves all heads of all sentences in one call. Joining undoes both.
#
# Since queries, keys and values have a projection each, a word can be one thing as a query (a noun in search of its
# verb), another as a key and a third as a value; and each head has its own k columns of these matrices (rows of
# `weight`, since `nn.Linear` stores the transpose), its own pair of eyes. One more projection mixes what the heads
# have found.
#
# There are three uses. The encoder's words attend to one another: queries, keys and values come from the same sentence.
# The decoder's words do the same, with the causal mask. And the decoder attends to the encoder: queries come from the
# target, keys and values from the source, and T and S differ. So the function has two inputs, `x` for the queries, and
# `attended` for keys and values.
#
# ![Who may attend to whom: all source tokens but padding to each other, target tokens to themselves and the past, target tokens to all source tokens but padding](../pictures/attention_kinds.svg)
#
# ## Exercise: multi-head attention (30 minutes)
#
# `__init__` is given: it fixes the names and shapes of the parameters, which are the package's. `nn.Linear(d, d)` is a
# projection.


# %% tags=["part"]
class MultiHeadAttention(nn.Module):
    """Multi-head attention (section 3.2.2): `x` (B,T,d) attends to `attended` (B,S,d) -> (B,T,d)."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q_proj = nn.Linear(d, d)
        self.k_proj = nn.Linear(d, d)
        self.v_proj = nn.Linear(d, d)
        self.out_proj = nn.Linear(d, d)

    def split_heads(self, x):
        """(B,T,d) -> (B,h,T,k)"""
        # SOLUTION
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)
        # EXERCISE
        # # reshape, view or unflatten, then transpose
        # raise NotImplementedError
        # END

    def join_heads(self, x):
        """(B,h,T,k) -> (B,T,d)"""
        # SOLUTION
        return x.transpose(1, 2).flatten(-2)
        # EXERCISE
        # raise NotImplementedError
        # END

    def forward(self, x, attended, mask=None):
        """A query does not see a key where `mask`, which broadcasts to (B,h,T,S), is False."""
        # SOLUTION
        queries = self.split_heads(self.q_proj(x))  # (B,h,T,k)
        keys, values = self.split_heads(self.k_proj(attended)), self.split_heads(self.v_proj(attended))  # (B,h,S,k)
        output, _ = attention(queries, keys, values, mask)
        return self.out_proj(self.join_heads(output))
        # EXERCISE
        # # Project to queries, keys and values; split; attend; join; project once more.
        # raise NotImplementedError
        # END


# %%
# SOLUTION
checks.check(MultiHeadAttention)
# EXERCISE
# checks.keep(MultiHeadAttention)
# END

# %% [markdown]
# The check loaded the weights of a layer of the package into your module by their names, and compared all three uses.
#
# ## One fused projection equals three
#
# Where a sentence attends to itself, queries, keys and values are three projections of the same x. The rows of the
# three weights can be stacked into one matrix of 3d rows: one large product instead of three, which is then cut in
# three. Whether a model stores three matrices or one is a matter of taste and speed, not of what it computes. Below,
# the width and the number of heads are those of the paper's base model; the input is 30 sentences of 200 tokens.

# %%
d, h = 512, 8
module = MultiHeadAttention(d, h)
projections = [module.q_proj, module.k_proj, module.v_proj]
weight = torch.cat([projection.weight for projection in projections])  # (3d,d)
bias = torch.cat([projection.bias for projection in projections])  # (3d)

with torch.no_grad():
    x = torch.randn(30, 200, d)
    qkv = x @ weight.T + bias  # (B,T,3d)
    for fused, projection in zip(qkv.split(d, dim=-1), projections, strict=True):
        torch.testing.assert_close(fused, projection(x), rtol=0, atol=1e-5)
    print("fused", tuple(qkv.shape), "  in heads", tuple(module.split_heads(qkv[..., :d]).shape))

# %% [markdown]
# PyTorch's own `nn.MultiheadAttention` stores the fused matrix. Given ours, it computes the same.

# %%
torchs = nn.MultiheadAttention(d, h, batch_first=True)
with torch.no_grad():
    torchs.in_proj_weight.copy_(weight)
    torchs.in_proj_bias.copy_(bias)
    torchs.out_proj.load_state_dict(module.out_proj.state_dict())
    x, causal = x[:3, :40], causal_mask(40)
    theirs, _ = torchs(x, x, x, attn_mask=~causal)  # there True hides, here True shows
    ours = module(x, x, causal)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5, msg="nn.MultiheadAttention gives something else")

# %% [markdown]
# **Questions.** 1. `x.reshape(B, h, T, k)` has the same shape as `split_heads(x)`. What is wrong with it? 2. How many
# parameters does multi-head attention have, and does their number depend on h?

# %% [markdown] tags=["answer"]
# **Answers.**
#
# 1. Reshaping keeps the order of the numbers in memory, in which all features of the first word come first. So the
# "first head" would get all features of the first T / h words, and attend among slices of word vectors. No error tells you,
# since the shapes fit; `check` would.
# 2. $4 (d^2 + d)$, for four matrices and biases. It does not depend on h.
