"""What public calls take; whatever else is given is refused by name before anything runs."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.plan.graphs import mlp
from tfpar.cluster import find_cluster, write_cluster
from tfpar.options import Keywords, PlanKeywords, names_of, settings_of
from tfpar.planning.intra_op import TapPlanner
from tfpar.spec import Mesh, TfparError

X, Y = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")
DATA = (X, Y)
ONE = tap.shard("fc1/kernel", dim=1, axis="model")
NO_MODELS = (None, 3, "model", [X], layers.Dense(2))


def build():
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(320, name="fc1"), layers.Dense(2, name="fc2")], name="m"
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


def in_a_block(*arguments, **options):
    with tap.auto_parallel(*arguments, **options):
        return build()


def asked(mesh=None, constraints=(), **keywords):
    """What `auto_parallel` reads of its arguments."""
    return settings_of(mesh, constraints, None, keywords)


def searched(mesh=2, cluster="dgx-a100", **options):
    return tap.plan(build, DATA, mesh, cluster, **{"planner": "tap", **options})


@pytest.fixture(scope="module")
def plain():
    return build()


@pytest.fixture(scope="module")
def parallel():
    return in_a_block(2, planner=None)


@pytest.fixture(scope="module")
def found():
    return searched()


# --- options ---------------------------------------------------------------------------

REFUSED_OPTIONS = [
    ("mesh", ["4", True, 2.5, {2, 4}, build, ["2"], {"data": None}, 2**40, [0], [2.5]]),
    ("constraints", [3, "fc1/kernel", [3], ["fc1/kernel"], [None], build]),
    ("plan", [3, [], True, X, build, ""]),
    ("planner", [3, "best", TapPlanner, True, ["tap"], object()]),
    ("cluster", [3, [], True, X, ""]),
    ("plan_cache", [3, True, b"folder", ""]),
    ("memory_limit", [0, -1, "x", "16 GB/s", True, [1], float("nan"), "1e999 GB", 10**400]),
    ("bucket_bytes", [0, -1, "x", True, [1], float("inf"), "0.5 B"]),
    ("strict", ["yes", 1, 0, None, []]),
    ("compression", [16, "int8", True, ["fp16"]]),
    ("attention", ["flash", 3, True, ["whole"], ""]),
    ("recompute", [3, [3], ["("], 1.5, [None], {"a": 1}]),
    ("offload", [1, "all", ["fc1/kernel"], tap.Offload, {"optimizer": True}]),
    ("chunks", [True, 0, 3, 8, "2", 2.0, [2]]),
    ("pipeline", [True, 4, "1f1b", "anneal", tap.Pipeline, {"stages": 2}]),
    ("early_collectives", ["x", 1, "auto"]),
    ("level", [3, True, "3", 5, 2.0]),
    ("search_seconds", [0, -1, "x", True, float("nan")]),
    ("objective", ["fast", 1, None, True, ["latency"]]),
    ("trials", [0, -1, 2.5, True, "3", [3]]),
    ("verbose", [2, -1, "auto", None]),
]


@pytest.mark.parametrize("name, values", REFUSED_OPTIONS, ids=lambda v: v if type(v) is str else "")
def test_options_of_other_types_or_out_of_range_are_refused(name, values):
    for value in values:
        given = {"mesh": 2, name: value}
        if name == "level" and value != 3:
            given["planner"] = "rhino"
        with pytest.raises(TfparError) as error:
            asked(**given)
        said = str(error.value)
        assert name.split("_")[0] in said.lower(), said
        assert len(said) < 400 and "\n" not in said


def test_every_option_is_in_the_table_and_in_the_signatures():
    assert {name for name, _ in REFUSED_OPTIONS} == {
        "mesh",
        "constraints",
        *Keywords.__annotations__,
    }
    fields = {field.name: field for field in dataclasses.fields(tap.Options)}
    assert set(fields) == set(Keywords.__annotations__)
    for call in (tap.auto_parallel, tap.parallelize, tap.GraphProgram):
        shown = inspect.signature(call).parameters
        assert set(fields) <= set(shown) and "keywords" not in shown
        assert all(shown[name].default == fields[name].default for name in fields)
        assert shown["options"].default is None
    shown = inspect.signature(tap.plan).parameters
    assert set(shown) >= {*PlanKeywords.__annotations__, "cluster", "options"}
    assert "chunks" not in shown
    for name in fields:
        assert re.search(rf"^ +{name}: ", tap.Options.__doc__, re.MULTILINE), name
        assert fields[name].type == Keywords.__annotations__[name].__forward_arg__, name


def test_all_calls_with_options_look_at_them(plain):
    for call in (
        tap.auto_parallel,
        lambda *a, **k: tap.parallelize(plain, *a, **k),
    ):
        with pytest.raises(TfparError, match="^strict is 'yes'; it must be True or False.$"):
            call(2, strict="yes")
        with pytest.raises(TypeError, match="no option 'bucket_size'. Is it bucket_bytes?"):
            call(2, bucket_size=3)
    with pytest.raises(TfparError, match="^planner is 3; it must be one of"):
        tap.plan(build, DATA, 2, planner=3)
    assert tap.parallelize(plain, 2, planner=None) is plain, "and it is still as it was"


def test_one_record_of_options_says_the_same_as_keywords(plain):
    given = dict(planner="rhino", level=2, memory_limit="1 GiB", chunks=2, verbose=0)
    options = tap.Options(**given)
    assert repr(settings_of(2, (), options, {})) == repr(asked(2, **given))
    with tap.auto_parallel(2, options=options) as session:
        assert repr(session.options) == repr(asked(2, **given))
    assert repr(options).startswith("Options(plan=None, planner='rhino', level=2")
    assert options == tap.Options(**given) != tap.Options()


def test_a_keyword_wins_over_the_record():
    options = tap.Options(planner="rhino", level=2, compression="fp16", cluster="cpu")
    found = settings_of(2, (), options, {"level": 3, "compression": None})
    assert repr(found) == repr(asked(2, planner="rhino", level=3, cluster="cpu"))
    with pytest.raises(TfparError, match="^level is for planner='rhino'"):
        settings_of(2, (), options, {"planner": "tap"})


@pytest.mark.slow
def test_a_plan_and_what_runs_with_it_share_a_record(found):
    options = tap.Options(planner="tap", cluster="dgx-a100", chunks=2, strict=True)
    plan = tap.plan(build, DATA, 2, options=options)
    assert plan == found
    assert tap.plan(build, DATA, 2, "cpu", options=options).cluster.name == "cpu"
    with pytest.raises(TypeError, match="no option 'chunks'"):
        tap.plan(build, DATA, 2, chunks=2)
    with pytest.raises(TfparError, match="^tap.plan makes a plan"):
        tap.plan(build, DATA, 2, options=tap.Options(plan=found))


def test_a_record_says_at_once_what_is_wrong():
    for wrong in ({"chunks": 3}, {"plan": "there/is/none.json"}, {"planner": "tap", "level": 3}):
        with pytest.raises(TfparError):
            tap.Options(**wrong)
    with pytest.raises(TfparError, match="^options is {'chunks': 2}; it must be a tap.Options"):
        settings_of(2, (), {"chunks": 2}, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        tap.Options().chunks = 2
    assert names_of(PlanKeywords)[:4] == ["planner", "level", "search_seconds", "objective"]


# --- everything else -------------------------------------------------------------------


def refused_calls():
    """(name that the message has to have, the call)."""
    for model in NO_MODELS:
        yield "model is", lambda m=model: tap.parallelize(m, 2)
        yield "model is", lambda m=model: tap.plan_of(m)
        yield "model is", lambda m=model: tap.coverage(m)
        yield "model is", lambda m=model: tap.verify(m, X, Y)
        yield "model is", lambda m=model: tap.shard_data(m, lambda i, n: None, DATA)
        yield "model is", lambda m=model: tap.save_checkpoint(m, "folder")
        yield "model is", lambda m=model: tap.restore_checkpoint(m, "folder")
        yield "build is", lambda m=model: tap.plan(m, DATA, 2)
    yield "model is", lambda: tap.parallelize(keras.Model, 2)
    yield "step is", lambda: tap.function(3)
    for batch in (None, 8, "x", (), (None, None), [3.0], (X, Y[:3]), X, (X,)):
        yield "batch", lambda b=batch: tap.plan(build, b, 2, "dgx-a100")
    yield "needs a mesh", lambda: tap.plan(build, DATA)
    yield "needs a planner", lambda: tap.plan(build, DATA, 2, planner=None)
    yield "cluster is", lambda: tap.plan(build, DATA, 2, 3)
    for folder in (None, 3, "", b"folder"):
        yield "folder is", lambda f=folder: tap.Checkpoint(f)
    for every in (0, -1, True, "x", 2.5, None):
        yield "every is", lambda e=every: tap.Checkpoint("folder", e)
    for keep in (0, "x", 1.5, None):
        yield "keep is", lambda k=keep: tap.Checkpoint("folder", keep=k)
    for background in (1.5, "x", None):
        yield "background is", lambda b=background: tap.Checkpoint("folder", background=b)
    yield "mesh is", lambda: tap.calibrate("x")
    yield "path is", lambda: tap.calibrate(2, 3)
    for budget in (0, -1, "x", None, float("nan")):
        yield "budget_s is", lambda b=budget: tap.calibrate(2, budget_s=b)
    for path in (None, 3, ""):
        yield "path is", lambda p=path: tap.Plan.load(p)
        yield "text", lambda p=path: tap.Plan.from_json(p)
    for pattern in (None, 3, "", "("):
        yield "pattern is", lambda p=pattern: tap.shard(p, 0, "data")
        yield "pattern is", lambda p=pattern: tap.replicate(p)
        yield "pattern is", lambda p=pattern: tap.shard_output(p, 0, "data")
    for dim in ("x", None, True, 1.0):
        yield "dim is", lambda d=dim: tap.shard("fc", d, "data")
    for axis in (3, "", ["data"]):
        yield "axis is", lambda a=axis: tap.shard("fc", 0, a)
        yield "axis is", lambda a=axis: tap.replicate("fc", a)
        yield "axis is", lambda a=axis: tap.shard_output("fc", 0, a)
        yield "axis is", lambda a=axis: tap.batch(a)
    yield "stride is", lambda: tap.shard("fc", 0, "data", 0)
    for mapping in (None, 3, "x", {"a": 3}, {"a": "data"}):
        yield "layout", lambda m=mapping: tap.from_layout_map(m)
    for shape in (None, "x", 2.5, True, build):
        yield "mesh is", lambda s=shape: tap.split(s)
    for names in (3, "x", {"a": 1}):
        yield "axis_names is", lambda n=names: tap.split(2, n)
        yield "axis_names is", lambda n=names: tap.Mesh(n, (2,))
    yield "shape is", lambda: tap.Mesh(("data",), 2)
    for spec in (None, 3, "S(1)", [3], [None], [tap.Partial()]):
        yield "spec is", lambda s=spec: tap.layers.Dense(2, spec=s)
    yield "weight is", lambda: tap.layers.lay(layers.Dense(2), ["S(0)"])
    yield "op_type is", lambda: tap.register_rule(3, lambda op, constants: None)
    yield "function is", lambda: tap.register_rule("Mine", None)
    yield "op is", lambda: tap.make_rule(None, "a -> a")
    relu = next(op for op in mlp().ops if op.type == "Relu")
    yield "notation is", lambda: tap.make_rule(relu, None)
    yield "factor 'a' is", lambda: tap.make_rule(relu, "a b -> b", reduce={"a": "mean"})
    device = dict(flops={"float32": 1e9}, memory_bytes=1e9, memory_bandwidth=1e9)
    for name, values in (
        ("flops", (None, 3, {}, {"float16": 1.0}, {"float32": "x"}, {"float32": 0})),
        ("memory_bytes", (None, "80 GB", True, 0, float("nan"))),
        ("memory_bandwidth", (None, "x", 0, float("inf"))),
        ("launch_s", (None, "x", -1)),
        ("half_size", ("x", -1)),
        ("name", (3,)),
        ("functions_per_s", ("x", 0)),
        ("ramp_s", ("x", -1)),
        ("price_per_hour", ("x", -1, float("inf"))),
        ("price_source", (3, None)),
        ("entries_per_s", ("x", None, {"Sum": 0}, {3: 1.0})),
    ):
        for value in values:
            changed = {**device, name: value}
            yield name, lambda c=changed: tap.Device(**c)
    level = dict(count=2, bandwidth=1e9, latency_s=1e-6)
    for name, values in (
        ("count", (None, "2", 0, 1.5, True, 10**9)),
        ("bandwidth", (None, "1 GB/s", 0)),
        ("latency_s", (None, "x", -1)),
        ("topology", (3, None, "star")),
        ("p2p", ("x", 0)),
        ("name", (3, None)),
    ):
        for value in values:
            changed = {**level, name: value}
            yield f"{name} is", lambda c=changed: tap.Level(**c)
    node = tap.Node(tap.Device(**device))
    yield "device is", lambda: tap.Node(3)
    yield "levels is", lambda: tap.Node(node.device, (3,))
    for levels in (3, [3], None):
        yield "levels is", lambda v=levels: tap.Cluster.regular("ours", node.device, v)
    for inside in (2, "x", -1):
        yield "node_levels is", lambda i=inside: tap.Cluster.regular("ours", node.device, [], i)
    yield "uplink is", lambda: tap.Node(node.device, uplink="x")
    for name, values in (
        ("name", (3, "")),
        ("nodes", (None, 3, (), (3,), node)),
        ("levels", (3, (3,), None)),
        ("overlap", ("x", 2, None)),
        ("algorithms", (5, "ring", (5,), (), None)),
        ("measured", (3, (3,))),
        ("step_s", ("x", -1)),
        ("one_memory", ("x", 1)),
    ):
        for value in values:
            changed = {"name": "ours", "nodes": (node,), name: value}
            yield f"{name} is", lambda c=changed: tap.Cluster(**c)


def test_what_a_call_does_not_take_is_refused_by_name():
    for said, call in refused_calls():
        with pytest.raises(TfparError) as error:
            call()
        assert said in str(error.value), (said, error.value)


def test_what_parallel_models_and_plans_do_not_take(parallel, found):
    for said, call in (
        ("steps is", lambda: tap.verify(parallel, X, Y, steps=0)),
        ("steps is", lambda: tap.verify(parallel, X, Y, steps="x")),
        ("batch_size is", lambda: tap.verify(parallel, X, Y, batch_size=0)),
        ("(x, y, sample_weight)", lambda: tap.verify(parallel, None)),
        ("(x, y, sample_weight)", lambda: tap.verify(parallel, 3)),
        ("(x, y, sample_weight)", lambda: tap.verify(parallel, X)),
        ("(x, y, sample_weight)", lambda: tap.verify(parallel, X, Y[:3])),
        ("x is", lambda: tap.coverage(parallel, "x")),
        ("(x, y) holds", lambda: tap.coverage(parallel, 3)),
        ("(x, y) holds", lambda: tap.coverage(parallel, X, Y[:3])),
        ("make is", lambda: tap.shard_data(parallel, None, DATA)),
        ("batch", lambda: tap.shard_data(parallel, lambda i, n: None, 3)),
        ("folder is", lambda: tap.save_checkpoint(parallel, None)),
        ("keep is", lambda: tap.save_checkpoint(parallel, "folder", keep="x")),
        ("path is", lambda: tap.restore_checkpoint(parallel, None)),
        ("path is", lambda: found.save(None)),
        ("name is", lambda: found.explain(3)),
        ("other is", lambda: found.diff("plan.json")),
    ):
        with pytest.raises(TfparError) as error:
            call()
        assert said in str(error.value), error.value


# --- what is taken ---------------------------------------------------------------------


def test_forms_of_options_that_mean_the_same():
    layout_map = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh((1,), ["model"], ["cpu:0"])
    )
    layout_map["fc1/kernel"] = (None, "model")
    one = asked(4, ONE, recompute="block", memory_limit="1 MiB", planner=None)
    for mesh in (np.int64(4), [4], (4,), np.array([4]), {"data": 4}, tap.split(4), Mesh.of(4)):
        assert asked(mesh, [ONE], recompute=["block"], memory_limit=2**20, planner=None) == one
    assert tap.split(np.int32(4)) == tap.split([4]) and tap.split(np.array([2, 4])).shape == (2, 4)
    assert asked(2, layout_map).constraints == tap.from_layout_map(layout_map)
    assert asked(2, None).constraints == ()
    for given in (
        dict(chunks=np.int64(2)),
        dict(chunks=2),
        dict(strict=np.True_),
        dict(bucket_bytes="1 KiB"),
        dict(bucket_bytes=np.int32(1024)),
        dict(search_seconds=np.float32(9)),
        dict(recompute=np.False_),
        dict(offload=np.True_),
        dict(offload=tap.Offload(optimizer=["fc1/kernel"], activations=np.False_)),
        dict(planner="rhino", level=np.int64(2)),
        dict(memory_limit="16 GB"),
        dict(memory_limit=np.float64(1e9)),
        dict(compression="fp16"),
        dict(planner=TapPlanner()),
        dict(cluster="cpu"),
        dict(verbose=np.int64(1)),
    ):
        options = asked(2, **given)
        for name, value in given.items():
            if name in ("chunks", "strict", "recompute"):
                assert getattr(options, name) == value
    assert asked(2, bucket_bytes="1 KiB").bucket_bytes == 1024


def test_paths_are_strings_or_pathlib_paths(found, tmp_path):
    plan_file, cluster_file = tmp_path / "plan.json", tmp_path / "ours.toml"
    found.save(plan_file)
    assert tap.Plan.load(plan_file) == tap.Plan.load(str(plan_file)) == found
    write_cluster(find_cluster("dgx-a100", Mesh.of(2)), cluster_file)
    cached = searched(cluster=cluster_file, plan_cache=tmp_path / "cache")
    assert cached.variables == found.variables and list((tmp_path / "cache").iterdir())
    model = in_a_block(plan=plan_file, cluster=cluster_file)
    model.fit(X, Y, batch_size=8, verbose=0)
    checkpoint = tap.Checkpoint(pathlib.Path(tmp_path / "run"), every=np.int64(1), keep=np.int64(2))
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[checkpoint])
    saved = tap.save_checkpoint(model, tmp_path / "by_hand", keep=np.int64(1))
    assert tap.restore_checkpoint(model, tmp_path / "by_hand").step == 2
    assert tap.restore_checkpoint(model, pathlib.Path(saved)).step == 2


@pytest.mark.slow
def test_a_layout_map_takes_the_place_of_constraints():
    spec = (
        searched([1, 2], constraints={"fc1/kernel": (None, "model")}).variables["m/fc1/kernel"].spec
    )
    assert spec == searched([1, 2], constraints=ONE).variables["m/fc1/kernel"].spec


@pytest.mark.slow
def test_the_memory_that_a_plan_prints_is_enough_as_a_limit(found):
    printed = re.search(r"Memory of a device: (\S+ \S+) of", found.summary())[1]
    assert printed.endswith("iB")
    limited = searched(memory_limit=printed)
    assert limited.variables == found.variables and limited.recompute == found.recompute


@pytest.mark.slow
def test_batches_of_specs_lists_and_dicts_pass():
    specs = tf.TensorSpec((8, 6), "float32"), tf.TensorSpec((8, 2), "float32")
    for batch in (specs, list(DATA), (X, Y, np.ones(8, "float32"))):
        assert tap.plan(build, batch, 2, "dgx-a100", planner="tap").cost
