"""Teachers of every kind translate in groups, the same wherever a run was stopped."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import TEXTS, randomise, save_translator, small_nllb, translate_by_marian, writing_translator
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.errors import UserError
from vanilla_transformer.students import groups
from vanilla_transformer.students.groups import read_groups, translate_groups
from vanilla_transformer.students.options import DistillOptions
from vanilla_transformer.students.translating import Teacher, find_back, find_teachers

NO_LANGUAGES = (None, None)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(groups, "GROUP", 3)


def options(*teachers, **more) -> DistillOptions:
    return DistillOptions(Path("out"), teacher=[*map(str, teachers)], **more)


def one_teacher(*teachers, languages=NO_LANGUAGES, **more) -> Teacher:
    (teacher,) = find_teachers(options(*teachers, **more), languages, seed=1)
    return teacher


def translated(folder: Path, teacher: Teacher, texts=TEXTS) -> list[list[list]]:
    translate_groups(folder, texts, "Translating", teacher)
    return read_groups(folder, len(texts))


def best_of(found: list[list[list]]) -> list[str]:
    assert all(len(candidates) == 1 for candidates in found)
    return [candidates[0][0] for candidates in found]


def generated(model, tokenizer, texts: list[str], **search) -> list[str]:
    """What transformers' own `generate` writes for each text alone."""
    outputs = [model.generate(**tokenizer(text, return_tensors="pt"), **search)[0] for text in texts]
    return [text.strip() for text in tokenizer.batch_decode(outputs, skip_special_tokens=True)]


@pytest.mark.parametrize("kind", ["T5", "BART"])
def test_a_teacher_of_transformers_translates_as_by_generate(kind, text_tokenizer, tmp_path):
    """Also longer than 20 tokens, where transformers would stop by default."""
    ids = {"pad_token_id": text_tokenizer.pad_token_id, "eos_token_id": text_tokenizer.eos_token_id}
    ids |= {"decoder_start_token_id": text_tokenizer.pad_token_id, "vocab_size": len(text_tokenizer)}
    if kind == "T5":
        model = T5ForConditionalGeneration(T5Config(**ids, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2))
    else:
        sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "forced_eos_token_id": None}
        model = BartForConditionalGeneration(BartConfig(**ids, **sizes, **heads))
    randomise(model).eval()
    folder = save_translator(Translator(model, text_tokenizer), tmp_path / kind)
    teacher = one_teacher(folder, source_prefix="in German: ", num_beams=2)
    texts = TEXTS[:2]  # an untrained model seldom ends before the 256th token
    prompts = [f"in German: {text}" for text in texts]
    expected = generated(model, text_tokenizer, prompts, num_beams=2, max_new_tokens=256)
    assert [text.strip() for text in best_of(translated(tmp_path / "out", teacher, texts))] == expected
    assert any(len(text_tokenizer(text).input_ids) > 25 for text in expected)


def test_a_multilingual_teacher_has_languages_of_its_own(tmp_path):
    model, tokenizer = small_nllb()
    german = tokenizer.convert_tokens_to_ids("deu_Latn")
    texts = ["a b a", "b", "a a"]
    folder = save_translator(Translator(model, tokenizer), tmp_path / "nllb")
    teacher = one_teacher(folder, languages=("en", "de"), teacher_langs=["fra_Latn-deu_Latn"], num_beams=2)
    tokenizer.src_lang = "fra_Latn"
    expected = generated(model, tokenizer, texts, forced_bos_token_id=german, num_beams=2)
    assert best_of(translated(tmp_path / "out", teacher, texts)) == expected and all(expected)
    back = find_back(options(folder, teacher_langs=["fra_Latn-deu_Latn"], round_trip=folder), ("en", "de"))
    assert back.languages == ("deu_Latn", "fra_Latn")


def test_a_marian_teacher_has_the_beams_of_its_model(marian, marian_pairs, tmp_path):
    sources = [source for source, _ in marian_pairs[:4]]
    found = best_of(translated(tmp_path / "greedy", one_teacher(marian, num_beams=1), sources))
    assert found == translate_by_marian(marian, sources)
    teacher = one_teacher(marian)
    translator = teacher.open()
    assert teacher.search(translator)["num_beams"] == 6
    translator.engine.generation_config.num_beams = 1
    assert teacher.search(translator)["num_beams"] == 5


def test_a_teacher_may_be_converted(folder, tmp_path):
    pytest.importorskip("ctranslate2")
    main(["convert", folder, str(tmp_path / "converted"), "--to", "ctranslate2"])
    both = [one_teacher(name, num_beams=3) for name in (folder, tmp_path / "converted")]
    found = [translated(tmp_path / str(number), teacher) for number, teacher in enumerate(both)]
    assert found[0] == found[1] == [[[text, None]] for text in Translator.from_pretrained(folder)(TEXTS, num_beams=3)]


def test_several_teachers_are_an_ensemble_if_they_can(folder, text_tokenizer, marian, tmp_path):
    torch.manual_seed(5)
    second = writing_translator(text_tokenizer)
    second.model.generation_config.max_length = 20
    second = save_translator(second, tmp_path / "second")
    ensemble = one_teacher(folder, second, num_beams=2)
    assert best_of(translated(tmp_path / "out", ensemble)) == Translator.from_pretrained([folder, second])(
        TEXTS, num_beams=2
    )
    with pytest.raises(UserError, match="--teacher_langs has no effect on an ensemble"):
        one_teacher(folder, second, teacher_langs=["a-b"])
    assert one_teacher(folder, second, teacher_langs=["a-b"], round_trip="back").names == [folder, second]
    assert one_teacher(folder, second, trust_remote_code=True).names == [folder, second]
    other = save_translator(writing_translator(train_tokenizer(["another"], 290)), tmp_path / "other")
    for names in ([folder, other], [folder, marian], [marian, marian]):
        found = find_teachers(options(*names, teacher_langs=["a-b", "c-d"]), NO_LANGUAGES, 1)
        assert [(teacher.names, teacher.languages) for teacher in found] == [
            ([str(names[0])], ("a", "b")),
            ([str(names[1])], ("c", "d")),
        ]


def test_the_n_best_have_scores_per_token(varied_translator, tmp_path):
    """Of a text of two pieces, the mean of both."""
    varied_translator.segmenter.max_sentences = 1
    folder = save_translator(varied_translator, tmp_path / "model")
    texts = [*TEXTS, ""]
    found = translated(tmp_path / "out", one_teacher(folder, n_best=3, num_beams=4), texts)
    expected = Translator.from_pretrained(folder).n_best(texts, 3, num_beams=4)
    assert [[text for text, _ in candidates] for candidates in found] == [
        [one.text for one in some] for some in expected
    ]
    assert found[0][0][1] == pytest.approx(expected[0][0].score) and found[-1] == []
    two = Translator.from_pretrained(folder, max_source_sentences=1)
    teacher = one_teacher(folder, min_score=-9.0, num_beams=2)
    (((_, score),),) = teacher.candidates(two, ["A man. A dog."], 0)
    alone = [two.n_best(text, 1, num_beams=2)[0].score for text in ("A man.", "A dog.")]
    assert score == pytest.approx(sum(alone) / 2)


def test_samples_follow_from_seed_and_group(folder, tmp_path):
    teacher = one_teacher(folder, samples=4)
    torch.manual_seed(1)
    found = translated(tmp_path / "one", teacher)
    (tmp_path / "one" / "0000001.json").unlink()
    assert translated(tmp_path / "one", teacher) == found == translated(tmp_path / "two", teacher)
    assert all(len(candidates) == 4 for candidates in found) and len({text for text, _ in found[0]}) > 1
    assert translated(tmp_path / "three", replace(teacher, seed=2)) != found
