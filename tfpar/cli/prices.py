"""`--price`: dollars an hour that take the place of those of presets and cluster files."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.spec import TfparError


def add_prices(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="[CLUSTER:]DEVICE=DOLLARS,...",
        help="what a device is rented for, in dollars an hour, by its name or by that of its "
        "cluster too; goes before what presets and cluster files say (`tfpar clusters NAME` "
        "shows both)",
    )


@dataclasses.dataclass(frozen=True)
class Price:
    """Dollars an hour of a device, on one cluster, or (empty) on all that have it."""

    cluster: str
    device: str
    dollars: float

    def __str__(self) -> str:
        return f"{self.cluster}:{self.device}" if self.cluster else self.device


def parse_prices(texts: Iterable[str]) -> list[Price]:
    """The prices of `A100-SXM4-40GB=1.99,dgx-h100:H100-SXM5-80GB=2.5`.

    Raises:
        TfparError: names the text that is no price.
    """
    found = []
    for text in (one for several in texts for one in several.split(",")):
        named, _, dollars = text.rpartition("=")
        cluster, _, device = named.rpartition(":")
        try:
            price = Price(cluster, device, float(dollars))
        except ValueError:
            price = None
        if price is None or not device or not 0 <= price.dollars < math.inf:
            raise TfparError(
                f"--price {text!r} is no price. Write DEVICE=DOLLARS, or CLUSTER:DEVICE=DOLLARS, "
                f"such as H100-SXM5-80GB=2.50, in dollars an hour."
            )
        found.append(price)
    return found


def apply_prices(cluster: Cluster, name: str, prices: Sequence[Price]) -> Cluster:
    """Give the devices of a cluster the prices that are for them; one with its name goes before
    one for all.

    Args:
        name: of the cluster, as it was asked for.
    """
    known = {node.device.name for node in cluster.nodes}
    mine = [p for p in prices if p.cluster in ("", name) and p.device in known]
    mine.sort(key=lambda price: price.cluster != "")
    return cluster.with_prices({price.device: price.dollars for price in mine})


def check_prices(prices: Sequence[Price], clusters: Mapping[str, Cluster]) -> None:
    """Check that each price is for a device that one of `clusters` has, by their names.

    Raises:
        TfparError: names the price, and the devices that there are.
    """
    devices = {(name, node.device.name) for name, c in clusters.items() for node in c.nodes}
    for price in prices:
        if not any(price.cluster in ("", name) and price.device == d for name, d in devices):
            known = ", ".join(f"{name}:{device}" for name, device in sorted(devices))
            raise TfparError(f"--price {price}: there is no such device. There are {known}.")
