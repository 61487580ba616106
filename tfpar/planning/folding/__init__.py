"""The folded graph: one of each block that repeats is searched for all of them (TAP §IV-C)."""
