"""The views that `Plan` has methods for: text, of one variable or layer, a graph, a layout map."""

from tfpar.report.explain import explain
from tfpar.report.graph import plan_graph
from tfpar.report.layout_map import layout_map
from tfpar.report.summary import summary

__all__ = ["explain", "layout_map", "plan_graph", "summary"]
