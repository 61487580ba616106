"""The command `tfpar`: what it takes, prints and writes, and what it says when it cannot."""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.cli.train import SCRIPT, tfpar
from tfpar.cluster import find_cluster, write_cluster
from tfpar.planning.intra_op import PLANNERS
from tfpar.plans import Plan
from tfpar.spec import Mesh

ROOT = Path(__file__).parents[2]

# --- plans -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_is_printed_written_and_used(folder, capsys):
    before = list(sys.path), list(sys.argv)
    command = "plan train.py:build --mesh 2x2 --batch-size 8 --cluster dgx-a100 -o plan.json"
    assert tfpar(command) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Wrote plan.json\nPlan for 'mlp' on mesh ")
    assert "| mlp/fc1 (Dense) " in printed.out
    assert printed.err == "" and (sys.path, sys.argv) == before and "train" not in sys.modules
    assert Plan.load("plan.json").cluster == find_cluster("dgx-a100", Mesh.of([2, 2]))

    keras.utils.clear_session(free_memory=False)
    with tap.auto_parallel(plan="plan.json"):
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, "relu", name="fc1"),
                keras.layers.Dense(3, name="fc2"),
            ],
            name="mlp",
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
    start = model.get_weights()
    model.fit(np.ones((8, 6), "float32"), np.zeros(8, "int32"), batch_size=8, verbose=0)
    assert any(not np.array_equal(a, b) for a, b in zip(start, model.get_weights(), strict=True))


@pytest.mark.slow
def test_every_source_of_the_batch_gives_the_same_plan(folder, capsys):
    sources = {
        "size": "train.py:build --batch-size 8",
        "arrays": "train.py:build --data train.py:arrays",
        "specs": "train.py:build --data train.py:specs",
        "returned": "train.py:both",
    }
    for name, source in sources.items():
        assert tfpar(f"plan {source} --mesh 4 --cluster dgx-a100 --quiet -o {name}.json") == 0, name
    assert capsys.readouterr() == ("", "")
    plans = [Plan.load(f"{name}.json") for name in sources]
    assert all(plan.diff(plans[0]) == [] for plan in plans)


@pytest.mark.slow
@pytest.mark.parametrize("build", ["two_heads", "named_heads", "own_loss"])
def test_labels_are_made_up_for_each_output(folder, build, capsys):
    command = f"plan train.py:{build} --mesh 2 --batch-size 8 --cluster dgx-a100 --quiet"
    assert tfpar(command) == 0, capsys.readouterr().err


def test_a_package_and_its_module(folder, capsys):
    package = folder / "of_cli_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    text = SCRIPT.replace('"train", __name__', '"of_cli_test.models", __name__')
    (package / "models.py").write_text(text)
    command = "plan of_cli_test.models:build --data of_cli_test.models:arrays --mesh 2 -o p.json"
    assert tfpar(command) == 0
    assert Path("p.json").exists() and "| mlp/fc2 (Dense) " in capsys.readouterr().out


def test_explain_takes_the_summary_s_place(folder, capsys):
    command = "plan train.py:both --mesh 2 --explain fc1/kernel mlp/fc2/bias"
    assert tfpar(command) == 0
    out = capsys.readouterr().out
    assert "Variable 'mlp/fc1/kernel'" in out and "Variable 'mlp/fc2/bias'" in out
    assert "on mesh" not in out


@pytest.mark.parametrize(
    "text, mesh",
    [
        ("2x8", Mesh.of([2, 8])),
        ("16", Mesh.of([16])),
        ("2x2x4", Mesh.of([2, 2, 4])),
        ("data=2,model=8", Mesh.of({"data": 2, "model": 8})),
    ],
)
def test_meshes(text, mesh):
    from tfpar.cli.problem import parse_mesh

    assert parse_mesh(text) == mesh


def test_a_cluster_file_and_a_plan_cache(folder, monkeypatch):
    described = dataclasses.replace(find_cluster("dgx-a100", Mesh.of([1, 2])), name="ours")
    write_cluster(described, "ours.toml")
    searched = []

    def planner():
        made = find()
        solve = made.solve
        made.solve = lambda problem: searched.append(1) or solve(problem)
        return made

    find = PLANNERS["tap"]
    monkeypatch.setitem(PLANNERS, "counting", planner)
    command = "plan train.py:both --mesh 2 --cluster ours.toml --planner counting --quiet"
    for _ in range(2):
        assert tfpar(f"{command} --plan-cache plans -o plan.json") == 0
    assert len(searched) == 1 and len([*Path("plans").glob("*.json")]) == 1
    assert Plan.load("plan.json").cluster == described


# --- what cannot be done ---------------------------------------------------------------


ERRORS = {
    "train.py:build": "No batch to plan for: .*--data .*--batch-size",
    "train.py:nope --batch-size 8": "no function 'nope' in 'train.py'. It has 'build', 'arrays'",
    "train.py:a_model --batch-size 8": "'a_model' in 'train.py' is a Sequential, not a function",
    "train.py --batch-size 8": "'train.py' names no function",
    "none.py:build --batch-size 8": "no script 'none.py'",
    "no.such.module:build --batch-size 8": "no module 'no.such.module'",
    "other/json.py:build --batch-size 8": "module 'json', which is imported already. Rename",
    "broken.py:build --batch-size 8": r"broken.py raised ZeroDivisionError: .*broken.py, line 3",
    "train.py:raises --batch-size 8": r"train.py:raises raised ValueError: out of ideas \(train.py",
    "train.py:needs --batch-size 8": "train.py:needs .* needs 'depth'",
    "train.py:ends --batch-size 8": r"train.py:ends ends the process \(exit code 3\)",
    "train.py:no_model --batch-size 8": "train.py:no_model returned a int.* compiled Keras model",
    "train.py:not_compiled --batch-size 8": "'raw', that is not compiled. Call model.compile",
    "train.py:shapeless --batch-size 8": "input shapes of 'late' are not all known.*--data",
    "train.py:both --batch-size 8": "train.py:both returns a batch. Leave out --batch-size",
    "train.py:build --batch-size 0": "--batch-size is 0",
    "train.py:build --data train.py:nope": "no function 'nope'",
    "train.py:build --data train.py:open_batch": r"train.py:open_batch .* shape \(None, 6\)",
    "train.py:build --data train.py:no_batch": "train.py:no_batch gave a object that is no batch",
    "train.py:both --mesh 2y8": "--mesh '2y8' is no mesh. Write sizes",
    "train.py:both --mesh 0x2": "--mesh '0x2': Mesh axis 'data' has size 0",
    "train.py:both --cluster tpu": "no cluster 'tpu': .*'rhino-m8'",
    "train.py:both --cluster broken.py": "Cannot read the cluster file 'broken.py'",
    "train.py:both --planner best": "no planner 'best'. There are 'auto'",
    "train.py:both -o no/plan.json": "Cannot write the plan file 'no/plan.json': there is no fo",
    "train.py:both -o .": "Cannot write the plan file '.': it is a folder",
    "train.py:both --plan-cache train.py": "Cannot make the folder 'train.py' for plans",
    "train.py:both --explain fc3": "The plan has no variable or layer 'fc3'",
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ERRORS)
def test_what_is_wrong_is_said_in_one_line(arguments, folder, capsys):
    mesh = "" if "--mesh" in arguments else "--mesh 2"
    path = list(sys.path)
    assert tfpar(f"plan {arguments} {mesh}") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tfpar plan: ") and err.count("\n") == 1
    assert re.search(ERRORS[arguments], err), err
    assert sys.path == path


def test_a_cluster_that_is_too_small_names_both_before_the_script_runs(folder, capsys):
    small = dataclasses.replace(find_cluster("dgx-a100", Mesh.of([1])), name="one")
    write_cluster(small, "one.toml")
    assert tfpar("plan broken.py:build --mesh 2x4 --cluster one.toml") == 2
    assert "has 8 ranks, but cluster 'one' has 1 device" in capsys.readouterr().err


def test_labels_that_do_not_fit_the_step(folder, capsys):
    Path("train.py").write_text(SCRIPT.replace("SparseCategorical", "Categorical") + OWN_STEP)
    assert tfpar("plan train.py:own_step --mesh 2 --batch-size 8") == 2
    err = capsys.readouterr().err
    assert "if its labels are others, give --data" in err and err.count("\n") == 1


OWN_STEP = textwrap.dedent(
    """

    class Own(keras.Sequential):
        def train_step(self, data):
            x, (y, weight) = data
            return super().train_step((x, y, weight))


    def own_step():
        model = Own([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=False)
        return model
    """
)


def test_traceback_is_for_those_who_ask(folder, capsys):
    assert tfpar("plan train.py:raises --mesh 2 --traceback") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and 'raise ValueError("out of\\nideas")' in err
    assert err.splitlines()[-1].startswith("tfpar plan: train.py:raises raised ValueError")


# --- the page about it -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly  # searches for many ranks, half a minute of them
def test_the_page_s_commands_do_what_it_says(folder, capsys):
    page = (ROOT / "docs/howto/plan_without_devices.md").read_text("utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    Path("train.py").write_text(next(code for kind, code in blocks if kind == "python"))
    described = (ROOT / "docs/howto/describe_a_cluster.md").read_text("utf-8")
    Path("ours.toml").write_text(re.search(r"^```toml\n(.*?)^```", described, re.M | re.S)[1])
    lines = [line for kind, code in blocks if kind == "bash" for line in code.splitlines()]
    assert len(lines) >= 5
    for line in lines:
        program, _, command = line.partition(" ")
        assert program == "tfpar"
        assert tfpar(command) == int(command.startswith("diff")), capsys.readouterr().err
    out = capsys.readouterr().out
    explained = out.partition("Variable 'classifier/classes/kernel'")[2].splitlines()
    assert explained[1].startswith("  Placement: S(1) over model")  # as the page says
    assert tfpar("plan train.py:build --batch-size 1024 --mesh 2x2 --cluster ours.toml") == 0


def test_what_is_computed_again_can_be_said(folder, capsys):
    command = "plan train.py:both --mesh 2 --cluster v100-ethernet"
    assert tfpar(f"{command} --recompute nothing_like_it") == 2
    assert "recompute='nothing_like_it' matches no block" in capsys.readouterr().err
    for recompute, count in (("none", 0), ("fc1", 1), ("all", 0)):  # no block repeats
        assert tfpar(f"{command} -o plan.json --recompute {recompute}") == 0, recompute
        assert len(Plan.load("plan.json").recompute) == count
    assert tfpar(f"{command} -o plan.json --attention blockwise") == 0
    assert Plan.load("plan.json").attention == "whole"  # of which it has none
    assert tfpar(f"{command} --recompute [") == 2
    assert "recompute='['" in capsys.readouterr().err


@pytest.mark.slow
def test_what_lies_in_host_memory_can_be_said(folder, capsys):
    command = "plan train.py:both --mesh 2 --cluster v100-ethernet -o plan.json"
    for offload, has_slots in (("none", 0), ("optimizer", 1), ("activations", 0), ("all", 1)):
        assert tfpar(f"{command} --offload {offload}") == 0, offload
        assert bool(Plan.load("plan.json").offloaded.slots) == has_slots, offload
    with pytest.raises(SystemExit):
        tfpar(f"{command} --offload slots")
    assert "invalid choice: 'slots'" in capsys.readouterr().err


def test_a_pipeline_can_be_asked_for(folder, capsys):
    command = "plan train.py:both --mesh 2 --cluster v100-ethernet"
    assert tfpar(f"{command} -o plan.json --microbatches 2") == 0
    assert Plan.load("plan.json").microbatches == 2
    assert "in 2 microbatches" in capsys.readouterr().out
    stages = "--stages 2 --microbatches 2 --tolerance 0.3 --memory-limit 1GB,2GB"
    assert tfpar(f"{command} -o plan.json {stages} --quiet") == 0
    limits = [share.limit_bytes for share in Plan.load("plan.json").stages.cost.stages]
    assert limits == [1e9, 2e9]
    Path("mine.csv").write_text("0F0,0F1,0B1,0B0\n")
    assert tfpar(f"{command} -o plan.json --schedule mine.csv --quiet") == 0
    assert Plan.load("plan.json").microbatches == 2
    assert tfpar(f"{command} -o plan.json --stages auto --full") == 0
    assert Plan.load("plan.json").findings.rivals
    assert "Pipelines that were compared" in capsys.readouterr().out
    assert tfpar(f"{command} -o other.json --stages auto --search anneal --seed 1 --quiet") == 0
    assert Plan.load("other.json").findings.rivals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--stages 3 --microbatches 2", "its stages on 3 sets of ranks; the mesh has 2"),
        ("--stages 2", "A pipeline needs --microbatches"),
        ("--schedule gpipe", "A pipeline needs --microbatches"),
        ("--stages auto --schedule gpipe", "--stages auto finds microbatches and schedule itself"),
        ("--stages auto --search alpa --seed 1", "search='alpa' draws nothing at random"),
        (
            "--stages 2 --microbatches 2 --search anneal",
            "--search and --seed are for --stages auto",
        ),
        ("--tolerance 0.3", "--tolerance is for stages: add --stages"),
        ("--stages 2 --microbatches 2 --tolerance -1", "tolerance is -1.0; it must be"),
        ("--stages 2 --microbatches 2 --memory-limit 1GB,2GB,3GB", "it must be .* a list of 2"),
        ("--batch-statistics microbatch", "A pipeline needs --microbatches"),
        ("--microbatches 0", "microbatches is 0; it must be a whole number, 1 or more"),
        ("--schedule gpype", "--schedule 'gpype' is neither one of gpipe, .* nor a file .*No such"),
        ("--schedule two.csv --stages 3", "stages is 3; it must be 2: the schedule has 2 lines"),
        ("--schedule broken.csv", "broken.csv.*line 1, cell 2: cannot read '0X0'"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_before_the_script_runs(
    arguments, message, folder, capsys
):
    Path("two.csv").write_text("0F0,0B0\n1F0,1B0\n")
    Path("broken.csv").write_text("0F0,0X0\n")
    assert tfpar(f"plan broken.py:build --mesh 2 {arguments}") == 2
    _, err = capsys.readouterr()
    assert re.search(message, err), err


def test_stages_that_are_no_number_are_refused(folder, capsys):
    with pytest.raises(SystemExit):
        tfpar("plan train.py:build --mesh 2 --stages few")
    assert "argument --stages: 'few' is neither a number nor auto" in capsys.readouterr().err
