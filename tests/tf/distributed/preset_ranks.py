"""What each rank does in the tests of presets:
`python -m tests.tf.distributed.preset_ranks FOLDER`.

FOLDER holds the preset `gemma`, and what plain Keras made of it (`plain.json`). The ranks leave
`tuned`, and `tuned.npz` with the logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import tfpar as tap
from tests import presets
from tests.tf.distributed.state_ranks import Checks
from tfpar.tf.distributed.world import this_world


def main(folder: Path, backend: str) -> None:
    world = this_world()
    assert world is not None and world.size == 2
    plain = json.loads((folder / "plain.json").read_text())
    check = Checks(folder, f"checks-{backend}", world.rank)
    with tap.auto_parallel(tap.Mesh.of({"model": 2}), presets.SPLIT, planner=None):
        task = presets.with_lora(folder / "gemma")
    before = presets.frozen(presets.with_lora(folder / "gemma"))

    def train() -> None:
        history = presets.tuned(task)
        for name, values in plain["history"].items():
            np.testing.assert_allclose(history[name], values, rtol=1e-4, err_msg=name)
        for name, value in presets.frozen(task).items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)

    def save() -> None:
        task.save_to_preset(str(folder / f"tuned-{backend}"), max_shard_size=1e-6)
        task.backbone.save_lora_weights(str(folder / f"tuned-{backend}.lora.h5"))

    def generate() -> None:
        """After the first rank has saved for all, and traced more than the other."""
        assert presets.generated(task) == plain["generated"]

    def load() -> None:
        logits = presets.logits(task)
        with tap.auto_parallel(tap.Mesh.of({"data": 2}), tap.batch(), planner=None):
            other = presets.with_lora(folder / f"tuned-{backend}")
            adapted = presets.with_lora(folder / "gemma")
        adapted.backbone.load_lora_weights(str(folder / f"tuned-{backend}.lora.h5"))
        for model in (other, adapted):
            np.testing.assert_allclose(presets.logits(model), logits, atol=1e-5)
        if not world.rank:
            np.save(folder / f"tuned-{backend}.npy", logits)

    check("train", train)
    check("save", save)
    check("generate", generate)
    check("load", load)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
