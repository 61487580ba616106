"""Networks, losses and optimizers as tutorials and their readers write them, on a mesh.

`test_user_layers` has layers that users write themselves.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.one_epoch import assert_trains_as_on_one_device, cases


def momentum(learning_rate=0.05):
    return keras.optimizers.SGD(learning_rate, momentum=0.9)


def compiled(model, loss="mse", optimizer=None, **arguments):
    model.compile(optimizer or momentum(), loss, jit_compile=False, **arguments)
    return model


def logits_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# --- images ----------------------------------------------------------------------------


def unet():
    """Connections that skip what lies between, upsampling, and a metric over classes."""
    inputs = keras.Input((16, 16, 3))
    x, skipped = inputs, []
    for filters in (4, 8):
        x = layers.Conv2D(filters, 3, padding="same")(x)
        x = layers.Activation("swish")(layers.GroupNormalization(2)(x))
        skipped.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    for filters in (8, 4):
        x = layers.UpSampling2D(interpolation="bilinear")(x)
        x = layers.Concatenate()([x, skipped.pop()])
        x = layers.Conv2DTranspose(filters, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Conv2D(3, 1, activation="softmax")(x))
    overlap = keras.metrics.MeanIoU(3, sparse_y_pred=False)
    return compiled(model, "sparse_categorical_crossentropy", metrics=["accuracy", overlap])


def mlp_mixer():
    """Dense layers over patches and over channels in turn."""
    inputs = keras.Input((16, 16, 3))
    x = layers.Reshape((16, 8))(layers.Conv2D(8, 4, strides=4)(inputs))
    for _ in range(2):
        patches = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        patches = layers.Dense(16)(layers.Dense(16, "gelu")(patches))
        x = x + layers.Permute((2, 1))(patches)
        channels = layers.LayerNormalization()(x)
        x = x + layers.Dense(8)(layers.Dense(16, "gelu")(channels))
    model = keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))
    return compiled(model, logits_loss(), keras.optimizers.Lion(1e-3))


def detection_loss(truth, prediction):
    """Box centers, box sizes, whether there is an object, and its class; summed over all."""
    there = truth[..., 4:5]
    centers = ops.square(ops.sigmoid(prediction[..., :2]) - truth[..., :2])
    sizes = ops.square(prediction[..., 2:4] - truth[..., 2:4])
    objects = ops.binary_crossentropy(there, prediction[..., 4:5], from_logits=True)
    kinds = ops.categorical_crossentropy(truth[..., 5:], prediction[..., 5:], from_logits=True)
    boxes = ops.sum(there * (centers + sizes))
    return boxes + ops.sum(objects) + ops.sum(there[..., 0] * kinds)


def yolo_like():
    """Boxes of a grid, under a loss that is a sum and not a mean."""
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(inputs)
    x = layers.LeakyReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2D(8, 3, strides=2, padding="same")(x)
    outputs = layers.Reshape((4, 4, 1, 7))(layers.Conv2D(7, 1)(x))
    return compiled(keras.Model(inputs, outputs), detection_loss, momentum(1e-3))


def boxes(samples):
    numbers, kinds = samples.share(4, 4, 1, 5).round(), samples.one_hot(2, 4, 4, 1)
    return samples.real(16, 16, 3), np.concatenate([numbers, kinds], axis=-1)


def spectral_weightnorm():
    """Wrappers that change kernels in the forward pass, a constraint that does so after it."""
    dense = layers.Dense(3, kernel_regularizer="l2", kernel_constraint="unit_norm")
    network = [
        layers.SpectralNormalization(layers.Conv2D(4, 3)),
        layers.SeparableConv2D(4, 3),
        layers.DepthwiseConv2D(3),
        layers.Flatten(),
        layers.SpectralNormalization(dense),
    ]
    return compiled(keras.Sequential([keras.Input((8, 8, 2)), *network]), "mse", momentum(0.01))


def norm_layers():
    """Every kind of normalization, over the batch, over channels and over whole samples."""
    network = [
        layers.GroupNormalization(2),
        layers.Conv2D(4, 3),
        layers.GroupNormalization(-1),
        layers.LayerNormalization(axis=[1, 2, 3]),
        layers.BatchNormalization(axis=1),
        layers.BatchNormalization(),
        layers.UnitNormalization(),
        layers.Flatten(),
        layers.Dense(2),
    ]
    return compiled(keras.Sequential([keras.Input((8, 8, 4)), *network]), "mse", momentum(0.02))


def convlstm():
    """Images over time, from a recurrent layer to a convolution over time too."""
    network = [
        layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True),
        layers.BatchNormalization(),
        layers.Conv3D(1, 3, padding="same", activation="sigmoid"),
    ]
    model = keras.Sequential([keras.Input((4, 8, 8, 1)), *network])
    return compiled(model, "binary_crossentropy")


# --- sequences -------------------------------------------------------------------------


def tcn_wavenet():
    """Dilated causal convolutions with gates, each one read by the output."""
    inputs = keras.Input((24, 2))
    x, skipped = layers.Conv1D(8, 1)(inputs), []
    for dilation in (1, 2, 4):
        filtered, gate = (
            layers.Conv1D(8, 2, dilation_rate=dilation, padding="causal", activation=name)(x)
            for name in ("tanh", "sigmoid")
        )
        skipped.append(layers.Conv1D(8, 1)(filtered * gate))
        x = x + skipped[-1]
    outputs = layers.Dense(1)(layers.ReLU()(layers.Add()(skipped)))
    return compiled(keras.Model(inputs, outputs), "huber", momentum(0.01))


def seq2seq_attention():
    """Masks from both sides, and a decoder that starts in the state of the encoder."""
    source, target = keras.Input((7,), dtype="int32"), keras.Input((5,), dtype="int32")
    encode = layers.LSTM(8, return_sequences=True, return_state=True)
    encoded, *state = encode(layers.Embedding(20, 6, mask_zero=True)(source))
    embedded = layers.Embedding(21, 6, mask_zero=True)(target)
    decoded = layers.LSTM(8, return_sequences=True)(embedded, initial_state=state)
    seen = layers.AdditiveAttention()([decoded, encoded])
    classify = layers.TimeDistributed(layers.Dense(21, activation="softmax"))
    outputs = classify(layers.Concatenate()([decoded, seen]))
    model = keras.Model([source, target], outputs)
    loss = "sparse_categorical_crossentropy"
    return compiled(model, loss, keras.optimizers.SGD(0.05), metrics=["accuracy"])


# --- losses over the batch -------------------------------------------------------------


class TwoTower(keras.Model):
    """Scores every user of the batch against every item of the batch."""

    def __init__(self):
        super().__init__()
        self.users, self.items = (
            keras.Sequential([layers.Embedding(number, 8), layers.Flatten(), layers.Dense(4)])
            for number in (20, 30)
        )

    def call(self, pairs):
        return ops.matmul(self.users(pairs["user"]), ops.transpose(self.items(pairs["item"])))


def own_item_loss(_, scores):
    own = ops.eye(ops.shape(scores)[0])
    return keras.losses.categorical_crossentropy(own, scores, from_logits=True)


def two_tower():
    model = compiled(TwoTower(), own_item_loss)
    model({name: np.zeros((2, 1), "int32") for name in ("user", "item")})
    return model


def pairs_of_ids(samples):
    pairs = {"user": samples.labels(20, 1), "item": samples.labels(30, 1)}
    return pairs, np.zeros_like(pairs["user"], "float32")


def triplet_loss(labels, embedded):
    """The farthest sample of the same class against the nearest one of another class."""
    apart = ops.sum(ops.square(embedded[:, None] - embedded[None]), axis=-1)
    same = ops.cast(ops.equal(labels[:, None], labels[None]), "float32")
    same = ops.reshape(same, ops.shape(apart))
    farthest = ops.max(apart * same, axis=1)
    nearest = ops.min(apart + 10 * same, axis=1)
    return ops.relu(farthest - nearest + 0.5)


def capsule_triplet():
    network = [layers.Dense(8, "relu"), layers.Dense(4), layers.UnitNormalization()]
    return compiled(keras.Sequential([keras.Input((6,)), *network]), triplet_loss)


# --- small networks --------------------------------------------------------------------


def mixture_loss(truth, prediction):
    shares, means, widths = ops.split(prediction, 3, axis=-1)
    widths = widths + 1e-3
    log_density = -0.5 * ops.square((truth - means) / widths) - ops.log(widths)
    return -ops.logsumexp(ops.log(shares + 1e-6) + log_density, axis=-1)


def mixture_density():
    """Three heads that are one prediction, which the loss takes apart."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, "tanh")(inputs)
    heads = [layers.Dense(3, activation)(hidden) for activation in ("softmax", None, "softplus")]
    model = keras.Model(inputs, layers.Concatenate()(heads))
    return compiled(model, mixture_loss, momentum(0.02))


def lora():
    """Frozen kernels with trainable products of low rank next to them."""
    adapted = [layers.Dense(8, "relu"), layers.Dense(8, "relu")]
    model = keras.Sequential([keras.Input((6,)), *adapted, layers.Dense(3)])
    for layer in adapted:
        layer.enable_lora(2)
    return compiled(model, logits_loss(), keras.optimizers.Adam(1e-2))


class TrustRatio(keras.optimizers.Optimizer):
    """Steps by the sign of gradients, each as long as the norm of its weight asks."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.means = [self.add_variable_from_reference(v, "mean") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        mean = self.means[self._get_variable_index(variable)]
        self.assign(mean, 0.9 * mean + 0.1 * ops.sign(gradient))
        trust = ops.maximum(ops.norm(variable), 0.1) / (ops.norm(mean) + 1e-6)
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * mean * trust)


def custom_optimizer():
    """An optimizer that reads the norms of whole weights."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(3)])
    return compiled(model, "mse", TrustRatio(0.01))


# --- all of them -----------------------------------------------------------------------

MODELS = {
    "unet": (unet, lambda samples: (samples.real(16, 16, 3), samples.labels(3, 16, 16))),
    "mlp_mixer": (mlp_mixer, lambda samples: (samples.real(16, 16, 3), samples.labels(5))),
    "yolo_like": (yolo_like, boxes),
    "spectral_weightnorm": (
        spectral_weightnorm,
        lambda samples: (samples.real(8, 8, 2), samples.real(3)),
    ),
    "norm_layers": (norm_layers, lambda samples: (samples.real(8, 8, 4), samples.real(2))),
    "convlstm": (convlstm, lambda samples: (samples.real(4, 8, 8, 1), samples.share(4, 8, 8, 1))),
    "tcn_wavenet": (tcn_wavenet, lambda samples: (samples.real(24, 2), samples.real(24, 1))),
    "seq2seq_attention": (
        seq2seq_attention,
        lambda samples: ([samples.labels(20, 7), samples.labels(21, 5)], samples.labels(21, 5)),
    ),
    "two_tower": (two_tower, pairs_of_ids),
    "capsule_triplet": (capsule_triplet, lambda samples: (samples.real(6), samples.labels(3, 1))),
    "mixture_density": (mixture_density, lambda samples: (samples.real(4), samples.real(1))),
    "lora": (lora, lambda samples: (samples.real(6), samples.labels(3))),
    "custom_optimizer": (custom_optimizer, lambda samples: (samples.real(6), samples.real(3))),
}
BY_DEFAULT = ("spectral_weightnorm", "seq2seq_attention", "custom_optimizer")
IN_BOTH_WAYS = ("lora", "yolo_like")


@pytest.mark.parametrize(("name", "mode"), cases(MODELS, BY_DEFAULT, IN_BOTH_WAYS))
def test_trains_as_on_one_device(name, mode):
    assert_trains_as_on_one_device(*MODELS[name], mode)
