"""Cost of an optimizer's update where the graph holds only stand-ins for it.

A plan is searched without tracing the optimizer (`ir.planning_graph`): all that is known of it is
its *state ratio*, bytes of slots per byte of weight.
"""

from __future__ import annotations

from tfpar.cluster.description import Cluster
from tfpar.ir.traits import IN_FLIGHT

# What an optimizer moves per byte of weight: Keras's go op by op, and each op reads and writes
# whole arrays. Counted in their graphs: SGD 5, Adagrad 17, Lion 19, RMSprop 21, Adam 30, AdamW 37.
_PASSES, _PASSES_PER_SLOT = 5.0, 12.5

# The same where XLA fuses them (`ir.kernels`): SGD 3, Adagrad, Lion and RMSprop 7, Adam 12, AdamW
# 15.
_FUSED_PASSES, _FUSED_PASSES_PER_SLOT = 3.0, 4.5


def update_seconds(
    weight_bytes: float, state_ratio: float, cluster: Cluster, *, fused: bool = False
) -> float:
    """Price the reading and writing of gradients, weights and slots in an update.

    Args:
        fused: XLA compiles it.
    """
    passes = _PASSES + _PASSES_PER_SLOT * state_ratio
    if fused:
        passes = _FUSED_PASSES + _FUSED_PASSES_PER_SLOT * state_ratio
    return weight_bytes * passes / cluster.device.memory_bandwidth


def temporaries(trainable: bool, state_ratio: float | None, away: bool = False) -> float:
    """Count the tensors of a variable's size that its update has beside those that the graph shows.

    A weight's slots are computed side by side: while one is written, what another gets is there.
    Stand-ins show nothing: `lr * g` without slots, else what two slots get.

    Args:
        state_ratio: None where the graph holds the update itself.
        away: its slots lie in host memory: those of some weights are there in passing.
    """
    if state_ratio is None:
        return 0 if trainable or away else 1
    return (2 if state_ratio else 1) + (IN_FLIGHT * state_ratio if away else 0)
