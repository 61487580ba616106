"""The report of a plan as one file of HTML."""
