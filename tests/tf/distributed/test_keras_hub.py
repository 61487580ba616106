"""KerasHub and `tf.function`s of the user's on split weights: as plain Keras, written once."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.cases import is_nightly
from tests.tf.distributed import jobs

pytestmark = pytest.mark.xdist_group("processes")

_SECONDS = 240.0
NIGHT = pytest.mark.nightly
"""`test_presets` generates, and tunes with LoRA, by day."""


@pytest.fixture(scope="module")
def keras_hub():
    """Imported late: it takes long, and the quick part of the suite does without."""
    return pytest.importorskip("keras_hub")


@pytest.fixture(scope="module")
def ranks(keras_hub):
    return pytest.importorskip("tests.tf.distributed.hub_ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, ranks) -> Path:
    """What plain Keras makes."""
    folder = tmp_path_factory.mktemp("hub")
    found = ranks.functions(ranks.dense())
    np.savez(folder / "plain.npz", **{f"function{i}": v for i, v in enumerate(found)})
    if is_nightly():
        generated = ranks.generated(ranks.trained(ranks.build()))
        (folder / "plain.json").write_text(json.dumps(generated))
    return folder


@pytest.fixture(scope="module")
def job(folder) -> jobs.Checked:
    ranks, hub = "tests.tf.distributed.hub_ranks", ["keras_hub"]
    done = jobs.run(2, ranks, folder, seconds=_SECONDS, imports=hub)
    return jobs.Checked(done, folder / "checks")


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        "functions",
        pytest.param("generate", marks=NIGHT),
        "save",
        "error",
        pytest.param("lora", marks=NIGHT),
    ],
)
def test_two_processes(job, check):
    job.assert_held(check)


@pytest.mark.slow
def test_what_two_processes_saved_is_ordinary(keras_hub, ranks, job, folder):
    job.assert_held("save")
    task = keras_hub.models.CausalLM.from_preset(str(folder / "task"))
    backbone = ranks.build().backbone
    backbone.load_weights(folder / "backbone.weights.h5")
    parts = ranks.build()
    parts.load_weights(folder / "parts.weights.json")
    assert len(list(folder.glob("parts_*.weights.h5"))) > 1
    with np.load(folder / "trained.npz") as trained:
        for model in (task.backbone, backbone, parts.backbone):
            for weight, name in zip(model.weights, trained, strict=True):
                np.testing.assert_array_equal(weight, trained[name], err_msg=name)
    assert set(task.preprocessor.tokenizer.get_vocabulary()) == set(ranks.LETTERS)
    for saved in ("preprocessor", "tokenizer"):
        vocabulary = (folder / saved / "assets/tokenizer/vocabulary.json").read_text()
        assert json.loads(vocabulary) == ranks.LETTERS


@pytest.mark.slow
@NIGHT
def test_lora_weights_of_two_processes_load_in_plain_keras_hub(ranks, job, folder):
    job.assert_held("lora")
    backbone = ranks.build().backbone
    backbone.load_lora_weights(str(folder / "trained.lora.h5"))
    with np.load(folder / "lora.npz") as trained:
        loaded = {w.path: w for w in backbone.weights if "lora" in w.path}  # no biases
        assert len(loaded) == 4 and loaded.keys() <= set(trained)
        for name, weight in loaded.items():
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(weight), trained[name])
