"""Convolutional models of images."""

from __future__ import annotations

import keras
from keras import layers


def vgg(
    classes: int = 16,
    size: int = 16,
    channels: tuple[int, ...] = (4, 8),
    blocks: tuple[int, ...] = (1, 2),
    hidden: int = 32,
) -> keras.Model:
    """VGG (Simonyan & Zisserman, 2015): `blocks` convolutions of `channels` in each stage."""
    images = x = keras.Input((size, size, 3))
    for stage, (width, count) in enumerate(zip(channels, blocks, strict=True)):
        for i in range(count):
            x = _biased(x, width, f"stage_{stage}_conv_{i}")
        x = layers.MaxPooling2D(name=f"stage_{stage}_pool")(x)
    x = layers.Flatten(name="flatten")(x)
    for i in (1, 2):
        x = layers.Dense(hidden, activation="relu", name=f"fc{i}")(x)
    return keras.Model(images, layers.Dense(classes, name="head")(x), name="vgg")


def resnet50(classes: int = 1024, size: int = 224) -> keras.Model:
    """ResNet-50 (He et al., 2016); TAP scales it by its classes."""
    return keras.applications.ResNet50(
        weights=None, classes=classes, input_shape=(size, size, 3), classifier_activation=None
    )


def resnet(
    classes: int = 16, size: int = 32, channels: int = 8, blocks: tuple[int, ...] = (1, 2)
) -> keras.Model:
    """Bottleneck blocks as of ResNet-50, one stage per entry of `blocks`, in any size."""
    images = keras.Input((size, size, 3))
    x = _convolution(images, channels, 3, 2, "stem")
    for stage, count in enumerate(blocks):
        for i in range(count):
            stride = 2 if stage and not i else 1
            x = _bottleneck(x, channels * 2**stage, stride, f"stage_{stage}_block_{i}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(images, layers.Dense(classes, name="head")(x), name="resnet")


def wide_resnet(
    classes: int = 16,
    size: int = 32,
    channels: int = 4,
    width: int = 2,
    blocks: tuple[int, ...] = (1, 2),
) -> keras.Model:
    """Wide ResNet (Zagoruyko & Komodakis, 2016) of bottleneck blocks, all shortcuts projected.

    The 3 x 3 convolutions make `width` times the channels, as in Alpa (Zheng et al., 2022).
    """
    images = keras.Input((size, size, 3))
    x = _convolution(images, channels, 7, 2, "stem")
    x = layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    for stage, count in enumerate(blocks):
        for i in range(count):
            stride = 2 if stage and not i else 1
            name = f"stage_{stage}_block_{i}"
            x = _bottleneck(x, channels * 2**stage, stride, name, width, project=True)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(images, layers.Dense(classes, name="head")(x), name="wide_resnet")


def unet(classes: int = 4, size: int = 16, channels: int = 4, depth: int = 2) -> keras.Model:
    """U-Net (Ronneberger et al., 2015), padded: the classes of every pixel."""
    images = x = keras.Input((size, size, 3))
    skips = []
    for level in range(depth):
        x = _twice(x, channels * 2**level, f"down_{level}")
        skips.append(x)
        x = layers.MaxPooling2D(name=f"down_{level}_pool")(x)
    x = _twice(x, channels * 2**depth, "bottom")
    for level in reversed(range(depth)):
        width = channels * 2**level
        x = layers.Conv2DTranspose(width, 2, 2, name=f"up_{level}_grow")(x)
        x = layers.Concatenate(name=f"up_{level}_skip")([skips[level], x])
        x = _twice(x, width, f"up_{level}")
    return keras.Model(images, layers.Conv2D(classes, 1, name="head")(x), name="unet")


def _bottleneck(x, channels: int, stride: int, name: str, width: int = 1, project: bool = False):
    h = _convolution(x, channels, 1, stride, f"{name}_1")
    h = _convolution(h, width * channels, 3, 1, f"{name}_2")
    h = _convolution(h, 4 * channels, 1, 1, f"{name}_3", activation=None)
    if project or x.shape != h.shape:
        x = _convolution(x, 4 * channels, 1, stride, f"{name}_shortcut", activation=None)
    return layers.ReLU(name=f"{name}_relu")(x + h)


def _convolution(x, channels: int, kernel: int, stride: int, name: str, activation="relu"):
    x = layers.Conv2D(
        channels, kernel, stride, padding="same", use_bias=False, name=f"{name}_conv"
    )(x)
    x = layers.BatchNormalization(name=f"{name}_norm")(x)
    return layers.Activation(activation, name=f"{name}_activation")(x) if activation else x


def _twice(x, channels: int, name: str):
    for i in (1, 2):
        x = _biased(x, channels, f"{name}_conv_{i}")
    return x


def _biased(x, channels: int, name: str):
    """A convolution as before batch normalisation was known."""
    return layers.Conv2D(channels, 3, padding="same", activation="relu", name=name)(x)
