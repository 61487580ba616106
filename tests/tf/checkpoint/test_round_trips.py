"""What any mesh wrote, any other reads, to the bit; TensorFlow by itself too."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.spec.strategies import meshes, shapes, specs
from tests.tf.checkpoint.ranks import MESHES, same, save, shard_of, specs_of
from tfpar.spec import Mesh, parse_spec, replicated_spec
from tfpar.tf.checkpoint import Reader, files

rng = np.random.default_rng(0)

VALUES = {
    "even/kernel": rng.normal(size=(8, 12)).astype(np.float32),
    "uneven/kernel": rng.normal(size=(7, 5)).astype(np.float32),
    "short": rng.normal(size=(2, 6)).astype(np.float64),
    "cube": rng.normal(size=(4, 3, 6)).astype(ml_dtypes.bfloat16),
    "mask": rng.random((10,)) < 0.5,
    "ids": rng.integers(-(2**62), 2**62, (6, 4)),
    "seed": rng.integers(0, 2**32, (2,), dtype=np.uint32),
    "half": rng.normal(size=(6, 5)).astype(np.float16),
    "complex": (rng.normal(size=(4, 2)) + 1j).astype(np.complex64),
    "step": np.int64(2**40 + 1),
    "nothing": np.zeros((0, 5), np.float32),
    "not_a_number": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
}


@pytest.fixture(scope="module", params=MESHES, ids=str)
def written(request, tmp_path_factory):
    """Each value under every spec of one mesh."""
    mesh = request.param
    tensors = {
        f"{name}:{spec}": (value, spec)
        for name, value in VALUES.items()
        for spec in specs_of(value.shape, mesh)
    }
    return save(tmp_path_factory.mktemp("run"), tensors, mesh, step=3, epoch=1), tensors


def test_tensorflow_reads_whole_tensors(written):
    path, tensors = written
    plain = tf.train.load_checkpoint(os.path.join(path, "tensors"))
    assert set(plain.get_variable_to_shape_map()) == set(tensors)
    for name, (value, _) in tensors.items():
        assert same(plain.get_tensor(name), value), name


def test_the_reader_reads_whole_tensors(written):
    path, tensors = written
    reader = Reader(path)
    assert reader.names == sorted(tensors)
    assert (reader.step, reader.info) == (3, {"epoch": 1})
    for name, (value, _) in tensors.items():
        assert reader.shape(name) == value.shape
        assert reader.dtype(name) == tf.as_dtype(value.dtype)
        assert same(reader.read_whole(name), value), name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_other_mesh_reads_its_shards(written, mesh):
    path, tensors = written
    reader = Reader(path)
    for i, (name, (value, _)) in enumerate(tensors.items()):
        choices = specs_of(value.shape, mesh)
        spec = choices[i % len(choices)]
        for rank in range(mesh.size):
            shard = reader.read(name, spec, mesh, rank)
            assert same(shard, shard_of(value, spec, mesh, rank)), (name, spec, rank)


@pytest.mark.slow
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_layout_becomes_any_other(data, tmp_path):
    shape, old, new = data.draw(shapes), data.draw(meshes), data.draw(meshes)
    before, after = data.draw(specs(shape, old)), data.draw(specs(shape, new))
    value = rng.normal(size=shape).astype(np.float32)
    reader = Reader(save(tmp_path, {"x": (value, before)}, old))
    for rank in range(new.size):
        assert same(reader.read("x", after, new, rank), shard_of(value, after, new, rank))


def test_a_type_that_tensorflow_cannot_slice_is_whole_in_the_checkpoint(tmp_path):
    value = VALUES["half"]
    path = save(
        tmp_path, {"h": (value, parse_spec("S(0)")), "x": (value, parse_spec("R"))}, Mesh.of([3])
    )
    with open(os.path.join(path, "checkpoint.json"), encoding="utf-8") as file:
        assert json.load(file)["tensors"] == ["h", "x"]
    assert same(tf.train.load_checkpoint(f"{path}/tensors").get_tensor("h"), value)


def test_what_a_rank_writes_is_split_into_files_of_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BUNDLE_BYTES", 100)
    tensors = {f"v{i}": (np.full(10, i, np.float32), replicated_spec(1)) for i in range(6)}
    path = save(tmp_path, tensors, Mesh.of([1]))
    data = [name for name in os.listdir(path) if ".data-" in name]
    assert len(data) == 3
    assert all(same(Reader(path).read_whole(f"v{i}"), np.full(10, i, "f")) for i in range(6))


def test_large_boxes_are_stored_in_slices_of_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SLICE_BYTES", 100)
    old, new = Mesh.of([3]), Mesh.of([2, 2])
    names = ["even/kernel", "uneven/kernel", "cube", "half", "step"]
    tensors = {name: (VALUES[name], specs_of(VALUES[name].shape, old)[-1]) for name in names}
    path = save(tmp_path, tensors, old)
    for name in names:
        assert same(tf.train.load_checkpoint(f"{path}/tensors").get_tensor(name), VALUES[name])
        for spec in specs_of(VALUES[name].shape, new):
            shard = Reader(path).read(name, spec, new, 3)
            assert same(shard, shard_of(VALUES[name], spec, new, 3)), (name, spec)


def test_plain_tensorflow_checkpoints_are_read(tmp_path):
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    prefix = tf.train.Checkpoint(v=tf.Variable(value)).write(str(tmp_path / "plain"))
    reader = Reader(prefix)
    name = "v/.ATTRIBUTES/VARIABLE_VALUE"
    mesh, spec = Mesh.of([2, 2]), parse_spec("S(0),S(1/3)")
    assert name in reader.names
    assert (reader.step, reader.info) == (None, {})
    for rank in range(4):
        assert same(reader.read(name, spec, mesh, rank), shard_of(value, spec, mesh, rank))
