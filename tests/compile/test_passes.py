"""The compiler without TensorFlow: a step written by hand, and what every pass makes of it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.compile.steps import mlp_step
from tests.ir.text.same import assert_same
from tfpar.compile import CompileOptions, compile_step, prepare_step, recompute_step, simplify_step
from tfpar.compile.local.reshard import COLLECTIVE_TYPES
from tfpar.compile.simplify import SIMPLIFICATIONS
from tfpar.ir import parse_graph, parse_step
from tfpar.propagation import Anchors
from tfpar.spec import Mesh, Replicate, Shard

MESH = Mesh.of({"data": 2, "model": 2})
BATCHED = (Shard(0), Replicate())
OPTIONS = CompileOptions(MESH, Anchors(inputs=[BATCHED]))


def seen(**changes) -> dict[str, str]:
    """What an observer sees after each pass, in order."""
    found: dict[str, str] = {}

    def observe(name, text):
        assert name not in found
        found[name] = text()

    step = mlp_step()
    simplify_step(step, observe)
    recompute_step(step, changes.pop("recompute", ()), observe)
    prepared = prepare_step(step)  # arguments are those of what is prepared
    batched = step.arguments if changes.get("chunks", 1) > 1 else ()
    options = dataclasses.replace(OPTIONS, batched=batched, **changes)
    compile_step(step, options, prepared, observe)
    return found


def test_every_pass_can_be_seen_in_its_order():
    assert list(seen()) == [
        "captured",
        *(each.name for each in SIMPLIFICATIONS),
        "propagate",
        "rewrite",
        "early collectives",
        "pack collectives",
    ]


@pytest.mark.parametrize("changes", [{}, {"chunks": 2}, {"compression": "bfloat16"}])
def test_every_graph_reads_back(changes):
    for name, text in seen(**changes).items():
        read = parse_graph(text)
        assert_same(parse_graph(str(read)), read)
        assert read.ops, name


def test_a_pass_shows_what_it_did():
    graphs = seen()
    types = {name: [op.type for op in parse_graph(text).ops] for name, text in graphs.items()}
    assert "IdentityN" in types["inline calls"] and "IdentityN" not in types["trim"]
    assert "Shape" in types["trim"] and "Shape" not in types["fold constants"]
    assert not set(COLLECTIVE_TYPES) & set(types["propagate"])
    assert types["rewrite"].count("AllReduce") > types["pack collectives"].count("AllReduce") == 1
    assert "S(0),R" in graphs["propagate"]


def test_chunks_are_in_the_program():
    assert "%fc0/MatMul/chunk1: " in seen(chunks=2)["rewrite"] and "chunk" not in seen()["rewrite"]


def test_gradients_are_marked_until_the_program_is_written():
    graphs = seen()
    for name in ("captured", "trim", "split block sums"):
        assert len(parse_step(graphs[name]).gradients) == 2, name


def test_collectives_keep_their_order_if_they_are_not_to_start_early():
    assert "early collectives" not in seen(early_collectives=False)


def test_buckets_are_as_large_as_asked():
    packed = parse_graph(seen(bucket_bytes=1)["pack collectives"])
    reduced = [op for op in packed.ops if op.type == "AllReduce"]
    assert len(reduced) == 3 and all(len(op.inputs) == 1 for op in reduced)


def test_a_step_that_was_not_prepared_is():
    step = mlp_step()
    compiled = compile_step(step, OPTIONS)
    assert compiled.local.mesh == MESH
    assert compiled.partitioned.graph is step.graph
