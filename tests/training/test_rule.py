"""The rule that chooses options from the data, the time and the speed of the machine."""

from dataclasses import replace

import numpy as np
import pytest

from vanilla_transformer.data.batches import fill_batches
from vanilla_transformer.training.choosing import last_position
from vanilla_transformer.training.recipe import parse_arguments
from vanilla_transformer.training.rule import (
    CHOOSABLE,
    MODEL,
    SIZES,
    Choice,
    Corpus,
    Situation,
    choose_fine_tuning,
    choose_lengths,
    choose_tokens,
    choose_training,
)

SENTENCES = Corpus(
    pairs=29_000, frequent_words=7000, words=(12.0, 11.0), characters=(61.0, 72.0), sentences=1, held_out=1000
)
WORDS = Corpus(pairs=8000, frequent_words=500, words=(1.0, 8.0), characters=(5.0, 20.0), sentences=1, held_out=400)


def choose(argv: str = "", tokens: float = 4.5e5, speed: float = 2e4, corpus: Corpus = SENTENCES, **more) -> dict:
    """What is chosen for an epoch of `tokens` where models of 2 million weights train at a `speed`.

    `fits` tells the largest batch for a d_model.
    """
    options = parse_arguments(["--train_file=x.tsv", *argv.split()])
    fits = more.pop("fits", lambda width: 4096)
    slower = lambda model: (speed * (128 / model["d_model"]) ** 2, fits(model["d_model"]))  # noqa: E731
    more = {"batches_per_step": 1, "largest_batch": 4096} | more
    situation = Situation(corpus, tokens, [20], options.values(), options.free, speed=slower, **more)
    choices, _ = choose_training(situation)
    assert all(choice.reason for choice in choices)
    values = [item for choice in choices for item in choice.values.items()]
    assert len(dict(values)) == len(values) and dict(values).keys() <= options.free
    return dict(values)


@pytest.mark.parametrize(
    ("words", "characters", "letters"),
    [
        ((1, 8), (5, 20), True),
        ((2.1, 1), (25, 11), True),
        ((1, 12), (30, 60), False),
        ((12, 11), (61, 72), False),
        ((7, 1.02), (32, 10), False),
        ((20, 1.1), (110, 8), False),
    ],
)
def test_letters_are_chosen_for_single_words(words, characters, letters):
    """As in pronunciation and inflection; not for sentences without spaces, nor for answers of one word."""
    choices = choose_tokens(Corpus(8000, 500, words, characters, 1, 400), CHOOSABLE - {"joined_pairs", "split_digits"})
    assert [name for choice in choices for name in choice.values] == ["letters" if letters else "vocab_size"]


@pytest.mark.parametrize(("letters", "chosen"), [(12.0, {"vocab_size", "joined_pairs"}), (4.0, {"letters"})])
def test_short_sentences_without_spaces_are_told_from_words(letters, chosen):
    """As between Chinese and Japanese."""
    sides = (letters, letters + 1)
    corpus = replace(WORDS, words=(1.0, 1.0), characters=sides, hidden_words=(letters / 3, letters / 3))
    found = {name for choice in choose_tokens(corpus, CHOOSABLE) for name in choice.values}
    assert found - {"split_digits"} == chosen
    # Such a sentence and its label.
    corpus = replace(corpus, characters=(3 * letters, 8), hidden_words=(letters, 0))
    assert not any("letters" in choice.values for choice in choose_tokens(corpus, CHOOSABLE))


def test_long_words_without_spaces_are_no_sentences():
    """As names of countries in English and Burmese."""
    corpus = replace(WORDS, words=(1.0, 1.0), characters=(9.0, 15.4), hidden_words=(0.0, 3.2))
    assert {"letters": True} in [choice.values for choice in choose_tokens(corpus, CHOOSABLE)]


def test_limits_leave_room_for_joined_pairs():
    """Of usual length; without them, these limits would be high enough, or 256 for some long sources."""
    options = parse_arguments(["--train_file=x.tsv", "--joined_pairs=0.2"])
    (choice,) = choose_lengths([(50, 40)] * 9, options.values(), options.free)
    assert choice.values == {"max_source_length": 256} and "joined" in choice.reason
    (choice,) = choose_lengths([(100, 40)] * 97 + [(140, 40)] * 3, options.values(), options.free)
    assert choice.values == {"max_source_length": 512} and "joined" in choice.reason
    (choice,) = choose_lengths([(425, 40)] * 9, options.values(), options.free)
    assert choice.values == {"max_source_length": 1024} and choice.reason.endswith("should fit as far as possible")


def test_the_share_of_texts_that_are_dropped_is_given():
    options = parse_arguments(["--train_file=x.tsv"])
    (choice,) = choose_lengths([(2000, 40)] * 2 + [(900, 40)], options.values(), options.free)
    assert choice.values == {"max_source_length": 1024}
    assert choice.reason.endswith("; 67% exceed 1,024 and are dropped")
    (choice,) = choose_lengths([(2000, 40)] * 2 + [(90, 40)], options.values(), options.free)
    assert choice.values == {"max_source_length": 128}
    assert choice.reason.endswith("; 67% exceed 1,024 and are dropped")


def test_steps_count_the_tokens_that_a_batch_really_has():
    """Whole pairs, and no more than all."""
    argv = "--size=small --hours=9 --per_device_train_max_tokens="
    small, one = (choose(f"{argv}{size}", tokens=5e4)["max_steps"] for size in (1, 20))
    assert small == one == 60 * 5e4 / 20
    assert choose(f"{argv.replace('hours=9', 'num_train_epochs=60')}1000000", tokens=5e4)["warmup_steps"] == 6


@pytest.mark.parametrize(
    ("lengths", "held"), [([200, 1000], 1000), ([300, 700], 750), ([10, 30], 1020), ([9000], 9000), ([20], 1020)]
)
def test_steps_are_counted_in_batches_of_pairs_of_like_lengths(lengths, held):
    """As fill_batches makes them of many pairs."""
    plan = list(fill_batches(np.array(lengths * 500), np.array(lengths * 500), 1024))
    options = parse_arguments(["--train_file=x.tsv"])
    situation = Situation(SENTENCES, 1e9, lengths, options.values(), options.free, 1, 4096, speed=None)
    assert situation.held(1024) == pytest.approx(held, abs=1)
    assert situation.held(1024) == pytest.approx(500 * sum(lengths) / len(plan), rel=0.02)


def test_few_pairs_get_enough_steps_to_be_learnt_by_heart():
    """The steps of 60 epochs are too few for them."""
    chosen = [choose(tokens=tokens, corpus=replace(SENTENCES, pairs=tokens // 20)) for tokens in (60, 1000, 6000)]
    assert [one["max_steps"] for one in chosen] == [300, 300, 353]
    assert choose("--per_device_train_max_tokens=4096", tokens=4000)["max_steps"] == 300
    assert choose(tokens=1000, batches_per_step=8)["max_steps"] == 300


def test_the_length_is_in_epochs_where_the_batch_is_found_later():
    chosen = choose("--hours=9 --per_device_train_max_tokens=auto", tokens=5e4)
    assert chosen["num_train_epochs"] == 60 and "max_steps" not in chosen


@pytest.mark.parametrize(
    ("share", "characters", "letters"), [(0.9, 70.0, True), (0.7, 70.0, False), (0.9, 900.0, False)]
)
def test_letters_are_chosen_for_sides_that_are_spelt_alike(share, characters, letters):
    """As in restoring case and punctuation, or the spaces between words; not for documents."""
    corpus = replace(SENTENCES, same_letters=share, characters=(characters, characters))
    choices = choose_tokens(corpus, {"letters", "vocab_size"})
    assert [name for choice in choices for name in choice.values] == ["letters" if letters else "vocab_size"]


@pytest.mark.parametrize(("words", "size"), [(0, 500), (900, 1000), (7010, 7000), (10**6, 32_000)])
def test_frequent_words_have_a_token(words, size):
    (choice,) = choose_tokens(replace(SENTENCES, frequent_words=words), {"vocab_size"})
    assert choice.values == {"vocab_size": size}


def test_repeated_pairs_count_once():
    """For the size, the length of the run and dropout; not for the steps of an epoch, which reads them all."""
    copies = replace(SENTENCES, pairs=60_000, repeated=0.99)
    chosen, distinct = choose(tokens=6e6, corpus=copies, speed=1e6), choose(tokens=6e4, speed=1e6)
    same = ("d_model", "max_steps", "dropout")
    assert [chosen[name] for name in same] == [distinct[name] for name in same]
    assert "600 different pairs are few" in doubts("", copies, 6e6)
    warm_up = choose("--num_train_epochs=2", 6e6, corpus=copies)["warmup_steps"]
    assert warm_up == pytest.approx(0.1 * 12e6 / 4096, rel=0.05)


@pytest.mark.parametrize(
    ("corpus", "joins"),
    [
        (SENTENCES, True),
        (replace(SENTENCES, sentences=2), False),
        (WORDS, False),
        (replace(SENTENCES, in_words=(0.9, 0.3)), False),
    ],
)
def test_pairs_are_joined_if_sources_are_single_sentences(corpus, joins):
    """Not numbers, spelled words and formulas."""
    assert any("joined_pairs" in choice.values for choice in choose_tokens(corpus, CHOOSABLE)) == joins


@pytest.mark.parametrize("free", [set(), {"d_model"}])
def test_tokens_that_are_given_are_not_chosen(free):
    assert choose_tokens(WORDS, free) == choose_tokens(SENTENCES, free) == []


@pytest.mark.parametrize("corpus", [SENTENCES, WORDS])
def test_each_digit_is_a_token_as_each_letter_may_be(corpus):
    chosen = {name for choice in choose_tokens(corpus, CHOOSABLE) for name in choice.values}
    assert len(chosen & {"letters", "split_digits"}) == 1


@pytest.mark.parametrize(
    ("longest", "argv", "limits"),
    [
        ((300, 128), "", {"max_source_length": 512}),
        ((129, 600), "", {"max_source_length": 256, "max_target_length": 1024}),
        ((900, 300), "", {"max_source_length": 1024, "max_target_length": 512}),
        ((9000, 300), "", {"max_source_length": 128}),  # no limit would keep them, which is said
        ((300, 300), "--max_target_length=300", {"max_source_length": 512}),
        ((300, 300), "--max_target_length=200", {}),  # such pairs are dropped whatever the sources have
        ((300, 300), "--max_position_embeddings=200", {"max_source_length": 512, "max_target_length": 512}),
        (
            (180, 180),
            "--max_position_embeddings=200 --position_embedding_type=learned",
            {"max_source_length": 200, "max_target_length": 200},
        ),
        ((300, 300), "--max_position_embeddings=200 --position_embedding_type=learned", {"max_source_length": 128}),
        ((1500, 300), "--max_position_embeddings=3000 --position_embedding_type=learned", {"max_source_length": 128}),
        ((300, 300), "--tokenizer_name=t --teacher=t", {}),
    ],
)
def test_limits_of_lengths_are_raised_until_few_pairs_are_dropped(longest, argv, limits):
    options = parse_arguments(["--train_file=x.tsv", *argv.split()])

    def values(lengths):
        choices = choose_lengths(lengths, options.values(), options.free, last_position(options))
        return {name: value for choice in choices for name, value in choice.values.items()}

    assert values([longest] * 2 + [(20, 20)] * 98) == values([longest]) == limits
    assert values([longest] + [(20, 20)] * 99) == values([]) == {}


@pytest.mark.parametrize("longest", [20, 180])
def test_limits_of_lengths_are_no_higher_than_the_positions_of_the_model(longest):
    options = parse_arguments(
        ["--train_file=x.tsv", "--max_position_embeddings=99", "--position_embedding_type=learned"]
    )
    choices = choose_lengths([(longest, longest)], options.values(), options.free, last_position(options))
    limits = [{"max_source_length": 99}, {"max_target_length": 99}]
    assert choices == [Choice(limit, "the positions of the model end there") for limit in limits]


def test_more_data_and_more_time_give_a_larger_model():
    widths = [choose(tokens=tokens, speed=1e9)["d_model"] for tokens in (1e3, 4e5, 1e6, 5e7, 1e9)]
    assert widths == [size.d_model for size in SIZES.values()]
    widths = [choose(f"--hours={hours}", tokens=1e8)["d_model"] for hours in (0.01, 0.1, 1, 10, 1000)]
    assert widths == sorted(widths) and len(set(widths)) > 2


def test_a_run_takes_no_longer_than_is_useful_or_than_the_time():
    argv = "--per_device_train_max_tokens=1000 --size=small --hours="
    steps = [choose(f"{argv}{hours}")["max_steps"] for hours in (0.05, 0.1, 9, 99)]
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.01) and steps[2] == steps[3] > steps[1]
    assert steps[0] * 1000 / 2e4 == pytest.approx(0.05 * 3600, rel=0.2)  # seconds


@pytest.mark.parametrize("name", SIZES)
def test_a_given_size_is_taken_whatever_the_data(name):
    chosen, size = choose(f"--size={name}", tokens=1e5), SIZES[name]
    assert [chosen[option] for option in MODEL] == [
        size.d_model, size.layers, size.layers, size.heads, size.heads, 4 * size.d_model, 4 * size.d_model
    ]  # fmt: skip


def test_sizes_follow_a_given_width():
    chosen = choose("--d_model=96 --decoder_layers=1")
    assert chosen["encoder_ffn_dim"] == 384 and 96 % chosen["encoder_attention_heads"] == 0
    assert not {"d_model", "decoder_layers"} & chosen.keys() and chosen["encoder_layers"] == 2


@pytest.mark.parametrize(("width", "layers", "heads"), [(32, 2, 2), (64, 2, 2), (192, 3, 4), (512, 6, 8)])
def test_layers_suit_a_given_width_whatever_the_data(width, layers, heads):
    for tokens in (1e4, 1e9):
        chosen = choose(f"--d_model={width}", tokens=tokens)
        assert (chosen["encoder_layers"], chosen["decoder_attention_heads"]) == (layers, heads)


@pytest.mark.parametrize("argv", ["--max_steps=1000", "--num_train_epochs=4"])
def test_a_given_length_decides_warm_up_and_evaluations(argv):
    def fail(model):
        raise AssertionError("the speed is not needed")

    options = parse_arguments(["--train_file=x.tsv", "--per_device_train_max_tokens=2000", argv])
    situation = Situation(SENTENCES, 5e5, [20], options.values(), options.free, 1, 4096, speed=fail)
    choices, _ = choose_training(situation)
    chosen = {name: value for choice in choices for name, value in choice.values.items()}
    assert "max_steps" not in chosen and (chosen["warmup_steps"], chosen["eval_steps"]) == (100, 125)


@pytest.mark.parametrize(("argv", "steps"), [("", 440), ("--num_train_epochs=20", 880), ("--max_steps=90", 90)])
def test_fine_tuning_has_a_schedule_and_evaluations_that_suit_its_length(argv, steps):
    """Not the paper's 4,000 steps of warm-up, of which a small corpus would see a few."""
    options = parse_arguments(["--train_file=x.tsv", "--model_name_or_path=m", *argv.split()])
    few = replace(SENTENCES, pairs=2250, held_out=120)
    situation = Situation(few, 4.5e4, [20], options.values(), options.free, 1, 16_384, speed=None)
    chosen = {name: value for choice in choose_fine_tuning(situation) for name, value in choice.values.items()}
    batch = 2048 if "max_steps" in argv else 1024
    assert (chosen["lr_scheduler_type"], chosen["per_device_train_max_tokens"]) == ("linear", batch)
    assert chosen["warmup_steps"] == pytest.approx(steps / 10, abs=2) and chosen["eval_steps"] < steps
    assert chosen.keys() <= options.free - {"max_steps"}


def test_dropout_grows_with_the_epochs_unless_the_model_is_narrow():
    found = [
        choose(f"--num_train_epochs={n} --d_model={width}")["dropout"] for width in (64, 128) for n in (9, 12, 30)
    ]
    assert found == [0.1, 0.1, 0.1, 0.05, 0.1, 0.2]


def test_a_student_of_teachers_has_little_dropout():
    argv = "--size=small --num_train_epochs=40"
    assert choose(argv)["dropout"] == 0.2 and choose(f"{argv} --tokenizer_name=t --teacher=t")["dropout"] == 0.1


def test_several_batches_a_step_make_fewer_steps():
    argv = "--size=small --per_device_train_max_tokens=1000"
    assert choose(argv, batches_per_step=4)["max_steps"] == round(choose(argv)["max_steps"] / 4)


def test_a_batch_is_no_larger_than_what_fits():
    large = {"tokens": 5e6, "speed": 1e6, "largest_batch": 16_384, "fits": lambda width: 8192 if width < 512 else 2048}
    assert choose("--hours=9", **large)["per_device_train_max_tokens"] == 8192
    assert choose("--hours=9 --size=base", **large)["per_device_train_max_tokens"] == 2048


def test_a_machine_on_which_no_model_could_be_tried_has_a_plan():
    """Building the model then says what is wrong."""
    assert choose("", speed=0.0)["max_steps"] == 1 == choose("--size=big", speed=0.0)["max_steps"]


def doubts(argv: str, corpus: Corpus, tokens: float) -> str:
    options = parse_arguments(["--train_file=x.tsv", *argv.split()])
    situation = Situation(corpus, tokens, [20], options.values(), options.free, 1, 4096, lambda model: (1000.0, 4096))
    return " ".join(choose_training(situation)[1])


def test_what_cannot_be_learnt_is_said_with_what_would_help():
    few = replace(SENTENCES, pairs=3016)
    assert "3,016 different pairs are few" in doubts("", few, 7e4) and "--model_name_or_path" in doubts("", few, 7e4)
    assert "more hours" in doubts("--hours=0.1", SENTENCES, 5e5) and doubts("--hours=9", SENTENCES, 5e5) == ""
    assert "more hours, or a smaller --size." in doubts("--hours=0.1 --size=small", SENTENCES, 5e5)
    assert "more hours." in doubts("--hours=0.1 --size=tiny", SENTENCES, 5e5)
    assert doubts("--hours=9", replace(WORDS, pairs=800), 2e4) == "" == doubts("--max_steps=5", SENTENCES, 5e5)


@pytest.mark.parametrize("tokens", [1, 1e2, 1e4, 1e6, 1e10])
@pytest.mark.parametrize("argv", ["", "--hours=0.001", "--max_steps=1", "--per_device_train_max_tokens=1000000"])
def test_any_corpus_has_a_plan(tokens, argv):
    chosen = choose(argv, tokens=tokens, corpus=Corpus(max(1, round(tokens / 10)), 1, (1, 1), (5, 5), 1, 0))
    counts = [value for name, value in chosen.items() if name.endswith(("steps", "tokens"))]
    assert all(isinstance(value, int) and value >= 1 for value in counts)
    assert chosen["eval_steps"] <= chosen.get("max_steps", 1) and 0 < chosen["dropout"] < 0.5
