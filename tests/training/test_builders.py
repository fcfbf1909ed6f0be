"""What a run is built from."""

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import datasets
import pytest
import torch
from helpers import TINY, text_dataset, training_options
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from vanilla_transformer import Translator, VanillaTransformerConfig
from vanilla_transformer.data.encoding import tokenize_pairs
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.splits import Splits, load_pairs
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import builders
from vanilla_transformer.training.builders import (
    count_steps,
    existing_tokenizer,
    longest_side_of,
    make_generation_config,
    make_model,
    make_tokenizer,
    note_source_form,
    report_lost_text,
    resolve_defaults,
    tokenize_splits,
)
from vanilla_transformer.training.dropout import ByteDropout
from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.state import TrainerState

PAIRS = [("A dog sleeps.", "犬が寝ています。")] * 3


@pytest.fixture
def ascii_only(text_tokenizer, tmp_path) -> str:
    """A tokenizer that drops letters other than those of English."""
    text_tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    drop = '{"type": "Replace", "pattern": {"Regex": "[^ -~]"}, "content": ""}'
    file.write_text(file.read_text().replace('"normalizers": [', f'"normalizers": [{drop},'))
    return str(tmp_path)


@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streamed"])
@pytest.mark.parametrize("option", ["--tokenizer_name", "--model_name_or_path", "--teacher"])
def test_existing_tokenizer_is_tried_on_the_training_texts(option, streaming, ascii_only, capsys):
    pairs = text_dataset(PAIRS).to_iterable_dataset() if streaming else text_dataset(PAIRS)
    existing = (option, ascii_only)
    with pytest.raises(UserError, match=f"^{option} {ascii_only} has a tokenizer that does not know the target texts"):
        make_tokenizer(existing, pairs)
    make_tokenizer(existing, pairs.map(lambda pair: {"target": "Straße"}))
    said = "the tokenizer changes 3 of 3 target texts ('Straße' becomes 'Strae'); 0 of "
    assert said in capsys.readouterr().out


def test_what_a_tokenizer_loses_of_the_tags_does_not_count(ascii_only, capsys):
    tokenizer = AutoTokenizer.from_pretrained(ascii_only)
    for pairs, is_lost in [([("犬 A dog", "a")], False), ([("A dog", "犬 a")], True)]:
        report_lost_text(tokenizer, text_dataset(pairs), "--tokenizer_name x", ["犬"])
        assert ("warning: the tokenizer changes 1 of 1" in capsys.readouterr().out) == is_lost


SIZES = [{"d_model": 10**6}, {"encoder_ffn_dim": 2**28}, {"max_position_embeddings": 2**28}]


@pytest.mark.parametrize("size", SIZES)
def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_built(size, text_tokenizer):
    fields = {"position_embedding_type": "learned", **size}
    with pytest.raises(
        UserError, match="^A model of [0-9,]{12,} parameters takes [0-9,.]+ GiB, more than the .* free; choose"
    ):
        make_model(fields, TrainingOptions(), DataOptions(), text_tokenizer, torch.device("cpu"))


LIMITS = {"max_source_length": 9, "max_target_length": 30}


@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streamed"])
@pytest.mark.parametrize(
    "before, keeps_length, expected", [(999, False, 8), (999, True, 999), (3, True, 8), (VERY_LARGE_INTEGER, True, 8)]
)
def test_the_tokenizer_keeps_the_longest_training_source(
    before, keeps_length, expected, streaming, byte_tokenizer, capsys
):
    """In tokens; that of a stream is unknown, but for its limit."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.model_max_length = before
    train = text_dataset([("123456", "b"), ("123456789", "b"), ("1", "b" * 20)])
    pairs = {"train": train.to_iterable_dataset() if streaming else train, "test": train}
    config = VanillaTransformerConfig(max_position_embeddings=19)
    splits = tokenize_splits(pairs, tokenizer, DataOptions(**LIMITS), config, keeps_length)
    assert streaming or [len(pair["input_ids"]) for pair in splits["train"]] == [8, 3]
    said = capsys.readouterr().out
    assert streaming or "train: 2 pairs (dropped: 0 empty, 1 too long)" in said
    assert len(splits["test"]) == 3  # of up to 30 tokens, the largest of the limits and of the positions
    assert tokenizer.model_max_length == (9 if streaming and expected == 8 else expected)


@pytest.mark.parametrize("long, is_said", [(1, False), (2, True), (9, True)])
def test_many_pairs_that_are_too_long_are_a_warning(long, is_said, byte_tokenizer, capsys):
    """Of 10 pairs; in evaluation, positions are the limit."""
    pairs = text_dataset([("1", "b" * 50)] * long + [("1", "2")] * (10 - long))
    config = VanillaTransformerConfig(max_position_embeddings=40)
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenize_splits({"train": pairs, "test": pairs}, tokenizer, DataOptions(**LIMITS), config, False)
    said = re.findall(
        r"(?m)^warning: (\d) of 10 (\w+) pairs .* longer than (\d+) tokens; raise --max_source_length and",
        capsys.readouterr().out,
    )
    assert said == [(str(long), "train", "30"), (str(long), "test", "40")] * is_said


@pytest.mark.parametrize(
    "before, keeps_more, found, expected",
    [
        (None, False, 2, 2),
        (3, False, 2, 2),
        (3, True, 2, 3),
        (1, True, 2, 2),
        (None, True, 2, 2),
        (1000, True, 2, 1000),
    ],
)
@pytest.mark.parametrize("unit", ["sentences", "lines"])
def test_the_tokenizer_notes_how_many_sentences_and_lines_sources_have(
    text_tokenizer, unit, before, keeps_more, found, expected
):
    tokenizer, pairs = copy.deepcopy(text_tokenizer), Splits()
    pairs.survey = {"train": {"usual_sentences": 1, "usual_lines": 1, f"usual_{unit}": found}}
    if before:
        tokenizer.init_kwargs[f"max_source_{unit}"] = before
    note_source_form(tokenizer, pairs, DataOptions(), keeps_more)
    assert tokenizer.init_kwargs[f"max_source_{unit}"] == expected
    note_source_form(tokenizer, pairs, DataOptions(**{f"max_source_{unit}": 7}), keeps_more)
    assert tokenizer.init_kwargs[f"max_source_{unit}"] == 7


def test_a_verbatim_tokenizer_is_trained_and_never_an_existing_one(tmp_path, capsys):
    pairs = datasets.Dataset.from_list([{"source": "f", "target": "def f(x):\n    return x"}] * 9)
    make_tokenizer(None, pairs, 300).save_pretrained(tmp_path / "other")
    said = " ".join(capsys.readouterr().out.split())
    assert "does not keep, in target texts: line breaks (100%), double, leading or trailing spaces (100%)" in said
    assert "--verbatim trains one that does" in said
    verbatim = make_tokenizer(None, pairs, 300, verbatim=True)
    assert "keep" not in capsys.readouterr().out
    verbatim.save_pretrained(tmp_path / "verbatim")
    again = make_tokenizer(("--resume_from_checkpoint", str(tmp_path / "verbatim")), pairs, verbatim=True)
    assert again.decode(again(pairs[0]["target"]).input_ids, skip_special_tokens=True) == pairs[0]["target"]
    assert again.init_kwargs["verbatim"]
    with pytest.raises(UserError, match="--verbatim trains a tokenizer, but --tokenizer_name .*other brings one"):
        make_tokenizer(("--tokenizer_name", str(tmp_path / "other")), pairs, verbatim=True)


@pytest.mark.parametrize(
    "kind, positions, length", [("sinusoidal", 12, 31), ("learned", 12, 12), ("learned", 40, 31), ("learned", 31, 31)]
)
def test_generation_ends_with_the_longest_target_or_the_last_position(kind, positions, length, make_model):
    model = make_model(position_embedding_type=kind, max_position_embeddings=positions)
    for argv, beams in [(["--num_beams=4", "--length_penalty=0.6"], (4, 0.6)), (["--num_beams=1"], (None, None))]:
        found = make_generation_config(model, 30, training_options(*argv))
        assert (found.max_length, found.num_beams, found.length_penalty) == (length, *beams)
        ids = (found.pad_token_id, found.decoder_start_token_id, found.eos_token_id)
        assert ids == (model.config.pad_token_id, model.config.decoder_start_token_id, model.config.eos_token_id)


def test_the_first_of_checkpoint_model_tokenizer_and_teacher_has_the_tokenizer(tmp_path):
    options = training_options("--model_name_or_path=m", "--teacher", "t", "u")
    assert existing_tokenizer(options, "x", tmp_path) == ("--resume_from_checkpoint", str(tmp_path))
    assert existing_tokenizer(options, "x", None) == ("--model_name_or_path", "m")
    assert existing_tokenizer(training_options("--teacher", "t", "u"), "x", None) == ("--tokenizer_name", "x")
    assert existing_tokenizer(training_options("--teacher", "t", "u"), None, None) == ("--teacher", "t")
    assert existing_tokenizer(training_options(), None, None) is None


@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streamed"])
def test_a_new_tokenizer_is_trained_on_both_sides(streaming, text_tokenizer, cache, monkeypatch):
    """The texts are counted for the progress bar, but for those of a stream."""
    found, pairs = [], text_dataset([("a", "b"), ("c", "d")])
    given = Mock(side_effect=lambda texts, *given: found.append((sorted(texts), *given)) or text_tokenizer)
    monkeypatch.setattr(builders, "train_tokenizer", given)
    make_tokenizer(None, pairs.to_iterable_dataset() if streaming else pairs, 300)
    make_tokenizer(None, pairs, None)
    texts, default = ["a", "b", "c", "d"], VanillaTransformerConfig().vocab_size
    assert found == [(texts, 300, None if streaming else 4, [], False), (texts, default, 4, [], False)]


def test_directories_with_a_card_and_the_same_name_have_their_own_tokenizers(cache, tmp_path):
    """Of such datasets, the fingerprint of `datasets` is the same."""
    found, fingerprints = [], set()
    for word in ("apple", "Zebra"):
        folder = tmp_path / word / "corpus"
        for split in ("train", "validation"):
            (folder / f"{split}.jsonl").parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{split}.jsonl").write_text(json.dumps({"en": f"{word} {word}", "de": word}) * 9)
        card = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        (folder / "README.md").write_text(f"---\n{card}  - split: validation\n    path: validation.jsonl\n---\n")
        pairs = load_pairs(DataOptions(str(folder)))["train"]
        fingerprints.add(pairs._fingerprint)
        found.append(make_tokenizer(None, pairs, 300).tokenize(word))
    assert len(fingerprints) == 1 and found == [["\u0120apple"], ["\u0120Zebra"]]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of datasets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def contents(tokenizer, folder: Path) -> dict[str, bytes]:
    tokenizer.save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_trained_tokenizer_is_found_by_the_next_run(cache, tmp_path, monkeypatch):
    """And is the same to the bit. Other pairs, another size or other tags need another one."""
    training = Mock(wraps=builders.train_tokenizer)
    monkeypatch.setattr(builders, "train_tokenizer", training)
    pairs, other = text_dataset(PAIRS), text_dataset(PAIRS[:2])
    first = contents(make_tokenizer(None, pairs, 300, ["<bt>"]), tmp_path / "first")
    second = contents(make_tokenizer(None, text_dataset(PAIRS), 300, ["<bt>"]), tmp_path / "second")
    assert training.call_count == 1 and first == second
    for number, given in enumerate([(other, 300, ["<bt>"]), (pairs, 280, ["<bt>"]), (pairs, 300, [])], start=2):
        make_tokenizer(None, *given)
        assert training.call_count == number
    assert len(list((cache / "tokenizers").iterdir())) == 4


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model": 3}'])
def test_a_damaged_file_of_a_tokenizer_is_replaced(damage, cache, tmp_path):
    first = contents(make_tokenizer(None, text_dataset(PAIRS), 300), tmp_path / "first")
    (file,) = (cache / "tokenizers").iterdir()
    whole = file.read_text(encoding="utf-8")
    file.write_text(damage, encoding="utf-8")
    assert contents(make_tokenizer(None, text_dataset(PAIRS), 300), tmp_path / "second") == first
    assert file.read_text(encoding="utf-8") == whole


def test_a_tokenizer_is_trained_without_a_cache(cache, tmp_path):
    cache.write_text("not a folder", encoding="utf-8")
    assert len(make_tokenizer(None, text_dataset(PAIRS), 300)) <= 300


def test_an_interrupt_while_tokenizing_says_what_is_kept(byte_tokenizer, monkeypatch):
    encode = Mock(wraps=tokenize_pairs, side_effect=[DEFAULT, KeyboardInterrupt])
    monkeypatch.setattr(builders, "tokenize_pairs", encode)
    pairs = {"train": text_dataset(PAIRS), "validation": text_dataset(PAIRS)}
    with pytest.raises(KeyboardInterrupt, match="^stopped .* validation; .* tokens of train will be found"):
        tokenize_splits(pairs, byte_tokenizer, DataOptions(), VanillaTransformerConfig(), False)


def test_tags_are_tokens_of_their_own(folder, text_tokenizer):
    pairs, existing = text_dataset(PAIRS), ("--tokenizer_name", folder)
    assert len(make_tokenizer(None, pairs, 300, ["", "<bt>", "<x>"]).tokenize("<bt>")) == 1
    assert make_tokenizer(existing, pairs, tags=["", None]).vocab_size == text_tokenizer.vocab_size
    for tag, message in [("<pad>", "<pad>, a special token of the tok"), ("<bt>", "<bt>, which is not one token of")]:
        with pytest.raises(UserError, match=f"^--train_file_tags has {message}"):
            make_tokenizer(existing, pairs, tags=[tag])


def test_an_existing_tokenizer_keeps_its_size(folder, text_tokenizer, tmp_path, capsys):
    pairs, size = text_dataset([("A dog sleeps.", "No!")]), len(text_tokenizer)
    for option, vocab_size, is_said in [
        ("--model_name_or_path", size + 1, True),
        ("--model_name_or_path", size, False),
        ("--model_name_or_path", None, False),
        ("--tokenizer_name", size + 1, False),
    ]:
        assert len(make_tokenizer((option, folder), pairs, vocab_size)) == size
        assert ("--vocab_size" in capsys.readouterr().out) == is_said
    with pytest.raises(UserError, match=f"^{tmp_path} cannot be read: no tokenizer; delete it"):
        make_tokenizer(("--resume_from_checkpoint", str(tmp_path)), pairs)
    assert len(make_tokenizer(("--resume_from_checkpoint", folder), text_dataset(PAIRS))) == size


# --------------------------------------------------------------------------------------------------------- the model

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = {name: size for name, size in TINY.items() if name != "vocab_size"}


@pytest.fixture
def build(text_tokenizer):
    """build(*argv, **fields) -> a new model."""

    def build(*argv, device=CPU, data=LIMITS, **fields):
        return make_model(SMALL | fields, training_options(*argv), DataOptions(**data), text_tokenizer, device)

    return build


def test_a_new_model_follows_the_options(build, text_tokenizer):
    model = build("--num_beams=3")
    assert model.generation_config.max_length == 31 and model.generation_config.num_beams == 3
    assert model.config.vocab_size == len(text_tokenizer) and model.dtype == torch.float32
    assert model.config.eos_token_id == text_tokenizer.eos_token_id and not model.model.encoder.gradient_checkpointing
    assert build("--gradient_checkpointing").model.encoder.gradient_checkpointing
    kinds = {model.config._attn_implementation: build("--attn_implementation=sdpa").config._attn_implementation}
    assert any(isinstance(module, ByteDropout) for module in model.modules())
    assert not any(isinstance(module, ByteDropout) for module in build(device=GPU).modules())
    assert kinds == {"eager": "sdpa"} and build(device=GPU).config._attn_implementation == "sdpa"
    with pytest.raises(UserError, match="^--attn_implementation flex_attention cannot train on a CPU"):
        build("--attn_implementation=flex_attention")


def test_learned_positions_reach_as_far_as_the_pairs(build):
    assert build(position_embedding_type="learned", max_position_embeddings=30)
    with pytest.raises(UserError, match="^--max_position_embeddings is 29, but sentences may have 30 tokens"):
        build(position_embedding_type="learned", max_position_embeddings=29)


def test_only_a_trained_tokenizer_may_have_fewer_tokens_than_asked_for(build, text_tokenizer):
    size = len(text_tokenizer)
    assert build(vocab_size=size + 9).config.vocab_size == size
    assert build(vocab_size=size, data=LIMITS | {"tokenizer_name": "x"}).config.vocab_size == size
    for asked, data in [(size - 1, LIMITS), (size + 1, LIMITS | {"tokenizer_name": "x"})]:
        with pytest.raises(UserError, match=f"^--vocab_size is {asked}, but the tokenizer has {size} tokens"):
            build(vocab_size=asked, data=data)


def test_training_on_a_cpu_needs_memory_for_four_copies(build, monkeypatch):
    copies = []
    monkeypatch.setattr(builders, "check_model_fits", lambda config, count: copies.append(count))
    for argv, device in [([], CPU), (["--dry_run"], CPU), ([], GPU)]:
        build(*argv, device=device)
    assert copies == [4, 1, 1]


def test_a_model_to_fine_tune_takes_other_dropout_only(build, folder):
    model = build(f"--model_name_or_path={folder}", vocab_size=9999, dropout=0.3, attention_dropout=0.2)
    assert (model.config.dropout, model.config.attention_dropout) == (0.3, 0.2)
    weights = Translator.from_pretrained(folder).model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with pytest.raises(UserError, match="^--d_model is 32, but 16 in --model_name_or_path"):
        build(f"--model_name_or_path={folder}", d_model=32)


# ------------------------------------------------------------------------------------------------ defaults and steps


@pytest.mark.parametrize(
    "argv, resumed, expected, said",
    [
        (["--warmup_steps=40000"], {}, (16 * 40000) ** -0.5, ""),
        (["--warmup_steps=100"], {}, (16 * 4000) ** -0.5, "4.0e-03 instead of .* = 2.5e-02, as --warmup_steps 100 is"),
        (
            ["--warmup_steps=2", "--model_name_or_path=x"],
            {},
            1e-4,
            "1.0e-04 instead of .* = 1.8e-01, as a higher",
        ),
        (["--warmup_steps=2", "--learning_rate=0.5"], {}, 0.5, ""),
        (["--warmup_steps=2"], {"learning_rate": 0.0125}, 0.0125, ""),
        (["--warmup_steps=2", "--learning_rate=0.5"], {"learning_rate": 0.0125}, 0.5, ""),
    ],
)
def test_the_default_learning_rate_is_the_papers_within_limits(
    argv, resumed, expected, said, make_model, accelerator, tmp_path, capsys
):
    (tmp_path / "trainer_state.json").write_text(json.dumps(asdict(TrainerState(settings=resumed))))
    options = resolve_defaults(training_options(*argv), make_model(), 20, tmp_path if resumed else None, accelerator)
    assert options.learning_rate == pytest.approx(expected)
    printed = capsys.readouterr().out
    assert re.match(f"the default learning rate is {said}", printed) if said else printed == ""


def test_an_automatic_batch_size_is_that_of_the_checkpoint_or_the_largest(
    make_model, accelerator, tmp_path, monkeypatch, capsys
):
    def size(checkpoint, processes, size="auto"):
        options = training_options(f"--per_device_train_max_tokens={size}")
        return resolve_defaults(options, make_model(), 20, checkpoint, processes).per_device_train_max_tokens

    state = TrainerState(settings={"per_device_train_max_tokens": 777})
    (tmp_path / "trainer_state.json").write_text(json.dumps(asdict(state)))
    gpu = SimpleNamespace(device=GPU, print=print)

    def largest(model, options, processes, longest: int) -> int:
        assert isinstance(model, torch.nn.Module) and options.learning_rate
        return 1000 + longest

    monkeypatch.setattr(builders, "largest_batch", largest)
    assert [size(tmp_path, accelerator), size(None, gpu)] == [777, 1020]
    assert "auto: 1,020 tokens" in capsys.readouterr().out
    assert [size(place, processes, 55) for place in (tmp_path, None) for processes in (accelerator, gpu)] == [55] * 4


def test_the_longest_side_of_all_pairs(byte_tokenizer):
    pairs = text_dataset([("1", "22"), ("333333", "4"), ("1", "4444")])
    train, _ = tokenize_pairs(pairs, byte_tokenizer, 50, 50)
    assert longest_side_of(train, 50) == max(
        len(side) for pair in train for side in (pair["input_ids"], pair["labels"])
    )
    assert longest_side_of(pairs.to_iterable_dataset(), 50) == 50


def test_steps_are_given_or_counted_from_epochs(capsys):
    batches = SimpleNamespace(epoch=lambda: range(7))

    def count(*argv, done=0):
        return count_steps(training_options("--learning_rate=0.5", *argv), batches, 2, done)

    assert count("--num_train_epochs=2.5") == 9  # of 17.5 batches, two a step
    assert count("--max_steps=6", "--warmup_steps=6", done=6) == 6
    assert capsys.readouterr().out.splitlines() == [
        "steps 0 to 9, learning rate up to 5.00e-01",
        "warning: the run ends during warm-up; lower --warmup_steps, or train longer.",
        "steps 6 to 6, learning rate up to 5.00e-01",
    ]
    with pytest.raises(UserError, match="^The run ends at step 6, but checkpoint-7 is past it; raise --max_steps"):
        count("--max_steps=6", done=7)
