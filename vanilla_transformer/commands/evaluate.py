"""Translate a test set with one or several models, or read translations from files, and score them with sacreBLEU.

Prints BLEU and chrF of each system with 95 % confidence intervals. The first system on the command line is the
baseline; for each other one, p is the probability of a difference this large arising by chance. A model may also be
any AutoModelForSeq2SeqLM of transformers, such as an OPUS-MT model; it translates with its own `generate`.
"""

import argparse
import hashlib
import itertools
import json
import re
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

from sacrebleu.utils import smart_open
from tabulate import tabulate

from ..data.encoding import are_filled
from ..data.options import DatasetOptions
from ..data.rows import hide_bars
from ..data.splits import load_split
from ..data.texts import is_filled
from ..errors import UserError, explaining, noting
from ..evaluation.further_metrics import OURS, Metrics, as_list, deciding_metric, greater_by_name, not_measured
from ..evaluation.scores import Scorer
from ..evaluation.splits import references_of
from ..evaluation.systems import kept_by_kind, results_table, score_systems
from ..evaluation.tuning import tune, use_best
from ..files import public_name, replacing_files, write_bytes, write_text
from ..hub.model_card import record_tuning
from ..loading import Translator, set_languages
from ..training.hardware import configure_malloc
from .parser import (
    GENERATION,
    LOADING,
    add_dataset_options,
    add_translation_options,
    dataclass_of,
    positive,
    values_of,
)

TUNABLE = tuple(name for name in OURS if name != "loss")  # beside numbers of --metrics
UNTUNED = (*GENERATION, "num_samples")  # options that --tune has no use for
EXAMPLES = """
         vanilla-transformer evaluate --model outputs/first outputs/second Helsinki-NLP/opus-mt-en-de \\
             --sources test.en --references test.de --target_lang de --num_beams 5 --output evaluation
         vanilla-transformer evaluate --hypotheses theirs.txt ours.txt --references test.de --paired randomization
         vanilla-transformer evaluate --hypotheses ours.txt --references tokens.de --bleu_tokenize none --lowercase
         vanilla-transformer evaluate --hypotheses ours.txt --references first.de second.de --metrics rouge
         vanilla-transformer evaluate --model outputs/a+outputs/b --dataset_name data --source_lang en --target_lang de
         vanilla-transformer evaluate --tune --model outputs/a --dataset_name data --split validation \\
             --source_lang en --target_lang de"""


def add_arguments(parser: argparse.ArgumentParser):
    """The options of `vanilla-transformer evaluate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog += EXAMPLES
    add = parser.add_argument
    # Both options append to one list, so that the first system on the command line is the baseline.
    systems = {"dest": "systems", "nargs": "+", "action": "extend", "default": []}
    models = "models, each a system of its own: directories or Hub ids; with + between them, an ensemble"
    add("--model", **systems, type=lambda name: (name, "model"), metavar="DIR_OR_ID", help=models)
    add("--hypotheses", **systems, type=lambda name: (name, "file"), metavar="FILE", help="translations, one per line")
    add_dataset_options(parser, required=False)
    several = {"nargs": "+", "action": "extend", "metavar": "FILE"}
    add("--test_file", **several, help="pairs from a file that train.py reads, instead of a dataset")
    add("--sources", metavar="FILE", help="texts to translate, one per line; with --references, instead of a dataset")
    add(
        "--references",
        **several,
        help="reference translations, one per line; several files are several references of each line",
    )
    add("--bleu_tokenize", help="sacreBLEU tokenizer; none: text is tokenized already (default: by target language)")
    add("--lowercase", action="store_true", help="ignore case, but not in --metrics")
    how = (
        "nfc: compose letters and drop invisible characters on both sides for BLEU, chrF and the word error rate, as "
        "the signatures then say "
    )
    how += "(default: none, or nfc if a model's tokenizer can only write references so)"
    add("--score_normalization", choices=["none", "nfc"], help=how)
    more = "metrics from the evaluate library: ids such as rouge, or local scripts; their code runs"
    add("--metrics", **several | {"metavar": "ID_OR_PATH"}, help=more)
    arguments = "arguments of the metrics: KEY=VALUE; with several metrics, MODULE.KEY=VALUE"
    add("--metric_kwargs", **several | {"metavar": "KEY=VALUE"}, help=arguments)
    tune = "choose beams and length penalty on --split, such as validation, by bleu (the default), chrf, exact_match, "
    tune += "word_error_rate or one of the --metrics, and save them with the model"
    add("--tune", nargs="?", const="bleu", metavar="METRIC", help=tune)
    tests = ["bootstrap", "randomization", "none"]
    add("--paired", choices=tests, default="bootstrap", help="significance test (default: %(default)s)")
    add("--num_samples", type=positive, help="for --paired (default: 1000 resamples or 10000 randomizations)")
    add(
        "--output",
        metavar="DIR",
        type=Path,
        help="write results.md, results.json and the translations there; with --tune, only results.json",
    )
    add_translation_options(parser)


def run(options: argparse.Namespace):
    """Checks all that can be checked before a model translates; then translates, scores, prints and writes."""
    check_options(options)
    hide_bars()
    sources, references, filled = load_texts(options)
    systems = {name: read_lines(name) if kind == "file" else None for name, kind in options.systems}
    for name, texts in systems.items():
        if texts is not None and len(texts) == len(filled) > len(references):
            systems[name] = list(itertools.compress(texts, filled))
    for name, texts in {options.sources: sources, **systems}.items():
        if texts is not None and len(texts) != len(references):
            counts = f"{name} has {len(texts):,} lines, but there are {len(references):,} references"
            raise UserError(f"{counts}; give files that correspond line by line.")
    metrics = Metrics(options.metrics, options.metric_kwargs)
    language = dataclass_of(DatasetOptions, options).target_language
    scorer = Scorer(language, options.bleu_tokenize, options.lowercase, options.score_normalization, metrics)
    # All that may fail, before hours of translating.
    numbers = metrics.load(references, sources)
    if options.tune not in (None, *TUNABLE, *numbers):
        raise not_measured(f"--tune {options.tune}", [*TUNABLE, *numbers])
    doubts = [scorer.advise_tokenizer(references)]
    for name, kind in options.systems:
        if kind == "model":
            doubts.append(scorer.fit(load_translator(name, options).tokenizer, references))
    for doubt in filter(None, doubts):
        print(f"warning: {doubt}", file=sys.stderr)
    files = text_files(sources, references)
    make_output_dir(options.output, files)
    if options.tune:
        return tune_model(options, sources, references, scorer)
    if options.output:
        for file, lines in files.items():
            write_bytes(options.output / file, to_bytes(lines))
        (options.output / "hypotheses").mkdir(exist_ok=True)
    speeds = {}
    for name, kind in options.systems:
        if kind == "model":
            systems[name], speeds[name] = translate(name, sources, options)
        file = f"hypotheses/{file_name(name)}"
        files[file] = systems[name]
        if options.output:
            write_bytes(options.output / file, to_bytes(files[file]))
    with explaining("The systems cannot be scored", ValueError):  # with a wrong SACREBLEU_SEED
        results = score_systems(systems, references, scorer, options.paired, options.num_samples, sources)
    for name, speed in speeds.items():
        results["systems"][name]["sentences_per_second"] = speed
    for name in systems if sources else ():
        results["systems"][name]["kept"] = kept_by_kind(sources, systems[name])
    table = results_table(results)
    if options.output:
        given = {name: value for name, value in vars(options).items() if value is not None}
        hashes = {file: hashlib.sha256(to_bytes(lines)).hexdigest() for file, lines in files.items()}
        results |= {"sha256": hashes, "options": given, "metrics": metrics.describe()}
        write_text(options.output / "results.json", json.dumps(results, indent=2, default=str))
        write_text(options.output / "results.md", f"{results_table(results)}\n")  # with the hashes
    print(table)


def check_options(options: argparse.Namespace):
    """Raises UserError for options that do not go together."""
    if not options.systems:
        raise UserError("there is nothing to score; give --model or --hypotheses.")
    file, count = Counter(file_name(name) for name, _ in options.systems).most_common(1)[0]
    if count > 1:
        raise UserError(f"{count} systems have the same name, {Path(file).stem}; give each one once, or rename one.")
    has_pairs = bool(options.dataset_name or options.test_file)
    given = [bool(options.dataset_name), bool(options.test_file), bool(options.references)]
    if sum(given) != 1 or (has_pairs and options.sources):
        raise UserError("give one of --dataset_name, --test_file, and --references, which may come with --sources.")
    if any(kind == "model" for _, kind in options.systems) and not (has_pairs or options.sources):
        raise UserError("--model needs source texts; add --sources.")
    if options.tune and not (len(options.systems) == 1 and Path(options.systems[0][0], "config.json").is_file()):
        raise UserError("--tune saves what it finds in one model directory; give that as the only --model.")
    splits = {part.partition("[")[0].strip() for part in options.split.split("+")}
    if options.tune and options.dataset_name and "test" in splits:
        raise UserError("--tune must not use the test split: that would inflate its score; give another --split.")
    if options.tune and (given := [name for name in UNTUNED if getattr(options, name) is not None]):
        raise UserError(f"--tune chooses the search itself; leave out --{' and --'.join(given)}.")


def load_texts(options: argparse.Namespace) -> tuple[list[str] | None, list[str] | list[list[str]], list[bool]]:
    """The sources, or None if there are none; the reference of each text, or a list of several; and which pairs of the
    test set these are, as those with an empty side are skipped."""
    if options.references:
        first, *others = map(read_lines, options.references)
        for file, lines in zip(options.references[1:], others, strict=True):
            if len(lines) != len(first):
                counts = f"{options.references[0]} has {len(first):,} lines and {file} {len(lines):,}"
                raise UserError(f"{counts}; give --references that correspond line by line.")
        references = [list(texts) for texts in zip(first, *others, strict=True)] if others else first
        return options.sources and read_lines(options.sources), references, [True] * len(references)
    split, others = "test" if options.test_file else options.split, "--test_file, or --sources and --references"
    pairs = load_split(dataclass_of(DatasetOptions, options), split, options.test_file, others)
    if not any(map(is_filled, pairs["target"])):
        what = f"--split {options.split} of {options.dataset_name}"
        raise UserError(f"{' '.join(options.test_file or [what])} has no references; give one that has.")
    filled = are_filled(pairs[:])  # train.py drops the others
    if skipped := filled.count(False):
        counts = f"{skipped:,} of {len(pairs):,} pairs"
        print(f"warning: {counts} have an empty source or no reference; they are skipped.", file=sys.stderr)
        pairs = pairs.select(list(itertools.compress(range(len(pairs)), filled)))
    return list(pairs["source"]), references_of(pairs), filled


def text_files(sources: list[str] | None, references: list[str] | list[list[str]]) -> dict[str, list[str]]:
    """The files of `--output` with the test set: references.txt, then references-2.txt and so on for others."""
    streams = itertools.zip_longest(*map(as_list, references), fillvalue="")
    files = {f"references{f'-{number}' if number > 1 else ''}.txt": texts for number, texts in enumerate(streams, 1)}
    return files | ({"sources.txt": sources} if sources else {})


def make_output_dir(folder: Path | None, texts: dict[str, list[str]]):
    """Creates `--output`; raises UserError if it cannot be written, or holds more than an interrupted evaluation."""
    if folder is None:
        return
    with explaining(f"--output {folder} cannot be written", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if (folder / "hypotheses").is_symlink():
        raise UserError(f"{folder}/hypotheses is a link; choose another directory for --output.")
    if (folder / "results.json").exists():  # without it, an interrupted evaluation starts again
        raise UserError(f"{folder} already holds results of an evaluation; choose another directory.")
    if any(folder.iterdir()) and not (folder / "references.txt").exists():  # which is written first
        raise UserError(f"--output {folder} holds other files; choose another directory.")
    if (folder / "results.md").exists():  # which is written after results.json
        raise UserError(f"{folder}/results.md would be overwritten; choose another directory for --output.")
    for file, lines in texts.items():
        if (folder / file).exists() and (folder / file).read_bytes() != to_bytes(lines):
            raise UserError(
                f"{folder / file} would be overwritten with other texts; choose another directory for --output."
            )


def read_lines(file: str) -> list[str]:
    """The lines of a file as sacreBLEU reads them, but without a byte order mark; unpacked if its name is `*.gz`."""
    unreadable = explaining(f"{file} cannot be read as UTF-8 text", OSError, EOFError, UnicodeDecodeError, zlib.error)
    with unreadable, smart_open(file, encoding="utf-8-sig") as lines:
        texts = [line.rstrip() for line in lines]
    if not any(texts):
        raise UserError(f"{file} is empty; give a file with one text per line.")
    return texts


def to_bytes(texts: list[str]) -> bytes:
    """The content of a file with one text per line; line breaks in a text, which change no score, become spaces."""
    return "".join(text.replace("\n", " ").rstrip() + "\n" for text in texts).encode()


def file_name(system: str) -> str:
    """outputs/sample -> outputs-sample.txt; of a long name, such as that of an ensemble, the last 240 bytes."""
    system = system if re.search(r"\w", system) else str(Path(system).resolve())  # . and ..
    name = re.sub(r"[^\w.]+", "-", system.removesuffix(".txt")).encode()[-240:].decode(errors="ignore")
    return name.strip("-.") + ".txt"


def load_translator(name: str, options: argparse.Namespace) -> Translator:
    """A model, or an ensemble `a+b`. Raises UserError if it cannot be loaded."""
    given = values_of(options, LOADING)
    configure_malloc()
    models = [name] if Path(name).exists() else name.split("+")
    if options.backend != "torch":
        return Translator.from_pretrained(models, **given)
    translator = Translator.from_pretrained(models, use_safetensors=None, **given)  # many others have pickles alone
    set_languages(translator, options.source_lang, options.target_lang)
    return translator


def translate(name: str, sources: list[str], options: argparse.Namespace) -> tuple[list[str], float]:
    """The translations by a model, and how many it made per second, not counting the time to load it."""
    translator = load_translator(name, options)
    start = time.perf_counter()
    generation = values_of(options, GENERATION)
    with noting(f"while {name} translates"):
        translations = translator(sources, f"Translating with {name}" if sys.stderr.isatty() else None, **generation)
    return translations, len(sources) / (time.perf_counter() - start)


def tune_model(options: argparse.Namespace, sources: list[str], references: list[str], scorer: Scorer):
    """Prints the scores of each setting that [`tune`] tries, and saves the best, for the card too."""
    ((name, _),) = options.systems
    translator = load_translator(name, options)
    with noting(f"while {name} is tuned"):
        tried = tune(translator, sources, references, scorer, options.tune, greater_by_name(options.tune))
    print(tabulate(tried, "keys", "github", floatfmt=("d", ".1f", ".2f", ".2f", *[".4g"] * len(tried[0]))))
    config = translator.engine.generation_config
    penalty = 1.0 if config.length_penalty is None else config.length_penalty
    before = {"num_beams": config.num_beams or 1, "length_penalty": penalty}
    use_best(tried, config)
    unsaved = explaining(f"The best cannot be saved in {name}/generation_config.json", ValueError)
    with unsaved, replacing_files(Path(name)) as folder:
        config.save_pretrained(folder)
    texts = f"{options.split} of {public_name(options.dataset_name)}" if options.dataset_name else None
    names = ", ".join(Path(name).name for name in options.references or options.test_file or ())
    tuned = {"tuned_decoding": tried, "tuned_on": texts or names, "tuned_by": deciding_metric(tried, options.tune)}
    if not record_tuning(Path(name), tuned, before):
        card = f"{name}/README.md is not as train.py writes it, so it was left alone"
        print(f"{card}; it still describes the former search.", file=sys.stderr)
    if options.output:
        signatures = {"BLEU": scorer.bleu.get_signature(), "chrF2": scorer.chrf.get_signature()}
        signatures = {metric: scorer.signature(given) for metric, given in signatures.items()}
        results = {"model": name, "tuned_decoding": tried, "signatures": signatures}
        write_text(options.output / "results.json", json.dumps(results, indent=2))
