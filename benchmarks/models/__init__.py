"""The models of the benchmarks, in plain Keras, without dropout and padding.

    model = compile_model(SMALL["t5"](num_layers=4))
    model.train_on_batch(*batch_of(model, 8))

Every builder takes its sizes by keyword; `FULL` holds the published ones.
"""

from benchmarks.models.clip import ContrastiveLoss, clip
from benchmarks.models.convolutions import resnet, resnet50, unet, vgg, wide_resnet
from benchmarks.models.layouts import GPT_MEGATRON, WIDE_HEAD, layout
from benchmarks.models.sizes import FULL, SMALL
from benchmarks.models.speech import wav2vec2
from benchmarks.models.t5 import switch, t5
from benchmarks.models.training import batch_of, compile_model, gpt_batch, loss_of, wide_batch
from benchmarks.models.transformers import albert, bert, dnabert, gpt, gshard_moe
from benchmarks.models.vision import vit, vmoe, wide, widenet

__all__ = [
    "FULL",
    "GPT_MEGATRON",
    "SMALL",
    "WIDE_HEAD",
    "ContrastiveLoss",
    "albert",
    "batch_of",
    "bert",
    "clip",
    "compile_model",
    "dnabert",
    "gpt",
    "gpt_batch",
    "gshard_moe",
    "layout",
    "loss_of",
    "resnet",
    "resnet50",
    "switch",
    "t5",
    "unet",
    "vgg",
    "vit",
    "vmoe",
    "wav2vec2",
    "wide",
    "wide_batch",
    "wide_resnet",
    "widenet",
]
