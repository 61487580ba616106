"""Rent of a plan's devices as text, beside that of others on which the step was planned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tfpar.observability.report.data.schema import RentalSummary
from tfpar.observability.report.pipeline import ranks_text
from tfpar.observability.report.tables import render_table
from tfpar.plans import Rental
from tfpar.spec.quantities import format_dollars, format_seconds

COLUMNS = ("Devices", "Ranks", "An hour", "A step", "A million samples", "Why not")


def rentals_of(rentals: Sequence[Rental]) -> tuple[RentalSummary, ...]:
    """Summarize the rentals of a plan, the first of which is its own."""
    return tuple(
        RentalSummary(
            rental.name,
            rental.ranks,
            rental.dollars_per_hour,
            rental.dollars_per_million if math.isfinite(rental.seconds) else None,
            rental.seconds if math.isfinite(rental.seconds) else None,
            rental.reason or ("" if rental is rentals[0] else _why(rental, rentals[0])),
        )
        for rental in rentals
    )


def _why(rental: Rental, taken: Rental) -> str:
    """Explain why a rental that was planned was not taken."""
    more = rental.dollars_per_million - taken.dollars_per_million
    if more >= 0:
        return f"{format_dollars(more)} more"
    if rental.seconds > taken.seconds:
        return (
            f"{format_dollars(-more)} less, {format_seconds(rental.seconds - taken.seconds)} slower"
        )
    return f"{format_dollars(-more)} less, but the job has more devices"


def rent_lines(rentals: Sequence[RentalSummary], full: bool) -> Iterator[str]:
    """Yield what the devices cost; in full, a table of all that were compared."""
    if not rentals:
        return
    taken, *others = rentals
    yield (
        f"Rent: {format_dollars(taken.dollars_per_hour)} an hour for {_devices(taken)}, "
        f"{_per_million(taken)}"
    )
    if full and others:
        title = "Devices that were compared"
        yield render_table(title, COLUMNS, [*map(_row, rentals)], numeric=range(2, 5))
        return
    planned = [f"{one.name} {_per_million(one)}" for one in others if one.seconds is not None][:2]
    if planned:
        yield f"Other devices: {'; '.join(planned)}"


def cheaper_text(own: Rental, best: Rental) -> str:
    """Say which of a job's devices compute more samples for a dollar than all of them."""
    return (
        f"a dollar computes more samples on {_devices(best)} alone than on all devices of this "
        f"job: a million costs {format_dollars(best.dollars_per_million)} there and "
        f"{format_dollars(own.dollars_per_million)} here (a step {format_seconds(best.seconds)} "
        f"and {format_seconds(own.seconds)}). All devices are used; to rent those alone, start the "
        f"job on them"
    )


def _devices(rental: Rental | RentalSummary) -> str:
    """`4 x A100 of 1 machine (ranks 0-3)`."""
    ranks = f"rank{'s' if len(rental.ranks) > 1 else ''} {ranks_text(rental.ranks)}"
    return f"{rental.name} ({ranks})"


def _row(rental: RentalSummary) -> list[str]:
    dollars = rental.dollars_per_million
    return [
        rental.name,
        ranks_text(rental.ranks),
        format_dollars(rental.dollars_per_hour),
        "" if rental.seconds is None else format_seconds(rental.seconds),
        "" if dollars is None else format_dollars(dollars),
        rental.why,
    ]


def _per_million(rental: RentalSummary) -> str:
    assert rental.dollars_per_million is not None, "a rental with a plan"
    return f"{format_dollars(rental.dollars_per_million)} a million samples"
