"""Coordination of ranks that are processes: their place in the job, and messages between steps."""
