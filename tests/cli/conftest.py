"""The folder in which commands are tried."""

from __future__ import annotations

import sys

import pytest

from tests.cli.train import SCRIPT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with `train.py` and a module that it imports, as the current one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "sizes.py").write_text("HIDDEN = 16\n")
    (tmp_path / "broken.py").write_text("import keras\n\n1 / 0\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "json.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFPAR_PLAN_CACHE", raising=False)
    yield tmp_path
    sys.modules.pop("sizes", None)
