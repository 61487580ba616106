"""Terms have names, and add up."""

import itertools

import pytest

from tfpar.cost.terms import PACKED_KINDS, Terms
from tfpar.ir import BACKWARD, FORWARD, UPDATE, When


def some(scale=1.0, num_axes=2):
    """Terms of which no two numbers are the same; all are sums of powers of two."""
    terms = Terms(num_axes)
    for phase in (FORWARD, BACKWARD, UPDATE):
        terms.compute[phase] = scale * 2.0**phase
        terms.communication[phase] = scale * 2.0 ** (3 + phase)
    terms.count, terms.activation_bytes = 64 * scale, 128 * scale
    terms.weight_bytes, terms.state_bytes = 256 * scale, 512 * scale
    for i, (when, kind, axes) in enumerate(packing(num_axes)):
        terms.pack(when, kind, axes, scale * (1024 + i))
    return terms


def packing(num_axes):
    groups = [g for n in range(1, num_axes + 1) for g in itertools.combinations(range(num_axes), n)]
    return itertools.product((When.BESIDE, When.AFTER), PACKED_KINDS, groups)


def test_no_name_stands_for_another_s_place():
    terms = some()
    assert list(terms.compute) == [1, 2, 4] and list(terms.communication) == [8, 16, 32]
    assert (terms.count, terms.activation_bytes) == (64, 128)
    assert (terms.weight_bytes, terms.state_bytes) == (256, 512)
    found = {(when, *entry) for when in (When.BESIDE, When.AFTER) for entry in terms.packed(when)}
    assert found == {(*key, 1024 + i) for i, key in enumerate(packing(2))}


def test_new_terms_are_nothing():
    terms = Terms(3)
    assert terms == Terms(3) - Terms(3) and not terms.vector.any()
    assert terms.packed(When.BESIDE) == terms.packed(When.AFTER) == []


def test_the_order_of_axes_is_that_of_the_mesh():
    terms = Terms(3)
    terms.pack(When.BESIDE, "all_reduce", (2, 0), 8)
    terms.pack(When.BESIDE, "all_reduce", (0, 2), 8)
    assert terms.packed(When.BESIDE) == [("all_reduce", (0, 2), 16)]


def test_what_ops_wait_for_is_not_packed():
    with pytest.raises(ValueError):
        Terms(1).pack(When.BETWEEN, "all_reduce", (0,), 1)
    with pytest.raises(ValueError):
        Terms(1).pack(When.BESIDE, "broadcast", (0,), 1)


def test_sums_and_differences_are_of_every_term():
    whole = some(3.0)
    assert some(1.0) + some(2.0) == whole
    assert whole - some(2.0) == some(1.0)
    terms = some(1.0)
    terms += some(2.0)
    assert terms == whole
    terms -= some(2.0)
    assert terms == some(1.0) != whole


def test_a_copy_is_its_own():
    terms = some()
    other = terms.copy()
    other.compute[FORWARD] += 1
    other.pack(When.AFTER, "all_gather", (0,), 1)
    assert terms == some() != other


def test_what_subtracting_left_over_is_nothing():
    terms = Terms(1)
    terms.compute[:] = 0.1, 0.2, -1e-17
    terms.communication[:] = 1e-18, -1e-16, 1e-9
    terms.pack(When.BESIDE, "all_gather", (0,), 1e-6)
    terms.activation_bytes = 4096
    before = terms.copy()
    found = terms.without_rounding()
    assert list(found.compute) == pytest.approx([0.1, 0.2, 0.0])
    assert list(found.communication) == pytest.approx([0, 0, 1e-9])
    assert found.packed(When.BESIDE) == [] and found.activation_bytes == 4096
    assert terms == before, "the terms are the caller's"


def test_terms_print_with_their_names():
    text = repr(some(num_axes=1))
    assert "weight_bytes=256" in text
    assert "beside=[PackedCollectives(kind='all_reduce', axes=(0,)" in text
