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
# We now have all the parts: attention, heads, masks, positions, layer norm, feed-forward network. This notebook
# assembles them into the model of Figure 1, in NumPy. There is no new mathematics in it, only three architectural
# ideas:
#
# - **The residual stream.** Each token has a vector of width d that runs from the bottom of a stack to its top. A
#   sublayer reads it and adds something to it: `x + Sublayer(x)`, and then a layer norm (section 3.1).
# - **The stack.** A layer maps (B,S,d) to (B,S,d), so layers can be stacked. All have the same structure and separate
#   weights.
# - **Cross-attention.** Each decoder layer has a third sublayer, between self-attention and feed-forward network: its
#   queries come from the target, its keys and values from the source. It is the only way in which the decoder sees the
#   source.
#
# At every step we compare our numbers with those that forward hooks record inside the package's model. By the end we
# will have rebuilt its whole forward pass.
#
# Letters as in `modeling_vanilla_transformer.py`: B sentences, S source length, T target length, d model width, h
# heads, k head size, f feed-forward size, V vocabulary size.

# %%
import math

import numpy as np
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.inspection.shapes import shape_table, trace_shapes

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## A model to rebuild
#
# Two layers in each stack, in float64, so that rounding hides nothing. In a new model all biases are 0 and all weights
# of layer norms are 1, so that nobody would notice if we forgot one; so we add random numbers to all parameters. The
# sizes B, S, T, d, h, k, f and V are all different, so that no axis can be mistaken for another.

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
model.set_attn_implementation("eager")  # the backend that returns attention weights
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn_like(parameter)

source = torch.randint(V, (B, S))
target = torch.randint(V, (B, T))

# %% [markdown]
# `trace_shapes` runs the model once and lists the shapes of all that its modules compute. Its
# list below is the plan of this notebook. The second layer of each stack has the same shapes as the first and is shown
# in one line.

# %%
steps = trace_shapes(model, source, target)
print("\n".join(shape_table(steps)))

# %% [markdown]
# ## Hooks
#
# A forward hook is a function that PyTorch calls after each call of a module. Our hooks store the output of every
# module under the module's name. `check` compares one of our steps with them.

# %%
P = {name: tensor.numpy() for name, tensor in model.state_dict().items()}  # parameters by name
seen = {}  # outputs of the modules
differences = {}  # for each step, the largest difference from the package


def watch(name, module):
    def keep(_, inputs, output):
        if isinstance(output, tuple):  # attention modules return output and weights
            seen[f"{name}.weights"] = output[1].numpy()
        elif isinstance(output, torch.Tensor):
            seen[name] = output.numpy()
        if name.endswith(".out_proj"):
            seen[name.replace("out_proj", "heads")] = inputs[0].numpy()

    module.register_forward_hook(keep)


for name, module in model.named_modules():
    watch(name, module)


def check(name, ours):
    """Compares our step with the output of the module, and returns it."""
    assert ours.shape == seen[name].shape, name
    np.testing.assert_allclose(ours, seen[name], rtol=0, atol=1e-6, err_msg=name)
    differences[name] = np.abs(ours - seen[name]).max()
    return ours


with torch.no_grad():
    their_logits = model(input_ids=source, decoder_input_ids=target, use_cache=False).logits.numpy()
print(f"{len(seen)} tensors were recorded, such as {list(seen)[3]} {seen[list(seen)[3]].shape}")

# %% [markdown]
# ## The bottom: embeddings and positions
#
# The vector of a token is its row of the embedding matrix (V,d), times $\sqrt{d}$ (section 3.4), plus the sinusoid of
# its position (section 3.5). Why the factor? The paper gives no reason. In this package the rows are initialized with
# variance 1/d, because the same matrix is the output projection, where this gives logits with a variance of about 1.
# Multiplied by $\sqrt{d}$, the entries have variance 1, so that positions, whose sines and cosines have a mean square
# of 1/2, do not dominate them.
#
# The package stores its sinusoids in float32, so we round ours, too.


# %%
def sinusoids(positions):
    angles = positions[..., None] * 10000 ** (-np.arange(0, d, 2) / d)  # (1,T,d/2)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*positions.shape, d).astype(np.float32)


def embed(stack, ids, positions=None):
    """Token ids (B,T) -> (B,T,d), the input of the first layer."""
    positions = np.arange(ids.shape[1])[None] if positions is None else positions
    tokens = check(f"{stack}.embed_tokens", P[f"{stack}.embed_tokens.weight"][ids])
    added = check(f"{stack}.embed_positions", sinusoids(positions))
    return check(f"{stack}.dropout", tokens * math.sqrt(d) + added)  # dropout is off outside training


x = embed("model.encoder", source)
print(f"the encoder reads {x.shape}; the difference is {differences['model.encoder.dropout']:.1e}")

# %% [markdown]
# ## The parts, from the earlier notebooks
#
# `name` and `layer` below are names of modules, by which a function finds its parameters in `P` and the expected
# result in `seen`. `mask` is true where a query may attend to a key, as in the second notebook; `memory` is the
# sequence that keys and values are computed from.


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
# Two sublayers, each followed by the same two operations: add its input, then normalize. Attention is the only place
# in the model where the vectors of different tokens interact; everything else treats each token separately.


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
# The decoder differs from the encoder in three ways:
#
# 1. The decoder's self-attention is causal: position t sees positions 0 to t. In training, its input is the target
# shifted right by one, so all T predictions are computed in one pass, and none sees the token that it predicts. 2. A
# sublayer between self-attention and feed-forward network attends to the encoder's output, with T queries and S keys.
# 3. Every layer attends to the *top* of the encoder, not to the encoder layer at the same depth.


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
# The logit of a token is the inner product of the decoder's output with the embedding of that token. Source
# embeddings, target embeddings and output projection are the same matrix (section 3.4). So the model reads and writes
# a word by the same vector, and has one matrix (V,d) instead of three.

# %%
matrices = [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight]
assert all(matrix is matrices[0] for matrix in matrices)

logits = check("lm_head", decoded @ P["model.shared.weight"].T)  # (B,T,V)
print(f"logits {logits.shape}; the difference is {differences['lm_head']:.1e}")

# %% [markdown]
# Was every step checked? We compare with the list printed at the beginning, including the second layers.

# %%
unchecked = [step.module for step in steps if step.module not in differences]
assert unchecked == []
print(f"all {len(steps)} steps are equal; the largest difference is {max(differences.values()):.1e}")

# %% [markdown]
# ## Padding
#
# Sentences of a batch differ in length. The shorter ones are padded, and neither the encoder nor the attention to the
# source may see the padding. One mask (B,1,1,S) serves both, because it hides *keys*. Vectors of padding are still
# computed, but nothing reads them. Positions count non-padding tokens only.
#
# The same functions on a padded batch; again every step is checked.

# %%
lengths = torch.tensor([S, 4])
kept = (torch.arange(S) < lengths[:, None]).long()  # (B,S), 1 for non-padding tokens
kept_keys = kept.numpy().astype(bool)[:, None, None, :]  # (B,1,1,S)
counted = (kept.cumsum(dim=1) - 1).numpy()  # (B,S)

with torch.no_grad():
    model(input_ids=source, attention_mask=kept, decoder_input_ids=target, use_cache=False)
differences.clear()
decoded = decoder(target, encoder(source, kept_keys, counted), kept_keys)
padded_logits = check("lm_head", decoded @ P["model.shared.weight"].T)

assert all(step.module in differences for step in steps)
np.testing.assert_allclose(padded_logits[0], logits[0], rtol=0, atol=1e-6)  # no padding: as before
assert np.abs(padded_logits[1] - logits[1]).max() > 0.01  # three of its tokens are padding now
print(f"with padding too, all are equal; the largest difference is {max(differences.values()):.1e}")

# %% [markdown]
# ## Which tokens see which
#
# This can be measured without looking at any weight: change one token, and see which predictions change.
#
# Target token t must change predictions t, t + 1, ..., and no earlier one. Every source token must change all
# predictions, since the encoder attends in both directions.

# %%
with torch.no_grad():

    def changed_by(side, position):
        """Which of the T predictions of the first sentence depend on a token."""
        inputs = {"input_ids": source.clone(), "decoder_input_ids": target.clone()}
        inputs[side][0, position] = (inputs[side][0, position] + 1) % V
        found = model(**inputs, use_cache=False).logits[0].numpy()
        return np.abs(found - their_logits[0]).max(axis=-1) > 1e-9  # (T,)

    by_target = np.array([changed_by("decoder_input_ids", t) for t in range(T)])  # (T,T)
    by_source = np.array([changed_by("input_ids", s) for s in range(S)])  # (S,T)

print("rows: the target token that was changed; columns: the predictions that change")
print(by_target.astype(int))
assert np.array_equal(by_target, np.triu(np.ones((T, T), dtype=bool)))
assert by_source.all()

# %% [markdown]
# ## Counting parameters
#
# Attention has four matrices (d,d) with biases, a feed-forward network two matrices between d and f with biases, a
# norm two vectors. The embedding matrix counts once, and sinusoids have no parameters.


# %%
def count(V, d, f, layers):
    attention, norm, feed_forward = 4 * (d * d + d), 2 * d, d * f + f + f * d + d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    return V * d + layers * (encoder_layer + decoder_layer)


assert model.num_parameters() == count(V, d, f, layers=2)

with torch.device("meta"):  # shapes without values: the paper's base model needs no memory
    base = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(vocab_size=37000))
assert base.num_parameters() == count(37000, 512, 2048, layers=6)
print(f"this model has {model.num_parameters():,} parameters, the paper's base model {base.num_parameters():,}")

# %% [markdown]
# **To try:** let each decoder layer attend to the encoder layer of its own height, and see which `check` fails. Drop a
# bias from `linear`. Set `norm_first=True` in the config: then `layer_norm` goes before the sublayer, the sum is not
# normalized, and each stack needs another norm at its top.
