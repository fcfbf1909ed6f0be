"""The Translator, `vanilla-transformer translate` and the pipeline: order, limits, splitting, errors, streams."""

import copy
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import TEXTS, save_translator, writing_translator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig, pipeline

from vanilla_transformer.__main__ import main
from vanilla_transformer.commands import translate as translation
from vanilla_transformer.conversion import load_foreign
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.decoding_vanilla_transformer import beam_search, greedy_search
from vanilla_transformer.translation_vanilla_transformer import TextTooLong, Translator, batches_by_length, cut


@pytest.fixture
def tokenizer(text_tokenizer):
    return text_tokenizer


@pytest.fixture
def translator(tokenizer):
    return writing_translator(tokenizer)


def never_end(translator: Translator):
    """Makes the end of sentence all but impossible."""
    translator.model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(translator.tokenizer)))
    translator.model.lm_head.bias.data[translator.tokenizer.eos_token_id] = -1e4


def directly(translator: Translator, text: str, **generation) -> str:
    """One text, by the model's `generate`."""
    source = translator.tokenizer(text, return_tensors="pt")
    early = {"early_stopping": True} if generation.get("num_beams", 1) > 1 else {}
    output = translator.model.generate(**source, **early, **generation)
    return translator.tokenizer.decode(output[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    "search", [{"n": 3, "num_beams": 4, "length_penalty": 0.5}, {"n": 2}, {"n": 1, "num_beams": 1}]
)
def test_the_n_best_have_the_scores_that_the_model_gives_them(translator, search):
    """The sum of the log-probabilities of their tokens, divided by the length to the power `length_penalty`."""
    tokenizer, model = translator.tokenizer, translator.model
    best = translator.n_best(TEXTS[1], **search, max_new_tokens=12)
    generation = {"num_beams": search.get("num_beams", search["n"]), "max_new_tokens": 12}
    generation["length_penalty"] = search.get("length_penalty", 1.0)
    assert best[0].text == directly(translator, TEXTS[1], **generation)
    source = tokenizer(TEXTS[1], return_tensors="pt")
    early = {"early_stopping": True} if generation["num_beams"] > 1 else {}
    found = model.generate(**source, **generation, **early, num_return_sequences=search["n"])
    assert len(best) == len({one.text for one in best}) == len(found)
    for one, ids in zip(best, found, strict=True):
        ids = ids[ids != tokenizer.pad_token_id]
        with torch.no_grad():
            logits = model(**source, decoder_input_ids=ids[None, :-1]).logits[0]
        log_probs = logits.log_softmax(dim=-1).gather(1, ids[1:, None])
        score = log_probs.sum() / len(log_probs) ** generation["length_penalty"]
        assert one.score == pytest.approx(float(score), abs=1e-5)
        assert one.text == tokenizer.decode(ids, skip_special_tokens=True)
        assert one.tokens == sum(token not in tokenizer.all_special_ids for token in ids.tolist())


def test_wrong_n_and_texts_of_several_pieces_are_refused(translator):
    for n in (0, 4):
        with pytest.raises(ValueError, match=f"`n` is {n}; it must be from 1 to the number of beams, 3"):
            translator.n_best(TEXTS[0], n, num_beams=3)
    translator.longest_source = 5
    with pytest.raises(TextTooLong, match="the longest that can be translated 5"):
        translator.n_best(TEXTS[1])
    assert translator.n_best(" ") == []


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


@pytest.mark.parametrize("num_beams", [1, 3])
def test_translations_end_where_generate_ends_them(translator, num_beams):
    never_end(translator)
    translator.model.generation_config.max_length = 17
    expected = [directly(translator, text, num_beams=num_beams) for text in TEXTS]
    assert translator(TEXTS, num_beams=num_beams) == expected
    assert len(translator.encode([expected[0]])[0]) > 10
    assert translator(TEXTS, num_beams=num_beams, max_length=9) == [
        directly(translator, text, num_beams=num_beams, max_length=9) for text in TEXTS
    ]
    translator.model.generation_config.max_length = None
    longest = max(map(len, translator.encode(TEXTS)))
    limit = {"num_beams": num_beams, "max_new_tokens": longest + 50}
    assert translator(TEXTS, num_beams=num_beams) == [directly(translator, text, **limit) for text in TEXTS]


def test_beam_search_stops_early_unless_told_otherwise(translator):
    def early(**generation):
        return translator.defaults(5, generation).get("early_stopping")

    assert early(num_beams=3) is True and early() is None and early(num_beams=3, early_stopping=False) is False
    translator.model.generation_config.update(num_beams=2, early_stopping="never")
    assert early() == "never" and early(early_stopping=True) is True


def searches_of(translator: Translator, monkeypatch, **generation) -> list:
    """The searches that `translator` passes to `generate` in turn, None for transformers' own."""
    called, generate = [], translator.model.generate

    def note(custom_generate=None, **inputs):
        called.append(custom_generate)
        return generate(custom_generate=custom_generate, **inputs)

    with monkeypatch.context() as patch:
        patch.setattr(translator.model, "generate", note)
        translator(["A man"], max_new_tokens=4, **generation)
    return called


OTHERS = [{"do_sample": True}, {"stopping_criteria": [lambda *_, **__: torch.tensor([False])]}]
OTHERS += [{"prefix_allowed_tokens_fn": lambda *_: [5]}, {"cache_implementation": "static"}, {"max_time": 9.0}]


def test_transformers_searches_only_where_ours_cannot(translator, monkeypatch):
    assert searches_of(translator, monkeypatch) == [greedy_search]
    assert searches_of(translator, monkeypatch, num_beams=3, no_repeat_ngram_size=2) == [beam_search]
    assert all(searches_of(translator, monkeypatch, **other) == [greedy_search, None] for other in OTHERS)
    expected = translator(TEXTS, max_new_tokens=8)
    wrapped = get_peft_model(copy.deepcopy(translator.model), LoraConfig(target_modules=["q_proj"]))
    for model in (wrapped, torch.compile(translator.model)):
        other = Translator(model, translator.tokenizer)
        assert searches_of(other, monkeypatch) == [None] and other(TEXTS, max_new_tokens=8) == expected
    config = GenerationConfig(**translator.model.generation_config.to_dict() | {"max_length": 9})
    assert translator(TEXTS, generation_config=config) == expected


def test_the_generation_config_gives_the_defaults(translator):
    translator.model.generation_config.update(num_beams=3, max_new_tokens=9, max_length=None)
    assert translator(TEXTS) == translator(TEXTS, num_beams=3, max_new_tokens=9)
    assert translator(TEXTS) != translator(TEXTS, num_beams=1, max_new_tokens=9)
    assert translator(TEXTS) != translator(TEXTS, num_beams=3, max_new_tokens=8)


def test_empty_texts_stay_empty_where_they_are(translator):
    found = translator(["", "No!", "  ", "\n\t", "A man", ""], max_new_tokens=5)
    assert [bool(text) for text in found] == [False, True, False, False, True, False]
    assert found[1::3] == translator(["No!", "A man"], max_new_tokens=5)
    assert translator(["", " "]) == ["", ""]
    assert translator([]) == []


def test_a_tokenizer_that_pads_on_the_left(translator, tokenizer):
    expected = translator(TEXTS, max_new_tokens=8)
    left = train_tokenizer(TEXTS, 300)
    left.padding_side = "left"
    assert Translator(translator.model, left)(TEXTS, max_new_tokens=8) == expected


def test_a_loaded_model_has_no_dropout(make_model, tokenizer, tmp_path):
    make_model(vocab_size=len(tokenizer), dropout=0.5).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    translator = Translator.from_pretrained(str(tmp_path), max_tokens=50)
    assert translator.max_tokens == 50
    assert translator(TEXTS, max_new_tokens=8) == translator(TEXTS, max_new_tokens=8)


# ------------------------------------------------------------------------------------------------------------- loading


def missing(tensors):
    del tensors["model.encoder.layers.0.fc1.bias"]


def unexpected(tensors):
    tensors["model.encoder.layers.7.fc1.bias"] = torch.zeros(24)


def mismatched(tensors):
    tensors["model.encoder.layers.0.fc1.bias"] = torch.zeros(23)


@pytest.mark.parametrize("damage", [missing, unexpected, mismatched])
def test_weights_that_do_not_match_are_refused(damage, folder):
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"do not match its config: 1 {damage.__name__} .*fc1.bias.*download or save"
    ):
        Translator.from_pretrained(folder)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "../model.safetensors"])
def test_other_files_than_safetensors_are_refused(file, folder):
    weights = Path(folder) / "model.safetensors"
    index = weights.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": file}}))
    with pytest.raises(ValueError, match=f"names {file}; only safetensors files beside it"):
        Translator.from_pretrained(folder)
    index.unlink()
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        Translator.from_pretrained(folder)


def test_bfloat16_on_a_cpu_without_it_warns(folder, monkeypatch, recwarn):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    with pytest.warns(UserWarning, match="use dtype='float32'"):
        Translator.from_pretrained(folder, device="cpu", dtype="bfloat16")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    recwarn.clear()
    Translator.from_pretrained(folder, device="cpu", dtype="bfloat16")
    assert not [one for one in recwarn if "float32" in str(one.message)]


# ------------------------------------------------------------------------------------------------------------ too long


@pytest.fixture
def learned(make_model, tokenizer):
    model = make_model(vocab_size=len(tokenizer), position_embedding_type="learned", max_position_embeddings=14)
    return Translator(model, tokenizer)


@pytest.mark.parametrize("too_long", ["split", "refuse"])
def test_a_word_beyond_learned_positions_is_named(learned, tokenizer, too_long):
    learned.too_long = too_long
    longest = "b" * 12
    assert len(tokenizer(longest).input_ids) == 14
    assert learned([longest])[0]
    for texts in [["", "No!", longest + "b"], ["No!", longest, longest + "b", longest]]:
        with pytest.raises(TextTooLong, match=r"Text 3 has 15 tokens, .* 14\.") as caught:
            learned(texts)
        assert (caught.value.number, caught.value.tokens, caught.value.limit) == (2, 15, 14)


PARAGRAPH = "A dog sleeps. Two children play, in the park, today. No! A man"


def test_a_text_that_is_too_long_is_translated_in_pieces(translator):
    pieces = ["A dog sleeps.", "Two children play,", "in the park, today.", "No! A man"]
    limit = max(len(ids) for ids in translator.encode(pieces))
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


@pytest.mark.parametrize("longest", [4, 7, 10, 20, 30, 45, 100])
@pytest.mark.parametrize("text", [PARAGRAPH, "他走了。我来了，你呢？好！", "a" * 6, "One two three four five. Six"])
def test_pieces_fit_and_make_up_the_text(text, longest):
    pieces = cut(text, lambda piece: len(piece.strip()) <= longest)
    assert "".join(pieces) == text
    for piece in pieces:
        assert len(piece.strip()) <= longest or not piece.strip().count(" ")
    if longest >= 40:
        assert all(piece.strip()[-1] in ".!。！？" for piece in pieces[:-1])  # whole sentences


def test_each_piece_begins_with_the_language(marian):
    model = load_foreign(str(marian))
    translator = Translator(model, AutoTokenizer.from_pretrained(marian), max_source_length=9)
    pieces = ["He is a teacher.", "We are friends.", "They are happy."]
    numbers, ids = translator.tokenize([f">>deu<< {' '.join(pieces)}", " ".join(pieces)])
    language = translator.tokenizer.convert_tokens_to_ids(">>deu<<")
    expected = translator.encode(pieces)
    assert max(map(len, expected)) < 9
    assert ids == [[language, *piece] for piece in expected] + expected
    assert numbers == [0, 0, 0, 1, 1, 1]
    translator.too_long = "refuse"
    with pytest.raises(TextTooLong, match=f"Text 1 has {sum(map(len, expected)) - 1} tokens"):
        translator([f">>deu<< {' '.join(pieces)}"])


def test_a_long_text_is_cut_without_reading_it_again_for_each_word():
    """What is measured of it grows with its length times a logarithm, and not with its square."""
    measured = []

    def fits(piece: str) -> bool:
        measured.append(len(piece))
        return len(piece.strip()) <= 100

    text = "word " * 4000
    pieces = cut(text, fits)
    assert "".join(pieces) == text and len(pieces) == 200
    assert sum(measured) < 25 * len(text)


def test_texts_are_split_at_the_longest_training_source(make_model, tokenizer):
    model, trained = make_model(vocab_size=len(tokenizer), max_position_embeddings=14), copy.deepcopy(tokenizer)
    assert Translator(model, tokenizer).longest_source == 14
    assert Translator(model, tokenizer, max_source_length=99).longest_source == 99
    trained.model_max_length = 9
    assert Translator(model, trained).longest_source == 9
    assert Translator(model, trained, max_source_length=12).longest_source == 12


def test_a_line_of_1700_sentences_is_translated_whole(make_model, tokenizer):
    trained = copy.deepcopy(tokenizer)
    trained.model_max_length = 9
    _, sources = Translator(make_model(vocab_size=len(tokenizer)), trained).tokenize([" ".join(["No."] * 1700)])
    assert len(sources) > 100
    assert " ".join(tokenizer.batch_decode(sources, skip_special_tokens=True)).split() == ["No."] * 1700


WRONG = {
    "num_beams": 0,
    "max_new_tokens": 0,
    "max_length": -3,
    "min_length": -1,
    "min_new_tokens": -1,
    "length_penalty": float("nan"),
    "num_return_sequences": 2,
    "return_dict_in_generate": True,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named(name, translator):
    with pytest.raises(ValueError, match=f"`{name}`"):
        translator(["A man"], **{name: WRONG[name]})


def test_wrong_texts_and_arguments_are_named(translator):
    with pytest.raises(TypeError, match="list of texts"):
        translator("The dog.")
    for wrong in [None, 3, b"A man", float("nan")]:
        with pytest.raises(TypeError, match="Text 2 is "):
            translator(["A man", wrong])
    with pytest.raises(ValueError, match="Text 2 contains a lone surrogate"):
        translator(["A man", "\udc80"])
    for name, value in [("max_tokens", 0), ("max_source_length", 0), ("too_long", "cut")]:
        with pytest.raises(ValueError, match=f"`{name}` is {value!r}"):
            Translator(translator.model, translator.tokenizer, **{name: value})


def test_translations_stay_within_learned_positions(learned):
    never_end(learned)
    assert all(learned(["No!", "b" * 12], num_beams=beams) for beams in (1, 2))
    assert all(learned(["No!", "b" * 12], **{bound: 99}) for bound in ("max_length", "max_new_tokens"))


@pytest.mark.parametrize("position_embedding_type", ["sinusoidal", "rotary"])
def test_other_positions_have_no_end(make_model, tokenizer, position_embedding_type):
    model = make_model(
        vocab_size=len(tokenizer), position_embedding_type=position_embedding_type, max_position_embeddings=14
    )
    translator, split = Translator(model, tokenizer, max_source_length=999), Translator(model, tokenizer)
    never_end(translator)
    found = translator([PARAGRAPH], max_new_tokens=20)
    assert found == [directly(translator, PARAGRAPH, max_new_tokens=20)] != split([PARAGRAPH], max_new_tokens=20)
    assert found != translator([PARAGRAPH], max_new_tokens=14)


# -------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def folder(translator, tmp_path):
    translator.model.generation_config.max_length = 20
    return save_translator(translator, tmp_path / "model")


def run_main(monkeypatch, data: bytes, *argv) -> bytes:
    """What `vanilla-transformer translate` writes for `data`, in this process and a locale that is not UTF-8."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="latin-1"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="latin-1", write_through=True))
    main(["translate", *argv])
    sys.stdout.flush()
    return output.getvalue()


def run_in_bash(command: str, folder: str) -> subprocess.CompletedProcess:
    """Runs a command in which TRANSLATE stands for `python -m vanilla_transformer translate --model folder`."""
    command = command.replace("TRANSLATE", f"{sys.executable} -m vanilla_transformer translate --model {folder}")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture
def upper(monkeypatch):
    """Replaces the model: capital letters, and line feeds instead of spaces."""

    class Upper:
        @classmethod
        def from_pretrained(cls, name, **options):
            return cls()

        def __call__(self, texts, progress=None, **generation):
            return [text.upper().replace(" ", "\n") for text in texts]

    monkeypatch.setattr(translation, "Translator", Upper)


LINES = {
    "plain": ("a\nb c\n", "A\nB C\n"),
    "not ended": ("a\nb", "A\nB\n"),
    "empty lines": ("\n\na\n\n", "\n\nA\n\n"),
    "not latin": ("grün\n纽约\n😀\n", "GRÜN\n纽约\n😀\n"),
    "windows": ("a\r\nb\r\n", "A\nB\n"),
    "other ends": ("a\u2028b\x0cc\x85d\n", "A\u2028B\x0cC\x85D\n"),
    "carriage return inside": ("a\rb\nc\n", None),
    "nothing": ("", ""),
}


@pytest.mark.parametrize("name", LINES)
def test_as_many_lines_come_out_as_went_in(name, upper, monkeypatch):
    lines, expected = LINES[name]
    found = run_main(monkeypatch, lines.encode(), "--model", "x").decode()
    assert found.count("\n") == lines.count("\n") + (lines[-1:] not in ("\n", ""))
    if expected is not None:
        assert found == expected


def test_lines_stay_in_order_across_portions(upper, monkeypatch):
    monkeypatch.setattr(translation, "LINES_AT_A_TIME", 3)
    assert run_main(monkeypatch, b"a\nb\n\nc\nd\n\n\ne", "--model", "x") == b"A\nB\n\nC\nD\n\n\nE\n"


def test_input_that_is_not_utf8_ends_the_command_with_a_sentence(upper, monkeypatch):
    with pytest.raises(SystemExit, match="line 2 is not UTF-8"):
        run_main(monkeypatch, b"a\n\xff\n", "--model", "x")


WRONG_OPTIONS = {
    "--num_beams": ("0", "0 is not a positive integer"),
    "--max_source_length": ("x", "x is not a positive integer"),
    "--length_penalty": ("x", "invalid float value: 'x'"),
    "--device": ("abacus", "abacus is not a device"),
    "--dtype": ("int8", "invalid choice: 'int8'"),
}


@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_wrong_options_of_the_command_are_refused(option, upper, monkeypatch, capsys):
    value, message = WRONG_OPTIONS[option]
    with pytest.raises(SystemExit):
        run_main(monkeypatch, b"a\n", "--model", "x", option, value)
    assert message in capsys.readouterr().err


def test_the_command_in_a_process(folder, translator):
    lines = "".join(f"'{text}' " for text in ["", *TEXTS])
    result = run_in_bash(f"printf '%s\\n' {lines} | TRANSLATE --num_beams 3 --max_tokens 40", folder)
    assert result.returncode == 0, result.stderr
    expected = translator(["", *TEXTS], num_beams=3)
    assert result.stdout == "".join(" ".join(text.split("\n")) + "\n" for text in expected)


def test_a_full_disk_ends_the_command_with_a_sentence(folder):
    result = run_in_bash("echo 'No!' | TRANSLATE > /dev/full", folder)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    message = "cannot read the input or write the output: [Errno 28] No space left on device"
    assert result.stderr.splitlines()[-1].startswith(f"vanilla-transformer translate: {message}")


def test_a_reader_that_leaves_ends_the_command_in_silence(folder):
    result = run_in_bash("yes 'No!' | head -3 | TRANSLATE | true; echo ${PIPESTATUS[2]}", folder)
    assert result.stdout == "141\n"
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_ends_the_command_with_a_sentence(stream, monkeypatch):
    monkeypatch.setattr(sys, stream, None)  # as Python does for `<&-` and `>&-`
    with pytest.raises(SystemExit, match="^vanilla-transformer translate: standard input or output is closed"):
        main(["translate", "--model", "x"])


def test_a_model_of_another_type_is_named(marian, monkeypatch):
    with pytest.raises(SystemExit, match="is a marian model; convert a marian one by `vanilla-transformer convert"):
        run_main(monkeypatch, b"a\n", "--model", str(marian))


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_batch(translator, tmp_path):
    never_end(translator)
    save_translator(translator, tmp_path / "model")
    options = ["--num_beams", "20", "--max_new_tokens", "5000", "--max_tokens", "200"]  # some minutes
    command = [sys.executable, "-m", "vanilla_transformer", "translate", "--model", tmp_path / "model", *options]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, env=environment)
    process.stdin.write(b"A dog sleeps.\n" * 1000)
    process.stdin.close()
    try:
        said = b""
        while b"Translating" not in said:
            letter = process.stderr.read(1)
            assert letter, said
            said += letter
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 130
    finally:
        process.kill()
    assert b"Traceback" not in process.stderr.read() and process.stdout.read() == b""


@pytest.mark.parametrize("name", ["missing", "foreign"])
def test_a_model_that_cannot_be_loaded_is_named(name, tmp_path, monkeypatch):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/config.json").write_text("{}")
    with pytest.raises(SystemExit, match=f"^vanilla-transformer translate: .*{tmp_path / name}"):
        run_main(monkeypatch, b"a\n", "--model", str(tmp_path / name))


def test_a_text_that_is_too_long_ends_the_command_with_a_sentence(learned, tmp_path, monkeypatch):
    save_translator(learned, tmp_path)
    with pytest.raises(SystemExit, match=r"line 2 has 15 tokens"):
        run_main(monkeypatch, b"a\nbbbbbbbbbbbbb\n", "--model", str(tmp_path))


# ------------------------------------------------------------------------------------------------------------ pipeline

WITHOUT_THE_PACKAGE = """
import json, sys
sys.modules["vanilla_transformer"] = None
from transformers import pipeline

folder, copy, texts = json.load(sys.stdin)
translate = pipeline("vanilla-translation", model=folder, trust_remote_code=True)
found = [translate(texts, max_new_tokens=8), translate(texts[0], max_new_tokens=8)]
translate.save_pretrained(copy)
found.append(pipeline(model=copy, trust_remote_code=True, num_beams=2, max_new_tokens=8)(texts))
print(json.dumps(found))
"""


def test_the_pipeline_travels_with_the_model(folder, translator, tmp_path):
    """It works without the package, and so does what is saved there."""
    task = json.dumps([folder, str(tmp_path / "copy"), ["No!", "", *TEXTS]])
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE],
        input=task, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    many, one, beams = json.loads(result.stdout.splitlines()[-1])
    expected = translator(["No!", "", *TEXTS], max_new_tokens=8)
    assert [found["translation_text"] for found in many] == expected
    assert one == [{"translation_text": expected[0]}]
    expected = translator(["No!", "", *TEXTS], num_beams=2, max_new_tokens=8)
    assert [found["translation_text"] for found in beams] == expected


def test_a_pipeline_of_a_model_in_memory(translator):
    translate = pipeline(
        "vanilla-translation", model=translator.model, tokenizer=translator.tokenizer, max_source_length=8
    )
    shorter = Translator(translator.model, translator.tokenizer, max_source_length=8)
    texts = [PARAGRAPH, "No!"]
    expected = [{"translation_text": text} for text in shorter(texts, max_new_tokens=4)]
    assert translate(texts, max_new_tokens=4) == expected == translate(iter(texts), max_new_tokens=4)
    with pytest.raises(TextTooLong):
        translate(texts, too_long="refuse")
    with pytest.raises(TypeError, match="not a mapping"):
        translate({"text": "No!"})


def test_the_pipeline_runs_no_code_unasked(folder):
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        pipeline("vanilla-translation", model=folder)
