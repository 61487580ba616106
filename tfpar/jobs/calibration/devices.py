"""Speed of the devices of machines, and the machines whose devices are equally fast."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tfpar.cluster.description import Device
from tfpar.ir.graph import itemsize
from tfpar.jobs.calibration import fit
from tfpar.jobs.calibration.kernels import FUNCTIONS, Kernel, kernels_of
from tfpar.jobs.calibration.programs import chain_of, elementwise, product, xla_chain_of
from tfpar.jobs.calibration.timing import Chain, Timer
from tfpar.jobs.calibration.workload import ALIKE, MachineInfo, Sizes, Tell
from tfpar.spec import Mesh

_LAUNCHED = ("AddV2", "Mul")
_FEW = 8  # elements of an op of which only the start takes time
_HALF = ("bfloat16", "float16")
_ELEMENTWISE = (("AddV2", 2), ("Mul", 2), ("Sqrt", 1))  # and number of operands
_SMALL_SIDE = 32  # of a product of which only the start takes time
_SLOWER = 1.1  # than expected: less is noise


def devices_of(
    mesh: Mesh, machine: MachineInfo, timer: Timer, sizes: Sizes, reserve_s: float, tell: Tell
) -> list[Device]:
    """Measure a rank's device on each machine, while all ranks compute.

    Machines of one type share one device, with the times of the slowest rank.

    Those of machines that are alike are one device: the slowest rank's times count.

    Args:
        reserve_s: what shall be left of the budget, in seconds.
    """
    chains = _ops(mesh, sizes, machine)
    share_s = max(timer.left_s - reserve_s, 0.0) / sum(map(len, chains.values()))
    times: list[dict[str, list[float]]] = [{} for _ in range(mesh.size)]
    for what, some in chains.items():
        tell(what)
        told = [timer.by_rank(chain, share_s) for chain in some]
        for rank, own in enumerate(times):
            own[what] = [seconds[rank] for seconds in told]
    each = mesh.size // machine.nodes
    by_node = [_slowest(times[n * each : (n + 1) * each]) for n in range(machine.nodes)]
    kinds: list[list[dict[str, list[float]]]] = []
    kind_of = []
    for own in by_node:
        kind = next((k for k, some in enumerate(kinds) if _alike(own, some[0])), len(kinds))
        kinds += [[]] if kind == len(kinds) else []
        kinds[kind].append(own)
        kind_of.append(kind)
    found = [_device(_slowest(some), sizes, machine) for some in kinds]
    return [found[kind] for kind in kind_of]


def _ops(mesh: Mesh, sizes: Sizes, machine: MachineInfo) -> dict[str, list[Chain]]:
    """List the chains to time on a device, by what they measure."""
    square = (sizes.half_side,) * 3
    chains = {
        "ops": [_elementwise(mesh, op, 2, _FEW) for op in _LAUNCHED],
        "matrix products": [_products(mesh, s, "float32") for s in sizes.sides],
        "products in 16 bits": [_products(mesh, square, dtype) for dtype in _HALF],
        "memory": [
            _elementwise(mesh, op_type, operands, count, sizes.spread_bytes)
            for count in sizes.elements
            for op_type, operands in _ELEMENTWISE
        ],
        "kernels": [
            chain_of(mesh, k.emit, k.shapes, k.all_dtypes, sizes.spread_bytes)
            for k in _kernels(sizes)
        ],
        "kernels without": [
            chain_of(mesh, *k.without, "float32", sizes.spread_bytes)
            for k in _kernels(sizes)
            if k.without is not None
        ],
    }
    if machine.issues_ahead and machine.compiles is not None:
        chains["kernels of XLA"] = [xla_chain_of(mesh, _SMALL_SIDE, machine.compiles)]
    return chains


def _slowest(times: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the slowest times of several ranks or machines that run the same."""
    return {
        what: [max(each) for each in zip(*(own[what] for own in times), strict=True)]
        for what in times[0]
    }


def _alike(one: dict[str, list[float]], other: dict[str, list[float]]) -> bool:
    """Whether two machines take about as long for most ops."""
    ratios = [a / b for what in one for a, b in zip(one[what], other[what], strict=True)]
    return 1 / ALIKE <= statistics.median(ratios) <= ALIKE


def _device(times: dict[str, list[float]], sizes: Sizes, machine: MachineInfo) -> Device:
    """The device that takes so long for `_ops`."""
    issued_s = launch_s = statistics.median(times["ops"])
    dispatch_s = issued_s if machine.issues_ahead else 0.0
    moved = [
        (operands + 1) * count * itemsize("float32")
        for count in sizes.elements
        for _, operands in _ELEMENTWISE
    ]
    in_memory = fit.longer_than(dispatch_s, moved, times["memory"])
    if machine.issues_ahead:
        launch_s = min(issued_s, fit.alpha_beta(*in_memory)[0])
    products = times["matrix products"]
    timed = fit.longer_than(dispatch_s, sizes.sides, products)
    peak, half_size = fit.product_rate(*timed, launch_s)
    flops = {"float32": peak}
    whole_s = products[list(sizes.sides).index((sizes.half_side,) * 3)]
    for dtype, half_s in zip(_HALF, times["products in 16 bits"], strict=True):
        flops[dtype] = peak * max(whole_s - launch_s, 1e-9) / max(half_s - launch_s, 1e-9)
    bandwidth, ramp_s = fit.memory_rate(*in_memory, launch_s)
    functions = statistics.median(
        kernel.entries / max(seconds - launch_s, 1e-9)
        for kernel, seconds in zip(_kernels(sizes), times["kernels"], strict=True)
        if kernel.op_type in FUNCTIONS
    )
    return Device(
        flops,
        machine.memory_bytes,
        bandwidth,
        launch_s,
        half_size,
        machine.name,
        functions,
        machine.host_bandwidth,
        dispatch_s=dispatch_s,
        xla_dispatch_s=max(times.get("kernels of XLA", [0.0])),
        ramp_s=ramp_s,
        entries_per_s=_rates(times, sizes, dispatch_s, launch_s, bandwidth, ramp_s),
    )


def _rates(
    times: dict[str, list[float]],
    sizes: Sizes,
    dispatch_s: float,
    launch_s: float,
    bandwidth: float,
    ramp_s: float,
) -> dict[str, float]:
    """Compute the rates, in entries a second, of kernels that are slower than expected, by op type.

    Several kernels of a type count together.
    """
    known: dict[str, list[tuple[float, float, float, float]]] = {}
    without = iter(times["kernels without"])
    for kernel, taken_s in zip(_kernels(sizes), times["kernels"], strict=True):
        if kernel.without is None:
            running_s = launch_s + fit.add_ramp(kernel.moved_bytes / bandwidth, ramp_s)
            expected_s = max(running_s, dispatch_s)
            own_s = fit.remove_ramp(max(taken_s - launch_s, 0.0), ramp_s)
        else:
            expected_s = next(without)
            own_s = taken_s - expected_s
        known.setdefault(kernel.op_type, []).append((kernel.entries, own_s, taken_s, expected_s))
    found = {}
    for op_type, some in known.items():
        entries, own_s, taken_s, expected_s = map(math.fsum, zip(*some, strict=True))
        if taken_s > _SLOWER * expected_s:
            found[op_type] = entries / own_s
    return found


def _kernels(sizes: Sizes) -> list[Kernel]:
    return kernels_of(sizes.elements[0], 2 * sizes.half_side)


def _products(mesh: Mesh, sides: tuple[int, int, int], dtype: str) -> Chain:
    rows, depth, columns = sides
    return chain_of(mesh, product, [(rows, depth), (depth, columns)], dtype)


def _elementwise(
    mesh: Mesh, op_type: str, operands: int, count: int, spread_bytes: float = 0.0
) -> Chain:
    return chain_of(mesh, elementwise(op_type), [(count,)] * operands, "float32", spread_bytes)
