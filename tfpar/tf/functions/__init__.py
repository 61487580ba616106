"""Functions of tensors on a mesh: their arguments, traces, and loops over data."""
