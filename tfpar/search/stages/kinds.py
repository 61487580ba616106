"""Plans for stages on machines that differ: one is searched for on each kind of them.

A search knows the machines of one stage. Where those of another have other devices or links,
another plan may be better there, and for the whole step: what is found on each kind is priced in
all stages, and the fastest is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cluster.network import likeness
from tfpar.plans import Plan
from tfpar.plans.alike import runs_as
from tfpar.search.problem import Problem
from tfpar.search.so_far import SearchInterrupted
from tfpar.spec import MemoryLimitError


def kinds_of_stages(cluster: Cluster, size: int, actors: int) -> dict[Cluster, int]:
    """The machines on which plans for the ranks of a stage are searched, and how many sets of ranks
    have such: of sets that are alike, the first.

    A search prices the whole model there, of which each set stores a part. So it may use the memory
    of a rank of each of them: the limits as they are would refuse plans that fit. See `fitting`.

    Args:
        size: ranks of each set.
        actors: number of sets, one behind the other.

    Raises:
        TfparError: the cluster has fewer ranks.
    """
    parts = [cluster.part(range(a * size, (a + 1) * size)) for a in range(actors)]
    memory = sum(part.device.memory_bytes for part in parts)
    first: dict[object, Cluster] = {}
    found: dict[Cluster, int] = {}
    for part in parts:
        machines = part.with_memory(memory)
        kind = first.setdefault(likeness(machines), machines)
        found[kind] = found.get(kind, 0) + 1
    return found


def worth_searching(kinds: Collection[Cluster]) -> list[Cluster]:
    """All of them, but machines that differ where each is found in other kinds: together they have
    the pace of the slowest, and what suits that is found there."""
    alone = {kind.devices[0] for kind in kinds if len(set(kind.devices)) == 1}
    return [k for k in kinds if len(set(k.devices)) == 1 or not alone.issuperset(k.devices)]


def fastest_of_kinds(
    find: Callable[[Problem], Plan],
    find_staged: Callable[[Problem], Plan],
    problem: Problem,
    kinds: Collection[Cluster],
) -> tuple[Plan, Problem]:
    """The fastest plan that is found for `problem` on any of these machines, and its problem.

    Args:
        find: finds a plan for the ranks of a stage, each once.
        find_staged: finds a plan in stages, which begins with `find`; raises a MemoryLimitError
            where none fits.

    Raises:
        MemoryLimitError: none fits, found on whichever machines.
        PlanError, ScheduleError: as of both.
        SearchInterrupted: Ctrl-C; knows the best plan so far.
    """
    found: list[tuple[Plan, Problem]] = []
    errors: list[MemoryLimitError] = []
    known: set[Hashable] = set()
    for machines in kinds:
        asked = problem.on(machines)
        try:
            if found and runs_as(find(asked)) in known:
                continue  # in stages it is what was found on other machines
            plan = find_staged(asked)
            known.add(runs_as(find(asked)))
        except MemoryLimitError as error:
            errors.append(error)
            continue
        except SearchInterrupted:
            if not found:
                raise
            best = _fastest(found)[0]
            so_far = functools.partial(dataclasses.replace, best, cut_short=True)
            raise SearchInterrupted(so_far) from None
        if plan.cost is None:
            return plan, asked
        found.append((plan, asked))
    if not found:
        raise min(errors, key=lambda error: error.needed_bytes)
    return _fastest(found)


def _fastest(found: Sequence[tuple[Plan, Problem]]) -> tuple[Plan, Problem]:
    return min(found, key=lambda one: one[0].cost.seconds if one[0].cost else math.inf)
