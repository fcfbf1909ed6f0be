"""The models of a server, one for each pair of languages."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..data.options import parse_direction
from ..errors import UserError
from ..languages import known_code
from ..loading import Translator, allow_long_translations, noted_languages, set_languages


@dataclass(frozen=True)
class Direction:
    """A model that translates from one language to another.

    Attributes:
        source, target: As the model names them, such as `eng_Latn`.
        generation: Options of `generate`.
    """

    translator: Translator
    source: str
    target: str
    generation: dict

    def translate(self, texts: list[str], alternatives: int = 0) -> list[list[str]]:
        """For each text its translations, the best first: one, and up to `alternatives` others."""
        set_languages(self.translator, self.source, self.target)
        if not alternatives:
            return [[text] for text in self.translator(texts, **self.generation)]
        n, generation = alternatives + 1, self.generation
        if beams := generation.get("num_beams"):
            generation = generation | {"num_beams": max(n, beams)}
        found = self.translator.n_best(texts, n, **generation)
        return [[one.text for one in best] or [""] for best in found]


def load_models(models: Iterable[str], generation: dict, **options) -> dict[tuple[str, str], Direction]:
    """The models by their source and target language, as codes such as ("en", "de").

    Args:
        models: Directories or Hub ids, after their languages if these are to be named: `en-de=MODEL`, or
            `en:pt-BR=MODEL` if a name has a hyphen. A model that is given for several pairs is loaded once.
        generation: Options of `generate`.
        options: Those of `Translator.from_pretrained`.

    Raises UserError if a model cannot be loaded, if its languages are unknown, or if two models translate the same
    pair; and InputError for an option that a model does not support.
    """
    found, translators = {}, {}
    for given in models:
        named, separator, model = given.partition("=")
        if not separator or Path(given).exists():
            named, model = "", given
        names = parse_direction(named, given) if named else None
        if model not in translators:
            translators[model] = Translator.from_pretrained(model, **options)
            allow_long_translations(translators[model])
        translator = translators[model]
        if not (names := names or noted_languages(model, translator.tokenizer, options.get("revision"))):
            raise UserError(f"{model} does not say which two languages it translates; name them, as in en-de={model}.")
        source, target = names
        pair = known_code(source) or source, known_code(target) or target
        if pair in found:
            raise UserError(
                f"{given} is a second model from {pair[0]} to {pair[1]}; leave one out, or name other languages."
            )
        found[pair] = Direction(translator, source, target, generation)
        try:
            set_languages(translator, source, target)
        except UserError as error:
            remedy = f"name languages as its tokenizer does, such as eng_Latn-deu_Latn={model}"
            raise UserError(f"{model} does not know {source} or {target}; {remedy}.") from error
        found[pair].translate(["a"])  # so that a wrong option raises now
    return found
