"""`--objective`: the latency of predictions, and the devices that are worth their rent."""

from __future__ import annotations

import pytest

import tfpar as tap
from tests.cli.train import tfpar
from tfpar.cluster import Cluster, Device, Level, write_cluster


def test_latency_is_that_of_a_model_that_is_not_compiled(folder, capsys):
    (folder / "bare.py").write_text(
        "import keras\n\n\ndef build():\n"
        "    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, name='fc')])\n"
    )
    command = "bare.py:build --batch-size 8 --mesh 2 --cluster dgx-a100"
    assert tfpar(f"plan {command} --objective latency -o plan.json --quiet") == 0
    plan = tap.Plan.load("plan.json")
    assert plan.cost.compute_s[0] > 0 and plan.cost.compute_s[1:] == (0.0, 0.0)
    assert tfpar(f"plan {command}") == 2
    assert "is not compiled" in capsys.readouterr().err


@pytest.fixture
def rented(tmp_path) -> str:
    """Two devices, of which one is as fast: what they send each other takes too long."""
    device = Device({"float32": 1e9}, 1e9, 1e9, price_per_hour=1.5, name="one")
    path = tmp_path / "rented.toml"
    write_cluster(Cluster.regular("rented", device, [Level(2, 1e3, 1.0)]), path)
    return str(path)


def test_plans_say_which_devices_to_rent(rented, folder, capsys):
    """And what a million samples cost there."""
    command = f"plan train.py:both --mesh 2 --cluster {rented} --planner tap"
    assert tfpar(f"{command} --objective samples_per_dollar --full -o plan.json") == 0
    out = capsys.readouterr().out
    plan = tap.Plan.load("plan.json")
    (own, other) = plan.findings.rentals
    assert (own.ranks, other.ranks, plan.num_ranks) == ((0,), (0, 1), 1)
    assert own.dollars_per_million == pytest.approx(
        1.5 / 3600 * plan.cost.seconds / own.samples * 1e6
    )
    assert "Rent: $1.50 an hour for 1 x one of 1 machine (rank 0), $" in out
    assert "| 2 x one of 1 machine | 0-1   |   $3.00 |" in out
    assert tfpar(f"{command}") == 0
    assert "Rent: $3.00 an hour for 2 x one of 1 machine (ranks 0-1), $" in capsys.readouterr().out
    assert plan.report_data()["rentals"][0]["dollars_per_hour"] == 1.5


@pytest.mark.slow
def test_estimates_have_the_cheapest_first(rented, folder, capsys):
    command = f"estimate train.py:both --mesh 2,1 --cluster {rented} --planner tap"
    assert tfpar(f"{command} --objective samples_per_dollar") == 0
    out = capsys.readouterr().out
    assert out.startswith("Estimates, the cheapest first") and "| a million |" in out
