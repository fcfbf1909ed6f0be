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
# # 9. The mistakes, measured
#
# A Transformer with a mistake in it usually trains. There is no error, the loss falls, and the translations are merely
# bad, as those of small models are. Here we make six mistakes on purpose, one at a time, in a model that is correct
# otherwise:
#
# - three that **the loss shows**, if you know how low it should fall: no encoder, no positions, scores that are not
#   divided;
# - three that **the loss hides**: padding that is attended to, an end token taken for padding, no causal mask.
#
# Four of the six occur in [public implementations](../seeds.md), or are easily made with what they leave open. Before
# each measurement, write down what you expect. A prediction that fails teaches more than an explanation read in
# advance.
#
# **You need** notebooks 1 to 3, 5 and 6. **Time:** 60 minutes; the code runs for two to four minutes. **You will have** a
# table of what each mistake costs, and tests that find four of them in your own model before any training.

# %%
import itertools
import math
import sys
import warnings

import checks
import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

if "ipykernel" not in sys.modules:  # as a plain script: draw, but open no window
    plt.switch_backend("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg")
torch.set_num_threads(1)

greedy_search = checks.part("greedy_search")  # of notebook 6: yours if you have kept it, else the solution

# %% [markdown]
# ## A task that can be counted
#
# The model copies rows of five digits, all different. There are $10 \cdot 9 \cdot 8 \cdot 7 \cdot 6 = 30{,}240$ such
# rows. We keep 500 for testing and train on the others.
#
# Why so small a task? Because here we can count what a model that lacks some information cannot know. If n rows are
# equally likely given all that it sees, the best it can do is to give each the probability 1/n: a loss of $\ln n$ per
# row, or $\ln(n) / 5$ nats per token. No model that sees no more can have a lower loss, unless it learns the rows by
# heart, and in 250 steps it meets most of them once at most. That is a **floor**, and it works both ways:
#
# - a loss that stops at a floor tells what the model does not see;
# - a loss below a floor tells that it sees more than you think.

# %%
PAD, START, END, FIRST, LENGTH = 0, 1, 2, 3, 5  # the digit n is the token FIRST + n
rows = FIRST + torch.tensor(list(itertools.permutations(range(10), LENGTH)))  # (30240,5)
torch.manual_seed(0)
new, known = rows[torch.randperm(len(rows))].split([500, len(rows) - 500])


def copy(rows):
    """A batch for the model: the arguments of its `forward`."""
    return {"input_ids": rows, "labels": rows}


def new_model(seed=0, heads=4, **config):
    torch.manual_seed(seed)
    sizes = {"vocab_size": FIRST + 10, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    sizes |= {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
    sizes |= {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes, **config))
    model.set_attn_implementation("eager")  # Equation 1 as it is written; other backends add masks of their own
    return model


def train(model, make_batch, steps):
    """Trains on batches of 64 known rows; returns the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    model.train()
    losses = []
    for step in range(1, steps + 1):
        loss = model(**make_batch(known[torch.randint(len(known), (64,))])).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 5e-3 * min(step / 35, (1 + math.cos(math.pi * step / steps)) / 2)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def write(model, source, mask=None, max_length=LENGTH + 1):
    """What the model writes, greedily (B,T). Each step is a whole pass: a cache would hide some of the mistakes."""
    with torch.no_grad():
        return greedy_search(lambda s, t: model(s, mask, t, use_cache=False).logits, source, max_length)[:, 1:]


# %% [markdown]
# `run` trains a model, or three that differ in their random weights and batches, and measures two things: the **loss**
# per token at the end of training, where each token is predicted from the right ones before it; and the share of the
# new rows that the model writes **exactly**, given only the source. Of three models we take the median.
#
# A mistake is a function that changes a model. The first one changes nothing.

# %%
curves, losses, exact, floors, predicted = {}, {}, {}, {}, {}


def run(name, mistake, make_batch=copy, seeds=1, steps=250, floor=None, **config):
    models = [mistake(new_model(seed, **config)) for seed in range(seeds)]
    curves[name] = np.median([train(model, make_batch, steps) for model in models], axis=0)
    losses[name] = curves[name][-10:].mean()
    batch = make_batch(new)
    written = [write(model, batch["input_ids"], batch.get("attention_mask")) for model in models]
    shares = [(one == batch["labels"]).all(dim=1).float().mean().item() for one in written]
    exact[name] = np.median(shares)
    floors[name] = floor
    above = "" if floor is None else f" (floor {floor:.3f})"
    of_each = "" if seeds == 1 else f" (of each model: {', '.join(f'{share:.1%}' for share in sorted(shares))})"
    print(f"{name}: loss {losses[name]:.3f}{above}, {exact[name]:.1%} of new rows exact{of_each}")
    return models


def no_mistake(model):
    return model


correct = run("no mistake", no_mistake, seeds=3)
assert losses["no mistake"] < 0.02 and exact["no mistake"] > 0.99

# %% [markdown]
# # What the loss shows
#
# ## No encoder
#
# The decoder attends to zeros in place of the encoder's output. Nothing tells it what to copy; it only reads what it
# has written so far.
#
# **Write down:** to what loss does it fall, and what share of rows will it write exactly? Put your numbers in place of
# `None`; the table at the end shows them beside the measured ones.

# %%
predicted["no encoder"] = None, None  # loss in nats per token, share of rows exact (0 to 1)


# %%
def replace(module, change):
    """Before each call of `module`, replaces keyword arguments by those of `change(arguments)`."""
    module.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | change(kwargs)), with_kwargs=True)


def no_encoder(model):
    for layer in model.model.decoder.layers:
        replace(layer.encoder_attn, lambda given: {"key_value_states": torch.zeros_like(given["key_value_states"])})
    return model


ANY_ROW = math.log(10 * 9 * 8 * 7 * 6) / LENGTH
run("no encoder", no_encoder, floor=ANY_ROW)
assert -0.02 < losses["no encoder"] - ANY_ROW < 0.2 and exact["no encoder"] < 0.01
assert math.log(13) > ANY_ROW and curves["no encoder"][0] > math.log(13)

# %% [markdown]
# All 30,240 rows are equally likely: $\ln(10 \cdot 9 \cdot 8 \cdot 7 \cdot 6) / 5 = 2.06$ nats per token. The loss
# starts above that of a uniform guess over all 13 tokens, $\ln 13 = 2.56$, so it does fall, in the usual shape. The
# model has learned what can be learned without a source: that tokens are digits, and that no digit comes twice. It is
# a language model of rows.
#
# The loss of a real translator falls in the same way when its decoder does not see the source, and keeps falling for
# as long as there is German to learn. What its floor is, nobody knows. But you can measure it: train once with a
# source that says nothing, and see whether the real run gets lower.
#
# ## No positions
#
# The sinusoids are 0, in both stacks. Three models learn three tasks: to copy a row, to reverse it, to sort it.
#
# **Write down:** the loss and the share of exact rows, for each task.

# %%
predicted["no positions, copy"] = None, None
predicted["no positions, reverse"] = None, None
predicted["no positions, sort"] = None, None


# %%
def no_positions(model):
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_positions.table.zero_()
    return model


def reverse(rows):
    return {"input_ids": rows, "labels": rows.flip(1)}


def sort(rows):
    return {"input_ids": rows, "labels": rows.sort(dim=1).values}


ANY_ORDER = math.log(math.factorial(LENGTH)) / LENGTH
(bag,) = run("no positions, copy", no_positions, floor=ANY_ORDER)
run("no positions, reverse", no_positions, reverse, floor=ANY_ORDER)
run("no positions, sort", no_positions, sort, floor=0)
for task in ("copy", "reverse"):
    assert -0.02 < losses[f"no positions, {task}"] - ANY_ORDER < 0.2 and exact[f"no positions, {task}"] < 0.1
assert losses["no positions, sort"] < 0.02 and exact["no positions, sort"] > 0.99

with torch.no_grad():
    there, back = (bag(source, labels=new).logits for source in (new, new.flip(1)))
torch.testing.assert_close(there, back, rtol=0, atol=1e-4)

# %% [markdown]
# Attention is a weighted mean, and a mean has no order: without positions the source is a bag of digits. The logits
# for a row and for its reverse are equal. The model knows which five digits it must write, but all 120 orders of them
# are equally likely: $\ln(5!) / 5 = 0.96$ nats per token, and about one row in 120 right by luck.
#
# Sorting needs no order, so it does not reveal the mistake. A test reveals what it depends on and nothing else.
#
# ## Scores that are not divided
#
# Equation 1 divides the scores by $\sqrt{k}$, for the width k of a head. Without that they are too large, and notebook
# 1 found that a softmax then makes all or nothing of them. What does it cost? Of 64 features, we make four heads with
# k = 16, or one with k = 64, the paper's width.
#
# **Write down:** the loss and the share of exact rows without the division, for k = 16 and for k = 64.

# %%
predicted["not divided, k = 16"] = None, None
predicted["not divided, k = 64"] = None, None


# %%
def attentions(model):
    for layer in [*model.model.encoder.layers, *model.model.decoder.layers]:
        yield from (module for name, module in layer.named_children() if name.endswith("attn"))


def not_divided(model):
    for attention in attentions(model):
        attention.scaling = 1.0
    return model


@torch.no_grad()
def score_variance(model):
    """The variance of an encoder query's scores, from its weights: the logarithm of a softmax is the scores, shifted."""
    weights = model(new, labels=new, output_attentions=True).encoder_attentions[0]  # (B,h,S,S)
    return weights.log().var(dim=-1).mean().item()


for heads in (4, 1):
    divided, plain = (score_variance(mistake(new_model(heads=heads))) for mistake in (no_mistake, not_divided))
    print(f"before training, k = {64 // heads}: variance of the scores {divided:.1f}, not divided {plain:.1f}")
    assert 1 < divided < 4 and math.isclose(plain, 64 // heads * divided, rel_tol=1e-3)

run("not divided, k = 16", not_divided)
run("no mistake, k = 64", no_mistake, seeds=3, heads=1)
run("not divided, k = 64", not_divided, seeds=3, heads=1)
assert losses["not divided, k = 16"] < 0.1 and exact["not divided, k = 16"] > 0.9
halfway = [np.mean(curves[name][100:125]) for name in ("no mistake", "not divided, k = 16")]
assert halfway[1] > 1.5 * halfway[0]
assert losses["no mistake, k = 64"] < 0.3 and exact["no mistake, k = 64"] > 0.7
assert losses["not divided, k = 64"] > 0.8 and exact["not divided, k = 64"] < 0.3

# %%
run("not divided, k = 64, 1,000 steps", not_divided, steps=1000, heads=1)
assert losses["not divided, k = 64, 1,000 steps"] < 0.9 * losses["not divided, k = 64"]

# %% [markdown]
# The inputs here have a variance of about 1.5, 1 of the embeddings and 0.5 of the sinusoids, so a product of a query's
# and a key's features has about $1.5^2 = 2.25$, and so have the scores if they are divided. If they are not, it is k
# times that.
#
# With narrow heads the mistake is nearly free: the model learns more slowly, and gets nearly as many rows right in the
# end. With the paper's width it copies hardly anything after 250 steps, where the correct model copies most rows.
# There is no floor, and only the loss of a correct model shows what is wrong: this one sees everything, and with four
# times the steps the loss is lower. The mistake costs time, and more of it the wider a head. A small model with narrow
# heads does not reveal it.
#
# # What the loss hides
#
# ## Padding that is attended to
#
# A batch is as long as its longest row; shorter rows are filled with PAD, which the mask hides from attention. Two
# models attend to padding as to any token:
#
# - one was trained on rows of the same length. Without padding the mask changes nothing, so this model has learned what
#   the correct one learns, and nobody noticed that the mask is missing;
# - one was trained on rows with up to five PAD beside them, and attended to those.
#
# Both are then tested on the same rows, next to longer and longer ones: with up to 95 PAD.
#
# **Write down** for both, as (loss, share): the loss in training, where the first has no PAD and the second up to
# five, and the share of exact rows next to 95 PAD. (The share that `run` prints for the second is next to at most
# five.)

# %%
predicted["padding seen, not in training"] = None, None
predicted["padding seen, in training too"] = None, None


# %%
def with_pads(rows, count, mask_it=False):
    """Rows to copy, followed by `count` PAD. The mask says that all of them are tokens, unless `mask_it`."""
    source = nn.functional.pad(rows, (0, count), value=PAD)
    mask = (source != PAD).long() if mask_it else torch.ones_like(source)
    return {"input_ids": source, "attention_mask": mask, "labels": rows}


def up_to_five_pads(rows):
    return with_pads(rows, int(torch.randint(0, 6, ())))


@torch.no_grad()
def exact_beside(model, count, mask_it=False):
    """The share of new rows exact, in one pass: those whose every digit is the likeliest after the right ones."""
    return (model(**with_pads(new, count, mask_it)).logits.argmax(dim=-1) == new).all(dim=1).float().mean().item()


for of_runs in (curves, losses, floors):
    of_runs["padding seen, not in training"] = of_runs["no mistake"]
used_to_it = run("padding seen, in training too", no_mistake, up_to_five_pads, seeds=3)

# %%
counts = [0, 1, 2, 5, 10, 20, 50, 95]
shares = {
    "masked": [[exact_beside(model, count, mask_it=True) for count in counts] for model in correct],
    "padding seen, not in training": [[exact_beside(model, count) for count in counts] for model in correct],
    "padding seen, in training too": [[exact_beside(model, count) for count in counts] for model in used_to_it],
}
shares = {name: np.array(of_models) for name, of_models in shares.items()}  # (models, counts)

plt.figure(figsize=(8.5, 3.6), layout="constrained")
for color, (name, of_models) in zip(["tab:gray", "tab:red", "tab:orange"], shares.items(), strict=True):
    plt.plot(counts, of_models.T, ".-", color=color, alpha=0.35, linewidth=1)
    plt.plot(counts, np.median(of_models, axis=0), color=color, linewidth=2, label=name)
plt.gca().set(xlabel="PAD beside five digits", ylabel="share of new rows exact", ylim=(-0.03, 1.03))
plt.title("Three models each, and their median")
plt.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.grid(alpha=0.3)
plt.show()

for name in ("padding seen, not in training", "padding seen, in training too"):
    exact[name] = np.median(shares[name][:, -1])
    print(f"{name}: loss {losses[name]:.3f} in training, {exact[name]:.1%} exact beside {counts[-1]} PAD")
assert (shares["masked"] == shares["masked"][:, :1]).all()
assert losses["padding seen, in training too"] < 0.02
assert np.ptp(shares["padding seen, not in training"], axis=0).max() > 0.2  # the three models differ widely
assert shares["padding seen, in training too"][:, counts.index(5)].min() > 0.95
assert exact["padding seen, not in training"] < 0.6
assert exact["padding seen, not in training"] < exact["padding seen, in training too"]
assert shares["padding seen, in training too"].min() < 0.99

# %% [markdown]
# Masked, padding changes nothing, however much there is of it. Attended to, each PAD takes a share of every mean. The
# first model never learned what PAD is, so which queries its keys match is left to chance: the three models differ
# widely. The second has learned to give PAD low scores, and five of them do no harm. But a low score is not a weight
# of 0, and many small weights add up: next to enough PAD some rows go wrong again.
#
# No loss in training shows this, and no test on single rows. What a sentence becomes depends on the other sentences of
# its batch: that is the symptom.
#
# ## An end token taken for padding
#
# Real rows differ in length, and END tells where one ends. Some tokenizers have no padding token, and it is common to
# take END in its place. Then comes the line that ends up in many training scripts, to leave padding out of the loss:
#
#     labels[labels == PAD] = -100
#
# Rows here have three to five digits, then END, and the batch is filled with END. `careless` has that line; `careful`
# keeps the first END of each row.
#
# **Write down:** for the careless model, the loss, and the share of new rows that it writes exactly, END included.

# %%
predicted["END ignored"] = None, None


# %%
def careful(rows, is_careful=True):
    """Rows of three to five digits, filled with END, which is the padding token too."""
    lengths = torch.randint(3, LENGTH + 1, (len(rows), 1))
    source = nn.functional.pad(rows, (0, 1)).masked_fill(torch.arange(LENGTH + 1) >= lengths, END)
    labels = source.masked_fill(source == END, -100)
    if is_careful:
        labels = labels.scatter(1, lengths, END)
    return {"input_ids": source, "labels": labels}


def careless(rows):
    return careful(rows, is_careful=False)


for make_batch in (careful, careless):
    torch.manual_seed(0)
    example = make_batch(known[:2])
    print(f"{make_batch.__name__:8}", *(f"{name} {ids.tolist()}" for name, ids in example.items()))

# %%
LONGEST = 20
torch.manual_seed(1)
batch = careful(new)
is_digit, is_end = batch["labels"] >= FIRST, batch["labels"] == END
wanted = nn.functional.pad(batch["labels"].masked_fill(batch["labels"] == -100, PAD), (0, LONGEST - LENGTH - 1))
ended = {}
for name, make_batch in [("END learned", careful), ("END ignored", careless)]:
    model = new_model(pad_token_id=END)
    curves[name], floors[name] = np.array(train(model, make_batch, steps=250)), None
    losses[name] = curves[name][-10:].mean()
    written = write(model, batch["input_ids"], max_length=LONGEST + 1)
    written = nn.functional.pad(written, (0, LONGEST - written.shape[1]), value=PAD)
    exact[name] = (written == wanted).all(dim=1).float().mean().item()
    ended[name] = (written == END).any(dim=1).float().mean().item()
    digits = (written[:, : LENGTH + 1] == batch["labels"])[is_digit].float().mean().item()
    with torch.no_grad():
        logits = model(**batch).logits
    of_end = nn.functional.cross_entropy(logits[is_end], batch["labels"][is_end]).item()
    print(
        f"{name}: loss {losses[name]:.3f}, {exact[name]:.1%} exact, {ended[name]:.1%} end, {digits:.1%} of digits right"
    )
    print(f"  loss of END itself {of_end:.3f}; for {batch['input_ids'][0].tolist()} it writes {written[0].tolist()}")
    assert losses[name] < 0.05 and digits > 0.95
    assert of_end < 0.1 if name == "END learned" else of_end > 3
assert exact["END learned"] > 0.95 and ended["END learned"] > 0.99
assert exact["END ignored"] < 0.01 and ended["END ignored"] < 0.01

# %% [markdown]
# Both losses are low, and both models write the digits of the row. But to the second, END was never the answer: every
# other label told it that END is wrong, so its logit fell. It does not know how to stop, and goes on until somebody
# stops it. If you have seen translations that repeat their last words up to the maximum length, this is the first
# thing to look for.
#
# The loss cannot show it, as it is the loss that leaves END out. Look at one batch of labels: each row must have one
# END.
#
# ## No causal mask
#
# The decoder's self-attention sees all tokens of the target, also those still to be written.
#
# **Write down:** loss and share. Then, for a decoder that has both mistakes, no causal mask *and* no encoder: does its
# loss stop at 2.06 again?

# %%
predicted["no causal mask"] = None, None
predicted["no causal mask, no encoder"] = None, None


# %%
def no_causal_mask(model):
    for layer in model.model.decoder.layers:
        replace(layer.self_attn, lambda given: {"attention_mask": None})
    return model


LAST_OF_SIX = math.log(6) / LENGTH
(peeking,) = run("no causal mask", no_causal_mask)
run("no causal mask, no encoder", lambda model: no_causal_mask(no_encoder(model)), steps=500, floor=LAST_OF_SIX)
assert losses["no causal mask"] < 0.02 and exact["no causal mask"] < 0.05
assert exact["no causal mask, no encoder"] < 0.01
assert -0.02 < losses["no causal mask, no encoder"] - LAST_OF_SIX < 0.25

# %% [markdown]
# The loss is as low as with the mask, but no row is copied. To predict a digit, the decoder reads the row shifted
# by one: START and the first four digits. So the digit that it must predict can be read one place to the right,
# instead of in the source. When it writes, that place is empty.
#
# The proof: give the same weights the mask, and let them predict each digit after the correct ones before it. Only
# the last digit is still predicted as before, since nothing follows it that the mask could hide.

# %%
masked = new_model()
masked.load_state_dict(peeking.state_dict())
shares = {}
with torch.no_grad():
    for name, model in [("as trained", peeking), ("with the mask", masked.eval())]:
        shares[name] = (model(**copy(new)).logits.argmax(dim=-1) == new).float().mean(dim=0)
        print(f"{name:14} digits 1 to 5 right:", *(f"{share:5.0%}" for share in shares[name]))
assert shares["as trained"].min() > 0.98 and shares["with the mask"][:4].mean() < 0.8
assert shares["with the mask"][4] == shares["as trained"][4]

# %% [markdown]
# Without an encoder, too, it still reads four of the five digits in the answer. Only the last one is nowhere to be
# read; it is one of the six digits that are left: $\ln(6) / 5 = 0.36$ nats per token. That is far *below* the floor of
# a decoder without a source, 2.06. A loss below its floor is no success; something sees the answer.

# %%
assert losses["no causal mask, no encoder"] < ANY_ROW / 2

# %% [markdown]
# # All of it
#
# Left, the loss in training on a logarithmic axis, with the floors as dotted lines; right, in the same colors, the
# share of new rows that each model writes exactly. For *padding seen, not in training*, those rows have 95 PAD beside
# them; its loss is that of the model without a mistake.

# %%
print(f"{'':34}{'measured':>16}{'':10}{'you predicted':>16}")
print(f"{'':34}{'loss':>8}{'exact':>8}{'floor':>8}  {'loss':>8}{'exact':>8}")
for name in losses:
    floor = "" if floors[name] is None else f"{floors[name]:.2f}"
    yours = "".join(f"{'-' if one is None else f'{one:.2f}':>8}" for one in predicted.get(name, ()))
    print(f"{name:34}{losses[name]:8.3f}{exact[name]:8.2f}{floor:>8}  {yours}".rstrip())

shown = ["no mistake", "no encoder", "no positions, copy", "not divided, k = 64", "padding seen, not in training"]
shown += ["END ignored", "no causal mask", "no causal mask, no encoder"]
formulas = {ANY_ROW: r"ln(10$\cdot$9$\cdot$8$\cdot$7$\cdot$6) / 5", ANY_ORDER: "ln(5!) / 5", LAST_OF_SIX: "ln(6) / 5"}
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained", width_ratios=[1.6, 1])
for number, name in enumerate(shown):
    color = f"C{number}"
    smooth = np.convolve(curves[name], np.ones(10) / 10, mode="valid")
    look = {"no mistake": {"linewidth": 5, "alpha": 0.4}, "padding seen, not in training": {"linestyle": "--"}}
    left.plot(np.arange(len(smooth)) + 10, smooth, color=color, **look.get(name, {}))
    if floors[name]:
        left.axhline(floors[name], color=color, linestyle=":")
        left.text(252, floors[name], formulas[floors[name]], color=color, va="center", fontsize=9)
    right.barh(number, exact[name], color=color)
    right.text(exact[name] + 0.01, number, f"{exact[name]:.0%}", va="center", fontsize=9)
left.set(yscale="log", xlabel="step", ylabel="loss in training (nats per token)", xlim=(0, 250))
left.set_title("what training shows")
left.grid(alpha=0.3)
right.set_yticks(range(len(shown)), shown)
for number, text in enumerate(right.get_yticklabels()):
    text.set(color=f"C{number}", fontweight="bold")
right.invert_yaxis()
right.set(xlim=(0, 1.15), xlabel="share of new rows exact", title="what the model writes")
plt.show()

# %% [markdown]
# Half of the mistakes have the loss of a correct model. A validation loss is computed in the same way and would not
# show them either. So: **let the model write, early, on examples it has not seen, and count how many are right.**
#
# # Found before training
#
# Each mistake breaks a rule that a model keeps, or not, before it is trained. These four need no more than its logits:
#
# - another source changes them (no encoder);
# - the same source in reverse changes them (no positions);
# - more PAD in the source does not change them (padding);
# - a later target token changes no logits at earlier positions (no causal mask).
#
# The other two you have met above: the variance of the scores does not grow with k, and each row of labels has one
# END.


# %%
@torch.no_grad()
def broken_rules(logits):
    """The names of the rules that `logits(source, target)` breaks, which gives (B,T,V)."""
    source, other, target = new[:100], new[100:200], new[200:300]
    before = logits(source, target)

    def changes(source, target):
        return (logits(source, target) - before).abs().max() > 1e-3

    later = target.clone()
    later[:, -1] = other[:, -1]
    earlier = (logits(source, later) - before)[:, :-1].abs().max() > 1e-3
    keeps = {
        "source": changes(other, target),
        "order": changes(source.flip(1), target),
        "padding": not changes(nn.functional.pad(source, (0, 20), value=PAD), target),
        "causal": not earlier,
    }
    return [name for name, is_kept in keeps.items() if not is_kept]


def padding_seen(model):
    model.config.pad_token_id = None  # then the model does not look for padding
    return model


found = {}
for mistake in (no_mistake, no_encoder, no_positions, not_divided, padding_seen, no_causal_mask):
    model = mistake(new_model()).eval()
    found[mistake.__name__] = broken_rules(lambda s, t, model=model: model(s, decoder_input_ids=t).logits)
    print(f"{mistake.__name__:15} variance of the scores {score_variance(model):5.1f}; rules broken:", end=" ")
    print(*found[mistake.__name__] or ["none"], sep=", ")
    assert (score_variance(model) > 8) == (mistake is not_divided)
assert found == {
    "no_mistake": [],
    "no_encoder": ["source", "order"],
    "no_positions": ["order"],
    "not_divided": [],
    "padding_seen": ["padding"],
    "no_causal_mask": ["causal"],
}

# %% [markdown]
# And your own model, from notebook 5, with new weights:

# %%
torch.manual_seed(0)
mine = checks.part("Transformer")(FIRST + 10, d=64, h=4, f=128, layers=1).eval()
print("rules broken:", broken_rules(mine) or "none")
assert broken_rules(mine) == []

# %% [markdown]
# **Questions.** 1. What is the floor without an encoder if digits may repeat? 2. Only the decoder lacks positions:
# what is the floor now, and can the model reach it? 3. A model follows all the rules, its labels have their END, and the
# loss stops at 2.06. What is wrong?

# %% [markdown] tags=["answer"]
# **Answers.**
#
# 1. $\ln 10 = 2.30$ nats per token: each digit is one of ten, and those before it tell nothing.
# 2. Zero: the source has its order, and what has been written tells which digit comes next, the first of the source
# that is not yet there. It reaches it nearly, as the next cell shows. With repeated digits it would be harder.
# 3. The data: sources and targets that do not belong together, by a shuffle of one and not of the other, say. No test
# of the model finds that. Print some pairs, after the tokenizer and the batching.


# %% tags=["answer"]
def no_positions_in_decoder(model):
    model.model.decoder.embed_positions.table.zero_()
    return model


run("no positions in the decoder", no_positions_in_decoder, floor=0)
assert losses["no positions in the decoder"] < 0.1 and exact["no positions in the decoder"] > 0.9


def shuffled(rows):
    return {"input_ids": rows[torch.randperm(len(rows))], "labels": rows}


run("sources of other rows", no_mistake, shuffled, floor=ANY_ROW)
assert -0.02 < losses["sources of other rows"] - ANY_ROW < 0.2
