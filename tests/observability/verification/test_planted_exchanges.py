"""Wrong collectives and transfers are found by `verify`; right models pass, in each precision."""

from __future__ import annotations

import pytest

import tfpar as tap
from tests.cases import nightly
from tests.e2e.test_mixed_precision import policy
from tests.equivalence import without_graph_optimizers
from tests.observability.verification.layouts import LAYOUTS
from tests.observability.verification.tampering import ERRORS, tampered
from tfpar.observability.verification import Verification
from tfpar.spec import RuntimeMismatchError

POLICIES = ["float32", "mixed_bfloat16", "mixed_float16", "float64", "float16"]

WRONG_SUM = "scaled, doubled, lost, one rank scaled, first twice, maximum, dropped"
WRONG_ORDER = "reversed, first twice, lost, doubled, without last row"
PLANTED = {
    ("data", "AllReduce"): WRONG_SUM,
    ("uneven", "AllReduce"): "scaled, lost, maximum, dropped",
    ("tensor", "AllReduce"): f"{WRONG_SUM}, other axis, without last row",
    ("classes", "AllReduce"): "scaled, other axis, dropped, maximum",
    ("clipped", "AllReduce"): "scaled, doubled, first twice, other axis",
    ("convolution", "AllReduce"): "scaled, dropped",
    ("convolution", "AllGather"): WRONG_ORDER,  # rows of the neighbours
    ("attention", "AllReduce"): "scaled, dropped",
    ("sequence", "AllGather"): "reversed, without last row",
    ("sequence", "AllToAll"): "reversed, doubled",
    ("sequence", "ReduceScatter"): "doubled, neighbour's",
    ("lookup", "AllReduce"): "scaled, dropped, lost, other axis",
    ("lookup", "AllGather"): "reversed, first twice",
    ("recurrent", "AllReduce"): "scaled, dropped",
    ("recurrent", "AllGather"): "reversed, first twice",
    ("pieces", "AllGather"): WRONG_ORDER,
    ("experts", "AllGather"): "reversed, lost",
    ("experts", "ReduceScatter"): "lost, neighbour's, maximum",
    ("zero", "AllGather"): WRONG_ORDER,
    ("zero", "ReduceScatter"): "doubled, first twice, neighbour's, without last row",
    ("zero", "AllToAll"): WRONG_ORDER,
    ("outside", "Broadcast"): "scaled, doubled",
    ("stages", "Recv"): "scaled, doubled, lost, without last row",
}
EVERY = [
    (layout, kind, error)
    for (layout, kind), errors in PLANTED.items()
    for error in errors.split(", ")
]
BY_DAY = [
    ("tensor", "AllReduce", "scaled gradients", "mixed_bfloat16"),
    ("experts", "AllReduce", "scaled gradients", "mixed_bfloat16"),
    ("zero", "AllGather", "reversed", "float16"),
    ("zero", "AllToAll", "first twice", "mixed_float16"),
    ("lookup", "AllReduce", "dropped", "mixed_bfloat16"),
    ("stages", "Recv", "lost", "float32"),
]
SUMS_IN_16_BITS = [
    (layout, "AllReduce", "scaled gradients", "mixed_bfloat16")
    for layout in (*(layout for layout, kind in PLANTED if kind == "AllReduce"), "zero", "experts")
]
IN_TURN = [(*planted, POLICIES[i % len(POLICIES)]) for i, planted in enumerate(EVERY)]
BY_NIGHT = [p for p in dict.fromkeys([*SUMS_IN_16_BITS, *IN_TURN]) if p not in BY_DAY]


def verified(layout: str) -> Verification:
    with without_graph_optimizers():
        return tap.verify(LAYOUTS[layout].model(), *LAYOUTS[layout].data, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind", "error", "dtype"),
    [*BY_DAY, *(nightly(*planted) for planted in BY_NIGHT)],
)
def test_a_wrong_exchange_is_found(layout, kind, error, dtype):
    with policy(dtype), tampered(kind, ERRORS[error]) as wrong:
        try:
            report = verified(layout)
        except RuntimeMismatchError as found:  # between ranks, before anything is compared
            assert "hold different values" in str(found)
        else:
            assert not report.ok, str(report)
    assert wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("uneven", "mixed_bfloat16"),
        ("zero", "float16"),
        *(nightly(layout, dtype) for layout in LAYOUTS for dtype in POLICIES[:4]),
    ],
)
def test_right_exchanges_pass(layout, dtype):
    with policy(dtype):
        report = verified(layout)
    assert report.ok, str(report)
