"""Steps of a graph are judged as steps of a model are."""

from __future__ import annotations

import numpy as np
import pytest

from tfpar.observability.verification import Verdict, Verification
from tfpar.observability.verification.sessions import SessionDevice
from tfpar.observability.verification.steps import (
    StepOutcome,
    TakenStep,
    build_verification,
    compare_step,
)

START = {"w": np.linspace(1, 2, 50, dtype="float32"), "name": np.array(b"net")}


def take(values, scale=1.0, bias=0.0, name=b"net"):
    doubled = (values["w"] * np.float32(2 * scale)).astype("float32")
    loss = np.asarray(doubled.sum() + bias, "float32")
    return StepOutcome({"loss": loss}, {}, {"w": doubled, "name": np.array(name)})


def verify(steps=2, off_from=0, of_device=None, **off) -> Verification:
    """Each step of the mesh from where the one before has led it; off from some step on."""
    taken, before = [], START
    for step in range(steps):
        taken.append(TakenStep(None, before, take(before, **off if step >= off_from else {})))
        before = taken[-1].mesh.after
    device = SessionDevice(
        taken, lambda values: [take(each, **(of_device or {})) for each in values]
    )
    return build_verification([compare_step(device, t, None) for t in taken], steps, [], [])


@pytest.mark.parametrize(
    ("off", "verdict"),
    [
        ({"scale": 1 + 1e-6}, Verdict.EQUAL),
        ({"scale": 1.01}, Verdict.DIFFERS),
        ({"bias": np.nan}, Verdict.DIFFERS),
        ({"name": b"other"}, Verdict.DIFFERS),
    ],
)
@pytest.mark.parametrize("off_from", [0, 1])
def test_a_step_is_held_against_those_from_moved_values(off, off_from, verdict):
    report = verify(off_from=off_from, **off)
    assert max((d.verdict for d in report.differences), key=lambda v: v.rank) is verdict
    assert report.ok is (verdict is not Verdict.DIFFERS)
    assert ("Unexplained difference" in str(report)) is (verdict is Verdict.DIFFERS)


def test_what_differs_is_named():
    report = verify(scale=1.01)
    assert {d.name for d in report.differences if not d.ok} == {"w", "loss"}
    assert all(d.error > 0.009 > d.noise for d in report.differences if not d.ok)


def test_what_is_not_finite_is_not_judged():
    report = verify(bias=np.inf, of_device={"bias": np.inf})
    assert not report.ok and "not finite: not judged: loss" in str(report)
    assert [d.name for d in report.differences if not d.ok] == ["loss"]
