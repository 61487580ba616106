"""Unequal nodes: quotas of cores and one slow link, the plans that are compared, and the table."""

import os
import pathlib
import subprocess
import sys

import pytest

import tfpar as tap
from benchmarks.shaped_cluster import __main__ as command
from benchmarks.shaped_cluster import cores, namespaces, unequal
from benchmarks.shaped_cluster.unequal_config import NAMES, Config
from benchmarks.shaped_cluster.unequal_plans import contexts, equal_layers
from tests.time_limits import time_limit

pytestmark = pytest.mark.xdist_group("processes")


def row(plan, predicted_s, measured_s, **fields):
    times = {"predicted_s": predicted_s, "measured_s": measured_s, "min_s": 0.1, "max_s": 9.0}
    return {"plan": plan, **times, "first_loss": 1.0, "mesh": "data=4", "shares": {}, **fields}


ROWS = [
    row("data", 3.0, 4.0),
    row("data, unequal shares", 2.0, 2.5, shares={"data": [5, 5, 5, 1]}),
    row("megatron", 2.5, 3.0),
    row("chosen", 1.0, 2.0, stages=2, ranks=[0, 2, 1, 3], microbatches=8),
]


def test_the_chosen_plan_is_held_against_the_others():
    found = unequal.summary(ROWS)
    assert found == {"rho": pytest.approx(1), "data": 2.0, "megatron": 1.5, "best": 1.0}
    slower = [*ROWS[:3], row("chosen", 1.0, 3.5)]
    assert unequal.summary(slower)["best"] == pytest.approx(1.4)
    assert unequal.summary(slower)["rho"] == pytest.approx(0.4)
    assert unequal.summary(ROWS[:2]) == {"rho": pytest.approx(1)}


def test_the_table_says_what_plans_are_and_which_is_fastest():
    told = unequal.report(ROWS)
    (fastest,) = [line for line in told.splitlines() if "*" in line and line.startswith("|")]
    assert "chosen" in fastest and "ranks 0+2, 1+3; 8 microbatches" in fastest
    assert "shares 5/5/5/1" in told and "chosen is 1.50 times as fast as megatron" in told


def test_another_loss_is_refused():
    other = {**ROWS[1], "first_loss": 1.1}
    with pytest.raises(namespaces.ClusterError, match="1.1 with the plan 'data, unequal shares'"):
        unequal._check_loss(other, ROWS[0])


def test_all_plans_are_what_the_public_api_takes():
    machines = tap.Cluster.regular(
        "four", tap.Device({"float32": 1e9}, 1e9, 1e9), [tap.Level(4, 1e8, 1e-3)]
    )
    found = contexts(machines, 4, 8)
    assert tuple(found) == NAMES
    for context in found.values():
        with context() as session:
            assert session is not None  # it was taken


def test_equal_layers_are_in_order():
    stages = [constraint.index for constraint in equal_layers(4, 2)]
    assert stages == [0, 1, 0, 0, 1, 1]


def test_a_config_is_the_same_at_both_ends():
    config = Config(
        size={"hidden": 64}, cores=(0.5, 0.2), batch=8, microbatches=4, steps=2, calibration_s=1.0
    ).at(plan="data", groups="/tmp/groups")
    assert Config.from_json(config.to_json()) == config


def test_without_the_controller_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(command, "obstacle", lambda: None)
    monkeypatch.setattr(cores, "_hierarchy", lambda: None)
    monkeypatch.setattr(sys, "argv", ["shaped_cluster", "--unequal"])
    assert command.main() == unequal.NOT_POSSIBLE
    assert "cgroup v1" in capsys.readouterr().err


def test_a_missing_controller_is_named(monkeypatch, tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    monkeypatch.setattr(cores, "_MOUNTS", str(mounts))
    assert "cgroup v1" in (cores.obstacle() or "")
    mounts.write_text("cgroup /groups cgroup rw,relatime,cpu,cpuacct 0 0\n")
    assert cores._hierarchy() == (pathlib.Path("/groups"), "cpu,cpuacct")


# --- a cluster -------------------------------------------------------------------------

BUSY = """
import sys, time
from benchmarks.shaped_cluster.cores import held
with held(sys.argv[1], float(sys.argv[2])):
    end = time.monotonic() + 0.6
    start = time.process_time()
    while time.monotonic() < end:
        pass
    print(time.process_time() - start)
"""


@pytest.fixture
def possible():
    """Skips where there can be no namespaces or quotas, or another cluster is up."""
    why = namespaces.obstacle() or cores.obstacle()
    if why is None:
        try:
            with namespaces.cluster(1) as nodes, cores.groups(nodes, 0.5):
                pass
        except (namespaces.ClusterError, subprocess.SubprocessError) as error:
            why = str(error)
    if why is not None:
        pytest.skip(why)


def test_a_node_has_no_more_than_its_quota_and_groups_go(possible):
    hierarchy = cores._hierarchy()
    with namespaces.cluster(2) as nodes, cores.groups(nodes, 0.1) as groups:
        made = {group.name for group in hierarchy.folder.glob(f"{namespaces.PREFIX}*")}
        assert made == {node.namespace for node in nodes}
        script = f'set -- {nodes[1].address} "$@"; {groups.first} "$2" -c "$3" "$4" 0.1'
        done = subprocess.run(
            ["sh", "-c", script, "sh", sys.executable, BUSY, groups.folder],
            env={**os.environ, "PYTHONPATH": str(namespaces.__file__).partition("/benchmarks")[0]},
            capture_output=True,
            text=True,
            timeout=time_limit(30),
        )
        assert done.returncode == 0, done.stderr
        # A busy machine may grant less; a tick of the kernel's clock more.
        assert float(done.stdout) < 0.12
    assert not list(hierarchy.folder.glob(f"{namespaces.PREFIX}*"))


def test_a_link_is_limited_both_ways(possible):
    with namespaces.cluster(2) as nodes:
        namespaces.limit_link(nodes[0], 200.0)
        for where, device in (
            (nodes[0].namespace, namespaces.INTERFACE),
            (namespaces.HEAD, "port1"),
        ):
            told = subprocess.run(
                ["tc", "-n", where, "qdisc", "show", "dev", device],
                capture_output=True,
                text=True,
                timeout=time_limit(20),
            )
            assert "rate 200Mbit" in told.stdout
        namespaces.limit_link(nodes[0], None)
