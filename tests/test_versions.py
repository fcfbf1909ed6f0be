"""Versions of transformers that are not tested are named."""

import warnings

import pytest
import transformers

from vanilla_transformer.versions import warn_if_untested

REQUIREMENTS = ["torch>=2.11", "transformers<5.25,>=5.20", 'pytest>=8; extra == "test"']


@pytest.mark.parametrize("version", ["5.20.0", "5.24.3"])
def test_tested_versions_are_silent(monkeypatch, version):
    monkeypatch.setattr(transformers, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested(REQUIREMENTS)


@pytest.mark.parametrize("version", ["5.19.0", "5.25.0", "5.25.0.dev0", "6.0.0"])
def test_an_untested_version_is_named_with_the_remedy(monkeypatch, version):
    monkeypatch.setattr(transformers, "__version__", version)
    expected = (
        f"tested with transformers <5.25,>=5.20, not with {version}; .* `pip install 'transformers<5.25,>=5.20'`"
    )
    with pytest.warns(UserWarning, match=expected):
        warn_if_untested(REQUIREMENTS)
