"""Logical meshes that a search may choose from: their axes over the ranks, and the use of each. All
planners take their candidates from here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from tfpar.spec import Mesh, Replicate, Shard, Spec
from tfpar.spec.mesh import divisors


@dataclasses.dataclass(frozen=True)
class LogicalMesh:
    """Logical axes over the ranks.

    Attributes:
        batch_axes: the axes that split the batch.
        model_axes: the axes over which weights may be split.
        used_axes: those along which some weight has to be: else their ranks would all compute
            the same.
        expert_axes: the axes over which weights of experts are split, expert by expert.
    """

    mesh: Mesh
    batch_axes: tuple[int, ...]
    model_axes: tuple[int, ...]
    used_axes: tuple[int, ...] = ()
    expert_axes: tuple[int, ...] = ()

    def __str__(self) -> str:
        names = " and ".join(self.batch_names) or "no axis"
        return f"{self.mesh}, batch over {names}"

    @property
    def batch_names(self) -> tuple[str, ...]:
        """The names of the axes that split the batch."""
        return tuple(self.mesh.axis_names[axis] for axis in self.batch_axes)

    @property
    def batch_parts(self) -> int:
        """In how many parts the batch is split."""
        return self.mesh.group_size(self.batch_axes)

    @property
    def shared_axes(self) -> tuple[int, ...]:
        """The axes that split the batch over which weights may be split, too."""
        own = {*self.model_axes, *self.expert_axes}
        return tuple(axis for axis in self.batch_axes if axis in own)

    @property
    def model_size(self) -> int:
        """Over how many ranks weights may be split."""
        return math.prod(self.model_sizes)

    @property
    def model_sizes(self) -> tuple[int, ...]:
        """The sizes of the axes over which weights may be split."""
        return tuple(self.mesh.shape[axis] for axis in self.model_axes)

    def input_spec(self, batched: bool) -> Spec:
        """Return the spec of a step's input, `batched` or whole."""
        return input_spec(batched, self.mesh, self.batch_axes)


def logical_meshes(mesh: Mesh) -> list[LogicalMesh]:
    """List the logical meshes of a data and a model axis over the ranks; data parallelism first.

    The batch is split over the data axis, or over both: then what no weight's split asks for
    otherwise is data parallel along the model axis too (experts, a wide classifier). Last come
    those with every DeviceMesh(d1, d2) in place of the model axis, which splits weights in two dims
    (ATP §3.2).
    """
    found, in_two = [], []
    for model_size in divisors(mesh.size):
        data_size = mesh.size // model_size
        axes = Mesh(("data", "model"), (data_size, model_size))
        if model_size == 1:
            found.append(LogicalMesh(axes, (0, 1), ()))
        else:
            found += [LogicalMesh(axes, (0, 1), (1,)), LogicalMesh(axes, (0,), (1,), (1,))]
        for d2 in divisors(model_size)[1:-1]:
            axes = Mesh(("data", "d1", "d2"), (data_size, model_size // d2, d2))
            in_two.append(LogicalMesh(axes, (0,), (1, 2), (1, 2)))
    return found + in_two


def expert_meshes(mesh: Mesh, experts: int) -> list[LogicalMesh]:
    """List the logical meshes of a data, an expert and a model axis over the ranks; last those with
    every DeviceMesh(d1, d2) in place of the model axis.

    The batch is split over the data and the expert axis, whose ranks send each other what their
    experts are for. (Where no weight is split otherwise, a mesh of a data and a model axis is the
    same, with the batch over both.)
    """
    found, in_two = [], []
    for model_size in divisors(mesh.size)[1:]:
        copies = mesh.size // model_size
        for over in divisors(math.gcd(experts, copies))[1:]:
            shape = (copies // over, over)
            axes = Mesh(("data", "experts", "model"), (*shape, model_size))
            found.append(LogicalMesh(axes, (0, 1), (2,), (2,), (1,)))
            for d2 in divisors(model_size)[1:-1]:
                axes = Mesh(("data", "experts", "d1", "d2"), (*shape, model_size // d2, d2))
                in_two.append(LogicalMesh(axes, (0, 1), (2, 3), (2, 3), (1,)))
    return found + in_two


def with_expert_meshes(
    meshes: Sequence[LogicalMesh], found: Sequence[LogicalMesh]
) -> list[LogicalMesh]:
    """Add meshes with an axis for experts to the candidates, in place of those that have two axes
    for all weights and none for experts. Candidates that all split the batch in as many parts are
    those that somebody chose, and stay."""
    if not found or len({logical.batch_parts for logical in meshes}) == 1:
        return list(meshes)
    return [*(one for one in meshes if len(one.used_axes) < 2), *found]


def given_mesh(mesh: Mesh, batch_axes: Sequence[str]) -> LogicalMesh:
    """Return the mesh as it is, its axes named by constraints; weights may be split over the
    others."""
    batch = tuple(mesh.axis(n) for n in batch_axes)
    used = tuple(a for a in range(mesh.num_axes) if mesh.shape[a] > 1)
    return LogicalMesh(mesh, batch, tuple(a for a in used if a not in batch) or used)


def idle_mesh(meshes: Sequence[LogicalMesh]) -> LogicalMesh | None:
    """Return the ranks in a row that all compute the same, if `meshes` leave the mesh open."""
    if len(meshes) == 1:
        return None
    return LogicalMesh(Mesh(("model", "data"), (meshes[0].mesh.size, 1)), (), ())


def shapes(meshes: Sequence[LogicalMesh]) -> list[tuple[Mesh, tuple[int, ...] | None]]:
    """Return the distinct shapes of `meshes` for a planner that splits the batch as it sees fit,
    with the axes that split it where these are given.

    Where the mesh is open these are all ranks in a row, and every split of them in two axes
    (`finer_meshes` has those of more). What an axis is called means nothing then, so that ranks in
    a row are one shape.
    """
    if len(meshes) == 1:
        return [(meshes[0].mesh, meshes[0].batch_axes)]
    shaped: dict[tuple[int, ...], Mesh] = {}
    for mesh in (logical.mesh for logical in meshes):
        if mesh.num_axes == 2:
            shaped.setdefault(tuple(size for size in mesh.shape if size > 1), mesh)
    return [(mesh, None) for mesh in shaped.values()]


MAX_AXES = 4
"""Most axes that a planner gives a mesh."""


def finer_meshes(mesh: Mesh) -> list[Mesh]:
    """List the meshes that have one axis more than `mesh`, one of whose axes is split in two."""
    used = [size for size in mesh.shape if size > 1]
    if len(used) >= MAX_AXES:
        return []
    names = ("data", *(f"d{axis}" for axis in range(1, len(used) + 1)))
    sizes = dict.fromkeys(
        (*used[:axis], size // inner, inner, *used[axis + 1 :])
        for axis, size in enumerate(used)
        for inner in divisors(size)[1:-1]
    )
    return [Mesh(names, shape) for shape in sizes]


def finest_meshes(size: int) -> list[Mesh]:
    """List the meshes of several ranks whose axes are prime, in every order. One of them splits the
    axes of each other mesh, and what is done there can be done on it.

    Axes behind `MAX_AXES` are one, which need not be prime.
    """
    shapes = _prime_sizes(size, MAX_AXES)
    return [Mesh(tuple(f"d{axis}" for axis in range(len(shape))), shape) for shape in shapes]


def _prime_sizes(size: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write `size` as so many prime factors at most, and what is left of it."""
    if size == 1 or not count:
        yield () if size == 1 else (size,)
        return
    for prime in (n for n in divisors(size) if len(divisors(n)) == 2):
        for rest in _prime_sizes(size // prime, count - 1):
            yield (prime, *rest)


def input_spec(batched: bool, mesh: Mesh, axes: Sequence[int]) -> Spec:
    """Return the spec of a step's input: a batch is split over mesh axes `axes`, the rest is
    whole."""
    return tuple(Shard(0) if batched and a in axes else Replicate() for a in range(mesh.num_axes))
