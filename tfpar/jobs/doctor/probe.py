"""`python -m tfpar.jobs.doctor.probe`: loads TensorFlow and Keras, and prints as JSON what they
say.

`Probe.of_this_machine` runs it: an import that crashes or hangs takes no more than that process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from tfpar.jobs.doctor.command import run
from tfpar.tf.distributed.job import without_job

_LIMIT_S = 180.0


@dataclasses.dataclass(frozen=True)
class Probe:
    """Versions and devices that TensorFlow and Keras report once they are loaded.

    Attributes:
        tensorflow, keras: versions; empty where `error` says why not.
        backend: of Keras.
        gpus: the names of those that TensorFlow sees.
        cuda: the version that TensorFlow was built for; empty if for none.
        error: why TensorFlow or Keras cannot be loaded.
    """

    tensorflow: str = ""
    keras: str = ""
    backend: str = ""
    gpus: tuple[str, ...] = ()
    cuda: str = ""
    error: str = ""

    @classmethod
    def of_this_machine(cls) -> Probe:
        """Load both in a process of its own."""
        environ = without_job(os.environ) | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        ended = run([sys.executable, "-m", "tfpar.jobs.doctor.probe"], _LIMIT_S, environ)
        lines = ended.out.splitlines()
        told: dict[str, Any] = {}
        for line in lines:  # one for each that has been loaded
            told |= json.loads(line) if line.startswith("{") else {}
        told["gpus"] = tuple(told.get("gpus", ()))
        return cls(**told, error="" if ended.code == 0 else ended.reason)


def main() -> None:
    """Print one line for TensorFlow, one for Keras and one for the devices."""
    import tensorflow as tf

    _say(tensorflow=tf.__version__)
    import keras

    _say(keras=keras.__version__, backend=keras.backend.backend())
    gpus = tf.config.list_physical_devices("GPU")
    details = map(tf.config.experimental.get_device_details, gpus)
    names = [str(detail.get("device_name", "GPU")) for detail in details]
    _say(gpus=names, cuda=str(tf.sysconfig.get_build_info().get("cuda_version", "")))


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
