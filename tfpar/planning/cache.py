"""Cache of plans on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterator

import tfpar
from tfpar.planning.problem import ConstrainedSpec, Planner, Problem
from tfpar.planning.problem_description import (
    Description,
    describe_problem,
    diff_descriptions,
    read_description,
)
from tfpar.plans import Plan, PlannedVariable
from tfpar.readable import UnreadableError, parse_json, read_text
from tfpar.spec import PlanError, format_spec

logger = logging.getLogger("tfpar")


@dataclasses.dataclass(frozen=True)
class PlanCache:
    """A folder with one plan file for each problem.

    A problem is the same if graph, sizes, cluster, meshes, constraints and planner are, whatever
    time the planner was given: plans of searches that were cut short are not for keeping. A file
    that cannot be read is passed over, with a line in the log. Each plan is stored with the
    description of its problem (`planning.problem_description`), by which `nearest` finds what has
    changed.
    """

    folder: str

    def get(self, problem: Problem, planner: Planner) -> Plan | None:
        """Return the cached plan, or None."""
        path = self._path(problem, planner)
        if not os.path.exists(path):
            return None
        try:
            plan = Plan.load(path)
        except PlanError as error:
            logger.warning("%s It is searched anew.", error)
            return None
        # Another optimizer may have as many slots: they are this problem's.
        variables = {
            v.name: plan.variables.get(
                v.name, PlannedVariable(tuple(v.shape), v.dtype, v.trainable)
            )
            for v in problem.step.variables
        }
        return dataclasses.replace(plan, variables=variables)

    def put(self, problem: Problem, planner: Planner, plan: Plan) -> None:
        """Keep `plan`.

        Raises:
            PlanError: the folder cannot be written.
        """
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise PlanError(
                f"Cannot make the folder {self.folder!r} for plans: {error.strerror}. Name "
                f"another one, or none."
            ) from error
        path = self._path(problem, planner)
        # What there is to show is gathered of the model at hand, whichever has the same problem.
        dataclasses.replace(plan, partitioned=None, report=None).save(path)
        # Without it the plan is as good, and nothing is said of what has changed.
        with contextlib.suppress(OSError), open(_beside(path), "w", encoding="utf-8") as file:
            json.dump(describe_problem(problem, planner), file)

    def nearest(self, problem: Problem, planner: Planner) -> str:
        """Describe in a line what differs from the most similar problem that has a plan here.

            no cached plan: of 3 in plans the nearest differs by the batch (32 -> 64)

        Empty where no other problem is known.
        """
        wanted = describe_problem(problem, planner)
        found = [diff_descriptions(known, wanted) for known in self._described()]
        nearest = min(filter(None, found), key=len, default=[])
        if not nearest:
            return ""
        return (
            f"no cached plan: of {len(found)} in {self.folder} the nearest differs by "
            f"{', '.join(nearest)}"
        )

    def _described(self) -> Iterator[Description]:
        """The problems of the plans that are kept, the newest first."""
        try:
            files = [entry for entry in os.scandir(self.folder) if entry.name.endswith(PROBLEM)]
            files.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
        except OSError:
            return
        for entry in files[:MOST_COMPARED]:
            with contextlib.suppress(UnreadableError):
                known = read_description(parse_json(read_text(entry.path)))
                if known is not None:
                    yield known

    def _path(self, problem: Problem, planner: Planner) -> str:
        return os.path.join(self.folder, f"{problem_digest(problem, planner)}.json")


PROBLEM = ".problem"
"""Suffix of the files that describe problems."""

MOST_COMPARED = 100
"""With how many problems another one is compared, the newest."""


def _beside(path: str) -> str:
    """Return the path of the file that describes the problem of the plan at `path`."""
    return path.removesuffix(".json") + PROBLEM


def _sharded(given: ConstrainedSpec) -> Iterator[str]:
    """Yield what is given of a weight's slots, gathers and gradient beside its spec."""
    for name in ("slots", "gathered", "keep_gathered", "scatters_gradient"):
        said = getattr(given, name)
        if said:
            yield f"{name} {said if said is True else format_spec(said)}"


def problem_digest(problem: Problem, planner: Planner) -> str:
    """Return a hash that is equal, in every process, for equal problems and planners."""
    fields = [
        tfpar.__version__,
        planner.name,
        problem.step.fingerprint,
        problem.cluster.fingerprint(),
        [(t.shape, t.dtype, t in problem.step.batched) for t in problem.step.graph.inputs],
        [str(logical) for logical in problem.meshes],
        sorted((n, format_spec(f.spec), *_sharded(f)) for n, f in problem.given.variables.items()),
        sorted((n, format_spec(f.spec)) for n, f in problem.given.tensors.items()),
        problem.step.state_ratio and round(problem.step.state_ratio, 3),
        problem.step.compression,
        problem.step.jit_compile,
        problem.storage.recompute,
        problem.storage.attention,
        problem.storage.offload and dataclasses.astuple(problem.storage.offload),
        problem.batch.microbatches,
        problem.batch.samples,
        problem.batch.kept_part,
        problem.batch.batch_statistics,
        problem.aim.objective.memory_limit,
        problem.aim.objective.uncertainty,
    ]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=12).hexdigest()
