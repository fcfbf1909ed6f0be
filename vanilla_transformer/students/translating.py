"""The teachers of a student: how each is loaded, and how it translates."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState

from ..errors import UserError
from ..evaluation.mbr import SAMPLING
from ..files import CONVERTED
from ..loading import Translator, allow_long_translations, load_config, load_tokenizer, set_languages
from ..training.optimization import seed_batch
from ..translation_vanilla_transformer import is_vanilla
from .options import DistillOptions

USUAL_BEAMS, BATCH, BATCH_WITH_SCORES = 5, 4096, 512  # the last two in tokens


@dataclass(frozen=True)
class Teacher:
    """A model or an ensemble that is not loaded yet, and how it translates.

    Attributes:
        names: Directories or Hub ids.
        languages: Source and target of a multilingual model.
        seed: Of samples.
    """

    names: Sequence[str]
    options: DistillOptions
    languages: tuple[str | None, str | None] = (None, None)
    seed: int = 0

    @property
    def label(self) -> str:
        """Its name in reports and messages."""
        return "+".join(self.names)

    @property
    def wants_best_alone(self) -> bool:
        """Whether one translation of each text, without a score, is enough."""
        return self.options.n_best == 1 and not self.options.samples and not self.options.needs_scores

    def open(self) -> Translator:
        """Loads it on the device of this process. Raises UserError if it cannot be loaded."""
        how = {"device": PartialState().device, "trust_remote_code": self.options.trust_remote_code}
        if Path(self.names[0], CONVERTED).is_file():
            how["backend"] = "ctranslate2"
        else:
            how |= self.options.values(("dtype", "revision")) | {"use_safetensors": None}  # or a pickle
        translator = Translator.from_pretrained(list(self.names), **how)
        engine, saved = translator.engine, translator.engine.generation_config
        usual = BATCH if is_vanilla(engine.config) or self.wants_best_alone else BATCH_WITH_SCORES
        translator.max_tokens = self.options.max_tokens or usual
        if self.options.max_new_tokens:
            saved.max_length, saved.max_new_tokens = None, self.options.max_new_tokens
        allow_long_translations(translator)
        set_languages(translator, *self.languages)
        return translator

    def search(self, translator: Translator) -> dict[str, object]:
        """The options of `generate` to translate with."""
        saved = translator.engine.generation_config
        usual = saved.num_beams if (saved.num_beams or 1) > 1 else USUAL_BEAMS
        num_beams = self.options.num_beams or max(usual, self.options.n_best)
        return {"num_beams": num_beams, "length_penalty": self.options.length_penalty}

    def translate(self, translator: Translator, texts: list[str], progress: str | None = None) -> list[str]:
        """One translation of each text; `progress` is the label of a bar."""
        return translator([self.options.source_prefix + text for text in texts], progress, **self.search(translator))

    def candidates(self, translator: Translator, texts: list[str], group: int) -> list[list[tuple[str, float | None]]]:
        """For each text of a group, the translations that a student is to learn from, each with its score, or None
        where only the best is asked for.

        A score is that of [`BaseTranslator.n_best`], averaged over the pieces in which a text is translated.
        """
        if self.wants_best_alone:
            return [[(text, None)] for text in self.translate(translator, texts)]
        sources, search = [self.options.source_prefix + text for text in texts], self.search(translator)
        if self.options.samples:
            seed_batch(self.seed, group)
            search = SAMPLING
        found = translator.n_best(sources, self.options.samples or self.options.n_best, **search)
        pieces = Counter(translator.split(sources).text_indices)
        return [
            [(one.text, one.score / max(pieces[number], 1)) for one in hypotheses]
            for number, hypotheses in enumerate(found)
        ]


def find_teachers(options: DistillOptions, languages: tuple[str | None, str | None], seed: int) -> list[Teacher]:
    """The teachers, which translate one after the other: a single ensemble if the models can be one.

    `languages` are those of multilingual teachers, unless `--teacher_langs` names others.
    """
    names, directions = options.teacher or [], options.directions
    if len(names) > 1 and are_ensemble(names, options):
        if directions and not options.round_trip:  # which may be multilingual
            raise UserError("--teacher_langs has no effect on an ensemble, whose models are bilingual; leave it out.")
        return [Teacher(names, options, languages, seed)]
    if len(directions) != len(names):
        directions = (directions or [languages]) * len(names)
    rows = enumerate(zip(names, directions, strict=True))
    return [Teacher([name], options, direction, seed + number) for number, (name, direction) in rows]


def find_back(options: DistillOptions, languages: tuple[str | None, str | None]) -> Teacher | None:
    """The model of `--round_trip`, which translates from the target language of the first teacher to its source."""
    if options.round_trip is None:
        return None
    source, target = next(iter(options.directions), languages)
    how = DistillOptions(options.output_dir, **options.values(("max_tokens", "dtype", "trust_remote_code")))
    return Teacher([options.round_trip], how, (target, source))


def are_ensemble(names: list[str], options: DistillOptions) -> bool:
    """Whether the models are of this package and have the same tokens."""
    if any(Path(name, CONVERTED).is_file() for name in names):
        return False
    if not all(is_vanilla(load_config(name, options.trust_remote_code, revision=options.revision)) for name in names):
        return False
    first, *others = (load_tokenizer(name, revision=options.revision).get_vocab() for name in names)
    return others == [first] * len(others)
