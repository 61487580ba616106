"""Timelines of steps: who computes, communicates and waits, and when; for Perfetto to show."""
