"""Machines that the examples plan for, small as their models are.

Without `cluster=` a plan is for the machine that runs the script. Naming one makes the plan the
same everywhere; what trains is the same in any case.
"""

import tfpar as tap

_DEVICE = tap.Device({"float32": 1e10}, memory_bytes=4e9, memory_bandwidth=5e9)

FOUR_CORES = tap.Cluster.regular("four cores", _DEVICE, [tap.Level(4, 1e9, 1e-5)])
"""10 GFLOP/s each, joined at 1 GB/s."""

TWO_BOARDS = tap.Cluster.regular(
    "two boards of two pairs",
    tap.Device({"float32": 1e11}, memory_bytes=4e9, memory_bandwidth=2e10),
    [tap.Level(2, 2e7, 1e-4), tap.Level(2, 2e8, 1e-5), tap.Level(2, 1e10, 1e-6)],
    node_levels=2,
)
"""Eight devices: pairs at 10 GB/s, two pairs on a board at 200 MB/s, boards at 20 MB/s."""
