"""Marks the tests of the documentation."""

from pathlib import Path


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("docs")
