"""`Views`: what shows plans, as plans know it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from tfpar.propagation.partitioned_graph import PartitionedGraph

if TYPE_CHECKING:
    import networkx as nx
    from keras.distribution import LayoutMap

    from tfpar.plans.plan import Plan


class Views(Protocol):
    """The functions of `observability.report.views`."""

    def report_data(
        self, plan: Plan, partitioned: PartitionedGraph | None, /
    ) -> dict[str, Any]: ...

    def summary(
        self, plan: Plan, partitioned: PartitionedGraph | None, full: bool, sort: str | None, /
    ) -> str: ...

    def explain(self, plan: Plan, name: str, partitioned: PartitionedGraph | None, /) -> str: ...

    def plan_graph(self, plan: Plan, partitioned: PartitionedGraph | None, /) -> nx.DiGraph: ...

    def notebook(self, plan: Plan, /) -> str: ...

    def page(
        self,
        plan: Plan,
        partitioned: PartitionedGraph | None,
        timeline: str | os.PathLike[str] | None,
        /,
    ) -> str: ...

    def layout_map(
        self, plan: Plan, partitioned: PartitionedGraph | None, device_mesh: Any, /
    ) -> LayoutMap: ...
