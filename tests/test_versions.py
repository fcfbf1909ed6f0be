"""Versions of transformers that are not tested are named."""

import warnings

import pytest
import transformers

from vanilla_transformer.versions import warn_if_untested

REQUIREMENTS = ["torch>=2.11", "transformers<5.25,>=5.20", 'pytest>=8; extra == "test"']


@pytest.mark.parametrize("version", ["5.20.0", "5.24.3"])
def test_tested_versions_are_silent(monkeypatch, version):
    monkeypatch.setattr(transformers, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_untested(REQUIREMENTS)
    assert caught == []


@pytest.mark.parametrize("version", ["5.19.0", "5.25.0", "5.25.0.dev0", "6.0.0"])
def test_an_untested_version_is_named_with_the_remedy(monkeypatch, version):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.warns(UserWarning) as caught:
        warn_if_untested(REQUIREMENTS)
    (message,) = (str(warning.message) for warning in caught)
    assert f"tested with transformers <5.25,>=5.20, not with {version};" in message
    assert "`pip install 'transformers<5.25,>=5.20'`" in message
