"""Text in, text out, each line where it was. Run: pytest tests/test_translation.py"""

import io
import os
import subprocess
import sys

import pytest
import torch

from vanilla_transformer import translation
from vanilla_transformer.errors import UserError
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.translation import Translator

TEXTS = ["A dog sleeps.", "Two children play in the park today.", "No!", "A man", "纽约是一座城市", "😀 a\tb", "Yes."]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def translator(make_model, tokenizer):
    """Writes letters that depend on what it reads."""
    model = make_model(vocab_size=len(tokenizer), tie_word_embeddings=False)
    with torch.no_grad():
        for number in range(len(tokenizer)):
            if not tokenizer.decode([number]).isalpha() and number != tokenizer.eos_token_id:
                model.lm_head.weight[number] = 0
    return Translator(model, tokenizer)


def never_end(translator: Translator):
    """Takes the end of sentence out of the model's reach."""
    translator.model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(translator.tokenizer)))
    translator.model.lm_head.bias.data[translator.tokenizer.eos_token_id] = -1e4


def directly(translator: Translator, text: str, **generation) -> str:
    """One text by hand."""
    source = translator.tokenizer(text, return_tensors="pt")
    output = translator.model.generate(**source, **generation)
    return translator.tokenizer.decode(output[0], skip_special_tokens=True)


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


@pytest.mark.parametrize("num_beams", [1, 3])
def test_what_does_not_end_is_cut_off_as_it_is_alone(translator, num_beams):
    never_end(translator)
    texts = ["No!", "Two children play in the park today.", "A man"]
    alone = [translator([text], num_beams=num_beams)[0] for text in texts]
    assert translator(texts, num_beams=num_beams) == alone


def test_beams_lead_to_other_translations(translator):
    generation = {"max_new_tokens": 12, "length_penalty": 0.6}
    assert translator(TEXTS, num_beams=4, **generation) != translator(TEXTS, num_beams=1, max_new_tokens=12)


def test_the_models_own_default_holds(translator):
    translator.model.generation_config.update(num_beams=3, max_new_tokens=9, max_length=None)
    assert translator(TEXTS, max_new_tokens=9) == translator(TEXTS, num_beams=3, max_new_tokens=9)


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


def test_dropout_is_off(make_model, tokenizer, tmp_path):
    """A model that is loaded translates the same each time, whatever its dropout."""
    make_model(vocab_size=len(tokenizer), dropout=0.5).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    translator = Translator.from_pretrained(str(tmp_path), max_tokens=50)
    assert translator.max_tokens == 50
    assert translator(TEXTS, max_new_tokens=8) == translator(TEXTS, max_new_tokens=8)


# ------------------------------------------------------------------------------------------------------------ too long


@pytest.fixture
def learned(make_model, tokenizer):
    model = make_model(vocab_size=len(tokenizer), position_embedding_type="learned", max_position_embeddings=14)
    return Translator(model, tokenizer)


def test_a_text_beyond_learned_positions_is_named(learned, tokenizer):
    longest = "b" * 12
    assert len(tokenizer(longest).input_ids) == 14
    assert learned([longest])[0]
    for texts in [["", "No!", longest + "b"], ["No!", longest, longest + "b", longest]]:
        with pytest.raises(UserError, match=r"Text 3 has 15 tokens, .* end at 14; "):
            learned(texts)


def test_translations_stay_within_learned_positions(learned):
    never_end(learned)
    assert all(learned(["No!", "b" * 12], num_beams=beams) for beams in (1, 2))


@pytest.mark.parametrize("position_embedding_type", ["sinusoidal", "rotary"])
def test_other_positions_have_no_end(make_model, tokenizer, position_embedding_type):
    model = make_model(vocab_size=len(tokenizer), max_position_embeddings=14)
    model.config.position_embedding_type = position_embedding_type
    assert len(Translator(model, tokenizer)(["b" * 100], max_new_tokens=3)) == 1


# -------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def folder(translator, tmp_path):
    translator.model.generation_config.max_length = 20
    translator.model.save_pretrained(tmp_path / "model")
    translator.tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run_main(monkeypatch, data: bytes, *argv, encoding="utf-8") -> bytes:
    """What `python -m vanilla_transformer.translation` writes for `data`, in this process."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["translation", *argv])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding=encoding))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding, write_through=True))
    translation.main()
    sys.stdout.flush()
    return output.getvalue()


@pytest.fixture
def upper(monkeypatch):
    """In place of a model: capitals, and line feeds within."""

    class Upper:
        @classmethod
        def from_pretrained(cls, name, max_tokens):
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


def test_text_is_utf8_whatever_the_locale(upper, monkeypatch):
    assert run_main(monkeypatch, "grün\n".encode(), "--model", "x", encoding="latin-1") == "GRÜN\n".encode()


def test_options_of_the_command_line(folder, translator, monkeypatch):
    data = "".join(f"{text}\n" for text in TEXTS).encode()
    found = run_main(monkeypatch, data, "--model", folder, "--num_beams", "3", "--max_tokens", "40")
    expected = Translator(translator.model, translator.tokenizer, 40)(TEXTS, num_beams=3)
    assert found.decode().split("\n") == [" ".join(text.split("\n")) for text in expected] + [""]


def test_the_command_line_in_a_process_of_its_own(folder, translator):
    lines = ["No!", "", "纽约是一座城市", "A man"]
    command = [sys.executable, "-m", "vanilla_transformer.translation", "--model", folder]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    data = "".join(f"{line}\n" for line in lines).encode()
    result = subprocess.run(command, input=data, capture_output=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr.decode()
    expected = [" ".join(text.split("\n")) for text in translator(lines)]
    assert result.stdout.decode() == "".join(f"{line}\n" for line in expected)


@pytest.mark.parametrize(
    "kind",
    ["missing", "foreign"],
)
def test_a_model_that_cannot_be_loaded_is_named(kind, tmp_path, monkeypatch):
    if kind == "foreign":
        (tmp_path / "config.json").write_text("{}")
    name = str(tmp_path / "missing") if kind == "missing" else str(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run_main(monkeypatch, b"a\n", "--model", name)
    assert str(caught.value).startswith("translation: ") and name in str(caught.value)


def test_a_text_that_is_too_long_ends_the_command_with_a_sentence(learned, tmp_path, monkeypatch):
    learned.model.save_pretrained(tmp_path)
    learned.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=r"translation: Text 2 has 15 tokens"):
        run_main(monkeypatch, b"a\nbbbbbbbbbbbbb\n", "--model", str(tmp_path))


def test_one_text_is_not_taken_for_a_list_of_letters(translator):
    with pytest.raises(TypeError, match="list of texts"):
        translator("The dog.")
