"""Train a small, fast model on what a large one translates: translate, filter, train, convert, score.

Everything is written to --output_dir. The same command, given again, goes on where it was stopped or killed. Options
that are not listed here go to train.py, such as --hours, --size, --test_file and --source_lang. On several GPUs:
accelerate launch --multi_gpu -m vanilla_transformer distill ...
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from accelerate.utils.memory import clear_device_cache
from filelock import FileLock
from huggingface_hub.errors import StrictDataclassError

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..conversion.marian import native_family
from ..conversion.marian_writer import check_fields
from ..data.rows import hide_bars
from ..data.splits import load_split
from ..data.texts import is_filled
from ..data.tokenizer import check_vocab_size
from ..errors import UserError, explaining
from ..evaluation.scores import Scorer
from ..loading import Translator
from ..students.groups import translate_groups
from ..students.languages import with_languages
from ..students.options import FILTERING, TRANSLATING, DistillOptions
from ..students.pairs import TextsToLearn, make_pairs
from ..students.scoring import System, compare, load_test, write_report
from ..students.steps import EVALUATION, PAIRS, ROUND_TRIP, STUDENT, TRAIN, TRANSLATIONS, begin, check_directory
from ..students.training import (
    check_training,
    digest_files,
    held_out_file,
    is_trained,
    settings_of,
    train,
    training_words,
)
from ..students.translating import Teacher, find_back, find_teachers
from ..training import hardware
from ..training.options import given_fields
from ..training.processes import check_launch, run_on_main
from ..training.recipe import HelpFormatter, Options
from ..training.run_folder import LOCK, lock_output_dir
from . import convert
from .evaluate import read_lines
from .parser import Parser, dataclass_of

DATACLASSES = [DistillOptions]
INT8 = "student, ctranslate2 int8"  # in the table of scores


def add_arguments(parser: Parser):
    """The fields of [`DistillOptions`] are options already; other words are for train.py, and go to `options.rest`."""
    parser.takes_rest, parser.allow_abbrev, parser.formatter_class = True, False, HelpFormatter


def run(options: argparse.Namespace):
    """Distills; if it is stopped, says how to go on."""
    try:
        distill(dataclass_of(DistillOptions, options), options.rest)
    except (KeyboardInterrupt, SystemExit) as stopped:
        # train.py exits with 128 + the number of a signal.
        is_signal = isinstance(stopped, KeyboardInterrupt) or (isinstance(stopped.code, int) and stopped.code > 128)
        if is_signal and os.environ.get("RANK", "0") == "0":
            print("\nvanilla-transformer distill: stopped; run the same command again to resume.", file=sys.stderr)
        raise


def distill(options: DistillOptions, rest: Sequence[str] = ()):
    """Trains a student on the translations of teachers, and writes `report.md` in `options.output_dir`.

    Skips the steps that an earlier call with the same arguments finished. Of several processes, each calls it. `rest`
    are options of train.py, as on its command line. Raises UserError for options that contradict each other, or that
    are not those with which the directory was begun.
    """
    options.check()
    words, asked = training_words(options, rest)
    check_training(options, asked)
    check_forms(forms := find_forms(options.to), asked)
    start_process()
    words, asked = with_languages(options, rest, words, asked)
    texts = read_texts(options, asked)
    lock = FileLock(options.output_dir / LOCK, timeout=1, fallback_to_soft=False)
    try:
        run_on_main(begin_steps, options, asked, texts, forms, lock)
        run_steps(options, words, asked, texts, forms)
    finally:
        lock.release()


def run_steps(options: DistillOptions, words: list[str], asked: Options, texts: TextsToLearn, forms: list[str]):
    """Translates, filters, trains, converts and scores, where an earlier call has not, and writes the report."""
    state, languages = PartialState(), (asked.data.source_lang, asked.data.target_lang)
    teachers = find_teachers(options, languages, asked.training.seed)
    if not (options.output_dir / PAIRS).exists():
        for number, teacher in enumerate(teachers):
            state.print(f"{teacher.label} translates {len(texts.sources):,} texts.")
            translate_groups(options.output_dir / TRANSLATIONS / str(number), texts.sources, "Translating", teacher)
        make_pairs(options, texts, teachers, find_back(options, languages), holds_out(options, asked))
        clear_device_cache(garbage_collection=True)  # of the teachers
    if not is_trained(asked):
        state.print(f"Training the student on {options.output_dir}/{PAIRS}/{TRAIN}.")
        train(words, asked)
    if state.is_main_process:
        score_student(options, asked, teachers, forms)
        names = [teacher.label for teacher in teachers] or options.translations
        write_report(options.output_dir, names, texts.counts, forms)


def begin_steps(options: DistillOptions, asked: Options, texts: TextsToLearn, forms: list[str], lock: FileLock):
    """Checks the test set, locks the directory and checks what an earlier call has left in it. Raises UserError."""
    if not holds_out(options, asked):
        load_test(asked.data)  # so that a wrong column is found now
    check_directory(options.output_dir)  # before there is a lock file
    lock_output_dir(lock, f"Another distill is running in {options.output_dir}; choose another --output_dir.")
    begin(options.output_dir, step_settings(options, asked, texts, forms), step_order(options, forms))


def holds_out(options: DistillOptions, asked: Options) -> bool:
    """Whether the test set is held out of the pairs, as no `--test_file` was given."""
    return asked.data.test_file == [held_out_file(options.output_dir)]


def score_student(options: DistillOptions, asked: Options, teachers: list[Teacher], forms: list[str]):
    """Converts the student to each of the `forms`, and compares it with the teachers, unless that was done before."""
    output_dir, training = options.output_dir, asked.training
    for form in forms:
        if not (output_dir / form).exists():
            quantization = "int8" if form in ("ctranslate2", "marian-bin") else None
            convert.convert(str(output_dir / STUDENT), output_dir / form, form, quantization)
    if not (output_dir / EVALUATION).exists():
        scorer = Scorer(asked.data.target_language, training.bleu_tokenize, normalization=training.score_normalization)
        compare(find_systems(output_dir, teachers, forms), load_test(asked.data), scorer, output_dir / EVALUATION)


def start_process():
    """Prepares this process, which may be one of several that a launcher started."""
    check_launch()
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"), timeout=timedelta(hours=24))
    hardware.configure(state.device, "no")
    hide_bars()


def read_texts(options: DistillOptions, asked: Options) -> TextsToLearn:
    """The texts of `--source_file` and `--translations`. Raises UserError if there are none, or not as many."""
    if not options.source_file:
        try:
            pairs = load_split(asked.data, "train", options.translations)
        except UserError as error:
            raise UserError(str(error).replace("--train_file", "--translations")) from error
        sources, targets = ([text or "" for text in pairs[side]] for side in ("source", "target"))
        return TextsToLearn(sources, [targets], {"pairs that were given": len(sources)})
    lines = [line for file in options.source_file for line in read_lines(file)]
    if not any(map(is_filled, lines)):
        raise UserError(f"{' '.join(options.source_file)} has no text; give a file with one text per line.")
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
        return all(any(distributions(name=name)) for name in convert.PACKAGES.get(form, ()))

    if asked is None:
        return ["ctranslate2"] if is_installed("ctranslate2") else []
    forms = [form for form in dict.fromkeys(asked) if form != "none"]
    for form in forms:
        if form not in convert.FORMS:
            raise UserError(f"--to {form} is not a form; choose among {', '.join(convert.FORMS)}, or none.")
        if not is_installed(form):
            raise UserError(f"--to {form} needs `pip install {' '.join(convert.PACKAGES[form])}`.")
    return forms


def check_forms(forms: list[str], asked: Options):
    """Raises UserError for a form that a new student cannot be converted to, and for a wrong size."""
    if asked.training.model_name_or_path:
        return
    if asked.model.vocab_size and not asked.data.tokenizer_name:
        check_vocab_size(asked.model.vocab_size, [tag for tag in asked.data.train_file_tags or () if tag])
    fields, heads = given_fields(asked.model), dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1)
    fields = fields | heads if "d_model" in asked.free else heads | fields  # what is chosen later will fit
    with explaining("No such student can be made", StrictDataclassError):
        config = VanillaTransformerConfig(**fields)
    for form in forms:
        if form == "marian-bin" and asked.data.tokenizer_type != "unigram":
            raise UserError(f"--to {form} needs --tokenizer_type unigram.")
        try:
            if form == "native":
                native_family(config)
            elif form == "marian-bin":
                check_fields(config)
        except UserError as error:
            raise UserError(f"--to {form} is for other options of the student than these: {error}") from error


def step_settings(options: DistillOptions, asked: Options, texts: TextsToLearn, forms: list[str]) -> dict[str, dict]:
    """What each step depends on, by the folder that it writes."""
    digest = hashlib.sha256("\n".join([*texts.sources, *sum(texts.translations, [])]).encode()).hexdigest()
    translations = options.values(TRANSLATING) | {"texts": digest, "scores": options.needs_scores}
    translations |= {"source_lang": asked.data.source_lang, "target_lang": asked.data.target_lang}
    translations |= {"seed": asked.training.seed} if options.samples else {}
    pairs = translations | options.values(FILTERING) | {"test_file": asked.data.test_file}
    student = pairs | settings_of(asked) | digest_files(options, asked)
    steps = {TRANSLATIONS: translations, ROUND_TRIP: pairs, PAIRS: pairs, STUDENT: student}
    return steps | dict.fromkeys(forms, student) | {EVALUATION: student | {"to": forms}}


def step_order(options: DistillOptions, forms: list[str]) -> dict[str, list[str]]:
    """Which steps a step reads."""
    order = {STUDENT: [PAIRS], **dict.fromkeys(forms, [STUDENT]), EVALUATION: [STUDENT, *forms]}
    if options.teacher and not (options.output_dir / PAIRS).exists():  # after that, translations may be removed
        order[ROUND_TRIP] = [TRANSLATIONS]
    return order


def find_systems(output_dir: Path, teachers: list[Teacher], forms: list[str]) -> dict[str, System]:
    """The teachers, the student and, if it was converted to CTranslate2, the student in 8 bits, by name."""
    systems = {}
    for number, teacher in enumerate(teachers, 1):
        is_taken = teacher.label in ("source", "reference", STUDENT, INT8, *systems)
        name = f"{teacher.label} (teacher {number})" if is_taken else teacher.label
        systems[name] = System(teacher.open, teacher.translate)
    load = partial(Translator.from_pretrained, device=PartialState().device)
    systems[STUDENT] = System(partial(load, output_dir / STUDENT), Translator.__call__)
    if "ctranslate2" in forms:
        systems[INT8] = System(partial(load, output_dir / "ctranslate2", backend="ctranslate2"), Translator.__call__)
    return systems
