"""All kinds of cases, by name."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.fuzzing import calls, checkpoints, files
from scripts.fuzzing.trials import Kind

KINDS: Mapping[str, Kind] = {
    kind.name: kind for kind in (*files.KINDS, *checkpoints.KINDS, *calls.KINDS)
}
