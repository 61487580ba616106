"""The model that a script makes, and the batch that it trains on."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfpar import api
from tfpar.cli.script import call
from tfpar.spec import CaptureError, TfparError
from tfpar.spec.arguments import integer
from tfpar.tf.capture.step import argument_specs


@dataclasses.dataclass(frozen=True)
class Made:
    """Model and batch that a script has made.

    Attributes:
        model: compiled.
        batch: `(x, y)` or `(x, y, sample_weight)`, of arrays or `tf.TensorSpec`s.
        source: what gave the batch; None: it is made up from the model.
    """

    model: keras.Model
    batch: Any
    source: str | None

    @classmethod
    def of(
        cls,
        options: argparse.Namespace,
        load: Callable[[str], Callable[[], Any]],
        scope: contextlib.AbstractContextManager[Any],
        trains: bool = True,
    ) -> Made:
        """Make the model and the batch that the arguments of `problem.add_model` name.

        Args:
            load: from `script.scripts`.
            scope: in which the model is made.
            trains: it has to be compiled.

        Raises:
            TfparError: a function that is not there, fails, or gives something else.
        """
        build = load(options.build)
        data = load(options.data) if options.data is not None else None
        with scope:
            model, batch = _model_and_batch(options.build, call(options.build, build), trains)
        if batch is not None and (options.data or options.batch_size):
            given = "--data" if options.data else "--batch-size"
            raise TfparError(f"{options.build} returns a batch. Leave out {given}.")
        if data is not None:
            batch = call(options.data, data)
        if batch is None:
            return cls(model, _made_up_batch(options, model), None)
        source = options.data or options.build
        _check_batch(source, batch)
        return cls(model, batch, source)

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Run a block that traces the step; if it fails, made-up labels may be the cause."""
        try:
            yield
        except CaptureError as error:
            if self.source is not None:
                raise
            raise TfparError(
                f"{error} The batch was made up from the model's inputs, outputs and loss; if its "
                f"labels are others, give --data."
            ) from error


def _model_and_batch(target: str, made: Any, trains: bool) -> tuple[keras.Model, Any]:
    batch = None
    if isinstance(made, tuple) and len(made) == 2:
        made, batch = made
    if not isinstance(made, keras.Model):
        raise TfparError(
            f"{target} returned a {type(made).__name__}. It has to return a compiled Keras model, "
            f"or (model, batch)."
        )
    if trains and not made.compiled:
        raise TfparError(
            f"{target} returned a model, {made.name!r}, that is not compiled. Call "
            f"model.compile(optimizer, loss) in it."
        )
    return made, batch


# --- batches ---------------------------------------------------------------------------


def _check_batch(target: str, batch: Any) -> None:
    """Refuse what is no batch of tensors of known shape."""
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


def _made_up_batch(options: argparse.Namespace, model: keras.Model) -> Any:
    """`(x, y)` as the model's own inputs, outputs and loss have it."""
    if options.batch_size is None:
        raise TfparError(
            f"No batch to plan for: return (model, batch) from {options.build}, or give --data "
            f"script.py:function or --batch-size N."
        )
    integer("--batch-size", options.batch_size, 1)
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
