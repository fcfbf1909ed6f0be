"""docs/distilling.md: its commands are accepted, its sizes are measured, its code runs."""

import re
import shlex
from pathlib import Path

import pytest
from helpers import ROOT, read_sample, save_untrained, table_rows

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.__main__ import load_verb
from vanilla_transformer.commands.parser import dataclass_of
from vanilla_transformer.students.options import DistillOptions
from vanilla_transformer.students.training import check_training, training_words
from vanilla_transformer.training.rule import SIZES

PAGE = (ROOT / "docs" / "distilling.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"(?m)^    vanilla-transformer distill ((?:.*\\\n)*.*)$", PAGE)
ROWS = [row for row in table_rows(PAGE) if row[0] in SIZES]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_accepted(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("true.tsv", "test.tsv", "test.jsonl"):
        Path(name).write_text("en\tde\na\tb\n")
    given = load_verb("distill")[1].parse_args(shlex.split(command.replace("\\\n", "")))
    options = dataclass_of(DistillOptions, given)
    options.check()
    check_training(options, training_words(options, given.rest)[1])


def test_there_are_commands_and_sizes():
    assert len(COMMANDS) == 5 and len(ROWS) == 4


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_a_size_is_what_the_page_says(row, tmp_path):
    ctranslate2 = pytest.importorskip("vanilla_transformer.conversion.ctranslate2")
    size, vocab_size, megabytes = SIZES[row[0]], int(row[1].replace(",", "")), float(row[2])
    sides = {"layers": size.layers, "attention_heads": size.heads, "ffn_dim": 4 * size.d_model}
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()}
    how = {"vocab_size": vocab_size, "d_model": size.d_model, "position_embedding_type": "marian"}
    spec = ctranslate2.make_spec(VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes, **how)))
    for register in (spec.register_source_vocabulary, spec.register_target_vocabulary):
        register(["<unk>", "<s>", "</s>", *map(str, range(3, vocab_size))])
    spec.validate()
    spec.optimize(quantization="int8")
    spec.save(str(tmp_path))
    assert (tmp_path / "model.bin").stat().st_size / 1e6 == pytest.approx(megabytes, abs=0.06)


@pytest.mark.slow
def test_the_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_untrained(Path("outputs/sample"))
    Path("mono.en").write_text("".join(f"{source}\n" for source, _ in read_sample(80)))
    (code,) = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)
    exec(
        code.replace("num_beams=2", "num_beams=2, max_new_tokens=5, keep=['repetition', 'odd_lengths', 'numbers']"), {}
    )
    assert "| student" in capsys.readouterr().out
