"""Meaning of the nodes of a step's functions, read from the names that linkers give them.

Local ops are `r1/up/MatMul`, of rank 1 of the job. Of collectives, a process writes `up/AllReduce`
and nodes below it; where all ranks are in one process there is one for each group,
`up/AllReduce/g0/...`. Transfers bear the names of their channels, calls of tasks that of the op
(`tf/runtime/backends`).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from tfpar.cluster.description import Cluster
from tfpar.compile import CompiledStep
from tfpar.compile.local.local_graph import TASK, LocalProgram
from tfpar.compile.local.packing import payload
from tfpar.compile.local.programs import Group
from tfpar.compile.local.reshard import COLLECTIVE_TYPES
from tfpar.compile.local.transfers import TRANSFER_TYPES, Channel, channels_of
from tfpar.cost.collectives import collective_seconds, transfer_seconds
from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.graph_nodes import cluster
from tfpar.ir.roles import PHASES, Roles
from tfpar.observability.report.data.layers import index_paths, layer_path
from tfpar.observability.timeline.records import CollectiveKind


@dataclasses.dataclass(frozen=True, eq=False)
class Local:
    """An op that one rank runs, whose name in the program is `name`."""

    rank: int
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Meeting:
    """A node of a collective or transfer.

    Attributes:
        op: of the program; its operands come from the ops that ranks have to run before.
    """

    kind: CollectiveKind
    op: Op


@dataclasses.dataclass(frozen=True, eq=False)
class TaskCall:
    """A call of a task, by all ranks of a group that this process has.

    Attributes:
        name: of the op that calls it, and `task` what schedules call it.
    """

    group: Group
    name: str
    task: str


_LOCAL = re.compile(r"(?:^|/)r(\d+)/(.+)")
_GROUP = re.compile(r"/g(\d+)(?:/|$)")
_MOVED = {"_Recv", "_Send", "_HostRecv", "_HostSend"}
"""The types of the nodes by which TensorFlow itself moves tensors between devices."""


class Nodes:
    """The nodes of a compiled step.

    Args:
        gradients: the tensors that enter the optimizer.
        cluster: by whose figures collectives are predicted; None: they are not.
        alone: the rank whose function this is; None: it is that of all ranks.
    """

    def __init__(
        self,
        compiled: CompiledStep,
        gradients: Sequence[Tensor],
        cluster: Cluster | None,
        alone: int | None,
    ) -> None:
        laid = compiled.partitioned
        self.origins = Origins(laid.graph, Roles.of(laid.graph, gradients))
        self.alone = alone
        self._cluster = cluster
        self._found: dict[str, Local | Meeting | TaskCall | None] = {}
        self._ops: dict[str, tuple[Op, Group, LocalProgram]] = {}
        self._channels: dict[str, tuple[Op, Channel, LocalProgram]] = {}
        programs = compiled.programs.programs
        self._ranks = sum(map(len, programs))
        for i, (group, program) in enumerate(programs.items()):
            if alone is not None and alone not in group:
                continue
            scope = f"p{i}_" if alone is None and len(programs) > 1 else ""
            for graph in program.graphs():
                for op in graph.ops:
                    if op.type in TRANSFER_TYPES and alone is not None:
                        channel = channels_of(op, group)[group.index(alone)]
                        if channel is not None:
                            self._channels[channel.name] = op, channel, program
                    elif op.type in COLLECTIVE_TYPES or op.type == TASK:
                        self._ops[f"{scope}{op.name}"] = op, group, program

    def find(self, node: str, op_type: str) -> Local | Meeting | TaskCall | None:
        """Look up a node of this name and type; None if it is none of the step's."""
        if op_type in _MOVED:
            return None
        if node not in self._found:
            self._found[node] = self._looked_up(node)
        return self._found[node]

    def _looked_up(self, node: str) -> Local | Meeting | TaskCall | None:
        name = node
        while name and name not in self._channels and name not in self._ops:
            name = name.rpartition("/")[0]
        if name in self._channels:
            return self._transfer(*self._channels[name])
        if name in self._ops:
            op, group, program = self._ops[name]
            if op.type != TASK:
                return self._meeting(op, group, program, node[len(name) :])
            if name == node:
                return TaskCall(group, op.name, op.attrs.get("task") or op.name)
        local = _LOCAL.search(node)
        if local is None or self.alone not in (None, int(local[1])):
            return None
        return Local(int(local[1]), local[2])

    def is_carried(self, op_type: str) -> bool:
        """Whether a node of a collective is what talks to the other ranks: the others are local."""
        return self.alone is None or op_type.startswith(("Horovod", "Collective"))

    def _meeting(self, op: Op, group: Group, program: LocalProgram, rest: str) -> Meeting | None:
        mesh, axes = program.mesh, op.attrs["axes"]
        groups = mesh.groups(axes)
        if self.alone is not None:
            at = group.index(self.alone)
            own = next(number for number, ranks in enumerate(groups) if at in ranks)
        else:
            found = _GROUP.match(rest)
            if found is None:
                return None
            own = int(found[1])
        kind = COLLECTIVE_TYPES[op.type]
        num_bytes = payload(op)
        names = [op.name]
        if len(op.inputs) > 1:  # packed
            names += [_maker(t, program).name for t in op.inputs]
        predicted = None
        if self._cluster is not None:
            machines = self._cluster.part(group) if len(group) < self._ranks else self._cluster
            predicted = collective_seconds(kind, tuple(axes), num_bytes, mesh, machines)
        return Meeting(
            CollectiveKind(
                f"{op.name}/g{own}",
                tuple(group[rank] for rank in groups[own]),
                tuple(dict.fromkeys(map(self.origins.path, names))),
                kind,
                tuple(mesh.axis_names[a] for a in axes),
                num_bytes,
                self.origins.phase(op.name),
                predicted,
            ),
            op,
        )

    def _transfer(self, op: Op, channel: Channel, program: LocalProgram) -> Meeting:
        num_bytes, pair = payload(op), (channel.source, channel.target)
        predicted = None
        if self._cluster is not None:
            predicted = transfer_seconds([pair], num_bytes, self._cluster)
        name = _maker(op.inputs[0], program).name if op.inputs else op.name
        layers, phase = (self.origins.path(name),), self.origins.phase(name)
        what = op.type.lower()
        kind = CollectiveKind(channel.name, pair, layers, what, (), num_bytes, phase, predicted)
        return Meeting(kind, op)


def _maker(tensor: Tensor, program: LocalProgram) -> Op:
    """The op that makes a tensor, within the task that hands it on, if one does."""
    op = tensor.op
    while op.type == TASK:
        tensor = program.graph.functions[op.attrs["body"]].outputs[tensor.index]
        op = tensor.op
    return op


# --- Keras's paths of the ops of a step: net_1/up_1/MatMul is of net/up ---

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
