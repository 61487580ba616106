"""What is fixed before a graph is partitioned, as a value that can be saved."""

from tfpar.plans.attempts import MemoryAttempt
from tfpar.plans.from_constraints import plan_from_constraints
from tfpar.plans.keeping import keep
from tfpar.plans.offload import Offload, Offloaded
from tfpar.plans.plan import Plan
from tfpar.plans.priced import PricedPlan
from tfpar.plans.rivals import Rival
from tfpar.plans.stages import PlannedStages
from tfpar.plans.trials import Trial
from tfpar.plans.variables import Alternative, PlannedVariable

__all__ = [
    "Alternative",
    "MemoryAttempt",
    "Offload",
    "Offloaded",
    "Plan",
    "PlannedStages",
    "PlannedVariable",
    "PricedPlan",
    "Rival",
    "Trial",
    "keep",
    "plan_from_constraints",
]
