"""Named sizes: those of Table I of TAP (Shi et al., 2023), and small ones for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras

from benchmarks.models.clip import clip
from benchmarks.models.speech import wav2vec2
from benchmarks.models.t5 import switch, t5
from benchmarks.models.transformers import bert, gpt, gshard_moe
from benchmarks.models.vision import resnet, resnet50, vit, vmoe, wide, widenet

Builder = Callable[..., keras.Model]

SMALL: dict[str, Builder] = {
    "bert": bert,
    "clip": clip,
    "gpt": partial(gpt, vocabulary=64, length=16, hidden=32, num_layers=2),
    "gshard_moe": gshard_moe,
    "resnet": resnet,
    "switch": switch,
    "t5": t5,
    "vit": vit,
    "vmoe": vmoe,
    "wav2vec2": wav2vec2,
    "wide": partial(wide, classes=64),
    "widenet": widenet,
}
"""Each family in a size that trains a step in a moment; more keyword arguments change it."""

FULL: dict[str, Builder] = {
    # 335M: without the pooler, the second segment and the head for pairs of sentences.
    "bert_large": partial(
        bert, vocabulary=30_522, length=512, hidden=1024, heads=16, inner=4096, num_layers=24
    ),
    # 151M, of which the text tower has 63M, which Table I counts.
    "clip_base": partial(
        clip, size=224, patch=32, image_hidden=768, image_heads=12, vocabulary=49_408, length=77,
        text_hidden=512, text_heads=8, shared=512, num_layers=12,
    ),
    "gpt3": partial(
        gpt, vocabulary=50_257, length=2048, hidden=12_288, heads=96, num_layers=96
    ),
    # 619B; not in Table I.
    "gshard_600b": partial(
        gshard_moe, vocabulary=64_000, length=1024, hidden=1024, heads=16, inner=8192,
        num_layers=36, experts=2048,
    ),
    # 25.7M, of which 2.1M are the classifier, which Table I does not count.
    "resnet50": resnet50,
    # 1571B: 15 layers of experts in the encoder and 15 in the decoder.
    "switch_c": partial(
        switch, vocabulary=32_128, length=512, hidden=2080, heads=32, head_dim=64, inner=6144,
        num_layers=15, experts=2048,
    ),
    # 738M: Table I counts a second table, of 33M, for the logits.
    "t5_large": partial(
        t5, vocabulary=32_128, length=512, hidden=1024, heads=16, head_dim=64, inner=4096,
        num_layers=24,
    ),
    "vit_huge": partial(
        vit, classes=1000, size=224, patch=14, hidden=1280, heads=16, inner=5120, num_layers=32
    ),
    "vmoe_15b": partial(
        vmoe, classes=1000, size=224, patch=14, hidden=1408, heads=16, inner=6400, num_layers=48,
        experts=32,
    ),
    # 315M: without the quantizer of the pre-training.
    "wav2vec2_large": partial(
        wav2vec2, samples=160_000, classes=32, channels=512, hidden=1024, heads=16, inner=4096,
        num_layers=24, kernel=128, groups=16,
    ),
    # 62M: experts without bias.
    "widenet_huge": partial(
        widenet, classes=1000, size=224, patch=16, hidden=1280, heads=16, inner=5120, experts=4,
        num_layers=32,
    ),
}  # fmt: skip
"""The published sizes. Built under `tap.auto_parallel` their variables take no memory."""
