"""Inter-operator parallelism: the pipeline of a step and its machines (auto3d §4, Rhino §5)."""
