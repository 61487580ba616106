"""Many processes: which rank this one is, and what ranks say to each other outside of steps."""
