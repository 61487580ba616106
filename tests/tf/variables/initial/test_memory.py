"""No rank needs memory for more than its shard and a few blocks."""

import subprocess

import pytest

from tests import preloaded
from tests.jobs.launch.programs import variables
from tests.time_limits import time_limit

MAKE = """
import keras
from tfpar.tf.variables.initial.shard import shard_value
from tfpar.spec import Mesh, Shard

def megabytes(entry):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(entry))
    return int(line.split()[1]) >> 10

def made(size, dim, **options):
    make = keras.initializers.RandomNormal(seed=3)
    initial = lambda: make((size, size), dtype="float32")
    layout = (Shard(dim),), Mesh.of([4]), 1
    return shard_value(initial, (size, size), "float32", *layout, **options)

made(64, 0, limit_bytes=1024)
kept = []
for dim in (0, 1):
    open("/proc/self/clear_refs", "w").write("5")  # the peak is what is there now
    before = megabytes("VmRSS")
    kept.append(made(8192, dim))
    print(megabytes("VmHWM") - before)
"""
SHARD_MB = 64


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_quarter_of_256_mb_takes_little_more_than_64():
    result = subprocess.run(
        preloaded.python("-c", MAKE),
        env=variables(),
        capture_output=True,
        text=True,
        timeout=time_limit(120),
    )
    assert result.returncode == 0, result.stderr
    peaks = [int(line) for line in result.stdout.split()]
    # At the lower end: the allocator has pages of earlier blocks at hand.
    assert len(peaks) == 2 and all(SHARD_MB // 2 <= peak < 2 * SHARD_MB for peak in peaks), peaks
