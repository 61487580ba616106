"""Terms have names, and add up."""

import itertools

import pytest

from tests.clusters import device, two_levels
from tfpar.cluster import Link
from tfpar.cost.terms import BUCKET_SIZES, PACKED_KINDS, Terms, best_buckets
from tfpar.ir import BACKWARD, FORWARD, UPDATE, When
from tfpar.spec import Mesh


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


# --- buckets --------------------------------------------------------------------------------

MB = 2**20
DEVICE = device(1e9, 4e9, 1e9, 1e9, 1e-6)


def bucketed(megabytes, backward_s=0.0, latency=0.0, overlap=1.0, scattered=0.0):
    """(busy, exposed, bucket) of so many 2**20 bytes of gradients, at 1 MB/s a ring of 2 ranks.

    Args:
        scattered: likewise, by reduce-scatters: 2 MB/s.
    """
    cluster = two_levels("b", 1, 2, DEVICE, Link(MB, latency), Link(MB, latency), overlap)
    terms = Terms(1)
    terms.pack(When.BESIDE, "reduce_scatter", (0,), scattered * MB)
    terms.pack(When.BESIDE, "all_reduce", (0,), megabytes * MB)
    buckets = best_buckets(terms, backward_s * overlap, Mesh.of([2]), cluster)
    assert buckets.after_s == 0
    return buckets.seconds, buckets.exposed_s, buckets.bucket_bytes


def test_small_buckets_where_starting_is_free():
    # 64 MB take 64 s. After 1/64 of the backward pass the first MB is on its way.
    assert bucketed(64, backward_s=32) == pytest.approx((64, 64 - 32 * 63 / 64, MB))
    # All can be hidden but the last MB.
    assert bucketed(64, backward_s=1000) == pytest.approx((64, 1, MB))


def test_large_buckets_where_starting_is_dear():
    # A start is 2 messages. One bucket of 64 MB: 200 + 64 s; 2 of 32 MB hide at most half of
    # 32 s and start twice.
    assert bucketed(64, backward_s=32, latency=100) == pytest.approx((264, 264, 64 * MB))


def test_buckets_between():
    # n buckets of 64 / n MB: 64 + 2 n - 64 (1 - 1 / n) = 2 n + 64 / n is least at n = 4 or 8
    # (24), 4 starts cost less.
    busy, exposed, bucket = bucketed(64, backward_s=64, latency=1)
    assert (busy, exposed, bucket) == pytest.approx((72, 24, 16 * MB))


def test_the_last_bucket_is_always_exposed():
    for megabytes in (0.25, 1, 3, 100, 1000):
        for latency in (0, 1e-3, 1):
            busy, exposed, bucket = bucketed(megabytes, backward_s=1e9, latency=latency)
            last = 2 * latency + min(bucket / MB, megabytes)
            assert exposed == pytest.approx(last) and exposed <= busy
            assert bucket in BUCKET_SIZES


def test_nothing_is_hidden_without_overlap():
    for megabytes in (0.25, 3, 100):
        busy, exposed, _ = bucketed(megabytes, backward_s=1e9, latency=1, overlap=0.0)
        assert exposed == busy
    assert bucketed(0, backward_s=5, overlap=0.0, scattered=6)[:2] == (3, 3)


def test_scattered_gradients_are_packed_and_hidden_as_others_are():
    # Half as many seconds as all-reduces of these bytes take, start and bytes.
    assert bucketed(0, backward_s=32, scattered=64) == pytest.approx((32, 32 - 32 * 63 / 64, MB))
    assert bucketed(0, backward_s=1000, scattered=64) == pytest.approx((32, 0.5, MB))
    assert bucketed(0, backward_s=32, scattered=64, latency=100) == pytest.approx(
        (132, 132, 64 * MB)
    )
    # Beside all-reduces they have buckets of their own, of one size.
    assert bucketed(64, backward_s=1000, scattered=64) == pytest.approx((96, 1, MB))
    assert bucketed(0)[:2] == (0, 0)


def test_collectives_of_the_update_are_packed_and_nothing_hides_them():
    cluster = two_levels("b", 1, 2, DEVICE, Link(MB, 1.0), Link(MB, 1.0), 1.0)
    terms = Terms(1)
    terms.pack(When.AFTER, "all_gather", (0,), 8 * MB)
    buckets = best_buckets(terms, 1e9, Mesh.of([2]), cluster)
    assert buckets == pytest.approx((0, 0, 1 + 4, 8 * MB, 1)), "one start"


def test_groups_of_ranks_have_buckets_of_their_own():
    cluster = two_levels("b", 1, 4, DEVICE, Link(MB, 0.5), Link(MB, 0.5), 0.0)
    terms = Terms(2)
    for axes, megabytes in (((0,), 2), ((1,), 4), ((0, 1), 8)):
        terms.pack(When.BESIDE, "all_reduce", axes, megabytes * MB)
    # Pairs: 2 rounds of half the payload; all four: 4 rounds, 1.5 times the payload.
    buckets = best_buckets(terms, 0.0, Mesh.of([2, 2]), cluster)
    assert buckets.seconds == buckets.exposed_s == pytest.approx((1 + 2) + (1 + 4) + (2 + 12))
    assert buckets.bucket_bytes == 8 * MB and buckets.num_buckets == 3, "no more starts than groups"
