"""tfpar: automatic parallelization of unchanged TensorFlow and Keras 3 models.

    import tfpar as tap

    with tap.auto_parallel(tap.split([2, 8])):   # 2 workers with 8 devices each
        model = build_model()
        model.compile("adamw", loss)
    model.fit(dataset)

Names are imported when first used: planning alone never loads TensorFlow. Where Keras is loaded,
before or after, its `keras.distribution` is answered (`tfpar.distribution`).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

__version__ = "0.1.0"

_EXPORTS = {
    "Mesh": "tfpar.spec",
    "Partial": "tfpar.spec",
    "Replicate": "tfpar.spec",
    "Shard": "tfpar.spec",
    "TfparError": "tfpar.spec",
    "split": "tfpar.spec",
    "Cluster": "tfpar.cluster.description",
    "Device": "tfpar.cluster.description",
    "Level": "tfpar.cluster.description",
    "Node": "tfpar.cluster.description",
    "Options": "tfpar.options",
    "Pipeline": "tfpar.pipeline",
    "Schedule": "tfpar.pipeline",
    "Offload": "tfpar.plans",
    "Plan": "tfpar.plans",
    "keep": "tfpar.plans",
    "batch": "tfpar.constraints",
    "context_parallel": "tfpar.constraints",
    "from_layout_map": "tfpar.constraints",
    "replicate": "tfpar.constraints",
    "shard": "tfpar.constraints",
    "fsdp": "tfpar.constraints",
    "shard_output": "tfpar.constraints",
    "stage": "tfpar.constraints",
    "make_rule": "tfpar.rules",
    "register_rule": "tfpar.rules",
    "Checkpoint": "tfpar.tf.keras.checkpoint",
    "Timeline": "tfpar.tf.keras.timeline",
    "on_every_rank": "tfpar.tf.keras.callbacks",
    "on_first_rank": "tfpar.tf.keras.callbacks",
    "restore_checkpoint": "tfpar.tf.keras.checkpoint",
    "save_checkpoint": "tfpar.tf.keras.checkpoint",
    "GraphProgram": "tfpar.tf.graph_program",
    "AutoParallel": "tfpar.distribution",
    "auto_parallel": "tfpar.api",
    "Monitor": "tfpar.observability.monitor.callback",
    "SearchInterrupted": "tfpar.planning.incumbent",
    "Trials": "tfpar.planning.objective",
    "calibrate": "tfpar.jobs.calibration.calibrate",
    "coverage": "tfpar.api",
    "function": "tfpar.api",
    "parallelize": "tfpar.api",
    "plan": "tfpar.api",
    "plan_of": "tfpar.api",
    "shard_data": "tfpar.tf.keras.data",
    "verify": "tfpar.observability.verification",
}

_MODULES = ("layers",)

__all__ = [
    "AutoParallel",
    "Checkpoint",
    "Cluster",
    "Device",
    "GraphProgram",
    "Level",
    "Mesh",
    "Monitor",
    "Node",
    "Offload",
    "Options",
    "Partial",
    "Pipeline",
    "Plan",
    "Replicate",
    "Schedule",
    "SearchInterrupted",
    "Shard",
    "TfparError",
    "Timeline",
    "Trials",
    "auto_parallel",
    "batch",
    "calibrate",
    "context_parallel",
    "coverage",
    "from_layout_map",
    "fsdp",
    "function",
    "keep",
    "layers",
    "make_rule",
    "on_every_rank",
    "on_first_rank",
    "parallelize",
    "plan",
    "plan_of",
    "register_rule",
    "replicate",
    "restore_checkpoint",
    "save_checkpoint",
    "shard",
    "shard_data",
    "shard_output",
    "split",
    "stage",
    "verify",
]
"""Written out: type checkers take names for exported that they read here."""

if TYPE_CHECKING:
    from tfpar import layers
    from tfpar.api import auto_parallel, coverage, function, parallelize, plan, plan_of
    from tfpar.cluster.description import Cluster, Device, Level, Node
    from tfpar.constraints import (
        batch,
        context_parallel,
        from_layout_map,
        fsdp,
        replicate,
        shard,
        shard_output,
        stage,
    )
    from tfpar.distribution import AutoParallel
    from tfpar.jobs.calibration.calibrate import calibrate
    from tfpar.observability.monitor.callback import Monitor
    from tfpar.observability.verification import verify
    from tfpar.options import Options
    from tfpar.pipeline import Pipeline, Schedule
    from tfpar.planning.incumbent import SearchInterrupted
    from tfpar.planning.objective import Trials
    from tfpar.plans import Offload, Plan, keep
    from tfpar.rules import make_rule, register_rule
    from tfpar.spec import Mesh, Partial, Replicate, Shard, TfparError, split
    from tfpar.tf.graph_program import GraphProgram
    from tfpar.tf.keras.callbacks import on_every_rank, on_first_rank
    from tfpar.tf.keras.checkpoint import Checkpoint, restore_checkpoint, save_checkpoint
    from tfpar.tf.keras.data import shard_data
    from tfpar.tf.keras.timeline import Timeline


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"tfpar.{name}")
    raise AttributeError(f"module 'tfpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _answer_keras(keras: ModuleType) -> None:
    if sys.modules.get("tensorflow") and keras.backend.backend() == "tensorflow":
        importlib.import_module("tfpar.distribution")  # which may be what loads Keras


wrapt.register_post_import_hook(_answer_keras, "keras")
