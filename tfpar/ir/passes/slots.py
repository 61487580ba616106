"""Optimizer slots apart from their weights: in the memory of the host, or with specs of their own.

In the memory of the host they are on the device only while their weight is updated.

    m = ReadVariableOp(%slot)                  m = ReadVariableOp(%slot)    on the host
    d = Mul(Sub(%gradient, m), rate)           d = Mul(Sub(%gradient, m), rate)
    AssignAddVariableOp(%slot, d)     becomes  n = AddV2(m, d)
    n = ReadVariableOp(%slot)                  AssignVariableOp(%slot, n)   on the host
    AssignSubVariableOp(%weight, n)            AssignSubVariableOp(%weight, n)

A step reads each slot once and writes it once, on the host; in between the device computes, as
without: the same kernels on the same numbers. So slots cross the link once each way, whatever the
optimizer. (ZeRO-Offload updates weights on the CPU, which moves the gradient down and the weight
up: half as much for Adam. But an optimizer of single ops goes over all arrays many times, see
`cost.op_compute`, and the memory of a host is no faster than the link.)

Where slots are read early, all would be on the device at once. So a read waits, by control edges,
for the gradient of its weight, and until slots that were read before are back on the host: those of
`IN_FLIGHT` weights are on the device at a time, so that one's travel while another's are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from tfpar.ir.graph import DType, Gradient, Graph, Op, Tensor, Variable
from tfpar.ir.order import sort_topologically
from tfpar.ir.passes.copy import copy_graph
from tfpar.ir.traits import ASSIGNMENTS, GIVES, IN_FLIGHT, ON_HOST, REGIONS, TAKES, VARIABLE_READS
from tfpar.spec import PlanError

_SIMPLE = ASSIGNMENTS | {"ReadVariableOp", "VariableShape"}
"""Those that read or write a variable as a whole."""

_ADDED = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}


def offload_slots(
    graph: Graph,
    weights: Collection[str],
    slots: Mapping[str, str],
    gradients: Sequence[Gradient] = (),
) -> Graph:
    """Return a copy of `graph` in which the slots of some weights are in the memory of the host.

    Args:
        weights: their names.
        slots: those of them that the graph has, with the weight of each; none in a graph that was
            cut at its gradients, whose weights are marked alone.
        gradients: what enters the optimizer, of `graph`.

    Raises:
        PlanError: an op needs a slot on the device: it uses other variables too, or is a loop or a
            branch.
    """
    found, copies = copy_graph(graph)
    found.variables = [
        dataclasses.replace(v, offloaded=v.name in slots or v.name in weights)
        for v in found.variables
    ]
    handles = {v.handle: v for v in found.variables if v.name in slots}
    if not handles:
        return found
    for slot, op in needed_on_device(found, slots).items():
        raise PlanError(_why_not(slot, slots[slot], op))
    awaited = {g.variable: [copies[t.op] for t in g.tensors if t.op in copies] for g in gradients}
    return _Writer(found, handles, slots, awaited).write()


def needed_on_device(graph: Graph, slots: Collection[str]) -> dict[str, Op]:
    """Find those of some slots that cannot be in host memory, each with an op that needs it on the
    device: one that uses other variables with it, or runs a body on it."""
    handles = {v.handle: v.name for v in graph.variables if v.name in slots}
    found: dict[str, Op] = {}
    for op in graph.ops:
        own = [t for t in op.inputs if t in handles]
        others = [t for t in op.inputs if t.dtype == "resource" and t not in own[:1]]
        if own and (others or op.type in REGIONS):
            for tensor in own:
                found.setdefault(handles[tensor], op)
    return found


def _why_not(slot: str, weight: str, op: Op) -> str:
    why = "runs a body on it" if op.type in REGIONS else "uses other variables with it"
    return (
        f"The optimizer slot {slot!r} cannot lie in host memory: {op.type} {op.name!r} {why}. "
        f"Leave the weight {weight!r} out of what is offloaded (offload=), or use an optimizer "
        f"of single ops, as Keras's are."
    )


class _Writer:
    """Writes the accesses of slots anew, in the order of the graph.

    All that is added waits for ops that come before it there: no circle is closed.

    Args:
        handles: of the slots.
        slots: by name, the weight of each.
        awaited: by weight, the ops that make its gradient.
    """

    def __init__(
        self,
        graph: Graph,
        handles: Mapping[Tensor, Variable],
        slots: Mapping[str, str],
        awaited: Mapping[str, Sequence[Op]],
    ) -> None:
        self._graph, self._handles = graph, handles
        self._weight = {h: slots[v.name] for h, v in handles.items()}
        self._awaited = awaited
        users = graph.consumers()
        self._whole = {h for h in handles if all(o.type in _SIMPLE for o in users.get(h, ()))}
        self._last = {
            [op for op in users[h] if op.type not in VARIABLE_READS][-1]: h
            for h in handles
            if any(op.type not in VARIABLE_READS for op in users.get(h, ()))
        }
        self._reads: dict[Tensor, Op] = {}  # by slot, its first
        self._values: dict[Tensor, Tensor] = {}  # by slot, what it is to hold
        self._replaced: dict[Tensor, Tensor] = {}
        self._instead: dict[Op, list[Op]] = {}  # what is waited for in the place of what is gone
        self._stored: dict[str, list[Op]] = {}  # by weight, the last writes of its slots so far
        self._before: set[Op] = set()
        self._ops: list[Op] = []

    def write(self) -> Graph:
        """The graph, changed in place."""
        graph = self._graph
        stores: dict[Op, Op] = {}
        for op in graph.ops:
            op.inputs = [self._replaced.get(t, t) for t in op.inputs]
            handle = next((t for t in op.inputs if t in self._handles), None)
            if handle is None:
                self._ops.append(op)
            elif handle in self._whole and op.type != "VariableShape":
                self._access(op, handle)
            else:
                self._move(op, handle)
            if handle is not None and op in self._last:
                stores[op] = self._store(op, handle)
            self._before.add(op)
        for op in self._ops:
            waited = (there for c in op.control for there in self._there(c))
            op.control = [c for c in dict.fromkeys(waited) if c is not op]
        effects = (stores.get(e, e) for e in graph.effects if e in stores or e not in self._instead)
        graph.effects = list(dict.fromkeys(effects))
        graph.outputs = [self._replaced.get(t, t) for t in graph.outputs]
        graph.ops = sort_topologically(self._ops)
        return graph

    def _there(self, op: Op) -> Iterator[Op]:
        """Yield the ops that run in place of `op`, or itself: those to wait for."""
        if op not in self._instead:
            yield op
        else:
            for other in self._instead[op]:
                yield from self._there(other)

    def _access(self, op: Op, handle: Tensor) -> None:
        """A read or an assignment of a slot that is read and written whole."""
        if op.type == "ReadVariableOp" and handle not in self._values:
            self._first_read(op, handle)
            return
        if op.type == "ReadVariableOp":
            self._replaced[op.outputs[0]] = self._values[handle]
        elif op.type == "AssignVariableOp":
            self._values[handle] = op.inputs[1]
        else:
            if handle not in self._values:
                read = Op(f"{op.name}/read", "ReadVariableOp", [handle], stateful=True)
                read.attrs = {"dtype": DType(op.inputs[1].dtype)}
                read.add_output(handle.shape, op.inputs[1].dtype)
                self._first_read(read, handle)
            made = Op(f"{op.name}/value", _ADDED[op.type], [self._values[handle], op.inputs[1]])
            made.attrs = {"T": DType(op.inputs[1].dtype)}
            self._values[handle] = made.add_output(handle.shape, op.inputs[1].dtype)
            self._ops.append(made)
        self._instead[op] = [self._values[handle].op, *op.control]

    def _first_read(self, read: Op, handle: Tensor) -> None:
        self._reads[handle] = read
        self._values[handle] = read.outputs[0]
        self._move(read, handle)

    def _move(self, op: Op, handle: Tensor) -> None:
        """Have `op` run on the host, once its weight's turn has come."""
        weight = self._weight[handle]
        others = [stores for name, stores in self._stored.items() if name != weight]
        turn = others[-IN_FLIGHT] if len(others) >= IN_FLIGHT else []
        gradient = [g for g in self._awaited.get(weight, ()) if g in self._before]
        op.attrs = {**op.attrs, ON_HOST: GIVES if op.outputs else TAKES}
        op.control = [*op.control, *gradient, *turn]
        self._ops.append(op)

    def _store(self, last: Op, handle: Tensor) -> Op:
        """Return the op that writes a slot for the last time in a step, in place of `last`."""
        store = last
        if handle in self._whole:
            value = self._values[handle]
            store = Op(f"{last.name}/store", "AssignVariableOp", [handle, value], stateful=True)
            store.attrs = {"dtype": DType(value.dtype), "validate_shape": False, ON_HOST: TAKES}
            store.control = [*last.control, *filter(None, [self._reads.get(handle)])]
            self._ops.append(store)
        weight = self._weight[handle]
        self._stored[weight] = [*self._stored.pop(weight, ()), store]
        return store


# --- specs of their own ---------------------------------------------------------------------
#     %gradient -> AssignSub(%weight)     becomes     %gradient -> Identity -> AssignSub(%weight)
#
# The Identity stands for the optimizer's work and has the spec of the slots: if these are split, it
# reads the gradient split (a reduce-scatter), and the weight is given the whole of it (a gather).

_MARK = "slots_of"


def name_of_slots(weight: str) -> str:
    """Return the name of the tensor that a weight's optimizer computes."""
    return f"slots/{weight}:0"


def separate_slots(
    graph: Graph, stand_ins: Collection[Op], weights: Collection[str]
) -> tuple[Graph, dict[Op, Op]]:
    """Return a copy of a planning graph in which the slots of some weights can have other specs
    than these, and the copy of each op.

    Args:
        stand_ins: the updates (`PlanningGraph.stand_ins`).
        weights: names of variables.
    """
    found, copies = copy_graph(graph)
    names = {v.handle: v.name for v in found.variables}
    before: dict[Op, Op] = {}
    for op in stand_ins:
        update = copies[op]
        weight, gradient = names[update.inputs[0]], update.inputs[1]
        if weight in weights:
            slots = Op(name_of_slots(weight).removesuffix(":0"), "Identity", [gradient])
            slots.attrs = {"T": DType(gradient.dtype), _MARK: weight}
            update.inputs[1] = slots.add_output(gradient.shape, gradient.dtype)
            before[update] = slots
    ops = [new for op in found.ops for new in (*filter(None, [before.get(op)]), op)]
    apart = Graph(ops, found.inputs, found.outputs, found.variables, found.functions, found.effects)
    return apart, copies


def find_separate_slots(graph: Graph) -> Mapping[str, Tensor]:
    """Find the tensor that stands for the optimizer's work on each weight whose slots are sharded
    separately, by the weight's name."""
    return {str(op.attrs[_MARK]): op.outputs[0] for op in graph.ops if _MARK in op.attrs}
