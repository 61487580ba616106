"""One rank: trains a model under a layout, and reads its node's interface.

python -m benchmarks.shaped_cluster.worker CONFIG    # started by `tfpar run`
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import keras

import tfpar as tap
from benchmarks import models
from benchmarks.shaped_cluster.config import MARK, Config
from benchmarks.shaped_cluster.namespaces import limit, sent_bytes
from benchmarks.shaped_cluster.prediction import wire_bytes
from benchmarks.workers import endless
from tfpar.cluster.check import TRANSFER
from tfpar.cluster.description import Cluster, Level
from tfpar.cluster.files import read_cluster
from tfpar.cost.evaluation import evaluate
from tfpar.ir.roles import Roles
from tfpar.spec import Shard
from tfpar.tf.distributed.world import World, this_world

# Of Gloo through Horovod on the machine of the benchmarks, empirical: ranks of a node over its
# loopback, and nodes over a link that could do more; most of the latency is Horovod's agreeing.
BANDWIDTH, LATENCY_S = 5e8, 2e-3
CLASSES = 10_000  # of `wide`, which has 22 MB of weights then; `gpt` has 29 MB
CALIBRATION_S = 40.0
WARM_UP_STEPS = 2
IDLE_S = 1.0


class Training:
    """A model and its batch; the first steps are taken here, before links are limited.

    Args:
        machines: the cluster without limits, as calibrated.
    """

    def __init__(self, config: Config, machines: Cluster) -> None:
        self._config, self._machines = config, machines
        build, size, batch = (
            (models.wide, {"classes": CLASSES, **config.size}, models.wide_batch)
            if config.model == "wide"
            else (models.gpt, dict(config.size), models.gpt_batch)
        )
        keras.utils.set_random_seed(0)
        with context(config, machines):
            self._model = models.compile_model(build(**size))
        of_batch = {k: n for k, n in size.items() if k in ("length", "vocabulary", "classes")}
        self._dataset = endless(batch(**of_batch))
        self.first_loss = self.step()
        for _ in range(WARM_UP_STEPS - 1):
            self.step()

    def timed_step(self, world: World) -> dict[str, float]:
        """Seconds of a step, and the bytes that the node has sent in it."""
        meet(world)
        before, start = sent_bytes(), time.perf_counter()
        self.step()
        seconds = time.perf_counter() - start
        meet(world)
        return {"seconds": seconds, "sent": sent_bytes() - before}

    def plan(self, mbit: float | None) -> dict[str, Any]:
        """What the plan is, and what it predicts; `bytes` are those that each node sends.

        A pipeline has been priced for the bandwidth that it was searched for, and no other.
        """
        plan = tap.plan_of(self._model)
        if plan.stages is not None:
            return _in_stages(plan, self._config.ranks_per_node)
        partitioned = plan.partitioned
        assert partitioned is not None
        collectives = partitioned.collectives()
        weights = {v: s for v, s in partitioned.variable_specs.items() if v.trainable}
        cluster = describe(self._config, mbit, self._machines)
        cost = evaluate(partitioned, cluster, Roles.of(partitioned.graph))
        return {
            "mesh": str(plan.mesh),
            "batch_axes": plan.batch_axes,
            "weights": len(weights),
            "split": [v.name for v, s in weights.items() if any(isinstance(p, Shard) for p in s)],
            "collectives": len(collectives),
            "seconds": cost.seconds,
            "bytes": wire_bytes(collectives, plan.mesh, self._config.ranks_per_node),
        }

    def step(self) -> float:
        """Take one step; its loss."""
        history = self._model.fit(self._dataset, steps_per_epoch=1, shuffle=False, verbose=0)
        return history.history["loss"][0]


def _in_stages(plan: tap.Plan, ranks_per_node: int) -> dict[str, Any]:
    """Of a pipeline with one stage on each node or more: all that its stages send goes over
    links."""
    assert plan.stages is not None and plan.stages.cost is not None, "a searched plan"
    sent = [0.0] * (plan.num_ranks // ranks_per_node)
    for share in plan.stages.cost.stages:
        for rank in share.ranks:
            sent[rank // ranks_per_node] += share.sent_bytes
    return {
        "mesh": str(plan.mesh),
        "batch_axes": plan.batch_axes,
        "schedule": str(plan.stages.schedule),
        "owners": dict(plan.stages.owners),
        "bubble": plan.stages.cost.bubble,
        "seconds": plan.stages.cost.seconds,
        "bytes": sent,
    }


def describe(config: Config, mbit: float | None, machines: Cluster) -> Cluster:
    """The cluster as a planner is told of it: measured, but for links with a limit."""
    if mbit is None:
        return machines
    levels = [
        Level(config.nodes, min(mbit * 1e6 / 8, BANDWIDTH), LATENCY_S),
        Level(config.ranks_per_node, BANDWIDTH, LATENCY_S),
    ]
    # Limits make links slower; what starts a transfer stays.
    transfers = tuple(found for found in machines.measured if found.kind == TRANSFER)
    return Cluster.regular(
        "shaped",
        machines.device,
        levels,
        overlap=machines.overlap,
        step_s=machines.step_s,
        measured=transfers,
    )


def context(config: Config, machines: Cluster) -> tap.auto_parallel:
    """Where the model is made."""
    nodes, each = config.nodes, config.ranks_per_node
    if config.layout == "data":
        return tap.auto_parallel(tap.split([nodes * each, 1]), planner=None)
    if config.layout == "megatron":  # within a node where it can be, as it all-reduces often
        shape = [nodes, each] if each > 1 else [1, nodes]
        constraints = [*models.layout(config.model), tap.batch("data")]
        return tap.auto_parallel(tap.split(shape), constraints, planner=None)
    cluster = describe(config, config.mbits[0], machines)
    if config.layout == "pipeline":
        pipeline = tap.Pipeline(stages=nodes * each, microbatches=config.microbatches)
        return tap.auto_parallel(tap.split([nodes * each]), pipeline=pipeline, cluster=cluster)
    return tap.auto_parallel(tap.split([nodes, each]), cluster=cluster)


def measure(config: Config) -> list[dict[str, Any]]:
    """This rank's figures, for each bandwidth."""
    training = Training(config, machines_of(config))
    world = this_world()
    assert world is not None
    return [at_bandwidth(config, mbit, training, world) for mbit in config.mbits]


def machines_of(config: Config) -> Cluster:
    """The cluster without limits, measured by the first job."""
    shape, path = [config.nodes, config.ranks_per_node], config.machines
    if os.path.exists(path):
        return read_cluster(path)
    return tap.calibrate(shape, path, budget_s=CALIBRATION_S)  # written when all have come here


def at_bandwidth(
    config: Config, mbit: float | None, training: Training, world: World
) -> dict[str, Any]:
    """Steps over limited links; the first of them is not counted."""
    if world.job.local_rank == 0:
        limit(mbit)
    idle = idle_rate(world)
    _, *steps = [training.timed_step(world) for _ in range(1 + config.steps)]
    meet(world)
    if world.job.local_rank == 0:
        limit(None)
    plan = training.plan(mbit)
    return {"idle_rate": idle, "steps": steps, "plan": plan, "first_loss": training.first_loss}


def meet(world: World) -> None:
    """Wait for all ranks: all that they were sent has then arrived."""
    with world.at("waiting for the other ranks"):
        world.exchange.messages(None)


def idle_rate(world: World) -> float:
    """Bytes/s that the node sends while no rank trains: Horovod asks what to do next."""
    meet(world)
    before = sent_bytes()
    time.sleep(IDLE_S)
    rate = (sent_bytes() - before) / IDLE_S
    meet(world)
    return rate


if __name__ == "__main__":
    print(f"{MARK}{json.dumps(measure(Config.from_json(sys.argv[1])))}", flush=True)
