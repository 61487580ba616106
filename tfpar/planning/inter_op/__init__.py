"""Inter-operator parallelism: which pipeline a step runs in, on which machines (auto3d §4, Rhino §5)."""
