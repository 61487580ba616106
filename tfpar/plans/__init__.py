"""Plan of a step, fixed before its graph is partitioned: a value that can be saved."""

from tfpar.plans.attempts import MemoryAttempt
from tfpar.plans.candidates import PricedCandidate
from tfpar.plans.equivalence import execution_key
from tfpar.plans.from_constraints import plan_from_constraints
from tfpar.plans.keeping import keep
from tfpar.plans.offload import Offload, OffloadPlan
from tfpar.plans.plan import Plan
from tfpar.plans.rejected import RejectedCandidate
from tfpar.plans.stages import PipelinePlan
from tfpar.plans.trials import TrialResult
from tfpar.plans.variables import PlannedVariable, SpecOption

__all__ = [
    "MemoryAttempt",
    "Offload",
    "OffloadPlan",
    "PipelinePlan",
    "Plan",
    "PlannedVariable",
    "PricedCandidate",
    "RejectedCandidate",
    "SpecOption",
    "TrialResult",
    "execution_key",
    "keep",
    "plan_from_constraints",
]
