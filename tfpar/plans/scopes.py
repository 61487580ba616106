"""Stages by scope: a short table that gives each forward op its stage.

Where all ops under a scope are in one stage, the scope stands for them; of an op the longest scope
decides that its name begins with. Ops outside of all scopes (what Keras does with losses and
metrics) have names that are counted up and mean another op in another step. They are listed only
where they are not with what they read, or else with the weights that they read, or else with what
reads them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import VARIABLE_READS


def table_of(stages: Mapping[Op, int]) -> dict[str, int]:
    """Return the smallest table by which `stages_by_scope` gives these ops their stages.

    Args:
        stages: of ops in the order of their graph.
    """
    listed = {op: stage for op, stage in stages.items() if "/" in op.name}
    while True:
        table = _smallest({op.name: stage for op, stage in stages.items() if op in listed})
        found = stages_by_scope(table, stages)
        wrong = {op: stage for op, stage in stages.items() if found.get(op) != stage}
        if wrong.keys() <= listed.keys():
            return table
        listed.update(wrong)


def stages_by_scope(scopes: Mapping[str, int], ops: Iterable[Op]) -> dict[Op, int]:
    """Return the stages of `ops`, in the order of their graph; those are left out of which nothing
    is known. An op is never in an earlier stage than what it reads."""
    ops = list(ops)
    found: dict[Op, int] = {}
    for op in ops:
        named = _longest(scopes, op.name)
        known = [*_read(op, found), *([] if named is None else [named])]
        if known:
            found[op] = max(known)
    _add_readers_of_weights(ops, found)
    readers: dict[Op, list[Op]] = {}
    for op in ops:
        for tensor in op.inputs:
            readers.setdefault(tensor.op, []).append(op)
    for op in reversed(ops):
        if op not in found:
            reading = [found[r] for r in readers.get(op, ()) if r in found]
            if reading:
                found[op] = min(reading)
    for op in ops:
        if op in found:
            found[op] = max([found[op], *_read(op, found)])
    return {op: found[op] for op in ops if op in found}


def renamed_scopes(scopes: Mapping[str, int], ops: Iterable[Op]) -> dict[str, int]:
    """Return `scopes` for a step whose models have other names: a model that its user has not named
    is `functional_1` or `functional_2` by how many there were before.

    The outermost scopes are those of the models, in the order of the graph. They are renamed if
    they are as many, and but for one differ in their numbers alone.

    Args:
        ops: of the step, in the order of its graph.
    """
    ops = list(ops)
    alone = {op.name for op in ops if "/" not in op.name}
    before = [*dict.fromkeys(_outermost(name) for name in scopes if name not in alone)]
    now = [*dict.fromkeys(_outermost(op.name) for op in ops if "/" in op.name)]
    other = [pair for pair in zip(before, now, strict=False) if pair[0] != pair[1]]
    named = [pair for pair in other if _uncounted(pair[0]) != _uncounted(pair[1])]
    if len(before) != len(now) or (named and len(other) > 1):
        return dict(scopes)
    new = dict(zip(before, now, strict=True))
    return {
        "/".join((new.get(_outermost(name), _outermost(name)), *name.split("/")[1:])): stage
        for name, stage in scopes.items()
    }


def _outermost(name: str) -> str:
    return name.partition("/")[0]


def _uncounted(name: str) -> str:
    return re.sub(r"(_\d+)+$", "", name)


def _read(op: Op, found: Mapping[Op, int]) -> list[int]:
    """The known stages of what an op reads."""
    return [found[t.op] for t in op.inputs if t.op in found]


def _add_readers_of_weights(ops: Collection[Op], found: dict[Op, int]) -> None:
    """Give ops a stage that read of nothing but weights: where these are read otherwise."""
    members = set(ops)
    touched = {op: [*_variables(op, members)] for op in ops}
    stage: dict[Tensor, int] = {}
    for op in ops:
        for handle in touched[op]:
            if op in found:
                stage[handle] = min(found[op], stage.get(handle, found[op]))
    for op in ops:
        if op not in found:
            known = [*_read(op, found), *(stage[h] for h in touched[op] if h in stage)]
            if known:
                found[op] = max(known)


def _variables(op: Op, members: Collection[Op]) -> Iterator[Tensor]:
    """The handles of the variables that an op touches, or whose values it reads."""
    for tensor in op.inputs:
        if tensor.dtype == "resource":
            yield tensor
        elif tensor.op.type in VARIABLE_READS and tensor.op not in members:
            yield tensor.op.inputs[0]


def _longest(scopes: Mapping[str, int], name: str) -> int | None:
    while name:
        if name in scopes:
            return scopes[name]
        name = name.rpartition("/")[0]
    return None


@dataclasses.dataclass
class _Scope:
    """A part of a name: what lies under it, by the next part, and the stage of an op of that
    name."""

    below: dict[str, _Scope] = dataclasses.field(default_factory=dict)
    own: int | None = None
    stages: set[int] = dataclasses.field(default_factory=set)

    def table(self, name: str, inherited: int | None) -> Iterator[tuple[str, int]]:
        """The fewest entries for this scope and all below.

        A scope whose ops are in one stage takes one entry, or none where that of a scope around it
        says the same. Where it takes one for the op of its name, what lies below inherits that.
        """
        if name and len(self.stages) == 1:
            (stage,) = self.stages
            if stage != inherited:
                yield name, stage
            return
        if self.own is not None:
            if self.own != inherited:
                yield name, self.own
            inherited = self.own
        for part, scope in self.below.items():
            yield from scope.table(f"{name}/{part}" if name else part, inherited)


def _smallest(stages: Mapping[str, int]) -> dict[str, int]:
    """Entries for scopes whose names are all in one stage, and for names: all get theirs."""
    root = _Scope()
    for name, stage in stages.items():
        scope = root
        scope.stages.add(stage)
        for part in name.split("/"):
            scope = scope.below.setdefault(part, _Scope())
            scope.stages.add(stage)
        scope.own = stage
    return dict(root.table("", None))
