"""The options that train.py chooses if they are not given: tokens, the size of the model, and how long to train it.

The rule is `choose_tokens`, `choose_lengths` and `choose_training`, or `choose_fine_tuning` for a trained model;
docs/LOG.md has the runs that its numbers are from.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean, median_high
from typing import NamedTuple


class Size(NamedTuple):
    """A size of the model, whose feed-forward width is four times `d_model`.

    It is chosen if an epoch has at least `epoch_tokens`, and the run has time for `run_tokens`, or for fewer if more
    would not help.
    """

    d_model: int
    layers: int
    heads: int
    epoch_tokens: float
    run_tokens: float


SIZES = {
    "tiny": Size(64, 2, 2, 0, 0),
    "small": Size(128, 3, 4, 3e5, 5e5),
    "medium": Size(256, 4, 4, 5e5, 2e7),
    "base": Size(512, 6, 8, 1e7, 2e8),
    "big": Size(1024, 6, 16, 2e8, 2e9),
}
MODEL = ("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
MODEL += ("encoder_ffn_dim", "decoder_ffn_dim")
# The rule chooses these if they are not given; of max_steps and num_train_epochs, one.
CHOOSABLE = {"letters", "vocab_size", "split_digits", "joined_pairs", "max_source_length", "max_target_length", *MODEL}
CHOOSABLE |= {"dropout", "optimizer", "lr_scheduler_type", "max_steps", "num_train_epochs", "warmup_steps"}
CHOOSABLE |= {"per_device_train_max_tokens", "eval_steps", "early_stopping_patience", "metric_for_best_model"}
# The part of these for fine-tuning, where the length has a default: max_steps is here to tell whether it was given.
FINE_TUNING = {"max_source_length", "max_target_length", "lr_scheduler_type", "max_steps", "warmup_steps"}
FINE_TUNING |= {"per_device_train_max_tokens", "eval_steps", "early_stopping_patience"}

DEFAULT_HOURS = 1.0
TRAINING_SHARE = 0.85  # of the time; the rest is for evaluation, checkpoints and the start
STEPS = 3000  # about this many are enough for a short run; a longer one has larger batches
SMALLEST_BATCH, USUAL_BATCH, LARGEST_BATCH, LARGEST_BATCH_ON_GPU = 1024, 2048, 4096, 16_384  # tokens
EVALUATIONS = 8
SAME_LETTERS = 0.8  # above this share of pairs whose sides have the same letters, tokens are letters
JOINED = 0.2  # share of joined pairs
IN_WORDS = 0.6  # in sentences, at least this share of the characters stands in words
FEW_PAIRS, FEW_EPOCHS = 5000, 3
FEWEST_STEPS = 300  # after 60, a model does not know 50 pairs by heart; after 300, it does
MANY_EPOCHS = 25  # from here on, a model overfits
UNDERFIT_EPOCHS = 10  # up to here, a model underfits: a guess between 9 and 17
LIMITS, FITTING = (128, 256, 512, 1024), 0.99  # tokens of a source or target; the share of texts that must fit


@dataclass(frozen=True)
class Choice:
    """Options that are chosen together, and why."""

    values: dict[str, object]
    reason: str


@dataclass(frozen=True)
class Corpus:
    """What the rule must know of the training pairs. Pairs of numbers are (of sources, of targets).

    Attributes:
        pairs: The number of pairs.
        frequent_words: The number of words that occur at least five times, on both sides together.
        words, characters: The mean numbers of a text.
        sentences: The largest number of sentences, or of lines, that at least 1 % of the sources have.
        held_out: The number of validation pairs.
        same_letters: The share of pairs whose sides differ in case, accents, spaces and punctuation only.
        hidden_words: The mean number of words of a text that no spaces separate.
        mixes_languages: Whether files translate in different directions, or at least 1 % of the sources begin with
            tags, such as `>>de<<`, or a tenth with a task, such as `translate English to German:`.
        in_words: The share of the visible characters that stand in words of two letters and more.
        repeated: The share of the pairs that repeat an earlier one.
    """

    pairs: int
    frequent_words: int
    words: tuple[float, float]
    characters: tuple[float, float]
    sentences: int
    held_out: int
    same_letters: float = 0.0
    hidden_words: tuple[float, float] = (0.0, 0.0)
    mixes_languages: bool = False
    in_words: tuple[float, float] = (1.0, 1.0)
    repeated: float = 0.0

    @property
    def lengths(self) -> tuple[float, float]:
        """All words of a text, on average."""
        return tuple(map(sum, zip(self.words, self.hidden_words, strict=True)))

    @property
    def has_sentences(self) -> bool:
        """Whether the texts are sentences rather than words, phrases, numbers or spelled words."""
        return min(self.lengths) >= 3 and min(self.in_words) >= IN_WORDS


def among(choices: list[Choice], free: Set[str]) -> list[Choice]:
    """The choices of those options that are free."""
    values = [{name: value for name, value in choice.values.items() if name in free} for choice in choices]
    return [Choice(some, choice.reason) for some, choice in zip(values, choices, strict=True) if some]


def choose_tokens(corpus: Corpus, free: Set[str]) -> list[Choice]:
    """Letters, or the size of the vocabulary and digits, and joined pairs, as far as these options are `free`."""
    (words, characters, hidden), other = sorted(zip(corpus.words, corpus.characters, corpus.hidden_words, strict=True))
    # The other side must be a word, too, perhaps with tags, or spelled sound by sound, not a sentence. A long word of
    # a script without spaces counts as up to four.
    is_word = (other[0] < 3 and other[0] + other[2] < 5) or other[1] / other[0] < 3.5
    choices, reason = [], ""
    if words < 1.5 and 0 < characters <= 15 and is_word and not corpus.has_sentences:
        what = "has no spaces between words" if hidden else "is single words"
        reason = f"one side {what}, of {characters:.0f} characters on average"
    elif corpus.same_letters > SAME_LETTERS and max(corpus.characters) <= 200:
        reason = "most pairs differ in case, accents, spaces or punctuation only"
    has_letters = "letters" in free and bool(reason)
    if has_letters:
        choices.append(Choice({"letters": True}, reason))
    if "vocab_size" in free and not has_letters:
        size = min(max(500 * round(corpus.frequent_words / 500), 500), 32_000)
        reason = f"about {corpus.frequent_words:,} words occur at least five times"
        choices.append(Choice({"vocab_size": size}, reason))
    if "split_digits" in free and not has_letters:
        choices.append(Choice({"split_digits": True}, "numbers are easier to copy and to compute digit by digit"))
    if "joined_pairs" in free and corpus.sentences == 1 and corpus.has_sentences and not corpus.mixes_languages:
        reason = "sources are single sentences; joined pairs teach the model to translate several at once"
        choices.append(Choice({"joined_pairs": JOINED}, reason))
    return choices


def choose_lengths(
    lengths: list[tuple[int, int]], values: Mapping[str, object], free: Set[str], most: int = LIMITS[-1]
) -> list[Choice]:
    """Limits for sources and targets, if the default is too low for more than 1 % of them or for three usual texts,
    joined, or too high for the model.

    `lengths` are the tokens of the source and the target of some pairs. The positions of the model end at `most`.
    """
    names = "max_source_length", "max_target_length"
    pairs = [dict(zip(names, pair, strict=True)) for pair in lengths]
    # A limit that is given drops pairs, whose other side need not fit.
    pairs = [pair for pair in pairs if all(name in free or pair[name] <= values[name] for name in names)]
    possible = [limit for limit in LIMITS if limit < most] + [most]
    choices = []
    for name in names:
        side, text = sorted(pair[name] for pair in pairs), name.split("_")[1]  # source or target
        if name not in free:
            continue
        side = side or [0]
        needed = side[math.ceil(FITTING * len(side)) - 1]
        long = sum(length > LIMITS[0] for length in side) / len(side)
        reason = f"{long:.0%} of the {text}s have more than {LIMITS[0]} tokens"
        kept = [sum(length <= limit for length in side) for limit in possible]
        # The first that is enough or, if none is, the first that keeps as many as the last.
        limit = next((limit for limit in possible if limit >= needed), possible[kept.index(kept[-1])])
        joined = 3 * median_high(side) if values["joined_pairs"] else 0
        if joined > limit:
            limit = next((limit for limit in possible if limit >= joined), possible[-1])
            reason = f"three usual {text}s, joined, should fit{'' if joined <= limit else ' as far as possible'}"
        lost = sum(length > limit for length in side) / len(side)
        if lost > 1 - FITTING:
            reason += f"; {lost:.0%} exceed {most:,} and are dropped"
        if limit < LIMITS[0]:
            reason = "the positions of the model end there"
        if limit != LIMITS[0] or lost > 1 - FITTING:
            choices.append(Choice({name: limit}, reason))
        # A pair whose source is too long needs no room for its target.
        pairs = [pair for pair in pairs if pair[name] <= limit]
    return choices


@dataclass(frozen=True)
class Situation:
    """What the choices for training depend on.

    Attributes:
        corpus: What the pairs are like.
        tokens: Those of the longer sides of all pairs: an epoch.
        lengths: Tokens of the longer side of some pairs.
        values: Those of all options; those that are free have their defaults, or were chosen before.
        free: The options to choose.
        batches_per_step: Processes times accumulated batches.
        largest_batch: The most tokens of a batch to choose.
        speed: Measures the tokens a second of all processes together, with options of the model and the optimizer that
            replace the given ones; also returns the largest batch to choose, of those that fit into memory.
    """

    corpus: Corpus
    tokens: float
    lengths: Sequence[float]
    values: Mapping[str, object]
    free: Set[str]
    batches_per_step: int
    largest_batch: int
    speed: Callable[[Mapping[str, object]], tuple[float, int]]

    @property
    def hours(self) -> float:
        return self.values["hours"] or DEFAULT_HOURS

    @property
    def distinct(self) -> float:
        """The tokens of an epoch without pairs that repeat an earlier one."""
        return max(self.tokens * (1 - self.corpus.repeated), 1)

    @property
    def useful(self) -> float:
        """The tokens of a run after which more would bring little."""
        epochs = min(max(40 * (5e5 / self.distinct) ** 0.25, FEW_EPOCHS), 60)
        batch = SMALLEST_BATCH if "per_device_train_max_tokens" in self.free else self.given_batch
        return max(self.distinct * epochs, FEWEST_STEPS * self.batches_per_step * self.held(batch))

    @property
    def asked(self) -> float | None:
        """The tokens of a run whose length is given or, in fine-tuning, has a default."""
        if "max_steps" not in self.free:
            batch = USUAL_BATCH if "per_device_train_max_tokens" in self.free else self.given_batch
            return self.values["max_steps"] * self.batches_per_step * self.held(batch)
        return None if "num_train_epochs" in self.free else self.tokens * self.values["num_train_epochs"]

    @property
    def given_batch(self) -> int:
        return self.values["per_device_train_max_tokens"] or self.largest_batch  # auto

    @property
    def length(self) -> float:
        return fmean(self.lengths)

    def held(self, batch: int) -> float:
        """The tokens that a batch of at most `batch` has on average: only whole pairs fit into it, those in it have
        similar lengths, and it has no more than all pairs."""
        share = fmean(1 / max(1, batch // length) for length in self.lengths)  # of a batch, for each pair
        return min(self.length / share, self.tokens)


def choose_training(situation: Situation) -> tuple[list[Choice], list[str]]:
    """The size of the model and how it is trained, and warnings if a good model is unlikely."""
    reason = "it learns faster than Adam in short runs"
    if (rate := situation.values["learning_rate"]) is not None:
        reason += f"; its usual rate is 5e-3 up to a d_model of 128; if you chose --learning_rate {rate:g} for Adam, "
        reason += "give --optimizer adamw"
    optimizer = Choice({"optimizer": "muon"}, reason)
    size, trained, largest_batch = choose_size(situation, optimizer.values if "optimizer" in situation.free else {})
    width = size.values["d_model"]
    epochs = trained / situation.distinct
    dropout, reason = 0.1, f"each pair is read about {epochs:.1f} times"
    if width <= SIZES["tiny"].d_model:
        reason = "a narrow model needs little"
    elif situation.values["teacher"]:
        reason = "with soft targets, a model overfits less"
    elif epochs >= MANY_EPOCHS:
        dropout = 0.2
    elif epochs <= UNDERFIT_EPOCHS:
        dropout = 0.05
    choices = [optimizer, size, Choice({"dropout": dropout}, reason)]
    choices += choose_steps(situation, trained, largest_batch)
    if situation.values["letters"]:
        choices.append(Choice({"metric_for_best_model": "chrf"}, "BLEU counts words"))
    doubts = []
    pairs = round(situation.corpus.pairs * (1 - situation.corpus.repeated))
    if pairs < FEW_PAIRS and situation.corpus.has_sentences:
        doubts.append(
            f"{pairs:,} different pairs are few to learn from. What helps: more pairs, "
            "back-translations (--train_file_tags), or a trained model to begin with (--model_name_or_path)."
        )
    if situation.asked is None and trained < FEW_EPOCHS * situation.distinct:
        doubts.append(
            f"in --hours {situation.hours:g}, this machine reads each pair {epochs:.1f} times, too few for a good "
            "model; give it more hours" + (", or a smaller --size." if width > SIZES["tiny"].d_model else ".")
        )
    return among(choices, situation.free), doubts


def choose_fine_tuning(situation: Situation) -> list[Choice]:
    """The batch, the schedule and the evaluations of a model that is trained further, for a length that is given."""
    choices = choose_steps(situation, situation.asked, LARGEST_BATCH)  # on a GPU, too: no larger one was tried
    return among(choices, situation.free)


def choose_size(situation: Situation, optimizer: dict) -> tuple[Choice, float, int]:
    """The largest size that the data and the time are enough for, the tokens to train it on, and the largest batch."""
    asked, useful, why, reason = situation.asked, situation.useful, "", ""
    largest_batch = situation.largest_batch
    names = [name for name in reversed(SIZES) if situation.distinct >= SIZES[name].epoch_tokens]
    if situation.values["size"] in SIZES:
        names, why = [situation.values["size"]], f"--size {situation.values['size']}"
    elif "d_model" not in situation.free:  # its layers are those of the largest size that is no wider
        width = max(situation.values["d_model"], SIZES["tiny"].d_model)
        names = [name for name in reversed(SIZES) if SIZES[name].d_model <= width][:1]
        why = "to suit the given d_model"
    for name in names:
        model = model_options(SIZES[name], situation.values, situation.free)
        trained = asked
        if asked is None:
            speed, largest_batch = situation.speed(model | optimizer)
            trained = min(useful, situation.hours * 3600 * TRAINING_SHARE * speed)
        if trained >= min(SIZES[name].run_tokens, useful):
            break
        reason = f"; {names[0]} would need a longer run, or more memory"
    trained = max(trained, 1)  # if no model could be tried; the caller knows why
    once = " (repeated pairs count once)" if situation.corpus.repeated else ""
    why = why or f"{name}, for {situation.distinct:,.0f} tokens an epoch{once}{reason}"
    return Choice(model, why), trained, largest_batch


def choose_steps(situation: Situation, trained: float, largest_batch: int) -> list[Choice]:
    """The batch, the number of steps and the schedule of a run that reads `trained` tokens."""
    batch, choices = situation.given_batch, []
    if "per_device_train_max_tokens" in situation.free:
        batch = 2 ** round(math.log2(max(trained / STEPS / situation.batches_per_step, 1)))
        batch = min(max(batch, SMALLEST_BATCH), largest_batch)
        reason = f"for about {STEPS:,} steps, within limits"
        if "max_steps" not in situation.free:
            batch, reason = USUAL_BATCH, "the usual size"
        choices.append(Choice({"per_device_train_max_tokens": batch}, reason))
    steps = max(1, round(trained / situation.held(batch) / situation.batches_per_step))
    if situation.asked is None:
        reason = "more would bring little"
        if trained < situation.useful:
            hours = situation.useful / trained * situation.hours
            shown = f"{hours:.1f}" if hours >= 1 else f"{hours:.1g}"
            reason = f"--hours {situation.hours:g} on this machine; up to {shown} hours would be useful"
        epochs, length = trained / situation.tokens, {"max_steps": steps}
        if situation.values["per_device_train_max_tokens"] is None:  # auto: how many steps that takes is not known yet
            length = {"num_train_epochs": max(round(epochs, 2), 0.01)}
        choices.append(Choice(length, f"{epochs:.1f} epochs; {reason}"))
    choices.append(Choice({"lr_scheduler_type": "linear"}, "a run should end at a low learning rate"))
    choices.append(Choice({"warmup_steps": max(1, steps // 10)}, "a tenth of the steps"))
    # Translating a pair takes about as long as training on it.
    affordable = int(0.1 * trained / situation.length / max(situation.corpus.held_out, 1))
    count = min(max(affordable, 1), EVALUATIONS, steps)
    every = math.ceil(steps / count)
    choices.append(Choice({"eval_steps": every}, f"evaluations in all: {math.ceil(steps / every)}"))
    if count > 3 and "eval_steps" in situation.free:
        reason = "stops after three evaluations without a better score, and keeps the best weights"
        choices.append(Choice({"early_stopping_patience": 3}, reason))
    return choices


def model_options(size: Size, values: Mapping[str, object], free: Set[str]) -> dict[str, int]:
    """The options of a model: those that are given, and the others by its size; widths follow a given `d_model`."""
    width = size.d_model if "d_model" in free else values["d_model"]
    heads = math.gcd(size.heads, width // 2 if values["position_embedding_type"] == "rotary" else width)
    of_size = (width, size.layers, size.layers, heads, heads, 4 * width, 4 * width)
    return {name: one if name in free else values[name] for name, one in zip(MODEL, of_size, strict=True)}
