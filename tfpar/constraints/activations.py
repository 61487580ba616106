"""Resolution of constraints on activations: the specs of tensors that leave a scope of ops."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tfpar.constraints.constraint_types import (
    Constraint,
    ContextParallel,
    LayoutOutput,
    OutputConstraint,
)
from tfpar.constraints.patterns import compile_pattern, matches_nothing, without_call_counts
from tfpar.constraints.variables import Resolution, batch_axes
from tfpar.ir.graph import Graph, Op, Tensor, is_floating
from tfpar.ir.passes.find_attention import find_attentions
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
    splits = [c for c in constraints if isinstance(c, ContextParallel)]
    if not wanted and not splits:
        return {}
    axes = [mesh.axis(n) for n in batch_axes(constraints, mesh)]
    batch_size = next((t.shape[0] for t in graph.inputs if t.shape), None)
    asked: list[tuple[Constraint, Tensor, Mapping[int, Placement]]] = []
    for constraint in wanted:
        tensors = _border_tensors(graph, constraint.pattern)
        if not tensors and must_match:
            scopes = sorted({s for op in graph.ops for s in scopes_of(op)})
            text = matches_nothing(constraint, constraint.pattern, scopes, "scope or op")
            if not isinstance(constraint, LayoutOutput):  # published maps name what others have
                raise SpecError(text)
            logger.warning("%s", text)
        asked += [(constraint, tensor, constraint.placements(tensor, mesh)) for tensor in tensors]
    for split in splits:
        axis = mesh.axis(split.axis)
        # Where heads may be split along another axis, a spec of them would say that they are whole.
        alone = all(n == 1 or a in (axis, *axes) for a, n in enumerate(mesh.shape))
        sequences = _sequences(graph, split, mesh, alone, must_match)
        asked += [(split, tensor, {axis: Shard(dim)}) for tensor, dim in sequences.items()]
    chosen: dict[Tensor, dict[int, tuple[Placement, Constraint]]] = {}
    for one, tensor, placements in asked:
        for axis, placement in placements.items():
            have = chosen.setdefault(tensor, {}).setdefault(axis, (placement, one))
            if have[0] != placement:
                raise SpecError(
                    f"Tensor {tensor.name!r}: {have[1]} and {one} contradict each other along mesh "
                    f"axis {mesh.axis_names[axis]!r}. Narrow one of them."
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


def _sequences(
    graph: Graph, split: ContextParallel, mesh: Mesh, within: bool, must_match: bool
) -> dict[Tensor, int]:
    """Find what ops compute of each input that has a position of some attention for each entry of
    its second dim, each with its dim of positions.

    Args:
        within: the operands and results of attentions, too.

    Raises:
        SpecError: there is no such input, or their lengths are no multiple of the ranks' number.
    """
    attentions = find_attentions(graph)
    lengths = {a.softmax.outputs[0].shape[-2] for a in attentions}
    inputs = [t for t in graph.inputs if len(t.shape or ()) > 1 and t.shape[1] in lengths]
    if not inputs and must_match:
        found = f"attend over {sorted(lengths)} positions" if lengths else "are none that it knows"
        shapes = ", ".join(str(list(t.shape or ())) for t in graph.inputs)
        raise SpecError(
            f"{split}: the model's attentions {found}, and its inputs have the shapes {shapes}. "
            f"Some input has to have as many entries in its second dim as attention has "
            f"positions; else split what goes into the layers, with shard_output(..., 1, "
            f"{split.axis!r}) and attention='blockwise'."
        )
    parts = mesh.shape[mesh.axis(split.axis)]
    for tensor in inputs:
        if tensor.shape[1] % parts:
            raise SpecError(
                f"{split}: sequences of {tensor.shape[1]} positions cannot be cut into {parts} "
                f"equal parts. Pad them, or use fewer ranks along {split.axis!r}."
            )
    readers = graph.consumers()
    made = {
        out: 1
        for tensor in inputs
        for op in readers.get(tensor, ())
        for out in op.outputs
        if op.type not in SIZES and tuple(out.shape or ())[:2] == tuple(tensor.shape[:2])
    }
    for attention in attentions if within else ():
        rank = len(attention.softmax.outputs[0].shape)
        for layout in (attention.q, attention.k, attention.v, attention.result):
            at = next(d for d, of in enumerate(layout.dims) if of in (rank - 2, rank - 1))
            if layout.tensor.shape[at] % parts == 0:
                made[layout.tensor] = at
    return made


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
