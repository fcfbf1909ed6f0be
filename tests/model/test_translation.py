"""The Translator and the pipeline: order, limits, splitting, errors."""

import copy
import json
import os
import random
from collections import UserDict
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset
from helpers import N_BEST, TEXTS, never_end, python_output, save_translator, small_model, writing_translator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel, pipeline

from vanilla_transformer import Translator
from vanilla_transformer import translation_vanilla_transformer as translation
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.decoding_vanilla_transformer import beam_search, greedy_search
from vanilla_transformer.errors import UserError
from vanilla_transformer.loading import load_foreign
from vanilla_transformer.sentences_vanilla_transformer import CUTS, TextTooLong, cut
from vanilla_transformer.translation_vanilla_transformer import batches_by_length


def directly(translator: Translator, text: str, **generation) -> str:
    """One text, by the model's `generate`."""
    source = translator.tokenizer(text, return_tensors="pt")
    early = {"early_stopping": True} if generation.get("num_beams", 1) > 1 else {}
    output = translator.model.generate(**source, **early, **generation)
    return translator.tokenizer.decode(output[0], skip_special_tokens=True)


@pytest.mark.parametrize("search", N_BEST, ids=str)
def test_the_n_best_have_the_scores_that_the_model_gives_them(varied_translator, search):
    """The sum of the log-probabilities of their tokens, divided by the length to the power `length_penalty`."""
    translator, ended = varied_translator, set()
    tokenizer, model = translator.tokenizer, translator.model
    n, generation = search["n"], {"num_beams": search["n"], "length_penalty": 1.0, "max_new_tokens": 12, **search}
    del generation["n"]
    translator.max_tokens = 60
    for text, best in zip(TEXTS, translator.n_best(TEXTS, **search, max_new_tokens=12), strict=True):
        source = tokenizer(text, return_tensors="pt")
        early = {"early_stopping": True} if generation["num_beams"] > 1 else {}
        found = model.generate(**source, **generation, **early, num_return_sequences=n)
        assert len(best) == len({one.text for one in best}) == len(found)
        for one, ids in zip(best, found, strict=True):
            ends = (ids == tokenizer.eos_token_id).nonzero().flatten().tolist()
            ids = ids[: ends[0] + 1] if ends else ids
            with torch.no_grad():
                logits = model(**source, decoder_input_ids=ids[None, :-1]).logits[0]
            log_probs = logits.log_softmax(dim=-1).gather(1, ids[1:, None])
            score = log_probs.sum() / len(log_probs) ** generation["length_penalty"]
            assert one.score == pytest.approx(float(score), abs=1e-5)
            assert one.text == tokenizer.decode(ids, skip_special_tokens=True)
            assert one.tokens == sum(token not in tokenizer.all_special_ids for token in ids.tolist())
            ended.add(bool(ends))
    assert ended == {True, False}


@pytest.mark.parametrize("search", [*N_BEST, {"n": 3, "do_sample": True, "top_k": 1}], ids=str)
def test_the_n_best_of_many_texts_are_those_of_each_and_of_transformers(varied_translator, search):
    translator = varied_translator
    best = translator.n_best(["", *TEXTS, " "], **search, max_new_tokens=12)
    assert best[0] == best[-1] == []
    wrapped = Translator(torch.compile(translator.model), translator.tokenizer)
    alone = [translator.n_best(text, **search, max_new_tokens=12) for text in TEXTS]
    for others in (alone, wrapped.n_best(TEXTS, **search, max_new_tokens=12)):
        for one, other in zip(chain(*best), chain(*others), strict=True):
            assert (one.text, one.tokens) == (other.text, other.tokens)
            assert one.score == pytest.approx(other.score, abs=1e-5)


def test_wrong_n_and_texts_that_are_too_long_are_refused(translator):
    with pytest.raises(ValueError, match="`n` is 4; there are only 3 beams to choose from"):
        translator.n_best(TEXTS[0], 4, num_beams=3)
    for options in ({}, {"do_sample": True}):
        with pytest.raises(ValueError, match="`n` is 0; it must be at least 1"):
            translator.n_best(TEXTS[0], 0, **options)
    with pytest.raises(ValueError, match="A Translator does not take `num_return_sequences`; call its `n_best`, or"):
        translator(TEXTS, num_beams=3, num_return_sequences=3)
    translator.segmenter.longest, translator.segmenter.too_long = 5, "refuse"
    with pytest.raises(TextTooLong, match="Text 2 has .* at most 5 can be translated in one piece"):
        translator.n_best(["No", TEXTS[1]])
    assert translator.n_best(" ") == []


def test_a_generation_config_for_several_translations_still_gives_one_of_each_text(translator):
    several = GenerationConfig(num_beams=3, num_return_sequences=3, return_dict_in_generate=True, max_length=20)
    single = GenerationConfig(num_beams=3, max_length=20)
    assert translator(TEXTS, generation_config=several) == translator(TEXTS, generation_config=single)


def test_a_text_is_once_among_its_n_best(translator):
    """Beams write it in different tokens; samples of it are as many as they are."""
    tokenizer, model = translator.tokenizer, translator.model
    few = [index for index in range(len(tokenizer)) if tokenizer.decode([index]) in ("d", "o", "do", "og", "dog")]
    assert len(few) >= 3
    model.lm_head.bias = torch.nn.Parameter(torch.full((len(tokenizer),), -1e4))
    model.lm_head.bias.data[[*few, tokenizer.eos_token_id]] = 0
    best = translator.n_best("No!", n=40, max_new_tokens=5)
    texts = [one.text for one in best]
    assert 1 < len(texts) == len(set(texts)) < 40 and best == sorted(best, key=lambda one: -one.score)
    assert len(translator.n_best("No!", n=8, max_new_tokens=5, do_sample=True)) == 8


@pytest.mark.parametrize("max_tokens", [1, 60, 4096])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_every_text_is_translated_as_it_is_alone(translator, max_tokens, num_beams):
    generation = {"num_beams": num_beams, "max_new_tokens": 12}
    expected = [directly(translator, text, **generation) for text in TEXTS]
    assert len(set(expected)) > len(TEXTS) / 2  # else the order would not show
    translator.max_tokens = max_tokens
    assert translator(TEXTS, **generation) == expected
    assert translator(TEXTS[::-1], **generation) == expected[::-1]
    assert translator((text for text in TEXTS[:2]), **generation) == expected[:2]


@pytest.mark.parametrize("max_tokens", [5, 60, 400, 4096, 10**6])
def test_batches_hold_every_sentence_once_and_no_more_than_fits(max_tokens):
    lengths = [3 + number * 7 % 31 for number in range(200)] + [8000]
    batches = list(batches_by_length(lengths, max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(201))
    widths = [max(lengths[index] for index in batch) for batch in batches]
    assert widths == sorted(widths, reverse=True) and batches[0][0] == 200
    for batch, width in zip(batches, widths, strict=True):
        assert width * len(batch) <= max_tokens or len(batch) == 1
    assert len(batches) == {5: 201, 4096: 3, 10**6: 2}.get(max_tokens, len(batches))
    assert not list(batches_by_length([], max_tokens))


@pytest.mark.parametrize("num_beams", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_translations_end_where_generate_ends_them(translator, num_beams):
    never_end(translator)
    translator.model.generation_config.max_length = 17
    for limit in ({"max_length": 9}, {}):
        expected = [directly(translator, text, num_beams=num_beams, **limit) for text in TEXTS]
        assert translator(TEXTS, num_beams=num_beams, **limit) == expected
    assert len(translator.segmenter.encode([expected[0]])[0]) > 10
    translator.model.generation_config.max_length = None
    longest = max(map(len, translator.segmenter.encode(TEXTS)))
    limit = {"num_beams": num_beams, "max_new_tokens": longest + 50}
    assert translator(TEXTS, num_beams=num_beams) == [directly(translator, text, **limit) for text in TEXTS]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_translations_may_use_every_learned_position(text_tokenizer, num_beams):
    sizes = {"position_embedding_type": "learned", "max_position_embeddings": 12}
    translator = writing_translator(text_tokenizer, **sizes)
    never_end(translator)
    (best,) = translator.n_best("A man", 1, num_beams=num_beams, max_length=50)
    assert best.tokens == 12
    assert best.text == directly(translator, "A man", num_beams=num_beams, max_length=13)


def test_beam_search_stops_early_unless_told_otherwise(translator):
    def early(**generation):
        return translator.engine.stopping_options(5, generation).get("early_stopping")

    assert early(num_beams=3) is True and early() is None and early(num_beams=3, early_stopping=False) is False
    translator.model.generation_config.update(num_beams=2, early_stopping="never")
    assert early() == "never" and early(early_stopping=True) is True


def searches_of(translator: Translator, **generation) -> list:
    """The searches that `translator` passes to `generate` in turn, None for transformers' own."""
    with patch.object(translator.model, "generate", wraps=translator.model.generate) as generate:
        translator(["A man"], max_new_tokens=4, **generation)
    return [call.kwargs.get("custom_generate") for call in generate.call_args_list]


OTHERS = [{"do_sample": True, "num_beams": 3}, {"stopping_criteria": [lambda *_, **__: torch.tensor([False])]}]
OTHERS += [{"prefix_allowed_tokens_fn": lambda *_: [5]}, {"cache_implementation": "static"}]
OTHERS += [{"encoder_repetition_penalty": 1.5}]


def test_transformers_searches_only_where_ours_cannot(translator):
    assert searches_of(translator) == [greedy_search]
    assert searches_of(translator, do_sample=True, top_p=0.9, max_time=9.0) == [greedy_search]
    assert searches_of(translator, num_beams=3, no_repeat_ngram_size=2) == [beam_search]
    for other in OTHERS:
        ours = beam_search if "num_beams" in other else greedy_search
        assert searches_of(translator, **other) == [ours, None]
    expected = translator(TEXTS, max_new_tokens=8)
    wrapped = get_peft_model(copy.deepcopy(translator.model), LoraConfig(target_modules=["q_proj"]))
    for model in (wrapped, torch.compile(translator.model)):
        other = Translator(model, translator.tokenizer)
        assert searches_of(other) == [None] and other(TEXTS, max_new_tokens=8) == expected
    config = GenerationConfig(**translator.model.generation_config.to_dict() | {"max_length": 9})
    assert translator(TEXTS, generation_config=config) == expected
    config.num_beams, search = 3, {"num_beams": 3, "max_length": 9}
    assert translator.n_best(TEXTS, 2, generation_config=config) == translator.n_best(TEXTS, 2, **search)


def test_the_generation_config_gives_the_defaults(translator):
    translator.model.generation_config.update(num_beams=3, max_new_tokens=9, max_length=None)
    assert translator(TEXTS) == translator(TEXTS, num_beams=3, max_new_tokens=9)
    assert translator(TEXTS) != translator(TEXTS, num_beams=1, max_new_tokens=9)
    assert translator(TEXTS) != translator(TEXTS, num_beams=3, max_new_tokens=8)


def test_empty_texts_stay_empty_where_they_are(translator):
    found = translator(["", "No!", "  ", "\n\t", "A man", ""], max_new_tokens=5)
    assert [bool(text) for text in found] == [False, True, False, False, True, False]
    assert found[1::3] == translator(["No!", "A man"], max_new_tokens=5)
    assert translator(["", " ", "\u200b\ufeff", "\u00ad \u2060"]) == [""] * 4  # what the tokenizer drops
    assert translator([]) == []


def test_a_tokenizer_that_pads_on_the_left(translator):
    expected = translator(TEXTS, max_new_tokens=8)
    left = train_tokenizer(TEXTS, 300)
    left.padding_side = "left"
    assert Translator(translator.model, left)(TEXTS, max_new_tokens=8) == expected


# ------------------------------------------------------------------------------------------------------------- loading


FFN_BIAS = "model.encoder.layers.{}.fc1.bias"
DAMAGE = {
    "missing": {FFN_BIAS.format(0): None},
    "unexpected": {FFN_BIAS.format(7): torch.zeros(24)},
    "mismatched": {FFN_BIAS.format(0): torch.zeros(23)},
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_weights_that_do_not_match_are_refused(kind, folder):
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file) | DAMAGE[kind]
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"do not match its config: 1 {kind} .*fc1.bias.*download or save"):
        Translator.from_pretrained(folder)


def test_truncated_weights_are_refused(folder):
    os.truncate(Path(folder) / "model.safetensors", 1000)
    with pytest.raises(UserError, match="^the weights of .* are damaged: .*; download or save them again.$"):
        Translator.from_pretrained(folder)


def test_another_kind_of_model_is_refused(folder):
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=30)).save_pretrained(folder)
    with pytest.raises(UserError, match="is of type gpt2, which is no sequence-to-sequence model; give one that"):
        Translator.from_pretrained(folder)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "../model.safetensors"])
def test_other_files_than_safetensors_are_refused(file, folder):
    weights = Path(folder) / "model.safetensors"
    weights = weights.rename(weights.with_name("weights.safetensors"))
    index = weights.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": file}}))
    with pytest.raises(ValueError, match=f"refers to {file}; only safetensors files in its own directory"):
        Translator.from_pretrained(folder)
    index.unlink()
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    with pytest.raises(UserError, match="no model.safetensors; .*`vanilla-transformer convert"):
        Translator.from_pretrained(folder)


def test_bfloat16_on_a_cpu_without_it_warns(folder, monkeypatch, recwarn):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    with pytest.warns(UserWarning, match="use dtype='float32'"):
        Translator.from_pretrained(folder, device="cpu", dtype="bfloat16")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    recwarn.clear()
    Translator.from_pretrained(folder, device="cpu", dtype="bfloat16")
    assert not [one for one in recwarn if "float32" in str(one.message)]


# ----------------------------------------------------------------------------------------------------------- ensembles


@pytest.fixture
def other_folder(text_tokenizer, tmp_path):
    """A model of another size with the vocabulary of `folder`, which was trained on at most 14 positions."""
    sizes = {"position_embedding_type": "learned", "max_position_embeddings": 14, "decoder_layers": 1}
    return save_translator(writing_translator(text_tokenizer, **sizes), tmp_path / "other")


@pytest.mark.parametrize("generation", [{}, {"num_beams": 3}, {"do_sample": True}])
def test_an_ensemble_equals_a_search_over_its_models(folder, other_folder, generation):
    translator = Translator.from_pretrained([folder, other_folder], device="cpu")
    text, limit = TEXTS[0], {"max_new_tokens": 8}
    model, (other,) = translator.engine.model, translator.engine.others
    inputs = translator.tokenizer(text, return_tensors="pt")
    others = [(other, other.get_encoder()(**inputs))]
    search = beam_search if "num_beams" in generation else greedy_search
    options = {**limit, **generation, "early_stopping": True if "num_beams" in generation else None}
    torch.manual_seed(1)
    output = model.generate(**inputs, **options, custom_generate=search, others=others)
    torch.manual_seed(1)
    found = translator([text], **limit, **generation)
    assert found == translator.tokenizer.batch_decode(output, skip_special_tokens=True)
    alone = [Translator.from_pretrained(one)([text], **limit, **generation) for one in (folder, other_folder)]
    assert found not in alone
    assert translator.segmenter.longest == translator.engine.max_positions == 14


def test_models_that_cannot_be_averaged_are_refused(folder, other_folder, text_tokenizer):
    train_tokenizer(["other texts"], 300).save_pretrained(other_folder)
    with pytest.raises(ValueError, match=f"{other_folder} has a different vocabulary from {folder}.*train the models"):
        Translator.from_pretrained([folder, other_folder])
    with pytest.raises(ValueError, match="CTranslate2 runs one model at a time; an ensemble needs `backend='torch'`"):
        Translator.from_pretrained([folder, folder], backend="ctranslate2")
    models = [writing_translator(text_tokenizer, eos_token_id=end).model for end in (2, 7)]
    with pytest.raises(ValueError, match="The models differ in `eos_token_id`; train an ensemble with one tokenizer"):
        Translator(models, text_tokenizer)


def test_an_ensemble_refuses_what_only_transformers_searches_support(translator):
    twice = Translator([translator.model] * 2, translator.tokenizer)
    with pytest.raises(ValueError, match="An ensemble does not support EncoderRepetitionPenalty.*; leave it out, or"):
        twice(TEXTS, encoder_repetition_penalty=1.5)
    wrapped = Translator([translator.model, torch.compile(translator.model)], translator.tokenizer)
    with pytest.raises(ValueError, match="An ensemble does not support .*wrapped models"):
        wrapped(TEXTS)


# ------------------------------------------------------------------------------------------------------------ too long


@pytest.fixture
def learned(text_tokenizer):
    return writing_translator(text_tokenizer, position_embedding_type="learned", max_position_embeddings=14)


def test_a_word_beyond_learned_positions_is_cut_or_named(learned):
    longest = "b" * 12
    assert len(learned.tokenizer(longest).input_ids) == 14
    assert len(learned.split(["", longest]).sources) == 1
    assert learned(["No!", longest + "b", "Yes."])[::2] == learned(["No!", "Yes."])
    assert learned.split([longest + "bc"]).sources == learned.segmenter.encode([longest, "bc"])
    learned.segmenter.too_long = "refuse"
    for texts in [["", "No!", longest + "b"], ["No!", longest, longest + "b", longest]]:
        with pytest.raises(TextTooLong, match="Text 3 has 15 tokens; at most 14 can") as caught:
            learned(texts)
        assert (caught.value.number, caught.value.tokens, caught.value.limit) == (2, 15, 14)


PARAGRAPH = "A dog sleeps. Two children play, in the park, today. No! A man"


def test_a_text_that_is_too_long_is_translated_in_pieces(translator):
    pieces = ["A dog sleeps.", "Two children play,", "in the park, today.", "No! A man"]
    limit = max(len(ids) for ids in translator.segmenter.encode(pieces))
    shorter = Translator(translator.model, translator.tokenizer, max_source_length=limit)
    found = shorter(["Yes.", PARAGRAPH, ""], max_new_tokens=8)
    assert found == [
        directly(translator, "Yes.", max_new_tokens=8),
        " ".join(directly(translator, piece, max_new_tokens=8) for piece in pieces),
        "",
    ]
    refusing = Translator(translator.model, translator.tokenizer, max_source_length=limit, too_long="refuse")
    with pytest.raises(TextTooLong, match="Text 2 has "):
        refusing(["Yes.", PARAGRAPH, ""])


TO_CUT = [PARAGRAPH, "他走了。我来了，你呢？好！", "a" * 6, "One two three four five. Six", "No. " * 1700 + "No."]


@pytest.mark.parametrize("longest", [4, 7, 10, 20, 30, 45, 100])
@pytest.mark.parametrize("text", TO_CUT, ids=["English", "Chinese", "one word", "words", "many sentences"])
def test_pieces_fit_and_make_up_the_text(text, longest):
    pieces = list(cut(text, lambda piece: len(piece.strip()) <= longest, lambda piece: False))
    assert "".join(pieces) == text
    for piece in pieces:
        assert len(piece.strip()) <= longest
    if longest >= 40:
        assert all(piece.strip()[-1] in ".!。！？" for piece in pieces[:-1])  # whole sentences


def one_by_one(text: str, fits, level: int = 0) -> list[str]:
    """As `cut`, but it tries every length of each piece."""
    if fits(text) or level == len(CUTS):
        return [text]
    pieces, piece = [], ""
    for start, end in pairwise([0, *CUTS[level](text)]):
        if piece and not fits(piece + text[start:end]):
            pieces.append(piece)
            piece = ""
        piece += text[start:end]
    return [part for piece in [*pieces, piece] for part in one_by_one(piece, fits, level + 1) if part.strip()]


@pytest.mark.parametrize("longest", [1, 4, 7, 10, 20, 30, 45, 100, 1000])
def test_pieces_are_as_long_as_those_of_a_plain_search(longest):
    generator = random.Random(longest)
    parts = [*"aé犬", "bc", " ", "  ", ". ", "! ", ", ", "; ", "。", "，", "\n", "word"]
    texts = ["".join(generator.choices(parts, k=generator.randint(1, 60))) for _ in range(200)]
    for text in filter(str.strip, [*TO_CUT, *texts]):
        fits = lambda piece: len(piece.strip()) <= longest  # noqa: E731
        assert list(cut(text, fits, fits)) == one_by_one(text, fits)


def test_few_lengths_of_each_piece_of_a_long_word_are_tried():
    tried = []
    pieces = list(cut("x" * 100_000, lambda piece: tried.append(piece) or len(piece) <= 29, lambda piece: False))
    assert len(pieces) == 3449 and len(tried) < 3 * len(pieces)


def test_a_sentence_or_a_word_longer_than_usual_stays_whole_if_it_can():
    fits, is_possible = (partial(lambda longest, piece: len(piece.strip()) <= longest, longest) for longest in (8, 20))
    assert list(cut("One. Two three four. Five.", fits, is_possible)) == ["One. ", "Two three four. ", "Five."]
    text = "No. " + 3 * "seven, " + 15 * "x" + " " + 21 * "y"
    pieces = ["No. ", *3 * ["seven, "], 15 * "x" + " ", *2 * [8 * "y"], 5 * "y"]
    assert list(cut(text, fits, is_possible)) == pieces


def tokenized(translator: Translator, text: str, **options) -> tuple[int, int]:
    """How many characters are tokenized, and how many pieces are found, for a text that is too long."""
    lengths, encode = [], translator.segmenter.encode
    with patch.object(translator.segmenter, "encode", lambda texts: lengths.extend(map(len, texts)) or encode(texts)):
        pieces = translator.split([text]).sources
    return sum(lengths), len(pieces)


MONSTERS = {  # twice as long as what is tokenized whole, and more
    "sentences": 600 * "Two children play in the park, today. ",
    "words": 4_000 * "park ",
    "clauses": 3_000 * "a dog, ",
    "Chinese": 2_500 * "纽约是一座城市，",
    "one letter words": 10_000 * "a ",
    "a word after spaces": "a" + 300_000 * " " + "park",
}


@pytest.mark.parametrize("text", MONSTERS.values(), ids=MONSTERS)
def test_a_monstrous_text_is_split_in_linear_time(translator, text):
    once, pieces = tokenized(translator, text)
    twice, more = tokenized(translator, text + text)
    assert more == 2 * pieces or more == 2 * pieces - 1  # the middle may be one piece
    assert twice < 2.1 * once and once < 40 * len(text.replace(" ", "")) + len(text) + 20_000


MONSTROUS_WORDS = [20_000 * "x", 2_000 * "a dog. " + 20_000 * "x", 10_000 * "犬"]


@pytest.mark.parametrize("text", MONSTROUS_WORDS, ids=["Latin", "after sentences", "Chinese"])
def test_a_monstrous_word_is_cut_in_linear_time(translator, text):
    translator.segmenter.usual = translator.segmenter.longest = 20
    once, pieces = tokenized(translator, text)
    twice, more = tokenized(translator, text + text)
    assert 2 * pieces - 1 <= more <= 2 * pieces + 1
    assert twice < 2.1 * once and once < 40 * len(text) + 20_000
    translator.segmenter.too_long = "refuse"
    with pytest.raises(TextTooLong, match="Text 2 has [0-9]+ tokens; at most 20 can") as caught:
        translator(["No!", text])
    assert caught.value.tokens > 7_000


def test_tags_without_end_are_refused():
    tokenizer = train_tokenizer(TEXTS, 300, tags=["<bt>"])
    tokenizer.init_kwargs["source_tags"] = ["<bt>"]
    with pytest.raises(TextTooLong):
        writing_translator(tokenizer).split([10_000 * "<bt> " + 1000 * "word "])


def test_a_batch_has_so_many_sentences_that_the_scores_of_their_beams_fit(translator, monkeypatch):
    """More, if `max_tokens` allows more; at least one."""
    sizes = []
    monkeypatch.setattr(translation, "SCORES_PER_TOKEN", 2**8)
    generate = translator.engine.generate
    monkeypatch.setattr(
        translator.engine, "generate", lambda sources, *rest: sizes.append(len(sources)) or generate(sources, *rest)
    )
    vocabulary = len(translator.tokenizer)
    for max_tokens, num_beams in [(4096, 2), (4096, 200), (8192, 200), (10, 200)]:
        translator.max_tokens = max_tokens
        translator(40 * ["No!"], num_beams=num_beams, max_new_tokens=3)
        assert max(sizes) == min(40, max(1, 2**8 * max_tokens // (num_beams * vocabulary))), (max_tokens, num_beams)
        sizes.clear()


def test_each_piece_begins_with_the_language(marian):
    translator = Translator(load_foreign(str(marian)), AutoTokenizer.from_pretrained(marian), max_source_length=9)
    pieces = ["He is a teacher.", "We are friends.", "They are happy."]
    segments = translator.split([f">>deu<< {' '.join(pieces)}", " ".join(pieces)])
    language = translator.tokenizer.convert_tokens_to_ids(">>deu<<")
    expected = translator.segmenter.encode(pieces)
    assert max(map(len, expected)) < 9
    assert segments.sources == [[language, *piece] for piece in expected] + expected
    assert segments.text_indices == [0, 0, 0, 1, 1, 1]
    translator.segmenter.too_long = "refuse"
    with pytest.raises(TextTooLong, match=f"Text 1 has {sum(map(len, expected)) - 1} tokens"):
        translator([f">>deu<< {' '.join(pieces)}"])


def test_each_piece_begins_with_the_tags_of_the_text():
    """Tags that train.py noted, and languages as Marian models have them; no other token that was added."""
    tokenizer = train_tokenizer(TEXTS, 300, tags=["<bt>", ">>de<<", "__formal__", "[de]"])
    tokenizer.init_kwargs["source_tags"] = ["<bt>", "__formal__", "[de]"]
    tokenizer.add_tokens(["House", "@user", "\U0001f600", "<b>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mark>"]})
    translator = writing_translator(tokenizer)
    pieces = ["House and dog.", "Two children play,", "in the park."]
    for tags in ["<bt>", ">>de<<", "__formal__ ", "[de]", "<bt> >>de<<", " [de]  <bt>__formal__ "]:
        expected = translator.segmenter.encode([f"{tags} {piece}" for piece in pieces])
        translator.segmenter.usual = translator.segmenter.longest = max(map(len, expected))
        assert translator.split([f"{tags} {' '.join(pieces)}"]).sources == expected
    for other in ["House", "@user", "\U0001f600", "<b>", "<mark>", "<x>", "de"]:
        *_, last = translator.split([f"{other} {' '.join(pieces)}"]).sources
        assert last == translator.segmenter.encode(pieces)[-1]


def test_texts_with_unknown_characters_are_counted(marian):
    translator = Translator(load_foreign(str(marian)), AutoTokenizer.from_pretrained(marian))
    with pytest.warns(UserWarning, match="^2 of 4 texts have characters that the tokenizer does not know; ") as caught:
        translator(["犬", "He is a teacher.", "", "A 犬!"])
    assert caught[0].filename == __file__


def test_our_tokenizer_knows_every_character(translator, recwarn):
    translator(["犬", "\u0958", "a <unk>", "\U0010ffff"])
    assert not recwarn


def test_texts_are_split_at_the_longest_training_source(translator):
    model, trained = translator.model, copy.deepcopy(translator.tokenizer)
    assert translator.segmenter.longest == model.config.max_position_embeddings == 40
    assert Translator(model, trained, max_source_length=99).segmenter.longest == 99
    trained.model_max_length = 9
    assert (Translator(model, trained).segmenter.usual, Translator(model, trained).segmenter.longest) == (9, 40)
    longer = Translator(model, trained, max_source_length=12)
    assert longer.segmenter.longest == longer.segmenter.usual == 12
    trained.model_max_length = model.config.max_position_embeddings = 10**8
    assert Translator(model, trained).segmenter.longest == 4096
    assert Translator(model, trained, max_source_length=5000).segmenter.longest == 5000


WRONG = {"num_beams": 0, "max_new_tokens": 0, "max_length": -3, "length_penalty": float("nan")}
WRONG |= {"return_dict_in_generate": True}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named(name, translator):
    for value in (WRONG[name], "3", [3]):
        with pytest.raises(ValueError, match=f"`{name}`"):
            translator(["A man"], **{name: value})


SAVED = {"num_beams": "3", "max_length": [3], "length_penalty": 1e9, "max_new_tokens": 0.5}


@pytest.mark.parametrize("name", SAVED)
def test_wrong_values_of_the_generation_config_are_named_before_a_text_is_translated(name, translator):
    setattr(translator.model.generation_config, name, SAVED[name])
    with pytest.raises(ValueError, match=f"`{name}`.* is "):
        Translator(translator.model, translator.tokenizer)


def test_wrong_texts_and_arguments_are_named(translator):
    with pytest.raises(TypeError, match="list of texts"):
        translator("The dog.")
    for wrong in [None, 3, b"A man", float("nan")]:
        with pytest.raises(TypeError, match="Text 2 is "):
            translator(["A man", wrong])
    with pytest.raises(ValueError, match="Text 2 contains a lone surrogate"):
        translator(["A man", "\udc80"])
    small = small_model(vocab_size=len(translator.tokenizer) - 1)
    with pytest.raises(ValueError, match="Text 2 has the token .*, number .*, but the model has only .* tokens"):
        Translator(small, translator.tokenizer)(["", translator.tokenizer.decode([len(translator.tokenizer) - 1])])
    for name, value in [("max_tokens", 0), ("max_source_length", 0), ("too_long", "cut")]:
        with pytest.raises(ValueError, match=f"`{name}` is {value!r}"):
            Translator(translator.model, translator.tokenizer, **{name: value})


def test_translations_stay_within_learned_positions(learned):
    never_end(learned)
    assert all(learned(["No!", "b" * 12], num_beams=beams) for beams in (1, 2))
    assert all(learned(["No!", "b" * 12], **{bound: 99}) for bound in ("max_length", "max_new_tokens"))


@pytest.mark.parametrize("position_embedding_type", ["sinusoidal", "rotary", "marian"])
def test_other_positions_have_no_end(text_tokenizer, position_embedding_type):
    config = {"position_embedding_type": position_embedding_type, "max_position_embeddings": 14}
    split = writing_translator(text_tokenizer, **config)
    translator = Translator(split.model, text_tokenizer, max_source_length=999)
    never_end(translator)
    found = translator([PARAGRAPH], max_new_tokens=20)
    assert found == [directly(translator, PARAGRAPH, max_new_tokens=20)] != split([PARAGRAPH], max_new_tokens=20)
    assert found != translator([PARAGRAPH], max_new_tokens=14)


# ------------------------------------------------------------------------------------------------------------ pipeline

WITHOUT_THE_PACKAGE = """
import json, sys
sys.modules["vanilla_transformer"] = None
from torch import tensor
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, pipeline

folder, copy, texts = json.load(sys.stdin)
translate = pipeline("vanilla-translation", model=folder, trust_remote_code=True)
found = [translate(texts, max_new_tokens=8), translate(texts[0], max_new_tokens=8)]
translate.save_pretrained(copy)
found.append(pipeline(model=copy, trust_remote_code=True, num_beams=2, max_new_tokens=8)(texts))
config, base, model = (
    auto.from_pretrained(folder, trust_remote_code=True) for auto in (AutoConfig, AutoModel, AutoModelForSeq2SeqLM)
)
assert type(config) is type(model.config)
inputs = {"input_ids": tensor([[5, 6, 7, 2]]), "decoder_input_ids": tensor([[1, 8, 9]])}
found += [base(**inputs).last_hidden_state.tolist(), model(**inputs).logits.tolist()]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_models_and_pipeline_load_without_the_package(folder, translator, tmp_path):
    """And so does what is saved there, in a directory with any name."""
    task = json.dumps([folder, str(tmp_path / "my copy [v1] 纽约"), ["No!", "", *TEXTS]])
    cache = {"HF_MODULES_CACHE": str(tmp_path)}
    printed = python_output("-c", WITHOUT_THE_PACKAGE, input=task, env=cache, cwd=tmp_path)
    many, one, beams, hidden, logits = json.loads(printed.splitlines()[-1])
    expected = translator(["No!", "", *TEXTS], max_new_tokens=8)
    assert [found["translation_text"] for found in many] == expected
    assert one == [{"translation_text": expected[0]}]
    expected = translator(["No!", "", *TEXTS], num_beams=2, max_new_tokens=8)
    assert [found["translation_text"] for found in beams] == expected
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 2]]), "decoder_input_ids": torch.tensor([[1, 8, 9]])}
    assert translator.model.model(**inputs).last_hidden_state.tolist() == hidden
    assert translator.model(**inputs).logits.tolist() == logits


def test_a_pipeline_of_a_model_in_memory(translator):
    shorter = Translator(translator.model, translator.tokenizer, max_source_length=8)
    translate = pipeline("vanilla-translation", model=shorter.model, tokenizer=shorter.tokenizer, max_source_length=8)
    texts = [PARAGRAPH, "No!"]
    expected = [{"translation_text": text} for text in shorter(texts, max_new_tokens=4)]
    assert translate(texts, max_new_tokens=4) == expected == translate(iter(texts), max_new_tokens=4)
    with pytest.raises(TextTooLong):
        translate(texts, too_long="refuse")
    with pytest.raises(TypeError, match="not a dict"):
        translate({"text": "No!"})


def test_texts_are_taken_from_columns_and_not_from_tables(translator):
    frame, dataset = pandas.DataFrame({"text": TEXTS}), Dataset.from_dict({"text": TEXTS})
    expected = translator(TEXTS, max_new_tokens=4)
    arrays = (frame["text"].to_numpy(), np.array(TEXTS))
    for texts in (frame["text"], dataset["text"], *arrays, iter(TEXTS), tuple(TEXTS)):
        assert translator(texts, max_new_tokens=4) == expected
    for table in (frame, {"text": TEXTS}, UserDict(text=TEXTS)):
        for call in (translator, translator.n_best):
            with pytest.raises(TypeError, match=f"such as one column, not a {type(table).__name__}"):
                call(table)
    with pytest.raises(TypeError, match="Text 1 is {.*, of type dict; give texts only"):
        translator(dataset)


def test_the_pipeline_runs_no_code_unasked(folder):
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        pipeline("vanilla-translation", model=folder)
