"""Capture: trace a step at static shapes and read it into the IR.

The global, single-device step is traced into one FuncGraph; variables are captured by
handle and never read, so they need no memory.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpar.ir.collection import collection_paused
from tfpar.ir.graph import Gradient, Variable
from tfpar.ir.names import VariableName
from tfpar.ir.step import StepGraph
from tfpar.spec import CaptureError
from tfpar.tf.interop.convert import convert_func_graph
from tfpar.tf.interop.graphs import trace
from tfpar.tf.variables.tracing_context import capturing

GRADIENTS = "tfpar_gradients"
"""The collection of a traced graph in which its gradients are marked
(`tfpar.tf.keras.gradients`)."""


@dataclasses.dataclass(eq=False)
class CapturedStep(StepGraph):
    """A step as a graph, and what binds it to the outside.

    Attributes:
        closure: tensors from outside that the step reads (fed with each call, after its
            arguments).
        variables: the TensorFlow variable of each `graph.variables` entry.
        output_structure: the step's result with a placeholder at every tensor.
        ops_traced: how many ops TensorFlow made for it, in all traces; the same on every machine,
            as the seconds that it takes are not. None for a graph that was given.
    """

    closure: list[tf.Tensor]
    variables: list[tf.Variable]
    output_structure: Any
    ops_traced: int = dataclasses.field(default=0, kw_only=True)

    def fed(self, arguments: Any) -> list[tf.Tensor]:
        """Convert the step's arguments to the tensors that it is fed.

        Sparse tensors become dense; other composites (ragged ones) are fed component by component.
        """
        fed: list[tf.Tensor] = []
        for leaf in tf.nest.flatten(arguments):
            if isinstance(leaf, tf.SparseTensor):
                fed.append(tf.sparse.to_dense(tf.sparse.reorder(leaf)))
            elif _is_composite(leaf):
                fed += tf.nest.flatten(leaf, expand_composites=True)
            elif leaf is not None and not isinstance(leaf, (str, bytes)):
                fed.append(tf.convert_to_tensor(leaf))
        return fed

    def pack_outputs(self, flat: Sequence[tf.Tensor]) -> Any:
        """The step's result from the graph's flat outputs."""
        tensors = iter(flat)

        def packed(leaf: Any) -> Any:
            if not isinstance(leaf, tf.TypeSpec):
                return leaf
            parts = [next(tensors) for _ in tf.nest.flatten(leaf, expand_composites=True)]
            return tf.nest.pack_sequence_as(leaf, parts, expand_composites=True)

        return tf.nest.map_structure(packed, self.output_structure)


def argument_specs(arguments: Any) -> Any:
    """The arguments with a spec in place of each tensor, of static shape unless it is ragged."""

    def spec(leaf):
        if leaf is None or isinstance(leaf, (str, bytes, tf.TypeSpec)):
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            return tf.SparseTensorSpec(leaf.shape, leaf.dtype)
        if _is_composite(leaf):
            return leaf._type_spec
        tensor = leaf if isinstance(leaf, tf.Tensor) else tf.convert_to_tensor(leaf)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    return tf.nest.map_structure(spec, arguments)


def _is_composite(value: Any) -> bool:
    """Whether a value is made of several tensors (or a spec of one that is)."""
    if isinstance(value, tf.TypeSpec):
        return not isinstance(value, tf.TensorSpec)
    return isinstance(value, tf.__internal__.CompositeTensor) and not isinstance(value, tf.Variable)


def capture_step(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    variable_names: Callable[[tf.Variable], VariableName] | None = None,
    name: str = "step",
    build: Callable[[], None] | None = None,
    matters: Callable[[tf.Variable], bool] | None = None,
) -> CapturedStep:
    """Trace `function(*arguments)` and convert it.

    As in `tf.function`, the step is what is traced when all variables are there: the trace that
    makes some may hold what belongs to the making (a slot's first value).

    Args:
        arguments: structures of TensorSpecs (from `argument_specs`) and plain values.
        variable_names: of a captured variable; its own name and flag if None.
        build: makes variables beforehand; its other effects are not carried out.
        matters: whether the step may be another one once this variable, which tracing it made, is
            there.

    Raises:
        CaptureError: the step runs eager-only Python on tensors, or fails while traced.
    """
    ops_traced = 0
    with collection_paused():
        if build is not None:
            # Half an optimizer would be left to the next call.
            built, _ = _trace(build, (), f"build_{name}", interruptible=False)
            ops_traced += len(built.get_operations())
        func_graph, created = _trace(function, arguments, name)
        ops_traced += len(func_graph.get_operations())
        if any(matters is None or matters(v) for v in created):
            func_graph, _ = _trace(function, arguments, name)
            ops_traced += len(func_graph.get_operations())
        marks = func_graph.get_collection(GRADIENTS)
        graph = convert_func_graph(func_graph, [t for _, tensors in marks for t in tensors])
    num_outputs = len(func_graph.outputs)
    marked = iter(graph.outputs[num_outputs:])
    gradient_tensors = [(v, [next(marked) for _ in tensors]) for v, tensors in marks]
    del graph.outputs[num_outputs:]
    by_handle = {id(v.handle): v for v in func_graph.variables}
    externals = [external for external, _ in func_graph.captures]
    num_arguments = len(graph.inputs) - len(externals)
    closure, closure_inputs, variables = [], [], []
    used: dict[str, int] = {}
    read = {tensor for op in graph.ops for tensor in op.inputs}
    for external, tensor in zip(externals, graph.inputs[num_arguments:], strict=True):
        if external.dtype != tf.resource:
            if tensor.op.type == "Const":  # a small eager tensor, captured by its value
                continue
            closure.append(external)
            closure_inputs.append(tensor)
            continue
        if isinstance(_owner(external), tf.lookup.StaticHashTable):  # constant, like a tensor
            closure.append(external)
            closure_inputs.append(tensor)
            continue
        if tensor not in read:  # a shard: see `tf.interop.variables`
            continue
        variable = by_handle.get(id(external))
        if variable is None:
            variable = _parent(external)
        if variable is None:
            raise CaptureError(
                f"The step uses a resource that is not a variable: {_kind(external)}. Move it "
                f"out of the step (into tf.data) and feed its results as inputs."
            )
        path, trainable, place = (variable_names or _own_name)(variable)
        used[path] = used.get(path, 0) + 1
        if used[path] > 1:
            path = f"{path}#{used[path]}"
        shape = tuple(variable.shape.as_list())
        tensor.shape = shape
        graph.variables.append(
            Variable(path, shape, variable.dtype.base_dtype.name, trainable, tensor, place)
        )
        variables.append(variable)
    graph.inputs = graph.inputs[:num_arguments] + closure_inputs
    structure = tf.nest.map_structure(_output_leaf, func_graph.structured_outputs)
    names = {id(v): known.name for v, known in zip(variables, graph.variables, strict=True)}
    gradients = [Gradient(names[id(v)], *ts) for v, ts in gradient_tensors if id(v) in names]
    return CapturedStep(
        graph,
        num_arguments,
        closure,
        variables,
        structure,
        ops_traced=ops_traced,
        gradients=gradients,
    )


def _trace(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    name: str,
    *,
    interruptible: bool = True,
):
    """The FuncGraph of the step, and the variables that tracing it made.

    Sparse arguments are fed dense: how many values they have is not static.

    Args:
        interruptible: see `tf.interop.graphs.trace`.
    """
    created: list[tf.Variable] = []

    def dense(spec):
        is_sparse = isinstance(spec, tf.SparseTensorSpec)
        return tf.TensorSpec(spec.shape, spec.dtype) if is_sparse else spec

    def as_given(spec, value):
        return tf.sparse.from_dense(value) if isinstance(spec, tf.SparseTensorSpec) else value

    def traced(*values):
        return function(*tf.nest.map_structure(as_given, tuple(arguments), values))

    def record(next_creator, **kwargs):
        created.append(next_creator(**kwargs))
        return created[-1]

    try:
        with capturing(), tf.variable_creator_scope(record):
            given = tf.nest.map_structure(dense, tuple(arguments))
            func_graph = trace(
                name, traced, given, add_control_dependencies=True, interruptible=interruptible
            )
            return func_graph, created
    except (
        tf.errors.OperatorNotAllowedInGraphError,
        NotImplementedError,
        AttributeError,
        TypeError,
    ) as error:
        if not _is_eager_only(error):
            raise
        raise CaptureError(
            f"The step cannot be captured as one graph: it uses the value of a tensor in Python "
            f"({_where(error)}: {str(error).splitlines()[0]}). Use tf.cond, tf.where or keras.ops "
            f"instead of Python control flow and .numpy(), or compile the model outside of "
            f"auto_parallel to train it on one device."
        ) from error


def _is_eager_only(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, tf.errors.OperatorNotAllowedInGraphError) or any(
        sign in text for sign in ("numpy()", "'numpy'", "symbolic", "SymbolicTensor", "NumPy array")
    )


_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(sys.modules[name].__file__ or "")) + os.sep
    for name in ("tensorflow", "keras", "tfpar")
    if name in sys.modules
)


def _where(error: BaseException) -> str:
    """File and line of the innermost frame outside TensorFlow, Keras and tfpar."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    converted = getattr(error, "ag_error_metadata", None)
    if converted is not None:  # by AutoGraph, which knows the user's own lines
        frames += [(f.filename, f.lineno) for f in reversed(converted.translated_stack)]
    places = [f"{path}:{line}" for path, line in frames if not path.startswith(_LIBRARIES)]
    return places[-1] if places else "unknown place"


def _parent(handle: tf.Tensor) -> tf.Variable | None:
    parent = _owner(handle)
    return parent if isinstance(parent, tf.Variable) else None


def _owner(handle: tf.Tensor) -> Any:
    reference = getattr(handle, "_parent_trackable", None)
    return reference() if reference is not None else None


def _kind(handle: tf.Tensor) -> str:
    owner = _owner(handle)
    return f"a {type(owner).__name__}" if owner is not None else "a lookup table or an iterator"


def _own_name(variable: tf.Variable) -> VariableName:
    return VariableName(variable.name.partition(":")[0], bool(variable.trainable))


def _output_leaf(leaf: Any) -> Any:
    if isinstance(leaf, tf.Tensor):
        return tf.TensorSpec(leaf.shape, leaf.dtype)
    return leaf._type_spec if _is_composite(leaf) else leaf


# --- batch sizes and specs of arguments -----------------------------------------------------

_SPECS = (tf.TensorSpec, tf.SparseTensorSpec)


def batch_size_of(arguments: Any) -> int | None:
    """The leading dim of the first argument that has one."""
    for leaf in tf.nest.flatten(arguments):
        if isinstance(leaf, _SPECS) and leaf.shape.rank:
            return leaf.shape[0]
    return None


def global_specs(specs: Any, parts: int) -> Any:
    """Specs of a global batch, from those of one of its `parts`."""
    size = batch_size_of(specs)

    def whole(spec: Any) -> Any:
        batched = isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] == size
        if not batched or size is None:
            return spec
        return tf.TensorSpec([size * parts, *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(whole, specs)


def hashable(specs: Any) -> Any:
    """Return a key that is equal for arguments that one trace of a step serves."""
    flat = tf.nest.flatten(specs)
    structure = str(tf.nest.map_structure(lambda _: 0, specs))
    return structure, tuple(
        (type(s), tuple(s.shape.as_list()), s.dtype) if isinstance(s, _SPECS) else s for s in flat
    )
