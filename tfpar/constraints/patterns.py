"""Patterns for names: what they match, and what to say where they match nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from tfpar.constraints.constraint_types import Constraint

_CALL_COUNT = re.compile(r"_\d+(?=/|$)")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile `pattern` for a whole path, or for its end from some component on."""
    return re.compile(rf"(?:.*/)?(?:{pattern})")


def without_call_counts(scope: str) -> str:
    """Return `scope` without the numbers that Keras gives a layer's name scopes by call."""
    return _CALL_COUNT.sub("", scope)


def matches_nothing(
    constraint: Constraint | str, pattern: str, names: Sequence[str], what: str
) -> str:
    inside = [n for n in names if re.search(pattern, n)]
    if inside:
        wider = [f".*{pattern}", f"{pattern}.*", f".*{pattern}.*"]
        wider = [w for w in wider if any(compile_pattern(w).fullmatch(n) for n in inside)] or wider
        return (
            f"{constraint} matches no {what}: a pattern must match a name from some '/' to its "
            f"end. It is found inside {some(inside)}; write {wider[0]!r}."
        )
    plain = re.sub(r"\\.|[\^$.*+?()\[\]{}|]+", "", pattern)
    depth = plain.count("/") + 1
    ends = {"/".join(n.split("/")[-depth:]): n for n in reversed(names)}
    near = [ends[e] for e in difflib.get_close_matches(plain, ends, n=3, cutoff=0.3)]
    if near:
        return f"{constraint} matches no {what}. The nearest names: {some(near)}."
    return f"{constraint} matches no {what}. There are {len(names)}: {some(names)}."


def some(names: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(map(repr, names[:limit]))
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
