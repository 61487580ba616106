"""Pipelines: stages, microbatches, tasks and their schedules. Free of TensorFlow."""

from tfpar.pipeline.pipeline import AUTO, SEARCHES, Pipeline
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.tasks import Task

__all__ = ["AUTO", "SEARCHES", "Pipeline", "Schedule", "Task"]
