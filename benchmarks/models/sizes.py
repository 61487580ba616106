"""Named sizes: of Table I of TAP (Shi et al., 2023), of Rhino (§7), and small ones for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras

from benchmarks.models.clip import clip
from benchmarks.models.convolutions import resnet, resnet50, unet, vgg, wide_resnet
from benchmarks.models.speech import wav2vec2
from benchmarks.models.t5 import switch, t5
from benchmarks.models.transformers import albert, bert, dnabert, gpt, gshard_moe
from benchmarks.models.vision import vit, vmoe, wide, widenet

Builder = Callable[..., keras.Model]

SMALL: dict[str, Builder] = {
    "albert": albert,
    "bert": bert,
    "clip": clip,
    "dnabert": dnabert,
    "gpt": partial(gpt, vocabulary=64, length=16, hidden=32, num_layers=2),
    "gshard_moe": gshard_moe,
    "resnet": resnet,
    "switch": switch,
    "t5": t5,
    "unet": unet,
    "vgg": vgg,
    "vit": vit,
    "vmoe": vmoe,
    "wav2vec2": wav2vec2,
    "wide": partial(wide, classes=64),
    "wide_resnet": wide_resnet,
    "widenet": widenet,
}
"""Each family in a size that trains a step in a moment; more keyword arguments change it."""

_GPT = partial(gpt, vocabulary=50_257, length=1024)
_MOE = partial(gshard_moe, vocabulary=32_000, length=1024, heads=16)
_RESNET_50, _RESNET_101 = (3, 4, 6, 3), (3, 4, 23, 3)
_WIDE_RESNET = partial(wide_resnet, classes=1024, size=224)

FULL: dict[str, Builder] = {
    # 206M: without the pooler of 17M. Its paper has 235M.
    "albert_xxlarge": partial(
        albert,
        vocabulary=30_000,
        length=512,
        embedding=128,
        hidden=4096,
        heads=64,
        inner=16_384,
        num_layers=12,
    ),
    # 335M: without the pooler, the second segment and the head for pairs of sentences.
    "bert_large": partial(
        bert, vocabulary=30_522, length=512, hidden=1024, heads=16, inner=4096, num_layers=24
    ),
    # 151M, of which the text tower has 63M, which Table I counts.
    "clip_base": partial(
        clip,
        size=224,
        patch=32,
        image_hidden=768,
        image_heads=12,
        vocabulary=49_408,
        length=77,
        text_hidden=512,
        text_heads=8,
        shared=512,
        num_layers=12,
    ),
    # 163M where Rhino has 162M and says no more; k-mers of 6 and five special tokens.
    "dnabert": partial(
        dnabert, vocabulary=4**6 + 5, length=512, hidden=1024, heads=16, inner=4096, num_layers=12
    ),
    "gpt3": partial(gpt, vocabulary=50_257, length=2048, hidden=12_288, heads=96, num_layers=96),
    # Rhino's Table 1 leaves out a second table for the logits, here 51M (medium) to 206M (6.7B).
    "gpt_medium": partial(_GPT, hidden=1024, heads=16, num_layers=24),
    "gpt_large": partial(_GPT, hidden=1536, heads=16, num_layers=24),
    "gpt_xl": partial(_GPT, hidden=2048, heads=32, num_layers=24),
    "gpt_2b7": partial(_GPT, hidden=2560, heads=32, num_layers=32),
    "gpt_6b7": partial(_GPT, hidden=4096, heads=32, num_layers=32),
    # 619B; not in Table I.
    "gshard_600b": partial(
        gshard_moe,
        vocabulary=64_000,
        length=1024,
        hidden=1024,
        heads=16,
        inner=8192,
        num_layers=36,
        experts=2048,
    ),
    # Rhino's Table 2: experts in every other layer.
    "moe_8e_380m": partial(_MOE, hidden=768, inner=6144, num_layers=8, experts=8),
    "moe_8e_760m": partial(_MOE, hidden=768, inner=6144, num_layers=16, experts=8),
    "moe_16e_1b3": partial(_MOE, hidden=768, inner=6144, num_layers=16, experts=16),
    "moe_16e_2b4": partial(_MOE, hidden=1024, inner=8192, num_layers=16, experts=16),
    "moe_32e_10b": partial(_MOE, hidden=1536, inner=12_288, num_layers=16, experts=32),
    # 25.7M, of which 2.1M are the classifier, which Table I does not count.
    "resnet50": resnet50,
    # 355M, as published.
    "roberta_large": partial(
        bert,
        vocabulary=50_265,
        length=512,
        hidden=1024,
        heads=16,
        inner=4096,
        num_layers=24,
        name="roberta",
    ),
    # 1571B: 15 layers of experts in the encoder and 15 in the decoder.
    "switch_c": partial(
        switch,
        vocabulary=32_128,
        length=512,
        hidden=2080,
        heads=32,
        head_dim=64,
        inner=6144,
        num_layers=15,
        experts=2048,
    ),
    # 738M: Table I counts a second table, of 33M, for the logits.
    "t5_large": partial(
        t5,
        vocabulary=32_128,
        length=512,
        hidden=1024,
        heads=16,
        head_dim=64,
        inner=4096,
        num_layers=24,
    ),
    # 31M, as published; Rhino counts 33M.
    "unet": partial(unet, classes=2, size=256, channels=64, depth=4),
    # 4.2B, of which 4.1B are the classifier.
    "vgg19_1m": partial(
        vgg,
        classes=1_000_000,
        size=224,
        channels=(64, 128, 256, 512, 512),
        blocks=(2, 2, 4, 4, 4),
        hidden=4096,
    ),
    "vit_huge": partial(
        vit, classes=1000, size=224, patch=14, hidden=1280, heads=16, inner=5120, num_layers=32
    ),
    "vmoe_15b": partial(
        vmoe,
        classes=1000,
        size=224,
        patch=14,
        hidden=1408,
        heads=16,
        inner=6400,
        num_layers=48,
        experts=32,
    ),
    # 315M: without the quantizer of the pre-training.
    "wav2vec2_large": partial(
        wav2vec2,
        samples=160_000,
        classes=32,
        channels=512,
        hidden=1024,
        heads=16,
        inner=4096,
        num_layers=24,
        kernel=128,
        groups=16,
    ),
    # 1.37B, 2.68B, 5.46B and 10.4B where Rhino's Table 4 has 1.3B, 2.6B, 6B and 12B. It does not
    # say what its blocks are; with Alpa's, which project fewer shortcuts, it is 1.0B to 9.6B.
    "wide_resnet_1b": partial(_WIDE_RESNET, channels=320, width=2, blocks=_RESNET_50),
    "wide_resnet_2b6": partial(_WIDE_RESNET, channels=448, width=2, blocks=_RESNET_50),
    "wide_resnet_6b": partial(_WIDE_RESNET, channels=640, width=2, blocks=_RESNET_50),
    "wide_resnet_12b": partial(_WIDE_RESNET, channels=320, width=12, blocks=_RESNET_101),
    # 62M: experts without bias.
    "widenet_huge": partial(
        widenet,
        classes=1000,
        size=224,
        patch=16,
        hidden=1280,
        heads=16,
        inner=5120,
        experts=4,
        num_layers=32,
    ),
}
"""The published sizes. Built under `tap.auto_parallel` their variables take no memory."""
