"""The index of a checkpoint: checked by checksum and schema, and against its folder and tensors."""

import json
import math
import os

import numpy as np
import pytest

from tests.tf.checkpoint.ranks import part
from tfpar.spec import Mesh, TfparError, parse_spec
from tfpar.tf.checkpoint import Reader, commit, temporary_folder, write_part
from tfpar.tf.checkpoint.index import _checksum_of
from tfpar.tf.keras.checkpoint import _position
from tfpar.tf.keras.replay import Position

TENSORS = {"kernel": (np.ones((2, 2), np.float32), parse_spec("S(0)"))}
POSITION = {"epoch": 2, "batch": 3, "batches": 5, "step": 13}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    temporary = temporary_folder(str(tmp_path_factory.mktemp("run")), 13, "a")
    write_part(temporary, 0, part(TENSORS, Mesh.of([1]), 0))
    return commit(temporary, 1, POSITION)


@pytest.fixture
def index(path):
    """The content of the index, which is there again after the test."""
    file = os.path.join(path, "checkpoint.json")
    with open(file, encoding="utf-8") as opened:
        whole = opened.read()
    yield json.loads(whole)
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(whole)


def put(path, content, sealed=True):
    """Write an index, with the checksum of what it says now."""
    if sealed:
        content.pop("checksum", None)
        content["checksum"] = _checksum_of(content)
    with open(os.path.join(path, "checkpoint.json"), "w", encoding="utf-8") as file:
        json.dump(content, file)


def of_format_1(content):
    del content["checksum"]
    return content | {"format": 1}


def damaged(path, message):
    return pytest.raises(TfparError, match=f"{path} is damaged: checkpoint.json.*{message}")


def test_what_was_changed_is_told_by_the_checksum(path, index):
    for key, value in (
        ("step", 14),
        ("tfpar", "x"),
        ("tensors", []),
        ("files", {}),
        ("info", {**index["info"], "epoch": 3}),
        ("new", 1),
        ("checksum", "0" * 64),
        ("checksum", None),
    ):
        put(path, index | {key: value}, sealed=False)
        with damaged(path, "`checksum` is another one"):
            Reader(path)
    put(path, {key: value for key, value in index.items() if key != "checksum"}, sealed=False)
    with damaged(path, "`checksum` is missing"):
        Reader(path)
    put(path, index | {"format": 1}, sealed=False)  # which has none
    with damaged(path, "checksum is not known"):
        Reader(path)


def test_how_it_is_written_does_not_matter(path, index):
    put(path, dict(reversed(index.items())), sealed=False)
    assert _position(Reader(path)) == Position(**POSITION)


@pytest.mark.parametrize("old", [False, True], ids=["sealed", "of format 1"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"step": -13}, "step is -13; it must be a whole number, 0 or more"),
        ({"step": "13"}, "step is '13'; it must be a whole number"),
        ({"step": True}, "step is True; it must be a whole number"),
        ({"step": 2**64}, "step is 18446744073709551616; it must be a whole number, .* below 2"),
        ({"step": 14}, "is of step 14, and the folder's name of step 13"),
        ({"files": 1}, "files is 1; it must be an object"),
        ({"files": {"tensors.index": -1}}, r"files\['tensors.index'\] is -1; it must be"),
        (
            {"files": {"../tensors.index": 1}},
            r"files\['../tensors.index'\] is .* the name of a file: tensors",
        ),
        ({"info": []}, r"info is \[\]; it must be an object"),
        ({"tensors": "kernel"}, "tensors is 'kernel'; it must be a list"),
        ({"tensors": ["kernel", "bias"]}, "lists other tensors than there are"),
        ({"tfpar": None}, "tfpar is None; it must be a string"),
        ({"more": 1}, "more is not known; there are format, tfpar, step"),
        ({"format": 0}, "`format` is '0', not a version"),
        ({"format": "2"}, "`format` is '2', not a version"),
        ({"format": math.nan}, "`format` is 'nan', not a version"),
    ],
)
def test_what_is_no_index_is_refused_by_key(path, index, change, message, old):
    put(path, of_format_1(index) | change if old else index | change, sealed=not old)
    with damaged(path, message):
        Reader(path)


@pytest.mark.parametrize("key", ["format", "tfpar", "step", "info", "files", "tensors"])
def test_a_key_that_is_missing_is_named(path, index, key):
    del index[key]
    put(path, index)
    with damaged(path, "`format` is 'None'" if key == "format" else f"{key} is missing"):
        Reader(path)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "Expecting value"),
        (b"[1]", "it holds no object"),
        (b'{"step": 1, "step": 2}', "an object has the key 'step' twice"),
        (b'{"step": "\\ud800"}', "surrogates not allowed"),
        (b"\xff{}", "it is not UTF-8 text"),
        (b'{"step": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"info": ' + b"[" * 100_000, "recursion"),
    ],
    ids=["empty", "list", "twice", "surrogate", "bytes", "digits", "deep"],
)
def test_what_is_no_json_is_refused(path, index, text, message):
    with open(os.path.join(path, "checkpoint.json"), "wb") as file:
        file.write(text)
    with damaged(path, message):
        Reader(path)


def test_checkpoints_of_format_1_load(path, index):
    put(path, of_format_1(index), sealed=False)
    reader = Reader(path)
    assert reader.step == 13 and _position(reader) == Position(**POSITION)
    assert reader.read_whole("kernel").shape == (2, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"epoch": -1}, "info.epoch is -1; it must be a whole number, 0 or more"),
        ({"epoch": None}, "info.epoch is None"),
        ({"epoch": 1.0}, "info.epoch is 1.0"),
        ({"batch": True}, "info.batch is True"),
        ({"batch": 14}, "info.batch is 14; it must be at most the step, 13"),
        ({"batches": "5"}, "info.batches is '5'"),
        ({"step": 12}, "info.step is 12, and step is 13"),
    ],
)
def test_a_position_that_cannot_be_is_refused(path, index, change, message):
    put(path, index | {"info": {**POSITION, **change}})
    with damaged(path, message):
        _position(Reader(path))


@pytest.mark.parametrize("key", POSITION)
def test_a_position_that_is_missing_is_refused(path, index, key):
    del index["info"][key]
    put(path, index)
    with damaged(path, f"info.{key} is None"):
        _position(Reader(path))


def test_a_folder_that_was_renamed_is_as_good(path, tmp_path):
    best = tmp_path / "best"
    os.symlink(path, best)
    assert Reader(str(best)).step == 13
