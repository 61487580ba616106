"""Backends that run local programs: all ranks in one process, or one per process."""
