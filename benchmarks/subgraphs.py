"""What the search folds of the models of TAP's Table I.

    python -m benchmarks.subgraphs [--case gpt3] [--json FILE]

Published sizes, batch 8; no weight is given memory.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras

import tfpar as tap
from benchmarks import models
from benchmarks.results import save
from tfpar.compile import simplify_step
from tfpar.ir.constants import Constants
from tfpar.ir.graph_nodes import cluster
from tfpar.ir.planning_graph import planning_graph
from tfpar.ir.roles import Roles
from tfpar.ir.shared_subgraphs import Signatures, prune_graph, repeated_blocks
from tfpar.planning.folding.fold import fold
from tfpar.tf.capture.step import argument_specs
from tfpar.tf.keras.adapter import parallel_model

BATCH = 8
CASES = (
    "resnet50",
    "clip_base",
    "widenet_huge",
    "vit_huge",
    "vmoe_15b",
    "wav2vec2_large",
    "bert_large",
    "t5_large",
    "gpt3",
    "switch_c",
)


def measure(case: str) -> dict[str, Any]:
    """Ops and GraphNodes of the step without its update, and what is left of them when folded."""
    keras.backend.clear_session()
    with tap.auto_parallel([1], planner=None):
        model = models.compile_model(models.FULL[case]())
    specs = argument_specs((models.batch_of(model, BATCH),))
    step = parallel_model(model).capture_gradients(specs)
    simplify_step(step)
    graph = planning_graph(step.graph, step.gradients).graph
    roles = Roles.of(graph)
    nodes = cluster(graph, roles)
    signatures = Signatures(Constants(graph), roles)
    repeats = repeated_blocks(nodes, prune_graph(nodes, signatures), signatures)
    folded = fold(graph, repeats, signatures)
    return {
        "case": case,
        "nodes": len(nodes.nodes),
        "weighted_nodes": len(nodes.weighted()),
        "ops": len(graph.ops),
        "folded_ops": len(folded.graph.ops),
        "weights": sum(v.trainable for v in graph.variables),
        "placements": sum(any(v.trainable for v in group) for group in folded.groups),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    for case in options.case or CASES:
        rows.append(measure(case))
        print(rows[-1], flush=True)
    save(options.json, rows)


if __name__ == "__main__":
    main()
