"""Search of the devices on which a dollar of rent computes most samples.

On given devices that is the fastest step. So a plan is searched, as ever, for each of the sets of
devices that are worth it: blocks of the mesh. Along each axis a block has coordinates that follow
each other, of devices alike a divisor of how many there are, or all devices of several kinds. Of
blocks with like devices, rent and links it is the first.

Predictions that differ by less than `UNCERTAINTY` do not tell which devices are cheaper: of these
the fastest are taken. Blocks whose compute alone, spread evenly over their devices, costs more are
not searched.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cluster.network import likeness
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.planning.inter_op.choosing import reason_of
from tfpar.planning.lower_bound import shared_seconds, single_device_seconds
from tfpar.planning.objective import UNCERTAINTY
from tfpar.planning.pipeline_search import PipelineScope, search_step
from tfpar.planning.problem import Problem
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.plans import Plan, Rental
from tfpar.spec import ArgumentError, Mesh, PlanError, ScheduleError, SpecError, TfparError
from tfpar.spec.mesh import divisors
from tfpar.spec.quantities import format_dollars


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of the mesh.

    Attributes:
        mesh: of its ranks.
        ranks: of the whole mesh.
    """

    mesh: Mesh
    ranks: tuple[int, ...]


def check_rent(cluster: Cluster, mesh: Mesh) -> None:
    """Check that the rent of each device of `mesh` is known.

    Raises:
        ArgumentError: names a device of which it is not.
    """
    for rank, device in enumerate(cluster.devices[: mesh.size]):
        if device.price_per_hour is None:
            name = f" ({device.name})" if device.name else ""
            raise ArgumentError(
                f"objective='samples_per_dollar' needs the rent of each device, but that of rank "
                f"{rank}{name} of cluster {cluster.name!r} is not known. Give dollars an "
                f"hour: Cluster.with_prices, --price, or price_per_hour in the cluster file."
            )


def attach_rental(plan: Plan, cluster: Cluster, batch_size: int | None) -> Plan:
    """Attach to a priced plan what its devices cost; unchanged where that is not known.

    Args:
        cluster: of all ranks.
        batch_size: of the step.
    """
    rental = _rental(cluster, range(plan.num_ranks), batch_size)
    if plan.cost is None or rental is None:
        return plan
    return plan.with_findings(rentals=(dataclasses.replace(rental, seconds=plan.cost.seconds),))


def search_rental(
    search: StepSearch,
    request: PlanRequest,
    mesh: Mesh,
    scope: PipelineScope,
    whole: tuple[Plan, Problem] | None = None,
) -> tuple[Plan, Problem]:
    """Search the devices on which a dollar computes most samples; return the plan for them, whose
    rentals are these and the others, and its problem.

    Args:
        request: for all ranks.
        mesh: of all ranks.
        scope: of the search for each block.
        whole: the plan for all ranks and its problem, if they are known.

    Raises:
        ArgumentError: the rent of a device or the size of the batch is not known.
        PlanError, SpecError, ScheduleError: of the largest block, where none has a plan.
        SearchInterrupted: Ctrl-C; knows the best plan so far.
    """
    found = _RentalSearch(search, request, mesh, scope)
    if whole is not None:
        found.add(_Block(mesh, tuple(range(mesh.size))), *whole)
    try:
        found.run()
    except KeyboardInterrupt:
        if not found.plans:
            raise
        plan, _ = found.best()
        raise SearchInterrupted(functools.partial(plan.with_findings, cut_short=True)) from None
    return found.best()


def compare_rentals(
    search: StepSearch,
    request: PlanRequest,
    mesh: Mesh,
    scope: PipelineScope,
    whole: tuple[Plan, Problem],
) -> tuple[Plan, Rental]:
    """Return the plan for all ranks with its rentals, and the rental on which a dollar computes
    most samples; arguments and errors as of `search_rental`."""
    plan, _ = whole
    try:
        best, _ = search_rental(search, request, mesh, scope, whole)
    except KeyboardInterrupt:
        raise SearchInterrupted(functools.partial(plan.with_findings, cut_short=True)) from None
    first = best.findings.rentals[0]
    own = next(r for r in best.findings.rentals if len(r.ranks) == mesh.size)
    others = [rental for rental in best.findings.rentals if rental is not own]
    return plan.with_findings(rentals=(own, *others)), first


class _RentalSearch:
    """A search of rentals.

    Attributes:
        plans: the plans that were found and their problems, by their ranks.
    """

    def __init__(
        self, search: StepSearch, request: PlanRequest, mesh: Mesh, scope: PipelineScope
    ) -> None:
        check_rent(request.cluster, mesh)
        if search.batch_size is None:
            raise ArgumentError(
                "objective='samples_per_dollar' needs a step that is fed a batch: of this one it "
                "is not known how many samples it computes."
            )
        self.plans: dict[tuple[int, ...], tuple[Plan, Problem]] = {}
        self._search, self._request, self._scope = search, request, scope
        self._rentals: dict[tuple[int, ...], Rental] = {}
        everyone = dataclasses.replace(request, mesh=mesh, pipeline=None, ranks=None)
        problem = search.problem(everyone)
        self._alone = single_device_seconds(problem, request.cluster, everyone.mesh.size)
        blocks = _blocks(mesh, request.cluster)
        self._blocks = sorted(blocks, key=lambda b: _order(self._bound(b.ranks)))

    def run(self) -> None:
        """Search a plan for each block that is worth it."""
        errors: dict[int, TfparError] = {}
        for block in self._blocks:
            if block.ranks in self.plans:
                continue
            least = self._bound(block.ranks).dollars_per_million
            if least > self._most_dollars():
                self._leave(block, f"its compute alone costs {format_dollars(least)}")
                continue
            try:
                self.add(block, *self._plan(block))
            except (PlanError, SpecError, ScheduleError) as error:
                errors[len(block.ranks)] = error
                self._leave(block, reason_of(error))
        if not self.plans:
            raise errors[max(errors)]

    def add(self, block: _Block, plan: Plan, problem: Problem) -> None:
        """Add the plan for a block.

        Raises:
            ArgumentError: it is not priced.
        """
        if plan.cost is None:
            raise ArgumentError(
                f"Planner {plan.planner!r} says nothing of what its plans cost, by which "
                f"objective='samples_per_dollar' compares devices. Leave it out."
            )
        self.plans[block.ranks] = plan, problem
        rental = self._bound(block.ranks)
        self._rentals[block.ranks] = dataclasses.replace(rental, seconds=plan.cost.seconds)

    def best(self) -> tuple[Plan, Problem]:
        """Return the plan for the fastest of the rentals that cost least, as near as predictions
        can tell, and its problem."""
        most = self._most_dollars()
        near = [key for key in self.plans if self._rentals[key].dollars_per_million <= most]
        best = min(near, key=lambda key: self._rentals[key].seconds)
        others = [rental for key, rental in self._rentals.items() if key != best]
        plan, problem = self.plans[best]
        rentals = (self._rentals[best], *sorted(others, key=_order))
        return plan.with_findings(rentals=rentals), problem

    def _most_dollars(self) -> float:
        """Dollars of a million samples that predictions cannot tell from the least so far."""
        known = (self._rentals[key].dollars_per_million for key in self.plans)
        return min(known, default=math.inf) * (1 + UNCERTAINTY)

    def _bound(self, ranks: Sequence[int]) -> Rental:
        """The rental of ranks that compute evenly, and wait for nothing."""
        rental = _rental(self._request.cluster, ranks, self._search.batch_size)
        assert rental is not None, "of devices whose rent is known"
        seconds = shared_seconds([self._alone[rank] for rank in ranks])
        return dataclasses.replace(rental, seconds=seconds)

    def _leave(self, block: _Block, reason: str) -> None:
        """Note why there is no plan for a block."""
        rental = self._bound(block.ranks)
        unknown = dataclasses.replace(rental, seconds=math.inf, reason=reason)
        self._rentals[block.ranks] = unknown

    def _plan(self, block: _Block) -> tuple[Plan, Problem]:
        """Search the plan for the ranks of a block."""
        request, machines = self._request, self._request.cluster.part(block.ranks)
        mesh, pipeline = block.mesh, request.pipeline
        asked = dataclasses.replace(
            request,
            mesh=mesh if pipeline is None else pipeline.stage_mesh(mesh),
            cluster=machines,
            ranks=None,
            num_ranks=mesh.size,
        )
        with request.progress.at(_devices_text(machines), apart=True):
            return search_step(self._search, asked, self._scope)


def _order(rental: Rental) -> tuple[float, float, int]:
    """The order of rentals: by price, and of equal prices the fastest."""
    return rental.dollars_per_million, rental.seconds, len(rental.ranks)


def _blocks(mesh: Mesh, cluster: Cluster) -> Iterator[_Block]:
    """Yield the blocks of `mesh` that may be rented; see the module."""
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.size)]
    devices = [(d, d.price_per_hour) for d in cluster.devices[: mesh.size]]
    runs = []
    for axis, size in enumerate(mesh.shape):
        kinds = [
            [devices[rank] for rank, at in enumerate(coordinates) if at[axis] == coordinate]
            for coordinate in range(size)
        ]
        runs.append(_runs(kinds))
    seen: set[Hashable] = set()
    for sides in itertools.product(*runs):
        ranks = tuple(
            rank
            for rank, at in enumerate(coordinates)
            if all(c in side for c, side in zip(at, sides, strict=True))
        )
        shape = tuple(map(len, sides))
        rent = tuple(devices[rank][1] for rank in ranks)
        key = shape, rent, likeness(cluster.part(ranks))
        if key not in seen:
            seen.add(key)
            yield _Block(Mesh(mesh.axis_names, shape), ranks)


def _runs(kinds: Sequence[object]) -> list[range]:
    """List the runs of coordinates that a block may have along an axis.

    Args:
        kinds: of the devices at each coordinate.
    """
    ends = [i for i in range(1, len(kinds) + 1) if i == len(kinds) or kinds[i] != kinds[i - 1]]
    starts = [0, *ends[:-1]]
    alike = [
        range(start, start + size)
        for start, end in zip(starts, ends, strict=True)
        for size in divisors(end - start)
    ]
    several = [range(starts[i], ends[j]) for i in range(len(ends)) for j in range(i + 1, len(ends))]
    return [*alike, *several]


def _rental(cluster: Cluster, ranks: Sequence[int], samples: int | None) -> Rental | None:
    """The rental of some devices, not planned yet; None where rent or samples are not known."""
    prices = [cluster.devices[rank].price_per_hour for rank in ranks]
    known = [price for price in prices if price is not None]
    if not samples or len(known) < len(prices):
        return None
    machines = cluster.part(ranks)
    return Rental(_devices_text(machines), cluster.places(ranks), math.fsum(known), samples)


def _devices_text(machines: Cluster) -> str:
    """`8 x A100-SXM4-80GB`, kind by kind, and on how many machines."""
    kinds = Counter(device.name or "unnamed" for device in machines.devices)
    count = len({*machines.machines})
    of = "1 machine" if count == 1 else f"{count} machines"
    return f"{' and '.join(f'{n} x {name}' for name, n in kinds.items())} of {of}"
