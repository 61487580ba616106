"""Existing graphs on a mesh: `GraphProgram` takes the place of a `tf.compat.v1.Session`."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tfpar.capture.step import CapturedStep
from tfpar.capture.v1 import GraphSource
from tfpar.options import ConstraintsLike, MeshLike, Options
from tfpar.runtime.variables import ParallelVariable
from tfpar.session import CompiledFunction, Program, Session
from tfpar.spec import TfparError


def _eagerly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the graph (and the Session) that may be active where the method is called."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context.eager_mode():
            return method(*args, **kwargs)

    return call


class GraphProgram:
    """A graph that runs partitioned, and its variables.

        source = v1.from_graph(graph)
        program = GraphProgram(source, tap.split([2, 2]))
        _, loss_value = program.run([train_op, loss], {x: images, y: labels})
        program.save("model.ckpt")          # as tf.compat.v1.train.Saver would

    Each new set of fetches and feed shapes is compiled once. Variables are initialised by
    the graph's own initialisers, or restored.

    Args:
        source: from `tfpar.capture.v1`.
        constraints: `tap.shard(...)` and its kin, on the names of variables.
    """

    @_eagerly
    def __init__(
        self, source: GraphSource, mesh: MeshLike, constraints: ConstraintsLike = ()
    ) -> None:
        self.source = source
        self.program = Program(Session.of(Options.of(mesh, constraints, planner=None)))
        world = self.program.session.ranks.world
        if world is not None:  # initialisers without a seed draw alike on all ranks
            source.seed = world.first("drawing a seed", lambda: random.randrange(1, 2**31))
        self._steps: dict[Any, _FetchStep] = {}

    @property
    def variables(self) -> dict[str, ParallelVariable]:
        """Whole values from outside, by name."""
        return self.source.variables

    @_eagerly
    def run(self, fetches: Any = None, feeds: Mapping[Any, Any] | None = None) -> Any:
        """Run one step; as `Session.run`.

        Args:
            fetches: tensors, operations, variables or names, in any structure; the
                signature's results if None.
            feeds: by tensor or name, the whole value.

        Returns:
            numpy values in the structure of `fetches`, None for operations.
        """
        if fetches is None:
            fetches = self.source.results
        fed = [self.source.feed(what) for what in feeds or ()]
        names = tuple(t.name for t in fed)
        key = (str(tf.nest.map_structure(lambda f: self.source.fetch(f).name, fetches)), names)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _FetchStep(self.program, self.source, fetches, names)
        values = [
            tf.convert_to_tensor(value, tensor.dtype)
            for tensor, value in zip(fed, (feeds or {}).values(), strict=True)
        ]
        result = step(*values)
        return tf.nest.map_structure(lambda t: None if t is None else t.numpy(), result)

    # --- checkpoints -------------------------------------------------------------

    @_eagerly
    def save(self, path: str) -> str:
        """Write a checkpoint that the graph's Saver can restore; returns `path`.

        Where ranks are processes, all call it, and the first one writes.
        """
        world = self.program.session.ranks.world
        if world is None:
            self._write(path)
        else:
            world.lead.run(f"save({path!r})", lambda: self._write(path))
        return path

    def _write(self, path: str) -> None:
        saved, folder = self.source.saved, os.path.dirname(os.path.abspath(path))
        tf.io.gfile.makedirs(folder)
        tf.raw_ops.SaveV2(
            prefix=path,
            tensor_names=[s.name for s in saved],
            shape_and_slices=[s.slice for s in saved],
            tensors=[self.variables[s.variable].read_value() for s in saved],
        )
        tf.compat.v1.train.update_checkpoint_state(folder, path)

    @_eagerly
    def restore(self, path: str) -> None:
        """Read a checkpoint that the graph's Saver (or `save`) wrote.

        Raises:
            TfparError: the checkpoint lacks a variable.
        """
        saved = self.source.saved
        reader = tf.train.load_checkpoint(path)
        missing = [s.name for s in saved if not reader.has_tensor(s.name)]
        if missing:
            raise TfparError(
                f"The checkpoint {path!r} has no {', '.join(map(repr, missing[:5]))}"
                f"{' ...' if len(missing) > 5 else ''}. Was it written by this graph's Saver?"
            )
        values = tf.raw_ops.RestoreV2(
            prefix=path,
            tensor_names=[s.name for s in saved],
            shape_and_slices=[s.slice for s in saved],
            dtypes=[self.variables[s.variable].dtype for s in saved],
        )
        for entry, value in zip(saved, values, strict=True):
            self.variables[entry.variable].assign(value)

    @_eagerly
    def values(self) -> dict[str, np.ndarray]:
        """The whole value of every variable, by name."""
        return {name: v.read_value().numpy() for name, v in self.variables.items()}


class _FetchStep(CompiledFunction):
    """The step of one set of fetches and feeds."""

    def __init__(
        self, program: Program, source: GraphSource, fetches: Any, fed: Sequence[str]
    ) -> None:
        super().__init__(program, source.capture, part=True)
        self._source = source
        self._fetches = fetches
        self._fed = fed

    def capture(self, specs: Sequence[Any]) -> CapturedStep:
        shapes = [tuple(spec.shape.as_list()) for spec in specs]
        return self._source.capture(self._fetches, dict(zip(self._fed, shapes, strict=True)))
