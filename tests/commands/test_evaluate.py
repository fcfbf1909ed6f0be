"""`vanilla-transformer evaluate`: the scores and tests of sacreBLEU's command line, for any model and any file."""

import codecs
import gzip
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from helpers import (
    TEXTS,
    command_error,
    read_sample,
    save_translator,
    small_nllb,
    translate_by_marian,
    write_metric,
    writing_translator,
)
from transformers import GenerationConfig, NllbTokenizer

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main
from vanilla_transformer.evaluation import tuning
from vanilla_transformer.loading import set_languages

FILES = ["first.txt", "second.txt", "third.txt"]
TEXT_FILES = ["--sources", "sources.txt", "--references", "references.txt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """References, sources, and hypotheses in which more and more words are missing or in lower case."""
    folder = tmp_path_factory.mktemp("evaluate")
    sources, references = zip(*read_sample(120), strict=True)
    references = ["Ein\u2028Satz\u00a0.", *references[1:]]  # two characters that Python takes for spaces
    write(folder / "sources.txt", sources)
    write(folder / "references.txt", references)
    for number, file in enumerate(FILES):
        chance, kept = random.Random(number), 0.88 - number / 50
        worse = [" ".join(word for word in text.split(" ") if chance.random() < kept) for text in references]
        write(folder / file, [text.lower() if chance.random() < 0.2 else text for text in worse])
    return folder


def write(file: Path, lines: list[str]):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes("".join(f"{line}\n" for line in lines).encode())


def read(file: Path) -> list[str]:
    return file.read_bytes().decode().split("\n")[:-1]


def texts_to_score(folder: Path, sources: list[str], references: list[str]) -> list[str]:
    """The options for texts, which are written to a folder."""
    write(folder / "sources.txt", sources)
    write(folder / "references.txt", references)
    return ["--sources", str(folder / "sources.txt"), "--references", str(folder / "references.txt")]


def evaluate(output: Path, *options) -> dict:
    main(["evaluate", "--output", str(output), *map(str, options)])
    return json.loads((output / "results.json").read_text(encoding="utf-8"))


def hypotheses_of(output: Path) -> list[list[str]]:
    """The translations of each system that an evaluation has written, in the order of the systems."""
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    return [read(output / file) for file in results["sha256"] if file.startswith("hypotheses/")]


def sacrebleu(folder: Path, *options: str) -> str:
    """What sacreBLEU's command line prints, with two decimals."""
    command = [sys.executable, "-m", "sacrebleu", "references.txt", "-m", "bleu", "chrf", "-w", "2"]
    return subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, check=True).stdout


PROTOCOLS = {
    "bootstrap": ([], ["--paired-bs"]),
    "randomization, Chinese": (
        ["--paired", "randomization", "--num_samples", "400", "--target_lang", "zh"],
        ["--paired-ar", "--paired-ar-n", "400", "-tok", "zh"],
    ),
    "tokens in lower case": (
        ["--lowercase", "--bleu_tokenize", "none", "--num_samples", "300"],
        ["-lc", "--chrf-lowercase", "-tok", "none", "--paired-bs", "--paired-bs-n", "300"],
    ),
}


@pytest.mark.parametrize("ours, theirs", PROTOCOLS.values(), ids=PROTOCOLS)
def test_scores_and_tests_equal_those_of_sacrebleu(ours, theirs, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    results = evaluate(tmp_path, "--hypotheses", *FILES, "--references", "references.txt", *ours)
    table, printed = capsys.readouterr().out, sacrebleu(folder, "-i", *FILES, *theirs, "-f", "latex")
    assert (tmp_path / "results.md").read_text(encoding="utf-8").startswith(table)
    signatures = dict(re.findall(r"- (\S+) +(nrefs:\S+)", printed))
    if "--paired-ar" in theirs:  # without intervals
        table = re.sub(r" \([\d.]+ ± [\d.]+\)", "", table)
        signatures = {metric: text.replace("|ar:", "|bs:1000|ar:") for metric, text in signatures.items()}
    cell = re.compile(r"\d+\.\d\d(?: \([\d.]+ ± [\d.]+\))?(?: \(p = 0\.\d{4}\)\*?)?(?= +[|&\\])")
    assert cell.findall(table) == cell.findall(printed) and len(cell.findall(table)) == 6
    assert len(set(re.findall("p = [0-9.]+", table))) > 1 and results["signatures"] == signatures


def test_one_system_has_the_interval_and_the_precisions_of_sacrebleu(folder, tmp_path, capsys):
    references = ["--references", folder / "references.txt"]
    results = evaluate(tmp_path / "one", "--hypotheses", folder / "second.txt", *references)
    row = [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].split("|")]
    printed = sacrebleu(folder, "-i", "second.txt", "--confidence", "-f", "text")
    for (metric, signature), cell in zip(results["signatures"].items(), row[2:4], strict=True):
        assert f"{metric}|{signature} = {cell.replace('(', '(μ = ')}" in printed
    assert row[4:7] == [*re.search(r"\) ([\d./]+) \(BP = (\S+) ratio = (\S+)", printed).groups()]
    both = ["--hypotheses", folder / "first.txt", folder / "second.txt"]
    untested = evaluate(tmp_path / "two", "--paired", "none", *both, *references)
    second = str(folder / "second.txt")
    assert untested["systems"][second] == results["systems"][second] and " (p = " not in capsys.readouterr().out


def test_the_same_but_for_case_is_no_difference_where_case_is_ignored(folder, tmp_path):
    (tmp_path / "lower.txt").write_text((folder / "first.txt").read_text(encoding="utf-8").lower(), encoding="utf-8")
    systems = ["--hypotheses", folder / "first.txt", tmp_path / "lower.txt", "--references", folder / "references.txt"]
    lower = [*evaluate(tmp_path / "out", *systems, "--lowercase", "--num_samples", "9")["systems"].values()][1]
    assert [lower[metric]["p_value"] for metric in ("BLEU", "chrF2")] == [1.0, 1.0]


def test_a_byte_order_mark_is_no_text_and_a_path_may_be_long(folder, tmp_path):
    file = tmp_path / ("a" * 200) / ("b" * 200) / "marked.txt"
    write(file, [])
    file.write_bytes(codecs.BOM_UTF8 + (folder / "references.txt").read_bytes())
    results = evaluate(tmp_path / "out", "--hypotheses", file, "--references", folder / "references.txt")
    assert results["systems"][str(file)]["BLEU"]["score"] == pytest.approx(100)
    assert results["sha256"].popitem()[1] == results["sha256"]["references.txt"]


def test_a_bleu_of_0_and_a_script_without_a_language_are_explained(tmp_path, capsys):
    write(tmp_path / "short.txt", ["Datei öffnen", "Seite drucken"])
    write(tmp_path / "chinese.txt", ["我今天看到一只狗。", "纽约是一座城市。"])
    for name, doubts in [("short", 0), ("chinese", 1)]:
        file = tmp_path / f"{name}.txt"
        results = evaluate(tmp_path / name, "--hypotheses", file, "--references", file, "--num_samples", "9")
        table, said = capsys.readouterr()
        note = f"{file}: BLEU is 0, and chrF 100.00: no translation has four words, as 13a counts them"
        assert f"- {note}" in table and results["notes"][0].startswith(note) and len(results["notes"]) == 1
        assert said.count("does not fit the script of most references; use --bleu_tokenize zh.") == doubts
    named = ["--hypotheses", file, "--references", file, "--num_samples", "9", "--target_lang", "cn"]
    results = evaluate(tmp_path / "named", *named)
    assert results["notes"] == [] and results["systems"][str(file)]["BLEU"]["score"] == pytest.approx(100)
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def ours(text_tokenizer, tmp_path_factory) -> str:
    translator = writing_translator(text_tokenizer)
    translator.model.generation_config.max_length = 20
    return save_translator(translator, tmp_path_factory.mktemp("model") / "ours")


@pytest.mark.slow
def test_models_translate_as_they_do_elsewhere(ours, marian, marian_pairs, tmp_path, capsys):
    sources, references = zip(*marian_pairs, strict=True)
    texts = texts_to_score(tmp_path, sources, references)
    write(tmp_path / "file.txt", [text[3:] for text in references])
    systems = ["--hypotheses", tmp_path / "file.txt", "--model", marian, ours]
    results = evaluate(tmp_path / "out", *texts, *systems, "--num_beams", "1", "--max_tokens", "60")
    assert [*results["systems"]] == [str(tmp_path / "file.txt"), str(marian), ours]  # the baseline first
    expected = [translate_by_marian(marian, sources), Translator.from_pretrained(ours)(sources, num_beams=1)]
    assert hypotheses_of(tmp_path / "out")[1:] == expected
    for file, digest in results["sha256"].items():
        assert hashlib.sha256((tmp_path / "out" / file).read_bytes()).hexdigest() == digest
        assert digest in (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    from_file, *from_models = results["systems"].values()
    assert "sentences_per_second" not in from_file and all(row["sentences_per_second"] > 0 for row in from_models)
    assert results["options"]["num_beams"] == 1 and results["sentences"] == len(references)

    files = [tmp_path / "out" / file for file in results["sha256"] if file.startswith("hypotheses/")]
    written = ["--hypotheses", *files]
    again = evaluate(tmp_path / "again", *written, "--references", tmp_path / "out" / "references.txt")
    for row, same in zip(results["systems"].values(), again["systems"].values(), strict=True):
        assert {key: row[key] for key in same} == same
    assert "Translating" not in capsys.readouterr().out


def test_a_multilingual_model_translates_into_the_target_language(tmp_path, capsys):
    model, tokenizer = small_nllb()
    german = {"forced_bos_token_id": tokenizer.convert_tokens_to_ids("deu_Latn")}
    model.save_pretrained(tmp_path / "nllb")
    tokenizer.save_pretrained(tmp_path / "nllb")
    texts = ["--model", tmp_path / "nllb", *texts_to_score(tmp_path, ["a b a", "b"], ["a b a", "b"])]
    evaluate(tmp_path / "out", *texts, "--source_lang", "fra_Latn", "--target_lang", "deu_Latn")
    tokenizer.src_lang = "fra_Latn"
    ids = [model.generate(**tokenizer(text, return_tensors="pt"), **german)[0] for text in ("a b a", "b")]
    (found,) = hypotheses_of(tmp_path / "out")
    assert found == [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)] and any(found)
    read = NllbTokenizer.from_pretrained(tmp_path / "nllb")
    assert read("b").input_ids != tokenizer("b").input_ids
    set_languages(Translator(model, read), "fra_Latn", "deu_Latn")
    assert read("b").input_ids == tokenizer("b").input_ids
    message = command_error(capsys, "evaluate", *map(str, texts), "--source_lang", "en", "--target_lang", "deu_Latn")
    assert "nllb translates between many languages; give --source_lang" in message


def test_a_long_text_is_split_where_the_positions_of_another_kind_of_model_end(marian, tmp_path):
    """Its tokenizer may have no limit."""
    folder = shutil.copytree(marian, tmp_path / "marian")
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": 10**30}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for allowed in (None, 1000):
        translator = Translator.from_pretrained(folder, max_source_length=allowed)
        assert translator.segmenter.longest == translator.model.config.max_position_embeddings == 512
    assert len(translator.split(["a dog " * 500]).sources) > 1
    assert translator(["a dog " * 500], num_beams=1, max_new_tokens=2)


def test_a_bilingual_model_needs_no_languages(make_model):
    """Its tokenizer may have a `src_lang`, as that of FSMT."""
    model = make_model()
    set_languages(SimpleNamespace(model=model, tokenizer=SimpleNamespace(src_lang="en")), "en", "de")
    assert model.generation_config.forced_bos_token_id is None


@pytest.mark.parametrize("backend", ["torch", "ctranslate2"])
def test_a_dataset_gives_the_same_results_as_files(backend, ours, tmp_path, capsys):
    """Line breaks in a reference of the dataset are spaces in the files that are written. Pairs with an empty side are
    skipped, as in train.py."""
    pytest.importorskip(backend)
    rows = [{"en": text, "de": f"{text[::-1]}\nein Satz. "} for text in TEXTS]
    references = [row["de"].replace("\n", " ").rstrip() for row in rows]
    files = texts_to_score(tmp_path / "texts", TEXTS, references)
    rows += [{"en": source, "de": target} for source, target in [(None, "nichts"), (" ", "nichts"), ("A dog.", " ")]]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    dataset = ["--dataset_name", tmp_path, "--source_lang", "en", "--target_lang", "de"]
    both = []
    for name, data in [("dataset", dataset), ("files", files)]:
        both.append(evaluate(tmp_path / name, "--model", ours, *data, "--num_beams", "3", "--backend", backend))
        both[-1]["systems"][ours].pop("sentences_per_second")
    assert all(both[0][key] == both[1][key] for key in ("sha256", "systems", "signatures"))
    assert f"3 of {len(rows)} pairs have an empty source or no reference; they are skipped" in capsys.readouterr().err
    translations = Translator.from_pretrained(ours, backend=backend)(TEXTS, num_beams=3)
    write(tmp_path / "theirs.txt", ["a", *map(str, range(len(rows) - 1))])  # with the lines that are skipped
    evaluate(tmp_path / "theirs", "--hypotheses", tmp_path / "theirs.txt", *dataset)
    assert hypotheses_of(tmp_path / "theirs") == [["a", *map(str, range(len(TEXTS) - 1))]]
    assert hypotheses_of(tmp_path / "files") == [[text.replace("\n", " ").rstrip() for text in translations]]


def test_a_model_reads_the_line_breaks_of_a_dataset(ours, tmp_path):
    """As in the evaluations of train.py."""
    sources = [text.replace(" ", "\n", 1) for text in TEXTS]
    rows = [json.dumps({"en": source, "de": "ein Satz"}) for source in sources]
    write(tmp_path / "test.jsonl", rows)
    evaluate(tmp_path / "out", "--model", ours, "--test_file", tmp_path / "test.jsonl", "--num_beams", "1")
    expected = Translator.from_pretrained(ours)(sources, num_beams=1)
    assert any("\n" in text for text in expected)
    assert hypotheses_of(tmp_path / "out") == [[text.replace("\n", " ").rstrip() for text in expected]]


def test_several_references_are_scored_as_by_sacrebleus_command(folder, tmp_path, monkeypatch, capsys):
    """In one option or in several, in parallel files, in columns and in lists."""
    monkeypatch.chdir(folder)
    files = [str(tmp_path / f"test.ref{number}") for number in range(3)]
    sources, *streams, hypotheses = (
        [" ".join(line.split()) or "x" for line in read(Path(name))]
        for name in ("sources.txt", "references.txt", "second.txt", "third.txt", "first.txt")
    )
    written = [*files, tmp_path / "test.src", "hypotheses.txt"]
    for file, texts in zip(written, [*streams, sources, hypotheses], strict=True):
        write(Path(file), texts)
    names = ("source", "target", "second", "third")
    rows = [dict(zip(names, texts, strict=True)) for texts in zip(sources, *streams, strict=True)]
    lists = [[row[name] for name in names[1:]] for row in rows]
    write(tmp_path / "columns.jsonl", map(json.dumps, rows))
    for file, source, target in [("lists", "sentence", "corrections"), ("languages", "en", "de")]:
        pairs = zip(sources, lists, strict=True)
        write(tmp_path / f"{file}.jsonl", [json.dumps({source: one, target: several}) for one, several in pairs])
    shutil.copy(tmp_path / "test.src", tmp_path / "test.en")
    columns, languages = ["--test_file", tmp_path / "columns.jsonl"], ["--source_lang", "en", "--target_lang", "de"]
    named = ["--source_column", "sentence", "--target_column", "corrections"]
    ways = {
        "files": ["--references", *files],
        "options": [word for file in files for word in ("--references", file)],
        "parallel": ["--test_file", tmp_path / "test.src", *files],
        "columns": [*columns, "--reference_columns", "second", "third"],
        "columns again": [*columns, "--reference_columns", "second", "--reference_columns", "third"],
        "lists": ["--test_file", tmp_path / "lists.jsonl", *named],
        "a list by language": ["--test_file", tmp_path / "languages.jsonl", *languages],
        "endings that are no languages": ["--test_file", tmp_path / "test.en", *files, *languages],
    }
    command = [sys.executable, "-m", "sacrebleu", *files, "-i", "hypotheses.txt", "-m", "bleu", "chrf", "-w", "12"]
    printed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    for name, options in ways.items():
        found = evaluate(tmp_path / name, "--hypotheses", "hypotheses.txt", *options, "--num_samples", "9")
        for metric, expected in zip(("BLEU", "chrF2"), printed, strict=True):
            assert round(found["systems"]["hypotheses.txt"][metric]["score"], 12) == expected["score"]
            assert found["signatures"][metric].startswith("nrefs:3|")
        assert read(tmp_path / name / "references-3.txt") == streams[2]
    for column in ("source", "target"):
        again = [*columns, "--reference_columns", "third", column]
        said = command_error(capsys, "evaluate", "--hypotheses", "hypotheses.txt", *again)
        assert f"--reference_columns has {column}, which is the source or the target" in said
    write(tmp_path / "short", ["one", "two"])
    options = ["--hypotheses", "hypotheses.txt", "--references", files[0], tmp_path / "short"]
    said = command_error(capsys, "evaluate", *options)
    assert "has 120 lines and" in said and "short 2; give --references that correspond line by line" in said


def test_further_metrics_stand_in_the_table(folder, ours, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    module = write_metric(tmp_path / "lengths.py")
    given = ["--references", "references.txt", "--metrics", module, "--metric_kwargs", "scale=3"]
    results = evaluate(tmp_path / "out", "--hypotheses", *FILES[:2], *given, "--num_samples", "9")
    table = capsys.readouterr().out
    assert "| length_error " in table and results["metrics"]["length_error"]["arguments"] == {"scale": 3}
    references, *others = (read(folder / name) for name in ("references.txt", *FILES[:2]))
    differences = [sum(abs(len(a) - len(b)) for a, b in zip(references, other, strict=True)) for other in others]
    found = [system["metrics"]["length_error"] for system in results["systems"].values()]
    assert found == pytest.approx([3 * difference / 120 for difference in differences])
    wrong = command_error(capsys, "evaluate", "--tune", "rougeL", "--model", ours, *TEXT_FILES)
    assert "--tune rougeL is not measured; choose one of bleu, chrf, exact_match, word_error_rate, or add its" in wrong


@pytest.mark.slow
@pytest.mark.parametrize("names", [["pairs.tsv"], ["pairs.en", "pairs.de"], ["pairs.po"]])
def test_files_that_train_py_reads_are_evaluated(names, tmp_path, monkeypatch, capfd):
    """Where stderr is no terminal, no bar shows that they are read."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pairs = [("A dog sleeps.", "Ein Hund schläft."), ("It rains today, again.", "Heute regnet es schon wieder.")]
    sides = ("".join(f"{text}\n" for text in side) for side in zip(*pairs, strict=True))
    contents = {
        ".tsv": "en\tde\n" + "".join(f"{source}\t{target}\n" for source, target in pairs),
        ".po": "".join(f'msgid "{source}"\nmsgstr "{target}"\n\n' for source, target in pairs),
        **dict(zip((".en", ".de"), sides, strict=True)),
    }
    for name in names:
        (tmp_path / name).write_text(contents[Path(name).suffix])
    (tmp_path / "ours.txt").write_text(contents[".de"])
    files = [str(tmp_path / name) for name in names]
    main(["evaluate", "--hypotheses", f"{tmp_path}/ours.txt", "--test_file", *files, "--output", f"{tmp_path}/out"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["systems"][f"{tmp_path}/ours.txt"]["BLEU"]["score"] == pytest.approx(100)
    assert (tmp_path / "out" / "sources.txt").read_text() == contents[".en"]
    assert capfd.readouterr().err == ""


def test_models_joined_by_a_plus_are_an_ensemble(ours, text_tokenizer, folder, tmp_path, monkeypatch):
    torch.manual_seed(7)
    other = writing_translator(text_tokenizer, decoder_layers=1)
    other.model.generation_config.max_length = 20
    other = save_translator(other, tmp_path / "other")
    monkeypatch.chdir(folder)
    results = evaluate(tmp_path / "out", "--model", ours, f"{ours}+{ours}", f"{ours}+{other}", *TEXT_FILES)
    single, twice, both = hypotheses_of(tmp_path / "out")
    assert single == twice != both == Translator.from_pretrained([ours, other])(read(folder / "sources.txt"))
    p_values = [row["BLEU"]["p_value"] for row in results["systems"].values()]
    assert p_values[:2] == [None, 1.0]  # sacreBLEU's own would be 1 / 1001, as of a clear difference


def test_a_rerun_after_a_kill_and_a_system_called_dot(ours, folder, tmp_path, monkeypatch):
    """Texts of the same test set may be there already; a path without letters has the name of its directory."""
    texts = texts_to_score(tmp_path / "out", *(read(folder / file) for file in ("sources.txt", "references.txt")))
    monkeypatch.chdir(ours)
    evaluate(tmp_path / "out", "--model", ".", *texts)
    (file,) = (tmp_path / "out" / "hypotheses").iterdir()
    assert file.name.endswith(f"{Path(ours).name}.txt")


def test_tuning_saves_the_beams_and_the_length_penalty_that_wrote_the_references(
    varied_translator, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tuning, "NUM_BEAMS", (1, 3))
    monkeypatch.setattr(tuning, "LENGTH_PENALTIES", (0.0, 1.5))
    model = save_translator(varied_translator, tmp_path / "model")
    references = varied_translator(TEXTS, num_beams=3, length_penalty=1.5)
    given = ["--model", model, *texts_to_score(tmp_path, TEXTS, references), "--bleu_tokenize", "char"]
    (tmp_path / "model" / "all_results.json").write_text('{"train_target_tokens": 9}')
    tried = evaluate(tmp_path / "out", "--tune", *given)["tuned_decoding"]
    found = {"tuned_decoding": tried, "tuned_on": "references.txt", "tuned_by": "bleu", "train_target_tokens": 9}
    found["scored_with"] = {"num_beams": 1, "length_penalty": 1.0}
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["signatures"].keys() == {"BLEU", "chrF2"} and "tok:char" in results["signatures"]["BLEU"]
    assert json.loads((tmp_path / "model" / "all_results.json").read_text()) == found
    assert [(one["num_beams"], one["length_penalty"]) for one in tried[:1]] == [(3, 1.5)] and len(tried) == 3
    assert f"{tried[0]['bleu']:.2f}" in capsys.readouterr().out.splitlines()[2]
    saved = GenerationConfig.from_pretrained(model)
    assert (saved.num_beams, saved.length_penalty, saved.max_length, saved.early_stopping) == (3, 1.5, 14, True)


def test_what_is_tuned_for_another_kind_of_model_is_what_its_search_then_finds(
    marian, marian_pairs, tmp_path, monkeypatch
):
    """Without early stopping, a search with a length penalty goes on, and finds other translations than without."""
    monkeypatch.setattr(tuning, "NUM_BEAMS", (4,))
    model = shutil.copytree(marian, tmp_path / "marian")
    texts = texts_to_score(tmp_path, *zip(*marian_pairs[:20], strict=True))
    given = ["--model", model, *texts, "--bleu_tokenize", "char"]
    best = evaluate(tmp_path / "tuned", "--tune", *given)["tuned_decoding"][0]
    results = evaluate(tmp_path / "scored", *given)["systems"][str(model)]
    assert results["BLEU"]["score"] == pytest.approx(best["bleu"])


def test_a_wrong_seed_of_sacrebleu_is_a_sentence(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SACREBLEU_SEED", "abc")
    assert "cannot be scored: " in command_error(capsys, "evaluate", "--hypotheses", *FILES, *TEXT_FILES)


@pytest.mark.parametrize("backend", ["torch", "ctranslate2"])
def test_a_model_without_a_generation_config_is_tuned(backend, varied_translator, tmp_path, monkeypatch):
    pytest.importorskip(backend)
    monkeypatch.setattr(tuning, "NUM_BEAMS", (2,))
    model = save_translator(varied_translator, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    texts = texts_to_score(tmp_path, TEXTS[:2], TEXTS[:2])
    main(["evaluate", "--tune", "--backend", backend, "--model", model, *texts])
    assert GenerationConfig.from_pretrained(model).num_beams == 2


def test_what_was_tried_is_printed_even_if_it_cannot_be_saved(translator, tmp_path, monkeypatch, capsys):
    """Transformers saves `temperature` for sampling only."""
    monkeypatch.setattr(tuning, "NUM_BEAMS", (1,))
    translator.model.generation_config.update(max_length=5)
    model = save_translator(translator, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "generation_config.json").read_text()) | {"temperature": 0.5}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="model/generation_config.json: .*`temperature`"):
        main(["evaluate", "--tune", "--model", model, *texts_to_score(tmp_path, TEXTS, TEXTS)])
    assert "|           1 |" in capsys.readouterr().out
    assert GenerationConfig.from_pretrained(model).num_beams is None


def test_an_interrupted_evaluation_can_be_run_again(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    results = evaluate(tmp_path, "--hypotheses", "first.txt", *TEXT_FILES)
    (tmp_path / "results.json").unlink()
    (tmp_path / "results.md").rename(tmp_path / "kept.md")
    assert evaluate(tmp_path, "--hypotheses", "first.txt", *TEXT_FILES) == results


def test_results_that_are_not_of_an_evaluation_stay(folder, tmp_path, monkeypatch, capsys):
    """In a directory that holds the same references."""
    monkeypatch.chdir(folder)
    shutil.copy("references.txt", tmp_path)
    write(tmp_path / "results.md", ["precious"])
    message = command_error(capsys, "evaluate", "--output", tmp_path, "--hypotheses", "first.txt", *TEXT_FILES)
    assert "results.md would be overwritten; choose another directory for --output" in message
    assert (tmp_path / "results.md").read_text() == "precious\n"


BAD = {
    "no system": (TEXT_FILES, "nothing to score; give --model or --hypotheses"),
    "no references": (["--hypotheses", "first.txt"], "give one of --dataset_name, --test_file, and --references"),
    "two test sets": (
        ["--model", "m", "--dataset_name", "d", *TEXT_FILES],
        "give one of --dataset_name, --test_file, and --ref",
    ),
    "no sources": (["--model", "m", "--references", "references.txt"], "needs source texts; add --sources"),
    "number of lines": (["--hypotheses", "short.txt", *TEXT_FILES], "short.txt has 2 lines, .* 120 references"),
    "number of sources": (["--model", "m", "--sources", "short.txt", *TEXT_FILES[2:]], "short.txt has 2 lines"),
    "empty file": (["--hypotheses", "empty.txt", *TEXT_FILES], "empty.txt is empty"),
    "not UTF-8": (["--hypotheses", "latin.txt", *TEXT_FILES], "latin.txt cannot be read as UTF-8 text"),
    "no file": (["--hypotheses", "nowhere.txt", *TEXT_FILES], "nowhere.txt cannot be read .* No such file"),
    "same name": (["--hypotheses", "first.txt", "--model", "first", *TEXT_FILES], "2 .* have the same name, first;"),
    "cut file": (["--hypotheses", "cut.gz", *TEXT_FILES], "cut.gz cannot be read"),
    "damaged file": (["--hypotheses", "damaged.gz", *TEXT_FILES], "damaged.gz cannot be read"),
    "no dataset": (
        ["--hypotheses", "first.txt", "--dataset_name", "no/such/folder"],
        "your files with --test_file",
    ),
    "second model": (
        ["--model", "OURS", "no/such/one", "--length_penalty", "nan", *TEXT_FILES],
        "The directory 'no/such/one' does not exist",
    ),
    "ensemble, found before a model translates": (
        ["--model", "OURS", "MARIAN+OURS", "--length_penalty", "nan", *TEXT_FILES],
        "OURS has a different vocabulary from MARIAN",
    ),
    "directory without a model": (["--model", "done", *TEXT_FILES], "done is a directory without a config.json"),
    "option": (["--model", "OURS", "--length_penalty", "nan", *TEXT_FILES], "`length_penalty` is nan; .*at least -10"),
    "large option": (["--model", "OURS", "--length_penalty", "1e6", *TEXT_FILES], "1000000.0; it must be .* below 10"),
    "other engine": (["--model", "MARIAN", "--backend", "ctranslate2", *TEXT_FILES], "MARIAN .* of type marian"),
    "tokenizer": (["--hypotheses", "first.txt", "--bleu_tokenize", "moses", *TEXT_FILES], "moses does .*choose .*13a"),
    "tuning of two": (["--tune", "--model", "OURS", "done", *TEXT_FILES], "give that as the only --model"),
    "tuning of a file": (["--tune", "--hypotheses", "first.txt", *TEXT_FILES], "give that as the only --model"),
    "tuning on the test split": (["--tune", "--model", "OURS", "--dataset_name", "data"], "must not use the test"),
    "tuning on a part of it": (
        ["--tune", "--model", "OURS", "--dataset_name", "data", "--split", "dev+test[:9]"],
        "must not use the test",
    ),
    "tuning of options": (["--tune", "--model", "OURS", "--num_beams", "3", *TEXT_FILES], "leave out --num_beams."),
    "results": (["--hypotheses", "first.txt", "--output", "done", *TEXT_FILES], "done already holds results"),
    "other files": (
        ["--hypotheses", "first.txt", "--output", "mine", *TEXT_FILES],
        "mine/references.txt would be overwritten with other texts; choose another directory",
    ),
    "a link": (["--hypotheses", "first.txt", "--output", "linked", *TEXT_FILES], "linked/hypotheses is a link"),
    "files that are not of an evaluation": (
        ["--hypotheses", "first.txt", "--output", "notes", *TEXT_FILES],
        "--output notes holds other files; choose another directory",
    ),
    "output below a file": (
        ["--tune", "--model", "OURS", "--output", "first.txt/new", *TEXT_FILES],
        "--output first.txt/new cannot be written",
    ),
    "split without references": (
        ["--model", "OURS", "--dataset_name", "bare", "--source_column", "en", "--target_column", "de"],
        "--split test of bare has no references",
    ),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(options, message, folder, ours, marian, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    write(folder / "short.txt", ["a", "b"])
    write(folder / "empty.txt", [])
    packed = gzip.compress(b"text")
    (folder / "cut.gz").write_bytes(packed[:-9])
    (folder / "damaged.gz").write_bytes(packed[:10] + b"\xff" + packed[11:])
    (folder / "latin.txt").write_bytes("schön\n".encode("latin-1"))
    write(folder / "done" / "results.json", [])
    write(folder / "mine" / "references.txt", ["precious"])
    write(folder / "notes" / "results.md", ["precious"])
    if not (folder / "linked").exists():
        (folder / "linked").mkdir()
        (folder / "linked" / "hypotheses").symlink_to(folder / "notes")
    write(folder / "bare" / "test.jsonl", ['{"en": "A dog sleeps.", "de": ""}'])
    names = {"OURS": ours, "MARIAN": str(marian)}
    for name, path in names.items():
        message, options = message.replace(name, path), [option.replace(name, path) for option in options]
    said = command_error(capsys, "evaluate", *options)
    assert re.search(message, said) and said.startswith("vanilla-transformer evaluate: ")
    assert (folder / "mine" / "references.txt").read_text() == "precious\n"
    assert (folder / "notes" / "results.md").read_text() == "precious\n"
