"""The soundness tests run in one process, so that the last of them sees what they covered."""

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


def pytest_itemcollected(item):
    if HERE in item.path.parents:
        item.add_marker(pytest.mark.xdist_group("rules"))
