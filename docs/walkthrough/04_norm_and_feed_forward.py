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
# # 4. Layer norm, feed-forward and the residual
#
# Attention moves information between words. The rest of a layer works on each word separately: a feed-forward network
# changes it, a residual connection keeps what was there, and layer norm keeps the numbers on one scale. Each is
# simple. Their order decides how well a gradient passes through many layers, which we measure at 2 to 24 layers.
#
# Sections 3.1 (residual and norm), 3.3 (feed-forward, Equation 2) and 5.4 (dropout).
#
# **You need** the idea of a standard deviation and of a neural network with one hidden layer; nothing of the earlier
# notebooks but, for the part *At depth*, multi-head attention (notebook 2). **Time:** 75 minutes, 35 of them for the
# exercises. **You will have** all of a layer but its attention.
#
# Letters: B sentences, T target length, S source length, d model width, f inner width of the feed-forward network.

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
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerEncoderLayer

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.set_num_threads(1)
_ = torch.manual_seed(0)

# %% [markdown]
# ## Exercise: layer norm (15 minutes)
#
# Subtract the mean of each word's d features and divide by their standard deviation; then scale and shift each feature
# by learned parameters:
#
# $$\frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \odot weight + bias$$
#
# The variance is the mean square of the centered features (divide by d, not by d - 1). $\epsilon$ prevents a division
# by zero when all features are equal. Mean and variance are those of one word, so other words, other sentences and
# padding do not matter, and training and inference compute the same.


# %% tags=["part"]
class LayerNorm(nn.Module):
    """Layer normalization: (...,d) -> (...,d), each vector by itself."""

    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d))
        self.eps = eps

    def forward(self, x):
        # SOLUTION
        variance = x.var(dim=-1, correction=0, keepdim=True)
        return (x - x.mean(dim=-1, keepdim=True)) / (variance + self.eps).sqrt() * self.weight + self.bias
        # EXERCISE
        # # x.mean and x.var take dim and keepdim; correction=0 divides by d. Do not call nn.LayerNorm: it would
        # # be the whole answer.
        # raise NotImplementedError
        # END


# %%
# SOLUTION
checks.check(LayerNorm)
# EXERCISE
# checks.keep(LayerNorm)
# END

# %% [markdown]
# Multiplying the input by a positive number, or adding a number to all its features, does not change the output (but
# for ε, which the next cell sets to 0). So after a norm, the length of a word's vector carries no information, only
# its direction. This will matter at depth.

# %%
B, S, d, f = 3, 5, 32, 128
norm = LayerNorm(d, eps=0).double()
nn.init.normal_(norm.weight)
nn.init.normal_(norm.bias)
x = torch.randn(B, S, d, dtype=torch.float64, requires_grad=True)
torch.testing.assert_close(norm(2 * x + 3), norm(x))

# %% [markdown]
# The gradient by hand. These are two directions in which x can change without a change of the output: along the
# centered x, and along (1, ..., 1). So the gradient of x has no component along either: take the gradient of the
# output times the weight, and subtract its components along both. The rest is divided by the standard deviation of x,
# so a larger x gets a smaller gradient.

# %%
grad_output = torch.randn(B, S, d, dtype=torch.float64)
norm(x).backward(grad_output)

deviation = x.detach().std(dim=-1, correction=0, keepdim=True)
normed = (x.detach() - x.detach().mean(dim=-1, keepdim=True)) / deviation
grad = grad_output * norm.weight.detach()
shift = grad.mean(dim=-1, keepdim=True)
scale = normed * (grad * normed).mean(dim=-1, keepdim=True)
torch.testing.assert_close(x.grad, (grad - shift - scale) / deviation)

# %% [markdown]
# ## The feed-forward network
#
# From d features to f, through an activation, and back to d, the same for every word (section 3.3, Equation 2):
#
# $$\mathrm{FFN}(x) = \max(0,\, x W_1 + b_1)\, W_2 + b_2$$
#
# Without the activation, the two products would collapse into one. The paper's activation is ReLU, max(0, x). Many
# later models, such as BERT, use GELU, $x\,\Phi(x)$ with $\Phi$ the distribution function of the normal distribution,
# which is smooth at 0; in the package it is `activation_function="gelu"`.

# %%
points = torch.linspace(-3, 3, 121)
figure, axis = plt.subplots(figsize=(4.2, 2.8), layout="constrained")
axis.plot(points, points.relu(), label="ReLU")
axis.plot(points, nn.functional.gelu(points), label="GELU")
axis.set(xlabel="input", ylabel="output", title="activations")
axis.grid(alpha=0.3)
axis.legend()
plt.show()

# %% [markdown]
# ## The residual, in two orders
#
# A sublayer, attention or feed-forward, does not compute the new vector of a word, but what is *added* to it.
#
# - **post-norm**, the paper: `norm(x + sublayer(x))`. The sum is normalized, so the words that leave a layer have
#   the same size after every layer.
# - **pre-norm**, most models of today: `x + sublayer(norm(x))`. x is only ever added to, so there is a direct path from
#   the last layer down to the embeddings. One more norm at the end of the stack normalizes the sum.
#
# ![An encoder layer in both orders: in post-norm the norms are on the way up, in pre-norm on the branches](../pictures/norms.svg)
#
# In training, the output of a sublayer first goes through dropout (section 5.4): each number is set to 0 with
# probability 0.1 and otherwise divided by 0.9, so that the network cannot rely on any single one. Outside training
# dropout does nothing. `model.train()` and `model.eval()` tell `nn.Dropout` which it is.
#
# ## Exercise: what layers share (20 minutes)
#
# Encoder and decoder layers are alike in two methods: the feed-forward network, and the residual around each sublayer.
# Write both methods, with post-norm. `residual` does the dropout; `feed_forward` has none.


# %% tags=["part"]
class Layer(nn.Module):
    """What encoder and decoder layers share: the feed-forward network and the residual around each sublayer."""

    def __init__(self, d, f, dropout=0.1):
        super().__init__()
        self.fc1 = nn.Linear(d, f)
        self.fc2 = nn.Linear(f, d)
        self.final_layer_norm = LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def feed_forward(self, x):
        """Equation 2: (B,T,d) -> (B,T,d)."""
        # SOLUTION
        return self.fc2(self.fc1(x).relu())
        # EXERCISE
        # raise NotImplementedError
        # END

    def residual(self, x, norm, sublayer):
        """`norm(x + dropout(sublayer(x)))`, where `sublayer` is a function: (B,T,d) -> (B,T,d)."""
        # SOLUTION
        return norm(x + self.dropout(sublayer(x)))
        # EXERCISE
        # raise NotImplementedError
        # END


# %%
# SOLUTION
checks.check(Layer)
# EXERCISE
# checks.keep(Layer)
# END

# %% [markdown]
# The package has both orders, and decides by `norm_first`. With the same weights, its post-norm is yours, and its
# pre-norm is one line:

# %%
layer = Layer(d, f).double().eval()
for norm_first in [False, True]:
    sizes = {"d_model": d, "encoder_ffn_dim": f, "encoder_attention_heads": 4}
    theirs = VanillaTransformerEncoderLayer(VanillaTransformerConfig(**sizes, norm_first=norm_first), layer_idx=0)
    theirs = theirs.double().eval()
    theirs.load_state_dict(layer.state_dict(), strict=False)  # attention is missing
    if norm_first:
        ours = x + layer.feed_forward(layer.final_layer_norm(x))
    else:
        ours = layer.residual(x, layer.final_layer_norm, layer.feed_forward)
    torch.testing.assert_close(theirs.residual(x, theirs.final_layer_norm, theirs.feed_forward), ours)
    print(f"the residual is equal with {'pre' if norm_first else 'post'}-norm")

# %% [markdown]
# ## At depth
#
# This part is for reading, and for those who train deep models. We take whole models of the package before their first
# step, with 2 to 24 layers in the encoder and as many in the decoder. Source and target are random tokens. The paper does
# not say how to draw the first weights. Here they are Xavier's, which keep the variance: a matrix's output has about that of
# its input. In a stack of N layers the package divides them by $\sqrt N$, for a reason that *A remedy* below gives; so the
# next cell multiplies them by $\sqrt N$ first. We measure for each layer
#
# - the size of the words it outputs: the root mean square of their features;
# - the norm of the gradient with respect to all its parameters.

# %%
DEPTHS = [2, 4, 6, 12, 24]
generator = torch.Generator().manual_seed(0)
tokens, labels = torch.randint(3, 100, (2, 8, 16), generator=generator)  # (B,S) and (B,T)


def measure(depth, norm_first, zeroed=None, seed=0, width=64, gain=1.0):
    """For each layer of both stacks: the size of its output, and the norms of the gradients of output and parameters.

    All matrices are Xavier's times `gain`, but for the projection `zeroed` of the decoder layers, which is 0.
    """
    torch.manual_seed(seed)
    sizes = {"vocab_size": 100, "d_model": width, "encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width}
    sizes["dropout"] = 0.0
    layers = {"encoder_layers": depth, "decoder_layers": depth, "norm_first": norm_first}
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes, **layers)).train()
    stacks = {"encoder": model.model.encoder.layers, "decoder": model.model.decoder.layers}
    outputs = {name: [] for name in stacks}
    for name, stack in stacks.items():
        for layer in stack:
            layer.register_forward_hook(lambda _, inputs, output, kept=outputs[name]: kept.append(output))
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    module.weight.data *= gain * math.sqrt(depth)  # Xavier's again
            if zeroed and name == "decoder":
                nn.init.zeros_(layer.get_submodule(zeroed).weight)

    loss = model(tokens, labels=labels).loss
    for output in outputs["encoder"] + outputs["decoder"]:
        output.retain_grad()
    loss.backward()
    return {
        name: {
            "size": [output.square().mean().sqrt().item() for output in outputs[name]],
            "by output": [output.grad.norm().item() for output in outputs[name]],
            "by parameters": [
                math.sqrt(sum(parameter.grad.square().sum().item() for parameter in layer.parameters()))
                for layer in stack
            ],
        }
        for name, stack in stacks.items()
    }


orders = {"post-norm": False, "pre-norm": True}
found = {(name, depth): measure(depth, norm_first) for name, norm_first in orders.items() for depth in DEPTHS}

for (name, depth), stacks in found.items():
    grads = {stack: stacks[stack]["by parameters"] for stack in stacks}
    print(f"{name:9} {depth:2} layers, gradient of the lowest and of the highest layer:", end=" ")
    print(", ".join(f"{stack} {grad[0]:.4f} and {grad[-1]:.4f}" for stack, grad in grads.items()))

# %%
DEEPEST = DEPTHS[-1]
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
numbers = range(1, DEEPEST + 1)
for color, name in enumerate(orders):
    deepest = found[name, DEEPEST]
    axes[0].plot(numbers, deepest["decoder"]["size"], color=f"C{color}", label=name)
    for stack, style in [("encoder", "--"), ("decoder", "-")]:
        axes[1].plot(numbers, deepest[stack]["by parameters"], style, color=f"C{color}", label=f"{name}, {stack}")
    lowest = [found[name, depth]["decoder"]["by parameters"][0] for depth in DEPTHS]
    axes[2].plot(DEPTHS, lowest, "o-", color=f"C{color}", label=name)
axes[0].set(title=f"size of words, decoder of {DEEPEST} layers", xlabel="layer", ylabel="root mean square of features")
axes[0].set_ylim(bottom=0)
axes[1].set(title=f"gradient in {DEEPEST} layers", xlabel="layer")
axes[2].set(title="gradient of the lowest decoder layer", xlabel="layers of the decoder")
for axis in axes[1:]:
    axis.set(ylabel="norm of the gradient", yscale="log")
for axis in axes:
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# **Pre-norm**: each layer adds to the words, so they grow. A norm divides by their size, so the highest layers get a
# smaller gradient than the lowest, but of the same order of magnitude.
#
# **Post-norm**: all words have size 1. The gradients of the encoder keep their order of magnitude. Those of the
# decoder shrink towards the bottom by about the same factor at each layer, so in a deep decoder they nearly vanish.
#
# Where does the factor come from? If the output of a sublayer is as large as its input, their sum has twice the
# variance, and the norm divides it by $\sqrt 2$, so the gradient on the residual path is multiplied by $1/\sqrt 2$.
# Self-attention and the feed-forward network make up for it: on their own path they return as much again, $1/\sqrt 2$,
# and since the squares of the two add up to 1, the norm of the gradient stays the same. But attention to the source
# sends its gradient to the encoder, and only a small part returns to the decoder, through the queries. So for this
# sublayer only the residual path is left, hence one factor of $1/\sqrt 2 = 0.707$ for each decoder layer.
#
# Two more predictions follow. Without the queries (`q_proj` set to 0) the factor stays the same. Without the whole
# sublayer (`out_proj` set to 0) the sum is x alone, which has variance 1 already, so the factor is 1. Measured in five
# models that differ in their random weights:


# %%
def factor(zeroed, seed, width=64, gain=1.0):
    """By how much the gradient shrinks at each decoder layer, on its way down."""
    by_output = measure(DEEPEST, False, zeroed=zeroed, seed=seed, width=width, gain=gain)["decoder"]["by output"]
    return (by_output[0] / by_output[-1]) ** (1 / (DEEPEST - 1))


factors = {}
for zeroed, width in [(None, 64), ("encoder_attn.q_proj", 64), ("encoder_attn.out_proj", 64), (None, 256)]:
    factors[zeroed, width] = [factor(zeroed, seed, width) for seed in range(5)]
    label = f"d = {width}, {zeroed or 'nothing'} set to 0"
    print(
        f"{label:40}",
        *(f"{one:.3f}" for one in factors[zeroed, width]),
        f"  mean {np.mean(factors[zeroed, width]):.3f}",
    )
print(f"1 / sqrt(2) is {2**-0.5:.3f}")

# %% [markdown]
# The prediction holds on average, not for each model: with d = 64, single models are off by up to 0.06. It assumes that
# a sublayer's output is exactly as large as its input and independent of it, which random weights only approximate.
# With d = 256 the approximation is better, and all five models are close to 0.707.

# %%
assert abs(np.mean(factors[None, 64]) - 2**-0.5) < 0.03
assert max(abs(one - 2**-0.5) for one in factors[None, 64]) < 0.08
assert max(abs(one - 2**-0.5) for one in factors[None, 256]) < 0.03
np.testing.assert_allclose(factors["encoder_attn.q_proj", 64], factors[None, 64], atol=0.01)
np.testing.assert_allclose(factors["encoder_attn.out_proj", 64], 1, atol=0.05)

# %% [markdown]
# The other claims of this section, as assertions:

# %%
post, pre = found["post-norm", DEEPEST], found["pre-norm", DEEPEST]
np.testing.assert_allclose(post["decoder"]["size"] + post["encoder"]["size"], 1, atol=1e-3)
assert pre["decoder"]["size"][-1] > 2 * pre["decoder"]["size"][0]
assert post["decoder"]["by parameters"][0] < 0.01 * post["decoder"]["by parameters"][-1]
assert min(post["encoder"]["by parameters"]) > 0.2 * max(post["encoder"]["by parameters"])
for stack in pre.values():
    assert stack["by parameters"][0] > stack["by parameters"][-1] > 0.2 * stack["by parameters"][0]

# %% [markdown]
# ## A remedy
#
# The argument also says what to do: let the sublayers add little at first. That is why the package divides the
# matrices of a stack of N layers by $\sqrt N$. What attention or the feed-forward network adds has then gone through
# two divided matrices, and is about N times smaller than x. So the sum has nearly the variance of x, the norm divides
# it by nearly 1, and the gradient reaches the lowest layer.

# %%
divided = [factor(None, seed, gain=DEEPEST**-0.5) for seed in range(5)]
print(f"Xavier's matrices divided by sqrt({DEEPEST}):", *(f"{one:.3f}" for one in divided))
assert min(divided) > 0.95 and max(divided) < 1.05

# %% [markdown]
# All this is the first step and does not predict training: Adam divides each gradient by its own size, and the paper's
# six layers of post-norm train well. But the log of this project (docs/LOG.md) has measured that with four layers a side
# the divided matrices learn much faster. Xiong et al. (2020, arXiv 2002.04745) derive the gradients of both orders; Liu
# et al. (2020, arXiv 2004.08249) find, as we did, that those of post-norm vanish only in the decoder. Pre-norm is
# `norm_first=True` here.
#
# **Question.** What does the same argument predict if `self_attn.out_proj` or `fc2` is set to 0 instead?

# %% [markdown] tags=["answer"]
# **Answer.** They multiply the gradient on the residual path by $1/\sqrt 2$ too, but return as much on their own path.
# If one of them is 0, its norm divides by 1, and the whole gradient stays on the residual path. The layer's factor is
# still about 0.7, that of cross-attention.

# %% tags=["answer"]
for zeroed in ["self_attn.out_proj", "fc2"]:
    mean = np.mean([factor(zeroed, seed, width=256) for seed in range(5)])
    print(f"d = 256, {zeroed} set to 0: mean {mean:.3f}")
    assert abs(mean - 2**-0.5) < 0.05
