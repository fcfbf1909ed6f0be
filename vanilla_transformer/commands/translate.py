"""Translate standard input line by line to standard output, in UTF-8, or fill a catalogue, such as a .po file.

Lines are translated as they arrive, so another program may write one and wait for its translation. Empty lines stay
empty; with --n_best, nothing is written for them.
"""

import argparse
import io
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import BinaryIO

import torch
from tqdm.auto import tqdm
from transformers.utils.logging import disable_progress_bar

from ..data.options import CATALOGUES
from ..errors import UserError, explaining, noting
from ..evaluation.mbr import SAMPLING, most_similar
from ..loading import Translator
from ..sentences_vanilla_transformer import TextTooLong
from ..training.hardware import configure_malloc
from .catalogue import fill_catalogue
from .parser import GENERATION, LOADING, add_translation_options, positive, values_of

LINES_AT_A_TIME = 1_000  # at most, that are sorted by length and written together
CHUNK = 2**20  # bytes that are read at once


def add_arguments(parser: argparse.ArgumentParser):
    """The options of `vanilla-transformer translate`."""
    add = parser.add_argument
    add("--model", required=True, nargs="+", help="a model directory or a Hub id; several are an ensemble")
    add_translation_options(parser)
    policy = "a sentence over --max_source_length: translate it in parts, or stop and name it (default: %(default)s)"
    add("--too_long", choices=["split", "refuse"], default="split", help=policy)
    catalogue = f"translate the untranslated messages of a catalogue: {', '.join(CATALOGUES)}"
    add("--catalogue", type=Path, metavar="FILE", help=catalogue)
    add("--output", type=Path, metavar="FILE", help="with --catalogue: where to write it, which may be the same file")
    add = parser.add_mutually_exclusive_group().add_argument
    n_best = "write the N best of each line, each text once: the line's number TAB score TAB text"
    add("--n_best", type=positive, metavar="N", help=n_best)
    add("--mbr", type=positive, metavar="N", help="of N candidates, write the one most similar to all of them")
    add = parser.add_argument
    add("--mbr_candidates", choices=["samples", "beams"], help="of --mbr (default: samples)")
    add("--mbr_utility", choices=["chrf", "bleu"], help="similarity for --mbr (default: chrf)")
    add("--seed", type=int, default=0, help="of the samples (default: %(default)s)")


def run(options: argparse.Namespace):
    """Loads the model and translates."""
    check_options(options)
    configure_malloc()
    disable_progress_bar()  # of transformers
    torch.manual_seed(options.seed)
    given = values_of(options, (*LOADING, "too_long"))
    translator = Translator.from_pretrained(options.model, **given)
    if options.catalogue:
        return fill_catalogue(translator, options.catalogue, options.output, **values_of(options, GENERATION))
    translate_lines(translator, options)


def check_options(options: argparse.Namespace):
    """Raises UserError for options that do not go together."""
    if not options.mbr and (options.mbr_candidates or options.mbr_utility):
        raise UserError("--mbr_candidates and --mbr_utility are options of --mbr N; add it, or leave them out.")
    draws_samples = options.mbr and options.mbr_candidates != "beams"
    if draws_samples and (options.num_beams or options.length_penalty is not None):
        raise UserError(
            "samples have no beams; leave out --num_beams and --length_penalty, or choose --mbr_candidates beams."
        )
    if draws_samples and options.backend == "ctranslate2":
        raise UserError("--backend ctranslate2 cannot sample; choose --mbr_candidates beams, or --backend torch.")
    hypotheses = options.n_best or options.mbr or 1
    if options.num_beams and options.num_beams < hypotheses:
        raise UserError(f"{hypotheses} translations of a line need as many beams; raise --num_beams.")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed is {options.seed}; it must be at least 0 and below 2^63.")
    if sys.stdout is None and not options.catalogue:
        raise UserError("standard output is closed; redirect it to a file.")
    if (options.catalogue is None) != (options.output is None):
        raise UserError("--catalogue and --output go together; other texts come from stdin and go to stdout.")
    if options.catalogue and (options.n_best or options.mbr):
        raise UserError("--n_best and --mbr translate lines; leave them out, or --catalogue.")
    for name in options.model:
        if " " in name and not Path(name).exists():
            raise UserError(f"--model {name!r} is not a model; give texts on standard input, one per line.")


def translate_lines(translator: Translator, options: argparse.Namespace):
    """Translates what has arrived, up to 1,000 lines at a time, in batches by length."""
    sys.stdout.reconfigure(encoding="utf-8")
    done, distinct = 0, []
    for raw in arriving_lines(sys.stdin.buffer if sys.stdin else io.BytesIO(), LINES_AT_A_TIME):
        lines, problem = [], None  # a line that is not text: those before it are translated first
        try:
            lines += (decode(line, number) for number, line in enumerate(raw, done + 1))
        except UserError as error:
            problem = error
        try:
            with noting(f"while translating lines {done + 1:,} to {done + len(lines):,}"):
                written = translate(translator, lines, done, options, distinct)
        except TextTooLong as error:
            remedy = ", use --too_long split" if options.too_long == "refuse" else ""
            raise UserError(
                f"line {done + error.number + 1} has {error.tokens} tokens, more than the {error.limit} that are "
                f"translated in one piece; shorten it{remedy}, or raise --max_source_length."
            ) from error
        for text in written:
            print(text.replace("\n", " "))  # one line, whatever the model wrote
        sys.stdout.flush()
        if problem:
            raise problem
        done += len(lines)
    if distinct:
        print(f"{mean(distinct):.1f} of {options.mbr} candidates were distinct on average", file=sys.stderr)


def arriving_lines(stream: BinaryIO, size: int) -> Iterator[list[bytes]]:
    """The lines of a stream, up to `size` together, and fewer if no more have arrived."""
    lines, rest = [], b""
    while chunk := stream.read1(CHUNK):
        *complete, rest = (rest + chunk).split(b"\n")
        lines += complete
        while len(lines) >= size or (lines and not has_arrived(stream)):
            yield lines[:size]
            del lines[:size]
    lines += [rest] if rest else []
    if lines:
        yield lines


def has_arrived(stream: BinaryIO) -> bool:
    """Whether more can be read without waiting, or the end of the stream; where the system cannot tell, no."""
    try:
        return bool(select.select([stream], [], [], 0)[0])
    except io.UnsupportedOperation:  # it is in memory
        return True
    except (OSError, ValueError):
        return False


def translate(
    translator: Translator, lines: list[str], done: int, options: argparse.Namespace, distinct: list[int]
) -> list[str]:
    """What is written for `lines`, which follow `done` others. Adds the distinct candidates of each to `distinct`."""
    generation = values_of(options, GENERATION)
    label = f"Translating from line {done + 1:,}" if done else "Translating"
    label = label if sys.stderr.isatty() else None
    if not (options.n_best or options.mbr):
        return translator(lines, label, **generation)
    if options.mbr and options.mbr_candidates != "beams":
        generation |= SAMPLING
    if options.n_best:
        found = translator.n_best(lines, options.n_best, progress=label, **generation)
        return [f"{line}\t{one.score:.4f}\t{one.text}" for line, best in enumerate(found, done + 1) for one in best]
    segments = translator.split(lines)
    found = translator.n_best_of_pieces(segments.sources, options.mbr, progress=label, **generation)
    candidates = [[one.text for one in hypotheses] for hypotheses in found]
    distinct += [len(set(texts)) for texts in candidates]
    rated = tqdm(candidates, "Choosing the most similar", unit="sentence", disable=None, leave=False)
    return segments.join([most_similar(texts, options.mbr_utility or "chrf") for texts in rated])


def decode(line: bytes, number: int) -> str:
    """The text of line `number`, without its end; raises UserError if it is not UTF-8."""
    remedy = "convert the input, for example with iconv"
    with explaining(f"line {number} is not UTF-8", UnicodeDecodeError, remedy=remedy):
        return line.decode("utf-8-sig").rstrip("\r\n")  # without the byte order mark of Windows editors
