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
# Attention as it stands looks at everything with one pair of eyes. A mask tells it where not to look: not at
# padding, and, while writing, not at words that are still to be written. Heads give it several pairs of eyes: each
# looks at the sentence through a projection of its own, and what they see is joined.
#
# Sections 3.2.2 (multi-head attention, Figure 2) and 3.2.3 (the three uses of attention and the look-ahead mask). We
# write both in NumPy, show that one fused projection equals three separate ones, and at the end that our function
# equals `VanillaTransformerAttention` of this package: to itself with padding, to the past, and to another sentence.
#
# Letters: B sentences, T queries, S keys, d model width, h heads, k = d / h width of a head.

# %%
import sys
import warnings

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import nn

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerAttention

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.set_num_threads(1)
torch.manual_seed(0)
rng = np.random.default_rng(0)

# %% [markdown]
# ## Masks
#
# This is the attention of the first notebook with one line more: where the mask is False, the score becomes the
# lowest number there is, and the softmax makes it a weight of 0. A mask is (B,1,T,S), or anything that broadcasts to
# it: the same for all heads, and for all queries or all sentences where it has a 1.


# %%
def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def attention(q, k, v, mask=None):
    """Queries (B,h,T,k), keys and values (B,h,S,k) -> the output (B,h,T,k) and the weights (B,h,T,S)."""
    scores = q @ np.swapaxes(k, -2, -1) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, np.finfo(scores.dtype).min)
    weights = softmax(scores)
    return weights @ v, weights


# %% [markdown]
# Two sentences of 6 and 4 tokens make one batch, so the second is filled up with padding, token 0. **The padding
# mask** follows from the tokens. **The look-ahead mask** follows from the length alone: position t sees positions up
# to t. Where both hold, both must allow it.

# %%
PAD = 0
tokens = np.array([[5, 9, 11, 7, 30, 2], [8, 4, 6, 2, PAD, PAD]])  # (B,S)
B, S = tokens.shape

padding_mask = (tokens != PAD)[:, None, None, :]  # (B,1,1,S)
look_ahead_mask = np.tril(np.ones((S, S), dtype=bool))[None, None]  # (1,1,S,S)
both = padding_mask & look_ahead_mask  # (B,1,S,S)

pictures = {"padding": padding_mask[1, 0].repeat(S, axis=0), "look-ahead": look_ahead_mask[0, 0], "both": both[1, 0]}
figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
for axis, (name, mask) in zip(axes, pictures.items(), strict=True):
    axis.imshow(mask, cmap="Blues", vmin=-0.2, vmax=2.5)
    for (row, column), allowed in np.ndenumerate(mask):
        axis.text(column, row, "1" if allowed else "0", ha="center", va="center")
    axis.set(title=name, xlabel="position looked at (token)", xticks=range(S), yticks=range(S))
axes[0].set_ylabel("position that looks (token)")
figure.suptitle("masks of the second sentence: 1 to look, 0 not to")
plt.show()

# %% [markdown]
# What a mask must do can be said as an equality. Padding must not count: the short sentence in its batch comes out
# as it does alone. And the past must not know the future: if the last token changes, no position before it does.

# %%
h, k = 2, 8
q, keys, values = rng.normal(size=(3, B, h, S, k))

in_batch, _ = attention(q, keys, values, padding_mask)
alone, _ = attention(q[1:, :, :4], keys[1:, :, :4], values[1:, :, :4])
np.testing.assert_allclose(in_batch[1:, :, :4], alone, atol=1e-12)

changed_keys, changed_values = keys.copy(), values.copy()
changed_keys[:, :, -1] += 10
changed_values[:, :, -1] += 10
before, _ = attention(q, keys, values, look_ahead_mask)
after, _ = attention(q, changed_keys, changed_values, look_ahead_mask)
np.testing.assert_array_equal(before[:, :, :-1], after[:, :, :-1])  # to the bit
assert np.abs(before[:, :, -1] - after[:, :, -1]).max() > 1  # the last position sees the change

# %% [markdown]
# The paper sets the scores to minus infinity (section 3.2.3). Why the lowest number instead? Because of a row in which
# everything is masked, such as a sentence that is nothing but padding. Minus infinity everywhere makes the softmax
# 0/0. The lowest number makes it uniform: of no meaning, but a number, and nobody looks at that row.

# %%
nothing = np.zeros((1, 1, 1, S), dtype=bool)
_, weights = attention(q, keys, values, nothing)
np.testing.assert_allclose(weights, 1 / S)
with np.errstate(invalid="ignore"):
    assert np.isnan(softmax(np.full(S, -np.inf))).all()

# %% [markdown]
# ## Heads
#
# One softmax gives each word one weighted mean. A word may need more than one: its verb, its article, the word
# before. So d features are split into h heads of k = d / h features, each head attends by itself, and the results
# are joined. The number of multiplications for the scores is the same, h T S k = T S d. Splitting only regroups
# numbers: (B,T,d) is read as (B,T,h,k) and turned to (B,h,T,k), so that the heads stand where a batch does and no
# loop is needed.


# %%
def split_heads(x, h):
    B, T, d = x.shape
    return x.reshape(B, T, h, d // h).transpose(0, 2, 1, 3)  # (B,T,d) -> (B,h,T,k)


def join_heads(x):
    B, h, T, k = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, h * k)  # (B,h,T,k) -> (B,T,d)


x = rng.normal(size=(B, S, 16))
np.testing.assert_array_equal(join_heads(split_heads(x, 4)), x)

# %% [markdown]
# ## One fused projection equals three
#
# Queries, keys and values are three projections of the same x. The rows of the three matrices can be stacked into
# one matrix of 3d rows: one large product instead of three, which is then cut in three. Whether a model stores three
# matrices or one is a matter of taste and speed, not of what it computes. The width and the heads here are those of
# the paper's base model, for 30 sentences of 200 tokens.

# %%
d, h = 512, 8
x = rng.normal(size=(30, 200, d))
w_q, w_k, w_v = rng.normal(scale=d**-0.5, size=(3, d, d))
b_q, b_k, b_v = rng.normal(size=(3, d))

separate = [x @ w.T + b for w, b in [(w_q, b_q), (w_k, b_k), (w_v, b_v)]]

qkv = x @ np.concatenate([w_q, w_k, w_v]).T + np.concatenate([b_q, b_k, b_v])  # (B,T,3d)
fused = np.split(qkv, 3, axis=-1)

for one, other in zip(fused, separate, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-12)

q, keys, values = (split_heads(part, h) for part in fused)
output, weights = attention(q, keys, values)
for name, tensor in [("x", x), ("qkv", qkv), ("q, k, v", q), ("weights", weights), ("joined", join_heads(output))]:
    print(f"{name:8} {tensor.shape}")

# %% [markdown]
# ## Multi-head attention, and the equality
#
# Project, split, attend, join, and project once more. `linear` is one of the package's projections, its weights
# taken out as NumPy arrays. In self-attention `attended` is x itself. In the decoder's attention to the encoder it
# is the source, and T and S differ.


# %%
def linear(layer, x):
    return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()


def multi_head_attention(module, x, attended, h, mask=None):
    """x (B,T,d) and attended (B,S,d) -> the output (B,T,d) and the weights (B,h,T,S)."""
    q = split_heads(linear(module.q_proj, x), h)
    k = split_heads(linear(module.k_proj, attended), h)
    v = split_heads(linear(module.v_proj, attended), h)
    output, weights = attention(q, k, v, mask)
    return linear(module.out_proj, join_heads(output)), weights


d, h, T = 32, 4, 5
config = VanillaTransformerConfig(d_model=d, encoder_attention_heads=h)
module = VanillaTransformerAttention(config, num_heads=h, is_causal=False, layer_idx=0).double()
x, source = rng.normal(size=(B, T, d)), rng.normal(size=(B, S, d))

cases = {
    "to itself": (x, None, None),
    "to the source, without its padding": (x, source, padding_mask),
    "to itself, without padding": (source, None, padding_mask),
    "to the past": (source, None, look_ahead_mask),
    "to the past, without padding": (source, None, both),
}
for backend in ["eager", "sdpa"]:
    config._attn_implementation = backend
    for name, (queries, attended, mask) in cases.items():
        ours, our_weights = multi_head_attention(module, queries, queries if attended is None else attended, h, mask)
        full = None if mask is None else np.broadcast_to(mask, (B, 1, *our_weights.shape[2:])).copy()
        theirs, their_weights = module(
            torch.from_numpy(queries),
            None if attended is None else torch.from_numpy(attended),
            attention_mask=None if full is None else torch.from_numpy(full),
        )
        np.testing.assert_allclose(theirs.detach().numpy(), ours, atol=1e-6)
        if backend == "eager":  # the backend that hands out its weights
            np.testing.assert_allclose(their_weights.detach().numpy(), our_weights, atol=1e-6)
        print(f"{backend:5} {name}: {tuple(theirs.shape)} is equal")

# %% [markdown]
# PyTorch's own `nn.MultiheadAttention` stores the fused matrix. Stack the three of the package, and it gives the
# same.

# %%
projections = [module.q_proj, module.k_proj, module.v_proj]
torchs = nn.MultiheadAttention(d, h, batch_first=True, dtype=torch.float64)
with torch.no_grad():
    torchs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
    torchs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
    torchs.out_proj.load_state_dict(module.out_proj.state_dict())

ours, _ = multi_head_attention(module, source, source, h, look_ahead_mask)
# There True hides, where here True shows.
theirs, _ = torchs(*[torch.from_numpy(source)] * 3, attn_mask=torch.from_numpy(~look_ahead_mask[0, 0]))
np.testing.assert_allclose(theirs.detach().numpy(), ours, atol=1e-6)

# %% [markdown]
# **To try:** let `join_heads` forget its `transpose`. The shapes still fit; which assertions notice?
