"""What train.py chooses where no option says it: the tokens, the size of the model, and how long to train it.

The rule consists of two pure functions over the tables below; docs/LOG.md has the runs that they are from.
"""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple


class Size(NamedTuple):
    """A size of the model, whose feed-forward width is four times `d_model`.

    It is chosen from so many tokens an epoch on (`corpus`), if the time is enough for so many in all (`training`).
    """

    d_model: int
    layers: int
    heads: int
    corpus: float
    training: float


SIZES = {
    "tiny": Size(64, 2, 2, 0, 0),
    "small": Size(128, 3, 4, 3e5, 5e5),
    "medium": Size(256, 4, 4, 5e5, 2e7),
    "base": Size(512, 6, 8, 1e7, 2e8),
    "big": Size(1024, 6, 16, 2e8, 2e9),
}
MODEL = ("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
MODEL += ("encoder_ffn_dim", "decoder_ffn_dim")
# Options that may be free: the rule chooses them if they are not given.
CHOSEN = {"letters", "vocab_size", "joined_pairs", *MODEL, "dropout", "optimizer", "lr_scheduler_type", "warmup_steps"}
CHOSEN |= {"max_steps", "num_train_epochs", "per_device_train_max_tokens", "eval_steps", "early_stopping_patience"}
CHOSEN |= {"metric_for_best_model"}

DEFAULT_HOURS = 1.0
USABLE = 0.85  # share of the time for training; the rest is for evaluation, checkpoints and the start
STEPS = 3000  # about so many steps are enough for a short run; a longer one has larger batches
SMALLEST_BATCH, LARGEST_BATCH, LARGEST_BATCH_ON_GPU = 1024, 4096, 16_384  # tokens
EVALUATIONS = 8
JOINED = 0.2  # share of joined pairs


@dataclass(frozen=True)
class Choice:
    """Options that are chosen together, and why."""

    values: dict[str, object]
    reason: str


@dataclass(frozen=True)
class Corpus:
    """What the rule reads of the training pairs. Lengths are means, of the sources and of the targets.

    Attributes:
        pairs: Their number.
        words, characters: Of a text.
        sentences: The largest number that is usual in a source.
        held_out: The number of validation pairs.
    """

    pairs: int
    words: tuple[float, float]
    characters: tuple[float, float]
    sentences: int
    held_out: int


def choose_tokens(corpus: Corpus, free: Set[str]) -> list[Choice]:
    """Letters, or the size of the vocabulary, and joined pairs, as far as these options are `free`."""
    words, characters = min(zip(corpus.words, corpus.characters, strict=True))
    choices = []
    if "letters" in free and words < 1.5 and characters <= 15:
        choices.append(Choice({"letters": True}, f"one side has single words, of {characters:.0f} characters"))
    if "vocab_size" in free and not choices:
        # Where no spaces separate words, as in Chinese, a few characters count as one.
        words = corpus.pairs * sum(max(w, c / 6) for w, c in zip(corpus.words, corpus.characters, strict=True)) / 2
        size = min(max(500 * round(4.5 * math.sqrt(words) / 500), 500), 32_000)
        choices.append(Choice({"vocab_size": size}, f"about 4.5 times the square root of {words:,.0f} words a side"))
    if "joined_pairs" in free and corpus.sentences == 1 and min(corpus.words) >= 3:
        reason = "sources are single sentences, and several must be translated too, however people join them"
        choices.append(Choice({"joined_pairs": JOINED}, reason))
    return choices


def choose_training(
    corpus: Corpus,
    tokens: float,
    given: Mapping[str, object],
    free: Set[str],
    batches_per_step: int,
    on_gpu: bool,
    speed: Callable[[Mapping[str, object]], float],
) -> list[Choice]:
    """The size of the model, and how it is trained, as far as these options are `free`.

    Args:
        tokens: Of an epoch, those of the longer side of each pair.
        given: All options; those that are free are not read.
        batches_per_step: Processes times accumulated batches.
        speed: Measures how many tokens a second all processes train on, with these options of the model and the
            optimizer instead of those that are given.
    """
    enough = tokens * useful_epochs(tokens)
    hours = given["hours"] or DEFAULT_HOURS
    asked = None  # tokens of a run whose length is given
    if "max_steps" not in free:
        asked = given["max_steps"] * batches_per_step * (given["per_device_train_max_tokens"] or SMALLEST_BATCH)
    elif "num_train_epochs" not in free:
        asked = tokens * given["num_train_epochs"]

    choices, optimizer = [], {}
    if "optimizer" in free:
        optimizer = {"optimizer": "muon"}
        choices.append(Choice(optimizer, "it learns faster than Adam in short runs"))
    if given["size"] in SIZES:
        candidates = [given["size"]]
    else:
        candidates = [name for name in reversed(SIZES) if tokens >= SIZES[name].corpus]
    for name in candidates:
        model = model_options(SIZES[name], given, free)
        trained = asked if asked is not None else min(enough, hours * 3600 * USABLE * speed(model | optimizer))
        if trained >= min(SIZES[name].training, enough):
            break
    reason = f"{name}, for {tokens:,.0f} tokens an epoch"
    if given["size"] in SIZES:
        reason = f"--size {name}"
    elif name != candidates[0]:
        reason += f"; {candidates[0]} would need more time"
    chosen = {option: model[option] for option in MODEL if option in free}
    if chosen:
        choices.append(Choice(chosen, reason))
    epochs = trained / tokens
    if "dropout" in free:
        value = 0.1 if epochs < 25 or model["d_model"] <= 64 else 0.2
        choices.append(Choice({"dropout": value}, f"each pair is read about {epochs:.1f} times"))
    largest = LARGEST_BATCH_ON_GPU if on_gpu else LARGEST_BATCH
    batch = given["per_device_train_max_tokens"]
    if "per_device_train_max_tokens" in free:
        batch = 2 ** round(math.log2(max(trained / STEPS / batches_per_step, 1)))
        batch = min(max(batch, SMALLEST_BATCH), largest)
        choices.append(Choice({"per_device_train_max_tokens": batch}, f"at least about {STEPS:,} steps"))
    batch = batch or largest  # auto
    steps = max(1, round(trained / batch / batches_per_step))
    if "max_steps" in free and "num_train_epochs" in free:
        if trained < enough:
            limit = f"{hours:g} hours" if hours != 1 else "1 hour"
            reason = f"{limit} on this machine; {enough / trained * hours:.1f} would be useful (--hours)"
        else:
            reason = "more would bring little"
        choices.append(Choice({"max_steps": steps}, f"{epochs:.1f} epochs; {reason}"))
    elif "max_steps" not in free:
        steps = given["max_steps"]
    if "lr_scheduler_type" in free:
        choices.append(Choice({"lr_scheduler_type": "linear"}, "a short run should end at a low learning rate"))
    if "warmup_steps" in free:
        choices.append(Choice({"warmup_steps": max(1, steps // 10)}, "a tenth of the steps"))
    if "metric_for_best_model" in free and given["letters"]:
        choices.append(Choice({"metric_for_best_model": "chrf"}, "BLEU counts words"))
    if "eval_steps" in free:
        # Translating a pair takes about as long as training on it.
        affordable = int(0.1 * epochs * corpus.pairs / max(corpus.held_out, 1))
        count = min(max(affordable, 1), EVALUATIONS, steps)
        choices.append(Choice({"eval_steps": -(-steps // count)}, f"{count} evaluations"))
        if "early_stopping_patience" in free and count > 3:
            choices.append(Choice({"early_stopping_patience": 3}, "keeps the best weights, and stops if none improve"))
    return choices


def useful_epochs(tokens: float) -> float:
    """After how many epochs of so many tokens more training brings little."""
    return min(max(40 * (5e5 / tokens) ** 0.25, 3), 60)


def model_options(size: Size, given: Mapping[str, object], free: Set[str]) -> dict[str, int]:
    """The options of a model: those that are given, and the others by its size, or by `d_model` if that is given."""
    width = size.d_model if "d_model" in free else given["d_model"]
    heads = math.gcd(size.heads, width)
    values = (width, size.layers, size.layers, heads, heads, 4 * width, 4 * width)
    return {name: value if name in free else given[name] for name, value in zip(MODEL, values, strict=True)}
