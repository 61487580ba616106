"""Plans found before, on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os

import tfpar
from tfpar.plans import Plan, PlannedVariable
from tfpar.search.problem import Planner, Problem
from tfpar.spec import PlanError, format_spec

logger = logging.getLogger("tfpar")


@dataclasses.dataclass(frozen=True)
class PlanCache:
    """A folder with one plan file for each problem.

    A problem is the same if graph, sizes, cluster, meshes, constraints and planner are, whatever
    time the planner was given: plans of searches that were cut short are not for keeping. A file
    that cannot be read is passed over, with a line in the log.
    """

    folder: str

    def get(self, problem: Problem, planner: Planner) -> Plan | None:
        """The plan found before, or None."""
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
            for v in problem.variables
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
        # What there is to show is gathered of the model at hand, whichever has the same problem.
        kept = dataclasses.replace(plan, partitioned=None, report=None)
        kept.save(self._path(problem, planner))

    def _path(self, problem: Problem, planner: Planner) -> str:
        return os.path.join(self.folder, f"{problem_digest(problem, planner)}.json")


def problem_digest(problem: Problem, planner: Planner) -> str:
    """A hash that is equal, in every process, for equal problems and planners."""
    fields = [
        tfpar.__version__,
        planner.name,
        problem.fingerprint,
        problem.cluster.fingerprint(),
        [(t.shape, t.dtype, t in problem.batched) for t in problem.graph.inputs],
        [str(logical) for logical in problem.meshes],
        sorted((n, format_spec(f.spec)) for n, f in problem.fixed.items()),
        sorted((n, format_spec(f.spec)) for n, f in problem.tensors.items()),
        problem.state_ratio and round(problem.state_ratio, 3),
        problem.compression,
        problem.jit_compile,
        problem.recompute,
        problem.offload and dataclasses.astuple(problem.offload),
        problem.microbatches,
        problem.samples,
        problem.kept_part,
        problem.batch_statistics,
        problem.objective.memory_limit,
        problem.objective.uncertainty,
    ]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=12).hexdigest()
