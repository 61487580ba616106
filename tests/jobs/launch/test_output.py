"""Lines of ranks: cut, prefixed and kept."""

from __future__ import annotations

import pytest

from tests.jobs.launch.programs import program, run
from tfpar.jobs.launch.output import LineSplitter


@pytest.mark.parametrize(
    "chunks, lines",
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\n", b"\nc"], ["ab", "", "c"]),
        ([b"1%\r2%\r", b"3%\n"], ["1%", "2%", "3%"]),
        ([b"a\r\nb\r", b"\nc\n"], ["a", "b", "c"]),
        ([b"\xc3", b"\xa9\n\xff\n"], ["é", "\ufffd"]),
        ([b"x" * 70000, b"y\n"], ["x" * 70000, "y"]),
        ([b""], []),
    ],
)
def test_streams_are_cut_into_lines(chunks, lines):
    cut = LineSplitter()
    assert [line for chunk in chunks for line in cut.feed(chunk)] + cut.end() == lines


def test_each_line_has_its_rank_in_front_and_keeps_its_stream(capfd, tmp_path):
    command = program(
        tmp_path,
        """
        print("one\\ntwo", rank)
        print("wrong", rank, end="", file=sys.stderr)
        """,
    )
    assert run(command, 2, output_dir=str(tmp_path / "out" / "deep")) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] one", "[0] two 0", "[1] one", "[1] two 1"]
    assert sorted(err.splitlines()) == ["[0] wrong 0", "[1] wrong 1"]
    files = {path.name: path.read_text() for path in (tmp_path / "out" / "deep").iterdir()}
    assert files == {
        "rank.0.out": "one\ntwo 0\n",
        "rank.0.err": "wrong 0",
        "rank.1.out": "one\ntwo 1\n",
        "rank.1.err": "wrong 1",
    }


def test_what_tensorflow_writes_at_its_start_explains_no_failure(capfd, tmp_path):
    start_up = [
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1795275243.523407    8449 port.cc:153] oneDNN custom operations are on.",
        "2026-01-02 03:04:05.678901: I tensorflow/core/util/port.cc:153] oneDNN",
        "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow",
    ]
    own = ["E0000 00:00:1795275243.523407    8449 cuda_dnn.cc:8] none", "last words"]
    text = "\n".join(own[:1] + start_up + own[1:])
    command = program(tmp_path, f"print({text!r}, file=sys.stderr)\nsys.exit(3)")
    assert run(command, 1) == 3
    shown, _, told = capfd.readouterr().err.partition("The last lines of rank 0's stderr:\n")
    assert told.splitlines() == [f"  {line}" for line in own]
    assert all(line in shown for line in start_up)
