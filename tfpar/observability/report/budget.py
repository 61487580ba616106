"""Cost of a whole training: what its epochs cost on a fleet, and the cheapest in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfpar.spec.quantities import format_dollars

if TYPE_CHECKING:
    from tfpar.cluster.description import Cluster, Device
    from tfpar.observability.report.what_if import Estimate


@dataclasses.dataclass(frozen=True)
class Training:
    """An amount of training.

    Attributes:
        samples_per_epoch: of one epoch.
        epochs: number of them.
        deadline_hours: hours in which all of them are to end; None: there is no such limit.
    """

    samples_per_epoch: int
    epochs: int = 1
    deadline_hours: float | None = None

    def hours(self, fleet: Estimate) -> float | None:
        """Hours of all epochs; None where no plan fits, or a batch has no size."""
        if fleet.samples_per_s is None:
            return None
        return self.samples_per_epoch * self.epochs / fleet.samples_per_s / 3600

    def epoch_dollars(self, fleet: Estimate) -> float | None:
        """Dollars of one epoch; None where the price of a device is not known."""
        if fleet.dollars_per_million is None:
            return None
        return fleet.dollars_per_million * self.samples_per_epoch / 1e6

    def dollars(self, fleet: Estimate) -> float | None:
        """Dollars of all epochs; None where the price of a device is not known."""
        epoch = self.epoch_dollars(fleet)
        return None if epoch is None else epoch * self.epochs

    def __str__(self) -> str:
        epochs = f"{self.epochs:,} epochs" if self.epochs > 1 else "an epoch"
        return f"{epochs} of {self.samples_per_epoch:,} samples"


@dataclasses.dataclass(frozen=True)
class FleetChoice:
    """The fleet to rent for a training that has a deadline.

    Attributes:
        fleet: the cheapest that ends in time; where none does, the one that ends first; None where
            no plan fits on any, or those that end in time have no price.
        in_time: whether one of them ends in time.
        unpriced: those that end in time and were not compared, as they have no price.
    """

    fleet: Estimate | None
    in_time: bool
    unpriced: tuple[Estimate, ...] = ()


def choose_fleet(found: Sequence[Estimate], training: Training) -> FleetChoice:
    """Choose the cheapest fleet that ends in time, of equally cheap ones the fastest."""
    assert training.deadline_hours is not None
    hours = {i: h for i, one in enumerate(found) if (h := training.hours(one)) is not None}
    in_time = [i for i, taken in hours.items() if taken <= training.deadline_hours]
    if not in_time:
        first = min(hours, key=hours.__getitem__, default=None)
        return FleetChoice(None if first is None else found[first], False)
    dollars = {i: d for i in in_time if (d := training.dollars(found[i])) is not None}
    cheapest = min(dollars, key=lambda i: (dollars[i], hours[i]), default=None)
    unpriced = tuple(found[i] for i in in_time if i not in dollars)
    return FleetChoice(None if cheapest is None else found[cheapest], True, unpriced)


def deadline_text(found: Sequence[Estimate], training: Training) -> str:
    """Say which fleet is the cheapest that ends in time, or which comes nearest."""
    choice = choose_fleet(found, training)
    limit = f"{_hours_text(training.deadline_hours)} for {training}"
    unpriced = ", ".join(f"{one.mesh} on {one.cluster}" for one in choice.unpriced)
    if choice.fleet is None:
        if choice.in_time:
            return f"Within {limit}: in time, but without a price: {unpriced}."
        return f"Within {limit}: none, as no plan fits."
    named = f"{choice.fleet.mesh} on {choice.fleet.cluster}, {_cost_text(choice.fleet, training)}"
    if not choice.in_time:
        return f"Within {limit}: none. The nearest is {named}."
    text = f"The cheapest within {limit}: {named}."
    return f"{text} Not compared, as their price is not known: {unpriced}." if unpriced else text


def _cost_text(fleet: Estimate, training: Training) -> str:
    """`$1,204.00 in 13.7 hours`."""
    dollars, hours = training.dollars(fleet), _hours_text(training.hours(fleet))
    return hours if dollars is None else f"{format_dollars(dollars)} in {hours}"


def _hours_text(hours: float | None) -> str:
    """`13.7 hours`."""
    text = number_text(hours)
    return f"{text} hour" if text == "1" else f"{text} hours"


def number_text(number: float | None) -> str:
    """`13.7`, to three digits and no fewer than there are before the point."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def budget_lines(fleet: Estimate, training: Training) -> Iterator[str]:
    """Yield what the training takes on one fleet."""
    epoch = training.epoch_dollars(fleet)
    if epoch is not None:
        yield f"An epoch: {format_dollars(epoch)}"
    if training.hours(fleet) is not None:
        yield f"Training: {_cost_text(fleet, training)}, for {training}"


def budget_json(found: Sequence[Estimate], training: Training) -> dict[str, Any]:
    """Describe the training and the chosen fleet as JSON has them; null is what is not known."""
    described = dataclasses.asdict(training)
    if training.deadline_hours is not None:
        choice = choose_fleet(found, training)
        fleet = choice.fleet
        described["in_time"] = choice.in_time
        described["fleet"] = fleet and {
            **{"mesh": fleet.mesh, "cluster": fleet.cluster},
            **{"hours": training.hours(fleet), "dollars": training.dollars(fleet)},
        }
    return described


# --- prices of devices ----------------------------------------------------------------------


def price_lines(clusters: Mapping[str, Cluster]) -> Iterator[str]:
    """Yield what devices are rented for, by cluster, with who asks for that price and when."""
    for name, cluster in clusters.items():
        devices = dict.fromkeys(map(price_text, (node.device for node in cluster.nodes)))
        yield f"Prices of {name}: {'; '.join(devices)}"
    unknown = unknown_prices(clusters)
    if unknown:
        yield f"For prices that are not known give {price_advice(unknown)}."


def price_text(device: Device) -> str:
    """`H100-SXM5-80GB $6.88 an hour (AWS p5.48xlarge, on demand in us-east-1, 2026-11)`."""
    name = device.name or "unnamed"
    if device.price_per_hour is None:
        return f"{name} not known"
    source = f" ({device.price_source})" if device.price_source else ""
    return f"{name} {format_dollars(device.price_per_hour)} an hour{source}"


def unknown_prices(clusters: Mapping[str, Cluster]) -> list[str]:
    """The names of the devices whose price is not known, each once."""
    devices = (node.device for cluster in clusters.values() for node in cluster.nodes)
    return list(dict.fromkeys(d.name for d in devices if d.price_per_hour is None))


def price_advice(names: Sequence[str]) -> str:
    """`--price V100-SXM2-32GB=DOLLARS, or price_per_hour in a cluster file`."""
    named = ",".join(f"{name}=DOLLARS" for name in names if name)
    return f"{f'--price {named}, or ' if named else ''}price_per_hour in a cluster file"
