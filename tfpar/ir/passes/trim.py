"""Trim (TAP's first step): leave out what does not compute the step.

Auxiliary ops go: summaries, assertions, debug prints, saving and restoring, initialisation, and
whatever neither an output nor an effect needs. `NoOp` groups dissolve into control
edges. Effects that stay keep their order: a control edge through a removed op becomes
edges to what that op waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tfpar.ir.graph import Graph, Op, Tensor, function_refs
from tfpar.ir.traits import INSPECTIONS, REGIONS, SOURCES, TRACELESS, origin

INITIALIZATION = "initialization"
CHECKPOINT = "checkpoint"
SUMMARY = "summary"
ASSERTION = "assertion"
DEBUGGING = "debugging"
GROUPING = "grouping"
DEAD = "dead code"

_TYPES = {
    CHECKPOINT: (
        "Save",
        "SaveV2",
        "SaveSlices",
        "Restore",
        "RestoreV2",
        "RestoreSlice",
        "MergeV2Checkpoints",
        "ShardedFilename",
        "ShardedFilespec",
    ),
    ASSERTION: ("Assert", "CheckNumerics", "CheckNumericsV2"),
    DEBUGGING: (
        "Print",
        "PrintV2",
        "DebugIdentity",
        "DebugIdentityV2",
        "DebugIdentityV3",
        "DebugNanCount",
        "DebugNumericSummary",
        "DebugNumericSummaryV2",
    ),
    INITIALIZATION: ("VarIsInitializedOp", "IsVariableInitialized"),
    GROUPING: ("NoOp",),
}
_REASON_OF = {op_type: reason for reason, types in _TYPES.items() for op_type in types}


@dataclasses.dataclass(frozen=True, eq=False)
class TrimResult:
    """Result of trimming.

    Attributes:
        graph: the step alone; its ops are copies.
        removed: by reason, the ops of the source graph that are gone, in graph order.
        initial_values: by variable name, the tensor of the source graph that the
            variable's initialiser assigns (graphs of `tf.compat.v1`).
    """

    graph: Graph
    removed: dict[str, list[Op]]
    initial_values: dict[str, Tensor]

    def summary(self) -> str:
        """Summarize how many ops went, by reason: `12 summary, 3 assertion`."""
        return ", ".join(f"{len(ops)} {reason}" for reason, ops in self.removed.items() if ops)


def trim(graph: Graph) -> TrimResult:
    """Trim a graph to the ops that `graph.outputs` and the effects need, without auxiliary ones.

    An auxiliary op whose result is itself an output (a merged summary that is fetched) stays.
    The source graph is left as it is.
    """
    trimming = _Trim(graph, {}, set())
    return TrimResult(trimming.graph(), *_removed(graph, trimming.needed))


class _Trim:
    """One graph; function bodies are trimmed when first met, into `functions`."""

    def __init__(self, source: Graph, functions: dict[str, Graph], entered: set[str]) -> None:
        self.source = source
        self.functions = functions
        self._entered = entered
        self.needed: set[Op] = set()
        self._pulled: set[Op] = set()
        self._mark()

    # --- what is needed ----------------------------------------------------------

    def _mark(self) -> None:
        self.needed.update(t.op for t in self.source.inputs)
        self.needed.update(v.handle.op for v in self.source.variables)
        # Work items: (op, True) must stay; (op, False) only lets its effects run.
        work = [(self._through(t).op, True) for t in self.source.outputs]
        work += [(e, False) for e in self.source.effects]
        while work:
            op, stays = work.pop()
            if stays or self.has_effect(op):
                if op in self.needed:
                    continue
                self.needed.add(op)
                work += [(self._through(t).op, True) for t in op.inputs]
                work += [(c, False) for c in self._waits_for(op)]
            elif op not in self._pulled:
                self._pulled.add(op)
                work += [(t.op, False) for t in op.inputs]
                work += [(c, False) for c in op.control]

    def _through(self, tensor: Tensor) -> Tensor:
        """The tensor that `tensor` hands on unchanged."""
        return origin(tensor, INSPECTIONS)

    def _waits_for(self, op: Op) -> Iterable[Op]:
        """Control inputs, and the control inputs of ops that were only passed through."""
        yield from op.control
        for tensor in op.inputs:
            while tensor.op.type in INSPECTIONS:
                yield from tensor.op.control
                yield from (t.op for t in tensor.op.inputs[1:])
                tensor = tensor.op.inputs[0]

    def has_effect(self, op: Op) -> bool:
        """Whether running `op` changes anything besides its outputs."""
        if not op.stateful or op.type in TRACELESS or is_auxiliary(op.type):
            return False
        if op.type in REGIONS:
            bodies = [self._body(ref) for ref in function_refs(*op.attrs.values())]
            return any(body is None or body.effects for body in bodies)
        return True

    def _body(self, name: str) -> Graph | None:
        """The trimmed body of a function; None inside of itself or if it is not known."""
        if name not in self._entered and name in self.source.functions:
            self._entered.add(name)
            body = _Trim(self.source.functions[name], self.functions, self._entered)
            self.functions[name] = body.graph()
        return self.functions.get(name)

    # --- the graph that is left --------------------------------------------------

    def graph(self) -> Graph:
        result = Graph(functions=self.functions)
        tensors: dict[Tensor, Tensor] = {}
        clones: dict[Op, Op] = {}
        stand_ins = self._stand_ins()
        has_functions = bool(self.source.functions)
        for op in self.source.ops:
            if op not in self.needed:
                continue
            if has_functions:
                for name in function_refs(*op.attrs.values()):
                    self._body(name)
            inputs = []
            passed_through = False
            for tensor in op.inputs:
                passed_through = passed_through or tensor.op.type in INSPECTIONS
                inputs.append(tensors[self._through(tensor)])
            clone = clone_op(op, inputs)
            if op.control or passed_through:
                data = {t.op for t in inputs}
                before = _replaced(self._waits_for(op), stand_ins)
                clone.control = [c for c in map(clones.__getitem__, before) if c not in data]
            clones[op] = clone
            for tensor, cloned in zip(op.outputs, clone.outputs, strict=True):
                tensors[tensor] = cloned
            result.ops.append(clone)
        result.inputs = [tensors[t] for t in self.source.inputs]
        result.outputs = [tensors[self._through(t)] for t in self.source.outputs]
        result.variables = [
            dataclasses.replace(v, handle=tensors[v.handle]) for v in self.source.variables
        ]
        result.effects = [clone for op, clone in clones.items() if self.has_effect(op)]
        return result

    def _stand_ins(self) -> dict[Op, dict[Op, None]]:
        """Return the ops to wait for in place of each op that is gone (an ordered set).

        Nobody needs to wait for a constant either, only for what it waits for. Only for ops that
        one that stays waits for: most that are gone are backward ops that no one asks for.
        """

        def given_up(op: Op) -> bool:
            return op not in self.needed or op.type in SOURCES

        asked: set[Op] = set()
        work = [o for op in self.needed for o in self._waits_for(op) if given_up(o)]
        while work:
            op = work.pop()
            if op not in asked:
                asked.add(op)
                work += [o for o in self._before(op) if given_up(o)]
        stand_ins: dict[Op, dict[Op, None]] = {}
        if asked:
            for op in self.source.ops:
                if op in asked:
                    stand_ins[op] = _replaced(self._before(op), stand_ins)
        return stand_ins

    def _before(self, op: Op) -> Iterable[Op]:
        """Yield the ops after which an op that is given up would run."""
        yield from op.control
        if op not in self.needed:
            yield from (t.op for t in op.inputs)


def _replaced(before: Iterable[Op], stand_ins: dict[Op, dict[Op, None]]) -> dict[Op, None]:
    found: dict[Op, None] = {}
    for op in before:
        if op in stand_ins:
            found.update(stand_ins[op])
        else:
            found[op] = None
    return found


def is_auxiliary(op_type: str) -> bool:
    return _reason(op_type) is not None


def _reason(op_type: str) -> str | None:
    """Why an op of this type is auxiliary; None if it is not."""
    if op_type in _REASON_OF:
        return _REASON_OF[op_type]
    return SUMMARY if "Summary" in op_type or op_type == "ImportEvent" else None


def _removed(graph: Graph, needed: set[Op]) -> tuple[dict[str, list[Op]], dict[str, Tensor]]:
    """The ops that are gone by reason, and the initial value of each variable."""
    handles = {v.handle: v.name for v in graph.variables}
    restored: set[Op] = set()
    initial: dict[str, Tensor] = {}
    reasons: dict[Op, str] = {}
    for op in graph.ops:
        if op in needed:
            continue
        reason = _reason(op.type)
        if op.type.startswith("Restore") or (restored and any(t.op in restored for t in op.inputs)):
            restored.add(op)
            reason = CHECKPOINT
        elif op.type == "AssignVariableOp" and op.inputs[0] in handles:
            # The first assignment in creation order is the variable's own initialiser.
            reason = INITIALIZATION
            initial.setdefault(handles[op.inputs[0]], op.inputs[1])
        reasons[op] = reason or DEAD
    # What served only ops that are gone for one reason is gone for that reason too.
    if any(reason != DEAD for reason in reasons.values()):
        served: dict[Op, set[str]] = {}
        for op in reversed(graph.ops):
            if reasons.get(op) == DEAD and len(served.get(op, ())) == 1:
                (reasons[op],) = served[op]
            own = reasons.get(op, DEAD)
            for tensor in op.inputs:
                if tensor.op in reasons:
                    served.setdefault(tensor.op, set()).add(own)
    by_reason: dict[str, list[Op]] = {
        reason: []
        for reason in (INITIALIZATION, CHECKPOINT, SUMMARY, ASSERTION, DEBUGGING, GROUPING, DEAD)
    }
    for op, reason in reasons.items():
        by_reason[reason].append(op)
    return by_reason, initial


def clone_op(op: Op, inputs: Sequence[Tensor]) -> Op:
    """Copy `op` on `inputs`, without control edges."""
    clone = Op(op.name, op.type, inputs, op.attrs, (), op.stateful)
    for tensor in op.outputs:
        clone.add_output(tensor.shape, tensor.dtype)
    return clone
