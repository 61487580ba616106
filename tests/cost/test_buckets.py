"""What packed collectives take, against numbers counted by hand."""

import pytest

from tests.clusters import device, two_levels
from tfpar.cluster import Link
from tfpar.cost.buckets import BUCKET_SIZES, best_buckets
from tfpar.cost.terms import Terms
from tfpar.ir import When
from tfpar.spec import Mesh

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
