"""What is refused, what is visible when, and what is deleted."""

import json
import os

import numpy as np
import pytest

from tests.tf.checkpoint.ranks import part, save
from tfpar.spec import Mesh, TfparError, parse_spec
from tfpar.tf.checkpoint import (
    Reader,
    checkpoints,
    commit,
    latest,
    prune,
    temporary_folder,
    write_part,
)

TWO = Mesh.of([2])
ROWS, COLUMNS, WHOLE = map(parse_spec, ["S(0)", "S(1)", "R"])
VALUE = np.arange(24, dtype=np.float32).reshape(4, 6)
TENSORS = {"kernel": (VALUE, ROWS), "bias": (VALUE[0], WHOLE)}


def names(folder):
    return sorted(os.listdir(folder))


# --- commit --------------------------------------------------------------------------


def test_nothing_is_visible_before_the_commit(tmp_path):
    temporary = temporary_folder(str(tmp_path), 7, "a")
    for rank in range(2):
        write_part(temporary, rank, part(TENSORS, TWO, rank))
        assert latest(str(tmp_path)) is None
        with pytest.raises(TfparError, match="not a complete checkpoint"):
            Reader(temporary)
    path = commit(temporary, 2, {})
    assert latest(str(tmp_path)) == path == str(tmp_path / "step-00000007")
    assert names(tmp_path) == ["step-00000007"]


def test_a_rank_that_has_not_written_is_named(tmp_path):
    temporary = temporary_folder(str(tmp_path), 0, "a")
    write_part(temporary, 0, part(TENSORS, TWO, 0))
    with pytest.raises(TfparError, match="lacks the part of rank 1.*all of them share"):
        commit(temporary, 2, {})
    write_part(temporary, 1, part(TENSORS, TWO, 1))
    assert Reader(commit(temporary, 2, {})).names == ["bias", "kernel"]


@pytest.mark.parametrize(
    ("second", "mesh", "rank", "message"),
    [
        ({"kernel": (VALUE, ROWS)}, Mesh.of([1]), 0, "'kernel' in part-.*do not make up one"),
        ({"kernel": (VALUE, COLUMNS)}, TWO, 1, "'kernel' in part-.*do not make up one tensor"),
        ({"kernel": (VALUE, ROWS)}, Mesh.of([3]), 2, "'kernel' in part-.*do not make up one"),
        ({}, TWO, 1, "'kernel' in part-00000-000 do not make up one tensor float32"),
        ({"kernel": (VALUE[:3], ROWS)}, TWO, 1, r"different.*float32\[3, 6\] and float32\[4, 6\]"),
        ({"kernel": (VALUE.astype("i4"), ROWS)}, TWO, 1, "different.* float32.* and int32"),
    ],
    ids=["whole", "columns", "overlap", "gap", "shape", "dtype"],
)
def test_ranks_that_do_not_fit_together_are_refused(tmp_path, second, mesh, rank, message):
    temporary = temporary_folder(str(tmp_path), 0, "a")
    write_part(temporary, 0, part({"kernel": (VALUE, ROWS)}, TWO, 0))
    write_part(temporary, 1, part(second, mesh, rank))
    with pytest.raises(TfparError, match=message):
        commit(temporary, 2, {})
    assert latest(str(tmp_path)) is None


@pytest.mark.parametrize("left_out", ["bias", "kernel"])
def test_a_tensor_that_a_rank_left_out_is_missed(tmp_path, left_out):
    temporary = temporary_folder(str(tmp_path), 0, "a")
    for rank in range(2):
        saved = part(TENSORS, TWO, rank)
        writes = any(s.name == left_out and s.boxes for s in saved)
        write_part(temporary, rank, [s for s in saved if not writes or s.name != left_out])
        if writes:
            left_out = ""  # the other one does as it should
    with pytest.raises(TfparError, match="do not make up one tensor float32"):
        commit(temporary, 2, {})


def test_an_empty_checkpoint_is_refused(tmp_path):
    with pytest.raises(TfparError, match="nothing is saved"):
        save(tmp_path, {}, TWO)


def test_a_part_that_cannot_be_written_names_rank_and_folder(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(TfparError, match="Rank 1 could not write.*step-00000000.tmp-a"):
        write_part(temporary_folder(str(tmp_path / "run"), 0, "a"), 1, part(TENSORS, TWO, 1))


def test_folder_names_are_checked(tmp_path):
    with pytest.raises(TfparError, match="at least 0; got -1"):
        temporary_folder(str(tmp_path), -1, "a")
    with pytest.raises(TfparError, match="letters and digits; got '../b'"):
        temporary_folder(str(tmp_path), 0, "../b")
    with pytest.raises(TfparError, match="not a temporary checkpoint folder"):
        write_part(str(tmp_path / "mine"), 0, [])


# --- folders -------------------------------------------------------------------------


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path):
    save(tmp_path, TENSORS, TWO, step=5)
    for version in (1, 2):
        path = save(tmp_path, TENSORS, TWO, step=5, version=version)
        assert checkpoints(str(tmp_path)) == [path] == [str(tmp_path / f"step-00000005.{version}")]
        assert Reader(path).info == {"version": version}
    assert names(tmp_path) == ["step-00000005.2"]


def test_latest_is_the_greatest_step(tmp_path):
    assert latest(str(tmp_path / "none")) is None
    for step in (5, 123456789, 40):
        save(tmp_path, TENSORS, TWO, step=step)
    os.mkdir(tmp_path / "step-00000900")  # emptied by hand
    (tmp_path / "notes.txt").write_text("mine")
    assert [Reader(p).step for p in checkpoints(str(tmp_path))] == [5, 40, 123456789]
    assert latest(str(tmp_path)) == str(tmp_path / "step-123456789")


def test_prune_keeps_the_last_ones_and_what_is_not_a_checkpoint(tmp_path):
    for step in range(5):
        save(tmp_path, TENSORS, TWO, step=step)
    (tmp_path / "notes.txt").write_text("mine")
    prune(str(tmp_path), keep=2)
    assert names(tmp_path) == ["notes.txt", "step-00000003", "step-00000004"]
    with pytest.raises(TfparError, match="at least 1"):
        prune(str(tmp_path), keep=0)


def test_a_commit_sweeps_up_after_dead_runs_only(tmp_path):
    folder = str(tmp_path)
    for step, token in [(1, "dead"), (9, "dead"), (2, "mine"), (8, "mine")]:
        write_part(temporary_folder(folder, step, token), 0, part(TENSORS, TWO, 0))
    os.mkdir(tmp_path / "step-00000000.tmp-deleted")
    save(tmp_path, TENSORS, TWO, step=4, token="mine")
    assert names(tmp_path) == ["step-00000004", "step-00000008.tmp-mine"]


def test_what_a_failed_commit_left_does_not_get_into_the_next(tmp_path):
    temporary = temporary_folder(str(tmp_path), 0, "a")
    os.makedirs(temporary)
    with open(os.path.join(temporary, "tensors.data-00003-of-00007"), "w") as file:
        file.write("old")
    path = save(tmp_path, TENSORS, TWO, token="a")
    assert names(path) == [
        "checkpoint.json",
        "tensors.data-00000-of-00002",
        "tensors.data-00001-of-00002",
        "tensors.index",
    ]


# --- reader --------------------------------------------------------------------------


def test_a_missing_tensor_is_named(tmp_path):
    reader = Reader(save(tmp_path, TENSORS, TWO))
    for read in (
        lambda: reader.read("gamma", WHOLE, TWO, 0),
        lambda: reader.read_whole("gamma"),
        lambda: reader.shape("gamma"),
    ):
        with pytest.raises(TfparError, match="has no 'gamma'.*bias, kernel"):
            read()


def test_what_is_not_there_or_incomplete_says_which_is_last(tmp_path):
    path = save(tmp_path, TENSORS, TWO, step=3)
    with pytest.raises(TfparError, match="There is no checkpoint.*last complete one is .*03"):
        Reader(str(tmp_path / "step-00000004"))
    with pytest.raises(TfparError, match="folder of checkpoints.*last complete one is .*03"):
        Reader(str(tmp_path))
    os.mkdir(tmp_path / "step-00000009")
    with pytest.raises(TfparError, match="not a complete checkpoint.*last complete one is .*03"):
        Reader(str(tmp_path / "step-00000009"))
    os.remove(os.path.join(path, "checkpoint.json"))
    with pytest.raises(TfparError, match="There is no other in"):
        Reader(path)


def data_file(path):
    return next(os.path.join(path, n) for n in names(path) if ".data-" in n)


def damaged(path):
    return pytest.raises(TfparError, match=f"{path} is damaged.*last complete one is .*step-000000")


def test_damaged_files_are_found(tmp_path):
    save(tmp_path, TENSORS, TWO, step=1)

    path = save(tmp_path, TENSORS, TWO, step=2)
    os.truncate(data_file(path), 8)
    with damaged(path):
        Reader(path)

    path = save(tmp_path, TENSORS, TWO, step=3)
    os.remove(data_file(path))
    with damaged(path):
        Reader(path)

    path = save(tmp_path, TENSORS, TWO, step=4)
    with open(data_file(path), "r+b") as file:
        file.write(b"\xff\xff\xff")
    with damaged(path):
        Reader(path).read_whole("kernel")

    path = save(tmp_path, TENSORS, TWO, step=5)
    with open(os.path.join(path, "tensors.index"), "r+b") as file:
        file.write(b"\xff" * os.path.getsize(os.path.join(path, "tensors.index")))
    with damaged(path):
        Reader(path)

    path = save(tmp_path, TENSORS, TWO, step=6)
    with open(os.path.join(path, "checkpoint.json"), "w") as file:
        file.write("{")
    with damaged(path):
        Reader(path)


def test_a_checkpoint_of_a_newer_version_says_so(tmp_path):
    path = save(tmp_path, TENSORS, TWO)
    description = os.path.join(path, "checkpoint.json")
    with open(description) as file:
        content = json.load(file)
    with open(description, "w") as file:
        json.dump({**content, "format": 99}, file)
    with pytest.raises(TfparError, match="has format 99.*reads up to 2.*Upgrade"):
        Reader(path)
