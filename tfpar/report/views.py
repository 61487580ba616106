"""The views that `Plan` has methods for: as text, of one variable or layer, as a graph."""

from tfpar.report.explain import explain
from tfpar.report.graph import plan_graph
from tfpar.report.summary import summary

__all__ = ["explain", "plan_graph", "summary"]
