"""Layouts of two models that are known to be good."""

from __future__ import annotations

GPT_MEGATRON = {
    r".*attention/(query|key|value)/kernel": (None, "model", None),
    r".*attention/(query|key|value)/bias": ("model", None),
    r".*attention/attention_output/kernel": ("model", None, None),
    r".*fc1/kernel": (None, "model"),
    r".*fc1/bias": ("model",),
    r".*fc2/kernel": ("model", None),
    r"tokens/embeddings": ("model", None),
    r"head/kernel": (None, "model"),
    r"head/bias": ("model",),
}
"""Megatron's layout: heads, the MLP's inner dim and the vocabulary split."""

WIDE_HEAD = {
    r"head/kernel": (None, "model"),
    r"head/bias": ("model",),
    r"(stem|block_.*)/kernel": (None, None),
    r"(stem|block_.*)/bias": (None,),
}
"""The classes split; the small body on every rank, as in `by_hand.megatron`."""


def layout(model: str):
    """The constraints of the `model` contenders."""
    import tfpar as tap

    return tap.from_layout_map(WIDE_HEAD if model == "wide" else GPT_MEGATRON)
