"""What is measured, in which order, and the description that comes of it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from tfpar.calibration import fit
from tfpar.calibration.programs import (
    Chains,
    Emit,
    collective,
    elementwise,
    operand_of,
    product,
    transfer,
)
from tfpar.calibration.timing import Chain, Timer
from tfpar.cluster.description import TRANSFER, Cluster, Device, Level, Measured
from tfpar.cluster.network import Groups
from tfpar.ir.graph import itemsize
from tfpar.propagation.reshard import COLLECTIVES
from tfpar.rewrite.local_graph import LocalProgram
from tfpar.search.meshes import logical_meshes
from tfpar.spec import Mesh

Tell = Callable[[str], object]
"""Is told what is measured next."""

Pair = tuple[str, Mesh, int]
"""A kind of collective, and the mesh axis that it runs over."""

_COMPUTE, _COLLECTIVES = 0.35, 0.9  # of the budget: where these end
_LAUNCHED = ("AddV2", "Mul")
_FEW = 8  # elements of an op of which only the start takes time
_HALF = ("bfloat16", "float16")
_ELEMENTWISE = (("AddV2", 2), ("Mul", 2), ("Sqrt", 1))  # and number of operands
_FUNCTIONS = ("Exp", "Tanh", "Log", "Sigmoid")
_SENT = (4_000, 1_000_000)  # bytes of what goes from rank to rank
_BESIDE_S = 20e-3  # what products and collectives take that run side by side


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes:
        sides: rows, depth and columns of matrix products.
        half_side: of a square product in 16 bits, and in 32 beside it.
        elements: of elementwise ops.
        payloads: of collectives, in bytes; the first two come first, where time is short.
    """

    sides: Sequence[tuple[int, int, int]]
    half_side: int
    elements: Sequence[int]
    payloads: Sequence[int]


def _square_and_thin(squares: Sequence[int], thin: int, long: int) -> list[tuple[int, int, int]]:
    found = [(n, n, n) for n in squares]
    return [*found, (thin, long, long), (long, thin, long), (long, long, thin)]


ON_CPU = Sizes(
    _square_and_thin((512, 32, 64, 128, 256), 16, 256),
    256,
    (1 << 18, 1 << 15, 1 << 20),
    (1_000, 4_000_000, 130_000, 16_000_000, 1_000_000, 16_000),
)
ON_GPU = Sizes(
    _square_and_thin((4096, 128, 512, 1024, 2048), 64, 2048),
    2048,
    (1 << 24, 1 << 20, 1 << 26),
    (1_000, 16_000_000, 300_000, 64_000_000, 2_000_000, 30_000),
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is known of the machines without measuring.

    Attributes:
        nodes: how many.
        name: of a device.
        memory_bytes: of a device.
        one_memory: see `Cluster`.
    """

    nodes: int
    name: str
    memory_bytes: float
    one_memory: bool = False


def measure(mesh: Mesh, machine: Machine, timer: Timer, sizes: Sizes, tell: Tell) -> Cluster:
    """The cluster of the ranks that `timer` runs on."""
    everyone, budget_s = Mesh.of([mesh.size]), timer.left_s
    tell("the start of a step")
    timer.measure_step(Chains(everyone).program())
    device = _device(everyone, machine, timer, sizes, (1 - _COMPUTE) * budget_s, tell)
    found = _collectives(mesh, timer, sizes, (1 - _COLLECTIVES) * budget_s, tell)
    sent: list[Measured] = []
    if not machine.one_memory:
        tell("transfers")
        sent = _transfers(machine.nodes, mesh.size, timer)
    overlap = 0.0  # where ranks are the same cores, what collectives take is not there for ops
    if found and not machine.one_memory:
        tell("overlap")
        overlap = _overlap(everyone, timer, device, found, sizes)
    levels = _levels(machine.nodes, mesh.size, found)
    return Cluster.regular(
        "calibrated",
        device,
        levels,
        len(levels) - (machine.nodes > 1),
        overlap=overlap,
        algorithms=("ring",),
        measured=(*found, *sent),
        step_s=timer.step_s,
        one_memory=machine.one_memory,
    )


# --- devices -------------------------------------------------------------------------


def _device(
    mesh: Mesh, machine: Machine, timer: Timer, sizes: Sizes, reserve_s: float, tell: Tell
) -> Device:
    """What one rank's device reaches while all compute.

    Args:
        reserve_s: what shall be left of the budget, in seconds.
    """
    tasks = len(_LAUNCHED) + len(sizes.sides) + len(_HALF) + len(_FUNCTIONS)
    tasks += len(_ELEMENTWISE) * len(sizes.elements)
    share_s = max(timer.left_s - reserve_s, 0.0) / tasks
    tell("ops")
    launch_s = statistics.median(
        timer.seconds(_elementwise(mesh, op, 2, _FEW), share_s) for op in _LAUNCHED
    )
    tell("matrix products")
    times = [timer.seconds(_products(mesh, s, "float32"), share_s) for s in sizes.sides]
    peak, half_size = fit.product_rate(sizes.sides, times, launch_s)
    flops = {"float32": peak}
    square = (sizes.half_side,) * 3
    whole_s = times[list(sizes.sides).index(square)]
    for dtype in _HALF:
        half_s = timer.seconds(_products(mesh, square, dtype), share_s)
        flops[dtype] = peak * max(whole_s - launch_s, 1e-9) / max(half_s - launch_s, 1e-9)
    tell("memory")
    moved, taken = [], []
    for count in sizes.elements:
        for op_type, operands in _ELEMENTWISE:
            moved.append((operands + 1) * count * itemsize("float32"))
            taken.append(timer.seconds(_elementwise(mesh, op_type, operands, count), share_s))
    bandwidth = fit.memory_bandwidth(moved, taken, launch_s)
    tell("exponentials")
    count = sizes.elements[0]
    functions = statistics.median(
        count / max(timer.seconds(_elementwise(mesh, op, 1, count), share_s) - launch_s, 1e-9)
        for op in _FUNCTIONS
    )
    return Device(
        flops, machine.memory_bytes, bandwidth, launch_s, half_size, machine.name, functions
    )


def _products(mesh: Mesh, sides: tuple[int, int, int], dtype: str) -> Chain:
    rows, depth, columns = sides
    return _chain(mesh, product, [(rows, depth), (depth, columns)], dtype)


def _elementwise(mesh: Mesh, op_type: str, operands: int, count: int) -> Chain:
    return _chain(mesh, elementwise(op_type), [(count,)] * operands, "float32")


def _chain(mesh: Mesh, emit: Emit, shapes: Sequence[tuple[int, ...]], dtype: str) -> Chain:
    def made(length: int) -> LocalProgram:
        chains = Chains(mesh)
        chains.add(emit, shapes, dtype, length)
        return chains.program()

    return made


# --- collectives ---------------------------------------------------------------------


def axes_to_measure(mesh: Mesh) -> list[tuple[Mesh, int]]:
    """(mesh, axis) of every group of ranks that a search on `mesh` may use, each once."""
    found: dict[Groups, tuple[Mesh, int]] = {}
    for logical in logical_meshes(mesh):
        for axis, size in enumerate(logical.mesh.shape):
            if size > 1:
                found.setdefault(logical.mesh.groups((axis,)), (logical.mesh, axis))
    return list(found.values())


def _collectives(
    mesh: Mesh, timer: Timer, sizes: Sizes, reserve_s: float, tell: Tell
) -> list[Measured]:
    """All kinds on all axes: those that time is short for have two sizes only."""
    pairs: list[Pair] = [(kind, *at) for at in axes_to_measure(mesh) for kind in COLLECTIVES]
    first, others = sizes.payloads[:2], sizes.payloads[2:]
    tasks = [(pair, n) for some in (first, others) for n in some for pair in pairs]
    times: dict[Pair, list[tuple[int, float]]] = {pair: [] for pair in pairs}
    for i, (pair, wanted) in enumerate(tasks):
        left_s = timer.left_s - reserve_s
        if left_s <= 0 and i >= len(first) * len(pairs):
            break
        kind, axes, axis = pair
        if i % len(pairs) == 0:
            tell(f"collectives of {wanted / 1e3:g} kB")
        shape, num_bytes = operand_of(kind, axes.shape[axis], wanted)
        chain = _chain(axes, collective(kind, axes, axis), [shape], "float32")
        seconds = timer.seconds(chain, max(left_s, 0.0) / (len(tasks) - i))
        times[pair].append((num_bytes, seconds))
    return [
        Measured(kind, axes.shape, axis, *fit.alpha_beta(*zip(*times[pair], strict=True)))
        for pair in pairs
        for kind, axes, axis in [pair]
    ]


def _transfers(nodes: int, size: int, timer: Timer) -> list[Measured]:
    """From rank to rank, within nodes and between them, all ranks at once."""
    grid, found = Mesh.of([nodes, size // nodes]), []
    for axis, count in enumerate(grid.shape):
        if count > 1:
            times = []
            for num_bytes in _SENT:
                chain = _chain(grid, transfer(grid, axis), [(num_bytes // 4,)], "float32")
                times.append(timer.seconds(chain, timer.left_s / (2 * grid.num_axes * len(_SENT))))
            found.append(Measured(TRANSFER, grid.shape, axis, *fit.alpha_beta(_SENT, times)))
    return found


def _overlap(
    mesh: Mesh, timer: Timer, device: Device, found: Sequence[Measured], sizes: Sizes
) -> float:
    """What goes on of products that run beside all-reduces of all ranks."""
    share_s = timer.left_s / 3
    side, payload = sizes.half_side, sizes.payloads[-2]
    whole = next(m for m in found if m.kind == "all_reduce" and m.mesh[m.axis] == mesh.size)
    reduce_s = whole.startup_s + payload / whole.bandwidth
    products = math.ceil(_BESIDE_S / (device.launch_s + 2.0 * side**3 / device.flops["float32"]))
    reduces = math.ceil(_BESIDE_S / max(reduce_s, 1e-5))
    shape, _ = operand_of("all_reduce", mesh.size, payload)

    def beside(products: int, reduces: int) -> float:
        chains = Chains(mesh)
        if products:
            chains.add(product, [(side, side)] * 2, "float32", products)
        if reduces:
            chains.add(collective("all_reduce", mesh, 0), [shape], "float32", reduces)
        return timer.whole(chains.program(), share_s)

    return fit.overlap(beside(products, 0), beside(0, reduces), beside(products, reduces))


def _levels(nodes: int, size: int, found: Sequence[Measured]) -> list[Level]:
    """Links with which rings take as long as the all-reduces did, from outside in."""
    reduces = {Mesh.of(m.mesh).groups((m.axis,)): m for m in found if m.kind == "all_reduce"}
    each = size // nodes
    grid = Mesh.of([nodes, each])
    levels = []
    for axis, count, sharing in ((0, nodes, each), (1, each, 1)):
        if count > 1:
            whole, rounds = reduces[grid.groups((axis,))], 2 * (count - 1)
            bandwidth = sharing * rounds / count * whole.bandwidth
            levels.append(Level(count, bandwidth, whole.startup_s / rounds))
    return levels
