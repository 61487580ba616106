"""Figures of the examples that open modules: they are what the modules do."""

from __future__ import annotations

import pytest

from tests.cost.test_memory import chain, peak_of
from tfpar.cost.sub_batch_cost import hidden_by_chunks


def test_half_of_what_is_waited_for_hides_behind_two_chunks():
    """Of `cost.sub_batch_cost`."""
    assert hidden_by_chunks(10e-3, 4e-3, 2, 1.0) == pytest.approx(2e-3)
    assert hidden_by_chunks(10e-3, 4e-3, 4, 1.0) == pytest.approx(3e-3)
    assert hidden_by_chunks(10e-3, 4e-3, 2, 0.2) == pytest.approx(1e-3)


def test_a_chain_of_ops_stores_two_tensors_at_once():
    """Of `cost.liveness`."""
    most = peak_of(chain("MatMul", "Relu", "MatMul"))
    assert (most.num_bytes, most.op) == (2048, "op0/MatMul")
