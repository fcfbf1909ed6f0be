"""The teachers of a student: how each is loaded, and how it translates."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accelerate import PartialState

from ..errors import UserError
from ..evaluation.mbr import SAMPLING
from ..files import CONVERTED
from ..loading import Translator, load_config, load_tokenizer, set_languages
from ..training.optimization import seed_batch
from ..translation_vanilla_transformer import is_vanilla
from .options import DistillOptions

USUAL_BEAMS, LONGEST, BATCH, BATCH_WITH_SCORES = 5, 256, 4096, 512  # the last three in tokens


@dataclass(frozen=True)
class Teacher:
    """One model or an ensemble, not loaded yet; and how it translates.

    Attributes:
        names: Directories or Hub ids.
        languages: Source and target of a multilingual model.
        options: Those of the search and of loading.
        seed: Of samples.
    """

    names: Sequence[str]
    languages: tuple[str | None, str | None]
    options: DistillOptions
    seed: int = 0

    @property
    def label(self) -> str:
        """How reports and messages refer to it."""
        return "+".join(self.names)

    def open(self) -> Translator:
        """Loads it on the device of this process. Raises UserError if it cannot be loaded."""
        options = self.options
        how = {"device": PartialState().device, "trust_remote_code": options.trust_remote_code}
        if Path(self.names[0], CONVERTED).is_file():
            how["backend"] = "ctranslate2"
        else:
            how |= {"use_safetensors": None, "dtype": options.dtype, "revision": options.revision}  # None: or a pickle
        translator = Translator.from_pretrained(list(self.names), **how)
        keeps_scores = options.n_best > 1 or options.samples or options.needs_scores
        batch = BATCH_WITH_SCORES if keeps_scores and not is_vanilla(translator.engine.config) else BATCH
        translator.max_tokens = options.max_tokens or batch
        saved = translator.engine.generation_config
        is_limited = saved.max_length or saved.max_new_tokens or is_vanilla(translator.engine.config)
        if options.max_new_tokens or not is_limited:  # transformers would stop after 20 tokens
            saved.max_length, saved.max_new_tokens = None, options.max_new_tokens or LONGEST
        set_languages(translator, *self.languages)
        return translator

    def load(self) -> Callable[[list[str], int], list]:
        """Loads it, for [`translate_groups`]."""
        return partial(self.candidates, self.open())

    def search(self, translator: Translator) -> dict[str, object]:
        """The options of `generate` to translate with."""
        options, saved = self.options, translator.engine.generation_config
        usual = saved.num_beams if (saved.num_beams or 1) > 1 else USUAL_BEAMS
        beams = options.num_beams or max(usual, options.n_best)
        return {"num_beams": beams, "length_penalty": options.length_penalty}

    def translate(self, translator: Translator, texts: list[str], progress: str | None = None) -> list[str]:
        """One translation of each text."""
        return translator([self.options.source_prefix + text for text in texts], progress, **self.search(translator))

    def candidates(self, translator: Translator, texts: list[str], group: int) -> list[list[tuple[str, float | None]]]:
        """The translations of each text from which a student is to learn, and their scores, if they are needed.

        The score is the mean log-probability of a token, averaged over the pieces in which a text is translated.
        """
        options = self.options
        if not (options.samples or options.n_best > 1 or options.needs_scores):
            return [[(text, None)] for text in self.translate(translator, texts)]
        sources, search = [options.source_prefix + text for text in texts], self.search(translator)
        if options.samples:
            seed_batch(self.seed, group)
            search = SAMPLING
        found = translator.n_best(sources, options.samples or options.n_best, **search)
        pieces = Counter(translator.split(sources).text_indices)
        return [
            [(one.text, one.score / max(pieces[number], 1)) for one in hypotheses]
            for number, hypotheses in enumerate(found)
        ]


def find_teachers(options: DistillOptions, languages: tuple[str | None, str | None], seed: int) -> list[Teacher]:
    """The teachers that translate one after the other: an ensemble, if they can be one, or else each by itself.

    `languages` are those of multilingual teachers, unless `--teacher_langs` names others.
    """
    names, directions = options.teacher or [], options.directions
    if len(names) > 1 and are_ensemble(names, options):
        if directions and not options.round_trip:  # which may be multilingual
            raise UserError("--teacher_langs has no effect on an ensemble, whose models are bilingual; leave it out.")
        return [Teacher(names, languages, options, seed)]
    directions = directions if len(directions) == len(names) else (directions or [languages]) * len(names)
    rows = enumerate(zip(names, directions, strict=True))
    return [Teacher([name], direction, options, seed + number) for number, (name, direction) in rows]


def find_back(options: DistillOptions, languages: tuple[str | None, str | None]) -> Teacher | None:
    """The model of `--round_trip`, which translates in the other direction than the first teacher."""
    if options.round_trip is None:
        return None
    source, target = next(iter(options.directions), languages)
    kept = options.values("output_dir max_tokens dtype trust_remote_code")
    return Teacher([options.round_trip], (target, source), DistillOptions(**kept))


def are_ensemble(names: list[str], options: DistillOptions) -> bool:
    """Whether the models are of this package and have the same tokens."""
    if any(Path(name, CONVERTED).is_file() for name in names):
        return False
    where = {"revision": options.revision} if options.revision else {}
    if not all(is_vanilla(load_config(name, **where)) for name in names):
        return False
    first, *others = (load_tokenizer(name, **where).get_vocab() for name in names)
    return all(other == first for other in others)
