"""`StageGraph`: the links, joins and ties between the stages of a pipeline."""

from __future__ import annotations

import dataclasses

from tfpar.pipeline.tasks import Kind
from tfpar.spec import ScheduleError
from tfpar.spec.arguments import finite, integer


@dataclasses.dataclass(frozen=True)
class StageLink:
    """Link between stages: the bytes of a microbatch that one stage makes and another reads.

    Attributes:
        source, target: stages; a stage reads of earlier ones only.
        forward_bytes: that the forward pass sends.
        backward_bytes: of gradients that come back; None: there are none (of tokens, of a mask),
            and the backward pass of `source` does not wait for that of `target`.
    """

    source: int
    target: int
    forward_bytes: float = 0.0
    backward_bytes: float | None = 0.0

    def __post_init__(self) -> None:
        integer("source", self.source, 0)
        integer("target", self.target, 0)
        finite("forward_bytes", self.forward_bytes)
        if self.backward_bytes is not None:
            finite("backward_bytes", self.backward_bytes)
        if self.source >= self.target:
            raise ScheduleError(
                f"Stage {self.target} reads of stage {self.source}; stages are numbered so that "
                f"each reads of earlier ones only."
            )


@dataclasses.dataclass(frozen=True)
class Join:
    """Join of microbatches: work that has to see all of them before any goes on, such as exact
    batch statistics.

    Attributes:
        stage: that computes it.
        after: (kind, stage) of the tasks that it waits for, of all microbatches; kind F, or B for
            the backward pass, halved or not.
        before: of those that wait for it.
    """

    stage: int
    after: tuple[tuple[Kind, int], ...]
    before: tuple[tuple[Kind, int], ...]

    def __post_init__(self) -> None:
        for kind, _ in (*self.after, *self.before):
            if kind not in ("F", "B"):
                raise ScheduleError(f"A join waits for F or B and holds these up, not {kind}.")
        if not self.after or not self.before:
            raise ScheduleError(f"A join of stage {self.stage} has nothing before or after it.")


@dataclasses.dataclass(frozen=True)
class Tie:
    """A weight that another stage than its own reads, such as a tied embedding.

    The owner's value is sent when a step begins, the sum of the reader's gradients when that is
    done. So is whatever else one stage has as a step begins and another reads.

    Attributes:
        num_bytes: of the value.
        gradient_bytes: of the sum; None: there is none, and the owner's update does not wait.
    """

    owner: int
    reader: int
    num_bytes: float = 0.0
    gradient_bytes: float | None = 0.0

    def __post_init__(self) -> None:
        integer("owner", self.owner, 0)
        integer("reader", self.reader, 0)
        finite("num_bytes", self.num_bytes)
        if self.gradient_bytes is not None:
            finite("gradient_bytes", self.gradient_bytes)
        if self.owner == self.reader:
            raise ScheduleError(f"Stage {self.owner} reads its own weight: that is no tie.")


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """The stages of a pipeline, in an order in which each reads of earlier ones only.

        StageGraph.chain(4)
        StageGraph(3, (StageLink(0, 1), StageLink(1, 2), StageLink(0, 2)))   # a skip
        StageGraph(3, (StageLink(0, 2), StageLink(1, 2)))                    # two towers

    Raises:
        ScheduleError: a link, a join or a tie of a stage that there is not, or two links between
            the same.
    """

    num_stages: int
    links: tuple[StageLink, ...]
    joins: tuple[Join, ...] = ()
    ties: tuple[Tie, ...] = ()

    def __post_init__(self) -> None:
        integer("num_stages", self.num_stages, 1)
        seen = set()
        for link in self.links:
            if link.target >= self.num_stages:
                raise ScheduleError(
                    f"Stage {link.target} reads of stage {link.source}, but there are "
                    f"{self.num_stages} stages."
                )
            if (link.source, link.target) in seen:
                raise ScheduleError(
                    f"Two links lead from stage {link.source} to stage {link.target}: give one, "
                    f"with the bytes of both."
                )
            seen.add((link.source, link.target))
        for join in self.joins:
            self._check_named("join", join.stage, *(s for _, s in (*join.after, *join.before)))
        for tie in self.ties:
            self._check_named("tie", tie.owner, tie.reader)

    def _check_named(self, what: str, *stages: int) -> None:
        for stage in stages:
            if not 0 <= stage < self.num_stages:
                raise ScheduleError(
                    f"A {what} names stage {stage}, but there are {self.num_stages} stages."
                )

    @classmethod
    def chain(
        cls, num_stages: int, forward_bytes: float = 0.0, backward_bytes: float = 0.0
    ) -> StageGraph:
        """Stages of which each reads of the one before, the same number of bytes everywhere."""
        links = (
            StageLink(stage, stage + 1, forward_bytes, backward_bytes)
            for stage in range(integer("num_stages", num_stages, 1) - 1)
        )
        return cls(num_stages, tuple(links))
