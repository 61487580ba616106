"""Cost of one step: the value that planners compare, plans carry and reports show."""

from __future__ import annotations

import dataclasses

from tfpar.spec.quantities import Amount, Count


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one step on one rank: times in seconds (`_s`), sizes in bytes.

    Attributes:
        seconds: the time of a step: `compute_s`, `communication_s`, `exposed_s`, `bubble_s`,
            `transfer_s`, `host_wait_s` and the cluster's `step_s` together, less `hidden_s`.
        compute_s: of the ops of forward, backward and update.
        communication_s: of the collectives that forward, backward and update wait for.
        hidden_s: how long chunks are computed while those of others are in flight
            (`cost.sub_batch_cost`).
        gradients_s: of the gradients' collectives, all-reduces packed; the update waits for
            `exposed_s` of it, the backward pass hides the rest.
        bucket_bytes: the size of buckets with which that is least.
        weight_bytes, state_bytes: what a rank stores all the time, padding included: weights;
            optimizer slots and other state.
        gradient_bytes, activation_bytes: of the weights' gradients, and of what the backward pass
            reads again.
        live_bytes: the most that is stored at once of gradients, activations and all else that
            a step computes (`cost.memory`); None where only the sums are known.
        copied_bytes: of what is stored for the backward pass, what collectives made of activations
            (`cost.memory`); `activation_bytes` are without.
        gathered_bytes: the same, of what they made of variables.
        host_slot_bytes, host_activation_bytes: what a rank has in the memory of its host: slots and
            other state; what it keeps there for the backward pass.
        transfer_s: how long a rank waits for what other stages send, where that is known apart
            from `bubble_s` (`cost.pipeline_cost_model`).
        bubble_s: how long a rank waits for other stages; of several stages, times are those of a
            rank that works most, and bytes of one that stores most.
        host_wait_s: how long a rank waits for its host to issue ops, beyond what it computes and
            waits for meanwhile (`Device.dispatch_s`).
        collectives: how many a rank takes part in, packed ones counted as one.
    """

    seconds: Amount
    compute_s: tuple[Amount, Amount, Amount]
    communication_s: tuple[Amount, Amount, Amount]
    gradients_s: Amount
    exposed_s: Amount
    bucket_bytes: Count
    weight_bytes: Amount = 0.0
    state_bytes: Amount = 0.0
    gradient_bytes: Amount = 0.0
    activation_bytes: Amount = 0.0
    live_bytes: Amount | None = None
    hidden_s: Amount = 0.0
    collectives: Count = 0
    bubble_s: Amount = 0.0
    transfer_s: Amount = 0.0
    copied_bytes: Amount = 0.0
    gathered_bytes: Amount = 0.0
    host_slot_bytes: Amount = 0.0
    host_activation_bytes: Amount = 0.0
    host_wait_s: Amount = 0.0

    @property
    def memory_bytes(self) -> float:
        """Peak of what a rank stores, in bytes."""
        live = self.gradient_bytes + self.activation_bytes
        return (
            self.weight_bytes
            + self.state_bytes
            + (live if self.live_bytes is None else self.live_bytes)
        )

    @property
    def host_bytes(self) -> float:
        """Peak of what a rank has in the memory of its host, in bytes."""
        return self.host_slot_bytes + self.host_activation_bytes
