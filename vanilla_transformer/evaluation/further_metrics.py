"""Further metrics: modules of the evaluate library, named by the user."""

import json
from collections.abc import Iterable
from functools import cached_property
from numbers import Real
from pathlib import Path

from ..errors import UserError, explaining

OURS = ("loss", "bleu", "chrf", "exact_match", "word_error_rate")  # measured in every evaluation
TAKEN = ("bleu_signature", "chrf_signature", "samples")  # other keys of results
LOWER_IS_BETTER = {"loss", "error", "errors", "distance", "edit", "edits", "wer", "cer", "mer", "wil", "ter"}
LOWER_IS_BETTER |= {"charcut", "perplexity", "perplexities"}


def not_measured(option: str, choice: Iterable[str]) -> UserError:
    """The error for an option, with its value, that names none of the numbers in `choice`."""
    return UserError(f"{option} is not measured; choose one of {', '.join(choice)}, or add its module to --metrics.")


class Metrics:
    """Modules of the evaluate library, whose numbers stand beside BLEU and chrF.

    Args:
        names: For each module, its id on the Hub, such as `rouge`, or the path of a script. Loading it runs its code.
        kwargs: Arguments of their `compute`, as `KEY=VALUE` or, with several modules, `MODULE.KEY=VALUE`.

    Raises:
        UserError: One of `kwargs` is not of that form, or names no module.
    """

    def __init__(self, names: list[str] | None = None, kwargs: list[str] | None = None):
        self.names = list(names or ())
        self.kwargs: dict[str, dict] = {name: {} for name in self.names}
        for given in kwargs or ():
            key, is_given, value = given.partition("=")
            module, _, own_key = key.rpartition(".")
            chosen = [name for name in self.names if not module or module in (name, Path(name).stem)]
            if not (is_given and own_key) or len(chosen) != 1:
                raise UserError(
                    f"--metric_kwargs has {given}; give KEY=VALUE, or MODULE.KEY=VALUE with one of the modules of "
                    f"--metrics: {', '.join(Path(name).stem for name in self.names) or 'none is given'}."
                )
            self.kwargs[chosen[0]][own_key] = parse_value(value)
        self.module_of: dict[str, str] = {}  # by the name of a number

    @cached_property
    def modules(self) -> dict:
        """The modules by name, loaded on first use. Raises UserError if one cannot be."""
        if not self.names:
            return {}
        import evaluate  # takes seconds

        modules = {}
        for name in self.names:
            what = f"--metrics {name} cannot be loaded"
            # In memory, so that no other run is met in a file. A module that lacks a package raises ImportError.
            with explaining(
                what, OSError, ImportError, ValueError, TypeError, remedy="give an id such as rouge or a path"
            ):
                modules[name] = evaluate.load(name, keep_in_memory=True)
        return modules

    def load(self, references: list[str | list[str]], sources: list[str] | None) -> list[str]:
        """Loads the modules, and tries them on two texts, one of which has the most references; returns the names of
        their numbers.

        So an error comes before a model is trained, or has translated.

        Raises:
            UserError: A module cannot be loaded, does not take one of the arguments, needs sources that are not there,
                takes one reference where texts have several, or returns no number.
            RuntimeError: A module failed.
        """
        if not self.names:
            return []
        most = max(range(len(references)), key=lambda index: len(as_list(references[index])))
        tried = [references[0], references[most]]
        return list(self.score([as_list(one)[0] for one in tried], tried, sources and [sources[0], sources[most]]))

    def score(
        self, hypotheses: list[str], references: list[str | list[str]], sources: list[str] | None
    ) -> dict[str, float]:
        """The numbers of all modules. A number gets the name of its module in front if another number already has its
        own, or if its own name hides that lower is better.

        A list of numbers, one for each text, becomes their mean.

        Raises:
            RuntimeError: A module failed.
        """
        found = {}
        for name, module in self.modules.items():
            inputs = {"predictions": hypotheses, "references": references, "sources": sources}
            inputs = {key: inputs.get(key) for key in input_names(module)}
            if missing := [key for key, texts in inputs.items() if texts is None]:
                raise UserError(
                    f"--metrics {name} needs {' and '.join(missing)}, and there are translations and references only."
                )
            if "references" in inputs:
                inputs["references"] = self.fit_references(name, module, references)
            try:
                numbers = module.compute(**inputs, **self.kwargs[name])
            except Exception as error:
                if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
                    raise UserError(f"--metric_kwargs does not fit --metrics {name}: {error}.") from error
                raise RuntimeError(f"--metrics {name} failed; --metric_kwargs has its arguments.") from error
            stem = Path(name).stem
            numbers = numbers if isinstance(numbers, dict) else {stem: numbers}  # wer and cer return a number
            numbers = {key: number for key, value in numbers.items() if (number := as_number(value)) is not None}
            if not numbers:
                raise UserError(f"--metrics {name} returns no number; leave it out.")
            for key, number in numbers.items():
                is_taken = key in found or key in (*OURS, *TAKEN)
                # The `score` of ter tells by its name alone neither what it is nor that lower is better.
                own = f"{stem}_{key}" if is_taken or greater_by_name(key) > greater_by_name(stem) else key
                found[own], self.module_of[own] = number, name
        return found

    def fit_references(self, name: str, module, references: list[str | list[str]]) -> list:
        """The references as the module takes them: a text for each hypothesis, or a list of texts.

        Raises UserError if there are several and it takes one.
        """
        formats = module.features if isinstance(module.features, list) else [module.features]
        takes_text = [getattr(one["references"], "dtype", None) == "string" for one in formats]
        rows = list(map(as_list, references))
        if max(map(len, rows), default=1) == 1:
            return [row[0] for row in rows] if any(takes_text) else rows
        if all(takes_text):
            raise UserError(f"--metrics {name} takes one reference of a text, and there are several; leave it out.")
        return rows

    def describe(self) -> dict[str, dict]:
        """For each number, its `module`, an id or the name of a file, and the `arguments` of that module."""
        return {
            number: {"module": Path(name).name if Path(name).exists() else name, "arguments": self.kwargs[name]}
            for number, name in self.module_of.items()
        }


def as_list(references: str | list[str]) -> list[str]:
    """The references of a text, of which one may be given alone."""
    return [references] if isinstance(references, str) else list(references)


def input_names(module) -> list[str]:
    """The inputs that a module of evaluate reads, such as `predictions` and `references`."""
    features = module.features[0] if isinstance(module.features, list) else module.features
    return list(features)


def parse_value(text: str):
    """A value in JSON, such as true or 0.5; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def as_number(value) -> float | None:
    """A number, or the mean of a list of numbers; None for anything else."""
    if hasattr(value, "tolist"):  # of NumPy or torch
        value = value.tolist()
    if isinstance(value, list) and value and all(isinstance(one, Real) for one in value):
        value = sum(value) / len(value)
    return None if isinstance(value, bool) or not isinstance(value, Real) else float(value)


def deciding_metric(scores: list[dict], by: str, prefix: str = "") -> str:
    """The metric that chooses among `scores` if `by` is asked for: chrF instead of BLEU if BLEU is 0 where chrF is
    highest, as for right translations of fewer than four words. `prefix` is that of the names in `scores`."""
    is_zero = by == "bleu" and scores and not max(scores, key=lambda one: one[f"{prefix}chrf"])[f"{prefix}bleu"]
    return "chrf" if is_zero else by


def greater_by_name(metric: str) -> bool:
    """Whether higher values of a metric are better, by the words in its name: not of losses, errors and distances."""
    return not LOWER_IS_BETTER & set(metric.lower().split("_"))
