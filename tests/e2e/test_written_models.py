"""A model that trained on any mesh is written in every form, and computes what one device does.

The column of several processes is in `tests/tf/distributed/test_equivalence.py`.
"""

import numpy as np
import pytest

import tfpar as tap
from tests import written_models as written

COLUMNS = {
    "data": ([2], [], {}),
    "model": ([1, 2], written.SPLIT, {}),
    "2x2": ([2, 2], written.SPLIT, {}),
    "stages": ([2], [], {"pipeline": tap.Pipeline(stages=2, microbatches=2)}),
}


@pytest.fixture(scope="module")
def plain():
    """Outputs of one device, after training and after more of it."""
    model = written.trained()
    return written.outputs(model), written.outputs(written.fitted(model))


@pytest.fixture(scope="module", params=COLUMNS)
def model(request):
    mesh, constraints, options = COLUMNS[request.param]
    with tap.auto_parallel(mesh, constraints, planner=None, verbose=0, **options):
        return written.trained()


@pytest.mark.slow
@pytest.mark.parametrize("name", written.ROWS)
def test_what_is_read_computes_what_one_device_does(model, name, plain, tmp_path):
    row = written.ROWS[name]
    path = row.path(tmp_path, name, rank=0)
    row.write(model, path)
    np.testing.assert_allclose(row.read(path), plain[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_goes_on(model, plain):
    """After all of these, as on one device; the last test, as it changes the model."""
    later = written.outputs(written.fitted(model))
    np.testing.assert_allclose(later, plain[1], rtol=1e-4, atol=1e-5)
    assert all(variable.value.is_sharded for variable in model.variables)
