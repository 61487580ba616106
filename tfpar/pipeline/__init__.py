"""Pipelines: stages, microbatches, tasks and their schedules. Free of TensorFlow."""

from tfpar.pipeline.pipeline import AUTO, Pipeline
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.tasks import Task

__all__ = ["AUTO", "Pipeline", "Schedule", "Task"]
