"""Agreement of ranks on their programs and connections, before the programs are linked.

Ranks of one group compare their programs, op by op. All ranks compare what they send each other,
and learn of the groups that any of them needs: to make a group takes every rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.programs import Group, ProgramSet
from tfpar.compile.local.reshard import COLLECTIVE_TYPES
from tfpar.compile.local.transfers import (
    Channel,
    ChannelEnd,
    ends_of,
    match_channels,
    permuted_channels,
)
from tfpar.ir.graph import FunctionRef, Op, Tensor, function_refs, renamed_functions
from tfpar.ir.traits import CONSTANTS
from tfpar.spec import RuntimeMismatchError
from tfpar.tf.runtime.backends.transport import Connections

if TYPE_CHECKING:
    from tfpar.tf.distributed.world import World


def agree_on_programs(world: World, programs: ProgramSet) -> Connections:
    """Check that the ranks of each group are about to run the same ops in the same order.

    Returns:
        What the programs of all ranks need, the same on every rank.

    Raises:
        RuntimeMismatchError: on every rank; names the first op in which two ranks differ, or the
            first transfer of which the two ends differ.
        TfparError: this rank runs no program.
    """
    group = programs.group_of(world.rank)
    program = programs.programs[group]
    ops = outline(program)
    digest = hashlib.sha256(repr((group, ops, program.mesh)).encode()).hexdigest()
    with world.at("comparing programs"):
        digests = world.exchange.messages(digest)
        own = exchanges_of(group, program)
        if len(set(digests)) == 1:
            _check_held([own], len(digests))
            return connections([own])
        told = world.exchange.messages(own)
        _check_groups([tuple(t["group"]) for t in told])
        _check_held(told, len(digests))
        pair = _first_pair(digests, told)
        if pair is None:
            return connections(told)
        outlines = world.exchange.messages([op.checksum for op in ops])
        at = _first_difference(*(outlines[rank] for rank in pair))
        own_op = dataclasses.asdict(ops[at]) if at < len(ops) else None
        there = world.exchange.messages([str(program.mesh), own_op])
    raise RuntimeMismatchError(_difference(pair, at, [there[rank] for rank in pair]))


def exchanges_of(group: Group, program: LocalProgram) -> dict[str, Any]:
    """List the collectives and transfers of a group of ranks, inside and with others, as JSON."""
    mesh = program.mesh
    ops = (op for each in program.graphs() for op in each.ops)
    axes = dict.fromkeys(op.attrs["axes"] for op in ops if op.type in COLLECTIVE_TYPES)
    among = dict.fromkeys(g for a in axes for g in mesh.groups(a) if len(g) > 1)
    return {
        "group": group,
        "groups": [[group[rank] for rank in ranks] for ranks in among],
        "sends": ends_of(program, group, "Send"),
        "receives": ends_of(program, group, "Recv"),
        "permutes": [
            [channel.source, channel.target, channel.key]
            for each in program.graphs()
            for op in each.ops
            if op.type == "Permute"
            for ranks in mesh.groups(op.attrs["axes"])
            for channel in dict.fromkeys(
                sent for sent, _ in permuted_channels(op, [group[r] for r in ranks]) if sent
            )
        ],
    }


def connections(told: Sequence[Mapping[str, Any]]) -> Connections:
    """Merge the connections that all groups' `exchanges_of` need; ranks of a group may repeat it.

    Raises:
        RuntimeMismatchError: a transfer has one end only, or its ends are of two shapes.
    """
    said = {tuple(t["group"]): t for t in told}.values()
    groups = dict.fromkeys(tuple(g) for t in said for g in t["groups"])
    sends, receives = (
        [_end(*values) for t in said for values in t[key]] for key in ("sends", "receives")
    )
    permutes = dict.fromkeys(Channel(*values) for t in said for values in t["permutes"])
    return Connections(list(groups), [*match_channels(sends, receives), *permutes])


def _end(
    source: int, target: int, key: str, op: str, shape: Sequence[int], dtype: str
) -> ChannelEnd:
    """An `ChannelEnd` as JSON gives it back."""
    return ChannelEnd(source, target, key, op, tuple(shape), dtype)


@dataclasses.dataclass(frozen=True)
class OpOutline:
    """Outline of an op that ranks compare, as JSON.

    Attributes:
        name: its type, if it is one of a body.
        attrs: as text.
        inputs, outputs: dtypes and shapes: `float32[4, 2]`.
    """

    name: str
    type: str
    attrs: dict[str, str]
    inputs: list[str]
    outputs: list[str]

    @property
    def checksum(self) -> int:
        return zlib.crc32(repr(self).encode())


def outline(program: LocalProgram) -> list[OpOutline]:
    """Outline every op, in order; the result is equal on all ranks that run `program`.

    Behind the program come the bodies that its loops, branches and calls name. TensorFlow counts
    in their names, and in those of their inputs, what a process has traced so far, which is more on
    a rank that has saved a model for all. So bodies go by number, and their ops by type.
    """
    functions, named = program.graph.functions, program.graphs()
    graphs, numbers = [program.graph], dict[FunctionRef, int]()
    found = []
    for graph in graphs:  # which grows meanwhile
        by_name = graph in named
        for op in graph.ops:
            for ref in function_refs(*(op.attrs[key] for key in sorted(op.attrs))):
                if ref in functions and ref not in numbers:
                    numbers[ref] = len(graphs)
                    graphs.append(functions[ref])
            name = op.name if by_name else op.type
            attrs = _attributes(op, numbers)
            found.append(OpOutline(name, op.type, attrs, _shapes(op.inputs), _shapes(op.outputs)))
    return found


def _attributes(op: Op, numbers: Mapping[FunctionRef, int]) -> dict[str, str]:
    """The attributes that have to be equal: not TensorFlow's notes, in which it counts, too."""
    if op.type in CONSTANTS:  # those that matter are in the shapes around them
        return {}
    return {
        key: repr(renamed_functions(value, numbers))
        for key, value in sorted(op.attrs.items())
        if not key.startswith("_")
    }


def _shapes(tensors: Iterable[Tensor]) -> list[str]:
    return [f"{t.dtype}{t.shape if t.shape is None else list(t.shape)}" for t in tensors]


def _check_groups(groups: Sequence[Group]) -> None:
    """Check that ranks agree on who runs a program together; `groups` are what each says."""
    for rank, group in enumerate(groups):
        for other in group:
            theirs = groups[other] if other < len(groups) else None
            if theirs != group:
                has = "is not in the job" if theirs is None else f"says {list(theirs)}"
                raise RuntimeMismatchError(
                    f"Rank {rank} runs its program with the ranks {list(group)}, and rank {other} "
                    f"{has}. Every rank has to group the ranks alike."
                )


def _check_held(told: Sequence[Mapping[str, Any]], size: int) -> None:
    """Check that the job has the ranks that others send to and receive from."""
    for t in told:
        for end in (_end(*values) for key in ("sends", "receives") for values in t[key]):
            missing = max(end.source, end.target)
            if missing >= size:
                raise RuntimeMismatchError(
                    f"{end.key!r} goes from rank {end.source} to rank {end.target}, but the job "
                    f"has {size} ranks: the stage of rank {missing} is on no rank. Start as many "
                    f"processes as the plan has ranks, or make a plan for these."
                )


def _first_pair(digests: Sequence[str], told: Sequence[Mapping[str, Any]]) -> Group | None:
    """The first rank, and the first of its group, with another program than the group's first."""
    for rank, t in enumerate(told):
        first = t["group"][0]
        if digests[rank] != digests[first]:
            return first, rank
    return None


def _first_difference(ops: Sequence[int], others: Sequence[int]) -> int:
    """The first position at which the checksums of two programs differ; behind both if none do."""
    pairs = enumerate(itertools.zip_longest(ops, others))
    return next((at for at, (one, two) in pairs if one != two), max(len(ops), len(others)))


def _difference(
    ranks: Group, at: int, there: Sequence[tuple[str, Mapping[str, Any] | None]]
) -> str:
    """Describe the first difference between the programs of two ranks.

    Args:
        there: of each rank, its mesh and its op at `at`.
    """
    (first, other), ((mesh, op), (other_mesh, other_op)) = ranks, there
    if mesh == other_mesh:
        scope = ((op or other_op or {}).get("name", "")).rpartition("/")[0]
        where = f"at op {at + 1}, in {scope!r}," if scope else f"at op {at + 1}"
        found = f"{where} rank {first} has {_told(op, other_op)}"
        found += f", rank {other} {_told(other_op, op)}"
    else:
        found = f"rank {first} has the mesh {mesh}, rank {other} {other_mesh}"
    return (
        f"Ranks {first} and {other} are about to run different programs: {found}. Every rank has "
        f"to build the same model and to get batches of the same shape; do the processes run the "
        f"same script with the same arguments?"
    )


def _told(op: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """An op (an `OpOutline` as a mapping), with that in which it differs from another."""
    if op is None:
        return "nothing"
    said, other = [op["type"]], other or op
    if op["type"] == other["type"]:
        attrs, others = op["attrs"], other["attrs"]
        keys = sorted(key for key in {**attrs, **others} if attrs.get(key) != others.get(key))
        said += [f"{key}={attrs.get(key, 'nothing')}" for key in keys]
    said += [
        f"{what} {', '.join(op[what]) or 'none'}"
        for what in ("inputs", "outputs")
        if op[what] != other[what]
    ]
    return f"{op['name']!r} ({'; '.join(said)})"
