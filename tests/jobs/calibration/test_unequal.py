"""What calibration makes of machines that differ: times are made up from a cluster, and it is found
again."""

import math

import pytest

from tfpar.cluster import TRANSFER, cluster_of, describe, link_of
from tfpar.cluster import find_measurement as found_for
from tfpar.compile.local import channels_of
from tfpar.cost import collective_seconds, transfer_seconds
from tfpar.jobs.calibration.calibrate import measure
from tfpar.jobs.calibration.kernels import kernels_of
from tfpar.jobs.calibration.links import neighbours
from tfpar.jobs.calibration.workload import ON_CPU, MachineInfo
from tfpar.spec import COLLECTIVES, Mesh

LAUNCH_S, STEP_S, START_S = 1e-6, 1e-3, 1e-3
FLOPS, MEMORY, FUNCTIONS, LINK = 1e11, 1e10, 1e9, 1e8
SUMS = MEMORY / 4 / 3  # entries a second: a third of what memory feeds
FUNCTION_TYPES = ("Exp", "Tanh", "Log", "Sigmoid")
AS_FAST_AS_MEMORY = {k.op_type for k in kernels_of(1 << 18, 512)} | {"BatchMatMulV2"}


class MadeUp:
    """A timer of machines that exist on paper only.

    Args:
        paces: how many times as long each rank takes for an op.
        links: bytes/s of each rank's machine.
    """

    step_s, left_s = STEP_S, 100.0

    def __init__(self, paces, links):
        self.paces, self.links = paces, links
        self.ranks = range(len(paces))

    def measure_step(self, empty):
        assert not empty.graph.effects

    def by_rank(self, chain, allowed_s):
        return self.whole_by_rank(chain(1), allowed_s)

    def seconds(self, chain, allowed_s):
        return max(self.by_rank(chain, allowed_s))

    def whole(self, program, allowed_s):
        return max(self.whole_by_rank(program, allowed_s))

    def whole_by_rank(self, program, allowed_s):
        times = [0.0 for _ in self.ranks]
        for op in program.graph.ops:
            for rank, seconds in enumerate(self._op(op, program.mesh)):
                times[rank] += seconds
        return times

    def _op(self, op, mesh):
        size = math.prod(op.outputs[0].shape) if op.outputs else 0
        if op.type == "MatMul":
            depth = op.inputs[0].shape[1]
            return [p * (LAUNCH_S + 2 * size * depth / FLOPS) for p in self.paces]
        if op.type in ("AddV2", "Mul", "Sqrt"):
            moved = 4 * size * (len(op.inputs) + 1)
            return [p * (LAUNCH_S + moved / MEMORY) for p in self.paces]
        if op.type == "Sum":
            return [p * (LAUNCH_S + math.prod(op.inputs[0].shape) / SUMS) for p in self.paces]
        if op.type in FUNCTION_TYPES:
            return [p * (LAUNCH_S + size / FUNCTIONS) for p in self.paces]
        if op.type in AS_FAST_AS_MEMORY:
            moved = sum(t.num_bytes for t in (*op.inputs, *op.outputs))
            return [p * (LAUNCH_S + moved / MEMORY) for p in self.paces]
        if op.type == "Send":
            pairs = [c[:2] for c in channels_of(op, self.ranks)]
            return self._ring(pairs, 4 * math.prod(op.inputs[0].shape))
        if "axes" in op.attrs:
            groups = mesh.groups(op.attrs["axes"])
            payload = max(sum(t.num_bytes for t in some) for some in (op.inputs, op.outputs))
            pairs = [(a, b) for g in groups for a in g for b in g if a != b]
            return self._ring(pairs, payload)
        return [0.0 for _ in self.ranks]

    def _ring(self, pairs, num_bytes):
        times = [0.0 for _ in self.ranks]
        for pair in pairs:
            seconds = START_S + num_bytes / min(self.links[rank] for rank in pair)
            for rank in pair:
                times[rank] = max(times[rank], seconds)
        return times


class Issued(MadeUp):
    """The same, of devices whose ops their hosts issue: chains take the longer of both."""

    dispatch_s, xla_dispatch_s = 2e-4, 3e-6

    def by_rank(self, chain, allowed_s):
        if any(op.type == "PartitionedCall" for op in chain(8).graph.ops):
            return [self.xla_dispatch_s for _ in self.ranks]
        return super().by_rank(chain, allowed_s)

    def whole_by_rank(self, program, allowed_s):
        found = super().whole_by_rank(program, allowed_s)
        computes = any(op.type in self.computing for op in program.graph.ops)
        return [max(seconds, self.dispatch_s) if computes else seconds for seconds in found]

    computing = {"MatMul", "AddV2", "Mul", "Sqrt", "Sum", *FUNCTION_TYPES, *AS_FAST_AS_MEMORY}


class Missing(MadeUp):
    """The same, of ranks that wait for each other where they compute in between."""

    wait_s = 2e-3

    def whole_by_rank(self, program, allowed_s):
        found = super().whole_by_rank(program, allowed_s)
        types = {op.type for op in program.graph.ops}
        waits = "MatMul" in types and any("axes" in op.attrs for op in program.graph.ops)
        return [seconds + self.wait_s * waits for seconds in found]


def calibrated(paces, links, timer=MadeUp, **facts):
    mesh = Mesh.of([len(paces), 1])
    machine = MachineInfo(len(paces), "CPU", 1e9, **facts)
    found = measure(mesh, machine, timer(paces, links), ON_CPU, str)
    assert cluster_of(describe(found)) == found  # its file says all of it
    return found


def test_a_slow_machine_and_a_slow_link_are_found():
    found = calibrated((1, 1, 1, 3), (LINK, LINK / 5, LINK, LINK))
    assert [device.flops["float32"] for device in found.devices] == pytest.approx(
        [FLOPS, FLOPS, FLOPS, FLOPS / 3], rel=0.05
    )
    assert found.devices[0].memory_bandwidth == pytest.approx(MEMORY, rel=0.05)
    assert found.devices[3].memory_bandwidth == pytest.approx(MEMORY / 3, rel=0.05)
    assert found.devices[3].functions_per_s == pytest.approx(FUNCTIONS / 3, rel=0.05)
    rates = [device.entries_per_s for device in found.devices]
    assert rates[0]["Sum"] == pytest.approx(SUMS, rel=0.05)
    assert rates[3]["Sum"] == pytest.approx(SUMS / 3, rel=0.05)
    assert "Tile" not in rates[0]  # as fast as memory
    assert found.devices[3].launch_s == pytest.approx(3 * LAUNCH_S, rel=0.05)
    assert [node.uplink is None for node in found.nodes] == [True, False, True, True]
    assert link_of(found, Mesh.of([4]), (0,)).bandwidth == pytest.approx(LINK / 5, rel=0.01)
    for pair, bandwidth in (((0, 2), LINK), ((2, 3), LINK), ((1, 2), LINK / 5)):
        seconds = transfer_seconds([pair], 1e7, found)
        assert seconds == pytest.approx(START_S + 1e7 / bandwidth, rel=0.05)


def test_how_long_a_host_issues_an_op_is_told_from_what_the_device_takes():
    device = calibrated((1, 1), (LINK, LINK), Issued, compiles=lambda op: True).device
    assert device.dispatch_s == pytest.approx(Issued.dispatch_s, rel=0.01)
    assert device.xla_dispatch_s == pytest.approx(Issued.xla_dispatch_s, rel=0.01)
    assert device.launch_s == pytest.approx(LAUNCH_S, abs=LAUNCH_S)
    assert device.flops["float32"] == pytest.approx(FLOPS, rel=0.05)
    assert device.memory_bandwidth == pytest.approx(MEMORY, rel=0.05)
    assert "Tile" not in device.entries_per_s


def test_an_op_of_a_device_in_host_memory_starts_when_the_one_before_has_ended():
    device = calibrated((1, 1), (LINK, LINK), host_bandwidth=math.inf).device
    assert (device.dispatch_s, device.xla_dispatch_s) == (0.0, 0.0)
    assert device.launch_s == pytest.approx(LAUNCH_S, rel=0.05)


def test_groups_of_fast_links_are_priced_apart():
    found = calibrated((1, 1, 1, 3), (LINK, LINK / 5, LINK, LINK))
    pair = Mesh.of([2])
    taken = {
        ranks: collective_seconds("all_reduce", (0,), 4e6, pair, found.part(ranks))
        for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))
    }
    assert taken[0, 1] == pytest.approx(START_S + 5 * 4e6 / LINK, rel=0.05)
    assert taken[2, 3] == pytest.approx(START_S + 4e6 / LINK, rel=0.05)
    assert taken[0, 2] == pytest.approx(taken[2, 3]) and taken[1, 3] == pytest.approx(taken[0, 1])
    # Both at once wait for the slower.
    both = collective_seconds("all_reduce", (1,), 4e6, Mesh.of([2, 2]), found)
    assert both == pytest.approx(taken[0, 1])


def test_machines_that_are_alike_are_of_one_kind():
    found = calibrated((1, 1.1, 1, 1.05), (LINK, LINK, 0.9 * LINK, LINK))
    (node,) = found.nodes
    assert (node.count, node.uplink) == (4, None)
    assert node.device.flops["float32"] == pytest.approx(FLOPS / 1.1, rel=0.01)  # the slowest
    assert not any(entry.group for entry in found.measured)
    entry = found_for(found, "all_reduce", Mesh.of([4, 1]), (0,))
    assert entry.bandwidth == pytest.approx(0.9 * LINK, rel=0.01)


def test_what_ranks_wait_between_products_is_part_of_the_startup():
    plain, waiting = (calibrated((1, 1), (LINK, LINK), timer) for timer in (MadeUp, Missing))
    assert {m.kind for m in plain.measured} == {*COLLECTIVES, TRANSFER}
    for one, other in zip(plain.measured, waiting.measured, strict=True):
        added = 0.0 if one.kind == TRANSFER else Missing.wait_s
        assert other.startup_s == pytest.approx(one.startup_s + added, abs=1e-7)
        assert other.bandwidth == one.bandwidth


@pytest.mark.parametrize("nodes", range(2, 8))
def test_each_machine_is_next_to_another(nodes):
    for first in range(2):
        rings = neighbours(nodes, first)
        assert sorted(node for ring in rings for node in ring) == [*range(nodes)]
        assert {len(ring) for ring in rings} <= {2, 3}
    if nodes > 3 and nodes % 2 == 0:
        assert neighbours(nodes, 0) != neighbours(nodes, 1)
