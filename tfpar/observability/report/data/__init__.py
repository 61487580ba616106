"""Data of a plan's report: one value, `Report`, that every view reads."""
