"""Versions of transformers that are not tested are named."""

import warnings

import pytest
import transformers

from vanilla_transformer.versions import warn_if_untested

REQUIREMENTS = ["torch>=2.11", "transformers<5.25,>=5.20", 'pytest>=8; extra == "test"']


TESTED = dict.fromkeys(["5.20.0", "5.24.3"], True) | dict.fromkeys(["5.19.0", "5.25.0", "5.25.0.dev0", "6.0.0"], False)


@pytest.mark.parametrize("version, is_tested", TESTED.items())
def test_an_untested_version_alone_is_named_with_the_remedy(version, is_tested, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_untested(REQUIREMENTS)
    assert [warning.category for warning in caught] == [UserWarning] * (not is_tested)
    for warning in caught:
        assert f"tested with transformers <5.25,>=5.20, not with {version};" in str(warning.message)
        assert "`pip install 'transformers<5.25,>=5.20'`" in str(warning.message)
