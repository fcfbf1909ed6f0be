"""Warns on import if the version of transformers is not one that this package is tested with."""

import contextlib
import warnings
from importlib import metadata

import transformers
from packaging.requirements import Requirement


def warn_if_untested(requirements: list[str]):
    """Warns if transformers is outside the bounds that the `requirements` of this package set for it."""
    bounds = {one.name: one.specifier for one in map(Requirement, requirements)}
    tested = bounds["transformers"]
    if not tested.contains(transformers.__version__, prereleases=True):
        warnings.warn(
            f"vanilla-transformer is tested with transformers {tested}, not with {transformers.__version__}; if it "
            f"fails, run `pip install 'transformers{tested}'`.",
            stacklevel=2,
        )


with contextlib.suppress(metadata.PackageNotFoundError):  # a checkout that is not installed has no bounds
    warn_if_untested(metadata.requires("vanilla-transformer"))
