"""The steps of a model, a function or a graph: planned, compiled for each batch shape, and run.

A `SharedPlan` holds the plan that they share; a `CompiledFunction` is one of them.
"""

from tfpar.tf.steps.compiled import CompiledFunction
from tfpar.tf.steps.shared_plan import SharedPlan

__all__ = ["CompiledFunction", "SharedPlan"]
