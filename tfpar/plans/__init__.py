"""Plan of a step, fixed before its graph is partitioned: a value that can be saved."""

from tfpar.plans.equivalence import execution_key
from tfpar.plans.findings import Candidate, Findings, Rental
from tfpar.plans.from_constraints import plan_from_constraints
from tfpar.plans.keeping import keep
from tfpar.plans.offload import Offload, OffloadPlan
from tfpar.plans.plan import Plan
from tfpar.plans.shares import (
    has_unequal_shares,
    shared_units,
    uneven_meshes,
    with_equal_shares,
)
from tfpar.plans.stages import PipelinePlan, StageLayout
from tfpar.plans.variables import PlannedVariable, SpecOption

__all__ = [
    "Candidate",
    "Findings",
    "Offload",
    "OffloadPlan",
    "PipelinePlan",
    "Plan",
    "PlannedVariable",
    "Rental",
    "SpecOption",
    "StageLayout",
    "execution_key",
    "has_unequal_shares",
    "keep",
    "plan_from_constraints",
    "shared_units",
    "uneven_meshes",
    "with_equal_shares",
]
