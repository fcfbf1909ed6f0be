"""CTranslate2 translates as the model does."""

import json
import os
import pickle
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import EMBEDDINGS, N_BEST, TEXTS, never_end, norms, positions, save_translator, writing_translator
from huggingface_hub import constants

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main
from vanilla_transformer.errors import UserError
from vanilla_transformer.sentences_vanilla_transformer import TextTooLong

ctranslate2 = pytest.importorskip("ctranslate2")
from vanilla_transformer.engines import ctranslate2 as backend  # noqa: E402


@pytest.fixture(scope="module")
def shared(text_tokenizer, tmp_path_factory):
    """A saved model that no test changes, so that it is converted once."""
    torch.manual_seed(0)
    return save_translator(writing_translator(text_tokenizer), tmp_path_factory.mktemp("model"))


def load(folder, **options) -> Translator:
    return Translator.from_pretrained(folder, backend="ctranslate2", device="cpu", **options)


def converted(translator: Translator, folder, quantization=None) -> Translator:
    backend.to_ctranslate2(translator.model, translator.tokenizer, folder / "converted", quantization)
    return load(str(folder / "converted"))


def test_an_existing_directory_is_not_overwritten(translator, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        backend.to_ctranslate2(translator.model, translator.tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


LEARNED = {"norm_first": True, "position_embedding_type": "learned"}
SEARCHES = [{}, {"length_penalty": 0.6}, {"num_beams": 3}, {"num_beams": 3, "length_penalty": 2.0}]
SEARCHES += [{"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.3}, {"min_new_tokens": 5}]
SEARCHES += [{"suppress_tokens": [70]}, {"bad_words_ids": [[70], [80, 81], [2]]}]
SEARCHES += [{"num_beams": 3, "no_repeat_ngram_size": 2, "min_length": 6, "renormalize_logits": True}]


@norms
@positions
def test_translations_equal_those_of_torch(text_tokenizer, norm_first, position_embedding_type, tmp_path):
    options = {"norm_first": norm_first, "position_embedding_type": position_embedding_type, "layer_norm_eps": 1e-2}
    options |= {"activation_function": "gelu", "scale_embedding": norm_first, "lm_head_bias": True}
    ours = writing_translator(text_tokenizer, **options)
    ours.model.lm_head.bias.data[text_tokenizer.eos_token_id] += 1.5
    theirs, different = converted(ours, tmp_path), set()
    for search in SEARCHES:
        search = {"max_new_tokens": 12, **search}
        expected = ours(TEXTS, **search)
        assert theirs(TEXTS, **search) == expected, search
        different |= set(expected)
    assert len(different) > 2 * len(TEXTS)


def test_without_a_length_penalty_no_search_ends_earlier(shared):
    """CTranslate2's ends with the first hypothesis that is the best of a step, if it is told 0; ours goes on.

    Of 300 sentences with their words reversed, a model of the sample translated 8 differently with 2 beams.
    """
    theirs = load(shared)
    options = theirs.engine.engine_options({"num_beams": 2, "length_penalty": 0.0, "max_length": 9})
    assert 0 < options["length_penalty"] < 1e-6
    search = {"num_beams": 3, "length_penalty": 0.0, "max_new_tokens": 12}
    assert theirs(TEXTS, **search) == Translator.from_pretrained(shared, device="cpu")(TEXTS, **search)


@pytest.mark.parametrize("search", N_BEST, ids=str)
def test_the_n_best_and_their_scores_equal_those_of_torch(shared, search):
    ours, theirs = Translator.from_pretrained(shared, device="cpu"), load(shared)
    for text in TEXTS:
        expected, found = (one.n_best(text, **search, max_new_tokens=12) for one in (ours, theirs))
        assert [(one.text, one.tokens) for one in found] == [(one.text, one.tokens) for one in expected]
        assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-5)


@pytest.mark.parametrize("config", [{}, {"norm_first": True}, LEARNED], ids=["marian", "pegasus", "blenderbot"])
def test_native_form_is_converted_by_our_command(text_tokenizer, config, tmp_path):
    """CTranslate2's own command refuses it."""
    ours = writing_translator(text_tokenizer, **config)
    folder, native, converted = (str(tmp_path / name) for name in ("ours", "native", "converted"))
    main(["convert", save_translator(ours, folder), native, "--to", "native"])
    with pytest.raises((ValueError, AttributeError)):
        ctranslate2.converters.TransformersConverter(native).convert(str(tmp_path / "theirs"))
    main(["convert", native, converted, "--to", "ctranslate2"])
    assert load(converted)(TEXTS, num_beams=3, max_new_tokens=12) == ours(TEXTS, num_beams=3, max_new_tokens=12)


@pytest.mark.parametrize("embeddings", EMBEDDINGS)
def test_every_kind_of_embeddings_is_converted(text_tokenizer, embeddings, tmp_path):
    config = {"tie_word_embeddings": True, **EMBEDDINGS[embeddings]}
    if "decoder_vocab_size" in config:  # ids beyond the tokenizer have no token
        config["decoder_vocab_size"] = len(text_tokenizer) + 5
    ours = writing_translator(text_tokenizer, **config)
    theirs = converted(ours, tmp_path)
    for num_beams in (1, 3):
        search = {"num_beams": num_beams, "max_new_tokens": 12}
        assert theirs(TEXTS, **search) == ours(TEXTS, **search)


def test_saved_generation_config_and_several_ends_hold(translator, tmp_path):
    translator.model.generation_config.update(num_beams=3, max_length=9, eos_token_id=[2, 70, 80])
    theirs = converted(translator, tmp_path)
    assert theirs(TEXTS) == translator(TEXTS) != theirs(TEXTS, max_length=8)


def test_without_an_end_in_the_generation_config_that_of_the_config_ends_translations(text_tokenizer, tmp_path):
    ours = writing_translator(text_tokenizer, lm_head_bias=True)
    ours.model.lm_head.bias.data[text_tokenizer.eos_token_id] += 3
    expected = ours(TEXTS, max_new_tokens=12)
    assert expected != ours(TEXTS, max_new_tokens=12, eos_token_id=[])
    ours.model.generation_config.eos_token_id = None
    assert converted(ours, tmp_path)(TEXTS, max_new_tokens=12) == ours(TEXTS, max_new_tokens=12) == expected


@pytest.mark.parametrize("max_tokens", [1, 40, 4096])
def test_order_empty_texts_and_pieces(shared, max_tokens):
    ours = Translator.from_pretrained(shared, device="cpu", max_source_length=12, max_tokens=max_tokens)
    theirs = load(shared, max_source_length=12, max_tokens=max_tokens)
    texts = ["", *TEXTS, " ", "A dog sleeps. No! Two men, and a man. Yes."]
    assert theirs(texts, max_new_tokens=8) == ours(texts, max_new_tokens=8)
    with pytest.raises(TextTooLong, match="Text 1 has "):
        load(shared, max_source_length=3, too_long="refuse")(["abcdefgh"])


def test_learned_positions_end_translations(text_tokenizer, tmp_path):
    ours = writing_translator(text_tokenizer, position_embedding_type="learned", max_position_embeddings=14)
    never_end(ours)
    assert converted(ours, tmp_path)(["No!"], max_new_tokens=99) == ours(["No!"], max_new_tokens=99)


REFUSED = [{"num_beams": 3, "early_stopping": False}, {"num_beams": 3, "early_stopping": "never"}, {"do_sample": True}]
REFUSED += [{"num_beams": 3, "repetition_penalty": 1.3}, {"num_beams": 3, "no_repeat_ngram_size": 2}]
REFUSED += [{"encoder_repetition_penalty": 1.5}, {"eos_token_id": 7}, {"stopping_criteria": [1]}]


@pytest.mark.parametrize("search", REFUSED, ids=str)
def test_options_without_an_equal_are_refused(shared, search):
    with pytest.raises(ValueError, match=f"CTranslate2 does not support `{list(search)[-1]}="):
        load(shared)(["No!"], **search)


def test_model_is_converted_once_and_again_when_it_changes(translator, folder, monkeypatch):
    calls, convert = [], backend.to_ctranslate2
    monkeypatch.setattr(backend, "to_ctranslate2", lambda *args: calls.append(args[3]) or convert(*args))
    for quantization in (None, None, "int8", "int8"):
        load(folder, quantization=quantization)
    assert calls == [None, "int8"]
    home = load(folder).engine.directory.parent
    assert {path.name for path in home.iterdir()} == {".lock", "float32", "int8"}
    assert load(home / "int8").engine.translator.compute_type.startswith("int8")
    times = {file: (0, file.stat().st_mtime_ns) for file in Path(folder).glob("*.*")}
    second = writing_translator(translator.tokenizer)
    save_translator(second, folder)
    for file, time_of in times.items():  # as in an image of a container, where all files have the same
        os.utime(file, ns=time_of)
    found = load(folder)(TEXTS, max_new_tokens=12)
    assert len(calls) == 3 and found == second(TEXTS, max_new_tokens=12) != translator(TEXTS, max_new_tokens=12)
    with pytest.raises(ValueError, match="was converted with `quantization='int8'`, not 'int16'"):
        load(home / "int8", quantization="int16")


def test_a_model_in_a_subfolder_is_another_model(translator, folder):
    other = writing_translator(translator.tokenizer)
    save_translator(other, Path(folder, "sub", "folder"))
    for subfolder, expected in [("", translator), ("sub/folder", other)]:
        assert load(folder, subfolder=subfolder)(TEXTS, max_new_tokens=12) == expected(TEXTS, max_new_tokens=12)


def test_what_a_killed_conversion_left_is_removed(text_tokenizer, folder):
    home = load(folder).engine.directory.parent
    (home / ".unfinished-x" / "float32").mkdir(parents=True)
    load(save_translator(writing_translator(text_tokenizer), folder))
    assert {path.name for path in home.iterdir()} == {".lock", "float32"}


def test_a_model_without_start_or_end_is_refused(translator, tmp_path):
    model = translator.model
    for name in ("eos_token_id", "decoder_start_token_id"):
        for config in (model.config, model.generation_config):
            setattr(config, name, None)
        with pytest.raises(ValueError, match="needs a `decoder_start_token_id` and an `eos_token_id`"):
            backend.to_ctranslate2(model, translator.tokenizer, tmp_path / "new")


def test_a_cache_that_cannot_be_written_is_named_with_its_remedy(shared, tmp_path, monkeypatch):
    """It is below a file, which stops root too."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HOME", tmp_path / "file")
    with pytest.raises(UserError, match=f"^{tmp_path}/file/.* cannot be written: Not a directory; set HF_HOME to"):
        load(shared)


def test_a_conversion_is_used_where_nothing_can_be_written(folder):
    """As one that another user made in a cache of several. A directory in place of the lock stops root too."""
    first = load(folder)
    lock = first.engine.directory.parent / ".lock"
    lock.unlink(missing_ok=True)
    lock.mkdir()
    assert load(folder)(TEXTS, max_new_tokens=5) == first(TEXTS, max_new_tokens=5)
    with pytest.raises(UserError, match="cannot be written: Is a directory; set HF_HOME to"):
        load(folder, quantization="int8")


DAMAGES = {
    "more tokens": ("shared_vocabulary.json", lambda data: json.dumps([*json.loads(data), *map(str, range(9999))])),
    "fewer tokens": ("shared_vocabulary.json", lambda data: json.dumps(json.loads(data)[:-1])),
    "other heads": ("model.bin", lambda data: re.sub(rb"(num_heads\0\0\x02\x02\0\0\0).", rb"\1\0", data)),
    "cut": ("model.bin", lambda data: data[:2000]),
    "no variables": ("model.bin", lambda data: b"\0" * len(data)),
    "a larger config": (backend.CONVERTED, lambda data: re.sub(rb'(vocab_size": )\d+', rb"\g<1>9999", data)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_ctranslate2_would_read_beyond_its_memory_is_refused(damage, shared, tmp_path):
    converted = shutil.copytree(load(shared).engine.directory, tmp_path / "converted")
    name, change = DAMAGES[damage]
    data = change((converted / name).read_bytes())
    assert data != (converted / name).read_bytes()
    (converted / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ValueError, match="converted is damaged: .*; convert the model again"):
        load(converted)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_only_files_that_transformers_reads_are_compared(translator, folder):
    """A pipe, a device or a file with holes would be read for ever."""
    for name in ("notes.json", "vocab.json", "other.safetensors"):
        os.mkfifo(Path(folder, name))
    Path(folder, "added_tokens.json").symlink_to("/dev/zero")
    with open(Path(folder, "more.json"), "wb") as sparse:
        sparse.truncate(2**40)
    assert load(folder)(TEXTS, max_new_tokens=5) == translator(TEXTS, max_new_tokens=5)


def test_a_model_that_was_converted_again_is_not_opened_again(text_tokenizer, folder):
    """With the tokenizer of the first, the second would write nonsense."""
    first = pickle.dumps(load(folder))
    pickle.loads(first)(TEXTS, max_new_tokens=5)
    save_translator(writing_translator(text_tokenizer), folder)
    load(folder)
    with pytest.raises(ValueError, match="was converted again since it was loaded; load the model again"):
        pickle.loads(first)(TEXTS)


def test_two_that_start_at_once_convert_once(folder, monkeypatch):
    calls, convert = [], backend.to_ctranslate2
    monkeypatch.setattr(backend, "to_ctranslate2", lambda *args: calls.append(1) or time.sleep(0.5) or convert(*args))
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(load, [folder, folder])
    assert calls == [1] and first(TEXTS, max_new_tokens=12) == second(TEXTS, max_new_tokens=12)


def test_wrong_requests_are_named(shared, monkeypatch):
    with pytest.raises(ValueError, match="`dtype='float16'` is for the backend torch"):
        load(shared, dtype="float16")
    with pytest.raises(ValueError, match="`quantization='int8'` needs `backend='ctranslate2'`"):
        Translator.from_pretrained(shared, quantization="int8")
    with pytest.raises(ValueError, match="`backend` is 'onnx'"):
        Translator.from_pretrained(shared, backend="onnx")
    monkeypatch.setitem(sys.modules, "vanilla_transformer.engines.ctranslate2", None)
    with pytest.raises(ImportError, match="pip install ctranslate2"):
        load(shared)
