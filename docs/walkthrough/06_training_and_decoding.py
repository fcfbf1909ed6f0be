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
# # 6. Training and decoding
#
# Your model maps source and target ids to logits. Two questions remain: how it is trained, and how it translates when
# there is no target to read.
#
# - **Training** predicts the next token at every position at once (teacher forcing), gives a little probability to all
#   other tokens (label smoothing, section 5.4) and starts with small steps (warmup, section 5.3).
# - **Decoding** generates one token after the other. Greedy search takes the most likely token each time; beam search
#   keeps several hypotheses (section 6.1).
#
# Your model first learns five English-German pairs by heart. Then it is trained on 2,789 pairs and translates sentences
# that it has never seen. At the end its weights become a model of the package, which gives the same translations.
#
# **You need** notebook 5, and what a cross-entropy and Adam are. **Time:** 100 minutes, 50 of them for the exercises;
# the training takes one to three minutes, depending on the machine. **You will have** a trained translator, all of it
# yours, as a Hugging Face model.
#
# Letters: B sentences, S source length, T target length, d model width, V vocabulary size, N non-padding target tokens.

# %%
import copy
import itertools
import json
import math
import sys
import tempfile
import warnings

import checks
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from small_translator import DATA, SIZES, encode, make_batches, make_tokenizer, read_short
from torch import nn
from transformers import AutoModelForSeq2SeqLM
from transformers.utils import logging

from vanilla_transformer import Translator, VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.batches import PairCollator
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.inspection.attention import readable_tokens
from vanilla_transformer.training.optimization import learning_rate_schedule, paper_learning_rate

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.manual_seed(0)
torch.set_num_threads(1)
logging.disable_progress_bar()  # a model this small is saved and loaded at once

Transformer = checks.part("Transformer")  # of notebook 5: yours if you have kept it, else the solution
PAD, START, END = 0, 1, 2

# %% [markdown]
# ## Five pairs
#
# A tokenizer cuts text into tokens, frequent words and pieces of rare ones, and numbers them. The numbers 0, 1 and 2 are
# padding, start and end.

# %%
with open(DATA / "train.jsonl", encoding="utf-8") as lines:
    rows = [json.loads(line) for line in itertools.islice(lines, 5)]
pairs = [(row["en"], row["de"]) for row in rows]
tokenizer = train_tokenizer([text for pair in pairs for text in pair], vocab_size=400)
assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD, START, END)
batch = PairCollator(tokenizer)(encode(tokenizer, rows))  # all five pairs, padded
source, labels = batch["input_ids"], batch["labels"]  # (B,S), (B,T)

V = len(tokenizer)
model = Transformer(V, d=64, h=4, f=128, layers=1).eval()

for en, de in pairs:
    print(f"{en} -> {de}")
print(f"V is {V}; the batch has {tuple(labels.shape)} labels")

# %% [markdown]
# ## Exercise: teacher forcing (5 minutes)
#
# At position t the decoder has read the tokens before t and predicts token t. So its input is the target shifted right
# by one, with START in front, and without its last token, after which nothing is predicted. Even where it would have
# predicted something else, it reads the correct token: a wrong prediction does not affect later ones.
#
# Labels are -100 at padding, where nothing is predicted. -100 is no token id, so in the input it becomes PAD.


# %% tags=["part"]
def shift_right(labels):
    """The decoder's input (B,T) for predicting `labels` (B,T): START, then all labels but the last, PAD for -100.

    Leaves `labels` as they are.
    """
    # SOLUTION
    start = torch.full_like(labels[:, :1], START)
    shifted = torch.cat([start, labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == -100, PAD)
    # EXERCISE
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(shift_right)
# EXERCISE
# checks.keep(shift_right)
# END

# %%
read = shift_right(labels)
for name, ids in [("reads", read[0]), ("writes", labels[0][labels[0] != -100])]:
    print(f"the decoder {name:6}", " ".join(token.text for token in readable_tokens(tokenizer, ids.tolist())))

# %% [markdown]
# One pass makes all T predictions of a sentence. Thanks to the causal mask they equal those of T passes over longer and
# longer prefixes.

# %%
with torch.no_grad():
    at_once = model(source, read)  # (B,T,V)
    one_by_one = [model(source, read[:, : t + 1])[:, -1] for t in range(read.shape[1])]
torch.testing.assert_close(at_once, torch.stack(one_by_one, dim=1), rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## Label smoothing
#
# Without smoothing, the target is a distribution with probability 1 for the correct token and 0 for all others. To
# approach it, a model must push the correct logit ever higher. Smoothing spreads a share $\varepsilon$, 0.1 in the
# paper, evenly over all V tokens:
#
# $$q_i = (1 - \varepsilon) [i = y] + \varepsilon / V$$
#
# where y is the correct token, and $[i = y]$ is 1 for that token and 0 for others.
#
# The loss is the cross-entropy $-\sum_i q_i \ln p_i$. With $p$ the softmax of logits $z$ it has a closed form
# without probabilities, from the logits, their mean and the logarithm of the softmax's denominator:
#
# $$\ln \sum_i e^{z_i} - (1 - \varepsilon)\, z_y - \varepsilon\, \bar z$$
#
# (The sum of all $q_i$ is 1, and $\ln p_i = z_i - \ln \sum_j e^{z_j}$.)
#
# A cross-entropy is at least the entropy of its target, reached at $p = q$. So the lowest smoothed loss is not 0, and
# the best probability for the correct token is $1 - \varepsilon + \varepsilon / V$, while the other tokens share the rest
# evenly. The plot shows both.


# %%
def smoothed_target(y, epsilon):
    q = np.full(V, epsilon / V)
    q[y] += 1 - epsilon
    return q


def entropy(q):
    return -(q[q > 0] * np.log(q[q > 0])).sum()


share = np.linspace(0.3, 0.9999, 7000)  # the probability of the correct token
best = {}
plt.figure(figsize=(6, 3.6), layout="constrained")
for epsilon in (0.0, 0.1, 0.2):
    target = smoothed_target(0, epsilon)
    loss = -target[0] * np.log(share) - target[1:].sum() * np.log((1 - share) / (V - 1))
    best[epsilon] = share[loss.argmin()]
    plt.plot(share, loss, label=f"$\\varepsilon$ = {epsilon}")
    if epsilon:
        plt.plot(target[0], entropy(target), "ko", markersize=4)
        np.testing.assert_allclose([best[epsilon], loss.min()], [target[0], entropy(target)], atol=1e-3)
assert best[0.0] == share[-1]  # without smoothing, higher is always better
plt.xlabel("probability of the correct token")
plt.ylabel("loss (nats)")
plt.legend()
plt.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## Exercise: the loss (15 minutes)
#
# The mean over the N tokens, which are the labels that are not -100. `log_softmax` gives all $\ln p_i$ at once, and
# `gather` picks those of the correct tokens.


# %% tags=["part"]
def smoothed_loss(logits, labels, smoothing=0.1):
    """Label-smoothed cross-entropy (section 5.4) of logits (B,T,V), the mean over the labels (B,T) that are not -100."""
    # SOLUTION
    log_probs = logits.log_softmax(dim=-1)[labels != -100]  # (N,V)
    correct = log_probs.gather(1, labels[labels != -100][:, None])[:, 0]  # (N)
    return -((1 - smoothing) * correct + smoothing * log_probs.mean(dim=-1)).mean()
    # EXERCISE
    # # 1. The log-probabilities (N,V), only where there is a label: x[labels != -100] drops the other positions.
    # # 2. Of these, the ones of the correct tokens (N).
    # # 3. (1 - smoothing) times those of step 2, plus smoothing times the mean over V of those of step 1 (N). Negate it,
    # #    and take the mean over the N tokens.
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(smoothed_loss)
# EXERCISE
# checks.keep(smoothed_loss)
# END

# %% [markdown]
# The gradient with respect to the logits is simply $p - q$, divided by N: what the model says minus what it should say.

# %%
logits = at_once.clone().requires_grad_()
smoothed_loss(logits, labels).backward()
kept = labels != -100
p = at_once.softmax(dim=-1)[kept]  # (N,V)
q = torch.tensor(np.stack([smoothed_target(y, 0.1) for y in labels[kept].tolist()]), dtype=torch.float32)
torch.testing.assert_close(logits.grad[kept], (p - q) / len(q), rtol=1e-4, atol=1e-7)
assert logits.grad[~kept].count_nonzero() == 0  # padding has no gradient

# %% [markdown]
# ## Warmup
#
# Adam divides the mean of the gradients by the root of the mean of their squares, both corrected for their start at 0.
# At the first step both means hold one gradient g, and $g / \sqrt{g^2}$ is its sign: *every* parameter moves by the
# full learning rate, however small its gradient. A step on so little evidence should be small.

# %%
ADAM = {"betas": (0.9, 0.98), "eps": 1e-9}  # section 5.3
trial = copy.deepcopy(model)
smoothed_loss(trial(source, read), labels).backward()
torch.optim.Adam(trial.parameters(), lr=1e-3, **ADAM).step()

weight, before = trial.model.decoder.layers[0].fc1.weight, model.model.decoder.layers[0].fc1.weight
has_gradient = weight.grad.abs() > 1e-5  # the others belong to features that ReLU sets to 0
moved, gradient = (weight - before).detach()[has_gradient], weight.grad[has_gradient]
torch.testing.assert_close(moved, -1e-3 * gradient.sign(), rtol=0.01, atol=1e-6)
print(f"gradients from {gradient.abs().min():.0e} to {gradient.abs().max():.0e}: all moved by 0.001")

# %% [markdown]
# ## Exercise: the learning rate (5 minutes)
#
# So the learning rate rises linearly for `warmup` steps and then decays with the root of the step (Equation 3):
#
# $$d^{-0.5} \cdot \min(\mathrm{step}^{-0.5},\ \mathrm{step} \cdot \mathrm{warmup}^{-1.5})
# = \mathrm{peak} \cdot \min(\mathrm{step} / \mathrm{warmup},\ \sqrt{\mathrm{warmup} / \mathrm{step}})$$
#
# The peak, at step `warmup`, is $(d \cdot \mathrm{warmup})^{-0.5}$ in the paper; small models learn with other peaks
# too, so it is an argument here.


# %% tags=["part"]
def learning_rate(step, peak, warmup):
    """Equation 3, for steps that count from 1, as a number."""
    # SOLUTION
    return peak * min(step / warmup, math.sqrt(warmup / step))
    # EXERCISE
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(learning_rate)
# EXERCISE
# checks.keep(learning_rate)
# END

# %%
steps = np.arange(1, 20001)
plt.figure(figsize=(6, 3.6), layout="constrained")
for d, warmup in [(512, 4000), (512, 8000), (1024, 4000)]:
    equation_3 = d**-0.5 * np.minimum(steps**-0.5, steps * warmup**-1.5)
    schedule = learning_rate_schedule("inverse_sqrt", paper_learning_rate(d, warmup), warmup, len(steps))
    np.testing.assert_allclose([schedule(int(step)) for step in steps], equation_3, rtol=1e-12)
    np.testing.assert_allclose([learning_rate(step, (d * warmup) ** -0.5, warmup) for step in steps], equation_3)
    assert steps[equation_3.argmax()] == warmup
    plt.plot(steps, equation_3, label=f"d {d}, warmup {warmup:,} steps")
plt.xlabel("step")
plt.ylabel("learning rate")
plt.legend()
plt.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## Exercise: a training step (10 minutes)
#
# The decoder reads the shifted labels; the loss compares its logits with the labels. Then compute the gradient, set the
# learning rate of this step, and let the optimizer update the weights. A PyTorch optimizer reads its learning rate from
# `group["lr"]` of each of its `param_groups`.


# %% tags=["part"]
def train_step(model, optimizer, source, labels, rate, smoothing=0.1):
    """Makes one step on a batch, source ids (B,S) and labels (B,T), at the learning rate `rate`.

    Returns the loss as a number (`.item()`).
    """
    # SOLUTION
    loss = smoothed_loss(model(source, shift_right(labels)), labels, smoothing)
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return loss.item()
    # EXERCISE
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(train_step)
# EXERCISE
# checks.keep(train_step)
# END

# %% [markdown]
# ## Exercise: greedy search (15 minutes)
#
# To translate, the decoder reads its own output. All sentences of the batch begin with START, and at each step the most
# likely next token is appended, which the logits at the *last* position give. A sentence that has ended is filled up with
# PAD while others go on; when all have ended, or are `max_length` tokens long, START included, the search is over.
#
# A larger model, which `train.py` trains with the options of `recipes/sample.yaml`, translates *Maria calls my
# father today.* At three of the steps it predicts:
#
# ![bars of the likeliest next tokens at three steps](../pictures/next_tokens.svg)
#
# It is sure of the first token, but not of those after *ruft*. Once *heute* is written, *an* is slightly likelier than *meinen*,
# and wrong: the object is still missing.


# %% tags=["part"]
@torch.no_grad()
def greedy_search(model, source, max_length):
    """Source ids (B,S) -> target ids (B,T): START, the likeliest next token each time, and PAD after END."""
    # SOLUTION
    target = torch.full((len(source), 1), START)
    is_finished = torch.zeros(len(source), 1, dtype=torch.bool)
    while target.shape[1] < max_length and not is_finished.all():
        token = model(source, target)[:, -1:].argmax(dim=-1).masked_fill(is_finished, PAD)  # (B,1)
        target = torch.cat([target, token], dim=1)
        is_finished = is_finished | (token == END)
    return target
    # EXERCISE
    # # Keep the targets so far (B,T), and for each sentence whether it is finished (B,1).
    # raise NotImplementedError
    # END


# %%
# SOLUTION
checks.check(greedy_search)
# EXERCISE
# checks.keep(greedy_search)
# END

# %% [markdown]
# ## Learning five pairs
#
# All five pairs are one batch, and the model has new random weights. We keep a copy of it from shortly before the end of
# the warmup, when it has seen some German but is unsure of everything; we use it below.

# %%
warmup, max_steps, unsure_at = 40, 150, 35
torch.manual_seed(0)
model = Transformer(V, d=64, h=4, f=128, layers=1).train()
optimizer = torch.optim.Adam(model.parameters(), **ADAM)
losses = []
for step in range(1, max_steps + 1):
    losses.append(train_step(model, optimizer, source, labels, learning_rate(step, peak=2e-3, warmup=warmup)))
    if step == unsure_at:
        unsure = copy.deepcopy(model).eval()
model.eval()

lowest = entropy(smoothed_target(0, 0.1))
with torch.no_grad():
    final = smoothed_loss(model(source, shift_right(labels)), labels).item()
print(f"loss {losses[0]:.2f} at first, {final:.3f} at the end; the lowest possible: {lowest:.3f}")
assert lowest < final < lowest + 0.2, "the model has not learned the five pairs"

plt.figure(figsize=(6, 3.6), layout="constrained")
plt.plot(range(1, max_steps + 1), losses, label="training, with dropout")
plt.axhline(lowest, color="gray", linestyle=":", label="entropy of the smoothed target")
plt.xlabel("step")
plt.ylabel("smoothed loss (nats per token)")
plt.legend()
plt.grid(alpha=0.3)
plt.show()

# %%
translations = tokenizer.batch_decode(greedy_search(model, source, max_length=30), skip_special_tokens=True)
for (en, de), translation in zip(pairs, translations, strict=True):
    print(f"{en} -> {translation}")
    assert translation == de, f"the pair is not learned; it must be {de!r}"

# %% [markdown]
# All five are exact. But that proves little: a model that only tells the five sources apart, by one word each, could
# recite five sentences as well. The real test is a sentence that the model has never seen.
#
# ## Learning to translate
#
# The same functions on all 2,789 sentences of at most five words, with a vocabulary of 1,500 tokens, for 600 steps. The
# batches come from the package, at most 512 tokens a side, sentences of similar length together. The test sentences are
# not among them.

# %%
train, test = read_short("train"), read_short("test")
assert not {pair["en"] for pair in train} & {pair["en"] for pair in test}
big_tokenizer = make_tokenizer(train)
torch.manual_seed(0)
big_model = Transformer(len(big_tokenizer), **SIZES, dropout=0.05).train()
optimizer = torch.optim.Adam(big_model.parameters(), **ADAM)
for step, batch in enumerate(itertools.islice(make_batches(big_tokenizer, train), 600), start=1):
    rate = learning_rate(step, peak=5e-3, warmup=100)
    loss = train_step(big_model, optimizer, batch["input_ids"], batch["labels"], rate)
    if step % 200 == 0:
        print(f"step {step:5}   loss {loss:.2f}")

# %%
big_model.eval()
test_batch = PairCollator(big_tokenizer)(encode(big_tokenizer, test))
test_source, test_labels = test_batch["input_ids"], test_batch["labels"]
written = big_tokenizer.batch_decode(greedy_search(big_model, test_source, max_length=30), skip_special_tokens=True)
exact = sum(translation == pair["de"] for translation, pair in zip(written, test, strict=True))
print(f"{exact} of {len(test)} sentences that it has never seen are translated exactly, such as")
for pair, translation in list(zip(test, written, strict=True))[:8]:
    print(f"  {pair['en']} -> {translation}" + ("" if translation == pair["de"] else f" (reference: {pair['de']})"))
assert exact > len(test) / 2, "too few: if the loss above has fallen, look at the search, otherwise at the training"

# %% [markdown]
# ## Your weights in the package
#
# Names and shapes are the same, so your weights load into the package's model. Saved, they are a model that
# transformers loads like any other, after `import vanilla_transformer` or with `trust_remote_code=True`, and that can be
# pushed to the Hub. Its logits are yours, and so are its translations, although it decodes quite differently: with cached
# keys and values, sorted batches and its own attention.

# %%
config = VanillaTransformerConfig(
    vocab_size=len(big_tokenizer),
    d_model=SIZES["d"],
    encoder_layers=SIZES["layers"],
    decoder_layers=SIZES["layers"],
    encoder_attention_heads=SIZES["h"],
    decoder_attention_heads=SIZES["h"],
    encoder_ffn_dim=SIZES["f"],
    decoder_ffn_dim=SIZES["f"],
)
package = VanillaTransformerForConditionalGeneration(config).eval()
package.load_state_dict(big_model.state_dict(), strict=True)
with tempfile.TemporaryDirectory() as folder:
    package.save_pretrained(folder)
    big_tokenizer.save_pretrained(folder)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()

is_label, test_read = test_labels != -100, shift_right(test_labels)
with torch.no_grad():
    ours = big_model.double()(test_source, test_read)[is_label]  # (N,V)
    theirs = loaded.double()(test_source, decoder_input_ids=test_read).logits[is_label]
big_model.float(), loaded.float()
torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6, msg="with your weights, the package has other logits")
theirs = Translator(loaded, big_tokenizer)([pair["en"] for pair in test], num_beams=1)
assert theirs == written, "with your weights, the package translates differently"
print(f"{ours.numel():,} logits and {len(test)} translations are equal")

# %% [markdown]
# That was the promise. The rest of this notebook, for reading, is about a better search.

# %% [markdown]
# ## Beam search
#
# Greedy search cannot revise a choice. If the best first token leads to no good sentence, it will not notice. Beam
# search keeps the n best hypotheses, extends all of them and keeps the n best again. Three rules complete it, the same
# as in transformers' `generate`:
#
# - **Scores.** Every further token makes a sentence less likely, so the plain sum of log-probabilities favors short
#   ones. A finished hypothesis scores the sum divided by its length L to the power `length_penalty`. (The penalty of
#   section 6.1, with its $\alpha = 0.6$, is a different one: $((5 + L) / 6)^\alpha$, from the GNMT paper.) The n best
#   finished hypotheses are kept.
# - **Continuations.** Of the 2n best continuations, the n best unfinished ones are kept. Why 2n? Each hypothesis has
#   one continuation that is END, so at most n of the 2n end with it, and n others are left. (At the maximum length,
#   all are finished.) Finished ones count if they are among the first n of the 2n.
# - **When to stop.** Once n hypotheses are finished and the best unfinished one would not score better than the worst
#   of them if it ended now. This is `early_stopping=False`, a heuristic: a longer sentence could still score better.
#   `"never"` divides the sum of the best unfinished one by the power of the maximum length, the best score that it
#   could still reach; `True` stops as soon as n are finished.
#
# *Maria calls my father today*, the sentence from above, with n = 3:
#
# ![a search with three beams as a tree](../pictures/beam_tree.svg)
#
# Greedy search loses the object. Beam search keeps *meinen* at step 3, and finds it.


# %%
@torch.no_grad()
def next_log_probs(model, source, written):
    """Source ids (1,S) and n prefixes of a target, all of the same length -> (n,V)."""
    prefixes = torch.tensor(written)
    return model(source.expand(len(prefixes), -1), prefixes)[:, -1].log_softmax(dim=-1)


def beam_search(model, source, n, max_length, length_penalty=1.0, early_stopping=False):
    """Source ids (1,S) -> score and tokens of the best translation found."""

    def is_finished(tokens):
        return tokens[-1] == END or len(tokens) == max_length

    running, finished = [(0.0, [START])], []
    while running:
        log_probs = next_log_probs(model, source, [tokens for _, tokens in running])
        candidates = []
        for (total, tokens), row in zip(running, log_probs, strict=True):
            candidates += [(total + row[token].item(), [*tokens, token]) for token in row.topk(2 * n).indices.tolist()]
        candidates = sorted(candidates, reverse=True)[: 2 * n]

        length = len(candidates[0][1]) - 1  # without the start token
        new = [(total / length**length_penalty, tokens) for total, tokens in candidates[:n] if is_finished(tokens)]
        finished = sorted(finished + new, reverse=True)[:n]
        running = [(total, tokens) for total, tokens in candidates if not is_finished(tokens)][:n]

        if len(finished) == n and running:
            longest = max_length - 1 if early_stopping == "never" and length_penalty > 0 else length
            bound = running[0][0] / longest**length_penalty
            if early_stopping is True or bound <= finished[-1][0]:
                break
    return finished[0]


# %% [markdown]
# A confident model needs no search: both find what it has learned. The copy that was unsure of the five pairs is
# another matter. Below is what either search finds, with the mean log-probability of a token, which is the score for
# `length_penalty=1`. Greedy search cannot undo a wrong choice: in two of the sentences it repeats a word, where one of
# four beams has found a sentence that scores higher and is right. But the highest score does not make a sentence
# right: for another sentence, this model prefers to end too early, and both searches do.


# %%
def log_prob(model, source, tokens):
    """The sum of the log-probabilities of all tokens but the first."""
    with torch.no_grad():
        logits = model(source, torch.tensor([tokens[:-1]]))[0]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens[1:])[:, None]).sum().item()


sources = [tokenizer(en, return_tensors="pt").input_ids for en, _ in pairs]
for one_source, (en, de) in zip(sources, pairs, strict=True):
    _, tokens = beam_search(model, one_source, n=4, max_length=30)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == de, "beam search does not find what was learned"
    print(en)
    greedy = greedy_search(unsure, one_source, 15)[0].tolist()
    for name, tokens in {"greedy": greedy, "4 beams": beam_search(unsure, one_source, 4, 15)[1]}.items():
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        mean = log_prob(unsure, one_source, tokens) / (len(tokens) - 1)
        print(f"   {name}: {mean:.3f} a token: {text!r}")

# %% [markdown]
# ## The equality
#
# Our searches recompute the whole prefix for each token; `generate` of the package caches the keys and values of the
# past. The tokens are the same: for both models, for each length penalty and each stopping rule.

# %%
sizes = {"vocab_size": V, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
compared, differing = 0, 0
for one in [model, unsure]:
    package = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes)).eval()
    package.load_state_dict(one.state_dict(), strict=True)
    for one_source in sources:
        greedy = greedy_search(one, one_source, max_length=15)[0].tolist()
        theirs = package.generate(one_source, num_beams=1, do_sample=False, max_length=15)[0].tolist()
        assert greedy == theirs, f"`generate` without beams gives other tokens: {greedy} and {theirs}"
        for length_penalty, early_stopping in itertools.product([0.0, 0.6, 1.0, 2.0], [False, True, "never"]):
            options = {"length_penalty": length_penalty, "early_stopping": early_stopping, "max_length": 15}
            _, ours = beam_search(one, one_source, n=4, **options)
            theirs = package.generate(one_source, num_beams=4, **options)[0].tolist()
            assert ours == theirs, f"`generate` with {options} gives other tokens: {ours} and {theirs}"
            compared, differing = compared + 1, differing + (ours != greedy)
assert differing > 0, "no beam search differs from greedy search, so this shows nothing: `unsure` must be half trained"
print(f"{compared} beam searches are equal; {differing} of them differ from greedy search")

# %% [markdown]
# **Questions.** 1. What does a higher `length_penalty` do to the sentences? 2. Why does training need one pass for all T
# tokens, and greedy search T passes?

# %% [markdown] tags=["answer"]
# **Answers.**
#
# 1. A score is a negative sum divided by a power of the length: the higher the power, the nearer to 0 the score of a
# long sentence. Sentences become longer.
# 2. In training all tokens are known beforehand, and the causal mask keeps each prediction from seeing what it
# predicts. In a search the input of each step is the output of the step before.
