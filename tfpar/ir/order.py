"""Orders of ops."""

from __future__ import annotations

from tfpar.ir.graph import Op


def sort_topologically(ops: list[Op]) -> list[Op]:
    """`ops` reordered so that inputs and control come first, otherwise in their order."""
    present = set(ops)
    done: set[Op] = set()
    out: list[Op] = []
    for root in ops:
        stack = [root]
        while stack:
            op = stack[-1]
            if op in done:
                stack.pop()
                continue
            missing = [
                b
                for b in (*(t.op for t in op.inputs), *op.control)
                if b in present and b not in done
            ]
            if missing:
                stack.extend(missing)
            else:
                stack.pop()
                done.add(op)
                out.append(op)
    return out
