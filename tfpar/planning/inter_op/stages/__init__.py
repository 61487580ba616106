"""Stages of a pipeline: which part of a step runs in which of them."""
