"""`PlanRequest`: what a user asks of a planner, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.constraints import Constraint
from tfpar.constraints.stages import least_stages
from tfpar.pipeline import Pipeline
from tfpar.planning.inter_op.machine_types import list_machine_types
from tfpar.planning.inter_op.stages.limits import NO_LIMITS, StageLimits
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.objective import Budget
from tfpar.plans import Offload, Plan
from tfpar.plans.attention import AttentionMode
from tfpar.progress import QUIET, Reporter
from tfpar.spec import Mesh


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Mesh, machines, constraints and options of a search for the plan of one step.

    Attributes:
        mesh: the physical shape of the ranks; of a pipeline, of those of one actor.
        cluster: the machines of all ranks.
        base: a plan that fixed the logical mesh for other models of the same session.
        compression: the dtype in which gradients travel; None: their own.
        recompute, offload, attention: see `planning.problem.StorageOptions`.
        pipeline: the stages and microbatches of a training step; None: one of each.
        budget: what each search may take.
        owners: the stages in which variables of the pipeline are placed already, by name.
        ranks: of the job, one actor of the pipeline after the other (`PipelinePlan`); None: the
            search places them.
        progress: reports the progress of the search.
        meshes: the logical meshes to choose from, of those that have as many ranks as `mesh`; by
            default all that the ranks can form.
        jit_compile: XLA compiles the step; see `planning.problem.Problem`.
        actor: of the pipeline, whose ranks are planned for, where actors have unequal numbers.
        num_ranks: of the job; by default as many for each actor as `mesh` has.
        limits: of the stages of a pipeline.
    """

    mesh: Mesh
    cluster: Cluster
    constraints: tuple[Constraint, ...] = ()
    base: Plan | None = None
    compression: str | None = None
    recompute: bool | tuple[str, ...] | None = None
    offload: Offload | None = None
    pipeline: Pipeline | None = None
    budget: Budget = Budget()
    owners: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ranks: tuple[int, ...] | None = None
    progress: Reporter = QUIET
    meshes: tuple[LogicalMesh, ...] = ()
    jit_compile: bool = False
    limits: StageLimits = NO_LIMITS
    actor: int = 0
    num_ranks: int | None = None
    attention: AttentionMode | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of ranks of each actor."""
        if self.pipeline is None:
            return (self.mesh.size,)
        return self.pipeline.sizes(self.num_ranks or self.num_actors * self.mesh.size)

    @property
    def num_actors(self) -> int:
        """Actors of the pipeline."""
        return 1 if self.pipeline is None else self.pipeline.num_actors

    @property
    def min_stages(self) -> int:
        """As many stages as constraints speak of."""
        return least_stages(self.constraints)

    @property
    def allows_unlike_stages(self) -> bool:
        """Whether stages may have unlike numbers of ranks: constraints and limits of stages are for
        a mesh that is divided equally."""
        return not self.constraints and not self.limits.memory_bytes

    def with_pipeline(
        self, pipeline: Pipeline | None, meshes: tuple[LogicalMesh, ...] = ()
    ) -> PlanRequest:
        """Return the same request for all ranks divided among the actors of a pipeline.

        Args:
            meshes: to choose from; by default as before.

        Raises:
            SpecError: the mesh has fewer ranks than there are actors.
        """
        mesh, size = self.mesh, self.mesh.size
        if pipeline is not None:
            mesh = pipeline.stage_mesh(mesh)
        asked = dataclasses.replace(self, mesh=mesh, pipeline=pipeline, num_ranks=size)
        return dataclasses.replace(asked, meshes=meshes or self.meshes)

    def of_actor(self, actor: int) -> PlanRequest:
        """Return the same request for the ranks of an actor, which are more or fewer than those of
        the first."""
        base, mesh = self.base, self.mesh.sized(self.sizes[actor])
        if base is not None:
            base = base.in_layout(base.layout_of(actor))
        return dataclasses.replace(self, mesh=mesh, actor=actor, base=base)

    def machine_types(self, ranks: Sequence[int] = ()) -> Mapping[Cluster, int]:
        """Return the machines on which plans are searched, and how many actors have such: those of
        all ranks, or of a pipeline's actors; of equal ones, the first.

        Args:
            ranks: of the pipeline, actor by actor; by default all in their order.

        Raises:
            TfparError: more ranks than devices.
        """
        if self.num_actors == 1:
            self.cluster.check(self.mesh)
            return {self.cluster: 1}
        self.cluster.check(Mesh.of(sum(self.sizes)))
        machines = self.cluster.part(ranks) if ranks else self.cluster
        limits = self.limits.memory_bytes
        return list_machine_types(machines, self.sizes, self.mesh.size, limits)
