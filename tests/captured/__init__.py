"""Tests of `cost`, `ir` and `propagation` on functions and models that TensorFlow traces here and
now. Those beside them, in `tests/cost` and so on, do without."""
