"""Pipelines: the time of a step over links, memory, and the first step.

    sudo python -m benchmarks.pipeline --links       # 4 nodes over 100 and 1,000 Mbit/s
    python -m benchmarks.pipeline --in-process       # the same contenders in one process
    python -m benchmarks.pipeline --memory           # peaks by schedule and microbatches
    python -m benchmarks.pipeline --first-step       # of 24 layers in 4 stages

`--json FILE` writes the rows.
"""
