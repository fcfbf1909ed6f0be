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
# Attention weights can be looked at: they say, for every token, where each head looks. This notebook trains a small
# translator and then asks it three questions:
#
# - **Where does it look?** Maps of the attention, and a statistic of what each head looks at.
# - **Does it matter?** We silence one head after the other, and measure what is lost.
# - **Does it know which word is which?** From the attention to the source we read off word alignments, and hold them
#   against the true ones, which the sample dataset has.
#
# The maps, the alignments and their error rate are worked out by hand too, and equal what
# `vanilla_transformer.inspection.attention` says.
#
# Letters as before: B sentences, S source length, T target length, h heads, k width of a head.

# %%
import json
import math
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt

from vanilla_transformer import Translator, VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.batches import PairCollator, TokenBatchSampler
from vanilla_transformer.data.tokenizer import special_token_ids, train_tokenizer
from vanilla_transformer.inspection.attention import align_words, alignment_error_rate, attention_maps, looks_at
from vanilla_transformer.training.arguments import TrainingOptions
from vanilla_transformer.training.optimization import learning_rate_schedule, make_optimizer

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.manual_seed(0)
torch.set_num_threads(1)

here = Path(__file__).parent if "__file__" in globals() else Path.cwd()  # a notebook runs in its own folder
DATA = here.resolve().parents[1] / "sample_dataset"

# %% [markdown]
# ## A small translator
#
# To learn quickly, we take only sentences of at most five words from the sample dataset, and a vocabulary in which
# most words are one token. What is tested are sentences of the test split, which are not in the training data.


# %%
def read_short(split):
    with open(DATA / f"{split}.jsonl", encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]
    return [pair for pair in pairs if len(pair["en"].split()) <= 5]


train, test = read_short("train"), read_short("test")
tokenizer = train_tokenizer([text for pair in train for text in (pair["en"], pair["de"])], vocab_size=1500)


def encode(pairs):
    return [{"input_ids": tokenizer(p["en"]).input_ids, "labels": tokenizer(p["de"]).input_ids} for p in pairs]


words = [word for pair in test for side in ("en", "de") for word in pair[side].split()]
whole_words = np.mean([len(tokenizer(word).input_ids) == 2 for word in words])  # the word and the end of the sentence
assert whole_words > 0.5
print(f"{whole_words:.0%} of the words of the test sentences are one token")
print(f"{len(train):,} pairs to learn, {len(test)} to test, such as")
for pair in test[:3]:
    print(" ", pair)

# %%
LAYERS, h = 2, 4
config = VanillaTransformerConfig(
    vocab_size=len(tokenizer),
    d_model=64,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    encoder_attention_heads=h,
    decoder_attention_heads=h,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    dropout=0.05,
    **special_token_ids(tokenizer),
)
model = VanillaTransformerForConditionalGeneration(config)

# %%
max_steps, collate, examples = 1000, PairCollator(tokenizer), encode(train)
lengths = [np.array([len(example[side]) for example in examples]) for side in ("input_ids", "labels")]
batches = iter(TokenBatchSampler(*lengths, max_tokens=512, seed=0))  # without end
schedule = learning_rate_schedule("cosine", 5e-3, warmup_steps=100, max_steps=max_steps)
optimizer = make_optimizer(model, TrainingOptions())  # the paper's Adam (section 5.3)

model.train()
for step in range(1, max_steps + 1):
    numbers = next(batches)
    loss = model(**collate([examples[number] for number in numbers]), label_smoothing=0.1).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = schedule(step)
    optimizer.step()
    optimizer.zero_grad()
    if step % 200 == 0:
        print(f"step {step:5}   loss {loss.item():.2f}")
model.eval()

translations = Translator(model, tokenizer)([pair["en"] for pair in test], num_beams=1)
exact = sum(found == pair["de"] for found, pair in zip(translations, test, strict=True))
print(f"{exact} of {len(test)} unseen sentences are translated exactly, such as")
for pair, found in list(zip(test, translations, strict=True))[:8]:
    print(f"  {pair['en']} -> {found}" + ("" if found == pair["de"] else f" (right: {pair['de']})"))
assert exact > len(test) / 2

# %% [markdown]
# ## A map of the attention
#
# `attention_maps` runs the model over a sentence and its translation, and hands out the weights of all heads: of the
# encoder (layers,h,S,S), of the decoder (layers,h,T,T), and of the decoder to the source (layers,h,T,S). Row t of the
# last is where the decoder looks while it writes token t. The example has a verb in two parts, "lädt ... ein", and
# words in another order.

# %%
pair = next(pair for pair in test if "lädt" in pair["de"].split() and "selten" in pair["de"].split())
maps = attention_maps(model, tokenizer, pair["en"], pair["de"])  # made to write the right translation


def draw(maps, kind, layer):
    rows, columns = maps.axes(kind)
    figure, axes = plt.subplots(1, h, figsize=(13, 3.6), layout="constrained")
    for head, axis in enumerate(axes):
        weights = getattr(maps, kind)[layer, head]
        image = axis.imshow(weights, vmin=0, vmax=1)
        axis.set_xticks(range(len(columns)), [token.text for token in columns], rotation=90)
        axis.set_yticks(range(len(rows)), [token.text for token in rows])
        axis.set_title(f"head {head}: {looks_at(weights, columns, kind != 'cross')}", fontsize=9)
    figure.colorbar(image, ax=axes, label="attention weight")
    figure.suptitle(f"{kind}, layer {layer}")
    plt.show()


print(pair["en"], "->", pair["de"])
for layer in range(LAYERS):
    draw(maps, "cross", layer)

# %% [markdown]
# Where do these numbers come from? From queries and keys, by Equation 1. Hooks take both out of the last layer, and
# from them we work out the map ourselves.

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

q, k = projected["q_proj"], projected["k_proj"]  # (h,T,k), (h,S,k)
by_hand = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)  # (h,T,S)
torch.testing.assert_close(by_hand, maps.cross[-1], rtol=0, atol=1e-6)
torch.testing.assert_close(maps.cross.sum(dim=-1), torch.ones_like(maps.cross[..., 0]))
print(f"map of {tuple(by_hand.shape)}: equal")

# %% [markdown]
# ## What heads look at
#
# One sentence proves little. `looks_at` says in words where a head puts the most weight: on the token before, the
# token itself, the one after, or on some token wherever it stands. We ask it for every head and every test sentence.
# The percentages are the shares of the sentences.
#
# Some heads have a habit that is the same in nearly every sentence, such as the end of the sentence, or the token
# itself; others look here and there. A habit is no proof of use: a head that has nothing to say must put its weight
# somewhere.

# %%
all_maps = [attention_maps(model, tokenizer, pair["en"], pair["de"]) for pair in test]
KINDS = ("encoder", "decoder", "cross")

for kind in KINDS:
    for layer in range(LAYERS):
        for head in range(h):
            said = Counter()
            for one in all_maps:
                phrase = looks_at(getattr(one, kind)[layer, head], one.axes(kind)[1], kind != "cross")
                said[phrase.rpartition(" ")[0]] += 1  # without the percentage
            most = ", ".join(f"{what} {count / len(test):.0%}" for what, count in said.most_common(3))
            print(f"{kind:7} layer {layer} head {head}: {most}")

# %% [markdown]
# ## What heads are good for
#
# A weight says where a head looks, not whether anyone listens. So we silence each head, by making its k columns of the
# joined heads 0 before the output projection, and look at the loss on the test sentences, with the true translation
# given. Beside it stands the loss of a decoder that cannot see the source at all.
#
# No head is indispensable: without any one of them, the loss stays far below that of the blind decoder. The one that
# is missed most looks at the source, in the upper layer.


# %%
@torch.no_grad()
def loss_without(silenced=()):
    """Nats per token when these (kind, layer, head) are silent."""
    hooks = []
    for kind, layer, head in silenced:
        stack = model.model.encoder if kind == "encoder" else model.model.decoder
        attention = stack.layers[layer].encoder_attn if kind == "cross" else stack.layers[layer].self_attn

        def silence(_, inputs, start=head * attention.head_dim, end=(head + 1) * attention.head_dim):
            heads = inputs[0].clone()  # (B,T,d)
            heads[..., start:end] = 0
            return (heads,)

        hooks.append(attention.out_proj.register_forward_pre_hook(silence))
    loss = model(**collate(encode(test))).loss.item()
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

print(f"loss {whole:.2f}; without any look at the source {blind:.2f}")
for row, of_heads in zip(rows, added, strict=True):
    print(f"{row[0]:7} layer {row[1]}   " + "   ".join(f"{more:+.2f}" for more in of_heads))
assert blind > whole + 1
assert added.argmax() // h == len(rows) - 1  # the head that is missed most looks at the source, in the upper layer
assert added.max() < (blind - whole) / 4

# %% [markdown]
# ## Word alignments
#
# Which English word stands behind a German one? The model was never told. But to write a word it must look at what it
# translates. So take the mean of the heads of a layer, add up the weights over the tokens of each source word, average
# over the tokens of each target word, and align the target word with the source word of the most weight.

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
# The alignment error rate compares them with the true links A: with F found, it is $1 - 2 |A \cap F| / (|A| + |F|)$,
# that is 1 less the harmonic mean of the share of A that is found and the share of F that is true. Two measures beside
# it tell what a number means. To link word j with word j is to know nothing of the words. And as we find one link for
# each German word where the truth may have several, 0 is out of reach: the best is to find a true one each time.
#
# The upper layer knows better than the lower one which word is which.

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
rates["the best with one link a word"] = alignment_error_rate(possible, true)

links_found, links_true = ({(n, *link) for n, links in enumerate(of) for link in links} for of in (found, true))
share_found, share_right = (len(links_found & links_true) / len(of) for of in (links_true, links_found))
harmonic_mean = 2 / (1 / share_found + 1 / share_right)  # of recall and precision
np.testing.assert_allclose(alignment_error_rate(found, true), 1 - harmonic_mean)
for name, rate in rates.items():
    print(f"{name:30} {rate:.3f}")

assert rates["the best with one link a word"] < rates[f"attention, layer {LAYERS - 1}"] < rates["word j = word j"]
assert rates["attention, layer 1"] < rates["attention, layer 0"]

# %% [markdown]
# All alignments by hand equal those of `align_words`, and the error rate is what its formula says.
#
# **To try:** a trained directory can be looked into without writing code:
#
#     python -m vanilla_transformer.inspection.attention attention --model outputs/sample \
#         --text "The dog sleeps." --output map.html
#
# Which head aligns best by itself? Does row t of the lower layer fit the word that is written, or the one that has
# just been read?
