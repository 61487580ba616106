"""Which sums over the batch stay within a microbatch, and what follows for its tasks."""

from __future__ import annotations

import functools

import pytest

from tests.planning.inter_op.stages.steps import machines
from tests.planning.problems import Captured
from tfpar.compile.local.chunks import split_batch
from tfpar.compile.local.local_graph import LocalProgram, build_local_program
from tfpar.compile.local.microbatch_statistics import shares_of, use_ghost_batches
from tfpar.compile.local.microbatches import run_microbatches
from tfpar.ir import Roles
from tfpar.propagation import Anchors, prepare, propagate
from tfpar.spec import Mesh, Replicate, Shard


@functools.cache
def cut(name: str, ranks: int = 2, microbatches: int = 2) -> tuple[LocalProgram, Roles]:
    """The program of a saved step on a mesh with an axis of microbatches, and its ops' roles."""
    problem = Captured.saved(name).problem([ranks], machines())
    graph = problem.step.graph
    anchors = Anchors(
        {v.name: (Replicate(),) for v in problem.step.variables},
        [(Shard(0) if t in problem.step.batched else Replicate(),) for t in graph.inputs],
        outputs=[(Replicate(),)] * len(graph.outputs),
    )
    whole = propagate(prepare(graph), Mesh.of({"data": ranks}), anchors)
    laid = split_batch(whole, anchors, problem.step.batched, microbatches)
    return build_local_program(laid), Roles.of(whole.graph)


@pytest.mark.slow
def test_a_residual_network_runs_in_one_round():
    assert len(run_microbatches(cut("resnet")[0]).graphs()) > 20
    program, roles = cut.__wrapped__("resnet")
    layers = sum(v.name.endswith("moving_mean") for v in program.graph.variables)
    found = use_ghost_batches(program, roles)
    forward = [op for op in found.sums if not op.name.startswith("gradient_tape/")]
    assert layers and len(forward) == 2 * layers, "mean and variance of each layer"
    main, body = run_microbatches(program).graphs()
    over_ranks = [op for op in body.ops if op.type == "AllReduce"]
    assert {op.attrs["axes"] for op in over_ranks} == {(0,)}
    assert len(over_ranks) == 4 * layers, "and the sums of their gradients"
    assert any(op.type == "AssignVariableOp" for op in main.ops)
    assert not any(op.type.startswith("Assign") for op in body.ops), "averages move once a step"


def test_tasks_hold_activations_of_one_microbatch():
    program, roles = cut.__wrapped__("resnet")
    size = program.input_shapes[0][0] // 4
    use_ghost_batches(program, roles)
    body = run_microbatches(program).graphs()[1]
    images = [t for op in body.ops for t in op.outputs if len(t.shape or ()) == 4]
    spatial = [t for t in images if t.shape[1] == t.shape[2] > 3]
    assert spatial and {t.shape[0] for t in spatial} <= {1, size}


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_what_normalises_no_batch_is_as_it_was(name):
    program, roles = cut.__wrapped__(name)
    before = str(program)
    assert not use_ghost_batches(program, roles).sums
    assert str(program) == before


@pytest.mark.parametrize(
    ("ranks", "microbatches", "shares"),
    [(2, 2, [0.5] * 4), (1, 3, [3 / 8, 3 / 8, 2 / 8]), (2, 3, [0.5, 0.5, 0.0] * 2)],
)
def test_each_microbatch_has_its_share_of_samples(ranks, microbatches, shares):
    assert shares_of(cut("resnet", ranks, microbatches)[0]) == shares
