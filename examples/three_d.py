"""A 3-D plan: stages x data x tensor, on eight ranks.

The step is cut into two stages, one for each board, with four microbatches on their way. How the
ranks of a stage share the batch and the weights is searched: the slow links of a board carry
gradients, the fast ones within a pair what Megatron's layers sum.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import gpt
from machines import TWO_BOARDS
from shipped_data import next_bytes

import tfpar as tap


def main() -> None:
    x, y = next_bytes(sequences=512, length=gpt.LENGTH)
    pipeline = tap.Pipeline(stages=2, microbatches=4)
    # So few steps are not worth the search that finds the best plan.
    with tap.auto_parallel([2, 4], cluster=TWO_BOARDS, pipeline=pipeline, search_seconds=600):
        model = gpt.build()
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    print(tap.plan_of(model).summary())
    print("losses:", *(f"{loss:.4f}" for loss in history.history["loss"]))


if __name__ == "__main__":
    main()
