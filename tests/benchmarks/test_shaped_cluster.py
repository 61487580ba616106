"""The cluster of network namespaces: what goes over its links, and that nothing of it stays."""

import importlib.util
import json
import signal
import subprocess
import sys

import pytest

from benchmarks.shaped_cluster import __main__ as command
from benchmarks.shaped_cluster import namespaces
from benchmarks.shaped_cluster.config import Config
from benchmarks.shaped_cluster.job import run_ranks
from benchmarks.shaped_cluster.prediction import wire_bytes
from benchmarks.workers import ROOT
from tests.time_limits import time_limit
from tfpar.cluster import find_cluster, write_cluster
from tfpar.spec import Mesh, TfparError

pytestmark = pytest.mark.xdist_group("processes")

SECONDS = time_limit(55)
RING = Mesh(("data",), (4,))
GRID = Mesh(("data", "model"), (2, 2))


# --- the prediction --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ranks_per_node", "sent"),
    [
        ("all_reduce", 1, [150, 150, 150, 150]),
        ("all_reduce", 2, [150, 150]),  # one of the two ranks has its neighbour elsewhere
        ("all_gather", 1, [75, 75, 75, 75]),
        ("all_gather", 2, [75, 75]),
        ("all_to_all", 1, [75, 75, 75, 75]),
        ("all_to_all", 2, [100, 100]),  # each of two ranks sends a quarter to each of two
        ("reduce_scatter", 1, [75, 75, 75, 75]),
        ("reduce_scatter", 2, [100, 100]),
        ("broadcast", 1, [200, 100, 0, 0]),  # 0 to 1, then 0 to 2 and 1 to 3
        ("broadcast", 2, [200, 0]),
    ],
)
def test_a_collective_of_all_ranks_sends_between_nodes(kind, ranks_per_node, sent):
    assert wire_bytes([(kind, ("data",), 100)], RING, ranks_per_node) == pytest.approx(sent)


def test_groups_within_a_node_send_nothing():
    assert wire_bytes([("all_reduce", ("model",), 100)], GRID, 2) == [0, 0]


def test_groups_side_by_side_share_the_link():
    assert wire_bytes([("all_reduce", ("data",), 100)], GRID, 2) == [200, 200]


def test_a_group_over_both_axes_is_one_ring():
    assert wire_bytes([("all_reduce", ("data", "model"), 100)], GRID, 2) == [150, 150]


def test_collectives_add_up_and_one_node_sends_nothing():
    both = [("all_reduce", ("data",), 100), ("all_gather", ("data",), 100)]
    assert wire_bytes(both, RING, 1) == pytest.approx([225] * 4)
    assert wire_bytes(both, RING, 4) == [0]


def test_axes_of_one_rank_send_nothing():
    assert wire_bytes([("reduce_scatter", ("data",), 100)], Mesh(("data",), (1,)), 1) == [0]


def test_what_is_not_known_is_an_error():
    with pytest.raises(TfparError, match="'send_recv'"):
        wire_bytes([("send_recv", ("data",), 100)], RING, 1)


# --- the table -------------------------------------------------------------------------


def row(layout, step_s, mbit=200.0):
    plan = {"mesh": "data=2 x model=2", "batch_axes": ["data"], "split": ["w"], "weights": 3}
    return {
        "model": "gpt",
        "cluster": "2x2",
        "mbit": mbit,
        "layout": layout,
        "step_s": step_s,
        "min_s": 1.0,
        "max_s": 2.0,
        "planned_s": 1.5,
        "sent_bytes": 2.1e6,
        "planned_bytes": 2e6,
        "ratio": 1.05,
        "idle_bytes": 1e5,
        "plan": {**plan, "collectives": 7},
    }


def test_the_table_names_the_fastest_of_each_place_and_what_was_chosen():
    rows = [row("data", 1.2), row("chosen", 1.1), row("data", 3.0, None), row("chosen", 4.0, None)]
    told = command.report(rows).splitlines()
    starred = [line for line in told if "*" in line and line.startswith("|")]
    assert len(starred) == 2
    assert "chosen" in starred[0] and "no limit" in starred[1] and "data" in starred[1]
    assert told[-2].strip() == (
        "gpt on 2x2 at 200 Mbit/s: data=2 x model=2, batch over data, 1 of 3 weights split, "
        "7 collectives"
    )


def test_who_is_not_root_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["shaped_cluster"])
    assert command.main() == command.NOT_POSSIBLE
    assert "need root" in capsys.readouterr().err


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert "tc cannot be found. Install iproute2." in (namespaces.obstacle() or "")


# --- a cluster -------------------------------------------------------------------------


@pytest.fixture
def possible():
    """Skips where there can be no namespaces, or another cluster is up."""
    why = namespaces.obstacle()
    if why is None:
        try:
            with namespaces.cluster(1) as (node,):
                limiting = "from benchmarks.shaped_cluster.namespaces import limit; limit(100.0)"
                within(node, sys.executable, "-c", limiting)
        except (namespaces.ClusterError, subprocess.SubprocessError) as error:
            why = str(error)
    if why is not None:
        pytest.skip(why)


def within(node, *words):
    inside = namespaces.inside(node.namespace, words)
    return subprocess.run(
        inside, cwd=ROOT, capture_output=True, text=True, timeout=time_limit(20), check=True
    )


def links():
    told = subprocess.run(
        ["ip", "-o", "link"], capture_output=True, text=True, timeout=time_limit(20)
    )
    return {line.split(":")[1].split("@")[0].strip() for line in told.stdout.splitlines()}


def test_a_cluster_leaves_nothing_behind_whatever_happens(possible):
    before = links()
    with pytest.raises(KeyboardInterrupt):
        with namespaces.cluster(2) as (first, second):
            assert links() == before
            sleeping = ["sh", "-c", "echo there; exec sleep 60"]
            sleeper = subprocess.Popen(
                namespaces.inside(second.namespace, sleeping), stdout=subprocess.PIPE
            )
            assert sleeper.stdout and sleeper.stdout.readline() == b"there\n"
            assert "10.231.0.1/24" in within(first, "ip", "-o", "addr").stdout
            raise KeyboardInterrupt
    assert sleeper.wait(timeout=time_limit(10)) == -signal.SIGKILL
    assert namespaces.namespaces() == []
    assert links() == before


def test_what_a_killed_run_has_left_is_removed(possible):
    left = f"{namespaces.PREFIX}left"
    subprocess.run(["ip", "netns", "add", left], check=True, timeout=time_limit(20))
    with namespaces.cluster(1) as nodes:
        assert sorted(namespaces.namespaces()) == [nodes[0].namespace, namespaces.HEAD]
    assert namespaces.namespaces() == []


def test_there_is_one_cluster_at_a_time(possible):
    with namespaces.cluster(1):
        with pytest.raises(namespaces.ClusterError, match="Another shaped cluster is up"):
            with namespaces.cluster(1):
                pass
        assert len(namespaces.namespaces()) == 2


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_two_nodes_send_what_the_plan_predicts(possible, tmp_path):
    machines = str(tmp_path / "machines.toml")
    write_cluster(find_cluster("cpu-processes", Mesh.of([2, 1])), machines)
    config = Config(
        model="gpt",
        layout="data",
        nodes=2,
        ranks_per_node=1,
        mbits=(200.0,),
        machines=machines,
        steps=2,
        size={"num_layers": 1, "hidden": 64, "length": 16, "vocabulary": 8000},
    )
    with namespaces.cluster(2) as nodes:
        ranks = run_ranks(nodes, config, SECONDS)
    assert json.loads(json.dumps(ranks)) == ranks
    for node, ((found,),) in enumerate(zip(ranks, strict=True)):
        predicted = found["plan"]["bytes"][node]
        assert predicted > 2e6  # mostly the gradient of the head; of the table only rows travel
        for step in found["steps"]:
            assert step["sent"] == pytest.approx(predicted, rel=0.15)
            assert step["seconds"] > 0.8 * predicted / (200e6 / 8)
    assert namespaces.namespaces() == []
