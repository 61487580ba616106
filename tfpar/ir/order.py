"""Orders of ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfpar.ir.graph import Op
from tfpar.spec.errors import TfparError


def sort_topologically(
    ops: Sequence[Op], before: Mapping[Op, Sequence[Op]] | None = None
) -> list[Op]:
    """Reorder `ops` so that inputs and control come first, otherwise in their order.

    Args:
        before: by op, others that come first too.

    Raises:
        TfparError: ops wait for each other.
    """
    present, also = set(ops), before or {}
    done: set[Op] = set()
    begun: set[Op] = set()
    out: list[Op] = []
    for root in ops:
        stack = [root]
        while stack:
            op = stack[-1]
            if op in done:
                stack.pop()
                continue
            missing = [
                b for b in (*op.predecessors, *also.get(op, ())) if b in present and b not in done
            ]
            if missing:
                if op in begun:
                    raise TfparError(f"Ops wait for each other: {_circle(stack, begun)}.")
                begun.add(op)
                stack.extend(missing)
            else:
                stack.pop()
                done.add(op)
                out.append(op)
    return out


def _circle(stack: list[Op], begun: set[Op]) -> str:
    """The ops on the way from the last one back to itself."""
    way = [op for op in stack[stack.index(stack[-1]) :] if op in begun]
    return " for ".join(repr(op.name) for op in way)
