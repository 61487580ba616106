"""The models and plans whose steps `benchmarks.prediction` predicts and measures."""

from __future__ import annotations

import keras

import tfpar as tap
from benchmarks import models
from benchmarks.models import GPT_MEGATRON, WIDE_HEAD

SIZES = {
    "gpt": {"vocabulary": 2000, "length": 128, "hidden": 256, "num_layers": 2},
    "wide": {"classes": 8000},
}
BATCHES = {"gpt": 8, "wide": 128}
SEARCHED = "searched"
"""The name of the plan that is searched."""


def model_of(model: str, size: dict[str, int] | None = None) -> keras.Model:
    """A model by its name; of another size, if one is given."""
    build = models.wide if model == "wide" else models.gpt
    return build(**(size or SIZES[model]))


def plans(model: str, ranks: int) -> dict[str, tuple[dict[str, int], list]]:
    """By name: the mesh, and constraints on it."""
    data, alone = {"data": ranks}, {"data": 1, "model": ranks}

    def part(*words: str) -> list:
        chosen = {k: v for k, v in GPT_MEGATRON.items() if any(w in k for w in words)}
        return list(tap.from_layout_map(chosen))

    zero = [tap.shard(r".*(kernel|embeddings)", dim=0, axis="data"), tap.batch("data")]
    columns = [tap.shard(r".*(kernel|embeddings)", dim=-1, axis="model")]
    rows = [tap.shard(r".*kernel", dim=0, axis="model")]
    found: dict[str, tuple[dict[str, int], list]] = {"data": (data, []), "zero": (data, zero)}
    if model == "gpt":
        found |= {
            "megatron": (alone, part("")),
            "feed-forward": (alone, part("fc")),
            "heads": (alone, part("attention")),
            "vocabulary": (alone, part("tokens", "head")),
            "columns": (alone, columns),
        }
        best = part("")
    else:
        best = list(tap.from_layout_map(WIDE_HEAD))
        found |= {"classes": (alone, best), "columns": (alone, columns), "rows": (alone, rows)}
    if ranks == 4:
        found["2x2"] = ({"data": 2, "model": 2}, [*best, tap.batch("data")])
    return found
