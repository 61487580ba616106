"""TensorArrays of TensorFlow 1 as tensor lists.

The ops of a TensorArray work on a handle, and hand on a scalar, the flow, by which they are
ordered: loops carry it round, and `tf.gradients` sends gradients against it. Here the flow is the
list itself, and the handle its length. The gradient of a flow is the list of the gradients: what is
written into a gradient array makes a list of its own, zero elsewhere, and lists add up where flows
do.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from tfpar.ir.traits import ADDITIONS
from tfpar.spec import CaptureError
from tfpar.tf.capture.graph_def import GraphCopy, become, import_graph, split_inputs, split_name
from tfpar.tf.capture.loops_v1 import cut_loops

_ARRAY = "TensorArrayV3"
_GRADIENT = "TensorArrayGradV3"
_FLOW_INPUTS = {
    _GRADIENT: 1,
    "TensorArrayWriteV3": 3,
    "TensorArrayReadV3": 2,
    "TensorArrayScatterV3": 3,
    "TensorArrayGatherV3": 2,
    "TensorArraySizeV3": 1,
}
"""Which input of an op is the flow; the first one is the handle."""

_FLOW_OUTPUTS = (_ARRAY, "TensorArrayWriteV3", "TensorArrayScatterV3")
_WRITES = {"TensorArrayWriteV3": 2, "TensorArrayScatterV3": 2}
"""Which input is put into the array."""

_HANDS_ON = ("Identity", "Enter", "Exit", "Switch", "Merge", "NextIteration", "ZerosLike")
_PUSH = "StackPushV2"


def with_element_shapes(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """The graph with what TensorArrays hold said, where it follows from what is written."""
    open_arrays = {n.name for n in graph_def.node if n.op == _ARRAY and not _says_shape(n)}
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    nodes = {node.name: node for node in result.node}
    written = {n.name: _origin(n.input[0], nodes) for n in result.node if n.op in _WRITES}
    found = True
    while found and open_arrays:
        found = False
        graph = import_graph(cut_loops(result))
        for name, array in written.items():
            if array.name not in open_arrays:
                continue
            value = graph.get_operation_by_name(name).inputs[_WRITES[nodes[name].op]]
            shape = value.shape if nodes[name].op == "TensorArrayWriteV3" else value.shape[1:]
            if shape.is_fully_defined():
                array.attr["element_shape"].shape.CopyFrom(shape.as_proto())
                array.attr["identical_element_shapes"].b = True
                open_arrays.remove(array.name)
                found = True
    return result


def without_arrays(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """The graph with a tensor list in the place of each TensorArray.

    Raises:
        CaptureError: an op on a TensorArray that has no such form.
    """
    if not any(node.op.startswith("TensorArray") for node in graph_def.node):
        return graph_def
    return _Conversion(graph_def).run()


class _Conversion:
    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self._copy = GraphCopy(graph_def)
        self._nodes = self._copy.nodes
        self._source = {node.name: node for node in graph_def.node}
        self._handles: set[str] = set()
        for node in graph_def.node:
            if node.op.startswith("TensorArray"):
                self._check(node)
        self._flows = self._find_flows()

    def run(self) -> graph_pb2.GraphDef:
        for source in self._source.values():
            if source.op in (_ARRAY, *_FLOW_INPUTS):
                self._convert_array_op(source)
            elif source.name in self._handles:
                node = self._nodes[source.name]
                node.attr["T"].type = tf.int32.as_datatype_enum
                node.input[0] = self._length(source.input[0])
            elif source.name in self._flows:
                self._convert_flow(source)
        return self._copy.graph_def

    # --- what there is -----------------------------------------------------------

    def _check(self, node: node_def_pb2.NodeDef) -> None:
        """Refuse what has no form for lists; note what hands on the handle."""
        if node.op not in (_ARRAY, *_FLOW_INPUTS):
            _refuse(node, "has no form for tensor lists")
        if node.op == _ARRAY:
            if node.attr["dynamic_size"].b:
                _refuse(node, "grows as it is written")
            if not _says_shape(node):
                _refuse(node, "holds elements whose shape is not known")
            return
        before = self._source[split_name(node.input[0])[0]]
        while before.op not in (_ARRAY, _GRADIENT):
            self._handles.add(before.name)
            before = self._source[split_name(before.input[0])[0]]

    def _find_flows(self) -> dict[str, node_def_pb2.NodeDef]:
        """Map each op that gives or hands on a flow to the array that the flow belongs to."""
        readers: dict[str, list[node_def_pb2.NodeDef]] = {}
        for node in self._source.values():
            for name in split_inputs(node)[0]:
                readers.setdefault(split_name(name)[0], []).append(node)
        stack = [
            (node.name, _origin(node.name, self._source))
            for node in self._source.values()
            if node.op in _FLOW_OUTPUTS
        ]
        for node in self._source.values():
            if node.op in _FLOW_INPUTS and not self._starts(node):
                flow = split_name(node.input[_FLOW_INPUTS[node.op]])[0]
                stack.append((flow, _origin(node.input[0], self._source)))
        found: dict[str, node_def_pb2.NodeDef] = {}
        while stack:
            name, array = stack.pop()
            if name in found:
                continue
            found[name], node = array, self._source[name]
            if node.op in (*_HANDS_ON, *ADDITIONS):
                data = split_inputs(node)[0][: 1 if node.op == "Switch" else None]
                stack += [(split_name(i)[0], array) for i in data]
            elif node.op not in (*_FLOW_OUTPUTS, _PUSH, "Const"):
                _refuse(array, f"is ordered by what {node.op} {name!r} gives")
            for reader in readers.get(name, ()):
                if reader.op in (*_HANDS_ON, *ADDITIONS, _PUSH):
                    stack.append((reader.name, array))
        return found

    def _starts(self, node: node_def_pb2.NodeDef) -> bool:
        """Whether an op makes a list of gradients: it takes nothing of the flow that it is given.

        That flow is the one of the values, handed on so that they are there first.
        """
        if node.op == _GRADIENT:
            return True
        before = self._source[split_name(node.input[0])[0]]
        while before.name in self._handles:
            before = self._source[split_name(before.input[0])[0]]
        return before.op == _GRADIENT and node.op in _WRITES

    def _check_first(self, write: node_def_pb2.NodeDef) -> None:
        """Refuse what adds to a gradient that is written already, as `tf.gradients` never does."""
        before = self._source[split_name(write.input[_FLOW_INPUTS[write.op]])[0]]
        while before.op in ("Identity", "Enter", "Switch"):
            before = self._source[split_name(before.input[0])[0]]
        if before.op == "Merge" or (before.op in _WRITES and self._starts(before)):
            _refuse(write, "adds to a gradient array that is written already")

    # --- what becomes of it ------------------------------------------------------

    def _convert_array_op(self, source: node_def_pb2.NodeDef) -> None:
        data, waits = split_inputs(source)
        array = _origin(source.name, self._source)
        dtype = tf.as_dtype(array.attr["dtype"].type)
        node = self._nodes[source.name]
        if source.op == _ARRAY:
            self._become_list(node, array, data[0], waits)
            return
        length = self._length(data[0])
        if self._starts(source):
            self._start(node, source, array, length)
            return
        flow = self._list(data[_FLOW_INPUTS[source.op]])
        of = {"element_dtype": dtype}
        match source.op:
            case "TensorArraySizeV3":
                become(node, "Identity", [length], waits, T=tf.int32)
            case "TensorArrayWriteV3":
                become(node, "TensorListSetItem", [flow, data[1], data[2]], waits, **of)
            case "TensorArrayScatterV3":
                inputs = [flow, data[2], data[1]]
                become(node, "TensorListScatterIntoExistingList", inputs, waits, **of)
            case "TensorArrayGatherV3":
                inputs = [flow, data[1], self._shape(source.name, array, flow)]
                become(node, "TensorListGather", inputs, waits, **of)
            case "TensorArrayReadV3":
                inputs = [flow, data[1], self._shape(source.name, array, flow)]
                become(node, "TensorListGetItem", inputs, waits, **of)

    def _start(
        self,
        node: node_def_pb2.NodeDef,
        source: node_def_pb2.NodeDef,
        array: node_def_pb2.NodeDef,
        length: str,
    ) -> None:
        """A list of gradients, zero but where `source` writes."""
        data, waits = split_inputs(source)
        dtype = tf.as_dtype(array.attr["dtype"].type)
        if source.op in _WRITES:
            self._check_first(source)
        match source.op:
            case "TensorArrayGradV3":
                become(node, "NoOp", [], [*waits, split_name(length)[0]])
            case "TensorArrayWriteV3":
                zeros = self._copy.add(f"{source.name}/zeros", "NoOp", [])
                self._become_list(self._nodes[zeros], array, length, [])
                inputs = [zeros, data[1], data[2]]
                become(node, "TensorListSetItem", inputs, waits, element_dtype=dtype)
            case "TensorArrayScatterV3":  # what was gathered twice has two gradients
                total = self._copy.add(
                    f"{source.name}/sum",
                    "UnsortedSegmentSum",
                    [data[2], data[1], length],
                    waits,
                    T=dtype,
                    Tindices=tf.int32,
                    Tnumsegments=tf.int32,
                )
                inputs = [total, self._shape(source.name, array, total)]
                become(
                    node,
                    "TensorListFromTensor",
                    inputs,
                    waits,
                    element_dtype=dtype,
                    shape_type=tf.int32,
                )

    def _convert_flow(self, source: node_def_pb2.NodeDef) -> None:
        node, array = self._nodes[source.name], self._flows[source.name]
        data, waits = split_inputs(source)
        if source.op == "Const":  # of a flow that has no gradient
            if tf.make_ndarray(source.attr["value"].tensor).any():
                _refuse(array, f"is ordered by what Const {source.name!r} gives")
            self._become_list(node, array, split_inputs(array)[0][0], waits)
        elif source.op in ADDITIONS:
            become(node, "AddN", list(map(self._list, data)), waits, N=len(data), T=tf.variant)
        else:
            node.attr["T"].type = tf.variant.as_datatype_enum
            for position, name in enumerate(data):
                if split_name(name)[0] in self._flows:
                    node.input[position] = self._list(name)

    def _list(self, flow: str) -> str:
        """The list that a flow is."""
        name, index = split_name(flow)
        return name if self._source[name].op == _ARRAY else f"{name}:{index}"

    def _length(self, handle: str) -> str:
        """The length of the list that a handle is of."""
        node = self._source[split_name(handle)[0]]
        while node.op == _GRADIENT:
            handle = node.input[0]
            node = self._source[split_name(handle)[0]]
        return node.input[0] if node.op == _ARRAY else handle

    def _become_list(
        self,
        node: node_def_pb2.NodeDef,
        array: node_def_pb2.NodeDef,
        length: str,
        waits: Sequence[str],
    ) -> None:
        """A list of zeros."""
        shape = self._shape(node.name, array, length)
        dtype = tf.as_dtype(array.attr["dtype"].type)
        become(
            node,
            "TensorListReserve",
            [shape, length],
            waits,
            element_dtype=dtype,
            shape_type=tf.int32,
        )

    def _shape(self, name: str, array: node_def_pb2.NodeDef, beside: str) -> str:
        """The shape of an element as a constant, in the frame of the tensor `beside`."""
        shape = tf.TensorShape(array.attr["element_shape"].shape)
        return self._copy.add_shape(name, shape, [split_name(beside)[0]])


def _says_shape(array: node_def_pb2.NodeDef) -> bool:
    return tf.TensorShape(array.attr["element_shape"].shape).is_fully_defined()


def _origin(name: str, nodes: dict[str, node_def_pb2.NodeDef]) -> node_def_pb2.NodeDef:
    """The array that a handle means, or an op works on; of a gradient, the array of the values."""
    node = nodes[split_name(name)[0]]
    while node.op != _ARRAY:
        if node.op not in (*_FLOW_INPUTS, "Enter", "Identity", "Switch"):
            _refuse(node, "gives a TensorArray that is not known")
        node = nodes[split_name(node.input[0])[0]]
    return node


def _refuse(node: node_def_pb2.NodeDef, why: str) -> None:
    raise CaptureError(
        f"{node.op} {node.name!r} {why}. Build the graph with "
        f"tf.compat.v1.enable_control_flow_v2()."
    )
