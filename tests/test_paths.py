"""Functions that take a directory or a file take it as a string and as a Path."""

from pathlib import Path

import pytest
from helpers import TEXTS

from vanilla_transformer import Translator
from vanilla_transformer.conversion import fairseq_tokenizer
from vanilla_transformer.conversion import marian as native
from vanilla_transformer.inspection.attention import attention_maps, draw_attention
from vanilla_transformer.inspection.explorer import write_explorer
from vanilla_transformer.loading import load_foreign, load_model, load_tokenizer

ctranslate2 = pytest.importorskip("vanilla_transformer.engines.ctranslate2")


def translate(translator: Translator) -> list[str]:
    return translator(TEXTS, max_new_tokens=5)


READERS = {
    "Translator": lambda folder: translate(Translator.from_pretrained(folder)),
    "ensemble": lambda folder: translate(Translator.from_pretrained([folder, folder])),
    "CTranslate2": lambda folder: translate(Translator.from_pretrained(folder, backend="ctranslate2")),
    "model": lambda folder: load_model(folder).config.to_dict(),
    "load_foreign": lambda folder: load_foreign(folder).config.to_dict(),
    "load_tokenizer": lambda folder: load_tokenizer(folder).get_vocab(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_readers_take_both(read, folder):
    before = set(Path(folder).iterdir())
    assert read(Path(folder)) == read(folder)
    assert set(Path(folder).iterdir()) == before


WRITERS = {
    "to_ctranslate2": lambda made, path: ctranslate2.to_ctranslate2(made.model, made.tokenizer, path),
    "save_tokenizer": lambda made, path: native.save_tokenizer(made.tokenizer, path),
    "draw_attention": lambda made, path: draw_attention(attention_maps(made.model, made.tokenizer, *TEXTS[:2]), path),
    "write_explorer": lambda made, path: write_explorer({}, path, "x"),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_writers_take_both(write, translator, tmp_path):
    for kind in (str, Path):
        path = tmp_path / f"{kind.__name__}.png"
        write(translator, kind(path))
        assert path.exists()


def test_files_of_fairseq_are_taken_as_both(tmp_path):
    (tmp_path / "dict.txt").write_text("a</w> 3\nb</w> 2\n")
    (tmp_path / "codes").write_text("#version: 0.2\na b</w>\n")
    files = tmp_path / "dict.txt", tmp_path / "codes"
    found = [fairseq_tokenizer(*map(kind, files))[0].get_vocab() for kind in (str, Path)]
    assert found[0] == found[1]
