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
# You have all the parts: attention, heads, masks, positions, layer norm, feed-forward network. This notebook assembles
# them into the model of Figure 1. There is no new mathematics in it, only three architectural ideas:
#
# - **The residual stream.** Each token has a vector of width d that runs from the bottom of a stack to its top. A
#   sublayer reads it and adds something to it: `x + Sublayer(x)`, and then a layer norm (section 3.1).
# - **The stack.** A layer maps (B,S,d) to (B,S,d), so layers can be stacked. All have the same structure and separate
#   weights.
# - **Cross-attention.** Each decoder layer has a third sublayer, between self-attention and feed-forward network: its
#   queries come from the target, its keys and values from the source. It is the only way in which the decoder sees the
#   source.
#
# Then every module of your model is compared with the package's. And at the end the package trains a small translator,
# and its weights translate in *your* model.
#
# **You need** notebooks 2 to 4. **Time:** 75 minutes, 40 of them for the exercises; the training takes one to three
# minutes. **You will have** a Transformer.
#
# Letters: B sentences, S source length, T target length, d model width, h heads, k width of a head, f inner width of the
# feed-forward network, V vocabulary size.

# %%
import math

import checks
import numpy as np
import torch
import torch.nn.functional as F
from small_translator import SIZES, make_tokenizer, read_short, train_translator
from torch import nn

from vanilla_transformer import Translator, VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.inspection.shapes import shape_table, trace_shapes

torch.manual_seed(0)
torch.set_num_threads(1)

# Of notebooks 2, 3 and 4: yours if you have kept them, else the solution.
padding_mask, causal_mask = checks.part("padding_mask"), checks.part("causal_mask")
MultiHeadAttention, embed = checks.part("MultiHeadAttention"), checks.part("embed")
LayerNorm, Layer = checks.part("LayerNorm"), checks.part("Layer")
PAD, START, END = 0, 1, 2

# %% [markdown]
# ## The plan
#
# ![Figure 1 with the names, output shapes and parameters of the package's modules](../pictures/figure_1.svg)
#
# This is Figure 1 of the paper, drawn from the package's base model. A list says the same: what each module computes
# in one pass, for B = 2 sentences, S = 7 and T = 5. The model of the list is smaller, since this notebook will run it.
# In the list the encoder's positions are (B,S,d), since positions are numbered for each sentence by its own mask; the
# figure has no mask, and (1,S,d). The second layer of each stack has the same shapes as the first and is shown in one
# line. The names on the left are those of the modules, and so of the parameters. Your model will have the same names.

# %%
B, S, T, V = 2, 7, 5, 50
SMALL = {"d": 24, "h": 4, "f": 40, "layers": 2}
config = VanillaTransformerConfig(
    vocab_size=V,
    d_model=SMALL["d"],
    encoder_layers=SMALL["layers"],
    decoder_layers=SMALL["layers"],
    encoder_attention_heads=SMALL["h"],
    decoder_attention_heads=SMALL["h"],
    encoder_ffn_dim=SMALL["f"],
    decoder_ffn_dim=SMALL["f"],
)
package = VanillaTransformerForConditionalGeneration(config).double().eval()
package.set_attn_implementation("eager")
source, target = torch.randint(3, V, (B, S)), torch.randint(3, V, (B, T))
print("\n".join(shape_table(trace_shapes(package, source, target))))

# %% [markdown]
# ## Exercise: an encoder layer (5 minutes)
#
# Two sublayers, attention and then the feed-forward network, each in a `residual` with its own norm: that of the
# feed-forward network is `final_layer_norm`, which `Layer` has. `residual` calls its sublayer with x alone;
# `lambda x: ...` makes a function of x out of a call that needs a mask too. Attention is the only place in the model
# where the vectors of different tokens meet; everything else treats each token separately.


# %% tags=["part"]
class EncoderLayer(Layer):
    """Self-attention, then the feed-forward network (Figure 1, left): (B,S,d) -> (B,S,d)."""

    def __init__(self, d, h, f, dropout=0.1):
        super().__init__(d, f, dropout)
        self.self_attn = MultiHeadAttention(d, h)
        self.self_attn_layer_norm = LayerNorm(d)

    def forward(self, x, mask):
        # SOLUTION
        x = self.residual(x, self.self_attn_layer_norm, lambda x: self.self_attn(x, x, mask))
        return self.residual(x, self.final_layer_norm, self.feed_forward)
        # EXERCISE
        # raise NotImplementedError
        # END


# %%
# SOLUTION
checks.check(EncoderLayer)
# EXERCISE
# checks.keep(EncoderLayer)
# END

# %% [markdown]
# ## Exercise: a decoder layer (10 minutes)
#
# The decoder differs from the encoder in three ways:
#
# 1. Its self-attention is causal: position t sees positions 0 to t. In training, its input is the target shifted right by
#    one: START comes first, and the last token is left out (notebook 6). So all T predictions are computed in one pass,
#    and none sees the token that it predicts. Padding stands at the end of a target, where the causal mask already hides
#    it from all tokens, so this attention needs no padding mask.
# 2. A sublayer between self-attention and feed-forward network attends to the encoder's output, with T queries and S
#    keys. Its mask hides the padding of the source.
# 3. Every layer attends to the *top* of the encoder, not to the encoder layer at the same depth.


# %% tags=["part"]
class DecoderLayer(Layer):
    """Causal self-attention, attention to the encoder's output, feed-forward network (Figure 1, right)."""

    def __init__(self, d, h, f, dropout=0.1):
        super().__init__(d, f, dropout)
        self.self_attn = MultiHeadAttention(d, h)
        self.self_attn_layer_norm = LayerNorm(d)
        self.encoder_attn = MultiHeadAttention(d, h)
        self.encoder_attn_layer_norm = LayerNorm(d)

    def forward(self, x, encoded, causal, mask):
        """x (B,T,d) and the encoder's output (B,S,d) -> (B,T,d); `mask` (B,1,1,S) is that of the source."""
        # SOLUTION
        x = self.residual(x, self.self_attn_layer_norm, lambda x: self.self_attn(x, x, causal))
        x = self.residual(x, self.encoder_attn_layer_norm, lambda x: self.encoder_attn(x, encoded, mask))
        return self.residual(x, self.final_layer_norm, self.feed_forward)
        # EXERCISE
        # raise NotImplementedError
        # END


# %%
# SOLUTION
checks.check(DecoderLayer)
# EXERCISE
# checks.keep(DecoderLayer)
# END

# %% [markdown]
# ## Exercise: two stacks (15 minutes)
#
# A stack embeds its tokens (`embed`, then dropout, section 5.4) and passes them through its layers. The decoder makes its
# causal mask itself.


# %% tags=["part"]
class Encoder(nn.Module):
    """A stack of encoder layers on embeddings and positions: (B,S) -> (B,S,d)."""

    def __init__(self, embed_tokens, h, f, layers, dropout=0.1):
        super().__init__()
        d = embed_tokens.embedding_dim
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList([EncoderLayer(d, h, f, dropout) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids, mask):
        # SOLUTION
        x = self.dropout(embed(self.embed_tokens, ids))
        for layer in self.layers:
            x = layer(x, mask)
        return x
        # EXERCISE
        # raise NotImplementedError
        # END


class Decoder(nn.Module):
    """A stack of decoder layers on embeddings and positions: (B,T) and the encoder's output (B,S,d) -> (B,T,d)."""

    def __init__(self, embed_tokens, h, f, layers, dropout=0.1):
        super().__init__()
        d = embed_tokens.embedding_dim
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList([DecoderLayer(d, h, f, dropout) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids, encoded, mask):
        # SOLUTION
        x = self.dropout(embed(self.embed_tokens, ids))
        causal = causal_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, encoded, causal, mask)
        return x
        # EXERCISE
        # raise NotImplementedError
        # END


# %%
# SOLUTION
checks.check(Encoder, Decoder)
# EXERCISE
# checks.keep(Encoder, Decoder)
# END

# %% [markdown]
# ## Exercise: the Transformer (10 minutes)
#
# Encoder and decoder, and a last projection that turns the decoder's output into logits (B,T,V), one for each word of
# the vocabulary. The logit of a word is the inner product of the output with the embedding of that word: embeddings of
# source and target and the output projection are the same matrix (section 3.4). So the model reads and writes a word by
# the same vector, and has one matrix (V,d) instead of three. `__init__` ties the matrices, and gives all weights their
# initial values as the package does: Xavier initialization divided by $\sqrt N$ for N layers (notebook 4), and
# embeddings with variance 1/d (notebook 3).


# %% tags=["part"]
class EncoderDecoder(nn.Module):
    """Both stacks, with one embedding matrix: source ids (B,S) and target ids (B,T) -> (B,T,d)."""

    def __init__(self, V, d, h, f, layers, dropout=0.1):
        super().__init__()
        self.shared = nn.Embedding(V, d)
        self.encoder = Encoder(self.shared, h, f, layers, dropout)
        self.decoder = Decoder(self.shared, h, f, layers, dropout)

    def forward(self, source, target):
        # SOLUTION
        mask = padding_mask(source)
        return self.decoder(target, self.encoder(source, mask), mask)
        # EXERCISE
        # # Which mask do the encoder's self-attention and the decoder's attention to the source need?
        # raise NotImplementedError
        # END


class Transformer(nn.Module):
    """The whole model (Figure 1): source ids (B,S) and target ids (B,T) -> logits (B,T,V)."""

    def __init__(self, V, d, h, f, layers, dropout=0.1):
        super().__init__()
        self.model = EncoderDecoder(V, d, h, f, layers, dropout)
        self.lm_head = nn.Linear(d, V, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:  # a matrix; not a bias, nor a parameter of a norm
                nn.init.xavier_uniform_(parameter, gain=layers**-0.5)
        nn.init.normal_(self.model.shared.weight, std=d**-0.5)
        self.lm_head.weight = self.model.shared.weight

    def forward(self, source, target):
        # SOLUTION
        return self.lm_head(self.model(source, target))
        # EXERCISE
        # raise NotImplementedError
        # END


# %%
# SOLUTION
checks.check(EncoderDecoder, Transformer)
# EXERCISE
# checks.keep(EncoderDecoder, Transformer)
# END

# %% [markdown]
# That is the Transformer. With the package's weights, which load by name into your model and back, every module
# computes the same. In a new model all biases are 0 and all weights of norms are 1, and one that is forgotten would
# not be noticed; so random numbers are added first. The second sentence ends in padding.

# %%
ours = Transformer(V, **SMALL).double().eval()
with torch.no_grad():
    for parameter in package.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
ours.load_state_dict(package.state_dict(), strict=True)
package.load_state_dict(ours.state_dict(), strict=True)
source[1, -3:] = PAD
checks.compare_steps(ours, package, source, target)

# %% [markdown]
# ## Which tokens see which
#
# This can be measured without looking at any weight: change one token, and see which predictions change.
#
# The token at position t of the decoder's input must change predictions t, t + 1, ..., and no earlier one. A source
# token must change all predictions, since the encoder attends in both directions; but padding that is appended must
# change none.

# %%
with torch.no_grad():
    before = ours(source, target)

    def changed_by(side, position):
        """Which of the T predictions of each sentence depend on the token at a position: (B,T)."""
        tokens = {"source": source.clone(), "target": target.clone()}
        tokens[side][:, position] = 3 + (tokens[side][:, position] - 2) % (V - 3)  # the next id, but no special token
        return (ours(**tokens) - before).abs().amax(dim=-1) > 1e-9

    by_target = torch.stack([changed_by("target", t)[0] for t in range(T)]).int()  # (T,T)
    longer = torch.cat([source, torch.full((B, 4), PAD)], dim=1)
    by_padding = (ours(longer, target) - before).abs().max()

print("rows: the target token that was changed; columns: the predictions that change")
print(by_target.numpy())
assert torch.equal(by_target, torch.ones(T, T).triu().int()), "a prediction sees the future, or not all of the past"
assert changed_by("source", 0).all(), "a prediction does not depend on the first source token"
assert by_padding < 1e-9, "more padding changes the predictions"

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


size = sum(parameter.numel() for parameter in ours.parameters())
assert size == count(V, SMALL["d"], SMALL["f"], SMALL["layers"]), f"your model has {size:,} parameters"

with torch.device("meta"):  # shapes without values: the paper's base model needs no memory
    base = Transformer(37000, d=512, h=8, f=2048, layers=6)
assert sum(parameter.numel() for parameter in base.parameters()) == count(37000, 512, 2048, layers=6)
print(f"the paper's base model with 37,000 tokens has {count(37000, 512, 2048, 6):,} parameters")

# %% [markdown]
# ## It translates
#
# Now the package trains a small model on the sentences of the sample dataset that have at most five words. This takes
# one to three minutes. Then its weights move into your model, which becomes a translator without having been trained.
#
# To translate, the decoder starts with START and appends the likeliest next token until that is END. The next notebook
# has more on this, and trains your own model.

# %%
train, test = read_short("train"), read_short("test")
tokenizer = make_tokenizer(train)
package = train_translator(tokenizer, train, max_steps=600)

# %%
ours = Transformer(len(tokenizer), **SIZES).eval()
ours.load_state_dict(package.state_dict(), strict=True)


@torch.no_grad()
def translate(text):
    source, target = tokenizer(text, return_tensors="pt").input_ids, torch.tensor([[START]])
    while target[0, -1] != END and target.shape[1] < 30:
        target = torch.cat([target, ours(source, target)[:, -1:].argmax(dim=-1)], dim=1)
    return tokenizer.decode(target[0], skip_special_tokens=True)


texts = [pair["en"] for pair in test[:20]]
translations = [translate(text) for text in texts]
for text, translation in zip(texts[:8], translations, strict=False):
    print(f"{text} -> {translation}")
theirs = Translator(package, tokenizer)(texts, num_beams=1)
assert translations == theirs, f"with the same weights, the package translates differently: {theirs[:8]}"
right = np.mean([translation == pair["de"] for translation, pair in zip(translations, test, strict=False)])
print(f"{right:.0%} of {len(texts)} sentences that it never saw are translated exactly")
assert right > 0.4, "the package's weights translate too few sentences in your model"

# %% [markdown]
# **Questions.** 1. What would happen if each decoder layer attended to the encoder layer of its own depth? 2. Change
# `residual` to pre-norm: what else must change?

# %% [markdown] tags=["answer"]
# **Answers.**
#
# 1. It would work, and such models exist. But the lower decoder layers would read a source that the encoder has not
# finished reading. It would not be the paper's model, and `check` would object.
# 2. The sum that leaves the last layer was never normalized, so each stack needs one more norm at its top. The package
# has it as `layer_norm`, with `norm_first=True`.
