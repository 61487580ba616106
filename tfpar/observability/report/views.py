"""The views that `Plan` has methods for. What is shown is read from a `Report`."""

from __future__ import annotations

import html
import os
from typing import TYPE_CHECKING, Any

from tfpar.observability.report import explain as explaining
from tfpar.observability.report import graph
from tfpar.observability.report import summary as summarizing
from tfpar.observability.report.data.build import build_report
from tfpar.observability.report.layout_map import layout_map
from tfpar.observability.report.measured import with_measured
from tfpar.observability.report.page import render_page

if TYPE_CHECKING:
    import networkx as nx

    from tfpar.plans import Plan
    from tfpar.propagation.partitioned_graph import PartitionedGraph


__all__ = ["explain", "layout_map", "notebook", "page", "plan_graph", "report_data", "summary"]


def report_data(plan: Plan, partitioned: PartitionedGraph | None) -> dict[str, Any]:
    """`Plan.report_data`."""
    return build_report(plan, partitioned).to_builtins()


def summary(
    plan: Plan,
    partitioned: PartitionedGraph | None = None,
    full: bool = False,
    sort: str | None = None,
) -> str:
    """`Plan.summary`."""
    return summarizing.summary(build_report(plan, partitioned), full, sort)


def explain(plan: Plan, name: str, partitioned: PartitionedGraph | None = None) -> str:
    """`Plan.explain`."""
    return explaining.explain(build_report(plan, partitioned), name)


def plan_graph(plan: Plan, partitioned: PartitionedGraph | None) -> nx.DiGraph:
    """`Plan.graph`."""
    return graph.plan_graph(build_report(plan, partitioned))


def page(
    plan: Plan,
    partitioned: PartitionedGraph | None,
    timeline: str | os.PathLike[str] | None = None,
) -> str:
    """`Plan.to_html`."""
    report = build_report(plan, partitioned)
    return render_page(report if timeline is None else with_measured(report, timeline))


def notebook(plan: Plan) -> str:
    """Return a plan's summary as HTML for notebooks, in a fixed width."""
    text = html.escape(summary(plan, plan.partitioned))
    return f'<pre style="line-height: 1.2">{text}</pre>'
