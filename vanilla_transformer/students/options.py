"""The options of `vanilla-transformer distill` that train.py does not have."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_type_hints

from ..data.options import SUFFIXES, group_parallel, parse_direction, suffix_of
from ..errors import UserError
from ..files import CONVERTED
from ..option_fields import option
from .filtering import OPTIONAL_RULES

# How a teacher translates, what the translations depend on, and what the filter does.
TRANSLATING = ("teacher", "translations", "teacher_langs", "source_prefix", "revision", "dtype", "max_tokens")
TRANSLATING += ("num_beams", "length_penalty", "max_new_tokens", "n_best", "samples")
FILTERING = ("keep", "min_score", "round_trip", "min_round_trip")


@dataclass(frozen=True)
class DistillOptions:
    """Who translates what, and how; which pairs are kept; and what the student becomes."""

    output_dir: Path = field(metadata={"help": "for the translations, the pairs, the student and the report"})
    teacher: list[str] | None = option(
        None,
        "sequence-to-sequence models: directories or Hub ids, or what `convert --to ctranslate2` wrote. Several of "
        "this package with one vocabulary are an ensemble; others translate everything one after the other",
    )
    source_file: list[str] | None = option(None, "the texts to translate, one per line, also as .gz")
    translations: list[str] | None = option(
        None,
        "instead of --teacher: files with translations of the lines of --source_file; or without --source_file, one "
        "file of pairs, or two parallel ones, that train.py reads",
    )
    train_file: list[str] | None = option(
        None,
        "pairs by people to train on too, in files that train.py reads. Where an option of train.py has one value for "
        "each file, the first is for the translations",
    )
    teacher_langs: list[str] | None = option(
        None,
        "source and target language of each multilingual teacher, or of all, as its tokenizer names them: "
        "eng_Latn-deu_Latn (default: --source_lang and --target_lang)",
    )
    source_prefix: str = option("", "put before each source for the teacher: 'translate English to German: ' for T5")
    num_beams: int | None = option(None, "beams of the teacher (default: the model's if more than 1, else 5)", ge=1)
    n_best: int = option(1, "learn from the N best translations of each line", ge=1)
    samples: int | None = option(None, "learn from N translations of each line, drawn at random", ge=1)
    length_penalty: float | None = option(None, "of the teacher: scores of beams are divided by length to this power")
    max_new_tokens: int | None = option(
        None, "of the teacher: the longest translation, in tokens (default: the model's, or else 256)", ge=1
    )
    max_tokens: int | None = option(
        None,
        "source tokens in a batch (default: 4096; 512 for scores, samples or --n_best by a model of transformers)",
        ge=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "of the teacher's weights with torch")
    revision: str | None = option(None, "the commit, branch or tag of the teachers on the Hub (default: main)")
    trust_remote_code: bool = option(False, "run the code that a teacher brings; it may do all that you may")
    keep: list[str] | None = option(
        None, f"do not filter by these rules: {', '.join(OPTIONAL_RULES)}", choices=[*OPTIONAL_RULES], metavar="RULE"
    )
    min_score: float | None = option(
        None,
        "leave out translations with a lower score, such as -1: the log-probability of a translation, divided by its "
        "length to the power of --length_penalty (by default, the mean of its tokens)",
    )
    round_trip: str | None = option(
        None, "a model of the other direction, which translates back: leave out pairs whose source it does not restore"
    )
    min_round_trip: float = option(40.0, "the lowest chrF between a source and what --round_trip restores", ge=0)
    to: list[str] | None = option(
        None, "forms of `convert` to write the student in, too; or none (default: ctranslate2 in int8, if installed)"
    )

    def __post_init__(self):
        object.__setattr__(self, "output_dir", Path(self.output_dir))
        # From Python, one value may be given as it is. A parser may have changed the types of fields, not their hints.
        for name, hint in get_type_hints(type(self)).items():
            if hint == list[str] | None and isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, [value])

    def check(self):
        """Raises UserError for options that do not go together."""
        if bool(self.teacher) == bool(self.translations):
            raise UserError("give either --teacher or its --translations.")
        if self.teacher and not self.source_file:
            raise UserError("--teacher needs --source_file, the texts to translate.")
        if self.translations and not self.source_file:
            first, *others = group_parallel(self.translations)
            if others or (isinstance(first, str) and suffix_of(first) not in SUFFIXES):
                found = f"--translations {' '.join(self.translations)} is not one file of pairs, or two parallel ones"
                raise UserError(f"{found}; give the texts that were translated as --source_file.")
        if self.translations and (given := list(filter(self.is_given, TRANSLATING[2:]))):
            raise UserError(f"--{given[0]} is for a --teacher; leave it out, since --translations are there already.")
        if self.translations and self.min_score is not None:
            raise UserError("--min_score needs a --teacher, which scores what it translates.")
        if self.samples and (given := list(filter(self.is_given, ("num_beams", "n_best", "length_penalty")))):
            raise UserError(f"--samples draws translations, without --{given[0]}; leave one of them out.")
        if self.num_beams and self.num_beams < self.n_best:
            raise UserError(f"--n_best {self.n_best} needs as many beams; raise --num_beams.")
        if self.round_trip is None and self.is_given("min_round_trip"):
            raise UserError("--min_round_trip needs --round_trip, a model that translates back.")
        if self.teacher_langs and len(self.teacher_langs) not in (1, len(self.teacher)):
            count = len(self.teacher_langs)
            raise UserError(f"--teacher_langs has {count} values; give one for each --teacher, or one for all.")
        self.check_converted()
        _ = self.directions  # or UserError

    def check_converted(self):
        """Raises UserError for an option without effect on teachers that were converted for CTranslate2."""
        converted = [name for name in self.teacher or () if Path(name, CONVERTED).is_file()]
        if converted and self.samples:
            raise UserError(f"--samples needs teachers in torch; {converted[0]} was converted for CTranslate2.")
        if converted and len(converted) == len(self.teacher):
            names = ["revision"] if self.round_trip else ["revision", "dtype"]
            if given := list(filter(self.is_given, names)):
                raise UserError(f"--{given[0]} has no effect on {converted[0]}, converted for CTranslate2; drop it.")

    def is_given(self, name: str) -> bool:
        """Whether the option has another value than by default."""
        return getattr(self, name) != self.__dataclass_fields__[name].default

    @property
    def directions(self) -> list[tuple[str, str]]:
        """The languages of `--teacher_langs`."""
        return [parse_direction(direction, "--teacher_langs") for direction in self.teacher_langs or ()]

    @property
    def needs_scores(self) -> bool:
        return self.min_score is not None

    def values(self, names: Iterable[str]) -> dict[str, object]:
        return {name: getattr(self, name) for name in names}
