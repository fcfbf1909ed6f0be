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
# # 7. Looking inside a translator
#
# Attention weights can be inspected: for every token, they show where each head looks. This notebook takes a
# translator like that of the last one, trained by the package, and asks three questions:
#
# - **Where does it look?** Attention maps, and how often each head shows which pattern.
# - **Does it matter?** We switch off one head at a time and measure the loss.
# - **Does it know which word is which?** We read word alignments from the attention to the source and compare them
#   with the true ones, which the sample dataset has.
#
# We also compute the maps, the alignments and their error rate by hand; they equal those of
# `vanilla_transformer.inspection`.
#
# **You need** notebook 6. **Time:** 45 minutes; the training takes one to five minutes. **You will have** seen what each
# head of a translator does, and where it aligns words.
#
# Letters as before: B sentences, S source length, T target length, h heads, k head size.

# %%
# %matplotlib inline
import math
import sys
import warnings
from collections import Counter

import numpy as np
import torch
from IPython.display import display
from matplotlib import pyplot as plt
from small_translator import SIZES, encode, make_tokenizer, read_short, train_translator

from vanilla_transformer import Translator
from vanilla_transformer.data.batches import PairCollator
from vanilla_transformer.inspection.alignment import align_words, alignment_error_rate
from vanilla_transformer.inspection.attention import attention_figure, attention_maps, describe_head

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.set_num_threads(1)

# %% [markdown]
# ## A small translator
#
# As in the last notebook: the sentences of the sample dataset with at most five words, a vocabulary in which most words
# are one token, a test on sentences that are not in the training data. `small_translator.py` has the code.

# %%
train, test = read_short("train"), read_short("test")
tokenizer = make_tokenizer(train)
words = [word for pair in test for side in ("en", "de") for word in pair[side].split()]
# Of two tokens, one is the word and the other the end of the sentence.
whole_words = np.mean([len(tokenizer(word).input_ids) == 2 for word in words])
assert whole_words > 0.5
print(f"{whole_words:.0%} of the words of the test sentences are one token")
print(f"{len(train):,} training pairs, {len(test)} test pairs, such as")
for pair in test[:3]:
    print(" ", pair)

# %%
LAYERS, h = SIZES["layers"], SIZES["h"]
model = train_translator(tokenizer, train)

translations = Translator(model, tokenizer)([pair["en"] for pair in test], num_beams=1)
exact = sum(found == pair["de"] for found, pair in zip(translations, test, strict=True))
print(f"{exact} of {len(test)} unseen sentences are translated exactly, such as")
for pair, found in list(zip(test, translations, strict=True))[:8]:
    print(f"  {pair['en']} -> {found}" + ("" if found == pair["de"] else f" (reference: {pair['de']})"))
assert exact > len(test) / 2

# %% [markdown]
# ## A map of the attention
#
# `attention_maps` runs the model on a sentence and its translation and returns the weights of all heads: encoder
# (layers,h,S,S), decoder (layers,h,T,T), and decoder to source (layers,h,T,S). Row t of the last one shows where the
# decoder looks while it predicts token t. The example has a verb in two parts, "lädt ... ein", and a different word
# order.

# %% tags=["picture"]
pair = next(pair for pair in test if "lädt" in pair["de"].split() and "selten" in pair["de"].split())
maps = attention_maps(model, tokenizer, pair["en"], pair["de"])  # forced to the reference translation


print(pair["en"], "->", pair["de"])
for layer in range(LAYERS):
    display(attention_figure(maps, "cross", layer))

# %% [markdown]
# A row can be drawn as lines, too, each as wide as its weight. This is a larger model, that of `recipes/sample.yaml`,
# while it translates *Does the girl open the door?* Grey tokens are not written yet.
#
# ![attention weights as lines from a token that is predicted](../pictures/attention_arrows.svg)
#
# Whether *the* becomes *der*, *die* or *das* depends on the noun: half of the weight is on *girl*. And the verb has
# two parts again, *macht ... auf*. Before the second one is written, a head of the decoder's self-attention looks back
# at the first. (Of the heads of all layers, it is the one that puts the most weight on *macht*.)
#
# Back to our small model and its maps. Where do their numbers come from? From queries and keys, by Equation 1. Hooks
# record both in the last layer's attention to the source, and we compute the map from them.

# %%
attention = model.model.decoder.layers[-1].encoder_attn
projected = {}


def keep(name):
    def hook(_, inputs, output):
        projected[name] = output[0].unflatten(-1, (h, -1)).transpose(0, 1)

    return getattr(attention, name).register_forward_hook(hook)


hooks = [keep("q_proj"), keep("k_proj")]
attention_maps(model, tokenizer, pair["en"], pair["de"])
for hook in hooks:
    hook.remove()

queries, keys = projected["q_proj"], projected["k_proj"]  # (h,T,k), (h,S,k)
by_hand = (queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])).softmax(dim=-1)  # (h,T,S)
torch.testing.assert_close(by_hand, maps.cross[-1], rtol=0, atol=1e-6)
torch.testing.assert_close(maps.cross.sum(dim=-1), torch.ones_like(maps.cross[..., 0]))
print(f"map of {tuple(by_hand.shape)}: equal")

# %% [markdown]
# ## What heads look at
#
# One sentence proves little. `describe_head` names the pattern of a map, if it has a clear one: the token before, the
# token itself, the token after, the diagonal, or one token for all rows. We apply it to every head and every test
# sentence, and print in how many of the sentences a head shows which pattern.

# %%
all_maps = [attention_maps(model, tokenizer, pair["en"], pair["de"]) for pair in test]
KINDS = ("encoder", "decoder", "cross")
most_frequent = {}

for kind in KINDS:
    for layer in range(LAYERS):
        for head in range(h):
            patterns = Counter()
            for one in all_maps:
                text = describe_head(getattr(one, kind)[layer, head], one.axes(kind)[1], kind != "cross")
                patterns[text.rpartition(", ")[0] or "no clear pattern"] += 1  # without the weight
            shares = {pattern: count / len(test) for pattern, count in patterns.most_common(3)}
            most_frequent[kind, layer, head] = max(shares.items(), key=lambda item: item[1])
            shown = ", ".join(f"{pattern} {share:.0%}" for pattern, share in shares.items())
            print(f"{kind:7} layer {layer} head {head}: {shown}")

assert all(most_frequent["cross", LAYERS - 1, head][0] == "the diagonal" for head in range(h))
assert all(
    most_frequent["encoder", layer, head][0] == "no clear pattern" for layer in range(LAYERS) for head in range(h)
)

# %% [markdown]
# In the upper layer of the decoder, all heads that attend to the source follow the diagonal in most sentences, as both
# languages have much the same word order. One of its self-attention heads looks at the token itself. The encoder heads
# have no clear pattern in most sentences. A pattern does not prove use: a head that has nothing to contribute must put
# its weight somewhere, too.

# %% [markdown]
# ## Which heads matter
#
# A weight shows where a head looks, not whether its output is used. So we switch off each head, by setting its k
# columns of the joined heads to 0 before the output projection, and measure the loss on the test sentences, given the
# reference translation. For comparison, we also switch off all attention to the source.
#
# No head is indispensable: without any single one, the loss stays far below that of the decoder that cannot see the
# source. The most important one attends to the source, in the upper layer.


# %%
@torch.no_grad()
def loss_without(switched_off=()):
    """Nats per token with these (kind, layer, head) switched off."""
    hooks = []
    for kind, layer, head in switched_off:
        stack = model.model.encoder if kind == "encoder" else model.model.decoder
        attention = stack.layers[layer].encoder_attn if kind == "cross" else stack.layers[layer].self_attn

        def switch_off(_, inputs, start=head * attention.head_dim, end=(head + 1) * attention.head_dim):
            heads = inputs[0].clone()  # (B,T,d)
            heads[..., start:end] = 0
            return (heads,)

        hooks.append(attention.out_proj.register_forward_pre_hook(switch_off))
    loss = model(**PairCollator(tokenizer)(encode(tokenizer, test))).loss.item()
    for hook in hooks:
        hook.remove()
    return loss


whole = loss_without()
rows = [(kind, layer) for kind in KINDS for layer in range(LAYERS)]
added = np.array([[loss_without([(*row, head)]) - whole for head in range(h)] for row in rows])  # (rows,h)
blind = loss_without([("cross", layer, head) for layer in range(LAYERS) for head in range(h)])
assert loss_without() == whole  # the hooks are gone

figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
image = axis.imshow(added, cmap="magma")
axis.set_xticks(range(h), [f"head {head}" for head in range(h)])
axis.set_yticks(range(len(rows)), [f"{kind}, layer {layer}" for kind, layer in rows])
figure.colorbar(image, label="added loss (nats per token)")
plt.show()

print(f"loss {whole:.2f}; without attention to the source {blind:.2f}")
for row, of_heads in zip(rows, added, strict=True):
    print(f"{row[0]:7} layer {row[1]}   " + "   ".join(f"{more:+.2f}" for more in of_heads))
assert blind > whole + 1
assert added.argmax() // h == len(rows) - 1  # the most important head attends to the source, in the upper layer
assert added.max() < (blind - whole) / 4

# %% [markdown]
# ## Word alignments
#
# Which English word does a German word translate? The model was never told. But to predict a word it must look at the
# word it translates. So we average the heads of a layer, sum the weights over the tokens of each source word, average
# over the tokens of each target word, and align each target word with the source word of the largest weight.

# %%
words = {side: pair[side].split() for side in ("en", "de")}
for layer in range(LAYERS):
    links = align_words(maps, layer)
    print(f"layer {layer}:", ", ".join(f"{words['de'][j]} = {words['en'][i]}" for i, j in links))


def align_by_hand(maps, layer):
    mean = maps.cross[layer].mean(dim=0).tolist()  # (T,S)
    links = []
    for word in sorted({token.word for token in maps.target} - {None}):
        weight = Counter()
        for token, row in zip(maps.target, mean, strict=True):
            if token.word == word:
                for source, share in zip(maps.source, row, strict=True):
                    if source.word is not None:
                        weight[source.word] += share
        links.append((max(weight, key=weight.get), word))
    return links


# %% [markdown]
# The alignment error rate compares the predicted links P with the true links A: $1 - 2 |A \cap P| / (|A| + |P|)$, that
# is, 1 minus the F1 score. Two other rates put it into perspective. Linking word j to word j needs no knowledge of the
# words. And since we predict exactly one link for each German word, where the truth may have several or none, 0 cannot
# be reached: the best possible prediction is a true link for each word that has one.
#
# The upper layer aligns better than the lower one.

# %%
true = [{tuple(map(int, link.split("-"))) for link in pair["alignment"].split()} for pair in test]
diagonal, possible = [], []
for pair, links in zip(test, true, strict=True):
    last = len(pair["en"].split()) - 1
    diagonal.append({(min(j, last), j) for j in range(len(pair["de"].split()))})
    possible.append(set({j: (i, j) for i, j in links}.values()))
rates = {"word j = word j": alignment_error_rate(diagonal, true)}

for layer in range(LAYERS):
    found = [set(align_words(one, layer)) for one in all_maps]
    assert found == [set(align_by_hand(one, layer)) for one in all_maps]
    rates[f"attention, layer {layer}"] = alignment_error_rate(found, true)
rates["best possible, one link per word"] = alignment_error_rate(possible, true)

links_found, links_true = ({(n, *link) for n, links in enumerate(of) for link in links} for of in (found, true))
share_found, share_right = (len(links_found & links_true) / len(of) for of in (links_true, links_found))
harmonic_mean = 2 / (1 / share_found + 1 / share_right)  # of recall and precision
np.testing.assert_allclose(alignment_error_rate(found, true), 1 - harmonic_mean)
for name, rate in rates.items():
    print(f"{name:33} {rate:.3f}")

assert rates["best possible, one link per word"] < rates[f"attention, layer {LAYERS - 1}"] < rates["word j = word j"]
assert rates["attention, layer 1"] < rates["attention, layer 0"]

# %% [markdown]
# All alignments computed by hand equal those of `align_words`.
#
# Attention maps and alignments of any trained model, here that of `recipes/sample.yaml`, without writing code:
#
#     vanilla-transformer inspect explorer --model outputs/sample --text "The dog sleeps." --output map.html
