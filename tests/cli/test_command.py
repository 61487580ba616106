"""The command `tfpar` itself: its options, what it loads, and what it says beside its work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tfpar as tap
from tests.time_limits import time_limit
from tfpar.cli.main import main

ROOT = Path(__file__).parents[2]


def test_version_and_usage(capsys):
    for arguments, code in ((["--version"], 0), (["--help"], 0), (["plan"], 2), ([], 2)):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == code
    out, err = capsys.readouterr()
    assert out.startswith(f"tfpar {tap.__version__}\n") and "--mesh" in err


def test_help_needs_no_tensorflow():
    code = (
        "import sys; from tfpar.cli.main import main\n"
        "try: main(['plan', '--help'])\n"
        "except SystemExit: assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_the_process_says_nothing_but_the_plan(folder):
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-m", "tfpar", "plan", "train.py:both", "--mesh", "2x8"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=time_limit(120),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Plan for 'mlp' on mesh ")
