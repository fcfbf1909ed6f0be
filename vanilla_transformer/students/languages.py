"""The languages of a distillation: those that the options name, and those that the models note."""

from collections.abc import Sequence
from pathlib import Path

from langcodes import tag_distance

from ..data.splits import SPLITS, load_split
from ..errors import UserError
from ..files import CONVERTED
from ..languages import known_code
from ..loading import is_multilingual, load_config, load_tokenizer, noted_languages
from ..training.recipe import Options
from .options import DistillOptions
from .steps import PAIRS
from .training import training_words

ALIKE = 10  # the distance of languages, by langcodes, up to which they are one, such as nb and no
NAMING = ("source_lang", "target_lang", "source_column", "target_column", "train_file_langs")  # options of train.py


def with_languages(
    options: DistillOptions, rest: Sequence[str], words: list[str], asked: Options
) -> tuple[list[str], Options]:
    """What [`training_words`] gave, with the languages that the teachers note if no option names languages.

    Raises UserError as [`find_languages`] does.
    """
    found = find_languages(options, asked)
    if not found or any(getattr(asked.data, name) for name in NAMING):
        return words, asked
    more, named = training_words(options, [*rest, "--source_lang", found[0], "--target_lang", found[1]])
    try:
        for split in SPLITS:
            for name in named.data.files(split):
                files = [name] if isinstance(name, str) else [*name]
                if Path(files[0]).parent != options.output_dir / PAIRS:
                    load_split(named.data, split, files)
    except UserError:  # the columns of this file have other names
        return words, asked
    return more, named


def find_languages(options: DistillOptions, asked: Options) -> tuple[str, str] | None:
    """The codes of the languages that the teacher translates, if they are known.

    Opens the config and the tokenizer of each model before anything is translated. Raises UserError if one is missing,
    or if the languages of the models or of the options differ.
    """
    tokenizers = {name: open_tokenizer(name, options, options.revision) for name in options.teacher or ()}
    if options.teacher_langs and not options.round_trip and not any(map(is_multilingual, tokenizers.values())):
        raise UserError(f"--teacher_langs has no effect on {options.teacher[0]}, which is bilingual; leave it out.")
    pairs = {"--source_lang and --target_lang": (asked.data.source_lang, asked.data.target_lang)}
    pairs |= {name: noted_languages(name, one, options.revision) for name, one in tokenizers.items()}
    if name := options.round_trip:
        back = noted_languages(name, open_tokenizer(name, options), None)
        pairs[f"--round_trip {name}, backwards,"] = back and back[::-1]
    pairs = {who: pair for who, pair in pairs.items() if pair and all(map(known_code, pair))}
    for who, pair in pairs.items():
        first, expected = next(iter(pairs.items()))
        if differ(pair, expected):
            found = f"{first} {'are' if first.startswith('--s') else 'is'} for {' to '.join(expected)}"
            raise UserError(f"{found}, but {who} for {' to '.join(pair)}; give those of the same languages.")
    taught = [*options.directions, *(pairs[name] for name in tokenizers if name in pairs)]
    codes = [known_code(name) for name in taught[0]] if taught else [None]
    return (codes[0], codes[1]) if all(codes) else None


def open_tokenizer(name: str, options: DistillOptions, revision: str | None = None):
    """The tokenizer of a model whose config can be read. Raises UserError if either is missing."""
    if not Path(name, CONVERTED).is_file():
        load_config(name, options.trust_remote_code, revision=revision)
    return load_tokenizer(name, trust_remote_code=options.trust_remote_code, revision=revision)


def differ(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether source or target languages differ. Three-letter codes are ignored, since they may name families."""
    sides = [[known_code(name) for name in side] for side in zip(one, other, strict=True)]
    pairs = [side for side in sides if all(len(code) == 2 for code in side)]
    return any(tag_distance(*pair) > ALIKE for pair in pairs)
