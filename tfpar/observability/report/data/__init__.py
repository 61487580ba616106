"""What there is to show of a plan, as one value that every view reads."""
