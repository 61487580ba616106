"""Reason why a plan is in force that is predicted to be slower than one device."""

from __future__ import annotations

TELLABLE = 0.02
"""By what part of a step a plan has to be slower for a word of it."""


def why_slower(
    seconds: float, one_device_s: float, *, ranks: int, fits: bool, is_constrained: bool
) -> str:
    """Explain why a plan that takes `seconds` was taken, as the end of a sentence.

    It is empty if the plan is not slower than one device.

    Args:
        fits: one device has room for the step.
        is_constrained: the plan keeps to constraints.
    """
    if ranks == 1 or seconds <= one_device_s * (1 + TELLABLE):
        return ""
    if not fits:
        return "slower than one device, which has no room for it"
    asked = "constraints ask for it" if is_constrained else f"the mesh asks for {ranks} ranks"
    return f"slower than one device, which has room: {asked}"
