"""What ranks that are processes hold in common, compared."""

from __future__ import annotations

import types
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import devices
from tfpar.spec import Mesh, Replicate, RuntimeMismatchError, Shard
from tfpar.tf.interop.fingerprints import traits
from tfpar.tf.runtime.copies import PlacedVariable
from tfpar.tf.runtime.ranks import Ranks
from tfpar.tf.runtime.shared_state import SharedState, _limit
from tfpar.tf.variables.parallel_variable import ParallelVariable

MESH = Mesh.of([2])


class Other:
    """A job of two, seen from its first rank. The other one says what this one says, but for what
    `changes` make of it, one after another; what was said is kept."""

    rank = 0

    def __init__(self, *changes: Callable[[np.ndarray], np.ndarray]) -> None:
        self._changes = iter(changes)
        self.said: list[np.ndarray] = []
        self.exchange = types.SimpleNamespace(all_gather=self._all_gather)

    def _all_gather(self, own: tf.Tensor) -> list[tf.Tensor]:
        self.said.append(own.numpy())
        change = next(self._changes, lambda said: said)
        return [own, tf.constant(change(own.numpy().copy()), own.dtype)]


def placed(*spec, shape=(6, 10)) -> PlacedVariable:
    """A variable of ones; by default each of two ranks has a copy."""
    ranks = Ranks(devices(MESH))
    variable = ParallelVariable(
        shape=shape, dtype=tf.float32, name="kernel", initial_value=lambda: tf.ones(shape)
    )
    variable.shard(MESH, spec or (Replicate(),), ranks, [0, 1])
    return PlacedVariable(variable, spec or (Replicate(),), MESH, ranks)


Change = Callable[[np.ndarray], np.ndarray]


def more(what: list[float]) -> Change:
    """The other's numbers are so much larger."""
    return lambda said: said + np.asarray(what, said.dtype)


def other(*prints: int, assigned: list[float]) -> Change:
    """The other's fingerprints are so much larger, and what it says of assignments."""
    n = len(prints)

    def change(said: np.ndarray) -> np.ndarray:
        said[:n] += np.array(prints, int)
        said[n:] = (said[n:].view(float) + assigned).view(np.int64)
        return said

    return change


ANOTHER_PRINT, ONE_MORE = other(1, assigned=[0, 0, 0]), other(0, assigned=[1, 0, 0])


def test_ranks_that_agree_compare_fingerprints_alone():
    world = Other()
    SharedState([placed()], world).compare("")
    assert [message.shape for message in world.said] == [(4,)]


def test_ranks_that_differ_find_out_by_how_much(caplog):
    state = SharedState([placed()], Other(ANOTHER_PRINT, more([2e-3, 0.0])))
    state.compare("")
    assert "2.0e-03 apart" in caplog.text
    state = SharedState([placed()], Other(ANOTHER_PRINT, more([0.5, 0.0])))
    with pytest.raises(RuntimeMismatchError, match="Ranks 0 and 1 hold different.* in train.*repo"):
        state.compare("in train step 5")


def test_what_has_drifted_by_roundings_may_drift_on_but_not_jump(caplog):
    apart = [(ANOTHER_PRINT, more([by, 0.0])) for by in (9e-4, 8e-3, 7e-2, 0.9)]
    state = SharedState([placed()], Other(*(each for two in apart for each in two)))
    for turn in range(3):
        state.compare("", turn)
    with pytest.raises(RuntimeMismatchError, match="9.0e-01 apart"):
        state.compare("", 3)
    assert not caplog.text


def test_the_rank_is_named_that_has_assigned_what_differs_and_not_what_came_of_it():
    state = SharedState([placed(), placed()], Other(other(1, 1, assigned=[0, 1, 0, 0, 0, 0])))
    with pytest.raises(RuntimeMismatchError, match="Only rank 1 assigned a value to 'kernel:0' in"):
        state.compare("in train step 5")


def test_a_rank_alone_may_assign_what_is_there_anyway():
    SharedState([placed()], Other(ONE_MORE)).compare("")


@pytest.mark.parametrize(
    "by, said", [([1, 0, 0], "Only rank 1 assigned"), ([-1, 0, 0], "Only rank 0 assigned")]
)
def test_of_shards_nobody_has_a_copy_so_all_have_to_assign_alike(by, said):
    with pytest.raises(RuntimeMismatchError, match=f"{said} a value to 'kernel:0' in train step 5"):
        SharedState([placed(Shard(0))], Other(other(assigned=by))).compare("in train step 5")


def test_ranks_that_cut_other_values_into_shards_are_found():
    one = placed(Shard(0))
    one.variable.assigned = one.variable.assigned.cut(tf.ones([6, 10]))
    SharedState([one], Other(other(assigned=[0, 1e-6, 0]))).compare("")
    with pytest.raises(RuntimeMismatchError, match="Ranks 0 and 1 have given 'kernel:0' different"):
        SharedState([one], Other(other(assigned=[0, 0.1, 0]))).compare("")


def test_of_large_variables_a_part_is_looked_at_that_moves_on():
    large, small = placed(shape=(40, 64)), placed()
    world = Other()
    state = SharedState([large, small], world, budget_bytes=1000)
    for turn in range(30):
        state.compare("", turn)
    before = np.stack(world.said)[:, :2]
    next(iter(large.variable.shards.values())).assign(
        tf.tensor_scatter_nd_update(tf.ones([40, 64]), [[39, 63]], [1.5])
    )
    for turn in range(30):
        state.compare("", turn)
    after = np.stack(world.said[30:])[:, :2]
    assert (before != after).any(axis=0).tolist() == [True, False]
    assert 1 <= (before != after)[:, 0].sum() <= 3


@pytest.mark.parametrize(
    "sizes, budget, limit",
    [
        ([1000, 400], 5000, 1000),
        ([4000, 300, 300], 3000, 2400),
        ([9000, 9000, 300], 3000, 1350),
        ([9000] * 100, 3000, 256),
    ],
)
def test_small_variables_are_looked_at_whole_and_large_ones_share_the_rest(sizes, budget, limit):
    assert _limit(sizes, budget) == limit


def test_traits_tell_how_far_apart_arrays_are():
    one = np.random.default_rng(1).normal(size=(1 << 20) + 7).astype("float32")
    other = one + 0.25
    assert traits(one).size == pytest.approx(1, rel=0.01)
    apart = abs(traits(one).projection - traits(other).projection)
    assert 0.01 < apart < 0.75
    swapped = np.concatenate([one[1 << 19 : 1 << 20], one[: 1 << 19], one[1 << 20 :]])
    assert abs(traits(one).projection - traits(swapped).projection) > 0.1
