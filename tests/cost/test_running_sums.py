"""Sums over microbatches are priced as they are emitted."""

import dataclasses

import pytest

from tests.planning.inter_op.stages.steps import DEVICE, Staged, machines
from tfpar.compile.local import TASK
from tfpar.cost import evaluate, microbatched_cost
from tfpar.cost.sub_batch_cost import OneMicrobatch
from tfpar.cost.sub_batch_pricing import adding_seconds
from tfpar.ir import itemsize
from tfpar.pipeline import EXACT, generate

TASK_OF = {"F": "F", "I": "B", "W": "B", "U": "B"}


def emitted(program):
    """What the first task of each kind of a program adds to sums: their bytes, and their number."""
    found = {}
    for call in (op for op in program.graph.ops if op.type == TASK):
        outputs = program.graph.functions[call.attrs["body"]].outputs
        sums = [outputs[made] for _, made in call.attrs["carried"]]
        num_bytes = sum(t.num_elements * itemsize(t.dtype) for t in sums)
        found.setdefault(call.attrs["task"][1], (num_bytes, len(sums)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name, model", [("gpt", 1), ("gpt", 2), ("t5_3_layers", 1)])
def test_what_microbatches_add_up_is_priced_as_it_is_emitted(name, model):
    staged = Staged.of(name, 2, model)
    step = staged.cut(4)
    pricer = OneMicrobatch(step.laid.mesh, machines().part([0, 1]), step.roles)
    priced = {}
    for communication in step.laid.communications(step.roles.wire_dtypes):
        at = step.stage[communication.op], TASK_OF[step.kinds[communication.op]]
        if communication.op in step.runs.each:
            seconds = adding_seconds(communication, pricer, EXACT)
            priced[at] = priced.get(at, 0.0) + seconds
    for stage, program in enumerate(staged.programs(4, generate("1f1b", 2, 4))):
        for kind, (num_bytes, count) in emitted(program).items():
            expected = count * DEVICE.launch_s + 3 * num_bytes / DEVICE.memory_bandwidth
            assert priced.get((stage, kind), 0.0) == pytest.approx(expected, rel=1e-9)
        assert emitted(program)["B"][1] > 5


def test_accumulation_pays_for_it_once_a_microbatch():
    staged = Staged.of("gpt", 1)
    step, cluster, cut = staged.step, machines().part([0, 1]), staged.cut(4)
    whole = evaluate(step.whole, cluster, step.roles, step.problem.step.state_ratio)
    found = microbatched_cost(whole, cut.laid, step.whole.mesh, cluster, step.roles)
    pricer = OneMicrobatch(cut.laid.mesh, cluster, step.roles)
    moved = [c for c in cut.laid.communications() if c.op in cut.runs.each]
    adding = sum(adding_seconds(one, pricer, EXACT) for one in moved)
    # What is added up by itself: no sums, as if nothing were of several microbatches.
    everything = frozenset(one.op for one in moved)
    own = dataclasses.replace(EXACT, sums=everything)
    assert sum(adding_seconds(one, pricer, own) for one in moved) == 0
    without = microbatched_cost(whole, cut.laid, step.whole.mesh, cluster, step.roles, own)
    assert found.compute_s[1] - without.compute_s[1] == pytest.approx(4 * adding, rel=1e-6)
