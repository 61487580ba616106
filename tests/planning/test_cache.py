"""Plans kept in a folder: a problem is searched once, another one anew."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from pathlib import Path

import pytest

import tfpar as tap
from tests.plan.graphs import mlp
from tests.planning.changes import changed
from tfpar.cluster import Cluster, find_cluster
from tfpar.ir import fingerprint
from tfpar.planning.cache import PlanCache
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.meshes import given_mesh, logical_meshes
from tfpar.planning.problem import ConstrainedSpec, Problem, ProblemInstance, StepToPlan
from tfpar.planning.solve import find_plan
from tfpar.spec import Mesh, PlanError, Replicate, Shard

MESH = Mesh.of([2, 2])


class Counting:
    """The planner of TAP under another name; knows how often it was asked."""

    def __init__(self, name: str = "counting") -> None:
        self.name = name
        self.problems: list[Problem] = []

    def solve(self, problem: Problem) -> tap.Plan:
        self.problems.append(problem)
        return dataclasses.replace(TapPlanner().solve(problem), planner=self.name)


@functools.cache
def stated(batch: int, mesh: Mesh, cluster: str | Cluster) -> Problem:
    """One for all who ask: what is known of its graph holds for each search."""
    graph = mlp(batch=batch, hidden=16)
    step = StepToPlan(graph, frozenset(graph.inputs), fingerprint(graph), graph.variables)
    return Problem(ProblemInstance(step, find_cluster(cluster, mesh)), logical_meshes(mesh))


def problem(
    batch: int = 8, mesh: Mesh = MESH, cluster: str | Cluster = "dgx-a100", **changes
) -> Problem:
    fresh = stated(batch, mesh, cluster).with_step()  # of which no plan is known
    return changed(fresh, **changes)


def kept(folder) -> list[Path]:
    """The plans in a folder."""
    return sorted(Path(folder).glob("*.json"))


# --- one folder ------------------------------------------------------------------------


def test_a_problem_is_searched_once(tmp_path):
    planner, cache = Counting(), PlanCache(str(tmp_path / "new" / "plans"))
    first = find_plan(problem(), planner, cache)
    again = find_plan(problem(), planner, cache)
    assert len(planner.problems) == 1 and again == first and again.planner == "counting"
    assert len(kept(cache.folder)) == 1
    find_plan(problem(), planner, None)
    assert len(planner.problems) == 2


def test_the_cluster_s_name_does_not_matter(tmp_path):
    planner, cache = Counting(), PlanCache(str(tmp_path))
    find_plan(problem(), planner, cache)
    renamed = dataclasses.replace(find_cluster("dgx-a100", MESH), name="ours")
    find_plan(problem(cluster=renamed), planner, cache)
    assert len(planner.problems) == 1


def test_a_kept_plan_has_the_variables_of_the_problem_that_it_answers(tmp_path):
    """Two optimizers with as many slots: the weights' plan is one, the slots are their own."""
    planner, cache = Counting(), PlanCache(str(tmp_path))
    plain = problem()

    def with_slot(name):
        weight = plain.step.variables[0]
        return plain.with_step(
            variables=[
                *plain.step.variables,
                dataclasses.replace(weight, name=name, trainable=False),
            ]
        )

    first = find_plan(with_slot("adam/momentum"), planner, cache)
    again = find_plan(with_slot("lion/momentum"), planner, cache)
    assert len(planner.problems) == 1
    assert "adam/momentum" in first.variables and "adam/momentum" not in again.variables
    assert again.variables["lion/momentum"].spec is None
    weights = {v.name for v in plain.step.variables}
    assert all(again.variables[name] == first.variables[name] for name in weights)


COLUMNS = (Replicate(), Shard(1))

OTHERS = {
    "batch size": problem(batch=16),
    "mesh": problem(mesh=Mesh.of([4, 2])),
    "cluster": problem(cluster="v100-ethernet"),
    "logical mesh": problem(meshes=[given_mesh(MESH, ["data"])]),
    "batch axes": problem(meshes=[given_mesh(MESH, ["data", "model"])]),
    "nothing batched": problem(batched=frozenset()),
    "constraint": problem(
        meshes=[given_mesh(MESH, ["data"])], fixed={"head/kernel": ConstrainedSpec(COLUMNS, "so")}
    ),
    "another spec": problem(
        meshes=[given_mesh(MESH, ["data"])],
        fixed={"head/kernel": ConstrainedSpec((Replicate(), Shard(0)), "so")},
    ),
    "optimizer": problem(state_ratio=2.0),
    "XLA": problem(jit_compile=True),
    "model": problem(fingerprint="another"),
}


@pytest.mark.slow
def test_every_other_problem_is_another_entry(tmp_path):
    planner, cache = Counting(), PlanCache(str(tmp_path))
    find_plan(problem(), planner, cache)
    for count, (what, other) in enumerate(OTHERS.items(), 2):
        find_plan(other, planner, cache)
        assert len(planner.problems) == len(kept(tmp_path)) == count, what
    for what, other in OTHERS.items():
        find_plan(other, planner, cache)
        assert len(planner.problems) == count, what


def test_another_planner_is_another_entry(tmp_path):
    cache, planners = PlanCache(str(tmp_path)), [Counting(), Counting("another")]
    for planner in (*planners, *planners):
        assert find_plan(problem(), planner, cache).planner == planner.name
    assert [len(p.problems) for p in planners] == [1, 1]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "tfpar plan", "version": 999}'])
def test_a_file_that_cannot_be_read_is_written_anew(content, tmp_path, caplog):
    planner, cache = Counting(), PlanCache(str(tmp_path))
    first = find_plan(problem(), planner, cache)
    (file,) = kept(tmp_path)
    whole = file.read_text()
    file.write_text(content)
    with caplog.at_level(logging.WARNING, "tfpar"):
        assert find_plan(problem(), planner, cache) == first
    assert len(planner.problems) == 2 and file.read_text() == whole
    (record,) = caplog.records
    assert str(file) in record.message and "searched anew" in record.message
    assert find_plan(problem(), planner, cache) == first and len(planner.problems) == 2


def test_a_folder_that_cannot_be_made(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for folder in (blocked, blocked / "plans"):
        with pytest.raises(PlanError, match=f"Cannot make the folder '{folder}'.*another one"):
            find_plan(problem(), Counting(), PlanCache(str(folder)))


def test_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PlanError, match=f"Cannot write the plan file '{tmp_path}.*denied"):
        find_plan(problem(), Counting(), PlanCache(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []  # nothing half-written stays


# --- what has changed ------------------------------------------------------------------

LESS = dataclasses.replace(find_cluster("dgx-a100", MESH), overlap=0.5)
SLOW = find_cluster("dgx-a100", MESH).with_memory(8 * 2**30)
WIDER = mlp(batch=8, hidden=32)
SMOOTH = mlp(batch=8, hidden=16, activation="Tanh")


def of_graph(graph, **changes):
    return problem(
        graph=graph,
        batched=frozenset(graph.inputs),
        fingerprint=fingerprint(graph),
        variables=graph.variables,
        **changes,
    )


CHANGED = {
    "the batch (8 -> 16)": OTHERS["batch size"],
    "the mesh (4 -> 8 ranks)": OTHERS["mesh"],
    "the cluster (dgx-a100 -> v100-ethernet)": OTHERS["cluster"],
    "the figures of cluster dgx-a100": problem(cluster=LESS),
    "the memory limit (74.51 GiB -> 8.00 GiB)": problem(cluster=SLOW),
    "the mesh (one of 6 -> data=2 x model=2, batch over data)": OTHERS["logical mesh"],
    "the meshes to choose from": problem(meshes=logical_meshes(MESH)[::-1]),
    "jit_compile (False -> True)": OTHERS["XLA"],
    "recompute (None -> ['block_0'])": problem(recompute=("block_0",)),
    "microbatches (1 -> 4)": problem(microbatches=4),
    "optimizer slots per byte of weight (None -> 2.0)": OTHERS["optimizer"],
    "the ops (-3 Relu, +3 Tanh)": of_graph(SMOOTH),
    "the weights ('block_0/fc1/kernel', 'block_0/fc1/bias', 'block_0/fc2/kernel')": of_graph(WIDER),
    "the ops (as many, joined otherwise)": OTHERS["model"],
    "jit_compile (False -> True), the batch (8 -> 16)": problem(batch=16, jit_compile=True),
}


@pytest.mark.parametrize("told", CHANGED)
def test_a_miss_says_what_has_changed(told, tmp_path):
    planner, cache = Counting(), PlanCache(str(tmp_path))
    assert cache.nearest(CHANGED[told], planner) == ""  # against nothing
    find_plan(problem(), planner, cache)
    assert cache.nearest(problem(), planner) == ""  # that one is there
    found = cache.nearest(CHANGED[told], planner)
    assert found == f"no cached plan: of 1 in {tmp_path} the nearest differs by {told}"


def test_the_nearest_of_several_is_taken(tmp_path):
    planner, cache = Counting(), PlanCache(str(tmp_path))
    for other in (problem(batch=16, cluster="v100-ethernet"), problem(batch=32), OTHERS["mesh"]):
        find_plan(other, planner, cache)
    found = cache.nearest(problem(batch=64), planner)
    assert found.startswith("no cached plan: of 3 in ")
    assert found.endswith("differs by the batch (32 -> 64)")
    (tmp_path / "broken.problem").write_text("{")
    (tmp_path / "other.problem").write_text('{"format": 999}')
    assert cache.nearest(problem(batch=64), planner) == found


def test_constraints_and_planners_are_told_apart(tmp_path):
    planner, cache = Counting(), PlanCache(str(tmp_path))
    one = problem(constraints=("shard('a', dim=0, axis='model')",), compression="float16")
    find_plan(one.with_step(compression=None), planner, cache)
    other = one.with_given(constraints=("replicate('a')",))
    assert cache.nearest(other, Counting("another")).partition(" differs by ")[2] == (
        "the planner (counting -> another), the constraints (without shard('a', dim=0, "
        "axis='model'), with replicate('a')), compression (None -> float16)"
    )


def test_whoever_searches_is_told_of_a_miss(tmp_path):
    planner, cache, missed = Counting(), PlanCache(str(tmp_path)), []
    for batch in (8, 8, 16):
        find_plan(problem(batch=batch), planner, cache, missed=missed.append)
    assert [next(iter(p.step.batched)).shape[0] for p in missed] == [8, 16]
