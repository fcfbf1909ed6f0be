"""Warns, when imported, if transformers is of a version that this package was not tried with."""

import contextlib
import warnings
from importlib import metadata

import transformers
from packaging.requirements import Requirement


def warn_if_untried(requirements: list[str]):
    """Warns if transformers is outside the bounds that the `requirements` of this package set for it."""
    bounds = {one.name: one.specifier for one in map(Requirement, requirements)}
    tried = bounds["transformers"]
    if not tried.contains(transformers.__version__, prereleases=True):
        warnings.warn(
            f"vanilla-transformer was tried with transformers {tried}, not with {transformers.__version__}; if it "
            f"fails, run `pip install 'transformers{tried}'`.",
            stacklevel=2,
        )


with contextlib.suppress(metadata.PackageNotFoundError):  # a checkout that is not installed has no bounds
    warn_if_untried(metadata.requires("vanilla-transformer"))
