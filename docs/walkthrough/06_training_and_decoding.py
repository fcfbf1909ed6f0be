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
# The model of the last notebook maps source and target ids to logits. Two questions remain: how it is trained, and how
# it translates when there is no target to read.
#
# - **Training** predicts the next token at every position at once (teacher forcing), gives a little probability to all
#   other tokens (label smoothing, section 5.4) and starts with small steps (warmup, section 5.3).
# - **Decoding** generates one token after the other. Greedy search takes the most likely token each time; beam search
#   keeps several hypotheses (section 6.1).
#
# We train on the first five English-German pairs of the sample dataset and write both searches by hand. At the end they
# equal `model.generate`, token by token.
#
# Letters as before: B sentences, S source length, T target length, d model width, V vocabulary size, N non-padding
# target tokens.

# %%
import copy
import itertools
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.batches import PairCollator
from vanilla_transformer.data.tokenizer import special_token_ids, train_tokenizer
from vanilla_transformer.inspection.attention import readable_tokens
from vanilla_transformer.modeling_vanilla_transformer import label_smoothed_cross_entropy
from vanilla_transformer.training.arguments import TrainingOptions
from vanilla_transformer.training.optimization import learning_rate_schedule, make_optimizer, paper_learning_rate

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.manual_seed(0)
torch.set_num_threads(1)

here = Path(__file__).parent if "__file__" in globals() else Path.cwd()  # a notebook runs in its own folder
DATA = here.resolve().parents[1] / "sample_dataset"

# %%
with open(DATA / "train.jsonl", encoding="utf-8") as lines:
    rows = [json.loads(line) for line in itertools.islice(lines, 5)]
pairs = [(row["en"], row["de"]) for row in rows]
tokenizer = train_tokenizer([text for pair in pairs for text in pair], vocab_size=400)
encoded = [{"input_ids": tokenizer(en).input_ids, "labels": tokenizer(de).input_ids} for en, de in pairs]
batch = PairCollator(tokenizer)(encoded)  # all five pairs, padded

config = VanillaTransformerConfig(
    vocab_size=len(tokenizer),
    d_model=64,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    dropout=0.1,
    **special_token_ids(tokenizer),
)
model = VanillaTransformerForConditionalGeneration(config).eval()
V, start, eos = config.decoder_vocab_size, config.decoder_start_token_id, config.eos_token_id

for en, de in pairs:
    print(f"{en} -> {de}")
print(f"V is {V}; the batch has {tuple(batch['labels'].shape)} labels")

# %% [markdown]
# ## Teacher forcing
#
# At position t the decoder has read the tokens before t and predicts token t. So its input is the target shifted right
# by one, with a start token in front. Even where it would have predicted something else, it reads the correct token: a
# wrong prediction does not affect later ones.
#
# Labels are -100 at padding, where nothing is predicted.


# %%
def shift_right(labels):
    """The decoder input for `labels` (B,T)."""
    read = torch.full_like(labels, start)
    read[:, 1:] = labels[:, :-1]
    return read.masked_fill(read == -100, start)  # any token will do at padding: no other position attends to it


labels = batch["labels"]
read = shift_right(labels)
assert torch.equal(read, model.prepare_decoder_input_ids_from_labels(labels))

for name, ids in [("reads", read[0]), ("writes", labels[0][labels[0] != -100])]:
    print(f"the decoder {name:6}", " ".join(token.text for token in readable_tokens(tokenizer, ids.tolist())))

# %% [markdown]
# One pass makes all T predictions of a sentence. Thanks to the causal mask they equal those of T passes over longer and
# longer prefixes.

# %%
with torch.no_grad():
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
    at_once = model(**inputs, decoder_input_ids=read).logits  # (B,T,V)
    one_by_one = [model(**inputs, decoder_input_ids=read[:, : t + 1]).logits[:, -1] for t in range(read.shape[1])]
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
# A cross-entropy is at least the entropy of its target, reached at $p = q$. So the lowest smoothed loss is not 0, and
# the best probability for the correct token is $1 - \varepsilon + \varepsilon / V$. The plot shows both; the other
# tokens share the rest evenly.


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
# The package divides the sum over the N non-padding tokens by N, and computes loss and gradient from a few rows of
# logits at a time. We compute all at once, by the definition and by the closed form. The gradient with respect to the
# logits is simply $p - q$.

# %%
epsilon = 0.1
hidden = torch.randn(*labels.shape, config.d_model, requires_grad=True)  # (B,T,d), as if from a decoder
package = label_smoothed_cross_entropy(hidden, model.lm_head, labels, epsilon)
package.backward()

W = model.lm_head.weight.detach().double().numpy()  # (V,d)
kept = (labels != -100).numpy()
z = hidden.detach().double().numpy()[kept] @ W.T  # (N,V)
y = labels.numpy()[kept]  # (N)
N = len(y)
log_Z = np.log(np.exp(z).sum(axis=-1))
p = np.exp(z - log_Z[:, None])
q = np.stack([smoothed_target(token, epsilon) for token in y])

definition = -(q * np.log(p)).sum() / N
closed_form = (log_Z - (1 - epsilon) * z[np.arange(N), y] - epsilon * z.mean(axis=-1)).sum() / N
np.testing.assert_allclose(closed_form, definition, rtol=1e-12)
np.testing.assert_allclose(package.item(), closed_form, rtol=1e-6)
np.testing.assert_allclose(hidden.grad.numpy()[kept], (p - q) @ W / N, atol=1e-6)
assert hidden.grad[labels == -100].count_nonzero() == 0  # padding has no gradient
print(f"definition {definition:.6f}, closed form {closed_form:.6f}, package {package.item():.6f}")

# %% [markdown]
# ## Warmup
#
# Adam divides the mean of the gradients by the root of the mean of their squares, both corrected for their start at 0.
# At the first step both means hold one gradient g, and $g / \sqrt{g^2}$ is its sign: *every* parameter moves by the
# full learning rate, however small its gradient. A step on so little evidence should be small.

# %%
PAPER_ADAM = TrainingOptions()  # the defaults of train.py are those of section 5.3
assert (PAPER_ADAM.adam_beta1, PAPER_ADAM.adam_beta2, PAPER_ADAM.adam_epsilon) == (0.9, 0.98, 1e-9)

trial = copy.deepcopy(model)
optimizer = make_optimizer(trial, PAPER_ADAM)
for group in optimizer.param_groups:
    group["lr"] = 1e-3
trial(**batch).loss.backward()
optimizer.step()

weight, before = trial.model.decoder.layers[0].fc1.weight, model.model.decoder.layers[0].fc1.weight
has_gradient = weight.grad.abs() > 1e-5  # the others belong to features that ReLU sets to 0
moved, gradient = (weight - before).detach()[has_gradient], weight.grad[has_gradient]
torch.testing.assert_close(moved, -1e-3 * gradient.sign(), rtol=0.01, atol=1e-6)
print(f"gradients from {gradient.abs().min():.0e} to {gradient.abs().max():.0e}: all moved by 0.001")

# %% [markdown]
# So the learning rate rises linearly for `warmup` steps and then decays with the root of the step (Equation 3):
#
# $$d^{-0.5} \cdot \min(\mathrm{step}^{-0.5},\ \mathrm{step} \cdot \mathrm{warmup}^{-1.5})$$
#
# The package writes it as a peak times a factor.

# %%
steps = np.arange(1, 20001)
plt.figure(figsize=(6, 3.6), layout="constrained")
for d, warmup in [(512, 4000), (512, 8000), (1024, 4000)]:
    equation_3 = d**-0.5 * np.minimum(steps**-0.5, steps * warmup**-1.5)
    schedule = learning_rate_schedule("inverse_sqrt", paper_learning_rate(d, warmup), warmup, len(steps))
    np.testing.assert_allclose([schedule(int(step)) for step in steps], equation_3, rtol=1e-12)
    assert steps[equation_3.argmax()] == warmup
    plt.plot(steps, equation_3, label=f"d {d}, warmup {warmup:,} steps")
plt.xlabel("step")
plt.ylabel("learning rate")
plt.legend()
plt.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## Learning five pairs
#
# A step: the smoothed loss, its gradient, the learning rate of the step. All five pairs are one batch. We keep a copy
# of the model from shortly before the end of the warmup, when it has seen some German but is unsure of everything; we
# need it below.

# %%
warmup, max_steps, unsure_at = 40, 150, 35
schedule = learning_rate_schedule("inverse_sqrt", 2e-3, warmup, max_steps)
optimizer = make_optimizer(model, PAPER_ADAM)
model.train()
losses = []
for step in range(1, max_steps + 1):
    loss = model(**batch, label_smoothing=epsilon).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = schedule(step)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step == unsure_at:
        unsure = copy.deepcopy(model).eval()
model.eval()

lowest = entropy(smoothed_target(0, epsilon))
with torch.no_grad():
    final = model(**batch, label_smoothing=epsilon).loss.item()
print(f"loss {losses[0]:.2f} at first, {final:.3f} at the end; the lowest possible: {lowest:.3f}")
assert lowest < final < lowest + 0.2

plt.figure(figsize=(6, 3.6), layout="constrained")
plt.plot(range(1, max_steps + 1), losses, label="training, with dropout")
plt.axhline(lowest, color="gray", linestyle=":", label="entropy of the smoothed target")
plt.xlabel("step")
plt.ylabel("smoothed loss (nats per token)")
plt.legend()
plt.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## Greedy search
#
# Now the decoder reads its own output. At each step the most likely token is appended, until it is the end-of-sentence
# token. Only the last row of the logits is used.


# %%
@torch.no_grad()
def next_log_probs(model, source, written):
    """Source ids (1,S) and n prefixes of a target, all of the same length -> (n,V)."""
    ids = torch.tensor(written)
    logits = model(input_ids=source.expand(len(ids), -1), decoder_input_ids=ids, use_cache=False).logits
    return logits[:, -1].log_softmax(dim=-1)


def greedy_search(model, source, max_length):
    tokens = [start]
    while tokens[-1] != eos and len(tokens) < max_length:
        tokens.append(next_log_probs(model, source, [tokens]).argmax().item())
    return tokens


sources = [tokenizer(en, return_tensors="pt").input_ids for en, _ in pairs]
for source, (_, de) in zip(sources, pairs, strict=True):
    tokens = greedy_search(model, source, max_length=30)
    assert tokens == model.generate(source, num_beams=1, do_sample=False, max_length=30)[0].tolist()
    print(tokenizer.decode(tokens, skip_special_tokens=True))
    assert tokenizer.decode(tokens, skip_special_tokens=True) == de

# %% [markdown]
# ## Beam search
#
# Greedy search cannot revise a choice. If the best first token leads to no good sentence, it will not notice. Beam
# search keeps the n best hypotheses, extends all of them and keeps the n best again. Three rules complete it, the same
# as in transformers' `generate`:
#
# - **Scores.** Every further token makes a sentence less likely, so the plain sum of log-probabilities favors short
#   ones. A finished hypothesis scores the sum divided by its length n to the power `length_penalty`. (The penalty of
#   section 6.1, with its $\alpha = 0.6$, is a different one: $((5 + n) / 6)^\alpha$, from the GNMT paper.) The n best
#   finished hypotheses are kept.
# - **Continuations.** Of the 2n best continuations, the n best unfinished ones are kept. Why 2n? A hypothesis can finish
#   in only one way, so at most n of them do. Finished ones count if they are among the first n of the 2n.
# - **When to stop.** Once n hypotheses are finished and the best unfinished one would not score better than the worst of
#   them if it ended now. This is `early_stopping=False`, a heuristic: a longer sentence could still score better.
#   `"never"` assumes the maximum length before it gives up; `True` stops as soon as n are finished.


# %%
def beam_search(model, source, n, max_length, length_penalty=1.0, early_stopping=False):
    """Source ids (1,S) -> score and tokens of the best translation found."""

    def is_finished(tokens):
        return tokens[-1] == eos or len(tokens) == max_length

    running, finished = [(0.0, [start])], []
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
# A confident model needs no search: both find what it has learned. The copy that is unsure is another matter. Below is
# what either search finds, with the mean log-probability of a token, which is the score for `length_penalty=1`. Greedy
# search cannot undo a wrong choice; sometimes one of four beams has avoided it. What beam search finds is more likely,
# not better: an unsure model finds it likely to repeat a word.

# %%
for source, (_, de) in zip(sources, pairs, strict=True):
    _, tokens = beam_search(model, source, n=4, max_length=30)
    assert tokens == model.generate(source, num_beams=4, max_length=30)[0].tolist()
    assert tokenizer.decode(tokens, skip_special_tokens=True) == de


def log_prob(model, source, tokens):
    """The sum of the log-probabilities of all tokens but the first."""
    with torch.no_grad():
        logits = model(input_ids=source, decoder_input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens[1:])[:, None]).sum().item()


for source, (en, _) in zip(sources, pairs, strict=True):
    print(en)
    found = {"greedy": greedy_search(unsure, source, 15), "4 beams": beam_search(unsure, source, 4, 15)[1]}
    for name, tokens in found.items():
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        mean = log_prob(unsure, source, tokens) / (len(tokens) - 1)
        print(f"   {name}: {mean:.3f} a token: {text!r}")

# %% [markdown]
# ## The equality
#
# Our searches recompute the whole prefix for each token; `generate` caches the keys and values of the past. The tokens
# are the same: for both models, for each length penalty and each stopping rule.

# %%
compared, differing = 0, 0
for one, source in itertools.product([model, unsure], sources):
    greedy = greedy_search(one, source, max_length=15)
    assert greedy == one.generate(source, num_beams=1, do_sample=False, max_length=15)[0].tolist()
    for length_penalty, early_stopping in itertools.product([0.0, 0.6, 1.0, 2.0], [False, True, "never"]):
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping, "max_length": 15}
        _, ours = beam_search(one, source, n=4, **options)
        theirs = one.generate(source, num_beams=4, **options)[0].tolist()
        assert ours == theirs, (options, ours, theirs)
        compared, differing = compared + 1, differing + (ours != greedy)
assert differing > 0  # otherwise the comparison would show nothing
print(f"{compared} beam searches are equal; {differing} of them differ from greedy search")

# %% [markdown]
# **To try:** raise `length_penalty` and see the sentences grow. Train without label smoothing and compare the
# probabilities of the tokens. Cache keys and values in `next_log_probs` (`past_key_values` of the output) and time it.
