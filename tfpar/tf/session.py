"""A session: what an `auto_parallel` block or a `parallelize` sets up."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfpar.cluster.description import Cluster
from tfpar.constraints import batch_axes
from tfpar.observability.timeline.recorder import Recorder, this_recorder
from tfpar.pipeline import AUTO, Pipeline
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.planning.rental import check_rent
from tfpar.planning.solve import Interrupted
from tfpar.plans import Plan
from tfpar.scopes import active
from tfpar.settings import Settings
from tfpar.spec import Mesh
from tfpar.tf.distributed.consistency import agree_on_options, agree_on_pipeline, share_seeds
from tfpar.tf.distributed.world import this_world
from tfpar.tf.interop.keras_internals import print_msg
from tfpar.tf.keras.initial_shapes import initial_shape
from tfpar.tf.runtime.detect import detect_cluster, every_rank, find_machines
from tfpar.tf.runtime.ranks import Ranks
from tfpar.tf.variables.creator import create_variable
from tfpar.tf.variables.parallel_variable import ParallelVariable

logger = logging.getLogger("tfpar")


@dataclasses.dataclass(eq=False)
class Session:
    """Session of one `auto_parallel` block: mesh, options, and what its models have in common.

    Attributes:
        mesh: the ranks; what axes they have is the planner's choice where there is one.
        stage_mesh: those that are planned for: all, or those of one stage of a pipeline.
        pipeline: the stages and microbatches of training steps; None: as plans say.
        decides_pipeline: whether it is for the next training step's plan to say.
        found_pipeline: whether a search found it, instead of the user giving it.
        options: of the user.
        cluster: what plans are made for; the machine as detected if None.
        interrupted: searches that Ctrl-C ended: what they had found is used if a plan for the same
            problem is asked for again.
        stopped: the last search of pipelines that Ctrl-C ended; the next step that trains takes
            what it had found.
        base: the first plan found for a training step: models of one session that share variables
            keep its mesh, and what is split of them.
        recorder: of timelines.
        entered: the scope that `auto_parallel` has entered; it ends when it is let go of.
    """

    mesh: Mesh
    options: Settings = dataclasses.field(default_factory=functools.partial(Settings, planner=None))
    cluster: Cluster | None = None
    interrupted: Interrupted = dataclasses.field(default_factory=dict)
    stopped: SearchInterrupted | None = None
    base: Plan | None = None
    entered: contextlib.AbstractContextManager[Session] | None = None
    stage_mesh: Mesh = dataclasses.field(init=False)
    pipeline: Pipeline | None = dataclasses.field(init=False)
    decides_pipeline: bool = dataclasses.field(init=False)
    found_pipeline: bool = False
    recorder: Recorder = dataclasses.field(default_factory=this_recorder)
    _warned: bool = False
    _unreached: bool = False

    def __post_init__(self) -> None:
        """Start undecided; raises SpecError where a mesh has fewer ranks than its actors."""
        self.undecide()

    def undecide(self) -> None:
        """Return to the state in which no plan has been found yet."""
        self._run_in(self.options.given_pipeline)
        self.decides_pipeline = self.options.plan is None and self.options.pipeline in (AUTO, None)
        self.base, self.found_pipeline = None, False

    def _run_in(self, pipeline: Pipeline | None) -> None:
        self.pipeline, plan = pipeline, self.options.plan
        whole = self.mesh if plan is None else plan.mesh
        self.stage_mesh = (
            whole if pipeline is None or plan is not None else pipeline.stage_mesh(whole)
        )

    def decide_pipeline(self, plan: Plan) -> None:
        """Take the pipeline of `plan`, which was searched for a training step."""
        self._run_in(plan.pipeline)
        self.decides_pipeline = False
        self.found_pipeline = self.pipeline is not None

    @contextlib.contextmanager
    def undecided(self) -> Iterator[None]:
        """Restore afterwards whatever is decided in a block."""
        names = "pipeline", "stage_mesh", "decides_pipeline", "found_pipeline", "base", "cluster"
        before = {name: getattr(self, name) for name in names}
        try:
            yield
        finally:
            vars(self).update(before)

    def drop_pipeline(self) -> None:
        """Run without the pipeline that was found."""
        self._run_in(None)
        self.base, self.found_pipeline = None, False

    @classmethod
    def of(cls, options: Settings) -> Session:
        """The session that `options` ask for, on the ranks that there are.

        Raises:
            TfparError: a mesh, plan, cluster or constraint that does not fit the others, or fewer
                devices than ranks.
        """
        plan, mesh = options.plan, options.mesh
        if mesh is None:
            mesh = every_rank() if plan is None else plan.whole_mesh
        batch_axes(options.constraints, mesh)  # refuses unknown axes before anything is built
        cluster = None
        if options.cluster is not None:
            cluster = find_machines(mesh, options.cluster)
        if plan is not None:
            plan.check_ranks(mesh, cluster)
        if options.objective == "samples_per_dollar":
            check_rent(cluster or detect_cluster(mesh), mesh)
        session = cls(mesh, options, cluster)
        world = session.ranks.world  # devices can only be configured before TensorFlow has started
        if world is not None:
            world.beacon.needs_at_least(options.schedule.num_actors)
            agree_on_pipeline(
                world,
                options.schedule,
                options.recomputed_stages,
                options.batch_statistics,
                decided=options.pipeline != AUTO,
                picked=options.picks_schedule,
            )
            agree_on_options(world, options.described())
            share_seeds(world)
        return session

    @property
    def placed_ranks(self) -> tuple[int, ...]:
        """Ranks of its stages, actor by actor; none: all in their order."""
        plan = self.base
        return () if plan is None or plan.stages is None else plan.stages.ranks

    @property
    def in_stages(self) -> bool:
        """Whether steps are to be planned as a pipeline of several stages."""
        return self.pipeline is not None and self.pipeline.order.num_stages > 1

    @functools.cached_property
    def ranks(self) -> Ranks:
        """Ranks of the session's mesh; asking for them starts TensorFlow's runtime."""
        return Ranks.of(self.mesh.size, this_world())

    @property
    def tells(self) -> bool:
        """Whether this rank shows users what it does."""
        world = self.ranks.world
        return self.options.verbose and (world is None or world.rank == 0)

    def tell(self, text: str) -> None:
        """Show a line: in the log where that shows such lines, else as Keras shows its own."""
        if not self.tells:
            return
        if logger.isEnabledFor(logging.INFO):
            logger.info(text)
        else:
            print_msg(f"tfpar: {text}")

    def warn_outside(self, reader: str, weight: str) -> None:
        """Say, once, that weights are read by what does not run on the mesh."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s reads %r, a weight of a model on the mesh %s: it computes with whole weights, "
                "on one device. Decorate the step with tap.function inside of the auto_parallel "
                "block, or train with fit.",
                reader,
                weight,
                self.mesh,
            )

    def warn_unreached(self, model: str) -> None:
        """Say, once, that a model is compiled where no block reaches it."""
        if not self._unreached:
            self._unreached = True
            logger.warning(
                "Model %r is compiled in thread %r, which the open auto_parallel block does not "
                "reach, as it was started before: it runs on one device. Open a block in that "
                "thread, or give the model to tap.parallelize.",
                model,
                threading.current_thread().name,
            )

    def create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Create a variable as the scope of a block does: see `tf.variables.creator`."""
        variable = create_variable(next_creator, made_by=initial_shape, **kwargs)
        if isinstance(variable, ParallelVariable):
            variable.on_outside_read = self.warn_outside
        return variable

    @contextlib.contextmanager
    def scope(self) -> Iterator[Session]:
        """Run a block in which variables are not materialised, and models are parallel."""
        token = active.set((*active.get(), self))
        try:
            with tf.variable_creator_scope(self.create_variable):
                yield self
        finally:
            active.reset(token)
