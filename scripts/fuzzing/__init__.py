"""Fuzzing: mutated files and odd arguments, each tried in a process with limits."""
