"""Preloaded processes are what Python's own would be to who starts them."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests import preloaded
from tests.jobs.launch.programs import variables

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

LIMIT_S = 120.0


def done(command: tuple[str, ...], **options) -> subprocess.CompletedProcess[str]:
    options = {"env": variables(), "capture_output": True, "text": True, **options}
    return subprocess.run(command, timeout=LIMIT_S, **options)


def test_they_get_arguments_streams_folder_and_environment(tmp_path):
    code = (
        "import os, sys; print(sys.argv, os.getcwd(), sys.stdin.read(), os.environ['MINE']); "
        "print(__name__, os.getpgrp() == os.getpid(), file=sys.stderr); sys.exit(3)"
    )
    environ = {**variables(), "MINE": "é"}
    ran = done(preloaded.python("-c", code, "a b"), cwd=tmp_path, env=environ, input="said")
    assert ran.stdout == f"['-c', 'a b'] {tmp_path} said é\n"
    assert (ran.stderr, ran.returncode) == ("__main__ True\n", 3)


def test_they_run_scripts_and_modules(tmp_path):
    (tmp_path / "beside.py").write_text("said = 'beside'")
    script = tmp_path / "script.py"
    script.write_text("import beside, sys; print(beside.said, __name__, sys.argv)")
    expected = f"beside __main__ ['{script}', 'x']\n"
    assert done(preloaded.python(script, "x")).stdout == expected
    assert done(preloaded.python("-m", "script", "x"), cwd=tmp_path).stdout == expected
    assert "usage" in done((str(preloaded.executable(tmp_path)), "-m", "tfpar", "-h")).stdout


@pytest.mark.parametrize(
    "code, ended, said",
    [
        ("raise ValueError('mine')", 1, "ValueError: mine\n"),
        ("import sys; sys.exit('mine')", 1, "mine\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import atexit; atexit.register(print, 'late', flush=True)", 0, ""),
    ],
)
def test_they_end_as_their_program_does(code, ended, said):
    ran = done(preloaded.python("-c", code))
    assert ran.returncode == ended and ran.stderr.endswith(said)
    assert ran.stdout == ("late\n" if "late" in code else "")


def test_signals_reach_them_and_without_their_command_they_end():
    code = (
        "import signal, subprocess, time; subprocess.Popen(['sleep', '600']); "
        "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True)); "
        "print('on', flush=True); time.sleep(600)"
    )
    command = preloaded.python("-c", code)
    with subprocess.Popen(command, env=variables(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "on\n"
            process.terminate()
            assert process.stdout.readline() == "told\n"
        finally:
            process.kill()
        assert process.stdout.read() == ""  # nobody holds it any longer, what it started neither


def test_ranks_draw_and_hash_as_interpreters_of_their_own_do():
    code = "import numpy, random; print(hash('a'), numpy.random.rand(), random.random())"
    command = preloaded.ranks("-c", code)
    told = [done(command, env={**variables(), "TFPAR_RANK": rank}).stdout.split() for rank in "012"]
    hashes, *draws = zip(*told, strict=True)
    assert hashes[0] == hashes[2] != hashes[1]
    assert all(len(set(drawn)) == 3 for drawn in draws)


def test_where_python_starts_otherwise_it_starts_anew():
    code = "import sys; print('tensorflow' in sys.modules)"
    command = preloaded.python("-c", code)
    assert done(command).stdout == "True\n"
    for name in ("PYTHONHASHSEED", "TF_ENABLE_ONEDNN_OPTS"):
        assert done(command, env={**variables(), name: "1"}).stdout == "False\n"


def test_they_end_with_who_has_started_their_server(tmp_path):
    """Even where that is killed."""
    script = tmp_path / "tester.py"
    script.write_text(
        "import subprocess\n"
        "from tests import preloaded\n"
        "from tests.jobs.launch.programs import variables\n"
        "code = 'import time; print(1, flush=True); time.sleep(600)'\n"
        "subprocess.run(preloaded.python('-c', code), env=variables())\n"
    )
    command = preloaded.python(script)
    with subprocess.Popen(command, env=variables(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "1\n"
        finally:
            process.kill()
        assert process.stdout.read() == ""
