"""The benchmark of pipelines: what its contenders train, and what is told of their memory."""

import dataclasses

import numpy as np
import pytest

from benchmarks.pipeline.config import Memory
from benchmarks.pipeline.resident import forget_peak, resident
from benchmarks.shaped_cluster.config import Config
from benchmarks.shaped_cluster.worker import Training
from tfpar.cluster import find_cluster, read_cluster, write_cluster
from tfpar.spec import Mesh


def test_ranks_are_told_what_to_measure():
    config = Memory(microbatches=(2, 3), systems=("gpipe",), width=8)
    assert Memory.from_json(config.to_json()) == config


def test_a_peak_is_of_what_came_since_the_last_one():
    large = np.ones(2**25)  # 256 MiB
    assert resident("VmHWM") >= large.nbytes
    del large
    before = forget_peak()
    again = np.ones(2**23)
    assert again.nbytes <= resident("VmHWM") - before < 2 * again.nbytes


@pytest.mark.nightly
def test_a_pipeline_trains_as_data_parallelism_does_and_says_what_it_sends(tmp_path):
    machines = tmp_path / "machines.toml"
    write_cluster(find_cluster("cpu-processes", Mesh.of([1, 2])), machines)
    size = {"num_layers": 2, "hidden": 16, "heads": 2, "length": 8, "vocabulary": 32}
    config = Config(
        model="gpt",
        layout="data",
        nodes=1,
        ranks_per_node=2,
        mbits=(None,),
        machines=str(machines),
        size=size,
        microbatches=4,
    )
    data = Training(config, read_cluster(machines))
    staged = Training(dataclasses.replace(config, layout="pipeline"), read_cluster(machines))
    assert staged.first_loss == pytest.approx(data.first_loss, rel=1e-5)
    plan = staged.plan(None)
    assert plan["bubble"] > 0 and plan["seconds"] > 0
    assert len(set(plan["owners"].values())) == 2
    boundary = 8 * size["length"] * size["hidden"] * 4  # of a batch of 8, once each way
    # A cut in the middle of a block has the residual beside.
    assert plan["bytes"][0] in (2 * boundary, 4 * boundary)
