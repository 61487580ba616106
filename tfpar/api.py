"""What users call: `auto_parallel`, `parallelize`, `plan_of`, `coverage`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.capture.step import argument_specs
from tfpar.constraints import Constraint, batch_axes
from tfpar.keras import adapter
from tfpar.plan import Plan
from tfpar.report.coverage import Coverage
from tfpar.report.coverage import coverage as _coverage
from tfpar.runtime.executable import CompileOptions, prepare_step
from tfpar.session import CompiledFunction, Session, active
from tfpar.spec import Mesh, TfparError


class auto_parallel:  # noqa: N801 - reads as a verb, as in the TAP paper
    """Run what is built inside on a mesh.

        with tap.auto_parallel(tap.split([2, 4])):
            model = build_model()
            model.compile("adamw", loss)
        model.fit(x, y)

    As a context manager it ends with the block; called plainly, without `with`, it
    switches the whole process over.

    Args:
        mesh: from `split`, a `Mesh`, or sizes such as `[2, 4]`.
        constraints: `shard(...)`, `replicate(...)` and kin; without any, every batch is
            split over the whole mesh (data parallelism).
        plan: a `Plan` or the path of a saved one, instead of constraints.
        bucket_bytes: upper bound on a packed gradient all-reduce, in bytes.
        strict: ops without a rule are an error instead of being replicated.

    Raises:
        SpecError: malformed mesh or constraint.
        PlanError: the plan file cannot be used.
    """

    def __init__(
        self,
        mesh: Mesh | Sequence[int] | Mapping[str, int] | None = None,
        constraints: Sequence[Constraint] = (),
        *,
        plan: Plan | str | None = None,
        bucket_bytes: int | None = None,
        strict: bool = False,
    ) -> None:
        self.session = _session(mesh, constraints, plan, bucket_bytes, strict)
        adapter.install()
        self._scope = self.session.scope()
        self._scope.__enter__()

    def __enter__(self) -> Session:
        return self.session

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*(error or (None, None, None)))


def _session(mesh, constraints, plan, bucket_bytes, strict) -> Session:
    if isinstance(plan, str):
        plan = Plan.load(plan)
    if plan is not None and mesh is None:
        mesh = plan.mesh
    if mesh is None:
        raise TfparError("auto_parallel needs a mesh, e.g. tap.split([2, 4]), or a plan.")
    if plan is not None and constraints:
        raise TfparError("Give a plan or constraints, not both: a plan holds its constraints.")
    if not isinstance(mesh, Mesh):
        mesh = Mesh.of(mesh)
    batch_axes(constraints, mesh)  # refuses unknown axes before anything is built
    options = CompileOptions(strict=strict)
    if bucket_bytes is not None:
        options = CompileOptions(bucket_bytes=bucket_bytes, strict=strict)
    session = Session(mesh, tuple(constraints), plan, options)
    # Virtual devices can only be configured before TensorFlow's runtime starts.
    _ = session.devices
    return session


def parallelize(
    model: keras.Model | Callable[..., Any],
    mesh: Mesh | Sequence[int] | Mapping[str, int] | None = None,
    constraints: Sequence[Constraint] = (),
    *,
    plan: Plan | str | None = None,
    bucket_bytes: int | None = None,
    strict: bool = False,
) -> Any:
    """Put an existing model, with the values it has, on a mesh; returns it.

    For a function of tensors (with variables made inside an `auto_parallel` block) it
    returns the function that runs on the mesh. Arguments as for `auto_parallel`.
    """
    session = _session(mesh, constraints, plan, bucket_bytes, strict)
    if isinstance(model, keras.Model):
        adapter.install()
        for layer in model._flatten_layers():
            if isinstance(layer, keras.Model):
                adapter.adopt(layer, session)
        return model
    return _wrap(session, model)


def function(step: Callable[..., Any] | None = None) -> Any:
    """Decorator: run a function of tensors on the mesh of the enclosing `auto_parallel`.

    Like `tf.function` it is compiled for each set of argument shapes, and AutoGraph turns Python
    control flow on tensors into ops. Tensors whose leading dim is that of the first argument
    are taken as batches.
    """
    if step is None:
        return function
    sessions = active.get()
    if not sessions:
        raise TfparError("tap.function is used inside a tap.auto_parallel block.")
    return _wrap(sessions[-1], step)


def _wrap(session: Session, step: Callable[..., Any]) -> Callable[..., Any]:
    plain = getattr(step, "python_function", step)
    traced = plain
    if getattr(step, "_autograph", True):
        context = tf.__internal__.autograph.control_status_ctx()
        traced = tf.__internal__.autograph.tf_convert(plain, context)
    compiled = CompiledFunction(session, traced, name=getattr(plain, "__name__", "step"))

    @functools.wraps(plain)
    def call(*arguments: Any) -> Any:
        return compiled(*arguments)

    call.compiled = compiled  # type: ignore[attr-defined]
    return call


def plan_of(model: keras.Model) -> Plan:
    """The plan that `model` runs with.

    Raises:
        TfparError: the model is not parallel, or has not run a step yet.
    """
    state = _state(model)
    if state.plan is None:
        raise TfparError(
            f"Model {model.name!r} has no plan yet: plans are made for a batch shape, at the first "
            f"fit, evaluate or predict."
        )
    return state.plan


def coverage(model: keras.Model, x: Any = None, y: Any = None) -> Coverage:
    """Which ops of the model's step have a rule, and which fall back to being replicated.

    With data `x` and `y` (a batch, or any part of one) the training step is read; without, the
    forward pass, for models whose input shapes are known. Nothing runs and nothing is
    planned.

    Raises:
        TfparError: the model is not parallel, or no shapes are known.
    """
    state = _state(model)
    kind = "predict" if y is None else "train"
    if x is None:
        x = _symbolic_inputs(model)
    batch = (x,) if y is None else (x, y)
    captured = state.step(kind).capture(argument_specs((batch,)))
    return _coverage(prepare_step(captured))


def _symbolic_inputs(model: keras.Model, batch_size: int = 8) -> Any:
    """TensorSpecs of the model's inputs, with a batch size in place of None."""
    inputs = getattr(model, "inputs", None)
    if not inputs or any(None in t.shape[1:] for t in inputs):
        raise TfparError(
            f"The input shapes of {model.name!r} are not known; pass a batch: "
            f"tap.coverage(model, x, y)."
        )
    return keras.tree.map_structure(
        lambda t: tf.TensorSpec([batch_size if n is None else n for n in t.shape], t.dtype),
        getattr(model, "_inputs_struct", inputs if len(inputs) > 1 else inputs[0]),
    )


def _state(model: keras.Model):
    state = adapter.parallel_model(model)
    if state is None:
        raise TfparError(
            f"Model {model.name!r} is not parallel: build it inside tap.auto_parallel(...), or "
            f"pass it to tap.parallelize."
        )
    return state
