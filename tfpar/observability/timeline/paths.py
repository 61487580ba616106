"""Keras's paths of the ops of a step: `net_1/up_1/MatMul` is of `net/up`."""

from __future__ import annotations

import itertools
import re

from tfpar.ir.graph import Graph, Op
from tfpar.ir.graph_nodes import cluster
from tfpar.ir.roles import PHASES, Roles
from tfpar.observability.report.data.paths import index_paths, layer_path

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
        self._known = index_paths(self._nodes.nodes)
        outermost = {scope for scope, path in self._known.items() if "/" not in path}
        # Where paths do not begin with the model, its scope is around all of these.
        self._models = {scope.rpartition("/")[0] for scope in outermost} - {""}

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
            return layer_path(node)
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
        """Return the path of a scope, by the scopes around it that hold weights.

        Of a scope that is in none of them (`adam`, `compile_loss`) it is the outermost part.
        """
        around, rest = scope, ""
        while around and around not in self._known and around not in self._models:
            around, _, last = around.rpartition("/")
            rest = f"{last}/{rest}"
        outermost = _COUNT.sub("", scope.partition("/")[0])
        if not around:  # ops outside of all scopes are called after their types
            return STEP if not scope or scope[0].isupper() else outermost
        parts = [part for part in rest.split("/") if part]
        if _COUNT.search(around):  # as all layers are: what is not is a scope of TensorFlow's own
            parts = [_COUNT.sub("", part) for part in itertools.takewhile(_COUNT.search, parts)]
        return "/".join(filter(None, (self._known.get(around, ""), *parts))) or outermost
