"""Every registered rule has been proved by running: nothing in the registry is an opinion.

Runs last among the soundness tests and looks at what they ran. It needs all of them in
the same session; a partial run skips it.
"""

import pathlib

import pytest

from tests import partitioned
from tfpar.rules import registered_types

# No CPU kernel, or no way to make one in a traced function.
NOT_RUNNABLE: frozenset[str] = frozenset()


@pytest.mark.slow  # it needs all of them, the slow ones too
def test_every_rule_ran_against_its_op(request):
    here = pathlib.Path(__file__)
    files = {p.name for p in here.parent.glob("test_soundness_*.py")}
    collected = {pathlib.Path(item.fspath).name for item in request.session.items}
    if not files <= collected:
        pytest.skip("needs all soundness tests in one session")
    missing = set(registered_types()) - partitioned.SEEN_TYPES - NOT_RUNNABLE
    assert not missing, f"rules that no soundness test ran: {sorted(missing)}"
    never_split = set(registered_types()) - partitioned.SPLIT_TYPES - NOT_RUNNABLE
    assert len(never_split) < len(registered_types()) // 4, sorted(never_split)
