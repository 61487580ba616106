"""What the documentation says of planted faults."""

from __future__ import annotations

from benchmarks.results import Result


def caught_in_words(result: Result) -> str:
    """How many faults tests catch, in all and by area."""
    caught: dict[str, list[bool]] = {}
    for row in result.rows:
        caught.setdefault(row["area"], []).append(row["caught"])
    of_areas = ", ".join(f"{area} {sum(all_)} of {len(all_)}" for area, all_ in caught.items())
    number, total = sum(row["caught"] for row in result.rows), len(result.rows)
    tests = "`make test-fast`" if "--fast" in result.command else "`make test`"
    return (
        f"{tests} catches {number} of {total} faults ({number / total:.0%}): {of_areas}.\n"
        f"({'; '.join(filter(None, [f'{result.date}, `{result.command}`', result.note]))}.)"
    )
