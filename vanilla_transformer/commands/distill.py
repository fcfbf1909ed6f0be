"""Train a small, fast model on the translations of any text by a large one: translate, filter, train, score, convert.

Everything is written to --output_dir. The same command, given again, goes on where it was stopped or killed. All
options that are not listed here are those of train.py, such as --hours, --size, --test_file and --source_lang. To use
several GPUs: accelerate launch --multi_gpu -m vanilla_transformer distill ...
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from accelerate.utils.memory import clear_device_cache
from transformers.utils.logging import disable_progress_bar

from ..data.rows import hide_bars
from ..data.splits import load_split
from ..data.texts import is_filled
from ..errors import UserError
from ..evaluation.scores import Scorer
from ..files import write_text
from ..loading import Translator
from ..students.groups import translate_groups
from ..students.options import FILTERING, TRANSLATING, DistillOptions
from ..students.pairs import TextsToLearn, make_pairs
from ..students.scoring import System, compare, load_test, report
from ..students.steps import begin
from ..students.training import held_out_file, is_trained, settings_of, train, training_words
from ..students.translating import Teacher, find_back, find_teachers
from ..training import hardware
from ..training.processes import check_launch, run_on_main
from ..training.recipe import HelpFormatter, Options
from . import convert
from .evaluate import read_lines
from .parser import Parser

DATACLASSES = [DistillOptions]
INT8 = "student, ctranslate2 int8"  # its name in the table of scores


def add_arguments(parser: Parser):
    """Those of [`DistillOptions`] are there already; the rest goes to train.py."""
    parser.rest, parser.allow_abbrev, parser.formatter_class = "rest", False, HelpFormatter


def run(options: argparse.Namespace):
    """Distills; if it is stopped, says how to go on."""
    given = {field.name: getattr(options, field.name) for field in fields(DistillOptions)}
    try:
        distill(DistillOptions(**given), options.rest)
    except (KeyboardInterrupt, SystemExit) as stopped:
        # A signal that train.py got is a status above 128.
        is_signal = isinstance(stopped, KeyboardInterrupt) or (isinstance(stopped.code, int) and stopped.code > 128)
        if is_signal and os.environ.get("RANK", "0") == "0":
            print("\nvanilla-transformer distill: stopped; the same command goes on from here.", file=sys.stderr)
        raise


def distill(options: DistillOptions, rest: Sequence[str] = ()):
    """Trains a student on the translations of a teacher, and writes `report.md` in `options.output_dir`.

    Goes on where an earlier call with the same arguments ended. Of several processes, each calls it.

    Args:
        rest: Options of train.py, as on its command line.

    Raises UserError if options contradict each other, or others were given when the directory was begun.
    """
    options.check()
    words, asked = training_words(options, rest)
    forms, texts = find_forms(options.to), read_texts(options, asked)
    state, output_dir = start_process(), options.output_dir
    holds_out = asked.data.test_file == [held_out_file(output_dir)]

    def start() -> set[str]:
        if not holds_out:
            load_test(asked.data)  # so that a wrong column is found now
        return begin(output_dir, step_settings(options, asked, texts, forms), step_order(options, forms))

    done = run_on_main(start)
    languages = asked.data.source_lang, asked.data.target_lang
    teachers, back = find_teachers(options, languages, asked.training.seed), find_back(options, languages)
    if "pairs" not in done:
        for number, teacher in enumerate(teachers):
            state.print(f"{teacher.label} translates {len(texts.sources):,} texts.")
            translate_groups(output_dir / "translations" / str(number), texts.sources, "Translating", teacher.load)
        make_pairs(options, texts, teachers, back, holds_out)
        clear_device_cache(garbage_collection=True)  # of the teachers
    if "evaluation" not in done and not is_trained(asked):
        state.print(f"Training the student on {output_dir}/pairs/train.jsonl.")
        train(words, asked)
    if not state.is_main_process:
        return
    for form in forms:
        if form not in done:
            convert_student(output_dir, form)
    if "evaluation" not in done:
        systems = find_systems(output_dir, teachers, forms)
        compare(systems, load_test(asked.data), make_scorer(asked), output_dir / "evaluation")
    names = [teacher.label for teacher in teachers] or options.translations
    write_text(output_dir / "report.md", report(output_dir, names, texts.counts, forms))
    print(f"\n{(output_dir / 'report.md').read_text(encoding='utf-8')}\nThis report is {output_dir}/report.md.")


def start_process() -> PartialState:
    """Prepares this process, which may be one of several that a launcher started."""
    check_launch()
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"), timeout=timedelta(hours=24))
    hardware.configure(state.device, "no")
    hide_bars()
    disable_progress_bar()  # of transformers
    return state


def read_texts(options: DistillOptions, asked: Options) -> TextsToLearn:
    """The texts of `--source_file` and `--translations`. Raises UserError if they are not as many."""
    if not options.source_file:
        pairs = load_split(asked.data, "train", options.translations, "--source_file")
        sources, targets = ([text or "" for text in pairs[side]] for side in ("source", "target"))
        return TextsToLearn(sources, [targets], {"pairs that were given": len(sources)})
    lines = [line for file in options.source_file for line in read_lines(file)]
    counts = {"lines that were given": len(lines)}
    if options.teacher:
        sources = list(dict.fromkeys(filter(is_filled, lines)))
        return TextsToLearn(sources, [], counts | {"distinct texts": len(sources)})
    translations = [read_lines(file) for file in options.translations]
    for file, some in zip(options.translations, translations, strict=True):
        if len(some) != len(lines):
            raise UserError(f"{file} has {len(some):,} lines for {len(lines):,} of --source_file; give one for each.")
    return TextsToLearn(lines, translations, counts)


def find_forms(asked: list[str] | None) -> list[str]:
    """The forms to convert the student to. Raises UserError if one is unknown, or its packages are missing."""

    def is_installed(form: str) -> bool:
        return all(any(distributions(name=name)) for name in convert.PACKAGES.get(form, "").split())

    if asked is None:
        return ["ctranslate2"] if is_installed("ctranslate2") else []
    forms = [form for form in dict.fromkeys(asked) if form != "none"]
    for form in forms:
        if form not in convert.FORMS:
            raise UserError(f"--to {form} is not a form; choose among {', '.join(convert.FORMS)}, or none.")
        if not is_installed(form):
            raise UserError(f"--to {form} needs `pip install {convert.PACKAGES[form]}`.")
    return forms


def step_settings(options: DistillOptions, asked: Options, texts: TextsToLearn, forms: list[str]) -> dict[str, dict]:
    """What each step depends on, by the folder that it writes."""
    digest = hashlib.sha256("\n".join([*texts.sources, *sum(texts.translations, [])]).encode()).hexdigest()
    translations = options.values(TRANSLATING) | {"texts": digest, "scores": options.needs_scores}
    translations |= {"source_lang": asked.data.source_lang, "target_lang": asked.data.target_lang}
    translations |= {"seed": asked.training.seed} if options.samples else {}
    pairs = translations | options.values(FILTERING) | {"test_file": asked.data.test_file}
    student = pairs | settings_of(asked)
    steps = {"translations": translations, "round_trip": pairs, "pairs": pairs, "student": student}
    return steps | dict.fromkeys(forms, student) | {"evaluation": student | {"to": forms}}


def step_order(options: DistillOptions, forms: list[str]) -> dict[str, list[str]]:
    """Which steps read which."""
    order = {"student": ["pairs"], **dict.fromkeys(forms, ["student"]), "evaluation": ["student", *forms]}
    if options.teacher and not (options.output_dir / "pairs").exists():  # after that, translations may be removed
        order["round_trip"] = ["translations"]
    return order


def convert_student(output_dir: Path, form: str):
    """Converts the student to a form of `vanilla-transformer convert`, in a folder of that name."""
    parser = Parser(prog="vanilla-transformer convert")
    convert.add_arguments(parser)
    quantization = ["--quantization", "int8"] if form in ("ctranslate2", "marian-bin") else []
    convert.run(parser.parse_args([str(output_dir / "student"), str(output_dir / form), "--to", form, *quantization]))


def find_systems(output_dir: Path, teachers: list[Teacher], forms: list[str]) -> dict[str, System]:
    """What is compared: the teachers, the student and, if it is there, the student in 8 bits."""
    systems = {}
    for number, teacher in enumerate(teachers, 1):
        is_taken = teacher.label in ("student", INT8, *systems)
        name = f"{teacher.label} (teacher {number})" if is_taken else teacher.label
        systems[name] = System(teacher.open, teacher.translate)
    load = partial(Translator.from_pretrained, device=PartialState().device)
    systems["student"] = System(partial(load, output_dir / "student"), Translator.__call__)
    if "ctranslate2" in forms:
        systems[INT8] = System(partial(load, output_dir / "ctranslate2", backend="ctranslate2"), Translator.__call__)
    return systems


def make_scorer(asked: Options) -> Scorer:
    training = asked.training
    return Scorer(asked.data.target_language, training.bleu_tokenize, normalization=training.score_normalization)
