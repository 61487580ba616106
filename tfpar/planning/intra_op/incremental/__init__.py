"""Incremental pricing of candidates: only what a candidate changes is propagated again."""
