"""The comparison of predicted with measured times, without any."""

import pytest

from benchmarks.prediction import MARK, SIZES, Config, _rows, plans, report
from benchmarks.shaped_cluster.namespaces import ClusterError
from tfpar.constraints import batch_axes
from tfpar.spec import Mesh


@pytest.mark.parametrize("ranks", [2, 4])
def test_plans_are_for_their_ranks(ranks):
    for model in SIZES:
        for mesh, constraints in plans(model, ranks).values():
            assert Mesh.of(mesh).size == ranks
            batch_axes(constraints, Mesh.of(mesh))  # names axes of the mesh
    assert sum(len(plans(model, ranks)) for model in SIZES) + len(SIZES) >= 12


def test_a_report_says_how_good_the_choice_is():
    cost = {"compute_s": (0.01,), "communication_s": (0.0,), "exposed_s": 0.0}
    rows = [
        {
            "setting": "s",
            "model": "gpt",
            "plan": plan,
            "layout": "data=2",
            "cost": cost,
            "predicted_s": predicted,
            "measured_s": measured,
            "program": plan,
        }
        for plan, predicted, measured in (
            ("data", 0.02, 0.04),
            ("zero", 0.03, 0.05),
            ("searched", 0.01, 0.042),
        )
    ]
    text = report(rows)
    assert "rho 0.500, searched / best measured 1.050" in text


def test_ranks_that_say_nothing_are_an_error():
    assert _rows(f"[0] {MARK}[1]") == [1]
    with pytest.raises(ClusterError, match="No result"):
        _rows("they ended")
    assert Config("shaped", 4, 2, 200.0).name == "shaped, 4 ranks on 2 nodes, 200 Mbit/s"
