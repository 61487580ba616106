"""`tfpar plan`: a script's model, planned."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar import api
from tfpar.capture.step import argument_specs
from tfpar.cli.pipeline import pipeline_of
from tfpar.cli.script import call, scripts
from tfpar.keras import adapter
from tfpar.options import Options
from tfpar.pipeline import AUTO, Pipeline
from tfpar.plans import Offload, Plan
from tfpar.runtime.detect import machines_for
from tfpar.search.planners import budget_for, find_planner
from tfpar.session import Session
from tfpar.spec import CaptureError, Mesh, PlanError, SpecError, TfparError
from tfpar.writable import why_not_writable


def run(options: argparse.Namespace) -> int:
    """Plan, write and print; what can be refused before the script runs is.

    Raises:
        TfparError: anything that is wrong, in words for the user.
    """
    if options.output is not None:
        _check_output(options.output)
    plan = plan_of(options, options.plan_cache)
    if options.output is not None:
        plan.save(options.output)
        if not options.quiet:
            print(f"Wrote {options.output}")
    if options.explain:
        print("\n".join(map(plan.explain, options.explain)))
    elif not options.quiet:
        print(plan.summary())
    return 0


def plan_of(options: argparse.Namespace, plan_cache: str | None = None) -> Plan:
    """The plan of what `_add_problem`'s arguments name; what they get wrong is said first.

    Raises:
        TfparError: anything that is wrong; if no plan fits, a MemoryLimitError.
    """
    mesh = parse_mesh(options.mesh)
    budget_for(find_planner(options.planner, options.level), options.search_seconds)
    if options.cluster is not None:
        machines_for(mesh, options.cluster)
    if options.batch_size is not None and options.batch_size < 1:
        raise TfparError(f"--batch-size is {options.batch_size}; a batch has at least 1 sample.")
    pipeline = pipeline_of(options)
    Options(pipeline=pipeline)  # refuses what cannot be run
    if pipeline is not None and pipeline != AUTO:
        mesh.divided(pipeline.order.num_actors)
    return _plan(options, mesh, plan_cache, pipeline)


def parse_mesh(text: str) -> Mesh:
    """The mesh of `2x8`, `16`, `2x2x4` or `data=2,model=8`.

    Raises:
        TfparError: it is none of these.
    """
    sizes = re.fullmatch(r"\d+(x\d+)*", text)
    named = re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text)
    try:
        if sizes:
            return Mesh.of([int(n) for n in text.split("x")])
        if named:
            names, counts = zip(*(axis.split("=") for axis in text.split(",")), strict=True)
            return Mesh(names, tuple(map(int, counts)))
    except SpecError as error:
        raise TfparError(f"--mesh {text!r}: {error}") from error
    raise TfparError(
        f"--mesh {text!r} is no mesh. Write sizes (2x8, 16, 2x2x4) or axes (data=2,model=8)."
    )


def _check_output(path: str) -> None:
    """Refuse now what could not be written after a long search."""
    wrong = why_not_writable(path)
    if wrong:
        raise PlanError(f"Cannot write the plan file {path!r}: {wrong}. Name another file with -o.")


def _plan(
    options: argparse.Namespace,
    mesh: Mesh,
    plan_cache: str | None,
    pipeline: Pipeline | Literal["auto"] | None,
) -> Plan:
    with scripts() as load:
        build = load(options.build)
        data = load(options.data) if options.data is not None else None
        # Made in a scope of our own: the batch may depend on the model, and `api.plan` wants both.
        adapter.install()
        with Session(mesh).scope():
            model, batch = _model_and_batch(options.build, call(options.build, build))
        if batch is not None and (options.data or options.batch_size):
            given = "--data" if options.data else "--batch-size"
            raise TfparError(f"{options.build} returns a batch. Leave out {given}.")
        if data is not None:
            batch = call(options.data, data)
        if batch is not None:
            source = options.data or options.build
            made_up: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            batch = _checked_batch(source, batch)
        else:
            batch = _made_up_batch(options, model)
            made_up = _doubting_labels()
        with made_up:
            return api.plan(
                lambda: model,
                batch,
                mesh,
                options.cluster,
                planner=options.planner,
                plan_cache=plan_cache,
                memory_limit=options.memory_limit,
                recompute=_recompute(options.recompute),
                offload=_offload(options.offload),
                level=options.level,
                search_seconds=options.search_seconds,
                pipeline=pipeline,
            )


def _recompute(given: list[str] | None) -> bool | list[str] | None:
    """What `--recompute` asks for, as of `auto_parallel`."""
    if given in (["all"], ["none"]):
        return given == ["all"]
    return given


def _offload(given: str | None) -> Offload | bool | None:
    """What `--offload` asks for, as of `auto_parallel`."""
    if given in ("all", "none"):
        return given == "all"
    return Offload(**{given: True}) if given else None


def _model_and_batch(target: str, made: Any) -> tuple[keras.Model, Any]:
    batch = None
    if isinstance(made, tuple) and len(made) == 2:
        made, batch = made
    if not isinstance(made, keras.Model):
        raise TfparError(
            f"{target} returned a {type(made).__name__}. It has to return a compiled Keras model, "
            f"or (model, batch)."
        )
    if not made.compiled:
        raise TfparError(
            f"{target} returned a model, {made.name!r}, that is not compiled. Call "
            f"model.compile(optimizer, loss) in it."
        )
    return made, batch


# --- batches ---------------------------------------------------------------------------


def _checked_batch(target: str, batch: Any) -> Any:
    """Specs of a batch, which must be tensors of known shape."""
    try:
        specs = argument_specs((batch,))[0]
    except CaptureError:
        raise
    except Exception as error:
        raise TfparError(
            f"{target} gave a {type(batch).__name__} that is no batch: it has to be (x, y) or "
            f"(x, y, sample_weight), of arrays or tf.TensorSpecs."
        ) from error
    for spec in tf.nest.flatten(specs):
        if isinstance(spec, tf.TensorSpec) and not spec.shape.is_fully_defined():
            raise TfparError(
                f"{target} gave a tensor of shape {spec.shape}. A plan is for one batch shape: "
                f"write numbers for all dims, the global batch size first."
            )
    return specs


def _made_up_batch(options: argparse.Namespace, model: keras.Model) -> Any:
    """`(x, y)` as the model's own inputs, outputs and loss have it."""
    if options.batch_size is None:
        raise TfparError(
            f"No batch to plan for: return (model, batch) from {options.build}, or give --data "
            f"script.py:function or --batch-size N."
        )
    try:
        x = api._symbolic_inputs(model, options.batch_size)
    except TfparError:
        raise TfparError(
            f"The input shapes of {model.name!r} are not all known, so that --batch-size is not "
            f"enough: return (model, batch) from {options.build}, or give --data."
        ) from None
    loss = getattr(model, "loss", None)
    if loss is None:  # its own train_step, or add_loss
        return (x,)
    outputs = model.outputs
    losses = _loss_of_each(model, loss)
    labels = [_labels(t, one, options) for t, one in zip(outputs, losses, strict=True)]
    structure = getattr(model, "_outputs_struct", None)
    if structure is None:
        structure = outputs if len(outputs) > 1 else outputs[0]
    return x, keras.tree.pack_sequence_as(structure, labels)


def _loss_of_each(model: keras.Model, loss: Any) -> list[Any]:
    """The loss of each of the model's outputs, None where it has none."""
    outputs = model.outputs
    if isinstance(loss, dict):
        structure = getattr(model, "_outputs_struct", None)
        names = list(model.output_names)
        if isinstance(structure, dict):
            names = sorted(structure)  # as a structure is flattened
        return [loss.get(name) for name in names]
    if isinstance(loss, list | tuple):
        flat = keras.tree.flatten(loss)
        return flat if len(flat) == len(outputs) else [None] * len(outputs)
    return [loss] * len(outputs)


def _labels(
    output: keras.KerasTensor, loss: str | Callable[..., Any] | None, options: argparse.Namespace
) -> tf.TensorSpec:
    """Class numbers for a sparse categorical loss, else what the output is."""
    shape, dtype = tuple(output.shape), output.dtype
    if _is_sparse(loss):
        shape, dtype = shape[:-1], "int32"
    if None in shape[1:]:
        raise TfparError(
            f"The output {output.name!r} has the shape {tuple(output.shape)}, so that its labels "
            f"are not known: return (model, batch) from {options.build}, or give --data."
        )
    return tf.TensorSpec((options.batch_size, *shape[1:]), dtype)


def _is_sparse(loss: Any) -> bool:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return "sparsecategorical" in name.replace("_", "").lower()


@contextlib.contextmanager
def _doubting_labels() -> Iterator[None]:
    """Where the step cannot be traced, the labels made up for it may be why."""
    try:
        yield
    except CaptureError as error:
        raise TfparError(
            f"{error} The batch was made up from the model's inputs, outputs and loss; if its "
            f"labels are others, give --data."
        ) from error
