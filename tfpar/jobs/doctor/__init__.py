"""Diagnosis of a machine: what is installed, what of it works, and how to repair the rest.

This is `tfpar doctor`. `jobs.doctor.software` and `jobs.doctor.machine` look at what is there,
`jobs.doctor.trials` trains on it. TensorFlow is only loaded in separate processes, which may fail
or hang in whatever way they like.

`jobs.doctor.software` and `jobs.doctor.machine` look at what is there, `jobs.doctor.trials` trains
on it. TensorFlow is only ever loaded in processes of their own, which may fail or hang in whatever
way they like.
"""

from tfpar.jobs.doctor.finding import Finding, Status

__all__ = ["Finding", "Status"]
