"""What is chosen from files of pairs, where the speed of this machine is a given one."""

import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import small_model
from runs import write_pairs
from transformers import T5Config

from vanilla_transformer.data.splits import load_pairs
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import trials
from vanilla_transformer.training.choosing import decide_tokens, decide_training
from vanilla_transformer.training.dropout import ByteDropout
from vanilla_transformer.training.recipe import parse_arguments

SENTENCES = [(f"the old dog number {n} sleeps", f"der alte Hund Nummer {n} schläft") for n in range(400)]
GPU = SimpleNamespace(device=torch.device("cuda"), num_processes=1)


def as_rows(pairs: list[tuple[str, str]]) -> list[dict]:
    return [{"en": source, "de": target} for source, target in pairs]


@pytest.fixture
def decide(tmp_path, monkeypatch):
    """decide(pairs, argv, speed, accelerator) -> what is chosen; `speed` takes the tokens of a batch."""

    def decide(pairs=SENTENCES, argv: str = "", speed=lambda size: 1e4, accelerator=None) -> dict:
        data = write_pairs(tmp_path, train=as_rows(pairs), validation=as_rows(SENTENCES[:20]))
        files = [f"--{split}_file={data / split}.jsonl" for split in ("train", "validation")]
        options = parse_arguments([*files, "--source_lang=en", "--target_lang=de", *argv.split()])
        if speed is not None:
            monkeypatch.setattr(
                trials, "training_speed", lambda options, vocab, shape, _: speed(shape[0] * max(shape[1:]))
            )
        splits = load_pairs(options.data)
        first = decide_tokens(options, splits)
        tokenizer = train_tokenizer([text for pair in pairs for text in pair], 300)
        accelerator = accelerator or Accelerator(cpu=True)
        return first | decide_training(options.with_values(first), splits, tokenizer, accelerator)

    return decide


def fitting(most: int, tried=None):
    """The speed of a device that holds batches of `most` tokens; the sizes that are `tried` are noted in thousands."""

    def speed(size: int) -> float:
        if tried is not None:
            tried.append(round(size / 1000))
        if size > most:
            raise torch.OutOfMemoryError("too much")
        return 1e7

    return speed


@pytest.mark.parametrize(("most", "expected"), [(5000, [17, 8, 4]), (1100, [17, 8, 4, 2, 1])])
def test_a_batch_is_halved_until_it_fits(most, expected, decide):
    tried = []
    decide(argv="--size=base", speed=fitting(most, tried), accelerator=GPU)
    assert tried == expected


@pytest.mark.parametrize("argv", ["", "--size=big", "--size=big --per_device_train_max_tokens=4096"])
def test_a_model_of_which_no_batch_fits_is_refused(decide, argv):
    with pytest.raises(UserError, match=r"^A batch of [14],0\d\d tokens does not fit into memory; choose a smaller"):
        decide(argv=argv, speed=fitting(900), accelerator=GPU)


def test_what_no_model_may_have_is_refused_as_when_it_is_built(decide):
    with pytest.raises(UserError, match="flex_attention cannot train on a CPU"):
        decide(argv="--attn_implementation=flex_attention", speed=None)


def test_a_step_that_does_not_fit_into_memory_is_not_tried(decide, monkeypatch):
    monkeypatch.setattr(trials, "free_bytes", lambda _: 2**20)
    with pytest.raises(UserError, match=r"^A batch of .* tokens does not fit into memory; choose a smaller"):
        decide(speed=None)


def test_a_trial_has_the_usual_lengths_of_both_sides(decide, monkeypatch):
    """The longer of the two is as long as the longer side of a pair."""
    shapes = []
    monkeypatch.setattr(trials, "training_speed", lambda options, vocab, shape, _: shapes.append(shape) or 1e4)
    decide([(f"{source} {source} {source} {source}", "ja") for source, _ in SENTENCES], speed=None)
    decide([*[("nein", "no no no no")] * 200, *[("no no no no", "nein")] * 200], speed=None)
    (pairs, source, target), *_, (_, one, other) = shapes
    assert 10 * target < source and pairs * source == pytest.approx(2048, rel=0.05) and one == other


def test_texts_that_are_all_too_long_end_the_run_before_it_chooses(decide, capsys):
    long = [(" ".join(f"{source} {n}" for n in range(400)), target) for source, target in SENTENCES[:100]]
    with pytest.raises(
        UserError, match=r"^None of the 100 pairs that were looked at fits into --max_source_length 1024 and .*; split"
    ):
        decide(long)
    assert "--max_steps" not in capsys.readouterr().out
    assert decide(long, "--max_source_length=99999")["max_steps"] > 1
    with pytest.raises(UserError, match="^None of the 400 pairs .* raise these limits"):
        decide(argv="--max_source_length=2")


def test_pairs_with_an_empty_side_are_not_called_too_long(decide):
    """Tokenizing them says that they are empty."""
    assert decide([(source, "") for source, _ in SENTENCES[:50]])["max_steps"] >= 1


def test_a_trial_is_of_the_model_that_is_trained(decide, monkeypatch):
    tried = []
    compute_loss = trials.compute_loss
    monkeypatch.setattr(trials, "compute_loss", lambda model, *more: tried.append(model) or compute_loss(model, *more))
    decide(argv="--size=tiny --gradient_checkpointing", speed=None)
    assert tried[0].is_gradient_checkpointing and any(isinstance(part, ByteDropout) for part in tried[0].modules())


def test_a_batch_that_does_not_fit_is_freed_before_the_next_one_is_tried(decide):
    class Batch:
        pass

    tried = []

    def speed(size: int) -> float:
        assert not any(reference() for reference in tried)
        batch = Batch()
        tried.append(weakref.ref(batch))
        if size > 5000:
            raise torch.OutOfMemoryError("too much")
        return 1e7

    decide(argv="--size=base", speed=speed, accelerator=GPU)
    assert len(tried) == 3


def test_pairs_with_an_empty_side_do_not_count(decide, capsys):
    filled, mixed = decide(), decide([*SENTENCES, *[("a dog", "")] * 4000])
    assert mixed["max_steps"] == pytest.approx(filled["max_steps"], rel=0.2)
    warnings = re.findall(r"(\d+) different pairs are few", capsys.readouterr().out)
    assert list(map(int, warnings)) == pytest.approx([400, 400], rel=0.2)


def test_pairs_that_weights_repeat_count_once(decide, capsys):
    repeated, once = decide(argv="--train_file_weights=100"), decide()
    assert repeated["d_model"] == once["d_model"]
    assert repeated["max_steps"] == pytest.approx(once["max_steps"], rel=0.1)
    assert capsys.readouterr().out.count("400 different pairs are few") == 2


def test_files_of_different_directions_are_not_joined(decide, tmp_path):
    more = write_pairs(tmp_path / "more", train=[{"fr": "un chien dort", "de": "ein Hund schläft"}])
    both = f"--train_file {tmp_path / 'train.jsonl'} {more / 'train.jsonl'} --train_file_langs en-de"
    assert "joined_pairs" not in decide(argv=f"{both} fr-de")
    write_pairs(tmp_path / "more", train=as_rows(SENTENCES))
    assert "joined_pairs" in decide(argv=f"{both} en-de")


@pytest.mark.parametrize(("positions", "limit"), [({}, 512), ({"position_embedding_type": "learned"}, 300)])
def test_limits_of_lengths_are_raised_in_fine_tuning_as_far_as_positions_go(decide, tmp_path, positions, limit):
    small_model(max_position_embeddings=300, **positions).config.save_pretrained(tmp_path / "model")
    long = [(f"{source} " * 45, target) for source, target in SENTENCES]
    chosen = decide(long, f"--model_name_or_path={tmp_path / 'model'}")
    assert chosen["max_source_length"] == limit and "max_target_length" not in chosen
    T5Config().save_pretrained(tmp_path / "model")  # which has no limit, and cannot be converted: that is said later
    assert decide(long, f"--model_name_or_path={tmp_path / 'model'}")["max_source_length"] == 512


def test_texts_of_several_lines_are_not_joined(decide):
    assert "joined_pairs" in decide()
    assert "joined_pairs" not in decide([(f"{source}\n{source}", target) for source, target in SENTENCES])


def test_short_sentences_without_spaces_are_joined(decide):
    chinese = [(f"It rained for {n} hours today.", f"今天下了{n}小时雨。") for n in range(400)]
    assert "joined_pairs" in decide(chinese)
    assert "joined_pairs" not in decide([(target, "雨") for _, target in chinese])


def test_a_stream_that_soon_ends_has_as_many_words_as_it_has(decide):
    assert decide(argv="--streaming --max_steps=3")["vocab_size"] == decide()["vocab_size"]


def test_a_short_stream_is_read_again_and_again(decide):
    chosen = decide(argv="--streaming --max_steps=20000")
    assert chosen["d_model"] == decide(argv="--max_steps=20000")["d_model"] == 64


@pytest.mark.parametrize("tag", [">>de<<", "<de>", "[de]", "[deu_Latn]", "__de__", "translate English to German:"])
def test_sources_with_tags_are_not_joined(tag, decide):
    tagged = [(f"{tag} {source}", target) for source, target in SENTENCES[:100]]
    assert "joined_pairs" not in decide(tagged + SENTENCES)


def test_of_a_long_stream_only_what_is_read_counts(decide, capsys):
    """Evaluations take at most a tenth of the time; there are 20 validation pairs."""
    names = [f"{n // 10:03}".translate(str.maketrans("0123456789", "abcdefghij")) for n in range(10_000)]
    pairs = [(f"the dog {name} sleeps {n}", f"der Hund {name} schläft {n}") for n, name in enumerate(names)]
    few = decide(pairs[:9000], "--streaming --max_steps=10")
    assert few["eval_steps"] > 1 and few["vocab_size"] < decide(pairs, "--streaming --max_steps=10")["vocab_size"]
    decide(pairs, "--streaming --max_steps=10 --max_train_samples=11000")
    said = re.findall(r"the stream is taken to have ([\d,]+) pairs", capsys.readouterr().out)
    assert said == ["9,000", "1,000,000", "11,000"]
