"""Rhino's planner (Rhino §4): the whole graph by integer linear programs and dynamic programs."""

from tfpar.search.rhino.planner import RhinoPlanner, shapes

__all__ = ["RhinoPlanner", "shapes"]
