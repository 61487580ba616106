"""Plan: what is fixed before a graph is partitioned, as a value that can be saved.

A plan names the mesh, the axes that split the batch, and the specs of variables and border
tensors; `anchors()` is what propagation reads of it. The file is small JSON, one line
per variable, and is checked against graph and mesh before it is used.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tfpar
from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.ir.graph import Gradient, Graph
from tfpar.ir.step import ModelLayer
from tfpar.pipeline import Pipeline
from tfpar.pipeline.statistics import BatchStatisticsOf
from tfpar.plans.attention import AttentionMode
from tfpar.plans.checks import check_plan
from tfpar.plans.difference import difference
from tfpar.plans.findings import Bound, Findings
from tfpar.plans.model_match import match_to_graph
from tfpar.plans.offload import OffloadPlan
from tfpar.plans.stages import PipelinePlan, StageLayout
from tfpar.plans.text import fields_of, read_plan_file, text_of
from tfpar.plans.variables import PlannedVariable
from tfpar.plans.views import Views
from tfpar.propagation.partitioned_graph import Anchors, OpPlan, PartitionedGraph
from tfpar.spec import (
    Mesh,
    PlanError,
    Shard,
    Spec,
    TfparError,
    arguments,
)
from tfpar.writable import write_whole

if TYPE_CHECKING:
    import networkx as nx
    from keras.distribution import DeviceMesh, LayoutMap


def _views() -> Views:
    """Import the views that show plans. It reads them: a plan is a value that knows nothing of how
    it is shown, and its methods look the views up when the first is asked for. Nothing else here
    may import them (`tests/test_imports.py`)."""
    from tfpar.observability.report import views

    return views


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Plan by which a program is partitioned.

    Attributes:
        mesh: of all ranks; of a pipeline, those of one stage.
        batch_axes: names of the mesh axes that split the batch; a rank along another one is given
            all of it.
        variables: by path; all variables of the graph.
        tensors: specs of border tensors, by tensor name.
        constraints: what the plan was made from, as text.
        fingerprint: of the graph; see `ir.fingerprint`.
        tfpar_version: the version that made it.
        planner: the name of the planner that made it; empty for a plan from constraints alone.
        cluster: the machines it was made for; None where nothing was priced.
        recompute: the blocks that are computed again in the backward pass, by name; see
            `planning.memory.recompute`.
        attention: how attentions run: `"whole"`, as the model says, or `"blockwise"`, on blocks of
            their scores, which the backward pass computes again (`ir.attention`).
        offloaded: slots and activations in the memory of hosts between their uses.
        shares: of a mesh axis whose ranks have unequal shares of the batch: how many samples each
            coordinate gets of those that were planned for, in all stages that have the plan's
            layout; batches of other sizes are shared out in proportion (`plans.shares`).
        chunks: how many pieces a rank computes its part of a training batch in.
        microbatches: in how many pieces it computes that part whose activations are not stored at
            the same time; their gradients are added up.
        batch_statistics: `"microbatch"`: batch normalisation takes those of one such piece, of all
            ranks; see `pipeline.Pipeline`.
        stages: of a pipeline of several stages; None: there is one.
        ops: how ops run that would not run so by themselves, by name.
        findings: what was learnt about it, its cost first: none of that changes what runs.
        partitioned: what propagation made of it, once known; not saved.
        layers: of the model, itself the first, once known; not saved.
        report: what there is to show of it, as JSON, where that was saved; see `report_data`.

    Raises:
        PlanError: a spec that does not fit the mesh or its variable.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    variables: Mapping[str, PlannedVariable]
    tensors: Mapping[str, Spec]
    constraints: tuple[str, ...]
    fingerprint: str
    tfpar_version: str = tfpar.__version__
    planner: str = ""
    cluster: Cluster | None = None
    recompute: tuple[str, ...] = ()
    attention: AttentionMode = "whole"
    offloaded: OffloadPlan = OffloadPlan()
    shares: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    chunks: int = 1
    microbatches: int = 1
    batch_statistics: BatchStatisticsOf = "exact"
    stages: PipelinePlan | None = None
    ops: Mapping[str, OpPlan] = dataclasses.field(default_factory=dict)
    findings: Findings = Findings()
    partitioned: PartitionedGraph | None = dataclasses.field(default=None, compare=False)
    layers: tuple[ModelLayer, ...] = dataclasses.field(default=(), compare=False)
    report: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_plan(self)

    def __repr__(self) -> str:
        fixed = sum(v.spec is not None for v in self.variables.values())
        return f"<Plan on {self.mesh}: {fixed} of {len(self.variables)} variables fixed>"

    @property
    def cost(self) -> Cost | None:
        """Cost of a step on the plan's cluster; None where nothing was priced."""
        return self.findings.cost

    @property
    def bound(self) -> Bound | None:
        """Distance of the plan from the best one, at most, as predicted; see
        `Findings.bound_s`. None where nothing was priced."""
        seconds, cost = self.findings.bound_s, self.cost
        if not seconds or cost is None:
            return None
        return Bound(seconds, max(0.0, cost.seconds / seconds - 1))

    @property
    def corrected_cluster(self) -> Cluster | None:
        """The plan's cluster as trials corrected it; None: nothing was measured.

        `tfpar.cluster.write_cluster` saves it, for `cluster=` of later plans.
        """
        correction = self.findings.correction
        if correction is None or self.cluster is None:
            return None
        return correction.apply(self.cluster)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the mesh, or in all actors of a pipeline together."""
        return self.mesh.size if self.stages is None else sum(self.stages.sizes(self.mesh.size))

    @property
    def whole_mesh(self) -> Mesh:
        """Mesh of all ranks, on which those of each actor follow those of the one before. Where
        their numbers differ, all are along its first axis."""
        first, *rest = self.mesh.shape
        if len({*self.meshes}) > 1:
            return Mesh(self.mesh.axis_names, (self.num_ranks, *(1 for _ in rest)))
        return Mesh(self.mesh.axis_names, (first * self.num_ranks // self.mesh.size, *rest))

    def fits(self, memory_bytes: float) -> bool:
        """Whether a priced plan fits: each stage into its own devices, or one without stages into
        so many bytes of each device; and what is offloaded into the memory of the hosts."""
        assert self.cost is not None, "a plan that was priced"
        staged = None if self.stages is None else self.stages.cost
        if staged is not None:
            return staged.fits
        room = math.inf if self.cluster is None else self.cluster.host_share_bytes
        return self.cost.memory_bytes <= memory_bytes and self.cost.host_bytes <= room

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank on the mesh, in a pipeline on that of its stage."""
        if self.stages is not None:
            groups = self.stages.groups(self.mesh.size)
            actor = next(a for a, group in enumerate(groups) if rank in group)
            return self.layout_of(actor).mesh.coordinates(groups[actor].index(rank))
        return self.mesh.coordinates(rank)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Mesh of each actor of a pipeline; else the plan's own."""
        actors = 1 if self.stages is None else self.stages.num_actors
        return tuple(self.layout_of(actor).mesh for actor in range(actors))

    @property
    def layout(self) -> StageLayout:
        """The layout of the plan, which all stages have where `stages` says of no other."""
        laid = self.variables, self.tensors, self.ops, self.shares, self.partitioned
        return StageLayout(self.mesh, self.batch_axes, *laid)

    @property
    def by_layout(self) -> tuple[Plan, ...]:
        """The plan in each layout of its actors, numbered as `stages.layout_of` says: itself first;
        see `in_layout`."""
        others = () if self.stages is None else self.stages.layouts
        return self, *map(self.in_layout, others)

    def layout_of(self, actor: int) -> StageLayout:
        """Return the layout of the ranks of an actor of its pipeline."""
        numbers = () if self.stages is None else self.stages.layout_of
        if self.stages is None or not numbers or not numbers[actor]:
            return self.layout
        return self.stages.layouts[numbers[actor] - 1]

    def in_layout(self, layout: StageLayout) -> Plan:
        """Return the plan of the whole step in one of its layouts, without stages."""
        fields = {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)}
        return dataclasses.replace(self, stages=None, **fields)

    @property
    def pipeline(self) -> Pipeline | None:
        """The one that a training step runs in; None if it is computed in one piece."""
        stages = self.stages
        if stages is not None:
            return Pipeline(
                schedule=stages.schedule,
                recompute=stages.recompute,
                batch_statistics=self.batch_statistics,
                ranks=stages.groups(self.mesh.size) if stages.layouts else None,
            )
        if self.microbatches == 1:
            return None
        return Pipeline(microbatches=self.microbatches, batch_statistics=self.batch_statistics)

    @property
    def in_microbatches(self) -> bool:
        """Whether a training step runs as a pipeline, be it of one stage."""
        return self.microbatches > 1 or self.stages is not None

    @property
    def takes_own_statistics(self) -> bool:
        """Whether batch statistics in training are those of one of several microbatches."""
        return self.microbatches > 1 and self.batch_statistics == "microbatch"

    # --- use ---------------------------------------------------------------------

    def anchors(self) -> Anchors:
        """Return the anchors for propagation; the specs of graph inputs are the caller's."""
        fixed = {n: v.spec for n, v in self.variables.items() if v.spec is not None}
        slots = {n: v.slots for n, v in self.variables.items() if v.slots is not None}
        return Anchors(variables=fixed, tensors=dict(self.tensors), ops=self.ops, slots=slots)

    def fitted(
        self,
        graph: Graph,
        mesh: Mesh | None = None,
        *,
        gradients: Sequence[Gradient] = (),
        part: bool = False,
    ) -> Plan:
        """Return the plan with the names that its variables have in `graph` (and for `mesh`).

        Args:
            gradients: of the step (`CapturedStep.gradients`): what follows them may differ.
            part: `graph` is an evaluation or prediction of the planned training step: it has
                fewer variables and other ops.

        Raises:
            OtherModelError: it is not one for `graph`.
            PlanError: it is not one for `mesh`.
        """
        return match_to_graph(self, graph, mesh, gradients, part)

    def check_ranks(self, mesh: Mesh, cluster: Cluster | None = None) -> None:
        """Check that the plan is one for as many ranks as `mesh` has, and for `cluster`.

        Raises:
            PlanError: says what differs.
        """
        if mesh.size != self.num_ranks:
            each = f"{self.mesh}"
            if self.stages is not None:
                each += f" for each of {self.stages.num_actors} sets of ranks"
            raise PlanError(
                f"The plan is for {self.num_ranks} ranks ({each}), not for the {mesh.size} of "
                f"{mesh}. Use a mesh of that size, or make a plan for this one."
            )
        planned = self.cluster
        if cluster and planned and planned.ranks and max(planned.ranks) < cluster.size:
            cluster = cluster if cluster.ranks else cluster.part(planned.ranks)
        # A limit of memory has chosen the plan, and does not make its prices wrong.
        prints = [c.with_memory(1.0).fingerprint() for c in (cluster, planned) if c]
        if cluster and planned and len(set(prints)) > 1:
            raise PlanError(
                f"The plan was made for cluster {planned.name!r}, which is not {cluster.name!r} as "
                f"described now. Leave out cluster= to use it all the same, or make a new plan."
            )

    def splits_anything(self) -> bool:
        """Whether the batch or some variable is split over several ranks, be it in one stage."""
        return any(
            any(one.mesh.shape[one.mesh.axis(n)] > 1 for n in one.batch_axes)
            or any(isinstance(p, Shard) for v in one.variables.values() for p in v.spec or ())
            for one in self.by_layout
        )

    def with_findings(self, **found: Any) -> Plan:
        """Return the same plan with other values of these attributes of `findings`."""
        return dataclasses.replace(self, findings=dataclasses.replace(self.findings, **found))

    def with_partitioned(self, partitioned: PartitionedGraph, *others: PartitionedGraph) -> Plan:
        """Return the same plan, knowing what propagation made of it, and of its stages' layouts."""
        stages = self.stages and self.stages.with_partitioned(others)
        return dataclasses.replace(self, stages=stages, partitioned=partitioned, report=None)

    def with_report(self, report: Mapping[str, Any]) -> Plan:
        """Return the same plan, shown by a report that is made already: its graph is let go."""
        stages = self.stages and self.stages.with_partitioned(())
        return dataclasses.replace(self, stages=stages, partitioned=None, report=report)

    def of_model(self, layers: Iterable[ModelLayer]) -> Plan:
        """Return the same plan, with the layers of the model that it is for, itself the first."""
        return dataclasses.replace(self, layers=tuple(layers), report=None)

    # --- reading -----------------------------------------------------------------

    def _known(self, partitioned: PartitionedGraph | None) -> PartitionedGraph | None:
        """Return the given partitioned graph, else that of the plan."""
        if partitioned is None:
            return self.partitioned
        return arguments.instance("partitioned", partitioned, PartitionedGraph)

    def report_data(self, partitioned: PartitionedGraph | None = None) -> dict[str, Any]:
        """Return all that there is to show of the plan, as a JSON object of a versioned format.

        `tfpar.observability.report.data.schema` says what its fields are. `summary`, `explain`,
        `graph` and the commands read it and nothing else; `save` keeps it with the plan, where the
        graph of the step is known: then it needs no model to be shown again.

        Raises:
            PlanError: the report that the plan's file holds is malformed, or of another version.
        """
        return _views().report_data(self.with_turning_points(), self._known(partitioned))

    def with_turning_points(self) -> Plan:
        """Return the same plan, knowing how fast links would have to be for the fastest of its
        rivals to be taken. It is found out when it is asked for first: here, by `report_data`,
        `to_html` or `summary(full=True)`; a plan from a file has what it was saved with.
        """
        found = tuple(
            one
            if one.find_links is None
            else dataclasses.replace(one, links=one.find_links(), find_links=None)
            for one in self.findings.rivals
        )
        return self.with_findings(rivals=found) if found else self

    def summary(
        self,
        partitioned: PartitionedGraph | None = None,
        *,
        full: bool = False,
        sort: Literal["time", "memory"] | None = None,
    ) -> str:
        """Return the plan as a text to print: what it is, what a step takes, and its layers.

        Args:
            full: all layers and variables, each by itself, with inputs, collectives, padding and
                what the plan was compared with; by default blocks that repeat are shown once.
            sort: layers that take most `"time"` or `"memory"` first; by default as in the model.

        Raises:
            ArgumentError: no such order, or `full` is neither True nor False.
            PlanError: as of `report_data`.
        """
        full = arguments.flag("full", full)
        if sort is not None:
            arguments.check_choice("sort", sort, ("time", "memory"))
        told = self.with_turning_points() if full else self
        return _views().summary(told, self._known(partitioned), full, sort)

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        return _views().notebook(self)

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        partitioned: PartitionedGraph | None = None,
        *,
        timeline: str | os.PathLike[str] | None = None,
    ) -> str:
        """Return the plan as a page for browsers: one file that asks for no other. As the last
        value of a notebook's cell it is shown there.

        Args:
            path: where to write it, in UTF-8; by default it is only returned.
            timeline: that `tap.Timeline` wrote: a measured step stands below the predicted one.

        Raises:
            ArgumentError: no path.
            PlanError: as of `report_data`, or the file cannot be written; or the timeline cannot be
                read, or is of another model.
        """
        told = self.with_turning_points()
        text = _views().page(told, self._known(partitioned), timeline)
        if path is not None:
            write_whole("report file", arguments.path("path", path), text, PlanError)
        return text

    def explain(self, name: str, partitioned: PartitionedGraph | None = None) -> str:
        """Explain the spec of variable `name`: its cause, its readers, and what they move.

        Args:
            name: the variable's path, or an end of it that is its alone.

        Raises:
            PlanError: no such variable, or several.
        """
        arguments.text("name", name, "the name of a variable or a layer, or its end")
        return _views().explain(self, name, self._known(partitioned))

    def graph(self, partitioned: PartitionedGraph | None = None) -> nx.DiGraph:
        """GraphNodes and the tensors that flow between them in the forward pass, as plain values.

        Nodes, by name (a scope), have `kind` (the op type that computes most), `ops`, `flops` (of
        a step on the whole batch), `weights` (path -> spec), `weight_bytes`,
        `device_weight_bytes`; in a block that repeats `block` and `instance`; and if the plan was
        made for a cluster, `seconds` (of a step, without overlap) and `collectives` (how many of
        each). Edges have `bytes` and `tensors`: name, shape, dtype, bytes, the spec in which each
        is kept (`spec`) and those in which it is read (`read_as`).

        Raises:
            PlanError: the plan is from a file that was saved without a report.
        """
        return _views().plan_graph(self, self._known(partitioned))

    def to_layout_map(self, device_mesh: DeviceMesh | None = None) -> LayoutMap:
        """Return the plan's weights as a layout map, for Keras on JAX.

            layouts = tap.Plan.load("plan.json").to_layout_map()
            keras.distribution.set_distribution(
                keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")
            )

        Each variable has an entry by its exact path, as an anchored regular expression, with a mesh
        axis or None for each dim. Those that the plan leaves to propagation are there if it is not
        from a file. `tap.from_layout_map` reads it back. The batch is for `batch_dim_name`:
        `batch_axes` says what splits it here.

        Args:
            device_mesh: with the axes of `mesh`; by default the first devices that Keras sees.

        Raises:
            ArgumentError: `device_mesh` is none of the plan's mesh.
            PlanError: the plan has stages, or splits a dim over several axes, in strides or
                unevenly, which layouts cannot say; or Keras sees too few devices.
        """
        return _views().layout_map(self, self.partitioned, device_mesh)

    def diff(self, other: Plan) -> list[str]:
        """List the differences of `other`, one readable line each; empty for equal plans."""
        if not isinstance(other, Plan):
            raise arguments.argument_error("other", other, "a Plan; Plan.load(path) reads one")
        return difference(self, other)

    # --- files -------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, with what there is to show of it where the graph of its step is
        known (`report_data`); the file appears whole or not at all.

        Raises:
            PlanError: the file cannot be written.
        """
        path = arguments.path("path", path)
        told = self
        if self.partitioned is not None:
            told = dataclasses.replace(self, report=_views().report_data(self, self.partitioned))
        write_whole("plan file", path, told.to_json(), PlanError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: missing, unreadable, corrupt, or written by a newer tfpar.
        """
        path = arguments.path("path", path)
        return cls.from_json(read_plan_file(path), path)

    def to_json(self) -> str:
        """Format the plan as JSON: sorted, one line per variable and tensor; with its `report`."""
        return text_of(self)

    @classmethod
    def from_json(cls, text: str, source: str = "text") -> Plan:
        """Inverse of `to_json`; `source` names the text in errors.

        Raises:
            PlanError: corrupt, malformed, or written by a newer tfpar.
        """
        if not isinstance(text, str):
            raise arguments.argument_error("text", text, "the text of a plan file")
        fields = fields_of(text, source)
        try:
            return cls(**fields)
        except TfparError as error:
            raise PlanError(f"The plan file {source!r} is malformed: {error}") from error
