"""Chooses the options that were not given: looks at the pairs and at the machine, asks rule.py, and says why."""

import textwrap
from collections.abc import Sized
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ..data.encoding import sample_lengths
from ..data.splits import SURVEYED, Splits
from ..errors import UserError
from ..loading import load_config
from .checkpoint import load_state
from .recipe import Options
from .rule import LIMITS, Choice, Corpus, Situation, choose_fine_tuning, choose_lengths, choose_tokens, choose_training
from .trials import Trials

STREAMED = 10**6  # pairs that a stream is taken to have, if it may have more than were looked at
GROWTH = 2 / 3  # of the frequent words with the pairs: Multi30k has 2,070 in 5,000 pairs, and 6,970 in 29,000


def decide_tokens(options: Options, pairs: Splits) -> dict[str, object]:
    """Chooses what must be known before a tokenizer is trained, and prints it."""
    if not options.free:
        return {}
    print("options that are not given are chosen from the data; --size paper leaves the defaults (docs/choosing.md):")
    corpus = look_at(pairs, options)
    if not isinstance(pairs["train"], Sized):
        print(f"  the stream is taken to have {corpus.pairs:,} pairs")
    return print_choices(choose_tokens(corpus, options.free))


def decide_training(
    options: Options, pairs: Splits, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
) -> dict[str, object]:
    """Chooses the rest, once the tokenizer is known, and prints it."""
    if not options.free:
        return {}
    lengths, looked_at = sample_lengths(pairs["train"], tokenizer, max(LIMITS[-1], options.data.length_limit))
    most = last_position(options)
    choices = choose_lengths(lengths, options.values(), options.free, most)
    chosen = print_choices(choices)
    options = options.with_values(chosen)
    limits = options.data.max_source_length, options.data.max_target_length
    kept = [pair for pair in lengths if pair[0] <= limits[0] and pair[1] <= limits[1]]
    if pairs.survey["train"]["pairs"] and not kept:  # else all have an empty side
        names = "max_source_length", "max_target_length"
        tried = [f"--{name} {most if name in options.free else options.values()[name]}" for name in names]
        raise UserError(
            f"None of the {looked_at:,} pairs that were looked at fits into {' and '.join(tried)} (in tokens); "
            "split the texts, or raise these limits."
        )
    sides = [sum(side) / len(kept) for side in zip(*kept, strict=True)] or [1.0, 1.0]
    longer = list(map(max, kept)) or [1]
    length = fmean(longer)
    corpus = look_at(pairs, options)
    corpus = replace(corpus, pairs=max(1, round(corpus.pairs * len(kept) / max(looked_at, 1))))
    trials = Trials(options, len(tokenizer), tuple(side * length / max(sides) for side in sides), accelerator)
    situation = Situation(
        corpus,
        tokens=max(length * corpus.pairs, 1),
        lengths=longer,
        values=options.values(),
        free=options.free,
        batches_per_step=options.training.gradient_accumulation_steps * accelerator.num_processes,
        largest_batch=trials.largest,
        speed=trials.speed,
    )
    if not isinstance(pairs["train"], Sized):  # a stream that may be longer than what is read of it
        situation = replace(situation, tokens=min(situation.tokens, situation.asked))
    if options.training.model_name_or_path:
        return chosen | print_choices(choose_fine_tuning(situation))
    choices, doubts = choose_training(situation)
    if trials.refusal:
        raise UserError(trials.refusal)
    chosen |= print_choices(choices)
    for doubt in doubts:
        print(textwrap.fill(f"warning: {doubt}", 80, subsequent_indent="  "))
    return chosen


def decided_before(options: Options, checkpoint: Path) -> dict[str, object]:
    """What was chosen for the run that wrote the checkpoint."""
    free, settings = options.free, load_state(checkpoint).settings
    if options.training.hours is not None and free:
        print("--hours has no effect on a resumed run, which keeps the steps chosen for it; --max_steps changes them.")
    kept = free if "num_train_epochs" in free else free - {"max_steps"}  # which would win over given epochs
    return {name: settings[name] for name in kept & settings.keys()}


def last_position(options: Options) -> int:
    """The tokens of the longest text that the model has positions for, but at most the highest limit to choose."""
    name, model = options.training.model_name_or_path, options.model
    if name is not None:
        config = load_config(name)  # perhaps of a model that cannot be converted, which is said later
        positions = getattr(config, "longest_sequence", getattr(config, "max_position_embeddings", None))
    else:
        positions = model.max_position_embeddings if model.position_embedding_type == "learned" else None
    return min(positions or LIMITS[-1], LIMITS[-1])


def look_at(pairs: Splits, options: Options) -> Corpus:
    """What the survey has found in the training pairs."""
    found, held_out = pairs.survey["train"], pairs.survey["validation"]["pairs"]
    count = all_pairs = found["pairs"]
    if isinstance(pairs["train"], Sized):
        count = len(pairs["train"])
    elif found["rows"] >= SURVEYED:  # the stream may go on
        count = all_pairs = min(STREAMED, options.data.max_train_samples or STREAMED)
    frequent = round(found["frequent_words"] * (all_pairs / max(found.get("sampled", found["pairs"]), 1)) ** GROWTH)
    means = {name: tuple(found[name]) for name in ("words", "characters", "hidden_words", "in_words")}
    repeated = found["duplicates"] / max(found["pairs"], 1)
    if isinstance(pairs["train"], Sized) and count > found["rows"]:  # --train_file_weights repeats some
        repeated = 1 - (1 - repeated) * found["rows"] / count
    # Sources of several lines are not joined either.
    usual, same = max(found["usual_sentences"], found["usual_lines"]), found["same_letters"]
    mixed = found["tagged_sources"] or pairs.directions_differ
    of_pairs = {"held_out": held_out, "same_letters": same, "repeated": repeated}
    return Corpus(count, frequent, **means, **of_pairs, sentences=usual, mixes_languages=mixed)


def print_choices(choices: list[Choice]) -> dict[str, object]:
    """Prints choices as options that can be copied, each with its reason; returns their values."""
    chosen = {}
    for choice in choices:
        words = " ".join(f"--{name} {value}" for name, value in choice.values.items())
        print(textwrap.fill(f"{words}: {choice.reason}", 80, initial_indent="  ", subsequent_indent="    "))
        chosen |= choice.values
    return chosen
