"""Intra-operator parallelism: planners for the layout of the ranks of one stage."""
