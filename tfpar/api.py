"""Public functions: `auto_parallel`, `parallelize`, `function`, `plan`, `plan_of`, `coverage`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfpar.compile import prepare_step
from tfpar.distribution import install, settings_in_force
from tfpar.observability.report.coverage import Coverage
from tfpar.observability.report.coverage import coverage as _coverage
from tfpar.options import (
    ClusterLike,
    Keywords,
    Options,
    PlanKeywords,
    settings_of,
    takes,
    with_keywords,
)
from tfpar.plans import Plan
from tfpar.scopes import block, enclosing
from tfpar.settings import ConstraintsLike, MeshLike
from tfpar.spec import ArgumentError, TfparError
from tfpar.spec.arguments import argument_error, check_list, flag, optional
from tfpar.tf.capture.step import argument_specs
from tfpar.tf.functions.step_function import StepFunction
from tfpar.tf.graph_program import GraphProgram
from tfpar.tf.keras import adapter
from tfpar.tf.keras.batches import batch_as_fit_feeds, check_batch, sequence_length
from tfpar.tf.runtime.detect import every_rank
from tfpar.tf.session import Session
from tfpar.tf.traced import TracedModel, make_search_reporter, resolve_cluster

if TYPE_CHECKING:
    from typing_extensions import Unpack


class auto_parallel:  # noqa: N801 - reads as a verb, as in the TAP paper
    """Run what is built inside on a mesh.

        with tap.auto_parallel(tap.split([2, 4])):
            model = build_model()
            model.compile("adamw", loss)
        model.fit(x, y)

    As a context manager it ends with the block; called plainly, without `with`, it
    switches the whole process over.

    The plan is searched when the first step is compiled, for that model and batch.

    Args:
        mesh: from `split`, a `Mesh`, or sizes such as `4` or `[2, 4]`: how many workers with how
            many devices. The search chooses the logical axes. By default all ranks of the job, or
            the GPUs of this machine. Or a `keras.distribution.DeviceMesh`, `DataParallel` or
            `ModelParallel`; the latter two have constraints, too, and nothing is searched unless a
            planner is named. By default also what the `keras.distribution` in force asks for.
        constraints: `shard(...)`, `replicate(...)` and kin, one or several, narrow the search. They
            name the mesh's axes, so that these are then the logical ones. Or a
            `keras.distribution.LayoutMap`.
        options: what else is asked, as one `tap.Options`: planner, cluster, limits of memory, ...
        keywords: the same one by one, by the names that `Options` has and explains. A keyword wins
            over the same of `options`.

    Raises:
        ArgumentError: an argument of another type or out of range, such as an unknown planner,
            compression or number of chunks; names it.
        SpecError: malformed mesh or constraint, or a pattern that matches nothing.
        PlanError: the plan file cannot be used; later, no plan satisfies the constraints or (a
            MemoryLimitError) fits into the memory of a device.
        TfparError: an unknown cluster, or fewer devices than ranks.
    """

    @takes(Keywords)
    def __init__(
        self,
        mesh: MeshLike | None = None,
        constraints: ConstraintsLike = (),
        *,
        options: Options | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        install()
        self.session = Session.of(settings_in_force(mesh, constraints, options, keywords))
        self._scope = block(self.session)
        self._scope.__enter__()
        self.session.entered = self._scope  # nobody keeps the result of a plain call

    def __enter__(self) -> Session:
        return self.session

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*(error or (None, None, None)))


@takes(Keywords)
def parallelize(
    model: keras.Model | Callable[..., Any],
    mesh: MeshLike | None = None,
    constraints: ConstraintsLike = (),
    *,
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> Any:
    """Put an existing model, with the values it has, on a mesh; returns it.

    For a function of tensors (with variables made inside an `auto_parallel` block) it
    returns the function that runs on the mesh. Arguments as for `auto_parallel`.
    """
    if not (isinstance(model, keras.Model) or _is_function(model)):
        raise argument_error("model", model, "a keras.Model, or a function of tensors")
    install()
    session = Session.of(settings_in_force(mesh, constraints, options, keywords))
    if isinstance(model, keras.Model):
        adapter.adopt_all(model, session)
        return model
    return StepFunction(session, model)


def _is_function(value: Any) -> bool:
    """Whether `value` is called for what it computes: a layer has weights besides."""
    return callable(value) and not isinstance(value, keras.layers.Layer | type)


def function(
    step: Callable[..., Any] | None = None,
    *,
    input_signature: Sequence[Any] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
) -> Any:
    """Decorator: run a function of tensors on the mesh of the enclosing `auto_parallel`.

        with tap.auto_parallel(tap.split([4])):

            @tap.function
            def step(x, y, training=True): ...

    It is called as a `tf.function` is, with positional and keyword arguments in any structure, and
    traced by its rules, but for one: a step has static shapes, and is compiled for each set of
    them. Python numbers, strings and objects are static: each set of values is a trace of its own.
    Tensors whose leading dim is that of the first tensor are taken as batches. Of a dataset or an
    iterator, what `next` takes is fed to the step, and in `for batch in dataset:` each pass is a
    step. As a method, it has its steps for each instance.

    Args:
        step: the function, or a `tf.function`.
        input_signature: `tf.TensorSpec`s that the arguments have to fit; sizes may be None.
        autograph: turn Python control flow on tensors into ops.
        jit_compile: XLA compiles what is between collectives. By default it does if `step` is a
            `tf.function` that says so.

    Raises:
        TfparError: outside of a block; or `reduce_retracing=True`, which steps cannot be compiled
            with.
    """
    if reduce_retracing:
        raise TfparError(
            "tap.function cannot have reduce_retracing=True: steps have static shapes, so that "
            "each set of shapes is compiled. Leave it out."
        )
    if step is None:
        return functools.partial(
            function, input_signature=input_signature, autograph=autograph, jit_compile=jit_compile
        )
    if not callable(step):
        raise argument_error("step", step, "a function of tensors")
    flag("autograph", autograph)
    optional(flag, "jit_compile", jit_compile)
    if input_signature is not None:
        check_list("input_signature", input_signature, "a list of tf.TensorSpecs")
    session = enclosing()
    if session is None:
        raise TfparError("tap.function is used inside a tap.auto_parallel block.")
    return StepFunction(
        session,
        step,
        input_signature=input_signature,
        autograph=autograph,
        jit_compile=jit_compile,
    )


@takes(PlanKeywords)
def plan(
    build: Callable[[], keras.Model],
    batch: Any,
    mesh: MeshLike | None = None,
    cluster: ClusterLike | None = None,
    constraints: ConstraintsLike = (),
    *,
    options: Options | None = None,
    **keywords: Unpack[PlanKeywords],
) -> Plan:
    """Plan a model's training, or its predictions, without devices and without its weights.

        plan = tap.plan(build_model, (x, y), [2, 8], cluster="v100-ethernet")
        plan.save("plan.json")     # then: tap.auto_parallel(plan="plan.json")

    Args:
        build: makes and compiles the model; no weight is given memory. Where no GPU is,
            Keras's `jit_compile="auto"` means no XLA: `jit_compile=True` plans for steps that it
            compiles. With `objective="latency"` it need not be compiled.
        batch: what `fit` gets, `(x, y)` or `(x, y, sample_weight)`: arrays, or `tf.TensorSpec`s of
            static shape, for the global batch; or strings, for a model with a preprocessor. With
            `objective="latency"`, `x` is enough.
        mesh, constraints: as for `auto_parallel`. With `objective="samples_per_dollar"` it is the
            most that may be rented: the plan may be for a part of it, which its first rental
            names (`plan.findings.rentals`).
        cluster: as of `Options`; None takes that of `options`.
        options, keywords: as for `auto_parallel`. What only matters to a run (`chunks`, `strict`,
            `verbose`, ...) is no keyword here, and in `options` it is left alone.

    Raises:
        TfparError: `build` gives no compiled model, or as for `auto_parallel`.
    """
    if not _is_function(build):
        raise argument_error(
            "build",
            build,
            "a function without arguments that makes and compiles a model (no model: one that "
            "exists has its weights in memory)",
        )
    if cluster is not None:
        options = with_keywords(options, {"cluster": cluster})
    settings = settings_of(mesh, constraints, options, keywords, PlanKeywords)
    if settings.plan is not None:
        raise ArgumentError("tap.plan makes a plan: give it options without one.")
    if settings.planner is None:
        raise ArgumentError("tap.plan needs a planner, e.g. planner='tap'.")
    mesh = settings.mesh or every_rank()
    resolve_cluster(mesh, settings.cluster, settings)  # before the model is built
    traced = TracedModel.of(build, batch, mesh, settings)
    with make_search_reporter(settings) as report:
        return traced.plan(mesh, settings.cluster, report)


def plan_of(model: keras.Model | StepFunction | GraphProgram) -> Plan:
    """Return the plan that a parallel model, a `tap.function` or a `tap.GraphProgram` runs with.

    Raises:
        TfparError: the model is not parallel, or has not run a step yet.
    """
    if isinstance(model, StepFunction | GraphProgram):
        return model.plan
    state = adapter.state_of(model)
    if state.plan is None:
        raise TfparError(
            f"Model {model.name!r} has no plan yet: plans are made for a batch shape, at the first "
            f"fit, evaluate or predict."
        )
    return state.plan


def coverage(model: keras.Model, x: Any = None, y: Any = None) -> Coverage:
    """Return the coverage of the model's step: ops that have a rule, and ops that run replicated.

    With data `x` and `y` (a batch, or any part of one, as `fit` gets it) the training step is
    read; without, the forward pass, for models whose input shapes are known. Nothing runs and
    nothing is planned.

    Raises:
        TfparError: the model is not parallel, or no shapes are known.
    """
    state = adapter.state_of(model)
    if x is None:
        x = _symbolic_inputs(model)
    if isinstance(x, str | bytes):
        raise argument_error("x", x, "a batch: arrays, or tf.TensorSpecs")
    batch = batch_as_fit_feeds(model, (x,) if y is None else (x, y))
    check_batch("(x, y)", batch)
    kind = "predict" if len(batch) == 1 else "train"
    captured = state.step(kind).capture(argument_specs((batch,)))
    return _coverage(prepare_step(captured))


def _symbolic_inputs(model: keras.Model, batch_size: int = 8) -> Any:
    """TensorSpecs of the model's inputs, with sizes in place of None."""
    inputs, length = getattr(model, "inputs", None), sequence_length(model)
    if not inputs or any(None in t.shape[1 if length is None else 2 :] for t in inputs):
        raise TfparError(
            f"The input shapes of {model.name!r} are not known; pass a batch: "
            f"tap.coverage(model, x, y)."
        )
    return keras.tree.map_structure(
        lambda t: tf.TensorSpec(
            [s if n is None else n for n, s in zip(t.shape, (batch_size, length), strict=False)]
            + list(t.shape[2:]),
            t.dtype,
        ),
        getattr(model, "_inputs_struct", inputs if len(inputs) > 1 else inputs[0]),
    )
