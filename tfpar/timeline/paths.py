"""Keras's paths of the ops of a step: `net_1/up_1/MatMul` is of `net/up`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

from tfpar.ir.graph import Graph, Op
from tfpar.ir.graph_nodes import NodeGraph, cluster
from tfpar.ir.roles import PHASES, Roles

TAPE = "gradient_tape/"
STEP = "step"
_COUNT = re.compile(r"_\d+$")


class Origins:
    """The ops of a captured step, found by the names of what was written for them.

    Local ops are called after the op that they are for, and what follows: `up/MatMul/reshard/Cast`.

    Args:
        roles: of the graph.
    """

    def __init__(self, graph: Graph, roles: Roles) -> None:
        self._ops = {op.name: op for op in graph.ops}
        self._roles = roles
        self._nodes = cluster(graph, roles)
        self._scopes = _paths_of_scopes(self._nodes)

    def phase(self, name: str) -> str:
        """`forward`, `backward` or `update`."""
        op = self._origin(name)
        return PHASES[0] if op is None else PHASES[self._roles.phase[op]]

    def path(self, name: str) -> str:
        """The Keras path of the layer for which an op of this name is; of ops outside of layers
        what they are in, `adam` or `compile_loss`, or `STEP`."""
        op = self._origin(name)
        node = None if op is None else self._nodes.node_of.get(op)
        if node is not None and node.weights:
            scope = node.name
        else:
            scope = name.rpartition("/")[0] if op is None else op.scope
        while scope in self._ops:  # TensorFlow puts constant operands below what reads them
            scope = scope.rpartition("/")[0]
        return self._path_of_scope(scope.removeprefix(TAPE))

    def _origin(self, name: str) -> Op | None:
        while name:
            found = self._ops.get(name) or self._ops.get(_COUNT.sub("", name))
            if found is not None:
                return found
            name = name.rpartition("/")[0]
        return None

    def _path_of_scope(self, scope: str) -> str:
        """By the scopes around it that hold weights, whose paths are Keras's own. Of one that is
        in none of them (`adam`, `compile_loss`) the outermost part."""
        parts, known = scope.split("/"), len(scope.split("/"))
        while known and "/".join(parts[:known]) not in self._scopes:
            known -= 1
        outermost = _COUNT.sub("", parts[0])
        if not known:  # ops outside of all scopes are called after their types
            return STEP if not scope or scope[0].isupper() else outermost
        counted, path = self._scopes["/".join(parts[:known])]
        rest = parts[known:]
        if counted:  # as all layers are: what is not is a scope of TensorFlow's own
            layers = itertools.takewhile(_COUNT.search, rest)
            rest = [_COUNT.sub("", part) for part in layers]
        return "/".join(filter(None, (path, *rest))) or outermost


def _paths_of_scopes(nodes: NodeGraph) -> Mapping[str, tuple[bool, str]]:
    """By scope: whether TensorFlow has counted it up (`up_1` of `up`), and its path.

    They are read off the scopes that hold weights, as these know Keras's path to them.
    """
    found: dict[str, tuple[bool, str]] = {}
    for node in nodes.weighted():
        scope = node.name.split("/")
        for path in _layers(v.name for v in node.weights):
            layers = path.split("/")
            if len(layers) > len(scope):
                continue
            outside = len(scope) - len(layers)  # a path need not begin with the model
            inside = scope[outside:]
            if all(_is_called(s, k) for s, k in zip(inside, layers, strict=True)):
                counted = scope[-1] != layers[-1]
                for depth in range(1, len(layers) + 1):
                    around = "/".join(scope[: outside + depth])
                    found.setdefault(around, (counted, "/".join(layers[:depth])))
                if outside:
                    found.setdefault("/".join(scope[:outside]), (counted, ""))
                break
    return found


def _layers(names: Iterable[str]) -> list[str]:
    """The paths of the layers that hold variables of these paths, the longest first."""
    paths = {name.rpartition("/")[0] for name in names}
    return sorted(filter(None, paths), key=lambda path: (-path.count("/"), path))


def _is_called(scope: str, layer: str) -> bool:
    return scope == layer or _COUNT.sub("", scope) == layer
