"""Problems that differ in fields of their parts."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpar.planning.problem import Problem


def changed(problem: Problem, **fields: Any) -> Problem:
    """`problem` with other values of some fields, in whichever parts these are; `fixed` are the
    specs of variables that are given."""
    if "fixed" in fields:
        problem = problem.with_given(variables=fields.pop("fixed"))
    if "cluster" in fields:
        problem = problem.with_cluster(fields.pop("cluster"))
    if "meshes" in fields:
        problem = problem.with_meshes(fields.pop("meshes"))
    for part, change in (
        (problem.step, Problem.with_step),
        (problem.storage, Problem.with_storage),
        (problem.batch, Problem.with_batch),
        (problem.aim, Problem.with_aim),
        (problem.given, Problem.with_given),
    ):
        names = {field.name for field in dataclasses.fields(part)} & fields.keys()
        problem = (
            change(problem, **{name: fields.pop(name) for name in names}) if names else problem
        )
    assert not fields, f"no fields of a problem: {[*fields]}"
    return problem
