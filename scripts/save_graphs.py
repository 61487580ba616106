"""Save the steps of small models as text, for tests of planning that need no TensorFlow.

    python -m scripts.save_graphs [--model gpt]

How the models are built is in `tests/graphs/models.py`. A step is traced without its update, as
`tap.plan` does, simplified, and written to `tests/graphs/NAME.txt.gz`. Run it when capture or a
pass is meant to give another graph; a test tells when the saved ones are not those of today.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys

from tests.graphs import FOLDER, saved_names
from tfpar.ir.step import StepGraph
from tfpar.ir.text import format_step

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


def captured(name: str) -> StepGraph:
    """The simplified step of a model, without its update."""
    import keras

    import tfpar as tap
    from benchmarks.models import batch_of, compile_model
    from tests.graphs.models import MODELS
    from tfpar.compile import simplify_step
    from tfpar.tf.capture.step import argument_specs
    from tfpar.tf.keras.adapter import parallel_model

    keras.utils.clear_session()  # so that names start from the same numbers
    keras.utils.set_random_seed(0)
    build, data = MODELS[name]
    with tap.auto_parallel([1], planner=None):
        model = build()
        if not model.compiled:
            compile_model(model)
    specs = argument_specs((batch_of(model, data) if isinstance(data, int) else data,))
    step = parallel_model(model).capture_gradients(specs)
    simplify_step(step)
    return step


def versions() -> str:
    """What the shape of a captured graph depends on besides the model."""
    import keras
    import tensorflow as tf

    return f"TensorFlow {tf.__version__}, Keras {keras.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", action="append", help="only this one, which may be new")
    for name in parser.parse_args().model or saved_names():
        text = f"// {versions()}\n{format_step(captured(name))}"
        packed = gzip.compress(text.encode(), mtime=0)
        (FOLDER / f"{name}.txt.gz").write_bytes(packed)
        print(f"{name}: {text.count(chr(10))} lines, {len(packed) / 1000:.0f} kB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
