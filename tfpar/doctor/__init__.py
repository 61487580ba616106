"""What is on this machine, what of it works, and how to mend the rest: `tfpar doctor`.

`software` and `machine` look at what is there, `trials` trains on it. TensorFlow is only ever
loaded in processes of their own, which may fail or hang in whatever way they like.
"""

from tfpar.doctor.finding import Finding, Status

__all__ = ["Finding", "Status"]
