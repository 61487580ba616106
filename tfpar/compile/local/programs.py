"""Programs of a job: a local program for each group of ranks.

The ranks of a step that all of them run in the same way are one group. Where stages of a step have
ranks of their own, each is a program, and what one needs of another is sent
(`compile.local.transfers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.transfers import Channel, channels_of, ends_of, match_channels
from tfpar.ir.graph import Op
from tfpar.ir.order import sort_topologically
from tfpar.spec import TfparError

Group = tuple[int, ...]
"""Ranks of the job, ascending. The i-th is rank i of the mesh of what they run."""


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramSet:
    """Local programs by the ranks that run them.

    Where ranks are processes, each may know the program of its own group alone.

    Attributes:
        stages: of each group those that it runs, where the step has several.

    Raises:
        TfparError: a group is not as large as its program's mesh, does not ascend, or shares a
            rank with another.
    """

    programs: Mapping[Group, LocalProgram]
    stages: Mapping[Group, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        owner: dict[int, Group] = {}
        for group, program in self.programs.items():
            if len(group) != program.mesh.size:
                raise TfparError(
                    f"The ranks {list(group)} run a program for {program.mesh.size} ranks "
                    f"({program.mesh})."
                )
            if list(group) != sorted({*group}) or group[0] < 0:
                raise TfparError(f"The ranks of a group ascend from 0 or more, not {list(group)}.")
            for rank in group:
                if owner.setdefault(rank, group) is not group:
                    raise TfparError(
                        f"Rank {rank} runs two programs, one with the ranks {list(owner[rank])} "
                        f"and one with {list(group)}."
                    )

    @classmethod
    def of(cls, program: LocalProgram) -> ProgramSet:
        """Return `program` on all ranks."""
        return cls({tuple(range(program.mesh.size)): program})

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.programs.values()))

    def group_of(self, rank: int) -> Group:
        """Return the group that `rank` is in.

        Raises:
            TfparError: in none that is known.
        """
        for group in self.programs:
            if rank in group:
                return group
        known = ", ".join(str(list(group)) for group in self.programs)
        raise TfparError(f"Rank {rank} runs no program; there are some for the ranks {known}.")

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` runs; none where the step has one."""
        return self.stages.get(self.group_of(rank), ())

    def channels(self) -> list[Channel]:
        """Match what ranks send with what they receive, by `Send` and `Recv`.

        Raises:
            RuntimeMismatchError: names the first transfer of which one end is missing, or is
                another tensor than the other end.
        """
        sends, receives = (
            [end for g, p in self.programs.items() for end in ends_of(p, g, op_type)]
            for op_type in ("Send", "Recv")
        )
        return match_channels(sends, receives)

    def in_order(self) -> Iterator[tuple[Group, Op]]:
        """Return the ops of all programs, each `Recv` behind those that send what it gets.

        Raises:
            TfparError: programs wait for each other.
        """
        owner = {op: group for group, p in self.programs.items() for op in p.graph.ops}
        senders: dict[Channel | None, Op] = {
            channel: op
            for op, group in owner.items()
            if op.type == "Send"
            for channel in channels_of(op, group)
            if channel is not None
        }
        before = {
            op: [senders[c] for c in channels_of(op, group) if c in senders]
            for op, group in owner.items()
            if op.type == "Recv"
        }
        ops = sort_topologically([*owner], before) if before else [*owner]
        return ((owner[op], op) for op in ops)
