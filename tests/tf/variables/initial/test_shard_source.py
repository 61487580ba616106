"""Shards read from HDF5 files, plain and within archives."""

import contextlib
import zipfile

import h5py
import ml_dtypes
import numpy as np
import pytest

from tfpar.spec import Mesh, Replicate, Shard, TfparError
from tfpar.tf.variables.initial.shard import shard_value
from tfpar.tf.variables.initial.shard_source import (
    DatasetAt,
    StoredValue,
    open_keras_weights,
    stored_dtype,
)
from tfpar.tf.variables.values import cut_shard

rng = np.random.default_rng(0)
LAYOUTS = (
    (Mesh.of([4]), (Shard(0),)),
    (Mesh.of([2]), (Shard(1),)),
    (Mesh.of([2]), (Replicate(),)),
    (Mesh.of([2, 2]), (Shard(0), Shard(1))),
    (Mesh.of([2]), (Shard(1, 4),)),
    (Mesh.of([2]), (Shard(0, 2),)),
)


@pytest.fixture
def write(tmp_path):
    """Writes a weights file with one dataset; gives its path."""

    def write(value, compression=None):
        path = tmp_path / "model.weights.h5"
        with h5py.File(path, "w") as file:
            dataset = file.create_dataset("layer/vars/0", data=value)
            if value.dtype == ml_dtypes.bfloat16:
                dataset.attrs["dtype"] = "bfloat16"
        if compression is None:
            return path
        archive = tmp_path / "model.keras"
        with zipfile.ZipFile(archive, "w", compression) as file:
            file.writestr("config.json", "{}")
            file.write(path, "model.weights.h5")
        path.unlink()
        return archive

    return write


def stored(path, dtype=None) -> StoredValue:
    with open_keras_weights(path) as file:
        dataset = file["layer/vars/0"]
        shape, kind = dataset.shape, stored_dtype(dataset)

    @contextlib.contextmanager
    def open_dataset():
        with open_keras_weights(path) as file:
            yield file["layer/vars/0"]

    return StoredValue(open_dataset, shape, dtype or kind)


@pytest.mark.parametrize("compression", [None, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_shards_of_a_file(write, compression):
    value = rng.normal(size=(10, 12, 3)).astype("float32")
    source = stored(write(value, compression))
    np.testing.assert_array_equal(source(), value)
    for mesh, spec in LAYOUTS:
        for rank in range(mesh.size):
            want = cut_shard(shaped(value), spec, mesh, rank).numpy()
            for limit in (50, 1 << 20):
                got = source.read_shard(spec, mesh, rank, limit_bytes=limit)
                np.testing.assert_array_equal(got, want)
            made = shard_value(source, value.shape, "float32", spec, mesh, rank, limit_bytes=50)
            np.testing.assert_array_equal(made, want)


def shaped(value):
    import tensorflow as tf

    return tf.constant(value)


@pytest.mark.parametrize("shape", [(), (5,), (1, 40), (3, 1)])
def test_small_shapes(write, shape):
    value = rng.normal(size=shape)
    source = stored(write(value), "float32")
    spec = (Shard(0),) if shape else (Replicate(),)
    got = source.read_shard(spec, Mesh.of([2]), 1, limit_bytes=8)
    np.testing.assert_array_equal(
        got, cut_shard(shaped(value.astype("float32")), spec, Mesh.of([2]), 1)
    )


def test_bfloat16_is_stored_as_bytes(write):
    value = rng.normal(size=(6, 4)).astype(ml_dtypes.bfloat16)
    path = write(value)
    for dtype in (None, "float32"):
        got = stored(path, dtype).read_shard((Shard(0),), Mesh.of([2]), 1)
        assert got.dtype == (dtype or ml_dtypes.bfloat16)
        np.testing.assert_array_equal(got, value[3:].astype(got.dtype))


def test_values_of_an_unknown_kind_are_refused(tmp_path):
    path = tmp_path / "x.weights.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("layer/vars/0", data=np.zeros(4, "V2"))
    with pytest.raises(TfparError, match="opaque values of 2 bytes"):
        stored(path)


def test_only_what_is_needed_is_read(write):
    value = rng.normal(size=(16, 8)).astype("float32")
    path = write(value)
    boxes = []

    class Spy:
        """A dataset that notes what is read of it."""

        def __init__(self, dataset):
            self.dataset = dataset

        def __getattr__(self, name):
            return getattr(self.dataset, name)

        def __getitem__(self, box):
            boxes.append(self.dataset[box].shape)
            return self.dataset[box]

    @contextlib.contextmanager
    def open_dataset():
        with open_keras_weights(path) as file:
            yield Spy(file["layer/vars/0"])

    source = StoredValue(open_dataset, value.shape, "float32")
    mesh, spec = Mesh.of([2, 2]), (Shard(0), Shard(1))
    source.read_shard(spec, mesh, 3, limit_bytes=64)
    assert boxes == [(4, 4), (4, 4)]


def test_a_file_that_changed_is_not_read(write):
    value = rng.normal(size=(6, 4)).astype("float32")
    path = write(value)
    with open_keras_weights(path) as file:
        place = DatasetAt.of(file["layer/vars/0"], None, None)
    source = StoredValue(place.open, value.shape, "float32")
    np.testing.assert_array_equal(source(), value)
    write(rng.normal(size=(7, 4)))
    with pytest.raises(TfparError, match="changed or removed after load_weights"):
        source.read_shard((Shard(0),), Mesh.of([2]), 0)
    path.unlink()
    with pytest.raises(TfparError, match="model.weights.h5.*changed or removed"):
        source()
