"""Fingerprints: a graph's structure as a hash, the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tfpar.ir.graph import DType, FunctionRef, Graph, Op

_UNSTABLE_ATTRS = frozenset({"value", "seed", "seed2", "shared_name", "container", "shape"})


def fingerprint(graph: Graph, names: Mapping[str, str] | None = None) -> str:
    """Return a hash of the graph's structure that is the same in every process.

    Args:
        names: what variables are called, where not by their own names.

    It covers op types, attributes, dtypes, data edges, the shapes of variables and the names of
    weights. Op names, the order of independent ops, constants and the sizes of activations are
    left out: a plan outlives another batch size, learning rate and seed.
    """
    names = names or {}
    digests: dict[Op, str] = {}
    for position, tensor in enumerate(graph.inputs):
        digests[tensor.op] = f"input {position} {tensor.dtype}"
    for variable in graph.variables:
        name = names.get(variable.name, variable.name) if variable.trainable else None
        digests[variable.handle.op] = f"variable {name} {variable.dtype}{tuple(variable.shape)}"
    bodies: dict[str, str] = {}
    for op in graph.ops:
        if op not in digests:
            digests[op] = _op_digest(op, digests, graph, bodies)
    outputs = [f"{digests[t.op]}:{t.index}" for t in graph.outputs]
    return _hash("\n".join([*sorted(digests.values()), "outputs", *outputs]))


def _op_digest(op: Op, digests: Mapping[Op, str], graph: Graph, bodies: dict[str, str]) -> str:
    parts = [op.type]
    for key, value in sorted(op.attrs.items()):
        if not key.startswith("_") and key not in _UNSTABLE_ATTRS:
            text = _attr_text(value, graph, bodies)
            parts += [f"{key}={text}"] if text is not None else []
    parts += [f"{digests[t.op]}:{t.index}" for t in op.inputs]
    parts += [t.dtype for t in op.outputs]
    return _hash("\n".join(parts))


def _attr_text(value: Any, graph: Graph, bodies: dict[str, str]) -> str | None:
    """The value as text; None for what is a shape or depends on the process."""
    if isinstance(value, FunctionRef):
        if value not in bodies:
            body = graph.functions.get(value)
            bodies[value] = "" if body is None else fingerprint(body)
        return bodies[value]
    if isinstance(value, list):
        texts = [_attr_text(v, graph, bodies) for v in value]
        return None if any(t is None for t in texts) else f"[{', '.join(map(str, texts))}]"
    if isinstance(value, (bool, int, float, str, bytes, DType)):
        return repr(value)
    return None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
