"""`tfpar estimate`: what samples and epochs cost, and which fleet is the cheapest in time."""

from __future__ import annotations

import json
import re

import pytest

from tests.cli.train import tfpar
from tfpar.cli.prices import apply_prices, parse_prices
from tfpar.cluster import Cluster, Device, Level, find_cluster, preset_names, write_cluster


@pytest.fixture
def fleets(tmp_path) -> str:
    """Two clusters of two devices: one has no price."""
    for name, price in (("rented", 1.5), ("owned", None)):
        device = Device({"float32": 1e9}, 1e9, 1e9, price_per_hour=price, name=f"{name}-device")
        cluster = Cluster.regular(name, device, [Level(2, 1e9, 1e-5)])
        write_cluster(cluster, tmp_path / f"{name}.toml")
    return "rented.toml,owned.toml"


EPOCHS = "--samples-per-epoch 4000 --epochs 3"


@pytest.mark.slow
def test_fleets_are_compared_by_what_an_epoch_costs(fleets, folder, capsys):
    command = f"estimate train.py:both --mesh 1,2 --cluster {fleets} --planner tap {EPOCHS}"
    assert tfpar(f"{command} --sort cost --deadline 1000 --json") == 0
    found = json.loads(capsys.readouterr().out)
    ranks = {"data=1": 1, "data=2": 2}
    for one in found["estimates"]:
        hours = 3 * 4000 / 8 * one["seconds"] / 3600  # in steps of 8 samples
        assert one["training_hours"] == pytest.approx(hours)
        if one["cluster"] == "owned.toml":
            assert one["dollars_per_million"] is None and one["dollars_per_epoch"] is None
            continue
        dollars = 1.5 * ranks[one["mesh"]] * hours
        assert one["dollars_per_epoch"] == pytest.approx(dollars / 3)
        assert one["dollars_per_million"] == pytest.approx(dollars / 12_000 * 1e6)
    costs = [one["dollars_per_epoch"] for one in found["estimates"]]
    assert costs[:2] == sorted(costs[:2]) and costs[2:] == [None, None]
    training = found["training"]
    assert training["in_time"] and training["deadline_hours"] == 1000
    cheapest = found["estimates"][0]
    assert training["fleet"] == {
        "mesh": cheapest["mesh"],
        "cluster": "rented.toml",
        "hours": cheapest["training_hours"],
        "dollars": pytest.approx(3 * cheapest["dollars_per_epoch"]),
    }
    assert tfpar(f"{command} --deadline 1e-9 --price owned-device=0.75") == 0
    out = capsys.readouterr().out
    assert re.search(r"\| a million \| an epoch \|\s+hours \|", out)
    assert "Within 1e-09 hours for 3 epochs of 4,000 samples: none. The nearest is data=" in out
    assert "Prices of rented.toml: rented-device $1.50 an hour" in out
    assert "Prices of owned.toml: owned-device $0.75 an hour" in out and "not known" not in out


def test_one_fleet_says_the_same_in_lines(fleets, folder, capsys):
    command = "estimate train.py:both --mesh 1 --cluster rented.toml --planner tap"
    assert tfpar(f"{command} {EPOCHS} --deadline 1000 --price rented-device=3600") == 0
    out = capsys.readouterr().out
    rate = float(re.search(r"Speed: (\S+) samples/s", out)[1])
    epoch = float(re.search(r"An epoch: \$(\S+)", out)[1])
    assert epoch == pytest.approx(4000 / rate, rel=0.05)  # a dollar a second
    assert "hours, for 3 epochs of 4,000 samples" in out
    assert "The cheapest within 1,000 hours for 3 epochs of 4,000 samples: data=1 on rented" in out
    assert "Prices of rented.toml: rented-device $3,600.00 an hour" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--deadline 3", "--deadline needs --samples-per-epoch: how many samples the training"),
        ("--epochs 3", "--epochs needs --samples-per-epoch"),
        ("--samples-per-epoch 0", "--samples-per-epoch is 0"),
        (f"{EPOCHS} --deadline nan", "--deadline is nan; it must be a number above 0"),
        ("--samples-per-epoch 8 --epochs 0", "--epochs is 0"),
        ("--sort cost", "--sort cost needs prices, but that of owned-device is not known"),
        (f"{EPOCHS} --deadline 3", "Give --price owned-device=DOLLARS, or price_per_hour in a"),
        ("--price 3", "--price '3' is no price. Write DEVICE=DOLLARS"),
        ("--price owned-device=-1", "--price 'owned-device=-1' is no price"),
        ("--price T4=1", "--price T4: there is no such device. There are owned.toml:owned-device"),
        ("--price dgx-h100:owned-device=1", "--price dgx-h100:owned-device: there is no such"),
        ("--objective samples_per_dollar", "Give dollars an hour: Cluster.with_prices, --price, "),
    ],
)
def test_what_is_missing_is_named_before_the_script_runs(
    fleets, folder, capsys, arguments, message
):
    assert tfpar(f"estimate broken.py:build --mesh 2 --cluster owned.toml {arguments}") == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_of_a_mixed_fleet_a_small_mesh_has_the_first_devices_alone(folder, capsys):
    """Their pace too: an H100's, and not that of the A100s that nobody rents then."""
    command = "estimate train.py:both --mesh 1 --cluster aws-p5-p4d,dgx-h100 --planner tap --json"
    assert tfpar(command) == 0
    mixed, alone = json.loads(capsys.readouterr().out)["estimates"]
    assert mixed["seconds"] == pytest.approx(alone["seconds"])
    assert mixed["dollars_per_million"] == pytest.approx(alone["dollars_per_million"])


def test_a_price_for_one_cluster_goes_before_one_for_all():
    prices = parse_prices(["dgx-h100:H100-SXM5-80GB=2,H100-SXM5-80GB=3", "T4=1"])
    for name, dollars in (("dgx-h100", 2.0), ("aws-p5-p4d", 3.0)):
        first = apply_prices(find_cluster(name), name, prices).nodes[0].device
        assert (first.price_per_hour, first.price_source) == (dollars, "")


def test_plans_are_made_with_prices_too(fleets, folder, capsys):
    command = "plan train.py:both --mesh 1 --cluster owned.toml --planner tap"
    assert tfpar(f"{command} --price owned-device=2.25") == 0
    assert "Rent: $2.25 an hour for 1 x owned-device" in capsys.readouterr().out


def test_prices_of_presets_say_where_they_are_from_and_when(capsys):
    devices = [n.device for name in preset_names() for n in find_cluster(name).nodes]
    known = [device for device in devices if device.price_per_hour is not None]
    assert len(known) == 10
    for device in devices:
        dated = re.search(r"on demand in .*, 20\d\d(-\d\d)?$", device.price_source)
        assert bool(dated) == (device.price_per_hour is not None)
    assert tfpar("clusters aws-p5-p4d") == 0
    assert "$6.88 an hour (AWS p5.48xlarge, on demand in us-east-1, 20" in capsys.readouterr().out
