"""The table of op traits: against TensorFlow's own ops and kernels, the rules, and the source."""

import ast
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.ir import Constants, GraphBuilder, Op, Tensor, traits
from tfpar.rules import (
    find_relabelled_inputs,
    find_rule,
    has_rule,
    registered_types,
    replicate_rule,
)

OWN = {"RankConst"}
"""Op types that are no TensorFlow's."""

TABLE = {
    name: types
    for name, types in vars(traits).items()
    if isinstance(types, frozenset) and name != "REFERENCES"
}
KNOWN = frozenset().union(*TABLE.values())

OF_THEIR_OWN = {
    "jobs/calibration/devices.py": "the ops that are timed",
    "jobs/calibration/kernels.py": "the ops that are timed",
    "cost/op_compute.py": "how the work of each is counted",
    "ir/attention.py": "what bounds the entries of each",
    "ir/passes/attention_entries.py": "what blocks of scores take as it is, or cannot",
    "ir/passes/find_attention.py": "what each is linear in",
    "ir/builder.py": "what each gives of a dtype of its own",
    "ir/constants.py": "how each is evaluated",
    "ir/passes/infer_lists.py": "where each has its element",
    "ir/passes/slots.py": "what computes each write beside the variable",
    "ir/passes/predicate_branches.py": "how each write is undone",
    "ir/passes/trim.py": "why each is left out",
    "pipeline/partial_sums.py": "how those of microbatches are put together",
    "tf/variables/initial/blocks.py": "whose bits are the same in blocks",
    "observability/verification/noise.py": "which of them add up, by their beginnings",
    "tf/capture/arrays_v1.py": "what hands an array on, in TensorFlow 1's control flow",
}
"""Modules that list op types for a question that no one else asks."""


def test_every_op_type_exists():
    assert {t for t in KNOWN - OWN if not hasattr(tf.raw_ops, t)} == set()
    assert not any(hasattr(tf.raw_ops, t) for t in OWN)


@pytest.mark.parametrize(
    ("prefix", "types"),
    [
        ("ResourceApply", traits.OPTIMIZERS),
        ("ResourceSparseApply", traits.SPARSE_OPTIMIZERS),
        ("ResourceScatter", traits.SCATTERS),
    ],
)
def test_families_are_whole(prefix, types):
    assert {t for t in dir(tf.raw_ops) if t.startswith(prefix)} == types


def test_updates_with_a_rule_are_updates_in_the_table():
    changing = [t for t in registered_types() if t.startswith(("Assign", "Resource"))]
    writes = traits.WHOLE_UPDATES | traits.SPARSE_OPTIMIZERS | traits.SCATTERS
    unasked = {"ResourceStridedSliceAssign"}  # whether it is a scatter, nobody asks
    assert set(changing) <= writes | traits.VARIABLE_READS | unasked


def test_each_family_of_ops_has_one_kind():
    """A loop is no branch, a read no write; what hands on makes nothing."""
    apart = ("LOOPS", "BRANCHES", "CALLS", "SOURCES", "SIZES", "STATEFUL_DRAWS", "KEYED_DRAWS")
    apart += ("HANDED_ON", "ADDITIONS", "MATRIX_PRODUCTS", "CONVOLUTIONS", "NEW_LISTS")
    apart += ("ASSIGNMENTS", "OPTIMIZERS", "SPARSE_OPTIMIZERS", "SCATTERS", "INSPECTIONS")
    seen: dict[str, str] = {}
    for name in apart:
        for op_type in TABLE[name]:
            assert seen.setdefault(op_type, name) == name
    assert not traits.VARIABLE_READS & (traits.WHOLE_UPDATES | traits.SCATTERS)


def _run(op_type: str, x: tf.Tensor) -> tf.Tensor:
    """What TensorFlow's kernel makes of `x`, with operands that change what they can."""
    operands = {
        "Reshape": {"tensor": x, "shape": [3, 2]},
        "ExpandDims": {"input": x, "axis": 0},
        "Transpose": {"x": x, "perm": [2, 1, 0]},
        "Cast": {"x": x, "DstT": tf.float64},
        "ReadVariableOp": {"resource": tf.Variable(x).handle, "dtype": x.dtype},
        "IdentityN": {"input": [x]},
        "CheckNumerics": {"tensor": x, "message": ""},
        "CheckNumericsV2": {"tensor": x, "message": ""},
        "DebugIdentity": {"input": x, "tensor_name": "x:0"},
        "DebugIdentityV3": {"input": x, "tensor_name": "x:0"},
        "Print": {"input": x, "data": [x], "first_n": 0},
    }
    made = getattr(tf.raw_ops, op_type)(**operands.get(op_type, {"input": x}))
    return made[0] if isinstance(made, list) else made


@pytest.mark.parametrize("op_type", sorted(traits.HANDED_ON | traits.INSPECTIONS))
def test_values_are_handed_on_as_the_table_says(op_type):
    x = tf.constant(np.arange(6.0).reshape(2, 1, 3), tf.float32)
    made = _run(op_type, x)
    assert sorted(made.numpy().ravel()) == sorted(x.numpy().ravel())
    same_order = made.numpy().ravel().tolist() == x.numpy().ravel().tolist()
    assert same_order == (op_type not in traits.REARRANGED - traits.VIEWS)
    unchanged = traits.UNCHANGED | traits.INSPECTIONS | {"ReadVariableOp"}
    assert ((made.shape, made.dtype) == (x.shape, x.dtype)) == (op_type in unchanged)


def _graph(op_type: str) -> Tensor:
    """One op of the type, on a matrix."""
    build = GraphBuilder()
    x = build.one("Placeholder", (), (4, 6), "float32")
    if op_type == "Reshape":
        return build.reshape(x, (24,))
    if op_type == "ExpandDims":
        return build.expand_dims(x, 0)
    if op_type == "Squeeze":
        return build.one("Squeeze", [build.expand_dims(x, 0)], (4, 6), "float32")
    if op_type == "Transpose":
        return build.transpose(x, (1, 0))
    return build.one(op_type, [x], (4, 6), "float32")


@pytest.mark.parametrize(
    "op_type", sorted(t for t in traits.HANDED_ON - {"IdentityN"} if has_rule(t))
)
def test_rules_agree_with_the_table(op_type):
    """What hands on values may be laid as they lie. (`IdentityN` is split into `Identity` ops
    first, unless it waits for something.)"""
    op = _graph(op_type).op
    rule = find_rule(op, Constants(GraphBuilder().graph)) or replicate_rule(op)
    assert 0 in find_relabelled_inputs(op, rule)


def test_what_is_given_comes_from_its_own_input():
    sources = [Op(f"x{i}", "Placeholder").add_output((2,), "float32") for i in range(2)]
    bundle = Op("both", "IdentityN", sources)
    outputs = [bundle.add_output((2,), "float32") for _ in sources]
    assert list(map(traits.forwarded_input, outputs)) == sources
    shape = Op("shape", "Const").add_output((1,), "int32")
    view = Op("view", "Reshape", [outputs[1], shape]).add_output((2,), "float32")
    assert traits.origin(view, traits.VIEWS) is sources[1]
    assert traits.origin(view, traits.UNCHANGED) is view


@pytest.mark.parametrize(("op_type", "offset"), [("If", 1), ("StatelessCase", 1), ("While", 0)])
def test_bodies_take_what_comes_after_a_condition(op_type, offset):
    assert traits.body_offset(op_type) == offset


@pytest.mark.slow
def test_no_other_module_keeps_a_table_of_its_own():
    """Two or more op types of the table in one set, tuple, list or dict: a second table."""
    root = pathlib.Path(tfpar.__file__).parent
    found = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name == "ir/traits.py" or name.startswith("rules/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            listed = _listed(node)
            if len(listed) > 1:
                found.setdefault(name, []).append((node.lineno, listed))
    assert {name: where for name, where in found.items() if name not in OF_THEIR_OWN} == {}
    assert set(OF_THEIR_OWN) <= set(found), "a module that lists none needs no exception"


def _listed(node: ast.AST) -> list[str]:
    """The op types of the table that a display of strings lists."""
    items: list = []
    if isinstance(node, ast.Dict):
        items = node.keys
    elif isinstance(node, (ast.Set, ast.Tuple, ast.List)):
        items = node.elts
    return [i.value for i in items if isinstance(i, ast.Constant) and i.value in KNOWN]
