"""Modes in which the attentions of a step run."""

from __future__ import annotations

from typing import Literal

AttentionMode = Literal["whole", "blockwise"]
"""All scores at once, as the model says, or on blocks of them, which the backward pass computes
again (`ir.attention`)."""

ATTENTION_MODES: tuple[AttentionMode, ...] = ("whole", "blockwise")
