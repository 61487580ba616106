"""Presets of KerasHub where ranks are processes: tuned as in plain Keras, saved, read by shares."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.tf.distributed import jobs
from tests.tf.distributed.test_transports import skip_without

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

_SECONDS = 240.0
HUB = ("keras_hub",)


@pytest.fixture(scope="module")
def presets():
    """Imported late: KerasHub takes long, and the quick part of the suite does without."""
    pytest.importorskip("keras_hub")
    pytest.importorskip("sentencepiece")
    return pytest.importorskip("tests.presets")


@pytest.fixture(scope="module")
def folder(presets, tmp_path_factory) -> Path:
    """A preset in several files of weights, and what plain Keras makes of it."""
    folder = tmp_path_factory.mktemp("presets")
    presets.save_gemma(folder / "gemma", max_shard_size=1e-6)
    task = presets.with_lora(folder / "gemma")
    told = {"history": presets.tuned(task), "generated": presets.generated(task)}
    (folder / "plain.json").write_text(json.dumps(told))
    np.save(folder / "plain.npy", presets.logits(task))
    return folder


@pytest.fixture(
    scope="module", params=["horovod", pytest.param("tensorflow", marks=pytest.mark.nightly)]
)
def job(folder, request) -> jobs.Checked:
    skip_without(request.param)
    arguments = ("tests.tf.distributed.preset_ranks", folder, request.param)
    done = jobs.run(2, *arguments, seconds=_SECONDS, backend=request.param, imports=HUB)
    return jobs.Checked(done, folder / f"checks-{request.param}")


@pytest.mark.parametrize("check", ["train", "save", "generate", "load"])
def test_two_processes(job, check):
    job.assert_held(check)


def test_plain_keras_loads_what_two_processes_saved(presets, folder):
    saved = sorted(path for path in folder.glob("tuned-*") if path.is_dir())
    if not saved:
        pytest.skip("no job has run")
    tuned = np.load(folder / "plain.npy")
    for preset, loaded in zip(saved, presets.plain_logits(*saved), strict=True):
        np.testing.assert_allclose(loaded, np.load(preset.with_suffix(".npy")), atol=1e-5)
        np.testing.assert_allclose(loaded, tuned, atol=1e-4)


LARGEST_MIB = 32  # its table of embeddings; all of it has four times as much


@pytest.fixture(scope="module")
def sizes(presets, tmp_path_factory) -> tuple[Path, Path]:
    """A preset whose memory can be told from that of Python, and one like it of no size."""
    small, large = (tmp_path_factory.mktemp(name) for name in ("small", "large"))
    presets.save_gemma(small)
    presets.save_gemma(large, scale=64, max_shard_size=0.035)
    assert len(list(large.glob("model_*.weights.h5"))) == 4
    return small, large


@pytest.mark.nightly
def test_a_preset_is_read_once_its_weights_are_placed(sizes):
    """Two ranks in one process store all of it; until they do, next to nothing is read."""
    module = "tests.tf.distributed.preset_memory"
    (peak,) = jobs.printed(jobs.alone(module, *sizes, seconds=_SECONDS, imports=HUB))
    assert peak["plain"] > 3 * LARGEST_MIB, peak  # so this is seen where it happens
    assert peak["read"] < LARGEST_MIB, peak
    assert peak["trained"] < peak["stored"] + LARGEST_MIB, peak


@pytest.mark.parametrize(
    "backend", [pytest.param("horovod", marks=pytest.mark.nightly), "tensorflow"]
)
def test_each_process_reads_its_share_of_a_preset(sizes, backend):
    skip_without(backend)
    arguments = ("tests.tf.distributed.preset_memory", *sizes)
    done = jobs.run(2, *arguments, seconds=_SECONDS, backend=backend, imports=HUB)
    peaks = jobs.printed(done)
    assert len(peaks) == 2, peaks
    for peak in peaks:
        assert 2 * LARGEST_MIB < peak["stored"] < 2.5 * LARGEST_MIB, peak
        assert peak["read"] < LARGEST_MIB, peak
        assert peak["trained"] < peak["stored"] + LARGEST_MIB, peak
