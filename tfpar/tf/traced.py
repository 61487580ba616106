"""A model whose training step is traced once, to be planned on any mesh and any machines."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfpar.cluster.description import Cluster
from tfpar.compile import simplify_step
from tfpar.compile.passes import Observer, dump_of, ignore_pass
from tfpar.constraints import batch_axes
from tfpar.ir.graph import itemsize
from tfpar.options import ClusterLike
from tfpar.planning.completion import attach_partitioned
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.planning.pipeline_search import GIVEN, search_step, select_scope
from tfpar.planning.problem import Problem
from tfpar.planning.rental import attach_rental, check_rent, search_rental
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.plans import Plan
from tfpar.progress import Reporter, reporting
from tfpar.settings import Settings
from tfpar.spec import Mesh, TfparError
from tfpar.tf.capture.step import CapturedStep, argument_specs, batch_size_of
from tfpar.tf.distributed.job import Job
from tfpar.tf.keras import adapter
from tfpar.tf.keras.batches import batch_as_fit_feeds, check_batch, check_training_batch
from tfpar.tf.keras.layer_sources import layers_of
from tfpar.tf.runtime.detect import find_machines
from tfpar.tf.session import Session
from tfpar.tf.steps.step_planner import collect_constraints


@dataclasses.dataclass(eq=False)
class TracedModel:
    """The step of a model that is planned, traced once, and the settings of its plans: the training
    step without its update, or, where latency is the objective, the prediction.

    Attributes:
        step: captured and simplified.
        settings: the options besides mesh and cluster: a planner, and no plan.
        batch_size: of the batch that it was traced for.
        state_ratio: bytes of optimizer slots per byte of weight.
        jit_compile: whether XLA compiles the step.
        observe: is called with the result of each pass over the step.
    """

    step: CapturedStep
    settings: Settings
    batch_size: int | None
    state_ratio: float
    jit_compile: bool
    observe: Observer = ignore_pass

    @classmethod
    def of(
        cls, build: Callable[[], keras.Model], batch: Any, mesh: Mesh, settings: Settings
    ) -> TracedModel:
        """Trace the step of the model that `build` makes and compiles; arguments as of `tap.plan`.

        Args:
            mesh: one of those that it will be planned on: that with most axes, for which layers may
                give their weights specs.

        Raises:
            TfparError: `build` gives no compiled model, the batch is none of it, or the step
                cannot be captured.
        """
        adapter.install()
        session = Session(mesh, settings)  # of no ranks: there may be no such devices
        with session.scope():
            model = build()
        state = adapter.parallel_model(model) if isinstance(model, keras.Model) else None
        predicts = settings.objective == "latency"
        if state is None or not (model.compiled or predicts):
            raise TfparError("tap.plan needs a function that makes and compiles a Keras model.")
        batch = batch_as_fit_feeds(model, batch)
        if predicts:
            batch = keras.utils.unpack_x_y_sample_weight(batch)[:1]
            check_batch("batch", batch)
        else:
            check_training_batch("batch", batch, model)
        specs = argument_specs((batch,))
        observe = dump_of("plan")
        with _told(f"tracing the {'predict' if predicts else 'train'} step", settings):
            capture = state.step("predict").capture if predicts else state.capture_gradients
            step = capture(specs)
            step.layers = layers_of(model)
            simplify_step(step, observe)
        ratio, size = 0.0 if predicts else slot_ratio(model), batch_size_of(specs)
        return cls(step, settings, size, ratio, bool(model.jit_compile), observe)

    def plan(self, mesh: Mesh, cluster: ClusterLike | None, report: Reporter) -> Plan:
        """The plan for `mesh` on `cluster` (None: machines like this one), with all its tensors
        laid out.

        Raises:
            TfparError: as of `tap.plan`.
            SearchInterrupted: Ctrl-C; knows the best plan so far.
        """
        try:
            plan, problem = self.find(mesh, cluster, report)
        except SearchInterrupted as stopped:
            best = stopped
            layers = self.step.layers
            raise SearchInterrupted(lambda: best.plan and best.plan.of_model(layers)) from None
        machines = resolve_cluster(mesh, cluster, self.settings)
        if plan.num_ranks < mesh.size and plan.cluster is not None:
            machines = plan.cluster  # the part that is worth its rent
        laid = attach_partitioned(plan, problem, machines)
        self.observe("propagate", lambda: str(laid.partitioned))
        return laid.of_model(self.step.layers)

    def find(
        self, mesh: Mesh, cluster: ClusterLike | None, report: Reporter
    ) -> tuple[Plan, Problem]:
        """The same, not laid out, and the problem that it solves."""
        settings = self.settings
        machines = resolve_cluster(mesh, cluster, settings)
        session = Session(mesh, settings)
        pipeline = settings.given_pipeline
        request = PlanRequest(
            session.stage_mesh,
            machines,
            collect_constraints(self.step, session),
            compression=settings.compression,
            recompute=settings.recompute,
            offload=settings.offload,
            attention=settings.attention,
            pipeline=pipeline,
            ranks=None if pipeline is None else pipeline.rank_order,
            budget=settings.budget,
            progress=report,
            jit_compile=self.jit_compile,
            num_ranks=mesh.size,
            limits=settings.limits,
        )
        scope = GIVEN
        if settings.objective != "latency" or settings.pipeline is not None:
            scope = select_scope(
                settings.pipeline,
                settings.pipeline_search,
                bool(request.constraints) or settings.chunks is not None,
            )
        if settings.objective == "samples_per_dollar":
            return search_rental(self._search, request, mesh, scope)
        plan, problem = search_step(self._search, request, scope)
        return attach_rental(plan, machines, self.batch_size), problem

    @functools.cached_property
    def _search(self) -> StepSearch:
        """Search over plans of the step; one object, since its results serve all its plans."""
        planner, cache = self.settings.planner, self.settings.plan_cache
        assert planner is not None
        return StepSearch(self.step, self.batch_size, planner, cache, state_ratio=self.state_ratio)


def resolve_cluster(mesh: Mesh, cluster: ClusterLike | None, settings: Settings) -> Cluster:
    """The machines that a plan for `mesh` is priced for.

    Raises:
        TfparError: the cluster has no such mesh, a constraint names an axis that it lacks, or the
            rent of a device is not known that the objective asks for.
    """
    batch_axes(settings.constraints, mesh)
    machines = find_machines(mesh, cluster).with_memory(settings.memory_limit)
    if settings.objective == "samples_per_dollar":
        check_rent(machines, mesh)
    return machines


def make_search_reporter(settings: Settings) -> contextlib.AbstractContextManager[Reporter]:
    """Make the reporter of a search: on the first rank of a job, if users want it."""
    return _told("searching a plan", settings)


def _told(title: str, settings: Settings) -> contextlib.AbstractContextManager[Reporter]:
    job = Job.of(os.environ)
    return reporting(title, wanted=settings.verbose and (job is None or job.rank == 0))


# --- size of slots --------------------------------------------------------------------------
# Found without creating them.


def slot_ratio(model: keras.Model) -> float:
    """Bytes of optimizer slots per byte of weight.

    A copy of the optimizer is built for weights of the model's shapes, at most 64 to a side.
    """
    optimizer = getattr(model, "optimizer", None)
    weights = model.trainable_variables
    if optimizer is None or not weights:
        return 0.0
    shapes = {(tuple(min(n, 64) for n in w.shape), str(w.dtype)) for w in weights}
    small = [
        keras.Variable(np.zeros(shape, "float32"), dtype=dtype, name=f"probe_{i}")
        for i, (shape, dtype) in enumerate(sorted(shapes))
    ]
    probe = type(optimizer).from_config(optimizer.get_config())
    probe.build(small)
    return _bytes(v for v in probe.variables if len(v.shape)) / max(_bytes(small), 1.0)


def _bytes(variables: Any) -> float:
    return float(
        sum(
            np.prod(v.shape) * itemsize(keras.backend.standardize_dtype(v.dtype)) for v in variables
        )
    )
