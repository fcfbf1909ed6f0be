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
# # 5. Layers and stacks
#
# The parts are there: attention, heads, masks, positions, layer norm, feed-forward network. This notebook joins them
# to the whole of Figure 1, in NumPy. There is no new mathematics in it, only three ideas of building:
#
# - **The residual stream.** Each token has a vector of width d that runs from the bottom of a stack to its top. A
#   sublayer reads it and adds something to it: `x + Sublayer(x)`, and then a layer norm (section 3.1).
# - **The stack.** A layer takes (B,S,d) and gives back (B,S,d), so layers can be piled up. All have the same form, and
#   each has weights of its own.
# - **The bridge.** Each layer of the decoder has a third sublayer, between the two that it shares with the encoder:
#   its queries come from the target, its keys and values from the source. Through it alone the decoder sees the
#   source.
#
# At every step our numbers are held against those of the package's model, taken from inside it by hooks. At the end no
# step of its forward pass is left that we have not rebuilt.
#
# Letters as in `modeling_vanilla_transformer.py`: B sentences, S source length, T target length, d model width, h
# heads, k width of a head, f inner width of the feed-forward network, V token types.

# %%
import math

import numpy as np
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.inspection.attention import show_shapes, trace_shapes

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## A model to rebuild
#
# Two layers on each side, in float64, so that rounding hides nothing. A new model has biases of 0 and norms of 1. With
# those, a bias that we forgot would make no difference, so all parameters are moved by random numbers. The lengths B,
# S, T, d, h, k, f and V are all different, so that no axis can be mistaken for another.

# %%
B, S, T, d, h, f, V = 2, 7, 5, 24, 4, 40, 50
k = d // h
config = VanillaTransformerConfig(
    vocab_size=V,
    d_model=d,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=h,
    decoder_attention_heads=h,
    encoder_ffn_dim=f,
    decoder_ffn_dim=f,
    pad_token_id=None,  # no padding for now
)
model = VanillaTransformerForConditionalGeneration(config).double().eval()
model.set_attn_implementation("eager")  # the backend that tells the attention weights
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn_like(parameter)

source = torch.randint(V, (B, S))
target = torch.randint(V, (B, T))

# %% [markdown]
# `trace_shapes` runs the model once and lists what each module returns, and the weights and heads of attention. This
# is the plan of the notebook. The second layer of each stack repeats the first, and is one line.

# %%
steps = trace_shapes(model, source, target)
for line in show_shapes(steps, all_layers=False):
    print(line)

# %% [markdown]
# ## Looking on
#
# A forward hook is a function that PyTorch calls each time a module is done. Ours keep what the modules return: the
# model's own intermediate results, by the names of the modules. `check` compares a step of ours with it.

# %%
P = {name: tensor.numpy() for name, tensor in model.state_dict().items()}  # the weights, by name
seen = {}  # what the modules returned
differences = {}  # how far our step is from it


def watch(name, module):
    def keep(_, inputs, output):
        if isinstance(output, tuple):  # of an attention module: its output and its weights
            seen[f"{name}.weights"] = output[1].numpy()
        elif isinstance(output, torch.Tensor):
            seen[name] = output.numpy()
        if name.endswith(".out_proj"):
            seen[name.replace("out_proj", "heads")] = inputs[0].numpy()

    module.register_forward_hook(keep)


for name, module in model.named_modules():
    watch(name, module)


def check(name, ours):
    """Holds our step against the module's, and hands it on."""
    assert ours.shape == seen[name].shape, name
    np.testing.assert_allclose(ours, seen[name], rtol=0, atol=1e-6, err_msg=name)
    differences[name] = np.abs(ours - seen[name]).max()
    return ours


with torch.no_grad():
    their_logits = model(input_ids=source, decoder_input_ids=target, use_cache=False).logits.numpy()
print(f"{len(seen)} tensors were kept, such as {list(seen)[3]} {seen[list(seen)[3]].shape}")

# %% [markdown]
# ## The bottom: embeddings and positions
#
# A token is a row of the embedding matrix (V,d), times $\sqrt{d}$ (section 3.4), plus the sinusoid of its position
# (section 3.5). Why the factor? The paper gives no reason. In this package the rows begin with variance 1/d, because
# the same matrix is the output projection, and there this variance gives logits of about 1. Times $\sqrt{d}$, an entry
# has variance 1 and is not drowned by a position, whose sines and cosines have a mean square of 1/2.
#
# The package keeps its sinusoids in float32, so we round ours likewise.


# %%
def sinusoids(positions):
    angles = positions[..., None] * 10000 ** (-np.arange(0, d, 2) / d)  # (1,T,d/2)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*positions.shape, d).astype(np.float32)


def embed(stack, ids, positions=None):
    """Token ids (B,T) -> (B,T,d), what the first layer reads."""
    positions = np.arange(ids.shape[1])[None] if positions is None else positions
    tokens = check(f"{stack}.embed_tokens", P[f"{stack}.embed_tokens.weight"][ids])
    added = check(f"{stack}.embed_positions", sinusoids(positions))
    return check(f"{stack}.dropout", tokens * math.sqrt(d) + added)  # dropout does nothing outside training


x = embed("model.encoder", source)
print(f"the encoder reads {x.shape}; the difference is {differences['model.encoder.dropout']:.1e}")

# %% [markdown]
# ## The parts, from the notebooks before
#
# Every name below is the name of a module, so that a function finds its weights in `P` and the result to compare with
# in `seen`. `mask` is true where a query may look at a key, as in the second notebook; `memory` is what keys and
# values are made of.


# %%
def linear(name, x):
    return check(name, x @ P[f"{name}.weight"].T + P[f"{name}.bias"])


def layer_norm(name, x):
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    return check(name, (x - mean) / np.sqrt(variance + 1e-5) * P[f"{name}.weight"] + P[f"{name}.bias"])


def split(x):
    return x.reshape(*x.shape[:2], h, k).swapaxes(1, 2)  # (B,T,d) -> (B,h,T,k)


def attention(name, x, memory, mask):
    """Queries from `x` (B,T,d), keys and values from `memory` (B,S,d) -> (B,T,d)."""
    queries = split(linear(f"{name}.q_proj", x))  # (B,h,T,k)
    keys, values = (split(linear(f"{name}.{one}", memory)) for one in ("k_proj", "v_proj"))  # (B,h,S,k)
    scores = queries @ keys.swapaxes(-2, -1) / math.sqrt(k)  # (B,h,T,S)
    scores = np.where(mask, scores, np.finfo(scores.dtype).min)
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = check(f"{name}.weights", exponentials / exponentials.sum(axis=-1, keepdims=True))
    joined = (weights @ values).swapaxes(1, 2).reshape(x.shape)  # (B,T,d)
    return linear(f"{name}.out_proj", check(f"{name}.heads", joined))


def feed_forward(layer, x):
    inner = check(f"{layer}.activation_fn", np.maximum(0, linear(f"{layer}.fc1", x)))  # (B,T,f)
    return linear(f"{layer}.fc2", inner)


# %% [markdown]
# ## An encoder layer, and the encoder
#
# Two sublayers, and around each of them the same wrapper: add, then normalise. Attention is the only place in the
# whole model where the vectors of different tokens meet; everything else treats each token by itself.


# %%
def encoder_layer(layer, x, mask):
    """(B,S,d) -> (B,S,d)."""
    x = layer_norm(f"{layer}.self_attn_layer_norm", x + attention(f"{layer}.self_attn", x, x, mask))
    x = layer_norm(f"{layer}.final_layer_norm", x + feed_forward(layer, x))
    return check(layer, x)


def encoder(ids, mask, positions=None):
    """Source ids (B,S) -> (B,S,d)."""
    x = embed("model.encoder", ids, positions)
    for number in range(config.encoder_layers):
        x = encoder_layer(f"model.encoder.layers.{number}", x, mask)
    return x


every_key = np.ones((1, 1, 1, 1), dtype=bool)
encoded = encoder(source, every_key)
print(f"the encoder gives {encoded.shape}; the difference is {differences['model.encoder.layers.1']:.1e}")

# %% [markdown]
# ## A decoder layer, and the decoder
#
# Three differences to the encoder:
#
# 1. Its self-attention is causal: position t sees positions 0 to t. So all T predictions of a sentence are made in one
#    pass, and none has seen its answer.
# 2. A sublayer between the two attends to the encoder's output. Here T queries meet S keys.
# 3. Every layer looks at the *top* of the encoder, not at the encoder layer of the same height.


# %%
def decoder_layer(layer, x, encoded, causal, mask):
    """(B,T,d) and the encoder's output (B,S,d) -> (B,T,d)."""
    x = layer_norm(f"{layer}.self_attn_layer_norm", x + attention(f"{layer}.self_attn", x, x, causal))
    x = layer_norm(f"{layer}.encoder_attn_layer_norm", x + attention(f"{layer}.encoder_attn", x, encoded, mask))
    x = layer_norm(f"{layer}.final_layer_norm", x + feed_forward(layer, x))
    return check(layer, x)


def decoder(ids, encoded, mask):
    """Target ids (B,T) and the encoder's output (B,S,d) -> (B,T,d)."""
    causal = np.tril(np.ones((ids.shape[1], ids.shape[1]), dtype=bool))  # (T,T): no key after the query
    x = embed("model.decoder", ids)
    for number in range(config.decoder_layers):
        x = decoder_layer(f"model.decoder.layers.{number}", x, encoded, causal, mask)
    return x


decoded = decoder(target, encoded, every_key)
print(f"the decoder gives {decoded.shape}; the difference is {differences['model.decoder.layers.1']:.1e}")

# %% [markdown]
# ## The top: logits from the embeddings
#
# The score of a token is the inner product of the decoder's last vector with the embedding of that token. It is the
# same matrix a third time: source embeddings, target embeddings and output projection are one (section 3.4). So a
# model reads and writes a word by the same vector, and has one matrix (V,d) where it could have three.

# %%
matrices = [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight]
assert all(matrix is matrices[0] for matrix in matrices)

logits = check("lm_head", decoded @ P["model.shared.weight"].T)  # (B,T,V)
print(f"logits {logits.shape}; the difference is {differences['lm_head']:.1e}")

# %% [markdown]
# Was every step checked? The list is the one printed at the beginning, with the second layers in full.

# %%
left_out = [step.module for step in steps if step.module not in differences]
assert left_out == []
print(f"all {len(steps)} steps are equal; the largest difference is {max(differences.values()):.1e}")

# %% [markdown]
# ## Padding
#
# Sentences of a batch differ in length. The shorter ones are filled up, and the filling must not be seen: not by the
# encoder, and not by the decoder when it looks at the source. One mask (B,1,1,S) does both, for what it hides are
# *keys*. Vectors of padding are still worked out, but nobody reads them. Positions count real tokens only.
#
# The same functions, another batch, and again every step is checked.

# %%
lengths = torch.tensor([S, 4])
real = (torch.arange(S) < lengths[:, None]).long()  # (B,S), 1 for real tokens
real_keys = real.numpy().astype(bool)[:, None, None, :]  # (B,1,1,S)
counted = (real.cumsum(dim=1) - 1).numpy()  # (B,S)

with torch.no_grad():
    model(input_ids=source, attention_mask=real, decoder_input_ids=target, use_cache=False)
differences.clear()
decoded = decoder(target, encoder(source, real_keys, counted), real_keys)
padded_logits = check("lm_head", decoded @ P["model.shared.weight"].T)

assert all(step.module in differences for step in steps)
np.testing.assert_allclose(padded_logits[0], logits[0], rtol=0, atol=1e-6)  # it has no padding: all as before
assert np.abs(padded_logits[1] - logits[1]).max() > 0.01  # three of its tokens have gone
print(f"with padding too, all are equal; the largest difference is {max(differences.values()):.1e}")

# %% [markdown]
# ## Who can see whom
#
# What the wiring allows can be measured without looking at a single weight. Change one token, and see which
# predictions change.
#
# Of the target, token t must change predictions t, t + 1, ..., and none before. Of the source, every token must change
# all predictions, since the encoder looks both ways.

# %%
with torch.no_grad():

    def changed_by(side, position):
        """Which of the T predictions of the first sentence change with a token."""
        inputs = {"input_ids": source.clone(), "decoder_input_ids": target.clone()}
        inputs[side][0, position] = (inputs[side][0, position] + 1) % V
        found = model(**inputs, use_cache=False).logits[0].numpy()
        return np.abs(found - their_logits[0]).max(axis=-1) > 1e-9  # (T,)

    by_target = np.array([changed_by("decoder_input_ids", t) for t in range(T)])  # (T,T)
    by_source = np.array([changed_by("input_ids", s) for s in range(S)])  # (S,T)

print("rows: the token of the target that was changed; columns: the predictions that change")
print(by_target.astype(int))
assert np.array_equal(by_target, np.triu(np.ones((T, T), dtype=bool)))
assert by_source.all()

# %% [markdown]
# ## Counting parameters
#
# Who can build a model can count it. An attention has four matrices (d,d) with biases, a feed-forward network two
# matrices between d and f, a norm two vectors. The embedding matrix counts once, and sinusoids have nothing to learn.


# %%
def count(V, d, f, layers):
    attention, norm, feed_forward = 4 * (d * d + d), 2 * d, d * f + f + f * d + d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    return V * d + layers * (encoder_layer + decoder_layer)


assert model.num_parameters() == count(V, d, f, layers=2)

with torch.device("meta"):  # shapes without numbers: the paper's base model takes no memory
    base = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(vocab_size=37000))
assert base.num_parameters() == count(37000, 512, 2048, layers=6)
print(f"this model has {model.num_parameters():,} parameters, the paper's base model {base.num_parameters():,}")

# %% [markdown]
# **To try:** let the decoder's layers look at the encoder layer of their own height, and see at which step `check`
# stops. Take one bias out of `linear`. Make the config `norm_first=True`: then `layer_norm` goes before the sublayer,
# the sum is no longer normalised, and each stack needs one norm more at its top.
