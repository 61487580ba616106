"""Resolution of constraints on activations: the specs of tensors that leave a scope of ops."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tfpar.constraints.constraint_types import Constraint, LayoutOutput, OutputConstraint
from tfpar.constraints.patterns import compile_pattern, matches_nothing, without_call_counts
from tfpar.constraints.variables import Resolution, batch_axes
from tfpar.ir.graph import Graph, Op, Tensor, is_floating
from tfpar.ir.traits import SIZES
from tfpar.spec import Mesh, Placement, Replicate, Shard, SpecError

logger = logging.getLogger("tfpar")

_BACKWARD_SCOPE = "gradient_tape"


def resolve_outputs(
    constraints: Sequence[Constraint],
    graph: Graph,
    mesh: Mesh,
    *,
    must_match: bool = True,
) -> dict[str, Resolution]:
    """Resolve the spec of every tensor (by name) that some constraint on outputs matches."""
    wanted = [c for c in constraints if isinstance(c, OutputConstraint)]
    if not wanted:
        return {}
    axes = [mesh.axis(n) for n in batch_axes(constraints, mesh)]
    batch_size = next((t.shape[0] for t in graph.inputs if t.shape), None)
    chosen: dict[Tensor, dict[int, tuple[Placement, OutputConstraint]]] = {}
    for constraint in wanted:
        tensors = _border_tensors(graph, constraint.pattern)
        if not tensors and must_match:
            scopes = sorted({s for op in graph.ops for s in scopes_of(op)})
            text = matches_nothing(constraint, constraint.pattern, scopes, "scope or op")
            if not isinstance(constraint, LayoutOutput):  # published maps name what others have
                raise SpecError(text)
            logger.warning("%s", text)
        for tensor in tensors:
            for axis, placement in constraint.placements(tensor, mesh).items():
                have = chosen.setdefault(tensor, {}).setdefault(axis, (placement, constraint))
                if have[0] != placement:
                    raise SpecError(
                        f"Tensor {tensor.name!r}: {have[1]} and {constraint} contradict each other "
                        f"along mesh axis {mesh.axis_names[axis]!r}. Narrow one of the patterns."
                    )
    found = {}
    for tensor, placed in chosen.items():
        batched = bool(batch_size) and tensor.shape and tensor.shape[0] % batch_size == 0
        spec = tuple(
            placed[a][0] if a in placed else Shard(0) if batched and a in axes else Replicate()
            for a in range(mesh.num_axes)
        )
        found[tensor.name] = Resolution(spec, tuple(dict.fromkeys(c for _, c in placed.values())))
    return found


def _is_forward(op: Op) -> bool:
    return not op.name.startswith(f"{_BACKWARD_SCOPE}/")


def scopes_of(op: Op) -> list[str]:
    """Return the name scopes around a forward op, outermost first."""
    parts = op.name.split("/")
    if not _is_forward(op):
        return []
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def _border_tensors(graph: Graph, pattern: str) -> list[Tensor]:
    compiled = compile_pattern(pattern)

    def matches(name: str) -> bool:
        return bool(compiled.fullmatch(name) or compiled.fullmatch(without_call_counts(name)))

    members: dict[str, list[Op]] = {}
    for op in graph.ops:
        # The outermost scope that matches; those inside belong to it.
        scope = next((s for s in scopes_of(op) if matches(s)), None)
        if scope is not None:
            members.setdefault(scope, []).append(op)
    if not members:
        named = (op for op in graph.ops if _is_forward(op) and matches(op.name))
        return [op.outputs[0] for op in named if op.outputs]
    readers = graph.consumers()
    returned = set(graph.outputs)
    leaving = (_leaving(ops, readers, returned) for ops in members.values())
    return [t for t in leaving if t is not None]


def _leaving(
    ops: Sequence[Op], readers: Mapping[Tensor, Sequence[Op]], returned: set[Tensor]
) -> Tensor | None:
    """The last floating tensor that forward ops outside of `ops` read: a layer's output."""
    inside = set(ops)
    for op in reversed(ops):
        if not op.outputs or not op.outputs[0].shape or not is_floating(op.outputs[0].dtype):
            continue
        tensor = op.outputs[0]
        if tensor in returned or any(
            r not in inside and _is_forward(r) and r.type not in SIZES
            for r in readers.get(tensor, ())
        ):
            return tensor
    return None
