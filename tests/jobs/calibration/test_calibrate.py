"""Calibration of ranks in this process and of processes."""

import math

import keras
import numpy as np
import pytest

import tfpar as tap
import tfpar.jobs.calibration.calibrate as module
from tests.cases import at_night
from tests.tf.distributed import jobs
from tfpar.__main__ import main
from tfpar.cluster import TRANSFER, describe, find_measurement, path_between, read_cluster
from tfpar.cost import collective_seconds
from tfpar.jobs.calibration.calibrate import calibrate
from tfpar.jobs.calibration.links import axes_to_measure
from tfpar.spec import COLLECTIVES, Mesh, TfparError


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A cluster of two ranks, and its file."""
    path = str(tmp_path_factory.mktemp("calibrate") / "local.toml")
    return calibrate([2], path, budget_s=0.1), path


@pytest.mark.slow
def test_the_file_holds_what_was_measured(local):
    cluster, path = local
    assert describe(read_cluster(path)) == describe(cluster)


@pytest.mark.slow
def test_devices_have_rates_of_all_kinds(local):
    cluster, _ = local
    assert (cluster.size, cluster.num_nodes) == (2, 1)
    assert {"float32", "bfloat16", "float16"} <= set(cluster.device.flops)
    assert 0 < cluster.step_s < 1 and 0 <= cluster.device.launch_s < 1e-2
    assert cluster.device.functions_per_s > 1e5
    assert cluster.device.memory_bandwidth > 1e6 and cluster.device.memory_bytes > 1e8


@pytest.mark.slow
def test_every_collective_has_been_measured(local):
    cluster, _ = local
    for mesh in (Mesh.of([2]), Mesh.of([1, 2])):
        axes = (mesh.num_axes - 1,)
        for kind in COLLECTIVES:
            assert find_measurement(cluster, kind, mesh, axes) is not None
            assert math.isfinite(collective_seconds(kind, axes, 1e6, mesh, cluster))
    assert collective_seconds("all_reduce", (0,), 1e7, Mesh.of([2]), cluster) > 1e-5


@pytest.mark.slow
def test_links_are_those_of_the_all_reduce(local):
    cluster, _ = local
    whole = next(m for m in cluster.measured if m.kind == "all_reduce")
    (level,) = cluster.nodes[0].levels
    assert 2 * level.latency_s == pytest.approx(whole.startup_s)
    assert level.bandwidth == pytest.approx(whole.bandwidth)


@pytest.mark.slow
def test_a_plan_is_made_for_it(local):
    _, path = local

    def build():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    batch = np.ones((4, 8), "float32"), np.ones((4, 4), "float32")
    plan = tap.plan(build, batch, [2], path)
    assert plan.cluster == read_cluster(path)
    assert plan.cost.seconds > plan.cluster.step_s


@pytest.mark.parametrize("shape", [[4], [6], [2, 4], [2, 2, 2], [3, 2, 2]])
def test_every_axis_of_any_mesh_of_so_many_ranks_is_measured(shape):
    mesh = Mesh.of(shape)
    found = {layout.groups((axis,)) for layout, axis in axes_to_measure(mesh)}
    assert len(found) == len(axes_to_measure(mesh))
    assert {mesh.groups((a,)) for a in range(mesh.num_axes)} <= found
    for n in (n for n in range(2, mesh.size + 1) if mesh.size % n == 0):
        assert Mesh.of([mesh.size // n, n]).groups((1,)) in found
        assert Mesh.of([n, mesh.size // n]).groups((0,)) in found


def test_one_rank_has_no_axes():
    assert axes_to_measure(Mesh.of([1])) == []


# --- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_s", [0, -1.0, math.nan])
def test_a_budget_of_nothing_is_refused(budget_s):
    with pytest.raises(TfparError, match="budget_s is"):
        calibrate([2], budget_s=budget_s)


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    with pytest.raises(TfparError, match="no folder.*elsewhere"):
        calibrate([2], str(tmp_path / "elsewhere" / "local.toml"))
    with pytest.raises(TfparError, match="it is a folder"):
        calibrate([2], str(tmp_path))


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(module.tf.config, "list_physical_devices", lambda kind: [object()])
    with pytest.raises(TfparError, match="has 2 ranks, but this process sees 1 GPUs"):
        calibrate([2])


def test_without_a_mesh_there_has_to_be_a_job_or_a_gpu():
    with pytest.raises(TfparError, match="needs a mesh"):
        calibrate()


def test_the_command_names_what_is_wrong(capsys):
    assert main(["calibrate", "--mesh", "2", "--budget", "0"]) == 2
    assert "tfpar calibrate: budget_s is 0" in capsys.readouterr().err
    assert main(["calibrate", "--mesh", "two"]) == 2
    assert "'two' is no mesh" in capsys.readouterr().err


# --- processes ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("backend", ["tensorflow", *at_night("horovod")])
def test_processes_get_one_cluster(tmp_path, backend):
    if backend == "horovod":
        pytest.importorskip("horovod")
    path = tmp_path / "local.toml"
    job = jobs.run(2, "tests.jobs.calibration.ranks", path, seconds=240, backend=backend)
    assert job.code == 0, job.output
    assert job.output.count("the same everywhere") == 2
    # Progress of the first rank alone.
    assert "[0] tfpar: measuring: overlap" in job.output
    assert "[1] tfpar: measuring" not in job.output
    cluster = read_cluster(str(path))
    assert cluster.size == 2
    (sent,) = (found for found in cluster.measured if found.kind == TRANSFER)
    assert sent.startup_s > 1e-6 and path_between(cluster, 0, 1)[1] == sent.startup_s
