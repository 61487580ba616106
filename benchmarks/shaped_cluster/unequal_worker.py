"""One rank on unequal nodes: calibrates them, or trains a GPT under a plan.

python -m benchmarks.shaped_cluster.unequal_worker CONFIG    # started by `tfpar run`
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from typing import Any

import keras
import tensorflow as tf

import tfpar as tap
from benchmarks import models
from benchmarks.shaped_cluster.config import MARK
from benchmarks.shaped_cluster.cores import held
from benchmarks.shaped_cluster.unequal_config import Config
from benchmarks.shaped_cluster.unequal_plans import Context, contexts
from benchmarks.shaped_cluster.worker import meet
from tfpar.cluster.description import Cluster
from tfpar.cluster.files import describe, read_cluster
from tfpar.cost.cost import Cost
from tfpar.cost.evaluation import evaluate
from tfpar.ir.roles import Roles
from tfpar.tf.distributed.world import World, this_world
from tfpar.tf.keras.adapter import parallel_model


class Training:
    """A model under one plan; the first step, which compiles it, is taken here."""

    def __init__(self, context: Context, config: Config, cluster: Cluster) -> None:
        keras.utils.set_random_seed(0)
        with context():
            model = models.compile_model(models.gpt(**config.size))
        of_batch = {k: n for k, n in config.size.items() if k in ("length", "vocabulary")}
        x, y = models.gpt_batch(config.batch, **of_batch)
        self._batch = (tf.constant(x), tf.constant(y))
        self.first_loss = float(model.train_on_batch(x, y))
        state = parallel_model(model)
        assert state is not None and state.plan is not None
        self._model, self._step, self.plan = model, state.executables["train"], state.plan
        self.cost = self._cost(cluster)

    def _cost(self, cluster: Cluster) -> Cost:
        """What the plan says; where nothing was searched, what the step is priced at."""
        if self.plan.cost is not None:
            return self.plan.cost
        gradients = [t for g in self._step.captured.gradients for t in g.tensors]
        laid = self._step.partitioned
        return evaluate(laid, cluster, Roles.of(laid.graph, gradients))

    def timed_step(self, world: World) -> tuple[float, float]:
        """Seconds of a step, from when all ranks begin it until this one is through, and those of
        the processor that this rank takes."""
        meet(world)
        start, used = time.perf_counter(), time.process_time()
        self._step((self._batch,))
        return time.perf_counter() - start, time.process_time() - used


def measure(config: Config) -> dict[str, Any]:
    """This rank's figures."""
    world = this_world()
    assert world is not None
    quota = held(config.groups, config.cores[world.rank])
    if not config.plan:
        with quota:
            return describe(tap.calibrate(path=config.machines, budget_s=config.calibration_s))
    cluster = read_cluster(config.machines)
    makes = contexts(cluster, config.size["num_layers"], config.microbatches)
    training = Training(makes[config.plan], config, cluster)
    meet(world)  # what is not measured need not be slow
    with quota:
        # The first step fills caches.
        _, *steps = [training.timed_step(world) for _ in range(1 + config.steps)]
        meet(world)
    return {
        "predicted_s": training.cost.seconds,
        "steps_s": [seconds for seconds, _ in steps],
        "cpu_s": statistics.median(used for _, used in steps),
        "first_loss": training.first_loss,
        "cost": dataclasses.asdict(training.cost),
        **_described(training.plan),
    }


def _described(plan: tap.Plan) -> dict[str, Any]:
    """What a plan is, in short, and what a pipeline's stages take."""
    found: dict[str, Any] = {"mesh": str(plan.mesh), "shares": dict(plan.shares or {})}
    if plan.stages is not None:
        found |= {
            "stages": plan.stages.num_actors,
            "microbatches": plan.microbatches,
            "ranks": list(plan.stages.ranks),
            "schedule": str(plan.stages.schedule),
            "owners": dict(plan.stages.owners),
        }
        if plan.stages.cost is not None:
            found["tasks"] = [
                {
                    "ranks": list(s.ranks),
                    "forward_s": s.forward_s,
                    "backward_s": s.backward_s,
                    "update_s": s.update_s,
                    "reduction_s": s.reduction_s,
                    "sent_bytes": s.sent_bytes,
                    "bubble": s.bubble,
                }
                for s in plan.stages.cost.stages
            ]
    if plan.findings.rivals:
        found["rivals"] = [
            [rival.name, None if rival.cost is None else rival.cost.seconds, rival.reason]
            for rival in plan.findings.rivals
        ]
    return found


if __name__ == "__main__":
    print(f"{MARK}{json.dumps(measure(Config.from_json(sys.argv[1])))}", flush=True)
