"""Whatever a file says and whatever a call is given, it works or it is an error of tfpar."""

from __future__ import annotations

import inspect
import re
import subprocess

import pytest

import tfpar as tap
from scripts.fuzzing import calls
from scripts.fuzzing.kinds import KINDS
from tests import preloaded
from tests.cases import amounts
from tests.time_limits import time_limit

SLOW = ("calls", "command")
"""Those that build models."""

_SECONDS_A_CASE = 0.5


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in SLOW)) for k in KINDS]
)
@pytest.mark.parametrize("cases", amounts(40, 2000))
def test_mutated_files_and_odd_options_work_or_are_refused(kind, cases):
    command = preloaded.python("-m", "scripts.fuzz", kind, "--cases", cases)
    limit = time_limit(60 + _SECONDS_A_CASE * cases)
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind}: " in done.stdout and "0 faults" in done.stdout


def test_every_public_call_is_tried():
    tried = set(re.findall(r"\btap\.(\w+)", inspect.getsource(calls)))
    assert set(tap.__all__) - tried == set(calls.NOT_TRIED)
