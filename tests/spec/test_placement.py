"""Placements print short, parse back, and are interned."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spec.strategies import laid_out
from tfpar.spec import (
    ArgumentError,
    Partial,
    Replicate,
    Shard,
    SpecError,
    format_spec,
    parse_placement,
    parse_spec,
    replicated_spec,
)
from tfpar.spec.placement import REDUCTIONS

placements = st.one_of(
    st.builds(
        Shard, st.integers(0, 9), st.one_of(st.none(), st.integers(1, 99)), st.integers(1, 9)
    ),
    st.just(Replicate()),
    st.sampled_from(REDUCTIONS).map(Partial),
)


@given(placements)
def test_parse_of_format_is_the_same_object(placement):
    assert parse_placement(str(placement)) is placement
    assert parse_placement(f" {placement} ") is placement


@given(laid_out(partial=True))
def test_specs_parse_back(laid):
    _, spec, _ = laid
    assert parse_spec(format_spec(spec)) == spec


@given(placements)
def test_equality_is_identity(placement):
    assert copy.copy(placement) is placement
    assert copy.deepcopy(placement) is placement
    assert pickle.loads(pickle.dumps(placement)) is placement
    with pytest.raises(AttributeError):
        placement.dim = 3


def test_how_placements_print():
    spec = (Shard(0), Shard(1, 8), Shard(2, 8, 2), Shard(0, unit=4), Replicate(), Partial("max"))
    assert format_spec(spec) == "S(0),S(1/8),S(2/8*2),S(0*4),R,P(max)"
    assert format_spec(replicated_spec(2)) == "R,R"


@pytest.mark.parametrize("text", ["", "S", "S()", "S(-1)", "S(0", "S(0)x", "R0", "P(mean)", "r"])
def test_what_is_no_placement_is_refused(text):
    with pytest.raises((ArgumentError, SpecError)):
        parse_placement(text)


def test_what_is_made_of_other_types_is_refused():
    for make, name in (
        (lambda: Shard("0"), "dim is '0'"),
        (lambda: Shard(None), "dim is None"),
        (lambda: Shard(1.0), "dim is 1.0"),
        (lambda: Shard(True), "dim is True"),
        (lambda: Shard(0, 0), "stride is 0"),
        (lambda: Shard(0, "4"), "stride is '4'"),
        (lambda: Shard(0, None, 0), "unit is 0"),
        (lambda: Partial("mean"), "op is 'mean'"),
        (lambda: Partial(["sum"]), r"op is \['sum'\]"),
    ):
        with pytest.raises(ArgumentError, match=f"{name}; it must be"):
            make()
    assert Shard(np.int64(1), np.int32(4)) is Shard(1, 4) and str(Shard(np.int64(7))) == "S(7)"


def test_strides_that_do_not_fit_are_refused():
    with pytest.raises(SpecError, match=r"S\(0/4\) does not fit a dimension of length 6"):
        Shard(0, 4).view(6)
    with pytest.raises(SpecError, match="does not fit"):
        Shard(0, 6, 4).view(6)


def test_views():
    assert Shard(0).view(12) == (1, 12, 1)
    assert Shard(0, 6).view(12) == (2, 6, 1)
    assert Shard(0, 6, 2).view(12) == (2, 3, 2)
    assert Shard(0).view(0) == (1, 0, 1)
    assert Shard(0, 6, 2).local_length(12, 2) == 2 * 2 * 2
    assert not Shard(0, 6, 2).is_even(12, 2) and Shard(0, 6, 2).is_even(12, 3)
