"""The machines that a mesh gets."""

import pytest

from tests.cluster.test_files import FILE
from tfpar.cluster import find_cluster
from tfpar.spec import Mesh, TfparError
from tfpar.tf.runtime.detect import find_machines


def test_more_ranks_than_devices(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(FILE)
    with pytest.raises(TfparError) as error:
        find_machines(Mesh.of([3, 8]), str(path))
    assert str(error.value) == (
        "The mesh data=3 x model=8 has 24 ranks, but cluster 'ours' has 17 devices (2 nodes of 8, "
        "1 node of 1). Use a smaller mesh, or describe a larger cluster."
    )


def test_local_is_what_is_here():
    mesh = Mesh.of([2])
    assert find_machines(mesh) == find_machines(mesh, "local")
    assert find_machines(mesh).overlap == 0.0, "what communicates is what would compute"
    assert find_machines(mesh).device.memory_bytes == pytest.approx(
        find_cluster("cpu").device.memory_bytes / 2
    )
