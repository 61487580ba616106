"""Rhino's planner (Rhino §4): the whole graph by integer linear programs and dynamic programs."""

from tfpar.planning.intra_op.rhino.planner import RhinoPlanner

__all__ = ["RhinoPlanner"]
