"""What the mistakes of the implementations this model grew from would break here, in numbers (docs/seeds.md).

Run: pytest -m slow tests/test_seeds_wrong.py -s, which prints the numbers; the page must tell the same. Each mistake
is made in our own model, by a hook or a patched method, and stands beside the model as it is.
"""

import json
import math
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import median

import pytest
import torch
from test_seeds import END, FIRST_SYMBOL, PAD, SYMBOLS, collate, small_model, train

from vanilla_transformer import Translator
from vanilla_transformer.data.tokenizer import special_token_ids, train_tokenizer
from vanilla_transformer.training.optimization import learning_rate_schedule

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")


FAR = {"factor": 10, "share": 0.3}  # how far apart medians of five models may be
KINDS = {"floor": "known", "uniform": "known", "positions": "known", "exact": "share", "copied": "share"}


def say(what: str, factor: float = 3, share: float = 0.1, **numbers: float):
    """Prints a line of numbers, and holds those of the page against it.

    What is known beforehand must be told to the last digit. Training differs a little between CPUs: a share may differ
    by `share`, a loss or a difference of logits by `factor`, or by what is nothing beside them.
    """
    print(f"{what}: " + ", ".join(f"{name} {number:.4f}" for name, number in numbers.items()))
    (line,) = re.findall(rf"^{re.escape(what)}: (.*)$", PAGE, re.MULTILINE)
    told = dict(re.findall(r"(\w+) ([\d.]+)", line))
    assert told.keys() == numbers.keys()
    for name, number in numbers.items():
        near = {
            "known": abs(float(told[name]) - number) <= 1e-4,
            "share": abs(float(told[name]) - number) <= share,
            "size": number / factor - 2e-3 <= float(told[name]) <= factor * number + 2e-3,
        }
        assert near[KINDS.get(name, "size")], (what, name)


# ------------------------------------------------------------------------------------------------------- the mistakes


def blind(model):
    """Cross-attention that gets zeros in the place of the encoder's output: the same for every source."""
    for layer in model.model.decoder.layers:
        layer.encoder_attn.register_forward_pre_hook(lambda _, args: (args[0], torch.zeros_like(args[1])))
    return model


def looking_at_itself(model):
    """Cross-attention that attends to the decoder's own states, and for want of a causal mask to all of them."""

    def attend_to_itself(_, args, kwargs):
        return (args[0], args[0]), kwargs | {"attention_mask": None}

    for layer in model.model.decoder.layers:
        layer.encoder_attn.register_forward_pre_hook(attend_to_itself, with_kwargs=True)
    return model


def without_positions(model):
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_positions.table.zero_()
    return model


def scaled_by_length(model):
    """Embeddings times the root of the sequence length, where the paper has the root of d_model."""

    def patch(stack):
        right = stack.add_positions

        def wrong(inputs_embeds, position_ids, length):
            stack.embed_scale = math.sqrt(inputs_embeds.shape[1])
            return right(inputs_embeds, position_ids, length)

        stack.add_positions = wrong

    patch(model.model.encoder)
    patch(model.model.decoder)
    return model


def as_it_is(model):
    return model


# ----------------------------------------------------------------------- the copy task of the seed, two rows memorized

TWO_ROWS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 8]])


def memorized(change, **inputs) -> tuple[torch.nn.Module, list[float]]:
    """The model of the seed (see tests/test_seeds.py), changed and trained on the two rows; and its losses."""
    sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "activation_function": "gelu"}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "tie_word_embeddings": False}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": 0}
    model = change(small_model(vocab_size=10, **sizes, **heads, **tokens)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    losses = []
    for _ in range(101):
        loss = model(TWO_ROWS, **{"labels": TWO_ROWS} | inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), losses


def test_a_decoder_that_does_not_see_the_source_stays_above_a_floor():
    """Which of the two rows it is, nobody tells it before the first token: 2 ln 2 nats for 10 tokens."""
    _, right = memorized(as_it_is)
    _, wrong = memorized(blind)
    floor = 2 * math.log(2) / 10
    say("two rows, as it is", step_0=right[0], step_100=right[100])
    say("two rows, no encoder", step_0=wrong[0], step_100=wrong[100], floor=floor)
    assert right[100] <= 0.0025
    assert floor < wrong[100] < floor + 0.01


@pytest.mark.parametrize(
    ("name", "change", "inputs"),
    [
        ("cross-attention to the decoder itself", looking_at_itself, {}),
        ("the first token given", blind, {"decoder_input_ids": TWO_ROWS[:, :-1], "labels": TWO_ROWS[:, 1:]}),
        ("targets not shifted", blind, {"decoder_input_ids": TWO_ROWS}),
    ],
    ids=["itself", "given", "unshifted"],
)
def test_the_seeds_loss_can_be_reached_without_the_source(name, change, inputs):
    model, losses = memorized(change, **inputs)
    reads = inputs.get("decoder_input_ids", torch.tensor([[0, 3, 1, 4, 1], [0, 9, 2, 6, 5]]))
    with torch.no_grad():
        one, other = model(TWO_ROWS, decoder_input_ids=reads), model(TWO_ROWS.flip(0), decoder_input_ids=reads)
    assert torch.equal(one.logits, other.logits)  # whatever the source
    written = model.generate(TWO_ROWS, max_new_tokens=5, do_sample=False, use_cache=False)[:, 1:]
    assert torch.equal(written[0], written[1])
    copied = (written == TWO_ROWS).all(dim=1).float().mean().item()
    say(f"two rows, {name}", step_100=losses[100], copied=copied)
    assert losses[100] <= 0.0035
    assert copied == 0


# ------------------------------------------------------------------------------ five of ten symbols, never seen before

LENGTH = 5


def draw(count: int) -> torch.Tensor:
    """(count, 5): each row five symbols of the ten, all different, in any order."""
    return FIRST_SYMBOL + torch.rand(count, SYMBOLS).argsort(dim=1)[:, :LENGTH]


def new_rows(count: int) -> torch.Tensor:
    """The same rows each time, whatever was drawn before."""
    torch.manual_seed(1)
    return draw(count)


def with_pads(sources: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.pad(sources, (0, count), value=PAD)


def real(sources: torch.Tensor) -> torch.Tensor:
    return (sources != PAD).long()


@cache
def trained(change, task=None, pads: bool = False, seed: int = 0):
    """A model that has seen 16,000 rows to copy, or to do `task` with; `pads`: up to five, which it may attend to."""
    torch.manual_seed(seed)
    model = change(small_model(vocab_size=FIRST_SYMBOL + SYMBOLS))
    steps = 250

    def batches():
        for _ in range(steps):
            rows = draw(64)
            sources = with_pads(rows, int(torch.randint(0, 6, ()))) if pads else rows
            labels = rows if task is None else task(rows)
            yield {"input_ids": sources, "attention_mask": torch.ones_like(sources), "labels": labels}

    train(model, batches(), learning_rate_schedule("cosine", 5e-3, 35, steps))
    return model


@torch.no_grad()
def score(model, pads: int = 0, attended: bool = False, task=None) -> dict[str, float]:
    """The loss, and the share of 200 new rows that come out exactly."""
    rows = new_rows(200)
    sources = with_pads(rows, pads)
    mask = torch.ones_like(sources) if attended else real(sources)
    labels = rows if task is None else task(rows)
    written = model.generate(
        sources,
        attention_mask=mask,
        max_new_tokens=LENGTH,
        min_new_tokens=LENGTH,
        do_sample=False,
        use_cache=False,  # what is cached of cross-attention would hide that it looks at the decoder
    )
    exact = (written[:, 1:] == labels).all(dim=1).float().mean().item()
    return {"loss": model(sources, mask, labels=labels).loss.item(), "exact": exact}


def median_of_five(measure: Callable[..., dict[str, float]], change, pads: bool = False) -> dict[str, float]:
    """Of five models that were begun differently, for what depends on that more than on anything else."""
    found = [measure(trained(change, pads=pads, seed=seed)) for seed in range(5)]
    return {name: median(one[name] for one in found) for name in found[0]}


def test_new_rows_are_copied():
    right = score(trained(as_it_is))
    say("new rows, as it is", **right)
    assert right["loss"] < 0.05 and right["exact"] >= 0.99


def test_nothing_new_is_copied_by_a_decoder_that_does_not_see_the_encoder():
    """Any five of the ten symbols in any order are as likely: ln(10 9 8 7 6) / 5 nats a token."""
    wrong = score(trained(blind))
    floor = math.log(math.perm(10, 5)) / 5
    say("new rows, no encoder", **wrong, floor=floor)
    assert wrong["loss"] > floor - 0.02 and wrong["exact"] == 0


def test_a_decoder_that_looks_at_itself_learns_to_look_ahead():
    """All symbols but the last are read, as inputs of later positions; the last is one of six: ln 6 / 5."""
    wrong = score(trained(looking_at_itself))
    floor = math.log(6) / 5
    say("new rows, cross-attention to the decoder itself", **wrong, floor=floor)
    assert floor - 0.02 < wrong["loss"] < floor + 0.3
    assert wrong["exact"] == 0  # nothing lies ahead when it writes


def test_without_positions_the_source_is_a_bag_of_symbols():
    """Which five symbols is known, and not their order: ln(5!) / 5."""
    right, wrong = trained(as_it_is), trained(without_positions)
    rows = new_rows(50)
    with torch.no_grad():
        differences = [
            (model(rows, labels=rows).logits - model(rows.flip(1), labels=rows).logits).abs().max().item()
            for model in (right, wrong)
        ]
    say("logits of a source and its reverse differ by", as_it_is=differences[0], without_positions=differences[1])
    assert differences[1] < 1e-4 and differences[0] > 1
    scores = score(wrong)
    floor = math.log(math.factorial(5)) / 5
    say("new rows, no positions", **scores, floor=floor)
    assert scores["loss"] > floor - 0.02 and scores["exact"] < 0.05


def test_a_task_without_order_does_not_show_that_positions_are_missing():
    def in_order(rows):
        return rows.sort(dim=1).values

    wrong = score(trained(without_positions, task=in_order), task=in_order)
    say("new rows sorted, no positions", **wrong)
    assert wrong["loss"] < 0.1 and wrong["exact"] > 0.9


# ------------------------------------------------------------------------------- the scale of the embeddings, and pads


@torch.no_grad()
def differences(model) -> dict[str, float]:
    """How much the logits change by what must change none: pads, a cache, a later token."""
    rows = new_rows(20)
    start = torch.ones(20, 1, dtype=torch.long)
    alone = model(rows, decoder_input_ids=torch.cat([start, rows], dim=1), use_cache=False).logits
    padded = with_pads(rows, 35)
    beside = model(padded, real(padded), torch.cat([start, rows], dim=1), use_cache=False).logits
    earlier = model(rows, decoder_input_ids=start, use_cache=False).logits
    cache = model(rows, decoder_input_ids=start, use_cache=True).past_key_values
    cached = model(rows, decoder_input_ids=rows, past_key_values=cache, use_cache=True).logits

    def largest(ours, theirs):
        return (ours - theirs).abs().max().item()

    return {
        "pads": largest(beside, alone),
        "later": largest(earlier, alone[:, :1]),
        "cache": largest(cached, alone[:, 1:]),
    }


def test_a_scale_by_the_length_makes_logits_depend_on_padding_and_on_what_comes_later():
    right, wrong = differences(trained(as_it_is)), median_of_five(differences, scaled_by_length)
    say("logits as it is change by", **right)
    say("logits scaled by the length change by", **wrong, **FAR)
    assert max(right.values()) < 1e-4
    assert min(wrong.values()) > 0.1


@pytest.mark.parametrize(("pads", "least", "most"), [(0, 0.9, 1), (5, 0.5, 1), (20, 0.1, 0.95), (95, 0, 0.4)])
def test_a_scale_by_the_length_copies_only_among_sentences_of_its_length(pads, least, most):
    """It learns as well as any, where all rows are of one length. Masked pads still scale the symbols."""
    right = score(trained(as_it_is), pads)
    wrong = median_of_five(partial(score, pads=pads), scaled_by_length)
    say(f"{pads} pads, masked, scaled by the length", **wrong, **FAR)
    assert right["exact"] >= 0.99
    assert least <= wrong["exact"] <= most


def test_embeddings_have_the_size_of_positions():
    """What the scale is for: of initial weights with variance 1/d, times sqrt(d), against sines of mean square 1/2."""
    torch.manual_seed(0)
    stack = small_model(vocab_size=5000).model.encoder
    symbols = stack.embed_tokens.weight.detach()
    positions = stack.embed_positions.table.square().mean().item()
    scaled = (symbols * stack.embed_scale).square().mean().item()
    by_length = (symbols * math.sqrt(LENGTH)).square().mean().item()
    say("mean squares", positions=positions, embeddings=scaled, by_length_5=by_length)
    assert positions == pytest.approx(0.5, abs=1e-4)
    assert scaled == pytest.approx(1, rel=0.02)
    assert by_length == pytest.approx(LENGTH / 64, rel=0.02)


@pytest.mark.parametrize(("pads", "most"), [(5, 1), (20, 1), (95, 0.9)])
def test_pads_that_are_attended_to_raise_the_loss_and_many_change_the_translation(pads, most):
    """Masked, however many there are, they change nothing."""
    assert score(trained(as_it_is), pads) == pytest.approx(score(trained(as_it_is)), abs=1e-5)
    right = median_of_five(score, as_it_is)
    wrong = median_of_five(partial(score, pads=pads, attended=True), as_it_is)
    say(f"{pads} pads, attended to", **wrong, **FAR)
    assert wrong["loss"] > right["loss"] + 1e-3
    assert wrong["exact"] <= most


def test_who_attends_to_pads_in_training_learns_to_overlook_them_and_never_quite():
    alone = median_of_five(score, as_it_is, pads=True)
    beside = median_of_five(partial(score, pads=95, attended=True), as_it_is, pads=True)
    say("95 pads, attended to, as in training", **beside, **FAR)
    assert beside["loss"] > alone["loss"] + 1e-4
    rows = new_rows(20)
    padded = with_pads(rows, 95)

    @torch.no_grad()
    def difference(model) -> dict[str, float]:
        attended = model(padded, torch.ones_like(padded), labels=rows).logits
        return {"pads": (attended - model(rows, labels=rows).logits).abs().max().item()}

    found = median_of_five(difference, as_it_is, pads=True)
    say("logits with 95 pads, attended to, as in training, change by", **found, **FAR)
    assert found["pads"] > 0.05


# -------------------------------------------------------------------------------- where nothing was learned, or not all


def test_a_model_that_was_not_trained_writes_noise():
    torch.manual_seed(0)
    scores = score(small_model(vocab_size=FIRST_SYMBOL + SYMBOLS).eval())
    uniform = math.log(FIRST_SYMBOL + SYMBOLS)
    say("new rows, not trained", **scores, uniform=uniform)
    assert scores["exact"] == 0 and scores["loss"] > uniform


@pytest.mark.parametrize("end_is_learned", [True, False], ids=["learned", "ignored"])
def test_where_the_loss_ignores_padding_by_its_token_an_end_that_pads_is_never_written(end_is_learned):
    """Padding is the end token. A loss that leaves out that token leaves out the end of every row too."""
    torch.manual_seed(0)
    model = small_model(vocab_size=FIRST_SYMBOL + SYMBOLS, pad_token_id=END)
    ends = torch.full((64, 1), END if end_is_learned else -100)

    def batches():
        for _ in range(200):
            rows = draw(64)
            sources = torch.nn.functional.pad(rows, (0, 1), value=END)
            yield {"input_ids": sources, "labels": torch.cat([rows, ends], dim=1)}

    train(model, batches(), learning_rate_schedule("cosine", 5e-3, 35, 200))
    sources = torch.nn.functional.pad(new_rows(200), (0, 1), value=END)
    written = model.generate(sources, max_new_tokens=20, do_sample=False)[:, 1:]
    ended = (written == END).any(dim=1).float().mean().item()
    say(f"rows that end, the end {'learned' if end_is_learned else 'ignored'}", ended=ended)
    assert ended == end_is_learned


def test_five_pairs_in_thirty_passes():
    """One pair a step, 30 times each: 150 steps."""
    with open(ROOT / "sample_dataset" / "train.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(next(lines)) for _ in range(5)]
    pairs = [(row["en"], row["de"]) for row in rows]
    tokenizer = train_tokenizer([text for pair in pairs for text in pair], vocab_size=400)
    model = small_model(vocab_size=len(tokenizer), dropout=0.1, **special_token_ids(tokenizer))
    schedule = learning_rate_schedule("inverse_sqrt", 2e-3, 40, 150)
    train(model, [collate(tokenizer, [pair]) for _ in range(30) for pair in pairs], schedule, label_smoothing=0.1)
    with torch.no_grad():
        loss = model(**collate(tokenizer, pairs)).loss.item()
    translations = Translator(model, tokenizer)([source for source, _ in pairs])
    exact = sum(t == target for t, (_, target) in zip(translations, pairs, strict=True)) / 5
    say("five pairs after 30 passes", loss=loss, exact=exact)
    assert exact == 1
