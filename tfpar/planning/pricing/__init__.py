"""The price of a plan: its whole step, in sub-batches, stages and shares."""
