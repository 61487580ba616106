"""What is kept of searches for those on meshes that are like theirs."""

from __future__ import annotations

import pytest

from tests.cases import at_night
from tests.planning.problems import Captured
from tfpar.planning.intra_op.tap.mesh_search import MeshSearch
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.intra_op.tap.warm_starts import MOST_KEPT, WarmStarts, kind_of
from tfpar.planning.memo import Memo
from tfpar.planning.meshes import logical_meshes
from tfpar.spec import Mesh, parse_spec

COLUMNS, ROWS = map(parse_spec, ("R,S(1)", "R,S(0)"))


def test_layouts_are_kept_once_by_what_axes_are_for():
    layouts, few, many = WarmStarts(), logical_meshes(Mesh.of([4])), logical_meshes(Mesh.of([8]))
    layouts.add(few[1], {"kernel": COLUMNS})
    layouts.add(many[3], {"kernel": COLUMNS})
    layouts.add(many[3], {"kernel": ROWS})
    assert kind_of(few[1]) == kind_of(many[3]) != kind_of(many[2])
    assert layouts.of(many[1]) == ({"kernel": ROWS}, {"kernel": COLUMNS})
    assert not layouts.of(many[2])
    layouts.add(few[1], {"kernel": COLUMNS})
    assert layouts.of(many[1])[0] == {"kernel": COLUMNS}
    for i in range(MOST_KEPT):
        layouts.add(few[1], {f"other_{i}": COLUMNS})
    assert len(layouts.of(many[1])) == MOST_KEPT
    assert {"kernel": COLUMNS} not in layouts.of(many[1])


def test_what_was_found_for_as_many_ranks_is_not_found_elsewhere():
    layouts, logical = WarmStarts(), logical_meshes(Mesh.of([4]))[1]
    layouts.add(logical, {"kernel": COLUMNS})
    assert not layouts.elsewhere(4)
    assert layouts.elsewhere(8) == {kind_of(logical)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["wide", *at_night("gpt_short", "moe_4_experts")],
)
def test_a_search_after_one_for_other_ranks_finds_as_much(name):
    captured, known = Captured.saved(name), Memo()
    alone = TapPlanner().solve(captured.problem([2, 4], "v100-ethernet"))
    for shape in ([4, 4], [2, 4]):
        problem = captured.problem(shape, "v100-ethernet")
        after = TapPlanner().solve(problem.with_step(graph_memo=known))
    assert after.cost.seconds == pytest.approx(alone.cost.seconds, rel=1e-9)


@pytest.mark.nightly
def test_meshes_that_look_bad_at_a_glance_are_not_searched(monkeypatch):
    glanced, explored = [], []

    def told(name, into):
        method = getattr(MeshSearch, name)

        def wrapped(self, *args):
            into.append(self.logical)
            method(self, *args)

        monkeypatch.setattr(MeshSearch, name, wrapped)

    captured, known = Captured.saved("gpt_short"), Memo()
    TapPlanner().solve(captured.problem([2, 8], "v100-ethernet").with_step(graph_memo=known))
    told("glance", glanced)
    told("explore", explored)
    problem = captured.problem([2, 4], "v100-ethernet")
    plan = TapPlanner().solve(problem.with_step(graph_memo=known))
    left = [logical for logical in glanced if logical not in explored]
    assert left and all(len(logical.used_axes) > 1 for logical in left)
    assert plan.mesh not in [logical.mesh for logical in left]
