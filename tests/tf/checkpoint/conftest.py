"""Writers of checkpoints that can be held up."""

from __future__ import annotations

import threading

import pytest

from tfpar.tf.checkpoint import writer

_WAIT_S = 60.0


@pytest.fixture
def gate(monkeypatch):
    """Nothing is written before it is opened."""
    opened, write = threading.Event(), writer.write_part

    def write_later(*arguments):
        assert opened.wait(_WAIT_S)
        write(*arguments)

    monkeypatch.setattr(writer, "write_part", write_later)
    yield opened
    opened.set()
