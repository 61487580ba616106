"""The program of stages as Rhino §5.1 states it, with big M, one F for each edge.

The paper's F counts an edge. That a tensor is sent once to each stage that reads it takes, besides,
R_jk: unit j is in stage k, and S_tk: tensor t is sent there.
"""

from __future__ import annotations

import pulp

from tfpar.planning.deadline import Deadline
from tfpar.planning.inter_op.stages.units import UnitGraph
from tfpar.planning.solver import solver


def least_sent_by_big_m(graph: UnitGraph, num_stages: int, most_seconds: float) -> float:
    """What the best assignment sends whose stages take no more than that."""
    program = pulp.LpProblem("big_m", pulp.LpMinimize)
    units, stages, big = range(len(graph.units)), range(num_stages), num_stages
    stage = [program.add_variable(f"B_{i}", 0, num_stages - 1, pulp.LpInteger) for i in units]
    within = [
        [program.add_variable(f"R_{i}_{k}", cat=pulp.LpBinary) for k in stages] for i in units
    ]
    for i, unit in enumerate(graph.units):
        program += pulp.lpSum(within[i]) == 1
        for k in stages:
            program += stage[i] - k <= big * (1 - within[i][k])
            program += k - stage[i] <= big * (1 - within[i][k])
        if unit.stage is not None:
            program += stage[i] == unit.stage
    for k in stages:
        program += pulp.lpSum(within[i][k] for i in units) >= 1
        seconds = pulp.lpSum(within[i][k] * graph.units[i].seconds for i in units)
        program += seconds <= most_seconds * (1 + 1e-9)
    differs = {}
    for i, j in graph.edges:
        differs[i, j] = program.add_variable(f"F_{i}_{j}", cat=pulp.LpBinary)
        program += differs[i, j] <= stage[j] - stage[i]
        program += stage[j] - stage[i] <= big * differs[i, j]
    total = []
    for t, flow in enumerate(graph.flows):
        for k in stages:
            sent = program.add_variable(f"S_{t}_{k}", 0, 1)
            for j in flow.readers:
                program += sent >= within[j][k] + differs[flow.source, j] - 1
            total.append(flow.num_bytes * sent)
    for w, tie in enumerate(graph.ties):
        for k in stages:
            read = program.add_variable(f"U_{w}_{k}", 0, 1)
            for j in tie.readers:
                program += read >= within[j][k]
            total.append(tie.num_bytes * read)
        total.append(-tie.num_bytes)
    program.setObjective(pulp.lpSum(total))
    program.solve(solver(Deadline()))
    assert program.status == pulp.LpStatusOptimal
    return float(pulp.value(program.objective) or 0.0)
