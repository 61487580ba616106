"""Names that differ in one number are told as one."""

import random

import pytest

from tests.planning.problems import Captured
from tfpar.observability.report.explain import MOST_GROUPS, format_name_groups, group_names
from tfpar.plans import plan_from_constraints
from tfpar.spec import Mesh, PlanError

PARTS = ("attention/query", "attention/key", "fc1", "fc2")
GPT = [f"block_{i}/{part}/kernel" for i in range(12) for part in PARTS]


def test_what_repeats_is_told_once():
    assert format_name_groups([*GPT, "head/kernel"]) == (
        "'block_0..block_11/attention/query/kernel' (12), "
        "'block_0..block_11/attention/key/kernel' (12), "
        "'block_0..block_11/fc1/kernel' (12), 'block_0..block_11/fc2/kernel' (12), 'head/kernel'"
    )


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a/kernel"], "'a/kernel'"),
        (["dense/kernel", "dense_1/kernel", "dense_2/kernel"], "'dense..dense_2/kernel' (3)"),
        (["b_10/w", "b_9/w", "b_2/w"], "'b_2..b_10/w' (3)"),  # by number, not by letter
        (["conv1_a/w", "conv3_a/w", "conv2_a/w"], "'conv1_a..conv3_a/w' (3)"),
        (["fc1/w", "fc2/w"], "'fc1/w', 'fc2/w'"),  # two are named
        (["x/kernel", "y/kernel"], "'x/kernel', 'y/kernel'"),
        (["x/k", "x/k/k"], "'x/k', 'x/k/k'"),
        (["block_0/w", "block_1/w#2"], "'block_0/w', 'block_1/w#2'"),
    ],
)
def test_what_counts_as_alike(names, told):
    assert format_name_groups(names) == told


def test_of_several_numbers_the_one_with_most_values_varies():
    names = [f"block_{i}_ln{j}/gamma" for i in range(3) for j in (1, 2)]
    assert format_name_groups(names) == (
        "'block_0_ln1..block_2_ln1/gamma' (3), 'block_0_ln2..block_2_ln2/gamma' (3)"
    )


def test_every_name_is_in_one_group():
    rng = random.Random(0)
    for _ in range(50):
        names = {
            "/".join(rng.choice(("a", "b1", "c_0", "c_1", "c", "d_2_e3")) for _ in range(3))
            for _ in range(20)
        }
        groups = group_names(sorted(names))
        assert sorted(name for group in groups for name in group) == sorted(names)


def test_many_groups_are_cut_short():
    names = [f"{letter}/kernel" for letter in "abcdefghijklmnop"]
    assert format_name_groups(names).endswith(f"and {len(names) - MOST_GROUPS} more such groups")


def test_an_ambiguous_weight_is_told_by_its_groups():
    graph = Captured.saved("t5_4_layers").step.graph
    plan = plan_from_constraints(graph, Mesh.of([2]))
    kernels = [name for name in plan.variables if name.endswith("/kernel")]
    with pytest.raises(PlanError) as error:
        plan.explain("kernel")
    text = str(error.value)
    assert text.startswith(f"The plan has several variables 'kernel', {len(kernels)} in all: ")
    assert text.endswith(". Give more of the path.") and ".." in text
    assert text.count("kernel'") < len(kernels) / 2
