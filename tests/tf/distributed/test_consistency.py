"""In what two ranks differ, in the words of the error that both raise."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import tfpar as tap
from tests.tf.runtime.test_agreement import Talk
from tests.tf.runtime.test_agreement import World as Talking
from tfpar.options import Options
from tfpar.settings import Settings
from tfpar.spec import RuntimeMismatchError
from tfpar.tf.distributed import world
from tfpar.tf.distributed.consistency import agree_on_model, agree_on_options


class World(Talking):
    agree = world.World.agree


def said(check: Callable[..., None], told: Sequence[tuple[Any, ...]]) -> str:
    """What every rank is told where each checks its own; nothing if they agree."""
    talk, errors = Talk(len(told)), [""] * len(told)

    def run(rank: int) -> None:
        try:
            check(World(rank, talk), *told[rank])
        except RuntimeMismatchError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(told))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*errors}) == 1
    return errors[0]


FIRST = {"net/fc1/kernel": "float32[8, 64]", "net/fc1/bias": "float32[64]"}
WIDER = {"net/fc1/kernel": "float32[8, 65]", "net/fc1/bias": "float32[65]"}
HEAD = {"net/head/kernel": "float32[64, 2]"}
BATCH = ["float32[8, 6]"]


@pytest.mark.parametrize(
    "weights, batch, wanted",
    [
        (
            {**WIDER, "net/head/kernel": "float32[65, 2]"},
            BATCH,
            "Ranks differ in the train step: in 'net/fc1', kernel is float32[8, 64] on rank 0 and "
            "float32[8, 65] on rank 2; bias is float32[64] on rank 0 and float32[65] on rank "
            "2 (and 1 more elsewhere). Every rank has to build the same model",
        ),
        (FIRST, BATCH, "in 'net/head', kernel is float32[64, 2] on rank 0 and missing on rank 2."),
        ({**HEAD, **FIRST}, BATCH, "the same weights in another order on rank 2 than on rank 0"),
        (
            {**FIRST, **HEAD},
            ["float32[7, 6]"],
            "it gets float32[8, 6] on rank 0 and float32[7, 6] on rank 2. Every rank has to get",
        ),
    ],
)
def test_the_layer_or_the_input_is_named_with_both_shapes(weights, batch, wanted):
    alike = ("train step", {**FIRST, **HEAD}, BATCH)
    assert wanted in said(agree_on_model, [alike, alike, ("train step", weights, batch)])


def test_weights_that_one_rank_freezes_are_named():
    weights = {**FIRST, **HEAD}
    alike = ("train step", weights, BATCH, [*weights])
    frozen = ("train step", HEAD | FIRST, BATCH, [*HEAD])
    name = next(iter(FIRST))
    more = f" (and {len(FIRST) - 1} more)" if len(FIRST) > 1 else ""
    assert f"{name!r}{more} is trained on rank 0 and not on rank 2. Set `trainable`" in said(
        agree_on_model, [alike, alike, frozen]
    )


def test_ranks_that_agree_send_a_checksum_only():
    talk = Talk(1)
    agree_on_model(World(0, talk), "train step", FIRST, BATCH)
    assert re.fullmatch("[0-9a-f]{64}", talk.said[0])


def asked(mesh: Any = (4,), constraints: Any = None, **options: Any) -> tuple[dict[str, str]]:
    return (Settings.of(list(mesh), constraints, Options(**options)).described(),)


@pytest.mark.parametrize(
    "other, wanted",
    [
        (asked(compression="fp16"), "compression=None on rank 0 and 'float16' on rank 1. Give"),
        (asked((2, 2)), "mesh="),
        (asked(planner=None), "planner='auto' on rank 0 and None on rank 1. Give every rank the"),
        (
            asked(constraints=tap.shard("fc/kernel", 1, "model")),
            "constraints=[] on rank 0 and [shard('fc/kernel', dim=1, axis='model')] on rank 1",
        ),
        (asked(cluster="dgx-a100", strict=True), "cluster=None on rank 0 and 'dgx-a100' on rank 1"),
        (asked(cluster={"name": "ours"}), "None on rank 0 and a mapping (checksum "),
    ],
)
def test_the_option_is_named_with_both_values(other, wanted):
    assert wanted in said(agree_on_options, [asked(), other])


def test_options_that_concern_one_rank_alone_may_differ(tmp_path):
    other = asked(verbose=0, plan_cache=str(tmp_path), search_seconds=5.0)
    assert not said(agree_on_options, [asked(), other])
