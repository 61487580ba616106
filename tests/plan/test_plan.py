"""Plans: made, saved, loaded, checked and compared."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from tests.plan.graphs import mlp
from tfpar.constraints import batch, shard, shard_output
from tfpar.ir import fingerprint
from tfpar.plans import Plan, plan_from_constraints, uneven_meshes
from tfpar.spec import Mesh, PlanError, Replicate, Shard, SpecError, format_spec

MESH = Mesh.of([2, 4])
MEGATRON = (
    shard(".*fc1/kernel", dim=1, axis="model"),
    shard_output("mlp/block_0", dim=1, axis="model"),
)


def plan(**graph) -> Plan:
    return plan_from_constraints(mlp(**graph), MESH, MEGATRON)


def test_plan_holds_what_constraints_fix():
    made = plan()
    assert made.batch_axes == ("data",)
    anchors = made.anchors()
    assert {n: format_spec(s) for n, s in anchors.variables.items()} == {
        "block_0/fc1/kernel": "R,S(1)"
    }
    assert {n: format_spec(s) for n, s in anchors.tensors.items()} == {
        "mlp/block_0/fc2/Relu:0": "S(0),S(1)"
    }
    assert made.variables["block_0/fc1/kernel"].why == str(MEGATRON[0])
    assert made.variables["head/bias"].spec is None


def test_no_constraints_is_data_parallelism():
    made = plan_from_constraints(mlp(), MESH)
    assert made.batch_axes == ("data", "model") and not made.anchors().variables


def test_constraints_on_a_part_of_the_step_may_match_nothing():
    slots = shard("sgd/.*", 0, "data")
    assert plan_from_constraints(mlp(momentum=True), MESH, [slots]).anchors().variables
    with pytest.raises(SpecError, match="matches no variable"):
        plan_from_constraints(mlp(), MESH, [slots])
    assert not plan_from_constraints(mlp(), MESH, [slots], part=True).anchors().variables


# --- files -----------------------------------------------------------------------


def test_file_round_trip(tmp_path):
    path = tmp_path / "plan.json"
    made = plan(momentum=True)
    made.save(path)
    loaded = Plan.load(path)
    assert loaded == made and not loaded.diff(made)
    assert loaded.to_json() == made.to_json()
    lines = path.read_text().splitlines()
    assert sum('"block_0/fc1/kernel": {' in line for line in lines) == 1
    assert any('"R,S(1)"' in line for line in lines)
    assert os.listdir(tmp_path) == ["plan.json"]


def test_chunks_are_kept_and_are_one_where_a_file_does_not_say():
    made = dataclasses.replace(plan(), chunks=2)
    text = made.to_json()
    assert Plan.from_json(text) == made
    assert plan().diff(made) == ["chunks: 1 -> 2"]
    fields = json.loads(text)
    assert Plan.from_json(json.dumps({**fields, "chunks": 1})) == plan()
    del fields["chunks"]
    assert Plan.from_json(json.dumps(fields)) == plan()
    with pytest.raises(PlanError, match="1 chunk or more, not in 0"):
        Plan.from_json(json.dumps({**fields, "chunks": 0}))


def test_failed_write_leaves_the_old_file(tmp_path):
    with pytest.raises(PlanError, match="Cannot write the plan file"):
        plan().save(tmp_path / "no" / "plan.json")
    with pytest.raises(PlanError, match="Cannot write the plan file"):
        plan().save(tmp_path)
    assert not os.listdir(tmp_path)


def load_error(text: str, tmp_path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(PlanError, match="no plan file .*plan.save"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(PlanError, match="Cannot read"):
        Plan.load(tmp_path)
    text = plan().to_json()
    assert "corrupt" in load_error(text[: len(text) // 2], tmp_path)
    assert "not a plan file" in load_error("[1, 2]", tmp_path)
    assert "not a plan file" in load_error("{}", tmp_path)
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="Cannot read"):
        Plan.load(tmp_path / "plan.json")


def test_malformed_fields_are_named(tmp_path):
    good = json.loads(plan().to_json())

    def changed(**fields) -> str:
        return load_error(json.dumps({**good, **fields}), tmp_path)

    assert "newer tfpar (9.9, format 99" in changed(version=99, tfpar="9.9")
    assert "no known format version" in changed(version="1.0")
    without = {k: v for k, v in good.items() if k != "mesh"}
    assert "mesh is missing" in load_error(json.dumps(without), tmp_path)
    assert "malformed" in changed(mesh=[["data", 0], ["model", 4]])
    assert "malformed" in changed(mesh=3)
    assert "splits the batch over 'rows'" in changed(batch_axes=["rows"])

    def kernel(**fields) -> str:
        name = "block_0/fc1/kernel"
        variable = {**good["variables"][name], **fields}
        return changed(variables={**good["variables"], name: variable})

    assert "'block_0/fc1/kernel'" in kernel(spec="R")
    assert "'block_0/fc1/kernel'" in kernel(spec="R,S(2)")
    assert "never Partial" in kernel(spec="R,P(sum)")
    assert "stride" in kernel(spec="R,S(1/4)") or "does not fit" in kernel(spec="R,S(1/4)")
    assert "Cannot read placement" in kernel(spec="R,X")
    assert "malformed" in kernel(shape="abc")


# --- checks ----------------------------------------------------------------------


def check_error(made: Plan, graph, mesh=None, **options) -> str:
    with pytest.raises(PlanError) as caught:
        made.fitted(graph, mesh, **options)
    return str(caught.value)


def renamed(end: str):
    """The model with other names for its layers."""
    graph = mlp()
    for variable in graph.variables:
        scope, _, rest = variable.name.partition("/")
        variable.name = f"{scope}{end}/{rest}"
    return graph


def test_a_plan_takes_the_names_that_weights_have_now():
    made = plan()
    fitted = made.fitted(mlp(prefix="net/"))
    assert list(fitted.variables) == [f"net/{name}" for name in made.variables]
    assert [v.spec for v in fitted.variables.values()] == [v.spec for v in made.variables.values()]
    assert fitted.fingerprint == fingerprint(mlp(prefix="net/"))
    assert fitted.fitted(mlp()).variables == made.variables
    assert made.fitted(mlp()) is made


def test_check_accepts_the_same_model():
    made = plan()
    made.fitted(mlp(), MESH)
    made.fitted(mlp(batch=3))


def test_check_says_what_differs():
    made = plan()
    assert "mesh data=2 x model=4, not for data=4 x model=2" in check_error(
        made, mlp(), Mesh.of([4, 2])
    )
    text = check_error(made, renamed("x"))
    assert "missing: 'block_0/fc1/bias'" in text and "unknown to the plan: 'block_0x/" in text
    assert "and 2 more" in text
    text = check_error(made, mlp(hidden=12))
    assert "'block_0/fc1/kernel' is (6, 12), planned as (6, 10)" in text
    assert "fingerprint" in check_error(made, mlp(activation="Tanh"))


def test_check_of_a_part_of_the_step():
    made = plan(momentum=True)
    made.fitted(mlp(), part=True)
    assert "missing: 'sgd/" in check_error(made, mlp())
    assert "unknown to the plan" in check_error(made, renamed("x"), part=True)


def test_check_lets_the_names_of_other_state_differ():
    made = plan(momentum=True)
    graph = mlp(momentum=True)
    for variable in graph.variables:
        if not variable.trainable:
            variable.name += "_1"
    made.fitted(graph)
    pinned = plan_from_constraints(mlp(momentum=True), MESH, [shard("sgd/head.*", 0, "data")])
    assert "missing: 'sgd/head_kernel_momentum'" in check_error(pinned, graph)


def test_fingerprint_is_of_the_structure():
    base = fingerprint(mlp())
    assert fingerprint(mlp()) == base
    assert fingerprint(mlp(batch=16)) == base
    renamed = mlp()
    for op in renamed.ops:
        op.name = f"{op.name}_17"
    assert fingerprint(renamed) == base
    others = {
        fingerprint(mlp(hidden=12)),
        fingerprint(mlp(prefix="x/")),
        fingerprint(mlp(unknown=True)),
        fingerprint(mlp(activation="Tanh")),
        fingerprint(mlp(momentum=True)),
    }
    assert len(others) == 5 and base not in others


def test_fingerprint_sees_attributes_and_edges():
    base = fingerprint(mlp())
    graph = mlp()
    next(op for op in graph.ops if op.type == "MatMul").attrs["transpose_a"] = True
    assert fingerprint(graph) != base
    graph = mlp()
    matmul = [op for op in graph.ops if op.type == "AddV2"]
    matmul[0].inputs.reverse()
    assert fingerprint(graph) != base


@pytest.mark.slow
def test_fingerprint_is_the_same_in_another_process():
    code = (
        "from tests.plan.graphs import mlp; from tfpar.ir import fingerprint;"
        "print(fingerprint(mlp(momentum=True)))"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == fingerprint(mlp(momentum=True))


# --- comparing -------------------------------------------------------------------


def test_diff_lists_what_changed():
    first = plan()
    second = plan_from_constraints(
        mlp(momentum=True), MESH, [shard(".*fc1/kernel", 0, "model"), batch()]
    )
    lines = first.diff(second)
    assert "batch axes: data -> none" in lines
    assert "block_0/fc1/kernel: R,S(1) -> R,S(0)" in lines
    assert "mlp/block_0/fc2/Relu:0: S(0),S(1) -> open" in lines
    # Slots that nothing lays are not told: tap.plan makes plans without them.
    assert not any(line.startswith("sgd/") for line in lines)
    assert "constraint added: batch()" in lines
    assert "mesh: data=2 x model=4 -> data=8" in first.diff(
        plan_from_constraints(mlp(), Mesh.of([8]))
    )
    assert first.diff(plan()) == []


def test_specs_are_checked_when_a_plan_is_made():
    made = plan()
    with pytest.raises(PlanError, match="needs 2 placements"):
        dataclasses.replace(made, tensors={"x:0": (Shard(0),)})
    wrong = dataclasses.replace(made.variables["head/bias"], spec=(Replicate(), Shard(1)))
    with pytest.raises(PlanError, match="'head/bias'"):
        dataclasses.replace(made, variables={**made.variables, "head/bias": wrong})


# --- shares of the batch ----------------------------------------------------------


def test_shares_are_kept_and_are_equal_where_a_file_does_not_say():
    made = dataclasses.replace(plan(), shares={"data": (6, 2)})
    text = made.to_json()
    assert Plan.from_json(text) == made
    assert plan().diff(made) == ["shares of the batch: equal -> 6:2 over data"]
    assert "batch split over data in shares 6:2" in made.summary()
    fields = json.loads(text)
    del fields["shares"]
    assert Plan.from_json(json.dumps(fields)) == plan()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"shares": {"model": (1, 1, 1, 2)}}, "along 'model'"),
        ({"shares": {"data": (1, 2, 3)}}, "takes 2 shares"),
        ({"shares": {"data": (2, 0)}}, "at least 1"),
    ],
)
def test_shares_that_cannot_be_are_refused(changes, said):
    with pytest.raises((PlanError, SpecError), match=said):
        dataclasses.replace(plan(), **changes)


def test_batches_of_other_sizes_are_shared_out_in_proportion():
    made = dataclasses.replace(plan(), shares={"data": (24, 8)})

    def shared(found: Plan, batch_size: int | None) -> list[tuple[int, ...]]:
        return [mesh.shares for mesh in uneven_meshes(found, batch_size)]

    # By single samples; or by as many as ranks along the other axis, if the step splits these too.
    assert shared(made, 32) == [(24, 8), (6, 2)]
    assert shared(made, 10) == [(8, 2)]
    assert shared(made, 2) == shared(made, 1) == shared(made, None) == []
    both = dataclasses.replace(made, batch_axes=("data", "model"))
    assert shared(both, 32) == [(6, 2)]  # of four samples each
    assert shared(both, 30) == []
    for pieces in ("chunks", "microbatches"):  # each of so many samples
        in_pieces = dataclasses.replace(made, **{pieces: 4})
        assert shared(in_pieces, 32) == [(6, 2)]
        assert shared(in_pieces, 64) == [(12, 4), (3, 1)]
        assert shared(in_pieces, 20) == [(4, 1)]
        assert shared(in_pieces, 30) == shared(in_pieces, 4) == []
