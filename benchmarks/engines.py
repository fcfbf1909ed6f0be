"""One model in several engines, of Python, of Marian and in Bergamot: size, BLEU, speed.

python benchmarks/engines.py --model DIR --data DIR --languages en de [--teacher MODEL]

The model was trained with `--tokenizer_type unigram --position_embedding_type marian`, so that Marian's engines can
run it. The data have test.jsonl, whose lines have a text for each language. Each engine has one thread, and
translates all test sentences in one call; loading does not count. Bergamot runs in Node if its package is installed
in examples/offline, and Marian if pymarian is installed. Writes a page to benchmarks/results.
"""

import functools
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import report
import sacrebleu
import torch
from peers import read_pairs

from vanilla_transformer import Translator
from vanilla_transformer.__main__ import main as vanilla_transformer
from vanilla_transformer.loading import set_languages

OFFLINE = Path(__file__).parents[1] / "examples" / "offline"
COLUMNS = ["engine", "MB", "same as the first", "test BLEU", "sentences/s"]
MARIAN = """
import pymarian, sys, time
translator = pymarian.Translator(config=sys.argv[1], beam_size=int(sys.argv[2]))
lines = sys.stdin.read().split("\\n")  # not at U+2028, as splitlines does
translator.translate(lines[:8])
start = time.perf_counter()
print(*translator.translate(lines), sep="\\n")
print(time.perf_counter() - start, file=sys.stderr)
"""

PIPED = {"stdout": subprocess.PIPE, "encoding": "utf-8", "check": True}

Result = tuple[list[str], float]  # translations, and the seconds that they took


def in_python(translator: Translator, texts: list[str], beams: int) -> Result:
    translator(texts[:8], num_beams=beams)
    start = time.perf_counter()
    return translator(texts, num_beams=beams), time.perf_counter() - start


def in_node(folder: Path, texts: list[str], beams: int) -> Result:
    """By Bergamot; the time for loading, that of one sentence, does not count."""
    seconds = []
    for some in (texts[:1], texts):
        start = time.perf_counter()
        command = ["node", "translate.cjs", str(beams)]
        done = subprocess.run(command, cwd=folder, input="\n".join(some), **PIPED)
        seconds.append(time.perf_counter() - start)
    return lines_of(done.stdout), seconds[1] - seconds[0]


def in_marian(folder: Path, texts: list[str], beams: int) -> Result:
    """In a process of its own, which an error of Marian would end."""
    command = [sys.executable, "-c", MARIAN, str(folder / "config.yml"), str(beams)]
    done = subprocess.run(command, input="\n".join(texts), stderr=subprocess.PIPE, **PIPED)
    return lines_of(done.stdout), float(done.stderr.split()[-1])


def lines_of(text: str) -> list[str]:
    """The lines, which may have other breaks than `\\n` in them."""
    return text.removesuffix("\n").split("\n")


def size_of(folder: Path, *names: str) -> float:
    """The megabytes of these files."""
    return sum((folder / name).stat().st_size for name in names) / 1e6


def find_engines(model: str, folder: Path) -> dict[str, tuple[float, Callable[[list[str], int], Result]]]:
    """Each engine with the size of what it needs, and how it translates; converted models are written to `folder`."""

    def converted(form: str, *options: str) -> Path:
        output = folder / "-".join([form, *options[1:]])
        vanilla_transformer(["convert", model, str(output), "--to", form, *options])
        return output

    load = functools.partial(Translator.from_pretrained, device="cpu")
    tokens = size_of(Path(model), "tokenizer.json")
    size = size_of(Path(model), "model.safetensors")
    engines = {"this package, float32": (size + tokens, functools.partial(in_python, load(model)))}
    for name, options in {"float32": [], "int8": ["--quantization", "int8"]}.items():
        output = converted("ctranslate2", *options)
        translate = functools.partial(in_python, load(output, backend="ctranslate2"))
        engines[f"CTranslate2, {name}"] = size_of(output, "model.bin") + tokens, translate
        output = converted("marian-bin", *options)
        if (OFFLINE / "node_modules").is_dir():
            size = size_of(output, "model.bin", "vocab.spm")
            engines[f"Bergamot in Node, {name}"] = size, functools.partial(in_node, page(output))
        if name == "float32" and importlib.util.find_spec("pymarian"):
            size = size_of(output, "model.npz", "vocab.spm")
            engines["Marian, float32"] = size, functools.partial(in_marian, output)
    return engines


def page(model: Path) -> Path:
    """A copy of examples/offline with the model."""
    folder = model.with_name(f"{model.name}-page")
    shutil.copytree(OFFLINE, folder, symlinks=True, ignore=shutil.ignore_patterns("model"))
    shutil.copytree(model, folder / "model")
    return folder


def main():
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--languages", nargs=2, default=["en", "de"], metavar=("SOURCE", "TARGET"))
    parser.add_argument("--teacher", metavar="MODEL", help="also translates, by this package")
    parser.add_argument("--num_beams", type=int, default=1, help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts, references = map(list, zip(*read_pairs(options.data, "test", options.languages), strict=True))
    if options.quick:
        texts, references = texts[:20], references[:20]
    rows, first = [], None
    with tempfile.TemporaryDirectory() as folder:
        engines = find_engines(options.model, Path(folder))
        if options.teacher:
            teacher = Translator.from_pretrained(options.teacher, device="cpu")
            set_languages(teacher, *options.languages)
            size = 4 * sum(weight.numel() for weight in teacher.model.parameters()) / 1e6
            engines["the teacher, float32"] = size, functools.partial(in_python, teacher)
        for name, (size, translate) in engines.items():
            translations, seconds = translate(texts, options.num_beams)
            first = first or translations
            same = sum(one == other for one, other in zip(translations, first, strict=True)) / len(texts)
            bleu = sacrebleu.corpus_bleu(translations, [references]).score
            rows.append([name, f"{size:.2f}", f"{same:.1%}", f"{bleu:.2f}", f"{len(texts) / seconds:.0f}"])
            print("; ".join(rows[-1]), flush=True)
    lines = report.heading("One model in several engines", ["torch", "transformers", "ctranslate2"])
    lines += [
        "",
        f"{len(texts):,} sentences, one thread, {options.num_beams} beam(s).",
        "",
        *report.table(COLUMNS, rows),
    ]
    report.write(options, "engines", lines)


if __name__ == "__main__":
    main()
