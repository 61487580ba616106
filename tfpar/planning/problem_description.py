"""Description of a problem as text, from which the differences between two problems are read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec

import tfpar
from tfpar.planning.problem import Planner, Problem
from tfpar.plans.difference import abbreviate_list
from tfpar.spec import format_spec
from tfpar.spec.quantities import format_bytes

FORMAT: Final = 1
"""Of descriptions: others are passed over."""


class Description(TypedDict):
    """A problem as JSON has it; see `describe_problem`."""

    format: Literal[1]  # `FORMAT`
    tfpar: str
    planner: str
    ranks: int
    meshes: Annotated[list[str], msgspec.Meta(min_length=1)]
    cluster: str
    machines: str
    memory_limit: Annotated[float, msgspec.Meta(ge=0)]
    batch: list[tuple[list[int | None], str, bool]]
    weights: dict[str, str]
    ops: dict[str, int]
    graph: str
    constraints: list[str]
    options: dict[str, Any]


def describe_problem(problem: Problem, planner: Planner) -> Description:
    """Describe all that `cache.problem_digest` tells problems apart by, as far as it can be
    said."""
    graph, cluster = problem.step.graph, problem.cluster
    fixed = {**problem.given.variables, **problem.given.tensors}
    return {
        "format": FORMAT,
        "tfpar": tfpar.__version__,
        "planner": planner.name,
        "ranks": problem.meshes[0].mesh.size,
        "meshes": [str(logical) for logical in problem.meshes],
        "cluster": cluster.name,
        "machines": cluster.with_memory(1.0).fingerprint(),
        "memory_limit": problem.memory_limit,
        "batch": [(list(t.shape or ()), t.dtype, t in problem.step.batched) for t in graph.inputs],
        "weights": {v.name: f"{v.dtype}{list(v.shape)}" for v in graph.variables if v.trainable},
        "ops": dict(Counter(op.type for op in graph.ops)),
        "graph": problem.step.fingerprint,
        "constraints": list(problem.given.constraints)
        or sorted(f"{name}: {format_spec(f.spec)}" for name, f in fixed.items()),
        "options": {
            "optimizer slots per byte of weight": problem.step.state_ratio
            and round(problem.step.state_ratio, 3),
            "compression": problem.step.compression,
            "jit_compile": problem.step.jit_compile,
            "recompute": problem.storage.recompute
            if isinstance(problem.storage.recompute, bool | None)
            else list(problem.storage.recompute),
            "attention": problem.storage.attention,
            "offload": problem.storage.offload
            and repr(dataclasses.astuple(problem.storage.offload)),
            "microbatches": problem.batch.microbatches,
            "sets of ranks": problem.batch.num_actors,
            "batch_statistics": problem.batch.batch_statistics,
        },
    }


def diff_descriptions(old: Description, new: Description) -> list[str]:
    """List in what `new` is another problem than `old`, each in a few words.

    What follows from something else is left out: another mesh takes other devices of a cluster, and
    other weights are used by other ops.
    """
    return [*_asked_otherwise(old, new), *_another_model(old, new)]


def _asked_otherwise(old: Description, new: Description) -> Iterator[str]:
    if old["tfpar"] != new["tfpar"]:
        yield f"tfpar's version ({old['tfpar']} -> {new['tfpar']})"
    if old["planner"] != new["planner"]:
        yield f"the planner ({old['planner']} -> {new['planner']})"
    if old["ranks"] != new["ranks"]:
        yield f"the mesh ({old['ranks']} -> {new['ranks']} ranks)"
    elif old["meshes"] != new["meshes"]:
        before, now = _meshes(old), _meshes(new)
        yield f"the mesh ({before} -> {now})" if before != now else "the meshes to choose from"
    if old["cluster"] != new["cluster"]:
        yield f"the cluster ({old['cluster']} -> {new['cluster']})"
    elif old["ranks"] == new["ranks"] and old["machines"] != new["machines"]:
        yield f"the figures of cluster {new['cluster']}"
    elif old["ranks"] == new["ranks"] and old["memory_limit"] != new["memory_limit"]:
        limits = (format_bytes(one["memory_limit"]) for one in (old, new))
        yield f"the memory limit ({' -> '.join(limits)})"
    left, kept = old["constraints"], new["constraints"]
    if left != kept:
        changed = [f"without {c}" for c in left if c not in kept]
        changed += [f"with {c}" for c in kept if c not in left]
        yield f"the constraints ({abbreviate_list(changed, quote=False) or 'in another order'})"
    for name, value in new["options"].items():
        if old["options"].get(name) != value:
            yield f"{name} ({old['options'].get(name)} -> {value})"


def _meshes(described: Description) -> str:
    first, *others = described["meshes"]
    return f"one of {len(others) + 1}" if others else str(first)


def _another_model(old: Description, new: Description) -> Iterator[str]:
    if old["batch"] != new["batch"]:
        sizes = [_batch_sizes(one) for one in (old, new)]
        rest = [_without_batch(one) for one in (old, new)]
        if rest[0] == rest[1] and sizes[0] != sizes[1]:
            yield f"the batch ({sizes[0]} -> {sizes[1]})"
        else:
            yield "the shapes or types of the batch"
    if old["weights"] != new["weights"]:
        before, now = old["weights"], new["weights"]
        changed = [n for n in {**before, **now} if before.get(n) != now.get(n)]
        yield f"the weights ({abbreviate_list(changed)})"
    elif old["graph"] != new["graph"]:
        counts = {
            kind: new["ops"].get(kind, 0) - old["ops"].get(kind, 0)
            for kind in {**old["ops"], **new["ops"]}
        }
        changed = [f"{count:+d} {kind}" for kind, count in sorted(counts.items()) if count]
        yield f"the ops ({abbreviate_list(changed, quote=False) or 'as many, joined otherwise'})"


def _batch_sizes(described: Description) -> str:
    sizes = dict.fromkeys(shape[0] for shape, _, batched in described["batch"] if batched and shape)
    return " and ".join(map(str, sizes)) or "none"


def read_description(data: Any) -> Description | None:
    """Read a description from JSON; None where it is none, or one of another format."""
    try:
        return msgspec.convert(data, Description)
    except msgspec.ValidationError:
        return None


def _without_batch(described: Description) -> list[Any]:
    return [[shape[batched:], dtype, batched] for shape, dtype, batched in described["batch"]]
