"""Options of the public calls and of the command line: one of each valid call made odd."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import io
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpar as tap
from scripts.fuzzing import samples
from scripts.fuzzing.files import commanded
from scripts.fuzzing.trials import Case, Draw, Kind
from tfpar.cli import make_parser
from tfpar.options import Keywords
from tfpar.spec import Shard, TfparError

NOT_TRIED = {
    "Replicate": "it takes nothing",
    "SearchInterrupted": "searches raise it",
    "TfparError": "an error",
    "calibrate": "it measures the machine for as long as it is told",
}
"""Public names that no call here is of."""

X, Y = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")


class Unhelpful:
    """Its `repr` fails. As a function it takes anything, and gives nothing of use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def _deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(5000):
        found = [found]
    return found


def _endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


ODD: Mapping[str, Callable[[], Any]] = {
    **{repr(v): lambda v=v: v for v in (None, True, False, 0, 1, -1, 2, 2**31, 2**63, 0.5, -0.0)},
    **{repr(v): lambda v=v: v for v in (1e308, math.nan, math.inf, -math.inf, 1j, (), (1, 2))},
    **{repr(v): lambda v=v: v for v in ("", "x", "\0", "\ud800", "é", "(", "1e999 GB", b"", b"x")},
    **{repr(v): lambda v=v: v for v in ([], [None], [1, 2], [-1], ["x"], [[]], {}, {"x": 1})},
    **{repr(v): lambda v=v: v for v in ({1: 2}, {"x": None}, set(), {1}, Ellipsis)},
    "10**400": lambda: 10**400,
    "a long text": lambda: "x" * 1_000_000,
    "many digits": lambda: "9" * 5000,
    "object()": object,
    "Unhelpful()": Unhelpful,
    "Unhelpful": lambda: Unhelpful,
    "a function": lambda: lambda *_, **__: None,
    "a generator": lambda: (i for i in range(2)),
    "range(3)": lambda: range(3),
    "pathlib.Path()": pathlib.Path,
    "np.array(2)": lambda: np.array(2),
    "np.ones(3)": lambda: np.ones(3),
    "np.array(['x'])": lambda: np.array(["x"]),
    "np.float32(nan)": lambda: np.float32("nan"),
    "np.int64(2)": lambda: np.int64(2),
    "tf.constant(2)": lambda: tf.constant(2),
    "a list in lists": _deep,
    "a list of itself": _endless,
    "a layer": lambda: keras.layers.Dense(2),
    "a mesh": lambda: tap.split(2),
    "a pipeline": lambda: tap.Pipeline(2, 2),
}
"""Values that an argument may have, by what is said of them."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that is valid with these arguments, each of which may be made odd.

    Attributes:
        name: as users write it.
        do: gets the arguments by name, and uses what the call returns.
    """

    name: str
    do: Callable[..., Any]
    arguments: Mapping[str, Any]


def _build() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, name="a"), keras.layers.Dense(2, name="b")],
        name="m",
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


# --- the calls ---------------------------------------------------------------------------


def values() -> Iterator[Call]:
    """What only makes values."""
    device = {"flops": {"float32": 1e9}, "memory_bytes": 1e9, "memory_bandwidth": 1e9}
    node = tap.Node(tap.Device(**device))
    level = {"count": 2, "bandwidth": 1e9, "latency_s": 1e-6}
    yield _call(tap.split, shape=[2, 2])
    yield _call(tap.Mesh, axis_names=("data",), shape=(2,))
    yield _call(tap.Shard, dim=0)
    yield _call(tap.Partial)
    yield _call(tap.Device, **device)
    yield _call(tap.Level, **level)
    yield _call(tap.Node, device=node.device)
    yield _call(tap.Cluster, name="ours", nodes=(node,))
    yield _call(tap.Pipeline, stages=2, microbatches=2)
    yield _call(tap.Schedule, orders=samples.planned_in_stages().stages.schedule.orders)
    yield _call(tap.Offload)
    yield _call(tap.Trials)
    yield _call(tap.shard, pattern="a/kernel", dim=1, axis="model")
    yield _call(tap.replicate, pattern="a/kernel")
    yield _call(tap.fsdp, axis="data", pattern=".*kernel", stage=3, keep=True)
    yield _call(tap.context_parallel, axis="data")
    yield _call(tap.shard_output, pattern="a", dim=1, axis="model")
    yield _call(tap.stage, pattern="a", index=1)
    yield Call("batch", lambda axis: tap.batch(axis), {"axis": "data"})
    yield _call(tap.keep, plan=samples.planned(), pattern="m/a/kernel")
    yield _call(tap.from_layout_map, mapping={"a/kernel": (None, "model")})
    relu = next(op for op in samples.step(8).ops if op.type == "Relu")
    yield _call(tap.make_rule, op=relu, notation="a b -> a b", fields=_ABSENT)
    yield _call(tap.register_rule, op_type="Mine", function=lambda op, _: None, replace=True)
    yield _call(tap.Checkpoint, folder="run")
    yield _call(tap.Timeline, path="timeline.json")
    yield _call(tap.Monitor, folder="monitor")
    yield _call(tap.on_first_rank, callback=keras.callbacks.Callback())
    yield _call(tap.on_every_rank, callback=keras.callbacks.Callback())
    yield Call("layers.lay", _laid, {"spec": [Shard(1)]})


def plans() -> Iterator[Call]:
    """Methods of plans and schedules."""
    plan = samples.planned()
    plan.save("plan.json")
    (schedule := samples.planned_in_stages().stages.schedule).save("schedule.csv")
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.init}
    yield Call("Plan", lambda **given: tap.Plan(**given).summary(), fields)
    yield _call(tap.Plan.load, called="Plan.load", path="plan.json")
    yield _call(tap.Plan.from_json, name="Plan.from_json", text=plan.to_json(), source="x")
    for method, given in (
        ("save", {"path": "again.json"}),
        ("to_html", {"path": "page.html", "timeline": None}),
        ("summary", {}),
        ("explain", {"name": "m/a/kernel"}),
        ("diff", {"other": plan}),
    ):
        yield _call(getattr(plan, method), called=f"Plan.{method}", **given)
    yield _call(tap.Schedule.load, called="Schedule.load", path="schedule.csv")
    yield _call(tap.Schedule.parse, called="Schedule.parse", text=str(schedule))
    yield _call(schedule.save, called="Schedule.save", path="again.csv")


def of_models() -> Iterator[Call]:
    """What needs a model."""
    with tap.auto_parallel(2, planner=None, verbose=0):
        parallel = _build()
    parallel.train_on_batch(X, Y)
    saved = tap.save_checkpoint(parallel, "saved")
    options = {
        name: tap.Options.__dataclass_fields__[name].default for name in Keywords.__annotations__
    }
    yield Call("auto_parallel", _entered, {"mesh": 2, "constraints": (), **options})
    yield Call(
        "AutoParallel",
        lambda **given: tap.AutoParallel(**given),
        {"mesh": 2, "constraints": (), **options},
    )
    yield Call("Options", lambda **given: _entered(2, options=tap.Options(**given)), options)
    yield Call(
        "parallelize",
        lambda **given: tap.parallelize(_build(), **given),
        {"mesh": 2, "constraints": (), **options},
    )
    yield _call(tap.plan, build=_build, batch=(X, Y), mesh=2, cluster="dgx-a100", planner="tap")
    yield _call(tap.plan_of, model=parallel)
    # What data mean is for the user's model to judge: they are always valid.
    yield Call("coverage", lambda model: tap.coverage(model, X, Y), {"model": parallel})
    yield Call("function", _stepped, {"step": lambda x: x * 2.0, **_FUNCTION})
    yield Call(
        "GraphProgram",
        lambda **given: tap.GraphProgram(_graph(), **given),
        {"mesh": 2, "constraints": (), **options},
    )
    yield Call(
        "verify",
        lambda model, batch_size: tap.verify(model, X, Y, steps=1, batch_size=batch_size),
        {"model": parallel, "batch_size": 8},
    )
    yield Call(
        "shard_data",
        lambda model, batch: tap.shard_data(model, _make_data, batch),
        {"model": parallel, "batch": (X, Y)},
    )
    yield _call(tap.save_checkpoint, model=parallel, folder="run")
    yield _call(tap.restore_checkpoint, model=parallel, path=saved)


_ABSENT = object()


def _call(function: Callable[..., Any], /, called: str = "", **valid: Any) -> Call:
    """All parameters of `function`: those that are given, and others with their defaults."""
    parameters = inspect.signature(function).parameters
    found = {
        key: valid[key] if key in valid else parameter.default
        for key, parameter in parameters.items()
        if valid.get(key) is not _ABSENT and parameter.kind is not parameter.VAR_KEYWORD
    }
    absent = {k for k, v in found.items() if v is inspect.Parameter.empty or "factory" in repr(v)}
    given = {key: value for key, value in found.items() if key not in absent}
    return Call(called or function.__name__, lambda **given: repr(function(**given)), given)


def _entered(*arguments: Any, **keywords: Any) -> None:
    with tap.auto_parallel(*arguments, **keywords) as session:
        assert repr(session.options)


_FUNCTION = {
    "input_signature": None,
    "autograph": False,
    "jit_compile": False,
    "reduce_retracing": False,
}


def _stepped(**given: Any) -> None:
    with tap.auto_parallel(2, planner=None, verbose=0):
        tap.function(**given)


def _graph() -> tf.Graph:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (4, 4), "x")
        tf.matmul(x, x, name="y")
    return graph


def _laid(spec: Any) -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    tap.layers.lay(layer.kernel, spec)


def _make_data(index: int, count: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors((X[: 8 // count], Y[: 8 // count]))


def _of_calls(make: Callable[[], Iterator[Call]]) -> Callable[[str], Case]:
    def prepare(folder: str) -> Case:
        calls = list(make())
        options = [(call, name) for call in calls for name in call.arguments]

        def attempt(draw: Draw) -> None:
            call, name = draw.choice(options)
            said = draw.choice([*ODD])
            draw.tell(f"{call.name}({name}={said})")
            call.do(**{**call.arguments, name: ODD[said]()})

        for call in calls:
            call.do(**call.arguments)
        return attempt

    return prepare


# --- the command line --------------------------------------------------------------------

WORDS = (
    *(
        "",
        "x",
        "-1",
        "0",
        "1",
        "2",
        "3",
        "nan",
        "inf",
        "1e999",
        "9" * 5000,
        "\udcff",
        "é",
        "=",
        ":",
    ),
    *(",", "2x", "2x2", "0x0", "data=2", "data=2,data=2", "x" * 100_000, ".", "/dev/null", "none"),
    *("plan.json", "cluster.toml", "plan.json:f", "os:getcwd", "os:path", "99999999999999999999"),
    *("1 GB", "-1 GB", "(", "a" * 300, "dgx-a100", "auto", "1f1b"),
)
"""What an option may be given."""

COMMANDS = (
    ["show", "plan.json"],
    ["explain", "plan.json", "layer_1/kernel"],
    ["diff", "plan.json", "plan.json"],
    ["compare", "plan.json", "plan.json"],
    ["report", "plan.json", "-o", "page.html"],
    ["timeline", "plan.json", "-o", "timeline.json"],
    ["clusters", "dgx-a100"],
    ["plan", "model.py:build", "--batch-size", "8", "--mesh", "2", "--cluster", "dgx-a100"],
    ["estimate", "model.py:build", "--batch-size", "8", "--mesh", "2", "--cluster", "dgx-a100"],
)
"""Valid commands, of those that start no processes."""

_SCRIPT = """
import keras
def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, name="a")], name="m")
    model.compile("sgd", "mse", jit_compile=False)
    return model
"""


def _commands(folder: str) -> Case:
    plan = samples.planned_with_report().to_json()
    os.environ["TFPAR_PLAN_CACHE"] = ""
    parsers = next(
        a.choices for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)
    )

    def put_files() -> None:  # which the case before may have overwritten
        pathlib.Path("plan.json").write_text(plan)
        pathlib.Path("model.py").write_text(_SCRIPT)

    def attempt(draw: Draw) -> None:
        put_files()
        argv = [*draw.choice(COMMANDS)]
        options = [a for a in parsers[argv[0]]._actions if a.option_strings and a.dest != "help"]
        if options and draw.random() < 0.7:
            option = draw.choice(options)
            argv.append(option.option_strings[-1])
            argv += [draw.choice(WORDS)] if option.nargs != 0 else []
        else:
            argv[draw.randrange(1, len(argv))] = draw.choice(WORDS)
        draw.tell(argv)
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                commanded(*argv)
            except SystemExit:  # of argparse, which has said what is wrong
                raise TfparError("refused") from None

    put_files()
    for argv in COMMANDS:
        commanded(*argv)
    return attempt


KINDS = (
    Kind("values", _of_calls(values)),
    Kind("plans", _of_calls(plans)),
    Kind("calls", _of_calls(of_models)),
    Kind("command", _commands),
)
