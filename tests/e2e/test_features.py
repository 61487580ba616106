"""What Keras models are made of, each feature against one device."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar as tap
from tests.equivalence import assert_equivalent, assert_same, train

MESH = tap.split([2, 2])
COLUMN = [tap.shard("fc1/kernel", dim=1, axis="model")]
rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def i(high, *shape):
    return rng.integers(0, high, shape).astype("int32")


def compiled(inputs, outputs, optimizer="sgd", loss="mse", **arguments):
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, loss, jit_compile=False, **arguments)
    return model


def same(build, data, constraints=COLUMN, mesh=MESH, **arguments):
    return assert_equivalent(build, data, mesh, constraints, **{"batch_size": 4, **arguments})


# --- inputs, outputs, losses ---------------------------------------------------------


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.mean(ops.square(x)))
        return x


def several_heads():
    wide, ids = keras.Input((6,), name="wide"), keras.Input((3,), dtype="int32", name="ids")
    embedded = layers.Embedding(7, 4, embeddings_regularizer="l2", name="table")(ids)
    x = layers.Concatenate()([wide, layers.Flatten()(embedded)])
    x = layers.Dense(
        10, "tanh", kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2),
        activity_regularizer="l2", name="fc1",
    )(x)  # fmt: skip
    x = Penalty()(x)
    outputs = {
        "label": layers.Dense(3, "softmax", name="label")(x),
        "size": layers.Dense(1, name="size")(x),
    }
    return compiled(
        {"wide": wide, "ids": ids}, outputs,
        loss={"label": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"label": 1.0, "size": 0.3},
        metrics={"label": ["accuracy"], "size": ["mae"]}, weighted_metrics={"size": ["mse"]},
    )  # fmt: skip


def test_several_inputs_outputs_losses_weights_and_regularizers():
    x = {"wide": f(14, 6), "ids": i(7, 14, 3)}
    y = {"label": i(3, 14), "size": f(14, 1)}
    weights = {"label": np.abs(f(14)), "size": np.abs(f(14))}
    same(several_heads, (x, y, weights), epochs=2)
    parallel, plain = same(several_heads, (x, y), validation_split=0.3)
    for kind in ("evaluate", "predict"):
        arguments = (x, y) if kind == "evaluate" else (x,)
        got = getattr(parallel.model, kind)(*arguments, batch_size=5, verbose=0)
        want = getattr(plain.model, kind)(*arguments, batch_size=5, verbose=0)
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), got, want)


LOSSES = [
    "BinaryCrossentropy", "BinaryFocalCrossentropy", "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy", "CategoricalHinge", "CosineSimilarity", "Dice", "Hinge",
    "Huber", "KLDivergence", "LogCosh", "MeanAbsoluteError", "MeanAbsolutePercentageError",
    "MeanSquaredLogarithmicError", "Poisson", "SquaredHinge", "Tversky",
]  # fmt: skip


@pytest.mark.slow
def test_losses():
    """All in one model, each with an output of its own, reduced in turn in every way."""
    reductions = ["sum_over_batch_size", "sum", "mean_with_sample_weight"]
    losses = [getattr(keras.losses, n) for n in LOSSES if hasattr(keras.losses, n)]

    def build():
        x = keras.Input((6,))
        h = layers.Dense(10, "tanh", name="fc1")(x)
        heads = [layers.Dense(4, "softmax", name=f"out{n}")(h) for n in range(len(losses))]
        loss = [make(reduction=reductions[n % 3]) for n, make in enumerate(losses)]
        return compiled(x, heads, loss=loss)

    y = np.eye(4, dtype="float32")[i(4, 10)]
    weights = [np.abs(f(10)) + 0.1 for _ in losses]
    same(build, (f(10, 6), [y] * len(losses), weights), rtol=5e-3)


@pytest.mark.slow
def test_losses_over_pairs_and_sequences():
    """Circle loss compares samples with each other; CTC loops over time."""

    def build():
        x = keras.Input((5, 6))
        h = layers.Dense(10, "tanh", name="fc1")(x)
        outputs = [
            layers.UnitNormalization(name="a")(layers.Flatten()(h)),
            layers.Dense(4, name="b")(h),
        ]
        return compiled(x, outputs, loss=[keras.losses.Circle(), keras.losses.CTC()])

    same(build, (f(8, 5, 6), [i(3, 8), i(3, 8, 2) + 1]), rtol=5e-3)


def metrics_of_scores():
    m = keras.metrics
    return [
        m.AUC(20), m.AUC(10, curve="PR", multi_label=True), m.Precision(), m.Recall(class_id=1),
        m.TruePositives(), m.FalseNegatives([0.3, 0.6]), m.BinaryAccuracy(), m.BinaryIoU(),
        m.CategoricalAccuracy(), m.TopKCategoricalAccuracy(2), m.F1Score("macro"),
        m.FBetaScore("weighted", beta=2.0), m.CosineSimilarity(), m.KLDivergence(),
        m.CategoricalHinge(), m.R2Score(), m.OneHotMeanIoU(4), m.PrecisionAtRecall(0.5, 10),
        m.SensitivityAtSpecificity(0.5, 10), m.RootMeanSquaredError(), m.LogCoshError(),
        m.Poisson(), m.MeanAbsolutePercentageError(), m.PearsonCorrelation(),
        m.ConcordanceCorrelation(),
    ]  # fmt: skip


def metrics_of_logits():
    m = keras.metrics
    return [
        m.SparseCategoricalAccuracy(), m.SparseTopKCategoricalAccuracy(2),
        m.SparseCategoricalCrossentropy(from_logits=True), m.MeanIoU(4, sparse_y_pred=False),
    ]  # fmt: skip


@pytest.mark.slow
def test_metrics():
    def build():
        x = keras.Input((6,))
        h = layers.Dense(10, "tanh", name="fc1")(x)
        heads = [layers.Dense(4, "softmax", name="a")(h), layers.Dense(4, name="b")(h)]
        metrics = [metrics_of_scores(), metrics_of_logits()]
        for n, metric in enumerate(sum(metrics, [])):
            metric.name = f"m{n}"  # Keras numbers names anew for each model
        losses = [
            "categorical_crossentropy",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ]
        return compiled(x, heads, loss=losses, metrics=metrics)

    y = i(4, 14)
    same(build, (f(14, 6), [np.eye(4, dtype="float32")[y], y]), epochs=2)


# --- models ----------------------------------------------------------------------------


class Lazy(keras.Model):
    """Subclassed: its variables are made at the first fit."""

    def __init__(self):
        super().__init__()
        self.fc1 = layers.Dense(10, "tanh", name="fc1")
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.3, seed=5)
        self.blocks = [layers.Dense(10, "relu") for _ in range(2)]
        self.head = layers.Dense(2)

    def call(self, x, training=False):
        x = self.norm(self.fc1(x), training=training)
        for block in self.blocks:
            x = x + self.drop(block(x), training=training)
        return self.head(x)


@pytest.mark.slow
def test_subclassed_model_built_by_fit():
    def build():
        model = Lazy()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
        return model

    x, y = f(14, 6), f(14, 2)
    keras.utils.set_random_seed(7)
    plain = build()
    plain.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN):
        model = build()
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for got, want in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(
        plain.evaluate(x, y, verbose=0), rel=1e-4
    )


class Gan(keras.Model):
    """Two optimizers, a random input made in the step, metrics of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(10, "relu", name="fc1"), layers.Dense(6)]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)]
        )
        self.seeds = keras.random.SeedGenerator(3)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compile(self, **arguments):
        super().compile(**arguments)
        self.generator_optimizer = keras.optimizers.Adam(0.01)
        self.discriminator_optimizer = keras.optimizers.SGD(0.05, momentum=0.9)

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.discriminator(x)

    def train_step(self, real):
        count = ops.shape(real)[0]
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))])
        cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        noise = keras.random.normal((count, 3), seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(noise, training=True)
            scores = self.discriminator(ops.concatenate([real, fake]), training=True)
            d_loss = cross_entropy(labels, scores)
            g_loss = cross_entropy(ops.ones((count, 1)), scores[count:])
        for loss, part, optimizer in (
            (d_loss, self.discriminator, self.discriminator_optimizer),
            (g_loss, self.generator, self.generator_optimizer),
        ):
            weights = part.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        del tape
        self.loss_tracker.update_state(d_loss + g_loss)
        return {"loss": self.loss_tracker.result(), "d_loss": d_loss}

    def test_step(self, real):
        score = ops.mean(self.discriminator(real, training=False))
        return {"score": score}


@pytest.mark.slow
def test_gan_with_two_optimizers():
    def build():
        model = Gan()
        model.compile(jit_compile=False)
        return model

    x = f(12, 6)
    parallel, plain = same(build, (x, None), epochs=2)
    got = parallel.model.evaluate(x, batch_size=4, verbose=0, return_dict=True)
    want = plain.model.evaluate(x, batch_size=4, verbose=0, return_dict=True)
    assert got.keys() == want.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, want[name], rtol=1e-3)
    slots = [n for n in parallel.specs() if "fc1_kernel" in n]
    assert slots and all(parallel.specs()[n] == "R,S(1)" for n in slots)


class Distiller(keras.Model):
    def __init__(self, teacher, student):
        super().__init__()
        self.teacher, self.student = teacher, student

    def call(self, x, training=False):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training=training)
        soft = ops.softmax(self.teacher(x, training=False) / 2.0)
        return loss + ops.mean(keras.losses.kl_divergence(soft, ops.softmax(y_pred / 2.0)))


def test_distillation_from_a_frozen_teacher():
    def net(width, name):
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(width, "relu", name="fc1"), layers.Dense(3)], name=name
        )

    def build():
        teacher = net(16, "teacher")
        teacher.trainable = False
        model = Distiller(teacher, net(8, "student"))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
        return model

    parallel, _ = same(build, (f(14, 6), i(3, 14)))
    assert parallel.specs()["teacher/fc1/kernel"] == "R,S(1)"


@pytest.mark.slow
def test_frozen_layers_and_compiling_again():
    def build():
        x = keras.Input((6,))
        h = layers.Dense(10, "tanh", trainable=False, name="fc1")(x)
        h = layers.BatchNormalization(trainable=False)(h)
        return compiled(x, layers.Dense(2)(h), optimizer="adam")

    data = f(8, 6), f(8, 2)
    runs = same(build, data)
    for run in runs:
        np.testing.assert_array_equal(run.model.get_layer("fc1").kernel, run.start[0])
        run.model.trainable = True
        for layer in run.model.layers:
            layer.trainable = True
        run.model.compile("rmsprop", "mae", jit_compile=False)
        run.start = run.model.get_weights()
        run.history = run.model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        run.weights = run.model.get_weights()
        assert (run.weights[0] != run.start[0]).any()
    assert_same(*runs)


@pytest.mark.slow
def test_tied_weights():
    """The table of the embedding is the head's kernel, split over the vocabulary."""

    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(11, 6, name="table")
            self.fc1 = layers.Dense(6, "tanh", name="fc1")

        def call(self, ids):
            return ops.matmul(self.fc1(self.table(ids)), ops.transpose(self.table.embeddings))

    def tied():
        model = Tied()
        model.build((None, 5))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
        return model

    def reversible():
        ids = keras.Input((5,), dtype="int32")
        table = layers.ReversibleEmbedding(11, 6, name="table")
        x = layers.Dense(6, "tanh", name="fc1")(table(ids))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return compiled(ids, table(x, reverse=True), optimizer="adam", loss=loss)

    data = i(11, 10, 5), i(11, 10, 5)
    builds = [tied, *([reversible] if hasattr(layers, "ReversibleEmbedding") else [])]
    for make in builds:
        parallel, _ = same(make, data, [tap.shard("table/embeddings", dim=0, axis="model")])
        assert "S(0)" in next(s for n, s in parallel.specs().items() if "embeddings" in n)


@pytest.mark.slow
def test_nested_models_and_two_models_sharing_layers():
    """Each trains on its own; what one learns the other has."""

    def pair():
        x = keras.Input((6,))
        trunk = keras.Sequential([keras.Input((6,)), layers.Dense(10, "tanh", name="fc1")])
        shared = layers.Dense(4, name="shared")
        first = compiled(x, layers.Dense(2)(shared(trunk(x))), optimizer="adam")
        second = compiled(x, layers.Dense(1)(shared(trunk(x * 2.0))), optimizer="sgd", loss="mae")
        return first, second

    x, y, z = f(12, 6), f(12, 2), f(12, 1)
    keras.utils.set_random_seed(7)
    plain = pair()
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN):
        parallel = pair()
    for first, second in (plain, parallel):
        for _ in range(2):
            first.fit(x, y, batch_size=4, shuffle=False, verbose=0)
            second.fit(x, z, batch_size=4, shuffle=False, verbose=0)
    for a, b in zip(parallel, plain, strict=True):
        for got, want in zip(a.get_weights(), b.get_weights(), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


# --- numbers ---------------------------------------------------------------------------


def perceptron(optimizer="adam", **arguments):
    x = keras.Input((6,), **arguments)
    h = layers.Dense(10, "tanh", name="fc1")(x)
    h = layers.LayerNormalization()(h)
    return compiled(x, layers.Dense(2, name="head")(h), optimizer=optimizer)


@pytest.mark.parametrize("policy", ["float64", "mixed_bfloat16", "mixed_float16"])
def test_dtype_policy(policy):
    """Sums in half precision are rounded in another order: only close.

    The labels lie far from what the model gives, so that no gradient cancels out.
    """
    exact = policy == "float64"
    tolerances = {"loss_rtol": 1e-6} if exact else {"rtol": 0.05, "loss_rtol": 2e-2}
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        optimizer = "adam" if exact else "sgd"
        data = f(14, 6), 3 + f(14, 2)
        parallel, _ = same(lambda: perceptron(optimizer), data, **tolerances)
    finally:
        keras.config.set_dtype_policy(before)
    scaled = isinstance(parallel.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")


def test_inputs_of_many_dtypes():
    def build():
        kinds = ("uint8", "int64", "bool", "float16", "float64")
        inputs = [keras.Input((4,), dtype=kind, name=kind) for kind in kinds]
        x = ops.concatenate([ops.cast(t, "float32") for t in inputs], axis=-1)
        return compiled(inputs, layers.Dense(2)(layers.Dense(10, name="fc1")(x)))

    x = [
        rng.integers(0, 9, (10, 4)).astype("uint8"), rng.integers(0, 9, (10, 4)),
        rng.integers(0, 2, (10, 4)).astype("bool"), f(10, 4).astype("float16"),
        rng.normal(size=(10, 4)),
    ]  # fmt: skip
    same(build, (x, f(10, 2)))


def test_sparse_inputs():
    """Fed dense, sparse in the step: the numbers of values differ from batch to batch."""

    def build():
        x = keras.Input((6,), sparse=True)
        return compiled(x, layers.Dense(2)(layers.Dense(10, name="fc1")(x)))

    x = tf.sparse.from_dense(np.where(f(10, 6) > 0.5, f(10, 6), 0))
    data = tf.data.Dataset.from_tensor_slices((x, f(10, 2))).batch(4)
    runs = []
    for scope in (contextlib.nullcontext, lambda: tap.auto_parallel(MESH, COLUMN)):
        keras.utils.set_random_seed(7)
        with scope():
            model = build()
        model.fit(data, epochs=2, verbose=0)
        runs.append(model.get_weights())
    for got, want in zip(*runs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[4], [1, 4], [3], [2, 1, 2]])
def test_meshes_and_batches(mesh):
    """Batches of 5, 5 and 1; sizes that no mesh divides."""
    mesh = tap.split(mesh, ("data", "model", "more")[: len(mesh)])
    constraints = COLUMN if "model" in mesh.axis_names else ()
    same(perceptron, (f(11, 6), f(11, 2)), constraints, mesh, batch_size=5)


def test_batch_of_one():
    same(perceptron, (f(3, 6), f(3, 2)), batch_size=1)


# --- randomness ------------------------------------------------------------------------


@pytest.mark.slow
def test_random_layers_draw_what_one_device_draws():
    def build():
        x = keras.Input((8, 6))
        h = layers.Dense(10, "tanh", name="fc1")(x)
        h = layers.Dropout(0.4, seed=1)(h)
        h = layers.SpatialDropout1D(0.3, seed=2)(h)
        h = layers.GaussianNoise(0.1, seed=3)(h)
        h = layers.GaussianDropout(0.2, seed=4)(h)
        h = layers.AlphaDropout(0.2, seed=5)(h)
        h = layers.Dropout(0.5, noise_shape=(None, 1, 10), seed=6)(h)
        return compiled(x, layers.Dense(2)(h))

    same(build, (f(10, 8, 6), f(10, 8, 2)), epochs=2)


def test_unseeded_layers_follow_the_global_seed():
    def build():
        x = keras.Input((6,))
        h = layers.Dropout(0.4)(layers.Dense(10, "tanh", name="fc1")(x))
        return compiled(x, layers.Dense(2)(layers.Dropout(0.4)(h)))

    same(build, (f(12, 6), f(12, 2)), epochs=2)


def test_preprocessing_layers_in_the_model():
    images = rng.integers(0, 255, (8, 8, 8, 3)).astype("uint8")

    def build():
        x = keras.Input((8, 8, 3), dtype="uint8")
        h = layers.Rescaling(1 / 127.5, offset=-1.0)(x)
        h = layers.Normalization(mean=[0.1, 0.2, 0.3], variance=[1.0, 2.0, 3.0])(h)
        h = layers.RandomFlip("horizontal_and_vertical", seed=1)(h)
        h = layers.RandomTranslation(0.2, 0.2, seed=2)(h)
        h = layers.RandomRotation(0.1, seed=3)(h)
        h = layers.RandomZoom(0.2, seed=4)(h)
        h = layers.RandomContrast(0.2, seed=5, value_range=(-1, 1))(h)
        h = layers.CenterCrop(6, 6)(h)
        h = layers.Resizing(5, 5)(h)
        h = layers.Dense(10, name="fc1")(layers.Flatten()(h))
        return compiled(x, layers.Dense(2)(h))

    same(build, (images, f(8, 2)), rtol=5e-3)


# --- layers ----------------------------------------------------------------------------


def test_batch_normalization_is_over_the_global_batch():
    def build():
        x = keras.Input((6, 6, 4))
        h = layers.Conv2D(8, 3, name="conv")(x)
        h = layers.BatchNormalization()(h)
        h = layers.Flatten()(layers.BatchNormalization(synchronized=True)(h))
        h = layers.BatchNormalization(scale=False)(layers.Dense(10, name="fc1")(h))
        h = layers.GroupNormalization(2)(h)
        return compiled(x, layers.Dense(2)(h))

    x, y = f(14, 6, 6, 4), f(14, 2)
    parallel, plain = same(build, (x, y), rtol=5e-3, validation_data=(x[:5], y[:5]))
    # Four normalisations in a row amplify float32 roundings: seen up to 1.2e-4 apart.
    np.testing.assert_allclose(
        parallel.model.predict(x, verbose=0),
        plain.model.predict(x, verbose=0),
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.slow
def test_convolutions_and_pooling():
    def build():
        x = keras.Input((8, 8, 4))
        h = layers.Conv2D(8, 3, padding="same", name="column")(x)
        h = layers.Conv2D(8, 3, groups=2, strides=2, padding="same")(h)
        h = layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same")(h)
        h = layers.SeparableConv2D(6, 3, dilation_rate=2, padding="same")(h)
        h = layers.Conv2DTranspose(6, 3, strides=2, padding="same")(h)
        h = layers.MaxPooling2D(2, padding="same")(h) + layers.AveragePooling2D(2)(h)
        h = layers.UpSampling2D(2, interpolation="bilinear")(h)
        h = layers.ZeroPadding2D(1)(layers.Cropping2D(1)(h))
        h = layers.Concatenate()(
            [layers.GlobalAveragePooling2D()(h), layers.GlobalMaxPooling2D()(h)]
        )
        return compiled(x, layers.Dense(2)(layers.Dense(10, name="fc1")(h)))

    constraints = [*COLUMN, tap.shard("column/kernel", dim=3, axis="model")]
    same(build, (f(8, 8, 8, 4), f(8, 2)), constraints, rtol=5e-3)


@pytest.mark.slow
def test_convolutions_in_one_and_three_dims():
    def build():
        x, v = keras.Input((9, 4)), keras.Input((5, 5, 5, 2))
        h = layers.Conv1D(6, 3, padding="causal", name="column")(x)
        h = layers.SeparableConv1D(6, 3)(layers.DepthwiseConv1D(2)(h))
        h = layers.Conv1DTranspose(4, 3, strides=2)(h)
        w = layers.Conv3D(4, 2)(v)
        w = layers.MaxPooling3D(2)(layers.Conv3DTranspose(3, 2)(w))
        h = ops.concatenate(
            [layers.Flatten()(layers.AveragePooling1D(3)(h)), layers.Flatten()(w)], -1
        )
        return compiled([x, v], layers.Dense(2)(layers.Dense(10, name="fc1")(h)))

    constraints = [*COLUMN, tap.shard("column/kernel", dim=2, axis="model")]
    same(build, ([f(8, 9, 4), f(8, 5, 5, 5, 2)], f(8, 2)), constraints, rtol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_recurrent_layers(masked):
    def build():
        ids = keras.Input((5,), dtype="int32")
        h = layers.Embedding(9, 6, mask_zero=masked)(ids)
        h = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(h)
        h = layers.GRU(6, return_sequences=True, go_backwards=True)(h)
        h = layers.RNN([layers.SimpleRNNCell(5), layers.LSTMCell(4)])(h)
        return compiled(ids, layers.Dense(2)(layers.Dense(10, name="fc1")(h)))

    same(build, (i(9, 8, 5), f(8, 2)), rtol=5e-3)


@pytest.mark.slow
def test_attention_layers():
    def build():
        ids = keras.Input((5,), dtype="int32")
        x = layers.Embedding(9, 8, mask_zero=True)(ids)
        h = layers.MultiHeadAttention(2, 4, use_bias=False, dropout=0.1, seed=1, name="mha")(
            x, x, use_causal_mask=True
        )
        h = layers.GroupQueryAttention(4, 4, 2, use_bias=False, name="gqa")(h, x)
        h = h + layers.Attention(use_scale=True, dropout=0.1, seed=2)([h, x])
        h = h + layers.AdditiveAttention()([h, x])
        if hasattr(layers, "RMSNormalization"):
            h = layers.RMSNormalization()(h)
        h = layers.EinsumDense("abc,cd->abd", (5, 10), bias_axes="d")(h)[:, 0]
        return compiled(ids, layers.Dense(2)(layers.Dense(10, name="fc1")(h)))

    constraints = [*COLUMN, tap.shard("(mha|gqa)/(query|key|value)/kernel", dim=1, axis="model")]
    same(build, (i(9, 8, 5), f(8, 2)), constraints, rtol=5e-3)


# --- around training -------------------------------------------------------------------


def test_training_inside_the_block():
    data = f(12, 6), f(12, 2)
    plain = train(perceptron, data, batch_size=4)
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN):
        model = perceptron()
        model.set_weights(plain.start)
        model.fit(*data, batch_size=4, shuffle=False, verbose=0)
        inside = model.predict(data[0], verbose=0)
    np.testing.assert_allclose(inside, plain.model.predict(data[0], verbose=0), atol=1e-5)
    for got, want in zip(model.get_weights(), plain.weights, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_user_reads_and_writes_weights_in_functions_of_their_own():
    parallel, plain = same(perceptron, (f(12, 6), f(12, 2)))
    x = tf.constant(f(3, 6))
    results = []
    for run in (parallel, plain):
        model = run.model

        @tf.function
        def forward(x, model=model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x) ** 2)
            return loss, tape.gradient(loss, model.trainable_variables[0].value)

        kernel = model.get_layer("fc1").kernel
        before = forward(x)
        kernel.assign(kernel * 2.0)
        kernel.assign_add(ops.ones_like(kernel))
        results.append(
            [
                *before,
                *forward(x),
                tf.reduce_sum(kernel),
                kernel[1, 2],
                kernel @ kernel.value.numpy().T,
            ]
        )
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_archive_of_a_model_that_trained(tmp_path):
    """As `model.export`, which makes weights whole first; this one has the shards too."""
    parallel, _ = same(perceptron, (f(12, 6), f(12, 2)))
    archive = keras.export.ExportArchive()
    archive.track(parallel.model)
    archive.add_endpoint("serve", parallel.model.call, [tf.TensorSpec((None, 6))])
    archive.write_out(str(tmp_path), verbose=False)
    served = tf.saved_model.load(str(tmp_path))
    x = f(5, 6)
    np.testing.assert_allclose(served.serve(x), parallel.model.predict(x, verbose=0), atol=1e-5)


def test_a_function_traced_before_training_is_never_silently_stale():
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN):
        model = perceptron()
    norm = tf.function(lambda: sum(tf.reduce_sum(w**2) for w in model.trainable_variables))
    want = sum((w**2).sum() for w in model.get_weights())
    assert float(norm()) == pytest.approx(want, rel=1e-5), "variables were never read before"
    model.fit(f(4, 6), f(4, 2), batch_size=4, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        norm()
    again = tf.function(lambda: sum(tf.reduce_sum(w**2) for w in model.trainable_variables))
    want = sum((w**2).sum() for w in model.get_weights())
    assert float(again()) == pytest.approx(want, rel=1e-5)


def test_callbacks_that_change_weights_and_state(tmp_path):
    def run(name):
        def build():
            return perceptron(keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True))

        x, y = np.ones((12, 6), "float32"), np.ones((12, 2), "float32")
        model = build()
        callbacks = [
            keras.callbacks.BackupAndRestore(str(tmp_path / name)),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1.0),
            keras.callbacks.TerminateOnNaN(),
        ]
        history = model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
        return history.history, model.get_weights()

    keras.utils.set_random_seed(7)
    want = run("plain")
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN):
        got = run("parallel")
    assert got[0]["learning_rate"] == want[0]["learning_rate"]
    assert got[0]["loss"] == pytest.approx(want[0]["loss"], rel=1e-4)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_backup_restores_an_interrupted_run(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    data = f(12, 6), f(12, 2)
    arguments = {"batch_size": 4, "epochs": 4, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(7)
    plain = perceptron()
    plain.fit(*data, **arguments)
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN):
        model = perceptron()
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data, callbacks=[backup, Interrupt()], **arguments)
    keras.utils.set_random_seed(8)
    with tap.auto_parallel(MESH, COLUMN):
        again = perceptron()
    history = again.fit(
        *data, callbacks=[keras.callbacks.BackupAndRestore(str(tmp_path))], **arguments
    )
    assert len(history.history["loss"]) == 2
    for got, want in zip(again.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_function_with_structures_and_several_variables():
    start = {"w": f(6, 10), "v": f(10, 2)}

    def make():
        weights = {n: tf.Variable(v, name=n) for n, v in start.items()}
        count = tf.Variable(0, trainable=False)

        def step(batch, rate, scale):
            with tf.GradientTape() as tape:
                out = tf.tanh(batch["x"] @ weights["w"]) @ weights["v"]
                loss = scale * tf.reduce_mean((out - batch["y"]) ** 2)
            for variable, gradient in zip(
                weights.values(), tape.gradient(loss, list(weights.values())), strict=True
            ):
                variable.assign_sub(rate * gradient)
            count.assign_add(1)
            return {"loss": loss, "out": (out, count.read_value()), "none": None}

        return weights, step

    weights, step = make()
    plain = tf.function(step)
    with tap.auto_parallel(MESH, [tap.shard("w", dim=1, axis="model")]):
        sharded, inner = make()
        parallel = tap.function(inner)
    for n in (8, 5, 8):
        batch = {"x": f(n, 6), "y": f(n, 2)}
        got, want = parallel(batch, 0.1, 0.5), plain(batch, 0.1, 0.5)
        tf.nest.assert_same_structure(got, want)
        for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
            if b is not None:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for name, variable in weights.items():
        np.testing.assert_allclose(sharded[name].numpy(), variable.numpy(), atol=1e-5)


def test_functions_with_python_control_flow_on_tensors():
    weight = f(6, 2)

    def make(w):
        def step(x, limit):
            total = 0.0
            for k in tf.range(limit):
                if tf.reduce_sum(x) > tf.cast(k, "float32"):
                    total += tf.reduce_sum(tf.nn.relu(x @ w)) * float(k + 1)
                else:
                    w.assign_sub(tf.ones_like(w))
            return total

        return step

    v = tf.Variable(weight)
    plain = tf.function(make(v))
    with tap.auto_parallel([4]):
        w = tf.Variable(weight)
        functions = [tap.function(make(w)), tap.function(tf.function(make(w)))]
    for parallel in functions:
        for n in (8, 7):
            x = np.abs(f(n, 6)) / 20
            np.testing.assert_allclose(parallel(x, 4), plain(x, 4), rtol=1e-5)
            np.testing.assert_allclose(w.numpy(), v.numpy(), rtol=1e-5)
