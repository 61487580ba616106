"""What a rank may do that the others do not serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfpar.spec import TfparError
from tfpar.tf.distributed.lead import Lead


def test_what_needs_the_others_is_refused_where_none_serves():
    lead = Lead(SimpleNamespace(rank=0, size=2))  # type: ignore[arg-type]
    needs: list[Any] = [lead.check_served, lambda: lead.ask(1, "_assembled")]
    for need in needs:
        with pytest.raises(TfparError, match=r"^Mine.on_batch_end runs .* tap.on_first_rank"):
            with lead.alone("Mine.on_batch_end"):
                need()
        need()
    with pytest.raises(TfparError, match=r"takes a test step, .* tap.on_every_rank"):
        with lead.alone("Mine.on_batch_end"):
            lead.check_together("test step")
    lead.check_together("test step")
