"""Paths of layers: Keras's own, for the name scopes of a traced graph.

A step's ops lie in scopes such as `gpt_1/block_0_1/att_1/query_1`, numbered by call, while its
weights bear the path of the layer that holds them, `block_0/att/query/kernel`. Each scope that
holds weights thus says what it and those around it are called; ops of other scopes are named after
the nearest of these.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from tfpar.ir.graph_nodes import GraphNode

_COUNT = re.compile(r"_\d+$")


def paths_of(nodes: Sequence[GraphNode], model: str, layers: Container[str] = ()) -> list[str]:
    """The path of each node; no two have the same.

    Args:
        model: the name of the model, which paths may begin with; may be empty.
        layers: paths of the model's layers. Ops of a layer that has no weights are called by it.
    """
    known = index_paths(nodes)
    holders = {path for own in known.values() for path in _upwards(own)}
    found: list[str] = []
    taken: Counter[str] = Counter()
    for node in nodes:
        path = layer_path(node) if node.weights else _path(node.name, known, model)
        around = path.rpartition("/")[0]
        if not node.weights and around in layers and around not in holders and not taken[around]:
            path = around
        taken[path] += 1
        found.append(path if taken[path] == 1 else f"{path}#{taken[path]}")
    return found


def index_paths(nodes: Iterable[GraphNode]) -> dict[str, str]:
    """Map each scope that holds weights, and those around it, to their paths."""
    known: dict[str, str] = {}
    for node in nodes:
        if node.weights:
            known = {**_aligned(node.name, layer_path(node)), **known}
    return known


def layer_path(node: GraphNode) -> str:
    """Return the path of the layer that holds a node's weights: the common part of theirs."""
    holders = [weight.name.rpartition("/")[0].split("/") for weight in node.weights]
    common = os.path.commonprefix(holders)
    return "/".join(common) or node.weights[0].name


def _aligned(scope: str, path: str) -> dict[str, str]:
    """The paths of a scope and of those around it, as far as their names go together."""
    scopes, parts = scope.split("/"), path.split("/")
    while scopes and not _is_call_of(scopes[-1], parts[-1]):
        scopes.pop()  # scopes within the layer
    found = {}
    while scopes and parts and _is_call_of(scopes[-1], parts[-1]):
        found["/".join(scopes)] = "/".join(parts)
        scopes.pop()
        parts.pop()
    return found


def _is_call_of(scope: str, name: str) -> bool:
    return scope == name or _COUNT.sub("", scope) == name


def _path(name: str, known: Mapping[str, str], model: str) -> str:
    """The path of an op whose layer has no weights."""
    for scope in _upwards(name):
        if scope in known:
            return known[scope] + name[len(scope) :]
    first, _, rest = name.partition("/")
    return rest if rest and model and _is_call_of(first, model) else name


def _upwards(path: str) -> list[str]:
    """The path, and those around it."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
